"""Leases on PostgreSQL, and what interrupts and forks do to its connections: real processes, signals and sessions."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.store.catalog import View
from holdfast.store.cipher import PLAIN
from holdfast.store.postgres import AdvisoryLeases, Postgres
from tests import postgres
from tests.store.test_postgres import add_branch, end_sessions, opened, server, take, url

__all__ = ["opened", "server", "url"]  # fixtures

# -- interrupts, forks ---------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    pass


@contextmanager
def interrupts(most_s: float):
    """A signal handler that raises, at moments of its own choice."""

    def handler(*_):
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00005, most_s))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck in a callback of weakref
def test_an_interrupted_reader_never_gets_the_answer_to_another_question(url, opened):
    engine = opened(url)
    with interrupts(0.02) as arm:
        for number in range(300):
            with suppress(Interrupt):
                arm()
                assert engine.run("SELECT ? + 0, name FROM store", (number,)) == [(number, "format")]
                with engine.moment() as reader:
                    assert reader.run("SELECT ? + 0", (number,)) == [(number,)]
    reader = None
    with opened(url).sweeping() as alone:
        assert alone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck in a callback of weakref
def test_an_interrupt_leaves_no_branch_locked(url, opened):
    engine = opened(url)
    branch, leases = add_branch(engine), AdvisoryLeases(engine)
    with interrupts(0.01) as arm:
        for _ in range(100):
            with suppress(Interrupt):
                arm()
                take(leases, engine, branch, 20).release()
    gc.collect()
    take(leases, engine, branch, 20).release()  # one that was interrupted twice ends in a thread of its own
    take(AdvisoryLeases(opened(url)), engine, branch).release()


def test_a_child_of_fork_leaves_the_sessions_of_its_parent_alone(url, opened):
    engine = opened(url)
    branch, leases = add_branch(engine), AdvisoryLeases(engine)
    lease = take(leases, engine, branch)
    with engine.moment() as reader:
        sessions = [one.run("SELECT pg_backend_pid()") for one in (engine, reader)]
        child = os.fork()
        if not child:
            with suppress(BaseException):
                engine.abandon(engine.rest(0.0))
                leases.abandon()
                lease.release()
                engine.close()
                try:
                    engine.run("SELECT 1")
                except errors.StoreClosed:
                    os._exit(len(View(Postgres(url), PLAIN).branches()) + 6)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert [one.run("SELECT pg_backend_pid()") for one in (engine, reader)] == sessions
    assert lease.held


# -- leases --------------------------------------------------------------------------------------------------------


def test_a_lease_is_held_until_it_is_released_lost_or_passed_over(url, opened):
    engine, other = opened(url), opened(url)
    branch = add_branch(engine)
    leases, others = AdvisoryLeases(engine), AdvisoryLeases(other)
    lease = take(leases, engine, branch)
    assert (lease.held, lease.generation, lease.b) == (True, 1, branch.b)
    for busy in (leases, others):
        with pytest.raises(errors.AgentBusy) as caught:
            take(busy, other, branch, 0.1)
        assert caught.value.holder["this_process"]
        assert (busy.alive(branch.uuid, 1), busy.alive(branch.uuid, 2)) == (True, False)
        assert [(one["pid"], one["agent"]) for one in busy.holders()] == [(os.getpid(), "one")]
    second = take(others, other, branch, takeover=True)
    assert (second.generation, leases.alive(branch.uuid, 1), len(leases.holders())) == (2, True, 2)
    lease.release()
    lease.release()
    assert (lease.held, leases.again(lease, lambda: 2)) == (False, None)
    second.release()
    assert (others.alive(branch.uuid, 2), others.holders()) == (False, [])
    back = others.again(second, lambda: 2)
    end_sessions(url)
    assert (back.held, leases.alive(branch.uuid, 2)) == (False, False)
    assert others.again(back, lambda: 2).held
    assert take(others, engine, branch).generation == 3  # the one before was dropped: its lock goes with it


RACER = """
import os, sys
from holdfast.store.postgres import AdvisoryLeases, Postgres
from tests.store.test_postgres import PLAIN, View, change, take
engine = Postgres(sys.argv[1])
leases, branch = AdvisoryLeases(engine), View(engine, PLAIN).branches()[0]
for number in range(15):
    lease = take(leases, engine, branch, 60)
    change(engine, lambda made: made.put("slot", "inside", b""))  # refused if somebody else is
    change(engine, lambda made: made.tx.do("DELETE FROM slot"))
    if number == 14:
        os.kill(os.getpid(), 9)  # with the lease in its hand
    lease.release()
"""


def test_processes_that_race_for_a_lease_have_it_one_after_the_other(url, opened):
    engine = opened(url)
    branch, root = add_branch(engine), Path(postgres.__file__).parents[1]
    command = [sys.executable, "-c", RACER, url]
    racers = [subprocess.Popen(command, stderr=subprocess.PIPE, cwd=root) for _ in range(3)]
    for racer in racers:
        _, said = racer.communicate(timeout=120)
        assert racer.returncode == -signal.SIGKILL, said.decode()
    assert take(AdvisoryLeases(engine), engine, branch, 20).generation == 46
