"""What is said of things in JSON, for the command line and the page alike; and a value on one line.

Owns the objects of which docs/json.md tells. Knows no terminal and no page. A value comes from a store that nobody
vouches for: text is cleaned, sizes are looked at before anything is turned into text, cycles end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from holdfast import MISSING, Agent, Change, Effect, Record, RollbackPlan, RunInfo, SignalInfo
from holdfast.errors import ResultForgotten
from holdfast.text import clean, count, shorten

# Beyond this many bits Python refuses to write an integer in decimal, and nobody reads it.
_INT_BITS = 8_192
# What one value may cost before it is cut; a line on a terminal is shorter anyway.
_TEXT_CHARACTERS = 400


# -- values -----------------------------------------------------------------------------------------------------------


def text_of(value: Any, limit: int = _TEXT_CHARACTERS) -> str:
    """The value on one line, as Python writes it, at most about ``limit`` characters."""
    return clean(shorten(_text(value, limit, 0), limit))


def _text(value: Any, limit: int, depth: int) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}… ({count(len(value), 'character')})"
    if isinstance(value, bytes | bytearray):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}… ({count(len(value), 'byte')})"
    if type(value) is int and value.bit_length() > _INT_BITS:
        return f"{'-' if value < 0 else ''}0x{abs(value) >> (value.bit_length() - 64):x}… ({value.bit_length():,} bits)"
    children = children_of(value)
    if children is None:
        return repr(value)
    if depth > 8:
        return "…"
    return _container(value, children, limit, depth)


def _container(value: Any, children: list[tuple[Any, Any]], limit: int, depth: int) -> str:
    opening, closing = _brackets(value)
    parts: list[str] = []
    used = 0
    for key, item in children:
        part = _text(item, limit - used, depth + 1)
        if key is not None and not isinstance(value, list | tuple):
            part = f"{key}={part}" if isinstance(value, Record) else f"{_text(key, limit, depth + 1)}: {part}"
        parts.append(part)
        used += len(part) + 2
        if used > limit:
            parts.append("…")
            break
    return f"{opening}{', '.join(parts)}{',' if isinstance(value, tuple) and len(parts) == 1 else ''}{closing}"


def _brackets(value: Any) -> tuple[str, str]:
    if isinstance(value, Record):
        return f"{value.type_name}(", ")"
    if isinstance(value, dict):
        return "{", "}"
    if isinstance(value, list):
        return "[", "]"
    if isinstance(value, tuple):
        return "(", ")"
    return ("frozenset({", "})") if isinstance(value, frozenset) else ("{", "}")


def children_of(value: Any) -> list[tuple[Any, Any]] | None:
    """What is inside a container, as pairs of (key, item). The key of a set's item is None."""
    if isinstance(value, Record):
        fields = value.fields if value.form == "pydantic" else value.data
        if isinstance(fields, dict) and value.form != "enum":
            return list(fields.items())
        return None if value.form == "enum" else [("data", value.data)]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        # Python's order of a set differs from run to run; a listing must not.
        return [(None, item) for item in sorted(value, key=repr)]
    return None


def kind_of(value: Any) -> str:
    """``list, 12 items``: what a value is, without its content."""
    children = children_of(value)
    name = value.type_name if isinstance(value, Record) else type(value).__name__
    if isinstance(value, str):
        return f"text, {count(len(value), 'character')}"
    if isinstance(value, bytes | bytearray):
        return f"{name}, {count(len(value), 'byte')}"
    if children is None:
        return clean(name)
    return f"{clean(name)}, {count(len(children), 'field' if isinstance(value, Record) else 'item')}"


def as_json(value: Any, _above: tuple[int, ...] = ()) -> Any:
    """The value in JSON's own types. What JSON lacks becomes an object with ``$type``; docs/cli.md has the table."""
    if value is None or type(value) in {bool, str}:
        return value
    if type(value) is int and value.bit_length() <= _INT_BITS:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if id(value) in _above:
        return {"$type": "cycle"}
    above = (*_above, id(value))
    if isinstance(value, list | tuple):
        return [as_json(item, above) for item in value]
    if isinstance(value, set | frozenset):
        return [as_json(item, above) for item in sorted(value, key=repr)]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: as_json(item, above) for key, item in value.items()}
        return {"$type": "dict", "$items": [[as_json(k, above), as_json(v, above)] for k, v in value.items()]}
    if isinstance(value, Record):
        return {"$type": value.type_name, "$version": value.version, "$data": as_json(value.data, above)}
    if type(value) is int:
        return {"$type": "int", "$text": hex(value)}
    return {"$type": type(value).__name__, "$text": repr(value)}


def change_json(change: Change) -> dict[str, Any]:
    """One change in JSON. ``old`` and ``new`` are absent where there is none."""
    data: dict[str, Any] = {"where": change.where, "path": [as_json(part) for part in change.path], "kind": change.kind}
    if change.old is not MISSING:
        data["old"] = as_json(change.old)
    if change.new is not MISSING:
        data["new"] = as_json(change.new)
    return data


# -- calls, runs, crashes, ways back ----------------------------------------------------------------------------------

Write = Callable[[Any], Any]
"""How a value becomes JSON: whole, or cut to what can be shown."""


def effect_json(effect: Effect, *, full: bool = False, write: Write = as_json) -> dict[str, Any]:
    """One effect in JSON. ``key`` and ``id`` are "" for reads; ``result`` is null unless it is known.

    With ``let_go`` it is null, and so is ``args``.
    """
    given = None if effect.let_go else effect.whole() if full else effect.args
    return {
        "agent": effect.agent,
        "branch": effect.branch,
        "id": effect.id,
        "key": effect.key,
        "tool": effect.tool,
        "kind": effect.kind,
        "status": effect.status,
        "run": effect.run,
        "path": effect.path,
        "number": effect.number,
        "attempt": effect.attempt,
        "at": effect.at.isoformat(),
        "took_s": effect.took_s,
        "args": write(given),
        "result": None if effect.let_go else write(effect.result),
        "let_go": effect.let_go,
        "error": effect.error,
        "why": effect.why,
    }


def run_json(info: RunInfo, *, write: Write = as_json) -> dict[str, Any]:
    """One run in JSON. ``result`` is null until it has finished; with ``let_go``, what went is."""
    found: dict[str, Any] = {"args": None, "result": None}
    for name in found:
        with suppress(ResultForgotten):
            found[name] = write(getattr(info, name))
    return {**info.to_json(), **found}


def signal_json(info: SignalInfo, *, write: Write = as_json) -> dict[str, Any]:
    """One signal in JSON, with its value."""
    return {**info.to_json(), "value": write(info.value)}


def crash_json(one: dict[str, Any]) -> dict[str, Any]:
    """A crash, or a new start from one, as ``agent.crashes()`` tells it."""
    keys = ("what", "error", "message", "trigger", "branch", "checkpoint", "dump")
    return {**{key: str(one.get(key, "")) for key in keys}, "time": one["when"].isoformat()}


def unmoved(handle: Agent) -> str:
    """Why no file moves where an agent goes back; empty: they do."""
    from holdfast import process  # few agents have files

    return process.unmoved(handle)


def rollback_json(handle: Agent, plan: RollbackPlan, changes: Sequence[Change], *, done: bool) -> dict[str, Any]:
    """What a rollback would do, or has done."""
    planned, files = plan.to_json(), plan.diff.files
    return {
        "agent": handle.name,
        "branch": handle.branch_name,
        "done": done,
        "target": plan.target.to_json(),
        "abandons": [checkpoint.to_json() for checkpoint in plan.abandons],
        "changes": [change_json(change) for change in changes],
        "files": [one.to_json() for one in files],
        "unmoved": unmoved(handle) if files else "",
        **{key: planned[key] for key in ("undo", "blocked", "accepted", "undone", "harmless", "children")},
    }
