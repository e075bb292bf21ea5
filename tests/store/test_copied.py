"""A copy of a store whose packs lie elsewhere never deletes what its original needs, nor the other way round."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta

import pytest

import holdfast
from holdfast.errors import StoreCopied
from holdfast.store import sqlite


def photo(store, name, *, seed=0):
    with store.agent(name) as agent:
        agent.state["photo"] = bytes([seed]) * 100 + os.urandom(300_000)
        agent.checkpoint()
        return agent.digest


@pytest.fixture(params=["objects", "cold"])
def original(request, tmp_path):
    """A store in a directory, with packs elsewhere."""
    path, packs = tmp_path / "first", tmp_path / "packs"
    with holdfast.open(path, objects=str(packs) if request.param == "objects" else None) as store:
        photo(store, "a")
        if request.param == "cold":
            with store.agent("a") as agent:
                del agent.state["photo"]
                agent.checkpoint()
            assert store.tier(packs, older_than=timedelta(0)).packs == 1
    return path


def test_a_copy_is_only_read_until_somebody_says_that_it_is_the_one(original, tmp_path):
    copy = tmp_path / "second"
    shutil.copytree(original, copy)
    with pytest.raises(StoreCopied, match="packs of the other"):
        holdfast.open(copy)
    with holdfast.open(copy, readonly=True) as store:
        assert store.verify().ok
    with holdfast.open(original) as store:  # which is the original, goes on as before
        photo(store, "b")
        assert store.verify().ok
    shutil.rmtree(original)
    with holdfast.open(copy, trust_older=True) as store:
        photo(store, "c")
    with holdfast.open(copy) as store:
        assert {one.name for one in store.agents()} == {"a", "c"}
        assert store.verify().ok


def test_one_that_is_renamed_stays_the_one(original, tmp_path):
    original.rename(tmp_path / "elsewhere")
    with holdfast.open(tmp_path / "elsewhere") as store:
        photo(store, "b")
        assert store.verify().ok


def test_a_copy_that_happens_to_get_the_inode_of_its_original_is_a_copy_all_the_same(original, tmp_path, monkeypatch):
    """On a volume of its own, or in the place of the original: inodes are given again."""
    copy = tmp_path / "second"
    shutil.copytree(original, copy)
    same = (original / "store.db").stat().st_ino
    look = sqlite._look
    monkeypatch.setattr(sqlite, "_look", lambda path: (found[0], same) if (found := look(path)) else None)
    with holdfast.open(original) as store:
        assert store.verify().ok
    with pytest.raises(StoreCopied):
        holdfast.open(copy)


def test_a_copy_that_has_its_packs_with_it_is_a_store_of_its_own(tmp_path):
    with holdfast.open(tmp_path / "first") as store:
        photo(store, "a")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with holdfast.open(tmp_path / "second") as store:
        photo(store, "b")
        store.remove("a")
    with holdfast.open(tmp_path / "first") as store:
        assert store.verify().ok


def test_a_copy_of_a_database_is_noticed_too(server, tmp_path):
    name = f"test_{os.urandom(6).hex()}"
    with server.database(name) as url:
        with holdfast.open(url, objects=str(tmp_path / "packs")) as store:
            photo(store, "a")
        with holdfast.open(url) as store:
            photo(store, "b")
        server.execute(f'CREATE DATABASE "{name}_copy" TEMPLATE "{name}"')
        try:
            copy = server.url(f"{name}_copy")
            with pytest.raises(StoreCopied):
                holdfast.open(copy)
            with holdfast.open(copy, readonly=True) as store:
                assert store.verify().ok
            holdfast.open(copy, trust_older=True).close()
            holdfast.open(copy).close()
        finally:
            server.execute(f'DROP DATABASE "{name}_copy" WITH (FORCE)')


def test_the_command_line_says_so_and_lets_it_take_the_place(original, tmp_path):
    copy = tmp_path / "second"
    shutil.copytree(original, copy)

    def hold(*words):
        return subprocess.run(
            [sys.executable, "-m", "holdfast", "--store", str(copy), *words],
            capture_output=True,
            text=True,
            check=False,
        )

    refused = hold("tag", "a", "t")
    assert (refused.returncode, "repair --trust-older" in refused.stderr) == (2, True)
    assert hold("repair", "--trust-older", "--yes").returncode == 0
    assert hold("tag", "a", "t").returncode == 0
