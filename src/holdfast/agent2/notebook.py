"""How agents, histories and stores look in a notebook. All text is escaped: states are not trusted."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.agent2.checkpoint import Checkpoint


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    header = "".join(f"<th style='text-align:left'>{escape(str(cell))}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def checkpoints_html(checkpoints: Iterable[Checkpoint]) -> str:
    return table(
        ("checkpoint", "depth", "label", "kind", "time", "state digest"),
        (
            (c.short_id, f"#{c.depth}", c.label, c.kind, f"{c.time:%Y-%m-%d %H:%M:%S} UTC", c.digest[:16])
            for c in checkpoints
        ),
    )
