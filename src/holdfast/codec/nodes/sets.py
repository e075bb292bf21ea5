"""The tracked set.

Owns every way in which a set changes. Its items are immutable, so reading needs no care.
What always holds: operations name the items that were in the set, not those that were asked for, because ``1``,
``True`` and ``1.0`` are the same to a set and different to the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.blocks import SET
from holdfast.codec.nodes.base import Node
from holdfast.codec.trees import Leaf, build


class TrackedSet(set[Any], Node):
    """A set inside a state."""

    __slots__ = ("_doc", "_key", "_leaf", "_parent", "_reads", "_tree", "_where")
    _kind = SET
    _plain = set

    def _encodings(self) -> dict[Any, bytes]:
        """Each item's encoding. Worked out once and then kept, since sorting needs them all at every digest."""
        if self._where is None or self._where.keys() != self:
            pack = self._doc.pack
            if self._where is not None:
                self._doc.distrust(self)  # C code has changed it
            self._where = {item: pack(item) for item in set.__iter__(self)}
            root = self._tree.root if self._tree is not None and not self._doc.replaying else None
            if root is not None and build(SET, sorted(self._where.values()))[0].root != root:
                self._doc.unproven(self)
        return self._where

    def _told(self) -> int:
        return self._tree.count()  # type: ignore[union-attr] # only asked where there is one

    def _digest(self) -> bytes:
        if self._tree is not None:
            self._encodings()  # what C code did shows there
            self._check_told()
        return super()._digest()

    def _run(self, leaf: Leaf) -> list[bytes]:
        items = sorted(self._encodings().values())
        return items[leaf.start : leaf.start + leaf.count] if leaf.digest is not None else items

    def _peek(self) -> set[Any]:
        return set(self)

    def _items(self) -> Sequence[tuple[Any, Any]]:
        return ()

    def _change(self, added: Iterable[Any], removed: Iterable[Any]) -> None:
        """The one way in which a set changes; the caller holds the lock."""
        doc = self._doc
        gone = [item for item in removed if item in self]
        fresh = [item for item in added if item not in self]
        if not gone and not fresh:
            return
        path = self._writable()
        new: dict[Any, bytes] = {}
        for item in fresh:
            if item not in new:
                new[item] = doc.take_item(item, path)
        encodings = self._encodings()
        self._changed(path)
        gone_data = [encodings.pop(item) for item in gone]
        encodings.update(new)
        set.difference_update(self, gone)
        set.update(self, new)
        if self._tree is not None:
            self._tree.reset(len(self))
        if path is not None:
            if gone_data:
                doc.record(op.REMOVE, path, gone_data)
            if new:
                doc.record(op.ADD, path, list(new.values()))
        doc.busy = doc.changing = None

    def add(self, item: Any) -> None:
        with self._doc.lock:
            self._change((item,), ())

    def discard(self, item: Any) -> None:
        with self._doc.lock:
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
                path = self._writable()
                self._changed(path)
                set.clear(self)
                self._where = None
                if self._tree is not None:
                    self._tree.reset(0)
                if path is not None:
                    self._doc.record(op.CLEAR, path)
                self._doc.busy = self._doc.changing = None

    def update(self, *others: Iterable[Any]) -> None:
        items = [item for other in others for item in other]
        with self._doc.lock:
            self._change(items, ())

    def difference_update(self, *others: Iterable[Any]) -> None:
        items = set().union(*others)
        with self._doc.lock:
            self._change((), items)

    def intersection_update(self, *others: Iterable[Any]) -> None:
        kept = [set(other) for other in others]
        with self._doc.lock:
            self._change((), set(self) - set(self).intersection(*kept))

    def symmetric_difference_update(self, other: Iterable[Any]) -> None:
        items = set(other)
        with self._doc.lock:
            self._change(items - self, items & self)

    def _in_place(self, method: Callable[[Any], None], other: Any) -> Any:
        if not isinstance(other, set | frozenset):
            return NotImplemented
        method(other)
        return self

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        return self._in_place(self.update, other)

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self._in_place(self.difference_update, other)

    def __iand__(self, other: Any) -> Any:  # type: ignore[misc]
        return self._in_place(self.intersection_update, other)

    def __ixor__(self, other: Any) -> Any:  # type: ignore[misc]
        return self._in_place(self.symmetric_difference_update, other)

    def __repr__(self) -> str:
        return repr(set(self))

    def copy(self) -> set[Any]:
        return set(self)

    def __copy__(self) -> set[Any]:
        return set(self)
