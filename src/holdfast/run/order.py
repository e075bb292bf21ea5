"""The order of completions: one at a time, the same when a run is executed again.

Owns who may go on next. Must not know what completed. What always holds: completions are let through in the order of
their records, live and on replay; after one on an event loop, the next waits until the loop has nothing left to do.
That the program gave up a call is a completion like any other: its caller is told when it is its turn.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from typing import Any

from holdfast.errors import BadOption, Diverged

IDLE_TURNS_MAX = 1_000
"""Turns of a loop that count as busy: a task that spins must not stop all others."""

STALL_S = 60.0
"""How long a replay waits for a recorded call that nobody makes before it says that the program has diverged."""


class Order:
    """The queue of one run."""

    def __init__(self, recorded: Iterable[str] = ()) -> None:
        self._expected = deque(recorded)  # paths, in the order in which they may complete
        self._stall_s = STALL_S
        self._lock = threading.Lock()
        self._gone: set[str] = set()  # had their turn early, or never will
        self._parked: dict[str, tuple[Any, Any]] = {}  # path -> future and loop
        self._busy: list[Any] = []  # the loop on which something was let through and that has not come to rest since
        self._released = 0
        self._several = False
        self._failed: Diverged | None = None
        self._over = False

    def several(self) -> None:
        """There is more than one flow of control from now on."""
        self._several = True

    @property
    def waiting_for(self) -> str:
        """The path whose completion comes next, empty when none is recorded."""
        return self._expected[0] if self._expected else ""

    def enter(self, path: str) -> None:
        """A call was completed and recorded just now: its turn comes after those before it."""
        with self._lock:
            self._expected.append(path)

    def drop(self, paths: Iterable[str]) -> None:
        """These will not be waited for: cancelled, or recorded by a program that has changed since."""
        with self._lock:
            self._gone.update(paths)
            self._advance()

    def now(self, path: str) -> None:
        """Go on at once: in plain code nothing else can happen meanwhile."""
        with self._lock:
            self._alone(path)
            self._released += 1
            if self._several:
                self._advance()

    def _alone(self, path: str) -> None:
        """Take a turn that nobody else can be waiting for. A stream completes after the calls that its items led to."""
        if self._expected and self._expected[0] == path:
            self._expected.popleft()
        else:
            self._gone.add(path)

    def fail(self, error: Diverged) -> None:
        """The program has left the record somewhere: whoever waits for his turn is told, instead of waiting in vain."""
        with self._lock:
            self._failed = error
            for future, loop in self._parked.values():
                loop.call_soon_threadsafe(_raise_in, future, error)
            self._parked.clear()

    def give_up(self) -> None:
        """The run itself is cancelled: whoever is, from now on, does not wait for his turn."""
        self._over = True

    async def turn(self, path: str) -> None:
        """Return when it is this path's turn. One that is cancelled meanwhile is told then, not before.

        Otherwise several that are cancelled at once would be told in an order that nobody has recorded.
        """
        asyncio = sys.modules["asyncio"]
        if not self._several:
            with self._lock:
                self._alone(path)
                self._released += 1
            if not self._released % 64:
                await asyncio.sleep(0)  # other programs share this loop
            return
        loop = asyncio.get_running_loop()
        watch = loop.call_later(self._stall_s, self._check_stall, path, self._released)
        cancelled: BaseException | None = None
        try:
            while True:
                future = loop.create_future()
                with self._lock:
                    if self._failed is not None:
                        raise self._failed
                    self._parked[path] = future, loop
                    self._advance()
                try:
                    await future
                    break
                except asyncio.CancelledError as error:
                    cancelled = cancelled or error
                    with self._lock:
                        if self._parked.pop(path, None) is None:  # its turn had come
                            break
                        if self._over:
                            self._gone.add(path)
                            break
        finally:
            watch.cancel()
        if cancelled is not None:
            raise cancelled

    async def parked(self, path: str, took_s: float) -> None:
        """Wait for the caller to be cancelled: when that was recorded it took ``took_s``. Never returns."""
        asyncio = sys.modules["asyncio"]
        nothing = asyncio.get_running_loop().create_future()
        limit_s = self._stall_s + took_s
        while True:
            released = self._released
            await asyncio.wait((nothing,), timeout=limit_s)
            if self._released == released and self.waiting_for == path:
                message = f"the call at {path} was cancelled when it was recorded, and is not now"
                raise _unlike(message, path, "it is cancelled", "it is not cancelled")
            limit_s = self._stall_s

    def _check_stall(self, path: str, released: int) -> None:
        with self._lock:
            parked = self._parked.get(path)
            if parked is None:
                return
            future, loop = parked
            if self._released != released:
                loop.call_later(self._stall_s, self._check_stall, path, self._released)
            elif not future.done():
                first = self.waiting_for
                message = f"the call at {path} waits for the recorded one at {first}, which is not made"
                future.set_exception(_unlike(message, first, f"the call at {first}", "no call"))
                del self._parked[path]

    def _advance(self) -> None:
        """Let through who is next, with the lock held."""
        while self._expected and self._expected[0] in self._gone:
            self._gone.discard(self._expected.popleft())
        if self._busy and not self._busy[0].is_closed():
            return
        if not self._expected or self._expected[0] not in self._parked:
            return
        future, loop = self._parked.pop(self._expected.popleft())
        self._released += 1
        busy = self._busy = [loop]
        # From the loop's own thread the plain call is enough; the other one wakes the loop up through a pipe.
        here = sys.modules["asyncio"]._get_running_loop() is loop
        soon = loop.call_soon if here else loop.call_soon_threadsafe
        soon(self._release, future, loop, busy, context=Context())

    def _release(self, future: Any, loop: Any, busy: list[Any]) -> None:
        if not future.done():
            future.set_result(None)
        self._until_idle(loop, 0, busy)

    def _until_idle(self, loop: Any, turns: int, busy: list[Any]) -> None:
        """Runs once in every turn of the loop until nothing else does."""
        waiting: Any = getattr(loop, WATCHED, None) or loop._ready
        if len(waiting) > 0 and turns < IDLE_TURNS_MAX:
            soon = getattr(waiting, "call_soon", loop.call_soon)
            soon(self._until_idle, loop, turns + 1, busy)
            return
        with self._lock:
            if self._busy is busy:
                self._busy = []
            self._advance()


def _unlike(message: str, path: str, expected: str, actual: str) -> Diverged:
    hint = "Run the code that made the record, or mark the change with agent.version(name)."
    return Diverged(message, path=path, expected=expected, actual=actual, hint=hint)


WATCHED = "_holdfast_watched"


class Watched:
    """What is about to run on a loop that does not show it, as uvloop. Its length is 0 when nothing came since."""

    def __init__(self, loop: Any) -> None:
        self.call_soon = loop.call_soon
        self._came = self._seen = 0
        loop.call_soon = self._counted

    def _counted(self, *args: Any, **options: Any) -> Any:
        self._came += 1
        return self.call_soon(*args, **options)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        came, self._seen = self._came - self._seen, self._came
        return came


def watch(loop: Any) -> None:
    """See to it that a loop shows when it has nothing to do. Raises where it cannot."""
    if hasattr(loop, "_ready") or hasattr(loop, WATCHED):
        return
    try:
        setattr(loop, WATCHED, Watched(loop))
    except AttributeError:
        raise BadOption(
            f"the event loop is a {type(loop).__module__}.{type(loop).__qualname__}, which is not supported",
            hint="Async durable functions run on the event loops of asyncio and uvloop.",
        ) from None


class Unordered(Order):
    """No order at all: for the plain use of an agent, which is not executed again."""

    def enter(self, path: str) -> None: ...

    def now(self, path: str) -> None: ...

    async def turn(self, path: str) -> None: ...


def _raise_in(future: Any, error: Diverged) -> None:
    if not future.done():
        future.set_exception(error)
