"""An unfinished run owns its branch: nothing is saved, begun or done there meanwhile, so nothing is ever rewound."""

from __future__ import annotations

import asyncio
import threading

import pytest

import holdfast
from holdfast import errors
from tests.conftest import unsaved
from tests.run.bench import Crash


class Outside:
    """What was really done, and what is to go wrong next."""

    def __init__(self):
        self.done = []
        self.trouble = None

        @holdfast.tool
        def book(what):
            self.done.append(what)
            return f"seat {what}"

        @holdfast.tool(effect="read")
        def look(what):
            return what

        @holdfast.durable
        def ask(agent):
            agent.state["answer"] = agent.wait_for("approval")
            return agent.state["answer"]

        @holdfast.durable
        def trip(agent, what):
            agent.state["done"] = [*agent.state.get("done", []), what]
            book(what)
            if self.trouble is not None:
                trouble, self.trouble = self.trouble, None
                raise trouble
            return what

        self.book, self.look, self.ask, self.trip = book, look, ask, trip


@pytest.fixture
def outside():
    return Outside()


def put_off(agent, outside):
    with pytest.raises(errors.Waiting):
        agent.run(outside.ask.options(wait=False))


def interrupt(agent, outside):
    outside.trouble = Crash()
    with pytest.raises(Crash):
        agent.run(outside.trip, "a")


STOPS = [put_off, interrupt]


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_nothing_is_saved_or_begun_beside_an_unfinished_run(opened, outside, stop, anew):
    agent = opened()
    agent.state["before"] = 1
    agent.checkpoint("before")
    stop(agent, outside)
    agent = opened() if anew else agent
    head, (run,) = agent.head.id, agent.runs()
    agent.state["inbox"] = ["a customer wrote"]
    refused = [
        lambda: agent.checkpoint("mail came"),
        lambda: asyncio.run(agent.acheckpoint("mail came")),
        lambda: agent.run(outside.trip, "b"),
        lambda: agent.run(outside.trip.options(id="b"), "b"),
        lambda: asyncio.run(agent.arun(outside.trip, "b")),
        agent.undo,
        agent.redo,
        lambda: agent._store.map(lambda item: item, [1], name="trip-7"),
    ]
    for act in refused:
        with pytest.raises(errors.RunUnfinished, match="has not ended") as caught:
            act()
        assert caught.value.run == run.id
        for way in ("agent.resume", "agent.cancel", "agent.branch", "roll back"):
            assert way in caught.value.hint
    with agent:
        for tool in (outside.book, outside.look):
            with pytest.raises(errors.RunUnfinished):
                tool("z")
        del agent.state["inbox"]
    assert agent.head.id == head
    assert "z" not in outside.done


@pytest.mark.parametrize("stop", STOPS)
def test_unsaved_changes_stop_the_resumption_and_stay(opened, outside, stop):
    agent = opened()
    stop(agent, outside)
    agent.state["mine"] = "not saved yet"
    (run,) = agent.runs()
    agent._store.signal("trip-7", "approval", "yes")
    function = outside.ask if stop is put_off else outside.trip
    for act in (lambda: agent.resume(run.id), lambda: agent.run(function, *run.args.values())):
        with pytest.raises(errors.RunUnfinished, match="not saved"):
            act()
        assert agent.state["mine"] == "not saved yet"
    del agent.state["mine"]
    assert agent.resume(run.id) in {"yes", "a"}
    assert [info.status for info in agent.runs()] == ["finished"]
    assert outside.done in ([], ["a"])


# -- what is allowed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_tags_marks_signals_reading_and_going_back_to_before_it_stay_allowed(opened, outside, stop, anew):
    agent = opened()
    agent.state["before"] = 1
    agent.checkpoint("before")
    stop(agent, outside)
    agent = opened() if anew else agent
    agent.tag("here")
    agent.mark("before", "good")
    agent._store.signal("trip-7", "approval", "yes")
    assert len(agent.log()) == 2
    assert agent.at("before").state == {"before": 1}
    with agent:
        assert agent.effects() is not None
    agent.rollback("before", accept=["book"] if outside.done else [])
    assert agent.state == {"before": 1}
    agent.state["after"] = 2
    agent.checkpoint("after")
    assert agent.run(outside.trip, "c") == "c"
    assert opened().state == {"before": 1, "after": 2, "done": ["c"]}


@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_a_branch_off_an_unfinished_run_is_free_and_the_run_goes_on_where_it_was(opened, outside, anew):
    agent = opened()
    put_off(agent, outside)
    agent = opened() if anew else agent
    side = agent.branch("side")
    side.state["inbox"] = ["a customer wrote"]
    side.checkpoint("mail came")
    assert side.run(outside.trip, "b") == "b"
    store = agent._store
    store.signal("trip-7", "approval", "yes", branch="main")
    assert agent.run(outside.ask) == "yes"
    assert agent.state == {"answer": "yes"}
    assert side.state == {"inbox": ["a customer wrote"], "done": ["b"]}
    with pytest.raises(errors.Waiting):  # what the branch has inherited would take its state back: it begins anew
        side.run(outside.ask.options(wait=False))
    store.signal("trip-7", "approval", "no", branch="side")
    assert side.run(outside.ask) == "no"
    assert side.state == {"inbox": ["a customer wrote"], "done": ["b"], "answer": "no"}


def test_a_branch_resumes_what_it_inherits_while_nothing_else_was_saved_there(opened, outside):
    @holdfast.durable
    def work(agent):
        outside.book("one")
        agent.state["n"] = 1
        agent.checkpoint("one")
        outside.book("two")
        if outside.trouble is not None:
            raise outside.trouble
        return "end"

    agent = opened()
    outside.trouble = Crash()
    with pytest.raises(Crash):
        agent.run(work)
    outside.trouble = None
    for at in ("one", None):
        name = f"side-{at}"
        side = opened().branch(name, at=at)
        assert side.run(work) == "end"
        assert [info.status for info in side.runs()] == ["finished"]
    assert outside.done.count("one") == 1
    side = opened().branch("owned", at="one")
    outside.trouble = Crash()
    with pytest.raises(Crash):
        side.run(work)
    side = opened(branch="owned")
    with pytest.raises(errors.RunUnfinished):  # resumed there, it is the branch's own
        side.checkpoint("no")
    outside.trouble = None
    other = opened().branch("plain", at="one")
    other.state["mine"] = 1
    other.checkpoint("mine")
    again = opened(branch="plain").branch("after plain")
    (inherited,) = again.runs()
    with pytest.raises(errors.RunEnded, match="saved"):
        again.resume(inherited.id)
    assert again.state["mine"] == 1


def test_a_copy_of_an_agent_with_an_unfinished_run_is_free(opened, outside):
    agent = opened()
    put_off(agent, outside)
    store = opened()._store
    store.copy("trip-7", "copy")
    store.copy("trip-7", "plain")
    plain = store.agent("plain")
    plain.state["x"] = 1
    plain.checkpoint("x")
    copy = store.agent("copy")
    store.signal("copy", "approval", "yes", any_run=True)
    assert copy.run(outside.ask) == "yes"
    assert store.agent("plain").state == {"x": 1}
    assert [info.status for info in store.agent("trip-7").runs()] == ["waiting"]


# -- a failed run has ended ---------------------------------------------------------------------------------------


def failing(outside, agent, what):
    outside.trouble = RuntimeError("no")
    with pytest.raises(RuntimeError):
        agent.run(outside.trip, what)


@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_a_failed_run_is_resumed_while_nothing_else_was_begun_or_saved(opened, outside, anew):
    agent = opened()
    failing(outside, agent, "a")
    agent = opened() if anew else agent
    assert agent.run(outside.trip, "a") == "a"
    assert outside.done == ["a"]
    assert agent.state == {"done": ["a"]}
    assert [info.status for info in agent.runs()] == ["finished"]


def test_a_retry_of_a_failed_run_takes_nothing_back_that_came_after(opened, outside):
    first = [True]

    @holdfast.tool
    def buy(what):
        if what == "a" and first:
            first.clear()
            raise holdfast.FailedBeforeEffect("no")
        outside.done.append(what)

    @holdfast.durable
    def work(agent, what):
        buy(what)
        agent.state["done"] = [*agent.state.get("done", []), what]

    agent = opened()
    for what in "abc":
        try:
            agent.run(work, what)
        except errors.ToolFailed:
            assert what == "a"
    agent.state["hand"] = 1
    agent.checkpoint("by hand")
    agent.run(work, "a")
    agent = opened()
    assert agent.state == {"done": ["b", "c", "a"], "hand": 1}
    assert outside.done == ["b", "c", "a"]
    assert [info.status for info in agent.runs()] == ["failed", "finished", "finished", "finished"]


@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_a_run_begun_anew_is_given_what_the_failed_one_had_done(opened, outside, anew):
    agent = opened()
    failing(outside, agent, "a")
    agent.checkpoint("what it left is known")
    agent = opened() if anew else agent
    assert agent.run(outside.trip, "a") == "a"
    assert outside.done == ["a"]
    assert agent.state["done"] == ["a", "a"]
    assert agent.run(outside.trip, "a") == "a"
    assert outside.done == ["a", "a"]  # it answers once
    assert opened()._store.verify().ok


@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_other_arguments_are_stopped_until_what_the_failed_run_did_is_accepted(opened, outside, anew):
    agent = opened()
    failing(outside, agent, "a")
    agent = opened() if anew else agent
    with pytest.raises(errors.MaybeRepeated) as caught:
        agent.run(outside.trip, "b")
    assert [effect.args for effect in caught.value.unclaimed] == [{"what": "a"}]
    agent = opened() if anew else agent
    with agent, pytest.raises(errors.MaybeRepeated):
        outside.book("c")
    agent.accept()
    assert agent.run(outside.trip, "b") == "b"
    assert opened().run(outside.trip, "c") == "c"
    assert outside.done == ["a", "b", "c"]


@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_a_plain_loop_is_given_what_a_failed_run_had_done_once(opened, outside, anew):
    agent = opened()
    failing(outside, agent, "a")
    agent = opened() if anew else agent
    with agent:
        assert outside.book("a") == "seat a"
        agent.checkpoint("known")
    assert outside.done == ["a"]
    agent = opened()
    with agent:
        assert outside.book("a") == "seat a"
    assert outside.done == ["a", "a"]


def test_what_a_failed_run_left_in_doubt_is_settled_first(opened, outside):
    answer = [holdfast.Unknown("busy")]

    @holdfast.tool(probe=lambda effect: answer[0])
    def pay(amount):
        outside.done.append(amount)
        raise ConnectionError("no answer")

    @holdfast.durable
    def work(agent, amount):
        try:
            pay(amount)
        except errors.InDoubt:
            raise RuntimeError("gave up") from None

    agent = opened()
    with pytest.raises(RuntimeError):
        agent.run(work, 1)
    for _ in range(2):
        with pytest.raises((errors.InDoubt, errors.RunUnfinished)):
            agent.run(work, 2)
        agent = opened()
    assert outside.done == [1]


def test_an_id_that_failed_is_not_begun_anew_by_itself(opened, outside):
    agent = opened()
    named = outside.trip.options(id="7")
    outside.trouble = RuntimeError("no")
    with pytest.raises(RuntimeError):
        agent.run(named, "a")
    agent.checkpoint("since")
    for act in (lambda: agent.run(named, "a"), lambda: agent.resume("7")):
        with pytest.raises(errors.RunEnded, match="failed") as caught:
            act()
        assert (caught.value.run, caught.value.status) == ("7", "failed")
        assert "again=True" in caught.value.hint
    assert agent.run(named.options(again=True), "a") == "a"
    assert outside.done == ["a"]
    assert agent.run(named, "a") == "a"
    assert [(info.id, info.status) for info in agent.runs()] == [("7", "failed"), ("7", "finished")]


def test_a_finished_id_with_other_arguments_says_so(opened, outside):
    agent = opened()
    agent.run(outside.trip.options(id="7"), "a")
    with pytest.raises(errors.RunEnded, match="finished") as caught:
        agent.run(outside.trip.options(id="7"), "b")
    assert caught.value.status == "finished"
    assert "another id" in caught.value.hint


# -- cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("anew", [False, True], ids=["same process", "new process"])
def test_a_cancelled_run_has_ended_and_its_branch_is_free(opened, outside, stop, anew):
    agent = opened()
    agent.state["before"] = 1
    stop(agent, outside)
    agent = opened() if anew else agent
    (run,) = agent.runs()
    agent.cancel(run.id)
    agent.cancel(run.id)
    assert agent.state == {"before": 1}
    assert not agent.dirty
    agent.state["after"] = 2
    agent.checkpoint("after")
    agent = opened()
    (run,) = agent.runs()
    assert run.status == "cancelled"
    assert not agent._store.due()
    with pytest.raises(errors.RunEnded, match="cancelled"):
        agent.resume(run.id)
    assert agent.run(outside.trip, "a") == "a"
    assert outside.done == ["a"]  # what the cancelled one had done is given to it
    assert agent.state == {"before": 1, "after": 2, "done": ["a"]}


def test_a_cancelled_id_is_begun_again_only_when_told_so(opened, outside):
    agent = opened()
    named = outside.trip.options(id="7")
    outside.trouble = Crash()
    with pytest.raises(Crash):
        agent.run(named, "a")
    key = agent.effects()[0].key
    agent.cancel("7")
    for _ in range(2):
        with pytest.raises(errors.RunEnded) as caught:
            agent.run(named, "a")
        assert caught.value.status == "cancelled"
        agent = opened()
    agent.accept()
    assert agent.run(named.options(again=True), "a") == "a"
    assert opened().run(named, "a") == "a"
    assert outside.done == ["a", "a"]
    assert len({effect.key for effect in opened().effects()} | {key}) == 2


def test_a_run_with_an_effect_in_doubt_is_not_cancelled(opened, outside):
    @holdfast.tool
    def pay(amount):
        raise ConnectionError("no answer")

    @holdfast.durable
    def work(agent):
        pay(5)

    agent = opened()
    with pytest.raises(errors.InDoubt):
        agent.run(work)
    (run,) = agent.runs()
    with pytest.raises(errors.InDoubt, match="pay"):
        agent.cancel(run.id)
    assert agent.runs()[0].status == "needs attention"
    agent.resolve(agent.effects()[0], "not-done")
    agent.cancel(run.id)
    agent.checkpoint("free")
    assert opened().runs()[0].status == "cancelled"


def test_what_cannot_be_cancelled_says_why(opened, outside):
    agent = opened()
    with pytest.raises(errors.BadOption, match="no run"):
        agent.cancel("nothing")
    agent.run(outside.trip.options(id="7"), "a")
    with pytest.raises(errors.RunEnded, match="finished"):
        agent.cancel("7")

    @holdfast.durable
    def inside(agent):
        with pytest.raises(errors.RunUnfinished, match="executing"):
            agent.cancel(agent.runs()[-1].id)
        return "end"

    assert agent.run(inside) == "end"


# -- going back into a run --------------------------------------------------------------------------------------------


def test_a_run_that_was_rolled_back_into_is_resumed_or_left_and_never_takes_back_what_came_after(opened, outside):
    @holdfast.durable
    def work(agent):
        outside.book("one")
        agent.state["n"] = 1
        agent.checkpoint("one")
        outside.look("x")
        agent.state["n"] = 2
        return "end"

    agent = opened()
    assert agent.run(work) == "end"
    agent.rollback("one")
    assert [info.status for info in agent.runs()] == ["rolled back"]
    assert agent.run(work) == "end"
    assert outside.done == ["one"]
    agent.rollback("one")
    agent.state["mine"] = 1
    agent.checkpoint("mine")
    agent = opened()
    with pytest.raises(errors.RunEnded, match="rolled back"):
        agent.run(work)
    assert agent.state == {"n": 1, "mine": 1}
    assert agent.run(outside.trip, "b") == "b"
    assert agent.state["mine"] == 1
    assert outside.done == ["one", "b"]


# -- hints ------------------------------------------------------------------------------------------------------------


def test_hints_name_the_branch(opened, outside):
    opened("payer").checkpoint("first")
    agent = opened("payer").branch("again")
    put_off(agent, outside)
    with pytest.raises(errors.RunUnfinished, match="holdfast runs cancel payer@again"):
        agent.checkpoint("no")

    @holdfast.tool
    def pay(amount):
        raise ConnectionError("no answer")

    other = opened("payer").branch("doubtful")
    with pytest.raises(errors.InDoubt, match="holdfast effects resolve payer@doubtful"):
        other.run(lambda agent: pay(5))


def test_what_is_being_executed_is_not_to_be_resumed(opened, outside):
    agent = opened()
    agent.checkpoint("first")
    found = []

    def beside():
        for act in (lambda: agent.checkpoint("no"), lambda: agent.run(outside.trip, "b")):
            with pytest.raises(errors.RunUnfinished, match="execut") as caught:
                act()
            found.append(caught.value.hint)

    def work(_):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()

    agent.run(work)
    agent._store.map(work, [1], name="trip-7")
    assert len(found) == 4
    for hint in found:
        assert "Wait" in hint
        for way in ("resume", "cancel", "store.map"):
            assert way not in hint


def test_a_named_run_says_what_it_is_when_it_is_run_with_other_arguments(opened, outside):
    agent = opened()
    outside.trouble = RuntimeError("out of paper")
    with pytest.raises(RuntimeError):
        agent.run(outside.trip.options(id="7"), "a")
    with pytest.raises(errors.RunEnded, match=r"other arguments.*and has failed") as caught:
        agent.run(outside.trip.options(id="7"), "b")
    assert (caught.value.run, caught.value.status) == ("7", "failed")
    assert "change=True" in caught.value.hint
    assert agent.resume("7") == "a"


# -- other agents ------------------------------------------------------------------------------------------------------


def test_a_branch_that_went_its_own_way_is_not_due_for_what_it_inherited(opened, outside):
    @holdfast.durable
    def work(agent):
        agent.checkpoint("in it")
        return agent.wait_for("go")

    agent = opened()
    with pytest.raises(errors.Waiting):
        agent.run(work.options(wait=False))
    side = agent.branch("side")
    assert [info.status for info in side.runs()] == ["interrupted"]
    side.state["x"] = 1
    side.checkpoint("x")
    side = opened(branch="side")
    assert side.runs() == []
    side._store.signal("trip-7", "go", 1)
    assert [info.branch for info in side._store.due()] == ["main"]


@unsaved
def test_a_branch_is_not_begun_with_changes_that_an_owned_one_cannot_save(opened, outside):
    agent = opened()
    put_off(agent, outside)
    agent.state["mine"] = 1
    with pytest.raises(errors.RunUnfinished, match=r"at=agent\.head"):
        agent.branch("side")
    assert agent.branches() == ["main"]
    assert agent.branch("side", at=agent.head).state == {}
    assert agent.state == {"mine": 1}
