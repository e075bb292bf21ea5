"""Runs of one thread beside each other, in one process: what a node does outside is done once, or refused in words."""

from __future__ import annotations

import asyncio
import operator
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.runtime import RunControl
from langgraph.types import Command, interrupt

import holdfast
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.contrib.langgraph.thread import Thread
from holdfast.errors import AgentBusy, Contention, Fenced

WORLD: list[str] = []
"""What really happened."""
GUARD_S = 180


@holdfast.tool(name="beside_book")
def book(city: str) -> str:
    """Book a trip."""
    WORLD.append(city)
    return city


class State(TypedDict, total=False):
    x: Annotated[list, operator.add]


@pytest.fixture(autouse=True)
def _nothing_done():
    WORLD.clear()


def thread(name="t"):
    return {"configurable": {"thread_id": name}}


def two_and_last(slow: Any, saver: Any) -> Any:
    """Two nodes beside each other, then one."""
    builder = StateGraph(State).add_node("fast", lambda state: {"x": ["fast"]}).add_node("slow", slow)
    builder.add_node("last", lambda state: {"x": [book("last")]})
    builder.add_edge(START, "fast").add_edge(START, "slow").add_edge(["fast", "slow"], "last")
    return builder.compile(checkpointer=saver)


def within(seconds: float, work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


# -- a stream that nobody reads on ----------------------------------------------------------------------------------


# LangGraph waits for a checkpoint of a graph that has none where the one around it is "sync".
KINDS = [
    *((kind, durability) for kind in ("no subgraph", None, True) for durability in ("sync", "async")),
    (False, "async"),
]


@pytest.mark.parametrize(("kind", "durability"), KINDS)
@pytest.mark.parametrize("acts", ["before it is abandoned", "after it was resumed"])
def test_what_an_abandoned_stream_does_is_not_done_again_by_the_resume(ours, durability, kind, acts):
    async def main() -> None:
        begun, resumed, first_may, second_may = (asyncio.Event() for _ in range(4))
        over = asyncio.Event()
        executions = []

        async def inner(state):
            executions.append(1)
            if len(executions) == 1:
                try:
                    done = [book("A")] if acts.startswith("before") else []
                    begun.set()
                    await first_may.wait()
                    return {"x": done or [book("A")]}
                finally:
                    over.set()
            resumed.set()
            await second_may.wait()
            return {"x": [book("A")]}

        node = inner
        if kind != "no subgraph":
            below = StateGraph(State).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=kind)

            async def node(state):
                return {"x": (await below.ainvoke({"x": []}))["x"]}

        graph = two_and_last(node, ours)
        stream = graph.astream({"x": []}, thread(), durability=durability, stream_mode="updates")
        async for _ in stream:
            break
        await begun.wait()
        await asyncio.to_thread(stored, ours)
        resume = asyncio.create_task(graph.ainvoke(None, thread(), durability=durability))
        await resumed.wait()
        first_may.set()
        await over.wait()
        second_may.set()
        assert (await resume)["x"] == ["fast", "A", "last"]
        with pytest.raises(Fenced, match="another run"):
            async for _ in stream:
                pass
        assert graph.get_state(thread()).values["x"] == ["fast", "A", "last"]
        assert (await graph.ainvoke({"x": []}, thread(), durability=durability))["x"][-1] == "last"

    within(GUARD_S, main())
    assert WORLD == ["A", "last", "A", "last"]


def stored(saver: HoldfastSaver, name: str = "t") -> None:
    """Return when the checkpoint is there from which the first nodes follow."""
    while not any(one.metadata["source"] == "loop" for one in saver.list(thread(name))):
        time.sleep(0.001)


def test_a_call_under_way_is_waited_for_also_where_its_task_has_another_name_now(ours):
    """A graph without a checkpointer has new ids each time."""
    begun, gate, made = threading.Event(), threading.Event(), []

    @holdfast.tool
    def slow_book(city: str) -> str:
        """Book a trip."""
        made.append(city)
        begun.set()
        assert gate.wait(GUARD_S)
        return city

    below = StateGraph(State).add_node("inner", lambda state: {"x": [slow_book("A")]}).add_edge(START, "inner")
    graph_below = below.compile(checkpointer=False)
    graph = two_and_last(lambda state: {"x": graph_below.invoke({"x": []})["x"]}, ours)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(graph.invoke, {"x": []}, thread(), durability="async")
        assert begun.wait(GUARD_S)
        stored(ours)
        resume = pool.submit(graph.invoke, None, thread(), durability="async")
        while not ours._threads["t"].holder.resumes:
            time.sleep(0.001)
        gate.set()
        assert resume.result(GUARD_S)["x"] == ["fast", "A", "last"]
        with pytest.raises(Fenced):
            first.result(GUARD_S)
    assert made == ["A"]
    assert WORLD == ["last"]


def test_of_two_resumes_at_once_neither_overlooks_what_the_first_run_is_storing(ours, monkeypatch):
    storing, may_store, may_end, again = (threading.Event() for _ in range(4))
    first = [True]
    wait = Thread.wait

    def slow(self, *given, **how):
        if first and first.pop():
            storing.set()
            assert may_store.wait(GUARD_S)
        return wait(self, *given, **how)

    def other(state):
        assert may_end.wait(GUARD_S)
        return {"x": ["other"]}

    def act(state):
        if storing.is_set():  # executed again
            again.set()
            assert may_end.wait(GUARD_S)
        return {"x": [book("A")]}

    builder = StateGraph(State).add_node("act", act).add_node("other", other)
    graph = builder.add_edge(START, "act").add_edge(START, "other").compile(checkpointer=ours)
    graph.update_state(thread(), {"x": []}, as_node=START)  # so that the first that is stored is what a task wrote
    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(Thread, "wait", slow)
        runs = [pool.submit(graph.invoke, None, thread(), durability="sync")]
        assert storing.wait(GUARD_S)
        for _ in range(2):
            holder = ours._threads["t"].holder
            runs.append(pool.submit(graph.invoke, None, thread(), durability="sync"))
            while ours._threads["t"].holder is holder:
                time.sleep(0.001)
        overlooked = again.wait(0.3)
        may_store.set()
        while not ours._threads["t"].tools._ended:
            time.sleep(0.001)
        may_end.set()
        found = [run.exception(GUARD_S) or run.result() for run in runs]
    assert found[2]["x"] == ["A", "other"]
    assert all(isinstance(one, Fenced) for one in found[:2])
    assert not overlooked
    assert WORLD == ["A"]


def test_a_stream_that_is_read_on_after_somebody_else_has_resumed_its_run_does_nothing_more(ours):
    builder = StateGraph(State)
    for name, above in (("one", START), ("two", "one"), ("three", "two")):
        builder.add_node(name, lambda state, name=name: {"x": [book(name)]}).add_edge(above, name)
    graph = builder.compile(checkpointer=ours)
    stream = graph.stream({"x": []}, thread(), durability="sync")
    next(stream)
    assert graph.invoke(None, thread())["x"] == ["one", "two", "three"]
    with pytest.raises(Fenced, match="since this one began"):
        list(stream)
    assert WORLD == ["one", "two", "three"]
    assert graph.get_state(thread()).values["x"] == ["one", "two", "three"]
    graph.invoke({"x": []}, thread())
    assert WORLD == ["one", "two", "three"] * 2


def test_an_answer_given_while_the_stream_that_asked_is_read(ours):
    def node(state):
        return {"x": [book("A"), interrupt("?")]}

    graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile(checkpointer=ours)
    for event in graph.stream({"x": []}, thread()):
        if "__interrupt__" in event:
            assert graph.invoke(Command(resume=1), thread())["x"] == ["A", 1]
    assert WORLD == ["A"]


def test_a_task_that_is_cancelled_while_its_node_is_in_a_thread_of_its_own(ours):
    begun, gate, over = threading.Event(), threading.Event(), threading.Event()
    first = [True]

    def node(state):
        if first and first.pop():
            begun.set()
            try:
                assert gate.wait(GUARD_S)
                return {"x": [book("A")]}
            finally:
                over.set()
        return {"x": [book("A")]}

    graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile(checkpointer=ours)

    async def main() -> None:
        run = asyncio.create_task(graph.ainvoke({"x": []}, thread(), durability="sync"))
        await asyncio.to_thread(begun.wait, GUARD_S)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert (await graph.ainvoke(None, thread()))["x"] == ["A"]
        gate.set()
        await asyncio.to_thread(over.wait, GUARD_S)

    within(GUARD_S, main())
    assert WORLD == ["A"]


# -- messages at once -----------------------------------------------------------------------------------------------


def echoes(saver: Any) -> Any:
    """Books what it was told last, in two steps."""
    builder = StateGraph(State).add_node("one", lambda state: {"x": [book(state["x"][-1])]})
    builder.add_node("two", lambda state: {"x": [book(f"{state['x'][-1]} too")]})
    return builder.add_edge(START, "one").add_edge("one", "two").compile(checkpointer=saver)


def test_a_message_that_comes_while_another_is_at_work_is_refused_in_words(ours):
    graph = echoes(ours)
    graph.invoke({"x": ["first"]}, thread())
    stream = graph.stream({"x": ["A"]}, thread(), durability="sync")
    next(stream)
    with pytest.raises(AgentBusy, match="another run") as caught:
        graph.invoke({"x": ["B"]}, thread())
    assert "close" in caught.value.hint
    list(stream)
    assert graph.invoke({"x": ["B"]}, thread())["x"][3:] == ["A", "A", "A too", "B", "B", "B too"]
    assert WORLD == ["first", "first too", "A", "A too", "B", "B too"]


def test_it_waits_for_the_other_if_the_saver_may_wait(store_path):
    with HoldfastSaver(store_path, wait_s=GUARD_S) as saver:
        graph = echoes(saver)
        graph.invoke({"x": ["first"]}, thread())
        stream = graph.stream({"x": ["A"]}, thread(), durability="sync")
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(graph.invoke, {"x": ["B"]}, thread())
            list(stream)
            assert other.result(GUARD_S)["x"][3:] == ["A", "A", "A too", "B", "B", "B too"]


def test_a_stream_that_was_let_go_is_not_in_the_way_of_the_next_message(ours):
    graph = echoes(ours)

    async def main() -> None:
        await graph.ainvoke({"x": ["first"]}, thread())
        async for _ in graph.astream({"x": ["A"]}, thread(), durability="sync"):
            break
        assert (await graph.ainvoke({"x": ["A"]}, thread()))["x"][-3:] == ["A", "A", "A too"]

    within(GUARD_S, main())


@pytest.mark.parametrize("mode", ["threads", "tasks"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_of_messages_at_once_each_is_answered_or_refused_and_none_is_lost(ours, mode, durability):
    graph = echoes(ours)
    graph.invoke({"x": ["first"]}, thread())

    def told(number):
        try:
            return graph.invoke({"x": [f"{number}"]}, thread(), durability=durability)["x"]
        except Contention as error:
            return error

    async def told_later(number):
        try:
            return (await graph.ainvoke({"x": [f"{number}"]}, thread(), durability=durability))["x"]
        except Contention as error:
            return error

    async def all_of_them():
        return await asyncio.gather(*map(told_later, range(4)))

    if mode == "threads":
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(told, range(4)))
    else:
        found = within(GUARD_S, all_of_them())
    went = [f"{number}" for number, one in enumerate(found) if isinstance(one, list)]
    assert went
    state = graph.get_state(thread()).values["x"]
    assert all(f"{one} too" in state for one in went)
    assert sorted(WORLD[2:]) == sorted([*went, *(f"{one} too" for one in went)])


def test_messages_at_once_in_a_thread_that_is_new(ours):
    """Nobody knows yet that its nodes act outside."""
    both = threading.Barrier(2)

    def node(state):
        both.wait(GUARD_S)
        return {"x": [book(state["x"][-1])]}

    graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile(checkpointer=ours)

    def told(name):
        try:
            return graph.invoke({"x": [name]}, thread())["x"]
        except Contention as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(told, "AB"))
    (went,) = [one for one in found if isinstance(one, list)]
    assert went[-1:] == WORLD
    assert graph.get_state(thread()).values["x"] == went


def test_runs_of_several_threads_that_share_a_control_are_each_recorded_in_their_own(ours):
    control, both = RunControl(), threading.Barrier(2)

    def node(state):
        both.wait(GUARD_S)
        return {"x": [book(state["x"][-1]), interrupt("?")]}

    graph = StateGraph(State).add_node("node", node).add_edge(START, "node").compile(checkpointer=ours)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: graph.invoke({"x": [name]}, thread(name), control=control), "AB"))
    for name in "AB":
        with ours.store.agent(name, readonly=True) as agent:
            assert [effect.args["city"] for effect in agent.effects()] == [name]
    assert sorted(WORLD) == ["A", "B"]
