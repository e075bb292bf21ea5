"""Blame: which checkpoint last changed a place of the state, and what led to it.

Owns the way of a path back through the operations of a history. Must not know the values: states are compared only
where an operation touched the place, or replaced something larger that it is in. What always holds: it reads the
operations of each checkpoint once, newest first, and stops at the answer; a place in a list is followed through
insertions, removals and moves of other items; where the history before was forgotten, it says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.changes import Change
from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec import operations as op
from holdfast.codec.operations import Operation, key_bytes
from holdfast.errors import UnknownRevision, format_path
from holdfast.store.rows import Point
from holdfast.travel.causes import Cause, cause_of
from holdfast.travel.expressions import MISSING, Look, Path, parse_path

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent


@dataclass(frozen=True)
class Blame:
    """Who changed a place last.

    ``path`` is the place that was asked for, ``path_then`` where it was when it was changed: other items of a list may
    have moved since. ``old`` and ``new`` are plain values, ``holdfast.MISSING`` where there was nothing. ``exact`` is
    False where the checkpoints before were forgotten: then it is this one, or one of those.
    """

    path: Path
    path_then: Path
    checkpoint: Checkpoint
    kind: str
    old: Any
    new: Any
    cause: Cause
    exact: bool = True

    @property
    def where(self) -> str:
        """The path as text."""
        return format_path(self.path)

    @property
    def change(self) -> Change:
        """The same as a ``Change``."""
        one = self.checkpoint
        return Change(self.path_then, self.kind, self.old, self.new, one.time, one.label, one.id)

    def lines(self) -> Iterator[str]:
        """For people."""
        one = self.checkpoint
        moved = f" (then {format_path(self.path_then)})" if self.path_then != self.path else ""
        yield f"{self.where}{moved}: {self.kind} by #{one.depth} {one.label or one.short_id}"
        if not self.exact:
            yield "or by one of the checkpoints before it, which were forgotten"
        yield from self.cause.lines()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "where": self.where,
            "where_then": format_path(self.path_then),
            "exact": self.exact,
            "checkpoint": self.checkpoint.to_json(),
            "change": self.change.to_json(),
            "cause": self.cause.to_json(),
        }


def blame(agent: Agent, path: str | Sequence[Any], at: str | Checkpoint | None = None) -> Blame:
    """Who changed the place last, looking back from a checkpoint."""
    asked = parse_path(path) if isinstance(path, str) else tuple(path)
    start = agent.at(at)
    view = agent._db.view
    look = Look(history.state_of(agent._db.now, start._current()))
    place = look.counted(asked)
    if not place:
        return _found(agent, asked, place, start._current(), None)
    for point in view.walk(start._current().n, over=True):
        with history.unless_forgotten(view, point):
            if point.cut:  # its operations lead from one that is gone: the two states tell
                before = agent._graph().before(point)
                if _raw(agent, before, place) != _raw(agent, point, place):
                    return _found(agent, asked, place, point, before, exact=False)
                continue
            touched, then = followed(history.operations_of(view, point), place)
        parent = view.point(point.row.parent) if point.row.parent else None
        if touched == "changed" or (touched and _raw(agent, parent, then) != _raw(agent, point, place)):
            return _found(agent, asked, place, point, parent, then)
        place = then
    raise UnknownRevision(
        f"{format_path(asked)} is not in the state of {start.label or start.short_id}, nor was it before",
        hint="See `holdfast show` for what is there.",
    )


def followed(operations: Sequence[Operation], place: Path) -> tuple[str, Path]:
    """What operations did to a place: ``changed`` it (it came with them), ``perhaps`` (the states tell), or nothing.

    With the path that it had before them, as far as they say.
    """
    perhaps = ""
    for operation in reversed(operations):
        path = operation.path
        if len(path) > len(place):
            if _same(path[: len(place)], place):
                perhaps = "perhaps"
            continue
        if not _same(path, place[: len(path)]):
            continue
        rest = place[len(path) :]
        if not rest:
            if operation.code in {op.SET, op.DELETE}:
                return "perhaps", place
            perhaps = "perhaps"
            continue
        if operation.code in {op.SPLICE, op.ARRANGE} and type(rest[0]) is int:
            was = _before(operation, rest[0])
            if was is None:
                return "changed", place
            place = (*place[: len(path)], was, *rest[1:])
        else:  # set, cleared or taken away as part of something larger
            perhaps = "perhaps"
    return perhaps, place


def _before(operation: Operation, index: int) -> int | None:
    """Where the item at an index was before an operation on its list; None: it came with it."""
    if operation.code == op.SPLICE:
        start, removed, values = operation.args
        if index < start:
            return index
        return None if index < start + len(values) else index - len(values) + removed
    at = 0
    for piece in operation.args[0]:
        if len(piece) == 1:
            if at == index:
                return None
            at += 1
            continue
        start, count, step = piece
        if at <= index < at + count:
            return int(start + (index - at) * step)
        at += count
    return None


def _same(path: Sequence[Any], place: Path) -> bool:
    """Whether two paths are one. 1, 1.0 and True are different keys."""
    return all(
        one == two and type(one) is type(two) if type(one) in _PLAIN else key_bytes(one) == key_bytes(two)
        for one, two in zip(path, place, strict=True)
    )


_PLAIN = frozenset({str, int})


def _raw(agent: Agent, point: Point | None, place: Path) -> bytes:
    return Look(history.state_of(agent._db.now, point)).raw(place)


def _found(
    agent: Agent, asked: Path, place: Path, point: Point, before: Point | None, then: Path = (), *, exact: bool = True
) -> Blame:
    now = agent._db.now
    old = Look(history.state_of(now, before)).at(then or place)
    new = Look(history.state_of(now, point)).at(place)
    kind = "added" if old is MISSING else "removed" if new is MISSING else "changed"
    made = agent._seen(point)
    return Blame(
        asked, place, made, kind, old, new, cause_of(agent, made, agent._seen(before) if before else None), exact
    )
