"""A run of another agent inside a run: found again without an id, told again, and never done twice."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import errors


class Crash(BaseException):
    """The process ends here, as far as the program can tell."""


@pytest.fixture
def paid():
    return []


@pytest.fixture
def pay(paid):
    @holdfast.tool
    def pay(what):
        paid.append(what)
        return what

    return pay


def helper(agent, name="helper"):
    """Another agent of the store that an agent is in."""
    return agent._store.agent(name)


class Once:
    """Raises the first time that the program comes to a place."""

    def __init__(self, place, error=Crash):
        self.place, self.error = place, error

    def __call__(self, place):
        if place == self.place:
            self.place = ""
            raise self.error


PLACES = ["in the first", "in the second", "between", "after"]


@pytest.mark.parametrize("place", PLACES)
def test_what_another_agent_did_is_not_done_again(opened, pay, paid, place):
    reach = Once(place)

    @holdfast.durable(name="nested-part")
    def part(agent, what):
        agent.state["parts"] = [*agent.state.get("parts", []), what]
        pay(what)
        reach(f"in the {what}")
        return f"paid {what}"

    @holdfast.durable(name="nested-whole")
    def whole(agent):
        found = [helper(agent).run(part, "first")]
        reach("between")
        found += [helper(agent).run(part, "second"), helper(agent).run(part, "second")]
        pay("fee")
        reach("after")
        return found

    with pytest.raises(Crash):
        opened().run(whole)
    assert opened().run(whole) == ["paid first", "paid second", "paid second"]
    assert paid == ["first", "second", "second", "fee"]
    other = opened("helper")
    assert other.state == {"parts": ["first", "second", "second"]}
    assert [run.condition for run in other.runs()] == ["finished"] * 3
    assert len({run.id for run in other.runs()}) == 3
    assert other._store.verify().ok
    assert opened().run(whole) == ["paid first", "paid second", "paid second"]  # another run begins others
    assert paid == ["first", "second", "second", "fee"] * 2


@pytest.mark.parametrize("place", ["in b", "between", "after"])
def test_async_ones_keep_their_order_as_well(opened, paid, place):
    reach = Once(place)

    @holdfast.tool(effect="idempotent")
    async def put(what):
        await asyncio.sleep(0)
        return what

    @holdfast.tool
    async def transfer(what):
        paid.append(what)

    @holdfast.durable(name="nested-apart")
    async def part(agent, what, turns):
        for _ in range(turns):
            await put(what)
        await transfer(what)
        reach(f"in {what}")
        return what

    @holdfast.durable(name="nested-awhole")
    async def whole(agent):
        order = []

        async def one(what, turns):
            order.append(await helper(agent, what).arun(part, what, turns))

        if place == "in b":  # one after the other: what is cut off in the middle of a write is in doubt
            await one("a", 3)
            await one("b", 1)
        else:
            await asyncio.gather(one("a", 3), one("b", 1))
        agent.state["order"] = order
        await agent.acheckpoint("paid")
        reach("between")
        await transfer("fee")
        reach("after")
        return order

    async def go():
        agent = opened()
        return await agent.arun(whole), list(agent.state["order"])

    with pytest.raises(Crash):
        asyncio.run(go())
    result, order = asyncio.run(go())
    assert result == order
    assert sorted(order) == ["a", "b"]
    assert sorted(paid) == ["a", "b", "fee"]


def test_one_that_was_left_unfinished_can_be_finished_by_its_id(opened, pay, paid):
    reach = Once("middle")

    @holdfast.durable(name="nested-part")
    def part(agent, what):
        pay(what)
        reach("middle")
        pay(f"the rest of {what}")
        return f"paid {what}"

    @holdfast.durable(name="nested-whole")
    def whole(agent):
        return helper(agent).run(part, "rent")

    with pytest.raises(Crash):
        opened().run(whole)
    other = opened("helper")
    (info,) = other.runs()
    assert (info.function, info.condition) == ("nested-part", "interrupted")
    assert other.resume(info.id) == "paid rent"
    assert opened().run(whole) == "paid rent"
    assert paid == ["rent", "the rest of rent"]


def test_a_failure_that_the_caller_handled_is_told_again(opened, pay, paid):
    reach, fails = Once("after"), [True]

    def part(agent):
        if fails:
            raise LookupError("no room")
        return pay("room")

    def whole(agent):
        try:
            found = helper(agent).run(part)
        except errors.ToolFailed as error:
            found = str(error)
        pay("taxi")
        reach("after")
        return found

    with pytest.raises(Crash):
        opened().run(whole)
    fails.clear()
    assert opened().run(whole) == "part of helper failed: LookupError: no room"
    assert paid == ["taxi"]


def test_one_that_failed_is_tried_again_with_the_run_that_it_is_in(opened, pay, paid):
    fails = [True]

    def part(agent):
        pay("deposit")
        if fails:
            raise LookupError("no room")
        return pay("room")

    def whole(agent):
        return helper(agent).run(part)

    with pytest.raises(errors.ToolFailed, match="no room") as caught:
        opened().run(whole)
    assert caught.value.error_type == "LookupError"
    assert [run.condition for run in opened("helper").runs()] == ["failed"]
    fails.clear()
    assert opened().run(whole) == "room"
    assert paid == ["deposit", "room"]


def test_it_is_in_doubt_where_the_other_one_is(opened):
    @holdfast.tool
    def send():
        raise TimeoutError

    def part(agent):
        return send()

    def whole(agent):
        return helper(agent).run(part)

    agent = opened()
    with pytest.raises(errors.InDoubt):
        agent.run(whole)
    assert [run.condition for run in agent.runs()] == ["needs attention"]
    other = opened("helper")
    other.resolve(other.effects()[0], "done", result="sent", why="asked them")
    assert opened().run(whole) == "sent"


def test_it_is_put_off_with_the_run_that_it_is_in_and_is_due_with_it(opened):
    @holdfast.durable(name="nested-part")
    def part(agent):
        return agent.wait_for("go")

    @holdfast.durable(name="nested-whole")
    def whole(agent):
        return helper(agent).run(part)

    with pytest.raises(errors.Waiting, match="waits for helper"):
        opened().run(whole.options(wait=False))
    store = opened("other")._store
    assert [(run.agent, run.condition, run.waits_for) for run in store.runs()] == [
        ("trip-7", "waiting", ("helper",)),
        ("helper", "waiting", ()),
    ]
    assert store.due() == []
    store.signal("helper", "go", "gone")
    assert sorted(run.agent for run in store.due()) == ["helper", "trip-7"]
    for run in store.due():
        assert store.agent(run.agent).resume(run.id, wait=False) == "gone"
    assert store.due() == []
    assert store.runs("waiting") == []


def test_a_rollback_leaves_what_another_agent_did_so_it_is_not_done_again(opened, pay, paid):
    def part(agent, what):
        return pay(what)

    def whole(agent):
        agent.checkpoint("start")
        return helper(agent).run(part, "rent")

    agent = opened()
    agent.run(whole)
    agent.rollback("start")
    assert opened().run(whole) == "rent"
    assert paid == ["rent"]


def test_code_that_came_to_it_in_another_place_has_diverged(opened, pay, paid):
    moved = []

    def part(agent):
        return pay("rent")

    def whole(agent):
        if moved:
            agent.now()
        helper(agent).run(part)
        raise Crash

    with pytest.raises(Crash):
        opened().run(whole)
    moved.append(True)
    with pytest.raises(errors.Diverged):
        opened().run(whole)
    assert paid == ["rent"]


def test_inside_a_tool_it_is_found_again_too(opened, pay, paid):
    reach = Once("in the tool")

    def part(agent):
        return pay("rent")

    @holdfast.tool(effect="idempotent", retries=1)
    def delegate():
        found = helper(holdfast.current()).run(part)
        reach("in the tool")
        return found

    def whole(agent):
        return delegate()

    with pytest.raises(Crash):
        opened().run(whole)
    reach.place, reach.error = "in the tool", OSError  # now it is called a second time in one process
    assert opened().run(whole) == "rent"
    assert paid == ["rent"]


def test_an_agent_cannot_run_in_itself_and_an_id_says_which_run_is_meant(opened, pay, paid):
    reach = Once("after")

    @holdfast.durable
    def part(agent, what):
        return pay(what)

    def whole(agent):
        with pytest.raises(errors.RunUnfinished, match="is executing a run"):
            agent.run(part, "rent")
        with pytest.raises(errors.BadOption, match="change=True"):
            helper(agent).run(part.options(change=True), "rent")
        found = helper(agent).run(part.options(id="rent"), "rent")
        reach("after")
        return found

    with pytest.raises(Crash):
        opened().run(whole)
    assert opened().run(whole) == "rent"
    assert paid == ["rent"]
    assert [run.id for run in opened("helper").runs()] == ["rent"]


def test_outside_of_durable_functions_each_call_begins_a_run(opened, pay, paid):
    def part(agent):
        return pay("rent")

    with opened() as agent:
        for _ in range(2):
            helper(agent).run(part)
    assert paid == ["rent", "rent"]


def test_one_that_was_replanned_is_found_again(opened, pay, paid):
    reach = Once("after")

    def undo(effect):
        paid.remove(effect.args["what"])

    @holdfast.tool(compensate=undo)
    def book(what):
        paid.append(what)

    @holdfast.durable(name="nested-train")
    def train(agent):
        book("train")
        reach("in the train")
        return "by train"

    @holdfast.durable(name="nested-plane")
    def plane(agent):
        book("plane")
        raise RuntimeError("strike")

    def whole(agent):
        found = helper(agent).run(plane.options(replan=lambda setback: train))
        reach("after")
        return found

    for place in ("in the train", "after"):
        reach.place = place
        with pytest.raises(Crash):
            opened().run(whole)
    assert opened().run(whole) == "by train"
    assert paid == ["train"]
