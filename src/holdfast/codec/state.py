"""A state as bytes: read from what is stored, compared with another, and read as Python values.

A document rests on such a state, and whoever walks through history (verify, transfer, the mutation log, undo) needs
nothing else. It knows no classes; ``Reader`` does. What always holds: a section that was read has the digest that its
checkpoint recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from blake3 import blake3
from ormsgpack import Ext, packb

from holdfast.codec import blocks, wire
from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, Opened, big, close, digest_of, key_of, open_inline, root_of
from holdfast.codec.diff import Differ, Relative, item_hunks, keeping, too_dear, under
from holdfast.codec.operations import Operation, key_bytes
from holdfast.codec.replay import Replay
from holdfast.codec.tracked import GONE
from holdfast.codec.tree import Tree, anchor, build, nodes_under, read
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, decode_items
from holdfast.codec.wire import SCALARS, collector_paused
from holdfast.errors import CorruptValue, Damaged, Unencodable, UnknownType

# Bulk values are cut into chunks of this size (format.md, section 5).
CHUNK_BYTES = 8 * 1024 * 1024
# The name of a section of another layer begins so (format.md, section 3).
APART = "\0"
# More places than this that differ in one section are not worth an operation each.
OPERATIONS_MAX = 4_096


Sections = Mapping[str, Tree | bytes]
"""By name, each section's tree, or its digest where nobody has read it yet."""


class Source(Protocol):
    """Where a state's sections come from."""

    base: dict[str, bytes]  # section digests of the sealed state below
    sections: list[tuple[str, bytes]]  # section digests of the state itself, in order

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        """Verified raw nodes."""

    def bulk(self, digests: list[bytes]) -> bytes:
        """The joined content of verified chunks."""

    def operations(self, section: str) -> list[Operation]:
        """What happened to a section between the base and the state, in order."""

    def again(self) -> bool:
        """After something could not be read: whether the same state is stored in another way since, and can be now."""


class Nothing:
    """The source of the empty state, of which nothing is stored."""

    def __init__(self) -> None:
        self.base: dict[str, bytes] = {}
        self.sections: list[tuple[str, bytes]] = []

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        if digests:
            raise Damaged(f"node {digests[0].hex()[:16]} is missing", what=(f"node {digests[0].hex()[:16]}",))
        return {}

    def bulk(self, digests: list[bytes]) -> bytes:
        if digests:
            raise Damaged(f"chunk {digests[0].hex()[:16]} is missing", what=(f"chunk {digests[0].hex()[:16]}",))
        return b""

    def operations(self, section: str) -> list[Operation]:  # noqa: ARG002 - there are none
        return []

    def again(self) -> bool:
        return False


class Trees:
    """Trees by their roots, as long as somebody holds them. Equal ones are all known: each may outlive the others."""

    def __init__(self) -> None:
        self._known: dict[bytes, WeakSet[Tree]] = {}

    def get(self, root: bytes) -> Tree | None:
        found = self._known.get(root)
        if found is not None:
            for tree in found:
                return tree
            self._known.pop(root, None)
        return None

    def add(self, tree: Tree) -> Tree:
        self._known.setdefault(tree.root, WeakSet()).add(tree)
        return tree

    def __iter__(self) -> Iterator[Tree]:
        return iter([tree for found in list(self._known.values()) for tree in found])


class State:
    """Sections as trees of bytes. One that nobody has read yet is its digest."""

    def __init__(self, source: Source | None = None) -> None:
        self.source: Source = source if source is not None else Nothing()
        self.sections: dict[str, Tree | bytes] = dict(self.source.sections)
        # Trees inside items, by their roots. Those that the store lacks are held by the leaves that name them.
        self.trees = Trees()
        # Whoever compares two states reads of large containers only what differs. Then only places can be looked up to
        # which the comparison has led: a key of a dict that is not in what was read is not there.
        self.sparse = False
        # Sections of another state of the same store, which this one is about to become. What both have is not read.
        self.beside: Mapping[str, Tree | bytes] = {}
        # Trees of that state and of those before it, as long as somebody keeps them.
        self.past = Trees()

    def with_sections(self, sections: Mapping[str, Tree | bytes]) -> State:
        """Another state of the same source, with these sections of it."""
        state = State(self.source)
        state.trees, state.sections = self.trees, dict(sections)
        return state

    def stand_beside(self, other: State) -> None:
        """This one is compared with another state of the same store, and may become what that is."""
        self.beside, self.past = other.sections, other.trees

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests, in order."""
        return digests(self.sections)

    def fetch(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return self.source.nodes(digests)

    def chunks(self, digests: list[bytes]) -> bytes:
        """The joined content of chunks."""
        return self.source.bulk(digests)

    def bulk(self, payload: bytes) -> bytes:
        """The encoding of a bulk value, by what stands in its place."""
        digest, length, digests = _in_chunks(payload)
        data = self.chunks(digests)
        if len(data) != length or digest_of("holdfast.value", data) != digest:
            raise CorruptValue("a bulk value is not what was written", what=("a bulk value",))
        return data

    def prove_content(self, payload: bytes) -> None:
        """Read the content of a file, by what stands in its place, and prove it. Little of it is in memory at once."""
        digest, length, digests = _in_chunks(payload)
        hasher, size = blake3(b"holdfast.value\0"), 0
        for one in digests:
            data = self.chunks([one])
            hasher.update(data)
            size += len(data)
        if size != length or hasher.digest() != digest:
            raise CorruptValue("the content of a file is not what was written", what=("the content of a file",))

    def tree(self, root: bytes, beside: Tree | None = None) -> Tree:
        """A tree inside an item, or that of a section which an operation gives as a whole."""
        tree = self.trees.get(root)
        if tree is None:
            tree = self.trees.add(read(root, self.fetch, sparse=self.sparse, beside=beside)[0])
        return tree

    def other(self, name: str) -> Tree | None:
        """A section of the state beside this one, where that is read."""
        tree = self.beside.get(name)
        return tree if isinstance(tree, Tree) else None

    def section(self, name: str) -> Tree:
        """A section's tree, read and proven if need be. Raises KeyError."""
        tree = self.sections[name]
        if type(tree) is bytes:
            tree = self.sections[name] = self.load(name, tree)[0]
        return tree  # type: ignore[return-value]

    def load(self, name: str, digest: bytes) -> tuple[Tree, list[bytes] | None]:
        """A section as it is stored: its tree and, where nothing happened since it was sealed, its raw leaves."""
        while True:
            try:
                return self._load(name, digest)
            except Damaged:
                if not self.source.again():
                    raise

    def _as_then(self, name: str, digest: bytes) -> Tree | None:
        """A section that somebody has kept: no operations are done for it. What it rests on is proven nevertheless."""
        kept, base = self.past.get(digest), self.source.base.get(name)
        if kept is None:
            return None
        since = self.source.operations(name) if base != digest else []
        if since and len(since[0].path) == 1 and since[0].code == op.SET:
            base = root_of(since[0].args[0])  # it was given as a whole since
        there = nodes_under(base, self.fetch) if base is not None else set[bytes]()
        beside = self.other(name)
        tree = kept.resting_on(there, beside)
        if tree is not None:
            there.difference_update([leaf.digest for leaf in beside.leaves] if beside is not None else ())
            self.fetch([leaf.digest for leaf in tree.leaves if leaf.digest in there])
        return tree

    def _load(self, name: str, digest: bytes) -> tuple[Tree, list[bytes] | None]:
        then = self._as_then(name, digest)
        if then is not None:
            return then, None
        base = self.source.base.get(name)
        raw = None
        draft = Replay(self)
        if base is not None:
            beside = self.other(name)
            tree, raw = read(base, self.fetch, sparse=self.sparse, beside=beside)
            if base == digest:
                return tree, raw if beside is None else None
            draft.sections[name] = tree
        draft.do(self.source.operations(name))
        made = draft.finish().get(name)
        if made is None or made.root != digest:
            raise Damaged(
                f"section {name!r} does not have the digest that its checkpoint recorded",
                what=(f"section {name}",),
                hint="Run `holdfast verify` to see what is damaged.",
            )
        return made, None

    def do(self, operations: Iterable[Operation]) -> None:
        """Do operations, all or none."""
        draft = Replay(self)
        for name, tree in self.sections.items():
            draft.sections[name] = tree
        draft.do(operations)
        self.sections = draft.finish()  # type: ignore[assignment]

    def at(self, path: Sequence[Any]) -> bytes | Tree | None:
        """What stands at a path: an encoding, or the tree of a large container. None when it leads nowhere."""
        if path[0] not in self.sections:
            return None
        found: bytes | Tree = self.section(path[0])
        for part in path[1:]:
            if isinstance(found, Tree):
                at = self._index(found, part)
                if at < 0:
                    return None
                (item,) = found.part(at, at + 1, self.fetch)
                found = item[len(key_of(item)) :] if found.kind == DICT else item
            else:
                inner = open_inline(found)
                if inner is None:
                    return None
                at = _position(inner, part)
                if at < 0:
                    return None
                found = inner.items[at]
            root = root_of(found)
            if root is not None:
                found = self.tree(root)
        if isinstance(found, Tree) and found.kind == VALUE:
            return found.part(0, 1, self.fetch)[0]
        return found

    def _index(self, tree: Tree, part: Any) -> int:
        if tree.kind == DICT:
            return tree.place(key_bytes(part), self.fetch, loaded=self.sparse)
        return part if tree.kind == LIST and type(part) is int and 0 <= part < tree.count else -1

    def differences(self, other: State) -> list[Operation]:
        """Operations that turn this state into another of the same store."""
        return [Operation(0, code, list(path), args) for code, path, args in differences(self, other)]

    def unstored(self) -> dict[bytes, bytes]:
        """All nodes of the state that the store lacks."""
        found: dict[bytes, bytes] = {}
        for name, section in list(self.sections.items()):
            if not isinstance(section, bytes) or self.source.base.get(name) != section:
                found.update((node.digest, raw) for node, raw, _ in self.section(name).unstored(self.fetch))
        return found

    def fold(self, data: bytes, made: list[Tree], chunks: dict[bytes, bytes], old: bytes = b"") -> bytes:
        """How a whole encoding stands in a container: parts that are too long get trees, or chunks, of their own.

        The trees are added to ``made``: whoever calls holds them until the leaves that name them are there. ``old`` is
        what stood there before: the new tree shares nodes with that one's.
        """
        if len(data) <= blocks.INLINE_MAX_BYTES:
            return data
        inner = open_inline(data)
        if inner is None:
            return bulk(data, chunks) if len(data) >= blocks.BULK_MIN_BYTES else data
        items = self._folded(inner, made, chunks)
        short = close(inner.kind, items, inner.keys)
        if len(short) <= blocks.INLINE_MAX_BYTES:
            return short
        pairs = inner._replace(items=items).pairs
        root = root_of(old) if old else None
        was = self.tree(root) if root is not None else None
        if was is not None and was.kind == inner.kind:
            tree = was.apply(item_hunks(inner.kind, was.all(self.fetch), pairs), self.fetch)
        else:
            tree = build(inner.kind, pairs)
        made.append(self.settle(tree))
        return big(tree.root)

    def _folded(self, inner: Opened, made: list[Tree], chunks: dict[bytes, bytes]) -> list[bytes]:
        """Items, or values of a dict. The items of a set are never split, nor in chunks."""
        return inner.items if inner.kind == SET else [self.fold(item, made, chunks) for item in inner.items]

    def section_of(self, data: bytes, chunks: dict[bytes, bytes]) -> Tree:
        """The tree that a whole encoding has as a section."""
        made: list[Tree] = []
        inner = open_inline(data)
        if inner is None:
            return self.settle(build(VALUE, [self.fold(data, made, chunks)]))
        items = self._folded(inner, made, chunks)
        return self.settle(build(inner.kind, inner._replace(items=items).pairs))

    def settle(self, tree: Tree) -> Tree:
        """Close a tree that was just made, and know it by its root."""
        anchor(tree.fresh, self.trees.get)
        tree.fresh = ()
        return self.trees.add(tree)


class Reader:
    """Python values of a state: plain ones, each decoded when it is asked for.

    ``inert``: instances of classes that are not known are records; None: only where such a class is met.
    """

    def __init__(self, state: State, registry: Registry, *, inert: bool | None = False) -> None:
        self._state, self._registry, self._inert = state, registry, inert

    def value(self, data: bytes) -> Any:
        """The value of an encoding."""
        try:
            return decode(data, self._registry, inert=bool(self._inert), big=self._big)
        except UnknownType:
            if self._inert is not None:
                raise
        return decode(data, self._registry, inert=True, big=self._big)

    def values(self, items: Sequence[bytes]) -> list[Any]:
        """The values of encodings."""
        try:
            return decode_items(list(items), self._registry, inert=bool(self._inert), big=self._big)
        except UnknownType:
            if self._inert is not None:
                raise
        return list(map(self.value, items))

    def content(self, tree: Tree) -> Any:
        """The value of a tree."""
        items = tree.all(self._state.fetch)
        if tree.kind == VALUE:
            return self.value(items[0])
        with collector_paused():
            if tree.kind == DICT:
                parts = self.value(b"".join((b"\xdd", (2 * len(items)).to_bytes(4, "big"), *items)))
                return dict(zip(parts[::2], parts[1::2], strict=True))
            found = self.values(items)
        return found if tree.kind == LIST else set(found)

    def everything(self) -> dict[str, Any]:
        """The whole state. Every node and every value in it is read."""
        return {name: self.content(self._state.section(name)) for name in self._state.sections}

    def at(self, path: Sequence[Any]) -> Any:
        """The value at a path; GONE when it leads nowhere."""
        found = self._state.at(path)
        if found is None:
            return GONE
        return self.content(found) if isinstance(found, Tree) else self.value(found)

    def key(self, part: Any) -> Any:
        """A key of a path, as whoever has this registry reads it."""
        return part if type(part) in SCALARS else self.value(key_bytes(part))

    def _big(self, code: int, payload: bytes) -> Any:
        if code == wire.BIG:
            return self.content(self._state.tree(bytes(payload)))
        if code == wire.CONTENT:
            self._state.prove_content(bytes(payload))
            return None
        return self.value(self._state.bulk(bytes(payload)))


@dataclass(frozen=True)
class Held:
    """What is too large to be read on the way: a ``list``, ``dict`` or ``set`` of items, or a ``value`` of bytes."""

    kind: str
    count: int


KINDS = {LIST: "list", DICT: "dict", SET: "set", VALUE: "value"}


class Shallow(Reader):
    """Reads values without what is large in them: that is ``Held``."""

    def content(self, tree: Tree) -> Any:
        if tree.kind == VALUE:
            return self.value(tree.part(0, 1, self._state.fetch)[0])
        return Held(KINDS[tree.kind], tree.count)

    def _big(self, code: int, payload: bytes) -> Any:
        if code == wire.BULK:
            return Held("value", int(decode(payload)[1]))
        return super()._big(code, payload)


def _in_chunks(payload: bytes) -> list[Any]:
    """What stands in the place of a bulk value, or of the content of a file: its digest, its length, its chunks."""
    parts = decode(payload)
    if type(parts) is not list or len(parts) != 3 or type(parts[2]) is not list:
        raise CorruptValue("what is stored in chunks is a digest, a length and chunks")
    return parts


def bulk(data: bytes, chunks: dict[bytes, bytes]) -> bytes:
    """A long encoding that cannot be split goes into chunks."""
    view = memoryview(data)
    digests = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = bytes(view[start : start + CHUNK_BYTES])
        digests.append(digest_of("holdfast.chunk", chunk))
        chunks[digests[-1]] = chunk
    return packb(Ext(wire.BULK, packb([digest_of("holdfast.value", data), len(data), digests])))


def differences(old: State, new: State) -> list[Relative]:
    """Operations that turn one state into another of the same store. What both have is not read."""

    def at_hand(root: bytes) -> Tree:
        return old.trees.get(root) or new.tree(root)

    for name, digest in new.digests():
        was = old.sections.get(name)
        if was is None or section_digest(was) != digest:
            new.section(name)
            if was is not None:
                old.section(name)
    ops = changes(old.sections, new.sections, Differ(at_hand, new.fetch), new)
    for tree in [*new.trees, *[one for one in new.sections.values() if isinstance(one, Tree)]]:
        old.trees.add(tree)  # operations may name it, and the store may lack it
    return ops


def changes(before: Sections, after: Sections, differ: Differ, state: State) -> list[Relative]:
    """Operations that turn sections into others: what differs, if both are read and it is less than the whole."""
    kept, ops = in_order(list(before), list(after))
    for name, now in after.items():
        was = before[name] if name in kept else b""
        if was is now or section_digest(was) == section_digest(now):
            continue
        tree = now if isinstance(now, Tree) else state.section(name)
        if isinstance(was, Tree) and was.kind == tree.kind:
            found = differ.trees(was, tree)
            if len(found) == 1 or not (len(found) > OPERATIONS_MAX or too_dear(found, tree.size)):
                ops += under((name,), found)
                continue
        ops.append((op.SET, (name,), (tree.named(state.fetch),)))
    return ops


def in_order(before: Iterable[str], after: Iterable[str]) -> tuple[set[str], list[Relative]]:
    """Which sections stay where they are; those that do not go first, and come back at the end, as in a dict."""
    names, known = list(after), list(before)
    if names == known:  # nearly always
        return set(names), []
    shown = [name for name in names if not is_apart(name)]
    kept = set(shown[: keeping([name for name in known if not is_apart(name)], shown)])
    kept.update(filter(is_apart, names))
    return kept & set(known), [(op.DELETE, (name,), ()) for name in known if name not in kept]


def check_section(name: Any) -> None:
    """Refuse what cannot be the name of a section of the state."""
    if type(name) is not str:
        raise Unencodable(
            f"a section's name is of type {type(name).__name__}", hint="Top-level keys of a state are str."
        )
    if is_apart(name):
        raise Unencodable(f"a section's name begins with a zero byte: {name!r:.80}", hint="Choose another name.")


def is_apart(name: str) -> bool:
    """Whether a section belongs to another layer than the state: programs neither see nor make such ones."""
    return name[:1] == APART


def digests(sections: Sections) -> list[tuple[str, bytes]]:
    """Section digests, in order; those of other layers come last, by their names."""
    found: list[tuple[str, bytes]] = []
    apart = False
    for name, one in sections.items():
        found.append((name, section_digest(one)))
        if name[:1] == APART:
            apart = True
    if apart:
        found.sort(key=lambda one: one[0] if is_apart(one[0]) else "")
    return found


def section_digest(tree: Tree | bytes) -> bytes:
    return tree if type(tree) is bytes else tree.root  # type: ignore[union-attr]


def _position(inner: Opened, part: Any) -> int:
    if inner.kind == DICT and inner.keys is not None:
        key = key_bytes(part)
        return inner.keys.index(key) if key in inner.keys else -1
    return part if inner.kind == LIST and type(part) is int and 0 <= part < len(inner.items) else -1
