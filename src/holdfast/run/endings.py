"""What came of a child, on its parent's line.

Owns joining and cancelling. How a child runs is the business of ``children``. What always holds: what a parent is told
is recorded on its line, in its place among the completions, and told again when the parent is executed again; what is
not known yet, because the child waits or is in doubt, is not recorded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadOption, Cancelled, InDoubt, ToolFailed, Unencodable, Waiting
from holdfast.run import records as rec
from holdfast.run import secrets, waiting
from holdfast.run.arguments import Stowed, fetch, fingerprint, stow
from holdfast.run.faults import said
from holdfast.run.outcomes import MESSAGE_MAX, Local, give, lost
from holdfast.run.positions import Lane
from holdfast.run.runs import Run
from holdfast.run.scope import Scope, Suspended, now_us
from holdfast.run.standing import CANCEL, JOIN
from holdfast.run.steps import Request, Steps, Turn, Work, Write, cancelled, cancelled_again, is_cancelled
from holdfast.run.tools import Tool, tool

if TYPE_CHECKING:
    from holdfast.run.children import Child


@tool(name=JOIN, effect="read")
def _join(child: str, run: str) -> None:
    """How the end of a child is recorded."""


@tool(name=CANCEL, effect="read")
def _cancel(child: str, run: str) -> None:
    """How it is recorded that a child was cancelled."""


JOINING: Tool = _join.tool
CANCELLING: Tool = _cancel.tool
_CANCELLED = "holdfast.Cancelled"
"""Stands where the name of a declared exception does: the child did not fail, it was cancelled."""


class Over(Request):
    """Wait until a child has ended, after asking it to stop if need be."""

    def __init__(self, child: Child, *, stop: bool = False) -> None:
        self.child, self.stop = child._same, stop

    def now(self) -> None:
        child = self.child
        if child._loop is not None and not child._over.is_set():
            asyncio = sys.modules["asyncio"]
            if asyncio._get_running_loop() is child._loop:
                raise BadOption(f"{child.name} is a task of this loop", hint="Use `await child.ajoin()` or acancel().")
        if self.stop:
            child._halt()
            if child._task is not None:
                child._loop.call_soon_threadsafe(child._task.cancel)
        child._over.wait()

    async def later(self) -> None:
        child = self.child
        if self.stop:
            child._halt()
            if child._task is not None:
                child._task.cancel()
        loop = sys.modules["asyncio"].get_running_loop()
        over = loop.create_future()
        child._when_over(lambda: loop.call_soon_threadsafe(lambda: over.done() or over.set_result(None)))
        await over


def ending(lane: Lane, child: Child, what: Tool) -> Steps:
    """Join a child, or cancel it; answered from the record where it was done before."""
    scope: Scope = lane.scope
    arguments = child._arguments()
    mark = fingerprint(arguments, scope.registry)
    path = lane.take(what.name, mark)
    child._left = True
    call = scope.recorded(path, what, mark, arguments)
    if call is not None and call.outcome is not None:
        yield Turn(scope, path)
        return _given(scope, child, path, call.outcome, None)
    if call is not None and call.cancelled:
        yield from cancelled_again(scope, call)
    scope.check_settled(what)
    done = rec.Done(0, scope.run_id, path, "value", tool=what.name, kind="read", fingerprint=mark, started=now_us())
    done.args = stow(arguments, scope.registry).value
    with scope.lock:
        scope.live += 1
    try:
        yield Over(child, stop=what is CANCELLING)
        if child._settled and what is JOINING:
            yield Work(child._recall)
    except BaseException as error:
        if scope.run_id and is_cancelled(error):
            yield from cancelled(scope, done)
        raise
    finally:
        with scope.lock:
            scope.live -= 1
    stowed = yield from _outcome(scope, child._same, path, what, done)
    done.at = now_us()
    scope.complete(done, stowed)
    yield Turn(scope, path)
    return _given(scope, child, path, done, stowed)


def _outcome(scope: Scope, child: Child, path: str, what: Tool, done: rec.Done) -> Steps:
    """Put into the record what came of the child. What is not known yet is raised instead."""
    error = child._error
    if isinstance(error, InDoubt | Suspended):  # the latter: the process ends, and the child goes on next time
        raise error
    if what is CANCELLING:
        return None
    if isinstance(error, Waiting):
        if scope.run_id:
            yield Write(scope, rec.Wait(now_us(), scope.run_id, path, "child", child.name, error.until))
            scope.stopped = True
            raise Suspended
        raise error
    if error is not None:
        kind = error.error_type if isinstance(error, ToolFailed) else type(error).__qualname__
        message = secrets.scrub(scope.agent, said(error)[:MESSAGE_MAX], f"an error of {child.name}")
        # One that fails because a child of its own was cancelled has failed.
        declared = _CANCELLED if isinstance(error, Cancelled) and child._stop else ""
        done.how, done.fault = "error", (declared, kind, message, None)
        return None
    try:
        stowed = stow(child._result, scope.registry)
    except Unencodable as failed:  # it was encoded once, with the child's types
        done.how, done.fault = "lost", ("", type(failed).__name__, str(failed)[:MESSAGE_MAX], None)
        return None
    done.value = stowed.value
    return stowed


def _given(scope: Scope, child: Child, path: str, outcome: rec.Done | rec.Decision, stowed: Stowed | None) -> Any:
    if isinstance(outcome, rec.Done) and outcome.fault is not None:
        declared, kind, message, _ = outcome.fault
        if declared == _CANCELLED:
            raise Cancelled(message)
        if outcome.how == "lost":
            raise lost(child.name, path, message)
        raise ToolFailed(f"child {child.name} failed: {kind}: {message}", tool=child.name, error_type=kind, path=path)
    if stowed is not None:
        return fetch(outcome.value, Local(stowed), scope.registry)
    return give(scope, JOINING, path, outcome) if outcome.value is not None else None


def leaving(run: Run) -> Steps:
    """A run ends when its children have: join those that nobody joined, in the order in which they were begun."""
    try:
        for child in run.children:
            if not child._left:
                yield from ending(run.lane, child, JOINING)
    except Suspended:
        raise (run.reason or waiting.put_off(run)) from None
