"""Leases on PostgreSQL, and what interrupts and forks do to its connections: real processes, signals and sessions."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.store.advisory import AdvisoryLeases
from holdfast.store.catalog import View
from holdfast.store.cipher import PLAIN
from holdfast.store.postgres import Postgres
from holdfast.store.processes import has_ended, identity, is_self
from tests import postgres, warm
from tests.store.test_postgres import add_branch, end_sessions, opened, say, server, take, url
from tests.strikes import struck

__all__ = ["opened", "server", "url"]  # fixtures

# -- interrupts, forks ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck in a callback of weakref
def test_an_interrupted_reader_never_gets_the_answer_to_another_question(url, opened):
    engine = opened(url)

    def ask(number):
        assert engine.run("SELECT ? + 0, name FROM store", (number,)) == [(number, "format")]
        with engine.moment() as reader:
            assert reader.run("SELECT ? + 0", (number,)) == [(number,)]

    strikes, number, latest_s = 0, 0, 0.02
    while strikes < 100:
        number += 1
        hit = struck(partial(ask, number), random.uniform(0.00005, latest_s))
        strikes += hit
        latest_s = max(0.0001, latest_s * (1.1 if hit else 0.9))  # about as long as it takes on this machine, now
    with opened(url).sweeping() as alone:
        assert alone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # struck in a callback of weakref
def test_an_interrupt_leaves_no_branch_locked(url, opened):
    engine = opened(url)
    branch, leases = add_branch(engine), AdvisoryLeases(engine)
    for _ in range(100):
        struck(lambda: take(leases, engine, branch, 20).release(), random.uniform(0.00005, 0.01))
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
    assert (back.held, back.fresh, others.alive(branch.uuid, 2)) == (True, True, True)
    del back
    assert take(others, engine, branch).generation == 3  # the one before was dropped: its lock goes with it


def test_who_ends_well_does_not_wait_for_the_server_and_is_not_taken_for_one_that_failed(url, opened):
    engine, other = opened(url), opened(url)
    branch, leases = add_branch(engine), AdvisoryLeases(engine)
    lease = take(leases, engine, branch)
    assert not lease.unclean
    ((session,),) = leases._seat.link.ask(("SELECT pg_backend_pid()", ()))
    os.kill(session, signal.SIGSTOP)
    ending = threading.Thread(target=leases.end_well, daemon=True)
    ending.start()
    ending.join(60)
    os.kill(session, signal.SIGCONT)
    assert not ending.is_alive()
    leases._seat.empty()  # as the end of the process does it
    others = AdvisoryLeases(other)
    found = take(others, other, branch, 60)
    assert not found.unclean
    others._closing.set()
    others._seat.empty()  # this one is killed
    assert take(AdvisoryLeases(engine), engine, branch, 60).unclean


def test_a_lease_outlives_its_connection_unless_somebody_else_was_faster(url, opened):
    engine, other = opened(url + "&lease_s=0.5"), opened(url)
    branch, second = add_branch(engine), add_branch(engine, "two")
    leases = AdvisoryLeases(engine)
    mine, lost = take(leases, engine, branch), take(leases, engine, second)
    end_sessions(url)
    theirs = take(AdvisoryLeases(other), other, second, takeover=True)
    while mine.fresh or lost.fresh:
        leases.beat()  # confirms the one, and the other runs out
        mine.until_s = 0.0 if not lost.fresh else mine.until_s
    mine.confirm()
    assert (mine.fresh, mine.held, leases.alive(branch.uuid, 1)) == (True, True, True)
    with pytest.raises(errors.Fenced, match="nothing was called"):
        lost.confirm()
    assert (lost.held, theirs.held, leases.alive(second.uuid, 1)) == (False, True, False)
    leases.close()


HOLDER = """
import sys
import time
from holdfast.errors import Fenced
from holdfast.store.advisory import AdvisoryLeases
from holdfast.store.postgres import Postgres
from tests.store.test_postgres import PLAIN, View, take
engine = Postgres(sys.argv[1])
lease = take(AdvisoryLeases(engine), engine, View(engine, PLAIN).branches()[0])
print(lease.generation, flush=True)
sys.stdin.readline()
try:
    lease.confirm()
    print("fresh", flush=True)
except Fenced:
    print("fenced", flush=True)
"""


def test_a_lease_that_is_lost_because_the_store_went_back_is_told_as_that(url, opened):
    engine = opened(url)
    branch, leases = add_branch(engine), AdvisoryLeases(engine)
    lease = take(leases, engine, branch)
    engine.acknowledge({branch.b: (1, 0)})
    say(url, "UPDATE holdfast.branch SET generation = 0 RETURNING b")  # as an older dump has it
    lease.until_s = 0.0
    with pytest.raises(errors.StoreWentBack, match="has gone back"):
        lease.confirm()
    assert not lease.fresh
    leases.close()


def test_a_holder_that_is_not_heard_of_in_time_is_passed_over_though_its_lock_is_there(url, opened):
    url += "&lease_s=1"  # after two seconds without a beat it is passed over
    engine = opened(url)
    branch, leases = add_branch(engine), AdvisoryLeases(engine)
    command = [sys.executable, "-c", HOLDER, url]
    root = Path(postgres.__file__).parents[1]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdout.readline() == "1\n"
        [(began,)] = engine.run("SELECT until FROM lease")
        while engine.run("SELECT until FROM lease") < [(began + 2_500_000,)]:  # it beats
            time.sleep(0.05)
        with pytest.raises(errors.AgentBusy):
            take(leases, engine, branch)
        assert leases.alive(branch.uuid, 1)
        other.send_signal(signal.SIGSTOP)
        lease = take(leases, engine, branch, 180)
        assert (lease.generation, leases.alive(branch.uuid, 1), leases.alive(branch.uuid, 2)) == (2, False, True)
        other.send_signal(signal.SIGCONT)
        assert other.communicate("\n")[0] == "fenced\n"
    assert lease.fresh
    leases.close()


@pytest.mark.parametrize("wrong", ["0", "x", "1e9", "nan"])
def test_how_long_a_lease_counts_is_checked(url, wrong):
    with pytest.raises(errors.BadOption, match="lease_s"):
        Postgres(f"{url}&lease_s={wrong}")


def free_port() -> str:
    """Not one of those that the system gives to whoever asks for any: somebody would have it before we do."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20_000, 30_000))) as free:
            return str(free.getsockname()[1])


def test_the_server_looks_for_machines_that_have_vanished(opened, monkeypatch):
    port = free_port()
    monkeypatch.setenv("PGPORT", port)
    try:
        with postgres.server(listen_addresses="127.0.0.1", port=port, fsync="on"):
            engine = opened("postgresql://postgres@127.0.0.1/postgres")
            for name in ("idle", "interval", "count"):
                assert 0 < int(engine.run(f"SELECT current_setting('tcp_keepalives_{name}')")[0][0]) <= 10
            assert engine.run("SELECT current_setting('tcp_user_timeout')") == [("25000",)]
    except postgres.NoServer as reason:
        pytest.skip(str(reason))


# -- processes -----------------------------------------------------------------------------------------------------


def test_a_process_has_ended_only_when_this_machine_says_so():
    command = [sys.executable, "-c", "from holdfast.store.processes import identity; print(*identity()); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        *machine, pid, began = other.stdout.readline().split()
        one = [" ".join(machine), int(pid), int(began)]
        assert not has_ended(one)
        assert has_ended([one[0], one[1], one[2] + 1])  # another one had that number before
        other.send_signal(signal.SIGSTOP)
        assert not has_ended(one)
        other.kill()
        while "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
            pass
        assert has_ended(one)  # nobody has asked for what it returned
        other.wait()
        assert has_ended(one)
        assert not has_ended(["elsewhere", *one[1:]])
        assert not has_ended(["", *one[1:]])
    assert is_self(identity())
    assert not is_self(one)
    assert not has_ended(identity())


RACER = """
import os, sys
from holdfast.store.advisory import AdvisoryLeases
from holdfast.store.postgres import Postgres
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
    racers = [warm.Popen(command, stderr=subprocess.PIPE, cwd=root) for _ in range(3)]
    for racer in racers:
        _, said = racer.communicate(timeout=180)
        assert racer.returncode == -signal.SIGKILL, said.decode()
    assert take(AdvisoryLeases(engine), engine, branch, 180).generation == 46
