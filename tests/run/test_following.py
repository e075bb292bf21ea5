"""Items of streams: kept as they come, and followed from elsewhere."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

import holdfast
from holdfast import errors
from holdfast.run import records, streams
from tests import warm
from tests.run import streaming_child as program
from tests.run.bench import Crash

HANG_S = 180


def brief(found):
    return [(one.attempt, one.index, one.item) for one in found]


def test_a_killed_process_leaves_what_it_has_received_and_who_follows_is_told_that_it_begins_again(tmp_path):
    path = tmp_path / "store"
    holdfast.open(path).close()
    words = [sys.executable, "-m", "tests.run.streaming_child", str(path)]
    with warm.Popen(words) as process, holdfast.open(path) as store:
        try:
            end = time.monotonic() + HANG_S
            while not store.runs() and time.monotonic() < end:
                time.sleep(0.01)
            following = store.follow(store.runs()[0])
            first = [next(following) for _ in range(3)]
        finally:
            process.kill()
            process.wait()
        assert brief(first) == [(1, 0, [0, 0]), (1, 1, [1, 0]), (1, 2, [2, 0])]
        agent = store.agent("trip")
        (effect,) = agent.effects()
        assert (effect.tool, effect.kind, effect.status) == ("streaming.words", "read", "open")
        assert effect.partial == [[0, 0], [1, 0], [2, 0]]
        given = [[0, 3], [1, 3], [2, 3], "end"]
        assert agent.resume("one") == given
        again = [(2, -1, None), *((2, index, item) for index, item in enumerate(given))]
        assert brief(following) == again
        assert brief(store.follow("trip", "one")) == brief(first) + again
        (effect,) = agent.effects()
        assert (effect.status, effect.result, effect.partial) == ("done", given, [])
        assert store.verify().ok
    assert program.work.durable.name == "streaming-work"


@pytest.mark.parametrize("number", [1, 5000])
def test_many_items_are_few_records_and_each_is_given_once_in_order(opened, number):
    @holdfast.tool(name="following.count", effect="read", stream=True)
    def count():
        yield from range(number)

    @holdfast.durable(name="work")
    def work(agent):
        return sum(1 for _ in count())

    agent = opened()
    began = time.monotonic()
    assert agent.run(work) == number
    took = time.monotonic() - began
    written = [one for _, one in agent._host.ledger.records() if isinstance(one, records.Progress)]
    assert 1 <= len(written) <= 2 + number / streams.KEEP_MAX + 2 * took / streams.KEEP_S
    found = list(agent._store.follow("trip-7", agent.runs()[0].id))
    assert [one.item for one in found] == list(range(number))
    assert {(one.attempt, one.path, one.tool) for one in found} == {(1, "0", "following.count")}


@pytest.mark.parametrize("effect", ["idempotent", "write"])
def test_a_stream_that_changes_something_keeps_its_items_when_it_is_interrupted(opened, effect):
    @holdfast.tool(name="following.send", effect=effect, stream=True)
    def send():
        yield "a"
        yield "b"
        raise Crash

    @holdfast.durable(name="work")
    def work(agent):
        return list(send())

    agent = opened()
    with pytest.raises(Crash):
        agent.run(work)
    (found,) = opened().effects()
    assert (found.status, found.partial) == ("in doubt" if effect == "write" else "open", ["a", "b"])


def test_async_code_follows_while_the_run_goes_on(opened):
    seen, began = threading.Event(), asyncio.Event()

    @holdfast.tool(name="following.talk", effect="read", stream=True)
    async def talk():
        began.set()
        yield "hello"
        assert await asyncio.to_thread(seen.wait, HANG_S)  # somebody has read this before there is more
        yield "bye"

    @holdfast.durable(name="work")
    async def work(agent):
        return [word async for word in talk()]

    async def read(store):
        found = []
        async for one in store.follow("trip-7", "one"):
            found.append(one)
            seen.set()
        return found

    async def go():
        agent = opened()
        running = asyncio.create_task(agent.arun(work.options(id="one")))
        await began.wait()
        found = await asyncio.wait_for(read(agent._store), HANG_S)
        return await running, found

    result, found = asyncio.run(go())
    assert result == ["hello", "bye"]
    assert brief(found) == [(1, 0, "hello"), (1, 1, "bye")]


def test_a_pause_does_not_hold_back_what_came_before_it(opened):
    """Items that come at once are written together, whether or not another one comes."""
    began, seen = threading.Event(), threading.Event()

    @holdfast.tool(name="following.burst", effect="read", stream=True)
    def burst():
        began.set()
        yield from range(10)
        assert seen.wait(HANG_S)

    @holdfast.durable(name="work")
    def work(agent):
        return len(list(burst()))

    agent = opened()
    store = agent._store
    running = threading.Thread(target=agent.run, args=(work.options(id="one"),))
    running.start()
    assert began.wait(HANG_S)
    following = store.follow("trip-7", "one")
    assert [next(following).item for _ in range(10)] == list(range(10))
    seen.set()
    assert list(following) == []
    running.join()


def test_items_that_cannot_be_saved_and_secrets_are_kept_no_better_than_results(opened):
    agent = opened()
    agent.secret("key", "hush-hush-0123456789")

    @holdfast.tool(name="following.odd", effect="read", stream=True)
    def odd(what):
        yield "a"
        yield object() if what == "object" else "say hush-hush-0123456789"
        raise Crash

    @holdfast.durable(name="work")
    def work(agent, what):
        return list(odd(what))

    kept = {}
    for what in ("object", "secret"):
        with pytest.raises(Crash):
            agent.run(work.options(id=what), what)
        kept[what] = agent.effects(run=what)[-1].partial
        agent.cancel(what)
    assert kept["object"] == ["a"]
    assert kept["secret"][0] == "a"
    assert "hush" not in repr(kept)


def test_following_ends_with_the_run_however_that_ends(opened):
    @holdfast.tool(name="following.one", effect="read", stream=True)
    def one():
        yield 1

    @holdfast.durable(name="work")
    def work(agent):
        list(one())
        raise ValueError("out of paper")

    agent = opened()
    agent.checkpoint("before")
    store = agent._store
    with pytest.raises(ValueError, match="paper"):
        agent.run(work.options(id="one"))
    following = store.follow("trip-7", "one", wait=False)
    assert brief(following) == brief(store.follow(agent.runs()[0])) == [(1, 0, 1)]
    agent.rollback("before")
    with pytest.raises(errors.RunEnded):
        store.follow("trip-7", "one")
    with pytest.raises(errors.BadOption):
        store.follow("trip-7", "two")
