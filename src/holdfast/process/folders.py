"""Directories beneath a root, by descriptors: nothing here ever follows a link or leaves the root.

Owns opening, the system's calls that Python does not have, and making changes durable. Knows nothing of trees.
What always holds: every name of a path is opened without following it, so a directory that somebody replaces with a
link while we are at work gives an error, not another place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, Self

from holdfast.process.trees import STORE, is_store

_KEPT = 64
"""How many directories stay open: enough for the ways down to those that are worked on in turn."""

_FLUSHED_AT_ONCE = 12
"""So many flushes wait for the disk side by side: it does them together, in the time of one or two."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOREPLACE, _EXCHANGE = 1, 2
_WRITE = 2  # SYNC_FILE_RANGE_WRITE

_GLANCES_MIN = 2_000
"""So many statuses are worth a thread of their own."""

_GLANCES_AT_ONCE = 4
"""More threads than that would wait for each other in the kernel."""

_FTS = 0x10 | 0x04  # FTS_PHYSICAL: of links themselves; FTS_NOCHDIR
_FTSENT = struct.Struct("=16xQ80xQ")  # the next one, and where the status is
_STAT = struct.Struct("=QQ32xq32xqqqq")  # device, inode, size, seconds and nanoseconds of both times of change
_KNOWN = {"x86_64", "aarch64"}
"""Machines for which that is so, with glibc."""

_CLONE_FS = 0x200

_libc = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None)
"""The same for calls that are over at once: Python's lock is not given away for them, and waited for again."""

Stamp = int
"""Python's hash, of 61 bits, of device, inode, size and times of change (content, inode): of one number a memory is
found faster than that of seven, and time goes by while thousands are compared."""


class Inside(OSError):
    """Where the way leads is not a directory of this root's own: a store, or another file system."""


class Folders:
    """Directories beneath one root, which is no link. Those that were used last stay open; ``with`` closes all."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.open(root, _DIRECTORY)
        self.device = os.fstat(self.root).st_dev
        self._open: dict[bytes, int] = {}
        self._held: dict[bytes, int] = {}
        self._own: set[bytes] = set()

    def hold(self, path: bytes) -> int:
        """A directory that stays open until it is forgotten."""
        self._held[path] = os.dup(self.fd(path))
        return self._held[path]

    def fd(self, path: bytes) -> int:
        """A directory, open until others are asked for. The root's path is empty."""
        if not path:
            return self.root
        if path in self._held:
            return self._held[path]
        found = self._open.pop(path, None)
        if found is None:
            above, _, name = path.rpartition(b"/")
            found = os.open(name, _DIRECTORY, dir_fd=self.fd(above))
            while len(self._open) >= _KEPT:
                os.close(self._open.pop(next(iter(self._open))))
        self._open[path] = found
        return found

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """The directory that a path lies in, open, and its name there."""
        above, _, name = path.rpartition(b"/")
        return self.fd(above), name

    def own(self, path: bytes) -> None:
        """Raise Inside if this directory is a store's, or on another file system than the root."""
        if path in self._own:
            return
        if path:
            self.own(path.rpartition(b"/")[0])
        fd = self.fd(path)
        if os.fstat(fd).st_dev != self.device:
            raise Inside(errno.EXDEV, "another file system is mounted there")
        if is_store({name for name in STORE if exists(fd, name.encode())}):
            raise Inside(errno.EPERM, "a Holdfast store lies there")
        self._own.add(path)

    def forget(self, path: bytes) -> None:
        """Close a directory that is about to go, and all below it."""
        for known in [known for known in self._open if known == path or known.startswith(path + b"/")]:
            os.close(self._open.pop(known))
        if path in self._held:
            os.close(self._held.pop(path))

    def close(self) -> None:
        for fd in (*self._open.values(), *self._held.values()):
            os.close(fd)
        self._open.clear()
        self._held.clear()
        if self.root >= 0:
            os.close(self.root)
            self.root = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def exists(fd: int, name: bytes) -> bool:
    return status(fd, name) is not None


def status(fd: int, name: bytes) -> os.stat_result | None:
    """What is at a name, or None."""
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def opened(name: bytes, flags: int, fd: int, mode: int = 0o600) -> Iterator[int]:
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=fd)
    try:
        yield file
    finally:
        os.close(file)


def exchange(fd: int, name: bytes, other_fd: int, other: bytes) -> bool:
    """Let two names change what they stand for, in one step. False where the file system cannot."""
    return _rename(fd, name, other_fd, other, _EXCHANGE)


def place(fd: int, name: bytes, other_fd: int, other: bytes) -> None:
    """Move something to a name that is free. Raises FileExistsError, and moves nothing, if it is not."""
    if not _rename(fd, name, other_fd, other, _NOREPLACE):
        if exists(other_fd, other):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other)
        os.rename(name, other, src_dir_fd=fd, dst_dir_fd=other_fd)


def _rename(fd: int, name: bytes, other_fd: int, other: bytes, flags: int) -> bool:
    if not hasattr(_libc, "renameat2"):
        return False
    if not _libc.renameat2(fd, name, other_fd, other, flags):
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        return False
    raise OSError(code, os.strerror(code), other)


def begin_flush(fd: int) -> None:
    """Let the disk begin to write a file. Those of which all have begun are durable with few flushes."""
    if hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)


def flush_each(files: Sequence[int]) -> None:
    """Make open files and directories durable, and nothing else of their file system."""
    left, failed = list(files), list[OSError]()

    def work() -> None:
        while left and not failed:
            try:
                os.fsync(left.pop())
            except IndexError:  # another one took the last
                return
            except OSError as error:
                failed.append(error)

    helpers: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads can be had: then they are fewer
            for _ in range(min(len(left), _FLUSHED_AT_ONCE) - 1):
                helper = threading.Thread(target=work, name="holdfast-flush", daemon=True)
                helper.start()
                helpers.append(helper)
        work()
    finally:
        for helper in helpers:
            helper.join()
    if failed:
        raise failed[0]


def flush(fd: int) -> None:
    """Make all of a file system durable that an open file is on: cheaper than hundreds of single ones."""
    if _libc.syncfs(fd):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# -- many statuses at once ----------------------------------------------------------------------------------


def stamp_of(status: os.stat_result) -> Stamp:
    changes = (*divmod(status.st_mtime_ns, 1_000_000_000), *divmod(status.st_ctime_ns, 1_000_000_000))
    return hash((status.st_dev, status.st_ino, status.st_size, *changes))


class Paths:
    """Paths beneath a root, and as C wants to have them: whole, and from the root on."""

    __slots__ = ("inner", "pointers", "texts")

    def __init__(self, root: bytes, paths: Sequence[bytes]) -> None:
        self.texts = [b"%b/%b" % (root, path or b".") for path in paths]
        self.pointers = bytes((ctypes.c_char_p * len(paths))(*self.texts))
        whole = memoryview(self.pointers).cast("Q")
        self.inner = struct.pack(f"={len(paths)}Q", *[at + len(root) + 1 for at in whole])


def stamps(wanted: Sequence[Paths], root: int) -> list[Stamp]:
    """The stamps of thousands of paths, one list for all of them. One that cannot be looked at has that of none.

    The system's library takes the status of each path that a walk begins with (``fts_open``): in one call, outside of
    Python's lock. Python's own call for each path costs more than what the kernel takes for it. The threads that make
    these calls stand in the root, which is open as ``root``: half of what a status costs is the way to it. Where they
    must not, whole paths lead to the same files.
    """
    return _stamps(wanted, root) if _has_fts() else [_stamp_at(path) for paths in wanted for path in paths.texts]


def _stamps(wanted: Sequence[Paths], root: int) -> list[Stamp]:
    whole, inner = b"".join(paths.pointers for paths in wanted), b"".join(paths.inner for paths in wanted)
    count = len(whole) // 8
    if not count:
        return []  # the library fails where a walk begins nowhere
    parts = max(1, min(_GLANCES_AT_ONCE, len(os.sched_getaffinity(0)), count // _GLANCES_MIN))
    size = -(-count // parts) * 8
    walks: list[int | None] = [None] * parts

    def begin(number: int, block: bytes = whole, _kept: object = wanted) -> None:
        # Behind the last one stands none. What they lead to has to be there until this is done, whoever gives up.
        walks[number] = _libc.fts_open(block[number * size : (number + 1) * size] + bytes(8), _FTS, None)

    def apart(number: int) -> None:
        begin(number, inner if _stands_apart(root) else whole)

    helpers: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads can be had
            for number in range(parts if count >= _GLANCES_MIN else 0):
                helper = threading.Thread(target=apart, args=(number,), name="holdfast-look", daemon=True)
                helper.start()
                helpers.append(helper)
        found: list[Stamp] = []
        for number in range(parts):
            if number < len(helpers):
                helpers[number].join()
            else:
                begin(number)
            found += _stamps_in(walks[number])
        return found
    finally:
        for helper in helpers:
            helper.join()
        for walk in walks:
            if walk:
                _libc.fts_read(walk)  # only of one that has begun are all entries given back
                _libc.fts_close(walk)


def _stands_apart(root: int) -> bool:
    """Let this thread, and no other one of the process, stand in a directory. False where threads must not do that."""
    return not _quick.unshare(_CLONE_FS) and not _quick.fchdir(root)


def _stamp_at(path: bytes) -> Stamp:
    try:
        return stamp_of(os.lstat(path))
    except OSError:
        return hash((0,) * 7)


def _stamps_in(walk: int | None) -> list[Stamp]:
    if walk is None:
        raise MemoryError
    head = partial(_FTSENT.unpack_from, _memory())
    places: list[int] = []
    entry = _libc.fts_children(walk, 0)
    while entry:
        entry, place = head(entry)
        places.append(place)
    return list(map(hash, map(partial(_STAT.unpack_from, _memory()), places)))


@cache
def _memory() -> Any:
    """All of this process's memory, to read what the system's library has put there."""
    return (ctypes.c_char * sys.maxsize).from_address(0)


@cache
def _has_fts() -> bool:
    """Whether the system's library is the one whose structures are known here."""
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return False
    if not (sys.platform == "linux" and library.startswith("glibc ") and os.uname().machine in _KNOWN):
        return False
    if ctypes.sizeof(ctypes.c_void_p) != 8 or not hasattr(_libc, "fts_open"):
        return False
    _libc.fts_open.restype = _libc.fts_children.restype = ctypes.c_void_p
    _libc.fts_open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p)
    _libc.fts_children.argtypes = (ctypes.c_void_p, ctypes.c_int)
    _libc.fts_read.argtypes = _libc.fts_close.argtypes = (ctypes.c_void_p,)
    some = Paths(b"", [os.fsencode(__file__)[1:], b"", b"nowhere/at/all"])
    return _stamps([some], -1) == list(map(_stamp_at, some.texts))  # its structures are those, if it says the same
