"""The writer that is killed: does everything an agent does, and says of every checkpoint when it is safe.

The program of a troupe (tests/lives.py). A job has a path, an agent's name, a seed and the durability: a life opens the
store, works until it is killed, and says one line for each acknowledged checkpoint. With "transaction" for the
durability it pays instead, by a tool that shares its transaction.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import holdfast
import holdfast.agent.store  # its limits are changed
from holdfast.errors import NothingToUndo
from tests.faults.campaign import quiet
from tests.limits import limits
from tests.lives import say, serve
from tests.memory import memory

# Seals, segments, bulk values and foldings of the log happen often enough to be hit.
SMALL = {
    "SEAL_CHECKPOINTS": 12,
    "BULK_MIN_BYTES": 16_384,
    "INLINE_MAX_BYTES": 2_048,
    "LEAF_MIN_BYTES": 1_024,
    "LEAF_TARGET_BYTES": 4_096,
    "LEAF_MAX_BYTES": 16_384,
    "FOLD_FRAMES": 40,
    "EXTEND_BYTES": 16_384,
    "EXTEND_ROOM_BYTES": 0,
}


def life(path: str, name: str, seed: int, durability: str) -> None:
    """Random work for ever, every checkpoint acknowledged after it returned."""
    chance = random.Random(seed)
    store = holdfast.open(path, durability=durability)
    agent = store.agent(name, branch=chance.choice(branches_of(store, name)))
    said(agent.head, "open")
    number = 0
    while True:
        number += 1
        work(chance, agent, number)
        if chance.random() < 0.1:
            made = asyncio.run(agent.acheckpoint(f"async {number}"))
        else:
            made = agent.checkpoint(f"step {number}")
        if durability == "batched":
            agent.flush()
        said(made)
        what = chance.random()
        if what < 0.06:
            history = agent.log(limit=8)
            agent.rollback(history[-1])
            said(agent.head, "moved")
        elif what < 0.12:
            try:
                made = agent.undo() if chance.random() < 0.7 else agent.redo()
            except NothingToUndo:
                continue
            agent.flush()
            said(made)
        elif what < 0.15:
            branch = f"b{chance.getrandbits(40):x}"
            agent = agent.branch(branch)
            said(agent.head, "moved")
        elif what < 0.18:
            agent.tag(f"t{chance.randrange(5)}")
        elif what < 0.20:
            agent.mark(agent.head, chance.choice(["suspect", "good"]), "chance")


def paying_life(path: str, name: str, seed: int) -> None:
    """One payment after the other, in a run that every life goes on with."""
    CHANCE.seed(seed)
    with holdfast.open(path) as store:
        agent = store.agent(name, wait_s=60)
        say("open")
        if name.startswith("later"):
            asyncio.run(agent.arun(paying_later))
        else:
            agent.run(paying)


CHANCE = random.Random()
INSERT = "INSERT INTO paid (who, n) VALUES (%s, %s)"


@holdfast.tool(name="kill.transaction", effect="transaction", retries=100)
def pay(who: str, n: int) -> int:
    connection = holdfast.effect().connection
    connection.execute(INSERT, (who, n))
    if CHANCE.random() < 0.1:
        raise holdfast.FailedBeforeEffect("so far nothing counts")
    return int(connection.execute("SELECT count(*) FROM paid WHERE who = %s", (who,)).fetchone()[0])


@holdfast.tool(name="kill.atransaction", effect="transaction")
async def apay(who: str, n: int) -> int:
    connection = holdfast.effect().connection
    await connection.execute(INSERT, (who, n))
    return n


@holdfast.durable(name="kill.paying")
def paying(agent: holdfast.Agent) -> None:
    for n in range(100_000):
        pay(agent.name, n)
        say("made", n)


@holdfast.durable(name="kill.paying_later")
async def paying_later(agent: holdfast.Agent) -> None:
    for n in range(0, 100_000, 3):
        for made in await asyncio.gather(*(apay(agent.name, n + more) for more in range(3))):
            say("made", made)


def branches_of(store: holdfast.Store, name: str) -> list[str]:
    found = [info.branches for info in store.agents() if info.name == name]
    return found[0][-4:] if found else ["main"]


def work(chance: random.Random, agent: holdfast.Agent, number: int) -> None:
    state = agent.state
    messages = state.setdefault("messages", [])
    for _ in range(chance.randrange(1, 4)):
        what = chance.random()
        if what < 0.5 or len(messages) < 3:
            messages.append({"role": "user", "content": f"{number} " * chance.randrange(1, 200)})
        elif what < 0.7:
            messages[chance.randrange(len(messages))]["content"] = f"edited {number} " * chance.randrange(1, 20)
        elif what < 0.8:
            del messages[chance.randrange(len(messages))]
        elif what < 0.85:
            state[f"section {chance.randrange(4)}"] = {"n": number, "set": {1, 2, number}, "pair": (number, None)}
        elif what < 0.9:
            state["bulk"] = chance.randbytes(chance.randrange(20_000, 60_000))
        elif what < 0.93:
            messages.reverse()
        elif len(messages) > 60:
            del messages[10:50]
        else:
            state["table"] = {f"row {row}": "x" * 60 for row in range(chance.randrange(10, 400))}


def said(checkpoint: holdfast.Checkpoint | None, how: str = "made") -> None:
    if checkpoint is not None:
        say(how, f"{checkpoint.id} {checkpoint.digest}")


def warm() -> None:
    """A short life of its own: what is loaded and made by the first use is then there in every child."""
    with memory() as folder, quiet(), holdfast.open(folder / "store") as store:
        agent = store.agent("warm")
        chance = random.Random(1)
        for number in range(30):
            work(chance, agent, number)
            agent.checkpoint("warm")
        asyncio.run(agent.acheckpoint("async"))
        agent.undo()
        agent.tag("warm")


def live(job: dict[str, Any]) -> None:
    if job["durability"] == "transaction":
        paying_life(job["path"], job["name"], job["seed"])
    else:
        life(**job)


if __name__ == "__main__":
    with limits(SMALL):
        warm()
        serve(live)
