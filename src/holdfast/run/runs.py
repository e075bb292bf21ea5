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
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from math import inf
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from holdfast.agent import watchers
from holdfast.agent.points import BREAKER, TOOL
from holdfast.agent.schedule import AFTER, BEFORE
from holdfast.codec.types import Registry
from holdfast.codec.values import decode
from holdfast.errors import (
    AgentBusy,
    AtomicOpen,
    BadOption,
    Cancelled,
    Diverged,
    InDoubt,
    InputError,
    InvariantViolated,
    RunRolledBack,
    RunUnfinished,
    Unencodable,
    UnknownRevision,
    Waiting,
)
from holdfast.run import cancelling, queues, waiting
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed, differences, fetch, fill, fingerprint, refuse, scrub, stow
from holdfast.run.calls import LEDGER
from holdfast.run.claims import adopt
from holdfast.run.doubt import settle_all
from holdfast.run.durables import ARGUMENTS, Durable, Options, choose, known, mark_of, result_of_run
from holdfast.run.effects import SAVED
from holdfast.run.order import Order
from holdfast.run.outcomes import brief_fault, diverged
from holdfast.run.past import ENDED, GUARDED, LOST, TRACE, Call, Past, RunPast, by_itself, cancelled_at
from holdfast.run.resilience import clock_of
from holdfast.run.scope import EFFECT, HERE, Lane, Scope, active, branch_of, in_doubt, now_us
from holdfast.run.steps import Request, Steps, Turn, Work, cancelled, cancelled_again, is_cancelled, turn_again
from holdfast.run.tools import TOOLS, Tool, tool

if TYPE_CHECKING:
    from holdfast.run.host import AgentHost

log = logging.getLogger("holdfast.run")
_WRITES = {"before": BEFORE, "after": AFTER}
SHOWN_MAX = 200
"""Characters of a call's arguments in a message."""


class Beginner(Protocol):
    """An agent as far as the beginning of a run needs one: it may not be there yet."""

    handle: Any
    registry: Registry

    @property
    def config_hash(self) -> str: ...


class Run(Scope):
    """One execution of a run."""

    def __init__(self, agent: AgentHost, past: Past, this: RunPast, *, strict: bool) -> None:
        super().__init__(agent, past.incarnation, Order(this.order))
        self.host = agent
        self.run_id = this.id
        self.past = this
        self.taken = agent.loop.taken  # one for all that the agent does in this process
        self.taken |= past.taken
        self.strict = strict
        self.reason: BaseException | None = None  # why it has stopped, where it was not put off
        self.children: list[Any] = []  # what it has spawned
        self.parent_says: cancelling.Stop | None = None  # what its parent says
        self.heard: Cancelled | None = None  # what it was told last
        self._limit = this.limit
        self._look_at_s = 0.0
        self._before = sys.exception()  # what the program deals with by executing this run
        self.lane = Lane(self, label=this.begin.function)
        # Recorded and not reached yet. What is inside a call that has an outcome is not reached again.
        self._waiting = {path: call for path, call in this.calls.items() if not this.is_inside(path)}
        saves = {path: saved for path, saved in this.saved.items() if not this.is_inside(path)}
        self._saves = {path: saved for path, saved in saves.items() if not by_itself(path)}
        self._points = {path: saved for path, saved in saves.items() if by_itself(path)}
        self._live = False

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
            return adopt(self, path, tool, mark, arguments)
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
            self._points.clear()
        log.warning(
            "run %s of %s is resumed with changed code: %s recorded %s, now it is %s; %d recorded reads are dropped",
            self.run_id, self.agent.name, error.path, error.expected, error.actual, len(numbers),
        )  # fmt: skip

    def leave(self, path: str) -> None:
        self.order.drop(inside for inside in self.past.completed if inside.startswith(f"{path}/"))

    def told_cancelled(self, path: str) -> None:
        if not (self.given_up or self.ended):
            place = cancelled_at(path)
            note = self.past.notes[place] = rec.Note(now_us(), self.run_id, "cancelled", "", None, place)
            self.write(note)

    def was_cancelled(self, path: str) -> bool:
        return cancelled_at(path) in self.past.notes

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

    # -- stopping -------------------------------------------------------------------------------------------

    def looks(self, kind: str) -> bool:
        """Before each call that changes something outside; otherwise every 50 ms, as looking takes longer than most."""
        return kind != "read" or self.parent_says is not None or time.monotonic() >= self._look_at_s

    def look(self) -> cancelling.Stop | None:
        self._look_at_s = time.monotonic() + waiting.LOOK_S
        whose = f"run {self.run_id} of {self.agent.name}"
        if self.parent_says is not None:
            return self.parent_says
        if self.left_s <= 0:
            over = waiting.date(self.past.begin.until)
            return cancelling.Stop(f"the time of {whose} was over at {over}", cancelling.LIMIT)
        for signal in self.host.signals(self.past):
            if signal.name == rec.STOP and signal.id not in self.taken:
                undo = bool(decode(signal.value, self.registry))
                return cancelling.Stop(f"{whose} was cancelled by {signal.by}", signal.by, undo, signal.id)
        return None

    def takes(self, stop: cancelling.Stop) -> bool:
        with self.lock:
            if stop.event:
                new = stop.event not in self.taken
                self.taken.add(stop.event)
            elif stop is self.parent_says:
                new, self.parent_says = True, None
            else:
                new, self._limit = bool(self._limit), 0
            return new

    @property
    def left_s(self) -> float:
        """How long it may go on before its time is over."""
        return (self._limit - clock_of(self.agent).wall_us()) / 1e6 if self._limit else inf

    def hears(self, error: Cancelled) -> None:
        self.heard, self._limit = error, 0
        for child in self.children:
            child.ask(error)

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

    def checkpoint(self, lane: Lane, label: str, trigger: str = "") -> Steps:
        """Take a checkpoint at this position, or return the recorded one after comparing the states."""
        found = self._checkpoint(lane, lane.take("checkpoint"), label, trigger=trigger)
        return (yield Work(found)) if callable(found) else found

    def checkpoint_later(self, lane: Lane, label: str, trigger: str = "") -> Steps:
        """As checkpoint(), for async code: the state of this moment. Others go on while it is written.

        So the moment at which the caller goes on is recorded, too, as that of any call. With files beside the state,
        these are looked at first, while others go on, and then it is the state of that moment.
        """
        path = lane.take("checkpoint")
        with self.host.quiet():
            looked = yield from self._looking(path)
            found = self._checkpoint(lane, path, label, trigger=trigger, looked=looked)
        path = lane.take(_WRITTEN.name)
        made = yield from self._apart(
            path, self.recorded(path, _WRITTEN, b"", {}), found if callable(found) else lambda: found
        )
        return found if made is None else made

    def _looking(self, path: str) -> Steps:
        """What has changed in the layers beside the state, at a checkpoint that is not recorded; None: none did."""
        seen = f"{path}!looked"
        call = self._waiting.pop(seen, None)
        if call is None and (path in self._saves or not self.host.handle._check_writer().layers):
            return None
        return (yield from self._apart(seen, call, self.host.handle._check_writer().look))

    def _apart(self, path: str, call: Call | None, work: Callable[[], Any]) -> Steps:
        """Do something while others go on, unless the record has that: then None. When it goes on is recorded."""
        if call is not None and call.cancelled:
            yield from cancelled_again(self, call)
        if call is not None and call.outcome is not None:
            yield from turn_again(self, call)
            return None
        done = rec.Done(now_us(), self.run_id, path, "value", tool=_WRITTEN.name, kind=_WRITTEN.kind)
        try:
            found = yield Work(work)
        except BaseException as error:
            if is_cancelled(error):
                yield from cancelled(self, done)
            raise
        self.complete(done)
        yield Turn(self, path, new=True)
        return found

    def _checkpoint(self, lane: Lane, path: str, label: str, **options: Any) -> Any:
        """The recorded checkpoint, or a function that writes one with the state of this moment."""
        found = self._saves.get(path)
        if found is None:
            if path in self._waiting:
                self._cut(diverged(path, self.describe(self._waiting[path]), "checkpoint"))
            self.check_settled()
            return self._save(lane, path, label, **options)
        self._compare(path, found)
        del self._saves[path]
        return self.host.saved(found.id)

    def _save(self, lane: Lane, path: str, label: str, **options: Any) -> Callable[[], Any]:
        stack = lane.stack()
        return self.host.save(
            label, lambda made, digest: rec.Saved(now_us(), self.run_id, path, made, digest, stack), **options
        )

    def _compare(self, path: str, found: rec.Saved) -> None:
        actual = self.host.state_digest()
        if actual != found.digest:
            shown = f"state {found.digest.hex()[:16]}", f"state {actual.hex()[:16]}"
            raise diverged(path, *shown, self.host.difference(found.id))

    # -- safe points ----------------------------------------------------------------------------------------

    def _is_live(self) -> bool:
        """Whether the program has come to the end of what is recorded: all of that is reached, and was given out."""
        self._live = self._live or not (self.replaying or self._points or self.order.waiting_for)
        return self._live

    def complete(self, record: rec.Done | rec.Decision, stowed: Stowed | None = None, *, soon: bool = False) -> None:
        self._live = True
        self._points.clear()  # what it has not come by is not there any more
        super().complete(record, stowed, soon=soon)

    def around(self, lane: Lane, path: str, tool: Tool, when: str) -> None:
        own = tool.checkpoint == when
        asked = TOOL if own else self.host.due(_WRITES[when] if tool.kind in GUARDED else when)
        try:
            if own and when == "before" and path not in self._waiting:
                self._refuse_again(path)
            if asked or self._points:
                self._point(lane, f"{path}!{when}", f"{when} {tool.name}", asked)
        except InvariantViolated as error:
            if own and when == "before":  # the tool is called from a state that was saved, or not at all
                lane.take(tool.name)  # the position is spent: the next execution gives it to no other call
                raise
            # a courtesy, too: the program is told at its own
            log.warning("no checkpoint was taken %s %s: %s", when, tool.name, error.message)

    def _refuse_again(self, path: str) -> None:
        """A call that is not recorded, while others after it are: where an invariant stopped it, it does so again."""
        if self.host.judge is not None and f"{path}!before" not in self._points and not self._is_live():
            self.host.judge(sparing=False)

    def opened(self, lane: Lane, path: str, label: str) -> None:
        try:
            self._point(lane, f"{path}!breaker", label, BREAKER)
        except InputError as error:  # of the state: it was a courtesy, and the program will be told at its own
            log.warning("no checkpoint was taken: %s: %s", label, error)

    def point(self, lane: Lane, path: str, event: str, label: str) -> Any:
        """The program has declared a safe point. Gives what was saved."""
        return self._point(lane, path, label, self.host.due(event))

    def _point(self, lane: Lane, path: str, label: str, asked: str | None) -> Any:
        """The run is at a safe point: save it if somebody asks for that. Gives what was saved.

        The position takes no number, so that another execution, with another policy, need not take it. One that comes
        by compares the states. Nobody waits until it is durable: the next intent does, and whoever waited in async code
        would go on in another order than the next time. What a policy saves is a courtesy: if that fails, the program
        is told when it asks for a checkpoint itself.
        """
        if self._points and (found := self._points.pop(path, None)) is not None:
            self._compare(path, found)
            with suppress(UnknownRevision):  # it was let go: nothing depends on it
                return self.host.saved(found.id)
            return None
        declared = asked in {TOOL, BREAKER}
        if not asked or not self._is_live() or lane.stray or (EFFECT.get() is not None and not declared):
            return None
        if self.ended or self.given_up or self.unsettled or self.broken is not None:
            return None  # the call itself says why
        try:
            if not declared and not self.host.changed:
                return None
            return self._save(lane, path, label, trigger=asked, lazy=True)()
        except AtomicOpen:
            return None
        except InputError as error:
            if declared:
                raise
            log.warning("no checkpoint of %s was taken at %s: %s", self.agent.name, path, error)
            return None


@tool(name=SAVED, effect="read")
def _written() -> None:
    """Stands for the return of acheckpoint() in the order of completions."""


_WRITTEN: Tool = _written.tool


def describe(tool: str, arguments: dict[str, Any]) -> str:
    """A call, as a person would write it."""
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{tool}({shown if len(shown) <= SHOWN_MAX else shown[: SHOWN_MAX - 1] + '…'})"


# -- executing ----------------------------------------------------------------------------------------------


def check_plain(function: Any) -> Durable:
    """What is known about a function that plain code can execute."""
    made = known(function)
    if made.waits:
        raise BadOption(f"{made.name} is async", hint="Use `await agent.arun(...)`.")
    return made


class Body(Request):
    """Call the function that a run executes."""

    def __init__(self, run: Run, name: str, function: Callable[[], Any]) -> None:
        self.run, self.name, self.function = run, name, function

    def now(self) -> Any:
        self.run.plain = True
        with active(self.run.lane):
            self._enter()
            try:
                return self.function()
            except StopIteration as error:  # which no generator can pass on
                raise RuntimeError(f"{self.name} raised StopIteration") from error

    def _enter(self) -> None:
        if self.run.host.entering is not None:
            self.run.host.entering()

    async def later(self) -> Any:
        return await apart(self.run, self._body)

    async def _body(self) -> Any:
        self.run.plain = True
        with active(self.run.lane):
            self._enter()
            result = self.function()
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


PLAN = "=plan"
"""The place of a run's note that says what it is executed instead of, and the how-manyth way that is."""


def plan_of(run: RunPast, agent: AgentHost) -> dict[str, Any]:
    """What that note says; nothing where the run is executed as it was called."""
    note = run.notes.get(PLAN)
    return dict(fetch(note.value, agent.ledger, agent.registry, inert=True)) if note is not None else {}


def execute(
    agent: AgentHost,
    made: Durable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    plan: dict[str, Any] | None = None,
) -> Steps:
    """The steps of a run. ``plan`` is kept with one that begins (``PLAN``)."""
    with watchers.watching("run", agent.name, branch_of(agent), function=made.name) as watch:
        return (yield from _execute(agent, made, args, kwargs, options, watch, plan or {}))


def _execute(
    agent: AgentHost,
    made: Durable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    watch: watchers.Watch,
    plan: dict[str, Any],
) -> Steps:
    past = yield Work(lambda: agent.past(options.id))
    given, mark = called_with(agent, made, args, kwargs)
    this = choose(agent, past, mark, options)
    if this is not None and this.status == "finished" and this.end is not None:
        return result_of_run(this, agent.ledger, agent.registry)
    agent.loop.read(past)
    yield from agent.loop.settling()
    agent.loop.check_settled()
    resumed = this is not None
    agent.whole = False
    if this is None:
        this = yield from _begin(agent, past, made, given, mark, options, plan=plan)
    else:
        yield Work(functools.partial(_resume, agent, made, this, mark, given))
    run = Run(agent, past, this, strict=made.strict if options.strict is None else options.strict)
    run.waits = options.wait
    try:
        traced(agent, this, watch, resumed=resumed)
        left = yield from settle_all(run, this.open_calls(), TOOLS.find)
        if left:
            run.unsettled = left
            raise in_doubt(run, left)
        result = yield from waiting.body(
            run, Body(run, made.name, functools.partial(made.function, agent.handle, *args, **kwargs))
        )
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
            agent.loop.restart(agent.ledger.count)
        return fetch(kept.value, agent.ledger, agent.registry)
    except BaseException as error:
        try:
            ending = yield from cancelling.ending(run, error)
            # One that is put off leaves them to go on; nobody waits for anything where a coroutine is thrown away.
            if run.children and not isinstance(error, Waiting | GeneratorExit):
                from holdfast.run.children import abandoning

                yield from abandoning(run)
            how = stopped(run, ending)
            watch.tell(status=how)
        finally:
            agent.stopped()
        if how in ENDED:
            ended(agent)
        if run.heard is not None and ending is run.heard and run.heard.undo:
            yield from cancelling.undoing(run, run.heard)
        if ending is not error:
            raise ending from error
        raise
    finally:
        run.ended = True


def submitting(
    agent: AgentHost, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Steps:
    """Begin a run and leave it to whoever resumes it; answers its id. One that is there already is not begun again."""
    past = yield Work(lambda: agent.past(options.id))
    given, mark = called_with(agent, made, args, kwargs)
    this = choose(agent, past, mark, options)
    if this is not None:
        if agent.handle.dirty and not agent.has_remains:
            raise RunUnfinished(
                f"the state of {agent.name} has changes that are not saved, and run {this.id} is there already",
                run=this.id,
                hint="Handing over the agent would lose them. Keep them elsewhere; discard them with agent.close().",
            )
        # One that failed without an id, or came with the branch, is handed over again: resumed, it is open here.
        answered = {"finished"} if options.id is None else {"finished", "failed"}
        if this.status not in answered and not agent.ledger.is_open(this.id):
            yield Work(lambda: agent.ledger.append(this.resumed(now_us()), flush=True))
        return this.id
    agent.loop.read(past)
    yield from agent.loop.settling()
    agent.loop.check_settled()
    agent.whole = False
    begun: RunPast = yield from _begin(agent, past, made, given, mark, options, made.queue)
    return begun.id


def _begin(
    agent: AgentHost,
    past: Past,
    made: Durable,
    given: dict[str, Any],
    mark: bytes,
    options: Options,
    queue: str = "",
    plan: dict[str, Any] | None = None,
) -> Steps:
    agent.abandoned()
    begin, stowed = beginning(agent, made, given, mark, options, queue)
    kept = [rec.Note(now_us(), begin.run, "plan", "", stow(plan, agent.registry).value, PLAN)] if plan else []
    yield Work(agent.begin(begin, stowed, past, *kept))
    return RunPast(agent.ledger.count - len(kept), begin)


def beginning(
    agent: Beginner, made: Durable, given: dict[str, Any], mark: bytes, options: Options, queue: str
) -> tuple[rec.Begin, Stowed]:
    """The record with which a run begins, as far as it does not depend on the line, and what that names."""
    stowed = stow(given, agent.registry)
    id = options.id or uuid4().hex[:16]
    begin = rec.Begin(now_us(), id, made.name, stowed.value, mark, code=made.code)
    if queue:
        queues.place(begin, queue, options.partition, options.priority)
    begin.config = agent.config_hash
    if options.limit_s is not None:
        waiting.check_seconds(options.limit_s, "a time limit")
        begin.until = clock_of(agent).wall_us() + round(options.limit_s * 1e6)
    return begin, stowed


def traced(agent: AgentHost, this: RunPast, watch: watchers.Watch, *, resumed: bool) -> None:
    """Tell whoever watches which run it is, and keep where it was watched: with the run, as a note."""
    if watch is watchers.UNWATCHED:
        return
    before = this.notes.get(TRACE)
    mark = fetch(before.value, agent.ledger, agent.registry, inert=True) if before is not None else ""
    watch.tell(run=this.id, resumed=resumed, before=mark)
    if watch.mark:
        value = stow(watch.mark, agent.registry).value
        note = this.notes[TRACE] = rec.Note(now_us(), this.id, "trace", "", value, TRACE)
        agent.ledger.append(note)


def ended(agent: AgentHost) -> None:
    """A run has ended without finishing: the branch is free, and what it has done is left to whoever comes next."""
    agent.whole = True
    agent.loop.restart(agent.ledger.count)


def cancel(agent: AgentHost, id: str, by: str) -> Steps:
    """End a run that nobody executes. What it has saved and done stays."""
    past = yield Work(lambda: Past(agent.ledger.records()))
    this = past.runs[id]
    agent.loop.read(past)
    left = yield from settle_all(agent.loop, this.open_calls(), TOOLS.find)
    if left:
        raise in_doubt(agent.loop, left)
    agent.loop.note()
    fault = "", Cancelled.__name__, f"run {id} of {agent.name} was cancelled by {by}", None
    end = rec.End(now_us(), id, "cancelled", fault=fault, by=by)
    yield Work(lambda: agent.ledger.append(end, flush=True))
    agent.abandoned()
    ended(agent)


def called_with(
    agent: Beginner, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """The arguments by name, without the agent, and the fingerprint of function and arguments."""
    given = made.given(agent.handle, args, kwargs)
    mark = fingerprint({"function": made.name, "arguments": given}, agent.registry)
    refuse(agent, f"the arguments of {made.name}", given, agent.registry)
    return given, mark


def _kept(agent: AgentHost, made: Durable, result: Any) -> Stowed:
    """What a function returned, for the record."""
    what = f"the result of {made.name}"
    try:
        return stow(scrub(agent, result, what), agent.registry)
    except Unencodable as error:
        error.root = what
        if inspect.iscoroutine(result):
            error.hint = f"{result.__name__} is async: `await` it in an async function, and run that with agent.arun()."
            result.close()
        raise


def _resume(agent: AgentHost, made: Durable, this: RunPast, mark: bytes, given: dict[str, Any]) -> None:
    agent.put_files_back(this)
    agent.rewind(this.begin.start)
    agent.loop.note()
    if mark != mark_of(agent, this):
        stowed = stow({"fingerprint": mark, "arguments": given}, agent.registry)
        note = this.notes[ARGUMENTS] = rec.Note(now_us(), this.id, "arguments", made.name, stowed.value, ARGUMENTS)
        agent.ledger.append(note, stowed=stowed)
        log.info("run %s of %s is resumed with other arguments", this.id, agent.name)
    # Durable before it is executed: a run that ends its process each time is found out by that.
    if agent.resumed != this.id:
        agent.ledger.append(this.resumed(now_us(), rec.WORKER if agent.for_worker else ""), flush=True)
    agent.resumed = ""
    compare(agent, made, this)


def stopped(run: Run, error: BaseException) -> str:
    """Record how a run ended that did not finish, and answer that. One that is interrupted has not ended."""
    if run.broken is not None or isinstance(error, LEDGER):
        return ""  # the store went away, which is no failure of the run
    if isinstance(error, InDoubt) or run.unsettled:
        how = "attention"
    elif isinstance(error, Waiting | RunRolledBack):
        return ""  # that is recorded already
    elif isinstance(error, Diverged):
        return ""  # the record stays as it is; other code can go on from it
    elif isinstance(error, AgentBusy) and error is run.reason:
        return ""  # somebody else has its child at the moment
    elif isinstance(error, Exception | Cancelled) and not (error is run.heard and error.undo):
        # What another run was told is a failure of this one.
        how = "cancelled" if error is run.heard else "failed"
    else:
        run.ledger.flush()
        return ""
    fault = brief_fault(run.agent, error, "the error that ended a run")
    by = error.by if isinstance(error, Cancelled) and how == "cancelled" else ""
    run.ledger.append(rec.End(now_us(), run.run_id, how, fault=fault, by=by), flush=True)
    return how


# -- what has changed around a run since it began -------------------------------------------------------------


def compare(agent: AgentHost, made: Durable, this: RunPast) -> None:
    """Say what has changed since a run began, before that shows in what it does."""
    begin = this.begin
    pairs = {"code": (begin.code, made.code), "configuration": (begin.config, agent.config_hash)}
    for what, (was, now) in pairs.items():
        if was == now or not begin.code:
            continue
        log.warning(
            "run %s of %s: the %s of %s has changed since it began; it stops where it does not do what is recorded",
            this.id, agent.name, what, made.name,
        )  # fmt: skip
        path = f"={what}"
        last = this.notes.get(path)
        if last is None or fetch(last.value, agent.ledger, agent.registry, inert=True) != now:
            value = stow(now, agent.registry).value
            note = this.notes[path] = rec.Note(now_us(), this.id, "changed", what, value, path)
            agent.ledger.append(note)
