"""Who may write: leases, the queue of writers, and processes that die, stop or come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from holdfast.errors import AgentBusy, Fenced, StoreBusy
from holdfast.store import locks
from holdfast.store.embedded import open_embedded
from holdfast.store.locks import StoreLock
from tests.store.support import Hand, event, finish, line, names, new_branch, start

HANG_S = 180


def send(child, text="go"):
    child.stdin.write(text + "\n")
    child.stdin.flush()


def end(child):
    child.kill()
    child.communicate()


def test_lease_raises_the_generation_and_names_its_file(store, path):
    branch = new_branch(store)
    lease = store.lease(branch, event=event())
    assert lease.generation == 1 == store.branch_row(branch.b).generation
    assert sorted(names(path / "locks")) == sorted(["store", f"{branch.uuid.hex()}-1"])
    lease.release()
    lease.release()
    assert names(path / "locks") == ["store"]
    second = store.lease(branch)
    assert second.generation == 2
    assert sorted(names(path / "locks")) == sorted(["store", f"{branch.uuid.hex()}-2"])


def test_a_lease_that_was_released_is_taken_up_again_until_somebody_else_had_it(store, path):
    branch = new_branch(store)
    lease = store.lease(branch, who={"purpose": "test"})
    lease.release()
    events = store.newest()[1]
    again = store.lease_again(lease)
    assert again.generation == 1 == store.branch_row(branch.b).generation
    assert store.newest()[1] == events, "nothing was written"
    with pytest.raises(AgentBusy) as caught:
        store.lease(branch)
    assert caught.value.holder["purpose"] == "test"
    with pytest.raises(AgentBusy):
        store.lease_again(lease)
    again.release()
    store.lease(branch).release()
    assert store.lease_again(again) is None
    assert names(path / "locks") == ["store"]


def test_who_is_late_for_a_lease_that_is_taken_up_again_does_not_take_it_away(store, path, monkeypatch):
    branch = new_branch(store)
    lease = store.lease(branch)
    real, again = locks._try_flock, []

    def late(fd):
        monkeypatch.setattr(locks, "_try_flock", real)
        lease.release()  # between the opening and the locking of its file
        again.append(store.lease_again(lease))
        return real(fd)

    with closing(open_embedded(path)) as other:
        monkeypatch.setattr(locks, "_try_flock", late)
        with pytest.raises(AgentBusy):
            other.lease(branch)
    assert again[0].held
    assert store.branch_row(branch.b).generation == 1


def test_second_lease_in_one_process_is_busy_and_says_so(store):
    branch = new_branch(store)
    store.lease(branch, who={"purpose": "test"})
    with pytest.raises(AgentBusy, match="this process") as caught:
        store.lease(branch)
    holder = caught.value.holder
    assert holder["pid"] == os.getpid()
    assert holder["purpose"] == "test"
    assert {"host", "program", "since"} <= set(holder)


def test_waiting_for_a_lease_gets_it(store):
    branch = new_branch(store)
    lease = store.lease(branch)
    threading.Timer(0.2, lease.release).start()
    assert store.lease(branch, wait_s=180).generation == 2
    with pytest.raises(AgentBusy):
        store.lease(branch, wait_s=0.1)


def test_other_process_is_named_and_its_death_frees_the_branch_at_once(store, path):
    branch = new_branch(store, "held")
    child = start("hold", path, "held")
    assert line(child) == "ready"
    with pytest.raises(AgentBusy) as caught:
        store.lease(branch)
    assert caught.value.holder["pid"] == child.pid
    assert str(child.pid) in str(caught.value)
    end(child)
    hand = Hand(store, branch)
    assert hand.commit() == 2


def test_takeover_fences_a_stopped_holder(store, path):
    branch = new_branch(store, "held")
    child = start("hold", path, "held")
    assert line(child) == "ready"
    child.send_signal(signal.SIGSTOP)
    hand = Hand(store, branch, takeover=True)
    assert hand.commit() == 2
    child.send_signal(signal.SIGCONT)
    send(child)
    assert line(child) == "fenced"
    with pytest.raises(AgentBusy):
        store.lease(branch)
    assert hand.commit() == 3
    # The one that was passed over keeps its file, so that whoever asks can see that it lives.
    assert store.holder_alive(branch.b, 1)
    end(child)
    assert not store.holder_alive(branch.b, 1)
    assert store.holder_alive(branch.b, 2)
    assert [name for name in names(path / "locks") if name != "store"] == [f"{branch.uuid.hex()}-2"]
    hand.lease.release()
    assert not store.holder_alive(branch.b, 2)


def test_takeover_within_one_process_fences_the_first_handle(store):
    branch = new_branch(store)
    first = Hand(store, branch)
    first.commit()
    second = Hand(store, branch, takeover=True)
    with pytest.raises(Fenced):
        first.commit()
    second.commit()
    first.lease.release()
    with pytest.raises(AgentBusy):
        store.lease(branch)
    second.commit()


def test_eight_writers_on_eight_branches_all_get_through(store, path):
    names = [f"writer-{number}" for number in range(8)]
    children = [start("write", path, name, 60) for name in names]
    for child in children:
        assert line(child) == "ready"
    for child in children:
        send(child)
    for child in children:
        assert finish(child) == "done"
    assert store.counts()["checkpoint"] == 8 * 60
    for branch in [row for agent in store.agents() for row in store.branches(agent.a)]:
        assert len(store.ancestry(branch.head)) == 60
    assert store.engine_check(quick=False) == []


def test_stopped_writer_makes_others_busy_and_its_death_lets_them_go_on(path):
    open_embedded(path).close()
    waiting = start("busy", path)
    assert line(waiting) == "ready"
    stopped = start("hold_store_lock", path)
    assert line(stopped) == "ready"
    send(waiting)
    assert line(waiting) == "busy"
    end(stopped)
    send(waiting)
    assert finish(waiting) == "committed 1"


def test_store_lock_gives_up_rejoins_and_recovers(tmp_path):
    one, two = StoreLock(tmp_path / "lock"), StoreLock(tmp_path / "lock")
    one.acquire()
    for _ in range(2):
        with pytest.raises(StoreBusy):
            two.acquire(0.1)
    # The helper still queues; once the owner lets go nobody wants it any more, and it must not keep it.
    one.release()
    for _ in range(50):
        one.acquire(HANG_S)
        one.release()
    two.acquire(HANG_S)
    with pytest.raises(StoreBusy):
        one.acquire(0.05)
    two.release()
    one.acquire(HANG_S)
    one.close()
    two.close()


def test_threads_of_one_process_share_a_store(store):
    hands = [Hand(store, new_branch(store, f"thread-{number}")) for number in range(4)]
    failures = []

    def work(hand):
        try:
            for _ in range(50):
                hand.commit()
                store.ancestry(store.branch_row(hand.row.b).head, limit=5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(hand,)) for hand in hands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.counts()["checkpoint"] == 200


def test_forked_child_is_refused_the_old_handle_and_works_with_a_new_one(path):
    out = finish(start("fork", path)).splitlines()
    assert out == ["child 0", "checkpoints 401 []"]


def test_forked_child_holds_the_database_in_its_own_right(path):
    child = start("fork_and_leave", path)
    assert line(child) == "ready"
    # A stranger that believes to be the last one to close the database folds its log and removes it.
    subprocess.run([sys.executable, "-c", _STRANGER, str(path / "store.db")], check=True)
    assert (path / "store.db-wal").exists()
    send(child)
    assert line(child) == "done"
    child.communicate()
    store = open_embedded(path)
    assert store.counts()["checkpoint"] == 7
    store.close()


_STRANGER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT count(*) FROM agent").fetchall()
connection.close()
"""


def test_fork_amid_commits_of_other_threads_tears_nothing(path):
    assert finish(start("fork_in_commit", path)) == f"{[0] * 10} []"


def test_killed_writer_loses_nothing(path):
    child = start("kill_in_commit", path, "one")
    acknowledged = child.communicate(timeout=180)[0].split()
    store = open_embedded(path)
    hand = Hand(store, new_branch(store, "one"))
    assert [str(row.n) for row in store.ancestry(hand.row.head)] == acknowledged[::-1]
    hand.commit()
    store.close()
