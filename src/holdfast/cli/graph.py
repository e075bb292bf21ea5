"""Lines beside a history: which checkpoint follows which.

Owns only the drawing. A history is a tree, newest first: several lines may join downwards in one parent, none divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

UNICODE = {"bar": "│", "join": "├", "across": "─", "cross": "┼", "corner": "╯", "tee": "┴"}
ASCII = {"bar": "|", "join": "|", "across": "-", "cross": "+", "corner": "'", "tee": "'"}


@dataclass(frozen=True)
class Row:
    """What stands in front of one checkpoint: lines that join just above it, its own line up to and after its dot."""

    joins: str
    before: str
    after: str
    passing: str


def draw(history: Iterable[tuple[str, str]], *, unicode: bool = True) -> Iterator[Row]:
    """One row for each (id, parent id), newest first."""
    signs = UNICODE if unicode else ASCII
    lanes: list[str] = []  # for each line the id that it leads down to; "" where none runs
    for own, parent in history:
        mine = [at for at, waiting in enumerate(lanes) if waiting == own]
        joins = ""
        if not mine:  # the end of a line: it takes the first free place
            at = next((at for at, waiting in enumerate(lanes) if not waiting), len(lanes))
            lanes[at : at + 1] = [own]
        else:
            at = mine[0]
            if len(mine) > 1:
                joins = _joins(lanes, mine, signs)
                for other in mine[1:]:
                    lanes[other] = ""
        passing = [signs["bar"] if waiting else " " for waiting in lanes]
        before, after = " ".join(passing[:at]), " ".join(passing[at + 1 :])
        lanes[at] = parent
        while lanes and not lanes[-1]:
            lanes.pop()
        below = " ".join(signs["bar"] if waiting else " " for waiting in lanes)
        yield Row(joins, f"{before} " if before else "", f" {after}".rstrip(), below)


def _joins(lanes: list[str], mine: list[int], signs: dict[str, str]) -> str:
    first, last = mine[0], mine[-1]
    drawn = []
    for at, waiting in enumerate(lanes):
        if at == first:
            sign = signs["join"]
        elif at == last:
            sign = signs["corner"]
        elif at in mine:
            sign = signs["tee"]
        elif first < at < last:
            sign = signs["cross"] if waiting else signs["across"]
        else:
            sign = signs["bar"] if waiting else " "
        drawn.append(sign + (signs["across"] if first <= at < last else " "))
    return "".join(drawn).rstrip()
