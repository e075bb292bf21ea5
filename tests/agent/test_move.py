"""A whole store in another place, or with another key: the same ids, and one whole store at every moment."""

from __future__ import annotations

import os
import random
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

import holdfast
from holdfast import Policy
from holdfast.agent import keys, move
from holdfast.errors import AgentBusy, BadOption, Damaged, NotEncrypted, ReadOnly, StoreBusy, StoreFailed, WrongKey
from holdfast.store import files
from holdfast.store.keys import secret_of
from tests.agent import child
from tests.agent.histories import assert_same, grow, plain, view
from tests.faults.rich import small_limits
from tests.lives import dies

OLD, NEW = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def source(tmp_path):
    with small_limits(), holdfast.open(tmp_path / "a") as store:
        grow(store, "trip", random.Random(3), 25)
        store.copy("trip", "copy")
        store.set_policy(Policy(last=100))
        store.set_policy(Policy(last=50), "copy")
        yield store


def names(folder):
    return sorted(one.name for one in folder.iterdir())


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
            assert move.move(left, dest).agents == [], "nothing is left to be done"
            with holdfast.open(tmp_path / "c") as other, pytest.raises(ReadOnly):
                move.move(left, other)
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
        move.open_unseen(source.path, None)
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


@pytest.fixture
def secret(tmp_path):
    """A closed, encrypted store with a dump beside its data, and what its agent looked like."""
    with small_limits():
        with holdfast.open(tmp_path / "s", key=OLD) as store:
            grow(store, "trip", random.Random(5), 25)
            store.set_policy(Policy(last=100))
            seen = view(store, "trip")
        (tmp_path / "s" / "dumps").mkdir()
        (tmp_path / "s" / "dumps" / "one.dump").write_text("what happened")
        yield tmp_path / "s", seen


def is_whole(path, key, seen):
    with holdfast.open(path, key=key) as store:
        assert view(store, "trip")["checkpoints"] == seen["checkpoints"]
        assert store.policies() == {None: Policy(last=100)}
        assert store.verify().ok


def test_rotation_keeps_everything_but_the_key(secret):
    path, seen = secret
    keys.add(path, "a passphrase of somebody who left", key=OLD)
    with holdfast.open(path, key=OLD) as store:
        uuid = store._db.uuid
    keys.rotate(path, NEW, key=OLD, full=True)
    for old in (OLD, "a passphrase of somebody who left"):
        with pytest.raises(WrongKey):
            holdfast.open(path, key=old)
    is_whole(path, NEW, seen)
    with holdfast.open(path, key=NEW) as store:
        assert store._db.uuid != uuid
        plain(store, "trip", 1)
    assert (path / "dumps" / "one.dump").read_text() == "what happened"
    (old,) = move.old_ones(path)
    assert names(path.parent) == [path.name, old.name]
    with pytest.raises(ReadOnly):
        holdfast.open(old, key=OLD)
    with holdfast.open(old, key=OLD, readonly=True) as left:
        assert view(left, "trip") == seen
    assert move.discard_old(str(path)) == [old]
    assert names(path.parent) == [path.name]
    keys.rotate(path, OLD, key=NEW, full=True, discard_old=True)
    assert names(path.parent) == [path.name]
    holdfast.open(path, key=OLD).close()


def test_a_plain_store_can_be_encrypted_in_the_same_way(tmp_path):
    with holdfast.open(tmp_path / "s") as store:
        plain(store, "trip", 3)
        seen = view(store, "trip")
    move.rotate(str(tmp_path / "s"), None, lambda: secret_of(NEW), discard_old=True)
    with holdfast.open(tmp_path / "s", key=NEW) as store:
        assert view(store, "trip")["checkpoints"] == seen["checkpoints"]
        with pytest.raises(NotEncrypted):
            keys.rotate(holdfast.open(tmp_path / "plain").path, NEW, key=OLD, full=True)
        holdfast.open(tmp_path / "plain").close()


def test_an_old_store_that_cannot_be_deleted_whole_is_told(secret, monkeypatch):
    path, seen = secret
    unlink = os.unlink

    def kept(name, **options):
        if Path(name).name in {"store.db", "witness"}:
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", kept)
    for delete in (
        lambda: keys.rotate(path, NEW, key=OLD, full=True, discard_old=True),
        lambda: keys.discard_old(path),
    ):
        with pytest.raises(StoreFailed, match=r"2 of its files are left: store.db, witness \(Operation not permitted"):
            delete()
        is_whole(path, NEW, seen)
    monkeypatch.undo()
    assert len(keys.discard_old(path)) == 1
    assert names(path.parent) == [path.name]


def test_rotation_is_refused_while_anybody_has_it_open(secret, tmp_path):
    path, seen = secret
    with holdfast.open(path, key=OLD, readonly=True), pytest.raises(StoreBusy):
        keys.rotate(path, NEW, key=OLD, full=True)
    with pytest.raises(WrongKey):
        keys.rotate(path, NEW, key=NEW, full=True)
    with pytest.raises(BadOption):
        keys.rotate(path, None, key=OLD, full=True)
    with pytest.raises(BadOption):
        move.discard_old(str(tmp_path / "nothing"))
    assert names(path.parent) == [path.name]
    is_whole(path, OLD, seen)


def test_what_cannot_be_proven_takes_nobody_s_place(secret, monkeypatch):
    path, seen = secret

    def damaged(_store, _progress):
        raise Damaged("as if")

    monkeypatch.setattr(move, "_prove", damaged)
    with pytest.raises(Damaged):
        keys.rotate(path, NEW, key=OLD, full=True)
    assert names(path.parent) == [path.name]
    is_whole(path, OLD, seen)


def test_where_directories_cannot_change_places_nothing_is_changed(secret, monkeypatch):
    path, seen = secret
    monkeypatch.setattr(files, "_EXCHANGE", 1 << 20)  # which no system knows
    with pytest.raises(StoreFailed, match="change places"):
        keys.rotate(path, NEW, key=OLD, full=True)
    assert names(path.parent) == [path.name]
    is_whole(path, OLD, seen)


@pytest.mark.slow
def test_killed_at_any_moment_one_of_the_two_is_whole_and_found(secret):
    path, seen = secret
    key, new = OLD, NEW
    moments = [(Path, "rename"), (files, "discard"), (files, "exchange"), (move, "_carry")]
    for at in count(1, 2):  # before each of them
        died = dies(lambda key=key, new=new: keys.rotate(path, new, key=key, full=True), at, *moments)
        try:
            is_whole(path, key, seen)
        except WrongKey:
            key, new = new, key
            is_whole(path, key, seen)
        move.discard_old(str(path))
        assert (path / "dumps" / "one.dump").read_text() == "what happened"
        if not died:
            break
    assert at > 9
