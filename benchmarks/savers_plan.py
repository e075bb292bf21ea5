"""Who runs what, how often and in which order, and what is made of the answers. The clocks are in savers_child.py.

What always holds: savers that are compared take part in the same rounds, each in a process of its own, in an order
shuffled anew for each round; ratios are taken within a round; what a run left on the disk is gone before the next one
starts; and what was not run, or fewer times, is said together with the reason.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from savers_graph import DOCUMENT_BYTES, TURN_BYTES, steps_of, write_script
from savers_postgres import Cluster
from savers_rivals import RIVALS, Rival, bytes_on_disk, opened

HERE = Path(__file__).resolve().parent
CASES = (("W1", "realistic"), ("W1", "random"), ("W2", "realistic"))
COMPARED = ("none", "none delta", "memory", "holdfast", "holdfast delta", "sqlite", "sqlite delta", "postgres")
ASYNC_COMPARED = ("none", "none delta", "holdfast", "sqlite", "sqlite delta")
ASYNC_RUNS = 2
PRUNED = ("holdfast delta", "sqlite delta", "postgres delta")
DECISIVE_TURNS = 500
"""The length that the targets speak of."""
STRACED_TURNS = (10, 30)
SPARE_BYTES = 2_000_000_000
FLUSHES = "fsync,fdatasync,msync,sync_file_range,sync,syncfs"

Figures = dict[str, Any]


class JobFailed(Exception):
    """A measured process failed, or what it read was not what had been written. The others go on."""


class Server:
    """The process that every measured process is forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "savers_child.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, job: Figures) -> Figures:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the server has no pipes")
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: Figures = json.loads(self._process.stdout.readline() or '{"error": "the server has ended"}')
        if "error" in answer:
            what = ", ".join(f"{name}={job[name]}" for name in ("verb", "rival", "workload", "turns"))
            raise JobFailed(f"{what}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Settings:
    """One run of the benchmark. ``absent`` says why a saver is not measured at all."""

    folder: Path
    seed: int
    turns: list[int]
    runs: int
    fewer: bool
    say: Callable[[str], None]
    server: Server
    cluster: Cluster | None
    absent: dict[str, str]
    only_rivals: list[str]
    empty_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def rng(self, *names: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *names))))

    def present(self, names: tuple[str, ...]) -> list[Rival]:
        found = [RIVALS[name] for name in names if RIVALS[name].saver not in self.absent]
        return [rival for rival in found if not self.only_rivals or rival.name in self.only_rivals]

    @contextmanager
    def place(self, rival: Rival) -> Iterator[str]:
        """An empty place for one run, gone afterwards; nothing of it is left for the next one to flush."""
        if rival.saver == "postgres":
            if self.cluster is None:
                raise RuntimeError("there is no PostgreSQL")
            conninfo = self.cluster.fresh()
            try:
                yield conninfo
            finally:
                self.cluster.drop(conninfo)
        else:
            with tempfile.TemporaryDirectory(dir=self.folder) as name:
                yield name
        os.sync()

    def stored(self, rival: Rival, place: str) -> int:
        """Bytes on disk; of a PostgreSQL database only what it has above an empty one with the same tables."""
        return bytes_on_disk(rival, place) - (self.empty_bytes if rival.saver == "postgres" else 0)


def measure_empty(settings: Settings) -> int:
    rival = RIVALS["postgres"]
    with settings.place(rival) as place:
        with opened(rival, place, fresh=True):
            pass
        return bytes_on_disk(rival, place)


def scripts(settings: Settings) -> dict[tuple[str, str], Path]:
    longest = max(*settings.turns, *STRACED_TURNS)
    found = {}
    for workload, material in CASES:
        path = settings.folder / f"{workload}-{material}.msgpack"
        write_script(path, workload, material, longest, settings.rng(workload, material))
        found[workload, material] = path
    return found


def runs_of(rival: Rival, workload: str, material: str, turns: int, settings: Settings) -> int:
    """How often. With ``fewer``, savers that write the whole state, which need minutes for a long thread, get less."""
    few = min(settings.runs, 2)
    if not settings.fewer:
        return settings.runs
    if turns <= DECISIVE_TURNS:
        slow = rival.saver == "postgres" or (rival.name == "memory" and turns == DECISIVE_TURNS)
        return few if slow else settings.runs
    if workload == "W2":
        return few
    if not rival.whole:
        return few if material == "realistic" else 1
    return 1 if rival.name == "sqlite" or (rival.name == "memory" and material == "realistic") else 0


def expected_bytes(rival: Rival, workload: str, turns: int) -> int:
    """What a run may need at most, log included: of the disk, or of the memory for the one that keeps all there."""
    logical = DOCUMENT_BYTES if workload == "W2" else turns * TURN_BYTES
    if not rival.whole:
        return 20 * logical
    return int(2.6 * logical * steps_of(turns) / (1 if workload == "W2" else 2))


def hindrance(rival: Rival, workload: str, turns: int, folder: Path) -> str:
    """Why there is no room for this run; empty when there is."""
    needed = expected_bytes(rival, workload, turns) + SPARE_BYTES
    if rival.saver == "memory":
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        free, what = int(line.split()[1]) * 1024, "memory"
    else:
        free, what = shutil.disk_usage(folder).free, "disk"
    return "" if free > needed else f"needs {needed / 1e9:.1f} GB of {what}, {free / 1e9:.1f} are free"


def compare(settings: Settings, workload: str, material: str, script: Path) -> Figures:
    """W1 and W2: whole runs, then cold reads of what they left, for each length and saver."""
    return {
        str(turns): _one_length(settings, workload, material, script, turns, COMPARED, "sync")
        for turns in settings.turns
    }


def in_background(settings: Settings, script: Path) -> Figures:
    """W1 with LangGraph's default durability, where a step does not wait for its checkpoint."""
    if DECISIVE_TURNS not in settings.turns:
        return {}
    return _one_length(settings, "W1", "realistic", script, DECISIVE_TURNS, ASYNC_COMPARED, "async")


def _one_length(
    settings: Settings, workload: str, material: str, script: Path, turns: int, names: tuple[str, ...], durability: str
) -> Figures:
    rng = settings.rng(workload, material, turns, durability)
    where = f"{workload} {material}, {turns:,} turns, {durability}"
    due: dict[str, set[int]] = {}
    for rival in settings.present(names):
        count = runs_of(rival, workload, material, turns, settings)
        if durability == "async" and settings.fewer:
            count = min(ASYNC_RUNS, settings.runs)
        reason = hindrance(rival, workload, turns, settings.folder) if count else "takes too long for --fewer"
        if reason:
            settings.notes.append(f"{where}: {rival.label} was not run: {reason}.")
        else:
            if count < settings.runs:
                settings.notes.append(f"{where}: {rival.label} got {count} of {settings.runs} runs, to save time.")
            due[rival.name] = set(rng.sample(range(settings.runs), count))
    found: dict[str, dict[int, Figures]] = {name: {} for name in due}
    for number in range(settings.runs):
        order = [name for name in due if number in due[name]]
        rng.shuffle(order)
        for name in order:
            rival = RIVALS[name]
            settings.say(f"{where}, round {number + 1}: {rival.label}")
            job = {"workload": workload, "script": str(script), "turns": turns, "rival": name}
            try:
                with settings.place(rival) as place:
                    job |= {"place": place, "durability": durability}
                    found[name][number] = _one_run(settings, rival, job, place, cold=durability == "sync")
            except JobFailed as error:
                settings.failures.append(f"{where}, round {number + 1}: {rival.label}: {error}")
    return summarise({name: runs for name, runs in found.items() if runs})


def _one_run(settings: Settings, rival: Rival, job: Figures, place: str, *, cold: bool) -> Figures:
    answer = settings.server.ask({**job, "verb": "run"})
    if rival.durable:
        answer["bytes"] = settings.stored(rival, place)
        if cold:
            answer["get"] = settings.server.ask({**job, "verb": "get"})
            answer["history"] = settings.server.ask({**job, "verb": "history"})
    return answer


def summarise(found: dict[str, dict[int, Figures]]) -> Figures:
    """Medians over the runs, and what is above the floor of the same round."""
    figures: Figures = {}
    for name, runs in found.items():
        answers = list(runs.values())
        middle = _medians(answers)
        floor = found.get(RIVALS[name].floor, {})
        shared = [number for number in runs if number in floor]
        if shared:
            for which in ("mean_us", "p50_us"):
                middle[f"above_{which}"] = median(runs[at][which] - floor[at][which] for at in shared)
            middle["above_peak_bytes"] = median(runs[at]["peak_bytes"] - floor[at]["peak_bytes"] for at in shared)
        each = [{"round": number, **answer} for number, answer in runs.items()]
        figures[name] = {"runs": len(answers), **middle, "each": each}
    return figures


def _medians(answers: list[Figures]) -> Figures:
    middle: Figures = {}
    for name, value in answers[0].items():
        values = [answer[name] for answer in answers]
        middle[name] = _medians(values) if isinstance(value, dict) else median(values)
    return middle


def pruning(settings: Settings, script: Path) -> Figures:
    """W5: a thread of 500 turns with delta channels, of which only the newest checkpoint is to stay."""
    figures: Figures = {}
    turns = DECISIVE_TURNS if DECISIVE_TURNS in settings.turns else max(settings.turns)
    for rival in settings.present(PRUNED):
        for verb in ("prune", "by_hand") if rival.saver == "sqlite" else ("prune",):
            settings.say(f"W5, keep the latest of {turns:,} turns: {rival.label}")
            job = {"workload": "W1", "script": str(script), "turns": turns, "rival": rival.name}
            try:
                with settings.place(rival) as place:
                    job |= {"place": place, "durability": "sync"}
                    settings.server.ask({**job, "verb": "run"})
                    before = {**settings.server.ask({**job, "verb": "intact"}), "bytes": settings.stored(rival, place)}
                    done = settings.server.ask({**job, "verb": verb})
                    after = {**settings.server.ask({**job, "verb": "intact"}), "bytes": settings.stored(rival, place)}
            except JobFailed as error:
                settings.failures.append(f"W5: {rival.label}: {error}")
                continue
            figures[rival.name if verb == "prune" else f"{rival.name}, by hand"] = {
                "turns": turns, "before": before, "after": after, **done,
            }  # fmt: skip
    return figures


def flushes(settings: Settings, script: Path) -> Figures:
    """Flushes per step, counted from outside: the difference between a longer and a shorter run, by strace.

    PostgreSQL flushes in processes of its own, and is asked for its count instead.
    """
    figures: Figures = {}
    for rival in settings.present(("memory", "holdfast", "holdfast delta", "sqlite", "sqlite delta", "postgres")):
        settings.say(f"counting flushes: {rival.label}")
        counts = [_flushes(settings, rival, script, turns) for turns in STRACED_TURNS]
        if None in counts:
            figures[rival.name] = {"unknown": "strace is not installed or not allowed to trace"}
            continue
        short, long = (count or 0 for count in counts)
        steps = steps_of(STRACED_TURNS[1]) - steps_of(STRACED_TURNS[0])
        figures[rival.name] = {"short": short, "long": long, "per_step": (long - short) / steps}
    return figures


def _flushes(settings: Settings, rival: Rival, script: Path, turns: int) -> int | None:
    job = {"verb": "run", "workload": "W1", "script": str(script), "turns": turns, "rival": rival.name}
    with settings.place(rival) as place:
        job |= {"place": place, "durability": "sync"}
        if rival.saver == "postgres" and settings.cluster is not None:
            before = settings.cluster.flushes()
            settings.server.ask(job)
            return settings.cluster.flushes() - before
        if shutil.which("strace") is None:
            return None
        with tempfile.NamedTemporaryFile() as log:
            command = ["strace", "-f", "-qq", "-e", f"trace={FLUSHES}", "-o", log.name]
            child = [sys.executable, str(HERE / "savers_child.py"), json.dumps(job)]
            done = subprocess.run([*command, *child], capture_output=True, text=True, check=False)
            if done.returncode:
                if "ptrace" in done.stderr:
                    return None
                raise RuntimeError(f"{rival.name} under strace: {done.stderr[-2_000:]}")
            # A call that another thread interrupts is shown in two lines; its result stands in the second.
            lines = Path(log.name).read_text().splitlines()
            return sum(1 for line in lines if re.search(r"\) += 0$", line))
