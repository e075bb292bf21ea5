"""Who may write a branch of a store in a directory: a locked file for each writer.

Owns the files ``BRANCH-GENERATION`` below ``locks/``. They are held with locks of the open file, which the system frees
when a process dies, however it dies, and which can be asked about without taking them. Whoever lets a branch rest keeps
its file open, without the lock: to others that is the same as giving it back. Knows nothing of what is written. What
always holds: the lock of a branch alone never proves the right to write; every commit also compares the branch's
generation, so a holder that was passed over is fenced whatever it believes. Locks are taken where no signal handler can
raise (``apart``), and given back when whoever asked for one was interrupted, or by a lease that he has already: no
interrupt leaves a branch locked.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import sys
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

from holdfast.errors import AgentBusy, HoldfastError, StoreFailed
from holdfast.store import engine
from holdfast.store.cipher import PLAIN, Cipher
from holdfast.store.files import unavailable
from holdfast.store.processes import apart

POLL_S = 0.02
"""How often a waiting opener looks again whether a branch is free."""

TRIES = 100
"""How often others may be faster by a moment before something else must be wrong."""

WHO_MAX_BYTES = 4096
"""The most that is read from a lock file: it only describes the holder."""

L = TypeVar("L", bound=engine.Lease)

_LOCK, _UNLOCK = (struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))
_FREE = fcntl.F_UNLCK.to_bytes(2, sys.byteorder)


class FileLease:
    """The lock of one generation of a branch, and with it the right to write, unless a later generation was taken."""

    fresh = True  # whoever has passed us over sees on this machine whether we live
    unclean = False  # whoever had the branch before has not given it back: its process was killed, or failed
    _file: FileIO | None = None
    _rests = False

    def __init__(self, path: Path, b: int, generation: int, who: Mapping[str, object]) -> None:
        self.path = path
        self.b = b
        self.generation = generation
        self.who = who

    @property
    def held(self) -> bool:
        return self.is_open and not self._rests

    @property
    def is_open(self) -> bool:
        return self._file is not None and not self._file.closed

    def confirm(self) -> None:
        """It is always fresh."""

    def rest(self) -> None:
        """Give the branch back, and be quick to take it again. Can be repeated."""
        if self.held and self._file is not None:
            self.end_well()
            try:
                self._rests = True  # first: whoever is interrupted must not believe that he is the writer
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _UNLOCK)
            except BaseException as error:
                self.abandon()  # its lock goes with it
                if not isinstance(error, (OSError, ValueError)):
                    raise

    def release(self) -> None:
        """Give the branch back. The file goes first, while it is still ours. Can be repeated.

        Where it rests somebody else may just be taking the branch by that file: then the one of the next generation
        keeps others out.
        """
        file = self._file
        if file is not None and not file.closed:
            with suppress(OSError, ValueError):  # a left-over file has no meaning without its lock
                if _same_file(file, self.path):
                    self.path.unlink(missing_ok=True)
            self.abandon()

    def abandon(self) -> None:
        """Close the file only: after fork, in the child, the parent keeps the lock."""
        if self._file is not None:
            with suppress(OSError):  # it is closed then, whatever that says
                self._file.close()

    def __del__(self) -> None:
        if self._rests:
            self.release()
        self.abandon()

    def lock(self) -> bool:
        """Lock the file, which is open still, or opened, or made; False when somebody else has it."""
        try:
            if not self.is_open:
                self._file = _opened(self.path)
            self._rests = False  # first: whoever is interrupted releases it
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK)  # type: ignore[arg-type]  # open by now
        except BlockingIOError:
            self.abandon()
            return False
        except OSError as error:
            raise unavailable(error, f"locking locks/{self.path.name}") from error
        return True

    def sound(self) -> bool:
        """Whether the file is still the one that its path names: another holder may have removed it meanwhile."""
        try:
            return self._file is not None and _same_file(self._file, self.path)
        except OSError as error:
            raise unavailable(error, f"looking at locks/{self.path.name}") from error

    def described(self) -> bool:
        """Whether a holder is named in it. When one ends well, the file is removed, or at least empty."""
        try:
            return self._file is not None and os.fstat(self._file.fileno()).st_size > 0
        except OSError as error:
            raise unavailable(error, f"looking at locks/{self.path.name}") from error

    def end_well(self) -> None:
        """Nothing failed, and the holder ends. The lock stays: a thread may still be at something."""
        with suppress(OSError, ValueError):
            if self._file is not None:
                os.ftruncate(self._file.fileno(), 0)

    def describe(self, cipher: Cipher) -> None:
        """Say in the file who holds it."""
        data = json.dumps(dict(self.who), default=str).encode()[:WHO_MAX_BYTES]
        try:
            if self._file is not None:
                os.ftruncate(self._file.fileno(), 0)
                os.pwrite(self._file.fileno(), cipher.box("lock", self.path.name, data), 0)
        except OSError as error:
            raise unavailable(error, f"writing locks/{self.path.name}") from error


def _opened(path: Path) -> FileIO:
    # FileIO opens by itself, so that there is no moment at which the descriptor is a mere number. It would follow a
    # link: nothing is written before ``sound`` has said that there is none.
    for _ in range(TRIES):
        try:
            return FileIO(path, "r+")
        except FileNotFoundError:
            pass
        try:
            return FileIO(path, "x+")
        except FileExistsError:
            continue
    raise StoreFailed(f"locks/{path.name} cannot be opened: this is not a lock file", hint="Remove it.")


def _same_file(file: FileIO, path: Path) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file.fileno())
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino) and stat.S_ISREG(mine.st_mode)


def _locked(path: Path) -> bool:
    """Whether somebody holds a lock file. Nobody is disturbed by that."""
    try:
        with FileIO(path, "r") as file:
            return fcntl.fcntl(file, fcntl.F_OFD_GETLK, _LOCK)[:2] != _FREE
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unavailable(error, f"looking at locks/{path.name}") from error


def describe_self() -> dict[str, object]:
    program = sys.argv[0] if sys.argv and sys.argv[0] else sys.executable
    since = time.time_ns() // 1000
    return {"pid": os.getpid(), "host": os.uname().nodename, "program": program, "since": since}


def once(attempt: Callable[[], L | None]) -> L | None:
    """Attempt to lock something where no signal handler can raise. Whoever is interrupted has nothing then.

    In there nothing is asked that the caller may hold: it may be such a handler, in the middle of a read.
    """
    got: list[L | None] = []
    try:
        apart(lambda: got.append(attempt()))
        return got.pop()
    finally:
        for lease in got:
            if lease is not None:
                lease.release()


def had(attempt: Callable[[], L | None], wait_s: float, most_s: float = POLL_S) -> L | None:
    """Attempt to become a branch's writer until that succeeds; None: others were always faster by a moment.

    While somebody has it the attempt raises ``AgentBusy``, and so does this when the time is over. ``most_s``: how long
    it waits after a while before it looks again.
    """
    deadline, pause, faster = time.monotonic() + wait_s, POLL_S, 0
    while faster < TRIES:
        try:
            lease = attempt()
            if lease is not None:
                return lease
            faster += 1
        except AgentBusy:
            if time.monotonic() >= deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, most_s)
    return None


class FileLeases:
    """The branches of the store whose ``locks/`` is ``folder``."""

    said: Mapping[str, object] = {}

    def __init__(self, folder: Path, cipher: Cipher = PLAIN) -> None:
        self._folder = folder
        self._cipher = cipher
        self._all: set[weakref.ref[FileLease]] = set()

    def take(
        self,
        branch: bytes,
        read: Callable[[], int],
        rise: Callable[[int], bool],
        who: Mapping[str, object],
        *,
        b: int,
        wait_s: float,
        takeover: bool,
    ) -> FileLease:
        about = {**describe_self(), **who}

        def attempt(generation: int) -> FileLease | None:
            left = False
            with ExitStack() as held, ExitStack() as undo:
                if generation and not takeover:
                    # Whoever has released the branch, and takes it up again at this moment, must not be passed over.
                    current = self._lock(self._path(branch, generation), b, generation, about)
                    held.callback(current.release)
                    if not current.sound():
                        return None
                    left = current.described()
                # The next generation's file comes before the catalog, so that whoever sees the new number in the
                # catalog finds its lock held.
                lease = self._lock(self._path(branch, generation + 1), b, generation + 1, about)
                undo.callback(lease.release)
                if not lease.sound():
                    return None
                lease.describe(self._cipher)
                if not rise(generation):
                    return None
                undo.pop_all()
            if generation and takeover:
                self._discard(self._path(branch, generation))
            lease.unclean = left
            return lease

        lease = had(lambda: once(partial(attempt, read())), wait_s)
        if lease is None:
            raise StoreFailed(f"locks/{branch.hex()}-*: this is not a lock file", hint="Remove it.")
        return lease

    def again(self, lease: engine.Lease, read: Callable[[], int]) -> FileLease | None:
        """Nothing is written: as long as the generation is the same, nobody else has written the branch."""
        if not isinstance(lease, FileLease):
            raise TypeError("a lease of another kind of store")
        if lease.held:
            raise busy(_holder(lease.path, self._cipher))
        self._all.add(weakref.ref(lease, self._all.discard))  # it may come from before a fork
        with ExitStack() as undo:
            undo.callback(lease.release)
            if not lease.lock():
                raise busy(_holder(lease.path, self._cipher))
            if not lease.sound():
                return None
            lease.who = {**lease.who, "since": time.time_ns() // 1000}
            lease.describe(self._cipher)
            if read() != lease.generation:
                return None
            undo.pop_all()
        return lease

    def alive(self, branch: bytes, generation: int) -> bool:
        """Whether somebody holds that generation of a branch. A file that is missing or free has no holder."""
        path = self._path(branch, generation)
        if _locked(path):
            return True
        if os.path.exists(self._path(branch, generation + 1)):
            self._discard(path)  # of the past: nobody will look for it again
        return False

    def living(self, some: Collection[tuple[bytes, int]]) -> set[tuple[bytes, int]]:
        return {one for one in some if self.alive(*one)}

    def outlives_s(self, branch: bytes, generation: int, said: Mapping[str, object]) -> float | None:  # noqa: ARG002
        """The lock is free when its holder has ended, and only then."""
        return None if self.alive(branch, generation) else 0.0

    def holders(self) -> list[dict[str, object]]:
        """Who holds which branch. Looks without locking, so nobody is disturbed."""
        try:
            files = sorted(path for path in self._folder.iterdir() if "-" in path.name)
        except FileNotFoundError:  # an empty folder gets lost on the way through an archive
            return []
        except OSError as error:
            raise unavailable(error, "looking at locks") from error
        return [holder for path in files if _locked(path) and (holder := _holder(path, self._cipher))]

    def mine(self) -> list[FileLease]:
        """Those that this process has, also such that rest."""
        return [lease for one in tuple(self._all) if (lease := one()) is not None and lease.is_open]

    def abandon(self) -> None:
        """After fork, in the child: everything here is the parent's."""
        for one in tuple(self._all):
            lease = one()
            if lease is not None:
                lease.abandon()

    def end_well(self) -> None:
        for one in tuple(self._all):
            lease = one()
            if lease is not None and lease.held:
                lease.end_well()
            elif lease is not None:
                lease.release()  # it may rest

    def close(self) -> None:
        for one in tuple(self._all):
            lease = one()
            if lease is not None:
                lease.release()

    def _path(self, branch: bytes, generation: int) -> Path:
        return self._folder / f"{branch.hex()}-{generation}"

    def _lock(self, path: Path, b: int, generation: int, who: Mapping[str, object]) -> FileLease:
        lock = FileLease(path, b, generation, who)
        self._all.add(weakref.ref(lock, self._all.discard))
        if not lock.lock():
            raise busy(_holder(path, self._cipher))
        return lock

    def _discard(self, path: Path) -> None:
        """Remove the file of a generation that has passed, unless somebody who was passed over still holds it."""
        with suppress(HoldfastError):  # it has no meaning without its lock
            self._lock(path, 0, 0, {}).release()


def _holder(path: Path, cipher: Cipher) -> dict[str, object]:
    """What the holder wrote about itself; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(WHO_MAX_BYTES + cipher.overhead)
        found = json.loads(cipher.unbox("lock", path.name, data))
    except (OSError, ValueError, RecursionError, HoldfastError):
        return {}
    return found if isinstance(found, dict) else {}


def busy(holder: dict[str, object]) -> AgentBusy:
    """What is raised when somebody has a branch. ``holder`` is what it says about itself."""
    if holder.get("pid") == os.getpid() and holder.get("host") == os.uname().nodename:
        holder["this_process"] = True
        text = "this process"
    elif holder:
        text = f"process {holder.get('pid')} on {holder.get('host')} ({holder.get('program')})"
    else:
        text = "another process"
    return AgentBusy(
        f"the branch is being written by {text}",
        holder=holder,
        hint="Wait for it with wait_s=, open read-only, or take the branch away from it with takeover=True.",
    )
