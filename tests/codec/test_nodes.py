"""Tracked containers work wherever plain ones do: every mutator, every reader, every error that Python raises."""

from __future__ import annotations

import collections
import copy
import itertools
import json
import pickle

import pytest

from holdfast.codec.containers import LazyDict, LazyList, TrackedDict, TrackedList, TrackedSet
from holdfast.codec.document import Document, plain
from holdfast.codec.tracked import Node
from holdfast.errors import ReadOnly, Unencodable
from tests.codec.memory import TYPES, Memory

MESSAGES = [{"role": "user", "content": "hi", "parts": [1, 2]}, {"role": "assistant", "content": "yes", "parts": []}]


def document(**sections):
    """A document that was saved and loaded, so that its nodes are lazy."""
    memory = Memory()
    first = Document(TYPES)
    first.update(sections)
    memory.commit(first, seal=True)
    return memory.head.load()


@pytest.fixture
def state():
    return document(messages=copy.deepcopy(MESSAGES), plan={"steps": [{"n": 1}], 2: "two"}, seen={1, 2})


def test_nodes_are_the_builtins_they_stand_for(state):
    assert isinstance(state["messages"], list)
    assert isinstance(state["plan"], dict)
    assert isinstance(state["seen"], set)
    assert state["messages"] == MESSAGES
    assert MESSAGES == state["messages"]  # noqa: SIM300 - from both sides
    assert state["plan"] == {"steps": [{"n": 1}], 2: "two"}
    assert state == {"messages": MESSAGES, "plan": {"steps": [{"n": 1}], 2: "two"}, "seen": {1, 2}}
    assert repr(state["messages"]) == repr(MESSAGES)
    assert repr(state["seen"]) == repr({1, 2})


READERS = {
    "json": lambda node: json.loads(json.dumps(node)),
    "json indented": lambda node: json.loads(json.dumps(node, indent=1)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda node: pickle.loads(pickle.dumps(node)),
    "list()": list,
    "unpacked": lambda node: [*node],
    "left of +": lambda node: node + [],  # noqa: RUF005
    "right of +": lambda node: [] + node,  # noqa: RUF005
    "slice": lambda node: node[:],
    "times": lambda node: node * 1,
    "from the right": lambda node: 1 * node,
    "reversed": lambda node: list(reversed(node))[::-1],
    "map": lambda node: list(map(dict, node)),
    "sorted": lambda node: sorted(node, key=lambda message: len(message["content"])),
    "deque": lambda node: list(collections.deque(node)),
    "chain": lambda node: list(itertools.chain(node)),
    "copy()": lambda node: node.copy(),
    "plain": plain,
    "+=": lambda node: _extended([], node),
    "slice assignment": lambda node: _assigned([], node),
    "tuple": lambda node: list(tuple(node)),  # noqa: C414
}


def _extended(target, node):
    target += node
    return target


def _assigned(target, node):
    target[:] = node
    return target


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_lists_can_be_read_in_every_way_before_anything_else_touched_them(state, reader):
    got = reader(state["messages"])
    assert type(got) is list
    assert got == MESSAGES


COPIES = {"json", "json indented", "deepcopy", "pickle", "plain", "map"}


@pytest.mark.parametrize("name", [name for name in READERS if name not in COPIES])
def test_what_a_reader_gives_is_tracked_never_raw(state, name):
    for message in READERS[name](state["messages"]):
        message["role"] = "changed"
    assert [message["role"] for message in plain(state)["messages"]] == ["changed", "changed"]


DICT_READERS = {
    "json": lambda node: json.loads(json.dumps(node)),
    "**": lambda node: dict(**node),
    "{**}": lambda node: {**node},
    "dict()": dict,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda node: pickle.loads(pickle.dumps(node)),
    "items": lambda node: dict(node.items()),
    "values": lambda node: dict(zip(node, node.values(), strict=True)),
    "get": lambda node: {key: node.get(key) for key in node.keys()},  # noqa: SIM118
    "getitem": lambda node: {key: node[key] for key in node},
    "|": lambda node: node | {},
    "| from the left": lambda node: {} | node,
    "update": lambda node: _updated(node),  # noqa: PLW0108 - defined below
    "plain": plain,
}


def _updated(node):
    target: dict = {}
    target.update(node)
    return target


@pytest.mark.parametrize("reader", DICT_READERS.values(), ids=DICT_READERS.keys())
def test_dicts_can_be_read_in_every_way_before_anything_else_touched_them(reader):
    state = document(plan={"steps": [{"n": 1}], "done": {"a": [1]}})
    got = reader(state["plan"])
    assert type(got) is dict
    assert got == {"steps": [{"n": 1}], "done": {"a": [1]}}


def test_pattern_matching(state):
    match state["messages"]:
        case [{"role": "user", "parts": [1, *rest]}, *others]:
            assert rest == [2]
            assert len(others) == 1
            others[0]["content"] = "matched"
        case _:
            pytest.fail("no match")
    match state["plan"]:
        case {"steps": [{"n": n}], **left}:
            assert n == 1
            assert left == {2: "two"}
        case _:
            pytest.fail("no match")
    assert plain(state)["messages"][1]["content"] == "matched"


def test_the_first_touch_wraps_one_level_and_swaps_the_class(state):
    messages = state["messages"]
    assert type(messages) is LazyList
    first = messages[0]
    assert type(messages) is TrackedList
    assert type(first) is LazyDict
    assert first["parts"] == [1, 2]
    assert type(first) is TrackedDict
    assert type(state["seen"]) is TrackedSet


def test_reading_one_element_of_a_long_list_does_not_wrap_them_all():
    state = document(messages=[{"n": [number], "text": "x" * 300} for number in range(2_000)])
    messages = state["messages"]
    message = messages[1_234]
    message["n"].append(1)
    assert isinstance(list.__getitem__(messages, 1_234), Node)
    assert not isinstance(list.__getitem__(messages, 1), Node)
    assert message._path() == ("messages", 1_234)
    assert [item["n"] for item in messages][1_234] == [1_234, 1]


def test_a_slice_of_a_long_list_wraps_what_it_gives_and_no_more():
    state = document(items=[{"n": number, "in": [number]} for number in range(1_000)])
    items = state["items"]
    for places in (slice(-3, None), slice(None, 10, 4), slice(5, 2), slice(20, 10, -5)):
        found = items[places]
        assert type(found) is list
        assert [item["n"] for item in found] == list(range(1_000))[places]
        assert all(item is items[item["n"]] for item in found)
    assert type(items) is LazyList
    items[-2:][0]["in"].append("more")
    assert items[998] == {"n": 998, "in": [998, "more"]}
    assert [operation.path for operation in state.capture().operations] == [["items", 998, "in"]]


def test_children_of_big_containers_inside_inline_ones_know_their_place():
    """A container over 16 KiB sits under its digest inside a small one; reading must link it to its parent."""
    big = [{"body": "x" * 700} for _ in range(40)]
    state = document(outer={"inner": {"deep": {"big": big}}}, listed=[[{"big": big}]])
    state["outer"]["inner"]["deep"]["big"][3]["body"] = "changed"
    state["listed"][0][0]["big"].append("new")
    fresh = Document(TYPES)
    fresh.update(plain(state))
    assert fresh["outer"]["inner"]["deep"]["big"][3]["body"] == "changed"
    assert state.digests() == fresh.digests()


LIST_ERRORS = {
    "pop empty": lambda node: [node.clear(), node.pop()],
    "pop index": lambda node: node.pop(9),
    "del index": lambda node: node.__delitem__(9),
    "set index": lambda node: node.__setitem__(9, 1),
    "set float": lambda node: node.__setitem__(1.5, 1),
    "pop text": lambda node: node.pop("a"),
    "insert text": lambda node: node.insert("a", 1),
    "remove": lambda node: node.remove("absent"),
    "extend": lambda node: node.extend(5),
    "times": lambda node: node.__imul__(1.5),
    "extended slice": lambda node: node.__setitem__(slice(None, None, 2), [1, 2, 3, 4, 5]),
    "slice of number": lambda node: node.__setitem__(slice(0, 1), 5),
    "sort": lambda node: node.sort(),
    "sort key": lambda node: node.sort(key=lambda item: item["absent"]),
    "sort position": lambda node: node.sort(None),
}


@pytest.mark.parametrize("name", LIST_ERRORS)
def test_lists_raise_what_plain_ones_raise_and_do_not_change(state, name):
    messages = state["messages"]
    if name == "pop empty":
        messages.clear()
    before = plain(messages)
    with pytest.raises(Exception) as ours:
        LIST_ERRORS[name](messages)
    with pytest.raises(Exception) as theirs:
        LIST_ERRORS[name](copy.deepcopy(before))
    assert type(ours.value) is type(theirs.value)
    assert messages == before


DICT_ERRORS = {
    "missing": lambda node: node["absent"],
    "del": lambda node: node.__delitem__("absent"),
    "pop": lambda node: node.pop("absent"),
    "popitem": lambda node: [node.clear(), node.popitem()],
    "unhashable": lambda node: node.__setitem__([], 1),
    "update": lambda node: node.update([1, 2]),
    "pop arguments": lambda node: node.pop("absent", 1, 2),
}


@pytest.mark.parametrize("name", DICT_ERRORS)
def test_dicts_raise_what_plain_ones_raise(state, name):
    with pytest.raises(Exception) as ours:
        DICT_ERRORS[name](state["plan"])
    with pytest.raises(Exception) as theirs:
        DICT_ERRORS[name]({"steps": [{"n": 1}], 2: "two"})
    assert type(ours.value) is type(theirs.value)


def test_changing_a_dict_while_going_through_it_raises_as_in_python(state):
    plan = state["plan"]
    with pytest.raises(RuntimeError):  # noqa: PT012
        for key in plan:
            plan[f"new {key}"] = 1
    with pytest.raises(RuntimeError):  # noqa: PT012
        for _ in plan.items():
            plan.popitem()
    for key in plan:
        plan[key] = [1]  # no new keys: allowed
    with pytest.raises(RuntimeError):  # noqa: PT012
        for item in state["seen"]:
            state["seen"].add(item + 100)


def test_a_list_can_be_changed_while_going_through_it(state):
    messages = state["messages"]
    for number, message in enumerate(messages):
        if number < 3:
            messages.append(message)
    assert len(messages) == 5


def test_a_sort_whose_key_changes_the_list_is_refused_as_in_python(state):
    numbers = state.setdefault("numbers", [3, 1, 2])

    def key(item):
        numbers.append(4)
        return item

    with pytest.raises(ValueError, match="modified"):
        numbers.sort(key=key)


def test_sorting_is_stable_in_both_directions():
    state = document(rows=[{"k": number % 3, "n": number} for number in range(20)])
    model = plain(state["rows"])
    for reverse in (False, True):
        state["rows"].sort(key=lambda row: row["k"], reverse=reverse)
        model.sort(key=lambda row: row["k"], reverse=reverse)
        assert state["rows"] == model


def test_fromkeys_and_copies_are_plain(state):
    assert type(state["plan"].fromkeys("ab", 1)) is dict
    assert type(state["seen"].copy()) is set
    assert type(state["seen"] | {3}) in {set, TrackedSet}


def test_set_operators_in_place(state):
    seen = state["seen"]
    seen |= {3, 4}
    seen -= {1}
    seen &= {2, 3, 9}
    seen ^= {3, 7}
    assert seen == {2, 7}
    assert state["seen"] is seen
    with pytest.raises(TypeError):
        seen |= [1]
    with pytest.raises(KeyError):
        seen.remove("absent")


def test_equal_items_of_different_type_are_removed_as_what_they_are():
    """1, True and 1.0 are one item to a set, and three values to the format."""
    memory = Memory()
    state = Document(TYPES)
    state["seen"] = {1, 2.0}
    memory.commit(state, seal=True)
    state["seen"].discard(True)
    state["seen"].remove(2)
    memory.commit(state, seal=False)
    assert memory.head.load()["seen"] == set()


def test_equal_keys_of_different_type_keep_the_first(state):
    plan = state["plan"]
    plan[2.0] = {"x": []}
    plan[2]["x"].append(1)
    assert list(map(type, plan)) == [str, int]
    assert plan == {"steps": [{"n": 1}], 2: {"x": [1]}}


def test_a_mutable_or_lost_key_is_refused(state):
    plan = state["plan"]
    from tests.codec.kinds import Node as Mutable

    for key in (float("nan"), (1, float("nan")), Mutable("n")):
        with pytest.raises(Unencodable) as error:
            plan[key] = 1
        assert error.value.path[0] == "plan"
    with pytest.raises(Unencodable):
        state["seen"].add(Mutable("n"))
    assert plan == {"steps": [{"n": 1}], 2: "two"}


def test_a_read_only_state_refuses_every_change():
    memory = Memory()
    first = Document(TYPES)
    first.update(messages=copy.deepcopy(MESSAGES), plan={"a": {"b": 1}}, seen={1})
    memory.commit(first, seal=False)
    state = memory.head.load(readonly=True)
    messages, seen = state["messages"], state["seen"]
    changes = [
        lambda: state.__setitem__("a", 1), lambda: state.__delitem__("plan"), state.clear, state.popitem,
        lambda: messages.append(1), messages.pop, lambda: messages.sort(key=str), messages.reverse, messages.clear,
        lambda: messages[0].update(a=1), lambda: messages.__delitem__(slice(0, 1)), lambda: messages.__imul__(2),
        lambda: state["plan"]["a"].pop("b"), lambda: state["plan"].setdefault("new", 1),
        lambda: state["plan"].__delitem__("a"), lambda: seen.add(2), seen.clear, seen.pop,
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ReadOnly):
            change()
    assert plain(state) == {"messages": MESSAGES, "plan": {"a": {"b": 1}}, "seen": {1}}
