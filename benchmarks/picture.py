"""What all pictures have in common: two panels side by side, one look, and the same file for the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

FLOOR = "#555555"
_GRID = "#dddddd"
_SETTINGS = {
    "svg.fonttype": "path",
    "svg.hashsalt": "holdfast",  # the same figures give the same file
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@contextmanager
def panels(path: Path, height: float, **options: Any) -> Iterator[tuple[Figure, Axes, Axes]]:
    """A figure of two panels, written to ``path`` in the end."""
    with mpl.rc_context(_SETTINGS):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, height), facecolor="white", **options)
        yield figure, left, right
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)


def line(axes: Axes, xs: Any, ys: Any, label: str, colour: str, marker: str, *, ours: bool) -> None:
    """One rival's line; ours stands out."""
    axes.plot(
        xs, ys, color=colour, marker=marker, label=label, linewidth=2.6 if ours else 1.5, markersize=7 if ours else 5,
        zorder=5 if ours else 3,
    )  # fmt: skip


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold")


def grid(axes: Axes, **which: Any) -> None:
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8, **which)
    axes.set_axisbelow(True)


def log_log(axes: Axes, lengths: list[int], over: str, unit: Any) -> None:
    """Both axes logarithmic, named where there are figures."""
    axes.set(xscale="log", yscale="log", xlabel=over)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(unit))
    grid(axes)
