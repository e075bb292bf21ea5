"""Whole files in a directory and in object storage: there whole or not at all, and failures that tell no secret."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from holdfast.errors import BadOption, ColdPlaceMissing, DiskFull, StoreFailed, StorePoisoned, StoreReadOnly
from holdfast.store import objects
from holdfast.store.objects import MARK, Folder, Missing, location, open_objects
from tests.store.bucket import BUCKET, SECRET, proxied

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.fixture
def proxy(monkeypatch):
    with proxied(monkeypatch) as made:
        yield made


@pytest.fixture(params=["directory", "s3"])
def url(request, tmp_path, proxy):
    """Where nothing was put yet."""
    return str(tmp_path / "place") if request.param == "directory" else f"s3://{BUCKET}/{random.randbytes(8).hex()}"


def opened(url):
    place = open_objects(url, "0123abcd")
    place.prepare()
    return place


def names(place):
    return {name for name, _ in place.names()}


def test_what_is_put_is_read_back(url):
    noise = random.Random(url)
    place = opened(url)
    model = {}
    for number, size in enumerate([0, 1, 4096, 70_001, 11 * MIB]):  # the last in parts
        data = noise.randbytes(size)
        at = sorted(noise.randrange(size + 1) for _ in range(5))
        pieces = [memoryview(data)[a:b] for a, b in zip([0, *at], [*at, size], strict=True)]
        assert place.put(f"n{number}", iter(pieces)) == size
        model[f"n{number}"] = data
    assert names(opened(url)) == model.keys()
    assert all(-5 < age < 60 for _, age in place.names())
    for name, data in model.items():
        assert place.size(name) == len(data)
        assert place.read(name, 0, len(data)) == data
        for _ in range(5):
            start, length = noise.randrange(len(data) + 10), noise.randrange(len(data) + 10)
            assert place.read(name, start, length) == data[start : start + length]
        assert place.put(name, [data]) == len(data)  # a put that is tried again
        with pytest.raises(StoreFailed, match="something else"):
            place.put(name, [data, b"more"])
        assert place.read(name, 0, len(data) + 9) == data
        place.delete(name)
        place.delete(name)
        assert place.size(name) is None
        with pytest.raises(Missing, match=f"{name} is missing from") as caught:
            place.read(name, 0, 1)
        assert caught.value.what == (f"packs/{name}",)
    assert names(place) == set()


def test_a_place_that_is_not_there_is_never_taken_for_an_empty_one(url):
    place = open_objects(url, "0123abcd")
    for call in (
        place.require,
        lambda: place.read("n", 0, 1),
        lambda: place.size("n"),
        lambda: names(place),
    ):
        with pytest.raises(ColdPlaceMissing, match=f"{MARK} is not there") as caught:
            call()
        assert caught.value.place == place.place == location(url)
    for _ in range(2):
        place.prepare()
        assert place.size("n") is None


def test_a_source_that_fails_leaves_nothing(url):
    def pieces(size):
        yield b"a" * size
        raise StoreFailed("no more")

    place = opened(url)
    for size in (10, 12 * MIB):
        with pytest.raises(StoreFailed, match="no more"):
            place.put("n", pieces(size))
    assert names(place) == set()


# -- servers that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "failing"),
    [(1000, ["500", "403", "cut", "done 500", "done cut"]), (MIB + 1000, ["500", "done cut"])],  # the latter in parts
)
def test_a_server_that_fails_while_something_is_put(proxy, size, failing):
    place = opened(f"s3://{BUCKET}/{random.randbytes(8).hex()}")
    data = random.randbytes(size)
    for number, how in enumerate(failing):
        proxy.well()
        proxy.always(how, "PUT", "POST")
        told = ""
        try:
            place.put(f"always{number}", [data])
        except ColdPlaceMissing as error:
            told = "".join(traceback.format_exception(error)) + repr(error.__context__)
            assert f"s3://{BUCKET}" in told
            assert SECRET not in told
        assert len(proxy.asked) < 20
        assert bool(told) == ("done" not in how or size > MIB)  # one that has arrived is found when it is looked up
        assert names(place) == (set() if told else {f"always{number}"})
        place.delete(f"always{number}")
        if how == "403":
            continue  # nothing is tried again then
        for method in ("PUT",) if size < MIB else ("PUT", "POST"):
            proxy.once(how, method)
            assert place.put(f"once{number}", [data]) == size
            assert place.read(f"once{number}", 0, size) == data
            place.delete(f"once{number}")


def test_a_server_that_fails_while_something_is_read(proxy):
    place = opened(f"s3://{BUCKET}/{random.randbytes(8).hex()}")
    data = random.randbytes(50_000)
    place.put("n", [data])
    for how in ("500", "403", "cut", "short"):
        proxy.well()
        proxy.always(how, "GET")
        with pytest.raises(ColdPlaceMissing, match=f"s3://{BUCKET}/.* cannot be reached") as caught:
            place.read("n", 100, 40_000)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert len(proxy.asked) < 8
        if how != "403":
            proxy.once(how, "GET")
            assert place.read("n", 100, 40_000) == data[100:40_100]
    proxy.always("500", "HEAD", "DELETE")
    for call in (lambda: place.size("n"), lambda: place.delete("n")):
        with pytest.raises(ColdPlaceMissing, match="HTTP 500"):
            call()


def test_a_server_that_does_not_answer(proxy, monkeypatch):
    monkeypatch.setattr(objects, "REQUEST_S", 0.2)
    place = opened(f"s3://{BUCKET}/{random.randbytes(8).hex()}")
    for how in ("hang", "done hang"):
        proxy.always(how, "PUT")
        if how == "hang":
            with pytest.raises(ColdPlaceMissing, match="timed out"):
                place.put("n", [b"data"])
            assert names(place) == set()
        else:
            place.put("n", [b"data"])
    proxy.always("hang", "GET")
    with pytest.raises(ColdPlaceMissing, match="timed out"):
        place.read("n", 0, 4)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ColdPlaceMissing, match="connection refused"):
        open_objects(f"s3://{BUCKET}", "0").require()


def test_object_storage_that_a_parent_has_used(proxy):
    code = (
        "import os, sys; from holdfast.errors import ForkedHandle; from holdfast.store.objects import open_objects\n"
        f"place = open_objects('s3://{BUCKET}/forked', '0'); place.prepare()\n"
        "if not os.fork():\n"
        "  try: open_objects(place.place, '0').size('n')\n"
        "  except ForkedHandle: os._exit(7)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=False).returncode == 7


# -- disks that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        ("write", errno.ENOSPC, DiskFull),
        ("write", errno.EIO, StoreFailed),
        ("fsync", errno.ENOSPC, DiskFull),
        ("fsync", errno.EIO, StorePoisoned),
        ("open", errno.EROFS, StoreReadOnly),
        ("rename", errno.EIO, StoreFailed),
    ],
)
def test_a_disk_that_fails(tmp_path, monkeypatch, call, number, error):
    place = Folder(tmp_path)
    real = getattr(os, call)
    calls = []

    def failing(*args, **more):
        calls.append(args)
        if len(calls) == at:
            raise OSError(number, os.strerror(number))
        if call == "write":
            return real(args[0], args[1][:1000])  # a short one
        return real(*args, **more)

    for at in (1, 2, 3):
        calls.clear()
        monkeypatch.setattr(os, call, failing)
        try:
            done = place.put(f"n{at}", [b"x" * 1500, b"y" * 1000])
        except (error, StorePoisoned):  # the latter when the directory cannot be flushed
            done = 0
        finally:
            monkeypatch.setattr(os, call, real)
        assert done == (2500 if len(calls) < at else 0)
        assert not done or place.read(f"n{at}", 0, 9999) == b"x" * 1500 + b"y" * 1000
        assert names(place) <= {f"n{one}" for one in range(at + 1)}  # no temporary file
    monkeypatch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    place.put("n", [b"data"])
    with pytest.raises(StoreFailed, match="cannot be read"):
        place.read("n", 0, 4)


def test_killed_in_the_middle_of_a_put(url):
    """What is left has no name that a row can have."""
    place = opened(url)
    code = (
        "import os, sys; from holdfast.store import objects\n"
        f"objects.SINGLE_BYTES, objects.PART_BYTES = {MIB}, {5 * MIB}\n"
        "def pieces():\n"
        "  for _ in range(12): yield bytes(2**20)\n"
        "  os.kill(os.getpid(), 9)\n"
        f"objects.open_objects({url!r}, '0123abcd').put('n', pieces())"
    )
    end = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode
    assert end == -signal.SIGKILL
    assert place.size("n") is None
    assert all(name.startswith("tmp-") for name in names(place))
    assert len(names(place)) == (0 if url.startswith("s3:") else 1)
    place.put("n", [b"data"])
    assert place.read("n", 0, 9) == b"data"


# -- addresses --------------------------------------------------------------------------------------------------


def test_addresses(tmp_path):
    assert location(f"s3://me:{SECRET}@bucket/packs/?token={SECRET}#{SECRET}") == "s3://bucket/packs"
    odd = tmp_path / os.fsdecode(b"c\xffld %41")
    assert location(odd) == location(f"file://{tmp_path}/c%FFld%20%2541") == f"file://{tmp_path}/c%FFld%20%2541"
    opened(odd).put("n", [b"data"])
    assert (odd / "0123abcd" / "n").read_bytes() == b"data"
    for bad in (f"s3://me:{SECRET}@b/p", f"s3://b/p?token={SECRET}", f"s3://b#{SECRET}", f"x::s3://:{SECRET}@b"):
        with pytest.raises(BadOption, match="nothing else") as caught:
            open_objects(bad, "0")
        assert SECRET not in str(caught.value)
    for bad in ("gopher://there", "memory://packs", "postgresql://host/db"):
        with pytest.raises(BadOption, match=f"at a {bad.partition(':')[0]}:// address"):
            open_objects(bad, "0")
    for bad in ("file://host/packs", "file:packs", f"FILE:/{tmp_path}"):
        with pytest.raises(BadOption, match="file:///path"):
            open_objects(bad, "0")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ColdPlaceMissing, match="s3://bucket/packs, needs the package obstore") as caught:
        open_objects("s3://bucket/packs", "0")
    assert caught.value.hint == "pip install 'holdfast[objects]'"
