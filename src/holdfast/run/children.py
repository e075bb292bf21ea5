"""Children: agents that an agent begins, each with a name, a state and a line of its own.

Owns beginning, joining and cancelling them. What they do is recorded on their own lines; the parent's line says that
they were begun, and what came of them. What always holds: a child's run has an id that follows from the call that began
it, so a parent that is executed again finds the child where it is and does not begin another; a child that the
parent's record has, and the store has not, is never begun anew; a run that returns waits for its children, and one that
raises, or is interrupted, stops them first: they resume with it; rolling back the parent brings them back, too
(``planning``).

    spawn(agent, function, name, args, kwargs) -> Child          a plain function, in a thread of its own
    await aspawn(...) -> Child                                   an async one, as a task of this loop; a plain one, too
    Child: .name .run .agent .running; .join() / await .ajoin(), .cancel() / await .acancel()
    halting(agent)                                               steps: cancel it, should it run here as a child
    leaving(run)                                                 steps: join the children that nobody has joined
    abandoning(run)                                              steps: stop those that run, without an end

What a parent is told of a child is recorded on its line, in its place among the completions, and told again when the
parent is executed again. What is not known yet, because the child waits or is in doubt, is not recorded.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from holdfast.agent.names import check_name, full_name
from holdfast.errors import (
    AgentBusy,
    BadName,
    BadOption,
    Cancelled,
    HoldfastError,
    InDoubt,
    NoAgent,
    RunUnfinished,
    ToolFailed,
    Unencodable,
    Waiting,
    command,
)
from holdfast.run import records as rec
from holdfast.run import waiting
from holdfast.run.arguments import Stowed, fetch, fingerprint, scrub, stow
from holdfast.run.calls import LEDGER, perform
from holdfast.run.cancelling import Stop, stopping, tell
from holdfast.run.durables import Durable, Options, cancel_first, configured, known, options_of
from holdfast.run.effects import CANCEL, ENDS, JOIN, SPAWN
from holdfast.run.outcomes import MESSAGE_MAX, Local, give, lost, said
from holdfast.run.past import Past, RunPast
from holdfast.run.runs import Run
from holdfast.run.scope import (
    EFFECT,
    HERE,
    Lane,
    Scope,
    Suspended,
    current,
    effect,
    here,
    let_pass,
    now_us,
    place,
    whose,
)
from holdfast.run.steps import (
    Request,
    Steps,
    Turn,
    Work,
    Write,
    asked,
    cancelled,
    drive,
    drive_later,
    is_cancelled,
)
from holdfast.run.tools import Tool, tool
from holdfast.store.changes import who

if TYPE_CHECKING:
    from holdfast.run.host import AgentHost


class _Held(AgentBusy):
    """Somebody else writes the child's branch now: it was not begun, and that is no outcome of the call."""


let_pass(_Held)


def _halted(run: Run, error: HoldfastError) -> HoldfastError:
    """A run stops with this error, whatever its program makes of it, and has not failed: it can go on next time."""
    run.reason, run.stopped = error, True
    return error


@tool(name=SPAWN, effect="idempotent", raises=(HoldfastError,))
def _spawn(child: str, branch: str, function: str, arguments: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - for the record
    """How the beginning of a child is recorded. It is begun when that is durable, and again after a crash.

    The child's line says first that it was spawned. So where the parent's has an outcome, the child's has that note.
    """
    try:
        host: AgentHost = current()._host.own_child(child, branch)
    except AgentBusy as error:
        raise _Held(error.message, holder=error.holder, hint=error.hint) from None
    host.ledger.append(rec.Note(now_us(), "", SPAWN, effect().key), flush=True)
    return {"agent": child, "branch": branch, "run": effect().key}


@tool(name=JOIN, effect="read")
def _join(child: str, run: str) -> None:
    """How the end of a child is recorded."""


@tool(name=CANCEL, effect="read")
def _cancel(child: str, run: str) -> None:
    """How it is recorded that a child was cancelled."""


log = logging.getLogger("holdfast.run")
JOINING: Tool = _join.tool
CANCELLING: Tool = _cancel.tool
_SPAWN: Tool = _spawn.tool

_running: set[Child] = set()
_lock = threading.Lock()
_process = {"guarded": False, "ends": False}
EXIT_S = 10.0
"""How long a process that ends, or a parent that stops, waits for a call which a child is in the middle of."""


def spawn(agent: AgentHost, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Child:
    """Begin a child: ``function(child, ...)`` as a run of the agent ``parent/name``, in a thread of its own."""
    if known(function).waits:
        raise BadOption(f"{known(function).name} is async", hint="Use `await agent.aspawn(...)`.")
    child: Child = drive(_spawning(agent, function, name, args, kwargs))
    child._start(None)
    return child


async def aspawn(agent: AgentHost, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Child:
    """As spawn(). An async function becomes a task of this loop."""
    import asyncio

    child: Child = await drive_later(_spawning(agent, function, name, args, kwargs))
    child._start(asyncio.get_running_loop() if known(function).waits else None)
    return child


def _spawning(agent: AgentHost, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps:
    check_name(name, "a child")
    if "/" in name:
        raise BadName(f"{name!r} cannot be a name for a child", hint="The name of its parent stands before a slash.")
    lane = _lane(agent, SPAWN)
    if EFFECT.get() is not None:
        raise BadOption(
            "a tool cannot spawn: when its recorded result is used, nobody would join the child",
            hint="Spawn before or after the call.",
        )
    made, options = known(function), options_of(function)
    if options != Options(strict=options.strict, replan=options.replan, limit_s=options.limit_s):
        raise BadOption(
            f"a child has no options but strict, replan and limit_s; {name!r} was not begun",
            hint="Its run has an id that follows from where it was begun, and it waits as its parent does.",
        )
    given = made.given(agent.handle, args, kwargs)
    full = f"{agent.name}/{name}"
    if any(child.name == full and not child._left for child in lane.scope.children):
        raise BadOption(
            f"{full} was begun here before, and nobody has joined or cancelled it; it was not begun again",
            hint="Join it first, or give the other one another name.",
        )
    yield Work(lambda: _forget_cancelled(agent))
    try:
        begun = yield from perform(lane, _SPAWN, (full, _branch_of(agent, lane), made.name, given), {})
    except _Held as error:
        raise _halted(lane.scope, error) from None
    for other in list(_running):
        if other._interrupted and (other.run, other.name) == (begun["run"], begun["agent"]):
            yield from over(other)  # it is at a call still, and then goes on here
    child = Child(agent, lane.scope, made, begun, args, kwargs, options)
    lane.scope.children.append(child)
    return child


def _branch_of(agent: AgentHost, lane: Lane) -> str:
    """The branch of a child: its parent's, or, where another branch has begun it, and joined it, that one's."""
    scope = lane.scope
    call = scope.past.calls.get(lane.path)
    if call is None or call.tool != SPAWN or call.intent is None or call.number > agent.inherited:
        return agent.branch_name
    over = joined(scope.past, lambda value: fetch(value, scope.ledger, scope.registry, inert=True))
    return over.get(call.intent.key, agent.branch_name)


def joined(run: RunPast, read: Callable[[rec.Value], Any]) -> dict[str, str]:
    """The runs of children of which the record of their parent says what came of them, each with its branch."""
    ends = [call for call in run.calls.values() if call.tool in ENDS and call.outcome is not None]
    over = {read(call.args)["run"] for call in ends if call.status != "stopped"}
    spawns = [call for call in run.calls.values() if call.tool == SPAWN and call.intent is not None]
    return {one.intent.key: read(one.args)["branch"] for one in spawns if one.intent and one.intent.key in over}


def _forget_cancelled(agent: AgentHost) -> None:
    """A cancelled child of a run that ended answers no spawn: what it has done answers the calls of the next one."""
    for call in agent.loop.unclaimed:
        if call.tool == SPAWN and call.intent is not None:
            given = fetch(call.args, agent.ledger, agent.registry, inert=True)
            child = agent.child(given["child"], given["branch"], write=False)
            its = Past(child.ledger.records()).runs.get(call.intent.key) if child is not None else None
            if its is not None and its.status == "cancelled":
                agent.loop.forget(call)


def _lane(agent: AgentHost, what: str) -> Lane:
    lane = place(what, "write")
    if lane is None or lane.scope.agent is not agent or not lane.scope.run_id:
        raise NoAgent(
            f"this is no run of {agent.name}",
            hint="Children belong to a run, which is executed again and finds them: agent.run(function, ...).",
        )
    return lane


class Child:
    """An agent that another one has begun. ``name`` is the agent's, ``run`` the id of its run."""

    def __init__(
        self,
        parent: AgentHost,
        scope: Run,
        made: Durable,
        begun: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
    ) -> None:
        self.name: str = begun["agent"]
        self.run: str = begun["run"]
        self._branch: str = begun["branch"]
        self._parent, self._scope, self._made, self._args, self._kwargs = parent, scope, made, args, kwargs
        self._options = options
        self._host: AgentHost | None = None
        self._own: Run | None = None  # its run
        self._task: Any = None
        self._loop: Any = None
        self._stop: Stop | None = None  # what it is told, once somebody has asked for that
        self._interrupted = False  # its parent has stopped, or the process ends: it goes on next time
        self._left = False  # joined or cancelled
        self._told: rec.Done | rec.Decision | None = None  # what the parent's record says of it
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._waiting: list[Callable[[], Any]] = []
        self._result: Any = None
        self._error: BaseException | None = None
        self._same: Child = self  # the one that really runs, where the parent is executed again in the same process

    @property
    def running(self) -> bool:
        """Whether it runs in this process."""
        return self._same in _running

    @property
    def agent(self) -> Any:
        """A handle on the child. While it runs, only look at it."""
        return self._parent.own_child(self.name, self._branch).handle

    def join(self) -> Any:
        """Wait until the child has ended; returns its result. Raises ``ToolFailed`` when it failed or was cancelled."""
        return drive(ending(_lane(self._parent, JOIN), self, JOINING))

    async def ajoin(self) -> Any:
        """As join()."""
        return await drive_later(ending(_lane(self._parent, JOIN), self, JOINING))

    def cancel(self) -> None:
        """Tell the child to stop at its next call (``Cancelled``), and wait until it has ended.

        What it has done stands until a rollback.
        """
        drive(ending(_lane(self._parent, CANCEL), self, CANCELLING))

    async def acancel(self) -> None:
        """As cancel(). A child that is a task is cancelled where it awaits."""
        await drive_later(ending(_lane(self._parent, CANCEL), self, CANCELLING))

    def __repr__(self) -> str:
        return f"<Child {self.name}{' (running)' if self.running else ''}>"

    # -- its execution ------------------------------------------------------------------------------------

    def _start(self, loop: Any) -> None:
        """Begin it, or go on with it, unless the parent's record says what came of it."""
        self._told = self._found()
        if self._told is not None:
            self._left = True
            self._over.set()
            return
        with _lock:
            for other in _running:
                if (other.run, other.name) == (self.run, self.name):
                    self._same = other
                    return
                if (other.name, other._branch) == (self.name, self._branch):
                    raise RunUnfinished(
                        f"{self.name} is executing another run; this one was not begun",
                        run=other.run,
                        hint="Wait until it has ended, or give the child another name.",
                    )
            _running.add(self)
        try:
            host = self._host = self._parent.child(self.name, self._branch, write=True)
            past = Past(host.ledger.records()) if host is not None else Past()
            if host is None or (SPAWN, self.run) not in past.notes:
                raise self._missing()
            owner = past.owner(host.origin)
            if owner is not None and owner.id != self.run:
                raise RunUnfinished(
                    f"{self.name} has a run of {owner.begin.function} that has not ended; another was not begun",
                    run=owner.id,
                    hint=cancel_first(self.name, self._branch, owner.id),
                )
            ended = past.runs.get(self.run)
            if ended is not None and ended.status == "cancelled":
                self._end(None, self._cancelled())
            elif loop is not None:
                self._loop = loop
                # In a context that knows no lane: the task would take a number of the parent's.
                self._task = _outside().run(loop.create_task, self._later(), name=self.name)
                self._task.add_done_callback(self._never_began)
            else:
                _guard_exit()
                # Python waits for no daemon; this module does, and stops it first.
                self._thread = threading.Thread(target=_outside().run, args=(self._now,), name=self.name, daemon=True)
                self._thread.start()
        except BaseException as error:
            self._end(None, error)
            if isinstance(error, AgentBusy):
                _halted(self._scope, error)
            raise

    def _missing(self) -> HoldfastError:
        """The parent's record says that it was begun, and it is not here: what it has done is not known."""
        parent, scope = whose(self._parent), self._scope
        name = full_name(self.name, self._branch)
        cancel, accept = command("runs", "cancel", parent, scope.run_id), command("effects", "accept", parent)
        error = InDoubt(
            f"{name} was begun by {parent}, and is not in this store: it is not known what it has done",
            hint=f"Bring it here from where {parent} was (push, pull or import {self.name}), and run this again. If it"
            f" is lost, find out what it did and continue without it: `{cancel}` and `{accept}`.",
        )
        return _halted(scope, error)

    def _found(self) -> rec.Done | rec.Decision | None:
        """What the parent's record says came of it, wherever it was asked for."""
        scope = self._scope
        mark = fingerprint(self._arguments(), scope.registry)
        ends = [call for call in scope.past.calls.values() if call.fingerprint == mark and call.tool in ENDS]
        return next((call.outcome for call in ends if call.outcome is not None and call.status != "stopped"), None)

    def _arguments(self) -> dict[str, Any]:
        return {"child": self.name, "run": self.run}

    def _now(self) -> None:
        try:
            self._end(self._handle.run(self._wrapped(), *self._args, **self._kwargs), None)
        except BaseException as error:  # noqa: BLE001 - whoever joins gets it
            self._end(None, error)

    async def _later(self) -> None:
        try:
            self._end(await self._handle.arun(self._wrapped(), *self._args, **self._kwargs), None)
        except BaseException as error:  # noqa: BLE001 - as above
            self._end(None, error)

    def _never_began(self, _task: Any) -> None:
        """A task that is cancelled before its first step does not come to any of its code."""
        if not self._over.is_set():
            self._end(None, self._cancelled())

    @property
    def _handle(self) -> Any:
        if self._host is None:
            raise NoAgent(f"{self.name} has not begun")
        return self._host.handle

    def _wrapped(self) -> Any:
        """The child's function, which says first which run it is in."""
        function = self._made.function

        @functools.wraps(function)
        def begun(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            return function(*args, **kwargs)

        wrapped = Durable(begun, self._made.name, strict=self._made.strict)
        return configured(wrapped, self._options, id=self.run, wait=self._scope.waits, again=True)

    def _enter(self) -> None:
        lane = here()
        self._own = lane.scope if lane is not None else None
        if _process["ends"] or self._interrupted:
            self._interrupt()
        if self._stop and self._own is not None:
            self._own.parent_says = self._stop
        if self._own is not None and self._own.stopped:
            raise Suspended

    def ask(self, told: Cancelled | None = None) -> None:
        """Ask it to stop, once: ``told`` is what its parent was told itself."""
        child = self._same
        if child._stop is None:
            by = told.by if told is not None else child._parent.name
            child._stop = Stop(f"{child.name} was cancelled by {by}", by)
            if child._own is not None:
                child._own.parent_says = child._stop

    def again(self) -> Child:
        """Go on with it, though it was put off: it has been asked to stop since, and is told so where it waits."""
        begun = {"agent": self.name, "run": self.run, "branch": self._branch}
        made = Child(self._parent, self._scope, self._made, begun, self._args, self._kwargs, self._options)
        made._stop, self._same = self._same._stop, made
        with suppress(HoldfastError):  # whoever waits for it finds that
            made._start(self._loop)
        return made

    def _interrupt(self) -> None:
        """Its parent stops: no wait goes on, and nothing new starts.

        Nothing is recorded about that: the run goes on next time.
        """
        self._interrupted = True
        own = self._own
        if own is None:
            return
        if own.reason is None:
            own.reason, own.stopped = Suspended(f"{self._parent.name} has stopped, or the process ends"), True
        for below in own.children:
            if below._same is not self:
                below._same._interrupt()

    def _end(self, result: Any, error: BaseException | None) -> None:
        host, self._host = self._host, None
        try:
            if host is not None:
                if self._stop and error is not None:
                    error = self._record_cancelled(host, error)
                host.release()
        except Exception as failed:  # noqa: BLE001 - the store may be closed by now; the child goes on next time
            error = error or failed
        self._result, self._error = result, error
        with _lock:
            _running.discard(self)
            self._over.set()
            waiting_for, self._waiting = self._waiting, []
        for call in waiting_for:
            with suppress(RuntimeError):  # of a loop that is closed by now
                call()

    def _record_cancelled(self, host: AgentHost, error: BaseException) -> BaseException:
        """A task that is cancelled while it awaits something else than a call has not said how it ended."""
        run = Past(host.ledger.records()).runs.get(self.run)
        if run is None:  # it was cancelled before its run had begun, or could not begin it
            return self._cancelled() if is_cancelled(error) else error
        if run.status or isinstance(error, InDoubt):
            return error
        doubtful = any(call.open and call.kind == "write" for call in run.calls.values())
        how = "attention" if doubtful else "cancelled"
        host.ledger.append(rec.End(now_us(), self.run, how, by="" if doubtful else who()), flush=True)
        return error if doubtful else self._cancelled()

    def _cancelled(self) -> Cancelled:
        by = self._stop.by if self._stop is not None else self._parent.name
        return Cancelled(f"{self.name} was cancelled by {by}", by=by)

    def _cancel_task(self) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # of a loop that is closed by now
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _when_over(self, call: Callable[[], Any]) -> None:
        with _lock:
            if not self._over.is_set():
                self._waiting.append(call)
                return
        call()


def _outside() -> contextvars.Context:
    """A copy of the context in which no agent is current."""
    context = contextvars.copy_context()
    context.run(HERE.set, None)
    context.run(EFFECT.set, None)
    return context


def halting(agent: AgentHost) -> Steps:
    """Cancel an agent that runs as a child in this process."""
    with _lock:
        found = [child for child in _running if child._host is not None and child._host.handle is agent.handle]
    for child in found:
        yield from over(child, cancel=True)


def _guard_exit() -> None:
    """See to it that children are stopped when the process ends, while stores can still be written."""
    with _lock:
        if not _process["guarded"]:
            _process["guarded"] = True
            atexit.register(_stop_all)


def _stop_all() -> None:
    """At exit. A call that is under way may end, and is recorded."""
    _process["ends"] = True
    until = time.monotonic() + EXIT_S
    seen: set[Child] = set()
    while left := [child for child in list(_running) if child not in seen]:
        for child in left:
            child._interrupt()
        for child in left:
            seen.add(child)
            if child._thread is not None:  # those of a process that this one was forked from have ended
                child._thread.join(max(0.0, until - time.monotonic()))


# -- what came of it, on the parent's line ---------------------------------------------------------------------


class Ended(Request):
    """Wait until a child has ended, for ``pause_s`` at most; whether it has."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.pause_s: float | None = None
        self._over: Any = None  # a future of the loop on which somebody waits

    def now(self) -> bool:
        child = self.child
        if child._loop is not None and not child._over.is_set():
            asyncio = sys.modules["asyncio"]
            if asyncio._get_running_loop() is child._loop:
                raise BadOption(f"{child.name} is a task of this loop", hint="Use `await child.ajoin()` or acancel().")
        return child._over.wait(self.pause_s)

    async def later(self) -> bool:
        asyncio = sys.modules["asyncio"]
        if self._over is None:
            loop = asyncio.get_running_loop()
            over = self._over = loop.create_future()
            self.child._when_over(lambda: loop.call_soon_threadsafe(lambda: over.done() or over.set_result(None)))
        await asyncio.wait((self._over,), timeout=self.pause_s)
        return bool(self._over.done())


def over(child: Child, run: Run | None = None, *, cancel: bool = False) -> Steps:
    """Wait until a child has ended, after asking it to stop if need be.

    With a run, or until that is to stop itself: then it answers with what it is told.
    """
    child = child._same
    ended = Ended(child)
    if cancel:
        child.ask()
        child._cancel_task()
    pause_s = waiting.LOOK_S
    while True:
        ended.pause_s = pause_s if run is not None else None
        if (yield ended) or run is None:
            return None
        stop = yield Work(run.look)
        if stop is not None:
            return stop
        pause_s = min(pause_s * 1.5, waiting.LOOK_MAX_S)


def ending(lane: Lane, child: Child, what: Tool) -> Steps:
    """Join a child, or cancel it; answered from the record where it was done before."""
    scope: Run = lane.scope
    child._left = True
    outcome, done = yield from asked(lane, what, child._arguments())
    if outcome is not None:
        return _given(scope, child, outcome.path, outcome, None, what)
    path: str = done.path
    with scope.lock:
        scope.live += 1
    asks = scope if what is JOINING else None
    stop = None
    try:
        if asks is not None:  # before a child that is put off puts off its parent
            stop = yield from stopping(scope, JOINING.kind, at_once=True)
        while stop is None:
            stop = yield from over(child, asks, cancel=what is CANCELLING)
            if stop is None:
                break
            stop = stop if scope.takes(stop) else None
    except BaseException as error:
        if is_cancelled(error):
            yield from cancelled(scope, done)
        raise
    finally:
        with scope.lock:
            scope.live -= 1
    if stop is not None:
        yield from tell(scope, what, stop, done)
    stowed = yield from _outcome(scope, child._same, path, what, done)
    done.at = now_us()
    scope.complete(done, stowed)
    yield Turn(scope, path)
    return _given(scope, child, path, done, stowed, what)


def _outcome(scope: Run, child: Child, path: str, what: Tool, done: rec.Done) -> Steps:
    """Put into the record what came of the child. What is not known yet is raised instead."""
    error = child._error
    if isinstance(error, InDoubt | Suspended):  # the latter: the process ends, and the child goes on next time
        raise error
    if isinstance(error, LEDGER):  # its store went away: it has not ended, and goes on with its parent
        scope.broken = error
        raise error
    if what is CANCELLING:
        return None
    if isinstance(child._told, rec.Done):
        done.how, done.value, done.fault = child._told.how, child._told.value, child._told.fault
        if child._told.tool == CANCEL:
            done.how, done.fault = "error", ("", "Cancelled", child._cancelled().message, None)
        return None
    if isinstance(error, Waiting):
        yield Write(scope, rec.Wait(now_us(), scope.run_id, path, "child", child.name, error.until))
        scope.stopped = True
        raise Suspended
    if error is not None:
        kind = error.error_type if isinstance(error, ToolFailed) else type(error).__qualname__
        message = scrub(scope.agent, said(error)[:MESSAGE_MAX], f"an error of {child.name}")
        done.how, done.fault = "error", ("", kind, message, None)
        return None
    try:
        stowed = stow(child._result, scope.registry)
    except Unencodable as failed:  # it was encoded once, with the child's types
        done.how, done.fault = "lost", ("", type(failed).__name__, str(failed)[:MESSAGE_MAX], None)
        return None
    done.value = stowed.value
    return stowed


def _given(
    scope: Scope, child: Child, path: str, outcome: rec.Done | rec.Decision, stowed: Stowed | None, what: Tool
) -> Any:
    if isinstance(outcome, rec.Done) and outcome.how == "stopped":
        return give(scope, what, path, outcome)
    if isinstance(outcome, rec.Done) and outcome.fault is not None:
        _, kind, message, _ = outcome.fault
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


def abandoning(run: Run) -> Steps:
    """A run stops before its end: so do its children that run here. They resume when it does."""
    children = [child for child in run.children if child.running]
    for child in children:
        child._same._interrupt()
    until = time.monotonic() + EXIT_S
    for child in children:
        ended = Ended(child._same)
        ended.pause_s = waiting.LOOK_S
        # A call that is under way may end first. Else a task may await something that never comes.
        while not (yield ended) and time.monotonic() < until:
            if child._same._own is None or not child._same._own.live:
                child._same._cancel_task()
        if not child._same._over.is_set():
            log.warning("%s has not stopped with its parent yet: it does so at its next call", child.name)
