"""Each defect that a campaign has found, as a case of its own."""

from __future__ import annotations

import errno
import os
import uuid

import pytest
import zstandard

import holdfast
from holdfast.agent.manifest import Manifest
from holdfast.codec.values import encode
from holdfast.errors import CorruptValue, Damaged, DiskFull, StoreFailed
from holdfast.store.catalog import ChunkRow, chunk_digest
from holdfast.store.embedded import open_embedded
from holdfast.store.packs import Packs
from holdfast.store.sealing import Values
from holdfast.store.witness import witness_report
from tests.faults.disk import Disk, ShortWrite
from tests.store.support import Hand, new_branch


@pytest.fixture
def disk(tmp_path):
    """A disk on which ``fail(what, where)`` makes calls fail; nothing fails before."""
    made = Disk(tmp_path, recording=False)

    def fail(what, where, error=None, *, once=False):
        def before(call):
            if call.what == what and where in call.site and made.before is not None:
                if once:
                    made.before = None
                raise error or OSError(errno.EIO, os.strerror(errno.EIO))

        made.before = before

    made.fail = fail
    with made.watching():
        yield made
        made.before = None


@pytest.mark.parametrize("what", ["open", "truncate", "write", "stat"])
def test_becoming_a_writer_on_a_failing_disk_is_an_error_of_ours(store_path, disk, what):
    with holdfast.open(store_path) as store:
        disk.fail(what, "locks.py")
        with pytest.raises(StoreFailed):
            store.agent("a")
        disk.fail(what, "locks.py", OSError(errno.ENOSPC, "full"))
        with pytest.raises(DiskFull):
            store.agent("a")
        disk.before = None
        store.agent("a").checkpoint("works")


def test_a_lock_file_that_cannot_be_removed_does_not_keep_the_branch(store_path, disk):
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("one")
        disk.fail("unlink", "locks.py")
        store.agent("a").close()
        agent = store.agent("a")
        agent.checkpoint("two")
        agent.close()
        store.agent("a").checkpoint("three")


def test_a_failing_close_loses_no_checkpoint(store_path, disk):
    with holdfast.open(store_path) as store:
        made = store.agent("a").checkpoint("one")
        disk.fail("close", "store/")
    disk.before = None
    with holdfast.open(store_path) as store:
        assert store.agent("a").head.id == made.id


def test_measuring_a_store_on_a_failing_disk_is_an_error_of_ours(store_path, disk):
    with holdfast.open(store_path) as store:
        for what in ("list", "stat"):
            disk.fail(what, "store/")
            with pytest.raises(StoreFailed):
                store.stats()
            disk.before = None


def test_a_disk_that_cannot_be_read_is_not_called_damage(store_path, disk):
    holdfast.open(store_path).close()
    disk.fail("read", "reading.py")
    with pytest.raises(StoreFailed):
        holdfast.open(store_path)


def test_a_path_that_cannot_be_looked_at_is_an_error_of_ours(store_path, disk):
    holdfast.open(store_path).close()
    for where in ("agent/store.py", "store/"):
        disk.fail("stat", where, once=True)
        holdfast.open(store_path).close()


def test_a_witness_that_was_written_in_part_is_completed(store_path, disk):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        disk.fail("write", "witness.py", ShortWrite(errno.ENOSPC, "half"), once=True)
        agent.checkpoint("one")
        assert witness_report(store_path).problems == ()


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("value", [None, 7, 1.5, [], [1], {"a": 1}])
def test_a_manifest_of_any_shape_is_read_or_refused(place, value):
    parts = [1, b"", b"a" * 16, ["s", b"d" * 32], b"o" * 32, [0, b""], b"m" * 32, "", 1, b"n" * 16, "checkpoint", b""]
    parts[place] = value
    try:
        Manifest.decode(encode(parts))
    except CorruptValue:
        return


def test_a_value_whose_node_is_missing_is_damage(tmp_path):
    """A seal that names a node that is not there, as somebody might write it, sums and all."""
    store = open_embedded(tmp_path / "store")
    hand = Hand(store, new_branch(store))
    hand.commit()
    node = b"n" * 32
    hand.commit(None, sealed=True, places=encode([[node], [[1, [[0, 0, 4]]], [0, [[0, "x", 4]]]]]))
    values = Values(store)
    with pytest.raises(Damaged, match="missing"):
        values.of(store.checkpoint(1))
    with pytest.raises(CorruptValue):
        values.of(store.checkpoint(2))
    store.close()


def test_a_pack_whose_frame_declares_more_than_it_may_is_damage(tmp_path):
    huge = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(2**20)))
    frame = huge[:4] + bytes([0b1110_0000]) + (2**45).to_bytes(8, "little") + huge[10:]  # eight bytes of content size
    packs = Packs(tmp_path)
    name = uuid.uuid4().bytes
    packs.path(name).write_bytes(b"HFPACK01".ljust(4096, b"\0") + bytes(frame))
    with pytest.raises(Damaged):
        packs.read(name, ChunkRow(chunk_digest(b"x"), 0, 4096, 2**20, len(frame)))
