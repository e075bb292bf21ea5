"""A watchpoint tells of a change where the program comes by next, and never saves by itself."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.errors import BadExpression, BadOption, WatchTriggered
from tests.conftest import unsaved


@holdfast.tool(effect="write", name="watched.pay")
def pay(amount):
    return amount


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path) as store:
        yield store


@pytest.fixture
def agent(store):
    agent = store.agent("trip-7", when=None)
    agent.state["budget"] = 5
    return agent


@unsaved
def test_it_is_met_at_a_step_a_checkpoint_and_a_call(agent, caplog):
    watch = agent.watch("budget", when="new < 0")
    agent.step()
    agent.state["budget"] = 3
    agent.step()
    assert not watch.hits  # it changed, and the condition does not hold
    agent.state["budget"] = -1
    agent.step()
    agent.step()  # told once
    agent.state["budget"] = -2
    agent.checkpoint()
    with agent:
        agent.state["budget"] = -3
        pay(1)
        agent.checkpoint()
    assert [(hit.old, hit.new) for hit in watch.hits] == [(3, -1), (-1, -2), (-2, -3)]
    at = [hit.at.rpartition(".")[2] for hit in watch.hits]
    assert at[:2] == ["step", "checkpoint"]
    assert watch.hits[2].at.startswith("before ")
    assert watch.hits[0].caller.startswith("test_watch.py:")
    assert "budget became -1, and was 3" in caplog.text
    watch.stop()
    agent.state["budget"] = -9
    agent.step()
    assert len(watch.hits) == 3


def test_it_can_raise_call_or_dump(agent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    agent.watch("budget", then=told.append)
    dumps = agent.watch("budget", when="old - new > 3", then="dump")
    agent.watch("budget", when="new < 0 <= old", then="raise")
    agent.state["budget"] = 4
    agent.step()
    agent.state["budget"] = -1
    with pytest.raises(WatchTriggered) as caught:
        agent.checkpoint()
    assert (caught.value.path, caught.value.old, caught.value.new) == ("state.budget", 4, -1)
    assert [hit.new for hit in told] == [4, -1]
    (hit,) = dumps.hits
    with holdfast.crash.open_dump(hit.dump) as dump:
        assert dump.process is not None
    assert agent.checkpoint()  # told, so the next one is taken


def test_it_asks_for_a_checkpoint_at_the_next_safe_point_and_takes_none_itself(agent):
    agent.checkpoint("start")
    agent.watch("budget", when="new < 0", then="checkpoint")
    with agent:
        agent.state["budget"] = -1
        pay(1)  # a plain loop is not saved at a call
        assert agent.head.label == "start"
        with agent.atomic():
            assert agent.step() is None
        made = agent.step()
        assert made.trigger == "watch"
        assert made.state["budget"] == -1
        assert agent.step() is None


@unsaved
def test_a_place_that_comes_and_goes_and_large_ones_are_watched(agent):
    agent.state["rows"] = [{"n": n} for n in range(5_000)]
    agent.checkpoint()
    watch, rows = agent.watch("plan.steps[-1]"), agent.watch("rows", when="len(new) != len(old)")
    agent.state["plan"] = {"steps": ["fly"]}
    agent.state["rows"][77]["n"] = -1
    agent.step()
    agent.state["plan"]["steps"].append("sleep")
    agent.state["rows"].append(1)
    agent.step()
    del agent.state["plan"]
    agent.step()
    assert [(hit.old, hit.new) for hit in watch.hits] == [
        (holdfast.MISSING, "fly"), ("fly", "sleep"), ("sleep", holdfast.MISSING),
    ]  # fmt: skip
    assert [len(hit.new) for hit in rows.hits] == [5_001]


def test_what_a_run_does_again_is_not_told_again(store):
    crash = [True]

    @holdfast.durable
    def work(agent):
        agent.state["budget"] = -1
        pay(1)
        agent.state["budget"] = -2
        if crash[0]:
            raise KeyboardInterrupt
        pay(2)

    agent = store.agent("a", when=None)
    watch = agent.watch("budget", when="new < 0")
    with pytest.raises(KeyboardInterrupt):
        agent.run(work)
    first = len(watch.hits)
    assert first == 1
    crash[0] = False
    agent.run(work)
    assert [hit.new for hit in watch.hits][first:] == [-2]


@unsaved
def test_mistakes_are_told_at_once(agent, store):
    with pytest.raises(BadOption):
        agent.watch("budget", then="explode")
    with pytest.raises(BadExpression):
        agent.watch("budget", when="new <")
    with pytest.raises(holdfast.errors.ReadOnly):
        store.agent("trip-7", readonly=True).watch("budget")
