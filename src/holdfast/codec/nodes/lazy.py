"""Nodes whose children have not been wrapped yet.

Owns the first touch. A lazy node holds raw children; the first read wraps them (one level) and swaps the object to the
class without read overrides, so that later reads cost what a plain dict or list costs.
What always holds: no code outside the codec ever sees a raw child, except C code that only reads (and then sees equal
plain values).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex

from holdfast.codec.nodes.base import FLAT, Node
from holdfast.codec.nodes.dicts import TrackedDict
from holdfast.codec.nodes.lists import TrackedList

# A container longer than this is not wrapped whole for the sake of one element.
_WRAP_ALL_MAX = 64
# ... a dict not until so large a share of it was read one by one.
_READS_SHARE = 8


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
        if len(self) > _WRAP_ALL_MAX:
            value = dict.__getitem__(self, key)
            if type(value) in FLAT or (isinstance(value, Node) and value._parent is self):
                return value
            with self._doc.lock:
                if type(self) is LazyDict and self._reads * _READS_SHARE < len(self):
                    self._reads += 1
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
        doc = self._doc
        with doc.lock:
            if type(self) is LazyList:
                child = doc.child
                for at, value in enumerate(list.__iter__(self)):
                    if type(value) not in FLAT:
                        fresh = child(value, self, at, None)
                        if fresh is not value:
                            list.__setitem__(self, at, fresh)
                if self._tree is not None:
                    self._regrouped(self._tree.leaves)
                self.__class__ = TrackedList  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if len(self) > _WRAP_ALL_MAX and not isinstance(index, slice):
            value = list.__getitem__(self, index)
            if type(value) in FLAT or (isinstance(value, Node) and value._parent is self):
                return value
            with self._doc.lock:
                if type(self) is LazyList and self._reads < len(self):
                    at = self._index(index, "list index out of range")
                    if at and isinstance(list.__getitem__(self, at - 1), Node):
                        self._touch_around(at)
                        return list.__getitem__(self, index)
                    self._reads += 1
                    return self._child(at)
        self._touch()
        return list.__getitem__(self, index)

    def _touch_around(self, at: int) -> None:
        """Wrap the children of one leaf: whoever reads one after another pays less when neighbours come together."""
        doc = self._doc
        leaf = self._tree.leaf_at(at) if self._tree is not None else None
        start = leaf.start if leaf is not None else at - at % _WRAP_ALL_MAX
        stop = start + (leaf.count if leaf is not None else _WRAP_ALL_MAX)
        for index, value in enumerate(list.__getitem__(self, slice(start, stop)), start):
            if type(value) not in FLAT:
                fresh = doc.child(value, self, index, leaf)
                if fresh is not value:
                    list.__setitem__(self, index, fresh)
        self._reads += stop - start
        if self._reads >= len(self):
            self._touch()

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
