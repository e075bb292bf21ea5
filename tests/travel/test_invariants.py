"""What must hold of a state is asked before each checkpoint, and of every checkpoint that there is."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass

import pytest
from pydantic import BaseModel

import holdfast
from holdfast.errors import BadExpression, BadOption, InvariantViolated
from tests.conftest import unsaved


@dataclass
class Order:
    id: int
    customer: str


class Hotel(BaseModel):
    name: str
    stars: int


@holdfast.tool(effect="write", name="guarded.pay")
def pay(amount):
    return amount


@holdfast.tool(effect="read", name="guarded.look")
def look(city):
    return city


@pytest.fixture
def store(store_path):
    with holdfast.open(store_path, types=[Order]) as store:
        yield store


@pytest.fixture
def agent(store):
    return store.agent("trip-7", when=None)


GOOD = {
    "budget": 5, "spent": 3, "orders": [{"id": 1, "customer": "ann"}, {"id": 2, "customer": "bo"}],
    "customers": {"ann": {}, "bo": {}}, "hotel": {"name": "Ritz", "stars": 5}, "tags": ["a", "b"],
}  # fmt: skip
SCHEMA = {"type": "object", "required": ["name"], "properties": {"stars": {"type": "integer", "maximum": 5}}}


@pytest.mark.parametrize(
    ("what", "options", "section", "bad"),
    [
        ("budget >= 0", {}, "budget", -1),
        ("budget", {"range": (0, None)}, "budget", -1),
        ("budget", {"range": (None, 10)}, "budget", 11),
        ("budget", {"type": int}, "budget", "5"),
        ("budget", {"type": "number"}, "budget", True),
        ("spent", {"monotonic": "up"}, "spent", 2),
        ("budget", {"range": (0, 100)}, "budget", float("nan")),
        ("spent", {"monotonic": "up"}, "spent", float("nan")),
        ("spent", {"monotonic": "down"}, "spent", float("nan")),
        ("tags", {"unique": True}, "tags", ["a", "a"]),
        ("orders", {"unique": True, "field": "id"}, "orders", [{"id": 1}, {"id": 1}]),
        ("orders", {"references": "customers", "field": "customer"}, "orders", [{"id": 1, "customer": "eve"}]),
        ("hotel", {"schema": SCHEMA}, "hotel", {"name": "Ritz", "stars": 7}),
        ("hotel", {"schema": Hotel}, "hotel", {"name": "Ritz", "stars": "many"}),
        (lambda state: state["budget"] > 0, {}, "budget", 0),
    ],
)
def test_each_kind_refuses_what_breaks_it_and_nothing_else(agent, what, options, section, bad):
    agent.state = GOOD
    agent.invariant(what, then="refuse", **options)
    first = agent.checkpoint("good")
    agent.state[section] = bad
    with pytest.raises(InvariantViolated) as caught:
        agent.checkpoint("bad")
    assert caught.value.invariant.then == "refuse"
    assert agent.head == first
    assert agent.dirty  # the live state stays
    assert repr(holdfast.plain(agent.state[section])) == repr(bad)
    agent.state[section] = GOOD[section]
    agent.state["more"] = 1
    assert agent.checkpoint("mended").validity == "good"


@unsaved
def test_what_is_missing_breaks_nothing_unless_it_is_required(agent):
    agent.invariant("none", range=(0, 1), then="refuse")
    agent.checkpoint("ok")
    agent.invariant("none", required=True, then="refuse")
    agent.state["n"] = 1
    with pytest.raises(InvariantViolated, match="missing"):
        agent.checkpoint()


@unsaved
@pytest.mark.parametrize(
    ("rule", "state", "holds"),
    [
        ("budget >= 0", {}, True),
        ("budget >= 0", {"budget": -1}, False),
        ("budget >= 0", {"budget": None}, False),  # it is there
        ("budget - spent >= 0", {"budget": 1}, True),  # which cannot even be calculated
        ("account.spent < 1000", {"account": {}}, True),
        ("not (budget < 0 or len(orders) > 1)", {"orders": []}, True),
        ("budget >= 0 and len(orders) < 2", {"orders": [1, 2]}, False),  # each part for itself
        ("budget >= 0 and len(orders) < 2", {"budget": -1}, False),
        ("exists(budget)", {}, False),
        ("exists(budget) and budget >= 0", {}, False),
        ("budget != None", {}, False),
        ("not exists(budget) or budget >= 0", {}, True),
        ("exists(budget) or spent > 1", {"spent": 0}, False),
    ],
)
def test_a_rule_about_a_place_that_is_not_there_is_not_broken_unless_it_asks_for_that(store, agent, rule, state, holds):
    agent.state.update({"n": 1, **state})
    agent.checkpoint("first")
    assert bool(agent.check(holdfast.Invariant(rule))) is not holds
    told = [text for name, text in store.explain("trip-7", invariants=[rule]).facts if name == "violated"]
    assert bool(told) is not holds
    agent.invariant(rule, then="refuse")
    agent.state["n"] = 2
    if holds:
        agent.checkpoint()
    else:
        with pytest.raises(InvariantViolated, match="it is false"):
            agent.checkpoint()


def test_a_run_begins_before_it_has_set_what_a_rule_speaks_of(agent):
    agent.invariant("guarded_budget >= 0", then="refuse")

    @holdfast.durable
    def spend(agent):
        agent.state["guarded_budget"] = 5

    agent.run(spend)
    assert agent.state["guarded_budget"] == 5


def test_a_place_that_no_checkpoint_has_is_named(agent):
    for number in range(3):
        agent.state["budget"] = number
        agent.checkpoint()
    found = agent.check(holdfast.Invariant("not (bugdet < 0) and budget >= 0"), holdfast.Invariant("budgte", type=int))
    assert (list(found), found.nowhere) == ([], ["state.budgte", "state.bugdet"])
    assert agent.check(holdfast.Invariant(lambda state: True)).nowhere == []


def test_a_schema_that_is_none_is_refused_as_an_option(agent):
    with pytest.raises(BadOption, match=r"that is no JSON schema: at type: 'strin' is not"):
        agent.invariant("k", schema={"type": "strin"})
    with pytest.raises(BadOption, match="schema=5 says no type"):
        agent.invariant("k", schema=5)


def test_why_a_rule_could_not_be_asked_is_one_line_and_a_check_that_exits_ends_nothing(agent):
    agent.state["budget"] = "much"
    agent.checkpoint()
    (found,) = agent.check(holdfast.Invariant("budget >= 0"))
    assert "\n" not in found.why
    assert "have no order" in found.why

    def leave(state):
        raise SystemExit(1)

    assert [one.why for one in agent.check(holdfast.Invariant(leave))] == ["SystemExit: 1"]


def test_a_warning_marks_the_checkpoint_suspect_in_its_transaction_and_it_is_opened_and_said(store, agent, caplog):
    agent.invariant("budget >= 0", name="solvent")
    agent.state["budget"] = -1
    made = agent.checkpoint("poor")
    assert (made.validity, made.validity_reason) == ("suspect", "solvent: it is false")
    assert "solvent" in caplog.text
    agent.close()
    caplog.clear()
    again = store.agent("trip-7", when=None)
    assert again.state["budget"] == -1
    assert again.suspect == "suspect: solvent: it is false"
    assert "is marked suspect" in caplog.text
    again.state["budget"] = 1
    again.checkpoint("rich")
    assert again.suspect == ""
    assert store.verify().ok


@unsaved
def test_every_way_to_save_is_guarded(store, agent):
    agent.invariant("budget >= 0", then="refuse")
    agent.state["budget"] = 1
    agent.checkpoint()
    agent.state["budget"] = -1
    with pytest.raises(InvariantViolated):
        asyncio.run(agent.acheckpoint())
    with pytest.raises(InvariantViolated):
        agent.gate("checked", lambda state: True)

    @holdfast.durable
    def work(agent):
        agent.state["budget"] = -5
        agent.checkpoint("inside")

    agent.state["budget"] = 1
    with pytest.raises(InvariantViolated):
        agent.run(work)
    assert all(one.state["budget"] >= 0 for one in agent.log())
    other = store.agent("other", when=holdfast.When(every_steps=1))
    other.invariant("budget >= 0", then="refuse")
    other.state["budget"] = -1
    with pytest.raises(InvariantViolated):
        other.step()
    assert other.head is None


@pytest.mark.parametrize("then", ["refuse", "rollback"])
def test_a_tool_that_wants_a_checkpoint_before_it_is_not_called_from_a_state_that_may_not_be_saved(store, then):
    paid = []

    @holdfast.tool(checkpoint="before", name=f"guarded.pay.{then}")
    def pay(amount):
        paid.append(amount)
        return amount

    @holdfast.durable(name=f"guarded.shop.{then}")
    def shop(agent):
        agent.invariant("budget >= 0", then=then)
        agent.state["budget"] = 1
        agent.checkpoint("begun")
        agent.state["budget"] = -1
        try:
            pay(1)
        except InvariantViolated:
            agent.state["budget"] = 5
            agent.state["refused"] = True
        pay(2)
        if len(paid) == 1 and not again:
            raise RuntimeError("the program was interrupted")
        return pay(3)

    again = []
    with pytest.raises(RuntimeError, match="interrupted"):
        store.agent("shop").run(shop)
    assert paid == [2]
    again.append(1)
    assert store.agent("shop").run(shop) == 3  # what was refused is refused again, and nothing is paid twice
    assert paid == [2, 3]
    assert store.agent("shop").state["refused"]


def test_before_a_rollback_what_breaks_is_saved_all_the_same_and_marked(agent):
    agent.invariant("budget >= 0", then="refuse")
    agent.state["budget"] = 1
    good = agent.checkpoint("good")
    agent.state["budget"] = -1
    agent.rollback(good)
    assert agent.state["budget"] == 1
    (left,) = agent.abandoned()
    assert left.state["budget"] == -1
    assert left.validity == "suspect"


def test_it_goes_back_by_itself_so_many_times_in_a_row_and_then_stops_with_the_plan(store, agent, caplog):
    agent.invariant("budget >= 0", then="rollback", most=2)
    agent.state["budget"] = 1
    good = agent.checkpoint("good")
    for _ in range(2):
        agent.state["budget"] = -1
        assert agent.checkpoint("bad") == good
        assert agent.state["budget"] == 1
        assert not agent.dirty
    (failed, _) = agent.abandoned()
    assert failed.validity_reason == "trip-7 breaks the invariant 'budget >= 0': it is false"
    agent.close()  # another process would count on, too
    agent = store.agent("trip-7", when=None)
    agent.invariant("budget >= 0", then="rollback", most=2)
    agent.state["budget"] = -1
    with pytest.raises(InvariantViolated, match="nothing was saved") as caught:
        agent.checkpoint("bad")
    assert caught.value.plan is not None
    assert agent.state["budget"] == -1
    caught.value.plan.apply()
    assert agent.state["budget"] == 1
    agent.state["budget"] = 2
    agent.checkpoint("better")
    agent.state["budget"] = -1
    assert agent.checkpoint("bad").label == "better"  # in a row: it begins anew


def test_it_does_not_go_back_over_a_write(agent):
    agent.invariant("budget >= 0", then="rollback")
    with agent:
        agent.state["budget"] = 1
        agent.checkpoint("good")
        look("Lisbon")
        agent.state["budget"] = -1
        assert agent.checkpoint().label == "good"  # reading is no reason
        pay(5)
        agent.state["budget"] = -4
        with pytest.raises(InvariantViolated) as caught:
            agent.checkpoint()
        plan = caught.value.plan
        assert plan.undo or plan.blocked
        assert agent.state["budget"] == -4
        agent.state["budget"] = 0
        agent.checkpoint("mended")


@unsaved
def test_what_is_judged_is_what_is_saved_whoever_changes_it_meanwhile(agent):
    """The function is slow, and another thread changes the state under it."""
    turn = threading.Event()

    def change():
        turn.wait(180)
        agent.state["budget"] = -1

    def check(state):
        seen = state["budget"]
        turn.set()
        if other.is_alive():
            other.join(180)
        return seen >= 0

    other = threading.Thread(target=change)
    other.start()
    agent.state["budget"] = 1
    agent.invariant(check, then="refuse")
    with pytest.raises(InvariantViolated):
        agent.checkpoint()
    assert agent.head is None


def test_a_history_is_checked_and_the_first_of_each_stretch_is_told(agent):
    for number, budget in enumerate([3, -1, -2, -2, 4, 2]):
        agent.state["budget"] = budget
        agent.state["n"] = number
        agent.checkpoint(f"c{number}")
    rules = [holdfast.Invariant("budget >= 0"), holdfast.Invariant("budget", monotonic="up")]
    found = agent.check(*rules)
    assert [(one.checkpoint.label, one.invariant, one.first) for one in found] == [
        ("c1", "budget >= 0", True), ("c1", "budget monotonic", True), ("c2", "budget >= 0", False),
        ("c2", "budget monotonic", False), ("c3", "budget >= 0", False), ("c5", "budget monotonic", True),
    ]  # fmt: skip
    assert [one.checkpoint.label for one in agent.check(rules[1], since="c2")] == ["c5"]
    assert agent.check() == []


def test_mistakes_in_a_declaration_are_told_at_once(agent):
    for options in (
        {"then": "explode"}, {"range": 3}, {"type": "numbr"}, {"monotonic": "sideways"}, {"most": 0},
    ):  # fmt: skip
        with pytest.raises(BadOption):
            agent.invariant("budget", **options)
    with pytest.raises(BadExpression):
        agent.invariant("budget >=")


def test_without_invariants_nothing_is_asked(agent, caplog):
    caplog.set_level(logging.INFO, "holdfast.travel")
    agent.state["n"] = 1
    agent.checkpoint()
    assert agent._made_host().judge is None
    assert not caplog.records
