"""What an agent, or one of its branches, can see of the catalog.

Owns the rules of sharing: a clone sees the rows that its origin had when it was made, and nobody sees what they have
forgotten, even while somebody else keeps it. Changes nothing. What always holds: the rows of two agents that were one
are told apart by their numbers alone, so that looking never depends on whether the other one still exists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.agent.manifest import Manifest
from holdfast.errors import Damaged, Forgotten
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, EventRow, bookkeeping
from holdfast.store.ranges import Ranges
from holdfast.store.reading import Reading

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# Ancestors per read: most walks end soon.
_STEP = 64


class Line:
    """One agent's view, or that of one of its branches, at one moment: make a new one after something was forgotten."""

    def __init__(
        self, store: Store, agent: AgentRow, branch: BranchRow | None = None, reading: Reading | None = None
    ) -> None:
        """``reading``: of the store as it was at some moment, if not as it is now."""
        self._store = store
        self._catalog: Reading = reading if reading is not None else store._catalog
        self._branch = branch
        self.agent = agent
        self.body: dict[str, Any] = body_of(agent)
        # What follows is found when it is first asked for. Not by functools.cached_property: up to Python 3.11 it holds
        # one lock for all lines while it reads, and whoever waits for that may hold the store's.
        self._found: tuple[Ranges, Ranges, dict[int, int]] | None = None
        self._streams: list[tuple[int, int | None]] | None = None
        # Agent -> the newest checkpoint and event of its that belong to this one's history, too.
        self.origins: dict[int, tuple[int, int]] = {a: (n, e) for a, _, n, e in self.body.get("origins", ())}

    @property
    def uuids(self) -> set[bytes]:
        """The agents whose manifests count as this one's."""
        return {self.agent.uuid, *(uuid for _, uuid, _, _ in self.body.get("origins", ()))}

    @property
    def _hidden(self) -> tuple[Ranges, Ranges, dict[int, int]]:
        if self._found is None:
            without = self.body.get("without", ((), ()))
            n, e = Ranges(without[0]), Ranges(without[1])
            over = self.body.get("over", ())
            for _, body in self._catalog.forgotten(self.agent.a):
                n, e = n | Ranges(body["n"]), e | Ranges(body["e"])
                over = body.get("over", ())
            self._found = n, e, dict(over)
        return self._found

    @property
    def over(self) -> dict[int, int]:
        """For checkpoints whose parent was forgotten: the number of the nearest ancestor that is left."""
        return self._hidden[2]

    @property
    def forgotten(self) -> Ranges:
        """The numbers of checkpoints that this agent does not see although it could."""
        return self._hidden[0]

    @property
    def forgotten_events(self) -> Ranges:
        return self._hidden[1]

    @property
    def plain(self) -> bool:
        """Whether all rows of this agent, and no others, are seen."""
        return not self.origins and not self.forgotten

    @property
    def streams(self) -> list[tuple[int, int | None]]:
        """The branches whose rows are seen, each with the newest number that is (None: all)."""
        if self._streams is None:
            rows = [self._branch] if self._branch is not None else self._catalog.branches(self.agent.a)
            found: list[tuple[int, int | None]] = []
            for row in rows:
                found.append((row.b, None))
                found.extend((b, n) for b, n in body_of(row).get("origins", ()))
            self._streams = found
        return self._streams

    # -- checkpoints ------------------------------------------------------------------------------------

    def sees(self, row: CheckpointRow) -> bool:
        return self.owns(row.a, row.n) and row.n not in self.forgotten

    def owns(self, a: int, n: int) -> bool:
        """Whether a checkpoint of agent ``a`` was made by this one or by an origin before the two parted."""
        return a == self.agent.a or n <= self.origins.get(a, (0, 0))[0]

    def rows(
        self, before: int | None = None, limit: int | None = None, *, newest_first: bool = True
    ) -> Iterator[CheckpointRow]:
        """Every visible checkpoint with a number below ``before``, in the order of numbers."""
        streams = [
            self._catalog.checkpoints(b=b, before=_lower(before, most), newest_first=newest_first)
            for b, most in self.streams
        ]
        merged = heapq.merge(*streams, key=lambda row: row.n, reverse=newest_first)
        yield from islice((row for row in merged if row.n not in self.forgotten), limit)

    def named(self, key: bytes) -> CheckpointRow | None:
        """The newest visible checkpoint with that key."""
        return next(filter(self.sees, self._catalog.named(key)), None)

    def ancestry(self, n: int, stop_at: int = 0, limit: int | None = None) -> list[CheckpointRow]:
        """As the catalog's, ending where something was forgotten."""
        rows = self._catalog.ancestry(n, stop_at=stop_at, limit=limit) if n else []
        hidden = self.forgotten
        return next((rows[:at] for at, row in enumerate(rows) if row.n in hidden), rows) if hidden else rows

    def up(self, n: int) -> Iterator[CheckpointRow]:
        """A checkpoint and its ancestors, nearest first, a few at a time, up to where one was forgotten."""
        while n and n not in self.forgotten:
            try:
                rows = self.ancestry(n, limit=_STEP)
            except Damaged as error:
                if Line(self._store, self.agent, self._branch, self._catalog).forgotten.pairs == self.forgotten.pairs:
                    raise
                raise Forgotten(
                    "checkpoints of this history were forgotten while it was being read", hint="Look again."
                ) from error
            yield from rows
            n = rows[-1].parent if rows else 0

    def left(self, n: int) -> Iterator[CheckpointRow]:
        """A checkpoint and all of its ancestors that are left, nearest first, over what was forgotten."""
        while n:
            last = 0
            for row in self.up(n):
                last = row.n
                yield row
            n = self.over.get(last, 0)

    def parent(self, row: CheckpointRow) -> CheckpointRow | None:
        """The checkpoint before, None at a beginning."""
        if not row.parent or row.parent in self.forgotten:
            return None
        return self._catalog.checkpoint(row.parent)

    def cut(self, row: CheckpointRow) -> bool:
        """Whether the checkpoint before this one was forgotten."""
        return bool(Manifest.decode(row.manifest).parent) and (not row.parent or row.parent in self.forgotten)

    def tips(self) -> list[CheckpointRow]:
        """Visible checkpoints that are no visible one's parent, oldest first."""
        if self.plain and not self.over and self._branch is None:
            return self._catalog.tips(self.agent.a)
        rows = list(self.rows(newest_first=False))
        parents = {n for row in rows for n in (row.parent, self.over.get(row.n, 0))}
        return [row for row in rows if row.n not in parents]

    def count(self) -> int:
        """How many checkpoints are visible."""
        if self.forgotten:
            return sum(1 for _ in self.rows())
        return sum(self._catalog.count_on(b, most) for b, most in self.streams)

    def branch_name(self, b: int) -> str:
        """What this agent calls the branch on which a visible checkpoint was made."""
        for name, row in self._store._branches(self.agent.a):
            if row.b == b or any(b == origin for origin, _ in body_of(row).get("origins", ())):
                return name
        return ""

    # -- events -----------------------------------------------------------------------------------------

    def sees_event(self, row: EventRow) -> bool:
        """Of the origins' events only those with a key are this agent's, too: the others told what happened to them."""
        if row.e in self.forgotten_events:
            return False
        if row.a == self.agent.a:
            return True
        return row.key is not None and not bookkeeping(row.key) and row.e <= self.origins.get(row.a, (0, 0))[1]

    def events_named(self, keys: Iterable[bytes]) -> list[EventRow]:
        """Visible events with one of these keys, oldest first."""
        return list(filter(self.sees_event, self._catalog.events_named(keys)))


def _lower(before: int | None, most: int | None) -> int | None:
    if most is None:
        return before
    return most + 1 if before is None else min(before, most + 1)
