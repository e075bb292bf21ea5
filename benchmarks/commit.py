"""The benchmark: what a checkpoint costs, beside its rivals in the same run. `make bench`, or see --help.

Prints tables, writes the figures as JSON and draws the picture; with --publish also those that README and docs show.
Targets that are not reached are printed as such and change nothing else: the exit code says whether the run worked.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import apsw
import report
from conditions import conditions, filesystem, keep
from rich.console import Console
from scenarios import SCENARIOS, Settings, policy_of_saver

ROOT = Path(__file__).resolve().parent.parent
SEED = 20_260
REALTIME_PRIORITY = 5


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
    began = perf_counter()
    os.environ.setdefault("LANGCHAIN_TRACING_V2", "false")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-") as name, console.status("") as status:

        def say(text: str) -> None:
            status.update(f"{perf_counter() - began:4.0f} s  {text}")

        settings = Settings(Path(name), options.seed, options.quick, say, options.against)
        policy = policy_of_saver(settings)
        results: dict[str, Any] = {"environment": environment(options, settings.folder, policy)}
        for scenario in options.only or SCENARIOS:
            results[scenario] = SCENARIOS[scenario](settings, policy)
    results["environment"]["seconds"] = perf_counter() - began
    results["targets"] = [target.as_dict() for target in report.targets(results)]
    keep(results, options.json, console)
    report.show(results, console)
    if "append" in results and "disk" in results:
        import plot

        plot.draw(results, options.plot)
        console.print(f"Picture: {options.plot}")
        if options.publish:
            plot.draw(results, ROOT / "docs" / "images" / "commit.svg")
            report.put_into(ROOT / "docs" / "benchmarks.md", results)
            console.print("docs/images/commit.svg and the figures in docs/benchmarks.md are new")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Holdfast beside its rivals.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, up to 10,000 messages: does it work?")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="NAME", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of another Holdfast, for the threads")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work; its filesystem is measured")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run under SCHED_FIFO (needs root): on a busy machine a process that waited for the disk goes on at once",
    )
    parser.add_argument("--publish", action="store_true", help="also renew the picture and the figures under docs/")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    options = parser.parse_args()
    if options.publish and (options.quick or options.only):
        parser.error("--publish needs a whole run")
    results = ROOT / "benchmarks" / "results"
    options.json = options.json or results / "commit.json"
    options.plot = options.plot or results / "commit.svg"
    return options


def environment(options: argparse.Namespace, folder: Path, policy: str) -> dict[str, Any]:
    packages = ("holdfast", "apsw", "msgspec", "ormsgpack", "langgraph-checkpoint", "langgraph-checkpoint-sqlite")
    return conditions(
        seed=options.seed,
        quick=options.quick,
        realtime=options.realtime,
        filesystem=filesystem(folder),
        packages={name: version(name) for name in packages},
        sqlite_of_holdfast=apsw.sqlite_lib_version(),
        sqlite_of_rivals=sqlite3.sqlite_version,
        langgraph_policy=policy,
    )


if __name__ == "__main__":
    sys.exit(main())
