"""Drift tells what differs from a baseline; reconcile goes back to what should be, with leave and within limits."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast.errors import BadOption
from holdfast.travel.drift import Rule

SET = []


@holdfast.tool(name="drift.configure", compensate=lambda effect: SET.append(("undone", effect.args["path"])))
def configure(path, have, want):
    SET.append((path, have, want))
    return want


@holdfast.tool(effect="read", name="drift.look")
def look(place, limit=3):
    return {"place": place, "limit": limit}


@holdfast.tool(name="drift.stubborn")
def stubborn(path, have, want):
    return have


@pytest.fixture
def agent(store_path):
    SET.clear()
    with holdfast.open(store_path) as store:
        agent = store.agent("trip-7", when=None, config={"model": "small"})
        agent.state["settings"] = {"limit": 10, "colour": "blue", "rate": 1.0}
        with agent:
            look("Lyon")
            agent.checkpoint("good")
        agent.tag("baseline")
        yield agent


def names(found):
    return {one.name for one in found.refused}


def test_nothing_has_drifted(agent):
    agent.state["other"] = 1
    agent.checkpoint()
    for number in range(82):
        agent.state["noise"] = number % 3
        agent.checkpoint()
    found = agent.drift("baseline", paths=["settings"])
    assert not found
    assert str(found) == "no drift"


def test_where_statistics_did_not_look_nobody_is_told_that_nothing_drifts(agent):
    for number in range(60):
        agent.state["latency"] = 20 + number % 2 if number < 40 else 320
        agent.checkpoint()
    found = agent.drift("baseline")
    assert not found
    assert found.too_few["state.latency"] == 60
    assert str(found).startswith("no drift was found\nnot followed by statistics, which need 82 values: state.settings")
    assert "state.latency has 60" in found.to_json()["note"]
    assert found.to_json()["needed"] == 82
    for number in range(22):  # one more than is needed to know what is usual: the next one is judged
        agent.state["latency"] = 20 + number % 2
        agent.checkpoint()
        assert ("state.latency" in agent.drift("baseline").too_few) == (number < 21)
    assert "the baseline is not among those that led here" in str(agent.drift("~3", "baseline"))


def test_places_configuration_and_shapes_of_calls(agent, store_path):
    agent.state["settings"]["limit"] = 12
    agent.state["settings"]["new"] = True
    with agent:
        look(7, limit="many")
        agent.checkpoint("later")
    found = agent.drift("baseline", paths=["settings"])
    assert {"state.settings.limit", "state.settings.new", "tools.drift.look.given.place"} <= names(found)
    agent.close()
    with holdfast.open(store_path) as store:
        again = store.agent("trip-7", when=None, config={"model": "large"})
        again.state["x"] = 1
        again.checkpoint()
        assert "configuration.config" in names(again.drift("baseline"))
        assert "configuration.config" not in names(again.drift("baseline", may=["configuration.*"]))


def test_a_place_that_is_nowhere_has_not_stayed_the_same(agent):
    agent.checkpoint("later")
    with pytest.raises(BadOption, match=r"setings\.limit is in neither"):
        agent.drift("baseline", paths=["setings.limit"])


def test_rules():
    def allows(text, name, old, new):
        return Rule.read(text).allows(name, old, new)

    assert allows("dependencies.*=minor", "dependencies.rich", "14.1.0", "14.2.1")
    assert not allows("dependencies.*=minor", "dependencies.rich", "14.1.0", "15.0.0")
    assert allows("dependencies.*=patch", "dependencies.rich", "14.1.0", "14.1.9")
    assert not allows("dependencies.*=patch", "dependencies.rich", "14.1.0", None)
    assert allows("state.limit=5%", "state.limit", 100, 104)
    assert not allows("state.limit=5%", "state.limit", 100, 106)
    assert not allows("state.limit=5%", "state.limit", "a", "b")
    assert allows("settings.limit=5%", "state.settings.limit", 100, 104)  # as places are written everywhere
    assert not allows("code.*", "state.code.x", 1, 2)
    assert allows("environment.program", "environment.program", "a", "b")
    with pytest.raises(BadOption):
        Rule.read("=5%")


def test_statistics_since_the_baseline(agent):
    chance = random.Random(3)
    for step in range(260):
        agent.state["latency"] = 20 + chance.gauss(0, 1) + 6 * (step > 200)
        agent.checkpoint()
    found = agent.drift("baseline")
    assert [alarm.place for alarm in found.alarms] == ["state.latency"]
    assert found
    assert found.to_json()["alarms"][0]["place"] == "state.latency"


def drifting(agent, names, put, steps=240):
    """Each name's value drifts from step 150 on; ``put`` sets them."""
    chance = random.Random(5)
    for step in range(steps):
        put(step, {name: 20 + chance.gauss(0, 1) + 6 * (step > 150) for name in names})
        agent.checkpoint()
    return agent.drift


def test_places_in_lists_are_followed_where_they_are_named_from_either_end(agent):
    agent.state["seen"] = [{"ms": 0.0}]
    agent.state["pair"] = [0.0, 0.0]

    def put(step, values):
        agent.state["seen"].append({"ms": values["last"]})
        agent.state["pair"][1] = values["second"]

    drift = drifting(agent, ["last", "second"], put)
    places = ["seen[-1].ms", "pair[1]", "pair[0]"]
    assert [alarm.place for alarm in drift("baseline", paths=["pair"]).alarms] == []
    found = drift("baseline", paths=[*places, "seen[-1]"])
    assert {alarm.place for alarm in found.alarms} == {"state.seen[-1].ms", "state.pair[1]"}


def test_places_that_come_and_go_take_nobody_s_room(agent):
    def put(step, values):
        agent.state["tasks"] = {f"{step}-{n}": n for n in range(300)} if step < 12 else {}
        if step > 12:
            agent.state["latency"] = values["ms"]

    drift = drifting(agent, ["ms"], put)
    assert [alarm.place for alarm in drift("baseline").alarms] == ["state.latency"]


def test_a_value_that_came_where_a_dict_stood_is_told(agent):
    agent.state["settings"] = 5
    agent.checkpoint()
    found = {one.name: (one.old, one.new) for one in agent.drift("baseline", paths=["settings"]).refused}
    assert found["state.settings"] == (None, 5)
    assert found["state.settings.limit"] == (10, None)


# -- reconcile -------------------------------------------------------------------------------------------------------

WANTED = {"settings": {"limit": 12, "colour": "blue"}}


def test_a_plan_does_nothing(agent):
    (action,) = agent.plan_reconcile(WANTED, {"settings.*": configure})
    assert (action.where, action.have, action.want, action.tool) == ("state.settings.limit", 10, 12, "drift.configure")
    assert SET == []
    assert not agent.dirty


def test_a_write_needs_leave(agent):
    found = agent.reconcile(WANTED, {"settings.*": configure})
    assert not found
    assert "approved" in found.why
    assert SET == []
    assert agent.reconcile(WANTED, {"settings.*": configure}, approve=lambda action: action.want == 12)


def test_it_converges_is_recorded_and_can_be_undone(agent):
    before = agent.head
    found = agent.reconcile({"settings.limit": 12, "settings.colour": "red"}, {"*": configure}, yes=True)
    assert found
    assert found.rounds == 1
    assert len(found.done) == 2
    assert agent.state["settings"]["limit"] == 12
    assert agent.head == found.checkpoint
    assert [effect.tool for effect in agent.effects(before)] == ["drift.configure"] * 2
    assert agent.reconcile({"settings.limit": 12}, {"*": configure}).converged  # nothing left, and no leave needed
    agent.rollback(before)
    assert agent.state["settings"]["limit"] == 10
    assert ("undone", "settings.limit") in SET


def test_a_function_may_say_what_is_desired(agent):
    found = agent.reconcile(
        lambda state: {"settings.rate": state["settings"]["limit"] / 10 + 1}, {"*": configure}, yes=True
    )
    assert found
    assert agent.state["settings"]["rate"] == 2.0


def test_what_another_action_has_settled_is_not_done_again(agent):
    def both(state):
        return {"a": 1, "b": 2} if "a" not in state else {"a": 1, "b": 3}

    SET.clear()
    assert agent.reconcile(both, {"*": configure}, yes=True, actions=2).rounds == 1
    assert [(path, want) for path, _, want in SET] == [("a", 1), ("b", 3)]


def test_it_says_why_it_does_not_converge(agent):
    assert "names no tool" in agent.reconcile(WANTED, {"other.*": configure}, yes=True).why
    assert "changed nothing" in agent.reconcile(WANTED, {"*": stubborn}, yes=True).why
    found = agent.reconcile({"a": 1, "b": 2}, {"*": configure}, yes=True, actions=1)
    assert "limit of 1" in found.why
    assert [[one.where for one in some] for some in (found.done, found.left)] == [["state.a"], ["state.b"]]
    moving = iter(range(100))
    found = agent.reconcile(lambda state: {"n": next(moving)}, {"*": configure}, yes=True, rounds=2)
    assert "after 2 rounds" in found.why
    with pytest.raises(BadOption):
        agent.plan_reconcile(WANTED, {"*": print})
    with pytest.raises(BadOption):
        agent.reconcile(WANTED, {}, rounds=0)
