"""The log of a store says what became of its refs, and keeps what others put under a key: none of it goes unnoticed."""

from __future__ import annotations

import shutil

import pytest

import holdfast
from holdfast.store.changes import Said
from holdfast.store.tables import TABLES
from tests.agent import damage
from tests.memory import memory


@pytest.fixture(scope="module", params=[False, damage.KEY], ids=["plain", "encrypted"])
def key(request):
    return request.param


@pytest.fixture(scope="module")
def sound(key):
    """A store whose log has entries of every age and kind, some of which were deleted on purpose."""
    with memory() as folder:
        with damage.opened(folder / "store", readonly=False, key=key) as store:
            agent = store.agent("a")
            for number in range(6):
                agent.state["n"] = number
                agent.checkpoint(f"c{number}")
            for name in ("c3", "c1"):
                agent.tag("here", name)  # the first entry says nothing that is still so
                agent.rollback(name)
            a = store._db.view.agent("a").a
            store._db.change(lambda change: [change.say(a, Said({"x": n}, b"k" * 8)) for n in range(3)])
            store.agent("gone").checkpoint()
            store.remove("gone")
            agent.checkpoint("d1")
            store.retain(holdfast.Policy(last=1))
        yield folder / "store"


@pytest.fixture
def path(sound, store_path):
    shutil.copytree(sound, store_path)
    return store_path


def found(path, key):
    with damage.opened(path, key=key) as store:
        return [(one.what, one.detail) for one in store.verify().problems]


def test_entries_that_were_deleted_on_purpose_are_not_missed(path, key):
    numbers = [e for (e,) in damage.rows(path, "SELECT e FROM log ORDER BY e")]
    assert len(numbers) < numbers[-1]
    assert found(path, key) == []


def test_any_entry_that_is_missing_is_noticed(path, key):
    for row in damage.rows(path, "SELECT * FROM log ORDER BY e"):
        damage.spoil(path, "DELETE FROM log WHERE e = ?", row[0])
        try:
            told = found(path, key)
        except holdfast.Damaged as error:  # the newest one: the witness knows it
            told = [("log", error.message)]
        assert told, f"entry {row[0]} is gone, and nobody has noticed"
        damage.spoil(path, TABLES["log"].insert, *row)
    assert found(path, key) == []


def test_what_counts_them_may_not_be_missing_either(path, key):
    damage.spoil(path, "DELETE FROM floor WHERE name IN ('log gone')")
    assert [what for what, _ in found(path, key)] == ["table log"]


def test_a_repair_says_that_some_are_lost_and_leaves_a_store_that_is_whole(path, key, tmp_path):
    damage.spoil(path, "DELETE FROM log WHERE e IN (SELECT e FROM log WHERE length(key) > 0 ORDER BY e LIMIT 2)")
    report = holdfast.repair(path, tmp_path / "new", key=key or None)
    assert any(text.startswith("2 entries of the log") for text in report.missing)
    assert not report.whole
    assert found(tmp_path / "new", key) == []
