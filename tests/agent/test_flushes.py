"""A flush that failed ends all writing, whatever was to be flushed; what was acknowledged before is there."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import DiskFull, StorePoisoned


@contextmanager
def flushes_fail(monkeypatch, wanted, number):
    """While this lasts, the flushes of some files fail."""
    real = os.fsync

    def fsync(fd):
        if wanted(os.fstat(fd), str(Path(f"/proc/self/fd/{fd}").readlink())):
            raise OSError(number, os.strerror(number))
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        yield


def a_pack(_found, name):
    return Path(name).name.startswith("tmp-")


def the_folder(found, name):
    return stat.S_ISDIR(found.st_mode) and Path(name).name == "packs"


@pytest.mark.parametrize("wanted", [a_pack, the_folder])
def test_of_a_pack(tmp_path, monkeypatch, wanted):
    with holdfast.open(tmp_path / "store") as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint("safe")
        agent.state["bulk"] = os.urandom(300_000)
        with flushes_fail(monkeypatch, wanted, errno.EIO), pytest.raises(StorePoisoned):
            agent.checkpoint()
        for call in (agent.checkpoint, agent.flush, store.flush, lambda: store.agent("b"), lambda: agent.tag("t")):
            with pytest.raises(StorePoisoned, match="flush failed"):
                call()
    with holdfast.open(tmp_path / "store") as store, store.agent("a") as agent:
        assert holdfast.plain(agent.state) == {"n": 1}
        agent.state["bulk"] = os.urandom(300_000)
        agent.checkpoint()
        assert store.verify().ok


def test_one_that_has_no_room_costs_nothing(tmp_path, monkeypatch):
    with holdfast.open(tmp_path / "store") as store, store.agent("a") as agent:
        agent.state["bulk"] = os.urandom(300_000)
        with flushes_fail(monkeypatch, a_pack, errno.ENOSPC), pytest.raises(DiskFull):
            agent.checkpoint()
        agent.checkpoint()
        assert store.verify().ok
