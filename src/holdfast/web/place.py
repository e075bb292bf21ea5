"""The store that is looked at: opened once, opened again when it was replaced, and never asked on the event loop.

Owns the handle on the store, the threads that ask it and what they found. What always holds: nothing is written unless
changes are allowed; nobody's agent is taken over; whatever goes wrong is a ``HoldfastError`` with a sentence.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import anyio
import anyio.to_thread

import holdfast
from holdfast.errors import HoldfastError, StoreFailed
from holdfast.run import DURABLES, Worker

T = TypeVar("T")

AT_ONCE = 6
"""Questions and changes that go on at the same time; others wait."""
QUESTION_S = 30.0
"""After so long somebody is told that a question takes too long."""
GRACE_S = 30.0
"""So long the page waits, when it is stopped, for runs that it was asked to go on with."""


class Kept:
    """What was worked out before, the ``most`` that was asked for last; for several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T], until_s: float = math.inf) -> T | None:
        """What is kept under the key, or is made now; None where it would have to be made after ``until_s``."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return cast("T", self._found[key])
        if time.monotonic() > until_s:
            return None
        made = make()
        with self._lock:
            kept: T = self._found.setdefault(key, made)
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return kept


@dataclass
class Place:
    """A store by its name. ``loaded``: programs were loaded, whose types its values may have."""

    named: str | None
    changes: bool = False
    loaded: bool = False
    _store: holdfast.Store | None = None
    _identity: tuple[int, int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _limiter: anyio.CapacityLimiter | None = None

    def store(self) -> holdfast.Store:
        """The store as it is there now: one that was removed is gone, though its files are still open here."""
        with self._lock:
            if self._store is not None and (self._store.closed or self._identity != _identity(self._store.place)):
                store, self._store = self._store, None
                with suppress(HoldfastError):
                    store.close()
            if self._store is None:
                self._store = holdfast.open(self.named, create=False, readonly=not self.changes, inert=not self.loaded)
                self._identity = _identity(self._store.place)
            return self._store

    @property
    def shown(self) -> str:
        """Where it is, as a person may read it."""
        return self._store.place if self._store is not None else "the store"

    async def ask(self, question: Callable[[holdfast.Store], T]) -> T:
        """Ask it in a thread. A question that takes too long is left to itself, and whoever asked is told."""
        with anyio.move_on_after(QUESTION_S):
            return await anyio.to_thread.run_sync(
                lambda: question(self.store()), abandon_on_cancel=True, limiter=self._slots()
            )
        raise StoreFailed(
            f"This takes longer than {QUESTION_S:.0f} seconds.",
            hint="Ask for less, or use the command line, which waits.",
        )

    async def act(self, change: Callable[[holdfast.Store], T]) -> T:
        """Change something, in a thread that is waited for: nobody is told that it failed while it goes on."""
        return await anyio.to_thread.run_sync(lambda: change(self.store()), limiter=self._slots())

    def _slots(self) -> anyio.CapacityLimiter:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(AT_ONCE)
        return self._limiter

    def close(self) -> None:
        with self._lock, suppress(HoldfastError):
            if self._store is not None:
                worker = _working.pop(self._store, None)
                if worker is not None:
                    worker.stop(GRACE_S)
                self._store.close()


_working: WeakKeyDictionary[holdfast.Store, Worker] = WeakKeyDictionary()


def go_on(store: holdfast.Store, run: holdfast.RunInfo) -> bool:
    """Go on with a run in this process, if the programs that were loaded have its function. Nobody waits for it."""
    if store.inert or run.function not in DURABLES:
        return False
    worker = _working.setdefault(store, store.worker())
    Thread(target=worker.one, args=(run.agent, run.branch, run.id), name="holdfast-run", daemon=True).start()
    return True


def _identity(place: str) -> tuple[int, int] | None:
    """Which directory it is. One on a server has none."""
    if "://" in place:
        return None
    try:
        found = os.stat(place)  # noqa: PTH116 - it is text, as the store says it
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
