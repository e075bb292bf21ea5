"""Who may write: the queue of writers before the catalog, and the lease of a branch.

Owns the files below ``locks/``. All of them are held with flock, so the system frees them when a process dies, however
it dies. Knows nothing of what is written. Always true: the lock of a branch alone never proves the right to write;
every commit also compares the branch's generation, so a holder that was passed over is fenced whatever it believes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.errors import AgentBusy, Damaged, HoldfastError, StoreBusy, StoreReadOnly
from holdfast.store.catalog import BranchRow, Event
from holdfast.store.cipher import PLAIN, Cipher
from holdfast.store.files import close_quietly, unavailable

BUSY_WAIT_S = 30.0
"""How long a writer queues for the store. Others hold it for milliseconds; only a stopped process takes longer."""

LEASE_POLL_S = 0.02
"""How often a waiting opener looks again whether a branch is free."""

WHO_LIMIT_BYTES = 4096
"""The most that is read from a lock file: it only describes the holder."""

_SYSTEM_LOCKS = Path("/proc/locks")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def open_lock(path: Path, *, readonly: bool = False) -> int:
    flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno in _READ_ONLY:
            raise StoreReadOnly(f"{path.parent.parent}: the store cannot be written here ({error.strerror})") from error
        raise unavailable(error, f"opening locks/{path.name}") from error


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class StoreLock:
    """The queue before ``BEGIN``. One owner at a time per object; the caller serialises its own threads.

    flock has no time limit of its own, and polling would let a quick writer starve the others. So a waiting caller
    lets a helper thread block in flock, where the kernel keeps the queue, and waits for that thread with a limit.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        """``readonly``: the file is there and cannot be written, as on a disk that is being rescued."""
        self._fd = open_lock(path, readonly=readonly)
        self._state = threading.Lock()
        # Plain locks as bells, because ringing one is a single step, which an interrupt cannot cut in two.
        self._wanted = threading.Lock()
        self._wanted.acquire()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._granted = False
        self._helper: threading.Thread | None = None
        self._waiting = False  # the helper is in flock, or has it and nobody took it over yet
        self._abandoned = False  # nobody waits for the helper any more: it must give the lock back

    def acquire(self, wait_s: float = BUSY_WAIT_S) -> None:
        try:
            with self._state:
                # While the helper is in flock on this descriptor, a try from here would succeed together with it.
                if not self._waiting:
                    if _try_flock(self._fd):
                        return
                    self._start_helper()
                    self._bell.acquire(blocking=False)
                    self._granted, self._waiting = False, True
                    self._wanted.release()
                self._abandoned = False
            self._bell.acquire(timeout=wait_s)
            if not self._stop_waiting(keep=True):
                raise StoreBusy(
                    f"other writers kept the store for {wait_s:g} s; nothing was written",
                    hint="Look for a stopped or hanging process that has this store open, then try again.",
                )
        except StoreBusy:
            raise
        except BaseException:
            self._stop_waiting(keep=False)
            raise

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Free the descriptor, and with it the lock."""
        with self._state:
            fd, self._fd = self._fd, -1
            if self._wanted.locked():
                self._wanted.release()
        if fd >= 0:
            close_quietly(fd)

    def abandon(self) -> None:
        """After fork, in the child: close without unlocking, without touching locks that other threads may hold."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def _stop_waiting(self, *, keep: bool) -> bool:
        """Leave the queue. True if the lock came at the last moment and ``keep`` says to take it."""
        with self._state:
            if self._waiting and not self._granted:
                self._abandoned = True
                return False
            self._waiting = False
            if not keep:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            return keep

    def _start_helper(self) -> None:
        if self._helper is None:
            helper = threading.Thread(target=self._queue, name="holdfast-queue", daemon=True)
            helper.start()
            self._helper = helper

    def _queue(self) -> None:
        while True:
            self._wanted.acquire()
            fd = self._fd
            if fd < 0:
                return
            fcntl.flock(fd, fcntl.LOCK_EX)
            with self._state:
                if self._fd != fd:
                    return  # closed meanwhile; the number may belong to another file by now
                if self._abandoned:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                    self._abandoned = self._waiting = False
                else:
                    self._granted = True
                    self._bell.release()


def describe_self(since_us: int) -> dict[str, object]:
    program = sys.argv[0] if sys.argv and sys.argv[0] else sys.executable
    return {"pid": os.getpid(), "host": os.uname().nodename, "program": program, "since": since_us}


def read_holder(path: Path, cipher: Cipher) -> dict[str, object]:
    """What the holder wrote about itself; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(WHO_LIMIT_BYTES + cipher.overhead)
        found = json.loads(cipher.unbox("lock", path.name, data))
    except (OSError, ValueError, HoldfastError):
        return {}
    return found if isinstance(found, dict) else {}


def _busy(path: Path, cipher: Cipher) -> AgentBusy:
    holder = read_holder(path, cipher)
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


class Lease:
    """The right to write one branch, until it is released, the process ends, or somebody takes it over."""

    def __init__(self, row: BranchRow, path: Path, fd: int, who: Mapping[str, object]) -> None:
        self.row = row
        self.who = who
        self.generation = row.generation
        self.path = path
        self._fd = fd

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def release(self) -> None:
        """Give the branch back. The file goes first, while it is still ours; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if _same_file(fd, self.path):
                self.path.unlink(missing_ok=True)
        except OSError:
            pass  # a left-over file has no meaning without its lock, and the next opener removes it
        finally:
            close_quietly(fd)

    def abandon(self) -> None:
        """After fork, in the child: the parent keeps the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


class Leases:
    """Opens and takes over branches, in one ``locks/`` directory."""

    def __init__(
        self,
        directory: Path,
        read_row: Callable[[int], BranchRow],
        raise_generation: Callable[[int, int, Event | None], BranchRow | None],
    ) -> None:
        """``raise_generation(b, g, event)`` commits generation g + 1 if it is still g; returns the row, else None."""
        self.cipher: Cipher = PLAIN
        self._directory = directory
        self._read_row = read_row
        self._raise = raise_generation
        self._held: set[Lease] = set()

    def take(self, b: int, who: Mapping[str, object], event: Event | None, *, wait_s: float, takeover: bool) -> Lease:
        deadline = time.monotonic() + wait_s
        while True:
            row = self._read_row(b)
            try:
                lease = self._attempt(row, who, event, takeover=takeover)
            except AgentBusy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LEASE_POLL_S)
                continue
            if lease is not None:
                return self._kept(lease)

    def again(self, released: Lease, since_us: int) -> Lease | None:
        """A lease that was released, taken up again; None when somebody else has had the branch since.

        Nothing is written to the catalog: as long as the generation is the same, nobody else has written the branch.
        """
        path, who = released.path, {**released.who, "since": since_us}
        fd = self._lock(path)
        try:
            try:
                row = self._read_row(released.row.b)
            except Damaged:
                path.unlink(missing_ok=True)  # the branch is gone
                return None
            if row.generation != released.generation or not _same_file(fd, path):
                if row.generation > released.generation:
                    path.unlink(missing_ok=True)  # of the past: nobody will look for it again
                return None
            self._write_who(fd, path, who)
            lease = Lease(row, path, fd, who)
            fd = -1
        finally:
            if fd >= 0:
                close_quietly(fd)
        return self._kept(lease)

    def _kept(self, lease: Lease) -> Lease:
        """Remembered until it is released. Threads come here at the same time: each step is one that cannot be cut."""
        for other in tuple(self._held):
            if not other.held:
                self._held.discard(other)
        self._held.add(lease)
        return lease

    def held(self, b: int) -> Lease | None:
        """The lease that this process has on a branch."""
        return next((lease for lease in tuple(self._held) if lease.held and lease.row.b == b), None)

    def alive(self, row: BranchRow, generation: int) -> bool:
        """Whether somebody holds a branch's lock of that generation. A file that is missing or free has no holder."""
        path = self._path(row, generation)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if not _try_flock(fd):
                return True
            if generation < row.generation:  # of the past: nobody will look for a holder here again
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            return False
        finally:
            close_quietly(fd)

    def close(self) -> None:
        for lease in tuple(self._held):
            lease.release()
        self._held = set()

    def abandon(self) -> None:
        for lease in self._held:
            lease.abandon()
        self._held = set()

    def holders(self) -> list[dict[str, object]]:
        """Who holds which lock file, as far as the system tells. Looks without locking, so nobody is disturbed."""
        try:
            locked = {
                line.split()[5].rpartition(":")[2] for line in _SYSTEM_LOCKS.read_text().splitlines() if "FLOCK" in line
            }
            files = [path for path in self._directory.iterdir() if "-" in path.name]
        except OSError:
            return []
        found: list[dict[str, object]] = []
        for path in files:
            try:
                held = str(path.stat().st_ino) in locked
            except OSError:
                continue  # it went away meanwhile
            if held and (holder := read_holder(path, self.cipher)):
                found.append(holder)
        return found

    def _path(self, row: BranchRow, generation: int) -> Path:
        return self._directory / f"{row.uuid.hex()}-{generation}"

    def _attempt(
        self, row: BranchRow, who: Mapping[str, object], event: Event | None, *, takeover: bool
    ) -> Lease | None:
        """One try at the generation after ``row``'s. None when somebody else moved the branch on meanwhile."""
        current = self._path(row, row.generation)
        next_path = self._path(row, row.generation + 1)
        current_fd = -1 if takeover or row.generation == 0 else self._lock(current)
        next_fd = -1
        try:
            if current_fd >= 0 and not _same_file(current_fd, current):
                return None  # released meanwhile, and perhaps taken up again
            # The next generation's file comes before the catalog, so that whoever sees the new number in the catalog
            # finds its lock held.
            next_fd = self._lock(next_path)
            self._write_who(next_fd, next_path, who)
            raised = self._raise(row.b, row.generation, event) if _same_file(next_fd, next_path) else None
            if raised is None:
                if self._read_row(row.b).generation > row.generation + 1:
                    next_path.unlink(missing_ok=True)  # of the past: nobody will look for it again
                return None
            lease = Lease(raised, next_path, next_fd, who)
            next_fd = -1
            with suppress(OSError):  # a left-over file has no meaning without its lock, and the branch is ours
                if not takeover or not self._taken(current):
                    current.unlink(missing_ok=True)
            return lease
        finally:
            for fd in (next_fd, current_fd):
                if fd >= 0:
                    close_quietly(fd)

    def _taken(self, path: Path) -> bool:
        """Whether somebody still holds a lock file. One who was passed over keeps it, so that it is known to live."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return not _try_flock(fd)
        finally:
            close_quietly(fd)

    def _write_who(self, fd: int, path: Path, who: Mapping[str, object]) -> None:
        data = json.dumps(dict(who), default=str).encode()[:WHO_LIMIT_BYTES]
        os.ftruncate(fd, 0)
        os.pwrite(fd, self.cipher.box("lock", path.name, data), 0)

    def _lock(self, path: Path) -> int:
        fd = open_lock(path)
        try:
            if not _try_flock(fd):
                raise _busy(path, self.cipher)
        except BaseException:
            close_quietly(fd)
            raise
        return fd
