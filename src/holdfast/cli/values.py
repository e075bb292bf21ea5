"""Values as people read them on a terminal: a tree, and what changed in them. In JSON and on one line: ``schemas``.

Owns the limits on what is shown, and says what they cut. Knows no storage. A value comes from a store that nobody
vouches for: text is cleaned, sizes are looked at before anything is turned into text, cycles end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from holdfast import MISSING, Change, Checkpoint, Effect, FileChange, RunInfo, SignalInfo
from holdfast.cli.text import clean, count, shorten
from holdfast.errors import format_path
from holdfast.schemas import children_of, kind_of, text_of
from holdfast.travel import Comparison, words

# A container that fits into this many characters is shown on one line.
_INLINE_CHARACTERS = 68


@dataclass(frozen=True)
class Limits:
    """How much of a state is shown."""

    depth: int = 5
    items: int = 10
    characters: int = 160


FULL = Limits(depth=1_000, items=2**62, characters=2**62)


class Tree:
    """Draws a value as a tree and keeps count of what the limits left out."""

    def __init__(self, limits: Limits, *, unicode: bool = True) -> None:
        self._limits = limits
        self._bars = ("├─ ", "└─ ", "│  ", "   ") if unicode else ("|- ", "`- ", "|  ", "   ")
        self.cut = 0

    def lines(self, name: str, value: Any) -> Iterator[Text]:
        yield from self._branch("", "", Text(clean(name), style="bold"), value, 0)

    def _branch(self, lead: str, below: str, name: Text, value: Any, depth: int) -> Iterator[Text]:
        children = children_of(value)
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
    """``- where: old`` in red, ``+ where: new`` in green, ``~ where: kind`` where neither side is known.

    Of two long texts, the words that differ.
    """
    for change in changes:
        if parts := words(change.old, change.new):
            line = Text("~ ", style="bold yellow").append(clean(change.where), style="bold").append(": ", style="dim")
            for sign, text in parts:
                marked = {"-": f"[-{text}-]", "+": f"{{+{text}+}}"}.get(sign, text)
                line.append(clean(shorten(marked, _SIDE_CHARACTERS)), style={"-": "red", "+": "green"}.get(sign, ""))
            yield line
            continue
        sides = [("-", "red", change.old), ("+", "green", change.new)]
        known = [side for side in sides if side[2] is not MISSING]
        for sign, colour, value in known:
            line = Text().append(f"{sign} ", style=f"bold {colour}")
            line.append(clean(change.where), style="bold").append(": ", style="dim")
            yield line.append(text_of(value, _SIDE_CHARACTERS), style=colour)
        if not known:
            yield Text(f"~ {clean(change.where)}: {clean(change.kind)}", style="yellow")


def file_lines(files: Iterable[FileChange], most: int | None = None) -> Iterator[Text]:
    """What happened to each file, and the lines that differ."""
    colours = {"-": "red", "+": "green", "~": "yellow"}
    for file in files:
        for number, (sign, text) in enumerate(file.lines(most)):
            style = colours.get(sign, "dim" if number else "")
            yield Text(f"{sign} ", style=f"bold {style}".strip()).append(clean(text), style=style)


def outside_lines(compared: Comparison) -> Iterator[Text]:
    """What differs outside of the state: effects, and metadata."""
    for one in compared.effects:
        colour = {"-": "red", "+": "green"}[one.sign]
        about = f"{one.effect.tool}  {one.effect.status}  {one.effect.id or f'read {one.effect.number}'}"
        yield Text(f"{one.sign} ", style=f"bold {colour}").append(f"effect {clean(about)}", style=colour)
    for change in compared.metadata:
        for sign, colour, value in (("-", "red", change.old), ("+", "green", change.new)):
            if value is not MISSING:
                where = f"{sign} {clean(format_path(change.path, 'metadata'))}: "
                yield Text(where, style=f"bold {colour}").append(text_of(value, _SIDE_CHARACTERS), style=colour)
