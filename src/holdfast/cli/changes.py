"""Changes as coloured lines, for ``diff``, ``show`` and ``rollback``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.text import Text

from holdfast import MISSING, Change
from holdfast.cli.text import clean
from holdfast.cli.values import as_json, text_of

# What one side of a change may take up.
_SIDE_CHARACTERS = 200


def lines(changes: Iterable[Change]) -> Iterator[Text]:
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
