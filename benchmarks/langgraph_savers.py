"""The saver benchmark: HoldfastSaver beside LangGraph's SqliteSaver and no saver, in turns, on one disk. See --help.

Chat use is the benchmark: one ``invoke`` per message. A stream of many steps, with SqliteSaver's delta channels, and
short threads stand beside it. Prints tables, writes the figures as JSON and draws the picture; with --publish also the
one that README and docs show. Targets that are not reached are printed as such: the exit code says whether the run
worked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import targets
from commit import REALTIME_PRIORITY, SEED
from conditions import conditions, filesystem, keep
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
PACKAGES = ("holdfast", "langgraph", "langgraph-checkpoint", "langgraph-checkpoint-sqlite")
TURNS, FULL_TURNS, STEPS = 300, 1_000, 1_000
SHORT_STEPS = 5
"""Of a short thread. It has 7 checkpoints: one of the input and one of the start come before them."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One saver at one workload."""

    workload: str
    size: int
    saver: str
    delta: bool = False
    durability: str = "sync"

    @property
    def name(self) -> str:
        return self.saver + ", delta" * self.delta + ", async" * (self.durability == "async")


LABELS = {
    "none": "no saver",
    "none, delta": "no saver, DeltaChannel(50)",
    "holdfast": "HoldfastSaver",
    "holdfast, delta": "HoldfastSaver, DeltaChannel(50)",
    "sqlite": "SqliteSaver",
    "sqlite, delta": "SqliteSaver, DeltaChannel(50)",
}
LABELS |= {f"{name}, async": f"{label}, async" for name, label in LABELS.items()}
SAVED = (("holdfast", False), ("holdfast", True), ("sqlite", True))
SPEEDS = {"sync": 1.3, "async": 1.5}
"""How many times as fast a stream is to be as SqliteSaver's with DeltaChannel."""


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    # Compiled modules are kept and nothing is traced, in all that this starts.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ |= {"LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false"}
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    cases = [Case("chat", size, saver) for size in options.turns for saver in ("none", "holdfast", "sqlite")]
    cases += [Case("stream", options.steps, "none", delta) for delta in (False, True)]
    cases += [Case("stream", options.steps, *one, durability) for durability in SPEEDS for one in SAVED]
    cases += [Case("threads", SHORT_STEPS, saver) for saver in ("none", "holdfast", "sqlite")]
    began = perf_counter()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="savers-") as folder, console.status("") as status:
        results = {"environment": environment(options, Path(folder))}
        rounds: dict[Case, list[Figures]] = {case: [] for case in cases}
        for number in range(options.runs):
            for case in random.Random(options.seed + number).sample(cases, len(cases)):
                if number == 0 or case.size < FULL_TURNS or case.workload == "stream":
                    status.update(f"{perf_counter() - began:4.0f} s  round {number + 1}: {case}")
                    rounds[case].append(measure(case, options.seed, Path(folder)))
    for workload in ("chat", "stream", "threads"):
        results[workload] = {
            str(size): {
                case.name: summary(rounds[case]) for case in cases if (case.workload, case.size) == (workload, size)
            }
            for size in dict.fromkeys(case.size for case in cases if case.workload == workload)
        }
    results["environment"]["seconds"] = perf_counter() - began
    results["targets"] = goals(results)
    keep(results, options.json, console)
    show(results, console)
    draw(results, options.plot)
    console.print(f"Picture: {options.plot}")
    if options.publish:
        draw(results, ROOT / "docs" / "images" / "langgraph.svg")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure HoldfastSaver beside LangGraph's SqliteSaver.")
    parser.add_argument("--quick", action="store_true", help="one round of 30 turns and 60 steps: does it work?")
    parser.add_argument("--full", action="store_true", help=f"also {FULL_TURNS:,} turns, where SqliteSaver writes 7 GB")
    parser.add_argument("--turns", type=int, nargs="+", metavar="N", help=f"lengths of the chat (default {TURNS})")
    parser.add_argument("--steps", type=int, metavar="N", help=f"of the stream (default {STEPS})")
    parser.add_argument("--runs", type=int, metavar="N", help="rounds (default 3); of 1,000 turns there is one")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work; its filesystem is measured")
    parser.add_argument("--realtime", action="store_true", help="run under SCHED_FIFO (needs root), see commit.py")
    parser.add_argument("--publish", action="store_true", help="also renew docs/images/langgraph.svg")
    results = HERE / "results"
    parser.add_argument("--json", type=Path, default=results / "langgraph_savers.json", help="where the figures go")
    parser.add_argument("--plot", type=Path, default=results / "langgraph_savers.svg", help="where the picture goes")
    options = parser.parse_args()
    if options.publish and options.quick:
        parser.error("--publish needs a whole run")
    options.turns = options.turns or ([30] if options.quick else [TURNS, FULL_TURNS] if options.full else [TURNS])
    options.steps = options.steps or (60 if options.quick else STEPS)
    options.runs = options.runs or (1 if options.quick else 3)
    return options


def environment(options: argparse.Namespace, folder: Path) -> Figures:
    return conditions(
        seed=options.seed,
        runs=options.runs,
        realtime=options.realtime,
        durability="sync: each step waits for its checkpoint; async where it is said",
        filesystem=filesystem(folder),
        packages={name: version(name) for name in PACKAGES},
    )


def measure(case: Case, seed: int, folder: Path) -> Figures:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        job = {"workload": case.workload, "size": case.size, "saver": case.saver, "delta": case.delta}
        job["durability"] = case.durability
        child = [sys.executable, str(HERE / "savers_child.py"), json.dumps({**job, "seed": seed, "place": place})]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{case} failed:\n{done.stderr}")
    os.sync()  # nothing of it is left for the next one to flush
    figures: Figures = json.loads(done.stdout)
    return figures


def summary(rounds: list[Figures]) -> Figures:
    """Medians over the rounds; of curves, that of the first one."""
    middle = {name: median([found[name] for found in rounds]) for name, value in rounds[0].items() if name != "over"}
    return {**middle, "rounds": len(rounds), **({"over": rounds[0]["over"]} if "over" in rounds[0] else {})}


# -- what was found ----------------------------------------------------------------------------------------------------


def above(row: Figures, name: str, what: str) -> float:
    """Time above that of the same graph without a saver."""
    floor = "none, delta" if "delta" in name else "none"
    return float(max(row[name][what] - row[floor][what], 0.001))


def goals(results: Figures) -> list[Figures]:
    found = []

    def goal(what: str, value: float, least: float, unit: str = "x", *, most: bool = False) -> None:
        reached = value <= least if most else value >= least
        bound = f"at most {least:g} {unit}" if most else f"{least:g} {unit}"
        found.append({"what": what, "found": f"{value:.2f} {unit}", "least": bound, "reached": reached})

    for size, row in results["chat"].items():
        least = 10.0 if int(size) >= FULL_TURNS else 7.0
        for what, how in (("last_us", "time"), ("last_cpu_us", "processor time")):
            faster = above(row, "sqlite", what) / above(row, "holdfast", what)
            goal(f"chat: {how} of a turn after {size}, above no saver, of SqliteSaver's", faster, least)
        goal(
            f"chat: bytes on disk after {size} turns, of SqliteSaver's",
            row["sqlite"]["bytes"] / row["holdfast"]["bytes"],
            150,
        )
        goal(
            f"chat: get_tuple after {size} turns, per message",
            row["holdfast"]["read_us_per_message"],
            6,
            "us",
            most=True,
        )
        first = row["holdfast"]["first_us_per_message"] - row["holdfast"]["second_us_per_message"]
        goal("chat: first put after a read, above the next, per message", first, 0.8, "us", most=True)
    for size, row in results["stream"].items():
        for name in (name for name in row if name.startswith("holdfast")):
            durability = "async" if name.endswith("async") else "sync"
            rival = "sqlite, delta" + ", async" * (durability == "async")
            faster = row[rival]["step_us"] / row[name]["step_us"]
            what = f"stream of {size} steps: speed of {LABELS[name]}, of SqliteSaver's with DeltaChannel"
            goal(what, faster, SPEEDS[durability])
    for row in results["threads"].values():
        faster = row["sqlite"]["step_us"] / row["holdfast"]["step_us"]
        goal("thread of 7 checkpoints: speed, of SqliteSaver's", faster, 1)
    return found


def show(results: Figures, console: Console) -> None:
    for size, row in results["chat"].items():
        table = Table(title=f"Chat of {size} turns, one invoke each, durability=sync", title_justify="left")
        for column in ("", "turn", "at the end", "above", "CPU above", "on disk", "get_tuple", "first put", "next put"):
            table.add_column(column, justify="right" if column else "left")
        for name, found in row.items():
            saved = name != "none"
            parts = [found[f"{what}_us_per_message"] for what in ("read", "first", "second")] if saved else []
            table.add_row(
                LABELS[name], _ms(found["turn_us"]), _ms(found["last_us"]),
                _ms(above(row, name, "last_us")) if saved else "",
                _ms(above(row, name, "last_cpu_us")) if saved else "",
                f"{found['bytes'] / 1e6:,.1f} MB" if saved else f"({found['text_bytes'] / 1e6:,.1f} MB of text)",
                *(f"{part:.1f} us/message" for part in parts),
            )  # fmt: skip
        console.print(table)
    for size, row in results["stream"].items():
        table = Table(title=f"Stream of {size} steps", title_justify="left")
        for column in ("", "step", "above", "CPU", "CPU above", "on disk"):
            table.add_column(column, justify="right" if column else "left")
        for name, found in row.items():
            saved = not name.startswith("none")
            table.add_row(
                LABELS[name], _ms(found["step_us"]), _ms(above(row, name, "step_us")) if saved else "",
                _ms(found["step_cpu_us"]), _ms(above(row, name, "step_cpu_us")) if saved else "",
                f"{found['bytes'] / 1e6:,.1f} MB" if saved else "",
            )  # fmt: skip
        console.print(table)
    for row in results["threads"].values():
        table = Table(title="A thread of 7 checkpoints", title_justify="left")
        for column in ("", "all of it", "CPU", "on disk, 21 of them"):
            table.add_column(column, justify="right" if column else "left")
        for name, found in row.items():
            stored = f"{found['bytes'] / 1e6:,.2f} MB" if "bytes" in found else ""
            table.add_row(LABELS[name], _ms(found["step_us"]), _ms(found["step_cpu_us"]), stored)
        console.print(table)
    targets.show(results["targets"], console)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f} ms"


def draw(results: Figures, path: Path) -> None:
    """Time of a turn over the conversation, and what is on disk in the end."""
    from picture import FLOOR, grid, line, panels, title

    size, row = list(results["chat"].items())[-1]
    with panels(path, 3.8) as (figure, left, right):
        for name, colour, marker in (("holdfast", "#0072b2", "o"), ("sqlite", "#d55e00", "D")):
            line(left, *_curve(row[name]), LABELS[name], colour, marker, ours=name == "holdfast")
        left.plot(*_curve(row["none"]), "--", color=FLOOR, lw=1.3, label=LABELS["none"])
        left.set(xlabel="turns (a message of 100 words, an answer of 700)", ylabel="ms", ylim=(0, None))
        title(left, "Time of one turn, durably")
        grid(left)
        left.legend(frameon=False, fontsize=8)
        shown = [("the text alone", row["none"]["text_bytes"]), (LABELS["holdfast"], row["holdfast"]["bytes"])]
        shown.append((LABELS["sqlite"], row["sqlite"]["bytes"]))
        bars = right.barh([label for label, _ in shown], [value / 1e6 for _, value in shown], height=0.55)
        for bar, colour in zip(bars, (FLOOR, "#0072b2", "#d55e00"), strict=True):
            bar.set_color(colour)
        right.bar_label(bars, [f" {value / 1e6:,.1f} MB" for _, value in shown], fontsize=8)
        right.set(xscale="log", xlim=(None, 8 * max(value for _, value in shown) / 1e6), xlabel="MB")
        right.invert_yaxis()
        title(right, f"On disk after {int(size):,} turns")
        grid(right, axis="x")
        figure.tight_layout(w_pad=2.5)


def _curve(found: Figures) -> tuple[list[float], list[float]]:
    return [at for at, _ in found["over"]], [value / 1e3 for _, value in found["over"]]


if __name__ == "__main__":
    main()
