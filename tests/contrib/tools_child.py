"""Graphs whose nodes act outside, killed at work: every kind of node, subgraph and durability, for ever.

The program of a troupe, as ``kill_child`` is. What is done outside is written to a ledger that the store knows
nothing of, one line for each effect, flushed. A line that is there twice, or missing from a turn that has ended, is
what must not happen.
"""

from __future__ import annotations

import asyncio
import faulthandler
import operator
import os
import random
import signal
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from langchain_core.messages import AIMessage
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt

import holdfast
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import MaybeRepeated
from tests.lives import serve

HANGS_S = 120
TRIES = 50
LEDGER = Path()
CHANCE = random.Random()
RETRY = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=5, retry_on=ConnectionError)


KINDS = {"inherits": None, "own": True, "none": False}
"""Subgraphs: with the saver of the graph around, with a history of their own, and without any."""


class Here:
    """Where this life is, in a file for whoever counts where lives end."""

    def __init__(self) -> None:
        self.file = -1
        self.durability = ""

    def at(self, part: str) -> None:
        if self.file >= 0:
            os.pwrite(self.file, f"{part}, {self.durability}".ljust(40).encode(), 0)

    def choose(self) -> str:
        """How LangGraph stores what comes now."""
        self.durability = CHANCE.choice(["sync", "async", "exit"])
        return self.durability


HERE = Here()


def record(what: str) -> str:
    """Do something outside."""
    told = os.open(LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(told, f"{what}\n".encode())
    os.fdatasync(told)
    os.close(told)
    return f"did {what}"


def ledger() -> Counter[str]:
    return Counter(LEDGER.read_text().splitlines() if LEDGER.exists() else [])


def happened(effect: holdfast.Effect) -> Any:
    return holdfast.Found(f"did {effect.args['what']}") if ledger()[effect.args["what"]] else holdfast.Absent()


@holdfast.tool(probe=happened)
def book(what: str) -> str:
    """Book something."""
    return record(what)


@holdfast.tool(probe=happened)
async def abook(what: str) -> str:
    """Book something."""
    await asyncio.sleep(0)
    return record(what)


@holdfast.tool(effect="read")
def look(what: str) -> float:
    """Look at something."""
    return CHANCE.random()


def order(what: str) -> str:
    """Order something."""
    HERE.at("ToolNode")
    done = book(what)
    if CHANCE.random() < 0.1:
        HERE.at("RetryPolicy")
        raise ConnectionError(what)  # the node is tried again
    return done


class State(MessagesState, total=False):
    turn: int
    log: Annotated[list[str], operator.add]


def build(saver: Any) -> Any:
    def plan(state: State) -> Any:
        HERE.at("node")
        look(f"{state['turn']}")
        done = book(f"plan {state['turn']}")
        calls = [
            {"name": "order", "args": {"what": f"tool {state['turn']}.{n}"}, "id": f"{state['turn']}-{n}"}
            for n in range(3)
        ]
        return {"log": [done], "messages": [AIMessage("", tool_calls=calls)]}

    def spread(state: State) -> list[Send]:
        return [Send("work", {"turn": state["turn"], "n": n}) for n in range(2)]

    def work(state: Any) -> Any:
        HERE.at("Send")
        return {"log": [book(f"work {state['turn']}.{state['n']}")]}

    def inside(state: State) -> Any:
        done = book(f"inside {state['turn']}")
        if CHANCE.random() < 0.1:
            raise ConnectionError
        return {"log": [done]}

    def more(state: State) -> Any:
        return {"log": [book(f"more {state['turn']}")]}

    def inner(kind: bool | None) -> Any:
        graph = (
            StateGraph(State).add_node("inside", inside, retry_policy=RETRY if kind else None).add_node("more", more)
        )
        return graph.add_edge(START, "inside").add_edge("inside", "more").compile(checkpointer=kind)

    kinds = {name: inner(kind) for name, kind in KINDS.items()}

    def sub(name: str) -> Any:
        def node(state: State) -> Any:
            HERE.at(f"subgraph {name}")
            given = {"turn": f"{name} {state['turn']}", "messages": []}
            # LangGraph waits for a checkpoint of a graph that has none where the one around it is "sync".
            durability = "async" if name == "none" else None
            return {"log": kinds[name].invoke(given, durability=durability)["log"][-2:]}

        return node

    def ask(state: State) -> Any:
        HERE.at("interrupt")
        first = book(f"ask {state['turn']}")
        answer = interrupt(state["turn"])
        return {"log": [first, book(f"{answer} {state['turn']}")]}

    builder = StateGraph(State).add_node("plan", plan).add_node("work", work).add_node("ask", ask)
    builder.add_node("tools", ToolNode([order], handle_tool_errors=False), retry_policy=RETRY)
    builder.add_edge(START, "plan").add_edge("plan", "tools").add_conditional_edges("tools", spread, ["work"])
    last = "work"
    for name, kind in KINDS.items():
        # Around a history of its own, a retry resumes what an earlier turn's retry left: LangGraph's own, with any
        # saver. The guide says to put it inside.
        builder.add_node(name, sub(name), retry_policy=None if kind else RETRY)
        builder.add_edge(last, name)
        last = name
    builder.add_edge(last, "ask")
    return builder.compile(checkpointer=saver)


def expected(turn: int) -> list[str]:
    """What a turn does outside."""
    tools, works = [f"tool {turn}.{n}" for n in range(3)], [f"work {turn}.{n}" for n in range(2)]
    # LangGraph lets a subgraph with a history of its own go on from there when the graph around it is resumed, and
    # forgets what it was given: then it does nothing, whatever the saver. All that is known is what it must not repeat.
    subs = [f"{what} {name} {turn}" for name in KINDS if name != "own" for what in ("inside", "more")]
    return [f"plan {turn}", *tools, *works, *subs, f"ask {turn}", f"yes {turn}"]


def functional(saver: Any) -> Any:
    @task
    async def one(what: str) -> str:
        HERE.at("@task")
        return await abook(what)

    @entrypoint(checkpointer=saver)
    async def flow(turn: int) -> int:
        HERE.at("@entrypoint")
        await abook(f"flow {turn}")
        await asyncio.gather(*(one(f"task {turn}.{n}") for n in range(2)))
        await abook(f"end {turn}")
        return turn

    return flow


def check(saver: HoldfastSaver, thread: str, done: list[str]) -> None:
    """Raise unless the world, and what the store says of it, is what so many turns have made of it."""
    there = ledger()
    doubled = [what for what, count in there.items() if count > 1]
    missing = [what for what in done if not there[what]]
    if doubled or missing:
        raise ValueError(f"{thread}: done twice {doubled}, not done {missing}")
    if not done:
        return
    with closing(saver.store.agent(thread, readonly=True)) as agent:
        known = Counter(one.args["what"] for one in agent.effects() if one.kind == "write" and one.status == "done")
    if known - there or Counter(done) - known:
        raise ValueError(f"{thread}: recorded and not done {known - there}, not recorded {Counter(done) - known}")


def life(job: dict[str, Any]) -> None:
    """Go on for ever."""
    global LEDGER  # noqa: PLW0603 - one for each life
    LEDGER = Path(job["ledger"])
    HERE.file = os.open(f"{LEDGER}.where", os.O_WRONLY | os.O_CREAT, 0o600)
    CHANCE.seed(job["seed"])
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    # The default action of this signal ends the process at once, as SIGKILL does.
    signal.setitimer(signal.ITIMER_PROF, job["cpu_s"])
    saver, config = HoldfastSaver(job["store"]), {"configurable": {"thread_id": job["thread"]}}
    if job["functional"]:
        asyncio.run(flows(saver, config, job["thread"]))
    graph = build(saver)
    state = graph.get_state(config)
    while True:
        turn = state.values.get("turn", -1)
        given: Any = None
        if state.interrupts:
            if CHANCE.random() < 0.3:
                HERE.at("update_state")
                graph.update_state(config, {"log": ["edited"]})  # the node that asked is another task then
            given = Command(resume="yes")
        elif not state.tasks:
            check(saver, job["thread"], [what for one in range(turn + 1) for what in expected(one)])
            given = {"turn": turn + 1, "log": [], "messages": []}
        for tried in range(TRIES):
            try:
                graph.invoke(given, config, durability=HERE.choose())
                break
            except (ConnectionError, MaybeRepeated):
                # Where nothing is stored, the calls of a ToolNode are made anew, in any order: one that was not made
                # before may come first, and is stopped.
                if tried == TRIES - 1:
                    raise
                state = graph.get_state(config)
                given = given if not state.tasks else Command(resume="yes") if state.interrupts else None
        state = graph.get_state(config)


async def flows(saver: HoldfastSaver, config: Any, thread: str) -> None:
    flow, turn = functional(saver), 0
    while True:
        state = await flow.aget_state(config)
        turn = state.values + 1 if state.values is not None and state.values != {} else 0
        if not state.tasks:
            done = [f"{what} {one}" for one in range(turn) for what in ("flow", "end")]
            check(saver, thread, done + [f"task {one}.{n}" for one in range(turn) for n in range(2)])
        await flow.ainvoke(None if state.tasks else turn, config, durability=HERE.choose())


def warm() -> None:
    global LEDGER  # noqa: PLW0603 - as above
    with tempfile.TemporaryDirectory() as folder, HoldfastSaver(f"{folder}/store") as saver:
        LEDGER = Path(folder, "ledger")
        graph = build(saver)
        graph.invoke({"turn": 0, "messages": []}, {"configurable": {"thread_id": "warm"}})
        graph.invoke(Command(resume="yes"), {"configurable": {"thread_id": "warm"}})
        check(saver, "warm", expected(0))


if __name__ == "__main__":
    warm()
    serve(life)
