"""Many writers: 32 processes append, read, clone, remove and take branches from each other, all in one store.

Each writes down what was acknowledged to it, in a file of its own. In the end the store must hold all of it: no
acknowledged checkpoint is missing from the history of its agent, whoever wrote in between; counters that many
increased have been increased exactly as often as that was acknowledged; what a removal collected was needed by nobody.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import AgentBusy, Contention, Fenced, Stale, StoreClosed, UnknownAgent
from tests.faults import script
from tests.faults.campaign import Task, campaign, quiet, remembering
from tests.memory import memory

PROCESSES = 32
FEW_PROCESSES = 8
MANY_OPERATIONS = 10_000
"""From so many operations on all 32 processes take part: fewer would not be enough for each to do something."""
ROUND_OPERATIONS = 125
"""Of each process in one store: what is removed is looked for in all of it, so that one that only grows gets slow."""
REMOVING = 8
"""One of so many processes removes agents as long as others write: one at a time may, so that more would only wait."""
SHARED = 6
MESSAGES_MAX = 16
HANG_S = 900.0
_REFUSED = (AgentBusy, Contention, Fenced, Stale, StoreClosed, UnknownAgent)


class Board:
    """What all processes of a round see: a bulk value that somebody is removing, and who has come to an end.

    What one is about to remove is what others are saving at that moment. It goes out of use soon: a value that
    somebody's history has kept is never collected again.
    """

    def __init__(self, processes: int) -> None:
        self._writers = [who for who in range(processes) if who % REMOVING]
        self._bytes = mmap.mmap(-1, 8 + processes)

    def named(self) -> bytes:
        return self.value(int.from_bytes(self._bytes[:8]))

    def name(self, number: int) -> None:
        self._bytes[:8] = number.to_bytes(8)

    def ended(self, who: int) -> None:
        self._bytes[8 + who] = 1

    @property
    def all_ended(self) -> bool:
        """Whether nobody is left but those who remove."""
        return all(self._bytes[8 + who] for who in self._writers)

    @staticmethod
    def value(number: int) -> bytes:
        return random.Random(number).randbytes(6_000)


@dataclass
class Life:
    """One process. ``tell`` writes down what was acknowledged; ``done`` counts the calls that were answered."""

    store: holdfast.Store
    who: int
    board: Board
    tell: Callable[[str], object]
    chance: random.Random
    done: int = 0
    number: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    bulk: bytes = b""

    def live(self, operations: int, until: float | None) -> None:
        self.own = self.store.agent(f"own-{self.who}")
        removing = self.who % REMOVING == 0
        while not self.board.all_ended if removing else self.done < operations:
            if until is not None and time.monotonic() > until:
                break
            self.number += 1
            what = self.chance.random()
            if what < 0.5 and removing:
                self.passing()
            elif what < 0.65:
                self.append()
            elif what < 0.85:
                self.increase(f"shared-{self.chance.randrange(SHARED)}")
            else:
                self.look()

    def append(self) -> None:
        """One more message on an agent of its own."""
        if len(self.messages) >= MESSAGES_MAX or not self.messages:
            self.messages = []
            self.own.state["messages"] = []
        message = {"n": self.number, "text": "x" * self.chance.randrange(200)}
        self.messages.append(message)
        self.own.state["messages"].append(dict(message))
        plain: dict[str, Any] = {"messages": self.messages}
        if self.chance.random() < 0.03:
            self.bulk = self.own.state["bulk"] = self.board.named()
        if self.bulk:
            plain["bulk"] = self.bulk
        made = self.own.checkpoint(str(self.number))
        content = script.fingerprint(plain)
        self.tell(f"checkpoint {self.own.name} main {made.id} {content}")
        self.done += 1

    def increase(self, name: str) -> None:
        """More on a counter that all share. Sometimes the branch is taken away from whoever has it."""
        try:
            agent = self.store.agent(name, wait_s=0.05, takeover=self.chance.random() < 0.3)
        except _REFUSED:
            return
        try:
            for _ in range(self.chance.randrange(1, 8)):
                time.sleep(self.chance.random() * 0.004)  # for others to take it, or to write though they have lost it
                agent.state["n"] = agent.state.get("n", 0) + 1
                made = agent.checkpoint("one more")
                self.tell(f"one {name} {made.id}")
                self.done += 1
        except Fenced:
            # Whoever took the branch last must never be refused in favour of one who lost it.
            if self.store._db.view.branch_at(agent._branch.b).generation == agent._lease.generation:
                self.tell(f"failed {name}: its rightful writer was refused")
        except _REFUSED:
            pass
        finally:
            with suppress(*_REFUSED):
                agent.close()

    def look(self) -> None:
        """Read what another one is writing, or removing."""
        self.done += 1
        with suppress(*_REFUSED):
            name = f"{self.chance.choice(('own', 'shared'))}-{self.chance.randrange(SHARED)}"
            if self.chance.random() < 0.1:  # also one that is being removed
                name = self.chance.choice(self.store.agents()).name
            for checkpoint in self.store.agent(name, readonly=True).log(limit=3):
                script.fingerprint_of(checkpoint)

    def passing(self) -> None:
        """An agent that comes and goes, made of values that others have too."""
        with suppress(*_REFUSED):
            name = f"passing-{self.who}-{self.number}"
            if self.chance.random() < 0.5:
                self.store.copy(self.own.name, name)
            agent = self.store.agent(name)
            value = self.number * PROCESSES + self.who
            agent.state["bulk"] = self.board.value(value)
            agent.checkpoint("here")
            agent.close()
            self.board.name(value)
            self.store.remove(name)
            self.tell(f"removed {name}")
            self.done += 1


@campaign("writers", "many writers at once", "operations", ci=500, soak=1_000_000)
def writers(task: Task) -> None:
    """32 processes appending, reading, cloning, removing and taking over in one store; the history is checked."""
    seed = task.seed
    with quiet(), script.small():
        while not task.over:
            with memory() as folder, remembering(folder / "state"):
                one_round(task, folder, seed)
            seed += 1


def one_round(task: Task, folder: Path, seed: int) -> None:
    processes = PROCESSES if task.count >= MANY_OPERATIONS else FEW_PROCESSES
    operations = max(1, min(ROUND_OPERATIONS, (task.count - task.done) // processes))
    until = None if task.seconds is None else task.began + task.seconds
    path = folder / "store"
    holdfast.open(path).close()
    board = Board(processes)
    said = [folder / f"said-{who}" for who in range(processes)]
    start(lambda who: work(path, said[who], board, who, seed, operations, until), processes)
    ledger = script.Ledger()
    ones: dict[str, list[str]] = {}
    for who, file in enumerate(said):
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        for line in lines:
            what, _, rest = line.partition(" ")
            if what == "one":
                name, identity = rest.split()
                ones.setdefault(name, []).append(identity)
            elif what == "failed":
                task.broke(f"process {who}: {rest}")
            elif what == "did":
                task.tried("operations", int(rest))
            else:
                ledger.read(line)
        if not lines or not lines[-1].startswith("did"):
            task.broke(f"process {who} did not come to its end")
    task.details["acknowledged increases"] += sum(map(len, ones.values()))
    check(task, path, ledger, ones)


def start(life: Callable[[int], None], processes: int) -> None:
    """Run so many lives at once, each in a process of its own, and wait until all have ended."""
    children = []
    for who in range(processes):
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                life(who)
            os._exit(0)
        children.append(child)
    ends = time.monotonic() + HANG_S
    while children:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        if children and time.monotonic() > ends:
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def work(path: Path, said: Path, board: Board, who: int, seed: int, operations: int, until: float | None) -> None:
    with said.open("w", buffering=1) as file:
        tell = lambda line: file.write(f"{line}\n")  # noqa: E731
        try:
            with holdfast.open(path) as store:
                life = Life(store, who, board, tell, random.Random(seed * 1_000 + who))
                life.live(operations, until)
        except BaseException as error:
            tell(f"failed {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            raise
        finally:
            board.ended(who)
        tell(f"did {life.done}")


def check(task: Task, path: Path, ledger: script.Ledger, ones: dict[str, Sequence[str]]) -> None:
    with holdfast.open(path) as store:
        verified = store.verify()
        if not verified.ok:
            task.broke(f"verify: {verified}")
        try:
            ledger.check(store)
        except (AssertionError, holdfast.HoldfastError) as error:
            task.broke(str(error))
        for name, identities in ones.items():
            agent = store.agent(name, readonly=True)
            line = {checkpoint.id: checkpoint for checkpoint in agent.log()}
            lost = [identity for identity in identities if identity not in line]
            if lost:
                task.broke(f"{name}: {len(lost)} of {len(identities)} acknowledged increases are not in its history")
            if len(set(identities)) != len(identities) or agent.state["n"] < len(identities):
                task.broke(f"{name}: counts {agent.state['n']}, {len(identities)} were acknowledged")
            values = [checkpoint.state["n"] for checkpoint in line.values()][::-1]
            if values != list(range(1, len(values) + 1)):
                task.broke(f"{name}: its history does not count by one: {values[:20]}")
        task.details["packs in the end"] += len(store._db.view.packs())
