"""Runs: durable functions, from their beginning to their end, as often as it takes.

Owns beginning, resuming and ending a run, and comparing what a program does with what is recorded. How one call goes is
the business of ``calls``. What always holds: a run that is resumed starts from the state in which it began; where the
program does something else than the record says, it stops, unless only reads are left behind; a run does not count as
finished while a recorded write was not reached.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Protocol
from uuid import uuid4

from holdfast.errors import (
    BadOption,
    Cancelled,
    Diverged,
    InDoubt,
    RunEnded,
    RunRolledBack,
    ToolFailed,
    Unencodable,
    Waiting,
)
from holdfast.run import records as rec
from holdfast.run import secrets, waiting
from holdfast.run.arguments import Stowed, differences, fetch, fill, fingerprint, stow
from holdfast.run.changes import compare, config_of
from holdfast.run.choosing import ARGUMENTS, choose, mark_of
from holdfast.run.claims import Loop
from holdfast.run.context import active
from holdfast.run.doubt import settle_all
from holdfast.run.durables import Durable, Options, known
from holdfast.run.faults import said
from holdfast.run.keeping import adopt
from holdfast.run.order import Order
from holdfast.run.outcomes import MESSAGE_MAX, diverged
from holdfast.run.past import ENDED, LOST, Call, Past, RunPast
from holdfast.run.positions import HERE, Lane, number_tasks
from holdfast.run.scope import Host, Scope, in_doubt, now_us
from holdfast.run.steps import Steps, Turn, Work, cancelled, cancelled_again, drive, drive_later, is_cancelled
from holdfast.run.tools import TOOLS, Tool, tool

log = logging.getLogger("holdfast.run")
SHOWN_MAX = 200
"""Characters of a call's arguments in a message."""


class Saves(Protocol):
    """A checkpoint, as far as a run cares."""

    @property
    def id(self) -> str: ...


class RunHost(Host, Protocol):
    """What a run asks of an agent besides."""

    @property
    def loop(self) -> Loop:
        """The agent's use outside of runs."""

    # These fix what is to be written and return the function that writes it, which may be called on another thread.

    def begin(self, record: rec.Begin, stowed: Stowed) -> Callable[[], Any]:
        """Take the checkpoint that a run begins with; the record, with ``start`` set to its id, goes with it."""

    def save(self, label: str, record: Callable[[bytes, bytes], rec.Saved]) -> Callable[[], Saves]:
        """Take a checkpoint. ``record(id, digest)`` goes with it."""

    def finish(self, record: rec.End, stowed: Stowed, label: str) -> Callable[[], Any]:
        """The run has ended well: keep its state, if that has changed, and its result, in one transaction."""

    # These change the live state or look at it.

    def rewind(self, start: bytes) -> None:
        """Make the live state that of this checkpoint, in memory. The head stays where it is."""

    def state_digest(self) -> bytes:
        """Of the live state."""

    def difference(self, id: bytes) -> list[str]:
        """What differs between that checkpoint's state and the live one, for people."""

    def saved(self, id: bytes) -> Saves:
        """A checkpoint that was taken before; the changes that led to it are recorded there already."""

    def stopped(self) -> None:
        """The run did not get to its end. If it had not caught up with its record, the state is the head's again."""

    def abandoned(self) -> None:
        """The run that stopped here has ended: what it left behind and did not save goes."""


class Run(Scope):
    """One execution of a run."""

    def __init__(self, agent: RunHost, past: Past, this: RunPast, *, strict: bool) -> None:
        super().__init__(agent, past.incarnation, Order(this.order))
        self.host = agent
        self.run_id = this.id
        self.past = this
        self.taken = agent.loop.taken  # one for all that the agent does in this process
        self.taken |= past.taken
        self.strict = strict
        self._before = sys.exception()  # what the program deals with by executing this run
        self.lane = Lane(self, label=this.begin.function)
        # Recorded and not reached yet. What is inside a call that has an outcome is not reached again.
        self._waiting = {path: call for path, call in this.calls.items() if not this.is_inside(path)}
        self._saves = {path: saved for path, saved in this.saved.items() if not this.is_inside(path)}

    # -- comparing ----------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether something that is recorded has not been reached yet."""
        return bool(self._waiting or self._saves)

    def recorded(self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Call | None:
        call = self._waiting.pop(path, None)
        if call is None:
            if path in self._saves:
                raise diverged(path, "checkpoint", describe(tool.name, arguments))
            return adopt(self, path, tool, mark)
        if call.tool == tool.name and call.fingerprint == mark:
            return call
        self._waiting[path] = call
        differs = differences(self.arguments(call), arguments) if call.tool == tool.name else ()
        error = diverged(path, self.describe(call), describe(tool.name, arguments), differs)
        if call.tool == LOST:
            error.hint = "What was recorded of this call, besides its outcome, is lost. Roll back to before it."
        self._cut(error)
        return None

    def _cut(self, error: Diverged) -> None:
        """Leave recorded reads behind and go on live, or raise."""
        with self.lock:
            dropped = [call for path, call in self._waiting.items() if not self.past.is_inside(path)]
            if self.strict or self._saves or any(not call.read for call in dropped):
                self.order.fail(error)
                raise error
            numbers = sorted(call.number for call in dropped)
            self.write(rec.Cut(now_us(), self.run_id, error.path, numbers, error.expected, error.actual))
            self.order.drop(call.path for call in dropped if call.outcome is not None or call.cancelled)
            self._waiting.clear()
        log.warning(
            "run %s of %s is resumed with changed code: %s recorded %s, now it is %s; %d recorded reads are dropped",
            self.run_id, self.agent.name, error.path, error.expected, error.actual, len(numbers),
        )  # fmt: skip

    def leave(self, path: str) -> None:
        self.order.drop(inside for inside in self.past.completed if inside.startswith(f"{path}/"))

    def describe(self, call: Call) -> str:
        return describe(call.tool, self.arguments(call))

    def arguments(self, call: Call) -> dict[str, Any]:
        """The recorded arguments of a call, to be shown."""
        try:
            found = fill(fetch(call.args, self.ledger, self.registry, inert=True), call.holes)
        except Exception as error:  # noqa: BLE001 - it is only to be shown
            found = {"?": type(error).__name__}
        return found if isinstance(found, dict) else {}

    def check_reached(self) -> None:
        """Raise when the function has ended without doing what is recorded."""
        for path, call in self._waiting.items():
            if not call.read and not self.past.is_inside(path):
                raise diverged(path, self.describe(call), "the function ended")
        for path in self._saves:
            raise diverged(path, "checkpoint", "the function ended")

    def check_settled(self, tool: Tool | None = None) -> None:
        """Besides, nothing new starts in a run that somebody ends: it is executed again from its beginning."""
        ending = sys.exception()
        if isinstance(ending, KeyboardInterrupt | SystemExit) and ending is not self._before:
            raise ending
        if self.given_up:
            raise sys.modules["asyncio"].CancelledError
        super().check_settled(tool)

    # -- intended changes ------------------------------------------------------------------------------------

    def version(self, lane: Lane, name: str) -> bool:
        """Whether the new way is taken at this mark: not by a run that had passed here when the mark was put in."""
        path = f"{lane.prefix}!{name}"
        with self.lock:
            note = self.past.notes.get(path)
            if note is None:
                stowed = stow(not self.replaying, self.registry)
                note = self.past.notes[path] = rec.Note(now_us(), self.run_id, "version", name, stowed.value, path)
                self.write(note)
        return bool(fetch(note.value, self.ledger, self.registry))

    # -- checkpoints ----------------------------------------------------------------------------------------

    def checkpoint(self, lane: Lane, label: str) -> Steps:
        """Take a checkpoint at this position, or return the recorded one after comparing the states."""
        found = self._checkpoint(lane, label)
        return (yield Work(found)) if callable(found) else found

    def checkpoint_later(self, lane: Lane, label: str) -> Steps:
        """As checkpoint(), for async code: the state of this moment. Others go on while it is written.

        So the moment at which the caller goes on is recorded, too, as that of any call.
        """
        found = self._checkpoint(lane, label)
        path = lane.take(_WRITTEN.name)
        call = self.recorded(path, _WRITTEN, b"", {})
        if call is not None and call.cancelled:
            yield from cancelled_again(self, call)
        if call is None or call.outcome is None:
            done = rec.Done(now_us(), self.run_id, path, "value", tool=_WRITTEN.name, kind=_WRITTEN.kind)
            try:
                found = (yield Work(found)) if callable(found) else found
            except BaseException as error:
                if is_cancelled(error):
                    yield from cancelled(self, done)
                raise
            self.complete(done)
        yield Turn(self, path)
        return found

    def _checkpoint(self, lane: Lane, label: str) -> Any:
        """The recorded checkpoint, or a function that writes one with the state of this moment."""
        path = lane.take("checkpoint")
        found = self._saves.pop(path, None)
        if found is None:
            if path in self._waiting:
                self._cut(diverged(path, self.describe(self._waiting[path]), "checkpoint"))
            self.check_settled()
            stack = lane.stack()
            return self.host.save(
                label, lambda made, digest: rec.Saved(now_us(), self.run_id, path, made, digest, stack)
            )
        actual = self.host.state_digest()
        if actual != found.digest:
            self._saves[path] = found
            shown = f"state {found.digest.hex()[:16]}", f"state {actual.hex()[:16]}"
            raise diverged(path, *shown, self.host.difference(found.id))
        return self.host.saved(found.id)


@tool(name="holdfast.checkpoint", effect="read")
def _written() -> None:
    """Stands for the return of acheckpoint() in the order of completions."""


_WRITTEN: Tool = _written.tool


def describe(tool: str, arguments: dict[str, Any]) -> str:
    """A call, as a person would write it."""
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{tool}({shown if len(shown) <= SHOWN_MAX else shown[: SHOWN_MAX - 1] + '…'})"


# -- executing ----------------------------------------------------------------------------------------------


def run_now(agent: RunHost, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """Execute a plain durable function, from the beginning or from where it stopped."""
    made = check_plain(function)
    return drive(execute(agent, made, args, kwargs, options))


def check_plain(function: Any) -> Durable:
    """What is known about a function that plain code can execute."""
    made = known(function)
    if made.waits:
        raise BadOption(f"{made.name} is async", hint="Use `await agent.arun(...)`.")
    return made


async def run_later(
    agent: RunHost, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Execute an async durable function. A plain one is executed, too, and blocks the loop as it would anywhere."""
    import asyncio

    number_tasks(asyncio.get_running_loop())
    return await drive_later(execute(agent, known(function), args, kwargs, options))


class _Body:
    """Call the durable function itself."""

    def __init__(self, run: Run, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run, self.made, self.args, self.kwargs = run, made, args, kwargs

    def now(self) -> Any:
        self.run.plain = True
        with active(self.run.lane):
            try:
                return self.made.function(self.run.agent.handle, *self.args, **self.kwargs)
            except StopIteration as error:  # which no generator can pass on
                raise RuntimeError(f"{self.made.name} raised StopIteration") from error

    async def later(self) -> Any:
        return await apart(self.run, self._body)

    async def _body(self) -> Any:
        self.run.plain = True
        with active(self.run.lane):
            result = self.made.function(self.run.agent.handle, *self.args, **self.kwargs)
            self.run.plain = not inspect.isawaitable(result)
            return result if self.run.plain else await result


async def apart(run: Scope, body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Execute the body of a run in a task of its own.

    So who cancels the run is told from a limit of the program's own: only that one cancels the task that it is in.
    """
    asyncio = sys.modules["asyncio"]
    context = copy_context()
    context.run(HERE.set, None)  # the task takes no number of a run that this one is inside of
    inner = context.run(asyncio.get_running_loop().create_task, body())
    try:
        return await asyncio.shield(inner)
    except asyncio.CancelledError:
        if inner.done():
            raise
        run.give_up()
        while not inner.done():
            inner.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({inner})
        if not inner.cancelled():
            inner.exception()  # it was looked at; what counts is that the run is interrupted
        raise


def execute(agent: RunHost, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Steps:
    past = yield Work(lambda: Past(agent.ledger.records()))
    given, mark = called_with(agent, made, args, kwargs)
    this = choose(agent, past, mark, options)
    if this is not None and this.status == "finished" and this.end is not None:
        return fetch(this.end.value, agent.ledger, agent.registry)
    agent.loop.read(past)
    yield from agent.loop.settling()
    agent.loop.check_settled()
    resumed = this is not None
    agent.whole = False
    if this is None:
        agent.abandoned()
        stowed = stow(given, agent.registry)
        begin = rec.Begin(now_us(), options.id or uuid4().hex[:16], made.name, stowed.value, mark, code=made.code)
        begin.config = config_of(agent)
        begin.generation = agent.generation
        yield Work(agent.begin(begin, stowed))
        past.incarnation += begin.run in past.begun
        this = RunPast(agent.ledger.count, begin)
    else:
        yield Work(functools.partial(_resume, agent, made, this, mark, given))
    run = Run(agent, past, this, strict=made.strict if options.strict is None else options.strict)
    run.waits = options.wait
    try:
        left = yield from settle_all(run, this.open_calls(), TOOLS.find)
        if left:
            run.unsettled = left
            raise in_doubt(run, left)
        result = yield from waiting.body(run, _Body(run, made, args, kwargs))
        if run.children:
            from holdfast.run.children import leaving  # which needs runs

            yield from leaving(run)
        run.check_settled()
        run.check_reached()
        kept = _kept(agent, made, result)
        end = rec.End(now_us(), run.run_id, "finished", kept.value)
        yield Work(agent.finish(end, kept, f"run {made.name} finished"))
        agent.whole = True
        if resumed:  # what it had left, should it have failed before, is its own again
            agent.loop.restart(agent.ledger.count, "")
        return fetch(kept.value, agent.ledger, agent.registry)
    except BaseException as error:
        try:
            how = stopped(run, error)
        finally:
            agent.stopped()
        if how in ENDED:
            ended(agent)
        raise
    finally:
        run.ended = True


def ended(agent: RunHost) -> None:
    """A run has ended without finishing: the branch is free, and what it has done is left to whoever comes next."""
    agent.whole = True
    agent.loop.restart(agent.ledger.count, "")


def cancelling(agent: RunHost, id: str) -> Steps:
    """End a run that nobody executes. What it has saved and done stays."""
    past = yield Work(lambda: Past(agent.ledger.records()))
    this = past.runs.get(id)
    if this is None or this.begin.kind == "rollback":
        what = "was rolled back" if this is None and id in past.begun else f"is no run of {agent.name}"
        raise BadOption(f"{id!r} {what}", hint="See agent.runs() for what there is.")
    if this.status == "finished":
        raise RunEnded(f"run {id!r} has finished", run=id, status="finished", hint="Roll back to undo what it did.")
    if this.status == "cancelled":
        return
    agent.loop.read(past)
    left = yield from settle_all(agent.loop, this.open_calls(), TOOLS.find)
    if left:
        raise in_doubt(agent.loop, left)
    agent.loop.note()
    yield Work(lambda: agent.ledger.append(rec.End(now_us(), id, "cancelled"), flush=True))
    agent.abandoned()
    ended(agent)


def called_with(
    agent: RunHost, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """The arguments by name, without the agent, and the fingerprint of function and arguments."""
    given = made.given(agent.handle, args, kwargs)
    mark = fingerprint({"function": made.name, "arguments": given}, agent.registry)
    secrets.refuse(agent, f"the arguments of {made.name}", given)
    return given, mark


def _kept(agent: RunHost, made: Durable, result: Any) -> Stowed:
    """What a function returned, for the record."""
    what = f"the result of {made.name}"
    try:
        return stow(secrets.scrub(agent, result, what), agent.registry)
    except Unencodable as error:
        error.root = what
        if inspect.iscoroutine(result):
            error.hint = f"{result.__name__} is async: `await` it in an async function, and run that with agent.arun()."
            result.close()
        raise


def _resume(agent: RunHost, made: Durable, this: RunPast, mark: bytes, given: dict[str, Any]) -> None:
    agent.rewind(this.begin.start)
    agent.loop.note()
    if mark != mark_of(agent, this):
        stowed = stow({"fingerprint": mark, "arguments": given}, agent.registry)
        note = this.notes[ARGUMENTS] = rec.Note(now_us(), this.id, "arguments", made.name, stowed.value, ARGUMENTS)
        agent.ledger.append(note, nodes=stowed.nodes, chunks=stowed.chunks)
        log.info("run %s of %s is resumed with other arguments", this.id, agent.name)
    agent.ledger.append(this.resumed(now_us()))
    compare(agent, made, this)


def stopped(run: Run, error: BaseException) -> str:
    """Record how a run ended that did not finish, and answer that. One that is interrupted has not ended."""
    if isinstance(error, InDoubt) or run.unsettled:
        how = "attention"
    elif isinstance(error, Waiting | RunRolledBack):
        return ""  # that is recorded already
    elif isinstance(error, Diverged):
        return ""  # the record stays as it is; other code can go on from it
    elif isinstance(error, Exception):
        # Of a child that was cancelled, the same error is a failure.
        how = "cancelled" if isinstance(error, Cancelled) and error is run.reason else "failed"
    else:
        run.ledger.flush()
        return ""
    kind = error.error_type if isinstance(error, ToolFailed) else type(error).__qualname__
    message = secrets.scrub(run.agent, said(error)[:MESSAGE_MAX], "the error that ended a run")
    fault = ("", kind, message, None)
    run.ledger.append(rec.End(now_us(), run.run_id, how, fault=fault), flush=True)
    return how
