"""Changes as people read them: the mutation log and diffs.

Owns the translation of operations into (path, old, new), and how a diff prints. Knows nothing of storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from holdfast.codec import operations as op
from holdfast.codec.compare import differences
from holdfast.codec.document import MISSING, Document
from holdfast.codec.nodes import FLAT
from holdfast.codec.operations import Operation
from holdfast.codec.values import encode
from holdfast.errors import format_path

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# How much of a value a line shows.
_SHOWN_CHARACTERS = 120
# Python refuses to print integers of more than 4,300 digits; beyond this they are given in hexadecimal.
_JSON_INT_MAX_BITS = 8_192


class Change(Struct, frozen=True):
    """One change. ``old`` and ``new`` are plain values, or MISSING."""

    path: tuple[Any, ...]
    kind: str
    old: Any
    new: Any
    when: datetime | None = None
    label: str = ""
    checkpoint: str = ""

    @property
    def where(self) -> str:
        return format_path(self.path)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"path": [_json(part) for part in self.path], "where": self.where, "kind": self.kind}
        if self.old is not MISSING:
            data["old"] = _json(self.old)
        if self.new is not MISSING:
            data["new"] = _json(self.new)
        if self.when is not None:
            data["when"] = self.when.isoformat()
        if self.checkpoint:
            data |= {"label": self.label, "checkpoint": self.checkpoint}
        return data


def _json(value: Any) -> Any:
    """JSON's own types as they are, everything else as its text."""
    if value is None or type(value) in {bool, str}:
        return value
    if type(value) is int:
        return value if value.bit_length() <= _JSON_INT_MAX_BITS else hex(value)
    if type(value) is float:
        return value if value == value and value not in {float("inf"), float("-inf")} else repr(value)  # noqa: PLR0124
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return _shorten(value)


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python wants to print
        text = f"<{type(value).__name__} too long to print>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


class Diff:
    """The changes that lead from one state to another."""

    def __init__(self, changes: Iterable[Change], old: str = "", new: str = "") -> None:
        self.changes = list(changes)
        self.old = old
        self.new = new

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def lines(self) -> Iterator[tuple[str, str]]:
        """(sign, text) with sign one of ``-``, ``+``, ``~`` and a space."""
        for change in self.changes:
            if change.old is not MISSING and change.new is not MISSING:
                yield "-", f"{change.where}: {_shorten(change.old)}"
                yield "+", f"{change.where}: {_shorten(change.new)}"
            elif change.new is not MISSING:
                yield "+", f"{change.where}: {_shorten(change.new)}"
            elif change.old is not MISSING:
                yield "-", f"{change.where}: {_shorten(change.old)}"
            else:
                yield "~", f"{change.where}: {change.kind}"

    def __str__(self) -> str:
        if not self.changes:
            return "no differences"
        head = [f"--- {self.old}", f"+++ {self.new}"] if self.old or self.new else []
        return "\n".join([*head, *(f"{sign} {text}" for sign, text in self.lines())])

    def __repr__(self) -> str:
        return f"<Diff {self.old} -> {self.new}: {len(self)} changes>"

    def to_json(self) -> dict[str, Any]:
        return {"old": self.old, "new": self.new, "changes": [change.to_json() for change in self.changes]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        style = {"-": "red", "+": "green", "~": "yellow"}
        if not self.changes:
            yield Text("no differences", style="dim")
        elif self.old or self.new:
            yield Text(f"--- {self.old}", style="bold red")
            yield Text(f"+++ {self.new}", style="bold green")
        for sign, text in self.lines():
            yield Text(f"{sign} {text}", style=style.get(sign, ""))

    def _repr_html_(self) -> str:
        from html import escape

        colour = {"-": "#b31d28", "+": "#22863a", "~": "#b08800"}
        rows = "".join(f'<div style="color:{colour[sign]}">{sign} {escape(text)}</div>' for sign, text in self.lines())
        return f'<div style="font-family:monospace;white-space:pre-wrap">{rows or "no differences"}</div>'


def diff(old: Document, new: Document, old_name: str, new_name: str) -> Diff:
    """What differs between two states."""
    follower = _Follower(old)
    script = list(differences(old, new))
    back = {_place(operation, new) for operation in script if operation.code == op.SET}
    moved: set[tuple[Any, ...]] = set()
    changes: list[Change] = []
    for operation in script:
        if operation.code == op.DELETE and _place(operation, new) in back:
            continue  # taken out only to stand elsewhere in the order: shown when it comes back
        for change in follower.explain(operation):
            if change.kind == "changed" and operation.code == op.SET and _same(change, old, new):
                moved.add(change.path[:-1])
            else:
                changes.append(change)
    changes += [Change(path, "reordered", MISSING, MISSING) for path in moved]
    return Diff(changes, old_name, new_name)


def _place(operation: Operation, document: Document) -> bytes:
    return encode(operation.path, document.registry)


def _same(change: Change, old: Document, new: Document) -> bool:
    return encode(change.old, old.registry) == encode(change.new, new.registry)


class _Follower:
    """Looks up old values in a document that the operations are not applied to: indexes are mapped back."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._shifts: dict[tuple[Any, ...], list[tuple[int, int]]] = {}

    def explain(self, operation: Operation) -> Iterator[Change]:
        yield from changes_of(operation, self._old, self._document)
        if operation.code == op.SPLICE:
            start, removed, values = operation.args
            self._shifts.setdefault(tuple(operation.path), []).append((start, len(values) - removed))

    def _old(self, path: list[Any]) -> Any:
        node: Any = self._document.raw_section(path[0]) if path[0] in self._document else MISSING
        walked: list[Any] = [path[0]]
        for part in path[1:]:
            key = part
            if isinstance(node, list):
                for start, shift in reversed(self._shifts.get(tuple(walked), [])):
                    if key >= start:
                        key -= shift
            node = child_of(node, key)
            walked.append(part)
            if node is MISSING:
                break
        return node


def child_of(node: Any, key: Any) -> Any:
    """A child in base storage, unwrapped; MISSING when there is none."""
    if isinstance(node, dict):
        return dict.get(node, key, MISSING)
    if isinstance(node, list) and isinstance(key, int) and -len(node) <= key < len(node):
        return list.__getitem__(node, key)
    return MISSING


def changes_of(
    operation: Operation, old_at: Any, document: Document, label: str = "", checkpoint: str = ""
) -> Iterator[Change]:
    """One operation as changes; ``old_at(path)`` gives the value before it."""
    when = datetime.fromtimestamp(operation.at_us / 1e6, UTC) if operation.at_us else None
    path = operation.path

    def change(where: list[Any], kind: str, old: Any, new: Any) -> Change:
        return Change(tuple(where), kind, _plain(old, document), _plain(new, document), when, label, checkpoint)

    def value(data: bytes) -> Any:
        return document._decode(data)

    if operation.code == op.SET:
        old = old_at(path)
        yield change(path, "added" if old is MISSING else "changed", old, value(operation.args[0]))
    elif operation.code == op.DELETE:
        yield change(path, "removed", old_at(path), MISSING)
    elif operation.code == op.SPLICE:
        start, removed, values = operation.args
        for at in range(removed):
            yield change([*path, start + at], "removed", old_at([*path, start + at]), MISSING)
        for at, data in enumerate(values, start):
            yield change([*path, at], "added", MISSING, value(data))
    elif operation.code == op.ARRANGE:
        before = _plain(old_at(path), document)
        after: list[Any] = []
        for piece in operation.args[0]:
            if len(piece) == 1:
                after.append(value(piece[0]))
            else:
                start, count, step = piece
                after += [before[at] for at in range(start, start + count * step, step)]
        yield change(path, "rearranged", before, after)
    elif operation.code == op.CLEAR:
        yield change(path, "cleared", old_at(path), MISSING)
    else:
        kind = "added" if operation.code == op.ADD else "removed"
        for data in operation.args[0]:
            item = value(data)
            yield change(path, kind, MISSING if kind == "added" else item, item if kind == "added" else MISSING)


def _plain(value: Any, document: Document) -> Any:
    if value is MISSING:
        return value
    return value if type(value) in FLAT else document.plain(value)


def mutations(document: Document, operations: Iterable[Operation], label: str, checkpoint: str) -> Iterator[Change]:
    """The changes of one checkpoint, while ``document`` (a scratch copy of its parent's state) follows."""
    for stored in operations:
        operation = document.own_form(stored)

        def old_at(path: list[Any]) -> Any:
            node: Any = document.raw_section(path[0]) if path[0] in document else MISSING
            for part in path[1:]:
                node = child_of(node, part)
            return node

        yield from changes_of(operation, old_at, document, label, checkpoint)
        document.change(operation)
