"""Values without parts of their own that MessagePack does not know: numbers, dates, time zones, paths, ids.

Owns both directions of each, side by side. Must not know containers or instances.
Holds always: what is read is in the one form that would be written.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ormsgpack import Ext

from holdfast.codec import codes, refusals
from holdfast.codec.codes import MAX_INT_BYTES, Bytes, Record
from holdfast.codec.wire import corrupt, int_bytes, int_length, is_utf8, pack
from holdfast.errors import UnknownType

if TYPE_CHECKING:
    from holdfast.codec.decoding import Reading
    from holdfast.codec.lowering import Walk

    Handler = Callable[[Walk, Any, int], Any]
    Reader = Callable[[Reading, memoryview], Any]

_NATIVE_MIN, _NATIVE_MAX = -(2**63), 2**64 - 1

_CHEAP_GCD_BITS = 2**16
"""Fractions are checked for lowest terms up to this size; beyond, the check would take longer than the reading."""


# --- writing ----------------------------------------------------------------------------------------------------


def lower_str(walk: Walk, value: str, depth: int) -> Any:  # noqa: ARG001
    """Only checked walks come here: the packing library refuses lone surrogates without saying where."""
    return value if is_utf8(value) else Ext(codes.STR, value.encode("utf-8", "surrogatepass"))


def lower_int(walk: Walk, value: int, depth: int) -> Any:  # noqa: ARG001
    return value if _NATIVE_MIN <= value <= _NATIVE_MAX else Ext(codes.INT, int_bytes(value))


def lower_bytearray(walk: Walk, value: bytearray, depth: int) -> Ext:  # noqa: ARG001
    return Ext(codes.BYTEARRAY, bytes(value))


def lower_complex(walk: Walk, value: complex, depth: int) -> Ext:  # noqa: ARG001
    return Ext(codes.COMPLEX, pack([value.real, value.imag]))


def lower_decimal(walk: Walk, value: Any, depth: int) -> Ext:  # noqa: ARG001
    return Ext(codes.DECIMAL, str(value).encode("ascii"))


def lower_fraction(walk: Walk, value: Any, depth: int) -> Ext:
    return Ext(codes.FRACTION, pack([walk.lower(value.numerator, depth), walk.lower(value.denominator, depth)]))


def lower_range(walk: Walk, value: range, depth: int) -> Ext:
    return Ext(codes.RANGE, pack([walk.lower(part, depth) for part in (value.start, value.stop, value.step)]))


def lower_uuid(walk: Walk, value: Any, depth: int) -> Ext:  # noqa: ARG001
    return Ext(codes.UUID, value.bytes)


_FLAVOURS = {
    "PosixPath": "posix",
    "WindowsPath": "windows",
    "PurePosixPath": "pure-posix",
    "PureWindowsPath": "pure-windows",
}


def lower_path(walk: Walk, value: Any, depth: int) -> Ext:
    return Ext(codes.PATH, pack([_FLAVOURS[type(value).__name__], walk.lower(str(value), depth)]))


def lower_datetime(walk: Walk, value: dt.datetime, depth: int) -> Ext:
    parts = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond, value.fold]
    return Ext(codes.DATETIME, pack([*parts, _zone_parts(walk, value.tzinfo, depth)]))


def lower_date(walk: Walk, value: dt.date, depth: int) -> Ext:  # noqa: ARG001
    return Ext(codes.DATE, pack([value.year, value.month, value.day]))


def lower_time(walk: Walk, value: dt.time, depth: int) -> Ext:
    parts = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return Ext(codes.TIME, pack([*parts, _zone_parts(walk, value.tzinfo, depth)]))


def lower_timedelta(walk: Walk, value: dt.timedelta, depth: int) -> Ext:  # noqa: ARG001
    return Ext(codes.TIMEDELTA, pack([value.days, value.seconds, value.microseconds]))


def lower_tzinfo(walk: Walk, value: dt.tzinfo, depth: int) -> Ext:
    return Ext(codes.TZINFO, pack([_zone_parts(walk, value, depth)]))


def _zone_parts(walk: Walk, zone: Any, depth: int) -> Any:
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined] # the two arguments, as pickle takes them
        return [offset.days * 86400 + offset.seconds, offset.microseconds, walk.lower(name[0], depth) if name else None]
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is not None and type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    raise refusals.zone(zone)


# --- reading ----------------------------------------------------------------------------------------------------


def _ints(items: list[Any], count: int) -> list[Any]:
    """Exactly so many whole numbers; a bool counts as one only where Python keeps it (ranges)."""
    if len(items) != count or not all(type(item) is int for item in items):
        raise corrupt(f"{count} whole numbers expected")
    return items


def _read_int(reading: Reading, data: memoryview) -> int:  # noqa: ARG001
    if len(data) > MAX_INT_BYTES:
        raise corrupt(f"an integer of {len(data):,} bytes; the limit is {MAX_INT_BYTES:,}")
    value = int.from_bytes(data, "big", signed=True)
    if _NATIVE_MIN <= value <= _NATIVE_MAX or int_length(value) != len(data):
        raise corrupt("an integer that is not in its shortest form")
    return value


def _read_str(reading: Reading, data: memoryview) -> str:  # noqa: ARG001
    text = bytes(data).decode("utf-8", "surrogatepass")
    if is_utf8(text):
        raise corrupt("text without lone surrogates in the extension for such text")
    return text


def _read_bytearray(reading: Reading, data: memoryview) -> bytearray:
    return Bytes(data) if reading.owned else bytearray(data)


def _read_complex(reading: Reading, data: memoryview) -> complex:
    real, imaginary = reading.items(data)
    if type(real) is not float or type(imaginary) is not float:
        raise corrupt("a complex number is two floats")
    return complex(real, imaginary)


def _read_decimal(reading: Reading, data: memoryview) -> Any:  # noqa: ARG001
    from decimal import Decimal

    text = bytes(data).decode("ascii")
    value = Decimal(text)
    if str(value) != text:
        raise corrupt("a decimal that is not in its usual form")
    return value


def _read_fraction(reading: Reading, data: memoryview) -> Any:
    from fractions import Fraction
    from math import gcd

    numerator, denominator = _ints(reading.items(data), 2)
    small = numerator.bit_length() <= _CHEAP_GCD_BITS and denominator.bit_length() <= _CHEAP_GCD_BITS
    if denominator < 1 or (small and gcd(numerator, denominator) != 1):
        raise corrupt("a fraction that is not in lowest terms")
    # The constructor would look for common factors again.
    value: Any = object.__new__(Fraction)
    for name, part in (("_numerator", numerator), ("_denominator", denominator)):
        object.__setattr__(value, name, part)
    return value


def _read_range(reading: Reading, data: memoryview) -> range:
    parts = reading.items(data)
    if len(parts) != 3 or not all(type(part) is int or type(part) is bool for part in parts):
        raise corrupt("a range is three whole numbers")
    return range(*parts)


def _read_uuid(reading: Reading, data: memoryview) -> Any:  # noqa: ARG001
    from uuid import UUID

    return UUID(bytes=bytes(data))


_PATHS = {
    "posix": "PosixPath",
    "windows": "WindowsPath",
    "pure-posix": "PurePosixPath",
    "pure-windows": "PureWindowsPath",
}


def _read_path(reading: Reading, data: memoryview) -> Any:
    import pathlib

    items = reading.items(data)
    flavour, text = items
    name = _PATHS.get(flavour) if type(flavour) is str else None
    if name is None or type(text) is not str:
        raise corrupt("a path is its flavour and its text")
    if name in {"PosixPath", "WindowsPath"} and name != type(pathlib.Path()).__name__:
        if reading.inert:
            return Record(f"pathlib.{name}", 1, "items", items, code=codes.PATH)
        raise UnknownType(
            f"A pathlib.{name} cannot be made on this system", type_name=f"pathlib.{name}", hint="Save pure paths."
        )
    return getattr(pathlib, name)(text)


class _NoZone(Exception):
    """The zone is well-formed, but this system's time zone data does not have it."""


def _zone(zone: Any) -> dt.tzinfo | None:
    if zone is None:
        return None
    if type(zone) is str:
        import zoneinfo

        try:
            return zoneinfo.ZoneInfo(zone)
        except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:
            raise _NoZone(zone) from error
    if type(zone) is not list:
        raise corrupt("a time zone is a text or an array")
    seconds, microseconds, name = zone
    _ints([seconds, microseconds], 2)
    if not 0 <= microseconds < 10**6 or not (name is None or type(name) is str):
        raise corrupt("a fixed offset is seconds, microseconds and a name")
    offset = dt.timedelta(seconds=seconds, microseconds=microseconds)
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _zoned(reading: Reading, code: int, items: list[Any], make: Callable[[dt.tzinfo | None], Any]) -> Any:
    try:
        return make(_zone(items[-1]))
    except _NoZone as error:
        name = f"zoneinfo.ZoneInfo({str(error)!r})"
        if reading.inert:
            return Record(name, 1, "items", items, code=code)
        raise UnknownType(
            f"This system has no time zone data for {str(error)!r}",
            type_name=name,
            hint="Install the tzdata package, or the system's time zone files.",
        ) from error


def _read_datetime(reading: Reading, data: memoryview) -> Any:
    items = reading.items(data)
    if len(items) != 9:
        raise corrupt("a datetime has nine parts")
    year, month, day, hour, minute, second, microsecond, fold = _ints(items[:8], 8)

    def make(zone: dt.tzinfo | None) -> dt.datetime:
        return dt.datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone, fold=fold)

    return _zoned(reading, codes.DATETIME, items, make)


def _read_date(reading: Reading, data: memoryview) -> dt.date:
    return dt.date(*_ints(reading.items(data), 3))


def _read_time(reading: Reading, data: memoryview) -> Any:
    items = reading.items(data)
    if len(items) != 6:
        raise corrupt("a time has six parts")
    hour, minute, second, microsecond, fold = _ints(items[:5], 5)
    return _zoned(
        reading, codes.TIME, items, lambda zone: dt.time(hour, minute, second, microsecond, tzinfo=zone, fold=fold)
    )


def _read_timedelta(reading: Reading, data: memoryview) -> dt.timedelta:
    days, seconds, microseconds = _ints(reading.items(data), 3)
    value = dt.timedelta(days, seconds, microseconds)
    if (value.days, value.seconds, value.microseconds) != (days, seconds, microseconds):
        raise corrupt("a timedelta that is not in its usual form")
    return value


def _read_tzinfo(reading: Reading, data: memoryview) -> Any:
    items = reading.items(data)
    if len(items) != 1 or items[0] is None:
        raise corrupt("a time zone has one part")
    return _zoned(reading, codes.TZINFO, items, lambda zone: zone)


# Found by name once their module is there, so that importing the codec does not import them.
LAZY: dict[tuple[str, str], Handler] = {
    ("decimal", "Decimal"): lower_decimal,
    ("fractions", "Fraction"): lower_fraction,
    ("uuid", "UUID"): lower_uuid,
    ("zoneinfo", "ZoneInfo"): lower_tzinfo,
    **{("pathlib", name): lower_path for name in _FLAVOURS},
}

HANDLERS: dict[type, Handler] = {
    str: lower_str,
    int: lower_int,
    bytearray: lower_bytearray,
    Bytes: lower_bytearray,
    complex: lower_complex,
    range: lower_range,
    dt.datetime: lower_datetime,
    dt.date: lower_date,
    dt.time: lower_time,
    dt.timedelta: lower_timedelta,
    dt.timezone: lower_tzinfo,
}

READERS: dict[int, Reader] = {
    codes.INT: _read_int,
    codes.STR: _read_str,
    codes.BYTEARRAY: _read_bytearray,
    codes.COMPLEX: _read_complex,
    codes.DECIMAL: _read_decimal,
    codes.FRACTION: _read_fraction,
    codes.DATETIME: _read_datetime,
    codes.DATE: _read_date,
    codes.TIME: _read_time,
    codes.TIMEDELTA: _read_timedelta,
    codes.TZINFO: _read_tzinfo,
    codes.UUID: _read_uuid,
    codes.PATH: _read_path,
    codes.RANGE: _read_range,
}
