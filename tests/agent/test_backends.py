"""The same promises on every backend: a directory, an encrypted one, and PostgreSQL."""

from __future__ import annotations

import os
import random
import uuid

import pytest

import holdfast
from holdfast.agent import branch
from holdfast.agent.background import Tending
from holdfast.agent.policy import Policy
from holdfast.agent.store import Store
from holdfast.errors import AgentBusy, Fenced
from holdfast.store.changes import NewRecord
from tests.agent.damage import KEY
from tests.memory import memory


class Place:
    """Where a store is, and how it is opened."""

    def __init__(self, where: str, key) -> None:
        self.where, self.key = where, key

    def open(self, **options) -> Store:
        return Store.opened(self.where, key=self.key, **options)


@pytest.fixture(params=["directory", "encrypted", "server"])
def make(request):
    """Makes places of one kind."""
    if request.param != "server":
        key = KEY if request.param == "encrypted" else False
        with memory() as folder:
            yield lambda name="store": Place(str(folder / name), key)
        return
    server = request.getfixturevalue("server")
    with server.database(f"test_{uuid.uuid4().hex}") as url:
        yield lambda name="store": Place(f"{url}&schema={name}", False)


@pytest.fixture
def place(make):
    return make()


def test_a_history_is_there_again(place, monkeypatch):
    monkeypatch.setattr(branch, "SEAL_CHECKPOINTS", 10)
    big = os.urandom(400_000)
    with place.open() as store:
        agent = store.agent("trip")
        agent.state["log"] = []
        for number in range(45):
            agent.state["log"].append({"n": number, "text": "x" * 300})
            agent.checkpoint(f"c{number}")
        agent.state["big"] = big
        agent.checkpoint("big")
        agent.tag("kept", at="c7")
        agent.rollback("c20")
        agent.state["after"] = True
        agent.checkpoint("after")
        agent.undo()
        assert "after" not in agent.state
        agent.redo()
        other = agent.branch("other", at="c3")
        other.state["log"].clear()
        other.checkpoint("cleared")
        store.copy("trip", "copy")
        assert store.verify().ok
    with place.open() as store:
        agent = store.agent("trip")
        assert agent.state["after"] is True
        assert [row["n"] for row in agent.state["log"]] == list(range(21))
        assert agent.at("kept").state["log"][-1]["n"] == 7
        assert agent.abandoned()[0].state["big"] == big
        assert len(agent.log(all=True)) == 50
        assert [one.depth for one in agent.log()] == list(range(24, 0, -1))
        assert store.agent("trip", branch="other").state["log"] == []
        assert store.agent("copy").head.id == agent.head.id
        assert store._db.view.counts()["segment"] > 0
        assert store.verify().ok


def test_records_are_a_line_that_branches_inherit(place):
    def said(records):
        return [(one.i, one.body) for one in records]

    with place.open() as store:
        agent = store.agent("x")
        agent.state["n"] = 0
        agent._writer.append([NewRecord(1, b"", b"one")], flush=True)
        agent.checkpoint("one")
        agent._writer.append([NewRecord(0, b"", b"two"), NewRecord(1, b"", b"three")], flush=False)
        agent.checkpoint("three")
        agent._writer.append([NewRecord(0, b"", b"four")], flush=False)
        agent.branch("side", at="one")
    with place.open() as store:
        view = store._db.view
        main, side = (store.agent("x", branch=name, readonly=True)._branch.b for name in ("main", "side"))
        assert said(branch.read_line(view, main)) == [(1, b"one"), (2, b"two"), (3, b"three"), (4, b"four")]
        assert said(branch.read_line(view, main, 2)) == [(3, b"three"), (4, b"four")]
        assert said(branch.read_line(view, main, marked=True)) == [(1, b"one"), (3, b"three")]
        assert said(branch.read_line(view, side)) == [(1, b"one")]


def test_one_writes_and_who_was_passed_over_is_fenced(place):
    with place.open() as store:
        agent = store.agent("x")
        agent.state["n"] = 1
        agent.checkpoint("one")
        raised = agent._branch.b
        with pytest.raises(AgentBusy):
            store._lease("x", store._db.view.branch_at(raised), wait_s=0.0)
        store._lease("x", store._db.view.branch_at(raised), wait_s=0.0, takeover=True).release()
        agent.state["n"] = 2
        with pytest.raises(Fenced):
            agent.checkpoint("two")
        assert agent.dirty
        agent.close()
        assert store.agent("x").state["n"] == 1


def test_what_is_forgotten_goes_and_the_rest_is_as_it_was(place, monkeypatch):
    monkeypatch.setattr(branch, "SEAL_CHECKPOINTS", 8)
    monkeypatch.setattr(Tending, "made", lambda *_args, **_options: None)
    with place.open() as store:
        states = {}
        for name in ("a", "b"):
            agent = store.agent(name)
            for number in range(30):
                agent.state[f"s{number % 3}"] = {"n": number, "rows": ["y" * 50] * number}
                states[name, number] = holdfast.plain(agent.state), agent.checkpoint(str(number)).id
        store.retain(Policy(last=5), ["a"])
        assert [one.label for one in store.agent("a").log()] == ["29", "28", "27", "26", "25"]
        store.remove("b")
        assert [info.name for info in store.agents()] == ["a"]
        assert store.verify().ok
    with place.open() as store:
        agent = store.agent("a")
        for one in agent.log():
            assert (holdfast.plain(one.state), one.id) == states["a", int(one.label)]


@pytest.mark.parametrize("seed", range(2))
def test_a_push_brings_everything_and_the_next_one_what_is_new(make, seed):
    rng = random.Random(seed)
    with make("one").open() as one, make("two").open() as two:
        agent = one.agent("x")
        for _ in range(3):
            for number in range(rng.randrange(1, 30)):
                agent.state["log"] = [*agent.state.get("log", []), {"n": number, "t": "z" * rng.randrange(200)}]
                agent.checkpoint(f"{number}")
            if rng.random() < 0.5:
                agent.rollback(f"~{rng.randrange(len(agent.log()))}")
                agent.state["moved"] = rng.random()
                agent.checkpoint("moved")
            one.push(two)
            there = two.agent("x", readonly=True)
            assert there.head.id == agent.head.id
            assert holdfast.plain(there.state) == holdfast.plain(agent.state)
            assert {point.id for point in there.log(all=True)} == {point.id for point in agent.log(all=True)}
        assert two.verify().ok
