"""What is handed out of a section: it is what was saved, and nobody else has it, whoever keeps what of it."""

from __future__ import annotations

import copy
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from holdfast.codec import proofs
from holdfast.codec.assigned import Assigned
from holdfast.codec.proofs import COUNTS, identical
from tests.codec.kinds import Extra, Model, Note
from tests.codec.memory import TYPES, Memory, same
from tests.codec.test_assigned import check


def inside(value: Any, found: dict[int, Any] | None = None) -> dict[int, Any]:
    """Everything in a value that can change, by id."""
    found = {} if found is None else found
    if id(value) in found:
        return found
    if isinstance(value, tuple):
        for item in value:
            inside(item, found)
    elif isinstance(value, list | dict | set | Note | Model | Extra):
        found[id(value)] = value
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for part in [*parts, *([vars(value)] if hasattr(value, "__dict__") else [])]:
            inside(part, found)
        if isinstance(value, Model | Extra):
            inside(value.__pydantic_fields_set__, found)
            inside(value.__pydantic_extra__, found)
    return found


class Handing:
    """A program that asks for a value again and again, keeps parts of what it got, and changes others."""

    KEPT = 6

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.assigned = Assigned(TYPES, Memory().head)
        self.live = [self.item() for _ in range(source.choice((3, 70, 150)))]
        self.assigned.assign({"x": self.live})
        self.live = copy.deepcopy(self.live)
        self.kept: list[Any] = []

    def item(self) -> Any:
        kinds = (
            lambda: Note("note", ["t", "u"]),
            lambda: Model(name="m", anything={"a": [1]}),
            lambda: Extra(name="e", more=[{"k": []}]),
            lambda: Note("outer", [], Note("inner", ["deep"])),
            lambda: {"a": [], "b": {"c": {1, 2}}},
            lambda: ([1], {"k": (Note("in a tuple"), [2])}),
            lambda: "text",
        )
        return self.source.choice(kinds)()

    def keep(self, value: list[Any]) -> None:
        """Some part of it, by one of the ways in which something can be kept."""
        parts = [*inside(value).values()]
        part = self.source.choice(parts)
        ways: list[Any] = [lambda: part, lambda: (part,), lambda: iter(parts[-1:]), lambda: partial(print, part)]
        if isinstance(part, Note | Model | Extra):
            ways += [lambda: vars(part), lambda: weakref.ref(part), lambda: part.__repr__]
        if isinstance(part, dict | list) and part:
            ways.append(lambda: iter(part))
        if isinstance(part, dict):
            ways.append(part.items)
        self.kept.append((self.source.choice(ways)(), part if self.source.random() < 0.5 else None))
        del self.kept[: -self.KEPT]

    def change(self, value: list[Any]) -> None:
        part = self.source.choice([*inside(value).values()])
        if isinstance(part, list):
            part.append("changed")
        elif isinstance(part, dict):
            part[next(iter(part), "a")] = "changed"  # it may be what an instance has its fields in
        elif isinstance(part, set):
            part.add("changed")
        else:
            part.__dict__[next(iter(part.__dict__))] = "changed"

    def held(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for how, part in self.kept:
            inside(how() if isinstance(how, weakref.ref) else how, found)
            inside(part, found)
        return found

    def step(self) -> None:
        value = self.assigned.still().value("x", returning=True)
        assert same(value, self.live)
        assert not inside(value).keys() & self.held().keys()
        what = self.source.random()
        if what < 0.3 and inside(value):
            self.change(value)
        elif what < 0.5:
            value.insert(self.source.choice((len(value), self.source.randrange(len(value) + 1))), self.item())
        elif what < 0.6 and value:
            del value[self.source.randrange(len(value))]
        if self.source.random() < 0.6 and inside(value):
            self.keep(value)
        if what < 0.8:
            self.assigned.assign({"x": value})
            self.live = copy.deepcopy(value)
            check(self.assigned, {"x": self.live})
        if what < 0.1 and inside(value):
            self.change(value)  # after it was saved


def test_what_is_handed_out_is_what_was_saved_and_nobody_elses(rounds):
    """Whatever somebody keeps of one answer, or changes in it, the next one has nothing of it."""
    for seed in range(rounds(30, 5_000)):
        program = Handing(random.Random(seed))
        for _ in range(12):
            program.step()


@pytest.mark.skipif(not COUNTS, reason="counts of references say nothing here")
def test_what_nobody_has_any_more_is_handed_out_again():
    """Which is why a turn of a chat costs little: also while the program has the answer before.

    Models, as messages are: Python 3.13 does not say of other instances what they refer to.
    """
    assigned = Assigned(TYPES)
    assigned.assign({"x": [Model(name=str(number), anything=["t"]) for number in range(200)]})
    answers = [assigned.still().value("x", returning=True) for _ in range(2)]
    seen = [list(map(id, value)) for value in answers]
    for turn in range(4):
        answers[turn % 2] = [Model(name="in the place of what is freed") for _ in range(200)]
        answers[turn % 2] = assigned.still().value("x", returning=True)
        assert list(map(id, answers[turn % 2])) == seen[turn % 2]


def test_threads_that_ask_at_once_get_nothing_of_each_other():
    assigned = Assigned(TYPES)
    assigned.assign({"x": [Note(str(number), ["t"]) for number in range(200)]})
    other = Assigned(TYPES, known=assigned.known)  # as two threads of a graph may have the same value
    other.assign({"x": [Note(str(number), ["t"]) for number in range(200)]})
    sources = (assigned.still(), other.still())
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            found = list(pool.map(lambda source: source.value("x", returning=True), 2 * sources))
            everything = [id(part) for value in found for part in inside(value).values()]
            assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("addresses", [True, False])
def test_an_equal_object_is_never_taken_for_the_very_same_one(addresses, monkeypatch):
    monkeypatch.setattr(proofs, "_ADDRESSES", addresses and proofs._ADDRESSES)
    many = [object() for _ in range(100)]
    assert identical(many, tuple(many))
    assert not identical(many, many[:-1])
    for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ([1], [1]), ({}, {}), (many[1], many[2])):
        for length in (1, 100):
            for at in {0, length // 2, length - 1}:
                here, there = many[:length], many[:length]
                here[at], there[at] = one, other
                assert not identical(here, there)


def test_addresses_are_found_wherever_references_are_counted():
    assert proofs._ADDRESSES is COUNTS
