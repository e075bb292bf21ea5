"""A run that nobody waits for any more, and whose nodes are still at work when its thread is resumed."""

from __future__ import annotations

import asyncio
import operator
from contextlib import suppress
from typing import Annotated

import pytest
from langchain_core.messages import AIMessage
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

import holdfast
from holdfast.errors import Fenced

GUARD_S = 180
KINDS = ("node", "ToolNode", "task", None, True, False)
DURABILITIES = ("sync", "async")
THREAD = {"configurable": {"thread_id": "t"}}


class State(MessagesState, total=False):
    log: Annotated[list, operator.add]


class World:
    """Books once it may, and says what was really booked."""

    def __init__(self) -> None:
        self.booked: list[str] = []
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

        @holdfast.tool
        async def slow_booking(city: str) -> str:
            self.booked.append(city)
            self.asked.set()
            await self.may_answer.wait()
            return city

        self.book = slow_booking

    def graph(self, kind: str | bool | None, saver) -> object:
        async def order(city: str) -> str:
            """Order a trip."""
            return await self.book(city)

        async def node(state):
            return {"log": [await order("Lisbon")]}

        if kind == "task":

            @entrypoint(checkpointer=saver)
            async def flow(given):
                return {"log": [await task(order)("Lisbon")]}

            return flow

        async def plan(state):
            return {"messages": [AIMessage("", tool_calls=[{"name": "order", "args": {"city": "Lisbon"}, "id": "1"}])]}

        builder = StateGraph(State).add_node("plan", plan).add_edge(START, "plan").add_edge("plan", "act")
        act = node if kind == "node" else ToolNode([order])
        if kind not in ("node", "ToolNode"):
            below = StateGraph(State).add_node("inner", node).add_edge(START, "inner").compile(checkpointer=kind)

            async def act(state):
                return {"log": (await below.ainvoke({"log": [], "messages": []}))["log"]}

        return builder.add_node("act", act).compile(checkpointer=saver)


@pytest.mark.parametrize(
    ("kind", "durability"),
    # LangGraph waits for a checkpoint of a graph that has none where the one around it is "sync".
    [(kind, durability) for kind in KINDS for durability in DURABILITIES if (kind, durability) != (False, "sync")],
)
def test_the_call_that_an_abandoned_run_is_making_is_waited_for_by_the_resume_and_not_made(ours, kind, durability):
    async def main() -> None:
        world = World()
        graph = world.graph(kind, ours)
        first = asyncio.create_task(graph.ainvoke({"log": [], "messages": []}, THREAD, durability=durability))
        await world.asked.wait()
        resume = asyncio.create_task(graph.ainvoke(None, THREAD, durability=durability))
        while "t" not in ours._threads or not ours._threads["t"].holder.resumes:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        for _ in range(50):  # turns in which it would make the call
            await asyncio.sleep(0)
        world.may_answer.set()
        assert "Lisbon" in str(await resume)
        with suppress(Fenced):  # or it was told that another run has resumed its thread
            await first
        assert world.booked == ["Lisbon"]
        await graph.ainvoke({"log": [], "messages": []}, THREAD, durability=durability)
        assert world.booked == ["Lisbon", "Lisbon"]  # another message, another trip

    asyncio.run(asyncio.wait_for(main(), GUARD_S))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not False])
def test_a_call_that_is_cut_off_with_its_run_is_in_doubt_and_its_node_is_named(ours, kind):
    async def main() -> None:
        world = World()
        graph = world.graph(kind, ours)
        first = asyncio.create_task(graph.ainvoke({"log": [], "messages": []}, THREAD, durability="sync"))
        await world.asked.wait()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        world.may_answer.set()
        place = {"task": "flow > order", None: "act > inner", True: "act > inner"}.get(kind, "act")
        with pytest.raises(holdfast.InDoubt, match=f"slow_booking in the node {place} "):
            await graph.ainvoke(None, THREAD)
        assert world.booked == ["Lisbon"]

    asyncio.run(asyncio.wait_for(main(), GUARD_S))
