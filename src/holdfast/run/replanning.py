"""Replanning: what an agent does instead, when a run has failed.

Owns taking a failed run back, and telling a hook what failed and what was undone. What to do then is the hook's choice.
What always holds: the hook is asked when everything is undone; a process that ends before the next run has begun asks
again. So a hook may be called twice about one failure, and should do nothing outside itself.

    executing(agent, function, args, kwargs, id, replan=hook, **options) -> Steps
    hook(setback) -> None                     give up: the error is raised
                  -> a durable function       to be executed with the same arguments
                  -> functools.partial of one, to be executed with those
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import (
    BadOption,
    Cancelled,
    Diverged,
    Fenced,
    InDoubt,
    NoAgent,
    Outcome,
    RunRolledBack,
    ToolFailed,
    Unavailable,
    Waiting,
)
from holdfast.run import records as rec
from holdfast.run import secrets
from holdfast.run.arguments import fetch
from holdfast.run.durables import known
from holdfast.run.effects import Effect
from holdfast.run.outcomes import MESSAGE_MAX
from holdfast.run.past import Past
from holdfast.run.planning import RollbackHost
from holdfast.run.rollback import RollbackPlan, resuming
from holdfast.run.runs import execute
from holdfast.run.scope import effect_of
from holdfast.run.standing import Standing
from holdfast.run.steps import Request, Steps, Work

REPLANS_MAX = 100
"""An agent that has failed in so many ways is not getting anywhere."""

# These are no failures of the plan: somebody has to decide, the run waits, the code is another one, the disk is full.
_NOT_MEANT = (InDoubt, Waiting, Diverged, Cancelled, Fenced, NoAgent, Unavailable)


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


def executing(
    agent: RollbackHost,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    id: str | None,
    *,
    replan: Callable[[Setback], Any],
    **options: Any,
) -> Steps:
    """Execute a durable function; where it fails, take it back and do what the hook says instead."""
    setback = yield from _untold(agent)
    for attempt in range(1, REPLANS_MAX + 1):
        if setback is None:
            try:
                return (yield from execute(agent, known(function), args, kwargs, id, **options))
            except RunRolledBack as error:
                undone: Any = error.undone
                setback = Setback(agent.handle, "", known(function).name, error, undone, error.checkpoint, attempt)
            except _NOT_MEANT:
                raise
            except Exception as error:  # noqa: BLE001 - whatever ended the run is what the hook is told
                setback = yield from _taken_back(agent, known(function).name, error, attempt)
        chosen = yield _Choice(replan, setback)
        if chosen is None:
            raise setback.error
        if isinstance(chosen, functools.partial):
            function, args, kwargs = chosen.func, chosen.args, dict(chosen.keywords)
        elif callable(chosen):
            function = chosen
        else:
            raise BadOption(
                f"replan returned {type(chosen).__name__}",
                hint="Return a durable function, functools.partial of one, or None.",
            )
        setback = None
    raise BadOption(f"{agent.name} was replanned {REPLANS_MAX} times", hint="Let replan return None to give up.")


def _taken_back(agent: RollbackHost, name: str, error: Exception, attempt: int) -> Steps:
    """Roll a failed run back to where it began."""
    past = yield Work(lambda: Past(agent.ledger.records()))
    run = past.unfinished()
    if run is None or run.condition != "failed":
        raise error  # it did not get so far as to begin
    kind = error.error_type if isinstance(error, ToolFailed) else type(error).__qualname__
    message = (error.message if isinstance(error, Outcome) else str(error))[:MESSAGE_MAX]
    message = secrets.scrub(agent, message, "the error that ended a run")
    cause = {"run": run.id, "function": name, "kind": kind, "message": message, "attempt": attempt}
    plan = yield Work(lambda: RollbackPlan(agent, run.begin.start, (), keep=False, cause=cause))
    try:
        checkpoint = yield from plan._going()
    except Outcome as blocked:
        raise blocked from error
    undone = tuple(one.effect for one in plan.undo)
    return Setback(agent.handle, run.id, name, error, undone, checkpoint, attempt)


def _untold(agent: RollbackHost) -> Steps:
    """The setback after which no run has begun yet: the process ended before the hook had its say."""
    yield from resuming(agent)
    standing = yield Work(lambda: Standing(agent.ledger.records()))
    rollback = None
    begun: dict[str, rec.Begin] = {}
    for _, record in standing.records:
        if isinstance(record, rec.Begin):
            begun[record.run] = record
            if record.kind != "rollback":
                rollback = None
        elif isinstance(record, rec.RolledBack):
            rollback = record
    if rollback is None or rollback.run not in begun:
        return None
    cause = fetch(begun[rollback.run].args, agent.ledger, agent.registry)["cause"]
    if cause is None:
        return None
    undone = tuple(
        effect_of(one.call, agent.ledger, agent.registry)
        for one in reversed(standing.effects)
        if one.undo is not None and one.undo.run == rollback.run and one.undone
    )
    error = ToolFailed(
        f"run {cause['run']} of {cause['function']} failed: {cause['kind']}: {cause['message']}",
        tool=cause["function"],
        error_type=cause["kind"],
    )
    checkpoint = agent.target(rollback.id).checkpoint
    return Setback(agent.handle, cause["run"], cause["function"], error, undone, checkpoint, cause["attempt"])


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
