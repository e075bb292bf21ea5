"""Figures into words: the targets, and tables for the terminal. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A number that the design must reach, and what was found."""

    what: str
    value: float
    limit: float
    unit: str

    @property
    def reached(self) -> bool:
        return self.value <= self.limit

    def as_dict(self) -> Figures:
        return {**asdict(self), "reached": self.reached}


def targets(results: Figures) -> list[Target]:
    return list(_targets(results))


def _targets(results: Figures) -> Iterator[Target]:
    append = results.get("append", {})
    if "10000" in append:
        ratio = append["10000"]["holdfast"]["ratio"]
        yield Target("durable append at 10,000 messages, against the floor", ratio, 1.3, "x")
    if "100000" in append:
        flat = append["100000"]["holdfast"]["ratio"] / append["1000"]["holdfast"]["ratio"]
        yield Target("flat: append at 100,000 messages against 1,000, both over the floor", flat, 1.15, "x")
    if "crowd" in results:
        ours = results["crowd"]["holdfast"]
        yield Target("8 writers: worst wait", ours["worst_us"] / 1e6, 0.5, "s")
        yield Target("8 writers: errors and lost checkpoints", ours["errors"] + ours["lost"], 0, "")
    for kind, limit in (("incompressible", 1.5), ("realistic", 1.0)):
        for step, sizes in results.get("disk", {}).get(kind, {}).get("after", {}).items():
            ratio = sizes["holdfast"] / sizes["logical"]
            yield Target(f"bytes on disk, {kind}, {int(step):,} checkpoints, against logical", ratio, limit, "x")
    if "load" in results:
        yield Target("cold load of 10 MB, against one msgpack decode", results["load"]["holdfast"]["ratio"], 2.5, "x")
    for case, figures in results.get("reading", {}).items():
        if case == "iteration":
            yield Target("iterating messages again, against a plain list", figures["second_ratio"], 2.0, "x")
        else:
            yield Target(f"{case}, first touch, against plain", figures["first_ratio"], 4.0, "x")
            yield Target(f"{case}, second time, against plain", figures["second_ratio"], 1.5, "x")
    if "imports" in results:
        yield Target("import holdfast, above bare Python", results["imports"]["import"]["above_bare_ms"], 60, "ms")
        yield Target("... until holdfast.open is there", results["imports"]["open"]["above_bare_ms"], 60, "ms")


def duration(microseconds: float) -> str:
    if microseconds < 1_000:
        return f"{microseconds:.0f} us"
    if microseconds < 1_000_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.2f} s"


def size(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"


def show(results: Figures, console: Console) -> None:
    for length, found in results.get("append", {}).items():
        _times(console, f"Durable append of one ~1 KB message at {int(length):,}", found)
    for total, case in results.get("edits", {}).items():
        size_kb = f"{int(total) // 1000:,} KB"
        title = f"{case['edits']} scattered edits in {case['records']:,} records ({size_kb}), then one checkpoint"
            f"{case['edits']} scattered edits in {case['records']:,} records ({int(total) // 1000:,} KB), then durable"
        )
        _times(console, title, case["rivals"])
    if "load" in results:
        _load(console, results["load"])
    if "reading" in results:
        _reading(console, results["reading"])
    if "disk" in results:
        _disk(console, results["disk"])
    if "crowd" in results:
        _crowd(console, results["crowd"])
    if "imports" in results:
        found = results["imports"]
        console.print(
            f"Start: bare Python {duration(found['bare']['median_us'])}; import holdfast"
            f" {found['import']['above_bare_ms']:.1f} ms more; until holdfast.open is there"
            f" {found['open']['above_bare_ms']:.1f} ms more\n"
        )
    _show_targets(console, targets(results))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _style(name: str) -> str:
    return "bold green" if name == "holdfast" else ""


def _times(console: Console, title: str, found: Figures) -> None:
    table = _table(title, "", "median", "p99", "worst", "x floor", "times")
    for name, row in found.items():
        table.add_row(
            name,
            duration(row["median_us"]),
            duration(row["p99_us"]),
            duration(row["worst_us"]),
            f"{row['ratio']:.2f}",
            str(row["count"]),
            style=_style(name),
        )
    console.print(table)


def _load(console: Console, found: Figures) -> None:
    title = f"Cold load: {found['messages']:,} messages, {size(found['bytes'])}, a fresh process each"
    table = _table(title, "", "median", "p99", "x decode", "of which open", "load", "read all")
    for name in ("msgpack", "holdfast", "pickle", "langgraph"):
        row = found[name]
        parts = [duration(row[part]) if part in row else "" for part in ("open_us", "load_us", "read_us")]
        times = (duration(row["median_us"]), duration(row["p99_us"]), f"{row['ratio']:.2f}")
        table.add_row(name, *times, *parts, style=_style(name))
    console.print(table)


def _reading(console: Console, found: Figures) -> None:
    columns = ("plain", "first time", "second", "third", "first x plain", "second", "third")
    table = _table("Reading, per element", "", *columns)
    for case, row in found.items():
        times = (f"{row[name]:.0f} ns" for name in ("plain_ns", "first_ns", "second_ns", "third_ns"))
        ratios = (f"{row[name]:.2f}" for name in ("first_ratio", "second_ratio", "third_ratio"))
        table.add_row(case, *times, *ratios)
    console.print(table)


def _disk(console: Console, found: Figures) -> None:
    for kind, case in found.items():
        title = f"Bytes on disk, {kind} text (zstd alone: {case['zstd_ratio']:.2f} times smaller)"
        table = _table(title, "", *(f"{int(step):,} checkpoints" for step in case["after"]), "x logical")
        names = dict.fromkeys(name for sizes in case["after"].values() for name in sizes)
        for name in names:
            shown = [size(sizes[name]) if name in sizes else "not run" for sizes in case["after"].values()]
            known = [sizes[name] / sizes["logical"] for sizes in case["after"].values() if name in sizes]
            table.add_row(name, *shown, f"{known[-1]:.2f}", style=_style(name))
        console.print(table)


def _crowd(console: Console, found: Figures) -> None:
    title = f"{found['writers']} processes at once, {found['checkpoints_each']} commits each"
    table = _table(title, "", "median", "p99", "worst", "errors", "lost", "all took")
    for name in ("holdfast", "sqlite rows"):
        row = found[name]
        times = (duration(row["median_us"]), duration(row["p99_us"]), duration(row["worst_us"]))
        table.add_row(name, *times, str(row["errors"]), str(row["lost"]), f"{row['seconds']:.1f} s", style=_style(name))
    console.print(table)


def _show_targets(console: Console, found: list[Target]) -> None:
    table = _table("Targets", "", "found", "at most", "")
    for target in found:
        word = "[green]reached[/]" if target.reached else "[red]not reached[/]"
        table.add_row(target.what, f"{target.value:.2f} {target.unit}", f"{target.limit:g} {target.unit}", word)
    console.print(table)
