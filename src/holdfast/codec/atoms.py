"""Values without parts of their own that MessagePack does not know: numbers, dates, time zones, paths, ids.

Owns both directions of each; integers and texts at the edge of what MessagePack knows are among them. Must not know
containers or instances. Holds always: a payload that is no such value, or is in another form than it would be written
in, raises CorruptValue.
"""

from __future__ import annotations

import datetime as dt
import pathlib
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import gcd
from typing import Any
from uuid import UUID

import msgspec
from ormsgpack import Ext

from holdfast.codec import wire
from holdfast.codec.wire import NotPlain, corrupt, is_ours, is_utf8, pack
from holdfast.errors import Unencodable, UnknownType

MAX_INT_BYTES = 2**20
"""One integer. Arithmetic on more takes minutes, so a hostile store could stop a program with a single number."""

_NATIVE_MIN, _NATIVE_MAX = -(2**63), 2**64 - 1

_CHEAP_GCD_BITS = 2**16
"""Fractions are checked for lowest terms up to this size; beyond, the check would take longer than the reading."""


class Bytes(bytearray):
    """A bytearray that a document owns.

    The packing library writes an exact bytearray as bytes without asking; a subclass reaches the codec.
    """

    __slots__ = ()


# --- writing ----------------------------------------------------------------------------------------------------


def lower_str(text: str) -> Any:
    """A text as MessagePack can carry it. The packing library refuses lone surrogates without saying where."""
    return text if is_utf8(text) else Ext(wire.STR, text.encode("utf-8", "surrogatepass"))


def lower_int(value: int) -> Any:
    """An integer as MessagePack can carry it; outside the native range the shortest two's complement."""
    if _NATIVE_MIN <= value <= _NATIVE_MAX:
        return value
    length = _int_length(value)
    if length > MAX_INT_BYTES:
        text = f"an integer of {length:,} bytes; the limit is {MAX_INT_BYTES:,}"
        raise Unencodable(text, hint="Save it as bytes or text.")
    return Ext(wire.INT, value.to_bytes(length, "big", signed=True))


def _int_length(value: int) -> int:
    return ((value if value >= 0 else ~value).bit_length() + 8) // 8


_LOWER: dict[type, Callable[[Any], Any]] = {str: lower_str, int: lower_int}


def _zone_parts(zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined] # the two arguments, as pickle takes them
        return [offset.days * 86400 + offset.seconds, offset.microseconds, lower_str(name[0]) if name else None]
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    raise Unencodable(
        f"a time zone of type {type(zone).__module__}.{type(zone).__qualname__}",
        hint="Use zoneinfo.ZoneInfo(name) or datetime.timezone, such as when.astimezone(ZoneInfo('Europe/Lisbon')).",
    )


def _datetime_parts(value: dt.datetime) -> list[Any]:
    when = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return [*when, value.fold, _zone_parts(value.tzinfo)]


def _time_parts(value: dt.time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _zone_parts(value.tzinfo)]


_FLAVOURS: dict[type, str] = {
    pathlib.PosixPath: "posix",
    pathlib.WindowsPath: "windows",
    pathlib.PurePosixPath: "pure-posix",
    pathlib.PureWindowsPath: "pure-windows",
}

Parts = Callable[[Any], "list[Any] | bytes"]

# Type -> its code, and what gives the parts of a value: a list of numbers and texts, or the payload itself.
_WRITTEN: dict[type, tuple[int, Parts]] = {
    bytearray: (wire.BYTEARRAY, bytes),
    Bytes: (wire.BYTEARRAY, bytes),
    complex: (wire.COMPLEX, lambda value: [value.real, value.imag]),
    range: (wire.RANGE, lambda value: [value.start, value.stop, value.step]),
    dt.datetime: (wire.DATETIME, _datetime_parts),
    dt.date: (wire.DATE, lambda value: [value.year, value.month, value.day]),
    dt.time: (wire.TIME, _time_parts),
    dt.timedelta: (wire.TIMEDELTA, lambda value: [value.days, value.seconds, value.microseconds]),
    dt.timezone: (wire.TZINFO, lambda value: [_zone_parts(value)]),
    Decimal: (wire.DECIMAL, lambda value: str(value).encode("ascii")),
    Fraction: (wire.FRACTION, lambda value: [value.numerator, value.denominator]),
    UUID: (wire.UUID, lambda value: value.bytes),
    **dict.fromkeys(_FLAVOURS, (wire.PATH, lambda value: [_FLAVOURS[type(value)], str(value)])),
}
NAMES = frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in _WRITTEN) | {"zoneinfo.ZoneInfo"}
"""Classes that are written here. Their attributes are nobody's business."""


def _written(kind: type) -> tuple[int, Parts] | None:
    found = _WRITTEN.get(kind)
    if found is None and kind is getattr(sys.modules.get("zoneinfo"), "ZoneInfo", None):
        found = _WRITTEN[dt.timezone]
    return found


def is_atom(kind: type) -> bool:
    """Whether values of this type are written here, and can never change."""
    return kind is not bytearray and kind is not Bytes and _written(kind) is not None


def write(value: Any) -> Ext | None:
    """The extension of one of these values; None for any other."""
    found = _written(type(value))
    if found is None:
        return None
    code, parts_of_value = found
    return Ext(code, _payload(parts_of_value(value)))


def _payload(parts: list[Any] | bytes) -> bytes:
    if type(parts) is bytes:
        return parts
    try:
        return pack(parts)
    except NotPlain:
        return pack([_LOWER[type(part)](part) if type(part) in _LOWER else part for part in parts])


# --- reading ----------------------------------------------------------------------------------------------------


def _read_part(code: int, data: memoryview) -> Any:
    if code in {wire.INT, wire.STR}:
        return read(code, data)
    raise corrupt(f"an extension of the code {code} inside one that has only numbers and texts")


parts_of: Callable[[bytes | memoryview], list[Any]] = msgspec.msgpack.Decoder(list, ext_hook=_read_part).decode
"""The numbers and texts of an atom that is written as an array."""


def _numbers(parts: list[Any], count: int) -> list[Any]:
    """Exactly so many whole numbers; a bool is none."""
    if len(parts) != count or not all(type(part) is int for part in parts):
        raise corrupt(f"{count} whole numbers expected")
    return parts


def _read_int(data: memoryview) -> int:
    if len(data) > MAX_INT_BYTES:
        raise corrupt(f"an integer of {len(data):,} bytes; the limit is {MAX_INT_BYTES:,}")
    value = int.from_bytes(data, "big", signed=True)
    if _NATIVE_MIN <= value <= _NATIVE_MAX or _int_length(value) != len(data):
        raise corrupt("an integer that is not in its shortest form")
    return value


def _read_str(data: memoryview) -> str:
    text = bytes(data).decode("utf-8", "surrogatepass")
    if is_utf8(text):
        raise corrupt("text without lone surrogates in the extension for such text")
    return text


def _read_fraction(data: memoryview) -> Any:
    numerator, denominator = _numbers(parts_of(data), 2)
    small = numerator.bit_length() <= _CHEAP_GCD_BITS and denominator.bit_length() <= _CHEAP_GCD_BITS
    if denominator < 1 or (small and gcd(numerator, denominator) != 1):
        raise corrupt("a fraction that is not in lowest terms")
    # The constructor would look for common factors again.
    value: Any = object.__new__(Fraction)
    for name, part in (("_numerator", numerator), ("_denominator", denominator)):
        object.__setattr__(value, name, part)
    return value


def _read_uuid(data: memoryview) -> UUID:
    if len(data) != 16:
        raise corrupt("a UUID has 16 bytes")
    return UUID(bytes=bytes(data))


def _read_path(data: memoryview) -> Any:
    flavour, text = parts_of(data)
    kind = next((kind for kind, known in _FLAVOURS.items() if known == flavour), None)
    if kind is None or type(text) is not str:
        raise corrupt("a path is its flavour and its text")
    if issubclass(kind, pathlib.Path) and kind is not type(pathlib.Path()):
        name = f"pathlib.{kind.__name__}"
        raise UnknownType(f"A {name} cannot be made on this system", type_name=name, hint="Save pure paths.")
    return kind(text)


def _read_datetime(data: memoryview) -> dt.datetime:
    *numbers, zone = parts_of(data)
    year, month, day, hour, minute, second, microsecond, fold = _numbers(numbers, 8)
    return dt.datetime(year, month, day, hour, minute, second, microsecond, tzinfo=_zone(zone), fold=fold)


def _read_time(data: memoryview) -> dt.time:
    *numbers, zone = parts_of(data)
    hour, minute, second, microsecond, fold = _numbers(numbers, 5)
    return dt.time(hour, minute, second, microsecond, tzinfo=_zone(zone), fold=fold)


def _read_tzinfo(data: memoryview) -> dt.tzinfo:
    (zone,) = parts_of(data)
    value = _zone(zone)
    if value is None:
        raise corrupt("a time zone has one part")
    return value


def _zone(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if type(zone) is str:
        return _named_zone(zone)
    if type(zone) is not list:
        raise corrupt("a time zone is a text or an array")
    seconds, microseconds, name = zone
    _numbers([seconds, microseconds], 2)
    if not 0 <= microseconds < 10**6 or not (name is None or type(name) is str):
        raise corrupt("a fixed offset is seconds, microseconds and a name")
    offset = dt.timedelta(seconds=seconds, microseconds=microseconds)
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _named_zone(key: str) -> dt.tzinfo:
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError, ValueError) as error:
        if not is_ours(error, "zoneinfo"):
            raise
        if isinstance(error, ValueError):  # a key that leads out of the time zone files
            raise corrupt(f"the time zone {key!r:.80}") from error
        raise UnknownType(
            f"This system has no time zone data for {key!r}",
            type_name=f"zoneinfo.ZoneInfo({key!r})",
            hint="Install the tzdata package, or the system's time zone files.",
        ) from error


_READERS: dict[int, Callable[[memoryview], Any]] = {
    wire.INT: _read_int,
    wire.STR: _read_str,
    wire.COMPLEX: lambda data: complex(*parts_of(data)),
    wire.DECIMAL: lambda data: Decimal(bytes(data).decode("ascii")),
    wire.FRACTION: _read_fraction,
    wire.DATETIME: _read_datetime,
    wire.DATE: lambda data: dt.date(*_numbers(parts_of(data), 3)),
    wire.TIME: _read_time,
    wire.TIMEDELTA: lambda data: dt.timedelta(*parts_of(data)),
    wire.TZINFO: _read_tzinfo,
    wire.UUID: _read_uuid,
    wire.PATH: _read_path,
    wire.RANGE: lambda data: range(*parts_of(data)),
}
CODES = frozenset(_READERS)
_ONE_FORM = frozenset({wire.COMPLEX, wire.DECIMAL, wire.TIMEDELTA, wire.RANGE})
"""Several payloads would give the same value of these; only the one that is written counts."""


def read(code: int, data: memoryview) -> Any:
    """The value of one of these extensions. Raises CorruptValue, or UnknownType for what this system lacks."""
    try:
        value = _READERS[code](data)
    except (ValueError, ArithmeticError, TypeError) as error:
        # Constructors say in these ways that there is no such number, date or text.
        if not is_ours(error):
            raise
        raise corrupt(f"{type(error).__name__}: {error}") from error
    if code in _ONE_FORM and _payload(_WRITTEN[type(value)][1](value)) != data:
        raise corrupt(f"a {type(value).__name__} that is not in its usual form")
    return value
