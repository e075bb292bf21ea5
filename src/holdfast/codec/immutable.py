"""Whether a value can ever change. A value that cannot needs no tracking and may be shared.

Must not know bytes or the registry. Holds always: True is a promise, False is only a doubt.
"""

from __future__ import annotations

import datetime as dt
import sys
from typing import Any

from holdfast.codec.codes import MAX_DEPTH, Record
from holdfast.codec.shapes import ENUM, FIELDS, TUPLE, shape_of

_ATOMS: set[type] = {type(None), bool, int, float, str, bytes, complex, range, dt.date, dt.timedelta}
_ATOMS |= {dt.timezone, type(Ellipsis), type(NotImplemented)}

_LAZY_ATOMS = frozenset(
    {
        ("decimal", "Decimal"),
        ("fractions", "Fraction"),
        ("uuid", "UUID"),
        ("zoneinfo", "ZoneInfo"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "PureWindowsPath"),
    }
)


def is_immutable(value: Any) -> bool:
    """Whether neither the value nor anything in it can change (without going behind Python's back)."""
    return _immutable(value, 0)


def is_lasting(key: Any) -> bool:
    """As ``is_immutable``, for keys and set items of inert data: a record there stands for a key that was one."""
    if type(key) is Record:
        return True
    if type(key) is tuple or type(key) is frozenset:
        return all(map(is_lasting, key))
    return is_immutable(key)


def _immutable(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return True
    if depth > MAX_DEPTH:
        return False
    if kind is tuple or kind is frozenset:
        return all(type(item) in _ATOMS or _immutable(item, depth + 1) for item in value)
    if kind is dt.datetime or kind is dt.time:
        return value.tzinfo is None or _immutable(value.tzinfo, depth + 1)
    module = getattr(kind, "__module__", None)
    if type(module) is str and (module, kind.__name__) in _LAZY_ATOMS:
        if getattr(sys.modules.get(module), kind.__name__, None) is kind:
            _ATOMS.add(kind)
            return True
        return False
    numpy = sys.modules.get("numpy")
    if numpy is not None and (isinstance(value, numpy.generic) or kind is numpy.ndarray):
        return _immutable_array(numpy, value)
    return _immutable_instance(value, depth)


def _immutable_array(numpy: Any, value: Any) -> bool:
    if isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
        return True
    if value.dtype.hasobject:
        return False
    while isinstance(value, numpy.ndarray | numpy.void):
        if value.flags.writeable:
            return False
        base = value.base
        if base is None:
            # An array that owns its memory can be made writable again; one over bytes cannot.
            return isinstance(value, numpy.void)
        value = base
    return isinstance(value, bytes)


def _immutable_instance(value: Any, depth: int) -> bool:
    shape = shape_of(type(value))
    if shape.form == ENUM:
        return True
    if shape.form == TUPLE:
        return not shape.has_dict and all(_immutable(item, depth + 1) for item in tuple.__iter__(value))
    if shape.form == FIELDS and shape.frozen:
        return all(_immutable(item, depth + 1) for item in shape.take(value).values())
    return False
