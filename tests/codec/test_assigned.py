"""Sections that are given whole: the same digests, nodes and operations as a document with the same values."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.codec import operations as op
from holdfast.codec.assigned import Assigned
from holdfast.codec.blocks import node_digest
from holdfast.codec.diff import aligned as hunks
from holdfast.codec.diff import rekeyed
from holdfast.codec.document import Document
from holdfast.codec.operations import Operation
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import Damaged, Unencodable
from tests.codec.fuzz import World
from tests.codec.kinds import Celsius, Extra, Model, Note, Point, Wheel
from tests.codec.memory import TYPES, Memory, same

A, B, C, D = (Note(name) for name in "abcd")


def fresh(values: dict[str, Any]) -> Document:
    document = Document(TYPES)
    document.update(values)
    return document


def check(assigned: Assigned, live: dict[str, Any]) -> None:
    assert dict(assigned.digests()) == dict(fresh(live).digests())
    for name, value in live.items():
        assert same(assigned.value(name), value)


# -- random programs --------------------------------------------------------------------------------------------


class Values(World):
    """Random values of the classes that these tests know."""

    def __init__(self, source: random.Random) -> None:
        super().__init__(source, TYPES)

    def scalar(self) -> Any:
        return self.pick(
            (None, True, 1, 1.0, -0.0, 2**70, "", "text", "\ud800", b"\xff", (1, "a"), "y" * self.choose(400))
        )

    def key(self) -> Any:
        return self.pick(("a", "b", "c d", 1, (1, "k"), None, 2.5, b"k"))

    def instance(self) -> Any:
        return self.pick((lambda: Note("note", [1]), lambda: Model(name="m"), lambda: Note("outer", [Note("inner")])))()


class Giving:
    """A program that keeps plain values, changes them in place, and gives all of them at every step."""

    def __init__(self, source: random.Random) -> None:
        self.world = Values(source)
        self.choose = self.world.choose
        self.live: dict[str, Any] = {}
        self.away: dict[str, Any] = {}  # sections that are gone and may come back
        self.memory = Memory()
        self.assigned = Assigned(TYPES, self.memory.head)
        self.follower = Assigned(TYPES, self.memory.head)

    def value(self) -> Any:
        made = self.world.value()
        if self.choose(6) == 0:
            return [made, Model(name="m"), Extra(name="e", more=[1]), Wheel(1), Celsius([2]), made]
        return made

    def step(self) -> None:
        what = self.choose(8)
        name = "abc"[self.choose(3)]
        if what < 2 or not self.live:
            self.live[name] = self.value()
        elif what == 2 and name in self.live:
            self.away[name] = self.live.pop(name)
        elif what == 2 and name in self.away:
            self.live[name] = self.away.pop(name)
        elif what == 3 and name in self.live:
            self.live[name] = self.world.pick((copy.copy, copy.deepcopy))(self.live[name])
        else:
            for _ in range(1 + self.choose(3)):
                self.mutate()
        self.give()

    def give(self) -> None:
        gone = [name for name in self.assigned.names() if name not in self.live]
        self.assigned.assign(self.live, gone, returning="ab")
        check(self.assigned, self.live)

    def save(self) -> None:
        if self.choose(4) == 0:  # a write that fails
            self.assigned.capture()
        revision = self.memory.commit(self.assigned, seal=self.choose(4) == 0)
        self.follower.do(self.memory.newest)
        assert self.follower.digests() == revision.sections
        check(self.follower, self.live)
        loaded = Assigned(TYPES, revision)
        still = loaded.still()
        assert loaded.digests() == Document(TYPES, revision).digests() == revision.sections
        for name, value in self.live.items():
            assert same(loaded.value(name), value)
            assert same(still.value(name), value)
            assert same(revision.load(readonly=True).plain(revision.load(readonly=True)[name]), value)
        if self.choose(3) == 0:
            self.assigned = loaded
        if self.choose(3) == 0:  # what was handed out is given back
            for name in self.live:
                self.live[name] = self.assigned.value(name)

    def mutate(self) -> None:
        """Change something somewhere inside the live values."""
        found: list[Any] = []

        def walk(value: Any) -> None:
            if len(found) > 40 or any(value is known for known in found):
                return
            if isinstance(value, list | dict | set | Note | Model | Extra | Wheel | Celsius):
                found.append(value)
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            for item in [*inner][:5]:
                walk(item)
            if isinstance(value, Note | Model | Extra):
                for item in vars(value).values():
                    walk(item)

        for value in (*self.live.values(), *self.away.values()):
            walk(value)
        if found:
            self.mutate_one(self.world.pick(found))

    def mutate_one(self, target: Any) -> None:
        item = self.world.value(1)
        if isinstance(target, list):
            at = self.choose(len(target) + 1)
            target[at : at + self.choose(3)] = [item, self.world.scalar()][: self.choose(3)]
            if self.choose(4) == 0:
                target.reverse()
        elif isinstance(target, dict):
            key = self.world.key()
            if key in target and self.choose(2):
                old = target.pop(key)
                if self.choose(2):
                    target[key] = old
            else:
                target[key] = item
        elif isinstance(target, set):
            target.symmetric_difference_update({self.choose(9), self.world.pick((1, True, 1.0, "s", (1,)))})
        elif isinstance(target, Note):
            self.world.pick((lambda: setattr(target, "text", self.world.scalar()), lambda: target.tags.append("t")))()
        elif isinstance(target, Model):
            target.anything = item
        elif isinstance(target, Extra):
            target.more = item
        elif isinstance(target, Wheel):
            target.size = self.choose(100)
        else:
            target.__init__(item)


def test_programs_that_give_whole_values(rounds):
    for seed in range(rounds(10, 5_000)):
        program = Giving(random.Random(seed))
        for _ in range(25):
            program.step()
            if program.choose(2):
                program.save()


# -- what is recorded -------------------------------------------------------------------------------------------


def recorded(before: Any, after: Any) -> list[tuple[int, list[Any], tuple[Any, ...]]]:
    """The operations of an assignment, each with its path without the section and its arguments."""
    assigned = Assigned(TYPES)
    assigned.assign({"x": before})
    assigned.written(assigned.capture())
    assigned.assign({"x": after})
    check(assigned, {"x": after})
    return [(code, path[1:], args) for _, code, path, args in assigned.capture().operations]


ITEMS = [f"item {index} " + "x" * 40 for index in range(200)]


def test_equal_content_records_nothing():
    values = {"l": [1, [2], {"a": {3}}], "d": {"k": Note("n"), "m": [1]}, "s": {1, 2}, "v": Model(name="m"), "t": (1,)}
    assigned = Assigned(TYPES)
    assigned.assign(values)
    assigned.written(assigned.capture())
    assigned.assign(copy.deepcopy(values))
    assigned.assign(values)
    assert assigned.capture().operations == []


def test_a_longer_list_records_what_was_appended():
    assert recorded(ITEMS[:100], ITEMS[:103]) == [(op.SPLICE, [], (100, 0, [encode(item) for item in ITEMS[100:103]]))]


def test_a_changed_item_records_that_item():
    after = ITEMS.copy()
    after[70] = "other"
    assert recorded(ITEMS, after) == [(op.SET, [70], (encode("other"),))]


def test_a_sliding_window_records_what_came_and_went():
    assert recorded(ITEMS[:100], ITEMS[3:102]) == [
        (op.SPLICE, [], (0, 3, [])),
        (op.SPLICE, [], (97, 0, [encode(item) for item in ITEMS[100:102]])),
    ]


def test_a_change_and_an_append_do_not_rewrite_what_lies_between():
    after = [*ITEMS[:100], "new"]
    after[3] = "other"
    assert recorded(ITEMS[:100], after) == [
        (op.SET, [3], (encode("other"),)),
        (op.SPLICE, [], (100, 0, [encode("new")])),
    ]


def test_dict_keys_record_themselves():
    before = {item: index for index, item in enumerate(ITEMS)}
    after = {**before, ITEMS[4]: "other", "new": 1}
    del after[ITEMS[9]]
    assert recorded(before, after) == [
        (op.DELETE, [ITEMS[9]], ()),
        (op.SET, [ITEMS[4]], (encode("other"),)),
        (op.SET, ["new"], (encode(1),)),
    ]


def test_the_order_of_keys_is_part_of_the_value():
    before = {item: index for index, item in enumerate(ITEMS)}
    after = dict(before)
    after[ITEMS[150]] = after.pop(ITEMS[150])
    (code, path, _), *_ = recorded(before, after)
    assert (code, path) == (op.DELETE, [ITEMS[150]])
    assert recorded({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("one", "two"), [([1], [True]), ([0.0], [-0.0]), ({1: "a"}, {True: "a"}), ({1}, {1.0}), ((1,), (True,))]
)
def test_equal_is_not_the_same(one, two):
    assert recorded(one, two)
    assert recorded(two, one)


def test_sets_record_items():
    assert recorded(set(range(100)), set(range(1, 101))) == [
        (op.REMOVE, [], ([encode(0)],)),
        (op.ADD, [], ([encode(100)],)),
    ]


def test_another_kind_is_set():
    assert recorded([1], {"a": 1}) == [(op.SET, [], (encode({"a": 1}),))]
    assert recorded(["x"], ("x",)) == [(op.SET, [], (encode(("x",)),))]


def test_an_instance_in_two_items_is_two():
    note = Note("shared")
    assigned = Assigned(TYPES)
    for value in ([note, note], [Note("a"), {"x": note}, [note]], {"a": note, "b": (note,)}, [note, Note("b")]):
        assigned.assign({"x": value})
        check(assigned, {"x": value})
    assigned.assign({"x": [note, (note, note)]})
    one, (two, three) = assigned.value("x")
    assert one is not two
    assert two is three


def test_a_frozen_instance_may_be_anywhere():
    point = Point(1)
    assert len(recorded([point, [point]] * 20, [*[point, [point]] * 20, point])) == 1


def test_sharing_with_what_a_save_function_gives():
    inner = Note("inner")
    value = [Celsius(inner), Note("a"), inner]
    assigned = Assigned(TYPES)
    assigned.assign({"x": value[:2]})
    for _ in range(2):
        assigned.assign({"x": value})
        check(assigned, {"x": value})


# -- big parts --------------------------------------------------------------------------------------------------


def test_a_nested_container_stores_only_new_blocks():
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    history = [f"{index} " + "y" * 700 for index in range(2000)]
    assigned.assign({"x": {"history": history, "n": 1}})
    memory.commit(assigned, seal=True)
    history.append("new")
    assigned.assign({"x": {"history": history, "n": 1}})
    captured = assigned.capture()
    assert [operation.path for operation in captured.operations] == [["x", "history"]]
    assert sum(map(len, captured.nodes.values())) < 200_000
    revision = memory.commit(assigned, seal=False)
    check(Assigned(TYPES, revision), {"x": {"history": history, "n": 1}})


def test_bulk_is_cut_once_and_read_again():
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    values = {"x": [b"C" * 300_000, "small"], "y": bytearray(400_000)}
    assigned.assign(values)
    captured = assigned.capture()
    assert len(captured.chunks) == 2
    check(assigned, values)
    revision = memory.commit(assigned, seal=True)
    values["x"].append(1)
    assigned.assign(values)
    assert assigned.capture().chunks == {}
    check(assigned, values)
    assert same(Assigned(TYPES, revision).value("y"), values["y"])


# -- all or none ------------------------------------------------------------------------------------------------


def test_a_refusal_leaves_everything_as_it_was():
    assigned = Assigned(TYPES)
    assigned.assign({"a": [1, 2], "b": {"k": 1}})
    assigned.written(assigned.capture())
    before = assigned.digests()
    for bad, path in (
        ([1, [object()]], ("b", 1, 0)),
        ({"k": {"m": print}}, ("b", "k", "m")),
        ({object()}, ("b",)),
        ({"k": Note(object())}, ("b", "k", "text")),
    ):
        with pytest.raises(Unencodable) as caught:
            assigned.assign({"a": [3], "b": bad}, gone=["a"])
        assert caught.value.path[: len(path)] == path
        assert assigned.digests() == before
        captured = assigned.capture()
        assert (captured.sections, captured.operations) == (before, [])
    with pytest.raises(Unencodable):
        assigned.assign({1: 2})


def test_a_capture_that_was_not_written_is_in_the_next_one():
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    assigned.assign({"a": ITEMS, "b": {"k": "z" * 300_000}})
    assigned.capture()
    assigned.assign({"a": [*ITEMS, "more"], "c": 1}, gone=["b"])
    assigned.capture()
    revision = memory.commit(assigned, seal=False)
    assert [name for name, _ in revision.sections] == ["a", "c"]
    check(Assigned(TYPES, revision), {"a": [*ITEMS, "more"], "c": 1})
    assert revision.load().digests() == revision.sections


def test_a_sealed_capture_that_was_not_written_keeps_its_nodes():
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    assigned.assign({"a": ITEMS})
    assigned.assign({"a": [*ITEMS, 1]})
    captured = assigned.capture()
    for item, (digest, offset) in assigned.seal(captured).items():
        assert captured.nodes[digest][offset : offset + len(item)] == item
    check(Assigned(TYPES, memory.commit(assigned, seal=True)), {"a": [*ITEMS, 1]})


def test_gone_and_given_comes_back_at_the_end():
    assigned = Assigned(TYPES)
    assigned.assign({"a": 1, "b": 2})
    assigned.written(assigned.capture())
    assigned.assign({"a": 1}, gone=["a", "unknown"])
    assert assigned.names() == ["b", "a"]
    assert [(code, path) for _, code, path, _ in assigned.capture().operations] == [(op.DELETE, ["a"]), (op.SET, ["a"])]
    assert "a" in assigned
    assert "unknown" not in assigned


@pytest.mark.parametrize("change", ["", "item", "end", "kind"])
def test_a_section_that_comes_back_is_written_with_all_its_nodes(change):
    value: list[Any] = [Note(str(index) * 300, ["t"]) for index in range(300)]
    assigned = Assigned(TYPES)
    for _ in range(2):  # those that were there once may have been removed since, because no state needed them
        assigned.assign({"a": value, "b": 1}, returning=["a"])
        captured = assigned.capture()
        assigned.seal(captured)
        wanted = fresh({"a": value})
        wanted.digests()
        assert set(wanted.told.unstored()) <= set(captured.nodes)
        assigned.written(captured)
        check(assigned, {"a": value, "b": 1})
        assigned.assign({"b": 1}, gone=["a"], returning=["a"])
        assigned.written(assigned.capture())
        if change == "item":
            value[100].text = "other"
        elif change == "end":
            value = [*value, Note("more")]
        elif change == "kind":
            value = {"now": "a dict"}


def test_values_are_nobody_elses():
    assigned = Assigned(TYPES)
    given = [Note("n", ["t"]), {"k": [1]}]
    assigned.assign({"x": given})
    one, two = assigned.value("x"), assigned.value("x")
    one[0].tags.append("mine")
    one[1]["k"].append(2)
    given[1]["k"].append(3)
    assert two[0].tags == ["t"]
    assert assigned.value("x")[1] == {"k": [1]}
    assert type(one) is list
    with pytest.raises(KeyError):
        assigned.value("y")


def test_a_still_state_does_not_move():
    assigned = Assigned(TYPES)
    states = []
    for count in (1, 5, 100, 3, 3):
        value = {"l": ITEMS[:count], "d": dict.fromkeys(ITEMS[:count], 1)}
        assigned.assign(value)
        states.append((assigned.still(), value, assigned.digests()))
    assigned.do([Operation(0, op.CLEAR, ["l"], ()), Operation(0, op.DELETE, ["d"], ())])
    assert assigned.value("l") == []
    assert assigned.names() == ["l"]
    for still, value, digests in states:
        assert still.names == ["l", "d"]
        assert still.digests() == digests
        assert {name: still.value(name) for name in still.names} == value


def test_containers_of_a_live_document_are_taken_by_value():
    document = fresh({"x": [1, {"a": [2]}], "s": {1}})
    assigned = Assigned(TYPES)
    assigned.assign({"x": document["x"], "s": document["s"], "y": [document["x"]]})
    check(assigned, {"x": [1, {"a": [2]}], "s": {1}, "y": [[1, {"a": [2]}]]})


# -- damage -----------------------------------------------------------------------------------------------------


def test_operations_that_do_not_fit_change_nothing():
    assigned = Assigned(TYPES)
    assigned.assign({"l": [1, 2], "d": {"k": [1]}, "s": {1}, "v": 1})
    before = assigned.digests()
    data = encode(1)
    for code, path, *args in (
        (op.SPLICE, ["l"], 1, 5, []),
        (op.SET, ["l", 7], data),
        (op.SET, ["l", "k"], data),
        (op.DELETE, ["d", "absent"]),
        (op.DELETE, ["l", 0]),
        (op.ARRANGE, ["l"], [[0, 1, 1], [0, 1, 1]]),
        (op.REMOVE, ["s"], [encode(9)]),
        (op.SPLICE, ["v"], 0, 0, []),
        (op.SPLICE, ["nowhere"], 0, 0, []),
        (op.SET, ["d", "k", 9], data),
        (99, ["l"]),
    ):
        good = Operation(0, op.SET, ["l", 0], (encode("good"),))
        with pytest.raises(Damaged):
            assigned.do([good, Operation(0, code, path, tuple(args))])
        assert assigned.digests() == before


def test_a_section_that_is_not_what_was_recorded_is_damage():
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    assigned.assign({"a": ITEMS, "b": 1})
    memory.commit(assigned, seal=True)
    assigned.assign({"a": [*ITEMS, 1], "b": 2})
    revision = memory.commit(assigned, seal=False)
    revision.done.pop(0)
    with pytest.raises(Damaged) as caught:
        Assigned(TYPES, revision).still().value("a")
    assert "section a" in caught.value.what
    assert Assigned(TYPES, revision).value("b") == 2


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_broken_nodes_are_damage(cut):
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    assigned.assign({"a": ITEMS, "b": {"k": 1}, "c": {1, 2}, "d": 1})
    revision = memory.commit(assigned, seal=True)
    for digest, raw in list(memory.kept_nodes.items()):
        memory.kept_nodes[digest] = raw[:-cut]
    for name in "abcd":
        with pytest.raises(Damaged):
            Assigned(TYPES, revision).value(name)


def test_types_that_are_unknown_here_stay_as_they_are():
    memory = Memory()
    assigned = Assigned(TYPES, memory.head)
    value = [Note("n"), Model(name="m"), {"deep": [Note("d")]}]
    assigned.assign({"x": value, "y": 1})
    revision = memory.commit(assigned, seal=False)
    stranger = Assigned(Registry(), revision)
    stranger.assign({"y": 2})
    document = revision.load()
    document["x"][2]["deep"].append(5)
    Memory.commit(memory, document, seal=False)
    stranger.do(memory.head.done[len(revision.done) :])
    assert dict(stranger.digests())["x"] == dict(memory.head.sections)["x"]
    check(Assigned(TYPES, memory.head), {"x": [Note("n"), Model(name="m"), {"deep": [Note("d"), 5]}], "y": 1})


# -- differences ------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("abcdef")), st.lists(st.integers(0, 30)))
def test_hunks_lead_from_one_to_the_other(one, two, more):
    for before, after in ((one, two), ([*one, *map(str, more)], [*map(str, set(more)), *two])):
        old, new = [item.encode() for item in before], [item.encode() for item in after]
        found = hunks(old, new)
        assert (found == []) == (old == new)
        made = old.copy()
        for start, stop, at, to in reversed(found):
            made[start:stop] = new[at:to]
        assert made == new


@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.lists(st.sampled_from("abcdefgh"), unique=True))
def test_hunks_of_dicts_are_what_dicts_can_do(one, two):
    old, new = [item.encode() for item in one], [item.encode() for item in two]
    values = [bytes([index % 3]) for index in range(len(new))]
    made = dict.fromkeys(old, b"\0")
    found = rekeyed(old, [b"\0"] * len(old), new, values)
    for start, stop, at, to in found:
        for key in old[start:stop] if at == to else ():
            del made[key]
    for _, _, at, to in found:
        made.update(zip(new[at:to], values[at:to], strict=True))
    assert list(made.items()) == list(zip(new, values, strict=True))


def test_nodes_are_those_of_a_document():
    memory, other = Memory(), Memory()
    values = {"l": ITEMS, "d": {str(index): item for index, item in enumerate(ITEMS)}, "v": "x" * 20_000}
    assigned = Assigned(TYPES, memory.head)
    assigned.assign({"l": ITEMS[:50], "d": {}, "v": 1})
    assigned.assign(values)
    memory.commit(assigned, seal=True)
    other.commit(fresh(values), seal=True)
    assert all(node_digest(raw) == digest for digest, raw in memory.kept_nodes.items())
    assert other.kept_nodes.keys() <= memory.kept_nodes.keys()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"1": A, "2": B, "3": C}, {"1": D, "2": A, "3": B}),
        ({"1": "a", "2": "b", "3": "c"}, {"1": "x", "2": "a", "3": "b", "4": "c"}),
        ({(1,): A}, {(True,): A}),
        ({0.0: A}, {-0.0: A}),
        ({1: A, "b": B}, {True: A, "b": B}),
    ],
    ids=["values move", "texts move", "a key in a tuple", "minus nought", "a truth"],
)
def test_values_that_move_to_other_keys_and_keys_that_are_equal_are_seen(before, after):
    assigned = Assigned(TYPES)
    for values in (before, after, before):
        assigned.assign({"x": values})
        check(assigned, {"x": values})
