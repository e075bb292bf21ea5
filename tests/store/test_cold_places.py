"""Cold places by URL: a real server on loopback, with a real driver, that fails in every way a server can."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import fsspec
import httpx
import pytest

import holdfast
from holdfast import Policy
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, Rekeying, StoreFailed
from holdfast.store.tiering import MARK, file_name, place_at, url_of
from tests.store.dav import serving
from tests.store.test_encryption import KEY, OTHER
from tests.store.test_tiering import filled, packs, states

ROOT = Path(__file__).resolve().parents[2]
FAR = "webdav://far/packs"
SECRET = "sw0rdfish"


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture
def far(server, monkeypatch):
    """The server, empty and well, where the driver's settings lead to it."""
    server.objects.clear()
    server.how = lambda _method, _name: ""
    monkeypatch.setitem(fsspec.config.conf, "webdav", options(server))
    return server


def options(server, **more):
    """The driver never closes what it keeps open, so it keeps nothing; without certificates it is made faster."""
    limits = httpx.Limits(max_keepalive_connections=0)
    found = {"base_url": server.url, "auth": ("me", SECRET), "retry": False, "timeout": 120.0, "limits": limits}
    return {**found, "verify": False, **more}


def always(failure, *methods):
    """Fails whatever concerns a pack in one of these ways."""
    return lambda method, name: failure if method in methods and name.endswith(".pack") else ""


def once(failure, *methods):
    left = [failure]
    return lambda method, name: left.pop() if left and method in methods and name.endswith(".pack") else ""


def whole(store, server, before):
    """Everything is there and proven, and what lies there is exactly what should."""
    server.how = lambda _method, _name: ""
    assert states(store) == before  # each value is proven when it is read
    store.tier(FAR)
    cold = {file_name(pack) for pack in store._catalog.tiers.packs}
    assert set(server.names()) == {MARK, *cold}
    assert store._catalog.fact("strays") is None


def test_packs_move_to_a_url_and_back(store_path, far):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        everything = packs(store_path / "packs")
        assert store.tier(f"{FAR}/", dry_run=True).packs == 3
        assert far.objects == {}
        done = store.tier(f"{FAR}/")
        assert (done.place, done.packs, done.done) == (FAR, 3, True)
        assert sorted(packs(store_path / "packs") + far.names()) == sorted([*everything, MARK])
        assert store.stats()["cold"] == [{"place": FAR, "packs": 3, "reachable": True}]
        whole(store, far, before)
        assert store.verify().ok
    with holdfast.open(store_path, readonly=True) as store:
        assert states(store) == before
        assert store.verify().ok
    with holdfast.open(store_path) as store:
        assert store.tier().packs == 3
        assert packs(store_path / "packs") == everything
        assert far.names() == [MARK]
        assert states(store) == before


MOVING = {
    "PUT": ["500", "403", "gone", "cut", "done 500", "done gone"],
    "GET": ["500", "gone", "cut", "short", "wrong"],
    "PROPFIND": ["500", "gone"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", MOVING)
def test_a_server_that_fails_while_packs_move_there(store_path, far, method):
    before = filled(store_path, 2)
    everything = packs(store_path / "packs")
    with holdfast.open(store_path) as store:
        for failure in MOVING[method]:
            far.how = always(failure, method)
            with pytest.raises((ColdPlaceMissing, StoreFailed), match=re.escape(FAR)) as caught:
                store.tier(FAR)
            assert SECRET not in str(caught.value)
            assert far.url not in str(caught.value)
            assert packs(store_path / "packs") == everything  # nothing is deleted here that was not proven there
            assert store._catalog.tiers.packs == {}
            far.how = lambda _method, _name: ""
            store.tier()
            assert far.names() == [MARK]  # what may have arrived is known
            far.how = once(failure, method)  # another attempt helps, of ours or of whoever tries again
            with suppress(ColdPlaceMissing, StoreFailed):
                store.tier(FAR)
            whole(store, far, before)
            store.tier()


@pytest.mark.slow
def test_a_server_that_fails_while_packs_are_read(store_path, tmp_path, far):
    before = filled(store_path)
    with holdfast.open(store_path) as store, holdfast.open(tmp_path / "other") as other:
        store.tier(FAR)
        for failure in ("500", "cut", "short"):
            far.how = always(failure, "GET")
            with pytest.raises(ColdPlaceMissing, match=re.escape(FAR)) as caught:
                states(store)
            assert caught.value.place == FAR
            assert SECRET not in str(caught.value)
            assert len(store.agent("a").state["weights"]) == 300_000  # what the branch needs is here
            report = store.verify()
            assert report.problems == []
            assert [(one.place, one.packs) for one in report.unreachable] == [(FAR, 3)]
            with pytest.raises(ColdPlaceMissing):
                store.tier()
        for do in (
            lambda: store.push(other),
            lambda: store.export(tmp_path / "file", ["a"]),
            lambda: holdfast.repair(store_path, tmp_path / "repaired"),
        ):
            with pytest.raises(ColdPlaceMissing, match=re.escape(FAR)):
                do()
        assert not (tmp_path / "file").exists()
        assert not (tmp_path / "repaired").exists()
        assert other.verify().ok
        whole(store, far, before)
        store.push(other)
        assert states(other) == before
        assert other._catalog.fact("tiers") is None
        store.export(tmp_path / "file", ["a"])
        assert holdfast.repair(store_path, tmp_path / "repaired").whole
    with holdfast.open(tmp_path / "repaired") as repaired:
        assert states(repaired) == before


def test_a_server_that_does_not_answer(store_path, far, monkeypatch):
    before = filled(store_path, 2)
    with holdfast.open(store_path) as store:
        for how in ("hang", "done hang"):  # a time-out, and one after it was done
            monkeypatch.setitem(fsspec.config.conf, "webdav", options(far, timeout=0.2))
            far.how = always(how, "PUT")
            with pytest.raises(ColdPlaceMissing, match="Timeout"):
                store.tier(FAR)
            assert len(packs(store_path / "packs")) == 2
            monkeypatch.setitem(fsspec.config.conf, "webdav", options(far))
            whole(store, far, before)
            store.tier()


def test_a_server_that_is_not_there(store_path, far, monkeypatch):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(FAR)
        with serving() as gone:
            pass
        monkeypatch.setitem(fsspec.config.conf, "webdav", options(gone))
        with pytest.raises(ColdPlaceMissing, match=re.escape(FAR)):
            states(store)
        assert [one["reachable"] for one in store.stats()["cold"]] == [False]
        store.retain(Policy(last=1000))  # needs nothing from there
        monkeypatch.setitem(fsspec.config.conf, "webdav", options(far))
        whole(store, far, before)


@pytest.mark.slow
def test_objects_that_are_missing_changed_or_swapped_there_are_damage(store_path, far):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(FAR)
        good = dict(far.objects)
        first, second, _ = sorted(path for path in good if path.endswith(".pack"))
        changed = [good[first][:200_000], b"", good[first] + b"more", bytes(byte ^ 1 for byte in good[first])]
        for bad in ({}, *({first: data} for data in changed), {first: good[second], second: good[first]}):
            far.objects.update(bad)
            if not bad:
                del far.objects[first]
            problems = store.verify().problems
            for path in bad or [first]:
                assert any(Path(path).name in str(problem) for problem in problems)
            far.objects.update(good)
        assert store.verify().ok
        for data in (*changed, good[second]):
            far.objects[first] = data
            with pytest.raises(Damaged, match=f"{Path(first).name} in {FAR} is not what was moved there"):
                store.tier()
        del far.objects[first]
        with pytest.raises(Damaged, match=f"{Path(first).name} is missing from {FAR}"):
            store.tier()
        far.objects[first] = good[first]
        assert store.tier().packs == 1  # the others have come back before
        assert far.names() == [MARK]
        assert states(store) == before


def test_a_place_without_its_mark_is_not_taken_for_an_empty_one(store_path, far):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(FAR)
        kept = dict(far.objects)
        far.objects.clear()  # another bucket, say
        with pytest.raises(ColdPlaceMissing, match=MARK):
            states(store)
        with pytest.raises(ColdPlaceMissing, match=MARK):
            store.tier(FAR)  # must not make it anew
        assert far.objects == {}
        far.objects.update(kept)
        whole(store, far, before)


@pytest.mark.parametrize("failure", ["500", "done gone"])
def test_what_cannot_be_deleted_there_is_deleted_later(store_path, far, failure):
    before = filled(store_path)
    with holdfast.open(store_path) as store:
        store.tier(FAR)
        far.how = always(failure, "DELETE")
        assert store.tier().packs == 3  # it is all back, whatever is left there
        assert states(store) == before
        with pytest.raises(ColdPlaceMissing, match="cannot be deleted"):
            store.tier(FAR)  # a deletion that arrives late must not meet a new copy
        assert len(packs(store_path / "packs")) == 4
        far.how = lambda _method, _name: ""
        store.retain(Policy(last=1000))
        assert far.names() == [MARK]
        store.tier(FAR)
        far.how = always(failure, "DELETE")
        store.retain(Policy(last=1))
        far.how = lambda _method, _name: ""
        assert store.verify().ok
        store.retain(Policy(last=1))
        assert far.names() == [MARK]
        assert store._catalog.fact("strays") is None


def test_another_master_key_waits_for_a_server_that_fails_on_the_way(store_path, far):
    before = filled(store_path, key=KEY)
    with holdfast.open(store_path, key=KEY) as store:
        store.tier(FAR)
    old = far.names()
    for failing in ("PUT", "DELETE"):
        seen = []
        far.how = lambda method, _name, failing=failing, seen=seen: (
            "done 500" if method == failing and (seen.append(1), len(seen) > 1)[1] else ""
        )
        key = KEY if failing == "PUT" else OTHER
        with pytest.raises(ColdPlaceMissing, match=re.escape(FAR)):
            holdfast.keys.rotate(store_path, OTHER, key=key, full=True)
        with pytest.raises(Rekeying):
            holdfast.open(store_path, key=OTHER)
    far.how = lambda _method, _name: ""
    holdfast.keys.rotate(store_path, OTHER, key=OTHER, full=True)
    assert set(old) & set(far.names()) == {MARK}
    with holdfast.open(store_path, key=OTHER) as store:
        whole(store, far, before)
        assert len(far.names()) == 4


def test_secrets_do_not_get_into_the_store_or_into_messages(store_path, far):
    filled(store_path)
    with holdfast.open(store_path) as store:
        for bad in (
            f"webdav://me:{SECRET}@far/packs", f"s3://:{SECRET}@bucket", f"s3://bucket/packs?token={SECRET}",
            f"s3://bucket#{SECRET}", f"simplecache::s3://me:{SECRET}@bucket",
        ):  # fmt: skip
            with pytest.raises(BadOption) as caught:
                store.tier(bad)
            assert SECRET not in str(caught.value)
        store.tier(FAR)
    assert url_of("sftp://me@host/packs/") == "sftp://me@host/packs"
    for file in store_path.rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes()


def test_what_is_missing_here_is_named(store_path, far):
    filled(store_path)
    with holdfast.open(store_path) as store:
        with pytest.raises(BadOption, match="no gopher"):
            store.tier("gopher://there")
        with pytest.raises(BadOption, match="lasts"):
            store.tier("memory://packs")  # gone with the process
        with pytest.raises(ColdPlaceMissing, match="gcsfs"):
            store.tier("gs://bucket/packs")
        store.tier(FAR)
    code = (
        "import sys; sys.modules['fsspec'] = None; import holdfast; from tests.store.test_tiering import states\n"
        f"with holdfast.open({str(store_path)!r}) as store:\n"
        "  assert len(store.agent('a').state['weights']) == 300_000\n"
        f"  store.tier({str(store_path.parent / 'folder')!r})\n"
        "  states(store)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"ColdPlaceMissing: the cold place {FAR} needs the package fsspec" in found.stderr
    assert "holdfast[cold]" in found.stderr


def test_the_driver_is_set_up_outside_the_store(store_path, far):
    """On the command line: from fsspec's settings, here by a variable."""
    filled(store_path)
    settings = {"base_url": far.url, "retry": False, "verify": False, "timeout": 120.0}
    found = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "--store", str(store_path), "tier", "--to", FAR, "--do", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "FSSPEC_WEBDAV": json.dumps(settings)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert (json.loads(found.stdout)["place"], json.loads(found.stdout)["packs"]) == (FAR, 3)
    assert len(far.names()) == 4


def test_the_interface_of_a_place(tmp_path, far):
    """What a directory and a URL have in common."""
    source = tmp_path / "one.pack"
    source.write_bytes(bytes(range(256)) * 64)
    for place in (place_at(FAR), place_at(url_of(tmp_path / "cold"))):
        with pytest.raises(ColdPlaceMissing):
            place.require()
        with pytest.raises(ColdPlaceMissing):
            place.read("one.pack", 0, 10)
        place.prepare()
        place.prepare()
        place.require()
        for call in (lambda at: at.size("one.pack"), lambda at: at.read("one.pack", 0, 1)):
            with pytest.raises(FileNotFoundError):
                call(place)
        place.remove("one.pack")
        place.put("one.pack", source)
        place.put("one.pack", source)
        assert place.size("one.pack") == 16384
        assert place.read("one.pack", 300, 500) == source.read_bytes()[300:800]
        assert place.read("one.pack", 16000, 500) == source.read_bytes()[16000:]
        assert place.read("one.pack", 20000, 500) == b""
        place.remove("one.pack")
        with pytest.raises(FileNotFoundError):
            place.size("one.pack")
