"""Runs of real agents in a real store: interrupted, gone on with, compared, listed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import pickle
import random

import pytest

import holdfast
from holdfast import errors
from holdfast.store.changes import Change
from tests.run.bench import Crash, Outside


class World(Outside):
    """With tools and a function for a whole journey."""

    def tools(self):
        @holdfast.tool(effect="read")
        def search(city):
            self.calls.append(("search", city))
            return {"id": 7, "city": city}

        @holdfast.tool
        def book(offer):
            self.calls.append(("book", offer))
            return ("booked", offer)

        @holdfast.durable
        def travel(agent, city):
            with agent.phase("plan"):
                offer = search(city)
                agent.state["choice"] = offer
                self.reach("chosen")
                agent.checkpoint("chosen")
                self.reach("saved")
            done = book(offer["id"])
            self.reach("booked")
            agent.state["done"] = done
            self.reach("end")
            return done

        return search, book, travel


@pytest.fixture
def world():
    return World()


PLACES = ["chosen", "saved", "booked", "end"]


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_run_goes_on_and_repeats_nothing(opened, world, place):
    _, _, travel = world.tools()
    world.crash_at = place
    with pytest.raises(Crash):
        opened().run(travel, "Lisbon")
    agent = opened()
    assert [run.status for run in agent.runs()] == ["interrupted"]
    assert agent.run(travel, "Lisbon") == ("booked", 7)
    assert world.calls == [("search", "Lisbon"), ("book", 7)]
    agent = opened()
    assert agent.state == {"choice": {"id": 7, "city": "Lisbon"}, "done": ("booked", 7)}
    assert [checkpoint.label for checkpoint in agent.log()] == ["run travel finished", "chosen", "run travel"]
    assert not agent.abandoned()
    assert agent._store.verify().ok


def test_a_finished_run_is_never_ahead_of_its_state(opened, world, monkeypatch):
    _, _, travel = world.tools()
    agent = opened()
    put = Change.put_checkpoint

    def fails(change, *what):
        if agent.state.get("done"):
            raise errors.DiskFull("no room")
        return put(change, *what)

    with monkeypatch.context() as patched:
        patched.setattr(Change, "put_checkpoint", fails)
        with pytest.raises(errors.DiskFull):
            agent.run(travel, "Lisbon")
    agent = opened()
    (run,) = agent.runs()
    assert run.status == "interrupted"  # it is the disk that has failed
    assert "done" not in agent.state
    assert agent.run(travel, "Lisbon") == ("booked", 7)
    assert opened().state["done"] == ("booked", 7)
    assert world.calls == [("search", "Lisbon"), ("book", 7)]


def test_a_replayed_checkpoint_is_the_recorded_one_and_writes_nothing(opened, world):
    seen = []
    _, book, _ = world.tools()

    def work(agent):
        agent.state["n"] = 1
        first = agent.checkpoint("one")
        seen.append((first.id, agent.head.id, agent.at().id, agent.position))
        agent.tag("mark")
        agent.state["n"] = 2
        agent.checkpoint("two")
        book(3)
        world.reach("here")
        return agent.tags()["mark"].label

    world.crash_at = "here"
    with pytest.raises(Crash):
        opened().run(work)
    assert opened().run(work) == "one"
    assert seen[0] == seen[1]
    assert [checkpoint.label for checkpoint in opened().log()] == ["two", "one", "run work"]


def test_a_failed_run_tried_again_in_the_same_process_leaves_no_litter(opened):
    tries = []

    def work(agent):
        agent.state["n"] = agent.state.get("n", 0) + 1
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("not yet")
        return agent.state["n"]

    agent = opened()
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            agent.run(work)
    assert agent.run(work) == 1
    assert [found.label for found in agent.log(all=True)] == ["run work finished", "run work"]
    assert [run.status for run in agent.runs()] == ["finished"]


def test_a_run_that_diverges_leaves_the_state_of_the_head(opened, world):
    _, _, travel = world.tools()
    world.crash_at = "booked"
    agent = opened()
    agent.state["before"] = "x" * 100_000
    with pytest.raises(Crash):
        agent.run(travel, "Lisbon")

    def changed(agent, city):
        agent.state["choice"] = {"id": 8}
        agent.checkpoint("chosen")

    changed = holdfast.durable(name="travel")(changed)
    agent = opened()
    digest = agent.digest
    with pytest.raises(errors.Diverged):
        agent.run(changed, "Lisbon")
    assert agent.digest == digest
    assert not agent.dirty
    with pytest.raises(errors.RunUnfinished):
        agent.checkpoint("after")
    agent = opened()
    assert agent.state["choice"] == {"id": 7, "city": "Lisbon"}
    assert [found.label for found in agent.log()] == ["chosen", "run travel"]
    assert agent.run(travel, "Lisbon") == ("booked", 7)
    assert agent._store.verify().ok


def test_large_arguments_and_results_survive(opened, world):
    big = {"rows": [[n, "x" * 50] for n in range(5_000)], "blob": random.Random(1).randbytes(3_000_000)}

    def work(agent, given):
        world.reach("here")
        return [given["rows"], given["blob"]]

    world.crash_at = "here"
    with pytest.raises(Crash):
        opened().run(work, big)
    assert opened().runs()[0].args == {"given": big}
    assert opened().run(work, big) == [big["rows"], big["blob"]]
    agent = opened()
    assert agent.runs()[0].result == [big["rows"], big["blob"]]
    assert agent._store.verify().ok


def test_only_local_tools_may_change_the_state(opened):
    @holdfast.tool
    def greedy(agent_name):
        holdfast.current().state["greedy"] = agent_name

    @holdfast.tool(effect="local")
    def tidy(value):
        holdfast.current().state["tidy"] = value

    @holdfast.tool(effect="idempotent")
    def elsewhere(value):
        with agent._store.agent("other") as other:
            other.state["value"] = value
            other.checkpoint()

    def work(agent):
        tidy(1)
        elsewhere(2)
        with pytest.raises(errors.InDoubt, match="local"):
            greedy("x")

    agent = opened()
    with pytest.raises(errors.InDoubt):
        agent.run(work)
    assert agent.state == {"tidy": 1}
    assert agent._store.agent("other").state == {"value": 2}


def test_what_would_not_be_done_again_is_refused_inside_a_run(opened):
    def inner(agent):
        return 1

    def work(agent):
        agent.state["n"] = 1
        agent.checkpoint()
        for refused in (agent.undo, agent.redo, agent.__enter__):
            with pytest.raises(errors.BadOption):
                refused()
        with pytest.raises(errors.RunUnfinished):
            agent.run(inner)
        return agent.branches()

    assert opened().run(work) == ["main"]


def test_now_random_and_uuid_are_the_recorded_ones(opened, world):
    seen = []

    def work(agent):
        seen.append((agent.now(), agent.random(), agent.uuid()))
        world.reach("here")
        return seen[-1]

    world.crash_at = "here"
    agent = opened()
    with pytest.raises(Crash):
        agent.run(work)
    agent.flush()
    assert opened().run(work) == seen[0] == seen[1]
    agent = opened()
    assert agent.now() != seen[0][0]
    assert agent.uuid() != agent.uuid()


def test_steps_are_shown_and_kept_with_the_checkpoint(opened):
    def work(agent):
        with agent.phase("plan"), agent.phase("look"):
            shown = (agent.stack, agent.position)
            agent.checkpoint("looked")
        return shown

    agent = opened()
    assert agent.run(work) == (["work", "plan", "look"], "plan:0/look:0/0")
    assert agent.stack_at("looked") == ["work", "plan", "look"]
    assert (agent.stack, agent.position) == ([], "")
    with agent.phase("outside of a run it is only a word"):
        assert agent.stack == []
    with agent:
        for _ in range(2):
            with agent.phase("turn"):
                agent.state["n"] = 1
                made = agent.checkpoint()
                assert agent.stack == ["turn"]
    assert opened().stack_at(f"id:{made.short_id}") == ["turn"]


def test_effects_and_runs_are_listed_by_reading_handles_too(opened, world):
    _, _, travel = world.tools()
    agent = opened()
    agent.run(travel, "Lisbon")
    agent.state["x"] = 1
    asked = agent.checkpoint("asked")
    agent.run(travel.options(id="second"), "Porto")
    reading = agent._store.agent("trip-7", readonly=True)
    for handle in (agent, reading):
        assert [(effect.tool, effect.status) for effect in handle.effects()] == [
            ("search", "done"), ("book", "done"), ("search", "done"), ("book", "done"),
        ]  # fmt: skip
        assert [effect.args for effect in handle.effects(since=asked)] == [{"city": "Porto"}, {"offer": 7}]
        assert [effect.run for effect in handle.effects(run="second")] == ["second"] * 2
        assert [(run.id == "second", run.status, run.args) for run in handle.runs()] == [
            (False, "finished", {"city": "Lisbon"}), (True, "finished", {"city": "Porto"}),
        ]  # fmt: skip
    with pytest.raises(errors.ReadOnly):
        reading.run(travel, "Faro")
    with pytest.raises(errors.ReadOnly):
        reading.mode = "normal"
    assert [run.agent for run in agent._store.runs(status="finished")] == ["trip-7"] * 2
    with pytest.raises(errors.BadOption):
        agent._store.runs(status="perhaps")


@pytest.mark.parametrize("decision", ["done", "not-done"])
def test_a_person_decides_and_the_run_goes_on(opened, world, decision):
    @holdfast.tool
    def pay(amount):
        world.calls.append(amount)
        world.reach("paying")
        return "by the tool"

    def work(agent):
        return pay(5)

    world.crash_at = "paying"
    with pytest.raises(Crash):
        opened().run(work)
    agent = opened()
    with pytest.raises(errors.InDoubt) as caught:
        agent.run(work)
    (effect,) = caught.value.effects
    assert [run.status for run in agent.runs()] == ["needs attention"]
    with pytest.raises(errors.RunUnfinished):
        agent.run(world.tools()[2], "Lisbon")
    agent = opened()
    decided = agent.resolve(effect.id, decision, result="by a person", why="asked the bank")
    assert decided.status in {"done", "not done"}
    with pytest.raises(errors.BadOption, match="not in doubt"):
        agent.resolve(effect.id, decision)
    with pytest.raises(errors.BadOption, match="names no effect"):
        agent.resolve("ffff", decision)
    assert opened().run(work) == ("by a person" if decision == "done" else "by the tool")
    assert world.calls == [5] * (1 if decision == "done" else 2)


def test_a_run_goes_on_with_other_arguments_only_when_told_so(opened, world):
    search, book, _ = world.tools()

    @holdfast.durable
    def work(agent, city, seats):
        offer = search(city)
        world.reach("found")
        return [book(offer["id"]), seats]

    world.crash_at = "found"
    agent = opened()
    with pytest.raises(Crash):
        agent.run(work, "Lisbon", 1)
    agent = opened()
    with pytest.raises(errors.RunUnfinished, match="change=True"):
        agent.run(work, "Lisbon", 2)
    world.crash_at = "found"
    with pytest.raises(Crash):
        agent.run(work.options(change=True), "Lisbon", 2)
    agent = opened()
    assert agent.runs()[0].args == {"city": "Lisbon", "seats": 2}
    assert agent.run(work, "Lisbon", 2) == [("booked", 7), 2]
    assert world.calls == [("search", "Lisbon"), ("book", 7)]
    assert len(agent.runs()) == 1


def test_a_run_is_gone_on_with_by_its_id(opened, world):
    _, _, travel = world.tools()
    world.crash_at = "booked"
    with pytest.raises(Crash):
        opened().run(travel, city="Lisbon")
    agent = opened()
    (run,) = agent.runs()
    assert agent.resume(run.id) == ("booked", 7)
    assert agent.resume(run.id) == ("booked", 7)
    assert world.calls == [("search", "Lisbon"), ("book", 7)]
    with pytest.raises(errors.BadOption):
        agent.resume("nothing")
    world.crash_at = "there"
    with pytest.raises(Crash):
        agent.run(lambda agent: world.reach("there"))
    with pytest.raises(errors.UnknownTool):
        agent.resume(agent.runs()[-1].id)


def test_what_a_rollback_undid_or_left_standing_is_still_listed(opened):
    undone = []

    @holdfast.tool(compensate=lambda effect: undone.append(effect.result))
    def book(n):
        return n

    @holdfast.tool
    def mail(text):
        return text

    def work(agent):
        agent.checkpoint("asked")
        book(7)
        mail("done")
        return True

    agent = opened()
    agent.run(work)
    agent.rollback("asked", accept=["mail"])
    assert undone == [7]
    listed = {effect.tool: effect.status for effect in opened().effects()}
    assert (listed["book"], listed["mail"]) == ("undone", "done")


def test_version_marks_a_change(opened, world):
    search, _, _ = world.tools()

    def old(agent):
        found = search("Lisbon")
        world.reach("found")
        return found["id"]

    def new(agent):
        marked = agent.version("two searches")
        world.reach("marked")
        if marked:
            search("Porto")
        return search("Lisbon")["id"]

    world.crash_at = "found"
    agent = opened()
    with pytest.raises(Crash):
        agent.run(holdfast.durable(name="f")(old))
    world.crash_at = "marked"
    with pytest.raises(Crash):
        opened().run(holdfast.durable(name="f")(new))
    agent = opened()
    assert agent.run(holdfast.durable(name="f")(new)) == 7
    assert world.calls == [("search", "Lisbon")]
    agent.run(holdfast.durable(name="f")(new))
    assert world.calls == [("search", "Lisbon"), ("search", "Porto"), ("search", "Lisbon")]
    assert agent.version("outside")


def test_a_thread_needs_the_agents_context(opened, world):
    _, book, _ = world.tools()

    with opened() as agent, concurrent.futures.ThreadPoolExecutor(2) as pool:
        with pytest.raises(errors.NoAgent):
            pool.submit(book, 1).result()
        assert pool.submit(agent.context().run, book, 2).result() == ("booked", 2)
        jobs = [pool.submit(agent.context().run, book, number) for number in range(3, 9)]
        assert [job.result()[1] for job in jobs] == list(range(3, 9))
        assert len({effect.key for effect in agent.effects()}) == 7


def test_an_inherited_call_in_doubt_is_dead_only_when_the_writer_of_that_branch_is(opened, world):
    @holdfast.tool(probe=lambda effect: holdfast.Absent())
    def pay(amount):
        world.calls.append(amount)
        if len(world.calls) == 1:  # somebody branches off while the call is under way
            main._make("meanwhile")
            main._store.branch("trip-7", "try-b")
        return "paid"

    def work(agent):
        return pay(5)

    main = opened()
    assert main.run(work) == "paid"
    other = main._store.agent("trip-7", branch="try-b")
    with pytest.raises(errors.InDoubt, match="may still be at it"):
        other.run(work)
    main.close()
    assert other.run(work) == "paid"
    assert world.calls == [5, 5]


# -- what goes along with the state --------------------------------------------------------------------------------


def test_a_kept_generator_goes_on_where_the_state_does(opened, world):
    def work(agent):
        numbers = agent.generator("dice", random.Random(7))
        seen = [numbers.random()]
        agent.checkpoint("one")
        seen.append(numbers.random())
        world.reach("here")
        agent.state["seen"] = seen
        return seen

    world.crash_at = "here"
    with pytest.raises(Crash):
        opened().run(work)
    expected = random.Random(7)
    assert opened().run(work) == [expected.random(), expected.random()]
    agent = opened()
    assert agent.generator("dice", random.Random(8)).random() == expected.random()
    agent.rollback("one")
    branch = agent.branch("try-b")
    first = random.Random(7)
    first.random()
    assert branch.generator("dice", random.Random()).random() == first.random()


# -- async ------------------------------------------------------------------------------------------------------


def test_an_async_run_with_checkpoints_of_several_tasks_replays_to_the_same_state(opened, world):
    delays = random.Random(5)

    @holdfast.tool(effect="read")
    async def look(n):
        await asyncio.sleep(delays.random() / 200)
        return n

    async def part(agent, n):
        for turn in range(3):
            agent.state["seen"].append([await look(n), turn])
            await agent.acheckpoint(f"{n} {turn}")
            agent.state["seen"].append(["saved", n, turn])

    async def work(agent):
        agent.state["seen"] = []
        await asyncio.gather(*(part(agent, n) for n in range(4)))
        world.reach("here")
        return agent.state["seen"]

    world.crash_at = "here"
    agent = opened()
    with pytest.raises(Crash):
        asyncio.run(agent.arun(work))
    first = [list(entry) for entry in agent.state["seen"]]
    count = len(agent.log())
    agent = opened()
    assert asyncio.run(agent.arun(work)) == first
    assert len(agent.log()) == count + 1
    agent = opened()
    assert agent.state["seen"] == first
    assert agent._store.verify().ok


def test_a_cancelled_checkpoint_is_written_all_the_same_and_replays_as_cancelled(opened, world, monkeypatch):
    agent = opened()

    async def work(agent):
        agent.state["n"] = 1
        saving = asyncio.ensure_future(agent.acheckpoint("one"))
        await asyncio.sleep(0)
        saving.cancel()
        outcome = await asyncio.gather(saving, return_exceptions=True)
        world.reach("here")
        return type(outcome[0]).__name__

    world.crash_at = "here"
    with pytest.raises(Crash):
        asyncio.run(agent.arun(work))
    labels = [found.label for found in agent.log()]
    assert asyncio.run(opened().arun(work)) == "CancelledError"
    assert [found.label for found in opened().log()] == labels


def test_async_with_asks_async_probes_first(opened, world):
    async def probe(effect):
        await asyncio.sleep(0)
        return holdfast.Found("found by the probe")

    @holdfast.tool(probe=probe)
    async def pay(amount):
        world.calls.append(amount)
        world.reach("paying")
        return "paid"

    async def loop():
        async with opened():
            return await pay(5)

    world.crash_at = "paying"
    with pytest.raises(Crash):
        asyncio.run(loop())
    assert asyncio.run(loop()) == "found by the probe"
    assert world.calls == [5]


# -- waiting ----------------------------------------------------------------------------------------------------


# -- being current, and being open -----------------------------------------------------------------------------------


def test_leaving_with_agent_leaves_it_open_also_inside_another(opened, world):
    _, book, _ = world.tools()
    agent = opened()
    for number in range(2):  # again and again
        with agent:
            with agent:
                book(("inner", number))
            assert holdfast.current() is agent
            book(("outer", number))
            agent.state["n"] = number
            agent.checkpoint(f"{number}")
        assert not agent.closed
        with pytest.raises(errors.NoAgent):
            holdfast.current()
    assert len(agent.effects()) == 4
    book("unrecorded")
    assert len(agent.effects()) == 4
    assert agent._store.agent("trip-7") is agent
    agent.close()
    assert agent.closed
    assert agent._store.agent("trip-7").state == {"n": 1}


def test_unsaved_changes_at_the_end_of_with_agent_are_warned_of_and_stay(opened, caplog):
    agent = opened(when=None)

    def leave_behind():
        with agent:
            with agent:
                agent.state["n"] = 1
            assert not caplog.records

    with pytest.warns(errors.UnsavedChanges, match="trip-7 has changes that are not saved"):
        leave_behind()
    assert agent.state == {"n": 1}
    agent.checkpoint("saved")
    with agent:
        pass

    async def later():
        async with agent:
            agent.state["n"] = 2

    with pytest.warns(errors.UnsavedChanges) as caught:
        asyncio.run(later())
    assert caught[0].filename == __file__
    agent.state["n"] = 3
    assert not caplog.records
    with pytest.raises(ValueError, match="mine"), agent:  # nothing hides it
        raise ValueError("mine")
    assert "trip-7 has changes that are not saved: state.n." in caplog.text
    assert opened().state == {"n": 1}  # what was said is not said again when it is closed


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_handles_are_neither_copied_nor_saved_and_the_way_to_have_them_elsewhere_is_said(opened, way):
    agent = opened()
    for handle, there in (
        (agent, r"holdfast\.open\(\.\.\.\)\.agent\(name\)"),
        (agent._store, r"holdfast\.open\(place\)"),
    ):
        with pytest.raises(errors.BadOption, match=there):
            way(handle)
        with pytest.raises(errors.Unencodable, match="Save its name"):
            agent.state["handle"] = handle
    assert agent.state == {}


def test_wrong_arguments_name_the_function_and_its_parameters(opened, world):
    search, book, _ = world.tools()

    @holdfast.durable(name="trip")
    def trip(agent, city):
        book("offer", "more")

    agent = opened()
    with pytest.raises(TypeError, match=r"^trip\(agent, city\): missing a required argument: 'city'$"):
        agent.run(trip)
    with pytest.raises(TypeError, match=r"^book\(offer\): too many positional arguments$"):
        agent.run(trip, "Lisbon")
    with pytest.raises(TypeError, match=r"^search\(city\): got an unexpected keyword argument 'town'$"), agent:
        search("Lisbon", town="Lisbon")


def test_what_was_done_since_somebody_looked_for_a_run_counts(tmp_path):
    made = []

    @holdfast.durable(name="looked")
    def looked(agent, number):
        made.append(number)
        return number

    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("looking")
        start = agent.checkpoint("start")
        for number in range(3):
            with pytest.raises(errors.BadOption):
                agent.resume("one")
            again = looked.options(id="one", again=True)
            assert agent.run(again, number) == agent.resume("one") == agent.run(again, number) == number
            agent.rollback(start)
    assert made == [0, 1, 2]
