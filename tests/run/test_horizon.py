"""A run starts as quickly on a long line as on a short one, and knows as much as if it had read all of it."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast.errors import Diverged, HoldfastError, RunEnded, Waiting
from holdfast.run.claims import Loop, key_in
from holdfast.run.host import position_of
from holdfast.run.past import Past
from tests.conftest import SOAK, unsaved
from tests.run.bench import Crash


class Outside:
    """What was really done, and what is to go wrong next."""

    def __init__(self):
        self.done = []
        self.keys = []
        self.trouble = ""

        def cancel(effect):
            self.done.remove(effect.args["what"])

        @holdfast.tool(compensate=cancel, probe=lambda effect: holdfast.Absent())
        def pay(what):
            if self.trouble == "crash before":
                raise Crash
            self.done.append(what)
            self.keys.append(holdfast.effect().key)
            if self.trouble == "crash after":
                raise Crash
            return f"paid {what}"

        @holdfast.durable
        def job(agent, what):
            agent.state["last"] = what
            if self.trouble == "wait":
                agent.wait_for("go")
            answer = pay(what)
            if self.trouble == "fail":
                raise ValueError(what)
            return answer

        self.pay, self.job = pay, job


@pytest.fixture
def outside():
    return Outside()


def read_from(agent) -> int:
    """The number of the first record that the agent's next run reads."""
    return next((number for number, _ in agent._host.ledger.recent(position_of(agent.head))), 0)


def test_a_run_reads_nothing_from_before_the_run_before_it(reopened, outside):
    store = reopened()
    agent = store.agent("a")
    for number in range(30):
        agent.run(outside.job, str(number))
    count = agent._host.ledger.count
    assert count > 90
    assert read_from(agent) > count - 6
    assert read_from(reopened().agent("a")) > count - 6


def test_an_id_is_known_however_long_ago_it_was(reopened, outside, tmp_path):
    agent = reopened().agent("a")
    assert agent.run(outside.job.options(id="first"), "x") == "paid x"
    before = agent.checkpoint("before")
    agent.run(outside.job.options(id="undone"), "y")
    agent.rollback(before)
    for number in range(5):
        agent.run(outside.job, str(number))
    store = reopened()
    with holdfast.open(tmp_path / "other") as other:
        store.push(other)
        places = [store.agent("a"), store.agent("a").branch("aside", at=store.agent("a").head), other.agent("a")]
        for place in places:
            place.run(outside.job, "more")
            place.run(outside.job, "and more")
            assert read_from(place) > 10
            assert place.run(outside.job.options(id="first"), "x") == "paid x"
            with pytest.raises(RunEnded, match="rolled back"):
                place.run(outside.job.options(id="undone"), "y")
    assert outside.done.count("x") == 1


def test_a_run_that_is_begun_again_on_purpose_has_other_keys(reopened, outside):
    agent = reopened().agent("a")
    for number in range(3):
        before = agent.checkpoint("before")
        agent.run(outside.job.options(id="x", again=True), "x")
        agent.rollback(before)
        agent.run(outside.job, str(number))
    agent = reopened().agent("a")
    agent.run(outside.job.options(id="x", again=True), "x")
    agent.run(outside.job.options(id="y"), "y")
    assert len(set(outside.keys)) == len(outside.keys) == 8


def decisions(agent, past):
    """All that a run, or a plain loop, takes from the line before it begins."""
    host = agent._host
    loop = Loop(host, position_of(agent.head))
    loop.read(past)
    owner, last = past.owner(host.origin), past.last
    return {
        "owner": owner.id if owner is not None else "",
        "last": (last.id, last.status) if last is not None and last.status not in {"finished", "cancelled"} else "",
        "incarnation": past.incarnation,
        "left": sorted((call.number, key_in(call)) for call in loop._left),
        "open": sorted(call.number for call in loop._open),
        "noted": loop._noted,
        "pending": [one.id for one in host.signals(None) if one.id not in past.taken],
    }


STEPS = (
    "run", "run", "run", "named", "fail", "crash before", "crash after", "wait", "resume", "cancel", "checkpoint",
    "plain", "plain crash", "signal", "rollback", "undo", "branch", "again", "reopen",
)  # fmt: skip


@unsaved
@pytest.mark.parametrize("seed", range(200 if SOAK else 5))
def test_a_run_decides_as_if_it_had_read_everything(reopened, outside, seed):
    chance = random.Random(seed)
    agent = reopened().agent("a")
    for number in range(2):
        agent.run(outside.job, str(number))
    assert read_from(agent) > 1
    for number in range(60):
        step, what = chance.choice(STEPS), f"{seed}-{number}"
        outside.trouble = step if step in {"fail", "crash before", "crash after", "wait"} else ""
        try:
            match step:
                case "run" | "fail" | "crash before" | "crash after":
                    agent.run(outside.job, what)
                case "wait":
                    agent.run(outside.job.options(wait=False), what)
                case "named" | "again":
                    agent.run(outside.job.options(id=f"id {chance.randrange(4)}", again=step == "again"), "same")
                case "resume" | "cancel":
                    for run in agent.runs():
                        if run.status in {"waiting", "interrupted"}:
                            agent.resume(run.id) if step == "resume" else agent.cancel(run.id)
                case "checkpoint":
                    agent.state["n"] = number
                    agent.checkpoint(what)
                case "plain" | "plain crash":
                    with agent:
                        outside.pay(what)
                        if step == "plain crash":
                            raise Crash
                        agent.checkpoint(what)
                case "signal":
                    agent._store.signal("a", "go", any_run=True, branch=agent.branch_name)
                case "rollback":
                    agent.rollback(chance.choice(agent.log()))
                case "undo":
                    agent.undo()
                case "branch":
                    agent = agent.branch(what, at=chance.choice(agent.log()))
                case "reopen":
                    agent = reopened().agent("a", branch=agent.branch_name)
        except Crash:
            agent = reopened().agent("a", branch=agent.branch_name)
        except (HoldfastError, Waiting, Diverged, ValueError, OSError):
            pass
        ledger = agent._host.ledger
        recent, whole = Past(ledger.recent(position_of(agent.head))), Past(ledger.records())
        assert decisions(agent, recent) == decisions(agent, whole), (number, step)
        for id in range(4):
            assert ledger.begun(f"id {id}") == (f"id {id}" in whole.begun)
