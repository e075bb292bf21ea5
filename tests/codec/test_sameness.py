"""The proof that values are unchanged: whatever would change their encoding voids it."""

from __future__ import annotations

import collections
import copy
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from holdfast.codec import sameness
from holdfast.codec.assigned import Assigned
from holdfast.codec.document import Document
from holdfast.codec.sameness import FLAT_RUN_ITEMS, RUN_ITEMS, Evidence, runs, trace
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import Unencodable
from tests.codec.kinds import (
    Box,
    Celsius,
    Colour,
    Extra,
    Fixed,
    Items,
    Model,
    Note,
    Open,
    Pair,
    Plain,
    Point,
    Slotted,
    SlottedWithDict,
    Wheel,
    Word,
)
from tests.codec.programs import TYPES, same
from tests.codec.test_assigned import Giving


def messages(count: int) -> list[Any]:
    """A conversation in which every third message calls a tool."""
    found: list[Any] = []
    for index in range(count):
        name = f"id-{index}"
        if index % 3 == 0:
            found.append(HumanMessage(content=f"question {index}", id=name))
        elif index % 3 == 1:
            call = {"name": "search", "args": {"query": f"q{index}", "limit": index}, "id": name, "type": "tool_call"}
            usage = {"input_tokens": index, "output_tokens": 1, "total_tokens": index + 1}
            found.append(AIMessage(content="", id=name, tool_calls=[call], usage_metadata=usage))
        else:
            found.append(ToolMessage(content=f"result {index}", tool_call_id=name, id=name, name="search"))
    return found


@pytest.fixture(scope="module")
def talk() -> Registry:
    registry = Registry()
    for cls in (HumanMessage, AIMessage, ToolMessage):
        registry.register(cls)
    return registry


# -- what voids a proof -------------------------------------------------------------------------------------------


def ai() -> AIMessage:
    made = messages(2)[1]
    made.additional_kwargs["deep"] = {"list": [1, {"k": "v"}]}
    return made


def moved(message: Any) -> None:
    message.invalid_tool_calls.append(message.tool_calls.pop())


def renamed(message: Any) -> None:
    args = message.tool_calls[0]["args"]
    values = list(args.values())
    args.clear()
    args.update(zip(("other", "limit"), values, strict=True))


def reordered(message: Any) -> None:
    args = message.tool_calls[0]["args"]
    args["query"] = args.pop("query")


def other_attributes(message: Any) -> None:
    object.__setattr__(message, "__dict__", {**message.__dict__, "content": "other"})


def equal_attributes(message: Any) -> None:
    object.__setattr__(message, "__dict__", dict(message.__dict__))


class Other(AIMessage):
    pass


def other_class(message: Any) -> None:
    object.__setattr__(message, "__class__", Other)


def extra_fields(message: Any) -> None:
    object.__setattr__(message, "__pydantic_extra__", {"more": 1})


def private_fields(message: Any) -> None:
    object.__setattr__(message, "__pydantic_private__", {"_p": 1})


def swapped(message: Any) -> None:
    fields = message.__dict__
    fields["name"], fields["content"] = fields["content"], fields["name"]


CHANGES = {
    "a field": lambda message: setattr(message, "content", "other"),
    "a field, to an equal value of another type": lambda message: message.__dict__.__setitem__("content", Word.YES),
    "a number, to an equal one": lambda message: message.usage_metadata.__setitem__("input_tokens", True),
    "a nested dict": lambda message: message.additional_kwargs["deep"].__setitem__("new", 1),
    "a nested list": lambda message: message.additional_kwargs["deep"]["list"].append(2),
    "a dict in a list": lambda message: message.additional_kwargs["deep"]["list"][1].__setitem__("k", "w"),
    "an empty dict": lambda message: message.response_metadata.__setitem__("k", 1),
    "an item that moves to the next container": moved,
    "a key": renamed,
    "the order of keys": reordered,
    "a key, to an equal one of another type": lambda message: (
        message.additional_kwargs.pop("deep"),
        message.additional_kwargs.update({Word.YES: 1}),
    ),
    "the attributes": other_attributes,
    "the attributes, to equal ones": equal_attributes,
    "the class": other_class,
    "the names of fields that were set": lambda message: message.__pydantic_fields_set__.add("name"),
    "the names of fields that were set, fewer": lambda message: message.__pydantic_fields_set__.discard("id"),
    "extra fields": extra_fields,
    "private fields": private_fields,
    "fields that change places": swapped,
    "a field that goes": lambda message: message.__dict__.pop("id"),
    "a container, to an equal one": lambda message: setattr(message, "tool_calls", copy.deepcopy(message.tool_calls)),
}


SAME_CONTENT = {"the attributes, to equal ones", "a container, to an equal one"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_to_a_message_voids_the_proof(change, talk):
    others = messages(6)
    message = ai()
    found = trace([*others[:3], message, *others[3:]], talk)
    assert found is not None
    assert found.unchanged()
    CHANGES[change](message)
    assert not found.unchanged()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_to_a_message_is_recorded(change, talk):
    value = [*messages(60), ai(), *messages(3)]
    assigned = Assigned(talk)
    assigned.assign({"messages": value})
    assigned.capture()
    CHANGES[change](value[60])
    document = Document(talk)
    try:
        document["messages"] = value
    except Unencodable:
        before = assigned.digests()
        with pytest.raises(Unencodable):
            assigned.assign({"messages": value})
        assert assigned.digests() == before
        return
    assigned.assign({"messages": list(value)})
    if change != "a field that goes":  # a document takes in what it reads back, which has the field's default
        assert dict(assigned.digests()) == dict(document.digests())
    expected = [] if change in SAME_CONTENT else [["messages", 60]]
    assert [operation.path for operation in assigned.capture().operations] == expected


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Note("n", ["t"]), lambda value: value.tags.append("u")),
        (Note("n"), lambda value: setattr(value, "text", "o")),
        (Note("n", [], Note("m")), lambda value: setattr(value.parent, "text", "o")),
        (Note("n"), lambda value: setattr(value, "added", 1)),
        (Model(name="m"), lambda value: setattr(value, "_private", 1)),
        (Model(name="m", inner=Model(name="i")), lambda value: setattr(value.inner, "count", 4)),
        (Extra(name="e", more=[1]), lambda value: value.more.append(2)),
        (Extra(name="e"), lambda value: setattr(value, "more", 2)),
        (Items([1]), lambda value: value.root.append(2)),
        (Wheel(1), lambda value: setattr(value, "size", 1.0)),
        (Open(1), lambda value: setattr(value, "size", 2)),
        (Plain(a=1, b=[1]), lambda value: value.b.append(2)),
        (Plain(a=1), lambda value: setattr(value, "__dict__", {"a": 1})),
        (Point([1]), lambda value: value.x.append(2)),
        (Box({"a": 1}), lambda value: value.item.pop("a")),
        ({1: [1], (2, "k"): {}}, lambda value: value[(2, "k")].update(a=1)),
        ({1: "a"}, lambda value: (value.clear(), value.update({True: "a"}))),
        ({"yes": 1}, lambda value: (value.clear(), value.update({Word.YES: 1}))),
        ([0.0], lambda value: value.__setitem__(0, -0.0)),
        ([1], lambda value: value.__setitem__(0, True)),
        ([[1], []], lambda value: value[1].append(value[0].pop())),
        ([[1, 2], [3]], lambda value: value[1].insert(0, value[0].pop())),
        (
            [{"a": 1, "b": 2}, {"c": 3}],
            lambda value: (value[1].clear(), value[1].update(b=value[0].pop("b"), c=3)),
        ),
        ({1, "a"}, lambda value: value.add(2)),
        (([1],), lambda value: value[0].append(2)),
        ([{"a": {}}], lambda value: value[0]["a"].update(b=1)),
    ],
)  # fmt: skip
def test_a_change_voids_the_proof(value, change):
    found = trace([value], TYPES)
    assert found is not None
    assert found.unchanged()
    change(value)
    assert not found.unchanged()


def test_what_cannot_change_is_known_by_itself():
    for value in ("text", 1, None, (1, "a"), Point(1), frozenset({1}), Colour.RED, Fixed("f"), Pair(1, 2), 2**70):
        found = trace([value], TYPES)
        assert found is not None
        assert found.unchanged()
        assert found.instances == set()


class Stranger:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Celsius(1),
        Slotted(1, 2, 3),  # a slot is empty
        bytearray(b"a"),
        np.zeros(3),
        collections.deque([1]),
        collections.OrderedDict(a=1),
        Pair([1]),
        {Stranger()},
        Stranger(),
        iter([1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_followed_has_no_proof(value):
    assert trace([1, [value]], TYPES) is None


def test_full_slots_can_be_followed():
    value = SlottedWithDict(1, 2, 3, [4])
    assert trace([value], TYPES) is None
    value.unset = 5
    found = trace([value], TYPES)
    assert found is not None
    assert found.unchanged()
    del value.unset
    assert not found.unchanged()


def test_cycles_end():
    note = Note("n")
    note.parent = note
    loop: list[Any] = [note]
    loop.append(loop)
    found = trace([loop], TYPES)
    assert found is not None
    assert found.unchanged()
    note.text = "m"
    assert not found.unchanged()


# -- a proof is sound ---------------------------------------------------------------------------------------------


def sound(program: Giving) -> None:
    program.live = {"a": [program.value() for _ in range(4)]}
    value = program.live["a"]
    items = list(value)
    found = trace(items, TYPES)
    before = encode(items, TYPES)
    program.mutate()
    after = encode(items, TYPES)
    if found is not None:
        assert before == after or not found.unchanged()


def test_an_unvoided_proof_means_the_same_bytes(rounds):
    for seed in range(rounds(300, 50_000)):
        sound(Giving(random.Random(seed).randrange))


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_an_unvoided_proof_means_the_same_bytes_and_shrinks(data):
    sound(Giving(lambda n: data.draw(st.integers(0, n - 1))))


# -- sequences ----------------------------------------------------------------------------------------------------


def evidence_of(values: list[Any]) -> Evidence:
    found = Evidence()
    for start, stop in runs(values):
        found.append(trace(values[start:stop], TYPES), stop - start)
    return found


def proven(found: Evidence, values: list[Any]) -> set[int]:
    return {match.now + index for match in found.matches(values) for index in range(len(match.trace.items))}


def test_runs_are_found_where_they_moved():
    values = [Note(str(index)) for index in range(500)]
    found = evidence_of(values)
    assert proven(found, list(values)) == set(range(500))
    assert proven(found, [*values, Note("new")]) == set(range(500))
    assert len(proven(found, values[3:])) > 300
    assert len(proven(found, [Note("new"), *values])) == 500
    assert len(proven(found, values[:100] + values[103:])) > 300
    assert len(proven(found, values[250:] + values[:250])) > 100
    assert proven(found, []) == set()
    values[200].text = "other"
    still = proven(found, values)
    assert 200 not in still
    assert len(still) > 300


def test_short_runs_are_joined():
    found = Evidence()
    for index in range(500):
        found.append(trace([Note(str(index))], TYPES), 1)
    assert len(found.traces) < 20
    assert len(found.instances) == 500


@pytest.mark.parametrize("looks", [True, False])
def test_identical_is_not_equal(looks, monkeypatch):
    monkeypatch.setattr(sameness, "_REFERENCES", looks and sameness._REFERENCES)
    one, other = [1], [1]
    assert sameness.identical((), ())
    assert sameness.identical((one, "a", None), (one, "a", None))
    assert not sameness.identical((one,), (other,))
    assert not sameness.identical((1,), (True,))
    assert not sameness.identical((one, one), (one,))


def test_flat_runs_are_long():
    assert len(list(runs([1] * FLAT_RUN_ITEMS))) == 1
    assert len(list(runs([[1]] * 2 * RUN_ITEMS))) == 2
    assert list(runs([])) == []


def test_a_conversation_is_proven_whole(talk):
    value = messages(1000)
    assigned = Assigned(talk)
    assigned.assign({"messages": value})
    evidence = assigned._sections["messages"].evidence
    assert evidence is not None
    assert proven(evidence, value) == set(range(1000))
    assigned.capture()
    value += messages(1003)[1000:]
    assigned.assign({"messages": value})
    (operation,) = assigned.capture().operations
    assert operation.args[:2] == (1000, 0)
    assert len(operation.args[2]) == 3
    document = Document(talk)
    document["messages"] = value
    assert assigned.digests() == document.digests()
    assert assigned.value("messages") == value


def test_items_that_cannot_be_followed_do_not_hide_the_others():
    value: list[Any] = [Note(str(index)) for index in range(100)]
    value[50] = Celsius([1])
    assigned = Assigned(TYPES)
    assigned.assign({"x": value})
    assigned.capture()
    for _ in range(3):
        value[50].__init__([*value[50].reading(), 1])
        assigned.assign({"x": list(value)})
        assert [operation.path for operation in assigned.capture().operations] == [["x", 50]]
        assert same(assigned.value("x"), value)
