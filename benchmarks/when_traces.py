"""An agent that fails, simulated: seeded failures, steps, checkpoints, and what all of that wastes.

Uses the ``Schedule`` of the library, and has no rule of its own about when to checkpoint. Time is simulated, so figures
do not depend on the machine. Needs nothing but the library, so that a test can run a share of it.

The agent runs in steps of equal length. After each it is at a safe point, where the schedule may ask for a checkpoint.
A failure ends the process: what was done since the last finished checkpoint is lost, and a new process begins with a
new schedule, which is told what the history says. *Waste* is the time of checkpoints plus the time whose work was lost.
A restart takes the same under all policies, and is left out: it would only make them look alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from statistics import median

from holdfast.agent.schedule import GAPS_MAX, PHASE, Past, Schedule
from holdfast.agent.when import When

ADAPTIVE = "adaptive"
TOTALS = "adaptive, totals only"
ORACLE = "knows the distribution"
POLICIES = {
    ADAPTIVE: When(adaptive=True),
    TOTALS: When(adaptive=True),
    ORACLE: When(adaptive=True),
    "every step": When(every_steps=1),
    "every 10 steps": When(every_steps=10),
    "every 30 s": When(every_s=30),
    "at phases": When(at_phase=True),
}
PHASE_STEPS = 20
"""Steps of a phase, for the policy that saves at the end of each."""

GRID_S = (*(2 ** (exponent / 4) for exponent in range(37)), 600.0)
"""The fixed intervals of which the best is chosen in hindsight: from 1 s to 600 s, the limits of adaptive."""
GRID_REACH = 5.0
"""An interval that is five times too long or too short wastes 2.6 times as much, and is not tried."""

COSTS_KNOWN = 32
"""Of so many newest checkpoints a new process knows what they cost."""
SPREAD, SPIKES, SPIKE = 0.35, 0.005, 20.0
"""Costs are spread log-normally, with a 99th percentile of 2.3 times the median, as measured; one in 200 takes twenty
times as long, as when the disk is busy."""

BURST_SIZE, BURST_GAP_S = 6, 20.0
SHAPE = 0.7


@dataclass(frozen=True)
class Case:
    """What is simulated: a checkpoint's cost, the length of a step, and the mean time between failures."""

    cost_s: float
    step_s: float
    between_s: float


@dataclass(frozen=True)
class Waste:
    """What came of it, in seconds."""

    ran_s: float
    saving_s: float
    lost_s: float
    checkpoints: int

    @property
    def s(self) -> float:
        return self.saving_s + self.lost_s


# -- failures -------------------------------------------------------------------------------------------------


def exponential(chance: random.Random, mean_s: float) -> Iterator[float]:
    while True:
        yield chance.expovariate(1 / mean_s)


def weibull(chance: random.Random, mean_s: float) -> Iterator[float]:
    """With shape 0.7, as measured on clusters: the longer it has run, the less often it fails."""
    scale_s = mean_s / math.gamma(1 + 1 / SHAPE)
    while True:
        yield chance.weibullvariate(scale_s, SHAPE)


def bursts(chance: random.Random, mean_s: float) -> Iterator[float]:
    """Six failures on average, 20 s apart, and then a long quiet."""
    quiet_s = BURST_SIZE * mean_s - (BURST_SIZE - 1) * BURST_GAP_S
    while True:
        yield chance.expovariate(1 / quiet_s)
        while chance.random() < 1 - 1 / BURST_SIZE:
            yield chance.expovariate(1 / BURST_GAP_S)


def shifting(chance: random.Random, mean_s: float) -> Iterator[float]:
    """Twenty failures that are rare, then twenty that come nine times as often, and again."""
    while True:
        for factor in (1.8, 0.2):
            for _ in range(20):
                yield chance.expovariate(1 / (mean_s * factor))


FAMILIES: dict[str, Callable[[random.Random, float], Iterator[float]]] = {
    "exponential": exponential,
    "Weibull 0.7": weibull,
    "bursts": bursts,
    "shifting": shifting,
}


def surviving(family: str, mean_s: float, number: int) -> Callable[[float], float]:
    """The chance that an agent runs for so long before failure ``number``, as the generators above have it."""
    if family == "Weibull 0.7":
        scale_s = mean_s / math.gamma(1 + 1 / SHAPE)
        return lambda age_s: math.exp(-((age_s / scale_s) ** SHAPE))
    if family == "bursts":
        quiet_s, stays = BURST_SIZE * mean_s - (BURST_SIZE - 1) * BURST_GAP_S, (1 - 1 / BURST_SIZE if number else 0.0)
        return lambda age_s: stays * math.exp(-age_s / BURST_GAP_S) + (1 - stays) * math.exp(-age_s / quiet_s)
    if family == "shifting":
        mean_s *= 0.2 if number // 20 % 2 else 1.8
    return lambda age_s: math.exp(-age_s / mean_s)


def trace(family: str, between_s: float, seed: int, failures: int) -> list[float]:
    """How long the agent runs before each failure."""
    found = FAMILIES[family](random.Random(f"{family} {between_s} {seed}"), between_s)
    return [gap_s for gap_s, _ in zip(found, range(failures), strict=False)]


# -- an agent that fails --------------------------------------------------------------------------------------


class Oracle(Schedule):
    """The adaptive rule where nothing has to be learned: it knows what a checkpoint costs on average, and the
    distribution that failures are drawn from. Not when they come, nor what the next checkpoint costs: so what it wastes
    is about what any policy has to expect that cannot see into the future."""

    __slots__ = ("_survives",)

    def __init__(self, case: Case, now_s: float, survives: Callable[[float], float]) -> None:
        self._survives = survives
        super().__init__(POLICIES[ORACLE], now_s, Past(1, case.between_s, case.cost_s))

    @property
    def rate(self) -> float:
        """The mean one over the interval that it leads to: the density of checkpoints follows the root of the rate."""
        age_s = self._passed_s
        there, span_s = self._survives(age_s), POLICIES[ORACLE].min_s
        for _ in range(12):
            rate = -math.log(max(self._survives(age_s + span_s) / max(there, 1e-300), 1e-300)) / span_s
            span_s = math.sqrt(2 * self.cost_s / rate)
        return rate

    def saved(self, now_s: float, cost_s: float) -> None:  # noqa: ARG002 - it knows the mean, which nothing changes
        super().saved(now_s, self.cost_s)


def simulate(
    case: Case, name: str, gaps: Sequence[float], seed: int, *, family: str = "exponential", fails: bool = True
) -> Waste:
    """Runs of these lengths under a policy. Each ends with a failure, unless there are none."""
    return walk(case, POLICIES[name], gaps, seed, fails=fails, whole=name == ADAPTIVE, known=family * (name == ORACLE))


def fixed(case: Case, every_s: float, gaps: Sequence[float], seed: int) -> Waste:
    return walk(case, When(every_s=every_s), gaps, seed)


def walk(
    case: Case,
    when: When,
    gaps: Sequence[float],
    seed: int,
    *,
    fails: bool = True,
    whole: bool = False,
    known: str = "",
) -> Waste:
    """``whole``: the history has each time between failures; ``known``: the family whose distribution is known."""
    costs = _costs(case.cost_s, seed)
    newest: list[float] = []
    past = Past()
    now_s = saving_s = lost_s = 0.0
    checkpoints = 0
    # Where only time may ask, and nobody counts steps, safe points before the earliest moment need not be visited.
    leaps = when.every_s is not None and when.every_steps is None
    for number, gap_s in enumerate(gaps):
        began_s, end_s = now_s, now_s + gap_s
        schedule = Schedule(when, now_s, past)
        if known:
            schedule = Oracle(case, now_s, surviving(known, case.between_s, number))
        saved_s, steps = now_s, 0
        while True:
            # From here, steps of equal length until one is asked for.
            at = max(1, math.ceil(schedule.earliest_s / case.step_s - 1e-9)) if leaps else 1
            asked = None
            while asked is None:
                now_s = saved_s + at * case.step_s
                if now_s > end_s:
                    break
                asked = schedule.step(now_s, _nothing, _idle)
                if when.at_phase and (steps + at) % PHASE_STEPS == 0:
                    asked = schedule.event(PHASE, now_s)
                at += 1
            cost_s = next(costs) if asked is not None else 0.0
            if asked is None or now_s + cost_s > end_s:
                break
            steps += at - 1
            saved_s = now_s = now_s + cost_s
            schedule.saved(now_s, cost_s)
            saving_s, checkpoints = saving_s + cost_s, checkpoints + 1
            newest.append(cost_s)
        lost_s += (end_s - saved_s) if fails else 0.0
        now_s = end_s
        del newest[:-COSTS_KNOWN]
        past = Past(number + 1, past.seconds + end_s - began_s, median(newest) if newest else None)
        if whole:
            past = replace(past, gaps=tuple(gaps[max(0, number + 1 - GAPS_MAX) : number + 1]))
    return Waste(now_s, saving_s, lost_s, checkpoints)


def _costs(cost_s: float, seed: int) -> Iterator[float]:
    """The same ones for all policies."""
    return (cost_s * factor for factor in cycle(_factors(seed)))


@cache
def _factors(seed: int) -> tuple[float, ...]:
    """Around 1, which is their mean, spread and spikes included."""
    chance = random.Random(f"costs {seed}")
    usual = 1 / (math.exp(SPREAD**2 / 2) * (1 + SPIKES * (SPIKE - 1)))
    return tuple(
        usual * chance.lognormvariate(0, SPREAD) * (SPIKE if chance.random() < SPIKES else 1.0) for _ in range(9_973)
    )


def _nothing() -> int:
    return 0


def _idle() -> float:
    return 0.0


# -- against the best in hindsight ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A trace: what each policy wasted, and what each fixed interval did."""

    policies: dict[str, Waste]
    fixed: dict[float, Waste]

    @property
    def best(self) -> tuple[float, float]:
        """The least waste of a fixed interval, and that interval."""
        return min((waste.s, every_s) for every_s, waste in self.fixed.items())

    def against_best(self, name: str) -> float:
        return self.policies[name].s / self.best[0]


def judge(case: Case, family: str, seed: int, failures: int, policies: Sequence[str] = tuple(POLICIES)) -> Judged:
    gaps = trace(family, case.between_s, seed, failures)
    return Judged(
        {name: simulate(case, name, gaps, seed, family=family) for name in policies},
        {every_s: fixed(case, every_s, gaps, seed) for every_s in grid(case)},
    )


def grid(case: Case) -> list[float]:
    """Intervals that can be the best: around the formula's, and one for each number of steps."""
    near_s = min(max(math.sqrt(2 * case.cost_s * case.between_s), GRID_S[0], case.step_s), GRID_S[-1])
    tried = [every_s for every_s in GRID_S if near_s / GRID_REACH <= max(every_s, case.step_s) <= near_s * GRID_REACH]
    return sorted({max(1, math.ceil(every_s / case.step_s - 1e-9)): every_s for every_s in tried}.values())
