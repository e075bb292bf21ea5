"""Trails: what became of one item since its encoding was last known, by the operations alone.

Owns doing operations again on encodings. Must not know live values. What always holds: ``leads_to`` is true only if
whoever replays the operations on the old encoding arrives at the new one; when in doubt it is false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from ormsgpack import Ext, packb

from holdfast.codec import codes
from holdfast.codec import operations as op
from holdfast.codec.operations import Operation
from holdfast.codec.wire import array_of

_RAWS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ARRAYS = {0xDC: 3, 0xDD: 5}  # first byte -> where the items begin
_MAPS = {0xDE: 3, 0xDF: 5}
_EXTENSIONS = {0xD4: 1, 0xD5: 1, 0xD6: 1, 0xD7: 1, 0xD8: 1, 0xC7: 2, 0xC8: 3, 0xC9: 5}  # ... -> where the code stands
_TEXTS = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB})
# A container that stands there by its digest and changed inside: its own tree says what became of it.
_ELSEWHERE: Any = object()


class _Doubt(Exception):
    """The operations do not fit, or cannot be followed here."""


class Trail:
    """One item: how it was encoded, and the operations inside it since. ``depth``: the length of its path."""

    __slots__ = ("base", "depth", "operations")

    def __init__(self, base: bytes, depth: int) -> None:
        self.base = base
        self.depth = depth
        self.operations: list[Operation] = []

    def leads_to(self, data: bytes, pack_key: Callable[[Any], bytes]) -> bool:
        """Whether the operations make ``data`` of the old encoding."""
        try:
            root = [self.base]
            for operation in self.operations:
                self._do(root, operation, pack_key)
            return _agrees(root[0], data)
        except (_Doubt, LookupError, TypeError, ValueError):
            return False

    def _do(self, root: list[Any], operation: Operation, pack_key: Callable[[Any], bytes]) -> None:
        _, code, path, args = operation
        keys = path[self.depth :]
        if code == op.SET and not keys:
            root[0] = args[0]
            return
        holder: Any = root
        at: Any = 0
        for key in keys[:-1] if code in {op.SET, op.DELETE} else keys:
            box = _opened(holder, at)
            if box is _ELSEWHERE:
                return
            holder, at = box, pack_key(key) if isinstance(box, dict) else key
        box = _opened(holder, at)
        if box is _ELSEWHERE:
            return
        if code == op.SET:
            box[pack_key(keys[-1]) if isinstance(box, dict) else keys[-1]] = args[0]
        elif code == op.DELETE:
            del box[pack_key(keys[-1])]
        elif code == op.SPLICE:
            start, removed, values = args
            if start + removed > len(box):
                raise _Doubt
            box[start : start + removed] = values
        elif code == op.ARRANGE:
            _arrange(box, args[0])
        elif code == op.CLEAR:
            box.clear()
        elif code == op.ADD:
            box.update(args[0])
        else:
            for item in args[0]:
                box.remove(item)


def _arrange(box: list[Any], pieces: list[Any]) -> None:
    old = box.copy()
    box.clear()
    for piece in pieces:
        if len(piece) == 1:
            box.append(piece[0])
        else:
            start, count, step = piece
            box += [old[start + step * number] for number in range(count)]


def _opened(holder: Any, at: Any) -> Any:
    """The container in a place, its items being encodings: a list, a dict by encoded keys, or a set."""
    data = holder[at]
    if type(data) is bytes:
        data = holder[at] = _parse(data)
    return data


def _parse(data: bytes) -> Any:
    first = data[0]
    if 0x90 <= first <= 0x9F:
        return _split(data, 1, first & 0x0F)
    if 0x80 <= first <= 0x8F:
        return _pairs(_split(data, 1, 2 * (first & 0x0F)))
    at = _ARRAYS.get(first)
    if at is not None:
        return _split(data, at, int.from_bytes(data[1:at], "big"))
    at = _MAPS.get(first)
    if at is not None:
        return _pairs(_split(data, at, 2 * int.from_bytes(data[1:at], "big")))
    at = _EXTENSIONS.get(first)
    if at is None:
        raise _Doubt
    code = data[at]
    if code == codes.BIG:
        return _ELSEWHERE
    if code == codes.DICT:
        return _pairs(_parse(data[at + 1 :]))
    if code == codes.SET:
        return set(_parse(data[at + 1 :]))
    raise _Doubt


def _split(data: bytes, at: int, count: int) -> list[Any]:
    return list(map(bytes, _RAWS.decode(b"".join((b"\xdd", count.to_bytes(4, "big"), memoryview(data)[at:])))))


def _pairs(parts: list[Any]) -> dict[bytes, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _agrees(box: Any, data: bytes) -> bool:
    """Whether what the operations made is encoded as ``data``."""
    kind = type(box)
    if kind is bytes:
        return bool(box == data)
    if box is _ELSEWHERE:
        at = _EXTENSIONS.get(data[0])
        return at is not None and data[at] == codes.BIG
    if kind is set:
        return packb(Ext(codes.SET, array_of(sorted(box)))) == data
    there = _parse(data)
    if type(there) is not kind or len(there) != len(box):
        return False
    if kind is list:
        return all(map(_agrees, box, there))
    return list(box) == list(there) and all(map(_agrees, box.values(), there.values()))
