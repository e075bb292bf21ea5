"""asyncio and multiprocessing: failures that their own code catches, seen while the other tasks still live.

Owns the places where an exception leaves a loop: `run_until_complete`, `Runner.run`, a task group that is about to
cancel its other tasks, and the loop's handler of what nobody awaits; and where one leaves the function of a child
process, which shows it and ends. Must not know how a dump is taken. Holds always: tracebacks, results and the order of
things are as without it; asyncio is not loaded before the program does.

Whether an exception will be handled is not known at that moment, and afterwards the tasks are gone. So the tasks are
looked at right away, for some milliseconds, and what was seen is *held* in memory: it goes into the dump when the
exception turns out to be uncaught, and is forgotten otherwise.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.crash import stacks
from holdfast.crash.kinds import Limits
from holdfast.crash.shapes import is_subtype, type_name

if TYPE_CHECKING:
    from holdfast.crash.hooks import _Hooks

_MOST_HELD = 4
_HELD_S = 60.0  # an exception that was not handled has arrived by then; if not, it is dumped without the tasks
_MOST_HANDLED = 2  # looks for one place; the third failure there is handled, too
_MOST_PLACES = 1_000
_SET_TRACEBACK = BaseException.__dict__["__traceback__"].__set__
_MODULES = {
    "asyncio.base_events": ("BaseEventLoop", ("run_until_complete", "call_exception_handler")),
    "asyncio.runners": ("Runner", ("run",)),
    "asyncio.taskgroups": ("TaskGroup", ("_on_task_done",)),
    "multiprocessing.process": ("BaseProcess", ("_bootstrap",)),
}


class Held(NamedTuple):
    """What was seen when an exception left a task or a loop."""

    error: BaseException
    at: float
    trigger: str
    why: str
    seen: stacks.TaskSnapshot


class Guard:
    """The wrapped methods, and what is held."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks = hooks
        self._wrapped: list[tuple[Any, str, Any, Any]] = []  # class, name, what was there, what is
        self._finder = _Finder(self._loaded)
        self._held: list[Held] = []
        self._places: dict[tuple[str, str, int], int] = {}  # how often tasks were looked at, by type and line

    def start(self) -> None:
        sys.meta_path.insert(0, self._finder)
        for name in _MODULES:
            if name in sys.modules:
                self._loaded(sys.modules[name])

    def stop(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for owner, name, before, ours in self._wrapped:
            if owner.__dict__.get(name) is ours:  # somebody who has wrapped it again keeps theirs
                setattr(owner, name, before)
        self._wrapped.clear()
        self.drop()

    # -- what is held -----------------------------------------------------------------------------------

    def hold(self, error: BaseException, trigger: str, why: str, task: Any = None) -> None:
        """Look at the tasks now, for the case that nobody handles this exception."""
        if self._hooks.removed or not is_failure(error) or any(error is held.error for held in self._held):
            return
        place = place_of(error, stacks.traceback_of(error))
        self._places[place] = self._places.get(place, 0) + 1
        if self._places[place] > _MOST_HANDLED or len(self._places) > _MOST_PLACES:
            return
        try:
            seen = stacks.look_at_tasks(task, (self._hooks.settings.limits or Limits()).look_s)
        except Exception:  # noqa: BLE001 (the dump is taken when the exception arrives, without the tasks)
            return
        self._held.append(Held(error, monotonic(), trigger, why, seen))
        del self._held[:-_MOST_HELD]

    def held(self, error: BaseException) -> Held | None:
        """What was seen when this exception, or one that it came from, left its task. It is held no longer."""
        from_ = stacks.exception_tree(error)
        found = [held for held in self._held if any(held.error is one for one in from_)]
        self._held = [held for held in self._held if not any(held is one for one in found)]
        return found[0] if found else None

    def expire(self) -> None:
        self._held = [held for held in self._held if monotonic() - held.at <= _HELD_S]

    def drop(self) -> None:
        self._held.clear()

    # -- wrapping ---------------------------------------------------------------------------------------

    def _loaded(self, module: types.ModuleType) -> None:
        name, methods = _MODULES[module.__name__]
        owner = getattr(module, name, None)
        if owner is None:
            return
        for method in methods:
            before = owner.__dict__.get(method)
            if type(before) is types.FunctionType and not any(w[0] is owner and w[1] == method for w in self._wrapped):
                ours = _WRAPPERS[method](self, before)
                setattr(owner, method, ours)
                self._wrapped.append((owner, method, before, ours))

    def _left_loop(self, error: BaseException) -> None:
        self.hold(error, "task", f"uncaught {type_name(type(error))} out of an event loop")

    def _task_failed(self, task: Any, error: BaseException) -> None:
        self.hold(error, "task", f"{type_name(type(error))} in task {stacks.task_name(task)} of a group", task)

    def _left_process(self, process: Any, error: BaseException) -> None:
        if not self._hooks.removed and is_failure(error):
            name = vars(process).get("_name")
            why = f"uncaught {type_name(type(error))} in process {name if type(name) is str else '?'}"
            self._hooks.take(error, stacks.traceback_of(error), "exception", why, last=True)

    def _nobody_awaits(self, context: Any) -> None:
        error = context.get("exception") if type(context) is dict else None
        if error is None or self._hooks.removed or not is_failure(error):
            return
        message = context.get("message")
        why = message[:200] if type(message) is str else f"{type_name(type(error))} in a task"
        self.hold(error, "task", why)
        self._hooks.take_beside(error, stacks.traceback_of(error), "task", why)


def _take_out(error: BaseException, frame: types.FrameType) -> None:
    """Our own frame, out of the traceback: it is as without us."""
    trace = stacks.traceback_of(error)
    if trace is not None and trace.tb_frame is frame:
        _SET_TRACEBACK(error, trace.tb_next)


def _leaving(guard: Guard, before: Callable[..., Any]) -> Callable[..., Any]:
    """A method out of which exceptions leave a loop. Its own frame is taken out of the traceback again."""

    @functools.wraps(before)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return before(*args, **kwargs)
        except BaseException as error:
            guard._left_loop(error)  # noqa: SLF001 (of this module)
            _take_out(error, sys._getframe())  # noqa: SLF001 (the documented way)
            raise

    return wrapper


def _bootstrap(guard: Guard, before: Callable[..., Any]) -> Callable[..., Any]:
    """What a child process does. It catches and shows what its `run` raises, so that is where it is seen."""

    @functools.wraps(before)
    def wrapper(process: Any, *args: Any, **kwargs: Any) -> Any:
        run = process.run

        def watched() -> Any:
            try:
                return run()
            except BaseException as error:
                _take_out(error, sys._getframe())  # noqa: SLF001 (the documented way)
                guard._left_process(process, error)  # noqa: SLF001 (of this module)
                raise

        process.run = watched
        return before(process, *args, **kwargs)

    return wrapper


def _on_task_done(guard: Guard, before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def wrapper(group: Any, task: Any) -> Any:
        error = stacks.task_field(task, "_exception")
        if error is not None and not getattr(group, "_aborting", False):
            guard._task_failed(task, error)  # noqa: SLF001 (of this module)
        return before(group, task)

    return wrapper


def _call_exception_handler(guard: Guard, before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def wrapper(loop: Any, context: Any) -> Any:
        try:
            return before(loop, context)
        finally:
            guard._nobody_awaits(context)  # noqa: SLF001 (of this module)

    return wrapper


_WRAPPERS = {
    "run_until_complete": _leaving,
    "run": _leaving,
    "_on_task_done": _on_task_done,
    "_bootstrap": _bootstrap,
    "call_exception_handler": _call_exception_handler,
}


class _Finder:
    """Sees the modules of others when they are loaded, and leaves loading to the one whose business it is."""

    def __init__(self, loaded: Callable[[types.ModuleType], None]) -> None:
        self._loaded = loaded

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if type(loader) is not importlib.machinery.SourceFileLoader:
            return None
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del vars(loader)["exec_module"]  # once, and the loader is as it was
            execute(module)
            self._loaded(module)

        vars(loader)["exec_module"] = exec_module
        return spec


def is_failure(error: BaseException) -> bool:
    """Whether it is one: leaving on purpose, Ctrl-C and cancelling are not, nor are groups of nothing else."""
    if is_subtype(type(error), Exception):
        return True
    return any(is_failure(member) for member in stacks.members_of(error))


def place_of(error: BaseException, traceback: types.TracebackType | None) -> tuple[str, str, int]:
    """What it is and where it was raised: failures alike are not dumped for ever."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    file, line = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno) if traceback is not None else ("", 0)
    return type_name(type(error)), str(file), line
