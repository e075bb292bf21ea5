"""Forking: a run once more from one of its positions, on a branch of its own. The first one stays what it is.

Owns where a line is cut for that, what the new branch begins with, and what may happen twice. Must not know how a run
goes. What always holds: the new branch has what a process would have left that was killed just before it recorded the
position, and knows what became of the calls that were under way then; it is there whole or not at all; no call that
was begun before the position is made on both branches, unless it may be repeated with its key; what the run did from
there on, its children included, is in the plan before anything is done.

    plan_fork(agent, run, at)            a ``ForkPlan``: changes nothing
    plan.apply(branch)                   do it; the run on the new branch is interrupted, for whoever resumes it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from holdfast.agent.names import check_new
from holdfast.agent.opened import settle
from holdfast.agent.pointers import put_branch
from holdfast.errors import BadOption, Damaged, RunUnfinished, UnknownRevision, command
from holdfast.run import records as rec
from holdfast.run.arguments import not_there
from holdfast.run.children import joined
from holdfast.run.doubt import settle_all
from holdfast.run.durables import check_whole
from holdfast.run.effects import SPAWN, Effect, Standing, Traced
from holdfast.run.line import entries
from holdfast.run.listing import RunInfo, View, addressee, runs_of
from holdfast.run.past import AFTER_INTENTS, GUARDED, LOST, Call, Past, RunPast, by_itself
from holdfast.run.planning import DEPTH_MAX, pending
from holdfast.run.runs import Run
from holdfast.run.scope import effect_of, here, in_doubt, now_us, whose
from holdfast.run.steps import Steps, Work, drive, drive_later
from holdfast.run.tools import TOOLS
from holdfast.run.waiting import date
from holdfast.store.changes import Change
from holdfast.store.engine import Refused
from holdfast.store.rows import Branch, End, Point, link

if TYPE_CHECKING:
    from holdfast.run.handle import Agent

FORK = "=fork"
"""The path, which no call has, of the note that says where a run was forked."""

TRIES = 5
"""How often a fork is begun again because the run that is forked went on meanwhile."""

_SHOWN = 8
"""Positions in a message."""


class Cut(Struct):
    """A line up to a position: what the new branch inherits, and what it does not."""

    source: Branch  # as it was before its line was read
    number: int  # of the first record that is not inherited
    run: RunPast  # as the new branch knows it
    began: Point  # the newest checkpoint before the position
    later: Sequence[rec.Record]  # what became of calls that were under way there
    open: list[Call]  # calls before the position that are in doubt
    answered: list[Effect] = field(default_factory=list)
    again: list[Effect] = field(default_factory=list)
    writes: list[Effect] = field(default_factory=list)
    signals: list[str] = field(default_factory=list)


def plan_fork(agent: Agent, run: str, at: str) -> ForkPlan:
    """What forking a run at a position would mean. Changes nothing."""
    if {type(run), type(at)} != {str}:
        raise BadOption(f"run {run!r} at {at!r}", hint="Give the run's id and the path of one of its calls, as texts.")
    return ForkPlan(agent, run, at)


class ForkPlan:
    """What a fork will do. Effects are listed as they were recorded, oldest first."""

    def __init__(self, agent: Agent, run: str, at: str) -> None:
        self._agent, self.run, self.at = agent, run, at
        self._cut = self._looked()

    # -- what it says -----------------------------------------------------------------------------------------

    @property
    def answered(self) -> list[Effect]:
        """Calls before the position: the record answers them."""
        return self._cut.answered

    @property
    def again(self) -> list[Effect]:
        """Calls of the run from the position on: they will be made again, if the program still makes them."""
        return self._cut.again

    @property
    def writes(self) -> list[Effect]:
        """What the run, or a child of it, changed outside from the position on, or may have: it may happen again."""
        return self._cut.writes

    @property
    def in_doubt(self) -> list[Effect]:
        """Calls before the position whose outcome is not known: that is found out first."""
        return [effect_of(call, self._view.line, self._view.registry) for call in self._cut.open]

    @property
    def signals(self) -> list[str]:
        """The names of signals that the run has taken since: who forks it sends them again, to the new branch."""
        return self._cut.signals

    @property
    def checkpoint(self) -> Any:
        """Where the new branch begins: the newest checkpoint before the position."""
        return self._agent._seen(self._cut.began)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "run": self.run,
            "at": self.at,
            "checkpoint": self.checkpoint.id,
            "answered": len(self.answered),
            "again": len(self.again),
            "writes": [_as_json(effect) for effect in self.writes],
            "in_doubt": [_as_json(effect) for effect in self.in_doubt],
            "signals": self.signals,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """(sign, text): ``!`` may happen again outside, ``?`` is in doubt, `` `` is said for completeness."""
        yield " ", f"fork run {self.run} of {self._agent.name} at {self.at}"
        yield " ", f"calls that the record answers: {len(self.answered)}; that are made again: {len(self.again)}"
        for effect in self.in_doubt:
            yield "?", f"in doubt: {effect.tool} {effect.id} at {effect.path}"
        for effect in self.writes:
            yield "!", f"may happen again: {effect.tool} {effect.id} of {effect.agent} at {effect.path}"
        for name in self.signals:
            yield " ", f"to be sent again: the signal {name}"

    def __str__(self) -> str:
        return "\n".join(f"{sign} {text}" for sign, text in self.lines())

    def __repr__(self) -> str:
        return f"<ForkPlan {self.run} of {self._agent.name} at {self.at}: {len(self.writes)} may happen again>"

    # -- doing it -----------------------------------------------------------------------------------------------

    def apply(self, branch: str) -> RunInfo:
        """Do it: begin this branch. Returns the run there, interrupted: ``agent.resume`` or a worker goes on with it.

        What is in doubt before the position is settled by its probe; for that the agent's handle has to write.
        """
        found: RunInfo = drive(self._applying(branch))
        return found

    async def aapply(self, branch: str) -> RunInfo:
        """As apply()."""
        found: RunInfo = await drive_later(self._applying(branch))
        return found

    def _applying(self, branch: str) -> Steps:
        agent, lane = self._agent, here()
        if lane is not None and isinstance(lane.scope, Run):
            raise BadOption("fork inside a run would be done again when the run is", hint="Fork outside of runs.")
        agent._store._check_writable()
        check_new(branch, "a branch")
        shown = {effect.key for effect in self.writes}
        if self._cut.open:
            yield from self._settling()
        for left in reversed(range(TRIES)):
            self._cut = yield Work(self._looked)
            if self._cut.open:
                raise in_doubt(agent._host.loop, self._cut.open)
            new = [effect for effect in self.writes if effect.key not in shown]
            if new:
                raise BadOption(f"since the plan was made, {new[0].tool} {new[0].id} has happened", hint="Plan again.")
            try:
                yield Work(partial(self._make, branch))
                break
            except Refused:
                if not left:
                    raise
        return (yield Work(partial(self._made, branch)))

    def _settling(self) -> Steps:
        """Find out about what is in doubt, on the branch where it is."""
        agent, calls = self._agent, self._cut.open
        host = agent._host
        if self._view.at_it():
            raise RunUnfinished(
                f"{calls[0].tool} at {calls[0].path} is under way",
                run=self.run,
                hint=f"Wait until it has ended, or fork at {calls[0].path} or before it.",
            )
        if agent._writer is None:
            raise in_doubt(host.loop, calls)
        with host.executing():
            yield Work(lambda: host.loop.read(Past(host.ledger.records())))
            left = yield from settle_all(host.loop, calls, TOOLS.find)
            host.loop.restart(host.ledger.count)
        if left:
            raise in_doubt(host.loop, left)

    def _make(self, new: str) -> None:
        """One transaction: the branch, what it inherits, and the first records of its own."""
        cut, store, row = self._cut, self._agent._store, self._agent._row
        note = rec.Note(now_us(), self.run, "fork", self.at, None, FORK)
        records = entries(*cut.later, cut.run.resumed(now_us()), note)
        end, origin = _end_before(self._view, cut), self._view.origin

        def add(change: Change) -> None:
            if change.branch_at(cut.source.b).back != cut.source.back:
                raise Refused("the run went on meanwhile; nothing was written")
            made = put_branch(change, row, new, cut.began, {"fork": origin}, store._inherited, end=end)
            made = change.move(made, made.at_end(change.put_records(made.b, made.end, records)))
            settle(change, [made])

        store._db.change(add)

    def _made(self, new: str) -> RunInfo:
        view = self._agent._store._view(self._agent.name, new)  # type: ignore[attr-defined] # of this room
        return next(info for info in runs_of(view) if info.id == self.run)

    # -- looking --------------------------------------------------------------------------------------------------

    def _looked(self) -> Cut:
        """Where the line is cut, and what follows from that. Raises where a fork would not be what it seems."""
        agent = self._agent
        view = self._view = agent._view()
        source = agent._fresh_branch()
        records = list(view.line.records())
        past = Past(records)
        run = addressee(view, past, self.run, ())
        self._check_kind(past, run)
        number = first_at(past, run, self.at)
        if number is None:
            raise self._unknown(run)
        later = [one for i, one in records if i >= number and isinstance(one, AFTER_INTENTS) and 0 < one.of < number]
        then = Past([*(entry for entry in records if entry[0] < number), *enumerate(later, number)])
        own, standing = then.runs[run.id], Standing(records)
        check_whole(own)
        if isinstance(own.begin.args, int):
            raise not_there(own.begin.args, f"what run {run.id} was given", run=run.id)
        open_calls = self._check_calls(then, own, standing, number)
        self._check_children(own)
        if own.limit and own.limit <= now_us():
            raise BadOption(
                f"the time of run {run.id} was over at {date(own.limit)}: the fork would stop at once",
                hint="Fork it after it was told, or begin it anew.",
            )
        cut = Cut(source, number, own, self._began(own), later, open_calls)
        kept = {path for path, call in own.calls.items() if call.outcome is not None}
        cut.answered = self._effects(own, kept)
        cut.again = self._effects(run, run.calls.keys() - kept)
        known = {call.intent.key for call in own.calls.values() if call.intent is not None and call.outcome is not None}
        cut.writes = list(_written(view, run.id, lambda one: one.number >= number and one.key not in known))
        since = [call for path, call in run.calls.items() if path not in kept and call.status == "done"]
        taken = [call for call in since if call.done is not None and call.done.event]
        cut.signals = [str(view.read(call.args)["name"]) for call in taken if not isinstance(call.args, int)]
        return cut

    def _check_kind(self, past: Past, run: RunPast) -> None:
        if run.begin.kind != "run":
            raise BadOption(f"{run.id!r} is a {run.begin.kind}: only runs are forked", hint="Do it again on a branch.")
        if (SPAWN, run.id) in past.notes:
            raise BadOption(
                f"run {run.id} of {self._agent.name} is that of a child, which goes on with its parent",
                hint="Fork the parent's run: a child that it begins from there on is begun anew.",
            )
        if pending(past) is not None:
            raise RunUnfinished(
                f"a rollback of {self._agent.name} has begun and not ended",
                hint="It is finished by `with agent:`, agent.run(...) or agent.rollback(...).",
            )
        around = self.at.rstrip("/").split("/")[:-1]
        inside = next((n for n, part in enumerate(around, 1) if part.isdigit()), 0)
        if inside:
            raise BadOption(
                f"{self.at} lies inside a call, which is made whole or not at all",
                hint=f"Fork at {'/'.join(around[:inside])}.",
            )

    def _unknown(self, run: RunPast) -> BadOption:
        there = [path for path in run.calls if not run.is_inside(path)]
        named = ", ".join(there[:_SHOWN]) + (", ..." if len(there) > _SHOWN else "") if there else "none"
        shown = command("effects", whose(self._agent._host), "--run", run.id)
        return BadOption(
            f"run {run.id} of {self._agent.name} has nothing recorded at {self.at!r}",
            hint=f"Positions of its calls: {named}. See `{shown}`.",
        )

    def _check_calls(self, then: Past, own: RunPast, standing: Standing, number: int) -> list[Call]:
        """The calls that are in doubt. Raises where the record before the position cannot be counted on."""
        if any(call.tool == LOST for call in then.calls()):
            raise Damaged(f"what was recorded before {self.at} is lost in part", hint="Fork nothing that nobody knows.")
        counted = {call.intent.key for call in then.calls() if call.intent is not None and call.outcome is not None}
        for one in standing.effects:
            if one.undone and one.undo is not None and one.undo.ended >= number and one.key in counted:
                raise BadOption(
                    f"{one.call.tool} at {one.call.path} was undone since, and a run from {self.at} on counts on it",
                    hint=f"Fork at {one.call.path}, or before it.",
                )
        unsettled = [
            call
            for path, call in own.calls.items()
            if call.kind in GUARDED - {"idempotent"} and call.outcome is None and not call.cancelled
            if not own.is_inside(path)
        ]
        for call in unsettled:
            if not call.open:
                raise BadOption(
                    f"{call.tool} at {call.path} was begun before {self.at}, and not made: both runs would make it",
                    hint=f"Fork at {call.path}, or before it.",
                )
        return unsettled

    def _check_children(self, own: RunPast) -> None:
        """A child that was under way is one, and two runs would go on with it."""
        over = joined(own, self._view.read)
        for call in own.calls.values():
            if call.tool == SPAWN and call.intent is not None and call.intent.key not in over:
                name = self._view.read(call.args)["child"]
                raise BadOption(
                    f"the child {name} was begun before {self.at}, and nobody had joined it there",
                    hint=f"Fork at {call.path}, where it is begun, or at a position after it was joined.",
                )

    def _began(self, own: RunPast) -> Point:
        """The newest checkpoint that the run has taken; every one that it will come by has to be there."""
        view = self._agent._store._db.view
        asked = {path: one for path, one in own.saved.items() if not by_itself(path)}
        needed = {own.begin.start, *(one.id for path, one in asked.items() if not own.is_inside(path))}
        found = {id: point for id in own.checkpoints | needed if (point := view.find(id)) is not None}
        for id in needed - found.keys():
            raise UnknownRevision(
                f"checkpoint {id.hex()[:12]}, which the run needs, is not in the history any more",
                hint="It was forgotten. Begin the run anew.",
            )
        return max(found.values(), key=lambda point: (point.manifest.effects[0], point.manifest.depth))

    def _effects(self, run: RunPast, paths: Iterable[str]) -> list[Effect]:
        calls = sorted((run.calls[path] for path in paths if not run.is_inside(path)), key=lambda call: call.number)
        return [_seen(self._view, call) for call in calls]


def first_at(past: Past, run: RunPast, at: str) -> int | None:
    """The number of the first record of what a run did at a position, or inside of it, as it counts now.

    What a failure or a changed program made it do anew counts from then on.
    """
    at = at.rstrip("/")
    told = RunPast(run.number, run.begin)
    first: dict[str, int] = {}
    for number, record in past.entries:
        if record.run != run.id or number <= run.number:
            continue
        before = set(told.calls) if isinstance(record, rec.Cut | rec.End) else set()
        told.add(number, record)
        gone = before - told.calls.keys()
        if gone:
            first = {path: i for path, i in first.items() if gone.isdisjoint(_upwards(path))}
        path = getattr(record, "path", "").removesuffix("!fallback")  # which is a part of the call
        if path and not path.startswith("=") and getattr(record, "what", "") != "resume":
            first.setdefault(path, number)
    return min((number for path, number in first.items() if at in _upwards(path)), default=None)


def _upwards(path: str) -> list[str]:
    """A position, and those that it lies in."""
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _end_before(view: View, cut: Cut) -> End:
    """The end of the line as the new branch inherits it."""
    catalog = view._store._db.view
    known = catalog.end_at(cut.began)
    last = catalog.numbered(cut.source.line, cut.number - 1)
    chain = known.chain
    for record in catalog.line(last.r, known.records):
        chain = link(chain, record.digest)
    return End(last.r, last.r if last.marked else last.back, last.i, chain)


def _written(view: View, run: str, of: Callable[[Traced], bool] = lambda _: True, depth: int = 0) -> Iterator[Effect]:
    """What a run and its children changed outside, or may have: all of it, or those effects and children."""
    standing = Standing(view.line.records())
    for one in standing.effects:
        if one.call.run == run and one.happened != "no" and not one.undone and of(one):
            yield _seen(view, one.call)
    for one in standing.spawned if depth < DEPTH_MAX else ():
        if one.call.run == run and of(one):
            given = view.read(one.call.args)
            child = view.other(given["child"], given["branch"])
            if child is not None:
                yield from _written(child, one.key, depth=depth + 1)


def _seen(view: View, call: Call) -> Effect:
    made = effect_of(call, view.line, view.registry, inert=view.inert)
    made.agent, made.branch = view.name, view.branch_name
    return made


def _as_json(effect: Effect) -> dict[str, Any]:
    return {
        "id": effect.id, "agent": effect.agent, "tool": effect.tool, "kind": effect.kind, "path": effect.path,
        "run": effect.run, "at": effect.at.isoformat(), "status": effect.status,
    }  # fmt: skip
