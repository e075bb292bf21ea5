"""A message that is given again, since nothing of it was stored: what its subgraphs did is not done again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

PROGRAM = """
import operator, os, signal, sys, threading
from typing import Annotated, TypedDict
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy
import holdfast
from holdfast.contrib.langgraph import HoldfastSaver

kind, durability = {"own": True, "inherits": None}[sys.argv[1]], sys.argv[2]
end, _, node = sys.argv[3].partition(" in ")
CONFIG = {"configurable": {"thread_id": "t"}}

class State(TypedDict, total=False):
    turn: int
    x: Annotated[list, operator.add]

@holdfast.tool
def book(what: str) -> str:
    with open("ledger", "a") as ledger:
        ledger.write(what + "\\n")
    return what

def ends_here(state, name):
    global end
    if name != node or not state["turn"]:
        return
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    how, end = end, ""
    if how in {"fails", "retried"}:
        raise {"fails": ValueError, "retried": ConnectionError}[how]

class Saver(HoldfastSaver):
    def put(self, config, checkpoint, metadata, versions):
        stored = super().put(config, checkpoint, metadata, versions)
        begun = metadata["source"] == "input" and config["configurable"]["checkpoint_ns"] == "sub"
        if begun and end == "killed" and node == "sub":
            os.kill(os.getpid(), signal.SIGKILL)
        return stored

def step(name):
    def act(state):
        if node == "sub" and end == "killed" and state["turn"]:
            threading.Event().wait()  # until what the graph was given is stored
        ends_here(state, name)
        return {"x": [book(f"{name} {state['turn']}")]}
    return act

inner = StateGraph(State).add_node("one", step("one")).add_node("two", step("two"))
below = inner.add_edge(START, "one").add_edge("one", "two").compile(checkpointer=kind)

def sub(state):
    return {"x": below.invoke({"turn": state["turn"]})["x"][-2:]}

retry = RetryPolicy(initial_interval=0.001, retry_on=ConnectionError)
builder = StateGraph(State).add_node("sub", sub, retry_policy=retry).add_node("last", step("last"))
saver = Saver("store")
graph = builder.add_edge(START, "sub").add_edge("sub", "last").compile(checkpointer=saver)
for turn in range(2):
    state = graph.get_state(CONFIG)
    if state.values.get("turn", -1) < turn or state.tasks:
        graph.invoke(None if state.tasks else {"turn": turn}, CONFIG, durability=durability if turn else "sync")
print(*graph.get_state(CONFIG).values["x"], sep=", ")
"""
DONE = [f"{what} {turn}" for turn in range(2) for what in ("one", "two", "last")]


def live(folder: Path, kind: str, durability: str, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", kind, durability, how]
    return warm.run(command, loaded=warm.LANGGRAPH, cwd=folder, capture_output=True, text=True, check=False)


def check_done_once(folder: Path, life: subprocess.CompletedProcess[str]) -> None:
    assert life.stdout.strip() == ", ".join(DONE), life.stderr[-2_000:]
    assert (folder / "ledger").read_text().splitlines() == DONE


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["exit", "async", "sync"])
@pytest.mark.parametrize("kind", ["own", "inherits"])
def test_what_a_subgraph_did_is_not_done_again_when_its_message_is_given_again(tmp_path, kind, durability):
    assert live(tmp_path, kind, durability, "killed in last").returncode == -signal.SIGKILL
    check_done_once(tmp_path, live(tmp_path, kind, durability, "to its end"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("durability", "how"),
    [("sync", "killed in sub"), ("sync", "killed in two"), ("exit", "fails in two"), ("sync", "retried in two")],
)
def test_what_a_subgraph_did_is_not_done_again_when_it_ends_once_more_before_it_asks_for_that(
    tmp_path, durability, how
):
    """Its history says then that it was given the message again: what it did before that is not known there."""
    assert live(tmp_path, "own", "exit", "killed in last").returncode == -signal.SIGKILL
    life = live(tmp_path, "own", durability, how)
    if "retried" not in how:
        assert life.returncode == (-signal.SIGKILL if "killed" in how else 1), life.stderr[-2_000:]
        life = live(tmp_path, "own", durability, "to its end")
    check_done_once(tmp_path, life)
