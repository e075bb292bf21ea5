"""The last step before bytes: packing what the walk has lowered, and the words for bytes that are no value.

Must not know Python types beyond MessagePack's own. Holds always: the packing library writes nothing by its own
ideas; whatever it does not know natively is either an extension already or an error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import ormsgpack
from ormsgpack import Ext, packb

from holdfast.codec import codes
from holdfast.codec.codes import MAX_DEPTH, MAX_INT_BYTES
from holdfast.errors import CorruptValue, Unencodable

T = TypeVar("T")

OPTION = (
    ormsgpack.OPT_PASSTHROUGH_BIG_INT
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
FLAT_TUPLE = OPTION & ~ormsgpack.OPT_PASSTHROUGH_TUPLE
"""For a tuple of plain scalars, which is written as an array without making a list of it."""


def pack(lowered: Any) -> bytes:
    """The bytes of a lowered value. A TypeError asks for a checked walk, which knows the path of the culprit."""
    return packb(lowered, big_int, OPTION)


def big_int(value: Any) -> Ext:
    """The packing library's hook: only integers outside the native range get here."""
    if type(value) is not int:
        raise TypeError
    return Ext(codes.INT, int_bytes(value))


def int_bytes(value: int) -> bytes:
    """Two's complement, big-endian, shortest."""
    length = int_length(value)
    if length > MAX_INT_BYTES:
        raise Unencodable(
            f"an integer of {length:,} bytes; the limit is {MAX_INT_BYTES:,}", hint="Save it as bytes or text."
        )
    return value.to_bytes(length, "big", signed=True)


def int_length(value: int) -> int:
    return ((value if value >= 0 else ~value).bit_length() + 8) // 8


def array_of(encodings: list[bytes]) -> bytes:
    """One MessagePack array of items that are encoded already."""
    return _head(len(encodings), 0x90, b"\xdc", b"\xdd") + b"".join(encodings)


def map_of(pairs: list[bytes]) -> bytes:
    """One MessagePack map of pairs, each a key and its value, that are encoded already."""
    return _head(len(pairs), 0x80, b"\xde", b"\xdf") + b"".join(pairs)


def _head(count: int, short: int, medium: bytes, long: bytes) -> bytes:
    if count < 16:
        return bytes([short | count])
    return medium + count.to_bytes(2, "big") if count < 2**16 else long + count.to_bytes(4, "big")


def is_utf8(text: str) -> bool:
    """Whether the text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def on_fresh_stack(function: Callable[[], T]) -> T:
    """Call the function in a thread, where it has the whole recursion limit to itself.

    The format allows a hundred levels. Whether they fit must not depend on how deep the caller happens to be.
    """
    from threading import Thread

    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the caller's thread
            errors.append(error)

    thread = Thread(target=run, name="holdfast-codec")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def corrupt(text: str) -> CorruptValue:
    return CorruptValue(f"Not a value of the format: {text}")


def nested_too_deep() -> CorruptValue:
    return corrupt(f"nested more than {MAX_DEPTH} levels deep")


def check_plain_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Refuse what is nested too deep, of values without extensions."""
    # The collector's view of what an object refers to goes through a level at C speed.
    level = [value]
    for _ in range(left + 1):
        level = gc.get_referents(*level)
        if not level:
            return
    raise nested_too_deep()


def has_reference(data: bytes) -> bool:
    """Whether an encoding refers to an instance inside it (code 22)."""
    if not any(head in data for head in _REFERENCES):
        return False
    found = False

    def look(code: int, payload: memoryview) -> None:
        nonlocal found
        found = found or code == codes.REFERENCE
        if code in codes.CONTAINERS or code == codes.ENUM:
            decoder.decode(payload)

    decoder = msgspec.msgpack.Decoder(ext_hook=look)
    decoder.decode(data)
    return found


# How a reference to a small number, one above 127, and one above 255 begins.
_REFERENCES = (bytes((0xD4, codes.REFERENCE)), bytes((0xD5, codes.REFERENCE)), bytes((0xC7, 3, codes.REFERENCE)))
