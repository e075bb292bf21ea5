"""What a dump holds, as typed records: objects, threads, tasks, frames, exceptions; and paths such as ``a.b[0]['c']``.

Owns the checks on everything that a file gives. Must not know files or text for people. Holds always: nothing is
imported, called or looked up by a name from the dump; a field that is missing or of another type gets its default; a
node that breaks the rules is shown as broken, without an error; a path is names and indexes, and is never evaluated.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.crash import kinds
from holdfast.errors import BadOption

# -- objects ---------------------------------------------------------------------------------------------------------


Plain = None | bool | int | float | str | bytes


@dataclass(frozen=True)
class Ref:
    """An object of the dump, by its number."""

    number: int


@dataclass(frozen=True)
class Gone:
    """A value that was not stored, and why."""

    reason: str
    type_name: str = ""


class Seen(str):
    """A value as a tool that read it from outside shows it: text that stands for a value, not a text that was one."""

    __slots__ = ()


Value = Plain | Ref | Gone


@dataclass(frozen=True)
class Inert:
    """One object. ``items`` for sequences and sets, ``pairs`` for mappings, ``attributes`` for everything."""

    number: int
    kind: int
    type_name: str
    text: str | bytes | None = None
    items: tuple[Value, ...] = ()
    pairs: tuple[tuple[Value, Value], ...] = ()
    attributes: tuple[tuple[str, Value], ...] = ()
    total: int | None = None  # how many items, characters or bytes there were, when not all are here
    left: int = 0  # items, pairs or attributes that are stored and were not asked for
    reason: str = ""  # why the content is not here
    details: dict[str, Any] = field(default_factory=dict)  # file and line of a function, shape of an array

    def attribute(self, name: str) -> Value:
        """The attribute's value; Gone when there is none of that name."""
        for key, value in self.attributes:
            if key == name:
                return value
        return Gone("no such attribute")

    def children(self) -> Iterator[tuple[str, Value]]:
        """Every value below, with the way to it: ``[3]``, ``['name']``, ``.attribute``."""
        for index, value in enumerate(self.items):
            yield f"[{index}]", value
        for key, value in self.pairs:
            yield f"[{key_text(key)}]", value
        for name, value in self.attributes:
            yield f".{name}", value


def key_text(key: Value) -> str:
    """A key as it stands in a path."""
    if isinstance(key, Ref):
        return f"#{key.number}"
    if isinstance(key, Gone):
        return f"<{key.type_name or key.reason}>"
    return repr(key)


def value_of(entry: Any) -> Value:
    """An entry of the file as a value. Whatever it is, the answer is one of the three forms."""
    if entry is None or isinstance(entry, bool | int | float | str | bytes):
        return entry
    if isinstance(entry, list):
        if len(entry) == 1 and type(entry[0]) is int and entry[0] >= 0:
            return Ref(entry[0])
        if len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str):
            return Gone(kinds.REASONS.get(entry[0], f"reason {entry[0]}"), entry[1])
    return Gone("broken entry")


def named_values(flat: Any, most: int | None = None) -> tuple[tuple[str, Value], ...]:
    """Name, entry, name, entry -> pairs, the first ``most`` of them."""
    if not isinstance(flat, list):
        return ()
    end = len(flat) - 1 if most is None else min(len(flat) - 1, 2 * most)
    return tuple((str(flat[at]), value_of(flat[at + 1])) for at in range(0, end, 2))


def node(number: int, names: Any, shapes: Any, raw: Any, most: int | None = None) -> Inert:
    """A node of the file as an object; of a long one the first ``most`` items, pairs or attributes."""
    if not isinstance(raw, list) or len(raw) < 3 or not all(type(code) is int for code in raw[:2]):
        return Inert(number, kinds.CUT, "?", reason="broken node")
    kind, index = raw[0], raw[1]
    name = names[index] if isinstance(names, list) and 0 <= index < len(names) else "?"
    name = name if isinstance(name, str) else "?"
    rest = [*raw[2:], *[None] * 5]
    if kind == kinds.CUT:
        return Inert(number, kind, name, reason=kinds.REASONS.get(rest[0], "cut") if type(rest[0]) is int else "cut")
    if kind == kinds.TEXT and isinstance(rest[0], str | bytes):
        return Inert(number, kind, name, text=rest[0], total=_count(rest[1]), attributes=named_values(rest[2], most))
    if kind in (kinds.LITERAL, kinds.NAMED) and isinstance(rest[0], str):
        return Inert(number, kind, name, text=rest[0])
    if kind == kinds.LIST and isinstance(rest[0], list):
        items = tuple(value_of(entry) for entry in rest[0][:most])
        left, own = len(rest[0]) - len(items), named_values(rest[2], most)
        return Inert(number, kind, name, items=items, total=_count(rest[1]), left=left, attributes=own)
    if kind == kinds.DICT and isinstance(rest[0], list):
        values = [value_of(entry) for entry in (rest[0] if most is None else rest[0][: 2 * most])]
        pairs = tuple(zip(values[::2], values[1::2], strict=False))
        left, own = len(rest[0]) // 2 - len(pairs), named_values(rest[2], most)
        return Inert(number, kind, name, pairs=pairs, total=_count(rest[1]), left=left, attributes=own)
    if kind in (kinds.SHAPED_DICT, kinds.SHAPED_OBJECT) and isinstance(rest[1], list):
        shape = (
            shapes[rest[0]] if type(rest[0]) is int and isinstance(shapes, list) and 0 <= rest[0] < len(shapes) else []
        )
        keys = [_str(key) for key in shape[:most]] if isinstance(shape, list) else []
        named = tuple(zip(keys, map(value_of, rest[1][:most]), strict=False))
        left = min(len(shape), len(rest[1])) - len(named) if isinstance(shape, list) else 0
        if kind == kinds.SHAPED_DICT:
            return Inert(number, kinds.DICT, name, pairs=named, left=left)
        return Inert(number, kinds.OBJECT, name, attributes=named, left=left)
    if kind == kinds.OBJECT:
        own = named_values(rest[0], most)
        left = len(rest[0]) // 2 - len(own) if isinstance(rest[0], list) else 0
        return Inert(number, kind, name, attributes=own, left=left)
    if kind == kinds.CALLABLE:
        details = {"name": _str(rest[0]), "file": _str(rest[1]), "line": _count(rest[2]) or 0}
        return Inert(number, kind, name, attributes=named_values(rest[3], most), details=details)
    if kind == kinds.ARRAY:
        shape = [length for length in rest[1] if type(length) is int] if isinstance(rest[1], list) else []
        details = {"dtype": _str(rest[0]), "shape": shape, "bytes": _count(rest[2]) or 0}
        items = tuple(value_of(entry) for entry in rest[3][:most]) if isinstance(rest[3], list) else ()
        left = len(rest[3]) - len(items) if isinstance(rest[3], list) else 0
        return Inert(number, kind, name, items=items, left=left, details=details)
    if kind == kinds.SUSPENDED:
        details = {"name": _str(rest[0]), "file": _str(rest[1]), "line": _count(rest[2]) or 0, "state": _str(rest[3])}
        return Inert(number, kind, name, attributes=named_values(rest[4], most), details=details)
    return Inert(number, kinds.CUT, name, reason="broken node")


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


# -- threads, tasks, frames, exceptions ------------------------------------------------------------------------------


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


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_int(value: Any) -> int:
    return value if type(value) is int else 0


def as_float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


# -- paths -----------------------------------------------------------------------------------------------------------


_NAME = re.compile(r"\s*([^\W\d]\w*)\s*")
_STEP = re.compile(
    r"""\s*(?:\.\s*([^\W\d]\w*|<\w+>)|\[\s*(-?\d{1,18}|b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|None|True|False)\s*\])"""
)

Key = int | str | bytes | None
Step = tuple[str | None, Key]


def split_name(path: str) -> tuple[str, str]:
    """``self.items[3]`` -> ``self`` and ``.items[3]``."""
    match = _NAME.match(path)
    if match is None:
        raise BadOption(f"{path!r} does not begin with a name", hint="Write a path like messages[0]['role'].")
    return match[1], path[match.end() :]


def steps(path: str) -> Iterator[tuple[Step, str]]:
    """Each step of a path: (attribute name, None) or (None, key), with its text."""
    at = 0
    while at < len(path.rstrip()):
        match = _STEP.match(path, at)
        if match is None:
            raise BadOption(f"{path[at:]!r} is not an attribute or an index", hint="Paths have names, [3] and ['key'].")
        at = match.end()
        yield ((match[1], None) if match[1] else (None, literal_eval(match[2]))), match[0].strip()
