"""Blame names the checkpoint that last changed a place, as a model that compares all states does."""

from __future__ import annotations

from contextlib import closing
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import UnknownRevision

EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "pop", "swap", "reverse", "deep", "whole", "same"]), st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path) as store:
        yield store.agent("trip-7", when=None)


def test_the_checkpoint_the_effect_and_the_line_are_named(agent):
    @holdfast.tool(name="blamed.price")
    def price(city):
        return 700

    with agent:
        agent.state["budget"] = 900
        agent.checkpoint("asked")
        agent.state["budget"] -= price("Lisbon")
        agent.checkpoint("priced")
        agent.state["note"] = "x"
        agent.checkpoint("noted")
    found = agent.blame("budget")
    assert (found.checkpoint.label, found.kind, found.old, found.new) == ("priced", "changed", 900, 200)
    assert [effect.tool.rpartition(".")[2] for effect in found.cause.effects] == ["price"]
    assert found.cause.caller.startswith("test_blame.py:")
    assert found.exact
    assert agent.blame("state.budget", at="asked").kind == "added"
    assert agent.blame(["note"]).checkpoint.label == "noted"
    with pytest.raises(UnknownRevision):
        agent.blame("never.there")
    del agent.state["note"]
    agent.checkpoint("gone")
    gone = agent.blame("note")
    assert (gone.checkpoint.label, gone.kind, gone.old) == ("gone", "removed", "x")


def test_an_item_is_followed_through_the_moves_of_others(agent):
    agent.state["items"] = [{"id": n, "text": "x" * 50} for n in range(20)]
    items = agent.state["items"]
    agent.checkpoint("made")
    items[10]["text"] = "changed"
    agent.checkpoint("changed")
    for n in range(5):
        items.insert(0, {"id": 100 + n})
        agent.checkpoint(f"before {n}")
    items[:] = holdfast.plain(items)[::-1]
    agent.checkpoint("reversed")
    at = next(index for index, item in enumerate(items) if item.get("text") == "changed")
    found = agent.blame(f"items[{at}].text")
    assert found.checkpoint.label == "changed"
    assert found.path_then == ("items", 10, "text")
    assert agent.blame(f"items[{at}].id").checkpoint.label == "made"
    assert agent.blame("items[-1].id").checkpoint.label == "before 4"


def test_it_reads_operations_and_not_states(agent, monkeypatch):
    agent.state["budget"] = 1
    agent.state["log"] = []
    agent.checkpoint("set")
    for n in range(300):
        agent.state["log"].append(n)
        agent.checkpoint(f"c{n}")
    from holdfast.agent import history

    loaded = []
    real = history.state_of
    monkeypatch.setattr(history, "state_of", lambda *args: loaded.append(args) or real(*args))
    assert agent.blame("budget").checkpoint.label == "set"
    assert len(loaded) <= 8


def test_where_history_was_forgotten_it_says_so(agent):
    agent.state["budget"] = 1
    for n in range(6):
        agent.state["n"] = n
        agent.state["budget"] = 2 if n >= 3 else 1
        agent.checkpoint(f"c{n}")
    agent._store.retain(holdfast.Policy(last=1))
    found = agent.blame("budget")
    assert found.checkpoint.label == "c5"
    assert not found.exact


def test_what_leaves_a_list_as_it_was_is_no_change(agent):
    agent.state["q"] = [1, 2, 3]
    agent.state["empty"] = []
    agent.checkpoint("made it")

    def back():
        agent.state["q"].append(4)
        agent.state["q"].pop()

    for number, nothing in enumerate(
        [agent.state["q"].sort, lambda: agent.state["q"].extend([]), back, agent.state["empty"].clear]
    ):
        nothing()
        made = agent.checkpoint(f"innocent {number}")
        assert not made.changes()
        nothing()
        agent.state["n"] = number
        agent.checkpoint(f"innocent {number}, beside another")
    for path in ("q", "q[1]", "empty"):
        assert agent.blame(path).checkpoint.label == "made it"
    agent.state["q"].append(5)
    agent.checkpoint("guilty")
    assert agent.blame("q").checkpoint.label == "guilty"


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    with holdfast.open(tmp_path_factory.mktemp("model") / "store", durability="batched") as store:
        yield store


@settings(max_examples=30)
@given(history=st.lists(EDITS, min_size=2, max_size=6), data=st.data())
def test_it_says_what_comparing_all_states_would_say(history, data, many):
    with closing(many.agent(f"a{uuid4()}", when=None)) as agent:
        agent.state["rows"] = [[n, {"v": n}] for n in range(6)]
        rows = agent.state["rows"]
        agent.checkpoint("0")
        states = [holdfast.plain(rows)]
        for number, edits in enumerate(history, 1):
            for what, where in edits:
                edit(rows, what, where, number)
            agent.checkpoint(str(number))
            states.append(holdfast.plain(rows))
        if not rows:
            return
        at = data.draw(st.integers(0, len(rows) - 1))
        found = agent.blame(("rows", at))
        last = int(found.checkpoint.label)
        value = states[-1][at]
        # From the checkpoint that is named on, the item was there all the time; what it was, it became there.
        assert all(value in state for state in states[last:])
        if value not in states[last - 1] or last == 0:
            return
        assert found.kind in {"added", "changed"}  # another one of the same value went, or it was put in anew


def edit(rows, what, where, number):
    at = where % len(rows) if rows else 0
    if what == "insert":
        rows.insert(at, [1_000 * number + where, {"v": 0}])
    elif rows and what == "set":
        rows[at] = [number, {"v": where}]
    elif rows and what == "pop":
        rows.pop(at)
    elif rows and what == "swap":
        rows[at], rows[0] = holdfast.plain(rows[0]), holdfast.plain(rows[at])
    elif what == "reverse":
        rows[:] = holdfast.plain(rows)[::-1]
    elif rows and what == "deep":
        rows[at][1]["v"] = 10_000 * number + where
    elif what == "whole":
        rows[:] = holdfast.plain(rows)
