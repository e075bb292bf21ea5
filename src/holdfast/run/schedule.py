"""Schedules: which times of which functions have come, and what is done about them.

Owns the row ``schedules`` of table ``store``: for each function that somebody declared with ``every=``, its times and
the first one that nobody has decided about. Must not know how a run goes; a time becomes a run by ``store.submit``.
What always holds: a run's id is its instant, so that a time is executed once, whoever submits it and however often;
what becomes of a time is decided in one transaction, by comparison with what was read; a run is submitted before the
row says so, so that a worker that is killed anywhere leaves to the others what it has not done; of one function, one
scheduled run is open at a time.

Whoever starts last says what the times are, and all others follow the row: two programs that differ do not contend.

    Schedules(store).look()              decide about what has come, and submit it: for a worker, all the time
    listed(store)                        what there is, as ``ScheduleInfo``
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from msgspec import ValidationError, convert, to_builtins
from msgspec.structs import replace

from holdfast.errors import BadOption, Contention, Damaged, HoldfastError, Incompatible
from holdfast.run import opened
from holdfast.run.cron import EVERY_MAX, NEVER, Schedule, id_of, moment
from holdfast.run.durables import DURABLES, configured
from holdfast.run.line import Line
from holdfast.run.scope import now_us
from holdfast.store.catalog import View
from holdfast.store.changes import Change
from holdfast.store.database import SCHEDULES
from holdfast.store.manifest import TIME_MAX
from holdfast.store.rows import body_bytes, read_body

if TYPE_CHECKING:
    from holdfast.run.store import Store

log = logging.getLogger("holdfast.run")

MOST = 100
"""How many times of a function may wait to be executed. Of more, the newest count."""

LATE_US = 60 * 1_000_000
"""A time that is found so much later was missed: nobody worked when it came."""

BACK_US = 3600 * 1_000_000
"""What was decided so far ahead of the clock, a wrong clock has decided. Clocks of machines differ by less."""

LOOK_S = 1.0
"""How often a worker reads the row, besides when a time has come: others decide, and may be killed then."""

LEFT_S = 60.0
"""How long a worker leaves a function alone whose run it could not submit."""

TRIES = 8
"""How often a decision is made anew because somebody else was faster, before the next look."""


class Kept(Schedule, frozen=True):
    """What the row says of a function, in microseconds; 0: never.

    ``next`` is the first instant that nobody has decided about, and ``at`` when that was last done. ``pending`` are
    those that were decided to be executed, and were not submitted yet; ``last`` is the newest that was, ``skipped`` the
    newest that was passed over.
    """

    at: int
    next: int
    last: int = 0
    skipped: int = 0
    pending: tuple[int, ...] = ()


Rows = dict[str, Kept]


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A function that is executed by itself.

    ``next`` is the next time, or None where there is none; ``overdue``: it has come, and no worker has looked.
    ``last`` is the newest time that has become a run, ``skipped`` the newest that was passed over; ``waiting`` are
    those that wait for the run before them, ``running`` the agent of a run that has not ended.
    """

    function: str
    every: str
    zone: str
    missed: str
    overlap: str
    next: datetime | None
    overdue: bool
    last: datetime | None
    skipped: datetime | None
    waiting: tuple[datetime, ...]
    running: str

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        times = {name: _shown(getattr(self, name)) for name in ("next", "last", "skipped")}
        return {**asdict(self), **times, "waiting": [one.isoformat() for one in self.waiting]}


def _shown(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None


def listed(store: Store) -> list[ScheduleInfo]:
    """Every schedule that a worker has declared, the next one first."""
    view, now = store._db.view, now_us()

    def told(name: str, row: Kept) -> ScheduleInfo:
        dates = {what: moment(at) if at else None for what, at in (("last", row.last), ("skipped", row.skipped))}
        return ScheduleInfo(
            function=name, every=row.every, zone=row.zone, missed=row.missed, overlap=row.overlap,
            next=moment(row.next) if row.next < NEVER else None, overdue=row.next + LATE_US < now,
            waiting=tuple(map(moment, row.pending)), running=_agent(name, row.last) if _runs(view, name, row) else "",
            **dates,
        )  # fmt: skip

    found = sorted(_read(view.fact(SCHEDULES)).items(), key=lambda one: (one[1].next, one[0]))
    return [told(name, row) for name, row in found]


# -- the row ------------------------------------------------------------------------------------------------------


def _read(value: bytes | None) -> Rows:
    try:
        said = convert(read_body(value, "store schedules"), Rows) if value is not None else {}
    except (HoldfastError, ValidationError) as error:
        raise Damaged("table store, row schedules: not schedules", what=("store schedules",)) from error
    for row in said.values():
        numbers = (row.at, row.last, row.skipped, *row.pending, row.next if row.next != NEVER else 0)
        sound = all(0 <= number < TIME_MAX for number in numbers) and len(row.pending) <= MOST
        if not sound or max(len(row.every), len(row.zone)) > EVERY_MAX:
            raise Damaged("table store, row schedules: not schedules", what=("store schedules",))
    return said


def _changed(store: Store, step: Callable[[View, Rows], Rows]) -> Rows | None:
    """The rows after a step, which is made in one transaction; None where others were faster all the time."""

    def work(change: Change) -> Rows:
        made: list[Rows] = []

        def swap(value: bytes | None) -> bytes:
            made[:] = [step(change, _read(value))]
            return body_bytes(to_builtins(made[0]))

        change.swap_fact(SCHEDULES, swap)
        return made[0]

    for _ in range(TRIES):
        with suppress(Contention):
            return store._db.change(work)
    return None


def _agent(function: str, at: int) -> str:
    return f"{function}/{id_of(at)}"


def _runs(view: View, function: str, row: Kept) -> bool:
    """Whether the newest run of a schedule has not ended."""
    agent = view.agent(_agent(function, row.last)) if row.last else None
    branch = view.branch(agent.a, "main") if agent is not None else None
    wanted = opened.key(id_of(row.last))
    return branch is not None and any(one.run == wanted and not one.signal for one in view.opened(branch.b))


# -- deciding -----------------------------------------------------------------------------------------------------


def declare(row: Kept | None, said: Schedule, now: int) -> Kept:
    """What is kept of a function whose program says this. Other times begin now; what was decided before stays."""
    fresh = said.after(now)
    if row is None:
        return Kept(said.every, said.zone, said.missed, said.overlap, at=now, next=fresh)
    if row.times != said.times:
        row = replace(row, every=said.every, zone=said.zone, at=now, next=fresh)
    elif row.next > now and row.at <= now:  # the zone's rules may have changed since
        row = replace(row, next=fresh)
    return replace(row, missed=said.missed, overlap=said.overlap)


def decide(row: Kept, now: int, *, runs: bool) -> Kept:
    """What becomes of the times that have come. ``runs``: the run before them has not ended."""
    if row.at > now + BACK_US:
        return replace(row, at=now, next=row.after(now))
    if row.next > now:
        return row
    # It counts though the zone's rules be others here: whoever declared it, or decided last, has said so to all.
    due = sorted({row.next, *row.between(row.next, now, MOST + 1)})
    chosen = due[-MOST:]
    if row.missed != "each":
        in_time = [at for at in due if at + LATE_US >= now]
        chosen = in_time or (due[-1:] if row.missed == "once" else [])
    if row.overlap == "skip" and (runs or row.pending):
        chosen = []
    waiting = (*row.pending, *chosen)
    passed = [*waiting[:-MOST], *(at for at in due if at not in chosen)]
    return replace(row, at=now, next=row.after(now), pending=waiting[-MOST:], skipped=max(passed, default=row.skipped))


class Schedules:
    """A worker's part in the schedules of its store: those of the functions that it has."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._said: dict[str, Schedule | None] = {}  # what this process has declared
        self._next_us = 0  # when the next time comes, as far as is known
        self._look_s = 0.0  # when to look in any case
        self._left: dict[str, float] = {}  # functions that something is wrong with, and until when they are left alone

    def look(self, *, at_once: bool = False) -> bool:
        """Decide about the times that have come, and submit what is to be executed; whether something was.

        Reads nothing while there is nothing to do, unless ``at_once`` is given. What goes wrong is logged, and never
        keeps the worker from its other runs.
        """
        if not at_once and now_us() < self._next_us and time.monotonic() < self._look_s:
            return False
        self._look_s = time.monotonic() + LOOK_S
        try:
            return self._look()
        except HoldfastError as error:
            log.warning("schedules: %s", error)
            self._next_us = NEVER  # that is, when it looks in any case
            return False

    def _look(self) -> bool:
        said = {name: made.schedule for name, made in DURABLES.items()}
        now, view = now_us(), self._store._db.view
        rows = _read(view.fact(SCHEDULES))
        if self._step(view, rows, said, now) != rows:
            decided = _changed(self._store, lambda view, rows: self._step(view, rows, said, now))
            if decided is None:
                return False
            rows = decided
        self._said = said
        submitted = {name: row for name, row in rows.items() if row.pending and self._submit(name, row)}
        if submitted:
            _changed(self._store, lambda _, rows: _settled(rows, submitted))
        mine = (row.next for name, row in rows.items() if self._is_mine(name))
        self._next_us = max(now + 1, min(mine, default=NEVER))
        return bool(submitted)

    def _is_mine(self, name: str) -> bool:
        return name in DURABLES and self._left.get(name, 0.0) <= time.monotonic()

    def _leave(self, name: str, error: Exception) -> None:
        log.warning("the schedule of %s is left alone for %d s: %s", name, LEFT_S, error)
        self._left[name] = time.monotonic() + LEFT_S

    def _step(self, view: View, rows: Rows, said: Mapping[str, Schedule | None], now: int) -> Rows:
        """The rows after what this process has to say about them."""
        new = dict(rows)
        for name, schedule in said.items():
            row = new.get(name)
            if schedule != self._said.get(name) or name not in self._said:
                row = declare(row, schedule, now) if schedule is not None else None
            if row is None:
                new.pop(name, None)
            elif self._is_mine(name):
                try:
                    runs = row.next <= now and row.overlap == "skip" and _runs(view, name, row)
                    new[name] = decide(row, now, runs=runs)
                except (BadOption, Damaged, Incompatible, LookupError, OSError, ValueError) as error:
                    self._leave(name, error)  # its row is damaged, or another machine has said what this one lacks
        return new

    def _submit(self, name: str, row: Kept) -> bool:
        """Submit the first time that waits, unless the run before it has not ended; whether it is a run by now."""
        if not self._is_mine(name):
            return False
        store, at, made = self._store, row.pending[0], DURABLES[name]
        view = store._db.view
        try:
            if _runs(view, name, row):
                return False
            agent = view.agent(_agent(name, at))
            branch = view.branch(agent.a, "main") if agent is not None else None
            if branch is not None:
                if Line(store._db, branch.b).begun(id_of(at)):
                    return True  # by somebody who has not said so, or was killed before
                if store._db.leases.alive(branch.uuid, branch.generation):
                    return False  # somebody is about to
            store.submit(configured(made, id=id_of(at)), *([moment(at)] if made.timed else []))
        except Exception as error:  # noqa: BLE001 - what keeps one from being submitted does not stop the others
            self._leave(name, error)
            return False
        return True


def _settled(rows: Rows, submitted: Mapping[str, Kept]) -> Rows:
    """The rows once the first of what waited is a run."""
    new = dict(rows)
    for name, before in submitted.items():
        row = rows.get(name)
        if row is not None and row.pending[:1] == before.pending[:1]:
            new[name] = replace(row, pending=row.pending[1:], last=row.pending[0])
    return new
