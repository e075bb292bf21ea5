"""Clones: the whole history of another agent at the price of a few names, and nothing in common afterwards."""

from __future__ import annotations

from contextlib import closing

import pytest

import holdfast
from holdfast.agent import crashes
from holdfast.agent.graph import Graph
from holdfast.errors import BadName, Damaged, UnknownAgent, UnknownRevision
from holdfast.store.changes import Said
from tests.agent.damage import spoil, spoil_payload
from tests.agent.histories import empty, few_between_seals, grown, keep, picture, sound


def test_a_clone_has_everything_and_copies_nothing(store):
    grown(store).close()
    before = store.stats()["counts"]
    store.copy("a", "b")
    after = store.stats()["counts"]
    changed = {table for table in after if after[table] != before[table]}
    assert changed == {"agent", "branch", "tag", "validity", "log"}
    assert picture(store, "b") == picture(store, "a")
    info = next(info for info in store.agents() if info.name == "b")
    assert (info.checkpoints, info.abandoned) == (8, 1)
    sound(store)


def test_the_two_go_their_own_ways(store):
    grown(store).close()
    store.copy("a", "b")
    frozen = picture(store, "a")
    b = store.agent("b")
    assert holdfast.plain(b.state) == holdfast.plain(store.agent("a", readonly=True).state)
    b.state["messages"].append("of b")
    b.checkpoint("of b")
    b.tag("mine")
    b.untag("kept")
    b.mark("m1", "good")
    b.mark("m2", "corrupt", "b says so")
    b.rollback("m1")
    assert picture(store, "a") == frozen
    now = picture(store, "b")
    a = store.agent("a")
    a.state["messages"].append("of a")
    a.checkpoint("of a")
    a.rollback("m0")
    assert picture(store, "b") == now
    with pytest.raises(UnknownRevision):
        a.at("of b")
    with pytest.raises(UnknownRevision):
        a.rollback(next(checkpoint for checkpoint in b.abandoned() if checkpoint.label == "of b"))
    sound(store)


def test_a_copy_has_the_crashes_that_came_before_it(store):
    with store.agent("trip") as agent:
        agent.checkpoint("one")

    def crash(name, dump):
        crashes.note(store, store._agent_row(name), {"what": "crash", "dump": dump})

    def told(name):
        return [one["dump"] for one in store.agent(name, readonly=True).crashes()]

    crash("trip", "first")
    store.copy("trip", "twin")
    crash("trip", "of the origin")
    store.copy("twin", "third")
    crash("twin", "of the copy")
    assert (told("trip"), told("twin"), told("third")) == (
        ["of the origin", "first"], ["of the copy", "first"], ["first"],
    )  # fmt: skip
    assert {one.name: one.crashes for one in store.agents()} == {"trip": 2, "twin": 2, "third": 1}


def test_a_clone_of_a_clone_outlives_both(store):
    grown(store).close()
    store.copy("a", "b")
    with closing(store.agent("b")) as b:
        b.state["messages"].append("of b")
        b.checkpoint("of b")
    store.copy("b", "c")
    picture_of_c = picture(store, "c")
    assert [c["label"] for c in picture_of_c["all"]][:2] == ["of b", "other"]
    for name in ("b", "a"):
        store.remove(name)
        assert picture(store, "c") == picture_of_c
        sound(store)
    with closing(store.agent("c")) as c:
        c.undo()
        c.checkpoint("goes on")
    sound(store)
    store.remove("c")
    empty(store)


KEY = b"k" * 16


def kept(store, name):
    """What an agent sees under the key."""
    return [entry.body["what"] for entry in Graph(store._db.view, store._agent_row(name)).under([KEY])]


def test_what_is_kept_under_a_key_is_seen_up_to_the_parting_and_comes_along(store, tmp_path):
    def say(name, what):
        row = store._agent_row(name)
        store._db.change(lambda change: change.say(row.a, Said({"what": what}, KEY)))

    agent = store.agent("a")
    keep(agent, KEY, {"what": "before"})
    store.copy("a", "b")
    say("a", "after, of a")
    say("b", "after, of b")
    for_a, for_b = ["before", "after, of a"], ["before", "after, of b"]
    assert (kept(store, "a"), kept(store, "b")) == (for_a, for_b)
    for number, order in enumerate((["a", "b"], ["b", "a"])):
        with holdfast.open(tmp_path / f"other{number}") as other:
            other.agent("was there before").checkpoint("so that agents have other numbers here")
            store.push(other, order[:1])
            assert kept(other, order[0]) == {"a": for_a, "b": for_b}[order[0]]
            store.push(other, order[1:])
            assert (kept(other, "a"), kept(other, "b")) == (for_a, for_b)
            sound(other)
    store.remove("a")
    assert kept(store, "b") == for_b
    sound(store)


def test_refused_names(store):
    grown(store).close()
    with pytest.raises(BadName):
        store.copy("a", "a")
    with pytest.raises(BadName):
        store.copy("a", "")
    with pytest.raises(UnknownAgent):
        store.copy("none", "b")
    sound(store)


def test_cloning_while_the_source_is_written(store):
    agent = grown(store)
    store.copy("a", "b")
    agent.state["messages"].append("later")
    agent.checkpoint("later")
    assert "later" not in [c.label for c in store.agent("b", readonly=True).log(all=True)]
    sound(store)


def test_sealing_on_either_side_leaves_the_other_readable(store, monkeypatch):
    few_between_seals(monkeypatch.setattr)
    grown(store).close()
    store.copy("a", "b")
    frozen = picture(store, "b")
    for name in ("a", "b"):
        with closing(store.agent(name)) as agent:
            for number in range(10):
                agent.state["messages"].append(f"{name} {number} " * 30)
                agent.checkpoint(f"{name}{number}")
        sound(store)
    shared = {c["id"]: c for c in frozen["all"]}
    now = {c["id"]: c for c in picture(store, "b")["all"] if c["id"] in shared}
    assert {i: c["state"] for i, c in now.items()} == {i: c["state"] for i, c in shared.items()}
    assert {i: c["changes"] for i, c in now.items()} == {i: c["changes"] for i, c in shared.items()}


def test_a_missing_row_of_the_origin_shows_in_the_clone(store, store_path):
    grown(store).close()
    store.copy("a", "b")
    store.remove("a")
    sound(store)
    (tip,) = [c._point.n for c in store.agent("b", readonly=True).abandoned()]
    store.close()
    assert spoil(store_path, "DELETE FROM loose WHERE n = ?", tip) == 1
    with holdfast.open(store_path) as again:
        assert not again.verify().ok


def test_recovery_of_a_clone_goes_back_into_its_origin(store, store_path):
    grown(store).close()
    store.copy("a", "b")
    with closing(store.agent("b")) as b:
        b.state["messages"].append("of b " * 40)
        n = b.checkpoint("of b")._point.n
    store.close()
    spoil_payload(store_path, n)
    with holdfast.open(store_path) as again:
        with pytest.raises(Damaged) as caught:
            again.agent("b", readonly=True).state["messages"]
        assert again.agent("b", readonly=True).at("other").id == caught.value.newest_valid
        handle = again.agent("b", recover=True)
        assert holdfast.plain(handle.state) == holdfast.plain(again.agent("a").state)
