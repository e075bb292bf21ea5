"""Where a command's words go: a console for people, JSON for programs.

Owns colours, columns and how JSON is written. Knows nothing of agents. Always holds: no markup is interpreted, and
what was not cleaned by ``text.clean`` is never printed. On a terminal a sentence that is too long is continued below,
and a line of a table or a history is cut with ``…``; anywhere else all are whole, so that nothing is lost in a pipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.text import clean, count

# However narrow the terminal is, this much of a column is shown.
_NARROWEST = 12
# The last column has words in it. With less room than this, they stand below.
_LEGIBLE = 24
# What stands before a line that goes on from the one above.
_HANGING = " " * 4


class ReaderGone(Exception):
    """Whoever read the output has stopped, as ``| head`` does."""


class Output(Console):
    """A console that prints text as it is: no markup, no emoji names, no guesses at what to highlight."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        raise ReaderGone

    @property
    def unicode(self) -> bool:
        """Whether lines and dots outside ASCII can be shown."""
        return self.encoding.lower().replace("_", "-").startswith("utf")

    def say(self, *parts: Text | str, wrap: bool = True) -> None:
        """One line: on a terminal continued below, or without ``wrap`` cut; whole elsewhere."""
        text = Text.assemble(*parts)
        room = max(20, self.width - len(_HANGING))
        if self.is_terminal and not wrap:
            self.print(text, no_wrap=True, overflow="ellipsis")
        elif not self.is_terminal or max(map(len, text.plain.split()), default=0) > room:
            self.print(text, soft_wrap=True)  # a terminal breaks it anywhere, and it is copied as one
        else:
            first, *rest = text.wrap(self, room) or [text]
            self.print(first)
            for line in rest:
                self.print(Text(_HANGING).append_text(line))

    def command(self, before: str, command: str, after: str = "") -> None:
        """A command to be copied, so nothing is put into it, however narrow the terminal is."""
        self.print(Text.assemble(Text(before, style="dim"), clean(command), Text(after, style="dim")), soft_wrap=True)

    def note(self, text: str) -> None:
        """What is good to know, in the background."""
        self.say(Text(text, style="dim"))

    def left_out(self, more: int, one: str, ways: str = "") -> None:
        """How many a limit has left out, and how to see them."""
        if more:
            self.note(f"{count(more, one)} not shown; -n 0 shows all{ways}.")

    def columns(self, heads: Sequence[str], rows: Iterable[Sequence[Text | str]], *, right: Iterable[int] = ()) -> None:
        """A table: each column as wide as its widest cell, the last one as long as it likes.

        On a terminal where the last one would have no room to speak of, it stands below its line.
        """
        cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        head = [Text(word, style="bold") for word in heads]
        table = [head, *cells]
        widths = [max(row[at].cell_len for row in table) for at in range(len(heads))]
        last = len(heads) - 1
        aligned_right = set(right)
        room = self.width - sum(widths[:last]) - 2 * last
        below = self.is_terminal and last not in aligned_right and room < min(widths[last], _LEGIBLE)
        if self.is_terminal:
            widths = _fitting(widths[: last + (not below)], self.width)
        for row in table:
            line = Text()
            for at, (cell, width) in enumerate(zip(row, widths, strict=False)):
                if at != last or at in aligned_right:
                    cell.truncate(width, overflow="ellipsis")
                    cell.align("right" if at in aligned_right else "left", width)
                line.append_text(cell)
                line.append("  ")
            line.rstrip()
            self.say(line, wrap=False)
            if below and row[last].plain.strip():
                self.say(_HANGING, row[last], wrap=False)

    def confirmed(self, question: str) -> bool:
        """Whether a person at the terminal says yes."""
        self.print(f"{question} [y/N] ", style="bold", end="")
        try:
            return input().strip().lower() in {"y", "yes"}
        except EOFError:
            self.say()
            return False

    def data(self, data: bytes) -> None:
        """Bytes as they are."""
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        except BrokenPipeError:
            raise ReaderGone from None

    def json(self, data: dict[str, Any]) -> None:
        """One JSON document. Everything outside ASCII is escaped: any encoding carries it, no terminal acts on it."""
        try:
            sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise ReaderGone from None


def _fitting(widths: list[int], room: int) -> list[int]:
    """What each column may take of a line: the widest give way until all fit."""
    widths = [min(width, room) for width in widths]
    room -= 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
