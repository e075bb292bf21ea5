"""The store's directory: its layout, its birth, and what a path holds before anything is opened.

Owns names and places of files. Knows nothing of the catalog's content beyond its first page.
A store appears whole or not at all: it is built under another name, flushed, and renamed.
A process that has a catalog open must not open its files by other means, because closing such a descriptor drops
SQLite's locks; so everything about ``store.db`` here goes through apsw or stat.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
from msgspec import Struct

from holdfast.errors import BadOption, Damaged, DiskFull, Incompatible, NotAStore, StoreFailed, StoreReadOnly
from holdfast.store import witness
from holdfast.store.tables import APPLICATION_ID, FORMER_APPLICATION_ID

BuildCatalog = Callable[[Path], None]


class Layout(Struct, frozen=True):
    """Where the parts of the store in directory ``path`` are."""

    path: Path

    def __post_init__(self) -> None:
        try:
            str(self.path).encode()
        except UnicodeEncodeError as error:
            name = os.fsencode(self.path)
            raise BadOption(f"no store can be at {name!r}: SQLite opens only names that are text in UTF-8") from error

    @property
    def catalog(self) -> Path:
        return self.path / "store.db"

    @property
    def wal(self) -> Path:
        return self.path / "store.db-wal"

    def log_bytes(self) -> int:
        try:
            return self.wal.stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise unavailable(error, f"looking at {self.wal}") from error

    @property
    def packs(self) -> Path:
        return self.path / "packs"

    @property
    def locks(self) -> Path:
        return self.path / "locks"

    @property
    def queue_lock(self) -> Path:
        return self.locks / "queue"

    @property
    def moments_lock(self) -> Path:
        return self.locks / "moments"

    @property
    def open_lock(self) -> Path:
        """Shared by everybody who has the store open."""
        return self.locks / "open"

    @property
    def witness(self) -> Path:
        return self.path / "witness"


def in_store(path: Path) -> bool:
    """Whether a path, resolved, is that of a store or leads into one: what lies there is that store's to delete."""
    parts = ("store.db", "locks", "packs")
    return any(all(os.path.exists(folder / name) for name in parts) for folder in (path, *path.parents))


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def close_quietly(fd: int) -> None:
    """For a lock, which is free then whatever closing says: nothing was written that has to last."""
    with contextlib.suppress(OSError):
        os.close(fd)


def unavailable(error: OSError, doing: str) -> StoreFailed | DiskFull | StoreReadOnly:
    """The error that tells what an OSError means for a store."""
    reason = error.strerror or str(error)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DiskFull(f"{doing}: {reason}; nothing was changed", hint="Free some room, then try again.")
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return StoreReadOnly(f"{doing}: {reason}", hint="Open it with readonly=True, or change who may write there.")
    hint = "A mount point cannot be replaced; give a directory below it." if error.errno == errno.EBUSY else ""
    return StoreFailed(f"{doing}: {reason}", hint=hint)


def failed_disk(error: BaseException | None) -> bool:
    """Whether an error says that the disk does not give something back: trying again will not help."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None and error.errno == errno.EIO


def classify(path: Path) -> bool:
    """True if ``path`` holds a store, False if there is nothing (or an empty directory). Otherwise raises."""
    try:
        names = set(os.listdir(path))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise NotAStore(f"{path} is a file, not a store", hint="Give the path of a directory.") from None
    except OSError as error:
        raise StoreFailed(f"{path}: cannot be read ({error.strerror})") from error
    if not names:
        return False
    if "store.db" not in names:
        if {"witness", "locks", "packs"} <= names:
            raise Damaged(
                f"{path}: store.db is missing",
                what=("store.db",),
                hint="Put it back from a backup. The packs alone are of no use: only store.db says what they hold.",
            )
        raise NotAStore(f"{path} is a directory with other contents, not a store", hint="Give another path.")
    check_kinds(path)
    _check_first_page(Layout(path))
    return True


_FILES = ("store.db", "store.db-wal", "witness", "locks/open", "locks/moments", "locks/queue")


def check_kinds(path: Path) -> None:
    """Refuse what stands in the place of a file and is none: whoever opens a pipe may wait for ever."""
    for name in _FILES:
        try:
            mode = (path / name).stat().st_mode
        except OSError:  # whoever needs it says so
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise Damaged(
                f"{path}: {name} is {kind_of(mode)}, not a file",
                what=(name,),
                hint="Take it away and run `holdfast verify`, or put the store back from a backup.",
            )


def kind_of(mode: int) -> str:
    """What is no file and no directory, in words."""
    return "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"


_LOOKS = 3
"""How often a first page that makes no sense is looked at: another process may have folded its log in just that moment.
While it does there is a log, and afterwards a page that makes sense."""


def _check_first_page(layout: Layout) -> None:
    """Look at the database file without locks, without its log and without changing anything beside it."""
    damaged = Damaged(
        f"{layout.catalog}: not a readable database",
        what=("store.db",),
        hint="Put it back from a backup, or let `holdfast repair` look for what is intact in it.",
    )
    is_ours = witness.witness_report(layout.path).newest is not None
    for attempt in range(_LOOKS):
        logged = is_ours and bool(_size(layout.wal))
        try:
            found = _application_id(layout)
        except apsw.Error as error:
            # A process that was killed while it folded its log leaves a database that makes sense only together with
            # the log. Opening it with the log will tell; whether it is ours, the witness has said.
            if logged:
                return
            if not isinstance(error, (apsw.NotADBError, apsw.CorruptError)):
                raise StoreFailed(f"{layout.catalog}: cannot be read ({error})") from error
            if not is_ours:
                raise NotAStore(f"{layout.catalog} is not a database, so {layout.path} is not a store") from error
            if attempt == _LOOKS - 1:
                raise damaged from error
            continue
        if found == APPLICATION_ID or logged:
            return
        if is_ours:
            raise damaged
        raise NotAStore(f"{layout.catalog} is a database of another program, so {layout.path} is not a store")


def _application_id(layout: Layout) -> int:
    """Whose database it is. Read by SQLite: closing a descriptor of our own would drop its locks in this process."""
    uri = f"file:{urllib.parse.quote(str(layout.catalog))}?immutable=1"
    connection = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        found = int(connection.execute("PRAGMA application_id").get)
    finally:
        connection.close()
    if found == FORMER_APPLICATION_ID:
        raise Incompatible(
            f"{layout.path} is a store of the layout before this one, which was never released",
            hint="Read it with the Holdfast that wrote it. Nothing was changed.",
        )
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError:
        return 1  # nobody can tell: there may be something


@contextmanager
def scratch(beside: Path | None, mode: int = 0o700) -> Iterator[Path]:
    """A new folder, in a directory or where temporary files go, which is gone at the end if it is still there."""
    if beside is None:
        from tempfile import gettempdir  # slow to load, as shutil is: most programs need neither

        beside = Path(gettempdir())
    room = beside / f".holdfast-scratch-{uuid.uuid4().hex}"
    room.mkdir(mode)
    try:
        yield room
    finally:
        if os.path.exists(room):
            discard(room)


def put_in_place(new: Path, path: Path) -> bool:
    """Give a store that was built elsewhere the place where it belongs; False: somebody else has made one meanwhile."""
    make_folder(path.parent)
    try:
        new.rename(path)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        return False
    fsync_directory(path.parent)
    return True


def create(path: Path, build_catalog: BuildCatalog) -> None:
    """Make a new store at ``path``. If another process does so at the same time, its store is the one."""
    try:
        make_folder(path.parent)
        with scratch(path.parent, 0o777) as room:
            _build(Layout(room), build_catalog)
            put_in_place(room, path)
    except OSError as error:
        raise unavailable(error, f"cannot create a store at {path}") from error


def _build(layout: Layout, build_catalog: BuildCatalog) -> None:
    layout.packs.mkdir()
    layout.locks.mkdir()
    layout.queue_lock.touch()
    layout.moments_lock.touch()
    layout.open_lock.touch()
    layout.witness.write_bytes(witness.initial())
    (layout.path / ".gitignore").write_text("*\n")  # `git clean` in a repository around it leaves it alone then
    build_catalog(layout.catalog)
    for file in layout.path.iterdir():
        if file.is_file():
            _fsync_file(file)
    for directory in (layout.packs, layout.locks, layout.path):
        fsync_directory(directory)


_STATX_BTIME = 0x800
_BTIME = struct.Struct("=qI")  # seconds and nanoseconds, at byte 80 of the 256 of ``struct statx``; the mask is at 0


def birth_ns(path: str | os.PathLike[str]) -> int:
    """When a file was made; 0 where that is not known. A copy was made later, whichever inode it got elsewhere."""
    libc, found = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(256)
    if not hasattr(libc, "statx") or libc.statx(-100, os.fsencode(path), 0, _STATX_BTIME, found):
        return 0
    if not int.from_bytes(found.raw[:4], sys.byteorder) & _STATX_BTIME:
        return 0
    seconds, ns = _BTIME.unpack_from(found.raw, 80)
    return int(seconds) * 10**9 + int(ns)


def complete(layout: Layout) -> None:
    """Make anew what was empty, and got lost on the way through git, a bucket or an archive."""
    with contextlib.suppress(OSError):  # whoever needs it says so
        for folder in (layout.packs, layout.locks):
            if not folder.exists():
                folder.mkdir()
                fsync_directory(layout.path)
        if not layout.moments_lock.exists():
            layout.moments_lock.touch()


_EXCHANGE = 2  # RENAME_EXCHANGE


def exchange(path: Path, other: Path) -> None:
    """Let two directories of one folder change places, in one step. Raises where the system cannot do that."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.fsencode(path), os.fsencode(other)
    if not hasattr(libc, "renameat2") or libc.renameat2(-100, here, -100, there, _EXCHANGE):
        raise StoreFailed(
            f"the file system of {path.parent} cannot let two directories change places; nothing was changed",
            hint="Make a new store with another key, and move this one there: `holdfast move`.",
        )


def make_folder(parent: Path) -> None:
    """Make a directory and those above it, each durable."""
    missing = [directory for directory in (parent, *parent.parents) if not directory.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        fsync_directory(directory.parent)


def discard(directory: Path) -> None:
    """Remove it as far as that goes; what is left is waste, not harm."""
    import shutil

    with contextlib.suppress(OSError):  # not every failure is one that rmtree ignores
        shutil.rmtree(directory, ignore_errors=True)


def delete(directory: Path) -> None:
    """Remove it whole, or say what is left of it."""
    import shutil

    try:
        shutil.rmtree(directory)
    except OSError as error:
        discard(directory)
        if not os.path.lexists(directory):
            return
        left = sorted(path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
        shown = ", ".join(str(path.relative_to(directory)) for path in left[:3]) or "folders"
        raise StoreFailed(
            f"{directory} could not be deleted: {len(left)} of its files are left:"
            f" {shown}{', ...' * (len(left) > 3)} ({error.strerror or error})",
            hint="The old key opens what is left. Delete it as somebody who may.",
        ) from error
