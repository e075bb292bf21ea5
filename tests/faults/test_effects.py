"""Whoever was stopped and taken over, and a world that gives no answer: nothing lost, nothing doubled.

The kills are campaigns of their own (tests/faults/effects.py).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from tests.faults import effects_child as child
from tests.faults.effects import Ended, Troupe
from tests.run.world import World


@pytest.fixture
def world(tmp_path):
    with World(tmp_path) as made:
        yield made


@pytest.fixture
def troupe(store_path, world):
    holdfast.open(store_path).close()
    made = Troupe(store_path, world.port)
    yield made
    made.close()


# -- zombies ------------------------------------------------------------------------------------------------


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def wait_until(true, what: str) -> None:
    ends = time.monotonic() + 180
    while not true():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


STOPPED = [
    (child.BEFORE_INTENT, "keyed"), (child.AFTER_INTENT, "keyed"), (child.BEFORE_RESULT, "keyed"),
    (child.BEFORE_INTENT, "probed"), (child.AFTER_INTENT, "probed"), (child.BEFORE_RESULT, "probed"),
    (child.AFTER_INTENT, "bare"), (child.BEFORE_RESULT, "bare"),
]  # fmt: skip


@pytest.mark.parametrize(("point", "kind"), STOPPED)
def test_a_process_that_was_stopped_taken_over_and_woken_doubles_nothing(troupe, world, monkeypatch, point, kind):
    scene = "bare" if kind == "bare" else "safe"
    ref = f"zombie/{kind}-1"
    monkeypatch.setattr(child.MOMENTS, "port", world.port)
    zombie = troupe.begin(scene=scene, agent="zombie", only=f"{point}|{kind}", how="SIGSTOP", told={})
    try:
        wait_until(lambda: stopped(zombie.pid), "it did not stop")
        with holdfast.open(troupe.path) as store:
            agent = store.agent("zombie", takeover=True)
            known = point == child.BEFORE_INTENT or kind == "keyed" or (kind, point) == ("probed", child.BEFORE_RESULT)
            if known:
                assert agent.run(getattr(child, scene).options(id="one"), "zombie") == "zombie done"
            else:
                # It may yet happen: that a probe finds nothing is not believed of somebody who lives.
                with pytest.raises(holdfast.InDoubt):
                    agent.run(getattr(child, scene).options(id="one"), "zombie")
                assert [run.status for run in agent.runs()] == ["needs attention"]
            os.kill(zombie.pid, signal.SIGCONT)
            life = Ended(zombie)
            assert "Fenced" in life.error, life.__dict__
            assert world.done(ref) == (0 if point == child.BEFORE_INTENT and not known else 1)
            if not known:
                if kind == "bare":
                    (doubtful,) = [effect for effect in agent.effects() if effect.status == "in doubt"]
                    agent.resolve(doubtful, "done", result={"ref": ref}, why="looked at the books")
                assert agent.run(getattr(child, scene).options(id="one"), "zombie") == "zombie done"
            assert world.done(ref) == 1
            assert store.verify().ok
    finally:
        with suppress(ProcessLookupError):
            os.kill(zombie.pid, signal.SIGCONT)


def test_a_world_that_hangs_up_answers_late_or_refuses_leaves_nothing_doubled(store_path, world):
    """Timeouts and failures instead of kills, in one process."""
    from tests.run.world import Client

    troubles: list[dict] = []

    def ask(ref, **more):
        trouble = troubles.pop()
        client = Client(world.port, **({"timeout_s": 0.2} if "late" in trouble else {}))
        return client.post("/do", ref=ref, key=holdfast.effect().key, **trouble, **more)

    def find(effect):
        found = Client(world.port).post("/find", key=effect.key)
        return holdfast.Absent() if found is None else holdfast.Found(found)

    @holdfast.tool(effect="idempotent", retries=3)
    def book(ref):
        return ask(ref, keyed=True)

    @holdfast.tool(probe=find, retries=3)
    def order(ref):
        return ask(ref)

    @holdfast.tool
    def pay(ref):
        return ask(ref)

    @holdfast.durable
    def work(agent, tool, ref):
        return {"book": book, "order": order, "pay": pay}[tool](ref)["ref"]

    with holdfast.open(store_path) as store:
        for fault in ({"fault": "before"}, {"fault": "after"}, {"fault": "error"}):
            for tool in ("book", "order"):
                ref = f"{tool}-{fault['fault']}"
                troubles[:] = [{}, fault, fault]
                assert store.agent(ref).run(work, tool, ref) == ref
                assert world.done(ref) == 1
            troubles[:] = [fault]
            ref = f"pay-{fault['fault']}"
            with pytest.raises(holdfast.InDoubt):
                store.agent(ref).run(work, "pay", ref)
            assert world.done(ref) == (fault["fault"] == "after")
        # An answer that comes too late: the world does it after the caller has given up. Only a key helps then.
        troubles[:] = [{}, {"late": True}]
        assert store.agent("late").run(work, "book", "late") == "late"
        wait_until(lambda: len(world.keys("late")) == 2, "it was not asked for twice")
        assert world.done("late") == 1
