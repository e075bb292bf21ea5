"""Which checkpoints an agent can reach: from its branches, its tags, and what its branches have left.

Owns the walks over an agent's history. Changes nothing. A checkpoint belongs to nobody; an agent sees what its refs and
its log lead to. What always holds: a walk gives a checkpoint before its ancestors, and each only once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from holdfast.errors import Damaged
from holdfast.store.catalog import UP_AT_ONCE, Agent, Body, Branch, Entry, Point, Row, View

_EVER = 2**63


def left_by(body: Body) -> Iterator[bytes]:
    """The checkpoints that an entry of the log says a branch has left, or that only it leads to."""
    more = body.get("left")
    return (id for id in (body.get("from"), *(more if type(more) is list else ())) if type(id) is bytes and id)


class Graph:
    """One agent's view of the store at one moment: make a new one after something changed."""

    def __init__(self, view: View, agent: Agent) -> None:
        self.view = view
        self.agent = agent

    @cached_property
    def branches(self) -> list[Branch]:
        return self.view.branches(self.agent.a)

    @cached_property
    def shallow(self) -> dict[int, int]:
        """Checkpoints whose parent was forgotten, each with the nearest ancestor that is left, or 0."""
        return self.view.shallow()

    @cached_property
    def heads(self) -> set[int]:
        return {branch.head for branch in self.branches if branch.head}

    @cached_property
    def left(self) -> set[int]:
        """Where branches of the agent stood before they moved elsewhere, so far as that is still there."""
        ids = {id for entry in self.view.log(self.agent.a, kept=False) for id in left_by(entry.body)}
        return {point.n for id in ids if (point := self.view.find(id)) is not None}

    @cached_property
    def starts(self) -> set[int]:
        return self.heads | self.left | {tag.n for tag in self.view.tags(self.agent.a)}

    def above(self, numbers: Iterable[int]) -> set[int]:
        """Checkpoints and all their ancestors, over what was forgotten, too."""
        found: set[int] = set()
        waiting = set(numbers)
        while waiting:
            some = self.view.above(list(waiting)) - found
            found |= some
            waiting = {over for n in some if (over := self.shallow.get(n))} - found
        return found

    @cached_property
    def numbers(self) -> set[int]:
        """Everything that the agent sees."""
        return self.above(self.starts)

    def sees(self, n: int) -> bool:
        return n in self.numbers

    def tips(self) -> list[Point]:
        """The ends of lines that no branch reaches any more, newest first."""
        reached = self.above(self.heads)
        ends = (self.left | self.starts) - reached
        inner: set[int] = set()
        for n in ends:
            inner |= self.above([n]) - {n}
        return sorted((self.view.point(n) for n in ends - inner), key=_age)

    def everything(self) -> Iterator[Point]:
        """All that the agent sees, newest first by time, but a child always before its parent."""
        yield from self.walk(self.starts)

    def walk(self, starts: Iterable[int]) -> Iterator[Point]:
        seen, ancestors = set(starts), _Ancestors(self.view)
        waiting = [(_age(point), point.n, point) for point in map(self.view.point, seen)]
        heapq.heapify(waiting)
        while waiting:
            _, _, point = heapq.heappop(waiting)
            yield point
            above = point.row.parent or self.shallow.get(point.n, 0)
            if above and above not in seen:
                seen.add(above)
                parent = ancestors.point(above)
                heapq.heappush(waiting, (_age(parent), above, parent))

    def under(self, keys: Sequence[bytes]) -> list[Entry]:
        """What the log keeps under keys for this agent, oldest first: what it was copied with, and then its own."""
        whose = {self.agent.a: (0, _EVER)}
        for rank, (uuid, until, a) in enumerate(self.agent.body.get("origins", ()), 1):
            owner = self.view.agent_of(uuid)  # where that was removed, what is left of its log has its handle
            whose[owner.a if owner is not None else a] = rank, until
        found = [entry for entry in self.view.log_under(keys) if entry.at <= whose.get(entry.a, (0, -1))[1]]
        return sorted(found, key=lambda entry: -whose[entry.a][0])

    def line(self, n: int) -> Iterator[Point]:
        """A checkpoint and its ancestors, newest first, over what was forgotten, too."""
        return self.view.walk(n, over=True)

    def before(self, point: Point) -> Point | None:
        """The nearest ancestor that is left."""
        above = point.row.parent or self.shallow.get(point.n, 0)
        return self.view.point(above) if above else None


class _Ancestors:
    """Reads checkpoints some steps of their line at a time: most walks end soon, and long ones ask seldom."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._rows: dict[int, Row] = {}
        self._step = 8

    def point(self, n: int) -> Point:
        if n not in self._rows:
            with suppress(Damaged):  # further up: that is said when one gets there
                self._rows |= {row.n: row for row in self._view.up(n, self._step)}
            self._step = min(2 * self._step, UP_AT_ONCE)
        row = self._rows.pop(n, None)
        with suppress(Damaged):  # it may be stored in another way since
            if row is not None:
                return self._view.point(row)
        return self._view.point(n)


def _age(point: Point) -> tuple[int, int]:
    """Older comes later; of the same time, what is nearer to the root."""
    return -point.manifest.time_us, -point.manifest.depth
