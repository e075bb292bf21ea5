"""Event loops: nothing here depends on their threads, and what is asked on one is answered."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

import holdfast
from holdfast import errors
from holdfast.run.order import watch
from holdfast.run.resilience import Clock
from holdfast.run.steps import Long, Work
from tests.run.bench import Crash
from tests.run.test_concurrency import made, nested_groups


@holdfast.tool(effect="idempotent", name="loops.put")
async def put(number):
    return number


async def beside_a_full_executor(use):
    """Somebody waits, in the only thread of the loop, for what comes after ``use``."""
    after = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    waiting = asyncio.create_task(asyncio.to_thread(after.wait, 60))
    await asyncio.sleep(0)
    found = await use()
    after.set()
    assert await waiting  # before it gave up
    return found


@pytest.mark.parametrize("kind", [Work, Long])
def test_what_fails_after_its_caller_was_cancelled_is_no_error_that_nobody_has_heard(kind):
    """As a connection to a server that is away: the loop printed it when the garbage was collected."""
    goes_on, unheard = threading.Event(), []

    def fails():
        goes_on.wait(180)
        raise errors.StoreFailed("away")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, about: unheard.append(about["message"]))
        caller = asyncio.ensure_future(kind(fails).later())
        await asyncio.sleep(0)
        caller.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        del caller
        gc.collect()

    asyncio.run(main())
    assert not unheard


def test_a_call_does_not_wait_for_the_threads_of_the_loop(opened):
    agent = opened()

    async def work(agent):
        found = await beside_a_full_executor(lambda: put(1))
        await agent.acheckpoint("put")
        return found

    assert asyncio.run(agent.arun(work)) == 1


def test_nor_does_a_checkpoint(opened):
    agent = opened()
    agent.state["n"] = 1
    asyncio.run(beside_a_full_executor(lambda: agent.acheckpoint("saved")))
    assert agent.head.label == "saved"


def test_nor_does_a_wait_for_a_signal(reopened):
    store = reopened()
    agent = store.agent("trip-7")
    store.signal("trip-7", "go", 7, any_run=True)

    async def work(agent):
        return await beside_a_full_executor(lambda: agent.wait_for("go"))

    assert asyncio.run(agent.arun(work)) == 7


def test_waiting_has_one_name_in_plain_and_in_async_code(reopened):
    store = reopened()
    agent = store.agent("trip-7")

    async def later(agent):
        return [await agent.sleep(0), await agent.wait_for("go")]

    def plain(agent):
        return [agent.sleep(0), agent.wait_for("go")]

    async def outside_of_runs():
        async with agent:
            return await agent.sleep(0)

    for number in range(3):
        store.signal("trip-7", "go", number, any_run=True)
    assert asyncio.run(agent.arun(later)) == [None, 0]
    assert asyncio.run(agent.arun(plain)) == [None, 1]
    assert agent.run(plain) == [None, 2]
    assert asyncio.run(outside_of_runs()) is None


def test_a_plain_probe_on_a_loop_does_not_wait_for_its_threads_either(opened):
    @holdfast.tool(probe=lambda effect: holdfast.Found("booked"))
    async def book():
        raise ConnectionError("gone")

    async def work(agent):
        return await beside_a_full_executor(book)

    assert asyncio.run(opened().arun(work)) == "booked"


def test_an_async_probe_of_a_plain_tool_is_asked_on_a_running_loop(opened):
    async def find(effect):
        await asyncio.sleep(0)
        return holdfast.Found(f"booked {effect.args['flight']}")

    @holdfast.tool(probe=find)
    def book(flight):
        raise ConnectionError("gone")

    async def work(agent):
        return book("TP1")

    assert asyncio.run(opened().arun(work)) == "booked TP1"


def test_the_time_that_an_agent_is_told_is_its_clocks(opened):
    agent = opened()
    agent._host.clock = Noon()

    def work(agent):
        return agent.now(), agent.now()

    assert {*agent.run(work), agent.now()} == {datetime(2030, 1, 1, 12, tzinfo=UTC)}


class Noon(Clock):
    def wall_us(self):
        return round(datetime(2030, 1, 1, 12, tzinfo=UTC).timestamp() * 1e6)


# -- other loops ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["asyncio", "uvloop"])
@pytest.mark.parametrize("second", ["asyncio", "uvloop"])
def test_an_async_run_replays_the_same_on_either_loop(opened, first, second):
    makers = {"asyncio": asyncio.new_event_loop, "uvloop": pytest.importorskip("uvloop").new_event_loop}
    end = [True]
    work = holdfast.durable(name="fan_out")(nested_groups(5, end)).options(id="r")

    def execute(maker, agent):
        with asyncio.Runner(loop_factory=makers[maker]) as runner:
            return runner.run(agent.arun(work))

    agent = opened()
    with pytest.raises(Crash):
        execute(first, agent)
    digest = agent.digest
    end[0] = False
    made.clear()
    assert execute(second, opened()) == digest
    assert not made


def test_a_loop_that_does_not_show_when_it_rests_is_refused(opened):
    class Closed:
        __slots__ = ()
        call_soon = None

    with pytest.raises(errors.BadOption, match="asyncio and uvloop"):
        watch(Closed())
