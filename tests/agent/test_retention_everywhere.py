"""Retention: what may stay, what returns to the file system, and what others see while it happens."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from datetime import UTC, datetime, timedelta

import apsw
import pytest

from holdfast.agent.policy import Moment, Policy
from holdfast.agent.store import Store, open_as
from holdfast.errors import BadOption, Forgotten, ReadOnly, UnknownRevision
from tests.agent.test_collection import make_small, say, states, swept
from tests.agent.test_removal import killed, large, start


@pytest.fixture
def store(store_path):
    with open_as(Store, store_path) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    make_small(monkeypatch.setattr)


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
    store.clone("a", "b")
    report = store.retain(Policy(last=1), ["a"])
    assert {entry.label: entry.why for entry in report.agents[0].kept} == {
        "m19": ("head of main", "last 1"), "m9": ("seen by b",), "m3": ("seen by b",),
    }  # fmt: skip
    assert labels(agent) == labels(store.agent("b", readonly=True)) == ["m19", "m9", "m3"]
    assert store.retain(Policy(last=2)).removed == 2  # one that both forget is told of both
    assert labels(agent) == labels(store.agent("b", readonly=True)) == ["m19", "m9"]
    swept(store)


class Needing(Store):
    """As the room above: something must stay whatever a policy says."""

    def _needed(self, branches, points):
        for point in points:
            if point.manifest.label == "m3":
                yield point.id, f"needed on {branches[0].name}"


def test_whatever_a_policy_says_these_stay(store_path):
    with open_as(Needing, store_path) as store:
        agent = talk(store, count=10)
        agent.mark("m9", "corrupt", "an example")
        agent.mark("m8", "suspect", "an example")
        report = store.retain(Policy(last=1))
        assert {entry.label: entry.why for entry in report.agents[0].kept} == {
            "m9": ("head of main", "last 1"), "m7": ("newest good one of main",), "m3": ("needed on main",),
        }  # fmt: skip


def test_a_dry_run_reads_only_and_where_nothing_goes_no_payload_is_read(store_path):
    with open_as(Store, store_path) as store:
        talk(store, count=20)
    with open_as(Store, store_path, readonly=True) as store:
        report = store.retain(Policy(last=3), dry_run=True)
        assert (report.done, report.kept, report.removed) == (False, 3, 17)
        assert report.freed_bytes > 0
        with pytest.raises(ReadOnly):
            store.retain(Policy(last=3))
    with apsw.Connection(str(store_path / "store.db")) as connection:  # whoever reads one finds damage
        connection.execute("UPDATE loose SET data = x'00'; UPDATE segment SET manifests = x'00'")
    with open_as(Store, store_path) as store:
        report = store.retain(Policy(last=30, branches=["x"]))
        assert (report.kept, report.removed) == (20, 0)


# -- space ----------------------------------------------------------------------------------------------------------


def blocks(path):
    return sum(file.stat().st_blocks for file in path.rglob("*") if file.is_file()) * 512


def test_space_returns_to_the_file_system(store, store_path):
    noise = random.Random(1)
    for number in range(40):
        with store.agent("a", config={"version": number}) as agent:
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


def writing(path):
    """Append while others let go what is old, with a rollback now and then; say whether all is as it was."""
    with open_as(Store, path) as store:
        agent = store.agent("a")
        agent.state["messages"] = []
        agent.checkpoint("first")
        say("ready")
        expected = []
        for number in range(80):
            expected.append(f"{number} " * 200)
            agent.state["messages"].append(expected[-1])
            agent.checkpoint(f"m{number}")
            if number % 9 == 5:
                head = agent.head
                agent.state["messages"].append("to be given up")
                agent.checkpoint("astray")
                agent.rollback(head)
                agent.tag(f"t{number}")
        say("as they were" if list(agent.state["messages"]) == expected else "not as they were")


def test_a_writer_in_another_process_goes_on_and_so_does_another_retention(store, store_path):
    large(store, "b", seed=1).close()
    known = states(store)
    with start(writing, str(store_path)) as process:
        assert process.stdout.readline() == "ready\n"
        threads = [threading.Thread(target=store.retain, args=(Policy(last=last),)) for last in (3, 4)]
        for thread in threads:
            thread.start()
        while process.poll() is None:
            store.retain(Policy(last=5))
        assert process.communicate()[0] == "as they were\n"
        for thread in threads:
            thread.join()
    store.retain(Policy(last=1, tags=False))
    agent = store.agent("a")
    assert (len(agent.log()), len(agent.state["messages"])) == (1, 80)
    for id, state in states(store).items():
        assert known.get(id, state) == state
    store._db.packs.sweep_strays(store._db.view, store._db.engine, 0)  # somebody read it as it was when these went
    swept(store)


def retaining(path):
    store = open_as(Store, path)
    say("ready")
    sys.stdin.readline()
    for last in (12, 6, 2):
        store.retain(Policy(last=last, labels=["1?"]))
    say("done")


def test_killed_anywhere_it_leaves_a_whole_store_and_goes_on(tmp_path, rounds):
    with open_as(Store, tmp_path / "original") as store:
        large(store, "a", count=24, seed=8).close()
        store.clone("a", "b")
        known = states(store)
    for store in killed(tmp_path, tmp_path / "original", rounds(5, 300), retaining):
        left = states(store)
        assert left == {id: known[id] for id in left}
        store.retain(Policy(last=1, tags=False))
        swept(store)
        assert labels(store.agent("a", readonly=True)) == ["23"]
