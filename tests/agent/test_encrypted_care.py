"""Encrypted stores over the years: keeping less, moving, restoring. Nothing is lost, and nothing becomes readable."""

from __future__ import annotations

import shutil

import pytest

import holdfast
from holdfast import Policy
from holdfast.errors import NotAuthentic
from tests.agent.damage import rows, spoil
from tests.agent.histories import assert_same, few_between_seals, large, sound

KEY = bytes(range(32))
WORD = "passport-X1234567"
KEPT = Policy(labels=["*0"])


@pytest.fixture(autouse=True)
def seals(monkeypatch):
    few_between_seals(monkeypatch.setattr)


def fill(store):
    """A history with seals, large values and forks, with a word in it that nobody may read."""
    with large(store, "a", 30, seed=5) as agent:
        agent.state["word"] = [WORD] * 400
        agent.checkpoint(f"{WORD} 0")
        agent.tag(WORD)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        few_between_seals(patch.setattr)
        for name, key in (("keyed", KEY), ("other", KEY), ("plain", False)):
            with holdfast.open(place / name, key=key) as store:
                fill(store)
    return place


@pytest.fixture
def store(made, store_path):
    shutil.copytree(made / "keyed", store_path)
    with holdfast.open(store_path, key=KEY) as opened:
        yield opened


def readable(path):
    """The files below a place in which the word can be read."""
    words = (WORD.encode(), WORD.encode().hex().encode())
    files = [file for file in path.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if any(word in file.read_bytes() for word in words)]


def counts(store):
    found = store.stats()["counts"]
    return {name: found[name] for name in ("checkpoint", "segment", "node", "chunk", "pack", "tag", "shallow")}


def stored(store):
    sizes = store.stats()["bytes"]
    return sizes["catalog"] - sizes["free"] + sizes["packs"]


def test_what_goes_is_what_would_go_of_a_plain_one(made, store, store_path, tmp_path):
    shutil.copytree(made / "plain", tmp_path / "plain")
    with holdfast.open(tmp_path / "plain") as other:
        before = store.stats()["bytes"]
        held = stored(store)
        reports = [one.retain(KEPT) for one in (store, other)]
        assert len({(one.kept, one.removed) for one in reports}) == 1
        assert counts(store) == counts(other)
        sizes = store.stats()["bytes"]
        assert stored(store) == held - reports[0].freed_bytes
        assert sizes["packs"] < before["packs"]
        assert sum(file.stat().st_size for file in (store_path / "packs").iterdir()) == sizes["packs"]
        assert [one.label for one in store.agent("a").log()] == [one.label for one in other.agent("a").log()]
        sound(store)
    with holdfast.open(tmp_path / "moved") as moved, holdfast.open(tmp_path / "back", key=KEY) as back:
        store.push(moved)
        moved.push(back)
        assert_same(store, moved, "a", states=False)
        assert_same(store, back, "a")
        assert back.verify_restore(sample=5).ok
        sound(back)
    store.close()
    assert readable(tmp_path / "plain")
    assert not [*readable(store_path), *readable(tmp_path / "back")]


def test_what_says_that_something_was_forgotten_cannot_be_taken_away_or_forged(made, store, store_path, tmp_path):
    shutil.copytree(made / "other", tmp_path / "other")
    with holdfast.open(tmp_path / "other", key=KEY) as other:
        other.retain(KEPT)
    store.retain(KEPT)
    store.tag("a", "later")  # the newest entry is not the one that goes
    (e,) = [entry.e for entry in store._db.view.log() if entry.body["what"] == "forget"]
    n = min(store._db.view.shallow())
    store.close()
    for table, column, number in (("log", "e", e), ("shallow", "n", n), ("loose", "n", n)):
        for forged in (False, True):
            copy = tmp_path / "copy"
            shutil.copytree(store_path, copy)
            where = f"{table} WHERE {column} = ?"
            found = rows(tmp_path / "other", f"SELECT * FROM {where}", number)
            assert spoil(copy, f"DELETE FROM {where}", number) == 1
            if forged:  # the same of another store with the same key
                spoil(copy, f"INSERT INTO {table} VALUES ({', '.join('?' * len(found[0]))})", *found[0])
            with holdfast.open(copy, key=KEY, readonly=True) as damaged:
                assert not damaged.verify().ok, (table, forged)
                if forged:
                    with pytest.raises(NotAuthentic):
                        damaged.agent("a", readonly=True).log(all=True)
            shutil.rmtree(copy)


def test_a_stored_policy_is_not_readable_and_comes_back(store, store_path):
    policy = Policy(last=3, labels=[f"{WORD}*"])
    store.set_policy(policy, "a")
    assert store.retain().removed
    store.close()
    assert not readable(store_path)
    with holdfast.open(store_path, key=KEY) as again:
        assert again.policies() == {"a": policy}
        sound(again)


def test_nothing_is_readable_on_the_way(store, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    seen = []

    def progress(*_said):
        seen.append(readable(place))

    assert store.verify_restore(sample=4, place=place, progress=progress).ok
    assert seen
    assert not any(seen)
    assert list(place.iterdir()) == []
