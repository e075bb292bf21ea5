"""The shapes of rows in memory: what the values of each table's row become, and the bodies in them.

Owns the types that all others speak of: agents, branches, tags, checkpoints, records, entries of the log. Reads
nothing and knows no SQL. What always holds: a shape that is given follows the format, down to the fields of its body,
and a record's body is the one that its digest names; anything else is ``Damaged``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ormsgpack import packb, unpackb

from holdfast.codec.values import decode, encode
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.cipher import HINT, digest
from holdfast.store.manifest import LET_GO, MARKED, TIME_MAX, Manifest, Position, is_written
from holdfast.store.tables import NUMBER_MAX

NODE_MAX_BYTES = 2**28

DIGEST_BYTES = 32

Body = dict[str, Any]


def body_bytes(body: Body) -> bytes:
    """A small map as rows hold it: texts, numbers, bytes, lists and maps of these."""
    try:
        return packb(body)
    except TypeError:  # a text that is none in UTF-8
        return encode(body)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= NUMBER_MAX


def _is_time(value: Any) -> bool:
    return type(value) is int and 0 <= value < TIME_MAX


def _are(*kinds: type) -> Callable[[Any], bool]:
    """Whether something is a list of values of one type, or of lists with values of several."""

    def fits(value: Any) -> bool:
        if type(value) is not list or len(kinds) == 1:
            return type(value) is list and set(map(type, value)) <= {*kinds}
        return all(type(one) is list and tuple(map(type, one)) == kinds for one in value)

    return fits


def _is_range(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_number, value))


_FIELDS: dict[str, tuple[set[str], dict[str, Callable[[Any], bool]]]] = {
    "agent": (
        {"created"},
        {"created": _is_time, "of": _is(bytes), "origins": _are(bytes, int, int), "received": _are(bytes, int, int)},
    ),
    "branch": (
        {"created", "from"},
        {
            "created": _is_time,
            "from": _is(bytes),
            "start": _is_number,
            "fork": _is_number,
            "origins": _are(int),
            "dump": _is(str),
            "own": _is_range,
        },
    ),
    "validity": ({"validity"}, {"validity": _is(str), "reason": _is(str), "at": _is(int)}),
    "open": (
        {"function", "code", "kind", "status", "number", "waits"},
        {
            **dict.fromkeys(("function", "code", "kind", "status"), _is(str)),
            "number": _is_number,
            "waits": _are(str, str, int),
        },
    ),
    "signal": ({"name", "begun"}, {"name": _is(str), "begun": _is_number}),
    "log": (
        {"what"},
        {
            **dict.fromkeys(("what", "name", "branch", "validity", "reason"), _is(str)),
            **dict.fromkeys(("from", "to", "at", "uuid"), _is(bytes)),
            **dict.fromkeys(("b", "epoch", "generation"), _is_number),
            "left": _are(bytes),
        },
    ),
}
"""Of the bodies of some tables what must be there, and what others rely on if it is."""


def read_body(data: bytes, what: str, table: str = "") -> Body:
    """A map, with the fields that a ``table`` has in its bodies."""
    try:
        body = unpackb(data)
    except ValueError:
        try:
            body = decode(data)
        except HoldfastError as error:
            raise malformed(what) from error
    if type(body) is not dict:
        raise malformed(what)
    if table:
        needed, fields = _FIELDS[table]
        if not needed <= body.keys():
            raise malformed(what)
        for name, value in body.items():
            if name in fields and not fields[name](value):
                raise malformed(what)
    return body


def malformed(what: str) -> Damaged:
    return Damaged(f"{what}: its content does not follow the format", what=(what,), hint=HINT)


def text_of(name: bytes, what: str) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise malformed(what) from error


class Agent(NamedTuple):
    """An agent."""

    a: int
    uuid: bytes
    name: str
    body: Body


class Counted(NamedTuple):
    """An agent among many, and when it last changed."""

    a: int
    name: str
    at: int


class End(NamedTuple):
    """Where a line of records ends: the newest one, the newest marked one, how many there are, and their chain."""

    line: int = 0
    back: int = 0
    records: int = 0
    chain: bytes = b""

    @property
    def position(self) -> Position:
        return self.records, self.chain


BEGINNING = End()


class Branch(NamedTuple):
    """A branch: the one thing that a commit moves. ``head`` and ``id`` are 0 and empty while it has no checkpoint.

    ``at`` is when it last changed, in microseconds: a checkpoint, a record or a move. It puts branches in order.
    ``epoch`` rises when it moves other than by a commit onto its head; with ``b`` it says on which stretch a checkpoint
    was made, so that every head can be derived from the log. ``generation`` is raised by whoever becomes its writer.
    """

    b: int
    a: int
    name: str
    uuid: bytes
    body: Body
    head: int
    id: bytes
    depth: int
    epoch: int
    line: int
    back: int
    records: int
    chain: bytes
    generation: int
    at: int

    @property
    def end(self) -> End:
        return End(self.line, self.back, self.records, self.chain)

    def standing(self, head: int, id: bytes, depth: int, epoch: int) -> Branch:
        """The branch as it is with another checkpoint at its head."""
        b, a, name, uuid, body, _, _, _, _, line, back, records, chain, generation, at = self
        row = (b, a, name, uuid, body, head, id, depth, epoch, line, back, records, chain, generation, at)
        return tuple.__new__(Branch, row)  # at every checkpoint: its own constructor would take four times as long

    def at_end(self, end: End) -> Branch:
        return Branch(*self[:9], *end, self.generation, self.at)

    def dated(self, at: int) -> Branch:
        return tuple.__new__(Branch, (*self[:-1], at))


class Tag(NamedTuple):
    """A movable name of an agent for a checkpoint."""

    a: int
    name: str
    n: int
    id: bytes
    body: Body


class Row(NamedTuple):
    """A checkpoint's row: from table ``loose``, then ``data`` is its payload, or from ``checkpoint``: segment ``s``.

    ``parent`` is 0 at a root and where the parent was forgotten; ``line`` the record that was newest; ``key`` a name
    that whoever made it finds it by. ``sealed``: all nodes of its state are stored. ``b`` is 0 where it came from
    another store.
    """

    n: int
    mark: int
    key: bytes
    parent: int
    line: int
    b: int
    epoch: int
    sealed: int
    s: int = 0
    data: bytes | None = None


class Point(NamedTuple):
    """A checkpoint that was read, and is what its row says."""

    row: Row
    id: bytes
    raw: bytes
    manifest: Manifest

    @property
    def n(self) -> int:
        return self.row.n

    @property
    def cut(self) -> bool:
        """Whether its parent was forgotten."""
        return not self.row.parent and bool(self.manifest.parent)


LOST = b"\0lost"
"""The key of a record that is a stand-in for one that is gone."""


class Record(NamedTuple):
    """Record ``i`` of a line. ``key`` is the id of the run that it begins, ``LOST`` where nothing is known of it.

    ``mark`` has bits (manifest.py). ``body`` is empty where it is gone; its digest is left.
    """

    r: int
    prev: int
    back: int
    i: int
    b: int
    mark: int
    key: bytes
    digest: bytes
    refs: list[bytes]
    body: bytes

    @property
    def marked(self) -> bool:
        """Whether summaries need it."""
        return bool(self.mark & MARKED)

    @property
    def let_go(self) -> bool:
        """Whether its values went on purpose."""
        return bool(self.mark & LET_GO)


class Open(NamedTuple):
    """A run of a branch that has not ended, or, where ``signal`` is its id, a signal that nobody has taken yet.

    ``due`` is when somebody should look at it, in microseconds. It tells where to look, and never what to do. ``queue``
    is where it waits for its turn, if it was handed over, and ``turn`` its place there: the lowest comes first.
    """

    b: int
    run: bytes
    signal: bytes
    due: int
    body: Body
    queue: bytes = b""
    turn: int = 0


class Entry(NamedTuple):
    """Something in the log: a ref that moved, or what somebody keeps under a key. ``at`` is in microseconds."""

    e: int
    a: int
    key: bytes
    at: int
    body: Body


class Place(NamedTuple):
    """Where a chunk's bytes are. ``stored`` equals ``length`` when they are raw, otherwise they are zstd."""

    pack: bytes
    start: int
    length: int
    stored: int


def link(chain: bytes, body_digest: bytes) -> bytes:
    """The chain digest of a line after one more record. It covers the body's digest, so that a body can go."""
    return digest(b"effect", chain, body_digest)


def node_digest(raw: bytes) -> bytes:
    return digest(b"node", raw)


def chunk_digest(data: bytes | memoryview) -> bytes:
    return digest(b"chunk", data)


def to_agent(row: tuple[Any, ...]) -> Agent:
    a, uuid, name, body = row
    return Agent(a, uuid, text_of(name, f"agent {a}"), read_body(body, f"agent {a}", "agent"))


def to_branch(row: tuple[Any, ...]) -> Branch:
    b, a, name, uuid, data, *rest = row
    body = read_body(data, f"branch {b}", "branch" if a else "")  # of one that was removed nothing is said
    return Branch(b, a, text_of(name, f"branch {b}"), uuid, body, *rest)


def to_tag(row: tuple[Any, ...]) -> Tag:
    a, name, n, id, body = row
    return Tag(a, text_of(name, f"tag {name.hex()}"), n, id, read_body(body, f"tag {name.hex()}"))


def to_entry(row: tuple[Any, ...]) -> Entry:
    e, a, key, at, body = row
    if not _is_time(at):
        raise malformed(f"log {e}")
    return Entry(e, a, key, at, read_body(body, f"log {e}", "" if key else "log"))


def to_open(row: tuple[Any, ...]) -> Open:
    b, run, signal, due, queue, turn, body = row
    return Open(b, run, signal, due, read_body(body, f"open {b}", "signal" if signal else "open"), queue, turn)


def to_row(table: str, row: tuple[Any, ...]) -> Row:
    n, mark, key, parent, line, b, epoch, sealed, last = row
    s, data = (0, last) if table == "loose" else (last, None)
    return Row(n, mark, key, parent, line, b, epoch, sealed, s, data)


def to_record(row: tuple[Any, ...]) -> Record:
    r, prev, back, i, b, mark, key, about, body = row
    body_digest, refs = about[:DIGEST_BYTES], about[DIGEST_BYTES:]
    if len(body_digest) != DIGEST_BYTES or len(refs) % DIGEST_BYTES or not 0 <= mark <= MARKED | LET_GO:
        raise malformed(f"record {r}")
    if body and not is_written(body, body_digest):
        raise Damaged(f"record {r} is not what was written", what=(f"record {r}",), hint=HINT)
    named = [refs[at : at + DIGEST_BYTES] for at in range(0, len(refs), DIGEST_BYTES)]
    return Record(r, prev, back, i, b, mark, key, body_digest, named, body)


SHAPES: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "agent": to_agent,
    "branch": to_branch,
    "tag": to_tag,
    "log": to_entry,
    "open": to_open,
    "loose": partial(to_row, "loose"),
    "checkpoint": partial(to_row, "checkpoint"),
    "record": to_record,
}
"""What the values of a row become, by table, where that is more than they are."""
