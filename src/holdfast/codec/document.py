"""The document: an agent's state as sections of tracked values that know their own changes.

Owns what goes in (taken in by value, refused at once when it cannot be saved), what is handed out (and therefore
encoded again at every checkpoint), the operations since the last capture, and the digests. It knows nothing of where
nodes are kept: a ``Source`` gives them. What always holds: the digest of a section is that of its live content.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple, Protocol

from ormsgpack import Fragment, packb

from holdfast.codec import nodes, operations
from holdfast.codec.blocks import (
    BULK_MIN_BYTES,
    DICT,
    INLINE_MAX_BYTES,
    LIST,
    SET,
    VALUE,
    Leaf,
    Tree,
    digest_of,
    leaf_items,
    leaf_node,
    node_digest,
    read_tree,
)
from holdfast.codec.codes import BIG, BULK
from holdfast.codec.lowering import OPTION, Ext, array_of
from holdfast.codec.nodes import FLAT, Node, TrackedDict, TrackedList, TrackedSet, wrap
from holdfast.codec.operations import Operation
from holdfast.codec.types import Registry
from holdfast.codec.watching import Watches
from holdfast.codec.values import UNWRAP, decode, encode, fields_of, is_immutable
from holdfast.errors import (
    CorruptValue,
    Damaged,
    HoldfastError,
    ReadOnly,
    Stale,
    Unencodable,
    Untracked,
    format_path,
)

CHUNK_BYTES = 8 * 1024 * 1024
_RAW = frozenset({dict, list, set})


class Source(Protocol):
    """Where a document's sections come from."""

    base: dict[str, bytes]  # section digests of the sealed state below
    sections: list[tuple[str, bytes]]  # section digests of the state itself, in order

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        """Verified raw nodes."""

    def bulk(self, digests: list[bytes]) -> bytes:
        """The joined content of verified chunks."""

    def operations(self, section: str) -> list[Operation]:
        """What happened to a section between the base and the state, in order."""


class Capture(NamedTuple):
    """What one checkpoint has to write."""

    sections: list[tuple[str, bytes]]
    operations: list[Operation]
    nodes: dict[bytes, bytes]
    chunks: dict[bytes, bytes]


class _Missing:
    __slots__ = ()


MISSING = _Missing()


class Encoded:
    """A value that comes as its encoding: replayed, or taken from another document."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class Section:
    """One top-level key. ``digest`` is None while it is to be computed; ``stored``: its nodes are in the catalog."""

    __slots__ = ("digest", "doc", "loaded", "name", "stored", "value")

    def __init__(self, doc: Document, name: str, digest: bytes | None = None) -> None:
        self.doc = doc
        self.name = name
        self.digest = digest
        self.stored = False
        self.loaded = digest is None
        self.value: Any = MISSING

    def changed(self) -> None:
        self.digest = None
        self.stored = False
        self.doc.dirty = True

    def update(self) -> bytes:
        """The digest of the live content."""
        if self.digest is None:
            value = self.value
            if isinstance(value, Node):
                self.digest = value._digest()
            else:
                self.digest = node_digest(leaf_node(VALUE, [self.doc.pack(value)]))
        return self.digest


class _Handout(NamedTuple):
    """An instance that user code may hold: what it was when last encoded."""

    value: Any
    holder: Node | Section
    fields: tuple[Any, ...] | None
    digest: bytes


class Document(MutableMapping[str, Any]):
    """A mapping of sections. Each loads when it is first touched."""

    def __init__(
        self,
        registry: Registry,
        source: Source | None = None,
        *,
        readonly: bool = False,
        inert: bool = False,
        paranoid: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.registry = registry
        self.readonly = readonly
        self.inert = inert
        self.paranoid = paranoid
        self.dirty = False
        self.guard: Any = None  # called before every change; raises when the handle must not be used
        self._source = source
        self._sections: dict[str, Section] = {}
        self._operations: list[Operation] = []
        self._handouts: dict[int, _Handout] = {}
        self._watches = Watches(registry)
        self._planted: dict[int, Node] = {}
        self._nodes: dict[bytes, bytes] = {}
        self._chunks: dict[bytes, bytes] = {}
        self._bulk: dict[int, tuple[Any, bytes]] = {}
        self._replaying = False
        self.met_node = False
        for name, digest in source.sections if source is not None else ():
            section = Section(self, name, digest)
            section.stored = source is not None and source.base.get(name) == digest
            self._sections[name] = section

    # -- the mapping ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        section = self._sections.get(name)
        if section is None:
            raise KeyError(name)
        if not section.loaded:
            self._load(section)
        value = section.value
        if type(value) not in FLAT and not isinstance(value, Node):
            with self.lock:
                self._hand_out(value, section)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        with self.lock:
            self._check_writable()
            if type(name) is not str:
                raise Unencodable(
                    f"a section's name is a {type(name).__name__}", hint="Top-level keys of a state are str."
                )
            section = self._sections.get(name)
            old = section.value if section is not None else None
            taken, data = self.take(value, section, name, old, depth=1)
            if section is None:
                section = self._sections[name] = Section(self, name)
            elif isinstance(old, Node) and old._parent is section:
                old._parent = None
            self._put(section, taken)
            self.record(operations.SET, [name], data)

    def _put(self, section: Section, taken: Any) -> None:
        section.loaded = True
        section.value = self.settle(taken, section, None, None)
        section.changed()

    def __delitem__(self, name: str) -> None:
        with self.lock:
            self._check_writable()
            section = self._sections.pop(name)
            if isinstance(section.value, Node) and section.value._parent is section:
                section.value._parent = None
            self.dirty = True
            self.record(operations.DELETE, [name])

    def setdefault(self, name: str, default: Any = None) -> Any:
        with self.lock:
            if name not in self._sections:
                self[name] = default
            return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sections))

    def __len__(self) -> int:
        return len(self._sections)

    def __contains__(self, name: object) -> bool:
        return name in self._sections

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Document):
            other = dict(other.items())
        return dict(self.items()) == other if isinstance(other, dict) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._sections)

    # -- permission and records -----------------------------------------------------------------------

    def _check_writable(self) -> None:
        if self.readonly:
            self.refuse()
        if self.guard is not None:
            self.guard()

    def refuse(self) -> None:
        """Called before a change when the document is read-only; loading it is not a change."""
        if self._replaying:
            return
        raise ReadOnly(
            "this state is read-only",
            hint="A past state cannot change. Use agent.rollback(...) or agent.branch(...) to go on from it.",
        )

    def record(self, code: int, path: list[Any], *args: Any) -> None:
        if not self._replaying:
            self._operations.append(Operation(time.time_ns() // 1000, code, path, args))
            if len(self._operations) > operations.OPERATIONS_MAX:
                self._fold()

    def _fold(self) -> None:
        """Too many operations: keep what they amount to."""
        touched = dict.fromkeys(operation.path[0] for operation in self._operations)
        self._operations = []
        for name in touched:
            section = self._sections.get(name)
            if section is None:
                self.record(operations.DELETE, [name])
            else:
                self.record(operations.SET, [name], self._portable(section.value))

    def _portable(self, value: Any) -> bytes:
        """An encoding that can stand in an operation now: big containers' nodes are kept for the next commit."""
        if isinstance(value, Node):
            data = self._as_big(value) if value._tree is not None else None
            data = data or self.pack(value)
        else:
            data = self.pack(value)
        self._keep_planted()
        return data

    # -- taking in ------------------------------------------------------------------------------------

    def take(
        self,
        value: Any,
        holder: Node | Section | None,
        key: Any,
        old: Any,
        *,
        depth: int | None = None,
    ) -> tuple[Any, bytes]:
        """What the document will hold for ``value``, and its encoding. Changes nothing else."""
        if self.guard is not None:
            self.guard()
        kind = type(value)
        try:
            if kind in FLAT:
                return value, self.pack(value)
            if kind is Encoded:
                return self._take_encoded(value.data)
            if depth is None:
                path = holder._path() if isinstance(holder, Node) else None
                depth = len(path) + 1 if path else 1
            if isinstance(value, Node):
                return self._take_node(value, holder, old, depth)
            self.met_node = False
            data = encode(value, self.registry, depth=depth)
            if self.met_node:
                taken = self._build(value, holder, old, depth)
                return taken, self.pack(taken)
            if kind not in _RAW and is_immutable(value):
                return value, self._leaf_data(value, data)
            self._watches.add(value, data, lambda: self._name_of(holder, key))
            return self._take_encoded(data)
        except Unencodable as error:
            path = (holder._path() if isinstance(holder, Node) else None) or []
            raise error.within(*path, key) from None

    def copy(self, node: Node) -> tuple[Any, bytes]:
        """A node's content by value."""
        return self._take_encoded(encode(node, self.registry))

    def _name_of(self, holder: Node | Section | None, key: Any) -> str:
        path = (holder._path() if isinstance(holder, Node) else None) or []
        return format_path((*path, key))

    def _take_encoded(self, data: bytes) -> tuple[Any, bytes]:
        value = self._decode(data)
        if len(data) <= INLINE_MAX_BYTES:
            return value, data
        if type(value) in _RAW and self._trackable(value):
            value = wrap(value, self, None)
            data = self.pack(value)
            self._keep_planted()
            return value, data
        return value, self._leaf_data(value, data)

    def _leaf_data(self, value: Any, data: bytes) -> bytes:
        return self._pack_bulk(value, data) if len(data) >= BULK_MIN_BYTES else data

    def _take_node(self, value: Any, holder: Node | Section | None, old: Any, depth: int) -> tuple[Any, bytes]:
        if isinstance(value, nodes.StaleDict | nodes.StaleList | nodes.StaleSet):
            raise Stale("this value is no longer part of the state", hint="read it again from agent.state")
        above: Any = holder
        while isinstance(above, Node):
            if above is value:
                raise Unencodable("the container would contain itself", hint="Put a copy there: holdfast.plain(...)")
            above = above._parent
        if value._doc is self and (value._parent is None or _inside(value, old)):
            encode(value, self.registry, depth=depth)  # it may have grown while nobody looked
            self._reclaim(value)
            data = self.pack(value)
            self._keep_planted()
            return value, data
        return self._take_encoded(encode(value, self.registry, depth=depth))

    def _build(self, value: Any, holder: Any, old: Any, depth: int) -> Any:
        """Take in plain containers that hold nodes: nodes that lose their place by this operation are moved."""
        kind = type(value)
        if kind in FLAT:
            return value
        if isinstance(value, Node):
            return self._take_node(value, holder, old, depth)[0]
        if kind is dict or kind is list:
            node: Any = TrackedDict() if kind is dict else TrackedList()
            node._init(self, None)
            for key, item in value.items() if kind is dict else enumerate(value):
                child = self.settle(self._build(item, holder, old, depth + 1), node, key if kind is dict else None, None)
                if kind is dict:
                    dict.__setitem__(node, key, child)
                else:
                    list.append(node, child)
            return node
        return value if is_immutable(value) else self._decode(encode(value, self.registry, depth=depth))

    def _reclaim(self, node: Any) -> None:
        """A detached node comes back: children that found another home meanwhile are copied."""
        items = dict.items(node) if isinstance(node, dict) else enumerate(list.__iter__(node)) if isinstance(node, list) else ()
        for key, child in list(items):
            if isinstance(child, Node):
                if child._parent is not node:
                    child = wrap(self._decode(encode(child, self.registry)), self, node, key)
                    (dict if isinstance(node, dict) else list).__setitem__(node, key, child)
                self._reclaim(child)

    def settle(self, value: Any, holder: Node | Section, key: Any, leaf: Leaf | None) -> Any:
        """Make a taken value a child of ``holder``; returns what base storage holds."""
        if isinstance(value, Node):
            value._adopt(self, holder, key, leaf)
            return value
        if isinstance(holder, nodes.LazyDict | nodes.LazyList):
            return value
        return self.child(value, holder, key, leaf)

    def child(self, value: Any, holder: Node | Section, key: Any, leaf: Leaf | None) -> Any:
        """What user code may see of a raw child: a node, an immutable value, or an instance that is now handed out."""
        if isinstance(value, Node):
            return value
        if type(value) in _RAW and self._trackable(value):
            node = wrap(value, self, holder, key, leaf)
            return node
        if type(value) not in FLAT and not isinstance(holder, Section):
            self._hand_out(value, holder)
        return value

    def _trackable(self, value: Any) -> bool:
        """Sets of mutable instances, and dicts with such keys, are kept whole."""
        if type(value) is list:
            return True
        return FLAT.issuperset(map(type, value)) or all(map(is_immutable, value))

    def take_key(self, key: Any, holder: Node) -> bytes:
        """The encoding of a new dict key."""
        if type(key) is not str:
            if not is_immutable(key):
                path = holder._path() or []
                raise Unencodable(
                    f"a key is a mutable {type(key).__name__}", path=(*path, key), hint="Use an immutable key."
                )
            if key != key or (isinstance(key, tuple | frozenset) and _has_nan(key)):  # noqa: PLR0124 - NaN
                path = holder._path() or []
                raise Unencodable("a key is NaN, which no look-up can find again", path=tuple(path), hint="Use a name.")
        return self.pack_key(key)

    def take_item(self, item: Any, holder: Node) -> bytes:
        """The encoding of a new set item."""
        path = tuple(holder._path() or ())
        if not is_immutable(item):
            raise Unencodable(
                f"a set item is a mutable {type(item).__name__}, whose changes could not be followed",
                path=path,
                hint="Use frozen classes, or assign a whole new set.",
            )
        try:
            return encode(item, self.registry, depth=len(path) + 1)
        except Unencodable as error:
            raise error.within(*path) from None

    def check_all(self, values: Iterable[Any], holder: Node, keyed: dict[Any, Any] | None = None) -> None:
        """Refuse before anything changes, when an operation takes several values one after another."""
        path = tuple(holder._path() or ())
        for key, value in zip(keyed, values, strict=True) if keyed is not None else enumerate(values):
            if keyed is not None and type(key) is not str:
                self.take_key(key, holder)
            if type(value) not in FLAT:
                try:
                    encode(value, self.registry, depth=len(path) + 1)
                except Unencodable as error:
                    raise error.within(*path, key) from None

    # -- encoding what the document holds -------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        """The encoding of an item: small containers inline, big ones by digest, bulk by chunks."""
        try:
            data = packb(value, self._hook, OPTION)
        except TypeError:  # a key that is not a str, or a lone surrogate: legal, but not for the library
            data = self._pack_slowly(value)
        if len(data) > INLINE_MAX_BYTES:
            return self._pack_large(value, data)
        return data

    def pack_key(self, key: Any) -> bytes:
        try:
            return packb(key, self._hook, OPTION)
        except TypeError:
            return encode(key, self.registry)

    def _hook(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value._tree is not None:
                data = self._as_big(value)
                if data is not None:
                    return Fragment(data)
            if isinstance(value, TrackedSet):
                return Ext(5, array_of(sorted(map(self.pack, set.__iter__(value)))))
            return value._peek()
        return Fragment(encode(value, self.registry))

    def _pack_slowly(self, value: Any) -> bytes:
        if isinstance(value, Node) and value._tree is not None:
            data = self._as_big(value)
            if data is not None:
                return data
        if isinstance(value, list):
            return array_of([self._pack_inner(item) for item in list.__iter__(value)])
        if isinstance(value, dict):
            pairs = [(key, self._pack_inner(dict.__getitem__(value, key))) for key in dict.keys(value)]
            if all(type(key) is str and _is_utf8(key) for key, _ in pairs):
                return packb({key: Fragment(data) for key, data in pairs})
            return packb(Ext(1, array_of([part for key, data in pairs for part in (self.pack_key(key), data)])))
        return encode(value, self.registry)

    def _pack_inner(self, value: Any) -> bytes:
        try:
            return packb(value, self._hook, OPTION)
        except TypeError:
            return self._pack_slowly(value)

    def _pack_large(self, value: Any, data: bytes) -> bytes:
        if isinstance(value, Node):
            self._split_children(value)
            data = self._pack_inner(value)
            if len(data) <= INLINE_MAX_BYTES:
                return data
            value._plant()
            return packb(Ext(BIG, value._digest()))
        if isinstance(value, list | dict | set):
            msg = "a large container was never taken apart"
            raise Untracked(msg)
        return self._leaf_data(value, data)

    def _split_children(self, node: Any) -> None:
        """Give every child container that is too long for its parent a tree of its own."""
        if isinstance(node, set):
            return
        keyed = isinstance(node, dict)
        for key, child in list(dict.items(node) if keyed else enumerate(list.__iter__(node))):
            if not isinstance(child, list | dict | set) or (isinstance(child, Node) and child._tree is not None):
                continue
            data = self._pack_inner(child)
            if len(data) <= INLINE_MAX_BYTES:
                continue
            if not isinstance(child, Node):
                if not self._trackable(child):
                    continue
                child = wrap(child, self, node, key if keyed else None)
                (dict if keyed else list).__setitem__(node, key, child)
            self._pack_large(child, data)

    def _as_big(self, node: Node) -> bytes | None:
        """Extension 40 for a container with a tree; None when it has become small enough to stand inline."""
        digest = node._digest()
        tree = node._tree
        assert tree is not None  # noqa: S101 - a type narrowing
        if len(tree.leaves) <= 2 and sum(leaf.size for leaf in tree.leaves) <= INLINE_MAX_BYTES:  # noqa: PLR2004
            node._tree = None
            if len(self._pack_inner(node)) <= INLINE_MAX_BYTES:
                node._where = None
                self._planted.pop(id(node), None)
                return None
            node._tree = tree
        return packb(Ext(BIG, digest))

    def planted(self, node: Node) -> None:
        """``node`` has a tree from now on."""
        self._planted[id(node)] = node

    def _keep_planted(self) -> None:
        """Operations may name these nodes, whatever becomes of them before the checkpoint: keep their bytes."""
        for node in list(self._planted.values()):
            if node._tree is not None and node._tree.root is not None and not isinstance(node._parent, Section):
                self._nodes.update((digest, raw) for digest, raw, _ in node._tree.unstored(node._run))

    def _pack_bulk(self, value: Any, data: bytes) -> bytes:
        """Extension 41: the encoding goes into chunks. Immutable values are cut once."""
        known = self._bulk.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        view = memoryview(data)
        digests = []
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = bytes(view[start : start + CHUNK_BYTES])
            digests.append(digest_of("holdfast.chunk", chunk))
            self._chunks[digests[-1]] = chunk
        packed = packb(Ext(BULK, packb([digest_of("holdfast.value", data), len(data), digests])))
        if is_immutable(value):
            self._bulk[id(value)] = (value, packed)
        return packed

    # -- reading what is stored -----------------------------------------------------------------------

    def _decode(self, data: bytes) -> Any:
        return decode(data, self.registry, inert=self.inert, owned=True, big=self._read_big)

    def _read_big(self, code: int, payload: bytes) -> Any:
        if code == BIG:
            return self._read_node(bytes(payload))
        digest, length, chunks = decode(payload)
        data = self._chunks[chunks[0]] if len(chunks) == 1 and chunks[0] in self._chunks else None
        if data is None:
            fresh = {chunk: self._chunks[chunk] for chunk in chunks if chunk in self._chunks}
            data = b"".join(fresh[chunk] if chunk in fresh else self._fetch_bulk([chunk]) for chunk in chunks)
        if len(data) != length or digest_of("holdfast.value", data) != digest:
            raise CorruptValue(f"bulk value {digest.hex()[:16]} is not what was written", what=(digest.hex()[:16],))
        return self._decode(data)

    def _fetch_bulk(self, digests: list[bytes]) -> bytes:
        if self._source is None:
            raise CorruptValue("a bulk value is named whose content is nowhere")
        return self._source.bulk(digests)

    def _fetch(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = {digest: self._nodes[digest] for digest in digests if digest in self._nodes}
        missing = [digest for digest in digests if digest not in found]
        if missing:
            if self._source is None:
                raise CorruptValue("a node is named that is nowhere")
            found.update(self._source.nodes(missing))
        return found

    def _read_node(self, root: bytes) -> Any:
        """The container (or, for kind `v`, the value) under a root digest."""
        raw = self._fetch([root])[root]
        kind = raw[:1]
        if kind == VALUE:
            return self._items(raw, 1)[0]
        try:
            tree, rows = read_tree(kind, root, self._fetch)
        except ValueError as error:
            raise CorruptValue(f"node {root.hex()[:16]}: {error}", what=(f"node {root.hex()[:16]}",)) from error
        node = self._assemble(kind, tree, rows)
        node._init(self, None)
        node._tree = tree
        if kind == DICT:
            node._where = None
            if len(tree.leaves) > 1:
                node._regrouped(tree.leaves)
        elif kind == LIST:
            node._regrouped(tree.leaves)
        self._planted[id(node)] = node
        return node

    def _assemble(self, kind: bytes, tree: Tree, rows: list[bytes]) -> Any:
        parts: list[Any] = []
        for raw in rows:
            parts += self._items(raw, 2 if kind == DICT else 1)
        node: Any
        if kind == LIST:
            node = TrackedList(parts) if FLAT.issuperset(map(type, parts)) else nodes.LazyList(parts)
        elif kind == DICT:
            keys = parts[::2]
            raw_dict = dict(zip(keys, parts[1::2], strict=True))
            if len(raw_dict) != len(keys):
                raise CorruptValue("a stored dict has one key twice")
            node = TrackedDict(raw_dict) if FLAT.issuperset(map(type, parts)) else nodes.LazyDict(raw_dict)
        elif kind == SET:
            node = TrackedSet(parts)
        else:
            raise CorruptValue(f"a node of the unknown kind {kind!r}")
        for part in parts:
            if isinstance(part, Node):
                part._parent = node
        if kind == DICT:
            for key, part in dict.items(node):
                if isinstance(part, Node):
                    part._key = key
        return node

    def _items(self, raw: bytes, per_item: int) -> list[Any]:
        """The decoded parts of a leaf: an array header in front makes one value of them."""
        count, payload = leaf_items(raw)
        items = self._decode(b"\xdd" + (count * per_item).to_bytes(4, "big") + payload)
        if type(items) is not list:
            raise CorruptValue("a leaf does not hold items")
        return items

    def _load(self, section: Section) -> None:
        with self.lock:
            if section.loaded:
                return
            source = self._source
            expected = section.digest
            assert source is not None and expected is not None  # noqa: S101, PT018 - a type narrowing
            base = source.base.get(section.name)
            dirty, self.dirty = self.dirty, self.dirty
            self._replaying = True
            try:
                section.value = self.settle(self._read_node(base), section, None, None) if base else MISSING
                if base != expected:
                    for operation in source.operations(section.name):
                        self.apply(section, operation)
                    section.digest = None
                    if section.value is MISSING or section.update() != expected:
                        raise Damaged(
                            f"section {section.name!r} does not have the digest that its checkpoint recorded",
                            what=(f"section {section.name}",),
                            hint="Run `holdfast verify` to see what is damaged.",
                        )
                section.loaded = True
            except HoldfastError:
                section.digest, section.value = expected, MISSING
                raise
            finally:
                self._replaying = False
                self.dirty = dirty

    # -- replaying ------------------------------------------------------------------------------------

    def apply(self, section: Section, operation: Operation) -> None:
        """Do one operation to a section. While loading nothing is recorded; otherwise it is a change like any other."""
        _, code, path, args = operation
        if len(path) == 1 and code in {operations.SET, operations.DELETE}:
            if code == operations.DELETE:
                section.value = MISSING
            else:
                self._put(section, self._take_encoded(args[0])[0])
            return
        try:
            self._apply_inside(section.value, code, path, args)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            msg = f"an operation on {format_path(tuple(path))} does not fit the state it belongs to"
            raise Damaged(msg, what=(format_path(tuple(path)),)) from error

    def _apply_inside(self, node: Any, code: int, path: list[Any], args: tuple[Any, ...]) -> None:
        keys = path[1:-1] if code in {operations.SET, operations.DELETE} else path[1:]
        for key in keys:
            node = node._child(key)
        reached = node._reach()
        where = None if self._replaying else reached
        gone = [] if self._replaying else _leaving(node, code, path, args)
        if code == operations.SET:
            if isinstance(node, dict):
                node._place(path[-1], Encoded(args[0]), where)
            else:
                node[path[-1]] = Encoded(args[0])
        elif code == operations.DELETE:
            node._drop(path[-1], where)
        elif code == operations.SPLICE:
            if args[0] + args[1] > len(node):
                raise IndexError(args[0])
            node._splice(args[0], args[1], [Encoded(data) for data in args[2]], where)
        elif code == operations.ARRANGE:
            sources: list[Any] = []
            for piece in args[0]:
                if len(piece) == 1:
                    sources.append([Encoded(piece[0])])
                else:
                    start, count, step = piece
                    sources.extend(range(start, start + count * step, step))
            node._rearrange(sources)
        elif code == operations.CLEAR:
            node.clear()
        elif code == operations.ADD:
            node._change([self._decode(data) for data in args[0]], ())
        elif code == operations.REMOVE:
            left = set(args[0])
            node._change((), [item for item in set.__iter__(node) if self.pack(item) in left])
        else:
            raise TypeError(code)
        for child in gone:
            if child._parent is None:
                nodes.make_stale(child)

    def change(self, operation: Operation) -> None:
        """Apply an operation to the live state and record it (undo, redo, rollback)."""
        with self.lock:
            name = operation.path[0]
            if len(operation.path) == 1 and operation.code in {operations.SET, operations.DELETE}:
                if operation.code == operations.DELETE:
                    gone = self[name]
                    del self[name]
                    if isinstance(gone, Node):
                        nodes.make_stale(gone)
                else:
                    old = self._sections[name].value if name in self._sections else None
                    self[name] = Encoded(operation.args[0])
                    if isinstance(old, Node):
                        nodes.make_stale(old)
                return
            section = self._sections[name]
            if not section.loaded:
                self._load(section)
            self.apply(section, operation)

    # -- handing out and watching ---------------------------------------------------------------------

    def _hand_out(self, value: Any, holder: Node | Section) -> None:
        if id(value) in self._handouts or self.readonly or is_immutable(value):
            return
        fields = fields_of(value)
        if fields is None or not all(map(is_immutable, fields)):
            fields = None
        digest = b"" if fields is not None else digest_of("handout", encode(value, self.registry))
        self._handouts[id(value)] = _Handout(value, holder, fields, digest)

    def _check_handouts(self) -> None:
        """Encode again whatever user code may have changed in place."""
        for handout in list(self._handouts.values()):
            value, holder, fields, digest = handout
            if fields is not None:
                now = fields_of(value)
                if now is not None and len(now) == len(fields) and all(a is b for a, b in zip(now, fields, strict=True)):
                    continue
            path, key = self._find(value, holder)
            if path is None:
                del self._handouts[id(value)]
                continue
            try:
                data = encode(value, self.registry, depth=len(path))
            except Unencodable as error:
                raise error.within(*path) from None
            fresh = digest_of("handout", data)
            if fields is None and fresh == digest:
                continue
            self._spoil(holder, key)
            self.record(operations.SET, path, self._leaf_data(value, data))
            del self._handouts[id(value)]
            self._hand_out(value, holder)

    def _find(self, value: Any, holder: Node | Section) -> tuple[list[Any] | None, Any]:
        """Where a handed-out instance sits now."""
        if isinstance(holder, Section):
            here = holder.value is value and self._sections.get(holder.name) is holder
            return ([holder.name] if here else None), None
        path = holder._path()
        if path is not None:
            items = dict.items(holder) if isinstance(holder, dict) else enumerate(list.__iter__(holder))  # type: ignore[arg-type]
            for key, item in items:
                if item is value:
                    return [*path, key], key
        return None, None

    def _spoil(self, holder: Node | Section, key: Any) -> None:
        if isinstance(holder, Section):
            holder.changed()
            return
        holder._reach()
        if holder._tree is not None:
            leaf = holder._leaf_for(key) if isinstance(holder, TrackedDict) else holder._tree.leaf_at(key)
            holder._tree.spoil(leaf)

    # -- capturing ------------------------------------------------------------------------------------

    def capture(self) -> Capture:
        """Everything since the last capture, and the digests of the state as it is now."""
        with self.lock:
            self._check_handouts()
            self._watches.check()
            sections = [(name, section.update()) for name, section in self._sections.items()]
            if self.paranoid:
                self._recompute()
            captured = Capture(sections, self._operations, self._nodes, self._chunks)
            self._operations, self._nodes, self._chunks = [], {}, {}
            self._planted = {key: node for key, node in self._planted.items() if node._path() is not None}
            self.dirty = False
            return captured

    def restore(self, captured: Capture) -> None:
        """A capture could not be written: everything in it is still to be written."""
        with self.lock:
            self._operations = captured.operations + self._operations
            self._nodes = {**captured.nodes, **self._nodes}
            self._chunks = {**captured.chunks, **self._chunks}
            self.dirty = True

    def unstored(self) -> tuple[dict[bytes, bytes], dict[bytes, tuple[bytes, int]]]:
        """All nodes of the state that the catalog does not have; they count as stored from now on.

        With them, where each list item sits: its encoding -> node and offset, for values that can move there.
        """
        with self.lock:
            found: dict[bytes, bytes] = {}
            places: dict[bytes, tuple[bytes, int]] = {}
            for section in self._sections.values():
                if section.stored:
                    continue
                if not section.loaded:
                    self._load(section)
                digest = section.update()
                if not isinstance(section.value, Node):
                    found[digest] = leaf_node(VALUE, [self.pack(section.value)])
                section.stored = True
            for node in list(self._planted.values()):
                if node._tree is not None and node._path() is not None:
                    node._digest()
                    for digest, raw, items in node._tree.unstored(node._run):
                        found[digest] = raw
                        offset = 2
                        for item in items:
                            places[item] = digest, offset
                            offset += len(item)
            return found, places

    def forget_changes(self) -> None:
        """After a rollback: what was recorded on the way belongs to no checkpoint."""
        with self.lock:
            self._operations = []
            self._watches.clear()
            self.dirty = False

    @property
    def changed(self) -> bool:
        """Whether a checkpoint would have something to write."""
        with self.lock:
            self._check_handouts()
            return self.dirty or bool(self._operations)

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests of the live state."""
        with self.lock:
            self._check_handouts()
            return [(name, section.update()) for name, section in self._sections.items()]

    def section_digest(self, name: str) -> bytes | None:
        section = self._sections.get(name)
        return section.update() if section is not None else None

    def raw_section(self, name: str) -> Any:
        """A section's content without handing it out: for comparing."""
        section = self._sections[name]
        if not section.loaded:
            self._load(section)
        return section.value

    def _recompute(self) -> None:
        """Paranoid mode: encode every loaded section from scratch and compare."""
        for section in self._sections.values():
            if section.loaded:
                fresh = Document(self.registry)
                fresh["check"] = Encoded(encode(section.value, self.registry))
                if fresh.section_digest("check") != section.digest:
                    raise Untracked(
                        f"section {section.name!r} has a change that was never recorded",
                        what=(f"section {section.name}",),
                        hint="C code such as heapq writes into lists behind their back: work on a plain copy.",
                    )

    def plain(self, value: Any) -> Any:
        """Plain builtins, by value."""
        with self.lock:
            if isinstance(value, Document):
                return {name: self.plain(self[name]) for name in self}
            return decode(encode(value, self.registry), self.registry, inert=self.inert)


def _leaving(node: Any, code: int, path: list[Any], args: tuple[Any, ...]) -> list[Node]:
    """Nodes that an operation takes out of ``node``."""
    if code in {operations.SET, operations.DELETE}:
        key = path[-1]
        here = key in node if isinstance(node, dict) else True
        found = [(dict if isinstance(node, dict) else list).__getitem__(node, key)] if here else []
    elif code == operations.SPLICE:
        found = list.__getitem__(node, slice(args[0], args[0] + args[1]))
    else:
        found = []
    return [child for child in found if isinstance(child, Node)]


def _inside(node: Any, top: Any) -> bool:
    """Whether ``node`` is ``top`` or sits below it."""
    if not isinstance(top, Node):
        return False
    while isinstance(node, Node):
        if node is top:
            return True
        node = node._parent
    return False


def _has_nan(key: Any) -> bool:
    return any(item != item or (isinstance(item, tuple | frozenset) and _has_nan(item)) for item in key)  # noqa: PLR0124


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unwrap(node: Any) -> Any:
    node._doc.met_node = True
    return node._peek()


for _kind in (TrackedDict, TrackedList, TrackedSet, nodes.LazyDict, nodes.LazyList):
    UNWRAP[_kind] = _unwrap
