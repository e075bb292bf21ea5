"""Python values <-> bytes: the codec's front door (docs/format.md section 1).

Owns encode and decode, the way of containers in both directions, and the path of what cannot be saved. Must not know
documents, stores or files, nor what is in an instance.
Holds always: decode(encode(x)) has the types and values of x; encode(decode(b)) == b for every b that encode wrote;
plain parts of a value are packed as the very same objects, and none is ever changed; nothing is imported or run because
data names it, and memory stays in proportion to the bytes; whatever is neither a refusal nor bytes that are no value
(an exception of a signal handler, say) comes out as it is.
"""

from __future__ import annotations

import collections
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from ormsgpack import Ext, unpackb

from holdfast.codec import atoms, instances, refusals, wire
from holdfast.codec.classes import ENUM, ITEMS, Record, is_immutable, is_key, spoils_key
from holdfast.codec.types import FACTORIES, REGISTRY, Registry
from holdfast.codec.wire import MAX_DEPTH, OPTION, SCALARS, SURE_KEYS, TEXT, NotPlain, corrupt, is_ours, is_utf8, pack
from holdfast.errors import Attribute, SchemaMismatch, Unencodable, UnknownType

__all__ = ["OPTION", "UNWRAP", "Writing", "decode", "decode_items", "encode", "is_immutable", "is_key", "outline"]

_BATCH_ITEMS = 100
"""So many encodings are put together and decoded at a time: fresh memory for all at once would cost more than that."""

_SHOWN_PARTS = 12
"""Of the path of what is nested too deep: enough to see how a container contains itself."""

UNWRAP: dict[type, Callable[[Any], Any]] = {}
"""Container subclasses of other modules -> a function that gives the plain container, or a ready extension."""

Big = Callable[[int, bytes], Any]

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
    if len(data) > wire.MAX_VALUE_BYTES:
        raise Unencodable(
            f"{len(data):,} bytes when encoded; the limit of one value is {wire.MAX_VALUE_BYTES:,}",
            hint="Split it: a dict or list in the state is stored in parts.",
        )
    return data


def outline(value: Any, registry: Registry) -> tuple[bytes, list[str]]:
    """What can be saved of a value that cannot be saved as a whole, and the names of the classes that are in the way.

    Their instances are written as if they were registered under their default names; what has no fields to write stands
    there with its name alone, which is then one that no class has.
    """
    writing = Writing(registry, plain=SCALARS - {str, int})
    writing.outline = []
    return pack(writing.lower(value, 0)), writing.outline


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
        return wire.on_fresh_stack(again)
    except NotPlain:
        raise RuntimeError("the value is changed by another thread while it is encoded") from None


class Writing:
    """One encoding: it lowers values to what MessagePack can carry.

    Texts and integers at the edge of what MessagePack knows are rare, so they are looked at only in a second attempt,
    when packing has failed; ``plain`` is then without their types.
    """

    __slots__ = ("keep", "numbers", "outline", "plain", "registry", "unmade")

    def __init__(self, registry: Registry, *, plain: frozenset[type] = SCALARS) -> None:
        self.registry = registry
        self.plain = plain
        # Instances of the open scope -> their numbers; those that are built only when their content is complete.
        self.numbers: dict[int, int] | None = None
        self.unmade: set[int] = set()
        self.keep: list[Any] = []
        self.outline: list[str] | None = None  # names of classes that nobody registered, where these are let through

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
    # Agents keep lists of flat dicts, and messages some that are flat or empty: no call for each of these.
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
            elif kind is bare and plain.issuperset(map(type, item)):
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
        return Ext(wire.TUPLE, pack(value, wire.FLAT_TUPLE))
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
    return Ext(wire.SET if type(value) is set else wire.FROZENSET, wire.array_of(sorted(encodings)))


def _write_defaultdict(writing: Writing, value: collections.defaultdict[Any, Any], depth: int) -> Ext:
    factory: Any = value.default_factory
    name = next((name for name, known in FACTORIES.items() if known is factory), None)
    if factory is not None and name is None:
        raise Unencodable(
            f"a defaultdict whose factory is {getattr(factory, '__qualname__', type(factory).__qualname__)!s}",
            hint="Use a built-in type (list, dict, set, int, ...) as its factory, or save dict(...).",
        )
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
        if writing.outline is not None:
            return instances.write_outline(writing, value, depth, writing.outline)
        raise refusals.unknown(value, writing.registry.option)
    if registration.save is None and registration.shape.form == ENUM:
        return instances.write_enum(writing, value, depth, registration)
    return instances.write_instance(writing, value, depth, registration)


_WRITERS: dict[type, Callable[[Writing, Any, int], Any]] = {
    str: lambda _writing, value, _depth: atoms.lower_str(value),
    int: lambda _writing, value, _depth: atoms.lower_int(value),
    list: _write_parts,
    dict: _write_parts,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    Record: instances.write_record,
    collections.deque: lambda writing, value, depth: writing.sequence(wire.DEQUE, value, depth, value.maxlen),
    collections.OrderedDict: lambda writing, value, depth: writing.mapping(wire.ORDERED_DICT, value, depth),
    collections.Counter: lambda writing, value, depth: writing.mapping(wire.COUNTER, value, depth),
    collections.defaultdict: _write_defaultdict,
}


# --- from bytes -------------------------------------------------------------------------------------------------

_SAFE_RECURSION = 5000
"""Above this recursion limit the interpreter no longer protects the C stack; nesting is then checked beforehand."""

_SCOPES = frozenset({wire.TUPLE, wire.INSTANCE, wire.DEQUE, wire.ORDERED_DICT, wire.COUNTER, wire.DEFAULTDICT})
"""Extensions that open a scope, inside which instances are numbered, unless one is open already."""

_ALONE = frozenset({wire.SET, wire.FROZENSET, wire.ENUM})
"""Extensions whose content has nothing to do with the scope around them."""

_INSTANCE_BYTE = bytes([wire.INSTANCE])


def decode(
    data: bytes | memoryview,
    registry: Registry = REGISTRY,
    *,
    inert: bool = False,
    owned: bool = False,
    big: Big | None = None,
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
        return wire.on_fresh_stack(lambda: Reading().value(data, registry, inert, owned, big))
    except RecursionError:
        raise wire.nested_too_deep() from None


def decode_items(
    encodings: list[bytes],
    registry: Registry = REGISTRY,
    *,
    inert: bool = False,
    owned: bool = False,
    big: Big | None = None,
) -> list[Any]:
    """The values of many encodings, as decode gives each: a list of messages at a fraction of the cost."""
    made: list[Any] = []
    for start in range(0, len(encodings), _BATCH_ITEMS):
        some = encodings[start : start + _BATCH_ITEMS]
        models = {} if inert or sys.getrecursionlimit() > _SAFE_RECURSION else instances.read_models(some, registry)
        rest = [data for index, data in enumerate(some) if index not in models]
        others = decode(wire.array_of(rest), registry, inert=inert, owned=owned, big=big) if rest else []
        if models and rest:
            remaining = iter(others)
            others = [models[index] if index in models else next(remaining) for index in range(len(some))]
        made += others if rest else models.values()
    return made


class Reading:
    """One decoding. Kept and used again, because making the library's decoder costs more than a small value."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._extension).decode
        self.registry = REGISTRY
        self.inert = False
        self.owned = False
        self.big: Big | None = None
        self.depth = 0
        # Instances of the open scope in the order of their bytes.
        self.instances: list[Any] | None = None
        # Whether an extension was met; payloads without any, whose nesting is looked at for all of them together.
        self._extended = False
        self._shallow: list[Any] = []

    def value(self, data: bytes | memoryview, registry: Registry, inert: bool, owned: bool, big: Big | None) -> Any:
        """One whole value; see decode()."""
        self.registry, self.inert, self.owned, self.big = registry, inert, owned, big
        size = len(data)
        if size > _SAFE_RECURSION:
            if size > wire.MAX_VALUE_BYTES:
                raise corrupt(f"{size:,} bytes; the limit of one value is {wire.MAX_VALUE_BYTES:,}")
            if sys.getrecursionlimit() > _SAFE_RECURSION:
                _check_nesting(data)
        self._extended = False
        try:
            result = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not is_ours(error):
                raise
            raise corrupt(str(error)) from error
        if size > MAX_DEPTH:
            if self._extended:
                wire.check_depth(result)
                self.check_depth()
            else:
                wire.check_plain_depth(result)
        self.big = None  # what it leads to must not live as long as this
        return result

    def content(self, raw: msgspec.Raw | memoryview) -> Any:
        """What a payload, or a part of one, holds."""
        self._extended = False
        result = self._decode(raw)
        if len(raw) > MAX_DEPTH:
            if self._extended:
                wire.check_depth(result, _PAYLOAD_DEPTH)
            else:
                self._shallow.append(result)
        self._extended = True
        return result

    def check_depth(self) -> None:
        """Refuse payloads that are nested too deep, of those that were read since the last call."""
        if self._shallow:
            shallow, self._shallow = self._shallow, []
            wire.check_plain_depth(shallow, _PAYLOAD_DEPTH + 1)

    def items(self, data: memoryview) -> list[Any]:
        """A payload that is one array."""
        result = self.content(data)
        if type(result) is not list:
            raise corrupt(f"a {type(result).__name__} where an array belongs")
        return result

    def mapping(self, data: memoryview, skip: int = 0) -> tuple[list[Any], dict[Any, Any]]:
        """A payload of keys and values in turn, after ``skip`` other items; gives these, and the mapping."""
        if self.instances is None or _INSTANCE_BYTE not in bytes(data):
            items = self.items(data)
        else:
            # Keys have nothing to do with the scope that their values are in.
            scope, items = self.instances, []
            for index, raw in enumerate(wire.raws(data)):
                self.instances = scope if (index - skip) % 2 else None
                items.append(self.content(raw))
            self.instances = scope
        if len(items) < skip or (len(items) - skip) % 2:
            raise corrupt("a key without a value")
        return items[:skip], self.keyed(dict, items[skip::2], items[skip + 1 :: 2])

    def keyed(self, make: Callable[[Any], Any], keys: list[Any], items: list[Any] | None = None) -> Any:
        """A set of these keys, or a mapping from them to the items."""
        if not SURE_KEYS.issuperset(map(type, keys)) and not all(map(is_key, keys)):
            key = spoils_key(tuple(keys))
            registration = self.registry.by_type(type(key))
            if registration is None:
                raise corrupt(f"a {type(key).__name__} as a key or set item")
            raise SchemaMismatch(
                f"{registration.name} was saved as a dict key or set item, and its instances can change now",
                type_name=registration.name,
                hint="Make the class frozen again, or register it under another name to read this without it.",
            )
        try:
            made = make(keys if items is None else zip(keys, items, strict=True))
        except (TypeError, ValueError) as error:  # NumPy has scalars that can be compared, but not hashed
            if not is_ours(error):
                raise
            raise corrupt(f"a key or set item without a hash: {error}") from error
        if len(made) != len(keys):
            raise corrupt("a key or set item that stands twice")
        return made

    def _extension(self, code: int, data: memoryview) -> Any:
        """The library's hook."""
        self._extended = True
        read = _READERS.get(code)
        if read is None:
            return self._atom(code, data)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise wire.nested_too_deep()
        outer = self.instances
        if code in _ALONE:
            self.instances = None
        elif outer is None and code in _SCOPES:
            self.instances = []
        value = read(self, data)
        self.instances = outer
        self.depth -= 1
        return value

    def _atom(self, code: int, data: memoryview) -> Any:
        if code == wire.REFERENCE:
            return instances.read_reference(self, data)
        if code == wire.BYTEARRAY:
            return atoms.Bytes(data) if self.owned else bytearray(data)
        try:
            if code in atoms.CODES:
                return atoms.read(code, data)
            if code in {wire.ARRAY, wire.SCALAR}:
                return _read_numpy(code, data)
        except UnknownType as error:
            if not self.inert:
                raise
            return Record(code, bytes(data), error.type_name, 1, ITEMS, atoms.parts_of(data))
        if code not in {wire.BIG, wire.BULK, wire.CONTENT}:
            raise corrupt(f"an extension of the unknown code {code}")
        if self.big is None:
            raise corrupt("a part that is stored elsewhere, inside a value that must be complete")
        return self.big(code, bytes(data))


_PAYLOAD_DEPTH = MAX_DEPTH + 2
"""Instances keep their fields in a map, models in an array of maps, which are not levels of their own."""


def _check_nesting(data: bytes | memoryview) -> None:
    """Refuse arrays and maps that would exhaust the stack."""
    try:
        # This library stops at 1,024 levels by itself, whatever the interpreter allows. The hook only has to be there.
        unpackb(data, ext_hook=operator.is_)
    except ValueError as error:
        if not is_ours(error):
            raise
        raise corrupt(str(error)) from error


def _read_deque(reading: Reading, data: memoryview) -> collections.deque[Any]:
    items = reading.items(data)
    if not items:
        raise corrupt("a deque without its limit")
    limit, *items = items
    if limit is not None and (type(limit) is not int or not len(items) <= limit <= sys.maxsize):
        raise corrupt("a deque that is longer than its limit")
    return collections.deque(items, limit)


def _read_dict(reading: Reading, data: memoryview) -> Any:
    _, made = reading.mapping(data)
    if TEXT.issuperset(map(type, made)) and all(map(is_utf8, made)):
        raise corrupt("a dict with plain keys in the extension for other keys")
    return made


def _read_defaultdict(reading: Reading, data: memoryview) -> Any:
    (name,), made = reading.mapping(data, 1)
    if name is not None and (type(name) is not str or name not in FACTORIES):
        raise corrupt(f"a defaultdict of the factory {name!r:.80}")
    return collections.defaultdict(None if name is None else FACTORIES[name], made)


def _read_numpy(code: int, data: memoryview) -> Any:
    parts = atoms.parts_of(data)
    try:
        from holdfast.codec import arrays  # loads NumPy, which only such data needs
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise UnknownType(
            "The data holds a NumPy array, and NumPy is not installed",
            type_name="numpy.ndarray",
            hint="Install it: pip install numpy",
        ) from error
    return arrays.read(code, parts)


_READERS: dict[int, Callable[[Reading, memoryview], Any]] = {
    wire.DICT: _read_dict,
    wire.TUPLE: lambda reading, data: tuple(reading.items(data)),
    wire.SET: lambda reading, data: reading.keyed(set, reading.items(data)),
    wire.FROZENSET: lambda reading, data: reading.keyed(frozenset, reading.items(data)),
    wire.INSTANCE: instances.read_instance,
    wire.ENUM: instances.read_enum,
    wire.DEQUE: _read_deque,
    wire.ORDERED_DICT: lambda reading, data: collections.OrderedDict(reading.mapping(data)[1]),
    wire.COUNTER: lambda reading, data: collections.Counter(reading.mapping(data)[1]),
    wire.DEFAULTDICT: _read_defaultdict,
}
