"""Many models at once: a list of messages, each with an encoding of its own.

Owns a shortcut through the decoding of lists whose items are pydantic models with plain content, as conversations are.
Must not know where the bytes come from. What always holds: what comes out is what ``decode`` would give for the same
bytes; whatever is not certain of that is left to it, errors included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.codec import codes
from holdfast.codec.codes import MAX_DEPTH
from holdfast.codec.shapes import PYDANTIC
from holdfast.codec.types import Registry
from holdfast.codec.wire import check_plain_depth
from holdfast.errors import CorruptValue

# Above this the interpreter no longer protects the C stack, and nesting is checked beforehand elsewhere.
_SAFE_RECURSION = 5000
_HEADS = {0xC7: 3, 0xC8: 4, 0xC9: 6}  # first byte of an extension -> where its payload begins


class _NotPlain(Exception):
    """There is an extension inside an item."""


def _refuse(code: int, data: memoryview) -> Any:  # noqa: ARG001 - the library's hook
    raise _NotPlain


_decode = msgspec.msgpack.Decoder(ext_hook=_refuse).decode


def models(items: list[bytes], registry: Registry) -> list[Any] | None:
    """The items' values, when all of them are models that have not changed since they were saved; otherwise None."""
    if sys.getrecursionlimit() > _SAFE_RECURSION:
        return None
    makers: dict[Any, tuple[int, Callable[[Any], Any]]] = {}
    made: list[Any] = []
    contents: list[Any] = []
    try:
        for item in items:
            start = _HEADS[item[0]]
            if item[start - 1] != codes.INSTANCE or int.from_bytes(item[1 : start - 1], "big") != len(item) - start:
                return None
            name, version, form, content = _decode(item[start:])
            maker = makers.get(name)
            if maker is None:
                registration = registry.by_name(name) if type(name) is str else None
                if registration is None or registration.save is not None:
                    return None
                maker = makers[name] = registration.version, registration.shape.model_of
            value = maker[1](content) if form == PYDANTIC and version == maker[0] else None
            if value is None:
                return None
            contents.append(content)
            made.append(value)
        # Models keep their fields in an array of maps, which are not levels of their own, and neither is the list.
        check_plain_depth(contents, MAX_DEPTH + 2)
    except (_NotPlain, LookupError, ValueError, TypeError, RecursionError, msgspec.DecodeError, CorruptValue):
        return None
    return made
