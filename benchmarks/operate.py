"""Operating many runs: coming back after a kill, starting, and finding what is due, beside DBOS on SQLite. See --help.

Recovery: a process begins many runs of some steps and is killed inside the same step of each; another one finds and
finishes them, and every result is checked. Both sides have SQLite, as they come, and each step is durable before the
next one begins: one commit for DBOS, two for a write of ours. DBOS runs once more with its database in WAL mode, which
it does not set itself. Start: runs are handed over to a process that waits for work. Line: an agent's
1,000th run beside the first one of a new agent. Due: a store with as many agents as runs, of which most wait for a
signal or a time that has not come, ten for a signal that has. Table: short runs, in turns with the table of open runs
and without it.
Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import targets as reached
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.run import line
from holdfast.run.listing import runs_of

ROOT = Path(__file__).resolve().parent.parent
DUE = 10
LIMIT_S = 0.020
"""``due()`` over 10,000 runs, of which ten are due."""
PAGE = 50
PAGE_LIMIT_S = 0.100
"""The first page of a list over 10,000 agents."""
BLOCK = 20
CHILD = ROOT / "benchmarks" / "operate_child.py"
STEPS, KILLED_AT, BYTES = 6, 3, 500
RECOVERY_LEAST, RECOVERY_GOAL = 2.0, 4.0
START_LIMIT_S, APART_S = 0.050, 1.0
LINE_LIMIT = 1.5
TIMEOUT_S = 1_800
# What is measured under which name: the rival, and the kind of its steps (DBOS has one kind).
ROWS = {
    "holdfast": ("holdfast", "write"),
    "holdfast idempotent": ("holdfast", "idempotent"),
    "dbos": ("dbos", "step"),
    "dbos WAL": ("dbos WAL", "step"),
}
PARTS = ("recovery", "start", "line", "due", "table")

PAGES: dict[str, Any] = {
    "agents, the first 50": lambda store: store.agents(limit=PAGE),
    "agents like *9, the first 50 by name": lambda store: store.agents("*9", limit=PAGE, sort="name"),
    "runs, the first 50": lambda store: store.runs(limit=PAGE),
    "runs, what needs somebody first": lambda store: store.runs(limit=PAGE, sort="urgent"),
    "runs that wait, the first 50": lambda store: store.runs(status="waiting", limit=PAGE),
    "effects, the first 50": lambda store: store.effects(limit=PAGE),
    "effects in doubt, all": lambda store: store.effects(in_doubt=True),
    "open runs, counted": lambda store: store.open_runs(),
}
WHOLE: dict[str, Any] = {
    "all agents": lambda store: store.agents(),
    "all runs": lambda store: store.runs(),
    "all effects": lambda store: store.effects(),
}


@holdfast.tool(effect="read")
def look(number: int) -> int:
    return number


@holdfast.durable
def patient(agent: holdfast.Agent, number: int) -> None:
    if number % 2:
        agent.sleep(365 * 86_400)
    look(number)
    agent.wait_for("go")


@holdfast.durable
def short(agent: holdfast.Agent, number: int) -> int:
    return len(agent.name) + number


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "environment": conditions(
            runs=options.runs,
            due=DUE,
            packages={name: version(name) for name in ("holdfast", "dbos", "apsw")},
            killed=options.killed,
            concurrency=options.concurrency,
            line=options.line,
        )
    }
    rows = [row for row in ROWS if options.full or row != "holdfast idempotent"]
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="operate-") as name, console.status("") as status:
        folder, say = Path(name), status.update
        if "recovery" in options.only:
            results["recovery"] = recovery(folder, rows, options, say)
        if "start" in options.only:
            results["start"] = start(folder, rows, options.rounds * 4, say)
        if "line" in options.only:
            results["line"] = line_length(folder / "line", options.line, options.rounds * 4, say)
        if "due" in options.only:
            results["due"] = find(folder / "many", options.runs, options.rounds, say)
            results["pages"] = pages(folder / "many", options.rounds, say)
        if "table" in options.only:
            results["run"] = cost(folder / "one", options.rounds, say)
    results["targets"] = targets(results)
    keep(results, options.json, console)
    show(results, console)


@contextmanager
def child(folder: Path, row: str, do: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does its part; it is killed where it has not ended by itself."""
    rival, kind = ROWS[row]
    job = {"rival": rival, "kind": kind, "folder": str(folder), "do": do, "steps": STEPS, "bytes": BYTES, **more}
    with subprocess.Popen(
        [sys.executable, str(CHILD), json.dumps(job)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=CHILD.parent,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def await_ready(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is None or process.stdout.readline() != b"ready\n":
        raise RuntimeError(process.communicate()[1].decode()[-2_000:])


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, said = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"exit {process.returncode}\n{said.decode()[-2_000:]}")
    found: dict[str, Any] = json.loads(out)
    return found


def recovery(folder: Path, rows: list[str], options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Killed in the middle of each run, then finished by a new process; the clock starts after its imports."""
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in rows}
    for turn in range(options.repeat):
        for row in rows:  # in turn, so that a slow minute of the machine hits all of them
            place = folder / f"recovery-{row.replace(' ', '-')}-{turn}"
            place.mkdir()
            say(f"beginning {options.killed:,} runs, {row} ({turn + 1} of {options.repeat})")
            with child(place, row, "begin", count=options.killed, at=KILLED_AT) as process:
                await_ready(process)
            say(f"recovering {options.killed:,} runs, {row} ({turn + 1} of {options.repeat})")
            with child(place, row, "recover", count=options.killed, concurrency=options.concurrency) as process:
                one = answer(process)
            if one["made"] != options.killed * (STEPS - KILLED_AT):
                raise SystemExit(f"{row} made {one['made']:,} steps, not {options.killed * (STEPS - KILLED_AT):,}")
            found[row].append(one)
    return {
        row: {key: [one[key] for one in some] for key in ("wall_s", "cpu_s", "made")} for row, some in found.items()
    }


def start(folder: Path, rows: list[str], count: int, say: Any) -> dict[str, list[float]]:
    """From handing a run over, in one process, to the first line of its function, in another; at uneven times."""
    found = {}
    for row in rows:
        if row == "holdfast idempotent":
            continue
        place = folder / f"start-{row.replace(' ', '-')}"
        place.mkdir()
        say(f"handing over {count} runs, {row}")
        with child(place, row, "serve") as server:
            await_ready(server)
            with child(place, row, "submit", count=count, apart_s=APART_S) as process:
                found[row] = answer(process)["start_s"]
    return found


entered = [0, 0]


@holdfast.durable
def entering(agent: holdfast.Agent, number: int) -> int:  # noqa: ARG001 - as all have it
    entered[:] = time.perf_counter_ns(), time.thread_time_ns()
    return number


def line_length(path: Path, before: int, count: int, say: Any) -> dict[str, list[float]]:
    """Seconds from ``agent.run`` to the function: first runs of new agents, in turns with one that has run often."""
    found: dict[str, list[float]] = {"first": [], "later": [], "first cpu": [], "later cpu": []}

    def begin(agent: holdfast.Agent, number: int, how: str) -> None:
        began, worked = time.perf_counter_ns(), time.thread_time_ns()
        agent.run(entering, number)
        found[how].append((entered[0] - began) / 1e9)
        found[f"{how} cpu"].append((entered[1] - worked) / 1e9)

    with holdfast.open(path) as store:
        often = store.agent("often")
        for number in range(before - 1):
            if number % 100 == 0:
                say(f"{number:,} runs of one agent")
            often.run(entering, number)
        for number in range(count):
            say("the first run of a new agent, and the next of the old one")
            with_first = store.agent(f"new-{number}")
            begin(with_first, number, "first")
            with_first.close()
            begin(often, before + number, "later")
    return found


def find(path: Path, runs: int, rounds: int, say: Any) -> dict[str, Any]:
    with holdfast.open(path, durability="batched") as store:
        for number in range(runs):
            if number % 100 == 0:
                say(f"putting off {number:,} of {runs:,} runs")
            agent = store.agent(f"agent-{number}")
            try:
                agent.run(patient.options(wait=False, id="r"), number)
            except holdfast.Waiting:
                agent.close()
        for number in range(0, 2 * DUE, 2):
            store.signal(f"agent-{number}", "go", run="r")
    found: dict[str, list[float]] = {"first": [], "again": []}
    for _ in range(rounds):
        say("asking what is due")
        with holdfast.open(path) as store:
            for times in found.values():
                began = time.perf_counter()
                due = store.due()
                times.append(time.perf_counter() - began)
                if len(due) != DUE:
                    raise SystemExit(f"{len(due)} runs are due, not {DUE}")
    say("reading every line")
    with holdfast.open(path) as store:
        began = time.perf_counter()
        every = [info for view in store._views() for info in runs_of(view, only_due=True)]  # noqa: SLF001 - as due() did
        lines_s = time.perf_counter() - began
    if len(every) != DUE:
        raise SystemExit(f"the lines say that {len(every)} runs are due, not {DUE}")
    return {"first_s": found["first"], "again_s": found["again"], "every_line_s": lines_s}


def pages(path: Path, rounds: int, say: Any) -> dict[str, list[float]]:
    """Seconds for lists, each the first thing that is asked of a store that was just opened."""
    found: dict[str, list[float]] = {}
    for what, ask in (*PAGES.items(), *WHOLE.items()):
        for _ in range(rounds if what in PAGES else 1):
            say(f"listing {what}")
            with holdfast.open(path, readonly=True) as store:
                began = time.perf_counter()
                ask(store)
                found.setdefault(what, []).append(time.perf_counter() - began)
    return found


def cost(path: Path, rounds: int, say: Any) -> dict[str, list[float]]:
    """Seconds for a run, begun and finished, in turns; each time the agent is new, so that its line is short.

    ``cpu``: what the process itself works, without waiting for the disk.
    """
    found: dict[str, list[float]] = {"with": [], "without": [], "with cpu": [], "without cpu": []}
    follow = line.follow
    with holdfast.open(path) as store:
        for number in range(2 * rounds * 4):
            how = "without" if number % 2 else "with"
            say(f"short runs {how} the table")
            agent = store.agent(f"{how}-{number}")
            try:
                if how == "without":
                    line.follow = lambda _record: None
                agent.run(short, -1)
                began, worked = time.perf_counter(), time.process_time()
                for one in range(BLOCK):
                    agent.run(short, one)
                found[how].append((time.perf_counter() - began) / BLOCK)
                found[f"{how} cpu"].append((time.process_time() - worked) / BLOCK)
            finally:
                line.follow = follow
            agent.close()
    return found


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    found = []

    def add(what: str, has: str, asked: str, *, well: bool) -> None:
        found.append({"what": what, "found": has, "least": asked, "reached": well})

    if "recovery" in results:
        took = {row: median(one["wall_s"]) for row, one in results["recovery"].items()}
        for rival, asked in (("dbos", RECOVERY_LEAST), ("dbos", RECOVERY_GOAL), ("dbos WAL", RECOVERY_LEAST)):
            ratio = took[rival] / took["holdfast"]
            what = f"recovery of {results['environment']['killed']:,} killed runs, against {rival}"
            add(what, f"{ratio:.1f} x", f"{asked:g} x", well=ratio >= asked)
    if "start" in results:
        p50_s = median(results["start"]["holdfast"])
        limit = f"under {START_LIMIT_S * 1e3:g} ms"
        add("handed over to started, p50", f"{p50_s * 1e3:.1f} ms", limit, well=p50_s < START_LIMIT_S)
    if "line" in results:
        for how in ("", " cpu"):
            ratio = median(results["line"][f"later{how}"]) / median(results["line"][f"first{how}"])
            what = f"start of run {results['environment']['line']:,} of an agent, of a first one's"
            what += ", processor time" if how else ""
            add(what, f"{ratio:.2f} x", f"at most {LINE_LIMIT:g} x", well=ratio <= LINE_LIMIT)
    if "due" in results:
        first_s = median(results["due"]["first_s"])
        what = f"due() over {results['environment']['runs']:,} runs"
        add(what, f"{first_s * 1e3:.1f} ms", f"under {LIMIT_S * 1e3:g} ms", well=first_s < LIMIT_S)
        for page in (name for name in PAGES if name.endswith("50")):
            page_s = median(results["pages"][page])
            add(page, f"{page_s * 1e3:.1f} ms", f"under {PAGE_LIMIT_S * 1e3:g} ms", well=page_s < PAGE_LIMIT_S)
    return found


def show(results: dict[str, Any], console: Console) -> None:
    about = results["environment"]
    console.print(
        f"{about['when'][:10]}, {about['cores']} cores, Python {about['python']}, DBOS {about['packages']['dbos']}."
        f" Load average {about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after.\n"
    )
    if "recovery" in results:
        title = f"{about['killed']:,} runs of {STEPS} steps, killed inside step {KILLED_AT + 1}, found and finished"
        sheet = Table("", "median", "least", "worst", "processor time", "a run", title=title, title_justify="left")
        for row, one in results["recovery"].items():
            wall, cpu = one["wall_s"], median(one["cpu_s"])
            times = (f"{took:,.1f} s" for took in (median(wall), min(wall), max(wall), cpu))
            sheet.add_row(row, *times, f"{median(wall) / about['killed'] * 1e3:.1f} ms")
        console.print(sheet)
    table = Table("what", "median", "least", "worst")
    lines: list[tuple[str, list[float]]] = []
    lines += [(f"handed over to started, {row}", some) for row, some in results.get("start", {}).items()]
    if "line" in results:
        some = results["line"]
        lines += [
            ("a first run of an agent, to its function", some["first"]),
            (f"... run {about['line']:,} and after", some["later"]),
            ("a first run, processor time", some["first cpu"]),
            (f"... run {about['line']:,} and after", some["later cpu"]),
        ]
    if "due" in results:
        due = results["due"]
        lines += [
            (f"due() over {about['runs']:,} runs, {DUE} of them due", due["again_s"]),
            ("... the first time after opening", due["first_s"]),
            ("... by reading every line", [due["every_line_s"]]),
            *results["pages"].items(),
        ]
    if "run" in results:
        run = results["run"]
        lines += [
            ("a short run, begun and finished", run["with"]),
            ("... without the table of open runs", run["without"]),
            ("a short run, processor time", run["with cpu"]),
            ("... without the table of open runs", run["without cpu"]),
        ]
    for what, figures in lines:
        table.add_row(what, *(f"{one * 1e3:,.2f} ms" for one in (median(figures), min(figures), max(figures))))
    if lines:
        console.print(table)
    if "run" in results:
        more = median(results["run"]["with cpu"]) / median(results["run"]["without cpu"]) - 1
        console.print(f"the table adds {more:.1%} to the CPU time of a short run")
    reached.show(results["targets"], console)
    console.print(
        "DBOS looks for work once a second, also for what it recovers and what is handed over; a worker of ours does"
        " 25 times a second, and soon after something was written."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure operating many runs, beside DBOS on SQLite.")
    parser.add_argument("--quick", action="store_true", help="few runs: does it work?")
    parser.add_argument("--full", action="store_true", help="with idempotent steps, too")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--killed", type=int, help="runs that are killed and recovered (1,000)")
    parser.add_argument("--repeat", type=int, help="times that they are (3)")
    parser.add_argument("--concurrency", type=int, default=16, help="runs that our worker executes at a time (16)")
    parser.add_argument("--line", type=int, help="runs of one agent (1,000)")
    parser.add_argument("--runs", type=int, help="that are put off (10,000)")
    parser.add_argument("--rounds", type=int, help="of every measurement (15)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "operate.json")
    options = parser.parse_args()
    wholes = {"killed": (1_000, 50), "repeat": (3, 1), "line": (1_000, 100), "runs": (10_000, 200), "rounds": (15, 3)}
    for name, (whole, quick) in wholes.items():
        setattr(options, name, getattr(options, name) or (quick if options.quick else whole))
    return options


if __name__ == "__main__":
    main()
