"""Tracked sets. Their items cannot change, so only what comes and goes is marked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.codec.blocks import SET
from holdfast.codec.marks import GONE, SetMarks
from holdfast.codec.node import SLOTS, Node, change, locked


def _rare(name: str, *, same: bool = False) -> Any:
    """A mutator that is done on a plain copy. ``same``: an operator, which takes sets only and gives the set itself."""
    method = getattr(set, name)

    def call(self: Any, *others: Any) -> Any:
        if not same:
            others = tuple([other if isinstance(other, set | frozenset) else set(other) for other in others])
        with self._doc.lock:
            plain = set(self)
            if method(plain, *others) is NotImplemented:
                return NotImplemented
            self._alter(plain - self, self - plain)
            return self if same else None

    call.__name__ = name
    return call


class TrackedSet(set[Any], Node):
    """A set that marks its changes."""

    __slots__ = SLOTS
    _kind, _Marks, _plain = SET, SetMarks, set

    @change
    def _alter(self, intake: Any, added: Iterable[Any], removed: Iterable[Any]) -> None:
        for item in added:
            intake.check_item(item, self)
        marks = self._marks
        if marks is not True:
            for item in removed:
                marks.items[item] = GONE
            for item in added:
                marks.items[item] = item
        set.difference_update(self, removed)
        set.update(self, added)

    @locked
    def add(self, item: Any) -> None:
        if item not in self:
            self._alter((item,), ())

    @locked
    def discard(self, item: Any) -> None:
        if item in self:
            self._alter((), (item,))

    @locked
    def remove(self, item: Any) -> None:
        if item not in self:
            raise KeyError(item)
        self._alter((), (item,))

    @locked
    def pop(self) -> Any:
        for item in self:
            self._alter((), (item,))
            return item
        return set.pop(self)

    @locked
    def clear(self) -> None:
        self._alter((), set(self))

    update, difference_update, intersection_update, symmetric_difference_update = map(
        _rare, ("update", "difference_update", "intersection_update", "symmetric_difference_update")
    )
    __ior__, __isub__, __iand__, __ixor__ = (
        _rare(name, same=True) for name in ("__ior__", "__isub__", "__iand__", "__ixor__")
    )

    def copy(self) -> set[Any]:
        return set(self)

    def __repr__(self) -> str:
        return repr(set(self))

    def _pairs(self) -> Any:
        return ()

    def _peek(self) -> set[Any]:
        return set(self)

    def _holds(self, child: Any) -> bool:  # noqa: ARG002 - a set has no containers in it
        return False
