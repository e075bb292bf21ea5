"""Every row of every table, read in one place, in SQL that both engines take.

Owns the walks over rows: up from a checkpoint, along a line of records. What rows become is rows.py's business. Knows
no state and no policy; changes nothing (changes.py does). What always holds: a row that is given has its sum, a
checkpoint its id, operations and nodes their digests, and each checkpoint of a walk is the one that its child names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from holdfast.errors import Damaged, Forgotten, UnknownAgent
from holdfast.store.cipher import HINT, Cipher, digest, uncompressed
from holdfast.store.engine import Args, Reader
from holdfast.store.manifest import (
    Manifest,
    Packed,
    Segment,
    identity,
    mark_of,
    split_payload,
)
from holdfast.store.rows import (
    BEGINNING,
    LOST,
    NODE_MAX_BYTES,
    Agent,
    Body,
    Branch,
    Counted,
    End,
    Entry,
    Open,
    Place,
    Point,
    Record,
    Row,
    Tag,
    node_digest,
    read_body,
    text_of,
    to_agent,
    to_branch,
    to_entry,
    to_open,
    to_record,
    to_row,
    to_tag,
)
from holdfast.store.tables import CHECKPOINTS, HANDLES, LOG_GONE, TABLES

ROWS_AT_ONCE = 256
"""Rows per statement: bounds both the text of a list of numbers and what is in memory at once."""
HEADS_AT_ONCE = 4096
UP_AT_ONCE = 64
"""Ancestors per read: most walks end soon."""
_SEGMENTS_KEPT = 4


Progress = Callable[[str, int, int], None]
"""Tells whoever waits: called with what is being done, how much of it is done, and how much there is."""


def quietly(what: str, done: int, total: int) -> None:
    """The progress of whoever does not want to know."""


def listed(count: int) -> str:
    return f"({', '.join('?' * count)})"


def slices(values: Sequence[Any], size: int = ROWS_AT_ONCE) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _up(table: str, *, to_base: bool) -> str:
    stop = " AND up.sealed = 0" if to_base else ""
    return (
        f"WITH RECURSIVE up (k, n, parent, sealed) AS (SELECT 0, n, parent, sealed FROM {table} WHERE n = ? UNION ALL"
        f" SELECT up.k + 1, c.n, c.parent, c.sealed FROM up JOIN {table} c ON c.n = up.parent"
        f" WHERE up.k + 1 < ?{stop}) SELECT {TABLES[table].select('c')} FROM up JOIN {table} c ON c.n = up.n"
        " ORDER BY up.k"
    )


_UP = {(table, to_base): _up(table, to_base=to_base) for table in CHECKPOINTS for to_base in (False, True)}

_PARENT = "coalesce((SELECT parent FROM loose WHERE n = up.n), (SELECT parent FROM checkpoint WHERE n = up.n))"
_ABOVE = (
    "WITH RECURSIVE up (n) AS (SELECT n FROM loose WHERE n IN {0} UNION SELECT n FROM checkpoint WHERE n IN {0}"
    f" UNION SELECT {_PARENT} FROM up WHERE {_PARENT} > 0) SELECT n FROM up"
)

_LINE = (
    "WITH RECURSIVE up (r, below, i) AS (SELECT r, {0}, i FROM record WHERE r = ? UNION ALL"
    " SELECT c.r, c.{0}, c.i FROM up JOIN record c ON c.r = up.below WHERE c.i > ?)"
    f" SELECT {TABLES['record'].select('c')} FROM up JOIN record c ON c.r = up.r ORDER BY c.i"
)
_HANDLES = (
    "WITH RECURSIVE up (r, prev, i) AS (SELECT r, prev, i FROM record WHERE r = ? UNION ALL"
    " SELECT c.r, c.prev, c.i FROM up JOIN record c ON c.r = up.prev WHERE c.i > ?) SELECT r, i FROM up ORDER BY i DESC"
)
_NUMBERED = (
    f"{_HANDLES.partition(') SELECT')[0]}) SELECT {TABLES['record'].select('c')} FROM up JOIN record c ON c.r = up.r"
    " ORDER BY up.i LIMIT 1"
)
_QUEUES = (
    "WITH RECURSIVE one (queue) AS (SELECT (SELECT queue FROM open WHERE queue > ? ORDER BY queue LIMIT 1) UNION ALL"
    " SELECT (SELECT o.queue FROM open o WHERE o.queue > one.queue ORDER BY o.queue LIMIT 1)"
    " FROM one WHERE one.queue IS NOT NULL) SELECT queue FROM one WHERE queue IS NOT NULL"
)
_LINE_ALL, _LINE_MARKED = _LINE.format("prev"), _LINE.format("back")


class View:
    """What can be read: of the store as it is now, of one moment, or inside a transaction."""

    def __init__(self, reader: Reader, cipher: Cipher) -> None:
        self.reader = reader
        self.cipher = cipher
        self._segments: dict[int, Segment] | None = None

    def rows(self, table: str, where: str = "", args: Args = ()) -> list[tuple[Any, ...]]:
        """Rows of a table, each with its sum."""
        found = self.reader.run(f"SELECT {TABLES[table].listed} FROM {table} {where}", args)
        return [self.cipher.loaded(table, row) for row in found]

    def heads(self, table: str, damaged: list[tuple[Any, ...]] | None = None) -> Iterator[tuple[Any, ...]]:
        """Of each row with a handle what its sum covers, as it is stored. Only of a moment, or in a transaction.

        Rows with another sum are added to ``damaged``, if that is given.
        """
        spec = TABLES[table]
        key = spec.names[0]
        columns = ", ".join([*spec.names[: spec.covered], "sum"])
        sql = f"SELECT {columns} FROM {table} WHERE {key} > ? ORDER BY {key} LIMIT {HEADS_AT_ONCE}"
        rows = self.reader.run(sql, (0,))
        while rows:
            for row in rows:
                try:
                    yield self.cipher.covered(table, row)
                except Damaged:
                    if damaged is None:
                        raise
                    damaged.append(row)
            rows = self.reader.run(sql, (rows[-1][0],))

    def some(self, table: str, column: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """The rows that have one of these values, as they are stored, in a column."""
        for part in slices(values):
            yield from self.rows(table, f"WHERE {column} IN {listed(len(part))}", part)

    def facts(self) -> dict[str, bytes]:
        return dict(self.rows("store"))

    def fact(self, name: str) -> bytes | None:
        return next((value for _, value in self.rows("store", "WHERE name = ?", (name,))), None)

    # -- refs -----------------------------------------------------------------------------------------------

    def agents(self) -> list[Agent]:
        return [to_agent(row) for row in self.rows("agent", "ORDER BY a")]

    def census(self) -> list[Counted]:
        """Every agent's handle and name, and when it last changed, as they are stored: no sum is looked at.

        For choosing few among many; whoever shows one reads its row.
        """
        changed, unname = self._last_changed(), self.cipher.unname
        return [
            Counted(a, text_of(unname("agent", name), f"agent {a}"), changed.get(a, 0))
            for a, name in self.reader.run("SELECT a, name FROM agent")
        ]

    def _last_changed(self, after_us: int = -1) -> dict[int, int]:
        changed: dict[int, int] = {}
        for a, at in self.reader.run("SELECT a, at FROM branch WHERE a > 0 AND at > ?", (after_us,)):
            if at > changed.get(a, -1):
                changed[a] = at
        return changed

    def in_order(self, by: str) -> list[int] | None:
        """Every agent's handle, as they are stored: by ``name``, or by what its branches say, the most of it first.

        ``updated``: the most recently changed first, ``oldest`` last; ``checkpoints``: the longest line first. None:
        the order of names cannot be seen in an encrypted store.
        """
        if by == "name":
            return None if self.cipher.keyed else [a for (a,) in self.reader.run("SELECT a FROM agent ORDER BY name")]
        found = self._last_changed()
        if by == "checkpoints":
            depths = self.reader.run("SELECT a, max(depth) FROM branch WHERE a > 0 GROUP BY a")
            return [a for _, _, a in sorted(((depth, found.get(a, 0), a) for a, depth in depths), reverse=True)]
        return sorted(found, key=lambda a: (found[a], a), reverse=by != "oldest")

    def lately(self, after_us: int) -> list[Counted]:
        """As ``census()``, of those that have changed since."""
        changed = self._last_changed(after_us)
        found: list[Counted] = []
        for part in slices(list(changed)):
            for a, name in self.reader.run(f"SELECT a, name FROM agent WHERE a IN {listed(len(part))}", part):
                found.append(Counted(a, text_of(self.cipher.unname("agent", name), f"agent {a}"), changed[a]))
        return found

    def changed(self, a: int | None = None) -> list[tuple[int, int, int]]:
        """Time, agent and handle of the branches that have records, the last changed first, as they are stored."""
        whose, given = ("a > 0", ()) if a is None else ("a = ?", (a,))
        sql = f"SELECT at, a, b FROM branch WHERE {whose} AND count > 0 ORDER BY at DESC, b DESC"
        return self.reader.run(sql, given)

    def bodies_with(self, table: str, word: bytes) -> set[int]:
        """The handles of agents or branches in whose bodies a word stands somewhere, as they are stored."""
        unbox, kind = self.cipher.unbox, f"{table}.body"
        found = self.reader.run(f"SELECT {HANDLES[table]}, body FROM {table}")
        return {handle for handle, body in found if word in unbox(kind, [handle], body)}

    def agent(self, name: str) -> Agent | None:
        found = self.rows("agent", "WHERE name = ?", (self.cipher.name("agent", name.encode()),))
        return to_agent(found[0]) if found else None

    def agent_at(self, a: int) -> Agent:
        found = self.rows("agent", "WHERE a = ?", (a,))
        if not found:
            raise UnknownAgent("the agent was removed", hint="See `holdfast agents` for what is there.")
        return to_agent(found[0])

    def agent_of(self, uuid: bytes) -> Agent | None:
        found = self.rows("agent", "WHERE uuid = ?", (uuid,))
        return to_agent(found[0]) if found else None

    def branches(self, a: int | None = None) -> list[Branch]:
        where, args = ("WHERE a = ? ORDER BY b", (a,)) if a is not None else ("ORDER BY b", ())
        return [to_branch(row) for row in self.rows("branch", where, args)]

    def branch(self, a: int, name: str) -> Branch | None:
        found = self.rows("branch", "WHERE a = ? AND name = ?", (a, self.cipher.name("branch", name.encode(), a)))
        return to_branch(found[0]) if found else None

    def branch_at(self, b: int) -> Branch:
        found = self.rows("branch", "WHERE b = ?", (b,))
        if not found:
            raise UnknownAgent("the branch was removed", hint="See `holdfast agents` for what is there.")
        return to_branch(found[0])

    def tags(self, a: int | None = None) -> list[Tag]:
        rows = self.rows("tag", *(("WHERE a = ?", (a,)) if a is not None else ()))
        return [to_tag(row) for row in rows]

    def tag(self, a: int, name: str) -> Tag | None:
        found = self.rows("tag", "WHERE a = ? AND name = ?", (a, self.cipher.name("tag", name.encode(), a)))
        return to_tag(found[0]) if found else None

    def validities(self, a: int) -> dict[int, Body]:
        """An agent's judgements on checkpoints. One without is good."""
        rows = self.rows("validity", "WHERE a = ?", (a,))
        return {n: read_body(body, f"validity {n}", "validity") for _, n, body in rows}

    def validity(self, a: int, n: int) -> Body:
        """An agent's judgement on one checkpoint; empty where it is good."""
        rows = self.rows("validity", "WHERE a = ? AND n = ?", (a, n))
        return read_body(rows[0][2], f"validity {n}", "validity") if rows else {}

    def shallow(self) -> dict[int, int]:
        """Checkpoints whose parent was forgotten, each with its nearest ancestor that is left, or 0."""
        return dict(self.rows("shallow"))

    def log(self, a: int | None = None, *, kept: bool = True) -> list[Entry]:
        """What happened to an agent's refs, or to all, oldest first; ``kept``: and what is kept under keys."""
        wanted = [*(["a = ?"] if a is not None else []), *([] if kept else ["length(key) = 0"])]
        where = f"WHERE {' AND '.join(wanted)} ORDER BY e" if wanted else "ORDER BY e"
        return [to_entry(row) for row in self.rows("log", where, (a,) if a is not None else ())]

    def log_under(self, keys: Sequence[bytes]) -> list[Entry]:
        """What is kept under keys, oldest first."""
        names = [self.cipher.name("log", key) for key in keys]
        found = []
        for part in slices(names):
            where = f"WHERE length(key) > 0 AND key IN {listed(len(part))}"
            found += [to_entry(row) for row in self.rows("log", where, part)]
        return sorted(found)

    def count_under(self, keys: Sequence[bytes]) -> int:
        """How many entries are kept under keys."""
        names = [self.cipher.name("log", key) for key in keys]
        sql = f"SELECT count(*) FROM log WHERE length(key) > 0 AND key IN {listed(len(names))}"
        return int(self.reader.run(sql, names)[0][0])

    def number_of(self, name: str) -> int:
        """What ``floor`` says of a table, 0 where it says nothing."""
        found = self.rows("floor", "WHERE name = ?", (name,))
        return int(found[0][1]) if found else 0

    def entries_missing(self) -> int:
        """How many entries of the log are not there although nobody deleted them; below 0: there are too many.

        Only where handles have no gaps, which is where one writer at a time gives them.
        """
        count, newest = self.reader.run("SELECT count(*), coalesce(max(e), 0) FROM log")[0]
        return int(max(newest, self.number_of("log")) - self.number_of(LOG_GONE) - count)

    def opened(self, b: int | None = None, damaged: list[Damaged] | None = None) -> list[Open]:
        """The rows of a branch's open runs, of signals to it, and of effects that are not settled; or those of all.

        With ``damaged``, what is wrong with rows is added there, and they are passed over.
        """
        where, args = ("WHERE b = ?", (b,)) if b is not None else ("", ())
        return self._opened(where, args, damaged)

    def _opened(self, where: str, args: Args, damaged: list[Damaged] | None) -> list[Open]:
        found = []
        for row in self.reader.run(f"SELECT {TABLES['open'].listed} FROM open {where}", args):
            try:
                found.append(to_open(self.cipher.loaded("open", row)))
            except Damaged as error:
                if damaged is None:
                    raise
                damaged.append(error)
        return found

    def open_branches(self, where: str, *args: int | bytes) -> set[int]:
        """The branches that have such a row, as it is stored: no sum is looked at."""
        return {b for (b,) in self.reader.run(f"SELECT DISTINCT b FROM open WHERE {where}", args)}

    def opened_on(self, some: Sequence[int], damaged: list[Damaged] | None = None) -> list[Open]:
        """The rows of some branches; ``damaged`` as above."""
        return self._opened(f"WHERE b IN {listed(len(some))}", some, damaged)

    def opened_in(self, queue: bytes, where: str, *args: int, damaged: list[Damaged] | None = None) -> list[Open]:
        """Rows of runs that wait in a queue; where that is empty, of those that wait in none, and all the others."""
        name = self.cipher.name("open", queue) if queue else queue
        return self._opened(f"WHERE queue = ? AND {where}", (name, *args), damaged)

    def queues(self, damaged: list[Damaged] | None = None) -> list[bytes]:
        """The queues in which runs are that have not ended. It costs as much as there are queues, not runs."""
        found = []
        for (queue,) in self.reader.run(_QUEUES, (b"",)):
            try:
                found.append(self.cipher.unname("open", queue))
            except Damaged as error:
                if damaged is None:
                    raise
                damaged.append(error)
        return found

    # -- checkpoints ----------------------------------------------------------------------------------------

    def checkpoints(self, where: str = "", args: Args = (), folded: Args | None = None) -> list[Row]:
        """Rows of checkpoints, loose or in segments; ``folded``: the arguments for these, where they differ.

        In one statement: a row may go from the one table to the other between two.
        """
        columns = ", ".join(TABLES["loose"].names[:8])
        parts = f"{columns}, 0, data, sum FROM loose", f"{columns}, s, NULL, sum FROM checkpoint"
        sql = " UNION ALL ".join(f"SELECT {part} {where}" for part in parts)
        found = []
        for *head, s, data, total in self.reader.run(sql, (*args, *(args if folded is None else folded))):
            table, last = ("checkpoint", s) if data is None else ("loose", data)
            found.append(to_row(table, self.cipher.loaded(table, (*head, last, total))))
        return found

    def row(self, n: int) -> Row:
        found = self.checkpoints("WHERE n = ?", (n,))
        if not found:
            raise Forgotten(f"checkpoint {n} is not there any more", hint="See `holdfast log` for what is left.")
        return found[0]

    def point(self, n: int | Row) -> Point:
        """A checkpoint, read and proven."""
        row = self.row(n) if isinstance(n, int) else n
        if row.data is not None:
            raw, _ = split_payload(row.data)
            id = identity(raw)
        else:
            try:
                segment, at = self._place(row)
            except Damaged:
                return self.point(self._elsewhere(row))
            raw, id = segment.manifests[at], segment.ids[at]
        if mark_of(id) != row.mark:
            raise Damaged(f"checkpoint {row.n} is not what its row says", what=(f"checkpoint {row.n}",), hint=HINT)
        return Point(row, id, raw, Manifest.decode(raw))

    def find(self, id: bytes) -> Point | None:
        """The checkpoint with that id."""
        rows = self.checkpoints("WHERE mark = ?", (mark_of(id),))
        return next((point for row in rows if (point := self.point(row)).id == id), None)

    def keyed(self, key: bytes) -> list[Point]:
        """The checkpoints with that key."""
        loose, folded = ((self.cipher.name(table, key),) for table in CHECKPOINTS)
        return [self.point(row) for row in self.checkpoints("WHERE length(key) > 0 AND key = ?", loose, folded)]

    def operations(self, point: Point) -> bytes:
        """The operations that lead from its parent's state to its own, proven by its manifest."""
        row = point.row
        if row.data is not None:
            _, found = split_payload(row.data)
        else:
            try:
                segment, at = self._place(row)
                found = segment.operations(at)
            except Damaged:
                return self.operations(point._replace(row=self._elsewhere(row)))
        if digest(b"operations", found) != point.manifest.operations:
            short = point.id.hex()[:12]
            raise Damaged(
                f"the operations of checkpoint {short} are not what was written",
                what=(f"checkpoint {short}",),
                hint=HINT,
            )
        return found

    def up(self, n: int, limit: int, *, to_base: bool = False) -> list[Row]:
        """A checkpoint and its ancestors, newest first; ``to_base``: up to the nearest that is sealed."""
        found: list[Row] = []
        while n and len(found) < limit and not (to_base and found and found[-1].sealed):
            for table in CHECKPOINTS:  # a stretch of the one, then a stretch of the other
                rows = self.reader.run(_UP[table, to_base], (n, limit - len(found)))
                if rows:
                    found += [to_row(table, self.cipher.loaded(table, row)) for row in rows]
                    break
            else:
                if found and not self.checkpoints("WHERE n = ?", (n,)):
                    found[-1] = self.row(found[-1].n)
                    if found[-1].parent == n:
                        raise Damaged(f"checkpoint {n} is missing", what=(f"checkpoint {n}",), hint=HINT)
                    # Otherwise it was forgotten meanwhile, and the one below it stands alone.
                elif not found:
                    self.row(n)  # raises if it is not there; it may have come out of a segment between the two
            n = found[-1].parent if found else n
        return found

    def loose(self, n: int, limit: int) -> list[Row]:
        """A checkpoint and its ancestors, newest first, as far as they lie in no segment."""
        rows = self.reader.run(_UP["loose", False], (n, limit))
        return [to_row("loose", self.cipher.loaded("loose", row)) for row in rows]

    def walk(self, n: int, *, over: bool = False) -> Iterator[Point]:
        """A checkpoint and its ancestors, newest first, each proven to be the one that its child names.

        Ends at a root, or where the parent was forgotten; ``over``: goes on there with the nearest that is left.
        """
        expected, step = b"", 8
        while n:
            rows = self.up(n, step)
            step = min(2 * step, UP_AT_ONCE)
            for row in rows:
                point = self.point(row)
                if expected and point.id != expected:
                    raise Damaged(
                        f"checkpoint {row.n} is not the one that its child names", what=(f"checkpoint {row.n}",)
                    )
                expected = point.manifest.parent if row.parent else b""
                yield point
            n = rows[-1].parent
            if not n and over and point.cut:
                n = next((above for _, above in self.rows("shallow", "WHERE n = ?", (rows[-1].n,))), 0)

    def above(self, numbers: Sequence[int]) -> set[int]:
        """Checkpoints and all their ancestors, as far as they are linked, by number only."""
        found: set[int] = set()
        for part in slices(list(numbers)):
            found.update(n for (n,) in self.reader.run(_ABOVE.format(listed(len(part))), (*part, *part)))
        return found

    def _elsewhere(self, row: Row) -> Row:
        """While a damage is handled: a checkpoint's row as it is now, if it was stored in another way meanwhile."""
        now = self.row(row.n)
        if now.s == row.s:
            raise  # noqa: PLE0704 - what is being handled
        return now

    def _place(self, row: Row) -> tuple[Segment, int]:
        """The segment that a row names, and the checkpoint's place in it."""
        for segment in ((self._segments or {}).get(row.s), None):
            segment = segment or self._read_segment(row.s)  # noqa: PLW2901 - only if it is wanted
            at = segment.place.get(row.n)
            # One that was kept may be gone, and another one have its number.
            if at is not None and mark_of(segment.ids[at]) == row.mark:
                return segment, at
        raise Damaged(f"segment {row.s} does not have checkpoint {row.n}", what=(f"segment {row.s}",), hint=HINT)

    def _read_segment(self, s: int) -> Segment:
        found = self.rows("segment", "WHERE s = ?", (s,))
        if not found:
            raise Damaged(f"segment {s} is missing", what=(f"segment {s}",), hint=HINT)
        made = Segment(Packed(*found[0][1:]), self.nodes)
        kept = self._segments or {}
        # Threads may meet here: then one of them keeps nothing.
        self._segments = {**dict(list(kept.items())[1 - _SEGMENTS_KEPT :]), s: made}
        return made

    def segment(self, s: int) -> Segment:
        return (self._segments or {}).get(s) or self._read_segment(s)

    # -- objects --------------------------------------------------------------------------------------------

    def nodes(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of some nodes that are there, each proven by its digest."""
        found: dict[bytes, bytes] = {}
        names = [self.cipher.name("node", one) for one in dict.fromkeys(digests)]
        for _, name, data in self.some("node", "digest", names):
            raw = uncompressed(data, NODE_MAX_BYTES)
            if node_digest(raw) != name:
                short = name.hex()[:16]
                raise Damaged(f"node {short} is not what was written", what=(f"node {short}",), hint=HINT)
            found[name] = raw
        return found

    def has_nodes(self, digests: Iterable[bytes]) -> set[bytes]:
        return self._has("node", digests)

    def has_chunks(self, digests: Iterable[bytes]) -> set[bytes]:
        return self._has("chunk", digests)

    def _has(self, table: str, digests: Iterable[bytes]) -> set[bytes]:
        names = {self.cipher.name(table, one): one for one in digests}
        found: set[bytes] = set()
        for part in slices(list(names)):
            rows = self.reader.run(f"SELECT digest FROM {table} WHERE digest IN {listed(len(part))}", part)
            found.update(names[bytes(name)] for (name,) in rows)
        return found

    def chunks(self, digests: Iterable[bytes]) -> dict[bytes, Place]:
        """Where chunks are: those of some that are there."""
        names = [self.cipher.name("chunk", one) for one in dict.fromkeys(digests)]
        rows = list(self.some("chunk", "digest", names))
        packs = {p: uuid for p, uuid, _ in self.some("pack", "p", list({row[1] for row in rows}))}
        for name, p, *_ in rows:
            if p not in packs:
                raise Damaged(f"pack {p} is missing", what=(f"pack {p}", f"chunk {name.hex()[:16]}"), hint=HINT)
        return {name: Place(packs[p], start, length, stored) for name, p, start, length, stored in rows}

    def packs(self) -> dict[bytes, int]:
        """All packs, each with its size."""
        return {uuid: size for _, uuid, size in self.rows("pack")}

    # -- lines of records -----------------------------------------------------------------------------------

    def line(self, r: int, after: int = 0, *, marked: bool = False) -> list[Record]:
        """The records of a line up to ``r``, oldest first, from number ``after`` + 1 on; ``marked``: only such.

        With ``marked``, ``r`` is a marked one.
        """
        if not r:
            return []
        found = self.reader.run(_LINE_MARKED if marked else _LINE_ALL, (r, after))
        records = [to_record(self.cipher.loaded("record", row)) for row in found]
        if not records or records[-1].r != r:
            if not self.rows("record", "WHERE r = ?", (r,)):
                raise Damaged(f"record {r} is missing", what=(f"record {r}",), hint=HINT)
            return []  # it is not after ``after``
        first = records[0]
        below = first.back if marked else first.prev
        if (below and first.i > after + 1 and not self._is_there(below, after)) or (
            not marked and [one.i for one in records] != list(range(first.i, first.i + len(records)))
        ):
            raise Damaged(f"the line below record {first.r} has a gap", what=(f"record {first.r}",), hint=HINT)
        return records

    def _is_there(self, r: int, most: int) -> bool:
        """Whether a record is there whose number is not above ``most``."""
        return bool(self.reader.run("SELECT i FROM record WHERE r = ? AND i <= ?", (r, most)))

    def handles(self, r: int) -> dict[int, int]:
        """The handles of all records of the line up to ``r``, each with its number."""
        return dict(self.reader.run(_HANDLES, (r, 0)))

    def numbered(self, r: int, i: int) -> Record:
        """Record number ``i`` of the line up to ``r``."""
        found = self.reader.run(_NUMBERED, (r, i - 1))
        row = to_record(self.cipher.loaded("record", found[0])) if found else None
        if row is None or row.i != i:
            raise Damaged(f"record {i} of a line is missing", what=(f"record {r}",), hint=HINT)
        return row

    def record(self, r: int) -> Record:
        found = self.rows("record", "WHERE r = ?", (r,))
        if not found:
            raise Damaged(f"record {r} is missing", what=(f"record {r}",), hint=HINT)
        return to_record(found[0])

    def records(self, numbers: Sequence[int]) -> list[Record]:
        return [to_record(row) for row in self.some("record", "r", numbers)]

    def has_key(self, branch: Branch, key: bytes) -> bool:
        """Whether a record of a branch's line has this key, or may have had it: one that is gone."""
        names = [self.cipher.name("record", one) for one in (key, LOST)]
        sql = "SELECT r, i, b FROM record WHERE length(key) > 0 AND key IN (?, ?)"
        found = self.reader.run(sql, names)
        if any(b == branch.b for _, _, b in found):
            return True
        # Those of other branches, or of other stores (0), may be part of the line, too.
        start = int(branch.body.get("start", 0))
        others = {r for r, i, b in found if i <= (branch.records if not b else start)}
        return bool(others) and not others.isdisjoint(self.handles(branch.line))

    def branches_with(self, key: bytes) -> set[int]:
        """The branches on which records with this key were written, as they are stored."""
        sql = "SELECT DISTINCT b FROM record WHERE length(key) > 0 AND key = ?"
        return {b for (b,) in self.reader.run(sql, (self.cipher.name("record", key),))}

    def end_at(self, point: Point | None) -> End:
        """The end of the line as a checkpoint speaks of it."""
        if point is None or not point.row.line:
            return BEGINNING
        newest = self.record(point.row.line)
        return End(newest.r, newest.r if newest.marked else newest.back, *point.manifest.effects)

    def counts(self) -> dict[str, int]:
        return {table: self.reader.run(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}
