"""Positions: where in a run something happens, as a path that is the same when the run is executed again.

Owns lanes and their numbers, and the task factory that numbers tasks when they are created. Must not know what is
recorded. What always holds: a lane is used by one flow of control; two flows never take the same path.

A path reads ``plan:0/~3/2``: step "plan" for the first time, in it the fourth task, in that the third call. ``^1`` is
the second job of a thread in a copied context.
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

from holdfast.errors import BadName

STEP_NAME_MAX = 200
"""Characters of a step's name: it is part of every path below it."""


class Scope(Protocol):
    """What lanes belong to: a run, or the plain use of an agent."""

    def several(self) -> None:
        """Called when a second lane comes into being."""

    def job(self, parent: Lane, first: tuple[str, bytes]) -> int:
        """The number of a lane that was not numbered when it was made, given the first thing it does."""


def safe(name: str) -> str:
    """A name as it stands in a path."""
    return name.replace("%", "%25").replace("/", "%2F").replace(":", "%3A")


class Lane:
    """One flow of control: a prefix of paths, and the number of the next call."""

    __slots__ = (
        "__weakref__",
        "_next",
        "_owner",
        "_steps",
        "_tasks",
        "_unnumbered",
        "above",
        "label",
        "prefix",
        "scope",
    )

    def __init__(self, scope: Any, prefix: str = "", above: Lane | None = None, label: str = "") -> None:
        self.scope = scope
        self.prefix = prefix
        self.above = above
        self.label = label  # what people see of it in a stack
        self._next = 0
        self._tasks = 0
        self._steps: dict[str, int] = {}
        self._owner: Any = None
        self._unnumbered = False

    @property
    def path(self) -> str:
        """Where the next call would be."""
        return f"{self.prefix}{self._next}"

    def take(self, what: str = "", fingerprint: bytes = b"") -> str:
        """The path of the next call, which is ``what`` with these arguments."""
        if self._unnumbered:
            self._number((what, fingerprint))
        path = f"{self.prefix}{self._next}"
        self._next += 1
        return path

    def step(self, name: str) -> Lane:
        """The lane of a step that begins here."""
        if not name or len(name) > STEP_NAME_MAX:
            raise BadName(f"a step's name has 1 to {STEP_NAME_MAX} characters, not {len(name)}")
        if self._unnumbered:
            self._number((f"{name}:", b""))
        shown = safe(name)
        occurrence = self._steps.get(shown, 0)
        self._steps[shown] = occurrence + 1
        lane = Lane(self.scope, f"{self.prefix}{shown}:{occurrence}/", self, name)
        lane._owner = self._owner
        return lane

    def task(self, *, ordered: bool = True) -> Lane:
        """The lane of a task that is created here. Without an order among such, what it does first gives its number.

        So it is, too, where nobody knows which flow this is: in a callback of the loop, before any call.
        """
        self.scope.several()
        if self._unnumbered or not ordered:
            lane = Lane(self.scope, self.prefix, self.above if self._unnumbered else self)
            lane._unnumbered = True
            return lane
        lane = Lane(self.scope, f"{self.prefix}~{self._tasks}/", self, f"task {self._tasks}")
        self._tasks += 1
        return lane

    def body(self, path: str, label: str) -> Lane:
        """The lane inside the tool that is called at ``path``."""
        lane = Lane(self.scope, f"{path}/", self, label)
        lane._owner = self._owner
        return lane

    def mine(self) -> Lane:
        """This lane if it is the caller's own, otherwise a new one below it, to be numbered by what it does first."""
        me = flow()
        owner = self._owner
        if owner is None:
            self._owner = me
        elif owner != me:
            lane = Lane(self.scope, self.prefix, self)
            lane._owner, lane._unnumbered = me, True
            self.scope.several()
            return lane
        return self

    def own(self, task: Any) -> None:
        """Make a task the one whose lane this is."""
        self._owner = weakref.ref(task)

    def _number(self, first: tuple[str, bytes]) -> None:
        above = self.above
        number = self.scope.job(above, first)
        self.prefix = f"{above.prefix if above is not None else ''}^{number}/"
        self.label = f"job {number}"
        self._unnumbered = False

    def stack(self) -> list[str]:
        """What is going on here, outermost first."""
        labels: list[str] = []
        lane: Lane | None = self
        while lane is not None:
            if lane.label:
                labels.append(lane.label)
            lane = lane.above
        return labels[::-1]


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


def numbered_context() -> contextvars.Context:
    """A copy of the context whose lane is numbered now: for a job that another thread will do."""
    context = contextvars.copy_context()
    lane = here()
    if lane is not None:
        context.run(HERE.set, lane.task())
    return context


def number_tasks(loop: Any) -> None:
    """From now on every task that is created on this loop gets its lane when it is created."""
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


_SETS = frozenset({"as_completed", "_AsCompletedIterator.__init__"})


def _is_in_a_set(frame: FrameType | None) -> bool:
    """Whether a task is created by asyncio.as_completed, which goes through a set of coroutines, hence of addresses."""
    for _ in range(5):
        if frame is None:
            return False
        if frame.f_code.co_qualname in _SETS and frame.f_globals.get("__name__") == "asyncio.tasks":
            return True
        frame = frame.f_back
    return False


class _Factory:
    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, loop: Any, coro: Any, **options: Any) -> Any:
        lane = here()
        if lane is None:
            return self._make(loop, coro, **options)
        child = lane.task(ordered=not _is_in_a_set(sys._getframe(1)))
        given = options.get("context")
        context = contextvars.copy_context()
        context.run(HERE.set, child)
        if given is not None:
            given.run(HERE.set, child)
        task = context.run(self._make, loop, coro, **options)
        child.own(task)
        return task
