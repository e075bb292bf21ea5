"""The benchmark of dumps: time, size, and what is in them, beside coredumpy, pydumpling and PyStack. See --help.

Four programs, each tool in a process of its own, in turn. What a dump contains is found out by looking: each thing that
could be shown carries a mark, and the marks are searched in the dump's own bytes, unpacked. Targets that are not
reached are printed as such and change nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import targets as reached
from conditions import conditions, keep
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CHILD = ROOT / "benchmarks" / "dump_child.py"
TIMEOUT_S = 600
TOOLS = ("holdfast", "holdfast installed", "coredumpy", "pydumpling", "pystack")
"""Installed, a sidecar watches from outside; native stacks and registers of plain exceptions need native=True."""
Figures = dict[str, Any]

PROGRAMS = {
    "small": "a small crash",
    "objects": "{objects:,} objects in a local",
    "tasks": "an asyncio server with {tasks} tasks",
    "segfault": "SIGSEGV",
}
IMPOSSIBLE = {("holdfast", "segfault"), ("coredumpy", "segfault"), ("pydumpling", "segfault")}
"""Whatever runs inside the process alone does not outlive it."""

MARKS = {
    "exception, message": rb"mark-message",
    "exception, cause": rb"mark-cause",
    "exception, notes": rb"mark-note",
    "locals of the failing frame": rb"mark-local",
    "locals of its callers": rb"mark-outer",
    "objects below the locals": rb"mark-attribute",
    "source text": rb"F841 mark-source",
    "other threads with locals": rb"mark-thread",
    "tasks with locals": rb"mark-task",
    "log records": rb"mark-log",
    "the agent's state": rb"mark-state",
    "environment": rb"Mark/Environment",
    "open files": rb"mark-file\b",
    "versions of modules": re.escape(version("apsw").encode()),
    "heap by type": rb"MarkedKind",
    "kernel": re.escape(platform.release().encode()),
    "shared objects": rb"libc\.so",
    "native stacks": rb"\bstart_thread\b",
    "registers": rb"\brip\b",
}
SEEN_IN = {
    "small": [name for name in MARKS if name not in {"tasks with locals", "objects below the locals"}],
    "objects": ["objects below the locals"],
    "tasks": ["tasks with locals"],
}
"""Which program shows whether a thing is covered."""

TARGETS = (
    ("objects: time, against coredumpy", "holdfast", "seconds", 10.0),
    ("objects: time, installed, against coredumpy", "holdfast installed", "seconds", 10.0),
    ("objects: bytes, installed, against coredumpy", "holdfast installed", "bytes", 1.0),
)


def unpacked(path: Path) -> bytes:
    """What a dump's file holds, without its compression."""
    if path.suffix == ".hfdump":
        import ormsgpack

        from holdfast.crash.dumpfile import Reader

        reader = Reader(path)
        try:
            return b"\n".join(ormsgpack.packb(reader.payload(chunk)) for chunk in reader.chunks)
        finally:
            reader.close()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return b"\n".join(archive.read(name) for name in archive.namelist())
    content = path.read_bytes()
    for attempt in (gzip.decompress, zlib.decompress):
        try:
            return attempt(content)
        except (OSError, zlib.error):
            continue
    return content


def covered(paths: list[Path]) -> list[str]:
    content = b"\n".join(unpacked(path) for path in paths)
    return [name for name, mark in MARKS.items() if re.search(mark, content)]


class Child:
    """The failing program."""

    def __init__(self, folder: Path, tool: str, program: str, count: int) -> None:
        job = {"tool": tool, "program": program, "folder": str(folder), "count": count}
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def said(self) -> Figures:
        line = self.stdout.readline()
        if not line:
            _, complaint = self.process.communicate(timeout=TIMEOUT_S)
            raise RuntimeError(f"exit {self.process.returncode}\n{complaint[-2_000:]}")
        found: Figures = json.loads(line)
        return found

    def go_on(self) -> None:
        self.stdin.write("\n")
        self.stdin.flush()


def pystack(*words: str, to: Path) -> float:
    began = perf_counter()
    # The whole of what it can show; its way of looking at a process needs no cooperation, as ours has none here.
    command = [str(Path(sys.executable).with_name("pystack")), *words]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S)
    if ended.returncode:
        raise RuntimeError(f"pystack: {ended.stderr.decode()[-1_000:]}")
    to.write_bytes(ended.stdout)
    return perf_counter() - began


def measure(folder: Path, tool: str, program: str, count: int) -> Figures:
    """One dump; its time, the bytes of its files and what they show."""
    child = Child(folder, tool, program, count)
    text = folder / "pystack.txt"
    if program == "segfault":
        child.said()
        child.go_on()
        child.process.wait(TIMEOUT_S)
        began = perf_counter()
        if tool == "pystack":
            core = next(path for path in folder.iterdir() if path.name.startswith("core"))
            seconds = pystack("core", "--locals", "--native-all", str(core), sys.executable, to=text)
            return {"seconds": seconds, "bytes": core.stat().st_size, "covered": covered([text])}
        while not (found := [path for path in folder.glob("*.hfdump") if whole(path)]):
            if perf_counter() - began > 60:
                raise RuntimeError("no dump was left")
            sleep(0.002)
        return {"seconds": perf_counter() - began, "bytes": found[0].stat().st_size, "covered": covered(found)}
    if tool == "pystack":
        pid = child.said()["ready"]
        seconds = pystack("remote", "--locals", "--native-all", str(pid), to=text)
        child.go_on()
        child.said()
        child.process.wait(TIMEOUT_S)
        return {"seconds": seconds, "bytes": text.stat().st_size, "covered": covered([text])}
    figures = child.said()
    child.process.wait(TIMEOUT_S)
    paths = [path for path in folder.iterdir() if path.suffix in {".dump", ".hfdump"}]
    return {**figures, "bytes": sum(path.stat().st_size for path in paths), "covered": covered(paths)}


def whole(path: Path) -> bool:
    from holdfast.crash import open_dump
    from holdfast.errors import HoldfastError

    try:
        with open_dump(path) as dump:
            return dump.complete
    except (HoldfastError, OSError):
        return False


def run(folder: Path, options: argparse.Namespace, say: Callable[[str], None]) -> Figures:
    results: Figures = {}
    counts = {"objects": options.objects, "tasks": options.tasks}
    for program in PROGRAMS:
        runs: dict[str, list[Figures]] = {}
        for turn in range(options.repeat):
            for tool in TOOLS:
                if (tool, program) in IMPOSSIBLE:
                    continue
                say(f"{program}: {tool}, {turn + 1} of {options.repeat}")
                place = folder / f"{program}-{tool}-{turn}"
                place.mkdir()
                runs.setdefault(tool, []).append(measure(place, tool, program, counts.get(program, 0)))
        results[program] = {
            tool: {
                "seconds": statistics.median(one["seconds"] for one in found),
                "seconds_all": [one["seconds"] for one in found],
                "bytes": statistics.median(one["bytes"] for one in found),
                "covered": sorted(set.intersection(*(set(one["covered"]) for one in found))),
            }
            for tool, found in runs.items()
        }
    return results


def coverage(results: Figures) -> dict[str, list[str]]:
    """For each thing that a dump may show, the tools that show it."""
    found: dict[str, list[str]] = {}
    for program, names in SEEN_IN.items():
        for name in names:
            found[name] = [tool for tool, figures in results[program].items() if name in figures["covered"]]
    return {name: found[name] for name in MARKS}


def targets(results: Figures, shown: dict[str, list[str]]) -> list[Figures]:
    found = []
    for what, tool, figure, least in TARGETS:
        ratio = results["objects"]["coredumpy"][figure] / results["objects"][tool][figure]
        found.append({"what": what, "found": f"{ratio:.1f} x", "least": f"{least:g} x", "reached": ratio >= least})
    lacking = [name for name, tools in shown.items() if tools and "holdfast installed" not in tools]
    found.append(
        {
            "what": "shows everything that any of them shows",
            "found": f"lacks {', '.join(lacking)}" if lacking else "all of it",
            "least": "all of it",
            "reached": not lacking,
        }
    )
    return found


def show(results: Figures, console: Console) -> None:
    about = results["environment"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    console.print(
        f"{about['when'][:10]}, {about['cores']} cores, Python {about['python']}; {packages}."
        f" Load average {about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after.\n"
    )
    for program, title in PROGRAMS.items():
        sheet = Table(title=title.format(**about), title_justify="left")
        for column in ("", "time", "bytes", "things shown"):
            sheet.add_column(column, justify="left" if not column else "right")
        for tool in TOOLS:
            figures = results["programs"][program].get(tool)
            if figures is None:
                sheet.add_row(tool, "cannot", "", "")
                continue
            sheet.add_row(
                tool, f"{figures['seconds'] * 1e3:,.0f} ms", f"{figures['bytes'] / 1e3:,.0f} kB",
                str(len(figures["covered"])),
            )  # fmt: skip
        console.print(sheet)
    sheet = Table(title="What a dump shows", title_justify="left")
    for column in ("", *TOOLS):
        sheet.add_column(column, justify="left" if not column else "center")
    for name, tools in results["coverage"].items():
        sheet.add_row(name, *("yes" if tool in tools else "" for tool in TOOLS))
    console.print(sheet)
    reached.show(results["targets"], console)
    console.print(
        "Times: from the exception to the finished file, for SIGSEGV from the process's end to the finished file"
        " (PyStack: to the finished text, the kernel's core already there; its bytes are the core's)."
    )


def main() -> None:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 120)
    options.dir.mkdir(parents=True, exist_ok=True)
    began = monotonic()
    results: Figures = {
        "environment": conditions(
            packages={name: version(name) for name in TOOLS if " " not in name},
            objects=options.objects,
            tasks=options.tasks,
            repeat=options.repeat,
        )
    }
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="dump-") as name, console.status("") as status:
        results["programs"] = run(
            Path(name), options, lambda text: status.update(f"{monotonic() - began:4.0f} s  {text}")
        )
    results["coverage"] = coverage(results["programs"])
    results["targets"] = targets(results["programs"], results["coverage"])
    keep(results, options.json, console)
    show(results, console)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure dumps beside coredumpy, pydumpling and PyStack.")
    parser.add_argument("--quick", action="store_true", help="few objects, once: does it work?")
    parser.add_argument("--objects", type=int, help="objects that a local leads to (100,000)")
    parser.add_argument("--tasks", type=int, help="tasks of the server (500)")
    parser.add_argument("--repeat", type=int, help="times that each dump is taken (5)")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where to work")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "dump.json")
    options = parser.parse_args()
    for name, whole_run, quick in (("objects", 100_000, 5_000), ("tasks", 500, 50), ("repeat", 5, 1)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole_run)
    return options


if __name__ == "__main__":
    main()
