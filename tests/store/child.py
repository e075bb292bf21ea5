"""The other processes of the store's tests."""

from __future__ import annotations

import os
import signal
import sys
import threading

from holdfast.errors import Fenced, ForkedHandle, HoldfastError, StoreBusy
from holdfast.store.embedded import open_embedded
from tests.store.support import Hand, Pen, new_branch


def say(*words) -> None:
    print(*words, flush=True)


def write(path, name, count) -> None:
    """Commit ``count`` times."""
    store = open_embedded(path)
    hand = Hand(store, new_branch(store, name))
    say("ready")
    sys.stdin.readline()
    for _ in range(int(count)):
        hand.commit(os.urandom(1000))
    store.close()
    say("done")


def create(path) -> None:
    say("ready")
    sys.stdin.readline()
    store = open_embedded(path)
    say(store.uuid.hex())
    store.close()


def hold(path, name) -> None:
    """Hold a branch, and say of every commit whether it was accepted."""
    store = open_embedded(path)
    hand = Hand(store, new_branch(store, name))
    hand.commit()
    say("ready")
    for _ in sys.stdin:
        try:
            say("committed", hand.commit())
        except HoldfastError as error:
            say(error.kind)


def hold_store_lock(path) -> None:
    """Stop in the middle of a transaction."""
    store = open_embedded(path)
    store._writer.transaction(lambda: (say("ready"), os.kill(os.getpid(), signal.SIGSTOP)))


def kill_in_commit(path, name) -> None:
    """Die of SIGKILL after some commits, without closing anything."""
    store = open_embedded(path)
    hand = Hand(store, new_branch(store, name))
    for _ in range(20):
        say(hand.commit(os.urandom(500)))
    os.kill(os.getpid(), signal.SIGKILL)


def append(path, name) -> None:
    """Append records without end; say the number of each that was waited for."""
    store = open_embedded(path)
    pen = Pen(Hand(store, new_branch(store, name)))
    say("ready")
    while True:
        flush = pen.count % 3 == 2
        pen.write(b"%d" % (pen.count + 1), flush=flush)
        if flush:
            say(pen.count)


def fork(path) -> None:
    """A child that inherits an open store: refused through the old handle, at home through a new one."""
    store = open_embedded(path)
    hand = Hand(store, new_branch(store, "parent"))
    hand.commit()
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_forked_child(path, store, hand, write_end))
    os.close(write_end)
    for _ in range(200):
        hand.commit()
    store.close()
    os.close(read)
    _, status = os.waitpid(child, 0)
    say("child", os.waitstatus_to_exitcode(status))
    again = open_embedded(path)
    say("checkpoints", again.counts()["checkpoint"], again.engine_check(quick=False))
    again.close()


def _forked_child(path, store, hand, pipe) -> int:
    refused = 0
    for call in (store.agents, hand.commit, store.flush, lambda: store.lease(hand.row), lambda: list(store.events())):
        try:
            call()
        except ForkedHandle:
            refused += 1
    store.close()
    hand.lease.release()
    fresh = open_embedded(path)
    try:
        Hand(fresh, hand.row)
        return 3  # the parent holds it: it must not be had here
    except HoldfastError as error:
        if error.kind != "agent-busy":
            return 4
    own = Hand(fresh, new_branch(fresh, "child"))
    for _ in range(200):
        own.commit()
    fresh.close()
    return 0 if refused == 5 else 5


def fork_and_leave(path) -> None:
    """The parent ends, the child goes on with a handle of its own: it must hold SQLite's locks in its own right."""
    store = open_embedded(path)
    Hand(store, new_branch(store, "parent")).commit()
    if os.fork():
        os._exit(0)
    fresh = open_embedded(path)
    own = Hand(fresh, new_branch(fresh, "child"))
    own.commit()
    say("ready")
    sys.stdin.readline()
    for _ in range(5):
        own.commit()
    fresh.close()
    say("done")


def fork_in_commit(path) -> None:
    """Forks while other threads commit all the time; every child opens the store anew and writes."""
    store = open_embedded(path)
    stop = threading.Event()

    def work(name) -> None:
        hand = Hand(store, new_branch(store, name))
        while not stop.is_set():
            hand.commit()

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    results = []
    for number in range(10):
        child = os.fork()
        if child == 0:
            fresh = open_embedded(path)
            own = Hand(fresh, new_branch(fresh, f"c{number}"))
            own.commit()
            fresh.close()
            os._exit(0)
        results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for thread in threads:
        thread.join()
    say(results, store.engine_check(quick=False))
    store.close()


def exit_batched(path) -> None:
    """Ends without close or flush; what was accepted must be there all the same."""
    store = open_embedded(path, durability="batched")
    hand = Hand(store, new_branch(store))
    for _ in range(50):
        hand.commit()


def busy(path) -> None:
    store = open_embedded(path)
    branch = new_branch(store)
    hand = Hand(store, branch)
    patience_s, store._writer.busy_wait_s = store._writer.busy_wait_s, 0.3
    say("ready")
    sys.stdin.readline()
    try:
        hand.commit()
    except StoreBusy:
        say("busy")
    store._writer.busy_wait_s = patience_s
    sys.stdin.readline()
    say("committed", hand.commit())
    store.close()


def fenced(path, name) -> None:
    store = open_embedded(path)
    hand = Hand(store, new_branch(store, name))
    say("ready")
    sys.stdin.readline()
    try:
        hand.commit()
    except Fenced:
        say("fenced")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
