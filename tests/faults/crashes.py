"""Every crash point: the disk in each state in which a crash may leave it is opened and compared.

A performance (tests/faults/script.py) is recorded once. Then the disk of every moment is put together in memory, in the
ways that tests/faults/replay.py tells, and opened. The catalog must hold exactly what it held after one of the
transactions: none before the last acknowledgement, none after the one in flight. So what was acknowledged is there and
what was not is there whole or not at all, in one comparison. Packs must be whole; verify has to find nothing.
"""

from __future__ import annotations

import os
import random
import shutil
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

import holdfast
from holdfast.errors import HoldfastError, NotAStore
from holdfast.store.tables import TABLES
from tests.faults import script
from tests.faults.campaign import Task, campaign, quiet, remembering
from tests.faults.disk import Disk
from tests.faults.replay import Replay, State
from tests.memory import memory

ABSENT = "absent"
STATES_PER_CALL = 2.5  # about so many different ones there are without samples
VERIFY_EVERY = 40  # rows that were verified once need not be each time; but what finds nothing must itself be tried
GO_ON_EVERY = 40
AGAIN_EVERY = 700
"""How often a state is not only opened: verified in full; written to; written to and crashed once more.

Where the same names are left, with other contents, whether a new store can be made there is tried as often."""


def lay_out(state: State, root: Path) -> None:
    """Make the directory hold exactly this."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    place = os.fspath(root)
    for path, content in state.items():
        if content is None:
            (root / path).mkdir()
        else:
            fd = os.open(f"{place}/{path}", os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(fd, content)
            os.close(fd)


def digest_of(state: State) -> bytes:
    total = blake3()
    for path, content in state.items():
        total.update(path.encode() + (b"/" if content is None else b"\0" + len(content).to_bytes(8)))
        total.update(content or b"")
    return total.digest()


def rows(store: holdfast.Store) -> str:
    """A digest of all that the catalog holds."""
    total = blake3()
    for name in TABLES:
        total.update(repr(store._db.engine.run(f"SELECT * FROM {name} ORDER BY 1, 2")).encode())
    return total.hexdigest()


def check_packs(store: holdfast.Store) -> None:
    """Every chunk that the catalog names is there, proven by its digest."""
    view, packs = store._db.now
    for pack in view.packs():
        for flaw in packs.check(view, pack).values():
            raise flaw


@dataclass
class Moments:
    """The transactions of a recording: after which call each was on the disk, and what the catalog held then."""

    ends: list[int] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    acks: list[int] = field(default_factory=list)  # after which calls something was acknowledged

    def allowed(self, at: int) -> tuple[int, int]:
        """The first and last transaction that may be the newest one after a crash at a call."""
        acked = bisect_right(self.acks, at - 1)
        first = bisect_right(self.ends, self.acks[acked - 1]) - 1 if acked else 0
        return max(0, first), min(len(self.ends) - 1, bisect_right(self.ends, at))


class Enumeration:
    """All states of one recording, laid out where it was made: what a user has seen of a store has its path."""

    def __init__(self, task: Task, disk: Disk, chance: random.Random, *, depth: int = 0) -> None:
        self.task = task
        self.disk = disk
        self.chance = chance
        self.depth = depth
        self.known: dict[bytes, str] = {}
        self.absent: set[str] = set()
        self.moments = Moments()

    def run(self, place: Path, samples: int, most: int) -> None:
        """Try up to ``most`` different states; at each moment about as many as make that number in the end."""
        self.place = place
        self._find_moments()
        replay = Replay(self.disk)
        tried = 0
        skipping = max(0.0, 1 - most / (len(self.disk.calls) * STATES_PER_CALL))
        while replay.at < len(self.disk.calls) and tried < most and not self.task.over:
            call = replay.step()
            if call.what == "ack" or self.chance.random() < skipping:
                continue
            for number, state in enumerate(replay.states(self.chance, samples)):
                if tried >= most or self.task.over:
                    break
                tried += self._try(state, replay.at, f"call {replay.at} ({call.what} {call.name}), variant {number}")

    def _find_moments(self) -> None:
        """What the catalog holds after each flush of its log: with everything in place, as the program saw it."""
        replay = Replay(self.disk)
        ledger = script.Ledger()
        self._note(replay, ledger)
        while replay.at < len(self.disk.calls):
            call = replay.step()
            if call.what == "ack":
                self.moments.acks.append(replay.at - 1)
                ledger.read(call.name)
                self._kept(replay, ledger, call.name)
            renamed = call.what == "rename" and call.new_name == "store"
            if renamed or (call.what == "sync" and call.name == "store/store.db-wal"):
                self._note(replay, ledger)

    def _kept(self, replay: Replay, ledger: script.Ledger, what: str) -> None:
        """What has just been acknowledged is there when nothing is that was not flushed."""
        atoms = replay.atoms()
        lay_out(replay.state(atoms, [False] * len(atoms)), self.place)
        try:
            with holdfast.open(self.place / "store", create=False) as store:
                ledger.check(store)
        except (HoldfastError, script.Broken) as error:
            self.task.broke(f"acknowledged, and not there after a crash: {what[:60]}: {error}")

    def _note(self, replay: Replay, ledger: script.Ledger) -> None:
        lay_out(replay.everything(), self.place)
        try:
            with holdfast.open(self.place / "store", create=False) as store:
                found = rows(store)
                if not self.moments.rows or found != self.moments.rows[-1]:
                    report = store.verify()
                    if not report.ok:
                        self.task.broke(f"the whole disk at call {replay.at}: {report}")
                    ledger.check(store, contents=False)  # whose ids are there, and verified, have their contents
        except NotAStore:
            found = ABSENT
        except HoldfastError as error:  # a process that was killed here has left this
            self.task.broke(f"the whole disk at call {replay.at}: {error}")
            found = str(error)
        if not self.moments.rows or found != self.moments.rows[-1]:
            self.moments.ends.append(replay.at - 1)
            self.moments.rows.append(found)

    def _try(self, state: State, at: int, where: str) -> int:
        """Open one state, unless an equal one was opened before, and compare. Returns how many were opened."""
        key = digest_of(state)
        new = key not in self.known
        if new:
            self.known[key] = self._open(state)
            self.task.tried("states" if not self.depth else "states of an interrupted recovery")
        found = self.known[key]
        first, last = self.moments.allowed(at)
        if found not in self.moments.rows[first : last + 1]:
            which = self.moments.rows.index(found) if found in self.moments.rows else found
            self.task.broke(f"{where}: transaction {first} to {last} expected, found {which}")
        return int(new)

    def _open(self, state: State) -> str:
        lay_out(state, self.place)
        number = len(self.known)
        try:
            with holdfast.open(self.place / "store", create=False) as store:
                found = rows(store)
                check_packs(store)
                if number % VERIFY_EVERY == 0:
                    report = store.verify()
                    if not report.ok:
                        return f"verify: {report}"
            if number % GO_ON_EVERY == 0:
                lay_out(state, self.place)
                self._go_on()
            if not self.depth and number % AGAIN_EVERY == AGAIN_EVERY - 1:
                lay_out(state, self.place)
                self._again()
        except NotAStore:
            left = str([(path, content is None, not content) for path, content in state.items()])
            if left not in self.absent or number % GO_ON_EVERY == 0:
                self.absent.add(left)
                with holdfast.open(self.place / "store") as store:  # whatever a dead creator left is no obstacle
                    store.agent("new").checkpoint("new")
            return ABSENT
        except HoldfastError as error:
            return f"{type(error).__name__}: {error}"
        return found

    def _go_on(self) -> None:
        """Work continues on it."""
        with holdfast.open(self.place / "store") as store:
            work_on(store, self.chance)
        with holdfast.open(self.place / "store", readonly=True) as store:
            report = store.verify()
            if not report.ok:
                self.task.broke(f"after going on: {report}")

    def _again(self) -> None:
        """Recovery, and the work after it, crash as well."""
        disk = Disk(self.place)
        with disk.watching(), holdfast.open(self.place / "store") as store:
            disk.ack("open")
            work_on(store, self.chance)
            disk.ack("worked")
        Enumeration(self.task, disk, self.chance, depth=self.depth + 1).run(self.place, 3, AGAIN_EVERY // 2)


def work_on(store: holdfast.Store, chance: random.Random) -> None:
    """A little of everything on whatever is there."""
    for info in store.agents()[:2] or [None]:
        agent = store.agent(info.name if info else "new")
        for run in agent.runs():  # nothing is saved beside one
            if run.status == "interrupted":
                agent.cancel(run.id)
        agent.state["more"] = {"n": chance.random(), "text": "x" * chance.randrange(200)}
        agent.checkpoint("more")
        agent.tag("went-on")
        agent.close()
    agent = store.agent("bulky")
    agent.state["bulk"] = chance.randbytes(4_000)
    agent.checkpoint("bulk")


def record(place: Path, seed: int, **options: Any) -> Disk:
    """One performance from nothing, every call of it. What the user has seen of stores is on the same disk."""
    place.mkdir()
    disk = Disk(place)
    with disk.watching():
        script.perform(place / "store", script.Ledger(told=disk.ack), seed=seed, **options)
    return disk


@campaign("crashes", "every crash point", "states", ci=500, soak=100_000)
def crashes(task: Task) -> None:
    """Calls recorded below Holdfast (SQLite's by a VFS); every prefix, with subsets, reorderings and torn writes."""
    seed = task.seed
    with quiet(), script.small():
        while not task.over:
            chance = random.Random(seed)
            with memory() as folder, remembering(folder / "disk" / "state"):
                disk = record(folder / "disk", seed)
                task.details["recorded calls"] += len(disk.calls)
                left = task.count - task.done
                # Few tries go to all moments alike; many to all kinds of states at each moment.
                samples = 0 if left < 10_000 else 12
                Enumeration(task, disk, chance).run(folder / "disk", samples, left)
            seed += 1
