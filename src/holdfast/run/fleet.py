"""What all agents together do: pages of runs and of effects, and how many runs are open.

Owns which lines are read for a list, and when enough of them are. What is said of a run or an effect, ``listing`` says.
Writes nothing. What always holds: lines are read from the one that changed last, until no other one can have anything
newer, so that a page is the page that reading everything would give; where the table of open runs says which lines can
have what is asked for, it spares the others, but never one that came from elsewhere, of which it says nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from holdfast.agent.fleet import Page, check_limit, picked
from holdfast.errors import BadOption, UnknownAgent
from holdfast.run import opened
from holdfast.run.effects import Effect
from holdfast.run.listing import STATUSES, WORDS, RunInfo, View, effects_of, runs_of
from holdfast.run.records import FAILED_KEY
from holdfast.run.scope import now_us
from holdfast.store.catalog import slices

if TYPE_CHECKING:
    from holdfast.run.store import Store

T = TypeVar("T")

OPEN_STATUSES = frozenset({"queued", "running", "interrupted", "waiting", "needs attention"})
SORTS = ("began", "urgent")
_URGENT = ("needs attention", "interrupted")
_CALM = 4


def runs(
    store: Store, pattern: str | None, branch: str | None, status: str | None, limit: int | None, sort: str
) -> Page[RunInfo]:
    if status is not None and status not in STATUSES:
        raise BadOption(f"status {status!r}", hint=f"Use one of {', '.join(STATUSES)}.")
    if sort not in SORTS:
        raise BadOption(f"sort {sort!r}", hint=f"Use one of {', '.join(SORTS)}.")
    lines = _Lines(store, pattern, branch, limit)
    if status == "waiting":
        lines.only(lines.foreign() | lines.view.open_branches("length(signal) = 0 OR due = ?", opened.ATTENTION))
    elif status in OPEN_STATUSES:  # those that wait for a time or a signal have a row that names it
        some = "due = ? OR (due = ? AND length(signal) = 0)"
        lines.only(lines.foreign() | lines.view.open_branches(some, opened.ATTENTION, opened.NOW))
    elif status == "failed":
        lines.only(lines.foreign() | lines.view.branches_with(FAILED_KEY))

    def look(view: View) -> list[RunInfo]:
        return [info for info in runs_of(view) if status in {None, info.status}]

    if sort == "began":
        return lines.page(look, _began_us)
    if limit is None:
        return Page(sorted(lines.page(look, _began_us), key=rank))
    return _urgent_first(lines, limit, look)


def _urgent_first(lines: _Lines, limit: int, look: Callable[[View], list[RunInfo]]) -> Page[RunInfo]:
    """A page, with what needs somebody in front, as far as the table of open runs tells where that is."""
    every, found = lines.order, Page[RunInfo]()
    some = lines.view.open_branches
    wanted: list[Callable[[], set[int]]] = [
        lambda: some("due = ?", opened.ATTENTION),
        lambda: some("due = ? AND length(signal) = 0", opened.NOW),
        lambda: some("due <= ?", now_us()),
        lambda: lines.view.branches_with(FAILED_KEY),
    ]
    for places in wanted:
        lines.order, lines.limit = every, limit - len(found)
        lines.only(places())
        found += lines.page(partial(_urgent_of, look, {_key(info) for info in found}), _began_us)
        if len(found) == limit:
            found.more = len(every)
            found.sort(key=rank)
            return found
    lines.order, lines.limit = every, limit - len(found)
    rest = lines.page(lambda view: [info for info in look(view) if not is_urgent(info)], _began_us)
    made = Page([*sorted(found, key=rank), *rest])
    made.more = rest.more
    return made


def _urgent_of(look: Callable[[View], list[RunInfo]], known: set[tuple[str, ...]], view: View) -> list[RunInfo]:
    if view.at_it():
        return []  # it goes on by itself
    return [info for info in look(view) if is_urgent(info) and _key(info) not in known]


def _key(info: RunInfo) -> tuple[str, ...]:
    return info.agent, info.branch, info.id


def is_urgent(info: RunInfo) -> bool:
    """Whether somebody has to do something, so that it goes on."""
    return rank(info) < _CALM


def rank(info: RunInfo) -> int:
    """What needs somebody comes first. A run that failed does until the next one of its branch."""
    if info.status in _URGENT:
        return _URGENT.index(info.status)
    return 2 if info.due else 3 if info.status == "failed" and info._last else _CALM


def effects(
    store: Store, pattern: str | None, branch: str | None, limit: int | None, *, in_doubt: bool
) -> Page[Effect]:
    lines = _Lines(store, pattern, branch, limit)
    if in_doubt:
        # A run that has one in doubt has not ended, and does not wait; what is called outside of runs has its own rows.
        some = lines.view.open_branches("due >= ? OR (due = ? AND length(signal) = 0)", opened.ATTENTION, opened.NOW)
        lines.only(lines.foreign() | some)

    def look(view: View) -> list[Effect]:
        return [one for one in effects_of(view) if not in_doubt or one.status == "in doubt"]

    return lines.page(look, lambda one: one._at_us)


def counts(store: Store, pattern: str | None) -> dict[str, int]:
    lines = _Lines(store, pattern, None, None)
    chosen = {b for _, _, b in lines.order}
    rows: dict[int, list[str]] = defaultdict(list)
    # A run whose row names a time waits for it, or for a signal. What the others do, only their rows say.
    sql = "SELECT b FROM open WHERE length(signal) = 0 AND due > ? AND due < ?"
    asleep = lines.view.reader.run(sql, (opened.NOW, opened.ATTENTION))
    found: Counter[str] = Counter(waiting=sum(b in chosen for (b,) in asleep))
    awake = lines.view.open_branches("due = ? OR due = ?", opened.NOW, opened.ATTENTION) & chosen
    for part in slices(sorted(awake)):
        for row in lines.view.opened_on(part):
            if row.due in {opened.NOW, opened.ATTENTION} and row.signal in {b"", opened.GOING_BACK.signal}:
                rows[row.b].append(str(row.body.get("status", "")))
    for b, statuses in rows.items():
        view = lines.open(b) if "" in statuses else None
        if view is not None and not view.at_it():  # only the line tells whether it was begun at all
            statuses = [info.status for info in runs_of(view) if info.status in OPEN_STATUSES]  # noqa: PLW2901
        found.update(WORDS.get(status, status or "running") for status in statuses)
    due = store.due()
    if pattern is not None and due:
        named = {one.name for one in picked(store, pattern)}
        due = [info for info in due if info.agent in named]
    found["due"] = len(due)
    return {status: found[status] for status in (*_URGENT, "due", "waiting", "queued", "running") if found[status]}


def _began_us(info: RunInfo) -> float:
    return info.began.timestamp() * 1e6


class _Lines:
    """The lines of some branches, those that changed last first."""

    def __init__(self, store: Store, pattern: str | None, branch: str | None, limit: int | None) -> None:
        check_limit(limit)
        store.flush()
        self.store, self.view = store, store._db.view
        self.limit = limit
        chosen = {one.a for one in picked(store, pattern)} if pattern is not None else set()
        alone = next(iter(chosen)) if len(chosen) == 1 else None
        self.order: Sequence[tuple[int, int, int]] = self.view.changed(alone)
        if pattern is not None:
            self.order = [one for one in self.order if one[1] in chosen]
        self._branch = branch

    def only(self, some: Iterable[int]) -> None:
        wanted = set(some)
        self.order = [one for one in self.order if one[2] in wanted]

    def foreign(self) -> set[int]:
        """Branches whose lines may have records that came from elsewhere, or from another branch."""
        came, begun = self.view.bodies_with("agent", b"received"), self.view.bodies_with("branch", b"start")
        return {b for _, a, b in self.order if a in came or b in begun}

    def open(self, b: int) -> View | None:
        with suppress(UnknownAgent):  # it was removed meanwhile
            branch = self.view.branch_at(b)
            if branch.a and self._branch in {None, branch.name}:
                return View(self.store, self.view.agent_at(branch.a), branch)
        return None

    def page(self, look: Callable[[View], list[T]], when: Callable[[T], float]) -> Page[T]:
        """The newest of what is found on the lines."""
        found: list[tuple[float, int, T]] = []
        newest: list[float] = []
        unread = 0
        for place, (at, _, b) in enumerate(self.order):
            if self.limit is not None and len(newest) == self.limit and newest[0] >= at:
                unread = len(self.order) - place
                break
            view = self.open(b)
            for item in look(view) if view is not None else ():
                found.append((when(item), b, item))
                if self.limit is not None:
                    (heapq.heappushpop if len(newest) == self.limit else heapq.heappush)(newest, found[-1][0])
        found.sort(key=lambda one: one[0], reverse=True)
        made = Page(item for _, _, item in found[: self.limit])
        made.more = unread + (len({b for _, b, _ in found[self.limit :]}) if self.limit is not None else 0)
        return made
