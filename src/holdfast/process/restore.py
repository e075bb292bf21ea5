"""Restoring: a directory is brought from one tree to another, path by path, and can be killed at any moment.

Owns the order of steps, staging, and what is compared before something goes. Knows neither stores nor agents: whoever
calls it keeps the two trees (a durable intent) and calls it again after a kill, with the same differences.
What always holds: nothing outside the root is touched, and no link is followed. Nothing is taken away that is neither
what the caller says was there nor what it wants there: that is left, or put back, and reported. A file is replaced in
one step by one that is whole, proven and durable. Directories are never replaced, since somebody may stand in them.
Until it is done, a directory ``STAGING`` lies in the root.

    staged     whose         a link that leads nowhere: its target is what the caller knows this restore by
               <name>.part   being written; worth nothing
               <name>        whole; or, after the swap, what it has displaced
               <mode>-….mode which directory had that mode, and is writable meanwhile
    path       before -> after, by an exchange with <name>
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from blake3 import blake3

from holdfast.errors import BadOption, Damaged, StoreFailed
from holdfast.process.chunks import ahead, content_of
from holdfast.process.folders import Folders, begin_flush, exchange, exists, flush, flush_each, opened, place, status
from holdfast.process.scan import attributes
from holdfast.process.trees import (
    NAME_MAX_BYTES,
    PERMISSIONS,
    STAGING,
    Content,
    Difference,
    Entry,
    Tree,
    check,
    leaves,
    shown,
)
from holdfast.store.cipher import digest
from holdfast.store.files import fsync_directory, in_store, unavailable
from holdfast.store.files import scratch as new_folder

ReadChunks = Callable[[Sequence[bytes]], Iterable[bytes]]
"""Gives the bytes of chunks, by their digests, in their order: few of them are in memory at once."""

FLUSH_EACH = 32
"""Up to so many files are flushed one by one; more of them, with all of their file system."""

BLOCK_BYTES = 4096
"""A block of zeros becomes a hole."""

_STAGING = STAGING.encode()
_WHOSE = b"whose"
_PART, _OLD, _MODE = b".part", b".old", b".mode"
_WRITE = 0o300
_SECOND = 1_000_000_000
_NO_DIRECTORY = {errno.ENOTDIR, errno.ELOOP, errno.ENOENT}
_KINDS = {stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR}
T = TypeVar("T")


class Restored(NamedTuple):
    """What a restore has done."""

    changed: list[bytes]
    foreign: set[bytes]
    """Paths that hold neither what they held nor what they are to hold: somebody else's work, as he left it.

    Also what he wrote into a file that he had open, after it was displaced: it lies beside it, as ``….kept-…``.
    """
    blocked: dict[bytes, str]
    """Paths that cannot be restored, and why. They are as they were."""
    left: set[bytes]
    """Directories that were to go, and hold something that is not part of the tree."""


def halfway(root: str | os.PathLike[str]) -> bool:
    """Whether a restore of this directory has begun and not ended."""
    return os.path.lexists(os.path.join(root, STAGING))


def whose(root: str | os.PathLike[str]) -> str:
    """By what the caller knows the restore of this directory that has begun and not ended; empty: nobody can tell."""
    try:
        return os.readlink(os.path.join(root, STAGING, _WHOSE.decode()))
    except OSError:
        return ""


def arrived(root: str | os.PathLike[str], differences: Mapping[bytes, Difference]) -> bool:
    """Whether there is nothing to do: each path holds what it is to hold."""

    def looked(folders: Folders) -> bool:
        found = _Restore(folders, differences, leaving_links=True)
        found.look()
        return not (found.foreign or found.blocked or found.taking or found.placing or found.adjusting)

    return _guarded(root, looked)


def obstacles(
    root: str | os.PathLike[str], differences: Mapping[bytes, Difference], *, leaving_links: bool = False
) -> dict[bytes, str]:
    """Paths that a restore could not put back, and why. Reads every file that is to go; changes nothing.

    ``leaving_links``: links that lead out of the root may be made, because the tree is the user's own.
    """

    def looked(folders: Folders) -> dict[bytes, str]:
        found = _Restore(folders, differences, leaving_links)
        found.look()
        return found.blocked

    return _guarded(root, looked)


def restore(
    root: str | os.PathLike[str],
    differences: Mapping[bytes, Difference],
    read_chunks: ReadChunks,
    *,
    leaving_links: bool = False,
    known_by: str = "",
) -> Restored:
    """Bring a directory from one tree to another. After a kill: the same again goes on from there.

    If there is no room, or something cannot be read, nothing has been moved. ``known_by`` stands in the directory
    until it is done: by that the caller knows it again, wherever it has been moved to, and ``whose`` tells others.
    """
    return _guarded(
        root, lambda folders: _Restore(folders, differences, leaving_links, known_by=known_by).run(read_chunks)
    )


def export(
    directory: str | os.PathLike[str],
    tree: Tree,
    read_chunks: ReadChunks,
    *,
    leaving_links: bool = False,
    scratch: bool = False,
) -> Restored:
    """Put a tree into a directory that is not there yet. It appears whole or not at all.

    ``scratch``: it is thrown away soon, so nothing is flushed; and who reads the chunks has proven them.
    """
    path = os.path.abspath(directory)
    if os.path.lexists(path):
        raise BadOption(f"{path} is there already; nothing was written", hint="Give a directory that is not there.")
    above, name = os.path.split(path)
    wanted = {path: Difference(None, entry) for path, entry in tree.items()}
    try:
        os.makedirs(above, exist_ok=True)
        with new_folder(Path(above), 0o777) as room:
            done = _guarded(
                room, lambda folders: _Restore(folders, wanted, leaving_links, scratch=scratch).run(read_chunks)
            )
            if not done.blocked:
                with Folders(os.path.realpath(above)) as folders:
                    place(folders.root, os.fsencode(room.name), folders.root, os.fsencode(name))
                if not scratch:
                    fsync_directory(Path(above))
        return done
    except OSError as error:
        raise unavailable(error, f"cannot write files to {path}") from error


def _guarded(root: str | os.PathLike[str], act: Callable[[Folders], T]) -> T:
    if in_store(Path(os.path.realpath(root))):
        raise BadOption(f"{os.fspath(root)} is a Holdfast store or lies in one; nothing was changed")
    try:
        with Folders(root) as folders:
            return act(folders)
    except OSError as error:
        raise unavailable(error, f"cannot change the files beneath {os.fspath(root)}") from error


class _Restore:
    """One restore of one root."""

    def __init__(
        self,
        folders: Folders,
        differences: Mapping[bytes, Difference],
        leaving_links: bool,
        *,
        scratch: bool = False,
        known_by: str = "",
    ) -> None:
        for path, (_, after) in differences.items():
            check(path, after)
        self.folders = folders
        self.differences = differences
        self.leaving_links = leaving_links
        self.scratch = scratch
        self.known_by = known_by
        self.order = sorted(differences)
        self.foreign: set[bytes] = set()
        self.blocked: dict[bytes, str] = {}
        self.left: set[bytes] = set()
        self.taking: list[bytes] = []
        """Paths whose present content goes before anything else can come there."""
        self.placing: list[bytes] = []
        self.adjusting: list[bytes] = []
        """Paths that hold what they should, with another mode or other attributes."""
        self.touched: set[bytes] = set()
        self.displaced: dict[bytes, tuple[bytes, os.stat_result]] = {}
        """By their names in staging: where they were, and what they were like before they were read and found known."""
        self.changed: dict[bytes, None] = {}
        self.at = b""
        """The path that is being moved."""

    # -- looking ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        for path in self.order:
            why = self._obstacle(path)
            if not why:
                try:
                    self._judge(path)
                except PermissionError as error:
                    why = f"cannot be read ({error.strerror})"
            if why:
                self.blocked[path] = why
        self._keep_full()

    def _obstacle(self, path: bytes) -> str:
        """Why nothing can be put at a path, or nothing."""
        above = path.rpartition(b"/")[0]
        if above in self.blocked or above in self.foreign:
            return f"{shown(above)} is in the way"
        after = self.differences[path].after
        if (
            after is not None
            and isinstance(after.content, bytes)
            and leaves(path, after.content)
            and not self.leaving_links
        ):
            return f"the link leads out of the directory, to {shown(after.content)}"
        try:
            self.folders.own(above)
        except FileNotFoundError:
            return ""
        except OSError as error:
            wanted = self.differences.get(above)
            if error.errno in _NO_DIRECTORY and (after is None or (wanted is not None and _is_directory(wanted.after))):
                return ""
            return f"{shown(above)}: {error.strerror}"
        return ""

    def _judge(self, path: bytes) -> None:
        before, after = self.differences[path]
        fd, name, now = self._now(path)
        if now is None:
            if after is not None:
                self.placing.append(path)
        elif stat.S_IFMT(now.st_mode) not in _KINDS:
            self.blocked[path] = "what lies there is no file, link or directory"
        elif after is not None and self._holds(fd, name, now, after):
            if not self._adjusted(fd, name, now, after):
                self.adjusting.append(path)
        elif before is None or not self._holds(fd, name, now, before):
            self.foreign.add(path)
        elif after is None:
            self.taking.append(path)
        else:
            self.placing.append(path)
            if before.content is None or after.content is None:
                self.taking.append(path)  # a directory never changes places with a file

    def _now(self, path: bytes) -> tuple[int, bytes, os.stat_result | None]:
        """The directory of a path, its name there, and what it is. -1: there is no such directory."""
        try:
            fd, name = self.folders.parent(path)
        except OSError as error:
            if error.errno in _NO_DIRECTORY or isinstance(error, FileNotFoundError):
                return -1, b"", None
            raise
        return fd, name, status(fd, name)

    @staticmethod
    def _holds(fd: int, name: bytes, now: os.stat_result, entry: Entry) -> bool:
        """Whether this is what lies there. A file is read: its times say nothing about who wrote it."""
        content = entry.content
        if stat.S_IFMT(now.st_mode) != stat.S_IFMT(entry.mode):
            return False
        if isinstance(content, Content):
            return now.st_size == content.size and _digest(fd, name) == content.digest
        return content is None or os.readlink(name, dir_fd=fd) == content

    @staticmethod
    def _adjusted(fd: int, name: bytes, now: os.stat_result, entry: Entry) -> bool:
        if stat.S_ISLNK(entry.mode):
            return True
        if now.st_mode & PERMISSIONS != entry.mode & PERMISSIONS:
            return False
        if entry.content is None:
            return True
        with opened(name, os.O_RDONLY, fd) as file:
            return attributes(file) == entry.extra

    def _keep_full(self) -> None:
        """A directory that holds something else than what goes stays: in the way of a file, or for itself."""
        going = set(self.taking)
        for path in reversed(self.taking):
            if not _is_directory(self.differences[path].before):
                continue
            names = os.listdir(self.folders.fd(path))
            if all(path + b"/" + os.fsencode(name) in going for name in names):
                continue
            going.discard(path)
            if self.differences[path].after is None:
                self.left.add(path)
            else:
                self.placing.remove(path)
                self.blocked[path] = "the directory there holds files that are not part of the tree"
        self.taking = [path for path in self.taking if path in going]

    # -- doing -----------------------------------------------------------------------------------------------

    def run(self, read_chunks: ReadChunks) -> Restored:
        began = exists(self.folders.root, _STAGING)
        if began:
            self._recover(self.folders.hold(_STAGING))
        self.look()
        if began or self.taking or self.placing or self.adjusting:
            if not began:
                os.mkdir(_STAGING, 0o700, dir_fd=self.folders.root)
            staging = self.folders.fd(_STAGING) if began else self.folders.hold(_STAGING)
            self._sign(staging)
            try:
                self._stage(staging, read_chunks)
            except BaseException:
                with suppress(OSError):  # the first failure is the one to tell
                    self._clean(staging, keep=began)
                raise
            try:
                self._move(staging)
            except OSError as error:
                raise StoreFailed(
                    f"not all files are in place yet: {shown(self.at or b'.')}: {error.strerror or error}",
                    hint="When that is mended, do the same again: it goes on from here.",
                ) from error
        return Restored(list(self.changed), self.foreign, self.blocked, self.left)

    def _sign(self, staging: int) -> None:
        with suppress(OSError):  # a file system may have no links: then only the place proves it
            if exists(staging, _WHOSE) and os.readlink(_WHOSE, dir_fd=staging) != os.fsencode(self.known_by):
                os.unlink(_WHOSE, dir_fd=staging)
            if self.known_by and not exists(staging, _WHOSE):
                os.symlink(self.known_by, _WHOSE, dir_fd=staging)

    def _recover(self, staging: int) -> None:
        """Tidy up after one that was killed. What it displaced and should not have goes back."""
        paths = {_staged(path): path for path in self.order}
        for name in map(os.fsencode, os.listdir(staging)):
            now = status(staging, name)
            if now is None or name.endswith((_PART, _MODE)) or name == _WHOSE:
                continue
            path = paths.get(name.removesuffix(_OLD))
            if path is None:
                raise BadOption(
                    "another restore of this directory has begun and not ended",
                    hint=f"Finish that one first: `holdfast doctor` names it. If nobody can, look into {STAGING}: what"
                    " was displaced lies there. Then delete that directory.",
                )
            if any(entry and self._holds(staging, name, now, entry) for entry in self.differences[path]):
                self.displaced[name] = path, now
            else:
                self._put_back(path, name)
        self._lock(staging)
        self._clean(staging, keep=True)

    def _clean(self, staging: int, *, keep: bool) -> None:
        for name in map(os.fsencode, os.listdir(staging)):
            if name == _WHOSE:
                continue  # the last to go
            path, was = self.displaced.pop(name, (b"", None))
            now = status(staging, name)
            if was and now and (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns):
                self._keep(staging, name, path)  # somebody who has it open wrote to it since
            else:
                os.unlink(name, dir_fd=staging)
        if not keep:
            with suppress(FileNotFoundError):
                os.unlink(_WHOSE, dir_fd=staging)
            self.folders.forget(_STAGING)
            os.rmdir(_STAGING, dir_fd=self.folders.root)
            if not self.scratch:
                os.fsync(self.folders.root)

    def _stage(self, staging: int, read_chunks: ReadChunks) -> None:
        """Make everything that is to come, whole and durable."""
        files = [path for path in self.placing if not _is_directory(self.differences[path].after)]
        entries = [self.differences[path].after for path in files]
        contents = [entry.content for entry in entries if entry is not None and isinstance(entry.content, Content)]
        names = [name for content in contents for name in content.chunks]
        with closing(ahead(read_chunks(names), len)) as pieces:
            for path, entry in zip(files, entries, strict=True):
                if entry is None:
                    continue
                name = _staged(path)
                if isinstance(entry.content, bytes):
                    os.symlink(entry.content, name + _PART, dir_fd=staging)
                    self._own(path, name + _PART, staging)
                elif entry.content is not None:
                    with opened(name + _PART, os.O_RDWR | os.O_CREAT | os.O_EXCL, staging) as file:
                        _write(file, path, entry.content, pieces, prove=not self.scratch)
                        self._own(path, file)
                        _adjust(file, entry)
                        self._date(file, path, entry.content.size)
                        if not self.scratch:
                            begin_flush(file)
        if len(files) > FLUSH_EACH and not self.scratch:
            flush(staging)
        elif not self.scratch:
            with ExitStack() as stack:
                written = [
                    _staged(path) + _PART
                    for path, entry in zip(files, entries, strict=True)
                    if entry is not None and isinstance(entry.content, Content)
                ]
                flush_each([stack.enter_context(opened(name, os.O_RDONLY, staging)) for name in written])
        for name in map(_staged, files):
            os.rename(name + _PART, name, src_dir_fd=staging, dst_dir_fd=staging)

    def _own(self, path: bytes, file: int | bytes, fd: int | None = None) -> None:
        """Root gives what it makes to the owner of what it replaces, or of the directory that it comes into."""
        if os.geteuid() != 0:
            return
        above, _, now = self._now(path)
        owner = now or os.fstat(above if above >= 0 else self.folders.root)
        if fd is None:
            os.chown(file, owner.st_uid, owner.st_gid)
        else:
            os.chown(file, owner.st_uid, owner.st_gid, dir_fd=fd, follow_symlinks=False)

    def _date(self, file: int, path: bytes, size: int) -> None:
        """Give a file another second than what it replaces, if it has its size: Python's bytecode goes by that."""
        _, _, now = self._now(path)
        if now is not None and stat.S_ISREG(now.st_mode) and now.st_size == size:
            second = now.st_mtime_ns // _SECOND
            if second >= time.time_ns() // _SECOND:
                os.utime(file, ns=(time.time_ns(), (second + 1) * _SECOND))

    def _unlock(self, staging: int) -> None:
        """Make directories writable in which something moves. What they were is noted, for whoever goes on."""
        for path in {path.rpartition(b"/")[0] for path in (*self.taking, *self.placing)}:
            fd = self._now(path + b"/.")[0]
            now = os.fstat(fd) if fd >= 0 else None
            if now is not None and now.st_mode & _WRITE != _WRITE and now.st_uid == os.geteuid() != 0:
                os.symlink(path or b".", b"%o-%s%s" % (stat.S_IMODE(now.st_mode), _staged(path), _MODE), dir_fd=staging)
                os.fchmod(fd, stat.S_IMODE(now.st_mode) | _WRITE)

    def _lock(self, staging: int) -> None:
        """Give directories the modes again that they had."""
        for name in map(os.fsencode, os.listdir(staging)):
            if name.endswith(_MODE):
                path = os.readlink(name, dir_fd=staging)
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.fchmod(self.folders.fd(b"" if path == b"." else path), int(name.partition(b"-")[0], 8))

    def _move(self, staging: int) -> None:
        self._unlock(staging)
        for path in reversed(self.taking):
            self.at = path
            self._take(staging, path)
        for path in self.placing:
            self.at = path
            if path not in self.foreign:
                self._place(staging, path)
        for path in self.adjusting:
            self.at = path
            fd, name = self.folders.parent(path)
            entry = self.differences[path].after
            if entry is not None and not _is_directory(entry):
                with opened(name, os.O_RDONLY, fd) as file:
                    _adjust(file, entry)
                    os.fsync(file)
                self._moved(path)
        self._lock(staging)
        for path in reversed(self.order):
            self.at, entry = path, self.differences[path].after
            if entry is not None and _is_directory(entry) and path not in self.foreign and path not in self.blocked:
                self._give_mode(path, entry)
        self.at = b""
        self._flush()
        self._clean(staging, keep=False)

    def _give_mode(self, path: bytes, entry: Entry) -> None:
        fd = self.folders.fd(path)
        now = stat.S_IMODE(os.fstat(fd).st_mode)
        wanted = now & ~PERMISSIONS | entry.mode & PERMISSIONS
        if now != wanted:
            os.fchmod(fd, wanted)
            self._moved(path)
            self.touched.add(path)

    def _moved(self, path: bytes) -> None:
        self.changed[path] = None
        self.touched.add(path.rpartition(b"/")[0])

    def _take(self, staging: int, path: bytes) -> None:
        """Take away what lies at a path, if it is what should go."""
        fd, name = self.folders.parent(path)
        before = self.differences[path].before
        try:
            if _is_directory(before):
                self.folders.forget(path)
                os.rmdir(name, dir_fd=fd)
            else:
                place(fd, name, staging, _staged(path))
                self._compare(staging, path)
        except FileNotFoundError:
            return  # somebody else has taken it away
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
            (self.left if self.differences[path].after is None else self.foreign).add(path)
            return
        if path not in self.foreign:
            self._moved(path)

    def _place(self, staging: int, path: bytes) -> None:
        entry = self.differences[path].after
        try:
            fd, name = self.folders.parent(path)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            self.foreign.add(path)
            return
        try:
            if entry is not None and _is_directory(entry):
                os.mkdir(name, 0o700, dir_fd=fd)
                self._own(path.rpartition(b"/")[0] + b"/.", name, fd)
            elif not self._swap(staging, path, fd, name):
                place(staging, _staged(path), fd, name)
        except FileExistsError:
            self.foreign.add(path)
        if path not in self.foreign:
            self._moved(path)

    def _swap(self, staging: int, path: bytes, fd: int, name: bytes) -> bool:
        """Exchange a staged file for what lies there. False: nothing lies there."""
        now = status(fd, name)
        if now is None:
            return False
        if stat.S_ISDIR(now.st_mode):
            raise FileExistsError
        if not exchange(staging, _staged(path), fd, name):
            old = _staged(path) + _OLD
            place(fd, name, staging, old)
            place(staging, _staged(path), fd, name)
            os.rename(old, _staged(path), src_dir_fd=staging, dst_dir_fd=staging)
        self._compare(staging, path)
        return True

    def _compare(self, staging: int, path: bytes) -> None:
        """Look at what was displaced. If it is not what was to go, it goes back."""
        now = status(staging, _staged(path))
        before = self.differences[path].before
        if now is None or before is None or not self._holds(staging, _staged(path), now, before):
            self._put_back(path, _staged(path))
            self.foreign.add(path)
        else:
            self.displaced[_staged(path)] = path, now

    def _put_back(self, path: bytes, held: bytes) -> None:
        """What was displaced, and is somebody else's, gets its place again; what we had put there is thrown away."""
        staging = self.folders.fd(_STAGING)
        fd, name = self.folders.parent(path)
        self.touched.add(path.rpartition(b"/")[0])
        with suppress(FileExistsError):
            if not self._is_ours(path, fd, name):
                place(staging, held, fd, name)
                return
            if not exchange(staging, held, fd, name):
                os.rename(held, name, src_dir_fd=staging, dst_dir_fd=fd)
                return
            if self._is_ours(path, staging, held):
                return
        self._keep(staging, held, path)  # he was quicker a second time

    def _keep(self, staging: int, held: bytes, path: bytes) -> None:
        """Nothing of somebody else's is lost: what was displaced lies beside what is there now."""
        above = path.rpartition(b"/")[0]
        try:
            fd, name = self.folders.parent(path)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            above, fd, name = b"", self.folders.root, path.rpartition(b"/")[2]  # its directory went
        name = name[: NAME_MAX_BYTES - 40] + b".kept-" + uuid.uuid4().hex.encode()
        place(staging, held, fd, name)
        os.fsync(fd)
        self.foreign.add(above + b"/" * bool(above) + name)

    def _is_ours(self, path: bytes, fd: int, name: bytes) -> bool:
        """Whether at this name lies the file that was to come to a path."""
        now, after = status(fd, name), self.differences[path].after
        return now is not None and after is not None and after.content is not None and self._holds(fd, name, now, after)

    def _flush(self) -> None:
        """Make it durable that everything is in place, before what was displaced goes."""
        if self.scratch:
            return
        if len(self.touched) > FLUSH_EACH:
            flush(self.folders.root)
            return
        with ExitStack() as stack:
            found = []
            for path in self.touched:
                with suppress(FileNotFoundError, NotADirectoryError):  # it went, too
                    found.append(os.dup(self.folders.fd(path)))
                    stack.callback(os.close, found[-1])
            flush_each(found)


def _is_directory(entry: Entry | None) -> bool:
    return entry is not None and entry.content is None


def _staged(path: bytes) -> bytes:
    return digest(b"path", path)[:16].hex().encode()


def _digest(fd: int, name: bytes) -> bytes:
    with opened(name, os.O_RDONLY, fd) as file:
        return content_of(file, os.fstat(file).st_size)[0]


def _write(file: int, path: bytes, content: Content, pieces: Iterator[bytes], *, prove: bool) -> None:
    """Write a file and prove that it is what it should be. Blocks of zeros become holes."""
    whole = blake3(b"holdfast.value\0")
    size = 0
    for _, data in zip(content.chunks, pieces, strict=False):
        if prove:
            whole.update(data)
        for start, end in _filled(data, size):
            view = memoryview(data)[start:end]
            at = size + start
            while view:
                count = os.pwrite(file, view, at)
                view, at = view[count:], at + count
        size += len(data)
    os.ftruncate(file, size)
    if size != content.size or (prove and whole.digest() != content.digest):
        raise Damaged(
            f"{shown(path)} is not what was saved; nothing was changed",
            what=(f"file {shown(path)}",),
            hint="`holdfast verify` says what else is damaged.",
        )


_ZEROS = bytes(BLOCK_BYTES)


def _filled(data: bytes, offset: int) -> Iterator[tuple[int, int]]:
    """The parts of a piece of a file that are no blocks of zeros. ``offset``: where it lies in the file."""
    start = 0
    for at in range(-offset % BLOCK_BYTES, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        if data.startswith(_ZEROS, at):
            if at > start:
                yield start, at
            start = at + BLOCK_BYTES
    if start < len(data):
        yield start, len(data)


def _adjust(file: int, entry: Entry) -> None:
    """Give an open file its mode and attributes."""
    for name, _ in attributes(file):
        if name not in dict(entry.extra):
            os.removexattr(file, name)
    for name, value in entry.extra:
        os.setxattr(file, name, value)
    os.fchmod(file, entry.mode & PERMISSIONS)
