"""Figures of the saver benchmark into words: the targets, and tables for the terminal. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from report import Sheet, duration, size
from rich.console import Console
from rich.table import Table
from savers_rivals import RIVALS

Figures = dict[str, Any]

DECISIVE = "500"
TITLES = {
    "W1": "W1, a model and its tools, 0.7 KB and 4 KB a turn",
    "W2": "W2, the same loop over a document of 50 KB, 1% changed in each step",
}


@dataclass(frozen=True)
class Goal:
    """So many times better than a rival, at least."""

    what: str
    found: float
    at_least: float

    @property
    def reached(self) -> bool:
        return self.found >= self.at_least

    def as_dict(self) -> Figures:
        return {**asdict(self), "reached": self.reached}


def goals(results: Figures) -> list[Goal]:
    return [goal for case, lengths in results["cases"].items() for goal in _goals(case, lengths)]


def _goals(case: str, lengths: Figures) -> Iterator[Goal]:
    turns = DECISIVE if DECISIVE in lengths else max(lengths, key=int)
    rivals = lengths[turns]
    where = f"{case}, {int(turns):,} turns"

    def times(rival: str, ours: str, read: Callable[[Figures], float], above: bool = False) -> float | None:
        """The median of the ratios within rounds; with ``above``, of what lies above the same graph without a saver."""
        wanted = {rival, ours, *((RIVALS[rival].floor, RIVALS[ours].floor) if above else ())}
        if not wanted <= rivals.keys():
            return None
        theirs, held = (_by_round(rivals, name, read, above) for name in (rival, ours))
        shared = [theirs[at] / max(held[at], 1e-9) for at in theirs if at in held]
        return median(shared) if shared else None

    def mean(run: Figures) -> float:
        return float(run["mean_us"])

    def middle(run: Figures) -> float:
        return float(run["p50_us"])

    def stored(run: Figures) -> float:
        return float(run["bytes"])

    def get(run: Figures) -> float:
        return float(run["get"]["total_us"])

    def history(run: Figures) -> float:
        return float(run["history"]["total_us"])

    rows = (
        ("SqliteSaver", "time per step above no saver", times("sqlite", "holdfast", mean, above=True), 8),
        ("SqliteSaver", "... of the median step", times("sqlite", "holdfast", middle, above=True), 8),
        ("SqliteSaver", "bytes", times("sqlite", "holdfast", stored), 100),
        ("DeltaChannel(50)", "time per step", times("sqlite delta", "holdfast", mean), 1),
        ("DeltaChannel(50)", "... of the median step", times("sqlite delta", "holdfast", middle), 1),
        ("DeltaChannel(50)", "... both with it", times("sqlite delta", "holdfast delta", mean), 1),
        ("DeltaChannel(50)", "bytes", times("sqlite delta", "holdfast", stored), 3),
        ("DeltaChannel(50)", "cold get_state", times("sqlite delta", "holdfast", get), 5),
        ("DeltaChannel(50)", "cold get_state_history(limit=50)", times("sqlite delta", "holdfast", history), 5),
    )
    for rival, what, value, limit in rows:
        if value is not None:
            yield Goal(f"{where}, against {rival}: {what}", value, limit)


def _by_round(rivals: Figures, name: str, read: Callable[[Figures], float], above: bool) -> dict[int, float]:
    found = {run["round"]: read(run) for run in rivals[name]["each"]}
    if not above:
        return found
    floor = {run["round"]: read(run) for run in rivals[RIVALS[name].floor]["each"]}
    return {at: value - floor[at] for at, value in found.items() if at in floor}


def sheets(results: Figures) -> Iterator[Sheet]:
    yield _flushing(results)
    for case, lengths in results["cases"].items():
        workload, _, material = case.partition(" ")
        for turns, rivals in lengths.items():
            yield _comparison(f"{TITLES[workload]}, {material}: {int(turns):,} turns", rivals)
    if results["async"]:
        yield _comparison(f'{TITLES["W1"]}: 500 turns with durability="async", LangGraph\'s default', results["async"])
    if results["pruned"]:
        yield _pruned(results["pruned"])
    rows = [
        (goal.what, f"{goal.found:,.2f} x", f"{goal.at_least:g} x", "reached" if goal.reached else "not reached")
        for goal in goals(results)
    ]
    if rows:
        whole = all(DECISIVE in lengths for lengths in results["cases"].values())
        title = "Targets: so many times better" + ("" if whole else " (meant for 500 turns, which were not run)")
        yield Sheet(title, ("", "found", "at least", ""), rows)


def _flushing(results: Figures) -> Sheet:
    rows = []
    for name, found in results["flushes"].items():
        counted = f"{found['per_step']:.2f}" if "per_step" in found else found["unknown"]
        rows.append((RIVALS[name].label, counted, results["policies"].get(RIVALS[name].saver, "")))
    return Sheet(
        "Flushes (fsync, fdatasync) per step, counted, and what each says of itself", ("", "per step", ""), rows
    )


def _comparison(title: str, rivals: Figures) -> Sheet:
    columns = (
        "",
        "runs",
        "total",
        "step mean",
        "p50",
        "p99",
        "above no saver",
        "on disk",
        "get_state",
        "history",
        "memory",
    )
    rows = []
    for name, row in rivals.items():
        above = duration(row["above_mean_us"]) if "above_mean_us" in row and RIVALS[name].floor != name else ""
        memory = size(row["above_peak_bytes"]) if above else ""
        rows.append(
            (
                RIVALS[name].label,
                str(row["runs"]),
                *(duration(row[figure]) for figure in ("total_us", "mean_us", "p50_us", "p99_us")),
                above,
                size(row["bytes"]) if "bytes" in row else "",
                duration(row["get"]["total_us"]) if "get" in row else "",
                duration(row["history"]["total_us"]) if "history" in row else "",
                memory,
            )
        )
    return Sheet(title, columns, rows)


def _pruned(found: Figures) -> Sheet:
    rows = []
    for name, row in found.items():
        plain, _, how = name.partition(", ")
        label = RIVALS[plain].label + (f", rows deleted {how}" if how else "")
        outcome = "cannot" if not row["can"] else "state intact" if row["after"]["intact"] else "STATE LOST"
        counts = (f"{row[when]['checkpoints']:,}" for when in ("before", "after"))
        sizes = (size(row[when]["bytes"]) for when in ("before", "after"))
        said = row["said"] or row["after"]["said"]
        rows.append((label, *counts, *sizes, duration(row["prune_us"]), outcome, said))
    turns = next(iter(found.values()))["turns"]
    columns = ("", "checkpoints", "after", "on disk", "after", "took", "", "it said")
    return Sheet(f"W5: keep the latest checkpoint of {turns:,} turns with delta channels", columns, rows)


def machine(found: Figures) -> str:
    load = f"{found['load_before'][0]:.1f} before and {found['load_after'][0]:.1f} after"
    under = ", under SCHED_FIFO" if found["realtime"] else ""
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    return (
        f"{found['when'][:10]}, {found['processor']}, {found['cores']} cores, Linux {found['kernel']},"
        f" {found['filesystem']}, Python {found['python']}, SQLite {found['sqlite_of_holdfast']} (rivals"
        f" {found['sqlite_of_rivals']}), {packages}. Load average {load}{under}. The run took {found['seconds']:.0f} s;"
        f" seed {found['seed']}."
    )


def show(results: Figures, console: Console) -> None:
    console.print(machine(results["environment"]) + "\n", highlight=False)
    for sheet in sheets(results):
        table = Table(title=sheet.title, title_justify="left", title_style="bold")
        for at, column in enumerate(sheet.columns):
            table.add_column(column, justify="right" if at and column != "it said" else "left")
        for row in sheet.rows:
            ours, bad = row[0].startswith("HoldfastSaver"), row[-1] == "not reached"
            table.add_row(*row, style="bold green" if ours else "red" if bad else "")
        console.print(table)
    for note in results["notes"]:
        console.print(note, highlight=False)
    for failure in results["failures"]:
        console.print(f"FAILED: {failure}", style="red", highlight=False, markup=False)
