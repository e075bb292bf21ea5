"""Which checkpoints an agent can reach, and how a text names one (branch, tag, label, ~2, branch~2, #17, id:).

Owns the walks over an agent's history, from its branches, its tags, and what its branches have left. Changes nothing. A
checkpoint belongs to nobody; an agent sees what its refs and its log lead to. What always holds: a walk gives a
checkpoint before its ancestors, and each only once.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from holdfast.errors import Damaged, UnknownRevision
from holdfast.store.catalog import UP_AT_ONCE, View
from holdfast.store.rows import Agent, Body, Branch, Entry, Point, Row

_EVER = 2**63
_STEPS_MOST = 2_000
"""Beyond so many single steps the database walks faster."""


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

    def sees(self, point: Point) -> bool:
        """Whether its refs and its log lead there. To what its own branches made they do, and nobody has to look."""
        return any(point.row.b == branch.b for branch in self.branches) or point.n in self.numbers

    def counted(self) -> tuple[int, int]:
        """How many checkpoints the agent sees, and how many lines no branch reaches.

        Where all lines have met, the depth says how many are left; so this costs as much as they are apart, not as
        the history is long.
        """
        points = {n: self.view.point(n) for n in self.starts} if not self.shallow else {}
        waiting = [(-point.manifest.depth, n) for n, point in points.items()]
        heapq.heapify(waiting)
        ancestors, reached, inner = _Ancestors(self.view), set(self.heads), set[int]()
        seen = tips = 0
        while len(waiting) > 1 and seen < _STEPS_MOST:
            point = points.pop(heapq.heappop(waiting)[1])  # its children were here before it: they are deeper
            seen += 1
            tips += point.n not in reached and point.n not in inner
            above = point.row.parent
            if above:
                (reached if point.n in reached else inner).add(above)
                if above not in points:
                    points[above] = ancestors.point(above)
                    heapq.heappush(waiting, (-points[above].manifest.depth, above))
        if len(points) != 1:  # some were forgotten, or they are far apart
            return len(self.numbers), len(self.tips())
        (last,) = points.values()
        return seen + last.manifest.depth, tips + (last.n not in reached and last.n not in inner)

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


# -- revisions --------------------------------------------------------------------------------------------------------


_BACK = re.compile(r"^(.*)~(\d+)$", re.DOTALL)
_ID = re.compile(r"^id:[0-9a-fA-F]*$")
_ID_MIN = 4


def find(view: View, branch: Branch, revision: str) -> Point:
    """The checkpoint that ``revision`` names, seen from ``branch``."""
    graph = Graph(view, view.agent_at(branch.a))
    point = _named(graph, branch, revision)
    if point is None and (match := _BACK.match(revision)):
        point = _named(graph, branch, match[1]) or _labelled(graph, branch, match[1])
        if point is not None:
            point = _back(graph, point, int(match[2]), revision)
    if point is None:
        point = _labelled(graph, branch, revision)
    if point is None:
        elsewhere = next((one for one in graph.everything() if one.manifest.label == revision), None)
        if elsewhere is not None:
            raise UnknownRevision(
                f"no checkpoint on this line of history has the label {revision!r}",
                hint=f"Another line has it: id:{elsewhere.id.hex()[:12]}. See `holdfast log --all`.",
            )
        known = [one.name for one in graph.branches] + [tag.name for tag in view.tags(branch.a)]
        raise UnknownRevision(
            f"{revision!r} names no checkpoint of this agent",
            hint=f"Branches and tags: {', '.join(known)}. Also a label, ~2, #17 or id:...; see `holdfast log`.",
        )
    return point


def _head(view: View, branch: Branch) -> Point:
    if not branch.head:
        raise UnknownRevision("this branch has no checkpoint yet", hint="Call agent.checkpoint() first.")
    return view.point(branch.head)


def _named(graph: Graph, branch: Branch, name: str) -> Point | None:
    view = graph.view
    if not name:
        return _head(view, branch)
    other = view.branch(branch.a, name)
    if other is not None:
        return _head(view, other)
    tag = view.tag(branch.a, name)
    if tag is not None:
        return view.point(tag.n)
    if _ID.match(name):
        return _by_id(graph, name[3:])
    if name.startswith("#") and name[1:].isdigit():
        return _by_depth(graph, _head(view, branch), int(name[1:]))
    return None


def _labelled(graph: Graph, branch: Branch, label: str) -> Point | None:
    return next((point for point in graph.line(branch.head) if point.manifest.label == label), None)


def _by_id(graph: Graph, prefix: str) -> Point:
    wanted = prefix.lower()
    if len(wanted) < _ID_MIN:
        raise UnknownRevision(f"id:{prefix} is too short", hint=f"Give at least {_ID_MIN} characters.")
    if len(wanted) == 64:
        point = graph.view.find(bytes.fromhex(wanted))
        found = [point] if point is not None and graph.sees(point) else []
    else:
        found = [point for point in graph.everything() if point.id.hex().startswith(wanted)]
    if len(found) != 1:
        what = "names no checkpoint" if not found else f"fits {len(found)} checkpoints"
        raise UnknownRevision(f"id:{prefix} {what} of this agent", hint="See `holdfast log --all` for ids.")
    return found[0]


def _by_depth(graph: Graph, head: Point, depth: int) -> Point:
    if not 1 <= depth <= head.manifest.depth:
        raise UnknownRevision(f"#{depth}: this branch has depths 1 to {head.manifest.depth}")
    for point in graph.line(head.n):
        if point.manifest.depth == depth:
            return point
        if point.manifest.depth < depth:
            break
    raise UnknownRevision(f"#{depth} was forgotten", hint="See `holdfast log` for what is left.")


def _back(graph: Graph, point: Point, steps: int, revision: str) -> Point:
    if steps >= point.manifest.depth:
        raise UnknownRevision(
            f"{revision!r} goes back further than the history, which has {point.manifest.depth} checkpoints"
        )
    wanted = point.manifest.depth - steps
    last = point
    for last in graph.view.walk(point.n):
        if last.manifest.depth == wanted:
            return last
    raise UnknownRevision(f"{revision!r} was forgotten; the history goes back to #{last.manifest.depth}")
