"""Handing over and picking up: one transaction each, and only what ends its worker counts as a vain try."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time

import pytest

import holdfast
from holdfast import errors
from holdfast.run.durables import DURABLES
from tests.run import working


@pytest.fixture
def store(tmp_path, outside):
    with holdfast.open(tmp_path / "store") as store:
        yield store


def commits(store) -> int:
    """How often anything was committed, as another connection sees it."""
    return store._db.stamp()


def test_what_is_refused_leaves_no_agent_behind(store):
    with pytest.raises(errors.Unencodable):
        store.submit(working.job, threading.Lock())
    with pytest.raises(errors.BadOption):
        store.submit(working.job.options(limit_s=-1), "x")
    with pytest.raises(errors.BadOption):
        store.submit(working.job.options(id="x" * 201), "x")
    with pytest.raises(TypeError):
        store.submit(working.job, "x", "one too many")
    assert not store.agents()
    assert not store.runs()


def test_a_run_is_handed_over_in_one_commit_with_its_agent(store):
    store.submit(working.job, "warm")
    before = commits(store)
    store.submit(working.job, "x")
    assert commits(store) == before + 1
    assert store.verify().ok


def test_long_arguments_are_handed_over_too(store):
    text = "long " * 200_000
    job = store.submit(_length, text)
    assert store.submit(_length.options(id="again"), text).info.args == {"text": text}
    store.worker().run(drain=True)
    assert job.result(0) == len(text)
    assert store.verify().ok


@holdfast.durable(name="working.length")
def _length(agent, text):
    return len(text)


def test_a_run_whose_time_was_over_before_anybody_came_is_told_so(store):
    job = store.submit(working.job.options(limit_s=0.001), "x")
    while job.info.limit.timestamp() > time.time():
        time.sleep(0.001)
    store.worker().run(drain=True)
    assert job.status == "cancelled"
    assert not working.done()


def test_code_that_does_not_fit_is_no_vain_try_however_often_somebody_comes_with_it(store, monkeypatch):
    agent = store.agent("a")
    with pytest.raises(errors.Waiting):
        agent.run(working.pays_and_waits.options(id="7", wait=False), "x")
    agent.close()
    store.signal("a", "go", run="7")
    right = DURABLES["working.pays_and_waits"].function
    monkeypatch.setattr(DURABLES["working.pays_and_waits"], "function", lambda agent, what: working.pay("other"))
    for _ in range(4):
        became = []
        store.worker(tell=became.append).run(drain=True)
        assert [one.became for one in became] == ["code changed"]
    monkeypatch.setattr(DURABLES["working.pays_and_waits"], "function", right)
    store.worker().run(drain=True)
    assert store.runs("a")[0].status == "finished"


def test_a_worker_that_drains_ends_when_all_that_it_did_is_told(store):
    told = []

    def tell(worked):
        time.sleep(0.3)  # more than a worker waits between two looks
        told.append(worked.agent)

    agents = [store.submit(_length, name).agent for name in "abc"]
    store.worker(tell=tell).run(drain=True)
    assert sorted(told) == sorted(agents)


def test_an_agent_that_cannot_be_opened_for_a_while_is_no_vain_try(tmp_path):
    place = tmp_path / "store"

    def put(data: bytes) -> bytes:
        base = sqlite3.connect(place / "store.db")
        with base:
            (before,) = base.execute("SELECT data FROM loose").fetchone()
            base.execute("UPDATE loose SET data = ?", (data,))
        base.close()
        return before

    with holdfast.open(place) as store:
        store.submit(_length.options(id="7"), "x")
    whole = put(b"\0")
    with holdfast.open(place) as store:
        for _ in range(4):
            became = []
            store.worker(tell=became.append).run(drain=True)
            assert [one.became for one in became] == ["left"]
    put(whole)
    with holdfast.open(place) as store:
        store.worker().run(drain=True)
        assert store.runs()[0].result == 1


def test_whoever_has_the_agent_open_is_not_passed_over(store):
    job = store.submit(working.job.options(id="7"), "x")
    with store.agent(job.agent) as mine:
        became = []
        store.worker(tell=became.append).run(drain=True)
        assert (became, job.status) == ([], "queued")
        assert mine.run(working.job.options(id="7"), "x") == ["x-a", "x-b"]
    assert [line[1] for line in working.done()] == ["x-a", "x-b"]


def test_one_of_many_who_pick_up_gets_a_run(place, outside):
    with holdfast.open(place) as store:
        jobs = [store.submit(working.job, str(n)) for n in range(30)]
        workers = [store.worker(concurrency=8) for _ in range(4)]
        threads = [threading.Thread(target=one.run, kwargs={"drain": True}) for one in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while any(one.status != "finished" for one in jobs):  # some sleep
            store.worker().run(drain=True)
        assert [one.result(5) for one in jobs] == [[f"{n}-a", f"{n}-b"] for n in range(30)]
        assert outside() == {f"{n}-{part}": 1 for n in range(30) for part in "ab"}
        assert store.verify().ok


def test_an_outcome_that_was_given_out_is_in_the_store(store):
    """As another process reads it, which knows nothing of what is still in memory here."""
    seen = []

    @holdfast.tool(name="working.watched")
    def watched(number):
        return number

    def stored() -> int:
        with sqlite3.connect(f"file:{store.path}/store.db?mode=ro", uri=True) as other:
            return other.execute("SELECT max(count) FROM branch").fetchone()[0]

    @holdfast.durable(name="working.watching")
    def watching(agent):
        for number in range(3):
            watched(number)
            seen.append(stored())

    store.agent("a").run(watching)
    assert seen == [3, 5, 7]


def test_outcomes_of_many_flows_are_in_the_store_when_they_are_given_out(store):
    @holdfast.tool(name="working.awaited")
    async def awaited(number):
        await asyncio.sleep(0)
        return number

    async def flows(agent):
        return await asyncio.gather(*(awaited(number) for number in range(20)))

    agent = store.agent("a")
    assert asyncio.run(agent.arun(flows)) == list(range(20))
    assert len(agent.effects()) == 20
    assert store.verify().ok
