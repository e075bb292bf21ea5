"""Streams that do not get to their end: what was handed out before is handed out again."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast import errors
from holdfast.run import records
from holdfast.run.effects import Absent, Found
from holdfast.run.tools import tool
from tests.run.bench import Bench, Crash, Quick


def after_every_record(work, *, runs=lambda bench, work: bench.run(work, id="r")):
    """Run it, then go on from each of its records. Returns what it gave, each time the same."""
    first = Bench()
    given = runs(first, work)
    state = first.state.plain(first.state)
    for keep in range(1, first.ledger.count):
        bench = first.crashed(keep)
        assert runs(bench, work) == given
        assert bench.state.plain(bench.state) == state
    return given


def arun(bench, work):
    return asyncio.run(bench.arun(work, id="r"))


@pytest.mark.parametrize("size", [1, 30_000])
@pytest.mark.parametrize("raises", [(), (ConnectionError,)])
def test_a_stream_that_fails_gives_its_items_and_then_the_failure_again(size, raises):
    asked = []

    @tool(effect="read", stream=True, raises=raises)
    def words(prompt):
        asked.append(prompt)
        yield "a" * size
        yield "b" * size
        raise ConnectionError("gone" * size)

    @tool(effect="idempotent")
    def act(word):
        return word[:1]

    def work(agent):
        got = []
        try:
            for word in words("x"):
                got.append(word)  # noqa: PERF402 - what came before the failure counts
        except (errors.ToolFailed, ConnectionError) as error:
            agent.state["failed"] = type(error).__name__
        agent.state["got"] = got
        agent.checkpoint("got it")
        return act("mail"), got

    assert after_every_record(work) == ("m", ["a" * size, "b" * size])
    assert len(asked) <= 3  # only where its record was cut off


def test_an_async_stream_that_fails_does_the_same():
    @tool(effect="read", stream=True)
    async def words():
        yield "a"
        await asyncio.sleep(0)
        yield "b"
        raise ConnectionError("gone")

    @tool(effect="read")
    async def look(word):
        return word.upper()

    async def work(agent):
        agent.state["got"] = []
        got = agent.state["got"]
        try:
            async for word in words():
                got.append(await look(word))
        except errors.ToolFailed as error:
            got.append(error.error_type)
        await agent.acheckpoint("got it")
        return list(got)

    assert after_every_record(work, runs=arun) == ["A", "B", "ConnectionError"]


def test_a_stream_is_tried_again_only_before_its_first_item():
    tried = []

    @tool(effect="read", stream=True, retries=3)
    def words(first):
        tried.append(first)
        if first and len(tried) == 1:
            raise ConnectionError("not yet")
        yield "a"
        if not first:
            raise ConnectionError("gone")

    def work(agent):
        got = []
        for first in (True, False):
            try:
                got += words(first)
                got.append("end")
            except errors.ToolFailed:
                got.append("failed")
        return got

    bench = Bench()
    bench.clock = Quick()
    assert bench.run(work) == ["a", "end", "a", "failed"]
    assert tried == [True, True, False]


@pytest.mark.parametrize("answer", [Absent(), Found(["a", "b", "c"])])
def test_a_writing_stream_that_fails_is_settled_with_what_it_had_handed_out(answer):
    done = []

    @tool(stream=True, retries=3, probe=lambda effect: answer)
    def steps():
        for step in ("a", "b"):
            done.append(step)
            yield step
        raise ConnectionError("gone")

    def work(agent):
        agent.state["got"] = []
        got = agent.state["got"]
        try:
            for step in steps():
                got.append(step)
        except errors.ToolFailed:
            got.append("failed")
        agent.checkpoint("got it")
        return list(got)

    bench = Bench()
    expected = ["a", "b", "failed"] if answer == Absent() else ["a", "b", "c"]
    assert bench.run(work, id="r") == expected
    assert bench.crashed(bench.ledger.count - 1).run(work, id="r") == expected
    assert done == ["a", "b"]


def test_a_stream_that_fails_after_what_cannot_be_saved_has_lost_it():
    @tool(effect="read", stream=True)
    def locks():
        yield threading.Lock()
        raise ConnectionError("gone")

    def work(agent):
        with pytest.raises(errors.ResultLost, match="the result of locks"):
            for _ in locks():
                pass
        return "on"

    assert after_every_record(work) == "on"


def test_a_stream_that_was_cancelled_gives_its_items_before_it_is_cancelled_again():
    asked = []

    @tool(effect="read", stream=True)
    async def words():
        asked.append(1)
        yield "a"
        yield "b"
        await asyncio.Event().wait()

    @tool(effect="read")
    async def look():
        return 7

    async def work(agent):
        agent.state["got"] = []
        got = agent.state["got"]
        two = asyncio.Event()

        async def consume():
            try:
                async for word in words():
                    got.append(word)
                    if len(got) == 2:
                        two.set()
            finally:
                got.append("end")

        task = asyncio.create_task(consume())
        await two.wait()
        task.cancel()
        await asyncio.wait({task})
        await look()
        await agent.acheckpoint("got it")
        return list(got)

    bench = Bench()
    assert arun(bench, work) == ["a", "b", "end"]
    (cancelled,) = [record for _, record in bench.ledger.records() if getattr(record, "how", "") == "cancelled"]
    assert isinstance(cancelled, records.Done)
    assert arun(bench.crashed(bench.ledger.count - 1), work) == ["a", "b", "end"]
    assert asked == [1]


def test_a_stream_that_was_broken_off_and_one_that_failed_side_by_side():
    asked = []

    @tool(effect="read", stream=True)
    def words(fails):
        asked.append(fails)
        yield "a"
        if fails:
            raise ConnectionError("gone")
        yield "b"

    def work(agent):
        got = []
        for fails in (True, False):
            try:
                for word in words(fails):
                    got.append(word)
                    if not fails:
                        break
            except errors.ToolFailed:
                got.append("failed")
        if len(asked) == 2:
            asked.append("crash")
            raise Crash
        return got

    bench = Bench()
    with pytest.raises(Crash):
        bench.run(work)
    bench.ledger.flush()
    assert bench.crashed().run(work) == ["a", "failed", "a"]
    assert asked == [True, False, "crash"]
