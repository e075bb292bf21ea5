"""Removal: what goes is gone, what stays is as it was, and whatever happens on the way, the store is sound."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.agent import branch as sealing
from holdfast.errors import AgentBusy, Fenced, NothingToUndo, StoreClosed, UnknownAgent, UnknownRevision
from holdfast.store.changes import Said
from holdfast.store.packs import file_name
from tests import warm
from tests.agent import child
from tests.agent.damage import flipped, spoil
from tests.agent.damage import rows as rows_of
from tests.agent.test_clone import counts, grown, picture, sound

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened


def large(store, name, count=40, seed=0):
    """An agent with seals, big containers, leftovers, a bulk value and forks, all different from other seeds."""
    noise = random.Random(seed)
    agent = store.agent(name)
    agent.state["messages"] = []
    agent.state["table"] = {}
    for number in range(count):
        agent.state["messages"].append({"role": "user", "content": noise.randbytes(200).hex()})
        agent.state["table"][f"row {number % 7}"] = [noise.randbytes(30).hex() for _ in range(noise.randrange(40))]
        if number % 9 == 4:
            agent.state["bulk"] = noise.randbytes(300_000)
        if number % 11 == 6:
            agent.state["big"] = {"inside": [noise.randbytes(100).hex() for _ in range(200)]}
        if number % 13 == 9:
            agent.rollback("~3")
        agent.checkpoint(f"{number}")
    agent.tag("middle", "~5")
    return agent


def numbers(store, name):
    """Numbers of the visible checkpoints by id."""
    return {c.id: c._point.n for c in store.agent(name, readonly=True).log(all=True)}


def forget(store, name, chosen):
    return store._forget(store._agent_row(name), set(chosen))


def nothing_left(store):
    found = counts(store)
    assert not any(found[table] for table in ("checkpoint", "segment", "shallow", "node", "chunk", "pack"))


@pytest.fixture
def seals(monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 6)


def test_a_removed_agent_is_gone_and_its_space_is_free(store, store_path, seals):
    kept = large(store, "kept", seed=1)
    kept.close()
    before = picture(store, "kept")
    size = sum(store.stats()["bytes"][part] for part in ("catalog", "log", "packs"))
    large(store, "gone", count=80, seed=2)
    count = len(numbers(store, "gone"))
    said = store.remove("gone", dry_run=True)
    assert (said.done, said.checkpoints, said.kept_for) == (False, count, [])
    done = store.remove("gone")
    assert (done.done, done.checkpoints, done.kept_for) == (True, count, [])
    assert done.freed_bytes > 1_000_000
    assert sum(store.stats()["bytes"][part] for part in ("catalog", "log", "packs")) < size * 1.3 + 100_000
    assert [info.name for info in store.agents()] == ["kept"]
    with pytest.raises(UnknownAgent):
        store.remove("gone")
    assert picture(store, "kept") == before
    packs = {file_name(uuid) for uuid in store._db.view.packs()}
    assert {path.name for path in (store_path / "packs").iterdir()} == packs
    sound(store)
    # The name is free again, and nothing of the old one shows.
    again = store.agent("gone")
    assert again.head is None
    again.state["x"] = 1
    again.checkpoint("new")
    assert [c.label for c in again.log(all=True)] == ["new"]
    sound(store)


def test_removing_one_of_two_equal_agents_leaves_the_other(store, seals):
    """Their nodes and chunks are the same rows."""
    large(store, "one", seed=3).close()
    large(store, "two", seed=3).close()
    before = picture(store, "two")
    store.remove("one")
    assert picture(store, "two") == before
    sound(store)
    store.remove("two")
    nothing_left(store)
    sound(store)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_clone_and_origin_are_removed_in_either_order(store, seals, order):
    large(store, "a", seed=4).close()
    store.clone("a", "b")
    for name in ("a", "b"):
        with store.agent(name) as agent:
            for number in range(9):
                agent.state["messages"].append(f"{name} {number} " * 30)
                agent.checkpoint(f"{name}{number}")
    first, second = order
    before = picture(store, second)
    done = store.remove(first)
    assert done.kept_for == [second]
    assert picture(store, second) == before
    sound(store)
    with store.agent(second) as agent:
        agent.state["messages"].append("goes on")
        agent.checkpoint("goes on")
    sound(store)
    store.remove(second)
    nothing_left(store)
    sound(store)


@pytest.mark.parametrize("seed", range(6))
def test_what_stays_is_what_it_was(store, seals, seed):
    noise = random.Random(seed)
    large(store, "a", seed=seed).close()
    if seed % 2:
        store.clone("a", "b")
    frozen = picture(store, "b") if seed % 2 else None
    for _ in range(3):
        known = numbers(store, "a")
        before = {c["id"]: c for c in picture(store, "a")["all"]}
        gone = noise.sample(sorted(known.values()), len(known) // 3)
        forget(store, "a", gone)
        sound(store)
        after = {c["id"]: c for c in picture(store, "a")["all"]}
        seen = {c["id"] for c in frozen["all"]} if frozen is not None else set()  # a clone keeps what it sees
        assert set(after) == {identity for identity, n in known.items() if n not in gone or identity in seen}
        for identity, found in after.items():
            assert found["state"] == before[identity]["state"]
            assert found["digest"] == before[identity]["digest"]
            if found["parent"] in after:
                assert found["changes"] == before[identity]["changes"]
        with store.agent("a") as agent:
            agent.state["messages"].append(f"after {seed}")
            agent.checkpoint("after")
        sound(store)
    if frozen is not None:
        assert picture(store, "b") == frozen
        store.remove("b")
        sound(store)
        assert {c["id"] for c in picture(store, "a")["all"]} >= set(after)
    store.remove("a")
    nothing_left(store)
    sound(store)


def test_more_checkpoints_than_one_seal_covers(store):
    agent = store.agent("a")
    agent.state["messages"] = []
    for number in range(1100):
        agent.state["messages"].append(f"message {number} " * 8)
        agent.checkpoint(str(number))
    agent.close()
    states = {c.id: c.digest for c in store.agent("a", readonly=True).log(all=True)}
    known = sorted(numbers(store, "a").values())
    forget(store, "a", [*known[100:700], *known[701:-1]])
    kept = store.agent("a", readonly=True).log(all=True)
    assert [c.label for c in kept] == ["1099", "700", *map(str, reversed(range(100)))]
    assert all(c.digest == states[c.id] for c in kept)
    assert len(holdfast.plain(kept[1].state["messages"])) == 701
    sound(store)
    forget(store, "a", known[:-1])
    agent = store.agent("a")
    assert [c.label for c in agent.log(all=True)] == ["1099"]
    assert len(agent.state["messages"]) == 1100
    assert counts(store)["segment"] <= 1
    for number in range(600):
        agent.state["messages"].append(f"more {number} " * 8)
        agent.checkpoint(f"more {number}")
    sound(store)


def test_a_cut_history_begins_where_it_was_cut(store):
    grown(store).close()
    agent = store.agent("a", readonly=True)
    line = agent.log()
    forget(store, "a", [c._point.n for c in line[2:]])
    agent = store.agent("a")
    assert [c.label for c in agent.log()] == ["other", "m4"]
    cut = agent.at("m4")
    assert cut.cut
    assert not agent.head.cut
    assert [change.path for change in cut.changes()] == [("messages",)]
    assert [change.path for change in agent.changes()][:1] == [("messages",)]
    assert [c.path for c in agent.changes("m4")] == [("messages", 5)]
    with pytest.raises(UnknownRevision, match="forgotten"):
        agent.at("~2")
    with pytest.raises(UnknownRevision, match="forgotten"):
        agent.at("#1")
    with pytest.raises(UnknownRevision):
        agent.at("kept")  # the tag went with its checkpoint
    agent.undo()
    with pytest.raises(NothingToUndo):
        agent.undo()
    assert agent.preview_rollback("m4").target == cut
    assert any(event["what"] == "forget" for event in agent.events())
    sound(store)


def test_a_branch_whose_head_goes_stands_at_the_nearest_that_stays(store):
    grown(store).close()
    heads = [c._point.n for c in store.agent("a", readonly=True).log()]
    forget(store, "a", heads[:2])
    agent = store.agent("a")
    assert agent.head.label == "m3"
    assert len(agent.state["messages"]) == 4
    agent.state["messages"].append("new")
    agent.checkpoint("new")
    sound(store)
    agent.close()
    forget(store, "a", numbers(store, "a").values())
    agent = store.agent("a")
    assert agent.head is None
    assert agent.log(all=True) == []
    assert dict(agent.state) == {}
    agent.state["x"] = 1
    agent.checkpoint("first again")
    sound(store)


def test_a_head_beyond_a_cut_stands_at_what_is_left_of_its_branch(store):
    agent = store.agent("a")
    for number in range(6):
        agent.state["n"] = number
        agent.checkpoint(str(number))
    agent.close()
    known = {c.label: c._point.n for c in store.agent("a", readonly=True).log()}
    forget(store, "a", [known["3"]])
    forget(store, "a", [known["4"], known["5"]])
    assert store.agent("a", readonly=True).head.label == "2"
    sound(store)


def test_heads_are_proven_after_rollbacks_and_forgetting(store):
    agent = store.agent("a")
    for number in range(5):
        agent.state["n"] = number
        agent.checkpoint(str(number))
    agent.rollback("2")
    agent.state["n"] = "x"
    agent.checkpoint("x")
    agent.rollback("1")
    agent.close()
    known = {c.label: c._point.n for c in store.agent("a", readonly=True).log(all=True)}
    forget(store, "a", [known["x"]])
    sound(store)
    agent = store.agent("a")
    assert agent.head.label == "1"
    agent.rollback("0")
    sound(store)
    agent.checkpoint("y")
    sound(store)


def test_what_is_kept_under_a_key_goes_with_the_checkpoint_that_has_it(store):
    agent = store.agent("a")
    writer = agent._writer
    for number, key in enumerate((b"k" * 16, b"o" * 16)):
        agent.state["n"] = number
        said = [Said({"what": "write"}, key)]
        writer.finish(writer.capture(agent._document, str(number), key=key, said=said))
    view = store._db.view
    assert len(view.log_under([b"k" * 16, b"o" * 16])) == 2
    agent.close()
    forget(store, "a", [view.keyed(b"k" * 16)[0].n])
    assert view.keyed(b"k" * 16) == []
    assert [entry.key for entry in view.log_under([b"k" * 16, b"o" * 16])] == [b"o" * 16]
    sound(store)


def test_another_process_that_writes_keeps_the_agent(store, store_path):
    process = child.start("hold", store_path, "a")
    try:
        assert child.line(process) == "ready"
        with pytest.raises(AgentBusy):
            store.remove("a")
        assert [info.name for info in store.agents()] == ["a"]
        sound(store)
    finally:
        child.end(process)
    store.remove("a")
    sound(store)


def test_handles_of_this_process_are_closed(store):
    agent = grown(store)
    messages = agent.state["messages"]
    store.remove("a")
    with pytest.raises(StoreClosed):
        messages.append("lost?")
    with pytest.raises(StoreClosed):
        agent.checkpoint()
    sound(store)


def test_a_writer_that_lost_its_agent_is_fenced(store):
    agent = grown(store)
    writer, document = agent._writer, agent._document
    agent.close()
    store.remove("a")
    with pytest.raises(Fenced):
        writer.checkpoint(document, "too late")
    sound(store)


@pytest.mark.parametrize("table", ["loose", "checkpoint", "log"])
def test_a_row_that_goes_without_a_word_is_damage(store, store_path, seals, table):
    large(store, "a", seed=5).close()
    large(store, "b", count=12, seed=6).close()
    forget(store, "a", sorted(numbers(store, "a").values())[:10])
    store.remove("b")
    sound(store)
    log = store._db.view.log()
    newest = max(entry.body.get("epoch", 0) for entry in log)
    # That somebody opened it, and where it moved before it last did: nothing stands on that any more.
    past = {one.e for one in log if one.body["what"] == "open" or 0 < one.body.get("epoch", 0) < newest}
    past = past if table == "log" else set()
    store.close()
    column = "e" if table == "log" else "n"
    for (number,) in rows_of(store_path, f"SELECT {column} FROM {table}"):
        if number in past:
            continue
        before = rows_of(store_path, f"SELECT * FROM {table} WHERE {column} = ?", number)
        spoil(store_path, f"DELETE FROM {table} WHERE {column} = ?", number)
        try:
            with holdfast.open(store_path, readonly=True) as opened:
                assert not opened.verify().ok, number
        except holdfast.errors.Damaged:
            pass  # the newest one: the witness knows
        marks = ", ".join("?" * len(before[0]))
        spoil(store_path, f"INSERT INTO {table} VALUES ({marks})", *before[0])
    with holdfast.open(store_path, readonly=True) as opened:
        sound(opened)


def test_the_newest_of_all_may_be_forgotten(store, store_path):
    grown(store, "a").close()
    grown(store, "b").close()
    store.remove("b")
    store.close()
    with holdfast.open(store_path) as again:
        sound(again)
        again.agent("a").checkpoint("next")
        sound(again)


def test_a_damaged_agent_can_be_removed(store, store_path):
    grown(store, "a").close()
    grown(store, "b").close()
    before = picture(store, "b")
    store.close()
    for n, data in rows_of(store_path, "SELECT n, data FROM loose WHERE b IN (1, 2) AND n % 3 = 0"):
        spoil(store_path, "UPDATE loose SET data = ? WHERE n = ?", flipped(data), n)
    with holdfast.open(store_path) as again:
        again.remove("a")
        assert picture(again, "b") == before
        sound(again)


def test_others_write_while_an_agent_is_removed(store, store_path, seals):
    large(store, "gone", count=150, seed=7).close()
    process = child.start("write", store_path, "other", 200)
    assert child.line(process) == "ready"
    process.stdin.write("go\n")
    process.stdin.flush()
    store.remove("gone")
    ids = child.line(process).split()
    child.end(process)
    assert len(ids) == 200
    sound(store)


# -- dying on the way -------------------------------------------------------------------------------------


def removing(path, clone):
    """In a process of its own: remove and forget until killed."""
    sealing.SEAL_CHECKPOINTS = 6
    store = holdfast.open(path)
    print("ready", flush=True)
    sys.stdin.readline()
    known = sorted(numbers(store, "a").values())
    forget(store, "a", known[::3])
    if clone == "yes":
        store.remove("b")
    else:
        store.remove("c")
    forget(store, "a", known[1::3])
    store.remove("a")
    print("done", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("clone", ["yes", "no"])
def test_killed_anywhere_it_leaves_a_sound_store(tmp_path, seals, rounds, clone):
    import shutil

    original = tmp_path / "original"
    with holdfast.open(original) as store:
        large(store, "a", count=30, seed=8).close()
        store.clone("a", "b")
        with store.agent("b") as b:
            b.state["messages"].append("of b")
            b.checkpoint("of b")
        large(store, "c", count=20, seed=8).close()
        large(store, "stays", count=20, seed=9).close()
        before = picture(store, "stays")
    began = time.monotonic()
    took = 0.0
    noise = random.Random(1)
    for attempt in range(rounds(4, 200)):
        path = tmp_path / f"store{attempt}"
        shutil.copytree(original, path)
        process = warm.Popen(
            [
                sys.executable,
                "-c",
                f"from tests.agent.test_removal import removing; removing({str(path)!r}, {clone!r})",
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
            assert picture(store, "stays") == before
            for info in store.agents():
                picture(store, info.name)
            for name in {info.name for info in store.agents()} - {"stays"}:
                store.remove(name)
            sound(store)
            found = counts(store)
            assert found["checkpoint"] == len(before["all"])
            store.remove("stays")
            nothing_left(store)
            assert list((path / "packs").iterdir()) == []
            sound(store)
        shutil.rmtree(path)
