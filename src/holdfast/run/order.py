"""The order of completions: one at a time, the same when a run is executed again.

Owns who may go on next. Must not know what completed. What always holds: completions are let through in the order of
their records, live and on replay; after one on an event loop, the next waits until the loop has nothing left to do;
after one in a thread, until that thread calls again, its job is over, or ``GRACE_S`` has passed. That a call was
cancelled is a completion like any other: its caller is told when it is its turn.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from typing import Any

from holdfast.errors import Diverged

GRACE_S = 0.05
"""How long a released thread may go on before the next completion is let through. It may be waiting for that one."""

LOOK_S = 0.05
"""How often a thread that waits for its turn looks at whoever was released last."""

IDLE_TURNS_MAX = 1_000
"""Turns of a loop that count as busy: a task that spins must not stop all others."""

BLIND_TURNS = 12
"""Turns that are waited for on a loop that does not show whether it is idle."""

STALL_S = 60.0
"""How long a replay waits for a recorded call that nobody makes before it says that the program has diverged."""

HOLD_S = 5.0
"""How long a caller that is cancelled waits for its turn at most. Whoever stops a run that is stuck gets rid of it."""


class Order:
    """The queue of one run.

    Its callbacks run in empty contexts: the usual copy would hold on to the lane whose end says that a job is over.
    """

    def __init__(self, recorded: Iterable[str] = (), free: Iterable[str] = ()) -> None:
        self._expected = deque(recorded)  # paths, in the order in which they may complete
        self._free = set(free)  # recorded, too, and let through at any time
        self._stall_s = STALL_S
        self._changed = threading.Condition(threading.Lock())
        self._gone: set[str] = set()  # had their turn early, or never will
        self._parked: dict[str, tuple[Any, Any]] = {}  # path -> future and loop
        self._busy: _Thread | _Loop | None = None
        asyncio = sys.modules.get("asyncio")
        self._loop = asyncio._get_running_loop() if asyncio is not None else None  # where an async run is executed
        self._released = 0
        self._several = False
        self._failed: Diverged | None = None

    def several(self) -> None:
        """There is more than one flow of control from now on."""
        self._several = True

    @property
    def waiting_for(self) -> str:
        """The path whose completion comes next, empty when none is recorded."""
        return self._expected[0] if self._expected else ""

    def enter(self, path: str) -> None:
        """A call was completed and recorded just now: its turn comes after those before it."""
        with self._changed:
            self._expected.append(path)

    def drop(self, paths: Iterable[str]) -> None:
        """These will not be waited for: cancelled, or recorded by a program that has changed since."""
        with self._changed:
            self._gone.update(paths)
            self._advance()

    def now(self, path: str) -> None:
        """Go on at once: the caller blocks an event loop, so that nothing else can happen meanwhile."""
        with self._changed:
            self._alone(path)
            self._released += 1
            self._advance()

    def _alone(self, path: str) -> None:
        """Take a turn that nobody else can be waiting for. A stream completes after the calls that its items led to."""
        if self._expected and self._expected[0] == path:
            self._expected.popleft()
        elif path not in self._free:
            self._gone.add(path)

    def fail(self, error: Diverged) -> None:
        """The program has left the record somewhere: whoever waits for his turn is told, instead of waiting in vain."""
        with self._changed:
            self._failed = error
            for future, loop in self._parked.values():
                loop.call_soon_threadsafe(_raise_in, future, error)
            self._parked.clear()
            self._changed.notify_all()

    # -- threads ----------------------------------------------------------------------------------------

    def wait(self, path: str, lane: object) -> None:
        """Block until it is this path's turn."""
        with self._changed:
            if not self._several:
                self._alone(path)
                return
            if path in self._free:
                return
            self._back(lane)
            seen, stalled_at = self._released, time.monotonic() + self._stall_s
            while True:
                if self._failed is not None:
                    raise self._failed
                self._skip()
                left = self._busy_s()
                if not left and self._expected and self._expected[0] == path:
                    break
                if self._released != seen:
                    seen, stalled_at = self._released, time.monotonic() + self._stall_s
                if time.monotonic() >= stalled_at:
                    raise self._stalled(path)
                # The end of a thread's job may come unnoticed (see _job_over).
                self._changed.wait(min(LOOK_S if left else self._stall_s, max(0.0, stalled_at - time.monotonic())))
            self._expected.popleft()
            self._released += 1
            self._busy = _Thread(lane, self._job_over)
            self._advance()

    def called(self, lane: object) -> None:
        """A thread is back: it makes its next call."""
        if self._several:
            with self._changed:
                self._back(lane)
                self._advance()

    def _back(self, lane: object) -> None:
        busy = self._busy
        if isinstance(busy, _Thread) and (busy.lane() is lane or busy.thread == threading.get_ident()):
            self._busy = None

    def _job_over(self, _lane: object) -> None:
        # Runs wherever the last reference went away, perhaps inside this very lock. If that is taken, threads look at
        # the reference themselves before long, and the loop is asked to.
        if self._changed.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._changed.release()
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look_again, context=Context())

    def _busy_s(self) -> float:
        """How long to wait for what was released last; 0 when it is done."""
        busy = self._busy
        if busy is None:
            return 0.0
        if isinstance(busy, _Thread) and busy.lane() is None:
            busy = self._busy = self._after_thread()
        left = busy.until - time.monotonic() if busy is not None else 0.0
        if left <= 0:
            self._busy = None
            return 0.0
        return left

    def _after_thread(self) -> _Loop | None:
        """The job of a thread is over. Where there is an event loop, that may be what a task of it waits for."""
        if self._loop is None or self._loop.is_closed():
            return None
        busy = _Loop(GRACE_S)  # no longer: the loop may itself be blocked by somebody who waits for his turn
        self._loop.call_soon_threadsafe(self._until_idle, self._loop, 0, busy, context=Context())
        return busy

    # -- event loops ------------------------------------------------------------------------------------

    async def turn(self, path: str) -> None:
        """Return when it is this path's turn. One that is cancelled meanwhile is told then, not before.

        Otherwise several that are cancelled at once would be told in an order that nobody has recorded.
        """
        asyncio = sys.modules["asyncio"]
        with self._changed:
            alone = not self._several
            if alone:
                self._alone(path)
                self._released += 1
                if self._released % 64:
                    return
            if path in self._free:
                return
        if alone:
            await asyncio.sleep(0)  # other programs share this loop
            return
        loop = asyncio.get_running_loop()
        watch = loop.call_later(self._stall_s, self._check_stall, path, self._released)
        cancelled: BaseException | None = None
        try:
            while True:
                future = loop.create_future()
                with self._changed:
                    if self._failed is not None:
                        raise self._failed
                    self._parked[path] = future, loop
                    self._advance()
                try:
                    await future
                    break
                except asyncio.CancelledError as error:
                    if cancelled is None:
                        cancelled = error
                        loop.call_later(HOLD_S, self._give_up, path)
                    with self._changed:
                        if self._parked.pop(path, None) is None:  # its turn had come
                            break
        finally:
            watch.cancel()
        if cancelled is not None:
            raise cancelled

    def _give_up(self, path: str) -> None:
        with self._changed:
            parked = self._parked.pop(path, None)
            if parked is not None:
                self._gone.add(path)
                if not parked[0].done():
                    parked[0].set_result(None)
                self._advance()

    async def parked(self, path: str, took_s: float) -> None:
        """Wait for the caller to be cancelled: when that was recorded it took ``took_s``. Never returns."""
        asyncio = sys.modules["asyncio"]
        nothing = asyncio.get_running_loop().create_future()
        limit_s = self._stall_s + took_s
        while True:
            released = self._released
            await asyncio.wait((nothing,), timeout=limit_s)
            if self._released == released and self.waiting_for == path:
                raise self._unlike(
                    path,
                    "it is cancelled",
                    "it is not cancelled",
                    f"the call at {path} was cancelled when it was recorded, and is not now",
                )
            limit_s = self._stall_s

    def _check_stall(self, path: str, released: int) -> None:
        with self._changed:
            parked = self._parked.get(path)
            if parked is None:
                return
            future, loop = parked
            if self._released != released:
                loop.call_later(self._stall_s, self._check_stall, path, self._released)
            elif not future.done():
                future.set_exception(self._stalled(path))
                del self._parked[path]

    def _advance(self) -> None:
        """Let through who is next, with the lock held."""
        self._skip()
        left = self._busy_s()
        if self._expected and self._expected[0] in self._parked:
            future, loop = self._parked[self._expected[0]]
            if not left:
                del self._parked[self._expected.popleft()]
                self._released += 1
                busy = self._busy = _Loop(self._stall_s)
                # From the loop's own thread the plain call is enough; the other one wakes the loop up through a pipe.
                here = sys.modules["asyncio"]._get_running_loop() is loop
                soon = loop.call_soon if here else loop.call_soon_threadsafe
                soon(self._release, future, loop, busy, context=Context())
            elif left <= GRACE_S:  # nobody else looks again then
                loop.call_soon_threadsafe(loop.call_later, left, self._look_again, context=Context())
        self._changed.notify_all()

    def _look_again(self) -> None:
        with self._changed:
            self._advance()

    def _release(self, future: Any, loop: Any, busy: _Loop) -> None:
        if not future.done():
            future.set_result(None)
        loop.call_soon(self._until_idle, loop, 0, busy)

    def _until_idle(self, loop: Any, turns: int, what: _Loop) -> None:
        """Runs once in every turn of the loop until nothing else does."""
        ready = getattr(loop, "_ready", None)
        busy = len(ready) > 0 if ready is not None else turns < BLIND_TURNS
        if busy and turns < IDLE_TURNS_MAX:
            loop.call_soon(self._until_idle, loop, turns + 1, what)
            return
        with self._changed:
            if self._busy is what:
                self._busy = None
            self._advance()

    # -- both -------------------------------------------------------------------------------------------

    def _skip(self) -> None:
        while self._expected and self._expected[0] in self._gone:
            self._gone.discard(self._expected.popleft())

    def _stalled(self, path: str) -> Diverged:
        return self._unlike(
            self.waiting_for,
            f"the call at {self.waiting_for}",
            "no call",
            f"the call at {path} waits for the recorded one at {self.waiting_for}, which is not made",
        )

    def _unlike(self, path: str, expected: str, actual: str, message: str) -> Diverged:
        return Diverged(
            message,
            path=path,
            expected=expected,
            actual=actual,
            hint="Run the code that made the record, or mark the change with agent.version(name).",
        )


class Unordered(Order):
    """No order at all: for the plain use of an agent, which is not executed again."""

    def enter(self, path: str) -> None: ...

    def now(self, path: str) -> None: ...

    def called(self, lane: object) -> None: ...

    def wait(self, path: str, lane: object) -> None: ...

    async def turn(self, path: str) -> None: ...


def _raise_in(future: Any, error: Diverged) -> None:
    if not future.done():
        future.set_exception(error)


class _Loop:
    """Something was let through on an event loop that has not come to rest since. Not waited for longer than this."""

    def __init__(self, for_s: float) -> None:
        self.until = time.monotonic() + for_s


class _Thread:
    """A completion was let through in a thread. ``lane`` dies with the context of its job."""

    def __init__(self, lane: object, over: Any) -> None:
        self.lane = weakref.ref(lane, over)
        self.thread = threading.get_ident()
        self.until = time.monotonic() + GRACE_S
