"""Going back: what was done outside is undone, newest first, or stands in the way; interrupted, it goes on."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import re
import shutil
import threading
import time
from ast import literal_eval

import pytest

import holdfast
from holdfast import errors
from holdfast.run import records as rec
from holdfast.run.effects import Absent, Found, Unknown
from tests.conftest import unsaved
from tests.lives import CHANGES, dies, point
from tests.run.bench import Crash, Quick


@pytest.fixture
def opened(opened):
    """The agent in a new process, which waits for nothing."""

    def again(*args, **options):
        agent = opened(*args, **options)
        agent._host.clock = Quick()
        return agent

    return again


def records(agent, kind):
    return [record for _, record in agent._host.ledger.records() if isinstance(record, kind)]


def trip(book, *more):
    """A durable function: books one thing after another, with a checkpoint after each."""

    @holdfast.durable(name="trip")
    def trip(agent):
        agent.checkpoint("start")
        agent.state["done"] = []
        for what in ("flight", "hotel", "car", *more):
            agent.state["done"].append(book(what))
            agent.checkpoint(what)

    return trip


# -- undoing ------------------------------------------------------------------------------------------------


def test_effects_are_undone_newest_first_and_the_state_goes_back(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    before = agent._host.ledger.count
    plan = agent.plan_rollback("flight")
    assert agent._host.ledger.count == before
    assert [one.effect.args["what"] for one in plan.undo] == ["car", "hotel"]
    assert not plan.blocked
    assert [checkpoint.label for checkpoint in plan.abandons] == ["car", "hotel"]
    assert plan.apply().label == "flight"
    assert agent.state == {"done": ["flight"]}
    assert world.stands == ["flight"]
    assert world.calls[-2:] == [("cancel", "car"), ("cancel", "hotel")]
    undoing = [intent for intent in records(agent, rec.Intent) if intent.undoes]
    numbers = dict(agent._host.ledger.records())
    assert [numbers[intent.undoes].tool for intent in undoing] == ["book", "book"]
    assert agent._store.verify().ok
    again = opened()
    assert again.state == {"done": ["flight"]}
    assert len(again.plan_rollback("start").undone) == 2
    assert [one.effect.args["what"] for one in again.plan_rollback("start").undo] == ["flight"]


def test_a_run_that_began_before_the_target_goes_on_from_there_with_new_keys(opened, world, book):
    agent = opened()
    function = trip(book)
    agent.run(function)
    agent.rollback("flight")
    assert [run.status for run in agent.runs()] == ["rolled back"]
    opened().run(function)
    assert world.stands == ["flight", "hotel", "car"]
    assert world.calls.count(("book", "flight")) == 1
    assert len(set(world.keys)) == len(world.keys)
    agent = opened()
    assert [checkpoint.label for checkpoint in agent.log()] == ["car", "hotel", "flight", "start", "run trip"]


def test_a_run_that_began_after_the_target_is_rolled_back_and_stays_listed(opened, world, book):
    agent = opened()
    agent.state["x"] = 1
    agent.checkpoint("before")
    agent.run(trip(book).options(id="r"))
    agent.rollback("before")
    assert [(run.id, run.status, run.ended is None) for run in agent.runs()] == [("r", "rolled back", False)]
    assert agent.state == {"x": 1}
    assert world.stands == []
    store = agent._store
    assert store.due() == []
    assert [run for run in store.runs() if run.status in {"running", "interrupted", "waiting"}] == []
    agent.run(trip(book))
    assert world.stands == ["flight", "hotel", "car"]
    assert [run.status for run in agent.runs()] == ["rolled back", "finished"]


def test_what_a_rollback_undid_stays_listed_with_what_undid_it(opened, world, book):
    @holdfast.tool(effect="read")
    def look():
        return 1

    def work(agent):
        agent.checkpoint("start")
        look()
        book("hotel")

    agent = opened()
    agent.run(work)
    before = [(effect.tool, effect.args) for effect in agent.effects()]
    agent.rollback("start")
    listed = [(effect.tool, effect.status) for effect in agent.effects()]
    assert listed == [("look", "rolled back"), ("book", "undone"), ("undo book", "done")]
    assert [(effect.tool, effect.args) for effect in agent.effects()][:2] == before
    opened().run(work)
    listed = [(effect.tool, effect.status) for effect in opened().effects()]
    assert listed[:3] == [("look", "rolled back"), ("book", "undone"), ("undo book", "done")]
    assert listed[3:] == [("look", "done"), ("book", "done")]


@pytest.mark.parametrize("how", ["failed", "waiting"])
def test_a_run_that_had_not_finished_is_rolled_back_too_and_resumes_from_there_when_it_is_run_again(
    opened, world, book, how
):
    broken = [how == "failed"]

    @holdfast.durable
    def work(agent):
        agent.checkpoint("start")
        book("hotel")
        if broken:
            broken.clear()
            if how == "failed":
                raise ValueError("no")
        agent.wait_for("go")

    agent = opened()
    with pytest.raises(ValueError if how == "failed" else errors.Waiting):
        agent.run(work.options(wait=False))
    agent.rollback("start")
    assert [run.status for run in agent.runs()] == ["rolled back"]
    assert agent._store.due() == []
    with pytest.raises(errors.Waiting):
        agent.run(work.options(wait=False))
    assert world.stands == ["hotel"]
    assert [run.status for run in agent.runs()] == ["waiting"]


def test_events_say_what_was_moved_and_decided_and_by_whom(opened, world, book):
    from holdfast.store.changes import who

    @holdfast.tool
    def pay():
        raise ConnectionError("gone")

    agent = opened()
    agent.run(trip(book))
    agent.tag("kept", "flight")
    agent.mark("hotel", "suspect", "odd")
    agent.rollback("flight")
    with pytest.raises(errors.InDoubt):
        agent.run(lambda agent: pay())
    agent.resolve(agent.effects()[-1], "not-done", why="asked them")
    store = agent._store
    store.signal("trip-7", "go", 1)
    events = agent.events()
    told = [(one["what"], one.get("by")) for one in events if one["what"] not in {"open", "rolled back"}]
    me = who()
    assert told == [
        ("signal", me), ("decision", me), ("rollback", me), ("validity", me), ("tag", me),
        ("branch", me), ("agent", me),
    ]  # fmt: skip
    decision = events[1]
    assert (decision["how"], decision["why"], decision["branch"]) == ("not-done", "asked them", "main")


def test_a_plan_says_what_it_will_do_in_text_and_json(opened, book):
    @holdfast.tool(effect="read")
    def look():
        return 1

    agent = opened()
    agent.checkpoint("before")
    with_look = trip(lambda what: (look(), book(what))[1])
    agent.run(with_look)
    plan = agent.plan_rollback("before")
    data = json.loads(json.dumps(plan.to_json()))
    assert [one["tool"] for one in data["undo"]] == ["book"] * 3
    assert data["harmless"] == 3
    assert [effect.tool for effect in plan.harmless] == ["look"] * 3
    assert "- undo: book" in str(plan)
    assert "harmless calls: 3" in str(plan)
    assert data["diff"]["changes"]
    readonly = agent._store.agent("trip-7", readonly=True).plan_rollback("before")
    assert len(readonly.undo) == 3


def test_unsaved_changes_are_saved_before_a_rollback(opened, book):
    agent = opened()
    agent.run(trip(book))
    agent.state["unsaved"] = True
    agent.rollback("start")
    assert [checkpoint.state.get("unsaved") for checkpoint in agent.abandoned()] == [True]


def test_an_async_compensation_is_awaited_in_plain_and_in_async_code(opened):
    done = []

    async def cancel(effect):
        await asyncio.sleep(0)
        done.append(effect.args["what"])

    @holdfast.tool(compensate=cancel)
    async def book(what):
        return what

    @holdfast.durable
    async def work(agent):
        await agent.acheckpoint("start")
        await book(len(done))

    async def both():
        agent = opened()
        await agent.arun(work)
        await agent.arollback("start")
        await agent.arun(work)
        agent.rollback("start")
        await agent.arun(work)

    asyncio.run(both())
    opened().rollback("start")
    assert done == [0, 1, 2]


def test_tools_in_a_compensation_are_recorded_and_not_repeated_when_it_is_called_again(opened, world):
    sent, crash = [], [True]

    @holdfast.tool
    def mail(text):
        sent.append(text)

    def cancel(effect):
        mail("sorry")
        if crash.pop():
            raise Crash
        world.calls.append("cancelled")

    @holdfast.tool(compensate=cancel)
    def book():
        return 1

    def work(agent):
        book()

    agent = opened()
    agent.checkpoint("start")
    crash.append(True)
    agent.run(work)
    with pytest.raises(Crash):
        agent.rollback("start")
    crash[:] = [False]
    with opened() as agent:
        assert agent.state == {}
    assert sent == ["sorry"]
    assert world.calls == ["cancelled"]


def test_a_compensation_cannot_change_the_state(opened):
    def cancel(effect):
        holdfast.current().state["x"] = 1

    @holdfast.tool(compensate=cancel)
    def book():
        return 1

    agent = opened()
    agent.checkpoint("start")
    with agent:
        book()
    agent = opened()
    with pytest.raises(errors.RollbackBlocked, match="ReadOnly"):
        agent.rollback("start")


# -- in the way ---------------------------------------------------------------------------------------------


def test_what_cannot_be_undone_stops_it_before_anything_is_undone_unless_accepted_by_name(opened, world, book):
    @holdfast.tool
    def mail(to):
        world.calls.append(("mail", to))

    def work(agent):
        agent.checkpoint("start")
        book("flight")
        mail("ann")
        book("hotel")

    agent = opened()
    agent.run(work)
    head = agent.head.id
    with pytest.raises(errors.RollbackBlocked) as caught:
        agent.rollback("start")
    assert [effect.tool for effect in caught.value.blocked] == ["mail"]
    assert "cannot undo it" in str(caught.value)
    assert world.stands == ["flight", "hotel"]
    assert agent.head.id == head
    with pytest.raises(errors.BadOption, match="mial"):
        agent.rollback("start", accept=["mial"])
    plan = agent.plan_rollback("start", accept=["mail"])
    assert [one.effect.tool for one in plan.accepted] == ["mail"]
    plan.apply()
    assert world.stands == []
    assert agent.head.label == "start"


def test_a_single_effect_is_accepted_by_its_id_even_where_it_could_be_undone(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    plan = agent.plan_rollback("start")
    hotel = plan.undo[1].effect.id
    agent.rollback("start", accept=[hotel])
    assert world.stands == ["hotel"]


@pytest.mark.parametrize(
    ("answer", "result"),
    [(Found("it"), "undone"), (Absent(), "nothing"), (Unknown("no idea"), "blocked"), (None, "blocked")],
)
def test_what_is_in_doubt_is_asked_about_first(opened, answer, result):
    undone = []

    @holdfast.tool(probe=(lambda effect: answer) if answer else None, compensate=undone.append)
    def book():
        raise Crash

    agent = opened()
    agent.checkpoint("start")
    with pytest.raises(Crash):
        agent.run(lambda agent: book())
    agent = opened()
    if result == "blocked":
        with pytest.raises(errors.RollbackBlocked, match="in doubt"):
            agent.rollback("start")
        assert [effect.status for effect in agent.effects()] == ["in doubt"]
        agent.resolve(agent.effects()[0], "not-done", why="asked them")
    assert agent.rollback("start").label == "start"
    assert [effect.result for effect in undone] == (["it"] if result == "undone" else [])


def test_a_repeatable_call_that_failed_may_have_happened(opened):
    answers = {"x": Unknown("not yet")}
    undone = []

    @holdfast.tool(effect="idempotent", probe=lambda effect: answers["x"], compensate=lambda e: undone.append(e.result))
    def put(x):
        raise TimeoutError

    def work(agent):
        with pytest.raises(errors.ToolFailed):
            put(1)

    agent = opened()
    agent.checkpoint("start")
    agent.run(work)
    with pytest.raises(errors.RollbackBlocked, match="not yet"):
        agent.rollback("start")
    answers["x"] = Found(5)
    agent.rollback("start")
    assert undone == [5]


def test_the_state_of_a_target_that_counts_on_what_was_undone_is_not_gone_to_quietly(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    car = agent.head
    agent.rollback("flight")
    with pytest.raises(errors.RollbackBlocked, match="counts on it"):
        agent.rollback(car)
    assert agent.state == {"done": ["flight"]}
    agent.rollback(car, accept=["book"])
    assert agent.state == {"done": ["flight", "hotel", "car"]}
    assert world.stands == ["flight"]


def test_a_branch_does_not_undo_what_another_made_and_a_plan_says_who_else_knows_an_effect(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    other = agent.branch("try-b")
    plan = agent.plan_rollback("start")
    assert [one.used_by for one in plan.undo] == [("branch try-b",)] * 3
    assert "also known to branch try-b" in str(plan)
    with pytest.raises(errors.RollbackBlocked, match="another branch made it"):
        other.rollback("start")
    with other:
        book("boat")
    other = agent._store.agent("trip-7", branch="try-b")
    other.rollback(other.head)
    assert world.stands == ["flight", "hotel", "car"]
    other.rollback("start", accept=["book"])
    assert other.state == {}
    assert world.stands == ["flight", "hotel", "car"]


def test_a_checkpoint_of_another_branch_whose_effects_are_not_known_here_is_refused(opened, world, book):
    agent = opened()
    agent.state["x"] = 1
    agent.checkpoint("one")
    other = agent.branch("try-b")
    free = agent.checkpoint("free")
    agent.run(trip(book))
    with pytest.raises(errors.BadOption, match="another branch"):
        other.rollback(agent.head)
    assert other.rollback(free).label == "free"
    other.run(trip(book, "boat"))
    other.rollback(free)
    assert world.stands == ["flight", "hotel", "car"]


# -- compensation that fails ----------------------------------------------------------------------------------


def test_a_compensation_is_tried_again_with_growing_pauses(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    world.undoing_fails = 3
    agent.rollback("start")
    assert world.stands == []
    pauses = agent._host.clock.slept
    assert len(pauses) == 3
    assert pauses == sorted(pauses)
    assert len(set(world.keys[3:7])) == 1  # four attempts, one key


def test_when_it_fails_for_good_a_person_is_needed_and_nothing_is_skipped(opened, world, book):
    function = trip(book)
    agent = opened()
    agent.run(function)
    head = agent.head.id
    world.undoing_fails = 5
    with pytest.raises(errors.RollbackBlocked, match="no route") as caught:
        agent.rollback("flight")
    assert [effect.args["what"] for effect in caught.value.remaining] == ["car", "hotel"]
    assert world.stands == ["flight", "hotel", "car"]
    assert agent.head.id == head
    (info,) = [run for run in agent.runs() if run.kind == "rollback"]
    assert info.status == "needs attention"
    world.undoing_fails = 5
    again = opened()
    with pytest.raises(errors.RollbackBlocked):  # nothing else begins
        again.run(function)
    assert again.head.id == head
    again = opened()
    again.run(function)
    assert world.stands == ["flight", "hotel", "car"]
    assert [call for call in world.calls if call[0] == "cancel"] == [("cancel", "car"), ("cancel", "hotel")]


def test_what_was_undone_before_the_failure_is_not_undone_again(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    cancel = book.tool.compensate

    def fails_at_hotel(effect):
        if effect.args["what"] == "hotel":
            raise ConnectionError("never")
        cancel(effect)

    book.tool.compensate = fails_at_hotel
    with pytest.raises(errors.RollbackBlocked) as caught:
        agent.rollback("start")
    assert [effect.args["what"] for effect in caught.value.remaining] == ["hotel", "flight"]
    agent = opened()
    plan = agent.plan_rollback("start")
    assert [one.effect.args["what"] for one in plan.undone] == ["car"]
    assert plan.undo[0].why == "undoing it has failed before"
    agent.rollback("start", accept=["book"])  # that one is left standing, the others are undone
    assert world.stands == ["hotel"]
    assert [call for call in world.calls if call[0] == "cancel"] == [("cancel", "car"), ("cancel", "flight")]
    assert agent.head.label == "start"


@pytest.mark.parametrize("where", ["car", "hotel", "flight"])
def test_a_rollback_that_was_interrupted_is_finished_before_anything_else(opened, world, book, where):
    function = trip(book)
    agent = opened()
    agent.run(function)
    world.crash_in = where
    with pytest.raises(Crash):
        agent.rollback("start")
    agent = opened()
    assert agent.head.label == "car"
    with agent:
        assert agent.head.label == "start"
        assert agent.state == {}
    assert world.stands == []
    assert len([call for call in world.calls if call[0] == "cancel"]) == 3
    agent = opened()
    agent.run(function)
    assert world.stands == ["flight", "hotel", "car"]
    assert agent._store.verify().ok


def test_an_interrupted_rollback_can_be_made_to_go_further_back_but_not_to_what_came_after_it_began(
    opened, world, book
):
    agent = opened()
    agent.run(trip(book))
    agent.state["unsaved"] = 1
    world.crash_in = "hotel"
    with pytest.raises(Crash):
        agent.rollback("flight")
    agent = opened()
    agent.rollback("start")
    assert world.stands == []
    assert agent.head.label == "start"
    assert not [run for run in agent.runs() if run.kind == "rollback"]


# -- inside a run -------------------------------------------------------------------------------------------


def test_a_rollback_inside_a_run_ends_that_execution(opened, world, book):
    tries = []

    def work(agent):
        agent.checkpoint("start")
        book("flight")
        tries.append(1)
        if len(tries) == 1:
            try:
                agent.rollback("start")
            except Exception:
                tries.append("caught")
            tries.append("went on")
        return len(tries)

    agent = opened()
    with pytest.raises(errors.RunRolledBack) as caught:
        agent.run(work)
    assert tries == [1]
    assert [effect.tool for effect in caught.value.undone] == ["book"]
    assert world.stands == []
    assert [run.status for run in agent.runs()] == ["rolled back"]
    assert agent.run(work) == 2
    assert world.stands == ["flight"]
    assert agent._store.verify().ok


def test_a_tool_cannot_roll_back(opened):
    @holdfast.tool(effect="read")
    def back():
        holdfast.current().rollback("start")

    def work(agent):
        agent.checkpoint("start")
        back()

    with pytest.raises(errors.ToolFailed, match="a tool cannot roll"):
        opened().run(work)


# -- replanning ---------------------------------------------------------------------------------------------


def test_the_hook_is_told_what_failed_and_what_was_undone_and_chooses_another_way(opened, world, book):
    told = []

    @holdfast.tool(effect="read")
    def seats(train):
        if train == "full":
            raise LookupError("no seat")
        return 1

    @holdfast.durable
    def by_train(agent, train):
        agent.state["way"] = train
        book("hotel")
        return seats(train)

    def replan(setback):
        told.append((setback.function, type(setback.error).__name__, [effect.tool for effect in setback.undone]))
        assert setback.agent.state == {}
        setback.agent.state["tried"] = setback.attempt
        return functools.partial(by_train, "empty") if setback.attempt < 3 else None

    agent = opened()
    assert agent.run(by_train.options(replan=replan), "full") == 1
    assert told == [("by_train", "ToolFailed", ["book"])]
    assert agent.state == {"tried": 1, "way": "empty"}
    assert world.calls == [("book", "hotel"), ("cancel", "hotel"), ("book", "hotel")]
    with pytest.raises(errors.ToolFailed, match="no seat"):
        agent.run(by_train.options(replan=lambda setback: None), "full")
    assert world.stands == ["hotel"]


@pytest.mark.parametrize("id", [None, "r"])
@pytest.mark.parametrize("place", ["undoing", "choosing"])
def test_a_run_that_was_taken_back_for_a_hook_is_tried_again_after_a_crash(opened, world, book, place, id):
    crash = [place == "choosing"]
    told = []

    @holdfast.durable
    def work(agent, fails):
        book("hotel")
        if fails:
            raise ValueError("no")
        return "fine"

    def replan(setback):
        if crash[0]:
            crash[0] = False
            raise Crash
        told.append((setback.run, str(setback.error), [effect.args["what"] for effect in setback.undone]))
        return functools.partial(work, False)

    world.crash_in = "hotel" if place == "undoing" else None
    with pytest.raises(Crash):
        opened().run(work.options(id=id, replan=replan), True)
    assert opened().run(work.options(id=id, replan=replan), True) == "fine"
    ((run, error, undone),) = told
    assert run == (id or run)
    assert error == "no"
    assert undone == ["hotel"]
    assert world.stands == ["hotel"]


@pytest.mark.parametrize("fails", [False, True], ids=["cannot be undone", "fails to be undone"])
def test_a_failed_run_that_cannot_be_taken_back_for_a_hook_says_how_it_can(opened, fails):
    asked, done = [], []

    def undo(effect):
        raise ConnectionError("no answer")

    @holdfast.tool(name="replan-mail", compensate=undo if fails else None)
    def mail():
        done.append("mail")

    @holdfast.durable
    def work(agent):
        mail()
        raise RuntimeError("out of paper")

    agent = opened()
    with pytest.raises(errors.RollbackBlocked) as caught:
        agent.run(work.options(replan=asked.append))
    call = re.search(r"agent\.rollback\((.*), accept=(.*)\)", caught.value.hint)
    agent.rollback(call[1].strip("'"), accept=literal_eval(call[2]))
    assert [run.status for run in agent.runs()] == ["rolled back"]
    assert (asked, done) == ([], ["mail"])


def test_an_async_run_is_replanned_by_an_async_hook(opened):
    @holdfast.durable
    async def work(agent, fails):
        if fails:
            raise ValueError("no")
        return "fine"

    async def replan(setback):
        await asyncio.sleep(0)
        return functools.partial(work, False)

    async def main():
        return await opened().arun(work.options(replan=replan), True)

    assert asyncio.run(main()) == "fine"


@pytest.mark.parametrize("id", [None, "r"])
@pytest.mark.parametrize("plan", ["second", "third"])
def test_what_the_hook_chose_is_gone_on_with_by_the_call_that_it_was_chosen_for(opened, world, book, plan, id):
    crash, told = [True], []

    @holdfast.durable(name="replan-third")
    def third(agent, city, by):
        book(by)
        if crash and plan == "third" and crash.pop():
            raise Crash
        return f"{by} to {city}"

    @holdfast.durable(name="replan-second")
    def second(agent, city):
        book("bus")
        if crash and crash.pop():
            raise Crash
        if plan == "third":
            raise ValueError("no driver")
        return f"bus to {city}"

    @holdfast.durable
    def first(agent, city):
        book("plane")
        raise ValueError("strike")

    def replan(setback):
        told.append((setback.function, setback.attempt))
        return second if setback.attempt == 1 else functools.partial(third, "Porto", by="train")

    def called(city="Porto"):
        return opened().run(first.options(id=id, replan=replan), city)

    with pytest.raises(Crash):
        called()
    assert [run.status for run in opened().runs()] == ["rolled back", "interrupted"]
    with pytest.raises(errors.RunUnfinished, match="resume"):
        called("Faro")
    if id is not None:  # the hook chose what the id stands for now
        with pytest.raises(errors.RunUnfinished, match=r"replan=.*agent\.resume\('"):
            opened().run(first.options(id=id), "Porto")
    if plan == "third":
        crash.append(True)
        with pytest.raises(Crash):
            called()
    assert called() == ("bus to Porto" if plan == "second" else "train to Porto")
    assert told == [("first", 1), ("replan-second", 2)][: 1 if plan == "second" else 2]
    assert world.stands == ["bus" if plan == "second" else "train"]
    if id is not None:
        assert called() == ("bus to Porto" if plan == "second" else "train to Porto")
    assert len(told) == (1 if plan == "second" else 2)


class Odd(Exception):
    """Raised by a hook."""


@pytest.mark.parametrize("how", ["gives up", "raises", "returns something else"])
def test_a_run_for_which_nothing_else_was_chosen_was_rolled_back_and_is_tried_again(opened, world, book, how):
    tries, seen = [], []

    @holdfast.durable
    def work(agent, city):
        agent.state["city"] = city
        book("hotel")
        tries.append(agent.state.get("hint"))
        raise LookupError("no room")

    def replan(setback):
        seen.append((type(setback.error), str(setback.error), setback.attempt))
        setback.agent.state["hint"] = len(tries)
        setback.agent.checkpoint()
        if how == "raises":
            raise Odd
        return 17 if how == "returns something else" else None

    raised = {"raises": Odd, "gives up": LookupError, "returns something else": errors.BadOption}[how]
    agent = opened()
    for _ in range(3):
        with pytest.raises(raised):
            agent.run(work.options(id="r", replan=replan), "Faro")
        assert {(run.id, run.status, run.error) for run in agent.runs()} == {
            ("r", "rolled back", "LookupError: no room")
        }
        agent = opened()
    assert tries == [None, 1, 2]
    assert seen == [(LookupError, "no room", 1)] * 3
    assert world.stands == []
    with pytest.raises(errors.RunEnded, match="rolled back"):  # and without a hook
        agent.run(work.options(id="r"), "Faro")
    assert agent._store.verify().ok


def test_a_hook_is_not_asked_about_a_run_that_was_not_executed(opened, world, book):
    @holdfast.durable
    def work(agent, fails):
        book("hotel")
        if fails:
            raise LookupError("no room")

    agent = opened()
    with pytest.raises(LookupError):
        agent.run(work, True)
    asked = []
    with pytest.raises(errors.BadOption):
        agent.run(work.options(id="", replan=asked.append), False)
    assert asked == []
    assert world.stands == ["hotel"]


# -- what else begins meanwhile -------------------------------------------------------------------------------


@unsaved
def test_nothing_is_saved_on_top_of_a_rollback_that_has_not_ended(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    world.crash_in = "hotel"
    with pytest.raises(Crash):
        agent.rollback("flight")
    for get in (lambda: agent, opened):
        handle = get()
        handle.state["more"] = 1
        with pytest.raises(errors.RunUnfinished):
            handle.checkpoint()
        with pytest.raises(errors.RunUnfinished):
            asyncio.run(handle.acheckpoint())
        with pytest.raises(errors.RunUnfinished):
            handle.undo()
    handle.rollback("flight")
    handle.state["more"] = 1
    assert handle.checkpoint("after").label == "after"


def test_a_call_that_was_under_way_when_the_target_was_made_keeps_its_outcome(opened, world, book):
    began = asyncio.Event()

    @holdfast.tool(compensate=lambda effect: world.calls.append("undone"))
    async def slow():
        began.set()
        await asyncio.sleep(0.05)
        world.calls.append("slow")
        return 1

    @holdfast.durable
    async def work(agent):
        task = asyncio.create_task(slow())
        await began.wait()
        await agent.acheckpoint("middle")
        return await task

    async def main():
        agent = opened()
        await agent.arun(work)
        await agent.arollback("middle")
        return await agent.arun(work)

    assert asyncio.run(main()) == 1
    assert world.calls == ["slow"]


def test_an_async_run_rolls_itself_back(opened):
    undone = []

    async def cancel(effect):
        undone.append(effect.args)

    @holdfast.tool(compensate=cancel)
    async def book(what):
        return what

    tries = []

    @holdfast.durable
    async def work(agent):
        await agent.acheckpoint("start")
        await book(len(tries))
        tries.append(1)
        if len(tries) < 3:
            await agent.arollback("start") if len(tries) == 1 else agent.rollback("start")
        return len(tries)

    async def main():
        agent = opened()
        for _ in range(2):
            with pytest.raises(errors.RunRolledBack):
                await agent.arun(work)
        return await agent.arun(work)

    assert asyncio.run(main()) == 3
    assert undone == [{"what": 0}, {"what": 1}]


def test_a_plan_is_not_followed_when_something_has_happened_since(opened, world, book):
    agent = opened()
    agent.run(trip(book))
    stale = agent.plan_rollback("flight")
    with agent:
        book("bus")
        with pytest.raises(errors.BadOption, match="since the plan was made, this has happened: book"):
            stale.apply()
    assert "bus" in world.stands


# -- killed ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rollback_is_finished_by_the_next_process_and_undoes_everything_once(tmp_path, rounds):
    ready, here = tmp_path / "ready", tmp_path / "store"
    outside, there = tmp_path / "outside", tmp_path / "world"  # one line for everything that was done

    def tell(*words):
        point()
        with (there if there.exists() else outside).open("a") as file:
            file.write(" ".join(words) + "\n")
        point()

    def told(path):
        return [tuple(line.split()) for line in path.read_text().splitlines()]

    def cancel(effect):
        tell("cancel", effect.args["what"], holdfast.effect().key)

    @holdfast.tool(name="undoing.book", compensate=cancel)
    def book(what):
        tell("book", what, holdfast.effect().key)

    @holdfast.durable
    def travel(agent):
        agent.checkpoint("start")
        for what in ("flight", "hotel", "car"):
            agent.state[what] = book(what)
            agent.checkpoint(what)
        agent.spawn(holdfast.durable(name="pack")(lambda agent: book("bags")), "helper").join()

    with holdfast.open(ready) as store:
        store.agent("trip-7").run(travel)
    done = told(outside)
    for at in itertools.count(1, rounds(2, 1)):
        shutil.copytree(ready, here)
        shutil.copy(outside, there)
        died = dies(lambda: holdfast.open(here).agent("trip-7").rollback("start"), at, *CHANGES)
        with holdfast.open(here) as store:
            agent = store.agent("trip-7")
            with agent:  # what was begun is finished first
                begun = agent.head.label == "start"
            agent = store.agent("trip-7")
            if not begun:  # it was killed before it had said what it was about to do
                assert agent.head.label != "start"
                assert told(there) == done
                agent.rollback("start")
            assert agent.state == {}
            assert {run.status for run in store.agent("trip-7/helper").runs()} == {"rolled back"}
            assert store.verify().ok
        undone = [line for line in told(there) if line[0] == "cancel"]
        # A compensation that was cut off is called again, with the same key: what honours keys sees it once.
        assert len(undone) - len(set(undone)) <= 1
        assert [what for _, what, _ in dict.fromkeys(undone)] == ["bags", "car", "hotel", "flight"]
        shutil.rmtree(here)
        if not died:
            break
    assert at > 20


def test_a_call_that_ends_while_a_rollback_saves_keeps_nobody_waiting(opened, monkeypatch):
    agent, called, may_end, over = opened(), threading.Event(), threading.Event(), threading.Event()

    @holdfast.tool(name="saving.hold", compensate=lambda _: None)
    def hold(what):
        return what

    @holdfast.tool(name="saving.read", effect="read")
    def read():
        called.set()
        may_end.wait()

    def reads():
        with agent:
            read()

    def goes_back():
        agent.rollback("start")
        over.set()

    agent.checkpoint("start")
    with agent:
        hold("a table")
    agent.state["unsaved"] = True
    threading.Thread(target=reads, daemon=True).start()
    called.wait()
    look = agent._writer.look

    def looked():
        may_end.set()
        time.sleep(0.2)  # for the other one to have come as far as it can
        return look()

    monkeypatch.setattr(agent._writer, "look", looked)
    threading.Thread(target=goes_back, daemon=True).start()
    assert over.wait(60), "each waits for what the other has"
    assert agent.head.label == "start"


@pytest.mark.parametrize("made_in", ["a plain loop", "a run", "a task", "a run with more"])
def test_a_thaw_that_is_killed_anywhere_leaves_nothing_to_be_done_twice(store_path, tmp_path, made_in):
    """Accepted effects answer whoever goes on from the image's checkpoint, from the moment at which the agent is there.

    A saved process and one that is started anew meet the same records.
    """
    ready, here, done = store_path.with_name("ready"), store_path, tmp_path / "done"

    @holdfast.tool(name="leaving.book")
    def book(what):
        with done.open("a") as file:
            file.write(f"{what}\n")
        return f"seat in {what}"

    @holdfast.tool(name="leaving.hold", compensate=lambda _: None)
    def hold(what):
        return what

    @holdfast.durable(name="leaving.travel")
    def travel(agent):
        if made_in == "a run with more":  # which is undone
            hold("a table")
        return [book(what) for what in ("flight", "hotel", "car")]

    def work(agent):
        if "a run" in made_in:
            return agent.run(travel)
        with agent.task("trip") if made_in == "a task" else agent:
            return [book(what) for what in ("flight", "hotel", "car")]

    def thaw(path):
        with holdfast.open(path) as store, store.agent("trip-7", when=None) as agent:
            unknown, _, move = agent._plan_thaw("start", ["leaving.book"])
            assert not unknown
            move()

    with holdfast.open(ready) as store, store.agent("trip-7") as agent:
        agent.checkpoint("start")
        seats = work(agent)
        agent.checkpoint("booked")
    booked = done.read_text()
    for at in itertools.count(1):
        shutil.copytree(ready, here)
        died = dies(lambda: thaw(here), at, *CHANGES)
        with holdfast.open(here) as store, store.agent("trip-7") as agent:
            with agent:  # what was begun is finished first
                pass
            if agent.head.label == "start":
                assert work(agent) == seats
                assert done.read_text() == booked, "nothing is done twice"
            else:
                assert died
                assert agent.head.label == "booked"
            assert store.verify().ok
        shutil.rmtree(here)
        if not died:
            break
    assert at > 3
