"""Removal: what goes is gone, what stays is as it was, and whatever happens on the way, the store is whole."""

from __future__ import annotations

from contextlib import closing

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent.branch import BranchWriter
from holdfast.errors import AgentBusy, Damaged, Fenced, NothingToUndo, StoreClosed, UnknownAgent, UnknownRevision
from holdfast.store.changes import NewRecord
from tests.agent import child
from tests.agent.damage import rows, spoil
from tests.agent.histories import (
    act,
    empty,
    few_between_seals,
    forget,
    grown,
    keep,
    large,
    numbers,
    picture,
    sound,
    states,
    swept,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    few_between_seals(monkeypatch.setattr)


# -- whole agents -----------------------------------------------------------------------------------------------------


def test_a_removed_agent_is_gone_and_its_space_is_free(store):
    large(store, "kept", seed=1).close()
    before = picture(store, "kept")
    sizes = store.stats()["bytes"]
    size = sizes["catalog"] + sizes["packs"]
    large(store, "gone", count=60, seed=2)
    count = len(store.agent("gone").log(all=True))
    said = store.remove("gone", dry_run=True)
    assert (said.done, said.checkpoints, said.kept_for) == (False, count, [])
    done = store.remove("gone")
    assert (done.done, done.checkpoints, done.kept_for, done.copies) == (True, count, [], [])
    assert done.freed_bytes > 1_000_000
    assert 0.7 < said.freed_bytes / done.freed_bytes < 1.3
    sizes = store.stats()["bytes"]
    assert sizes["log"] == 0
    assert sum(sizes.values()) < size * 1.3 + 100_000
    assert [info.name for info in store.agents()] == ["kept"]
    with pytest.raises(UnknownAgent):
        store.remove("gone")
    assert picture(store, "kept") == before
    assert "gone" not in str([entry.body for entry in store._db.view.log()])
    again = store.agent("gone")  # the name is free, and nothing of the former one shows
    assert (again.head, again.log(all=True), again.tags()) == (None, [], {})
    swept(store)
    again.state["x"] = 1
    again.checkpoint("new")
    assert [one.label for one in again.log(all=True)] == ["new"]


def test_removing_one_of_two_equal_agents_leaves_the_other(store):
    """Their nodes and chunks are the same rows."""
    for name in ("one", "two"):
        large(store, name, count=20, seed=3).close()
    before = picture(store, "two")
    store.remove("one")
    assert picture(store, "two") == before
    swept(store)
    store.remove("two")
    empty(store)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_copy_and_origin_are_removed_in_either_order(store, first, second):
    large(store, "a", count=20, seed=4).close()
    store.copy("a", "b")
    for name in ("a", "b"):
        with closing(store.agent(name)) as agent:
            for number in range(9):
                agent.state["messages"].append(f"{name} {number} " * 30)
                agent.checkpoint(f"{name}{number}")
        act(store.agent(name))
    before = picture(store, second)
    assert store.remove(first).kept_for == [second]
    assert picture(store, second) == before
    with closing(store.agent(second)) as agent:
        agent.state["messages"].append("goes on")
        agent.checkpoint("goes on")
    swept(store)
    store.remove(second)
    empty(store)


def test_copies_are_named_and_go_along_if_asked(store, store_path):
    for name in ("other", "a"):
        grown(store, name).close()
    store.copy("a", "b")
    store.copy("b", "c")
    for dry_run, left in ((True, 4), (False, 1)):
        found = store.remove("b", dry_run=dry_run, with_copies=True)
        assert (found.copies, found.kept_for, found.done) == (["a", "c"], [], not dry_run)
        assert len(store.agents()) == left
    store.close()
    with holdfast.open(store_path) as again:  # although the newest of all is gone
        assert [info.name for info in again.agents()] == ["other"]
        again.agent("other").checkpoint("next")
        swept(again)


def test_handles_of_this_process_are_closed_and_their_writers_fenced(store):
    agent = grown(store)
    writer, messages = agent._writer, agent.state["messages"]
    store.remove("a")
    for call in (agent.checkpoint, lambda: messages.append("lost?")):
        with pytest.raises(StoreClosed):
            call()
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
    spoil(store_path, harm)
    with holdfast.open(store_path) as again:
        grown(again, "b").close()
        before = picture(again, "b")
        again.remove("a")
        assert picture(again, "b") == before
        swept(again)


# -- some checkpoints -------------------------------------------------------------------------------------------------


def test_more_checkpoints_than_one_seal_covers(store_path, monkeypatch):
    monkeypatch.undo()  # the limits that people have
    with holdfast.open(store_path, durability="batched") as store:
        agent = store.agent("a")
        agent.state["messages"] = []
        for number in range(700):
            agent.state["messages"].append(f"message {number} " * 8)
            agent.checkpoint(str(number))
        agent.close()
        digests = {one.id: one.digest for one in store.agent("a", readonly=True).log(all=True)}
        known = list(numbers(store, "a").values())
        forget(store, "a", [*known[50:400], *known[401:-1]])
        kept = store.agent("a", readonly=True).log(all=True)
        assert [one.label for one in kept] == ["699", "400", *map(str, reversed(range(50)))]
        assert all(one.digest == digests[one.id] for one in kept)
        assert len(holdfast.plain(kept[1].state["messages"])) == 401
        swept(store)
        forget(store, "a", known[:-1])
        agent = store.agent("a")
        assert [one.label for one in agent.log(all=True)] == ["699"]
        assert store.stats()["counts"]["segment"] <= 1
        for number in range(300):
            agent.state["messages"].append(f"more {number} " * 8)
            agent.checkpoint(f"more {number}")
        assert len(agent.at().state["messages"]) == 1000
        sound(store)


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
    assert [change.path for change in agent.changes()][:1] == [("messages",)]
    assert [change.path for change in agent.changes("m4")] == [("messages", 5)]
    for gone in ("~2", "#1"):
        with pytest.raises(UnknownRevision, match="forgotten"):
            agent.at(gone)
    with pytest.raises(UnknownRevision):
        agent.at("kept")  # the tag went with its checkpoint
    agent.undo()
    with pytest.raises(NothingToUndo):
        agent.undo()
    assert agent.plan_rollback("m4").target == cut
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
        keep(agent, key, {"what": "write", "n": number}, label=str(number))
    store.copy("a", "b")
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


@pytest.mark.parametrize("table", ["loose", "checkpoint", "log"])
def test_a_row_that_goes_without_a_word_is_damage(store, store_path, table):
    large(store, "a", count=40, seed=5).close()
    grown(store, "b").close()
    forget(store, "a", sorted(numbers(store, "a").values())[:10])
    store.remove("b")
    swept(store)
    past = {one.e for one in store._db.view.log() if one.body["what"] == "open"}  # nothing stands on that any more
    store.close()
    column = "e" if table == "log" else "n"
    for (number,) in rows(store_path, f"SELECT {column} FROM {table}"):
        if table == "log" and number in past:
            continue
        (before,) = rows(store_path, f"SELECT * FROM {table} WHERE {column} = ?", number)
        assert spoil(store_path, f"DELETE FROM {table} WHERE {column} = ?", number) == 1
        try:
            with holdfast.open(store_path, readonly=True) as opened:
                assert not opened.verify().ok, number
        except Damaged:
            pass  # the newest one: the witness knows
        spoil(store_path, f"INSERT INTO {table} VALUES ({', '.join('?' * len(before))})", *before)
    with holdfast.open(store_path, readonly=True) as opened:
        sound(opened)


# -- others -----------------------------------------------------------------------------------------------------------


def test_another_process_that_writes_keeps_its_agent_and_goes_on_while_others_go(store, store_path):
    for seed in range(2):
        large(store, "gone", seed=seed).close()
        with child.start("write", store_path, "a", 40) as process:
            assert child.line(process) == "ready"
            with pytest.raises(AgentBusy):
                store.remove("a")
            process.stdin.write("go\n")
            process.stdin.flush()
            store.remove("gone")
            assert len(child.line(process).split()) == 40
        swept(store)
    assert len(store.agent("a", readonly=True).state["messages"]) == 80
    store.remove("a")
    empty(store)


def test_killed_anywhere_it_leaves_a_whole_store(store_path, rounds):
    with holdfast.open(store_path) as store:
        large(store, "a", count=16, seed=8).close()
        store.copy("a", "b")
        act(store.agent("b"))
        grown(store, "stays").close()
        before, known = picture(store, "stays"), states(store)

    def removed(path):
        with holdfast.open(path) as store:
            known = sorted(numbers(store, "a").values())
            forget(store, "a", known[::3])
            store.remove("b")
            forget(store, "a", known[1::3])
            store.remove("a")

    for store in child.killed(store_path, rounds(11, 1), removed):
        sound(store)
        left = states(store)
        assert left == {id: known[id] for id in left}
        assert picture(store, "stays") == before
        store.retain(Policy(last=1000))  # finishes what was begun
        swept(store)
        for info in store.agents():
            store.remove(info.name)
        empty(store)
