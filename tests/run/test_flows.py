"""Flows of control in an order that nobody gave them: sets of coroutines, streams, calls inside of calls."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast import errors
from holdfast.run import effects
from holdfast.run.tools import tool
from tests.conftest import SOAK
from tests.run.bench import Bench, Crash
from tests.run.test_concurrency import crash

# -- sets of coroutines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60 if SOAK else 3))
def test_as_completed_goes_through_tasks_in_any_order_and_replays_all_the_same(seed):
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

        tasks = [asyncio.create_task(one(number)) for number in range(10)]
        found = [await done for done in asyncio.as_completed(tasks)]
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


@pytest.mark.parametrize("kind", [list, set])
def test_as_completed_of_coroutines_is_refused(kind):
    @tool(effect="read")
    async def look(number):
        return number

    async def work(agent):
        given = kind(look(number) for number in range(3))
        try:
            return [await done for done in asyncio.as_completed(given)]
        finally:
            for one in given:
                one.close()

    with pytest.raises(errors.BadOption, match="create_task"):
        asyncio.run(Bench().arun(work))


# -- streams ----------------------------------------------------------------------------------------------------


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
