"""Python values <-> bytes: the codec's front door (docs/format.md section 1).

Owns encode and decode, and the order of their attempts. Must not know documents, stores or files.
Holds always: decode(encode(x)) has the types and values of x; encode(decode(b)) == b for every b that encode wrote;
whatever is neither a refusal nor bytes that are no value (an exception of a signal handler, say) comes out as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast.codec import refusals
from holdfast.codec.classes import Record, fields_of, is_immutable, is_key
from holdfast.codec.decoder import SAFE_RECURSION, Reading
from holdfast.codec.encoder import Writing
from holdfast.codec.instances import read_models
from holdfast.codec.limits import MAX_DEPTH, MAX_INT_BYTES, MAX_VALUE_BYTES, SCALARS, UNWRAP, Bytes
from holdfast.codec.types import REGISTRY, Registry
from holdfast.codec.wire import (
    OPTION,
    NotPlain,
    array_of,
    collector_paused,
    corrupt,
    is_ours,
    nested_too_deep,
    on_fresh_stack,
    pack,
)
from holdfast.errors import Unencodable

__all__ = [
    "MAX_DEPTH",
    "MAX_INT_BYTES",
    "MAX_VALUE_BYTES",
    "OPTION",
    "UNWRAP",
    "Bytes",
    "Record",
    "collector_paused",
    "decode",
    "decode_items",
    "encode",
    "fields_of",
    "is_immutable",
    "is_key",
]

_BATCH_ITEMS = 100
"""So many encodings are put together and decoded at a time: fresh memory for all at once would cost more than that."""

# Readings that are free. A list's pop and append are atomic, so threads can share it; code that a reading calls
# and that decodes in turn takes another one.
_FREE: list[Reading] = []


def encode(value: Any, registry: Registry = REGISTRY, *, depth: int = 0) -> bytes:
    """The value's bytes. Raises Unencodable, with the path, when some part of it cannot be saved.

    ``depth`` is how many containers the value already sits in, for the limit on nesting.
    """
    kind = type(value)
    try:
        if kind in SCALARS or (kind is dict and depth < MAX_DEPTH and _is_flat(value)):
            data = pack(value)
        else:
            data = pack(Writing(registry).lower(value, depth))
    except (NotPlain, RecursionError):
        data = _encode_checked(value, registry, depth)
    except Unencodable as error:
        _shorten(value, error)
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
    except Unencodable as error:
        _shorten(value, error)
        raise
    except NotPlain:
        raise RuntimeError("the value is changed by another thread while it is encoded") from None


def _shorten(value: Any, error: Unencodable) -> None:
    """A path of a hundred parts helps nobody: when a container contains itself, say where it closes."""
    above: set[int] = set()
    current = value
    for index, part in enumerate(error.path) if refusals.is_too_deep(error) else ():
        if id(current) in above:
            refusals.contains_itself(error, type(current))
            error.path = error.path[:index]
            return
        above.add(id(current))
        if isinstance(current, dict):
            current = current.get(part)
        elif isinstance(current, list | tuple) and type(part) is int and part < len(current):
            current = current[part]
        else:
            return


def decode(
    data: bytes | memoryview,
    registry: Registry = REGISTRY,
    *,
    inert: bool = False,
    owned: bool = False,
    big: Callable[[int, bytes], Any] | None = None,
    adapted: Callable[[], None] | None = None,
) -> Any:
    """The value of the bytes. Raises CorruptValue, UnknownType or SchemaMismatch.

    ``inert`` reads unknown types as Records instead. ``owned`` gives bytearrays as Bytes. ``big`` is asked, with the
    code and the payload, for parts that are stored elsewhere (codes 40 and 41); without it they are refused.
    ``adapted`` is called when stored content was migrated, or completed by a default, so that the bytes no longer say
    what the value is.
    """
    try:
        reading = _FREE.pop()
    except IndexError as error:
        if not is_ours(error):
            raise
        reading = Reading()
    try:
        value = reading.value(data, registry, inert, owned, big, adapted)
    except RecursionError:
        pass
    else:
        _FREE.append(reading)  # one that failed is in an unknown state, and is not used again
        return value
    try:
        return on_fresh_stack(lambda: Reading().value(data, registry, inert, owned, big, adapted))
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
        if len(others) != len(rest):
            raise corrupt("what should be one encoding is several, or none")
        if models and rest:
            remaining = iter(others)
            others = [models[index] if index in models else next(remaining) for index in range(len(some))]
        made += others if rest else models.values()
    return made
