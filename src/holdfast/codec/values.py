"""Python values <-> bytes: the codec's front door (docs/format.md section 1).

Owns encode and decode, the walk that makes a value ready for MessagePack, and the path of what cannot be saved. Must
not know documents, stores or files; how bytes are read is the decoder's business, what is in a class that of instances.
Holds always: decode(encode(x)) has the types and values of x; encode(decode(b)) == b for every b that encode wrote;
plain parts of a value are packed as the very same objects, and none is ever changed; whatever is neither a refusal nor
bytes that are no value (an exception of a signal handler, say) comes out as it is.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ormsgpack import Ext

from holdfast.codec import atoms, refusals, wire
from holdfast.codec.classes import ENUM, Record, is_immutable, is_key, spoils_key
from holdfast.codec.decoder import SAFE_RECURSION, Reading
from holdfast.codec.instances import read_models, write_enum, write_instance, write_record
from holdfast.codec.types import FACTORIES, REGISTRY, Registry
from holdfast.codec.wire import (
    FLAT_TUPLE,
    MAX_DEPTH,
    MAX_VALUE_BYTES,
    OPTION,
    SCALARS,
    SURE_KEYS,
    TEXT,
    NotPlain,
    array_of,
    is_ours,
    is_utf8,
    nested_too_deep,
    on_fresh_stack,
    pack,
)
from holdfast.errors import Attribute, Unencodable

__all__ = ["OPTION", "Writing", "decode", "decode_items", "encode", "is_immutable", "is_key"]

_BATCH_ITEMS = 100
"""So many encodings are put together and decoded at a time: fresh memory for all at once would cost more than that."""

_SHOWN_PARTS = 12
"""Of the path of what is nested too deep: enough to see how a container contains itself."""

UNWRAP: dict[type, Callable[[Any], Any]] = {}
"""Container subclasses of other modules -> a function that gives the plain container, or a ready extension."""

# Readings that are free. A list's pop and append are atomic, so threads can share it; code that a reading calls
# and that decodes in turn takes another one.
_FREE: list[Reading] = []


# --- to bytes ---------------------------------------------------------------------------------------------------


def encode(value: Any, registry: Registry = REGISTRY, *, depth: int = 0) -> bytes:
    """The value's bytes. Raises Unencodable, with the path, when some part of it cannot be saved.

    ``depth`` is how many containers the value already sits in, for the limit on nesting.
    """
    kind = type(value)
    try:
        try:
            if kind in SCALARS or (kind is dict and depth < MAX_DEPTH and _is_flat(value)):
                data = pack(value)
            else:
                data = pack(Writing(registry).lower(value, depth))
        except (NotPlain, RecursionError):
            data = _encode_checked(value, registry, depth)
    except Unencodable as error:
        if len(error.path) >= MAX_DEPTH - depth:
            error.path = error.path[:_SHOWN_PARTS]
        raise
    if len(data) > MAX_VALUE_BYTES:
        raise Unencodable(
            f"{len(data):,} bytes when encoded; the limit of one value is {MAX_VALUE_BYTES:,}",
            hint="Split it: a dict or list in the state is stored in parts.",
        )
    return data


def _is_flat(value: dict[Any, Any]) -> bool:
    """Whether it is a message and the like: texts to scalars. Saves the walk, which is half the cost of so little."""
    for key, item in value.items():
        if type(item) in SCALARS and type(key) is str:
            continue
        return False
    return True


def _encode_checked(value: Any, registry: Registry, depth: int) -> bytes:
    """As encode, looking at every text and integer, with the whole stack to itself if need be."""

    def again() -> bytes:
        return pack(Writing(registry, plain=SCALARS - {str, int}).lower(value, depth))

    try:
        try:
            return again()
        except RecursionError:
            pass
        return on_fresh_stack(again)
    except NotPlain:
        raise RuntimeError("the value is changed by another thread while it is encoded") from None


class Writing:
    """One encoding: it lowers values to what MessagePack can carry.

    Texts and integers at the edge of what MessagePack knows are rare, so they are looked at only in a second attempt,
    when packing has failed; ``plain`` is then without their types.
    """

    __slots__ = ("keep", "numbers", "plain", "registry", "unmade")

    def __init__(self, registry: Registry, *, plain: frozenset[type] = SCALARS) -> None:
        self.registry = registry
        self.plain = plain
        # Instances of the open scope -> their numbers; those that are built only when their content is complete.
        self.numbers: dict[int, int] | None = None
        self.unmade: set[int] = set()
        self.keep: list[Any] = []

    def lower(self, value: Any, depth: int) -> Any:
        """The value itself when MessagePack can carry it, or a copy with extensions in it, or an extension."""
        kind = type(value)
        if kind in self.plain:
            return value
        return _WRITERS.get(kind, _write_other)(self, value, depth)

    def lower_apart(self, value: Any, depth: int) -> Any:
        """As lower, for what has nothing to do with the scope around it, so that its bytes are always the same."""
        outer, self.numbers = self.numbers, None
        try:
            return self.lower(value, depth)
        finally:
            self.numbers = outer

    def lower_key(self, key: Any, depth: int) -> Any:
        """As lower, for a dict key or set item."""
        kind = type(key)
        if kind not in SURE_KEYS and not is_key(key):
            key = spoils_key(key)
            immutable = is_immutable(key)
            if immutable or type(key) in _WRITERS or self.registry.by_type(type(key)) is not None:
                raise refusals.no_key(key, immutable=immutable)
            raise refusals.unknown(key, self.registry.option)
        return key if kind in self.plain else self.lower_apart(key, depth)

    def attributes(self, fields: dict[Any, Any], depth: int) -> Any:
        """The fields of an instance, which stands at that depth."""
        if self.plain is not SCALARS:  # packing refuses odd names too, without saying which
            if not TEXT.issuperset(map(type, fields)):
                raise Unencodable("an attribute whose name is not a plain text")
            if not all(map(is_utf8, fields)):
                return self.pairs(wire.DICT, fields, depth)
        return _write_parts(self, fields, depth, Attribute)

    def sequence(self, code: int, values: Iterable[Any], depth: int, *first: Any) -> Ext:
        """A tuple or deque, which opens a scope."""
        if depth >= MAX_DEPTH:
            raise refusals.too_deep()
        lowered = [*first]
        outer = self._enter()
        try:
            for value in values:
                lowered.append(self.lower(value, depth + 1))  # noqa: PERF401 - the length says where an error happened
        except Unencodable as error:
            error.within(len(lowered) - len(first))
            raise
        self.numbers = outer
        return Ext(code, pack(lowered))

    def mapping(self, code: int, value: Any, depth: int, *first: Any) -> Ext:
        """A mapping that is no dict, which opens a scope."""
        attributes = getattr(value, "__dict__", None)
        if attributes:
            raise refusals.extra_attributes(value, attributes)
        outer = self._enter()
        extension = self.pairs(code, value, depth, *first)
        self.numbers = outer
        return extension

    def pairs(self, code: int, value: dict[Any, Any], depth: int, *first: Any) -> Ext:
        """A mapping with keys of any kind."""
        if depth >= MAX_DEPTH:
            raise refusals.too_deep()
        lowered = [*first]
        for key, item in value.items():
            try:
                lowered.append(self.lower_key(key, depth + 1))
                lowered.append(self.lower(item, depth + 1))
            except Unencodable as error:
                error.within(refusals.label(key))
                raise
        return Ext(code, pack(lowered))

    def _enter(self) -> dict[int, int] | None:
        """Open a scope unless one is open; returns what ``numbers`` must be afterwards."""
        outer = self.numbers
        if outer is None:
            self.numbers = {}
        return outer


def _write_parts(writing: Writing, whole: Any, depth: int, label: Callable[[Any], object] | None = None) -> Any:
    """A list or a dict: itself where all of its parts are plain. ``label`` makes parts of the path from field names."""
    if depth >= MAX_DEPTH:
        raise refusals.too_deep()
    plain = writing.plain
    parts: Any
    if type(whole) is list:
        parts = enumerate(whole)
    elif label is not None or (TEXT.issuperset(map(type, whole)) and (plain is SCALARS or all(map(is_utf8, whole)))):
        parts = whole.items()
    else:
        return writing.pairs(wire.DICT, whole, depth)
    # Agents keep lists of flat dicts, and messages some that are small or empty: no call for each of these.
    flat, bare = (dict, list) if plain is SCALARS and depth + 1 < MAX_DEPTH else (None, None)
    out: Any = None
    place: Any = None
    try:
        for place, item in parts:
            kind = type(item)
            if kind in plain:
                continue
            if kind is flat:
                for key, part in item.items():
                    if type(part) in plain and type(key) is str:
                        continue
                    break
                else:
                    continue
            elif kind is bare and not item:
                continue
            lowered = _WRITERS.get(kind, _write_other)(writing, item, depth + 1)
            if lowered is not item:
                if out is None:
                    out = whole.copy()
                out[place] = lowered
    except Unencodable as error:
        error.within(place if label is None else label(place))
        raise
    return whole if out is None else out


def _write_tuple(writing: Writing, value: tuple[Any, ...], depth: int) -> Ext:
    if depth < MAX_DEPTH and writing.plain.issuperset(map(type, value)):
        return Ext(wire.TUPLE, pack(value, FLAT_TUPLE))
    return writing.sequence(wire.TUPLE, value, depth)


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
    return Ext(wire.SET if type(value) is set else wire.FROZENSET, array_of(sorted(encodings)))


def _write_defaultdict(writing: Writing, value: collections.defaultdict[Any, Any], depth: int) -> Ext:
    factory: Any = value.default_factory
    name = next((name for name, known in FACTORIES.items() if known is factory), None)
    if factory is not None and name is None:
        raise refusals.factory(factory)
    return writing.mapping(wire.DEFAULTDICT, value, depth, name)


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


_WRITERS: dict[type, Callable[[Writing, Any, int], Any]] = {
    str: lambda _writing, value, _depth: atoms.lower_str(value),
    int: lambda _writing, value, _depth: atoms.lower_int(value),
    list: _write_parts,
    dict: _write_parts,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    Record: write_record,
    collections.deque: lambda writing, value, depth: writing.sequence(wire.DEQUE, value, depth, value.maxlen),
    collections.OrderedDict: lambda writing, value, depth: writing.mapping(wire.ORDERED_DICT, value, depth),
    collections.Counter: lambda writing, value, depth: writing.mapping(wire.COUNTER, value, depth),
    collections.defaultdict: _write_defaultdict,
}


# --- from bytes -------------------------------------------------------------------------------------------------


def decode(
    data: bytes | memoryview,
    registry: Registry = REGISTRY,
    *,
    inert: bool = False,
    owned: bool = False,
    big: Callable[[int, bytes], Any] | None = None,
) -> Any:
    """The value of the bytes. Raises CorruptValue, UnknownType or SchemaMismatch.

    ``inert`` reads unknown types as Records instead. ``owned`` gives bytearrays as Bytes. ``big`` is asked, with the
    code and the payload, for parts that are stored elsewhere (codes 40 and 41); without it they are refused.
    """
    try:
        reading = _FREE.pop()
    except IndexError as error:
        if not is_ours(error):
            raise
        reading = Reading()
    try:
        value = reading.value(data, registry, inert, owned, big)
    except RecursionError:
        pass
    else:
        _FREE.append(reading)  # one that failed is in an unknown state, and is not used again
        return value
    try:
        return on_fresh_stack(lambda: Reading().value(data, registry, inert, owned, big))
    except RecursionError:
        raise nested_too_deep() from None


def decode_items(
    encodings: list[bytes],
    registry: Registry = REGISTRY,
    *,
    inert: bool = False,
    owned: bool = False,
    big: Callable[[int, bytes], Any] | None = None,
) -> list[Any]:
    """The values of many encodings, as decode gives each: a list of messages at a fraction of the cost."""
    made: list[Any] = []
    for start in range(0, len(encodings), _BATCH_ITEMS):
        some = encodings[start : start + _BATCH_ITEMS]
        models = {} if inert or sys.getrecursionlimit() > SAFE_RECURSION else read_models(some, registry)
        rest = [data for index, data in enumerate(some) if index not in models]
        others = decode(array_of(rest), registry, inert=inert, owned=owned, big=big) if rest else []
        if models:
            remaining = iter(others)
            others = [models[index] if index in models else next(remaining) for index in range(len(some))]
        made += others
    return made
