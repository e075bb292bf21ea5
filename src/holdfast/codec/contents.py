"""Containers as bytes: opened into the encodings of their items, and closed again.

Owns what a list, dict or set looks like as MessagePack, and how an encoding names a tree. Everything here is a function
of bytes: no class, no registry and no storage. What always holds: closing what was opened gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ormsgpack import packb

from holdfast.codec import wire
from holdfast.codec.blocks import DICT, DIGEST_BYTES, LIST, SET
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.codec.wire import (
    array_items,
    array_of,
    corrupt,
    extension_of,
    is_text,
    map_items,
    map_of,
    opened_extension,
    split,
)

BIG_HEAD = bytes((0xC7, DIGEST_BYTES, wire.BIG))
"""How the name of a tree begins: extension 40 with 32 bytes."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_NO_TYPES = Registry()


class Opened(NamedTuple):
    """A container as the encodings of its items. A dict has its keys beside its values."""

    kind: bytes
    items: list[bytes]
    keys: list[bytes] | None = None

    @property
    def pairs(self) -> list[bytes]:
        """The items as a tree holds them."""
        if self.keys is None:
            return self.items
        return [key + item for key, item in zip(self.keys, self.items, strict=True)]


def key_of(pair: bytes) -> bytes:
    """The key of a dict's item."""
    head = pair[0]
    if 0xA0 <= head < 0xC0:
        return pair[: 1 + (head & 31)]
    if head < 0x80 or head >= 0xE0:
        return pair[:1]
    if head == 0xD9:
        return pair[: 2 + pair[1]]
    return split(pair, 2)[0]


def opened(kind: bytes, items: list[bytes]) -> Opened:
    """The items of a tree: a dict's are taken apart."""
    if kind != DICT:
        return Opened(kind, items)
    parts = split(b"".join(items), 2 * len(items))
    return Opened(DICT, parts[1::2], parts[::2])


def open_inline(data: bytes) -> Opened | None:
    """The items of a container that is written out; None for anything else."""
    items = array_items(data)
    if items is not None:
        return Opened(LIST, items)
    parts = map_items(data)
    if parts is not None:
        return Opened(DICT, parts[1::2], parts[::2])
    found = opened_extension(data)
    if found is None or found[0] not in (wire.DICT, wire.SET):
        return None
    items = array_items(memoryview(data)[found[1] :])
    if items is None or (found[0] == wire.DICT and len(items) % 2):
        raise corrupt("a dict or a set is one array of its items")
    return Opened(SET, items) if found[0] == wire.SET else Opened(DICT, items[1::2], items[::2])


def close(kind: bytes, items: list[bytes], keys: list[bytes] | None = None) -> bytes:
    """A container written out."""
    if kind == LIST:
        return array_of(items)
    if kind == SET:
        return extension_of(wire.SET, array_of(items))
    names = keys or []
    if all(map(is_text, names)):
        return map_of([key + item for key, item in zip(names, items, strict=True)])
    return extension_of(wire.DICT, array_of([part for pair in zip(names, items, strict=True) for part in pair]))


def big(root: bytes) -> bytes:
    """How a container with a tree of its own stands in its parent."""
    return BIG_HEAD + root


def root_of(data: bytes) -> bytes | None:
    """The root of the tree, when an encoding is the name of one."""
    return data[3:] if len(data) == 3 + DIGEST_BYTES and data.startswith(BIG_HEAD) else None


def roots_in(data: bytes) -> Iterator[bytes]:
    """The roots of all trees that an encoding names. Other bytes may look like one."""
    at = data.find(BIG_HEAD)
    while at >= 0:
        yield data[at + len(BIG_HEAD) : at + len(BIG_HEAD) + DIGEST_BYTES]
        at = data.find(BIG_HEAD, at + 1)


# -- keys ---------------------------------------------------------------------------------------------------------


def part_of(key: bytes) -> Any:
    """A dict's key as it stands in the path of an operation: keys of classes are records there."""
    if is_text(key):
        return decode(key)
    return decode(key, _NO_TYPES, inert=True)


def key_bytes(part: Any) -> bytes:
    """The encoding of a key in a path."""
    if type(part) in _SCALARS:
        try:
            return packb(part)
        except TypeError:  # a lone surrogate, or an integer without end
            pass
    return encode(part, _NO_TYPES)
