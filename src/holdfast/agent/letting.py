"""Letting values of records go: what a line's records hold, not what they say.

Owns how values go, and which records several lines share; which of them nobody needs is for the room above, which knows
what a record says. A record keeps its place, its digest and all that it says; its row says that the values went on
purpose, under the row's sum, so that they are told from lost ones. What always holds: values go when every line that
has the record lets them go, and after the checkpoints that go with them; each transaction leaves a whole store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol

from holdfast.agent.collection import AT_ONCE, Links, Pace, at_once, note_waste
from holdfast.agent.policy import Policy
from holdfast.store.catalog import View, slices
from holdfast.store.changes import Change
from holdfast.store.database import Database
from holdfast.store.manifest import LET_GO, body_proof, is_bare, values_bytes
from holdfast.store.rows import DIGEST_BYTES, Agent, Branch, Record

if TYPE_CHECKING:
    from holdfast.agent.store import Store


class Outlived(Protocol):
    """Knows whose values nobody needs."""

    def numbers(self, agent: Agent, branch: Branch, records: Sequence[Record], policy: Policy, floor: int) -> set[int]:
        """The numbers of records of a line whose values may go.

        ``floor``: no rollback and no branch can begin before record number ``floor`` + 1, that is, at a checkpoint that
        does not know the first ``floor`` records.
        """


class Letting:
    """What goes of the records of some agents: by agent, their handles, each with its bytes."""

    def __init__(self, going: dict[int, dict[int, int]]) -> None:
        self.going = going

    def __bool__(self) -> bool:
        return any(self.going.values())

    def count(self, a: int) -> int:
        return len(self.going.get(a, ()))

    @cached_property
    def rows(self) -> dict[int, int]:
        return {r: size for some in self.going.values() for r, size in some.items()}


NOTHING = Letting({})


def choose(
    store: Store,
    links: Links,
    chosen: Sequence[tuple[Agent, Policy]],
    there: Callable[[int], set[int]],
    pace: Pace = at_once,
) -> Letting:
    """Which records' values go. ``there`` are the checkpoints that an agent sees, as they will be."""
    outlived = store._outlived(links.view)
    asked = {agent.a: (agent, policy) for agent, policy in chosen if policy.runs is not None}
    if outlived is None or not asked:
        return NOTHING
    going: dict[int, dict[int, int]] = {}
    stays: set[int] = set()
    view, lines = links.view, _Lines(links.view)
    for a, (agent, policy) in asked.items():
        going[a] = {}
        ends = {links.rows[n].line for n in there(a)}
        for branch in links.branches[a]:
            pace()
            records = view.line(branch.line)
            spent = outlived.numbers(agent, branch, records, policy, lines.shared(ends, records)) if records else set()
            for one in records:
                if one.i not in spent:
                    stays.add(one.r)
                elif size := _goes(one):
                    going[a][one.r] = size
    if not any(going.values()):
        return NOTHING
    for a, branches in links.branches.items():
        for branch in branches if a not in asked else ():
            pace()
            stays.update(view.handles(branch.line).keys() if branch.line else ())
    return Letting({a: {r: size for r, size in some.items() if r not in stays} for a, some in going.items()})


def _goes(record: Record) -> int:
    """How many bytes go with a record's values, their trees aside."""
    if record.let_go or not record.body or is_bare(record.body):  # what is lost is not let go
        return 0
    return values_bytes(record.body) + DIGEST_BYTES * len(record.refs)


class _Lines:
    """How much of a line another one shares."""

    def __init__(self, view: View) -> None:
        self._view = view

    @cached_property
    def _before(self) -> dict[int, int]:
        return {r: prev for r, prev, *_ in self._view.heads("record")}

    def shared(self, ends: Iterable[int], records: Sequence[Record]) -> int:
        """How many records of a line all of these ends know, of which each is the newest record of another line."""
        numbers = {one.r: one.i for one in records}
        least = len(records)
        for end in ends:
            r = end
            while r and r not in numbers:
                r = self._before.get(r, 0)
            least = min(least, numbers.get(r, 0))
        return least


def let_go(db: Database, letting: Letting, pace: Pace = at_once) -> None:
    """Take the values out of these records. Can be done again from any point at which it stopped."""
    for part in slices(sorted(letting.rows), AT_ONCE):
        pace()
        db.change(partial(_strip, some=part))


def _strip(change: Change, some: Sequence[int]) -> None:
    found = [one for one in change.records(some) if _goes(one)]
    change.delete("record", "r", [one.r for one in found])
    for r, prev, back, i, b, mark, key, digest, _, body in found:
        change.put("record", r, prev, back, i, b, mark | LET_GO, key, digest, body_proof(body))
    note_waste(change)
