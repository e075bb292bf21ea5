"""State that somebody updates while a run is at work on the thread: neither is lost, and nothing is done twice."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypedDict

import pytest
from langgraph.graph import START, StateGraph

import holdfast
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.contrib.langgraph.thread import Thread
from holdfast.errors import AgentBusy, Fenced
from tests.contrib.threads import META, chain, checkpoint, config

WORLD: list[str] = []
"""What really happened."""
GUARD_S = 180
THREAD = {"configurable": {"thread_id": "t"}}
BETWEEN: list = []
"""What is done while somebody updates the state, between his reading and his storing."""


@holdfast.tool(name="update_book")
def book(city: str) -> str:
    WORLD.append(city)
    return city


def added(before: list, more: list) -> list:
    if BETWEEN:
        BETWEEN.pop()()
    return before + more


class State(TypedDict, total=False):
    x: Annotated[list, added]


@pytest.fixture(autouse=True)
def _nothing_done():
    WORLD.clear()
    BETWEEN.clear()


def graph_of(node, saver):
    builder = StateGraph(State).add_node("first", lambda state: {"x": [book("first")]}).add_node("second", node)
    builder.add_edge(START, "first").add_edge("first", "second")
    return builder.compile(checkpointer=saver)


@pytest.fixture(params=["plain", "async"])
def update(request):
    def change(graph, values, **options):
        if request.param == "async":
            return asyncio.run(graph.aupdate_state(THREAD, values, **options))
        return graph.update_state(THREAD, values, **options)

    return change


def test_an_update_while_a_run_is_at_work_is_refused_or_waits(store_path, update):
    begun, go = threading.Event(), threading.Event()

    def second(state):
        done = book("second")
        begun.set()
        assert go.wait(GUARD_S)
        return {"x": [done]}

    with HoldfastSaver(store_path) as saver, ThreadPoolExecutor() as pool:
        graph = graph_of(second, saver)
        run = pool.submit(graph.invoke, {"x": []}, THREAD, durability="sync")  # so that what comes next is stored
        assert begun.wait(GUARD_S)
        for as_node in ("second", "first", "__end__"):
            with pytest.raises(AgentBusy, match="at work"):
                update(graph, None if as_node == "__end__" else {"x": ["edited"]}, as_node=as_node)
        assert graph.get_state(THREAD).next == ("second",)
        saver._wait_s = GUARD_S
        waits = pool.submit(update, graph, {"x": ["edited"]}, as_node="second")
        go.set()
        assert run.result(GUARD_S)["x"] == ["first", "second"]
        waits.result(GUARD_S)
        assert graph.get_state(THREAD).values["x"] == ["first", "second", "edited"]
        assert WORLD == ["first", "second"]
        assert saver.store.verify().ok


def test_an_update_of_what_a_run_has_left_behind_meanwhile_is_refused(ours, update):
    graph = graph_of(lambda state: {"x": [book("second")]}, ours)
    graph.invoke({"x": []}, THREAD, interrupt_before=["second"])
    BETWEEN.append(lambda: ThreadPoolExecutor().submit(graph.invoke, None, THREAD).result(GUARD_S))
    with pytest.raises(Fenced, match="gone on"):
        update(graph, {"x": ["edited"]}, as_node="first")
    assert graph.get_state(THREAD).values["x"] == ["first", "second"]
    graph.invoke(None, THREAD)
    assert WORLD == ["first", "second"]
    update(graph, {"x": ["edited"]}, as_node="second")
    assert graph.get_state(THREAD).values["x"] == ["first", "second", "edited"]


def test_who_names_an_older_checkpoint_begins_anew_there(ours, update):
    graph = graph_of(lambda state: {"x": [book("second")]}, ours)
    graph.invoke({"x": []}, THREAD, interrupt_before=["second"])
    older = graph.get_state(THREAD).config
    graph.invoke(None, THREAD)
    graph.update_state(older, {"x": ["instead"]}, as_node="first")
    assert graph.invoke(None, THREAD)["x"] == ["first", "instead", "second"]
    assert WORLD == ["first", "second", "second"]


def test_an_interrupt_between_two_steps_of_a_put_shows_nothing_of_it(ours, monkeypatch):
    """What was about to be saved is not what the thread holds, also for who asks the same saver."""
    at = chain(ours, "t", 3)[-1]
    before = ours.get_tuple(config("t"))

    def interrupted(_thread):
        raise KeyboardInterrupt

    more = checkpoint({"messages": ["other"], "number": 7})
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "_take_writes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.put(at, more, META, more["channel_versions"])
    assert ours.get_tuple(config("t")) == before
    at = ours.put(at, more, META, more["channel_versions"])
    assert ours.get_tuple(config("t")).checkpoint["channel_values"] == more["channel_values"]
    chain(ours, "t", 2, start=at)
