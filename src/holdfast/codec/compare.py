"""What differs between two states, as operations that lead from one to the other.

Owns the comparison of sections, containers and items; equal leaves are skipped by digest, so that the cost follows
the difference. It reads documents without handing anything out and changes neither. What always holds: applying the
operations to the first document gives the second, types and order included.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.blocks import Leaf
from holdfast.codec.document import Document
from holdfast.codec.nodes import FLAT, Node
from holdfast.codec.operations import Operation
from holdfast.codec.values import encode

# Aligning items is quadratic at worst: above this many differing items on both sides they are paired by place.
_ALIGN_MAX_ITEMS = 2_000


def differences(old: Document, new: Document) -> Iterator[Operation]:
    """Operations that turn the state of ``old`` into that of ``new``, to be applied in order."""
    yield from _sections(old, new)


def _sections(old: Document, new: Document) -> Iterator[Operation]:
    kept = [name for name in old if name in new]
    for name in old:
        if name not in new:
            yield Operation(0, op.DELETE, [name], ())
    # A section that stands elsewhere in the order goes and comes back at the end, as in a dict.
    for name in _out_of_order(kept, list(new)):
        yield Operation(0, op.DELETE, [name], ())
        kept.remove(name)
    for name in new:
        if name not in kept:
            yield Operation(0, op.SET, [name], (encode(new.raw_section(name), new.registry),))
        elif old.section_digest(name) != new.section_digest(name):
            yield from _values(old.raw_section(name), new.raw_section(name), [name], old, new)


def _out_of_order(kept: list[Any], wanted: list[Any]) -> list[Any]:
    """The kept keys that must be taken out and added again so that appending the rest gives the wanted order."""
    length = 0
    while length < len(kept) and kept[length] == wanted[length]:
        length += 1
    # Whatever stands behind the first misplaced or missing key is added anew, unless nothing is missing before it.
    return kept[length:]


def _kind(value: Any) -> type | None:
    for kind in (dict, list, set):
        if type(value) is kind or (isinstance(value, Node) and isinstance(value, kind)):
            return kind
    return None


def _values(old: Any, new: Any, path: list[Any], a: Document, b: Document) -> Iterator[Operation]:
    kind = _kind(old)
    if kind is None or kind is not _kind(new):
        yield Operation(0, op.SET, path, (encode(new, b.registry),))
    elif kind is dict:
        yield from _dicts(old, new, path, a, b)
    elif kind is list:
        yield from _lists(old, new, path, a, b)
    else:
        before = {a.pack(item) for item in set.__iter__(old)}
        after = {b.pack(item) for item in set.__iter__(new)}
        if before - after:
            yield Operation(0, op.REMOVE, path, (sorted(before - after),))
        if after - before:
            yield Operation(0, op.ADD, path, (sorted(after - before),))


def _same(x: Any, y: Any, a: Document, b: Document) -> bool:
    if type(x) in FLAT and type(y) in FLAT and x is y:
        return True
    return a.pack(x) == b.pack(y)


def _dicts(old: Any, new: Any, path: list[Any], a: Document, b: Document) -> Iterator[Operation]:
    old_keys = {a.pack_key(key): key for key in dict.keys(old)}
    new_keys = {b.pack_key(key): key for key in dict.keys(new)}
    kept = [data for data in old_keys if data in new_keys]
    for data, key in old_keys.items():
        if data not in new_keys:
            yield Operation(0, op.DELETE, [*path, key], ())
    for data in _out_of_order(kept, list(new_keys)):
        yield Operation(0, op.DELETE, [*path, old_keys[data]], ())
        kept.remove(data)
    staying = set(kept)
    for data, key in new_keys.items():
        value = dict.__getitem__(new, key)
        if data not in staying:
            yield Operation(0, op.SET, [*path, key], (encode(value, b.registry),))
        else:
            before = dict.__getitem__(old, old_keys[data])
            if not _same(before, value, a, b):
                yield from _values(before, value, [*path, key], a, b)


def _lists(old: Any, new: Any, path: list[Any], a: Document, b: Document) -> Iterator[Operation]:
    head, tail = _common_ends(old, new)
    before = list.__getitem__(old, slice(head, len(old) - tail))
    after = list.__getitem__(new, slice(head, len(new) - tail))
    before_data = [a.pack(item) for item in before]
    after_data = [b.pack(item) for item in after]
    first = 0
    while first < min(len(before), len(after)) and before_data[first] == after_data[first]:
        first += 1
    last = 0
    while last < min(len(before), len(after)) - first and before_data[-1 - last] == after_data[-1 - last]:
        last += 1
    before, before_data = before[first : len(before) - last], before_data[first : len(before_data) - last]
    after, after_data = after[first : len(after) - last], after_data[first : len(after_data) - last]
    start = head + first
    shift = 0
    for tag, i1, i2, j1, j2 in _align(before_data, after_data):
        if tag == "equal":
            continue
        paired = min(i2 - i1, j2 - j1)
        for offset in range(paired):
            x, y = before[i1 + offset], after[j1 + offset]
            if before_data[i1 + offset] != after_data[j1 + offset]:
                yield from _values(x, y, [*path, start + i1 + offset + shift], a, b)
        rest_old, rest_new = i2 - i1 - paired, after[j1 + paired : j2]
        if rest_old or rest_new:
            at = start + i1 + paired + shift
            yield Operation(0, op.SPLICE, path, (at, rest_old, [encode(item, b.registry) for item in rest_new]))
        shift += len(rest_new) - rest_old


def _align(before: list[bytes], after: list[bytes]) -> list[tuple[str, int, int, int, int]]:
    if len(before) > _ALIGN_MAX_ITEMS or len(after) > _ALIGN_MAX_ITEMS or not before or not after:
        return [("replace", 0, len(before), 0, len(after))] if before or after else []
    return list(SequenceMatcher(None, before, after, autojunk=False).get_opcodes())


def _common_ends(old: Any, new: Any) -> tuple[int, int]:
    """How many items at the start and at the end are equal because their leaves are."""
    x: list[Leaf] = old._tree.leaves if isinstance(old, Node) and old._tree is not None else []
    y: list[Leaf] = new._tree.leaves if isinstance(new, Node) and new._tree is not None else []
    head = tail = first = last = 0
    shorter = min(len(x), len(y))
    while first < shorter and x[first].digest is not None and x[first].digest == y[first].digest:
        head += x[first].count
        first += 1
    while last < shorter - first and x[-1 - last].digest is not None and x[-1 - last].digest == y[-1 - last].digest:
        tail += x[-1 - last].count
        last += 1
    return head, tail
