"""What encryption costs: the same work on a store without a key and on one with a key, in turns. See --help.

The two take turns in short blocks, so that whatever else the machine does meets both. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

import holdfast

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("plain", "encrypted")
KEY = bytes(range(32))
BULK_BYTES = 64 * 2**20


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 100)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="encryption-") as name, console.status("") as status:
        results = {"environment": conditions(), **measure(Path(name), options, status.update)}
    keep(results, options.json, console)
    show(results, console)


def measure(folder: Path, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    dice = random.Random(5)
    words = [dice.randbytes(6).hex() for _ in range(2_000)]
    texts = [" ".join(dice.choices(words, k=80)) for _ in range(500)]
    keys = {"plain": False, "encrypted": KEY}
    for name in (*KINDS, "phrase"):
        (folder / name).mkdir()  # one that is there already is not announced
    stores = {kind: holdfast.open(folder / kind, key=key) for kind, key in keys.items()}
    agents = {kind: store.agent("a") for kind, store in stores.items()}
    for agent in agents.values():
        agent.state["messages"] = []
    say("checkpoints")
    walls: dict[str, list[float]] = {kind: [] for kind in KINDS}
    works: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for block in range(max(1, options.checkpoints // 50)):
        for kind in KINDS if block % 2 else reversed(KINDS):
            agent = agents[kind]
            for number in range(50):
                agent.state["messages"].append({"role": "user", "content": texts[(block * 50 + number) % len(texts)]})
                wall, work = time.perf_counter(), time.process_time()
                agent.checkpoint("appended")
                walls[kind].append(time.perf_counter() - wall)
                works[kind].append(time.process_time() - work)
    results: dict[str, Any] = {
        "commit, 1 KB appended (us)": {kind: median(walls[kind]) * 1e6 for kind in KINDS},
        "processor time of it (us)": {kind: median(works[kind]) * 1e6 for kind in KINDS},
    }
    for agent in agents.values():
        agent.state["document"] = [{"text": text, "n": n} for n, text in enumerate(texts * 24)]
        agent.checkpoint("document")
    for store in stores.values():
        store.close()
    results["store.db (bytes)"] = {kind: (folder / kind / "store.db").stat().st_size for kind in KINDS}
    say("loading")
    results["open and load 10 MB (ms)"] = in_turns(options.loads, lambda kind: load(folder / kind, keys[kind]), 1e3)
    say("bulk values")
    data = dice.randbytes(BULK_BYTES)
    results["save 64 MiB of bulk data (ms)"] = in_turns(
        5, lambda kind: save_bulk(folder / "bulk", keys[kind], data), 1e3
    )
    for kind in KINDS:
        save_bulk(folder / f"bulk-{kind}", keys[kind], data)
    results["load 64 MiB of bulk data (ms)"] = in_turns(
        5, lambda kind: load_bulk(folder / f"bulk-{kind}", keys[kind], data), 1e3
    )
    results["packs of it (bytes)"] = {
        kind: sum(pack.stat().st_size for pack in (folder / f"bulk-{kind}" / "packs").iterdir()) for kind in KINDS
    }
    say("opening")
    holdfast.open(folder / "phrase", key="a passphrase of several words").close()
    results["open an empty store (ms)"] = in_turns(5, lambda kind: reopen(folder / kind, keys[kind]), 1e3)
    results["open with a passphrase (ms)"] = {
        "plain": results["open an empty store (ms)"]["plain"],
        "encrypted": median(reopen(folder / "phrase", "a passphrase of several words") for _ in range(3)) * 1e3,
    }
    return results


def in_turns(rounds: int, work: Callable[[str], float], unit: float) -> dict[str, float]:
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            found[kind].append(work(kind))
    return {kind: median(found[kind]) * unit for kind in KINDS}


def load(path: Path, key: Any) -> float:
    began = time.perf_counter()
    with holdfast.open(path, key=key, readonly=True) as store:
        length = len(store.agent("a", readonly=True).state["document"])
    took = time.perf_counter() - began
    if length != 12_000:
        raise SystemExit("the document is not what was saved")
    return took


def save_bulk(path: Path, key: Any, data: bytes) -> float:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    with holdfast.open(path, key=key) as store:
        agent = store.agent("a")
        agent.state["data"] = data
        began = time.perf_counter()
        agent.checkpoint("bulk")
        return time.perf_counter() - began


def load_bulk(path: Path, key: Any, data: bytes) -> float:
    with holdfast.open(path, key=key, readonly=True) as store:
        began = time.perf_counter()
        same = store.agent("a", readonly=True).state["data"] == data
        took = time.perf_counter() - began
    if not same:
        raise SystemExit("the data is not what was saved")
    return took


def reopen(path: Path, key: Any) -> float:
    began = time.perf_counter()
    holdfast.open(path, key=key, readonly=True).close()
    return time.perf_counter() - began


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="What encryption costs")
    table.add_column("")
    for column in (*KINDS, "ratio"):
        table.add_column(column, justify="right")
    for what, found in results.items():
        if what != "environment":
            plain, encrypted = (found[kind] for kind in KINDS)
            table.add_row(what, f"{plain:,.0f}", f"{encrypted:,.0f}", f"{encrypted / plain:.2f}")
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "encryption.json")
    parser.add_argument("--checkpoints", type=int, default=2_000)
    parser.add_argument("--loads", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
