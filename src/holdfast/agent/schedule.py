"""When the next checkpoint is due: the options of a ``When``, followed over time.

Pure: it is told seconds of a monotonic clock, reads none, and does no I/O. So the library and the simulation in
``benchmarks/when.py`` use the same code. What always holds: it only asks, at safe points, and goes on asking until it
is told that a checkpoint was made; a clock that stands still, jumps back or is not a number does no harm.

The adaptive interval is ``sqrt(2 * cost / rate)``: a checkpoint of that cost every ``T`` seconds takes ``cost / T`` of
the time, a failure loses ``T / 2`` on average, and the sum is least there. docs/design/025-intervals.md has the rest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.agent.when import When

TIME, STEPS, BYTES, ADAPTIVE, PHASE, BEFORE, AFTER, WATCH, LOG, METRIC, PROBE = (
    "time", "steps", "bytes", "adaptive", "phase", "before write", "after write", "watch", "log", "metric", "probe",
)  # fmt: skip
TRIGGERS = (TIME, STEPS, BYTES, ADAPTIVE, PHASE, BEFORE, AFTER, WATCH, LOG, METRIC, PROBE)

SHARE = 0.02
"""What checkpoints may take of the time of an agent that has never failed."""
PRIOR_FAILURES, PRIOR_S = 0.5, 900.0
"""What is believed of an agent without a history: a failure every half hour, said with the weight of half a failure."""
KEPT = 0.98
"""How much of what is known is kept at each failure: about the last fifty count."""
AGES_S = (16.0, 128.0, 1_024.0, 8_192.0)
"""Failures come in bursts: the rate is told apart by the time since the last one, in these spans."""
AGE_WEIGHT = 1.0
"""The rate over all counts for so many failures, against what is known of one span."""
GAPS_MAX = 64
"""Times between failures that are remembered one by one; older ones count together, and little."""
COST_S, COST_MIN_S = 0.001, 1e-6
"""Taken for the cost of a checkpoint until one was made; and less than any takes."""
COST_WEIGHT, COST_STEP = 0.2, 4.0
"""A new cost moves the mean by a fifth; one that is more than four times as large or small counts as four times."""
LOAD_MAX = 4.0
"""A machine with more waiting than that counts as this, so that an interval is at most doubled by load."""
OVERDUE_INTERVALS, OVERDUE_MIN_S = 5, 60.0
"""Without a safe point for so many intervals, somebody should hear of it. An adaptive interval may be shorter than
any step of the program can be, so for that a minute passes at least."""

JUMP_MAX_S = 366 * 86_400.0
"""A clock that says that a year has passed since the last look is not believed, and nor is one that went back."""


@dataclass(frozen=True, slots=True)
class Past:
    """What an agent's history says.

    ``failures`` in ``seconds`` of running, all that is known. ``cost_s``: what its checkpoints cost. ``gaps``: for how
    long it ran before each of its newest failures, oldest first; ``age_s``: and since the newest. Both are part of
    ``seconds``. Without them, bursts cannot be told from steady failures.
    """

    failures: int = 0
    seconds: float = 0.0
    cost_s: float | None = None
    gaps: tuple[float, ...] = ()
    age_s: float = 0.0


class Failures:
    """How often an agent fails: a rate, believed before anything is known, learned, and slowly forgotten.

    Of an uncertain rate only the mean counts for the interval, because the expected loss is in proportion to it. With
    a gamma distribution that mean is failures divided by seconds, what was believed before added to both.
    """

    __slots__ = ("_by_age", "_number", "_seconds", "none")

    def __init__(self, past: Past) -> None:
        self._by_age = [[0.0, 0.0] for _ in range(len(AGES_S) + 1)]
        older = max(0, past.failures - len(past.gaps))
        older_s = max(0.0, _finite(past.seconds) - math.fsum(past.gaps) - past.age_s)
        self.none = not older
        # Of the older ones as many count as would have been kept.
        share = min(1.0, 1.0 / (1.0 - KEPT) / older) if older else 1.0
        kept = KEPT**older
        self._number = PRIOR_FAILURES * kept + older * share
        self._seconds = PRIOR_S * kept + older_s * share
        for gap_s in past.gaps:
            self.add(gap_s)

    def add(self, age_s: float) -> None:
        """It failed after it had run for so long without."""
        self.none = False
        self._number = self._number * KEPT + 1.0
        self._seconds = self._seconds * KEPT + age_s
        for known, (from_s, to_s) in zip(
            self._by_age, zip((0.0, *AGES_S), (*AGES_S, math.inf), strict=True), strict=True
        ):
            known[0] = known[0] * KEPT + (from_s <= age_s < to_s)
            known[1] = known[1] * KEPT + max(0.0, min(age_s, to_s) - from_s)

    def rate(self, age_s: float) -> float:
        """Failures that are expected for each second now, so long after the last one."""
        overall = self._number / (self._seconds + age_s)
        span = bisect_right(AGES_S, age_s)
        number, seconds = self._by_age[span]
        in_span_s = age_s - (AGES_S[span - 1] if span else 0.0)
        return (AGE_WEIGHT + number) / (AGE_WEIGHT / overall + seconds + in_span_s)


class Schedule:
    """Asks for checkpoints as a ``When`` says. Belongs to one agent, and to one thread at a time.

    ``interval_s``: the interval at present: the adaptive one, or that of ``every_s``; endless if there is neither.
    ``earliest_s``: so long after a checkpoint, time may ask for the next; before that it does not.
    """

    __slots__ = (
        "_asked", "_cost_s", "_every_steps", "_failed_at_s", "_failures", "_floor_s", "_late_s", "_offset_s",
        "_overdue_s", "_overdue_told", "_passed_s", "_saved_at_s", "_seen_at_s", "_steps", "_when", "earliest_s",
        "interval_s",
    )  # fmt: skip

    def __init__(self, when: When, now_s: float, past: Past = Past()) -> None:
        self._when = when
        self._every_steps = when.every_steps if when.every_steps is not None else math.inf
        # Our own time begins at 0, and never goes back. These are moments of it.
        self._offset_s = _finite(now_s)
        self._passed_s = self._saved_at_s = self._seen_at_s = 0.0
        self._failed_at_s = -max(0.0, _finite(past.age_s))
        self._steps = 0
        self._floor_s = self._late_s = 0.0
        self._overdue_told = self._asked = False
        self._failures = Failures(past)
        self._cost_s = max(_finite(past.cost_s), COST_MIN_S) if past.cost_s is not None else None
        self._choose(self.cost_s)

    # -- safe points ------------------------------------------------------------------------------------

    def step(self, now_s: float, changed_bytes: Callable[[], int], load: Callable[[], float]) -> str | None:
        """The agent is at a safe point. Returns the name of the trigger that asks for a checkpoint now, or None.

        ``changed_bytes`` and ``load`` (of the machine: 1.0 is as much work as it has processors) are called only if
        the answer depends on them.
        """
        self._steps += 1
        since_s = self._arrive(now_s)
        if self._steps >= self._every_steps:
            return STEPS
        due = self._due_by_time(since_s, load) if since_s >= self.earliest_s else None
        if due is None and self._when.changed_bytes is not None and changed_bytes() >= self._when.changed_bytes:
            return BYTES
        return due

    def event(self, name: str, now_s: float, changed_bytes: Callable[[], int] | None = None) -> str | None:
        """The agent is at the end of a phase, or inside a run before or after a write: also safe points."""
        since_s = self._arrive(now_s)
        when = self._when
        if (
            (name == PHASE and when.at_phase)
            or (name == BEFORE and when.before is not None)
            or (name == AFTER and when.after is not None)
        ):
            return name
        due = self._due_by_time(since_s, None) if since_s >= self.earliest_s else None
        if due is None and changed_bytes is not None and when.changed_bytes is not None:
            return BYTES if changed_bytes() >= when.changed_bytes else None
        return due

    def _due_by_time(self, since_s: float, load: Callable[[], float] | None) -> str | None:
        when = self._when
        if when.every_s is not None and since_s >= when.every_s:
            return TIME
        if not when.adaptive or since_s < when.min_s:
            return None
        if self._asked or since_s >= when.max_s:
            return ADAPTIVE
        if since_s < self._floor_s:
            return None
        # The choice is between now and the next safe point. Of two spans around the best one, the shorter is better
        # if their product is above its square.
        next_s = since_s + since_s / max(self._steps, 1)
        if since_s * next_s < self.interval_s**2:
            return None
        if load is not None:
            waiting = min(max(load(), 1.0), LOAD_MAX)
            if waiting > 1.0 and since_s * next_s < self.interval_s**2 * waiting:
                return None
        self._asked = True  # and so it stays: the next step may be nearer than this one seemed to say
        return ADAPTIVE

    # -- what happened ----------------------------------------------------------------------------------

    def saved(self, now_s: float, cost_s: float) -> None:
        """A checkpoint was made, by whomever. ``cost_s``: for how long the agent stood still for it."""
        self._pass(now_s)
        if not 0.0 <= cost_s < math.inf:
            cost_s = self.cost_s
        elif self._cost_s is None:
            self._cost_s = max(cost_s, COST_MIN_S)
        else:
            near_s = min(max(cost_s, self._cost_s / COST_STEP, COST_MIN_S), self._cost_s * COST_STEP)
            self._cost_s += COST_WEIGHT * (near_s - self._cost_s)
        self._settle(cost_s)

    def unchanged(self, now_s: float) -> None:
        """A checkpoint was due, and there was nothing to save. Says nothing about what one costs."""
        self._pass(now_s)
        self._settle(self.cost_s)

    def failed(self, now_s: float, *, lost: bool = True) -> None:
        """The agent failed: it was killed, an exception ended it, or it was rolled back.

        ``lost``: and with that what was not saved, so that the next interval begins here.
        """
        self._pass(now_s)
        self._failures.add(self._passed_s - self._failed_at_s)
        self._failed_at_s = self._passed_s
        if lost:
            self._settle(self.cost_s)
        else:
            self._choose(self.cost_s)

    def _settle(self, cost_s: float) -> None:
        self._saved_at_s = self._seen_at_s = self._passed_s
        self._steps, self._asked = 0, False
        self._choose(cost_s)

    # -- what is known ----------------------------------------------------------------------------------

    @property
    def cost_s(self) -> float:
        """What a checkpoint is thought to cost."""
        return self._cost_s if self._cost_s is not None else COST_S

    @property
    def rate(self) -> float:
        """Failures that are expected for each second now."""
        return self._failures.rate(self._passed_s - self._failed_at_s)

    def overdue(self, now_s: float) -> float | None:
        """Seconds without a safe point, if they were too many: the first time that this is so, and then no more."""
        self._pass(now_s)
        late_s = max(self._late_s, self._passed_s - self._seen_at_s)
        if self._overdue_told or late_s <= self._overdue_s:
            return None
        self._overdue_told = True
        return late_s

    def _choose(self, last_cost_s: float) -> None:
        """The interval from here on, and the earliest moment at which time may ask."""
        when = self._when
        every_s = when.every_s if when.every_s is not None else math.inf
        self._overdue_s = OVERDUE_INTERVALS * every_s
        if not when.adaptive:
            self.interval_s = self.earliest_s = every_s
            return
        # Without failures, each checkpoint is paid for by the time after it.
        self._floor_s = max(self.cost_s, last_cost_s) / SHARE if self._failures.none else 0.0
        best_s = max(math.sqrt(2.0 * self.cost_s / self.rate), self._floor_s)
        self.interval_s = min(max(best_s, when.min_s), when.max_s)
        self.earliest_s = min(max(self.interval_s / math.sqrt(2.0), when.min_s), every_s)
        self._overdue_s = min(self._overdue_s, max(OVERDUE_INTERVALS * self.interval_s, OVERDUE_MIN_S))

    # -- time -------------------------------------------------------------------------------------------

    def _pass(self, now_s: float) -> None:
        """Our own time follows the clock, as far as that goes forward."""
        passed_s = now_s - self._offset_s
        if self._passed_s <= passed_s < self._passed_s + JUMP_MAX_S:
            self._passed_s = passed_s
        elif math.isfinite(passed_s):
            self._offset_s = now_s - self._passed_s

    def _arrive(self, now_s: float) -> float:
        """At a safe point: the seconds since the last checkpoint."""
        self._pass(now_s)
        late_s = self._passed_s - self._seen_at_s
        self._late_s = max(self._late_s, late_s)
        self._seen_at_s = self._passed_s
        return self._passed_s - self._saved_at_s


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
