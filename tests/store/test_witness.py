"""A store that lost acknowledged commits, or is older than this user has seen it, does not open in silence."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import Damaged, StoreWentBack
from holdfast.store import witness as module
from holdfast.store.changes import NewCheckpoint, NewRecord, Said
from holdfast.store.cipher import digest
from holdfast.store.database import open_database
from holdfast.store.manifest import mark_of
from holdfast.store.rows import BEGINNING
from holdfast.store.witness import RECORD_BYTES, Noted, initial, lost, newest, open_record, witness_report
from tests.lives import killed


@pytest.fixture
def seen(remembered):
    """What is seen of stores is remembered, in this file."""
    return remembered / "holdfast" / "seen"


def commit(store, label):
    """A checkpoint without a branch; returns its number."""
    made = NewCheckpoint(digest(b"test", label.encode()), label.encode(), b"")
    return store.change(lambda change: change.put_checkpoint(made, 0, 0, 0, 0))


def grow(path, *labels):
    with closing(open_database(path)) as store:
        for label in labels:
            commit(store, label)


def opens(path, **options):
    """How many checkpoints a store that opens has."""
    with closing(open_database(path, **options)) as store:
        return newest(store.view).n


def copied(path, to):
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(path, to)


# -- beside the catalog -------------------------------------------------------------------------------------


def test_cells_are_as_the_format_says():
    noted = Noted(2, 3, 4, -5)
    cell = module._packed(noted, b"")
    assert (len(cell), cell[:8]) == (64, b"HFWT\0\0\0\0")
    assert cell[8:40] == struct.pack(">QQQq", *noted)
    assert module._unpacked(cell, b"") == noted
    assert module._unpacked(cell, b"another's") is None
    for at in range(64):
        assert module._unpacked(cell[:at] + bytes([cell[at] ^ 1]) + cell[at + 1 :], b"") is None


def test_the_witness_follows_every_commit_of_every_handle(store_path):
    stores = [open_database(store_path) for _ in range(2)]
    for number in range(1, 20):
        store = stores[number % 2]
        assert commit(store, str(number)) == number
        if number == 7:
            store.change(lambda change: change.say(1, Said({"what": "test"})))
            store.change(lambda change: change.put_records(0, BEGINNING, [NewRecord(0, b"", b"body")]))
        noted = witness_report(store_path).newest
        assert noted == newest(store.view)
        assert noted.mark == mark_of(digest(b"test", str(number).encode()))
    assert noted[1:3] == (1, 1)
    assert witness_report(store_path).problems == ()
    for store in stores:
        store.close()


@pytest.mark.parametrize("damage", [b"", b"\0" * 128, b"x" * 64, initial()[:70]])
def test_an_unreadable_witness_is_reported_and_written_anew_by_who_has_it_open(store_path, damage):
    store = open_database(store_path)
    commit(store, "one")
    (store_path / "witness").write_bytes(damage)
    assert witness_report(store_path).problems
    commit(store, "two")
    commit(store, "three")
    assert witness_report(store_path) == (newest(store.view), ())
    (store_path / "witness").unlink()
    assert witness_report(store_path).problems == ("witness: the file is missing",)
    commit(store, "four")
    store.close()
    assert opens(store_path, readonly=True) == 4


def test_an_old_catalog_is_damage_until_somebody_accepts_it(store_path, tmp_path):
    grow(store_path, "one")
    old = copied(store_path, tmp_path / "old")
    grow(store_path, "two", "three")
    for name in ("store.db", "store.db-wal"):
        shutil.copy(old / name, store_path / name)
    for _ in range(2):
        with pytest.raises(Damaged, match="checkpoints 2 to 3") as caught:
            open_database(store_path)
    assert caught.value.lost == "checkpoints 2 to 3"
    assert type(caught.value) is Damaged
    assert opens(store_path, accept_loss=True) == 1
    grow(store_path, "another two")
    assert opens(store_path) == 2


def test_what_was_deleted_on_purpose_is_not_lost(store_path):
    store = open_database(store_path)
    for label in "abc":
        commit(store, label)
    store.change(lambda change: change.say(1, Said({"what": "test"})))
    noted = newest(store.view)
    store.change(lambda change: change.tx.do("DELETE FROM log"))
    assert lost(store.view, noted) == ["events 1 to 1"]
    store.change(lambda change: change.remember("log", noted.e))
    for numbers in ([1], [2, 3]):
        store.change(lambda change, numbers=numbers: change.delete("loose", "n", numbers))
        assert lost(store.view, noted) == []
    assert lost(store.view, noted._replace(n=4)) == ["checkpoints 1 to 4"]
    commit(store, "d")
    assert lost(store.view, noted._replace(r=2)) == ["effects 1 to 2"]
    assert lost(store.view, None) == []
    # Neither is one whose newest row is damaged: that is its agent's matter.
    store.change(lambda change: change.tx.do("UPDATE loose SET mark = mark + 1"))
    store.close()
    assert opens(store_path) == 4


def test_another_history_with_the_same_numbers_is_damage(store_path, tmp_path):
    grow(store_path, "one")
    other = copied(store_path, tmp_path / "other")
    grow(store_path, "two")
    grow(other, "another two")
    for name in ("store.db", "store.db-wal"):
        shutil.copy(other / name, store_path / name)
    with pytest.raises(Damaged, match="the checkpoint that was number 2"):
        open_database(store_path)


def test_every_damage_to_the_log_of_a_killed_writer_is_noticed(store_path, tmp_path):
    def write():
        agent = holdfast.open(store_path).agent("a")
        with (tmp_path / "ids").open("w") as said:
            for number in range(20):
                agent.state["n"] = number
                print(agent.checkpoint().id, file=said, flush=True)

    killed(write)
    ids = (tmp_path / "ids").read_text().split()
    log = (store_path / "store.db-wal").read_bytes()
    used = len(log.rstrip(b"\0"))
    assert used > 4096 * 20
    changed = [log[:at] + bytes([log[at] ^ 0x10]) + log[at + 1 :] for at in range(0, used, 8191)]
    cut = [log[:length] for length in (0, 32, used // 2, used - 1)]
    told = []
    for data in [*changed, *cut]:
        copy = copied(store_path, tmp_path / "copy")
        (copy / "store.db-wal").write_bytes(data)
        (copy / "store.db-shm").unlink()
        try:
            with holdfast.open(copy) as store:
                assert [one.id for one in store.agent("a", readonly=True).log()] == ids[::-1]
                assert data not in cut
        except Damaged as error:
            told.append(error.lost)
    assert len(told) > len(cut)
    assert all(told)
    with holdfast.open(store_path) as store:
        assert len(store.agent("a").log()) == 20


# -- outside the store --------------------------------------------------------------------------------------


@pytest.fixture
def old(store_path, tmp_path, seen):
    """A copy of the store, made before it grew."""
    grow(store_path, "one")
    made = copied(store_path, tmp_path / "old")
    grow(store_path, "two")
    return made


@pytest.mark.parametrize("readonly", [False, True])
def test_an_older_copy_put_back_is_noticed_and_can_be_accepted(store_path, old, seen, readonly):
    """Whoever only reads remembers what it saw, too."""
    assert seen.stat().st_mode & 0o077 == 0
    seen.unlink()
    assert opens(store_path, readonly=True) == 2
    copied(old, store_path)
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(StoreWentBack, match="checkpoints 2 to 2"):
            open_database(store_path, readonly=readonly)
    assert opens(store_path, readonly=readonly, trust_older=True) == 1
    assert opens(store_path) == 1
    grow(store_path, "another two")
    assert opens(store_path) == 2


def test_whoever_uses_it_is_told_what_happened_and_damage_is_told_first(store_path, tmp_path, seen):
    """Also where only an agent was added; the store says nothing about what it does not know itself."""
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("one")
    old = copied(store_path, tmp_path / "old")
    with holdfast.open(store_path) as store:
        store.agent("b")
    for name in ("store.db", "store.db-wal"):
        shutil.copy(old / name, store_path / name)
    with pytest.raises(Damaged, match="lost acknowledged commits: events") as caught:
        holdfast.open(store_path)
    assert not isinstance(caught.value, StoreWentBack)
    copied(old, store_path)
    with pytest.raises(StoreWentBack, match="is older than it was when it was last used here: events") as caught:
        holdfast.open(store_path)
    assert "trust_older=True" in caught.value.hint
    with holdfast.open(store_path, trust_older=True) as store:
        assert [info.name for info in store.agents()] == ["a"]
    holdfast.open(store_path).close()


def test_a_copy_elsewhere_is_another_store(store_path, old):
    assert opens(old) == 1
    grow(old, "another two", "another three")
    assert (opens(old), opens(store_path)) == (3, 2)
    copied(old, store_path)
    with pytest.raises(StoreWentBack, match="the checkpoint that was number 2"):
        open_database(store_path)


def test_a_store_that_was_moved_takes_its_record_along(store_path, old, tmp_path, seen):
    moved = store_path.rename(tmp_path / "moved")
    assert opens(moved) == 2
    copied(old, moved)
    with pytest.raises(StoreWentBack):
        open_database(moved)
    shutil.rmtree(moved)
    with pytest.raises(StoreWentBack):  # an older one that came to a new place, when the other is gone
        open_database(old)
    assert seen.stat().st_size == RECORD_BYTES


def test_a_kill_after_the_acknowledgement_is_enough(store_path, old):
    copied(old, store_path)
    opens(store_path, trust_older=True)
    killed(lambda: commit(open_database(store_path), "two"))
    copied(old, store_path)
    with pytest.raises(StoreWentBack):
        open_database(store_path)


@pytest.mark.parametrize("content", [b"", b"x" * 128, b"x" * 10_000])
def test_a_record_that_says_nothing_is_begun_anew(store_path, old, seen, content):
    seen.write_bytes(content)
    copied(old, store_path)
    assert opens(store_path) == 1
    grow(store_path, "two")
    copied(old, store_path)
    with pytest.raises(StoreWentBack):
        open_database(store_path)


def test_without_a_place_for_it_stores_work_as_well(store_path, old, seen, monkeypatch, tmp_path):
    copied(old, store_path)
    for name, value in (("XDG_STATE_HOME", "/dev/null/none"), ("TMPDIR", str(tmp_path))):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)  # of stores in the temporary directory nothing is remembered
            assert opens(store_path) == 1
    seen.unlink()
    seen.mkdir()
    assert opens(store_path) == 1


def test_the_oldest_record_gives_way(seen, monkeypatch):
    assert module.RECORDS_MAX * RECORD_BYTES == 512_000
    monkeypatch.setattr(module, "RECORDS_MAX", 10)
    stores = [(Path(f"/place {number}"), bytes([number]) * 16) for number in range(25)]
    for number, store in enumerate(stores):
        record = open_record(*store)
        record.merge(Noted(number))
        os.close(record.fd)
    assert seen.stat().st_size == 10 * RECORD_BYTES
    assert [module.remembered(*store).n for store in stores[15:]] == list(range(15, 25))
    assert open_record(Path("/" + "x" * 500), bytes(16)) is None


def test_processes_that_write_at_once_leave_what_one_of_them_wrote(seen):
    program = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.store.witness import Noted, open_record\n"
        "numbers = (int(sys.argv[1]), 9)\n"
        "records = [open_record(Path('/place'), bytes([number]) * 16) for number in numbers]\n"
        "for number in range(2000):\n for record in records: record.follow(Noted(number))\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(number)]) for number in range(4)]
    assert [child.wait(timeout=180) for child in children] == [0, 0, 0, 0]
    *own, shared = (module.remembered(Path("/place"), bytes([number]) * 16) for number in (0, 1, 2, 3, 9))
    # None: two of them began a record in the same place.
    assert all(noted is None or noted.n == 1999 for noted in own)
    assert shared is None or shared.n >= 1998
