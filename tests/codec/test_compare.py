"""Differences: done on one state they give the other, and they are small when the difference is."""

from __future__ import annotations

import copy
import random

import pytest

from holdfast.codec import operations as op
from holdfast.codec.document import Document, plain
from tests.codec.fuzz import TYPES as FUZZED
from tests.codec.fuzz import World
from tests.codec.kinds import Note
from tests.codec.memory import TYPES


def document(types=TYPES, **sections):
    made = Document(types)
    made.update(sections)
    made.digests()
    return made


def lead(old, new):
    one, two = document(**old), document(**new)
    way = one.told.differences(two.told)
    one.become(two.told, record=True)
    assert one.digests() == two.digests()
    assert list(one) == list(two)
    assert plain(one) == plain(two)
    return way


CASES = {
    "nothing": ({"a": [1, {"x": 1}]}, {"a": [1, {"x": 1}]}, 0),
    "one value": ({"a": {"x": 1, "y": [1, 2]}}, {"a": {"x": 1, "y": [1, 3]}}, 1),
    "type only": ({"a": [1, True, 1.0]}, {"a": [True, 1.0, 1]}, None),
    "append": ({"a": list(range(50))}, {"a": list(range(52))}, 1),
    "insert": ({"a": [1, 2, 3]}, {"a": [1, "x", 2, 3]}, 1),
    "inside an item": ({"a": [{"n": [1]}, {"n": [2]}]}, {"a": [{"n": [1]}, {"n": [2, 3]}]}, 1),
    "order of keys": ({"a": {"x": 1, "y": 2, "z": 3}}, {"a": {"x": 1, "z": 3, "y": 2}}, 2),
    "order of sections": ({"a": 1, "b": [2], "c": 3}, {"c": 3, "a": 1, "b": [2]}, 4),
    "kind": ({"a": [1]}, {"a": {"x": 1}}, 1),
    "set": ({"a": {1, 2, 3}}, {"a": {2, 3, 4}}, 2),
    "instance": ({"a": [Note("x")]}, {"a": [Note("y")]}, 1),
    "non-text keys": ({"a": {1: [1], (1, 2): 3}}, {"a": {(1, 2): 3, 1: [1, 2]}}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_way_between_two_states(name):
    old, new, count = CASES[name]
    way = lead(old, new)
    if count is not None:
        assert len(way) == count
    lead(new, old)


def test_a_reversed_list_is_one_arrangement():
    items = [{"n": number, "t": "x" * 100} for number in range(500)]
    (only,) = lead({"a": items}, {"a": items[::-1]})
    assert only.code == op.ARRANGE
    assert len(str(only)) < 200


def test_equal_items_of_a_list_in_another_order_are_one_arrangement():
    items = [f"{number % 7} " + "x" * 100 for number in range(200)] + [f"one {number}" for number in range(3)]
    shuffled = items.copy()
    random.Random(3).shuffle(shuffled)
    (only,) = lead({"a": items}, {"a": shuffled})
    assert only.code == op.ARRANGE
    places = [start + at * step for start, count, step in only.args[0] for at in range(count)]
    assert sorted(places) == list(range(len(items)))


def test_more_of_an_item_than_there_was_is_written_only_where_it_is_new():
    items = ["x" * 300, "y" * 300, "z" * 300, "x" * 300]
    more = ["x" * 300, "z" * 300, "x" * 300, "x" * 300, "y" * 300]
    (only,) = lead({"a": items}, {"a": more})
    assert only.code == op.ARRANGE
    assert [len(piece) for piece in only.args[0]].count(1) == 1


def test_big_lists_are_compared_by_leaf():
    items = [{"n": number, "t": f"{number} " + "x" * 300} for number in range(5_000)]
    changed = copy.deepcopy(items)
    changed[2_500]["t"] = "changed"
    changed.insert(100, {"new": 1})
    assert len(lead({"a": items}, {"a": changed})) == 2


def test_many_different_items_are_matched_by_content():
    source = random.Random(5)
    items = [{"n": number} for number in range(5_000)]
    shuffled = copy.deepcopy(items)
    source.shuffle(shuffled)
    shuffled[10] = {"other": 1}
    lead({"a": items}, {"a": shuffled})
    lead({"a": list(range(5_000))}, {"a": [number * 2 for number in range(4_000)]})


def test_random_states_lead_to_each_other(rounds):
    for seed in range(rounds(100, 5_000)):
        source = random.Random(seed)
        world = World(source)
        old = {name: world.value() for name in source.sample("abcd", source.randrange(1, 4))}
        new = copy.deepcopy(old)
        for name in source.sample("abcd", 2):
            new[name] = world.value() if source.randrange(3) else copy.deepcopy(source.choice(list(old.values())))
        if source.randrange(2):
            new = dict(reversed(new.items()))
        one, two = document(FUZZED, **old), document(FUZZED, **new)
        one.become(two.told, record=True)
        assert one.digests() == two.digests()
        assert plain(one) == plain(two)
