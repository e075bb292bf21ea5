"""The one detector of anomalies, drift and trends: values of one place after another, and since when they are others.

Owns the statistics and nothing else: it knows neither agents nor clocks, and does no I/O. Explain, drift and the
metrics hook feed it. Each numeric place is forecast from its own past by a straight line and its last value, which
covers noise around a level, trends, counters and autocorrelation alike; what is left are residuals, and their
cumulative sums (CUSUM) raise an alarm when they keep to one side. Of a place with words, the share of each common word
is followed in the same way. What always holds: an update costs the same however long the history is; a place without a
history raises nothing; a place raises one alarm.

The thresholds are calibrated for whole families of places, see ``benchmarks/detector.py``: of histories of 1,000 steps
and 20 places in which nothing is wrong, at most one in a hundred raises any alarm.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WARM = 80
"""Values that a place needs before it can raise anything: with fewer, what is usual is not known."""
NEEDED = WARM + 2
"""Values after which a place of either kind has been judged: of a number, a forecast begins with its second."""
LAG = 24
"""Values that wait before they count as usual, so that a change is not taken for usual while it is being noticed."""
CLIP = 3.0
"""A single residual counts for no more, in standard deviations: one odd value is no drift."""
SLOPES = ((1.0, 7.0), (0.4, 16.0))
"""Pairs of what is allowed in a step and the sum that raises an alarm: for sudden changes, and for slow ones, which are
all that is left of a change in a place that depends much on its last value."""
DOUBT = 2.5
"""How many standard errors of the estimate a residual is allowed on top."""
WALKS = 0.1
"""A place whose steps vary so much less than it does around a line goes on from where it is: a counter, or a walk."""
SLOPE_SURE = 5.0
"""Standard errors that a slope needs to be believed: a line that is not there leads astray."""
PLACES_MAX = 2_000
WORDS_MAX = 4
"""Words of a place that are followed, the most common ones."""
LUMPY = 1.5
"""What is there or not comes in larger lumps than noise: the sums may come to that much more."""
WORD_MAX = 80
_TINY = 1e-12
_DISTINCT_MAX = 12  # a place with more different words than that is text, and no category


@dataclass(frozen=True)
class Alarm:
    """A place is not what it was. ``at`` is the step that raised it, ``since`` the one that it seems to have begun at.

    ``shift`` is the mean change since then, in standard deviations of what is usual in a step; ``word`` is set where
    the share of a word has changed.
    """

    place: str
    at: int
    since: int
    shift: float
    word: str = ""

    def __str__(self) -> str:
        of = f"the share of {self.word!r}" if self.word else "its values"
        return f"{self.place}: {of} changed by {self.shift:+.1f} standard deviations since step {self.since}"

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "place": self.place,
            "at": self.at,
            "since": self.since,
            "shift": round(self.shift, 3),
            "word": self.word or None,
        }


class Sums:
    """Two-sided cumulative sums of standardised residuals."""

    __slots__ = ("_began", "_limit", "_sums", "_total")

    def __init__(self, limit: float = 1.0) -> None:
        """``limit`` is what the sums may come to, in parts of what is usual."""
        self._limit = limit
        self._sums = [0.0] * (2 * len(SLOPES))
        self._began = [0] * (2 * len(SLOPES))
        self._total = [0.0] * (2 * len(SLOPES))

    def add(self, residual: float, unsure: float, step: int) -> tuple[int, float] | None:
        """Since when they keep to one side, and the mean since then; None while they do not.

        ``unsure``: all residuals around here may be off by so much, because what is usual was estimated.
        """
        residual = max(-CLIP, min(CLIP, residual))
        sums = self._sums
        for at in range(len(sums)):
            slack, limit = SLOPES[at // 2]
            signed = residual if at % 2 == 0 else -residual
            if sums[at] <= 0.0:
                self._began[at], self._total[at] = step, 0.0
            self._total[at] += residual
            sums[at] = max(0.0, sums[at] + signed - slack - DOUBT * unsure)
            if sums[at] > limit * self._limit:
                since = self._began[at]
                return since, self._total[at] / (step - since + 1)
        return None


class Forecast:
    """The next value of a numeric place, from a straight line and the last value; fitted as values come.

    Keeps means and co-moments of the time, the last value and the value, updated as by Welford.
    """

    __slots__ = ("_ll", "_lt", "_ly", "_ml", "_mt", "_my", "_tt", "_ty", "_waiting", "_yy", "last", "n")

    def __init__(self) -> None:
        self.n = 0
        self.last = math.nan
        self._waiting: deque[tuple[float, float, float]] = deque()
        self._mt = self._ml = self._my = 0.0
        self._tt = self._lt = self._ll = self._ty = self._ly = self._yy = 0.0

    def add(self, step: int, value: float) -> tuple[float, float] | None:
        """The residual of a value and the error of its forecast; None while too little is known."""
        residual = self._judge(step, value) if self.n >= WARM else None
        if not math.isnan(self.last):
            self._waiting.append((float(step), self.last, value))
            if len(self._waiting) > LAG or self.n < WARM:
                self._learn(*self._waiting.popleft())
        self.last = value
        return residual

    def _learn(self, t: float, l: float, y: float) -> None:  # noqa: E741 - the last value
        self.n += 1
        dt, dl, dy = t - self._mt, l - self._ml, y - self._my
        self._mt += dt / self.n
        self._ml += dl / self.n
        self._my += dy / self.n
        et, el, ey = t - self._mt, l - self._ml, y - self._my
        self._tt += dt * et
        self._lt += dl * et
        self._ll += dl * el
        self._ty += dt * ey
        self._ly += dl * ey
        self._yy += dy * ey

    def _judge(self, step: int, value: float) -> tuple[float, float]:
        """The residual, and how far the forecast itself may be off, both in standard deviations."""
        n, tt, ll, lt, yy = self.n, self._tt, self._ll, self._lt, self._yy
        t, last = step - self._mt, self.last - self._ml
        straight = yy - self._ty * self._ty / tt  # what a line alone leaves
        moves = yy + ll - 2 * self._ly  # what "as before, and the mean step more" leaves
        determinant = tt * ll - lt * lt
        if moves <= WALKS * straight or determinant <= 1e-9 * tt * ll:
            left, freedom, leverage = moves, n - 1, 0.0
            error = value - self.last - (self._my - self._ml)
        else:
            slope = (self._ty * ll - self._ly * lt) / determinant
            follow = (self._ly * tt - self._ty * lt) / determinant
            left, freedom = yy - slope * self._ty - follow * self._ly, n - 3
            leverage = (ll * t * t - 2 * lt * t * last + tt * last * last) / determinant
            error = value - self._my - slope * t - follow * last
            if slope * slope * determinant * freedom <= SLOPE_SURE**2 * max(left, 0.0) * ll:  # no slope to speak of
                follow = self._ly / ll
                left, freedom = yy - follow * self._ly, n - 2
                leverage, error = last * last / ll, value - self._my - follow * last
        scale = math.sqrt(max(0.0, left) / freedom)
        if scale <= 1e-9 * max(1.0, abs(self._my)):  # it has never strayed: any other value is as odd as can be
            return (0.0 if abs(error) <= 1e-6 * max(1.0, abs(self._my)) else math.copysign(CLIP, error)), 0.0
        return error / scale, math.sqrt(1 / n + max(0.0, leverage))


class Numbers:
    """A numeric place."""

    def __init__(self) -> None:
        self._forecast, self._sums = Forecast(), Sums()

    @property
    def count(self) -> int:
        """How many values it had."""
        return self._forecast.n + len(self._forecast._waiting) + 1

    def add(self, step: int, value: float) -> tuple[int, float, str] | None:
        residual = self._forecast.add(step, value)
        found = self._sums.add(*residual, step) if residual is not None else None
        return (*found, "") if found is not None else None


class Words:
    """A place that holds one of a few words. Each common word's share is followed."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._n = 0
        self._waiting: deque[str] = deque()
        self._sums: dict[str, Sums] = {}

    @property
    def count(self) -> int:
        """How many values it had."""
        return self._n + len(self._waiting)

    def add(self, step: int, word: str) -> tuple[int, float, str] | None:
        raised = self._judge(step, word) if self._n >= WARM and len(self._counts) <= _DISTINCT_MAX else None
        self._waiting.append(word)
        if len(self._waiting) > LAG or self._n < WARM:
            self._counts[self._waiting.popleft()] += 1
            self._n += 1
        return raised

    def _judge(self, step: int, word: str) -> tuple[int, float, str] | None:
        if not self._sums:
            self._sums = {common: Sums(LUMPY) for common, _ in self._counts.most_common(WORDS_MAX)}
        for common, sums in self._sums.items():
            share = (self._counts[common] + 0.5) / (self._n + 1)
            found = sums.add(((word == common) - share) / math.sqrt(share * (1 - share)), self._n**-0.5, step)
            if found is not None:
                return (*found, common)
        return None


class Detector:
    """Follows many places at once, by name."""

    def __init__(self) -> None:
        self._places: dict[str, Numbers | Words] = {}
        self._raised: set[str] = set()
        self.step = 0
        """How many updates there have been."""
        self.left_out = 0
        """Places that were not followed, because there were too many."""

    def update(self, values: Mapping[str, Any]) -> list[Alarm]:
        """One step: what each place holds now. Returns what has turned out to be different.

        Places that are not there any more are forgotten where there are too many.
        """
        alarms: list[Alarm] = []
        if len(self._places) >= PLACES_MAX and not self._places.keys() >= values.keys():
            self._places = {place: known for place, known in self._places.items() if place in values}
        for place, value in values.items():
            kind = kind_of(value)
            if kind is None or place in self._raised:
                continue
            known = self._places.get(place)
            if known is None:
                if len(self._places) >= PLACES_MAX:
                    self.left_out += 1
                    continue
                known = self._places[place] = kind()
            if type(known) is not kind:
                continue  # now a number, now a word: no statistics of that
            found = (
                known.add(self.step, float(value)) if isinstance(known, Numbers) else known.add(self.step, str(value))
            )
            if found is not None:
                since, shift, word = found
                self._raised.add(place)
                alarms.append(Alarm(place, self.step, since, shift, word))
        self.step += 1
        return alarms

    def unjudged(self) -> dict[str, int]:
        """Places of which too little is known to say anything, and how many values each had."""
        counts = {place: known.count for place, known in self._places.items()}
        return {place: count for place, count in counts.items() if count < NEEDED}


def kind_of(value: Any) -> type[Numbers | Words] | None:
    """How a value is followed; None for what cannot be."""
    if isinstance(value, bool):
        return Words
    if isinstance(value, int | float):
        return Numbers if abs(value) < 1e100 and not math.isnan(value) else None
    return Words if isinstance(value, str) and len(value) <= WORD_MAX else None


def follow(history: Iterable[Mapping[str, Any]], detector: Detector | None = None) -> list[Alarm]:
    """All alarms of a history, the earliest beginning first."""
    detector = detector or Detector()
    alarms = [alarm for values in history for alarm in detector.update(values)]
    return sorted(alarms, key=lambda alarm: (alarm.since, alarm.at))


@dataclass(frozen=True)
class Trend:
    """Growth or decline that is more than chance. ``per_step`` is its slope, ``sure`` how many standard errors that is.

    The errors account for values that depend on the one before.
    """

    per_step: float
    sure: float
    first: float
    last: float

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {"per_step": self.per_step, "sure": round(self.sure, 2), "first": self.first, "last": self.last}


TREND_MIN = 20
"""Values that a trend needs."""
SURE = 6.0
"""Standard errors that a trend needs. A random walk looks like a trend to a smaller number."""


def trend(values: Iterable[float]) -> Trend | None:
    """Whether a resource grows or shrinks steadily; None when it does not, or when there is too little to say so."""
    series = [float(value) for value in values]
    n = len(series)
    if n < TREND_MIN:
        return None
    # The mean step against its own spread: a walk without direction has none, a line has no spread.
    steps = [after - before for before, after in pairwise(series)]
    mean = math.fsum(steps) / len(steps)
    spread = math.sqrt(math.fsum((step - mean) ** 2 for step in steps) / (len(steps) - 1))
    if mean == 0.0:
        return None
    if spread <= _TINY * abs(mean):
        return Trend(mean, math.inf, series[0], series[-1])
    # Steps that take each other back (noise around a line) are correlated by about -1/2: their mean is surer than it
    # looks, and by how much the sum of autocovariances says.
    near = math.fsum((a - mean) * (b - mean) for a, b in pairwise(steps)) / len(steps)
    long_run = max(spread**2 + 2 * near, spread**2 / len(steps))
    sure = mean / math.sqrt(long_run / len(steps))
    return Trend(mean, sure, series[0], series[-1]) if abs(sure) >= SURE else None
