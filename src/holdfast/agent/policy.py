"""What to keep: rules over an agent's checkpoints, and how they are written down.

Owns the rules and nothing else: given checkpoints with their times and labels it says which stay and why. Reads no
store, removes nothing. What always holds: what several rules keep is kept by all of them together; a policy never says
that something must go, only what must stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from holdfast.errors import BadOption

_HOUR_US = 3_600_000_000
_DAY_US = 24 * _HOUR_US
# 1 January 1970 was a Thursday; weeks begin on Mondays.
_TO_MONDAY_US = 3 * _DAY_US
_BUCKETS: dict[str, Callable[[int], int]] = {
    "hourly": lambda at: at // _HOUR_US,
    "daily": lambda at: at // _DAY_US,
    "weekly": lambda at: (at + _TO_MONDAY_US) // (7 * _DAY_US),
}
_SPANS = ("newer_than_s", "runs_s")
COUNT_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Moment:
    """A checkpoint, as far as rules look at it."""

    n: int
    time_us: int
    label: str


@dataclass(frozen=True, slots=True)
class Policy:
    """What to keep of an agent's history. A checkpoint stays if any rule keeps it.

    ``last``: so many newest ones of each branch. ``hourly``, ``daily``, ``weekly``: the newest of each of the last so
    many hours, days, weeks (UTC, weeks from Monday) that have one, on each branch. ``labels``: those with such a label.
    ``branches``: everything on such branches. Both are patterns as in file names (``release-*``). ``newer_than``:
    everything younger than that, also what rollbacks left behind. ``tags``: tagged ones stay; with False they may go,
    and their tags with them.

    ``runs`` is about records: of how many runs that have ended, the newest of each branch (a number), or of those of
    the last so long (a timedelta), the values stay that were recorded. Without it all of them do.

    Whatever a policy says, these stay: where each branch stands, the newest checkpoint of a branch that is good, and
    what a run that has not finished or an effect in doubt needs.
    """

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    labels: Sequence[str] = ()
    branches: Sequence[str] = ()
    newer_than: timedelta | None = None
    tags: bool = True
    runs: int | timedelta | None = None

    def __post_init__(self) -> None:
        numbers: Any = {name: getattr(self, name) for name in ("last", *_BUCKETS)}
        for name, value in numbers.items():
            if type(value) is not int or not 0 <= value <= COUNT_MAX:
                raise BadOption(f"{name}={value!r}", hint=f"Use a number from 0 to {COUNT_MAX:,}.")
        for name in ("labels", "branches"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(pattern, str) and pattern for pattern in value):
                raise BadOption(f"{name}={value!r}", hint=f'Use a list of patterns: {name}=["release-*"].')
            object.__setattr__(self, name, tuple(value))
        span: Any = self.newer_than
        if span is not None and (not isinstance(span, timedelta) or span < timedelta(0)):
            raise BadOption(f"newer_than={self.newer_than!r}", hint="Use a timedelta that is not negative.")
        runs: Any = self.runs
        fits = runs >= timedelta(0) if isinstance(runs, timedelta) else type(runs) is int and 0 <= runs <= COUNT_MAX
        if runs is not None and not fits:
            hint = "Use a number of runs, or a timedelta that is not negative."
            raise BadOption(f"runs={runs!r}", hint=hint)
        if type(self.tags) is not bool:
            raise BadOption(f"tags={self.tags!r}", hint="Use True or False.")
        if not any((self.last, self.hourly, self.daily, self.weekly, self.labels, self.branches, self.newer_than)):
            hint = "Say what to keep: Policy(last=10)."
            if runs is not None:
                hint = 'Say which checkpoints to keep, too; all of them: Policy(branches=["*"], runs=...).'
            raise BadOption("a policy without a rule would keep almost no checkpoint", hint=hint)

    # -- what it keeps ----------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Whether a rule looks at times or labels. If not, a checkpoint's place in its line is all that counts."""
        return any((self.hourly, self.daily, self.weekly, self.labels, self.newer_than is not None))

    def keeps(
        self, lines: Mapping[str, Sequence[Moment]], all: Iterable[Moment], now_us: int
    ) -> Iterable[tuple[int, str]]:
        """Numbers of checkpoints that stay, and why. ``lines`` are the branches' histories, newest first."""
        for name, line in lines.items():
            yield from ((one.n, f"last {self.last}") for one in line[: self.last])
            for rule, bucket in _BUCKETS.items():
                yield from _newest_of(line, bucket, getattr(self, rule), rule)
            if _fits(name, self.branches):
                yield from ((one.n, f"branch {name}") for one in line)
        since = now_us - self.newer_than // timedelta(microseconds=1) if self.newer_than is not None else None
        for one in all:
            if one.label and _fits(one.label, self.labels):
                yield one.n, f"label {one.label}"
            if since is not None and one.time_us >= since:
                yield one.n, f"newer than {_span(self.newer_than)}"

    def keeps_run(self, place: int, ended_us: int, now_us: int) -> bool:
        """Whether the values of a run stay that has ended then. ``place``: how many ended after it on its branch."""
        if isinstance(self.runs, timedelta):
            return ended_us >= now_us - self.runs // timedelta(microseconds=1)
        return self.runs is None or place < self.runs

    # -- written down -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Only the rules that it has."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, timedelta):
                found[f"{field.name}_s"] = value.total_seconds()
            elif {"runs": value is not None, "tags": not value}.get(field.name, bool(value)):
                found[field.name] = list(value) if isinstance(value, tuple) else value
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """The policy that ``to_json()`` described."""
        spans = {name.removesuffix("_s"): timedelta(seconds=data[name]) for name in _SPANS if name in data}
        given = {**{name: value for name, value in data.items() if name not in _SPANS}, **spans}
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise BadOption(f"a policy has no rule {min(unknown)!r}")
        return cls(**given)

    def __str__(self) -> str:
        said = [f"{name} {getattr(self, name)}" for name in ("last", *_BUCKETS) if getattr(self, name)]
        said += [f"{name} {', '.join(getattr(self, name))}" for name in ("labels", "branches") if getattr(self, name)]
        said += [f"newer than {_span(self.newer_than)}"] if self.newer_than is not None else []
        if self.runs is not None:
            newer = f"newer than {_span(self.runs)}" if isinstance(self.runs, timedelta) else ""
            said.append(f"values of runs {newer}" if newer else f"values of {self.runs} runs")
        return "; ".join([*said, *([] if self.tags else ["without tags"])])


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _newest_of(line: Sequence[Moment], bucket: Callable[[int], int], most: int, rule: str) -> Iterable[tuple[int, str]]:
    """The newest of each of the newest ``most`` spans of time that have one. Clocks jump, so spans may come again."""
    seen: dict[int, int] = {}
    for one in line if most else ():
        seen.setdefault(bucket(one.time_us), one.n)
    for span in sorted(seen, reverse=True)[:most]:
        yield seen[span], rule


def _span(span: timedelta | None) -> str:
    seconds = int(span.total_seconds()) if span is not None else 0
    for unit, size in (("week", 7 * 86_400), ("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds and seconds % size == 0:
            return f"{seconds // size} {unit}{'s' if seconds != size else ''}"
    return str(span)
