"""Proof that values which were encoded before would still encode to the same bytes, at the speed of C.

Owns traces: for a run of items, every mutable object that their encoding depends on, and what each of them referred to.
Must not know bytes, sections or storage. What always holds: a proof is made of identities of immutable objects and of
the containers in between, never of equality (``1 == True``) and never of the identity of something mutable alone;
what cannot be traced has no proof, and no code of the values' classes runs.

The interpreter's own view of what an object refers to (``gc.get_referents``) goes through lists, dicts, sets and
instances alike: a dict gives its values, an instance its ``__dict__``, its slots and its class. Where one container
ends and the next begins does not show, so a mark is asked for after each. It gives no keys where all of them are exact
strings, so those are compared beside it. A dict that gets a key of any other type from then on gives its keys as well,
which shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_void_p, sizeof, string_at
from gc import get_referents
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

from holdfast.codec.codes import SCALARS
from holdfast.codec.immutable import is_immutable
from holdfast.codec.shapes import FIELDS, PYDANTIC, Shape
from holdfast.codec.types import Registry

# Items that are traced together. When one of them has changed, all of them are encoded again, so a run is short; a
# list of a thousand messages still takes few steps to check.
RUN_ITEMS = 32
# Runs are joined up to this many containers, so that appending item by item does not leave a thousand runs.
RUN_HOLDERS = 640  # marks included
# Items without anything mutable in them cost next to nothing to encode again.
FLAT_RUN_ITEMS = 4096
_TEXT = frozenset({str})
# What stands after each container's content: a text that nobody else has, and what refers to nothing but it.
_END = repr(object())
_MARK = (_END,)


class Untraceable(Exception):
    """Something in the value cannot be proven unchanged."""


def identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the very same objects: ``is`` for each pair, ten times as fast where it can be."""
    return len(one) == len(other) and (
        _references(one) == _references(other) if _REFERENCES else all(map(is_, one, other))
    )


def _references(held: tuple[Any, ...]) -> bytes:
    """What a tuple's memory holds: the address of each item, which is its id."""
    return string_at(id(held) + tuple.__basicsize__, len(held) * _POINTER_BYTES)


def _has_references() -> bool:
    """Whether tuples are laid out so in this interpreter. The sizes are there to be asked for, so a look is safe."""
    probe = (None, "text", (), 2**70)
    if (tuple.__itemsize__, sys.getsizeof(probe) - sys.getsizeof(())) != (_POINTER_BYTES, len(probe) * _POINTER_BYTES):
        return False
    return _references(probe) == b"".join(id(item).to_bytes(_POINTER_BYTES, sys.byteorder) for item in probe)


_POINTER_BYTES = sizeof(c_void_p)
_REFERENCES = sys.implementation.name == "cpython" and _has_references()


class Trace:
    """A run of items, and what must be as it was for them to be unchanged."""

    __slots__ = ("_dicts", "_empty", "_flat", "_holders", "_keys", "instances", "items", "spent")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.instances: set[int] = set()  # ids of the mutable instances inside; they live as long as the trace
        self.spent = 0  # items that were replaced since; what they held is still compared, to no purpose
        self._holders: tuple[Any, ...] = ()
        self._flat: tuple[Any, ...] = ()  # what the holders refer to, one after another
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._empty: list[Any] = []

    def unchanged(self) -> bool:
        """Whether everything is as it was. False is only a doubt."""
        if any(self._empty) or not identical(tuple(get_referents(*self._holders)), self._flat):
            return False
        try:
            return list(chain.from_iterable(self._dicts)) == self._keys
        except RuntimeError:  # another thread is changing one of them
            return False

    def fits(self, other: Trace) -> bool:
        """Whether the two are short enough to be one."""
        return (
            len(self._holders) + len(other._holders) <= RUN_HOLDERS
            and len(self.items) + len(other.items) <= FLAT_RUN_ITEMS
        )

    def join(self, other: Trace) -> Trace:
        """One trace for the items of both."""
        joined = Trace([*self.items, *other.items])
        joined.spent = self.spent + other.spent
        return joined._with(self, other)

    def patched(self, holes: list[int], other: Trace) -> Trace:
        """A trace of the same items, but with those of ``other`` in some places."""
        items = self.items.copy()
        for hole, item in zip(holes, other.items, strict=True):
            items[hole] = item
        made = Trace(items)
        made.spent = self.spent + len(holes)
        return made._with(self, other)

    def _with(self, one: Trace, other: Trace) -> Trace:
        self.instances = one.instances | other.instances
        for name in ("_holders", "_flat", "_dicts", "_keys", "_empty"):
            setattr(self, name, getattr(one, name) + getattr(other, name))
        return self

    # -- making one -----------------------------------------------------------------------------------------

    def follow(self, registry: Registry) -> None:
        """Go through everything that the items hold, a level at a time. Raises Untraceable."""
        seen: set[int] = set()  # ids, which stay valid: what is traced is held, directly or by what holds it
        level: list[Any] = self.items
        while level:
            kinds: dict[type, list[Any]] = {}
            for value in level:
                kind = type(value)
                if kind not in SCALARS and id(value) not in seen:
                    seen.add(id(value))
                    if kind in kinds:
                        kinds[kind].append(value)
                    else:
                        kinds[kind] = [value]
            level = []
            for kind, group in kinds.items():
                level += self._group(kind, group, registry)

    def _group(self, kind: type, group: list[Any], registry: Registry) -> Iterable[Any]:
        """Trace values of one type; returns what they hold."""
        if kind is dict:
            return self._dicts_of(group)
        if kind is list:
            return self._sequences(group)
        if kind is tuple:
            return chain.from_iterable(group)
        if kind is set:
            if not all(type(item) in SCALARS or is_immutable(item) for item in self._sequences(group)):
                raise Untraceable
            return ()
        registration = registry.by_type(kind)
        if registration is not None and registration.cls is kind and registration.save is None:
            shape = registration.shape
            if shape.form in {FIELDS, PYDANTIC}:
                mutable = [value for value in group if not is_immutable(value)] if shape.frozen else group
                return self._instances(mutable, shape) if mutable else ()
        if not all(map(is_immutable, group)):
            raise Untraceable
        return ()

    def _sequences(self, group: list[Any]) -> list[Any]:
        holders = self._bounded(group)
        found = get_referents(*holders)
        self._holders += holders
        self._flat += tuple(found)
        return found

    def _bounded(self, group: list[Any]) -> tuple[Any, ...]:
        """The containers that are not empty, each with a mark after it; the empty ones are noted."""
        full: list[Any] = []
        for value in group:
            (full if value else self._empty).append(value)
        return tuple(chain.from_iterable(zip(full, repeat(_MARK))))

    def _dicts_of(self, group: list[dict[Any, Any]]) -> list[Any]:
        holders = self._bounded(group)
        full: tuple[dict[Any, Any], ...] = holders[::2]
        keys = list(chain.from_iterable(full))
        values: list[Any] = []
        for value in full:
            values += value.values()
            values.append(_END)
        found = get_referents(*holders)
        if len(found) == len(values) == len(keys) + len(full) and all(map(is_, found, values)):
            if not _TEXT.issuperset(map(type, keys)):
                raise Untraceable  # an interpreter that works in another way
            self._dicts += full
            self._keys += keys
        elif len(full) > 1:
            # Some of them give their keys, too.
            return list(chain.from_iterable([self._dicts_of([value]) for value in full]))
        elif not (
            len(found) - 1 == 2 * len(keys) == 2 * (len(values) - 1)
            and all(map(is_, found[:-1:2], values))
            and all(map(is_, found[1::2], keys))
            and all(type(key) in SCALARS or is_immutable(key) for key in keys)
        ):
            raise Untraceable  # the interpreter keeps values in another order than keys, or another thread was here
        self._holders += holders
        self._flat += tuple(found)
        return values

    def _instances(self, group: list[Any], shape: Shape) -> Iterable[Any]:
        columns: list[list[Any]] = []
        try:
            if shape.form == PYDANTIC:
                columns += [list(map(get, group)) for get in _MODEL_PARTS]
            # A slot that is empty would not show, and neither would its content when it moves to another one.
            columns += [list(map(get, group)) for _, get in shape._getters]
            if shape.has_dict:
                columns.append(list(map(_ATTRIBUTES, group)))
        except AttributeError:
            raise Untraceable from None
        found = get_referents(*group)
        width, rest = divmod(len(found), len(group))
        if rest or not all(_is_column(column, found, width) for column in [[shape.cls] * len(group), *columns]):
            if len(group) == 1:
                raise Untraceable
            return list(chain.from_iterable([self._instances([value], shape) for value in group]))
        self.instances.update(map(id, group))
        self._holders += tuple(group)
        self._flat += tuple(found)
        return chain.from_iterable(columns)


_ATTRIBUTES = attrgetter("__dict__")
_MODEL_PARTS = tuple(map(attrgetter, ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")))


def _is_column(column: list[Any], found: list[Any], width: int) -> bool:
    """Whether every instance refers to its part in this column. A root model has no place for some, and no part."""
    first = column[0]
    for at in range(width):
        if found[at] is first and all(map(is_, found[at::width], column)):
            return True
    return all(part is None for part in column)


def trace(items: list[Any], registry: Registry) -> Trace | None:
    """A trace of the items as they are now, or None when some part of them cannot be followed."""
    made = Trace(items)
    try:
        made.follow(registry)
    except (Untraceable, RuntimeError):
        return None
    return made


class Match(NamedTuple):
    """Items that are proven to be what they were: where they stood, where they stand now, and their proof.

    ``holes`` are places among them where another item stands now.
    """

    before: int
    now: int
    trace: Trace
    holes: list[int]


class Evidence:
    """What is known about the items of one sequence: traces of runs, and nothing about the items in between."""

    __slots__ = ("instances", "loose", "size", "traces")

    def __init__(self) -> None:
        self.traces: list[tuple[int, Trace]] = []  # where each run begins, in order
        self.size = 0
        self.instances: set[int] = set()  # of all traces
        self.loose: dict[int, Any] = {}  # items that could not be traced, so that nobody tries again

    def matches(self, values: Sequence[Any]) -> list[Match]:
        """The runs that are in ``values`` still, unchanged and in their order."""
        found: list[Match] = []
        at = 0
        places: dict[int, int] | None = None
        for before, run in self.traces:
            items = run.items
            now = at + before - (found[-1].before + len(found[-1].trace.items) if found else 0)
            holes = _holes(items, values, now)
            if holes is None or run.spent + len(holes) > len(items) // 2:
                holes = []
                if places is None:
                    places = {id(value): index for index, value in enumerate(values)}
                now = places.get(id(items[0]), -1)
                if now < at or not _stands(items, values, now):
                    continue
            if run.unchanged():
                found.append(Match(before, now, run, holes))
                at = now + len(items)
        return found

    def copy(self) -> Evidence:
        """One that can go on, when all of this still holds."""
        made = Evidence()
        made.traces, made.size = self.traces.copy(), self.size
        made.instances = self.instances.copy()
        return made

    def append(self, run: Trace | None, count: int) -> None:
        """``count`` items come next, with their trace if there is one."""
        if run is not None:
            last = self.traces[-1] if self.traces else None
            if last is not None and last[0] + len(last[1].items) == self.size and last[1].fits(run):
                self.traces[-1] = (last[0], last[1].join(run))
            else:
                self.traces.append((self.size, run))
            self.instances |= run.instances
        self.size += count


def _holes(items: list[Any], values: Sequence[Any], at: int) -> list[int] | None:
    """Places where other items stand; None when these are not the same items, by and large."""
    if _stands(items, values, at):
        return []
    part = values[at : at + len(items)]
    if len(part) != len(items):
        return None
    return list(compress(range(len(items)), map(is_not, part, items)))


def _stands(items: list[Any], values: Sequence[Any], at: int) -> bool:
    part = values[at : at + len(items)]
    return len(part) == len(items) and all(map(is_, part, items))


def runs(values: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """How items are cut into runs that are traced together: starts and stops."""
    step = FLAT_RUN_ITEMS if SCALARS.issuperset(map(type, values)) else RUN_ITEMS
    return ((start, min(start + step, len(values))) for start in range(0, len(values), step))
