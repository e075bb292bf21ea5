"""Replay: whether runs that are executed again go the same way, what recording them costs, what replaying takes.

Records random runs (``replay_child``), single-threaded and over asyncio, and executes each again; every digest must be
equal. Then the same loop of tools that take 10 ms, with Holdfast and as plain functions, in turns. Prints tables and
writes JSON. See --help.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import replay_child as program
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.travel import Execution, replay_all

PROGRAM = str(Path(__file__).with_name("replay_child.py"))
SECONDS = 0.010
LOOPS = {"reads": 0, "every tenth a write, with a checkpoint": 10}
COST_MAX = 0.05
"""What recording may cost on a run whose tools take that long."""


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as folder, holdfast.open(Path(folder, "store")) as store:
        cases = fidelity(store, options.runs)
        cost = recording(store, options.calls, options.rounds)
        speed = replaying(store)
    table = Table("case", "runs", "calls", "digests compared", "equal", title="Fidelity")
    for name, found in cases.items():
        compared = [one.same for run in found for one in run.checkpoints]
        calls, equal = sum(run.calls for run in found), sum(run.same for run in found)
        table.add_row(name, f"{len(found)}", f"{calls:,}", f"{len(compared):,}", f"{equal / len(found):.1%}")
    console.print(table)
    table = Table("tools of 10 ms", "plain", "recorded", "cost", "of it processor", title="Recording")
    for name, one in cost.items():
        seconds = f"{one['plain_s']:.3f} s", f"{one['recorded_s']:.3f} s"
        table.add_row(f"{options.calls} calls, {name}", *seconds, f"{one['cost']:.1%}", f"{one['processor']:.1%}")
    console.print(table)
    console.print(f"Replaying {speed['calls']:,} calls takes {speed['seconds']:.2f} s, {speed['us']:.0f} us for each.")
    unlike = [one for found in cases.values() for one in found if not one.same]
    for one in unlike[:5]:
        console.print(f"[red]{one.agent}[/]: {one.difference or one.failed or one.stopped or one.blocked}")
    figures = {
        "fidelity": {
            name: {"runs": len(found), "same": sum(one.same for one in found)} for name, found in cases.items()
        },
        "recording": cost,
        "replaying": speed,
    }
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if unlike or cost["reads"]["cost"] > COST_MAX:
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="random runs of each kind")
    parser.add_argument("--calls", type=int, default=100, help="reads of the loop that is timed")
    parser.add_argument("--rounds", type=int, default=7, help="how often it is timed, in turns")
    parser.add_argument("--out", default="build/replay.json", help="where the figures go")
    return parser.parse_args()


def fidelity(store: holdfast.Store, runs: int) -> dict[str, list[Execution]]:
    for seed in range(runs):
        store.agent(f"alone-{seed}").run(program.alone, seed)
        asyncio.run(store.agent(f"several-{seed}").arun(program.several, seed))
    names = {"single-threaded": "alone", "asyncio": "several"}
    return {
        name: replay_all(store, [(f"{word}-{seed}", None) for seed in range(runs)], program=PROGRAM)
        for name, word in names.items()
    }


def recording(store: holdfast.Store, calls: int, rounds: int) -> dict[str, Any]:
    """What a loop takes, by the clock and by the processor, in turns with and without records."""
    tools = tuple(one.direct for one in (program.ask, program.do))
    found = {}
    for name, every in LOOPS.items():
        pairs = []
        for at in range(rounds):
            agent = store.agent(f"steady-{every}-{at}")
            plain = timed(partial(program.body, tools, {}, lambda _label: None, calls, SECONDS, every))
            pairs.append((plain, timed(partial(agent.run, program.steady, calls, SECONDS, every))))
        # Of each pair, so that a machine that is busy for a while is so for both.
        found[name] = {
            "plain_s": median(one[0] for one, _ in pairs),
            "recorded_s": median(two[0] for _, two in pairs),
            "cost": median(two[0] / one[0] for one, two in pairs) - 1,
            "processor": median((two[1] - one[1]) / one[0] for one, two in pairs),
        }
    return found


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, all threads together."""
    began, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - busy


def replaying(store: holdfast.Store) -> dict[str, Any]:
    store.agent("fast").run(program.steady, 1_000, 0.0)
    (found,) = replay_all(store, [("fast", None)], program=PROGRAM)
    return {"calls": found.calls, "seconds": found.seconds, "us": 1e6 * found.seconds / found.calls}


if __name__ == "__main__":
    main()
