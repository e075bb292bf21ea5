"""kill -9: at random moments, before every call to the disk, and at every system call that writes.

What was acknowledged is there, all else is whole or absent, and a recovery that is killed as well can be run again.
Random moments hit what nobody thought of; the other two miss nothing: one stands between Holdfast and the ``os``
module, the other has the kernel's tracer kill the process. All who are killed are real processes, forked from one that
has loaded everything: starting Python would take longer than most lives here.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import holdfast
from holdfast.codec.values import encode
from holdfast.errors import HoldfastError
from tests.faults.calls import CHANGES, Call
from tests.faults.campaign import Skip, Task, campaign, quiet
from tests.faults.disk import Disk
from tests.faults.failing import FEW_TRIES, known_sites
from tests.faults.isolated import Died, isolated
from tests.faults.kill_child import SMALL
from tests.faults.script import Ledger
from tests.faults.stage import LIVES, Life, Stage, stage
from tests.faults.victim import Victim
from tests.limits import limits
from tests.lives import Troupe, die
from tests.memory import memory

# -- at random moments ----------------------------------------------------------------------------------

# Longest life of a writer after it said that it is open, on a machine that is not busy. Elsewhere it lives longer, so
# that it gets as far: too short a life ends before the first checkpoint, and shows nothing.
LIFE_S = 0.03
ENOUGH_CHECKPOINTS = 3  # on average, in one life
PACE_MAX = 40.0
# A life ends in the middle of opening (recovery of the log, taking the lease) this often.
KILLED_WHILE_OPENING = 0.15
VERIFY_EVERY = 50
KILLS_PER_AGENT = 25  # a new one now and then, so that histories stay short, and with them the looks at them
KILLS_PER_STORE = 250
WRITER = "tests.faults.kill_child"


Said = list[list[str]]


def lived(
    troupe: Troupe,
    opening_s: float | None,
    life_s: float,
    before: Callable[[], None] = lambda: None,
    **job: object,
) -> Said:
    """One life of a writer; what it acknowledged. ``before`` is what else befalls it, shortly before its end."""
    life = troupe.begin(**job)
    if opening_s is None:
        life.until("open", "made", "error")
        time.sleep(life_s)
    else:
        time.sleep(opening_s)
    before()
    life.kill()
    life.end()
    return [[word, *rest.split()] for word, rest in life.said]


@campaign("kills", "kill -9 at random moments", "kills", ci=30, soak=10_000)
def kills(task: Task) -> None:
    """A real process at real work, killed while it opens, writes, seals and folds."""
    with Troupe(WRITER) as troupe, limits(SMALL), quiet():  # the reader's rule for where nodes end must be the writer's
        random_kills = Random(task, troupe)
        while not task.over:
            with memory() as folder:
                random_kills.on(folder / "store")


class Random:
    """One store after the other, in each of which some hundred writers are killed."""

    def __init__(self, task: Task, troupe: Troupe) -> None:
        self.task = task
        self.troupe = troupe
        self.chance = random.Random(20_240 + task.seed)
        self.pace = 1.0
        self.known = 0  # how many acknowledgements there were

    def on(self, path: Path) -> None:
        holdfast.open(path).close()
        acknowledged: dict[str, str] = {}  # id -> digest
        name = ""
        for number in range(KILLS_PER_STORE):
            if self.task.over:
                break
            name = f"agent-{number // KILLS_PER_AGENT}"
            acknowledged |= self._kill(path, name, number)
        with holdfast.open(path, readonly=True) as store:
            report = store.verify()
            digests = {
                c.id: c.digest for info in store.agents() for c in store.agent(info.name, readonly=True).log(all=True)
            }
        if not report.ok:
            self.task.broke(str(report))
        for identity, digest in acknowledged.items():
            if digests.get(identity) != digest:
                self.task.broke(f"checkpoint {identity[:12]} was acknowledged and is not there")
        self.task.details["acknowledged checkpoints"] += len(acknowledged)
        self.task.details["others, whole"] += len(digests) - len(acknowledged)

    def _kill(self, path: Path, name: str, number: int) -> dict[str, str]:
        """One life and its end; returns what it acknowledged, found again."""
        task, chance = self.task, self.chance
        if task.done and task.done % 10 == 0 and self.known < ENOUGH_CHECKPOINTS * task.done:
            self.pace = min(self.pace * 1.25, PACE_MAX)
        opening = chance.uniform(0, 0.02 * self.pace) if chance.random() < KILLED_WHILE_OPENING else None
        life_s = chance.uniform(0, LIFE_S * self.pace)
        durability = "batched" if number % 5 == 4 else "commit"
        job = {"path": str(path), "name": name, "seed": chance.getrandbits(40), "durability": durability}
        expected = {}
        for word, *rest in lived(self.troupe, opening, life_s, **job):
            if word in {"open", "made", "moved"}:
                expected[rest[0]] = rest[1]
            else:
                task.broke(f"life {task.done}: {word} {' '.join(rest)}")
        self.known += len(expected)
        try:
            look(path, name, expected, chance, everything=number % VERIFY_EVERY == VERIFY_EVERY - 1)
        except (AssertionError, HoldfastError) as error:
            task.broke(f"life {task.done}: {error!r}")
        task.tried("while opening" if opening is not None else "at work")
        return expected


def look(path: Path | str, name: str, expected: dict[str, str], chance: random.Random, *, everything: bool) -> None:
    """Reopen and compare."""
    with holdfast.open(path, readonly=True) as store:
        known = {info.name for info in store.agents()}
        if name not in known:
            assert not expected
            return
        agent = store.agent(name, readonly=True)
        found = {checkpoint.id: checkpoint for checkpoint in agent.log(limit=400, all=True)}
        for identity, digest in expected.items():
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

RECOVERY_KILLED_EVERY = 5
RECOVERY_CALLS = 60
"""Recovery, and the work after it, are killed before one of so many of their first calls, every so many tries."""


def wrong_after(place: Stage, life: Life, ledger: Ledger, said: list[str]) -> str:
    """What a dead process left is opened, compared with what it said, and worked on. Returns what is wrong, or ""."""
    for line in said:
        ledger.read(line)
    try:
        life.check(place.folder, ledger)
    except (AssertionError, HoldfastError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@campaign("kill-points", "kill -9 before every call to the disk", "kills", ci=20, soak=4_000, by_part=True)
def kill_points(task: Task) -> None:
    """Each life is killed before each call that changes something on the disk; of some, the recovery is killed, too."""
    with stage() as place:
        points = [
            (name, at)
            for name, found in known_sites(task).items()
            for at in range(1, sum(times for site, times in found.items() if site.what in CHANGES) + 1)
        ]
        chance = random.Random(task.seed)
        for name, at in task.mine(points):
            if task.over:
                return
            life = LIVES[name]
            ledger = place.begin(life)
            said, killed = _killed(place, lambda ledger, life=life: life.live(place.folder, ledger), ledger, at)
            if killed and task.done % RECOVERY_KILLED_EVERY == 0:
                recovered = Ledger(**vars(ledger))
                for line in said:
                    recovered.read(line)
                _, again = _killed(
                    place,
                    lambda ledger, life=life: life.check(place.folder, ledger),
                    recovered,
                    chance.randint(1, RECOVERY_CALLS),
                )
                task.details["recoveries killed"] += again
            wrong = wrong_after(place, life, ledger, said)
            if wrong:
                task.broke(f"call {at} of the life {name!r}: {wrong}")
            task.tried(name if killed else "lived to its end")


def _killed(place: Stage, act: Callable[[Ledger], None], ledger: Ledger, at: int) -> tuple[list[str], bool]:
    """Act in a process that is killed before its ``at``-th change; what it said, and whether it came to that."""
    disk = Disk(place.folder, recording=False)
    seen = 0

    def before(call: Call) -> None:
        nonlocal seen
        seen += call.what in CHANGES
        if seen == at:
            die()

    def child(say: Callable[[str], None]) -> None:
        disk.before = before
        ledger.told = say
        with disk.watching():
            act(ledger)
        say("lived")
        die()

    try:
        isolated(child)
    except Died as death:
        if death.signal != signal.SIGKILL:
            raise AssertionError(str(death)) from death
        return [line for line in death.said if line != "lived"], "lived" not in death.said
    raise AssertionError("it was not killed")


# -- at every system call -------------------------------------------------------------------------------

SYSCALLS = (
    "pwrite64", "fdatasync", "fsync", "ftruncate", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir",
    "openat", "mkdir", "mkdirat", "symlinkat", "fchmod", "close",
)  # fmt: skip


def traced(place: Stage, life: Life, *options: object) -> list[str]:
    """A life in a process that strace watches, with these options; what it said until it ended."""
    program = shutil.which("strace")
    if program is None:
        raise Skip("strace is not installed")
    ledger = place.begin(life)
    going, go = os.pipe()

    def act(say: Callable[[str], None]) -> None:
        os.read(going, 1)
        ledger.told = say
        life.live(place.folder, ledger)

    victim = Victim(act)
    os.close(going)
    tracer = subprocess.Popen(
        [program, "-f", "-p", str(victim.pid), *map(str, options)], stderr=subprocess.PIPE, text=True
    )
    told = tracer.stderr.readline()
    if "attached" not in told:
        victim.end()
        tracer.wait(timeout=120)
        raise Skip(f"strace cannot trace here: {told.strip()[-200:]}")
    drain = threading.Thread(target=tracer.stderr.read, daemon=True)  # it says something of every thread
    drain.start()
    os.write(go, b".")
    os.close(go)
    said = victim.wait()
    tracer.wait(timeout=120)
    drain.join()
    tracer.stderr.close()
    return said


@campaign("kill-syscalls", "kill -9 at every system call that writes", "kills", ci=8, soak=1_500, by_part=True)
def kill_syscalls(task: Task) -> None:
    """strace kills the process at the n-th call of pwrite, fsync, rename and others, for every n of each life."""
    with stage() as place:
        lives = list(LIVES.values())[: None if task.count >= FEW_TRIES else 1]
        points = [
            (life.name, name, number)
            for life in lives
            for name, times in _syscalls(place, life).items()
            for number in range(1, times + 1)
        ]
        task.details["system calls of all lives"] = len(points) if task.part == 0 else 0
        for life_name, name, number in task.mine(points):
            if task.over:
                return
            life = LIVES[life_name]
            inject = f"inject={name}:signal=KILL:when={number}"
            said = traced(place, life, "-o", "/dev/null", "-e", f"trace={name}", "-e", inject)
            ledger = place.ledger(life)
            wrong = wrong_after(place, life, ledger, said)
            if wrong:
                task.broke(f"{name} {number} of the life {life_name!r}: {wrong}")
            task.tried(name)


def _syscalls(place: Stage, life: Life) -> dict[str, int]:
    """How often a life makes each call, in the thread that makes it most often: that is what strace counts by."""
    with memory() as folder:
        log = folder / "log"
        traced(place, life, "-o", log, "-e", f"trace={','.join(SYSCALLS)}")
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
