"""The saver benchmark: HoldfastSaver beside LangGraph's own, with the same graph on the same disk. See --help.

Prints tables, writes the figures as JSON and draws the picture; with --publish also the one that README and docs show.
Targets that are not reached are printed as such and change nothing else: the exit code says whether the run worked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import apsw
import savers_plan as plan
import savers_report as report
from commit import REALTIME_PRIORITY, SEED, filesystem, processor, warn_when_busy
from rich.console import Console
from savers_postgres import Cluster, Unavailable, cluster
from savers_rivals import RIVALS, missing, policy

ROOT = Path(__file__).resolve().parent.parent
TURNS = [100, 200, 500, 1_000]
RUNS = 5
PACKAGES = (
    "holdfast", "langgraph", "langgraph-checkpoint", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres",
)  # fmt: skip


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    # Compiled modules are kept and nothing is traced, in this process and in all that it starts.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ |= {"LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false"}
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    began = perf_counter()
    with ExitStack() as stack:
        status = stack.enter_context(console.status(""))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir, prefix="savers-")))
        folder.chmod(0o711)  # PostgreSQL works below it as another user
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "pycache")
        absent = {"holdfast": why} if (why := missing()) else {}
        database = None if options.no_postgres else postgres(stack, folder, absent)
        if options.no_postgres:
            absent["postgres"] = "not asked for"
        server = plan.Server()
        stack.callback(server.close)
        settings = plan.Settings(
            folder=folder,
            seed=options.seed,
            turns=options.turns,
            runs=options.runs,
            fewer=options.fewer,
            say=lambda text: status.update(f"{perf_counter() - began:4.0f} s  {text}"),
            server=server,
            cluster=database,
            absent=absent,
            only_rivals=options.rivals,
        )
        settings.notes += [f"Not measured: {name} ({reason})." for name, reason in absent.items()]
        results = measure(settings, options)
    results["environment"] |= {"load_after": os.getloadavg(), "seconds": perf_counter() - began}
    results["targets"] = [goal.as_dict() for goal in report.goals(results)]
    # First of all: a terminal that went away must not cost the figures of a long run.
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    report.show(results, console)
    warn_when_busy(results["environment"], console)
    console.print(f"Figures: {options.json}")
    draw(results, options, console)
    if results["failures"]:
        sys.exit(f"{len(results['failures'])} runs failed")


def measure(settings: plan.Settings, options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"environment": environment(options, settings.folder), "policies": {}, "cases": {}}
    settings.say("writing the scripts")
    found = plan.scripts(settings)
    realistic = found["W1", "realistic"]
    for rival in settings.present(plan.COMPARED):
        if rival.saver not in results["policies"]:
            with settings.place(rival) as place:
                results["policies"][rival.saver] = policy(rival, place)
    if settings.cluster is not None:
        settings.empty_bytes = plan.measure_empty(settings)
    results["flushes"] = plan.flushes(settings, realistic)
    for (workload, material), script in found.items():
        if not options.only or workload in options.only:
            results["cases"][f"{workload} {material}"] = plan.compare(settings, workload, material, script)
    wanted = options.only or ("async", "W5")
    results["async"] = plan.in_background(settings, realistic) if "async" in wanted else {}
    results["pruned"] = plan.pruning(settings, realistic) if "W5" in wanted else {}
    results["empty_postgres_bytes"] = settings.empty_bytes
    results["notes"] = settings.notes
    results["failures"] = settings.failures
    return results


def postgres(stack: ExitStack, folder: Path, absent: dict[str, str]) -> Cluster | None:
    try:
        return stack.enter_context(cluster(folder))
    except Unavailable as error:
        absent["postgres"] = str(error)
        return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure HoldfastSaver beside LangGraph's own savers.")
    parser.add_argument("--quick", action="store_true", help="two runs of 50 and 100 turns: does it work?")
    parser.add_argument("--turns", type=int, nargs="+", metavar="N", help=f"lengths (default {TURNS})")
    parser.add_argument("--runs", type=int, metavar="N", help=f"fresh processes for each (default {RUNS})")
    parser.add_argument("--fewer", action="store_true", help="fewer of the long ones: a quarter of the time")
    parser.add_argument(
        "--only", nargs="+", choices=("W1", "W2", "W5", "async"), metavar="NAME", help="W1, W2, W5, async"
    )
    parser.add_argument("--rivals", nargs="+", choices=list(RIVALS), default=[], metavar="NAME", help=", ".join(RIVALS))
    parser.add_argument("--no-postgres", action="store_true", help="do not start a PostgreSQL")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work; its filesystem is measured")
    parser.add_argument("--realtime", action="store_true", help="run under SCHED_FIFO (needs root), see commit.py")
    parser.add_argument("--publish", action="store_true", help="also renew docs/images/langgraph.svg")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    options = parser.parse_args()
    if options.publish and (options.quick or options.turns or options.only or options.rivals):
        parser.error("--publish needs a whole run")
    options.turns = sorted(options.turns or ([50, 100] if options.quick else TURNS))
    options.runs = options.runs or (2 if options.quick else RUNS)
    if options.turns[0] < 25:
        parser.error("a thread of fewer than 25 turns has no history of 50 checkpoints")
    results = ROOT / "benchmarks" / "results"
    options.json = options.json or results / "langgraph_savers.json"
    options.plot = options.plot or results / "langgraph_savers.svg"
    return options


def environment(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        "turns": options.turns,
        "runs": options.runs,
        "fewer": options.fewer,
        "realtime": options.realtime,
        "durability": "sync: each step waits for its checkpoint",
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "filesystem": filesystem(folder),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "sqlite_of_holdfast": apsw.sqlite_lib_version(),
        "sqlite_of_rivals": sqlite3.sqlite_version,
        "load_before": os.getloadavg(),
    }


def draw(results: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    if "none" not in next(iter(results["cases"].get("W1 realistic", {"": {}}).values())):
        return
    import savers_plot

    savers_plot.draw(results, options.plot)
    console.print(f"Picture: {options.plot}")
    if options.publish and not results["failures"]:
        savers_plot.draw(results, ROOT / "docs" / "images" / "langgraph.svg")
        console.print("docs/images/langgraph.svg is new")


if __name__ == "__main__":
    main()
