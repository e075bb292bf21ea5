"""A program with a policy, that is killed anywhere. The outside is a file: one line for each booking that was made.

python -m tests.run.when_child STORE OUTSIDE POLICY HOW SEED FATAL
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import holdfast
from holdfast import Absent, Found, When
from holdfast.agent import points
from tests import lives
from tests.lives import point

ROUNDS = 6
POLICIES = {
    "none": None,
    "default": When(adaptive=True),
    "every step": When(every_steps=1),
    "every third step": When(every_steps=3),
    "time": When(every_s=2.5),
    "bytes": When(changed_bytes=150),
    "adaptive": When(adaptive=True, min_s=1, max_s=3),
    "phases": When(at_phase=True),
    "around writes": When(before="write", after="write"),
    "all at once": When(
        every_s=0.001, every_steps=2, before="write", after="write", changed_bytes=50, at_phase=True,
    ),
    "background": When(every_steps=1, background=True),
}  # fmt: skip
NOTE = "x" * 60
"""A round adds at least so much to what is to be saved, and takes a second by the clock of policies."""
now_s = 1_000.0
outside = Path()
begun = Path()
durable = Path()
seed = ""


def look(effect):
    made = outside.read_text().split() if outside.exists() else ()
    number = effect.args["number"]
    return Found(number) if str(number) in made else Absent()


@holdfast.tool(name="when.look", effect="read")
def look_around(number):
    return f"seen in {number}"


@holdfast.tool(name="when.book", probe=look)
def book(number):
    point()
    with outside.open("a") as file:
        file.write(f"{number}\n")
    point()
    return number


def work(agent, number):
    """One round, another one for each seed. Both halves are there in any state that is saved, or none."""
    global now_s  # noqa: PLW0603 - a clock
    now_s += 1.0
    chance = random.Random(f"{seed}/{number}")
    with agent.phase(f"round {number}"):
        point()
        if chance.random() < 0.3:
            fails(agent, number)
        with agent.atomic():
            agent.state["first"] = number
            point()
            for part in range(chance.randrange(1, 3)):
                with agent.atomic() if chance.random() < 0.5 else nullcontext():
                    agent.state.setdefault("booked", []).append(book(10 * number + part))
                    point()
            agent.state["second"] = number
        point()
        if chance.random() < 0.3:
            agent.state["seen"] = look_around(number)
        agent.state.setdefault("notes", []).append(NOTE)
        agent.state["rounds"] = number + 1
    if chance.random() < 0.3:
        agent.gate("round", lambda state: state["first"] == state["second"])
    with begun.open("a") as file:  # what has been worked for
        file.write(f"{number}\n")


def fails(agent, number):
    with suppress(ValueError), agent.phase("fails"):
        agent.state["failed"] = number
        point()
        raise ValueError("on purpose")


def booked():
    """What all rounds book together."""
    chances = [(number, random.Random(f"{seed}/{number}")) for number in range(ROUNDS)]
    found = []
    for number, chance in chances:
        chance.random()
        found += [10 * number + part for part in range(chance.randrange(1, 3))]
    return found


def saved(made):
    """What a step has given is durable, unless the policy says that nobody waits for it."""
    if made is not None and not (agent.when is not None and agent.when.background):
        with durable.open("a") as file:
            file.write(f"{made.id}\n")


def loop(agent):
    with agent:
        for number in range(agent.state.get("rounds", 0), ROUNDS):
            work(agent, number)
            saved(agent.step())
            point()


def bare(agent):
    """The booking first, then the state: what a checkpoint at the call would come between."""
    with agent:
        for number in range(agent.state.get("rounds", 0), ROUNDS):
            agent.state[f"booking {number}"] = book(number)
            point()
            agent.state["rounds"] = number + 1
            saved(agent.step())
            point()


async def beside(agent):
    """As bare(), and all the while another task changes the state and comes to safe points of its own."""
    over = asyncio.Event()

    async def other():
        number = 0
        while not over.is_set():
            with agent.atomic():
                agent.state["first"] = number
                await asyncio.sleep(0)
                point()
                agent.state["second"] = number = number + 1
            saved(await agent.astep())
            await asyncio.sleep(0)

    async with agent:
        task = asyncio.create_task(other())
        for number in range(agent.state.get("rounds", 0), ROUNDS):
            answer = await book.acall(number)
            await asyncio.sleep(0)
            point()
            agent.state[f"booking {number}"] = answer
            agent.state["rounds"] = number + 1
            saved(await agent.astep())
            await asyncio.sleep(0)
        over.set()
        await task


async def aloop(agent):
    async with agent:
        for number in range(agent.state.get("rounds", 0), ROUNDS):
            work(agent, number)
            saved(await agent.astep())
            point()


@holdfast.durable
def run(agent):
    for number in range(ROUNDS):
        work(agent, number)
        saved(agent.step())
        point()
    return "finished"


@holdfast.durable
async def arun(agent):
    for number in range(ROUNDS):
        await asyncio.sleep(0)
        work(agent, number)
        saved(await agent.astep())
        point()
    return "finished"


if __name__ == "__main__":
    place, there, policy, how, seed, fatal = sys.argv[1:]
    outside, begun, durable = Path(there), Path(f"{there}.begun"), Path(f"{there}.durable")
    points.monotonic = lambda: now_s
    store = holdfast.open(place)
    agent = store.agent("trip-7", when=POLICIES[policy])
    if fatal != "0":
        lives.doom(int(fatal), *lives.CHANGES)
    if how in {"loop", "bare"}:
        (loop if how == "loop" else bare)(agent)
    elif how in {"async loop", "beside"}:
        asyncio.run((aloop if how == "async loop" else beside)(agent))
    elif how == "run":
        agent.run(run.options(id="1"))
    else:
        asyncio.run(agent.arun(arun.options(id="1")))
    if POLICIES[policy] is None:
        agent.checkpoint()
    store.flush()
    os._exit(0)
