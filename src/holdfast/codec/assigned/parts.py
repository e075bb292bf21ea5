"""Containers as bytes: taken apart into the encodings of their items, put together again, split when they are big.

Owns the choice between inline, tree and bulk (format.md section 2) for values that exist as encodings only. Must not
know sections or live values. What always holds: equal content packs to the bytes that a ``Document`` writes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import Any, NamedTuple

import msgspec
from ormsgpack import Ext, packb

from holdfast.codec import codes
from holdfast.codec.blocks import BULK_MIN_BYTES, DICT, INLINE_MAX_BYTES, LIST, SET, VALUE, digest_of
from holdfast.codec.document.packing import CHUNK_BYTES, has_nan, trackable
from holdfast.codec.trees import build
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode, is_immutable
from holdfast.codec.wire import array_of
from holdfast.errors import CorruptValue

BigReader = Callable[[int, bytes], Any]

_RAWS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_FIXED_EXTENSIONS = range(0xD4, 0xD9)
_SIZED_EXTENSIONS = {0xC7: 2, 0xC8: 3, 0xC9: 5}  # first byte -> where the code stands
_LONG_ARRAYS = {0xDC: 3, 0xDD: 5}  # first byte -> where the items begin
_LONG_MAPS = {0xDE: 3, 0xDF: 5}
_LONG_TEXTS = frozenset({0xD9, 0xDA, 0xDB})
_LONG_TEXTS_AND_BYTES = _LONG_TEXTS | {0xC4, 0xC5, 0xC6}


class Parts(NamedTuple):
    """What an encoding names by digest, directly or further down."""

    nodes: dict[bytes, bytes]
    chunks: dict[bytes, bytes]


class Opened(NamedTuple):
    """A container's items as encodings; of kind `v` there is one, the value itself."""

    kind: bytes
    items: list[bytes]
    keys: list[bytes] | None = None


def split(payload: bytes | memoryview, count: int) -> list[bytes]:
    """Encodings that stand one after another. Raises CorruptValue."""
    try:
        return list(map(bytes, _RAWS.decode(b"".join((b"\xdd", count.to_bytes(4, "big"), payload)))))
    except (msgspec.DecodeError, OverflowError, RecursionError) as error:
        raise CorruptValue(f"what should be {count} encodings is not: {error}") from error


def _extension(data: bytes) -> tuple[int, int] | None:
    """Code and start of the payload, when the encoding is an extension."""
    first = data[0]
    at = 1 if first in _FIXED_EXTENSIONS else _SIZED_EXTENSIONS.get(first)
    return None if at is None or len(data) <= at else (data[at], at + 1)


def _array(data: bytes) -> list[bytes] | None:
    first = data[0] if data else 0
    if 0x90 <= first <= 0x9F:
        return split(memoryview(data)[1:], first & 0x0F)
    at = _LONG_ARRAYS.get(first)
    return None if at is None else split(memoryview(data)[at:], int.from_bytes(data[1:at], "big"))


def _map(data: bytes) -> list[bytes] | None:
    first = data[0] if data else 0
    if 0x80 <= first <= 0x8F:
        return split(memoryview(data)[1:], 2 * (first & 0x0F))
    at = _LONG_MAPS.get(first)
    return None if at is None else split(memoryview(data)[at:], 2 * int.from_bytes(data[1:at], "big"))


def opened(data: bytes, registry: Registry, big: BigReader | None = None) -> Opened:
    """The items of a container that a document would follow; anything else is one value. Raises CorruptValue."""
    items = _array(data)
    if items is not None:
        return Opened(LIST, items)
    pairs = _map(data)
    if pairs is not None:
        return Opened(DICT, pairs[1::2], pairs[::2])
    code, at = _extension(data) or (0, 0)
    if code == codes.DICT:
        pairs = _array(data[at:])
        if pairs is None or len(pairs) % 2:
            raise CorruptValue("a dict's extension does not hold keys and values")
        if _lasting(pairs[::2], registry):
            return Opened(DICT, pairs[1::2], pairs[::2])
    elif code == codes.SET:
        # Inside a set, instances are numbered through all its items; on its own, each item starts anew.
        value = decode(data, registry, inert=True, big=big)
        if type(value) is set and trackable(value):
            return Opened(SET, sorted(encode(item, registry) for item in value))
    return Opened(VALUE, [data])


def _lasting(keys: Iterable[bytes], registry: Registry) -> bool:
    """Whether a dict with these keys is followed: a key that can change, or equals nothing, is not found again."""
    found = (decode(key, registry, inert=True) for key in keys)
    return all(is_immutable(key) and not has_nan(key) for key in found)


def closed(kind: bytes, items: Sequence[bytes], keys: Sequence[bytes] | None) -> bytes:
    """The encoding of a container from those of its items."""
    if kind == VALUE:
        return items[0]
    if kind == LIST:
        return array_of(list(items))
    if kind == SET:
        return packb(Ext(codes.SET, array_of(sorted(items))))
    pairs = [part for pair in zip(keys or (), items, strict=True) for part in pair]
    if not all(0xA0 <= key[0] <= 0xBF or key[0] in _LONG_TEXTS for key in keys or ()):
        return packb(Ext(codes.DICT, array_of(pairs)))
    count = len(items)
    if count < 16:
        head = bytes([0x80 | count])
    elif count < 2**16:
        head = b"\xde" + count.to_bytes(2, "big")
    else:
        head = b"\xdf" + count.to_bytes(4, "big")
    return head + b"".join(pairs)


def joined(items: list[bytes], keys: list[bytes] | None) -> list[bytes]:
    """The items as a node holds them: a dict's key and value together."""
    return items if keys is None else list(map(add, keys, items))


def big_form(digest: bytes) -> bytes:
    """How a container with a tree of its own stands in its parent."""
    return packb(Ext(codes.BIG, digest))


def pack(data: bytes, registry: Registry, parts: Parts) -> bytes:
    """How a value with this encoding stands in its parent; what that names by digest is added to ``parts``."""
    if len(data) <= INLINE_MAX_BYTES:
        return data
    content = opened(data, registry)
    if content.kind == VALUE:
        return bulk_form(data, parts) if len(data) >= BULK_MIN_BYTES else data
    items = [pack(item, registry, parts) for item in content.items]
    if content.kind == SET:
        items.sort()
    # Text and bytes count with their own length, in whatever form they stand in the end.
    if sum(map(len, items)) <= INLINE_MAX_BYTES and (content.kind == SET or not any(map(_is_long_text, content.items))):
        inline = closed(content.kind, items, content.keys)
        if len(inline) <= INLINE_MAX_BYTES:
            return inline
    tree, nodes = build(content.kind, joined(items, content.keys))
    parts.nodes.update(nodes)
    if tree.root is None:
        raise CorruptValue("a tree without a root")
    return big_form(tree.root)


def _is_long_text(data: bytes) -> bool:
    if len(data) < BULK_MIN_BYTES:
        return False
    extension = _extension(data)
    return data[0] in _LONG_TEXTS_AND_BYTES or (extension is not None and extension[0] == codes.STR)


def bulk_form(data: bytes, parts: Parts) -> bytes:
    """Extension 41: the encoding goes into chunks."""
    view = memoryview(data)
    digests = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = bytes(view[start : start + CHUNK_BYTES])
        digests.append(digest_of("holdfast.chunk", chunk))
        parts.chunks[digests[-1]] = chunk
    return packb(Ext(codes.BULK, packb([digest_of("holdfast.value", data), len(data), digests])))
