"""Sleeping and signals: the time that is left, who gets a signal, and runs that are put off."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast import errors
from holdfast.run import records, waiting
from holdfast.run.durables import durable
from holdfast.run.past import Past
from holdfast.run.resilience import Clock as RealClock
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash

HANG_S = 180


class Clock:
    """A time that passes when somebody sleeps. The date can be set."""

    def __init__(self):
        self.elapsed = 100.0
        self.date_us = 1_700_000_000 * 10**6
        self.slept = 0.0

    def wall_us(self):
        return self.date_us

    def elapsed_s(self):
        return self.elapsed

    def sleep(self, seconds):
        self.slept += seconds
        self.elapsed += seconds
        self.date_us += round(seconds * 1e6)

    async def asleep(self, seconds):
        self.sleep(seconds)
        await asyncio.sleep(0)


class Standing(RealClock):
    """The real time, which stands still unless ``passes()``: nobody is late who gets no processor for a while."""

    def __init__(self, passes):
        self.passes = passes
        self.seen = super().elapsed_s()

    def elapsed_s(self):
        if self.passes():
            self.seen = super().elapsed_s()
        return self.seen


def timed(clock, bench=None):
    bench = bench or Bench()
    bench.clock = clock
    return bench


def recorded(bench, kind):
    return sum(isinstance(record, kind) for _, record in bench.ledger.records())


def nothing(_run):
    return []


def line(bench):
    return Past(bench.ledger.records())


def test_a_sleep_takes_its_time_and_is_not_slept_again():
    clock = Clock()
    done = []

    @tool
    def act():
        done.append(clock.slept)
        if len(done) == 1:
            raise Crash
        return "done"

    @durable
    def work(agent):
        agent.sleep(3 * 3_600)
        return act()

    bench = timed(clock)
    with pytest.raises(Crash):
        bench.run(work)
    assert clock.slept == pytest.approx(3 * 3_600)
    again = timed(clock, bench.crashed())
    with pytest.raises(errors.InDoubt):
        again.run(work)
    assert clock.slept == pytest.approx(3 * 3_600)


def test_what_is_left_of_a_sleep_is_slept_by_the_next_process():
    clock = Clock()

    class Killed(Clock):
        def sleep(self, seconds):
            super().sleep(seconds)
            if self.slept > 3_600:
                raise Crash

    killed = Killed()

    def work(agent):
        agent.sleep(7_200)
        return "woke"

    bench = timed(killed)
    with pytest.raises(Crash):
        bench.run(work)
    clock.date_us = killed.date_us + 1_800 * 10**6  # half an hour until somebody started it again
    assert timed(clock, bench.crashed()).run(work) == "woke"
    assert clock.slept == pytest.approx(7_200 - killed.slept - 1_800)


@pytest.mark.parametrize("jump_s", [-10 * 86_400, 10 * 86_400])
def test_a_date_that_is_set_while_a_run_sleeps_changes_nothing(jump_s):
    class Jumping(Clock):
        def sleep(self, seconds):
            super().sleep(seconds)
            self.date_us += jump_s * 10**6

    clock = Jumping()

    def work(agent):
        agent.sleep(600)

    timed(clock).run(work)
    assert clock.slept == pytest.approx(600)


def test_a_date_that_was_set_back_between_two_processes_does_not_make_a_sleep_longer():
    def work(agent):
        agent.sleep(600)
        return True

    bench = timed(Clock())
    with pytest.raises(errors.Waiting):
        bench.run(work, wait=False)
    clock = Clock()
    clock.date_us = 0
    assert timed(clock, bench.crashed()).run(work)
    assert clock.slept == pytest.approx(600)


def test_a_function_that_swallows_everything_is_put_off_all_the_same():
    def work(agent):
        try:
            agent.sleep(600)
        except BaseException:
            return "went on"

    bench = timed(Clock())
    with pytest.raises(errors.Waiting):
        bench.run(work, wait=False)


def test_a_signal_that_comes_while_a_run_blocks_wakes_it():
    bench = Bench()

    def work(agent):
        return agent.wait_for("approval")

    timer = threading.Timer(0.15, bench.send, ("approval", 7))
    timer.start()
    assert bench.run(work) == 7
    timer.join()


def test_no_signal_in_time_is_a_timeout_now_and_when_the_run_is_executed_again():
    clock = Clock()
    seen = []

    def work(agent):
        try:
            agent.wait_for("approval", timeout_s=60)
        except TimeoutError as error:
            seen.append(str(error))
        if len(seen) == 1:
            raise Crash
        return "alone"

    bench = timed(clock)
    with pytest.raises(Crash):
        bench.run(work)
    assert clock.slept == pytest.approx(60, abs=2)
    bench.send("approval", "late")
    assert timed(clock, bench.crashed()).run(work) == "alone"
    assert seen[0] == seen[1]
    assert line(bench).taken == set()


def test_waits_in_async_code_and_two_waits_for_one_name_get_different_signals():
    async def main():
        bench = Bench()

        async def one(agent, number):
            return number, await agent.wait_for("go")

        async def work(agent):
            await agent.sleep(0.01)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(agent, number)) for number in range(3)]
            return sorted(task.result()[1] for task in tasks)

        for number in range(3):
            asyncio.get_running_loop().call_later(0.05 * number, bench.send, "go", number)
        assert await bench.arun(work) == [0, 1, 2]
        return bench

    bench = asyncio.run(main())
    assert [one.status for one in bench.store.signals("trip-7")] == ["taken"] * 3


def test_a_run_is_put_off_only_when_nothing_of_it_is_under_way():
    done, under_way = [], []

    @tool
    async def slow(number):
        under_way.append(number)
        await asyncio.sleep(0.3)
        under_way.clear()
        done.append(number)
        return number

    async def approve(agent):
        return await agent.wait_for("approval")

    async def act(agent):
        return [await slow(number) for number in range(2)]

    async def work(agent):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(approve(agent))
            second = group.create_task(act(agent))
        return first.result(), second.result()

    bench = Bench()
    bench.clock = Standing(lambda: under_way or recorded(bench, records.Done) == 2)
    with pytest.raises(errors.Waiting):
        asyncio.run(bench.arun(work, wait=False))
    assert done == [0, 1]
    bench.send("approval", "yes")
    assert asyncio.run(bench.crashed().arun(work, wait=False)) == ("yes", [0, 1])
    assert done == [0, 1]


def test_a_cancelled_wait_is_no_longer_waited_for():
    async def work(agent):
        try:
            async with asyncio.timeout(0.1):
                await agent.wait_for("approval")
        except TimeoutError:
            pass
        await agent.wait_for("other")

    bench = Bench()

    async def main():
        task = asyncio.ensure_future(bench.arun(work))
        while "other" not in {getattr(record, "name", "") for _, record in bench.ledger.records()}:  # noqa: ASYNC110 - it is the ledger that is looked at
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(main())
    (run,) = line(bench).runs.values()
    assert [wait.name for wait in waiting.open_waits(run)] == ["other"]


def test_a_wait_that_is_cancelled_while_its_beginning_is_written_is_no_longer_waited_for():
    reached, go_on = threading.Event(), threading.Event()

    async def work(agent):
        task = asyncio.create_task(agent.wait_for("approval"))
        await asyncio.to_thread(reached.wait, HANG_S)
        task.cancel()
        go_on.set()
        await asyncio.wait({task})
        await agent.wait_for("other")

    bench = Bench()
    append = bench.ledger.append

    def slow(record, **options):
        if isinstance(record, records.Wait):
            reached.set()
            go_on.wait(HANG_S)
        return append(record, **options)

    bench.ledger.append = slow
    with pytest.raises(errors.Waiting):
        asyncio.run(bench.arun(work, wait=False))
    (run,) = line(bench).runs.values()
    assert [wait.name for wait in waiting.open_waits(run)] == ["other"]


def test_a_tool_cannot_wait():
    @tool(effect="read", raises=(errors.BadOption,))
    def look():
        bench.sleep(1)

    bench = Bench()
    with pytest.raises(errors.BadOption, match="cannot wait"):
        bench.run(lambda agent: look())


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e12])
def test_a_wait_that_makes_no_sense_is_refused(seconds):
    with pytest.raises(errors.BadOption):
        Bench().sleep(seconds)


def test_signals_are_received_in_runs_alone():
    bench = Bench()
    bench.send("approval", 1)
    with bench.using(0), pytest.raises(errors.NoAgent, match="in a run"):
        bench.wait_for("approval")
    with pytest.raises(errors.NoAgent):
        bench.wait_for("approval")
    assert bench.run(lambda agent: agent.wait_for("approval")) == 1


def test_a_signal_keeps_to_its_limits():
    registry = Bench().registry
    whose = {"branch": b"b" * 16, "run": None, "by": "me"}
    assert len(waiting.key_of(b"a" * 16)) == 16
    with pytest.raises(errors.BadName):
        waiting.body_of(b"1", "", 1, registry, **whose)
    with pytest.raises(errors.BadOption):
        waiting.body_of(b"1", "big", b"x" * (1 << 21), registry, **whose)
    with pytest.raises(errors.CorruptValue):
        waiting.read(0, {"what": "signal"})
