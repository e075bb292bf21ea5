"""What the bodies of rows hold, as docs/format.md has it: the one place where they are read.

A row's sum says that it is what somebody wrote, not that it makes sense: whoever can write the database can write sums,
too. So each body is compared with its shape before anybody looks into it. What always holds: a body that comes from
here has every key that its kind must have, and what it must or may have is of the right type; any other is ``Damaged``,
named by its table and number. Keys that are not known are left alone. Knows nothing of what names and numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from holdfast.codec.values import decode
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.catalog import HINT, ID_BYTES, AgentRow, BranchRow, EventRow, SealRow, TagRow, ValidityRow

Check: TypeAlias = Callable[[Any], bool]
Shape: TypeAlias = tuple[Mapping[str, Check], Mapping[str, Check]]
"""The keys that a map must have and those that it may have."""

_TIME_MAX_US = 250 * 10**15  # the year 9892; years after 9999 are no dates


def _text(value: object) -> bool:
    return type(value) is str


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _time(value: object) -> bool:
    """Microseconds since 1970 that a calendar knows."""
    return type(value) is int and abs(value) < _TIME_MAX_US


def _blob(value: object) -> bool:
    return type(value) is bytes


def _id(value: object) -> bool:
    """A checkpoint's id; empty where there is no checkpoint."""
    return type(value) is bytes and len(value) in {0, ID_BYTES}


def _many(check: Check) -> Check:
    return lambda value: type(value) is list and all(check(one) for one in value)


def _row(*checks: Check) -> Check:
    return lambda value: (
        type(value) is list
        and len(value) == len(checks)
        and all(check(one) for check, one in zip(checks, value, strict=True))
    )


_RANGES = _PAIRS = _many(_row(_number, _number))
_HEADS = _many(_row(_text, _id))

_SHAPES: dict[str, Shape] = {
    "agent": (
        {"name": _text, "created": _time},
        {
            "origins": _many(_row(_number, _blob, _number, _number)),
            "without": _row(_RANGES, _RANGES),
            "over": _PAIRS,
        },
    ),
    "branch": (
        {"name": _text, "created": _time, "from": _id},
        {"origins": _PAIRS, "base": _number, "received": _RANGES, "recovered": _number},
    ),
    "tag": ({"name": _text, "at": _id}, {}),
    "validity": ({"validity": _text, "reason": _text, "at": _time}, {}),
    "event": ({"what": _text}, {}),
}

_FORGOTTEN: dict[str, Check] = {"n": _RANGES, "e": _RANGES, "cut": _many(_id)}
_EVENTS: dict[str, Shape] = {
    "agent": ({"name": _text}, {}),
    "branch": ({"name": _text, "at": _id}, {"line": _row(_number, _number)}),
    "tag": ({"name": _text, "at": _id}, {}),
    "untag": ({"name": _text}, {}),
    "rollback": ({"branch": _text, "from": _id, "to": _id}, {}),
    "validity": ({"at": _id, "validity": _text, "reason": _text}, {}),
    "open": ({"branch": _text}, {}),
    "clone": (
        {
            "name": _text,
            "of": _text,
            "branches": _HEADS,
            "tags": _HEADS,
            "validity": _many(_row(_id, _text, _text)),
        },
        {"lines": _many(_row(_text, _number, _number))},
    ),
    "forget": (
        {**_FORGOTTEN, "untag": _many(_text), "heads": _HEADS, "newest": _number},
        {"over": _PAIRS},
    ),
    "remove": (
        {**_FORGOTTEN, "r": _RANGES, "branches": _many(_number), "origins": _many(_number)},
        {"name": _text},
    ),
    "receive": ({"from": _blob, "heads": _HEADS, "newest": _number}, {"upto": _row(_number, _blob)}),
    "rehydrate": ({"dump": _text, "branch": _text, "checkpoint": _text}, {}),
}
"""What an event must have, depending on ``what``. One of another kind belongs to whoever chose its key."""

_PLACES = _row(_many(_blob), _many(_row(_number, _many(_row(_number, _number, _number)))))

_TABLES: dict[type, str] = {
    AgentRow: "agent",
    BranchRow: "branch",
    TagRow: "tag",
    ValidityRow: "validity",
    EventRow: "event",
}


_BODY_AT = {"agent": 3, "branch": 4, "tag": 2, "validity": 2, "event": 3}


def sound(table: str, columns: Sequence[Any]) -> bool:
    """Whether a row's columns, the sum aside, are what rows of that table hold."""
    at = _BODY_AT.get(table)
    return at is None or read_body(table, columns[at]) is not None


def _fits(body: Mapping[str, Any], shape: Shape) -> bool:
    must, may = shape
    return all(name in body and check(body[name]) for name, check in must.items()) and all(
        check(body[name]) for name, check in may.items() if name in body
    )


def read_body(table: str, data: bytes) -> dict[str, Any] | None:
    """The map that a body of that table is; None when it is not one."""
    try:
        body = decode(data, inert=True)
    except HoldfastError:
        return None
    if type(body) is not dict or not _fits(body, _SHAPES[table]):
        return None
    if table == "event" and not _fits(body, _EVENTS.get(body["what"], ({}, {}))):
        return None
    return body


def body_of(row: AgentRow | BranchRow | TagRow | ValidityRow | EventRow) -> dict[str, Any]:
    """What a row's body says."""
    table = _TABLES[type(row)]
    body = read_body(table, row.body)
    if body is None:
        raise _malformed(f"{table} {_key(row)}")
    return body


def places_of(seal: SealRow) -> tuple[list[bytes], list[list[Any]]]:
    """The nodes that a seal names, and for checkpoints where in these their values are."""
    try:
        found = decode(seal.places)
    except HoldfastError as error:
        raise _malformed(f"seal {seal.n}") from error
    if not _PLACES(found) or not all(
        0 <= index < len(found[0]) and offset >= 0 and length >= 0
        for _, places in found[1]
        for index, offset, length in places
    ):
        raise _malformed(f"seal {seal.n}")
    return found[0], found[1]


def _key(row: AgentRow | BranchRow | TagRow | ValidityRow | EventRow) -> object:
    match row:
        case AgentRow():
            return row.a
        case BranchRow():
            return row.b
        case TagRow():
            return row.key.hex()
        case ValidityRow():
            return row.n
        case EventRow():
            return row.e


def _malformed(what: str) -> Damaged:
    table, _, key = what.partition(" ")
    return Damaged(
        f"table {table}, row {key}: its content does not follow the format",
        what=(what,),
        hint=HINT,
    )
