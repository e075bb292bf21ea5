"""Random graphs whose nodes act outside, driven at random: abandoned, cancelled, resumed twice, updated, reopened.

What is done outside is counted by a ledger that the store knows nothing of. A turn that has ended has done each thing
once, whatever happened on the way.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import random
import time
from collections import Counter
from contextlib import closing, suppress
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.errors import EmptyInputError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt

import holdfast
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import Contention, HoldfastError, InDoubt, MaybeRepeated, UnknownAgent
from tests.conftest import SOAK

SESSIONS = 1_000 if SOAK else 6
TURNS = 2
TRIES = 60
RETRY = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=5, retry_on=ConnectionError)
CONFIG: Any = {"configurable": {"thread_id": "t"}}
# Not one with a history of its own: when the graph around it is resumed it goes on from there, and forgets what it was
# given. ``tools_child`` has it.
SUBGRAPHS = {"none": False, "inherits": None, "asks": None}
STEPS = ["tools", "sends", "ask", "beside", *SUBGRAPHS]
LEDGER: Counter[str] = Counter()
CHANCE = random.Random()


def happens(probability: float) -> bool:
    return CHANCE.random() < probability


@holdfast.tool(name="random_book")
def book(what: str) -> str:
    """Book something."""
    if happens(0.2):
        time.sleep(0.001)
    LEDGER[what] += 1
    return f"did {what}"


@holdfast.tool(name="random_abook")
async def abook(what: str) -> str:
    """Book something."""
    if happens(0.3):
        await asyncio.sleep(0.001)
    LEDGER[what] += 1
    return f"did {what}"


def order(what: str) -> str:
    """Order something."""
    done = book(what)
    fail(0.1)
    return done


def fail(probability: float) -> None:
    if happens(probability):
        raise ConnectionError


class State(MessagesState, total=False):
    turn: Any
    log: Annotated[list[str], operator.add]


class Drawn:
    """A graph of some steps, one after another, and what a turn of it does outside."""

    def __init__(self, saver: HoldfastSaver, *, later: bool, seed: int) -> None:
        draw = random.Random(seed)
        self.later = later
        self.builder: Any = StateGraph(State)
        self.last: list[str] = [START]
        self.before: dict[str, str] = {}  # nodes that ask -> the only one before, which leads only there
        self.expected: list[str] = []
        self.kinds = draw.sample(STEPS, draw.randint(3, 6))
        for number, kind in enumerate(self.kinds):
            {"tools": self.tools, "sends": self.sends, "ask": self.ask, "beside": self.beside}.get(
                kind, lambda name, kind=kind: self.subgraph(name, kind)
            )(f"{kind}{number}")
        self.graph = self.builder.compile(checkpointer=saver)
        # LangGraph waits for a checkpoint of a graph that has none where the one around it is "sync".
        self.durabilities = ["async", "exit"] if "none" in self.kinds else ["sync", "async", "exit"]

    def node(self, *parts: str, asks: bool = False, flaky: float = 0.08) -> Any:
        """Books, perhaps asks, and books."""

        async def act(what: str) -> str:
            return await abook(what) if self.later else book(what)

        async def work(state: Any) -> Any:
            done = [await act(f"{part} {state['turn']}{state.get('n', '')}") for part in parts[:1]]
            if asks:
                interrupt("?")
            done += [await act(f"{part} {state['turn']}") for part in parts[1:]]
            fail(flaky)
            return {"log": done}

        def at_once(state: Any) -> Any:
            with closing(work(state)) as steps:
                try:
                    steps.send(None)
                except StopIteration as over:
                    return over.value

        return work if self.later else at_once

    def add(self, name: str, work: Any, *, expects: list[str]) -> None:
        self.builder.add_node(name, work, retry_policy=RETRY)
        self.builder.add_edge(self.last if len(self.last) > 1 else self.last[0], name)
        self.last = [name]
        self.expected += expects

    def tools(self, name: str) -> None:
        def plan(state: Any) -> Any:
            calls = [(f"{name}.{n} {state['turn']}", f"{name}-{state['turn']}-{n}") for n in range(3)]
            asked: Any = [{"name": "order", "args": {"what": what}, "id": id} for what, id in calls]
            return {"messages": [AIMessage("", tool_calls=asked)]}

        self.add(f"{name}-plan", plan, expects=[])
        self.add(name, ToolNode([order], handle_tool_errors=False), expects=[f"{name}.{n} {{}}" for n in range(3)])

    def sends(self, name: str) -> None:
        self.add(f"{name}-start", lambda state: {}, expects=[f"{name} {{}}.{n}" for n in range(3)])
        self.builder.add_node(name, self.node(name), retry_policy=RETRY)
        self.builder.add_conditional_edges(
            f"{name}-start", lambda state: [Send(name, {"turn": state["turn"], "n": f".{n}"}) for n in range(3)], [name]
        )
        self.last = [name]

    def ask(self, name: str) -> None:
        if len(self.last) == 1 and self.last[0] != START:
            self.before[name] = self.last[0]
        self.add(name, self.node(name, f"{name}-then", asks=True), expects=[f"{name} {{}}", f"{name}-then {{}}"])

    def beside(self, name: str) -> None:
        before, both = self.last, [f"{name}-a", f"{name}-b"]
        for one in both:
            self.last = before
            self.add(one, self.node(one), expects=[f"{one} {{}}"])
        self.last = both

    def subgraph(self, name: str, kind: str) -> None:
        inner: Any = StateGraph(State).add_node("one", self.node(f"{name}-1"), retry_policy=RETRY)
        inner.add_node("ask", lambda state: {"log": [interrupt("?")] if kind == "asks" else []})
        inner.add_node("two", self.node(f"{name}-2"), retry_policy=RETRY)
        below = inner.add_edge(START, "one").add_edge("one", "ask").add_edge("ask", "two")
        below = below.compile(checkpointer=SUBGRAPHS[kind])

        async def later(state: Any) -> Any:
            return {"log": (await below.ainvoke({"turn": state["turn"], "messages": []}))["log"][-2:]}

        def at_once(state: Any) -> Any:
            return {"log": below.invoke({"turn": state["turn"], "messages": []})["log"][-2:]}

        self.add(name, later if self.later else at_once, expects=[f"{name}-1 {{}}", f"{name}-2 {{}}"])


class Session:
    """One thread that somebody works with, badly."""

    def __init__(self, path: Any, *, later: bool, seed: int) -> None:
        self.path, self.later, self.seed = path, later, seed
        self.streams: list[Any] = []
        self.open()

    def open(self) -> None:
        self.saver = HoldfastSaver(self.path)
        self.drawn = Drawn(self.saver, later=self.later, seed=self.seed)
        self.graph = self.drawn.graph

    async def let_go(self) -> None:
        for stream in self.streams:
            with suppress(Contention):
                await stream.aclose() if self.later else stream.close()
        self.streams.clear()
        gc.collect()
        await asyncio.sleep(0.01 if self.later else 0)

    async def work(self) -> None:
        tries = turn = 0
        while turn < TURNS:
            tries += 1
            assert tries < TRIES, "it does not come to an end"
            # Somebody who is at work may go on after this: new input, or an update, would then be a turn more.
            quiet = not self.saver._known("t")._users
            state = await self.graph.aget_state(CONFIG) if self.later else self.graph.get_state(CONFIG)
            given: Any = {"turn": turn, "messages": [], "log": []}
            if state.values and state.values.get("turn") == turn:
                if not state.tasks:
                    counts = {what: LEDGER[what.format(turn)] for what in self.drawn.expected}
                    assert all(count == 1 for count in counts.values()), counts
                    turn, tries = turn + 1, 0
                    continue
                given = Command(resume="yes") if state.interrupts else None
                before = self.drawn.before.get(state.next[0]) if len(state.next) == 1 else None
                if before is not None and quiet and happens(0.3):
                    self.graph.update_state(CONFIG, {"log": ["edited"]}, as_node=before)
                    continue
            if isinstance(given, dict) and not quiet:
                await self.let_go()
                continue
            try:
                await self.drive(given)
            except (ConnectionError, MaybeRepeated, InDoubt, EmptyInputError):
                pass  # it is told, and goes on from what is there
            except Contention:
                await self.let_go()
            await self.find_out()
            assert not [what for what, count in LEDGER.items() if count > 1]

    async def drive(self, given: Any) -> None:
        durability = CHANCE.choice(self.drawn.durabilities)
        how = CHANCE.choice(["invoke", "invoke", "abandon", "abandon", "cancel", "twice", "reopen", "read on"])
        if how == "reopen":
            await self.let_go()
            self.saver.close()
            self.open()
        elif how == "read on" and self.streams:
            stream = self.streams.pop()
            _ = [one async for one in stream] if self.later else list(stream)
        elif how == "abandon":
            stream = (self.graph.astream if self.later else self.graph.stream)(given, CONFIG, durability=durability)
            for _ in range(CHANCE.choice([1, 1, 2, 3])):
                await anext(stream, None) if self.later else next(stream, None)
            if happens(0.6):
                self.streams.append(stream)
        elif how == "cancel" and self.later:
            run = asyncio.create_task(self.graph.ainvoke(given, CONFIG, durability=durability))
            await asyncio.sleep(CHANCE.random() * 0.02)
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run
        else:
            # Twice new input would be two turns: one may wait for the other.
            times = 2 if how == "twice" and not isinstance(given, dict) else 1
            runs = [self.run(given, durability) for _ in range(times)]
            for error in await asyncio.gather(*runs, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error

    async def run(self, given: Any, durability: str) -> None:
        if self.later:
            await self.graph.ainvoke(given, CONFIG, durability=durability)
        else:
            await asyncio.to_thread(self.graph.invoke, given, CONFIG, durability=durability)

    async def find_out(self) -> None:
        """Settle what is in doubt, by the ledger."""
        try:
            with closing(self.saver.store.agent("t", readonly=True)) as agent:
                doubts = [effect for effect in agent.effects() if effect.status == "in doubt"]
        except UnknownAgent:
            return
        if doubts:
            await self.let_go()
        for effect in doubts:
            what = effect.args["what"]
            found: Any = {"result": f"did {what}"} if LEDGER[what] else {}
            with suppress(HoldfastError), closing(self.saver.store.agent("t")) as agent:
                agent.resolve(effect, "done" if LEDGER[what] else "not-done", why="the ledger", **found)


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_each_thing_is_done_once_whatever_is_done_to_the_runs(tmp_path, later):
    first = random.randrange(2**32) if SOAK else 20_262
    for seed in range(first, first + SESSIONS // 2):
        LEDGER.clear()
        CHANCE.seed(seed)

        async def main(seed: int = seed) -> None:
            session = Session(tmp_path / f"{seed}", later=later, seed=seed)
            try:
                await asyncio.wait_for(session.work(), 120)
            except BaseException as error:
                error.add_note(f"seed {seed}, {session.drawn.kinds}")
                raise
            finally:
                await session.let_go()
                session.saver.close()

        asyncio.run(main())
