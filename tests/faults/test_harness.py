"""The instruments themselves: what is recorded is what happened, and what is flushed is never lost in a replay."""

from __future__ import annotations

import errno
import os
import random

import pytest

from tests.faults import failing, script, sites
from tests.faults.campaign import quiet, remembering
from tests.faults.disk import Disk
from tests.faults.isolated import Died, isolated
from tests.faults.replay import SECTOR_BYTES, Replay


def at_end(disk):
    replay = Replay(disk)
    while replay.at < len(disk.calls):
        replay.step()
    return replay


def test_a_recording_replayed_whole_is_the_directory(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    disk = Disk(place)
    with disk.watching(), script.small(), quiet(), remembering(place / "state"):
        script.perform(place / "store", script.Ledger())
    there = {
        str(path.relative_to(place)): None if path.is_dir() else path.read_bytes()
        for path in place.rglob("*")
        if not path.name.endswith("-shm")  # SQLite keeps it in memory, and makes it anew
    }
    assert at_end(disk).everything() == there


@pytest.fixture
def written(tmp_path):
    """A file that is flushed by name and content, then written to without a flush."""
    disk = Disk(tmp_path)
    with disk.watching():
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, b"a" * 2_000, 0)
        os.fsync(fd)
        directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.pwrite(fd, b"b" * 1_500, 100)
        os.close(fd)
        os.close(directory)
    return disk


def test_what_was_flushed_is_there_and_what_was_not_may_be_torn_by_sectors(written):
    replay = at_end(written)
    atoms = replay.atoms()
    assert replay.state(atoms, [False] * len(atoms)) == {"file": b"a" * 2_000}
    contents = {state["file"] for state in replay.states(random.Random(1), 50)}
    assert len(contents) > 6
    for content in contents:
        assert content[:100] == b"a" * 100
        assert content[1_600:] == b"a" * 400
        pieces = [content[start : start + SECTOR_BYTES] for start in range(SECTOR_BYTES, 1_500, SECTOR_BYTES)]
        assert all(len(set(piece)) == 1 for piece in pieces[:2])


def test_a_flush_that_failed_has_lost_what_no_later_one_brings_back(tmp_path):
    disk = Disk(tmp_path)

    def refuse(call):
        if call.what == "sync":
            disk.before = None
            raise OSError(errno.EIO, "injected")

    with disk.watching():
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.pwrite(fd, b"lost", 0)
        disk.before = refuse
        with pytest.raises(OSError, match="injected"):
            os.fsync(fd)
        os.fsync(fd)
        os.close(fd)
        os.close(directory)
    replay = at_end(disk)
    assert replay.state([], []) == {"file": b""}


def test_a_try_that_hangs_dies_or_raises_is_told(tmp_path):
    assert isolated(lambda _say: 7) == 7
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        isolated(lambda _say: 1 / 0)
    with pytest.raises(Died) as death:
        isolated(lambda say: (say("one"), os.kill(os.getpid(), 9)))
    assert (death.value.signal, death.value.said) == (9, ["one"])
    with pytest.raises(Died, match="no answer"):
        isolated(lambda _say: __import__("time").sleep(60), limit_s=0.2)


def test_every_line_that_calls_the_disk_is_come_to_by_some_life():
    """Those where only a failure leads excepted: the campaign counts them when it fails what is before them."""
    written = sites.written()
    reached: set[str] = set()
    for _ in range(3):  # what threads in the background come to differs: each life is lived again if need be
        reached |= {site.where for found in failing.known_sites().values() for site in found}
        missed = [str(line) for line in sites.missed(written, reached) if not line.after_a_failure]
        if not missed:
            break
        failing._known.clear()
    assert len(written) > 100
    assert not missed, f"extend a life of tests/faults/lives.py: {missed}"
