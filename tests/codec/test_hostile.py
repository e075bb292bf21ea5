"""Whatever the bytes are, only Holdfast errors come out, quickly, and memory stays in proportion."""

from __future__ import annotations

import sys
import tracemalloc
from contextlib import suppress
from typing import Any
from zlib import crc32

import ormsgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ormsgpack import Ext, packb

from holdfast.codec import wire
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import CorruptValue, HoldfastError, SchemaMismatch, Unencodable, UnknownType
from tests.codec import kinds
from tests.codec.test_values import ARRAYS, INSTANCES, TYPES, VALUES, graphs, values

LOAD_ERRORS = (CorruptValue, UnknownType, SchemaMismatch)
BASE_MEMORY = 3_000_000
MEMORY_FACTOR = 150
"""An empty map is one byte in MessagePack and 64 bytes and more in Python."""


def attempt(data: bytes, **options: Any) -> Any:
    """Decode; anything but the three declared errors fails the test. What comes out can be written or is refused.

    Nobody looks through the keys of every plain map, so one that was never written may come out with a key like NaN.
    """
    tracemalloc.start()
    value: Any = None
    try:
        value = decode(data, TYPES, **options)
    except LOAD_ERRORS as error:
        str(error)
    else:
        with suppress(Unencodable):
            encode(value, TYPES)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < BASE_MEMORY + MEMORY_FACTOR * len(data)
    return value


ENCODINGS = [encode(value, TYPES) for value in [*VALUES, *INSTANCES, *ARRAYS] if sys.getsizeof(value) < 10_000]


@given(st.binary(max_size=200))
def test_random_bytes(data):
    attempt(data)
    attempt(data, inert=True)


@given(st.sampled_from([*range(45), 127]), st.binary(max_size=60))
def test_random_payloads_of_every_code(code, payload):
    attempt(packb(Ext(code, payload)))
    attempt(packb([Ext(code, payload)]), inert=True)


raw = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from(["tests.codec.kinds.Note", "tests.codec.kinds.Model", "tests.codec.kinds.Pair", "fields"])
    | st.sampled_from(["pydantic", "value", "<f8", "|V3", "posix", "Europe/Lisbon", 1, 0]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    | st.tuples(st.integers(1, 41), st.lists(inner, max_size=9)).map(lambda pair: Ext(pair[0], packb(pair[1])))
    | st.tuples(st.integers(1, 41), inner).map(lambda pair: Ext(pair[0], packb(pair[1]))),
    max_leaves=20,
)  # fmt: skip


@given(raw)
def test_well_formed_messagepack_of_any_shape(value):
    attempt(packb(value))
    attempt(packb(value), inert=True)


@given(
    st.one_of(
        st.sampled_from(ENCODINGS), values.map(lambda v: encode(v, TYPES)), graphs().map(lambda v: encode(v, TYPES))
    ),
    st.data(),
)
def test_changed_encodings(data, draw):
    changed = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, max(0, len(changed) - 1)))
        what = draw.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if what == "flip" and changed:
            changed[at] ^= draw.draw(st.integers(1, 255))
        elif what == "cut":
            del changed[at : at + draw.draw(st.integers(1, 4))]
        elif what == "insert":
            changed[at:at] = draw.draw(st.binary(min_size=1, max_size=4))
        else:
            changed[at:at] = changed[at : at + 8]
    attempt(bytes(changed))
    attempt(bytes(changed), inert=True)


@pytest.mark.parametrize("data", ENCODINGS[::7], ids=lambda data: data[:12].hex())
def test_every_truncation_is_refused(data):
    for length in range(min(len(data), 300)):
        with pytest.raises(LOAD_ERRORS):
            decode(data[:length], TYPES)
    with pytest.raises(CorruptValue):
        decode(data + b"\xc0", TYPES)


def nested(head: bytes, levels: int) -> bytes:
    return head * levels + b"\xc0"


def nested_extension(code: int, levels: int) -> bytes:
    data = b"\xc0"
    for _ in range(levels):
        data = packb(Ext(code, b"\x91" + data))
    return data


NOTE = Ext(wire.INSTANCE, packb(["tests.codec.kinds.Note", 1, "fields", {"text": "a"}]))


@pytest.mark.parametrize(
    "data",
    [
        *(head + tail for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb") for tail in (b"\xff" * 4, b"\x7f\xff\xff\xff")),
        *(b"\xc9\xff\xff\xff\xff" + bytes([code]) for code in range(1, 42)),
        *(packb(Ext(code, b"\xdd\xff\xff\xff\xff" + b"\xc0" * 50)) for code in {*range(1, 42)} - {2, 7}),
        b"\xdc\xff\xff" * 100_000, b"\xdd\x00\xff\xff\xff" * 100_000, b"\xde\xff\xff\xa0" * 100_000,
        nested(b"\x91", 101), nested(b"\x91", 5_000), nested(b"\x91", 10**6), nested(b"\x81\xa1a", 101),
        nested(b"\x81\xa1a", 10**6), *(nested_extension(code, 101) for code in (1, 4, 5, 6, 26, 27)),
        nested_extension(4, 3_000),
        packb(Ext(wire.INT, bytes(2**20 + 1))), packb(Ext(wire.DECIMAL, b"1E+99999999999999999999")),
        packb(Ext(wire.RANGE, packb([0, 1, 0]))), packb(Ext(wire.ARRAY, packb(["<f8", [2**40, 2**40], b""]))),
        packb(Ext(wire.ARRAY, packb(["|V0", [2**40], b""]))), packb(Ext(wire.ARRAY, packb(["|O", [1], bytes(8)]))),
        packb(Ext(wire.ARRAY, packb(["<f8", [-1], b""]))), packb(Ext(wire.ARRAY, packb(["f8,O", [1], bytes(16)]))),
        packb(Ext(wire.ARRAY, packb([[["a", "|O"]], [1], bytes(8)]))),
        packb(Ext(wire.SCALAR, packb(["<U2", bytes(4)]))),
        packb(Ext(wire.SCALAR, packb(["<U1", b"\xff\xff\xff\xff"]))),
        packb(Ext(wire.DEQUE, packb([2**64 - 1, 1]))),
        packb(Ext(wire.SET, packb([[1]]))), packb(Ext(wire.SET, packb([float("nan")]))),
        packb(Ext(wire.SET, packb([Ext(wire.BYTEARRAY, b"a")]))), packb(Ext(wire.DICT, packb([{}, 1]))),
        packb(Ext(wire.SET, packb([Ext(wire.TUPLE, packb([[]]))]))), packb(Ext(wire.ENUM, packb([1]))),
        packb(Ext(wire.TUPLE, packb([NOTE, Ext(wire.SET, packb([Ext(wire.REFERENCE, packb(0))]))]))),
        nested_extension(21, 200),
        packb(Ext(wire.REFERENCE, packb(0))), packb(Ext(wire.TUPLE, packb([Ext(wire.REFERENCE, packb(0))]))),
        packb(Ext(wire.SET, packb([Ext(wire.SCALAR, packb(["<m8", bytes(8)]))]))),
        packb(Ext(wire.BIG, bytes(32))), packb(Ext(99, b"")), b"\xc7\x00\xfb", b"\xd6\xfb" + bytes(4),
    ],
    ids=lambda data: f"{data[:9].hex()}-{len(data)}-{crc32(data):08x}",
)  # fmt: skip
def test_known_attacks_are_refused(data):
    attempt(data)
    attempt(data, inert=True)
    with pytest.raises(LOAD_ERRORS):
        decode(data, TYPES)


@pytest.mark.parametrize(
    "data",
    [
        packb(Ext(wire.INT, b"\x01")), packb(Ext(wire.INT, bytes(20) + b"\x01")), packb(Ext(wire.STR, b"plain")),
        packb(Ext(wire.SET, packb([1, 1]))), packb(Ext(wire.DICT, packb([1, 2, 1, 3]))),
        packb(Ext(wire.DICT, packb(["a", 1]))), packb(Ext(wire.DICT, packb([1]))),
        packb(Ext(wire.FRACTION, packb([2, 4]))),
        packb(Ext(wire.FRACTION, packb([1, 0]))), packb(Ext(wire.FRACTION, packb([1, -2]))),
        packb(Ext(wire.DECIMAL, b"01.0")), packb(Ext(wire.DECIMAL, b" 1")),
        packb(Ext(wire.DECIMAL, "\u0661".encode())),
        packb(Ext(wire.TIMEDELTA, packb([0, 86400, 0]))), packb(Ext(wire.DATE, packb([2024, 1, True]))),
        packb(Ext(wire.COMPLEX, packb([1, 2]))), packb(Ext(wire.SCALAR, packb(["=f8", bytes(8)]))),
        packb(Ext(wire.SCALAR, packb(["<i1", bytes(1)]))), packb(Ext(wire.TZINFO, packb([None]))),
    ],
    ids=lambda data: data.hex(),
)  # fmt: skip
def test_forms_that_are_never_written_are_refused(data):
    with pytest.raises(CorruptValue):
        decode(data)


def test_nesting_is_refused_even_when_the_interpreter_would_allow_it():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        for data in (nested(b"\x91", 10**6), nested(b"\x81\xa1a", 10**6), nested_extension(4, 3_000)):
            with pytest.raises(CorruptValue):
                decode(data)
    finally:
        sys.setrecursionlimit(before)


def test_a_failed_reading_leaves_nothing_behind():
    good = encode((kinds.Note("a"), {kinds.Point(1)}), TYPES)
    for data in ENCODINGS:
        with pytest.raises(LOAD_ERRORS):
            decode(data[:-1] + b"\xc1\xc1", TYPES)
        assert encode(decode(good, TYPES), TYPES) == good


def test_user_data_never_becomes_a_type():
    fake = {"__type__": "tests.codec.kinds.Note", "py/object": "os.system", "lc": 1, "code": 20, "data": [1, "fields"]}
    assert decode(encode(fake, TYPES), TYPES) == fake
    inside = packb(["tests.codec.kinds.Note", 1, "fields", {"text": "x"}])
    assert decode(encode(inside, TYPES), TYPES) == inside


class Hostile:
    """Its code would run if loading called it."""

    def __init__(self) -> None:
        raise RuntimeError

    def __setattr__(self, name, value):
        raise RuntimeError


def test_hostile_field_names_only_set_attributes_of_that_instance():
    types = Registry()
    types.register(Hostile, name="h")
    types.register(kinds.Slotted, name="s")
    names = ["__class__", "__dict__", "__init__", "__slots__", "__del__", "__weakref__"]
    for name in names:
        data = packb(Ext(wire.INSTANCE, packb(["h", 1, "fields", {name: 1}])))
        value = decode(data, types)
        assert type(value) is Hostile
        assert vars(value) == {name: 1}
        with pytest.raises(SchemaMismatch):
            decode(packb(Ext(wire.INSTANCE, packb(["s", 1, "fields", {name: 1}]))), types)


def test_errors_of_deep_or_odd_data_stay_holdfast_errors_at_any_stack_depth():
    data = nested_extension(4, 100)

    def deeper(levels: int) -> Any:
        if levels:
            return deeper(levels - 1)
        return decode(data)

    for levels in range(0, 900, 50):
        assert encode(deeper(levels)) == data


@given(st.binary(max_size=40))
@example(b"\xd6\xff\x00\x00\x00\x00")
def test_a_decoded_value_can_be_encoded_or_is_refused(data):
    try:
        value = decode(data)
    except HoldfastError:
        return
    with suppress(Unencodable):
        assert decode(encode(value)) is not ormsgpack
