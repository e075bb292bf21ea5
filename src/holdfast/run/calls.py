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
from typing import Any

from msgspec.structs import replace

from holdfast.errors import BreakerOpen, FailedBeforeEffect, InDoubt, InputError, ResultLost, Unencodable
from holdfast.run import records as rec
from holdfast.run import secrets
from holdfast.run.arguments import Packed, Stowed, fetch, fingerprint, pack, stow
from holdfast.run.context import passing, place
from holdfast.run.doubt import recall, settle
from holdfast.run.effects import Effect
from holdfast.run.faults import told
from holdfast.run.outcomes import MESSAGE_MAX, Local, failure, fault_of, give, together, unsaved
from holdfast.run.past import Call, RunPast
from holdfast.run.positions import Lane
from holdfast.run.resilience import gate_of
from holdfast.run.scope import Scope, in_doubt, now_us
from holdfast.run.steps import (
    Aside,
    HandOut,
    Instead,
    Invoke,
    Keep,
    Pause,
    Steps,
    Turn,
    Write,
    cancelled,
    cancelled_again,
    drive,
    drive_later,
    is_cancelled,
)
from holdfast.run.tools import Tool
from holdfast.store.room import FRAMES, check_room

log = logging.getLogger("holdfast.run")
LABEL_MAX = 200


def now(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a plain tool."""
    lane = place(tool.name, tool.kind)
    if lane is None or tool.kind == "local":
        return tool.function(*args, **kwargs)
    return drive(perform(lane, tool, args, kwargs))


async def later(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an async tool."""
    lane = place(tool.name, tool.kind)
    if lane is None or tool.kind == "local":
        return await tool.function(*args, **kwargs)
    return await drive_later(perform(lane, tool, args, kwargs))


async def aside(tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a plain tool in async code, on a thread of its own; its position is the caller's."""
    lane = place(tool.name, tool.kind)
    if lane is None or tool.kind == "local":
        return await Aside(lambda: tool.function(*args, **kwargs), tool.name).begin()
    return await drive_later(perform(lane, tool, args, kwargs))


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
                        given.append(item)
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
    """The steps of one call, with the checkpoint that the tool asked for."""
    return (_perform if tool.checkpoint is None else _perform_and_keep)(lane, tool, args, kwargs)


def _perform_and_keep(lane: Lane, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps:
    if tool.checkpoint == "before":
        yield Keep(lane, f"before {tool.name}")
        return (yield from _perform(lane, tool, args, kwargs))
    result = yield from _perform(lane, tool, args, kwargs)
    yield Keep(lane, f"after {tool.name}")
    return result


def _perform(lane: Lane, tool: Tool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steps:
    scope: Scope = lane.scope
    check_room(_FRAMES)
    scope.check_tool(tool)
    arguments = tool.binder.bind(args, kwargs)
    try:
        mark = fingerprint(arguments, scope.registry, tool.volatile)
        if tool.volatile:  # what does not count must be saved all the same, before the call takes a place or a claim
            fingerprint(arguments, scope.registry)
    except Unencodable as error:
        error.root = f"the arguments of {tool.name}"
        raise
    secrets.refuse(scope.agent, f"the arguments of {tool.name}", arguments)
    path = lane.take(tool.name, mark)
    made_at, call = yield from scope.asked(lane, path, tool, mark, arguments)
    try:
        return (yield from _answer_or_make(lane, tool, args, kwargs, arguments, mark, made_at, call))
    finally:
        scope.leave_call(path)


def _answer_or_make(
    lane: Lane,
    tool: Tool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: dict[str, Any],
    mark: bytes,
    path: str,
    call: Call | None,
) -> Steps:
    scope: Scope = lane.scope
    if call is not None:
        outcome = call.outcome
        if outcome is not None:
            if tool.stream and not call.lost:
                yield HandOut(fetch(outcome.value, scope.ledger, scope.registry) or [])
            yield Turn(scope, path)
            return (yield from recall(scope, tool, call)) if call.lost else give(scope, tool, path, outcome)
        if call.cancelled:
            if tool.stream and tool.waits and call.done is not None:
                yield HandOut(fetch(call.done.value, scope.ledger, scope.registry) or [])
            yield from cancelled_again(scope, call)
    scope.check_settled(tool)
    tool.check_result(scope.registry)
    return (yield from Live(lane, tool, args, kwargs, arguments, mark, path, call).steps())


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
        path: str,
        before: Call | None,
    ) -> None:
        self.lane, self.tool, self.args, self.kwargs = lane, tool, args, kwargs
        self.scope: Scope = lane.scope
        self.mark, self.path = mark, path
        self.packed = self._packed(arguments)
        self.given: list[Any] = []  # what a stream has handed out
        self.call = Call(self.scope.run_id, path)
        if before is not None:
            self.call.attempts, self.call.progress = before.attempts, before.progress
        key = before.intent.key if before is not None and before.intent is not None else self.scope.key(path)
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
            args=lambda: tool.binder.completed(arguments),
            last_progress=self._last_progress,
            report=self._report,
        )

    def _last_progress(self) -> Any:
        return fetch(self.call.progress, self.scope.ledger, self.scope.registry)

    def _report(self, value: Any) -> None:
        self.scope.report(self.path, self.call.number, value)

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
        if name := secrets.leaked(self.scope.agent, *inline, *stowed.nodes.values(), *stowed.chunks.values()):
            raise secrets.exposed(name, what)

    def steps(self) -> Steps:
        scope = self.scope
        with scope.lock:
            scope.live += 1
        try:
            began = self._fallback_begun()
            if began is not None:
                return (yield from self._fall_back(began))
            return (yield from self._attempts())
        except BaseException as error:
            if is_cancelled(error) and self.call.outcome is None:
                yield from self._cancelled()
            raise
        finally:
            if self.gate is not None:
                self.gate.released(self)
            with scope.lock:
                scope.live -= 1

    def _attempts(self) -> Steps:
        tool, call, effect = self.tool, self.call, self.effect
        tries = 0
        failed: Exception | None = None
        while True:
            # What was begun earlier and may have happened has to be made again to find out, breaker or not.
            refused = self._refusal() if not (self.loose_end and tries == 0) else None
            if refused is not None:
                return (yield from self._give_up(failed or refused))
            tries += 1
            self.started = effect._at_us = now_us()
            effect.attempt = call.attempts + 1
            if tool.kind != "read":
                yield from self._intend()
            invoke = Invoke(tool, effect, self.lane, self.args, self.kwargs)
            self.given = invoke.given
            try:
                value = yield invoke
            except passing():
                if call.number:
                    self.scope.write(self._done("before"), flush=True)
                raise
            except FailedBeforeEffect as error:
                failed = error
                yield from self._count(error)
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
            except Exception as error:  # noqa: BLE001 - whatever a tool raises is an outcome, or a doubt
                failed = error
                if tool.kind == "write":
                    found = yield from self._doubt(error)
                    if found is not None:
                        return found[0]
                else:
                    self.loose_end = self.loose_end or (tool.kind == "idempotent" and not tool.is_answer(error))
                    yield from self._count(error)
                # What a stream has handed out cannot be taken back, so it does not begin again.
                if tries > tool.retries or self.given or (tool.kind != "write" and tool.is_answer(error)):
                    return (yield from self._give_up(error))
            except BaseException as error:
                self._interrupted(error)
                raise
            else:
                if self.gate is not None:
                    self.gate.passed()
                return (yield from self._succeed(value))
            yield Pause(self.scope, tries)

    # -- failing --------------------------------------------------------------------------------------------

    def _refusal(self) -> BreakerOpen | None:
        if self.gate is None or self.tool.breaker is None:
            return None
        return self.gate.refusal(self, self.tool.name, self.tool.breaker)

    def _count(self, error: Exception) -> Steps:
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
        if breaker.checkpoint:
            try:
                yield Keep(self.lane, f"breaker {gate.name} opened"[:LABEL_MAX], placed=False)
            except InputError as unsaved:  # of the state: it was a courtesy, and the program will be told at its own
                log.warning("no checkpoint was taken as the breaker %s opened: %s", gate.name, unsaved)

    def _said(self, error: BaseException) -> str:
        return str(secrets.scrub(self.scope.agent, told(error)[:MESSAGE_MAX], f"an error of {self.tool.name}"))

    def _give_up(self, error: Exception) -> Steps:
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
            value = yield Instead(self.tool, self.effect, self.lane, self.args, self.kwargs)
        except InDoubt:
            raise
        except Exception as error:  # noqa: BLE001 - what the fallback raises is the outcome
            return (yield from self._fail(error))
        return (yield from self._succeed(value, "fallback"))

    # -- recording ------------------------------------------------------------------------------------------

    def _intend(self) -> Steps:
        call, scope = self.call, self.scope
        intent = rec.Intent(
            self.started,
            scope.run_id,
            self.path,
            self.tool.name,
            self.tool.kind,
            self.packed.stowed.value,
            self.mark,
            self.effect.key,
            call.attempts + 1,
            scope.agent.generation,
        )
        writing = Write(scope, intent, self.packed.stowed)
        try:
            yield writing
        finally:
            if writing.number:  # it may be, though the caller was cancelled before the call was made
                call.intent, call.number, call.attempts = intent, writing.number, intent.attempt
                call.doubt = call.decision = None
        self.effect.number = writing.number

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
        self.call.done = done
        self.scope.complete(done, stowed)
        yield Turn(self.scope, self.path, flush=self.call.number > 0)

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
        stowed = stow(secrets.scrub(self.scope.agent, value, what), self.scope.registry)
        self._check_secret(stowed, what)
        return stowed

    def _fail(self, error: Exception) -> Steps:
        """The call failed, and that is known. A stream has handed out something before, perhaps."""
        try:
            items = self._stowed(self.given) if self.given else None
        except Unencodable as unknown:
            return (yield from self._lose(self.given, unknown))
        fault, stowed = fault_of(self.tool, error, self.scope)
        done = self._done("error", items.value if items is not None else None, fault)
        yield from self._end(done, together(stowed, items))
        raise failure(self.tool, self.path, fault, fetch(fault[3], Local(stowed), self.scope.registry)) from error

    def _doubt(self, error: Exception) -> Steps:
        """A write raised: find out whether it happened. Its result alone in a tuple, or None: it may be tried again."""
        why = self._said(error)
        call, scope = self.call, self.scope
        call.doubt = rec.Doubt(now_us(), scope.run_id, self.path, call.number, why)
        yield Write(scope, call.doubt)
        self.effect.status, self.effect.why = "in doubt", why
        yield from self._count(error)
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
        yield Turn(scope, self.path, flush=True)
        return (give(scope, self.tool, self.path, decision, stowed),)

    def _leave_open(self, why: str) -> None:
        """Nobody can find out now what became of the call: nothing new starts before somebody does."""
        call = self.call
        call.doubt = rec.Doubt(now_us(), self.scope.run_id, self.path, call.number, why)
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
            items = None
            if self.given:
                with suppress(Unencodable):  # nobody is left to be told
                    items = self._stowed(self.given)
            done = self._done("cancelled", items.value if items is not None else None)
            yield from cancelled(self.scope, done, together(self.packed.stowed, items))
        elif call not in self.scope.unsettled:  # nobody has found out about it yet
            self.scope.unsettled.append(call)
