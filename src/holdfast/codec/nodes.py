"""Tracked containers: dict, list and set subclasses that write down their own changes.

Owns the three kinds of node and their mutators. A node belongs to a document (``_doc``), and is *attached* while a
chain of parents leads to one of its sections. It knows nothing of storage or history.
What always holds: base storage contains only plain immutable values, nodes, untouched raw containers (in lazy nodes),
and instances that the document has handed out. Every mutator takes in all its values before it changes anything.

A node starts *lazy*: its children are raw. The first read wraps them and swaps the object to a class without read
overrides, so that later reads cost what a plain dict or list costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, SupportsIndex

from holdfast.codec import operations as op
from holdfast.codec.blocks import DEAD, DICT, LIST, SET, Leaf, Tree
from holdfast.errors import Stale

if TYPE_CHECKING:
    from holdfast.codec.document import Document, Section

FLAT = frozenset({str, int, float, bool, type(None), bytes})
_list_get = list.__getitem__
_dict_get = dict.__getitem__
# A list longer than this is not wrapped whole for the sake of one element.
_WRAP_ALL_MAX = 64


class Node:
    """What the three kinds share. ``_parent`` is a node, a section, or None when detached."""

    __slots__ = ()
    _kind: bytes
    _doc: Document
    _parent: Node | Section | None
    _key: Any
    _leaf: Leaf | None
    _tree: Tree | None
    _where: dict[Any, Leaf] | None
    _reads: int

    def _adopt(self, doc: Document, parent: Node | Section | None, key: Any = None, leaf: Leaf | None = None) -> None:
        self._doc = doc
        self._parent = parent
        self._key = key
        self._leaf = leaf

    def _init(self, doc: Document, parent: Node | Section | None, key: Any = None, leaf: Leaf | None = None) -> None:
        self._adopt(doc, parent, key, leaf)
        self._tree = None
        self._where = None
        self._reads = 0

    def _path(self) -> list[Any] | None:
        """Keys from the section down to this node, or None when it is detached."""
        parts: list[Any] = []
        node: Node = self
        while True:
            parent = node._parent
            if parent is None:
                return None
            if not isinstance(parent, Node):
                if parent.value is not node:
                    return None
                parts.append(parent.name)
                parts.reverse()
                return parts
            parts.append(parent._key_of(node))
            node = parent

    def _reach(self) -> list[Any] | None:
        """The path of a node that is about to change; every node above it is to be encoded again."""
        doc = self._doc
        if doc.readonly:
            doc.refuse()
        path = self._path()
        if path is None:
            return None
        node: Node = self
        while True:
            parent = node._parent
            if not isinstance(parent, Node):
                if parent is not None:
                    parent.changed()
                return path
            if parent._tree is not None:
                parent._tree.spoil(parent._leaf_of(node))
            node = parent

    if TYPE_CHECKING:  # what each kind provides in its own way

        def _key_of(self, child: Node) -> Any:
            """The key or index of a child."""

        def _leaf_of(self, child: Node) -> Leaf:
            """The leaf of this container's tree that holds a child."""

        def _run(self, leaf: Leaf) -> list[bytes]:
            """The encodings of a leaf's items."""

        def _peek(self) -> Any:
            """A plain shallow copy of the base storage, children as they are."""

    def _regrouped(self, leaves: list[Leaf]) -> None:
        """The tree made these leaves anew."""

    def _plant(self) -> Tree:
        """Give this container a tree of its own."""
        tree = Tree(self._kind)
        tree.reset(len(self))  # type: ignore[arg-type]
        self._tree = tree
        self._where = None
        self._doc.planted(self)
        return tree

    def _digest(self) -> bytes:
        tree = self._tree or self._plant()
        return tree.update(self._run, self._regrouped)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._doc.plain(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return type(self)._plain, (self._doc.plain(self),)

    _plain: Callable[[Any], Any]


def _release(child: Any, parent: Node) -> None:
    """``child`` left ``parent``."""
    if isinstance(child, Node) and child._parent is parent:
        child._parent = None


class TrackedDict(dict[Any, Any], Node):
    """A dict inside a state."""

    __slots__ = ("_doc", "_key", "_leaf", "_parent", "_reads", "_tree", "_where")
    _kind = DICT
    _plain = dict

    def _key_of(self, child: Node) -> Any:
        return child._key

    def _leaf_of(self, child: Node) -> Leaf:
        return self._leaf_for(child._key)

    def _leaf_for(self, key: Any) -> Leaf:
        if self._where is not None:
            return self._where[key]
        return self._tree.leaves[0]  # type: ignore[union-attr]

    def _run(self, leaf: Leaf) -> list[bytes]:
        pack, pack_key = self._doc.pack, self._doc.pack_key
        keys: Iterable[Any] = dict.keys(self) if leaf.keys is None else leaf.keys
        return [pack_key(key) + pack(_dict_get(self, key)) for key in keys]

    def _regrouped(self, leaves: list[Leaf]) -> None:
        tree = self._tree
        assert tree is not None  # noqa: S101 - a type narrowing
        if len(tree.leaves) == 1:
            self._where = tree.leaves[0].keys = None
            return
        if self._where is None:
            keys = dict.keys(self).__iter__()
            leaves = tree.leaves
        else:
            keys = iter([key for leaf in leaves for key in leaf.keys or ()])
        where = self._where = self._where if self._where is not None else {}
        for leaf in leaves:
            leaf.keys = dict.fromkeys(islice(keys, leaf.count))
            where.update(dict.fromkeys(leaf.keys, leaf))

    def _peek(self) -> dict[Any, Any]:
        return dict.copy(self)

    def _child(self, key: Any) -> Any:
        """The child under ``key``, wrapped, without wrapping its siblings."""
        value = _dict_get(self, key)
        if type(value) in FLAT:
            return value
        fresh = self._doc.child(value, self, key, None)
        if fresh is not value:
            dict.__setitem__(self, key, fresh)
        return fresh

    def _place(self, key: Any, value: Any, path: list[Any] | None) -> None:
        """Set one item; the caller holds the lock and has reached this node."""
        doc = self._doc
        new = key not in self
        old = None if new else _dict_get(self, key)
        pack_key = doc.take_key(key, self) if new else b""
        value, data = doc.take(value, self, key, old)
        if not new:
            _release(old, self)
        dict.__setitem__(self, key, doc.settle(value, self, key, None))
        if self._tree is not None:
            if new:
                self._tree_added(key, pack_key + data)
            else:
                self._tree.spoil(self._leaf_for(key))
        if path is not None:
            doc.record(op.SET, [*path, key], data)

    def _tree_added(self, key: Any, item: bytes) -> None:
        tree = self._tree
        assert tree is not None  # noqa: S101 - a type narrowing
        leaf = tree.appended(item)
        if self._where is None:
            if len(tree.leaves) > 1:
                self._regrouped(tree.leaves)
            return
        if leaf.keys is None:
            leaf.keys = {}
        leaf.keys[key] = None
        self._where[key] = leaf

    def _drop(self, key: Any, path: list[Any] | None) -> Any:
        """Remove one item and return its value."""
        value = dict.pop(self, key)
        _release(value, self)
        if self._tree is not None:
            leaf = self._leaf_for(key)
            self._tree.spoil(leaf)
            leaf.count -= 1
            if self._where is not None:
                del self._where[key]
                del leaf.keys[key]  # type: ignore[union-attr]
        if path is not None:
            self._doc.record(op.DELETE, [*path, key])
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        with self._doc.lock:
            self._place(key, value, self._reach())

    def __delitem__(self, key: Any) -> None:
        with self._doc.lock:
            if key not in self:
                raise KeyError(key)
            self._drop(key, self._reach())

    def pop(self, key: Any, *default: Any) -> Any:
        with self._doc.lock:
            if key not in self:
                return dict.pop(self, key, *default)
            self._child(key)
            return self._drop(key, self._reach())

    def popitem(self) -> tuple[Any, Any]:
        with self._doc.lock:
            if not self:
                return dict.popitem(self)
            key = next(dict.__reversed__(self))
            return key, self.pop(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        with self._doc.lock:
            if key not in self:
                self._place(key, default, self._reach())
            return self._child(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        incoming = dict(*args, **kwargs)
        with self._doc.lock:
            self._doc.check_all(incoming.values(), self, incoming)
            path = self._reach() if incoming else None
            for key, value in incoming.items():
                self._place(key, value, path)

    def __ior__(self, other: Any) -> TrackedDict:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        with self._doc.lock:
            if not self:
                return
            path = self._reach()
            for value in dict.values(self):
                _release(value, self)
            dict.clear(self)
            self._where = None
            if self._tree is not None:
                self._tree.reset(0)
            if path is not None:
                self._doc.record(op.CLEAR, path)

    def __copy__(self) -> dict[Any, Any]:
        return self.copy()


class TrackedList(list[Any], Node):
    """A list inside a state."""

    __slots__ = ("_doc", "_key", "_leaf", "_parent", "_reads", "_tree", "_where")
    _kind = LIST
    _plain = list

    def _key_of(self, child: Node) -> Any:
        leaf = child._leaf
        start, stop = 0, len(self)
        if leaf is not None and self._tree is not None and leaf.count != DEAD:
            start, stop = leaf.start, leaf.start + leaf.count
        for index in range(start, stop):
            if _list_get(self, index) is child:
                return index
        for index in range(len(self)):  # the leaf was stale: look everywhere
            if _list_get(self, index) is child:
                return index
        raise Stale("a list item is no longer where it was", hint="read it again from agent.state")

    def _leaf_of(self, child: Node) -> Leaf:
        tree = self._tree
        assert tree is not None  # noqa: S101 - a type narrowing
        leaf = child._leaf
        if leaf is None or leaf.count == DEAD or (leaf is not tree.leaves[-1] and not self._holds(leaf, child)):
            leaf = tree.leaf_at(self._key_of(child))
            child._leaf = leaf
        return leaf

    def _holds(self, leaf: Leaf, child: Node) -> bool:
        return self._tree is not None and self._tree.leaf_at(leaf.start) is leaf and leaf.count > 0

    def _run(self, leaf: Leaf) -> list[bytes]:
        pack = self._doc.pack
        return [pack(item) for item in _list_get(self, slice(leaf.start, leaf.start + leaf.count))]

    def _regrouped(self, leaves: list[Leaf]) -> None:
        for leaf in leaves:
            for item in _list_get(self, slice(leaf.start, leaf.start + leaf.count)):
                if isinstance(item, Node):
                    item._leaf = leaf

    def _peek(self) -> list[Any]:
        return list.copy(self)

    def _child(self, index: int) -> Any:
        value = _list_get(self, index)
        if type(value) in FLAT:
            return value
        leaf = self._tree.leaf_at(index) if self._tree is not None else None
        fresh = self._doc.child(value, self, None, leaf)
        if fresh is not value:
            list.__setitem__(self, index, fresh)
        return fresh

    def append(self, value: Any) -> None:
        doc = self._doc
        with doc.lock:
            path = self._reach()
            size = len(self)
            value, data = doc.take(value, self, size, None)
            leaf = self._tree.appended(data) if self._tree is not None else None
            list.append(self, value if type(value) in FLAT else doc.settle(value, self, None, leaf))
            if path is not None:
                doc.record(op.SPLICE, path, size, 0, [data])

    def _splice(self, start: int, removed: int, values: list[Any], path: list[Any] | None) -> None:
        """Replace ``removed`` items at ``start``; the caller holds the lock and has reached this node."""
        doc = self._doc
        old = _list_get(self, slice(start, start + removed))
        taken: list[tuple[Any, bytes]] = []
        seen: set[int] = set()
        for at, value in enumerate(values, start):
            item = doc.take(value, self, at, None)
            if isinstance(item[0], Node):
                if id(item[0]) in seen:
                    item = doc.copy(item[0])
                seen.add(id(item[0]))
            taken.append(item)
        tree = self._tree
        kept = {id(value) for value, _ in taken}
        for item in old:
            if id(item) not in kept:
                _release(item, self)
        at_end = start + removed == len(self)
        list.__setitem__(self, slice(start, start + removed), [value for value, _ in taken])
        if tree is not None:
            if at_end and not removed:
                for _, data in taken:
                    tree.appended(data)
            elif removed or taken:
                tree.spliced(start, removed, len(taken))
        for at, (value, _) in enumerate(taken, start):
            if type(value) not in FLAT:
                leaf = tree.leaf_at(at) if tree is not None else None
                list.__setitem__(self, at, doc.settle(value, self, None, leaf))
        if path is not None and (removed or taken):
            doc.record(op.SPLICE, path, start, removed, [data for _, data in taken])

    def extend(self, values: Iterable[Any]) -> None:
        with self._doc.lock:
            incoming = list(values)
            if incoming:
                self._splice(len(self), 0, incoming, self._reach())

    def __iadd__(self, values: Iterable[Any]) -> TrackedList:  # type: ignore[override,misc]
        self.extend(values)
        return self

    def insert(self, index: SupportsIndex, value: Any) -> None:
        with self._doc.lock:
            start = slice(index, None).indices(len(self))[0]
            self._splice(start, 0, [value], self._reach())

    def pop(self, index: SupportsIndex = -1) -> Any:
        with self._doc.lock:
            at = self._index(index, "pop from empty list" if not self else "pop index out of range")
            value = self._child(at)
            self._splice(at, 1, [], self._reach())
            return value

    def _index(self, index: SupportsIndex, message: str) -> int:
        at = index.__index__()
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(message)
        return at

    def remove(self, value: Any) -> None:
        with self._doc.lock:
            self._splice(list.index(self, value), 1, [], self._reach())

    def __setitem__(self, index: Any, value: Any) -> None:
        doc = self._doc
        with doc.lock:
            if isinstance(index, slice):
                self._assign(index, value)
                return
            at = self._index(index, "list assignment index out of range")
            path = self._reach()
            old = _list_get(self, at)
            value, data = doc.take(value, self, at, old)
            _release(old, self)
            leaf = None
            if self._tree is not None:
                leaf = self._tree.leaf_at(at)
                self._tree.spoil(leaf)
            list.__setitem__(self, at, doc.settle(value, self, None, leaf))
            if path is not None:
                doc.record(op.SET, [*path, at], data)

    def _assign(self, index: slice, values: Iterable[Any]) -> None:
        incoming = list(values)
        start, stop, step = index.indices(len(self))
        if step == 1 and index.step in {None, 1}:
            stop = max(start, stop)
            old = _list_get(self, slice(start, stop))
            if any(isinstance(item, Node) and item._parent is self for item in incoming):
                self._rearrange([*range(start), *self._sources(old, start, incoming), *range(stop, len(self))])
            else:
                self._splice(start, stop - start, incoming, self._reach())
            return
        places = range(start, stop, step)
        if len(places) != len(incoming):
            msg = f"attempt to assign sequence of size {len(incoming)} to extended slice of size {len(places)}"
            raise ValueError(msg)
        self._doc.check_all(incoming, self)
        for at, value in zip(places, incoming, strict=True):
            self[at] = value

    def _sources(self, old: list[Any], start: int, incoming: list[Any]) -> list[Any]:
        """For each incoming item the old index it comes from (an int), or the value itself in a list of one."""
        free: dict[int, list[int]] = {}
        for at in range(len(old) - 1, -1, -1):
            free.setdefault(id(old[at]), []).append(at + start)
        return [free[id(item)].pop() if free.get(id(item)) else [item] for item in incoming]

    def _rearrange(self, sources: list[Any]) -> None:
        """Make the list of old indexes and new values (each in a list of one)."""
        doc = self._doc
        path = self._reach()
        old = list.copy(self)
        taken: list[Any] = []
        pieces: list[Any] = []
        for source in sources:
            if isinstance(source, int):
                taken.append(old[source])
                op.add_piece(pieces, source)
            else:
                value, data = doc.take(source[0], self, len(taken), None)
                taken.append(doc.settle(value, self, None, None))
                pieces.append([data])
        kept = {id(item) for item in taken}
        for item in old:
            if id(item) not in kept:
                _release(item, self)
        list.__setitem__(self, slice(None), taken)
        if self._tree is not None:
            self._tree.reset(len(self))
        if path is not None:
            doc.record(op.ARRANGE, path, pieces)

    def __delitem__(self, index: Any) -> None:
        with self._doc.lock:
            if not isinstance(index, slice):
                self._splice(self._index(index, "list assignment index out of range"), 1, [], self._reach())
                return
            places = range(len(self))[index]
            if not places:
                return
            if places.step == 1:
                self._splice(places.start, len(places), [], self._reach())
            else:
                gone = set(places)
                self._rearrange([at for at in range(len(self)) if at not in gone])

    def __imul__(self, times: SupportsIndex) -> TrackedList:  # type: ignore[override,misc]
        count = times.__index__()
        if count <= 0:
            self.clear()
        elif count > 1:
            self.extend(list(self) * (count - 1))
        return self

    def clear(self) -> None:
        with self._doc.lock:
            if self:
                self._splice(0, len(self), [], self._reach())

    def reverse(self) -> None:
        with self._doc.lock:
            if len(self) > 1:
                self._rearrange(list(range(len(self) - 1, -1, -1)))

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        with self._doc.lock:
            items = list(self)
            order = sorted(range(len(items)), key=(lambda at: items[at]) if key is None else (lambda at: key(items[at])),
                           reverse=reverse)  # fmt: skip
            if order != list(range(len(items))):
                self._rearrange(order)

    def __copy__(self) -> list[Any]:
        return self.copy()


class TrackedSet(set[Any], Node):
    """A set inside a state. Its items are immutable, so reading needs no care."""

    __slots__ = ("_doc", "_key", "_leaf", "_parent", "_reads", "_tree", "_where")
    _kind = SET
    _plain = set

    def _run(self, leaf: Leaf) -> list[bytes]:
        items = sorted(map(self._doc.pack, set.__iter__(self)))
        return items[leaf.start : leaf.start + leaf.count] if leaf.digest is not None else items

    def _peek(self) -> set[Any]:
        return set(self)

    def _change(self, added: Iterable[Any], removed: Iterable[Any]) -> None:
        """The one way in which a set changes."""
        doc = self._doc
        with doc.lock:
            gone = [item for item in removed if item in self]
            new: dict[Any, bytes] = {}
            for item in added:
                if item not in new and item not in self:
                    new[item] = doc.take_item(item, self)
            if not gone and not new:
                return
            path = self._reach()
            gone_data = [doc.pack(item) for item in gone]
            set.difference_update(self, gone)
            set.update(self, new)
            if self._tree is not None:
                self._tree.reset(len(self))
            if path is not None:
                if gone_data:
                    doc.record(op.REMOVE, path, gone_data)
                if new:
                    doc.record(op.ADD, path, list(new.values()))

    def add(self, item: Any) -> None:
        self._change((item,), ())

    def discard(self, item: Any) -> None:
        self._change((), (item,))

    def remove(self, item: Any) -> None:
        with self._doc.lock:
            if item not in self:
                raise KeyError(item)
            self._change((), (item,))

    def pop(self) -> Any:
        with self._doc.lock:
            if not self:
                return set.pop(self)
            item = next(set.__iter__(self))
            self._change((), (item,))
            return item

    def clear(self) -> None:
        with self._doc.lock:
            if self:
                path = self._reach()
                set.clear(self)
                if self._tree is not None:
                    self._tree.reset(0)
                if path is not None:
                    self._doc.record(op.CLEAR, path)

    def update(self, *others: Iterable[Any]) -> None:
        self._change([item for other in others for item in other], ())

    def difference_update(self, *others: Iterable[Any]) -> None:
        self._change((), set().union(*others))

    def intersection_update(self, *others: Iterable[Any]) -> None:
        with self._doc.lock:
            self._change((), set(self) - set(self).intersection(*others))

    def symmetric_difference_update(self, other: Iterable[Any]) -> None:
        with self._doc.lock:
            items = set(other)
            self._change(items - self, items & self)

    def _in_place(self, method: Callable[[Any], None], other: Any) -> Any:
        if not isinstance(other, set | frozenset):
            return NotImplemented
        method(other)
        return self

    def __ior__(self, other: Any) -> Any:  # type: ignore[override,misc]
        return self._in_place(self.update, other)

    def __isub__(self, other: Any) -> Any:  # type: ignore[override,misc]
        return self._in_place(self.difference_update, other)

    def __iand__(self, other: Any) -> Any:  # type: ignore[override,misc]
        return self._in_place(self.intersection_update, other)

    def __ixor__(self, other: Any) -> Any:  # type: ignore[override,misc]
        return self._in_place(self.symmetric_difference_update, other)

    def copy(self) -> set[Any]:
        return set(self)

    def __copy__(self) -> set[Any]:
        return set(self)


class LazyDict(TrackedDict):
    """A dict whose children have not been wrapped yet."""

    __slots__ = ()

    def _touch(self) -> None:
        with self._doc.lock:
            if type(self) is LazyDict:
                for key, value in dict.items(self):
                    if type(value) not in FLAT:
                        fresh = self._doc.child(value, self, key, None)
                        if fresh is not value:
                            dict.__setitem__(self, key, fresh)  # same key: the dict is not resized
                self.__class__ = TrackedDict  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        self._touch()
        return _dict_get(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._touch()
        return dict.get(self, key, default)

    def __iter__(self) -> Iterator[Any]:
        # Overridden so that C code merging this dict asks __getitem__ and never sees raw children.
        self._touch()
        return dict.__iter__(self)

    def items(self) -> Any:
        self._touch()
        return dict.items(self)

    def values(self) -> Any:
        self._touch()
        return dict.values(self)

    def copy(self) -> dict[Any, Any]:
        self._touch()
        return dict.copy(self)

    def __or__(self, other: Any) -> Any:  # type: ignore[override]
        self._touch()
        return dict.__or__(self, other)

    def __ror__(self, other: Any) -> Any:  # type: ignore[override]
        self._touch()
        return dict.__ror__(self, other)


class LazyList(TrackedList):
    """A list whose children have not all been wrapped yet."""

    __slots__ = ()

    def _touch(self) -> None:
        with self._doc.lock:
            if type(self) is LazyList:
                for at, value in enumerate(list.__iter__(self)):
                    if type(value) not in FLAT:
                        fresh = self._doc.child(value, self, None, None)
                        if fresh is not value:
                            list.__setitem__(self, at, fresh)
                if self._tree is not None:
                    self._regrouped(self._tree.leaves)
                self.__class__ = TrackedList  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if len(self) > _WRAP_ALL_MAX and not isinstance(index, slice) and self._reads * 8 < len(self):
            with self._doc.lock:
                if type(self) is LazyList:
                    self._reads += 1
                    return self._child(self._index(index, "list index out of range"))
        self._touch()
        return _list_get(self, index)

    def __iter__(self) -> Iterator[Any]:
        self._touch()
        return list.__iter__(self)

    def __reversed__(self) -> Iterator[Any]:
        self._touch()
        return list.__reversed__(self)

    def copy(self) -> list[Any]:
        self._touch()
        return list.copy(self)

    def __add__(self, other: Any) -> Any:
        self._touch()
        return list.__add__(self, other)

    def __radd__(self, other: Any) -> Any:
        # Python asks this first when a plain list is on the left, before C code could copy raw children.
        self._touch()
        return list.__add__(other, self) if isinstance(other, list) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Any:
        self._touch()
        return list.__mul__(self, times)

    __rmul__ = __mul__


def _stale_class(base: Any, plain: Any) -> Any:
    """A class for nodes that a rollback removed: using one says so instead of showing what is gone."""

    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise Stale(
            f"this {plain.__name__} is no longer part of the state: a rollback, undo or redo removed it",
            hint="read it again from agent.state",
        )

    names = [
        name
        for name in dir(plain)
        if callable(getattr(plain, name)) and (not name.startswith("__") or name in _STALE_SPECIAL)
    ]
    return type("Stale" + plain.__name__.title(), (base,), {"__slots__": (), **dict.fromkeys(names, refuse)})


_STALE_SPECIAL = frozenset(
    "__getitem__ __setitem__ __delitem__ __iter__ __len__ __contains__ __reversed__ __add__ __iadd__ __mul__ __imul__ "
    "__rmul__ __or__ __ror__ __ior__ __and__ __iand__ __sub__ __isub__ __xor__ __ixor__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__".split()
)
StaleDict = _stale_class(TrackedDict, dict)
StaleList = _stale_class(TrackedList, list)
StaleSet = _stale_class(TrackedSet, set)


def make_stale(node: Node) -> None:
    """``node`` and all nodes below it left the state for good."""
    children = node._peek()
    for child in children.values() if isinstance(children, dict) else children:
        if isinstance(child, Node) and child._parent is node:
            make_stale(child)
    node._parent = None
    stale = StaleDict if isinstance(node, dict) else StaleList if isinstance(node, list) else StaleSet
    node.__class__ = stale


def wrap(raw: Any, doc: Document, parent: Node | Section | None, key: Any = None, leaf: Leaf | None = None) -> Any:
    """A node with the content of a raw container."""
    node: Any
    if isinstance(raw, dict):
        node = TrackedDict(raw) if FLAT.issuperset(map(type, raw.values())) else LazyDict(raw)
    elif isinstance(raw, list):
        node = TrackedList(raw) if FLAT.issuperset(map(type, raw)) else LazyList(raw)
    else:
        node = TrackedSet(raw)
    node._init(doc, parent, key, leaf)
    return node
