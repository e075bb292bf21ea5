"""Stacks: threads, tasks and exceptions, from what the interpreter holds to plain records.

Must not know files or the order of parts. Holds always: a stack is written outermost first; where frames are left out,
they are in the middle, and counted; locals go through the walker; no `__str__` of the program runs; a chain of
exceptions that goes in circles, or on for ever, ends at its bound and says so; asyncio is not imported when the program
has not, and its registry of tasks is read without its code, because a thread may be inside it.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import types
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

from holdfast.crash.kinds import MAX_CHAIN, MAX_NAME, MAX_NOTES, MAX_TASKS, MAX_THREADS, Limits
from holdfast.crash.redaction import Redactor
from holdfast.crash.shapes import (
    exact_text,
    find,
    frame_locals,
    is_subtype,
    layout_of,
    overrides,
    type_name,
    weak_members,
)
from holdfast.crash.walk import Walker

Step = tuple[types.FrameType, int]  # a frame, and the instruction at which it stands


def steps_of_traceback(traceback: types.TracebackType | None) -> list[Step]:
    """Outermost first. The frames under the handler are in it only as far as the exception has travelled."""
    steps = []
    while traceback is not None:
        steps.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return steps


def steps_of_frame(frame: types.FrameType | None) -> list[Step]:
    """A running or suspended frame and its callers, outermost first."""
    steps = []
    while frame is not None:
        steps.append((frame, frame.f_lasti))
        frame = frame.f_back
    steps.reverse()
    return steps


def whole_stack(traceback: types.TracebackType | None) -> list[Step]:
    """Where an exception was raised, and who had called the frame that it has reached so far."""
    inner = steps_of_traceback(traceback)
    if not inner:
        return []
    return steps_of_frame(inner[0][0].f_back) + inner


class Frames:
    """Turns frames into records, remembers which files they name."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._library = tuple(library_paths())
        self._mine: dict[str, bool] = {}
        self.files: dict[str, list[int]] = {}  # file -> lines that stacks stand at

    def record(self, step: Step) -> dict[str, Any]:
        """Everything of a frame but its locals."""
        frame, instruction = step
        code = frame.f_code
        file = exact_text(code.co_filename, 4096)
        line, end, column, end_column = _position(code, instruction)
        line = line or frame.f_lineno or code.co_firstlineno
        lines = self.files.setdefault(file, [])
        if len(lines) < 1000:
            lines.append(line)
        return {
            "file": file,
            "line": line,
            "span": [end or line, column or 0, end_column or 0],
            "function": exact_text(code.co_qualname, MAX_NAME),
            "first": code.co_firstlineno,
            "mine": self.is_mine(file),
        }

    def is_mine(self, file: str) -> bool:
        """Whether a file is the program's own: not the interpreter's, an installed package's or Holdfast's."""
        known = self._mine.get(file)
        if known is None:
            known = self._mine[file] = not is_library(file, self._library)
        return known

    def records(self, steps: list[Step]) -> tuple[list[dict[str, Any]], int, list[Step]]:
        """Records of a stack, how many frames were left out, and the steps of those that are there."""
        most = self._limits.frames
        left_out = max(0, len(steps) - most)
        if left_out:
            outer = most // 4
            steps = steps[:outer] + steps[len(steps) - (most - outer) :]
        found = [self.record(step) for step in steps]
        if left_out:
            found[most // 4]["gap"] = left_out  # this many frames stood between it and the one before
        return found, left_out, steps

    def add_locals(
        self, records: list[dict[str, Any]], steps: list[Step], walker: Walker, *, items: int, part: float = 0.5
    ) -> None:
        """Locals of each frame, innermost first; each may use a part of what is left."""
        for record, (frame, _instruction) in zip(reversed(records), reversed(steps), strict=True):
            found = frame_locals(frame, items)
            if found is None:
                record["hidden"] = "reading its namespace would run the program's code"
                continue
            named, total = found
            if frame.f_code.co_name == "<module>":
                named = [pair for pair in named if not _is_dull_global(*pair)]
                total = len(named)
            record["locals"] = walker.roots(named, walker.share(items=items, part=part))
            if total > len(named):
                record["locals_total"] = total


def _is_dull_global(name: str, value: Any) -> bool:
    """Of a module's own frame, its values matter; what it imported and defined is in its source."""
    dunder = name.startswith("__") and name.endswith("__")
    return dunder or type(value) is types.ModuleType or type(value) is types.FunctionType or type(value) is type


def threads(most: int = MAX_THREADS) -> list[dict[str, Any]]:
    """All threads with a Python frame: ``frame`` (not part of a record), and name, ids and kind."""
    frames = sys._current_frames()  # noqa: SLF001 (the documented way)
    known = {ident: thread for ident, thread in list(vars(threading)["_active"].items()) if type(ident) is int}
    own = threading.get_ident()
    main = threading.main_thread()
    found = []
    for ident, frame in list(frames.items())[:most]:
        thread = known.get(ident)
        record: dict[str, Any] = {"id": ident, "name": "", "frame": frame, "current": ident == own}
        if thread is not None and is_subtype(type(thread), threading.Thread):
            fields = layout_of(type(thread)).instance_dict(thread) or {}
            record["name"] = exact_text(find(fields, "_name"), MAX_NAME)
            record["daemon"] = find(fields, "_daemonic") is True
            native = find(fields, "_native_id")
            record["native_id"] = native if type(native) is int else 0
            record["main"] = thread is main
        found.append(record)
    return found


def _position(code: types.CodeType, instruction: int) -> tuple[int | None, int | None, int | None, int | None]:
    if instruction < 0:
        return code.co_firstlineno, None, None, None
    for index, position in enumerate(code.co_positions()):
        if index == instruction // 2:
            return position
    return None, None, None, None


def library_paths() -> list[str]:
    """Folders of the interpreter, of installed packages, and of Holdfast. A prefix may hold the program, too."""
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [__file__.rpartition("/crash/")[0], threading.__file__.rpartition("/")[0]]
    return [*dict.fromkeys(path.rstrip("/") + "/" for path in found if len(path) > 5)]


def is_library(file: str, folders: tuple[str, ...]) -> bool:
    """Whether a file belongs to one of these folders, or to a package installed elsewhere; or is none at all."""
    inside = file.startswith(folders) or "/site-packages/" in file or "/dist-packages/" in file
    command = file.rpartition("/")[0].endswith("/bin") and not file.endswith(".py")  # what an installer writes
    return inside or command or (file.startswith("<") and file != "<stdin>")


# -- exceptions -------------------------------------------------------------------------------------------------------


_READ = BaseException.__dict__
_ARGS = _READ["args"].__get__
_CAUSE = _READ["__cause__"].__get__
_CONTEXT = _READ["__context__"].__get__
_SUPPRESS = _READ["__suppress_context__"].__get__
_TRACEBACK = _READ["__traceback__"].__get__
_MEMBERS = BaseExceptionGroup.__dict__["exceptions"].__get__
_GROUP_MESSAGE = BaseExceptionGroup.__dict__["message"].__get__
_FRAMES_EACH = 60  # frames of an exception in the chain; the failing thread's stack has more
_FRAMES_OUTER = 10  # of these, the outermost


def exception_tree(error: BaseException) -> list[BaseException]:
    """The exception and all that it names, each once. Their order is that of the record's ``chain``."""
    found = [error]
    known = {id(error)}
    for this in found:
        for other in (_CAUSE(this), _CONTEXT(this), *members_of(this)):
            if other is not None and id(other) not in known and len(found) < MAX_CHAIN:
                known.add(id(other))
                found.append(other)
    return found


def chain_record(chain: list[BaseException], frames: Frames, limits: Limits) -> dict[str, Any]:
    """A tree as a flat list; ``cause``, ``context`` and ``group`` are places in it."""
    places = {id(error): number for number, error in enumerate(chain)}
    found = []
    for this in chain:
        entry = _one(this, frames, limits)
        entry["cause"] = places.get(id(_CAUSE(this)))
        entry["context"] = places.get(id(_CONTEXT(this)))
        entry["suppressed"] = bool(_SUPPRESS(this))
        if _is_group(this):
            members = members_of(this)
            entry["members"] = len(members)
            entry["group"] = [places[id(member)] for member in members if id(member) in places]
        found.append(entry)
    return {"chain": found, "cut": len(chain) >= MAX_CHAIN}


def by_worth(chain: list[BaseException]) -> list[int]:
    """Places in the order of what they tell: where it began, the way from there, the last one, then all others."""
    places = {id(error): number for number, error in enumerate(chain)}
    way: list[int] = []
    at: int | None = 0
    while at is not None and at not in way:
        way.append(at)
        cause = _CAUSE(chain[at])
        before = cause if cause is not None or _SUPPRESS(chain[at]) else _CONTEXT(chain[at])
        at = places.get(id(before if before is not None else next(iter(members_of(chain[at])), None)))
    return [*reversed(way), *(number for number in range(len(chain)) if number not in way)]


def traceback_records(error: BaseException, frames: Frames) -> tuple[list[dict[str, Any]], int, list[Step]]:
    """Records of an exception's own traceback, how many frames were left out, and the steps of the others."""
    steps = steps_of_traceback(traceback_of(error))
    left_out = max(0, len(steps) - _FRAMES_EACH)
    if left_out:
        steps = steps[:_FRAMES_OUTER] + steps[left_out + _FRAMES_OUTER :]
    found = [frames.record(step) for step in steps]
    if left_out:
        found[_FRAMES_OUTER]["gap"] = left_out
    return found, left_out, steps


def message_of(error: BaseException, limit: int) -> tuple[str, bool]:
    """The text that the exception would show, made from its fields; and whether its class has another idea of it."""
    cls = type(error)
    own = overrides(cls, "__str__", BaseException)
    if _is_group(error):
        text = _GROUP_MESSAGE(error)
        return (text[:limit] if type(text) is str else "", False)
    args = _ARGS(error)
    fields = dict(pair for pair in layout_of(cls).attributes(error, 50)[0] if type(pair[0]) is str)
    number, text = fields.get("errno"), fields.get("strerror")
    if type(number) is int and type(text) is str:
        names = [fields[name] for name in ("filename", "filename2") if type(fields.get(name)) is str]
        return f"[Errno {number}] {text[:limit]}" + "".join(f": {name[:1000]!r}" for name in names), False
    plain = [_shown(arg, limit) for arg in args[:20]]
    if len(plain) == 1:
        only = args[0]
        bare = type(only) is str and not overrides_key_error(cls)
        return (only[:limit] if bare else plain[0]), own and not _is_builtin(cls)
    return (f"({', '.join(plain)})" if plain else ""), own and not _is_builtin(cls)


def traceback_of(error: BaseException) -> TracebackType | None:
    found: TracebackType | None = _TRACEBACK(error)
    return found


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """The members of a group; of any other exception none."""
    members = _MEMBERS(error) if _is_group(error) else ()
    return members if type(members) is tuple else ()


def overrides_key_error(cls: type) -> bool:
    return any(base is KeyError for base in type.__dict__["__mro__"].__get__(cls))


def _shown(value: Any, limit: int) -> str:
    kind = type(value)
    if kind is str or kind is bytes:
        return repr(value[:limit])
    if kind is int:
        return str(value) if value.bit_length() < 4096 else "a large integer"
    if value is None or kind is bool or kind is float:
        return repr(value)
    return f"<{type_name(kind)}>"


def _is_builtin(cls: type) -> bool:
    return "." not in type_name(cls)


def _is_group(error: BaseException) -> bool:
    return any(base is BaseExceptionGroup for base in type.__dict__["__mro__"].__get__(type(error)))


def _one(error: BaseException, frames: Frames, limits: Limits) -> dict[str, Any]:
    cls = type(error)
    message, own = message_of(error, limits.text_chars)
    shown, left_out, _steps = traceback_records(error, frames)
    entry: dict[str, Any] = {
        "type": type_name(cls),
        "bases": [type_name(base) for base in type.__dict__["__mro__"].__get__(cls)[1:-1]][:20],
        "message": message,
        "frames": shown,
    }
    if own:
        entry["own_str"] = True  # the class has a __str__ of its own, which was not run
    if left_out:
        entry["left_out"] = left_out
    fields = layout_of(cls).instance_dict(error)
    notes = find(fields, "__notes__") if fields is not None else None
    if type(notes) is list:
        entry["notes"] = [_shown(note, limits.text_chars) if type(note) is not str else note[: limits.text_chars]
                          for note in notes[:MAX_NOTES]]  # fmt: skip
    return entry


# -- asyncio tasks ----------------------------------------------------------------------------------------------------


_MAX_AWAITS = 200
# Of one quick look: what one container, one value and one text may take of it.
_LOOK_ITEMS = 50
_LOOK_DEPTH = 4
_LOOK_TEXT = 500


class TaskSnapshot(NamedTuple):
    """Tasks as they were at one moment: their records, and the objects in them, whose numbers are below ``first``."""

    records: list[dict[str, Any]]
    more: int  # tasks that there was no time for
    pieces: list[tuple[int, list[str], list[Any], list[Any]]]
    first: int
    files: dict[str, list[int]]
    redactor: Redactor  # it has learnt what was hidden


def look_at_tasks(failed: Any, within_s: float) -> TaskSnapshot:
    """The tasks now, for so long at most, with the values nearest to them; the one that failed first, if any."""
    until = monotonic() + within_s
    limits = Limits(items=_LOOK_ITEMS, items_elsewhere=_LOOK_ITEMS, depth=_LOOK_DEPTH, text_chars=_LOOK_TEXT)
    redactor = Redactor(dict(os.environ))
    pieces: list[tuple[int, list[str], list[Any], list[Any]]] = []

    def emit(first: int, types: list[str], shapes: list[Any], nodes: list[Any]) -> bool:
        pieces.append((first, types, shapes, nodes))
        return True

    walker = Walker(redactor, limits, until, emit)
    frames = Frames(limits)
    live = live_tasks()
    if failed is not None:
        live.insert(0, failed)
    places = {id(task): number for number, task in enumerate(live)}
    found: list[dict[str, Any]] = []
    kept = []
    for task in live:
        if monotonic() > until:
            break
        record, steps = _task_record(task, frames, places)
        found.append(record)
        kept.append(steps)
    add_task_locals(found, kept, frames, walker, limits)
    walker.flush()
    first = walker.count
    walker.release()
    return TaskSnapshot(found, len(live) - len(found), pieces, first, frames.files, redactor)


def in_loop() -> bool:
    """Whether an event loop runs in this thread."""
    module = sys.modules.get("asyncio.events")
    return module is not None and module._get_running_loop() is not None  # noqa: SLF001 (the documented one)


def live_tasks() -> list[Any]:
    """All tasks that are not done, in no order."""
    module = sys.modules.get("asyncio.tasks")
    if module is None:
        return []
    fields = module.__dict__
    found: dict[int, Any] = {}
    for name in ("_all_tasks", "_scheduled_tasks"):
        weakset = fields.get(name)
        if weakset is not None:
            found.update((id(task), task) for task in weak_members(weakset))
    eager = fields.get("_eager_tasks")
    if type(eager) is set:
        found.update((id(task), task) for task in list(eager))
    every = fields.get("all_tasks")
    if type(every) is types.BuiltinFunctionType:  # since 3.14: the interpreter has a list of its own, and gives it
        found.update((id(task), task) for task in _listed_tasks(every))
    return [task for task in found.values() if task_field(task, "_state") not in ("FINISHED", "CANCELLED")][:MAX_TASKS]


def task_field(task: Any, name: str) -> Any:
    """A field of a task or future, by the C type's own descriptor or from the instance."""
    cls = type(task)
    accelerated = sys.modules.get("_asyncio")
    if accelerated is not None:
        for base in (accelerated.Task, accelerated.Future):
            if is_subtype(cls, base):
                getter = base.__dict__.get(name)
                if type(getter) is types.GetSetDescriptorType:
                    try:
                        return getter.__get__(task)
                    except (AttributeError, TypeError):
                        return None
    fields = layout_of(cls).instance_dict(task)
    return find(fields, name) if fields is not None else None


def task_name(task: Any) -> str:
    accelerated = sys.modules.get("_asyncio")
    if accelerated is not None and is_subtype(type(task), accelerated.Task):
        return exact_text(accelerated.Task.get_name(task), MAX_NAME)
    return exact_text(task_field(task, "_name"), MAX_NAME)


def steps_of_task(task: Any) -> tuple[list[Step], Any]:
    """The frames on which a task waits, outermost first, and the thing at the end that it waits for.

    Of one that has failed: where that was.
    """
    error = task_field(task, "_exception")
    if error is not None:
        return steps_of_traceback(traceback_of(error)), None
    steps: list[Step] = []
    current = task_field(task, "_coro")
    for _ in range(_MAX_AWAITS):
        kind = type(current)
        if kind is types.CoroutineType:
            frame, following = current.cr_frame, current.cr_await
        elif kind is types.GeneratorType:
            frame, following = current.gi_frame, current.gi_yieldfrom
        elif kind is types.AsyncGeneratorType:
            frame, following = current.ag_frame, current.ag_await
        else:
            break
        if frame is not None:
            steps.append((frame, frame.f_lasti))
        if following is None:
            break
        current = following
    waiter = task_field(task, "_fut_waiter")
    return steps, waiter


def task_records(tasks: list[Any], frames: Frames) -> tuple[list[dict[str, Any]], list[list[Step]]]:
    """A record for each task, without locals; and the steps, for those who add them."""
    places = {id(task): number for number, task in enumerate(tasks)}
    made = [_task_record(task, frames, places) for task in tasks]
    return [record for record, _ in made], [steps for _, steps in made]


def _task_record(task: Any, frames: Frames, places: dict[int, int]) -> tuple[dict[str, Any], list[Step]]:
    """One task, without locals; ``places``: of the tasks that have a record."""
    current = _current_tasks()
    steps, waiter = steps_of_task(task)
    shown, left_out, kept = frames.records(steps)
    record: dict[str, Any] = {
        "name": task_name(task),
        "state": "failed"
        if task_field(task, "_exception") is not None
        else "running"
        if any(task is other for other in current)
        else "waiting"
        if waiter is not None
        else "ready",
        "frames": shown,
        "left_out": left_out,
        "type": type_name(type(task)),
    }
    if waiter is not None:
        record["waits_for"] = type_name(type(waiter))
        if id(waiter) in places:
            record["waits_for_task"] = places[id(waiter)]
        children = task_field(waiter, "_children")
        if type(children) is list:
            record["waits_for_tasks"] = [places[id(child)] for child in children[:1000] if id(child) in places]
    if task_field(task, "_must_cancel") is True:
        record["cancelling"] = True
    return record, kept


def add_task_locals(
    found: list[dict[str, Any]], stacks: list[list[Step]], frames: Frames, walker: Walker, limits: Limits
) -> None:
    """Locals of the tasks' frames; each task may use a small part of what is left."""
    for record, steps in zip(found, stacks, strict=True):
        if walker.exhausted():
            record["locals_cut"] = True
            continue
        frames.add_locals(record["frames"], steps, walker, items=limits.items_elsewhere, part=0.05)


def _current_tasks() -> list[Any]:
    module = sys.modules.get("asyncio.tasks")
    if module is None:
        return []
    running = module.__dict__.get("_current_tasks")
    found = [value for _key, value in list(dict.items(running))] if type(running) is dict else []
    if type(module.__dict__.get("all_tasks")) is types.BuiltinFunctionType:  # since 3.14, as above
        current = module.__dict__["current_task"]
        found += [task for task in map(current, loops("run_forever")) if task is not None]
    return found


def _listed_tasks(every: Any) -> list[Any]:
    """Tasks that are in no registry. Whoever gives the list asks each for its loop and whether it is done.

    Where the program has methods of its own for that, tasks are looked for among all objects instead.
    """
    base = sys.modules["_asyncio"].Task
    known = [base]
    for kind in known:
        known += type.__subclasses__(kind)
    if any(overrides(kind, name, base) for kind in known[1:] for name in ("done", "get_loop")):
        kinds_of = set(map(id, known))
        return [one for one in gc.get_objects() if id(type(one)) in kinds_of]
    return [task for loop in loops("run_forever", "run_until_complete", "run", "wrapper") for task in every(loop)]


def loops(*functions: str) -> list[Any]:
    """Event loops that run in any thread, or that an exception has just left: whose functions are on its stack."""
    events, runners = sys.modules.get("asyncio.base_events"), sys.modules.get("asyncio.runners")
    found: dict[int, Any] = {}
    for start in sys._current_frames().values() if events is not None else ():  # noqa: SLF001 (the documented way)
        for frame, _instruction in steps_of_frame(start):
            if frame.f_code.co_name in functions:
                named = dict((frame_locals(frame, 10) or ([], 0))[0])
                given = named.get("args")  # of the function that guard.py puts around one
                first = given[0] if type(given) is tuple and given else named.get("self")
                if runners is not None and type(first) is runners.Runner:
                    first = find(layout_of(type(first)).instance_dict(first) or {}, "_loop")
                if events is not None and is_subtype(type(first), events.BaseEventLoop):
                    found[id(first)] = first
    return [*found.values()]
