"""Values, exception trees, stacks and native parts of a dump as text for people.

Must not know where text goes (a terminal, an editor, a page). Holds always: every length and the number of lines is
bounded, whatever the dump holds; control characters of values are escaped, so that one cannot write to a terminal. A
line is a tuple of pieces: a text, or a style (head, mark, bad, dim, name) and a text; whoever prints them cleans them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.dump import Dump, plain_children
from holdfast.crash.records import Failure, Frame, Inert, Missing, Ref, TextOnly, Value
from holdfast.text import clean, size

# -- one line --------------------------------------------------------------------------------------------------------


_DTYPES = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_DTYPE = re.compile(r"[<>|=]?([fiucb])(\d{1,2})")
_NAME = 200  # characters of a type's
_OPEN = {"list": "[]", "tuple": "()", "set": "{}", "frozenset": "{}", "collections.deque": "[]"}


def text_of(dump: Dump, value: Value, *, width: int = 200, depth: int = 3) -> str:
    """One line for a value, not longer than about ``width`` characters."""
    return _shorten(_text(dump, value, width, depth, set()), width)


def _text(dump: Dump, value: Value, width: int, depth: int, path: set[int]) -> str:
    if isinstance(value, Missing):
        return f"<{value.type_name}: {value.reason}>" if value.type_name else f"<{value.reason}>"
    if isinstance(value, TextOnly):
        return value[: width + 20]
    if not isinstance(value, Ref):
        return _leaf(value, width + 20)
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


def _shorten(text: str, width: int) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


# -- several lines ---------------------------------------------------------------------------------------------------


Piece = str | tuple[str, str]
Line = tuple[Piece, ...]

_LEVELS = 8  # of an outline; deeper values stay on one line
_UNFOLDED = 1_000  # of one container; no outline has so many lines
_ITEMS = 8  # of a container of plain data on one line
_REPEATS = 3  # equal frames in a row that are shown before the others are counted


def outline(dump: Dump, value: Value, *, width: int = 100, most: int = 200) -> Iterator[Line]:
    """A value over several lines: what fits stays on one, the rest is unfolded, to a bound."""
    lines = _unfold(dump, "", value, "", width, frozenset())
    for line in islice(lines, most):
        yield (line,)
    if next(lines, None) is not None:
        yield (("dim", f"... more; only {most} lines are shown. Ask for a part of it."),)


def _unfold(dump: Dump, label: str, value: Value, indent: str, width: int, above: frozenset[int]) -> Iterator[str]:
    if isinstance(value, Ref) and value.number in above:
        yield f"{indent}{label}... #{value.number}, as above"
        return
    room = max(30, width - len(indent) - len(label))
    short = text_of(dump, value, width=room + 1, depth=_LEVELS)
    fits = len(short) <= room and "..." not in short
    if not isinstance(value, Ref) or fits or len(above) >= _LEVELS:
        yield indent + label + (short if fits else text_of(dump, value, width=max(room, 400), depth=2))
        return
    inert = dump.object(value, most=_UNFOLDED)
    inside = _labelled(dump, inert)
    if next(inside, None) is None:
        yield indent + label + text_of(dump, value, width=max(room, 400))
        return
    yield f"{indent}{label}{headline(inert)}"
    for name, child in _labelled(dump, inert):
        yield from _unfold(dump, name, child, indent + "  ", width, above | {value.number})


def _labelled(dump: Dump, inert: Inert) -> Iterator[tuple[str, Value]]:
    for index, item in enumerate(inert.items):
        yield f"[{index}] ", item
    for key, item in inert.pairs:
        yield text_of(dump, key, width=60, depth=1) + ": ", item
    for name, item in inert.attributes:
        yield f".{name} = ", item


def headline(inert: Inert) -> str:
    """Type, number and size: what stands above an object's content."""
    count = len(inert.items) + len(inert.pairs) + (inert.left if inert.items or inert.pairs else 0)
    told = f" of {inert.total or count}" if count or inert.total else ""
    stored = f" ({count} stored)" if inert.total and inert.total > count else ""
    return f"{inert.type_name}{told}{stored} #{inert.number}"


def plain(data: Any, *, indent: str = "", most: int = 200) -> Iterator[Line]:
    """Plain data (dicts, lists, texts, numbers) as an indented tree, to a bound."""
    lines = _plain(data, indent, _LEVELS)
    yield from islice(lines, most)
    if next(lines, None) is not None:
        yield (("dim", f"{indent}... more; only {most} lines are shown"),)


def _plain(data: Any, indent: str, depth: int) -> Iterator[Line]:
    for name, value in plain_children(data):
        if isinstance(value, dict | list) and value and depth > 0 and not _short(value):
            yield indent, ("name", name)
            yield from _plain(value, indent + "  ", depth - 1)
        else:
            yield indent, ("name", name), "  ", plain_text(value)
    if not isinstance(data, dict | list):
        yield indent, plain_text(data)


def plain_text(value: Any, width: int = 400) -> str:
    """One line for plain data: a text as it is, and what a container holds."""
    if isinstance(value, str):
        text = value[: width + 1]
    elif isinstance(value, dict):
        text = ", ".join(f"{str(key)[:_NAME]}={_leaf(item, width)}" for key, item in islice(value.items(), _ITEMS))
    elif isinstance(value, list):
        text = ", ".join(plain_text(item, width) if _is_leaf(item) else _leaf(item, width) for item in value[:_ITEMS])
    else:
        text = _leaf(value, width)
    if isinstance(value, dict | list):
        text = text + f", ... {len(value)} in all" if len(value) > _ITEMS else text or "(empty)"
    return text if len(text) <= width else text[: width - 3] + "..."


def _leaf(value: Any, width: int) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:width])
    if _is_leaf(value) or not value:
        return repr(value)
    return "{...}" if isinstance(value, dict) else f"[{len(value)} items]"


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _short(value: Any) -> bool:
    """Whether it is a list that fits a line."""
    return isinstance(value, list) and 0 < len(value) < 9 and all(map(_is_leaf, value))


def failures(dump: Dump, *, marked: int | None = None) -> Iterator[Line]:
    """The exception and all that it names, as a tree; each once, with its place for `exc N`."""
    every = dump.exceptions
    seen: set[int] = set()
    waiting: list[tuple[int, int, str]] = [(0, 0, "")] if every else []
    while waiting:
        number, level, relation = waiting.pop()
        failure = every[number]
        indent = "  " * level
        sign = ">" if number == marked else " "
        if number in seen:
            yield sign, f"{indent}{number:3} {relation}", ("dim", f"{failure.type_name}: see {number} above")
            continue
        seen.add(number)
        yield sign, f"{indent}{number:3} {relation}", ("bad", failure.type_name), message_of(failure)
        for note in failure.notes:
            for line in note.splitlines() or [""]:
                yield (f"     {indent}note: {line[:2000]}",)
        if failure.frames:
            last = failure.frames[-1]
            yield f"     {indent}", ("dim", f"at {last.file}:{last.line} in {last.function}")
        if failure.members > len(failure.group):
            yield f"     {indent}", ("dim", f"{failure.members - len(failure.group)} more members were not stored")
        below = [(place, level + 1, f"member {at}: ") for at, place in enumerate(failure.group, 1)]
        if failure.cause is not None:
            below.append((failure.cause, level + 1, "caused by "))
        elif failure.context is not None:
            hidden = " (suppressed)" if failure.suppressed else ""
            below.append((failure.context, level + 1, f"while handling{hidden} "))
        waiting.extend(reversed(below))


def message_of(failure: Failure, width: int = 2000) -> str:
    more = f" ({failure.members} members)" if failure.members else ""
    own = " (its class has a __str__ of its own, which was not run)" if failure.own_str else ""
    return (f": {failure.message[:width]}" if failure.message else "") + more + own


def trace(dump: Dump, frames: tuple[Frame, ...], *, marked: int = -1, first: int = 0) -> Iterator[Line]:
    """Frames with their source lines, outermost first, from ``first`` on; many equal ones in a row are counted."""
    shown = enumerate(frames[first:], first)
    for _place, group in groupby(shown, key=lambda pair: (pair[1].file, pair[1].line, pair[1].function)):
        run = list(group)
        hidden = 0
        for place, (at, frame) in enumerate(run):
            if _REPEATS <= place < len(run) - 1 and at != marked and not frame.gap:
                hidden += 1
                continue
            if hidden:
                yield (("dim", f"      ... the same {hidden} times more"),)
                hidden = 0
            yield from _step(dump, at, frame, here=at == marked)


def _step(dump: Dump, at: int, frame: Frame, *, here: bool) -> Iterator[Line]:
    if frame.gap:
        yield (("dim", f"      ... {frame.gap} frames were left out"),)
    style = "mark" if here else "head" if frame.mine else "dim"
    yield "> " if here else "  ", f"{at:3} ", (style, f"{frame.file}({frame.line})"), ("name", f"{frame.function}()")
    line = source_line(dump, frame)
    if line:
        yield "      -> ", line if frame.mine or here else ("dim", line)


def source_line(dump: Dump, frame: Frame) -> str:
    source = dump.sources.get(frame.file)
    line = source.line(frame.line) if source else None
    return line.strip()[:400] if line else ""


def native(dump: Dump) -> Iterator[Line]:
    """Registers and native stacks, as whoever wrote them named them."""
    yield from native_parts(
        dump.extras(kinds.NATIVE) or ({"native": dump.part(kinds.NATIVE)} if dump.part(kinds.NATIVE) else {})
    )


def native_parts(parts: dict[str, Any]) -> Iterator[Line]:
    """The same, of what was read elsewhere."""
    for name, data in parts.items():
        yield (("head", name),)
        listed = data.get("threads") if isinstance(data, dict) else None
        if isinstance(listed, dict):  # by the number that the kernel gives to a thread
            listed = [{"id": key, **item} if isinstance(item, dict) else item for key, item in listed.items()]
        rest = {key: value for key, value in data.items() if key != "threads"} if isinstance(listed, list) else data
        yield from plain(rest, indent="  ")
        for thread in listed[:2000] if isinstance(listed, list) else ():
            yield from _native_thread(thread)


def _native_thread(thread: Any) -> Iterator[Line]:
    if not isinstance(thread, dict):
        yield from plain(thread, indent="  ")
        return
    fields = {key: value for key, value in thread.items() if key not in ("registers", "frames")}
    small = ", ".join(f"{key} {plain_text(value, 100)}" for key, value in islice(fields.items(), 20))
    yield "  ", ("mark", "thread "), small
    registers = thread.get("registers")
    if isinstance(registers, dict):
        shown = [f"{name[:12]:>8} {_hex(value):<18}" for name, value in islice(registers.items(), 200)]
        for at in range(0, len(shown), 3):
            yield ("  ", " ".join(shown[at : at + 3]).rstrip())
    elif registers is not None:
        yield from plain(registers, indent="    ")
    frames = thread.get("frames")
    for at, frame in enumerate(frames[:400] if isinstance(frames, list) else ()):
        yield ("    ", f"{at:3} ", _native_frame(frame))
        named = frame.get("locals") if isinstance(frame, dict) else None
        if isinstance(named, list):  # name, text, name, text
            for name, text in islice(zip(named[::2], named[1::2], strict=False), 100):
                yield "          ", ("name", plain_text(name, 100)), " = ", plain_text(text)


def _native_frame(frame: Any) -> str:
    if not isinstance(frame, dict):
        return plain_text(frame)
    words = [_hex(frame["address"])] if "address" in frame else []
    words.append(plain_text(frame.get("function") or "?"))
    if frame.get("file"):
        words.append(f"at {plain_text(frame['file'])}:{plain_text(frame.get('line', '?'))}")
    if frame.get("module"):
        words.append(f"in {plain_text(frame['module'])}")
    known = ("address", "function", "file", "line", "module", "locals")
    words += [f"{key}={plain_text(value, 60)}" for key, value in islice(frame.items(), 20) if key not in known]
    return " ".join(words)


def _hex(value: Any) -> str:
    return f"0x{value:016x}" if type(value) is int and value >= 0 else plain_text(value, 40)
