"""Trails: what became of one item since its encoding was last known, by the operations alone.

Owns doing operations again on encodings. Must not know live values, but for containers with a tree of their own, which
answers for what they hold. What always holds: ``encoding`` is what whoever replays the operations on the old encoding
arrives at; when in doubt there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from ormsgpack import Ext, packb

from holdfast.codec import codes
from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, INLINE_MAX_BYTES, LIST, SET
from holdfast.codec.operations import Operation
from holdfast.codec.trees import build
from holdfast.codec.wire import array_of, map_of

if TYPE_CHECKING:
    from holdfast.codec.nodes.base import Node

_RAWS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ARRAYS = {0xDC: 3, 0xDD: 5}  # first byte -> where the items begin
_MAPS = {0xDE: 3, 0xDF: 5}
_EXTENSIONS = {0xD4: 1, 0xD5: 1, 0xD6: 1, 0xD7: 1, 0xD8: 1, 0xC7: 2, 0xC8: 3, 0xC9: 5}  # ... -> where the code stands
_TEXTS = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB})


class _Doubt(Exception):
    """The operations do not fit, or cannot be followed here."""


class Step(NamedTuple):
    """One operation inside an item.

    ``inner`` is the first container with a tree on the way to where it took place, if there is one; ``before`` its
    digest before that, None when it had been changed already.
    """

    operation: Operation
    inner: Node | None
    before: bytes | None


class Trail:
    """One item: how it was encoded, and what was done inside it since. ``depth``: the length of its path."""

    __slots__ = ("base", "depth", "steps")

    def __init__(self, base: bytes, depth: int) -> None:
        self.base = base
        self.depth = depth
        self.steps: list[Step] = []

    def encoding(self, pack: Callable[[Any], bytes], pack_key: Callable[[Any], bytes]) -> bytes | None:
        """How the item is encoded after the operations; None when they do not fit."""
        root: list[Any] = [self.base]
        try:
            for step in self.steps:
                self._do(root, step, pack_key)
            return _encoded(root[0], pack)
        except (_Doubt, LookupError, TypeError, ValueError, AttributeError):
            return None

    def _do(self, root: list[Any], step: Step, pack_key: Callable[[Any], bytes]) -> None:
        _, code, path, args = step.operation
        keys = path[self.depth :]
        if code == op.SET and not keys:
            root[0] = args[0]
            return
        holder: Any = root
        at: Any = 0
        for key in keys[:-1] if code in {op.SET, op.DELETE} else keys:
            box = _opened(holder, at, step)
            if box is step.inner:
                return  # its own tree has been told
            holder, at = box, pack_key(key) if isinstance(box, dict) else key
        box = _opened(holder, at, step)
        if box is step.inner:
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


def _opened(holder: Any, at: Any, step: Step) -> Any:
    """The container in a place, its items being encodings: a list, a dict by encoded keys, a set, or ``step.inner``."""
    box = holder[at]
    if type(box) is bytes:
        digest = _big(box)
        if digest is None:
            box = _parse(box)
        elif step.inner is not None and digest == step.before:
            box = step.inner
        else:
            raise _Doubt
        holder[at] = box
    elif type(box) not in {list, dict, set} and box is not step.inner:
        raise _Doubt
    return box


def _big(data: bytes) -> bytes | None:
    """The digest by which a container stands there."""
    at = _EXTENSIONS.get(data[0])
    return data[at + 1 :] if at is not None and data[at] == codes.BIG else None


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
    if at is not None and data[at] == codes.DICT:
        return _pairs(_parse(data[at + 1 :]))
    if at is not None and data[at] == codes.SET:
        return set(_parse(data[at + 1 :]))
    raise _Doubt


def _split(data: bytes, at: int, count: int) -> list[Any]:
    return list(map(bytes, _RAWS.decode(b"".join((b"\xdd", count.to_bytes(4, "big"), memoryview(data)[at:])))))


def _pairs(parts: list[Any]) -> dict[bytes, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _encoded(box: Any, pack: Callable[[Any], bytes]) -> bytes:
    """How a document packs what the operations made."""
    kind = type(box)
    if kind is bytes:
        return bytes(box)
    if kind is list:
        items = [item if type(item) is bytes else _encoded(item, pack) for item in box]
        return _placed(LIST, items, array_of(items))
    if kind is set:
        items = sorted(box)
        return _placed(SET, items, packb(Ext(codes.SET, array_of(items))))
    if kind is dict:
        parts = [part for key, value in box.items() for part in (key, _encoded(value, pack))]
        items = [key + value for key, value in zip(parts[::2], parts[1::2], strict=True)]
        named = all(key[0] in _TEXTS for key in box)
        return _placed(DICT, items, map_of(items) if named else packb(Ext(codes.DICT, array_of(parts))))
    return pack(box)


def _placed(kind: bytes, items: list[bytes], inline: bytes) -> bytes:
    if len(inline) <= INLINE_MAX_BYTES:
        return inline
    root: bytes = build(kind, items)[0].root  # type: ignore[assignment] # it was built
    return packb(Ext(codes.BIG, root))
