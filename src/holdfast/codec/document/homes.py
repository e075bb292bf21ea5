"""Which container a handed-out value belongs to, while one operation takes values in.

Owns the answer for values that more than one container may hold: one that moved is still in the container that it
left, when that was detached by the same operation. Must not change anything. What always holds: a value has one home,
so that it is never in two places of the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.codec.document.handouts import Handouts
from holdfast.codec.document.packing import RAW, Packing
from holdfast.codec.document.sections import Section
from holdfast.codec.nodes import FLAT, Node
from holdfast.codec.values import is_immutable


class Homes:
    """The homes of one document's handed-out values. What it found holds until ``forget``."""

    def __init__(self, packing: Packing, handouts: Handouts) -> None:
        self._snapshots = packing.snapshots
        self._handouts = handouts
        self.forget()

    def forget(self) -> None:
        """An operation is over: containers hold other things now."""
        self._searched: Any = None
        self._found: dict[int, Node] = {}
        self._contents: dict[int, set[int]] = {}  # container -> the values in it

    def __bool__(self) -> bool:
        return bool(self._snapshots or self._found)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._snapshots or id(value) in self._found

    def of(self, value: Any) -> Any:
        """The container or section that a handed-out value belongs to; None for any other value."""
        found = self._found.get(id(value))
        if found is not None:
            return found
        snapshot = self._snapshots.get(id(value))
        return snapshot.holder if snapshot is not None else None

    def search(self, leaving: Iterable[Any], holder: Any) -> None:
        """Find the values in what a detached container is about to lose.

        Snapshots do not tell: a checkpoint gives them up while their container is detached.
        """
        if leaving is self._searched:
            return
        self._searched = leaving
        for item in leaving:
            self._search(item, holder)

    def _search(self, item: Any, holder: Any) -> None:
        if isinstance(item, Node):
            if item._parent is holder:
                for _, child in item._items():
                    self._search(child, item)
        elif may_be_handed_out(item) and not self.elsewhere(item, holder):
            self._found[id(item)] = holder

    def elsewhere(self, value: Any, holder: Any) -> bool:
        """Whether a value that ``holder`` has in it belongs to another container."""
        snapshot = self._snapshots.get(id(value))
        if snapshot is None or snapshot.holder is holder:
            return False
        home = snapshot.holder
        if isinstance(home, Section):
            return self._handouts.place(value, home) is not None
        inside = self._contents.get(id(home))
        if inside is None:
            inside = self._contents[id(home)] = {id(item) for _, item in home._items()}
        return id(value) in inside


def may_be_handed_out(value: Any) -> bool:
    """Whether a child is of a kind that user code can change without telling."""
    return type(value) not in FLAT and type(value) not in RAW and not is_immutable(value)
