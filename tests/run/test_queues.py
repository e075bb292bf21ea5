"""Queues: what is submitted waits for its turn, and no limit is exceeded, whoever works and whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter

import pytest

import holdfast
from holdfast import errors
from holdfast.run import queues
from tests.lives import worker
from tests.run import working

pytestmark = pytest.mark.usefixtures("outside")


@pytest.fixture
def declared(monkeypatch):
    """What a test declares is forgotten after it."""
    monkeypatch.setattr(queues, "QUEUES", made := dict(queues.QUEUES))
    return made


def work(store, **options):
    store.worker(**options).run(drain=True)


def most_at_once(spans):
    """How many of some spans of time overlap."""
    events = sorted((at, step) for began, ended in spans for at, step in ((began, 1), (ended, -1)))
    now, most = 0, 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


def most_within(times, seconds):
    """How many of some times fall into any stretch of so many seconds, of which the end is not part."""
    times = sorted(times)
    return max(sum(one <= other < one + seconds for other in times) for one in times)


def spans(*keys):
    return [(float(began), float(ended)) for key, _, began, ended in working.done() if key in keys]


# -- limits ----------------------------------------------------------------------------------------------------


def test_no_more_runs_of_a_queue_are_executed_at_a_time_than_it_allows(place, declared):
    holdfast.queue("pairs", concurrency=2)
    both = threading.Barrier(2, timeout=60)

    @holdfast.durable(name="working.pair", queue="pairs")
    def pair(agent):
        both.wait()

    with holdfast.open(place) as store:
        pairs = [store.submit(pair) for _ in range(4)]
        work(store)
        assert {one.status for one in pairs} == {"finished"}
        jobs = [store.submit(working.narrow, str(number), 0.02) for number in range(10)]
        workers = [threading.Thread(target=work, args=(store,)) for _ in range(2)]
        for one in workers:
            one.start()
        for one in workers:
            one.join()
        assert [one.result(0) for one in jobs] == [str(number) for number in range(10)]
        assert most_at_once(spans("narrow")) <= 2


def test_no_more_runs_begin_within_a_time_than_the_rate_allows(place):
    with holdfast.open(place) as store:
        jobs = [store.submit(working.paced, str(number)) for number in range(11)]
        began_s = time.monotonic()
        work(store)
        assert {one.status for one in jobs} == {"finished"}
        times = [began for began, _ in spans("paced")]
        assert len(times) == 11
        assert max(times) - began_s >= 2 * 0.5  # 5, then 5, then 1
        assert most_within(times, 0.5) <= 5


def test_each_partition_has_its_own_limit(place):
    with holdfast.open(place) as store:
        whose = ["greedy"] * 6 + ["modest"] * 2
        for number, one in enumerate(whose):
            store.submit(working.tenant.options(partition=one, id=str(number)), one, 0.03)
        work(store)
        assert Counter(line[0] for line in working.done()) == {"greedy": 6, "modest": 2}
        assert most_at_once(spans("greedy")) == most_at_once(spans("modest")) == 1
        assert most_at_once(spans("greedy", "modest")) <= 2


def test_a_full_partition_keeps_no_other_from_beginning(place, declared):
    holdfast.queue("shared", concurrency=4, partition_concurrency=1)
    came = threading.Event()

    @holdfast.durable(name="working.shared", queue="shared")
    def shared(agent, who):
        if who == "modest":
            came.set()
        assert came.wait(60)

    with holdfast.open(place) as store:
        for who in ["greedy"] * 6 + ["modest"]:
            store.submit(shared.options(partition=who), who)
        work(store)
        assert {one.status for one in store.runs()} == {"finished"}


def test_those_of_higher_priority_come_first_and_then_the_oldest(place, declared):
    holdfast.queue("one", concurrency=1)
    order = []

    @holdfast.durable(name="working.ordered", queue="one")
    def ordered(agent, what):
        order.append(what)

    with holdfast.open(place) as store:
        for what, priority in (("a", 0), ("b", -5), ("c", 7), ("d", 0), ("e", 7)):
            store.submit(ordered.options(priority=priority), what)
        assert [info.ahead for info in sorted(store.runs(), key=lambda info: info.args["what"])] == [2, 4, 0, 3, 1]
        work(store)
        assert order == ["c", "e", "a", "d", "b"]


def test_a_run_that_waits_gives_its_place_in_the_queue_back_and_needs_one_to_go_on(place):
    with holdfast.open(place) as store:
        waits = [store.submit(working.waiter, str(number)) for number in range(3)]
        others = [store.submit(working.narrow, str(number)) for number in range(3)]
        work(store)
        assert {one.status for one in waits} == {"waiting"}
        assert {one.status for one in others} == {"finished"}
        for one in waits:
            store.signal(one.agent, "go", "now")
        work(store)
        assert {one.result(0) for one in waits} == {"now"}


def test_a_run_that_goes_on_does_not_wait_for_the_rate(place, declared):
    holdfast.queue("rare", rate=(1, 3600))
    entered = []

    @holdfast.durable(name="working.rare", queue="rare")
    def rare(agent, what):
        entered.append(what)
        return agent.wait_for("go")

    with holdfast.open(place) as store:
        first, second = store.submit(rare, "first"), store.submit(rare, "second")
        worker = store.worker()
        thread = threading.Thread(target=worker.run)
        thread.start()
        while first.status != "waiting":
            time.sleep(0.01)
        store.signal(first.agent, "go", 1)
        assert first.result(180) == 1
        worker.stop()
        thread.join()
        assert (second.status, entered) == ("queued", ["first", "first"])


def test_a_full_queue_keeps_no_other_run_from_beginning(place, declared):
    holdfast.queue("stuck", concurrency=1)
    begun, go = threading.Event(), threading.Event()

    @holdfast.durable(name="working.stuck", queue="stuck")
    def stuck(agent):
        begun.set()
        assert go.wait(180)

    with holdfast.open(place) as store:
        held = [store.submit(stuck) for _ in range(20)]
        worker = store.worker(concurrency=4)
        thread = threading.Thread(target=worker.run, kwargs={"drain": True})
        thread.start()
        assert begun.wait(180)
        assert store.submit(working.narrow, "x").result(180) == "x"
        assert Counter(one.status for one in held) == {"queued": 19, "running": 1}
        (info,) = [one for one in store.queues() if one.name == "stuck"]
        assert (info.running, info.waiting, info.limits) == (1, 19, "1 at a time")
        go.set()
        thread.join()
        assert {one.status for one in held} == {"finished"}


def test_a_claim_whose_holder_is_gone_does_not_count(place):
    with holdfast.open(place) as store:
        killed, other = store.submit(working.once_deadly, "x"), store.submit(working.once_deadly, "y")
        assert worker(place, working.__file__, "--drain").wait() == -signal.SIGKILL
        working.freed(store)
        assert (killed.status, other.status) == ("interrupted", "queued")
        assert len(store._db.view.rows("claim")) == 1
        work(store)
        assert (killed.result(0), other.result(0)) == ("x", "y")


def test_the_clock_that_is_set_back_stops_no_queue(tmp_path, declared, monkeypatch):
    holdfast.queue("timed", rate=(1, 60))

    @holdfast.durable(name="working.timed", queue="timed")
    def timed(agent):
        pass

    with holdfast.open(tmp_path / "store") as store:
        store.submit(timed)
        work(store)
        claims = store._db.view.rows("claim")
        early = claims[0][5] - 3_600_000_000
        monkeypatch.setattr(type(store._db.engine), "clock", lambda _: early)
        monkeypatch.setattr("holdfast.store.sqlite.SqliteTx.clock", lambda _: early)
        second = store.submit(timed)
        worker = store.worker()
        thread = threading.Thread(target=worker.run)
        thread.start()
        while max(row[5] for row in store._db.view.rows("claim")) > early:
            time.sleep(0.01)
        worker.stop()
        thread.join()
        assert second.status == "queued"
        assert max(row[5] for row in store._db.view.rows("claim")) == early


# -- declarations ------------------------------------------------------------------------------------------------


def test_a_queue_is_declared_once(declared):
    made = holdfast.queue("twice", concurrency=4, rate=(10, 60))
    assert holdfast.queue("twice", concurrency=4, rate=(10, 60)) == made
    with pytest.raises(errors.BadOption, match="4 at a time, 10 within 60 s, and now with 5 at a time"):
        holdfast.queue("twice", concurrency=5)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"concurrency": value} for value in (0, -1, 1.5, True, "4", 10**9)),
        *(
            {"rate": value}
            for value in (10, (0, 60), (10, 0), (10, float("nan")), (10, float("inf")), (1, 2, 3), "10/60")
        ),
        {"partition_concurrency": 0},
        {"partition_rate": (1, -1)},
    ],
)
def test_numbers_that_are_no_limit_are_refused(wrong, declared):
    with pytest.raises(errors.BadOption):
        holdfast.queue("wrong", **wrong)
    assert "wrong" not in declared


@pytest.mark.parametrize("name", ["", "x" * 101, "a\0b", "\ud800", 7])
def test_names_that_cannot_be_are_refused(name, declared):
    with pytest.raises(errors.BadOption):
        holdfast.queue(name)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"priority": value} for value in (501, -501, 1.5, True, "1")),
        *({"partition": value} for value in ("", "x" * 201, "a\0b", 7)),
    ],
)
def test_a_place_in_a_queue_that_cannot_be_is_refused_and_nothing_is_submitted(tmp_path, wrong):
    with holdfast.open(tmp_path / "store") as store:
        with pytest.raises(errors.BadOption):
            store.submit(working.narrow.options(**wrong), "x")
        assert not store.runs()


def test_a_queue_that_nobody_has_declared_takes_nothing(tmp_path):
    @holdfast.durable(name="working.misspelt", queue="nrrow")
    def misspelt(agent):
        pass

    with holdfast.open(tmp_path / "store") as store:
        with pytest.raises(errors.BadOption, match="nobody has declared the queue 'nrrow'"):
            store.submit(misspelt)
        with pytest.raises(errors.BadOption, match="nobody has declared"):
            store.agent("a").submit(misspelt)
        assert not store.runs()


def test_a_worker_that_declares_other_numbers_is_refused_and_told_the_way_out(place, declared):
    with holdfast.open(place) as store:
        store.submit(working.narrow, "x")
        declared["narrow"] = queues.Queue("narrow", 7, (3, 1.5))
        with pytest.raises(errors.QueueDiffers) as caught:
            work(store)
        assert "holdfast queues set narrow --concurrency=7 --rate=3/1.5" in caught.value.hint
        store.set_queue("narrow", partition_concurrency=9)
        with pytest.raises(errors.QueueDiffers) as caught:
            work(store)
        assert "--partition-concurrency=none" in caught.value.hint
        assert store.runs()[0].status == "queued"
        store.submit(working.narrow, "y")  # what is to be done can be said all the same
        store.set_queue("narrow", concurrency=7, rate=(3, 1.5), partition_concurrency=None)
        work(store)
        assert {run.status for run in store.runs()} == {"finished"}


def test_a_limit_that_is_not_given_stays_and_none_lifts_one(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        store.set_queue("mail", concurrency=4, rate=(10, 60))
        assert store.set_queue("mail", partition_concurrency=1).limits == (
            "4 at a time, 10 within 60 s, 1 at a time in each partition"
        )
        assert store.set_queue("mail", rate=None, partition_concurrency=None).limits == "4 at a time"
        with pytest.raises(errors.BadOption):
            store.set_queue("mail", concurrency=0)
        assert [one.limits for one in store.queues()] == ["4 at a time"]


def test_limits_that_are_changed_count_at_once_for_workers_that_are_at_it(place):
    with holdfast.open(place) as store:
        worker = store.worker()
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert store.submit(working.narrow, "first").result(180) == "first"
        store.set_queue("narrow", concurrency=1)
        jobs = [store.submit(working.narrow, str(number), 0.02) for number in range(5)]
        assert [one.result(180) for one in jobs] == [str(number) for number in range(5)]
        worker.stop()
        thread.join()
        assert most_at_once(spans("narrow")) == 1


def test_runs_of_a_queue_that_nobody_knows_any_more_are_left_alone_until_somebody_does(tmp_path, declared):
    with holdfast.open(tmp_path / "store") as store:
        job = store.submit(working.narrow, "x")
        store._db.change(lambda change: change.set_fact("queues", None))
        declared.pop("narrow")
        worker = store.worker()
        assert next(worker._find(), None) is None
        assert [(one.name, one.waiting) for one in store.queues()] == [("narrow", 1)]
        store.set_queue("narrow")
        work(store)
        assert job.result(0) == "x"


def test_an_encrypted_store_says_nothing_of_queues_and_keeps_their_limits(tmp_path):
    with holdfast.open(tmp_path / "store", key=b"k" * 32) as store:
        jobs = [store.submit(working.tenant.options(partition="acme"), "acme", 0.01) for _ in range(3)]
        work(store)
        assert {one.result(0) for one in jobs} == {"acme"}
        assert most_at_once(spans("acme")) == 1
        assert store.verify().ok
    raw = b"".join(path.read_bytes() for path in (tmp_path / "store").glob("store.db*"))
    assert b"tenants" not in raw
    assert b"acme" not in raw


def test_limits_go_along_with_a_store_that_is_moved_and_runs_keep_their_places(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        store.submit(working.narrow.options(id="low"), "low")
        store.submit(working.narrow.options(id="high", priority=9), "high")
        store.set_queue("narrow", concurrency=1)
        with holdfast.open(tmp_path / "new") as new:
            store.move(new)
            assert {run.id: run.ahead for run in new.runs()} == {"high": 0, "low": 1}
            assert [(one.name, one.concurrency) for one in new.queues()] == [("narrow", 1)]
            assert new.verify().ok


def test_repair_keeps_places_and_limits_and_forgets_who_was_at_work(tmp_path, declared):
    holdfast.queue("often", rate=(1000, 3600))

    @holdfast.durable(name="working.often", queue="often")
    def often(agent):
        return agent.wait_for("go")

    with holdfast.open(tmp_path / "store") as store:
        job = store.submit(often.options(priority=3))
        work(store)
        store.submit(often.options(id="second", partition="p", priority=3))
        assert len(store._db.view.rows("claim")) == 1
        rows = store._db.view.rows("open")
    holdfast.repair(tmp_path / "store", tmp_path / "mended")
    with holdfast.open(tmp_path / "mended") as mended:
        assert mended._db.view.rows("open") == rows
        assert not mended._db.view.rows("claim")
        assert {one.name: one.rate for one in mended.queues()}["often"] == (1000, 3600)
        assert job.id in {run.id for run in mended.runs()}
        assert mended.verify().ok


def test_a_damaged_claim_stops_nobody(tmp_path):
    with holdfast.open(tmp_path / "store") as store:
        store.submit(working.paced, "x")
        work(store)
        store._db.change(lambda change: change.tx.do("UPDATE claim SET first = first - 1"))
        assert not store.verify().ok
        store.submit(working.paced, "y")
        work(store)
        assert [line[1] for line in working.done()] == ["x", "y"]


# -- looking --------------------------------------------------------------------------------------------------------


def test_a_full_queue_costs_a_worker_nothing_however_many_wait(tmp_path, declared):
    """What a look reads does not grow with what waits in a queue without room."""
    holdfast.queue("full", concurrency=1)
    begun, go = threading.Event(), threading.Event()

    @holdfast.durable(name="working.full", queue="full")
    def full(agent):
        begun.set()
        assert go.wait(60)

    with holdfast.open(tmp_path / "store", durability="batched") as store:
        jobs = [store.submit(full.options(id=str(number))) for number in range(300)]
        worker = store.worker()
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert begun.wait(180)
        other = store.worker()
        assert next(other._find(), None) is None
        read, run = [], store._db.engine.run
        store._db.engine.run = lambda sql, args=(): read.append(found := run(sql, args)) or found
        try:
            assert next(other._find(), None) is None
            assert sum(len(rows) for rows in read) < 100
        finally:
            del store._db.engine.run
        assert next(other._find(full=True), None) is not None
        worker.end()
        go.set()
        thread.join()
        worker.stop()
        assert jobs[0].status == "finished"


# -- one agent, one run at a time ---------------------------------------------------------------------------------


def test_a_second_run_of_an_agent_waits_for_its_turn_or_is_refused(tmp_path):
    begun, go = threading.Event(), threading.Event()

    @holdfast.durable(name="working.first")
    def first(agent):
        begun.set()
        assert go.wait(180)
        agent.state["order"] = ["first"]

    @holdfast.durable(name="working.second")
    def second(agent):
        agent.state["order"].append("second")
        return list(agent.state["order"])

    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("a")
        thread = threading.Thread(target=agent.run, args=(first,))
        thread.start()
        assert begun.wait(180)
        with pytest.raises(errors.RunUnfinished, match="is executing a run"):
            agent.run(second)
        with pytest.raises(errors.RunUnfinished, match="is executing a run"):
            agent.run(second.options(turn_s=0.05))

        async def later():
            waits = asyncio.ensure_future(agent.arun(second.options(turn_s=180)))
            await asyncio.sleep(0)
            go.set()  # the loop goes on meanwhile
            return await waits

        assert asyncio.run(later()) == ["first", "second"]
        thread.join()


def test_inside_its_own_run_a_turn_never_comes_and_that_is_said_at_once(tmp_path):
    @holdfast.durable(name="working.inner")
    def inner(agent):
        pass

    @holdfast.durable(name="working.nesting")
    def nesting(agent):
        agent.run(inner.options(turn_s=3600))

    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("a")
        with pytest.raises(errors.RunUnfinished, match="Inside a run, call the function itself"):
            agent.run(nesting)
        with pytest.raises(errors.BadOption, match="a turn of -1"):
            agent.run(inner.options(turn_s=-1))


# -- under fire ------------------------------------------------------------------------------------------------------


def test_workers_that_are_killed_exceed_no_limit_and_do_everything_once(place, rounds):
    count, chance = rounds(40, 300), random.Random(int(os.environ.get("SEED", "1")))

    with holdfast.open(place) as store:
        jobs = [store.submit(working.mail, str(number)) for number in range(count)]
        workers = [worker(place, working.__file__) for _ in range(2)]
        end_s = time.monotonic() + 240
        while any(one.status != "finished" for one in jobs) and time.monotonic() < end_s:
            time.sleep(chance.uniform(0.4, 1.2))
            victim = chance.randrange(2)
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = worker(place, working.__file__)
        for one in workers:
            one.kill()
            one.wait()
        assert [one.result(0) for one in jobs] == [[f"{n}-a", f"{n}-b"] for n in range(count)]

    done = working.done()
    paid = Counter(line[1] for line in done if line[0] != "entered")
    assert paid == {f"{n}-{part}": 1 for n in range(count) for part in "ab"}
    assert most_at_once([(float(line[2]), float(line[3])) for line in done if line[0] != "entered"]) <= 3
    entered_s = {}
    for line in done:
        if line[0] == "entered":
            entered_s.setdefault(line[1], float(line[2]))
    assert entered_s.keys() == {str(number) for number in range(count)}
    assert most_within(entered_s.values(), 0.5) <= 8
