"""Bringing a saved process back from a folder: its files, then its memory.

Owns the order of things, what is refused, and what becomes of files that stand in the way. Knows nothing of stores.
What always holds: when this raises, files are as they were before; what the process finds another than it was then is
not thrown away, but lies beside it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import NotThawed
from holdfast.process import criu, isolation
from holdfast.process.image import (
    FILES,
    IMAGES,
    Description,
    SavedFile,
    beside,
    is_running,
    new_note,
    note_down,
    notes,
    who,
    writers,
)
from holdfast.store.files import fsync_directory
from holdfast.store.witness import state_folder

PID_WAIT_S = 8.0
"""How long a thaw waits for a process number to become free: after a failed one it stays taken for some seconds."""

_PR_SET_CHILD_SUBREAPER = 36
_ASIDE = ".holdfast-displaced-"
_NOTES = "thaws"


class Thawed(NamedTuple):
    """A process that is back: its number here, whether it lives in process numbers of its own, and what to know."""

    pid: int
    own_numbers: bool
    isolated: bool
    seconds: float
    notes: list[str]
    terminal: bool = False

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "pid": self.pid, "own_numbers": self.own_numbers, "isolated": self.isolated, "seconds": self.seconds,
            "notes": self.notes,
        }  # fmt: skip


def bring_back(
    folder: Path,
    description: Description,
    lock: int | None,
    *,
    isolated: bool = False,
    attached: bool = False,
    moved: bool = False,
) -> Thawed:
    """Let the process of the image in ``folder`` go on from where it was saved.

    ``isolated`` leaves everything else as it is: the process gets copies of all files, numbers of its own and no
    network. ``lock`` is that of ``alone``, in which any other is brought back. ``attached`` connects its terminal, or
    its pipes to others, with those of this process. ``moved``: the original is stopped somewhere, and this is its place
    from now on.
    """
    begun = time.monotonic()
    found = criu.needed(NotThawed)
    options = criu.Options(description.terminal or description.job, description.tcp)
    work = Path(tempfile.mkdtemp(dir=folder, prefix="work-"))
    call = {"memory_bytes": description.memory_bytes, "own_session": not attached}
    if isolated:
        within = _isolated(folder, description)
        pid = criu.restore(found.program, folder / IMAGES, work, options, within=within, **call)  # type: ignore[arg-type]
        return Thawed(pid, True, True, time.monotonic() - begun, [])
    apart = not _numbers_free(folder, description, 0.0 if moved else PID_WAIT_S)
    with (
        criu.undisturbed(),  # what comes when files are put is too late: the process lives, or says why not
        _files_put(folder, description) as displaced,
        _inherited(description, attached) as inherit,
    ):
        within = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if apart else []
        if attached:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        pid = criu.restore(
            found.program,
            folder / IMAGES,
            work,
            options,
            inherit=inherit,
            within=within,
            lock=lock,
            **call,  # type: ignore[arg-type]
        )
    notes = [f"Its number {description.pid} was taken: it lives in process numbers of its own."] if apart else []
    notes += [f"{path} had changed since; what was there is now {aside}" for path, aside in displaced]
    return Thawed(pid, apart, False, time.monotonic() - begun, notes, description.terminal)


@contextmanager
def alone() -> Iterator[int]:
    """Inside, no other thaw of this user is at it: of two, the one that fails would put the other's files back.

    Yields what holds it. CRIU has that, too: should we be killed, it goes on, and nobody else begins before it is done.
    """
    state_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(state_folder() / "thaw-lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def wait(pid: int) -> int:
    """Wait for the end of a process that was brought back attached; how it ended, as a shell would say it."""
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGQUIT)}
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 0
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    return code if code >= 0 else 128 - code


def check(folder: Path, description: Description, *, attached: bool, isolated: bool = False) -> None:
    """Raise where it is known beforehand that this process cannot be brought back here. Nothing has changed then.

    What another thaw has left that was killed is put right.
    """
    criu.needed(NotThawed)
    system = f" {os.uname().machine}"
    if not description.system.endswith(system):
        raise NotThawed(f"the process was saved on another kind of machine ({description.system})")
    if os.geteuid() not in {0, description.uid}:
        raise NotThawed(f"the process is of user {description.uid}", hint="Thaw it as root, or as that user.")
    if description.terminal and not (attached and sys.stdin.isatty()):
        raise NotThawed("the process belongs to a terminal, and there is none here", hint="Thaw it in a terminal.")
    for path, size in description.mapped:
        with suppress(OSError):
            if os.stat(path).st_size == size:
                continue
        raise NotThawed(f"{path}, which the process runs, is missing or another one by now", hint="Put it back first.")
    if isolated:
        return
    for kind, address, port in description.ports:
        _check_port(kind, address, port)
    finish_others()
    _check_unsaved(description)
    putting, going = _changes(folder, description)
    for one in putting:
        _check_parent(Path(one.path))
    _check_written([*(one.path for one in putting), *going])
    _check_room(putting)


def _check_port(kind: str, address: str, port: int) -> None:
    """As CRIU does it: so one that several may share is free for one more."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            tried.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NotThawed(
                    f"its port is taken by another process: {kind} {address} {port}", hint="End that process first."
                ) from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise NotThawed(f"it waits at {address} port {port}, and this machine has no such address") from None


def _check_room(putting: Iterable[SavedFile]) -> None:
    """The files that are put back lie beside those that are there for a while."""
    wanted: dict[int, tuple[Path, int]] = {}
    for one in putting:
        place = next(above for above in Path(one.path).parents if above.is_dir())
        there, so_far = wanted.get(place.stat().st_dev, (place, 0))
        wanted[place.stat().st_dev] = there, so_far + one.size
    for place, size in wanted.values():
        if shutil.disk_usage(place).free < size:
            raise NotThawed(f"{place} has no room for {size >> 20} MiB of files", hint="Make some.")


def _numbers_free(folder: Path, description: Description, wait_s: float) -> bool:
    """Whether all numbers are free, those of threads too, or become so in a while."""
    named = {int(path.stem.partition("-")[2]) for path in (folder / IMAGES).glob("core-*.img")}
    deadline = time.monotonic() + wait_s
    while any(Path(f"/proc/{one}").exists() for one in named | set(description.pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def _inherited(description: Description, attached: bool) -> Iterator[dict[str, int]]:
    """What stands where the process had pipes to others: ours, or nothing that anybody reads. And files that grew."""
    made: dict[str, int] = {}
    try:
        for one in description.files if description.kept else ():
            # CRIU insists on the size that a file had; one that we open may have another.
            with suppress(OSError):
                if os.stat(one.path).st_size != one.size:
                    opened = os.open(one.path, one.flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC) | os.O_CLOEXEC)
                    made[one.path.lstrip("/")] = opened
                    os.lseek(opened, one.position, os.SEEK_SET)
        for name, fd in description.pipes.items():
            try:
                made[name] = os.dup(fd) if attached and fd <= 2 else os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                made[name] = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        yield made
    finally:
        for fd in made.values():
            os.close(fd)


def _isolated(folder: Path, description: Description) -> list[str]:
    """What is put before CRIU's own words."""
    files = [
        (str(folder / FILES / one.content), msgspec.to_builtins(one), sorted({*beside(one)} - {*_paths(description)}))
        for one in description.files
        if one.content
    ]
    order = folder / "order.json"
    order.write_text(json.dumps({"folder": str(folder), "files": files}))
    spaces = ["unshare", "--pid", "--mount", "--net", "--ipc", "--fork", "--kill-child"]
    return [*spaces, sys.executable, "-I", isolation.__file__, str(order)]


def _paths(description: Description) -> list[str]:
    return [one.path for one in description.files]


# -- files --------------------------------------------------------------------------------------------------


@contextmanager
def _files_put(folder: Path, description: Description) -> Iterator[list[tuple[str, str]]]:
    """Inside, files are as the process had them. If the block fails, they are as they were before.

    Gives the files that have changed since, and where they lie from now on.

    What is moved is written down first, so that the next thaw puts right what a killed one has left.
    """
    finish_others()
    _check_unsaved(description)
    mark = f"{_ASIDE}{os.urandom(6).hex()}"
    putting, going = _changes(folder, description)
    # What belongs to a database gets a name by which SQLite finds it beside the one that is displaced.
    names = {
        name: f"{one.path}{mark}{name.removeprefix(one.path)}" for one in description.files for name in beside(one)
    }
    moving = [
        (path, names.get(path, f"{path}{mark}"), os.path.lexists(path))
        for path in [*(one.path for one in putting), *going]
    ]
    _check_written([path for path, _, there in moving if there])
    note = new_note(_NOTES) if moving else None
    if note is not None:
        note_down(note, {"by": who(), "image": msgspec.to_builtins(description), "files": moving})
    try:
        for one, (_, aside, _) in zip(putting, moving, strict=False):
            Path(one.path).parent.mkdir(parents=True, exist_ok=True)
            _check_parent(Path(one.path))
            _stage(folder / FILES / one.content, Path(f"{aside}-new"), one)
        for path, aside, there in moving:
            if there:
                os.rename(path, aside)
            if path not in going:
                os.rename(f"{aside}-new", path)
        yield [(path, aside) for path, aside, there in moving if there]
    except BaseException:
        _settle(moving, back=True)
        _forget(note)
        raise
    _forget(note)  # before the process writes much: from now on nobody puts the old files back


def _changes(folder: Path, description: Description) -> tuple[list[SavedFile], set[str]]:
    """The files that are put back, and those that must not stay beside them."""
    saved = _paths(description)
    putting = [
        one for one in description.files
        if one.content and not _same(folder / FILES / one.content, Path(one.path), one)
    ]  # fmt: skip
    going = {name for one in description.files for name in beside(one) if name not in saved and os.path.lexists(name)}
    changed = {*going, *(one.path for one in putting)}
    putting += [  # a log without its database says nothing
        one for one in description.files
        if one.content and one.path not in changed
        and any(name in changed for name in beside(one) if not name.endswith("-shm"))
    ]  # fmt: skip
    return putting, going


Moving = tuple[str, str, bool]
"""Where a file belongs, where what was there lies meanwhile, and whether anything was there."""


def _settle(moving: Iterable[Moving], *, back: bool) -> None:
    """Let files be as they were before, or as they are now. Done twice, it does nothing more."""
    for path, aside, there in moving:
        with suppress(FileNotFoundError):
            os.unlink(f"{aside}-new")
        if back and there and os.path.lexists(aside):
            os.rename(aside, path)
        elif back and not there:
            with suppress(FileNotFoundError):
                os.unlink(path)


def _forget(note: Path | None) -> None:
    if note is not None:
        note.unlink(missing_ok=True)
        fsync_directory(note.parent)


def finish_others() -> None:
    """Put right what a thaw has left that was killed: forward if its process lives, otherwise back."""
    for note, description, files in _left():
        with suppress(OSError):
            _settle(files, back=not is_running(description))
            _forget(note)


def unfinished() -> list[str]:
    """The programs whose files a thaw of this user has left half-way that was killed. The next thaw puts them right."""
    return [description.program for _, description, _ in _left()]


def _left() -> Iterator[tuple[Path, Description, list[Moving]]]:
    """What thaws have noted that were killed."""
    for note, about in notes(_NOTES):
        with suppress(ValueError, LookupError, msgspec.MsgspecError):
            files = [(str(path), str(aside), bool(there)) for path, aside, there in about["files"]]
            yield note, msgspec.convert(about["image"], Description), files


def _check_unsaved(description: Description) -> None:
    for one in description.files if not description.kept else ():
        if one.content:
            continue
        try:
            found = Path(one.path).stat()
        except OSError:
            raise NotThawed(f"{one.path} is missing, and was too large to be saved") from None
        if (found.st_size, found.st_mtime_ns) != (one.size, one.mtime_ns):
            raise NotThawed(f"{one.path} has changed since, and was too large to be saved", hint="Put it back first.")


def _check_written(paths: Iterable[str]) -> None:
    """Whoever writes a file would go on writing to what was displaced."""
    there = {}
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            there[found.st_dev, found.st_ino] = path
    for path, pid in sorted(writers(there, set()).items()):
        raise NotThawed(
            f"{path} would be put back, and process {pid} has it open for writing; nothing was changed",
            hint="End that process first, or look at a copy: `holdfast thaw REV --isolated`.",
        )


def _check_parent(path: Path) -> None:
    """A folder that has become a link would lead elsewhere."""
    parent = path.parent
    if parent.resolve() != parent:
        raise NotThawed(f"{parent} leads to {parent.resolve()} now", hint="Put the folder back where it was.")


def _stage(source: Path, staged: Path, one: SavedFile) -> None:
    try:
        with source.open("rb") as reading, staged.open("xb") as writing:
            shutil.copyfileobj(reading, writing, 2**20)
            os.fchown(writing.fileno(), one.uid, one.gid)
            os.fchmod(writing.fileno(), one.mode)
            writing.flush()
            os.fsync(writing.fileno())
    except OSError as error:
        staged.unlink(missing_ok=True)
        reason = "there is no room" if error.errno == errno.ENOSPC else str(error.strerror)
        raise NotThawed(f"{one.path} could not be put back: {reason}") from error


def _same(saved: Path, path: Path, one: SavedFile) -> bool:
    """Whether a file holds what it held, and may stay where it is."""
    with suppress(OSError):
        found = path.lstat()
        if (found.st_size, found.st_mode & 0o7777, found.st_uid, found.st_gid) == (
            one.size,
            one.mode,
            one.uid,
            one.gid,
        ):
            with saved.open("rb") as mine, path.open("rb") as theirs:
                while (some := mine.read(2**20)) == theirs.read(2**20):
                    if not some:
                        return True
    return False
