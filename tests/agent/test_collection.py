"""Collection: what is there that nobody needs goes, and nothing else; and live states that counted on it are whole."""

from __future__ import annotations

import os
import random

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import collection, removal, retention
from holdfast.agent.background import fold_below
from holdfast.errors import Damaged, StoreBusy
from holdfast.store.catalog import View
from holdfast.store.manifest import split_refs
from tests.agent.damage import KEY
from tests.agent.histories import few_between_seals, states, swept
from tests.limits import limits


@pytest.fixture
def store(request, store_path):
    with holdfast.open(store_path, key=getattr(request, "param", False)) as opened:
        yield opened


# -- what a sweep does ------------------------------------------------------------------------------------------------


class Stop(Exception):
    """What ends work at some step."""


@pytest.mark.parametrize("store", [False, KEY], indirect=True, ids=["plain", "encrypted"])
def test_stopped_at_any_step_the_store_is_whole_and_every_node_has_all_that_it_names(store, monkeypatch):
    few_between_seals(monkeypatch.setattr)
    for module in (collection, removal):
        monkeypatch.setattr(module, "AT_ONCE", 2)
    agent = store.agent("a")
    for number in range(20):
        agent.state["big"] = {"inside": [f"{number} {n} " * 40 for n in range(400)]}
        if number % 6 == 0:
            agent.state["bulk"] = random.Random(number).randbytes(300_000)
        agent.checkpoint(str(number))
    known, view, left = states(store), store._db.view, iter(range(1, 10_000, 17))

    def pace():
        pace.steps -= 1
        if not pace.steps:
            raise Stop

    while True:
        pace.steps = next(left)
        try:
            retention.follow(store, [(agent._row, Policy(last=2))], pace)
            break
        except Stop:
            assert store.verify().ok
            assert known.items() >= states(store).items()
            nodes = view.nodes([name for _, name, _ in view.rows("node")])
            for raw in nodes.values():
                index, named, _ = collection.names_of(raw)
                assert nodes.keys() >= {*index, *named}
    swept(store)


def sweep(store):
    """Delete all that nobody sees, and what only that needs."""
    removal.let_go(store._db, lambda _, links: removal.Plan(links, removal.everything(links)))
    collection.collect(store._db)


@pytest.mark.parametrize(
    "harm", ["branch WHERE b = 2", "node WHERE k = (SELECT max(k) FROM node)", "agent WHERE a = 1"]
)
def test_where_something_is_missing_nothing_is_known_to_be_waste(store, monkeypatch, harm):
    few_between_seals(monkeypatch.setattr)
    for name in ("a", "b"):
        agent = store.agent(name)
        for number in range(12):
            agent.state["messages"] = [f"{name} {number} {n} " * 30 for n in range(99)]
            agent.checkpoint(str(number))
    store._db.change(lambda change: change.tx.do(f"DELETE FROM {harm}"))

    def counted():
        """Rows by table. Loose checkpoints become part of segments at any moment, by another thread."""
        rows = store._db.view.counts()
        rows["loose"] += rows.pop("checkpoint")
        del rows["segment"]
        return rows

    before = counted()
    with pytest.raises(Damaged):
        sweep(store)
    assert counted() == before


# -- live states that counted on it -----------------------------------------------------------------------------------


def take_away(store, table: str) -> None:
    """As a collection that finds nothing naming them."""
    store._db.change(lambda change: change.tx.do(f"DELETE FROM {table}"))


def saved(agent) -> None:
    """A checkpoint; one that is refused is asked for again, as the error says."""
    try:
        agent.checkpoint("again")
    except StoreBusy:
        assert agent.dirty
        agent.checkpoint("again")


def test_a_long_value_that_was_dropped_and_comes_back(store):
    agent = store.agent("x")
    big, other = os.urandom(600_000), os.urandom(10)
    agent.state["a"] = big
    agent.checkpoint("with")
    del agent.state["a"]
    agent.checkpoint("without")
    take_away(store, "chunk")
    agent.state["b"] = [big, other]
    saved(agent)
    agent.close()
    assert store.agent("x").state["b"] == [big, other]


def test_a_large_container_that_was_dropped_and_comes_back(store):
    agent = store.agent("x")
    rows = [{"n": n, "t": "x" * 200} for n in range(400)]
    agent.state["d"] = {"rows": rows}
    agent.checkpoint("with")
    held = agent.state["d"]["rows"]
    del agent.state["d"]["rows"]
    agent.checkpoint("without")
    take_away(store, "node")
    agent.state["d"]["again"] = rows
    agent.state["more"] = [1, {"two": 3}]
    saved(agent)
    expected = holdfast.plain(agent.state)
    agent.close()
    assert holdfast.plain(store.agent("x").state) == expected
    assert len(held) == 400


def test_what_is_there_is_not_written_again_and_is_written_if_it_goes_meanwhile(store, monkeypatch):
    agent = store.agent("x")
    rows = [{"n": n, "t": f"{n} " * 100} for n in range(400)]
    agent.state["d"] = {"rows": rows}
    agent.checkpoint("with")
    has_nodes, looked = View.has_nodes, []

    def gone_when_found(self, digests):
        found = has_nodes(self, digests)
        if type(self) is View and found:  # whoever is about to write; the transaction looks by itself
            looked.append(found)
            if len(looked) == 2:
                take_away(store, "node")
        return found

    monkeypatch.setattr(View, "has_nodes", gone_when_found)
    for number in (1, 2):
        del agent.state["d"]["rows"]
        agent.checkpoint("without")
        agent.state["d"]["rows"] = [dict(row) for row in rows]
        agent.checkpoint(f"again {number}")
        assert len(looked) == number
    monkeypatch.undo()
    agent.close()
    assert holdfast.plain(store.agent("x").state) == {"d": {"rows": rows}}


def test_a_checkpoint_that_names_what_is_gone_is_refused_and_the_next_one_is_whole(store, monkeypatch):
    """Nothing that is known makes the document name such a thing; this is what happens if it does all the same."""
    agent = store.agent("x")
    agent.state["d"] = {"rows": [{"n": n, "t": "x" * 200} for n in range(400)]}
    capture = agent._document.capture

    def forgetful(under_way=()):
        captured = capture(under_way)
        captured.nodes.clear()
        return captured

    monkeypatch.setattr(type(agent._document), "capture", lambda _self, under_way=(): forgetful(under_way))
    with pytest.raises(StoreBusy, match="was just removed"):
        agent.checkpoint("refused")
    monkeypatch.undo()
    assert agent.dirty
    agent.checkpoint("whole")
    expected = holdfast.plain(agent.state)
    agent.close()
    assert holdfast.plain(store.agent("x").state) == expected


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_told_anew_is_the_state(store, seed):
    rng = random.Random(seed)
    agent = store.agent("x")
    for step in range(40):
        name = rng.choice("abc")
        change = rng.randrange(6)
        if change == 0:
            agent.state[name] = [{"n": n, "t": "y" * rng.randrange(300)} for n in range(rng.randrange(200))]
        elif change == 1:
            agent.state[name] = {str(n): ["z" * 100] * rng.randrange(5) for n in range(rng.randrange(300))}
        elif change == 2:
            agent.state.pop(name, None)
        elif change == 3:
            agent.state[name] = rng.randbytes(rng.choice((10, 300_000)))
        elif isinstance(agent.state.get(name), list):
            agent.state[name].append({"step": step, "big": ["w" * 90 for _ in range(rng.choice((1, 400)))]})
        if rng.random() < 0.2:
            agent._document.retell()
        if rng.random() < 0.6:
            agent.checkpoint(str(step))
    agent.checkpoint("end")
    expected = holdfast.plain(agent.state)
    history = [(one.label, one.id) for one in agent.log()]
    agent.close()
    again = store.agent("x")
    assert holdfast.plain(again.state) == expected
    assert list(again.state) == list(expected)
    for label, _ in history:
        holdfast.plain(again.at(label).state)
    assert store.verify().ok


def test_a_segment_rests_on_what_its_checkpoints_have_added_however_long_the_history_is(store):
    with limits({"SEAL_CHECKPOINTS": 20}):
        agent = store.agent("x")
        messages = agent.state.setdefault("messages", [])
        for number in range(400):
            messages.append(random.Random(number).randbytes(2_000))
            agent.checkpoint()
        store._tending.stop()
        for point in agent._walk():
            if point.row.sealed:
                fold_below(store._db, point.n)
    rows = store._db.view.rows("segment")
    assert len(rows) > 10
    leaves = [len(split_refs(refs)[0]) for _, _, refs, *_ in rows]
    assert 0 < max(leaves) <= 3
    assert all(len(operations) < 4_500 for *_, operations in rows), "of twenty messages of 2,000 bytes"
