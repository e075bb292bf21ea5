"""Lists of agents: pages, counts that cost little, who writes, and on whose behalf something is changed."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.agent import graph as graphs
from holdfast.agent.graph import Graph


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as opened:
        yield opened


STEPS = st.lists(st.tuples(st.sampled_from(["save", "back", "branch", "tag", "other"]), st.integers(0, 9)), max_size=14)


@given(STEPS, st.sampled_from([2, 2_000]))
@settings(max_examples=15)
def test_counting_gives_what_walking_gives(tmp_path_factory, steps, most):
    with (
        pytest.MonkeyPatch.context() as patch,
        holdfast.open(tmp_path_factory.mktemp("fleet") / "store", durability="batched") as store,
    ):
        patch.setattr(graphs, "_STEPS_MOST", most)
        current = agent = store.agent("a", when=None)
        made, branches = [agent.checkpoint()], [agent]
        for what, number in steps:
            if what == "save":
                current.state["n"] = len(made)
                made.append(current.checkpoint())
            elif what == "back":
                current.rollback(made[number % len(made)])
            elif what == "branch":
                branches.append(current.branch(f"b{len(branches)}", at=made[number % len(made)]))
            elif what == "tag":
                agent.tag(f"t{number}", made[number % len(made)])
            else:
                current = branches[number % len(branches)]
        store.flush()
        graph = Graph(store._db.view, store._agent_row("a"))
        assert graph.counted() == (len(graph.numbers), len(graph.tips()))


def test_pages_are_the_list_in_pieces(store):
    for name in "abcdefg":
        with closing(store.agent(name, when=None)) as agent:
            agent.checkpoint()
    whole = [one.name for one in store.agents(sort="name")]
    pieces = [store.agents(limit=3, offset=offset, sort="name") for offset in (0, 3, 6, 9)]
    assert [one.name for piece in pieces for one in piece] == whole == list("abcdefg")
    assert [piece.more for piece in pieces] == [4, 1, 0, 0]
    with pytest.raises(holdfast.errors.BadOption):
        store.agents(offset=-1)


def test_what_has_changed_can_be_seen_cheaply(store):
    before = datetime.now(UTC)
    for name in ("a", "b"):
        with closing(store.agent(name, when=None)) as agent:
            agent.checkpoint()
    first = store.updated()
    assert set(first) == {"a", "b"}
    assert all(before <= time <= datetime.now(UTC) for time in first.values())
    with closing(store.agent("a", when=None)) as agent:
        agent.checkpoint()
        (holder,) = store.writers()
        assert (holder["agent"], holder["branch"]) == ("a", "main")
    assert not store.writers()
    assert store.updated()["a"] > first["a"]
    assert store.updated()["b"] == first["b"]


def test_who_acts_is_recorded_in_whichever_thread_it_is_written(store):
    with closing(store.agent("a", when=None)) as agent:
        saved = agent.checkpoint()
        with store.acting_as("alice"):
            store.tag("a", "good", saved)
            other = threading.Thread(target=store.tag, args=("a", "mine", saved))
            other.start()
            other.join()
        store.tag("a", "later", saved)
    found = {one["name"]: one["by"] for one in store.agent("a", readonly=True).events() if one["what"] == "tag"}
    assert found["good"] == "alice"
    assert "alice" not in {found["mine"], found["later"]}
    with pytest.raises(holdfast.errors.BadName), store.acting_as(""):
        pass
