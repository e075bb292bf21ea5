"""A state as bytes: read from what is stored, and changed by operations.

Owns the one way in which operations are done again: on encodings, whatever classes the program knows. A document rests
on such a state, and whoever walks through history (verify, transfer, the mutation log, undo) needs nothing else.
What always holds: a section that was read has the digest that its checkpoint recorded; operations that do not fit raise
``Damaged`` and change nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

from ormsgpack import Ext, packb

from holdfast.codec import blocks, contents, wire
from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, digest_of
from holdfast.codec.contents import Opened, key_bytes, key_of, open_inline, opened, root_of
from holdfast.codec.diff import Differ, Relative, item_hunks, keeping, too_dear, under
from holdfast.codec.marks import GONE
from holdfast.codec.node import FLAT
from holdfast.codec.operations import Operation
from holdfast.codec.tree import Hunk, Tree, anchor, build, read, set_hunks
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, decode_items
from holdfast.codec.wire import collector_paused
from holdfast.errors import CorruptValue, Damaged, UnknownType, format_path

# Bulk values are cut into chunks of this size (format.md, section 5).
CHUNK_BYTES = 8 * 1024 * 1024
# More places than this that differ in one section are not worth an operation each.
OPERATIONS_MAX = 4_096


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

    def digests(self) -> list[tuple[str, bytes]]:
        """Section digests, in order."""
        return [(name, tree if type(tree) is bytes else tree.root) for name, tree in self.sections.items()]  # type: ignore[union-attr]

    def fetch(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return self.source.nodes(digests)

    def chunks(self, digests: list[bytes]) -> bytes:
        """The joined content of chunks."""
        return self.source.bulk(digests)

    def bulk(self, payload: bytes) -> bytes:
        """The encoding of a bulk value, by what stands in its place."""
        parts = decode(payload)
        if type(parts) is not list or len(parts) != 3 or type(parts[2]) is not list:
            raise CorruptValue("a bulk value is a digest, a length and chunks")
        digest, length, digests = parts
        data = self.chunks(digests)
        if len(data) != length or digest_of("holdfast.value", data) != digest:
            raise CorruptValue("a bulk value is not what was written", what=("a bulk value",))
        return data

    def tree(self, root: bytes) -> Tree:
        """A tree inside an item."""
        tree = self.trees.get(root)
        if tree is None:
            tree = self.trees.add(read(root, self.fetch)[0])
        return tree

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

    def _load(self, name: str, digest: bytes) -> tuple[Tree, list[bytes] | None]:
        base = self.source.base.get(name)
        raw = None
        draft = _Sections(self)
        if base is not None:
            tree, raw = read(base, self.fetch)
            if base == digest:
                return tree, raw
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
        draft = _Sections(self)
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
            return tree.place(key_bytes(part), self.fetch)
        return part if tree.kind == LIST and type(part) is int and 0 <= part < tree.count else -1

    def differences(self, other: State) -> list[Operation]:
        """Operations that turn this state into another of the same store."""
        return operations_between(self, other)

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
        short = contents.close(inner.kind, items, inner.keys)
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
        return contents.big(tree.root)

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
        return part if type(part) in FLAT else self.value(key_bytes(part))

    def _big(self, code: int, payload: bytes) -> Any:
        if code == wire.BIG:
            return self.content(self._state.tree(bytes(payload)))
        return self.value(self._state.bulk(bytes(payload)))


def bulk(data: bytes, chunks: dict[bytes, bytes]) -> bytes:
    """A long encoding that cannot be split goes into chunks."""
    view = memoryview(data)
    digests = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = bytes(view[start : start + CHUNK_BYTES])
        digests.append(digest_of("holdfast.chunk", chunk))
        chunks[digests[-1]] = chunk
    return packb(Ext(wire.BULK, packb([digest_of("holdfast.value", data), len(data), digests])))


def operations_between(old: State, new: State) -> list[Operation]:
    """Operations that turn one state into another. What both have is not read."""

    def at_hand(root: bytes) -> Tree:
        return old.trees.get(root) or new.tree(root)

    def fetch(digests: list[bytes]) -> dict[bytes, bytes]:
        return new.fetch(digests)

    differ = Differ(at_hand, fetch)
    kept, ops = in_order(list(old.sections), list(new.sections))
    for name, now in new.sections.items():
        if name not in kept:
            ops.append((op.SET, (name,), (named(new.section(name), new),)))
            continue
        was = old.sections[name]
        if _digest(was) == _digest(now):
            continue
        before, after = old.section(name), new.section(name)
        if before.kind != after.kind:
            ops.append((op.SET, (name,), (named(after, new),)))
        else:
            ops += section_operations(name, before, after, differ, new)
    for tree in [*new.trees, *[one for one in new.sections.values() if isinstance(one, Tree)]]:
        old.trees.add(tree)  # operations may name it, and the store may lack it
    return [Operation(0, code, list(path), args) for code, path, args in ops]


def section_operations(name: str, old: Tree, new: Tree, differ: Differ, state: State) -> list[Relative]:
    """Operations for a section that differs: what differs, unless that is more than the whole."""
    ops = differ.trees(old, new)
    if len(ops) > OPERATIONS_MAX or (len(ops) > 1 and too_dear(ops, sum([leaf.size for leaf in new.leaves]))):
        return [(op.SET, (name,), (named(new, state),))]
    return under((name,), ops)


def in_order(before: list[str], after: list[str]) -> tuple[set[str], list[Relative]]:
    """Which sections stay where they are; those that do not go first, and come back at the end, as in a dict."""
    kept = set(after[: keeping(before, after)])
    return kept, [(op.DELETE, (name,), ()) for name in before if name not in kept]


def named(tree: Tree, state: State) -> bytes:
    """How a section's content stands in an operation."""
    if tree.kind == VALUE:
        return tree.part(0, 1, state.fetch)[0]
    if tree.within(blocks.INLINE_MAX_BYTES):
        data = contents.close(*opened(tree.kind, tree.all(state.fetch)))
        if len(data) <= blocks.INLINE_MAX_BYTES:
            return data
    return contents.big(tree.root)


def _digest(tree: Tree | bytes) -> bytes:
    return tree if type(tree) is bytes else tree.root  # type: ignore[union-attr]


def _position(inner: Opened, part: Any) -> int:
    if inner.kind == DICT and inner.keys is not None:
        key = key_bytes(part)
        return inner.keys.index(key) if key in inner.keys else -1
    return part if inner.kind == LIST and type(part) is int and 0 <= part < len(inner.items) else -1


# -- operations ---------------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """An operation does not fit what it is to be done on."""


class _Sections:
    """The sections of a state while operations are done on them. The state itself stays as it is."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.sections: dict[str, Tree | bytes | _Draft] = {}
        self.made: list[Tree] = []  # trees inside items: held until the leaves that name them are there

    def do(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            try:
                self._do(operation)
            except _Unfit as error:
                where = format_path(tuple(operation.path))
                raise Damaged(f"an operation on {where} does not fit the state it belongs to", what=(where,)) from error

    def _do(self, operation: Operation) -> None:
        _, code, path, args = operation
        if not path or type(path[0]) is not str:
            raise _Unfit
        name = path[0]
        if len(path) == 1 and code == op.SET:
            self.sections[name] = self._content(args[0])
            return
        if name not in self.sections:
            raise _Unfit
        if len(path) == 1 and code == op.DELETE:
            del self.sections[name]
            return
        draft = self.sections[name]
        if not isinstance(draft, _Draft):
            tree = self.state.load(name, draft)[0] if isinstance(draft, bytes) else draft
            draft = self.sections[name] = _Large(self, tree)
        last = len(path) - 1 if code in (op.SET, op.DELETE) else len(path)
        for part in path[1:last]:
            draft = draft.child(part)
        draft.change(code, path[-1], args)

    def _content(self, data: bytes) -> Tree:
        """A section from how it stands in an operation."""
        root = root_of(data)
        if root is not None:
            return self.state.tree(root)
        inner = open_inline(data)
        tree = build(VALUE, [data]) if inner is None else build(inner.kind, inner.pairs)
        return self.state.settle(tree)

    def finish(self) -> dict[str, Tree]:
        """The sections after all operations."""
        for name, section in self.sections.items():
            if isinstance(section, _Large):
                self.sections[name] = section.flush()
        return self.sections  # type: ignore[return-value]

    def open(self, data: bytes) -> _Draft:
        root = root_of(data)
        if root is not None:
            return _Large(self, self.state.tree(root))
        inner = open_inline(data)
        if inner is None:
            raise _Unfit
        return _Small(self, inner)


class _Draft:
    """A container that is being changed."""

    kind: bytes

    def __init__(self, sections: _Sections) -> None:
        self.sections = sections

    def child(self, part: Any) -> _Draft:
        """The container at a key or index, to be changed."""
        raise NotImplementedError

    def close(self) -> bytes:
        """How it stands in its parent afterwards."""
        raise NotImplementedError

    def put(self, part: Any, data: bytes) -> None:
        raise NotImplementedError

    def drop(self, part: Any) -> None:
        raise NotImplementedError

    def items(self) -> list[bytes]:
        """All items as a tree holds them."""
        raise NotImplementedError

    def become(self, start: int, stop: int, items: list[bytes]) -> None:
        """Let items give way to others."""
        raise NotImplementedError

    def size(self) -> int:
        raise NotImplementedError

    def change(self, code: int, part: Any, args: tuple[Any, ...]) -> None:
        """Do an operation here; ``part`` is the last of its path."""
        if code == op.SET and self.kind != SET:
            self.put(part, args[0])
        elif code == op.DELETE and self.kind == DICT:
            self.drop(part)
        elif code == op.CLEAR:
            self.become(0, self.size(), [])
        elif code == op.SPLICE and self.kind == LIST:
            start, count, values = args
            if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= self.size():
                raise _Unfit
            self.become(start, start + count, values)
        elif code == op.ARRANGE and self.kind == LIST:
            self.become(0, self.size(), _arrange(self.items(), args[0]))
        elif code in (op.ADD, op.REMOVE) and self.kind == SET:
            self._alter(code, args[0])
        else:
            raise _Unfit

    def _alter(self, code: int, values: list[bytes]) -> None:
        items = self.items()
        for data in values:
            at = bisect_left(items, data)
            there = items[at : at + 1] == [data]
            if code == op.REMOVE:
                if not there:
                    raise _Unfit
                del items[at]
            elif not there:
                items.insert(at, data)
        self.become(0, self.size(), items)


def _arrange(items: list[bytes], pieces: list[Any]) -> list[bytes]:
    made: list[bytes] = []
    used: set[int] = set()
    for piece in pieces:
        if len(piece) == 1:
            made.append(piece[0])
            continue
        start, count, step = piece
        if not (type(start) is type(count) is type(step) is int) or step not in (1, -1) or count < 1:
            raise _Unfit
        places = range(start, start + count * step, step)
        if not (0 <= places[0] < len(items) and 0 <= places[-1] < len(items)) or not used.isdisjoint(places):
            raise _Unfit
        used.update(places)
        made += [items[at] for at in places]
    return made


class _Small(_Draft):
    """A container that is written out in its parent."""

    def __init__(self, sections: _Sections, inner: Opened) -> None:
        super().__init__(sections)
        self.kind = inner.kind
        self._list: list[Any] = []
        self._dict: dict[bytes, Any] = {}
        if inner.keys is None:
            self._list = inner.items
        else:
            self._dict = dict(zip(inner.keys, inner.items, strict=True))

    def size(self) -> int:
        return len(self._dict) if self.kind == DICT else len(self._list)

    def child(self, part: Any) -> _Draft:
        holder, at = self._place(part)
        if type(holder[at]) is bytes:
            holder[at] = self.sections.open(holder[at])
        return holder[at]  # type: ignore[no-any-return]

    def _place(self, part: Any) -> tuple[Any, Any]:
        if self.kind == DICT:
            key = key_bytes(part)
            if key in self._dict:
                return self._dict, key
        elif self.kind == LIST and type(part) is int and 0 <= part < len(self._list):
            return self._list, part
        raise _Unfit

    def put(self, part: Any, data: bytes) -> None:
        if self.kind == DICT:
            self._dict[key_bytes(part)] = data
        else:
            holder, at = self._place(part)
            holder[at] = data

    def drop(self, part: Any) -> None:
        holder, at = self._place(part)
        del holder[at]

    def items(self) -> list[bytes]:
        if self.kind == DICT:
            return [key + _closed(item) for key, item in self._dict.items()]
        return list(map(_closed, self._list))

    def become(self, start: int, stop: int, items: list[bytes]) -> None:
        if self.kind == DICT:
            self._dict.clear()
        else:
            self._list[start:stop] = items

    def close(self) -> bytes:
        keys, values = (list(self._dict), list(self._dict.values())) if self.kind == DICT else (None, self._list)
        data = contents.close(self.kind, list(map(_closed, values)), keys)
        if len(data) <= blocks.INLINE_MAX_BYTES:
            return data
        tree = self.sections.state.settle(build(self.kind, self.items()))
        self.sections.made.append(tree)
        return contents.big(tree.root)


def _closed(item: bytes | _Draft) -> bytes:
    return item if type(item) is bytes else item.close()  # type: ignore[union-attr]


class _Large(_Draft):
    """A container with a tree. What is set, and what comes at the end, is gathered until something else comes."""

    def __init__(self, sections: _Sections, tree: Tree) -> None:
        super().__init__(sections)
        if tree.kind == VALUE:
            raise _Unfit
        self.kind = tree.kind
        self.tree = tree
        self._edits: dict[int, bytes | _Draft] = {}  # by index: an item, or a dict's value
        self._tail: dict[bytes, bytes | _Draft] | list[bytes | _Draft] = {} if tree.kind == DICT else []

    def size(self) -> int:
        return self.tree.count + len(self._tail)

    def flush(self) -> Tree:
        """Apply what was gathered."""
        tree, fetch = self.tree, self.sections.state.fetch
        hunks: list[Hunk] = []
        for at in sorted(self._edits):
            data, (old,) = _closed(self._edits[at]), tree.part(at, at + 1, fetch)
            if self.kind == DICT:
                data = key_of(old) + data
            if data != old:
                hunks.append(Hunk(at, at + 1, [data], [old]))
        if self._tail:
            end = tree.count
            if isinstance(self._tail, dict):
                new = [key + _closed(item) for key, item in self._tail.items()]
            else:
                new = list(map(_closed, self._tail))
            hunks.append(Hunk(end, end, new))
        self._edits = {}
        self._tail = {} if self.kind == DICT else []
        self.tree = self.sections.state.settle(tree.apply(hunks, fetch))
        return self.tree

    def _slot(self, part: Any) -> tuple[Any, Any]:
        """Where the item at a key or index is, or is to be, gathered; (None, key) when a dict lacks the key."""
        count = self.tree.count
        if self.kind == DICT:
            key = key_bytes(part)
            if key in self._tail:
                return self._tail, key
            at = self.tree.place(key, self.sections.state.fetch)
            return (self._edits, at) if at >= 0 else (None, key)
        if self.kind != LIST or type(part) is not int or not 0 <= part < self.size():
            raise _Unfit
        return (self._edits, part) if part < count else (self._tail, part - count)

    def child(self, part: Any) -> _Draft:
        holder, at = self._slot(part)
        if holder is None:
            raise _Unfit
        if holder is self._edits and at not in self._edits:
            (item,) = self.tree.part(at, at + 1, self.sections.state.fetch)
            holder[at] = item[len(key_of(item)) :] if self.kind == DICT else item
        if type(holder[at]) is bytes:
            holder[at] = self.sections.open(holder[at])
        return holder[at]  # type: ignore[no-any-return]

    def put(self, part: Any, data: bytes) -> None:
        holder, at = self._slot(part)
        if holder is None:
            holder = self._tail
        holder[at] = data

    def drop(self, part: Any) -> None:
        holder, at = self._slot(part)
        if holder is None:
            raise _Unfit
        if holder is self._tail:
            del holder[at]
            return
        self._edits.pop(at, None)
        self.flush()
        self.become(at, at + 1, [])

    def items(self) -> list[bytes]:
        return self.flush().all(self.sections.state.fetch)

    def become(self, start: int, stop: int, items: list[bytes]) -> None:
        if start == stop == self.size() and isinstance(self._tail, list):
            self._tail += items
            return
        tree, fetch = self.flush(), self.sections.state.fetch
        old = tree.part(start, stop, fetch)
        if not old and not items:
            return
        self.tree = self.sections.state.settle(tree.apply([Hunk(start, stop, items, old)], fetch))

    def _alter(self, code: int, values: list[bytes]) -> None:
        state, tree = self.sections.state, self.flush()
        gone, come = (values, []) if code == op.REMOVE else ([], values)
        hunks = set_hunks(tree, gone, come, state.fetch)
        if hunks is None:
            raise _Unfit
        self.tree = state.settle(tree.apply(hunks, state.fetch))

    def close(self) -> bytes:
        tree = self.flush()
        if tree.within(blocks.INLINE_MAX_BYTES):
            data = contents.close(*opened(tree.kind, tree.all(self.sections.state.fetch)))
            if len(data) <= blocks.INLINE_MAX_BYTES:
                return data
        self.sections.made.append(tree)
        return contents.big(tree.root)
