"""Who may write a branch of a store in a directory: a locked file for each writer.

Owns the files ``BRANCH-GENERATION`` below ``locks/``. They are held with locks of the open file, which the system frees
when a process dies, however it dies, and which can be asked about without taking them. Knows nothing of what is
written. What always holds: the lock of a branch alone never proves the right to write; every commit also compares the
branch's generation, so a holder that was passed over is fenced whatever it believes. An open lock file belongs from its
first moment to an object that closes it when it is dropped; and what an interrupted call has left is given back by the
next one, even if somebody keeps the traceback. So no interrupt leaves a branch locked.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path

from holdfast.errors import AgentBusy, HoldfastError, StoreFailed
from holdfast.store import engine
from holdfast.store.cipher import PLAIN, Cipher
from holdfast.store.files import unavailable

POLL_S = 0.02
"""How often a waiting opener looks again whether a branch is free."""

TRIES = 100
"""How often others may be faster by a moment before something else must be wrong."""

WHO_MAX_BYTES = 4096
"""The most that is read from a lock file: it only describes the holder."""

_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_FREE = fcntl.F_UNLCK.to_bytes(2, sys.byteorder)


class FileLease:
    """The lock of one generation of a branch, and with it the right to write, unless a later generation was taken."""

    _file: FileIO | None = None

    def __init__(self, path: Path, b: int, generation: int, who: Mapping[str, object]) -> None:
        self.path = path
        self.b = b
        self.generation = generation
        self.who = who

    @property
    def held(self) -> bool:
        return self._file is not None and not self._file.closed

    def release(self) -> None:
        """Give the branch back. The file goes first, while it is still ours. Can be repeated."""
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
        self.abandon()

    def lock(self) -> bool:
        """Open the file, making it if need be, and lock it; False when somebody else has it."""
        try:
            self._file = _opened(self.path)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK)
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
    raise StoreFailed(f"locks/{path.name} cannot be opened: something else is there", hint="Remove it.")


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


class _Attempt:
    """The locks of a call that is under way. What is left here when it has ended, nobody has."""

    def __init__(self, frame: int) -> None:
        self.frame = frame  # its address: a reference would keep alive what is to be collected
        self.locks: list[FileLease] = []

    def drop(self) -> None:
        while self.locks:
            self.locks[-1].release()
            self.locks.pop()

    @property
    def running(self) -> bool:
        # Without this very frame: a frame that refers to itself is not collected at once if an interrupt comes.
        (tops := sys._current_frames()).pop(threading.get_ident(), None)  # noqa: SLF001  nothing else tells
        for top in (sys._getframe().f_back, *tops.values()):  # noqa: SLF001
            frame = top
            while frame is not None:
                if id(frame) == self.frame:
                    return True
                frame = frame.f_back
        return False


_attempts: set[weakref.ref[_Attempt]] = set()
"""Of all stores: two handles of this process may have the same one open."""


def _begin() -> _Attempt:
    attempt = _Attempt(id(sys._getframe(1)))  # noqa: SLF001
    _attempts.add(weakref.ref(attempt, _attempts.discard))
    return attempt


def _clean_up() -> bool:
    """Give back what interrupted calls have left. Whether there was something."""
    found = False
    for one in tuple(_attempts):
        attempt = one()
        if attempt is not None and attempt.locks and not attempt.running:
            attempt.drop()
            found = True
    return found


def describe_self() -> dict[str, object]:
    program = sys.argv[0] if sys.argv and sys.argv[0] else sys.executable
    since = time.time_ns() // 1000
    return {"pid": os.getpid(), "host": os.uname().nodename, "program": program, "since": since}


def had(attempt: Callable[[], bool], wait_s: float, most_s: float = POLL_S) -> bool:
    """Attempt to become a branch's writer until that succeeds; False: others were always faster by a moment.

    While somebody has it the attempt raises ``AgentBusy``, and so does this when the time is over. ``most_s``: how long
    it waits after a while before it looks again.
    """
    deadline, pause, faster = time.monotonic() + wait_s, POLL_S, 0
    while faster < TRIES:
        try:
            if attempt():
                return True
            faster += 1
        except AgentBusy:
            if time.monotonic() >= deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, most_s)
    return False


class FileLeases:
    """The branches of the store whose ``locks/`` is ``folder``."""

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
        attempt = _begin()
        try:
            if had(lambda: self._try(attempt, branch, read, rise, about, b=b, takeover=takeover), wait_s):
                # One step. Before it the lock is the attempt's; after it nobody but the caller has the lease, so that
                # it is dropped if an interrupt comes before the caller has it.
                return attempt.locks.pop()
            raise StoreFailed(f"locks/{branch.hex()}-*: something else than a lock file is there", hint="Remove it.")
        finally:
            attempt.drop()

    def _try(
        self,
        attempt: _Attempt,
        branch: bytes,
        read: Callable[[], int],
        rise: Callable[[int], bool],
        who: Mapping[str, object],
        *,
        b: int,
        takeover: bool,
    ) -> bool:
        """Whether the last lock of the attempt is the lease; False: somebody else was faster, so look again."""
        attempt.drop()
        generation = read()
        if generation and not takeover:
            # Whoever has released the branch, and takes it up again at this moment, must not be passed over.
            current = self._lock(attempt, self._path(branch, generation), b, generation, who)
            if not current.sound():
                return False
        # The next generation's file comes before the catalog, so that whoever sees the new number in the catalog
        # finds its lock held.
        taken = self._lock(attempt, self._path(branch, generation + 1), b, generation + 1, who)
        if not taken.sound():
            return False
        taken.describe(self._cipher)
        if not rise(generation):
            return False
        if generation and takeover:
            self._discard(self._path(branch, generation))
        return True

    def again(self, lease: engine.Lease, read: Callable[[], int]) -> FileLease | None:
        """Nothing is written: as long as the generation is the same, nobody else has written the branch."""
        if not isinstance(lease, FileLease):
            raise TypeError("a lease of another kind of store")
        attempt = _begin()
        try:
            return attempt.locks.pop() if self._try_again(attempt, lease, read) else None
        finally:
            attempt.drop()

    def _try_again(self, attempt: _Attempt, lease: FileLease, read: Callable[[], int]) -> bool:
        who = {**lease.who, "since": time.time_ns() // 1000}
        taken = self._lock(attempt, lease.path, lease.b, lease.generation, who)
        if not taken.sound() or read() != lease.generation:
            return False
        taken.describe(self._cipher)
        return True

    def alive(self, branch: bytes, generation: int) -> bool:
        """Whether somebody holds that generation of a branch. A file that is missing or free has no holder."""
        path = self._path(branch, generation)
        if _locked(path):
            return True
        if os.path.exists(self._path(branch, generation + 1)):
            self._discard(path)  # of the past: nobody will look for it again
        return False

    def holders(self) -> list[dict[str, object]]:
        """Who holds which branch. Looks without locking, so nobody is disturbed."""
        try:
            files = sorted(path for path in self._folder.iterdir() if "-" in path.name)
        except OSError as error:
            raise unavailable(error, "looking at locks") from error
        return [holder for path in files if _locked(path) and (holder := _holder(path, self._cipher))]

    def abandon(self) -> None:
        """After fork, in the child: everything here is the parent's."""
        for one in tuple(self._all):
            lease = one()
            if lease is not None:
                lease.abandon()

    def close(self) -> None:
        for one in tuple(self._all):
            lease = one()
            if lease is not None:
                lease.release()

    def _path(self, branch: bytes, generation: int) -> Path:
        return self._folder / f"{branch.hex()}-{generation}"

    def _lock(self, attempt: _Attempt, path: Path, b: int, generation: int, who: Mapping[str, object]) -> FileLease:
        lock = FileLease(path, b, generation, who)
        self._all.add(weakref.ref(lock, self._all.discard))
        attempt.locks.append(lock)
        if not lock.lock() and not (_clean_up() and lock.lock()):
            attempt.drop()  # whoever waits now has nothing
            raise busy(_holder(path, self._cipher))
        return lock

    def _discard(self, path: Path) -> None:
        """Remove the file of a generation that has passed, unless somebody who was passed over still holds it."""
        attempt = _begin()
        try:
            with suppress(HoldfastError):  # it has no meaning without its lock
                self._lock(attempt, path, 0, 0, {})
        finally:
            attempt.drop()


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
