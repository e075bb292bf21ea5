"""Flows of control in an order that nobody gave them: sets of coroutines, streams, calls inside of calls."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast import errors
from holdfast.run import effects, records
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash
from tests.run.test_concurrency import crash

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


def test_as_completed_of_what_has_no_order_is_refused():
    @tool(effect="read")
    async def look(number):
        return number

    async def work(agent):
        given = {look(number) for number in range(3)}
        try:
            return [await done for done in asyncio.as_completed(given)]
        finally:
            for one in given:
                one.close()

    with pytest.raises(errors.BadOption, match="a list"):
        asyncio.run(Bench().arun(work))


def test_as_completed_again_and_again_and_of_tasks():
    async def work(agent):
        found = []
        for first in (0, 10):
            found += [await done for done in asyncio.as_completed([put(n) for n in range(first, first + 3)])]
        tasks = [asyncio.create_task(put(n)) for n in range(20, 23)]
        return sorted(found + [await done for done in asyncio.as_completed(tasks)])

    @tool(effect="idempotent")
    async def put(number):
        return number

    bench = Bench()
    assert asyncio.run(bench.arun(work)) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    keys = [record.key for _, record in bench.ledger.records() if isinstance(record, records.Intent)]
    assert len(set(keys)) == 9


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
