"""kill -9: at random moments, before every call to the disk, and at every system call that writes.

What was acknowledged is there, all else is whole or absent. Random moments hit what nobody thought of; the other two
miss nothing: one stands between Holdfast and the ``os`` module, the other has the kernel's tracer kill the process.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Queue

import holdfast
from holdfast.codec.values import encode
from holdfast.errors import HoldfastError, NotAStore
from tests.faults import script
from tests.faults.campaign import ROOT, Skip, Task, campaign, memory, quiet, remembering
from tests.faults.disk import CHANGES, Call, Disk
from tests.faults.isolated import Died, isolated
from tests.faults.kill_child import SMALL
from tests.faults.rich import limits

# -- at random moments ----------------------------------------------------------------------------------

# Longest life of a writer after it said that it is open, on a machine that is not busy. Elsewhere it lives longer, so
# that it gets as far: too short a life ends before the first checkpoint, and shows nothing.
LIFE_S = 0.06
ENOUGH_CHECKPOINTS = 3  # on average, in one life
PACE_MAX = 20.0
# A life ends in the middle of opening (recovery of the log, taking the lease) this often.
KILLED_WHILE_OPENING = 0.15
VERIFY_EVERY = 50


class Template:
    """The warm process that forks writers, and the lines that come from them."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.kill_child", str(path)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put("end")

    def run(self, name: str, seed: int, durability: str, opening_s: float | None, life_s: float) -> list[list[str]]:
        """One life; returns what it acknowledged."""
        self.process.stdin.write(f"{name} {seed} {durability}\n")
        self.process.stdin.flush()
        said: list[list[str]] = []
        word, pid = self._next()
        while word != "pid":  # a quick child may be first
            said.append([word, *pid.split()])
            word, pid = self._next()
        if opening_s is not None:
            time.sleep(opening_s)
        else:
            while not any(line[0] in {"open", "made", "error"} for line in said):
                word, rest = self._next()
                said.append([word, *rest.split()])
            time.sleep(life_s)
        with suppress(ProcessLookupError):  # it ended by itself, and its last line says why
            os.kill(int(pid), signal.SIGKILL)
        while True:
            word, rest = self._next()
            if word == "gone":
                return said
            said.append([word, *rest.split()])

    def _next(self) -> tuple[str, str]:
        word, _, rest = self.lines.get(timeout=60).partition(" ")
        assert word != "end", "the template died"
        return word, rest

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@campaign("kills", "kill -9 at random moments", "kills", ci=150, soak=10_000)
def kills(task: Task) -> None:
    """A real process at real work, killed while it opens, writes, seals and folds."""
    with limits(SMALL), quiet(), memory() as folder:  # the reader's rule for where nodes end must be the writer's
        _kills(task, folder / "store")


def _kills(task: Task, path: Path) -> None:
    chance = random.Random(20_240 + task.seed)
    holdfast.open(path).close()
    template = Template(path)
    acknowledged: dict[str, str] = {}  # every one ever, id -> digest
    unseen: dict[str, tuple[str, str]] = {}  # those since the last look
    pace = 1.0
    name = ""
    try:
        while not task.over:
            kill = task.done
            if kill and kill % 10 == 0 and len(acknowledged) < ENOUGH_CHECKPOINTS * kill:
                pace = min(pace * 1.25, PACE_MAX)
            name = f"agent-{kill // 125}"  # a new one now and then, so that histories stay short
            opening = chance.uniform(0, 0.02 * pace) if chance.random() < KILLED_WHILE_OPENING else None
            durability = "batched" if kill % 5 == 4 else "commit"
            life = template.run(name, chance.getrandbits(40), durability, opening, chance.uniform(0, LIFE_S * pace))
            for word, *rest in life:
                if word not in {"open", "made", "moved"}:
                    task.broke(f"life {kill}: {word} {' '.join(rest)}")
                    continue
                unseen[rest[0]] = (name, rest[1])
                acknowledged[rest[0]] = rest[1]
            try:
                look(path, name, unseen, chance, everything=kill % VERIFY_EVERY == VERIFY_EVERY - 1)
            except (AssertionError, HoldfastError) as error:
                task.broke(f"life {kill}: {error!r}")
            unseen.clear()
            task.tried("while opening" if opening is not None else "at work")
        look(path, name, {}, chance, everything=True)
        with holdfast.open(path, readonly=True) as store:
            digests = {
                c.id: c.digest for info in store.agents() for c in store.agent(info.name, readonly=True).log(all=True)
            }
        for identity, digest in acknowledged.items():
            if digests.get(identity) != digest:
                task.broke(f"checkpoint {identity[:12]} was acknowledged and is not there")
        task.details["acknowledged checkpoints"] += len(acknowledged)
        task.details["others, whole"] += len(digests) - len(acknowledged)
    finally:
        template.close()


def look(
    path: Path, name: str, expected: dict[str, tuple[str, str]], chance: random.Random, *, everything: bool
) -> None:
    """Reopen and compare."""
    with holdfast.open(path, readonly=True) as store:
        known = {info.name for info in store.agents()}
        if name not in known:
            assert not expected
            return
        agent = store.agent(name, readonly=True)
        found = {checkpoint.id: checkpoint for checkpoint in agent.log(limit=400, all=True)}
        for identity, (_, digest) in expected.items():
            checkpoint = found.get(identity) or agent.at(f"id:{identity}")
            assert checkpoint.digest == digest
        # The newest few, acknowledged or not: the whole state loads, and its digest is proven on the way.
        for checkpoint in [
            *list(found.values())[:2],
            *chance.sample(sorted(found.values(), key=lambda c: c.id), k=min(1, len(found))),
        ]:
            assert whole(checkpoint)
        for branch in agent.branches()[-3:]:
            handle = store.agent(name, branch=branch, readonly=True)
            if handle.head is not None:
                assert whole(handle.head)
        if everything:
            report = store.verify()
            assert report.ok, str(report)


def whole(checkpoint: holdfast.Checkpoint) -> bool:
    state = checkpoint.state
    return all(encode(state.raw_section(section)) for section in state) and set(state) == set(checkpoint.sections)


# -- before every call ----------------------------------------------------------------------------------


def check_after(path: Path, said: list[str]) -> str:
    """What a dead process left is opened, compared with what it said, and worked on. Returns what is wrong, or ""."""
    ledger = script.Ledger()
    for line in said:
        ledger.read(line)
    try:
        with holdfast.open(path, create="open" not in said) as store:
            report = store.verify()
            if not report.ok:
                return str(report)
            ledger.check(store)
            agent = store.agent("goes-on")
            agent.state["bulk"] = os.urandom(4_000)
            agent.checkpoint("on")
    except (AssertionError, HoldfastError, NotAStore) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@campaign("kill-points", "kill -9 before every call to the disk", "kills", ci=40, soak=4_000, by_seed=False)
def kill_points(task: Task) -> None:
    """A whole life is killed before each call that changes something on the disk, in turn."""
    with quiet(), script.small():
        total = _calls()
        task.count = min(task.count, total)
        points = random.Random(task.seed).sample(range(1, total + 1), task.count)
        for point in points:
            if task.over:
                return
            with memory() as folder, remembering(folder / "state"):
                try:
                    isolated(lambda say, at=point, where=folder: _killed(where, at, say))
                    task.broke(f"call {point}: it was not killed")
                except Died as death:
                    if death.signal != signal.SIGKILL:
                        task.broke(f"call {point}: {death}")
                    wrong = check_after(folder / "store", death.said)
                    if wrong:
                        task.broke(f"call {point}: {wrong}")
                task.tried()


def _calls() -> int:
    def count(_say: Callable[[str], None]) -> int:
        with memory() as folder, remembering(folder / "state"):
            disk = Disk(folder)
            with disk.watching():
                script.perform(folder / "store", script.Ledger())
            return sum(call.what in CHANGES for call in disk.calls)

    return isolated(count)


def _killed(folder: Path, at: int, say: Callable[[str], None]) -> None:
    disk = Disk(folder)
    seen = 0

    def before(call: Call) -> None:
        nonlocal seen
        seen += call.what in CHANGES
        if seen == at:
            os.kill(os.getpid(), signal.SIGKILL)

    disk.before = before
    with disk.watching():
        script.perform(folder / "store", script.Ledger(told=say))
        while True:  # fewer calls than in the run that counted: foldings come when they come
            with holdfast.open(folder / "store") as store:
                store.agent("more").checkpoint("more")


# -- at every system call -------------------------------------------------------------------------------

SYSCALLS = ("pwrite64", "fdatasync", "fsync", "ftruncate", "rename", "unlink", "openat", "mkdir", "close")


def strace(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """The script in a process under strace. Its acknowledgements are its standard output."""
    program = shutil.which("strace")
    if program is None:
        raise Skip("strace is not installed")
    *options, folder = map(str, arguments)
    return subprocess.run(
        [program, "-f", "-qq", *options, sys.executable, "-m", "tests.faults.performer", folder],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "XDG_STATE_HOME": f"{folder}/state", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


@campaign("kill-syscalls", "kill -9 at every system call that writes", "kills", ci=8, soak=1_500, by_seed=False)
def kill_syscalls(task: Task) -> None:
    """strace kills the process at the n-th call of pwrite, fsync, rename and others, for every n of a life."""
    with quiet(), script.small():
        chance = random.Random(task.seed)
        points = [(name, number) for name, times in _syscalls().items() for number in range(1, times + 1)]
        task.details["system calls of one life"] = len(points)
        chance.shuffle(points)
        for name, number in points[: task.count]:
            if task.over:
                return
            with memory() as folder, remembering(folder / "state"):
                done = strace(
                    "-o", "/dev/null", "-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}", folder
                )
                said = done.stdout.splitlines()
                if said and not done.stdout.endswith("\n"):
                    said.pop()
                wrong = check_after(folder / "store", said)
                if wrong:
                    task.broke(f"{name} {number}: {wrong}")
                task.tried(name if done.returncode else "lived")


def _syscalls() -> dict[str, int]:
    """How often a life makes each call, in the thread that makes it most often: that is what strace counts by."""
    with memory() as folder:
        log = folder / "log"
        done = strace("-o", log, "-e", f"trace={','.join(SYSCALLS)}", folder)
        if done.returncode:
            raise Skip(f"strace cannot trace here: {done.stderr.strip()[-200:]}")
        counts: dict[tuple[str, str], int] = {}
        for line in log.read_text().splitlines():
            thread, _, rest = line.partition(" ")
            name = rest.strip().partition("(")[0]
            counts[name, thread] = counts.get((name, thread), 0) + 1
        return {
            name: max(number for (other, _), number in counts.items() if other == name)
            for name, _ in counts
            if name in SYSCALLS
        }
