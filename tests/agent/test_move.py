"""A whole store in another place, or with another key: the same ids, and one whole store at every moment."""

from __future__ import annotations

import os
import random
from contextlib import closing

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import move
from holdfast.agent.store import open_unseen
from holdfast.errors import AgentBusy, ReadOnly, StoreBusy, WrongKey
from tests.agent import child
from tests.agent.histories import assert_same, grow, plain, view
from tests.faults.rich import small_limits

OLD, NEW = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def source(tmp_path):
    with small_limits(), holdfast.open(tmp_path / "a") as store:
        grow(store, "trip", random.Random(3), 25)
        store.clone("trip", "copy")
        store.set_policy(Policy(last=100))
        store.set_policy(Policy(last=50), "copy")
        yield store


# -- backup and move ------------------------------------------------------------------------------------------------


def test_a_backup_has_everything_and_the_source_goes_on(source, tmp_path):
    with holdfast.open(tmp_path / "b", key=NEW) as dest:
        assert {one.status for one in move.backup(source, dest).agents} == {"new"}
        for name in ("trip", "copy"):
            assert_same(source, dest, name)
        assert dest.policies() == source.policies()
        plain(source, "trip", 1)
        dest.set_policy(Policy(last=7))
        assert {one.status for one in move.backup(source, dest).agents} == {"updated", "unchanged"}
        assert dest.policies()[None] == Policy(last=7), "what somebody set there stays"


def test_a_store_that_was_moved_is_only_read(source, tmp_path):
    before = view(source, "trip")
    with holdfast.open(tmp_path / "b") as dest:
        move.move(source, dest)
        assert source.closed
        with pytest.raises(ReadOnly, match=str(tmp_path / "b")):
            holdfast.open(tmp_path / "a")
        with holdfast.open(tmp_path / "a", readonly=True) as left:
            assert view(left, "trip") == before
            assert left.verify().ok
            assert {one.status for one in left.push(dest).agents} == {"unchanged"}
            with pytest.raises(ReadOnly):
                move.move(left, dest)
        assert view(dest, "trip")["checkpoints"] == before["checkpoints"]
        plain(dest, "trip", 1)


def test_from_one_backend_to_another_and_back_with_another_key(source, tmp_path, server):
    seen = {name: view(source, name)["checkpoints"] for name in ("trip", "copy")}
    with server.database(f"test_{os.urandom(6).hex()}") as url:
        with (
            holdfast.open(url, objects=str(tmp_path / "objects")) as there,
            holdfast.open(tmp_path / "b", key=NEW) as back,
        ):
            move.move(source, there)
            grow(there, "trip", random.Random(4), 10)
            plain(there, "copy", 1)
            move.backup(there, back)
            for name in ("trip", "copy"):
                assert_same(there, back, name)
                assert seen[name].keys() <= view(back, name)["checkpoints"].keys()
            assert back.policies() == {None: Policy(last=100), "copy": Policy(last=50)}
            move.move(there, back)
        with pytest.raises(ReadOnly):
            holdfast.open(url)


def test_nobody_else_may_have_it_open(source, tmp_path):
    with child.start("read", source.path) as held, holdfast.open(tmp_path / "b") as dest:
        assert child.line(held) == "ready"
        with pytest.raises(StoreBusy):
            move.move(source, dest)
        plain(source, "trip", 1)
        held.stdin.close()
    engine = source._db.engine
    with engine.alone(), pytest.raises(StoreBusy):
        open_unseen(source.path, None)
    with holdfast.open(tmp_path / "b") as dest:
        move.move(source, dest)


def test_a_move_that_was_cut_short_can_be_done_again(source, tmp_path):
    class Cut(Exception):
        pass

    def cut(what, _done, _total):
        if what == "checkpoints of copy":
            raise Cut

    plain(source, "copy", 3)
    with holdfast.open(tmp_path / "b") as dest:
        with pytest.raises(Cut):
            move.move(source, dest, cut)
        plain(source, "trip", 1)  # it is still the one
        head = source.agent("trip", readonly=True).head.id
        with closing(dest.agent("trip")), pytest.raises(AgentBusy):
            move.move(source, dest)
        move.move(source, dest)
        assert dest.agent("trip", readonly=True).head.id == head


# -- another key ----------------------------------------------------------------------------------------------------


def test_another_master_key_is_a_move_into_a_new_store(tmp_path):
    with small_limits(), holdfast.open(tmp_path / "s", key=OLD) as store:
        grow(store, "trip", random.Random(5), 25)
        store.set_policy(Policy(last=100))
        seen = view(store, "trip")
        with holdfast.open(tmp_path / "t", key=NEW) as dest:
            store.move(dest)
            assert view(dest, "trip")["checkpoints"] == seen["checkpoints"]
            assert dest.policies() == {None: Policy(last=100)}
            assert dest.verify().ok
    with pytest.raises(WrongKey):
        holdfast.open(tmp_path / "t", key=OLD)
    with pytest.raises(ReadOnly):
        holdfast.open(tmp_path / "s", key=OLD)
    (tmp_path / "s").rename(tmp_path / "old")
    (tmp_path / "t").rename(tmp_path / "s")  # it takes the place of the old one
    with holdfast.open(tmp_path / "s", key=NEW) as store:
        plain(store, "trip", 1)
        assert store.verify().ok
