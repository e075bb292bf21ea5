"""When to checkpoint: what policies waste on agents that fail. See --help.

Replays seeded failures over fixed intervals, policies of steps and events, and the adaptive one, for states that are
cheap and dear to save. Time is simulated (``when_traces``), with the schedule that the library uses. Prints tables,
writes JSON and draws the picture. ``--only costs`` measures what checkpoints of a real store take, ``--overhead`` what
policies add to the run time of a real agent.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import targets as reached
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table
from when_overhead import main as overhead
from when_traces import ADAPTIVE, FAMILIES, ORACLE, POLICIES, TOTALS, Case, Judged, judge, simulate

import holdfast

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("traces", "quiet")
"""What is done unless ``--only`` says otherwise."""

STATES = {"small": 0.00065, "middle": 0.055, "large": 0.55}
"""Seconds of a checkpoint. The first two were measured on a quiet machine (docs/benchmarks.md): one message appended to
10,000, and 595 edits scattered over 59,523 records. The third is ten times the second, and was not measured so: ten
times as many edits and records took 15 times the processor time (``--only costs``)."""
BETWEEN_S = {0.05: (120.0,), 2.0: (600.0, 3_600.0), 30.0: (600.0, 7_200.0)}
"""The mean times between failures that are tried, by the length of a step: with short steps fewer of them."""
CASES = tuple(
    (state, Case(cost_s, step_s, between_s))
    for state, cost_s in STATES.items()
    for step_s, found in BETWEEN_S.items()
    for between_s in found
    if cost_s > 0.001 or between_s < 3_600 or step_s > 2  # hundreds of thousands of checkpoints for each figure
)
OF_TIME = (ADAPTIVE, TOTALS, ORACLE, "every 30 s")
"""With the shortest steps, policies that count them would take most of the simulation, and are not of interest."""
QUIET_HOURS = (0.25, 1, 24)
FAILURES = 100
SEEDS_FROM = 1_000
"""The constants of the schedule were chosen on seeds below 200; here are others."""

WITHIN, SHARE = 1.10, 0.02
COLOURS = {"exponential": "#0072b2", "Weibull 0.7": "#e69f00", "bursts": "#d55e00", "shifting": "#56b4e9"}
Figures = dict[str, Any]


def main() -> None:
    options = parse()
    if options.overhead:
        sys.exit(overhead(20 if not options.quick else 3, options.dir))
    console = Console(width=None if sys.stdout.isatty() else 120)
    results: Figures = {"environment": conditions(seeds=options.seeds, failures=options.failures)}
    with console.status("") as status:
        if "traces" in options.only:
            results["traces"] = traces(options.seeds, options.failures, options.jobs, status.update)
        if "quiet" in options.only:
            results["quiet"] = quiet(options.seeds, status.update)
        if "costs" in options.only:
            results["costs"] = costs(options.dir, status.update)
    results["targets"] = targets(results)
    keep(results, options.json, console)
    show(results, console)
    if "traces" in results and "quiet" in results:
        draw(results, options.plot)
        console.print(f"Picture: {options.plot}")


# -- what is simulated ----------------------------------------------------------------------------------------


def traces(seeds: int, failures: int, jobs: int, say: Callable[[str], None]) -> list[Figures]:
    """Each case under each family of failures: what policies waste, against the best fixed interval of each trace."""
    every = [(state, case, family) for state, case in CASES for family in FAMILIES]
    work = [
        (case, family, seed, failures) for _, case, family in every for seed in range(SEEDS_FROM, SEEDS_FROM + seeds)
    ]
    judged: list[Judged] = []
    with ProcessPoolExecutor(jobs) as pool:
        for one in pool.map(_judge, work, chunksize=1):
            judged.append(one)
            say(f"{len(judged)} of {len(work)} traces")
    return [
        _figures(state, case, family, judged[at * seeds : (at + 1) * seeds])
        for at, (state, case, family) in enumerate(every)
    ]


def _judge(work: tuple[Case, str, int, int]) -> Judged:
    case = work[0]
    return judge(*work, OF_TIME if case.step_s < 1 else tuple(POLICIES))


def _figures(state: str, case: Case, family: str, judged: Sequence[Judged]) -> Figures:
    intervals = judged[0].fixed
    ran_s = sum(next(iter(one.fixed.values())).ran_s for one in judged)
    whole = {every_s: sum(one.fixed[every_s].s for one in judged) for every_s in intervals}
    best_s = min(whole, key=whole.__getitem__)
    return {
        "state": state,
        "cost_s": case.cost_s,
        "step_s": case.step_s,
        "between_s": case.between_s,
        "family": family,
        "fixed": {f"{every_s:g}": waste_s / ran_s for every_s, waste_s in whole.items()},
        "best_every_s": best_s,
        "policies": {
            name: {
                "waste": sum(one.policies[name].s for one in judged) / ran_s,
                "saving": sum(one.policies[name].saving_s for one in judged) / ran_s,
                "against_best": fmean(one.against_best(name) for one in judged),
                "worst": max(one.against_best(name) for one in judged),
                "against_best_of_all": sum(one.policies[name].s for one in judged) / whole[best_s],
            }
            for name in judged[0].policies
        },
    }


def quiet(seeds: int, say: Callable[[str], None]) -> list[Figures]:
    """Nothing fails: the share of the time that checkpoints take."""
    found = []
    for state, cost_s in STATES.items():
        for step_s in BETWEEN_S:
            for hours in QUIET_HOURS if step_s > 0.05 else QUIET_HOURS[:2]:
                say(f"nothing fails: {state}, steps of {step_s:g} s, {hours:g} h")
                case, runs = Case(cost_s, step_s, math.inf), range(SEEDS_FROM, SEEDS_FROM + seeds)
                wastes = [simulate(case, ADAPTIVE, [hours * 3_600.0], seed, fails=False) for seed in runs]
                shares = [waste.saving_s / waste.ran_s for waste in wastes]
                found.append(
                    {"state": state, "step_s": step_s, "hours": hours, "share": fmean(shares), "worst": max(shares)}
                )
    return found


# -- what is measured -----------------------------------------------------------------------------------------


def costs(folder: Path, say: Callable[[str], None]) -> Figures:
    """Checkpoints of a real store: processor time and time by the clock, medians."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, found = random.Random(1), {}
    for state, records, edits, times in (
        ("small", 10_000, 1, 200), ("middle", 59_523, 595, 20), ("large", 595_230, 5_950, 7),
    ):  # fmt: skip
        say(f"checkpoints of a {state} state")
        with tempfile.TemporaryDirectory(dir=folder, prefix="when-") as name, holdfast.open(name) as store:
            agent = store.agent("a")
            agent.state["records"] = [{"n": number, "text": f"record {number}"} for number in range(records)]
            agent.checkpoint()
            spent = []
            for number in range(times):
                for at in chance.sample(range(records), edits):
                    agent.state["records"][at]["n"] = -number
                began_s, cpu_s = time.perf_counter(), time.process_time()
                agent.checkpoint()
                spent.append((time.perf_counter() - began_s, time.process_time() - cpu_s))
        found[state] = {"s": median(one for one, _ in spent), "cpu_s": median(one for _, one in spent)}
    return found


# -- what is printed ------------------------------------------------------------------------------------------


def targets(results: Figures) -> list[Figures]:
    found = []
    for family in FAMILIES if "traces" in results else ():
        rows = [row["policies"] for row in results["traces"] if row["family"] == family]
        for what, figure in (("mean of a case", "against_best"), ("single trace", "worst")):
            worst, least = (max(row[name][figure] for row in rows) for name in (ADAPTIVE, ORACLE))
            said = f"{family}, worst {what}: waste against the best fixed interval (who {ORACLE}: {least:.2f} x)"
            found.append(_target(said, worst, WITHIN, "{:.2f} x"))
        learning = [row[ADAPTIVE]["waste"] / row[ORACLE]["waste"] for row in rows]
        said = f"{family}, mean of all cases: waste against who {ORACLE}"
        found.append(_target(said, fmean(learning), WITHIN, "{:.2f} x"))
    if "quiet" in results:
        worst = max(row["worst"] for row in results["quiet"])
        found.append(_target("nothing fails: share of the run time, worst", worst, SHARE, "{:.2%}"))
    return found


def _target(what: str, value: float, limit: float, form: str) -> Figures:
    most = f"at most {form.format(limit)}"
    return {"what": what, "found": form.format(value), "least": most, "reached": value <= limit, "value": value}


def show(results: Figures, console: Console) -> None:
    for family in FAMILIES if "traces" in results else ():
        sheet = Table(
            title=f"{family}: waste against the best fixed interval, mean (worst trace)", title_justify="left"
        )
        for column in ("state", "step", "between failures", "best fixed", "its waste", *POLICIES):
            sheet.add_column(column, justify="right" if column != "state" else "left")
        for row in (row for row in results["traces"] if row["family"] == family):
            best_s = row["best_every_s"]
            policies = [row["policies"].get(name) for name in POLICIES]
            ratios = [f"{one['against_best']:.2f} ({one['worst']:.2f})" if one else "-" for one in policies]
            about = (f"{row['step_s']:g} s", f"{row['between_s']:g} s", f"{best_s:.3g} s")
            sheet.add_row(row["state"], *about, f"{row['fixed'][f'{best_s:g}']:.2%}", *ratios)
        console.print(sheet)
    if "quiet" in results:
        sheet = Table(
            title="Nothing fails: share of the run time that adaptive takes, mean (worst)", title_justify="left"
        )
        for column in ("state", "step", *(f"{hours:g} h" for hours in QUIET_HOURS)):
            sheet.add_column(column, justify="right" if column != "state" else "left")
        for state in STATES:
            for step_s in BETWEEN_S:
                rows = [row for row in results["quiet"] if (row["state"], row["step_s"]) == (state, step_s)]
                sheet.add_row(state, f"{step_s:g} s", *(f"{row['share']:.2%} ({row['worst']:.2%})" for row in rows))
        console.print(sheet)
    for state, one in results.get("costs", {}).items():
        console.print(
            f"a checkpoint of the {state} state: {one['s'] * 1e3:.2f} ms, processor {one['cpu_s'] * 1e3:.2f} ms"
        )
    if results["targets"]:
        reached.show(results["targets"], console)


def draw(results: Figures, path: Path) -> None:
    import picture

    with picture.panels(path, 4.0, layout="constrained") as (_figure, left, right):
        rows = [
            row for row in results["traces"] if (row["state"], row["step_s"], row["between_s"]) == ("middle", 2, 600)
        ]
        for row in rows:
            xs = [float(every_s) for every_s in row["fixed"]]
            ys = [100 * waste for waste in row["fixed"].values()]
            colour = COLOURS[row["family"]]
            left.plot(xs, ys, color=colour, linewidth=1.5, label=f"{row['family']}: fixed intervals")
            waste = 100 * row["policies"][ADAPTIVE]["waste"]
            left.axhline(waste, color=colour, linewidth=2.4, linestyle="--")
        left.plot([], [], color="#555555", linewidth=2.4, linestyle="--", label="adaptive, the same colours")
        left.set(xscale="log", yscale="log", xlabel="a checkpoint every so many seconds (fixed)")
        left.set_ylabel("lost work and checkpoints, % of the time")
        ticks = [3, 5, 10, 20, 40, 60]
        left.set_xticks(ticks, [str(tick) for tick in ticks])
        low = min(100 * min(*row["fixed"].values(), row["policies"][ADAPTIVE]["waste"]) for row in rows)
        high = max(100 * waste for row in rows for waste in row["fixed"].values())
        shown = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8) if low * 0.9 <= tick <= high * 1.5]
        left.set_yticks(shown, [f"{tick:g}%" for tick in shown])
        left.minorticks_off()
        left.set_ylim(low * 0.9, high * 1.9)
        left.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
        picture.grid(left)
        picture.title(left, "A failure every 10 minutes, checkpoints of 55 ms")
        _ratios(right, results)
        picture.title(right, "Against the best fixed interval, all cases")


def _ratios(axes: Any, results: Figures) -> None:
    """For each policy, where its cases lie: one dot each."""
    import picture

    names = list(POLICIES)
    for place, name in enumerate(names):
        for shift, family in enumerate(FAMILIES):
            rows = [row["policies"].get(name) for row in results["traces"] if row["family"] == family]
            found = [row["against_best"] for row in rows if row]
            height = place + (shift - 1.5) * 0.17
            axes.scatter(found, [height] * len(found), s=12, color=COLOURS[family], alpha=0.75, linewidths=0)
    axes.axvline(1, color=picture.FLOOR, linestyle="--", linewidth=1.3)
    axes.axvspan(0.5, WITHIN, color="#dddddd", alpha=0.4, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="waste, times that of the best fixed interval in hindsight")
    ticks = [tick for tick in (0.7, 1, 1.5, 2, 4, 10, 40, 100) if tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    picture.grid(axes, axis="x")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate when to checkpoint agents that fail.")
    parser.add_argument("--quick", action="store_true", help="few seeds: does it work?")
    parser.add_argument(
        "--only", nargs="+", choices=(*PARTS, "costs"), default=PARTS, metavar="NAME",
        help=f"of {', '.join(PARTS)}, and costs, which measures a real store",
    )  # fmt: skip
    parser.add_argument("--overhead", action="store_true", help="only: what policies add to tools that take 50 ms")
    parser.add_argument("--seeds", type=int, help="traces of each case and family (8)")
    parser.add_argument("--failures", type=int, default=FAILURES, help=f"in each trace ({FAILURES})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that simulate")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where stores are made for --only costs")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "when.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "when.svg")
    options = parser.parse_args()
    if options.seeds is None:
        options.seeds = 2 if options.quick else 8
    return options


if __name__ == "__main__":
    main()
