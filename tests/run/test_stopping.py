"""Runs that are told to stop: by somebody elsewhere, by their parent, by their time limit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import pytest

import holdfast
from holdfast import errors
from holdfast.run import records, waiting
from holdfast.run.past import Past
from holdfast.run.scope import effect
from holdfast.run.tools import tool
from tests import warm
from tests.lives import stop_at_rest
from tests.run import stopping_child as program
from tests.run.bench import Bench, Crash

HANG_S = 180


@pytest.fixture
def calls():
    """What was really called."""
    return []


@pytest.fixture
def note(calls):
    """A tool that writes, and can be undone."""

    def forget(effect):
        calls.append(f"undo {effect.args['what']}")

    @holdfast.tool(name="stopping.write", compensate=forget)
    def note(what):
        calls.append(what)
        return what

    return note


@pytest.fixture
def look():
    @holdfast.tool(name="stopping.read", effect="read")
    def look(turn=0):
        return turn

    return look


class Meanwhile:
    """A run that is executed on another thread, until it has ended."""

    def __init__(self, agent, function, *args):
        self.error = self.result = None
        self._thread = threading.Thread(target=self._run, args=(agent, function, *args))
        self._thread.start()

    def _run(self, agent, function, *args):
        try:
            self.result = agent.run(function, *args)
        except BaseException as error:
            self.error = error

    def ended(self):
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()
        return self.error


def ask(agent):
    """Ask the run of an agent to stop, as who cancels it does while a process executes it."""
    view = agent._view()
    (run,) = view.past().runs.values()
    whom = {"branch": view.identity[1], "run": run, "by": "me"}
    agent._store._send(view, waiting.body_of(b"id", records.STOP, False, agent._store._registry, **whom))


def looping(look, began):
    """Look again and again, until somebody says stop. With a rest, since whoever does reads all that was recorded."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        look()
        began.set()
        time.sleep(0.002)


def test_a_run_in_another_process_is_told_so_by_whoever_cancels_it_and_cleans_up(tmp_path):
    words = [sys.executable, "-m", "tests.run.stopping_child", str(tmp_path / "store"), str(tmp_path / "notes")]
    with warm.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "began\n"
        with holdfast.open(tmp_path / "store") as store:
            (info,) = store.runs()
            asked = store.cancel(info)
            assert asked.status in {"running", "cancelled"}
            assert process.stdout.readline().startswith("run one of trip was cancelled by ")
            process.wait(HANG_S)
            (info,) = store.runs()
            assert (info.status, info.cancelled_by) == ("cancelled", "")
            assert info.error.startswith("Cancelled: run one of trip was cancelled by ")
            by = info.error.rpartition("cancelled by ")[2]
            told = [one for one in store.agent("trip").events() if one["what"] in {"cancel", "cancelled"}]
            assert [(one["what"], one["run"], one["by"]) for one in told] == [
                ("cancelled", "one", by),
                ("cancel", "one", by),
            ]
            assert store.verify().ok
    assert (tmp_path / "notes").read_text().split("\n") == ["began", "cleaned up", ""]


def test_a_request_outlives_the_process_that_it_was_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "store"), str(tmp_path / "notes")])
    words = [sys.executable, "-m", "tests.run.stopping_child", *sys.argv[1:]]
    with warm.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            stop_at_rest(process, tmp_path / "store")  # it sees nothing of what follows
            with holdfast.open(tmp_path / "store") as store:
                assert store.cancel("trip", "one").cancelled_by
        finally:
            process.kill()
    with holdfast.open(tmp_path / "store") as store:
        assert [(one.id, one.status) for one in store.due()] == [("one", "interrupted")]
        with pytest.raises(errors.Cancelled):
            store.agent("trip").resume("one")
        assert [one.status for one in store.runs()] == ["cancelled"]
        assert not store.due()
    assert (tmp_path / "notes").read_text().split() == ["began", "cleaned", "up"]
    assert program.work.durable.name == "stopping-work"


def test_a_run_that_deals_with_it_goes_on_and_can_be_cancelled_again(opened, look):
    began, told = [threading.Event(), threading.Event()], []

    @holdfast.durable(name="work")
    def work(agent):
        for event in began:
            try:
                looping(look, event)
            except errors.Cancelled as error:
                told.append(error)
        return "done"

    agent = opened()
    running = Meanwhile(agent, work)
    for event in began:
        assert event.wait(HANG_S)
        agent._store.cancel("trip-7")
    assert running.ended() is None
    assert running.result == "done"
    assert len(set(map(id, told))) == 2
    assert [one.status for one in agent.runs()] == ["finished"]


def test_no_handler_for_exceptions_keeps_a_run_from_being_cancelled(opened, look):
    began = threading.Event()

    @holdfast.durable(name="work")
    def work(agent):
        try:
            looping(look, began)
        except Exception:
            return "kept on"

    agent = opened()
    running = Meanwhile(agent, work)
    assert began.wait(HANG_S)
    agent._store.cancel("trip-7")
    assert isinstance(running.ended(), errors.Cancelled)


def test_a_run_whose_cleanup_fails_has_failed_and_is_still_cancelled_next_time(opened, calls, look, note):
    began, fails = threading.Event(), [False, True]

    @holdfast.durable(name="work")
    def work(agent):
        try:
            looping(look, began)
        finally:
            if fails.pop():
                raise ValueError("out of paper")
            note("clean up")

    agent = opened()
    running = Meanwhile(agent, work)
    assert began.wait(HANG_S)
    agent._store.cancel("trip-7")
    assert isinstance(running.ended(), ValueError)
    assert [one.status for one in agent.runs()] == ["failed"]
    with pytest.raises(errors.Cancelled):
        opened().run(work)
    assert calls == ["clean up"]


def test_no_call_is_cut_in_two(opened, calls, note):
    """A tool that calls others does so to its end: what it stands for has happened or not."""
    inside, goes_on = threading.Event(), threading.Event()

    @holdfast.tool(name="stopping.both")
    def both():
        note("one")
        inside.set()
        assert goes_on.wait(HANG_S)
        note("two")
        return "both"

    @holdfast.durable(name="work")
    def work(agent):
        agent.state["got"] = both()
        agent.checkpoint()
        note("three")

    agent = opened()
    running = Meanwhile(agent, work)
    assert inside.wait(HANG_S)
    agent._store.cancel("trip-7")
    goes_on.set()
    assert isinstance(running.ended(), errors.Cancelled)
    assert calls == ["one", "two"]
    assert agent.state["got"] == "both"
    assert [one.status for one in agent.effects()] == ["done", "done", "done", "stopped"]


def test_a_call_that_may_have_happened_is_made_before_the_run_is_told(opened, calls):
    crashes = [True]

    @holdfast.tool(name="stopping.put", effect="idempotent")
    def put(what):
        calls.append(what)
        if crashes.pop():
            raise Crash
        return what

    @holdfast.durable(name="work")
    def work(agent):
        agent.state["got"] = put("once")
        crashes.append(False)
        put("twice")

    with pytest.raises(Crash):
        opened().run(work)
    crashes.append(False)
    agent = opened()
    ask(agent)
    with pytest.raises(errors.Cancelled):
        agent.run(work)
    assert calls == ["once", "once"]
    assert [(one.args["what"], one.status) for one in agent.effects()] == [("once", "done"), ("twice", "stopped")]


def test_wherever_the_process_ends_the_run_is_told_once_and_cleans_up_once():
    keys, benches = [], []

    @tool(name="stopping.ask", effect="read")
    def request():
        asking = threading.Thread(target=benches[-1].store.cancel, args=("trip-7", "r"))
        asking.start()
        asking.join()

    @tool(name="stopping.act", effect="idempotent")
    def act(what):
        keys.append((what, effect().key))
        return what

    def work(agent):
        done = [act("a")]
        request()
        try:
            done.append(act("b"))
        finally:
            done.append(act("clean up"))
            agent.state["done"] = done

    def told(bench):
        benches.append(bench)
        with pytest.raises(errors.Cancelled) as caught:
            bench.run(work, id="r")
        assert bench.state["done"] == ["a", "clean up"]
        run = Past(bench.ledger.records()).runs["r"]
        assert (run.status, len(run.stops)) == ("cancelled", 1)
        return str(caught.value)

    first = Bench()
    said = told(first)
    asked = next(number for number, one in first.ledger.records() if getattr(one, "tool", "") == "stopping.ask")
    for keep in range(asked, first.ledger.count):
        assert told(first.crashed(keep)) == said
    assert len(set(keys)) == 2


# -- waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["sleep", "signal"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_run_is_told_where_it_waits(opened, calls, look, wait, plain):
    began = threading.Event()

    @holdfast.durable(name="work")
    def work(agent):
        look()
        began.set()
        try:
            agent.sleep(3600) if wait == "sleep" else agent.wait_for("go")
        finally:
            calls.append(look(1))

    @holdfast.durable(name="work")
    async def work_later(agent):
        look()
        began.set()
        try:
            await (agent.sleep(3600) if wait == "sleep" else agent.wait_for("go"))
        finally:
            calls.append(look(1))

    agent = opened()
    running = Meanwhile(agent, work) if plain else Meanwhile(Async(agent), work_later)
    assert began.wait(HANG_S)
    agent._store.cancel("trip-7")
    assert isinstance(running.ended(), errors.Cancelled)
    assert calls == [1]
    assert [one.status for one in agent.runs()] == ["cancelled"]


class Async:
    """An agent whose runs are executed on an event loop of their own."""

    def __init__(self, agent):
        self._agent = agent

    def run(self, function, *args):
        return asyncio.run(self._agent.arun(function, *args))


def test_a_run_that_nobody_executes_ends_at_once_and_says_who_ended_it(opened, calls, note):
    @holdfast.durable(name="work")
    def work(agent):
        note("begin")
        agent.wait_for("go")

    agent = opened()
    with pytest.raises(holdfast.Waiting) as caught:
        agent.run(work.options(wait=False))
    agent.close()
    store = agent._store
    info = store.cancel("trip-7", caught.value.run)
    assert (info.status, calls) == ("cancelled", ["begin"])
    assert store.cancel(info).error == info.error
    (told,) = [one for one in store.agent("trip-7").events() if one["what"] == "cancelled"]
    assert info.error == f"Cancelled: run {info.id} of trip-7 was cancelled by {told['by']}"


def test_nobody_cancels_what_has_ended_or_never_was(opened):
    agent = opened()
    agent.run(holdfast.durable(name="work")(lambda agent: 1).options(id="one"))
    with pytest.raises(errors.RunEnded):
        agent.cancel("one")
    with pytest.raises(errors.RunEnded):
        agent._store.cancel("trip-7")
    with pytest.raises(errors.BadOption):
        agent.cancel("two")
    with pytest.raises(errors.UnknownAgent):
        agent._store.cancel("trip-8")
    with pytest.raises(errors.BadName):
        agent._store.signal("trip-7", records.STOP, any_run=True)


@pytest.fixture
def tidy(note):
    @holdfast.durable(name="stopping-tidy")
    def tidy(agent):
        try:
            agent.wait_for("go")
        finally:
            note("clean up")

    return tidy


def put_off(agent, function):
    with pytest.raises(holdfast.Waiting) as caught:
        agent.run(function.options(wait=False))
    agent.close()
    return agent._store, caught.value.run


@pytest.mark.parametrize("later", [False, True])
def test_a_run_that_waits_is_left_to_a_worker_which_lets_it_clean_up(opened, calls, tidy, later):
    store, run = put_off(opened(), tidy)
    calls.clear()  # of being put off
    worker = store.worker()
    working = threading.Thread(target=worker.run)
    working.start()
    try:
        if later:
            info = asyncio.run(store.acancel("trip-7", run, wait_s=HANG_S))
        else:
            info = store.cancel("trip-7", run, wait_s=HANG_S)
    finally:
        worker.stop()
        working.join(HANG_S)
    assert (info.status, calls) == ("cancelled", ["clean up"])
    assert not store._db.view.opened()
    assert store.verify().ok


def test_where_no_worker_comes_it_ends_when_the_time_is_over(opened, calls, tidy):
    store, run = put_off(opened(), tidy)
    calls.clear()
    info = store.cancel("trip-7", run, wait_s=0.1)
    assert (info.status, calls) == ("cancelled", [])
    assert not store._db.view.opened()
    store.worker().run(drain=True)
    assert calls == []
    assert store.verify().ok


def test_nobody_waits_for_a_worker_that_leaves_the_run_alone(opened):
    @holdfast.durable(name="stopping-saves")
    def saves(agent):
        agent.checkpoint("here")
        agent.wait_for("go")

    store, run = put_off(opened(), saves)
    store.copy("trip-7", "copy")  # where it is parked
    assert store.cancel("copy", run, wait_s=HANG_S).status == "cancelled"


def test_a_run_that_needs_attention_is_not_tried_again_and_again_because_it_was_cancelled(opened, calls):
    @holdfast.tool(name="stopping.lost")
    def lost():
        calls.append("lost")
        ask(agent)
        raise ConnectionError("nobody knows")

    @holdfast.durable(name="stopping-lost")
    def work(agent):
        lost()

    agent = opened()
    with pytest.raises(errors.InDoubt):
        agent.run(work)
    store = agent._store
    agent.close()
    became = []
    worker = store.worker(tell=lambda worked: (became.append(worked), worker.end() if len(became) > 3 else None))
    worker.run(drain=True)
    assert len(became) <= 1
    agent = store.agent("trip-7")
    agent.resolve(agent.effects()[0], "done")
    agent.close()
    store.worker().run(drain=True)
    assert (store.runs()[0].status, calls) == ("finished", ["lost"])  # it has no other call to be told at


# -- tasks ----------------------------------------------------------------------------------------------------


def test_one_task_is_told_and_a_group_of_tasks_ends_with_it_the_same_way_each_time(opened, calls):
    began, crashes = threading.Event(), [False, True]

    @holdfast.tool(name="stopping.turn", effect="read")
    async def turn(name):
        await asyncio.sleep(0.001)

    @holdfast.tool(name="stopping.aput")
    async def put(what):
        calls.append(what)

    async def loop(name):
        while True:
            await turn(name)
            began.set()

    @holdfast.durable(name="work")
    async def work(agent):
        try:
            async with asyncio.TaskGroup() as group:
                for name in "abc":
                    group.create_task(loop(name))
        finally:
            await put("clean up")
            if crashes.pop():
                raise Crash

    agent = opened()
    running = Meanwhile(Async(agent), work)
    assert began.wait(HANG_S)
    agent._store.cancel("trip-7")
    assert isinstance(running.ended(), Crash)
    agent = opened()
    with pytest.raises(errors.Cancelled):
        Async(agent).run(work)
    assert calls == ["clean up"]
    assert [one.status for one in agent.runs()] == ["cancelled"]
    assert [one.status for one in agent.effects()].count("stopped") == 1


# -- time limits ----------------------------------------------------------------------------------------------


def test_a_time_limit_is_an_instant_that_stays_through_restarts(opened, calls, look):
    crashes = [False, True]

    @holdfast.durable(name="work")
    def work(agent):
        look()
        if crashes.pop():
            raise Crash
        try:
            looping(look, threading.Event())
        finally:
            calls.append("clean up")
            look()

    with pytest.raises(Crash):
        opened().run(work.options(limit_s=3.0))
    agent = opened()
    (info,) = agent.runs()
    with pytest.raises(errors.Cancelled) as caught:
        agent.run(work.options(limit_s=1000))
    assert datetime.now(UTC) >= info.limit
    assert (info.limit - info.began).total_seconds() == pytest.approx(3.0, abs=2.0)
    assert caught.value.by == "time limit"
    assert calls == ["clean up"]
    (ended,) = agent.runs()
    assert (ended.status, ended.limit) == ("cancelled", info.limit)
    assert ended.error.startswith(f"Cancelled: the time of run {info.id} of trip-7 was over at ")


def test_a_time_limit_ends_a_wait_and_makes_a_run_due_that_was_put_off(opened):
    @holdfast.durable(name="work")
    def work(agent):
        agent.wait_for("go")

    agent = opened()
    with pytest.raises(errors.Cancelled):
        agent.run(work.options(limit_s=0.01))
    with pytest.raises(holdfast.Waiting) as caught:
        agent.run(work.options(limit_s=2.0, wait=False))
    assert caught.value.until == round(agent.runs()[-1].limit.timestamp() * 1e6)
    end = time.monotonic() + HANG_S
    while not agent._store.due() and time.monotonic() < end:
        threading.Event().wait(0.02)
    with pytest.raises(errors.Cancelled):
        agent.resume(caught.value.run, wait=False)
    assert [one.status for one in agent.runs()] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("limit_s", [-1, float("nan"), float("inf")])
def test_a_time_limit_is_a_number_of_seconds(opened, limit_s):
    with pytest.raises(errors.BadOption):
        opened().run(holdfast.durable(name="work")(lambda agent: 1).options(limit_s=limit_s))


# -- children -------------------------------------------------------------------------------------------------


def test_it_reaches_children_and_theirs_where_they_wait_and_all_clean_up(opened, calls, note):
    began = threading.Event()

    @holdfast.durable(name="lowest")
    def lowest(agent):
        try:
            began.set()
            agent.sleep(3600)
        finally:
            note("lowest")

    @holdfast.durable(name="middle")
    def middle(agent):
        child = agent.spawn(lowest, "low")
        try:
            child.join()
        finally:
            with pytest.raises(errors.ToolFailed):
                child.join()
            note("middle")

    @holdfast.durable(name="work")
    def work(agent):
        agent.spawn(middle, "mid")
        try:
            agent.wait_for("go")
        finally:
            note("work")

    agent = opened()
    running = Meanwhile(agent, work)
    assert began.wait(HANG_S)
    agent._store.cancel("trip-7")
    assert isinstance(running.ended(), errors.Cancelled)
    assert sorted(calls) == ["lowest", "middle", "work"]
    assert calls.index("lowest") < calls.index("middle")
    assert {one.agent: one.status for one in agent._store.runs()} == dict.fromkeys(
        ["trip-7", "trip-7/mid", "trip-7/mid/low"], "cancelled"
    )


def test_children_of_a_run_that_nobody_executes_end_before_it(opened):
    @holdfast.durable(name="job")
    def job(agent):
        agent.wait_for("go")

    @holdfast.durable(name="work")
    def work(agent):
        agent.spawn(job, "bags").join()

    agent = opened()
    with pytest.raises(holdfast.Waiting):
        agent.run(work.options(wait=False))
    agent._store.cancel("trip-7")
    assert [one.status for one in agent._store.runs()] == ["cancelled", "cancelled"]


def test_a_child_that_was_put_off_ends_with_its_parent(opened, calls, note):
    @holdfast.durable(name="job")
    def job(agent):
        try:
            agent.wait_for("go")
        except holdfast.Cancelled:
            note("child")
            raise

    @holdfast.durable(name="work")
    def work(agent):
        child = agent.spawn(job, "bags")
        child._over.wait(HANG_S)  # until it is put off again
        try:
            child.join()
        finally:
            note("clean up")

    agent = opened()
    with pytest.raises(holdfast.Waiting) as caught:
        agent.run(work.options(wait=False))
    calls.clear()
    ask(agent)
    with pytest.raises(errors.Cancelled):
        agent.resume(caught.value.run, wait=False)
    assert calls == ["clean up", "child"]
    assert [one.status for one in agent._store.runs()] == ["cancelled", "cancelled"]


# -- undoing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executed", [True, False])
def test_with_compensate_what_it_did_is_undone_and_the_state_is_what_it_was(opened, calls, note, executed):
    began = threading.Event()

    @holdfast.durable(name="work")
    def work(agent):
        agent.state["booked"] = [note("flight"), note("hotel")]
        agent.checkpoint()
        began.set()
        agent.wait_for("go")

    agent = opened()
    agent.state["kept"] = 1
    agent.checkpoint()
    if executed:
        running = Meanwhile(agent, work)
        assert began.wait(HANG_S)
    else:
        with pytest.raises(holdfast.Waiting):
            agent.run(work.options(wait=False))
    agent._store.cancel("trip-7", compensate=True)
    if executed:
        assert isinstance(running.ended(), errors.Cancelled)
    assert calls == ["flight", "hotel", "undo hotel", "undo flight"]
    assert agent.state == {"kept": 1}
    (info,) = agent.runs()
    assert info.status == "rolled back"
    assert agent.run(lambda agent: 5) == 5


def test_what_cannot_be_undone_needs_attention_and_nothing_is_undone_before_somebody_decides(opened, calls, note):
    began = threading.Event()

    @holdfast.tool(name="stopping.mail")
    def mail():
        calls.append("mail")

    @holdfast.durable(name="work")
    def work(agent):
        note("flight")
        mail()
        began.set()
        agent.wait_for("go")

    agent = opened()
    agent.checkpoint("first")
    running = Meanwhile(agent, work)
    assert began.wait(HANG_S)
    agent._store.cancel("trip-7", compensate=True)
    assert isinstance(running.ended(), errors.RollbackBlocked)
    assert [one.status for one in agent.runs()] == ["needs attention"]
    assert calls == ["flight", "mail"]
    agent.rollback("first", accept=["stopping.mail"])
    assert calls == ["flight", "mail", "undo flight"]


# -- batches --------------------------------------------------------------------------------------------------


def test_a_batch_begins_no_more_items_and_goes_on_when_it_is_called_again(opened, calls):
    began, goes_on = threading.Event(), threading.Event()

    @holdfast.tool(name="stopping.bput")
    def put(what):
        calls.append(what)
        began.set()
        assert goes_on.wait(HANG_S)
        time.sleep(waiting.LOOK_S * 1.2)  # no item looks before that
        return what

    agent = opened()
    store = agent._store

    class Batch:
        def run(self, *_):
            return store.map(put, range(3), name="all", workers=1)

    running = Meanwhile(Batch(), None)
    assert began.wait(HANG_S)
    store.cancel("all")
    goes_on.set()
    assert isinstance(running.ended(), errors.Cancelled)
    assert calls == [0]
    assert [one.status for one in store.runs()] == ["cancelled"]
    assert store.map(put, range(3), name="all", workers=1) == [0, 1, 2]
    assert calls == [0, 1, 2]
