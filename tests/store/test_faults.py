"""Disks that fail: no room, flushes that report an error, a log that is taken away. Each is told as what it is."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import pytest

import holdfast
from holdfast.errors import DiskFull, Fenced, StoreFailed, StorePoisoned
from holdfast.store.database import open_database
from tests.limits import limits


class Disk(apsw.VFS):
    """SQLite's disk. ``on_sync(which)`` is called before each flush, of the ``log`` or the ``database``."""

    def __init__(self):
        self.well()
        super().__init__("failing-disk", "unix", makedefault=True)

    def well(self):
        self.on_sync = lambda _which: None
        self.failed = 0
        self.full = False

    def fail(self, name):
        def failing(which):
            if which == name:
                self.failed += 1
                error = apsw.IOError("injected")
                error.extendedresult = apsw.SQLITE_IOERR_FSYNC
                raise error

        self.on_sync = failing

    def xOpen(self, name, flags):  # noqa: N802  SQLite's name
        return File(self, name, flags)


class File(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        self.disk = disk
        self.which = "log" if flags[0] & apsw.SQLITE_OPEN_WAL else "database"
        super().__init__("unix", name, flags)

    def xWrite(self, data, offset):  # noqa: N802
        if self.disk.full:
            raise apsw.FullError
        super().xWrite(data, offset)

    def xSync(self, flags):  # noqa: N802
        self.disk.on_sync(self.which)
        super().xSync(flags)


@pytest.fixture
def disk():
    made = Disk()
    yield made
    made.well()
    made.unregister()


def step(agent, number, bulk=0):
    agent.state["n"] = number
    if bulk:
        agent.state["bulk"] = os.urandom(bulk)
    return agent.checkpoint(str(number))


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def goes_on(path, safe):
    """What was acknowledged is there, what failed is there whole or not at all, and work goes on."""
    with holdfast.open(path) as store:
        agent = store.agent("a")
        labels = [int(checkpoint.label) for checkpoint in agent.log()][::-1]
        assert labels[: safe + 1] == list(range(safe + 1))
        assert agent.state["n"] == labels[-1]
        step(agent, labels[-1] + 1)
        assert store.verify().ok


@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_failed_flush_is_not_tried_again_and_opening_anew_goes_on(store_path, disk, durability):
    store = holdfast.open(store_path, durability=durability)
    agent, other = store.agent("a"), store.agent("other")
    step(agent, 0)
    store.flush()
    disk.fail("log")
    with pytest.raises(StorePoisoned, match="unknown") as caught:
        (step(agent, 1), store.flush())
    assert "open it again" in caught.value.hint
    disk.well()
    for change in (
        lambda: step(agent, 2), lambda: step(other, 0), lambda: store.agent("b"), lambda: store.tag("a", "t"),
        agent.flush, store.flush, store.flush,
    ):  # fmt: skip
        with pytest.raises(StorePoisoned):
            change()
    assert agent.state["n"] == 2
    assert store.agent("a", readonly=True).state["n"] == 0
    store.close()  # everybody was told
    goes_on(store_path, 0)


def test_closing_tells_of_a_failed_flush_that_nobody_was_told_of(store_path, disk):
    store = holdfast.open(store_path, durability="batched")
    step(store.agent("a"), 0)
    store.flush()
    disk.fail("log")
    step(store.agent("a"), 1)
    with pytest.raises(StorePoisoned):
        store.close()
    assert store.closed
    disk.well()
    goes_on(store_path, 0)


def test_a_flush_that_fails_while_the_log_is_folded_costs_nothing(store_path, disk):
    with limits({"FOLD_FRAMES": 20}):
        store = holdfast.open(store_path)
        agent = store.agent("a")
        disk.fail("database")
        number = 0
        while disk.failed < 3:
            step(agent, number)
            number += 1
        disk.well()
        step(agent, number)
        store.close()
    goes_on(store_path, number)


def test_a_log_that_is_taken_away_during_a_commit(store_path, disk):
    store = holdfast.open(store_path)
    agent = store.agent("a")
    step(agent, 0)

    def take(which):
        if which == "log":
            (store_path / "store.db-wal").unlink()
            disk.well()

    disk.on_sync = take
    with pytest.raises(StorePoisoned, match="removed or replaced while the store was open"):
        step(agent, 1)
    with pytest.raises(StorePoisoned):
        step(agent, 2)
    store.close()


# -- packs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("fsync", errno.EIO, StorePoisoned),
        ("fsync", errno.ENOSPC, DiskFull),
        ("write", errno.EIO, StoreFailed),
        ("write", errno.EDQUOT, DiskFull),
        ("open", errno.EMFILE, StoreFailed),
        ("rename", errno.EIO, StoreFailed),
    ],
)
@pytest.mark.parametrize("durability", ["commit", "batched"])
def test_a_large_value_on_a_disk_that_fails(store_path, monkeypatch, call, number, kind, durability):
    store = holdfast.open(store_path, durability=durability)
    agent = store.agent("a")
    step(agent, 0, bulk=300_000)
    store.flush()
    before, real = names(store_path / "packs"), getattr(os, call)

    def failing(what, *args, **more):
        place = str(Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what)
        if "/packs/tmp-" in place:
            raise OSError(number, os.strerror(number))
        return real(what, *args, **more)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(kind) as caught:
        step(agent, 1, bulk=300_000)
    assert type(caught.value) is kind
    monkeypatch.undo()
    assert names(store_path / "packs") == before
    assert (agent.dirty, agent.state["n"]) == (True, 1)
    if kind is StorePoisoned:
        for change in (lambda: step(agent, 1), lambda: store.agent("b"), store.flush, lambda: store.tag("a", "t")):
            with pytest.raises(StorePoisoned, match="a flush failed"):
                change()
    else:
        step(agent, 1)
        assert len(names(store_path / "packs")) == 2
    with suppress(StorePoisoned):
        store.close()
    goes_on(store_path, int(kind is not StorePoisoned))


def test_a_large_value_that_cannot_be_read_now_can_be_read_later(store_path, monkeypatch):
    with holdfast.open(store_path) as store:
        bulk = store.agent("a").state["bulk"] = os.urandom(300_000)
        store.agent("a").checkpoint()
        state = store.agent("a", readonly=True).state
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
            with pytest.raises(StoreFailed, match="cannot be read"):
                _ = state["bulk"]
        assert state["bulk"] == bulk


def test_who_is_fenced_takes_the_pack_back(store_path):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        step(agent, 0)
        other = open_database(store_path)
        other.change(lambda change: change.move(change.branch_at(1), change.branch_at(1)._replace(generation=99)))
        other.close()
        with pytest.raises(Fenced):
            step(agent, 1, bulk=300_000)
        assert names(store_path / "packs") == []


# -- no room ------------------------------------------------------------------------------------------------


@contextmanager
def small(path):
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.root
def test_without_room_no_store_is_made_and_nothing_is_left(tmp_path):
    with small(tmp_path / "disk") as place:
        with (place / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(DiskFull, match="nothing was changed"):
            holdfast.open(place / "store")
        assert names(place) == ["ballast"]
        (place / "ballast").unlink()
        holdfast.open(place / "store").close()


@pytest.mark.root
@pytest.mark.parametrize("readonly", [False, True])
def test_without_room_a_copied_store_is_not_called_a_failed_disk(tmp_path, readonly):
    """SQLite needs a file beside it that copies do not have."""
    with small(tmp_path / "disk") as place:
        with holdfast.open(place / "store") as store:
            step(store.agent("a"), 0)
        (place / "store" / "store.db-shm").unlink()
        with (place / "ballast").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(DiskFull, match="no room on the disk"):
            holdfast.open(place / "store", readonly=readonly)
        (place / "ballast").unlink()
        goes_on(place / "store", 0)


def test_agents_that_arrived_before_the_disk_was_full_are_told_and_another_push_brings_the_others(tmp_path, disk):
    with holdfast.open(tmp_path / "source") as source, holdfast.open(tmp_path / "dest") as dest:
        for name in "abc":
            step(source.agent(name), 0)

        def fills(_what, _done, _total):
            disk.full = len(dest.agents()) == 2

        with pytest.raises(DiskFull) as caught:
            source.push(dest, progress=fills)
        assert "2 of 3 agents arrived before that" in caught.value.message
        assert "nothing was changed" not in caught.value.message
        disk.full = False
        assert [one.status for one in source.push(dest).agents] == ["unchanged", "unchanged", "new"]


def test_what_was_accepted_on_a_full_disk_is_written_when_there_is_room(store_path, disk):
    """Also after closing was refused for it."""
    store = holdfast.open(store_path, durability="batched")
    agent = store.agent("a")
    step(agent, 0)
    store.flush()
    disk.full = True
    with pytest.raises(DiskFull):
        (step(agent, 1), store.flush())
    with pytest.raises(DiskFull):
        store.close()
    assert not store.closed
    disk.full = False
    store.close()
    with holdfast.open(store_path) as store:
        assert store.agent("a").state["n"] == 1
    goes_on(store_path, 1)
