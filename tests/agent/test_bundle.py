"""Agents in one file: what goes in comes out, and nothing comes out of a file that is not what was written."""

from __future__ import annotations

import os
import random
import shutil

import pytest

import holdfast
from holdfast.errors import (
    BadOption,
    Damaged,
    HistoriesDiverged,
    HoldfastError,
    KeyNeeded,
    NotEncrypted,
    UnknownAgent,
    WrongKey,
)
from tests.agent.damage import rows, spoil
from tests.agent.transferred import assert_same, grow, plain
from tests.faults.rich import small_limits

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store with two agents, and both in a file."""
    here = tmp_path_factory.mktemp("bundle")
    with small_limits():
        store = holdfast.open(here / "a")
        grow(store, "trip", random.Random(11), 30)
        store.clone("trip", "copy")
        file = here / "trips.hfb"
        store.export(file, ["trip", "copy"])
        yield store, file
        store.close()


def test_what_goes_in_comes_out(written, tmp_path):
    source, file = written
    with holdfast.open(tmp_path / "b") as dest:
        assert [agent.status for agent in dest.import_bundle(file).agents] == ["new", "new"]
        for name in ("trip", "copy"):
            assert_same(source, dest, name)
        assert [agent.status for agent in dest.import_bundle(file).agents] == ["unchanged", "unchanged"]
        dest.import_bundle(file, ["trip"])
        dest.remove("copy")
        dest.import_bundle(file, ["copy"], new_name="again")
        assert dest.agent("again", readonly=True).digest == source.agent("copy", readonly=True).digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"], "the scratch place is gone"
    assert file.stat().st_mode & 0o077 == 0


def test_a_file_is_not_written_over(written, tmp_path):
    source, file = written
    with pytest.raises(BadOption):
        source.export(file, ["trip"])
    copy = tmp_path / "copy.hfb"
    source.export(copy, ["trip"])
    source.export(copy, ["trip"], replace=True)
    with pytest.raises(HoldfastError):
        source.export(tmp_path / "no" / "such.hfb", ["trip"])
    with holdfast.open(tmp_path / "other") as other:
        for file in (source.path / "store.db", other.path / "store.db", other.path / "new.hfb"):
            with pytest.raises(BadOption, match="inside a store"):
                source.export(file, ["trip"], replace=True)
        assert other.verify().ok
    shutil.rmtree(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["copy.hfb"]


def test_an_older_bundle_changes_nothing_and_another_history_is_told(tmp_path):
    with holdfast.open(tmp_path / "a") as source, holdfast.open(tmp_path / "b") as dest:
        plain(source, "trip", 2)
        source.export(tmp_path / "old.hfb", ["trip"])
        dest.import_bundle(tmp_path / "old.hfb")
        plain(source, "trip", 2)
        assert source.import_bundle(tmp_path / "old.hfb").agents[0].status == "ahead"
        plain(dest, "trip", 1)
        source.export(tmp_path / "new.hfb", ["trip"])
        with pytest.raises(HistoriesDiverged):
            dest.import_bundle(tmp_path / "new.hfb")
        first = dest.import_bundle(tmp_path / "new.hfb", beside=True).agents[0]
        again = dest.import_bundle(tmp_path / "new.hfb", beside=True).agents[0]
        assert (len(first.beside), again.status) == (1, "unchanged")
        assert dest.verify().ok


def test_a_refused_file_changes_nothing(written, tmp_path):
    _, file = written
    data = file.read_bytes()
    with holdfast.open(tmp_path / "b") as dest:
        (tmp_path / "cut.hfb").write_bytes(data[:-20])
        before = dest.stats()["counts"]
        with pytest.raises(Damaged):
            dest.import_bundle(tmp_path / "cut.hfb")
        assert (dest.agents(), dest.stats()["counts"]) == ([], before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "cut.hfb"]


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path):
    with holdfast.open(tmp_path / "secret", key=KEY) as store:
        with store.agent("trip-to-nowhere") as agent:
            agent.state["passport"] = "X1234567, read by nobody " * 20
            agent.checkpoint("asked for it")
        yield store


def test_what_leaves_an_encrypted_store_is_encrypted(secret, tmp_path):
    file, words = tmp_path / "file", (b"trip-to-nowhere", b"passport", b"asked for it", b"X1234567")
    secret.export(file, ["trip-to-nowhere"])
    data = file.read_bytes()
    assert not any(word in data for word in words)
    holdfast.keys.add(secret.path, "correct horse", key=KEY)
    secret.export(file, ["trip-to-nowhere"], replace=True)
    with holdfast.open(tmp_path / "other") as other:
        for key, error in ((False, KeyNeeded), (None, KeyNeeded), (os.urandom(32), WrongKey)):
            with pytest.raises(error):
                other.import_bundle(file, key=key)
        assert other.agents() == []
        for key in (KEY, "correct horse"):  # every key of its store opens it
            other.import_bundle(file, key=key)
        assert other.agent("trip-to-nowhere", readonly=True).state["passport"].startswith("X1234567")
        other.remove("trip-to-nowhere")
        secret.export(file, ["trip-to-nowhere"], key=False, replace=True)
        assert any(word in file.read_bytes() for word in words)
        with pytest.raises(NotEncrypted):
            other.import_bundle(file, key=KEY)
        other.import_bundle(file)
        assert other.verify().ok


def test_a_file_may_have_a_key_of_its_own(written, secret, tmp_path):
    plain_store, _ = written
    for store, name in ((plain_store, "trip"), (secret, "trip-to-nowhere")):
        file, own = tmp_path / f"{name}.hfb", os.urandom(32)
        store.export(file, [name], key=own)
        with holdfast.open(tmp_path / "third") as other:
            with pytest.raises(WrongKey):
                other.import_bundle(file, key=KEY)
            assert other.import_bundle(file, key=own).agents[0].status == "new"


# -- into a place where nothing is ------------------------------------------------------------------------------------


def test_a_new_store_is_made_with_all_of_it_or_not_at_all(written, tmp_path):
    source, file = written
    folder = tmp_path / "here"
    folder.mkdir()
    place = folder / "deep" / "new"
    (tmp_path / "cut").write_bytes(file.read_bytes()[:-20])
    with pytest.raises(Damaged):
        holdfast.import_bundle(tmp_path / "cut", place)
    with pytest.raises(UnknownAgent):
        holdfast.import_bundle(file, place, ["nobody"])
    with pytest.raises(BadOption):
        holdfast.import_bundle(file, place, new_name="one name for two")
    source.export(tmp_path / "shut", ["trip"], key=KEY)
    with pytest.raises(BadOption, match="would not be"):
        holdfast.import_bundle(tmp_path / "shut", place, file_key=KEY)
    assert list(folder.iterdir()) == []

    assert [one.name for one in holdfast.import_bundle(file, place).agents] == ["trip", "copy"]
    assert [path.name for path in place.parent.iterdir()] == ["new"]
    with holdfast.open(place) as store:
        assert_same(source, store, "copy")
        assert store.verify().ok
    with pytest.raises(Damaged):
        holdfast.import_bundle(tmp_path / "cut", place)
    assert {one.status for one in holdfast.import_bundle(file, place).agents} == {"unchanged"}
    holdfast.import_bundle(tmp_path / "shut", folder / "safe", key=KEY, file_key=KEY)
    holdfast.import_bundle(tmp_path / "shut", folder / "open", key=False, file_key=KEY)
    with holdfast.open(folder / "safe", key=KEY) as safe, holdfast.open(folder / "open") as opened:
        assert (safe.encrypted, opened.encrypted) == (True, False)
        assert_same(safe, opened, "trip")


def test_a_store_that_somebody_else_makes_meanwhile_stays(written, tmp_path):
    _, file = written
    place = tmp_path / "new"

    def meanwhile(_what, _done, _total):
        if not place.exists():
            with holdfast.open(place) as store:
                plain(store, "other", 2)

    report = holdfast.import_bundle(file, place, progress=meanwhile)
    assert (report.dest, len(report.agents)) == (str(place), 2)
    with holdfast.open(place) as store:
        assert {info.name for info in store.agents()} == {"trip", "copy", "other"}
        assert store.verify().ok


def test_a_drill_brings_back_what_is_there_and_tells_what_is_not(tmp_path):
    with holdfast.open(tmp_path / "a") as store:
        grow(store, "trip", random.Random(4), 25)
        plain(store, "other", 4)
        report = store.drill(sample=1_000)
        assert report.ok
        assert len(report.checkpoints) == report.total > 4
        small = store.drill(["other"], sample=2)
        assert [one.agent for one in small.checkpoints] == ["other", "other"]
        assert max(one.depth for one in small.checkpoints) == 4, "the newest is always among them"
        with pytest.raises(BadOption):
            store.drill(sample=0)
    ((n,),) = rows(tmp_path / "a", "SELECT max(n) FROM loose")
    spoil(tmp_path / "a", "UPDATE loose SET data = zeroblob(length(data)) WHERE n = ?", n)
    with holdfast.open(tmp_path / "a", readonly=True) as store:
        report = store.drill(sample=1_000)
        lost = [one for one in report.checkpoints if one.problem]
        assert not report.ok
        assert [one.agent for one in lost] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
