"""Every question that can be put to the catalog.

Owns the SELECTs. Each call is one short read, so that no reader keeps the write-ahead log from being folded; streams
fetch a bounded batch at a time. Always true: a row whose sum does not match never leaves this module; it raises
``Damaged`` with its table and number.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import apsw
import zstandard

from holdfast.errors import BadOption, Damaged, Rekeying
from holdfast.store import schema
from holdfast.store.bodies import body_of
from holdfast.store.catalog import (
    AgentRow,
    BranchRow,
    CheckpointRow,
    ChunkRow,
    EventRow,
    PackRow,
    SealRow,
    TagRow,
    ValidityRow,
    forgotten_key,
    metadata_digest,
    node_digest,
)
from holdfast.store.cipher import PLAIN, Cipher, damaged_row, row_key
from holdfast.store.lines import Lines
from holdfast.store.ranges import Ranges
from holdfast.store.schema import SUMMED_TABLES, TABLE_NAMES
from holdfast.store.sqlite import reading_error

BATCH_ROWS = 256
"""Rows per read of a stream: small enough to keep reads short, large enough that the calls do not show."""

NODE_LIMIT_BYTES = 64 * 2**20
"""A node that claims to be larger is refused before memory is taken: the format's nodes are far smaller."""

NODES_AT_ONCE = 32
"""Nodes per read: one statement for each would cost as much as decompressing them."""

_AGENT = "SELECT a, uuid, key, body, sum FROM agent"
_BRANCH = "SELECT b, a, uuid, key, body, head, head_id, generation, sum FROM branch"
CHECKPOINT = "SELECT n, a, b, parent, depth, base, manifest, operations, key, sum FROM checkpoint"
_CHECKPOINT_C = "SELECT c.n, c.a, c.b, c.parent, c.depth, c.base, c.manifest, c.operations, c.key, c.sum"
_VALIDITY = "SELECT a, n, body, sum FROM validity"
_TAG = "SELECT a, key, body, n, sum FROM tag"
_SEAL = "SELECT n, b, places, sum FROM seal"
EVENT = "SELECT e, a, at, body, key, sum FROM event"
_CHUNK = "SELECT digest, p, offset, length, stored, sum FROM chunk"
_PACK = "SELECT p, uuid, size, sum FROM pack"

_ANCESTRY = f"""
WITH RECURSIVE up (n, steps) AS (
    SELECT ?1, 1
    UNION ALL
    SELECT c.parent, steps + 1 FROM up JOIN checkpoint c ON c.n = up.n
    WHERE c.parent > 0 AND c.parent < c.n AND c.parent <> ?2 AND steps < ?3)
{_CHECKPOINT_C} FROM up JOIN checkpoint c ON c.n = up.n ORDER BY up.steps
"""  # noqa: S608  constants only

# Every agent that an event tells of: one step in the index for each.
_TOLD_OF = """
WITH RECURSIVE told (a) AS (
    SELECT min(a) FROM event
    UNION ALL
    SELECT (SELECT min(a) FROM event WHERE a > told.a) FROM told WHERE told.a IS NOT NULL)
SELECT a FROM told WHERE a IS NOT NULL
"""

# What the rows of a table that has sums are ordered by.
KEYS_OF_TABLES = {
    "store": ("name",),
    "agent": ("a",),
    "branch": ("b",),
    "tag": ("a", "key"),
    "checkpoint": ("n",),
    "validity": ("a", "n"),
    "seal": ("n",),
    "event": ("e",),
    "line": ("b",),
    "effect": ("r",),
    "pack": ("p",),
    "chunk": ("digest",),
}

Row = tuple[Any, ...]
R = TypeVar("R")
T = TypeVar("T")


def _batches(items: Iterable[T]) -> Iterator[tuple[T, ...]]:
    """Items without repetitions, as many at a time as one statement takes."""
    left = iter(dict.fromkeys(items))
    while some := tuple(islice(left, BATCH_ROWS)):
        yield some


def _marks(items: Sequence[object]) -> str:
    return ", ".join("?" * len(items))


CIPHER_STATE = "SELECT value FROM store WHERE name = 'cipher'"


def rekeying() -> Rekeying:
    return Rekeying(
        "the store was given another key since this handle opened it; nothing was changed",
        hint="Open the store again, with the key that it has now.",
    )


def _blob(table: str, key: object, value: object) -> bytes:
    """SQLite lets any column hold any type, so a damaged page can make a blob a number or a text."""
    if not isinstance(value, bytes):
        raise damaged_row(table, key)
    return value


_zstd = threading.local()


def unpack_node(digest: bytes, data: bytes) -> bytes:
    """The node inside ``node.data``, proven by its digest."""
    try:
        packed = memoryview(data)[1:]
        if data[0] == 0:
            node = bytes(packed)
        elif data[0] == 1 and 0 <= zstandard.frame_content_size(packed) <= NODE_LIMIT_BYTES:
            decompressor = getattr(_zstd, "decompressor", None)
            if decompressor is None:
                decompressor = _zstd.decompressor = zstandard.ZstdDecompressor()
            node = decompressor.decompress(packed, allow_extra_data=False)
        else:
            raise damaged_row("node", digest)
    except (zstandard.ZstdError, IndexError, TypeError, MemoryError) as error:
        raise damaged_row("node", digest) from error
    if node_digest(node) != digest:
        raise damaged_row("node", digest)
    return node


class Reading(Lines):
    """The reading half of a store, over one connection that never writes."""

    def __init__(self, connection: apsw.Connection, cipher: Cipher = PLAIN) -> None:
        self._reader = connection
        self._cipher = cipher
        self._read_lock = threading.RLock()

    @property
    def connection(self) -> apsw.Connection:
        return self._reader

    @property
    def lock(self) -> threading.RLock:
        """Held while something is read."""
        return self._read_lock

    def _usable(self) -> None:
        """Raise if this handle may not be used any more. Called before any lock is touched."""

    def _select(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Row]:
        self._usable()
        with self._read_lock:
            try:
                rows = self._reader.execute(sql, bindings).fetchall()
                # After the read: a key that is still the store's now was so then.
                if self._cipher.keyed and self._reader.execute(CIPHER_STATE).get != self._cipher.state:
                    raise rekeying()
            except OverflowError as error:  # a row from elsewhere names a number that no row has
                raise Damaged("the catalog names a number that no row can have", what=("store.db",)) from error
            except (apsw.Error, UnicodeDecodeError) as error:
                self._usable()
                raise reading_error(error, "reading the catalog") from error
            return rows

    def _one(self, table: str, make: Callable[..., R], sql: str, bindings: tuple[Any, ...]) -> R | None:
        rows = self._select(sql, bindings)
        return self._cipher.record(table, make, rows[0]) if rows else None

    def _all(self, table: str, make: Callable[..., R], sql: str, bindings: tuple[Any, ...] = ()) -> list[R]:
        record = self._cipher.record
        return [record(table, make, row) for row in self._select(sql, bindings)]

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let every read of this thread inside the block see one moment. Keep it short: the log grows meanwhile."""
        self._usable()
        with self._read_lock:
            nested = self._reader.in_transaction
            if not nested:
                try:
                    self._reader.execute("BEGIN")
                except apsw.Error as error:
                    raise reading_error(error, "reading the catalog") from error
            try:
                yield
            finally:
                if not nested and self._reader.in_transaction:
                    self._reader.execute("ROLLBACK")

    # Agents and branches

    def agents(self) -> list[AgentRow]:
        return self._all("agent", AgentRow, f"{_AGENT} ORDER BY a")

    def agent(self, key: bytes) -> AgentRow | None:
        return self._one("agent", AgentRow, f"{_AGENT} WHERE key = ?", (self._cipher.lookup("agent", key),))

    def agent_row(self, a: int) -> AgentRow | None:
        """None when it was removed."""
        return self._one("agent", AgentRow, f"{_AGENT} WHERE a = ?", (a,))

    def branches(self, a: int) -> list[BranchRow]:
        return self._all("branch", BranchRow, f"{_BRANCH} WHERE a = ? ORDER BY b", (a,))

    def branch(self, a: int, key: bytes) -> BranchRow | None:
        stored = self._cipher.lookup("branch", key, a)
        return self._one("branch", BranchRow, f"{_BRANCH} WHERE a = ? AND key = ?", (a, stored))

    def branch_row(self, b: int) -> BranchRow:
        row = self._one("branch", BranchRow, f"{_BRANCH} WHERE b = ?", (b,))
        if row is None:
            raise Damaged(f"table branch, row {b}: missing", what=(f"branch {b}",))
        return row

    def tags(self, a: int) -> list[TagRow]:
        return self._all("tag", TagRow, f"{_TAG} WHERE a = ?", (a,))

    # Checkpoints

    def checkpoint(self, n: int) -> CheckpointRow:
        row = self._one("checkpoint", CheckpointRow, f"{CHECKPOINT} WHERE n = ?", (n,))
        if row is None:
            raise Damaged(f"table checkpoint, row {n}: missing", what=(f"checkpoint {n}",))
        return row

    def manifest_as_it_is(self, n: int) -> bytes | None:
        """The manifest column of a row, whether or not its sum fits. The checkpoint's id alone proves what it says."""
        rows = self._select(f"{CHECKPOINT} WHERE n = ?", (n,))
        return _blob("checkpoint", n, self._cipher.loose("checkpoint", rows[0])[0][6]) if rows else None

    def checkpoints(
        self,
        *,
        a: int | None = None,
        b: int | None = None,
        after: int = 0,
        before: int | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Iterator[CheckpointRow]:
        """Rows with ``after < n < before`` in order of n: of branch ``b``, else of agent ``a``, else of all."""
        high = 2**63 - 1 if before is None else before
        streams: list[Iterator[CheckpointRow]]
        if b is None and a is not None:
            # There is no index by agent; its branches have one each, and merging their streams keeps every read short.
            streams = [self._stream(row.b, after, high, newest_first) for row in self.branches(a)]
        else:
            streams = [self._stream(b, after, high, newest_first)]
        merged = heapq.merge(*streams, key=lambda row: row.n, reverse=newest_first)
        yield from islice(merged, limit)

    def _stream(self, b: int | None, low: int, high: int, newest_first: bool) -> Iterator[CheckpointRow]:
        which = "" if b is None else "b = ?3 AND "
        order = "DESC" if newest_first else "ASC"
        sql = f"{CHECKPOINT} WHERE {which}n > ?1 AND n < ?2 ORDER BY n {order} LIMIT {BATCH_ROWS}"
        while True:
            bindings = (low, high) if b is None else (low, high, b)
            batch = self._all("checkpoint", CheckpointRow, sql, bindings)
            yield from batch
            if len(batch) < BATCH_ROWS:
                return
            if newest_first:
                high = batch[-1].n
            else:
                low = batch[-1].n

    def ancestry(self, n: int, stop_at: int = 0, limit: int | None = None) -> list[CheckpointRow]:
        """The row ``n`` and its ancestors, nearest first, up to but without ``stop_at``, at most ``limit`` of them."""
        if n in {0, stop_at}:
            return []
        most = 2**62 if limit is None else limit
        rows = self._all("checkpoint", CheckpointRow, _ANCESTRY, (n, stop_at, most))
        expected = n
        for row in rows:
            if row.n != expected:
                break
            expected = row.parent
        # The chain ends where it should, or a row in it is missing or points upwards.
        if expected not in {0, stop_at} and (len(rows) < most or rows[-1].parent != expected):
            raise Damaged(
                f"table checkpoint, row {expected}: missing from the history of {n}", what=(f"checkpoint {expected}",)
            )
        return rows

    def named(self, key: bytes) -> list[CheckpointRow]:
        """Every checkpoint with that key, of whatever agent, newest first."""
        stored = self._cipher.lookup("checkpoint", key)
        return self._all("checkpoint", CheckpointRow, f"{CHECKPOINT} WHERE key = ? ORDER BY n DESC", (stored,))

    def links(self, b: int, after: int = 0) -> list[tuple[int, int, int]]:
        """Number, parent and base of every checkpoint of a branch with ``n > after``. Sums are not looked at."""
        return self._select("SELECT n, parent, base FROM checkpoint WHERE b = ? AND n > ? ORDER BY n", (b, after))

    def rows_as_they_are(self, b: int) -> Iterator[CheckpointRow]:
        """The checkpoints of a branch, whether or not their sums fit; not those that are no such row at all."""
        after = 0
        while batch := self._select(f"{CHECKPOINT} WHERE b = ? AND n > ? ORDER BY n LIMIT {BATCH_ROWS}", (b, after)):
            found = (self._cipher.loose("checkpoint", row)[0] for row in batch)
            yield from (CheckpointRow(*row) for row in found if tuple(map(type, row)) in schema.ROWS["checkpoint"])
            after = batch[-1][0]

    def tips(self, a: int) -> list[CheckpointRow]:
        """The checkpoints of an agent that are nobody's parent."""
        return self._all(
            "checkpoint",
            CheckpointRow,
            f"{CHECKPOINT} WHERE b IN (SELECT b FROM branch WHERE a = ?1) AND n NOT IN"  # noqa: S608  constants only
            " (SELECT parent FROM checkpoint WHERE b IN (SELECT b FROM branch WHERE a = ?1)) ORDER BY n",
            (a,),
        )

    def validity(self, a: int, n: int) -> ValidityRow | None:
        return self._one("validity", ValidityRow, f"{_VALIDITY} WHERE a = ? AND n = ?", (a, n))

    def validities(self, a: int) -> list[ValidityRow]:
        return self._all("validity", ValidityRow, f"{_VALIDITY} WHERE a = ? ORDER BY n", (a,))

    # Values

    def tail(self, n: int) -> bytes | None:
        rows = self._select("SELECT data FROM tail WHERE n = ?", (n,))
        return self._tail(n, rows[0][0]) if rows else None

    def _tail(self, n: int, data: object) -> bytes:
        return self._cipher.unbox("tail", n, _blob("tail", n, data))

    def tails_of(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """The tail rows of these checkpoints, of those that have one."""
        found: dict[int, bytes] = {}
        for some in _batches(numbers):
            sql = f"SELECT n, data FROM tail WHERE n IN ({_marks(some)})"  # noqa: S608  marks alone
            found.update((n, self._tail(n, data)) for n, data in self._select(sql, some))
        return found

    def tails(self, b: int, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Tail rows of a branch with ``n > after``, oldest first."""
        sql = (
            "SELECT t.n, t.data FROM checkpoint c CROSS JOIN tail t ON t.n = c.n"  # noqa: S608  constants only
            f" WHERE c.b = ? AND c.n > ? ORDER BY c.n LIMIT {BATCH_ROWS}"
        )
        while True:
            batch = self._select(sql, (b, after))
            for n, data in batch:
                yield n, self._tail(n, data)
            if len(batch) < BATCH_ROWS:
                return
            after = batch[-1][0]

    def tail_bytes(self, numbers: Iterable[int]) -> int:
        """How many bytes the tail rows of these checkpoints hold together. Does not read them."""
        total = 0
        for some in _batches(numbers):
            sql = f"SELECT coalesce(sum(length(data)), 0) FROM tail WHERE n IN ({_marks(some)})"  # noqa: S608  marks alone
            ((size,),) = self._select(sql, some)
            total += int(size)
        return total

    def covering_seal(self, b: int, n: int) -> SealRow | None:
        """The first seal of the branch at or after ``n``: it has the places of that checkpoint's values."""
        return self._one("seal", SealRow, f"{_SEAL} WHERE b = ? AND n >= ? ORDER BY n LIMIT 1", (b, n))

    def seals(self, b: int) -> list[SealRow]:
        return self._all("seal", SealRow, f"{_SEAL} WHERE b = ? ORDER BY n", (b,))

    def all_seals(self, after: int = 0) -> Iterator[SealRow]:
        """Seals of all branches with ``n > after``."""
        while batch := self._all("seal", SealRow, f"{_SEAL} WHERE n > ? ORDER BY n LIMIT 16", (after,)):
            yield from batch
            after = batch[-1].n

    def last_seal(self, b: int) -> SealRow | None:
        return self._one("seal", SealRow, f"{_SEAL} WHERE b = ? ORDER BY n DESC LIMIT 1", (b,))

    def nodes(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Raw nodes, each proven by its digest. One that is not in the catalog is left out."""
        cipher = self._cipher
        wanted = [cipher.lookup("node", digest) for digest in dict.fromkeys(digests)]
        found = {}
        for start in range(0, len(wanted), NODES_AT_ONCE):
            some = wanted[start : start + NODES_AT_ONCE]
            # A full batch is always the same text, so that its statement is prepared once.
            marks = ", ".join("?" * (NODES_AT_ONCE if len(some) > 1 else 1))
            bindings = tuple(some) + (None,) * (NODES_AT_ONCE - len(some) if len(some) > 1 else 0)
            sql = f"SELECT digest, data FROM node WHERE digest IN ({marks})"  # noqa: S608 - question marks alone
            for digest, data in self._select(sql, bindings):
                key = cipher.found("node", _blob("node", 0, digest))
                found[key] = unpack_node(key, cipher.unbox("node", key, _blob("node", key, data)))
        return found

    def stored_bytes(self, table: str, digests: Iterable[bytes]) -> int:
        """How many bytes nodes, metadata or chunks take where they are stored. Does not read them."""
        column = "stored" if table == "chunk" else "length(data)"
        total = 0
        for some in _batches(digests):
            stored = tuple(self._cipher.lookup(table, digest) for digest in some)
            sql = f"SELECT coalesce(sum({column}), 0) FROM {table} WHERE digest IN ({_marks(some)})"  # noqa: S608  constants and marks
            ((size,),) = self._select(sql, stored)
            total += int(size)
        return total

    def has_nodes(self, digests: Iterable[bytes]) -> set[bytes]:
        sql, lookup = "SELECT 1 FROM node WHERE digest = ?", self._cipher.lookup
        return {digest for digest in digests if self._select(sql, (lookup("node", digest),))}

    def node_digests(self) -> Iterator[bytes]:
        """The digest of every node, in no useful order."""
        after = -1
        while True:
            sql = f"SELECT k, digest FROM node WHERE k > ? ORDER BY k LIMIT {BATCH_ROWS}"  # noqa: S608  constants only
            batch = self._select(sql, (after,))
            for k, digest in batch:
                yield self._cipher.found("node", _blob("node", k, digest))
            if len(batch) < BATCH_ROWS:
                return
            after = batch[-1][0]

    def metadata(self, digest: bytes) -> bytes | None:
        rows = self._select("SELECT data FROM metadata WHERE digest = ?", (self._cipher.lookup("metadata", digest),))
        if not rows:
            return None
        data = self._cipher.unbox("metadata", digest, _blob("metadata", digest, rows[0][0]))
        if metadata_digest(data) != digest:
            raise damaged_row("metadata", digest)
        return data

    # Events, packs, sizes

    def rows_with_tails(self, after: int = 0) -> Iterator[tuple[CheckpointRow, bytes | None]]:
        """Every checkpoint with ``n > after`` and its tail, oldest first."""
        sql = (
            f"{_CHECKPOINT_C}, t.data FROM checkpoint c LEFT JOIN tail t ON t.n = c.n"
            f" WHERE c.n > ? ORDER BY c.n LIMIT {BATCH_ROWS}"
        )
        while True:
            batch = self._select(sql, (after,))
            for *columns, data in batch:
                row = self._cipher.record("checkpoint", CheckpointRow, tuple(columns))
                yield row, self._tail(row.n, data) if data is not None else None
            if len(batch) < BATCH_ROWS:
                return
            after = batch[-1][0]

    def events(
        self, *, a: int | None = None, after: int = 0, newest_first: bool = False, limit: int | None = None
    ) -> Iterator[EventRow]:
        order = "DESC" if newest_first else "ASC"
        which = "" if a is None else " AND a = ?3"
        sql = f"{EVENT} WHERE e > ?1 AND e < ?2{which} ORDER BY e {order} LIMIT {BATCH_ROWS}"
        low, high, left = after, 2**63 - 1, 2**63 if limit is None else limit
        while left > 0:
            batch = self._all("event", EventRow, sql, (low, high) if a is None else (low, high, a))
            yield from batch[:left]
            left -= len(batch)
            if len(batch) < BATCH_ROWS:
                return
            if newest_first:
                high = batch[-1].e
            else:
                low = batch[-1].e

    def events_named(self, keys: Iterable[bytes]) -> list[EventRow]:
        """Every event with one of these keys, of whatever agent, oldest first."""
        found: list[EventRow] = []
        for some in _batches(self._cipher.lookup("event", key) for key in keys):
            found += self._all("event", EventRow, f"{EVENT} WHERE key IN ({_marks(some)})", some)
        return sorted(found, key=lambda row: row.e)

    def chunk_row(self, digest: bytes) -> ChunkRow | None:
        return self._one("chunk", ChunkRow, f"{_CHUNK} WHERE digest = ?", (self._cipher.lookup("chunk", digest),))

    def chunk_rows(self, p: int) -> list[ChunkRow]:
        return self._all("chunk", ChunkRow, f"{_CHUNK} WHERE p = ? ORDER BY offset", (p,))

    def pack_rows(self) -> list[PackRow]:
        return self._all("pack", PackRow, f"{_PACK} ORDER BY p")

    def pack_row(self, p: int) -> PackRow | None:
        return self._one("pack", PackRow, f"{_PACK} WHERE p = ?", (p,))

    def header_version(self) -> int:
        """The format version in the database's header."""
        ((version,),) = self._select("PRAGMA user_version")
        return int(version)

    def store_rows(self) -> list[Row]:
        """Name, value and sum of the rows of table ``store``, unchecked and as they are stored."""
        return self._select("SELECT name, value, sum FROM store")

    def fact(self, name: str) -> bytes | None:
        """The value of a row of table ``store``; None when there is none."""
        rows = self._select("SELECT name, value, sum FROM store WHERE name = ?", (name,))
        return self._cipher.record("store", lambda _, value: _blob("store", name, value), rows[0]) if rows else None

    def check_schema(self) -> None:
        with self._read_lock:
            try:
                schema.check(self._reader)
            except (apsw.Error, UnicodeDecodeError) as error:
                raise reading_error(error, "reading the schema") from error

    def newest(self) -> tuple[int, int, int]:
        """The highest numbers of checkpoints, events and effects that are known: of rows, and of what was forgotten."""
        ((n, e, r, given_n, given_r),) = self._select(
            "SELECT coalesce((SELECT max(n) FROM checkpoint), 0), coalesce((SELECT max(e) FROM event), 0),"
            " coalesce((SELECT max(r) FROM effect), 0),"
            " coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'checkpoint'), 0),"
            " coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'effect'), 0)"
        )
        if n < given_n or r < given_r:
            bodies = [body for _, body in self.forgotten()]
            n = max([n, *(Ranges(body["n"]).last for body in bodies)])
            r = max([r, *(Ranges(body.get("r", ())).last for body in bodies)])
        return n, e, r

    def forgotten(self, a: int | None = None) -> Iterator[tuple[EventRow, dict[str, Any]]]:
        """The events that say what agents (or one of them) have forgotten, with their bodies, oldest first."""
        agents = self._select(_TOLD_OF) if a is None else [(a,)]
        for row in self.events_named(forgotten_key(one) for (one,) in agents):
            body = body_of(row)
            if body["what"] in {"forget", "remove"}:
                yield row, body

    def newest_names(self) -> tuple[int, int]:
        """The highest number of an agent that an event tells of, and of a branch that is there."""
        ((a, b),) = self._select(
            "SELECT coalesce((SELECT max(a) FROM event), 0), coalesce((SELECT max(b) FROM branch), 0)"
        )
        return a, b

    def sequences(self) -> dict[str, int]:
        """The highest numbers ever given out, as SQLite's own counters have them."""
        return dict(self._select("SELECT name, seq FROM sqlite_sequence"))

    def count_on(self, b: int, most: int | None = None) -> int:
        """How many checkpoints were made on a branch, up to number ``most``."""
        high = 2**63 - 1 if most is None else most
        ((count,),) = self._select("SELECT count(*) FROM checkpoint WHERE b = ? AND n <= ?", (b, high))
        return int(count)

    def counts(self) -> dict[str, int]:
        """Rows per table."""
        return {
            name: self._select(f"SELECT count(*) FROM {name}")[0][0]  # noqa: S608  constants only
            for name in TABLE_NAMES
        }

    def scan(self, table: str) -> Iterator[tuple[object, bool]]:
        """Every row of a table that has sums: its key, and whether the sum fits. For verifying."""
        if table not in SUMMED_TABLES:
            raise BadOption(f"table {table!r}")
        key = KEYS_OF_TABLES[table]
        order, width = ", ".join(key), len(key)
        where = ""
        last: tuple[Any, ...] = ()
        while True:
            sql = f"SELECT {order}, * FROM {table}{where} ORDER BY {order} LIMIT {BATCH_ROWS}"  # noqa: S608  constants only
            batch = self._select(sql, last)
            for found in batch:
                row, fits = self._cipher.loose(table, found[width:])
                yield row_key(table, row), fits
            if len(batch) < BATCH_ROWS:
                return
            last = batch[-1][:width]
            where = f" WHERE ({order}) > ({_marks(last)})"

    def free_pages(self) -> int:
        """Pages of the database that hold nothing."""
        ((count,),) = self._select("PRAGMA freelist_count")
        return int(count)

    def metadata_digests(self) -> list[bytes]:
        digests = self._select("SELECT digest FROM metadata")
        return [self._cipher.found("metadata", _blob("metadata", digest, digest)) for (digest,) in digests]

    def engine_check(self, *, quick: bool = True) -> list[str]:
        """What SQLite itself finds wrong with the database's structure; empty when all is well. Reads all of it."""
        rows = self._select("PRAGMA quick_check" if quick else "PRAGMA integrity_check")
        return [str(text) for (text,) in rows if text != "ok"]
