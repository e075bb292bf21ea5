"""Threads, tasks, frames and exceptions of a dump as records, built from whatever a file holds.

Must not know files. Holds always: a field that is missing or of another type gets its default; nothing raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from holdfast.crash.inert import Seen, Value, named_values

_MAX_FRAMES = 20_000


@dataclass(frozen=True)
class Frame:
    """One frame. ``mine`` says that its file is the program's own."""

    file: str
    line: int
    function: str
    mine: bool = False
    first: int = 0
    span: tuple[int, int, int] = (0, 0, 0)  # last line, first and last column of the expression
    gap: int = 0  # frames that were left out between this one and the one before
    hidden: str = ""  # why there are no locals
    locals: tuple[tuple[str, Value], ...] = ()
    locals_total: int | None = None


@dataclass(frozen=True)
class Thread:
    """One thread. Frames are outermost first."""

    id: int
    name: str
    frames: tuple[Frame, ...]
    native_id: int = 0
    main: bool = False
    daemon: bool = False
    current: bool = False  # the thread that took the dump
    failing: bool = False
    left_out: int = 0


@dataclass(frozen=True)
class Task:
    """One asyncio task with the stack on which it waits."""

    number: int
    name: str
    state: str
    frames: tuple[Frame, ...]
    waits_for: str = ""
    waits_for_tasks: tuple[int, ...] = ()
    cancelling: bool = False


@dataclass(frozen=True)
class Failure:
    """One exception of the chain; ``cause``, ``context`` and ``group`` are places in ``Dump.exceptions``."""

    type_name: str
    message: str
    notes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    cause: int | None = None
    context: int | None = None
    suppressed: bool = False
    group: tuple[int, ...] = ()
    members: int = 0
    own_str: bool = False
    bases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Source text of a file, from line ``first`` on."""

    file: str
    first: int
    lines: tuple[str, ...]
    whole: bool
    changed: bool

    def line(self, number: int) -> str | None:
        at = number - self.first
        return self.lines[at] if 0 <= at < len(self.lines) else None


@dataclass(frozen=True)
class PartState:
    """How a part of the dump is: whole, cut, absent or damaged, and why."""

    kind: str
    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Hit:
    """A value that a search found, and where."""

    where: str
    value: Value
    number: int | None = None


def frames_of(raw: Any) -> tuple[Frame, ...]:
    return (
        tuple(frame_of(item) for item in raw[:_MAX_FRAMES] if isinstance(item, dict)) if isinstance(raw, list) else ()
    )


def frame_of(raw: dict[str, Any]) -> Frame:
    span = raw.get("span")
    numbers = [as_int(item) for item in span] if isinstance(span, list) and len(span) == 3 else [0, 0, 0]
    values = named_values(raw.get("locals"))
    if raw.get("locals_as_text") is True:
        values = tuple((name, Seen(value) if isinstance(value, str) else value) for name, value in values)
    return Frame(
        file=as_text(raw.get("file")),
        line=as_int(raw.get("line")),
        function=as_text(raw.get("function")),
        mine=raw.get("mine") is True,
        first=as_int(raw.get("first")),
        span=(numbers[0], numbers[1], numbers[2]),
        gap=as_int(raw.get("gap")),
        hidden=as_text(raw.get("hidden")),
        locals=values,
        locals_total=as_int(raw["locals_total"]) if "locals_total" in raw else None,
    )


def thread_of(raw: dict[str, Any]) -> Thread:
    return Thread(
        id=as_int(raw.get("id")),
        name=as_text(raw.get("name")),
        frames=frames_of(raw.get("frames")),
        native_id=as_int(raw.get("native_id")),
        main=raw.get("main") is True,
        daemon=raw.get("daemon") is True,
        current=raw.get("current") is True,
        failing=raw.get("failing") is True,
        left_out=as_int(raw.get("left_out")),
    )


def with_locals(threads: list[Thread], seen: Any) -> list[Thread]:
    """Threads whose frames have no locals, with those that a core's stacks have at the same places."""
    listed = seen.get("threads") if isinstance(seen, dict) else None
    others = [thread_of(item) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    known = {thread.native_id: thread.frames for thread in others}
    return [replace(thread, frames=_filled(thread.frames, known.get(thread.native_id, ()))) for thread in threads]


def _filled(frames: tuple[Frame, ...], known: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """From the innermost outwards, as far as both stacks are the same."""
    found = list(frames)
    for back in range(1, min(len(frames), len(known)) + 1):
        own, other = frames[-back], known[-back]
        # Names differ: one tells `Class.method`, the other `method`.
        if (own.file, own.line) != (other.file, other.line):
            break
        found[-back] = replace(own, hidden=other.hidden, locals=other.locals, locals_total=other.locals_total)
    return tuple(found)


def task_of(number: int, raw: dict[str, Any]) -> Task:
    waits = raw.get("waits_for_tasks")
    numbers = [as_int(item) for item in waits] if isinstance(waits, list) else []
    if "waits_for_task" in raw:
        numbers.append(as_int(raw["waits_for_task"]))
    return Task(
        number=number,
        name=as_text(raw.get("name")),
        state=as_text(raw.get("state")),
        frames=frames_of(raw.get("frames")),
        waits_for=as_text(raw.get("waits_for")),
        waits_for_tasks=tuple(numbers),
        cancelling=raw.get("cancelling") is True,
    )


def failure_of(raw: dict[str, Any]) -> Failure:
    notes, group, bases = raw.get("notes"), raw.get("group"), raw.get("bases")
    return Failure(
        type_name=as_text(raw.get("type")),
        message=as_text(raw.get("message")),
        notes=tuple(as_text(note) for note in notes) if isinstance(notes, list) else (),
        frames=frames_of(raw.get("frames")),
        cause=as_int(raw["cause"]) if isinstance(raw.get("cause"), int) else None,
        context=as_int(raw["context"]) if isinstance(raw.get("context"), int) else None,
        suppressed=raw.get("suppressed") is True,
        group=tuple(as_int(number) for number in group) if isinstance(group, list) else (),
        members=as_int(raw.get("members")),
        own_str=raw.get("own_str") is True,
        bases=tuple(as_text(base) for base in bases) if isinstance(bases, list) else (),
    )


def within(failure: Failure, count: int) -> Failure:
    """Places that point outside the chain are dropped: a hostile file must not lead a reader astray."""
    return replace(
        failure,
        cause=failure.cause if failure.cause is not None and 0 <= failure.cause < count else None,
        context=failure.context if failure.context is not None and 0 <= failure.context < count else None,
        group=tuple(number for number in failure.group if 0 <= number < count),
    )


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def as_int(value: Any) -> int:
    return value if type(value) is int else 0


def as_float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
