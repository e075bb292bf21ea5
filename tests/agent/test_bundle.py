"""Agents in one file: what goes in comes out, and nothing comes out of a file that is not what was written."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import holdfast
from holdfast.agent import bundle
from holdfast.agent.parcels import End, Head
from holdfast.errors import BadOption, Damaged, HistoriesDiverged, HoldfastError, NotABundle
from tests.agent.transferred import assert_same, grow, plain
from tests.faults.rich import small_limits


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


def refused(data: bytes, place: Path) -> HoldfastError:
    """The error of reading these bytes as a bundle."""
    place.write_bytes(data)
    with place.open("rb") as file, pytest.raises(HoldfastError) as caught:
        for _ in bundle.frames(file, len(data)):
            pass
    return caught.value


def test_every_cut_and_every_changed_byte_is_refused(written, tmp_path, rounds):
    _, file = written
    data = file.read_bytes()
    choose = random.Random(1)
    for at in choose.sample(range(len(data)), min(len(data), rounds(120, 100_000))):
        assert isinstance(refused(data[:at], tmp_path / "cut"), Damaged | NotABundle)
        bad = data[:at] + bytes([data[at] ^ (1 << choose.randrange(8))]) + data[at + 1 :]
        assert isinstance(refused(bad, tmp_path / "bad"), Damaged | NotABundle)
    assert isinstance(refused(data + b"x", tmp_path / "more"), Damaged)


def test_a_refused_file_changes_nothing(written, tmp_path):
    _, file = written
    data = file.read_bytes()
    with holdfast.open(tmp_path / "b") as dest:
        (tmp_path / "cut.hfb").write_bytes(data[:-20])
        before = dest._catalog.newest()
        with pytest.raises(Damaged):
            dest.import_bundle(tmp_path / "cut.hfb")
        assert (dest.agents(), dest._catalog.newest()) == ([], before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "cut.hfb"]


def rewritten(file: Path, place: Path, change) -> Path:
    """A bundle whose checks are right and whose content is not: what somebody who knows the format would make."""
    with file.open("rb") as old, place.open("wb") as new:
        out = bundle.Writing(new)
        for parcel in bundle.frames(old, file.stat().st_size):
            for one in change(parcel):
                out.put(one if not isinstance(one, End) else End(out.parcels + 1))
    return place


def test_a_hostile_file_gets_nowhere(written, tmp_path, rounds):
    """Parcels are left out, doubled, swapped and altered, with valid checks. It is refused, or what comes is proven."""
    _, file = written
    choose = random.Random(3)
    with holdfast.open(tmp_path / "b") as dest:
        for number in range(rounds(6, 2_000)):
            odd = choose.random() / 20 + 0.01

            def change(parcel, odd=odd):
                if choose.random() > odd or isinstance(parcel, Head | End):
                    return [parcel]
                match choose.randrange(4):
                    case 0:
                        return []
                    case 1:
                        return [parcel, parcel]
                    case _:
                        return [_altered(parcel, choose)]

            place = rewritten(file, tmp_path / "hostile.hfb", change)
            try:
                dest.import_bundle(place, new_name=None)
            except HoldfastError:
                assert dest.agents() == [], number
            else:
                report = dest.verify()
                assert report.ok, str(report)
                for info in dest.agents():
                    dest.remove(info.name)


def _altered(parcel, choose: random.Random):
    """One field of a parcel becomes something else."""
    import msgspec

    name = choose.choice(parcel.__struct_fields__)
    value = getattr(parcel, name)
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
    return msgspec.structs.replace(parcel, **{name: new})


def test_a_small_file_cannot_grow_without_bound(tmp_path):
    import zstandard

    for length, data in ((2**31, b"x" * 40), (2**20, zstandard.compress(bytes(2**20)))):
        header = bundle._HEADER.pack(1, len(data), length)
        check = bundle.digest(b"holdfast.bundle", header + data)[: bundle.CHECK_BYTES]
        assert isinstance(refused(bundle.MAGIC + header + data + check, tmp_path / "bomb"), Damaged)
    header = bundle._HEADER.pack(0, 2**32 - 1, 2**32 - 1)
    assert isinstance(refused(bundle.MAGIC + header + b"few", tmp_path / "long"), Damaged)
    assert isinstance(refused(b"GIF89a" + bytes(100), tmp_path / "gif"), NotABundle)


def test_a_drill_brings_back_what_is_there_and_tells_what_is_not(tmp_path):
    import apsw

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
    connection = apsw.Connection(str(tmp_path / "a" / "store.db"))
    (n,) = connection.execute("SELECT max(n) FROM tail").fetchone()
    connection.execute("UPDATE tail SET data = zeroblob(length(data)) WHERE n = ?", (n,))
    connection.close()
    with holdfast.open(tmp_path / "a", readonly=True) as store:
        report = store.drill(sample=1_000)
        lost = [one for one in report.checkpoints if one.problem]
        assert not report.ok
        assert [(one.agent, one.depth) for one in lost] == [("other", 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
