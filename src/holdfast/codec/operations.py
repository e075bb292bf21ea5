"""Operations: the changes of one checkpoint, as data.

Owns their codes and their encoding (format.md section 3). Doing them is ``replay``'s business. What always holds: an
operation's values are encodings, so that doing the operations in order on the state before gives the state after,
whatever classes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ormsgpack import packb

from holdfast.codec.types import NO_TYPES, REGISTRY, Registry
from holdfast.codec.values import OPTION, decode, encode
from holdfast.codec.wire import SCALARS, is_text
from holdfast.errors import CorruptValue

SET, DELETE, SPLICE, ARRANGE, ADD, REMOVE, CLEAR = range(7)
# Whoever reads operations may know other types than the document that they are for.


class Operation(NamedTuple):
    """One change. ``args`` are as in the format's table, each value being its encoding."""

    at_us: int
    code: int
    path: list[Any]
    args: tuple[Any, ...]


def pieces_of(order: Iterable[int | bytes]) -> list[tuple[Any, ...]]:
    """The pieces of an arrange operation: runs of indexes in the old list, and new values."""
    # Tuples of numbers are no burden to the garbage collector.
    found: list[tuple[Any, ...]] = []
    start = count = step = 0  # the run so far
    for one in order:
        if type(one) is not int:
            if count:
                found.append((start, count, step))
                count = 0
            found.append((one,))
        elif count and one == start + count * step:
            count += 1
        elif count == 1 and one == start - 1:
            count, step = 2, -1
        else:
            if count:
                found.append((start, count, step))
            start, count, step = one, 1, 1
    if count:
        found.append((start, count, step))
    return found


def _map_values(code: int, args: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """The arguments with every value in them replaced by ``change(value)``."""
    if code == SET:
        return [change(args[0])]
    if code == SPLICE:
        return [args[0], args[1], [change(value) for value in args[2]]]
    if code == ARRANGE:
        return [[[change(piece[0])] if len(piece) == 1 else list(piece) for piece in args[0]]]
    if code in {ADD, REMOVE}:
        return [[change(value) for value in args[0]]]
    return []


# -- keys in paths ---------------------------------------------------------------------------------------------------


def part_of(key: bytes) -> Any:
    """A dict's key as it stands in the path of an operation: keys of classes are records there."""
    if is_text(key):
        return decode(key)
    return decode(key, NO_TYPES, inert=True)


def key_bytes(part: Any) -> bytes:
    """The encoding of a key in a path."""
    if type(part) in SCALARS:
        try:
            return packb(part)
        except TypeError:  # a lone surrogate, or an integer without end
            pass
    return encode(part, NO_TYPES)


# -- as bytes --------------------------------------------------------------------------------------------------------


def operations_size(operations: list[Operation]) -> int:
    """About how many bytes the values of these operations have."""
    total = 0
    for _, code, _, args in operations:
        if code == SET:
            total += len(args[0])
        elif code in {SPLICE, ADD, REMOVE}:
            total += sum(map(len, args[-1]))
        elif code == ARRANGE:
            total += sum(len(piece[0]) if len(piece) == 1 else 8 for piece in args[0])
    return total


def encode_operations(operations: list[Operation], time_us: int, registry: Registry = REGISTRY) -> bytes:
    """The operations as bytes."""
    rows: list[list[Any]] = []
    for at_us, code, path, args in operations:
        row = [max(0, (time_us - at_us) // 1000), code, path]
        if code == SPLICE:  # by far the most frequent
            row += (args[0], args[1], [[value] for value in args[2]])
        else:
            row += _map_values(code, args, lambda value: [value])
        rows.append(row)
    try:
        return packb(rows, None, OPTION)
    except TypeError:  # a key that the library would not write as the codec does
        return encode(rows, registry)


def decode_operations(data: bytes, time_us: int) -> list[Operation]:
    """The operations again. Keys of registered types come as records."""
    return resolved(raw_operations(data), time_us)


def raw_operations(data: bytes) -> list[Any]:
    """The operations as they are stored, their values still references: ``resolved`` takes all of them, or some."""
    rows = decode(data, NO_TYPES, inert=True)
    if type(rows) is not list:
        raise CorruptValue(_MALFORMED)
    return rows


def needed(rows: list[Any], complete: set[str]) -> list[Any]:
    """Of raw operations those of sections that are not ``complete``, from where each is last given as a whole.

    Sections that are given as a whole among these are complete from then on: nothing from before matters to them.
    """
    found = []
    try:
        for row in reversed(rows):
            path = row[2]
            if path[0] not in complete:
                found.append(row)
                if len(path) == 1 and row[1] in {SET, DELETE}:
                    complete.add(path[0])
    except (TypeError, LookupError) as error:
        raise CorruptValue(_MALFORMED) from error
    found.reverse()
    return found


def resolved(rows: list[Any], time_us: int) -> list[Operation]:
    """Raw operations with their values, as ``decode_operations`` gives them."""

    def resolve(reference: Any) -> bytes:
        (data,) = reference
        if type(data) is not bytes:
            raise TypeError(reference)
        return data

    try:
        found = [
            Operation(time_us - age * 1000, code, path, tuple(_map_values(code, args, resolve)))
            for age, code, path, *args in rows
        ]
        if any(type(operation.path) is not list for operation in found):
            raise TypeError("a path")
        return found
    except (TypeError, ValueError, IndexError) as error:
        raise CorruptValue(_MALFORMED) from error


_MALFORMED = "the operations of a checkpoint do not follow the format"
