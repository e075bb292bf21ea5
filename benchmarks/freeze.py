"""What freezing a process costs, beside bare CRIU in the same run. See --help.

One program with so many megabytes of random bytes in memory and a small open file. In turn: a bare `criu dump`,
flushed, then hashed and copied once, which is what anybody needs who wants to keep it; and `store.freeze`. Then a
bare `criu restore` of files that were hashed and copied once before; and `store.thaw`. The pause is CRIU's own figure
in both cases. Needs root and CRIU (`.ci/fetch criu .venv/criu`). Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from blake3 import blake3
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.process import criu

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import os, sys, time
memory = os.urandom(int(sys.argv[1]) * 2**20)
log = open("log", "a", buffering=1)
log.write("x" * 100_000)
open("ready", "w").close()
while True:
    time.sleep(0.05)
"""
TARGETS = {"pause": 1.25, "durable": 1.5, "thaw": 1.5}


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    fetched = ROOT / ".venv" / "criu" / "usr" / "sbin" / "criu"
    if fetched.exists():
        os.environ.setdefault("HOLDFAST_CRIU", str(fetched))
    found = criu.probe()
    if not found.usable:
        console.print(f"Processes cannot be frozen here: {found.problem}. {found.hint}")
        return
    options.dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "environment": conditions(criu=found.version, rounds=options.rounds)
    }  # fmt: skip
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.dir, prefix="freeze-") as name, console.status(f"{size} MB"):
            os.environ["XDG_STATE_HOME"] = f"{name}/state"
            tempfile.tempdir = name
            results[f"{size} MB"] = measure(Path(name), found.program, size, options.rounds)
            tempfile.tempdir = None
    keep(results, options.dir / "freeze.json", console)
    show(console, results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 1024], metavar="MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "bench")
    return parser.parse_args()


class Program:
    """The program, as it is now: started, or brought back."""

    def __init__(self, folder: Path, size: int) -> None:
        folder.mkdir()
        self.folder = folder
        words = [sys.executable, "-c", PROGRAM, str(size)]
        quiet = subprocess.DEVNULL
        self._first = subprocess.Popen(
            words, cwd=folder, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        self.pid = self._first.pid
        while not (folder / "ready").exists():
            time.sleep(0.05)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._first.wait()
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.01)


def measure(folder: Path, program: str, size: int, rounds: int) -> dict[str, Any]:
    one = Program(folder / "program", size)
    figures: dict[str, list[float]] = {name: [] for one in TARGETS for name in (one, f"bare {one}")}
    for number in range(rounds):
        images = folder / f"bare{number}"
        # A new store each time: otherwise all but the first image would be there already.
        with holdfast.open(folder / f"store{number}") as store:

            def ours(store: holdfast.Store = store) -> None:
                frozen = store.freeze(one.pid, agent="bench")
                figures["pause"].append(frozen.pause_s)
                figures["durable"].append(frozen.seconds)

            def bare(images: Path = images) -> None:
                pause, durable = bare_dump(program, one.pid, images)
                figures["bare pause"].append(pause)
                figures["bare durable"].append(durable)

            def back(store: holdfast.Store = store) -> None:
                begun = time.perf_counter()
                store.thaw("bench")
                figures["thaw"].append(time.perf_counter() - begun)

            def bare_back(images: Path = images) -> None:
                figures["bare thaw"].append(bare_restore(program, images))

            # Who comes second finds a disk that still has much to do, so they take turns in that.
            for act in (ours, bare) if number % 2 else (bare, ours):
                os.sync()
                act()
            for act in (back, bare_back) if number % 2 else (bare_back, back):
                one.kill()
                os.sync()
                act()
        shutil.rmtree(images)
        shutil.rmtree(folder / f"store{number}")
    one.kill()
    found: dict[str, Any] = {name: median(times) for name, times in figures.items()}
    pairs = {name: zip(figures[name], figures[f"bare {name}"], strict=True) for name in TARGETS}
    found["ratios"] = {name: median(ours / bare for ours, bare in some) for name, some in pairs.items()}
    found["all"] = figures
    return found


def bare_dump(program: str, pid: int, images: Path) -> tuple[float, float]:
    images.mkdir()
    begun = time.perf_counter()
    words = [program, "dump", "-t", str(pid), "-D", str(images), "-R", "-o", "dump.log", "--tcp-close", "--file-locks"]
    subprocess.run(words, check=True, capture_output=True)
    kept = images / "kept"
    kept.mkdir()
    for file in [one for one in images.iterdir() if one.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        hashed_copy(file, kept / file.name, cold=True)
    return criu._frozen_s(images / "stats-dump"), time.perf_counter() - begun  # noqa: SLF001


def hashed_copy(source: Path, target: Path, *, cold: bool = False) -> None:
    """``cold``: it is read from the disk later, as an image out of a store is, which does not stay in memory."""
    digest = blake3(max_threads=1)
    with source.open("rb") as reading, target.open("wb") as writing:
        while some := reading.read(2**20):
            digest.update(some)
            writing.write(some)
        writing.flush()
        os.fsync(writing.fileno())
        if cold:
            os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bare_restore(program: str, images: Path) -> float:
    begun = time.perf_counter()
    again = images / "again"
    again.mkdir()
    for file in (images / "kept").iterdir():
        hashed_copy(file, again / file.name)
    words = [program, "restore", "-D", str(again), "-d", "-o", "restore.log", "--tcp-close", "--file-locks"]
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - begun


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("memory", "what", "Holdfast, s", "bare CRIU, s", "ratio", "at most")
    for size, found in results.items():
        for name, most in TARGETS.items() if "ratios" in found else ():
            ratio = found["ratios"][name]
            style = "green" if ratio <= most else "red"
            times = (f"{found[one]:.3f}" for one in (name, f"bare {name}"))
            table.add_row(size, name, *times, f"[{style}]{ratio:.2f}", f"{most}")
    console.print(table)


if __name__ == "__main__":
    main()
