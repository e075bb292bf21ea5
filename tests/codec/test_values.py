"""Values come back with the same types, equal values give equal bytes, and a refusal says where and why."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import fractions
import functools
import inspect
import itertools
import math
import pathlib
import sys
import threading
import uuid
import zoneinfo
from typing import Any

import numpy as np
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.codec import wire
from holdfast.codec.atoms import Bytes
from holdfast.codec.types import Registry
from holdfast.codec.values import UNWRAP, Writing, decode, decode_items, encode, is_immutable, is_key
from holdfast.codec.wire import MAX_DEPTH
from holdfast.errors import Attribute, Unencodable
from tests.codec import kinds
from tests.codec.kinds import same

TYPES = kinds.registry()


def named():
    """Test ids: a running number and the value's type."""
    count = itertools.count()
    return lambda value: f"{next(count)}-{type(value).__name__}"


def there_and_back(value: Any) -> Any:
    data = encode(value, TYPES)
    back = decode(data, TYPES)
    assert same(value, back), (value, back)
    assert encode(back, TYPES) == data
    return back


# --- every type of the format -----------------------------------------------------------------------------------

LISBON = zoneinfo.ZoneInfo("Europe/Lisbon")

VALUES = [
    None, True, False, 0, -1, 127, 128, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**1000, -(2**1000), 0.0, -0.0,
    1.5, math.inf, -math.inf, math.nan, "", "text", "żółć 🐟", "\0", "\ud800", "a\udfffb", b"", b"\0\xff",
    bytearray(), bytearray(b"ab"), [], [1, [2, [3]]], {}, {"a": {"b": 1}}, {1: 2}, {None: 1, True: 2, 1.5: 3, b"x": 4},
    {"\ud800": 1, "a": 2}, {(1, (2,)): 3, frozenset({1}): 4}, {1.0: "float"}, {1: "int"}, {True: "bool"},
    {-0.0: 1}, (), (1,), ((), ((),)), ([1], {"a": (2,)}), set(), {1, 2.5, "x", None, b"y"},
    {(1, 2), (2, 1)}, frozenset(), frozenset({frozenset({1}), frozenset()}), 1j, complex(math.nan, -0.0),
    decimal.Decimal("1.50"), decimal.Decimal("-0"), decimal.Decimal("NaN123"), decimal.Decimal("sNaN"),
    decimal.Decimal("-Infinity"), decimal.Decimal("1E+999999"), fractions.Fraction(-1, 3),
    fractions.Fraction(2**200, 3),
    dt.datetime(2024, 2, 29, 23, 59, 59, 999999), dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, tzinfo=dt.UTC),
    dt.datetime(2024, 10, 27, 1, 30, fold=1, tzinfo=LISBON), dt.datetime(2024, 10, 27, 1, 30, fold=0, tzinfo=LISBON),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, microseconds=5))),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(0), "UTC")), dt.date(2024, 2, 29),
    dt.time(1, 2, 3, 4, fold=1),
    dt.time(1, 2, tzinfo=dt.UTC), dt.timedelta(-1, 1, 1), dt.timedelta.max, dt.UTC, LISBON,
    dt.timezone(dt.timedelta(seconds=-1), "ź"), uuid.UUID(int=5), pathlib.Path("/tmp/ä"),
    pathlib.PurePosixPath("a/../b"),
    pathlib.PureWindowsPath("C:\\x"), pathlib.Path("bad\udc80name"), range(0), range(5, 2**70, -3), range(True),
    collections.deque(), collections.deque([1, (2,)], 5), collections.OrderedDict([(1, 2), ("a", [3])]),
    collections.Counter("abca"), collections.defaultdict(list, {1: [2]}), collections.defaultdict(None, {"a": 1}),
]  # fmt: skip

INSTANCES = [
    kinds.Note("a", ["b"], kinds.Note("c")), kinds.Point(1, (2, {3})), kinds.Fixed("x", kinds.Fixed("y")),
    kinds.Box[int](5), kinds.Slotted(1, [2], (3,)), kinds.SlottedWithDict(1, 2, 3, {4: 5}),
    kinds.Plain(b=1, a=[2]), kinds.Plain(), *kinds.Colour, *kinds.Level, *kinds.Word, *kinds.Mode, *kinds.Action,
    kinds.Mode(0), kinds.Mode.READ | kinds.Mode.RUN, kinds.Bits(3), kinds.Bits(12), kinds.Bits(-1), kinds.Pair(1),
    kinds.Pair((1,), [kinds.Pair(2, 3)]), kinds.Loose("x", {1}), kinds.Wheel(1, kinds.Bolt(2)), kinds.Open(3),
    kinds.Point(1), kinds.Bolt((1,)), kinds.Frozen(name="a"), kinds.Hashed("a"),
    {kinds.Hashed("a"), kinds.HashedOpen("b")}, kinds.Model(name="a", inner=kinds.Model(name="b")),
    kinds.Model(name="a", count=3, anything={1: (2,)}), kinds.Model.model_construct(count=1),
    kinds.Extra(name="a", more=[1]),
    {kinds.Frozen(name="a"): 1}, kinds.Items([1, 2]), kinds.Celsius((1, 2)), [kinds.Celsius(3),
    {kinds.Pair(1): kinds.Colour.RED}],
    {kinds.Colour.RED: 1, kinds.Level.LOW: 2}, {kinds.Point(1): {kinds.Point(2), kinds.Point(1)}},
]  # fmt: skip

ARRAYS = [
    np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.arange(10)[::-2], np.array(5.0), np.zeros((0, 3)),
    np.zeros((3, 0, 2), "f4"), np.array([1.5, np.nan], ">f8"), np.array([1, 2], "f2"), np.array([1 + 2j], "c8"),
    np.array([True, False]), np.array(["a", "żó"]), np.array([b"x", b"yz"]), np.array(["2024-01-01", "NaT"], "M8[ns]"),
    np.array([1, 2], "m8[25s]"), np.array([b"abc"], "V3"), np.array([(1, 2.5)], [("a", "i4"), ("b", ">f8")]),
    np.array([(1, [[1, 2]], ((3, "x"),))], [("a", "u1"), ("b", "i2", (1, 2)), ("c", [("d", [("e", "f4"),
    ("f", "U3")])])]),
    np.zeros(2, np.dtype([("a", "i1"), ("b", "i8")], align=True)), np.array([], "U5"),
    np.array(["x"], [(("title", "name"), "U1")]), np.datetime64("NaT"), np.asfortranarray(np.ones((2, 3))),
    np.float64(1.5), np.float16(0.1), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j),
    np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.datetime64("2024-01-01T00:00", "m"), np.timedelta64(5, "h"),
    np.void(b"abc"), np.array([(1, 2)], "i4,i4")[0], np.str_("\ud800"),
]  # fmt: skip


@pytest.mark.parametrize("value", [*VALUES, *INSTANCES, *ARRAYS], ids=named())
def test_every_type_comes_back_as_it_was(value):
    there_and_back(value)
    there_and_back([value, (value,), {"k": value}])


KEYS = list(filter(is_key, [*VALUES, *INSTANCES, *ARRAYS]))


@pytest.mark.parametrize("value", KEYS, ids=named())
def test_every_immutable_value_can_be_a_key_and_a_set_item(value):
    there_and_back({value: value})
    there_and_back({value, 17})
    there_and_back(frozenset({(value, 1), (value,)}))
    for kind in (collections.OrderedDict, collections.Counter):
        there_and_back((kind({value: 1}), kinds.Note("a")))
    there_and_back(collections.defaultdict(list, {value: [kinds.Note("a")]}))


def test_keys_are_atoms_enums_and_immutable_compounds_of_such():
    found = {type(value) for value in KEYS}
    assert {int, str, bytes, tuple, frozenset, dt.datetime, pathlib.PurePosixPath, np.float64} <= found
    assert {kinds.Point, kinds.Fixed, kinds.Pair, kinds.Bolt, kinds.Frozen, kinds.Colour, kinds.Bits} <= found
    assert not {list, dict, set, kinds.Note, kinds.Model, kinds.Plain, np.ndarray} & found


def test_plain_values_are_plain_messagepack():
    value = {"role": "user", "content": "hello", "n": [1, 2.5, None, True, b"x", {"a": -1}]}
    assert encode(value) == ormsgpack.packb(value)


def test_a_plain_value_costs_no_copy():
    value = [{"a": [1, {"b": "c"}]}]
    assert Writing(TYPES).lower(value, 0) is value


def test_the_value_is_not_changed_by_encoding():
    value = {"a": [(1, 2), {3}], "b": {1: (2,)}}
    copy = {"a": [(1, 2), {3}], "b": {1: (2,)}}
    encode(value)
    assert same(value, copy)


def test_equal_keys_of_different_types_keep_theirs():
    for key in (1, 1.0, True):
        (back,) = decode(encode({key: "x"}))
        assert type(back) is type(key)


def test_private_extra_and_set_fields_of_models_come_back():
    model = kinds.Model(name="a")
    model._private = {1: 2}
    back = there_and_back(model)
    assert back._private == {1: 2}
    assert back.model_fields_set == {"name"}
    extra = there_and_back(kinds.Extra(name="a", more=(1, 2)))
    assert extra.model_extra == {"more": (1, 2)}
    assert extra == kinds.Extra(name="a", more=(1, 2))
    odd = there_and_back([kinds.Extra.model_construct(**{"name": "a", "\ud800": 1})] * 3)
    assert decode_items([encode(item, TYPES) for item in odd], TYPES) == odd


def test_slots_of_all_levels_come_back_and_unset_ones_stay_unset():
    back = there_and_back(kinds.Slotted(1, "hidden", 2))
    assert (back.a, back.secret(), back.b) == (1, "hidden", 2)
    assert not hasattr(back, "unset")


def test_attributes_beyond_the_declared_ones_come_back():
    note = kinds.Note("a")
    note.extra = (1,)
    assert there_and_back(note).extra == (1,)


def test_no_code_of_the_class_runs_on_either_way():
    @dataclasses.dataclass
    class Guarded:
        x: int

        def __post_init__(self):
            raise RuntimeError

        def __setattr__(self, name, value):
            raise RuntimeError

        def __getattribute__(self, name):
            if name == "x":
                raise RuntimeError
            return object.__getattribute__(self, name)

    types = Registry()
    types.register(Guarded)
    value = object.__new__(Guarded)
    value.__dict__["x"] = 5
    assert decode(encode(value, types), types).__dict__ == {"x": 5}


def test_cached_properties_and_cached_hashes_are_not_state():
    class Cached:
        def __init__(self):
            self.a = 1

        @functools.cached_property
        def costly(self):
            return threading.Lock()

    types = Registry()
    types.register(Cached)
    value = Cached()
    before = encode(value, types)
    assert value.costly
    assert encode(value, types) == before
    for hashed in (kinds.Hashed("a"), kinds.HashedOpen("a")):
        before = encode(hashed, TYPES)
        hash(hashed)
        assert encode(hashed, TYPES) == before
        assert hash(decode(before, TYPES)) == hash(hashed)


def test_the_order_of_assignment_does_not_show():
    one, two = kinds.Plain(a=1, b=2), kinds.Plain(b=2, a=1)
    assert encode(one, TYPES) == encode(two, TYPES)
    note = kinds.Note("x", [], None)
    del note.text
    note.text = "x"
    assert encode(note, TYPES) == encode(kinds.Note("x"), TYPES)


def test_bytearrays_of_a_document_are_bytes_and_encode_alike():
    data = encode(bytearray(b"abc"))
    owned = decode(data, owned=True)
    assert type(owned) is Bytes
    assert encode(owned) == data
    assert type(decode(encode([owned]))[0]) is bytearray


def test_containers_of_other_modules_are_unwrapped():
    class Tracked(dict):
        pass

    class Parted(list):
        pass

    UNWRAP[Tracked] = dict.copy
    UNWRAP[Parted] = lambda _: ormsgpack.Ext(wire.BIG, bytes(32))
    try:
        value = Tracked(a=Tracked(b=(1,)), c=Parted([1]))
        data = encode(value)
        assert decode(data, big=lambda code, payload: (code, payload)) == {
            "a": {"b": (1,)},
            "c": (wire.BIG, bytes(32)),
        }
        with pytest.raises(Unencodable) as caught:
            encode(Tracked(a=[Tracked(b=print)]))
        assert caught.value.path == ("a", 0, "b")
    finally:
        del UNWRAP[Tracked], UNWRAP[Parted]


# --- many at once -----------------------------------------------------------------------------------------------


def message(**fields: Any) -> kinds.Model:
    return kinds.Model.model_construct(**({"name": "a", "count": 1, "inner": None, "anything": None} | fields))


@pytest.mark.parametrize(
    "items",
    [
        [], [1], [message()], [message(name=str(i)) for i in range(100)], [{"role": "user"}] * 3,
        [message(), {"role": "user"}, (1,), message(anything=dt.date(2024, 1, 1)), message(inner=message()), [1]],
        [kinds.Extra(name="a"), kinds.Extra(name="a", more=1), kinds.Items([1]), kinds.Note("a"), kinds.Celsius(1)],
        [message(anything={"a": [{"b": [1, 2.5, None, b"x"]}]}), kinds.Model.model_construct(count=1)],
    ],
    ids=named(),
)  # fmt: skip
def test_many_encodings_are_decoded_as_each_would_be(items):
    encodings = [encode(item, TYPES) for item in items]
    found = decode_items(encodings, TYPES)
    assert same(found, items)
    assert [encode(item, TYPES) for item in found] == encodings
    inert = decode_items(encodings, Registry(), inert=True)
    assert [encode(item, Registry()) for item in inert] == encodings


def test_models_that_share_inside_come_back_so_when_many_are_decoded():
    loop = message()
    loop.anything = [loop]
    found, other = decode_items([encode(loop, TYPES), encode(message(), TYPES)], TYPES)
    assert found.anything[0] is found
    assert found.model_fields_set == loop.model_fields_set
    assert other is not found


def test_many_encodings_may_name_what_is_stored_elsewhere_and_give_owned_bytes():
    encodings = [ormsgpack.packb(ormsgpack.Ext(wire.BIG, bytes(32))), encode(bytearray(b"x"))]
    big, owned = decode_items(encodings, big=lambda code, payload: (code, payload), owned=True)
    assert big == (wire.BIG, bytes(32))
    assert type(owned) is Bytes


# --- sharing and cycles -----------------------------------------------------------------------------------------


def test_instances_keep_shared_identity_and_cycles_inside_one_scope():
    note = kinds.Note("a")
    note.parent = note
    back = there_and_back(note)
    assert back.parent is back
    shared = kinds.Note("s")
    one, two = there_and_back((shared, [shared]))
    assert two[0] is one
    loop = kinds.Model(name="m")
    loop.anything = [loop]
    back = there_and_back(loop)
    assert back.anything[0] is back
    for value in (
        collections.deque([shared, [shared]]),
        collections.OrderedDict({1: shared, kinds.Point(1): shared}),
        collections.defaultdict(list, {kinds.Point(2): shared, "a": {kinds.Point(1): shared}}),
        kinds.Plain(a={(1, kinds.Point(0)): shared}, b=frozenset({kinds.Point(3)}), c=shared, d=kinds.Colour.RED),
    ):
        there_and_back(value)


def test_an_instance_in_two_items_of_a_list_is_two_after_loading():
    shared = kinds.Note("s")
    assert encode([shared, shared], TYPES) == encode([kinds.Note("s"), kinds.Note("s")], TYPES)
    value = {"a": [shared], "b": {"c": (shared, shared)}, "d": "plain"}
    back = there_and_back(value)
    assert back["a"][0] is not back["b"]["c"][0]
    assert back["b"]["c"][0] is back["b"]["c"][1]


def test_a_surrogate_does_not_break_sharing():
    shared = kinds.Note("\ud800")
    back = there_and_back((shared, "\ud801", 2**70, [shared]))
    assert back[0] is back[3][0]


def test_a_keys_bytes_do_not_depend_on_what_is_around_it():
    point = kinds.Point(1, kinds.Fixed("a"))
    for key in (point, (point, point), kinds.Colour.BLUE, frozenset({point, (point,)})):
        data = encode(key, TYPES)
        value = (point, kinds.Note("a"), {key}, {key: point}, collections.OrderedDict({key: point}), point)
        assert encode(value, TYPES).count(data) >= 3
        there_and_back(value)


def test_sets_give_the_same_bytes_in_any_order():
    for order in itertools.permutations(range(4)):
        points = {kinds.Point(str(i), kinds.Fixed(f"inner {i % 2}")) for i in order}
        assert encode(points, TYPES) == encode(
            {kinds.Point(str(i), kinds.Fixed(f"inner {i % 2}")) for i in range(4)}, TYPES
        )


def test_cycles_through_what_cannot_be_built_early_are_refused():
    inner: list[Any] = []
    pair = kinds.Pair(inner)
    inner.append(pair)
    with pytest.raises(Unencodable, match="contains itself"):
        encode(pair, TYPES)
    inner = []
    celsius = kinds.Celsius(inner)
    inner.append(celsius)
    with pytest.raises(Unencodable, match="contains itself"):
        encode(celsius, TYPES)


# --- refusals ---------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_path():
    value = {"plan": [0, {"steps": (1, kinds.Note("a", parent=kinds.Plain(callback=print)))}]}
    with pytest.raises(Unencodable) as caught:
        encode(value, TYPES)
    assert caught.value.path == ("plan", 1, "steps", 1, "parent", "callback")
    assert isinstance(caught.value.path[4], Attribute)
    assert str(caught.value).startswith("state.plan[1].steps[1].parent.callback: a built-in function cannot be saved\n")


class PlainChild(kinds.Point):
    """Of a frozen class, but its instances can have more attributes."""


class Unprintable:
    def __repr__(self):
        raise RuntimeError

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return self is other


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, "function"), (print, "function"), ("".join, "function"), (math, "module"), (int, "class int"),
        ((i for i in ()), "generator"), (sys.__stderr__, "file"), (threading.Lock(), "lock"), (object(), "register"),
        (memoryview(b""), "bytes"), (ormsgpack.Ext(4, b"\x90"), "register"), (ormsgpack.Fragment(b"\x01"), "register"),
        (Unprintable(), "@holdfast.register"), (ValueError(1), "exception"), ({}.keys(), "list"),
        (type("Text", (str,), {})("a"), "str(...)"), (type("Whole", (int,), {})(1), "int(...)"),
        (type("Many", (list,), {})(), "list(...)"), (type("Map", (dict,), {})(), "dict(...)"),
        (collections.defaultdict(lambda: 0), "factory"), (np.array([object()]), "objects"),
        (np.arange(2).view(np.recarray), "asarray"),
        (np.ma.masked_array([1]), "asarray"), (np.rec.array([(1,)])[0], "dtype"), (np.longdouble("1.1"), "dtype"),
        (np.zeros(1, [("\ud800", "i4")]), "dtype"), (2 ** (8 * 2**20), "integer"),
        (dt.datetime(2024, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})()), "ZoneInfo"), (..., "ellipsis"),
        (type("Stamp", (dt.datetime,), {})(2024, 1, 1), "register"),
    ],
    ids=named(),
)  # fmt: skip
def test_what_cannot_be_saved_is_refused_with_a_hint(value, words):
    with pytest.raises(Unencodable) as caught:
        encode({"a": [value]})
    assert caught.value.path == ("a", 0)
    assert words in str(caught.value)
    with pytest.raises(Unencodable):
        encode(value)
    with pytest.raises(Unencodable):
        encode((value,))


def test_a_refused_key_or_set_item_is_named_without_running_its_code():
    for value in ({Unprintable(): 1}, {Unprintable()}, {(1, Unprintable()): 2}):
        with pytest.raises(Unencodable) as caught:
            encode(value)
        assert "Unprintable" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        kinds.Node("a"), kinds.Plain(), kinds.LooseChild(1, 2), math.nan, complex(0, math.nan), decimal.Decimal("NaN"),
        np.float64("nan"), np.datetime64("NaT"), (1, (kinds.Node("a"),)), (math.nan,), frozenset({math.nan}),
        kinds.Alone(1), (kinds.Alone(1),),
        kinds.Point(math.nan), kinds.Pair(kinds.Node("a")), kinds.Fixed("a", kinds.Plain()), PlainChild(1),
    ],
    ids=named(),
)  # fmt: skip
@pytest.mark.parametrize(
    "hold",
    [
        lambda key: {key: 1}, lambda key: {key}, lambda key: frozenset({key}), lambda key: {"a": 1, key: 2},
        lambda key: collections.OrderedDict({key: 1}), lambda key: collections.Counter({key: 1}),
        lambda key: collections.defaultdict(list, {key: []}), lambda key: {(0, key): 1},
    ],
    ids=["dict", "set", "frozenset", "mixed", "OrderedDict", "Counter", "defaultdict", "tuple"],
)  # fmt: skip
def test_keys_that_can_change_or_are_nan_are_refused_with_their_path(key, hold):
    types = TYPES.child()
    types.register(PlainChild)
    with pytest.raises(Unencodable) as caught:
        encode({"x": [hold(key)]}, types)
    assert caught.value.path[:2] == ("x", 0)
    assert len(caught.value.path) == 3
    assert "key or set item" in str(caught.value)


def test_subclassed_keys_are_refused():
    with pytest.raises(Unencodable):
        encode({type("Text", (str,), {})("a"): 1})


def test_lists_and_dicts_that_contain_themselves_are_refused():
    value: dict[str, Any] = {"a": []}
    value["a"].append({"b": value})
    with pytest.raises(Unencodable, match="contain itself") as caught:
        encode(value)
    assert caught.value.path == ("a", 0, "b") * 4
    inner: list[Any] = []
    inner.append((inner,))
    with pytest.raises(Unencodable, match="contain itself"):
        encode(inner)


WRAPS = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"a": inner},
    "tuple": lambda inner: (inner,),
    "other keys": lambda inner: {1: inner},
    "dataclass": kinds.Point,
    "model": lambda inner: kinds.Model.model_construct(name="", anything=inner),
    "own save": kinds.Celsius,
    "mixed": lambda inner: (
        [inner] if isinstance(inner, dict) else (inner,) if isinstance(inner, list) else {"a": inner}
    ),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_nesting_has_a_limit_that_both_ways_agree_on(wrap):
    value: Any = None
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    data = encode(value, TYPES)
    assert encode(decode(data, TYPES), TYPES) == data
    with pytest.raises(Unencodable, match="levels"):
        encode(wrap(value), TYPES)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_limit_does_not_depend_on_how_deep_the_caller_is(wrap):
    value: Any = None
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    data = encode(value, TYPES)

    def deeper(levels: int) -> bytes:
        return deeper(levels - 1) if levels else encode(decode(data, TYPES), TYPES)

    free = sys.getrecursionlimit() - len(inspect.stack(0))
    assert deeper(free - 40) == data


@pytest.mark.parametrize("value", [collections.Counter(), kinds.LooseChild(1, 2)], ids=named())
def test_a_container_with_attributes_of_its_own_is_refused(value):
    there_and_back(value)
    value.extra = 1
    with pytest.raises(Unencodable, match="extra"):
        encode(value, TYPES)


def test_an_unset_field_is_refused():
    note = kinds.Note("a")
    del note.text
    with pytest.raises(Unencodable, match="text"):
        encode(note, TYPES)


# --- arrays -----------------------------------------------------------------------------------------------------


def test_arrays_come_back_read_only_and_cannot_be_made_writable():
    back = decode(encode(np.arange(3)))
    assert not back.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        back.flags.writeable = True


def test_padding_does_not_show():
    dtype = np.dtype([("a", "i1"), ("b", "i8"), ("c", [("d", "i1"), ("e", "f8")])], align=True)
    one, two = np.zeros(2, dtype), np.zeros(2, dtype)
    two.view(np.uint8)[:] = 255
    for name in ("a", "b"):
        two[name] = one[name]
    for name in ("d", "e"):
        two["c"][name] = one["c"][name]
    assert one.tobytes() != two.tobytes()
    assert encode(one) == encode(two)


# --- immutability -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, 1, "a", b"", 1j, (1, ("a",)), frozenset({(1,)}), decimal.Decimal(1), fractions.Fraction(1),
        dt.UTC, LISBON,
        dt.datetime.now(LISBON), dt.date.today(), uuid.uuid4(), pathlib.Path(), range(3),
        kinds.Colour.RED, kinds.Bits(3),
        np.float64(1), decode(encode(np.arange(3))), kinds.Point(1, (2,)), kinds.Fixed("a", kinds.Bolt(1)),
        kinds.Pair(1, 2), kinds.Frozen(name="a"),
    ],
    ids=named(),
)  # fmt: skip
def test_immutable_values_are_known(value):
    assert is_immutable(value)


def frozen_view():
    view = np.arange(3)[:]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(
    "value",
    [
        [], {}, set(), bytearray(), ([],), (1, ({},)), kinds.Note("a"), kinds.Point([]), kinds.Pair([]), kinds.Bolt({}),
        kinds.LooseChild(1, 2), kinds.Model(name="a"), np.arange(3), frozen_view(), print,
        collections.deque(), kinds.Wheel(1), PlainChild(1), object(), kinds.Plain(), np.array([(1,)], "i4,")[0],
        type("Text", (str,), {})("a"), dt.datetime(2024, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})()),
    ],
    ids=named(),
)  # fmt: skip
def test_what_may_change_is_not_called_immutable(value):
    assert not is_immutable(value)


def test_an_immutable_cycle_does_not_hang():
    point = kinds.Point(1)
    object.__setattr__(point, "x", (point,))
    assert not is_immutable(point)


# --- properties -------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=6)
zones = st.one_of(
    st.none(),
    st.just(dt.UTC),
    st.sampled_from(["Europe/Lisbon", "America/New_York", "Asia/Kathmandu"]).map(zoneinfo.ZoneInfo),
    st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), texts),
)
hashable_atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), texts, st.binary(max_size=6),
    st.complex_numbers(allow_nan=True), st.decimals(allow_nan=False), st.fractions(), st.datetimes(timezones=zones),
    st.dates(), st.times(), st.timedeltas(), st.uuids(),
    texts.filter(lambda t: "\0" not in t).map(pathlib.PurePosixPath),
    st.sampled_from([*kinds.Colour, *kinds.Level, *kinds.Word, *kinds.Mode, *kinds.Action]),
    st.integers(0, 7).map(kinds.Mode), st.integers(-9, 9).map(kinds.Bits),
    hnp.arrays(hnp.scalar_dtypes(), ()).map(lambda a: a[()]),
)  # fmt: skip
hashables = st.recursive(
    hashable_atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(kinds.Point, inner, inner),
        st.builds(kinds.Fixed, texts, inner),
        st.builds(kinds.Bolt, inner),
        st.builds(kinds.Pair, inner, inner),
    ),
    max_leaves=6,
).filter(is_key)
arrays = st.one_of(
    hnp.arrays(
        hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes(),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
    ),
    hnp.arrays(hnp.array_dtypes(hnp.scalar_dtypes(), allow_subarrays=True), hnp.array_shapes(max_side=2)),
)
values = st.recursive(
    st.one_of(hashables, st.binary(max_size=9).map(bytearray), arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=3),
        st.sets(hashables, max_size=4),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(hashables, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(hashables, inner, max_size=3).map(lambda d: collections.defaultdict(set, d)),
        st.builds(kinds.Note, texts, st.lists(inner, max_size=2), inner),
        st.builds(kinds.Slotted, inner, inner, inner),
        st.builds(lambda inner: kinds.Model.model_construct(name="n", anything=inner), inner),
        st.builds(lambda inner: kinds.Extra.model_construct(name="n", extra=inner), inner),
        st.builds(kinds.Wheel, st.integers(), inner),
        st.builds(kinds.Celsius, inner),
        st.tuples(inner, inner).map(lambda pair: [*pair, *pair]),
    ),
    max_leaves=12,
)


@given(values)
def test_any_value_comes_back_with_the_same_types_and_bytes(value):
    there_and_back(value)


@given(values)
def test_copies_give_the_same_bytes(value):
    data = encode(value, TYPES)
    assert encode(decode(data, TYPES), TYPES) == encode(decode(data, TYPES), TYPES) == data


@given(st.dictionaries(texts, values, max_size=3))
def test_inert_reading_writes_the_same_bytes_back(value):
    data = encode(value, TYPES)
    inert = decode(data, Registry(), inert=True)
    assert encode(inert, Registry()) == data
    repr(inert)


@st.composite
def graphs(draw):
    """Nodes that refer to each other through lists, tuples, mappings and deques; each name is unique."""
    count = draw(st.integers(1, 6))
    makers = [kinds.Node, kinds.Note]
    nodes = [draw(st.sampled_from(makers))(str(i)) for i in range(count)]
    some = st.lists(st.sampled_from(nodes), max_size=4)
    for node in nodes:
        links = draw(some)
        shape = draw(st.sampled_from(["list", "tuple", "values", "odd keys", "ordered", "deque"]))
        content: Any = {
            "list": lambda links=links: list(links),
            "tuple": lambda links=links: tuple(links),
            "values": lambda links=links: {link.name if isinstance(link, kinds.Node) else "x": link for link in links},
            "odd keys": lambda links=links: {kinds.Point(i): link for i, link in enumerate(links)},
            "ordered": lambda links=links: collections.OrderedDict((kinds.Point(i), n) for i, n in enumerate(links)),
            "deque": lambda links=links: collections.deque(links),
        }[shape]()
        setattr(node, "links" if type(node) is kinds.Node else "parent", content)
    return draw(
        st.sampled_from([nodes, tuple(nodes), {"a": nodes, "b": nodes[0]}, nodes[0], [(node,) for node in nodes]])
    )


@given(graphs())
def test_any_graph_of_instances_comes_back_with_its_sharing(value):
    data = encode(value, TYPES)
    back = decode(data, TYPES)
    assert same(value, back)
    assert encode(back, TYPES) == data
    inert = decode(data, Registry(), inert=True)
    assert encode(inert, Registry()) == data
