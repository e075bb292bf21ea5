"""Nodes whose children have not been wrapped yet.

Owns the first touch. A lazy node holds raw children; the first read wraps them (one level) and swaps the object to the
class without read overrides, so that later reads cost what a plain dict or list costs.
What always holds: no code outside the codec ever sees a raw child, except C code that only reads (and then sees equal
plain values).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex

from holdfast.codec.nodes.base import FLAT, TEXT, Node
from holdfast.codec.nodes.dicts import TrackedDict
from holdfast.codec.nodes.lists import TrackedList
from holdfast.codec.trees import Leaf

# A container longer than this is not wrapped whole for the sake of one element ...
_WRAP_ALL_MAX = 64
# ... but it is when it was read often: wrapping all of it costs a fraction of what it cost to load it or to take it in,
# and every read is a plain one from then on.
_READS_SHARE = 32


def _read_little(node: LazyDict | LazyList, reads: int) -> bool:
    """Count reads of single elements; whether there were so few that wrapping the rest would be a waste."""
    node._reads += reads  # another thread may count at the same time: then one of the two is lost, which is no matter
    size = len(node)
    return size > _WRAP_ALL_MAX and node._reads * _READS_SHARE < size


class LazyDict(TrackedDict):
    """A dict whose children have not been wrapped yet."""

    __slots__ = ()

    def _peek(self) -> dict[Any, Any]:
        # dict.copy would ask the overrides below, and wrap every child.
        return dict(zip(dict.keys(self), dict.values(self), strict=True))

    def _touch(self) -> None:
        doc = self._doc
        with doc.lock:
            if type(self) is LazyDict:
                child = doc.child
                for key, value in dict.items(self):
                    if type(value) not in FLAT:
                        fresh = child(value, self, key, None)
                        if fresh is not value:
                            dict.__setitem__(self, key, fresh)  # the key is there: the dict is not resized
                self.__class__ = TrackedDict  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        if _read_little(self, 1):
            value = dict.__getitem__(self, key)
            if type(value) in FLAT or (isinstance(value, Node) and value._parent is self):
                return value
            with self._doc.lock:
                if type(self) is LazyDict:
                    return self._child(key)
        self._touch()
        return dict.__getitem__(self, key)

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

    def __or__(self, other: Any) -> Any:
        self._touch()
        return dict.__or__(self, other)

    def __ror__(self, other: Any) -> Any:
        self._touch()
        return dict.__ror__(self, other)


class LazyList(TrackedList):
    """A list whose children have not all been wrapped yet."""

    __slots__ = ()

    def _touch(self) -> None:
        with self._doc.lock:
            if type(self) is LazyList:
                leaves = self._tree.leaves if self._tree is not None else []
                if leaves and leaves[-1].start + leaves[-1].count == len(self):
                    for leaf in leaves:
                        self._wrap(leaf.start, leaf.start + leaf.count, leaf)
                else:
                    self._wrap(0, len(self), None)
                self.__class__ = TrackedList  # type: ignore[assignment]

    def _wrap(self, start: int, stop: int, leaf: Leaf | None) -> None:
        doc, flat, text = self._doc, FLAT.issuperset, TEXT.issuperset
        children: list[Any] = []
        for at, value in enumerate(list.__getitem__(self, slice(start, stop)), start):
            node: Any = value
            if type(value) is dict and flat(map(type, value.values())) and text(map(type, value)):
                # As child() does it, written out: most lists are lists of messages.
                node = TrackedDict(value)
                node._doc = doc
                node._parent = self
                node._key = at
                node._leaf = leaf
                node._tree = node._where = None
                node._reads = 0
            elif type(value) not in FLAT:
                node = doc.child(value, self, at, leaf)
                if isinstance(node, Node):
                    node._leaf = leaf
            children.append(node)
        list.__setitem__(self, slice(start, stop), children)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            with self._doc.lock:
                places = range(len(self))[index]
                if type(self) is LazyList and _read_little(self, len(places)):
                    return list(map(self._child, places))
        elif _read_little(self, 1):
            value = list.__getitem__(self, index)
            if type(value) in FLAT or (isinstance(value, Node) and value._parent is self):
                return value
            with self._doc.lock:
                if type(self) is LazyList:
                    return self._child(self._index(index, "list index out of range"))
        self._touch()
        return list.__getitem__(self, index)

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
