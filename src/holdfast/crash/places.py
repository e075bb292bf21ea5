"""Where one can stand in a dump, and what can be named from there: the part that debugger and editor share.

Must not know how anything is shown. Holds always: a text that somebody types is a path, never code; every list that is
made here is bounded by the file's content or by a constant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.dump import Dump
from holdfast.crash.records import Frame, Gone, Hit, Ref, Value
from holdfast.errors import BadOption, NotInDump

THREAD, TASK, EXCEPTION = "thread", "task", "exception"
# Parts that are plain records. Objects, stacks and sources have views of their own.
PLAIN_PARTS = (kinds.HEAD, kinds.PROCESS, kinds.DESCRIPTORS, kinds.ENVIRONMENT, kinds.MODULES, kinds.HEAP)
EXTRA_PARTS = (kinds.AGENT, kinds.LOCKS, kinds.NATIVE, kinds.NOTE)

_NUMBER = re.compile(r"\s*#(\d{1,12})")
_LAST_STEP = re.compile(r"(.*)([.\[])([^.\[\]]*)\Z", re.DOTALL)
_OFFERED = 200  # completions; nobody reads more
_DEEPEST = 100  # levels of plain data that a search goes down


@dataclass(frozen=True)
class Stack:
    """Frames that belong together, outermost first: of a thread, a task or an exception. ``number`` is its place."""

    kind: str
    number: int
    name: str
    note: str
    frames: tuple[Frame, ...]
    left_out: int = 0

    def inner(self) -> int:
        """The innermost frame that is the program's own, else the innermost; -1 without frames."""
        mine = [at for at, frame in enumerate(self.frames) if frame.mine]
        return mine[-1] if mine else len(self.frames) - 1


def threads(dump: Dump) -> list[Stack]:
    found = []
    for number, thread in enumerate(dump.threads):
        told = {"failing": thread.failing, "took the dump": thread.current and not thread.failing,
                "main": thread.main, "daemon": thread.daemon}  # fmt: skip
        note = ", ".join(word for word, holds in told.items() if holds)
        name = thread.name or f"thread {thread.id}"
        found.append(Stack(THREAD, number, name, note, thread.frames, thread.left_out))
    return found


def tasks(dump: Dump) -> list[Stack]:
    found = []
    for task in dump.tasks:
        note = task.state
        if task.waits_for_tasks:
            awaited = task.waits_for_tasks[:5]
            names = [dump.tasks[at].name if 0 <= at < len(dump.tasks) else f"task {at}" for at in awaited]
            more = len(task.waits_for_tasks) - len(names)
            note += " for " + ", ".join(names) + (f" and {more} more" if more else "")
        elif task.waits_for:
            note += f" for {task.waits_for}"
        note += ", being cancelled" if task.cancelling else ""
        found.append(Stack(TASK, task.number, task.name or f"task {task.number}", note, task.frames))
    return found


def exceptions(dump: Dump) -> list[Stack]:
    return [
        Stack(EXCEPTION, number, failure.type_name, "traceback", failure.frames)
        for number, failure in enumerate(dump.exceptions)
    ]


def stacks(dump: Dump) -> list[Stack]:
    """Threads, then tasks, then what led to the exception. Its own frames are the failing thread's, if there is one."""
    running = threads(dump) + tasks(dump)
    every = exceptions(dump)
    return running + [stack for stack in every[1:] if stack.frames] if running else every[:1]


def find(dump: Dump, frame: Frame | None, text: str) -> Value:
    """What a path names: ``offers[0].city`` in a frame, or ``#12.city`` from an object's number."""
    match = _NUMBER.match(text)
    if match:
        return dump.value(Ref(int(match[1])), text[match.end() :])
    if frame is None:
        raise NotInDump("there is no frame, so no names", hint="#12 names an object by its number.")
    return dump.local(frame, text)


def continuations(dump: Dump, frame: Frame | None, text: str) -> list[str]:
    """Paths that begin with the text: the next name, attribute or key."""
    text = text.lstrip()
    match = _LAST_STEP.match(text)
    if match is None:
        names = [name for name, _value in frame.locals] if frame is not None else []
        return [name for name in names if name.startswith(text)][:_OFFERED]
    base, sign, begun = match.groups()
    try:
        value = find(dump, frame, base)
    except (NotInDump, BadOption):
        return []
    if not isinstance(value, Ref):
        return []
    ways = (way for way, _value in dump.object(value).children())
    return [base + way for way in ways if way.startswith(sign + begun)][:_OFFERED]


def plain_parts(dump: Dump) -> dict[str, Any]:
    """Parts that are plain records, by their name for people; only those that are there."""
    found: dict[str, Any] = {kinds.PARTS[kind]: dump.part(kind) for kind in PLAIN_PARTS}
    found |= {kinds.PARTS[kind]: dump.extras(kind) or dump.part(kind) for kind in EXTRA_PARTS}
    found[kinds.PARTS[kinds.LOGS]] = dump.logs
    return {name: data for name, data in found.items() if data}


def plain_children(data: Any) -> Iterator[tuple[str, Any]]:
    """What a plain container holds, with the way to it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield str(key), value
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield f"[{index}]", value


def search(dump: Dump, text: str, limit: int) -> Iterator[Hit]:
    """Values of objects, locals, messages and logs, then those of the plain parts."""
    for hit in dump.search(text, limit=limit):
        limit -= 1
        yield hit
    wanted = text.casefold()
    for name, data in plain_parts(dump).items():
        if name == kinds.PARTS[kinds.LOGS]:
            continue
        for where, key, value in _leaves(data, name, "", _DEEPEST):
            if limit <= 0:
                return
            if wanted in key.casefold() or (isinstance(value, str) and wanted in value.casefold()):
                limit -= 1
                yield Hit(where, value)


def _leaves(data: Any, where: str, key: str, depth: int) -> Iterator[tuple[str, str, Value]]:
    if not isinstance(data, dict | list):
        known = data is None or isinstance(data, bool | int | float | str | bytes)
        yield where, key, data if known else Gone("broken entry")
    elif depth > 0:
        for way, value in plain_children(data):
            yield from _leaves(value, where + (way if way.startswith("[") else f" {way}"), way, depth - 1)
