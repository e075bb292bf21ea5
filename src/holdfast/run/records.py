"""The records of a line, and their bytes (format.md, "Effects").

Owns what each record says and how it is written: one MessagePack map with short keys, in which a key that is missing
has its default. Must not know who writes records or what follows from them. What always holds: a record that is read
back equals the one that was written; an unknown kind of record, or an unknown key, is damage and never skipped,
because what it says might be that something happened outside. Nobody changes a record once it is made; that the
classes do not enforce it halves the time to read one.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import msgspec
from msgspec import msgpack
from ormsgpack import packb

from holdfast.codec.blocks import DIGEST_BYTES, digest_of
from holdfast.codec.values import decode, encode
from holdfast.errors import CorruptValue

Value = bytes | list[bytes] | None
"""A stored value: its encoding, or a list of one digest, that of its root node, or None where there is no value."""

Fault = tuple[str, str, str, Value]
"""An exception: its name among the tool's declared ones or empty, its type's name, its message, its arguments."""


# What attributes are called in the bytes, where that is shorter.
SHORT = {
    "path": "p", "function": "fn", "args": "a", "fingerprint": "fp", "attempt": "n", "generation": "g", "started": "s",
    "value": "v", "fault": "e", "event": "ev", "digest": "d", "expected": "want", "actual": "got",
}  # fmt: skip


@dataclass(slots=True)
class Record:
    """One entry of a line. ``TYPE`` is its ``t``; ``MARK``: summaries of a line need it."""

    TYPE: ClassVar[str] = ""
    MARK: ClassVar[int] = 0
    KEYS: ClassVar[tuple[tuple[str, str, Any], ...]]

    at: int

    def encode(self) -> bytes:
        """The record's bytes."""
        parts: dict[str, Any] = {"t": self.TYPE}
        for name, short, usual in self.KEYS:
            value = getattr(self, name)
            if value != usual:
                parts[short] = value
        try:
            return packb(parts)
        except TypeError:  # text with lone surrogates: legal, but not for the library
            return encode({name: list(part) if type(part) is tuple else part for name, part in parts.items()})

    @property
    def refs(self) -> bytes:
        """Digests of the nodes that the record names, one after another."""
        return b"".join(value[0] for value in self.values() if isinstance(value, list) and value)

    def values(self) -> tuple[Value, ...]:
        """The stored values in it."""
        return ()


@dataclass(slots=True)
class InRun(Record):
    """A record that belongs to a run, or, with an empty ``run``, to the agent alone."""

    run: str


@dataclass(slots=True)
class Begin(InRun):
    """A run begins. ``start`` is the checkpoint that holds its first state."""

    TYPE: ClassVar[str] = "run"
    MARK: ClassVar[int] = 1
    function: str
    args: Value
    fingerprint: bytes
    start: bytes = b""
    kind: str = "run"
    code: str = ""
    config: str = ""
    generation: int = 0

    def values(self) -> tuple[Value, ...]:
        return (self.args,)


@dataclass(slots=True)
class Intent(InRun):
    """A call is about to be made. ``undoes`` is the number of the intent that a compensation is for."""

    TYPE: ClassVar[str] = "intent"
    path: str
    tool: str
    kind: str
    args: Value
    fingerprint: bytes
    key: str
    attempt: int = 1
    generation: int = 0
    undoes: int = 0

    def values(self) -> tuple[Value, ...]:
        return (self.args,)


@dataclass(slots=True)
class Done(InRun):
    """A call has an outcome. ``of`` is the intent's number; a read has none and says itself what was called."""

    TYPE: ClassVar[str] = "done"
    path: str
    how: str
    of: int = 0
    tool: str = ""
    kind: str = ""
    args: Value = None
    holes: list[list[Any]] | None = None
    fingerprint: bytes = b""
    started: int = 0
    value: Value = None
    fault: Fault | None = None
    event: bytes = b""

    def values(self) -> tuple[Value, ...]:
        return (self.args, self.value, self.fault[3] if self.fault is not None else None)


@dataclass(slots=True)
class Doubt(InRun):
    """The outcome of an intent is not known."""

    TYPE: ClassVar[str] = "doubt"
    MARK: ClassVar[int] = 1
    path: str
    of: int
    why: str


@dataclass(slots=True)
class Decision(InRun):
    """A doubt is settled. ``how``: found, absent (by a probe), done, not-done (by a person)."""

    TYPE: ClassVar[str] = "decision"
    MARK: ClassVar[int] = 1
    path: str
    of: int
    how: str
    by: str
    why: str = ""
    value: Value = None

    def values(self) -> tuple[Value, ...]:
        return (self.value,)


@dataclass(slots=True)
class Progress(InRun):
    """How far a call has come, in the tool's own terms."""

    TYPE: ClassVar[str] = "progress"
    path: str
    value: Value
    of: int = 0

    def values(self) -> tuple[Value, ...]:
        return (self.value,)


@dataclass(slots=True)
class Saved(InRun):
    """A checkpoint was taken at this position, with this state."""

    TYPE: ClassVar[str] = "checkpoint"
    path: str
    id: bytes
    digest: bytes
    stack: list[str]


@dataclass(slots=True)
class Wait(InRun):
    """The run sleeps (``what`` sleep) or waits for a signal (``what`` signal) at this position."""

    TYPE: ClassVar[str] = "wait"
    MARK: ClassVar[int] = 1
    path: str
    what: str
    name: str = ""
    until: int = 0


@dataclass(slots=True)
class Cut(InRun):
    """A changed program went another way at ``path``; the records ``of``, all of them reads, count no more."""

    TYPE: ClassVar[str] = "cut"
    path: str
    of: list[int]
    expected: str
    actual: str


@dataclass(slots=True)
class End(InRun):
    """A run ended or stopped. ``how``: finished, failed, attention, waiting, cancelled."""

    TYPE: ClassVar[str] = "end"
    MARK: ClassVar[int] = 1
    how: str
    value: Value = None
    fault: Fault | None = None
    until: int = 0
    name: str = ""

    def values(self) -> tuple[Value, ...]:
        return (self.value, self.fault[3] if self.fault is not None else None)


@dataclass(slots=True)
class RolledBack(InRun):
    """The state went back to checkpoint ``id``, whose position is ``to``. ``keep``: effects were left standing."""

    TYPE: ClassVar[str] = "rollback"
    MARK: ClassVar[int] = 1
    to: int
    id: bytes
    keep: bool = False


@dataclass(slots=True)
class Note(InRun):
    """What an agent has to remember besides: a mode, a breaker, a resource, a seed."""

    TYPE: ClassVar[str] = "note"
    MARK: ClassVar[int] = 1
    what: str
    name: str
    value: Value = None
    path: str = ""

    def values(self) -> tuple[Value, ...]:
        return (self.value,)


KINDS: dict[str, type[Record]] = {
    kind.TYPE: kind
    for kind in (
        Begin, Intent, Done, Doubt, Decision, Progress, Saved, Wait, Cut, End, RolledBack, Note,
    )
}  # fmt: skip
_NAMES: dict[str, dict[str, str]] = {}

for _kind in KINDS.values():
    _kind.KEYS = tuple(
        (part.name, SHORT.get(part.name, part.name), part.default if part.default is not MISSING else _kind)
        for part in fields(_kind)
    )
    _NAMES[_kind.TYPE] = {short: name for name, short, _ in _kind.KEYS}


class _Tagged(Exception):
    """The bytes hold an extension."""


def _refuse(_code: int, _data: memoryview) -> Any:
    raise _Tagged


# Half the time of the codec. Only text with lone surrogates needs more than this.
_plain = msgpack.Decoder(ext_hook=_refuse)


def decode_record(data: bytes) -> Record:
    """A record from its bytes."""
    try:
        parts = _plain.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, _Tagged):
        parts = decode(data, inert=True)
    try:
        kind = parts.pop("t")
        names = _NAMES[kind]
        record = KINDS[kind](**{names[short]: value for short, value in parts.items()})
    except (AttributeError, KeyError, TypeError) as error:
        msg = "a record of a line does not follow the format"
        raise CorruptValue(msg) from error
    if not _is_sound(record):
        msg = "a record of a line does not follow the format"
        raise CorruptValue(msg)
    return record


def _is_sound(record: Record) -> bool:
    """What the rest relies on. Sums and the chain find damage; this finds bytes that somebody else wrote."""
    if isinstance(record, Done | End) and record.fault is not None:
        parts: Any = record.fault
        if type(parts) is not list or len(parts) != 4:
            return False
        record.fault = (parts[0], parts[1], parts[2], parts[3])
    plain = (
        type(record.at) is int and type(getattr(record, "path", "")) is str and type(getattr(record, "run", "")) is str
    )
    return plain and all(map(_is_value, record.values()))


def _is_value(value: Any) -> bool:
    if type(value) is list:
        return len(value) == 1 and type(value[0]) is bytes and len(value[0]) == DIGEST_BYTES
    return value is None or type(value) is bytes


def chain(before: bytes, body: bytes) -> bytes:
    """The chain digest after a record."""
    return digest_of("holdfast.effect", before + body)


def key_of(agent: bytes, branch: bytes, incarnation: int, run: str, path: str) -> str:
    """The key by which an outside system can recognise that a call is made again."""
    return digest_of("holdfast.key", encode([agent, branch, incarnation, run, path])).hex()[:32]
