"""What an agent's checkpoints cost: how many, what asked for them, bytes, and time, as its history says.

Owns the figures, and nothing that is written: each checkpoint carries what the one before it has cost its program.
Reads one moment of the store. What always holds: spans of time are those of a clock that nobody sets; only days are by
the calendar, and those are labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec import Struct, to_builtins

from holdfast.agent import history, metadata
from holdfast.agent.fleet import check_limit
from holdfast.agent.graph import Graph
from holdfast.agent.points import costs_of_line, past_in
from holdfast.agent.schedule import Schedule
from holdfast.agent.when import When
from holdfast.errors import BadOption, Damaged
from holdfast.store.catalog import View
from holdfast.store.rows import Agent, Point

if TYPE_CHECKING:
    from holdfast.agent.store import Store

LOOKED_AT = 1_000
"""Checkpoints that figures are made of, unless somebody asks for more."""
DAYS = 14
RECENT = 8


class Spread(Struct, frozen=True):
    """Spans of time in seconds: the middle one, one that 99 of 100 are below, and all together."""

    p50_s: float
    p99_s: float
    total_s: float


class Day(Struct, frozen=True):
    """What was saved on one day (UTC)."""

    day: str
    checkpoints: int
    logical_bytes: int


class Recent(Struct, frozen=True):
    """A checkpoint of the newest. Spans are null where nobody has written down what it cost: that of the newest."""

    id: str
    label: str
    time: str
    trigger: str
    stall_s: float | None
    durable_s: float | None


class Costs(Struct, frozen=True):
    """What the newest checkpoints of an agent cost, on all its branches.

    ``more``: older ones that were not looked at. ``triggers``: how many of them each trigger asked for; ``""`` is
    the program. ``logical_bytes``: what they recorded, ``stored_bytes``: what that takes in the store, nodes and
    packs not counted, because they are shared. ``stall``: how long the program stood still for each, ``durable``:
    how long it took until each was durable. ``share``: what stalls took of ``run_s``, the time in which its
    programs ran. ``frees_bytes``: what the store's own policy of what to keep would free; null where there is none.
    ``when``: the policy of the program that wrote the newest, as a table; null if that saves only when it says so,
    or is not known. ``interval_s``: what adaptive would begin with now, on the branch that was saved last.
    """

    agent: str
    checkpoints: int
    more: int
    triggers: dict[str, int]
    logical_bytes: int
    stored_bytes: int
    bytes_per_day: int
    stall: Spread | None
    durable: Spread | None
    run_s: float
    share: float | None
    failures: int
    frees_bytes: int | None
    when: dict[str, Any] | None
    interval_s: float | None
    days: list[Day]
    recent: list[Recent]

    def to_json(self) -> dict[str, Any]:
        """All of it, as `holdfast stats --json` prints it."""
        found: dict[str, Any] = to_builtins(self)
        return found


def costs_of(store: Store, agent: Agent, limit: int | None) -> Costs:
    check_limit(limit)
    with store._db.moment() as (view, _):
        graph = Graph(view, agent)
        points = list(islice(graph.everything(), limit))
        more = graph.counted()[0] - len(points)
        sizes = [len(point.raw) + len(view.operations(point)) for point in points]
        stored = _stored(view, points)
        when = _when(store, points)
        line = [] if when is None or not when.adaptive else costs_of_line(view, points[0].n)
    told = [point.manifest.cost for point in points if point.manifest.cost is not None]
    stalls = [cost.stall_us / 1e6 for cost in told if cost.stall_us]
    run_s, failures = sum(cost.elapsed_ms for cost in told) / 1e3, sum(cost.failures for cost in told)
    days = _days(points, sizes)
    return Costs(
        agent=agent.name,
        checkpoints=len(points),
        more=more,
        triggers=dict(Counter(point.manifest.cost.trigger if point.manifest.cost else "" for point in points)),
        logical_bytes=sum(sizes),
        stored_bytes=stored,
        bytes_per_day=stored // _span_days(days) if days else 0,
        stall=_spread(stalls),
        durable=_spread([cost.durable_us / 1e6 for cost in told if cost.durable_us]),
        run_s=run_s,
        share=min(1.0, sum(stalls) / run_s) if run_s else None,
        failures=failures,
        frees_bytes=_frees(store, agent),
        when=when.to_table() if when is not None else None,
        interval_s=Schedule(when, 0.0, past_in(line)).interval_s if when is not None and when.adaptive else None,
        days=days[-DAYS:],
        recent=[_recent(point, points) for point in points[:RECENT]],
    )


def _spread(spans: Sequence[float]) -> Spread | None:
    ordered = sorted(spans)
    if not ordered:
        return None
    return Spread(median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], sum(ordered))


def _stored(view: View, points: Sequence[Point]) -> int:
    """Loose ones as they lie there; of a segment the part that is theirs."""
    loose = sum(len(point.row.data) for point in points if point.row.data is not None)
    folded = Counter(point.row.s for point in points if point.row.data is None)
    for s, count in folded.items():
        packed = view.rows("segment", "WHERE s = ?", (s,))
        size = sum(len(part) for part in packed[0] if isinstance(part, bytes)) if packed else 0
        loose += size * count // max(1, len(view.segment(s).members))
    return loose


def _when(store: Store, points: Sequence[Point]) -> When | None:
    """The policy of the program that wrote the newest checkpoint. Our own commands are none, and have none."""
    state = history.state_of(store._db.now, None)
    for name in dict.fromkeys(point.manifest.metadata for point in points):
        try:
            said = metadata.read(state, name)
        except Damaged:  # lost metadata: the figures are whole without
            return None
        if metadata.by_a_program(said):
            break
    else:
        return None
    try:
        return When.from_table(said["when"], "the metadata of a checkpoint") if "when" in said else None
    except BadOption:  # of a version that knows more
        return None


def _days(points: Sequence[Point], sizes: Sequence[int]) -> list[Day]:
    counts: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for point, size in zip(points, sizes, strict=True):
        day = f"{datetime.fromtimestamp(point.manifest.time_us / 1e6, UTC):%Y-%m-%d}"
        counts[day] += 1
        added[day] += size
    return [Day(day, counts[day], added[day]) for day in sorted(counts)]


def _span_days(days: Sequence[Day]) -> int:
    first, last = (datetime.fromisoformat(one.day) for one in (days[0], days[-1]))
    return (last - first).days + 1


def _frees(store: Store, agent: Agent) -> int | None:
    if store._policies.of(agent) is None:
        return None
    return store.retain(None, [agent.name], dry_run=True).freed_bytes


def _recent(point: Point, points: Sequence[Point]) -> Recent:
    """What it cost is written in the next one of its writer."""
    after = next((one.manifest.cost for one in points if one.manifest.parent == point.id), None)
    known = after is not None and after.stall_us > 0
    return Recent(
        id=point.id.hex(),
        label=point.manifest.label,
        time=datetime.fromtimestamp(point.manifest.time_us / 1e6, UTC).isoformat(),
        trigger=point.manifest.cost.trigger if point.manifest.cost is not None else "",
        stall_s=after.stall_us / 1e6 if after is not None and known else None,
        durable_s=after.durable_us / 1e6 if after is not None and after.durable_us else None,
    )
