"""asyncio: every task of every loop, with the stack on which it waits.

Must not know files. Holds always: asyncio is not imported when the program has not; the registry of tasks is read
without its code, because a thread may be inside it.
"""

from __future__ import annotations

import os
import sys
import types
from time import monotonic
from typing import Any, NamedTuple

from holdfast.crash.exceptions import traceback_of
from holdfast.crash.limits import MAX_NAME, MAX_TASKS, Limits
from holdfast.crash.redaction import Redactor
from holdfast.crash.shapes import exact_text, find, frame_locals, is_subtype, layout_of, type_name, weak_members
from holdfast.crash.stacks import Frames, Step, steps_of_traceback
from holdfast.crash.walk import Walker

_MAX_AWAITS = 200
# Of one quick look: what one container, one value and one text may take of it.
_LOOK_ITEMS = 50
_LOOK_DEPTH = 4
_LOOK_TEXT = 500


class Seen(NamedTuple):
    """Tasks as they were at one moment: their records, and the objects in them, whose numbers are below ``first``."""

    records: list[dict[str, Any]]
    more: int  # tasks that there was no time for
    pieces: list[tuple[int, list[str], list[Any], list[Any]]]
    first: int
    files: dict[str, list[int]]
    redactor: Redactor  # it has learnt what was hidden


def look(failed: Any, within_s: float) -> Seen:
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
    stacks = []
    for task in live:
        if monotonic() > until:
            break
        record, steps = _record(task, frames, places)
        found.append(record)
        stacks.append(steps)
    add_locals(found, stacks, frames, walker, limits)
    walker.flush()
    first = walker.count
    walker.release()
    return Seen(found, len(live) - len(found), pieces, first, frames.files, redactor)


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
        for loop in _loops():
            found.update((id(task), task) for task in every(loop))
    return [task for task in found.values() if field(task, "_state") not in ("FINISHED", "CANCELLED")][:MAX_TASKS]


def field(task: Any, name: str) -> Any:
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


def name_of(task: Any) -> str:
    accelerated = sys.modules.get("_asyncio")
    if accelerated is not None and is_subtype(type(task), accelerated.Task):
        return exact_text(accelerated.Task.get_name(task), MAX_NAME)
    return exact_text(field(task, "_name"), MAX_NAME)


def steps_of(task: Any) -> tuple[list[Step], Any]:
    """The frames on which a task waits, outermost first, and the thing at the end that it waits for.

    Of one that has failed: where that was.
    """
    error = field(task, "_exception")
    if error is not None:
        return steps_of_traceback(traceback_of(error)), None
    steps: list[Step] = []
    current = field(task, "_coro")
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
    waiter = field(task, "_fut_waiter")
    return steps, waiter


def records(tasks: list[Any], frames: Frames) -> tuple[list[dict[str, Any]], list[list[Step]]]:
    """A record for each task, without locals; and the steps, for those who add them."""
    places = {id(task): number for number, task in enumerate(tasks)}
    made = [_record(task, frames, places) for task in tasks]
    return [record for record, _ in made], [steps for _, steps in made]


def _record(task: Any, frames: Frames, places: dict[int, int]) -> tuple[dict[str, Any], list[Step]]:
    """One task, without locals; ``places``: of the tasks that have a record."""
    current = _current_tasks()
    steps, waiter = steps_of(task)
    shown, left_out, kept = frames.records(steps)
    record: dict[str, Any] = {
        "name": name_of(task),
        "state": "failed"
        if field(task, "_exception") is not None
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
        children = field(waiter, "_children")
        if type(children) is list:
            record["waits_for_tasks"] = [places[id(child)] for child in children[:1000] if id(child) in places]
    if field(task, "_must_cancel") is True:
        record["cancelling"] = True
    return record, kept


def add_locals(
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
        found += [task for task in map(current, _loops()) if task is not None]
    return found


def _loops() -> list[Any]:
    """Event loops that run now, in any thread."""
    module = sys.modules.get("asyncio.base_events")
    code = module.BaseEventLoop.run_forever.__code__ if module is not None else None
    found: dict[int, Any] = {}
    for start in sys._current_frames().values():  # noqa: SLF001 (the documented way)
        frame: types.FrameType | None = start
        while frame is not None:
            named = frame_locals(frame, 10) if frame.f_code is code else None
            loop = dict(named[0]).get("self") if named else None
            if loop is not None:
                found[id(loop)] = loop
            frame = frame.f_back
    return [*found.values()]
