"""Figures into words: the targets, and tables for the terminal and for docs/benchmarks.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]

FLAT_LIMIT = 1.25
"""The two lengths are measured minutes apart, and a machine's disk drifts by about that much meanwhile."""

BEGIN, END = "<!-- figures of the last whole run -->", "<!-- end of figures -->"


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


@dataclass(frozen=True)
class Sheet:
    """One table. The first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def targets(results: Figures) -> list[Target]:
    return list(_targets(results))


def _targets(results: Figures) -> Iterator[Target]:
    append = results.get("append", {})
    if "10000" in append:
        ours = append["10000"]["holdfast"]
        yield Target("durable append at 10,000 messages, against 4 KB append + fdatasync", ours["ratio"], 1.4, "x")
    if "floor" in results:
        runs = results["floor"]["ratio"]
        yield Target(f"... the median of {len(runs)} runs", median(runs), 1.4, "x")
    if "100000" in append:
        flat = append["100000"]["holdfast"]["median_us"] / append["1000"]["holdfast"]["median_us"]
        yield Target("flat: append at 100,000 messages against 1,000", flat, FLAT_LIMIT, "x")
    if "holdfast" in results.get("server", {}):
        ours, put = results["server"]["holdfast"], results["server"]["put"]
        yield Target("commit on PostgreSQL, against a bare INSERT of as many bytes", ours["ratio"], 1.2, "x")
        yield Target("... against PostgresSaver.put", 1 / put["of_ours"], 0.2, "x")
    for durability, limit in (("commit", 0.33), ("batched", 1.0)):
        found = results.get("threads", {}).get(durability, {})
        if "against" in found:
            slower = found["against"]["per_second"] / found["holdfast"]["per_second"]
            yield Target(f"64 threads, {durability}: speed of the other one, of ours", slower, limit, "x")
    if "crowd" in results:
        ours = results["crowd"]["holdfast"]
        yield Target("8 writers: worst wait", ours["worst_us"] / 1e6, 0.5, "s")
        yield Target("8 writers: errors and lost checkpoints", ours["errors"] + ours["lost"], 0, "")
    for kind, limits in (("incompressible", (1.5, 1.3)), ("realistic", (1.0, 0.7))):
        for step, sizes in results.get("disk", {}).get(kind, {}).get("after", {}).items():
            ratio, limit = sizes["holdfast"] / sizes["logical"], limits[int(step) >= 10_000]
            yield Target(f"bytes on disk, {kind}, {int(step):,} checkpoints, against logical", ratio, limit, "x")
    if "load" in results:
        ours = results["load"]["holdfast"]
        yield Target("cold load of 10 MB, against one msgpack decode", ours["load_ratio"], 2.5, "x")
        yield Target("... with opening the store and reading every field once", ours["ratio"], 2.5, "x")
    for case, figures in results.get("reading", {}).items():
        if case == "iteration":
            yield Target("iterating messages again, against a plain list", figures["second_ratio"], 2.0, "x")
        else:
            yield Target(f"{case}, first time, against plain", figures["first_ratio"], 4.0, "x")
            yield Target(f"{case}, second time, against plain", figures["second_ratio"], 1.5, "x")
    if "imports" in results:
        yield Target("import holdfast, above bare Python", results["imports"]["import"]["above_bare_ms"], 60, "ms")
        yield Target("... until holdfast.open is there", results["imports"]["open"]["above_bare_ms"], 70, "ms")
        yield Target("... until a store is open", results["imports"]["opened"]["above_bare_ms"], 70, "ms")


def duration(microseconds: float) -> str:
    if microseconds < 1_000:
        return f"{microseconds:.0f} us"
    if microseconds < 1_000_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e6:.2f} s"


def size(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"


def machine(found: Figures) -> str:
    load = f"{found['load_before'][0]:.1f} before and {found['load_after'][0]:.1f} after"
    under = ", under SCHED_FIFO" if found["realtime"] else ""
    return (
        f"{found['when'][:10]}, {found['processor']}, {found['cores']} cores, Linux {found['kernel']},"
        f" {found['filesystem']}, Python {found['python']}, SQLite {found['sqlite_of_holdfast']} (rivals"
        f" {found['sqlite_of_rivals']}). Load average {load}{under}. The run took {found['seconds']:.0f} s; seed"
        f" {found['seed']}. SqliteSaver's own flush policy: {found['langgraph_policy']}."
    )


def sheets(results: Figures) -> Iterator[Sheet]:
    if append := results.get("append"):
        cases = {f"{int(length):,} messages": found for length, found in append.items()}
        yield _times("Durable append of one ~1 KB message: median (p99, worst), times the floor", cases)
    if edits := results.get("edits"):
        cases = {
            f"{case['edits']} in {case['records']:,} records ({int(total) // 1000:,} KB)": case["rivals"]
            for total, case in edits.items()
        }
        yield _times("Scattered edits and one checkpoint: median (p99, worst), times the floor", cases)
    makers = {
        "floor": _floor, "server": _server, "threads": _threads, "load": _load, "reading": _reading, "disk": _disk,
        "crowd": _crowd, "imports": _imports,
    }  # fmt: skip
    for name, make in makers.items():
        if name in results:
            yield from make(results[name])
    yield Sheet(
        "Targets",
        ("", "found", "at most", ""),
        [
            (
                target.what,
                f"{target.value:.2f} {target.unit}".strip(),
                f"{target.limit:g} {target.unit}".strip(),
                "reached" if target.reached else "not reached",
            )
            for target in targets(results)
        ],
    )


def _times(title: str, cases: dict[str, Figures]) -> Sheet:
    def cell(row: Figures) -> str:
        typical, p99, worst = (duration(row[figure]) for figure in ("median_us", "p99_us", "worst_us"))
        return f"{typical} ({p99}, {worst}), {row['ratio']:.2f} x"

    names = next(iter(cases.values()))
    return Sheet(title, ("", *cases), [(name, *(cell(found[name]) for found in cases.values())) for name in names])


def _floor(found: Figures) -> Iterator[Sheet]:
    rows = [
        (name, *(f"{pick(found[figure]):.2f}" for pick in (median, min, max)))
        for name, figure in (("x floor", "ratio"), ("x in place", "ratio_in_place"))
    ]
    yield Sheet(f"Durable append at 10,000 messages, {len(found['ratio'])} runs", ("", "median", "least", "most"), rows)


def _server(found: Figures) -> Iterator[Sheet]:
    title = "PostgreSQL: durable append of one ~1 KB message at 500"
    if "not_run" in found:
        yield Sheet(f"{title}: not run", ("",), [(found["not_run"],)])
        return
    names = {"bare INSERT": "bare INSERT of as many bytes", "put": "PostgresSaver.put"}
    rows = [
        (
            names.get(name, name),
            *(duration(row[figure]) for figure in ("median_us", "p99_us", "worst_us")),
            f"{row['ratio']:.2f}",
            f"{row['of_ours']:.2f}",
            str(row["count"]),
        )
        for name, row in found.items()
    ]
    yield Sheet(title, ("", "median", "p99", "worst", "x INSERT", "x holdfast", "times"), rows)


def _threads(found: Figures) -> Iterator[Sheet]:
    rows = [
        (name, *(f"{found[durability][name]['per_second']:,.0f} a second" for durability in found),
         *(duration(found[durability][name]["slowest_ms"] * 1e3) for durability in found))
        for name in found["commit"]
    ]  # fmt: skip
    columns = ("", *found, *(f"slowest call, {durability}" for durability in found))
    yield Sheet("64 threads of one process, an agent each: checkpoints", columns, rows)


def _load(found: Figures) -> Iterator[Sheet]:
    rows = []
    for name in ("msgpack", "holdfast", "pickle", "langgraph"):
        row = found[name]
        parts = (duration(row[part]) if part in row else "" for part in ("open_us", "load_us", "read_us"))
        rows.append((name, duration(row["median_us"]), duration(row["p99_us"]), f"{row['ratio']:.2f}", *parts))
    title = f"Cold load: {found['messages']:,} messages, {size(found['bytes'])}, a fresh process each"
    yield Sheet(title, ("", "median", "p99", "x decode", "of which open", "load", "read all"), rows)


def _reading(found: Figures) -> Iterator[Sheet]:
    rows = []
    for case, row in found.items():
        times = (f"{row[name]:.0f} ns" for name in ("plain_ns", "first_ns", "second_ns", "third_ns"))
        ratios = (f"{row[name]:.2f}" for name in ("first_ratio", "second_ratio", "third_ratio"))
        rows.append((case, *times, *ratios))
    columns = ("", "plain", "first time", "second", "third", "first x plain", "second", "third")
    yield Sheet("Reading, per element", columns, rows)


def _disk(found: Figures) -> Iterator[Sheet]:
    for kind, case in found.items():
        after = case["after"]
        rows = []
        for name in dict.fromkeys(name for sizes in after.values() for name in sizes):
            shown = [
                f"{size(sizes[name])} ({sizes[name] / sizes['logical']:.2f}x)" if name in sizes else "not run"
                for sizes in after.values()
            ]
            rows.append((name, *shown))
        title = f"Bytes on disk, {kind} content (zstd alone makes it {case['zstd_ratio']:.2f} times smaller)"
        yield Sheet(title, ("", *(f"{int(step):,} checkpoints" for step in after)), rows)


def _crowd(found: Figures) -> Iterator[Sheet]:
    rows = []
    for name in ("holdfast", "sqlite rows"):
        row = found[name]
        times = (duration(row[figure]) for figure in ("median_us", "p99_us", "worst_us"))
        rows.append((name, *times, str(row["errors"]), str(row["lost"]), f"{row['seconds']:.1f} s"))
    title = f"{found['writers']} processes at once, {found['checkpoints_each']} commits each"
    yield Sheet(title, ("", "median", "p99", "worst", "errors", "lost", "all took"), rows)


def _imports(found: Figures) -> Iterator[Sheet]:
    rows = [("bare Python", duration(found["bare"]["median_us"]), "")]
    for name, label in (
        ("import", "import holdfast"),
        ("open", "import holdfast; holdfast.open"),
        ("opened", "import holdfast; holdfast.open(there)"),
    ):
        rows.append((label, duration(found[name]["median_us"]), f"{found[name]['above_bare_ms']:.1f} ms"))
    yield Sheet("Start of a process", ("", "median", "above bare"), rows)


def show(results: Figures, console: Console) -> None:
    console.print(machine(results["environment"]) + "\n")
    for sheet in sheets(results):
        table = Table(title=sheet.title, title_justify="left", title_style="bold")
        for column in sheet.columns:
            table.add_column(column, justify="left" if not column else "right")
        for row in sheet.rows:
            bad = row[-1] == "not reached"
            table.add_row(*row, style="bold green" if row[0] == "holdfast" else "red" if bad else "")
        console.print(table)


def markdown(results: Figures) -> str:
    parts = [machine(results["environment"])]
    for sheet in sheets(results):
        head = "| " + " | ".join(sheet.columns) + " |"
        rule = "|---|" + "---:|" * (len(sheet.columns) - 1)
        rows = [
            "| " + " | ".join(f"**{cell}**" if row[0] == "holdfast" and cell else cell for cell in row) + " |"
            for row in sheet.rows
        ]
        parts.append("\n".join((f"**{sheet.title}**\n", head, rule, *rows)))
    return "\n\n".join(parts)


def put_into(page: Path, results: Figures) -> None:
    """Replace what stands between the two marks of the page."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{page} has no place for figures: {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n\n{END}{after}")
