"""Changes as people read them: the mutation log and diffs.

Owns the translation of operations into (path, old, new), and how a diff prints. Knows nothing of storage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from holdfast.agent.names import is_bookkeeping
from holdfast.codec import operations as op
from holdfast.codec.diff import Span, aligned
from holdfast.codec.document import MISSING, Document
from holdfast.codec.operations import Operation, key_bytes
from holdfast.codec.state import Reader, State, is_apart
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import format_path

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# How much of a value a line shows.
_SHOWN_CHARACTERS = 120
# Texts from this length on are compared word by word, with so many words around each difference; of what differs, so
# many words at most are aligned as well as can be, and so many differences shown.
_LONG_CHARACTERS = 60
_AROUND_WORDS = 3
_ALIGNED_WORDS = 2_000
_SHOWN_DIFFERENCES = 20
# Python refuses to print integers of more than 4,300 digits; beyond this they are given in hexadecimal.
_JSON_INT_MAX_BITS = 8_192


class Change(Struct, frozen=True):
    """One change. ``old`` and ``new`` are plain values, or MISSING.

    ``kind``: ``added``, ``changed``, ``removed``, ``cleared``, or ``rearranged (...)``. In the mutation log, ``when``,
    ``label`` and ``checkpoint`` (its id) say which checkpoint made it.
    """

    path: tuple[Any, ...]
    kind: str
    old: Any
    new: Any
    when: datetime | None = None
    label: str = ""
    checkpoint: str = ""

    @property
    def where(self) -> str:
        """The path as text: ``state.messages[3].content``."""
        return format_path(self.path)

    @property
    def bookkeeping(self) -> bool:
        """Whether it is in a section whose name begins with two underscores: an integration's own record."""
        return bool(self.path) and is_bookkeeping(self.path[0])

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
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


def words(old: Any, new: Any) -> list[tuple[str, str]]:
    """Two long texts, word by word: (sign, text) with sign ``-``, ``+`` or a space for what both have.

    Empty where they are not two long texts, or have little in common. What is far from any difference is ``…``.
    """
    if not (type(old) is type(new) is str and min(len(old), len(new)) >= _LONG_CHARACTERS):
        return []
    from difflib import SequenceMatcher  # few programs need it

    one, two = (_WORDS.findall(text) for text in (old, new))
    shorter = min(len(one), len(two))
    start = next((at for at in range(shorter) if one[at] != two[at]), shorter)
    most = shorter - start
    end = next((at for at in range(most) if one[-1 - at] != two[-1 - at]), most)
    left, right = one[start : len(one) - end], two[start : len(two) - end]
    spans: Sequence[tuple[str, int, int, int, int]]
    if len(left) + len(right) <= _ALIGNED_WORDS:
        spans = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    else:
        spans = list(_aligned_as_lists(left, right))
    kept = start + end + sum(stop - at for tag, at, stop, _, _ in spans if tag == "equal")
    if 2 * kept < shorter or sum(tag != "equal" for tag, *_ in spans) > _SHOWN_DIFFERENCES:
        return []
    found = [(" ", _around(one[:start], first=True))] if start else []
    for tag, at, stop, to, till in spans:
        if tag == "equal":
            found.append((" ", _around(left[at:stop])))
        else:
            found += [("-", "".join(left[at:stop]))] if at < stop else []
            found += [("+", "".join(right[to:till]))] if to < till else []
    return [*found, *([(" ", _around(one[len(one) - end :], last=True))] if end else [])]


_WORDS = re.compile(r"\s*\S+|\s+$")


def _aligned_as_lists(old: list[str], new: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """What differs between so many words that only the cheap alignment is affordable, and what is equal between."""
    start = at = 0
    both = [[word.encode(errors="surrogatepass") for word in some] for some in (old, new)]
    for span in [*aligned(*both), Span(len(old), len(old), len(new), len(new))]:
        if start < span.start:
            yield "equal", start, span.start, at, span.at
        if span.start < span.stop or span.at < span.to:
            yield "replace", *span
        start, at = span.stop, span.to


def _around(kept: list[str], *, first: bool = False, last: bool = False) -> str:
    """What both have: the words next to a difference."""
    near = _AROUND_WORDS * (1 if first or last else 2)
    if len(kept) <= near:
        return "".join(kept)
    before = [] if first else kept[:_AROUND_WORDS]
    after = [] if last else kept[len(kept) - _AROUND_WORDS :]
    return f"{''.join(before)} …{''.join(after)}"


class Diff:
    """The changes that lead from one state to another, without bookkeeping, which ``everything`` has too."""

    def __init__(self, changes: Iterable[Change], old: str = "", new: str = "") -> None:
        self.files: Sequence[Any] = ()
        """Files of the workspace that differ, by path: each a ``FileChange``."""
        self.everything = list(changes)
        self.changes = [change for change in self.everything if not change.bookkeeping]
        self.old = old
        self.new = new

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __bool__(self) -> bool:
        return bool(self.changes or self.files)

    def lines(self) -> Iterator[tuple[str, str]]:
        """(sign, text) with sign one of ``-``, ``+``, ``~`` and a space."""
        for change in self.changes:
            if parts := words(change.old, change.new):
                marks = {"-": "[-{}-]", "+": "{{+{}+}}", " ": "{}"}
                yield "~", f"{change.where}: {''.join(marks[sign].format(text) for sign, text in parts)}"
            elif change.old is not MISSING and change.new is not MISSING:
                yield "-", f"{change.where}: {_shorten(change.old)}"
                yield "+", f"{change.where}: {_shorten(change.new)}"
            elif change.new is not MISSING:
                yield "+", f"{change.where}: {_shorten(change.new)}"
            elif change.old is not MISSING:
                yield "-", f"{change.where}: {_shorten(change.old)}"
            else:
                yield "~", f"{change.where}: {change.kind}"
        for file in self.files:
            yield from file.lines()

    def brief(self, most: int = 3) -> list[str]:
        """The first few, as ``state.t: 1.2 -> 1.3``."""
        shown = [
            f"{one.where}: {one.kind}"
            if one.old is one.new is MISSING
            else f"{one.where}: {'(not there)' if one.old is MISSING else _shorten(one.old)} -> "
            f"{'(not there)' if one.new is MISSING else _shorten(one.new)}"
            for one in self.changes[:most]
        ]
        more = len(self.changes) - most
        return [*shown, f"and {more} more"] if more > 0 else shown

    def __str__(self) -> str:
        if not self:
            return "no differences"
        head = [f"--- {self.old}", f"+++ {self.new}"] if self.old or self.new else []
        return "\n".join([*head, *(f"{sign} {text}" for sign, text in self.lines())])

    def __repr__(self) -> str:
        return f"<Diff {self.old} -> {self.new}: {len(self)} changes>"

    def to_json(self) -> dict[str, Any]:
        """The changes in JSON's own types."""
        files = {"files": [file.to_json() for file in self.files]} if self.files else {}
        changes = [change.to_json() for change in self.changes]
        return {"old": self.old, "new": self.new, "changes": changes, **files}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        style = {"-": "red", "+": "green", "~": "yellow"}
        if not self:
            yield Text("no differences", style="dim")
        elif self.old or self.new:
            yield Text(f"--- {self.old}", style="bold red")
            yield Text(f"+++ {self.new}", style="bold green")
        for sign, text in self.lines():
            yield Text(f"{sign} {text}", style=style.get(sign, ""))

    def _repr_html_(self) -> str:
        from html import escape

        colour = {"-": "#b31d28", "+": "#22863a", "~": "#b08800", " ": "inherit"}
        rows = "".join(f'<div style="color:{colour[sign]}">{sign} {escape(text)}</div>' for sign, text in self.lines())
        return f'<div style="font-family:monospace;white-space:pre-wrap">{rows or "no differences"}</div>'


def diff(old: Document, new: Document, old_name: str, new_name: str) -> Diff:
    """What differs between two states: two of the past, or one that was just captured."""
    one, two = sorted((old.lock, new.lock), key=id)
    with one, two:  # others may be reading the same states
        return diff_states(old.told, new.told, new.registry, old_name, new_name, inert=new.inert)


def diff_states(old: State, new: State, registry: Registry, old_name: str, new_name: str, *, inert: bool) -> Diff:
    """As ``diff``, of bytes that nobody else reads."""
    reader = Reader(new, registry, inert=inert)
    follower = _Follower(Reader(old, registry, inert=inert), reader)
    script = [one for one in old.differences(new) if not is_apart(one.path[0])]
    back = {_place(operation) for operation in script if operation.code == op.SET}
    moved: set[tuple[Any, ...]] = set()
    changes: list[Change] = []
    for operation in script:
        if operation.code == op.DELETE and _place(operation) in back:
            continue  # taken out only to stand elsewhere in the order: shown when it comes back
        for change in follower.explain(operation):
            if change.kind == "changed" and operation.code == op.SET and _same(change, registry):
                moved.add(change.path[:-1])
            else:
                changes.append(change)
    changes += [Change(path, "reordered", MISSING, MISSING) for path in moved]
    return Diff(changes, old_name, new_name)


def _place(operation: Operation) -> tuple[bytes, ...]:
    return tuple(map(key_bytes, operation.path))


def _same(change: Change, registry: Registry) -> bool:
    return encode(change.old, registry) == encode(change.new, registry)


class _Follower:
    """Looks up old values in a state that the operations are not applied to: indexes are mapped back."""

    def __init__(self, before: Reader, after: Reader) -> None:
        self._before, self._after = before, after
        self._shifts: dict[tuple[Any, ...], list[tuple[int, int]]] = {}

    def explain(self, operation: Operation) -> Iterator[Change]:
        yield from changes_of(operation, self._old, self._after)
        if operation.code == op.SPLICE:
            start, removed, values = operation.args
            self._shifts.setdefault(tuple(operation.path), []).append((start, len(values) - removed))

    def _old(self, path: list[Any]) -> Any:
        found: list[Any] = [path[0]]
        for at, part in enumerate(path[1:], 1):
            key = part
            if type(key) is int:
                for start, shift in reversed(self._shifts.get(tuple(path[:at]), [])):
                    if key >= start:
                        key -= shift
            found.append(key)
        return self._before.at(found)


def changes_of(
    operation: Operation, old_at: Any, reader: Reader, label: str = "", checkpoint: str = ""
) -> Iterator[Change]:
    """One operation as changes; ``old_at(path)`` gives the value before it."""
    when = datetime.fromtimestamp(operation.at_us / 1e6, UTC) if operation.at_us else None
    path = [reader.key(part) for part in operation.path]

    def change(where: list[Any], kind: str, old: Any, new: Any) -> Change:
        return Change(tuple(where), kind, old, new, when, label, checkpoint)

    value = reader.value
    if operation.code == op.SET:
        old = old_at(operation.path)
        yield change(path, "added" if old is MISSING else "changed", old, value(operation.args[0]))
    elif operation.code == op.DELETE:
        yield change(path, "removed", old_at(operation.path), MISSING)
    elif operation.code == op.SPLICE:
        start, removed, values = operation.args
        for at in range(start, start + removed):
            yield change([*path, at], "removed", old_at([*operation.path, at]), MISSING)
        for at, data in enumerate(values, start):
            yield change([*path, at], "added", MISSING, value(data))
    elif operation.code == op.ARRANGE:
        before = old_at(operation.path)
        if not isinstance(before, list):  # it was not read, because it is large
            yield change(path, "rearranged", before, before)
            return
        after: list[Any] = []
        for piece in operation.args[0]:
            if len(piece) == 1:
                after.append(value(piece[0]))
            else:
                start, count, step = piece
                after += [before[at] for at in range(start, start + count * step, step)]
        yield change(path, "rearranged", before, after)
    elif operation.code == op.CLEAR:
        yield change(path, "cleared", old_at(operation.path), MISSING)
    else:
        kind = "added" if operation.code == op.ADD else "removed"
        for data in operation.args[0]:
            item = value(data)
            yield change(path, kind, MISSING if kind == "added" else item, item if kind == "added" else MISSING)


def mutations(
    state: State, reader: Reader, operations: Iterable[Operation], label: str, checkpoint: str
) -> Iterator[Change]:
    """The changes of one checkpoint, while ``state`` (that of its parent), which the reader reads, follows."""
    for operation in operations:
        if not is_apart(operation.path[0]):
            yield from changes_of(operation, reader.at, reader, label, checkpoint)
        state.do([operation])
