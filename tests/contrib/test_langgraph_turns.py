"""Several workers on the same threads: a run keeps its thread to its end, and not a moment longer.

Two savers of one process have a lease each, as two processes would; where a process of its own matters, there is one.
Nothing here waits for the garbage collector: it is off, so that whatever depended on it would stay held for ever.
"""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import EmptyInputError
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, Send, interrupt

from holdfast.agent.graph import Graph
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.contrib.langgraph import thread as thread_module
from holdfast.errors import AgentBusy, Fenced
from holdfast.run.store import Store
from holdfast.store.database import open_database
from tests.contrib.graphs import Deltas, Trail
from tests.contrib.threads import chain, checkpoint, config
from tests.contrib.writer_child import start, two_steps
from tests.lives import end, line, tell

META = {"source": "loop", "step": 0, "parents": {}}
THREAD = {"configurable": {"thread_id": "t"}}
GUARD_S = 180
"""Only there so that a hang ends: what is waited for takes milliseconds."""


@pytest.fixture(autouse=True)
def uncollected():
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@contextmanager
def another(path, durability="commit", wait_s=0.0):
    """Another saver, with a handle of its own on the store, as in another process."""
    store = Store(str(path), open_database(path), (False, durability, False, False))
    saver = HoldfastSaver(store, wait_s=wait_s)
    try:
        yield saver
    finally:
        saver.close()
        store.close()


@pytest.fixture
def other(store_path, ours):
    with another(store_path) as saver:
        yield saver


@pytest.fixture
def worker(store_path):
    process = start("worker", store_path, GUARD_S)
    yield process
    end(process)


def one_node(saver, node):
    return StateGraph(Trail).add_node("node", node).add_edge(START, "node").compile(checkpointer=saver)


def quick(saver):
    return one_node(saver, lambda _: {"trail": ["quick"]})


def refused(saver, rounds: int = 8) -> None:
    """Nobody is let in, also not after a while."""
    for _ in range(rounds):
        with pytest.raises(AgentBusy, match="thread 't'"):
            quick(saver).invoke({"trail": ["in between"]}, THREAD)
        time.sleep(0.02)


# -- a run that goes on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_run_keeps_its_thread_after_a_graph_inside_it_has_ended(ours, other, durability):
    inner = one_node(None, lambda _: {"trail": ["inner"]})

    def node(_state, config: RunnableConfig):
        graph.get_state(config)
        graph.get_state(THREAD)
        graph.update_state({"configurable": {"thread_id": "another"}}, {"trail": ["aside"]}, as_node="node")
        inner.invoke({"trail": []})
        refused(other)
        return {"trail": ["outer"]}

    graph = one_node(ours, node)
    assert graph.invoke({"trail": []}, THREAD, durability=durability)["trail"] == ["outer"]
    assert quick(other).invoke({"trail": []}, THREAD)["trail"] == ["outer", "quick"]


def test_a_run_keeps_its_thread_between_two_steps_that_somebody_streams(ours, other):
    graph = two_steps(ours, "streamed", lambda: None)
    steps = graph.stream({"trail": []}, THREAD, durability="exit")
    next(steps)
    refused(other)
    assert list(steps)
    quick(other).invoke({"trail": []}, THREAD)


def test_of_two_runs_the_one_that_ends_first_does_not_let_the_thread_go(ours, other):
    async def main() -> None:
        gone_on, may_end = asyncio.Event(), asyncio.Event()

        async def node(state):
            if "slow" in state["trail"]:
                gone_on.set()
                await may_end.wait()
            return {"trail": ["node"]}

        graph = one_node(ours, node)
        slow = asyncio.create_task(graph.ainvoke({"trail": ["slow"]}, THREAD))
        await gone_on.wait()
        beside = one_node(ours, lambda _: {"trail": ["fast"]})
        await beside.ainvoke({"trail": []}, THREAD)
        await asyncio.get_running_loop().run_in_executor(None, refused, other)
        may_end.set()
        assert "node" in (await slow)["trail"]

    asyncio.run(asyncio.wait_for(main(), GUARD_S))
    quick(other).invoke({"trail": []}, THREAD)
    assert ours.store.verify().ok


def test_nothing_that_langgraph_waits_for_waits_for_a_checkpoint_to_go_with(ours, monkeypatch):
    """It saves the checkpoint after writes to a delta channel, and none at all after an interrupt."""
    monkeypatch.setattr(thread_module, "SHARE_S", "no time that can be waited for")
    builder = StateGraph(Deltas).add_node("item", lambda _: {"items": ["node"]})
    builder.add_node("asks", lambda _: {"items": [interrupt("?")]})
    graph = builder.add_edge(START, "item").add_edge("item", "asks").compile(checkpointer=ours)
    assert graph.invoke({"items": ["asked"]}, THREAD, durability="sync")["__interrupt__"]
    graph.update_state(THREAD, {"items": ["by hand"]}, as_node="item")
    done = graph.invoke(Command(resume="yes"), THREAD, durability="sync")
    assert done["items"] == ["asked", "node", "by hand", "yes"]


# -- a run that has ended --------------------------------------------------------------------------------------


def fails(_state):
    raise ValueError("as it should")


async def fails_later(_state):
    raise ValueError("as it should")


async def never_ends(_state):
    await asyncio.Event().wait()


async def cancelled(graph, given) -> None:
    reached = asyncio.Event()

    async def watch() -> None:
        async for _ in graph.astream(given, THREAD, stream_mode="debug"):
            reached.set()

    run = asyncio.create_task(watch())
    await reached.wait()
    run.cancel()
    await run


def half_read(graph, given) -> None:
    for _ in graph.stream(given, THREAD):
        return


ENDINGS = {
    "it ended": (lambda _: {"trail": []}, lambda graph, given: graph.invoke(given, THREAD)),
    "an interrupt": (lambda _: interrupt("may I?"), lambda graph, given: graph.invoke(given, THREAD)),
    "an error": (fails, lambda graph, given: graph.invoke(given, THREAD)),
    "an interrupt, async": (
        lambda _: interrupt("may I?"), lambda graph, given: asyncio.run(graph.ainvoke(given, THREAD)),
    ),
    "an error, async": (fails_later, lambda graph, given: asyncio.run(graph.ainvoke(given, THREAD))),
    "it was cancelled": (never_ends, lambda graph, given: asyncio.run(cancelled(graph, given))),
    "nobody read on": (lambda _: {"trail": []}, half_read),
    "there was no input": (lambda _: {"trail": []}, lambda graph, _: graph.invoke(None, THREAD)),
    "there was no input, async": (
        lambda _: {"trail": []}, lambda graph, _: asyncio.run(graph.ainvoke(None, THREAD)),
    ),
    "an update": (lambda _: {"trail": []}, lambda graph, given: graph.update_state(THREAD, given, as_node="node")),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDINGS)
def test_after_a_run_its_thread_is_free_at_once_whatever_is_kept_of_it(ours, other, how):
    node, run = ENDINGS[how]
    kept = []

    def keeping(state, config: RunnableConfig, runtime: Runtime):
        kept.append((config, runtime))
        return node(state)

    async def keeping_later(state, config: RunnableConfig, runtime: Runtime):
        kept.append((config, runtime))
        return await node(state)

    graph = one_node(ours, keeping_later if asyncio.iscoroutinefunction(node) else keeping)
    for _ in range(2):
        try:
            kept.append(run(graph, {"trail": ["asked"]}))
        except (ValueError, EmptyInputError, asyncio.CancelledError) as error:
            kept.append(error)
        quick(other).invoke({"trail": ["next"]}, THREAD)
    assert other.store.verify().ok


def test_a_run_that_nobody_ended_ends_when_its_loop_is_gone(ours, other):
    class Loop:
        def __init__(self) -> None:
            self.stack, self.checkpointer = ExitStack(), ours

        def __enter__(self) -> None:
            ours.get_tuple({"configurable": {"thread_id": "t", "__pregel_runtime": Runtime()}})

    loop = Loop()
    loop.__enter__()
    refused(other, 1)
    del loop
    quick(other).invoke({"trail": []}, THREAD)


def test_workers_take_turns_at_a_thread_with_a_question_in_it(store_path, worker):
    """The process that asked is alive and keeps everything; another one brings the answer; then it is killed."""
    with HoldfastSaver(store_path) as saver:
        graph = two_steps(saver, "here", lambda: interrupt("may I?"))
        tell(worker, "ask t")
        assert line(worker) == "ran"
        assert graph.invoke(Command(resume="yes"), THREAD)["trail"][-1] == "here second of 2"
        tell(worker, "run t")
        assert line(worker) == "ran"
        assert graph.get_state(THREAD).values["trail"][-2:] == ["child first", "child second of 5"]
        tell(worker, "stay t")
        assert line(worker) == "inside"
        with pytest.raises(AgentBusy):
            quick(saver).invoke({"trail": []}, THREAD)
        worker.kill()
        worker.wait()
        assert quick(saver).invoke({"trail": []}, THREAD)["trail"][-2:] == ["asked by child", "quick"]
        assert saver.store.verify().ok


def test_two_workers_that_change_threads_crosswise_do_not_wait_for_each_other(store_path, worker):
    with HoldfastSaver(store_path, wait_s=GUARD_S) as saver:
        for number in range(2):
            here, there = f"here-{number}", f"there-{number}"
            tell(worker, f"run {there}")
            quick(saver).invoke({"trail": []}, {"configurable": {"thread_id": here}})
            assert line(worker) == "ran"
            tell(worker, f"run {here}")
            quick(saver).invoke({"trail": []}, {"configurable": {"thread_id": there}})
            assert line(worker) == "ran"


def test_what_was_put_in_batches_is_on_disk_before_another_may_write(store_path, other):
    with another(store_path, durability="batched") as batched:
        graph = two_steps(batched, "batched", lambda: None)
        for number in range(5):
            graph.invoke({"trail": [str(number)]}, THREAD)
            with another(store_path, wait_s=GUARD_S) as waiting:
                quick(waiting).invoke({"trail": []}, THREAD)
    trail = quick(other).get_state(THREAD).values["trail"]
    expected = []
    for number in range(5):
        expected += [str(number), "batched first", f"batched second of {4 * number + 2}", "quick"]
    assert trail == expected
    assert other.store.verify().ok


def test_a_run_whose_thread_was_taken_over_is_told_and_the_next_one_goes_on(ours, store_path):
    taken = []

    def node(_state):
        with another(store_path) as mine:
            taken.append(mine.store.agent("t", takeover=True))
        return {"trail": ["node"]}

    quick(ours).invoke({"trail": []}, THREAD)
    with pytest.raises(Fenced):
        one_node(ours, node).invoke({"trail": ["lost"]}, THREAD, durability="sync")
    assert taken
    assert quick(ours).invoke({"trail": []}, THREAD)["trail"][-1] == "quick"


# -- runs beside each other in one process ---------------------------------------------------------------------


def shape(saver, thread: str) -> tuple[int, int, int]:
    """How many checkpoints there are, how many of them begin a history, and how many follow one that is there."""
    found = list(saver.list({"configurable": {"thread_id": thread}}))
    ids = {one.checkpoint["id"] for one in found}
    parents = [one.parent_config["configurable"]["checkpoint_id"] for one in found if one.parent_config]
    return len(ids), len(found) - len(parents), sum(parent in ids for parent in parents)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_many_runs_of_one_thread_at_once_all_go_through(ours, mode):
    def sync_node(_state):
        time.sleep(0.001)
        return {"trail": ["node"]}

    async def async_node(_state):
        await asyncio.sleep(0.001)
        return {"trail": ["node"]}

    def runs(saver) -> tuple[int, int, int]:
        graph = one_node(saver, sync_node if mode == "sync" else async_node)
        graph.update_state(THREAD, {"trail": ["first"]}, as_node="node")
        if mode == "sync":
            with ThreadPoolExecutor(10) as pool:
                list(pool.map(lambda number: graph.invoke({"trail": [str(number)]}, THREAD), range(30)))
        else:

            async def main() -> None:
                for _ in range(3):
                    await asyncio.gather(*(graph.ainvoke({"trail": [str(each)]}, THREAD) for each in range(10)))

            asyncio.run(main())
        return shape(saver, "t")

    assert runs(ours) == runs(InMemorySaver()) == (91, 1, 90)


def test_who_read_late_does_not_make_a_fork_look_like_another_process(ours):
    made = chain(ours, "t", 3)
    thread = ours._known("t")
    first = Graph(ours.store._db.view, ours.store._agent_row("t")).everything()
    user = thread.enter()
    thread.become_writer()
    thread.looked("", list(first)[-1].n)
    thread.leave(user)
    ours.put(made[0], checkpoint({"by": "a fork"}), META, {})
    ours.put(made[1], checkpoint({"by": "another"}), META, {})
    assert shape(ours, "t") == (5, 1, 4)


def test_workers_that_replay_and_update_leave_the_history_that_the_official_saver_would(ours, other):
    def story(savers) -> list[int | None]:
        """Who is whose parent, by number in the order of making."""
        graphs = [two_steps(saver, "w", lambda: None) for saver in savers]
        for number in range(4):
            graphs[number % 2].invoke({"trail": [str(number)]}, THREAD)
        past = list(graphs[0].get_state_history(THREAD))
        graphs[1].invoke(None, past[5].config)
        graphs[0].update_state(past[9].config, {"trail": ["changed"]}, as_node="first")
        graphs[1].invoke(None, THREAD)
        graphs[0].invoke({"trail": ["again"]}, THREAD)
        found = sorted(savers[0].list(config("t")), key=lambda one: one.checkpoint["id"])
        number = {one.checkpoint["id"]: at for at, one in enumerate(found)}
        return [
            number[one.parent_config["configurable"]["checkpoint_id"]] if one.parent_config else None for one in found
        ]

    memory = InMemorySaver()
    assert story([ours, other]) == story([memory, memory])
    assert ours.store.verify().ok


# -- the event loop's own workers ------------------------------------------------------------------------------


def test_sync_nodes_that_keep_every_worker_of_the_event_loop_do_not_keep_the_saver(ours):
    """Each of them waits for an async graph on the same loop, which reads and writes meanwhile."""

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))

        async def inner_node(_state):
            return {"trail": ["inner"]}

        inner = one_node(ours, inner_node)

        def bridge(state):
            thread = {"configurable": {"thread_id": f"inner {state['answer']}"}}

            async def both() -> list[str]:
                await inner.ainvoke({"trail": []}, thread)
                await inner.aupdate_state(thread, {"trail": ["updated"]}, as_node="node")
                states = [each async for each in inner.aget_state_history(thread)]
                return (await inner.aget_state(thread)).values["trail"][: len(states)]

            return {"trail": asyncio.run_coroutine_threadsafe(both(), loop).result(GUARD_S)}

        builder = StateGraph(Trail).add_node(bridge)
        graph = builder.add_conditional_edges(
            START, lambda _: [Send("bridge", {"answer": str(number)}) for number in range(4)], ["bridge"]
        ).compile(checkpointer=ours)
        return (await graph.ainvoke({"trail": []}, THREAD))["trail"]

    assert asyncio.run(asyncio.wait_for(main(), GUARD_S)) == ["inner", "updated"] * 4


def test_waiting_for_another_process_keeps_no_worker(ours, other, store_path):
    """More runs wait for one thread than the saver has workers; reading and writing another goes on."""
    user = other._known("t").enter()
    other._known("t").become_writer()

    async def main() -> None:
        with another(store_path, wait_s=GUARD_S) as waiting:

            async def node(_state):
                return {"trail": ["node"]}

            graph = one_node(waiting, node)
            runs = [asyncio.create_task(graph.ainvoke({"trail": []}, THREAD)) for _ in range(12)]
            runs += [asyncio.create_task(graph.aupdate_state(THREAD, {"trail": []}, as_node="node")) for _ in range(12)]
            free = {"configurable": {"thread_id": "free"}}
            for _ in range(3):
                await graph.ainvoke({"trail": []}, free)
                await graph.aget_state(free)
            assert not any(run.done() for run in runs)
            other._known("t").leave(user)
            found = await asyncio.gather(*runs, return_exceptions=True)
            assert not [one for one in found if isinstance(one, BaseException)]

    asyncio.run(asyncio.wait_for(main(), GUARD_S))
    assert ours.store.verify().ok
