"""The store goes away while it is open: nothing is acknowledged that nobody can find again."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import Damaged, HoldfastError, StoreFailed, StorePoisoned, StoreWentBack
from tests import warm
from tests.conftest import unsaved


def gone(path) -> None:
    shutil.rmtree(path)


def moved(path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path) -> None:
    """A copy that looks the same: another program would write there, and this one into what was moved away."""
    shutil.copytree(path, path.with_name("copy"))
    moved(path)
    path.with_name("copy").rename(path)


def database_gone(path) -> None:
    (path / "store.db").unlink()


def log_gone(path) -> None:
    (path / "store.db-wal").unlink()


def written_alone(path) -> bool:
    """Whether this process has a file open that it only writes: no connection of SQLite's does that."""
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if fd.readlink() == path and fcntl.fcntl(int(fd.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                return True
    return False


@unsaved
@pytest.mark.parametrize("durability", ["commit", "batched"])
@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("happens", [gone, moved, replaced, database_gone, log_gone])
def test_a_store_that_is_not_at_its_path_any_more(tmp_path, happens, bulk, durability):
    path = tmp_path / "store"
    store = holdfast.open(path, durability=durability)
    agent = store.agent("x")
    agent.state["n"] = 1
    agent.checkpoint("one")
    agent.flush()
    happens(path)
    agent.state["n"] = 2
    if bulk:
        agent.state["big"] = bytes(300_000)
    with pytest.raises(StoreFailed, match="nothing was written") as caught:
        (agent.checkpoint("two"), agent.flush())
    assert str(path) in caught.value.message
    with holdfast.open(tmp_path / "new") as new:  # as the hint says
        saved = new.agent("x")
        saved.state = agent.state
        saved.checkpoint("two")
        assert saved.state["n"] == 2
    try:
        store.close()
    except StoreFailed:
        assert durability == "batched"  # which accepted it before


def test_a_log_that_is_replaced_before_anything_is_written(tmp_path):
    """What is written then would lie in a file that has no name, and be gone with this process."""
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        store.agent("x").checkpoint("one")
    with holdfast.open(path) as store:
        assert len(store.agent("x", readonly=True).log()) == 1
        log_gone(path)
        other = "import sys, holdfast; print(len(holdfast.open(sys.argv[1]).agents()))"
        ended = warm.run([sys.executable, "-c", other, str(path)], capture_output=True, text=True, timeout=180)
        assert ended.stdout == "1\n", ended.stderr
        with pytest.raises(StoreFailed, match="nothing was written"):
            store.agent("x")
    with holdfast.open(path) as store:
        assert store.agent("x").head.label == "one"
        assert store.verify().ok


def test_a_directory_that_comes_back(tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        agent = store.agent("x")
        agent.state["n"] = 1
        agent.checkpoint("one")
        moved(path)
        agent.state["n"] = 2
        with pytest.raises(StoreFailed):
            agent.checkpoint("two")
        assert agent.head.label == "one"
        path.with_name("elsewhere").rename(path)
        agent.checkpoint("two")
    with holdfast.open(path) as store:
        assert store.agent("x").state["n"] == 2
        assert store.verify().ok


def test_a_directory_that_is_moved_while_its_log_is_made_longer(tmp_path):
    """What was acknowledged lies in the log: nothing is written over it."""
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        agent, engine = store.agent("x"), store._db.engine
        engine.reclaim(log=True)
        with engine._directing:  # as in the middle of a direct commit, for whose end the thread that does it waits
            agent.state["n"] = 1
            agent.checkpoint("one")
            while not written_alone(path / "store.db-wal"):
                time.sleep(0.001)
            moved(path)
        while written_alone(path.with_name("elsewhere") / "store.db-wal"):
            time.sleep(0.001)
        path.with_name("elsewhere").rename(path)
    with holdfast.open(path) as store:
        assert store.agent("x").state["n"] == 1
        assert store.verify().ok


@unsaved
@pytest.mark.parametrize("reopened", [False, True])
def test_an_older_copy_that_is_written_over_an_open_store_is_told_as_a_loss(tmp_path, reopened):
    path, older = tmp_path / "store", tmp_path / "older"
    store = holdfast.open(path)
    agent = store.agent("x")
    agent.state["n"] = 1
    agent.checkpoint("one")
    if reopened:  # a writer of another generation
        store.close()
    shutil.copytree(path, older)
    if reopened:
        store = holdfast.open(path)
        agent = store.agent("x")
    for number in range(2, 5):
        agent.state["n"] = number
        agent.checkpoint()
    for name in ("store.db", "store.db-wal", "store.db-shm", "witness"):
        (path / name).write_bytes((older / name).read_bytes())  # into the same files
    agent.state["n"] = 5
    for _ in range(2):
        with pytest.raises(StoreWentBack, match="lost what it had acknowledged"):
            agent.checkpoint()
    assert agent.state["n"] == 5
    store.close()


@unsaved
def test_files_that_are_shorter_than_they_were_are_not_said_to_be_safe(tmp_path):
    path, older = tmp_path / "store", tmp_path / "older"
    with holdfast.open(path) as store, store.agent("x") as agent:
        agent.checkpoint("one")
    shutil.copytree(path, older)
    store = holdfast.open(path)
    agent = store.agent("x")
    agent.state["n"] = 1
    agent.checkpoint("two")
    try:
        for name in ("store.db", "store.db-wal"):
            (path / name).write_bytes((older / name).read_bytes())  # into the same files
        agent.state["n"] = 2
        with pytest.raises((StorePoisoned, StoreFailed, Damaged)) as caught:  # by what is read first of the two files
            agent.checkpoint()
        assert "safe" not in str(caught.value)
    finally:
        with suppress(HoldfastError):
            store.close()
