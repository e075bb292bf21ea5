"""Safe points: whether an agent that has come to one is to be saved there, and where its policy comes from.

Owns the file ``holdfast.toml``, the schedule of one agent, what its history says about cost and failures, and the
blocks in the middle of which nothing is saved. Must not know how a checkpoint is written, nor of runs. What always
holds: nothing here saves anything by itself, and no other thread does: whoever comes to a safe point asks; times are
those of a clock that nobody sets.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any

from holdfast.agent import metadata
from holdfast.agent.schedule import GAPS_MAX, Past, Schedule
from holdfast.agent.when import When
from holdfast.codec.operations import operations_size
from holdfast.errors import BadOption, Damaged, Forgotten
from holdfast.store.files import unavailable
from holdfast.store.manifest import Cost

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent

log = logging.getLogger("holdfast.agent")

DEFAULT = When(adaptive=True)
"""What counts where nobody says anything."""

FILE = "holdfast.toml"
FILE_MAX_BYTES = 2**20

PAST_MAX = 256
"""Checkpoints of a history that say what the next one costs: enough for a mean, and read in a few milliseconds."""

END, GATE, GATE_FAILED, PHASE_FAILED, RUN, TOOL, BREAKER = (
    "end", "gate", "gate failed", "phase failed", "run", "tool", "breaker",
)  # fmt: skip
"""What asks for a checkpoint besides a schedule: the end of ``with agent:``, a gate, a run that begins or ends, ..."""


class Pace:
    """When one agent is saved. The policy may be None: then it is saved when the program says so."""

    def __init__(self, agent: Agent, when: When | None) -> None:
        self.when = when
        self._agent = agent
        self._schedule: Schedule | None = None  # made at the first safe point: before, nobody needs it
        self._opened_s = monotonic()
        writer = agent._writer
        self._unclean = writer.failed if writer is not None else 0  # that the process before failed, if it did
        self._torn: set[object] = set()  # whoever has left a block with an exception
        self._acting: set[Any] = set()  # whoever has begun a write and has not come to a safe point since
        if when is not None and when is not DEFAULT:  # whoever asks for something is told if it cannot be
            self._schedule = Schedule(when, self._opened_s, self._past(when))

    @property
    def schedule(self) -> Schedule | None:
        if self._schedule is None and self.when is not None:
            self._schedule = Schedule(self.when, self._opened_s, self._past(self.when))
        return self._schedule

    def due(self, event: str = "") -> str | None:
        """What asks for a checkpoint at this safe point, None if nothing does. Without an event it is a step."""
        schedule = self._schedule if self._schedule is not None else self.schedule
        if schedule is None:
            return None
        if self._acting:
            self._acting.discard(_flow())
        now_s = monotonic()
        if event:
            asked = schedule.event(event, now_s, self._changed_bytes)
        else:
            asked = schedule.step(now_s, self._changed_bytes, _load)
        if asked is None:
            return None
        self._warn(schedule.overdue(now_s))
        return asked if self.whole else None

    @property
    def whole(self) -> bool:
        """Whether nobody is in the middle of something.

        Of a block, or of leaving one with an exception; or another task or thread between a write and its own next safe
        point: what it makes of the answer may not be in the state yet, and after a crash it would write again.
        """
        writer = self._agent._writer
        if self._torn or (writer is not None and writer.atomic):
            return False
        me = _flow() if self._acting else None
        return all(flow is me or _is_over(flow) for flow in tuple(self._acting))

    def acting(self) -> None:
        """A plain loop begins a write. Whoever is saving has the document's lock until the state is fixed."""
        with self._agent._document.lock:
            self._acting -= {flow for flow in self._acting if _is_over(flow)}
            self._acting.add(_flow())

    def saved(self, cost_s: float) -> None:
        """A checkpoint was made, by whomever."""
        if self._schedule is not None:
            now_s = monotonic()
            self._warn(self._schedule.overdue(now_s))
            self._schedule.saved(now_s, cost_s)

    def meant(self) -> None:
        """A checkpoint is captured: so the state is one that somebody means, and whoever captures it has come to rest.

        Not when it has been written: meanwhile another may have begun a write, or left a block with an exception.
        """
        self._torn.clear()
        self._acting.discard(_flow())

    def unchanged(self) -> None:
        """A checkpoint was due, and there is nothing to save."""
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
        self._torn.clear()
        self._acting.clear()

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
        writer = self._agent._check_writer()
        with self._agent._document.lock:
            writer.atomic += 1

    def leave(self, *, well: bool) -> None:
        writer = self._agent._writer
        if writer is None:
            return
        me = _flow()
        with self._agent._document.lock:
            if well:
                self._torn.discard(me)
            else:
                self._torn.add(me)
            writer.atomic -= 1
        if not well and not writer.atomic:
            log.warning(
                "an exception left `with agent.atomic():` of %s; nothing is saved by itself until such a block ends"
                " well, or you call agent.checkpoint() or agent.rollback()",
                self._agent.name,
            )

    # -- what is known ------------------------------------------------------------------------------------

    def _changed_bytes(self) -> int:
        """What a checkpoint would have to write now, without what describes it."""
        document, writer = self._agent._document, self._agent._writer
        found = document.capture(writer.under_way if writer is not None else ())
        return operations_size(found.operations) + sum(map(len, found.chunks.values()))

    def _past(self, when: When) -> Past:
        """What the newest checkpoints say, and that the last process failed, if it did."""
        agent, costs = self._agent, []
        with suppress(Damaged, Forgotten):  # what is left says enough
            for point in islice(agent._db.view.walk(agent._branch.head), PAST_MAX if when.adaptive else 0):
                costs += [point.manifest.cost] if point.manifest.cost is not None else []
        return past_in([*([Cost("", 0, 0, 0, self._unclean)] if self._unclean else []), *costs])

    def _warn(self, late_s: float | None) -> None:
        if late_s is not None:
            file, line = metadata.called_from()
            log.warning(
                "%s had no safe point for %.0f s, before %s line %d: nothing could be saved meanwhile; call"
                " agent.step() in the loop that leads there",
                self._agent.name, late_s, file, line,
            )  # fmt: skip


def past_in(costs: Sequence[Cost]) -> Past:
    """What checkpoints say about failures and cost, newest first. By clocks that nobody sets."""
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


def _flow() -> Any:
    """Who is executing: the current task of asyncio, or the thread."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        return asyncio.current_task() or threading.current_thread()
    return threading.current_thread()


def _is_over(flow: Any) -> bool:
    return not flow.is_alive() if isinstance(flow, threading.Thread) else bool(flow.done())


def _load() -> float:
    """Processes that want to run, for each processor."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


# -- the file -------------------------------------------------------------------------------------------------


def find_when(place: str, agent: str, *, is_directory: bool) -> When | None:
    """The policy of an agent where its program gives none: of the store's file, or the project's, or the default.

    The project is the directory that the store's is in; for a store on a server, the one that the program was started
    in. If both files say something about the agent, they have to say the same.
    """
    folders = [Path(place), Path(place).parent] if is_directory else [Path()]
    found = [(file, said[0]) for file in (folder / FILE for folder in folders) if (said := _said(file, agent))]
    for file, when in found[1:]:
        if when != found[0][1]:
            raise BadOption(
                f"{found[0][0]} and {file} disagree about when to checkpoint {agent!r}; it was not opened",
                hint="Take it out of one of them, or say it in the program: store.agent(name, when=...).",
            )
    return found[0][1] if found else DEFAULT


def _said(file: Path, agent: str) -> tuple[When | None] | None:
    """What a file says about an agent, alone in a tuple; None if it says nothing, or is not there."""
    try:
        with file.open("rb") as opened:
            data = opened.read(FILE_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unavailable(error, f"reading {file}") from error
    import tomllib  # few stores have such a file

    try:
        if len(data) > FILE_MAX_BYTES:
            raise ValueError(f"it is longer than {FILE_MAX_BYTES:,} bytes")
        content = tomllib.loads(data.decode())
    except ValueError as error:  # of TOML, or of UTF-8
        raise BadOption(f"{file} cannot be read: {error}", hint="See the guide, When to checkpoint.") from error
    _check_keys(content, {"when"}, str(file))
    said = content.get("when")
    if not isinstance(said, dict):
        return None if said is None else (_policy(said, f"{file}, when"),)
    single = said.pop("agents", {})
    if not isinstance(single, dict):
        raise BadOption(f"{file}, when.agents: a table is needed", hint='Write [when.agents."trip-*"].')
    # All are read, so that a mistake is found when the file is used first, and not when that agent is opened.
    policies = {pattern: _policy(one, f"{file}, when.agents.{pattern}") for pattern, one in single.items()}
    common = [_policy(said, f"{file}, when")] if said else []
    if agent in policies:
        return (policies[agent],)
    fits = [policies[pattern] for pattern in policies if fnmatchcase(agent, pattern)]
    return ((*fits, *common)[0],) if fits or common else None


def _policy(said: Any, where: str) -> When | None:
    """A table, or ``false``: only when the program says so."""
    return None if said is False else When.from_table(said, where)


def _check_keys(content: dict[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            raise BadOption(f"{where}: there is no {key!r}", hint=f"It may have {', '.join(sorted(known))}.")
