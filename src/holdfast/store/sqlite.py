"""SQLite through apsw: how a connection is opened, and what its errors mean.

Owns the settings that make SQLite keep its promises, and the one place where its errors become ours.
Knows no table. Always true: a connection made here flushes at every commit, trusts nothing that a schema says, maps no
file into memory, and neither checkpoints nor removes the write-ahead log when it is closed.
"""

from __future__ import annotations

import ctypes
import errno
import urllib.parse
from pathlib import Path

import apsw

from holdfast.errors import Damaged, DiskFull, HoldfastError, StoreBusy, StoreFailed, StorePoisoned, StoreReadOnly
from holdfast.store.catalog import HINT

ENGINE_WAIT_MS = 5_000
"""SQLite's own patience. Writers queue elsewhere, so it only bridges moments like the recovery of a log."""

CACHE_KIB = 8_192
"""Page cache of one connection: holds the inner pages of a catalog of several gigabytes."""

_FLUSH_FAILED = {apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC, apsw.SQLITE_IOERR_CLOSE}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}


def connect(path: Path, *, readonly: bool, immutable: bool = False, vfs: str | None = None) -> apsw.Connection:
    """Open a catalog that exists. ``immutable`` is for a file system that nobody can write to."""
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
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, UnicodeDecodeError)):
        return Damaged(
            f"{doing}: the database is damaged ({error})",
            what=("store.db",),
            hint=HINT,
        )
    if isinstance(error, apsw.FullError):
        return DiskFull(f"{doing}: no room on the disk; nothing was changed", hint="Free some room, then try again.")
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return StoreBusy(f"{doing}: the database stayed locked ({error})")
    return StoreFailed(f"{doing}: {error}")


def writing_error(error: Exception, connection: apsw.Connection, doing: str) -> HoldfastError:
    """What a failure means inside a transaction that writes."""
    reason = connection.system_errno
    extended = getattr(error, "extendedresult", 0)
    if isinstance(error, apsw.IOError) and extended not in _FLUSH_FAILED and reason in _NO_ROOM:
        error = apsw.FullError(str(error))
    refused = isinstance(error, (apsw.IOError, apsw.CantOpenError)) and reason in _NO_WRITING
    if isinstance(error, apsw.ReadOnlyError) or (refused and extended not in _FLUSH_FAILED):
        return StoreReadOnly(f"{doing}: the store cannot be written ({error})")
    if isinstance(error, apsw.IOError):
        return StorePoisoned(
            f"{doing}: the disk failed ({error}); what it holds of the last change is unknown",
            hint="Everything acknowledged before is safe. Close the store and open it again to go on from there.",
        )
    return reading_error(error, doing)
