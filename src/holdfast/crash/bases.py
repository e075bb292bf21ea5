"""Readers for instances of built-in types and of their subclasses: dicts, sequences, texts, numbers, exceptions.

Must not know files or frames. Holds always: content is read by the built-in type's own methods, whatever the subclass
overrides.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.crash import kinds
from holdfast.crash.limits import ENTRY_COST, MAX_NAME
from holdfast.crash.secrets import text_of_leaf
from holdfast.crash.shapes import Layout, first_items

if TYPE_CHECKING:
    from holdfast.crash.walk import Walker


def read_dict(walker: Walker, value: Any, layout: Layout) -> list[Any]:
    total = dict.__len__(value)
    out = walker.dict_items(value)
    shown = total if total * 2 > len(out) else None
    return [kinds.DICT, walker.type_number(layout.name), out, shown, walker.attributes(value, layout)]


def read_sequence(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    shown = base.__getitem__(value, slice(0, walker.items))
    if layout.fields and len(layout.fields) == total:
        items = walker.pairs(zip(layout.fields, shown, strict=False))
        return [kinds.OBJECT, walker.type_number(layout.name), items]
    items = [walker.entry(item) for item in shown]
    walker.spend(len(items) * ENTRY_COST)
    total = total if total > len(items) else None
    return [kinds.LIST, walker.type_number(layout.name), items, total, walker.attributes(value, layout)]


def read_collection(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    try:
        shown = list(islice(base.__iter__(value), walker.items))
    except RuntimeError:  # changed by another thread
        shown = []
    items = [walker.entry(item) for item in shown]
    walker.spend(len(items) * ENTRY_COST)
    total = total if total > len(items) else None
    return [kinds.LIST, walker.type_number(layout.name), items, total, walker.attributes(value, layout)]


def read_text(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    total = base.__len__(value)
    limit = walker.limits.text_chars
    number = walker.type_number(layout.name)
    if walker.hide:
        walker.redactor.learn(text_of_leaf(value))
        return walker.cut(value, kinds.REDACTED)
    shown: Any
    if base is str:
        shown = base.__getitem__(value, slice(0, limit + 20_000 if total > limit else limit))
        shown = shown[: walker.redactor.safe_cut(shown, limit)] if total > limit else shown
    else:
        shown = bytes(base.__getitem__(value, slice(0, limit + 20_000 if total > limit else limit)))
        if total > limit:
            shown = shown[: walker.redactor.safe_cut(shown.decode("latin-1"), limit)]
    walker.spend(len(shown))
    node = [kinds.TEXT, number, shown, total if total > len(shown) else None]
    attributes = walker.attributes(value, layout) if layout.cls is not base else []
    return [*node, attributes] if attributes else node[: 3 if node[3] is None else 4]


def read_number(walker: Walker, value: Any, base: Any, layout: Layout) -> list[Any]:
    if walker.hide:
        walker.redactor.learn(text_of_leaf(value))
        return walker.cut(value, kinds.REDACTED)
    plain = base.__pos__(value) if base is not int else int.__index__(value)
    if base is int and plain.bit_length() > 4096:
        text = f"an integer of {plain.bit_length()} bits"
    else:
        text = base.__repr__(plain) if base is not int or plain.bit_length() < 64 else hex(plain)
    return [kinds.LITERAL, walker.type_number(layout.name), text]


def read_enum(walker: Walker, value: Any, layout: Layout) -> list[Any]:
    own = layout.instance_dict(value)
    pairs = first_items(own, 50) if own is not None else []
    name = next((item for key, item in pairs if type(key) is str and key == "_name_"), None)
    if type(name) is not str:
        return walker.as_object(value, layout)
    return [kinds.LITERAL, walker.type_number(layout.name), name[:MAX_NAME]]


def read_exception(walker: Walker, value: Any, layout: Layout) -> list[Any]:
    read = BaseException.__dict__
    named = [(name, read[name].__get__(value)) for name in ("args", "__cause__", "__context__")]
    own, _total = layout.attributes(value, walker.items)
    named += [pair for pair in own if pair[0] not in ("args", "characters_written")]
    return [kinds.OBJECT, walker.type_number(layout.name), walker.pairs(pair for pair in named if pair[1] is not None)]
