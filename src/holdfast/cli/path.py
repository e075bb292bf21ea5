"""Places inside a state: ``state.messages[3].content``, as errors and diffs write them.

Owns reading such a path and following it through plain values.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from holdfast import Record
from holdfast.cli.text import shorten
from holdfast.errors import BadOption, format_path

_NAME = re.compile(r"\.?([^\W\d]\w*)")
# Names that an error lists to choose from.
_LISTED = 12


def parse(text: str) -> tuple[Any, ...]:
    """The parts of a path. A leading ``state`` stands for the root and may be left out."""
    parts: list[Any] = []
    at = 0
    while at < len(text):
        if text[at] == "[":
            end, part = _bracket(text, at)
        elif (match := _NAME.match(text, at)) and (at == 0 or text[at] == "."):
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
        names = [repr(key) for key in list(value)[:_LISTED]]
        return (
            f"{here} has: {', '.join(names)}{', …' if len(value) > _LISTED else ''}." if names else f"{here} is empty."
        )
    if isinstance(value, list | tuple):
        return f"{here} has indexes 0 to {len(value) - 1}." if value else f"{here} is empty."
    return f"{here} is a {type(value).__name__}; nothing is inside it."
