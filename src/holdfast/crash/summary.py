"""What a person wants to know of a dump first: what failed, where, with which values, and what is unusual.

Owns what is chosen from a dump, and how much of it. Must not know the words for it (pages.py). Holds always: `collect`
gives a bounded number of records, whatever the dump holds; ``as_json`` cuts every text of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.crash import display, kinds
from holdfast.crash.display import text_of
from holdfast.crash.dump import Dump, open_dump
from holdfast.crash.records import (
    Agent,
    Checkpoint,
    Death,
    Effect,
    Failure,
    Frame,
    Heap,
    LogRecord,
    Process,
    Ref,
    Thread,
    Value,
    as_dict,
    as_int,
    innermost,
)
from holdfast.errors import HoldfastError, NotInDump
from holdfast.text import clean, size

# -- what is unusual -------------------------------------------------------------------------------------------------


_NEAR = 0.8  # of a limit: little enough left to look there first
_MACHINE_SHORT = 0.05  # of the machine's memory left
_SWAPPED = 64 << 20  # bytes
_MANY_THREADS = 200
_MANY_TASKS = 1_000
_REPEATED = 50  # times the same function on one stack
_HALF_CLOSED = 20  # sockets that the other side closed and the program did not
_GROWN = 100_000  # items in one container
_BUSY = 4.0  # runnable processes for each processor


def signs(dump: Dump) -> list[str]:
    """In words, the most telling first."""
    return [*_memory(dump.process), *_descriptors(dump), *_code(dump), *_crowds(dump), *_heap_signs(dump.heap)]


def _memory(process: Process) -> Iterator[str]:
    used, most, total = process.cgroup_bytes, process.cgroup_limit_bytes, process.machine_bytes
    if 0 < most < (total or 2**62) and used > _NEAR * most:
        yield f"memory: {used / most:.0%} of the control group's limit ({size(most)}) is used"
    killed = re.search(r"^oom_kill ([1-9]\d{0,9})$", process.cgroup_events[:10_000], re.MULTILINE)
    if killed:
        yield f"memory: the kernel has killed {killed[1]} processes of this control group for it"
    if total and 0 < process.machine_free_bytes < _MACHINE_SHORT * total:
        yield f"memory: the machine has only {size(process.machine_free_bytes)} of {size(total)} left"
    if process.swapped_bytes > _SWAPPED:
        yield f"memory: {size(process.swapped_bytes)} of the process are swapped out"
    if 0 < process.virtual_limit_bytes * _NEAR < process.virtual_bytes:
        share = process.virtual_bytes / process.virtual_limit_bytes
        yield f"memory: {share:.0%} of the address space that is allowed is used"


def _descriptors(dump: Dump) -> Iterator[str]:
    count, most = dump.descriptors.total, dump.process.descriptors_limit
    if most > 0 and count > _NEAR * most:
        yield f"descriptors: {count:,} of {most:,} are open"
    closed = sum(one.state == "close-wait" for one in dump.descriptors.descriptors)
    if closed >= _HALF_CLOSED:
        yield f"sockets: {closed:,} were closed by the other side and not by the program"


def _code(dump: Dump) -> Iterator[str]:
    used = {frame.file for thread in dump.threads for frame in thread.frames}
    for source in dump.sources.values():
        if source.changed and source.file in used:
            yield f"source: {source.file} was changed after the program started; its lines may not fit"
    for thread in dump.threads[:1]:
        repeated = Counter((frame.file, frame.function) for frame in thread.frames).most_common(1)
        if repeated and repeated[0][1] >= _REPEATED:
            (_file, function), times = repeated[0]
            count = len(thread.frames) + thread.left_out
            yield f"recursion: {function} is {times:,} times on the first stack, of {count:,} frames"
    if any(failure.own_str for failure in dump.exceptions[:1]):
        yield "exception: its class has its own __str__, which was not called; the message is made of its arguments"


def _crowds(dump: Dump) -> Iterator[str]:
    process = dump.process
    threads = max(process.threads, len(dump.threads))
    if threads > _MANY_THREADS:
        yield f"threads: {threads:,}"
    if len(dump.tasks) > _MANY_TASKS:
        yield f"tasks: {len(dump.tasks):,}"
    cancelling = sum(task.cancelling for task in dump.tasks)
    if cancelling:
        yield f"tasks: {cancelling:,} were asked to cancel and have not ended"
    if process.cpus > 0 and any(_BUSY * process.cpus < load < 1e6 for load in process.load[:1]):
        yield f"load: {process.load[0]:.0f} on {process.cpus} processors"


def _heap_signs(heap: Heap) -> Iterator[str]:
    for name, items, taken in heap.largest[:3]:
        if items >= _GROWN:
            yield f"heap: a {name} with {items:,} items, {size(taken)}"


# -- what is chosen --------------------------------------------------------------------------------------------------


TEXT = 600  # characters of a message, a reason, a log record, a name
NAME = 200  # of what shares a line with others
_FAILURES = 12
_FRAMES = 12  # frames of the program's own with their source line
_ORIGIN_FRAMES = 3  # of the exception at the beginning of a chain
_LOCALS = 12  # values in the innermost of them, fewer outwards
_PLACES = 8  # distinct places where other threads or tasks stand
EFFECTS = 5
_LOGS = 5
TYPES = 6
LISTED = 20  # lines of what is unusual, of what was cut, of locks
_VALUE = 100
_LIBRARY = re.compile(r"^.*(?:-packages|/lib/python3\.\d+)/")
_WORD = re.compile(r"[^\W\d]\w*")
_LINES = 10  # of a statement, when its names are looked for
_AGENTS = 8
_NATIVE_FRAMES = 6  # of the thread that got the signal
NO_LIMIT = 2**60  # bytes: what the kernel writes for "no limit" is above this


@dataclass(frozen=True)
class ShownFailure:
    """An exception of the chain; ``why`` says how it is linked with the one before it."""

    failure: Failure
    why: str
    depth: int


@dataclass(frozen=True)
class ShownFrame:
    """A frame with its source line and the values that matter there; ``before`` counts those that are not shown."""

    frame: Frame
    before: int
    place: str
    source: str
    locals: list[list[str]]
    more_locals: int


@dataclass(frozen=True)
class Crowd:
    """Threads or tasks by where they stand, the most crowded places first."""

    total: int
    places: list[dict[str, Any]]  # where, count, names of the first
    other_places: int


@dataclass(frozen=True)
class Summary:
    """What is chosen from a dump."""

    dump: Dump
    death: Death | None
    failures: list[ShownFailure]
    thread: Thread | None  # whose stack is shown
    age_s: float | None  # how much older than the end it is
    frames: list[ShownFrame]
    origin: tuple[str, list[ShownFrame]] | None  # the exception that a chain began with
    threads: Crowd
    tasks: Crowd
    agents: list[Agent]
    locks: list[str]
    native: list[str]
    logs: tuple[LogRecord, ...]
    unusual: list[str]
    missing: list[str]
    redacted: dict[str, int]


def collect(dump: Dump) -> Summary:
    """What the page tells."""
    cwd = dump.process.cwd
    own = dump.threads[0] if dump.threads and (dump.threads[0].failing or not dump.exceptions) else None
    frames = own.frames if own is not None else next((one.frames for one in dump.exceptions if one.frames), ())
    others = [(one.name or f"thread {one.native_id or one.id}", one.frames) for one in dump.threads if one is not own]
    hang = as_dict(dump.extras(kinds.NOTE).get("hang")).get("stacks_age_s")
    waiting = [*(line for one in dump.waiting for line in (*one.cycles, *one.problems))]
    redacted = as_dict(dump.index.get("redacted"))
    return Summary(
        dump=dump,
        death=dump.death,
        failures=_failures(dump.exceptions),
        thread=own,
        age_s=next(
            (age for age in (dump.death and dump.death.stacks_age_s, hang) if isinstance(age, int | float)), None
        ),
        frames=_frames(dump, frames, cwd),
        origin=_origin(dump, frames, cwd),
        threads=_crowd(others, cwd),
        tasks=_crowd([(task.name, task.frames) for task in dump.tasks], cwd),
        agents=dump.agents[:_AGENTS],
        locks=waiting[:LISTED],
        native=_native(dump)[:LISTED],
        logs=dump.log_records[-_LOGS:],
        unusual=signs(dump)[:LISTED],
        missing=dump.missing[:LISTED],
        redacted={str(kind): as_int(count) for kind, count in [*redacted.items()][:LISTED]},
    )


def headline(dump: Dump) -> str:
    """The failure in one line: type and message, or why the dump was taken."""
    failure = dump.exceptions[0] if dump.exceptions else None
    if failure is None:
        return clean(short(dump.why or dump.trigger, NAME))
    return clean(short(": ".join(filter(None, (failure.type_name, failure.message))), NAME))


def moment(at: float) -> str:
    """ISO 8601 in UTC; empty when it is no time."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") if 0 < at < 2**33 else ""


def _failures(chain: Sequence[Failure]) -> list[ShownFailure]:
    """The failure and what led to it, as a reader follows them; members of groups below their group."""
    found: list[ShownFailure] = []
    seen: set[int] = set()

    def visit(place: int, why: str, depth: int) -> None:
        if place in seen or len(found) >= _FAILURES:
            return
        seen.add(place)
        one = chain[place]
        found.append(ShownFailure(one, why, depth))
        for member in one.group:
            visit(member, "one of the group", depth + 1)
        if one.before is not None:
            visit(one.before, "caused by" if one.cause is not None else "while handling", depth)

    if chain:
        visit(0, "", 0)
    return found


def _origin(dump: Dump, shown: Sequence[Frame], cwd: str) -> tuple[str, list[ShownFrame]] | None:
    """The exception at the beginning of the chain, when it failed elsewhere than the one that was dumped."""
    chain = dump.exceptions
    way = [0] if chain else []
    while way:
        one = chain[way[-1]]
        # Of a group, what its first member did is nearer to the fault than who waited.
        before = next(iter(one.group), None) if one.before is None else one.before
        if before is None or before in way:
            break
        way.append(before)
    first = chain[way[-1]] if len(way) > 1 else None
    if first is None or not first.frames or first.frames[innermost(first.frames)] in shown:
        return None
    return first.type_name, _frames(dump, first.frames, cwd)[-_ORIGIN_FRAMES:]


def _frames(dump: Dump, frames: Sequence[Frame], cwd: str) -> list[ShownFrame]:
    """The program's own frames, outermost first, and between them how many of others. At least the innermost one."""
    own = [place for place, frame in enumerate(frames) if frame.mine][-_FRAMES:]
    shown = {*own, *([len(frames) - 1] if frames else [])}
    found: list[ShownFrame] = []
    before = 0
    for at, frame in enumerate(frames):
        before += frame.gap
        if at not in shown:
            before += 1
            continue
        rank = sum(1 for other in shown if other > at)  # 0 is the innermost
        source = display.source_line(dump, frame)
        found.append(ShownFrame(frame, before, place(frame, cwd), source, *_locals(dump, frame, _LOCALS - 3 * rank)))
        before = 0
    return found


def _locals(dump: Dump, frame: Frame, most: int) -> tuple[list[list[str]], int]:
    """Values, those that the statement names first, without modules, classes and functions; how many are not here."""
    named: list[str] = []
    source = dump.sources.get(frame.file)
    if source is not None:
        last = min(max(frame.line, frame.span[0]), frame.line + _LINES)
        for number in range(frame.line, last + 1):
            named += _WORD.findall((source.line(number) or "")[:1000])
    rank = {name: at for at, name in reversed([*enumerate(named)])}
    wanted = [
        (name, value) for name, value in frame.locals if not name.startswith("__") and not _definition(dump, value)
    ]
    wanted.sort(key=lambda item: rank.get(item[0], len(named)))
    shown = [[name, text_of(dump, value, width=_VALUE, depth=2)] for name, value in wanted[: max(4, most)]]
    total = frame.locals_total if frame.locals_total is not None else len(frame.locals)
    return shown, max(0, len(wanted) - len(shown) + total - len(frame.locals))


def _definition(dump: Dump, value: Value) -> bool:
    return isinstance(value, Ref) and dump.object(value, most=1).kind in (kinds.NAMED, kinds.CALLABLE)


def _crowd(holders: Iterable[tuple[str, Sequence[Frame]]], cwd: str) -> Crowd:
    """Where the others are: the same places together."""
    names: dict[str, list[str]] = {}
    for name, frames in holders:
        names.setdefault(_where(frames, cwd), []).append(name)
    ranked = sorted(names.items(), key=lambda item: -len(item[1]))
    places = [{"where": where, "count": len(who), "names": sorted(who[:3])} for where, who in ranked[:_PLACES]]
    return Crowd(sum(map(len, names.values())), places, len(names) - len(places))


def place(frame: Frame, cwd: str = "") -> str:
    """``trip.py:12``: beneath the working directory or a package folder the path begins there."""
    home = cwd.rstrip("/") + "/"
    inside = len(home) > 1 and frame.file.startswith(home)
    file = frame.file.removeprefix(home) if inside else _LIBRARY.sub("", frame.file)
    return f"{short(file, NAME)}:{frame.line}"


def _native(dump: Dump) -> list[str]:
    """The signal, where native code stood, how many stacks there are, the core that was kept."""
    lines: list[str] = []
    for name, one in [*dump.native.items()][:LISTED]:
        if one.signal:
            lines.append(f"signal {one.signal}")
            inner = [frame for frame in (one.threads[0].frames if one.threads else ()) if frame.function]
            lines += [
                f"  in {frame.function} ({frame.module or 'unknown'})" for frame in inner[: -_NATIVE_FRAMES - 1 : -1]
            ]
        if one.threads:
            lines.append(f"{name}: {len(one.threads):,} native threads")
        if one.file:
            lines.append(f"core {one.file} ({size(one.kept_bytes)})")
        if one.problem:
            lines.append(one.problem)
    return lines


def short(text: str, most: int = TEXT) -> str:
    """The text, cut to a length that a line can have."""
    return text if len(text) <= most else text[: most - 3] + "..."


# -- as JSON ---------------------------------------------------------------------------------------------------------


def entry(path: Path) -> dict[str, Any]:
    """A dump in a list. ``cause`` is the same for dumps of one fault; ``problem``: why it cannot be read."""
    told: dict[str, Any] = {"file": path.name, "size_bytes": 0, "trigger": "", "at": "", "what": "", "complete": False}
    try:
        told["size_bytes"] = path.stat().st_size
        with open_dump(path) as opened:
            told |= {"trigger": opened.trigger[:100], "at": moment(opened.at), "what": headline(opened)}
            kind, where = cause(opened)
            agents = [
                {"name": one.name, "branch": one.branch, "checkpoint": one.stands_on.checkpoint or one.checkpoint}
                for one in opened.agents[:LISTED]
            ]
            found = {"cause": kind, "where": where, "agents": agents}
            return {**told, "complete": bool(opened.index), "problem": "", **found}
    except HoldfastError as error:
        problem = error.message
    except OSError as error:  # it was removed meanwhile, or belongs to somebody else
        problem = error.strerror or "cannot be read"
    return {**told, "problem": problem, "cause": "", "where": "", "agents": []}


def cause(dump: Dump) -> tuple[str, str]:
    """What dumps of one fault have in common: what failed, and the function of the program in which it did.

    Lines and values differ from one time to the next, so they are not in it.
    """
    failure = dump.exceptions[0] if dump.exceptions else None
    frames = failure.frames if failure is not None else dump.threads[0].frames if dump.threads else ()
    frame = frames[innermost(frames)] if frames else None
    kind = failure.type_name if failure is not None else dump.trigger
    file = place(frame, dump.process.cwd).rpartition(":")[0] if frame is not None else ""
    return clean(short(kind, NAME)), clean(f"{short(frame.function, NAME)} in {file}") if frame is not None else ""


def dump_json(dump: Dump) -> dict[str, Any]:
    """What a dump tells first."""
    return as_json(collect(dump))


def as_json(found: Summary) -> dict[str, Any]:
    """The summary as docs/json.md has it."""
    dump, thread = found.dump, found.thread
    about = dump.about
    told = {
        "file": str(dump.path),
        "complete": dump.complete,
        "why": about.why,
        "trigger": about.trigger,
        "at": moment(about.at),
        "id": about.id,
        "host": about.host,
        "pid": about.pid,
        "python": about.python,
        "program": about.program[:8],
        "death": found.death and {"what": found.death.what, "evidence": found.death.evidence[:LISTED]},
        "failures": [_failure_json(one) for one in found.failures],
        "thread": thread
        and {"name": thread.name, "id": thread.id, "left_out": thread.left_out, "age_s": _finite(found.age_s)},
        "frames": [_frame_json(one) for one in found.frames],
        "origin": found.origin and {"type": found.origin[0], "frames": [_frame_json(one) for one in found.origin[1]]},
        "threads": vars(found.threads),
        "tasks": vars(found.tasks),
        "agents": [_agent_json(one) for one in found.agents],
        "locks": found.locks,
        "native": found.native,
        "process": _process_json(dump),
        "heap": {"objects": dump.heap.objects, "types": dump.heap.types[:TYPES]},
        "logs": [{**vars(one), "at": moment(one.at)} for one in found.logs],
        "unusual": found.unusual,
        "missing": found.missing,
        "redacted": found.redacted,
    }
    cut: dict[str, Any] = _cut(told)
    return cut


def _cut(value: Any) -> Any:
    """With every text cut to a length that a line can have."""
    if isinstance(value, str):
        return short(value)
    if isinstance(value, dict):
        return {short(key): _cut(item) for key, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list | tuple) else value


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else 0.0


def _failure_json(one: ShownFailure) -> dict[str, Any]:
    failure = one.failure
    return {
        "type": failure.type_name,
        "message": failure.message,
        "own_str": failure.own_str,
        "notes": failure.notes[:5],
        "why": one.why,
        "depth": one.depth,
        "members": failure.members or len(failure.group),
    }


def _frame_json(one: ShownFrame) -> dict[str, Any]:
    frame = one.frame
    named = {name: getattr(frame, name) for name in ("file", "line", "function", "mine", "hidden")}
    return {**named, **{key: value for key, value in vars(one).items() if key != "frame"}}


def _agent_json(agent: Agent) -> dict[str, Any]:
    return {
        **vars(agent),
        "checkpoint_at": moment(agent.checkpoint_at),
        "stands_on": checkpoint_text(agent.stands_on),
        "stack": agent.stack[:LISTED],
        "effects": [
            {**vars(one), "args": display.plain_text(one.args, NAME), "at": moment(one.at), "outcome": outcome(one)}
            for one in agent.effects[-EFFECTS:]
        ],
        "effects_total": len(agent.effects),
        "in_doubt": len(agent.in_doubt),
    }


def outcome(effect: Effect) -> str:
    return "" if effect.outcome is None else display.plain_text(effect.outcome, NAME)


def checkpoint_text(one: Checkpoint) -> str:
    return " ".join(filter(None, (one.checkpoint[:12], f"#{one.depth}" if one.depth else "", one.label)))


def _process_json(dump: Dump) -> dict[str, Any]:
    process = dump.process
    limit = process.cgroup_limit_bytes
    named = {name: value for name, value in vars(process).items() if name in _PROCESS_NAMES}
    return {
        **named,
        "load": process.load[:3],
        "cgroup_limit_bytes": limit if limit < NO_LIMIT else 0,
        "descriptors": dump.descriptors.total,
        "sockets": dump.descriptors.sockets,
    }


_PROCESS_NAMES = frozenset(
    (
        *("resident_bytes", "peak_bytes", "cgroup_bytes", "machine_bytes", "machine_free_bytes", "descriptors_limit"),
        *("threads", "cpus", "process_s", "cwd", "os"),
    )
)


# -- what somebody opens ---------------------------------------------------------------------------------------------

_STACKS = 300  # threads and tasks in a list
_WHOLE_FRAMES = 60  # of a stack that somebody has opened, the innermost
_WHOLE_LOCALS = 60
_INSIDE = 200  # items of an object


def stacks_json(dump: Dump) -> dict[str, Any]:
    """The threads and tasks: what each is called, where it stands, and what it waits for."""
    found, cwd = dump.all_stacks(), dump.process.cwd
    listed = [
        {"stack": f"{one.kind}:{one.number}", "kind": one.kind, "name": one.name, "note": one.note,
         "where": _where(one.frames, cwd), "frames": len(one.frames) + one.left_out}
        for one in found[:_STACKS]
    ]  # fmt: skip
    return {"stacks": _cut(listed), "more_stacks": max(0, len(found) - _STACKS)}


def stack_json(dump: Dump, name: str) -> dict[str, Any]:
    """One of them, outermost first, with the values of every frame."""
    found = next((one for one in dump.all_stacks() if f"{one.kind}:{one.number}" == name), None)
    if found is None:
        raise NotInDump(f"there is no stack {short(name, NAME)!r} in this dump", hint="See its list of stacks.")
    frames = found.frames[-_WHOLE_FRAMES:]
    shown = [
        {**_frame_json(ShownFrame(one, one.gap, place(one, dump.process.cwd), display.source_line(dump, one), [], 0)),
         **_values_json(dump, one.locals, _WHOLE_LOCALS, one.locals_total)}
        for one in frames
    ]  # fmt: skip
    left = found.left_out + len(found.frames) - len(frames)
    cut: dict[str, Any] = _cut({"stack": name, "name": found.name, "note": found.note, "left_out": left})
    return {**cut, "frames": _cut(shown)}


def object_json(dump: Dump, number: int) -> dict[str, Any]:
    """What is inside one object, one level of it."""
    found = dump.object(number, most=_INSIDE)
    text = text_of(dump, Ref(number), width=TEXT)
    told = {"object": number, "type": found.type_name, "text": text, "reason": found.reason}
    inside = _values_json(dump, tuple(found.children()), _INSIDE)
    left = max(found.left, (found.total or 0) - len(found.items) - len(found.pairs)) if inside["locals"] else 0
    return {**_cut(told), **_cut(inside), "more_locals": inside["more_locals"] + left}


def _values_json(
    dump: Dump, values: Sequence[tuple[str, Value]], most: int, total: int | None = None
) -> dict[str, Any]:
    """Names and values; the third of each is the number of an object that can be opened, or null."""
    wanted = [one for one in values if not one[0].startswith("__") and not _definition(dump, one[1])]
    shown = [
        [short(name, NAME), text_of(dump, value, width=_VALUE * 2, depth=2), _opens(dump, value)]
        for name, value in wanted[:most]
    ]
    return {"locals": shown, "more_locals": len(wanted) - len(shown) + max(0, (total or 0) - len(values))}


def _opens(dump: Dump, value: Value) -> int | None:
    if not isinstance(value, Ref):
        return None
    found = dump.object(value, most=1)
    return value.number if found.items or found.pairs or found.attributes else None


def _where(frames: Sequence[Frame], cwd: str) -> str:
    frame = frames[innermost(frames)] if frames else None
    return f"{short(frame.function, NAME)} at {place(frame, cwd)}" if frame is not None else "no Python frame"
