"""Streams as they come: what a tool has yielded so far is kept, and others can follow it.

Owns when items are written, and how they are read while there are more to come. What always holds: items are written in
their order, and none after the call's outcome, which has all of them; what was written is no answer to anybody: a
call that was interrupted is made again, as another attempt, with items of its own; whoever follows a run gets each item
of an attempt once, in order, and is told when another attempt begins.

    Kept(scope, path, ...)      in a call: ``add(item)``, then ``close()``, or ``leave()`` where it is interrupted
    Follow(view, run)           an iterator, and an async one, over ``Streamed``
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self

from holdfast.errors import HoldfastError, Unencodable
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed
from holdfast.run.past import OPEN, RunPast
from holdfast.run.scope import Scope, now_us
from holdfast.store.processes import off_loop

KEEP_S = 0.05
"""Items that come faster than this are written together."""
KEEP_MAX = 256
"""So are so many at most: whoever follows does not wait, and no record gets too long."""
LOOK_MAX_S = 0.5
"""How often whoever follows looks when nothing comes."""


class Streamed(NamedTuple):
    """One item of a stream. With index -1 there is none: an attempt begins again, and its items from 0 on."""

    attempt: int
    index: int  # type: ignore[assignment] # not the method that a tuple has
    item: Any
    path: str
    tool: str


class Kept:
    """What a stream has given, on its way to the line."""

    def __init__(self, scope: Scope, path: str, tool: str, number: int, stow: Callable[[Any], Stowed]) -> None:
        self._scope, self._path, self._tool, self._number, self._stow = scope, path, tool, number, stow
        past: RunPast = scope.past  # type: ignore[attr-defined] # what has a run's id is a run
        before = past.streams.get(path)
        self._attempt = before.attempt + 1 if before is not None else 1
        self._first = 0
        self._left: list[Any] = []  # not written yet
        self._wrote_s = 0.0
        self._timer: threading.Timer | None = None
        self._over = False
        self._lock = threading.Lock()
        if before is not None:
            self._record(None, None)

    def add(self, item: Any) -> None:
        """One more. It is written at once, or with those that come in the next moment."""
        with self._lock:
            self._left.append(item)
            if len(self._left) >= KEEP_MAX or time.monotonic() >= self._wrote_s + KEEP_S:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(KEEP_S, self._in_time)
                self._timer.daemon = True
                self._timer.start()

    def _in_time(self) -> None:
        with self._lock, suppress(HoldfastError):  # of a store that is closed by now
            self._write()

    def close(self) -> None:
        """The call has an outcome, which has all the items."""
        with self._lock:
            self._end()

    def leave(self) -> None:
        """The call is interrupted: write what is left."""
        with self._lock:
            with suppress(HoldfastError):  # whoever interrupted it has an error of his own
                self._write()
            self._end()

    def _end(self) -> None:
        self._over, self._left = True, []
        if self._timer is not None:
            self._timer.cancel()

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._over or self._scope.ended or not self._left:  # what comes after its end is no part of a run
            return
        try:
            stowed = self._stow(self._left)
        except Unencodable:  # what becomes of a result that cannot be saved is decided at the end
            self._end()
            return
        self._record(stowed.value, stowed)
        self._first += len(self._left)
        self._left = []
        self._wrote_s = time.monotonic()

    def _record(self, value: rec.Value, stowed: Stowed | None) -> None:
        scope = self._scope
        scope.write(
            rec.Progress(
                now_us(), scope.run_id, self._path, value, self._number, self._attempt, self._first, self._tool
            ),
            stowed,
        )


# -- following ------------------------------------------------------------------------------------------------


class Follow:
    """The items of the streams of one run, from the first on, until the run has ended. For plain and for async code."""

    def __init__(self, view: Any, run: RunPast, *, wait: bool) -> None:
        self._view, self._wait = view, wait
        self._run = run.id
        self._seen = run.number - 1  # the number of the newest record that was read
        self._past = RunPast(run.number, run.begin)
        self._counts: dict[str, tuple[int, int]] = {}  # of each stream: its attempt, and how many items were given
        self._ready: deque[Streamed] = deque()
        self._over = False
        self._pause_s = KEEP_S / 2

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Streamed:
        while not self._ready:
            if self._over:
                raise StopIteration
            if not self._look():
                time.sleep(self._pause_s)
        return self._ready.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Streamed:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            if not await off_loop(self._look):
                await sys.modules["asyncio"].sleep(self._pause_s)
        return self._ready.popleft()

    def _look(self) -> bool:
        """Whether something has come, or nothing will."""
        line, ended = self._view.line, False
        if line.count > self._seen:
            for number, record in line.records(self._seen):
                self._seen = number
                if isinstance(record, rec.RolledBack) and record.to < self._past.number:
                    ended = True
                elif record.run == self._run:
                    ended = ended or (isinstance(record, rec.Begin) and number > self._past.number)
                    self._take(number, record)
        self._over = ended or not self._wait or self._past.status not in OPEN
        self._pause_s = KEEP_S / 2 if self._ready else min(self._pause_s * 1.5, LOOK_MAX_S)
        return self._over or bool(self._ready)

    def _take(self, number: int, record: rec.Record) -> None:
        self._past.add(number, record)
        if isinstance(record, rec.Progress) and record.attempt:
            self._give(record.path, record.tool, record.attempt, record.first, self._view.read(record.value))
        elif isinstance(record, rec.Done) and record.path in self._past.streams and record.how != "stopped":
            given = self._past.streams[record.path]
            value = self._view.read(record.value)
            if isinstance(value, list):
                self._give(record.path, given.tool, given.attempt, 0, value)

    def _give(self, path: str, tool: str, attempt: int, first: int, items: list[Any] | None) -> None:
        known, count = self._counts.get(path, (attempt, 0))
        if attempt != known:
            count = 0
            self._ready.append(Streamed(attempt, -1, None, path, tool))
        for index, item in enumerate(items or [], first):
            if index >= count:
                self._ready.append(Streamed(attempt, index, item, path, tool))
                count = index + 1
        self._counts[path] = attempt, count
