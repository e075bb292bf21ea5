"""Calls that are given up: by the program, by whoever started it, by Ctrl-C. A run goes on from there."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import holdfast
from holdfast import errors
from holdfast.run import records
from holdfast.run.past import Past
from holdfast.run.tools import tool
from tests import warm
from tests.conftest import SOAK
from tests.run.bench import Bench, Crash
from tests.run.test_concurrency import crash, nested_groups

HANG_S = 180


class Answers:
    """What the tools of one test did, and what they wait for."""

    def __init__(self):
        self.calls = []
        self.waits = {}
        self.answers = {}

    def future(self, name):
        if name not in self.waits:
            self.waits[name] = asyncio.get_running_loop().create_future()
        return self.waits[name]

    async def begun(self, *names):
        while not set(names) <= set(self.calls):  # noqa: ASYNC110 - tools of other loops add to it, too
            await asyncio.sleep(0.001)


@pytest.fixture
def world():
    return Answers()


@pytest.fixture
def look(world):
    @tool(effect="read")
    async def look(name):
        world.calls.append(name)
        return world.answers[name] if name in world.answers else await world.future(name)

    return look


def again(bench, work, keep=None):
    """What the run comes to in a new process."""

    async def main():
        async with asyncio.timeout(HANG_S):
            return await bench.crashed(keep).arun(work)

    return asyncio.run(main())


def hows(bench):
    return [record.how for _, record in bench.ledger.records() if isinstance(record, records.Done)]


# -- the program gives up a call ------------------------------------------------------------------------------


def test_several_that_are_cancelled_at_once_are_told_in_the_order_of_the_record(world, look):
    end = [True]

    async def work(agent):
        agent.state["log"] = []

        async def one(name):
            try:
                await look(name)
            except asyncio.CancelledError:
                agent.state["log"].append(name)
                raise

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(name)) for name in ("a", "b", "c")]
            if end[0]:
                await world.begun("a", "b", "c")
                world.future("c").set_result(1)  # so that c wakes up before those that are cancelled earlier
            else:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
        if end[0]:
            raise Crash
        return list(agent.state["log"])

    bench = Bench()
    crash(bench, work)
    log = list(bench.state["log"])
    assert log == ["c", "a", "b"]
    end[0] = False
    world.calls.clear()
    assert again(bench, work) == log
    assert not world.calls


@pytest.mark.parametrize("seed", range(60 if SOAK else 2))
def test_nested_groups_with_cancellation_go_on_after_every_prefix(seed):
    chosen = random.Random(seed)
    end = [True]
    work = nested_groups(4, end)
    bench = Bench()
    crash(bench, work)
    end[0] = False
    for _ in range(5):
        second = bench.crashed(chosen.randrange(1, bench.ledger.count))
        digest = asyncio.run(second.arun(work))
        assert asyncio.run(second.crashed(second.ledger.count - 1).arun(work)) == digest


def test_a_tool_that_raises_the_error_of_a_cancelled_task_by_itself_does_so_again():
    made = []

    @tool(effect="read")
    async def odd():
        made.append(1)
        raise asyncio.CancelledError

    async def work(agent):
        try:
            await odd()
        except asyncio.CancelledError:
            if len(made) == 1 and not agent.state.get("again"):
                agent.checkpoint("seen")
        return "went on"

    bench = Bench()
    assert asyncio.run(bench.arun(work)) == "went on"
    assert again(bench, work, keep=bench.ledger.count - 1) == "went on"
    assert made == [1]


def test_a_call_cancelled_between_two_attempts_is_not_made_again(world):
    @tool(effect="read", retries=5)
    async def flaky():
        world.calls.append("flaky")
        raise ConnectionError("not now")

    end = [True]

    async def work(agent):
        task = asyncio.create_task(flaky())
        await (world.begun("flaky") if end[0] else asyncio.sleep(0.01))
        await asyncio.sleep(0)  # the pause has begun
        task.cancel()
        await asyncio.wait({task})
        agent.state["cancelled"] = task.cancelled()
        if end[0]:
            raise Crash
        return task.cancelled()

    bench = Bench()
    crash(bench, work)
    tries = len(world.calls)
    end[0] = False
    assert again(bench, work) is True
    assert len(world.calls) == tries


def test_a_write_cancelled_before_it_was_called_is_not_in_doubt():
    made, reached, go_on = [], threading.Event(), threading.Event()

    @tool
    async def pay():
        made.append(1)
        return "paid"

    async def work(agent):
        task = asyncio.create_task(pay())
        if not go_on.is_set():
            await asyncio.to_thread(reached.wait, HANG_S)
        else:
            await asyncio.sleep(0.01)
        task.cancel()
        go_on.set()
        await asyncio.wait({task})
        return task.cancelled()

    bench = Bench()
    append = bench.ledger.append

    def slow(record, **options):
        if isinstance(record, records.Intent):
            reached.set()
            go_on.wait(HANG_S)
        return append(record, **options)

    bench.ledger.append = slow
    assert asyncio.run(bench.arun(work)) is True
    assert made == []
    assert again(bench, work, keep=bench.ledger.count - 1) is True
    assert made == []


def test_a_call_cancelled_while_its_outcome_is_flushed_stands_in_nobodys_way(world, look):
    reached, go_on = threading.Event(), threading.Event()

    @tool(effect="idempotent")
    async def put():
        return 1

    async def work(agent):
        task = asyncio.create_task(put())
        other = asyncio.create_task(look("other"))
        await asyncio.to_thread(reached.wait, HANG_S)
        task.cancel()
        go_on.set()
        await asyncio.wait({task})
        world.future("other").set_result(2)
        return await other, task.cancelled()

    bench = Bench()
    append, flush, made = bench.ledger.append, bench.ledger.flush, []

    def noted(*given, **options):
        made.extend(given)
        return append(*given, **options)

    def slow():
        if any(isinstance(record, records.Done) for record in made):
            reached.set()
            go_on.wait(HANG_S)
        flush()

    bench.ledger.append, bench.ledger.flush = noted, slow

    async def main():
        async with asyncio.timeout(HANG_S):
            return await bench.arun(work)

    assert asyncio.run(main()) == (2, True)


def test_a_recorded_cancellation_that_does_not_come_is_diverged_and_not_a_hang(monkeypatch, world, look):
    end = [True]

    async def work(agent):
        task = asyncio.create_task(look("slow"))
        if end[0]:
            await world.begun("slow")
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if end[0]:
            raise Crash

    bench = Bench()
    crash(bench, work)
    end[0] = False
    monkeypatch.setattr("holdfast.run.order.STALL_S", 0.3)
    with pytest.raises(errors.Diverged, match="was cancelled when it was recorded"):
        again(bench, work)


# -- a run that failed ----------------------------------------------------------------------------------------


@pytest.fixture
def pair(world):
    """Two tools: one fails while the other is under way, until ``broken`` is emptied."""
    broken = ["yes"]

    @tool(effect="read")
    async def fails():
        await world.begun("slow")
        if broken:
            raise ConnectionError("down")
        return 1

    @tool(effect="idempotent")
    async def slow():
        world.calls.append("slow")
        if broken:
            await asyncio.Event().wait()
        return 2

    return fails, slow, broken


def test_what_was_cancelled_by_a_failure_is_made_again_when_the_run_is(world, pair):
    fails, slow, broken = pair

    async def work(agent):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fails()), group.create_task(slow())]
        return [task.result() for task in tasks]

    bench = Bench()
    with pytest.raises(ExceptionGroup):
        asyncio.run(bench.arun(work))
    assert hows(bench)[-1] == "cancelled"
    broken.clear()
    assert again(bench, work) == [1, 2]
    assert world.calls == ["slow", "slow"]


# -- somebody else gives up the run ---------------------------------------------------------------------------


def interrupt(bench, work, begun):
    """Cancel the run from outside as soon as ``begun`` returns."""

    async def main():
        task = asyncio.ensure_future(bench.arun(work))
        await begun
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["read", "idempotent"])
def test_a_run_that_is_cancelled_from_outside_goes_on_with_the_calls_that_were_under_way(world, kind):
    stuck = [True]

    @tool(effect=kind)
    async def ask(name):
        world.calls.append(name)
        if stuck[0] and name != "first":
            await asyncio.Event().wait()
        return name

    async def work(agent):
        first = await ask("first")
        return [first, *await asyncio.gather(ask("a"), ask("b"))]

    bench = Bench()
    interrupt(bench, work, world.begun("a", "b"))
    assert hows(bench) == ["value"]  # what was given up with the run is not recorded
    (run,) = Past(bench.ledger.records()).runs.values()
    assert run.status == ""
    stuck[0] = False
    again_with = bench.crashed()
    assert asyncio.run(again_with.arun(work)) == ["first", "a", "b"]
    assert world.calls.count("first") == 1
    # what the second execution recorded is what counts, also after it
    world.calls.clear()
    assert again(again_with, work, keep=again_with.ledger.count - 1) == ["first", "a", "b"]
    assert not world.calls


def test_a_run_that_is_cancelled_does_nothing_more_and_cleans_up_when_it_is_executed_again(world, look):
    @tool(effect="idempotent")
    async def release():
        world.calls.append("release")
        return "free"

    @tool(effect="read")
    async def status(name):
        world.calls.append("status")
        return name

    async def work(agent):
        try:
            found = await asyncio.gather(look("slow"), status("s"))
        finally:
            await status("late")
            freed = await release()
            agent.state["cleaned"] = len(world.calls)
            agent.checkpoint("cleaned up")
        return [*found, freed]

    bench = Bench()
    interrupt(bench, work, world.begun("slow", "status"))
    assert sorted(world.calls) == ["slow", "status"]
    assert "cleaned" not in bench.state
    world.answers["slow"] = "found"
    assert again(bench, work) == ["found", "s", "free"]
    assert world.calls.count("release") == 1


def test_a_limit_of_the_programs_own_stays_what_it_was(world, look):
    async def work(agent):
        try:
            async with asyncio.timeout(0.05):
                await look("slow")
        except TimeoutError:
            agent.state["late"] = True
        await look("short")
        await look("next")
        return agent.state["late"]

    bench = Bench()
    world.answers["short"] = 1
    interrupt(bench, work, world.begun("next"))
    world.calls.clear()
    world.answers |= {"slow": 2, "next": 3}
    assert again(bench, work) is True
    assert world.calls == ["next"]


def test_a_plain_run_that_ends_by_ctrl_c_does_nothing_more_and_goes_on(world):
    pressed = [False]

    @tool(effect="read")
    def ask():
        world.calls.append("ask")
        if not pressed[0]:
            pressed[0] = True
            raise KeyboardInterrupt
        return "answer"

    @tool
    def release():
        world.calls.append("release")

    def work(agent):
        try:
            answer = ask()
            agent.state["answer"] = answer
        finally:
            release()
            agent.checkpoint("cleaned up")
        return answer

    bench = Bench()
    with pytest.raises(KeyboardInterrupt):
        bench.run(work)
    assert bench.crashed().run(work) == "answer"
    assert world.calls == ["ask", "ask", "release"]


def test_a_run_that_a_program_executes_because_of_ctrl_c_is_not_ended_by_it(world):
    @tool
    def release():
        world.calls.append("release")

    def clean_up(agent):
        release()

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        Bench().run(clean_up)
    assert world.calls == ["release"]


def test_a_limit_and_a_fallback_stay_what_they_were_and_a_write_is_in_doubt(opened, world):
    @holdfast.tool(effect="read", name="cancelling.model")
    async def model(name):
        world.calls.append(name)
        if name == "large":
            await asyncio.Event().wait()
        return name

    @holdfast.tool(name="cancelling.pay")
    async def pay():
        world.calls.append("pay")
        await asyncio.Event().wait()

    async def ask(agent):
        try:
            return await asyncio.wait_for(model("large"), 0.05)
        except TimeoutError:
            return await model("small")

    async def work(agent):
        answer = await ask(agent)
        if world.calls.count("small") < 2 and not pays:
            raise KeyboardInterrupt
        task = asyncio.create_task(pay())
        await world.begun("pay")
        task.cancel()
        await asyncio.wait({task})
        return answer

    pays = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(opened().arun(work))
    pays.append(1)
    agent = opened()
    with pytest.raises(errors.InDoubt):
        asyncio.run(agent.arun(work))
    assert world.calls == ["large", "small", "pay"]
    assert [(one.tool, one.status) for one in agent.effects()] == [
        ("cancelling.model", "cancelled"),
        ("cancelling.model", "done"),
        ("cancelling.pay", "in doubt"),
    ]


def test_an_async_batch_that_is_cancelled_goes_on(tmp_path, world):
    stuck = [True]

    @holdfast.tool(effect="read", name="cancelling.ask")
    async def ask(item):
        world.calls.append(item)
        if stuck[0] and item == 2:
            await asyncio.Event().wait()
        return item

    @holdfast.durable
    async def each(item):
        return await ask(item)

    async def main(store):
        task = asyncio.ensure_future(store.amap(each, range(4), name="batch"))
        await world.begun(2)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    with holdfast.open(tmp_path / "s") as store:
        asyncio.run(main(store))
    stuck[0] = False

    async def finish(store):
        async with asyncio.timeout(HANG_S):
            return await store.amap(each, range(4), name="batch")

    with holdfast.open(tmp_path / "s") as store:
        assert asyncio.run(finish(store)) == [0, 1, 2, 3]


PROGRAM = """
import asyncio, signal, sys
from pathlib import Path
import holdfast

signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background inherits that it is ignored
calls = Path(sys.argv[2])

@holdfast.tool(effect=sys.argv[3])
async def look(name: str) -> str:
    with calls.open("a") as log:
        print(name, file=log)
    print(name, flush=True)
    if name == "second" and sys.argv[4] == "slow":
        await asyncio.sleep(600)
    return name

@holdfast.durable
async def work(agent):
    return [await look("first"), await look("second"), await look("third")]

store = holdfast.open(sys.argv[1])
print(asyncio.run(store.agent("trip-7").arun(work)), flush=True)
"""


@pytest.mark.parametrize("kind", ["read", "idempotent"])
def test_ctrl_c_and_again(tmp_path, kind):
    program, calls = tmp_path / "agent.py", tmp_path / "calls"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "store"), str(calls), kind]
    with warm.Popen([*command, "slow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while "second" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in said
    done = warm.run([*command, "fast"], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['first', 'second', 'third']"
    assert Path(calls).read_text().split() == ["first", "second", "second", "third"]
