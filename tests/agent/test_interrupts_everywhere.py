"""Two interrupts in a row, anywhere in the caller's path: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import gc
import os
import random
import sys

import pytest

from holdfast.agent import branch
from holdfast.agent.store import Store, open_as
from holdfast.errors import HoldfastError
from holdfast.store.changes import NewRecord

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))


class Stop(BaseException):
    """What a signal handler raises."""


def interrupted(work, at: int) -> int:
    """Do ``work``, raising at one of the places where Python runs signal handlers; how many there were.

    These are the beginnings of functions, and the returns of calls to C.
    """
    came = 0

    def look(frame, event, _arg):
        nonlocal came
        if event in ("call", "c_return") and "/holdfast/" in frame.f_code.co_filename:
            came += 1
            if came == at:
                sys.setprofile(None)
                raise Stop

    gc.disable()  # what a handler raises in a destructor reaches nobody
    try:
        sys.setprofile(look)
        work()
    except Stop:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return came


def checkpoint(agent) -> None:
    agent.state["log"].append(len(agent.state["log"]))
    agent.checkpoint("step")


def sealed(agent) -> None:
    agent.state["log"].append(len(agent.state["log"]))
    agent.state["table"] = {f"{n}": "x" * 200 for n in range(200)}
    agent.checkpoint("step")


def bulk(agent) -> None:
    agent.state["log"].append(len(agent.state["log"]))
    agent.state["big"] = len(agent.state["log"]).to_bytes(4, "big") * 80_000
    agent.checkpoint("step")


def record(agent) -> None:
    agent._writer.append([NewRecord(1, b"", os.urandom(8)), NewRecord(0, b"", b"two")], flush=True)


@pytest.mark.parametrize("durability", ["commit", "batched"])
@pytest.mark.parametrize("work", [checkpoint, sealed, bulk, record])
def test_two_interrupts_lose_and_double_nothing(tmp_path, monkeypatch, work, durability):
    if work is sealed:
        monkeypatch.setattr(branch, "SEAL_CHECKPOINTS", 2)
    rng = random.Random(f"{work.__name__}{durability}")
    path = tmp_path / "store"
    expected = {}
    with open_as(Store, path, durability=durability) as store:
        whole = begun(store, "whole")
        points = interrupted(lambda: work(whole), 0)
        every = range(1, points + 1) if SOAK else sorted(rng.sample(range(1, points + 1), min(points, 40)))
        for first in every:
            for second in range(1, points + 1) if SOAK else rng.sample(range(1, points + 1), 3):
                agent = begun(store, f"{first} {second}")
                interrupted(lambda agent=agent: work(agent), first)
                interrupted(lambda agent=agent: agent.checkpoint("between"), second)
                agent.state["log"].append("last")
                calm(agent)
                assert not agent.dirty
                expected[agent.name] = list(agent.state["log"]), agent.head.id, agent._writer.branch.records
                agent.close()
    with open_as(Store, path) as store:
        for name, (log, head, records) in expected.items():
            agent = store.agent(name, readonly=True)
            assert list(agent.state["log"]) == log
            assert agent.head.id == head
            history = agent.log()
            assert [one.depth for one in history] == list(range(len(history), 0, -1))
            assert len({one.id for one in history}) == len(history)
            found = list(branch.read_line(store._db.view, agent._branch.b))
            assert len(found) == records in (0, 2)


def begun(store, name):
    agent = store.agent(name)
    agent.state["log"] = [0]
    agent.checkpoint("begin")
    return agent


def calm(agent) -> None:
    """What was interrupted may be told once more; then everything works."""
    try:
        agent.checkpoint("last")
    except HoldfastError:
        agent.checkpoint("last")
    agent.flush()
