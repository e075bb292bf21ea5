"""Children: begun once, joined, cancelled, and taken back with their parent."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import holdfast
from holdfast import errors
from tests.run.bench import Crash


def pack(book):
    @holdfast.durable(name="pack")
    def pack(agent, what):
        agent.state["what"] = what
        book(what)
        return {"packed": what}

    return pack


def test_children_run_with_a_state_and_a_line_of_their_own_and_give_their_results(opened, world, book):
    job = pack(book)

    def work(agent):
        children = [agent.spawn(job, name, name) for name in ("bags", "box")]
        agent.state["got"] = [child.join() for child in children]
        return [child.name for child in children]

    agent = opened()
    assert agent.run(work) == ["trip-7/bags", "trip-7/box"]
    assert agent.state == {"got": [{"packed": "bags"}, {"packed": "box"}]}
    store = agent._store
    assert store.agent("trip-7/bags").state == {"what": "bags"}
    assert [run.status for run in store.agent("trip-7/box").runs()] == ["finished"]
    assert sorted(world.stands) == ["bags", "box"]
    assert store.verify().ok


@pytest.mark.parametrize("place", ["spawned", "joined", "child"])
def test_a_parent_that_is_executed_again_finds_its_child_and_begins_no_other(opened, world, book, place):
    crash = [True]
    job = pack(book)

    def reach(where):
        if where == place and crash and crash.pop():
            raise Crash

    @holdfast.durable
    def fragile(agent, what):
        book(what)
        reach("child")
        return what

    def work(agent):
        child = agent.spawn(fragile, "bags", "bags")
        reach("spawned")
        found = child.join()
        reach("joined")
        return found

    agent = opened()
    with pytest.raises((Crash, errors.ToolFailed)):
        agent.run(work)
    wait_for_children()
    assert opened().run(work) == "bags"
    assert world.calls == [("book", "bags")]
    assert job is not fragile


def wait_for_children():
    deadline = time.monotonic() + 180
    while any(thread.name.startswith("trip-7/") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_that_fails_fails_its_parent_and_is_tried_again_with_it(opened, world):
    fails = [True]

    def job(agent):
        if fails[0]:
            raise ValueError("no room")
        return "fine"

    def work(agent):
        return agent.spawn(job, "bags").join()

    agent = opened()
    with pytest.raises(errors.ToolFailed, match="child trip-7/bags failed: ValueError: no room") as caught:
        agent.run(work)
    assert caught.value.error_type == "ValueError"
    assert [run.status for run in agent._store.agent("trip-7/bags").runs()] == ["failed"]
    fails[0] = False
    assert opened().run(work) == "fine"


def test_a_child_in_doubt_stops_its_parent_until_somebody_decides(opened):
    @holdfast.tool
    def pay():
        raise TimeoutError

    def job(agent):
        return pay()

    def work(agent):
        return agent.spawn(job, "bags").join()

    agent = opened()
    with pytest.raises(errors.InDoubt):
        agent.run(work)
    assert [run.status for run in agent.runs()] == ["needs attention"]
    child = agent._store.agent("trip-7/bags")
    child.resolve(child.effects()[0], "done", result="paid", why="asked them")
    assert opened().run(work) == "paid"


def test_a_run_ends_when_its_children_have(opened, world, book):
    def slow(agent):
        time.sleep(0.1)
        book("late")

    def work(agent):
        agent.spawn(slow, "bags")
        return "done"

    agent = opened()
    assert agent.run(work) == "done"
    assert world.stands == ["late"]


@pytest.mark.parametrize("place", ["cancelled", "joined"])
def test_joining_a_cancelled_child_raises_the_same_when_the_parent_is_executed_again(opened, place):
    told, fails = [], [True]

    @holdfast.tool(effect="read")
    def look():
        time.sleep(0.01)

    def job(agent):
        while True:
            look()

    def reach(where):
        if where == place and fails and fails.pop():
            raise RuntimeError("out of paper")

    def work(agent):
        child = agent.spawn(job, "bags")
        child.cancel()
        reach("cancelled")
        for _ in range(2):
            with pytest.raises(errors.ToolFailed) as caught:
                child.join()
            told.append((caught.value.error_type, str(caught.value)))
        reach("joined")
        return "fine"

    with pytest.raises(RuntimeError):
        opened().run(work)
    assert opened().run(work) == "fine"
    assert set(told) == {("Cancelled", "child trip-7/bags failed: Cancelled: trip-7/bags was cancelled by trip-7")}


def test_a_child_that_has_ended_is_joined_again_after_a_restart(opened, world, book):
    crash = [True]
    job = pack(book)

    def work(agent):
        child = agent.spawn(job, "bags", "bags")
        found = [child.join()]
        if crash and crash.pop():
            raise Crash
        return [*found, child.join()]

    with pytest.raises(Crash):
        opened().run(work)
    assert opened().run(work) == [{"packed": "bags"}] * 2
    assert world.calls == [("book", "bags")]


# -- a child that is not where its parent is --------------------------------------------------------------------


def moved_by_bundle(store, tmp_path):
    store.export(tmp_path / "bundle", ["trip-7"])
    there = holdfast.open(tmp_path / "there")
    there.import_bundle(tmp_path / "bundle")
    there.remove("trip-7/bags")
    return there


def moved_by_push(store, tmp_path):
    there = holdfast.open(tmp_path / "there")
    store.push(there, ["trip-7"])
    there.remove("trip-7/bags")
    return there


def left_behind(store, tmp_path):
    store.remove("trip-7/bags")
    return store


def another_of_that_name(store, tmp_path):
    store.remove("trip-7/bags")
    store.agent("trip-7/bags").checkpoint("another")
    return store


class Family:
    """A parent that is put off when its child has booked, and waits."""

    def __init__(self, book):
        self.waits = True

        @holdfast.durable(name="careful")
        def careful(agent, what):
            book(what)
            if self.waits:
                agent.wait_for("go")
            return what

        @holdfast.durable(name="family")
        def work(agent):
            try:
                child = agent.spawn(careful, "bags", "bags")
            except Exception:
                return "without"
            return child.join()

        self.work = work.options(wait=False)

    def put_off(self, agent):
        with pytest.raises(errors.Waiting):
            agent.run(self.work)
        self.waits = False
        agent.close()
        return agent._store


@pytest.mark.parametrize("how", [moved_by_bundle, moved_by_push, left_behind, another_of_that_name])
def test_a_child_that_is_not_where_its_parent_is_is_not_begun_anew(opened, world, book, tmp_path, how):
    family = Family(book)
    with how(family.put_off(opened()), tmp_path) as store:
        agent = store.agent("trip-7")
        for _ in range(2):
            with pytest.raises(errors.InDoubt, match="trip-7/bags was begun by trip-7, and is not in this") as caught:
                agent.run(family.work)
        (info,) = agent.runs()
        assert info.status == "needs attention"
        assert f"holdfast runs cancel trip-7 {info.id}" in caught.value.hint
        assert world.calls == [("book", "bags")]
        # It is lost, and somebody says so.
        agent.cancel(info.id)
        agent.accept()
        assert agent.run(family.work) == "bags"


def test_a_parent_goes_on_when_its_child_has_come_after_it(opened, world, book, tmp_path):
    family = Family(book)
    here = family.put_off(opened())
    with moved_by_push(here, tmp_path) as there:
        with pytest.raises(errors.InDoubt):
            there.agent("trip-7").run(family.work)
        here.push(there, ["trip-7/bags"])
        assert there.agent("trip-7").run(family.work) == "bags"
    assert world.calls == [("book", "bags")]


@pytest.mark.parametrize("how", ["push", "push all", "pull", "bundle", "part of a bundle"])
def test_a_parent_brings_its_children_as_they_are_then_wherever_it_goes(opened, world, book, tmp_path, how):
    @holdfast.durable(name="slow")
    def slow(agent):
        for what in ("bags", "meal"):
            book(what)
            agent.wait_for(what)
        return "both"

    @holdfast.durable(name="parent")
    def parent(agent):
        return agent.spawn(slow, "bags").join()

    agent = opened()
    here = agent._store
    with holdfast.open(tmp_path / "there") as there:
        with pytest.raises(errors.Waiting):
            agent.run(parent.options(id="r", wait=False))
        here.push(there, ["trip-7/bags"])  # old by the time that the parent comes
        here.signal("trip-7/bags", "bags")
        with pytest.raises(errors.Waiting):
            agent.resume("r", wait=False)
        here.agent("other").checkpoint("x")
        if how.startswith("push"):
            here.push(there, ["trip-7"] if how == "push" else [])
        elif how == "pull":
            there.pull(here, ["trip-7"])
        else:
            here.export(tmp_path / "bundle", ["trip-7", "other"])
            there.import_bundle(tmp_path / "bundle", ["trip-7"] if how.startswith("part") else [])
        assert (there._db.view.agent("other") is None) == (how in {"push", "pull", "part of a bundle"})
        there.signal("trip-7/bags", "meal")
        assert there.agent("trip-7").resume("r", wait=False) == "both"
    assert world.calls == [("book", "bags"), ("book", "meal")]


def test_no_child_is_older_than_its_parent_where_a_push_was_interrupted(opened, tmp_path):
    agent = opened()
    here = agent._store
    agent.checkpoint("x")
    here.agent("trip-7/bags/small").checkpoint("x")
    here.agent("trip-7/bags").checkpoint("x")
    with holdfast.open(tmp_path / "there") as there:
        arrived = []

        def progress(what, done, total):
            arrived.append([one.name for one in there._db.view.agents()])

        report = here.push(there, ["trip-7"], progress=progress)
        assert [one.name for one in report.agents] == ["trip-7", "trip-7/bags", "trip-7/bags/small"]
        assert arrived == [[], ["trip-7/bags/small"], ["trip-7/bags/small", "trip-7/bags"]]


def test_a_rollback_does_not_pass_over_what_a_child_did_that_is_not_here(opened, world, book):
    agent = opened()
    agent.run(family(book))
    agent._store.remove("trip-7/bags")
    with pytest.raises(errors.RollbackBlocked, match="it began trip-7/bags, which is not in this store") as caught:
        agent.rollback("start")
    assert world.stands == ["flight", "bags", "hotel"]
    agent.rollback("start", accept=[caught.value.blocked[0].id])
    assert world.stands == ["bags"]
    agent.run(family(book))
    agent.rollback("start")  # what was accepted before is not asked about again
    assert world.stands == ["bags"]


# -- a parent that stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, Crash])
def test_a_child_stops_when_its_parent_does_and_goes_on_with_it(opened, world, book, error):
    began, ends = threading.Event(), [True]

    @holdfast.tool(effect="read")
    def look():
        began.set()
        time.sleep(0.001)

    def job(agent):
        book("first")
        while ends:
            look()
        return book("second")

    def middle(agent):
        return agent.spawn(job, "small").join()

    def work(agent):
        child = agent.spawn(middle, "bags")
        began.wait(180)
        if ends:
            raise error
        return child.join()

    agent = opened()
    with pytest.raises(error):
        agent.run(work)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("trip-7/")] == []
    assert world.calls == [("book", "first")]
    assert [(info.agent, info.status) for info in agent._store.runs()] == [
        ("trip-7/bags/small", "interrupted"),
        ("trip-7/bags", "interrupted"),
        ("trip-7", "failed" if error is RuntimeError else "interrupted"),
    ]
    ends.clear()
    assert agent.run(work) == "second"
    assert world.calls == [("book", "first"), ("book", "second")]


def test_a_parent_does_not_wait_for_ever_for_a_child_that_comes_to_no_call(opened, world, book, monkeypatch):
    began, goes_on, fails = threading.Event(), threading.Event(), [True]

    def job(agent):
        began.set()
        goes_on.wait(180)
        return book("bags")

    def work(agent):
        child = agent.spawn(job, "bags")
        began.wait(180)
        if fails:
            raise RuntimeError("out of paper")
        return child.join()

    agent = opened()
    monkeypatch.setattr("holdfast.run.children.EXIT_S", 0.01)
    with pytest.raises(RuntimeError):
        agent.run(work)
    fails.clear()
    threading.Timer(0.05, goes_on.set).start()
    assert agent.run(work) == "bags"  # which waits for the child to stop, and resumes it
    assert world.calls == [("book", "bags")]


def test_a_limit_of_an_async_run_stops_its_children_too(opened, world):
    @holdfast.tool(effect="idempotent")
    async def put(what):
        world.calls.append(what)

    async def go():
        began, waits = asyncio.Event(), [True]

        @holdfast.durable
        async def job(agent):
            await put("first")
            began.set()
            if waits:
                await asyncio.Event().wait()
            await put("second")

        @holdfast.durable
        async def work(agent):
            await (await agent.aspawn(job, "bags")).ajoin()

        agent = opened()
        running = asyncio.ensure_future(agent.arun(work))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [info.status for info in agent._store.runs()] == ["interrupted", "interrupted"]
        waits.clear()
        await agent.arun(work)

    asyncio.run(go())
    assert world.calls == ["first", "second"]


def test_a_child_goes_on_while_its_parent_is_put_off(opened, world, book):
    goes_on = threading.Event()

    def job(agent):
        goes_on.wait(180)
        return book("bags")

    @holdfast.durable
    def work(agent):
        child = agent.spawn(job, "bags")
        agent.wait_for("go")
        return child.join()

    agent = opened()
    with pytest.raises(errors.Waiting):
        agent.run(work.options(wait=False))
    goes_on.set()
    wait_for_children()
    assert [info.status for info in agent._store.runs()] == ["finished", "waiting"]
    agent._store.signal("trip-7", "go")
    assert agent.run(work) == "bags"
    assert world.calls == [("book", "bags")]


def test_an_async_child_stops_when_its_parent_does_after_the_call_that_is_under_way(opened, world):
    async def go():
        began, goes_on, waits = asyncio.Event(), asyncio.Event(), [True]

        @holdfast.tool
        async def pay():
            began.set()
            await goes_on.wait()
            world.calls.append("pay")

        @holdfast.durable
        async def job(agent):
            await pay()
            if waits:
                await asyncio.Event().wait()  # which nobody sets
            return "paid"

        @holdfast.durable
        async def work(agent):
            child = await agent.aspawn(job, "bags")
            await began.wait()
            asyncio.get_running_loop().call_soon(goes_on.set)
            if waits:
                raise RuntimeError("out of paper")
            return await child.ajoin()

        agent = opened()
        with pytest.raises(RuntimeError):
            await agent.arun(work)
        assert [info.status for info in agent._store.runs()] == ["interrupted", "failed"]
        waits.clear()
        return await agent.arun(work)

    assert asyncio.run(go()) == "paid"
    assert world.calls == ["pay"]


def test_a_child_that_a_failed_run_left_is_in_the_way_of_another_and_named(opened, book):
    booked, fails = threading.Event(), [True]

    def job(agent, what):
        book("bags")
        booked.set()
        return agent.wait_for("go") if fails else what

    def work(agent, what):
        child = agent.spawn(job, "bags", what)
        booked.wait(180)
        if fails:
            raise RuntimeError("out of paper")
        return child.join()

    agent = opened()
    with pytest.raises(RuntimeError):
        agent.run(work, "a")
    fails.clear()
    with pytest.raises(errors.RunUnfinished, match="holdfast runs cancel trip-7/bags") as caught:
        agent.run(work, "b")
    agent._store.agent("trip-7/bags").cancel(caught.value.run)
    assert agent.run(work, "b") == "b"


def test_a_child_is_not_begun_a_second_time_while_it_runs(opened, world, book):
    began, goes_on = threading.Event(), threading.Event()

    def job(agent):
        began.set()
        goes_on.wait(180)
        return book("bags")

    def work(agent):
        child = agent.spawn(job, "bags")
        began.wait(180)
        with pytest.raises(errors.BadOption, match="begun here before"):
            agent.spawn(job, "bags")
        goes_on.set()
        return child.join(), agent.spawn(job, "bags").join()

    agent = opened()
    assert agent.run(work) == ("bags", "bags")


def test_a_child_that_another_run_executes_is_not_begun_beside_it(opened, book, monkeypatch):
    monkeypatch.setattr("holdfast.run.children.EXIT_S", 0.01)
    began, goes_on = threading.Event(), threading.Event()

    def job(agent):
        began.set()
        goes_on.wait(180)
        return book("bags")

    def work(agent):
        agent.spawn(job, "bags")
        began.wait(180)
        raise RuntimeError("no")

    agent = opened()
    with pytest.raises(RuntimeError):
        agent.run(work)
    with pytest.raises(errors.RunUnfinished, match="executing another run"):
        agent.run(lambda agent: agent.spawn(lambda agent: None, "bags"))
    goes_on.set()
    wait_for_children()


# -- async ----------------------------------------------------------------------------------------------------


def test_async_children_are_tasks_of_the_loop_and_shift_no_positions(opened, world):
    @holdfast.tool(effect="idempotent")
    async def put(what):
        await asyncio.sleep(0)
        world.calls.append(what)
        return what

    @holdfast.durable
    async def job(agent, what):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(put(f"{what}{n}")) for n in range(3)]
        return [task.result() for task in tasks]

    crash = [True]

    @holdfast.durable
    async def work(agent):
        children = [await agent.aspawn(job, name, name) for name in "ab"]
        found = await asyncio.gather(*(child.ajoin() for child in children))
        await put("own")
        if crash and crash.pop():
            raise Crash
        return found

    async def go():
        return await opened().arun(work)

    with pytest.raises(Crash):
        asyncio.run(go())
    assert asyncio.run(go()) == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert sorted(world.calls) == ["a0", "a1", "a2", "b0", "b1", "b2", "own"]


def test_an_async_child_is_cancelled_where_it_waits(opened):
    async def go():
        began = asyncio.Event()

        @holdfast.durable
        async def job(agent):
            began.set()
            await agent.sleep(1000)

        @holdfast.durable
        async def work(agent):
            child = await agent.aspawn(job, "bags")
            await began.wait()
            await child.acancel()
            return child.running

        agent = opened()
        assert await agent.arun(work) is False
        return [run.status for run in agent._store.agent("trip-7/bags").runs()]

    assert asyncio.run(go()) == ["cancelled"]


@pytest.mark.parametrize("turns", [0, 1])
def test_an_async_child_that_is_cancelled_before_its_first_step_or_in_it_has_been_cancelled(opened, turns):
    crash = [True]

    @holdfast.durable
    async def job(agent):
        await agent.sleep(1000)

    @holdfast.durable
    async def work(agent):
        child = await agent.aspawn(job, "bags")
        for _ in range(turns):
            await asyncio.sleep(0)
        await child.acancel()
        with pytest.raises(errors.ToolFailed):
            await child.ajoin()
        if crash and crash.pop():
            raise Crash
        return child.running

    async def go():
        return await opened().arun(work)

    with pytest.raises(Crash):
        asyncio.run(go())
    assert asyncio.run(go()) is False


def test_a_plain_child_of_an_async_parent_does_not_block_the_loop(opened, world, book):
    job = pack(book)

    @holdfast.durable
    async def work(agent):
        child = await agent.aspawn(job, "bags", "bags")
        with pytest.raises(errors.BadOption):
            agent.spawn(work, "other")
        return await child.ajoin()

    async def go():
        return await opened().arun(work)

    assert asyncio.run(go()) == {"packed": "bags"}


# -- waiting --------------------------------------------------------------------------------------------------


def test_a_parent_that_does_not_block_waits_when_its_child_does(opened, monkeypatch):
    def job(agent):
        agent.sleep(600)
        return "rested"

    @holdfast.durable
    def work(agent):
        return agent.spawn(job, "bags").join()

    agent = opened()
    with pytest.raises(errors.Waiting, match="waits for trip-7/bags or until"):
        agent.run(work.options(wait=False))
    (info,) = agent.runs()
    assert info.status == "waiting"
    assert info.until is not None
    assert info.waits_for == ("trip-7/bags",)
    later_us = time.time_ns() // 1000 + 601_000_000
    monkeypatch.setattr("holdfast.run.resilience.Clock.wall_us", lambda _clock: later_us)
    assert opened().run(work.options(wait=False)) == "rested"


def test_a_parent_whose_child_waits_for_a_signal_is_due_when_the_child_can_go_on_or_has(opened):
    @holdfast.durable(name="due-job")
    def job(agent):
        return agent.wait_for("bags")

    @holdfast.durable(name="due-work")
    def work(agent):
        return agent.spawn(job, "bags").join()

    agent = opened()
    with pytest.raises(errors.Waiting):
        agent.run(work.options(wait=False))
    store = opened("other")._store
    # A signal that is called like the child is no news for anybody.
    store.signal("trip-7", "trip-7/bags")
    assert store.due() == []
    store.signal("trip-7/bags", "bags", "packed")
    assert sorted(info.agent for info in store.due()) == ["trip-7", "trip-7/bags"]
    (info,) = opened("trip-7/bags").runs()
    assert opened("trip-7/bags").resume(info.id) == "packed"
    store = opened("other")._store
    assert [info.agent for info in store.due()] == ["trip-7"]
    assert opened().run(work.options(wait=False)) == "packed"
    assert opened("other")._store.due() == []


# -- rolled back with the parent --------------------------------------------------------------------------------


def family(book):
    job = pack(book)

    @holdfast.durable(name="family")
    def family(agent):
        agent.checkpoint("start")
        book("flight")
        agent.spawn(job, "bags", "bags").join()
        agent.checkpoint("packed")
        book("hotel")

    return family


def test_children_go_back_with_their_parent_all_effects_newest_first(opened, world, book):
    agent = opened()
    agent.run(family(book))
    plan = agent.plan_rollback("start")
    assert [(one.agent, one.effect.args["what"]) for one in plan.undo] == [
        ("trip-7", "hotel"),
        ("trip-7/bags", "bags"),
        ("trip-7", "flight"),
    ]
    assert [name for name, _ in plan.children] == ["trip-7/bags"]
    plan.apply()
    assert [call for call in world.calls if call[0] == "cancel"] == [
        ("cancel", "hotel"),
        ("cancel", "bags"),
        ("cancel", "flight"),
    ]
    child = opened("trip-7/bags")
    assert child.state == {}
    assert [run.status for run in child.runs()] == ["rolled back"]
    opened().run(family(book))
    assert world.stands == ["flight", "bags", "hotel"]
    assert opened("trip-7/bags").state == {"what": "bags"}


def test_what_a_child_cannot_undo_stands_in_the_parents_way(opened, world, book):
    @holdfast.tool
    def mail():
        world.calls.append("mail")

    def job(agent):
        mail()

    def work(agent):
        agent.checkpoint("start")
        book("flight")
        agent.spawn(job, "bags").join()

    agent = opened()
    agent.run(work)
    with pytest.raises(errors.RollbackBlocked, match="trip-7/bags"):
        agent.rollback("start")
    assert world.stands == ["flight"]
    agent.rollback("start", accept=["mail"])
    assert world.stands == []


def test_a_child_that_was_begun_before_the_target_goes_back_to_its_newest_checkpoint_before_it(opened, world, book):
    first, second = threading.Event(), threading.Event()

    def job(agent):
        book("early")
        agent.state["n"] = 1
        agent.checkpoint("one")
        first.set()
        second.wait(180)
        book("late")
        agent.state["n"] = 2
        return agent.state["n"]

    def work(agent):
        child = agent.spawn(job, "bags")
        first.wait(180)
        agent.checkpoint("middle")
        second.set()
        return child.join()

    agent = opened()
    assert agent.run(work) == 2
    agent.rollback("middle")
    assert world.stands == ["early"]
    assert opened("trip-7/bags").state == {"n": 1}
    assert opened().run(work) == 2
    assert world.stands == ["early", "late"]


def test_a_running_child_is_cancelled_by_a_rollback(opened, world, book):
    began = threading.Event()

    @holdfast.tool(effect="read")
    def look():
        time.sleep(0.01)

    def job(agent):
        book("bags")
        began.set()
        while True:
            look()

    def work(agent):
        agent.checkpoint("start")
        agent.spawn(job, "bags")
        began.wait(180)
        agent.rollback("start")

    with pytest.raises(errors.RunRolledBack):
        opened().run(work)
    assert world.stands == []
    assert opened("trip-7/bags").state == {}


# -- mistakes ---------------------------------------------------------------------------------------------------


def test_children_are_begun_in_a_run_and_not_in_a_tool(opened, book):
    agent = opened()
    with pytest.raises(errors.NoAgent):
        agent.spawn(pack(book), "bags", "bags")
    with agent, pytest.raises(errors.NoAgent, match=r"no run.*\n.*agent\.run"):
        agent.spawn(pack(book), "bags", "bags")

    @holdfast.tool(effect="read")
    def look():
        holdfast.current().spawn(pack(book), "bags", "bags")

    with pytest.raises(errors.ToolFailed, match="a tool cannot spawn"):
        agent.run(lambda agent: look())
    with pytest.raises(errors.BadName):
        agent.run(lambda agent: agent.spawn(pack(book), "a/b", "bags"))


def test_branches_of_a_parent_have_children_of_their_own(opened, world, book):
    job = pack(book)

    def work(agent, what):
        return agent.spawn(job, "bags", what).join()

    agent = opened()
    agent.checkpoint("start")
    other = agent.branch("try-b")
    agent.run(work, "here")
    other.run(work, "there")
    store = agent._store
    assert store.agent("trip-7/bags").state == {"what": "here"}
    assert store.agent("trip-7/bags", branch="try-b").state == {"what": "there"}


def test_a_run_of_another_agent_inside_a_run_is_refused_unless_it_has_an_id(opened, world, book):
    @holdfast.durable(name="refused-part")
    def part(agent, what):
        return book(what)

    agent = opened()
    with pytest.raises(errors.BadOption, match=r"agent\.spawn"):
        agent.run(lambda agent: agent._store.agent("helper").run(part, "bags"))

    async def awhole(agent):
        return await agent._store.agent("helper").arun(part, "bags")

    with pytest.raises(errors.BadOption, match=r"agent\.spawn"):
        asyncio.run(agent.arun(awhole))
    assert world.calls == []
    seat = agent.run(lambda agent: agent._store.agent("helper").run(part.options(id="one"), "bags"))
    assert agent.run(lambda agent: agent._store.agent("helper").run(part.options(id="one"), "bags")) == seat
    assert world.calls == [("book", "bags")]
