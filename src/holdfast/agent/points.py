"""Safe points: whether an agent that has come to one is to be saved there.

Owns the schedule of one agent, what its history says about cost and failures, and who is in the middle of something, so
that nothing is saved. Must not know how a checkpoint is written, nor of runs. What always holds: nothing here saves
anything by itself, and no other thread does: whoever comes to a safe point asks; times are those of a clock that nobody
sets.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from holdfast.agent import metadata
from holdfast.agent.schedule import GAPS_MAX, OVERDUE_MIN_S, Past, Schedule
from holdfast.agent.when import DEFAULT, When
from holdfast.codec.operations import operations_size
from holdfast.codec.state import Sections
from holdfast.codec.told import Captured
from holdfast.errors import Damaged, Forgotten
from holdfast.store.catalog import View
from holdfast.store.manifest import Cost

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent

log = logging.getLogger("holdfast.agent")

PAST_MAX = 256
"""Checkpoints of a history that say what the next one costs: enough for a mean, and read in a few milliseconds."""

UNSAVED = "; nothing was saved"
"""How errors end that refuse a state."""
END, GATE, GATE_FAILED, PHASE_FAILED, INVARIANT_FAILED, RUN, TOOL, BREAKER, RESCUE = (
    "end", "gate", "gate failed", "phase failed", "invariant failed", "run", "tool", "breaker", "rescue",
)  # fmt: skip
"""What asks for a checkpoint besides a schedule: the end of ``with agent:``, a gate, a run that begins or ends, ..."""


class Rest:
    """Whether nobody is in the middle of something, so that a state can be saved. Its branch's writer has it.

    In the middle is who is in a block, or has left one with an exception; and another task or thread between a write
    and its own next safe point: what it makes of the answer may not be in the state yet, and after a crash it would
    write again. Changed with the document's lock, which whoever is saving has until the state is fixed.
    """

    __slots__ = ("acting", "atomic", "torn")

    def __init__(self) -> None:
        self.atomic = 0  # blocks that are under way
        self.torn: set[object] = set()  # whoever has left one with an exception
        self.acting: set[Any] = set()  # whoever has begun a write and has not come to a safe point since

    @property
    def whole(self) -> bool:
        if self.torn or self.atomic:
            return False
        me = _flow() if self.acting else None
        return all(flow is me or _is_over(flow) for flow in tuple(self.acting))

    def act(self) -> None:
        """The caller begins a write."""
        self.acting -= {flow for flow in self.acting if _is_over(flow)}
        self.acting.add(_flow())

    def arrived(self) -> None:
        """The caller is at a safe point."""
        if self.acting:
            self.acting.discard(_flow())

    def leave(self, *, well: bool) -> None:
        """The caller leaves a block."""
        if well:
            self.torn.discard(_flow())
        else:
            self.torn.add(_flow())
        self.atomic -= 1


class Pace:
    """When one agent is saved. The policy may be None: then it is saved when the program says so."""

    def __init__(self, agent: Agent, when: When | None) -> None:
        self.when = when
        self._agent = agent
        self._schedule: Schedule | None = None  # made at the first safe point: before, nobody needs it
        self._opened_s = monotonic()
        writer = agent._writer
        self._unclean = writer.failed if writer is not None else 0  # that the process before failed, if it did
        self._rest = writer.rest if writer is not None else Rest()
        self._asked = ""  # what wants a checkpoint at the next safe point
        self._put_off_s: float | None = None  # since when one is due and nobody may take it; endless once that was told
        self._counted: tuple[Sections, int] | None = None  # how much had changed, and in what the store was told then
        if when is not None and when is not DEFAULT:  # whoever asks for something is told if it cannot be
            self._schedule = Schedule(when, self._opened_s, self._past(when))

    @property
    def schedule(self) -> Schedule | None:
        if self._schedule is None and self.when is not None:
            self._schedule = Schedule(self.when, self._opened_s, self._past(self.when))
        return self._schedule

    def due(self, event: str = "") -> str | None:
        """What asks for a checkpoint at this safe point, None if nothing does. Without an event it is a step."""
        self._rest.arrived()
        if self._asked and self.whole:
            return self._asked
        schedule = self._schedule if self._schedule is not None else self.schedule
        if schedule is None:
            return None
        now_s = monotonic()
        if event:
            asked = schedule.event(event, now_s, self._changed_bytes)
        else:
            asked = schedule.step(now_s, self._changed_bytes, _load)
        if asked is None:
            return None
        self._warn(schedule.overdue(now_s))
        if self.whole:
            return asked
        if not self._rest.torn:  # which was told
            self._put_off(now_s)
        return None

    def _put_off(self, now_s: float) -> None:
        """A checkpoint is due, and somebody is in the middle of something. Where that goes on, it is told once."""
        if self._put_off_s is None:
            self._put_off_s = now_s
        elif now_s - self._put_off_s > OVERDUE_MIN_S:
            self._put_off_s = math.inf
            log.warning(
                "%s has not been saved for %.3g s: at each safe point another task or thread was between a write and"
                " its own safe point, or in `with agent.atomic():`; let all of them come to one now and then",
                self._agent.name, OVERDUE_MIN_S,
            )  # fmt: skip

    def ask(self, trigger: str) -> None:
        """Somebody else than the schedule wants a checkpoint: at the next safe point it is due."""
        self._asked = trigger

    @property
    def whole(self) -> bool:
        """Whether nobody is in the middle of something."""
        return self._rest.whole

    def acting(self) -> None:
        """A plain loop begins a write. Whoever is saving has the document's lock until the state is fixed."""
        with self._agent._document.lock:
            self._rest.act()

    def saved(self, cost_s: float) -> None:
        """A checkpoint was made, by whomever."""
        self._asked, self._counted = "", None
        if self._put_off_s != math.inf:
            self._put_off_s = None
        if self._schedule is not None:
            now_s = monotonic()
            self._warn(self._schedule.overdue(now_s))
            self._schedule.saved(now_s, cost_s)

    def meant(self) -> None:
        """A checkpoint is captured: so the state is one that somebody means, and whoever captures it has come to rest.

        Not when it has been written: meanwhile another may have begun a write, or left a block with an exception.
        """
        self._rest.torn.clear()
        self._rest.arrived()

    def unchanged(self) -> None:
        """A checkpoint was due, and there is nothing to save."""
        self._asked = ""
        if self._schedule is not None:
            self._schedule.unchanged(monotonic())

    def failed(self) -> None:
        """The agent failed. The next checkpoint says so, for whoever opens it later."""
        if self._agent._writer is not None:
            self._agent._writer.failed += 1
        if self._schedule is not None:
            self._schedule.failed(monotonic(), lost=False)

    def moved(self) -> None:
        """The state is another one: what was left in the middle of a block is gone."""
        self._counted = None
        self._rest.torn.clear()
        self._rest.acting.clear()

    def went_back(self, *, known: bool) -> None:
        """The agent was rolled back, and what was not saved is gone. ``known``: the failure before that was told."""
        self.moved()
        if not known and self._agent._writer is not None:
            self._agent._writer.failed += 1
        if self._schedule is not None and known:
            self._schedule.unchanged(monotonic())
        elif self._schedule is not None:
            self._schedule.failed(monotonic())

    # -- blocks -------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """From now on nothing is saved: whoever is saving has the document's lock until the state is fixed."""
        self._agent._check_writer()
        with self._agent._document.lock:
            self._rest.atomic += 1

    def leave(self, *, well: bool) -> None:
        with self._agent._document.lock:
            self._rest.leave(well=well)
        if not well and not self._rest.atomic:
            log.warning(
                "an exception left `with agent.atomic():` of %s; nothing is saved by itself until such a block ends"
                " well, or you call agent.checkpoint() or agent.rollback()",
                self._agent.name,
            )

    # -- what is known ------------------------------------------------------------------------------------

    def _changed_bytes(self) -> int:
        """What a checkpoint would have to write now, without what describes it, or more if that is not enough either.

        To work that out takes as long as it is large. So what has come since the last safe point is added, and all of
        it is worked out only where that sum would do, or where it is not known: what changed twice counts once then.
        """
        document, writer, when = self._agent._document, self._agent._writer, self.when
        under_way = writer.under_way if writer is not None else ()
        with document.lock:
            known, self._counted = self._counted, None
            if known is not None and known[0] is document.told.sections and not under_way:
                size = known[1] + _size(document.settle())
                if when is None or when.changed_bytes is None or size < when.changed_bytes:
                    self._counted = document.told.sections, size
                    return size
            size = _size(document.capture(under_way))
            if not under_way:
                self._counted = document.told.sections, size
            return size

    def _past(self, when: When) -> Past:
        """What the newest checkpoints say, and that the last process failed, if it did."""
        agent = self._agent
        costs = costs_of_line(agent._db.view, agent._branch.head) if when.adaptive else []
        return past_in([*([Cost("", 0, 0, 0, self._unclean)] if self._unclean else []), *costs])

    def late_s(self) -> float | None:
        """For how long there was no safe point, if that was too long and nobody was told."""
        return self.schedule.overdue(monotonic()) if self.schedule is not None else None

    def _warn(self, late_s: float | None) -> None:
        if late_s is not None:
            file, line = metadata.called_from()
            log.warning(
                "%s had no safe point for %.3g s, before %s line %d: nothing could be saved meanwhile; call"
                " agent.step() in the loop that leads there",
                self._agent.name, late_s, file, line,
            )  # fmt: skip


def _size(captured: Captured) -> int:
    return operations_size(captured.operations) + sum(map(len, captured.chunks.values()))


def costs_of_line(view: View, head: int) -> list[Cost]:
    """What the newest checkpoints up to one say about cost and failures, newest first."""
    found: list[Cost] = []
    with suppress(Damaged, Forgotten):  # what is left says enough
        for point in islice(view.walk(head), PAST_MAX):
            found += [point.manifest.cost] if point.manifest.cost is not None else []
    return found


def past_in(costs: Sequence[Cost]) -> Past:
    """What checkpoints say about failures and cost, newest first. By clocks that nobody sets."""
    from statistics import median  # slow to load, and the first safe point is soon enough

    gaps: list[float] = []
    age_s = 0.0
    for cost in reversed(costs):
        age_s += cost.elapsed_ms / 1e3
        for _ in range(min(cost.failures, GAPS_MAX)):
            gaps.append(age_s)
            age_s = 0.0
    stalls = [cost.stall_us for cost in costs if cost.stall_us]
    cost_s = median(stalls) / 1e6 if stalls else None
    return Past(len(gaps), sum(gaps) + age_s, cost_s, tuple(gaps[-GAPS_MAX:]), age_s)


class Atomic:
    """``with agent.atomic():``: in the middle of it nothing is saved."""

    __slots__ = ("_pace",)

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __enter__(self) -> None:
        self._pace.enter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pace.leave(well=kind is None)


def current_task() -> Any:
    """The task of asyncio that is executing, None where there is none."""
    asyncio = sys.modules.get("asyncio")  # a program that never loaded it has no tasks
    if asyncio is None or (loop := asyncio._get_running_loop()) is None:
        return None
    return asyncio.current_task(loop)


def _flow() -> Any:
    """Who is executing: a task, or the thread."""
    return current_task() or threading.current_thread()


def _is_over(flow: Any) -> bool:
    return not flow.is_alive() if isinstance(flow, threading.Thread) else bool(flow.done())


def _load() -> float:
    """Processes that want to run, for each processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)
