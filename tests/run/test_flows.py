"""Flows of control that nobody numbered: callbacks, threads that reach into the loop, sets of coroutines, streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading

import pytest

from holdfast import errors
from holdfast.run import effects, records
from holdfast.run.context import effect
from holdfast.run.positions import numbered_context
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash
from tests.run.test_concurrency import crash

HANG_S = 180

pytestmark = pytest.mark.usefixtures("patient")


def keys_of(bench):
    return [record.key for _, record in bench.ledger.records() if isinstance(record, records.Intent)]


# -- tasks of callbacks -----------------------------------------------------------------------------------------


async def by_call_later(call, numbers):
    loop, done = asyncio.get_running_loop(), asyncio.Queue()
    for number in numbers:
        loop.call_later(
            0.001 * random.random(),
            lambda number=number: loop.create_task(call(number)).add_done_callback(done.put_nowait),
        )
    return sorted([(await done.get()).result() for _ in numbers])


async def by_thread(call, numbers):
    loop = asyncio.get_running_loop()

    def job():
        return [asyncio.run_coroutine_threadsafe(call(number), loop).result(HANG_S) for number in numbers]

    return await asyncio.to_thread(job)


async def by_threads(call, numbers):
    loop = asyncio.get_running_loop()

    def job(number):
        return asyncio.run_coroutine_threadsafe(call(number), loop).result(HANG_S)

    return list(await asyncio.gather(*(asyncio.to_thread(job, number) for number in numbers)))


@pytest.mark.parametrize("begin", [by_call_later, by_thread, by_threads])
def test_tasks_that_callbacks_begin_have_positions_of_their_own(begin):
    outside, end = [], [True]

    @tool
    async def book(number):
        outside.append((number, effect().key))
        await asyncio.sleep(random.random() * 0.003)
        return number

    async def work(agent):
        async def twice(number):
            return await book(number) + await book(number + 10)

        found = await begin(twice, range(4))
        if end[0]:
            raise Crash
        return found

    bench = Bench()
    crash(bench, work)
    assert len(set(keys_of(bench))) == len(outside) == 8
    end[0] = False
    for _ in range(5):
        assert asyncio.run(bench.crashed().arun(work)) == [10, 12, 14, 16]
    assert len(outside) == 8


# -- sets of coroutines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_as_completed_goes_through_coroutines_in_any_order_and_replays_all_the_same(seed):
    chosen = random.Random(seed)
    made = []

    @tool(effect="idempotent")
    async def put(number):
        made.append(number)
        await asyncio.sleep(random.random() * 0.003)
        return number

    async def work(agent):
        async def one(number):
            return await put(number) + await put(number + 100)

        found = [await done for done in asyncio.as_completed([one(number) for number in range(10)])]
        agent.state["found"] = found
        if end[0]:
            raise Crash
        return found

    end = [True]
    bench = Bench()
    crash(bench, work)
    found = list(bench.state["found"])
    end[0] = False
    made.clear()
    assert asyncio.run(bench.crashed().arun(work)) == found
    assert not made
    keep = chosen.randrange(1, bench.ledger.count)
    assert sorted(asyncio.run(bench.crashed(keep).arun(work))) == sorted(found)


# -- streams ----------------------------------------------------------------------------------------------------


def test_what_a_streams_items_lead_to_completes_before_it_now_and_again():
    made, end = [], [True]

    @tool(effect="read", stream=True)
    def words():
        made.append("words")
        yield from ("book", "a", "flight")

    @tool
    def act(word):
        made.append(word)
        return word.upper()

    def work(agent):
        found = [act(word) for word in words()]
        found.append(act("end"))
        if end[0]:
            raise Crash
        return found

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    end[0] = False
    made.clear()
    assert bench.crashed().run(work) == ["BOOK", "A", "FLIGHT", "END"]
    assert not made


def test_streams_of_several_tasks_whose_items_lead_to_calls_replay_the_same():
    made, end = [], [True]

    @tool(effect="read", stream=True)
    async def words(number):
        made.append(number)
        for word in ("a", "b", "c"):
            await asyncio.sleep(random.random() * 0.002)
            yield f"{word}{number}"

    @tool(effect="idempotent")
    async def act(word):
        made.append(word)
        await asyncio.sleep(random.random() * 0.002)
        return word.upper()

    async def work(agent):
        agent.state["log"] = []

        async def one(number):
            async for word in words(number):
                agent.state["log"].append(await act(word))

        await asyncio.gather(*(one(number) for number in range(4)))
        await act("end")
        if end[0]:
            raise Crash
        return list(agent.state["log"])

    bench = Bench()
    crash(bench, work)
    log = list(bench.state["log"])
    end[0] = False
    made.clear()
    for _ in range(5):
        assert asyncio.run(bench.crashed().arun(work)) == log
    assert not made


# -- calls inside of calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "idempotent", "write"])
def test_nobody_waits_for_what_was_called_inside_a_write_that_its_probe_finds(kind):
    made = []

    @tool(effect=kind)
    def inner():
        made.append("inner")
        return 1

    @tool(probe=lambda effect: effects.Found("found"))
    def outer():
        inner()
        raise Crash

    @tool(effect="idempotent")
    def after():
        return 2

    def work(agent):
        return [outer(), after()]

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    assert bench.crashed().run(work) == ["found", 2]
    assert made == ["inner"]


# -- leaving the record -----------------------------------------------------------------------------------------


def test_a_thread_that_leaves_the_record_ends_the_waiting_of_the_others():
    @tool(effect="idempotent")
    def put(number):
        return number

    swapped, end = [False], [True]

    def work(agent):
        gate = threading.Barrier(2)

        def job(number):
            gate.wait(HANG_S)
            with contextlib.suppress(errors.Diverged):
                put(5 if swapped[0] and number == 1 else number)

        threads = [threading.Thread(target=numbered_context().run, args=(job, number)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        put("end")
        if end[0]:
            raise Crash
        return "ok"

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    end[0], swapped[0] = False, True
    with pytest.raises(errors.Diverged, match="does not do what is recorded"):
        bench.crashed().run(work)
