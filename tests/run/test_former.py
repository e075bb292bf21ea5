"""Workers that are stopped, cut off or elsewhere: nothing is done twice, whoever believes what about whom."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

import holdfast
from holdfast import errors
from tests import postgres, warm
from tests.lives import worker
from tests.run import leased, working

LEASE, OTHER = "&lease_s=0.3", "&application_name=other"


@pytest.fixture(autouse=True)
def _unsafe(monkeypatch):
    monkeypatch.setenv("HOLDFAST_ALLOW_UNSAFE_POSTGRES", "1")  # the server does not flush


@pytest.fixture
def place(postgres_url, outside):
    return postgres_url + LEASE


@pytest.fixture
def stopping(place):
    """``stopping(*before)``: a worker that has stopped itself between an intent and its call."""
    begun = []

    def begin(*before):
        words = [*before, sys.executable, "-m", "tests.run.leased", place + OTHER]
        one = (subprocess if before else warm).Popen(words, stdout=subprocess.DEVNULL)
        begun.append(one)
        end_s = time.monotonic() + 180
        while not any(state(pid) == "T" for pid in family(one.pid)):
            assert one.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.01)
        return one

    yield begin
    for one in begun:
        for pid in family(one.pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        one.kill()
        one.wait()


def state(pid) -> str:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def family(pid) -> list[int]:
    """A process, and those below it."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):
        for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += family(int(one))
    return found


def cut(place, whose="other") -> None:
    """End sessions of the server; their processes are not told."""
    with psycopg.connect(place.removesuffix(LEASE), autocommit=True) as session:
        session.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = %s"
            " AND datname = current_database()",
            (whose,),
        )


def work(store, job, status="finished", limit_s=180) -> None:
    """Work until the run has this status."""
    end_s = time.monotonic() + limit_s
    while job.status != status:
        assert time.monotonic() < end_s, f"{job.status} {job.info.error}"
        store.worker().run(drain=True)
        time.sleep(0.01)


def test_a_worker_that_is_stopped_is_passed_over_and_does_nothing_when_it_wakes(place, outside, stopping):
    with holdfast.open(place) as store:
        job = store.submit(leased.job, "x")
        other = stopping()
        work(store, job)
        assert (job.result(0), outside()) == ("x", {"x": 1})
        other.send_signal(signal.SIGCONT)
        other.wait(180)
        assert outside() == {"x": 1}


def test_a_worker_that_was_cut_off_may_still_call_so_its_call_is_waited_for(place, outside, stopping):
    with holdfast.open(place.replace("0.3", "2")) as store:
        job = store.submit(leased.job, "x")
        other = stopping()
        cut(place)  # its lock is free now, and it does not know
        work(store, job, "waiting")
        assert outside() == {}
        other.send_signal(signal.SIGCONT)
        work(store, job)
        other.wait(180)
        assert (job.result(0), outside()) == ("x", {"x": 1})


def test_without_a_time_limit_nobody_knows_when_the_call_of_another_is_over(place, outside, stopping):
    with holdfast.open(place) as store:
        job = store.submit(leased.job, "x", timed=False)
        other = stopping()
        cut(place)
        work(store, job, "needs attention")
        assert "leased.untimed has no timeout_s" in job.info.error
        other.kill()
        other.wait()
        with store.agent(job.agent) as agent:
            assert agent.resume(job.id) == "x"  # now it is known to have ended
        assert outside() == {"x": 1}


def test_who_resumes_a_run_by_hand_waits_for_the_call_of_another(place, outside, stopping):
    with holdfast.open(place) as store:
        job = store.submit(leased.job, "x")
        stopping()
        cut(place)
        with store.agent(job.agent, wait_s=180) as agent:
            began_s = time.monotonic()
            with pytest.raises(errors.Waiting, match="another process may still be making a call"):
                agent.resume(job.id, wait=False)
            assert agent.resume(job.id) == "x"
            assert time.monotonic() - began_s > 0.6  # the lease, and what the call may take
        assert outside() == {"x": 1}


@pytest.mark.root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("timed", [True, False])
def test_nobody_is_proven_dead_in_another_container(place, outside, stopping, timed):
    with holdfast.open(place) as store:
        job = store.submit(leased.job, "x", timed=timed)
        # The first process of such a container cannot be stopped from inside.
        other = stopping("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; true', "sh")
        other.kill()
        other.wait()
        work(store, job, "waiting" if timed else "needs attention")
        if timed:
            work(store, job)
        assert outside() == ({"x": 1} if timed else {})


def test_a_run_whose_server_went_away_is_interrupted_and_does_not_try_again_by_itself(outside, monkeypatch):
    with own_server() as server, server.database("one") as url, holdfast.open(url + LEASE) as store:

        @holdfast.tool(name="leased.stopping", probe=working.find, timeout_s=60)
        def stopping(what):
            value = leased._pay(what)
            server.stop(signal.SIGQUIT)
            return value

        monkeypatch.setattr(leased, "pay", stopping)
        agent = store.agent("a")
        with pytest.raises(errors.StoreFailed):  # the outcome could not be written
            agent.run(leased.stubborn.options(id="1"), "x")
        server.start()
        with suppress(errors.StoreFailed):  # who closes it is told once more
            agent.close()
        assert [(run.status, run.due) for run in store.runs()] == [("interrupted", False)]
        assert outside() == {"x": 1}
        with store.agent("a") as agent:
            assert agent.resume("1") == "x"
        assert outside() == {"x": 1}


def test_a_batch_whose_server_went_away_is_interrupted_and_no_item_has_failed(outside):
    with own_server() as server, server.database("one") as url, holdfast.open(url + LEASE) as store:
        away = []

        @holdfast.durable(name="leased.item")
        def item(what):
            paid = leased.pay(what)
            if what == "2" and not away:
                away.append(what)
                server.stop(signal.SIGQUIT)
            return paid

        with pytest.raises(errors.StoreFailed):
            store.map(item, ["1", "2", "3"], name="batch", workers=1)
        server.start()
        assert [run.status for run in store.runs()] == ["interrupted"]
        assert store.map(item, ["1", "2", "3"], name="batch", workers=1) == ["1", "2", "3"]
        assert outside() == {"1": 1, "2": 1, "3": 1}


def test_a_worker_that_begins_while_its_server_is_away_goes_on_when_it_is_there(outside):
    with own_server() as server, server.database("one") as url, holdfast.open(url + LEASE) as store:
        job = store.submit(leased.twice, "x")
        server.stop()
        one = store.worker()
        thread = threading.Thread(target=one.run)
        thread.start()
        time.sleep(0.2)  # so that it most likely finds nobody there
        server.start()
        assert job.result(120) == ["x-a", "x-b"]
        one.stop()
        thread.join()
        assert outside() == {"x-a": 1, "x-b": 1}


def own_server():
    try:
        return postgres.server()
    except postgres.NoServer as reason:
        pytest.skip(str(reason))


class Killer:
    """Does to two workers, and to their server if there is one, whatever happens."""

    def __init__(self, place, server=None, seed=1):
        self.place, self.server, self.seed, self.chance = place, server, seed, random.Random(seed)
        self.workers = [self.worker() for _ in range(2)]
        self.ways = [self.kill, self.stop, *([self.cut, self.restart] if server is not None else [])]
        self.did = Counter()

    def worker(self):
        return worker(self.place, leased.__file__, "--json", "--concurrency", 4)

    def strike(self):
        what = self.chance.choice(self.ways)
        self.did[what.__name__] += 1
        with suppress(psycopg.OperationalError):
            what()

    def kill(self):
        at = self.chance.randrange(2)
        self.workers[at].send_signal(signal.SIGKILL)
        self.workers[at].communicate()
        self.workers[at] = self.worker()

    def stop(self):
        one = self.chance.choice(self.workers)
        one.send_signal(signal.SIGSTOP)
        threading.Timer(self.chance.uniform(0.1, 1.5), lambda: one.send_signal(signal.SIGCONT)).start()

    def cut(self):
        cut(self.place, "holdfast")

    def restart(self):
        self.server.restart(self.chance.choice([signal.SIGINT, signal.SIGQUIT]))

    def end(self):
        for one in self.workers:
            one.send_signal(signal.SIGKILL)
            one.communicate()


def harry(place, server, count, seed, limit_s):
    """Runs are done by workers to which everything happens; returns what they were."""
    with holdfast.open(place) as store:
        for number in range(count):
            store.submit(leased.parent if number % 4 == 3 else leased.twice, str(number))
    killer, end_s = Killer(place, server, seed), time.monotonic() + limit_s
    left = [None]
    try:
        while left and time.monotonic() < end_s:
            time.sleep(killer.chance.uniform(0.05, 0.5))
            killer.strike()
            with suppress(errors.HoldfastError), holdfast.open(place) as store:
                for one in left:
                    if one is not None and "WorkerLost" in one.error:  # killed three times, for no reason of its own
                        store.agent(one.agent).resume(one.id)
                left = [one for one in store.runs() if one.status != "finished"]
        assert not left, (seed, [(one.agent, one.status, one.error) for one in left])
    finally:
        killer.end()
    assert killer.did, "it was over before anything happened"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["directory", "server"])
def test_whatever_happens_to_workers_and_server_each_run_is_done_once(kind, outside, rounds, tmp_path):
    count, seed, limit_s = rounds(10, 300), rounds(1, time.time_ns()), rounds(300, 1800)
    if kind == "directory":
        harry(str(tmp_path / "store"), None, count, seed, limit_s)
    else:
        with own_server() as server, server.database("one") as url:
            harry(url + LEASE, server, count, seed, limit_s)
    assert outside() == {f"{number}-{part}": 1 for number in range(count) for part in "ab"}, seed
