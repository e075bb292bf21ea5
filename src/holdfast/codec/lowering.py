"""The walk that turns a Python value into one that MessagePack can carry.

Owns the way through containers, and the path of what cannot be saved.
Must not know how bytes are read back, nor where they go.
Holds always: plain subtrees are returned as the very same object (this is what makes appending a message cheap);
the user's value is never changed; equal values give equal bytes.
"""

from __future__ import annotations

import collections
import sys
from math import inf
from typing import TYPE_CHECKING, Any

from ormsgpack import Ext, packb

from holdfast.codec import atoms, codes, refusals
from holdfast.codec.codes import MAX_DEPTH, SCALARS, UNWRAP, Record, WholeDict, WholeList
from holdfast.codec.instances import lower_enum, lower_instance, lower_record
from holdfast.codec.shapes import ENUM
from holdfast.codec.types import FACTORIES
from holdfast.codec.wire import FLAT_TUPLE, OPTION, array_of, big_int, is_utf8, pack
from holdfast.errors import Unencodable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.codec.types import Registry

    Handler = Callable[["Walk", Any, int], Any]

_CHECKED_SCALARS = SCALARS - {str, int}


class Walk:
    """One encoding: what has been met so far. A checked walk looks into every string and integer as well."""

    plain: frozenset[type] = SCALARS
    numbers: dict[int, int] | None = None
    scope = 0
    risky = False
    set_depth = 0
    ranks: dict[int, int] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        # Instances of set items that look alike, and the order in which they are first referred to outside of sets.
        self.tied: set[int] = set()
        self.first_references: dict[int, int] = {}
        self.met: dict[int, int] = {}
        self.open: dict[int, bool] = {}
        self.keep: list[Any] = []

    def check(self) -> None:
        """Look into every string and integer from here on, so that the path of a bad one is known."""
        self.plain = _CHECKED_SCALARS

    def lower(self, value: Any, depth: int = 0) -> Any:
        """The value itself when MessagePack can carry it, or a copy with extensions in it, or an extension."""
        kind = type(value)
        if kind in self.plain:
            return value
        return HANDLERS.get(kind, lower_other)(self, value, depth)

    def enter(self) -> bool:
        """Open a scope unless one is open; returns whether it did, for leave()."""
        if self.numbers is not None:
            return False
        self.numbers = {}
        self.scope += 1
        return True

    def leave(self, opened: bool) -> None:
        """Close the scope that enter() opened."""
        if opened:
            self.numbers = None


def lower_list(walk: Walk, value: list[Any], depth: int) -> Any:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    plain = walk.plain
    handlers = HANDLERS
    # A list of flat dicts is what most agents keep, so they are looked through here, without a call for each.
    flat_dict = dict if plain is SCALARS and depth + 1 < MAX_DEPTH else None
    out: list[Any] | None = None
    index = 0
    try:
        for index, item in enumerate(value):
            kind = type(item)
            if kind in plain:
                continue
            if kind is flat_dict:
                for key, part in item.items():
                    if type(part) in plain and type(key) is str:
                        continue
                    break
                else:
                    continue
            lowered = handlers.get(kind, lower_other)(walk, item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = value.copy()
                out[index] = lowered
    except Unencodable as error:
        raise error.within(index) from None
    return value if out is None else out


def lower_dict(walk: Walk, value: dict[Any, Any], depth: int) -> Any:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    plain = walk.plain
    checked_keys = plain is not SCALARS
    if checked_keys and not all(type(key) is str and is_utf8(key) for key in value):
        return _pairs(walk, codes.DICT, value, depth)
    out: dict[Any, Any] | None = None
    key: Any = None
    try:
        for key, item in value.items():
            if type(key) is not str:
                return _pairs(walk, codes.DICT, value, depth)
            kind = type(item)
            if kind in plain:
                continue
            if not checked_keys:
                # Instances are numbered in the order of the bytes, so the kind of map must be known for sure
                # before the first item that may hold one.
                if any(type(other) is not str for other in value):
                    return _pairs(walk, codes.DICT, value, depth)
                checked_keys = True
            lowered = HANDLERS.get(kind, lower_other)(walk, item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = value.copy()
                out[key] = lowered
    except Unencodable as error:
        raise error.within(key) from None
    return value if out is None else out


def _pairs(walk: Walk, code: int, value: dict[Any, Any], depth: int, *first: Any) -> Ext:
    items: list[Any] = [*first]
    key: Any = None
    for key, item in value.items():
        try:
            items.append(walk.lower(key, depth + 1))
            items.append(walk.lower(item, depth + 1))
        except Unencodable as error:
            raise error.within(refusals.label(key)) from None
    return Ext(code, pack(items))


def _items(walk: Walk, value: Iterable[Any], depth: int) -> list[Any]:
    items: list[Any] = []
    try:
        for item in value:
            items.append(walk.lower(item, depth + 1))  # noqa: PERF401 - the length says where an error happened
    except Unencodable as error:
        raise error.within(len(items)) from None
    return items


def lower_tuple(walk: Walk, value: tuple[Any, ...], depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    if walk.plain.issuperset(map(type, value)):
        return Ext(codes.TUPLE, packb(value, big_int, FLAT_TUPLE))
    opened = walk.enter()
    payload = pack(_items(walk, value, depth))
    walk.leave(opened)
    return Ext(codes.TUPLE, payload)


def lower_deque(walk: Walk, value: collections.deque[Any], depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    opened = walk.enter()
    payload = pack([value.maxlen, *_items(walk, value, depth)])
    walk.leave(opened)
    return Ext(codes.DEQUE, payload)


def _lower_mapping(walk: Walk, code: int, value: Any, depth: int, *first: Any) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    attributes = getattr(value, "__dict__", None)
    if attributes:
        raise refusals.extra_attributes(value, attributes)
    opened = walk.enter()
    extension = _pairs(walk, code, value, depth, *first)
    walk.leave(opened)
    return extension


def lower_ordered_dict(walk: Walk, value: Any, depth: int) -> Ext:
    return _lower_mapping(walk, codes.ORDERED_DICT, value, depth)


def lower_counter(walk: Walk, value: Any, depth: int) -> Ext:
    return _lower_mapping(walk, codes.COUNTER, value, depth)


def lower_defaultdict(walk: Walk, value: collections.defaultdict[Any, Any], depth: int) -> Ext:
    factory: Any = value.default_factory
    name = None
    if isinstance(factory, type):
        if FACTORIES.get(factory.__name__) is factory:
            name = factory.__name__
        else:
            registration = walk.registry.by_type(factory)
            name = None if registration is None else registration.name
    if factory is not None and name is None:
        raise refusals.factory(factory)
    return _lower_mapping(walk, codes.DEFAULTDICT, value, depth, name)


def lower_set(walk: Walk, value: set[Any] | frozenset[Any], depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    code = codes.SET if type(value) is set else codes.FROZENSET
    if walk.plain.issuperset(map(type, value)):
        return Ext(code, array_of(sorted([packb(item, big_int, OPTION) for item in value])))
    opened = walk.enter()
    payload = _sorted_items(walk, value, depth)
    walk.leave(opened)
    return Ext(code, payload)


def _sorted_items(walk: Walk, value: Iterable[Any], depth: int) -> bytes:
    """The items in the order of their bytes.

    An item that brings new instances changes the numbers that later items see. So each is first encoded as if it
    were the first one, which gives the order; only then are the numbers given for good. Where items look alike,
    the one that the rest of the value refers to first comes first; that is known in a second walk (see Walk.ranks).
    """
    numbers: dict[int, int] = walk.numbers  # type: ignore[assignment] # a set is always inside a scope
    start = len(numbers)
    ranks = walk.ranks
    trials: list[tuple[bytes, float, list[int], Any]] = []
    encodings: list[bytes] = []
    item: Any = None
    walk.set_depth += 1
    try:
        for item in value:
            data = pack(walk.lower(item, depth + 1))
            brought: list[int] = []
            while len(numbers) > start:
                brought.append(numbers.popitem()[0])
            rank = min((ranks[key] for key in brought if key in ranks), default=inf) if ranks else inf
            trials.append((data, rank, brought[::-1], item))
        trials.sort(key=_place)
        for index, (data, _, brought, item) in enumerate(trials):
            if brought and index and trials[index - 1][0] == data:
                walk.tied.update(brought, trials[index - 1][2])
            if brought and len(numbers) > start:
                encodings.append(pack(walk.lower(item, depth + 1)))
                continue
            encodings.append(data)
            for key in brought:
                numbers[key] = len(numbers)
    except Unencodable as error:
        raise error.within(refusals.label(item)) from None
    walk.set_depth -= 1
    return array_of(encodings)


def _place(trial: tuple[bytes, float, list[int], Any]) -> tuple[bytes, float]:
    return trial[:2]


def lower_whole(walk: Walk, value: Any, depth: int) -> Any:
    """A container that a document keeps whole stays whole."""
    plain = list(value) if isinstance(value, list) else dict(value)
    opened = walk.enter()
    lowered = walk.lower(plain, depth)
    if not opened:
        return lowered
    data = pack(lowered)
    walk.leave(opened)
    return Ext(codes.WHOLE, data)


def lower_other(walk: Walk, value: Any, depth: int) -> Any:
    """Types that the table does not know: other modules' containers, registered classes, lazily known built-ins."""
    kind = type(value)
    unwrap = UNWRAP.get(kind)
    if unwrap is not None:
        inner = unwrap(value)
        return inner if type(inner) is Ext else walk.lower(inner, depth)
    registration = walk.registry.by_type(kind)
    if registration is not None:
        if registration.save is None and registration.shape.form == ENUM:
            return lower_enum(walk, value, depth, registration)
        return lower_instance(walk, value, depth, registration)
    module = kind.__module__
    lazy = atoms.LAZY.get((module, kind.__name__)) if type(module) is str else None
    if lazy is not None and getattr(sys.modules.get(module), kind.__name__, None) is kind:
        HANDLERS[kind] = lazy
        return lazy(walk, value, depth)
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        from holdfast.codec import arrays  # programs without NumPy never load it

        return arrays.lower(walk, value, depth)
    raise refusals.unknown(value, walk.registry.option)


HANDLERS: dict[type, Handler] = {
    **atoms.HANDLERS,
    list: lower_list,
    dict: lower_dict,
    tuple: lower_tuple,
    set: lower_set,
    frozenset: lower_set,
    Record: lower_record,
    WholeList: lower_whole,
    WholeDict: lower_whole,
    collections.deque: lower_deque,
    collections.OrderedDict: lower_ordered_dict,
    collections.Counter: lower_counter,
    collections.defaultdict: lower_defaultdict,
}
