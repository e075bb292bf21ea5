"""One call of a tool: answered from the record, or made, as often as its tool allows, and recorded.

Owns the way of a call from the program to its record, in plain code, in async code and in streams: the order of intent,
call and outcome, retries, and what an exception means for each kind of tool. It is written once, as a generator that
asks for what takes time; ``now`` and ``later`` drive it. What always holds: what a caller gets is what the record says,
the first time too; a tool that changes something outside is not called before its intent is durable, and its caller
does not go on before its outcome is; a write is made again only where it is known that nothing happened, and only there
is something else done instead.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from holdfast.agent import watchers
from holdfast.errors import (
    BadOption,
    BreakerOpen,
    Cancelled,
    DiskFull,
    FailedBeforeEffect,
    Fenced,
    HoldfastError,
    InDoubt,
    ResultLost,
    StoreBusy,
    StoreClosed,
    StoreFailed,
    StorePoisoned,
    Unencodable,
)
from holdfast.run import callers
from holdfast.run import records as rec
from holdfast.run.arguments import (
    Packed,
    Stowed,
    exposed,
    fetch,
    fingerprint,
    leaked,
    marked,
    pack,
    refuse,
    scrub,
    stow,
    stow_encoded,
)
from holdfast.run.cancelling import Stop, stopping, tell
from holdfast.run.doubt import recall, settle
from holdfast.run.effects import OWN, Effect
from holdfast.run.outcomes import MESSAGE_MAX, Local, failure, fault_of, give, together, told, unsaved
from holdfast.run.past import GUARDED, Call, Given, RunPast
from holdfast.run.resilience import gate_of
from holdfast.run.scope import Lane, Scope, branch_of, in_doubt, now_us, passing, place
from holdfast.run.steps import (
    Aside,
    HandOut,
    Instead,
    Invoke,
    Pause,
    Share,
    Steps,
    Theirs,
    Turn,
    Work,
    Write,
    cancelled,
    cancelled_again,
    drive,
    drive_later,
    is_cancelled,
    turn_again,
)
from holdfast.run.streams import Kept
from holdfast.run.tools import Tool
from holdfast.store.engine import Again, Escaped, Lease, Shared, Unsure
from holdfast.store.processes import FRAMES, check_room

log = logging.getLogger("holdfast.run")
LABEL_MAX = 200
TRIES = 5
"""How often a transaction is made that the server ends in favour of another."""
LEDGER = (Fenced, StoreFailed, StoreBusy, StorePoisoned, StoreClosed, DiskFull, Unsure)
"""What a record raises that cannot be written."""


def now(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a plain tool."""
    lane = place(tool.name, tool.kind)
    if lane is None or tool.kind == "local":
        return tool.function(*args, **kwargs)
    return drive(perform(lane, tool, args, kwargs))


async def later(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a tool in async code; a plain one on a thread of its own, and its position is the caller's."""
    lane = place(tool.name, tool.kind)
    if lane is not None and tool.kind != "local":
        return await drive_later(perform(lane, tool, args, kwargs))
    if tool.waits:
        return await tool.function(*args, **kwargs)
    return await Aside(lambda: tool.function(*args, **kwargs), tool.name).begin()


def flow(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """As flow_later(), for a plain tool: none of its steps waits, so each item is there when it is asked for."""
    items = flow_later(tool, args, kwargs)
    go_on: Callable[[], Any] = items.__anext__
    while True:
        try:
            go_on().send(None)
        except StopIteration as found:
            item = found.value
        except StopAsyncIteration:
            return
        try:
            yield item
        except GeneratorExit:
            with suppress(StopIteration):
                items.aclose().send(None)
            raise
        except BaseException as error:  # noqa: BLE001 - of whoever has the items
            go_on = partial(items.athrow, error)
        else:
            go_on = items.__anext__


async def flow_later(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Call a tool that yields items: they are passed on as they come, and recorded when it is complete."""
    lane = place(tool.name, tool.kind)
    if lane is None or tool.kind == "local":
        source = tool.function(*args, **kwargs)
        while (item := await anext(source, _END) if tool.waits else next(source, _END)) is not _END:
            yield item
        return
    steps = perform(lane, tool, args, kwargs)
    given: list[Any] = []
    try:
        request = next(steps)
        while True:
            try:
                if isinstance(request, Invoke):
                    given, source, end = request.given, request.now(), request.deadline()
                    while (item := await request.item(source, end, _END)) is not _END:
                        request.received(item)
                        yield item
                    answer: Any = given
                elif isinstance(request, HandOut):
                    for item in request.items:
                        given.append(item)
                        yield item
                    answer = given
                else:
                    answer = await request.later() if tool.waits else request.now()
            except GeneratorExit:
                _abandon(steps, given)
                raise
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as over:
        for item in (over.value or [])[len(given) :]:
            yield item


_END = object()
_FRAMES = FRAMES + 50  # so that what is begun with an intent has room for its outcome


def _abandon(steps: Steps, given: list[Any]) -> None:
    """The program wants no more items: what it has got is the result."""
    try:
        request = steps.send(given)
        while True:
            request = steps.send(request.now())
    except StopIteration:
        pass


# -- the call -----------------------------------------------------------------------------------------------


def perform(lane: Lane, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps:
    """The steps of one call. In a run there is a safe point before it, and one after its result."""
    scope: Scope = lane.scope
    path = lane.path
    look = getattr(scope.agent, "looking", None)  # of a handle that somebody watches
    if look is not None:
        look(f"before {tool.name}")
    scope.around(lane, path, tool, "before")
    result = yield from _perform(lane, tool, args, kwargs)
    if look is not None:
        look(f"after {tool.name}")
    scope.around(lane, path, tool, "after")
    return result


def _perform(lane: Lane, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps:
    scope: Scope = lane.scope
    check_room(_FRAMES)
    scope.check_tool(tool)
    arguments = tool.binder.bind(args, kwargs)
    try:
        mark, data = marked(arguments, scope.registry, tool.volatile)
        if tool.volatile:  # what does not count must be saved all the same, before the call takes a place or a claim
            fingerprint(arguments, scope.registry)
    except Unencodable as error:
        error.root = f"the arguments of {tool.name}"
        raise
    refuse(scope.agent, f"the arguments of {tool.name}", arguments, scope.registry)
    asked = lane.take(tool.name, mark)
    question = callers.ask() if tool.kind in GUARDED and not scope.run_id else None
    try:
        path, call = yield from scope.asked(lane, asked, tool, mark, arguments)
    except BaseException:
        callers.asked(question)
        raise
    try:
        if call is not None:
            outcome = call.outcome
            if outcome is not None:
                if tool.stream and not call.lost:
                    yield HandOut(fetch(outcome.value, scope.ledger, scope.registry) or [])
                yield from turn_again(scope, call)
                return (yield from recall(scope, tool, call)) if call.lost else give(scope, tool, path, outcome)
            if call.cancelled:
                if tool.stream and tool.waits and call.done is not None:
                    yield HandOut(fetch(call.done.value, scope.ledger, scope.registry) or [])
                yield from cancelled_again(scope, call)
        scope.check_settled(tool)
        tool.check_result(scope.registry)
        live = Live(lane, tool, args, kwargs, arguments, mark, data, path, call, question)
        return (yield from live.steps() if not watchers.observed() else live.watched())
    finally:
        callers.asked(question)
        scope.leave_call(asked)


def _last_progress(scope: Scope, call: Call) -> Any:
    return fetch(call.progress, scope.ledger, scope.registry)


def _report(scope: Scope, tool: Tool, call: Call, value: Any) -> None:
    if tool.kind == "transaction":
        raise BadOption(f"{tool.name}: a transaction has no progress, it is there whole or not at all")
    scope.report(call.path, call.number, value)


def _partial(scope: Any, path: str) -> list[Any]:
    given: Given | None = scope.past.streams.get(path) if scope.run_id else None
    return given.items(lambda value: fetch(value, scope.ledger, scope.registry)) if given is not None else []


class Live:
    """A call that is really made."""

    def __init__(
        self,
        lane: Lane,
        tool: Tool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: dict[str, Any],
        mark: bytes,
        data: bytes | None,
        path: str,
        before: Call | None,
        question: callers.Question | None,
    ) -> None:
        """``data``: the arguments, where they are encoded as they are recorded. ``question``: see ``callers.ask``."""
        self.lane, self.tool, self.args, self.kwargs = lane, tool, args, kwargs
        self.scope: Scope = lane.scope
        self.mark, self.path = mark, path
        if data is not None and tool.kind == "read":
            self.packed = Packed(stow_encoded(data), None)
            self._check_secret(self.packed.stowed, f"the arguments of {tool.name}")
        else:
            self.packed = self._packed(arguments)
        self.new = before is None
        self.question = question
        self.kept: Kept | None = None
        self.given: list[Any] = []  # what a stream has handed out
        self.call = Call(self.scope.run_id, path)
        if before is not None:
            self.call.attempts, self.call.progress = before.attempts, before.progress
        key = before.intent.key if before is not None and before.intent is not None else self.scope.key(path)
        self.shared: Shared | None = None
        self.token: callers.Token | None = None
        self.settled = False  # whether its outcome is on disk
        self.again = False  # whether the last attempt lost against another transaction
        self.started = 0
        # Whether an attempt may have done something outside without anybody knowing.
        self.loose_end = before is not None and before.open
        self.gate = gate_of(self.scope.agent, tool.breaker, tool.name) if tool.breaker is not None else None
        self.effect = Effect(
            tool=tool.name,
            kind=tool.kind,
            key=key,
            path=path,
            run=self.scope.run_id,
            _args=lambda: tool.binder.completed(arguments),
            # None of these knows this: it would be kept, with all that it has, until garbage is collected.
            _last_progress=partial(_last_progress, self.scope, self.call),
            _report=partial(_report, self.scope, tool, self.call),
            _partial=partial(_partial, self.scope, path),
        )

    def _packed(self, arguments: dict[str, Any]) -> Packed:
        """For the record. What probes and compensations are told has the defaults of the time of the call."""
        tool = self.tool
        defaults = tool.binder.defaults
        if tool.kind != "read" and not defaults.keys() <= arguments.keys():
            seen = tool.binder.completed(arguments)
            with suppress(Unencodable):  # they are looked up when somebody asks
                return self._pack({name: seen[name] for name in seen if name in arguments or name in defaults})
        return self._pack(arguments)

    def _pack(self, arguments: dict[str, Any]) -> Packed:
        packed = pack(arguments, self.scope.registry, by_digest=self.tool.kind == "read")
        self._check_secret(packed.stowed, f"the arguments of {self.tool.name}")
        return packed

    def _check_secret(self, stowed: Stowed, what: str) -> None:
        inline = (stowed.value,) if isinstance(stowed.value, bytes) else ()
        if name := leaked(self.scope.agent, *inline, *stowed.nodes.values(), *stowed.chunks.values()):
            raise exposed(name, what)

    def watched(self) -> Steps:
        """As steps(), and whoever watches is told. Only what the tool itself does is inside: items go to anybody."""
        agent = self.scope.agent
        watch = self.effect._watch = watchers.begin("call", agent.name, branch_of(agent), effect=self.effect)
        try:
            result = yield from self.steps()
        except BaseException as error:
            watch.end(error if not isinstance(error, passing()) else None, attempts=self.call.attempts)
            raise
        watch.end(attempts=self.call.attempts)
        return result

    def steps(self) -> Steps:
        scope = self.scope
        with scope.lock:
            scope.live += 1
        try:
            began = self._fallback_begun()
            if began is not None:
                return (yield from self._fall_back(began))
            # What was begun here before may have happened: the run is told at a call that was not.
            stop = (yield from stopping(scope, self.tool.kind)) if self.new else None
            if stop is not None:
                return (yield from self._refused(stop))
            return (yield from self._attempts())
        except BaseException as error:
            if is_cancelled(error) and self.call.outcome is None:
                yield from self._cancelled()
            elif isinstance(error, LEDGER) and scope.run_id and not self.settled:
                # It may have been made, and its record lacks that. Whoever tries once more would make another one.
                scope.broken = error
            raise
        finally:
            self._leave()
            self._over()
            if self.kept is not None:
                self.kept.leave()
            if self.gate is not None:
                self.gate.released(self)
            with scope.lock:
                scope.live -= 1

    def _refused(self, stop: Stop) -> Steps:
        """The call is not made: the run is told to stop in its place."""
        self.started = now_us()
        self.call.done = self._done("stopped")
        yield from tell(self.scope, self.tool, stop, self.call.done, self.packed.stowed)

    def _attempts(self) -> Steps:
        tool, call, effect = self.tool, self.call, self.effect
        tries = 0
        failed: BaseException | None = None
        while True:
            # What was begun earlier and may have happened has to be made again to find out, breaker or not.
            refused = self._refusal() if not (self.loose_end and tries == 0) else None
            if refused is not None:
                return (yield from self._give_up(failed or refused))
            tries += 1
            self.started = effect._at_us = now_us()
            effect.attempt = call.attempts + 1
            if tool.kind == "transaction":
                yield Share(self._share)
            elif tool.kind != "read":
                yield from self._intend()
                lease = self.scope.agent.lease
                if tool.kind == "write" and lease is not None and not lease.fresh:
                    yield from self._confirm(lease)
            invoke = Invoke(tool, effect, self.lane, self.args, self.kwargs)
            self.given = invoke.given
            if tool.stream and self.scope.run_id:
                self.kept = invoke.kept = Kept(self.scope, self.path, tool.name, call.number, self._stowed)
            try:
                value = yield from self._called(invoke)
            except passing():
                if call.number:
                    self.scope.write(self._done("before"), flush=True)
                raise
            except FailedBeforeEffect as error:
                failed = error
                self._count(error)
                if tries > tool.retries or tool.is_answer(error) or self.given:
                    return (yield from self._give_up(error))
                if call.number:
                    self.scope.write(self._done("before"))
            except InDoubt as error:
                # Of a call inside this one: whether this one happened is part of the same question. What was raised for
                # another agent stops nothing here by itself.
                if tool.kind == "write" and not self.scope.unsettled:
                    self._leave_open(self._said(error))
                raise
            except Escaped as error:
                yield from self._intend("write")
                yield from self._doubt(error)
            except (Exception, Cancelled) as error:  # whatever a tool raises is an outcome, or a doubt
                failed = error  # the latter is of a run inside the tool: its own is not told there
                if isinstance(error, LEDGER) and tool.name.startswith(OWN):
                    raise  # that the store of a child went away is no answer: it is asked again
                if tool.kind == "write":
                    found = yield from self._doubt(error)
                    if found is not None:
                        return found[0]
                elif not self.again:
                    self.loose_end = self.loose_end or (tool.kind == "idempotent" and not tool.is_answer(error))
                    self._count(error)
                # What a stream has handed out cannot be taken back, so it does not begin again.
                most = max(tool.retries, TRIES - 1 if self.again else 0)
                if tries > most or self.given or (tool.kind != "write" and tool.is_answer(error)):
                    return (yield from self._give_up(error))
            except BaseException as error:
                self._interrupted(error)
                raise
            else:
                if self.gate is not None:
                    self.gate.passed()
                if tool.kind != "transaction":
                    return (yield from self._succeed(value))
                try:
                    return (yield from self._commit(value))
                except Again:
                    self._leave()
                    if tries >= TRIES:
                        raise
            yield Pause(self.scope, tries)

    # -- a transaction, which is committed with its record ------------------------------------------------------

    def _share(self) -> None:
        self.shared = self.scope.ledger.share(later=self.tool.waits)
        self.effect._connection = self.shared.connection

    def _called(self, invoke: Invoke) -> Steps:
        """Call the tool. If a transaction fails nothing of it is left; else what it returned, as it is recorded."""
        self.again = False
        if self.shared is None:
            return (yield invoke)
        try:
            value = yield invoke
            return (yield Work(lambda: self._checked(value)))
        except Exception as error:
            yield Work(partial(self._leave, error))
            raise
        except BaseException as error:
            self._leave(error)
            raise

    def _checked(self, value: Any) -> Stowed:
        try:
            stowed = self._stowed(value)
        except Unencodable as error:
            error.root = f"the result of {self.tool.name}"
            raise
        if self.shared is not None:
            self.shared.check()
        return stowed

    def _leave(self, error: BaseException | None = None) -> None:
        """The transaction is rolled back, unless it has been committed."""
        shared, self.shared, self.effect._connection = self.shared, None, None
        if shared is not None:
            self.again = shared.abandon(error or GeneratorExit())

    def _commit(self, stowed: Stowed) -> Steps:
        shared = cast("Shared", self.shared)
        call, scope, intent = self.call, self.scope, self._intent(self.tool.kind)
        done = rec.Done(now_us(), scope.run_id, self.path, "value", value=stowed.value, started=self.started)

        def commit() -> None:
            number = scope.commit(shared, intent, done, together(self.packed.stowed, stowed))
            call.intent, call.number, call.attempts, call.done = intent, number, intent.attempt, done

        try:
            yield Work(commit)
        except BaseException as error:
            if is_cancelled(error) and call.done is not None:  # it is committed, and the turn has to be taken
                yield Turn(scope, self.path)
                scope.told_cancelled(self.path)
            raise
        self._leave()
        yield Turn(scope, self.path, new=True)
        return fetch(stowed.value, Local(stowed), scope.registry)

    # -- failing --------------------------------------------------------------------------------------------

    def _refusal(self) -> BreakerOpen | None:
        if self.gate is None or self.tool.breaker is None:
            return None
        return self.gate.refusal(self, self.tool.name, self.tool.breaker)

    def _count(self, error: BaseException) -> None:
        """Let the breaker know. As it opens a checkpoint is taken: the run may not get any further for long."""
        gate, breaker = self.gate, self.tool.breaker
        if gate is None or breaker is None:
            return
        if self.tool.is_answer(error):
            gate.passed()
            return
        why = self._said(error)
        if not gate.failed(self, breaker, why):
            return
        log.warning("the breaker %s of %s opened: %s", gate.name, self.scope.agent.name, why)
        if breaker.checkpoint and self.scope.run_id:
            self.scope.opened(self.lane, self.path, f"breaker {gate.name} opened"[:LABEL_MAX])

    def _said(self, error: BaseException) -> str:
        return str(scrub(self.scope.agent, told(error)[:MESSAGE_MAX], f"an error of {self.tool.name}"))

    def _give_up(self, error: BaseException) -> Steps:
        """No more attempts: the fallback, where it is known that nothing happened, or the failure."""
        if self.tool.fallback is None or self.tool.is_answer(error) or self.loose_end:
            return (yield from self._fail(error))
        reason = self._said(error)
        scope = self.scope
        if self.call.number and self.call.decision is None:
            scope.write(self._done("before"))
        if scope.run_id:
            # Once begun it is gone on with after a crash: what it does outside must not be left behind.
            note = stow(reason, scope.registry)
            path = f"{self.path}!fallback"
            scope.write(rec.Note(now_us(), scope.run_id, "fallback", self.tool.name, note.value, path), note)
        return (yield from self._fall_back(reason))

    def _fallback_begun(self) -> str | None:
        """Why the fallback was begun by an earlier execution, None when it was not."""
        if not self.scope.run_id or self.tool.fallback is None:
            return None
        past: RunPast = self.scope.past  # type: ignore[attr-defined] # what has a run's id is a run
        note = past.notes.get(f"{self.path}!fallback")
        return None if note is None else str(fetch(note.value, self.scope.ledger, self.scope.registry))

    def _fall_back(self, reason: str) -> Steps:
        self.effect.error = reason
        try:
            there = Instead(self.tool, self.effect, self.lane, self.args, self.kwargs)
            fallback = partial(cast("Any", self.tool.fallback), *self.args, **self.kwargs)
            value = yield Theirs(fallback, self.tool.name, there.inside, aside=False)
        except InDoubt:
            raise
        except Exception as error:  # noqa: BLE001 - what the fallback raises is the outcome
            return (yield from self._fail(error))
        return (yield from self._succeed(value, "fallback"))

    # -- recording ------------------------------------------------------------------------------------------

    def _intent(self, kind: str) -> rec.Intent:
        return rec.Intent(
            self.started,
            self.scope.run_id,
            self.path,
            self.tool.name,
            kind,
            self.packed.stowed.value,
            self.mark,
            self.effect.key,
            self.call.attempts + 1,
            self.scope.agent.generation,
        )

    def _intend(self, kind: str = "") -> Steps:
        call, scope = self.call, self.scope
        intent = self._intent(kind or self.tool.kind)
        if intent.kind == "write":
            intent.limit = self.tool.limit_us
            self._over()
            self.token = callers.begin(self.effect)
        writing = Write(scope, intent, self.packed.stowed)
        try:
            yield writing
        finally:
            if writing.number:  # it may be, though the caller was cancelled before the call was made
                call.intent, call.number, call.attempts = intent, writing.number, intent.attempt
                call.doubt = call.decision = None
            callers.asked(self.question)
        self.effect.number = writing.number

    def _over(self) -> None:
        """The attempt has ended."""
        if self.token is not None:
            callers.end(self.token, self.effect.still)
            self.token = None

    def _confirm(self, lease: Lease) -> Steps:
        """Raise, instead of making the call, where somebody else may go by its absence."""
        try:
            yield Work(lease.confirm)
        except HoldfastError:
            with suppress(HoldfastError):  # others, or the next execution, need not ask
                yield Write(self.scope, self._done("before"))
            raise

    def _done(self, how: str, value: rec.Value = None, fault: rec.Fault | None = None) -> rec.Done:
        call = self.call
        done = rec.Done(now_us(), self.scope.run_id, self.path, how, value=value, fault=fault, started=self.started)
        if call.number:
            done.of = call.number
        else:
            # Without an intent nothing was called that matters outside, whatever kind of tool it is.
            done.tool, done.kind, done.fingerprint = self.tool.name, "read", self.mark
            done.args, done.holes = self.packed.stowed.value, self.packed.holes
        return done

    def _end(self, done: rec.Done, stowed: Stowed | None) -> Steps:
        """Record an outcome, and give it to the program when it is its turn."""
        if not self.call.number and self.packed.stowed.nodes:
            stowed = together(self.packed.stowed, stowed)
        if self.kept is not None:
            self.kept.close()
        self.call.done = done
        flush = self.call.number > 0
        self.scope.complete(done, stowed, soon=flush)
        yield Turn(self.scope, self.path, flush=flush, new=True)
        self.settled = True

    def _succeed(self, value: Any, how: str = "value") -> Steps:
        try:
            stowed = self._stowed(value)
        except Unencodable as error:
            return (yield from self._lose(value, error))
        yield from self._end(self._done(how, stowed.value), stowed)
        return fetch(stowed.value, Local(stowed), self.scope.registry)

    def _lose(self, value: Any, error: Unencodable) -> Steps:
        """The call returned what cannot be saved. What can be is kept, and whoever knows what it was is asked."""
        error.root = what = f"the result of {self.tool.name}"
        kept, fault, stowed = unsaved(value, error, self.scope, what)
        yield from self._end(self._done("lost", kept, fault), stowed)
        try:
            return (yield from recall(self.scope, self.tool, self.call))
        except ResultLost as gone:
            raise gone from error

    def _stowed(self, value: Any) -> Stowed:
        what = f"the result of {self.tool.name}"
        stowed = stow(scrub(self.scope.agent, value, what), self.scope.registry)
        self._check_secret(stowed, what)
        return stowed

    def _fail(self, error: BaseException) -> Steps:
        """The call failed, and that is known. A stream has handed out something before, perhaps."""
        try:
            items = self._stowed(self.given) if self.given else None
        except Unencodable as unknown:
            return (yield from self._lose(self.given, unknown))
        fault, stowed = fault_of(self.tool, error, self.scope)
        done = self._done("error", items.value if items is not None else None, fault)
        yield from self._end(done, together(stowed, items))
        raise failure(self.tool, self.path, fault, fetch(fault[3], Local(stowed), self.scope.registry)) from error

    def _doubt(self, error: BaseException) -> Steps:
        """A write raised: find out whether it happened. Its result alone in a tuple, or None: it may be tried again."""
        if self.kept is not None:
            self.kept.leave()
        why = self._said(error)
        call, scope = self.call, self.scope
        call.doubt = rec.Doubt(now_us(), scope.run_id, self.path, call.number, why, over=not self.effect.still())
        yield Write(scope, call.doubt)
        self.effect.status, self.effect.why = "in doubt", why
        self._count(error)
        decision, stowed = yield from settle(scope, call, self.tool, self.effect, live=True)
        if decision is None:
            if self.effect.why != why:
                call.doubt = replace(call.doubt, why=f"{why}; {self.effect.why}")
            scope.unsettled.append(call)
            raise in_doubt(scope, [call]) from error
        call.decision = decision
        if decision.how == "absent":
            yield Write(scope, decision)
            self.effect.status = "running"
            return None
        scope.complete(decision, stowed)
        yield Turn(scope, self.path, flush=True, new=True)
        return (give(scope, self.tool, self.path, decision, stowed),)

    def _leave_open(self, why: str) -> None:
        """Nobody can find out now what became of the call: nothing new starts before somebody does."""
        call = self.call
        over = not self.effect.still()
        call.doubt = rec.Doubt(now_us(), self.scope.run_id, self.path, call.number, why, over=over)
        self.scope.write(call.doubt, flush=True)
        self.scope.unsettled.append(call)

    def _interrupted(self, error: BaseException) -> None:
        """The call was cancelled or the process is ending: what became of it outside is not known."""
        if self.tool.kind == "write":
            self._leave_open("cancelled" if is_cancelled(error) else f"interrupted by {type(error).__name__}")
        elif self.tool.kind == "idempotent" and not self.scope.run_id and not is_cancelled(error):
            # A plain loop knows that it was interrupted, from the next checkpoint on; a run is executed again.
            self.scope.write(self._done("cancelled"), self.packed.stowed)

    def _cancelled(self) -> Steps:
        """The caller was cancelled at some point of the call, and that was no outcome."""
        call = self.call
        if call.doubt is None and self.scope.given_up:
            if call.number and self.tool.kind == "write":  # it was not called, and the run will come by here again
                self.scope.write(self._done("before"), flush=True)
        elif call.doubt is None:
            if self.kept is not None:
                self.kept.close()
            items = None
            if self.given:
                with suppress(Unencodable):  # nobody is left to be told
                    items = self._stowed(self.given)
            done = self._done("cancelled", items.value if items is not None else None)
            yield from cancelled(self.scope, done, together(self.packed.stowed, items))
        elif call not in self.scope.unsettled:  # nobody has found out about it yet
            self.scope.unsettled.append(call)
