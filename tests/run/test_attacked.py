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


def test_a_call_that_may_repeat_another_says_with_what_it_was_made_now_in_a_run_too(opened, done):
    @holdfast.tool(name="maybe-book")
    def book(flight, seat="any"):
        done.append(flight)

    agent = opened()
    with agent:
        book("TP1")
    with pytest.raises(errors.MaybeRepeated, match=r"flight='TP1'.*now with \(flight='TP2', seat='12a'\)"):
        opened().run(lambda _: book("TP2", "12a"))
    assert done == ["TP1"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_run_whose_last_act_is_a_checkpoint_is_finished_there(opened, waits, tmp_path):
    @holdfast.durable(name="last-act")
    def count(agent):
        agent.state["n"] = agent.state.get("n", 0) + 1
        agent.checkpoint("counted")
        return agent.state["n"]

    @holdfast.durable(name="last-act-later")
    async def count_later(agent):
        agent.state["n"] = agent.state.get("n", 0) + 1
        await agent.acheckpoint("counted")
        return agent.state["n"]

    def run(agent, **options):
        return asyncio.run(agent.arun(count_later.options(**options))) if waits else agent.run(count.options(**options))

    agent = opened()
    assert run(agent, id="x") == 1
    agent.state["later"] = True
    agent.checkpoint("later")
    side = agent.branch("side", at="counted")
    assert side.runs() == []
    assert run(side) == 2
    side.close()
    store = agent._store
    again = store.agent("trip-7", branch="side").branch("again", at=agent.at("counted"))
    assert (again.runs(), run(again)) == ([], 2)
    agent.rollback("counted")
    store.copy("trip-7", "copy")
    assert store.agent("copy").runs() == []
    with holdfast.open(tmp_path / "there") as there:
        store.push(there)
        assert there.agent("trip-7", branch="again").state == {"n": 2}
        assert [info.status for info in there.runs()] == [info.status for info in store.runs()]
        assert there.verify().ok
    assert [info.status for info in agent.runs()] == ["finished"]
    assert run(agent, id="x") == 1
    assert run(agent) == 2
    assert agent._store.verify().ok


def test_a_run_that_acts_after_its_last_checkpoint_is_not_finished_there(opened):
    done = []

    @holdfast.tool
    def mail():
        done.append("mail")

    @holdfast.durable(name="acts-after")
    def work(agent):
        agent.state["n"] = 1
        agent.checkpoint("written")
        mail()

    agent = opened()
    agent.run(work)
    side = agent.branch("side", at="written")
    assert [info.status for info in side.runs()] == ["interrupted"]
    side.run(work)
    assert done == ["mail", "mail"]


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
