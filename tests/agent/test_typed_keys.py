"""Keys and set items of registered types: every reader that does not have the classes sees the same state."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast


class Kind(enum.Enum):
    ONE = 1
    TWO = [2, 3]  # noqa: RUF012 - the value of a member may be anything


class Word(enum.StrEnum):
    ONE = "one"
    TWO = "two"


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    x: Any
    y: int = 0


@dataclass(frozen=True)
class Point:
    x: Any


@dataclass(frozen=True, eq=False)
class Single:
    """Equal to nothing but itself."""

    x: int


class Thing:
    """Mutable, and hashed by identity."""

    def __init__(self, x: Any) -> None:
        self.x = x


TYPES: list[Any] = [Kind, Word, Mode, Pair, Point, Single, Thing]
KEYS = {
    "enum": (Kind.ONE, Kind.TWO),
    "text enum": (Word.ONE, Word.TWO),
    "flags": (Mode.READ | Mode.WRITE, Mode.READ),
    "named tuple": (Pair(1), Pair(2)),
    "frozen": (Point(1), Point(2)),
    "frozen in frozen": (Point(Point(1)), Point((Pair(2), Kind.ONE))),
    "tuple": ((Point(1), 1), (Point(2), (Kind.ONE,))),
    "frozenset": (frozenset({Point(1), Kind.ONE}), frozenset({Point(2)})),
    "beside others": ("plain", Point(2)),
}


def small(one: Any, two: Any) -> Callable[[holdfast.Agent], None]:
    def change(agent: holdfast.Agent) -> None:
        state = agent.state
        state["d"], state["s"] = {one: [1]}, {one}
        state["in"] = {"d": {one: {"n": 1}}, "s": {one}, "l": [{one: 1}]}
        agent.checkpoint("one")
        state["d"][one].append(2)
        state["d"][two] = [2]
        state["s"].add(two)
        state["in"]["d"][one]["n"] = 2
        state["in"]["s"].add(two)
        state["in"]["l"][0][two] = 2
        agent.checkpoint("two")
        del state["d"][one], state["in"]["d"][one]
        state["s"].remove(one)
        agent.checkpoint("three")
        agent.undo()

    return change


def large(make: Callable[[int], Any]) -> Callable[[holdfast.Agent], None]:
    def change(agent: holdfast.Agent) -> None:
        state = agent.state
        state["x"] = {"d": {make(i): [i] for i in range(600)}, "s": {make(i) for i in range(1500)}}
        agent.checkpoint("one")
        state["x"]["d"][make(5)].append(1)
        state["x"]["s"].add(make(9999))
        agent.checkpoint("two")
        del state["x"]["d"][make(7)]
        state["x"]["s"].discard(make(8))
        agent.checkpoint("three")

    return change


def met_twice(agent: holdfast.Agent) -> None:
    """Items that hold one instance twice: its number is not the same in the item and in the set."""
    one, two = Point(1), Point(2)
    agent.state["s"], agent.state["in"] = {(one, one)}, [{(one, one)}]
    agent.checkpoint("one")
    agent.state["s"].add((two, two))
    agent.state["in"][0].add((two, two))
    agent.checkpoint("two")
    agent.state["in"] = [agent.state["in"][0], 1]
    agent.checkpoint("three")
    assert holdfast.plain(agent.state["in"]) == [{(one, one), (two, two)}, 1]


WAYS: dict[str, Callable[[holdfast.Agent], None]] = {
    **{name: small(*keys) for name, keys in KEYS.items()},
    "met twice": met_twice,
    "many frozen": large(Point),
    "many tuples": large(lambda i: (Kind.ONE, i)),
    "many named tuples": large(Pair),
}


def read_by_others(path: Path, agent: str) -> None:
    """Prove a store, and a copy of it, without any class."""
    with holdfast.open(path) as store, holdfast.open(path.with_suffix(".copy")) as copy:
        report = store.verify()
        assert report.ok, str(report)
        store.push(copy)
        report = copy.verify()
        assert report.ok, str(report)
    with holdfast.open(path, inert=True, readonly=True) as store:
        for checkpoint in store.agent(agent).log():
            assert [name for name in checkpoint.state if repr(checkpoint.state[name])] == list(checkpoint.sections)


@pytest.mark.parametrize("name", WAYS)
def test_readers_without_the_classes_see_the_same_state(tmp_path, name):
    with holdfast.open(tmp_path / "a", types=TYPES) as store:
        agent = store.agent("x")
        WAYS[name](agent)
        agent.checkpoint("last")
        live = holdfast.plain(agent.state)
        assert store.verify().ok
    with holdfast.open(tmp_path / "a", types=TYPES) as store:
        assert holdfast.plain(store.agent("x").state) == live
    read_by_others(tmp_path / "a", "x")


@pytest.mark.parametrize("make", [Single, Thing], ids=["equal only to itself", "mutable"])
def test_items_that_can_change_or_equal_only_themselves_are_refused(tmp_path, make):
    with holdfast.open(tmp_path / "a", types=TYPES) as store:
        agent = store.agent("x")
        state = agent.state
        state["s"], state["d"] = set(), {}
        agent.checkpoint()
        for put in (
            lambda: state.update(new={make(1)}),
            lambda: state["s"].add(make(1)),
            lambda: state["d"].update({make(1): 1}),
            lambda: state.update(new=[{"x": {(1, make(1)): 2}}]),
        ):
            with pytest.raises(holdfast.Unencodable):
                put()
        assert (holdfast.plain(state), agent.dirty) == ({"s": set(), "d": {}}, False)


def test_changes_name_the_keys_that_the_store_knows(tmp_path):
    with holdfast.open(tmp_path / "a", types=TYPES) as store:
        agent = store.agent("x")
        agent.state["d"] = {Kind.ONE: [1], "text": {}}
        agent.checkpoint()
        agent.state["d"][Kind.ONE].append(2)
        agent.state["d"]["text"][(Point(1), 1)] = 3
        assert [change.path for change in agent.diff()] == [("d", Kind.ONE, 1), ("d", "text", (Point(1), 1))]
        last = agent.checkpoint()
        expected = [("d",), ("d", Kind.ONE, 1), ("d", "text", (Point(1), 1))]
        assert [change.path for change in agent.changes()] == expected
        assert [change.path for change in last.changes()] == expected[1:]
        agent.rollback("~1")
        assert agent.state["d"] == {Kind.ONE: [1], "text": {}}
        assert store.verify().ok
        last_id = last.id
    with holdfast.open(tmp_path / "a", inert=True, readonly=True) as store:
        shown = [change.where for change in store.agent("x").at(f"id:{last_id}").changes()]
        assert len(shown) == 2
        assert "Kind.ONE" in shown[0]


def test_a_class_may_get_a_field_beside_a_dict_with_typed_keys(tmp_path):
    before = make_dataclass("Person", [("x", int)], namespace={"__module__": __name__})
    now = make_dataclass("Person", [("x", int), ("y", int, 0)], namespace={"__module__": __name__})
    with holdfast.open(tmp_path / "a", types=[Kind, Point, before]) as store:
        agent = store.agent("x")
        agent.state["s"] = {"who": before(1), "by": {Kind.ONE: [1]}, "set": {Point(1)}}
        agent.checkpoint()
        agent.state["s"]["by"][Kind.TWO] = [2]
        agent.state["s"]["by"][Kind.ONE].append(2)
        agent.state["s"]["set"].add(Point(2))
        agent.checkpoint()
    with holdfast.open(tmp_path / "a", types=[Kind, Point, now]) as store:
        agent = store.agent("x")
        expected = {"who": now(1, 0), "by": {Kind.ONE: [1, 2], Kind.TWO: [2]}, "set": {Point(1), Point(2)}}
        assert agent.state["s"] == expected
        agent.state["s"]["by"][Kind.TWO].append(3)
        agent.checkpoint()
        assert store.verify().ok
