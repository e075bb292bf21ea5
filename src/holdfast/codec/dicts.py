"""Tracked dicts.

Owns how a dict marks its changes. Lazy and guarded ones are as for lists. Views and their iterators read later, without
asking, so dicts with instances in them give views of their own; where others may be about, a dict is *open*.
"""

from __future__ import annotations

from collections.abc import ItemsView, ValuesView
from itertools import islice
from typing import Any

from holdfast.codec.blocks import DICT
from holdfast.codec.tracked import GONE, SLOTS, WRAP_ALL_MAX, DictMarks, Node, change, locked, reading
from holdfast.codec.wire import SCALARS


class TrackedDict(dict[Any, Any], Node):
    """A dict that marks its changes."""

    __slots__ = SLOTS
    _kind, _Marks, _plain = DICT, DictMarks, dict

    # -- changes --------------------------------------------------------------------------------------------

    @change
    def _put_one(self, intake: Any, key: Any, value: Any) -> None:
        there = key in self
        if type(key) is not str and not there:
            intake.check_key(key, self)
        leaving = (dict.__getitem__(self, key),) if there else ()
        flat = type(value) in SCALARS
        taken, data = (value, None) if flat else intake.take(value, self, key, leaving)
        marks = self._marks
        if marks is not None and marks is not True:
            marks.keys.setdefault(key, False)
            if data is not None:
                marks.given[key] = data
            elif marks.given:
                marks.given.pop(key, None)
        dict.__setitem__(self, key, taken)
        if leaving:
            if flat:
                intake.detach(self, leaving)
            else:
                intake.left(leaving, (taken,))

    @change
    def _put_all(self, intake: Any, pairs: dict[Any, Any]) -> None:
        for key in pairs:
            if type(key) is not str and key not in self:
                intake.check_key(key, self)
        leaving = [dict.__getitem__(self, key) for key in pairs if key in self]
        taken, datas = intake.take_all(list(pairs.values()), self, pairs, leaving)
        marks = self._marks
        if marks is not None and marks is not True:
            for key, data in zip(pairs, datas, strict=True):
                marks.keys.setdefault(key, False)
                if data is None:
                    marks.given.pop(key, None)
                else:
                    marks.given[key] = data
        for key, value in zip(pairs, taken, strict=True):
            dict.__setitem__(self, key, value)
        intake.left(leaving, taken)

    @change
    def _drop(self, intake: Any, key: Any) -> None:
        leaving = dict.__getitem__(self, key)
        marks = self._marks
        if marks is not None and marks is not True:
            marks.keys[key] = True
            marks.given.pop(key, None)
        dict.__delitem__(self, key)
        intake.detach(self, (leaving,))

    @change
    def _empty(self, intake: Any) -> None:
        leaving = list(dict.values(self))
        self._doubt()
        dict.clear(self)
        intake.detach(self, leaving)

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(value) not in SCALARS and dict.get(self, key, GONE) is value:
            return  # put back, as after d["x"] += [1]
        self._put_one(key, value)

    @locked
    def __delitem__(self, key: Any) -> None:
        self._drop(key)

    @locked
    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return dict.pop(self, key, *default)
        value = self._child(key)
        self._drop(key)
        return value

    @locked
    def popitem(self) -> Any:
        key = next(dict.__reversed__(self), GONE)
        if key is GONE:
            return dict.popitem(self)
        value = self._child(key)
        self._drop(key)
        return key, value

    @locked
    def clear(self) -> None:
        if self:
            self._empty()

    @locked
    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self._put_one(key, default)
        return self._child(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        incoming = dict(*args, **kwargs)
        with self._doc.lock:
            if incoming:
                self._put_all(incoming)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    # -- reading --------------------------------------------------------------------------------------------

    fromkeys = dict.fromkeys  # gives a plain dict

    # -- children -------------------------------------------------------------------------------------------

    def _see_reads(self) -> None:
        """An instance that nobody has read comes in. A view that was taken before reads without asking."""
        self.__class__ = OpenDict if self and not self._lazy else LazyDict

    def _kid(self, child: Any, at: Any = GONE) -> None:
        marks = self._mark()
        if marks is True:
            return
        at = child._at if isinstance(child, Node) else at
        if at is not GONE and dict.get(self, at, GONE) is child:
            marks.keys.setdefault(at, False)
            marks.given.pop(at, None)
            return
        for key, value in dict.items(self):
            if value is child:
                if isinstance(child, Node):
                    child._at = key
                marks.keys.setdefault(key, False)
                marks.given.pop(key, None)

    def _child(self, key: Any) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) in SCALARS:
            return value
        seen = self._doc.seen(value, self, key)
        if seen is not value:
            dict.__setitem__(self, key, seen)
        return seen

    def _pairs(self) -> Any:
        return list(zip(dict.keys(self), dict.values(self), strict=True))

    def _swap(self, key: Any, child: Any) -> None:
        dict.__setitem__(self, key, child)

    def _peek(self) -> dict[Any, Any]:
        return dict(zip(dict.keys(self), dict.values(self), strict=True))

    def _holds(self, child: Any) -> bool:
        if dict.get(self, child._at, GONE) is child:
            return True
        return any(one is child for one in dict.values(self))

    def _last(self, count: int) -> list[Any]:
        """The newest keys."""
        return list(islice(dict.__reversed__(self), count))[::-1]


class LazyDict(TrackedDict):
    """A dict with raw children, or with instances that nobody has read yet."""

    __slots__ = ()
    _lazy = _raw = True

    def _touch(self) -> None:
        with self._doc.lock:
            if type(self) is LazyDict:
                keys = list(dict.keys(self))
                seen, instances = self._doc.seen_all(list(dict.values(self)), self, keys)
                for key, value in zip(keys, seen, strict=True):
                    dict.__setitem__(self, key, value)
                self.__class__ = GuardedDict if instances else TrackedDict  # type: ignore[assignment]

    def __getitem__(self, key: Any) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) in SCALARS or (isinstance(value, Node) and value._up is self):
            return value
        if len(self) <= WRAP_ALL_MAX:
            self._touch()
        with self._doc.lock:
            return self._child(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is get, and [] wraps

    def __iter__(self) -> Any:
        # Overridden so that C code which copies this dict asks __getitem__ and never sees raw children.
        return dict.__iter__(self)

    def items(self) -> Any:
        self._touch()
        return TrackedItems(self) if self._lazy else dict.items(self)

    def values(self) -> Any:
        self._touch()
        return TrackedValues(self) if self._lazy else dict.values(self)

    copy, __or__, __ror__ = (reading(dict, name) for name in ("copy", "__or__", "__ror__"))


class GuardedDict(LazyDict):
    """A dict whose children were all seen, some of them instances."""

    __slots__ = ()
    _raw = False

    def _touch(self) -> None:
        with self._doc.lock:
            self._doc.watches.wake_all(self)


class OpenDict(GuardedDict):
    """A guarded dict that others may read without being seen: its instances never sleep."""

    __slots__ = ()
    _open = True

    def _see_reads(self) -> None:
        """They are all watched from the start."""


def wrap_dict(raw: dict[Any, Any], doc: Any, up: Any, at: Any = None) -> TrackedDict:
    """A tracked dict with the content of a raw one, which is the document's own."""
    node = TrackedDict(raw)  # before anybody looks at the values one by one: the copy fetches them all at once
    for value in raw.values():  # most have few, and a set of their types costs more than this
        if type(value) not in SCALARS:
            node.__class__ = LazyDict
            break
    node._doc, node._up, node._at = doc, up, at
    node._told = node._marks = None
    return node


class _Seen:
    """A view whose iterators are known to the document as long as they are in use."""

    _mapping: Any
    _plain: Any  # the view of a plain dict

    def __iter__(self) -> Any:
        self._mapping._touch()
        return self._mapping._doc.watches.given(self._mapping, iter(self._plain(self._mapping)))

    def __reversed__(self) -> Any:
        self._mapping._touch()
        return self._mapping._doc.watches.given(self._mapping, reversed(self._plain(self._mapping)))


class TrackedItems(_Seen, ItemsView[Any, Any]):
    """``items()`` of a tracked dict."""

    _plain = staticmethod(dict.items)


class TrackedValues(_Seen, ValuesView[Any]):
    """``values()`` of a tracked dict."""

    _plain = staticmethod(dict.values)
