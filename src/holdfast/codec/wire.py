"""MessagePack itself: the one place where its headers are written and read, and the numbers of the format.

Owns the codes and limits of docs/format.md section 1, packing what the codec has made ready, joining and splitting
encodings, and the checks that protect the stack. Must not know Python types beyond MessagePack's own.
Holds always: a code, once released, keeps its meaning; no Python code runs inside the packing library (it would turn
whatever that raises into a TypeError); an exception of a signal handler is never taken for an error of the data.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

import msgspec
import ormsgpack
from ormsgpack import Ext, packb

from holdfast.errors import CorruptValue

T = TypeVar("T")

DICT = 1
INT = 2
STR = 3
TUPLE = 4
SET = 5
FROZENSET = 6
BYTEARRAY = 7
COMPLEX = 8
DECIMAL = 9
FRACTION = 10
DATETIME = 11
DATE = 12
TIME = 13
TIMEDELTA = 14
TZINFO = 15
UUID = 16
PATH = 17
RANGE = 18
INSTANCE = 20
ENUM = 21
REFERENCE = 22
ARRAY = 24
SCALAR = 25
DEQUE = 26
ORDERED_DICT = 27
COUNTER = 28
DEFAULTDICT = 29
BIG = 40
BULK = 41
CONTENT = 42

MAX_DEPTH = 100
"""Containers inside one another. Far above real states, far below what would exhaust the C stack."""

MAX_VALUE_BYTES = 2**31 - 1
"""One encoded value. Lengths stay within 32 bits signed everywhere; larger data belongs into several values."""

SCALARS: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})
"""Types that MessagePack carries as they are (an int or str at the edge of its range excepted)."""

SURE_KEYS = SCALARS - {float}
"""Scalars that can be dict keys and set items whatever their value; a float may be NaN."""

TEXT: frozenset[type] = frozenset({str})

OPTION = (
    ormsgpack.OPT_PASSTHROUGH_BIG_INT
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
"""The packing library writes nothing by its own ideas."""

FLAT_TUPLE = OPTION & ~ormsgpack.OPT_PASSTHROUGH_TUPLE
"""For a tuple of scalars, which is written as an array without making a list of it."""


class NotPlain(Exception):
    """A text with lone surrogates, an integer outside the native range or a key that is no text is in there.

    The packing library does not say where, so whoever meets this looks at every text and integer.
    """


# --- whose error it is ------------------------------------------------------------------------------------------


def is_ours(error: BaseException, *libraries: str) -> bool:
    """Whether C code that the codec called has raised it, or one of the libraries, rather than a signal handler.

    A handler runs between any two instructions, so an ``except`` around a single call can catch its exception too.
    The innermost frame tells the two apart: what C code raises has none of its own.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return name.startswith(("holdfast.codec.", *libraries))


def corrupt(text: str) -> CorruptValue:
    """The error for bytes that are no value of the format."""
    return CorruptValue(f"Not a value of the format: {text}")


# --- writing ----------------------------------------------------------------------------------------------------


def pack(lowered: Any, option: int = OPTION) -> bytes:
    """The bytes of what MessagePack can carry, extensions included. Raises NotPlain."""
    try:
        return packb(lowered, None, option)
    except TypeError as error:
        if not is_ours(error):
            raise
        raise NotPlain from None


def is_utf8(text: str) -> bool:
    """Whether the text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if not is_ours(error):
            raise
        return False
    return True


# --- encodings put together and taken apart ---------------------------------------------------------------------


_EXTENSIONS = {0xC7: 2, 0xC8: 3, 0xC9: 5} | dict.fromkeys(range(0xD4, 0xD9), 1)  # first byte -> where the code stands
SIZED_EXTENSIONS = frozenset({b"\xc7", b"\xc8", b"\xc9"})
"""How an extension begins, unless it has one of the five lengths with a first byte of their own."""
_ARRAYS = {0xDC: 3, 0xDD: 5}  # first byte -> where the items begin
_MAPS = {0xDE: 3, 0xDF: 5}
_LONG_TEXTS = frozenset({0xD9, 0xDA, 0xDB})
raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def array_of(encodings: Sequence[bytes]) -> bytes:
    """One array of items that are encoded already."""
    return _head(len(encodings), 0x90, b"\xdc", b"\xdd") + b"".join(encodings)


def map_of(pairs: Sequence[bytes]) -> bytes:
    """One map of pairs, each a key and its value, that are encoded already."""
    return _head(len(pairs), 0x80, b"\xde", b"\xdf") + b"".join(pairs)


def _head(count: int, short: int, medium: bytes, long: bytes) -> bytes:
    if count < 16:
        return bytes([short | count])
    return medium + count.to_bytes(2, "big") if count < 2**16 else long + count.to_bytes(4, "big")


def extension_of(code: int, payload: bytes) -> bytes:
    """One extension."""
    return packb(Ext(code, payload))


def opened_extension(data: bytes) -> tuple[int, int] | None:
    """Code and start of the payload when the encoding is one extension, and nothing else."""
    at = _EXTENSIONS.get(data[0]) if data else None
    if at is None or len(data) <= at:
        return None
    length = 1 << (data[0] - 0xD4) if at == 1 else int.from_bytes(data[1:at], "big")
    return (data[at], at + 1) if len(data) == at + 1 + length else None


def is_text(data: bytes) -> bool:
    """Whether the encoding is a text without lone surrogates."""
    return 0xA0 <= data[0] <= 0xBF or data[0] in _LONG_TEXTS


def array_items(data: bytes | memoryview) -> list[bytes] | None:
    """The encodings of an array's items; None when it is no array."""
    return _items(data, 0x90, _ARRAYS, 1)


def map_items(data: bytes | memoryview) -> list[bytes] | None:
    """The encodings of a map's keys and values in turn; None when it is no map."""
    return _items(data, 0x80, _MAPS, 2)


def _items(data: bytes | memoryview, short: int, long: dict[int, int], each: int) -> list[bytes] | None:
    first = data[0] if len(data) else 0
    if short <= first < short + 16:
        return split(memoryview(data)[1:], each * (first - short))
    at = long.get(first)
    return None if at is None else split(memoryview(data)[at:], each * int.from_bytes(data[1:at], "big"))


def split(payload: bytes | memoryview, count: int) -> list[bytes]:
    """Encodings that stand one after another. Raises CorruptValue when they are not exactly so many."""
    if count >= 2**32:
        raise corrupt(f"{count:,} items in one container")
    try:
        return list(map(bytes, raws(b"".join((b"\xdd", count.to_bytes(4, "big"), payload)))))
    except (msgspec.DecodeError, RecursionError) as error:
        if not is_ours(error):
            raise
        raise corrupt(f"what should be {count} encodings is not: {error}") from error


# --- nesting ----------------------------------------------------------------------------------------------------


def nested_too_deep() -> CorruptValue:
    """The error for bytes with too many levels."""
    return corrupt(f"nested more than {MAX_DEPTH} levels deep")


def check_plain_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Refuse what is nested too deep, of values that hold nothing but what MessagePack knows by itself."""
    # The collector's view of what an object refers to goes through a level at C speed.
    level = [value]
    for _ in range(left + 1):
        level = gc.get_referents(*level)
        if not level:
            return
    raise nested_too_deep()


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Refuse lists and dicts that are nested too deep. What stands in them and is neither is not looked into."""
    level = [value] if type(value) is list or type(value) is dict else []
    while level:
        left -= 1
        if left < 0:
            raise nested_too_deep()
        level = [item for item in gc.get_referents(*level) if type(item) is list or type(item) is dict]


def on_fresh_stack(function: Callable[[], T]) -> T:
    """Call the function in a thread, where it has the whole recursion limit to itself.

    The format allows a hundred levels. Whether they fit must not depend on how deep the caller happens to be.
    """
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


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold the cyclic garbage collector off while many objects are made that are all kept.

    It looks at everything young each time some hundred containers were made; while a large value is decoded all of it
    is alive, and looking takes longer than decoding. Of threads that overlap, the first to come switches it on again.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
