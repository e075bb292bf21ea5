"""The table that says which targets were reached."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table


def show(targets: Iterable[dict[str, Any]], console: Console) -> None:
    sheet = Table(title="Targets", title_justify="left")
    for column in ("", "found", "at least", ""):
        sheet.add_column(column, justify="left" if not column else "right")
    for target in targets:
        reached = target["reached"]
        sheet.add_row(
            target["what"], target["found"], target["least"], "reached" if reached else "not reached",
            style="" if reached else "red",
        )  # fmt: skip
    console.print(sheet)
