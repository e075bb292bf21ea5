"""What takes time in a call, and how it is done in plain and in async code.

Owns the requests that a call's steps make, the two drivers that fulfil them, and the async twins of verbs that are not
written as steps. Must not know in which order a call makes them. What always holds: a request that writes is finished
even when its caller is cancelled meanwhile.
"""

from __future__ import annotations

import inspect
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from holdfast.agent.watchers import UNWATCHED
from holdfast.run import records as rec
from holdfast.run import resilience
from holdfast.run.arguments import Stowed, fingerprint, stow
from holdfast.run.effects import Effect
from holdfast.run.past import Call
from holdfast.run.resilience import Clock, clock_of
from holdfast.run.scope import EFFECT, HERE, Lane, Scope, now_us
from holdfast.run.tools import Tool
from holdfast.store.processes import off_loop

if TYPE_CHECKING:
    from concurrent.futures import Future


class Request(ABC):
    """Something that takes time. ``now`` does it in plain code, ``later`` in async code."""

    @abstractmethod
    def now(self) -> Any: ...

    async def later(self) -> Any:
        """As now(), on another thread where it blocks. It is finished even when the caller is cancelled meanwhile."""
        asyncio = sys.modules["asyncio"]
        doing = self.elsewhere()
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            while not doing.done():
                try:
                    await asyncio.wait({doing})
                except asyncio.CancelledError:
                    continue
            if not doing.cancelled():
                doing.exception()  # looked at: who waited for it is told that he was cancelled
            raise

    def elsewhere(self) -> Any:
        """Begin it on another thread. What waits for the disk shares a few; code of the user gets one of its own."""
        return off_loop(self.now)


class Aside(threading.Thread):
    """A thread for one call of user code, which may wait for anything."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function, self._context = function, copy_context()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._told: Any = None

    def run(self) -> None:
        try:
            self._outcome = self._context.run(self._function), None
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            self._outcome = None, error
        if self._told is not None:
            loop, future = self._told
            with suppress(RuntimeError):  # the loop is closed by now
                loop.call_soon_threadsafe(self._tell, future)

    def _tell(self, future: Any) -> None:
        if future.done():
            return
        value, error = self._outcome or (None, None)
        if isinstance(error, StopIteration):  # which no future can hold
            error = RuntimeError(f"{self.name} raised StopIteration")
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def wait(self, limit_s: float | None = None) -> Any:
        """Do it, and block until it is done. Raises TimeoutError; the thread goes on then."""
        self.start()
        self.join(limit_s)
        if self._outcome is None:
            raise _late(self.name, limit_s)
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def begin(self) -> Any:
        """Do it; returns a future of the running loop."""
        loop = sys.modules["asyncio"].get_running_loop()
        future = loop.create_future()
        self._told = loop, future
        self.start()
        return future


def _late(name: str, limit_s: float | None) -> TimeoutError:
    return TimeoutError(f"{name} took longer than {limit_s:g} s")


def awaited(answer: Any) -> Any:
    """What something awaitable comes to, in plain code: on a loop of its own, and where one runs here on a thread."""
    import asyncio

    async def wait() -> Any:
        return await answer

    if asyncio._get_running_loop() is None:
        return asyncio.run(wait())
    return Aside(lambda: asyncio.run(wait()), "holdfast-await").wait()


class Work(Request):
    """Call a function that reads or writes the disk."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def now(self) -> Any:
        return self.function()


class Long(Work):
    """Call a function that may wait for others, or call code of the user: it has a thread of its own."""

    def elsewhere(self) -> Any:
        return Aside(self.now, "holdfast-wait").begin()


class Share(Long):
    """Begin a transaction for a tool. Others may have all there are."""


class Join(Request):
    """Wait for something that goes on elsewhere."""

    def __init__(self, other: Future[None]) -> None:
        self.other = other

    def now(self) -> None:
        self.other.result()

    async def later(self) -> None:
        await sys.modules["asyncio"].wrap_future(self.other)


class Write(Request):
    """Append a record and make it durable. ``number`` is its number once that is done."""

    def __init__(self, scope: Scope, record: rec.Record, stowed: Stowed | None = None) -> None:
        self.scope, self.record, self.stowed = scope, record, stowed
        self.number = 0

    def now(self) -> int:
        self.number = self.scope.write(self.record, self.stowed, flush=True)
        return self.number


class Turn(Request):
    """Wait for one's place among the completions; with ``flush`` also until what was recorded is durable.

    ``new``: it was recorded just now. A caller that is cancelled before its turn is told so instead of its outcome,
    and will not be when the run is executed again, where nobody waits: so that is recorded, too.
    """

    def __init__(self, scope: Scope, path: str, *, flush: bool = False, new: bool = False) -> None:
        self.scope, self.order, self.path = scope, scope.order, path
        self.flush, self.new = flush, new

    def now(self) -> None:
        self._flush()
        self.order.now(self.path)

    async def later(self) -> None:
        cancelled: BaseException | None = None
        if self.flush:
            try:
                await Work(self._flush).later()
            except sys.modules["asyncio"].CancelledError as error:  # it is flushed, and the turn has to be taken
                cancelled = error
        try:
            await self.order.turn(self.path)
        except sys.modules["asyncio"].CancelledError as error:
            cancelled = error
        if cancelled is not None:
            if self.new:
                self.scope.told_cancelled(self.path)
            raise cancelled

    def _flush(self) -> None:
        if self.flush:
            try:
                self.scope.ledger.flush()
            except BaseException:
                self.order.drop((self.path,))  # nobody comes for this turn
                raise


class HandOut(Request):
    """Give the program the items of a stream that are recorded, before its turn: what they led to completed earlier."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def now(self) -> list[Any]:
        return self.items


class Sleep(Request):
    """Wait, by a clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def now(self) -> None:
        self.clock.sleep(self.seconds)

    async def later(self) -> None:
        await self.clock.asleep(self.seconds)


class Pause(Sleep):
    """Wait before another attempt."""

    def __init__(self, scope: Scope, attempt: int) -> None:
        super().__init__(clock_of(scope.agent), resilience.backoff_s(attempt))


class Park(Request):
    """The call was cancelled when it was recorded: wait until the program does that again."""

    def __init__(self, scope: Scope, path: str, took_s: float) -> None:
        self.order, self.path, self.took_s = scope.order, path, took_s

    def now(self) -> None:
        """Plain code is never cancelled; the call is made again."""
        self.order.drop((self.path,))

    async def later(self) -> None:
        await self.order.parked(self.path, self.took_s)


class _Inside:
    """The context of a tool's body: its effect and its lane. A class, because every call enters it."""

    __slots__ = ("_effect", "_here", "_lane", "_was")

    def __init__(self, effect: Effect, lane: Lane) -> None:
        self._effect, self._lane = effect, lane

    def __enter__(self) -> None:
        self._was, self._here = EFFECT.set(self._effect), HERE.set(self._lane)

    def __exit__(self, *_: object) -> None:
        HERE.reset(self._here)
        EFFECT.reset(self._was)


@contextmanager
def _watched(here: _Inside, effect: Effect) -> Iterator[None]:
    with here, effect._watch.inside():
        yield


class Invoke(Request):
    """Call the tool itself."""

    def __init__(self, tool: Tool, effect: Effect, lane: Lane, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tool, self.effect, self.lane = tool, effect, lane
        self.args, self.kwargs = args, kwargs
        self.given: list[Any] = []  # what a stream has handed out
        self.kept: Any = None  # the same, as far as it is kept before the end (``streams.Kept``)

    def received(self, item: Any) -> None:
        """A stream has given this."""
        self.given.append(item)
        if self.kept is not None:
            self.kept.add(item)

    def inside(self, owner: Any = None) -> AbstractContextManager[Any]:
        """The context of the tool's body. ``owner`` is the flow of control that executes it, if not the caller's."""
        here = _Inside(self.effect, self.place(owner))
        return here if self.effect._watch is UNWATCHED else _watched(here, self.effect)

    def place(self, owner: Any) -> Lane:
        """The lane of what it calls."""
        lane = self.lane.body(self.effect.path, self.tool.name, owner)
        if self.effect._connection is not None:
            lane.inside = self.tool.name
        return lane

    def now(self) -> Any:
        if self.tool.timeout_s is not None and not self.tool.stream:
            # In a thread of its own, because nothing stops a blocking call. One that takes longer goes on.
            return self._aside().wait(self.tool.timeout_s)
        with self.inside():
            return self.tool.function(*self.args, **self.kwargs)

    async def later(self) -> Any:
        async with sys.modules["asyncio"].timeout(self.tool.timeout_s):
            if not self.tool.waits:  # a plain tool that is not to block the loop
                return await self._aside().begin()
            with self.inside():
                return await self.tool.function(*self.args, **self.kwargs)

    def deadline(self) -> float | None:
        """When a stream is to have ended, by the loop's clock."""
        limit_s = self.tool.timeout_s
        return None if limit_s is None else sys.modules["asyncio"].get_running_loop().time() + limit_s

    async def item(self, source: Any, end: float | None, none: Any) -> Any:
        """The next item of a stream. That of a plain tool is there at once."""
        with self.inside():
            if not self.tool.waits:
                return next(source, none)
            async with sys.modules["asyncio"].timeout_at(end):
                return await anext(source, none)

    def _aside(self) -> Aside:
        def call() -> Any:
            with self.inside(threading.get_ident()):
                return self.tool.function(*self.args, **self.kwargs)

        thread = Aside(call, self.tool.name)
        self.effect.still = thread.is_alive
        return thread


class Instead(Invoke):
    """The context of a fallback: a lane of its own below the call."""

    def place(self, owner: Any) -> Lane:
        return super().place(owner).step("fallback")


class Theirs(Request):
    """Call a function of the user that may be async: a probe, a compensation, a fallback, a hook.

    An async one is awaited on the caller's loop, or, in plain code, on one of its own. In async code a plain one has a
    thread of its own, unless it is to be called where the run is (not ``aside``); ``whole``: that is waited for even
    when the caller is cancelled meanwhile. One that takes longer than its limit in plain code goes on.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        name: str,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
        limit_s: float | None = None,
        *,
        aside: bool = True,
        whole: bool = False,
    ) -> None:
        self.function, self.name, self.inside, self.limit_s = function, name, inside, limit_s
        self.aside, self.whole = aside, whole

    def now(self) -> Any:
        return self._call() if self.limit_s is None else Aside(self._call, self.name).wait(self.limit_s)

    def _call(self) -> Any:
        with self.inside():
            answer = self.function()
            return awaited(answer) if inspect.isawaitable(answer) else answer

    def elsewhere(self) -> Any:
        return Aside(self.now, self.name).begin()

    async def later(self) -> Any:
        if self.aside and not inspect.iscoroutinefunction(self.function):
            return await (super().later() if self.whole else self.elsewhere())
        limit = sys.modules["asyncio"].timeout(self.limit_s)
        try:
            with self.inside():
                async with limit:
                    answer = self.function()
                    return await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise _late(self.name, self.limit_s) from None


Steps = Generator[Any, Any, Any]
"""What a call, a pass or a run does, asking for whatever takes time."""
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def is_cancelled(error: BaseException) -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


def cancelled(scope: Scope, done: rec.Done, stowed: Stowed | None = None) -> Steps:
    """The program gave up what ``done`` stands for: record that, and let its caller be told when it is its turn."""
    if scope.ended or scope.given_up:  # what is left over when a run has ended, or is cancelled, is no part of it
        return
    asyncio = sys.modules["asyncio"]
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    if task is None or not task.cancelling():  # nobody cancelled the caller: the tool raised it by itself
        done.fault = ("", "CancelledError", "", None)
    done.how = "cancelled"
    done.at = clock_of(scope.agent).wall_us()
    scope.complete(done, stowed)
    yield Turn(scope, done.path)


def asked(lane: Lane, what: Tool, arguments: dict[str, Any]) -> Steps:
    """The steps to what is recorded of a call of this room's own: its outcome, when it is its turn.

    Where there is none, the record for it, to be completed.
    """
    scope: Scope = lane.scope
    mark = fingerprint(arguments, scope.registry)
    path = lane.take(what.name, mark)
    call = scope.recorded(path, what, mark, arguments)
    if call is not None and call.outcome is not None:
        yield from turn_again(scope, call)
        return call.outcome, None
    if call is not None and call.cancelled:
        yield from cancelled_again(scope, call)
    scope.check_settled(what)
    done = rec.Done(0, scope.run_id, path, "value", tool=what.name, kind="read", fingerprint=mark, started=now_us())
    done.args = stow(arguments, scope.registry).value
    return None, done


def cancelled_again(scope: Scope, call: Call) -> Steps:
    """A call that was cancelled when it was recorded ends so again. In plain code it returns, and the call is made."""
    done = call.done
    if done is None or done.fault is not None:
        yield Turn(scope, call.path)
        raise sys.modules["asyncio"].CancelledError
    yield from _parked(scope, call)


def turn_again(scope: Scope, call: Call) -> Steps:
    """The turn of an outcome that is recorded: it is given, unless its caller was cancelled before it came."""
    if scope.was_cancelled(call.path):
        yield from _parked(scope, call)
    else:
        yield Turn(scope, call.path)


def _parked(scope: Scope, call: Call) -> Steps:
    done = call.done
    try:
        yield Park(scope, call.path, max(0, done.at - done.started) / 1e6 if done is not None and done.started else 0.0)
    except BaseException as error:
        if is_cancelled(error):
            yield Turn(scope, call.path)
        raise


def drive(steps: Steps) -> Any:
    """Go through the steps in plain code."""
    try:
        request = next(steps)
        while True:
            try:
                answer = request.now()
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        return end.value


async def drive_later(steps: Steps) -> Any:
    """Go through the steps in async code."""
    try:
        request = next(steps)
        while True:
            try:
                answer = await request.later()
            except BaseException as error:  # noqa: BLE001 - the steps decide what it means
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        return end.value


def twin(
    verb: Callable[Concatenate[S, P], R], kind: type[Work] = Work
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """The async twin of a method that waits for the disk alone; with ``Long``, of one that may wait for others."""
    name = verb.__name__

    async def later(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # By its name: who has made the verb another one has made the twin another one, too.
        answer: R = await kind(partial(getattr(self, name), *args, **kwargs)).later()
        return answer

    later.__name__, later.__qualname__ = f"a{name}", f"{verb.__qualname__.rpartition('.')[0]}.a{name}"
    later.__doc__ = f"As {name}(), for async code."
    return later
