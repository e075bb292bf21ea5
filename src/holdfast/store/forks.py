"""What happens to open stores when the process forks.

Owns the at-fork hooks. Before a fork every store is brought to rest, so that no thread is inside SQLite or between two
steps of a transaction at that moment. In the child, descriptors of locks are closed (closing does not unlock: the
parent still has them), and everything else is kept alive for good, because SQLite's own clean-up on close would act on
the parent's database. A store that could not be brought to rest in time is marked so, and cannot be opened anew in the
child.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import apsw

from holdfast.errors import ForkedHandle
from holdfast.store.files import unavailable

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


_live: weakref.WeakSet[Forkable] = weakref.WeakSet()
_guard = threading.RLock()  # a signal handler may fork inside watch()
_resting: list[tuple[Forkable, list[bool]]] = []

_inherited: dict[tuple[int, int], list[apsw.Connection] | None] = {}
"""In a forked child: the parent's connections by database file; None when they were not at rest at the fork."""


def watch(thing: Forkable) -> None:
    with _guard:
        _live.add(thing)


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


def _before() -> None:
    _guard.acquire()
    deadline = time.monotonic() + REST_WAIT_S
    for thing in list(_live):
        rested: list[bool] = []
        _resting.append((thing, rested))  # first: an interrupt of the hook must not leave it at rest for good
        rested.append(thing.rest(deadline))


def _after_in_parent() -> None:
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
