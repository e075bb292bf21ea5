"""Time as it passes while a run is executed again: as the record says, not as the clock does.

Owns the event loop of a replay, its time, and the order of completions that moves it. Must not know what completes.
What always holds: a call takes as long as it did; its completion makes no timer due; and only when everything waits,
time goes on to the next timer, but to none that would cancel somebody who is about to get what is recorded. So a
timeout is over where it was, however slow or fast the machine is, and nobody sits one out. A timer that is set again
for ever keeps nobody from the end.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.run.order import Order
from holdfast.run.past import RunPast

IDLE_S = 0.02
"""How long everything has to wait until time goes on: threads may be about to say something."""
NEVER_S = 1e9
"""Of the replay's own time: when nothing else is left to wait for."""
_MARGIN_S = 60.0
_IDLE_MAX = 100
"""So often only timers go on, in a time in which the whole run was over long ago: then nothing is left to wait for."""


class _Waiting(selectors.DefaultSelector):
    """Waits for files as any, but for time only until nothing happens."""

    loop: ReplayLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(min(timeout, IDLE_S))
        if not found and not self.loop.elsewhere:
            self.loop.pass_on()
        return found


class ReplayLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of the record."""

    def __init__(self, took_s: float = 0.0) -> None:
        """``took_s``: how long all of it has taken, at most."""
        self._now_s = 0.0
        self._long_s = 2 * took_s + _MARGIN_S
        self.idle = 0  # how often only time has gone on since a call was made or answered
        self.elsewhere = 0  # calls on threads that have not ended
        self.served: set[Any] = set()  # tasks that wait for their turn to get what is recorded
        waiting = _Waiting()
        waiting.loop = self
        super().__init__(waiting)
        self._clock_resolution = 2e-7  # as fine as a float is at NEVER_S: a finer one would make no such timer due

    def time(self) -> float:
        return self._now_s

    def pass_to(self, at_s: float) -> None:
        """It is that late now, at least."""
        self._now_s = max(self._now_s, at_s)

    @property
    def next_s(self) -> float:
        """When the next timer is due."""
        return min((one.when() for one in self._timers()), default=NEVER_S)

    def _timers(self) -> list[Any]:
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined] # every loop of asyncio's own has it
        return [one for one in scheduled if not one.cancelled()]

    def pass_on(self) -> None:
        """Go on to the next timer. A timeout of a task that is about to be served is none: it was not over then."""
        timers = self._timers()
        spared = [one for one in timers if _whose(one) in self.served]
        next_s = min((one.when() for one in timers if one not in spared), default=self.next_s)
        self.idle += 1
        if self.idle > _IDLE_MAX and next_s > self._long_s:
            next_s = max([next_s, *(one.when() for one in timers if one.when() >= NEVER_S / 2)])
        late = [one for one in spared if one.when() <= next_s]
        if len(spared) < len(timers):
            for one in late:
                one._when = next_s + 1e-6
            heapq.heapify(self._scheduled)  # type: ignore[attr-defined]
        self.pass_to(next_s)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override] # as it is
        self.elsewhere += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._back)
        return future

    def _back(self, _: object) -> None:
        self.elsewhere -= 1


def _whose(timer: Any) -> Any:
    """The task that a timer of ``asyncio.timeout`` would cancel."""
    return getattr(getattr(timer._callback, "__self__", None), "_task", None)


class TimedOrder(Order):
    """The order of completions, each of which comes when it has taken as long as it did."""

    def __init__(self, recorded: Iterable[str], took_s: Mapping[str, float]) -> None:
        super().__init__(recorded)
        self._took_s = took_s
        self._stall_s = NEVER_S
        self._due_s: dict[str, float] = {}  # when the calls that were made complete

    def asked(self, path: str) -> None:
        """The call at this position is made now."""
        loop = _loop()
        if loop is not None:
            loop.idle = 0
            self._due_s[path] = loop.time() + self._took_s.get(path, 0.0)

    async def turn(self, path: str) -> None:
        loop = _loop()
        if loop is None:
            return await super().turn(path)
        task = asyncio.current_task()
        loop.served.add(task)
        try:
            await super().turn(path)
        finally:
            loop.served.discard(task)

    def _alone(self, path: str) -> None:
        self._come(_loop(), path)
        super()._alone(path)

    def _advance(self) -> None:
        while self._expected and self._expected[0] in self._gone:
            self._gone.discard(self._expected.popleft())
        free = not self._busy or self._busy[0].is_closed()
        if free and self._expected and self._expected[0] in self._parked:
            self._come(self._parked[self._expected[0]][1], self._expected[0])
        super()._advance()

    def _come(self, loop: Any, path: str) -> None:
        if isinstance(loop, ReplayLoop):
            loop.idle = 0
            loop.pass_to(min(self._due_s.get(path, 0.0), loop.next_s - 1e-6))


def _loop() -> ReplayLoop | None:
    running = asyncio._get_running_loop()
    return running if isinstance(running, ReplayLoop) else None


def times_of(run: RunPast) -> dict[str, float]:
    """How long each call of a run has taken, in seconds."""
    ends = {path: call.done for path, call in run.calls.items() if call.done is not None and call.done.started}
    return {path: max(0, done.at - done.started) / 1e6 for path, done in ends.items()}
