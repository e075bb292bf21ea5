"""Diff of any two points: of one agent or of two, of branches, of runs, and a dump against a checkpoint.

Owns what a side of a comparison is, and the comparison's effects and metadata. States are compared by the one diff that
there is (``agent.changes``), bytes against bytes, so that the cost follows the difference. What always holds: the
summary has at most ten lines; what one side cannot know is said, not guessed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.changes import Change, Diff, diff, diff_states
from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec.diff import aligned
from holdfast.codec.document import MISSING, Document
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import BadOption, Damaged, HoldfastError, NotInDump, UnknownRevision, format_path
from holdfast.run import listing
from holdfast.run.effects import Effect
from holdfast.run.host import position_of
from holdfast.run.listing import RunInfo
from holdfast.store.rows import Point
from holdfast.travel.causes import view_of

if TYPE_CHECKING:
    from holdfast.crash.dump import Dump
    from holdfast.travel.handle import Agent, Store

SUMMARY_MAX = 10
_NAMED = 4  # sections, keys or tools that a line of the summary names
_SHOWN = 3  # changes that the summary shows
_SIDES = {"old": "-", "new": "+"}
_PASSING = ("caller", "trace")  # of metadata: where one checkpoint was asked for says nothing about another
RUN = "run:"

Side = Checkpoint | RunInfo | str | os.PathLike[str]


@dataclass(frozen=True)
class EffectChange:
    """An effect that only one side has: ``sign`` is ``-`` for the old side, ``+`` for the new one."""

    sign: str
    effect: Effect

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types, without arguments and results."""
        one = self.effect
        return {
            "sign": self.sign, "id": one.id, "number": one.number, "tool": one.tool, "kind": one.kind,
            "status": one.status, "run": one.run, "path": one.path,
        }  # fmt: skip


@dataclass
class Comparison:
    """What differs between two points: ``state``, ``effects`` and ``metadata``. True where anything does.

    ``before`` and ``after`` are the checkpoints; None where a dump is compared. ``note`` says what could not be.
    """

    old: str
    new: str
    state: Diff
    effects: list[EffectChange] = field(default_factory=list)
    metadata: list[Change] = field(default_factory=list)
    note: str = ""
    before: Checkpoint | None = None
    after: Checkpoint | None = None
    agents: tuple[str, str] = ("", "")

    def __bool__(self) -> bool:
        return bool(self.state or self.effects or self.metadata)

    def summary(self) -> list[str]:
        """At most ten lines, the most telling first."""
        lines = [f"--- {self.old}", f"+++ {self.new}"]
        if self.state.changes:
            kinds = Counter(change.kind.partition(" ")[0] for change in self.state)
            told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
            lines.append(f"state: {told}, in {_some(str(change.path[0]) for change in self.state)}")
            lines += [f"  {line}" for line in self.state.brief(_SHOWN)]
        else:
            lines.append("state: no differences")
        if self.state.files:
            lines.append(f"files: {_some(file.path for file in self.state.files)}")
        if self.effects:
            less, more = ([one.effect.tool for one in self.effects if one.sign == sign] for sign in "-+")
            sides = [
                f"{len(some)} only in the {side}: {_some(some)}"
                for side, some in (("old", less), ("new", more))
                if some
            ]
            lines.append(f"effects: {'; '.join(sides)}")
        if self.metadata:
            lines.append(f"metadata: {_some('.'.join(map(str, change.path[:2])) for change in self.metadata)}")
        if self.note:
            lines.append(self.note)
        return lines[:SUMMARY_MAX]

    def lines(self) -> Iterator[tuple[str, str]]:
        """All of it, as (sign, text): first the state, then files, effects and metadata."""
        yield from self.state.lines()
        for one in self.effects:
            yield one.sign, f"effect {one.effect.tool} ({one.effect.status}, {one.effect.id or one.effect.number})"
        for change in self.metadata:
            for sign, value in (("-", change.old), ("+", change.new)):
                if value is not MISSING:
                    yield sign, f"{format_path(change.path, 'metadata')}: {value!r}"

    def __str__(self) -> str:
        return "\n".join([*self.summary(), "", *(f"{sign} {text}" for sign, text in self.lines())])

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "agent": self.agents[0],
            "other": self.agents[1],
            "old": self.before.to_json() if self.before is not None else None,
            "new": self.after.to_json() if self.after is not None else None,
            "names": [self.old, self.new],
            "summary": self.summary(),
            "changes": [change.to_json() for change in self.state],
            "files": [file.to_json() for file in self.state.files],
            "effects": [one.to_json() for one in self.effects],
            "metadata": [change.to_json() for change in self.metadata],
            "note": self.note,
        }


def _some(names: Iterable[str]) -> str:
    """The most frequent ones, and how many others there are."""
    counted = [name for name, _ in Counter(names).most_common()]
    more = len(counted) - _NAMED
    return ", ".join(counted[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class _Point:
    """One side: a checkpoint, as the branch sees it that it was made on, and perhaps the run that it is the end of."""

    def __init__(self, agent: Agent, checkpoint: Checkpoint, run: str = "") -> None:
        self.agent, self.checkpoint, self.run = agent, checkpoint, run
        self.view = view_of(agent, checkpoint)
        about = f"  run {run}" if run else f"  {checkpoint.label}" if checkpoint.label else ""
        self.name = f"{agent.name}@id:{checkpoint.short_id}  #{checkpoint.depth}{about}"

    def effects(self, after: int) -> list[Effect]:
        last = position_of(self.checkpoint)
        if self.run:
            return listing.effects_of(self.view, run=self.run)
        return [one for one in listing.effects_of(self.view, after) if one.number <= last] if last > after else []


def compare(store: Store, old: Side, new: Side | None = None) -> Comparison:
    """What differs between two points of a store."""
    before = _side(store, old)
    after = _side(store, new) if new is not None else None
    if not isinstance(before, _Point):
        if after is not None and not isinstance(after, _Point):
            raise BadOption("two dumps have no checkpoint to be compared by", hint="See `holdfast dump diff`.")
        return _against_dump(store, before, after, old_is_dump=True)
    if after is None:
        after = _Point(before.agent, before.agent.at())
    if not isinstance(after, _Point):
        return _against_dump(store, after, before, old_is_dump=False)
    state = _states(store, before, after)
    state.files = before.agent._files_between(before.checkpoint, after.checkpoint)
    note = ""
    effects: list[EffectChange] = []
    try:
        effects = _effects(before, after)
    except HoldfastError as error:
        note = f"effects could not be compared: {error.message}"
    one, two = before.checkpoint, after.checkpoint
    agents = before.agent.name, after.agent.name
    return Comparison(before.name, after.name, state, effects, _metadata(one, two), note, one, two, agents)


def _side(store: Store, side: Side) -> _Point | Dump:
    if isinstance(side, RunInfo):
        return _of_run(store.agent(side.agent, branch=side.branch, create=False, readonly=True), side.id)
    if isinstance(side, Checkpoint):
        name = side._agent.name
        agent = store.agent(name, create=False, readonly=True)
        return _Point(agent, side)
    if isinstance(side, os.PathLike) or Path(side).is_file():
        from holdfast.crash.dump import open_dump

        return open_dump(side)
    name, revision = store.resolve(side)
    agent = store.agent(name, create=False, readonly=True)
    branch, _, id = revision.rpartition(RUN) if RUN in revision else ("", "", "")
    if id:
        branch = branch.removesuffix(":") or "main"
        return _of_run(store.agent(name, branch=branch, create=False, readonly=True), id)
    return _Point(agent, agent.at(revision or None))


def _of_run(agent: Agent, id: str) -> _Point:
    """The newest checkpoint of a run."""
    past = agent._view().past().runs.get(id)
    if past is None:
        raise UnknownRevision(f"{agent.name} has no run {id!r} on {agent.branch_name}", hint="See `holdfast runs`.")
    ids = {bytes(one) for one in past.checkpoints}
    for checkpoint in agent.log(all=True):
        if checkpoint._id in ids:
            return _Point(agent, checkpoint, id)
    raise UnknownRevision(f"no checkpoint of run {id!r} is left", hint="They were forgotten.")


def _states(store: Store, old: _Point, new: _Point) -> Diff:
    """Of large containers only what differs is read. Where that is not enough to prove them, all of it is."""
    try:
        one, two = (history.state_of(store._db.now, point.checkpoint._current()) for point in (old, new))
        one.sparse = two.sparse = True
        return diff_states(one, two, store._registry, old.name, new.name, inert=store._inert)
    except Damaged:
        return diff(old.checkpoint.state, new.checkpoint.state, old.name, new.name)


def _effects(old: _Point, new: _Point) -> list[EffectChange]:
    """What each side did outside that the other did not, aligned by content, since they parted."""
    since = 0
    if not (old.run or new.run):
        lines = [one.agent._graph().line(one.checkpoint._current().n) for one in (old, new)]
        parted = _common(*lines)
        since = parted.manifest.effects[0] if parted is not None else 0
    before, after = old.effects(since), new.effects(since)
    found = []
    for span in aligned([_key(one) for one in before], [_key(one) for one in after]):
        found += [EffectChange("-", one) for one in before[span.start : span.stop]]
        found += [EffectChange("+", one) for one in after[span.at : span.to]]
    return found


def _common(one: Iterator[Point], two: Iterator[Point]) -> Point | None:
    """The newest checkpoint that two lines have in common. Each is followed no further than there."""
    left, right = next(one, None), next(two, None)
    while left is not None and right is not None and left.id != right.id:
        deeper = left.manifest.depth - right.manifest.depth
        left, right = next(one, None) if deeper >= 0 else left, next(two, None) if deeper <= 0 else right
    return left if right is not None else None


def _key(effect: Effect) -> bytes:
    """What an effect is: its tool, its arguments, what came of it."""
    try:
        return encode([effect.tool, effect.status, effect.args, effect.result], Registry())
    except (HoldfastError, TypeError):  # values that were let go, or of a class
        return repr((effect.tool, effect.status, effect.key or effect.path)).encode()


def _metadata(old: Checkpoint, new: Checkpoint) -> list[Change]:
    if old._manifest.metadata == new._manifest.metadata:
        return []
    try:
        before, after = ({k: v for k, v in one.metadata.items() if k not in _PASSING} for one in (old, new))
    except HoldfastError:
        return []
    return diff(_document(before), _document(after), "", "").everything


def _document(plain: dict[str, Any]) -> Document:
    """Plain values as a state of its own, so that the one diff compares them."""
    made = Document(Registry(), inert=True)
    made.update(plain)
    made.digests()
    return made


# -- a dump against a checkpoint ---------------------------------------------------------------------------------------


def _against_dump(store: Store, dump: Dump, point: _Point | None, *, old_is_dump: bool) -> Comparison:
    """The state that a dump shows against that of a checkpoint: by default the one that its agent stood at."""
    from holdfast.crash import agents, kinds

    with dump:
        told = agents.choose(dump, point.agent.name if point is not None else None)
        if point is None:
            agent = store.agent(told.name, create=False, readonly=True)
            point = _Point(agent, agent.at(f"id:{told.checkpoint}") if told.checkpoint else agent.at())
        parts = dump.extras(kinds.AGENT).items()
        part = next((data for name, data in parts if name.partition("@")[0] == told.name), None)
    if not isinstance(part, dict) or not isinstance(part.get("state"), dict):
        raise NotInDump(f"the dump does not show the state of {told.name}", hint="Its part was cut or is damaged.")
    shown: dict[str, Any] = part["state"]
    unread = [name for name in part.get("unread", ()) if isinstance(name, str)]
    state = point.checkpoint.state
    # Put into the words of a dump, so that what it cuts or hides is cut and hidden here, too.
    there = {name: agents.in_dump(name, state[name]) for name in state if name in shown or name not in unread}
    notes = ["the dump shows only part of the state"] if part.get("state_cut") else []
    notes += [f"as in the checkpoint, because nobody had read them: {_some(unread)}"] if unread else []
    note, name, one, two = "; ".join(notes), f"dump of {told.name}", _document(shown), _document(there)
    found, both = point.checkpoint, (told.name, told.name)
    if old_is_dump:
        return Comparison(name, point.name, diff(one, two, name, point.name), note=note, after=found, agents=both)
    return Comparison(point.name, name, diff(two, one, point.name, name), note=note, before=found, agents=both)
