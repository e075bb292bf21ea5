"""A program whose runs are recorded and executed again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import holdfast

MOOD = {"fail": False, "noise": False, "extra": False}
FARES = {}


@holdfast.tool(effect="read")
def trip_price(flight: str) -> int:
    return 100 * len(flight)


@holdfast.tool(effect="read", raises=(LookupError,))
def trip_weather(town: str) -> str:
    if town == "nowhere":
        raise LookupError(town)
    return f"sun in {town}"


@holdfast.tool
def trip_book(flight: str, amount: int) -> str:
    return f"seat on {flight}"


@holdfast.tool
def trip_draw(path: str) -> str:
    Path(path).write_text("drawn")
    return "drawn"


@holdfast.tool(effect="read")
async def trip_look(town: str, seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return town.upper()


@holdfast.tool(effect="read", stream=True)
def words(text: str):
    yield from text.split()


@holdfast.tool
def trip_make(path: str, text: str) -> None:
    Path(path).write_text(f"{text} by a tool")


@holdfast.durable
def travel(agent, flight):
    agent.state["budget"] = 500
    agent.state["messages"] = [f"fly {flight}"]
    agent.checkpoint("planned")
    cost = trip_price(flight)
    agent.state["budget"] -= cost
    agent.checkpoint("priced")
    if agent.state["budget"] < 0:
        agent.state["messages"].append("too dear")
        raise ValueError("over budget")
    agent.state["seat"] = trip_book(flight, cost)
    return agent.state["seat"]


@holdfast.durable
def varied(agent, towns):
    state = agent.state
    state["log"] = []
    rng = agent.generator("dice", random.Random(7))
    for town in towns:
        with agent.phase(town):
            state["log"].append([agent.now(), agent.random(), str(agent.uuid()), rng.random()])
            try:
                state["log"].append(trip_weather(town))
            except LookupError as error:
                state["log"].append(f"no {error}")
            state["log"].append(list(words(f"to {town} and back")))
        agent.step()
    agent.sleep(0.01)
    agent.checkpoint("all seen")
    if agent.version("polite"):
        state["log"].append("thanks")
    state["end"] = agent.now()
    return state["log"][-1]


@holdfast.tool(effect="read")
def trip_fare(town: str) -> int:
    return FARES.get(town, 100)


@holdfast.tool(effect="read")
def trip_mood() -> str:
    if FARES.get("mood") == "gone":
        raise KeyboardInterrupt
    return FARES.get("mood", "")


@holdfast.tool(effect="read")
async def trip_queue(town: str) -> str:
    await asyncio.sleep(FARES.get(town, 0.0))
    return town.upper()


@holdfast.durable
def shop(agent, towns):
    """Buys what is cheap, as far as it gets. What it is told differs from one execution to the next."""
    state = agent.state
    state["left"], state["seats"] = 1000, []
    agent.checkpoint("began")
    for town in towns:
        fare = trip_fare(town)
        state["left"] -= fare
        agent.checkpoint(town)
        if fare < 150:
            state["seats"].append(trip_book(town, fare))
            if fare < 50:
                state["seats"].append(trip_weather(town))
    if trip_mood() == "bad":
        raise ValueError("no more")
    state["home"] = True
    return state["left"]


@holdfast.durable
async def shops(agent, towns):
    agent.state["seen"] = []
    agent.checkpoint("began")

    async def visit(town):
        agent.state["seen"].append(await trip_queue(town))

    async with asyncio.TaskGroup() as group:
        for town in towns:
            group.create_task(visit(town))
    agent.checkpoint("seen")
    return agent.state["seen"][0]


@holdfast.durable
async def crowd(agent, towns):
    state = agent.state
    state["seen"] = []

    async def visit(town, delay):
        state["seen"].append(await trip_look(town, delay))
        await agent.acheckpoint(town)
        if len(state["seen"]) % 2:
            state["seen"].append(agent.random())
        return town

    state["back"] = await asyncio.gather(*(visit(town, 0.01 * (i % 3)) for i, town in enumerate(towns)))
    try:
        async with asyncio.timeout(0.05):
            await trip_look("far away", 30)
    except TimeoutError:
        state["seen"].append("too far")
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(visit("slow", 20))
            group.create_task(broken(state))
    except* KeyError:
        state["seen"].append("broken")
    agent.checkpoint("home")
    first = asyncio.create_task(trip_look("a", 0.02))
    second = asyncio.create_task(trip_look("b", 0.01))
    done, rest = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    state["first"] = sorted(task.result() for task in done)
    await asyncio.gather(*rest)
    return len(state["seen"])


async def broken(state):
    await trip_look("there", 0.01)
    state["seen"].append("about to break")
    raise KeyError("broken")


@holdfast.durable
def moody(agent, way):
    agent.state["way"] = way
    agent.checkpoint("began")
    if way == "file":
        Path(os.environ["TRIPS_OUTSIDE"]).write_text("here")
    elif way == "socket":
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", 9), timeout=1)
    elif way == "process":
        subprocess.run(["true"], check=True)
    elif way == "clock":
        agent.state["now"] = time.time()
    elif way == "code":
        trip_price("AA" if MOOD["noise"] else "AAA")
    elif way == "files":
        trip_draw(str(agent.workspace / "drawn.txt"))
        (agent.workspace / "kept.txt").write_text((agent.workspace / "old.txt").read_text() + " and new")
        agent.checkpoint("drawn")
        agent.state["seen"] = sorted(one.read_text() for one in agent.workspace.iterdir())
    elif way == "relative":
        agent.state["old"] = Path("tree", "old.txt").read_text()
    elif way.startswith("written"):
        trip_make(str(agent.workspace / "made.txt"), way)
        if way == "written later":
            agent.checkpoint("made")
        agent.state["seen"] = (agent.workspace / "made.txt").read_text()
    elif way == "scratch":
        Path("note.txt").write_text("mine")
        agent.state["note"] = Path("note.txt").read_text()
    agent.checkpoint("ended")


@holdfast.durable
def busy(agent, way):
    agent.state["n"] = 0
    agent.checkpoint("one")
    if way == "tag":
        agent.tag("named")
        agent.untag("named")
    elif way == "branch":
        agent.branch("aside")
    elif way == "logs":
        logger = logging.getLogger("busy")
        logger.addHandler(handler := agent.log_handler())
        logger.error("something is wrong")
        logger.removeHandler(handler)
        agent.metrics()(queue=3)
    agent.state["n"] = 1
    agent.checkpoint("two")
    if way == "back":
        agent.rollback("one")


@holdfast.durable
def party(agent, flights):
    children = [agent.spawn(travel, flight, flight) for flight in flights]
    agent.state["seats"] = []
    for child in children:
        try:
            agent.state["seats"].append(child.join())
        except holdfast.errors.ToolFailed as error:
            agent.state["seats"].append(str(error).partition(":")[0])
        agent.checkpoint("joined")
    return len(children)


@holdfast.durable
def guarded(agent, price):
    agent.invariant("left >= 0", then="refuse")
    agent.invariant("spent", monotonic="up", name="spent goes up")
    agent.state.update(left=500, spent=10)
    agent.checkpoint("began")
    cost = trip_price(price)
    agent.state.update(left=500 - cost, spent=cost)
    try:
        agent.checkpoint("paid")
    except holdfast.errors.InvariantViolated:
        agent.state["left"] = 0
        agent.checkpoint("mended")
    if cost > 600:
        raise ValueError("too dear")


@holdfast.durable
def remember(agent, documents):
    state = agent.state
    for at, text in enumerate(documents):
        state.setdefault("facts", {})[f"f{at}"] = text
    state["total"] = 0
    for fact in list(state["facts"].values()):
        state["total"] += scored(fact)
        agent.checkpoint("counted")
    if any("poison" in fact for fact in state["facts"].values()) and "f2" in state["facts"]:
        state["total"] = -1
    agent.checkpoint("done")
    return state["total"]


def scored(fact):
    return len(fact)
