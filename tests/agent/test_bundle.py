"""Agents in one file: what goes in comes out, and nothing comes out of a file that is not what was written."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

import holdfast
from holdfast.agent import bundle
from holdfast.agent.parcels import End, Head
from holdfast.errors import (
    BadOption,
    Damaged,
    HistoriesDiverged,
    HoldfastError,
    KeyNeeded,
    NotABundle,
    NotEncrypted,
    UnknownAgent,
    WrongKey,
)
from holdfast.store import bundlekeys, keys
from holdfast.store.catalog import digest
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


def refused(data: bytes, place: Path, key=None) -> HoldfastError:
    """The error of reading these bytes as a bundle."""
    place.write_bytes(data)
    with pytest.raises(HoldfastError) as caught, bundle.opened(place, key) as (parcels, _):
        for _ in parcels:
            pass
    return caught.value


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_every_cut_and_every_changed_byte_is_refused(written, tmp_path, rounds, key):
    store, _ = written
    store.export(tmp_path / "file", ["trip"], key=key)
    data = (tmp_path / "file").read_bytes()
    choose = random.Random(1)
    for at in choose.sample(range(len(data)), min(len(data), rounds(120, 100_000))):
        assert isinstance(refused(data[:at], tmp_path / "cut", key), Damaged | NotABundle)
        bad = data[:at] + bytes([data[at] ^ (1 << choose.randrange(8))]) + data[at + 1 :]
        assert isinstance(refused(bad, tmp_path / "bad", key), Damaged | NotABundle)
    assert isinstance(refused(data + b"x", tmp_path / "more", key), Damaged)


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
    with bundle.opened(file, None) as (parcels, _), place.open("wb") as new:
        out = bundle.Writing(new)
        for parcel in parcels:
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


def test_parts_of_an_encrypted_file_cannot_be_moved(secret, tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    secret.export(file, ["trip-to-nowhere"])
    secret.export(other, ["trip-to-nowhere"])

    def parts(place):
        data, at = place.read_bytes(), len(bundle.KEYED_MAGIC) + bundlekeys.HEAD_BYTES
        found = []
        while at < len(data):
            end = at + bundle._HEADER.size + bundle._HEADER.unpack_from(data, at)[1]
            found.append(data[at:end])
            at = end + bundle.CHECK_BYTES
        return data[: len(bundle.KEYED_MAGIC) + bundlekeys.HEAD_BYTES], found

    def built(head, found):
        check = b""
        for part in found:
            check = digest(b"holdfast.bundle", check + part)[: bundle.CHECK_BYTES]
            head += part + check
        return head

    head, found = parts(file)
    assert built(head, found) == file.read_bytes()
    without = built(head, found[:2] + found[3:])
    swapped = built(head, [*found[:2], found[3], found[2], *found[4:]])
    elsewhere = built(head, [parts(other)[1][0], *found[1:]])
    for data in (without, swapped, elsewhere):
        assert isinstance(refused(data, tmp_path / "moved", KEY), Damaged)


def test_a_file_from_elsewhere_does_not_say_how_much_a_reader_works(secret, tmp_path):
    file = tmp_path / "file"
    secret.export(file, ["trip-to-nowhere"], key="a passphrase")
    data = file.read_bytes()
    start = len(bundle.KEYED_MAGIC)
    found = keys.parse(data[start : start + keys.BLOCK_BYTES])
    (slot,) = found.slots
    for cost in ((2**30, 1, 1), (keys.MEMORY_MAX_KIB, 10**6, 1), (64, 1, 10**6)):
        dear = replace(found, slots=(replace(slot, cost=cost),))
        bad = data[:start] + keys.block(dear) + data[start + keys.BLOCK_BYTES :]
        assert isinstance(refused(bad, tmp_path / "bad", "a passphrase"), Damaged)


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
