"""The picture that the README shows: commit time over the length of the history, and bytes on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from picture import FLOOR, grid, line, log_log, panels, title

Figures = dict[str, Any]

# Colours that stay apart for colour-blind readers, on a white ground that holds on light and dark pages.
_LOOK = {
    "holdfast": ("Holdfast\n(whole history)", "#0072b2", "o"),
    "sqlite rows": ("one SQLite row per message\n(no history)", "#56b4e9", "s"),
    "pickle": ("pickle + fsync + rename\n(no history)", "#e69f00", "^"),
    "langgraph": ("LangGraph SqliteSaver\n(whole history)", "#d55e00", "D"),
    "langgraph FULL": ("LangGraph, synchronous=FULL", "#cc79a7", "v"),
}


def draw(results: Figures, path: Path) -> None:
    with panels(path, 4.1, width_ratios=(1.25, 1)) as (figure, left, right):
        _latency(left, results["append"])
        _bytes(right, results["disk"])
        figure.tight_layout(w_pad=2.5)


def _latency(axes: Axes, append: Figures) -> None:
    lengths = [int(length) for length in append]
    shortest = next(iter(append))
    for name, (label, colour, marker) in _LOOK.items():
        if name in append[shortest]:
            values = [append[str(length)][name]["median_us"] / 1e3 for length in lengths]
            line(axes, lengths, values, label, colour, marker, ours=name == "holdfast")
    for name, label, style in (
        ("floor", "floor: 4 KB append + fdatasync", "--"),
        ("in place", "floor: 4 KB in place + fdatasync", ":"),
    ):
        values = [append[str(length)][name]["median_us"] / 1e3 for length in lengths]
        axes.plot(lengths, values, color=FLOOR, linestyle=style, linewidth=1.3, label=label, zorder=4)
    title(axes, "Time to append one message, durably (median)")
    log_log(axes, lengths, "messages already there (about 1 KB each)", lambda value, _: f"{value:g} ms")
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
    axes.axvline(1, color=FLOOR, linestyle="--", linewidth=1.3)
    axes.text(1.15, -0.62, f"logical content, {logical / 1e6:.1f} MB", color=FLOOR, fontsize=8, ha="left", va="center")
    axes.set(xscale="log", xlim=(0.1, max(ratios) * 60), ylim=(len(names) - 0.4, -0.9))
    axes.set_xlabel("times the logical bytes")
    title(axes, "Bytes on disk, 1,000 checkpoints")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    grid(axes, axis="x")
    axes.tick_params(axis="y", length=0, labelsize=8)
