"""A run of another agent inside a run, where the program gave it no id.

Owns how it is recorded on the line of the run that it is inside of. What it does is recorded on its own. What always
holds: its id follows from where it was begun and with what, so a run that is executed again finds the one that it began
and does not begin another; what came of it is told in its place among the completions, and told again. What is not
known yet, because it waits or is in doubt, is not recorded.

    now(lane, agent, function, args, kwargs, options)        await later(...)       called by agent.run and agent.arun
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.errors import BadOption, Diverged, Fenced, RunEnded, ToolFailed, Unavailable, Waiting
from holdfast.run import records as rec
from holdfast.run.arguments import fingerprint
from holdfast.run.calls import perform
from holdfast.run.context import EFFECT, effect
from holdfast.run.durables import Durable, Options, known
from holdfast.run.positions import Lane
from holdfast.run.runs import check_plain
from holdfast.run.scope import Scope, Suspended, now_us
from holdfast.run.standing import NESTED, nested_id
from holdfast.run.steps import Steps, Write, drive, drive_later
from holdfast.run.tools import Tool, tool

if TYPE_CHECKING:
    from holdfast.run.host import AgentHost

# These do not say what came of the run: it waits, the code is another one, somebody else writes, the disk failed.
_NO_OUTCOME = (Waiting, Diverged, Fenced, Unavailable)


@tool(name=NESTED, effect="idempotent")
def _run(agent: str, branch: str, function: str, arguments: dict[str, Any]) -> Any:
    """How such a run is recorded."""


class _Open(BaseException):
    """Carries an error past the record of the call."""

    def __init__(self, error: Exception, path: str) -> None:
        self.error, self.path = error, path


def now(lane: Lane, agent: AgentHost, function: Any, args: Any, kwargs: Any, options: Options) -> Any:
    """Execute a plain durable function of another agent."""
    made, given = _given(agent, check_plain(function), args, kwargs, options)
    put_off = _is_put_off(lane.scope)

    def inside(*_recorded: Any) -> Any:
        place = effect()
        try:
            named = _named(lane.scope, place.path, given, options, put_off=put_off)
            try:
                return agent.handle._execute(function, args, kwargs, named)
            except RunEnded as error:
                return agent.handle._execute(function, args, kwargs, _anew(named, error))
        except _NO_OUTCOME as error:
            raise _Open(error, place.path) from error

    return drive(_steps(lane, agent, made, given, inside))


async def later(lane: Lane, agent: AgentHost, function: Any, args: Any, kwargs: Any, options: Options) -> Any:
    """As now(), for async functions."""
    made, given = _given(agent, known(function), args, kwargs, options)
    put_off = _is_put_off(lane.scope)

    async def inside(*_recorded: Any) -> Any:
        place = effect()
        try:
            named = _named(lane.scope, place.path, given, options, put_off=put_off)
            try:
                return await agent.handle._aexecute(function, args, kwargs, named)
            except RunEnded as error:
                return await agent.handle._aexecute(function, args, kwargs, _anew(named, error))
        except _NO_OUTCOME as error:
            raise _Open(error, place.path) from error

    return await drive_later(_steps(lane, agent, made, given, inside, waits=True))


def _anew(named: Options, error: RunEnded) -> Options:
    """What became of the run since is for this position to say: it is begun anew, unless somebody cancelled it."""
    if error.run != named.id or named.again or error.status in {"cancelled", "finished"}:
        raise error
    return replace(named, again=True)


def _is_put_off(scope: Scope) -> bool:
    """Whether a run is put off where this one waits. Not in the middle of a tool: that would be in doubt."""
    return not scope.waits and EFFECT.get() is None


def _named(scope: Scope, path: str, given: tuple[Any, ...], options: Options, *, put_off: bool) -> Options:
    """The options with the run's id."""
    mark = fingerprint(_RUN.binder.bind(given, {}), scope.registry)
    id = nested_id(*scope.agent.identity, scope.run_id, path, mark)
    return replace(options, id=id, wait=options.wait and not put_off)


_RUN: Tool = _run.tool


def _given(
    agent: AgentHost, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> tuple[Durable, tuple[Any, ...]]:
    """What is recorded about it. What is wrong with the call is said before it takes a place."""
    agent.handle._check_writer()
    if options.change:
        raise BadOption("inside another run, change=True has to say which run is meant", hint="Give its id=.")
    return made, (agent.name, agent.branch_name, made.name, made.given(agent.handle, args, kwargs))


def _steps(
    lane: Lane, agent: AgentHost, made: Durable, given: tuple[Any, ...], inside: Any, *, waits: bool = False
) -> Steps:
    scope: Scope = lane.scope
    what = copy.copy(_RUN)
    what.function, what.waits = inside, waits
    try:
        return (yield from perform(lane, what, given, {}))
    except _Open as left:
        if not isinstance(left.error, Waiting) or not _is_put_off(scope):
            raise left.error from None
        wait = rec.Wait(now_us(), scope.run_id, left.path, "child", agent.name, left.error.until)
        yield Write(scope, wait)
        scope.stopped = True
        raise Suspended from None
    except ToolFailed as error:
        if error.tool != NESTED:
            raise
        message = error.message.removeprefix(f"{NESTED} failed: ")
        raise ToolFailed(
            f"{made.name} of {agent.name} failed: {message}",
            tool=made.name,
            error_type=error.error_type,
            path=error.path,
        ) from error.__cause__
