"""Positions: where in a run something happens, as a path that is the same when the run is executed again.

Owns lanes and their numbers, and the task factory that numbers tasks when they are created. Must not know what is
recorded. What always holds: a lane is used by one flow of control; two flows never take the same path. A run has one
thread; a flow of it that nobody could number again has no position, and takes none.

A path reads ``plan:0/~3/2``: step "plan" for the first time, in it the fourth task, in that the third call.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol
from zlib import crc32

from holdfast.errors import BadName, BadOption, NoAgent
from holdfast.run.order import watch

STEP_NAME_MAX = 200
"""Characters of a step's name: it is part of every path below it."""


class Scope(Protocol):
    """What lanes belong to: a run, or the plain use of an agent."""

    run_id: str
    lock: Any

    def several(self) -> None:
        """Called when a second lane comes into being."""


def safe(name: str) -> str:
    """A name as it stands in a path."""
    return name.replace("%", "%25").replace("/", "%2F").replace(":", "%3A")


class Lane:
    """One flow of control: a prefix of paths, and the number of the next call."""

    __slots__ = ("_lists", "_next", "_owner", "_steps", "_stray", "_tasks", "above", "label", "prefix", "scope")

    def __init__(self, scope: Any, prefix: str = "", above: Lane | None = None, label: str = "") -> None:
        self.scope = scope
        self.prefix = prefix
        self.above = above
        self.label = label  # what people see of it in a stack
        self._next = 0
        self._tasks = 0
        self._steps: dict[str, int] = {}
        self._owner: Any = None
        self._stray = False  # a flow of a run that has no position
        self._lists: tuple[Any, int] = (None, 0)  # what asyncio.as_completed was given last, and its first number

    @property
    def path(self) -> str:
        """Where the next call would be."""
        return f"{self.prefix}{self._next}"

    def take(self, what: str = "", fingerprint: bytes = b"") -> str:  # noqa: ARG002 - some lanes have no order
        """The path of the next call, which is ``what`` with these arguments."""
        if self._stray:
            raise self._refusal(what)
        path = f"{self.prefix}{self._next}"
        self._next += 1
        return path

    def step(self, name: str) -> Lane:
        """The lane of a step that begins here."""
        if not name or len(name) > STEP_NAME_MAX:
            raise BadName(f"a step's name has 1 to {STEP_NAME_MAX} characters, not {len(name)}")
        shown = safe(name)
        occurrence = self._steps.get(shown, 0)
        self._steps[shown] = occurrence + 1
        lane = Lane(self.scope, f"{self.prefix}{shown}:{occurrence}/", self, name)
        lane._owner, lane._stray = self._owner, self._stray
        return lane

    def task(self, among: tuple[Any, int] | None = None) -> Lane:
        """The lane of a task that is created here, ``among`` others that come in any order: their list, its place."""
        with self.scope.lock:  # in plain use, threads have lanes, too
            self.scope.several()
            number = self._tasks
            if among is not None:
                tasks, place = among
                if self._lists[0] is not tasks:
                    self._lists = tasks, number
                    self._tasks += len(tasks)
                number = self._lists[1] + place
            else:
                self._tasks += 1
        lane = Lane(self.scope, f"{self.prefix}~{number}/", self, f"task {number}")
        lane._stray = self._stray
        return lane

    def body(self, path: str, label: str, owner: Any = None) -> Lane:
        """The lane inside the tool that is called at ``path``. ``owner`` is who executes it, if not the caller."""
        lane = Lane(self.scope, f"{path}/", self, label)
        lane._owner = owner if owner is not None else self._owner
        return lane

    def mine(self) -> Lane:
        """This lane if it is the caller's own, otherwise a new one below it. In a run that one has no position."""
        me = flow()
        owner = self._owner
        if owner is None:
            self._belongs(me)
        elif owner != me:
            # Frameworks carry a context from one task to another. A task knows its own lane.
            known = _LANES.get(me()) if isinstance(me, weakref.ref) else None
            if known is not None and known.scope is self.scope:
                return known
            lane = self._begun_here() if self.scope.run_id else self.task()
            lane._belongs(me)
            return lane
        return self

    def _begun_here(self) -> Lane:
        """The lane of another flow than the run's own: of the one task of a loop that plain code has just begun."""
        asyncio = sys.modules.get("asyncio")
        loop = asyncio._get_running_loop() if asyncio is not None else None
        begun = loop is not None and self._owner == threading.get_ident() and not self._stray
        if begun and asyncio is not None and len(asyncio.all_tasks(loop)) == 1:
            number_tasks(loop)
            return self.task()
        lane = Lane(self.scope, self.prefix, self)
        lane._stray = True
        return lane

    def own(self, task: Any) -> None:
        """Make a task the one whose lane this is."""
        self._belongs(weakref.ref(task))

    def _belongs(self, flow: Any) -> None:
        self._owner = flow
        if isinstance(flow, weakref.ref):
            _LANES[flow()] = self

    def _refusal(self, what: str) -> NoAgent:
        on_loop = isinstance(self._owner, weakref.ref)
        where = "in a task that does not belong to its run" if on_loop else "on another thread than its run's"
        hint = (
            "A run's tasks are created in its own tasks, on the loop that it is executed on: make the durable function"
            " async and use `await agent.arun(...)`, and create tasks in it, not in callbacks or other threads."
            if on_loop
            else "Inside a durable function, threads are begun by store.map(...) and agent.spawn(...)."
        )
        if not on_loop and what != "checkpoint" and not what.startswith("holdfast."):
            hint += f" For a plain tool in async code: `await {what}.acall(...)`."
        return NoAgent(f"{what} was called {where}; it was not called", hint=hint)

    def stack(self) -> list[str]:
        """What is going on here, outermost first."""
        labels: list[str] = []
        lane: Lane | None = self
        while lane is not None:
            if lane.label:
                labels.append(lane.label)
            lane = lane.above
        return labels[::-1]


_LANES: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()
"""The lanes of tasks."""

HERE: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("holdfast.lane", default=None)
"""The lane of the current context. In a copied context it is the lane of the one it was copied from."""


def flow() -> Any:
    """Who is executing: the current task, or the thread where there is none."""
    asyncio = sys.modules.get("asyncio")  # a program that never loaded it has no tasks
    if asyncio is not None and (loop := asyncio._get_running_loop()) is not None:
        task = asyncio.current_task(loop)
        if task is not None:
            return weakref.ref(task)
    return threading.get_ident()


def here() -> Lane | None:
    """The caller's own lane, None when no agent is current."""
    lane = HERE.get()
    if lane is None:
        return None
    mine = lane.mine()
    if mine is not lane:
        HERE.set(mine)
    return mine


@contextmanager
def within(lane: Lane | None) -> Iterator[None]:
    """Inside, ``lane`` is the current one."""
    token = HERE.set(lane)
    try:
        yield
    finally:
        HERE.reset(token)


def number_tasks(loop: Any) -> None:
    """From now on every task that is created on this loop gets its lane when it is created."""
    watch(loop)
    before = loop.get_task_factory()
    if not isinstance(before, _Factory):
        loop.set_task_factory(_Factory(before or _numbered_task()))


@functools.cache
def _numbered_task() -> Callable[..., Any]:
    """A task whose hash is the same in every execution of a run.

    asyncio keeps tasks in sets, and a task group cancels its members in the order of such a set; so does a program
    that goes through what ``asyncio.wait`` returned. With the usual hash, an address, that order differs every time.
    """
    import asyncio

    class NumberedTask(asyncio.Task[Any]):
        """As asyncio.Task."""

        def __init__(self, coro: Any, **options: Any) -> None:
            lane = HERE.get()
            # Before the task is made: making it puts it into a set.
            self._place = crc32(lane.prefix.encode()) if lane is not None else id(self) >> 4
            super().__init__(coro, **options)

        def __hash__(self) -> int:
            return self._place

        __eq__ = object.__eq__

    def make(loop: Any, coro: Any, **options: Any) -> Any:
        return NumberedTask(coro, loop=loop, **options)

    return make


_SETS = {"as_completed": "fs", "_AsCompletedIterator.__init__": "aws"}


def _among(frame: FrameType | None, coro: Any) -> tuple[Any, int] | None:
    """The list, and the place in it, of a coroutine that asyncio.as_completed makes a task of.

    It goes through a set of them, hence in the order of their addresses.
    """
    for _ in range(5):
        if frame is None:
            return None
        name = _SETS.get(frame.f_code.co_qualname)
        if name is not None and frame.f_globals.get("__name__") == "asyncio.tasks":
            given = frame.f_locals[name]
            if isinstance(given, list | tuple):
                for place, one in enumerate(given):
                    if one is coro:
                        return given, place
            raise BadOption(
                "asyncio.as_completed goes through this in an order that differs each time",
                hint="Give it a list of coroutines or tasks.",
            )
        frame = frame.f_back
    return None


class _Factory:
    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, loop: Any, coro: Any, **options: Any) -> Any:
        lane = here()
        if lane is None:
            return self._make(loop, coro, **options)
        child = lane.task(_among(sys._getframe(1), coro))
        given = options.get("context")
        context = contextvars.copy_context()
        context.run(HERE.set, child)
        if given is not None:
            given.run(HERE.set, child)
        task = context.run(self._make, loop, coro, **options)
        child.own(task)
        return task
