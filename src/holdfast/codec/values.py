"""Python values <-> bytes: the codec's front door (docs/format.md section 1).

Owns encode and decode, and the order of their attempts. Must not know documents, stores or files.
Holds always: decode(encode(x)) has the types and values of x; encode(decode(b)) == b for every b that encode wrote.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ormsgpack import Ext, packb

from holdfast.codec import codes, refusals
from holdfast.codec.codes import MAX_DEPTH, MAX_INT_BYTES, MAX_VALUE_BYTES, SCALARS, UNWRAP, Bytes, Record
from holdfast.codec.decoding import decode
from holdfast.codec.immutable import is_immutable, is_lasting
from holdfast.codec.instances import NeedsWhole
from holdfast.codec.lowering import Walk
from holdfast.codec.shapes import fields_of
from holdfast.codec.types import REGISTRY
from holdfast.codec.wire import OPTION, big_int, on_fresh_stack, pack
from holdfast.errors import CorruptValue, SchemaMismatch, Unencodable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from holdfast.codec.types import Registry

__all__ = [
    "MAX_DEPTH",
    "MAX_INT_BYTES",
    "MAX_VALUE_BYTES",
    "OPTION",
    "UNWRAP",
    "Bytes",
    "Record",
    "decode",
    "encode",
    "encode_items",
    "fields_of",
    "is_immutable",
    "is_lasting",
]


def encode(value: Any, registry: Registry = REGISTRY, *, depth: int = 0) -> bytes:
    """The value's bytes. Raises Unencodable, with the path, when some part of it cannot be saved.

    ``depth`` is how many containers the value already sits in, for the limit on nesting.
    """
    whole = False
    data = None
    try:
        if type(value) in SCALARS or (type(value) is dict and depth < MAX_DEPTH and _is_flat(value)):
            data = packb(value, big_int, OPTION)
        else:
            data = _walk(value, registry, depth)
    except NeedsWhole:
        whole = True
    except (TypeError, RecursionError):
        # Something is not plain after all, or cannot be saved: look again, at every string and integer,
        # which also finds the path.
        data = None
    if data is None:
        data = _encode_again(value, registry, depth, whole=whole)
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


def encode_items(values: Iterable[Any], registry: Registry = REGISTRY) -> list[bytes]:
    """Each value's bytes on its own. An Unencodable path starts with the index."""
    encoded: list[bytes] = []
    try:
        for value in values:
            encoded.append(encode(value, registry))  # noqa: PERF401 - the length says where an error happened
    except Unencodable as error:
        raise error.within(len(encoded)) from None
    return encoded


def _encode_again(value: Any, registry: Registry, depth: int, *, whole: bool) -> bytes:
    try:
        if whole:
            with suppress(TypeError):
                return _walk(value, registry, depth, whole=True)
        return _encode_checked(value, registry, depth)
    except RecursionError:
        pass
    return on_fresh_stack(lambda: _encode_checked(value, registry, depth))


def _encode_checked(value: Any, registry: Registry, depth: int) -> bytes:
    try:
        return _walk(value, registry, depth, checked=True)
    except NeedsWhole:
        return _walk(value, registry, depth, checked=True, whole=True)
    except Unencodable as error:
        raise _cycle_in(value, error) from None


def _walk(
    value: Any,
    registry: Registry,
    depth: int,
    *,
    checked: bool = False,
    whole: bool = False,
    ranks: dict[int, int] | None = None,
) -> bytes:
    walk = Walk(registry)
    if checked:
        walk.check()
    if whole:
        walk.numbers = {}
    if ranks is not None:
        walk.ranks = ranks
    lowered = walk.lower(value, depth)
    data = pack(Ext(codes.WHOLE, pack(lowered))) if whole else pack(lowered)
    if walk.first_references and ranks is None:
        # Items of a set look alike, but the rest of the value tells them apart: number them in its order.
        return _walk(value, registry, depth, checked=checked, whole=whole, ranks=walk.first_references)
    if walk.risky:
        _check_readable(data, registry)
    return data


def _check_readable(data: bytes, registry: Registry) -> None:
    """An instance refers back to itself, and its hash may be needed before it is complete: try it."""
    try:
        decode(data, registry, inert=True, big=lambda _code, _data: None)
    except CorruptValue:
        raise refusals.hash_cycle() from None
    except SchemaMismatch as error:
        raise Unencodable(f"what would be saved cannot be read back: {error.message}") from error


def _cycle_in(value: Any, error: Unencodable) -> Unencodable:
    """A path of a hundred parts helps nobody: when a container contains itself, say where it closes."""
    if not error.reason.startswith("nested"):
        return error
    above: dict[int, int] = {}
    current = value
    for index, part in enumerate(error.path):
        if id(current) in above:
            short = refusals.contains_itself(type(current))
            short.path = error.path[:index]
            return short
        above[id(current)] = index
        if not isinstance(current, list | dict | tuple):
            return error
        try:
            current = current[part]  # type: ignore[call-overload]
        except (KeyError, IndexError, TypeError):
            return error
    return error
