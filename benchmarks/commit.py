"""The benchmark: what a checkpoint costs, beside its rivals in the same run. `make bench`, or see --help.

Prints tables, writes the figures as JSON and draws the picture that the README shows. Targets that are not reached are
printed as such and change nothing else: the exit code says only whether the run worked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import apsw
import report
from rich.console import Console
from scenarios import SCENARIOS, Settings, policy_of_saver

ROOT = Path(__file__).resolve().parent.parent
SEED = 20_260


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    os.environ.setdefault("LANGCHAIN_TRACING_V2", "false")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-") as name, console.status("") as status:

        def say(text: str) -> None:
            status.update(f"{perf_counter() - began:4.0f} s  {text}")

        settings = Settings(Path(name), options.seed, options.quick, say)
        policy = policy_of_saver(settings)
        results: dict[str, Any] = {"environment": environment(options, settings.folder, policy)}
        for scenario in options.only or SCENARIOS:
            results[scenario] = SCENARIOS[scenario](settings, policy)
    results["environment"]["load_after"] = os.getloadavg()
    results["environment"]["seconds"] = perf_counter() - began
    results["targets"] = [target.as_dict() for target in report.targets(results)]
    describe(results["environment"], console)
    report.show(results, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Figures: {options.json}")
    if "append" in results and "disk" in results:
        import plot

        plot.draw(results, options.plot)
        console.print(f"Picture: {options.plot}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Holdfast beside its rivals.")
    parser.add_argument("--quick", action="store_true", help="few repetitions, up to 10,000 messages: does it work?")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), metavar="NAME", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work; its filesystem is measured")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    options = parser.parse_args()
    kept = not options.quick and not options.only  # only a whole run may replace the picture that the README shows
    results = ROOT / "benchmarks" / "results"
    options.json = options.json or results / ("commit.json" if kept else "part.json")
    options.plot = options.plot or (ROOT / "docs" / "images" / "commit.svg" if kept else results / "part.svg")
    return options


def environment(options: argparse.Namespace, folder: Path, policy: str) -> dict[str, Any]:
    packages = ("holdfast", "apsw", "msgspec", "ormsgpack", "langgraph-checkpoint", "langgraph-checkpoint-sqlite")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": options.seed,
        "quick": options.quick,
        "processor": processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "filesystem": filesystem(folder),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "sqlite_of_holdfast": apsw.sqlite_lib_version(),
        "sqlite_of_rivals": sqlite3.sqlite_version,
        "langgraph_policy": policy,
        "load_before": os.getloadavg(),
    }


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def filesystem(folder: Path) -> str:
    """The type of the filesystem under ``folder``: the longest mount point above it decides."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if folder.is_relative_to(point)]
    return max(above)[1]


def describe(found: dict[str, Any], console: Console) -> None:
    load = f"{found['load_before'][0]:.2f} before, {found['load_after'][0]:.2f} after"
    console.print(
        f"{found['processor']}, {found['cores']} cores, Linux {found['kernel']}, {found['filesystem']},"
        f" Python {found['python']}; load {load}; {found['seconds']:.0f} s; seed {found['seed']}\n"
        f"SqliteSaver's own flush policy: {found['langgraph_policy']}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
