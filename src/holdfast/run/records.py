"""The records of a line, and their bytes (format.md, "Effects").

Owns what each record says and how it is written: one MessagePack map with short keys, in which a key that is missing
has its default. Must not know who writes records or what follows from them. What always holds: a record that is read
back equals the one that was written; an unknown kind of record, or an unknown key, is damage and never skipped,
because what it says might be that something happened outside. Nobody changes a record once it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct, msgpack
from ormsgpack import packb

from holdfast.codec.blocks import DIGEST_BYTES, digest_of
from holdfast.codec.values import decode, encode
from holdfast.errors import CorruptValue
from holdfast.store.manifest import join_body, split_body

_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Value = bytes | Annotated[list[_Digest], Meta(min_length=1, max_length=1)] | Annotated[int, Meta(ge=0)] | None
"""A stored value: its encoding, or a list of one digest, that of its root node, or None where there is no value.

A number is one that is not there any more, so many bytes long: it was let go (``LetGo``), or it is lost.
"""

Fault = tuple[str, str, str, Value]
"""An exception: its name among the tool's declared ones or empty, its type's name, its message, its arguments."""


class LetGo(int):
    """A value that was let go on purpose. 0 where nobody knows how long it was."""


STOP = "holdfast.stop"
"""The name of the signal that tells a run to stop."""

WORKER = "worker"
"""The path of the note that a run is resumed, where a worker does that."""

# What attributes are called in the bytes, where that is shorter.
SHORT = {
    "path": "p", "function": "fn", "args": "a", "fingerprint": "fp", "attempt": "n", "generation": "g", "started": "s",
    "value": "v", "fault": "e", "event": "ev", "digest": "d", "expected": "want", "actual": "got",
}  # fmt: skip


class Record(Struct, tag_field="t", rename=SHORT, forbid_unknown_fields=True):
    """One entry of a line. ``run`` is empty where it belongs to no run but to the agent alone.

    ``TYPE`` is its ``t``; ``MARK``: summaries of a line need it; ``HELD``: its values, which stand apart and may go.
    """

    TYPE: ClassVar[str] = ""
    MARK: ClassVar[int] = 0
    HELD: ClassVar[tuple[str, ...]] = ()
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
        values = _taken_out(parts, self.HELD) if self.HELD else b""
        try:
            said = packb(parts)
        except TypeError:  # text with lone surrogates: legal, but not for the library
            said = encode({name: _arrays(part) for name, part in parts.items()})
        return join_body(said, values) if values else said

    @property
    def refs(self) -> bytes:
        """Digests of the nodes that the record names, one after another: in its arguments, its value, its fault."""
        fault = getattr(self, "fault", None)
        values = (getattr(self, "args", None), getattr(self, "value", None), fault[3] if fault is not None else None)
        return b"".join(value[0] for value in values if isinstance(value, list) and value)

    @property
    def lookup(self) -> bytes:
        """What it is looked up by, if it is."""
        return b""


class Begin(Record, tag="run"):
    """A run begins. ``start`` is the checkpoint that holds its first state.

    ``queue`` is where it waits for its turn, if it was handed over, ``part`` for whom, and those with a higher
    ``priority`` come first. ``life`` is the line's incarnation then. With
    ``taken`` nothing before it is open, in doubt or left: whoever goes on from its checkpoint needs no record before
    this one. It has the signals to the agent that were received before. ``until`` is when its time is over; 0: it has
    no limit.
    """

    MARK: ClassVar[int] = 1
    function: str
    args: Value
    fingerprint: bytes
    start: bytes = b""
    kind: str = "run"
    code: str = ""
    config: str = ""
    generation: int = 0
    queue: str = ""
    life: int = 0
    taken: list[bytes] | None = None
    until: int = 0
    part: str = ""
    priority: int = 0

    @property
    def lookup(self) -> bytes:
        return id_key(self.run) if self.kind != "map" else b""


class Intent(Record, tag="intent"):
    """A call is about to be made. ``undoes`` is the number of the intent that a compensation is for.

    ``limit`` is how long it may take at most, in microseconds, as its tool declares; 0: nobody says.
    """

    path: str
    tool: str
    kind: str
    args: Value
    fingerprint: bytes
    key: str
    attempt: int = 1
    generation: int = 0
    undoes: int = 0
    limit: int = 0


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


class Doubt(Record, tag="doubt"):
    """The outcome of an intent is not known. ``over``: the call has ended, whatever came of it."""

    MARK: ClassVar[int] = 1
    path: str
    of: int
    why: str
    over: bool = False


class Decision(Record, tag="decision"):
    """A doubt is settled. ``how``: found, absent (by a probe), done, not-done (by a person)."""

    MARK: ClassVar[int] = 1
    path: str
    of: int
    how: str
    by: str
    why: str = ""
    value: Value = None


class Progress(Record, tag="progress"):
    """How far a call has come, in the tool's own terms; or, with ``attempt``, items that a stream has given.

    ``first`` is the index of the first of them, ``tool`` whose they are. Without a value that attempt has begun.
    """

    path: str
    value: Value
    of: int = 0
    attempt: int = 0
    first: int = 0
    tool: str = ""


class Saved(Record, tag="checkpoint"):
    """A checkpoint was taken at this position, with this state."""

    path: str
    id: bytes
    digest: bytes
    stack: list[str]


class Wait(Record, tag="wait"):
    """The run sleeps (``what`` sleep) or waits for a signal (``what`` signal) at this position.

    Or, ``what`` lease, until whoever made the call there, with intent number ``name``, cannot be at it any more.
    """

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
    """A run ended or stopped. ``how``: finished, failed, attention, waiting, cancelled (``by`` whom)."""

    MARK: ClassVar[int] = 1
    how: str
    value: Value = None
    fault: Fault | None = None
    waits: list[tuple[str, str, int]] = []  # what each of its flows waits for: what, name, until
    by: str = ""

    @property
    def lookup(self) -> bytes:
        return FAILED_KEY if self.how == "failed" else b""


class RolledBack(Record, tag="rollback"):
    """The state went back to checkpoint ``id``, whose position is ``to``."""

    MARK: ClassVar[int] = 1
    to: int
    id: bytes


class Note(Record, tag="note"):
    """What an agent has to remember besides: a mode, a breaker, a resource. So its value never goes."""

    MARK: ClassVar[int] = 1
    what: str
    name: str
    value: Value = None
    path: str = ""


KINDS = (Begin, Intent, Done, Doubt, Decision, Progress, Saved, Wait, Cut, End, RolledBack, Note)

for _kind in KINDS:
    _kind.TYPE = str(_kind.__struct_config__.tag)
    # A name, what it is called in the bytes, and its default; where it has none, something that it never equals.
    _required = len(_kind.__struct_fields__) - len(_kind.__struct_defaults__)
    _usual = (_kind,) * _required + _kind.__struct_defaults__
    _kind.KEYS = tuple(zip(_kind.__struct_fields__, _kind.__struct_encode_fields__, _usual, strict=True))
    if _kind is not Note:
        _kind.HELD = tuple(name for name in ("args", "value") if name in _kind.__struct_fields__)


def _taken_out(parts: dict[str, Any], held: Sequence[str]) -> bytes:
    """The values of a record, one after another. Where each was, its length is left."""
    values = []
    for name in held:
        short = SHORT[name]
        value = parts.get(short)
        if type(value) is bytes and value:
            values.append(value)
            parts[short] = len(value)
        elif isinstance(value, int):
            raise CorruptValue("a value that is not there any more cannot be recorded again")
    fault = parts.get("e")
    if fault is not None and type(fault[3]) is bytes and fault[3]:
        values.append(fault[3])
        parts["e"] = (*fault[:3], len(fault[3]))
    return b"".join(values)


def _put_back(record: Any, values: bytes) -> None:
    """Put the values of a record in their places."""
    at = 0
    for name in record.HELD:
        length = getattr(record, name)
        if type(length) is int:
            setattr(record, name, values[at : at + length])
            at += length
    if at != len(values):
        fault = getattr(record, "fault", None)
        if fault is None or fault[3] != len(values) - at:
            raise CorruptValue(_WRONG)
        record.fault = (*fault[:3], values[at:])


def _leave_out(record: Any, *, let_go: bool) -> None:
    """Say of the values that are not there what became of them.

    A call whose result is lost is one whose result could not be saved: nobody makes it again, and its probe or a person
    may know what it returned. An exception without what was in it has its message.
    """

    def left(value: Value) -> Value:
        gone = isinstance(value, int) or (isinstance(value, list) and let_go)
        return LetGo(value if isinstance(value, int) else 0) if gone and let_go else value

    for name in record.HELD:
        setattr(record, name, left(getattr(record, name)))
    fault = getattr(record, "fault", None)
    if fault is not None:
        inside = left(fault[3])
        record.fault = (*fault[:3], None if type(inside) is int else inside)
    if isinstance(record, Done) and type(record.value) is int:
        record.how, record.fault = "lost", ("", "Damaged", "what was recorded of it is lost", None)
        record.value = None


def _arrays(part: Any) -> Any:
    """The same with lists for tuples, which have a type of their own in the codec."""
    return [_arrays(one) for one in part] if type(part) in {tuple, list} else part


class _Tagged(Exception):
    """The bytes hold an extension."""


def _refuse(_code: int, _data: memoryview) -> Any:
    raise _Tagged


_Any = Begin | Intent | Done | Doubt | Decision | Progress | Saved | Wait | Cut | End | RolledBack | Note


@cache
def _decoder() -> msgpack.Decoder[_Any]:
    return msgpack.Decoder(_Any, ext_hook=_refuse)


_WRONG = "a record of a line does not follow the format"


def decode_record(data: bytes, *, let_go: bool = False) -> Record:
    """A record from its bytes. Sums and the chain find damage; this finds bytes that somebody else wrote.

    ``let_go``: those of its values that are not there went on purpose.
    """
    said, values = split_body(data)
    record: Record
    try:
        record = _decoder().decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError, _Tagged):
        record = _decode_slowly(said)
    if values:
        _put_back(record, values)
    elif values is None or let_go:
        _leave_out(record, let_go=let_go)
    return record


def _decode_slowly(data: bytes) -> Record:
    """As the codec reads it: text with lone surrogates needs that."""
    parts = decode(data, inert=True)
    try:
        record: Record = msgspec.convert(parts, _Any)
    except (msgspec.ValidationError, TypeError) as error:
        raise CorruptValue(_WRONG) from error
    return record


FAILED_KEY = digest_of("holdfast.failed", b"")[:16]
"""What the records are looked up by that say that a run has failed."""


def id_key(id: str) -> bytes:
    """What the record with which a run begins is looked up by."""
    return digest_of("holdfast.run", id.encode(errors="surrogatepass"))[:16]


def key_of(agent: bytes, branch: bytes, incarnation: int, run: str, path: str) -> str:
    """The key by which an outside system can recognise that a call is made again."""
    try:
        data = _whose(agent, branch, incarnation, run) + packb(path)
    except TypeError:  # as above
        data = encode([agent, branch, incarnation, run, path])
    return digest_of("holdfast.key", data).hex()[:32]


@lru_cache(64)
def _whose(agent: bytes, branch: bytes, incarnation: int, run: str) -> bytes:
    """What the keys of a run have in common: a list, but for its last text."""
    return encode([agent, branch, incarnation, run, ""])[:-1]
