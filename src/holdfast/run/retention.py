"""What runs still need of the history, and which values of a line's records nobody needs any more.

Owns the two rules, and nothing else: writes nothing, and lets nothing go (agent/letting.py does). What always holds: a
run that can still go on finds the checkpoint that it began with and every one that it took, a rollback the one that it
goes to, and whoever decides about an effect in doubt the checkpoint before it; such a run keeps all values, and so does
a child whose parent can; what reads returned goes freely; what a write was given and returned stays while a rollback or
a branch could begin before it, while it is in doubt, and where a later call may be answered with it (claims). Notes,
and what says which children there were, always stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.codec.types import Registry
from holdfast.run import records as rec
from holdfast.run.arguments import fetch
from holdfast.run.effects import ENDS, SPAWN
from holdfast.run.opened import decoded
from holdfast.run.past import ROLLED_BACK, Past, RunPast, by_itself
from holdfast.run.records import Record
from holdfast.store.catalog import View
from holdfast.store.rows import Agent, Branch
from holdfast.store.rows import Record as Stored

if TYPE_CHECKING:
    from holdfast.agent.policy import Policy
    from holdfast.run.line import Line

_OVER = frozenset({"finished", "cancelled"})
_OF_CALLS = (rec.Intent, rec.Done, rec.Decision, rec.Progress)


def is_over(run: RunPast, past: Past) -> bool:
    """Whether a run cannot go on: one that failed or was rolled back can, as long as nothing was begun after it."""
    if run.begin.kind == "map":
        return run.status == "finished"  # asked for again, a batch goes on from wherever it ended
    return _has_ended(run, past)


def _has_ended(run: RunPast, past: Past) -> bool:
    return run.status in _OVER or (run.status in {"failed", ROLLED_BACK} and run is not past.last)


class Outlived:
    """Looks at lines as they were at one moment."""

    def __init__(self, view: View, now_us: int) -> None:
        self._view, self._now_us = view, now_us
        self._parents: dict[str, dict[str, bool] | None] = {}  # by agent: whether it may ask for a child's run

    def numbers(self, agent: Agent, branch: Branch, records: Sequence[Stored], policy: Policy, floor: int) -> set[int]:
        """The numbers of records whose values may go. No rollback goes back to before record number ``floor``."""
        line = list(decoded(records, branch.b))
        past = Past(line)
        of = {number: begun for number, _, begun in _by_run(line)}
        newest = {begun: (number, record.at) for number, record, begun in _by_run(line)}
        over = [run for run in past.every_run if run.begin.kind != "rollback" and is_over(run, past)]
        over.sort(key=lambda run: newest.get(run.number, (0, 0)), reverse=True)
        going = {
            run.number: run
            for place, run in enumerate(over)
            if run.number in newest
            and not policy.keeps_run(place, newest[run.number][1], self._now_us)
            and not ((SPAWN, run.id) in past.notes and self._is_asked_for(agent, run.id))
        }
        left = {call.number for call in past.voided}
        intents = {number: record for number, record in line if isinstance(record, rec.Intent)}
        return {
            number
            for number, record in line
            if (run := going.get(of.get(number, 0))) is not None and _may_go(number, record, run, left, intents, floor)
        }

    def _is_asked_for(self, child: Agent, id: str) -> bool:
        """Whether the parent of a child may ask once more what its run has returned: its own run is not over."""
        name = child.name.rpartition("/")[0]
        if name not in self._parents:
            parent = self._view.agent(name)
            lines = self._view.branches(parent.a) if parent is not None else []
            pasts = (Past(decoded(self._view.line(one.line), one.b)) for one in lines)
            self._parents[name] = _spawned(pasts) if parent is not None else None
        known = self._parents[name]
        return known is not None and known.get(id, True)


def _spawned(lines: Iterable[Past]) -> dict[str, bool]:
    """The runs of children that runs of these lines have begun: whether one of those can still go on."""
    found: dict[str, bool] = {}
    for past in lines:
        for run in past.every_run:
            for call in run.calls.values():
                if call.intent is not None and call.tool == SPAWN:
                    found[call.intent.key] = found.get(call.intent.key, False) or not is_over(run, past)
    return found


def _by_run(line: Sequence[tuple[int, Record]]) -> Iterator[tuple[int, Record, int]]:
    """The records of runs, each with the number of the record with which its run began."""
    begun: dict[str, int] = {}
    for number, record in line:
        if isinstance(record, rec.Begin):
            begun[record.run] = number
        if record.run in begun:
            yield number, record, begun[record.run]


def _may_go(
    number: int, record: Record, run: RunPast, left: set[int], intents: dict[int, rec.Intent], floor: int
) -> bool:
    if isinstance(record, rec.Begin | rec.End):
        return True
    if not isinstance(record, _OF_CALLS):
        return False
    at = number if isinstance(record, rec.Intent) else record.of
    if not at:
        return not isinstance(record, rec.Done) or record.tool not in ENDS
    call, intent = run.calls.get(record.path), intents.get(at)
    if call is None or call.open or intent is None or intent.tool == SPAWN or run.status != "finished":
        return False
    return at <= floor and at not in left


# -- checkpoints ----------------------------------------------------------------------------------------------


Place = tuple[int, int, bytes]
"""How many records a checkpoint knows, its number, its id."""


def needed(line: Line, places: Sequence[Place]) -> Iterator[tuple[bytes, str]]:
    """Ids and reasons. ``places`` are the agent's checkpoints, sorted."""
    past = Past(line.records())
    for run in past.runs.values():
        if _has_ended(run, past):
            continue
        yield from _of_run(line, run)
    for call in past.calls():
        if call.open and call.kind == "write":
            before = [identity for known, _, identity in places if known < call.number]
            yield from ((identity, f"before {call.tool}, which is in doubt") for identity in before[-1:])


def _of_run(line: Line, run: RunPast) -> Iterator[tuple[bytes, str]]:
    name = f"run {run.begin.function}, which has not finished"
    if run.begin.kind == "rollback":
        given: Any = fetch(run.begin.args, line, Registry(), inert=True)
        if isinstance(given, dict) and type(given.get("to")) is bytes:
            yield given["to"], name
    if run.begin.start:
        yield run.begin.start, name
    for path, saved in run.saved.items():
        if not by_itself(path):
            yield saved.id, name
