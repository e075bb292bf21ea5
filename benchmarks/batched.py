"""Group commit: checkpoints per second of 1, 8 and 64 threads, batched and at once, beside plain SQLite.

Each thread has an agent of its own and appends one message per checkpoint. Plain SQLite (WAL, synchronous=FULL) inserts
the same bytes as one row per transaction: with a connection per thread, and with one connection that all share. It
keeps no history, no digests and no branches; it is the floor for one flush per change. `make bench`, or see --help.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import holdfast

sys.path.insert(0, str(Path(__file__).resolve().parent))
from commit import ROOT
from conditions import conditions, filesystem, keep

THREADS = (1, 8, 64)
MESSAGE = {"role": "user", "content": "x" * 1_000}
SECONDS = 3.0
BEGIN, END = "<!-- batched: begin -->", "<!-- batched: end -->"

Work = Callable[[int], Callable[[], None]]
"""Given a thread's number: what it repeats."""


def measure(threads: int, seconds: float, work: Work, after: Callable[[], None]) -> dict[str, float]:
    """How often a second all threads together got through, with everything durable in the end."""
    counts = [0] * threads
    ready = threading.Barrier(threads + 1)
    stop = threading.Event()
    slowest = [0.0] * threads

    def repeat(number: int) -> None:
        once = work(number)
        once()
        ready.wait()
        while not stop.is_set():
            began = time.perf_counter()
            once()
            slowest[number] = max(slowest[number], time.perf_counter() - began)
            counts[number] += 1

    running = [threading.Thread(target=repeat, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    ready.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in running:
        thread.join()
    after()
    took = time.perf_counter() - began
    return {"per_second": sum(counts) / took, "slowest_ms": max(slowest) * 1e3, "checkpoints": sum(counts)}


def of_holdfast(folder: Path, threads: int, seconds: float, durability: str) -> dict[str, float]:
    with holdfast.open(folder / "store", durability=durability) as store:

        def work(number: int) -> Callable[[], None]:
            agent = store.agent(f"agent-{number}")
            agent.state["messages"] = []

            def once() -> None:
                agent.state["messages"].append(MESSAGE)
                agent.checkpoint()

            return once

        return measure(threads, seconds, work, store.flush)


def of_sqlite(folder: Path, threads: int, seconds: float, *, shared: bool) -> dict[str, float]:
    path = folder / "rows.db"
    body = json.dumps(MESSAGE).encode()

    def connect() -> sqlite3.Connection:
        made = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
        made.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;")
        return made

    first = connect()
    first.execute("CREATE TABLE message (agent INTEGER, body BLOB)")
    lock = threading.Lock()

    def work(number: int) -> Callable[[], None]:
        connection = first if shared else connect()

        def once() -> None:
            if shared:
                with lock:
                    connection.execute("INSERT INTO message VALUES (?, ?)", (number, body))
            else:
                connection.execute("INSERT INTO message VALUES (?, ?)", (number, body))

        return once

    return measure(threads, seconds, work, lambda: None)


RIVALS: dict[str, Callable[[Path, int, float], dict[str, float]]] = {
    "Holdfast, batched": lambda *args: of_holdfast(*args, "batched"),
    "Holdfast, commit": lambda *args: of_holdfast(*args, "commit"),
    "SQLite, one connection": lambda *args: of_sqlite(*args, shared=True),
    "SQLite, one per thread": lambda *args: of_sqlite(*args, shared=False),
}


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    about = conditions(
        filesystem=filesystem(options.dir.resolve()),
        sqlite_of_rivals=sqlite3.sqlite_version,
        seconds=options.seconds,
    )
    figures: dict[str, Any] = {}
    with console.status("") as status:
        for threads in THREADS:
            for name, run in RIVALS.items():
                status.update(f"{name}, {threads} threads")
                with tempfile.TemporaryDirectory(dir=options.dir, prefix="batched-") as folder:
                    figures.setdefault(name, {})[str(threads)] = run(Path(folder), threads, options.seconds)
    results = {"environment": about, "figures": figures}
    keep(results, options.json, console)
    show(results, console)
    draw(results, options.json.with_suffix(".svg"))
    if options.publish:
        draw(results, ROOT / "docs" / "images" / "batched.svg")
        publish(results, ROOT / "docs" / "benchmarks.md")
        console.print("docs/images/batched.svg and the figures in docs/benchmarks.md are new")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure batched checkpoints beside plain SQLite.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each figure is measured")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work; its filesystem is measured")
    parser.add_argument("--publish", action="store_true", help="also renew the picture and the figures under docs/")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "batched.json")
    return parser.parse_args()


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="Checkpoints per second, all threads together (slowest call)", title_justify="left")
    table.add_column("")
    for threads in THREADS:
        table.add_column(f"{threads} thread{'s' if threads > 1 else ''}", justify="right")
    for name, by_threads in results["figures"].items():
        table.add_row(name, *(_cell(by_threads[str(threads)]) for threads in THREADS))
    console.print(table)


def _cell(figure: dict[str, float]) -> str:
    return f"{figure['per_second']:,.0f} ({figure['slowest_ms']:,.0f} ms)"


def publish(results: dict[str, Any], page: Path) -> None:
    lines = [
        "| checkpoints per second (slowest call) | "
        + " | ".join(f"{threads} thread{'s' * (threads > 1)}" for threads in THREADS)
        + " |",
        "|---|" + "---:|" * len(THREADS),
    ]
    for name, by_threads in results["figures"].items():
        lines.append(f"| {name} | " + " | ".join(_cell(by_threads[str(threads)]) for threads in THREADS) + " |")
    found = results["environment"]
    lines += [
        "",
        f"{found['cores']} cores, {found['filesystem']}, SQLite {found['sqlite_of_rivals']},"
        f" {found['seconds']:g} s for each figure, a load of {found['load_before'][0]:.1f} when it was measured"
        + (
            ": **busy**, so that all of them wait for the processor."
            if found["load_before"][0] > found["cores"]
            else "."
        ),
    ]
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.ticker import FuncFormatter
    from picture import grid, line, panels, title

    looks = {
        "Holdfast, batched": ("#0072b2", "o"), "Holdfast, commit": ("#56b4e9", "s"),
        "SQLite, one connection": ("#e69f00", "^"), "SQLite, one per thread": ("#d55e00", "D"),
    }  # fmt: skip
    with panels(path, 3.8) as (figure, left, right):
        for axes, key, name in (
            (left, "per_second", "Checkpoints per second"),
            (right, "slowest_ms", "The slowest call"),
        ):
            for rival, (colour, marker) in looks.items():
                values = [results["figures"][rival][str(threads)][key] for threads in THREADS]
                line(axes, THREADS, values, rival, colour, marker, ours=rival.startswith("Holdfast, batched"))
            title(axes, name)
            axes.set(xscale="log", yscale="log", xlabel="threads, an agent each")
            axes.set_xticks(THREADS, [str(threads) for threads in THREADS])
            axes.minorticks_off()
            grid(axes)
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ms"))
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        left.legend(frameon=False, fontsize=8)
        figure.tight_layout(w_pad=2.5)


if __name__ == "__main__":
    main()
