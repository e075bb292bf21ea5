"""Lines about dumps: the page that a person reads first, two dumps side by side, and a whole one as JSON, text or HTML.

Owns the words and their order, and those forms. Must not know colours, terminals or widths. Holds always: a line has no
control character, and HTML nothing that a browser would run; JSON is ASCII and has every part and object; what is
exported is given in pieces, so that memory does not grow with the number of objects.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from holdfast.crash import display, kinds
from holdfast.crash.display import text_of
from holdfast.crash.dump import EXTRA_PARTS, PLAIN_PARTS, Dump
from holdfast.crash.memory import Grown, Growth, snapshot_of
from holdfast.crash.records import Agent, Frame, LogRecord, Missing, Process, Ref, Source, as_dict, as_text, innermost
from holdfast.crash.summary import (
    EFFECTS,
    LISTED,
    NAME,
    NO_LIMIT,
    TEXT,
    TYPES,
    Crowd,
    ShownFrame,
    Summary,
    checkpoint_text,
    collect,
    headline,
    moment,
    outcome,
    place,
    short,
)
from holdfast.text import clean, size

# -- the page ---------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One line. ``style`` says what it is: title, head, bad, good, text, place, code, note."""

    style: str
    text: str


_Raw = Iterator[tuple[str, str]]


def page(found: Summary) -> Iterator[Line]:
    """The page, from the failure to what is missing."""
    for style, text in _lines(found):
        yield Line(style, clean(short(text, 2 * TEXT)))


def _lines(found: Summary) -> _Raw:
    yield from _what(found)
    yield from _where(found)
    for agent in found.agents:
        yield from _agent(agent)
    yield from _listed("Locks and waiting", found.locks, "bad")
    yield from _others("Other threads", found.threads)
    yield from _others("Tasks", found.tasks)
    yield from _listed("Native", found.native, "text")
    yield from _resources(found.dump)
    yield from _listed("Last log records", [_log_line(record) for record in found.logs], "text")
    yield from _listed("Unusual", found.unusual, "bad")
    yield from _listed("Not in this dump", found.missing, "note")
    counts = ", ".join(f"{count:,} {kind}" for kind, count in found.redacted.items())
    yield from _listed("Redacted", [counts] if counts else [], "note")


def _log_line(record: LogRecord) -> str:
    return f"{moment(record.at)[11:19]} {record.level} {record.logger}: {record.text}"


def _what(found: Summary) -> _Raw:
    about = found.dump.about
    for one in found.failures:
        failure = one.failure
        indent, members = "  " * one.depth, failure.members or len(failure.group)
        lead = f"{one.why}: " if one.why else ""
        group = f" ({members} exceptions)" if members else ""
        message = short(failure.message).splitlines() or [""]
        first = f"{indent}{lead}{failure.type_name}{group}: {message[0]}".rstrip(": ")
        yield "bad" if one.why else "title", first
        for line in (*message[1:6], *(f"note: {note}" for note in failure.notes[:5])):
            yield "text", f"{indent}  {line}"
    if not found.failures:
        yield "title", about.why or about.trigger or "a dump"
    if found.death is not None:
        if found.failures or found.death.what != about.why:
            yield "bad", f"The process ended: {found.death.what}"
        for text in found.death.evidence[:LISTED]:
            yield "note", f"  {text}"
    why = f" ({about.why})" if about.why not in ("", about.trigger) and found.failures else ""
    facts = [about.trigger + why, moment(about.at).replace("+00:00", "Z")]
    facts += [f"pid {about.pid} on {about.host}", f"Python {about.python}"]
    yield "note", ", ".join(fact for fact in facts if fact)
    if about.program:
        yield "note", " ".join(about.program[:8])


def _where(found: Summary) -> _Raw:
    thread = found.thread
    if found.frames:
        seen = f", as it was {found.age_s:.1f} s earlier" if found.age_s is not None else ""
        yield "head", f"Where, in {thread.name or 'a thread'}{seen}" if thread else "Where"
        yield from _stack(found.frames)
        if thread and thread.left_out:
            yield "note", f"  {thread.left_out} frames of this stack were left out"
    if found.origin:
        yield "head", f"Where it began: {found.origin[0]}"
        yield from _stack(found.origin[1])


def _stack(frames: list[ShownFrame]) -> _Raw:
    told = ""
    for one in frames:
        hidden = one.frame.hidden
        if one.before:
            yield "note", f"  ... {one.before} {'frame' if one.before == 1 else 'frames'} of other code"
        yield "place", f"  {one.place} in {one.frame.function}"
        if one.source:
            yield "code", f"    > {one.source}"
        for name, text in one.locals:
            yield "text", f"      {name} = {text}"
        if one.more_locals:
            yield "note", f"      ... {one.more_locals} more"
        if hidden and hidden != told:  # once, when it is the same for all
            yield "note", f"      no locals: {hidden}"
        told = hidden


def _agent(agent: Agent) -> _Raw:
    yield "head", f"Agent {agent.name}" + (f"@{agent.branch}" if agent.branch not in ("", "main") else "")
    if agent.checkpoint:
        last = replace(agent.stands_on, checkpoint=agent.checkpoint, label=agent.label, depth=agent.depth)
        at = f" ({moment(agent.checkpoint_at).replace('+00:00', 'Z')})" if moment(agent.checkpoint_at) else ""
        dirty = ", and changes that were not saved" if agent.dirty else ""
        yield "text", f"  last checkpoint {checkpoint_text(last)}{at}{dirty}"
        if agent.stands_on.checkpoint:
            yield "text", f"  the run was executed again and had come to {checkpoint_text(agent.stands_on)}"
    else:
        yield "text", "  no checkpoint yet"
    if agent.function or agent.run:
        steps = agent.stack[:LISTED]
        inside = " > ".join(filter(None, steps if steps[:1] == (agent.function,) else (agent.function, *steps)))
        yield "text", f"  {agent.status or 'in'}: {inside} (run {agent.run})"
    for effect in agent.effects[-EFFECTS:]:
        came = f" -> {outcome(effect)}" if outcome(effect) else ""
        style = "bad" if effect.status == "in doubt" else "text"
        yield style, f"  {effect.status}: {effect.tool}({display.plain_text(effect.args, NAME)}){came}"
    if agent.in_doubt:
        yield "bad", f"  {len(agent.in_doubt)} in doubt: nobody knows whether they happened"
    if agent.problem:
        yield "note", f"  {agent.problem}"


def _others(title: str, crowd: Crowd) -> _Raw:
    if not crowd.total:
        return
    yield "head", f"{title} ({crowd.total:,})"
    for one in crowd.places:
        who = ", ".join(short(name, NAME) for name in one["names"]) + (", ..." if one["count"] > 3 else "")
        yield "text", f"  {one['count']:>4} in {one['where']}  [{who}]"
    if crowd.other_places:
        yield "note", f"       and {crowd.other_places:,} other places"


def _resources(dump: Dump) -> _Raw:
    process, heap, opened = dump.process, dump.heap, dump.descriptors
    if process == Process() and not heap.objects and not opened.total:
        return
    yield "head", "Process"
    memory = [f"{size(process.resident_bytes)} resident", f"{size(process.peak_bytes)} at most"]
    if 0 < process.cgroup_limit_bytes < NO_LIMIT:
        memory.append(f"control group {size(process.cgroup_bytes)} of {size(process.cgroup_limit_bytes)}")
    memory.append(f"machine {size(process.machine_free_bytes)} free of {size(process.machine_bytes)}")
    yield "text", "  memory       " + ", ".join(memory)
    limit = f" of {process.descriptors_limit:,}" if process.descriptors_limit > 0 else ""
    yield "text", f"  descriptors  {opened.total:,}{limit}, {opened.sockets:,} sockets"
    load = " ".join(f"{one:.1f}" for one in process.load[:3])
    ran = f"ran {process.process_s:,.1f} s; load {load} on {process.cpus} processors"
    yield "text", f"  threads      {process.threads:,}; {ran}"
    if heap.types:
        rows = ", ".join(f"{count:,} {short(name, NAME)} ({size(taken)})" for name, count, taken in heap.types[:TYPES])
        yield "text", f"  heap         {heap.objects:,} objects: {rows}"


def _listed(title: str, lines: list[str], style: str) -> _Raw:
    if lines:
        yield "head", title
        for line in lines:
            yield style, f"  {line}"


# -- two dumps side by side --------------------------------------------------------------------------------------------


_COMPARED_FRAMES = 200  # of each stack, the innermost: comparing takes the product of both
_ROWS = 20
_GROWN_ROWS = 15
_WIDTH = 80
_PAGE = 4096  # figures of memory that differ by less than this are equal


Row = list[Any]  # a name, and what there was before and after; as docs/json.md has it


@dataclass(frozen=True)
class Comparison:
    """What leads from one dump to the other."""

    old: dict[str, Any]
    new: dict[str, Any]
    same_failure: bool
    parts: list[Row]
    stack: list[Row]
    locals: list[Row]
    figures: list[Row]
    threads: list[Row]
    tasks: list[Row]
    growth: Growth
    packages: list[Row]
    environment: list[Row]
    sources: list[str]

    def as_json(self) -> dict[str, Any]:
        told = {name: value for name, value in vars(self).items() if name != "growth"}
        growth = self.growth
        grown = {"types": growth.types, "holders": growth.containers, "places": growth.lines}
        return told | {name: [_columns(row) for row in rows[:_GROWN_ROWS]] for name, rows in grown.items()}

    def differs(self) -> bool:
        """Whether they differ in more than the figures of a process, which always do."""
        told = (self.parts, self.stack, self.locals, self.packages, self.environment, self.sources)
        return not self.same_failure or any(told)

    def lines(self) -> Iterator[Line]:
        """The comparison as text, the most telling first."""
        for style, text in _compared_lines(self):
            yield Line(style, clean(text))


def compare(old: Dump, new: Dump) -> Comparison:
    before, after = (snapshot_of(dump.heap, dump.at) for dump in (old, new))
    return Comparison(
        old=_about(old),
        new=_about(new),
        same_failure=_signature(old) == _signature(new),
        parts=_parts(old, new),
        stack=_stack_rows(_failing(old), _failing(new)),
        locals=_local_rows(old, new),
        figures=_figures(old, new),
        threads=_places(_standing(old.threads), _standing(new.threads)),
        tasks=_places(_standing(old.tasks), _standing(new.tasks)),
        growth=before.diff(after),
        packages=_changed(_packages(old), _packages(new)),
        environment=_changed(_environment(old), _environment(new)),
        sources=_sources(old, new),
    )


# What is compared.


def _about(dump: Dump) -> dict[str, Any]:
    return {"file": str(dump.path), "at": moment(dump.at), "what": headline(dump), "complete": dump.complete}


def _signature(dump: Dump) -> tuple[Any, ...]:
    """Two dumps with the same one are taken for the same failure: type and function, wherever the program lies."""
    frame = _inner(_failing(dump))
    kind = dump.exceptions[0].type_name if dump.exceptions else dump.trigger
    return (kind, frame.file.rpartition("/")[2] if frame else "", frame.function if frame else "")


def _inner(frames: Sequence[Frame]) -> Frame | None:
    return frames[innermost(frames)] if frames else None


def _failing(dump: Dump) -> tuple[Frame, ...]:
    return dump.threads[0].frames if dump.threads else next((one.frames for one in dump.exceptions if one.frames), ())


def _parts(old: Dump, new: Dump) -> list[Row]:
    before = {part.kind: part for part in old.parts}
    after = {part.kind: part for part in new.parts}
    found = []
    for kind in [*before, *(kind for kind in after if kind not in before)]:
        states = [side[kind].state if kind in side else "not planned" for side in (before, after)]
        if states[0] != states[1]:
            found.append([short(kinds.PARTS.get(kind, kind)), *map(short, states)])
    return found[:_ROWS]


def _stack_rows(old: Sequence[Frame], new: Sequence[Frame]) -> list[Row]:
    """Frames that only one side has, and around them those that both have; empty when the stacks are equal."""
    before, after = ([_called(frame) for frame in frames[-_COMPARED_FRAMES:]] for frames in (old, new))
    if before == after:
        return []
    found: list[Row] = []
    for what, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if what == "equal":
            shared = before[i:j]
            skipped = len(shared) - 2
            found += [[" ", shared[0]], ["~", str(skipped)], [" ", shared[-1]]] if skipped > 1 else [
                [" ", frame] for frame in shared]  # fmt: skip
        else:
            found += [["-", frame] for frame in before[i:j]] + [["+", frame] for frame in after[k:m]]
    return found[: 5 * _ROWS]


def _called(frame: Frame) -> str:
    return f"{short(frame.function)} ({place(frame).rpartition(':')[0].rpartition('/')[2]})"


def _local_rows(old: Dump, new: Dump) -> list[Row]:
    """Values of the innermost frame of the program's own, when both stand in the same function."""
    before, after = _inner(_failing(old)), _inner(_failing(new))
    if before is None or after is None or _called(before) != _called(after):
        return []
    values = dict(after.locals)
    found = []
    for name, value in before.locals[: 10 * _ROWS]:
        texts = [text_of(old, value, width=_WIDTH, depth=2)]
        texts.append(text_of(new, values[name], width=_WIDTH, depth=2) if name in values else "not there")
        if texts[0] != texts[1]:
            found.append([short(name), *texts])
    return found[:_ROWS]


def _figures(old: Dump, new: Dump) -> list[Row]:
    before, after = _measured(old), _measured(new)
    return [
        [name, before[name], after[name]]
        for name in before
        if name in after and abs(after[name] - before[name]) > (_PAGE if name.endswith("bytes") else 0)
    ]


def _measured(dump: Dump) -> dict[str, int]:
    process = dump.process
    found = {
        "resident bytes": process.resident_bytes,
        "peak bytes": process.peak_bytes,
        "control group bytes": process.cgroup_bytes,
        "descriptors": dump.descriptors.total,
        "sockets": dump.descriptors.sockets,
        "threads": process.threads,
        "tasks": len(dump.tasks),
        "heap objects": dump.heap.objects,
    }
    return {name: value for name, value in found.items() if value > 0 or name in ("tasks", "sockets")}


def _standing(holders: Sequence[Any]) -> Counter[str]:
    frames = (_inner(holder.frames) for holder in holders)
    return Counter(_called(frame) if frame is not None else "no Python frame" for frame in frames)


def _places(old: Counter[str], new: Counter[str]) -> list[Row]:
    """Where more or fewer stand than before."""
    names = [name for name in old.keys() | new.keys() if old[name] != new[name]]
    names.sort(key=lambda name: (-abs(new[name] - old[name]), name))
    return [[name, old[name], new[name]] for name in names[:_ROWS]]


def _columns(row: Grown) -> Row:
    """[name, objects before, after, bytes before, after]."""
    return [short(row.name), row.before.count, row.after.count, row.before.bytes, row.after.bytes]


def _packages(dump: Dump) -> dict[str, str]:
    listed = as_dict(dump.part(kinds.MODULES).get("distributions"))
    versions = {name: as_text(version) for name, version in listed.items()}
    return {"Python": dump.about.python, **versions} if versions else {}


def _environment(dump: Dump) -> dict[str, str]:
    return {name: as_text(value) for name, value in as_dict(dump.part(kinds.ENVIRONMENT).get("values")).items()}


def _changed(old: dict[str, str], new: dict[str, str]) -> list[Row]:
    """[name, before, after]; nothing when one of the dumps has none at all."""
    if not old or not new:
        return []
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return [[short(name), short(old.get(name, "")), short(new.get(name, ""))] for name in names[:_ROWS]]


def _sources(old: Dump, new: Dump) -> list[str]:
    before, after = old.sources, new.sources
    shared = [file for file in before if file in after and before[file].first == after[file].first]
    return [short(file) for file in shared if before[file].lines != after[file].lines][:_ROWS]


# How it is told.


def _compared_lines(found: Comparison) -> Iterator[tuple[str, str]]:
    for sign, side in (("-", found.old), ("+", found.new)):
        yield "head" if sign == "-" else "place", f"{sign * 3} {side['at'].replace('+00:00', 'Z')}  {side['what']}"
    same = "The same failure: type and function are equal." if found.same_failure else "Another failure."
    yield "note" if found.same_failure else "bad", same
    if found.stack:
        yield "head", "Stacks"
        for sign, text in found.stack:
            style = {"-": "old", "+": "new", "~": "note"}.get(sign, "")
            yield style, f"    ... {text} frames alike" if sign == "~" else f"  {sign} {text}"
    yield from _pairs("Values in the failing function", found.locals)
    yield from _numbers("Process", found.figures)
    yield from _numbers("Threads, by where they stand", found.threads)
    yield from _numbers("Tasks, by where they wait", found.tasks)
    yield from _growth("Types that grew", found.growth.types)
    yield from _growth("Containers that grew, by who holds them", found.growth.containers)
    yield from _growth("Places that allocated more", found.growth.lines)
    yield from _pairs("Packages", found.packages)
    yield from _pairs("Environment", found.environment)
    yield from _pairs("Parts", found.parts)
    if found.sources:
        yield "head", "Source that is not the same"
        for file in found.sources:
            yield "text", f"  {file}"


def _pairs(title: str, rows: list[Row]) -> Iterator[tuple[str, str]]:
    if rows:
        yield "head", title
        for name, before, after in rows:
            yield "text", f"  {name}: {before or 'nothing'} -> {after or 'nothing'}"


def _numbers(title: str, rows: list[Row]) -> Iterator[tuple[str, str]]:
    if rows:
        yield "head", title
        for name, before, after in rows:
            as_size = name.endswith(" bytes")
            texts = [size(value) if as_size else f"{value:,}" for value in (before, after)]
            change = size(after - before) if as_size else f"{after - before:,}"
            sign = "+" if after > before else ""
            yield "text", f"  {name.removesuffix(' bytes')}: {texts[0]} -> {texts[1]} ({sign}{change})"


def _growth(title: str, rows: Sequence[Grown]) -> Iterator[tuple[str, str]]:
    if rows:
        yield "head", title
        for row in rows[:_GROWN_ROWS]:
            yield "text", short(f"  {row}")


# -- all of a dump ---------------------------------------------------------------------------------------------------


SCHEMA = "holdfast.dump/1"
_DEEPEST = 60  # levels of plain data; what is deeper was nested to do harm
_VALUE_LINES = 12  # of one local in the text; JSON has all of it
_PART_LINES = 2_000  # of one part
_STACKS = 500  # threads, and tasks


def json_pieces(dump: Dump) -> Iterator[str]:
    """One JSON document. A value is plain, {"ref": n}, {"gone": why}, {"bytes": base64} or {"float": text}."""
    top: dict[str, Any] = {
        "schema": SCHEMA,
        "file": dump.path.name,
        "head": dump.head,
        "complete": dump.complete,
        "parts": dump.parts,
        "missing": dump.missing,
        "redacted": dump.index.get("redacted"),
        "exceptions": dump.exceptions,
        "logs": dump.logs,
        **{_key(kind): dump.part(kind) for kind in PLAIN_PARTS},
        **{_key(kind): dump.extras(kind) for kind in EXTRA_PARTS},
    }
    lists: dict[str, Iterable[Any]] = {
        "threads": dump.threads,
        "tasks": dump.tasks,
        "sources": dump.sources.values(),
        "objects": dump.objects(),
    }
    yield "{\n"
    for name, value in top.items():
        yield f"{json.dumps(name)}: {_dumped(value)},\n"
    for number, (name, items) in enumerate(lists.items()):
        yield f"{json.dumps(name)}: ["
        for at, item in enumerate(items):
            yield ("," if at else "") + "\n" + _dumped(item)
        yield "\n]" + (",\n" if number < len(lists) - 1 else "\n")
    yield "}\n"


def text_pieces(dump: Dump) -> Iterator[str]:
    """The summary, then every stack, value and part as far as lines can show them."""
    for line in _whole(dump):
        yield ("\n" if line.style == "head" else "") + line.text + "\n"


def html_pieces(dump: Dump) -> Iterator[str]:
    """The same as one page that needs nothing else and runs nothing."""
    yield _BEGIN.replace("TITLE", html.escape(clean(dump.path.name)))
    for line in _whole(dump):
        yield f'<div class="{line.style or "text"}">{html.escape(line.text)}</div>\n'
    yield "</body></html>\n"


FORMATS: dict[str, Callable[[Dump], Iterator[str]]] = {
    "json": json_pieces,
    "text": text_pieces,
    "html": html_pieces,
}

# Nothing may be loaded or run, whatever text of the dump comes to stand in the page.
_BEGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>TITLE</title>
<style>
body { font: 13px/1.45 ui-monospace, monospace; max-width: 120ch; margin: 2em auto; padding: 0 1em; }
div { white-space: pre-wrap; overflow-wrap: anywhere; min-height: 1.45em; }
.title { font-weight: bold; font-size: 15px; color: #b00020; } .head { font-weight: bold; margin-top: 1.2em; }
.bad { color: #b00020; } .place { color: #00618a; } .code { color: #7a5200; } .note { color: #666; }
</style></head><body>
"""


def _dumped(value: Any) -> str:
    return json.dumps(_jsonable(value, 0), allow_nan=False)


def _jsonable(value: Any, depth: int) -> Any:
    """Records and values of a dump in JSON's own types, whatever they hold."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Ref):
        return {"ref": value.number}
    if isinstance(value, Missing):
        return {"gone": value.reason, "type": value.type_name}
    if depth > _DEEPEST:
        return {"gone": kinds.REASONS[kinds.DEPTH], "type": type(value).__name__}
    if isinstance(value, Source):
        found = {"file": value.file, "first": value.first, "whole": value.whole, "changed": value.changed}
        return {**found, "text": "\n".join(value.lines)}
    if is_dataclass(value):
        return {item.name: _jsonable(getattr(value, item.name), depth + 1) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): _jsonable(item, depth + 1) for key, item in value.items()}
    return [_jsonable(item, depth + 1) for item in value]


def _key(kind: str) -> str:
    return kinds.PARTS[kind].replace(" ", "_")


def _whole(dump: Dump) -> Iterator[Line]:
    yield from page(collect(dump))
    for style, text in _rest(dump):
        yield Line(style, clean(text))


def _rest(dump: Dump) -> _Raw:
    for failure in dump.exceptions:
        yield "head", f"Exception {short(failure.type_name)}: {short(failure.message)}"
        yield from _frame_lines(dump, failure.frames, values=False)
    for thread in dump.threads[:_STACKS]:
        yield "head", f"Thread {short(thread.name)} ({thread.id})" + (", failing" if thread.failing else "")
        yield from _frame_lines(dump, thread.frames)
    for task in dump.tasks[:_STACKS]:
        waits = f", waits for {short(task.waits_for)}" if task.waits_for else ""
        yield "head", f"Task {short(task.name)}, {short(task.state)}{waits}"
        yield from _frame_lines(dump, task.frames)
    if dump.logs:
        yield "head", "Log records"
    for record in dump.log_records:
        yield "text", f"  {_log_line(record)}"
    for kind in EXTRA_PARTS:
        for name, data in dump.extras(kind).items():
            yield "head", f"{kinds.PARTS[kind]}: {short(name)}"
            yield from _tree(data)
    for kind in PLAIN_PARTS:
        data = dump.part(kind)
        if data:
            yield "head", kinds.PARTS[kind]
            yield from _tree(data)


def _frame_lines(dump: Dump, frames: tuple[Frame, ...], *, values: bool = True) -> _Raw:
    for frame in frames:
        if frame.gap:
            yield "note", f"  ... {frame.gap} frames were left out"
        yield "place" if frame.mine else "text", f"  {place(frame)} in {short(frame.function)}"
        line = display.source_line(dump, frame)
        if line:
            yield "code", f"    > {line}"
        for name, value in frame.locals if values else ():
            told = display.outline(dump, value, most=_VALUE_LINES)
            for at, pieces in enumerate(told):
                yield "text", (f"      {short(name)} = " if at == 0 else "        ") + _joined(pieces)


def _tree(data: Any) -> _Raw:
    for pieces in display.plain(data, indent="  ", most=_PART_LINES):
        yield "text", _joined(pieces)


def _joined(pieces: display.Line) -> str:
    return "".join(piece if isinstance(piece, str) else piece[1] for piece in pieces)
