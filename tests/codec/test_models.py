"""Lists of models, decoded at once: the same values and the same errors as one by one."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from ormsgpack import packb

from holdfast.codec.assigned import Assigned
from holdfast.codec.instances import read_models
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, decode_items, encode
from holdfast.codec.wire import MAX_DEPTH
from holdfast.errors import CorruptValue, UnknownType
from tests.codec.kinds import Extra, Items, Model, Note

TYPES = Registry()
for kind in (AIMessage, HumanMessage, ToolMessage, Model, Extra, Items, Note):
    TYPES.register(kind)


def models(items: list[bytes], types: Registry) -> list[Any] | None:
    """The items' values, when all of them are models that have not changed since they were saved; otherwise None."""
    try:
        made = read_models(items, types)
    except CorruptValue:
        return None
    return list(made.values()) if len(made) == len(items) else None


def _talk(count: int) -> list[Any]:
    calls = [{"name": "search", "args": {"query": "q", "deep": [{"a": [1.5, None]}]}, "id": "c"}]
    kinds = [
        lambda at: HumanMessage(f"question {at}", id=f"h{at}"),
        lambda at: AIMessage(
            "x" * 70_000 if at == 7 else [{"type": "text", "text": "t"}], id=f"a{at}", tool_calls=calls
        ),
        lambda at: ToolMessage("result", id=f"t{at}", tool_call_id="c", artifact={"b": b"c"}),
    ]
    return [kinds[at % 3](at) for at in range(count)]


def _same(one: list[Any], other: list[Any]) -> None:
    assert one == other
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        assert vars(a) == vars(b)
        assert list(vars(a)) == list(vars(b))
        assert a.model_fields_set == b.model_fields_set
        assert (a.__pydantic_extra__, a.__pydantic_private__) == (b.__pydantic_extra__, b.__pydantic_private__)


def test_models_are_what_decoding_gives():
    talk = _talk(30)
    items = [encode(message, TYPES) for message in talk]
    found = models(items, TYPES)
    assert found is not None
    _same(found, talk)
    _same(found, [decode(item, TYPES) for item in items])
    again = models(items, TYPES)
    assert again is not None
    assert again[1].tool_calls[0]["args"] is not found[1].tool_calls[0]["args"]


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "odd",
    [
        HumanMessage("h", additional_kwargs={"at": dt.datetime(2026, 1, 2, tzinfo=dt.UTC)}),
        HumanMessage("h", additional_kwargs={"pair": (1, 2), "set": {1}}),
        HumanMessage("\ud800"),
        Extra(name="e", more=[1]),
        Model(name="m", inner=Model(name="i")),
        Items([1]),
        Note("n"),
        {"a": 1},
        "text",
        None,
    ],
    ids=repr,
)
def test_what_is_not_plain_is_left_to_decoding(odd):
    items = [encode(value, TYPES) for value in [*_talk(3), odd]]
    found = models(items, TYPES)
    if found is not None:
        assert found == [decode(item, TYPES) for item in items]
    assigned = Assigned(TYPES)
    values = [*_talk(100), odd, *_talk(100)]
    assigned.assign({"mixed": values})
    assert assigned.value("mixed") == values


def _altered(parts: list[Any]) -> bytes:
    payload = packb(parts)
    return b"\xc8" + len(payload).to_bytes(2, "big") + b"\x14" + payload


def test_what_is_not_right_is_refused_by_decoding():
    message = encode(HumanMessage("h", id="i"), TYPES)
    start = 4 if message[0] == 0xC8 else 3
    name, version, form, (fields, extra, names, private) = decode_payload(message[start:])
    whole = [fields, extra, names, private]
    assert models([_altered([name, version, form, whole])], TYPES) == [HumanMessage("h", id="i")]
    for wrong in (
        [name, version + 1, form, whole],
        [name, version, "fields", whole],
        ["nobody.Knows", version, form, whole],
        [[], version, form, whole],
        [name, version, form, [fields, extra, names]],
        [name, version, form, [{**fields, "odd": 1}, extra, names, private]],
        [name, version, form, [fields, extra, [*names, []], private]],
        [name, version, form, [{**fields, "content": _deep(MAX_DEPTH)}, extra, names, private]],
        [name, version, form],
    ):
        assert models([message, _altered(wrong)], TYPES) is None
    assert models([message + b"\xc0"], TYPES) is None
    assert models([message[:-1]], TYPES) is None
    assert models([b"\xc8\0\x01\x14" + message[start:]], TYPES) is None
    assert models([b""], TYPES) is None


def decode_payload(data: bytes) -> Any:
    return decode(data, TYPES, inert=True)


def test_errors_come_from_decoding():
    items = [encode(message, TYPES) for message in _talk(100)]
    with pytest.raises(UnknownType, match="HumanMessage"):
        decode_items(items, Registry())
    items[70] = items[70][:-1]
    with pytest.raises(CorruptValue):
        decode_items(items, TYPES)
