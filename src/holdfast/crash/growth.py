"""What grows: types, the containers that keep them, the lines that allocate them; between two moments or over many.

Owns `heap()`, how two snapshots are compared and how a trend is told from noise. Must not know terminals. Holds always:
taking a snapshot runs no code of the program and ends at its bounds; what a dump holds is read as inert data.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

from holdfast.crash import census, folder, holders, kinds, shapes
from holdfast.crash.dump import Dump, open_dump
from holdfast.crash.limits import Limits
from holdfast.crash.records import as_float, as_int, as_text
from holdfast.crash.render import size
from holdfast.crash.stacks import Frames
from holdfast.errors import BadOption, HoldfastError

_HERE = __file__.rpartition("/")[0] + "/"
_SHOWN = 15  # rows of a text
_DUMPS = 500  # the newest of a folder that are looked at
_STEADY = 0.6  # of the steps from one dump to the next; what shrinks more often is no leak
_SAME_S = 2.0  # a clock that is set moves when a process seems to have begun
_LEAST = 10  # more objects or items than before; less is noise


@dataclass(frozen=True)
class Amount:
    """How many there are, and how many bytes they take (without what they refer to)."""

    count: int = 0
    bytes: int = 0
    holds: str = ""  # of a container: the type of its first item


@dataclass(frozen=True)
class Grown:
    """One thing that grew: a type, a container with its place, or a line that allocates."""

    name: str
    before: Amount
    after: Amount

    @property
    def count(self) -> int:
        return self.after.count - self.before.count

    @property
    def bytes(self) -> int:
        return self.after.bytes - self.before.bytes

    def __str__(self) -> str:
        holds = f" of {self.after.holds}" if self.after.holds else ""
        change = f"{self.before.count:,} -> {self.after.count:,}"
        return f"+{self.count:,} {self.name}{holds}: {change}, {size(self.before.bytes)} -> {size(self.after.bytes)}"


@dataclass(frozen=True)
class Growth:
    """What grew between two snapshots, each list with the most bytes first."""

    types: tuple[Grown, ...]
    containers: tuple[Grown, ...]  # by who holds them: a module's name, an attribute, a local of a frame
    lines: tuple[Grown, ...]  # that allocated more; only where tracemalloc was on

    def __str__(self) -> str:
        told = []
        for title, rows in (("types", self.types), ("containers", self.containers), ("lines", self.lines)):
            told += [title, *(f"  {row}" for row in rows[:_SHOWN])] if rows else []
        return "\n".join(told) or "nothing grew"


@dataclass(frozen=True)
class Snapshot:
    """A heap at one moment: what the collector knows, by type; containers by place; allocations by line."""

    at: float
    objects: int
    types: Mapping[str, Amount] = field(repr=False)
    containers: Mapping[str, Amount] = field(repr=False)
    lines: Mapping[str, Amount] = field(repr=False)

    def diff(self, later: Snapshot) -> Growth:
        """What grew from this snapshot to a later one."""
        pairs = zip(self.kinds, later.kinds, strict=True)
        types, containers, lines = (_grown(old, new) for old, new in pairs)
        return Growth(types, containers, lines)

    @property
    def kinds(self) -> tuple[Mapping[str, Amount], Mapping[str, Amount], Mapping[str, Amount]]:
        """Types, containers, lines."""
        return self.types, self.containers, self.lines


@dataclass(frozen=True)
class Trend:
    """One thing that grows over several dumps."""

    kind: str  # "type", "container" or "line"
    name: str
    holds: str
    counts: tuple[int, ...]  # in the order of time
    bytes: tuple[int, ...]
    per_hour: float  # of the count: the slope of the line that fits best
    bytes_per_hour: float


@dataclass(frozen=True)
class Leaks:
    """What grows in an agent's process, by its dumps."""

    files: tuple[str, ...]  # the dumps that were compared, the oldest first
    at: tuple[float, ...]
    skipped: int  # dumps of the agent without a heap summary, or of other processes
    one_process: bool  # otherwise each dump is of another process, and growth over time may be chance
    trends: tuple[Trend, ...]  # those with the most bytes first, types before the containers that hold them


def heap(*, limits: Limits | None = None) -> Snapshot:
    """A snapshot of this process's heap. Nothing is collected first: call ``gc.collect()`` if garbage should not count.

    With ``tracemalloc.start()`` it also knows which lines allocated what is there.
    """
    limits = limits or Limits()
    was_on = gc.isenabled()
    gc.disable()  # a collection would run finalizers of the program in the middle of the count
    try:
        found = census.take(limits.census_objects, monotonic() + limits.deadline_s, Frames(limits).is_mine)
    finally:
        shapes.forget_layouts()
        if was_on:
            gc.enable()
    return snapshot_of(found, time.time())


def snapshot_of(part: Mapping[str, Any], at: float) -> Snapshot:
    """The heap part of a dump as a snapshot."""
    held = {}
    for row in _rows(part.get("holders"), 6):
        held[as_text(row[0])] = Amount(as_int(row[3]), as_int(row[4]), as_text(row[5]))
    return Snapshot(at, as_int(part.get("objects")), _amounts(part.get("types")), held, _amounts(part.get("places")))


def leaks(agent: str, place: Path) -> Leaks:
    """What grows from dump to dump of an agent, of those in a folder. BadOption when there are no two to compare.

    Where one process left several, only these are compared, because a new process starts small.
    """
    series: dict[tuple[str, int, float], list[tuple[float, str, Snapshot]]] = {}
    others: set[str] = set()
    without = 0
    for path in folder.found(place)[:_DUMPS]:
        try:
            with open_dump(path) as dump:
                names = _agents(dump)
                if agent not in names:
                    others |= names
                    continue
                part = dump.part(kinds.HEAP)
                if not part.get("types"):
                    without += 1
                    continue
                process = _process(dump, series)
                series.setdefault(process, []).append((dump.at, path.name, snapshot_of(part, dump.at)))
        except (HoldfastError, OSError):  # it is damaged, no dump, or was removed meanwhile
            continue
    longest = max(series.values(), key=len, default=[])
    one_process = len(longest) > 1
    every = sorted(longest if one_process else (entry for entries in series.values() for entry in entries),
                   key=lambda entry: entry[0])  # fmt: skip
    if len(every) < 2:
        raise _too_few(agent, place, len(every) + without, without, others)
    skipped = without + sum(map(len, series.values())) - len(every)
    found = trends([entry[2] for entry in every])
    return Leaks(tuple(entry[1] for entry in every), tuple(entry[0] for entry in every), skipped, one_process, found)


def _process(dump: Dump, known: Iterable[tuple[str, int, float]]) -> tuple[str, int, float]:
    """Which process it was. Numbers are used again; when it began is known to about a second."""
    host, pid, began = as_text(dump.head.get("host")), as_int(dump.head.get("pid")), as_float(dump.head.get("began"))
    same = [one for one in known if one[:2] == (host, pid) and abs(one[2] - began) < _SAME_S]
    return same[0] if same else (host, pid, began)


def trends(series: Sequence[Snapshot]) -> tuple[Trend, ...]:
    """What grew from the first snapshot to the last, and in most steps between."""
    found = []
    hours = [(one.at - series[0].at) / 3600 for one in series]
    for which, kind in enumerate(("type", "container", "line")):
        rows = [one.kinds[which] for one in series]
        if not all(rows):  # tracemalloc was not always on
            continue
        for name, last in rows[-1].items():
            amounts = [row.get(name, Amount()) for row in rows]
            counts, taken = [one.count for one in amounts], [one.bytes for one in amounts]
            if _grows(counts):
                slopes = _slope(hours, counts), _slope(hours, taken)
                found.append(Trend(kind, name, last.holds, tuple(counts), tuple(taken), *slopes))
    found.sort(key=lambda one: (one.bytes[0] - one.bytes[-1], one.counts[0] - one.counts[-1], one.name))
    return tuple(found)


def _grows(counts: Sequence[int]) -> bool:
    if counts[-1] - counts[0] < _LEAST:
        return False
    steps = list(pairwise(counts))
    return sum(after > before for before, after in steps) >= _STEADY * len(steps)


def _slope(hours: Sequence[float], values: Sequence[float]) -> float:
    """Of the line with the least squares; 0 where all dumps are of one moment."""
    middle, level = sum(hours) / len(hours), sum(values) / len(values)
    spread = sum((hour - middle) ** 2 for hour in hours)
    return sum((h - middle) * (v - level) for h, v in zip(hours, values, strict=True)) / spread if spread > 0 else 0.0


def _grown(old: Mapping[str, Amount], new: Mapping[str, Amount]) -> tuple[Grown, ...]:
    if not old or not new:
        return ()
    pairs = (Grown(name, old.get(name, Amount()), after) for name, after in new.items() if not _own(name))
    return tuple(sorted((one for one in pairs if one.count > 0), key=lambda one: (-one.bytes, -one.count, one.name)))


def _own(name: str) -> bool:
    """Whether a type or a line belongs to this room, whose snapshots are no growth of the program."""
    return name.startswith((holders.OWN, _HERE))


def _amounts(listed: Any) -> dict[str, Amount]:
    found: dict[str, Amount] = {}
    for row in _rows(listed, 3):
        known = found.get(as_text(row[0]), Amount())  # two classes may have the same name
        found[as_text(row[0])] = Amount(known.count + as_int(row[1]), known.bytes + as_int(row[2]))
    return found


def _rows(listed: Any, length: int) -> list[list[Any]]:
    listed = listed if isinstance(listed, list) else []
    return [row for row in listed if isinstance(row, list) and len(row) == length]


def _agents(dump: Dump) -> set[str]:
    return {as_text(data.get("agent")) for data in dump.extras(kinds.AGENT).values() if isinstance(data, dict)}


def _too_few(agent: str, place: Path, count: int, without: int, others: set[str]) -> BadOption:
    told = f"two dumps of {agent!r} with a heap summary are needed, and {place} has {count - without}"
    if without:
        return BadOption(told, hint=f"{without} more were taken from outside, which cannot look into the heap.")
    if not count and others:
        return BadOption(told, hint=f"There are dumps of {', '.join(sorted(filter(None, others))[:8])}.")
    return BadOption(told, hint='Take some while it runs: holdfast.crash.capture("heap"), every hour for instance.')
