"""Tools in a graph's nodes: each call is recorded on the thread's line, and what was done is not done again."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import operator
import re
import shlex
import sys
import threading
from contextlib import closing
from typing import Annotated, Any, TypedDict

import psycopg
import pytest
from langchain_core.messages import AIMessage
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send, interrupt

import holdfast
from holdfast.agent.branch import BranchWriter
from holdfast.cli import main
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import InDoubt, MaybeRepeated, NoAgent, ToolFailed
from tests.lives import PATIENCE_S as HANG_S
from tests.lives import die, dies

WORLD: list[str] = []
"""What really happened."""

RETRY = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ConnectionError)


def cancel(effect):
    WORLD.append(f"cancel {effect.args['city']}")


@holdfast.tool(name="node_book", compensate=cancel)
def book(city: str) -> str:
    """Book a trip."""
    WORLD.append(city)
    return f"{city} {len(WORLD)}"


@holdfast.tool(name="node_pay")
def pay(city: str) -> str:
    """Pay for a trip."""
    WORLD.append(f"pay {city}")
    return city


@holdfast.tool(name="node_abook")
async def abook(city: str) -> str:
    """Book a trip."""
    await asyncio.sleep(0)
    WORLD.append(city)
    return city


@holdfast.tool(name="node_look", effect="read")
def look(city: str) -> int:
    """Look at the weather."""
    WORLD.append(f"look {city}")
    return len(WORLD)


@holdfast.tool(name="node_breaks")
def breaks(city: str) -> str:
    """Nobody knows what became of it."""
    WORLD.append(city)
    raise TimeoutError(city)


class State(TypedDict, total=False):
    x: Annotated[list, operator.add]


@pytest.fixture(autouse=True)
def _nothing_done():
    WORLD.clear()


@pytest.fixture(params=["sync", "async", "exit"])
def durability(request):
    return request.param


def one_node(function, saver, **options):
    builder = StateGraph(State).add_node("node", function, **options)
    return builder.add_edge(START, "node").compile(checkpointer=saver)


def thread(name="t"):
    return {"configurable": {"thread_id": name}}


def listed(saver, name="t"):
    with closing(saver.store.agent(name, readonly=True)) as agent:
        calls = [one for one in agent.effects() if "city" in one.args]  # compensations are listed, too
        return [(one.tool, one.args["city"], one.status) for one in calls]


def failing():
    """Raises once."""
    left = [ConnectionError]

    def fail():
        if left:
            raise left.pop()

    return fail


# -- executed again -----------------------------------------------------------------------------------------------


def booking(city: str) -> str:
    """Book a trip."""
    return book(city)


def test_the_calls_of_a_tool_node_that_is_tried_again_are_made_once_in_whatever_order(ours):
    fail, started = failing(), threading.Barrier(6)

    def flaky(city: str) -> str:
        """Book a trip."""
        if city == "D":
            try:
                return book(city) if not fail() else ""
            finally:
                started.wait(HANG_S)
        done = book(city)
        if started.n_waiting < 6 and not started.broken:
            started.wait(HANG_S)
        return done

    def model(state):
        calls = [{"name": "flaky", "args": {"city": city}, "id": f"c{n}"} for n, city in enumerate("ABCDAB")]
        return {"messages": [AIMessage("", tool_calls=calls)]}

    builder = StateGraph(MessagesState).add_node("model", model)
    builder.add_node("tools", ToolNode([flaky], handle_tool_errors=False), retry_policy=RETRY)
    graph = builder.add_edge(START, "model").add_edge("model", "tools").compile(checkpointer=ours)
    told = graph.invoke({"messages": []}, thread())["messages"][1:]
    assert sorted(WORLD) == ["A", "A", "B", "B", "C", "D"]
    assert len({message.content for message in told}) == 6  # each call has its own result
    assert sorted(listed(ours)) == sorted(("node_book", city, "done") for city in "ABCDAB")


@holdfast.tool(name="node_transaction", effect="transaction")
def paid(city: str) -> int:
    """Pay, in the transaction of the record."""
    connection = holdfast.effect().connection
    connection.execute("INSERT INTO paid VALUES (%s)", (city,))
    return connection.execute("SELECT count(*) FROM paid").fetchone()[0]


def test_a_transaction_in_a_node_is_committed_once(postgres_url, monkeypatch):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # the tests' server does not flush
    fail, fail_later = failing(), failing()

    def node(state):
        first = paid("Lisbon")
        fail()
        second = paid("Porto")
        fail_later()
        return {"x": [str(first), str(second)]}

    with psycopg.connect(postgres_url, autocommit=True) as session, HoldfastSaver(postgres_url) as saver:
        session.execute("CREATE TABLE paid (city text)")
        graph = one_node(node, saver, retry_policy=RETRY)
        assert graph.invoke({"x": []}, thread())["x"] == ["1", "2"]
        assert [city for (city,) in session.execute("SELECT city FROM paid")] == ["Lisbon", "Porto"]
        assert listed(saver) == [("node_transaction", city, "done") for city in ("Lisbon", "Porto")]


@pytest.mark.parametrize("meanwhile", ["nothing", "an update", "new input"])
def test_what_was_done_before_an_interrupt_is_not_done_again(ours, durability, meanwhile):
    def node(state):
        first = book("Lisbon")
        answer = interrupt("ok?")
        pay("Lisbon")
        return {"x": [first, answer]}

    graph = one_node(node, ours)
    graph.invoke({"x": []}, thread(), durability=durability)
    if meanwhile == "an update":
        graph.update_state(thread(), {"x": ["edit"]})
    elif meanwhile == "new input":
        graph.invoke({"x": []}, thread(), durability=durability)
    assert graph.invoke(Command(resume=1), thread(), durability=durability)["x"][-2:] == ["Lisbon 1", 1]
    assert WORLD == ["Lisbon", "pay Lisbon"]


def test_a_call_that_another_task_makes_again_is_left_by_that_one(ours, durability):
    fail = failing()

    @holdfast.tool(effect="idempotent")
    def order(city: str) -> str:
        """Order a trip; the same key is the same order."""
        fail()
        WORLD.append(city)
        return city

    graph = one_node(lambda state: {"x": [order("Lisbon"), interrupt("?")]}, ours)
    with pytest.raises(ToolFailed):
        graph.invoke({"x": []}, thread(), durability=durability)
    graph.invoke({"x": []}, thread(), durability=durability)
    graph.invoke(Command(resume=1), thread(), durability=durability)
    assert WORLD == ["Lisbon"]


def test_a_node_that_is_tried_again_with_other_arguments_is_stopped(ours, durability):
    cities, fail = iter("XYZ"), failing()

    def node(state):
        book(next(cities))
        fail()
        return {}

    graph = one_node(node, ours, retry_policy=RETRY)
    with pytest.raises(MaybeRepeated, match=r"city='X'\), now with \(city='Y'\)") as caught:
        graph.invoke({"x": []}, thread(), durability=durability)
    assert WORLD == ["X"]
    assert "saver.accept('t')" in caught.value.hint
    assert "holdfast effects accept t" in caught.value.hint


def test_steps_of_one_run_use_a_tool_with_whatever_arguments(ours, durability):
    builder = StateGraph(State)
    for number in range(4):
        builder.add_node(f"n{number}", lambda state, number=number: {"x": [book(f"{number}")]})
        builder.add_edge(f"n{number - 1}" if number else START, f"n{number}")
    graph = builder.compile(checkpointer=ours)
    for _ in range(2):
        graph.invoke({"x": []}, thread(), durability=durability)
    assert WORLD == ["0", "1", "2", "3"] * 2


def test_sends_and_nodes_of_one_step_do_not_stand_in_each_others_way(ours, durability):
    fail = failing()

    def work(state):
        done = book(f"{state['n']}")
        if state["n"] == 0:
            fail()
        return {"x": [done]}

    builder = StateGraph(State).add_node("work", work).add_node("start", lambda state: {})
    builder.add_edge(START, "start")
    builder.add_conditional_edges("start", lambda state: [Send("work", {"n": n}) for n in range(4)], ["work"])
    graph = builder.compile(checkpointer=ours)
    with pytest.raises(ConnectionError):
        graph.invoke({"x": []}, thread(), durability=durability)
    graph.invoke(None, thread(), durability=durability)
    assert sorted(WORLD) == ["0", "1", "2", "3"]


def test_the_functional_api(ours):
    fail = failing()

    @task
    def one(city):
        return book(city)

    @entrypoint(checkpointer=ours)
    def flow(given):
        pay("all")
        done = [one(city) for city in "AB"]
        done = [future.result() for future in done]
        fail()
        return done

    with pytest.raises(ConnectionError):
        flow.invoke(1, thread(), durability="sync")
    flow.invoke(None, thread(), durability="sync")
    assert sorted(WORLD) == ["A", "B", "pay all"]


@pytest.mark.parametrize("kind", [None, True, False])
def test_a_subgraph_of_each_kind_in_a_node_that_is_tried_again(ours, kind):
    below = StateGraph(State).add_node("inner", lambda state: {"x": [book("n")]}).add_edge(START, "inner")
    graph_below, fail = below.compile(checkpointer=kind), failing()

    def outer(state):
        graph_below.invoke({"x": []})
        fail()
        return {}

    one_node(outer, ours, retry_policy=RETRY).invoke({"x": []}, thread())
    assert WORLD == ["n"]


@pytest.mark.parametrize("kind", [None, False])
def test_a_subgraph_that_a_node_uses_twice_acts_twice(ours, kind):
    below = StateGraph(State).add_node("inner", lambda state: {"x": [book("n")]}).add_edge(START, "inner")
    graph_below = below.compile(checkpointer=kind)

    def outer(state):
        for _ in range(2):
            graph_below.invoke({"x": []})
        return {}

    one_node(outer, ours).invoke({"x": []}, thread())
    assert WORLD == ["n", "n"]


@pytest.mark.parametrize("how", ["answer", "new input", "update", "named", "answer where named"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_done_beside_a_node_that_asked_is_not_done_again(store_path, durability, how, restarted):
    """LangGraph forgets what finished nodes of the step wrote, unless the thread goes on right there."""

    def build(saver):
        builder = StateGraph(State).add_node("one", lambda state: {"x": [book("A")]})
        builder.add_node("two", lambda state: {"x": [interrupt("?")]}).add_node(
            "last", lambda state: {"x": [book("B")]}
        )
        builder.add_edge(START, "one").add_edge(START, "two").add_edge(["one", "two"], "last")
        return builder.compile(checkpointer=saver)

    saver = HoldfastSaver(store_path)
    try:
        graph = build(saver)
        graph.invoke({"x": []}, thread(), durability=durability)
        if restarted:
            saver.close()
            saver = HoldfastSaver(store_path)
            graph = build(saver)
        at = graph.get_state(thread()).config
        if how == "new input":
            graph.invoke({"x": []}, thread(), durability=durability)
        elif how == "update":
            graph.update_state(thread(), {"x": ["edit"]}, as_node=START)
        elif how == "named":
            graph.invoke(None, at, durability=durability)
        goes_on = at if how == "answer where named" else thread()
        found = graph.invoke(Command(resume=1), goes_on, durability=durability)
        assert [one for one in found["x"] if one != "edit"] == ["A 1", 1, "B 2"]
        assert WORLD == ["A", "B"]
        graph.invoke({"x": []}, thread(), durability=durability)
        assert WORLD == ["A", "B", "A"]
    finally:
        saver.close()


@pytest.mark.parametrize("kind", [None, True, False])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_subgraph_that_asked_goes_on_under_every_durability(store_path, durability, kind, restarted):
    """Also where it stores nothing before it asks, and another process brings the answer."""
    if kind is False and durability == "sync":
        durability = "async"  # LangGraph waits for a checkpoint of a graph that has none

    def build(saver):
        below = StateGraph(State).add_node("one", lambda state: {"x": [book("A")]})
        below.add_node("two", lambda state: {"x": [interrupt("?")]}).add_node("three", lambda state: {"x": [book("B")]})
        below.add_edge(START, "one").add_edge("one", "two").add_edge("two", "three")
        builder = StateGraph(State).add_node("outer", below.compile(checkpointer=kind)).add_edge(START, "outer")
        builder.add_node("last", lambda state: {"x": [book("C")]})
        return builder.add_edge("outer", "last").compile(checkpointer=saver)

    for _ in range(2):
        with HoldfastSaver(store_path) as saver:
            graph = build(saver)
            graph.invoke({"x": []}, thread(), durability=durability)
            if not restarted:
                graph.invoke(Command(resume=1), thread(), durability=durability)
        if restarted:
            with HoldfastSaver(store_path) as saver:
                build(saver).invoke(Command(resume=1), thread(), durability=durability)
    assert WORLD == ["A", "B", "C"] * 2


def test_what_a_subgraph_did_before_a_checkpoint_that_was_never_stored_is_not_done_again(ours, monkeypatch):
    below = StateGraph(State).add_node("one", lambda state: {"x": [book("A")]})
    below.add_node("two", lambda state: {"x": [interrupt("?")]}).add_edge(START, "one").add_edge("one", "two")
    graph = one_node(below.compile(), ours)
    put = ours.put

    def fails(config, *given):
        if config["configurable"]["checkpoint_ns"]:
            monkeypatch.setattr(BranchWriter, "finish", lost)
        return put(config, *given)

    def lost(*_given):
        monkeypatch.undo()
        raise OSError("the disk is gone")

    ours.put = fails
    graph.invoke({"x": []}, thread(), durability="exit")  # LangGraph says nothing where a graph that asks is not stored
    ours.put = put
    graph.invoke(Command(resume=1), thread(), durability="exit")
    assert WORLD == ["A"]


# -- async --------------------------------------------------------------------------------------------------------


def test_async_nodes(ours, durability):
    async def node(state):
        done = await asyncio.gather(abook("A"), abook("B"))
        interrupt("?")
        return {"x": done}

    async def main():
        graph = one_node(node, ours)
        await graph.ainvoke({"x": []}, thread(), durability=durability)
        return await graph.ainvoke(Command(resume=1), thread(), durability=durability)

    assert asyncio.run(main())["x"] == ["A", "B"]
    assert sorted(WORLD) == ["A", "B"]


def test_a_call_that_an_earlier_attempt_has_under_way_is_waited_for(ours):
    fail = failing()
    begun: Any = None
    gate: Any = None

    @holdfast.tool
    async def slow(city: str) -> str:
        """Takes its time."""
        WORLD.append(city)
        begun.set()
        await gate.wait()
        return city

    async def node(state):
        calls = asyncio.gather(slow("A"), other())
        return {"x": [(await calls)[0]]}

    async def other():
        await begun.wait()
        fail()
        gate.set()

    async def main():
        nonlocal begun, gate
        begun, gate = asyncio.Event(), asyncio.Event()
        return await one_node(node, ours, retry_policy=RETRY).ainvoke({"x": []}, thread())

    assert asyncio.run(main())["x"] == ["A"]
    assert WORLD == ["A"]


@pytest.mark.parametrize("kind", [None, False])
def test_an_async_subgraph_in_a_node_that_is_tried_again(ours, kind):
    async def inside(state):
        return {"x": [await abook("n")]}

    below = StateGraph(State).add_node("inner", inside).add_edge(START, "inner").compile(checkpointer=kind)
    fail = failing()

    async def outer(state):
        await below.ainvoke({"x": []})
        fail()
        return {}

    asyncio.run(one_node(outer, ours, retry_policy=RETRY).ainvoke({"x": []}, thread()))
    assert WORLD == ["n"]


def test_a_call_that_outlives_its_run_keeps_the_thread(store_path):
    """Another process must not conclude that nobody is at it any more."""
    begun, gate, over = threading.Event(), threading.Event(), threading.Event()

    @holdfast.tool
    def slow(city: str) -> str:
        """Takes its time."""
        WORLD.append(city)
        begun.set()
        assert gate.wait(HANG_S)
        return city

    def node(state):
        def call():
            slow("A")
            over.set()

        threading.Thread(target=contextvars.copy_context().run, args=(call,)).start()
        assert begun.wait(HANG_S)
        raise ConnectionError

    with HoldfastSaver(store_path) as saver:
        with pytest.raises(ConnectionError):
            one_node(node, saver).invoke({"x": []}, thread())
        assert saver._threads["t"].held
        gate.set()
        assert over.wait(HANG_S)
        graph = one_node(lambda state: {"x": [slow("A")]}, saver)
        assert graph.invoke(None, thread())["x"] == ["A"]
    assert WORLD == ["A"]


def test_a_call_costs_the_same_however_many_a_node_has_made(ours):
    """Counted in functions called, which does not depend on the machine."""
    costs: list[int] = []

    def node(state):
        for number in range(150):
            called = 0

            def count(_frame, event, _given):
                nonlocal called
                called += event == "call"

            sys.setprofile(count)
            try:
                book(f"{number}")
            finally:
                sys.setprofile(None)
            costs.append(called)
        return {"x": [interrupt("?")]}

    graph = one_node(node, ours)
    graph.invoke({"x": []}, thread())
    graph.invoke(Command(resume=1), thread())
    made, answered = costs[5:150], costs[155:]
    for some in (made, answered):
        assert sorted(some[-20:])[10] < 1.3 * sorted(some[:20])[10]
    assert max(answered) < min(made)
    assert len(WORLD) == 150


# -- reads --------------------------------------------------------------------------------------------------------


def test_reads_of_a_node_that_was_interrupted_are_answered(ours):
    def node(state):
        return {"x": [look("A"), interrupt("?")]}

    graph = one_node(node, ours)
    graph.invoke({"x": []}, thread())
    assert graph.invoke(Command(resume=1), thread())["x"] == [1, 1]
    assert WORLD == ["look A"]


@pytest.mark.parametrize("again", ["retry", "resume"])
def test_after_an_exception_reads_are_made_again_and_writes_are_answered(ours, again):
    fail = failing()

    def node(state):
        found = [look("A"), book("A")]
        fail()
        return {"x": found}

    graph = one_node(node, ours, **({"retry_policy": RETRY} if again == "retry" else {}))
    if again == "retry":
        found = graph.invoke({"x": []}, thread())
    else:
        with pytest.raises(ConnectionError):
            graph.invoke({"x": []}, thread())
        found = graph.invoke(None, thread())
    assert found["x"] == [3, "A 2"]
    assert WORLD == ["look A", "A", "look A"]


# -- settling -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck(ours):
    """A graph that left a booking behind, and wants another one now."""
    cities = iter(["Lisbon", "Porto", "Porto", "Porto"])

    def node(state):
        book(next(cities))
        return {"x": [interrupt("?")] if WORLD == ["Lisbon"] else ["done"]}

    graph = one_node(node, ours)
    graph.invoke({"x": []}, thread())
    with pytest.raises(MaybeRepeated):
        graph.invoke({"x": []}, thread())
    return graph


def test_what_is_accepted_is_accepted_by_the_next_saver_too(store_path):
    with HoldfastSaver(store_path) as saver:
        one_node(lambda state: {"x": [book("Lisbon"), interrupt("?")]}, saver).invoke({"x": []}, thread())
    with HoldfastSaver(store_path) as saver:
        graph = one_node(lambda state: {"x": [book("Porto")]}, saver)
        with pytest.raises(MaybeRepeated):
            graph.invoke({"x": []}, thread())
        assert [effect.args for effect in saver.accept("t")] == [{"city": "Lisbon"}]
    with HoldfastSaver(store_path) as saver:
        one_node(lambda state: {"x": [book("Porto")]}, saver).invoke({"x": []}, thread())
    assert WORLD == ["Lisbon", "Porto"]


@pytest.mark.parametrize(("values", "node"), [({"x": ["by hand"]}, "node"), (None, "__end__")])
@pytest.mark.parametrize("later", [False, True])
def test_updating_the_state_as_the_node_or_the_end_settles_what_it_left(stuck, values, node, later):
    if later:
        asyncio.run(stuck.aupdate_state(thread(), values, as_node=node))
    else:
        stuck.update_state(thread(), values, as_node=node)
    assert stuck.invoke({"x": []}, thread())["x"] == [*(values or {"x": []})["x"], "done"]
    assert WORLD == ["Lisbon", "Porto"]


def test_updating_it_as_another_node_does_not(ours):
    builder = StateGraph(State).add_node("first", lambda state: {})
    builder.add_node("node", lambda state: {"x": [book("Lisbon"), interrupt("?")]})
    graph = builder.add_edge(START, "first").add_edge("first", "node").compile(checkpointer=ours)
    graph.invoke({"x": []}, thread())
    graph.update_state(thread(), {"x": ["edit"]}, as_node="first")
    graph.invoke(Command(resume="yes"), thread())
    assert WORLD == ["Lisbon"]


def test_a_saver_may_accept_with_each_new_input(store_path):
    def node(state):
        return {"x": [book(f"{len(WORLD)}"), interrupt("?")]}

    with HoldfastSaver(store_path, left="accept") as saver:
        graph = one_node(node, saver)
        for _ in range(3):
            graph.invoke({"x": []}, thread())
    assert WORLD == ["0", "1", "2"]


def test_a_run_from_an_older_checkpoint_acts_anew_and_says_so(ours, caplog):
    graph = one_node(lambda state: {"x": [book("Lisbon")]}, ours)
    graph.invoke({"x": []}, thread())
    older = list(graph.get_state_history(thread()))[1].config
    with caplog.at_level(logging.WARNING, "holdfast.langgraph"):
        graph.invoke(None, older)
    assert WORLD == ["Lisbon", "Lisbon"]
    assert "acts anew" in caplog.text
    assert [status for *_, status in listed(ours)] == ["done", "done"]


def test_the_commands_that_errors_name_can_be_typed_also_for_a_thread_with_spaces_in_its_name(store_path, capsys):
    name = "Ann's trip; to Lisbon"

    def named_in(error):
        found = re.search(r"holdfast (effects \w+ .+?)(?: --done|\.$)", error.value.hint)
        return ["--store", str(store_path), *shlex.split(found[1])]

    with HoldfastSaver(store_path) as saver:
        one_node(lambda state: {"x": [book("Lisbon"), interrupt("?")]}, saver).invoke({"x": []}, thread(name))
        with pytest.raises(MaybeRepeated) as repeated:
            one_node(lambda state: {"x": [book("Porto")]}, saver).invoke({"x": []}, thread(name))
    assert main(["--store", str(store_path), "effects", name]) == 0
    assert "node_book(city='Lisbon')" in capsys.readouterr().out
    for said in ("1 effect accepted", "Nothing is left over"):
        assert main(named_in(repeated)) == 0
        assert said in capsys.readouterr().out
    with HoldfastSaver(store_path) as saver, pytest.raises(InDoubt) as doubted:
        one_node(lambda state: {"x": [breaks("Lisbon")]}, saver).invoke({"x": []}, thread(name))
    assert main([*named_in(doubted), "--not-done", "--why", "looked"]) == 0


# -- copied -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["the saver", "a person"])
def copied(request):
    def copy(saver):
        return saver.copy_thread("t", "copy") if request.param == "the saver" else saver.store.copy("t", "copy")

    return copy


@pytest.mark.parametrize("first", ["t", "copy"])
def test_a_copy_is_answered_what_the_original_did_in_a_node_that_did_not_finish(ours, durability, first, copied):
    def node(state):
        return {"x": [book("Lisbon"), interrupt("?"), pay("Lisbon")]}

    graph = one_node(node, ours)
    graph.invoke({"x": []}, thread(), durability=durability)
    copied(ours)
    for name in (first, {"t": "copy", "copy": "t"}[first]):
        assert graph.invoke(Command(resume=1), thread(name), durability=durability)["x"][0] == "Lisbon 1"
    assert WORLD == ["Lisbon", "pay Lisbon", "pay Lisbon"]  # each goes on for itself
    assert [tool for tool, *_ in listed(ours, "copy")] == ["node_book", "node_pay"]


def test_a_copy_is_stopped_by_it_and_settles_it_for_itself(ours, durability, copied):
    cities = iter(["Lisbon", "Porto", "Porto", "Porto"])
    graph = one_node(lambda state: {"x": [book(next(cities)), interrupt("?")]}, ours)
    graph.invoke({"x": []}, thread(), durability=durability)
    copied(ours)
    with pytest.raises(MaybeRepeated):
        graph.invoke({"x": []}, thread("copy"), durability=durability)
    assert len(ours.accept("copy")) == 1
    graph.invoke({"x": []}, thread("copy"), durability=durability)
    with pytest.raises(MaybeRepeated):
        graph.invoke({"x": []}, thread("t"), durability=durability)
    assert WORLD == ["Lisbon", "Porto"]


def test_a_copy_does_not_know_either_what_is_in_doubt(ours, durability, copied):
    graph = one_node(lambda state: {"x": [breaks("A")]}, ours)
    with pytest.raises(InDoubt):
        graph.invoke({"x": []}, thread(), durability=durability)
    copied(ours)
    for name in ("copy", "t"):
        with pytest.raises(InDoubt):
            graph.invoke({"x": []}, thread(name), durability=durability)
    assert WORLD == ["A"]


# -- in doubt -----------------------------------------------------------------------------------------------------


def test_an_effect_in_doubt_stops_every_later_write_of_the_thread(ours):
    def model(state):
        return {"messages": [AIMessage("", tool_calls=[{"name": "breaks", "args": {"city": "A"}, "id": "1"}])]}

    def after(state):
        with pytest.raises(InDoubt):
            book("B")
        return {}

    builder = StateGraph(MessagesState).add_node("model", model).add_node("after", after)
    builder.add_node("tools", ToolNode([breaks], handle_tool_errors=True))
    graph = builder.add_edge(START, "model").add_edge("model", "tools").add_edge("tools", "after")
    graph.compile(checkpointer=ours).invoke({"messages": []}, thread())
    assert WORLD == ["A"]
    with closing(ours.store.agent("t")) as agent:
        (effect,) = [one for one in agent.effects() if one.status == "in doubt"]
        agent.resolve(effect, "not-done", why="looked")
    one_node(lambda state: {"x": [book("B")]}, ours).invoke({"x": []}, thread("t"))
    assert WORLD == ["A", "B"]


def test_a_tool_that_asks_a_person_before_it_acts_is_not_in_doubt(ours):
    @holdfast.tool
    def ask_and_book(city: str) -> str:
        """Book a trip, if a person agrees."""
        if interrupt(f"{city}?") == "yes":
            WORLD.append(city)
        return city

    graph = one_node(lambda state: {"x": [ask_and_book("A")]}, ours)
    assert graph.invoke({"x": []}, thread())["__interrupt__"][0].value == "A?"
    assert graph.invoke(Command(resume="yes"), thread())["x"] == ["A"]
    assert WORLD == ["A"]


# -- whose calls ----------------------------------------------------------------------------------------------------


def test_a_write_in_a_thread_that_does_not_know_its_graph_is_refused(ours):
    def node(state):
        caught = []

        def work():
            try:
                book("A")
            except NoAgent as error:
                caught.append(error)

        other = threading.Thread(target=work)
        other.start()
        other.join()
        return {"x": [len(caught)]}

    assert one_node(node, ours).invoke({"x": []}, thread())["x"] == [1]
    book("B")  # no run is active any more
    assert WORLD == ["B"]


def test_a_graph_with_another_saver_is_not_recorded(ours):
    from langgraph.checkpoint.memory import InMemorySaver

    one_node(lambda state: {"x": [book("A")]}, InMemorySaver()).invoke({"x": []}, thread())
    assert WORLD == ["A"]
    assert ours.store.agents() == []


def test_a_thread_whose_nodes_acted_before_it_had_a_checkpoint_can_be_deleted(ours):
    def node(state):
        book("A")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one_node(node, ours).invoke({"x": []}, thread(), durability="exit")
    ours.delete_thread("t")
    assert ours.store.agents() == []


def test_a_thread_without_tools_has_no_records(ours):
    graph = one_node(lambda state: {"x": [interrupt("?")]}, ours)
    graph.invoke({"x": []}, thread())
    graph.invoke(Command(resume=1), thread())
    assert listed(ours) == []


# -- killed ---------------------------------------------------------------------------------------------------------


def life(folder, how="", durability="async"):
    """A process that books, and is killed inside of that, after it, or not at all; what its graph ends with."""
    ledger = folder / "ledger"

    @holdfast.tool(name="node_killed")
    def note(city: str) -> str:
        """Book a trip."""
        with ledger.open("a") as file:
            file.write(f"{city}\n")
        return die() if how == "inside" else city

    def node(state):
        done = note("Lisbon")
        return die() if how == "after" else {"x": [done]}

    def live():
        with HoldfastSaver(folder / "store") as saver:
            graph = one_node(node, saver)
            given = None if graph.get_state(thread()).next else {"x": []}
            return graph.invoke(given, thread(), durability=durability)["x"]

    return live


def test_a_process_that_is_killed_after_a_call_does_not_make_it_again(tmp_path, durability):
    assert dies(life(tmp_path, "after", durability), 0)
    assert life(tmp_path, durability=durability)() == ["Lisbon"]
    assert (tmp_path / "ledger").read_text() == "Lisbon\n"


def test_a_process_that_is_killed_inside_a_call_is_in_doubt_until_somebody_finds_out(tmp_path):
    assert dies(life(tmp_path, "inside"), 0)
    with pytest.raises(InDoubt):
        life(tmp_path)()
    with holdfast.open(tmp_path / "store") as store, closing(store.agent("t")) as agent:
        (effect,) = agent.effects()
        agent.resolve(effect, "done", result="Lisbon", why="the ledger has it")
    assert life(tmp_path)() == ["Lisbon"]
    assert (tmp_path / "ledger").read_text() == "Lisbon\n"


# -- rolled back ----------------------------------------------------------------------------------------------------


def three(saver):
    builder = StateGraph(State)
    for name, above in (("one", START), ("two", "one"), ("three", "two")):
        builder.add_node(name, lambda state, name=name: {"x": [book(name)]}).add_edge(above, name)
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_rollback_undoes_what_came_after_its_checkpoint_and_the_graph_acts_again(ours, durability):
    graph = three(ours)
    graph.invoke({"x": []}, thread(), durability=durability)
    with closing(ours.store.agent("t")) as agent:
        first = next(point for point in agent.log() if point.label == "step 1: one")
        agent.rollback(first)
    assert WORLD == ["one", "two", "three", "cancel three", "cancel two"]
    assert graph.get_state(thread()).next == ("two",)
    graph.invoke(None, thread(), durability=durability)
    assert WORLD[5:] == ["two", "three"]
    assert listed(ours) == [
        ("node_book", "one", "done"), ("node_book", "two", "undone"), ("node_book", "three", "undone"),
        ("node_book", "two", "done"), ("node_book", "three", "done"),
    ]  # fmt: skip
    with closing(ours.store.agent("t", readonly=True)) as agent:
        assert len({effect.key for effect in agent.effects() if "city" in effect.args}) == 5


def test_what_a_node_did_before_it_was_stored_that_it_runs_is_undone_with_it(ours):
    """Under ``async`` a checkpoint may be stored after the nodes that follow from it have acted."""
    acted = threading.Event()
    put = ours.put

    def late(config, checkpoint, metadata, new_versions):
        if metadata["source"] == "loop" and metadata["step"] == 1:
            assert acted.wait(HANG_S)
        return put(config, checkpoint, metadata, new_versions)

    ours.put = late
    builder = StateGraph(State).add_node("one", lambda state: {"x": [book("one")]})

    def two(state):
        book("two")
        acted.set()
        return {"x": [interrupt("?")]}

    graph = builder.add_node("two", two).add_edge(START, "one").add_edge("one", "two").compile(checkpointer=ours)
    graph.invoke({"x": []}, thread(), durability="async")
    graph.invoke(Command(resume=1), thread(), durability="async")
    assert WORLD == ["one", "two"]
    with closing(ours.store.agent("t")) as agent:
        first = next(point for point in agent.log() if point.label == "step 1: one")
        assert [one.effect.args["city"] for one in agent.plan_rollback(first).undo] == ["two"]
        agent.rollback(first)
    assert WORLD == ["one", "two", "cancel two"]
    graph.invoke(None, thread())
    assert WORLD[3:] == ["two"]


@pytest.mark.parametrize("kind", [None, True])
def test_a_rollback_leaves_behind_what_a_subgraph_has_stored(ours, kind):
    below = StateGraph(State).add_node("inner", lambda state: {"x": [book("inside")]}).add_edge(START, "inner")
    builder = StateGraph(State).add_node("first", lambda state: {}).add_node("outer", below.compile(checkpointer=kind))
    graph = builder.add_edge(START, "first").add_edge("first", "outer").compile(checkpointer=ours)
    graph.invoke({"x": []}, thread(), durability="sync")
    with closing(ours.store.agent("t")) as agent:
        agent.rollback(next(point for point in agent.log() if point.label == "step 1: first"))
    assert graph.get_state(thread()).next == ("outer",)
    graph.invoke(None, thread(), durability="sync")
    assert WORLD == ["inside", "cancel inside", "inside"]
    assert [message for message in graph.get_state(thread()).values["x"] if message == "inside 1"] == []


def test_what_an_abandoned_checkpoint_holds_is_read_as_it_was(ours):
    graph = three(ours)
    graph.invoke({"x": []}, thread())
    before = [state.values for state in graph.get_state_history(thread())]
    with closing(ours.store.agent("t")) as agent:
        agent.rollback(next(point for point in agent.log() if point.label == "step 1: one"))
    assert [state.values for state in graph.get_state_history(thread())] == before


def test_two_tools_that_ask_first_are_each_done_once(store_path, durability):
    @holdfast.tool(name="node_transfer")
    def transfer(city: str) -> str:
        """Transfer money."""
        interrupt(f"transfer to {city}?")
        WORLD.append(city)
        return "sent"

    def model(_state):
        calls = [{"name": "transfer", "args": {"city": name}, "id": f"call+{name}"} for name in ("ann", "bob")]
        return {"messages": [AIMessage("", tool_calls=calls)]}

    with HoldfastSaver(store_path) as saver:
        builder = StateGraph(MessagesState).add_node("model", model).add_node("tools", ToolNode([transfer]))
        graph = builder.add_edge(START, "model").add_edge("model", "tools").compile(checkpointer=saver)
        found = graph.invoke({"messages": []}, thread(), durability=durability)
        while "__interrupt__" in found:
            answer = Command(resume={found["__interrupt__"][0].id: "yes"})
            found = graph.invoke(answer, thread(), durability=durability)
    assert sorted(WORLD) == ["ann", "bob"]


def test_what_a_plain_agent_of_that_name_did_stops_other_arguments_in_words(store_path):
    with HoldfastSaver(store_path) as saver:
        graph = one_node(lambda _state: {"x": [book("B")]}, saver)
        graph.invoke({"x": []}, thread())
        with closing(saver.store.agent("t")) as agent, agent:
            book("A")
        with pytest.raises(MaybeRepeated):
            graph.invoke({"x": []}, thread())
        saver.accept("t")
        graph.invoke({"x": []}, thread())
    assert WORLD == ["B", "A", "B"]
