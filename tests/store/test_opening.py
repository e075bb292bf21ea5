"""What a path may hold, and how a store comes into being."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress

import apsw
import pytest

from holdfast.codec.values import decode, encode
from holdfast.errors import (
    BadOption,
    Damaged,
    HoldfastError,
    NewerFormat,
    NotAStore,
    ReadOnly,
    StoreClosed,
    StoreReadOnly,
)
from holdfast.store import files, upgrade
from holdfast.store.catalog import row_sum
from holdfast.store.embedded import create_store, open_embedded
from tests.store.support import Hand, event, finish, line, names, new_branch, start


def test_new_store_has_the_layout_and_settings_of_the_format_page(store, path):
    assert {name for name in names(path) if not name.startswith("store.db-")} == {
        "store.db",
        "packs",
        "locks",
        "witness",
    }
    facts = {name: value for name, value, _ in store._select("SELECT * FROM store")}
    assert decode(facts["format"]) == upgrade.FORMAT_VERSION == store._select("PRAGMA user_version")[0][0]
    assert facts["uuid"] == store.uuid
    assert decode(facts["created"]) == store.created
    for connection in (store._reader, store._writer.connection):
        found = {
            name: connection.execute(f"PRAGMA {name}").get
            for name in (
                "application_id",
                "journal_mode",
                "synchronous",
                "trusted_schema",
                "cell_size_check",
                "wal_autocheckpoint",
            )
        }
        assert found == {
            "application_id": 0x486F6C64,
            "journal_mode": "wal",
            "synchronous": 2,
            "trusted_schema": 0,
            "cell_size_check": 1,
            "wal_autocheckpoint": 0,
        }
        assert connection.execute("PRAGMA mmap_size").get == 0
    assert store._reader.execute("PRAGMA query_only").get == 1


def test_missing_store_is_not_made_unless_asked(path):
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(NotAStore):
            open_embedded(path, **options)
    assert not path.exists()


def test_missing_parents_are_made(tmp_path):
    open_embedded(tmp_path / "a" / "b" / "store").close()


def test_empty_directory_becomes_a_store(path):
    path.mkdir()
    open_embedded(path).close()
    open_embedded(path, create=False).close()


def test_other_things_are_not_stores(path, tmp_path):
    path.write_bytes(b"text")
    with pytest.raises(NotAStore):
        open_embedded(path)
    assert path.read_bytes() == b"text"
    with pytest.raises(NotAStore):
        open_embedded(path / "below")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(NotAStore):
        open_embedded(other)
    assert names(other) == ["notes.txt"]


def test_foreign_database_is_not_a_store_and_stays_untouched(path):
    path.mkdir()
    connection = apsw.Connection(str(path / "store.db"))
    connection.execute("PRAGMA journal_mode=WAL; CREATE TABLE t (x)").fetchall()
    connection.close()
    before = (path / "store.db").read_bytes()
    with pytest.raises(NotAStore):
        open_embedded(path)
    assert names(path) == ["store.db"]
    assert (path / "store.db").read_bytes() == before
    (path / "store.db").write_bytes(b"not a database at all, only text" * 200)
    with pytest.raises(NotAStore):
        open_embedded(path)


@pytest.mark.parametrize("position", [0, 17, 70, 100])
def test_damaged_first_page_is_damage(path, position):
    open_embedded(path).close()
    content = bytearray((path / "store.db").read_bytes())
    content[position] ^= 0x55
    (path / "store.db").write_bytes(content)
    with pytest.raises(Damaged):
        open_embedded(path)


def test_missing_database_is_damage(path):
    open_embedded(path).close()
    (path / "store.db").unlink()
    with pytest.raises(Damaged):
        open_embedded(path)


def _set_version(path, version, *, table=True):
    connection = apsw.Connection(str(path / "store.db"))
    connection.execute(f"PRAGMA user_version={version}")
    if table:
        value = encode(version)
        connection.execute(
            "UPDATE store SET value=?, sum=? WHERE name='format'", (value, row_sum("store", "format", value))
        )
    connection.close()


def test_newer_format_is_refused_and_a_flipped_number_is_damage(path):
    open_embedded(path).close()
    _set_version(path, 2)
    with pytest.raises(NewerFormat):
        open_embedded(path)
    _set_version(path, 1)
    open_embedded(path).close()
    _set_version(path, 2, table=False)
    with pytest.raises(Damaged):
        open_embedded(path)


def test_older_format_goes_up_one_step_at_a_time(path, monkeypatch):
    open_embedded(path).close()
    taken = []
    monkeypatch.setattr(upgrade, "FORMAT_VERSION", 3)
    monkeypatch.setattr(upgrade, "STEPS", {1: lambda _: taken.append(1), 2: lambda _: taken.append(2)})
    store = open_embedded(path)
    assert taken == [1, 2]
    assert store._select("PRAGMA user_version") == [(3,)]
    store.close()
    open_embedded(path).close()
    assert taken == [1, 2]


def test_failed_step_leaves_the_older_store(path, monkeypatch):
    open_embedded(path).close()

    def fail(connection):
        connection.execute("DELETE FROM store")
        raise RuntimeError("step failed")

    with monkeypatch.context() as patch:
        patch.setattr(upgrade, "FORMAT_VERSION", 2)
        patch.setattr(upgrade, "STEPS", {1: fail})
        with pytest.raises(RuntimeError):
            open_embedded(path)
    open_embedded(path).close()


def test_closed_handle_refuses_everything(path):
    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    store.close()
    store.close()
    for call in (store.agents, hand.commit, store.flush, lambda: store.add_events(1, [event()]), store.counts):
        with pytest.raises(StoreClosed):
            call()
    assert not hand.lease.held


def test_unknown_durability_is_refused(path):
    with pytest.raises(BadOption):
        open_embedded(path, durability="perhaps")


def test_readonly_handle_reads_beside_a_writer(store, path):
    hand = Hand(store, new_branch(store))
    reader = open_embedded(path, readonly=True)
    hand.commit()
    assert reader.readonly
    assert [row.n for row in reader.checkpoints()] == [1]
    for change in (lambda: reader.add_events(1, [event()]), lambda: reader.lease(hand.row)):
        with pytest.raises(ReadOnly):
            change()
    reader.close()


def test_second_handle_in_one_process_keeps_the_locks_of_the_first(store, path):
    """Closing a descriptor of store.db by other means than SQLite's would let another process in."""
    hand = Hand(store, new_branch(store))
    store._writer.connection.execute("BEGIN IMMEDIATE")
    for _ in range(3):
        open_embedded(path, readonly=True).close()
    blocked = subprocess.run(
        [sys.executable, "-c", _TRY_TO_WRITE, str(path / "store.db")],
        capture_output=True,
        text=True,
        check=False,
    )
    store._writer.connection.execute("ROLLBACK")
    assert "locked" in blocked.stderr
    hand.commit()


_TRY_TO_WRITE = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], timeout=0.1).execute("BEGIN IMMEDIATE")
"""


@pytest.mark.parametrize("_round", range(5))
def test_two_processes_creating_at_once_get_one_store(path, _round):
    children = [start("create", path) for _ in range(3)]
    for child in children:
        assert line(child) == "ready"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert len({finish(child) for child in children}) == 1
    assert names(path.parent) == [path.name]


def test_crash_while_creating_leaves_no_store_and_is_swept(path, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    # A process that dies cannot clean up, so neither may this one.
    monkeypatch.setattr(files, "discard", lambda _directory: None)
    monkeypatch.setattr(files.os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        create_store(path)
    monkeypatch.undo()
    assert not path.exists()
    assert len(names(path.parent)) == 1
    open_embedded(path).close()
    assert names(path.parent) == [path.name]


@pytest.fixture
def read_only_mount(path):
    if os.geteuid() != 0:
        pytest.skip("needs root for a read-only mount")
    made = []

    def mount():
        for command in (["mount", "--bind", path, path], ["mount", "-o", "remount,ro,bind", path]):
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
            made.append(path) if not made else None

    yield mount
    if made:
        subprocess.run(["umount", path], check=True)


@pytest.mark.root
@pytest.mark.parametrize("leave", ["log and index", "database alone"])
def test_read_only_file_system_can_be_read(path, read_only_mount, leave):
    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    hand.commit()
    store.close()
    if leave == "database alone":
        (path / "store.db-wal").unlink()
        (path / "store.db-shm").unlink()
    read_only_mount()
    for asked in (False, True):
        store = open_embedded(path, readonly=asked)
        assert store.readonly
        assert [row.n for row in store.checkpoints()] == [1]
        with pytest.raises(ReadOnly if asked else StoreReadOnly):
            store.add_events(1, [event()])
        with pytest.raises(ReadOnly if asked else StoreReadOnly):
            store.lease(hand.row)
        store.close()


@pytest.mark.root
def test_creating_on_a_read_only_file_system_says_so(path, read_only_mount):
    path.mkdir()
    read_only_mount()
    with pytest.raises(StoreReadOnly):
        open_embedded(path / "store")


def test_flipped_bits_of_the_database_give_typed_errors_only(path, tmp_path):
    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    for _ in range(20):
        hand.commit(os.urandom(300))
    store.close()
    content = (path / "store.db").read_bytes()
    dice = random.Random(7)
    for _ in range(200):
        position = dice.randrange(len(content))
        flipped = bytearray(content)
        flipped[position] ^= 1 << dice.randrange(8)
        (path / "store.db").write_bytes(flipped)
        for name in ("store.db-wal", "store.db-shm"):
            (path / name).unlink(missing_ok=True)
        try:
            store = open_embedded(path, readonly=True)
        except HoldfastError:
            continue
        with suppress(Damaged):
            rows = store.ancestry(store.branch_row(1).head)
            assert [row.id for row in rows] == hand.ids[::-1]
        store.close()


def test_damaged_newest_checkpoint_does_not_shut_the_whole_store(path):
    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    hand.commit(manifest=b"m" * 200)
    store.close()
    content = (path / "store.db").read_bytes()
    (path / "store.db").write_bytes(content.replace(b"m" * 200, b"m" * 199 + b"n"))
    store = open_embedded(path)
    with pytest.raises(Damaged, match="table checkpoint, row 1"):
        store.checkpoint(1)
    store.close()
