"""asyncio and multiprocessing: failures that their own code catches, seen while the other tasks still live.

Owns the places where an exception leaves a loop: `run_until_complete`, `Runner.run`, a task group that is about to
cancel its other tasks, and the loop's handler of what nobody awaits; and where one leaves the function of a child
process, which shows it and ends. Must not know how a dump is taken. Holds always: tracebacks, results and the order of
things are as without it; asyncio is not loaded before the program does.

Whether an exception will be handled is not known at that moment, and afterwards the tasks are gone. So the dump is
taken at once and *held*: it becomes one when the exception turns out to be uncaught, and is deleted otherwise.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from holdfast.crash import exceptions, kinds, tasks
from holdfast.crash.shapes import is_subtype, type_name

if TYPE_CHECKING:
    from holdfast.crash.hooks import _Hooks

_HELD = "held"  # the folder in which dumps wait for what becomes of their exceptions
_MOST_HELD = 4
_HELD_S = 60.0  # an exception that was not handled has arrived by then; if not, it is dumped when it does
_MOST_HANDLED = 2  # dumps of one place that turned out to be handled: the third would be, too
_SET_TRACEBACK = BaseException.__dict__["__traceback__"].__set__
_TRACEBACK = BaseException.__dict__["__traceback__"].__get__
_MODULES = {
    "asyncio.base_events": ("BaseEventLoop", ("run_until_complete", "call_exception_handler")),
    "asyncio.runners": ("Runner", ("run",)),
    "asyncio.taskgroups": ("TaskGroup", ("_on_task_done",)),
    "multiprocessing.process": ("BaseProcess", ("_bootstrap",)),
}


class Guard:
    """The wrapped methods, and the dumps that are held."""

    def __init__(self, hooks: _Hooks) -> None:
        self._hooks = hooks
        self._wrapped: list[tuple[Any, str, Any, Any]] = []  # class, name, what was there, what is
        self._finder = _Finder(self._loaded)
        self._held: list[tuple[BaseException, Path, float]] = []
        self._places: dict[tuple[str, str, int], int] = {}  # how often a dump was held, by type and line

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

    # -- held dumps -------------------------------------------------------------------------------------

    def hold(self, error: BaseException, trigger: str, why: str, task: Any = None) -> None:
        """Take a dump now, for the case that nobody handles this exception."""
        hooks = self._hooks
        if hooks.removed or not is_failure(error) or any(error is held for held, _, _ in self._held):
            return
        traceback = _TRACEBACK(error)
        place = place_of(error, traceback)
        if self._places.get(place, 0) >= _MOST_HANDLED:
            return
        self._places[place] = self._places.get(place, 0) + 1
        while len(self._held) >= _MOST_HELD:
            _remove(self._held.pop(0)[1])
        try:
            folder = hooks.folder() / _HELD
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = hooks.capture(error, traceback, trigger, why, to=folder, task=task)
        except Exception:  # noqa: BLE001 (it is taken when the exception arrives, without the tasks)
            return
        self._held.append((error, path, monotonic()))

    def publish(self, error: BaseException) -> Path | None:
        """The exception is not handled: its dump, if one is held, is one now. So are those of a group's members."""
        found = None
        members = _all_members(error)
        for held in list(self._held):
            if held[0] is error or any(held[0] is member for member in members):
                self._held.remove(held)
                path = held[1].parent.parent / held[1].name
                try:
                    held[1].rename(path)
                except OSError:
                    continue
                if held[0] is error:
                    found = path
                else:
                    self._hooks.note(f"dump of the moment when a task failed: {path}")
        self.drop()
        return found

    def expire(self) -> None:
        for held in [held for held in self._held if monotonic() - held[2] > _HELD_S]:
            self._held.remove(held)
            _remove(held[1])

    def drop(self) -> None:
        while self._held:
            _remove(self._held.pop()[1])
        _sweep(self._hooks.folder() / _HELD)

    def forked(self) -> None:
        self._held.clear()  # they are the parent's

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
        self.hold(error, "task", f"{type_name(type(error))} in task {tasks.name_of(task)} of a group", task)

    def _left_process(self, process: Any, error: BaseException) -> None:
        if not self._hooks.removed and is_failure(error):
            name = vars(process).get("_name")
            why = f"uncaught {type_name(type(error))} in process {name if type(name) is str else '?'}"
            self._hooks.take(error, _TRACEBACK(error), "exception", why, last=True)

    def _nobody_awaits(self, context: Any) -> None:
        error = context.get("exception") if type(context) is dict else None
        if error is None or self._hooks.removed or not is_failure(error):
            return
        message = context.get("message")
        why = message[:200] if type(message) is str else f"{type_name(type(error))} in a task"
        self._hooks.take(error, _TRACEBACK(error), "task", why)


def _leaving(guard: Guard, before: Callable[..., Any]) -> Callable[..., Any]:
    """A method out of which exceptions leave a loop. Its own frame is taken out of the traceback again."""

    @functools.wraps(before)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return before(*args, **kwargs)
        except BaseException as error:
            guard._left_loop(error)  # noqa: SLF001 (of this module)
            trace = _TRACEBACK(error)
            if trace is not None and trace.tb_frame is sys._getframe():  # noqa: SLF001 (the documented way)
                _SET_TRACEBACK(error, trace.tb_next)
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
                trace = _TRACEBACK(error)
                if trace is not None and trace.tb_frame is sys._getframe():  # noqa: SLF001 (the documented way)
                    _SET_TRACEBACK(error, trace.tb_next)
                guard._left_process(process, error)  # noqa: SLF001 (of this module)
                raise

        process.run = watched
        return before(process, *args, **kwargs)

    return wrapper


def _on_task_done(guard: Guard, before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def wrapper(group: Any, task: Any) -> Any:
        error = tasks.field(task, "_exception")
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
    return any(is_failure(member) for member in exceptions.members_of(error))


def _all_members(error: BaseException) -> list[BaseException]:
    found = list(exceptions.members_of(error))
    for member in found:
        found += exceptions.members_of(member)
        if len(found) > 1000:
            break
    return found


def place_of(error: BaseException, traceback: types.TracebackType | None) -> tuple[str, str, int]:
    """What it is and where it was raised: failures alike are not dumped for ever."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    file, line = (traceback.tb_frame.f_code.co_filename, traceback.tb_lineno) if traceback is not None else ("", 0)
    return type_name(type(error)), str(file), line


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _sweep(folder: Path) -> None:
    """Remove what processes that are gone had held, and the folder when it is empty."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            pid = entry.name.split("-")[1] if entry.name.count("-") > 1 else ""
            if entry.name.endswith(kinds.SUFFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
                _remove(Path(entry.path))
        folder.rmdir()
