"""What a store bounds, so that no reader, no history and no older store can make more of it than was promised."""

from __future__ import annotations

import random
import sqlite3

import pytest
from msgspec import msgpack

import holdfast
from holdfast.agent.background import fold_below
from holdfast.errors import Incompatible, StoreBusy
from holdfast.store import manifest, sqlite
from holdfast.store.tables import FORMER_APPLICATION_ID
from holdfast.store.witness import initial
from tests.agent import damage
from tests.limits import limits


def folded(path, texts):
    """The segments of a history with these values: how many checkpoints each has, and how many bytes of values."""
    with damage.opened(path, readonly=False) as store:
        store._tending.stop()
        agent = store.agent("a")
        agent.state["log"] = []
        for text in texts:
            agent.state["log"].append(text)
            agent.checkpoint()
        with limits({"SEAL_CHECKPOINTS": 1}):
            agent.checkpoint("sealed")
        fold_below(store._db, store._db.view.branch(1, "main").head)
        assert store.verify().ok
    return [len(msgpack.decode(members)) for (members,) in damage.rows(path, "SELECT members FROM segment")]


def test_a_segment_has_at_most_256_checkpoints_or_8_mb(store_path):
    """Which bounds what one damaged row costs."""
    assert (manifest.SEGMENT_CHECKPOINTS, manifest.SEGMENT_BYTES) == (256, 8 * 2**20)
    with limits({"SEAL_CHECKPOINTS": 10_000, "SEAL_BYTES": 2**40}):
        counts = folded(store_path / "many", ["x"] * 600)
    assert sum(counts) >= 599
    assert max(counts) == 256
    chance = random.Random(1)
    with limits({"SEAL_CHECKPOINTS": 10_000, "SEAL_BYTES": 2**40, "SEGMENT_BYTES": 30_000}):
        counts = folded(store_path / "large", [chance.randbytes(2000) for _ in range(60)])
    assert sum(counts) >= 59
    assert 1 < max(counts) <= 15


def test_a_moment_that_makes_the_log_too_long_ends_with_an_error_and_can_begin_again(store_path):
    assert sqlite.MOMENT_LOG_BYTES == 2**30
    with holdfast.open(store_path) as store, store.agent("a") as agent:
        with limits({"MOMENT_LOG_BYTES": 2**23}):
            with store._db.moment() as before:
                seen = before.view.counts()
                for number in range(120):
                    agent.state["x"] = random.Random(number).randbytes(100_000)
                    agent.checkpoint()
                with pytest.raises(StoreBusy, match="begin again"):
                    before.view.counts()
            store._db.engine.reclaim(log=True)
            with store._db.moment() as after:
                assert after.view.counts()["loose"] > seen["loose"]
        assert store.verify().ok


@pytest.mark.parametrize("log", [False, True], ids=["closed", "killed"])
def test_a_store_of_the_former_layout_is_named_and_never_called_damaged(store_path, log):
    for name in ("packs", "locks"):
        (store_path / name).mkdir(parents=True)
    (store_path / "witness").write_bytes(initial())
    connection = sqlite3.connect(store_path / "store.db")
    connection.execute(f"PRAGMA application_id={FORMER_APPLICATION_ID}")
    connection.execute("PRAGMA journal_mode=WAL")
    if log:
        connection.execute("CREATE TABLE store (name TEXT PRIMARY KEY, value BLOB NOT NULL, sum BLOB NOT NULL)")
        assert (store_path / "store.db-wal").stat().st_size
    for options in ({}, {"readonly": True}, {"recover": True}, {"key": bytes(32)}):
        with pytest.raises(Incompatible, match="layout before this one"):
            holdfast.open(store_path, **options)
    connection.close()
