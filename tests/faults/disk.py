"""Every call that this process makes to the disk below one directory, seen, recorded, and made to fail on demand.

``Disk`` stands between Holdfast and the system: SQLite goes through a VFS of ours, everything else through the ``os``
module. It knows nothing of stores. What always holds: a call is recorded in the order in which it happened, with all
that a replay needs (tests/faults/replay.py); a call that was made to fail did not happen.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

import holdfast

HOLDFAST = str(Path(holdfast.__file__).parent) + os.sep
ROOT_DIRECTORY = 0
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
}


@dataclass(slots=True)
class Call:
    """One call. ``file`` and ``directory`` are numbers of inodes; what else is set depends on ``what``."""

    what: (
        str  # create, write, truncate, sync, mkdir, rename, unlink, rmdir, syncdir; ack, failed; or it changes nothing
    )
    name: str = ""
    file: int = -1
    directory: int = -1
    offset: int = 0
    data: bytes = b""
    new_name: str = ""
    site: str = ""
    by_sqlite: bool = False


Before = Callable[[Call], None]
ELSEWHERE = "elsewhere"
"""The site of a call that no line of Holdfast makes."""

CHANGES = frozenset(("create", "write", "truncate", "sync", "mkdir", "rename", "unlink", "rmdir", "syncdir"))


class ShortWrite(OSError):
    """Raised by a hook: the write is to take only a part of what it was given."""


@dataclass(slots=True)
class Tree:
    """Directories by number, and the next number that is free."""

    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT_DIRECTORY: {}})
    next: int = 1

    def number(self) -> int:
        self.next += 1
        return self.next - 1

    def find(self, parts: tuple[str, ...]) -> int | None:
        at = ROOT_DIRECTORY
        for part in parts:
            below = self.entries.get(at, {}).get(part)
            if below is None:
                return None
            at = below
        return at


class Disk:
    """The calls below ``root``. While ``watching()``, they are recorded, and ``before`` may refuse them.

    ``before(call)`` is called ahead of each one. An ``OSError`` that it raises is what the caller gets; a
    ``ShortWrite`` lets a write take half. ``recording=False`` keeps nothing, for campaigns that only fail calls.
    """

    def __init__(self, root: Path, *, recording: bool = True) -> None:
        self.root = Path(os.path.realpath(root))
        self.calls: list[Call] = []
        self.before: Before | None = None
        self.recording = recording
        self.contents: dict[int, bytes] = {}  # what files held before the recording began
        self._prefix = str(self.root) + os.sep
        self._tree = Tree()
        self._fds: dict[int, tuple[int, ...] | str] = {}
        self._lock = threading.RLock()
        self._last_errno = 0
        self._thread_busy = threading.local()
        if recording:
            self._adopt(self.root, ROOT_DIRECTORY)
        self.tree_before = {number: dict(names) for number, names in self._tree.entries.items()}

    def _adopt(self, path: Path, number: int) -> None:
        for entry in sorted(path.iterdir()):
            below = self._tree.entries[number][entry.name] = self._tree.number()
            if entry.is_dir():
                self._tree.entries[below] = {}
                self._adopt(entry, below)
            else:
                self.contents[below] = entry.read_bytes()

    def ack(self, what: str) -> None:
        """The program was told that something is safe."""
        with self._lock:
            self.calls.append(Call("ack", what))

    # Names and numbers

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to the root, or None when it is no concern of ours."""
        if isinstance(path, int):
            known = self._fds.get(path)
            return known if isinstance(known, str) else None
        text = os.fsdecode(path)
        if dir_fd is not None:
            base = self._fds.get(dir_fd)
            if not isinstance(base, str):
                return None
            return f"{base}/{text}" if base else text
        text = os.path.abspath(text)  # noqa: PTH100  resolving would ask the disk
        return text[len(self._prefix) :] if text.startswith(self._prefix) else "" if text == str(self.root) else None

    def _place(self, relative: str) -> tuple[int, str]:
        parts = tuple(relative.split("/"))
        directory = self._tree.find(parts[:-1])
        return (-1 if directory is None else directory), parts[-1]

    def _number(self, relative: str) -> int:
        found = self._tree.find(tuple(relative.split("/"))) if relative else ROOT_DIRECTORY
        return -1 if found is None else found

    # The one way of every call

    @contextmanager
    def call(self, call: Call) -> Iterator[None]:
        """Around a real call: ask first, then note that it happened."""
        with self._lock:
            if self.before is not None and not getattr(self._thread_busy, "on", False):
                call.site = site()
                self._thread_busy.on = True
                try:
                    self.before(call)
                except OSError:
                    if call.what == "sync" and self.recording:
                        self.calls.append(Call("failed", call.name, call.file))
                    raise
                finally:
                    self._thread_busy.on = False
            yield
            if self.recording and call.what in CHANGES:
                self._apply(call)
                self.calls.append(call)

    def _apply(self, call: Call) -> None:
        """Follow a change in the tree of names."""
        entries = self._tree.entries
        if call.what in {"create", "mkdir"}:
            call.file = self._tree.number()
            entries[call.directory][call.name] = call.file
            if call.what == "mkdir":
                entries[call.file] = {}
        elif call.what == "rename":
            call.file = entries[call.directory].pop(call.name)
            entries[call.directory][call.new_name] = call.file
        elif call.what in {"unlink", "rmdir"}:
            call.file = entries[call.directory].pop(call.name, -1)

    # The os module

    @contextmanager
    def watching(self) -> Iterator[Disk]:
        """Every call of this process below the root goes through here."""
        real = {name: getattr(os, name) for name in _OS_CALLS}
        real_open = io.open
        vfs = Vfs(self)
        try:
            for name in _OS_CALLS:
                setattr(os, name, self._wrapped(name, real[name]))
            io.open = builtins.open = self._wrapped_open(real_open)  # type: ignore[assignment]
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            io.open = builtins.open = real_open  # type: ignore[assignment]
            vfs.unregister()

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        handle = getattr(self, f"_os_{_OS_CALLS[name]}")

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return handle(real, *args, **kwargs)

        wrapper.__name__ = name
        return wrapper

    def _os_open(self, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative = self.inside(path, dir_fd)
        if relative is None:
            return int(real(path, flags, mode, dir_fd=dir_fd))
        directory, name = self._place(relative)
        new = bool(flags & os.O_CREAT) and self.recording and self._number(relative) < 0
        with self.call(Call("create" if new else "open", name, directory=directory)):
            fd = int(real(path, flags, mode, dir_fd=dir_fd))
        self._fds[fd] = relative
        if flags & os.O_TRUNC and not new:
            with self.call(Call("truncate", name, self._number(relative))):
                pass
        return fd

    def _os_close(self, real: Any, fd: int) -> None:
        if fd in self._fds:
            relative = self._fds.pop(fd)
            with self.call(Call("close", str(relative))):
                pass
        real(fd)

    def _os_write_at(self, real: Any, fd: int, data: Any, offset: int) -> int:
        relative = self.inside(fd)
        if relative is None:
            return int(real(fd, data, offset))
        whole = bytes(data)
        call = Call("write", relative, self._number(relative), offset=offset, data=whole)
        try:
            with self.call(call):
                call.data = whole[: int(real(fd, data, offset))]
        except ShortWrite:
            part = max(1, len(whole) // 2)
            with self._lock:
                call.data = whole[: int(real(fd, memoryview(data)[:part], offset))]
                if self.recording:
                    self.calls.append(call)
        return len(call.data)

    def _os_write(self, real: Any, fd: int, data: Any) -> int:
        if self.inside(fd) is None:
            return int(real(fd, data))
        at = os.lseek(fd, 0, os.SEEK_END if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND else os.SEEK_CUR)
        return self._os_write_at(lambda to, what, _offset: real(to, what), fd, data, at)

    def _os_truncate(self, real: Any, fd: Any, length: int) -> None:
        relative = self.inside(fd)
        if relative is None:
            real(fd, length)
            return
        with self.call(Call("truncate", relative, self._number(relative), offset=length)):
            real(fd, length)

    def _os_sync(self, real: Any, fd: int) -> None:
        relative = self.inside(fd)
        if relative is None:
            real(fd)
            return
        number = self._number(relative)
        what = "syncdir" if number in self._tree.entries or (not self.recording and _is_directory(fd)) else "sync"
        with self.call(Call(what, relative, number)):
            real(fd)

    def _os_rename(self, real: Any, old: Any, new: Any) -> None:
        relative, target = self.inside(old), self.inside(new)
        if relative is None or target is None:
            real(old, new)
            return
        directory, name = self._place(relative)
        with self.call(Call("rename", name, directory=directory, new_name=self._place(target)[1])):
            real(old, new)

    def _gone(self, what: str, real: Any, path: Any, dir_fd: int | None) -> None:
        relative = self.inside(path, dir_fd)
        if relative is None:
            real(path, dir_fd=dir_fd)
            return
        directory, name = self._place(relative)
        with self.call(Call(what, name, directory=directory)):
            real(path, dir_fd=dir_fd)

    def _os_unlink(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", real, path, dir_fd)

    def _os_rmdir(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("rmdir", real, path, dir_fd)

    def _os_mkdir(self, real: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        relative = self.inside(path, dir_fd)
        if relative is None:
            real(path, mode, dir_fd=dir_fd)
            return
        directory, name = self._place(relative)
        with self.call(Call("mkdir", name, directory=directory)):
            real(path, mode, dir_fd=dir_fd)

    def _looked(self, what: str, real: Any, path: Any, args: Any, kwargs: Any) -> Any:
        relative = self.inside(path if path is not None else ".", kwargs.get("dir_fd"))
        if relative is None:
            return real(path, *args, **kwargs)
        with self.call(Call(what, relative)):
            return real(path, *args, **kwargs)

    def _os_stat(self, real: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return self._looked("stat", real, path, args, kwargs)

    def _os_list(self, real: Any, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        return self._looked("list", real, path, args, kwargs)

    def _os_read(self, real: Any, fd: int, *args: Any) -> Any:
        return self._looked("read", real, fd, args, {})

    def _wrapped_open(self, real_open: Any) -> Any:
        disk = self

        class Raw(io.FileIO):
            """A file opened by name, whose reads and writes are seen."""

            def write(self, data: Any) -> int:
                position = self.tell()
                return disk._os_write_at(
                    lambda _fd, part, _at: io.FileIO.write(self, part), self.fileno(), data, position
                )

            def readall(self) -> Any:
                with disk.call(Call("read", str(self.name))):
                    return io.FileIO.readall(self)

            def close(self) -> None:
                if not self.closed:
                    disk._fds.pop(self.fileno(), None)
                super().close()

        def open_(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            relative = None if isinstance(file, int) else disk.inside(file)
            if relative is None:
                return real_open(file, mode, buffering, *args, **kwargs)
            flags = {
                "r": os.O_RDONLY,
                "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
                "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            }
            kind = flags.get(mode[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            if "+" in mode:
                kind = kind & ~(os.O_RDONLY | os.O_WRONLY) | os.O_RDWR
            fd = os.open(file, kind | os.O_CLOEXEC, 0o666)
            raw = Raw(fd, mode.replace("b", "").replace("t", ""))
            buffered: Any = (
                io.BufferedRandom(raw)
                if "+" in mode
                else io.BufferedReader(raw)
                if mode[0] == "r"
                else io.BufferedWriter(raw)
            )
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        return open_


def _is_directory(fd: int) -> bool:
    import stat

    return stat.S_ISDIR(os.fstat(fd).st_mode)


_OS_CALLS = {
    "open": "open", "close": "close", "pwrite": "write_at", "write": "write", "ftruncate": "truncate",
    "truncate": "truncate", "fsync": "sync", "fdatasync": "sync", "rename": "rename", "replace": "rename",
    "unlink": "unlink", "remove": "unlink", "rmdir": "rmdir", "mkdir": "mkdir", "stat": "stat", "lstat": "stat",
    "listdir": "list", "scandir": "list", "read": "read", "pread": "read", "preadv": "read",
}  # fmt: skip


# -- SQLite ---------------------------------------------------------------------------------------------


class Vfs(apsw.VFS):
    """SQLite's calls, with names and codes as SQLite has them. The default of the process while it is registered."""

    def __init__(self, disk: Disk) -> None:
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
        with self.guarded(Call("unlink", name, directory=directory, by_sqlite=True)):
            super().xDelete(filename, syncdir)
        if syncdir:
            with self.guarded(Call("syncdir", relative, directory, by_sqlite=True)):
                pass

    def xGetLastError(self) -> tuple[int, str]:  # noqa: N802
        known = self.disk._last_errno
        return (known, os.strerror(known)) if known else super().xGetLastError()

    @contextmanager
    def guarded(self, call: Call) -> Iterator[None]:
        with guarded(self.disk, call):
            yield


@contextmanager
def guarded(disk: Disk, call: Call) -> Iterator[None]:
    """A refusal by ``before``, as SQLite hears of it."""
    try:
        with disk.call(call):
            yield
    except OSError as error:
        disk._last_errno = error.errno or 0
        full = error.errno in {errno.ENOSPC, errno.EDQUOT} and call.what == "write"
        refused = apsw.FullError("injected") if full else apsw.IOError("injected")
        refused.extendedresult = apsw.SQLITE_FULL if full else _SQLITE_CODES.get(call.what, apsw.SQLITE_IOERR)
        refused.result = refused.extendedresult & 0xFF
        raise refused from None


class File(apsw.VFSFile):
    """One file of a database."""

    def __init__(self, disk: Disk, name: Any, flags: list[int], relative: str) -> None:
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
        except ShortWrite:  # SQLite goes on writing until all of it is written, or the disk is full
            super().xWrite(data, offset)

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


def site() -> str:
    """The innermost line of Holdfast that is being executed: which call site this is."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HOLDFAST):
            return f"{name[len(HOLDFAST) :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ELSEWHERE
