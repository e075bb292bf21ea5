"""Policies inside runs: where their checkpoints are, and what another execution makes of them."""

from __future__ import annotations

import asyncio

import pytest

import holdfast
from holdfast import Policy, When, durable, errors, tool
from holdfast.agent import points

ALL = When(every_steps=1, before="write", after="write", at_phase=True)
POLICIES = [None, When(adaptive=True), When(every_steps=1), When(before="write"), When(after="write"), ALL]


class Stop(Exception):
    """The run is interrupted here: a program that ends."""


done = []


@tool(name="runs.book")
def book(what):
    done.append(what)
    return what


@tool(name="runs.look", effect="read")
def look(what):
    return f"price of {what}"


again = []


@durable
def travel(agent, *, extra=""):
    agent.state["stops"] = []
    for city in ("Lyon", "Turin", "Genoa"):
        with agent.phase(f"to {city}"):
            agent.state["price"] = look(city)
            agent.state["stops"].append(book(city))
        agent.step()
    agent.state["extra"] = extra
    if not again:
        raise KeyboardInterrupt
    return list(agent.state["stops"])


@durable
async def fly(agent):
    agent.state["stops"] = []

    async def one(city):
        await look.acall(city)
        with agent.phase(city):
            agent.state["stops"].append(await book.acall(city))
        await agent.astep()

    async with asyncio.TaskGroup() as tasks:
        for city in ("Lyon", "Turin", "Genoa"):
            tasks.create_task(one(city))
    if not again:
        raise KeyboardInterrupt
    return list(agent.state["stops"])


@pytest.fixture(autouse=True)
def clear():
    done.clear()
    again.clear()


def execute(agent, function):
    if function is fly:
        return asyncio.run(agent.arun(fly.options(id="1")))
    return agent.run(function.options(id="1"))


def test_calls_of_a_run_are_safe_points_and_their_checkpoints_know_where_they_are(opened):
    agent = opened(when=When(before="write", after="write"))
    again.append(True)
    agent.run(travel)
    found = [(one.trigger, one.label) for one in agent.log()][::-1]
    assert found[:5] == [
        ("run", "run travel"),
        ("before write", "before runs.book"),
        ("before write", "before runs.book"),
        ("before write", "before runs.book"),
        ("run", "run travel finished"),
    ]  # after each booking nothing has changed yet: its answer is not in the state
    assert agent.stack_at("~1") == ["travel", "to Genoa"]
    assert agent.log()[1].state["stops"] == ["Lyon", "Turin"]


@pytest.mark.parametrize("function", [travel, fly], ids=["plain", "async"])
@pytest.mark.parametrize("later", POLICIES, ids=str)
@pytest.mark.parametrize("first", POLICIES, ids=str)
def test_policies_may_differ_between_two_executions(opened, first, later, function):
    with pytest.raises(KeyboardInterrupt):
        execute(opened(when=first), function)
    again.append(True)
    agent = opened(when=later)
    before = len(agent.log(all=True))
    assert sorted(execute(agent, function)) == ["Genoa", "Lyon", "Turin"]
    assert sorted(done) == ["Genoa", "Lyon", "Turin"]
    assert agent.head.state["stops"] == agent.state["stops"]
    # A replay takes none: these are of safe points after the last recorded one, and of the end.
    assert len(agent.log(all=True)) - before <= 3
    assert agent.abandoned() == []
    assert agent._store.verify().ok


def test_a_replay_compares_the_state_where_a_checkpoint_was_taken(opened):
    with pytest.raises(KeyboardInterrupt):
        opened(when=When(every_steps=1)).run(travel.options(id="1"))
    taken = len(opened(when=None).log())
    assert taken == 4
    again.append(True)

    @durable(name=travel.__name__)
    def other(agent, *, extra=""):
        agent.state["stops"] = []
        for city in ("Lyon", "Turin", "Genoa"):
            with agent.phase(f"to {city}"):
                agent.state["price"] = look(city)
                agent.state["stops"] += [book(city), "and more"]
            agent.step()

    with pytest.raises(errors.Diverged) as caught:
        opened().run(other.options(id="1"))
    assert caught.value.path == "0!0"
    assert "and more" in str(caught.value)
    assert done == ["Lyon", "Turin", "Genoa"]


def test_a_run_goes_on_from_the_newest_checkpoint_that_it_comes_by(opened):
    with pytest.raises(KeyboardInterrupt):
        opened(when=When(every_steps=1)).run(travel.options(id="1"))
    newest = opened(when=None).head
    again.append(True)
    agent = opened(when=None)
    agent.run(travel.options(id="1", change=True), extra="x")
    assert agent.head.parent_id == newest.id
    assert agent.abandoned() == []


def test_a_run_can_be_taken_back_to_a_checkpoint_that_it_did_not_ask_for(opened):
    undone = []

    @tool(name="runs.reserve", compensate=lambda effect: undone.append(effect.args["what"]))
    def reserve(what):
        return what

    @durable
    def plan(agent):
        for what in ("flight", "hotel"):
            agent.state[what] = reserve(what)
            agent.step()
        raise KeyboardInterrupt

    agent = opened(when=When(every_steps=1))
    with pytest.raises(KeyboardInterrupt):
        agent.run(plan)
    agent.rollback("~1")
    assert agent.state == {"flight": "flight"}
    assert undone == ["hotel"]
    assert agent._store.verify().ok


def test_after_a_failure_what_led_to_it_may_go_another_way(opened):
    """The states that were saved on the way to it are not looked for."""
    prices = ["none"]

    @tool(name="runs.price", effect="read")
    def price():
        if prices[0] == "none":
            raise ValueError("no price")
        return prices[0]

    @durable
    def plan(agent):
        agent.state["n"] = 1
        agent.step()
        try:
            agent.state["price"] = price()
        except errors.ToolFailed:
            agent.state["price"] = "unknown"
            agent.step()
            raise
        return agent.state["price"]

    agent = opened(when=When(every_steps=1))
    with pytest.raises(errors.ToolFailed):
        agent.run(plan.options(id="1"))
    prices[0] = "30"
    assert opened(when=When(every_steps=1)).run(plan.options(id="1")) == "30"


def test_retention_lets_go_what_an_unfinished_run_did_not_ask_for(opened):
    with pytest.raises(KeyboardInterrupt):
        opened(when=When(every_steps=1)).run(travel.options(id="1"))
    agent = opened(when=None)
    agent._store.retain(Policy(last=1), ["trip-7"])
    assert len(agent.log()) == 2  # where it began, and where the branch stands
    again.append(True)
    assert agent.run(travel.options(id="1")) == ["Lyon", "Turin", "Genoa"]
    assert done == ["Lyon", "Turin", "Genoa"]


def test_a_failing_phase_of_a_run_leaves_its_state_beside_the_line(opened):
    @durable
    def pay(agent):
        agent.state["plan"] = "fly"
        agent.checkpoint("good")
        with agent.phase("pay"):
            agent.state["paid"] = "half"
            raise ValueError("refused")

    agent = opened()
    with pytest.raises(ValueError, match="refused"):
        agent.run(pay)
    assert agent.head.label == "good"
    suspect = next(one for one in agent.log(all=True) if one.trigger == "phase failed")
    assert (suspect.validity, suspect.state["paid"]) == ("suspect", "half")
    assert agent._store.verify().ok


def test_a_gate_of_a_run_is_passed_again_when_that_is_executed_again(opened):
    @durable
    def plan(agent):
        agent.state["n"] = 1
        made = agent.gate("validated", lambda state: state["n"] == 1)
        if not again:
            raise KeyboardInterrupt
        return made.trigger

    with pytest.raises(KeyboardInterrupt):
        opened().run(plan)
    again.append(True)
    assert opened().run(plan) == "gate"


def test_no_state_is_saved_in_the_middle_of_an_atomic_block_of_a_run(opened):
    @durable
    def plan(agent):
        for number in range(3):
            with agent.atomic():
                agent.state["first"] = number
                book(number)
                agent.step()
                agent.state["second"] = number

    agent = opened(when=ALL)
    agent.run(plan)
    assert all(one.state.get("first") == one.state.get("second") for one in agent.log(all=True))


def test_inside_a_tool_nothing_is_saved_by_itself(opened):
    @tool(name="runs.outer")
    def outer():
        return [book("one"), book("two")]

    @durable
    def plan(agent):
        agent.state["n"] = 1
        agent.state["got"] = outer()

    agent = opened(when=When(before="write", after="write"))
    agent.run(plan)
    assert [one.label for one in agent.log()][::-1] == ["run plan", "before runs.outer", "run plan finished"]


def test_a_state_that_cannot_be_saved_stops_no_run_at_a_safe_point(opened, caplog):
    class Odd:
        pass

    @holdfast.register
    class Box:
        def __init__(self):
            self.content = 1

    @durable
    def plan(agent):
        agent.state["box"] = Box()
        agent.step()
        box = agent.state["box"]
        box.content = Odd()
        agent.step()
        book("one")
        box.content = 2
        return "well"

    agent = opened(when=ALL)
    assert agent.run(plan) == "well"
    assert "no checkpoint of trip-7 was taken" in caplog.text
    assert agent.head.state["box"].content == 2


def test_time_is_asked_at_calls_of_a_run(opened, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(points, "monotonic", lambda: now[0])

    @tool(name="runs.slow", effect="read")
    def slow():
        now[0] += 700
        return 1

    @durable
    def plan(agent):
        agent.state["n"] = slow()
        agent.state["m"] = slow()
        agent.state["k"] = slow()

    agent = opened()
    agent.run(plan)
    found = [(one.trigger, one.label) for one in agent.log()][::-1]
    assert found == [
        ("run", "run plan"),
        ("adaptive", "after runs.slow"),
        ("adaptive", "after runs.slow"),
        ("run", "run plan finished"),
    ]
