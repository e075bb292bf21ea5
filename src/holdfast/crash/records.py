"""What a dump holds, as typed records: the one model that every reader of dumps shares.

Owns the checks on everything that a file gives. Must not know files or text for people. Holds always: nothing is
imported, called or looked up by a name from the dump; a field that is missing or of another type gets its default; a
node that breaks the rules is shown as broken, without an error; a path is names and indexes, and is never evaluated.
"""

from __future__ import annotations

import math
import re
import types
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.crash import kinds
from holdfast.errors import BadOption

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# -- from a file's data to records -----------------------------------------------------------------------------------


Record = TypeVar("Record", bound="DataclassInstance")
Taker = Callable[[Any], Any]  # from a file's data to a field's value; None when it is of another type

_MOST = 20_000  # of one list: frames of a stack, members of a group


def given(*path: str, by: Taker | None = None, default: Any = None) -> Any:
    """A field that lies elsewhere in the file's data than under its own name, or is read by a function of its own.

    Without a path the function gets the whole record.
    """
    return field(default=default, metadata={"path": path, "by": by})


def read(kind: type[Record], raw: Any) -> Record:
    """A record from what a file gives, whatever that is. What the class has no field for is not looked at."""
    found = {}
    for name, path, take in _plan(kind):
        value: Any = raw if isinstance(raw, dict) else {}
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        taken = take(value)
        if taken is not None:
            found[name] = taken
    return kind(**found)


def read_all(kind: type[Record], raw: Any) -> tuple[Record, ...]:
    """As ``read``, for each object of a list."""
    return tuple(read(kind, item) for item in as_list(raw)[:_MOST] if isinstance(item, dict))


@cache
def _plan(kind: type[DataclassInstance]) -> list[tuple[str, tuple[str, ...], Taker]]:
    hints = get_type_hints(kind)
    return [
        (one.name, one.metadata.get("path", (one.name,)), one.metadata.get("by") or _taker(hints[one.name]))
        for one in fields(kind)
    ]


def _taker(hint: Any) -> Taker:
    """What takes a field of that type, and nothing else."""
    if get_origin(hint) in (Union, types.UnionType):
        return _taker(get_args(hint)[0])
    if get_origin(hint) is tuple:
        each = get_args(hint)[0]
        if isinstance(each, type) and is_dataclass(each):
            return lambda value: read_all(each, value)
        inside = _taker(each)
        return lambda value: tuple(taken for item in as_list(value)[:_MOST] if (taken := inside(item)) is not None)
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: read(hint, value)
    return _PLAIN[get_origin(hint) or hint]


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value) else None


_PLAIN: dict[Any, Taker] = {
    str: lambda value: value if isinstance(value, str) else None,
    int: lambda value: value if type(value) is int else None,
    float: _finite,
    bool: lambda value: True if value is True else None,
    dict: lambda value: value if isinstance(value, dict) else None,
    list: lambda value: value if isinstance(value, list) else None,
    Any: lambda value: value,
}


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_int(value: Any) -> int:
    return value if type(value) is int else 0


def texts(value: Any) -> tuple[str, ...]:
    """One text, or those of a list."""
    return (value,) if isinstance(value, str) else tuple(item for item in as_list(value) if isinstance(item, str))


def number(value: Any) -> int:
    """A number of the kernel's, which is text; 0 for ``max`` and nonsense."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else 0


def _first_int(value: Any) -> int:
    return as_int(next(iter(as_list(value)), 0))


# -- objects ---------------------------------------------------------------------------------------------------------


Plain = None | bool | int | float | str | bytes


@dataclass(frozen=True)
class Ref:
    """An object of the dump, by its number."""

    number: int


@dataclass(frozen=True)
class Missing:
    """A value that was not stored, and why."""

    reason: str
    type_name: str = ""


class TextOnly(str):
    """A value as a tool that read it from outside shows it: text that stands for a value, not a text that was one."""

    __slots__ = ()


Value = Plain | Ref | Missing


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
        """The attribute's value; Missing when there is none of that name."""
        for key, value in self.attributes:
            if key == name:
                return value
        return Missing("no such attribute")

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
    if isinstance(key, Missing):
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
            return Missing(kinds.REASONS.get(entry[0], f"reason {entry[0]}"), entry[1])
    return Missing("broken entry")


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


def _span(value: Any) -> tuple[int, int, int] | None:
    return (as_int(value[0]), as_int(value[1]), as_int(value[2])) if len(as_list(value)) == 3 else None


def _locals(raw: Any) -> tuple[tuple[str, Value], ...]:
    values = named_values(raw.get("locals"))
    if raw.get("locals_as_text") is True:
        values = tuple((name, TextOnly(value) if isinstance(value, str) else value) for name, value in values)
    return values


@dataclass(frozen=True)
class Frame:
    """One frame. ``mine`` says that its file is the program's own."""

    file: str = ""
    line: int = 0
    function: str = ""
    mine: bool = False
    first: int = 0
    # Last line, first and last column of the expression.
    span: tuple[int, int, int] = given("span", by=_span, default=(0, 0, 0))
    gap: int = 0  # frames that were left out between this one and the one before
    hidden: str = ""  # why there are no locals
    locals: tuple[tuple[str, Value], ...] = given(by=_locals, default=())
    locals_total: int | None = None


def innermost(frames: Sequence[Frame]) -> int:
    """The place of the innermost frame that is the program's own, else of the innermost; -1 without frames."""
    own = [place for place, frame in enumerate(frames) if frame.mine]
    return own[-1] if own else len(frames) - 1


@dataclass(frozen=True)
class Thread:
    """One thread. Frames are outermost first."""

    id: int = 0
    name: str = ""
    frames: tuple[Frame, ...] = ()
    native_id: int = 0
    main: bool = False
    daemon: bool = False
    current: bool = False  # the thread that took the dump
    failing: bool = False
    left_out: int = 0


def _waits_for(raw: Any) -> tuple[int, ...]:
    single = [raw["waits_for_task"]] if "waits_for_task" in raw else []
    return tuple(map(as_int, [*as_list(raw.get("waits_for_tasks")), *single]))


@dataclass(frozen=True)
class Task:
    """One asyncio task with the stack on which it waits."""

    number: int = given("", default=0)
    name: str = ""
    state: str = ""
    frames: tuple[Frame, ...] = ()
    waits_for: str = ""
    waits_for_tasks: tuple[int, ...] = given(by=_waits_for, default=())
    cancelling: bool = False


@dataclass(frozen=True)
class Failure:
    """One exception of the chain; ``cause``, ``context`` and ``group`` are places in ``Dump.exceptions``."""

    type_name: str = given("type", default="")
    message: str = ""
    notes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    cause: int | None = None
    context: int | None = None
    suppressed: bool = False
    group: tuple[int, ...] = ()
    members: int = 0
    own_str: bool = False
    bases: tuple[str, ...] = ()

    @property
    def before(self) -> int | None:
        """The one that led to it, as a traceback shows them."""
        return self.cause if self.cause is not None or self.suppressed else self.context

    def within(self, count: int) -> Failure:
        """Places that point outside the chain are dropped: a hostile file must not lead a reader astray."""
        places = (self.cause, self.context)
        cause, context = (place if place is not None and 0 <= place < count else None for place in places)
        return replace(self, cause=cause, context=context, group=tuple(one for one in self.group if 0 <= one < count))


@dataclass(frozen=True)
class Source:
    """Source text of a file, from line ``first`` on."""

    file: str = ""
    first: int = given("first", by=lambda value: as_int(value) or None, default=1)
    lines: tuple[str, ...] = given("text", by=lambda value: tuple(as_text(value).splitlines()), default=())
    whole: bool = False
    changed: bool = False

    def line(self, number: int) -> str | None:
        place = number - self.first
        return self.lines[place] if 0 <= place < len(self.lines) else None


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
        return innermost(self.frames)


# -- the other parts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """What the dump is, and of which process."""

    id: str = ""
    why: str = ""
    trigger: str = ""
    at: float = 0.0
    host: str = ""
    pid: int = 0
    began: float = 0.0
    python: str = ""
    program: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """The process, its limits and its machine."""

    cwd: str = ""
    os: str = ""
    threads: int = 0
    cpus: int = 0
    load: tuple[float, ...] = ()
    process_s: float = 0.0
    executable: str = ""
    resident_bytes: int = given("memory", "VmRSS", default=0)
    peak_bytes: int = given("memory", "VmHWM", default=0)
    virtual_bytes: int = given("memory", "VmSize", default=0)
    swapped_bytes: int = given("memory", "VmSwap", default=0)
    machine_bytes: int = given("machine_memory", "MemTotal", default=0)
    machine_free_bytes: int = given("machine_memory", "MemAvailable", default=0)
    cgroup_bytes: int = given("cgroup", "memory.current", by=number, default=0)
    cgroup_limit_bytes: int = given("cgroup", "memory.max", by=number, default=0)
    cgroup_events: str = given("cgroup", "memory.events", default="")
    descriptors_limit: int = given("limits", "NOFILE", by=_first_int, default=0)
    virtual_limit_bytes: int = given("limits", "AS", by=_first_int, default=0)


@dataclass(frozen=True)
class Descriptor:
    """One open descriptor; of a socket what kind it is, and its state."""

    fd: int = 0
    target: str = ""
    socket: str = ""
    state: str = ""


@dataclass(frozen=True)
class Descriptors:
    """All of a process, as far as they were listed."""

    total: int = 0
    descriptors: tuple[Descriptor, ...] = ()

    @property
    def sockets(self) -> int:
        return sum(bool(one.socket) for one in self.descriptors)


def _rows(*kinds_of: type) -> Taker:
    """Rows of a table, those that have these columns."""
    takers = [_PLAIN[kind] for kind in kinds_of]

    def take(value: Any) -> tuple[tuple[Any, ...], ...]:
        wide = [row for row in as_list(value) if isinstance(row, list) and len(row) == len(takers)]
        return tuple(tuple(taker(cell) or kind() for taker, cell, kind in zip(takers, row, kinds_of, strict=True))
                     for row in wide)  # fmt: skip

    return take


_COUNTS = _rows(str, int, int)


@dataclass(frozen=True)
class Heap:
    """The census of a heap. Rows: name, objects or items, bytes."""

    objects: int = 0
    types: tuple[tuple[str, int, int], ...] = given("types", by=_COUNTS, default=())
    largest: tuple[tuple[str, int, int], ...] = given("largest", by=_COUNTS, default=())
    places: tuple[tuple[str, int, int], ...] = given("places", by=_COUNTS, default=())
    # Place, type, how many containers, their items, their bytes, the type of the first item.
    holders: tuple[tuple[str, str, int, int, int, str], ...] = given(
        "holders", by=_rows(str, str, int, int, int, str), default=()
    )


@dataclass(frozen=True)
class LogRecord:
    """One line of the program's log."""

    at: float = 0.0
    level: str = ""
    logger: str = ""
    text: str = ""


@dataclass(frozen=True)
class Effect:
    """One call outside, as the agent's ledger has it."""

    id: str = ""
    tool: str = ""
    args: Any = None
    status: str = ""
    at: float = 0.0
    outcome: Any = given(by=lambda raw: raw.get("error") or raw.get("result"))  # noqa: RUF009 (a field of dataclasses)


@dataclass(frozen=True)
class Checkpoint:
    """One of an agent's checkpoints."""

    checkpoint: str = ""
    label: str = ""
    depth: int = 0


def _status(raw: Any) -> str | None:
    """What had become of the run that is named."""
    runs = [one for one in as_list(raw.get("runs")) if isinstance(one, dict)]
    return next((as_text(one.get("status")) for one in reversed(runs) if one.get("id") == raw.get("run")), None)


@dataclass(frozen=True)
class Agent:
    """Where an agent stood when the dump was taken, and what it had done outside."""

    name: str = given("agent", default="")
    branch: str = ""
    store: str = ""
    checkpoint: str = ""
    label: str = ""
    depth: int = 0
    checkpoint_at: float = 0.0
    # The one that a run which is executed again had come to, where that is not the last one.
    stands_on: Checkpoint = Checkpoint()
    digest: str = ""
    digest_at_checkpoint: str = given("checkpoint_digest", default="")
    dirty: bool = False
    run: str = ""
    function: str = ""
    status: str = given(by=_status, default="")
    stack: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    in_doubt: tuple[Any, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Death:
    """How the process ended, from whoever outlived it."""

    what: str = ""
    evidence: tuple[str, ...] = given("evidence", by=texts, default=())
    stacks_age_s: float | None = None


def _cycle_lines(value: Any) -> tuple[str, ...]:
    cycles = (one.get("text") if isinstance(one, dict) else one for one in as_list(value))
    return tuple(line for cycle in cycles for line in texts(cycle))


@dataclass(frozen=True)
class Waiting:
    """Who waits for whom, in words: cycles, and what else was noticed."""

    cycles: tuple[str, ...] = given("cycles", by=_cycle_lines, default=())
    problems: tuple[str, ...] = given("problems", by=texts, default=())


@dataclass(frozen=True)
class NativeFrame:
    """One frame of native code."""

    function: str = ""
    module: str = ""


@dataclass(frozen=True)
class NativeThread:
    """One thread as the kernel has it; frames are outermost first."""

    native_id: int = 0
    frames: tuple[NativeFrame, ...] = ()


def _native_threads(value: Any) -> tuple[NativeThread, ...]:
    return read_all(NativeThread, [*value.values()] if isinstance(value, dict) else value)


@dataclass(frozen=True)
class Native:
    """One source of native stacks and registers: the live process, or a core."""

    signal: str = given("signal", by=lambda value: str(value) if isinstance(value, str | int) else None, default="")
    threads: tuple[NativeThread, ...] = given("threads", by=_native_threads, default=())
    file: str = ""  # of a core that was kept, its name
    digest: str = ""
    bytes: int = 0
    kept_bytes: int = 0
    problem: str = ""


def with_locals(threads: list[Thread], seen: Any) -> list[Thread]:
    """Threads whose frames have no locals, with those that a core's stacks have at the same places."""
    known = {thread.native_id: thread.frames for thread in read_all(Thread, as_dict(seen).get("threads"))}
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


# -- paths -----------------------------------------------------------------------------------------------------------


_START = re.compile(r"\s*(?:#(\d{1,12})|([^\W\d]\w*))\s*")
_STEP = re.compile(
    r"""\s*(?:\.\s*([^\W\d]\w*|<\w+>)|\[\s*(-?\d{1,18}|b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|None|True|False)\s*\])"""
)
_LAST_STEP = re.compile(r"(.*)([.\[])([^.\[\]]*)\Z", re.DOTALL)

Key = int | str | bytes | None
Step = tuple[str | None, Key]


def split_path(path: str) -> tuple[Ref | str, str]:
    """``self.items[3]`` -> ``self`` and ``.items[3]``; ``#12.city`` -> object 12 and ``.city``."""
    match = _START.match(path)
    if match is None:
        raise BadOption(f"{path!r} does not begin with a name", hint="Write a path like messages[0]['role'].")
    return Ref(int(match[1])) if match[1] else match[2], path[match.end() :]


def steps(path: str) -> Iterator[tuple[Step, str]]:
    """Each step of a path: (attribute name, None) or (None, key), with its text."""
    place = 0
    while place < len(path.rstrip()):
        match = _STEP.match(path, place)
        if match is None:
            raise BadOption(
                f"{path[place:]!r} is not an attribute or an index", hint="Paths have names, [3] and ['key']."
            )
        place = match.end()
        yield ((match[1], None) if match[1] else (None, literal_eval(match[2]))), match[0].strip()


def begun_step(path: str) -> tuple[str, str] | None:
    """A path whose last step is not whole: what stands before it, and its beginning. None when it is a name alone."""
    match = _LAST_STEP.match(path)
    return (match[1], match[2] + match[3]) if match else None
