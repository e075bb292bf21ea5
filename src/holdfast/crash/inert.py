"""Objects of a dump as inert data: their type's name, their parts, what was cut and why.

Owns the checks on every node that a file gives. Must not know files, threads or text for people. Holds always: nothing
is imported, called or looked up by a name from the dump; a node that breaks the rules is shown as broken, without an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.crash import kinds

Plain = None | bool | int | float | str | bytes


@dataclass(frozen=True)
class Ref:
    """An object of the dump, by its number."""

    number: int


@dataclass(frozen=True)
class Gone:
    """A value that was not stored, and why."""

    reason: str
    type_name: str = ""


class Seen(str):
    """A value as a tool that read it from outside shows it: text that stands for a value, not a text that was one."""

    __slots__ = ()


Value = Plain | Ref | Gone


@dataclass(frozen=True)
class Inert:
    """One object. ``items`` for sequences and sets, ``pairs`` for mappings, ``attributes`` for everything."""

    number: int
    kind: int
    type_name: str
    text: str | bytes | None = None
    items: tuple[Value, ...] = ()
    pairs: tuple[tuple[Value, Value], ...] = ()
    attributes: tuple[tuple[str, Value], ...] = ()
    total: int | None = None  # how many items, characters or bytes there were, when not all are here
    left: int = 0  # items, pairs or attributes that are stored and were not asked for
    reason: str = ""  # why the content is not here
    details: dict[str, Any] = field(default_factory=dict)  # file and line of a function, shape of an array

    def attribute(self, name: str) -> Value:
        """The attribute's value; Gone when there is none of that name."""
        for key, value in self.attributes:
            if key == name:
                return value
        return Gone("no such attribute")

    def children(self) -> Iterator[tuple[str, Value]]:
        """Every value below, with the way to it: ``[3]``, ``['name']``, ``.attribute``."""
        for index, value in enumerate(self.items):
            yield f"[{index}]", value
        for key, value in self.pairs:
            yield f"[{key_text(key)}]", value
        for name, value in self.attributes:
            yield f".{name}", value


def key_text(key: Value) -> str:
    """A key as it stands in a path."""
    if isinstance(key, Ref):
        return f"#{key.number}"
    if isinstance(key, Gone):
        return f"<{key.type_name or key.reason}>"
    return repr(key)


def value_of(entry: Any) -> Value:
    """An entry of the file as a value. Whatever it is, the answer is one of the three forms."""
    if entry is None or isinstance(entry, bool | int | float | str | bytes):
        return entry
    if isinstance(entry, list):
        if len(entry) == 1 and type(entry[0]) is int and entry[0] >= 0:
            return Ref(entry[0])
        if len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str):
            return Gone(kinds.REASONS.get(entry[0], f"reason {entry[0]}"), entry[1])
    return Gone("broken entry")


def named_values(flat: Any, most: int | None = None) -> tuple[tuple[str, Value], ...]:
    """Name, entry, name, entry -> pairs, the first ``most`` of them."""
    if not isinstance(flat, list):
        return ()
    end = len(flat) - 1 if most is None else min(len(flat) - 1, 2 * most)
    return tuple((str(flat[at]), value_of(flat[at + 1])) for at in range(0, end, 2))


def node(number: int, names: Any, shapes: Any, raw: Any, most: int | None = None) -> Inert:
    """A node of the file as an object; of a long one the first ``most`` items, pairs or attributes."""
    if not isinstance(raw, list) or len(raw) < 3 or not all(type(code) is int for code in raw[:2]):
        return Inert(number, kinds.CUT, "?", reason="broken node")
    kind, index = raw[0], raw[1]
    name = names[index] if isinstance(names, list) and 0 <= index < len(names) else "?"
    name = name if isinstance(name, str) else "?"
    rest = [*raw[2:], *[None] * 5]
    if kind == kinds.CUT:
        return Inert(number, kind, name, reason=kinds.REASONS.get(rest[0], "cut") if type(rest[0]) is int else "cut")
    if kind == kinds.TEXT and isinstance(rest[0], str | bytes):
        return Inert(number, kind, name, text=rest[0], total=_count(rest[1]), attributes=named_values(rest[2], most))
    if kind in (kinds.LITERAL, kinds.NAMED) and isinstance(rest[0], str):
        return Inert(number, kind, name, text=rest[0])
    if kind == kinds.LIST and isinstance(rest[0], list):
        items = tuple(value_of(entry) for entry in rest[0][:most])
        left, own = len(rest[0]) - len(items), named_values(rest[2], most)
        return Inert(number, kind, name, items=items, total=_count(rest[1]), left=left, attributes=own)
    if kind == kinds.DICT and isinstance(rest[0], list):
        values = [value_of(entry) for entry in (rest[0] if most is None else rest[0][: 2 * most])]
        pairs = tuple(zip(values[::2], values[1::2], strict=False))
        left, own = len(rest[0]) // 2 - len(pairs), named_values(rest[2], most)
        return Inert(number, kind, name, pairs=pairs, total=_count(rest[1]), left=left, attributes=own)
    if kind in (kinds.SHAPED_DICT, kinds.SHAPED_OBJECT) and isinstance(rest[1], list):
        shape = (
            shapes[rest[0]] if type(rest[0]) is int and isinstance(shapes, list) and 0 <= rest[0] < len(shapes) else []
        )
        keys = [_str(key) for key in shape[:most]] if isinstance(shape, list) else []
        named = tuple(zip(keys, map(value_of, rest[1][:most]), strict=False))
        left = min(len(shape), len(rest[1])) - len(named) if isinstance(shape, list) else 0
        if kind == kinds.SHAPED_DICT:
            return Inert(number, kinds.DICT, name, pairs=named, left=left)
        return Inert(number, kinds.OBJECT, name, attributes=named, left=left)
    if kind == kinds.OBJECT:
        own = named_values(rest[0], most)
        left = len(rest[0]) // 2 - len(own) if isinstance(rest[0], list) else 0
        return Inert(number, kind, name, attributes=own, left=left)
    if kind == kinds.CALLABLE:
        details = {"name": _str(rest[0]), "file": _str(rest[1]), "line": _count(rest[2]) or 0}
        return Inert(number, kind, name, attributes=named_values(rest[3], most), details=details)
    if kind == kinds.ARRAY:
        shape = [length for length in rest[1] if type(length) is int] if isinstance(rest[1], list) else []
        details = {"dtype": _str(rest[0]), "shape": shape, "bytes": _count(rest[2]) or 0}
        items = tuple(value_of(entry) for entry in rest[3][:most]) if isinstance(rest[3], list) else ()
        left = len(rest[3]) - len(items) if isinstance(rest[3], list) else 0
        return Inert(number, kind, name, items=items, left=left, details=details)
    if kind == kinds.SUSPENDED:
        details = {"name": _str(rest[0]), "file": _str(rest[1]), "line": _count(rest[2]) or 0, "state": _str(rest[3])}
        return Inert(number, kind, name, attributes=named_values(rest[4], most), details=details)
    return Inert(number, kinds.CUT, name, reason="broken node")


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""
