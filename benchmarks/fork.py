"""How long a program stands still for a copy of itself: fork points, and checkpoints that a copy writes. See --help.

Each measurement is a process of its own with so much memory, in one array or in many small objects. A fork point is
made and left, and gone back to; a checkpoint is saved the ordinary way and by a copy, in turns. Prints a table, writes
JSON and draws the picture.
"""

from __future__ import annotations

import argparse
import json
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

ROOT = Path(__file__).resolve().parent.parent
SIZES_MB = (10, 50, 200, 500, 1000)
SAVED_MB = (10, 1000)
LIMIT_MS, LIMIT_AT_MB = 10.0, 200
"""What a fork point may take, with so much memory."""
KINDS = ("array", "objects")
COLOURS = {"array": "#1f77b4", "objects": "#d62728", "ordinary": "#555555", "fork": "#1f77b4"}


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] in CHILDREN:
        CHILDREN[sys.argv[1]](*sys.argv[2:])
        return
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    sizes, saved = ((10, 50), (10,)) if options.quick else (SIZES_MB, SAVED_MB)
    results: dict[str, Any] = {
        "environment": conditions(),
        "points": [],
        "saved": [],
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="fork-") as name, console.status("") as status:
        for kind in KINDS:
            for size in sizes:
                status.update(f"a fork point with {size:,} MB, {kind}")
                results["points"].append({"kind": kind, "mb": size, **child("point", kind, size, options.rounds)})
        for size in saved:
            status.update(f"saving {size:,} MB")
            results["saved"].append({"mb": size, **child("save", name, size, 3 if size >= 1000 else options.rounds)})
    keep(results, options.json, console)
    show(results, console)
    draw(results, options.plot)
    console.print(f"Picture: {options.plot}")


def child(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def filled(kind: str, size_mb: int) -> Any:
    if kind == "array":
        import numpy as np

        return np.random.default_rng(1).random(size_mb * 125_000)
    made: list[Any] = []
    start = resident_mb()
    while resident_mb() - start < size_mb:
        made += [{"role": "user", "content": f"message {len(made)} {number}", "n": number} for number in range(1000)]
    return made


def child_point(kind: str, size_mb: str, rounds: str) -> None:
    """Make and leave a point so often, then go back so often; print the medians."""
    import holdfast

    kept = filled(kind, int(size_mb))
    made: list[float] = []
    bare: list[float] = []
    for _ in range(int(rounds) + 1):
        began = time.perf_counter()
        point = holdfast.fork_point()
        point.__enter__()
        made.append(time.perf_counter() - began)
        point.__exit__()
        began = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        bare.append(time.perf_counter() - began)
        os.waitpid(pid, 0)
    took: list[float] = []
    with holdfast.fork_point() as point:
        if point.value is not None:
            took = [*point.value["took"], time.time() - point.value["at"]]
        if point.rollbacks <= int(rounds):
            point.rollback({"took": took, "at": time.time()})
    found = {"pause_s": median(made[1:]), "worst_s": max(made[1:]), "bare_fork_s": median(bare[1:])}
    print(json.dumps({**found, "rollback_s": median(took[1:]), "resident_mb": resident_mb(), "length": len(kept)}))


def child_save(folder: str, size_mb: str, rounds: str) -> None:
    """Save a state that is new each time, in both ways; print how long the program stood still, and until durable."""
    import numpy as np

    import holdfast

    took: dict[str, list[tuple[float, float]]] = {"ordinary": [], "fork": []}
    store = holdfast.open(Path(folder, f"store-{size_mb}"))
    generator = np.random.default_rng(1)
    for number in range(int(rounds)):
        for how in ("ordinary", "fork") if number % 2 else ("fork", "ordinary"):
            agent = store.agent(f"{how}-{number}", when=None)
            agent.state["weights"] = generator.random(int(size_mb) * 125_000)
            began = time.perf_counter()
            if how == "ordinary":
                agent.checkpoint()
                pause = time.perf_counter() - began
            else:
                saving = agent.checkpoint(mode="fork")
                pause = time.perf_counter() - began
                saving.wait()
                if not saving.forked:
                    raise SystemExit(saving.reason)
            took[how].append((pause, time.perf_counter() - began))
            agent.close()
            store.remove(agent.name)
    print(json.dumps({how: {"pause_s": median(p for p, _ in some), "total_s": median(t for _, t in some)}
                      for how, some in took.items()}))  # fmt: skip


CHILDREN = {"point": child_point, "save": child_save}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("memory", "MB", "fork point", "worst", "bare fork", "going back")
    for one in results["points"]:
        cells = (one["pause_s"], one["worst_s"], one["bare_fork_s"], one["rollback_s"])
        table.add_row(one["kind"], f"{one['mb']:,}", *(f"{cell * 1e3:.1f} ms" for cell in cells))
    console.print(table)
    table = Table("MB", "how", "the program stands still", "until durable")
    for one in results["saved"]:
        for how in ("ordinary", "fork"):
            table.add_row(
                f"{one['mb']:,}", how, *(f"{one[how][name] * 1e3:,.0f} ms" for name in ("pause_s", "total_s"))
            )
    console.print(table)
    for one in results["points"]:
        if one["mb"] == LIMIT_AT_MB:
            met = "met" if one["pause_s"] * 1e3 <= LIMIT_MS else "MISSED"
            console.print(f"{one['kind']}: a point with {LIMIT_AT_MB} MB in at most {LIMIT_MS:g} ms: {met}")


def draw(results: dict[str, Any], path: Path) -> None:
    import picture  # not in the processes that are measured

    with picture.panels(path, 3.6, layout="constrained") as (_figure, left, right):
        for kind in KINDS:
            some = [one for one in results["points"] if one["kind"] == kind]
            xs = [one["mb"] for one in some]
            picture.line(
                left, xs, [one["pause_s"] * 1e3 for one in some], f"{kind}: made", COLOURS[kind], "o", ours=True
            )
            picture.line(
                left, xs, [one["rollback_s"] * 1e3 for one in some], f"{kind}: back", COLOURS[kind], "x", ours=False
            )
        left.set(xscale="log", yscale="log", xlabel="MB in memory", ylabel="ms")
        left.legend(frameon=False)
        picture.grid(left)
        picture.title(left, "A fork point is made, and gone back to")
        names, values, colours = [], [], []
        for one in results["saved"]:
            for how in ("ordinary", "fork"):
                names.append(f"{one['mb']:,} MB, {how}")
                values.append(one[how]["pause_s"] * 1e3)
                colours.append(COLOURS[how])
        right.barh(names, values, color=colours)
        right.set(xscale="log", xlabel="the program stands still (ms)")
        picture.grid(right, axis="x")
        picture.title(right, "A checkpoint of an array")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how long a program stands still for a copy of itself.")
    parser.add_argument("--quick", action="store_true", help="little memory: does it work?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "fork.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "images" / "fork.svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
