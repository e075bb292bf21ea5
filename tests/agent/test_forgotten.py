"""A live state counts on objects that a collection has taken away meanwhile: nothing is written that cannot be read."""

from __future__ import annotations

import os
import random

import pytest

import holdfast
from holdfast.agent.store import Store, open_as
from holdfast.errors import StoreBusy


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


@pytest.fixture
def store(tmp_path):
    with open_as(Store, tmp_path / "store") as store:
        yield store


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
    with pytest.raises(StoreBusy, match="forgotten just now"):
        agent.checkpoint("refused")
    monkeypatch.undo()
    assert agent.dirty
    agent.checkpoint("whole")
    expected = holdfast.plain(agent.state)
    agent.close()
    assert holdfast.plain(store.agent("x").state) == expected


@pytest.mark.parametrize("seed", range(6))
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
