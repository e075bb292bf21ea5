"""What happens to open stores when the process forks.

Owns the at-fork hooks. Before a fork every store is brought to rest, so that no thread is inside SQLite or between two
steps of a transaction at that moment. In the child, descriptors of locks are closed (closing does not unlock: the
parent still has them), and connections are kept alive for good, because SQLite's own clean-up on close would act on the
parent's database. A store that could not be brought to rest in time is marked so, and cannot be opened anew in the
child.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from typing import Protocol

REST_WAIT_S = 5.0
"""How long a fork waits for commits in flight. Only a writer that is stuck behind another process takes longer."""


class Forkable(Protocol):
    """Something open that a fork would tear."""

    def rest(self, deadline: float) -> bool:
        """Take every lock inside this object; False if one could not be had before ``deadline`` (monotonic)."""

    def resume(self) -> None:
        """Give those locks back, in the parent."""

    def abandon(self, rested: bool) -> None:
        """In the child: close lock descriptors, leak connections, refuse every later use."""


_live: weakref.WeakSet[Forkable] = weakref.WeakSet()
_guard = threading.Lock()
_resting: list[tuple[Forkable, bool]] = []


def watch(thing: Forkable) -> None:
    with _guard:
        _live.add(thing)


def unwatch(thing: Forkable) -> None:
    with _guard:
        _live.discard(thing)


def leak(thing: object) -> None:
    """Make sure that no destructor of ``thing`` ever runs in this process, not even at exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _before() -> None:
    _guard.acquire()
    deadline = time.monotonic() + REST_WAIT_S
    _resting[:] = [(thing, thing.rest(deadline)) for thing in list(_live)]


def _after_in_parent() -> None:
    for thing, _ in _resting:
        thing.resume()
    _resting.clear()
    _guard.release()


def _after_in_child() -> None:
    for thing, rested in _resting:
        thing.abandon(rested)
    _resting.clear()
    _live.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
