"""A catalog that lost acknowledged commits does not open in silence."""

from __future__ import annotations

import shutil

import pytest

from holdfast.errors import Damaged
from holdfast.store.embedded import open_embedded
from holdfast.store.witness import EMPTY, Witness, initial, newest, pack_slot, unpack_slot, witness_report
from tests.store.support import Hand, new_branch, start


def test_slots_are_as_the_format_page_says():
    slot = pack_slot(Witness(1, 2, 3, 4, b"i" * 16))
    assert len(slot) == 64
    assert slot[:8] == b"HFWT\0\0\0\0"
    assert [int.from_bytes(slot[start : start + 8], "big") for start in (8, 16, 24, 32)] == [1, 2, 3, 4]
    assert slot[40:56] == b"i" * 16
    assert unpack_slot(slot) == Witness(1, 2, 3, 4, b"i" * 16)
    for position in range(64):
        assert unpack_slot(slot[:position] + bytes([slot[position] ^ 1]) + slot[position + 1 :]) is None
    assert newest(initial()) == EMPTY


def test_witness_follows_every_commit(store, path):
    hand = Hand(store, new_branch(store))
    for _ in range(5):
        n = hand.commit()
        noted = witness_report(path).newest
        assert (noted.n, noted.e, noted.id_prefix) == (n, store.newest()[1], hand.head[:16])
    assert witness_report(path).problems == ()


def test_two_handles_write_one_witness(store, path):
    one = Hand(store, new_branch(store, "one"))
    other = open_embedded(path)
    two = Hand(other, new_branch(other, "two"))
    sequences = []
    for _ in range(3):
        one.commit()
        two.commit()
        sequences.append(witness_report(path).newest.sequence)
    assert sequences == [sequences[0], sequences[0] + 2, sequences[0] + 4]
    other.close()


@pytest.mark.parametrize("damage", [b"", b"\0" * 128, b"x" * 64])
def test_unreadable_witness_is_tolerated_and_reported(path, damage):
    store = open_embedded(path)
    Hand(store, new_branch(store)).commit()
    store.close()
    (path / "witness").write_bytes(damage)
    assert witness_report(path).problems
    store = open_embedded(path)
    hand = Hand(store, store.branch_row(1))
    hand.commit()
    hand.commit()
    store.close()
    assert witness_report(path).problems == ()
    assert witness_report(path).newest.n == 3


def test_missing_witness_is_reported(path):
    open_embedded(path).close()
    (path / "witness").unlink()
    assert witness_report(path).problems == ("witness: the file is missing",)
    open_embedded(path, readonly=True).close()


def test_old_catalog_put_back_is_damage(path, tmp_path):
    store = open_embedded(path)
    Hand(store, new_branch(store)).commit()
    store.close()
    shutil.copy(path / "store.db", tmp_path / "old.db")
    store = open_embedded(path)
    Hand(store, store.branch_row(1)).commit()
    store.close()
    shutil.copy(tmp_path / "old.db", path / "store.db")
    with pytest.raises(Damaged) as caught:
        open_embedded(path)
    assert "checkpoints 2 to 2" in caught.value.lost
    assert "store.db" in caught.value.what
    store = open_embedded(path, accept_loss=True)
    assert store.newest()[0] == 1
    store.close()
    store = open_embedded(path)
    Hand(store, store.branch_row(1)).commit()
    store.close()
    open_embedded(path).close()


def test_replaced_history_is_damage(path, tmp_path):
    store = open_embedded(path)
    hand = Hand(store, new_branch(store))
    hand.commit()
    store.close()
    shutil.copytree(path, tmp_path / "fork")
    for place in (path, tmp_path / "fork"):
        store = open_embedded(place)
        Hand(store, store.branch_row(1)).commit()
        store.close()
    shutil.copy(tmp_path / "fork" / "store.db", path / "store.db")
    with pytest.raises(Damaged, match="number 2"):
        open_embedded(path)


def test_every_damage_to_the_log_of_a_killed_writer_is_noticed(path, tmp_path):
    child = start("kill_in_commit", path, "one")
    acknowledged = [int(text) for text in child.communicate(timeout=180)[0].split()]
    log = (path / "store.db-wal").read_bytes()
    assert acknowledged == list(range(1, 21))
    assert len(log) > 4096 * 20
    for position in range(0, len(log), 3571):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        (copy / "store.db-wal").write_bytes(log[:position] + bytes([log[position] ^ 0x10]) + log[position + 1 :])
        try:
            store = open_embedded(copy)
        except Damaged:
            pass
        else:
            assert len(store.ancestry(20)) == 20
            store.close()
        shutil.rmtree(copy)
    for length in (0, 32, len(log) // 2, len(log) - 1):
        shutil.copytree(path, copy)
        (copy / "store.db-wal").write_bytes(log[:length])
        with pytest.raises(Damaged):
            open_embedded(copy)
        shutil.rmtree(copy)
    store = open_embedded(path)
    assert len(store.ancestry(20)) == 20
    store.close()
