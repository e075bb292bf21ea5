"""The way back: bytes to Python values.

Owns the reading of containers and the limits on the way. Must not know where the bytes came from.
Holds always: only Holdfast errors come out, whatever the bytes are; nothing is imported or run because data names it;
memory stays in proportion to the input.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from ormsgpack import unpackb

from holdfast.codec import atoms, codes
from holdfast.codec.codes import MAX_DEPTH, MAX_VALUE_BYTES, SCALARS, Record, holds_record, told_apart
from holdfast.codec.instances import read_enum, read_instance, read_reference, unknown_type
from holdfast.codec.types import FACTORIES, REGISTRY
from holdfast.codec.wire import check_plain_depth, corrupt, is_utf8, nested_too_deep, on_fresh_stack
from holdfast.errors import HoldfastError, UnknownType

if TYPE_CHECKING:
    from holdfast.codec.types import Registry

    Reader = Callable[["Reading", memoryview], Any]

_SAFE_RECURSION = 5000
"""Above this recursion limit the interpreter no longer protects the C stack; nesting is then checked beforehand."""

_SCANNED_BYTES = 4096
"""Up to this size it is cheaper to count the bytes that may open a container than to walk through them."""

_OPENING = (*range(0x80, 0xA0), *range(0xDC, 0xE0))  # maps and arrays, short and long
_NO_OPENING = bytes(byte for byte in range(256) if byte not in _OPENING)


class Reading:
    """One decoding. Kept and used again, because making the library's decoder costs more than a small value."""

    __slots__ = (
        "big",
        "decoder",
        "deferred",
        "depth",
        "extended",
        "hash_risks",
        "inert",
        "instances",
        "owned",
        "references",
        "registry",
        "risk_seen",
        "shallow",
        "size",
        "stepwise",
        "unfinished",
    )

    def __init__(self, *, stepwise: bool = False) -> None:
        self.decoder = msgspec.msgpack.Decoder(ext_hook=self.extension)
        self.registry = REGISTRY
        self.inert = False
        self.owned = False
        self.big: Callable[[int, bytes], Any] | None = None
        self.size = 0
        self.extended = False
        self.depth = 0
        # Instances of the open scope in the order of their bytes, and the numbers of those without their fields yet.
        self.instances: list[Any] | None = None
        self.unfinished: set[int] = set()
        self.references = 0  # how many were read; what leads back to one that is being read counts a lot
        # References to such instances whose hash needs fields; what has to wait until the scope is complete.
        self.hash_risks = 0
        self.risk_seen = False
        self.deferred: list[Callable[[], None]] = []
        # Contents of instances that are not inside others, and hold none: how deep they are is looked at in the end.
        self.shallow: list[Any] = []
        # Set each field as soon as it is read, so that a hash can use it. Slower, and only tried when needed.
        self.stepwise = stepwise

    def value(self, data: bytes | memoryview) -> Any:
        """One whole value."""
        size = self.size = len(data)
        if size > _SAFE_RECURSION:
            if size > MAX_VALUE_BYTES:
                raise corrupt(f"{size:,} bytes; the limit of one value is {MAX_VALUE_BYTES:,}")
            if sys.getrecursionlimit() > _SAFE_RECURSION:
                # This library stops at 1,024 levels by itself, whatever the interpreter allows.
                unpackb(data, ext_hook=_nothing)
        self.extended = False
        result = self.decoder.decode(data)
        if self.shallow:
            shallow, self.shallow = self.shallow, []
            # Models keep their fields in an array of maps, which are not levels of their own, and neither is the list.
            check_plain_depth(shallow, MAX_DEPTH + 2)
        if size > MAX_DEPTH:
            if self.extended:
                self.check_depth(result)
            else:
                check_plain_depth(result)
        return result

    def extension(self, code: int, data: memoryview) -> Any:
        """The library's hook."""
        self.extended = True
        read = _READERS.get(code)
        if read is None:
            raise corrupt(f"an extension of the unknown code {code}")
        if code not in codes.CONTAINERS:
            return read(self, data)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise nested_too_deep()
        if self.instances is None and code in codes.SCOPES:
            self.instances = []
            result = read(self, data)
            self.close()
        else:
            result = read(self, data)
        self.depth -= 1
        return result

    def close(self) -> None:
        """End the scope, and fill the sets and dicts whose keys were not complete when they were read."""
        self.instances = None
        self.hash_risks = 0
        if self.deferred:
            deferred, self.deferred = self.deferred, []
            for fill in deferred:
                fill()

    def items(self, data: memoryview) -> list[Any]:
        """A payload that is one array."""
        result = self.decoder.decode(data)
        if type(result) is not list:
            raise corrupt(f"a {type(result).__name__} where an array belongs")
        if len(data) > MAX_DEPTH - self.depth:
            # The array itself is part of the extension, not a level of its own.
            self.check_depth(result, MAX_DEPTH - self.depth + 1)
        return result

    def part(self, raw: msgspec.Raw) -> Any:
        """A value inside a payload."""
        result = self.decoder.decode(raw)
        kind = type(result)
        if (kind is list or kind is dict) and (
            # Each level takes a byte that opens it, so few such bytes are proof enough.
            len(raw) > _SCANNED_BYTES or len(bytes(raw).translate(None, _NO_OPENING)) > MAX_DEPTH - self.depth
        ):
            # Instances keep their fields in a map, models in an array of maps, which are not levels of their own.
            self.check_depth(result, MAX_DEPTH - self.depth + 2)
        return result

    def check_depth(self, value: Any, left: int = MAX_DEPTH) -> None:
        """Refuse arrays and maps that are nested too deep. What extensions hold was counted on the way down."""
        level = [value]
        while level:
            inner: list[Any] = []
            for container in level:
                kind = type(container)
                if kind is list:
                    inner += [item for item in container if type(item) is list or type(item) is dict]
                elif kind is dict:
                    inner += [item for item in container.values() if type(item) is list or type(item) is dict]
                else:
                    return  # only the outermost can be something else
            left -= 1
            if left < 0:
                raise nested_too_deep()
            level = inner


def _nothing(code: int, data: Any) -> None:
    """Stands in for extensions while only nesting is looked at."""


# --- containers -------------------------------------------------------------------------------------------------


def _read_tuple(reading: Reading, data: memoryview) -> tuple[Any, ...]:
    return tuple(reading.items(data))


def _read_deque(reading: Reading, data: memoryview) -> collections.deque[Any]:
    limit, *items = reading.items(data)
    if limit is not None and (type(limit) is not int or limit < len(items)):
        raise corrupt("a deque that is longer than its limit")
    return collections.deque(items, limit)


def _items_and_risk(reading: Reading, data: memoryview) -> tuple[list[Any], bool, bool]:
    """A payload's items, whether one leads to an instance whose hash may not work yet, and whether instances meet."""
    before, reading.hash_risks = reading.hash_risks, 0
    references = reading.references
    items = reading.items(data)
    risk = reading.hash_risks > 0
    reading.hash_risks += before
    return items, risk, reading.references != references


def _stays_items(code: int, keys: list[Any], shared: bool) -> bool:
    """Whether records among its keys keep inert data from being a set or dict. Equal ones are told apart."""
    if SCALARS.issuperset(map(type, keys)) or not any(map(holds_record, keys)):
        return False
    # An instance that several items of a set refer to stands once in a set that is kept whole, and in each item of a
    # tracked one, unless an item refers to it twice: which of the two it was cannot be told without the class.
    if shared and code == codes.SET and not any(map(_meets_itself, keys)):
        return True
    try:
        if not shared:
            told_apart(keys)
        return len(set(keys)) != len(keys)
    except TypeError:
        return True


def _meets_itself(item: Any) -> bool:
    """Whether one record stands twice inside a set's item."""
    seen: set[int] = set()
    inner = [item]
    while inner:
        part = inner.pop()
        kind = type(part)
        if kind is Record:
            if id(part) in seen:
                return True
            seen.add(id(part))
            part = part.data
            kind = type(part)
        if kind is dict:
            inner += part.values()
        elif kind is tuple or kind is frozenset or kind is list:
            inner += part
    return False


def _fill(reading: Reading, code: int, made: Any, items: list[Any], skip: int, risk: bool, shared: bool) -> Any:
    """Fill a set or dict, now or, when the hash of a key may not work yet, at the end of the scope."""
    keys = items if type(made) is set else items[skip::2]
    if reading.inert and not risk and _stays_items(code, keys, shared):
        return Record(type(made).__name__, 1, "items", items, code=code)

    def fill() -> None:
        if type(made) is set:
            made.update(items)
        elif type(made) is collections.OrderedDict:
            made.update(zip(keys, items[skip + 1 :: 2], strict=True))
        else:
            dict.update(made, zip(keys, items[skip + 1 :: 2], strict=True))
        if len(made) != len(keys):
            raise corrupt("a key or set item that stands twice")

    if risk:
        reading.deferred.append(fill)
        return made
    try:
        fill()
    except TypeError:
        if not reading.inert:
            raise
        # A record inside a key has no hash.
        return Record(type(made).__name__, 1, "items", items, code=code)
    return made


def _read_set(reading: Reading, data: memoryview) -> Any:
    items, risk, shared = _items_and_risk(reading, data)
    return _fill(reading, codes.SET, set(), items, 0, risk, shared)


def _read_frozenset(reading: Reading, data: memoryview) -> Any:
    items, risk, shared = _items_and_risk(reading, data)
    if reading.inert and not risk and _stays_items(codes.FROZENSET, items, shared):
        return Record("frozenset", 1, "items", items, code=codes.FROZENSET)
    try:
        made = frozenset(items)
    except TypeError:
        if not reading.inert:
            raise
        return Record("frozenset", 1, "items", items, code=codes.FROZENSET)
    if len(made) != len(items):
        raise corrupt("a set item that stands twice")
    if risk:
        # Built from what was there. When all is read, every item must still be found, or its hash has changed.
        def check() -> None:
            if not all(item in made for item in items):
                raise corrupt("a set item whose hash needs fields that refer back to the set")

        reading.deferred.append(check)
    return made


def _mapping(reading: Reading, code: int, data: memoryview, make: Callable[[list[Any]], Any], skip: int = 0) -> Any:
    items, risk, shared = _items_and_risk(reading, data)
    if len(items) < skip or (len(items) - skip) % 2:
        raise corrupt("a key without a value")
    made = make(items)
    return made if type(made) is Record else _fill(reading, code, made, items, skip, risk, shared)


def _read_dict(reading: Reading, data: memoryview) -> Any:
    value = _mapping(reading, codes.DICT, data, lambda _: {})
    if type(value) is dict and not reading.deferred and all(type(key) is str and is_utf8(key) for key in value):
        raise corrupt("a dict with plain keys in the extension for other keys")
    return value


def _read_ordered_dict(reading: Reading, data: memoryview) -> Any:
    return _mapping(reading, codes.ORDERED_DICT, data, lambda _: collections.OrderedDict())


def _read_counter(reading: Reading, data: memoryview) -> Any:
    return _mapping(reading, codes.COUNTER, data, lambda _: collections.Counter())


def _read_defaultdict(reading: Reading, data: memoryview) -> Any:
    def make(items: list[Any]) -> Any:
        name = items[0]
        if name is None:
            return collections.defaultdict(None)
        if type(name) is not str:
            raise corrupt("the name of a factory is text")
        factory = FACTORIES.get(name)
        if factory is None:
            registration = reading.registry.by_name(name)
            if registration is None:
                if reading.inert:
                    return Record("defaultdict", 1, "items", items, code=codes.DEFAULTDICT)
                raise unknown_type(name, reading.registry)
            factory = registration.cls
        return collections.defaultdict(factory)

    return _mapping(reading, codes.DEFAULTDICT, data, make, skip=1)


def _read_whole(reading: Reading, data: memoryview) -> Any:
    if reading.instances is not None:
        raise corrupt("a whole value inside a scope")
    reading.instances = []
    value = reading.decoder.decode(data)
    reading.check_depth(value)
    reading.close()
    if reading.inert and type(value) is Record:  # of a dict whose keys have no hash here
        return Record(value.type_name, 1, "items", [value], code=codes.WHOLE)
    kind = _WHOLE.get(type(value))
    if kind is None:
        raise corrupt(f"a {type(value).__name__} as a whole value")
    # Whoever owns it must not take it apart, or the sharing would be lost.
    return kind(value) if reading.owned else value


_WHOLE: dict[type, type] = {list: codes.WholeList, dict: codes.WholeDict}


# --- parts of other makers --------------------------------------------------------------------------------------


def _read_numpy(code: int) -> Reader:
    def read(reading: Reading, data: memoryview) -> Any:
        items = reading.items(data)
        try:
            from holdfast.codec import arrays  # loads NumPy, which only such data needs
        except ImportError as error:
            if reading.inert:
                return Record("numpy.ndarray", 1, "items", items, code=code)
            raise UnknownType(
                "The data holds a NumPy array, and NumPy is not installed",
                type_name="numpy.ndarray",
                hint="Install it: pip install numpy",
            ) from error
        return arrays.read_array(items) if code == codes.ARRAY else arrays.read_scalar(items)

    return read


def _read_big(code: int) -> Reader:
    def read(reading: Reading, data: memoryview) -> Any:
        if reading.big is None:
            raise corrupt("a part that is stored elsewhere, inside a value that must be complete")
        return reading.big(code, bytes(data))

    return read


_READERS: dict[int, Reader] = {
    **atoms.READERS,
    codes.DICT: _read_dict,
    codes.TUPLE: _read_tuple,
    codes.SET: _read_set,
    codes.FROZENSET: _read_frozenset,
    codes.INSTANCE: read_instance,
    codes.ENUM: read_enum,
    codes.REFERENCE: read_reference,
    codes.WHOLE: _read_whole,
    codes.ARRAY: _read_numpy(codes.ARRAY),
    codes.SCALAR: _read_numpy(codes.SCALAR),
    codes.DEQUE: _read_deque,
    codes.ORDERED_DICT: _read_ordered_dict,
    codes.COUNTER: _read_counter,
    codes.DEFAULTDICT: _read_defaultdict,
    codes.BIG: _read_big(codes.BIG),
    codes.BULK: _read_big(codes.BULK),
}

# Readings that are free. A list's pop and append are atomic, so threads can share it; code that a reading calls
# and that decodes in turn takes another one.
_FREE: list[Reading] = []


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
    except IndexError:
        reading = Reading()
    reading.registry = registry
    reading.inert = inert
    reading.owned = owned
    reading.big = big
    try:
        value = reading.value(data)
    except Exception as error:
        # A reading that failed is in an unknown state: it is not used again. Of types that are not known, the outermost
        # is to be named, which is met first when everything is read in order.
        if not reading.risk_seen and not isinstance(error, RecursionError | UnknownType):
            raise _typed(error) from error
    else:
        if not reading.risk_seen:
            reading.big = None
            _FREE.append(reading)
        return value

    def again() -> Any:
        reading = Reading(stepwise=True)
        reading.registry, reading.inert, reading.owned, reading.big = registry, inert, owned, big
        return reading.value(data)

    try:
        return on_fresh_stack(again)
    except Exception as error:
        raise _typed(error) from error


def _typed(error: Exception) -> Exception:
    if isinstance(error, HoldfastError | MemoryError):
        return error
    if isinstance(error, RecursionError):
        return nested_too_deep()
    return corrupt(f"{type(error).__name__}: {error}")
