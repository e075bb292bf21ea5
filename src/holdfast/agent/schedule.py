"""When the next checkpoint is due: the options of a ``When``, followed over time.

Pure: it is told seconds of a monotonic clock, reads none, and does no I/O. So the library and the simulation in
``benchmarks/when.py`` use the same code. What always holds: it only asks, at safe points, and goes on asking until it
is told that a checkpoint was made; a clock that stands still, jumps back or is not a number does no harm.

The adaptive interval is ``sqrt(2 * cost / rate)``: a checkpoint of that cost every ``T`` seconds takes ``cost / T`` of
the time, a failure loses ``T / 2`` on average, and the sum is least there. docs/design/025-intervals.md has the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.agent.when import When

TIME, STEPS, BYTES, ADAPTIVE, PHASE, BEFORE, AFTER = (
    "time", "steps", "bytes", "adaptive", "phase", "before write", "after write",
)  # fmt: skip
TRIGGERS = (TIME, STEPS, BYTES, ADAPTIVE, PHASE, BEFORE, AFTER)

SHARE = 0.02
"""What checkpoints may take of the time of an agent that has never failed."""
PRIOR_FAILURES, PRIOR_S = 1.0, 3_600.0
"""What is believed of an agent without a history: one failure an hour, said with the weight of one failure."""
KEPT = 0.9
"""How much of what is known is kept at each failure: the last ten count, and old quiet does not hide a burst."""
COST_S = 0.001
"""Taken for the cost of a checkpoint until one was made."""
COST_WEIGHT, COST_STEP = 0.2, 4.0
"""A new cost moves the mean by a fifth; one that is more than four times as large or small counts as four times."""
LOAD_MAX = 4.0
"""A machine with more waiting than that counts as this, so that an interval is at most doubled by load."""
OVERDUE_INTERVALS, OVERDUE_MIN_S = 5, 60.0
"""Without a safe point for so many intervals, somebody should hear of it; an adaptive one may be short, so a minute."""


@dataclass(frozen=True, slots=True)
class Past:
    """What an agent's history says: its failures, in how many seconds of running, and what its checkpoints cost."""

    failures: int = 0
    seconds: float = 0.0
    cost_s: float | None = None


class Schedule:
    """Asks for checkpoints as a ``When`` says. Belongs to one agent, and to one thread at a time."""

    __slots__ = (
        "_cost_s", "_exposed_s", "_failures", "_last_cost_s", "_late_s", "_overdue_told", "_passed_s", "_read_s",
        "_saved_at_s", "_seen_at_s", "_step_s", "_steps", "_when", "interval_s",
    )  # fmt: skip

    def __init__(self, when: When, now_s: float, past: Past = Past()) -> None:  # noqa: B008 - it is frozen
        self._when = when
        self._read_s = now_s if math.isfinite(now_s) else 0.0
        self._passed_s = 0.0  # a time of our own, which never goes back
        self._saved_at_s = 0.0
        self._seen_at_s = 0.0  # the last safe point
        self._steps = 0
        self._step_s = 0.0
        self._late_s = 0.0
        self._overdue_told = False
        self._failures = float(max(0, past.failures))
        self._exposed_s = past.seconds if math.isfinite(past.seconds) and past.seconds > 0 else 0.0
        known = past.cost_s is not None and math.isfinite(past.cost_s) and past.cost_s > 0
        self._cost_s = past.cost_s if known and past.cost_s is not None else None
        self._last_cost_s = 0.0
        self.interval_s = 0.0
        self._choose()

    # -- safe points ------------------------------------------------------------------------------------

    def step(self, now_s: float, changed_bytes: Callable[[], int], load: Callable[[], float]) -> str | None:
        """The agent is at a safe point. Returns the name of the trigger that asks for a checkpoint now, or None.

        ``changed_bytes`` and ``load`` (of the machine: 1.0 is as much work as it has processors) are called only if
        the answer depends on them.
        """
        self._steps += 1
        length_s = self._arrive(now_s)
        self._step_s += COST_WEIGHT * (length_s - self._step_s) if self._step_s else length_s
        when = self._when
        if when.every_steps is not None and self._steps >= when.every_steps:
            return STEPS
        due = self._due_by_time(load)
        if due is None and when.changed_bytes is not None and changed_bytes() >= when.changed_bytes:
            return BYTES
        return due

    def event(self, name: str, now_s: float) -> str | None:
        """The agent is at the end of a phase, or inside a run before or after a write: also safe points."""
        self._arrive(now_s)
        when = self._when
        asked = {PHASE: when.at_phase, BEFORE: when.before is not None, AFTER: when.after is not None}
        return name if asked.get(name, False) else self._due_by_time(None)

    def _due_by_time(self, load: Callable[[], float] | None) -> str | None:
        since_s = self._passed_s - self._saved_at_s
        when = self._when
        if when.every_s is not None and since_s >= when.every_s:
            return TIME
        if not when.adaptive or since_s < when.min_s:
            return None
        # The choice is between now and the next safe point. Of two spans around the best one, the shorter costs less
        # if their product is above its square.
        if since_s < when.max_s and since_s * (since_s + self._step_s) < self.interval_s**2:
            return None
        if since_s < when.max_s and since_s < self._floor_s():
            return None
        if load is not None and since_s < when.max_s:
            waiting = min(max(load(), 1.0), LOAD_MAX)
            if waiting > 1.0 and since_s < self.interval_s * math.sqrt(waiting):
                return None
        return ADAPTIVE

    # -- what happened ----------------------------------------------------------------------------------

    def saved(self, now_s: float, cost_s: float) -> None:
        """A checkpoint was made, by whomever. ``cost_s``: for how long the agent stood still for it."""
        self._pass(now_s)
        if math.isfinite(cost_s) and cost_s >= 0:
            self._last_cost_s = cost_s
            known_s = self._cost_s
            if known_s is None:
                self._cost_s = max(cost_s, 1e-6)
            else:
                near_s = min(max(cost_s, known_s / COST_STEP), known_s * COST_STEP)
                self._cost_s = known_s + COST_WEIGHT * (near_s - known_s)
        self._settle()

    def unchanged(self, now_s: float) -> None:
        """A checkpoint was due, and there was nothing to save. Says nothing about what one costs."""
        self._pass(now_s)
        self._last_cost_s = 0.0
        self._settle()

    def failed(self, now_s: float) -> None:
        """The agent failed: it was killed, an exception ended it, or it was rolled back. What was not saved is lost."""
        self._pass(now_s)
        self._failures = self._failures * KEPT + 1.0
        self._exposed_s *= KEPT
        self._settle()

    def _settle(self) -> None:
        self._saved_at_s = self._seen_at_s = self._passed_s
        self._steps = 0
        self._choose()

    # -- what is known ----------------------------------------------------------------------------------

    @property
    def cost_s(self) -> float:
        """What a checkpoint is thought to cost."""
        return self._cost_s if self._cost_s is not None else COST_S

    @property
    def rate(self) -> float:
        """Failures that are expected for each second of running."""
        return (PRIOR_FAILURES + self._failures) / (PRIOR_S + self._exposed_s)

    def _choose(self) -> None:
        when = self._when
        best_s = max(math.sqrt(2.0 * self.cost_s / self.rate), self._floor_s())
        self.interval_s = min(max(best_s, when.min_s), when.max_s)

    def _floor_s(self) -> float:
        """Without failures, each checkpoint is paid for by the time after it: never more than its share of the time."""
        if self._failures:
            return 0.0
        return max(self.cost_s, self._last_cost_s) / SHARE

    def overdue(self, now_s: float) -> float | None:
        """Seconds without a safe point, if they were too many: the first time that this is so, and then no more."""
        when = self._when
        limits = [OVERDUE_INTERVALS * when.every_s] if when.every_s is not None else []
        limits += [max(OVERDUE_INTERVALS * self.interval_s, OVERDUE_MIN_S)] if when.adaptive else []
        self._pass(now_s)
        late_s = max(self._late_s, self._passed_s - self._seen_at_s)
        if self._overdue_told or not limits or late_s <= min(limits):
            return None
        self._overdue_told = True
        return late_s

    # -- time -------------------------------------------------------------------------------------------

    def _pass(self, now_s: float) -> None:
        """Our own time goes on by what the clock went forward since it was last read, if it did."""
        forward_s = now_s - self._read_s
        if math.isfinite(forward_s):
            self._read_s = now_s
            if forward_s > 0:
                self._passed_s += forward_s
                self._exposed_s += forward_s

    def _arrive(self, now_s: float) -> float:
        """At a safe point: for how long there was none."""
        self._pass(now_s)
        length_s = self._passed_s - self._seen_at_s
        self._late_s = max(self._late_s, length_s)
        self._seen_at_s = self._passed_s
        return length_s
