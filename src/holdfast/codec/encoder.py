"""The way in: a Python value becomes one that MessagePack can carry.

Owns the way through containers, and the path of what cannot be saved. Must not know how bytes are read back.
Holds always: plain parts of a value are returned as the very same objects (this is what makes appending a message
cheap); the user's value is never changed; equal values give equal bytes.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ormsgpack import Ext

from holdfast.codec import atoms, limits, refusals
from holdfast.codec.classes import ENUM, Record, is_immutable, is_key
from holdfast.codec.instances import write_enum, write_instance, write_record
from holdfast.codec.limits import MAX_DEPTH, SCALARS, SURE_KEYS, UNWRAP
from holdfast.codec.types import FACTORIES
from holdfast.codec.wire import FLAT_TUPLE, array_of, is_utf8, pack
from holdfast.errors import Unencodable

if TYPE_CHECKING:
    from holdfast.codec.types import Registry

    Writer = Callable[["Writing", Any, int], Any]

_TEXT: frozenset[type] = frozenset({str})


class Writing:
    """One encoding: it lowers values to what MessagePack can carry.

    Texts and integers at the edge of what MessagePack knows are rare, so they are looked at only in a second attempt,
    when packing has failed; ``plain`` is then without their types.
    """

    __slots__ = ("_keys", "keep", "numbers", "plain", "registry", "unmade")

    def __init__(self, registry: Registry, *, plain: frozenset[type] = SCALARS) -> None:
        self.registry = registry
        self.plain = plain
        # Instances of the open scope -> their numbers; those that are built only when their content is complete.
        self.numbers: dict[int, int] | None = None
        self.unmade: set[int] = set()
        self.keep: list[Any] = []
        self._keys: Writing | None = None

    def lower(self, value: Any, depth: int) -> Any:
        """The value itself when MessagePack can carry it, or a copy with extensions in it, or an extension."""
        kind = type(value)
        if kind in self.plain:
            return value
        return _WRITERS.get(kind, _write_other)(self, value, depth)

    def lower_key(self, key: Any, depth: int) -> Any:
        """As lower, for a dict key or set item: each has a scope of its own, so that its bytes are always the same."""
        kind = type(key)
        if kind not in SURE_KEYS and not is_key(key):
            raise self._no_key(key)
        if kind in self.plain:
            return key
        keys = self._keys
        if keys is None:
            keys = self._keys = self.apart()
        return keys.lower(key, depth)

    def _no_key(self, key: Any) -> Unencodable:
        while type(key) is tuple or type(key) is frozenset:
            key = next((part for part in key if not is_key(part)), None)
        immutable = is_immutable(key)
        if immutable or type(key) in _WRITERS or self.registry.by_type(type(key)) is not None:
            return refusals.no_key(key, immutable=immutable)
        return refusals.unknown(key, self.registry.option)

    def apart(self) -> Writing:
        """Another one for what has nothing to do with the scope that is open here."""
        return Writing(self.registry, plain=self.plain)

    def items(self, values: Iterable[Any], depth: int) -> list[Any]:
        """The items of a sequence, lowered."""
        lowered: list[Any] = []
        try:
            for value in values:
                lowered.append(self.lower(value, depth + 1))  # noqa: PERF401 - the length says where an error happened
        except Unencodable as error:
            error.within(len(lowered))
            raise
        return lowered

    def pairs(self, code: int, value: dict[Any, Any], depth: int, *first: Any) -> Ext:
        """A mapping with keys of any kind."""
        lowered: list[Any] = [*first]
        for key, item in value.items():
            try:
                lowered.append(self.lower_key(key, depth + 1))
                lowered.append(self.lower(item, depth + 1))
            except Unencodable as error:
                error.within(refusals.label(key))
                raise
        return Ext(code, pack(lowered))

    def mapping(self, code: int, value: Any, depth: int, *first: Any) -> Ext:
        """A mapping that is no dict, which opens a scope."""
        if depth >= MAX_DEPTH:
            raise refusals.too_deep()
        attributes = getattr(value, "__dict__", None)
        if attributes:
            raise refusals.extra_attributes(value, attributes)
        outer = self.enter()
        extension = self.pairs(code, value, depth, *first)
        self.numbers = outer
        return extension

    def enter(self) -> dict[int, int] | None:
        """Open a scope unless one is open; returns what ``numbers`` must be afterwards."""
        outer = self.numbers
        if outer is None:
            self.numbers = {}
        return outer


def _write_list(writing: Writing, value: list[Any], depth: int) -> Any:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    plain = writing.plain
    writers = _WRITERS
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
            lowered = writers.get(kind, _write_other)(writing, item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = value.copy()
                out[index] = lowered
    except Unencodable as error:
        error.within(index)
        raise
    return value if out is None else out


def _write_dict(writing: Writing, value: dict[Any, Any], depth: int) -> Any:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    plain = writing.plain
    if not _TEXT.issuperset(map(type, value)) or (plain is not SCALARS and not all(map(is_utf8, value))):
        return writing.pairs(limits.DICT, value, depth)
    out: dict[Any, Any] | None = None
    key: Any = None
    try:
        for key, item in value.items():
            kind = type(item)
            if kind in plain:
                continue
            lowered = _WRITERS.get(kind, _write_other)(writing, item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = value.copy()
                out[key] = lowered
    except Unencodable as error:
        error.within(key)
        raise
    return value if out is None else out


def _write_tuple(writing: Writing, value: tuple[Any, ...], depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    if writing.plain.issuperset(map(type, value)):
        return Ext(limits.TUPLE, pack(value, FLAT_TUPLE))
    outer = writing.enter()
    payload = pack(writing.items(value, depth))
    writing.numbers = outer
    return Ext(limits.TUPLE, payload)


def _write_deque(writing: Writing, value: collections.deque[Any], depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    outer = writing.enter()
    payload = pack([value.maxlen, *writing.items(value, depth)])
    writing.numbers = outer
    return Ext(limits.DEQUE, payload)


def _write_set(writing: Writing, value: set[Any] | frozenset[Any], depth: int) -> Ext:
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    encodings: list[bytes] = []
    item: Any = None
    try:
        for item in value:
            encodings.append(pack(writing.lower_key(item, depth + 1)))
    except Unencodable as error:
        error.within(refusals.label(item))
        raise
    return Ext(limits.SET if type(value) is set else limits.FROZENSET, array_of(sorted(encodings)))


def _write_ordered_dict(writing: Writing, value: Any, depth: int) -> Ext:
    return writing.mapping(limits.ORDERED_DICT, value, depth)


def _write_counter(writing: Writing, value: Any, depth: int) -> Ext:
    return writing.mapping(limits.COUNTER, value, depth)


def _write_defaultdict(writing: Writing, value: collections.defaultdict[Any, Any], depth: int) -> Ext:
    factory: Any = value.default_factory
    name = None
    if isinstance(factory, type):
        if FACTORIES.get(factory.__name__) is factory:
            name = factory.__name__
        else:
            registration = writing.registry.by_type(factory)
            name = None if registration is None else registration.name
    if factory is not None and name is None:
        raise refusals.factory(factory)
    return writing.mapping(limits.DEFAULTDICT, value, depth, name)


def _write_other(writing: Writing, value: Any, depth: int) -> Any:
    """Types that the table does not know: other modules' containers, atoms, registered classes, arrays."""
    kind = type(value)
    unwrap = UNWRAP.get(kind)
    if unwrap is not None:
        inner = unwrap(value)
        return inner if type(inner) is Ext else writing.lower(inner, depth)
    atom = atoms.write(value)
    if atom is not None:
        return atom
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        from holdfast.codec import arrays  # programs without NumPy never load it

        return arrays.write(value)
    registration = writing.registry.by_type(kind)
    if registration is None:
        raise refusals.unknown(value, writing.registry.option)
    if registration.save is None and registration.shape.form == ENUM:
        return write_enum(writing, value, depth, registration)
    return write_instance(writing, value, depth, registration)


_WRITERS: dict[type, Writer] = {
    str: lambda _writing, value, _depth: atoms.lower_str(value),
    int: lambda _writing, value, _depth: atoms.lower_int(value),
    list: _write_list,
    dict: _write_dict,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    Record: write_record,
    collections.deque: _write_deque,
    collections.OrderedDict: _write_ordered_dict,
    collections.Counter: _write_counter,
    collections.defaultdict: _write_defaultdict,
}
