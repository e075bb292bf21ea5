"""What a writer feels while checkpoints are removed beside it. See --help.

One agent with a long history (100,000 checkpoints). A writer in a process of its own appends to another agent and
measures every commit: alone, then while another process removes all but the last 1,000 of the long one. Then the same
on the long agent itself, and with a policy that the writer's own process follows in a background thread. Prints a
table, writes JSON and draws the picture.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast import Policy

ROOT = Path(__file__).resolve().parent.parent
KEEP = 1_000
FAVOURED = "HOLDFAST_BENCH_FAVOURED"
POINTS = (50.0, 90.0, 99.0, 99.9, 100.0)
COLOURS = {"alone": "#555555", "beside": "#1f77b4", "same agent": "#d62728", "by itself": "#2ca02c"}


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in CHILDREN:
        if os.environ.get(FAVOURED):
            os.nice(-15)
        CHILDREN[sys.argv[1]](*sys.argv[2:])
        return
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.favoured:
        os.environ[FAVOURED] = "1"
    results: dict[str, Any] = {
        "environment": conditions(checkpoints=options.checkpoints, kept=KEEP, favoured=options.favoured)
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="retain-") as name, console.status("") as status:
        results |= measure(Path(name), options.checkpoints, options.seconds, status.update)
    keep(results, options.json, console)
    show(results, console)
    draw(results, options.plot)
    console.print(f"Picture: {options.plot}")


def measure(folder: Path, checkpoints: int, seconds: float, say: Any) -> dict[str, Any]:
    waits: dict[str, list[float]] = {}
    removals: dict[str, Any] = {}
    say(f"making {checkpoints:,} checkpoints")
    fill(folder / "store", "long", checkpoints)
    say("a writer alone")
    waits["alone"] = write(folder / "store", "other", seconds)
    say("a writer beside a removal")
    waits["beside"], removals["beside"] = write_beside(folder / "store", "other")
    say(f"making {checkpoints:,} checkpoints")
    fill(folder / "again", "long", checkpoints)
    say("a writer of the agent that is being removed from")
    waits["same agent"], removals["same agent"] = write_beside(folder / "again", "long")
    say("a writer that follows a policy itself")
    waits["by itself"] = write(folder / "third", "short", max(seconds, 20.0), policy=True)
    return {
        "removals": removals,
        "waits_s": {name: {str(point): percentile(found, point) for point in POINTS} for name, found in waits.items()},
        "commits": {name: len(found) for name, found in waits.items()},
    }


def fill(path: Path, name: str, checkpoints: int) -> None:
    with holdfast.open(path, durability="batched") as store:
        agent = store.agent(name)
        messages = agent.state.setdefault("messages", [])
        agent.state["counter"] = 0
        for number in range(checkpoints):
            agent.state["counter"] = number
            if number % 10 == 0:
                messages.append({"role": "user", "content": f"message {number} " * 20})
            agent.checkpoint(f"step {number}")


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def write(path: Path, name: str, seconds: float, *, policy: bool = False) -> list[float]:
    process = start("write", path, name, "policy" if policy else "")
    process.stdout.readline()  # type: ignore[union-attr]
    time.sleep(seconds)
    out, _ = process.communicate("stop\n")
    return [float(word) for word in out.split()]


def write_beside(path: Path, name: str) -> tuple[list[float], dict[str, Any]]:
    writer = start("write", path, name, "")
    writer.stdout.readline()  # type: ignore[union-attr]
    began = time.monotonic()
    remover = start("remove", path, "long")
    out, _ = remover.communicate()
    took = time.monotonic() - began
    answer, _ = writer.communicate("stop\n")
    removed, freed = out.split()
    return [float(word) for word in answer.split()], {"removed": int(removed), "freed_bytes": int(freed), "s": took}


def child_write(path: str, name: str, policy: str = "") -> None:
    """Commit until told to stop; then print how long each commit took."""
    import threading

    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
    found = []
    with holdfast.open(path) as store:
        if policy:
            store.set_policy(Policy(last=100))
        agent = store.agent(name)
        agent.state.setdefault("messages", [])
        print("ready", flush=True)
        while not stop.is_set():
            agent.state["messages"].append("a few words")
            began = time.perf_counter()
            agent.checkpoint("step")
            found.append(time.perf_counter() - began)
            time.sleep(0.002)
    print(*(f"{wait:.6f}" for wait in found))


def child_remove(path: str, name: str) -> None:
    with holdfast.open(path) as store:
        report = store.retain(Policy(last=KEEP), [name])
        print(report.removed, report.freed_bytes)


CHILDREN = {"write": child_write, "remove": child_remove}


def percentile(found: list[float], point: float) -> float:
    ordered = sorted(found)
    return ordered[min(len(ordered) - 1, int(len(ordered) * point / 100))]


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("writer", "commits", *(f"p{point:g}" if point < 100 else "worst" for point in POINTS))
    for name, waits in results["waits_s"].items():
        table.add_row(name, f"{results['commits'][name]:,}", *(f"{waits[str(point)] * 1e3:.2f} ms" for point in POINTS))
    console.print(table)
    for name, one in results["removals"].items():
        console.print(f"{name}: {one['removed']:,} checkpoints, {one['freed_bytes']:,} bytes, {one['s']:.1f} s")
    alone, beside = results["waits_s"]["alone"], results["waits_s"]["beside"]
    console.print(f"worst wait against alone: {beside['100.0'] / alone['100.0']:.1f} x")


def draw(results: dict[str, Any], path: Path) -> None:
    import picture  # not in the processes that are measured

    with picture.panels(path, 3.6, layout="constrained") as (_figure, left, right):
        names = [f"p{point:g}" if point < 100 else "worst" for point in POINTS]
        for name, waits in results["waits_s"].items():
            values = [waits[str(point)] * 1e3 for point in POINTS]
            picture.line(left, names, values, name, COLOURS[name], "o", ours=name == "beside")
        left.set(yscale="log", ylabel="one commit takes (ms)")
        left.legend(frameon=False)
        picture.grid(left)
        picture.title(left, "A writer while checkpoints are removed")
        shown = list(results["removals"])
        rates = [results["removals"][name]["removed"] / results["removals"][name]["s"] for name in shown]
        right.barh(shown, rates, color=[COLOURS[name] for name in shown])
        right.set(xlabel="checkpoints removed per second")
        picture.grid(right, axis="x")
        removed = median(one["removed"] for one in results["removals"].values())
        picture.title(right, f"Removing {removed:,.0f} checkpoints")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a writer feels while checkpoints are removed.")
    parser.add_argument("--quick", action="store_true", help="few checkpoints: does it work?")
    parser.add_argument("--checkpoints", type=int, help="of the long history (100,000)")
    parser.add_argument("--seconds", type=float, default=15.0, help="that the writer is measured alone")
    parser.add_argument(
        "--favoured",
        action="store_true",
        help="run writer and remover before others (nice -15, needs root): for a busy machine",
    )
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "retain.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "retain.svg")
    options = parser.parse_args()
    if options.checkpoints is None:
        options.checkpoints = 3_000 if options.quick else 100_000
    return options


if __name__ == "__main__":
    main()
