"""Reading what is stored, and doing operations again.

Owns the way from nodes to containers and from an operation to the change that it describes. Must not know checkpoints.
What always holds: bytes that do not follow the format, or operations that do not fit the state, raise Damaged and
nothing else; what was read from the catalog is known to be stored there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ormsgpack import Ext, packb

from holdfast.codec import codes
from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, digest_of, leaf_items
from holdfast.codec.document.packing import Packing, whole
from holdfast.codec.document.sections import Encoded, Source
from holdfast.codec.nodes import FLAT, LIVE, LazyDict, LazyList, Owner, TrackedDict, TrackedList, TrackedSet
from holdfast.codec.operations import Operation
from holdfast.codec.trees import read_tree
from holdfast.codec.values import decode
from holdfast.errors import CorruptValue, Damaged, format_path

_LIVE = frozenset(LIVE)


class Loading:
    """The reader of one document."""

    def __init__(self, owner: Owner, packing: Packing, source: Source | None, *, inert: bool) -> None:
        self._owner = owner
        self._packing = packing
        self._source = source
        self._inert = inert

    def decode(self, data: bytes) -> Any:
        """A value of the document from its packed form."""
        return decode(data, self._packing.registry, inert=self._inert, owned=True, big=self._read_big)

    def _read_big(self, code: int, payload: bytes) -> Any:
        if code == codes.BIG:
            return self.read_node(bytes(payload))
        try:
            digest, length, chunks = decode(payload)
            data = self._chunk(chunks[0]) if len(chunks) == 1 else b"".join(map(self._chunk, chunks))
            right = len(data) == length and digest_of("holdfast.value", data) == digest
        except (TypeError, ValueError, IndexError) as error:
            raise CorruptValue("a bulk value does not follow the format") from error
        if not right:
            raise CorruptValue(f"bulk value {digest.hex()[:16]} is not what was written", what=(digest.hex()[:16],))
        value = self.decode(data)
        self._packing.know_bulk(value, packb(Ext(code, payload)))
        return value

    def _chunk(self, digest: bytes) -> bytes:
        fresh = self._packing.chunks.get(digest)
        if fresh is not None:
            return fresh
        if self._source is None:
            raise CorruptValue("a bulk value is named whose content is nowhere")
        return self._source.bulk([digest])

    def _fetch(self, digests: list[bytes]) -> dict[bytes, bytes]:
        fresh = self._packing.nodes
        found = {digest: fresh[digest] for digest in digests if digest in fresh}
        missing = [digest for digest in digests if digest not in found]
        if missing:
            if self._source is None:
                raise CorruptValue("a node is named that is nowhere")
            found.update(self._source.nodes(missing))
        return found

    def read_node(self, root: bytes) -> Any:
        """The container (or, for kind `v`, the value) under a root digest."""
        raw = self._fetch([root])[root]
        kind = raw[:1]
        if kind == VALUE:
            items = self._items(raw, 1)
            if len(items) != 1:
                raise CorruptValue(f"node {root.hex()[:16]} does not hold one value", what=(f"node {root.hex()[:16]}",))
            return whole(items[0])
        try:
            tree, rows = read_tree(kind, root, self._fetch)
        except ValueError as error:
            raise CorruptValue(f"node {root.hex()[:16]}: {error}", what=(f"node {root.hex()[:16]}",)) from error
        node = self._assemble(kind, rows)
        node._tree = tree
        # A dict must know its keys' leaves. A list's children get a hint; raw ones get it when they are wrapped.
        if (kind == DICT and len(tree.leaves) > 1) or (
            kind == LIST and not _LIVE.isdisjoint(map(type, list.__iter__(node)))
        ):
            node._regrouped(tree.leaves)
        return node

    def _assemble(self, kind: bytes, rows: list[bytes]) -> Any:
        parts: list[Any] = []
        for raw in rows:
            parts += self._items(raw, 2 if kind == DICT else 1)
        node: Any
        flat = FLAT.issuperset(map(type, parts))
        if self._inert and not flat and kind != LIST:
            codes.told_apart(parts[::2] if kind == DICT else parts)
        if kind == LIST:
            node = TrackedList(parts) if flat else LazyList(parts)
        elif kind == DICT:
            keys = parts[::2]
            try:
                raw_dict = dict(zip(keys, parts[1::2], strict=True))
            except (TypeError, ValueError) as error:
                raise CorruptValue("a stored dict does not have keys and values") from error
            if len(raw_dict) != len(keys):
                raise CorruptValue("a stored dict has one key twice")
            node = TrackedDict(raw_dict) if flat else LazyDict(raw_dict)
        elif kind == SET:
            try:
                node = TrackedSet(parts)
            except TypeError as error:
                raise CorruptValue("a stored set has an item that cannot be in one") from error
            if len(node) != len(parts):
                raise CorruptValue("a stored set has one item twice")
        else:
            raise CorruptValue(f"a node of the unknown kind {kind!r}")
        node._init(self._owner, None)
        return node

    def _items(self, raw: bytes, per_item: int) -> list[Any]:
        """The decoded parts of a leaf: an array header in front makes one value of them."""
        count, payload = leaf_items(memoryview(raw))
        items = self.decode(b"".join((b"\xdd", (count * per_item).to_bytes(4, "big"), payload)))
        if type(items) is not list:
            raise CorruptValue("a leaf does not hold items")
        return items


def redo(node: Any, operation: Operation, decode_value: Callable[[bytes], Any]) -> None:
    """Do an operation inside a section again; ``node`` is the section's value."""
    _, code, path, args = operation
    try:
        node = parent_of(node, operation)
        if code == op.SET and isinstance(node, TrackedDict):
            node._place(path[-1], Encoded(args[0]))
        elif code == op.SET:
            node._replace(node._index(path[-1], "no such item"), Encoded(args[0]))
        elif code == op.DELETE:
            node._drop(path[-1])
        elif code == op.SPLICE:
            start, removed, values = args
            if not (0 <= start <= start + removed <= len(node)):
                raise IndexError(start)
            node._splice(start, removed, [Encoded(data) for data in values])
        elif code == op.ARRANGE:
            node._rearrange(_sources(args[0], len(node)))
        elif code == op.CLEAR:
            node.clear()
        elif code == op.ADD:
            node._change(_added(node, [decode_value(data) for data in args[0]]), ())
        elif code == op.REMOVE:
            node._change((), _removed(node, args[0], decode_value))
        else:
            raise TypeError(code)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        where = format_path(tuple(path))
        raise Damaged(f"an operation on {where} does not fit the state it belongs to", what=(where,)) from error


def parent_of(node: Any, operation: Operation) -> Any:
    """The container that an operation changes."""
    path = operation.path
    for key in path[1:-1] if operation.code in {op.SET, op.DELETE} else path[1:]:
        node = node._child(key)
    return node


def affected(parent: Any, operation: Operation) -> list[Any]:
    """What base storage holds in the places that an operation may empty."""
    if operation.code in {op.SET, op.DELETE}:
        key = operation.path[-1]
        if isinstance(parent, dict):
            return [dict.__getitem__(parent, key)] if key in parent else []
        return [list.__getitem__(parent, key)]
    if operation.code == op.SPLICE:
        start, removed, _ = operation.args
        return list.__getitem__(parent, slice(start, start + removed))
    return [child for _, child in parent._items()]


def _sources(pieces: list[Any], size: int) -> list[int | tuple[Any]]:
    sources: list[int | tuple[Any]] = []
    for piece in pieces:
        if len(piece) == 1:
            sources.append((Encoded(piece[0]),))
            continue
        start, count, step = piece
        last = start + (count - 1) * step
        if step not in {1, -1} or count < 1 or not (0 <= start < size and 0 <= last < size):
            raise IndexError(start)
        sources.extend(range(start, start + count * step, step))
    kept = [source for source in sources if isinstance(source, int)]
    if len(set(kept)) != len(kept):
        raise ValueError("an item is in two places")
    return sources


def _added(node: Any, items: list[Any]) -> list[Any]:
    """New items of a set. A record that equals another one stands for another instance: only new ones are added."""
    seen: set[Any] = set()
    for item in items:
        if type(item) is codes.Record:
            while item in node or item in seen:
                item.twin += 1
            seen.add(item)
    return items


def _removed(node: Any, encodings: list[bytes], decode_value: Callable[[bytes], Any]) -> list[Any]:
    """The items of a set with these encodings. Those that equal nothing else are found by their bytes."""
    found: dict[Any, None] = {}
    for data in encodings:
        item = decode_value(data)
        if item not in node or item in found:
            item = _with_encoding(node, data, found)
        found[item] = None
    return list(found)


def _with_encoding(node: Any, data: bytes, besides: dict[Any, None]) -> Any:
    for item, encoding in node._encodings().items():
        if encoding == data and item not in besides:
            return item
    raise KeyError(data)
