"""SQLite's calls to the disk, through a VFS of ours, and its statements, each of which counts as a call.

What a statement finds in SQLite's cache today, it has to read tomorrow. Refusals are told as SQLite hears of them.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import apsw

from tests.faults.calls import Call, Made, ShortWrite

SYSTEM = "unix"  # SQLite's own VFS, by name: while ours is registered it is the default

# What SQLite makes of a failure of each of its calls.
_SQLITE_CODES = {
    "write": apsw.SQLITE_IOERR_WRITE,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "read": apsw.SQLITE_IOERR_READ,
    "size": apsw.SQLITE_IOERR_FSTAT,
    "open": apsw.SQLITE_CANTOPEN,
    "unlink": apsw.SQLITE_IOERR_DELETE,
    "statement": apsw.SQLITE_IOERR_READ,
}


def statements(disk: Any, connection: apsw.Connection) -> None:
    """Of a database below the disk's root, each statement is a call."""

    def before(_cursor: Any, sql: str, _bindings: Any) -> bool:
        if disk.before is not None and not sql.startswith(("ROLLBACK", "RELEASE")):  # they need no disk
            with guarded(disk, Call("statement", sql, by_sqlite=True)):
                pass
        return True

    if connection.filename and disk.inside(connection.filename) is not None:
        connection.exec_trace = before


class Vfs(apsw.VFS):
    """SQLite's calls, with names and codes as SQLite has them. The default of the process while it is registered."""

    def __init__(self, disk: Any) -> None:
        self.disk = disk
        super().__init__("watched-disk", SYSTEM, makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802  SQLite's names, here and below
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        relative = self.disk.inside(path) if path else None
        if relative is None:
            return apsw.VFSFile(SYSTEM, name, flags)
        return File(self.disk, name, flags, relative)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        relative = self.disk.inside(filename)
        if relative is None:
            super().xDelete(filename, syncdir)
            return
        directory, name = self.disk._place(relative)
        with guarded(self.disk, Call("unlink", name, directory=directory, by_sqlite=True)):
            super().xDelete(filename, syncdir)
        if syncdir:
            with guarded(self.disk, Call("syncdir", relative, directory, by_sqlite=True)):
                pass

    def xGetLastError(self) -> tuple[int, str]:  # noqa: N802
        known = self.disk._last_errno
        return (known, os.strerror(known)) if known else super().xGetLastError()


class guarded(Made):  # noqa: N801  used like a function, as in ``with guarded(...)``
    """A refusal by ``before``, as SQLite hears of it."""

    __slots__ = ()

    def __enter__(self) -> None:
        try:
            super().__enter__()
        except ShortWrite:
            self.disk._last_errno = errno.ENOSPC
            raise
        except OSError as error:
            self.disk._last_errno = error.errno or 0
            raise _refusal(error.errno or 0, self.call.what) from None


def _refusal(code: int, what: str) -> apsw.Error:
    full = code in {errno.ENOSPC, errno.EDQUOT} and what in {"write", "statement"}
    refused = apsw.FullError("injected") if full else apsw.IOError("injected")
    refused.extendedresult = apsw.SQLITE_FULL if full else _SQLITE_CODES.get(what, apsw.SQLITE_IOERR)
    refused.result = refused.extendedresult & 0xFF
    return refused


class File(apsw.VFSFile):
    """One file of a database."""

    def __init__(self, disk: Any, name: Any, flags: list[int], relative: str) -> None:
        self.disk = disk
        self.relative = relative
        directory, base = disk._place(relative)
        self.directory = directory
        log_or_journal = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
        # SQLite's own VFS flushes the directory with the first flush of a log or journal that it may have made.
        self.sync_directory = bool(flags[0] & log_or_journal and flags[0] & apsw.SQLITE_OPEN_CREATE)
        new = disk.recording and disk._number(relative) < 0 and bool(flags[0] & apsw.SQLITE_OPEN_CREATE)
        with guarded(disk, Call("create" if new else "open", base, directory=directory, by_sqlite=True)):
            super().__init__(SYSTEM, name, flags)
        self.number = disk._number(relative)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        call = Call("write", self.relative, self.number, offset=offset, data=bytes(data), by_sqlite=True)
        try:
            with guarded(self.disk, call):
                super().xWrite(data, offset)
        except ShortWrite:  # SQLite goes on writing until all of it is written, or, as here, the disk is full
            call.data = bytes(data[: max(1, len(data) // 2)])
            with self.disk._lock:
                super().xWrite(call.data, offset)
                self.disk.note(call)
            raise _refusal(errno.ENOSPC, "write") from None

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        with guarded(self.disk, Call("truncate", self.relative, self.number, offset=newsize, by_sqlite=True)):
            super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        with guarded(self.disk, Call("sync", self.relative, self.number, by_sqlite=True)):
            super().xSync(flags)
        if self.sync_directory:
            self.sync_directory = False
            with guarded(self.disk, Call("syncdir", self.relative, self.directory, by_sqlite=True)):
                pass

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        with guarded(self.disk, Call("read", self.relative, self.number, offset=offset, by_sqlite=True)):
            return super().xRead(amount, offset)

    def xFileSize(self) -> int:  # noqa: N802
        with guarded(self.disk, Call("size", self.relative, self.number, by_sqlite=True)):
            return super().xFileSize()
