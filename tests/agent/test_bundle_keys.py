"""Files that leave an encrypted store, or have a key of their own."""

from __future__ import annotations

import os

import pytest

from holdfast.agent import bundle
from holdfast.errors import Damaged, KeyNeeded, NotEncrypted, WrongKey
from holdfast.store import keys
from holdfast.store.cipher import digest
from tests.agent.test_bundle import KEY, refused
from tests.agent.carried import assert_same, opened


@pytest.fixture
def secret(tmp_path):
    with opened(tmp_path / "secret", key=KEY) as store:
        with store.agent("trip-to-nowhere") as agent:
            agent.state["passport"] = "X1234567, read by nobody " * 20
            agent.checkpoint("asked for it")
        yield store


def test_what_leaves_an_encrypted_store_is_encrypted(secret, tmp_path):
    file, words = tmp_path / "file", (b"trip-to-nowhere", b"passport", b"asked for it", b"X1234567")
    secret.export(file, ["trip-to-nowhere"])
    assert not any(word in file.read_bytes() for word in words)
    with opened(tmp_path / "other") as other:
        for key, error in ((False, KeyNeeded), (None, KeyNeeded), (os.urandom(32), WrongKey)):
            with pytest.raises(error):
                other.import_bundle(file, key=key)
        assert other.agents() == []
        other.import_bundle(file, key=KEY)
        assert_same(secret, other, "trip-to-nowhere")
        other.remove("trip-to-nowhere")
        secret.export(file, ["trip-to-nowhere"], key=False, replace=True)
        with pytest.raises(NotEncrypted):
            other.import_bundle(file, key=KEY)
        other.import_bundle(file)
        own = os.urandom(32)
        secret.export(file, ["trip-to-nowhere"], key=own, replace=True)
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
