"""Classes, and a comparison that sees types and identity, for the codec's tests."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import math
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import numpy as np
import pydantic

from holdfast.codec.classes import FIELDS, PYDANTIC, TUPLE, Record, is_immutable, shape_of
from holdfast.codec.types import Registry

T = TypeVar("T")


@dataclasses.dataclass
class Note:
    text: str
    tags: list[str] = dataclasses.field(default_factory=list)
    parent: Note | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    name: str
    inner: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Alone:
    """Equal to nothing but itself."""

    x: Any


@dataclasses.dataclass(eq=False)
class Node:
    """Hashed by identity, as graphs often are."""

    name: str
    links: Any = None


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


class SlottedBase:
    __slots__ = ("__secret", "a", "unset")

    def __init__(self, a: Any, secret: Any) -> None:
        self.a = a
        self.__secret = secret

    def secret(self) -> Any:
        return self.__secret


class Slotted(SlottedBase):
    __slots__ = ("b",)

    def __init__(self, a: Any, secret: Any, b: Any) -> None:
        super().__init__(a, secret)
        self.b = b


class SlottedWithDict(Slotted):
    def __init__(self, a: Any, secret: Any, b: Any, c: Any) -> None:
        super().__init__(a, secret, b)
        self.c = c


class Plain:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)
    ALSO_RED = "red"  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
    RUN = enum.auto()


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Action(enum.Enum):
    """Members whose values cannot be saved."""

    SHOUT = (str.upper,)
    WHISPER = (str.lower,)


class Pair(NamedTuple):
    left: Any
    right: Any = None


Loose = collections.namedtuple("Loose", "a b")  # noqa: PYI024 - the untyped kind is under test


class LooseChild(Loose):
    """Without __slots__, so its instances can have attributes."""


@attrs.define
class Wheel:
    size: int
    car: Any = None


@attrs.frozen
class Bolt:
    size: Any


@attrs.define(slots=False)
class Open:
    size: int


@attrs.frozen(cache_hash=True)
class Hashed:
    name: str


@attrs.frozen(cache_hash=True, slots=False)
class HashedOpen:
    name: str


class Model(pydantic.BaseModel):
    name: str
    count: int = 3
    inner: Model | None = None
    anything: Any = None
    _private: Any = pydantic.PrivateAttr(default=None)


class Extra(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)
    name: str


class Items(pydantic.RootModel[list[int]]):
    pass


class Celsius:
    """Not made of attributes that can be saved as they are: has save and load functions."""

    def __init__(self, degrees: Any) -> None:
        self.reading = lambda: degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Celsius) and self.reading() == other.reading()

    __hash__ = None  # type: ignore[assignment]


def registry() -> Registry:
    """A registry of its own with all classes above."""
    found = Registry()
    for cls in (
        Note, Point, Fixed, Alone, Node, Box, Slotted, SlottedWithDict, Plain, Colour, Level, Word, Mode, Bits, Action,
        Pair, Loose, LooseChild, Wheel, Bolt, Open, Hashed, HashedOpen, Model, Extra, Frozen, Items,
    ):  # fmt: skip
        found.register(cls)
    found.register(Celsius, save=lambda value: value.reading(), load=Celsius)
    return found


def fields_of(value: Any) -> list[Any] | None:
    """The instance's field names and values, or None when it is not made of fields."""
    shape = shape_of(type(value))
    if shape.form not in {FIELDS, TUPLE, PYDANTIC}:
        return None
    if shape.form == PYDANTIC:
        fields, extra, names, private = shape.take_pydantic(value)
        parts = [fields, extra or {}, private or {}]
        return [name for part in parts for name in part] + names + [item for part in parts for item in part.values()]
    fields = shape.take_tuple(value) if shape.form == TUPLE else shape.take(value)
    return [*fields, *fields.values()]


def same(one: Any, two: Any, seen: dict[int, int] | None = None) -> bool:
    """Equal with types, order of dicts, signs of zero, NaN, and with instances shared in the same places of a scope.

    ``seen`` are the instances of the scope that is open: the outermost instance, tuple, deque and the like.
    """
    if type(one) is not type(two):
        return False
    if isinstance(one, np.ndarray | np.generic):
        same_type = one.dtype == two.dtype and one.dtype.str == two.dtype.str
        # Bytes, because of NaN; a second look, because padding carries nothing.
        return same_type and one.shape == two.shape and (one.tobytes() == two.tobytes() or np.array_equal(one, two))
    if isinstance(one, enum.Enum):
        return one is two
    fields = fields_of(one)
    if fields is not None and is_immutable(one):
        return same(fields, fields_of(two))
    if fields is not None or type(one) in {Record, Celsius}:
        seen = {} if seen is None else seen
        if id(one) in seen or id(two) in seen.values():
            return seen.get(id(one)) == id(two)
        seen[id(one)] = id(two)
        if type(one) is Record:
            return one == two
        if type(one) is Celsius:
            return same(one.reading(), two.reading(), seen)
        others = fields_of(two)
        return len(fields) == len(others) and all(same(a, b, seen) for a, b in zip(fields, others, strict=True))
    return _same_builtin(one, two, seen)


def _same_builtin(one: Any, two: Any, seen: dict[int, int] | None) -> bool:
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(two)) or (one == two and math.copysign(1, one) == math.copysign(1, two))
    if isinstance(one, decimal.Decimal):
        return repr(one) == repr(two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if type(one) not in {list, dict, set, frozenset} and seen is None:
        seen = {}
    if isinstance(one, list | tuple | collections.deque):
        limits = getattr(one, "maxlen", None) == getattr(two, "maxlen", None)
        return limits and len(one) == len(two) and all(same(a, b, seen) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(two, "default_factory", None)
        return factories and same(list(one), list(two)) and same(list(one.values()), list(two.values()), seen)
    if isinstance(one, set | frozenset):
        return len(one) == len(two) and all(any(same(a, b) for b in two) for a in one)
    if hasattr(one, "fold"):
        if (one.fold, repr(one.tzinfo)) != (two.fold, repr(two.tzinfo)):
            return False
        return one.replace(tzinfo=None) == two.replace(tzinfo=None)
    return bool(one == two) or (one != one and two != two)  # noqa: PLR0124 - a NaN that is no float
