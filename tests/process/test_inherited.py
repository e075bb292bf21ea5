"""A forked child that opens a store which its parent has open: neither loses what it was told is safe."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import pytest

import holdfast
from tests.lives import ask, end, line, tell
from tests.process.fork_child import start


def by_holdfast(path):
    with holdfast.open(path) as store:
        other = store.agent("third")
        other.state["n"] = 3
        other.checkpoint()


def by_sqlite(path):
    """Somebody who asks for nothing in particular: closing the last connection folds the log and deletes it."""
    with closing(sqlite3.connect(path / "store.db")) as connection:
        connection.execute("CREATE TABLE other (n)")
        connection.execute("DROP TABLE other")
        connection.commit()


@pytest.mark.parametrize("third", [by_holdfast, by_sqlite])
def test_the_childs_commit_survives_its_parent_and_a_third_process(store_path, third):
    """Without closing what it inherited, the child had no lock, and its commit went into a log that was deleted."""
    process = start("orphan", store_path)
    try:
        assert line(process).startswith("open")
        tell(process)
        assert process.wait(timeout=180) == 0
        third(store_path)
        go, done = (store_path.with_name(f"{store_path.name}.{name}") for name in ("go", "done"))
        go.touch()
        until = time.monotonic() + 60
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.01)
        with holdfast.open(store_path) as store:
            assert done.read_text() == store.agent("child", readonly=True).head.id
            assert store.agent("child", readonly=True).state["n"] == 1
            assert store.agent("child", readonly=True).head.label == "after its parent"
            assert store.verify().ok
    finally:
        end(process)


def test_the_parents_locks_survive_what_the_child_closes(store_path):
    """A third process that may fold and delete the log when nobody has the store open finds that somebody has."""
    process = start("forked", store_path)
    try:
        assert line(process).startswith("open")
        for number in range(3):
            assert ask(process, "child") == "done"
            by_sqlite(store_path)
            assert (store_path / "store.db-wal").exists()
            assert ask(process, f"parent {number}") == "done"
            by_sqlite(store_path)
        with holdfast.open(store_path, readonly=True) as store:
            assert store.agent("parent").state["n"] == 3
            assert store.agent("child").state["n"] == "1"
            assert store.verify().ok
        tell(process, "die")
        process.wait(timeout=180)
    finally:
        end(process)
