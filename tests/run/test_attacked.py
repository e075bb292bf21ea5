"""What was found by attacking: runs, plain loops, branches and tasks beside each other do nothing twice."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import errors


class Odd:
    """Nobody registers it."""


@pytest.fixture
def done():
    return []


@pytest.fixture
def pay(done):
    trouble = [True]

    @holdfast.tool(name="attacked.pay")
    def pay(euros):
        done.append(euros)
        if trouble:
            trouble.clear()
            raise ConnectionError("gone")
        return f"paid {euros}"

    return pay


def test_a_lost_result_that_somebody_found_answers_the_next_call(opened, done):
    @holdfast.tool(name="attacked.odd")
    def odd(what: str):
        done.append(what)
        return Odd()

    def work(agent, what):
        return str(odd(what))

    agent = opened()
    with pytest.raises(errors.ResultLost):
        agent.run(work, "a")
    agent.resolve(agent.effects()[0], "done", result="found")
    with agent:
        with pytest.raises(errors.MaybeRepeated):
            odd("b")
        assert odd("a") == "found"
    assert done == ["a"]


def test_what_a_plain_loop_did_answers_a_run_once(opened, done, pay):
    def work(agent, euros):
        return pay(euros)

    agent = opened()
    with agent, pytest.raises(errors.InDoubt):
        pay(10)
    agent.resolve(agent.effects()[0], "done", result="receipt")
    assert agent.run(work, 10) == "receipt"
    assert opened().run(work, 10) == "paid 10"
    assert done == [10, 10]


def test_a_finished_run_is_finished_on_a_branch_of_its_end_and_after_a_rollback_to_it(opened):
    @holdfast.durable
    def count(agent):
        agent.state["n"] = agent.state.get("n", 0) + 1
        return agent.state["n"]

    agent = opened()
    assert agent.run(count.options(id="x")) == 1
    end = agent.head
    side = agent.branch("side")
    assert [run.status for run in side.runs()] == []
    assert side.run(count) == 2
    side.close()
    agent.state["later"] = True
    agent.checkpoint("later")
    agent.rollback(end)
    assert [run.status for run in agent.runs()] == ["finished"]
    assert agent.run(count.options(id="x")) == 1
    assert agent.run(count) == 2
    assert agent._store.verify().ok


def test_a_run_whose_child_has_not_ended_is_not_cancelled(opened):
    @holdfast.durable
    def child(agent):
        return agent.wait_for("go")

    @holdfast.durable
    def parent(agent):
        return agent.spawn(child, "c").join()

    agent = opened()
    with pytest.raises(errors.Waiting):
        agent.run(parent.options(id="p", wait=False))
    with pytest.raises(errors.RunUnfinished, match="trip-7/c") as caught:
        agent.cancel("p")
    agent._store.agent("trip-7/c").cancel(caught.value.run)
    agent.cancel("p")
    assert [run.status for run in agent.runs()] == ["cancelled"]


def test_what_a_failed_run_did_not_save_is_not_in_the_next_one(opened):
    def transfer(agent):
        agent.state["from"] = 90
        raise RuntimeError("no")

    agent = opened()
    agent.state["from"] = 100
    agent.checkpoint("before")
    with pytest.raises(RuntimeError):
        agent.run(transfer)
    assert agent.run(lambda agent: agent.state["from"]) == 100


def test_an_effect_is_settled_on_its_own_agent_alone_by_itself_or_by_its_id(reopened, done, pay):
    store = reopened()
    first, second = store.agent("first"), store.agent("second")
    with first, pytest.raises(errors.InDoubt):
        pay(1)
    with second:
        pay(2)
    doubtful = first.effects()[0]
    for act in (lambda: second.resolve(doubtful, "done"), lambda: second.accept(doubtful), lambda: first.accept(7)):
        with pytest.raises(errors.BadOption):
            act()
    assert first.accept() == []  # what is in doubt stays so
    first.resolve(doubtful.id, "done", result="receipt")
    assert [effect.id for effect in first.accept(doubtful.id)] == [doubtful.id]
    assert [effect.status for effect in second.effects()] == ["done"]


def test_two_tasks_may_be_in_the_same_agent_in_any_order(reopened, done):
    @holdfast.tool(name="attacked.look", effect="read")
    def look(what):
        return what

    store = reopened()
    outer, inner = store.agent("outer"), store.agent("inner")

    async def one(entered, left):
        async with outer:
            async with inner:
                entered.set()
                await left.wait()
            look("one")

    async def two(entered, left):
        await entered.wait()
        async with inner:
            left.set()
            await asyncio.sleep(0)
            look("two")

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        await asyncio.gather(one(entered, left), two(entered, left))

    asyncio.run(both())
    assert [effect.args["what"] for effect in outer.effects()] == ["one"]
    assert [effect.args["what"] for effect in inner.effects()] == ["two"]


def test_a_durable_method_is_refused(opened):
    class Planner:
        @holdfast.durable
        def plan(self, agent, city="Faro"):
            return city

    with pytest.raises(errors.BadOption, match="method"):
        opened().run(Planner().plan, "Lisbon")


def test_reads_of_a_task_are_made_again_once_a_checkpoint_knows_its_end_or_it_raised(opened, done):
    @holdfast.tool(name="attacked.price", effect="read")
    def price(flight):
        done.append(flight)
        return len(done)

    agent = opened()
    for expected in (1, 2):
        with agent, agent.task("poll"):
            assert price("TP") == expected
        agent.checkpoint()
    with agent, pytest.raises(ValueError, match="3"), agent.task("turn"):
        raise ValueError(price("TP"))
    agent = opened()
    with agent, agent.task("poll"):
        assert price("TP") == 4
    with agent, agent.task("turn"):
        assert price("TP") == 5
