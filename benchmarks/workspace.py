"""Files beside git and restic: many small ones, and much data of which little changes. See --help.

Each round changes the files of one directory and lets every rival save it, one after the other, so that a busy machine
is busy for all of them. Git commits (`add -A`, `commit`) and restic backs up in processes of their own, as they do;
Holdfast is the agent's own process, as it is. Prints tables, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import targets
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

import holdfast

ROOT = Path(__file__).resolve().parent.parent
RESTIC = ROOT / ".venv" / "restic" / "usr" / "bin" / "restic"
CHANGED = 10
"""Files that change in a round, of the many."""

FLOOR = "a bare walk"
"""What os.scandir and lstat of every file cost by themselves, in this process and in the same rounds."""

SETTLE_S = 0.2
"""What was written a moment ago is read again by everybody, git too. That is not what is measured."""

Times = dict[str, list[dict[str, float]]]


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "environment": conditions(
            git=version("git", "--version"),
            restic=version(restic(), "version") if restic() else None,
            files=options.files,
            bytes=options.megabytes * 2**20,
        )
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="workspace-") as name, console.status("") as status:
        folder = Path(name)
        results |= {"many": {}, "much": {}}
        if options.only != "much":
            results["many"] = many(folder / "many", options.files, options.rounds, status.update)
            shutil.rmtree(folder / "many")
        if options.only != "many":
            results["much"] = much(folder / "much", options.megabytes, options.much_rounds, status.update)
    results["targets"] = aims(results)
    keep(results, options.json, console)
    show(results, console)


def version(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def restic() -> str:
    """Restic as it is newest in Debian: fetched once, and not installed."""
    if not RESTIC.exists():
        subprocess.run([ROOT / ".ci" / "fetch", "restic", ROOT / ".venv" / "restic"], check=False, capture_output=True)
    return str(RESTIC) if RESTIC.exists() else shutil.which("restic") or ""


# -- the rivals ---------------------------------------------------------------------------------------------


class Holdfast:
    """An agent with a workspace, in this process."""

    name = "holdfast"

    def __init__(self, folder: Path, files: Path) -> None:
        self._store = holdfast.open(folder / "store")
        self._agent = self._store.agent("coder", workspace=files)
        self._agent.state["steps"] = 0

    def save(self) -> None:
        self._agent.state["steps"] += 1  # as every step of an agent changes its state
        self._agent.checkpoint("step")

    def back(self) -> None:
        self._agent.rollback("~1")

    def close(self) -> None:
        self._store.close()


class Git:
    """A repository beside the files, so that each rival sees the same directory."""

    name = "git"

    def __init__(self, folder: Path, files: Path) -> None:
        self._words = ["git", f"--git-dir={folder / 'git'}", f"--work-tree={files}"]
        self._files = files
        self._do("init", "--quiet")
        for key, value in (("user.name", "x"), ("user.email", "x@example.invalid"), ("gc.auto", "0")):
            self._do("config", key, value)

    def _do(self, *words: str) -> None:
        subprocess.run([*self._words, *words], check=True, stdout=subprocess.DEVNULL, cwd=self._files)

    def save(self) -> None:
        self._do("add", "-A")
        self._do("commit", "--quiet", "--allow-empty", "-m", "step")

    def back(self) -> None:
        self._do("reset", "--quiet", "--hard", "HEAD~1")

    def close(self) -> None:
        pass


class Restic:
    """A repository of restic without a password."""

    name = "restic"

    def __init__(self, folder: Path, files: Path) -> None:
        self._words = [restic(), "--repo", str(folder / "restic"), "--insecure-no-password", "--quiet"]
        self._words += ["--cache-dir", str(folder / "restic-cache")]
        self._files = files
        self._do("init")

    def _do(self, *words: str) -> None:
        subprocess.run([*self._words, *words], check=True, stdout=subprocess.DEVNULL, cwd=self._files)

    def save(self) -> None:
        self._do("backup", ".")

    def back(self) -> None:
        said = subprocess.run([*self._words, "snapshots", "--json"], check=True, capture_output=True, cwd=self._files)
        before = json.loads(said.stdout)[-2]["id"]
        self._do("restore", f"{before}:{self._files}", "--target", str(self._files), "--delete")

    def close(self) -> None:
        pass


# -- the rounds ---------------------------------------------------------------------------------------------


def many(folder: Path, count: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Thousands of small files: none changed, ten changed, ten put back."""
    files = folder / "files"
    chance = random.Random(17)
    paths = [files / f"{number % 40}" / f"{number // 40 % 25}" / f"{number}.py" for number in range(count)]
    say(f"writing {count:,} files")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(chance.randrange(200, 6_000)))
    time.sleep(SETTLE_S)
    rivals = [rival(folder, files) for rival in (Holdfast, Git)]
    times: Times = {}
    for rival in rivals:
        say(f"{count:,} files, the first time: {rival.name}")
        took(times, f"first {rival.name}", rival.save)
        took({}, "", rival.save)
    for number in range(rounds):
        say(f"{count:,} files, round {number + 1} of {rounds}")
        for rival in rivals:
            took(times, f"unchanged {rival.name}", rival.save)
        took(times, f"unchanged {FLOOR}", lambda: walk(files))
        for path in (changed := chance.sample(paths, CHANGED)):
            path.write_bytes(chance.randbytes(chance.randrange(200, 6_000)))
        time.sleep(SETTLE_S)
        for rival in rivals:
            took(times, f"changed {rival.name}", rival.save)
        # The first that goes back finds all of it to do. The other one's files are changed again for it.
        held = {path: path.read_bytes() for path in changed}
        for rival in rivals if number % 2 else rivals[::-1]:
            took(times, f"back {rival.name}", rival.back)
            put(held)
            time.sleep(SETTLE_S)
            rival.save()
    for rival in rivals:
        rival.close()
    return {name: figures(found) for name, found in times.items()}


def walk(files: Path) -> None:
    """All that anybody in Python has to do who looks at each file's times: less than this no scan can cost."""
    waiting = [str(files)]
    while waiting:
        with os.scandir(waiting.pop()) as listing:
            for item in listing:
                if item.is_dir(follow_symlinks=False):
                    waiting.append(item.path)
                else:
                    item.stat(follow_symlinks=False)


def put(held: dict[Path, bytes]) -> None:
    for path, data in held.items():
        if path.read_bytes() != data:
            path.write_bytes(data)


def much(folder: Path, megabytes: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Much data in some large files: a hundredth changes in each of them, at places that nobody knows."""
    files = folder / "files"
    files.mkdir(parents=True)
    chance = random.Random(17)
    paths = [files / f"{number}.bin" for number in range(20)]
    each = megabytes * 2**20 // len(paths)
    say(f"writing {megabytes:,} MiB")
    for path in paths:
        path.write_bytes(chance.randbytes(each))
    time.sleep(SETTLE_S)
    rivals = [rival(folder, files) for rival in (Holdfast, Restic, Git) if rival is not Restic or restic()]
    times: Times = {}
    for rival in rivals:
        say(f"{megabytes:,} MiB, the first time: {rival.name}")
        took(times, f"first {rival.name}", rival.save)
    for number in range(rounds):
        for path in paths:
            with path.open("r+b") as file:
                file.seek(chance.randrange(each - each // 100))
                file.write(chance.randbytes(each // 100))
        time.sleep(SETTLE_S)
        for rival in rivals:
            say(f"{megabytes:,} MiB, round {number + 1} of {rounds}: {rival.name}")
            took(times, f"changed {rival.name}", rival.save)
    for rival in rivals:
        rival.close()
    return {name: figures(found) for name, found in times.items()}


def took(times: Times, name: str, act: Callable[[], object]) -> None:
    """Do something, and note wall and processor time, that of its processes included."""
    before, began = spent(), time.perf_counter()
    act()
    wall = time.perf_counter() - began
    times.setdefault(name, []).append({"wall_s": wall, "cpu_s": spent() - before})


def spent() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def figures(found: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "wall_s": median(one["wall_s"] for one in found),
        "best_s": min(one["wall_s"] for one in found),
        "cpu_s": median(one["cpu_s"] for one in found),
        "rounds": len(found),
    }


# -- what came of it ----------------------------------------------------------------------------------------


def aims(results: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for part, case, rival, least in (
        ("many", "unchanged", "git", 1.0),
        ("many", "changed", "git", 1.0),
        ("many", "back", "git", 1.0),
        ("much", "changed", "git", 10.0),
        ("much", "changed", "restic", 1.0),
    ):
        both = results[part].get(f"{case} holdfast"), results[part].get(f"{case} {rival}")
        if both[0] and both[1]:
            ratio = both[1]["wall_s"] / both[0]["wall_s"]
            what = f"{LABELS[part, case]}: times faster than {rival}"
            found.append({"what": what, "found": f"{ratio:.2f} x", "least": f"{least:g} x", "reached": ratio >= least})
    return found


LABELS = {
    ("many", "first"): "many files, the first time",
    ("many", "unchanged"): "many files, none changed",
    ("many", "changed"): "many files, ten changed",
    ("many", "back"): "many files, ten put back",
    ("much", "first"): "much data, the first time",
    ("much", "changed"): "much data, 1% changed",
}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table("", "", "wall", "best", "processor", "rounds")
    for (part, case), label in LABELS.items():
        for rival in ("holdfast", "git", "restic", FLOOR):
            one = results[part].get(f"{case} {rival}")
            if one:
                times = (f"{one[key] * 1e3:,.0f} ms" for key in ("wall_s", "best_s", "cpu_s"))
                table.add_row(label, rival, *times, str(one["rounds"]))
    console.print(table)
    targets.show(results["targets"], console)
    env = results["environment"]
    console.print(f"{env['git']}; {env['restic'] or 'no restic here'}; load {env['load_before']} {env['load_after']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure saving and putting back files against git and restic.")
    parser.add_argument("--quick", action="store_true", help="few files, little data: does it work?")
    parser.add_argument("--only", choices=("many", "much"), help="only small files, or only large ones")
    parser.add_argument("--files", type=int, help="how many small ones (20,000)")
    parser.add_argument("--megabytes", type=int, help="how much in large ones (2,048)")
    parser.add_argument("--rounds", type=int, default=7, help="with small files")
    parser.add_argument("--much-rounds", type=int, default=1, help="with large ones; git takes a minute for each")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "workspace.json")
    options = parser.parse_args()
    options.files = options.files or (500 if options.quick else 20_000)
    options.megabytes = options.megabytes or (64 if options.quick else 2_048)
    return options


if __name__ == "__main__":
    main()
