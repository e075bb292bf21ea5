"""Tracked lists.

Owns how a list marks its changes. A *lazy* list holds raw children, and its reads wrap them; a *guarded* one holds
instances, and its reads wake them (see ``watches``). The class without read overrides is for lists that need not see
reads; an object becomes another class when it can.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from operator import is_
from typing import Any, SupportsIndex

from holdfast.codec.blocks import LIST
from holdfast.codec.dicts import wrap_dict
from holdfast.codec.tracked import GONE, SLOTS, WRAP_ALL_MAX, ListMarks, Node, change, locked, reading
from holdfast.codec.wire import SCALARS, collector_paused

# A child that is not where it was is looked for so near first.
_NEAR = 32


_Carried = tuple[int, list[Any], dict[int, int]]
"""How many changes there were, the items, and by the ids of children where they were told to be."""


def _rare(name: str) -> Any:
    """A mutator that is done on a plain copy; what it made of it becomes the content."""
    method = getattr(list, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._doc.lock:
            self._touch()
            before = list.copy(self)
            plain = before.copy()
            found = method(plain, *args, **kwargs)
            if name == "sort" and (len(self) != len(before) or _alike(self, before) != len(before)):
                raise ValueError("list modified during sort")
            self._become(plain)
            return self if found is plain else found

    call.__name__ = name
    return call


class TrackedList(list[Any], Node):
    """A list that marks its changes."""

    __slots__ = SLOTS
    _kind, _Marks, _plain = LIST, ListMarks, list

    # -- changes --------------------------------------------------------------------------------------------

    @change
    def append(self, intake: Any, value: Any) -> None:
        taken, data = (value, None) if type(value) in SCALARS else intake.take(value, self, len(self))
        marks = self._marks
        if marks is not None and marks is not True:
            marks.appended(len(self), data)
        list.append(self, taken)

    @change
    def _splice(self, intake: Any, start: int, stop: int, incoming: list[Any], carried: _Carried | None = None) -> None:
        leaving = list.__getitem__(self, slice(start, stop))
        taken, datas = intake.take_all(incoming, self, range(start, start + len(incoming)), leaving)
        self._mark_splice(intake, start, stop, datas, carried)
        list.__setitem__(self, slice(start, stop), taken)
        intake.left(leaving, taken)

    @change
    def _permute(self, intake: Any, start: int, items: list[Any], carried: _Carried | None) -> None:
        """Be the same items from ``start`` on, in another order."""
        self._mark_splice(intake, start, start + len(items), [None] * len(items), carried)
        list.__setitem__(self, slice(start, start + len(items)), items)
        for at, child in enumerate(items, start):
            if isinstance(child, Node):
                child._at = at
            elif type(child) not in SCALARS:
                self._moved_to(child, at)

    def _mark_splice(
        self, intake: Any, start: int, stop: int, datas: list[bytes | None], carried: _Carried | None
    ) -> None:
        marks = self._marks
        if marks is None or marks is True:
            return
        marks.held = marks.carried = None
        if carried is not None and not marks.regions and not marks.kids and intake.changes == carried[0] + 1:
            _, marks.held, marks.carried = carried  # nothing happened in between
        marks.spliced(len(self), start, stop - start, datas)

    def _become(self, items: list[Any]) -> None:
        """Be these items; those at the front and at the end that are the very same objects are not touched."""
        old, told, marks, carried = list.copy(self), self._told, self._marks, None
        if told is not None and (marks is None or marks.empty) and len(old) == told.count:
            # So far all is as it was told. C code may have moved a child past the methods: then its hint is another.
            places = {id(child): at for at, child in enumerate(old) if isinstance(child, Node) and child._at == at}
            carried = self._doc.intake.changes, old, places
        start = _alike(old, items)
        end = _alike(old[: start - 1 if start else None : -1], items[: start - 1 if start else None : -1])
        stop = len(old) - end
        incoming = items[start : len(items) - end]
        here = set(map(id, incoming))
        if len(here) == len(incoming) == stop - start and not here.difference(map(id, old[start:stop])):
            self._permute(start, incoming, carried)
        else:
            self._splice(start, stop, incoming, carried)

    def extend(self, values: Iterable[Any]) -> None:
        incoming = list(values)
        with self._doc.lock:
            self._splice(len(self), len(self), incoming)

    def __iadd__(self, values: Iterable[Any]) -> Any:  # type: ignore[misc]
        self.extend(values)
        return self

    @locked
    def insert(self, index: SupportsIndex, value: Any) -> None:
        at = slice(operator.index(index), None).indices(len(self))[0]
        self._splice(at, at, [value])

    @locked
    def pop(self, index: SupportsIndex = -1) -> Any:
        if not -len(self) <= operator.index(index) < len(self):
            list.pop(self, index)  # raises what a list raises
        at = range(len(self))[operator.index(index)]
        value = self._child(at)
        self._splice(at, at + 1, [])
        return value

    @locked
    def remove(self, value: Any) -> None:
        at = list.index(self, value)
        self._splice(at, at + 1, [])

    @locked
    def clear(self) -> None:
        self._splice(0, len(self), [])

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(index, slice):
            with self._doc.lock:
                at = self._index(index)
                if list.__getitem__(self, at) is value and type(value) not in SCALARS:
                    return  # put back, as after l[0] += [1]
                self._splice(at, at + 1, [value])
            return
        incoming = list(value)
        with self._doc.lock:
            plain = list.copy(self)
            plain[index] = incoming
            self._become(plain)

    @locked
    def __delitem__(self, index: Any) -> None:
        if isinstance(index, slice):
            plain = list.copy(self)
            del plain[index]
            self._become(plain)
        else:
            at = self._index(index)
            self._splice(at, at + 1, [])

    sort, reverse, __imul__ = map(_rare, ("sort", "reverse", "__imul__"))

    def _index(self, index: SupportsIndex) -> int:
        try:
            return range(len(self))[operator.index(index)]
        except IndexError:
            raise IndexError("list assignment index out of range") from None

    # -- reading --------------------------------------------------------------------------------------------

    # An iterator reads later, without asking: the document knows those that may be in use.

    def __iter__(self) -> Any:
        return self._doc.watches.given(self, list.__iter__(self))

    def __reversed__(self) -> Any:
        return self._doc.watches.given(self, list.__reversed__(self))

    # -- children -------------------------------------------------------------------------------------------

    def _see_reads(self) -> None:
        """An instance that nobody has read comes in."""
        self.__class__ = LazyList

    def _kid(self, child: Any, at: Any = GONE) -> None:
        marks = self._mark()
        if marks is not True:
            marks.kids[id(child)] = (child, at)

    def _child(self, at: int) -> Any:
        """What user code may see of an item."""
        value = list.__getitem__(self, at)
        if type(value) in SCALARS:
            return value
        seen = self._doc.seen(value, self, at)
        if seen is not value:
            list.__setitem__(self, at, seen)
        return seen

    def _pairs(self) -> Any:
        return enumerate(list.__iter__(self))

    def _swap(self, at: int, child: Any) -> None:
        list.__setitem__(self, at, child)

    def _peek(self) -> list[Any]:
        return list.copy(self)

    def _holds(self, child: Any) -> bool:
        at = child._at
        if type(at) is int and 0 <= at < len(self) and list.__getitem__(self, at) is child:
            return True
        return bool(self._find({0: (child, at)}))

    def _find(self, kids: dict[int, Any]) -> list[int]:
        """Where children stand: where each was last, or near it, or anywhere."""
        found: list[int] = []
        lost: dict[int, Any] = {}
        get, size = list.__getitem__, len(self)
        for child, hint in kids.values():
            at = child._at if isinstance(child, Node) else hint
            if type(at) is int:
                if 0 <= at < size and get(self, at) is child:
                    found.append(at)
                    continue
                low = max(0, at - _NEAR)
                near = [index for index, one in enumerate(get(self, slice(low, at + _NEAR)), low) if one is child]
                if near:
                    found.append(near[0])
                    self._moved_to(child, near[0])
                    continue
            lost[id(child)] = child
        if lost:
            for at, child in enumerate(list.__iter__(self)):
                if id(child) in lost:
                    found.append(at)
                    self._moved_to(child, at)
        return found

    def _moved_to(self, child: Any, at: int) -> None:
        if isinstance(child, Node):
            child._at = at
        else:
            self._doc.watches.at(child, at)


class LazyList(TrackedList):
    """A list with raw children, or with instances that nobody has read yet."""

    __slots__ = ()
    _lazy = _raw = True

    def _touch(self) -> None:
        with self._doc.lock:
            if type(self) is LazyList:
                with collector_paused():
                    seen, instances = self._doc.seen_all(list.copy(self), self)
                list.__setitem__(self, slice(None), seen)
                self.__class__ = GuardedList if instances else TrackedList  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int and isinstance(index, slice):
            with self._doc.lock:
                return [self._child(at) for at in range(len(self))[index]]
        value = list.__getitem__(self, index)
        if type(value) is not dict and (type(value) in SCALARS or (isinstance(value, Node) and value._up is self)):
            return value
        if len(self) <= WRAP_ALL_MAX:
            self._touch()
        doc = self._doc
        with doc.lock:
            value = list.__getitem__(self, index)
            at = index if type(index) is int and index >= 0 else range(len(self))[index]
            if type(value) is not dict:
                return self._child(at)
            node = wrap_dict(value, doc, self, at)
            list.__setitem__(self, at, node)
            return node

    copy, __add__, __mul__, __rmul__ = (reading(list, name) for name in ("copy", "__add__", "__mul__", "__rmul__"))

    def __iter__(self) -> Any:
        self._touch()
        return TrackedList.__iter__(self)

    def __reversed__(self) -> Any:
        self._touch()
        return TrackedList.__reversed__(self)

    def __radd__(self, other: Any) -> Any:
        # Python asks this first when a plain list is on the left, before C code could copy raw children.
        self._touch()
        return list.__add__(other, self) if isinstance(other, list) else NotImplemented


class GuardedList(LazyList):
    """A list whose children were all seen, some of them instances."""

    __slots__ = ()
    _raw = False

    def _touch(self) -> None:
        with self._doc.lock:
            self._doc.watches.wake_all(self)


def _alike(one: list[Any], other: list[Any]) -> int:
    """How many items at the front are the very same objects."""
    same = list(map(is_, list.__iter__(one), list.__iter__(other)))
    return same.index(False) if False in same else len(same)
