"""Every call that this process makes to the disk below one directory, seen, recorded, and made to fail on demand.

``Disk`` stands between Holdfast and the system: SQLite goes through a VFS of ours, everything else through the ``os``
module. It knows nothing of stores. What always holds: a call is recorded in the order in which it happened, with all
that a replay needs (tests/faults/replay.py); a call that was made to fail did not happen.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import apsw

from tests.faults.calls import CHANGES, Call, Made, ShortWrite
from tests.faults.engine import Vfs, statements

ROOT_DIRECTORY = 0
Before = Callable[[Call], None]
_fstat = os.fstat


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

    def call(self, call: Call) -> Made:
        """Around a real call: ask first, then note that it happened."""
        return Made(self, call)

    def ask(self, call: Call) -> None:
        """Before a call: whoever stands at ``before`` may refuse it, but not what it does itself meanwhile."""
        if self.before is None or getattr(self._thread_busy, "on", False):
            return
        self._thread_busy.on = True
        try:
            self.before(call)
        except OSError:
            if call.what == "sync" and self.recording:
                self.calls.append(Call("failed", call.name, call.file))
            raise
        finally:
            self._thread_busy.on = False

    def note(self, call: Call) -> None:
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
        by_name = [module for module in list(sys.modules.values()) if vars(module).get("FileIO") is io.FileIO]
        by_name = [module for module in by_name if module.__name__.startswith("holdfast.")]
        vfs = Vfs(self)
        apsw.connection_hooks.append(self._connected)
        try:
            for name in _OS_CALLS:
                setattr(os, name, self._wrapped(name, real[name]))
            raw, io.open = self._wrapped_open(real_open)  # type: ignore[assignment]
            builtins.open = io.open
            for module in by_name:
                module.FileIO = raw  # type: ignore[attr-defined]
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            io.open = builtins.open = real_open  # type: ignore[assignment]
            for module in by_name:
                module.FileIO = io.FileIO  # type: ignore[attr-defined]
            apsw.connection_hooks.remove(self._connected)
            vfs.unregister()

    def _connected(self, connection: apsw.Connection) -> None:
        statements(self, connection)

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
        relative = self._fds.pop(fd, None)
        # When closing fails, shutil.rmtree closes a second time, and is surprised. That is not ours to try.
        by_shutil = sys._getframe(2).f_code.co_filename == shutil.__file__
        try:
            if relative is not None and not by_shutil:
                with self.call(Call("close", str(relative))):
                    pass
        finally:
            real(fd)  # a descriptor whose closing failed is closed all the same

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

    def _os_rename(self, real: Any, old: Any, new: Any, **fds: Any) -> None:
        relative, target = self.inside(old, fds.get("src_dir_fd")), self.inside(new, fds.get("dst_dir_fd"))
        if relative is None or target is None:
            real(old, new, **fds)
            return
        directory, name = self._place(relative)
        with self.call(Call("rename", name, directory=directory, new_name=self._place(target)[1])):
            real(old, new, **fds)

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

    def _os_scan(self, real: Any, path: Any = ".") -> Any:
        found = self._looked("list", real, path, (), {})
        return found if self.inside(path) is None else _Entries(self, found, path)

    def _os_link(self, real: Any, old: Any, new: Any, **kwargs: Any) -> None:
        self._looked("link", lambda _new, **rest: real(old, new, **rest), new, (), kwargs)

    def _os_send(self, real: Any, out: int, into: int, offset: Any, count: int) -> int:
        """The kernel copies from file to file: for us a read and a write."""
        if self.inside(out) is None:
            return int(real(out, into, offset, count))
        data = os.pread(into, count, offset)
        sent = 0
        while sent < len(data):
            sent += os.write(out, data[sent:])
        return sent

    def _os_read(self, real: Any, fd: int, *args: Any) -> Any:
        return self._looked("read", real, fd, args, {})

    def _wrapped_open(self, real_open: Any) -> tuple[Any, Any]:
        """What stands for ``io.FileIO`` and for ``open``."""
        disk = self

        class Raw(io.FileIO):
            """A file opened by name or from a descriptor of ours, whose reads and writes are seen."""

            def __init__(self, file: Any, mode: str, opener: Any = None) -> None:
                super().__init__(file, mode, opener=opener or (lambda path, flags: os.open(path, flags, 0o666)))

            def write(self, data: Any) -> int:
                position = self.tell()
                return disk._os_write_at(
                    lambda _fd, part, _at: io.FileIO.write(self, part), self.fileno(), data, position
                )

            def readall(self) -> Any:
                with disk.call(Call("read", str(self.name))):
                    return io.FileIO.readall(self)

            def readinto(self, buffer: Any) -> Any:
                with disk.call(Call("read", str(self.name))):
                    return io.FileIO.readinto(self, buffer)

            def close(self) -> None:
                if not self.closed:
                    disk._fds.pop(self.fileno(), None)
                super().close()

        def raw(file: Any, mode: str = "r", opener: Any = None) -> io.FileIO:
            return (io.FileIO if disk.inside(file) is None else Raw)(file, mode, opener=opener)

        def open_(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if disk.inside(file) is None:
                return real_open(file, mode, buffering, *args, **kwargs)
            made = Raw(file, mode.replace("b", "").replace("t", ""))
            # A buffer of one byte keeps nothing back: each read and write of the program is a call of its own line.
            buffered: Any = (
                io.BufferedRandom(made, 1)
                if "+" in mode
                else io.BufferedReader(made, 1)
                if mode[0] == "r"
                else io.BufferedWriter(made, 1)
            )
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        return raw, open_


def _is_directory(fd: int) -> bool:
    return stat.S_ISDIR(_fstat(fd).st_mode)


class _Entries:
    """What scandir gives, each of whose entries can be asked for more."""

    def __init__(self, disk: Disk, entries: Any, path: Any) -> None:
        self._disk = disk
        self._entries = entries
        self._place = disk.inside(path) or ""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _Entry(self._disk, next(self._entries), self._place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


class _Entry:
    """One of them. Only ``stat`` asks the disk."""

    def __init__(self, disk: Disk, entry: os.DirEntry[str], place: str) -> None:
        self._disk = disk
        self._entry = entry
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self._entry.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        with self._disk.call(Call("stat", f"{self._place}/{self._entry.name}")):
            return self._entry.stat(follow_symlinks=follow_symlinks)


_OS_CALLS = {
    "open": "open", "close": "close", "pwrite": "write_at", "write": "write", "ftruncate": "truncate",
    "truncate": "truncate", "fsync": "sync", "fdatasync": "sync", "rename": "rename", "replace": "rename",
    "unlink": "unlink", "remove": "unlink", "rmdir": "rmdir", "mkdir": "mkdir", "stat": "stat", "lstat": "stat",
    "fstat": "stat", "link": "link", "sendfile": "send", "listdir": "list", "scandir": "scan", "read": "read",
    "pread": "read", "preadv": "read",
}  # fmt: skip
