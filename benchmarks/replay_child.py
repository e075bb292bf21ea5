"""The program whose runs benchmarks/replay.py records and executes again: random, but the same for the same seed."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import holdfast


@holdfast.tool(effect="read")
def ask(what: str, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return f"answer to {what}"


@holdfast.tool
def do(what: str, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return len(what)


@holdfast.tool(effect="read", raises=(LookupError,))
async def fetch(what: str, seconds: float) -> str:
    await asyncio.sleep(seconds)
    if what.endswith("7"):
        raise LookupError(what)
    return what[::-1]


def body(tools: tuple[Any, Any], state: Any, save: Any, calls: int, seconds: float, write_every: int = 10) -> int:
    """So many calls that take so long; the same with tools that are recorded, and with plain functions."""
    ask, do = tools
    state["log"], state["sum"] = [], 0
    for at in range(calls):
        if write_every and at % write_every == write_every - 1:
            state["sum"] += do(f"thing {at}", seconds)
            save("after a write")
        else:
            state["log"].append(ask(f"question {at}", seconds))
    return int(state["sum"])


@holdfast.durable
def steady(agent: Any, calls: int, seconds: float, write_every: int = 10) -> int:
    return body((ask, do), agent.state, agent.checkpoint, calls, seconds, write_every)


@holdfast.durable
def alone(agent: Any, seed: int) -> int:
    """Single-threaded: phases, time, chance, failures that are dealt with."""
    dice, state = random.Random(seed), agent.state
    state["items"] = {}
    for at in range(dice.randint(5, 25)):
        kind = dice.randrange(6)
        with agent.phase(f"part {kind}"):
            if kind == 0:
                state["items"][at] = [agent.now(), agent.random()]
            elif kind == 1:
                state["items"][at] = ask(f"{seed} {at}")
            elif kind == 2:
                state["items"][at] = do("x" * dice.randint(1, 9))
            elif kind == 3:
                state["items"].pop(at - 2, None)
            elif kind == 4:
                agent.checkpoint(f"at {at}")
            else:
                agent.step()
    return len(state["items"])


@holdfast.durable
async def several(agent: Any, seed: int) -> int:
    """asyncio: tasks in tasks, timeouts, groups that fail, whoever is first."""
    dice, state = random.Random(seed), agent.state
    state["seen"] = []

    async def one(name: str, depth: int) -> str:
        try:
            async with asyncio.timeout(dice.choice((0.004, 0.05, 5))):
                state["seen"].append(await fetch(name, dice.choice((0, 0.001, 0.005, 0.01))))
        except (LookupError, TimeoutError) as error:
            state["seen"].append(type(error).__name__)
        if depth and dice.random() < 0.4:
            await asyncio.gather(*(one(f"{name}.{n}", depth - 1) for n in range(dice.randint(1, 3))))
        if dice.random() < 0.2:
            await agent.acheckpoint(name)
        return name

    for at in range(dice.randint(1, 4)):
        kind = dice.randrange(3)
        if kind == 0:
            await asyncio.gather(*(one(f"{at}-{n}", 2) for n in range(dice.randint(1, 5))))
        elif kind == 1:
            try:
                async with asyncio.TaskGroup() as group:
                    for n in range(dice.randint(1, 4)):
                        group.create_task(one(f"{at}+{n}", 1))
                    if dice.random() < 0.5:
                        group.create_task(failing(state, dice.choice((0.001, 0.004))))
            except* ValueError:
                state["seen"].append("group")
        else:
            tasks = [asyncio.create_task(one(f"{at}w{n}", 0)) for n in range(dice.randint(2, 4))]
            done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            state["seen"].append(sorted(task.result() for task in done))
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        agent.checkpoint(f"round {at}")
    return len(state["seen"])


async def failing(state: Any, seconds: float) -> None:
    await fetch("soon", seconds)
    state["seen"].append("fails")
    raise ValueError("fails")
