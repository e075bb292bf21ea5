"""Histories that go from one store to another."""

from __future__ import annotations

import os
import random

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agent import arrival
from holdfast.errors import AgentBusy, BadOption, Damaged, HistoriesDiverged, ReadOnly, UnknownAgent
from tests.agent.carried import assert_same, grow, opened, plain, small_limits, sound, view
from tests.conftest import SOAK


@pytest.fixture
def stores(tmp_path):
    with opened(tmp_path / "a") as source, opened(tmp_path / "b") as dest:
        yield source, dest


def say(store, text, branch="main"):
    """One more checkpoint of the agent; its id."""
    with store.agent("trip", branch=branch) as agent:
        agent.state.setdefault("said", []).append(text)
        return agent.checkpoint(text).id


def head(store, name="trip", branch="main"):
    return store.agent(name, branch=branch, readonly=True).head.id


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_an_agent_arrives_whole(stores):
    source, dest = stores
    plain(source, "trip", 5)
    (moved,) = source.push(dest).agents
    assert (moved.status, moved.arrived.checkpoints) == ("new", 5)
    assert_same(source, dest, "trip")
    before = dest._db.view.counts()
    assert source.push(dest).agents[0].status == "unchanged"
    assert dest._db.view.counts() == before, "nothing is written when nothing is missing"


@settings(max_examples=400 if SOAK else 4)
@given(seed=st.integers(0, 2**32))
def test_a_history_with_gaps_arrives_with_them(tmp_path_factory, seed):
    choose = random.Random(seed)
    here = tmp_path_factory.mktemp("t")
    with small_limits(), opened(here / "a") as source, opened(here / "b") as dest, opened(here / "c") as third:
        for _ in range(3):
            grow(source, "trip", choose, choose.randrange(1, 25), forgets=True)
            source.push(dest)
            sound(dest)
            ours, theirs = view(source, "trip"), view(dest, "trip")
            assert ours["checkpoints"].keys() <= theirs["checkpoints"].keys(), "what was forgotten here stays there"
            assert {name: one[2:] for name, one in ours["branches"].items()} == {
                name: one[2:] for name, one in theirs["branches"].items()
            }
            assert source.push(dest).agents[0].status == "unchanged"
        source.push(third)
        assert_same(source, third, "trip")


def test_only_what_is_new_moves(stores):
    source, dest = stores
    plain(source, "trip", 270, size=1_000)
    first = source.push(dest).agents[0].arrived
    plain(source, "trip", 3, size=1_000)
    second = source.push(dest).agents[0].arrived
    assert (second.checkpoints, second.chunks) == (3, 0)
    assert second.bytes < first.bytes / 20
    assert_same(source, dest, "trip", states=False)
    assert dest._db.view.counts()["segment"], "it is folded as usual"


def test_a_large_value_arrives_in_parts_and_once(stores, monkeypatch):
    source, dest = stores
    monkeypatch.setattr(arrival, "COME_BYTES", 10 * 2**20)
    with source.agent("trip") as agent, source.agent("other") as other:
        agent.state["film"] = other.state["film"] = os.urandom(20 * 2**20)
        agent.checkpoint("film")
        other.checkpoint("the same")
    chunks = [one.arrived.chunks for one in source.push(dest).agents]
    assert chunks == [3, 0]
    for name in ("trip", "other"):
        assert_same(source, dest, name)


def test_some_agents_and_another_name(stores):
    source, dest = stores
    for name in ("one", "two", "three"):
        plain(source, name, 2)
    source.push(dest, ["one", "three"])
    assert sorted(info.name for info in dest.agents()) == ["one", "three"]
    source.push(dest, ["two"], new_name="zwei")
    assert_same(source, dest, "two", "zwei")
    plain(source, "two", 1)
    assert source.push(dest, ["two"]).agents[0].status == "updated", "it is known by its uuid"
    assert len(dest.agents()) == 3
    with pytest.raises(BadOption):
        source.push(dest, ["one", "two"], new_name="both")
    with pytest.raises(UnknownAgent):
        source.push(dest, ["nobody"])


def test_a_clone_is_refs(stores):
    source, dest = stores
    with small_limits():
        grow(source, "trip", random.Random(1), 40)
        source.push(dest)
        source.clone("trip", "copy")
        moved = {one.name: one for one in source.push(dest).agents}["copy"]
        assert (moved.status, moved.arrived.checkpoints, moved.arrived.records) == ("new", 0, 0)
        assert_same(source, dest, "copy")
        grow(source, "copy", random.Random(2), 20)
        source.clone("copy", "copy of a copy")
        source.remove("trip")
        source.push(dest, ["copy of a copy"])
        assert_same(source, dest, "copy of a copy")
        assert dest.remove("trip").done
        assert_same(source, dest, "copy of a copy")


def test_agents_that_are_the_same_cost_a_few_queries_however_many_they_are(tmp_path, rounds):
    with opened(tmp_path / "a", durability="batched") as source, opened(tmp_path / "b") as dest:
        for number in range(rounds(200, 2_000)):
            source._add_agent(f"agent {number}")
        source.push(dest)
        questions = []
        real = type(dest._db.engine).run
        dest._db.engine.run = lambda sql, args=(): questions.append(sql) or real(dest._db.engine, sql, args)
        assert {one.status for one in source.push(dest).agents} == {"unchanged"}
        assert len(questions) < 10


def test_between_stores_with_and_without_a_key(tmp_path):
    key = os.urandom(32)
    with (
        opened(tmp_path / "plain") as one,
        opened(tmp_path / "secret", key=key) as two,
        opened(tmp_path / "plain again") as three,
        small_limits(),
    ):
        grow(one, "trip", random.Random(9), 30)
        for _ in range(2):
            one.push(two)
            two.push(three)
            assert_same(one, two, "trip", states=False)
            assert_same(one, three, "trip")
            grow(one, "trip", random.Random(10), 8)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_another_agent_of_that_name_is_left_alone(stores):
    source, dest = stores
    say(source, "ours")
    theirs = say(dest, "theirs")
    with pytest.raises(HistoriesDiverged) as caught:
        source.push(dest)
    assert caught.value.agent == "trip"
    assert head(dest) == theirs
    source.push(dest, new_name="trip-2")
    sound(dest)


def test_a_store_is_not_pushed_into_itself_or_a_reader(stores, tmp_path):
    source, _ = stores
    with pytest.raises(BadOption):
        source.push(source)
    opened(tmp_path / "c").close()
    with opened(tmp_path / "c", readonly=True) as reader, pytest.raises(ReadOnly):
        source.push(reader)


def test_a_writer_over_there_is_not_disturbed(stores):
    source, dest = stores
    say(source, "one")
    source.push(dest)
    two = say(source, "two")
    with dest.agent("trip") as agent:
        with pytest.raises(AgentBusy):
            source.push(dest)
        assert agent.head.label == "one"
    source.push(dest)
    assert head(dest) == two
    assert_same(source, dest, "trip")


def test_damage_at_the_source_does_not_travel(stores, tmp_path):
    source, dest = stores
    plain(source, "trip", 3)
    source.push(dest)
    there = view(dest, "trip")
    plain(source, "trip", 3)
    source.close()
    connection = apsw.Connection(str(tmp_path / "a" / "store.db"))
    connection.execute("UPDATE loose SET data = zeroblob(length(data)) WHERE n = 5")
    connection.close()
    with opened(tmp_path / "a") as again, pytest.raises(Damaged):
        again.push(dest)
    assert view(dest, "trip") == there
    assert dest.verify().ok
