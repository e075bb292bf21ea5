"""The benchmark of kills: what is lost, done twice or in doubt when processes die while they act on the outside world.

Three bookings one after another, killed with SIGKILL at moments that are the same for everybody and at random ones, and
gone on with until they are finished: by Holdfast (tools with a key, with a probe, with neither), by a DBOS workflow on
SQLite and by a LangGraph graph (``durability="sync"``, SqliteSaver). The world is an HTTP server with its own database,
which keeps a table of what really happened. Prints a table and writes JSON. See --help.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kills_child import BOOKINGS, MOMENTS, ROWS
from rich.console import Console
from rich.table import Table

from tests.run.world import World

ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benchmarks" / "kills_child.py"
SEED = 4_004
OUTSIDE = 0.2
"""Of the kills come from outside, at any moment, instead of at one of the five."""

AGAIN = 0.5
"""Of the processes that go on after a kill are killed, too."""

LIVES_MAX = 10
WAIT_S = 180
Figures = dict[str, Any]


class Template:
    """The warm process of one row."""

    def __init__(self, row: str, folder: Path, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), row, str(folder), str(port)],
            cwd=CHILD.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line.strip())
        self.lines.put("end-of-file ")

    def live(self, after_s: float | None = None, **job: Any) -> dict[str, str]:
        """One process; what it said, by word. ``gone`` is its exit status."""
        stdin = self.process.stdin
        if stdin is None:
            raise RuntimeError("no pipe")
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        said: dict[str, str] = {}
        while "pid" not in said:
            said |= self._next()
        if after_s is not None:
            time.sleep(after_s)
            with suppress(ProcessLookupError):
                os.kill(int(said["pid"]), signal.SIGKILL)
        while "gone" not in said:
            said |= self._next()
        return said

    def _next(self) -> dict[str, str]:
        word, _, rest = self.lines.get(timeout=WAIT_S).partition(" ")
        if word == "end-of-file":
            raise RuntimeError("the template died")
        return {word: rest}

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=WAIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


def campaign(row: str, folder: Path, world: World, kills: int, console: Any) -> Figures:
    """Trips until there were that many kills."""
    chance = random.Random(f"{SEED}/{row}")
    template = Template(row, folder, world.port)
    count: Counter[str] = Counter()
    where: Counter[str] = Counter()
    lives_s: list[float] = []
    try:
        number = 0
        while count["kills"] < kills:
            name = f"{row.replace(', ', '-').replace(' ', '-')}-{number}"
            told: dict[str, str] = {}
            for life in range(LIVES_MAX + 1):
                console.update(f"{row}: {count['kills']} of {kills} kills")
                plan: dict[str, Any] = {}
                if life < LIVES_MAX and (number or life) and (not life or chance.random() < AGAIN):
                    if chance.random() < OUTSIDE:
                        plan["after_s"] = chance.uniform(0, max(lives_s))
                    else:
                        all_moments = len(BOOKINGS) * len(MOMENTS)
                        plan["at"] = number % all_moments + 1 if not life else chance.randrange(1, all_moments + 1)
                began = time.perf_counter()
                said = template.live(name=name, told=told, **plan)
                told = {}
                if int(said["gone"]) == -signal.SIGKILL:
                    count["kills"] += 1
                    where[said.get("at", "any moment")] += 1
                elif "doubt" in said:
                    refs = json.loads(said["doubt"])
                    count["in doubt"] += len(refs)
                    told = {ref: "done" if world.done(ref) else "not-done" for ref in refs}  # a person looks
                elif "end" in said:
                    lives_s.append(time.perf_counter() - began)
                    break
                else:
                    raise RuntimeError(f"{row}: {said}")
            else:
                template.live(name=name, told=told)
            for what in BOOKINGS:
                done = world.done(f"{name}/{what}")
                count["bookings"] += 1
                count["lost"] += done == 0
                count["doubled"] += max(0, done - 1)
            number += 1
    finally:
        template.close()
    return {"trips": number, **{name: count[name] for name in COUNTS}, "where": dict(where)}


COUNTS = ("kills", "bookings", "lost", "doubled", "in doubt")


def show(results: Figures, console: Console) -> None:
    table = Table(title="Bookings in the outside world, killed with SIGKILL", title_justify="left")
    for column in ("", "trips", *COUNTS):
        table.add_column(column, justify="left" if not column else "right")
    for row, found in results["rows"].items():
        bad = found["lost"] or found["doubled"]
        style = "red" if bad else "bold green" if row.startswith("holdfast") else ""
        table.add_row(row, *(f"{found[name]:,}" for name in ("trips", *COUNTS)), style=style)
    console.print(table)
    console.print(
        "keyed: the world honours a key; Holdfast gives each call one, in DBOS and LangGraph it was made by hand from"
        " the workflow's or thread's id and the step. probed: the world can be asked. neither: Holdfast stops and"
        " reports the call in doubt, a person looks and decides, and it goes on; the others repeat the step."
    )


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results: Figures = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "kills": options.kills,
        "packages": {name: version(name) for name in ("holdfast", "dbos", "langgraph", "langgraph-checkpoint-sqlite")},
        "rows": {},
    }
    with (
        tempfile.TemporaryDirectory(dir=options.dir, prefix="kills-") as name,
        World(Path(name)) as world,
        console.status("") as status,
    ):
        for row in options.only or ROWS:
            folder = Path(name) / row.replace(" ", "-").replace(",", "")
            folder.mkdir()
            results["rows"][row] = campaign(row, folder, world, options.kills, status)
    results["seconds"] = time.perf_counter() - began
    show(results, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Figures: {options.json} ({results['seconds']:.0f} s)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill Holdfast, DBOS and LangGraph while they act outside.")
    parser.add_argument("--kills", type=int, default=200, help="for each row (200)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of: {'; '.join(ROWS)}")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "kills.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
