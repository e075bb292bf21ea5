"""Retention: what may stay, what returns to the file system, and what others see while it happens."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import background, retention
from holdfast.agent.policy import Moment
from holdfast.errors import BadOption, Forgotten, InDoubt, ReadOnly, UnknownRevision
from holdfast.store.catalog import View
from tests.agent import child
from tests.agent.damage import spoil
from tests.agent.histories import few_between_seals, large, sound, states, swept


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    few_between_seals(monkeypatch.setattr)


def talk(store, name="a", count=30, size=200, **more):
    agent = store.agent(name, **more)
    messages = agent.state.setdefault("messages", [])
    for number in range(count):
        messages.append(f"{number} " + "x" * size)
        agent.checkpoint(f"m{number}")
    return agent


def labels(agent, **more):
    return [checkpoint.label for checkpoint in agent.log(**more)]


# -- the rules ------------------------------------------------------------------------------------------------------


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
    assert kept(Policy(hourly=3), line) == [1, 3, 4]
    assert kept(Policy(daily=3), line) == [1, 4, 6]
    assert kept(Policy(weekly=2), line) == [1, 6]  # 8 March 2026 was a Sunday
    assert kept(Policy(last=2), line) == [1, 2]
    assert kept(Policy(newer_than=timedelta(hours=3)), line) == [1, 2, 3]
    assert kept(Policy(labels=["at [45]"]), line) == [4, 5]
    assert kept(Policy(branches=["m?in"]), line) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(Policy(branches=["other"]), line) == []
    assert kept(Policy(last=1, daily=2, labels=["at 6"]), line) == [1, 4, 6]  # rules add up
    back = at("2026-03-09T10:00", "2026-03-10T11:00", "2026-03-09T09:00")  # a clock that jumps takes nothing away
    assert kept(Policy(daily=2), back) == [1, 2]
    every = Policy(1, 2, 3, 4, labels=["a*"], branches=["b"], newer_than=timedelta(days=2), tags=False)
    assert Policy.from_json(every.to_json()) == every
    assert str(every) == "last 1; hourly 2; daily 3; weekly 4; labels a*; branches b; newer than 2 days; without tags"


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


# -- what stays -----------------------------------------------------------------------------------------------------


def test_last_n_of_each_branch_stay_and_the_log_goes_over_the_gaps(store):
    agent = talk(store, count=20)
    side = agent.branch("side", at="m9")
    talk(store, count=3, branch="side")
    agent.tag("first", "m0")
    report = store.retain(Policy(last=2, labels=["m5"]))
    assert (report.done, report.kept, report.removed) == (True, 6, 17)
    assert labels(agent) == ["m19", "m18", "m5", "m0"]
    assert labels(side) == ["m2", "m1", "m5", "m0"]
    assert [entry.why for entry in report.agents[0].kept if entry.label == "m5"] == [("label m5",)]
    assert agent.at("#6").label == "m5"
    assert agent.at("m5").cut
    with pytest.raises(UnknownRevision, match="forgotten"):
        agent.at("#7")
    assert store.retain(Policy(last=3)).removed == 0  # gaps do not count
    swept(store)
    store.retain(Policy(last=1, tags=False))
    assert labels(agent) == ["m19"]
    assert agent.tags() == {}
    assert [event["what"] for event in agent.events()].count("forget") == 1
    swept(store)


def test_what_is_kept_of_a_line_that_was_left_can_still_be_seen(store):
    agent = talk(store)
    agent.rollback("m25")
    agent.checkpoint("other")
    store.retain(Policy(last=2, labels=["m4", "m12", "m28"]))
    assert labels(agent) == ["other", "m25", "m12", "m4"]
    assert [one.label for one in agent.abandoned()] == ["m29"]  # its writer is still there
    assert store.agents()[0].abandoned == 1
    assert (labels(agent, at="m12"), labels(agent, limit=1, at="m25")) == (["m12", "m4"], ["m25"])
    found = {one.label: one for one in agent.log(all=True)}
    assert found["m12"].previous_id == found["m4"].id
    assert found["other"].previous_id == found["other"].parent_id == found["m25"].id
    assert found["m4"].previous_id == ""
    agent.close()
    store.retain(Policy(last=1, labels=["m28"]))
    reader = store.agent("a", readonly=True)
    assert (labels(reader), labels(reader, all=True)) == (["other"], ["other", "m28"])
    assert [one.label for one in reader.abandoned()] == ["m28"]
    swept(store)


def test_what_a_copy_sees_stays_for_both(store):
    agent = talk(store, count=20)
    store.retain(Policy(last=1, labels=["m3", "m9"]))
    store.copy("a", "b")
    report = store.retain(Policy(last=1), ["a"])
    assert {entry.label: entry.why for entry in report.agents[0].kept} == {
        "m19": ("head of main", "last 1"), "m9": ("seen by b",), "m3": ("seen by b",),
    }  # fmt: skip
    assert labels(agent) == labels(store.agent("b", readonly=True)) == ["m19", "m9", "m3"]
    assert store.retain(Policy(last=2)).removed == 2  # one that both forget is told of both
    assert labels(agent) == labels(store.agent("b", readonly=True)) == ["m19", "m9"]
    swept(store)


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


def test_a_run_that_has_not_finished_can_go_on(store):
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
    assert agent.effects()[-1].status == "in doubt"
    sound(store)


def test_a_dry_run_reads_only_and_where_nothing_goes_no_payload_is_read(store_path):
    with holdfast.open(store_path) as store:
        talk(store, count=20)
    with holdfast.open(store_path, readonly=True) as store:
        report = store.retain(Policy(last=3), dry_run=True)
        assert (report.done, report.kept, report.removed) == (False, 3, 17)
        assert report.freed_bytes > 0
        with pytest.raises(ReadOnly):
            store.retain(Policy(last=3))
    spoil(
        store_path, "UPDATE loose SET data = x'00'; UPDATE segment SET manifests = x'00'"
    )  # whoever reads finds damage
    with holdfast.open(store_path) as store:
        report = store.retain(Policy(last=30, branches=["x"]))
        assert (report.kept, report.removed) == (20, 0)


# -- space ----------------------------------------------------------------------------------------------------------


def blocks(store_path):
    return sum(file.stat().st_blocks for file in store_path.rglob("*") if file.is_file()) * 512


def test_the_directories_that_a_store_knows_are_read_once_for_all_agents(store_path, monkeypatch):
    read, facts = [], View.facts
    monkeypatch.setattr(View, "facts", lambda view: (read.append(view), facts(view))[1])
    with holdfast.open(store_path) as store:
        for number in range(12):
            talk(store, f"a{number}", count=2).close()
            read.clear()
            assert len(store.retain(Policy(last=1), dry_run=True).agents) == number + 1
            assert len(read) <= 2


def test_space_returns_to_the_file_system(tmp_path):
    noise, store_path = random.Random(1), tmp_path / "store"  # on a disk
    with holdfast.open(store_path) as store:
        for number in range(40):
            with closing(store.agent("a", config={"version": number})) as agent:
                agent.state.setdefault("notes", {})[f"k{number % 5}"] = noise.randbytes(20_000).hex()
                agent.state["weights"] = [noise.randbytes(300_000), noise.randbytes(300_000)]
                agent.checkpoint(f"m{number}")
        before = blocks(store_path)
        expected = store.retain(Policy(last=2), dry_run=True).freed_bytes
        report = store.retain(Policy(last=2))
        sizes, left = store.stats()["bytes"], blocks(store_path)
        assert (sizes["free"], sizes["log"], len(list((store_path / "packs").iterdir()))) == (0, 0, 2)
        assert left < before / 8
        assert 0.7 < expected / report.freed_bytes < 1.4
        assert before - left > 0.8 * report.freed_bytes
        assert report.agents[0].freed_bytes == report.freed_bytes
        swept(store)


def test_a_pack_of_which_little_is_needed_is_written_anew_and_goes_when_nobody_can_see_it(store, store_path):
    noise, packs = random.Random(2), store_path / "packs"
    agent = store.agent("a")
    agent.state["weights"] = {str(n): noise.randbytes(300_000) for n in range(8)}  # one pack
    agent.checkpoint("all")
    (pack,) = packs.iterdir()
    held = agent.at("all").state
    agent.state["weights"] = {"3": agent.state["weights"]["3"]}
    agent.checkpoint("one")
    with store._db.moment() as (view, read):
        store.retain(Policy(last=1))
        assert len(list(read.read(view, [name for name, *_ in view.rows("chunk")]))) == 8
    (new,) = set(packs.iterdir()) - {pack}
    assert new.stat().st_size < pack.stat().st_size / 6
    assert len(agent.at().state["weights"]["3"]) == 300_000
    with pytest.raises(Forgotten):
        _ = held["weights"]
    for hours, there in ((0, [new, pack]), (2, [new])):  # somebody may be about to name it
        os.utime(pack, (time.time() - 3600 * hours,) * 2)
        agent.checkpoint("more")
        store.retain(Policy(last=1))
        assert sorted(packs.iterdir()) == sorted(there)
    swept(store)


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


def taken(store):
    sizes = store.stats()["bytes"]
    return sizes["catalog"] - sizes["free"]


def test_what_stays_takes_little_more_than_in_a_fresh_store(store_path, monkeypatch):
    monkeypatch.undo()  # the limits that people have
    noise = random.Random(3)
    with holdfast.open(store_path, durability="batched") as store, holdfast.open(store_path.parent / "fresh") as other:
        agent, fresh = store.agent("a"), other.agent("a")
        messages = agent.state.setdefault("messages", [])
        for number in range(400):
            messages.append({"role": "user", "content": noise.randbytes(150).hex()})
            agent.checkpoint(f"m{number}")
        store.retain(Policy(last=50))
        same = fresh.state.setdefault("messages", [])
        for one in agent.log()[::-1]:
            same.extend(holdfast.plain(one.state)["messages"][len(same) :])
            assert fresh.checkpoint(one.label).digest == one.digest
        assert taken(store) / taken(other) < 1.5
        assert labels(agent) == labels(fresh)
        swept(store)


class Stopped(Exception):
    """Somebody has ended it."""


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_finishing_what_was_interrupted_takes_no_more_than_doing_it_at_once(store, store_path, steps):
    """Wherever it stopped."""

    def noted(store):
        noise = random.Random(3)
        agent = store.agent("a")
        notes = agent.state.setdefault("notes", [noise.randbytes(60).hex() for _ in range(500)])
        for number in range(60):
            notes[noise.randrange(500)] = number
            agent.checkpoint(f"m{number}")
        return agent

    def pace_for(left):
        def pace():
            nonlocal left
            left -= 1
            if left < 0:
                raise Stopped

        return pace

    agent, policy = noted(store), Policy(last=1, labels=["m*0"])
    with holdfast.open(store_path.parent / "other") as other:
        noted(other)
        other.retain(policy)
        at_once = taken(other)
    with pytest.raises(Stopped):
        retention.follow(store, [(agent._row, policy)], pace_for(steps))
    store.retain(policy)
    assert len(agent.log()) == 7
    assert taken(store) <= at_once + 2 * 4096
    swept(store)
    with pytest.raises(Stopped):
        retention.follow(store, [(agent._row, Policy(last=1))], pace_for(steps))
    store.remove("a")
    swept(store)


# -- others meanwhile -----------------------------------------------------------------------------------------------


def test_a_live_state_goes_on_whatever_was_forgotten(store):
    agent = store.agent("a")
    agent.state["early"] = ["x" * 50_000]
    agent.checkpoint("first")
    agent.close()
    agent = talk(store, count=8, size=20_000)
    reader = store.agent("a", readonly=True)
    agent.rollback("m3")
    store.retain(Policy(last=1))  # what the state was rolled back from is sealed, and the state counts on it
    for number in range(8):
        agent.state["messages"].append(f"then {number}")
        agent.checkpoint(f"n{number}")
    agent.undo()
    store.retain(Policy(last=2))  # not what the undo went back to
    agent.state["messages"].append("end")
    for number in range(8):
        agent.checkpoint(f"o{number}")
    store.retain(Policy(last=1))
    assert len(agent.state["early"][0]) == 50_000  # never touched before
    agent.close()
    assert [message[:6] for message in store.agent("a").state["messages"][-3:]] == ["then 5", "then 6", "end"]
    store.retain(Policy(last=1))
    with pytest.raises(Forgotten):
        _ = reader.state["messages"]
    swept(store)


def test_a_reader_of_what_goes_gets_an_error_and_never_something_else(store):
    agent = talk(store, count=20, size=5_000)
    gone, stays, half = (agent.at(label) for label in ("m3", "m19", "m7"))
    assert len(half.state["messages"]) == 8
    states = gone.state, stays.state
    store.retain(Policy(last=1))
    with pytest.raises(Forgotten) as caught:
        _ = states[0]["messages"]
    assert caught.value.kind == "forgotten"
    assert (len(states[1]["messages"]), len(half.state["messages"])) == (20, 8)  # the other one was read before
    for call in (agent.rollback, lambda one: agent.branch("new", at=one), lambda one: agent.tag("new", one)):
        with pytest.raises(UnknownRevision):
            call(gone)
    swept(store)


def test_sections_that_were_never_touched_can_be_read_after_it(store_path):
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
        swept(store)


def test_a_writer_in_another_process_goes_on_and_so_do_other_retentions(store, store_path):
    large(store, "b", seed=1).close()
    known = states(store)
    other = child.start("retain", store_path, 4)
    with child.start("retained", store_path, "a", 80) as process:
        assert child.line(process) == "ready"
        threads = [threading.Thread(target=store.retain, args=(Policy(last=last),)) for last in (3, 4)]
        for thread in threads:
            thread.start()
        while process.poll() is None:
            store.retain(Policy(last=5))
        assert child.line(process) == "as they were"
        for thread in threads:
            thread.join()
    assert child.line(other).startswith("removed ")
    child.end(other)
    store.retain(Policy(last=1, tags=False))
    agent = store.agent("a")
    assert (len(agent.log()), len(agent.state["messages"])) == (1, 80)
    for id, state in states(store).items():
        assert known.get(id, state) == state
    store._db.sweep_strays(0)  # somebody read it as it was when these went
    swept(store)


def test_killed_anywhere_it_leaves_a_whole_store_and_goes_on(store_path, rounds):
    with holdfast.open(store_path) as store:
        large(store, "a", count=24, seed=8).close()
        store.copy("a", "b")
        known = states(store)

    def retained(path):
        with holdfast.open(path) as store:
            for last in (12, 6, 2):
                store.retain(Policy(last=last, labels=["1?"]))

    for store in child.killed(store_path, rounds(7, 1), retained):
        sound(store)
        left = states(store)
        assert left == {id: known[id] for id in left}
        store.retain(Policy(last=1, tags=False))
        swept(store)
        assert labels(store.agent("a", readonly=True)) == ["23"]


# -- by itself --------------------------------------------------------------------------------------------------------


def test_a_stored_policy_is_followed_by_whoever_writes(store, monkeypatch):
    monkeypatch.setattr(background, "PAUSE_S", 0.0)
    store.set_policy(Policy(last=10))
    store.agent("b")
    store.set_policy(Policy(last=1000), "b")
    assert store.policies() == {None: Policy(last=10), "b": Policy(last=1000)}
    agent = talk(store, "a", count=3 * background.EVERY)
    other = talk(store, "b", count=background.EVERY)
    deadline = time.monotonic() + 180
    while len(agent.log()) > 10 + background.EVERY and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(agent.log()) <= 10 + background.EVERY
    assert len(other.log()) == background.EVERY
    store._tending.stop()
    assert len(agent.state["messages"]) == 3 * background.EVERY
    assert {one.agent for one in store.retain().agents} == {"a", "b"}
    assert len(agent.log()) == 10
    store.set_policy(None, "b")
    store.set_policy(None)
    assert (store.policies(), store.retain().agents) == ({}, [])
    talk(store, "a", count=2 * background.EVERY)  # without a policy nothing happens by itself
    assert len(agent.log()) == 10 + 2 * background.EVERY
    assert background.POLICY not in store._db.view.facts()
    sound(store)


def test_two_who_set_policies_at_once_lose_none(store):
    names = [f"agent {number}" for number in range(24)]
    for name in names:
        store.agent(name)
    threads = [
        threading.Thread(target=lambda some=names[at::4]: [store.set_policy(Policy(last=7), name) for name in some])
        for at in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.policies() == {name: Policy(last=7) for name in names}
    store.remove(names[0])
    assert store.policies() == {name: Policy(last=7) for name in names[1:]}


def test_closing_stops_it_and_the_next_one_goes_on(store_path, monkeypatch):
    for name, value in (("PAUSE_S", 0.0), ("REST_S", 0.05), ("SLICE_S", 0.0)):
        monkeypatch.setattr(background, name, value)
    with holdfast.open(store_path) as store:
        store.set_policy(Policy(last=5))
        talk(store, count=background.EVERY).close()
    with holdfast.open(store_path) as store:
        assert len(store.agent("a").state["messages"]) == background.EVERY
        store.retain()
        assert len(store.agent("a").log()) == 5
        swept(store)
