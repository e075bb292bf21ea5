"""Proof that instances are what they were when they were encoded, and that nobody but the state holds them.

Owns runs of values that are looked at together. A run follows its values down to immutable objects, a level at a time,
by the interpreter's own view of what refers to what (``gc.get_referents``): a dict gives its values, an instance its
``__dict__``, its slots and its class. ``unchanged``: every object on the way refers to the very same objects as then.
``unheld``: every object on the way has exactly the references that the state and this run account for.
What always holds: False is only a doubt; no proof rests on ``==`` of values (``1 == True``) or on the identity of
something mutable alone; no code of the values' classes runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import PyDLL, c_int, c_size_t, c_void_p, string_at
from gc import get_referents
from itertools import chain, compress
from operator import add, attrgetter, is_
from struct import pack
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

from holdfast.codec.classes import FIELDS, PYDANTIC, is_immutable
from holdfast.codec.types import Registry
from holdfast.codec.wire import SCALARS

RUN_ITEMS = 32
"""Values that are proven together. When one of them has changed, all of them are compared, so a run is short."""

# Where one container's content ends does not show, so a mark is asked for after each: what refers to a text that
# nobody else has.
_END = repr(object())
_MARK = (_END,)
_ATTRIBUTES = attrgetter("__dict__")


class Untraceable(Exception):
    """Something in the value cannot be proven unchanged."""


class Run:
    """Values that are proven together."""

    __slots__ = (
        "_counts",
        "_dicts",
        "_empty",
        "_flat",
        "_holders",
        "_keys",
        "_own",
        "_weak",
        "asleep",
        "due",
        "homes",
        "items",
        "misses",
        "spent",
    )

    def __init__(self, items: list[Any], registry: Registry) -> None:
        """Raises Untraceable."""
        self.items = items
        self.asleep = False
        self.homes: list[Any] = []  # the containers that hold them, while they are asleep
        self.spent = 0  # items that have left
        self.misses, self.due = 0, 0  # how often somebody held them, and when to look again
        self._counts: list[int] | None = None
        self._own: list[Any] = []  # once it was asked who holds them: the holders without marks
        self._weak: list[Any] = []  # then, those of them that can have weak references: most are dicts and lists
        self._dicts: list[dict[Any, Any]] = []
        self._empty: list[Any] = []
        holders: list[Any] = []
        flat: list[Any] = []
        self._follow(items, registry, holders, flat)
        self._holders = tuple(holders)
        self._flat = tuple(flat)
        self._keys = list(chain.from_iterable(self._dicts))

    def _follow(self, level: list[Any], registry: Registry, holders: list[Any], flat: list[Any]) -> None:
        """Go through everything that the items hold, a level at a time."""
        seen: set[int] = set()
        skip = _SKIPPED
        while level:
            ids = list(map(id, level))
            if len(set(ids)) != len(ids) or not seen.isdisjoint(ids):  # something is there twice, or leads back
                fresh = {key: value for key, value in zip(ids, level, strict=True) if key not in seen}
                ids, level = list(fresh), list(fresh.values())
            seen.update(ids)
            these: list[Any] = []
            groups: dict[type, list[Any]] = {}
            for value in level:
                kind = type(value)
                if kind is dict or kind is list or kind is set:
                    if not value:
                        self._empty.append(value)
                        continue
                    if kind is dict:
                        self._dicts.append(value)
                    these.append(value)
                    these.append(_MARK)
                elif kind is tuple:
                    if not skip.issuperset(map(type, value)):  # with what it holds, since somebody may hold it alone
                        these.append(value)
                        these.append(_MARK)
                elif kind in groups:
                    groups[kind].append(value)
                elif kind not in skip:
                    groups[kind] = [value]
            found = get_referents(*these)
            holders += these
            flat += found
            level = [value for value in found if type(value) not in skip]
            for kind, group in groups.items():
                level += self._instances(kind, group, registry, holders, flat)

    def _instances(
        self, kind: type, group: list[Any], registry: Registry, holders: list[Any], flat: list[Any]
    ) -> list[Any]:
        """Follow instances of one class, with their attributes; gives what is to be followed further."""
        if issubclass(kind, type):
            _SKIPPED.add(kind)  # classes, of any metaclass
            return []
        plan = _PLANS.get(kind) or _plan(kind, registry)
        if plan is _WHOLE or plan.frozen:
            group = [value for value in group if not is_immutable(value)]
            if not group:
                return []
            if plan is _WHOLE:
                raise Untraceable
        dicts = list(map(_ATTRIBUTES, group)) if plan.has_dict else []  # makes them, where they are not there yet
        found = get_referents(*group)
        if len(found) != plan.width * len(group):
            raise Untraceable  # a slot is empty, and would not show
        holders += group
        flat += found
        rest = self._columns(found, plan.width, dicts, holders, flat)
        if dicts:
            found = self._contents(dicts, holders, flat)
            rest += self._columns(found, len(dicts[0]) + 1, (), holders, flat)
        return rest

    def _columns(
        self, found: list[Any], width: int, known: Sequence[Any], holders: list[Any], flat: list[Any]
    ) -> list[Any]:
        """What is to be followed further of what instances of one class refer to.

        Each refers to as many objects as the others, mostly of the same types, so that whole columns need no look.
        ``known`` is a column that is followed already.
        """
        if len(found) == width:  # of one instance: what it holds is followed one by one, as anything else
            return [value for value in found if type(value) not in _SKIPPED and not (known and value is known[0])]
        rest: list[Any] = []
        for at in range(width):
            column = found[at::width]
            kinds = set(map(type, column))
            if kinds <= _SKIPPED or (dict in kinds and identical(column, known)):
                continue
            if not kinds <= _CONTAINERS:
                rest += [value for value in column if type(value) not in _SKIPPED]
            elif any(column):
                inner = self._contents(column, holders, flat)
                rest += [value for value in inner if type(value) not in _SKIPPED]
            else:
                self._empty += column
        return rest

    def _contents(self, containers: list[Any], holders: list[Any], flat: list[Any]) -> list[Any]:
        """What is in dicts, lists and sets, a mark after each."""
        marked: list[Any] = [_MARK] * (2 * len(containers))
        marked[::2] = containers
        found = get_referents(*marked)
        holders += marked
        flat += found
        self._dicts += [value for value in containers if type(value) is dict]
        return found

    def joined(self, other: Run) -> Run:
        """One run for the items of both, as they were then."""
        made = Run.__new__(Run)
        made.items = self.items + other.items
        made.asleep, made.spent, made.misses, made.due = False, self.spent + other.spent, self.misses, self.due
        made._counts, made._own, made._weak, made.homes = None, [], [], []
        made._holders, made._flat = self._holders + other._holders, self._flat + other._flat
        made._dicts, made._empty = self._dicts + other._dicts, self._empty + other._empty
        made._keys = self._keys + other._keys
        return made

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        if any(self._empty) or not identical(get_referents(*self._holders), self._flat):
            return False
        try:
            return list(chain.from_iterable(self._dicts)) == self._keys
        except RuntimeError:  # another thread is changing one of them
            return False

    def unheld(self, places: int = 2) -> bool:
        """Whether nobody else has a reference to any of it; each item is in as many places, nothing else in two.

        What holds others is asked before what it holds, so that whoever goes from one to the other meanwhile is seen;
        and references before weak ones, which nobody can make of what nobody has.
        """
        if not COUNTS:
            return False
        if self._counts is None:
            # Its parent, ``_flat``, ``_holders``, ``_own``, and what it takes to ask; of an item ``items`` and a place
            # instead of the first two; a dict is in ``_dicts``, others may be in ``_weak``. What is referred to twice
            # never fits.
            self._own = [value for value in self._holders if value is not _MARK]
            dicts = [type(value) is dict for value in self._own] + [False] * len(self._empty)
            self._own += self._empty
            weak = [type(value).__weakrefoffset__ != 0 for value in self._own]
            self._weak = list(compress(self._own, weak))
            self._counts = [_EXPECTED + more + also for more, also in zip(dicts, weak, strict=True)]
            if places > 1:
                heads = set(map(id, self.items))
                more = [(places - 1) * (key in heads) for key in map(id, self._own)]
                self._counts = list(map(add, self._counts, more))
        return list(map(getrefcount, self._own)) == self._counts and not any(map(getweakrefcount, self._weak))

    def claim(self) -> list[Any] | None:
        """The items, for somebody who shall have them alone; None unless they are as they were and nobody has them.

        Of two who claim them at once, each sees the other's list, so that at most one of them gets them. Nobody can
        change what nobody has, so that the second question is asked last.
        """
        mine = self.items.copy()
        return mine if self.unheld(1) and self.unchanged() else None


def identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two tuples or lists, which nobody changes meanwhile, hold the very same objects."""
    return len(one) == len(other) and begins_with(one, other)


def begins_with(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether the first objects of a tuple or list, which is not shorter, are the very same as those of another."""
    if len(other) < _FEW or not _ADDRESSES:
        return all(map(is_, one, other))
    one, other = tuple(one), tuple(other)  # a list has its addresses elsewhere, and where differs between Pythons
    return not _compare(id(one) + _FIRST, id(other) + _FIRST, len(other) * _POINTER_BYTES)


def run_of(items: list[Any], registry: Registry) -> Run | None:
    """A run over the items as they are now, or None when some part of them cannot be followed."""
    try:
        return Run(items, registry)
    except (Untraceable, AttributeError, RuntimeError):  # a slot that is not set; another thread is changing something
        return None


def can_change(value: Any) -> bool:
    """Whether a value has to be watched; quick for instances of classes that are known not to be frozen."""
    plan = _PLANS.get(type(value))
    return (plan is not None and plan is not _WHOLE and not plan.frozen) or not is_immutable(value)


class _Plan:
    """How instances of a class are followed: how many references each has."""

    __slots__ = ("frozen", "has_dict", "width")

    def __init__(self, width: int, *, has_dict: bool, frozen: bool) -> None:
        self.width, self.has_dict, self.frozen = width, has_dict, frozen


_WHOLE: Any = object()  # instances of a class that cannot be followed
_PLANS: dict[type, Any] = {}
_SKIPPED: set[type] = {*SCALARS, type}
_CONTAINERS = {dict, list, set}


def _plan(kind: type, registry: Registry) -> Any:
    registration = registry.by_type(kind)
    plan: Any = _WHOLE
    if registration is not None and registration.cls is kind and registration.save is None:
        shape = registration.shape
        if shape.form in {FIELDS, PYDANTIC}:
            # Its class, its attributes, its slots.
            width = 1 + shape.has_dict + (3 if shape.form == PYDANTIC else len(shape._getters))
            plan = _Plan(width, has_dict=shape.has_dict, frozen=shape.frozen)
    if registration is not None:
        _PLANS[kind] = plan
    return plan


COUNTS = sys.implementation.name == "cpython" and "t" not in sys.abiflags
"""Whether reference counts say who holds an object. Where they do not, nothing is ever believed to be unheld."""


def _measure() -> int:
    """What a list that only a list and a run hold has for a reference count, in the code above."""
    outer: Any = [[1]]
    run = Run.__new__(Run)
    run._holders, run._flat, run._own = (outer[0],), (outer[0],), [outer[0]]
    return list(map(getrefcount, run._own))[0]  # noqa: RUF015 - as it is counted above


_EXPECTED = _measure()

# Where a tuple begins to list the addresses of what it holds. Comparing these is ten times as fast as asking for each
# object whether it is another; whether they are found there is tried below.
_FEW = 32
_FIRST = tuple.__basicsize__
_POINTER_BYTES = tuple.__itemsize__
_compare = PyDLL(None).memcmp
_compare.argtypes, _compare.restype = (c_void_p, c_void_p, c_size_t), c_int


def _has_addresses() -> bool:
    pair = (_MARK, _END)
    return COUNTS and string_at(id(pair) + _FIRST, 2 * _POINTER_BYTES) == pack("PP", *map(id, pair))


_ADDRESSES = _has_addresses()
