"""Bars for what a person waits for, on a terminal only. Knows nothing of what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.cli.output import Output
from holdfast.cli.text import clean


@contextmanager
def bars(err: Output) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for each thing that is counted: call what is given with its name, how many are done, and of how many."""
    if not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
    tasks: dict[str, object] = {}
    with shown:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(clean(what), total=total)
            shown.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield report
