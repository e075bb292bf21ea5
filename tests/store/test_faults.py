"""Disks that fail: no room, flushes that report an error, packs that meet every kind of trouble."""

from __future__ import annotations

import errno
import os
import subprocess
from collections import Counter
from contextlib import suppress

import apsw
import pytest

from holdfast.errors import Damaged, DiskFull, HoldfastError, InputError, StoreFailed, StorePoisoned
from holdfast.store.catalog import chunk_digest
from holdfast.store.embedded import open_embedded
from holdfast.store.packs import ALIGN_BYTES, CHUNK_BYTES, MAGIC, SystemIo
from tests.store.support import Hand, event, names, new_branch


class FailingFlush(apsw.VFS):
    """SQLite on a disk whose flushes can be made to fail."""

    def __init__(self) -> None:
        self.failing: str | None = None
        self.failed = 0
        super().__init__("failing-flush", "")

    def xOpen(self, name, flags):  # noqa: N802  SQLite's name
        return FailingFile(self, name, flags)


class FailingFile(apsw.VFSFile):
    def __init__(self, vfs, name, flags) -> None:
        self.vfs = vfs
        self.which = "log" if flags[0] & apsw.SQLITE_OPEN_WAL else "database"
        super().__init__("", name, flags)

    def xSync(self, flags):  # noqa: N802
        if self.vfs.failing == self.which:
            self.vfs.failed += 1
            error = apsw.IOError("injected")
            error.extendedresult = apsw.SQLITE_IOERR_FSYNC
            raise error
        super().xSync(flags)


@pytest.fixture
def flush():
    vfs = FailingFlush()
    yield vfs
    vfs.unregister()


def test_failed_flush_poisons_without_a_retry_and_reopening_goes_on(path, flush):
    store = open_embedded(path, vfs="failing-flush")
    hand = Hand(store, new_branch(store))
    hand.commit()
    flush.failing = "log"
    with pytest.raises(StorePoisoned):
        hand.commit()
    flush.failing = None
    assert flush.failed == 1
    for change in (hand.commit, lambda: store.add_events(1, [event()]), lambda: store.lease(hand.row), store.flush):
        with pytest.raises(StorePoisoned):
            change()
    assert store.checkpoint(1).id == hand.ids[0]
    store.close()
    again = open_embedded(path)
    other = Hand(again, hand.row)
    # The commit that failed was never acknowledged: it is there whole, or not at all.
    assert len(again.ancestry(other.row.head)) == other.row.head in {1, 2}
    other.commit()
    again.close()


def test_failed_flush_while_folding_poisons(path, flush):
    store = open_embedded(path, vfs="failing-flush")
    hand = Hand(store, new_branch(store))
    hand.commit()
    flush.failing = "database"
    store._folding._attempt(store._folding._fold)
    flush.failing = None
    with pytest.raises(StorePoisoned):
        hand.commit()
    store.close()
    again = open_embedded(path)
    assert again.checkpoint(1).id == hand.ids[0]
    again.close()


def test_failed_flush_in_batched_mode_reaches_the_barrier_and_the_next_call(path, flush):
    store = open_embedded(path, durability="batched", vfs="failing-flush")
    hand = Hand(store, new_branch(store))
    hand.commit()
    store.flush()
    flush.failing = "log"
    hand.commit()
    with pytest.raises(StorePoisoned):
        store.flush()
    flush.failing = None
    with pytest.raises(StorePoisoned):
        hand.commit()
    with pytest.raises(StorePoisoned):
        store.close()
    again = open_embedded(path)
    assert again.checkpoint(1).id == hand.ids[0]
    again.close()


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.root
@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_full_disk_loses_nothing_and_works_again_with_room(small_disk, durability):
    store = open_embedded(small_disk / "store", durability=durability)
    hand = Hand(store, new_branch(store))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    accepted = []
    commit = _fill(hand, accepted)
    pending = commit.id if durability == "batched" else None
    assert accepted
    assert [row.id for row in store.checkpoints()] == accepted
    with pytest.raises(DiskFull):
        store.commit(hand.next(os.urandom(20_000)))
    ballast.unlink()
    if pending:
        store.flush()
        accepted.append(pending)
        hand.head = pending
    commit = hand.next(b"more")
    store.commit(commit)
    store.flush()
    accepted.append(commit.id)
    assert [row.id for row in store.checkpoints()] == accepted
    assert store.engine_check(quick=False) == []
    store.close()
    again = open_embedded(small_disk / "store")
    assert [row.id for row in again.checkpoints()] == accepted
    again.close()


def _fill(hand, accepted):
    """Commit until there is no room; the commit that found none is returned."""
    while True:
        commit = hand.next(os.urandom(20_000))
        try:
            hand.store.commit(commit)
            hand.store.flush()
        except DiskFull:
            return commit
        hand.head = commit.id
        accepted.append(commit.id)


@pytest.mark.root
def test_creating_without_room_leaves_nothing(small_disk):
    with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(DiskFull):
        open_embedded(small_disk / "store")
    assert names(small_disk) == ["ballast"]


@pytest.mark.root
def test_pack_without_room_leaves_nothing(small_disk):
    store = open_embedded(small_disk / "store")
    hand = Hand(store, new_branch(store))
    data = os.urandom(CHUNK_BYTES)
    commit = hand.next(chunks=[(chunk_digest(data), data)])
    with pytest.raises(DiskFull):
        store.commit(commit)
    assert names(small_disk / "store" / "packs") == []
    hand.depth -= 1
    hand.commit()
    store.close()


# Packs


class FailingIo(SystemIo):
    """The system's calls, of which the n-th of a kind fails, or writes less than asked."""

    def __init__(self, call="", at=0, code=errno.EIO, short=False, direct=True) -> None:
        self.call, self.at, self.code, self.short, self.direct = call, at, code, short, direct
        self.seen = Counter()

    def _note(self, call):
        self.seen[call] += 1
        if call == self.call and self.seen[call] == self.at:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path, flags):
        self._note("open")
        if not self.direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return super().open(path, flags)

    def pwrite(self, fd, data, offset):
        self._note("pwrite")
        return super().pwrite(fd, data[: max(1, len(data) * 2 // 3)] if self.short else data, offset)

    def pread(self, fd, into, offset):
        self._note("pread")
        return super().pread(fd, into[: max(1, len(into) // 2)] if self.short else into, offset)

    def fsync(self, fd):
        self._note("fsync")
        super().fsync(fd)

    def rename(self, old, new):
        self._note("rename")
        super().rename(old, new)

    def fsync_directory(self, path):
        self._note("fsync_directory")
        super().fsync_directory(path)


def bulk(*sizes):
    datas = [os.urandom(size) for size in sizes]
    return [(chunk_digest(data), data) for data in datas]


def test_chunks_come_back_and_are_stored_once(store, path):
    hand = Hand(store, new_branch(store))
    chunks = bulk(0, 1, 4095, 4096, 4097, 300_000, CHUNK_BYTES)
    hand.commit(chunks=[*chunks, chunks[0]])
    assert list(store.chunks([digest for digest, _ in chunks])) == [data for _, data in chunks]
    hand.commit(chunks=chunks)
    (name,) = names(path / "packs")
    (pack,) = store.pack_rows()
    content = (path / "packs" / name).read_bytes()
    assert content[:8] == MAGIC
    assert len(content) == pack.size
    rows = store.chunk_rows(pack.p)
    assert all(row.offset % ALIGN_BYTES == 0 and row.length == row.stored for row in rows)
    more = bulk(10)
    hand.commit(chunks=[*chunks, *more])
    assert len(names(path / "packs")) == 2
    assert store.sizes()["packs"] > CHUNK_BYTES


@pytest.mark.parametrize("options", [{"short": True}, {"direct": False}, {"short": True, "direct": False}])
def test_short_writes_and_no_direct_io_change_nothing(path, options):
    store = open_embedded(path, io=FailingIo(**options))
    hand = Hand(store, new_branch(store))
    chunks = bulk(10, 5000, 400_000)
    hand.commit(chunks=chunks)
    assert list(store.chunks([digest for digest, _ in chunks])) == [data for _, data in chunks]
    store.close()


def test_every_failing_call_of_a_pack_is_typed_and_leaves_nothing_behind(path):
    open_embedded(path).close()
    counting = FailingIo()
    store = open_embedded(path, io=counting)
    branch = new_branch(store)
    Hand(store, branch).commit(chunks=bulk(10, 5000))
    store.close()
    calls = [(call, at) for call, count in counting.seen.items() for at in range(1, count + 1)]
    assert {"open", "pwrite", "fsync", "rename", "fsync_directory"} <= {call for call, _ in calls}
    for call, at in calls:
        for code in (errno.EIO, errno.ENOSPC, errno.EMFILE):
            store = open_embedded(path, io=FailingIo(call, at, code))
            before = sorted(names(path / "packs")), store.newest()
            hand = Hand(store, branch)
            commit = hand.next(chunks=bulk(10, 5000))
            with pytest.raises(HoldfastError) as caught:
                store.commit(commit)
            flush = call.startswith("fsync") and code != errno.ENOSPC
            expected = StorePoisoned if flush else DiskFull if code == errno.ENOSPC else StoreFailed
            assert type(caught.value) is expected
            assert (sorted(names(path / "packs")), store.newest()[0]) == (before[0], before[1][0])
            if flush:
                with pytest.raises(StorePoisoned):
                    store.commit(commit)
            else:
                store.commit(commit)
            store.close()


@pytest.mark.parametrize(("call", "code"), [("open", errno.EMFILE), ("pread", errno.EIO)])
def test_failing_read_of_a_pack_is_typed_and_the_next_one_works(path, call, code):
    store = open_embedded(path)
    chunks = bulk(5000)
    Hand(store, new_branch(store)).commit(chunks=chunks)
    store.close()
    store = open_embedded(path, io=FailingIo(call, 1, code))
    with pytest.raises(StoreFailed):
        list(store.chunks([chunks[0][0]]))
    assert list(store.chunks([chunks[0][0]])) == [chunks[0][1]]
    store.close()


def test_interrupted_pack_write_goes_on(path):
    store = open_embedded(path, io=FailingIo("pwrite", 2, errno.EINTR))
    hand = Hand(store, new_branch(store))
    hand.commit(chunks=bulk(10, 5000))
    store.close()


def test_data_that_changes_while_it_is_saved_is_refused(store, path):
    hand = Hand(store, new_branch(store))
    with pytest.raises(InputError):
        hand.commit(chunks=[(b"\0" * 32, b"other")])
    assert names(path / "packs") == []
    assert store.newest()[0] == 0


def test_every_damage_to_a_pack_is_noticed(store, path):
    hand = Hand(store, new_branch(store))
    chunks = bulk(100, 5000)
    hand.commit(chunks=chunks)
    (name,) = names(path / "packs")
    pack = path / "packs" / name
    content = pack.read_bytes()
    for position in (ALIGN_BYTES, ALIGN_BYTES + 99, 2 * ALIGN_BYTES, 2 * ALIGN_BYTES + 4999):
        pack.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(Damaged):
            list(store.chunks([digest for digest, _ in chunks]))
    pack.write_bytes(content[: 2 * ALIGN_BYTES + 100])
    with pytest.raises(Damaged):
        list(store.chunks([chunks[1][0]]))
    pack.unlink()
    with pytest.raises(Damaged, match="missing"):
        list(store.chunks([chunks[0][0]]))
    with pytest.raises(Damaged):
        list(store.chunks([b"\0" * 32]))


def test_fenced_commit_takes_its_pack_back(store, path):
    hand = Hand(store, new_branch(store))
    hand.head = b"\0" * 32
    with pytest.raises(HoldfastError):
        hand.commit(chunks=bulk(10))
    assert names(path / "packs") == []


def test_chunk_that_vanished_before_the_commit_is_written_again(store, path, monkeypatch):
    hand = Hand(store, new_branch(store))
    chunks = bulk(10)
    hand.commit(chunks=chunks)
    real = store.chunk_row(chunks[0][0])
    answers = [real]
    store._writer.transaction(lambda: store._writer._run("DELETE FROM chunk"))
    monkeypatch.setattr(type(store), "chunk_row", lambda self, digest: answers.pop() if answers else None)
    hand.commit(chunks=chunks)
    monkeypatch.undo()
    assert list(store.chunks([chunks[0][0]])) == [chunks[0][1]]
