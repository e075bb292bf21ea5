"""Types come back only through the registry, under their names, with their versions and migrations."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, NewType

import attrs
import numpy as np
import pydantic
import pytest

from holdfast.codec.classes import Record, shape_of
from holdfast.codec.types import REGISTRY, Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import BadName, BadOption, CorruptValue, SchemaMismatch, Unencodable, UnknownType
from tests.codec import kinds

TYPES = kinds.registry()
POINT = kinds.Point(5)


def types_with(cls: type, **options: Any) -> Registry:
    types = Registry()
    types.register(cls, name="thing", **options)
    return types


# --- names ------------------------------------------------------------------------------------------------------


def test_the_default_name_is_module_and_qualified_name():
    assert TYPES.by_type(kinds.Note).name == "tests.codec.kinds.Note"
    assert TYPES.by_name("tests.codec.kinds.Note").cls is kinds.Note
    assert TYPES.by_type(int) is None
    assert kinds.Note in TYPES
    assert "tests.codec.kinds.Note" in TYPES.names()


@pytest.mark.parametrize("way", ["script", "module"])
def test_a_program_names_its_classes_as_others_would_import_them(tmp_path, way):
    (tmp_path / "prog.py").write_text(
        textwrap.dedent("""
        import dataclasses
        from holdfast.codec.types import REGISTRY
        @REGISTRY.register
        @dataclasses.dataclass
        class Thing:
            x: int
        print(REGISTRY.by_type(Thing).name)
        """)
    )
    arguments = ["prog.py"] if way == "script" else ["-m", "prog"]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment()
    )
    assert done.stdout.strip() == "prog.Thing"


def environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": ""}


def test_two_classes_under_one_name_are_refused():
    types = types_with(kinds.Note)
    with pytest.raises(BadName, match="already"):
        types.register(kinds.Point, name="thing")
    assert types.by_name("thing").cls is kinds.Note


def test_a_class_defined_again_replaces_the_old_one_and_old_instances_can_still_be_saved():
    def define() -> type:
        @dataclasses.dataclass
        class Thing:
            x: int

        return Thing

    types = Registry()
    old, new = types.register(define()), types.register(define())
    assert type(decode(encode(old(1), types), types)) is new
    assert type(decode(encode(new(1), types), types)) is new


def test_a_store_sees_the_programs_types_and_adds_its_own():
    above = types_with(kinds.Note)
    below = above.child()
    below.register(kinds.Point)
    assert below.by_type(kinds.Note)
    assert below.by_name("tests.codec.kinds.Point")
    assert above.by_type(kinds.Point) is None
    with pytest.raises(BadName):
        below.register(kinds.Fixed, name="thing")


def test_register_is_a_decorator_with_and_without_arguments():
    types = Registry()

    @types.register
    @dataclasses.dataclass
    class One:
        x: int

    @types.register(name="two", version=2)
    @dataclasses.dataclass
    class Two:
        x: int

    assert types.by_type(One).version == 1
    assert types.by_name("two").version == 2


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1001, "list", "datetime.datetime", 5, "\ud800"])
def test_bad_names_are_refused(name):
    with pytest.raises(BadName):
        Registry().register(kinds.Note, name=name)


@pytest.mark.parametrize(
    "options",
    [
        {"version": 0},
        {"version": "1"},
        {"version": True},
        {"migrations": {1: dict}},
        {"version": 2, "migrations": {2: dict}},
        {"version": 2, "migrations": {"1": dict}},
        {"version": 2, "migrations": {1: None}},
        {"save": str},
        {"load": str},
    ],
    ids=str,
)
def test_bad_options_are_refused(options):
    with pytest.raises(BadOption):
        Registry().register(kinds.Note, **options)


@pytest.mark.parametrize(
    "cls", [list, int, np.ndarray, type("Many", (list,), {}), ValueError, type("Oops", (KeyError,), {})]
)
def test_classes_that_attributes_do_not_describe_need_save_and_load(cls):
    with pytest.raises(BadOption):
        Registry().register(cls)


def test_only_classes_can_be_registered():
    with pytest.raises(BadOption):
        Registry().register(kinds.Note("a"))


def test_a_subclass_of_a_built_in_can_be_registered_with_save_and_load():
    class Many(list):
        pass

    types = types_with(Many, save=list, load=Many)
    back = decode(encode({"a": Many([1, (2,)])}, types), types)["a"]
    assert type(back) is Many
    assert back == [1, (2,)]


def test_a_module_brings_all_its_data_classes(tmp_path, monkeypatch):
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass Cart:\n    n: int\n")
    (package / "__main__.py").write_text("raise SystemExit('ran')")
    (package / "broken.py").write_text("import no_such_module_at_all")
    (package / "goods.py").write_text(
        textwrap.dedent("""
        import collections, dataclasses, enum
        from shop import Cart
        import attrs, pydantic
        class Kind(enum.Enum):
            A = 1
        class Model(pydantic.BaseModel):
            class Inner(pydantic.BaseModel):
                x: int
            inner: Inner
        @attrs.define
        class Piece:
            x: int
        Row = collections.namedtuple("Row", "a")
        class Plain:
            pass
        Alias = Plain
        def function(): pass
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    types = Registry()
    found = {cls.__qualname__ for cls in types.register_module("shop")}
    assert found == {"Cart", "Kind", "Model", "Model.Inner", "Piece", "Row"}
    assert types.by_name("shop.goods.Model.Inner")
    again = types.register_module(sys.modules["shop"])
    assert {cls.__qualname__ for cls in again} == found


# --- unknown types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [kinds.Note("a"), kinds.Model(name="a"), kinds.Pair(1), kinds.Celsius(1), kinds.Colour.RED, kinds.Wheel(1)],
    ids=lambda value: type(value).__name__,
)
def test_an_unknown_type_is_named_and_never_imported(value):
    data = encode([value], TYPES)
    name = TYPES.by_type(type(value)).name
    with pytest.raises(UnknownType) as caught:
        decode(data, Registry())
    assert caught.value.type_name == name
    (record,) = decode(data, Registry(), inert=True)
    assert type(record) is Record
    assert record.type_name == name
    assert name in repr(record)
    assert encode([record], Registry()) == data
    assert record == decode(data, Registry(), inert=True)[0]
    assert record != decode(encode([kinds.Note("other")], TYPES), Registry(), inert=True)[0]


def test_records_keep_cycles_sets_and_keys():
    node = kinds.Node("a")
    node.links = [node, {kinds.Point(1): node, kinds.Point(2): {kinds.Point(3)}}]
    value = {"x": node, "y": {kinds.Point(1): 2}, "z": frozenset({kinds.Point(1)}), "o": (node, [node])}
    data = encode(value, TYPES)
    inert = decode(data, Registry(), inert=True)
    assert inert["x"] is inert["x"].data["links"][0]
    assert inert["o"][0] is inert["o"][1][0]
    assert encode(inert, Registry()) == data
    assert len(repr(inert)) < 2000


@pytest.mark.parametrize(
    "key",
    [
        kinds.Point(1),
        kinds.Colour.RED,
        kinds.Pair(1),
        (kinds.Point(1), kinds.Colour.RED),
        frozenset({kinds.Point(1)}),
        kinds.Frozen(name="a"),
        (POINT, POINT),
        kinds.Point(POINT, POINT),
    ],
    ids=repr,
)
def test_records_are_keys_where_their_types_were(key):
    value = [{key: 1}, {key, "text"}, frozenset({key}), (key,)]
    data = encode(value, TYPES)
    inert = decode(data, Registry(), inert=True)
    assert [type(part) for part in inert] == [dict, set, frozenset, tuple]
    (again,) = decode(encode((key,), TYPES), Registry(), inert=True)
    assert inert[0][again] == 1
    assert again in inert[1]
    assert again in inert[2]
    assert encode(inert, Registry()) == data


def test_records_stay_keys_whatever_else_was_asked_about_their_class():
    data = encode({kinds.Point(1): 2}, TYPES)
    shape_of(Record)
    assert encode(decode(data, Registry(), inert=True), Registry()) == data


def test_records_are_equal_when_their_bytes_are():
    one, two, other = (decode(encode(kinds.Point(x), TYPES), Registry(), inert=True) for x in (1, 1, 2))
    assert one == two != other
    assert len({one, two, other}) == 2
    assert one != 1


def test_inert_reading_of_known_types_gives_instances():
    assert decode(encode(kinds.Note("a"), TYPES), TYPES, inert=True) == kinds.Note("a")


def test_a_missing_time_zone_is_an_unknown_type():
    import datetime as dt
    import zoneinfo

    data = encode([dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Lisbon"))])
    changed = data.replace(b"Lisbon", b"Atlant")
    with pytest.raises(UnknownType, match="Atlant"):
        decode(changed)
    assert encode(decode(changed, inert=True)) == changed
    with pytest.raises(CorruptValue):
        decode(data.replace(b"Europe/Lisbon", b"../../etc/abc"))


def test_a_defaultdict_calls_nothing_but_built_in_types():
    import collections

    with pytest.raises(Unencodable, match="factory is Plain"):
        encode(collections.defaultdict(kinds.Plain, {1: 2}), TYPES)
    data = encode(collections.defaultdict(list, {1: 2})).replace(b"\xa4list", b"\xa4exec")
    for inert in (False, True):
        with pytest.raises(CorruptValue, match="exec"):
            decode(data, TYPES, inert=inert)


def test_a_class_that_is_no_longer_frozen_cannot_be_a_key_of_stored_data():
    @dataclasses.dataclass(unsafe_hash=True)
    class Thawed:
        x: Any
        y: Any = 0

    for value in ({kinds.Point(1)}, {(1, kinds.Point(1)): 2}):
        data = encode(value, types_with(kinds.Point))
        with pytest.raises(SchemaMismatch, match="frozen") as caught:
            decode(data, types_with(Thawed))
        assert caught.value.type_name == "thing"


# --- versions ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class PersonOne:
    name: str


@dataclasses.dataclass
class PersonThree:
    first: str
    last: str
    tags: list[str] = dataclasses.field(default_factory=list)


def split(fields: dict[str, Any]) -> dict[str, Any]:
    first, last = fields["name"].split(" ")
    return {"first": first, "last": last}


def add_tags(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "tags": ["old"]}


OLD = encode([PersonOne("Ada Lovelace")], types_with(PersonOne))


def test_migrations_run_one_after_another():
    types = types_with(PersonThree, version=3, migrations={1: split, 2: add_tags})
    assert decode(OLD, types) == [PersonThree("Ada", "Lovelace", ["old"])]
    assert decode(encode(decode(OLD, types), types), types) == [PersonThree("Ada", "Lovelace", ["old"])]


def test_a_missing_or_failing_migration_is_a_schema_mismatch():
    for migrations in (
        {},
        {2: add_tags},
        {1: lambda _: 1 / 0, 2: add_tags},
        {1: split, 2: lambda _: None},
        {1: dict, 2: dict},
    ):
        with pytest.raises(SchemaMismatch) as caught:
            decode(OLD, types_with(PersonThree, version=3, migrations=migrations))
        assert caught.value.type_name == "thing"


def test_data_of_a_newer_version_is_a_schema_mismatch():
    data = encode(PersonThree("a", "b"), types_with(PersonThree, version=3))
    with pytest.raises(SchemaMismatch, match="version 3"):
        decode(data, types_with(PersonThree, version=2))
    record = decode(data, types_with(PersonThree, version=2), inert=True)
    assert record.version == 3
    assert "@3" in repr(record)


def test_migrations_of_models_keep_which_fields_were_set():
    class Old(pydantic.BaseModel):
        name: str
        count: int = 1

    class New(pydantic.BaseModel):
        title: str
        count: int = 1
        more: int = 2

    data = encode(Old(name="a"), types_with(Old))
    types = types_with(New, version=2, migrations={1: lambda f: {"title": f["name"], "count": f["count"]}})
    back = decode(data, types)
    assert back == New(title="a")
    assert back.model_fields_set == {"title"}
    assert back.more == 2


def test_migrations_of_enums_named_tuples_and_saved_values():
    class Old(enum.Enum):
        A = 1

    class New(enum.Enum):
        B = 1

    data = encode(Old.A, types_with(Old))
    assert decode(data, types_with(New, version=2, migrations={1: lambda f: {**f, "name": "B"}})) is New.B
    with pytest.raises(SchemaMismatch, match="'A'"):
        decode(data, types_with(New))

    class Two(NamedTuple):
        a: int
        b: int

    data = encode(kinds.Pair(1, 2), types_with(kinds.Pair))
    assert decode(data, types_with(Two, version=2, migrations={1: lambda f: {"a": f["left"], "b": 5}})) == Two(1, 5)
    with pytest.raises(SchemaMismatch):
        decode(data, types_with(Two))
    data = encode(kinds.Celsius(5), types_with(kinds.Celsius, save=lambda c: c.reading(), load=kinds.Celsius))
    newer = types_with(
        kinds.Celsius, version=2, migrations={1: lambda v: v + 1}, save=lambda c: c.reading(), load=kinds.Celsius
    )
    assert decode(data, newer) == kinds.Celsius(6)


def test_a_class_may_change_its_form_with_a_migration():
    class Model(pydantic.BaseModel):
        name: str

    same: dict[int, Any] = {1: dict}
    assert decode(OLD, types_with(Model, version=2, migrations=same)) == [Model(name="Ada Lovelace")]
    data = encode(Model(name="x"), types_with(Model))
    assert decode(data, types_with(PersonOne, version=2, migrations=same)) == PersonOne("x")
    assert decode(OLD, types_with(kinds.Celsius, version=2, migrations=same, save=str, load=kinds.Celsius)) == [
        kinds.Celsius({"name": "Ada Lovelace"})
    ]
    saved = encode(kinds.Celsius(5), types_with(kinds.Celsius, save=lambda c: c.reading(), load=kinds.Celsius))
    assert decode(saved, types_with(PersonOne, version=2, migrations={1: lambda n: {"name": n}})) == PersonOne(5)
    for cls in (Model, kinds.Pair, kinds.Colour):
        with pytest.raises(SchemaMismatch):
            decode(OLD, types_with(cls))
    with pytest.raises(SchemaMismatch):
        decode(OLD, types_with(kinds.Celsius, save=str, load=str))
    with pytest.raises(SchemaMismatch):
        decode(encode(kinds.Colour.RED, types_with(kinds.Colour)), types_with(PersonOne))


def test_a_new_field_with_a_default_needs_no_migration_and_one_without_does():
    @dataclasses.dataclass(slots=True)
    class Slotted:
        name: str
        count: int = 3
        tags: list[str] = dataclasses.field(default_factory=list)

    @attrs.define
    class Attrs:
        name: str
        count: int = 3
        tags: list[str] = attrs.field(factory=list)
        both: str = attrs.Factory(lambda self: self.name * 2, takes_self=True)

    class Model(pydantic.BaseModel):
        name: str
        tags: list[str] = pydantic.Field(default_factory=list)

    assert decode(OLD, types_with(Slotted)) == [Slotted("Ada Lovelace", 3, [])]
    assert decode(OLD, types_with(Attrs)) == [Attrs("Ada Lovelace")]

    class Small(pydantic.BaseModel):
        name: str

    assert decode(encode(Small(name="a"), types_with(Small)), types_with(Model)) == Model(name="a")

    @dataclasses.dataclass
    class Needs:
        name: str
        last: str

    with pytest.raises(SchemaMismatch, match="last"):
        decode(OLD, types_with(Needs))


def test_a_default_may_be_any_object_and_is_not_looked_into():
    class Small(pydantic.BaseModel):
        name: str

    class Large(pydantic.BaseModel):
        name: str
        world: Any = pydantic.Field(default_factory=lambda: sys.modules)

    def fail() -> Any:
        raise RuntimeError

    class Failing(pydantic.BaseModel):
        name: str
        never: Any = pydantic.Field(default_factory=fail)

    data = encode([Small(name="a" * 200)] * 50, types_with(Small))
    assert decode(data, types_with(Large))[0].world is sys.modules
    with pytest.raises(SchemaMismatch, match="never") as caught:
        decode(data, types_with(Failing))
    assert isinstance(caught.value.__cause__.__cause__, RuntimeError)


def test_a_removed_field_of_a_class_that_cannot_hold_it_is_a_schema_mismatch():
    @dataclasses.dataclass(slots=True)
    class Empty:
        pass

    class Model(pydantic.BaseModel):
        pass

    with pytest.raises(SchemaMismatch, match="name"):
        decode(OLD, types_with(Empty))

    class Full(pydantic.BaseModel):
        name: str

    with pytest.raises(SchemaMismatch, match="name"):
        decode(encode(Full(name="a"), types_with(Full)), types_with(Model))


def test_failing_save_and_load_functions_are_reported():
    types = types_with(kinds.Celsius, save=lambda _: 1 / 0, load=kinds.Celsius)
    with pytest.raises(Unencodable, match="ZeroDivisionError") as caught:
        encode({"a": kinds.Celsius(1)}, types)
    assert caught.value.path == ("a",)
    data = encode(kinds.Celsius(1), types_with(kinds.Celsius, save=lambda c: c.reading(), load=kinds.Celsius))
    with pytest.raises(SchemaMismatch, match="ZeroDivisionError"):
        decode(data, types_with(kinds.Celsius, save=str, load=lambda _: 1 / 0))


def test_the_programs_registry_is_the_default():
    @dataclasses.dataclass
    class Thing:
        x: int

    REGISTRY.register(Thing)
    assert decode(encode(Thing(1))) == Thing(1)


def test_importing_the_codec_loads_no_optional_package():
    code = "import sys, holdfast.codec.values; print({'numpy', 'pydantic', 'attr', 'zoneinfo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "set()"


# --- types of fields --------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    SMALL = 1


@dataclasses.dataclass
class Wheel:
    size: int


@attrs.define
class Engine:
    wheels: list[Wheel]
    kind: Kind | None = None


class Place(NamedTuple):
    x: int
    tag: Annotated[Kind, "the kind of it"] = Kind.SMALL


class Driver(pydantic.BaseModel):
    at: Place
    licence: Licence | None = None


@dataclasses.dataclass(frozen=True)
class Stamp:
    text: str


Mark = NewType("Mark", Stamp)


@dataclasses.dataclass
class Car:
    engine: Engine
    drivers: dict[str, tuple[Driver, ...]]
    lock: threading.Lock
    spare: list[kinds.Box[Wheel]] | None = None
    missing: NoSuchClassAnywhere | None = None  # noqa: F821
    anything: Any = None
    callback: Callable[[int], str] | None = None
    choice: Literal["a", "b"] = "a"
    mark: Mark | None = None


class Licence(pydantic.BaseModel):
    owner: Driver | None = None


def test_registering_a_class_registers_the_types_of_its_fields():
    types = Registry()
    types.register(Car, name="car", version=3)
    here = __name__
    assert types.names() == sorted(
        ["car", "tests.codec.kinds.Box", *(f"{here}.{name}" for name in ("Driver", "Engine", "Kind", "Licence"))]
        + [f"{here}.{name}" for name in ("Place", "Stamp", "Wheel")]
    )
    assert types.by_type(Wheel).version == 1
    assert types.by_type(threading.Lock) is None
    driver = Driver(at=Place(1), licence=Licence())
    value = [Engine([Wheel(1)], Kind.SMALL), driver, Stamp("x")]
    again = Registry()
    again.register(Car)
    assert decode(encode(value, types), again) == value


def test_a_class_that_is_defined_later_is_found_when_it_is_needed():
    scope: dict[str, Any] = {"__name__": "later_module", "dataclasses": dataclasses, "types": Registry()}
    sys.modules["later_module"] = module = ModuleType("later_module")
    module.__dict__.update(scope)
    try:
        exec(
            "@types.register\n@dataclasses.dataclass\nclass Plan:\n"
            "    steps: list['Step']\n    before: 'Plan | None' = None\n",
            module.__dict__,
        )
        types = module.types
        assert types.by_name("later_module.Step") is None
        exec("@dataclasses.dataclass\nclass Step:\n    text: str\n", module.__dict__)
        plan = module.Plan([module.Step("a")])
        assert decode(encode(plan, types), types) == plan
        assert types.names() == ["later_module.Plan", "later_module.Step"]
    finally:
        del sys.modules["later_module"]


def test_what_was_registered_by_hand_stays_as_it_is():
    types = Registry()
    types.register(Wheel, name="wheel", version=2, migrations={1: dict})
    types.register(Engine)
    assert types.by_type(Wheel).name == "wheel"
    assert "wheel" in types.names()
    above = Registry()
    above.register(Kind, name="kind")
    below = above.child()
    below.register(Engine)
    assert below.by_type(Kind).name == "kind"
    assert below.by_type(Wheel)
    assert above.by_type(Wheel) is None


def test_a_class_with_save_and_load_brings_no_types_of_fields():
    types = Registry()
    types.register(Engine, save=str, load=str)
    assert types.names() == [f"{__name__}.Engine"]


def test_a_name_that_is_taken_keeps_a_fields_type_out_until_one_is_saved():
    types = Registry()
    types.register(kinds.Note, name=f"{__name__}.Wheel")
    types.register(Engine)
    assert types.by_type(Wheel) is None
    with pytest.raises(Unencodable, match="not registered"):
        encode(Engine([Wheel(1)]), types)


def test_threads_that_ask_at_once_all_find_a_fields_type():
    for _ in range(20):
        types = Registry()
        types.register(Car)
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda types=types, found=found: found.append(types.by_type(Wheel)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(found)
        assert len(found) == 4
