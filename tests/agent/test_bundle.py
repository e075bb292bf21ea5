"""Agents in one file: what goes in comes out, and nothing comes out of a file that is not what was written."""

from __future__ import annotations

import io
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import zstandard

import holdfast
from holdfast.agent import bundle
from holdfast.agent.frames import VERSION, End, Head
from holdfast.errors import (
    AgentBusy,
    BadOption,
    Damaged,
    HistoriesDiverged,
    HoldfastError,
    KeyNeeded,
    NotABundle,
    NotAStore,
    NotEncrypted,
    UnknownAgent,
    WrongKey,
)
from holdfast.store import keys
from holdfast.store.cipher import digest
from tests.agent.histories import act, assert_same, grow, plain, sound, view
from tests.conftest import SOAK
from tests.faults.rich import small_limits

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store with two agents, and both in a file."""
    here = tmp_path_factory.mktemp("bundle")
    with small_limits():
        store = holdfast.open(here / "a")
        grow(store, "trip", random.Random(11), 30)
        store.copy("trip", "copy")
        file = here / "trips.hfb"
        store.export(file, ["trip", "copy"])
        yield store, file
        store.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A store with one small agent that has some of everything."""
    with holdfast.open(tmp_path_factory.mktemp("small") / "a") as store:
        with closing(store.agent("trip")) as agent:
            agent.state["n"] = 1
            agent.checkpoint("one")
            act(agent)
        with closing(store.agent("trip")) as agent:
            agent.state["n"] = 2
            agent.checkpoint("two")
            agent.tag("t")
        yield store


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
        if at < 100 or at % 5 == 0 or SOAK:
            assert isinstance(refused(data[:at], key), Damaged | NotABundle)
        bad = data[:at] + bytes([data[at] ^ (1 << choose.randrange(8))]) + data[at + 1 :]
        assert isinstance(refused(bad, key), Damaged | NotABundle)
    assert isinstance(refused(data + b"x", key), Damaged)


def test_a_refused_file_changes_nothing_that_can_be_seen(small, tmp_path, rounds):
    small.export(tmp_path / "file", ["trip"])
    data = (tmp_path / "file").read_bytes()
    choose = random.Random(1)
    with holdfast.open(tmp_path / "b") as dest:
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
    with holdfast.open(tmp_path / "b") as dest:
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

    with holdfast.open(tmp_path / "b") as dest, pytest.raises(NotABundle, match=f"format {VERSION + 1}"):
        dest.import_bundle(rewritten(file, tmp_path / "future", change))


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path):
    with holdfast.open(tmp_path / "secret", key=KEY) as store:
        with closing(store.agent("trip-to-nowhere")) as agent:
            agent.state["passport"] = "X1234567, read by nobody " * 20
            agent.checkpoint("asked for it")
        yield store


def test_what_leaves_an_encrypted_store_is_encrypted(secret, tmp_path):
    file, words = tmp_path / "file", (b"trip-to-nowhere", b"passport", b"asked for it", b"X1234567")
    holdfast.keys.add(secret.path, "correct horse", key=KEY)
    secret.export(file, ["trip-to-nowhere"])
    assert not any(word in file.read_bytes() for word in words)
    with holdfast.open(tmp_path / "other") as other:
        for key, error in ((False, KeyNeeded), (None, KeyNeeded), (os.urandom(32), WrongKey)):
            with pytest.raises(error):
                other.import_bundle(file, key=key)
        assert other.agents() == []
        for key in (KEY, "correct horse"):  # every key of its store opens it
            other.import_bundle(file, key=key)
        assert_same(secret, other, "trip-to-nowhere")
        other.remove("trip-to-nowhere")
        secret.export(file, ["trip-to-nowhere"], key=False, replace=True)
        assert any(word in file.read_bytes() for word in words)
        with pytest.raises(NotEncrypted):
            other.import_bundle(file, key=KEY)
        other.import_bundle(file)
        own = os.urandom(32)
        for store in (secret, other):  # a file may have a key of its own, wherever it comes from
            store.export(file, ["trip-to-nowhere"], key=own, replace=True)
            with pytest.raises(WrongKey):
                other.import_bundle(file, key=KEY)
            assert other.import_bundle(file, key=own).agents[0].status == "unchanged"


def test_parts_of_an_encrypted_file_cannot_be_moved(secret, tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    secret.export(file, ["trip-to-nowhere"])
    secret.export(other, ["trip-to-nowhere"])

    def parts(place):
        with place.open("rb") as data:
            data.seek(len(bundle.KEYED_MAGIC))
            keys.BundleKeys.read(data.read)
            start = data.tell()
        data, at, found = place.read_bytes(), start, []
        while at < len(data):
            end = at + bundle._HEADER.size + bundle._HEADER.unpack_from(data, at)[1]
            found.append(data[at:end])
            at = end + bundle.CHECK_BYTES
        return data[:start], found

    def built(head, found):
        check = b""
        for part in found:
            check = digest(b"bundle", check, part)[: bundle.CHECK_BYTES]
            head += part + check
        return head

    head, found = parts(file)
    assert built(head, found) == file.read_bytes()
    without, swapped = found[:1] + found[2:], [found[1], found[0], *found[2:]]
    for some in (without, swapped, [parts(other)[1][0], *found[1:]]):
        assert isinstance(refused(built(head, some), KEY), Damaged)


def test_a_file_from_elsewhere_does_not_say_how_much_a_reader_works(secret, tmp_path):
    file = tmp_path / "file"
    secret.export(file, ["trip-to-nowhere"], key="a passphrase")
    data = file.read_bytes()
    with file.open("rb") as read:
        read.seek(len(bundle.KEYED_MAGIC))
        found = keys.BundleKeys.read(read.read)
        rest = read.read()
    for cost in ((2**30, 1, 1), (keys.MEMORY_MAX_KIB, 10**6, 1), (64, 1, 10**6)):
        (slot,) = found.keys.slots
        dear = found._replace(keys=found.keys._replace(slots=(slot._replace(cost=cost),)))
        bad = data[: len(bundle.KEYED_MAGIC)] + dear.encode() + rest
        assert isinstance(refused(bad, "a passphrase"), Damaged)


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
    assert {one.status for one in holdfast.import_bundle(file, place).agents} == {"unchanged"}
    holdfast.import_bundle(tmp_path / "shut", folder / "safe", key=KEY, file_key=KEY)
    holdfast.import_bundle(tmp_path / "shut", folder / "open", key=False, file_key=KEY)
    with holdfast.open(folder / "safe", key=KEY) as safe, holdfast.open(folder / "open") as other:
        assert (safe.encrypted, other.encrypted) == (True, False)
        assert_same(safe, other, "trip")


def test_a_store_on_a_server_is_made_when_the_file_can_be_opened(written, server, tmp_path):
    source, file = written
    (tmp_path / "wrong").write_bytes(b"something else")
    source.export(tmp_path / "shut", ["trip"], key=KEY)
    with server.database("imports") as url:
        for refused, kind in (("wrong", NotABundle), ("shut", BadOption)):
            with pytest.raises(kind):
                holdfast.import_bundle(tmp_path / refused, url, file_key=None if refused == "wrong" else KEY)
            with pytest.raises(NotAStore):
                holdfast.open(url, create=False)
        assert [one.name for one in holdfast.import_bundle(file, url).agents] == ["trip", "copy"]
        assert {one.status for one in holdfast.import_bundle(file, url).agents} == {"unchanged"}
        with holdfast.open(url, create=False) as store:
            assert_same(source, store, "copy")
            sound(store)


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
        sound(store)
