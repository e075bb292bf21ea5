"""A run once more from one of its positions: what was done before is known, what comes after is done on a branch."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

import holdfast
from holdfast import errors
from tests.run.bench import Crash


@pytest.fixture
def calls():
    """What was really called, with its key."""
    return []


@pytest.fixture
def write(calls):
    def forget(effect):
        calls.append(f"undo {effect.args['what']}")

    @holdfast.tool(name="forking.write", compensate=forget)
    def write(what):
        calls.append(what)
        return f"{what} {len(calls)}"

    return write


@pytest.fixture
def read(calls):
    @holdfast.tool(name="forking.read", effect="read")
    def read(what):
        calls.append(f"read {what}")
        return len(calls)

    return read


@pytest.fixture
def three(write, read):
    """A run of three writes with a read and a checkpoint between them."""

    @holdfast.durable(name="forking.three")
    def three(agent):
        agent.state["done"] = [write("a")]
        agent.checkpoint("after a")
        agent.state["seen"] = read("x")
        with agent.phase("plan"):
            agent.state["done"].append(write("b"))
        agent.state["done"].append(write("c"))
        return list(agent.state["done"])

    return three


def on(store, branch, name="trip-7"):
    return store.agent(name, branch=branch)


def test_calls_before_the_position_are_answered_and_those_after_it_are_made(reopened, calls, three):
    store = reopened()
    agent = store.agent("trip-7")
    assert agent.run(three.options(id="1")) == ["a 1", "b 3", "c 4"]
    assert [one.path for one in agent.effects(run="1")] == ["0", "2", "plan:0/0", "3"]
    info = agent.fork("1", at="3", branch="alt")
    assert (info.branch, info.id, info.status) == ("alt", "1", "interrupted")
    assert calls == ["a", "read x", "b", "c"]
    assert on(store, "alt").resume("1") == ["a 1", "b 3", "c 5"]
    assert calls == ["a", "read x", "b", "c", "c"]
    # The first one is what it was.
    assert agent.run(three.options(id="1")) == ["a 1", "b 3", "c 4"]
    assert dict(on(reopened(), "alt").state)["done"] == ["a 1", "b 3", "c 5"]
    assert holdfast.open(reopened().place).verify().ok
    keys = [one.key for name in ("main", "alt") for one in on(reopened(), name).effects(run="1") if one.path == "3"]
    assert len(set(keys)) == 2  # another branch, another key


@pytest.mark.parametrize(("at", "made"), [("0", 4), ("1", 3), ("2", 3), ("plan:0", 2), ("plan:0/0", 2), ("3", 1)])
def test_every_position_can_be_forked_at_and_every_fork_again(reopened, calls, three, at, made):
    store = reopened()
    agent = store.agent("trip-7")
    agent.run(three.options(id="1"))
    agent.fork("1", at=at, branch="alt")
    store = reopened()
    del calls[:]
    first = on(store, "alt").resume("1")
    assert len(calls) == made
    on(store, "alt").fork("1", at="3", branch="again")
    assert on(store, "again").resume("1")[:2] == first[:2]
    assert store.verify().ok


def test_a_worker_goes_on_with_a_fork_and_with_no_other_branch(reopened, calls, three):
    store = reopened()
    agent = store.agent("trip-7")
    agent.run(three.options(id="1"))
    agent.branch("copy", at="after a").close()
    agent.fork("1", at="3", branch="alt")
    agent.close()
    became = []
    store.worker(tell=became.append).run(drain=True)
    assert [(one.branch, one.became) for one in became] == [("alt", "finished")]
    assert calls.count("c") == 2


def test_the_plan_says_what_is_answered_and_what_may_happen_again(reopened, calls, three):
    agent = reopened().agent("trip-7")
    agent.run(three.options(id="1"))
    plan = agent.plan_fork("1", at="2")
    assert [one.path for one in plan.answered] == ["0"]
    assert [one.path for one in plan.again] == ["2", "plan:0/0", "3"]
    assert [(one.tool, one.args["what"], one.agent) for one in plan.writes] == [
        ("forking.write", "b", "trip-7"),
        ("forking.write", "c", "trip-7"),
    ]
    assert plan.checkpoint.label == "after a"
    assert "may happen again: forking.write" in str(plan)
    assert [one["path"] for one in plan.to_json()["writes"]] == ["plan:0/0", "3"]
    assert agent.branches() == ["main"]
    assert calls == ["a", "read x", "b", "c"]
    agent.rollback("after a")
    assert [one.path for one in agent.plan_fork("1", at="0").writes] == ["0"]  # the others are undone


@pytest.mark.parametrize("taken", [True, False])
def test_what_a_failed_run_had_left_is_not_done_again_by_a_fork_of_the_next_one(reopened, calls, write, read, taken):
    fails, dies = [True], [] if taken else [True]

    @holdfast.durable(name="forking.left")
    def function(agent, number):
        if number > 1:
            read("x")
        if dies and not fails:
            raise Crash
        found = write("a")
        if fails:
            raise ValueError("no")
        return [found, write("b")]

    store = reopened()
    agent = store.agent("trip-7")
    with pytest.raises(ValueError, match="no"):
        agent.run(function.options(id="1"), 1)
    fails.clear()
    if taken:
        assert agent.run(function.options(id="2"), 2) == ["a 1", "b 3"]
    else:
        with pytest.raises(Crash):
            agent.run(function.options(id="2"), 2)
    dies.clear()
    agent.fork("2", at="0", branch="alt")
    store = reopened()
    assert on(store, "alt").resume("2")[0] == "a 1"
    assert (calls.count("a"), calls.count("read x")) == (1, 2)
    store.copy("trip-7", "copy")
    assert on(store, "alt", "copy")._host.check_free() is None
    assert store.verify().ok


def test_a_position_that_is_not_there_is_refused_with_those_that_are(reopened, three):
    agent = reopened().agent("trip-7")
    agent.run(three.options(id="1"))
    with pytest.raises(errors.BadOption, match="nothing recorded at '7'") as caught:
        agent.plan_fork("1", at="7")
    assert "0, 2, plan:0/0, 3" in caught.value.hint
    with pytest.raises(errors.BadOption, match="no run"):
        agent.plan_fork("2", at="0")
    with pytest.raises(errors.BadName, match="already a branch"):
        agent.fork("1", at="0", branch="main")
    assert agent.branches() == ["main"]


@pytest.mark.parametrize(("run", "at"), [("1", 3), (None, "3"), ("1", None), ("1", ""), ("1", "/"), ("1", "worker")])
def test_what_is_no_position_is_refused(reopened, three, run, at):
    agent = reopened().agent("trip-7")
    agent.run(three.options(id="1"))
    with pytest.raises(errors.BadOption):
        agent.plan_fork(run, at=at)


def test_a_position_inside_a_call_is_refused(reopened, write):
    @holdfast.tool(name="forking.outer")
    def outer():
        return write("inner")

    @holdfast.durable(name="forking.nested")
    def function(agent):
        return outer()

    agent = reopened().agent("trip-7")
    agent.run(function.options(id="1"))
    with pytest.raises(errors.BadOption, match="inside a call") as caught:
        agent.plan_fork("1", at="0/0")
    assert "Fork at 0." in caught.value.hint
    assert [one.tool for one in agent.plan_fork("1", at="0").writes] == ["forking.outer", "forking.write"]


def test_what_a_changed_program_did_anew_counts_from_there(reopened, calls, read, write):
    order = ["x", "y", "z"]

    @holdfast.durable(name="forking.changes")
    def function(agent, stops):
        for what in order:
            agent.state[what] = read(what)
        if stops:
            raise Crash
        return write("end")

    agent = reopened().agent("trip-7")
    with pytest.raises(Crash):
        agent.run(function.options(id="1"), True)
    order[1] = "other"
    agent.run(function.options(id="1", change=True), False)
    agent.fork("1", at="2", branch="alt")
    del calls[:]
    on(agent._store, "alt").resume("1")
    assert calls == ["read z", "end"]  # "other" is answered: the first y counts no more


def test_a_run_that_went_on_from_a_failed_call_is_forked_at_the_call_that_counts(reopened, calls, read, write):
    fails = [True]

    @holdfast.tool(name="forking.picky", effect="read", raises=(ValueError,))
    def picky():
        if fails:
            raise ValueError("no")
        return "yes"

    @holdfast.durable(name="forking.picks")
    def function(agent):
        read("x")
        found = picky()
        read("y")
        return found

    store = reopened()
    agent = store.agent("trip-7")
    with pytest.raises(ValueError, match="no"):
        agent.run(function.options(id="1"))
    fails.clear()
    agent.run(function.options(id="1"))
    agent.fork("1", at="2", branch="alt")
    fails.append(True)
    del calls[:]
    assert on(store, "alt").resume("1") == "yes"
    assert calls == ["read y"]


# -- what is under way at the position ------------------------------------------------------------------------


def test_calls_that_were_under_way_are_known_and_not_made_again(reopened, calls, write):
    @holdfast.durable(name="forking.tasks")
    async def function(agent):
        begun, done = asyncio.Event(), asyncio.Event()

        async def first():
            return await long("long")

        @holdfast.tool(name="forking.long")
        async def long(what):
            begun.set()
            await done.wait()
            calls.append(what)
            return what

        @holdfast.tool(name="forking.short")
        async def short(what):
            calls.append(what)
            done.set()
            return what

        one = asyncio.create_task(first())
        if not again:
            await begun.wait()
        await short("short")
        done.set()
        return await one

    again = []
    store = reopened()
    agent = store.agent("trip-7")
    assert asyncio.run(agent.arun(function.options(id="1"))) == "long"
    again.append(True)
    plan = agent.plan_fork("1", at="0")
    assert [one.tool for one in plan.answered] == ["forking.long"]
    assert [one.tool for one in plan.writes] == ["forking.short"]
    plan.apply("alt")
    assert asyncio.run(on(store, "alt").aresume("1")) == "long"
    assert calls == ["short", "long", "short"]
    assert store.verify().ok


@pytest.fixture
def doubtful(calls, write):
    """A run with a call in doubt that was under way when another one was made, and what its probe answers."""
    answers = [holdfast.Unknown("who knows")]
    begun = asyncio.Event()

    @holdfast.tool(name="forking.lost", probe=lambda _: answers[0])
    async def lost(what):
        calls.append(what)
        begun.set()
        await asyncio.Event().wait()

    @holdfast.durable(name="forking.doubtful")
    async def function(agent):
        task = asyncio.create_task(lost("b"))
        await begun.wait()
        await write.acall("c")
        if calls.count("c") < 2:
            raise Crash
        return await task

    return function, answers


def test_what_is_in_doubt_before_the_position_is_settled_first(reopened, calls, doubtful):
    function, answers = doubtful
    with pytest.raises(Crash):
        asyncio.run(reopened().agent("trip-7").arun(function.options(id="1")))
    store = reopened()
    agent = store.agent("trip-7")
    assert [(one.tool, one.path, one.status) for one in agent.effects(run="1")] == [
        ("forking.lost", "~0/0", "in doubt"),
        ("forking.write", "0", "done"),
    ]
    plan = agent.plan_fork("1", at="0")
    assert [one.tool for one in plan.in_doubt] == ["forking.lost"]
    with pytest.raises(errors.InDoubt):
        plan.apply("alt")
    with pytest.raises(errors.InDoubt):
        store.agent("trip-7", readonly=True).fork("1", at="0", branch="alt")
    assert agent.branches() == ["main"]
    answers[0] = holdfast.Found("b it is")
    plan.apply("alt")
    for handle in (agent, on(store, "alt")):
        assert [one.status for one in handle.effects(run="1") if one.tool == "forking.lost"] == ["done"]
    assert asyncio.run(on(store, "alt").aresume("1")) == "b it is"
    assert calls == ["b", "c", "c"]


def test_a_call_before_the_position_that_was_not_made_is_not_made_by_both(reopened, calls, doubtful):
    function, answers = doubtful
    with pytest.raises(Crash):
        asyncio.run(reopened().agent("trip-7").arun(function.options(id="1")))
    agent = reopened().agent("trip-7")
    answers[0] = holdfast.Absent()
    with pytest.raises(errors.BadOption, match="and not made") as caught:
        agent.fork("1", at="0", branch="alt")
    assert "Fork at ~0/0" in caught.value.hint
    agent.fork("1", at="~0/0", branch="alt")
    assert agent.branches() == ["main", "alt"]


# -- children, signals, batches, limits -------------------------------------------------------------------------


@pytest.fixture
def family(write):
    def child(agent, what):
        return write(what)

    holdfast.durable(name="forking.child")(child)

    @holdfast.durable(name="forking.parent")
    def parent(agent):
        one = agent.spawn(child, "one", "x")
        write("between")
        first = one.join()
        two = agent.spawn(child, "two", "y")
        return [first, two.join(), write("end")]

    return parent


def test_children_that_were_joined_are_known_and_later_ones_are_begun_anew(reopened, calls, family):
    store = reopened()
    agent = store.agent("trip-7")
    agent.run(family.options(id="1"))
    paths = [(one.path, one.tool) for one in agent.effects(run="1")]
    second = [path for path, tool in paths if tool == "holdfast.spawn"][1]
    plan = agent.plan_fork("1", at=second)
    assert [(one.agent, one.args["what"]) for one in plan.writes] == [("trip-7", "end"), ("trip-7/two", "y")]
    plan.apply("alt")
    on(store, "alt").resume("1")
    assert {what: calls.count(what) for what in ("x", "between", "y", "end")} == {
        "x": 1, "between": 1, "y": 2, "end": 2,
    }  # fmt: skip
    assert store.agent("trip-7/two", branch="alt").runs()[0].status == "finished"
    assert store.agent("trip-7/one").branches() == ["main"]
    assert store.verify().ok


def test_a_fork_between_the_beginning_of_a_child_and_its_end_is_refused(reopened, family):
    agent = reopened().agent("trip-7")
    agent.run(family.options(id="1"))
    with pytest.raises(errors.BadOption, match="trip-7/one was begun before 1") as caught:
        agent.plan_fork("1", at="1")
    assert "Fork at 0," in caught.value.hint


def test_the_run_of_a_child_and_a_batch_are_not_forked(reopened, family, write):
    store = reopened()
    store.agent("trip-7").run(family.options(id="1"))
    child = store.agent("trip-7/one")
    with pytest.raises(errors.BadOption, match="goes on with its parent"):
        child.plan_fork(child.runs()[0].id, at="0")
    store.map(write, ["p", "q"], name="batch")
    batch = store.agent("batch")
    with pytest.raises(errors.BadOption, match="is a map"):
        batch.plan_fork(batch.runs()[0].id, at="0:0")


def test_signals_before_the_position_are_known_and_later_ones_are_sent_again(reopened, calls, write):
    @holdfast.durable(name="forking.waits")
    def function(agent):
        one = agent.wait_for("one")
        write("between")
        return [one, agent.wait_for("two")]

    store = reopened()
    agent = store.agent("trip-7")
    for name in ("one", "two"):
        store.signal("trip-7", name, name, any_run=True)
    assert agent.run(function.options(id="1")) == ["one", "two"]
    plan = agent.plan_fork("1", at="1")
    assert plan.signals == ["two"]
    plan.apply("alt")
    with pytest.raises(holdfast.Waiting):
        on(store, "alt").resume("1", wait=False)
    store.signal("trip-7", "two", "again", branch="alt")
    assert on(store, "alt").resume("1") == ["one", "again"]
    assert calls == ["between", "between"]


def test_a_cancelled_run_can_be_forked_before_it_was_told(reopened, calls, write):
    @holdfast.durable(name="forking.stops")
    def function(agent):
        write("a")
        agent.wait_for("go")
        return write("b")

    store = reopened()
    agent = store.agent("trip-7")
    with pytest.raises(holdfast.Waiting):
        agent.run(function.options(id="1", wait=False))
    agent.cancel("1")
    agent.fork("1", at="1", branch="alt")
    store.signal("trip-7", "go", branch="alt")
    assert on(store, "alt").resume("1") == "b 2"
    assert agent.runs()[0].status == "cancelled"


def test_a_run_whose_time_is_over_is_not_forked_before_it_was_told(reopened, write):
    @holdfast.durable(name="forking.late")
    def function(agent):
        write("a")
        agent.wait_for("never")

    agent = reopened().agent("trip-7")
    with pytest.raises(holdfast.Cancelled):
        agent.run(function.options(id="1", limit_s=1.0))
    with pytest.raises(errors.BadOption, match="the fork would stop at once"):
        agent.plan_fork("1", at="0")


def test_what_was_undone_since_cannot_be_counted_on(reopened, calls, three):
    agent = reopened().agent("trip-7")
    agent.checkpoint("start")
    agent.run(three.options(id="1"))
    agent.rollback("after a")
    agent.run(three.options(id="1"))
    agent.fork("1", at="3", branch="alt")  # b was made anew
    agent.rollback("start")
    with pytest.raises(errors.RunEnded, match="rolled back"):
        agent.plan_fork("1", at="3")


def test_a_rollback_of_a_fork_leaves_what_the_other_branch_did(reopened, calls, three):
    store = reopened()
    agent = store.agent("trip-7")
    agent.run(three.options(id="1"))
    agent.fork("1", at="3", branch="alt")
    alt = on(store, "alt")
    alt.resume("1")
    assert [one.effect.args["what"] for one in alt.plan_rollback("after a").undo] == ["c"]
    assert [one.effect.args["what"] for one in alt.plan_rollback("after a").blocked] == ["b"]


def test_a_fork_on_a_server_is_as_everywhere(request, monkeypatch, calls, three):
    server = request.getfixturevalue("postgres_server")
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # it does not flush
    with server.database(f"test_{os.urandom(6).hex()}") as url, holdfast.open(url) as store:
        agent = store.agent("trip-7")
        agent.run(three.options(id="1"))
        agent.fork("1", at="2", branch="alt")
        agent.close()
        store.worker().run(drain=True)
        assert [info.status for info in on(store, "alt").runs()] == ["finished"]
        assert [calls.count(what) for what in ("a", "read x", "b", "c")] == [1, 2, 2, 2]
        assert store.verify().ok


# -- who else is there --------------------------------------------------------------------------------------------


def test_a_run_that_is_executed_can_be_forked_and_goes_on(reopened, calls, write, read):
    forked = []

    @holdfast.durable(name="forking.live")
    def function(agent):
        write("a")
        write("b")
        if not forked:
            forked.append(True)
            seen = holdfast.open(store.place).agent("trip-7", readonly=True)
            import threading

            there = threading.Thread(target=lambda: seen.fork("1", at="1", branch="alt"))
            there.start()
            there.join()
        return write("c")

    store = reopened()
    assert store.agent("trip-7").run(function.options(id="1")) == "c 3"
    assert on(store, "alt").resume("1") == "c 5"
    assert calls == ["a", "b", "c", "b", "c"]


def test_a_fork_inside_a_run_is_refused(reopened, three):
    @holdfast.durable(name="forking.inside")
    def function(agent):
        agent.fork("1", at="0", branch="alt")

    agent = reopened().agent("trip-7")
    agent.run(three.options(id="1"))
    with pytest.raises(errors.BadOption, match="inside a run"):
        agent.run(function.options(id="2"))
    assert agent.branches() == ["main"]


def test_what_has_happened_since_the_plan_was_made_has_to_be_seen(reopened, calls, write):
    @holdfast.durable(name="forking.goes_on")
    def function(agent):
        write("a")
        agent.wait_for("go")
        return write("b")

    store = reopened()
    agent = store.agent("trip-7")
    with pytest.raises(holdfast.Waiting):
        agent.run(function.options(id="1", wait=False))
    plan = agent.plan_fork("1", at="1")
    store.signal("trip-7", "go")
    agent.resume("1")
    with pytest.raises(errors.BadOption, match="since the plan was made"):
        plan.apply("alt")
    assert agent.branches() == ["main"]


def test_a_fork_in_the_middle_of_random_draws_draws_the_numbers_that_the_run_drew(reopened, calls, write):
    store = reopened()
    agent = store.agent("trip-7")
    agent.run(rolls(write).options(id="0"), [])
    first = agent.run(rolls(write).options(id="1"), [])
    agent.fork("1", at="2", branch="alt")
    again = on(store, "alt").resume("1")
    assert again[:2] == first[:2]
    assert calls[-2:] == calls[-4:-2]
    on(store, "alt").fork("1", at="2", branch="third")
    assert on(store, "third").resume("1")[:2] == first[:2]


def rolls(write):
    @holdfast.durable(name="forking.rolls")
    def function(agent, dies):
        draw = agent.generator("dice", random.Random(5))
        found = [write(draw.randrange(10**9)) for _ in range(4)]
        agent.checkpoint("rolled")
        if DIES:
            DIES.pop()
            raise Crash
        return found

    return function


DIES = []


def test_a_fork_that_was_killed_while_it_went_on_is_resumed(reopened, calls, write):
    function = rolls(write)
    store = reopened()
    store.agent("trip-7").run(function.options(id="0"), [])
    store.agent("trip-7").run(function.options(id="1"), [])
    for at in ("0", "2", "3"):
        store.agent("trip-7").fork("1", at=at, branch=f"alt-{at}")
        DIES.append(True)
        with pytest.raises(Crash):
            on(store, f"alt-{at}").resume("1")
        store = reopened()
        made = len(calls)
        on(store, f"alt-{at}").resume("1")
        assert len(calls) == made
