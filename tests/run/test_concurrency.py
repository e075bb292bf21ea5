"""Tasks and threads: whatever the delays, a run that is executed again arrives at the same state."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from holdfast import effect as current_effect
from holdfast import errors
from holdfast.run import records
from holdfast.run.tools import tool
from tests.conftest import SOAK
from tests.run.bench import Bench, Crash

made = []


@tool(name="concurrent.search", effect="read")  # a module's tools are known to all tests of the process
async def search(branch, number):
    made.append((branch, number))
    await asyncio.sleep(random.random() * 0.003)
    return branch * 1000 + number


@tool(name="concurrent.book", effect="idempotent")
async def book(branch, number):
    made.append((branch, number))
    await asyncio.sleep(random.random() * 0.003)
    return (branch, number)


@tool(effect="read")
def blocking(branch, number):
    made.append((branch, number))
    threading.Event().wait(random.random() * 0.003)
    return branch * 1000 + number


@tool(effect="local")
def note(text):
    from holdfast.run.scope import current

    current().state["log"].append(text)


async def gathered(agent, branches, end):
    agent.state["log"] = []
    agent.state["seen"] = {}

    async def branch(number):
        await asyncio.sleep(random.random() * 0.003)
        for step in range(3):
            found = await search(number, step)
            agent.state["log"].append(found)
            if step == 1 and number % 10 == 0:
                booked = await book(number, step)
                agent.state["seen"][number] = booked
                note(f"booked {number}")
        return number

    order = await asyncio.gather(*(branch(number) for number in range(branches)))
    agent.checkpoint("gathered")
    agent.state["order"] = order
    if end:
        raise Crash
    return agent.digest


def crash(bench, function, *args):
    with pytest.raises(Crash):
        asyncio.run(bench.arun(function, *args))
    bench.ledger.flush()


def test_gather_over_200_branches_replays_to_the_same_digest_every_time(rounds):
    bench = Bench()
    end = [True]

    async def work(agent):
        return await gathered(agent, 200, end[0])

    crash(bench, work)
    digest, log = bench.digest, list(bench.state["log"])
    end[0] = False
    made.clear()
    for _ in range(rounds(3, 1_000)):
        again = bench.crashed()
        assert asyncio.run(again.arun(work)) == digest
        assert list(again.state["log"]) == log
    assert not made


@pytest.mark.parametrize("seed", range(100 if SOAK else 5))
def test_a_crash_anywhere_in_gather_is_finished_with_every_prefix_kept(seed):
    chosen = random.Random(seed)
    bench = Bench()
    end = [True]

    async def work(agent):
        return await gathered(agent, 20, end[0])

    crash(bench, work)
    log = list(bench.state["log"])
    end[0] = False
    keep = chosen.randrange(1, bench.ledger.count)
    completed = sum(isinstance(record, records.Done) for number, record in bench.ledger.records() if number <= keep)
    again = bench.crashed(keep)
    asyncio.run(again.arun(work))
    searched = [text for text in again.state["log"] if type(text) is int]
    assert sorted(searched) == sorted(text for text in log if type(text) is int)
    same = 0
    while same < len(log) and log[same] == again.state["log"][same]:
        same += 1
    booked = sum(1 for text in log[:same] if type(text) is str)
    assert same + booked >= completed or same == len(log)
    # and once more, from what that one recorded
    final = again.digest
    third = again.crashed(again.ledger.count - 1)
    asyncio.run(third.arun(work))
    assert third.digest == final


def nested_groups(count, end):
    """A run of groups whose members fail and are cancelled; it crashes at its end while ``end[0]`` is true."""

    async def work(agent):
        agent.state["log"] = []

        async def leaf(group, number):
            try:
                agent.state["log"].append(await search(group, number))
                if number == 2:
                    raise LookupError(group)
                agent.state["log"].append(await search(group, number + 10))
                await search(group, number + 20)
            except asyncio.CancelledError:
                agent.state["log"].append(("cancelled", group, number))
                raise

        async def group(number):
            try:
                async with asyncio.TaskGroup() as tasks:
                    for leaf_number in range(5):
                        tasks.create_task(leaf(number, leaf_number))
            except* LookupError as errors_found:
                agent.state["log"].append(("failed", number, len(errors_found.exceptions)))

        async with asyncio.TaskGroup() as groups:
            for number in range(count):
                groups.create_task(group(number))
        if end[0]:
            raise Crash
        return agent.digest

    return work


def test_nested_task_groups_and_cancellation_replay_the_same():
    end = [True]
    work = nested_groups(6, end)
    bench = Bench()
    crash(bench, work)
    digest = bench.digest
    assert any(text[0] == "cancelled" for text in bench.state["log"] if type(text) is tuple)
    end[0] = False
    made.clear()
    for _ in range(8):
        assert asyncio.run(bench.crashed().arun(work)) == digest
    assert not made


def test_plain_tools_on_the_loop_and_off_it():
    end = [True]

    async def work(agent):
        agent.state["log"] = []

        async def one(number):
            agent.state["log"].append(await blocking.acall(number, 0))
            agent.state["log"].append(blocking(number, 1))
            agent.state["log"].append(await search(number, 2))

        await asyncio.gather(*(one(number) for number in range(20)))
        if end[0]:
            raise Crash
        return agent.digest

    bench = Bench()
    crash(bench, work)
    digest = bench.digest
    end[0] = False
    made.clear()
    for _ in range(5):
        assert asyncio.run(bench.crashed().arun(work)) == digest
    assert not made


def test_a_loop_inside_a_plain_run_replays_the_same():
    end = [True]

    def work(agent):
        agent.state["log"] = []

        async def one(number):
            agent.state["log"].append(await search(number, 0))
            agent.state["log"].append(await search(number, 1))

        async def fan_out():
            await search(99, 0)  # from here on it is known that the loop is the run's
            await asyncio.gather(*(one(number) for number in range(20)))

        asyncio.run(fan_out())
        asyncio.run(one(20))
        if end[0]:
            raise Crash
        return agent.digest

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    digest = bench.digest
    end[0] = False
    made.clear()
    for _ in range(5):
        assert bench.crashed().run(work) == digest
    assert not made


# -- flows that nobody could number again ---------------------------------------------------------------------


@tool(name="concurrent.pay")
def pay(number=0):
    made.append(number)
    return number


@tool(name="concurrent.apay")
async def apay(number=0):
    made.append(number)
    return number


def in_a_thread(agent):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, pay).result()


def in_a_context(agent):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(agent.context().run, pay).result()


def in_a_loop_that_has_begun_tasks_before_any_call(agent):
    async def several():
        return await asyncio.gather(apay(1), apay(2))

    return asyncio.run(several())


def in_a_loop_of_another_thread(agent):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, apay()).result()


def with_a_checkpoint(agent):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, agent.checkpoint).result()


@pytest.mark.parametrize(
    "work",
    [
        in_a_thread,
        in_a_context,
        in_a_loop_that_has_begun_tasks_before_any_call,
        in_a_loop_of_another_thread,
        with_a_checkpoint,
    ],
)
def test_a_run_calls_nothing_on_a_thread_or_a_loop_that_is_not_its_own(opened, work):
    made.clear()
    with pytest.raises(errors.NoAgent, match="it was not called") as caught:
        opened().run(work)
    assert ("store.map" in caught.value.hint) or ("agent.arun" in caught.value.hint)
    assert not made


async def by_to_thread(agent):
    return await asyncio.to_thread(pay)


async def by_a_callback(agent):
    loop, done = asyncio.get_running_loop(), asyncio.Queue()
    loop.call_soon(lambda: loop.create_task(apay()).add_done_callback(done.put_nowait))
    return (await done.get()).result()


async def by_a_thread_that_reaches_into_the_loop(agent):
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(apay(), loop).result())


@pytest.mark.parametrize("work", [by_to_thread, by_a_callback, by_a_thread_that_reaches_into_the_loop])
def test_nor_does_an_async_one(opened, work):
    made.clear()
    with pytest.raises(errors.NoAgent, match="it was not called"):
        asyncio.run(opened().arun(work))
    assert not made


def test_a_thread_of_a_run_may_read_and_change_the_state(opened):
    def work(agent):
        agent.state["n"] = 1
        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.copy_context().run, agent.state.update, {"n": 2}).result()
        return agent.state["n"]

    assert opened().run(work) == 2


def test_threads_that_come_together_share_an_agent_of_a_plain_loop(store_path):
    """Each enters at the same moment as the others. What was done and lost before answers one of their calls, once."""
    keys, before_s = [], sys.getswitchinterval()

    @tool(name="concurrent.together")
    def together(number):
        keys.append(current_effect().key)
        return number

    def work(agent, all_here):
        all_here.wait(60)
        for _ in range(3):
            with agent:
                together(1)

    with holdfast.open(store_path) as store, ThreadPoolExecutor(4) as pool:
        for number in range(60):
            with store.agent(f"trip-{number}", when=None) as agent:
                together(1)
            agent.close()
            agent, all_here = store.agent(f"trip-{number}", when=None), threading.Barrier(4)
            keys.clear()
            sys.setswitchinterval(1e-6)
            try:
                for one in [pool.submit(work, agent, all_here) for _ in range(4)]:
                    one.result()
            finally:
                sys.setswitchinterval(before_s)
            assert len(keys) == len(set(keys)) == 11


def test_a_plain_tool_off_the_loop_is_recorded_where_it_is_called(opened):
    threads = []

    @tool(name="concurrent.outer")
    def outer(number):
        threads.append(threading.get_ident())
        return pay(number) + 1

    async def work(agent):
        found = [await outer.acall(1), await outer.acall(2), await apay.acall(3)]
        if len(threads) == 2:
            threads.append(threading.get_ident())
            raise KeyboardInterrupt
        return found

    made.clear()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(opened().arun(work))
    assert threading.get_ident() not in threads[:2]
    agent = opened()
    assert asyncio.run(agent.arun(work)) == [2, 3, 3]
    assert made == [1, 2, 3]
    assert [effect.path for effect in agent.effects()] == ["0", "0/0", "1", "1/0", "2"]
    assert asyncio.run(outer.acall(4)) == 5  # outside of everything


def test_a_plain_tool_off_the_loop_that_raises_what_no_future_holds_has_failed(opened):
    @tool(name="concurrent.stops", effect="read")
    def stops():
        raise StopIteration

    async def work(agent):
        await stops.acall()

    with pytest.raises(errors.ToolFailed, match="StopIteration"):
        asyncio.run(opened().arun(work))


def test_a_plain_tool_off_the_loop_that_is_given_up_is_in_doubt(opened):
    begun, go_on = threading.Event(), threading.Event()

    @tool(name="concurrent.slow")
    def slow():
        begun.set()
        go_on.wait(180)

    async def work(agent):
        task = asyncio.create_task(slow.acall())
        assert await asyncio.to_thread(begun.wait, 180)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with pytest.raises(errors.InDoubt):
        asyncio.run(opened().arun(work))
    go_on.set()


def test_a_recorded_call_that_nobody_makes_is_diverged_and_not_a_hang(monkeypatch):
    wanted = [True]

    async def work(agent):
        async def other():
            if wanted[0]:
                await search(1, 1)

        async def one():
            await asyncio.sleep(0.02)
            return await search(2, 2)

        await asyncio.gather(other(), one())
        raise Crash

    bench = Bench()
    crash(bench, work)
    wanted[0] = False
    monkeypatch.setattr("holdfast.run.order.STALL_S", 3.0)
    with pytest.raises(errors.Diverged, match="is not made"):
        asyncio.run(bench.crashed().arun(work))
