"""SQLite behind ``Engine``: connections, the two ways to commit, snapshots, and the write-ahead log.

Owns the files ``store.db``, its log, and the locks ``queue`` and ``moments``. Knows no table but for handles. What
always holds: a commit that returns was flushed, and its log was still the one that the path names; a connection trusts
nothing that a schema says, maps no file into memory, and leaves the log alone when it is closed; no Python code runs
inside the direct path, so no signal handler can cut it in two.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import apsw

from holdfast.errors import (
    BadOption,
    Damaged,
    DiskFull,
    HoldfastError,
    StoreBusy,
    StoreClosed,
    StoreFailed,
    StorePoisoned,
    StoreReadOnly,
)
from holdfast.store.cipher import HINT
from holdfast.store.engine import Args, Refused, Row, Shared, Tx, check_poison
from holdfast.store.files import Layout, birth_ns, close_quietly, unavailable
from holdfast.store.tables import HANDLES, NUMBER_MAX, Dialect, check_version, columns_of
from holdfast.store.writer import Bell

ENGINE_WAIT_MS = 5_000
"""SQLite's own patience. Writers queue elsewhere, so it only bridges moments like the recovery of a log."""

CACHE_KIB = 8_192
"""Page cache of one connection: holds the inner pages of a catalog of several gigabytes."""

FRAME_BYTES = 4_096 + 24
FOLD_FRAMES = 1_000
"""Frames in the log from which on it is folded into the database. Larger costs readers, smaller costs flushes."""

EXTEND_BYTES = 2**20
"""The log is made longer by zeros in steps, ahead of need: writing over blocks that exist flushes faster."""

EXTEND_ROOM_BYTES = 64 * 2**20
"""Where less is free, the last room of a disk is left to what has to be written."""

BETWEEN_S = 0.5
"""How long the thread that folds the log waits for a direct commit to end before it lets everything go and begins anew:
in the middle of one a signal handler may do what waits for this thread."""

MOMENT_LOG_BYTES = 2**30
"""A log that a moment keeps from being folded may grow to this; then the moment ends with an error."""

TRIM_PAGES = 256
"""Free pages that are given back at a time: others wait for milliseconds."""

DIRECT_FRAMES = 4
"""About what a direct commit writes. SQLite's own hook would run Python inside it."""

DIRECT_TRIES_S = 0.05
"""After the direct path met other writers, so long everything is handed over."""

_FLUSH_FAILED = {apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC, apsw.SQLITE_IOERR_CLOSE}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}

_GONE = (
    "Put the directory back and open the store again; or, as the state is still in memory, save it elsewhere: "
    "holdfast.open(ELSEWHERE).agent(NAME).state = agent.state, and checkpoint() there."
)
_LOCK = "hhqqi4x"
_ASK = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
_FREE = fcntl.F_UNLCK.to_bytes(2, sys.byteorder)

T = TypeVar("T")


def connect(path: Path, *, readonly: bool, immutable: bool = False, vfs: str | None = None) -> apsw.Connection:
    """Open a database that exists. ``immutable`` is for a file system that nobody can write to."""
    uri = f"file:{urllib.parse.quote(str(path))}" + ("?immutable=1" if immutable else "")
    access = apsw.SQLITE_OPEN_READONLY if readonly else apsw.SQLITE_OPEN_READWRITE
    connection = apsw.Connection(uri, flags=access | apsw.SQLITE_OPEN_URI, vfs=vfs)
    try:
        settle(connection, readonly=readonly)
    except BaseException:
        connection.close(True)
        raise
    return connection


def settle(connection: apsw.Connection, *, readonly: bool) -> None:
    """Apply the settings that every connection has."""
    connection.set_busy_timeout(ENGINE_WAIT_MS)
    for option, value in (
        (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),
        (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
        (apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0),
        (apsw.SQLITE_DBCONFIG_ENABLE_VIEW, 0),
        # Closing must leave the log alone: after fork, a child's close would act on its parent's files.
        (apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1),
    ):
        connection.config(option, value)
    keep = ctypes.c_int(1)
    connection.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(keep))
    # Some of these answer with a row, and only fetching it goes on to the next statement.
    connection.execute(
        "PRAGMA mmap_size=0; PRAGMA cell_size_check=ON; PRAGMA trusted_schema=OFF; PRAGMA temp_store=MEMORY;"
        f"PRAGMA cache_size=-{CACHE_KIB}; PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint=0;"
        f"PRAGMA query_only={'ON' if readonly else 'OFF'}"
    ).fetchall()


def reading_error(error: Exception, doing: str) -> HoldfastError:
    """What a failure means while nothing is being written."""
    # Statements are always the same: one that makes no sense to SQLite has met another schema.
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, UnicodeDecodeError)):
        return Damaged(f"{doing}: the database is damaged ({error})", what=("store.db",), hint=HINT)
    no_index = getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE  # store.db-shm is made, or gets longer
    if isinstance(error, apsw.FullError) or no_index:
        return DiskFull(f"{doing}: no room on the disk; nothing was changed", hint="Free some room, then try again.")
    # A protocol error: whoever writes was stopped just as he told the others where the log ends.
    if isinstance(error, (apsw.BusyError, apsw.LockedError, apsw.ProtocolError)):
        hint = "Look for a stopped or hanging process that has this store open, then try again."
        return StoreBusy(f"{doing}: the database stayed locked ({error})", hint=hint)
    return StoreFailed(f"{doing}: {error}")


def writing_error(error: Exception, connection: apsw.Connection, doing: str) -> HoldfastError:
    """What a failure means inside a transaction that writes."""
    if isinstance(error, apsw.ConstraintError):
        return Refused(f"{doing}: {error}; nothing was written")
    if isinstance(error, (apsw.ConnectionClosedError, apsw.CursorClosedError)):  # by a signal handler
        return StoreClosed(f"{doing}: the store was closed in the middle of it; nothing was written")
    reason = connection.system_errno
    extended = getattr(error, "extendedresult", 0)
    if isinstance(error, apsw.IOError) and extended not in _FLUSH_FAILED and reason in _NO_ROOM:
        error = apsw.FullError(str(error))
    refused = isinstance(error, (apsw.IOError, apsw.CantOpenError)) and reason in _NO_WRITING
    if isinstance(error, apsw.ReadOnlyError) or (refused and extended not in _FLUSH_FAILED):
        return StoreReadOnly(f"{doing}: the store cannot be written ({error})")
    if extended == apsw.SQLITE_IOERR_SHORT_READ:
        return StorePoisoned(
            f"{doing}: store.db or its log is shorter than it was: somebody has cut it off, or written another over it",
            hint="Close the store, and see with `holdfast verify` what is there. The state is still in memory.",
        )
    if isinstance(error, apsw.IOError):
        return StorePoisoned(
            f"{doing}: the disk failed ({error}); what it holds of the last change is unknown",
            hint="Everything acknowledged before is safe. Close the store and open it again to resume from there.",
        )
    return reading_error(error, doing)


def newest_handle(execute: Callable[..., apsw.Cursor], *tables: str) -> int:
    """The largest handle that was ever given in tables that share their numbers."""
    column = HANDLES[tables[0]]
    parts = [f"(SELECT coalesce(max({column}), 0) FROM {table})" for table in tables]
    parts.append(f"(SELECT coalesce(max(number), 0) FROM floor WHERE name = '{tables[0]}')")
    newest = int(execute(f"SELECT max({', '.join(parts)})").get)
    if newest >= NUMBER_MAX:
        raise Damaged(f"table {tables[0]}: it holds an impossible number", what=(f"table {tables[0]}",), hint=HINT)
    return newest


class SqliteTx:
    """Statements of one connection: a transaction, or a moment."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._execute = connection.cursor().execute
        self._newest: dict[str, int] = {}

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        return self._execute(sql, args).fetchall()

    def do(self, sql: str, args: Args = ()) -> None:
        self._execute(sql, args)

    def many(self, sql: str, args: Sequence[Args]) -> None:
        self._connection.executemany(sql, args)

    def number(self, *tables: str) -> int:
        known = self._newest.get(tables[0])
        if known is None:
            known = newest_handle(self._execute, *tables)
        self._newest[tables[0]] = known + 1
        return known + 1

    def naming(self) -> None:
        """Nobody else writes while this transaction does."""

    def alone(self, name: bytes) -> None:
        """As above."""

    def clock(self) -> int:
        return time.time_ns() // 1000

    def erasing(self) -> None:
        self._connection.execute("PRAGMA secure_delete=ON").fetchall()


class _Moment:
    """One snapshot. Reading from it raises when the log has grown too long because of it."""

    def __init__(self, connection: apsw.Connection, layout: Layout) -> None:
        self._execute = connection.cursor().execute
        self._layout = layout
        self.lock = threading.Lock()  # while it reads: a fork waits

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        if self._layout.log_bytes() > MOMENT_LOG_BYTES:
            raise StoreBusy(
                "so much was written while this was reading that it has to begin again",
                hint="Try again when less is being written.",
            )
        with self.lock:
            try:
                return self._execute(sql, args).fetchall()
            except (apsw.Error, UnicodeDecodeError) as error:
                raise reading_error(error, "reading") from error


class Sqlite:
    """The engine of a store in a directory."""

    dialect: Dialect = "sqlite"
    writers = 1

    def __init__(self, layout: Layout, *, readonly: bool = False, vfs: str | None = None) -> None:
        self.place = str(layout.path)
        self.layout = layout
        self.busy = False
        self.poison: StorePoisoned | None = None
        self._vfs = vfs
        self._readonly = readonly
        self._reading = threading.RLock()
        self._moments: list[_Moment] = []
        self._rested: list[Any] = []
        self._spare: list[apsw.Connection] = []
        self._connections: list[apsw.Connection] = []
        self._locks: set[int] = set()  # open lock files: a forked child closes them
        self._directing = threading.Lock()
        self._folding = threading.Lock()
        self._closed = False
        self._present = _be_present(layout, readonly=readonly)
        try:
            self._open(layout, readonly=readonly)
        except BaseException:
            self._let_go()
            raise

    def _open(self, layout: Layout, *, readonly: bool) -> None:
        self._reader = self._connect(readonly=True)
        self._catalog_path, self._log_path = str(layout.catalog), str(layout.wal)
        self._catalog = _look(self._catalog_path)  # device and inode
        self._log: tuple[int, int] | None = None  # of the log that our connections have open
        if readonly:
            return
        before = _look(self._log_path)
        self._writer = self._connect(readonly=False)
        self._direct = self._connect(readonly=False)
        self._log = _look(self._log_path)  # before the first commit: whoever replaces it later puts that elsewhere
        if before not in {None, self._log}:
            raise _gone(self._log_path)
        self._direct.set_busy_timeout(0)
        self._direct_execute = self._direct.cursor().execute
        self._not_before = 0.0
        self._queue_fd, folding = _open_lock(layout.queue_lock), _open_lock(layout.queue_lock)
        self._locks |= {self._queue_fd, folding}
        self._frames = 0
        self._log_bytes = layout.log_bytes()
        self._writer.set_wal_hook(self._committed)
        self._wanted = Bell()  # an interrupt in the middle of an event's would leave it locked, and COMMIT waits for it
        self._stop = False
        fold = (self._connect(readonly=False), folding)
        self._folder = threading.Thread(target=self._fold_when_wanted, args=fold, name="holdfast-fold", daemon=True)
        self._folder.start()

    def _connect(self, *, readonly: bool) -> apsw.Connection:
        try:
            made = connect(self.layout.catalog, readonly=readonly, vfs=self._vfs)
            made.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except apsw.CantOpenError as error:
            # Without a log and without the right to make one, the database file alone is all there is.
            if os.access(self.layout.path, os.W_OK):
                raise reading_error(error, "opening the catalog") from error
            if self.layout.log_bytes():
                raise StoreFailed(
                    f"opening the catalog: {self.layout.path} cannot be written, and what its log holds cannot be read"
                    " without making store.db-shm beside it",
                    hint="Nothing is lost. Copy the whole directory to where you can write, and read that.",
                ) from error
            if not readonly:
                raise StoreReadOnly(f"opening the catalog: {self.layout.path} cannot be written") from error
            made = connect(self.layout.catalog, readonly=True, immutable=True, vfs=self._vfs)
        except apsw.Error as error:
            raise reading_error(error, "opening the catalog") from error
        self._connections.append(made)
        return made

    # -- reading --------------------------------------------------------------------------------------------

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        with self._reading:
            try:
                return self._reader.execute(sql, args).fetchall()
            except (apsw.Error, UnicodeDecodeError) as error:
                raise reading_error(error, "reading") from error

    def stamp(self) -> int | None:
        return int(self.run("PRAGMA data_version")[0][0])

    @contextmanager
    def moment(self) -> Iterator[_Moment]:
        with self._reading:  # a fork waits
            connection = self._spare.pop() if self._spare else self._connect(readonly=True)
        moment = _Moment(connection, self.layout)
        self._moments.append(moment)
        try:
            with self._holding():
                moment.run("BEGIN; SELECT count(*) FROM store")
                yield moment
        finally:
            with moment.lock, suppress(apsw.Error):
                connection.execute("ROLLBACK")
            self._moments.remove(moment)
            self._spare.append(connection)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """While this is held, no pack is deleted. A place that cannot be written has nobody who deletes."""
        fd = -1
        if not self._readonly or os.access(self.layout.moments_lock, os.R_OK):
            try:
                fd = os.open(self.layout.moments_lock, os.O_RDONLY | os.O_CLOEXEC)
                self._locks.add(fd)
                fcntl.flock(fd, fcntl.LOCK_SH)
            except OSError as error:
                raise unavailable(error, "opening locks/moments") from error
        try:
            yield
        finally:
            if fd in self._locks:
                self._locks.discard(fd)
                close_quietly(fd)

    @contextmanager
    def sweeping(self) -> Iterator[bool]:
        fd = _open_lock(self.layout.moments_lock)
        self._locks.add(fd)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            if fd in self._locks:
                self._locks.discard(fd)
                close_quietly(fd)

    # -- writing --------------------------------------------------------------------------------------------

    @staticmethod
    @lru_cache(64)
    def _batch(statements: tuple[str, ...]) -> str:
        made = [text.replace("INSERT ", "INSERT OR ROLLBACK ", 1) for text in statements]
        made = [text.replace("UPDATE ", "UPDATE OR ROLLBACK ", 1) if text[0] == "U" else text for text in made]
        return "; ".join(["BEGIN IMMEDIATE", *made, "COMMIT"])

    def clock(self) -> int:
        return time.time_ns() // 1000

    def acknowledge(self, moved: Mapping[int, tuple[int, int]]) -> None:
        """The witness says as much."""

    def handles(self) -> None:
        """One writer at a time: the next number is free, and another process may take it first."""

    def direct(self, statements: Sequence[str], args: Sequence[Args]) -> bool:
        if self.busy or self._directing.locked() or time.monotonic() < self._not_before:
            return False
        if fcntl.fcntl(self._queue_fd, fcntl.F_OFD_GETLK, _ASK)[:2] != _FREE:
            return False
        with self._directing:  # entering it is one step, which nothing can cut; who folds the log has it for a moment
            self.check_place()
            try:
                self._direct_execute(self._batch(tuple(statements)), tuple(chain.from_iterable(args)))
            except (apsw.ConstraintError, apsw.BusyError, apsw.ProtocolError):
                self._not_before = time.monotonic() + DIRECT_TRIES_S
                return False  # the writer finds out which comparison does not hold
            except apsw.Error as error:
                failed = self._failed(error, self._direct)
                with suppress(apsw.Error):  # what was written is not there unless COMMIT said so
                    if self._direct.in_transaction:
                        self._direct.execute("ROLLBACK")
                raise failed from error
            self._check_log()
        self._frames += DIRECT_FRAMES
        self._look_at_log()
        return True

    def transaction(self, work: Callable[[Tx], T], begun: Callable[[], None] | None = None) -> T:
        check_poison(self)
        connection = self._writer
        _queue(self._queue_fd, fcntl.F_WRLCK)
        try:
            if begun is not None:
                begun()
            connection.execute("BEGIN IMMEDIATE")
            result = work(SqliteTx(connection))
            self.check_place()
            connection.execute("COMMIT")
            self._check_log()
            return result
        except apsw.Error as error:
            raise self._failed(error, connection) from error
        finally:
            if connection.in_transaction:
                with suppress(apsw.Error):  # what was written is not there unless COMMIT said so
                    connection.execute("ROLLBACK")
            _queue(self._queue_fd, fcntl.F_UNLCK)

    def _failed(self, error: Exception, connection: apsw.Connection) -> HoldfastError:
        known = writing_error(error, connection, "writing")
        if isinstance(known, StorePoisoned):
            self.poisoned(known)
        return known

    def poisoned(self, error: StorePoisoned) -> None:
        """Nothing is written any more."""
        self.poison = error

    def share(self, *, later: bool) -> Shared:  # noqa: ARG002 - whoever asks
        raise BadOption(
            f"{self.place} is a store on SQLite, which has no transaction to share: a commit of two of its files is not"
            " one commit after a power cut",
            hint='Use a store on PostgreSQL, or effect="write" with a probe.',
        )

    def identity(self) -> bytes:
        if self._catalog is None:
            return b""
        return f"{self._catalog[1]}/{birth_ns(self._catalog_path)}".encode()

    def is_born_as(self, known: bytes) -> bool:
        """Whether it is the file of that identity as far as that can be told: when one was made is not always known."""
        (inode, *born), (mine, at) = known.split(b"/"), self.identity().split(b"/")
        return inode == mine and (b"0" in {*born, at} or not born)

    def check_place(self) -> None:
        """Before a commit: what is written now can be found at the path again.

        A file takes commits as long as it is open, also one that was deleted or moved away.
        """
        check_poison(self)
        if _look(self._catalog_path) != self._catalog:
            raise _gone(self._catalog_path)
        if self._log is not None and _look(self._log_path) != self._log:
            raise _gone(self._log_path)

    def _check_log(self) -> None:
        """After a commit: the log that was just flushed is the one that the path names."""
        there = _look(self._log_path)
        if self._log is None:
            self._log = there
        if there is None or there != self._log:
            self.poison = StorePoisoned(
                f"{self.layout.wal} was removed or replaced while the store was open",
                hint="The last change may be lost. Close the store and open it again to see what is there.",
            )
            raise self.poison

    # -- the log --------------------------------------------------------------------------------------------

    def _committed(self, _connection: apsw.Connection, _name: str, frames: int) -> int:
        """SQLite's hook, in the writer's thread."""
        self._frames = frames
        self._look_at_log()
        return apsw.SQLITE_OK

    def _look_at_log(self) -> None:
        """Whether it is time to fold the log, or to make it longer before that is needed."""
        if self._frames >= FOLD_FRAMES or self._is_short():
            self._wanted.ring()

    def _is_short(self) -> bool:
        used = self._frames * FRAME_BYTES
        return self._log_bytes < min(used + EXTEND_BYTES // 2, FOLD_FRAMES * FRAME_BYTES)

    def _fold_when_wanted(self, connection: apsw.Connection, fd: int) -> None:
        """In a thread of its own, off the path of commits."""
        while True:
            self._wanted.wait()
            while not self._folding.acquire(timeout=0.05):  # who rests has it, and may be about to stop this thread
                if self._stop:
                    return
            try:
                if self._stop:
                    return
                with suppress(apsw.Error, OSError, HoldfastError):  # tried again later
                    if self._frames >= FOLD_FRAMES:
                        self._fold(connection, fd)
                    if self._frames:  # otherwise it was emptied on purpose, and stays so until somebody commits
                        self._extend(connection)
            finally:
                self._folding.release()

    def _fold(self, connection: apsw.Connection, fd: int) -> None:
        before = 0
        for _ in range(8):  # most of it while others write
            _, folded = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            if folded - before <= 64:
                break
            before = folded
        # Nobody else queues now, and no direct commit is half done: after this the next one begins the log anew. One
        # that had looked at the log before, and were written behind its end after, would let it grow on and on.
        with self._between():
            _queue(fd, fcntl.F_WRLCK)
            try:
                frames, folded = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            finally:
                _queue(fd, fcntl.F_UNLCK)
        # One that a reader keeps from being folded is looked at again when it has grown by as much.
        self._frames = max(0, frames - folded)

    def _extend(self, connection: apsw.Connection) -> None:
        """Put zeros behind the log's end. Only with SQLite's own lock: a direct commit does not queue.

        They are flushed without it, so that nobody waits for that.
        """
        size = self._log_bytes = self.layout.log_bytes()
        room = os.statvfs(self.layout.path)
        if self._is_short() and room.f_bavail * room.f_frsize >= EXTEND_ROOM_BYTES:
            zeros = bytes(EXTEND_BYTES)
            fd = os.open(self.layout.wal, os.O_WRONLY | os.O_CLOEXEC)
            try:
                if _look(fd) != self._log:  # that of a store which was put there: its writers do not heed our lock
                    raise _gone(self._log_path)
                with self._between():  # a direct commit would take our own lock for that of somebody else
                    connection.execute("BEGIN IMMEDIATE")
                    try:
                        size = os.fstat(fd).st_size  # not that of the path: the directory may have been moved by now
                        size += os.pwrite(fd, zeros, size)
                    finally:
                        connection.execute("ROLLBACK")
                os.fdatasync(fd)
            finally:
                os.close(fd)
        self._log_bytes = size

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Inside, no direct commit of this process is half done. Raises where one does not end: tried again later."""
        if not self._directing.acquire(timeout=BETWEEN_S):
            self._wanted.ring()
            raise StoreBusy("a direct commit is half done")
        try:
            yield
        finally:
            self._directing.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else has the store open, or can open it, until the end, even if it is closed before. Or raises."""
        fd = os.dup(self._present.fileno()) if self._present is not None else _open_lock(self.layout.open_lock)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreBusy(
                    f"{self.place} is open elsewhere; nothing was changed", hint="Close it everywhere, then try again."
                ) from None
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_SH)
            close_quietly(fd)

    # -- the whole file -------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        pages, free, page = (self.run(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count", "page_size"))
        return {"catalog": pages * page, "log": self.layout.log_bytes(), "free": free * page}

    def check(self) -> list[str]:
        """What SQLite itself finds wrong."""
        try:
            with self.moment() as moment:
                found = [str(row[0]) for row in moment.run("PRAGMA integrity_check(100)")]
        except Damaged as error:
            return [error.message]
        return [] if found == ["ok"] else found

    def check_version(self) -> None:
        """Raise unless the header says that this program knows the format."""
        check_version(self.place, int(self.run("PRAGMA user_version")[0][0]))

    def check_schema(self) -> None:
        """Raise unless the tables are exactly those of the format."""
        found = set()
        for (table,) in self.run("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"):
            found |= {(table, str(row[1]), str(row[2])) for row in self.run(f'PRAGMA table_info("{table}")')}
        other = self.run("SELECT count(*) FROM sqlite_schema WHERE type NOT IN ('table', 'index')")[0][0]
        if found != columns_of("sqlite") or other:
            raise Damaged(f"{self.layout.catalog}: its tables are not those of the format", what=("store.db schema",))

    def reclaim(self, *, log: bool) -> bool:
        """Free pages, a few at a time; then the log, which costs the next commits a little."""
        with self._folding:  # or the log would be kept because our own thread is making it longer just now
            _queue(self._queue_fd, fcntl.F_WRLCK)
            try:
                if (more := self._trim()) or not log:
                    return more
                self._writer.set_busy_timeout(0)
                with suppress(apsw.BusyError):  # somebody reads what it holds: it is folded later
                    self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                    self._frames = self._log_bytes = 0
                return False
            except apsw.Error as error:
                raise self._failed(error, self._writer) from error
            finally:
                self._writer.set_busy_timeout(ENGINE_WAIT_MS)
                _queue(self._queue_fd, fcntl.F_UNLCK)

    # -- its end, and forks ---------------------------------------------------------------------------------

    def rest(self, deadline: float) -> bool:
        """Before a fork: whether nothing is going on in any connection, which stays so until ``resume``."""
        locks: list[Any] = [self._reading, *(moment.lock for moment in list(self._moments))]
        if not self._readonly:
            locks += [self._folding, self._directing]  # in the order in which our own thread takes them
        for lock in locks:
            if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            self._rested.append(lock)
        return True

    def resume(self) -> None:
        while self._rested:
            self._rested.pop().release()

    def release(self) -> None:
        """Between ``rest`` and ``resume``: have no file open any more, until ``reopen``."""
        if self._moments:
            raise StoreBusy(f"{self.place} is being read as it was at one moment", hint="Try again when that is done.")
        if not self._readonly:
            self._stop = True
            self._wanted.ring()
            self._folder.join()
        self._let_go()
        self._connections.clear()
        self._spare.clear()

    def reopen(self) -> None:
        """After ``release``, in the same process, or in one that is a copy of it: the store may have gone on since."""
        known = self._catalog
        self._present = _be_present(self.layout, readonly=self._readonly)
        self._open(self.layout, readonly=self._readonly)
        if self._catalog != known:
            raise _gone(self._catalog_path)

    def abandon(self, rested: bool) -> None:
        """After a fork, in the child: nothing of this may be touched, and locks are the parent's."""
        from holdfast.store import processes

        processes.remember(self.layout.catalog, self._connections if rested else None)
        self._closed = True
        self._close_locks()

    def close(self) -> None:
        """Cut short anywhere, it can be done again."""
        if self._closed:
            return
        if not self._readonly:
            self._stop = True
            self._wanted.ring()
            self._folder.join()
            if self.poison is None and self._queue_fd in self._locks:
                self._empty_log()
        with self._reading:
            self._let_go()
        self._closed = True

    def _let_go(self) -> None:
        for connection in self._connections:
            connection.close(True)
        self._close_locks()

    def _close_locks(self) -> None:
        while self._locks:
            close_quietly(self._locks.pop())
        if self._present is not None:
            self._present.close()

    def _empty_log(self) -> None:
        """Leave a short log behind, and few free pages, where that can be had without waiting."""
        with suppress(apsw.Error, OSError):
            fcntl.fcntl(self._queue_fd, fcntl.F_OFD_SETLK, struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            self._writer.set_busy_timeout(0)
            self._trim()
            self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def _trim(self) -> bool:
        """Give some free pages back to the disk; whether there are more."""
        free = int(self._writer.execute("PRAGMA freelist_count").get)
        if free:
            self._writer.execute(f"PRAGMA incremental_vacuum({TRIM_PAGES})").fetchall()
        return free > TRIM_PAGES


def _look(path: str | int) -> tuple[int, int] | None:
    """Which file is there. With stat only: opening and closing it would drop SQLite's locks on it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _gone(path: str) -> StoreFailed:
    what = "is another file than the one that was opened" if _look(path) else "is not there any more"
    return StoreFailed(f"{path} {what}: the store was deleted, moved or replaced; nothing was written", hint=_GONE)


class _Presence(FileIO):
    """The lock of an open store, which is free when nobody has it any more."""

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


def _be_present(layout: Layout, *, readonly: bool) -> _Presence | None:
    """Let others see that the store is open. A place that cannot be written has nobody who would move it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if readonly else os.O_CREAT)
    try:
        file = _Presence(layout.open_lock, opener=lambda path, _: os.open(path, flags, 0o644))
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        raise StoreBusy(f"{layout.path} is just being moved", hint="Try again when that is done.") from None
    except OSError as error:
        if readonly:
            return None
        raise unavailable(error, "opening locks/open") from error


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise unavailable(error, f"opening locks/{path.name}") from error


def _queue(fd: int, kind: int) -> None:
    """The queue before ``BEGIN``. A lock of the open file: the direct path can ask about it without taking it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack(_LOCK, kind, os.SEEK_SET, 0, 1, 0))
