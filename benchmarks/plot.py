"""The picture that the README shows: commit time over the length of the history, and bytes on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

Figures = dict[str, Any]

# Colours that stay apart for colour-blind readers, on a white ground that holds on light and dark pages.
_LOOK = {
    "holdfast": ("Holdfast\n(whole history)", "#0072b2", "o"),
    "sqlite rows": ("one SQLite row per message\n(no history)", "#56b4e9", "s"),
    "pickle": ("pickle + fsync + rename\n(no history)", "#e69f00", "^"),
    "langgraph": ("LangGraph SqliteSaver\n(whole history)", "#d55e00", "D"),
    "langgraph FULL": ("LangGraph, synchronous=FULL", "#cc79a7", "v"),
}
_FLOOR = "#555555"
_GRID = "#dddddd"


def draw(results: Figures, path: Path) -> None:
    settings = {
        "svg.fonttype": "path",
        "svg.hashsalt": "holdfast",  # the same figures give the same file
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(settings):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.1), width_ratios=(1.25, 1), facecolor="white")
        _latency(left, results["append"])
        _bytes(right, results["disk"])
        figure.tight_layout(w_pad=2.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)


def _latency(axes: Axes, append: Figures) -> None:
    lengths = [int(length) for length in append]
    shortest = next(iter(append))
    for name, (label, colour, marker) in _LOOK.items():
        if name in append[shortest]:
            values = [append[str(length)][name]["median_us"] / 1e3 for length in lengths]
            ours = name == "holdfast"
            axes.plot(
                lengths, values, color=colour, marker=marker, label=label, linewidth=2.6 if ours else 1.5,
                markersize=7 if ours else 5, zorder=5 if ours else 3,
            )  # fmt: skip
    for name, label, line in (
        ("floor", "floor: 4 KB append + fdatasync", "--"),
        ("in place", "floor: 4 KB in place + fdatasync", ":"),
    ):
        values = [append[str(length)][name]["median_us"] / 1e3 for length in lengths]
        axes.plot(lengths, values, color=_FLOOR, linestyle=line, linewidth=1.3, label=label, zorder=4)
    axes.set(xscale="log", yscale="log", xlabel="messages already there (about 1 KB each)")
    axes.set_title("Time to append one message, durably (median)", loc="left", fontsize=10, fontweight="bold")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ms"))
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 40)  # room for the legend above the lines
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def _bytes(axes: Axes, disk: Figures) -> None:
    """At 1,000 checkpoints, where every rival was run; realistic text."""
    sizes = disk["realistic"]["after"]["1000"]
    logical = sizes["logical"]
    names = [name for name in _LOOK if name in sizes]
    ratios = [sizes[name] / logical for name in names]
    bars = axes.barh([_LOOK[name][0] for name in names], ratios, color=[_LOOK[name][1] for name in names], height=0.6)
    for bar, name, ratio in zip(bars, names, ratios, strict=True):
        text = f" {sizes[name] / 1e6:,.1f} MB ({ratio:,.{0 if ratio > 100 else 2}f}x)"
        axes.text(ratio, bar.get_y() + bar.get_height() / 2, text, va="center", fontsize=8.5)
    axes.axvline(1, color=_FLOOR, linestyle="--", linewidth=1.3)
    axes.text(1.15, -0.62, f"logical content, {logical / 1e6:.1f} MB", color=_FLOOR, fontsize=8, ha="left", va="center")
    axes.set(xscale="log", xlim=(0.1, max(ratios) * 60), ylim=(len(names) - 0.4, -0.9))
    axes.set_xlabel("times the logical bytes")
    axes.set_title("Bytes on disk, 1,000 checkpoints", loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(visible=True, axis="x", which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelsize=8)
