"""What the encoder and the decoder share: extension codes, limits, and the two types that only the codec makes.

Owns the numbers of docs/format.md section 1 and the table of container subclasses that other modules hand in.
Must not know how a value is walked, nor what the registry holds.
Holds always: a code, once released, keeps its meaning; a limit is checked on the way in and on the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

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
WHOLE = 23
ARRAY = 24
SCALAR = 25
DEQUE = 26
ORDERED_DICT = 27
COUNTER = 28
DEFAULTDICT = 29
BIG = 40
BULK = 41

SCOPES = frozenset({TUPLE, SET, FROZENSET, INSTANCE, WHOLE, DEQUE, ORDERED_DICT, COUNTER, DEFAULTDICT})
"""Extensions that open a scope, inside which instances are numbered."""

CONTAINERS = SCOPES - {WHOLE} | {DICT}
"""Extensions that count as one level of nesting."""

MAX_DEPTH = 100
"""Containers inside one another. Far above real states, far below what would exhaust the C stack."""

MAX_VALUE_BYTES = 2**31 - 1
"""One encoded value. Lengths stay within 32 bits signed everywhere; larger data belongs into several values."""

MAX_INT_BYTES = 2**20
"""One integer. Arithmetic on more takes minutes, so a hostile store could stop a program with a single number."""

SCALARS: frozenset[type] = frozenset({type(None), bool, int, float, str, bytes})
"""Types that MessagePack carries as they are (an int or str at the edge of its range excepted)."""

UNWRAP: dict[type, Callable[[Any], Any]] = {}
"""Container subclasses of other modules -> a function that gives the plain container, or a ready extension."""


class Bytes(bytearray):
    """A bytearray that a document owns.

    The packing library writes an exact bytearray as bytes without asking; a subclass reaches its hook.
    """

    __slots__ = ()


class WholeList(list[Any]):
    """A list that a document keeps whole, because instances are shared across its items (code 23)."""

    __slots__ = ()


class WholeDict(dict[Any, Any]):
    """A dict that a document keeps whole, as WholeList, or because a key is mutable."""

    __slots__ = ()


class WholeSet(set[Any]):
    """A set that a document keeps whole, because an item is mutable."""

    __slots__ = ()


class Record:
    """A value whose type is not known here, kept as data: it can be shown, compared and written back unchanged.

    ``form`` is the stored form of an instance (``fields``, ``pydantic``, ``value``), or says what else it is:
    ``enum``, or ``items`` for a built-in that cannot be made here, whose stored items are then the data
    (a set or dict whose keys cannot be told apart, a time zone or an array without its library). ``code`` is its
    extension. A record can be a key or a set item where its type could: ``twin`` tells apart the ones with equal
    content, which stand for different instances; ``keyed`` is off while it is read, and for one that leads to itself.
    """

    __slots__ = ("code", "data", "form", "keyed", "twin", "type_name", "version")

    def __init__(self, type_name: str, version: int, form: str, data: Any, *, code: int = INSTANCE) -> None:
        self.type_name = type_name
        self.version = version
        self.form = form
        self.data = data
        self.code = code
        self.twin = 0
        self.keyed = True

    @property
    def fields(self) -> dict[str, Any] | None:
        """The fields of an instance by name, extra ones included; None for what has no fields."""
        data = self.data
        if self.form == "pydantic" and type(data) is list and len(data) == 4 and type(data[0]) is dict:
            return {**data[0], **(data[1] or {})}
        return data if self.form == "fields" and type(data) is dict else None

    def __eq__(self, other: object) -> bool:
        if type(other) is not Record:
            return NotImplemented
        if self is other:
            return True
        return (self.code, self.type_name, self.version, self.form, self.twin) == (
            other.code,
            other.type_name,
            other.version,
            other.form,
            other.twin,
        ) and bool(self.data == other.data)

    def __hash__(self) -> int:
        if not self.keyed:
            raise TypeError(f"a record of {self.type_name} that is not complete, or leads to itself, has no hash")
        data = self.data
        content: Any
        if self.form == "fields" and type(data) is dict:
            content = frozenset(data.items())
        elif self.form == "enum":
            content = data[0] if data[0] is not None else data[1]  # the value of a member may be anything
        elif self.form == "items":
            content = tuple(data)
        elif self.form == "value":
            content = _frozen(data)
        else:
            raise TypeError(f"a record of {self.type_name} can change, and has no hash")
        return hash((self.code, self.type_name, self.version, self.twin, content))

    def __repr__(self) -> str:
        return _show(self, 0)


def _frozen(data: Any) -> Any:
    """What a save function returned, with a hash: frozen classes, too, may be saved as lists and dicts."""
    if type(data) is list:
        return tuple(map(_frozen, data))
    if type(data) is dict:
        return frozenset([(key, _frozen(item)) for key, item in data.items()])
    return data


def holds_record(key: Any) -> bool:
    """Whether a key is a record, or a tuple or frozenset with one inside."""
    return type(key) is Record or (type(key) in _NESTED_KEYS and any(map(holds_record, key)))


_NESTED_KEYS: frozenset[type] = frozenset({tuple, frozenset})


def told_apart(items: list[Any]) -> None:
    """Make equal records unequal: each stands for another instance, or the set would not have held them all."""
    seen: set[Record] = set()
    for item in items:
        if type(item) is Record:
            while item in seen:
                item.twin += 1
            seen.add(item)


def _show(value: Any, depth: int) -> str:
    if type(value) is not Record:
        return repr(value)
    name = value.type_name if value.version == 1 else f"{value.type_name}@{value.version}"
    if depth > 3:
        return f"<{name} ...>"  # instances may form cycles; their text must end
    data = value.data
    if value.form == "pydantic" and type(data) is list and data:
        data = data[0]
    elif value.form == "enum" and type(data) is list and data and data[0] is not None:
        return f"<{name}.{data[0]}>"
    if type(data) is dict:
        inner = ", ".join(f"{key}={_show(item, depth + 1)}" for key, item in data.items())
        return f"<{name} {inner}>" if inner else f"<{name}>"
    if type(data) is list:
        return f"<{name} {', '.join(_show(item, depth + 1) for item in data)}>"
    return f"<{name} {_show(data, depth + 1)}>"
