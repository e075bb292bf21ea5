"""The way back: bytes become Python values.

Owns the reading of containers and the limits on the way. Must not know where the bytes came from.
Holds always: nothing is imported or run because data names it; memory stays in proportion to the input; bytes that are
no value raise CorruptValue where that is seen, and what somebody else raises meanwhile passes through.
"""

from __future__ import annotations

import collections
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from ormsgpack import unpackb

from holdfast.codec import atoms, wire
from holdfast.codec.classes import ITEMS, Record, is_key, spoils_key
from holdfast.codec.instances import read_enum, read_instance, read_reference
from holdfast.codec.types import FACTORIES, REGISTRY
from holdfast.codec.wire import (
    MAX_DEPTH,
    MAX_VALUE_BYTES,
    SURE_KEYS,
    TEXT,
    check_depth,
    check_plain_depth,
    corrupt,
    is_ours,
    is_utf8,
    nested_too_deep,
    raws,
)
from holdfast.errors import SchemaMismatch, UnknownType

if TYPE_CHECKING:
    from holdfast.codec.types import Registry

    Big = Callable[[int, bytes], Any]

SAFE_RECURSION = 5000
"""Above this recursion limit the interpreter no longer protects the C stack; nesting is then checked beforehand."""

_SCOPES = frozenset({wire.TUPLE, wire.INSTANCE, wire.DEQUE, wire.ORDERED_DICT, wire.COUNTER, wire.DEFAULTDICT})
"""Extensions that open a scope, inside which instances are numbered, unless one is open already."""

_ALONE = frozenset({wire.SET, wire.FROZENSET, wire.ENUM})
"""Extensions whose content has nothing to do with the scope around them."""

_INSTANCE_BYTE = bytes([wire.INSTANCE])


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
        if size > SAFE_RECURSION:
            if size > MAX_VALUE_BYTES:
                raise corrupt(f"{size:,} bytes; the limit of one value is {MAX_VALUE_BYTES:,}")
            if sys.getrecursionlimit() > SAFE_RECURSION:
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
                check_depth(result)
                self.check_depth()
            else:
                check_plain_depth(result)
        self.big = None  # what it leads to must not live as long as this
        return result

    def content(self, raw: msgspec.Raw | memoryview) -> Any:
        """What a payload, or a part of one, holds."""
        self._extended = False
        result = self._decode(raw)
        if len(raw) > MAX_DEPTH:
            if self._extended:
                check_depth(result, _PAYLOAD_DEPTH)
            else:
                self._shallow.append(result)
        self._extended = True
        return result

    def check_depth(self) -> None:
        """Refuse payloads that are nested too deep, of those that were read since the last call."""
        if self._shallow:
            shallow, self._shallow = self._shallow, []
            check_plain_depth(shallow, _PAYLOAD_DEPTH + 1)

    def items(self, data: memoryview) -> list[Any]:
        """A payload that is one array."""
        result = self.content(data)
        if type(result) is not list:
            raise corrupt(f"a {type(result).__name__} where an array belongs")
        return result

    def pairs(self, data: memoryview, skip: int = 0) -> list[Any]:
        """A payload of keys and values in turn, after ``skip`` other items."""
        if self.instances is None or _INSTANCE_BYTE not in bytes(data):
            items = self.items(data)
        else:
            # Keys have nothing to do with the scope that their values are in.
            scope, items = self.instances, []
            for index, raw in enumerate(raws(data)):
                self.instances = scope if (index - skip) % 2 else None
                items.append(self.content(raw))
            self.instances = scope
        if len(items) < skip or (len(items) - skip) % 2:
            raise corrupt("a key without a value")
        return items

    def _extension(self, code: int, data: memoryview) -> Any:
        """The library's hook."""
        self._extended = True
        read = _READERS.get(code)
        if read is None:
            return self._atom(code, data)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise nested_too_deep()
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
            return read_reference(self, data)
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
        if code not in {wire.BIG, wire.BULK}:
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
    items = reading.pairs(data)
    keys = items[::2]
    if TEXT.issuperset(map(type, keys)) and all(map(is_utf8, keys)):
        raise corrupt("a dict with plain keys in the extension for other keys")
    return _keyed(reading, dict, keys, items[1::2])


def _read_mapping(reading: Reading, data: memoryview, make: Callable[[Any], Any]) -> Any:
    items = reading.pairs(data)
    return make(_keyed(reading, dict, items[::2], items[1::2]))


def _read_defaultdict(reading: Reading, data: memoryview) -> Any:
    items = reading.pairs(data, 1)
    name = items[0]
    if name is not None and (type(name) is not str or name not in FACTORIES):
        raise corrupt(f"a defaultdict of the factory {name!r:.80}")
    factory = None if name is None else FACTORIES[name]
    return collections.defaultdict(factory, _keyed(reading, dict, items[1::2], items[2::2]))


def _keyed(reading: Reading, make: Callable[[Any], Any], keys: list[Any], items: list[Any] | None = None) -> Any:
    """A set of these keys, or a mapping from them to the items."""
    if not SURE_KEYS.issuperset(map(type, keys)):
        for key in keys:
            if not is_key(key):
                raise _no_key(reading, key)
    try:
        made = make(keys if items is None else zip(keys, items, strict=True))
    except (TypeError, ValueError) as error:  # of what has no hash; NumPy has both
        if not is_ours(error):
            raise
        raise _no_key(reading, next((key for key in keys if type(key).__hash__ is None), None)) from error
    if len(made) != len(keys):
        raise corrupt("a key or set item that stands twice")
    return made


def _no_key(reading: Reading, key: Any) -> Exception:
    key = spoils_key(key)
    registration = reading.registry.by_type(type(key))
    if registration is None:
        return corrupt(f"a {type(key).__name__} as a key or set item")
    return SchemaMismatch(
        f"{registration.name} was saved as a dict key or set item, and its instances can change now",
        type_name=registration.name,
        hint="Make the class frozen again, or register it under another name to read this without it.",
    )


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
    wire.SET: lambda reading, data: _keyed(reading, set, reading.items(data)),
    wire.FROZENSET: lambda reading, data: _keyed(reading, frozenset, reading.items(data)),
    wire.INSTANCE: read_instance,
    wire.ENUM: read_enum,
    wire.DEQUE: _read_deque,
    wire.ORDERED_DICT: lambda reading, data: _read_mapping(reading, data, collections.OrderedDict),
    wire.COUNTER: lambda reading, data: _read_mapping(reading, data, collections.Counter),
    wire.DEFAULTDICT: _read_defaultdict,
}
