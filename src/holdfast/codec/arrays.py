"""NumPy arrays and scalars. Loaded only once NumPy is there, or stored data needs it.

Owns dtypes in the format: every dtype in any byte order, structured ones included, but for objects and the long double,
whose bytes mean something else on another processor. Holds always: an array comes back read-only over bytes that
nothing else can write; bytes that carry no value (padding) are zero, so equal arrays give equal bytes.
"""

from __future__ import annotations

import re
from codecs import utf_32_be_decode, utf_32_le_decode, utf_32_le_encode
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as npy
from ormsgpack import Ext, packb

from holdfast.codec import wire
from holdfast.codec.wire import MAX_VALUE_BYTES, NotPlain, corrupt, is_ours, pack
from holdfast.errors import CorruptValue, Unencodable

_MAX_EMPTY_ITEMS = 2**20
"""Items of a NumPy dtype without bytes cost nothing to declare, so their number needs a limit of its own."""

_SIMPLE = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c(?:8|16)|[SUV][0-9]{1,10}|[mM]8(?:\[[0-9]{0,10}[A-Za-z]{1,2}\])?)")


def write(value: Any) -> Ext:
    """An array or scalar as its extension."""
    # Text and bytes scalars lose trailing zeros on every way through NumPy (str() included), so they are read
    # as the Python objects that they also are.
    if isinstance(value, np.str_):
        return Ext(wire.SCALAR, packb([f"<U{len(value)}", utf_32_le_encode(value, "surrogatepass")[0]]))
    if isinstance(value, np.bytes_):
        return Ext(wire.SCALAR, packb([f"|S{len(value)}", bytes.__getitem__(value, slice(None))]))
    descr = _packed(value.dtype)
    if not isinstance(value, np.ndarray):
        return Ext(wire.SCALAR, b"\x92" + descr + packb(_clean(np.asarray(value)).tobytes()))
    if value.dtype.itemsize == 0 and value.size > _MAX_EMPTY_ITEMS:
        raise Unencodable("an array with too many items of no size", hint="Save its shape.")
    return Ext(wire.ARRAY, b"\x93" + descr + packb(list(value.shape)) + packb(_clean(value).tobytes()))


def _packed(dtype: np.dtype[Any]) -> bytes:
    """The dtype as the format writes it, after making sure that it comes back as the same dtype."""
    if dtype.hasobject:
        text = "an array of Python objects"
        raise Unencodable(text, hint="Save it as a list (array.tolist()), or give it a dtype.")
    same = None
    packed = b""
    try:
        descr = _as_lists(dtype.str if dtype.names is None else npy.dtype_to_descr(dtype))
        packed = pack(descr)
        same = _dtype(descr)
    except (CorruptValue, NotPlain):
        pass
    except (ValueError, TypeError) as error:
        if not is_ours(error, "numpy"):
            raise
    if same is None or same != dtype or same.type is not dtype.type or dtype.metadata:
        raise Unencodable(
            f"an array of the dtype {dtype}, which has no portable description",
            hint="Convert it to a standard dtype with astype(...), or save the fields one by one.",
        )
    return packed


def _as_lists(descr: Any) -> Any:
    return [_as_lists(part) for part in descr] if isinstance(descr, list | tuple) else descr


def _clean(array: Any) -> Any:
    """The array, or a copy whose padding is zero where it may have some."""
    if array.dtype.names is None:
        return array
    out = np.zeros(array.shape, array.dtype)
    _copy(out, array)
    return out


def _copy(out: Any, array: Any) -> None:
    if array.dtype.names is None:
        out[...] = array
    else:
        for name in array.dtype.names:
            _copy(out[name], array[name])


def _dtype(descr: Any) -> np.dtype[Any]:
    """The dtype of a description, after checking that it is one that this module writes."""
    if type(descr) is str:
        dtype = np.dtype(descr) if _SIMPLE.fullmatch(descr) else None
        if dtype is None or dtype.str != descr:
            raise corrupt(f"the dtype {descr!r:.80}")
        return dtype
    dtype = npy.descr_to_dtype([_field(field) for field in descr])
    if dtype.hasobject or _as_lists(npy.dtype_to_descr(dtype)) != descr:
        raise corrupt("a structured dtype in another form")
    return dtype


def _field(field: Any) -> tuple[Any, ...]:
    if type(field) is not list or len(field) not in {2, 3}:
        raise corrupt("a field of a dtype is its name, its dtype and perhaps a shape")
    name = tuple(field[0]) if type(field[0]) is list else field[0]
    inner: Any = field[1]
    if type(inner) is str:
        _dtype(inner)
    else:
        inner = [_field(part) for part in inner]
    return (name, inner, *(tuple(shape) for shape in field[2:]))


def read(code: int, parts: list[Any]) -> Any:
    """The array or scalar of a payload."""
    try:
        return _read_array(*parts) if code == wire.ARRAY else _read_scalar(*parts)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        # NumPy says in these ways that there is no such dtype or text.
        if not is_ours(error, "numpy"):
            raise
        raise corrupt(f"{type(error).__name__}: {error}") from error


def _read_array(descr: Any, shape: Any, data: Any) -> Any:
    dtype = _dtype(descr)
    if type(shape) is not list or not all(type(length) is int and length >= 0 for length in shape):
        raise corrupt("the shape of an array")
    if type(data) is not bytes or len(data) > MAX_VALUE_BYTES:
        raise corrupt("the content of an array")
    count = prod(shape)
    if count * dtype.itemsize != len(data) or (dtype.itemsize == 0 and count > _MAX_EMPTY_ITEMS):
        raise corrupt(f"an array of {len(data):,} bytes whose shape and dtype say otherwise")
    return np.ndarray(tuple(shape), dtype, buffer=data)


def _read_scalar(descr: Any, data: Any) -> Any:
    dtype = _dtype(descr)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise corrupt("a scalar whose content and dtype disagree")
    if dtype.kind == "S":
        return np.bytes_(data)
    if dtype.kind == "U":
        # The functions behind str.decode, which would put an exception of its own around that of a signal handler.
        text = utf_32_le_decode if descr[0] == "<" else utf_32_be_decode
        return np.str_(text(data, "surrogatepass", True)[0])
    return np.ndarray((), dtype, buffer=data)[()]
