"""The benchmark of steps: what a recorded call costs, and going on after a kill, beside DBOS on SQLite. See --help.

Prints tables and writes the figures as JSON. Each run is a process of its own. Both sides run as they come, with their
own flush policy, which is counted with strace and said; DBOS runs once more with its database in WAL mode, which it
does not set itself. Targets that are not reached are printed as such and change nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import targets as reached
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benchmarks" / "steps_child.py"
BYTES = 4_800
KILLED_AT = 0.99
TIMEOUT_S = 1_800
Figures = dict[str, Any]

# What is measured under which name: the rival, and the kind of its steps (DBOS has one kind).
ROWS = {
    "holdfast read": ("holdfast", "read"),
    "holdfast write": ("holdfast", "write"),
    "holdfast idempotent": ("holdfast", "idempotent"),
    "dbos": ("dbos", "step"),
    "dbos WAL": ("dbos WAL", "step"),
}
# The same, each in the transaction of a row of the user's, on PostgreSQL.
TRANSACTIONS = {"holdfast transaction": ("holdfast", "transaction"), "dbos transaction": ("dbos", "transaction")}
# Larger is better in all of them: how many times ours is as fast.
TARGETS = (
    ("read step, p50, against DBOS", "steps", "p50_us", "holdfast read", 4.0),
    ("write step, p50, against DBOS", "steps", "p50_us", "holdfast write", 2.0),
    ("resume to the first new step, against DBOS", "resume", "live_us", "holdfast read", 5.0),
    ("resume of writes to the first new step, against DBOS", "resume", "live_us", "holdfast write", 5.0),
    ("replay of one recorded step, against DBOS", "replay", "each_us", "holdfast read", 1.0),
)
REPLAY_LIMIT_S = 0.5
JOBS, WORKERS, JOB_S = 48, 16, 0.2
MAP_LIMIT, ITEM_LIMIT_US = 1.5, 500.0


def child(folder: Path, row: str, count: int, under: list[str] | None = None, **more: Any) -> Figures | None:
    """One process; its figures, or None when it killed itself, as it was told."""
    rival, kind = (ROWS | TRANSACTIONS)[row]
    job = {"rival": rival, "folder": str(folder), "count": count, "bytes": BYTES, "kind": kind, **more}
    began = perf_counter()
    ended = subprocess.run(
        [*(under or ()), sys.executable, str(CHILD), json.dumps(job)],
        capture_output=True, timeout=TIMEOUT_S, check=False, cwd=CHILD.parent,
    )  # fmt: skip
    if ended.returncode == -signal.SIGKILL and "kill_at" in more:
        return None
    if ended.returncode:
        raise RuntimeError(f"{row}: exit {ended.returncode}\n{ended.stderr.decode()[-2_000:]}")
    found: Figures = json.loads(ended.stdout)
    found["process_us"] = (perf_counter() - began) * 1e6
    return found


def steps(folder: Path, count: int, repeat: int, say: Callable[[str], None]) -> Figures:
    """Runs from the beginning to the end."""
    results: Figures = {}
    waits: dict[str, list[float]] = {row: [] for row in ROWS}
    totals: dict[str, list[float]] = {row: [] for row in ROWS}
    for turn in range(repeat):
        for row in ROWS:  # in turn, so that a slow minute of the machine hits all of them
            say(f"{count:,} steps, {row} ({turn + 1} of {repeat})")
            with fresh(folder) as place:
                found = child(place, row, count)
                if found is None:
                    raise RuntimeError(f"{row} was killed")
                waits[row] += found["waits_us"]
                totals[row].append(found["total_us"] - found["enter_us"])
                size = size_of(place)
            results[row] = {"bytes": size}
    for row in ROWS:
        ordered = sorted(waits[row])
        results[row] |= {
            "p50_us": statistics.median(ordered),
            "p99_us": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "total_us": statistics.median(totals[row]),
            "bytes_per_step": results[row]["bytes"] / count,
        }
    return results


def transactions(folder: Path, count: int, repeat: int, say: Callable[[str], None]) -> Figures:
    """Steps that write a row of the user's in the transaction of their record, on a server that flushes."""
    sys.path.insert(0, str(ROOT))
    from tests import postgres

    waits: dict[str, list[float]] = {row: [] for row in TRANSACTIONS}
    try:
        with postgres.server(fsync="on") as running:
            for turn in range(repeat):
                for row in TRANSACTIONS:
                    say(f"{count:,} transactions, {row} ({turn + 1} of {repeat})")
                    with running.database(f"bench_{turn}_{row.split()[0]}") as url:
                        _make_table(url)
                        found = child(folder, row, count, url=url)
                        waits[row] += found["waits_us"] if found is not None else []
    except postgres.NoServer as error:
        return {"not_run": str(error)}
    return {
        row: {"p50_us": statistics.median(found), "p99_us": sorted(found)[len(found) * 99 // 100]}
        for row, found in waits.items()
    }


def _make_table(url: str) -> None:
    import psycopg

    with psycopg.connect(url) as session:
        session.execute("CREATE TABLE paid (n int)")


def resume(folder: Path, count: int, repeat: int, say: Callable[[str], None]) -> Figures:
    """Killed near the end, then gone on with by a new process."""
    results: Figures = {}
    found: dict[str, list[Figures]] = {row: [] for row in ROWS}
    at = int(count * KILLED_AT)
    for turn in range(repeat):
        for row in ROWS:
            say(f"killed at step {at:,} of {count:,}, {row} ({turn + 1} of {repeat})")
            with fresh(folder) as place:
                if child(place, row, count, kill_at=at) is not None:
                    raise RuntimeError(f"{row} was not killed")
                resumed = child(place, row, count, resume=True)
                if resumed is not None:
                    found[row].append(resumed)
    for row, turns in found.items():
        figures = ("enter_us", "live_us", "total_us", "process_us", "made", "replay_us")
        results[row] = {name: statistics.median(turn[name] for turn in turns) for name in figures}
        results[row] |= {"steps": count, "killed_at": at}
    return results


def replay(folder: Path, count: int, say: Callable[[str], None]) -> Figures:
    """A long run that was killed as its last step began: the time for each recorded one."""
    results: Figures = {}
    for row in ROWS:
        if row == "holdfast idempotent":
            continue
        with fresh(folder) as place:
            say(f"{count:,} recorded steps, {row}: recording")
            child(place, row, count, kill_at=count - 1)
            say(f"{count:,} recorded steps, {row}: replaying")
            found = child(place, row, count, resume=True)
            if found is None:
                raise RuntimeError(f"{row} was killed")
        replayed = count - found["made"]
        results[row] = {
            "steps": replayed,
            "each_us": found["replay_us"] / max(1, replayed),
            "replay_us": found["replay_us"],
            "live_us": found["live_us"],
        }
    return results


def jobs(folder: Path, repeat: int, say: Callable[[str], None]) -> Figures:
    """Jobs of one tool each, through ``store.map`` and in a plain pool of as many threads; medians."""
    results: Figures = {}
    for row in ("holdfast read", "holdfast write"):
        found = []
        for number in range(repeat):
            say(f"{JOBS} jobs, {row}, {number + 1} of {repeat}")
            with fresh(folder) as place:
                one = child(place, row, 1_000, jobs=JOBS, workers=WORKERS, wait_s=JOB_S)
                if one is None:
                    raise RuntimeError(f"{row} was killed")
                found.append(one)
        results[row] = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return results


def flushes(folder: Path, say: Callable[[str], None]) -> Figures:
    """fsync and fdatasync for each step, counted by strace: those of 150 steps less those of 50."""
    if shutil.which("strace") is None:
        return {}
    results: Figures = {}
    for row in ROWS:
        say(f"counting flushes, {row}")
        counts = []
        for count in (50, 150):
            with fresh(folder) as place:
                log = place / "strace"
                traced = ["strace", "-f", "-qq", "-e", "trace=fsync,fdatasync,sync_file_range", "-o", str(log)]
                child(place, row, count, under=traced)
                counts.append(len(re.findall(r"(?:fsync|fdatasync|sync_file_range)\(", log.read_text())))
        results[row] = (counts[1] - counts[0]) / 100
    return results


class fresh:  # noqa: N801 - reads as a word
    """A new empty folder, removed afterwards."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(tempfile.mkdtemp(dir=folder))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.path)


def size_of(folder: Path) -> int:
    """What the files take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


# -- what is printed ----------------------------------------------------------------------------------------


def targets(results: Figures) -> list[Figures]:
    found = []
    for what, part, figure, row, least in TARGETS:
        if part in results:
            ratio = results[part]["dbos"][figure] / results[part][row][figure]
            found.append({"what": what, "found": f"{ratio:.1f} x", "least": f"{least:g} x", "reached": ratio >= least})
    if "replay" in results:
        row = results["replay"]["holdfast read"]
        took = row["live_us"] / 1e6  # opening the store included
        found.append(
            {
                "what": f"{row['steps']:,} recorded effects, opening to the first new step",
                "found": f"{took:.2f} s",
                "least": f"under {REPLAY_LIMIT_S} s",
                "reached": took < REPLAY_LIMIT_S,
            }
        )
    for row, one in results.get("jobs", {}).items():
        ratio = one["map_us"] / one["plain_us"]
        what = f"{JOBS} jobs of one {row.split()[1]} through store.map, against a plain pool"
        found.append(
            {"what": what, "found": f"{ratio:.2f} x", "least": f"at most {MAP_LIMIT} x", "reached": ratio <= MAP_LIMIT}
        )
    if "jobs" in results:
        item_us = results["jobs"]["holdfast read"]["item_us"]
        found.append(
            {
                "what": "an item of store.map with one read",
                "found": f"{item_us:.0f} µs",
                "least": f"under {ITEM_LIMIT_US:.0f} µs",
                "reached": item_us < ITEM_LIMIT_US,
            }
        )
    return found


def duration(us: float) -> str:
    return f"{us:,.0f} µs" if us < 10_000 else f"{us / 1e3:,.0f} ms" if us < 10_000_000 else f"{us / 1e6:,.1f} s"


def show(results: Figures, console: Console) -> None:
    about = results["environment"]
    console.print(
        f"{about['when'][:10]}, {about['cores']} cores, Python {about['python']}, DBOS {about['packages']['dbos']}."
        f" Load average {about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after.\n"
    )
    policy = results.get("flushes", {})
    if "steps" in results:
        count = results["environment"]["steps"]
        sheet = Table(title=f"{count:,} steps with results of {BYTES:,} bytes", title_justify="left")
        for column in ("", "p50", "p99", "all steps", "on disk", "a step", "flushes a step"):
            sheet.add_column(column, justify="left" if not column else "right")
        for row, found in results["steps"].items():
            times = (duration(found[name]) for name in ("p50_us", "p99_us", "total_us"))
            sizes = (f"{found['bytes'] / 1e6:.2f} MB", f"{found['bytes_per_step']:,.0f} B")
            sheet.add_row(row, *times, *sizes, f"{policy[row]:.2f}" if row in policy else "not counted")
        console.print(sheet)
    if "resume" in results:
        at = next(iter(results["resume"].values()))["killed_at"]
        sheet = Table(title=f"Going on after SIGKILL at step {at:,}, a new process", title_justify="left")
        for column in ("", "function entered", "first new step", "end", "with imports", "steps made again or anew"):
            sheet.add_column(column, justify="left" if not column else "right")
        for row, found in results["resume"].items():
            times = (duration(found[name]) for name in ("enter_us", "live_us", "total_us", "process_us"))
            sheet.add_row(row, *times, f"{found['made']:.0f}")
        console.print(sheet)
    if "replay" in results:
        sheet = Table(title="Replaying a long run", title_justify="left")
        for column in ("", "recorded steps", "each", "all of them", "from opening to the first new step"):
            sheet.add_column(column, justify="left" if not column else "right")
        for row, found in results["replay"].items():
            times = (f"{found['each_us']:.1f} µs", duration(found["replay_us"]), duration(found["live_us"]))
            sheet.add_row(row, f"{found['steps']:,}", *times)
        console.print(sheet)
    if "transactions" in results:
        sheet = Table(title="Steps in the transaction of a row of one's own, on PostgreSQL", title_justify="left")
        for column in ("", "p50", "p99"):
            sheet.add_column(column, justify="left" if not column else "right")
        for row, found in results["transactions"].items():
            times = [found] if isinstance(found, str) else [duration(found[name]) for name in ("p50_us", "p99_us")]
            sheet.add_row(row, *times)
        console.print(sheet)
    if "jobs" in results:
        sheet = Table(title=f"{JOBS} jobs of {JOB_S} s with one call each, {WORKERS} workers", title_justify="left")
        for column in ("", "plain pool", "store.map", "an item of 1,000"):
            sheet.add_column(column, justify="left" if not column else "right")
        for row, found in results["jobs"].items():
            sheet.add_row(row, *(duration(found[name]) for name in ("plain_us", "map_us", "item_us")))
        console.print(sheet)
    reached.show(results["targets"], console)
    console.print(
        "Flushes: holdfast flushes an intent before a write or an idempotent call and its outcome after it, while"
        " reads share a flush that comes within 10 ms or with the next write. DBOS commits one transaction for each"
        " step, with SQLite's own defaults (rollback journal, synchronous=FULL); its recovery looks for work about"
        " once a second."
    )


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    results: Figures = {
        "environment": conditions(
            packages={name: version(name) for name in ("holdfast", "dbos", "apsw")}, steps=options.steps
        )
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="steps-") as name, console.status("") as status:
        folder = Path(name)

        def say(text: str) -> None:
            status.update(f"{perf_counter() - began:4.0f} s  {text}")

        if "flushes" in options.only:
            results["flushes"] = flushes(folder, say)
        if "steps" in options.only:
            results["steps"] = steps(folder, options.steps, options.repeat, say)
        if "transactions" in options.only:
            results["transactions"] = transactions(folder, options.steps, options.repeat, say)
        if "resume" in options.only:
            results["resume"] = resume(folder, options.steps, options.repeat, say)
        if "replay" in options.only:
            results["replay"] = replay(folder, options.recorded, say)
        if "jobs" in options.only:
            results["jobs"] = jobs(folder, options.repeat, say)
    results["environment"]["seconds"] = perf_counter() - began
    results["targets"] = targets(results)
    keep(results, options.json, console)
    show(results, console)


PARTS = ("flushes", "steps", "transactions", "resume", "replay", "jobs")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure recorded steps beside DBOS on SQLite.")
    parser.add_argument("--quick", action="store_true", help="few steps, once: does it work?")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--steps", type=int, help="steps of a run (1,000)")
    parser.add_argument("--recorded", type=int, help="steps of the long run that is replayed (10,000)")
    parser.add_argument("--repeat", type=int, help="times that each run is made (5)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work; its filesystem is measured")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "steps.json")
    options = parser.parse_args()
    for name, whole, quick in (("steps", 1_000, 100), ("recorded", 10_000, 500), ("repeat", 5, 1)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    return options


if __name__ == "__main__":
    sys.exit(main())
