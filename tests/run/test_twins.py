"""Every public verb that waits has an async twin, and a loop goes on while it waits."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

import holdfast
from holdfast import errors
from holdfast.run.children import Child
from holdfast.run.forking import ForkPlan
from holdfast.run.handover import Submitted
from holdfast.run.rollback import RollbackPlan
from holdfast.run.worker import Worker
from tests.run import working

# What returns when something is durable, when somebody else has done something, or when user code has.
WAITS = {
    holdfast.Store: "adopt agent cancel drop_signal flush map resume signal submit",
    holdfast.Agent: "accept cancel checkpoint export_workspace flush fork gate redo resolve restore_workspace resume"
    " rollback run spawn step submit undo",
    Submitted: "cancel result",
    Worker: "run stop",
    Child: "cancel join",
    RollbackPlan: "apply",
    ForkPlan: "apply",
}
# What waits where it is awaited, or iterated, itself.
AWAITED = {holdfast.Store: "follow", holdfast.Agent: "sleep wait_for"}
# What only looks, names or prepares, lets go, or takes care of a whole store, as a program for that does.
OTHERS = {
    holdfast.Store: "agents branch close copy costs due effects export import_bundle mark move open_runs policies pull"
    " push backup verify_restore queues remove resolve retain runs schedules set_policy set_queue signals stats tag"
    " tier untag verify worker workspaces freeze thaw migrate diff explain keep minimise moments replay validate"
    " what_if acting_as half_thawed last_verified look updated when workers writers",
    holdfast.Agent: "abandoned at atomic branch branches changes close context crashes declare_modes diff effects"
    " events files generator info log mark now phase plan_fork plan_rollback random read_file refresh resource runs"
    " secret stack_at tag"
    " tags task untag uuid version bisect blame check drift handle invariant keep_environment log_handler logs metrics"
    " plan_reconcile quiesce reconcile safe_thread watch",
    Submitted: "check_same",
    Worker: "end one",
    Child: "again ask",
    RollbackPlan: "check_accepted check_blocked lines to_json unknown",
    ForkPlan: "lines to_json",
}


def verbs(kind: type) -> set[str]:
    found = {name for name in dir(kind) if not name.startswith("_") and callable(inspect.getattr_static(kind, name))}
    return {name for name in found if not inspect.iscoroutinefunction(getattr(kind, name))}


@pytest.mark.parametrize("kind", WAITS, ids=lambda kind: kind.__name__)
def test_every_verb_that_waits_has_a_twin_with_the_same_arguments(kind):
    for name in WAITS[kind].split():
        twin = getattr(kind, f"a{name}")
        assert inspect.iscoroutinefunction(twin), name
        assert twin.__doc__, name
    listed = {*WAITS[kind].split(), *AWAITED.get(kind, "").split(), *OTHERS[kind].split()}
    assert not verbs(kind) - listed, "a new verb belongs into one of the lists above"


@pytest.fixture
def store(tmp_path, outside):
    with holdfast.open(tmp_path / "store") as store:
        yield store


async def going_on(waiting):
    """What it comes to; the loop has gone on meanwhile."""
    task, turns = asyncio.ensure_future(waiting), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 1
    return await task


def test_all_of_them_on_one_loop(store):
    async def main():
        agent = await going_on(store.aagent("a"))
        agent.state["n"] = 1
        first = await agent.acheckpoint("first")
        agent.state["n"] = 2
        await agent.acheckpoint("second")
        await going_on(agent.aundo())
        assert agent.state["n"] == 1
        await going_on(agent.aredo())
        assert agent.state["n"] == 2
        await agent.arollback(first)
        await going_on(agent.aflush())
        job = await agent.asubmit(working.later.options(id="7"), "x")
        assert agent.closed
        signal = await going_on(store.asignal("a", "go", "early", run="7"))
        assert (await store.adrop_signal("a", signal.id)).status == "dropped"
        worker = store.worker()
        serving = asyncio.ensure_future(worker.arun())
        await store.asignal("a", "go", "now", run="7")
        assert await job.aresult(30) == "x now"
        other = await going_on(store.asubmit(working.later.options(id="8"), "y"))
        while other.status != "waiting":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert (await other.acancel()).cancelled_by or other.status in {"running", "cancelled"}
        with pytest.raises(errors.ToolFailed):
            await other.aresult(30)
        assert await going_on(worker.astop(180)) == []
        await serving
        assert await store.aadopt("a") == []
        await store.aflush()

    asyncio.run(main())


@holdfast.tool(name="working.asked", effect="read")
async def asked(number):
    return number


@holdfast.durable(name="working.asking")
async def asking(agent, number):
    agent.state["n"] = await asked(number)
    await agent.acheckpoint("asked")
    return number


def test_as_many_as_you_like_wait_for_results_beside_their_worker(store):
    async def main():
        jobs = [await store.asubmit(asking, number) for number in range(40)]
        waiting = [asyncio.ensure_future(job.aresult(60)) for job in jobs]
        await asyncio.sleep(0.1)  # all of them wait before anybody works
        worker = asyncio.ensure_future(store.worker().arun(drain=True))
        assert await asyncio.gather(*waiting) == list(range(40))
        await worker

    asyncio.run(main())


def test_what_was_begun_is_finished_when_its_caller_is_cancelled(store):
    begun, go = threading.Event(), threading.Event()

    def undo(effect):
        begun.set()
        assert go.wait(180)

    @holdfast.tool(name="working.undone_late", compensate=undo)
    def late():
        return 1

    @holdfast.durable(name="working.late")
    def waits(agent):
        late()
        agent.wait_for("never")

    async def main():
        agent = store.agent("a")
        with pytest.raises(errors.Waiting):
            agent.run(waits.options(id="7", wait=False))
        agent.close()
        cancelling = asyncio.ensure_future(store.acancel("a", "7", compensate=True))
        while not begun.is_set():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)
        cancelling.cancel()
        await asyncio.sleep(0.01)
        assert not cancelling.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelling

    asyncio.run(main())
    assert store.runs("a")[0].status == "rolled back"
