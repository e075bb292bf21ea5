"""The process around a store: its threads, its stack, its forks, and how it is told from others.

Owns the threads in which something is done that no signal handler may cut in two, or that no event loop may wait for,
and the hooks at a fork. Knows nothing of what a store holds. What always holds: when ``apart`` raises what a handler
raised, the work has ended, one way or the other, or has not begun; a second interrupt does not wait for its end, and
whoever comes next waits for the locks that it has. Before a fork every store is brought to rest, so that no thread is
inside SQLite or between two steps of a transaction; in the child, descriptors of locks are closed (closing does not
unlock: the parent still has them), and everything else is kept alive for good, because SQLite's own clean-up on close
would act on the parent's database. A process counts as ended only where this machine, in this run of it and in the same
namespaces, has no such process any more; one that is stopped has not ended, and of one elsewhere nobody knows.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import apsw

from holdfast.errors import ForkedHandle
from holdfast.store.files import unavailable

if TYPE_CHECKING:
    from asyncio import Future
    from concurrent.futures import ThreadPoolExecutor


MARK, MARK_MAX_BYTES = "holdfast-store:", 200
"""What a file in memory is called that says that this process has a store open which is on a server; then its place."""

# -- who this is, and who has ended -----------------------------------------------------------------------------------


Identity = tuple[str, int, int]
"""The run of the machine, with namespaces, empty where nobody can tell; the process's number; when it began."""


def identity() -> Identity:
    """What tells this process from all others."""
    return _identity(os.getpid())


def boot() -> str:
    """The run of the machine; empty where nobody can tell."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def machine() -> str:
    """What the machine, or the container, is called for good. Many containers have none, or that of their image."""
    with suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return ""


@lru_cache(1)
def _identity(pid: int) -> Identity:
    if not (run := boot()):
        return "", pid, 0
    try:
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time")]
        return " ".join([run, *spaces]), pid, _stat(pid)[1]
    except (OSError, ValueError, IndexError):
        return "", pid, 0


def _stat(pid: int) -> tuple[str, int]:
    """The state of a process, and when it began."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return parts[0], int(parts[19])


def is_self(one: Sequence[object]) -> bool:
    """Whether a process that said this about itself is this one."""
    return bool(identity()[0]) and tuple(one[:3]) == identity()


def has_ended(one: Sequence[object]) -> bool:
    """Whether a process that said this about itself is known to have ended."""
    machine, pid, began = one[:3]
    if not machine or machine != identity()[0] or type(pid) is not int:
        return False
    try:
        state, since = _stat(pid)
        if since != began:
            return True  # its number was given to another one
        return state in {"Z", "X"} and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        with suppress(PermissionError):  # it is there, and hidden from us
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
    except (OSError, ValueError, IndexError):
        pass
    return False


# -- work in other threads --------------------------------------------------------------------------------------------


T = TypeVar("T")
WORKERS = 32
"""Threads in which the disk is read and written for event loops. More would only wait for each other."""

_pools: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pools.clear)  # its threads are the parent's


def off_loop(work: Callable[..., Any], *args: Any) -> Future[Any]:
    """Do ``work``, which waits for nothing but the disk, in a thread; it can be awaited on the running loop."""
    if not _pools:
        from concurrent.futures import ThreadPoolExecutor  # asyncio has loaded it; programs without it never need it

        _pools.append(ThreadPoolExecutor(WORKERS, "holdfast-disk"))
    return sys.modules["asyncio"].get_running_loop().run_in_executor(_pools[0], copy_context().run, work, *args)  # type: ignore[no-any-return] # a module found by its name has no types


def apart(work: Callable[[], T]) -> T:
    """Do ``work`` where no handler can raise in the middle of it, and return what it returns."""
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    context = copy_context()
    begun, over = threading.Lock(), threading.Lock()
    todo = [work]
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        if begun.acquire(blocking=False):
            try:
                results.append(context.run(todo.pop()))
            except BaseException as error:  # noqa: BLE001 - the caller's to raise
                errors.append(error)
        over.release()

    over.acquire()
    try:
        try:
            # One call, which an interrupt does not cut in two: a ``Thread`` has locks of its own, and one that is cut
            # short while it starts is kept for ever, with all that it refers to. A program that was interrupted twice
            # can end, as with a daemon.
            start_new_thread(do, ())
        except RuntimeError:  # the interpreter ends, and begins no thread any more
            return work()
        over.acquire()
    except BaseException:
        if not begun.acquire(blocking=False) and not results and not errors:
            over.acquire()
        todo.clear()
        raise
    if errors:
        raise errors.pop()
    return results[0]


# -- forks ------------------------------------------------------------------------------------------------------------


REST_WAIT_S = 5.0
"""How long a fork waits for commits in flight. Only a writer that is stuck behind another process takes longer."""


class Forkable(Protocol):
    """Something open that a fork would tear."""

    def rest(self, deadline: float) -> bool:
        """Take every lock inside this object; False if one could not be had before ``deadline`` (monotonic)."""

    def resume(self) -> None:
        """Give back those locks that ``rest`` took, all or some, in the parent."""

    def abandon(self, rested: bool) -> None:
        """In the child: close lock descriptors, leave connections alone, refuse every later use."""


rested = True  # whether everything was at rest at the last fork

_live: weakref.WeakSet[Forkable] = weakref.WeakSet()
_guard = threading.RLock()  # a signal handler may fork inside watch()
_resting: list[tuple[Forkable, list[bool]]] = []

_inherited: dict[tuple[int, int], list[apsw.Connection] | None] = {}
"""In a forked child: the parent's connections by database file; None when they were not at rest at the fork."""


def watch(thing: Forkable) -> None:
    with _guard:
        _live.add(thing)


def unwatch(thing: Forkable) -> None:
    with _guard:
        _live.discard(thing)


def remember(catalog: Path, connections: list[apsw.Connection] | None) -> None:
    """In the child: these came over with the fork; None if they were not at rest."""
    with suppress(OSError):
        found = catalog.stat()
        key = (found.st_dev, found.st_ino)
        there = _inherited.setdefault(key, [])
        if connections is None or there is None:
            _inherited[key] = None
        else:
            there.extend(connections)


def close_inherited(catalog: Path) -> None:
    """Before a forked child opens the same database: let SQLite forget the locks it believes to hold.

    SQLite counts locks per file and process, and the count came over with the fork while the locks did not. Closing the
    old connections resets it. They were at rest, and are set up so that closing touches neither log nor database.
    """
    if not _inherited:
        return
    try:
        found = catalog.stat()
    except OSError as error:
        raise unavailable(error, f"opening {catalog.parent}") from error
    key = (found.st_dev, found.st_ino)
    connections = _inherited.get(key, [])
    if connections is None:
        raise ForkedHandle(
            f"{catalog.parent}: a commit was going on in the parent when this process was forked,"
            " so the store cannot be opened here",
            hint="Open the store in a process started anew (subprocess, or multiprocessing with spawn).",
        )
    for connection in connections:
        connection.close(True)
    _inherited.pop(key, None)


def thawed() -> None:
    """This process was brought back from an image: it began at another time, perhaps on another machine."""
    _identity.cache_clear()


def _before() -> None:
    _guard.acquire()
    deadline = time.monotonic() + REST_WAIT_S
    for thing in list(_live):
        rested: list[bool] = []
        _resting.append((thing, rested))  # first: an interrupt of the hook must not leave it at rest for good
        rested.append(thing.rest(deadline))


def _after_in_parent() -> None:
    global rested  # noqa: PLW0603 - of the process
    rested = all(told == [True] for _, told in _resting)
    for thing, _ in _resting:
        thing.resume()
    _resting.clear()
    _guard.release()


def _after_in_child() -> None:
    for thing, rested in _resting:
        thing.abandon(rested == [True])
        # No destructor of it, or of what it holds, may ever run in this process, not even at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _resting.clear()
    _live.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# -- how much of the caller's stack is left ---------------------------------------------------------------------------


FRAMES = 100
"""More than anything in this package needs on its way to the disk and back."""


def check_room(frames: int = FRAMES) -> None:
    """Raise RecursionError, as Python would in a moment, where fewer frames are left."""
    try:
        sys._getframe(max(1, sys.getrecursionlimit() - frames))  # noqa: SLF001 - nothing else tells, or as fast
    except ValueError:  # the stack is not that deep
        return
    raise RecursionError("maximum recursion depth exceeded")
