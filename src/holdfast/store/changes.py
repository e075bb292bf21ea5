"""Every change of the store, as parts of a transaction.

Owns the order and the comparisons of what is written. A change is a function of a ``Change``; the same function serves
a transaction of a writer's thread and the direct path, where its statements are collected first and run as one call.
What always holds: a branch moves only by comparison with what its writer believes; what a transaction names is there
or comes with it, or ``Refused`` is raised; a branch's row is never deleted, so that a comparison cannot miss it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import BadOption, Forgotten, UnknownAgent
from holdfast.store.catalog import View, listed, slices
from holdfast.store.cipher import Cipher, compressed
from holdfast.store.engine import Args, Refused, Tx
from holdfast.store.engine import Row as Stored
from holdfast.store.manifest import MARKED, Packed, body_digest, mark_of, pack_payload, split_refs
from holdfast.store.rows import (
    BEGINNING,
    NODE_MAX_BYTES,
    Agent,
    Body,
    Branch,
    End,
    Open,
    Point,
    Row,
    Tag,
    body_bytes,
    link,
)
from holdfast.store.tables import CHECKPOINTS, HANDLES, LOG_GONE, TABLES

NODE_COMPRESS_FROM_BYTES = 256
T = TypeVar("T")
Work = Callable[["Change"], T]


def now_us() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000


ACTING: ContextVar[str] = ContextVar("acting", default="")
"""On whose behalf something is changed, where that is not this process's user."""


def who() -> str:
    """Who changes something: the name of this process's user, unless it acts for somebody else."""
    return ACTING.get() or _user()


def acting(by: str, work: Callable[..., T], *given: Any) -> T:
    """Do something on behalf of somebody, in whatever thread."""
    before = ACTING.set(by)
    try:
        return work(*given)
    finally:
        ACTING.reset(before)


@cache
def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return f"uid {os.getuid()}"


class Opens(NamedTuple):
    """How the rows of a branch's open runs change: which go (by run and by signal, None: any), then which come.

    One that is there already stays. Written blindly, so that nobody has to read what is there.
    """

    drop: Sequence[tuple[bytes | None, bytes | None]] = ()
    put: Sequence[Open] = ()

    def applied(self, rows: Mapping[bytes, Open]) -> dict[bytes, Open]:
        """The rows of the runs, by id, after this."""
        gone = {run for run, signal in self.drop if not signal}
        left = {} if None in gone else {run: row for run, row in rows.items() if run not in gone}
        return {**{row.run: row for row in self.put if not row.signal}, **left}


UNCHANGED = Opens()


class NewRecord(NamedTuple):
    """A record still to be written: its mark, the digests of nodes that it names, its body.

    Where the body is gone, ``known`` is its digest. ``key`` is what it is looked up by, if it is. ``opens`` is written
    with it; ``follow`` makes that, when the record gets its number, of the rows that there are then.
    """

    mark: int
    refs: bytes
    body: bytes
    known: bytes = b""
    key: bytes = b""
    opens: Opens = UNCHANGED
    follow: Callable[[Mapping[bytes, Open], int], Opens] | None = None

    @property
    def digest(self) -> bytes:
        return self.known or body_digest(self.body)


class Said(NamedTuple):
    """An entry of the log still to be written."""

    body: Body
    key: bytes = b""
    at: int = 0


class NewPack(NamedTuple):
    """A pack that is durable and not yet in a row: its chunks as (digest, start, length, stored).

    ``there`` tells whether it still is: by the clock of whoever sweeps it may have been forgotten by its maker.
    """

    uuid: bytes
    size: int
    chunks: Sequence[tuple[bytes, int, int, int]]
    there: Callable[[], bool] | None = None


class NewCheckpoint(NamedTuple):
    """A checkpoint still to be written. ``first`` are records that it counts, and that are written with it."""

    id: bytes
    manifest: bytes
    operations: bytes
    key: bytes = b""
    sealed: bool = False
    first: Sequence[NewRecord] = ()


class Parent(NamedTuple):
    """What the next checkpoint is a child of, where that is not the head of the branch. Nothing: a root."""

    point: Point | None


class Objects(NamedTuple):
    """What a transaction brings, and what it names besides that must be there."""

    nodes: Mapping[bytes, bytes] = {}  # as ``pack_node`` made them: nobody waits for the store while that is done
    packs: Sequence[NewPack] = ()
    needs_nodes: frozenset[bytes] = frozenset()
    needs_chunks: frozenset[bytes] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.nodes or self.packs or self.needs_nodes or self.needs_chunks)


NOTHING = Objects()


def pack_node(raw: bytes) -> bytes:
    if len(raw) > NODE_MAX_BYTES:
        raise BadOption(
            f"a dict's key or a set's item of {len(raw):,} bytes cannot be saved; nothing was written",
            hint="Keep long values as values: they are split.",
        )
    return compressed(raw, NODE_COMPRESS_FROM_BYTES)


def chained(end: End, records: Iterable[NewRecord]) -> tuple[int, bytes]:
    """The position of a line after some more records."""
    count, chain = end.position
    for record in records:
        count, chain = count + 1, link(chain, record.digest)
    return count, chain


class CannotCollect(Exception):
    """A change needs an answer of the store, so that it cannot be run as one call."""


_UNLESS_THERE = " ON CONFLICT DO NOTHING"


def _checked(table: str) -> str:
    """An INSERT that is refused if its handle, or a higher one, was given already, whatever became of its row."""
    sequence = CHECKPOINTS if table in CHECKPOINTS else (table,)
    taken = [f"EXISTS (SELECT 1 FROM {one} WHERE {HANDLES[table]} >= ?1)" for one in sequence]
    taken.append(f"EXISTS (SELECT 1 FROM floor WHERE name = '{table}' AND number >= ?1)")
    # The second column does not take NULL. For the first one SQLite would choose a number.
    return TABLES[table].insert.replace("?, ?", f"?, CASE WHEN NOT ({' OR '.join(taken)}) THEN ? END", 1)


_CHECKED = {TABLES[table].insert + more: _checked(table) + more for table in HANDLES for more in ("", _UNLESS_THERE)}


class Collected:
    """A transaction on paper: statements and arguments. Its handles are ``own``, or else a guess that is checked.

    A handle that somebody else was given might not be in the way: its row may be gone or in a segment, and where a row
    that is there already counts as written, it would be taken for that one.
    """

    def __init__(self, numbers: dict[str, int], own: Callable[[], int] | None = None) -> None:
        self.statements: list[str] = []
        self.args: list[Args] = []
        self._numbers = numbers.copy()
        self._own = own

    def run(self, sql: str, args: Args = ()) -> list[Stored]:  # noqa: ARG002 - whatever it asks
        raise CannotCollect

    def do(self, sql: str, args: Args = ()) -> None:
        self.statements.append(sql if self._own is not None else _CHECKED.get(sql, sql))
        self.args.append(args)

    def many(self, sql: str, args: Sequence[Args]) -> None:
        for one in args:
            self.do(sql, one)

    def number(self, *tables: str) -> int:
        if self._own is not None:
            return self._own()
        table = tables[0]
        known = self._numbers.get(table)
        if known is None:
            raise CannotCollect
        self._numbers[table] = known + 1
        return known + 1

    def alone(self, name: bytes) -> None:  # noqa: ARG002 - whoever asks looks at something then
        raise CannotCollect

    def clock(self) -> int:
        raise CannotCollect

    def naming(self) -> None:
        if self._own is not None:  # others sweep while this engine takes a call
            raise CannotCollect

    def erasing(self) -> None:
        raise CannotCollect


_MOVE = (
    "UPDATE branch SET body = ?, head = CASE WHEN generation = ? AND head = ? AND line = ? THEN CAST(? AS bigint) END,"
    " id = ?, depth = ?, epoch = ?, line = ?, back = ?, count = ?, chain = ?, generation = ?, at = ?, sum = ?"
    " WHERE b = ?"
)
_NEW_LOOSE = TABLES["loose"].insert
_GUARD = "UPDATE branch SET generation = CASE WHEN generation = ? THEN generation END WHERE b = ?"


class Change(View):
    """A view inside a transaction, and every way to change what it shows. A group of changes shares one."""

    def __init__(self, tx: Tx, cipher: Cipher) -> None:
        super().__init__(tx, cipher)
        self.tx = tx
        self.newest: dict[str, int] = {}  # the handles that it gave, for the witness
        self.mark = 0  # of the newest checkpoint
        self.moved: dict[int, tuple[int, int]] = {}  # branches, each with its generation and its head

    def _number(self, *tables: str) -> int:
        made = self.newest[tables[0]] = self.tx.number(*tables)
        return made

    def put(self, table: str, *values: Any, unless_there: bool = False) -> None:
        """Write a row; one that is there already is an error, or stays as it is."""
        more = _UNLESS_THERE if unless_there else ""
        self.tx.do(TABLES[table].insert + more, self.cipher.stored(table, *values))

    def set_fact(self, name: str, value: bytes | None) -> None:
        self.tx.do("DELETE FROM store WHERE name = ?", (name,))
        if value is not None:
            self.put("store", name, value)

    def swap_fact(self, name: str, work: Callable[[bytes | None], bytes]) -> None:
        """Let a fact be what ``work`` makes of it. Refused if somebody else changes it meanwhile."""
        spec = TABLES["store"]
        there = self.tx.run(f"SELECT {spec.listed} FROM store WHERE name = ?", (name,))
        stored = self.cipher.stored("store", name, work(self.cipher.loaded("store", there[0])[1] if there else None))
        if there:
            sql = "UPDATE store SET value = ?, sum = ? WHERE name = ? AND value = ? RETURNING name"
            done = self.tx.run(sql, (*stored[1:], name, there[0][1]))
        else:
            done = self.tx.run(f"{spec.insert}{_UNLESS_THERE} RETURNING name", stored)
        if not done:
            raise Refused("somebody else has changed it meanwhile; nothing was written")

    def say(self, a: int, said: Said | Body) -> None:
        """One more entry of the log. One about refs says who moved them, if it does not say so already."""
        said = said if isinstance(said, Said) else Said(said)
        body = said.body if said.key else {"by": who(), **said.body}
        self.put("log", self._number("log"), a, said.key, said.at or now_us(), body_bytes(body))

    # -- refs -----------------------------------------------------------------------------------------------

    def hold(self, n: int) -> None:
        """Something is about to name a checkpoint: raise unless it is there. Then nobody deletes it before the end."""
        self.tx.naming()
        if not any(self.tx.run(f"SELECT n FROM {table} WHERE n = ?", (n,)) for table in CHECKPOINTS):
            raise Forgotten("the checkpoint was forgotten meanwhile; nothing was written", hint="See `holdfast log`.")

    def hold_agent(self, a: int) -> None:
        """Something is about to be an agent's: raise unless it is there. Then nobody removes it before the end."""
        self.tx.naming()
        if not self.tx.run("SELECT a FROM agent WHERE a = ?", (a,)):
            raise UnknownAgent("the agent was removed meanwhile; nothing was written")

    def add_agent(self, name: str, uuid: bytes, body: Body) -> Agent:
        a = self._number("agent")
        self.put("agent", a, uuid, name.encode(), body_bytes(body))
        self.say(a, {"what": "agent", "name": name})
        return Agent(a, uuid, name, body)

    def add_branch(
        self, a: int, name: str, uuid: bytes, body: Body, point: Point | None, end: End, said: Body | None = None
    ) -> Branch:
        """A branch that begins at a checkpoint, or with nothing. ``said`` goes into its entry of the log."""
        self.hold_agent(a)
        if point is not None:
            self.hold(point.n)
        b = self._number("branch")
        made = Branch(b, a, name, uuid, body, 0, b"", 0, 0, *end, 0, body["created"])
        if point is not None:
            made = made.standing(point.n, point.id, point.manifest.depth, 0)._replace(at=point.manifest.time_us)
        self.put("branch", *branch_columns(made))
        self.say(a, {"what": "branch", "name": name, "uuid": uuid, "b": b, "epoch": 0, "to": made.id, **(said or {})})
        return made

    def move(self, old: Branch, new: Branch) -> Branch:
        """Let a branch that is ``old`` be ``new``, from now on; returns it as it is then.

        If generation, head or line differ the transaction is refused.
        """
        if new.head != old.head or new.line != old.line:
            new = new.dated(max(old.at, now_us()))
        row = self.cipher.stored("branch", *branch_columns(new))
        self.tx.do(_MOVE, (row[4], old.generation, old.head, old.line, *row[5:], new.b))
        self.moved[new.b] = new.generation, new.head
        return new

    def guard(self, b: int, generation: int) -> None:
        """Refuse the transaction unless a branch still has that generation: its lease covers what is written."""
        self.tx.do(_GUARD, (generation, b))

    def retire(self, branch: Branch) -> None:
        """What is left of a branch whose agent is removed: a row that no comparison fits, and that says nothing."""
        name = f"{branch.uuid.hex()}-{branch.b}"  # it may come again from elsewhere, and go again
        gone = Branch(branch.b, 0, name, branch.uuid, {}, 0, b"", 0, 0, *BEGINNING, branch.generation + 1, 0)
        # Changed, not deleted and written anew: a comparison that waits for this must find it.
        sets = ", ".join(f"{name} = ?" for name in TABLES["branch"].names[1:])
        _, *row = self.cipher.stored("branch", *branch_columns(gone))
        self.tx.do(f"UPDATE branch SET {sets} WHERE b = ?", (*row, branch.b))
        self.set_open(branch.b, Opens([(None, None)]))

    def set_tag(self, tag: Tag) -> None:
        """``a`` is 0 where it is nobody's, but holds what arrives."""
        if tag.a:
            self.hold_agent(tag.a)
        self.hold(tag.n)
        self.drop_tag(tag.a, tag.name)
        self.put("tag", tag.a, tag.name.encode(), tag.n, tag.id, body_bytes(tag.body))

    def drop_tag(self, a: int, name: str) -> None:
        self.tx.do("DELETE FROM tag WHERE a = ? AND name = ?", (a, self.cipher.name("tag", name.encode(), a)))

    def set_validity(self, a: int, n: int, body: Body | None) -> None:
        self.tx.do("DELETE FROM validity WHERE a = ? AND n = ?", (a, n))
        if body is not None:
            self.put("validity", a, n, body_bytes(body))

    # -- objects --------------------------------------------------------------------------------------------

    def put_objects(self, objects: Objects) -> None:
        """Write objects, and see that all that is named besides is there."""
        if not objects:
            return
        self.tx.naming()
        for pack in objects.packs:
            self.put_pack(pack)
        if objects.nodes:
            # In one order for all, so that two who bring the same nodes do not wait for each other.
            rows = [self.cipher.stored("node", self._number("node"), *one) for one in sorted(objects.nodes.items())]
            self.tx.many(TABLES["node"].insert + _UNLESS_THERE, rows)
        brought = {digest for pack in objects.packs for digest, *_ in pack.chunks}
        nodes = objects.needs_nodes - objects.nodes.keys()
        chunks = objects.needs_chunks - brought
        if (nodes and len(self.has_nodes(nodes)) < len(nodes)) or (
            chunks and len(self.has_chunks(chunks)) < len(chunks)
        ):
            raise Refused("something that is named is not in the store any more; nothing was written")

    def put_pack(self, pack: NewPack) -> None:
        self.tx.naming()
        if pack.there is not None and not pack.there():
            raise Refused("a pack was taken for a stray and deleted before anything named it; nothing was written")
        p = self._number("pack")
        self.put("pack", p, pack.uuid, pack.size)
        for name, start, length, stored in sorted(pack.chunks):
            self.put("chunk", name, p, start, length, stored, unless_there=True)

    # -- checkpoints and records ----------------------------------------------------------------------------

    def put_checkpoint(self, new: NewCheckpoint, parent: int, line: int, b: int, epoch: int) -> int:
        """Write a loose checkpoint; returns its number."""
        n = self._number(*CHECKPOINTS)
        self.mark = mark_of(new.id)
        data = pack_payload(new.manifest, new.operations)
        row = self.cipher.stored("loose", n, self.mark, new.key, parent, line, b, epoch, int(new.sealed), data)
        self.tx.do(_NEW_LOOSE, row)
        return n

    def put_records(self, b: int, end: End, records: Iterable[NewRecord]) -> End:
        """Write records behind a line's end; returns the new one. ``b`` is 0 for those of another store."""
        line, back, count, chain = end
        for record in records:
            r = self._number("record")
            known = record.digest
            count, chain = count + 1, link(chain, known)
            about = known + record.refs
            self.put("record", r, line, back, count, b, record.mark, record.key, about, record.body)
            line = r
            if record.mark & MARKED:
                back = r
            if record.opens is not UNCHANGED:
                self.set_open(b, record.opens)
        return End(line, back, count, chain)

    def set_open(self, b: int, opens: Opens) -> None:
        """Change the rows of a branch's open runs."""
        for run, signal in opens.drop:
            parts: list[str] = ["b = ?"]
            args: list[int | bytes] = [b]
            for column, value in (("run", run), ("signal", signal)):
                if value is not None:
                    parts.append(f"{column} = ?")
                    args.append(self.cipher.name("open", value) if value else value)
            self.tx.do(f"DELETE FROM open WHERE {' AND '.join(parts)}", args)
        for one in opens.put:
            row = (one.run, one.signal, one.due, one.queue, one.turn, body_bytes(one.body))
            self.put("open", b, *row, unless_there=True)

    def commit(
        self, old: Branch, new: NewCheckpoint, records: Sequence[NewRecord] = (), onto: Parent | None = None
    ) -> Branch:
        """A checkpoint onto the head of a branch, and records with it; returns the branch as it is then.

        With ``onto``, its parent is another one than the head: the branch leaves its line.
        """
        head, depth, epoch = old.head, old.depth, old.epoch
        if onto is not None:
            epoch += 1
            head, depth = 0, 0
            if onto.point is not None:
                self.hold(onto.point.n)
                head, depth = onto.point.n, onto.point.manifest.depth
        end = self.put_records(old.b, old.end, new.first) if new.first else None
        n = self.put_checkpoint(new, head, end.line if end is not None else old.line, old.b, epoch)
        moved = old.standing(n, new.id, depth + 1, epoch)
        if end is not None or records:
            moved = moved.at_end(self.put_records(old.b, end or old.end, records))
        moved = self.move(old, moved)
        if onto is not None:
            self.say(old.a, moved_body(old, moved, onto.point.id if onto.point is not None else b""))
        return moved

    def move_to(self, old: Branch, point: Point, records: Sequence[NewRecord] = ()) -> Branch:
        """Let a branch stand at another checkpoint. Its line stays as long as it is."""
        self.hold(point.n)
        moved = old.standing(point.n, point.id, point.manifest.depth, old.epoch + 1)
        if records:
            moved = moved.at_end(self.put_records(old.b, old.end, records))
        moved = self.move(old, moved)
        self.say(old.a, moved_body(old, moved, point.id))
        return moved

    def set_row(self, row: Row, new: Row) -> None:
        """Change what the row of a checkpoint says of its place. Refused if it has gone elsewhere meanwhile."""
        table = "loose" if row.data is not None else "checkpoint"
        spec = TABLES[table]
        values = new[: spec.covered]
        *columns, total = self.cipher.head(table, *values)
        sets = ", ".join(f"{column.name} = ?" for column in spec.columns[1 : spec.covered])
        there = self.tx.run(f"UPDATE {table} SET {sets}, sum = ? WHERE n = ? RETURNING n", (*columns[1:], total, row.n))
        if not there:
            raise Refused("the checkpoint was stored in another way meanwhile; nothing was written")

    def fold(self, numbers: Sequence[int], packed: Packed) -> int:
        """Let a run of loose checkpoints lie in a segment. Their rows are taken as they are now, not as they were."""
        dictionary, _ = split_refs(packed.refs)
        self.put_objects(Objects(needs_nodes=frozenset(dictionary)))  # it may have been swept since it was read
        s = self._number("segment")
        spec = TABLES["loose"]
        moved: list[Stored] = []
        for part in slices(numbers):
            sql = f"DELETE FROM loose WHERE n IN {listed(len(part))} RETURNING {spec.listed}"
            moved += [self.cipher.loaded("loose", row) for row in self.tx.run(sql, part)]
        if len(moved) != len(numbers):
            raise Refused("some of these checkpoints lie in a segment already, or are gone")
        rows = [self.cipher.stored("checkpoint", *row[:-1], s) for row in moved]
        self.tx.many(TABLES["checkpoint"].insert, rows)
        self.put("segment", s, *packed)
        return s

    def delete(self, table: str, column: str, values: Sequence[Any]) -> None:
        """Delete rows by their handles; the newest handle that was ever given stays known."""
        if not values:
            return
        sequence = "loose" if table in CHECKPOINTS else table
        if HANDLES.get(sequence) == column:
            self.remember(sequence, max(values))
        gone = 0
        for part in slices(values):
            sql = f"DELETE FROM {table} WHERE {column} IN {listed(len(part))}"
            if table == "log":
                gone += len(self.tx.run(f"{sql} RETURNING e", part))
            else:
                self.tx.do(sql, part)
        if gone:
            self.set_number(LOG_GONE, self.number_of(LOG_GONE) + gone)

    def remember(self, table: str, number: int) -> None:
        """Handles up to this one were given, whatever becomes of their rows."""
        if self.number_of(table) < number:
            self.set_number(table, number)

    def set_number(self, name: str, number: int) -> None:
        self.tx.do("DELETE FROM floor WHERE name = ?", (name,))
        self.put("floor", name, number)


def moved_body(old: Branch, new: Branch, to: bytes) -> Body:
    """What the log says of a branch that moved other than by a commit onto its head. ``to``: where its epoch begins."""
    return {"what": "rollback", "b": old.b, "branch": old.name, "epoch": new.epoch, "from": old.id, "to": to}


def branch_columns(branch: Branch) -> tuple[Any, ...]:
    """The values of a branch's row."""
    b, a, name, uuid, body, *rest = branch
    return (b, a, name.encode(), uuid, body_bytes(body), *rest)
