"""The picture of the savers: bytes on disk and the time of a step, both over the length of the thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from picture import FLOOR, line, log_log, panels, title
from savers_graph import TURN_BYTES

Figures = dict[str, Any]

# The colours of the other picture: they stay apart for colour-blind readers, and hold on light and dark pages.
_LOOK = {
    "holdfast": ("HoldfastSaver", "#0072b2", "o"),
    "sqlite": ("SqliteSaver", "#d55e00", "D"),
    "sqlite delta": ("SqliteSaver, DeltaChannel(50)", "#e69f00", "^"),
    "postgres": ("PostgresSaver", "#cc79a7", "v"),
    "memory": ("InMemorySaver (not durable)", "#56b4e9", "s"),
}


def draw(results: Figures, path: Path) -> None:
    lengths = results["cases"]["W1 realistic"]
    with panels(path, 4.5) as (figure, left, right):
        turns = [int(length) for length in lengths]
        _lines(left, lengths, lambda row: row["bytes"] / 1e6 if "bytes" in row else None)
        left.plot(
            turns, [one * TURN_BYTES / 1e6 for one in turns], "--", color=FLOOR, lw=1.3, label="the messages alone"
        )
        _axes(left, turns, "Bytes on disk", lambda value, _: f"{value:g} MB" if value < 1e3 else f"{value / 1e3:g} GB")
        _lines(right, lengths, lambda row: row["p50_us"] / 1e3)
        floor = [lengths[str(one)]["none"]["p50_us"] / 1e3 for one in turns]
        right.plot(turns, floor, "--", color=FLOOR, lw=1.3, label="no saver")
        _axes(right, turns, "Time of one step, durably (median)", lambda value, _: f"{value:g} ms")
        _legend(figure, left, right)


def _lines(axes: Axes, lengths: Figures, read: Any) -> None:
    for name, (label, colour, marker) in _LOOK.items():
        points = [(int(turns), read(row[name])) for turns, row in lengths.items() if name in row]
        points = [point for point in points if point[1] is not None]
        if points:
            line(axes, *zip(*points, strict=True), label, colour, marker, ours=name == "holdfast")


def _axes(axes: Axes, turns: list[int], text: str, unit: Any) -> None:
    title(axes, text)
    log_log(axes, turns, "turns (a reply of 0.7 KB and a tool result of 4 KB, two steps)", unit)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)


def _legend(figure: Figure, *panels: Axes) -> None:
    """One for both: every line once, under the pictures."""
    named: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.tight_layout(w_pad=2.5, rect=(0, 0.12, 1, 1))
    figure.legend(named.values(), named.keys(), frameon=False, fontsize=8, loc="lower center", ncols=4)
