"""One call of a tool: answered from the record, or made and recorded.

Owns the way of a call from the program to its record, in plain code, in async code and in streams. It is written once,
as a generator that asks for what takes time; ``now`` and ``later`` drive it. How a call is really made is the business
of ``attempts``. What always holds: what a caller gets is what the record says, the first time too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.errors import Unencodable
from holdfast.run import secrets
from holdfast.run.arguments import fetch, fingerprint
from holdfast.run.attempts import Live
from holdfast.run.context import place
from holdfast.run.doubt import recall
from holdfast.run.outcomes import give
from holdfast.run.positions import Lane
from holdfast.run.scope import Scope
from holdfast.run.steps import Aside, HandOut, Invoke, Keep, Steps, Turn, cancelled_again, drive, drive_later
from holdfast.run.tools import Tool
from holdfast.store.room import FRAMES, check_room


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
    call = scope.recorded(path, tool, mark, arguments)
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
