"""Retention: who may stay, what returns to the file system, and what others see while it happens."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import branch as sealing
from holdfast.agent import retention, tending
from holdfast.agent.policy import Moment
from holdfast.errors import BadOption, Forgotten, InDoubt, ReadOnly, UnknownRevision
from tests import warm
from tests.agent import child
from tests.agent.test_clone import picture, sound
from tests.agent.test_removal import large

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened


@pytest.fixture
def seals(monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 6)


def talk(store, name="a", count=30, size=200, **more):
    agent = store.agent(name, **more)
    messages = agent.state.setdefault("messages", [])
    for number in range(count):
        messages.append(f"{number} " + "x" * size)
        agent.checkpoint(f"m{number}")
    return agent


def labels(agent):
    return [checkpoint.label for checkpoint in agent.log()]


# -- the rules ----------------------------------------------------------------------------------------------


def at(*texts):
    """Moments of a line, newest first, at these times."""
    times = [datetime.fromisoformat(text).replace(tzinfo=UTC) for text in texts]
    return [Moment(n, int(time.timestamp() * 1e6), f"at {n}") for n, time in enumerate(times, 1)]


def kept(policy, line, now="2026-03-10T12:00", branch="main"):
    now_us = int(datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp() * 1e6)
    return sorted({n for n, _ in policy.keeps({branch: line}, line, now_us)})


def test_buckets_keep_the_newest_of_each_span_that_has_one():
    line = at(
        "2026-03-10T11:59", "2026-03-10T11:01", "2026-03-10T09:30", "2026-03-09T23:00", "2026-03-09T01:00",
        "2026-03-08T23:59", "2026-03-01T00:00",
    )  # fmt: skip
    assert kept(Policy(hourly=2), line) == [1, 3]
    assert kept(Policy(hourly=3), line) == [1, 3, 4]
    assert kept(Policy(daily=2), line) == [1, 4]
    assert kept(Policy(daily=3), line) == [1, 4, 6]
    assert kept(Policy(weekly=2), line) == [1, 6]  # 8 March 2026 was a Sunday
    assert kept(Policy(last=2), line) == [1, 2]
    assert kept(Policy(newer_than=timedelta(hours=3)), line) == [1, 2, 3]
    assert kept(Policy(labels=["at [45]"]), line) == [4, 5]
    assert kept(Policy(branches=["m?in"]), line) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(Policy(branches=["other"]), line) == []


def test_rules_add_up():
    line = at("2026-03-10T11:59", "2026-03-10T11:01", "2026-03-09T23:00", "2026-03-01T00:00")
    one, other = Policy(last=1), Policy(daily=2, labels=["at 4"])
    both = Policy(last=1, daily=2, labels=["at 4"])
    assert kept(both, line) == sorted({*kept(one, line), *kept(other, line)}) == [1, 3, 4]


def test_a_clock_that_jumps_back_takes_nothing_from_a_bucket():
    line = at("2026-03-09T10:00", "2026-03-10T11:00", "2026-03-09T09:00")
    assert kept(Policy(daily=2), line) == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"tags": False}, {"last": -1}, {"last": True}, {"hourly": 1.5}, {"labels": "release"}, {"labels": [""]},
        {"branches": [1]}, {"newer_than": 5}, {"newer_than": timedelta(seconds=-1)}, {"last": 1, "tags": 1},
    ],
)  # fmt: skip
def test_a_policy_that_says_nothing_or_nonsense_is_refused(wrong):
    with pytest.raises(BadOption):
        Policy(**wrong)


def test_a_policy_comes_back_as_it_was_written_down():
    for policy in (
        Policy(last=3),
        Policy(hourly=1, daily=2, weekly=3, labels=["a*"], branches=["b"], newer_than=timedelta(days=2), tags=False),
    ):
        assert Policy.from_json(policy.to_json()) == policy


# -- what stays ---------------------------------------------------------------------------------------------


def test_last_n_of_each_branch_stay_and_the_log_goes_over_the_gaps(store, seals):
    agent = talk(store, count=20)
    side = agent.branch("side", at="m9")
    talk(store, count=3, branch="side")
    agent.tag("first", "m0")
    report = store.retain(Policy(last=2, labels=["m5"]))
    assert report.done
    assert (report.kept, report.removed) == (6, 17)
    assert labels(agent) == ["m19", "m18", "m5", "m0"]
    assert labels(side) == ["m2", "m1", "m5", "m0"]
    assert [entry.why for entry in report.agents[0].kept if entry.label == "m5"] == [("label m5",)]
    assert agent.at("#6").label == "m5"
    assert agent.at("m5").cut
    with pytest.raises(UnknownRevision, match="forgotten"):
        agent.at("#7")
    sound(store)
    again = store.retain(Policy(last=3))
    assert [entry.label for entry in again.agents[0].removed] == []
    assert labels(agent) == ["m19", "m18", "m5", "m0"]
    store.retain(Policy(last=1, tags=False))
    assert labels(agent) == ["m19"]
    assert agent.tags() == {}
    sound(store)


def test_what_is_kept_of_a_line_is_not_abandoned(store, seals):
    agent = talk(store)
    agent.rollback("m25")
    agent.checkpoint("other")
    store.retain(Policy(last=2, labels=["m4", "m12", "m28"]))
    assert labels(agent) == ["other", "m25", "m12", "m4"]
    assert [one.label for one in agent.abandoned()] == ["m29"]  # its writer is still there
    assert store.agents()[0].abandoned == 1
    assert [one.label for one in agent.log(at="m12")] == ["m12", "m4"]
    assert [one.label for one in agent.log(1, at="m25")] == ["m25"]
    found = {one.label: one for one in agent.log(all=True)}
    assert found["m12"].previous_id == found["m4"].id
    assert found["other"].previous_id == found["other"].parent_id == found["m25"].id
    assert found["m4"].previous_id == ""


def test_a_clone_of_a_history_with_gaps_has_the_same_gaps(store, seals):
    agent = talk(store, count=20)
    store.retain(Policy(last=1, labels=["m3", "m9"]))
    store.clone("a", "b")
    assert labels(store.agent("b", readonly=True)) == labels(agent) == ["m19", "m9", "m3"]
    store.retain(Policy(last=1), ["a"])
    assert labels(store.agent("b", readonly=True)) == ["m19", "m9", "m3"]
    store.retain(Policy(last=2), ["b"])
    assert labels(store.agent("b", readonly=True)) == ["m19", "m9", "m3"]  # the other one sees it, too
    store.retain(Policy(last=2), ["a", "b"])
    assert labels(store.agent("b", readonly=True)) == ["m19", "m9"]
    sound(store)


def test_the_newest_good_one_stays_where_the_head_is_not(store):
    agent = talk(store, count=10)
    agent.mark("m9", "corrupt", "an example")
    agent.mark("m8", "suspect", "an example")
    report = store.retain(Policy(last=1))
    assert {entry.label: entry.why for entry in report.agents[0].kept} == {
        "m9": ("head of main", "last 1"),
        "m7": ("newest good one of main",),
    }


@holdfast.tool(name="retention.look", effect="read")
def look(where):
    return where


@holdfast.tool(name="retention.act")
def act(what):
    raise TimeoutError


@holdfast.durable
def long_way(agent, stop):
    for number in range(6):
        look(number)
        agent.state["at"] = number
        agent.checkpoint(f"way {number}")
        if number == 3 and stop:
            raise KeyboardInterrupt
    return "there"


def test_a_run_that_has_not_finished_can_go_on(store, seals):
    agent = talk(store, count=5)
    with pytest.raises(KeyboardInterrupt):
        agent.run(long_way, True)
    agent.close()
    report = store.retain(Policy(last=1))
    assert {entry.label for entry in report.agents[0].kept} == {"run long_way", "way 0", "way 1", "way 2", "way 3"}
    assert "long_way, which has not finished" in str(report.agents[0].kept[-1].why)
    agent = store.agent("a")
    with pytest.raises(KeyboardInterrupt):
        agent.run(long_way, True)
    sound(store)


def test_the_checkpoint_before_an_effect_in_doubt_stays(store):
    agent = talk(store, count=5)
    with agent, pytest.raises((InDoubt, TimeoutError)):
        act("something")
    agent = store.agent("a")
    for number in range(5):
        agent.state["messages"].append("more")
        agent.checkpoint(f"more {number}")
    report = store.retain(Policy(last=1))
    assert {entry.label: entry.why for entry in report.agents[0].kept} == {
        "more 4": ("head of main", "last 1"),
        "m4": ("before retention.act, which is in doubt",),
    }
    assert agent.effects()[-1].condition == "in doubt"
    sound(store)


def test_a_dry_run_reads_only(store_path):
    with holdfast.open(store_path) as store:
        talk(store, count=20)
    with holdfast.open(store_path, readonly=True) as store:
        report = store.retain(Policy(last=3), dry_run=True)
        assert (report.done, report.kept, report.removed) == (False, 3, 17)
        assert report.freed_bytes > 0
        with pytest.raises(ReadOnly):
            store.retain(Policy(last=3))


# -- space --------------------------------------------------------------------------------------------------


def blocks(path):
    return sum(file.stat().st_blocks for file in path.rglob("*") if file.is_file()) * 512


def test_space_returns_to_the_file_system(store_path):
    noise = random.Random(1)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["notes"] = {}
        for number in range(60):
            agent.state["notes"][f"k{number % 5}"] = noise.randbytes(20_000).hex()
            agent.state["weights"] = [noise.randbytes(300_000), noise.randbytes(300_000)]
            agent.checkpoint(f"m{number}")
        before = blocks(store_path)
        expected = store.retain(Policy(last=2), dry_run=True).freed_bytes
        report = store.retain(Policy(last=2))
        sizes = store.stats()["bytes"]
        assert (sizes["free"], sizes["log"]) == (0, 0)
        left = blocks(store_path)
        assert left < before / 10
        assert 0.7 < expected / report.freed_bytes < 1.4
        assert (before - left) > 0.8 * report.freed_bytes
        counts = store.stats()["counts"]
        assert (counts["pack"], counts["chunk"]) == (2, 4)
        assert len(list((store_path / "packs").iterdir())) == 2
        sound(store)


def test_a_pack_of_which_little_is_needed_is_written_anew(store, store_path):
    noise = random.Random(2)
    agent = store.agent("a")
    agent.state["weights"] = {str(n): noise.randbytes(300_000) for n in range(8)}  # one pack
    agent.checkpoint("all")
    (pack,) = (store_path / "packs").iterdir()
    held = agent.at("all").state
    agent.state["weights"] = {"3": agent.state["weights"]["3"]}
    agent.checkpoint("one")
    whole = pack.stat().st_size
    store.retain(Policy(last=1))
    (left,) = (store_path / "packs").iterdir()
    assert left != pack
    assert left.stat().st_size < whole / 6
    assert len(agent.at().state["weights"]["3"]) == 300_000
    with pytest.raises(Forgotten):
        _ = held["weights"]
    sound(store)


def test_metadata_that_nobody_names_goes(store):
    for config in range(5):
        with store.agent("a", config={"version": config}) as agent:
            agent.state["at"] = config
            agent.checkpoint(f"with {config}")
    named = [one._manifest.metadata for one in store.agent("a").log()]
    assert len(store._db.view.has_nodes(named)) == 5
    store.retain(Policy(last=2))
    assert store._db.view.has_nodes(named) == set(named[:2])
    assert [c.metadata["config"] for c in store.agent("a").log()] != []
    sound(store)


def test_files_that_no_row_names_go_after_an_hour(store, store_path):
    talk(store, count=5)
    packs = store_path / "packs"
    old, new = packs / f"{'0' * 8}-0000-0000-0000-{'0' * 12}.pack", packs / "tmp-of-now"
    for file in (old, new, packs / f"tmp-{old.name}"):
        file.write_bytes(b"x" * 5000)
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    store.retain(Policy(last=1))
    assert sorted(packs.iterdir()) == sorted([new, packs / f"tmp-{old.name}"])


def compact(fresh, chosen):
    """Make the same states in another agent, one checkpoint each."""
    messages = fresh.state.setdefault("messages", [])
    for checkpoint in chosen:
        messages.extend(holdfast.plain(checkpoint.state)["messages"][len(messages) :])
        fresh.checkpoint(checkpoint.label)
        assert fresh.head.digest == checkpoint.digest


def test_what_stays_takes_little_more_than_in_a_fresh_store(tmp_path):
    noise = random.Random(3)
    with holdfast.open(tmp_path / "kept") as store, holdfast.open(tmp_path / "fresh") as other:
        agent = store.agent("a")
        messages = agent.state.setdefault("messages", [])
        for number in range(600):
            messages.append({"role": "user", "content": noise.randbytes(150).hex()})
            agent.checkpoint(f"m{number}")
        store.retain(Policy(last=50))
        compact(other.agent("a"), agent.log()[::-1])
        ratio = taken(store) / taken(other)
        assert ratio < 1.5, ratio
        assert labels(agent) == labels(other.agent("a"))
        sound(store)


@pytest.mark.parametrize(("seal_after", "size"), [(512, 150), (60, 150), (60, 20)])
def test_keeping_every_tenth(store, monkeypatch, seal_after, size):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", seal_after)
    noise = random.Random(3)
    agent = store.agent("a")
    messages = agent.state.setdefault("messages", [])
    for number in range(200):
        messages.append({"role": "user", "content": noise.randbytes(size).hex()})
        agent.checkpoint(f"m{number}")
    before = taken(store)
    policy = Policy(last=1, labels=["m*0"])
    states = [holdfast.plain(one.state) for one in agent.log() if one.label.endswith("0")]
    report = store.retain(policy)
    assert report.agents[0].freed_bytes == report.freed_bytes
    assert len(agent.log()) == 21
    assert [c.changes()[-1].path[:1] for c in agent.log()] == [("messages",)] * 21
    assert [holdfast.plain(one.state) for one in agent.log()[1:]] == states
    sound(store)
    expected = store.retain(Policy(last=1), dry_run=True).freed_bytes
    freed = store.retain(Policy(last=1)).freed_bytes
    assert expected > freed // 2 > 0
    assert taken(store) < before
    sound(store)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_finishing_what_was_interrupted_takes_no_more_than_doing_it_at_once(store, tmp_path, steps):
    """Wherever it stopped."""

    def noted(store):
        noise = random.Random(3)
        agent = store.agent("a")
        notes = agent.state.setdefault("notes", [noise.randbytes(60).hex() for _ in range(500)])
        for number in range(60):
            notes[noise.randrange(500)] = number
            agent.checkpoint(f"m{number}")
        return agent

    def stop_after(left):
        def pace():
            nonlocal left
            left -= 1
            if left < 0:
                raise Stopped

        return pace

    agent, policy = noted(store), Policy(last=1, labels=["m*0"])
    with holdfast.open(tmp_path / "other") as other:
        noted(other)
        other.retain(policy)
        at_once = taken(other)
    with pytest.raises(Stopped):
        retention.follow(store, [(agent._row, policy)], stop_after(steps))
    store.retain(policy)
    assert len(agent.log()) == 7
    assert taken(store) <= at_once + 2 * 4096
    sound(store)
    with pytest.raises(Stopped):
        retention.follow(store, [(agent._row, Policy(last=1))], stop_after(steps))
    store.remove("a")
    assert not any(store.stats()["counts"][table] for table in ("checkpoint", "segment", "node"))


def taken(store):
    sizes = store.stats()["bytes"]
    return sizes["catalog"] - sizes["free"]


# -- others meanwhile ---------------------------------------------------------------------------------------


def test_a_writer_in_another_process_goes_on(store, store_path, seals):
    process = child.start("retained", store_path, "a", 150)
    assert child.line(process) == "ready"
    process.stdin.write("go\n")
    process.stdin.flush()
    removed = 0
    while process.poll() is None and removed < 20:
        removed += store.retain(Policy(last=5)).removed
    answer = child.line(process)
    child.end(process)
    assert answer == "150 as they were"
    store.retain(Policy(last=5))
    sound(store)
    agent = store.agent("a")
    assert len(agent.log()) == 5
    assert len(agent.state["messages"]) == 150


def test_a_live_state_that_was_rolled_back_is_saved_whole(store, seals):
    agent = talk(store, count=8, size=20_000)
    agent.rollback("m3")
    store.retain(Policy(last=1))  # what the state was rolled back from is sealed, and the state counts on it
    for number in range(8):
        agent.state["messages"].append(f"then {number}")
        agent.checkpoint(f"n{number}")
    sound(store)
    agent.close()
    store.retain(Policy(last=1))
    assert len(store.agent("a").state["messages"]) == 12
    sound(store)


def test_sections_that_were_never_touched_can_be_read_after_it(store_path, seals):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["early"] = ["x" * 50_000]
        agent.state["messages"] = []
        agent.checkpoint("first")
        talk(store, count=9)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        reader = store.agent("a", readonly=True)
        held = agent.at("m8")
        state = held.state
        process = child.start("retain", store_path, 1)
        assert child.line(process) == "removed 9"
        child.end(process)
        assert len(agent.state["messages"]) == 9
        assert len(agent.state["early"][0]) == 50_000
        assert len(reader.state["messages"]) == len(state["messages"]) == 9
        agent.checkpoint("on")
        sound(store)


def test_a_reader_of_what_goes_gets_an_error_and_never_something_else(store, seals):
    agent = talk(store, count=20, size=5_000)
    held = [agent.at(f"m{number}") for number in (0, 3, 9, 19)]
    half = agent.at("m7").state
    states = [one.state for one in held]
    assert len(half["messages"]) == 8
    store.retain(Policy(last=1))
    for state in states[:3]:
        with pytest.raises(Forgotten) as caught:
            _ = state["messages"]
        assert caught.value.kind == "forgotten"
    assert len(states[3]["messages"]) == 20
    assert len(half["messages"]) == 8  # it was read before
    with pytest.raises(UnknownRevision):
        agent.rollback(held[1])
    with pytest.raises(UnknownRevision):
        agent.branch("new", at=held[1])
    with pytest.raises(UnknownRevision):
        agent.tag("new", held[1])
    sound(store)


def test_two_at_once(store_path, seals):
    with holdfast.open(store_path) as store:
        for name in "abc":
            large(store, name, count=30, seed=ord(name)).close()
        before = {name: picture(store, name)["all"] for name in "abc"}
    processes = [child.start("retain", store_path, 3) for _ in range(3)]
    answers = [child.line(process) for process in processes]
    for process in processes:
        child.end(process)
    assert all(answer.startswith("removed ") for answer in answers)
    assert sum(int(answer.split()[1]) for answer in answers) > 60
    with holdfast.open(store_path) as store:
        sound(store)
        for name in "abc":
            states = {one["id"]: one["state"] for one in before[name]}
            for checkpoint in store.agent(name, readonly=True).log(all=True):
                assert holdfast.plain(checkpoint.state) == states[checkpoint.id]


# -- by itself ----------------------------------------------------------------------------------------------


def test_a_stored_policy_is_followed_by_whoever_writes(store, monkeypatch):
    monkeypatch.setattr(tending, "PAUSE_S", 0.0)
    store.set_policy(Policy(last=10))
    store.agent("b")
    store.set_policy(Policy(last=1000), "b")
    assert store.policies() == {None: Policy(last=10), "b": Policy(last=1000)}
    agent = talk(store, "a", count=3 * tending.EVERY)
    other = talk(store, "b", count=tending.EVERY)
    deadline = time.monotonic() + 180
    while len(agent.log()) > 10 + tending.EVERY and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(agent.log()) <= 10 + tending.EVERY
    assert len(other.log()) == tending.EVERY
    store.set_policy(None, "b")
    store.set_policy(None)
    assert store.policies() == {}
    assert "policy" not in store._db.view.facts()
    store._tending.stop()
    assert len(agent.state["messages"]) == 3 * tending.EVERY
    sound(store)


def test_without_a_policy_nothing_happens_by_itself(store):
    agent = talk(store, count=tending.EVERY * 2)
    assert len(agent.log()) == tending.EVERY * 2
    assert store.retain().agents == []


def test_closing_stops_it_and_the_next_one_goes_on(store_path, monkeypatch, seals):
    monkeypatch.setattr(tending, "PAUSE_S", 0.0)
    monkeypatch.setattr(tending, "REST_S", 0.2)
    monkeypatch.setattr(tending, "SLICE_S", 0.0)
    with holdfast.open(store_path) as store:
        store.set_policy(Policy(last=5))
        agent = talk(store, count=tending.EVERY)
        agent.close()
    with holdfast.open(store_path) as store:
        sound(store)
        store.retain()
        assert len(store.agent("a").log()) == 5
        sound(store)


# -- dying on the way ---------------------------------------------------------------------------------------


def retaining(path):
    """In a process of its own: one policy after another until killed."""
    sealing.SEAL_CHECKPOINTS = 6
    store = holdfast.open(path)
    print("ready", flush=True)
    sys.stdin.readline()
    for last in (20, 12, 6, 2):
        store.retain(Policy(last=last, labels=["1?"]))
    print("done", flush=True)


@pytest.mark.slow
def test_killed_anywhere_it_leaves_a_sound_store_and_goes_on(tmp_path, seals, rounds):
    import shutil

    original = tmp_path / "original"
    with holdfast.open(original) as store:
        large(store, "a", count=40, seed=8).close()
        store.clone("a", "b")
        large(store, "c", count=30, seed=8).close()
        states = {
            checkpoint.id: holdfast.plain(checkpoint.state)
            for name in "abc"
            for checkpoint in store.agent(name, readonly=True).log(all=True)
        }
    took = 0.0
    noise = random.Random(1)
    for attempt in range(rounds(4, 200)):
        path = tmp_path / f"store{attempt}"
        shutil.copytree(original, path)
        code = f"from tests.agent.test_retention import retaining; retaining({str(path)!r})"
        process = warm.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline().strip() == "ready"
        began = time.monotonic()
        process.stdin.write("\n")
        process.stdin.flush()
        if attempt:
            time.sleep(noise.random() * took)
            process.send_signal(signal.SIGKILL)
        else:
            assert process.stdout.readline().strip() == "done"
            took = time.monotonic() - began
        process.communicate()
        with holdfast.open(path) as store:
            sound(store)
            store.retain(Policy(last=1))
            sound(store)
            for name in "abc":
                for checkpoint in store.agent(name, readonly=True).log(all=True):
                    assert holdfast.plain(checkpoint.state) == states[checkpoint.id]
                store.remove(name)
            counts = store.stats()["counts"]
            tables = ("checkpoint", "segment", "shallow", "node", "chunk", "pack")
            assert [counts[table] for table in tables] == [0] * len(tables)
            assert list((path / "packs").iterdir()) == []
        shutil.rmtree(path)
