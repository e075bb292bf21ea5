"""Removal: what goes is gone, what stays is as it was, and whatever happens on the way, the store is whole."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest

from holdfast.agent.branch import BranchWriter
from holdfast.agent.graph import Graph
from holdfast.agent.policy import Policy
from holdfast.agent.store import Store, open_as
from holdfast.codec.document import plain
from holdfast.errors import AgentBusy, Fenced, NothingToUndo, StoreClosed, UnknownAgent, UnknownRevision
from holdfast.store.changes import NewRecord, Said
from tests import warm
from tests.agent.test_collection import make_small, say, sound, states, swept

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    make_small(monkeypatch.setattr)


@pytest.fixture
def store(store_path):
    with open_as(Store, store_path) as opened:
        yield opened


def large(store, name, count=30, seed=0):
    """An agent with seals, big containers, a bulk value and lines that were left, all different from other seeds."""
    noise = random.Random(seed)
    agent = store.agent(name)
    agent.state["messages"] = []
    for number in range(count):
        agent.state["messages"].append({"role": "user", "content": noise.randbytes(200).hex()})
        if number % 9 == 4:
            agent.state["bulk"] = noise.randbytes(300_000)
        if number % 11 == 6:
            agent.state["big"] = {"inside": [noise.randbytes(100).hex() for _ in range(200)]}
        if number % 13 == 9:
            agent.rollback("~3")
        agent.checkpoint(f"{number}")
    agent.tag("middle", "~5")
    return agent


def grown(store, name="a", count=6):
    """An agent with two branches, a line that was left, a tag and a doubt."""
    agent = store.agent(name)
    agent.state["messages"] = []
    for number in range(count):
        agent.state["messages"].append(f"message {number} " * 20)
        agent.checkpoint(f"m{number}")
    agent.tag("kept", "m2")
    agent.mark("m1", "suspect", "an example")
    with agent.branch("side", at="m3") as side:
        side.state["side"] = True
        side.checkpoint("on the side")
    agent.rollback("m4")
    agent.state["messages"].append("another way")
    agent.checkpoint("other")
    return agent


def picture(store, name):
    """All that can be seen of an agent but its events."""
    agent = store.agent(name, readonly=True)
    heads = {branch: store.agent(name, branch=branch, readonly=True).head for branch in agent.branches()}
    found = [{branch: head and head.id for branch, head in heads.items()}]
    found += [[one.id for one in some] for some in (agent.tags().values(), agent.abandoned(), agent.log())]
    for one in agent.log(all=True):
        found.append(
            (one.id, one.label, one.depth, one.previous_id, one.validity, plain(one.state), str(one.changes()))
        )
    return found


def numbers(store, name):
    """The numbers of the checkpoints that are seen, by label."""
    view = store._db.view
    return {point.manifest.label: point.n for point in Graph(view, view.agent(name)).everything()}


def forget(store, name, going, **more):
    return store._forget(store._db.view.agent(name), set(going), **more)


def empty(store):
    counts = store._db.view.counts()
    tables = ("loose", "checkpoint", "segment", "node", "chunk", "pack", "record", "shallow", "tag", "validity")
    assert {table: counts[table] for table in tables} == dict.fromkeys(tables, 0)
    swept(store)


# -- whole agents ---------------------------------------------------------------------------------------------------


def test_a_removed_agent_is_gone_and_its_space_is_free(store):
    large(store, "kept", seed=1).close()
    before = picture(store, "kept")
    size = sum(store.stats()["bytes"].values())
    large(store, "gone", count=60, seed=2)
    count = len(store.agent("gone").log(all=True))
    said = store.remove("gone", dry_run=True)
    assert (said.done, said.checkpoints, said.kept_for) == (False, count, [])
    done = store.remove("gone")
    assert (done.done, done.checkpoints, done.kept_for, done.copies) == (True, count, [], [])
    assert done.freed_bytes > 1_000_000
    assert 0.7 < said.freed_bytes / done.freed_bytes < 1.3
    assert sum(store.stats()["bytes"].values()) < size * 1.3 + 100_000
    with pytest.raises(UnknownAgent):
        store.remove("gone")
    assert picture(store, "kept") == before
    assert "gone" not in str([entry.body for entry in store._db.view.log()])
    again = store.agent("gone")  # the name is free, and nothing of the former one shows
    assert (again.log(all=True), again.tags()) == ([], {})
    swept(store)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_copy_and_origin_are_removed_in_either_order(store, first, second):
    large(store, "a", seed=4).close()
    store.clone("a", "b")
    for name in ("a", "b"):
        with store.agent(name) as agent:
            for number in range(9):
                agent.state["messages"].append(f"{name} {number} " * 30)
                agent.checkpoint(f"{name}{number}")
                agent._writer.append([NewRecord(1, b"", b"done")], flush=True)
    before = picture(store, second)
    assert store.remove(first).kept_for == [second]
    assert picture(store, second) == before
    with store.agent(second) as agent:
        agent.state["messages"].append("goes on")
        agent.checkpoint("goes on")
    swept(store)
    store.remove(second)
    empty(store)


def test_copies_are_named_and_go_along_if_asked(store, store_path):
    for name in ("other", "a"):
        grown(store, name).close()
    store.clone("a", "b")
    store.clone("b", "c")
    for dry_run, left in ((True, 4), (False, 1)):
        found = store.remove("b", dry_run=dry_run, with_copies=True)
        assert (found.copies, found.kept_for, found.done) == (["a", "c"], [], not dry_run)
        assert len(store.agents()) == left
    store.close()
    with open_as(Store, store_path) as again:  # although the newest of all is gone
        assert [info.name for info in again.agents()] == ["other"]
        again.agent("other").checkpoint("next")
        swept(again)


def test_handles_of_this_process_are_closed_and_their_writers_fenced(store):
    agent = grown(store)
    writer = agent._writer
    store.remove("a")
    with pytest.raises(StoreClosed):
        agent.checkpoint()
    with pytest.raises(Fenced):
        BranchWriter.append(writer, [NewRecord(0, b"", b"late")], flush=True)
    empty(store)


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE loose SET data = x'00' WHERE n % 2; UPDATE segment SET manifests = x'00'",  # it cannot be read
        "UPDATE loose SET parent = 1 WHERE n % 2; UPDATE checkpoint SET parent = 1 WHERE n % 2",  # nor its links
        "DELETE FROM loose WHERE n % 2; DELETE FROM checkpoint WHERE n % 2",
    ],
)
def test_a_damaged_agent_can_be_removed(store, store_path, harm):
    grown(store, "a").close()
    store.close()
    with apsw.Connection(str(store_path / "store.db")) as connection:
        connection.execute(harm)
    with open_as(Store, store_path) as again:
        grown(again, "b").close()
        before = picture(again, "b")
        again.remove("a")
        assert picture(again, "b") == before
        swept(again)


def test_a_cut_history_begins_where_it_was_cut(store):
    grown(store).close()
    line = [one.label for one in store.agent("a", readonly=True).log()]
    known = numbers(store, "a")
    going = [known[label] for label in line[2:]]
    no = forget(store, "a", going, unless=lambda change: change.tags()[0].name == "kept")  # inside the transaction
    assert (no.done, no.checkpoints, len(numbers(store, "a"))) == (False, 0, len(known))
    done = forget(store, "a", going)
    assert (done.done, done.checkpoints) == (True, len(line) - 2)
    agent = store.agent("a")
    assert [one.label for one in agent.log()] == ["other", "m4"]
    cut = agent.at("m4")
    assert (cut.cut, agent.head.cut) == (True, False)
    assert [change.path for change in cut.changes()] == [("messages",)]
    assert [change.path for change in agent.changes("m4")] == [("messages", 5)]
    for gone in ("~2", "#1"):
        with pytest.raises(UnknownRevision, match="forgotten"):
            agent.at(gone)
    with pytest.raises(UnknownRevision):
        agent.at("kept")  # the tag went with its checkpoint
    agent.undo()
    with pytest.raises(NothingToUndo):
        agent.undo()
    assert "forget" in {event["what"] for event in agent.events()}


def test_a_branch_whose_head_goes_stands_at_the_nearest_that_stays(store):
    grown(store).close()
    forget(store, "a", [numbers(store, "a")["m3"]])  # a cut is no obstacle
    forget(store, "a", [numbers(store, "a")[label] for label in ("other", "m4")])
    agent = store.agent("a")
    assert agent.head.label == "m2"
    assert len(agent.state["messages"]) == 3
    agent.checkpoint("new")
    agent.close()
    swept(store)
    forget(store, "a", numbers(store, "a").values())
    agent = store.agent("a")
    assert (agent.head, agent.log(all=True), dict(agent.state)) == (None, [], {})
    agent.checkpoint("first again")
    swept(store)


def test_what_the_log_keeps_under_a_key_goes_with_the_last_checkpoint_that_has_it(store):
    agent = store.agent("a")
    for number, key in enumerate((b"one", b"two", b"two", b"three")):
        agent.state["n"] = number
        said = [Said({"what": "write", "n": number}, key)]
        agent._writer.finish(agent._writer.capture(agent._document, str(number), key=key, said=said))
    store.clone("a", "b")
    agent.close()
    known = numbers(store, "a")

    def kept():
        return [entry.body["n"] for entry in store._db.view.log_under([b"one", b"two", b"three"])]

    assert forget(store, "a", [known["0"]]).checkpoints == 0  # the copy sees it
    store.remove("a")
    assert kept() == [0, 1, 2, 3]
    assert forget(store, "b", [known["0"]]).events == 1
    assert forget(store, "b", [known["1"]]).events == 0
    assert kept() == [1, 2, 3]
    assert "LangGraph" in store.retain(Policy(last=1)).agents[0].skipped
    assert forget(store, "b", [known["2"], known["3"]]).events == 3
    assert kept() == []
    swept(store)


# -- others ---------------------------------------------------------------------------------------------------------


def start(function, *arguments):
    """Call a function of a test's file in a process of its own."""
    code = f"from {function.__module__} import *; make_small(setattr); {function.__name__}(*{arguments!r})"
    return warm.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def killed(folder, original, count, function):
    """Copies of a store in which a function was killed after some part of its time; the first one ended."""
    took, noise = 0.0, random.Random(1)
    for attempt in range(count):
        path = folder / f"store{attempt}"
        shutil.copytree(original, path)
        with start(function, str(path)) as process:
            assert process.stdout.readline() == "ready\n"
            began = time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            if attempt:
                time.sleep(noise.random() * took)  # where it is killed, not what is expected then
                process.kill()
            else:
                assert process.stdout.readline() == "done\n"
                took = time.monotonic() - began
        with open_as(Store, path) as store:
            yield store
        shutil.rmtree(path)


def writing(path, count):
    with open_as(Store, path) as store:
        messages = store.agent("a").state.setdefault("messages", [])
        say("ready")
        for number in range(count):
            messages.append(f"{number} " * 200)
            store.agent("a").checkpoint(str(number))
        say("done")
        sys.stdin.readline()


def test_another_process_that_writes_keeps_its_agent_and_goes_on_while_others_go(store, store_path):
    for seed in range(2):
        large(store, "gone", seed=seed).close()
        with start(writing, str(store_path), 40) as process:
            assert process.stdout.readline() == "ready\n"
            store.remove("gone")
            with pytest.raises(AgentBusy):
                store.remove("a")
            assert process.communicate("\n")[0] == "done\n"
        swept(store)
    assert len(store.agent("a", readonly=True).state["messages"]) == 80
    store.remove("a")
    empty(store)


def removing(path):
    store = open_as(Store, path)
    known = sorted(numbers(store, "a").values())
    say("ready")
    sys.stdin.readline()
    forget(store, "a", known[::3])
    store.remove("b")
    forget(store, "a", known[1::3])
    store.remove("a")
    say("done")


def test_killed_anywhere_it_leaves_a_whole_store(tmp_path, rounds):
    with open_as(Store, tmp_path / "original") as store:
        large(store, "a", count=16, seed=8).close()
        store.clone("a", "b")
        store.agent("b")._writer.append([NewRecord(1, b"", b"done")], flush=True)
        grown(store, "stays").close()
        before, known = picture(store, "stays"), states(store)
    for store in killed(tmp_path, tmp_path / "original", rounds(5, 300), removing):
        sound(store)
        left = states(store)
        assert left == {id: known[id] for id in left}
        assert picture(store, "stays") == before
        store.retain(Policy(last=1000))  # finishes what was begun
        swept(store)
        for info in store.agents():
            store.remove(info.name)
        empty(store)
