"""Writing takes time: what async programs and threads may do meanwhile, and what a failed write leaves behind."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from contextlib import suppress

import pytest

import holdfast
from holdfast.errors import DiskFull, Stale
from tests.conftest import unsaved


@pytest.fixture
def agent(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        step(agent, "one")
        yield agent


def step(agent, label):
    agent.state.setdefault("steps", []).append(label)
    return agent.checkpoint(label)


def seen(state):
    return list(state["steps"])


@pytest.fixture
def before_commits(agent, monkeypatch):
    """Does something before each commit, in the thread that makes it."""

    def make(call):
        engine = agent._db.engine
        real = engine.transaction

        def transaction(work, begun=None):
            call()
            return real(work, begun)

        monkeypatch.setattr(engine, "direct", lambda sql, args: False)
        monkeypatch.setattr(engine, "transaction", transaction)

    return make


@pytest.fixture
def held(before_commits):
    """Commits that say when one has begun, and wait until they may go on."""
    begun, may_go = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert may_go.wait(180)

    before_commits(hold)
    return begun, may_go


def test_acheckpoint_does_not_block_the_loop(agent, held):
    """The commit goes on only when the loop has gone round while it stood."""
    begun, may_go = held

    async def main():
        agent.state["steps"].append("two")
        task = asyncio.ensure_future(agent.acheckpoint("two"))
        assert await asyncio.to_thread(begun.wait, 180)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        may_go.set()
        return await task

    assert asyncio.run(main()).label == "two"
    assert seen(agent.at("two").state) == ["one", "two"]


@unsaved
def test_content_is_fixed_before_the_first_await(agent, held):
    _, may_go = held

    async def main():
        agent.state["steps"].append("two")
        task = asyncio.ensure_future(agent.acheckpoint("two"))
        await asyncio.sleep(0)
        agent.state["steps"].append("too late")
        may_go.set()
        return await task

    made = asyncio.run(main())
    assert seen(made.state) == ["one", "two"]
    assert seen(agent.state) == ["one", "two", "too late"]
    assert agent.dirty


def test_many_concurrent_acheckpoints_keep_their_order(agent, rounds):
    count = rounds(60, 2_000)

    async def main():
        tasks = []
        for number in range(count):
            agent.state["steps"].append(str(number))
            tasks.append(asyncio.ensure_future(agent.acheckpoint(str(number))))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    made = asyncio.run(main())
    assert [c.label for c in made] == [str(n) for n in range(count)]
    log = agent.log()[-2::-1]
    assert [c.label for c in log] == [str(n) for n in range(count)]
    for number in (0, 1, count // 2, count - 1):
        assert seen(log[number].state) == ["one", *(str(n) for n in range(number + 1))]
    assert agent._store.verify().ok


def test_a_cancelled_acheckpoint_is_written_all_the_same(agent, held):
    begun, may_go = held

    async def main():
        agent.state["steps"].append("two")
        task = asyncio.ensure_future(agent.acheckpoint("two"))
        await asyncio.to_thread(begun.wait, 180)
        task.cancel()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    made = step(agent, "three")
    assert [c.label for c in agent.log()] == ["three", "two", "one"]
    assert seen(made.state) == ["one", "two", "three"]


def test_changes_during_a_slow_write_belong_to_the_next_checkpoint(agent, held):
    begun, may_go = held
    agent.state["steps"].append("two")
    thread = threading.Thread(target=agent.checkpoint, args=("two",))
    thread.start()
    assert begun.wait(180)
    agent.state["steps"].append("three")
    may_go.set()
    thread.join()
    agent.checkpoint("three")
    assert seen(agent.at("two").state) == ["one", "two"]
    assert seen(agent.at("three").state) == ["one", "two", "three"]


def test_reading_and_moving_while_others_write(agent, before_commits, rounds):
    """rollback, undo and reading from one thread, checkpoints from others: no deadlock, and the history is sound."""
    before_commits(lambda: time.sleep(0.002))  # as on a busy disk
    stop = threading.Event()
    failures = []

    def work(call):
        try:
            while not stop.is_set():
                call()
        except BaseException as error:
            failures.append("".join(traceback.format_exception(error)))

    def write():
        with suppress(Stale):  # the other thread may take the list away between the two calls
            agent.state.setdefault("steps", []).append("x")
        agent.checkpoint("x")

    def move():
        agent.rollback(agent.log(limit=5)[-1])
        agent.undo()

    def look():
        agent.diff()
        assert agent.at().state is not None
        assert agent.dirty in {True, False}

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in (write, write, move, look)]
    for thread in threads:
        thread.start()
    time.sleep(rounds(2, 60))
    stop.set()
    for thread in threads:
        thread.join(timeout=180)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert not failures, failures[0]
    report = agent._store.verify()
    assert report.ok, str(report)


def test_a_failed_write_goes_into_the_next_checkpoint(agent, before_commits, monkeypatch):
    def fail():
        raise DiskFull("no room")

    before_commits(fail)
    agent.state["steps"].append("two")
    agent.state["big"] = {f"key {n}": "v" * 100 for n in range(500)}
    agent.state["bulk"] = b"x" * 300_000
    for _ in range(2):
        with pytest.raises(DiskFull):
            agent.checkpoint("failed")
    assert agent.dirty
    agent.state["steps"].append("three")
    monkeypatch.undo()
    made = agent.checkpoint("worked")
    assert seen(made.state) == ["one", "two", "three"]
    assert len(made.state["big"]) == 500
    assert made.state["bulk"] == b"x" * 300_000
    assert [c.label for c in agent.log()] == ["worked", "one"]
    assert agent._store.verify().ok
