"""Encoding what a document holds: small containers inline, big ones by digest, bulk by chunks.

Owns the choice between the three (format.md section 2), and the nodes and chunks that the next commit must write.
Must not know how values come in or where they are stored. What always holds: equal content packs to equal bytes,
however it was reached; a mutable value that was handed out packs as its snapshot, so that digests, nodes and
operations agree even while another thread changes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ormsgpack import Ext, Fragment, packb

from holdfast.codec import codes
from holdfast.codec.blocks import (
    BULK_MIN_BYTES,
    INLINE_MAX_BYTES,
    LEAF_MAX_ITEMS,
    VALUE,
    digest_of,
    leaf_node,
    node_digest,
)
from holdfast.codec.codes import UNWRAP, WholeDict, WholeList, WholeSet
from holdfast.codec.nodes import FLAT, Node, TrackedSet, wrap
from holdfast.codec.nodes.base import TEXT, Owner
from holdfast.codec.trees import Tree
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode, fields_of, is_immutable, is_lasting
from holdfast.codec.wire import OPTION, array_of, has_reference, is_utf8
from holdfast.errors import Unencodable, Untracked

CHUNK_BYTES = 8 * 1024 * 1024
# A container that fits inline has at most so many leaves: two by size, the others by the limit on items, and the last.
_INLINE_MAX_LEAVES = INLINE_MAX_BYTES // LEAF_MAX_ITEMS + 3
# How often, and how many seconds apart, a value is encoded that another thread is changing at that moment.
_TRIES, _PAUSE_S = 200, 0.002
# The memory of values that were cut into chunks is looked through for dead ones when it has so many.
_BULK_KNOWN = 64
WHOLE: tuple[type, ...] = (WholeList, WholeDict, WholeSet)
RAW: frozenset[type] = frozenset({dict, list, set})

_PLAIN: dict[type, type] = {WholeList: list, WholeDict: dict, WholeSet: set}
UNWRAP[WholeSet] = set


class Moving(Exception):
    """A handed-out value is not what its snapshot says; take snapshots again."""


class Snapshot:
    """A mutable value that user code may hold, and what it was when the document last looked.

    ``data`` is its encoding. While it is None, ``fields`` (all immutable) say the same at less cost.
    """

    __slots__ = ("data", "fields", "holder", "packed", "value")

    def __init__(self, value: Any, holder: Any, fields: tuple[Any, ...] | None, data: bytes | None) -> None:
        self.value = value
        self.holder = holder
        self.fields = fields
        self.data = data
        self.packed: bytes | None = None  # the form in a parent, when it is not the encoding itself

    def unchanged(self) -> bool:
        """Whether the fields are the very same objects. False is only a doubt."""
        if self.fields is None:
            return False
        now = fields_of(self.value)
        return now is not None and len(now) == len(self.fields) and all(map(_is, now, self.fields))


def _is(one: Any, two: Any) -> bool:
    return one is two


def is_whole(data: bytes) -> bool:
    """Whether an encoding is code 23."""
    first = data[0]
    at = 1 if 0xD4 <= first <= 0xD8 else {0xC7: 2, 0xC8: 3, 0xC9: 5}.get(first)
    return at is not None and data[at] == codes.WHOLE


def trackable(value: Any) -> bool:
    """Whether a raw container can be followed: sets of mutable items, and dicts with such keys, are kept whole."""
    kind = type(value)
    if kind is list:
        return True
    if kind is set:
        return FLAT.issuperset(map(type, value)) or all(map(is_immutable, value))
    if TEXT.issuperset(map(type, value)):
        return True
    # A key that is not equal to itself could not be found again when operations are replayed.
    return all(is_immutable(key) and not has_nan(key) for key in value)


def has_nan(key: Any) -> bool:
    """Whether no equal key can be made of the same bytes."""
    if isinstance(key, tuple | frozenset):
        return any(map(has_nan, key))
    return bool(key != key)  # noqa: PLR0124 - NaN


def whole(value: Any) -> Any:
    """A raw container that cannot be followed, as one that is kept whole."""
    kind = type(value)
    return WholeDict(value) if kind is dict else WholeSet(value) if kind is set else value


class Packing:
    """The encodings of one document's content."""

    def __init__(self, registry: Registry, owner: Owner, *, inert: bool = False) -> None:
        self.registry = registry
        self.inert = inert
        self.snapshots: dict[int, Snapshot] = {}
        self.nodes: dict[bytes, bytes] = {}
        self.chunks: dict[bytes, bytes] = {}
        self.unsaved: dict[int, Node] = {}  # containers whose trees may have nodes that the catalog lacks
        self._owner = owner
        self.lenient = False  # whether a handed-out value may be encoded that is not what its snapshot says
        self._before: Any = (None, None)  # what was busy when a change to a handed-out value was found
        self._bulk: dict[int, tuple[Any, bytes]] = {}
        self._bulk_limit = _BULK_KNOWN

    def start(self, holder: Any) -> None:
        """A change to a handed-out value in ``holder`` was found, perhaps while another one is being prepared."""
        owner = self._owner
        if owner.changing is not None:
            owner.distrust(owner.changing)
        self._before, owner.busy = (owner.busy, owner.changing), holder

    def done(self) -> None:
        """It has been recorded."""
        self._owner.busy, self._owner.changing = self._before

    def follows(self, value: Any) -> bool:
        """Whether a raw container that is not trackable by itself is followed in this document."""
        if not self.inert or not all(is_lasting(key) and not has_nan(key) for key in value):
            return False
        # Its keys are records: without their classes nobody knows whether they can change. If not, a container that is
        # too long would have nodes of its own; if they can, it is kept whole, and no operation goes into it.
        return len(self._inner(value, self._hook)) <= INLINE_MAX_BYTES

    # -- items ----------------------------------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        """The encoding of an item."""
        try:
            data = packb(value, self._hook, OPTION)
        except TypeError:  # a key that is not a str, or a lone surrogate: legal, but not for the library
            data = self._slowly(value, self._hook)
        if len(data) > INLINE_MAX_BYTES:
            return self._large(value, data)
        return data

    def pack_all(self, values: list[Any]) -> list[bytes]:
        """The encodings of items."""
        hook = self._hook
        try:
            packed = [packb(value, hook, OPTION) for value in values]
        except TypeError:
            packed = []
        if len(packed) != len(values) or (packed and max(map(len, packed)) > INLINE_MAX_BYTES):
            return list(map(self.pack, values))
        return packed

    def pack_key(self, key: Any) -> bytes:
        """The encoding of a dict key."""
        try:
            return packb(key, self._hook, OPTION)
        except TypeError:
            return encode(key, self.registry)

    def content(self, value: Any) -> bytes:
        """The whole encoding of what the document holds: nothing by digest."""
        return self._inner(value, self._hook_content)

    def live(self, value: Any) -> bytes:
        """As content(), with handed-out values as they are at this moment."""
        return self._inner(value, self._hook_live)

    def _inner(self, value: Any, hook: Callable[[Any], Any]) -> bytes:
        try:
            return packb(value, hook, OPTION)
        except TypeError:
            return self._slowly(value, hook)

    def _slowly(self, value: Any, hook: Callable[[Any], Any]) -> bytes:
        kind = type(value)
        if kind is list:
            return array_of([self._inner(item, hook) for item in value])
        if kind is dict:
            items = [(key, self._inner(item, hook)) for key, item in value.items()]
            if all(type(key) is str and is_utf8(key) for key, _ in items):
                return packb({key: Fragment(data) for key, data in items})
            parts = [part for key, data in items for part in (self.pack_key(key), data)]
            return packb(Ext(codes.DICT, array_of(parts)))
        if kind in FLAT:
            return encode(value, self.registry)
        made = hook(value)
        return self._slowly(made, hook) if type(made) in RAW else packb(made)

    def _hook(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value._tree is not None:
                data = self._as_big(value)
                if data is not None:
                    return Fragment(data)
            return self._opened(value, self.pack)
        return Fragment(self._leaf(value))

    def _hook_content(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._opened(value, self.content)
        return Fragment(self._encoding(value))

    def _hook_live(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._opened(value, self.live)
        return Fragment(self.encode(value))

    def _opened(self, node: Any, item: Callable[[Any], bytes]) -> Any:
        if isinstance(node, TrackedSet):
            payload = array_of(sorted(map(item, set.__iter__(node))))
            if has_reference(payload):  # in its own item it means another instance than among all items of a set
                return Fragment(self.encode(set(node)))
            return Ext(codes.SET, payload)
        return node._peek()

    def encode(self, value: Any, depth: int = 0) -> bytes:
        """The encoding of a value that is no node, as it is at this moment."""
        plain = _PLAIN.get(type(value))
        for _ in range(_TRIES):
            try:
                # Whether something in it has to be kept whole depends on what it holds now, not on what it held.
                return encode(value if plain is None else plain(value), self.registry, depth=depth)
            except RuntimeError as error:  # another thread is changing it, say the iterators of deques and dicts
                if isinstance(error, RecursionError):
                    raise
                time.sleep(_PAUSE_S)
        raise Unencodable(
            f"a {type(value).__name__} is changed by another thread all the time",
            hint="Let the thread that changes it take the checkpoint, or use a lock for both.",
        )

    # -- values that are not followed ---------------------------------------------------------------------

    def _encoding(self, value: Any) -> bytes:
        """The encoding of a value that is no node, as of its snapshot when it has one."""
        snapshot = self.snapshots.get(id(value))
        if snapshot is None:
            return self.encode(value)
        if snapshot.data is None:
            data = self.encode(value)
            if not snapshot.unchanged():
                if self.lenient:
                    return data
                raise Moving
            snapshot.data = data
        return snapshot.data

    def _leaf(self, value: Any) -> bytes:
        snapshot = self.snapshots.get(id(value))
        if snapshot is not None and snapshot.packed is not None:
            return snapshot.packed
        data = self._encoding(value)
        if len(data) <= INLINE_MAX_BYTES:
            return data
        packed = self.leaf_data(value, data)
        if snapshot is not None and packed is not data:
            snapshot.packed = packed
        return packed

    def leaf_data(self, value: Any, data: bytes) -> bytes:
        """How a value with this encoding, over the inline limit perhaps, stands in its parent."""
        if len(data) > INLINE_MAX_BYTES and isinstance(value, WHOLE):
            node = self._unwhole(data)
            if node is not None:
                packed = self.pack(node)
                self.keep(node)
                return packed
        return self._pack_bulk(value, data) if len(data) >= BULK_MIN_BYTES else data

    def root(self, value: Any) -> tuple[bytes, bytes | None]:
        """The digest of a section's content, and its node when that is a single one of kind `v`."""
        if isinstance(value, Node):
            return value._digest(), None
        if isinstance(value, WHOLE):
            node = self._unwhole(self._encoding(value))
            if node is not None:
                digest = node._digest()
                self.keep(node)
                return digest, None
        raw = leaf_node(VALUE, [self.pack(value)])
        return node_digest(raw), raw

    def _unwhole(self, data: bytes) -> Any:
        """The tracked container that equal content would be now, when nothing keeps a value whole any more."""
        if is_whole(data):
            return None
        plain = decode(data, self.registry, inert=self.inert, owned=True)
        if type(plain) not in RAW or not trackable(plain):
            return None
        node = wrap(plain, self._owner, None)
        self._split(node)
        return node

    def _pack_bulk(self, value: Any, data: bytes) -> bytes:
        """Extension 41: the encoding goes into chunks. Immutable values are cut once."""
        known = self._bulk.get(id(value))
        if known is not None:
            return known[1]
        view = memoryview(data)
        digests = []
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = bytes(view[start : start + CHUNK_BYTES])
            digests.append(digest_of("holdfast.chunk", chunk))
            self.chunks[digests[-1]] = chunk
        packed = packb(Ext(codes.BULK, packb([digest_of("holdfast.value", data), len(data), digests])))
        self.know_bulk(value, packed)
        return packed

    def know_bulk(self, value: Any, packed: bytes) -> None:
        """Remember that an immutable value is in chunks already."""
        if not is_immutable(value):
            return
        if len(self._bulk) >= self._bulk_limit:
            # Two references are the table's and getrefcount's own.
            self._bulk = {key: kept for key, kept in self._bulk.items() if sys.getrefcount(kept[0]) > 2}
            self._bulk_limit = max(_BULK_KNOWN, 2 * len(self._bulk))
        self._bulk[id(value)] = (value, packed)

    # -- containers that are too big for their parent -----------------------------------------------------

    def _large(self, value: Any, data: bytes) -> bytes:
        if isinstance(value, Node):
            self._split(value)
            data = self._inner(value, self._hook)
            if len(data) <= INLINE_MAX_BYTES:
                return data
            value._plant()
            return packb(Ext(codes.BIG, value._digest()))
        if type(value) in RAW:
            if trackable(value):
                msg = "a large container was never taken apart"
                raise Untracked(msg)
            kept = whole(value)  # it was read with a node in which something else has changed since
            return self.leaf_data(kept, self.encode(kept))
        # What is no container came through _leaf(), which has cut it already; strings and bytes did not.
        return self._pack_bulk(value, data) if type(value) in FLAT and len(data) >= BULK_MIN_BYTES else data

    def _split(self, node: Any) -> None:
        """Give every child container that is too long for its parent a tree of its own."""
        for key, child in node._items():
            if type(child) not in RAW and (not isinstance(child, Node) or child._tree is not None):
                continue
            data = self._inner(child, self._hook)
            if len(data) <= INLINE_MAX_BYTES:
                continue
            if not isinstance(child, Node):
                if not trackable(child):
                    node._swap(key, whole(child))
                    continue
                child = wrap(child, self._owner, node, key)  # noqa: PLW2901 - the same child, wrapped
                node._swap(key, child)
            self._large(child, data)

    def _as_big(self, node: Node) -> bytes | None:
        """Extension 40 for a container with a tree; None when it has become small enough to stand inline."""
        digest = node._digest()
        tree: Tree = node._tree  # type: ignore[assignment]
        leaves = tree.leaves
        if len(leaves) <= _INLINE_MAX_LEAVES and sum([leaf.size for leaf in leaves]) <= INLINE_MAX_BYTES:
            for leaf in leaves:
                leaf.items = None
                node._run(leaf)  # it stands there as it is now: that must be what its tree was told
            node._tree = None
            if len(self._inner(node, self._hook)) <= INLINE_MAX_BYTES:
                node._forget_leaves()
                return None
            node._tree = tree
        return packb(Ext(codes.BIG, digest))

    def keep(self, value: Any) -> None:
        """An operation names the nodes of ``value``: whatever becomes of it, their bytes go into the next commit."""
        if not isinstance(value, Node):
            return
        if value._tree is not None:
            value._digest()
            self.nodes.update((digest, raw) for digest, raw, _ in value._tree.unstored(value._run))
        for _, child in value._items():
            if isinstance(child, Node):
                self.keep(child)

    def unstored_bytes(self) -> int:
        """The size of the leaves that ``unstored`` would give."""
        trees = (node._tree for node in self.unsaved.values() if node._tree is not None)
        return sum(leaf.size for tree in trees for leaf in tree.leaves if not leaf.stored)

    def unstored(self) -> Iterator[tuple[bytes, bytes, list[bytes]]]:
        """Nodes of the attached containers that the catalog lacks; they count as stored from now on."""
        for node in list(self.unsaved.values()):
            if node._tree is not None and node._home() is not None:
                node._digest()
                yield from node._tree.unstored(node._run)
            self.unsaved.pop(id(node), None)
