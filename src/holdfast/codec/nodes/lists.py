"""The tracked list.

Owns every way in which a list changes, and how a child is found again.
What always holds: a mutator takes in all its values before it changes anything; items that an operation puts back
are moved, so that whoever holds them holds the live ones.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, SupportsIndex

from holdfast.codec import operations as op
from holdfast.codec.blocks import LIST
from holdfast.codec.nodes.base import FLAT, Node, put_back, release
from holdfast.codec.trails import Trail
from holdfast.codec.trees import Leaf, Tree
from holdfast.errors import Stale

_get = list.__getitem__


class TrackedList(list[Any], Node):
    """A list inside a state."""

    __slots__ = ("_doc", "_key", "_leaf", "_parent", "_reads", "_tree", "_where")
    _kind = LIST
    _plain = list

    # -- its place in the tree ------------------------------------------------------------------------

    def _key_of(self, child: Node) -> int:
        # The index where it was last is a hint, and so is the leaf: both are checked.
        last = child._key
        if type(last) is int and last < len(self) and _get(self, last) is child:
            return last
        leaf = child._leaf
        if leaf is not None and self._tree is not None and leaf.count > 0:
            for index in range(leaf.start, min(leaf.start + leaf.count, len(self))):
                if _get(self, index) is child:
                    child._key = index
                    return index
        for index, item in enumerate(list.__iter__(self)):
            if item is child:
                child._key = index
                return index
        raise Stale("a list item is no longer where it was", hint="read it again from agent.state")

    def _digest(self) -> bytes:
        tree = self._tree or self._plant()
        self._check_told()  # C code such as heapq may have written into the list behind its back
        return tree.update(self._run, self._regrouped)

    def _told(self) -> int:
        last = self._tree.leaves[-1]  # type: ignore[union-attr] # only asked where there is one
        return last.start + last.count

    def _edited(self, key: int, depth: int) -> Trail | None:
        tree: Tree = self._tree  # type: ignore[assignment] # only asked where there is one
        leaf = tree.leaf_at(key)
        self._know(leaf)
        at = key - leaf.start
        tree.spoil(leaf, at)
        if leaf.now is None:
            return None
        trail = leaf.now[at]
        if type(trail) is bytes:
            trail = leaf.now[at] = Trail(trail, depth)
        return trail  # type: ignore[no-any-return]

    def _given(self, key: int, data: bytes) -> None:
        tree: Tree = self._tree  # type: ignore[assignment] # only asked where there is one
        leaf = tree.leaf_at(key)
        self._know(leaf)
        tree.spoil(leaf, key - leaf.start)
        if leaf.now is not None:
            leaf.now[key - leaf.start] = data

    def _now(self, leaf: Leaf, items: list[bytes]) -> list[Any]:  # noqa: ARG002 - a dict looks for its keys there
        return items.copy()

    def _run(self, leaf: Leaf) -> list[bytes]:
        now = leaf.now
        if now is not None:
            for at, item in enumerate(now):
                if type(item) is Trail:
                    index = leaf.start + at
                    now[at] = self._doc.resolved(item, self, _get(self, index))
            return now.copy()  # type: ignore[no-any-return]
        if leaf.items is not None and leaf.digest is not None:
            return leaf.items
        items = self._doc.pack_all(_get(self, slice(leaf.start, leaf.start + leaf.count - len(leaf.pending))))
        if not self._tree.proves(leaf, items):  # type: ignore[union-attr]
            self._doc.unproven(self)
        return items + leaf.pending

    def _regrouped(self, leaves: list[Leaf]) -> None:
        for leaf in leaves:
            for item in _get(self, slice(leaf.start, leaf.start + leaf.count)):
                if isinstance(item, Node):
                    item._leaf = leaf

    def _peek(self) -> list[Any]:
        return list.copy(self)

    def _items(self) -> Sequence[tuple[Any, Any]]:
        return list(enumerate(list.__iter__(self)))

    def _swap(self, key: int, child: Any) -> None:
        list.__setitem__(self, key, child)

    def _child(self, index: int) -> Any:
        """The child at ``index``, wrapped, without wrapping its siblings."""
        value = _get(self, index)
        if type(value) in FLAT:
            return value
        leaf = self._tree.leaf_at(index) if self._tree is not None else None
        fresh = self._doc.child(value, self, index, leaf)
        if fresh is not value:
            list.__setitem__(self, index, fresh)
        return fresh

    def _touch(self) -> None:
        """Its children are wrapped. A method of the lazy class may still be on its way here."""

    # -- the three ways in which a list changes ---------------------------------------------------------

    def append(self, value: Any) -> None:
        doc = self._doc
        with doc.lock:
            path = self._writable()
            size = len(self)
            doc.begin()
            taken, data = doc.take(value, self, size, path, ())
            self._changed(path)
            doc.commit()
            leaf = self._appended(data) if self._tree is not None else None
            list.append(self, taken if type(taken) in FLAT else doc.settle(taken, self, None, leaf))
            if path is not None:
                doc.record(op.SPLICE, path, size, 0, [data])
            doc.busy = doc.changing = None

    def _appended(self, data: bytes) -> Leaf:
        """The tree is told before the item is there."""
        tree: Tree = self._tree  # type: ignore[assignment] # only asked where there is one
        last = tree.leaves[-1]
        if last.hasher is None and last.count and not last.closed:
            self._know(last)
        leaf = tree.appended(data)
        if leaf.now is not None:
            leaf.now.append(data)
        return leaf

    def _replace(self, at: int, value: Any) -> None:
        """Set one item; the caller holds the lock."""
        doc = self._doc
        old = _get(self, at)
        if put_back(value, old):
            return
        path = self._writable()
        doc.begin()
        taken, data = doc.take(value, self, at, path, (old,))
        self._changed(path)
        doc.commit()
        leaf = None
        if self._tree is not None:
            self._given(at, data)
            leaf = self._tree.leaf_at(at)
        release(old, self)
        list.__setitem__(self, at, doc.settle(taken, self, None, leaf))
        if path is not None:
            doc.record(op.SET, [*path, at], data)
        doc.busy = doc.changing = None

    def _splice(self, start: int, removed: int, values: Sequence[Any]) -> None:
        """Replace ``removed`` items at ``start``; the caller holds the lock."""
        if not removed and not values:
            return
        doc = self._doc
        path = self._writable()
        old = _get(self, slice(start, start + removed))
        doc.begin()
        taken = [doc.take(value, self, at, path, old) for at, value in enumerate(values, start)]
        self._changed(path)
        doc.commit()
        if self._tree is not None:
            if start == len(self):
                for _, data in taken:
                    self._appended(data)
            else:
                self._spliced(start, removed, [data for _, data in taken])
        for item in old:
            release(item, self)
        list.__setitem__(self, slice(start, start + removed), [value for value, _ in taken])
        self._settle(range(start, start + len(taken)))
        if path is not None:
            doc.record(op.SPLICE, path, start, removed, [data for _, data in taken])
        doc.busy = doc.changing = None

    def _spliced(self, start: int, removed: int, encodings: list[bytes]) -> None:
        """The tree is told before the items are there."""
        tree: Tree = self._tree  # type: ignore[assignment] # only asked where there is one
        stop = start + removed
        for leaf in {id(leaf): leaf for leaf in (tree.leaf_at(start), tree.leaf_at(stop))}.values():
            if leaf.start <= start or leaf.start < stop < leaf.start + leaf.count:
                self._know(leaf)
        tree.spliced(start, removed, len(encodings), encodings)

    def _rearrange(self, sources: Sequence[int | tuple[Any]]) -> None:
        """Make the list of old indexes and of new values (each in a tuple of one); the caller holds the lock."""
        doc = self._doc
        path = self._writable()
        old = list.copy(self)
        staying = {source for source in sources if isinstance(source, int)}
        leaving = [item for at, item in enumerate(old) if at not in staying]
        doc.begin()
        items: list[Any] = []
        pieces: list[Any] = []
        fresh: dict[int, bytes] = {}
        for source in sources:
            if isinstance(source, int):
                items.append(old[source])
                op.add_piece(pieces, source)
            else:
                taken, data = doc.take(source[0], self, len(items), path, leaving)
                fresh[len(items)] = data
                items.append(taken)
                pieces.append([data])
        self._changed(path)
        doc.commit()
        if self._tree is not None:
            known = self._all_known()
            self._tree.reset(len(items))
            if known is not None:
                self._tree.leaves[0].now = [
                    known[source] if isinstance(source, int) else fresh[at] for at, source in enumerate(sources)
                ]
        for item in leaving:
            release(item, self)
        list.__setitem__(self, slice(None), items)
        self._settle(fresh)
        if path is not None:
            doc.record(op.ARRANGE, path, pieces)
        doc.busy = doc.changing = None

    def _all_known(self) -> list[Any] | None:
        """What all items are by the operations; None where that is not asked for."""
        found: list[Any] = []
        for leaf in self._tree.leaves:  # type: ignore[union-attr]
            self._know(leaf)
            if leaf.now is None:
                return None
            found += leaf.now
        return found

    def _settle(self, places: Iterable[int]) -> None:
        """Make children of what was just put there."""
        tree, settle = self._tree, self._doc.settle
        for at in places:
            value = _get(self, at)
            if type(value) not in FLAT:
                list.__setitem__(self, at, settle(value, self, None, tree.leaf_at(at) if tree is not None else None))

    # -- the mutators of a list -------------------------------------------------------------------------

    def extend(self, values: Iterable[Any]) -> None:
        incoming = list(values)  # outside the lock: it may wait for another thread
        with self._doc.lock:
            self._splice(len(self), 0, incoming)

    def __iadd__(self, values: Iterable[Any]) -> Self:  # type: ignore[misc]
        self.extend(values)
        return self

    def insert(self, index: SupportsIndex, value: Any) -> None:
        with self._doc.lock:
            self._splice(slice(operator.index(index), None).indices(len(self))[0], 0, [value])

    def pop(self, index: SupportsIndex = -1) -> Any:
        with self._doc.lock:
            at = self._index(index, "pop from empty list" if not self else "pop index out of range")
            value = self._child(at)
            self._splice(at, 1, [])
            return value

    def _index(self, index: SupportsIndex, message: str) -> int:
        at = operator.index(index)
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(message)
        return at

    def remove(self, value: Any) -> None:
        with self._doc.lock:
            try:
                at = list.index(self, value)
            except ValueError:
                raise ValueError("list.remove(x): x not in list") from None
            self._splice(at, 1, [])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._assign(index, value)
            return
        with self._doc.lock:
            self._replace(self._index(index, "list assignment index out of range"), value)

    def _assign(self, index: slice, values: Iterable[Any]) -> None:
        incoming = list(values)
        with self._doc.lock:
            start, stop, step = index.indices(len(self))
            plain = step == 1
            places = range(start, max(start, stop)) if plain else range(start, stop, step)
            if not plain and len(places) != len(incoming):
                msg = f"attempt to assign sequence of size {len(incoming)} to extended slice of size {len(places)}"
                raise ValueError(msg)
            sources = self._sources(places, incoming)
            if plain and not any(isinstance(source, int) for source in sources):
                self._splice(start, len(places), incoming)
            elif plain:
                self._rearrange([*range(start), *sources, *range(places.stop, len(self))])
            elif places:
                every: list[int | tuple[Any]] = list(range(len(self)))
                for at, source in zip(places, sources, strict=True):
                    every[at] = source
                self._rearrange(every)

    def _sources(self, places: range, incoming: list[Any]) -> list[int | tuple[Any]]:
        """For each incoming item the place that it comes from, or the item itself in a tuple."""
        free: dict[int, list[int]] = {}
        for at in reversed(places):
            item = _get(self, at)
            if type(item) not in FLAT:
                free.setdefault(id(item), []).append(at)
        if not free:
            return [(item,) for item in incoming]
        return [free[id(item)].pop() if free.get(id(item)) else (item,) for item in incoming]

    def __delitem__(self, index: Any) -> None:
        with self._doc.lock:
            if not isinstance(index, slice):
                self._splice(self._index(index, "list assignment index out of range"), 1, [])
                return
            places = range(len(self))[index]
            if not places:
                return
            if places.step == 1:
                self._splice(places.start, len(places), [])
            else:
                gone = set(places)
                self._rearrange([at for at in range(len(self)) if at not in gone])

    def __imul__(self, times: SupportsIndex) -> Self:
        count = operator.index(times)
        with self._doc.lock:
            if count <= 0:
                self.clear()
            elif count > 1:
                self.extend(list(self) * (count - 1))
        return self

    def clear(self) -> None:
        with self._doc.lock:
            self._splice(0, len(self), [])

    def reverse(self) -> None:
        with self._doc.lock:
            if len(self) > 1:
                self._rearrange(range(len(self) - 1, -1, -1))

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        with self._doc.lock:
            items = list(self)
            keys = items if key is None else [key(item) for item in items]
            order = sorted(range(len(items)), key=keys.__getitem__, reverse=reverse)
            if len(items) != len(self) or any(a is not b for a, b in zip(items, list.__iter__(self), strict=True)):
                raise ValueError("list modified during sort")
            if order != list(range(len(items))):
                self._rearrange(order)

    def __copy__(self) -> list[Any]:
        return self.copy()
