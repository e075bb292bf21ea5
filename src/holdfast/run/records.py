"""The records of a line, and their bytes (format.md, "Effects").

Owns what each record says and how it is written: one MessagePack map with short keys, in which a key that is missing
has its default. Must not know who writes records or what follows from them. What always holds: a record that is read
back equals the one that was written; an unknown kind of record, or an unknown key, is damage and never skipped,
because what it says might be that something happened outside. Nobody changes a record once it is written.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct, msgpack
from ormsgpack import packb

from holdfast.codec.blocks import DIGEST_BYTES, digest_of
from holdfast.codec.values import decode, encode
from holdfast.errors import CorruptValue

_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Value = bytes | Annotated[list[_Digest], Meta(min_length=1, max_length=1)] | None
"""A stored value: its encoding, or a list of one digest, that of its root node, or None where there is no value."""

Fault = tuple[str, str, str, Value]
"""An exception: its name among the tool's declared ones or empty, its type's name, its message, its arguments."""


# What attributes are called in the bytes, where that is shorter.
SHORT = {
    "path": "p", "function": "fn", "args": "a", "fingerprint": "fp", "attempt": "n", "generation": "g", "started": "s",
    "value": "v", "fault": "e", "event": "ev", "digest": "d", "expected": "want", "actual": "got",
}  # fmt: skip


class Record(Struct, tag_field="t", rename=SHORT, forbid_unknown_fields=True):
    """One entry of a line. ``run`` is empty where it belongs to no run but to the agent alone.

    ``TYPE`` is its ``t``; ``MARK``: summaries of a line need it.
    """

    TYPE: ClassVar[str] = ""
    MARK: ClassVar[int] = 0
    KEYS: ClassVar[tuple[tuple[str, str, Any], ...]]

    at: int
    run: str

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


class Begin(Record, tag="run"):
    """A run begins. ``start`` is the checkpoint that holds its first state."""

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


class Intent(Record, tag="intent"):
    """A call is about to be made. ``undoes`` is the number of the intent that a compensation is for."""

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


class Done(Record, tag="done"):
    """A call has an outcome. ``of`` is the intent's number; a read has none and says itself what was called."""

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
    event: bytes | int = b""  # the signal's id; before signals had one, the number of its event

    def values(self) -> tuple[Value, ...]:
        return (self.args, self.value, self.fault[3] if self.fault is not None else None)


class Doubt(Record, tag="doubt"):
    """The outcome of an intent is not known."""

    MARK: ClassVar[int] = 1
    path: str
    of: int
    why: str


class Decision(Record, tag="decision"):
    """A doubt is settled. ``how``: found, absent (by a probe), done, not-done (by a person)."""

    MARK: ClassVar[int] = 1
    path: str
    of: int
    how: str
    by: str
    why: str = ""
    value: Value = None

    def values(self) -> tuple[Value, ...]:
        return (self.value,)


class Progress(Record, tag="progress"):
    """How far a call has come, in the tool's own terms."""

    path: str
    value: Value
    of: int = 0

    def values(self) -> tuple[Value, ...]:
        return (self.value,)


class Saved(Record, tag="checkpoint"):
    """A checkpoint was taken at this position, with this state."""

    path: str
    id: bytes
    digest: bytes
    stack: list[str]


class Wait(Record, tag="wait"):
    """The run sleeps (``what`` sleep) or waits for a signal (``what`` signal) at this position."""

    MARK: ClassVar[int] = 1
    path: str
    what: str
    name: str = ""
    until: int = 0


class Cut(Record, tag="cut"):
    """A changed program went another way at ``path``; the records ``of``, all of them reads, count no more."""

    path: str
    of: list[int]
    expected: str
    actual: str


class End(Record, tag="end"):
    """A run ended or stopped. ``how``: finished, failed, attention, waiting, cancelled."""

    MARK: ClassVar[int] = 1
    how: str
    value: Value = None
    fault: Fault | None = None
    until: int = 0
    name: str = ""

    def values(self) -> tuple[Value, ...]:
        return (self.value, self.fault[3] if self.fault is not None else None)


class RolledBack(Record, tag="rollback"):
    """The state went back to checkpoint ``id``, whose position is ``to``."""

    MARK: ClassVar[int] = 1
    to: int
    id: bytes
    keep: bool = False  # nobody writes it any more, and nothing follows from it


class Note(Record, tag="note"):
    """What an agent has to remember besides: a mode, a breaker, a resource, a seed."""

    MARK: ClassVar[int] = 1
    what: str
    name: str
    value: Value = None
    path: str = ""

    def values(self) -> tuple[Value, ...]:
        return (self.value,)


KINDS = (Begin, Intent, Done, Doubt, Decision, Progress, Saved, Wait, Cut, End, RolledBack, Note)

for _kind in KINDS:
    _kind.TYPE = str(_kind.__struct_config__.tag)
    # A name, what it is called in the bytes, and its default; where it has none, something that it never equals.
    _required = len(_kind.__struct_fields__) - len(_kind.__struct_defaults__)
    _usual = (_kind,) * _required + _kind.__struct_defaults__
    _kind.KEYS = tuple(zip(_kind.__struct_fields__, _kind.__struct_encode_fields__, _usual, strict=True))


class _Tagged(Exception):
    """The bytes hold an extension."""


def _refuse(_code: int, _data: memoryview) -> Any:
    raise _Tagged


_Any = Begin | Intent | Done | Doubt | Decision | Progress | Saved | Wait | Cut | End | RolledBack | Note


@cache
def _decoder() -> msgpack.Decoder[_Any]:
    return msgpack.Decoder(_Any, ext_hook=_refuse)


def decode_record(data: bytes) -> Record:
    """A record from its bytes. Sums and the chain find damage; this finds bytes that somebody else wrote."""
    try:
        return _decoder().decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, _Tagged):
        return _decode_slowly(data)


def _decode_slowly(data: bytes) -> Record:
    """As the codec reads it: text with lone surrogates needs that."""
    parts = decode(data, inert=True)
    try:
        record: Record = msgspec.convert(parts, _Any)
    except (msgspec.ValidationError, TypeError) as error:
        msg = "a record of a line does not follow the format"
        raise CorruptValue(msg) from error
    return record


def key_of(agent: bytes, branch: bytes, incarnation: int, run: str, path: str) -> str:
    """The key by which an outside system can recognise that a call is made again."""
    return digest_of("holdfast.key", encode([agent, branch, incarnation, run, path])).hex()[:32]
