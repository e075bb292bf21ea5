"""Who may write a branch: holders that live, die, stop, fork or are interrupted, in this process and in others."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sys
import threading
from contextlib import suppress

import pytest

import holdfast
from holdfast.errors import AgentBusy, StoreFailed
from holdfast.store import leases as leases_module
from holdfast.store.cipher import Keyed
from tests.store.lease_place import BRANCH, Child, Place
from tests.strikes import struck


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.leases.close()


@pytest.fixture
def child(tmp_path):
    made = Child(tmp_path)
    yield made
    made.kill()


def test_a_lease_raises_the_generation_and_names_its_file(place):
    lease = place.take()
    assert (lease.b, lease.generation, place.row.read(), place.files()) == (7, 1, 1, ["1"])
    with pytest.raises(AgentBusy, match="this process"):
        place.take()
    lease.release()
    lease.release()
    assert not lease.held
    assert place.files() == []
    assert place.take().generation == 2
    assert place.take().generation == 3  # nobody kept the one before, so the branch was free
    assert not place.leases.alive(BRANCH, 3)


def test_another_process_is_named_and_its_death_frees_the_branch_at_once(place, child):
    assert child.say("take") == "taken 1"
    with pytest.raises(AgentBusy, match=str(child.process.pid)) as caught:
        place.take()
    assert caught.value.holder["program"] == "child"
    assert [one["pid"] for one in place.leases.holders()] == [child.process.pid]
    assert place.leases.alive(BRANCH, 1)
    child.kill()
    assert not place.leases.alive(BRANCH, 1)
    assert place.leases.holders() == []
    lease = place.take()
    assert (lease.generation, place.files()) == (2, ["2"])


def test_a_branch_is_waited_for(place, child):
    assert child.say("take") == "taken 1"
    timer = threading.Timer(0.1, child.say, ["release"])
    timer.start()
    lease = place.take(wait_s=180)
    timer.join()
    assert lease.generation == 2


def test_a_holder_that_is_passed_over_stays_known_while_it_lives(place, child):
    assert child.say("take") == "taken 1"
    lease = place.take(takeover=True)
    assert (lease.generation, place.files()) == (2, ["1", "2"])
    assert place.leases.alive(BRANCH, 1)
    assert place.leases.alive(BRANCH, 2)
    child.kill()
    assert not place.leases.alive(BRANCH, 1)
    assert place.files() == ["2"]
    assert lease.held


def test_a_released_lease_is_taken_up_again_until_somebody_else_had_it(place, child):
    lease = place.take(purpose="test")
    with pytest.raises(AgentBusy):
        place.again(lease)
    lease.release()
    again = place.again(lease)
    assert (again.generation, place.row.read(), again.who["purpose"]) == (1, 1, "test")
    assert child.say("try") == "agent-busy"
    again.release()
    assert child.say("try") == "free"
    assert (place.again(again), place.files()) == (None, [])


def test_a_branch_that_rests_is_taken_up_again_without_its_file_being_opened(place, child, monkeypatch):
    lease = place.take(purpose="test")
    lease.rest()
    lease.rest()
    assert (lease.held, place.leases.alive(BRANCH, 1), place.leases.holders(), place.files()) == (
        False,
        False,
        [],
        ["1"],
    )
    with monkeypatch.context() as patch:
        patch.setattr(leases_module, "_opened", None)
        again = place.again(lease)
    assert (again.held, again.generation, place.leases.holders()[0]["purpose"]) == (True, 1, "test")
    assert child.say("try") == "agent-busy"
    again.rest()
    again.release()
    assert place.files() == []


@pytest.mark.parametrize("end", ["release", "kill"])
def test_a_branch_that_rests_is_free_for_whoever_comes(place, child, end):
    assert (child.say("take"), child.say("rest")) == ("taken 1", "rests")
    if end == "kill":
        child.kill()
    lease = place.take()
    assert (lease.generation, lease.unclean, place.files()) == (2, False, ["2"])
    if end == "release":
        lease.rest()
        assert (child.say("take"), place.again(lease)) == ("taken 3", None)
        assert place.files() == ["3"]


def test_who_ends_well_leaves_no_file_of_a_branch_that_rests(place):
    lease = place.take()
    lease.rest()
    place.leases.end_well()
    assert place.files() == []
    lease = place.take()
    lease.rest()
    del lease
    assert place.files() == []


def test_who_is_late_does_not_take_away_a_lease_that_is_taken_up_again(place, monkeypatch):
    lease, other, again = place.take(), Place(place.folder), []
    real = leases_module._opened

    def late(path):
        monkeypatch.setattr(leases_module, "_opened", real)
        file = real(path)
        lease.release()  # between the opening and the locking of its file
        again.append(place.again(lease))
        return file

    monkeypatch.setattr(leases_module, "_opened", late)
    with pytest.raises(AgentBusy):
        other.take()
    assert again[0].held
    assert place.row.read() == 1


def test_lock_files_of_an_encrypted_store_say_nothing(tmp_path):
    place = Place(tmp_path, Keyed(bytes(32), bytes(16)))
    lease = place.take(purpose="canary")
    assert b"canary" not in lease.path.read_bytes()
    assert place.leases.holders()[0]["purpose"] == "canary"
    with pytest.raises(AgentBusy, match="another process"):
        Place(tmp_path).take()


def test_a_forked_child_leaves_the_lease_to_its_parent(place, child):
    lease = place.take()
    pid = os.fork()
    if not pid:
        place.leases.abandon()
        lease.release()
        with suppress(AgentBusy):
            place.take()
            os._exit(1)
        os._exit(int(lease.held))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lease.held
    assert child.say("try") == "agent-busy"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOLCK])
def test_a_failing_disk_is_no_damage(place, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", fail)
        with pytest.raises(StoreFailed, match="locks/"):
            place.take()
    place.take()


def test_what_lies_there_instead_of_a_lock_file_is_not_touched(place, tmp_path):
    path = tmp_path / "locks" / f"{BRANCH.hex()}-1"
    (tmp_path / "precious").write_text("mine")
    for target in ("precious", "nowhere"):
        path.symlink_to(tmp_path / target)
        with pytest.raises(StoreFailed, match="not a lock file"):
            place.take()
        path.unlink()
    path.mkdir()
    with pytest.raises(StoreFailed):
        place.take()
    assert (tmp_path / "precious").read_text() == "mine"


# -- interrupts ---------------------------------------------------------------------------------------------


CALLS = ("first", "take", "takeover", "busy", "again", "again, too late", "again, rested", "rest", "release")


def prepared(place, name):
    """A call, and the lease that it is about."""
    if name == "first":
        return place.take, None
    lease = place.take()
    if name == "again, rested":
        lease.rest()
    elif name.startswith(("take", "again")) and name != "takeover":
        lease.release()
    if name == "again, too late":
        place.take().release()
    calls = {"again": lambda: place.again(lease), "rest": lease.rest, "release": lease.release}
    return calls.get(name.partition(",")[0], lambda: place.take(takeover=name == "takeover")), lease


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_no_branch_locked(tmp_path, child, name, rounds, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's own keeps what was struck where it is dropped
    dice = random.Random(7)
    for _ in range(rounds(15, 1000)):
        place = Place(tmp_path)
        call, lease = prepared(place, name)
        with suppress(AgentBusy):
            struck(call, dice.uniform(0.00001, 0.002))
        if lease is not None:
            lease.release()  # an interrupted release can be repeated
        assert child.say("try") == "free"


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_interrupted_as_he_lets_a_branch_rest_does_not_count_as_its_writer(place, child, monkeypatch, when):
    lease, real = place.take(), fcntl.fcntl

    def struck_there(*args):
        if when == "after":
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(leases_module.fcntl, "fcntl", struck_there)
        with pytest.raises(KeyboardInterrupt):
            lease.rest()
    assert (lease.held, child.say("try")) == (False, "free")


def test_a_signal_handler_in_the_middle_of_a_read_can_open_an_agent(store_path):
    with holdfast.open(store_path) as store:

        def handler():
            with store._db.engine._reading:  # the main thread was reading when the signal came
                store.agent("one").close()
                store.agent("one").close()

        assert not struck(handler, 20)
