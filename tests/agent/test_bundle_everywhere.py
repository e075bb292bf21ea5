"""Agents in one file: what goes in comes out, and nothing comes out of a file that is not what was written."""

from __future__ import annotations

import io
import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest
import zstandard

from holdfast.agent import bundle
from holdfast.agent.frames import VERSION, End, Head
from holdfast.errors import (
    AgentBusy,
    BadOption,
    Damaged,
    HistoriesDiverged,
    HoldfastError,
    NotABundle,
    UnknownAgent,
)
from holdfast.store.cipher import digest
from tests.agent.carried import assert_same, grow, opened, plain, record, small_limits, sound, view

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store with two agents, and both in a file."""
    here = tmp_path_factory.mktemp("bundle")
    with small_limits():
        store = opened(here / "a")
        grow(store, "trip", random.Random(11), 30)
        store.clone("trip", "copy")
        file = here / "trips.hfb"
        store.export(file, ["trip", "copy"])
        yield store, file
        store.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A store with one small agent that has some of everything."""
    here = tmp_path_factory.mktemp("small")
    with opened(here / "a") as store:
        with store.agent("trip") as agent:
            agent.state["n"] = 1
            agent.checkpoint("one")
            record(agent, b"did it", mark=1, value="a value")
            agent.state["n"] = 2
            agent.checkpoint("two")
            agent.tag("t")
        yield store


def test_what_goes_in_comes_out(written, tmp_path):
    source, file = written
    with opened(tmp_path / "b") as dest:
        assert [agent.status for agent in dest.import_bundle(file).agents] == ["new", "new"]
        for name in ("trip", "copy"):
            assert_same(source, dest, name)
        assert [agent.status for agent in dest.import_bundle(file).agents] == ["unchanged", "unchanged"]
        dest.import_bundle(file, ["trip"])
        dest.remove("copy")
        dest.import_bundle(file, ["copy"], new_name="again")
        assert_same(source, dest, "copy", "again")
        with pytest.raises(UnknownAgent):
            dest.import_bundle(file, ["nobody"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
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
    with opened(tmp_path / "other") as other:
        for file in (source.path / "store.db", other.path / "store.db", other.path / "new.hfb"):
            with pytest.raises(BadOption, match="inside a store"):
                source.export(file, ["trip"], replace=True)
        assert other.verify().ok
    shutil.rmtree(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["copy.hfb"]


def test_an_older_bundle_changes_nothing_and_another_history_is_told(tmp_path):
    with opened(tmp_path / "a") as source, opened(tmp_path / "b") as dest:
        plain(source, "trip", 2)
        source.export(tmp_path / "old.hfb", ["trip"])
        dest.import_bundle(tmp_path / "old.hfb")
        plain(source, "trip", 2)
        assert source.import_bundle(tmp_path / "old.hfb").agents[0].status == "ahead"
        source.export(tmp_path / "new.hfb", ["trip"])
        with dest.agent("trip"), pytest.raises(AgentBusy):
            dest.import_bundle(tmp_path / "new.hfb")
        plain(dest, "trip", 1)
        with pytest.raises(HistoriesDiverged):
            dest.import_bundle(tmp_path / "new.hfb")
        sound(dest)
        first = dest.import_bundle(tmp_path / "new.hfb", beside=True).agents[0]
        again = dest.import_bundle(tmp_path / "new.hfb", beside=True).agents[0]
        assert (len(first.beside), again.status) == (1, "unchanged")
        sound(dest)


# -- files that are not what was written ------------------------------------------------------------------------------


def refused(data, key=None):
    """The error of reading these bytes as a bundle."""
    file = io.BytesIO(data)
    try:
        for _ in bundle.frames(file, len(data), bundle._cipher_of(file, Path("file"), key)):
            pass
    except HoldfastError as error:
        return error
    pytest.fail("it was read")


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_every_cut_and_every_changed_byte_is_refused(small, tmp_path, key):
    small.export(tmp_path / "file", ["trip"], key=key)
    data = (tmp_path / "file").read_bytes()
    choose = random.Random(1)
    for at in range(len(data)):
        assert isinstance(refused(data[:at], key), Damaged | NotABundle)
        bad = data[:at] + bytes([data[at] ^ (1 << choose.randrange(8))]) + data[at + 1 :]
        assert isinstance(refused(bad, key), Damaged | NotABundle)
    assert isinstance(refused(data + b"x", key), Damaged)


def test_a_refused_file_changes_nothing_that_can_be_seen(small, tmp_path, rounds):
    small.export(tmp_path / "file", ["trip"])
    data = (tmp_path / "file").read_bytes()
    choose = random.Random(1)
    with opened(tmp_path / "b") as dest:
        plain(dest, "mine", 2)
        before = view(dest, "mine")
        for at in [*choose.sample(range(8, len(data)), rounds(30, 1_000)), len(data) - 1]:
            (tmp_path / "cut").write_bytes(data[:at])
            with pytest.raises(Damaged):
                dest.import_bundle(tmp_path / "cut")
            assert [info.name for info in dest.agents()] == ["mine"]
        assert view(dest, "mine") == before
        sound(dest)
        plain(dest, "other", 1)
        dest.remove("other")
        assert len(dest._db.view.checkpoints()) == 2, "what had arrived was collected"
        dest.import_bundle(tmp_path / "file")
        assert_same(small, dest, "trip")


def rewritten(file, place, change):
    """A bundle whose checks are right and whose content is not: what somebody who knows the format would make."""
    with bundle.opened(file, None) as (frames, _), place.open("wb") as new:
        out = bundle.Writing(new)
        for frame in frames:
            for one in change(frame):
                out.put(one if not isinstance(one, End) else End(out.frames + 1))
    return place


def test_a_hostile_file_gets_nowhere(written, tmp_path, rounds):
    """Frames are left out, doubled and altered, with valid checks. It is refused, or what comes is proven."""
    _, file = written
    choose = random.Random(3)
    arrived = 0
    with opened(tmp_path / "b") as dest:
        for number in range(rounds(12, 2_000)):
            odd = choose.random() / 20 + 0.005

            def change(frame, odd=odd):
                if choose.random() > odd or isinstance(frame, Head | End):
                    return [frame]
                match choose.randrange(4):
                    case 0:
                        return []
                    case 1:
                        return [frame, frame]
                    case _:
                        return [_altered(frame, choose)]

            place = rewritten(file, tmp_path / "hostile.hfb", change)
            try:
                dest.import_bundle(place)
            except HoldfastError:
                assert dest.agents() == [], number
                continue
            sound(dest)
            arrived += 1
            for info in dest.agents():
                dest.remove(info.name)
    assert arrived < rounds(12, 2_000)


def _altered(frame, choose):
    """One field of a frame becomes something else."""
    name = choose.choice(frame.__struct_fields__)
    value = getattr(frame, name)
    match value:
        case bool():
            new = not value
        case int():
            new = choose.choice([0, 1, value + 1, 2**40])
        case bytes() if value:
            at = choose.randrange(len(value))
            new = choose.choice([b"", value[:at], value[:at] + os.urandom(1) + value[at + 1 :]])
        case list() if value:
            new = choose.choice([[], value[1:], value[::-1], [*value, value[0]]])
        case str():
            new = choose.choice(["", "../../x", "a@b", "x" * 2000, "\x1b[2J"])
        case _:
            new = value
    return msgspec.structs.replace(frame, **{name: new})


def test_a_small_file_cannot_grow_without_bound():
    for length, data in ((2**31, b"x" * 40), (2**20, zstandard.compress(bytes(2**20)))):
        header = bundle._HEADER.pack(1, len(data), length)
        check = digest(b"bundle", header + data)[: bundle.CHECK_BYTES]
        assert isinstance(refused(bundle.MAGIC + header + data + check), Damaged)
    header = bundle._HEADER.pack(0, 2**32 - 1, 2**32 - 1)
    assert isinstance(refused(bundle.MAGIC + header + b"few"), Damaged)
    assert isinstance(refused(b"GIF89a" + bytes(100)), NotABundle)


def test_a_bundle_of_the_future_is_refused_by_its_version(written, tmp_path):
    _, file = written

    def change(frame):
        return [msgspec.structs.replace(frame, version=VERSION + 1) if isinstance(frame, Head) else frame]

    with opened(tmp_path / "b") as dest, pytest.raises(NotABundle, match=f"format {VERSION + 1}"):
        dest.import_bundle(rewritten(file, tmp_path / "future", change))


# -- into a place where nothing is ------------------------------------------------------------------------------------


def test_a_new_store_is_made_with_all_of_it_or_not_at_all(written, tmp_path):
    source, file = written
    folder = tmp_path / "here"
    folder.mkdir()
    place = folder / "deep" / "new"
    (tmp_path / "cut").write_bytes(file.read_bytes()[:-20])
    with pytest.raises(Damaged):
        bundle.import_bundle(tmp_path / "cut", place)
    with pytest.raises(UnknownAgent):
        bundle.import_bundle(file, place, ["nobody"])
    with pytest.raises(BadOption):
        bundle.import_bundle(file, place, new_name="one name for two")
    source.export(tmp_path / "shut", ["trip"], key=KEY)
    with pytest.raises(BadOption, match="would not be"):
        bundle.import_bundle(tmp_path / "shut", place, file_key=KEY)
    assert list(folder.iterdir()) == []

    assert [one.name for one in bundle.import_bundle(file, place).agents] == ["trip", "copy"]
    assert [path.name for path in place.parent.iterdir()] == ["new"]
    with opened(place) as store:
        assert_same(source, store, "copy")
    assert {one.status for one in bundle.import_bundle(file, place).agents} == {"unchanged"}
    bundle.import_bundle(tmp_path / "shut", folder / "safe", key=KEY, file_key=KEY)
    bundle.import_bundle(tmp_path / "shut", folder / "open", key=False, file_key=KEY)
    with opened(folder / "safe", key=KEY) as safe, opened(folder / "open") as other:
        assert (safe.encrypted, other.encrypted) == (True, False)
        assert_same(safe, other, "trip")


def test_a_store_that_somebody_else_makes_meanwhile_stays(written, tmp_path):
    _, file = written
    place = tmp_path / "new"

    def meanwhile(_what, _done, _total):
        if not place.exists():
            with opened(place) as store:
                plain(store, "other", 2)

    report = bundle.import_bundle(file, place, progress=meanwhile)
    assert (report.dest, len(report.agents)) == (str(place), 2)
    with opened(place) as store:
        assert {info.name for info in store.agents()} == {"trip", "copy", "other"}
        sound(store)
