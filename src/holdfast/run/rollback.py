"""Rollback: planned, shown, then done; and finished when it was interrupted.

Owns the order of things: what is in doubt is asked about, what can be undone is undone, newest first, and only then the
state moves; and how one effect is undone: intent, compensation, outcome, and how often it is tried. What has to be done
is the business of ``planning``. What always holds: nothing moves while an effect stands in the way that nobody
accepted; nothing is skipped; a rollback that has begun is finished before anything else begins; the record that voids
what came after the target goes to disk with the move of the head. A compensation is not called before its intent is
durable; it has the same key each time, whoever tries again; what was undone is not undone again. It may be called more
than once, with that key: it has to bear it.

And what is done instead: where a run has failed and was taken back, a hook is told what failed and what was undone, and
chooses another way (``.options(replan=hook)``). It is asked when everything is undone.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from msgspec.structs import replace

from holdfast.agent import watchers
from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import (
    BadOption,
    Cancelled,
    Diverged,
    Fenced,
    InDoubt,
    NoAgent,
    Outcome,
    RollbackBlocked,
    RunRolledBack,
    Unavailable,
    UnknownTool,
    Waiting,
)
from holdfast.run import children
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.claims import left_standing
from holdfast.run.doubt import settle, settle_all
from holdfast.run.durables import DURABLES, Durable, Options, call_of, known, options_of
from holdfast.run.effects import Effect
from holdfast.run.outcomes import MESSAGE_MAX, brief_fault, told
from holdfast.run.past import Past, RunPast
from holdfast.run.planning import Part, Planned, pending, plan_part
from holdfast.run.runs import Run, called_with, execute, plan_of
from holdfast.run.scope import EFFECT, Lane, Scope, Suspended, active, branch_of, doing, here, now_us
from holdfast.run.steps import Pause, Steps, Theirs, Work, Write, drive, drive_later
from holdfast.run.tools import TOOLS, Tool
from holdfast.run.waiting import date

if TYPE_CHECKING:
    from holdfast.run.host import AgentHost

log = logging.getLogger("holdfast.run")
FUNCTION = "holdfast.rollback"
"""What a rollback is called in the list of runs."""


def plan_rollback(agent: AgentHost, revision: Any, *, accept: Collection[str] = (), shown: bool = True) -> RollbackPlan:
    """What going back to a checkpoint would do. Changes nothing.

    ``accept`` names effects that may be left standing: tools, or ids of single effects. Not ``shown``: nobody asks how
    state and files would change, which for thousands of files takes as long as the rollback.
    """
    if isinstance(accept, str):
        accept = (accept,)
    plan = RollbackPlan(agent, agent.target(revision).id, tuple(accept), shown=shown)
    plan.check_accepted()
    return plan


class RollbackPlan:
    """What a rollback will do. Lists of effects are in the order of undoing: newest first."""

    def __init__(
        self,
        agent: AgentHost,
        to: bytes,
        accept: tuple[str, ...] = (),
        *,
        shown: bool = True,
        leaving: bool = False,
    ) -> None:
        """``leaving``: somebody goes on from the target whom what is left standing has to answer."""
        self._agent, self._to, self._accept, self._leaving = agent, to, accept, leaving
        self._part = self._made(write=False)
        self.abandons: list[Any] = []
        self.diff: Any = None
        if shown:
            self.abandons, self.diff = agent.leaving(self._part.target)

    def _made(self, *, write: bool) -> Part:
        agent = self._agent
        target = agent.target(self._to)
        part = plan_part(agent, target, self._accept, write=write)
        begun = pending(part.past)
        if begun is not None and target.position >= begun.number:
            raise BadOption(
                f"the rollback that began {date(begun.begin.at)} has not ended, and the target was made after that",
                hint="Finish it first, or go back to a checkpoint from before it.",
            )
        return part

    # -- what it says -----------------------------------------------------------------------------------

    @property
    def needed(self) -> bool:
        """Whether anything would change."""
        return self._part.needed

    @property
    def target(self) -> Any:
        """The checkpoint to go back to."""
        return self._part.target.checkpoint

    @property
    def undo(self) -> list[Planned]:
        """Effects that will be undone, those of children included."""
        return _in_order([*part.undo, *part.ask] for part in self._part.all())

    @property
    def blocked(self) -> list[Planned]:
        """Effects that stand in the way: ``why`` says why. They stop the rollback."""
        return _in_order(part.blocked for part in self._part.all())

    @property
    def accepted(self) -> list[Planned]:
        """Effects that will be left standing."""
        return _in_order(part.accepted for part in self._part.all())

    @property
    def undone(self) -> list[Planned]:
        """Effects that were undone before."""
        return _in_order(part.undone for part in self._part.all())

    @property
    def harmless(self) -> list[Effect]:
        """Calls that changed nothing outside."""
        return [effect for part in self._part.all() for effect in part.harmless]

    @property
    def children(self) -> list[tuple[str, Any]]:
        """Other agents that go back as well, and the checkpoint that each goes to."""
        return [(part.host.name, part.target.checkpoint) for part in self._part.all() if part is not self._part]

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "target": {"id": self._to.hex(), "label": self._part.target.name},
            "undo": [one.to_json() for one in self.undo],
            "blocked": [one.to_json() for one in self.blocked],
            "accepted": [one.to_json() for one in self.accepted],
            "undone": [one.to_json() for one in self.undone],
            "harmless": len(self.harmless),
            "children": [{"agent": name, "target": checkpoint.id} for name, checkpoint in self.children],
            "abandons": [checkpoint.id for checkpoint in self.abandons],
            "diff": self.diff.to_json(),
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """(sign, text): ``-`` is undone, ``!`` is in the way, ``=`` stays, `` `` is said for completeness."""
        yield " ", f"roll {self._agent.name} back to {self._part.target.name}"
        for sign, what, found in (
            ("!", "in the way", self.blocked),
            ("-", "undo", self.undo),
            ("=", "left standing", self.accepted),
            (" ", "undone already", self.undone),
        ):
            for one in found:
                yield sign, f"{what}: {one}"
        if self.harmless:
            yield " ", f"harmless calls: {len(self.harmless)}"
        for name, checkpoint in self.children:
            yield " ", f"child {name} goes back to {checkpoint.label or checkpoint.short_id}"
        if self.abandons:
            yield " ", f"checkpoints left behind: {len(self.abandons)} (they stay in the history)"

    def __str__(self) -> str:
        return "\n".join([*(f"{sign} {text}" for sign, text in self.lines()), str(self.diff)])

    def __repr__(self) -> str:
        return (
            f"<RollbackPlan {self._agent.name} to {self._part.target.name}: {len(self.undo)} to undo,"
            f" {len(self.blocked)} in the way>"
        )

    def unknown(self) -> list[str]:
        """What was accepted and names no effect here."""
        named = (*self.accepted, *self.undo, *self.undone)
        known = {one.effect.tool for one in named} | {one.effect.id for one in named}
        return [name for name in self._accept if name not in known]

    def check_accepted(self) -> None:
        """A name that accepts nothing is a mistake in the name."""
        odd = self.unknown()
        if odd:
            there = ", ".join(sorted({one.effect.tool for one in self.blocked})) or "nothing"
            raise BadOption(f"no effect to accept is called {odd[0]!r}", hint=f"In the way: {there}.")

    # -- doing it -----------------------------------------------------------------------------------------

    def apply(self) -> Any:
        """Do it. Returns the checkpoint that the agent stands at then.

        Inside a run it ends the execution: ``agent.run`` raises ``RunRolledBack``.
        """
        return drive(self._applying())

    async def aapply(self) -> Any:
        """As apply()."""
        return await drive_later(self._applying())

    def _applying(self) -> Steps:
        lane = here()
        scope: Scope | None = lane.scope if lane is not None and lane.scope.agent is self._agent else None
        if scope is not None and EFFECT.get() is not None:
            raise BadOption("a tool cannot roll its own agent back", hint="Return, and let the caller do it.")
        if not isinstance(scope, Run):
            with self._agent.executing():
                return (yield from self._going())
        if scope.live:
            raise BadOption(
                "other calls of this run are under way", hint="Wait for all its tasks and threads, then roll back."
            )
        made = yield from self._going()
        undone = tuple(one.effect for one in self.undo)
        scope.reason = RunRolledBack(
            f"run {scope.run_id} of {self._agent.name} was rolled back to {self._part.target.name}",
            checkpoint=made,
            undone=undone,
            hint="Run it again to resume from there.",
        )
        scope.stopped = True
        raise Suspended

    def _going(self) -> Steps:
        about = {"target": self._to.hex(), "label": self._part.target.name, "undo": len(self.undo)}
        with watchers.watching("rollback", self._agent.name, branch_of(self._agent), **about):
            return (yield from self._gone())

    def _gone(self) -> Steps:
        shown = {(one.agent, one.effect.key) for one in (*self.undo, *self.blocked, *self.accepted)}
        self.check_blocked()
        for part in self._part.all():
            if part is not self._part:  # which may be a child that rolls itself back
                yield from children.halting(part.host)
        with ExitStack() as held:
            part = self._part = yield Work(self._current)
            held.callback(_release, part)
            new = [one for one in (*self.undo, *self.blocked) if (one.agent, one.effect.key) not in shown]
            if new:
                raise BadOption(f"since the plan was made, this has happened: {new[0]}", hint="Plan again.")
            for below in part.all():
                if below is not part:
                    held.enter_context(below.host.executing())
                yield from _ask(below)
            self.check_blocked()
            return (yield from self._moving(part))

    def _current(self) -> Part:
        """The plan as it was shown, if nothing was recorded since. With children it is made again, to write them."""
        shown = self._part
        if not shown.standing.spawned and shown.standing.count == self._agent.ledger.count:
            return shown
        return self._made(write=True)

    def check_blocked(self) -> None:
        """Raise ``RollbackBlocked`` where something is in the way that nobody accepted."""
        blocked = self.blocked
        if blocked:
            raise RollbackBlocked(
                f"{len(blocked)} effect{'s' if len(blocked) > 1 else ''} cannot be undone:\n"
                + "\n".join(f"  {one}" for one in blocked),
                blocked=tuple(one.effect for one in blocked),
                remaining=tuple(one.effect for one in self.undo),
                hint=f"Decide what is in doubt (holdfast effects resolve), or accept by name: accept="
                f"{sorted({one.effect.tool for one in blocked})!r}.",
            )

    def _moving(self, part: Part) -> Steps:
        """Undo, then move, children first."""
        parts = list(part.all())
        active: dict[int, Run] = {}
        # Where only the head moves, that is one transaction: there is nothing to resume.
        if any(one.undo for one in parts) or len(parts) > 1:
            for below in parts:
                if below.undo or below is part:
                    label = f"before rollback to {below.target.name}"
                    yield Work(partial(below.host.handle._secure, label))
                    active[id(below)] = yield Work(partial(self._begun, below))
        whose = {id(one): active[id(below)] for below in parts for one in below.undo}
        left = _in_order(below.undo for below in parts)
        try:
            for run in active.values():
                doubtful = yield from settle_all(run, run.past.open_calls(), TOOLS.find)
                if doubtful:
                    run.unsettled = doubtful
                    run.check_settled()
            while left:
                yield from undo(whose[id(left[0])], left[0])
                left.pop(0)
        except Exception as error:
            raise self._stuck(active, left, error) from error
        made = None
        for below in reversed(parts):
            run_id = active[id(below)].run_id if id(below) in active else ""
            made = yield Work(partial(self._moved, below, run_id))
        return made

    def _begun(self, part: Part) -> Run:
        """The run that this rollback is on one line: a new one, or the one that was interrupted."""
        host = part.host
        host.whole = False
        given: dict[str, Any] = {"to": part.target.id, "accept": list(self._accept)}
        if self._leaving:  # whoever finishes it in its place leaves them, too
            given["leaving"] = True
        this = pending(part.past)
        if this is not None and fetch(this.begin.args, host.ledger, host.registry) == given:
            host.ledger.append(this.resumed(now_us()))
        else:
            stowed = stow(given, host.registry)
            begin = rec.Begin(now_us(), uuid4().hex[:16], FUNCTION, stowed.value, b"", kind="rollback")
            begin.generation = host.generation
            number = host.ledger.append(begin, stowed=stowed, flush=True)
            this = RunPast(number, begin)
        run = Run(host, part.past, this, strict=False)
        run.order.drop(path for path in this.order if path.isdigit())  # undone already, so not called again
        return run

    def _moved(self, part: Part, run_id: str) -> Any:
        target, ledger = part.target, part.host.ledger
        record = None
        if ledger.count > target.position:  # otherwise nothing has happened since that anybody could confuse
            record = rec.RolledBack(now_us(), run_id, target.position, target.id)

        def made(count: int) -> list[rec.Record]:
            voided = [record] if record is not None else []
            after = [one.traced for one in reversed(part.accepted) if one.traced.number > target.position]
            left = [one.call for one in after if not one.undone] if self._leaving else []
            return [*voided, *left_standing(left, count + len(voided), part.host.generation)]

        return part.host.return_to(target, made)

    def _stuck(self, active: dict[int, Run], left: list[Planned], error: Exception) -> RollbackBlocked:
        """Record that a person is needed; the error that says for what."""
        fault = brief_fault(self._agent, error, "the error that stopped a rollback")
        for run in active.values():
            run.ledger.append(rec.End(now_us(), run.run_id, "attention", fault=fault), flush=True)
            run.ended = True
        if isinstance(error, Failed):
            what = f"{error.planned} could not be undone, tried {error.tries} times: {error}"
            first = error.planned.effect.id
        else:
            what, first = f"the rollback stopped: {error}", ""
        what += f"; {len(left)} effects remain to be undone" if len(left) != 1 else "; 1 effect remains to be undone"
        accept = f" To leave it standing, accept it: accept=[{first!r}]." if first else ""
        return RollbackBlocked(
            what,
            remaining=tuple(one.effect for one in left),
            hint=f"Mend the cause and roll back again: it resumes from there.{accept}",
        )


def resuming(agent: AgentHost) -> Steps:
    """Finish a rollback that was interrupted. Answers whether there was one."""
    found = yield Work(lambda: pending(agent.glance()))
    if found is None:
        return False
    given = fetch(found.begin.args, agent.ledger, agent.registry)
    log.info("%s: resuming the rollback that began %s", agent.name, date(found.begin.at))
    accept, leaving = tuple(given["accept"]), bool(given.get("leaving"))
    plan = yield Work(lambda: RollbackPlan(agent, given["to"], accept, leaving=leaving))
    yield from plan._going()
    return True


def _ask(part: Part) -> Steps:
    """Ask the probes of what is in doubt: it is to be undone, or needs not be, or is in the way."""
    asked, part.ask = part.ask, []
    for one in asked:
        traced = one.traced
        decision, stowed = yield from settle(part.host.loop, traced.call, one.tool, one.effect)
        if decision is None:
            one.why = f"it is in doubt: {one.effect.why or 'its probe cannot tell'}"
            part.blocked.append(one)
            continue
        part.host.ledger.append(decision, stowed=stowed, flush=True)
        traced.call.decision, traced.call.done = decision, None
        if traced.happened == "yes":
            one.effect = part.host.loop.effect_of(traced.call)
            part.undo.append(one)
    part.undo.sort(key=lambda one: one.traced.number, reverse=True)


def _in_order(lists: Iterable[list[Planned]]) -> list[Planned]:
    """The lists of several lines in one, newest first. Within a line the order of its records counts, not the clock."""
    sorted_lists = [sorted(one, key=lambda planned: planned.traced.number, reverse=True) for one in lists]
    return list(heapq.merge(*sorted_lists, key=lambda planned: planned.traced.at, reverse=True))


def _release(part: Part) -> None:
    for below in part.all():
        if below is not part:
            below.host.release()


# -- undoing one effect ---------------------------------------------------------------------------------------


TRIES = 5
"""How often a compensation is tried, with longer and longer pauses, before a person is asked. More where its tool has
more retries."""


class Failed(Exception):
    """A compensation did not go through. ``planned`` is what still stands."""

    def __init__(self, planned: Planned, error: BaseException, tries: int) -> None:
        super().__init__(told(error)[:MESSAGE_MAX])
        self.planned, self.error, self.tries = planned, error, tries


def undo(run: Run, planned: Planned) -> Steps:
    """Undo one effect, as part of this rollback. Raises ``Failed`` when that does not work out."""
    tool, traced = cast("Tool", planned.tool), planned.traced  # without its tool nothing is planned to be undone
    compensate = cast("Any", tool.compensate)
    path = str(traced.number)
    key = digest_of("holdfast.key", encode(["undo", traced.key])).hex()[:32]  # the same whoever tries again
    before = run.past.calls.get(path)
    tries, most = 0, max(TRIES, tool.retries + 1)
    attempt = traced.undo.attempts if traced.undo is not None else 0
    own = Effect(
        tool=f"undo {tool.name}",
        kind="idempotent",
        key=key,
        path=path,
        run=run.run_id,
        _args=lambda: planned.effect.args,
        _last_progress=lambda: fetch(before.progress, run.ledger, run.registry) if before is not None else None,
    )
    while True:
        tries, attempt = tries + 1, attempt + 1
        started = own._at_us = now_us()
        own.attempt = attempt
        intent = rec.Intent(
            started, run.run_id, path, own.tool, own.kind, None, b"", key, attempt, run.agent.generation,
            undoes=traced.number,
        )  # fmt: skip
        number = own.number = yield Write(run, intent)
        own._report = lambda value, number=number: run.report(path, number, value)
        done = rec.Done(0, run.run_id, path, "value", number, started=started)
        try:
            there = partial(_compensating, run, own, path)
            yield Theirs(partial(compensate, planned.effect), own.tool, there, tool.timeout_s, whole=True)
        except (InDoubt, Waiting, Cancelled) as error:  # of a call inside: trying again would not change that
            raise Failed(planned, error, tries) from error
        except Exception as error:
            if tries < most:
                yield Pause(run, tries)
                continue
            done.at, done.how = now_us(), "error"
            done.fault = brief_fault(run.agent, error, f"an error of {own.tool}")
            yield Write(run, done)
            raise Failed(planned, error, tries) from error
        done.at = now_us()
        yield Write(run, done)
        return


@contextmanager
def _compensating(run: Run, own: Effect, path: str) -> Iterator[None]:
    """The context of a compensation: its calls lie below what it undoes."""
    with (
        watchers.watching("call", run.agent.name, branch_of(run.agent), effect=own),
        active(Lane(run, f"{path}/", run.lane, own.tool)),
        doing(own),
    ):
        yield


# -- going another way ----------------------------------------------------------------------------------------


REPLANS_MAX = 100
"""An agent that has failed in so many ways is not getting anywhere."""
# These are no failures of the plan: somebody has to decide, the run waits, the code is another one, the disk is full.
_NOT_MEANT = (InDoubt, Waiting, Diverged, Fenced, NoAgent, Unavailable)


@dataclass(frozen=True, slots=True)
class Setback:
    """What a replanning hook is told.

    ``error`` is what ended the run, ``undone`` are the effects that were undone since, newest first, and ``checkpoint``
    is where the agent stands now. ``attempt`` counts from 1.
    """

    agent: Any
    run: str
    function: str
    error: Exception
    undone: tuple[Effect, ...]
    checkpoint: Any
    attempt: int


def replanning(
    agent: AgentHost, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Steps:
    """Execute a durable function; where it fails, take it back and do what the hook says instead.

    A process that ends before what was chosen has begun leaves a run that was rolled back: called once more, it is
    tried again. One that ends later goes on with what was chosen (``PLAN``).
    """
    _, mark = called_with(agent, known(function), args, kwargs)
    yield from resuming(agent)
    past = yield Work(lambda: agent.past(options.id))
    this, attempt = options.id, 1
    found = past.runs.get(this) if this is not None else past.last
    if found is not None and (found.status not in {"finished", "cancelled"} or this is not None):
        plan = plan_of(found, agent)
        if plan.get("instead of") == mark:
            function, this, attempt = _as_chosen(agent, found, function), found.id, plan["attempt"]
            args, kwargs = call_of(found, function, agent.handle, agent.ledger, agent.registry)
    elif found is None and any(one.id == this and one.end is not None and one.end.fault for one in past.former):
        options = replace(options, again=True)  # it failed, and was taken back
    while True:
        plan = {"instead of": mark, "attempt": attempt} if attempt > 1 else {}
        before = agent.ledger.count
        try:
            return (yield from execute(agent, known(function), args, kwargs, replace(options, id=this), plan))
        except RunRolledBack as error:
            told: Any = error
            setback = Setback(agent.handle, "", known(function).name, error, told.undone, told.checkpoint, attempt)
        except _NOT_MEANT:
            raise
        except Exception as error:  # noqa: BLE001 - whatever ended the run is what the hook is told
            setback = yield from _taken_back(agent, known(function).name, error, attempt, before)
        # It may change the agent's state, so it is called where the run was.
        chosen = yield Theirs(partial(cast("Any", options.replan), setback), "replan", aside=False)
        if chosen is None:
            raise setback.error
        if attempt >= REPLANS_MAX:
            raise BadOption(
                f"{agent.name} was replanned {REPLANS_MAX} times", hint="Let replan return None to give up."
            )
        if isinstance(chosen, partial):
            args, kwargs, chosen = chosen.args, chosen.keywords, chosen.func
        if not callable(chosen) or options_of(chosen) != Options():
            raise BadOption(
                f"replan returned {chosen!r:.60}",
                hint="Return a durable function without options, functools.partial of one, or None.",
            )
        function, this, attempt, options = chosen, options.id, attempt + 1, replace(options, again=True)


def _as_chosen(agent: AgentHost, run: RunPast, function: Any) -> Durable:
    """The function with which a run goes on that a hook chose."""
    name = run.begin.function
    made = known(function) if known(function).name == name else DURABLES.get(name)
    if made is None:
        raise UnknownTool(
            f"run {run.id} of {agent.name} goes on with {name!r}, and no durable function of this program is called so",
            hint="Decorate what replan returns with @holdfast.durable, and import the module that defines it.",
        )
    return made


def _taken_back(agent: AgentHost, name: str, error: Exception, attempt: int, before: int) -> Steps:
    """Roll a failed run back to where it began. ``before``: how many records there were when it was to be executed."""
    run = (yield Work(lambda: Past(agent.ledger.records()))).last
    if run is None or run.status != "failed" or run.newest <= before:
        raise error  # it did not get so far as to begin
    plan = yield Work(lambda: RollbackPlan(agent, run.begin.start))
    try:
        checkpoint = yield from plan._going()
    except RollbackBlocked as blocked:
        effects: Any = blocked  # whose errors know no effects
        names = sorted({effect.tool for effect in effects.blocked}) or [effect.id for effect in effects.remaining[:1]]
        blocked.hint = (
            "The hook was not asked. Mend the cause and run it again, or take it back yourself:"
            f" agent.rollback('id:{run.begin.start.hex()}', accept={names!r})"
        )
        raise blocked from error
    except Outcome as other:
        raise other from error
    return Setback(agent.handle, run.id, name, error, tuple(one.effect for one in plan.undo), checkpoint, attempt)
