"""Choosing few among many agents, and what a list says of each.

Owns patterns, pages and ``AgentInfo``. Writes nothing. What always holds: agents are chosen by names and times as they
are stored, so that a page costs little however many there are; what is shown of one is read and proven.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from holdfast.agent import crashes
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.graph import Graph
from holdfast.errors import BadOption, StillArriving, UnknownAgent
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
        head, updated = self.head.to_json() if self.head else None, self.updated.isoformat() if self.updated else None
        return {**asdict(self), "head": head, "created": self.created.isoformat(), "updated": updated}


def is_pattern(text: str) -> bool:
    """Whether a text may stand for several names, unless an agent is called so."""
    return _MAGIC.search(text) is not None


def picked(store: Store, pattern: str | None) -> list[Counted]:
    """The agents that a name or a pattern chooses, or all, the most recently changed first."""
    view = store._db.view
    row = view.agent(pattern) if pattern is not None else None
    if row is not None:  # it need not be looked for among all
        return [Counted(row.a, row.name, max((branch.at for branch in view.branches(row.a)), default=0))]
    if pattern is not None and not is_pattern(pattern):
        raise store._unknown(pattern)
    fits = re.compile(fnmatch.translate(pattern if pattern is not None else "*")).match
    found = [one for one in view.census() if fits(one.name)]
    return sorted(found, key=lambda one: (one.at, one.a), reverse=True)


def check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise BadOption(f"a limit of {limit}", hint="At least 1, or None for everything.")


def listed(store: Store, pattern: str | None, limit: int | None, offset: int, sort: str) -> Page[AgentInfo]:
    """A page of the list of agents."""
    if sort not in {"updated", "oldest", "name", "checkpoints"}:
        raise BadOption(f"sort {sort!r}", hint="Use updated, oldest, name or checkpoints.")
    if offset < 0:
        raise BadOption(f"an offset of {offset}", hint="At least 0.")
    check_limit(limit)
    view, found = store._db.view, Page[AgentInfo]()
    chosen = view.in_order(sort) if pattern is None else None  # their names are not needed
    if chosen is None:
        some = picked(store, pattern)
        if sort == "name":
            some.sort(key=lambda one: one.name)
        elif sort != "updated" and len(some) > 1:
            rank = {a: at for at, a in enumerate(view.in_order(sort) or ())}
            some.sort(key=lambda one: rank.get(one.a, 0))
        chosen = [one.a for one in some]
    shallow = view.shallow()
    for at, a in enumerate(chosen[offset:], offset):
        if limit is not None and len(found) == limit:
            found.more = len(chosen) - at
            break
        with suppress(UnknownAgent):  # removed meanwhile
            row = view.agent_at(a)
            if not is_arriving(view.branches(a)):
                found.append(info_of(store, row, shallow))
    return found


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
