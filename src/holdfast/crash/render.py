"""Values of a dump as text for people: short, bounded, like `repr` where that is clear.

Must not know where text goes (a terminal, an editor, a page). Holds always: the length is bounded whatever the dump
holds; control characters are escaped, so that a value cannot write to a terminal.
"""

from __future__ import annotations

import re

from holdfast.crash import kinds
from holdfast.crash.dump import Dump
from holdfast.crash.inert import Gone, Inert, Ref, Seen, Value

_DTYPES = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_DTYPE = re.compile(r"[<>|=]?([fiucb])(\d{1,2})")
_NAME = 200  # characters of a type's
_OPEN = {"list": "[]", "tuple": "()", "set": "{}", "frozenset": "{}", "collections.deque": "[]"}


def text_of(dump: Dump, value: Value, *, width: int = 200, depth: int = 3) -> str:
    """One line for a value, not longer than about ``width`` characters."""
    return _shorten(_text(dump, value, width, depth, set()), width)


def _text(dump: Dump, value: Value, width: int, depth: int, path: set[int]) -> str:
    if isinstance(value, Gone):
        return f"<{value.type_name}: {value.reason}>" if value.type_name else f"<{value.reason}>"
    if isinstance(value, Seen):
        return value[: width + 20]
    if isinstance(value, str | bytes):
        return repr(value[: width + 20])
    if not isinstance(value, Ref):
        return repr(value)
    if value.number in path:
        return "..."
    # Each piece takes two characters at least, so that more of them are never shown.
    return _object(dump, dump.object(value, most=width + 10), width, depth, path | {value.number})


def _object(dump: Dump, inert: Inert, width: int, depth: int, path: set[int]) -> str:
    name = inert.type_name[:_NAME]
    text = (inert.text or "")[: width + 20]
    if inert.kind == kinds.CUT:
        return f"<{name}: {inert.reason}>"
    if inert.kind == kinds.TEXT:
        more = f"... {inert.total} in all" if inert.total else ""
        shown = repr(text) + more
        return shown if name in ("str", "bytes") else f"{name}({shown})"
    if inert.kind == kinds.LITERAL:
        return str(text) if name in ("int", "float", "complex") else f"<{name} {clean(str(text))}>"
    if inert.kind == kinds.NAMED:
        return f"<{'module' if name == 'module' else 'class'} {clean(str(text))}>"
    if inert.kind == kinds.CALLABLE:
        return f"<{name} {clean(inert.details['name'][:_NAME])}>"
    if inert.kind == kinds.ARRAY:
        shape = ", ".join(map(str, inert.details["shape"][:64]))
        return f"<{name} {dtype_name(inert.details['dtype'])} ({shape}), {size(inert.details['bytes'])}>"
    if inert.kind == kinds.SUSPENDED:
        state = clean(inert.details["state"][:_NAME])
        return f"<{name} {clean(inert.details['name'][:_NAME])}, {state}, line {inert.details['line']}>"
    if depth <= 0:
        count = inert.total or (len(inert.items) + len(inert.pairs) or len(inert.attributes)) + inert.left
        return f"<{name} of {count}>" if inert.kind != kinds.OBJECT else f"<{name}>"
    pieces: list[str] = []
    used = 0
    inside: list[tuple[str, Value]] = [("", item) for item in inert.items]
    inside += [(_text(dump, key, 40, 0, path) + ": ", item) for key, item in inert.pairs[:200]]
    inside += [(f"{attribute}=", item) for attribute, item in inert.attributes]
    for label, item in inside:
        if used > width:
            pieces.append("...")
            break
        piece = label + _text(dump, item, max(20, width - used), depth - 1, path)
        pieces.append(piece)
        used += len(piece) + 2
    if (inert.total or inert.left) and (not pieces or pieces[-1] != "..."):
        pieces.append(f"... {inert.total or len(inert.items) + len(inert.pairs) + inert.left} in all")
    body = ", ".join(pieces)
    if inert.kind == kinds.DICT:
        return "{" + body + "}" if name == "dict" else f"{name}({{{body}}})"
    if inert.kind == kinds.LIST:
        brackets = _OPEN.get(name, "[]")
        comma = "," if name == "tuple" and len(inert.items) == 1 else ""
        shown = brackets[0] + body + comma + brackets[1]
        return (
            shown
            if name in ("list", "tuple", "set") and (body or name != "set")
            else f"{name}({shown if body else ''})"
        )
    return f"<{name} {body}>" if body else f"<{name}>"


def dtype_name(code: str) -> str:
    """NumPy's short form as people write it: ``<f4`` is ``float32``."""
    match = _DTYPE.fullmatch(code)
    if match is None:
        return clean(code[:_NAME])
    kind, length = _DTYPES[match[1]], int(match[2])
    return kind if kind == "bool" else f"{kind}{length * 8}"


def size(count: int) -> str:
    """``1.2 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def clean(text: str) -> str:
    """The text with control characters escaped."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def _shorten(text: str, width: int) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
