"""What a rollback has to do: which effects are undone, which are in the way, and whose they are.

Owns the conclusions; does nothing and writes nothing. What always holds: an effect that happened after the target, or
may have, is in the plan exactly once, its own line's or a child's; what cannot be undone is never left out quietly.

An agent's children go back with it. One that was begun after the target goes back to where it was then. One that was
begun before goes back to its newest checkpoint that is not newer than the target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from holdfast.run import records as rec
from holdfast.run.arguments import fetch
from holdfast.run.claims import left_at
from holdfast.run.effects import ENDS, OWN, SPAWN, Effect, Standing, Traced
from holdfast.run.past import LOST, Past, RunPast, task_in
from holdfast.run.scope import effect_of
from holdfast.run.tools import TOOLS, Tool

if TYPE_CHECKING:
    from holdfast.run.host import AgentHost

DEPTH_MAX = 32
"""Children of children of children: more is a loop in the names."""


class Target(Struct, frozen=True):
    """A checkpoint to go back to: how many records it knows, when it was made, what people call it."""

    id: bytes
    position: int
    at_us: int
    name: str
    checkpoint: Any = None


class Planned(Struct):
    """An effect in a plan. ``why``: why it cannot be undone, or what else is to be said."""

    effect: Effect
    agent: str
    traced: Traced
    tool: Tool | None
    used_by: tuple[str, ...]
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        effect = self.effect
        data = {
            "id": effect.id, "agent": self.agent, "tool": effect.tool, "kind": effect.kind, "path": effect.path,
            "run": effect.run, "at": effect.at.isoformat(), "status": effect.status,
        }  # fmt: skip
        return (
            data | ({"why": self.why} if self.why else {}) | ({"used_by": list(self.used_by)} if self.used_by else {})
        )

    def __str__(self) -> str:
        used = f"; also known to {', '.join(self.used_by)}" if self.used_by else ""
        return f"{self.effect.tool} {self.effect.id} of {self.agent}{f': {self.why}' if self.why else ''}{used}"


class Part(Struct):
    """What concerns one agent."""

    host: AgentHost
    target: Target
    standing: Standing
    past: Past
    undo: list[Planned] = field(default_factory=list)  # newest first, as all of these
    ask: list[Planned] = field(default_factory=list)  # to be undone, should its probe say that it happened
    blocked: list[Planned] = field(default_factory=list)
    accepted: list[Planned] = field(default_factory=list)
    undone: list[Planned] = field(default_factory=list)
    harmless: list[Effect] = field(default_factory=list)
    children: list[Part] = field(default_factory=list)

    def all(self) -> Iterator[Part]:
        """This part and those below it, parents first."""
        yield self
        for child in self.children:
            yield from child.all()

    @property
    def needed(self) -> bool:
        """Whether anything would change."""
        target = self.target
        moves = self.past.goes_beyond(target.position, target.id) or not self.host.stands_at(target)
        return moves or bool(self.undo or self.ask or self.blocked or self.accepted) or bool(self.children)


def pending(past: Past) -> RunPast | None:
    """The rollback that has begun and not ended."""
    run = past.owner()
    return run if run is not None and run.begin.kind == "rollback" else None


def plan_part(host: AgentHost, target: Target, accept: Collection[str], *, write: bool, depth: int = 0) -> Part:
    """What it takes to bring one agent back, and its children."""
    standing = Standing(host.ledger.records())
    part = Part(host, target, standing, Past(standing.records))
    sorter = _Sorter(part, accept)
    sorter.sort()
    part.harmless = [
        effect_of(call, host.ledger, host.registry)
        for call in part.past.calls()
        if call.read and call.number > target.position and not call.tool.startswith(OWN)
    ][::-1]
    for name, branch, begun, runs in _children(part) if depth < DEPTH_MAX else ():
        child = host.child(name, branch, write=write)
        notes = Past(child.ledger.records()).notes if child is not None and begun else {}
        for one in begun:
            if (SPAWN, one.key) not in notes:
                sorter.block(one, f"it began {name}, which is not in this store: what that did cannot be undone")
        found = None if child is None else _start_of(child, runs) if runs else _before(child, target.at_us)
        if child is not None and found is not None:
            below = plan_part(child, found, accept, write=write, depth=depth + 1)
            if below.needed:
                part.children.append(below)
    return part


class _Sorter:
    """Puts each effect of a line into its list."""

    def __init__(self, part: Part, accept: Collection[str]) -> None:
        self.part, self.accept = part, frozenset(accept)
        self.inherited = part.host.inherited
        self._users = cache(part.host.users)  # who else knows effects: asked only when there is one

    def sort(self) -> None:
        part, to = self.part, self.part.target.position
        # A framework may have acted for its next step when it stored the target, which knows nothing of that.
        unknown = set(left_at(part.past, to, part.host)) if any(map(_of_task, part.standing.effects)) else set()
        after = [one for one in part.standing.effects if one.number > to or (_of_task(one) and one.number in unknown)]
        # What was undone before the target was taken, the target knows for undone.
        gone = [one for one in part.standing.effects if one not in after and one.undone]
        before = [one for one in gone if one.undo is not None and one.undo.ended > to]
        for one in reversed(after):
            self._place(one)
        if before:
            counted = part.standing.known(to)
            for one in reversed(before):
                if one.key in counted:
                    self._block(self._planned(one), "it was undone, and the state at the target counts on it")

    def _planned(self, one: Traced) -> Planned:
        host = self.part.host
        effect = effect_of(one.call, host.ledger, host.registry)
        users = tuple(name for name, shared in self._users() if one.number <= shared)
        return Planned(effect, host.name, one, TOOLS.find(one.call.tool), users)

    def _place(self, one: Traced) -> None:
        part = self.part
        if one.undone:
            part.undone.append(self._planned(one))
        elif one.happened != "no":
            planned = self._planned(one)
            if planned.effect.id in self.accept:
                part.accepted.append(planned)
            else:
                self._weigh(planned, one)

    def _weigh(self, planned: Planned, one: Traced) -> None:
        tool = planned.tool
        doubtful = one.happened == "unsure"
        if one.number <= self.inherited:
            self._block(planned, "another branch made it and may count on it")
        elif one.call.tool == LOST:
            self._block(planned, "what was recorded of it is lost")
        elif planned.effect.let_go:
            self._block(planned, "what it was given was let go")
        elif tool is None:
            self._block(planned, f"the tool {one.call.tool} is not loaded in this program")
        elif tool.compensate is None:
            why = "it is in doubt, and the tool cannot undo it" if doubtful else "the tool cannot undo it"
            self._block(planned, why)
        elif doubtful and tool.probe is None:
            self._block(planned, "it is in doubt, and nobody can tell whether it happened")
        elif _failed(one) and one.call.tool in self.accept:
            self.part.accepted.append(planned)
        elif doubtful:
            planned.why = "in doubt: its probe is asked first"
            self.part.ask.append(planned)
        else:
            if _failed(one):
                planned.why = "undoing it has failed before"
            self.part.undo.append(planned)

    def block(self, one: Traced, why: str) -> None:
        """What nobody can take back, unless it is accepted."""
        self._block(self._planned(one), why)

    def _block(self, planned: Planned, why: str) -> None:
        planned.why = why
        accepted = planned.effect.tool in self.accept or planned.effect.id in self.accept
        (self.part.accepted if accepted else self.part.blocked).append(planned)


def _of_task(one: Traced) -> bool:
    return bool(task_in(one.call.path))


def _failed(one: Traced) -> bool:
    """Whether a compensation was tried in vain."""
    return one.undo is not None and one.undo.done is not None and one.undo.done.how == "error"


def _children(part: Part) -> Iterator[tuple[str, str, list[Traced], list[str]]]:
    """The children that go back as well: name, branch, which calls are known to have begun them, and the runs.

    Those are the ones that began after the target; none where the child was begun before it, and had not ended.
    """
    host, to, over = part.host, part.target.position, _ended(part)
    # What an earlier rollback took back, it has taken back with its children.
    counts = {call.intent.key for call in part.past.calls() if call.intent is not None and call.outcome is not None}
    spawns: dict[tuple[str, str], list[tuple[Traced, str]]] = {}
    for one in part.standing.spawned:
        if one.number <= host.inherited:
            continue  # the other branch's child
        outcome = one.call.outcome
        if outcome is None or outcome.value is None:  # begun or not, it is what the call would have begun
            given = fetch(one.call.args, host.ledger, host.registry, inert=True)
            child, run = (given["child"], given["branch"]), one.key
        else:
            begun = fetch(outcome.value, host.ledger, host.registry, inert=True)
            child, run = (begun["agent"], begun["branch"]), begun["run"]
        spawns.setdefault(child, []).append((one, run))
    for child, its in spawns.items():
        new = [run for one, run in its if one.number > to]
        if new or its[-1][1] not in over:
            known = [one for one, run in its if one.key in counts and (one.number > to or run not in over)]
            yield *child, known, new


def _ended(part: Part) -> set[str]:
    """The runs of children that the state at the target knows to have ended."""
    found: set[str] = set()
    for number, record in part.standing.records:
        if number > part.target.position:
            break
        if isinstance(record, rec.Done) and record.tool in ENDS and record.how not in {"cancelled", "stopped"}:
            found.add(fetch(record.args, part.host.ledger, part.host.registry, inert=True)["run"])
    return found


def _start_of(child: AgentHost, runs: list[str]) -> Target | None:
    """Where the first of these runs began; None when none did."""
    for _, record in child.ledger.records():
        if isinstance(record, rec.Begin) and record.run in runs:
            return child.target(record.start)
    return None


def _before(child: AgentHost, at_us: int) -> Target | None:
    """The newest checkpoint that is not newer, unless nothing has happened since."""
    past = Past(child.ledger.records())
    _, newest = past.newest
    return child.newest_before(at_us) if newest > at_us or pending(past) is not None else None
