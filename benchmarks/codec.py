"""The benchmark of the codec: CPU time of changes with their captures and of loads, and memory. See --help.

Prints tables and writes the figures as JSON. Each case is a process of its own, without a disk. ``--against COMMIT``
takes the source of that commit out of the repository, into a temporary folder, and runs it in turns with the working
tree; the least of all rounds counts. Microseconds are the machine's own, so each is also divided by one ormsgpack
encode of the same item. Targets that are not reached are printed as such and change nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

from conditions import conditions, keep
from report import Target, duration
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benchmarks" / "codec_child.py"
TIMEOUT_S = 600
HERE = "working tree"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measured case. ``limit_us`` is a time, ``limit_x`` a multiple of the older commit's."""

    part: str
    what: str
    arguments: tuple[Any, ...]
    limit_us: float | None = None
    limit_x: float | None = None

    @property
    def name(self) -> str:
        return " ".join(map(str, (self.part, *self.arguments)))


def cases(*, quick: bool) -> list[Case]:
    small = 10 if quick else 1
    found = [
        Case("append", f"append a dict to {length // small:,}", (length // small,), limit_x=1.2)
        for length in (1_000, 10_000, 100_000)
    ]
    length = 10_000 // small
    reads = {"nobody": "nobody reads", "once": "all were read once", "each": "all are read before each"}
    for read, said in reads.items():
        for kind in ("dataclass", "pydantic", "AIMessage"):
            limit = 12_000.0 if read == "each" else 250.0
            found.append(
                Case("typed", f"append one {kind} to {length:,}, {said}", (kind, read, length), limit_us=limit)
            )
    found += [
        Case("set", f"set.add at {100_000 // small:,}", (100_000 // small,), limit_us=500),
        Case("key", f"new key in a dict of {100_000 // small:,}", (100_000 // small,), limit_us=500),
        Case("sort", f"sort {length:,} messages", (length,), limit_x=1.5),
        Case("edit", "edit one of 2,000 messages", (2_000,)),
        Case("load", f"cold load of {length:,} messages, all of it read", (length,)),
        Case("memory", f"told bytes of {length:,} messages", (length,)),
    ]
    return found


def child(tree: Path, case: Case) -> Figures:
    path = os.pathsep.join((str(tree / "src"), str(CHILD.parent)))
    ended = subprocess.run(
        [sys.executable, str(CHILD), json.dumps({"case": case.part, "arguments": case.arguments})],
        capture_output=True, timeout=TIMEOUT_S, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{case.name}, {tree}: exit {ended.returncode}\n{ended.stderr.decode()[-2_000:]}")
    found: Figures = json.loads(ended.stdout.splitlines()[-1])
    return found


@contextmanager
def source_of(commit: str) -> Iterator[Path]:
    """The library as it was, in a folder that goes afterwards."""
    packed = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="codec-") as name:
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(name, filter="data")
        yield Path(name)


def measure(trees: dict[str, Path], chosen: list[Case], rounds: int, say: Callable[[str], None]) -> Figures:
    """Every case in every tree, in turns; the least of each figure."""
    results: Figures = {}
    for case in chosen:
        found: dict[str, Figures] = {tree: {} for tree in trees}
        for turn in range(rounds):
            for tree, path in trees.items():
                say(f"{case.what}, {tree} ({turn + 1} of {rounds})")
                for figure, value in child(path, case).items():
                    found[tree][figure] = min(found[tree].get(figure, value), value)
        results[case.name] = {"what": case.what, **found}
    return results


def targets(results: Figures, chosen: list[Case], older: str | None) -> list[Target]:
    found: list[Target] = []
    for case in chosen:
        ours = results[case.name][HERE]
        theirs = results[case.name][older] if older is not None else {}
        if case.limit_us is not None:
            found.append(Target(case.what, ours["us"], case.limit_us, "us"))
        if case.limit_x is not None and theirs:
            found.append(Target(f"{case.what}, against {older}", ours["us"] / theirs["us"], case.limit_x, "x"))
        if case.part == "load":
            found.append(Target(f"{case.what}, against one decode", ours["us"] / ours["decode_us"], 4.5, "x"))
            found.append(Target("first read of a message at random", ours["random_read_us"], 1.0, "us"))
        if case.part == "memory":
            for name, said in (("loaded", "after a load"), ("appended", "after 1,000 sealed appends")):
                found.append(Target(f"{case.what} {said}, against the encoding", ours[name], 0.3, "x"))
    return found


def show(results: Figures, chosen: list[Case], older: str | None, console: Console) -> None:
    about = results["environment"]
    console.print(
        f"{about['when'][:10]}, {about['cores']} cores, Python {about['python']}."
        f" Load average {about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after."
        f" The least of {about['rounds']} rounds.\n"
    )
    sheet = Table(title="CPU time of one change with its capture", title_justify="left")
    columns = ["", HERE, "after a seal", "x encode"]
    if older is not None:
        columns += [older, "after a seal", "x encode", "new / old"]
    for column in columns:
        sheet.add_column(column, justify="left" if not column else "right")
    for case in chosen:
        if case.part == "memory":
            continue
        cells: list[str] = []
        figures = [results["cases"][case.name][tree] for tree in (HERE, older) if tree is not None]
        for one in figures:
            first = duration(one["first_us"]) if "first_us" in one else ""
            cells += [duration(one["us"]), first, f"{one['us'] / one['encode_us']:,.1f}"]
        if len(figures) > 1:
            cells.append(f"{figures[0]['us'] / figures[1]['us']:.2f}")
        sheet.add_row(case.what, *cells)
    console.print(sheet)
    sheet = Table(title="Targets", title_justify="left")
    for column in ("", "found", "at most", ""):
        sheet.add_column(column, justify="left" if not column else "right")
    for target in results["targets"]:
        row = (f"{target[name]:,.2f} {target['unit']}" for name in ("value", "limit"))
        verdict = "reached" if target["reached"] else "not reached"
        sheet.add_row(target["what"], *row, verdict, style="" if target["reached"] else "red")
    console.print(sheet)
    console.print(
        "after a seal: the first change, which may have to read bytes that were let go. x encode: against one ormsgpack"
        " encode of the same item; for loads, against one msgspec decode."
    )


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 150)
    chosen = [case for case in cases(quick=options.quick) if case.part in options.only]
    began = perf_counter()
    results: Figures = {"environment": conditions(rounds=options.rounds, against=options.against)}
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(f"{perf_counter() - began:4.0f} s  {text}")

        if options.against is None:
            results["cases"] = measure({HERE: ROOT}, chosen, options.rounds, say)
        else:
            with source_of(options.against) as tree:
                results["cases"] = measure({HERE: ROOT, options.against: tree}, chosen, options.rounds, say)
    results["environment"]["seconds"] = perf_counter() - began
    results["targets"] = [target.as_dict() for target in targets(results["cases"], chosen, options.against)]
    keep(results, options.json, console)
    show(results, chosen, options.against, console)


PARTS = ("append", "typed", "set", "key", "sort", "edit", "load", "memory")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the codec alone: changes, captures, loads, memory.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the lengths, once: does it work?")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--against", metavar="COMMIT", help="an older commit, which runs in turns")
    parser.add_argument("--rounds", type=int, help="times that each case runs (3)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "codec.json")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 1 if options.quick else 3
    return options


if __name__ == "__main__":
    sys.exit(main())
