"""PostgreSQL behind ``Engine``: one round trip per commit, and moments.

Owns a schema of the database, or the rows of one store in a schema that several share. Knows no table but those two
that no other kind of store has, and those in which an acknowledged commit is looked for. What always holds: a commit
that returns was flushed by the server, and one whose answer is lost raises ``Unsure``; names are qualified and settings
belong to transactions, or are asked for, so that nothing rests on two statements having met the same session of the
server. A comparison that does not hold violates NOT NULL, which ends the transaction.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from typing import TypeVar

from holdfast.errors import (
    BadOption,
    Damaged,
    DiskFull,
    HoldfastError,
    NotAStore,
    ReadOnly,
    StoreBusy,
    StoreClosed,
    StoreFailed,
    StorePoisoned,
    StoreReadOnly,
)
from holdfast.store.cipher import HINT, digest
from holdfast.store.connection import GONE_MS, KEEPALIVES, Address, Link, Said, Seat, Statement, free_seat
from holdfast.store.engine import Args, Reader, Refused, Row, Tx, Unsure, went_back
from holdfast.store.processes import MARK, MARK_MAX_BYTES
from holdfast.store.sharing import PASSING, SharedTransaction, tidied
from holdfast.store.tables import FORMAT_VERSION, OWNER, TABLES, Dialect, check_version, columns_of, ddl

WRITERS, READERS, SPARE = 4, 8, 2
"""The most connections of an open store: for transactions, for reading, and kept for the next moment."""

SHARED, BUSY_S = 16, 30.0
"""How many transactions tools may have open at once, each on a connection, and how long another one waits."""

HANDLES = 64
"""Handles are taken in blocks, whose size the sequence has for good: the next one comes together with a commit."""

JOINED_MAX = 4
"""How many new rows go into one statement with the comparison: each number of them is prepared."""

KEPT_ACKNOWLEDGED = 64
TRIES, APART_S = 5, 0.02
"""How often a transaction is made that the server ends in favour of another, and how far apart: at random."""

CLOSE_S = 5.0
"""How long closing waits for somebody who is reading."""

MOVED = b"moved"
"""The lock that every transaction shares, and whoever moves the store has alone."""

UNSAFE = "HOLDFAST_ALLOW_UNSAFE_POSTGRES"

_SESSION = {
    "search_path": "",
    "lock_timeout": "10s",
    "statement_timeout": "0",  # it would end the wait of a commit for its replica, and call that success
    "idle_in_transaction_session_timeout": "1h",  # a moment that is left alone keeps the server from tidying up
    "client_min_messages": "error",
    "synchronous_commit": "on",
}
_FLUSHED = "current_setting('synchronous_commit') = 'on'"
_WATCHED = {f"tcp_{name}": str(number) for name, number in KEEPALIVES.items()}
"""So that the server finds out about a machine that vanished, and lets go of what its sessions had locked."""
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

_OWN = ("lease", "object")
"""Tables that no other kind of store has: who is at work, and the packs of a store that has no place for them."""

_PARTS = re.compile(rf"'[^']*'|\?|\b(FROM|JOIN|INTO|UPDATE)\s+({'|'.join((*TABLES, *_OWN))})\b")
_COMMENT = re.compile(r"holdfast (store|shared), format (\d+)")
_COMPRESSED = [("loose", "data"), ("segment", "manifests"), ("segment", "operations"), ("node", "data")]
KEY = "(classid::bigint << 32 | objid::bigint)"
CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_WAS_MOVED = "22012"
"""Division by zero, which only one statement can meet."""
_LIST = "string_to_array(?, ',')::bigint[]"
_BEHIND = (
    f"SELECT known.b FROM unnest({_LIST}, {_LIST}, {_LIST}) AS known (b, generation, head) LEFT JOIN branch USING (b)"
    " WHERE coalesce(branch.generation, -1) < known.generation"
    " OR (branch.generation = known.generation AND known.head > 0"
    " AND NOT EXISTS (SELECT 1 FROM loose WHERE n = known.head)"
    " AND NOT EXISTS (SELECT 1 FROM checkpoint WHERE n = known.head))"
)
_MAKING = int.from_bytes(digest(b"lock", b"make")[:8], "big", signed=True)

T = TypeVar("T")


def _setting(settings: Mapping[str, str], *, local: bool) -> Statement:
    parts = [f"set_config('{name}', '{value}', {local})" for name, value in settings.items()]
    return f"SELECT {', '.join(parts)}", ()


class _Moment:
    """One snapshot."""

    def __init__(self, engine: Postgres, link: Link) -> None:
        self._engine = engine
        self._link = link

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        with self._engine.explained("reading"):
            return self._link.ask((self._engine.translated(sql), args))


class _Tx:
    """A transaction. Only ``run`` waits for the server."""

    def __init__(self, engine: Postgres, link: Link) -> None:
        self._engine = engine
        self._link = link
        self.deletes = False

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        rows = self._send(sql, args, wanted=True)
        self._link.receive(end=False)
        return rows

    def do(self, sql: str, args: Args = ()) -> None:
        self._send(sql, args)

    def _send(self, sql: str, args: Args, *, wanted: bool = False) -> list[Row]:
        self.deletes = self.deletes or sql.startswith("DELETE")
        return self._link.send(self._engine.translated(sql), args, wanted=wanted)

    def many(self, sql: str, args: Sequence[Args]) -> None:
        for one in args:
            self.do(sql, one)

    def number(self, *_tables: str) -> int:
        return self._engine.number()

    def naming(self) -> None:
        self.do("SELECT pg_advisory_xact_lock_shared(?)", (self._engine.key(b"sweep"),))

    def alone(self, name: bytes) -> None:
        self.do("SELECT pg_advisory_xact_lock(?)", (self._engine.key(name),))

    def clock(self) -> int:
        return int(self.run(f"SELECT {CLOCK}")[0][0])

    def erasing(self) -> None:
        """What becomes of deleted rows is the server's business."""


class Postgres:
    """The engine of a store on a server."""

    dialect: Dialect = "postgres"
    writers = WRITERS

    def __init__(self, url: str, *, readonly: bool = False, fill: Callable[[Tx], None] | None = None) -> None:
        """``fill`` writes the rows of a new store, together with its tables; without it, there must be one.

        Where the tables are, and which of the stores that share them, is in the URL: ``?schema=`` and ``?shared=``.
        """
        self._address = Address(url)
        self.place = self._address.place
        self.lease_s = self._address.lease_s
        self.schema = self._address.schema
        self.busy = False
        self.poison: StorePoisoned | None = None
        self._readonly = readonly
        self._closed = False
        self._links: list[weakref.ref[Link]] = []  # all that were made: a forked child must let go of them
        self._reading = [Seat() for _ in range(READERS)]
        self._writing = [Seat() for _ in range(WRITERS)]
        self._spare: list[Link] = []
        self._tidy: list[Link] = []
        self._free = threading.Semaphore(SHARED)
        self._handles: list[int] = []
        self._next_handles = f"SELECT nextval('\"{self.schema}\".handle'::regclass)"
        self._sweeper: int | None = None  # the server's process that holds the right to sweep for us
        self._acknowledged: dict[int, tuple[int, int]] = {}
        self._mutex = threading.Lock()  # for the handles, and what was acknowledged
        self.translated = lru_cache(1024)(self._translate)
        owner = {"holdfast.store": self._address.store} if self._address.store else {}
        self._local = _setting({"synchronous_commit": "on"} | owner, local=True)
        self.owner = [_setting(owner, local=True)] if owner else []
        self._unmoved: list[Statement] = []
        self._unmark: Callable[[], object] = bool
        try:
            self._find(fill)
            # Whoever looks at this process from outside, to freeze it, sees no file of such a store: but this.
            with suppress(AttributeError, OSError):
                mark = os.memfd_create(f"{MARK}{self.place}"[:MARK_MAX_BYTES])
                self._unmark = weakref.finalize(self, os.close, mark)
        except BaseException:
            self.close()
            raise
        # Whoever moves the store waits for those who are writing, and those who come after it find that it was moved.
        # A plain commit needs no such look: its branch has another generation then.
        self._unmoved = [
            ("SELECT pg_advisory_xact_lock_shared($1)", (self.key(MOVED),)),
            (self.translated("SELECT 1 / (1 - count(*)) FROM store WHERE name = 'moved'"), ()),
        ]

    def key(self, name: bytes) -> int:
        """The key of an advisory lock. These are the whole database's, so the store is in it."""
        whose = f"{self.schema}\0{self._address.store}\0".encode()
        return int.from_bytes(digest(b"lock", whose, name)[:8], "big", signed=True)

    def _translate(self, sql: str) -> str:
        """A statement as the server takes it: with numbered arguments, and the tables of our schema."""
        numbers = itertools.count(1)

        def part(match: re.Match[str]) -> str:
            if match[0] == "?":
                return f"${next(numbers)}"
            return f'{match[1]} "{self.schema}".{match[2]}' if match[1] else match[0]

        return _PARTS.sub(part, sql)

    # -- connections ----------------------------------------------------------------------------------------

    def connect(self) -> Link:
        """A connection with all its settings, to a server that keeps promises and has what it has acknowledged."""
        if self._closed:
            raise StoreClosed(f"the store at {self.place} was closed", hint="Open it again with holdfast.open().")
        link = Link(self._address)
        self._links = [*(one for one in self._links if one() is not None), weakref.ref(link)]
        try:
            with self.explained("connecting"):
                self._settle(link)
                self.compare(link)
        except BaseException:
            link.close()
            raise
        return link

    def _settings(self, link: Link) -> Statement:
        settings = _SESSION | _WATCHED | ({"default_transaction_read_only": "on"} if self._readonly else {})
        if link.version >= 12_00_00:
            settings["tcp_user_timeout"] = str(GONE_MS)
        if link.version >= 14_00_00:
            settings["idle_session_timeout"] = "0"
        return _setting(settings, local=False)

    def _settle(self, link: Link) -> None:
        sql = "SELECT current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery()"
        ((fsync, pages, standby),) = link.ask(self._settings(link), (sql, ()))
        if "off" in {fsync, pages} and os.environ.get(UNSAFE) != "1":
            raise StoreFailed(
                f"the server at {self.place} has fsync={fsync} and full_page_writes={pages}: it may lose what it has"
                " acknowledged",
                hint=f"Set both to on. For tests, {UNSAFE}=1 lets it be.",
            )
        if standby and not self._readonly:
            raise StoreReadOnly(f"the server at {self.place} is a standby, which cannot be written")

    def acknowledge(self, moved: Mapping[int, tuple[int, int]]) -> None:
        """Somebody was told that branches have moved: any server that is reached from now on must know it."""
        with self._mutex:
            known = self._acknowledged
            for b, stands in moved.items():
                known.pop(b, None)
                known[b] = stands
            while len(known) > KEPT_ACKNOWLEDGED:
                del known[next(iter(known))]

    def compare(self, link: Link) -> None:
        """Raise unless the server knows all that it has acknowledged to this process."""
        if known := self._known():
            self._check_known(known, link.ask(*self.owner, self._behind(known)))

    def _known(self) -> dict[int, tuple[int, int]]:
        with self._mutex:
            return self._acknowledged.copy()

    def _behind(self, known: Mapping[int, tuple[int, int]]) -> Statement:
        """What finds branches that stand behind what was acknowledged.

        A branch's generation never falls; while it is ours, nobody takes the checkpoint at its head away.
        """
        generations, heads = zip(*known.values(), strict=True)
        return self.translated(_BEHIND), [",".join(map(str, column)) for column in (known, generations, heads)]

    def _check_known(self, known: Mapping[int, tuple[int, int]], behind: list[Row]) -> None:
        """Of a branch that has moved since it was ``known``, the checkpoint that was its head may be gone by right."""
        with self._mutex:
            lost = [b for (b,) in behind if self._acknowledged.get(b) == known[b]]
        if lost:
            raise went_back(f"the server at {self.place}")

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turn what the server said into an error of ours."""
        try:
            yield
        except Said as said:
            raise _known(said, doing) from None

    # -- reading --------------------------------------------------------------------------------------------

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        seat, asked = free_seat(self._reading), (*self.owner, (self.translated(sql), args))
        with seat.lock, self.explained("reading"):
            try:
                return seat.ready(self.connect).ask(*asked)
            except Said as said:
                if said.state:
                    raise
            return seat.ready(self.connect).ask(*asked)  # the connection was lost, and reading changes nothing

    @contextmanager
    def _own(self) -> Iterator[Link]:
        """A connection for a transaction that stays open."""
        link = None
        with suppress(IndexError):  # another thread may have taken the last one
            link = self._spare.pop()
        if link is None or not link.fit:
            link = self.connect()
        try:
            yield link
            with suppress(Said):  # what was read was right, and nothing was written
                link.ask(("COMMIT", ()))
                if not self._closed and len(self._spare) < SPARE:
                    self._spare.append(link)
                    return
            link.close()
        except BaseException:
            link.close()
            raise

    def stamp(self) -> int | None:
        """To ask the server would cost as much as looking."""
        return None

    @contextmanager
    def moment(self) -> Iterator[_Moment]:
        key, known = (self.key(b"sweep"),), self._known()  # before the snapshot, or that could be older
        with self.explained("reading"), self._own() as link:
            # A lock that lasts as long as the transaction is taken inside it, so after its snapshot. Until then, one of
            # the session keeps sweepers out.
            link.ask(("SELECT pg_advisory_lock_shared($1)", key))
            link.ask((_SNAPSHOT, ()), self._local, ("SELECT pg_advisory_xact_lock_shared($1)", key))
            unlock = ("SELECT pg_advisory_unlock_shared($1)", key)
            if known:
                self._check_known(known, link.ask(unlock, self._behind(known)))
            else:
                link.ask(unlock)
            yield _Moment(self, link)

    @contextmanager
    def sweeping(self) -> Iterator[bool]:
        with self.explained("sweeping"), self._own() as link:
            sql = "SELECT pg_try_advisory_xact_lock($1), pg_backend_pid()"
            ((alone, pid),) = link.ask((_BEGIN, ()), (sql, (self.key(b"sweep"),)))
            if not alone:
                yield False
                return
            self._sweeper = pid
            try:
                yield True
            finally:
                self._sweeper = None

    # -- writing --------------------------------------------------------------------------------------------

    def clock(self) -> int:
        return int(self.run(f"SELECT {CLOCK}")[0][0])

    def identity(self) -> bytes:
        sql = (
            "SELECT concat_ws('/', (SELECT system_identifier FROM pg_control_system()), (SELECT oid FROM pg_database"
            " WHERE datname = current_database()), to_regnamespace(?)::oid)"
        )
        try:
            ((told,),) = self.run(sql, (f'"{self.schema}"',))
        except StoreFailed:  # not every server that speaks like PostgreSQL says who it is
            return b""
        return f"{told}/{self._address.store}".encode()

    def check_place(self) -> None:
        """Whoever opens the store comes to the same server, or to one that ``connect`` has compared with it."""

    def handles(self) -> Callable[[], int]:
        return self.number

    def direct(self, statements: Sequence[str], args: Sequence[Args]) -> bool:
        seat = free_seat(self._writing)
        if seat.lock.locked():
            return False
        joined = self._joined(tuple(statements))
        with seat.lock, self.explained("writing"):
            # An interrupt leaves a connection on which something is under way: it is not used again.
            link = seat.ready(self.connect)
            if self.owner or joined is None:
                link.send(*self._local)  # without BEGIN: what is sent in one round is one transaction
            if joined is not None:
                link.send(self.translated(joined), tuple(chain.from_iterable(args)))
            else:
                for sql, values in zip(statements, args, strict=True):
                    link.send(self.translated(sql), values)
            try:
                more = self._more_handles(link)
                link.receive()
            except Said as said:
                link.roll_back()
                if not said.state:
                    raise _unsure(said) from None
                return False  # the writer finds out which comparison does not hold
        self._keep(more)
        return True

    @staticmethod
    @lru_cache(64)
    def _joined(statements: tuple[str, ...]) -> str | None:
        """New rows and one comparison as one statement, if that is all: each one costs the server some time.

        The comparison then holds in a session only that flushes. Elsewhere the writer makes the change, and says so.
        """
        *rows, last = statements
        if not last.startswith("UPDATE") or "CASE WHEN " not in last or len(rows) > JOINED_MAX:
            return None
        if not all(one.startswith("INSERT") and "ON CONFLICT" not in one for one in rows):
            return None  # what it meets may depend on the statements before
        parts = [f"row{number} AS ({one})" for number, one in enumerate(rows)]
        last = last.replace("CASE WHEN ", f"CASE WHEN {_FLUSHED} AND ", 1)
        return f"WITH {', '.join(parts)} {last}" if parts else last

    def transaction(self, work: Callable[[Tx], T], begun: Callable[[], None] | None = None) -> T:
        seat = free_seat(self._writing)
        with seat.lock, self.explained("writing"):
            link = seat.ready(self.connect)
            if begun is not None:
                begun()
            for tried in range(1, TRIES):
                try:
                    return self._transact(link, work)
                except Said as said:
                    if said.state not in PASSING:
                        raise
                time.sleep(random.uniform(0, tried * APART_S))  # noqa: S311 - or two would meet again and again
            return self._transact(link, work)

    def _transact(self, link: Link, work: Callable[[Tx], T], begin: Sequence[Statement] = ((_BEGIN, ()),)) -> T:
        committing = False
        try:
            for statement in (*begin, self._local, *self._unmoved):
                link.send(*statement)
            tx = _Tx(self, link)
            result = work(tx)
            if tx.deletes and self._sweeper is not None:  # with its connection, the right to sweep may have been lost
                sql = f"SELECT pid FROM pg_locks WHERE pid = ? AND mode = 'ExclusiveLock' AND {KEY} = ?"
                if not tx.run(sql, (self._sweeper, self.key(b"sweep"))):
                    raise StoreBusy("the connection that held the lock was lost; nothing was written")
            committing = True
            more = self._commit(link)
        except BaseException as error:
            link.roll_back()
            if committing and isinstance(error, Said) and not error.state:
                raise _unsure(error) from None
            raise
        self._keep(more)
        return result

    def share(self, *, later: bool) -> SharedTransaction:
        if not self._free.acquire(timeout=BUSY_S):
            raise StoreBusy(f"{SHARED} tools have had a transaction open for {BUSY_S:g} s", hint="Make them shorter.")
        link = None
        try:
            with suppress(IndexError):  # another thread may have taken the last one
                while link is None or not link.fit:
                    link = self._tidy.pop()
            if link is None or not link.fit:
                link = self.connect()
            with self.explained("beginning a transaction"):
                return SharedTransaction(self, link, _SESSION, later=later)
        except BaseException:
            self._free.release()
            if link is not None:
                link.close()
            raise

    def finish(self, link: Link, work: Callable[[Tx], T]) -> T:
        """Write the store's part of a shared transaction, with its own settings, and commit."""
        return self._transact(link, work, (("RESET ROLE", ()), _setting(_SESSION, local=True)))

    def give_back(self, link: Link) -> None:
        """A shared transaction has ended."""
        try:
            if not self._closed and len(self._tidy) < SPARE and tidied(link, self._settings(link)):
                self._tidy.append(link)
            elif link.fit:
                link.close()
        finally:
            self._free.release()

    def _more_handles(self, link: Link) -> list[Row]:
        """Ask for more handles, if it is time for them."""
        return link.send(self._next_handles, wanted=True) if len(self._handles) < HANDLES // 4 else []

    def _commit(self, link: Link) -> list[Row]:
        """The one wait of a transaction. Returns more handles, if it was time for them."""
        more = self._more_handles(link)
        link.send("COMMIT")
        link.receive()
        if link.done != b"COMMIT":
            raise Said("25P02", "the server has rolled the transaction back")
        return more

    def number(self) -> int:
        """A handle. They come neither in order nor without gaps."""
        while True:
            with self._mutex:
                if self._handles:
                    return self._handles.pop()
            self._keep(self.run(self._next_handles))

    def _keep(self, blocks: list[Row]) -> None:
        with self._mutex:
            for (first,) in blocks:
                self._handles[:0] = range(first + HANDLES - 1, first - 1, -1)

    # -- the schema -----------------------------------------------------------------------------------------

    def _look(self, reader: Reader) -> bool:
        """True if the store is there, False if there is room for it. Otherwise raises."""
        sql = (
            "SELECT (SELECT count(*) FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace WHERE s.nspname = ?"
            " AND c.relkind IN ('r', 'p', 'v', 'm', 'f')), obj_description(to_regclass(?), 'pg_class')"
        )
        ((tables, comment),) = reader.run(sql, (self.schema, f'"{self.schema}".store'))
        if not tables:
            return False
        mark = _COMMENT.fullmatch(comment or "")
        if mark is None:
            raise NotAStore(
                f"{self.place}: the schema has tables of something else",
                hint="Give another one: ?schema=NAME. It is made if it is not there.",
            )
        check_version(self.place, int(mark[2]))
        shared = mark[1] == "shared"
        if shared != bool(self._address.store):
            raise BadOption(
                f"{self.place}: the schema {'is' if shared else 'is not'} shared by several stores",
                hint="Say which of them: ?shared=NAME." if shared else "Leave out ?shared=.",
            )
        return not shared or self._look_inside(reader)

    def _look_inside(self, reader: Reader) -> bool:
        """Whether a shared schema has this store; raises where one would see the others as well."""
        sql = f"SELECT row_security_active('\"{self.schema}\".store'), (SELECT count(*) FROM store)"
        ((guarded, facts),) = reader.run(sql)
        if not guarded:
            raise StoreFailed(
                f"{self.place}: this user sees the rows of every store in the schema",
                hint="Connect as one who is no superuser and has no BYPASSRLS.",
            )
        return bool(facts)

    def _find(self, fill: Callable[[Tx], None] | None) -> None:
        """See that the store is there, or make it: whole, by whoever comes first."""
        if self._look(self):
            return
        if fill is None or self._readonly:
            raise NotAStore(
                f"there is no store at {self.place}", hint="Check the address, or open it with create=True."
            )

        def make(tx: Tx) -> None:
            tx.run("SELECT pg_advisory_xact_lock(?)", (_MAKING,))
            if self._look(tx):
                return  # somebody else was faster
            sql = "SELECT to_regnamespace(?) IS NULL, to_regclass(?) IS NULL"
            ((no_schema, no_tables),) = tx.run(sql, (f'"{self.schema}"', f'"{self.schema}".store'))
            if no_schema:  # only who may make one may ask for it
                tx.do(f'CREATE SCHEMA "{self.schema}"')
            for statement in self._ddl() if no_tables else ():
                tx.do(statement)
            if self._address.store:
                self._look_inside(tx)
            fill(tx)

        self.transaction(make)

    def _ddl(self) -> Iterator[str]:
        shared = bool(self._address.store)
        whose = f"store uuid NOT NULL DEFAULT {OWNER}, " if shared else ""
        yield f'SET LOCAL search_path TO "{self.schema}"'
        yield from ddl("postgres", shared=shared)
        key = f"PRIMARY KEY ({'store, ' if shared else ''}"
        held = "key bigint, b bigint NOT NULL, generation bigint NOT NULL, until bigint NOT NULL, body bytea NOT NULL"
        yield f"CREATE UNLOGGED TABLE lease ({whose}{held}, {key}key)) WITH (fillfactor = 50)"
        yield f"CREATE TABLE object ({whose}name text, part bigint, made bigint, data bytea, {key}name, part))"
        yield "ALTER TABLE object ALTER COLUMN data SET STORAGE EXTERNAL"
        yield f"CREATE SEQUENCE handle INCREMENT BY {HANDLES}"
        yield "ALTER TABLE branch SET (fillfactor = 50)"  # the row that every commit changes stays on its page
        for table, column in _COMPRESSED:
            yield f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL"
        for table in (*TABLES, *_OWN) if shared else ():
            yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY"
            yield f"CREATE POLICY own ON {table} USING (store = {OWNER})"
        yield f"COMMENT ON TABLE store IS 'holdfast {'shared' if shared else 'store'}, format {FORMAT_VERSION}'"

    def check_schema(self) -> None:
        """Raise unless the tables are exactly those of the format."""
        sql = "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = ?"
        found = {row for row in self.run(sql, (self.schema,)) if row[0] not in _OWN and row[2] != "uuid"}
        if found != columns_of("postgres"):
            raise Damaged(f"{self.place}: its tables are not those of the format", what=("schema",))

    def sizes(self) -> dict[str, int]:
        sql = (
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c JOIN pg_namespace s"
            " ON s.oid = c.relnamespace WHERE s.nspname = ? AND c.relkind = 'r'"
            " AND c.relname <> 'object'"  # packs are counted by themselves
        )
        return {"catalog": self.run(sql, (self.schema,))[0][0], "log": 0, "free": 0}

    def check(self) -> list[str]:
        """What the server itself finds wrong when it reads everything."""
        found = []
        for table in TABLES.values():
            read = [f"count(md5({column.name}))" for column in table.columns if column.kind != "int"]
            try:
                self.run(f"SELECT count(*), {', '.join(read or ['0'])} FROM {table.name}")
            except Damaged as error:
                found.append(f"table {table.name}: {error.message}")
        return found

    def reclaim(self, *, log: bool) -> bool:  # noqa: ARG002
        """The server tidies up by itself."""
        return False

    # -- its end, and forks ---------------------------------------------------------------------------------

    def rest(self, deadline: float) -> bool:  # noqa: ARG002
        """Before a fork: nothing has to rest, because the child uses nothing of what it inherits."""
        return True

    def resume(self) -> None:
        """Nothing rests."""

    def abandon(self, rested: bool) -> None:  # noqa: ARG002
        """After a fork, in the child: the sessions are the parent's, and so may be what holds the locks."""
        self._closed = True
        self._unmark()
        self._reading, self._writing, self._spare, self._tidy = [Seat()], [Seat()], [], []
        for one in self._links:
            if (link := one()) is not None:
                link.forget()

    def close(self) -> None:
        self._closed = True
        self._unmark()
        for seat in self._reading + self._writing:
            if seat.lock.acquire(timeout=CLOSE_S):
                seat.empty()
                seat.lock.release()
        for spare in (self._spare, self._tidy):
            while spare:
                spare.pop().close()


def _unsure(said: Said) -> Unsure:
    return Unsure(
        f"the connection broke while a change was being committed ({said.text}): it may be there or not",
        hint="Look at what is there before you do it again.",
    )


def _known(said: Said, doing: str) -> HoldfastError:
    """The error that tells what the server's words mean for a store."""
    state, text = said.state, f"{doing}: {said.text}"
    if state.startswith("23"):
        return Refused(f"{text}; nothing was written")
    if state == _WAS_MOVED:
        return ReadOnly(
            f"{doing}: the store was moved meanwhile; nothing was written", hint="Open it again: it says where to."
        )
    if state in {"40001", "40P01", "55P03", "57014"}:
        return StoreBusy(f"{text}; nothing was written", hint="Somebody else is writing. Try again.")
    if state == "53100":
        return DiskFull(f"{text}; nothing was changed", hint="Free some room on the server, then try again.")
    if state in {"25006", "42501"}:
        return StoreReadOnly(f"{text}; nothing was written", hint="Open it with readonly=True, or as another user.")
    if state in {"XX001", "XX002"}:
        return Damaged(f"{doing}: the database is damaged ({said.text})", what=("database",), hint=HINT)
    return StoreFailed(f"{text}; nothing was changed", hint="" if state else "See that the server runs.")
