"""Tasks: somebody else's loop says to which task a call belongs, and what it did is not done again."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import holdfast
from holdfast.errors import BadName, BadOption, HoldfastError, InDoubt, MaybeRepeated
from holdfast.run.callers import any_under_way
from tests.agent.test_interrupts import interrupted
from tests.lives import PATIENCE_S as HANG_S
from tests.lives import die, dies

WORLD = []


@holdfast.tool(name="task_book")
def book(city: str) -> str:
    WORLD.append(city)
    return f"{city} {len(WORLD)}"


@holdfast.tool(name="task_look", effect="read")
def look(city: str) -> int:
    WORLD.append(f"look {city}")
    return len(WORLD)


@holdfast.tool(name="task_say", effect="idempotent")
def say(text: str) -> str:
    return text


@pytest.fixture(autouse=True)
def _nothing_done():
    WORLD.clear()


@pytest.fixture
def again(store_path):
    """``again()`` is the agent, as the next process opens it."""
    opened = []

    def agent():
        for one in opened:
            one.close()
        opened.append(holdfast.open(store_path))
        return opened[-1].agent("a")

    yield agent
    opened[-1].close()


def test_a_task_that_is_executed_again_is_answered_from_the_record(again):
    agent = again()
    with agent.task("turn 1"):
        first = [book("A"), book("B"), book("A"), look("C")]
    agent = again()
    with agent.task("turn 1"):
        assert [book("B"), book("A"), look("C"), book("A")] == [first[1], first[0], first[3], first[2]]
    assert WORLD == ["A", "B", "A", "look C"]


def test_a_checkpoint_after_the_task_settles_it(again):
    agent = again()
    with agent.task("turn 1"):
        book("A")
    agent.checkpoint()
    agent = again()
    with agent.task("turn 2"):
        book("B")
    assert WORLD == ["A", "B"]


def test_a_checkpoint_inside_the_task_does_not(again):
    agent = again()
    with agent.task("turn 1"):
        book("A")
        agent.checkpoint()
    agent = again()
    with agent.task("turn 1"):
        book("A")
    agent = again()
    with agent.task("turn 2"), pytest.raises(MaybeRepeated, match=r"city='A'\), now with \(city='B'\)"):
        book("B")
    agent.accept()
    agent = again()
    with agent.task("turn 2"):
        book("B")
    assert WORLD == ["A", "B"]


def test_tasks_of_one_process_do_not_stand_in_each_others_way(again):
    agent = again()
    for city in "ABC":
        with agent.task(f"turn {city}"):
            book(city)
    assert WORLD == ["A", "B", "C"]


def test_after_an_exception_reads_are_made_again_and_writes_are_answered(again):
    agent = again()

    def turn():
        look("A")
        book("A")
        if WORLD.count("look A") == 1:
            raise ConnectionError

    with pytest.raises(ConnectionError), agent.task("turn 1"):
        turn()
    with agent.task("turn 1"):
        turn()
    with pytest.raises(MaybeRepeated), agent.task("turn 1"):
        book("B")
    assert WORLD == ["look A", "A", "look A"]


def test_calls_may_come_from_any_thread_and_asyncio_task(again):
    import contextvars

    @holdfast.tool
    async def reserve(city: str) -> str:
        await asyncio.sleep(0)
        WORLD.append(city)
        return city

    async def gathered(cities):
        return await asyncio.gather(*map(reserve, cities))

    def turn(agent, cities):
        with agent.task("turn 1"):
            with ThreadPoolExecutor(4) as pool:
                done = [pool.submit(contextvars.copy_context().run, book, city) for city in cities]
                found = [one.result() for one in done]
            return found, asyncio.run(gathered(cities))

    found, reserved = turn(again(), "ABCD")
    turned, again_reserved = turn(again(), "DCBA")
    assert (turned, again_reserved) == (found[::-1], reserved[::-1])
    assert sorted(WORLD) == list("AABBCCDD")


def test_the_same_call_still_under_way_is_waited_for(again):
    agent, begun, gate = again(), threading.Event(), threading.Event()

    @holdfast.tool
    def slow(city: str) -> str:
        WORLD.append(city)
        begun.set()
        assert gate.wait(HANG_S)
        return city

    def execute():
        with agent.task("turn 1"):
            return slow("A")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(execute)
        assert begun.wait(HANG_S)
        second = pool.submit(execute)
        gate.set()
        assert (first.result(HANG_S), second.result(HANG_S)) == ("A", "A")
    assert WORLD == ["A"]


def test_what_is_in_doubt_stops_the_writes_of_every_task(again):
    @holdfast.tool
    def breaks(city: str) -> str:
        raise TimeoutError(city)

    agent = again()
    with pytest.raises(InDoubt), agent.task("turn 1"):
        breaks("A")
    with agent.task("turn 2"):
        for tool in (look, book):
            with pytest.raises(InDoubt):
                tool("A")
    assert WORLD == []


def test_what_a_tool_did_inside_of_itself_is_not_left_over(again):
    @holdfast.tool
    def trip(city: str) -> str:
        return book(city)

    agent = again()
    with agent.task("turn 1"):
        trip("A")
    agent = again()
    with agent.task("turn 1"):
        trip("A")
        book("B")  # no part of what trip did
    assert WORLD == ["A", "B"]


@pytest.mark.parametrize("name", ["", "a//b", " a", "x" * 201])
def test_names(again, name):
    agent = again()
    with pytest.raises(BadName), agent.task(name):
        pass


def test_a_durable_function_has_positions_already(again):
    @holdfast.durable
    def run(agent):
        with agent.task("x"):
            pass

    with pytest.raises(BadOption, match="positions"):
        again().run(run)


def test_a_small_loop_that_is_killed_on_the_way(store_path, tmp_path):
    ledger = tmp_path / "ledger"

    @holdfast.tool
    def note(city):
        with ledger.open("a") as file:
            print(city, file=file)

    def loop(when):
        with holdfast.open(store_path) as store, store.agent("a") as agent:
            for turn in range(agent.state.get("turn", 0), 3):
                with agent.task(f"turn {turn}"):
                    note(f"A{turn}")
                    if when == f"inside {turn}":
                        die()
                    note(f"B{turn}")
                if when == f"after {turn}":
                    die()
                agent.state["turn"] = turn + 1
                agent.checkpoint()

    for when in ("inside 0", "after 1", ""):
        assert dies(lambda when=when: loop(when), 0) == bool(when)
    assert ledger.read_text().split() == ["A0", "B0", "A1", "B1", "A2", "B2"]


def test_a_note_of_a_checkpoint_that_was_never_stored_says_nothing_about_the_next(again):
    agent = again()
    with agent.task("turn 1"):
        book("A")
        agent.checkpoint("inside")  # says that it does not know the booking
    agent._host.loop.note()  # the next one would know it, but is not stored
    agent._host.ledger.flush()
    agent = again()
    agent.checkpoint("other")
    agent = again()
    with agent.task("turn 1"):
        book("A")
    assert WORLD == ["A"]


def test_a_task_records_while_the_agent_goes_back(again):
    """Each of the two waits for the other for a moment, and never for ever."""
    agent, rounds, done = again(), 100, []
    agent.checkpoint("first")

    def record():
        for number in range(rounds):
            with agent.task(f"turn {number}"):
                done.append(say(str(number)))

    def go_back():
        for number in range(rounds):
            agent.state["number"] = number
            done.append(agent.undo().id)

    threads = [threading.Thread(target=work, daemon=True) for work in (record, go_back)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(done), agent.state) == (2 * rounds, {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_that_was_interrupted_before_it_was_made_is_not_under_way(store_path):
    """Wherever that was: a process that seems to be making a call cannot be frozen."""
    at, was_interrupted = 0, True
    with holdfast.open(store_path) as store:
        while was_interrupted:
            at += 1
            agent = store.agent(f"a{at}", when=None)
            with suppress(HoldfastError), agent.task("turn"):
                _, was_interrupted = interrupted(lambda: say("hello"), at)
            assert not any_under_way(), at
            agent.close()
    assert at > 50
