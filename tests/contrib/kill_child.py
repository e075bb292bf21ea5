"""Graphs that are killed at work: subgraphs, ``Send``, interrupts and pending writes, for ever.

The program of a troupe (tests/lives.py). A life looks at what the thread has, goes on with it, and writes down outside
of the store, flushed, what each ``invoke`` returned. The kernel ends it when it has used as much processor time as the
job says, on the spot and whatever it does: how busy the machine is changes nothing.
"""

from __future__ import annotations

import faulthandler
import json
import operator
import os
import random
import signal
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt

import holdfast.store.postgres  # noqa: F401 - so that no life is spent on it
from holdfast.contrib.langgraph import HoldfastSaver
from tests.lives import serve

WORKERS = 3
PER_TURN = WORKERS + 4
HANGS_S = 120


class State(TypedDict, total=False):
    turn: int
    log: Annotated[list[str], operator.add]


class Inner(TypedDict, total=False):
    turn: int
    seen: Annotated[list[str], operator.add]
    log: Annotated[list[str], operator.add]


def expected(turns: int) -> list[str]:
    """The whole log after so many turns. Nothing in it is there twice, so it says what is lost, doubled or moved."""
    return [
        text
        for turn in range(turns)
        for text in (
            f"ask {turn}", f"plan {turn}", *(f"work {turn}.{number}" for number in range(WORKERS)),
            f"looked {turn}, yes {turn}", f"end {turn}",
        )
    ]  # fmt: skip


def build(saver: Any) -> Any:
    def look(state: Inner) -> Inner:
        return {"seen": [f"looked {state['turn']}"]}

    def ask(state: Inner) -> Inner:
        return {"log": [f"{state['seen'][-1]}, {interrupt(state['turn'])}"]}

    def plan(state: State) -> State:
        return {"log": [f"plan {state['turn']}"]}

    def spread(state: State) -> list[Send]:
        return [Send("work", {"turn": state["turn"], "number": number}) for number in range(WORKERS)]

    def work(state: Any) -> State:
        return {"log": [f"work {state['turn']}.{state['number']}"]}

    def end(state: State) -> State:
        return {"log": [f"end {state['turn']}"]}

    inner = StateGraph(Inner).add_node("look", look).add_node("ask", ask)
    inner.add_edge(START, "look").add_edge("look", "ask")

    def sub(state: State) -> State:
        return {"log": below.invoke({"turn": state["turn"]})["log"]}

    below = inner.compile()
    builder = StateGraph(State).add_node("plan", plan).add_node("work", work).add_node("sub", sub).add_node("end", end)
    builder.add_edge(START, "plan").add_conditional_edges("plan", spread, ["work"])
    builder.add_edge("work", "sub").add_edge("sub", "end")
    return builder.compile(checkpointer=saver)


def digest(log: list[str]) -> str:
    return blake2b(json.dumps(log).encode(), digest_size=12).hexdigest()


def look(graph: Any, saver: HoldfastSaver, config: Any, record: Path) -> Any:
    """The thread's state, after a look at whether it is whole.

    Everything that an ``invoke`` returned is there, and nothing that the graph has not done, or that it has done twice.
    """
    held = saver.get_tuple(config)
    log = held.checkpoint["channel_values"].get("log", []) if held is not None else []
    everything = expected(len(log) // PER_TURN + 2)
    if log != everything[: len(log)]:
        raise ValueError(f"the log is not what the graph does: {log[-12:]}")
    for line in record.read_bytes().split(b"\n")[:-1] if record.exists() else []:  # the last one may be cut short
        count, was = json.loads(line)
        if len(log) < count or digest(log[:count]) != was:
            raise ValueError(f"an invoke returned {count} entries, {len(log)} are there")
    # What the tasks of the next step have written comes on top, as far as they have ended.
    state = graph.get_state(config)
    more = state.values.get("log", [])[len(log) :]
    if len(set(more)) != len(more) or not set(more) <= set(everything[len(log) : len(log) + WORKERS]):
        raise ValueError(f"tasks have written {more} after {log[-3:]}")
    return state


def life(job: dict[str, Any]) -> None:
    """Look, then go on for ever. A job may end it while it looks."""
    record, chance = Path(job["record"]), random.Random(job["seed"])
    faulthandler.dump_traceback_later(HANGS_S, exit=True)  # one that waits for ever uses no processor time
    # The default action of this signal ends the process at once, as SIGKILL does.
    ends = lambda: signal.setitimer(signal.ITIMER_PROF, job["cpu_s"])  # noqa: E731
    if job["early"]:
        ends()
    # A server may take a moment to notice that somebody is gone.
    saver = HoldfastSaver(job["store"], wait_s=HANGS_S / 2 if "://" in job["store"] else 0)
    graph = build(saver)
    config: Any = {"configurable": {"thread_id": job["thread"]}}
    state = look(graph, saver, config, record)
    if job["verify"] and not saver.store.verify().ok:
        raise ValueError(f"the store is damaged: {saver.store.verify()}")
    if not job["early"]:
        ends()
    told = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        durability = chance.choice(["sync", "async", "exit"])
        turn = len(state.values.get("log", [])) // PER_TURN
        given: Any = None
        if state.interrupts:
            given = Command(resume=f"yes {turn}")
        elif not state.tasks:  # ``next`` leaves out those that have done their work in a step that has not ended
            given = {"turn": turn, "log": [f"ask {turn}"]}
        log = graph.invoke(given, config, durability=durability)["log"]
        os.write(told, f"{json.dumps([len(log), digest(log)])}\n".encode())
        os.fdatasync(told)
        state = look(graph, saver, config, record)


def warm() -> None:
    with tempfile.TemporaryDirectory() as folder, HoldfastSaver(f"{folder}/store") as saver:
        graph = build(saver)
        graph.invoke({"turn": 0, "log": ["ask 0"]}, {"configurable": {"thread_id": "warm"}})
        done = graph.invoke(Command(resume="yes 0"), {"configurable": {"thread_id": "warm"}})
        if done["log"] != expected(1):
            raise ValueError(done)


if __name__ == "__main__":
    warm()
    serve(life)
