"""Many writers: 32 processes append, read, clone, remove and take branches from each other, all in one store.

Each says what was acknowledged to it, through a pipe of its own. In the end the store must hold all of it: no
acknowledged checkpoint is missing from the history of its agent, whoever wrote in between; counters that many
increased have been increased exactly as often as that was acknowledged; what a removal collected was needed by nobody.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import holdfast
from holdfast.errors import AgentBusy, Contention, Fenced, Stale, StoreClosed, UnknownAgent
from tests.faults import script
from tests.faults.campaign import Task, campaign, memory, quiet, remembering
from tests.faults.power import Victim

PROCESSES = 32
SHARED = 6
ROUND_OPERATIONS = 20_000
# Values that all use: what one removes, another may be saving at that moment.
POOL = [random.Random(number).randbytes(6_000) for number in range(3)]
_REFUSED = (AgentBusy, Contention, Fenced, Stale, StoreClosed, UnknownAgent)


def work(path: Path, who: int, operations: int, seed: int, say: Callable[[str], None]) -> None:
    chance = random.Random(seed * 1_000 + who)
    store = holdfast.open(path)
    mine = script.Hand(script.Ledger(told=say), store.agent(f"own-{seed}-{who}"))
    number = 0
    while number < operations:
        number += 1
        what = chance.random()
        if what < 0.45:
            mine.append("messages", {"n": number, "text": "x" * chance.randrange(200)})
            if chance.random() < 0.2:
                mine.set("bulk", chance.choice(POOL))
            mine.save(str(number))
        elif what < 0.75:
            increase(store, f"shared-{chance.randrange(SHARED)}", chance, say)
        elif what < 0.9:
            with suppress(*_REFUSED):  # it may be removed while it is read
                other = store.agent(chance.choice(store.agents()).name, readonly=True)
                for checkpoint in other.log(limit=3):
                    script.fingerprint_of(checkpoint)
        else:
            passing(store, f"passing-{seed}-{who}-{number}", mine, chance)
        say(f"did {number}")
    store.close()
    say("end")


def increase(store: holdfast.Store, name: str, chance: random.Random, say: Callable[[str], None]) -> None:
    """One more on a counter that all share. Sometimes the branch is taken away from whoever has it."""
    try:
        agent = store.agent(name, wait_s=0.05, takeover=chance.random() < 0.3)
    except _REFUSED:
        return
    try:
        for _ in range(chance.randrange(1, 4)):
            time.sleep(chance.random() * 0.004)  # for others to take it, or to write though they have lost it
            agent.state["n"] = agent.state.get("n", 0) + 1
            made = agent.checkpoint("one more")
            say(f"one {name} {made.id}")
    except Fenced:
        # Whoever took the branch last must never be refused in favour of one who lost it.
        if store._catalog.branch_row(agent._branch.b).generation == agent._lease.generation:
            say(f"failed {name}: its rightful writer was refused")
    except _REFUSED:
        pass
    finally:
        with suppress(*_REFUSED):
            agent.close()


def passing(store: holdfast.Store, name: str, mine: script.Hand, chance: random.Random) -> None:
    """An agent that comes and goes, made of values that others have too."""
    with suppress(*_REFUSED):
        if chance.random() < 0.5:
            store.clone(mine.agent.name, name)
        agent = store.agent(name)
        agent.state["bulk"] = chance.choice(POOL)
        agent.checkpoint("here")
        agent.close()
        store.remove(name)


@campaign("writers", "many writers at once", "operations", ci=500, soak=1_000_000)
def writers(task: Task) -> None:
    """32 processes appending, reading, cloning, removing and taking over in one store; the history is checked."""
    seed = task.seed
    with quiet(), script.small():
        while not task.over:
            with memory() as folder, remembering(folder / "state"):
                one_round(task, folder / "store", seed)
            seed += 1


def one_round(task: Task, path: Path, seed: int) -> None:
    many = task.count >= ROUND_OPERATIONS
    processes = PROCESSES if many else PROCESSES // 4
    most = (
        1_000 if not many else ROUND_OPERATIONS if task.seconds is None else 3_000
    )  # time is looked at between rounds
    operations = max(1, min(most, task.count - task.done) // processes)
    holdfast.open(path).close()
    children = [
        Victim(lambda say, who=who: report(lambda: work(path, who, operations, seed, say), say))
        for who in range(processes)
    ]
    ledger = script.Ledger()
    ones: dict[str, list[str]] = {}
    for who, child in enumerate(children):
        child.wait_for("end", 600)
        said = child.end()
        for line in said:
            what, _, rest = line.partition(" ")
            if what == "one":
                name, identity = rest.split()
                ones.setdefault(name, []).append(identity)
            elif what == "failed":
                task.broke(f"process {who}: {rest}")
            elif what not in {"did", "end"}:
                ledger.read(line)
        task.tried("operations", sum(line.startswith("did") for line in said))
        if "end" not in said:
            task.broke(f"process {who} did not come to its end")
    task.details["acknowledged increases"] += sum(map(len, ones.values()))
    check(task, path, ledger, ones)


def report(life: Callable[[], None], say: Callable[[str], None]) -> None:
    try:
        life()
    except BaseException as error:
        say(f"failed {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        raise


def check(task: Task, path: Path, ledger: script.Ledger, ones: dict[str, list[str]]) -> None:
    with holdfast.open(path) as store:
        verified = store.verify()
        if not verified.ok:
            task.broke(f"verify: {verified}")
        try:
            ledger.check(store)
        except AssertionError as error:
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
        left = {row.uuid for row in store._catalog.pack_rows()}
        task.details["packs in the end"] += len(left)
