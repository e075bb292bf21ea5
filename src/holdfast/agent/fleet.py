"""Choosing few among many agents, and what a list says of each.

Owns patterns, pages and ``AgentInfo``. Writes nothing. What always holds: agents are chosen by names and times as they
are stored, so that a page costs little however many there are; what is shown of one is read and proven.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from holdfast.agent import crashes
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.graph import Graph
from holdfast.errors import StillArriving
from holdfast.store.catalog import View
from holdfast.store.rows import Agent, Branch, Counted

if TYPE_CHECKING:
    from holdfast.agent.store import Store

T = TypeVar("T")

_MAGIC = re.compile(r"[*?[]")


class Page(list[T]):
    """What a list shows of what there is.

    ``more`` is 0 where that is everything. Otherwise it is how many agents are left out, and in lists of runs and of
    effects how many branches may have others.
    """

    more: int = 0


class AgentInfo(Struct, frozen=True):
    """One line of the list of agents.

    ``head`` is the newest head of its branches, if it has one. ``checkpoints``, ``abandoned`` and ``crashes`` are
    numbers: of all its checkpoints, of lines that no branch reaches, and of times that its program failed and that was
    noted. ``updated`` is when it last saved, recorded, or went back to something.
    """

    name: str
    branches: list[str]
    head: Checkpoint | None
    checkpoints: int
    created: datetime
    updated: datetime | None
    abandoned: int
    crashes: int = 0

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "name": self.name,
            "branches": self.branches,
            "head": self.head.to_json() if self.head else None,
            "checkpoints": self.checkpoints,
            "abandoned": self.abandoned,
            "crashes": self.crashes,
            "created": self.created.isoformat(),
            "updated": self.updated.isoformat() if self.updated else None,
        }


def is_pattern(text: str) -> bool:
    """Whether a text may stand for several names, unless an agent is called so."""
    return _MAGIC.search(text) is not None


def pick(census: Sequence[Counted], pattern: str | None) -> list[Counted] | None:
    """Those that a name or a pattern chooses, the most recently changed first; None where the name is nobody's."""
    found = [one for one in census if pattern in {None, one.name}]
    if not found and pattern is not None:
        if not is_pattern(pattern):
            return None
        fits = re.compile(fnmatch.translate(pattern)).match
        found = [one for one in census if fits(one.name)]
    return sorted(found, key=lambda one: (one.at, one.a), reverse=True)


def is_arriving(branches: Sequence[Branch]) -> bool:
    """Whether nothing of an agent that has these branches is whole yet: it is still arriving from elsewhere."""
    return bool(branches) and all(one.body.get("arriving") for one in branches)


def still_arriving(what: str) -> StillArriving:
    return StillArriving(
        f"{what} is still arriving from elsewhere: not all of it has come",
        hint="Run the push, pull or import again: it resumes where it stopped. Or remove the agent.",
    )


def whole(view: View) -> list[Agent]:
    """All agents but those that are still arriving."""
    branches: dict[int, list[Branch]] = defaultdict(list)
    for one in view.branches():
        branches[one.a].append(one)
    return [row for row in view.agents() if not is_arriving(branches[row.a])]


def info_of(store: Store, row: Agent, shallow: dict[int, int]) -> AgentInfo:
    graph = Graph(store._db.view, row)
    graph.shallow = shallow  # of the whole store: read once for all agents
    heads = [graph.view.point(n) for n in graph.heads]
    newest = max(heads, key=lambda point: point.manifest.time_us, default=None)
    checkpoints, abandoned = graph.counted()
    updated = max((branch.at for branch in graph.branches if branch.head or branch.records), default=0)
    return AgentInfo(
        name=row.name,
        branches=[branch.name for branch in graph.branches],
        head=Checkpoint.of(store, row, newest) if newest is not None else None,
        checkpoints=checkpoints,
        created=datetime.fromtimestamp(row.body["created"] / 1e6, UTC),
        updated=datetime.fromtimestamp(updated / 1e6, UTC) if updated else None,
        abandoned=abandoned,
        crashes=sum(one.get("what") == "crash" for one in crashes.told(store, row)),
    )
