"""A whole dump in forms that other tools read: JSON for programs, one text or page of HTML for people.

Owns those forms. Must not know what it is written to: it gives pieces of text. Holds always: JSON is ASCII and has
every part and object; text and HTML have no control character and nothing that a browser would run; memory does not
grow with the number of objects.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from holdfast.crash import display, kinds
from holdfast.crash.display import clean
from holdfast.crash.dump import Dump
from holdfast.crash.records import Frame, Gone, Ref, Source, as_float, as_text
from holdfast.crash.summary import Line, collect, moment, page, place, short

SCHEMA = "holdfast.dump/1"
_RECORDS = (kinds.PROCESS, kinds.DESCRIPTORS, kinds.ENVIRONMENT, kinds.MODULES, kinds.HEAP)
_EXTRAS = (kinds.AGENT, kinds.LOCKS, kinds.NATIVE, kinds.NOTE)
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
        **{_key(kind): dump.part(kind) for kind in _RECORDS},
        **{_key(kind): dump.extras(kind) for kind in _EXTRAS},
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
    for line in _lines(dump):
        yield ("\n" if line.style == "head" else "") + line.text + "\n"


def html_pieces(dump: Dump) -> Iterator[str]:
    """The same as one page that needs nothing else and runs nothing."""
    yield _BEGIN.replace("TITLE", html.escape(clean(dump.path.name)))
    for line in _lines(dump):
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


# JSON.


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


# Text.


def _lines(dump: Dump) -> Iterator[Line]:
    yield from page(collect(dump))
    for style, text in _rest(dump):
        yield Line(style, clean(text))


def _rest(dump: Dump) -> Iterator[tuple[str, str]]:
    for failure in dump.exceptions:
        yield "head", f"Exception {short(failure.type_name)}: {short(failure.message)}"
        yield from _frames(dump, failure.frames, values=False)
    for thread in dump.threads[:_STACKS]:
        yield "head", f"Thread {short(thread.name)} ({thread.id})" + (", failing" if thread.failing else "")
        yield from _frames(dump, thread.frames)
    for task in dump.tasks[:_STACKS]:
        waits = f", waits for {short(task.waits_for)}" if task.waits_for else ""
        yield "head", f"Task {short(task.name)}, {short(task.state)}{waits}"
        yield from _frames(dump, task.frames)
    if dump.logs:
        yield "head", "Log records"
    for record in dump.logs:
        words = [moment(as_float(record.get("at")))[11:19], *(as_text(record.get(key)) for key in ("level", "logger"))]
        yield "text", f"  {' '.join(map(short, words))}: {as_text(record.get('text'))}"
    for kind in _EXTRAS:
        for name, data in dump.extras(kind).items():
            yield "head", f"{kinds.PARTS[kind]}: {short(name)}"
            yield from _tree(data)
    for kind in _RECORDS:
        data = dump.part(kind)
        if data:
            yield "head", kinds.PARTS[kind]
            yield from _tree(data)


def _frames(dump: Dump, frames: tuple[Frame, ...], *, values: bool = True) -> Iterator[tuple[str, str]]:
    for frame in frames:
        if frame.gap:
            yield "note", f"  ... {frame.gap} frames were left out"
        yield "place" if frame.mine else "text", f"  {place(frame)} in {short(frame.function)}"
        source = dump.sources.get(frame.file)
        line = source.line(frame.line) if source is not None else None
        if line is not None:
            yield "code", f"    > {short(line.strip())}"
        for name, value in frame.locals if values else ():
            told = display.outline(dump, value, most=_VALUE_LINES)
            for at, pieces in enumerate(told):
                yield "text", (f"      {short(name)} = " if at == 0 else "        ") + _joined(pieces)


def _tree(data: Any) -> Iterator[tuple[str, str]]:
    for pieces in display.plain(data, indent="  ", most=_PART_LINES):
        yield "text", _joined(pieces)


def _joined(pieces: display.Line) -> str:
    return "".join(piece if isinstance(piece, str) else piece[1] for piece in pieces)
