"""Containers as bytes: opened into the encodings of their items, and closed again.

Owns what a list, dict or set looks like as MessagePack. Everything here is a function of bytes: no class, no registry
and no storage. What always holds: closing what was opened gives the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ormsgpack import packb

from holdfast.codec import blocks, wire
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, big
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

if TYPE_CHECKING:
    from holdfast.codec.tree import Fetch, Tree

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
    if head in (0xD9, 0xC4):
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


def named(tree: Tree, fetch: Fetch) -> bytes:
    """How a container with a tree stands in its parent, or in an operation: by its root, unless it is small."""
    if tree.kind == VALUE:
        return tree.part(0, 1, fetch)[0]
    if tree.size <= blocks.INLINE_MAX_BYTES:
        data = close(*opened(tree.kind, tree.all(fetch)))
        if len(data) <= blocks.INLINE_MAX_BYTES:
            return data
    return big(tree.root)


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
