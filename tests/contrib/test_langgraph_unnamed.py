"""Classes that nobody registered: taken as they come, found again where that runs nothing, and otherwise named."""

from __future__ import annotations

import abc
import enum
import gc
import sys
import textwrap
import types
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, NewType, TypedDict, TypeVar

import attrs
import ormsgpack
import pydantic
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Send

from holdfast.codec import wire
from holdfast.codec.classes import Record
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.contrib.langgraph.tuples import Reader
from holdfast.contrib.langgraph.types import classes_of, registry_for
from holdfast.errors import BadOption, SchemaMismatch, UnknownType
from tests import warm
from tests.contrib import langgraph_values as kinds
from tests.contrib.threads import META, checkpoint, config

RAN: list[str] = []


def ran(*_args: Any, **_more: Any) -> Any:
    RAN.append("ran")
    raise AssertionError


@pytest.fixture(autouse=True)
def nothing_ran():
    RAN.clear()
    yield
    gc.collect()
    assert RAN == []


def instance(name: str, form: str, content: Any, code: int = wire.INSTANCE) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb([name, 1, form, content])))


# -- taken as they come, and found again -----------------------------------------------------------------------------


@dataclass
class Guarded:
    """All that could run while one is made."""

    name: str
    tags: list[str] = field(default_factory=list)

    def __new__(cls, *_: Any) -> Guarded:  # noqa: PYI034
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.name == "forged":
            ran()

    __setstate__ = __init_subclass__ = ran

    def __setattr__(self, name: str, value: Any) -> None:
        if value == "forged":
            ran()
        object.__setattr__(self, name, value)


class Checked(pydantic.BaseModel):
    amount: int

    @pydantic.field_validator("amount")
    @classmethod
    def _positive(cls, value: int) -> int:
        return ran() if value < 0 else value

    def model_post_init(self, _context: Any) -> None:
        if self.amount < 0:
            ran()


class Outer:
    @dataclass(frozen=True)
    class Inner:
        x: int


@dataclass
class Base:
    x: int


class Below(Base):
    """A subclass that is not decorated itself."""


V = TypeVar("V")


@dataclass
class Boxed(Generic[V]):
    value: V


VALUES = [
    Guarded("a", ["b"]), Checked(amount=3), Outer.Inner(1), Below(2), Boxed(3), kinds.Leg("a"), kinds.Trip(name="t"),
    kinds.Mood.HURRIED, kinds.Right.READ | kinds.Right.WRITE, kinds.Point(1, (2,)), kinds.Old(), kinds.Guest("a"),
    {kinds.Pair(1, 2), kinds.Pair(2, 1)}, kinds.Names(["a"]), kinds.loose(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_data_class_is_taken_as_it_comes_and_found_by_a_saver_that_has_put_nothing(store_path, value):
    with HoldfastSaver(store_path) as saver:
        at = saver.put(config("t"), checkpoint({"v": [value]}), META, {})
        saver.put_writes(at, [("v", value)], "task")
    with HoldfastSaver(store_path) as saver:
        found = saver.get_tuple(at)
        assert found.checkpoint["channel_values"] == {"v": [value]}
        assert type(found.checkpoint["channel_values"]["v"][0]) is type(value)
        assert found.pending_writes == [("task", "v", value)]
        assert [one.checkpoint["channel_values"]["v"] for one in saver.list(at)] == [[value]]


def test_no_code_of_the_class_runs_when_it_is_read():
    registry = registry_for(REGISTRY)
    made = decode(instance(f"{__name__}.Guarded", "fields", {"name": "forged", "tags": []}), registry)
    assert (type(made), made.name) == (Guarded, "forged")
    made = decode(instance(f"{__name__}.Checked", "pydantic", [{"amount": -1}, None, [], None]), registry)
    assert (type(made), made.amount) == (Checked, -1)


PROGRAM = """
import sys
from dataclasses import dataclass
from typing import TypedDict
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt, Command
from holdfast.contrib.langgraph import HoldfastSaver
{before}

@dataclass
class Offer:
    flight: str
    price: int

class Trip(TypedDict, total=False):
    offer: {kind}
    booked: str

def look(state):
    return {{"offer": {kind}("TP 1351", 99)}}

def book(state):
    return {{"booked": state["offer"].flight + interrupt("yes?")}}

builder = StateGraph(Trip).add_node("look", look).add_node("book", book)
builder.add_edge(START, "look").add_edge("look", "book")
graph = builder.compile(checkpointer=HoldfastSaver(sys.argv[1]{more}))
config = {{"configurable": {{"thread_id": "t"}}}}
if sys.argv[2] == "ask":
    graph.invoke({{}}, config)
else:
    print(graph.invoke(Command(resume="!"), config)["booked"])
"""


def run(tmp_path, word: str, *, kind: str = "Offer", before: str = "", more: str = "", script: str = "program.py"):
    (tmp_path / script).write_text(PROGRAM.format(kind=kind, before=before, more=more))
    command = [sys.executable, script, "store", word]
    return warm.run(command, loaded=warm.LANGGRAPH, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["Offer", "shop.Deal"])
def test_a_graph_goes_on_in_a_process_that_has_put_nothing_yet(tmp_path, kind):
    (tmp_path / "shop.py").write_text(
        "from typing import NamedTuple\nclass Deal(NamedTuple):\n flight: str\n price: int"
    )
    before = "import shop"
    assert run(tmp_path, "ask", kind=kind, before=before).returncode == 0
    done = run(tmp_path, "answer", kind=kind, before=before)
    assert done.stdout == "TP 1351!\n", done.stderr


def test_a_class_inside_a_function_is_named_by_the_error_and_by_the_graph(tmp_path):
    before = textwrap.dedent("""
        import logging
        logging.basicConfig()
        def inside():
            @dataclass
            class Deal:
                flight: str
                price: int
            return Deal
        made = [inside()]
    """)
    asked = run(tmp_path, "ask", kind="made[0]", before=before)
    assert asked.returncode == 0
    assert "WARNING:holdfast.contrib.langgraph:A new process can read what is stored of program.inside" in asked.stderr
    failed = run(tmp_path, "answer", kind="made[0]", before=before)
    assert "the thread has a program.inside.<locals>.Deal, but it was defined inside a function" in failed.stderr
    assert "HoldfastSaver(..., types=[Deal])" in failed.stderr
    for given in ("made", "builder", "[builder]"):
        done = run(tmp_path, "answer", kind="made[0]", before=before, more=f", types={given}")
        assert done.stdout == "TP 1351!\n", done.stderr


def test_a_class_of_a_module_that_is_not_loaded_is_named_with_the_line_to_add(store_path):
    with HoldfastSaver(store_path) as saver:
        shop = types.ModuleType("shop_of_mine")
        sys.modules["shop_of_mine"] = shop
        exec("from dataclasses import dataclass\n@dataclass\nclass Deal:\n    price: int\n", vars(shop))
        at = saver.put(config("t"), checkpoint({"v": shop.Deal(1), "n": 1}), META, {})
        saver.put_writes(at, [("v", shop.Deal(2))], "task")
        del sys.modules["shop_of_mine"]
    with HoldfastSaver(store_path) as saver:
        for read in (saver.get_tuple, lambda at: list(saver.list(at))):
            with pytest.raises(
                UnknownType, match=r"shop_of_mine\.Deal, but this program has not imported it"
            ) as caught:
                read(at)
            assert "HoldfastSaver(..., types=['shop_of_mine'])" in caught.value.hint
        assert "shop_of_mine" not in sys.modules
        sys.modules["shop_of_mine"] = shop
        assert saver.get_tuple(at).checkpoint["channel_values"]["v"] == shop.Deal(1)
        del sys.modules["shop_of_mine"]
    with HoldfastSaver(store_path, strict=False) as saver:
        found = saver.get_tuple(at)
        record = found.checkpoint["channel_values"]["v"]
        assert type(record) is Record
        assert (record.type_name, record.data) == ("shop_of_mine.Deal", {"price": 1})
        assert found.pending_writes[0][2].data == {"price": 2}
        after = saver.put(at, checkpoint({"v": record, "n": 2}), META, {})
        made = list(Reader.of(saver, "t", "").points())
        assert len(made) == 2
        assert len({dict(point.manifest.sections)["v"] for point in made}) == 1, "byte for byte"
    with HoldfastSaver(store_path, types=[shop]) as saver:
        assert saver.get_tuple(after).checkpoint["channel_values"] == {"v": shop.Deal(1), "n": 2}


# -- what a graph names ------------------------------------------------------------------------------------------------


class Leaf(pydantic.BaseModel):
    mood: kinds.Mood


class Deep(TypedDict):
    leaf: Leaf | None


Named = NewType("Named", kinds.Point)


class Whole(TypedDict):
    deep: dict[str, Deep]
    offers: Annotated[list[kinds.Guest], list.__add__]
    named: Named


class Input(pydantic.BaseModel):
    leg: kinds.Leg


class Lower(TypedDict):
    pair: kinds.Pair


def test_a_graph_names_the_classes_of_its_schemas_channels_and_subgraphs():
    below = StateGraph(Lower).add_node("b", lambda _: {}).add_edge(START, "b").compile()
    builder = StateGraph(Whole, input_schema=Input).add_node("a", lambda _: {}).add_node("sub", below)
    builder.add_edge(START, "a").add_edge("a", "sub")
    expected = {Leaf, kinds.Mood, kinds.Guest, kinds.Point, Input, kinds.Leg, kinds.Pair}
    for graph in (builder, builder.compile()):
        assert expected <= set(classes_of(graph))
    assert Leaf in registry_for(REGISTRY, builder)
    with pytest.raises(BadOption, match="classes, modules and graphs"):
        registry_for(REGISTRY, [3])


# -- hostile names -----------------------------------------------------------------------------------------------------


@dataclass
class Bomb:
    path: str

    def __del__(self) -> None:
        ran()


@dataclass(eq=False)
class Hashed:
    x: int

    def __hash__(self) -> int:
        return ran()


@dataclass(frozen=True)
class Equal:  # noqa: PLW1641 - dataclass makes its hash
    x: int

    def __eq__(self, other: object) -> bool:
        return ran()


@dataclass
class Asking:
    x: int

    def __getattribute__(self, name: str) -> Any:
        return ran()


@dataclass
class Shadow:
    x: int

    @property
    def __dict__(self) -> Any:
        return ran()


@dataclass
class Masked:
    x: int

    @property
    def __class__(self) -> Any:
        return ran()


class Missing(enum.Enum):
    A = 1

    @classmethod
    def _missing_(cls, _value: object) -> Any:
        return ran()


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        asked = {"__mro__", "_fields", "__members__", "model_config"}
        return ran() if name in asked else super().__getattribute__(name)


class Odd(metaclass=Meta):
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}


class Mapping(dict):
    __dataclass_fields__: ClassVar[dict[str, Any]] = {}


@dataclass
class Late:
    x: int
    made: Any = field(default_factory=ran)


@attrs.define
class LateAttrs:
    x: int
    made: Any = attrs.Factory(ran)


class LateModel(pydantic.BaseModel):
    x: int
    made: Any = pydantic.Field(default_factory=ran)


class Plain:
    x = 1


class Abstract(abc.ABC):
    @abc.abstractmethod
    def work(self) -> None: ...


class _Lazy:
    """What some libraries put into a module: it imports when it is asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        return ran()


LAZY = _Lazy()


@pytest.mark.parametrize(
    "name",
    ["Bomb", "Hashed", "Equal", "Asking", "Shadow", "Masked", "Odd", "Mapping", "Plain", "Abstract", "LAZY", "LAZY.x",
     "ran", "RAN", "pytest", "Outer", "Outer.Inner.x", "VALUES", "", ".", "..", "__name__", "Base.__init__.__globals__",
     "pydantic.BaseModel", "Outer.__class__", "Base.__dataclass_fields__", "Bomb." * 190, "no\x00thing"],
)  # fmt: skip
def test_a_class_whose_code_could_run_is_not_taken_because_data_names_it(name):
    registry = registry_for(REGISTRY)
    loaded = set(sys.modules)
    for form, content in (("fields", {"x": 1}), ("pydantic", [{}, None, [], None]), ("value", 1)):
        with pytest.raises(UnknownType):
            decode(instance(f"{__name__}.{name}", form, content), registry)
    with pytest.raises(UnknownType):
        decode(instance(f"{__name__}.{name}", None, 1, wire.ENUM), registry)
    assert set(sys.modules) == loaded


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "antigravity.fly", "builtins.eval", "builtins.type"])
def test_what_is_no_data_class_is_never_taken(name):
    with pytest.raises(UnknownType):
        decode(instance(name, "fields", {}), registry_for(REGISTRY))


def test_a_module_that_answers_for_names_it_does_not_have_is_not_asked():
    lazy = types.ModuleType("lazy_of_mine")
    lazy.__getattr__ = ran
    sys.modules["lazy_of_mine"] = lazy
    sys.modules["object_of_mine"] = LAZY
    try:
        for name in ("lazy_of_mine.Thing", "object_of_mine.Thing"):
            with pytest.raises(UnknownType):
                decode(instance(name, "fields", {}), registry_for(REGISTRY))
    finally:
        del sys.modules["lazy_of_mine"], sys.modules["object_of_mine"]


def test_an_enum_asks_nobody_for_a_member_that_it_does_not_have():
    with pytest.raises(UnknownType):
        decode(instance(f"{__name__}.Missing", None, 7, wire.ENUM), registry_for(REGISTRY))


@pytest.mark.parametrize("cls", [Late, LateAttrs, LateModel])
def test_no_function_makes_a_default_because_data_left_a_field_out(cls):
    form, content = ("pydantic", [{"x": 1}, None, [], None]) if cls is LateModel else ("fields", {"x": 1})
    with pytest.raises(SchemaMismatch, match="'made'") as caught:
        decode(instance(f"{__name__}.{cls.__name__}", form, content), registry_for(REGISTRY))
    assert f"types=[{cls.__name__}]" in caught.value.hint


def test_a_class_that_the_program_names_is_its_own_business():
    hashed = Equal(1)
    data = encode([hashed], registry_for(REGISTRY))
    assert type(decode(data, registry_for(REGISTRY, [Equal]))[0]) is Equal


def test_the_refusal_says_which_code_would_run(store_path, caplog):
    with HoldfastSaver(store_path) as saver:
        at = saver.put(config("t"), checkpoint({"v": Equal(1)}), META, {})
        assert "can read what is stored of" in caplog.text, "said when it is stored, not only when it is too late"
        assert saver.get_tuple(at).checkpoint["channel_values"]["v"].x == 1, "in this process it was the program's own"
    with HoldfastSaver(store_path) as saver:
        with pytest.raises(UnknownType, match=r"code of the class \(__hash__ or __eq__\)") as caught:
            saver.get_tuple(at)
        assert "types=[Equal]" in caught.value.hint


class Tagged(NamedTuple):
    tag: str


def test_sends_and_keys_with_such_classes(store_path):
    held = {Tagged("a"): [Send("n", kinds.Leg("x"))], "many": defaultdict(list, {kinds.Rank.LOW: [1]})}
    with HoldfastSaver(store_path) as saver:
        at = saver.put(config("t"), checkpoint({"v": held}), META, {})
    with HoldfastSaver(store_path) as saver:
        assert saver.get_tuple(at).checkpoint["channel_values"]["v"] == held
