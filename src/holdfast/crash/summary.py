"""The page that a person wants first: what failed, where, with which values, and what is unusual.

Owns what is chosen from a dump, how much of it, and the words and their order. Must not know colours, terminals or
widths. Holds always: ``collect`` returns plain data that JSON can carry, of bounded size whatever the dump holds;
``page`` turns it into lines without a control character.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from holdfast.crash import kinds
from holdfast.crash.display import clean, size, text_of
from holdfast.crash.dump import Dump
from holdfast.crash.records import (
    Failure,
    Frame,
    Ref,
    Source,
    Thread,
    Value,
    as_dict,
    as_float,
    as_int,
    as_list,
    as_text,
)

# -- what is unusual -------------------------------------------------------------------------------------------------


_NEAR = 0.8  # of a limit: little enough left to look there first
_MACHINE_SHORT = 0.05  # of the machine's memory left
_MANY_THREADS = 200
_MANY_TASKS = 1_000
_REPEATED = 50  # times the same function on one stack
_HALF_CLOSED = 20  # sockets that the other side closed and the program did not
_GROWN = 100_000  # items in one container
_BUSY = 4.0  # runnable processes for each processor


def signs(dump: Dump) -> list[str]:
    """In words, the most telling first."""
    process = dump.part(kinds.PROCESS)
    return [*_memory(process), *_descriptors(dump, process), *_code(dump), *_crowds(dump, process), *_heap_signs(dump)]


def _memory(process: dict[str, Any]) -> Iterator[str]:
    cgroup, machine, memory, limits = (
        as_dict(process.get(key)) for key in ("cgroup", "machine_memory", "memory", "limits")
    )
    used, most = number(cgroup.get("memory.current")), number(cgroup.get("memory.max"))
    total, free = as_int(machine.get("MemTotal")), as_int(machine.get("MemAvailable"))
    if 0 < most < (total or 2**62) and used > _NEAR * most:
        yield f"memory: {used / most:.0%} of the control group's limit ({size(most)}) is used"
    for line in as_text(cgroup.get("memory.events")).splitlines()[:20]:
        word, _, times = line.partition(" ")
        if word == "oom_kill" and number(times):
            yield f"memory: the kernel has killed {number(times)} processes of this control group for it"
    if total and 0 < free < _MACHINE_SHORT * total:
        yield f"memory: the machine has only {size(free)} of {size(total)} left"
    swap = as_int(memory.get("VmSwap"))
    if swap > 64 << 20:
        yield f"memory: {size(swap)} of the process are swapped out"
    space = as_int(next(iter(as_list(limits.get("AS"))), 0))
    if space > 0 and as_int(memory.get("VmSize")) > _NEAR * space:
        yield f"memory: {as_int(memory.get('VmSize')) / space:.0%} of the address space that is allowed is used"


def _descriptors(dump: Dump, process: dict[str, Any]) -> Iterator[str]:
    opened = dump.part(kinds.DESCRIPTORS)
    count = as_int(opened.get("total"))
    most = as_int(next(iter(as_list(as_dict(process.get("limits")).get("NOFILE"))), 0))
    if most > 0 and count > _NEAR * most:
        yield f"descriptors: {count:,} of {most:,} are open"
    states = Counter(as_text(one.get("state")) for one in as_list(opened.get("descriptors")) if isinstance(one, dict))
    if states["close-wait"] >= _HALF_CLOSED:
        yield f"sockets: {states['close-wait']:,} were closed by the other side and not by the program"


def _code(dump: Dump) -> Iterator[str]:
    frames = [frame for thread in dump.threads for frame in thread.frames]
    used = {frame.file for frame in frames}
    for source in dump.sources.values():
        if source.changed and source.file in used:
            yield f"source: {source.file} was changed after the program started; its lines may not fit"
    for thread in dump.threads[:1]:
        yield from _recursion(thread.frames, thread.left_out)
    if any(failure.own_str for failure in dump.exceptions[:1]):
        yield "exception: its class has its own __str__, which was not called; the message is made of its arguments"


def _recursion(frames: Sequence[Frame], left_out: int) -> Iterator[str]:
    repeated = Counter((frame.file, frame.function) for frame in frames).most_common(1)
    if repeated and repeated[0][1] >= _REPEATED:
        (_file, function), times = repeated[0]
        yield f"recursion: {function} is {times:,} times on the first stack, of {len(frames) + left_out:,} frames"


def _crowds(dump: Dump, process: dict[str, Any]) -> Iterator[str]:
    threads = max(as_int(process.get("threads")), len(dump.threads))
    if threads > _MANY_THREADS:
        yield f"threads: {threads:,}"
    if len(dump.tasks) > _MANY_TASKS:
        yield f"tasks: {len(dump.tasks):,}"
    cancelling = sum(task.cancelling for task in dump.tasks)
    if cancelling:
        yield f"tasks: {cancelling:,} were asked to cancel and have not ended"
    cpus, load = as_int(process.get("cpus")), as_float(next(iter(as_list(process.get("load"))), 0.0))
    if cpus > 0 and _BUSY * cpus < load < 1e6:
        yield f"load: {load:.0f} on {cpus} processors"


def _heap_signs(dump: Dump) -> Iterator[str]:
    for row in as_list(dump.part(kinds.HEAP).get("largest"))[:3]:
        if isinstance(row, list) and len(row) == 3 and as_int(row[1]) >= _GROWN:
            yield f"heap: a {as_text(row[0])} with {as_int(row[1]):,} items, {size(as_int(row[2]))}"


def number(text: Any) -> int:
    """A number of the kernel's, which is text; 0 for ``max`` and nonsense."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20 else 0


# -- what is chosen --------------------------------------------------------------------------------------------------


_TEXT = 600  # characters of a message, a reason, a log record
_NAME = 200  # of a name: a thread's, a function's, a tool's
_FAILURES = 12
_FRAMES = 12  # frames of the program's own with their source line
_ORIGIN_FRAMES = 3  # of the exception at the beginning of a chain
_LOCALS = 12  # values in the innermost of them, fewer outwards
_PLACES = 8  # distinct places where other threads or tasks stand
_EFFECTS = 5
_LOGS = 5
_TYPES = 6
_LISTED = 20  # lines of what is unusual, of what was cut, of locks
_VALUE = 100
_LIBRARY = re.compile(r"^.*(?:-packages|/lib/python3\.\d+)/")
_WORD = re.compile(r"[^\W\d]\w*")
_LINES = 10  # of a statement, when its names are looked for
_AGENTS = 8
_NATIVE_FRAMES = 6  # of the thread that got the signal
_NO_LIMIT = 2**60  # bytes: what the kernel writes for "no limit" is above this


def collect(dump: Dump) -> dict[str, Any]:
    """What the page tells, as data."""
    process = dump.part(kinds.PROCESS)
    cwd = as_text(process.get("cwd"))
    own = dump.threads[0] if dump.threads and (dump.threads[0].failing or not dump.exceptions) else None
    frames = own.frames if own is not None else next((one.frames for one in dump.exceptions if one.frames), ())
    return {
        "file": str(dump.path),
        "complete": dump.complete,
        "why": short(dump.why),
        "trigger": short(dump.trigger, _NAME),
        "at": moment(dump.at),
        "id": short(as_text(dump.head.get("id")), _NAME),
        "host": short(as_text(dump.head.get("host")), _NAME),
        "pid": as_int(dump.head.get("pid")),
        "python": short(as_text(dump.head.get("python")), _NAME),
        "program": [short(as_text(word), _NAME) for word in as_list(dump.head.get("program"))[:8]],
        "death": _death(dump.extras(kinds.NOTE).get("death")),
        "failures": _failures(dump.exceptions),
        "thread": _thread(dump, own) if own else None,
        "frames": _frames(dump, frames, cwd),
        "origin": _origin(dump, frames, cwd),
        "threads": _standing(
            [(one.name or f"thread {one.native_id or one.id}", one.frames) for one in dump.threads if one is not own],
            cwd,
        ),
        "tasks": _standing([(task.name, task.frames) for task in dump.tasks], cwd),
        "agents": [_agent(name, data) for name, data in [*dump.extras(kinds.AGENT).items()][:_AGENTS]],
        "locks": _locks(dump.extras(kinds.LOCKS)),
        "native": _native(dump.extras(kinds.NATIVE)),
        "process": _process(dump, process),
        "heap": _heap(dump.part(kinds.HEAP)),
        "logs": [_log(record) for record in dump.logs[-_LOGS:]],
        "unusual": [short(text) for text in signs(dump)[:_LISTED]],
        "missing": [short(text) for text in dump.missing[:_LISTED]],
        "redacted": _redacted(dump.index.get("redacted")),
    }


def _thread(dump: Dump, own: Thread) -> dict[str, Any]:
    """Whose stack is shown; ``age_s`` where it was seen some time before the end, else None."""
    notes = dump.extras(kinds.NOTE)
    ages = [as_dict(notes.get(name)).get("stacks_age_s") for name in ("death", "hang")]
    age = next((finite(one) for one in ages if isinstance(one, int | float)), None)
    return {"name": short(own.name, _NAME), "id": own.id, "left_out": own.left_out, "age_s": age}


def headline(dump: Dump) -> str:
    """The failure in one line: type and message, or why the dump was taken."""
    failure = dump.exceptions[0] if dump.exceptions else None
    if failure is None:
        return clean(short(dump.why or dump.trigger, _NAME))
    return clean(short(": ".join(filter(None, (failure.type_name, failure.message))), _NAME))


def moment(at: float) -> str:
    """ISO 8601 in UTC; empty when it is no time."""
    if not math.isfinite(at) or not 0 < at < 2**33:
        return ""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


# What is chosen.


def _failures(chain: Sequence[Failure]) -> list[dict[str, Any]]:
    """The failure and what led to it, as a reader follows them; members of groups below their group."""
    found: list[dict[str, Any]] = []
    seen: set[int] = set()

    def visit(at: int, why: str, depth: int) -> None:
        if at in seen or len(found) >= _FAILURES:
            return
        seen.add(at)
        one = chain[at]
        found.append(
            {
                "type": short(one.type_name, _NAME),
                "message": short(one.message),
                "own_str": one.own_str,
                "notes": [short(note) for note in one.notes[:5]],
                "why": why,
                "depth": depth,
                "members": one.members or len(one.group),
            }
        )
        for member in one.group:
            visit(member, "one of the group", depth + 1)
        if one.cause is not None:
            visit(one.cause, "caused by", depth)
        elif one.context is not None and not one.suppressed:
            visit(one.context, "while handling", depth)

    if chain:
        visit(0, "", 0)
    return found


def _origin(dump: Dump, shown: Sequence[Frame], cwd: str) -> dict[str, Any] | None:
    """The exception at the beginning of the chain, when it failed elsewhere than the one that was dumped."""
    chain = dump.exceptions
    way = [0] if chain else []
    while way:
        one = chain[way[-1]]
        before = one.cause if one.cause is not None or one.suppressed else one.context
        if before is None and one.group:
            before = one.group[0]  # of a group, what its first member did is nearer to the fault than who waited
        if before is None or before in way:
            break
        way.append(before)
    first = chain[way[-1]] if len(way) > 1 else None
    if first is None or not first.frames or innermost(first.frames) in shown:
        return None
    return {"type": short(first.type_name, _NAME), "frames": _frames(dump, first.frames, cwd)[-_ORIGIN_FRAMES:]}


def _frames(dump: Dump, frames: Sequence[Frame], cwd: str) -> list[dict[str, Any]]:
    """The program's own frames, outermost first, and between them how many of others. At least the innermost one."""
    own = [at for at, frame in enumerate(frames) if frame.mine][-_FRAMES:]
    shown = {*own, *([len(frames) - 1] if frames else [])}
    found: list[dict[str, Any]] = []
    before = 0
    for at, frame in enumerate(frames):
        before += frame.gap
        if at not in shown:
            before += 1
            continue
        rank = sum(1 for other in shown if other > at)  # 0 is the innermost
        source = dump.sources.get(frame.file)
        found.append(
            {
                "before": before,
                "file": short(frame.file, _TEXT),
                "place": place(frame, cwd),
                "line": frame.line,
                "function": short(frame.function, _NAME),
                "mine": frame.mine,
                "source": short((source.line(frame.line) or "").strip(), _NAME) if source else "",
                **_locals(dump, frame, source, max(4, _LOCALS - 3 * rank)),
                "hidden": short(frame.hidden, _NAME),
            }
        )
        before = 0
    return found


def _locals(dump: Dump, frame: Frame, source: Source | None, most: int) -> dict[str, Any]:
    """Values that the statement names come first; modules, classes and functions are left away."""
    named: list[str] = []
    if source is not None:
        last = min(max(frame.line, frame.span[0]), frame.line + _LINES)
        for number in range(frame.line, last + 1):
            named += _WORD.findall((source.line(number) or "")[:1000])
    rank = {name: at for at, name in reversed([*enumerate(named)])}
    wanted = [
        (name, value) for name, value in frame.locals if not name.startswith("__") and not _definition(dump, value)
    ]
    wanted.sort(key=lambda item: rank.get(item[0], len(named)))
    shown = [[short(name, _NAME), text_of(dump, value, width=_VALUE, depth=2)] for name, value in wanted[:most]]
    total = frame.locals_total if frame.locals_total is not None else len(frame.locals)
    return {"locals": shown, "more_locals": max(0, len(wanted) - len(shown) + total - len(frame.locals))}


def _definition(dump: Dump, value: Value) -> bool:
    return isinstance(value, Ref) and dump.object(value, most=1).kind in (kinds.NAMED, kinds.CALLABLE)


def _standing(holders: Iterable[tuple[str, Sequence[Frame]]], cwd: str) -> dict[str, Any]:
    """Where the others are: the same places together, the most crowded first."""
    counts: Counter[str] = Counter()
    names: dict[str, list[str]] = {}
    total = 0
    for name, frames in holders:
        total += 1
        frame = innermost(frames)
        where = f"{short(frame.function, _NAME)} at {place(frame, cwd)}" if frame is not None else "no Python frame"
        counts[where] += 1
        names.setdefault(where, [])
        if len(names[where]) < 3:
            names[where].append(short(name, _NAME))
    ranked = counts.most_common(_PLACES)
    return {
        "total": total,
        "places": [{"where": where, "count": count, "names": sorted(names[where])} for where, count in ranked],
        "other_places": len(counts) - len(ranked),
    }


def innermost(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the program's own code; of any code when there is none."""
    return next((frame for frame in reversed(frames) if frame.mine), frames[-1] if frames else None)


def place(frame: Frame, cwd: str = "") -> str:
    """``trip.py:12``: beneath the working directory or a package folder the path begins there."""
    home = cwd.rstrip("/") + "/"
    inside = len(home) > 1 and frame.file.startswith(home)
    file = frame.file.removeprefix(home) if inside else _LIBRARY.sub("", frame.file)
    return f"{short(file, _NAME)}:{frame.line}"


def _agent(name: str, data: Any) -> dict[str, Any]:
    data = data if isinstance(data, dict) else {}
    effects = [one for one in as_list(data.get("effects")) if isinstance(one, dict)]
    doubtful = as_list(data.get("in_doubt"))
    return {
        "name": short(as_text(data.get("agent")) or name, _NAME),
        "branch": short(as_text(data.get("branch")), _NAME),
        "store": short(as_text(data.get("store"))),
        "checkpoint": short(as_text(data.get("checkpoint")), _NAME),
        "label": short(as_text(data.get("label")), _NAME),
        "depth": as_int(data.get("depth")),
        "checkpoint_at": moment(as_float(data.get("checkpoint_at"))),
        "stands_on": _place(data.get("stands_on")),
        "digest": short(as_text(data.get("digest")), _NAME),
        "dirty": data.get("dirty") is True,
        "run": short(as_text(data.get("run")), _NAME),
        "function": short(as_text(data.get("function")), _NAME),
        "status": _status(data),
        "stack": [short(as_text(step), _NAME) for step in as_list(data.get("stack"))[:_LISTED]],
        "effects": [_effect(one) for one in effects[-_EFFECTS:]],
        "effects_total": len(effects),
        "in_doubt": len(doubtful),
        "problem": short(as_text(data.get("problem"))),
        "digest_at_checkpoint": short(as_text(data.get("checkpoint_digest")), _NAME),
    }


def _place(found: Any) -> str:
    """The checkpoint that a run which is executed again had come to, where that is not the last one."""
    data = found if isinstance(found, dict) else {}
    depth, label = as_int(data.get("depth")), as_text(data.get("label"))
    words = [as_text(data.get("checkpoint"))[:12], f"#{depth}" if depth else "", label]
    return short(" ".join(filter(None, words)), _NAME)


def _status(data: dict[str, Any]) -> str:
    """What had become of the run that is named."""
    runs = [one for one in as_list(data.get("runs"))[-_LISTED:] if isinstance(one, dict)]
    return next((short(as_text(one.get("status")), _NAME) for one in runs if one.get("id") == data.get("run")), "")


def _effect(one: dict[str, Any]) -> dict[str, Any]:
    told = one.get("error") or one.get("result")
    return {
        "id": short(as_text(one.get("id")), _NAME),
        "tool": short(as_text(one.get("tool")), _NAME),
        "args": flat(one.get("args")),
        "status": short(as_text(one.get("status")), _NAME),
        "at": moment(as_float(one.get("at"))),
        "outcome": flat(told),
    }


def flat(value: Any) -> str:
    """Plain data of a part in one short line."""
    if isinstance(value, str):
        return short(value, _NAME)
    if isinstance(value, dict):
        return short(", ".join(f"{key}={_leaf(item)}" for key, item in [*value.items()][:8]), _NAME)
    if isinstance(value, list):
        return short(", ".join(_leaf(item) for item in value[:8]), _NAME)
    return "" if value is None else _leaf(value)


def _leaf(value: Any) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:_NAME])
    if isinstance(value, dict | list):
        return ("{...}" if value else "{}") if isinstance(value, dict) else f"[{len(value)} items]"
    return repr(value)


def _locks(extras: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for data in extras.values():
        if isinstance(data, dict):
            for cycle in as_list(data.get("cycles")):
                lines += _texts(cycle.get("text") if isinstance(cycle, dict) else cycle)
            lines += _texts(data.get("problems"))
    return [short(line) for line in lines[:_LISTED]]


def _native(extras: dict[str, Any]) -> list[str]:
    """The signal, where native code stood, how many stacks there are, the core that was kept."""
    lines: list[str] = []
    for name, data in [*extras.items()][:_LISTED]:
        if not isinstance(data, dict):
            continue
        listed = data.get("threads")
        threads = [*listed.values()] if isinstance(listed, dict) else as_list(listed)
        if isinstance(data.get("signal"), str | int):
            lines.append(f"signal {data['signal']}")
            lines += _innermost_native(threads[0] if threads else None)
        if threads:
            lines.append(f"{name}: {len(threads):,} native threads")
        if as_text(data.get("file")):
            lines.append(f"core {as_text(data['file'])} ({size(as_int(data.get('kept_bytes')))})")
        lines += _texts(data.get("problem"))
    return [short(line) for line in lines[:_LISTED]]


def _innermost_native(thread: Any) -> list[str]:
    frames = as_list(thread.get("frames")) if isinstance(thread, dict) else []
    named = [one for one in frames[-_NATIVE_FRAMES:] if isinstance(one, dict) and as_text(one.get("function"))]
    return [f"  in {as_text(one['function'])} ({as_text(one.get('module')) or 'unknown'})" for one in reversed(named)]


def _process(dump: Dump, process: dict[str, Any]) -> dict[str, Any]:
    memory, machine, cgroup, limits = (
        as_dict(process.get(key)) for key in ("memory", "machine_memory", "cgroup", "limits")
    )
    files = as_list(limits.get("NOFILE"))
    opened = dump.part(kinds.DESCRIPTORS)
    sockets = sum(1 for one in as_list(opened.get("descriptors")) if isinstance(one, dict) and one.get("socket"))
    load = as_list(process.get("load"))
    return {
        "resident_bytes": as_int(memory.get("VmRSS")),
        "peak_bytes": as_int(memory.get("VmHWM")),
        "cgroup_bytes": number(cgroup.get("memory.current")),
        "cgroup_limit_bytes": limit if (limit := number(cgroup.get("memory.max"))) < _NO_LIMIT else 0,
        "machine_bytes": as_int(machine.get("MemTotal")),
        "machine_free_bytes": as_int(machine.get("MemAvailable")),
        "descriptors": as_int(opened.get("total")),
        "descriptors_limit": as_int(files[0]) if files else 0,
        "sockets": sockets,
        "threads": as_int(process.get("threads")),
        "cpus": as_int(process.get("cpus")),
        "load": [finite(one) for one in load[:3]],
        "process_s": finite(process.get("process_s")),
        "cwd": short(as_text(process.get("cwd"))),
        "os": short(as_text(process.get("os")), _NAME),
    }


def finite(value: Any) -> float:
    value = as_float(value)
    return value if math.isfinite(value) else 0.0


def _heap(heap: dict[str, Any]) -> dict[str, Any]:
    rows = [row for row in as_list(heap.get("types")) if isinstance(row, list) and len(row) == 3]
    return {
        "objects": as_int(heap.get("objects")),
        "types": [[short(as_text(row[0]), _NAME), as_int(row[1]), as_int(row[2])] for row in rows[:_TYPES]],
    }


def _log(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": moment(as_float(record.get("at"))),
        "level": short(as_text(record.get("level")), 20),
        "logger": short(as_text(record.get("logger")), _NAME),
        "text": short(as_text(record.get("text"))),
    }


def _death(told: Any) -> dict[str, Any] | None:
    """How the process ended, from whoever outlived it."""
    if not isinstance(told, dict):
        return None
    return {"what": short(flat(told.get("what"))), "evidence": [short(text) for text in _texts(told.get("evidence"))]}


def _redacted(told: Any) -> dict[str, int]:
    return {short(str(kind), 40): as_int(count) for kind, count in [*as_dict(told).items()][:_LISTED]}


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [item for item in as_list(value)[:_LISTED] if isinstance(item, str)]


def short(text: str, most: int = _TEXT) -> str:
    """The text, cut to a length that a line can have."""
    return text if len(text) <= most else text[: most - 3] + "..."


# -- lines -----------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One line. ``style`` says what it is: title, head, bad, good, text, place, code, note."""

    style: str
    text: str


def page(found: dict[str, Any]) -> Iterator[Line]:
    """The page, from the failure to what is missing."""
    for style, text in _lines(found):
        yield Line(style, clean(text))


_Raw = Iterator[tuple[str, str]]


def _lines(found: dict[str, Any]) -> _Raw:
    yield from _what(found)
    yield from _where(found)
    yield from _agents(found["agents"])
    yield from _listed("Locks and waiting", found["locks"], "bad")
    yield from _others("Other threads", found["threads"])
    yield from _others("Tasks", found["tasks"])
    yield from _listed("Native", found["native"], "text")
    yield from _resources(found)
    if found["logs"]:
        yield "head", "Last log records"
        for record in found["logs"]:
            yield "text", f"  {record['at'][11:19]} {record['level']} {record['logger']}: {record['text']}"
    yield from _listed("Unusual", found["unusual"], "bad")
    yield from _listed("Not in this dump", found["missing"], "note")
    if found["redacted"]:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in found["redacted"].items())
        yield "head", "Redacted"
        yield "note", f"  {counts}"


def _what(found: dict[str, Any]) -> _Raw:
    failures = found["failures"]
    if failures:
        for failure in failures:
            indent = "  " * failure["depth"]
            lead = f"{failure['why']}: " if failure["why"] else ""
            group = f" ({failure['members']} exceptions)" if failure["members"] else ""
            message = failure["message"].splitlines() or [""]
            yield (
                "title" if not failure["why"] else "bad",
                f"{indent}{lead}{failure['type']}{group}: {message[0]}".rstrip(": "),
            )
            for line in message[1:6]:
                yield "text", f"{indent}  {line}"
            for note in failure["notes"]:
                yield "text", f"{indent}  note: {note}"
    else:
        yield "title", found["why"] or found["trigger"] or "a dump"
    if found["death"]:
        if failures or found["death"]["what"] != found["why"]:
            yield "bad", f"The process ended: {found['death']['what']}"
        for text in found["death"]["evidence"]:
            yield "note", f"  {text}"
    why = f" ({found['why']})" if found["why"] not in ("", found["trigger"]) and failures else ""
    facts = [found["trigger"] + why, found["at"].replace("+00:00", "Z")]
    facts += [f"pid {found['pid']} on {found['host']}", f"Python {found['python']}"]
    yield "note", ", ".join(fact for fact in facts if fact)
    if found["program"]:
        yield "note", " ".join(found["program"])


def _where(found: dict[str, Any]) -> _Raw:
    frames, thread, origin = found["frames"], found["thread"], found["origin"]
    if frames:
        seen = f", as it was {thread['age_s']:.1f} s earlier" if thread and thread["age_s"] is not None else ""
        yield "head", f"Where, in {thread['name'] or 'a thread'}{seen}" if thread else "Where"
        yield from _stack(frames)
        if thread and thread["left_out"]:
            yield "note", f"  {thread['left_out']} frames of this stack were left out"
    if origin:
        yield "head", f"Where it began: {origin['type']}"
        yield from _stack(origin["frames"])


def _stack(frames: list[dict[str, Any]]) -> _Raw:
    told = ""
    for frame in frames:
        if frame["before"]:
            yield "note", f"  ... {frame['before']} {'frame' if frame['before'] == 1 else 'frames'} of other code"
        yield "place", f"  {frame['place']} in {frame['function']}"
        if frame["source"]:
            yield "code", f"    > {frame['source']}"
        for name, text in frame["locals"]:
            yield "text", f"      {name} = {text}"
        if frame["more_locals"]:
            yield "note", f"      ... {frame['more_locals']} more"
        if frame["hidden"] and frame["hidden"] != told:  # once, when it is the same for all
            yield "note", f"      no locals: {frame['hidden']}"
        told = frame["hidden"]


def _agents(agents: list[dict[str, Any]]) -> _Raw:
    for agent in agents:
        branch = f"@{agent['branch']}" if agent["branch"] not in ("", "main") else ""
        yield "head", f"Agent {agent['name']}{branch}"
        if agent["checkpoint"]:
            label = f" {agent['label']}" if agent["label"] else ""
            depth = f" #{agent['depth']}" if agent["depth"] else ""
            dirty = ", and changes that were not saved" if agent["dirty"] else ""
            at = f" ({agent['checkpoint_at'].replace('+00:00', 'Z')})" if agent["checkpoint_at"] else ""
            yield "text", f"  last checkpoint {agent['checkpoint'][:12]}{depth}{label}{at}{dirty}"
            if agent["stands_on"]:
                yield "text", f"  the run was executed again and had come to {agent['stands_on']}"
        else:
            yield "text", "  no checkpoint yet"
        if agent["function"] or agent["run"]:
            steps = (
                agent["stack"] if agent["stack"][:1] == [agent["function"]] else [agent["function"], *agent["stack"]]
            )
            inside = " > ".join(filter(None, steps))
            yield "text", f"  {agent['status'] or 'in'}: {inside} (run {agent['run']})"
        for effect in agent["effects"]:
            outcome = f" -> {effect['outcome']}" if effect["outcome"] else ""
            style = "bad" if effect["status"] == "in doubt" else "text"
            yield style, f"  {effect['status']}: {effect['tool']}({effect['args']}){outcome}"
        if agent["in_doubt"]:
            yield "bad", f"  {agent['in_doubt']} in doubt: nobody knows whether they happened"
        if agent["problem"]:
            yield "note", f"  {agent['problem']}"


def _others(title: str, standing: dict[str, Any]) -> _Raw:
    if not standing["total"]:
        return
    yield "head", f"{title} ({standing['total']:,})"
    for one in standing["places"]:
        who = ", ".join(one["names"]) + (", ..." if one["count"] > len(one["names"]) else "")
        yield "text", f"  {one['count']:>4} in {one['where']}  [{who}]"
    if standing["other_places"]:
        yield "note", f"       and {standing['other_places']:,} other places"


def _resources(found: dict[str, Any]) -> _Raw:
    process, heap = found["process"], found["heap"]
    if not any(process.values()) and not heap["objects"]:
        return
    yield "head", "Process"
    memory = [f"{size(process['resident_bytes'])} resident", f"{size(process['peak_bytes'])} at most"]
    if process["cgroup_limit_bytes"]:
        memory.append(f"control group {size(process['cgroup_bytes'])} of {size(process['cgroup_limit_bytes'])}")
    memory.append(f"machine {size(process['machine_free_bytes'])} free of {size(process['machine_bytes'])}")
    yield "text", "  memory       " + ", ".join(memory)
    limit = f" of {process['descriptors_limit']:,}" if process["descriptors_limit"] > 0 else ""
    yield "text", f"  descriptors  {process['descriptors']:,}{limit}, {process['sockets']:,} sockets"
    load = " ".join(f"{one:.1f}" for one in process["load"])
    ran = f"ran {process['process_s']:,.1f} s; load {load} on {process['cpus']} processors"
    yield "text", f"  threads      {process['threads']:,}; {ran}"
    if heap["types"]:
        rows = ", ".join(f"{count:,} {name} ({size(taken)})" for name, count, taken in heap["types"])
        yield "text", f"  heap         {heap['objects']:,} objects: {rows}"


def _listed(title: str, lines: list[str], style: str) -> _Raw:
    if lines:
        yield "head", title
        for line in lines:
            yield style, f"  {line}"
