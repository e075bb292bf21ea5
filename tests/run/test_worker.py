"""Workers: whatever was submitted, killed or has come due is executed, once, by whoever is there."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

import holdfast
from holdfast import errors
from holdfast.run import opened
from holdfast.run import worker as working_on
from holdfast.run.worker import Worker
from tests import lives
from tests.conftest import unsaved
from tests.run import working


def work(store, **options):
    """Work until there is nothing to do, and nothing that sleeps."""
    here = store.worker(**options)
    here.run(drain=True)
    while any(run.until is not None for run in store.runs(status="waiting")):
        here.run(drain=True)


def worker(place, *options):
    return lives.worker(place, working.__file__, "--json", *options, stdout=subprocess.PIPE)


def told(process) -> list[dict]:
    return [json.loads(line) for line in process.communicate()[0].splitlines()]


def test_what_is_submitted_is_executed_and_its_result_is_there(place, outside):
    with holdfast.open(place) as store:
        jobs = [store.submit(working.job, str(number)) for number in range(5)]
        assert {one.status for one in jobs} == {"queued"}
        became = []
        work(store, concurrency=3, tell=became.append)
        assert [one.result(0) for one in jobs] == [[f"{n}-a", f"{n}-b"] for n in range(5)]
        assert Counter(one.became for one in became)["finished"] == 5
        assert set(outside().values()) == {1}


def test_an_id_is_executed_once_however_often_it_is_submitted(place, outside):
    with holdfast.open(place) as store:
        first = store.submit(working.job.options(id="7"), "x")
        again = store.submit(working.job.options(id="7"), "x")
        assert (first.agent, first.id) == (again.agent, again.id) == ("working.job/7", "7")
        work(store)
        assert store.submit(working.job.options(id="7"), "x").result(0) == ["x-a", "x-b"]
        with pytest.raises(errors.RunEnded):
            store.submit(working.job.options(id="7"), "y")
        work(store)
        assert outside() == {"x-a": 1, "x-b": 1}


def test_a_run_that_fails_says_so_and_stops_nobody(place, outside):
    with holdfast.open(place) as store:
        wrong, right = store.submit(working.wrong, "no"), store.submit(working.job, "x")
        became = []
        work(store, tell=became.append)
        assert right.status == "finished"
        with pytest.raises(errors.ToolFailed, match="ValueError: no"):
            wrong.result(0)
        assert {(one.function, one.became) for one in became if one.became == "failed"} == {("working.wrong", "failed")}


def test_what_somebody_executes_or_nobody_knows_is_left_alone(place, outside, monkeypatch):
    with holdfast.open(place) as store:
        unknown = store.submit(working.job, "x")
        monkeypatch.delitem(holdfast.run.durables.DURABLES, "working.job")
        work(store)
        assert unknown.status == "queued"
        held = store.agent("held")
        with pytest.raises(errors.Waiting):
            held.run(_sleeps.options(wait=False))
        store.worker().run(drain=True)  # the branch is held by this very process
        assert held.runs()[0].status == "waiting"


@holdfast.durable(name="working.sleeps")
def _sleeps(agent):
    agent.wait_for("never")


def test_a_worker_on_an_event_loop(place, outside):
    async def main(store):
        submitted = store.submit(working.later, "x")
        working_on = asyncio.ensure_future(store.worker().arun())
        while submitted.status != "waiting":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        store.signal(submitted.agent, "go", "here")
        assert await submitted.aresult(30) == "x here"
        working_on.cancel()
        await asyncio.wait({working_on})

    with holdfast.open(place) as store:
        asyncio.run(main(store))


def test_a_run_that_ends_its_worker_each_time_is_set_aside_and_takes_no_other_with_it(tmp_path, outside):
    place = str(tmp_path / "store")
    with holdfast.open(place) as store:
        bad = store.submit(working.deadly)
        deaths = 0
        while bad.status != "needs attention":
            good = store.submit(working.job, f"beside {deaths}".replace(" ", "-"))
            one = worker(place, "--drain")
            one.communicate()
            deaths += one.returncode == -signal.SIGKILL
            assert deaths <= 2, "the third try has a process of its own"
        while good.status == "waiting":  # one that drains does not wait for a time that has not come
            worker(place, "--drain").communicate()
        assert good.result(0)
        assert outside()[str(0)] == 0
        assert sum(line[0] == "deadly" for line in working.done()) == 3
        assert "3 times" in bad.info.error
        assert "no dump was left" in bad.info.error


@pytest.mark.slow
def test_a_run_that_is_set_aside_names_the_dump_of_its_last_try(tmp_path, outside):
    place = str(tmp_path / "store")
    with holdfast.open(place) as store:
        bad = store.submit(working.deadly_and_watched)
        handle = store.agent(bad.agent)
        for _ in range(2):  # as two workers leave it that are killed
            handle._host.ledger.append(holdfast.run.records.Note(0, bad.id, "resume", "", path="worker"), flush=True)
        handle.close()
        words = ["-m", "holdfast", "--store", place, "worker", working.__file__, "--json", "--drain"]
        one = subprocess.run([sys.executable, *words], capture_output=True, check=False)
        assert one.returncode == 7, one.stderr
        (told,) = [json.loads(line) for line in one.stdout.splitlines()]
        assert told["became"] == "needs attention"
        dump = bad.info.error.partition("holdfast dump show ")[2].rstrip("`")
        assert (tmp_path / "store" / "dumps" / dump).is_file(), bad.info.error


def test_a_worker_that_is_stopped_finishes_what_it_has_begun(tmp_path, outside):
    place = str(tmp_path / "store")
    with holdfast.open(place) as store:
        slow = store.submit(working.slow, "x")
        one = worker(place, "--grace", "0.2")
        while not outside():
            time.sleep(0.01)
        store.submit(working.job, "never begun")
        one.send_signal(signal.SIGTERM)
        one.communicate()
        assert one.returncode == 0
        assert slow.status == "interrupted"
        again = worker(place, "--grace", "0")  # the next one resumes it
        while outside()["x"] < 2:
            time.sleep(0.01)
        again.kill()
        again.communicate()


def test_children_go_on_with_their_parent_and_not_by_themselves(place, outside):
    with holdfast.open(place) as store:
        job = store.submit(working.parent, "x", dies=True)
        first = worker(place, "--drain")
        first.communicate()
        assert first.returncode == -signal.SIGKILL
        working.freed(store)
        became = []
        work(store, tell=became.append)
        assert [(one.function, one.became) for one in became] == [("working.parent", "finished")]
        assert job.result(0) == ["x-0-b", "x-1-b"]
        assert outside() == {f"x-{n}-{part}": 1 for n in range(2) for part in "ab"}


def test_a_parent_whose_children_wait_is_left_alone_until_one_can_go_on(place, outside):
    with holdfast.open(place) as store:
        job = store.submit(working.parent, "x", waits=True)
        became = []
        work(store, concurrency=1, tell=became.append)
        length = store._view(job.agent, "main").line.count
        work(store, concurrency=1, tell=became.append)
        assert (job.status, [one.became for one in became]) == ("waiting", ["waiting"])
        assert store._view(job.agent, "main").line.count == length
        assert not store.due()
        for n in range(2):
            store.signal(f"{job.agent}/kid-{n}", "go")
            assert [one.id for one in store.due() if one.agent == job.agent] == [job.id]
            work(store, concurrency=1)
        assert job.result(0) == ["x-0-b", "x-1-b"]
        assert set(outside().values()) == {1}


def test_threads_that_submit_one_id_all_get_the_same_run(place, outside):
    with holdfast.open(place) as store:
        answers = []

        def submit(what):
            try:
                answers.append(store.submit(working.job.options(id="7"), what).id)
            except errors.RunUnfinished as error:
                answers.append(error.message.partition(" with ")[0])

        threads = [threading.Thread(target=submit, args=("x",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == ["7"] * 8
        submit("y")
        assert answers[8:] == ["run '7' was begun"]
        work(store)
        assert outside() == {"x-a": 1, "x-b": 1}


@holdfast.durable(name="working.held")
def _held(agent, hold):
    hold = HOLDS[hold]
    hold[0].set()
    assert hold[1].wait(180)
    agent.state["mine"] = True


HOLDS: dict[str, tuple[threading.Event, threading.Event]] = {}


def test_nobody_in_the_process_gets_the_handle_of_a_run_that_a_worker_executes(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        HOLDS["one"] = begun, go = threading.Event(), threading.Event()
        job = store.submit(_held.options(id="1"), "one")
        here = store.worker()
        thread = threading.Thread(target=here.run, kwargs={"drain": True})
        thread.start()
        assert begun.wait(180)
        with pytest.raises(errors.AgentBusy, match="a worker of this process"):
            store.agent(job.agent)
        assert store.agent(job.agent, readonly=True).state == {}
        assert store.submit(_held.options(id="1"), "one").status == "running"
        with pytest.raises(errors.RunUnfinished, match="other arguments"):
            store.submit(_held.options(id="1"), "two")
        go.set()
        with store.agent(job.agent, wait_s=180) as after:
            assert after.state == {"mine": True}
        thread.join()
        assert job.status == "finished"


def test_a_run_that_submits_without_an_id_is_refused_as_it_would_submit_twice(tmp_path):
    with holdfast.open(tmp_path / "store") as store:

        @holdfast.durable(name="working.outer")
        def outer(agent):
            store.submit(working.job, "x")

        with pytest.raises(errors.BadOption, match="would be done twice"):
            store.agent("a").run(outer)
        assert [run.agent for run in store.runs()] == ["a"]


@unsaved
def test_handing_over_a_run_that_is_there_loses_no_changes(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        store.agent("a").submit(working.later.options(id="7"), "x")
        agent = store.agent("a")
        agent.state["k"] = 1
        with pytest.raises(errors.RunUnfinished, match="not saved"):
            agent.submit(working.later.options(id="7"), "x")
        assert (agent.closed, agent.state["k"]) == (False, 1)


def test_a_run_that_failed_or_came_with_a_branch_is_executed_when_it_is_handed_over(tmp_path, outside, monkeypatch):
    with holdfast.open(tmp_path / "store") as store:
        failed = store.agent("a").submit(working.wrong, "x")
        work(store)
        assert failed.status == "failed"
        monkeypatch.setattr(holdfast.run.durables.DURABLES["working.wrong"], "function", lambda _agent, what: what)
        again = store.agent("a").submit(working.wrong, "x")
        assert (again.id, again.status) == (failed.id, "interrupted")
        work(store)
        assert again.result(0) == "x"

        with store.agent("b") as b, pytest.raises(errors.Waiting):
            asyncio.run(b.arun(working.later.options(id="7", wait=False), "y"))
        there = b.branch("there", at=b.head).submit(working.later.options(id="7"), "y")
        store.signal("b", "go", "now", run="7", branch="there")
        work(store)
        assert (there.result(0), b.runs()[0].status) == ("y now", "waiting")


def test_a_run_whose_doubt_somebody_has_settled_goes_on(place, outside):
    @holdfast.tool(name="working.doubtful")
    def doubtful():
        raise KeyboardInterrupt

    @holdfast.durable(name="working.doubts")
    def doubts(agent):
        return doubtful()

    with holdfast.open(place) as store:
        with store.agent("a") as agent, pytest.raises(KeyboardInterrupt):
            agent.run(doubts)
        agent.close()
        became = []
        work(store, tell=became.append)
        assert (became, store.runs()[0].status) == ([], "needs attention")
        with store.agent("a") as agent:
            agent.resolve(agent.effects()[0], "done", result="paid")
        agent.close()
        work(store, tell=became.append)
        assert (became[-1].became, store.runs()[0].result) == ("finished", "paid")


def test_a_rollback_that_is_stuck_is_not_tried_over_and_over(tmp_path, monkeypatch):
    tried = []

    def undo(effect):
        tried.append(effect.id)
        raise KeyboardInterrupt if len(tried) == 1 else ValueError

    @holdfast.tool(name="working.undone", compensate=undo)
    def undone():
        return 1

    @holdfast.durable(name="working.undoing")
    def undoing(agent):
        undone()
        agent.wait_for("go")

    monkeypatch.setattr(holdfast.run.resilience.CLOCK, "sleep", lambda _: None)
    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("a")
        start = agent.checkpoint("start")
        with pytest.raises(errors.Waiting):
            agent.run(undoing.options(id="7", wait=False))
        with pytest.raises(KeyboardInterrupt):
            agent.rollback(start)
        agent.close()
        store.signal("a", "go", run="7")
        became = []
        store.worker(tell=became.append).run(drain=True)
        times = len(tried)
        store.worker(tell=became.append).run(drain=True)
        assert len(tried) == times
        assert [one.became for one in became] == ["left", "needs attention"]


def test_a_run_is_never_submitted_to_the_agent_of_a_child(tmp_path, outside):
    with holdfast.open(tmp_path / "store") as store:
        store.submit(working.parent.options(id="1"), "x")
        work(store)
        with pytest.raises(errors.BadOption, match="'1/kid-0'"):
            store.submit(working.parent.options(id="1/kid-0"), "y")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_own_process_does_not_even_begin_is_left_for_a_while(tmp_path):
    @holdfast.durable(name="working.exits")
    def exits(agent):
        raise SystemExit

    with holdfast.open(tmp_path / "store") as store:
        job = store.submit(exits)
        asked, became = [], []
        Worker(store, tell=became.append, alone=lambda *run: asked.append(run)).run(drain=True)
        assert asked == [(job.agent, "main", job.id)]
        assert ([one.became for one in became], job.status) == (["left"], "interrupted")


def test_a_worker_looks_for_work_a_few_times_however_many_wait(tmp_path, outside, monkeypatch):
    looked = []
    candidates = opened.candidates
    monkeypatch.setattr(opened, "candidates", lambda *given, **more: looked.append(given) or candidates(*given, **more))
    monkeypatch.setattr(working_on, "STALE_S", 3600.0)  # it looks again for what is more urgent now
    with holdfast.open(tmp_path / "store", durability="batched") as store:
        jobs = [store.submit(_short, number) for number in range(40)]
        store.worker(concurrency=1).run(drain=True)
        assert [one.result(0) for one in jobs] == list(range(40))
    assert len(looked) < 10


@holdfast.durable(name="working.short")
def _short(agent, number):
    return number


def test_a_run_that_stopped_is_left_to_a_worker_by_whoever_has_no_function_of_it(place, outside, monkeypatch):
    with holdfast.open(place) as store:
        failed = store.submit(working.wrong, "x")
        work(store)
        with store.acting_as("ada"), monkeypatch.context() as elsewhere:
            elsewhere.delitem(holdfast.run.durables.DURABLES, "working.wrong")
            assert store.resume(failed.agent, failed.id).status == "interrupted"
            assert store.resume(failed.agent).status == "interrupted"  # the second time says nothing new
        monkeypatch.setattr(holdfast.run.durables.DURABLES["working.wrong"], "function", lambda _agent, what: what)
        work(store)
        assert failed.result(0) == "x"
        events = store.agent(failed.agent, readonly=True).events()
        told = [(one["was"], one["by"]) for one in events if one["what"] == "resumed"]
        assert told == [("failed", "ada")]
        with pytest.raises(errors.RunEnded):
            store.resume(failed.agent, failed.id)

        @holdfast.durable(name="working.saves")
        def saves(agent):
            agent.state["n"] = 1
            agent.checkpoint("n")
            return f"y {agent.wait_for('go')}"

        with store.agent("b") as b, pytest.raises(errors.Waiting):
            b.run(saves.options(id="7", wait=False))
        b.branch("there", at=b.head).close()
        store.signal("b", "go", "now", run="7", branch="there")
        work(store)  # what came with a branch is nobody's
        assert [(one.status, one.left) for one in store.runs("b", branch="there")] == [("interrupted", False)]
        assert store.resume("b", "7", branch="there").left
        work(store)
        assert [one.result for one in store.runs("b", branch="there")] == ["y now"]
        assert b.runs()[0].status == "waiting"


def test_a_run_that_was_set_aside_is_tried_again_when_somebody_asks_for_it(tmp_path, outside):
    with holdfast.open(tmp_path / "store") as store:
        bad = store.submit(working.job, "x")
        handle = store.agent(bad.agent)
        for _ in range(working_on.TRIES):  # as workers leave it that are killed
            handle._host.ledger.append(holdfast.run.records.Note(0, bad.id, "resume", "", path="worker"), flush=True)
        handle.close()
        work(store)
        assert (bad.status, bad.info.left) == ("needs attention", False)
        assert store.resume(bad.agent, bad.id).left
        work(store)
        assert bad.status == "finished"


def test_while_somebody_executes_a_run_nobody_leaves_it_to_others(tmp_path):
    with holdfast.open(tmp_path / "store") as store:

        @holdfast.durable(name="working.asks")
        def asks(agent):
            with pytest.raises(errors.RunUnfinished):
                store.resume("a")
            return "done"

        assert store.agent("a").run(asks) == "done"


@pytest.mark.parametrize("aside", [False, True], ids=["interrupted", "set aside"])
def test_a_run_is_cancelled_by_the_next_who_executes_it_and_undone_with_his_tools(place, outside, aside):
    undone, died = [], []

    @holdfast.tool(name="working.booked", compensate=lambda effect: undone.append(effect.result))
    def booked():
        return "seat 4"

    @holdfast.durable(name="working.books")
    def books(agent):
        booked()
        if not died:
            died.append(True)
            raise KeyboardInterrupt
        agent.sleep(60)

    with holdfast.open(place) as store:
        with store.agent("a") as agent, pytest.raises(KeyboardInterrupt):
            agent.run(books)
        if aside:
            note = holdfast.run.records.End(0, agent.runs()[0].id, "attention", fault=("", "WorkerLost", "", None))
            agent._host.ledger.append(note, flush=True)
        agent.close()
        with store.acting_as("ada"):
            info = store.cancel("a", compensate=True, later=True)
        assert (info.left, info.cancelled_by, undone) == (not aside, "ada", [])
        if aside:
            work(store)
            assert store.runs("a")[0].status == "needs attention"
            store.resume(info)
        work(store)
        assert (store.runs("a")[0].status, undone) == ("rolled back", ["seat 4"])


def test_workers_are_seen_as_long_as_they_live(place, outside):
    with holdfast.open(place) as store:
        assert store.workers() == []
        one, other = worker(place), worker(place)
        while len(store.workers()) < 2:
            time.sleep(0.01)
        assert {seen["pid"] for seen in store.workers()} == {one.pid, other.pid}
        assert all("working.job" in seen["functions"] for seen in store.workers())
        assert store.writers() == []
        one.kill()
        one.communicate()
        while len(store.workers()) > 1:  # a server takes its time
            time.sleep(0.01)
        other.send_signal(signal.SIGTERM)
        other.communicate()
        working.freed(store)
        assert store.workers() == []


def test_a_worker_on_a_server_is_seen_for_longer_than_a_lease_lasts(postgres_url, monkeypatch):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")
    with holdfast.open(f"{postgres_url}&lease_s=1") as store:
        here = store.worker()
        thread = threading.Thread(target=here.run)
        thread.start()
        end_s = time.monotonic() + 2.5
        while not store.workers():
            time.sleep(0.01)
        while time.monotonic() < end_s:
            assert store.workers()
            time.sleep(0.1)
        here.stop()
        thread.join()
        assert store.workers() == []
