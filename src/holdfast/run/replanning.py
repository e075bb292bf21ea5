"""Replanning: what an agent does instead, when a run has failed.

Owns taking a failed run back, and telling a hook what failed and what was undone. What to do then is the hook's choice.
What always holds: the hook is asked when everything is undone; a process that ends before the next run has begun asks
again, and one that ends later goes on with what was chosen. So a hook may be called twice about one failure, and should
do nothing outside itself. Where nothing is chosen, what was called has failed and can be tried again.

    executing(agent, function, args, kwargs, options, hook) -> Steps
    hook(setback) -> None                     give up: the error is raised
                  -> a durable function       to be executed with the same arguments
                  -> functools.partial of one, to be executed with those
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from holdfast.errors import (
    BadOption,
    Diverged,
    Fenced,
    HoldfastError,
    InDoubt,
    NoAgent,
    Outcome,
    RollbackBlocked,
    RunRolledBack,
    ToolFailed,
    Unavailable,
    UnknownTool,
    Waiting,
)
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed, fetch
from holdfast.run.durables import DURABLES, Options, call_of, known, mark_of, options_of
from holdfast.run.effects import Effect, Standing
from holdfast.run.host import AgentHost
from holdfast.run.outcomes import brief_fault
from holdfast.run.past import Past, RunPast
from holdfast.run.rollback import RollbackPlan, resuming
from holdfast.run.runs import called_with, execute
from holdfast.run.scope import effect_of, now_us
from holdfast.run.steps import Request, Steps, Work

log = logging.getLogger("holdfast.run")
REPLANS_MAX = 100
"""An agent that has failed in so many ways is not getting anywhere."""

# These are no failures of the plan: somebody has to decide, the run waits, the code is another one, the disk is full.
_NOT_MEANT = (InDoubt, Waiting, Diverged, Fenced, NoAgent, Unavailable)


@dataclass(frozen=True, slots=True)
class Setback:
    """What a replanning hook is told.

    ``error`` is what ended the run, ``undone`` are the effects that were undone since, newest first, and ``checkpoint``
    is where the agent stands now. ``attempt`` counts from 1. In a process that was started since the run failed, the
    error is a ``ToolFailed`` with the type and the message of the one that ended it.
    """

    agent: Any
    run: str
    function: str
    error: Exception
    undone: tuple[Effect, ...]
    checkpoint: Any
    attempt: int


def executing(
    agent: AgentHost,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    replan: Callable[[Setback], Any],
) -> Steps:
    """Execute a durable function; where it fails, take it back and do what the hook says instead."""
    id = options.id
    _, mark = called_with(agent, known(function), args, kwargs)
    yield from resuming(agent)
    plans = yield Work(lambda: _Plans(agent))
    setback, this = plans.setback(mark), id
    attempt = setback.attempt if setback is not None else 1
    if setback is not None:
        options = replace(options, again=True)  # what was rolled back for a hook is begun again under its id
    later = plans.later(mark, id) if setback is None else None
    if later is not None:  # the process ended when the hook had had its say
        function, args, kwargs = _going_on(agent, later, function)
        this, attempt = later.id, plans.attempts[later.id]
    while True:
        if setback is None:
            before = agent.ledger.count
            try:
                return (yield from execute(agent, known(function), args, kwargs, replace(options, id=this)))
            except RunRolledBack as error:
                undone: Any = error.undone
                setback = Setback(agent.handle, "", known(function).name, error, undone, error.checkpoint, attempt)
            except _NOT_MEANT:
                raise
            except Exception as error:  # noqa: BLE001 - whatever ended the run is what the hook is told
                setback = yield from _taken_back(agent, known(function).name, error, attempt, before)
        try:
            chosen = yield _Choice(replan, setback)
            if chosen is None:
                raise setback.error
            function, args, kwargs = _chosen(chosen, args, kwargs)
            if attempt >= REPLANS_MAX:
                raise BadOption(
                    f"{agent.name} was replanned {REPLANS_MAX} times", hint="Let replan return None to give up."
                )
        except Exception:
            if setback.run:
                yield from _given_up(agent, setback)
            raise
        setback, this, attempt, options = None, id, attempt + 1, replace(options, again=True)


def _chosen(chosen: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the hook says is to be executed now."""
    if isinstance(chosen, functools.partial):
        _, args, kwargs = _chosen(chosen.func, chosen.args, dict(chosen.keywords))
        return chosen.func, args, kwargs
    if options_of(chosen) != Options():
        raise BadOption("replan returned a function with options", hint="Those of the run itself count.")
    if callable(chosen):
        return chosen, args, kwargs
    raise BadOption(
        f"replan returned {type(chosen).__name__}",
        hint="Return a durable function, functools.partial of one, or None.",
    )


def _going_on(agent: AgentHost, run: RunPast, function: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is to be executed to go on with a run that a hook chose."""
    name = run.begin.function
    made = known(function) if known(function).name == name else DURABLES.get(name)
    if made is None:
        raise UnknownTool(
            f"run {run.id} of {agent.name} goes on with {name!r}, and no durable function of this program is called so",
            hint="Decorate what replan returns with @holdfast.durable, and import the module that defines it.",
        )
    args, kwargs = call_of(run, made, agent.handle, agent.ledger, agent.registry)
    return made, args, kwargs


def _taken_back(agent: AgentHost, name: str, error: Exception, attempt: int, before: int) -> Steps:
    """Roll a failed run back to where it began. ``before``: how many records there were when it was to be executed."""
    past = yield Work(lambda: Past(agent.ledger.records()))
    run = past.last
    if run is None or run.status != "failed" or run.newest <= before:
        raise error  # it did not get so far as to begin
    _, kind, message, _ = brief_fault(agent, error, "the error that ended a run")
    cause = {"run": run.id, "function": name, "kind": kind, "message": message, "attempt": attempt}
    plan = yield Work(lambda: RollbackPlan(agent, run.begin.start, (), cause=cause))
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
    undone = tuple(one.effect for one in plan.undo)
    return Setback(agent.handle, run.id, name, error, undone, checkpoint, attempt)


def _given_up(agent: AgentHost, setback: Setback) -> Steps:
    """Nothing is executed instead. What was called has failed, and says so in the list of runs; it can be tried again.

    What the hook changed in the state is where that begins.
    """
    plans = yield Work(lambda: _Plans(agent))
    begin = replace(plans.first[setback.run])
    fault = ("", plans.cause["kind"], plans.cause["message"], None)
    try:
        past = yield Work(lambda: agent.past(begin.run))
        yield Work(agent.begin(begin, Stowed(None, {}, {}), past))
        agent.ledger.append(rec.End(now_us(), begin.run, "failed", fault=fault), flush=True)
    except HoldfastError as error:  # the caller gets the one that counts
        log.warning("that run %s of %s failed could not be recorded: %s", begin.run, agent.name, error)


class _Plans:
    """What a line says about replanning: which run was begun in the place of which, and what no hook has answered."""

    def __init__(self, agent: AgentHost) -> None:
        self.agent = agent
        self.first: dict[str, rec.Begin] = {}  # by the id of a run: how the first one began in whose place it is
        self.attempts: dict[str, int] = {}
        self.cause: dict[str, Any] = {}
        self._rollback: rec.RolledBack | None = None
        self._standing = Standing(agent.ledger.records())
        rollbacks: dict[str, rec.Begin] = {}
        for _, record in self._standing.records:
            if isinstance(record, rec.Begin) and record.kind == "rollback":
                rollbacks[record.run] = record
            elif isinstance(record, rec.Begin):
                told = self._rollback is not None
                replaces: rec.Begin | None = self.first.get(self.cause["run"]) if told else None
                self.first[record.run] = replaces or record
                self.attempts[record.run] = self.cause["attempt"] + 1 if replaces is not None else 1
                self._rollback = None
            elif isinstance(record, rec.RolledBack):
                begun = rollbacks.get(record.run)
                self.cause = (
                    fetch(begun.args, agent.ledger, agent.registry)["cause"] if begun is not None else {}
                ) or {}
                self._rollback = record if self.cause else None

    def setback(self, mark: bytes) -> Setback | None:
        """The one after which no run has begun: the process ended before the hook had its say."""
        agent, cause, rollback = self.agent, self.cause, self._rollback
        first = self.first.get(cause["run"]) if rollback is not None else None
        if rollback is None or first is None or first.fingerprint != mark:
            return None
        undone = tuple(
            effect_of(one.call, agent.ledger, agent.registry)
            for one in reversed(self._standing.effects)
            if one.undo is not None and one.undo.run == rollback.run and one.undone
        )
        error = ToolFailed(
            f"run {cause['run']} of {cause['function']} failed: {cause['kind']}: {cause['message']}",
            tool=cause["function"],
            error_type=cause["kind"],
        )
        checkpoint = agent.target(rollback.id).checkpoint
        return Setback(agent.handle, cause["run"], cause["function"], error, undone, checkpoint, cause["attempt"])

    def later(self, mark: bytes, id: str | None) -> RunPast | None:
        """The run that was begun in the place of what is called now and has not ended, or has the id."""
        past = Past(self._standing.records)
        run = past.runs.get(id) if id is not None else past.last
        if run is None or mark_of(self.agent, run) == mark:
            return None
        if id is None and run.status in {"finished", "cancelled"}:
            return None
        first = self.first.get(run.id)
        return run if first is not None and first is not run.begin and first.fingerprint == mark else None


class _Choice(Request):
    """Ask the hook. It may change the agent's state, so it is called where the run was."""

    def __init__(self, hook: Callable[[Setback], Any], setback: Setback) -> None:
        self.hook, self.setback = hook, setback

    def now(self) -> Any:
        chosen = self.hook(self.setback)
        if inspect.isawaitable(chosen):
            raise BadOption("replan is async", hint="Use it with `await agent.arun(...)`.")
        return chosen

    async def later(self) -> Any:
        chosen = self.hook(self.setback)
        return await chosen if inspect.isawaitable(chosen) else chosen
