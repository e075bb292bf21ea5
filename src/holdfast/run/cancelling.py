"""Cancelling: how a run is told to stop, and what is recorded of that.

Owns what a run is told, where, and how it ends then. Whoever asks (a person, a parent, a time limit) is the business of
others. What always holds: a run is told once for each time that it was asked; that is a record at the position of a
call, which is not made, so it is told there again when it is executed again; nothing is told inside of a tool, so no
call is cut in two; a run that was told has not ended before its children have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from holdfast.errors import AgentBusy, Cancelled, HoldfastError, InDoubt, Waiting
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed, stow
from holdfast.run.outcomes import STOPPED, brief_fault, give, together
from holdfast.run.resilience import clock_of
from holdfast.run.scope import EFFECT, Scope, now_us
from holdfast.run.steps import Steps, Turn, Work
from holdfast.run.tools import Tool

if TYPE_CHECKING:
    from holdfast.run.runs import Run

LIMIT = "time limit"
"""Who says so when a run's time is over."""


class Stop(Struct, frozen=True):
    """What a run is told: a sentence, who says so, whether what it did is to be undone, the signal that asked."""

    why: str
    by: str
    undo: bool = False
    event: bytes = b""


def stopping(scope: Scope, kind: str, *, at_once: bool = False) -> Steps:
    """Whether the run is to stop before a call of this kind: a ``Stop``, or None. Nobody stops a plain loop."""
    run: Any = scope
    if not scope.run_id or EFFECT.get() is not None or not (at_once or run.looks(kind)):
        return None
    stop = yield Work(run.look)
    return stop if stop is not None and run.takes(stop) else None


def tell(scope: Scope, what: Tool, stop: Stop, done: rec.Done, stowed: Stowed | None = None) -> Steps:
    """Record that the run was told so in the place of the call that ``done`` stands for, and raise it there."""
    named = stow([stop.by, stop.undo], scope.registry)
    done.how, done.value, done.event, done.at = "stopped", None, stop.event, clock_of(scope.agent).wall_us()
    done.fault = (STOPPED, Cancelled.__name__, stop.why, named.value)
    scope.complete(done, together(stowed, named))
    yield Turn(scope, done.path, flush=True)
    give(scope, what, done.path, done, named)


# -- how it ends ----------------------------------------------------------------------------------------------


def ending(run: Run, error: BaseException) -> Steps:
    """What a run ends with that raised this: where that is what it was told, its children have ended first.

    A task group raises it in a group, with what else its tasks raised.
    """
    own = run.heard
    grouped = isinstance(error, BaseExceptionGroup) and error.subgroup(lambda one: one is own) is not None
    if own is None or (error is not own and not grouped):
        return error
    if run.children:
        from holdfast.run.children import over  # which needs runs

        for child in run.children:
            yield from over(child)
            if isinstance(child._same._error, Waiting):  # it was put off before it was told
                yield from over(child.again())
            if isinstance(child._same._error, Waiting | AgentBusy):  # cleaning up, it waits; or somebody else has it
                yield Work(partial(run.agent.handle._store.cancel, child.name, child.run, branch=child._branch))
        failed = [child._same._error for child in run.children]
        return next((one for one in failed if isinstance(one, InDoubt)), own)
    return own


def undoing(run: Run, own: Cancelled) -> Steps:
    """Undo what a run did that was told to stop so, and go back to where it began."""
    from holdfast.run.rollback import RollbackPlan  # which needs runs

    try:
        plan = yield Work(lambda: RollbackPlan(run.host, run.past.begin.start, ()))
        yield from plan._going()
    except HoldfastError as error:
        fault = brief_fault(run.agent, error, "the error that stopped a rollback")
        run.ledger.append(rec.End(now_us(), run.run_id, "attention", fault=fault), flush=True)
        raise error from own


def asked_by(signals: Iterable[Any], taken: Collection[Any]) -> str:
    """Who has asked the run to stop that has these signals and has not been told yet; empty: nobody."""
    return next((one.by or "?" for one in signals if one.name == rec.STOP and one.id not in taken), "")
