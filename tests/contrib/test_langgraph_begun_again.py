"""A message that is given again, since nothing of it was stored: what its subgraphs did is not done again."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests import warm

PROGRAM = """
import operator, os, signal, sys
from typing import Annotated, TypedDict
from langgraph.graph import START, StateGraph
import holdfast
from holdfast.contrib.langgraph import HoldfastSaver

kind, durability, killed = {"own": True, "inherits": None}[sys.argv[1]], sys.argv[2], sys.argv[3] == "killed"

class State(TypedDict, total=False):
    turn: int
    x: Annotated[list, operator.add]

@holdfast.tool
def book(what: str) -> str:
    with open("ledger", "a") as ledger:
        ledger.write(what + "\\n")
    return what

def step(name):
    return lambda state: {"x": [book(f"{name} {state['turn']}")]}

inner = StateGraph(State).add_node("one", step("one")).add_node("two", step("two"))
below = inner.add_edge(START, "one").add_edge("one", "two").compile(checkpointer=kind)

def sub(state):
    return {"x": below.invoke({"turn": state["turn"]})["x"][-2:]}

def last(state):
    if killed and state["turn"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"x": [book(f"last {state['turn']}")]}

builder = StateGraph(State).add_node("sub", sub).add_node("last", last).add_edge(START, "sub").add_edge("sub", "last")
graph = builder.compile(checkpointer=HoldfastSaver("store"))
config = {"configurable": {"thread_id": "t"}}
for turn in range(2):
    state = graph.get_state(config)
    if state.values.get("turn", -1) < turn or state.tasks:
        graph.invoke(None if state.tasks else {"turn": turn}, config, durability=durability if turn else "sync")
print(*graph.get_state(config).values["x"], sep=", ")
"""
DONE = [f"{what} {turn}" for turn in range(2) for what in ("one", "two", "last")]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["exit", "async", "sync"])
@pytest.mark.parametrize("kind", ["own", "inherits"])
def test_what_a_subgraph_did_is_not_done_again_when_its_message_is_given_again(tmp_path, kind, durability):
    (tmp_path / "program.py").write_text(PROGRAM)

    def lives(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "program.py", kind, durability, how]
        return warm.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert lives("killed").returncode == -signal.SIGKILL
    after = lives("to its end")
    assert after.stdout.strip() == ", ".join(DONE), after.stderr[-2_000:]
    assert (tmp_path / "ledger").read_text().splitlines() == DONE
