"""Values as people and programs read them: one line, a tree, JSON, what changed in them, and places inside them.

Owns the limits on what is shown, and says what they cut. Knows no storage. A value comes from a store that nobody
vouches for: text is cleaned, sizes are looked at before anything is turned into text, cycles end.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from holdfast import MISSING, Change, Checkpoint, Effect, Record, RunInfo, SignalInfo
from holdfast.cli.text import clean, count, shorten
from holdfast.errors import BadOption, format_path

# Beyond this many bits Python refuses to write an integer in decimal, and nobody reads it.
_INT_BITS = 8_192
# A container that fits into this many characters is shown on one line.
_INLINE_CHARACTERS = 68
# What one value may cost before it is cut; a line on a terminal is shorter anyway.
_TEXT_CHARACTERS = 400


@dataclass(frozen=True)
class Limits:
    """How much of a state is shown."""

    depth: int = 5
    items: int = 10
    characters: int = 160


FULL = Limits(depth=1_000, items=2**62, characters=2**62)


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
    children = _children(value)
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


def _children(value: Any) -> list[tuple[Any, Any]] | None:
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
    children = _children(value)
    name = value.type_name if isinstance(value, Record) else type(value).__name__
    if isinstance(value, str):
        return f"text, {count(len(value), 'character')}"
    if isinstance(value, bytes | bytearray):
        return f"{name}, {count(len(value), 'byte')}"
    if children is None:
        return clean(name)
    return f"{clean(name)}, {count(len(children), 'field' if isinstance(value, Record) else 'item')}"


class Tree:
    """Draws a value as a tree and keeps count of what the limits left out."""

    def __init__(self, limits: Limits, *, unicode: bool = True) -> None:
        self._limits = limits
        self._bars = ("├─ ", "└─ ", "│  ", "   ") if unicode else ("|- ", "`- ", "|  ", "   ")
        self.cut = 0

    def lines(self, name: str, value: Any) -> Iterator[Text]:
        yield from self._branch("", "", Text(clean(name), style="bold"), value, 0)

    def _branch(self, lead: str, below: str, name: Text, value: Any, depth: int) -> Iterator[Text]:
        children = _children(value)
        inline = self._inline(value, children)
        line = Text().append(lead, style="dim").append_text(name)
        if inline is not None or children is None:
            yield line.append(": ", style="dim").append(inline or "", style=_style(value))
            return
        yield line.append(f"  {kind_of(value)}", style="dim")
        if depth >= self._limits.depth:
            self.cut += 1
            yield Text(f"{below}{self._bars[1]}… deeper", style="dim")
            return
        shown = self._shown(children)
        for at, entry in enumerate(shown):
            last = at == len(shown) - 1
            bar, stem = (self._bars[1], self._bars[3]) if last else (self._bars[0], self._bars[2])
            if entry is None:
                hidden = len(children) - len(shown) + 1
                self.cut += 1
                yield Text(f"{below}{bar}… {count(hidden, 'more item')}", style="dim")
            else:
                key, item = entry
                yield from self._branch(below + bar, below + stem, self._key(value, key), item, depth + 1)

    def _shown(self, children: list[tuple[Any, Any]]) -> list[tuple[Any, Any] | None]:
        """The first and the last items; None stands for those between. In a conversation the last matter most."""
        limit = self._limits.items
        if len(children) <= limit:
            return list(children)
        return [*children[: limit // 2], None, *children[limit // 2 - limit :]]

    def _inline(self, value: Any, children: list[tuple[Any, Any]] | None) -> str | None:
        if children is None:
            text = text_of(value, self._limits.characters)
            if text.endswith("…") or (isinstance(value, str | bytes) and len(value) > self._limits.characters):
                self.cut += 1
            return text
        if len(children) > self._limits.items:
            return None
        text = text_of(value, _INLINE_CHARACTERS + 1)
        return text if len(text) <= _INLINE_CHARACTERS and "…" not in text else None

    def _key(self, value: Any, key: Any) -> Text:
        if key is None:
            return Text("·", style="dim")
        if isinstance(value, list | tuple):
            return Text(f"[{key}]", style="cyan")
        if isinstance(key, str) and key.isidentifier():
            return Text(key, style="cyan")
        return Text(f"[{text_of(key, 60)}]", style="cyan")


def _style(value: Any) -> str:
    if isinstance(value, str):
        return "green"
    if isinstance(value, bool) or value is None:
        return "magenta"
    return "blue" if isinstance(value, int | float) else ""


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


# -- names: of agents and checkpoints


def whose(info: RunInfo | SignalInfo | Effect) -> str:
    """The agent, with the branch unless it is the usual one."""
    return clean(info.agent if info.branch == "main" else f"{info.agent}@{info.branch}")


def named(checkpoint: Checkpoint) -> Text:
    """``3f2a… #17 asked``."""
    about = f" #{checkpoint.depth} {clean(checkpoint.label)}".rstrip()
    return Text().append(checkpoint.short_id, style="yellow").append(about)


# -- what changed: for diff, show, undo and rollback

# What one side of a change may take up.
_SIDE_CHARACTERS = 200


def change_lines(changes: Iterable[Change]) -> Iterator[Text]:
    """``- where: old`` in red, ``+ where: new`` in green, ``~ where: kind`` where neither side is known."""
    for change in changes:
        sides = [("-", "red", change.old), ("+", "green", change.new)]
        known = [side for side in sides if side[2] is not MISSING]
        for sign, colour, value in known:
            line = Text().append(f"{sign} ", style=f"bold {colour}")
            line.append(clean(change.where), style="bold").append(": ", style="dim")
            yield line.append(text_of(value, _SIDE_CHARACTERS), style=colour)
        if not known:
            yield Text(f"~ {clean(change.where)}: {clean(change.kind)}", style="yellow")


def change_json(change: Change) -> dict[str, Any]:
    """One change in JSON. ``old`` and ``new`` are absent where there is none."""
    data: dict[str, Any] = {"where": change.where, "path": [as_json(part) for part in change.path], "kind": change.kind}
    if change.old is not MISSING:
        data["old"] = as_json(change.old)
    if change.new is not MISSING:
        data["new"] = as_json(change.new)
    return data


# -- places: state.messages[3].content, as errors and diffs write them

_WORD = re.compile(r"\.?([^\W\d]\w*)")
# Names that an error lists to choose from.
_CHOICES = 12


def parse_path(text: str) -> tuple[Any, ...]:
    """The parts of a path. A leading ``state`` stands for the root and may be left out."""
    parts: list[Any] = []
    at = 0
    while at < len(text):
        if text[at] == "[":
            end, part = _bracket(text, at)
        elif (match := _WORD.match(text, at)) and (at == 0 or text[at] == "."):
            end, part = match.end(), match[1]
        else:
            raise BadOption(f"{text!r} is not a path", hint="Write it like state.messages[3] or state.rooms['a b'].")
        parts.append(part)
        at = end
    if parts and parts[0] == "state" and not text.startswith("["):
        del parts[0]
    return tuple(parts)


def _bracket(text: str, start: int) -> tuple[int, Any]:
    end = text.find("]", start)
    while end != -1:
        try:
            return end + 1, ast.literal_eval(text[start + 1 : end])
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # perhaps a `]` inside a key's text
            end = text.find("]", end + 1)
    raise BadOption(
        f"{shorten(text[start:], 40)!r} has no closing bracket or no key in it", hint="Text keys need quotes: ['a b']."
    )


def follow(value: Any, parts: tuple[Any, ...], walked: tuple[Any, ...] = ()) -> Any:
    """The value at the end of the path."""
    for at, part in enumerate(parts):
        inside = value
        if isinstance(value, Record):
            inside = value.fields if value.fields is not None else value.data
        try:
            value = inside[part]
        except (KeyError, IndexError, TypeError):
            here = format_path((*walked, *parts[:at]))
            raise BadOption(f"{here} has no {part!r}", hint=_inside(here, inside)) from None
    return value


def _inside(here: str, value: Any) -> str:
    if isinstance(value, dict):
        names = [repr(key) for key in list(value)[:_CHOICES]]
        return (
            f"{here} has: {', '.join(names)}{', …' if len(value) > _CHOICES else ''}." if names else f"{here} is empty."
        )
    if isinstance(value, list | tuple):
        return f"{here} has indexes 0 to {len(value) - 1}." if value else f"{here} is empty."
    return f"{here} is a {type(value).__name__}; nothing is inside it."
