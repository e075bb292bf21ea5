"""Lines about a dump: the page that a person reads first, and the whole dump as JSON, text or HTML.

Owns the words and their order, and those forms. Must not know colours, terminals or widths. Holds always: a line has no
control character, and HTML nothing that a browser would run; JSON is ASCII and has every part and object; what is
exported is given in pieces, so that memory does not grow with the number of objects.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from holdfast.crash import display, kinds
from holdfast.crash.dump import EXTRA_PARTS, PLAIN_PARTS, Dump
from holdfast.crash.records import Agent, Frame, Gone, LogRecord, Process, Ref, Source
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
    if isinstance(value, Gone):
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
