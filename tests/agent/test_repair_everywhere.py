"""Repair: whatever is damaged, the original stays as it is, and what is intact is in the new store, proven."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys

import pytest

from holdfast.agent.graph import Graph
from holdfast.agent.policy import Policy
from holdfast.agent.repair import repair
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, KeyNeeded, NotAStore, WrongKey
from tests.agent.damaged import (
    KEY,
    build,
    delete,
    flipped,
    memory,
    opened,
    pictured,
    rows,
    small_limits,
    sql,
)
from tests.conftest import SOAK

DERIVED = frozenset({"agent", "branch", "tag", "validity", "checkpoint", "shallow", "pack", "floor", "store"})
"""What a page of these tables holds can be had from others."""


@pytest.fixture(autouse=True)
def _small():
    with small_limits():
        yield


@pytest.fixture(scope="module", params=[False, KEY], ids=["plain", "encrypted"])
def key(request):
    return request.param


@pytest.fixture(scope="module")
def sound(key):
    with memory() as folder, small_limits():
        build(folder / "store", key)
        yield folder / "store", pictured(folder / "store", key)


@pytest.fixture
def path(sound):
    with memory() as folder:
        shutil.copytree(sound[0], folder / "store")
        yield folder / "store"


def content(path):
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.endswith("-shm")]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def repaired(path, key, before, *, log=False):
    """What a repair says, and what is in the new store: that is what it was, and the rest was said to be lost.

    ``log``: entries of the log are lost. What a copy sees of what its original had left is told nowhere else.
    """
    new = path.parent / "new"
    files = content(path)
    try:
        report = repair(path, new, key=key)
        assert content(path) == files
        assert not [one for one in path.parent.iterdir() if "holdfast-repair" in one.name]
        assert not [one for one in report.problems if "in the new store" in one]  # it verifies what it made
        after = pictured(new, key)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    every = {id: state for agent in before.values() for id, state in agent["states"].items()}
    for name, agent in after.items():
        assert all(every.get(id, state) == state for id, state in agent["states"].items())
        gone = before[name]["states"].keys() - agent["states"].keys() if name in before else set()
        told = next(one for one in report.agents if one.name == name)
        assert not (gone and told.whole) or log, "it does not say of whom something is lost"
    if report.whole and not log:
        assert after == before
    return report, after


def states(picture):
    """States by what people know them by: labels, wherever ids had to become others."""
    return {name: {(one[0], one[2]) for one in agent["states"].values()} for name, agent in picture.items()}


def test_of_a_sound_store_nothing_is_lost(sound, path, key):
    report, after = repaired(path, key, sound[1])
    assert (report.whole, report.problems, report.missing) == (True, [], [])
    assert after == sound[1]
    dry = repair(path, key=key)
    assert dry.to is None
    assert dry.to_json()["agents"] == report.to_json()["agents"]
    assert [one.name for one in path.parent.iterdir()] == ["store"]


def test_a_lost_page_costs_only_what_it_held(sound, path, key):
    """Each page in turn is overwritten."""
    held = {
        page: (name, table)
        for name, table, page in sql(
            path, "SELECT d.name, s.tbl_name, d.pageno FROM dbstat d LEFT JOIN sqlite_schema s ON s.name = d.name"
        )
    }
    data = (path / "store.db").read_bytes()
    one_of_each = {name: page for page, (name, _) in held.items()}
    for page in range(1, len(data) // 4096 + 1):
        name, table = held.get(page, ("", ""))
        if (key and name == "slot") or (not SOAK and page not in one_of_each.values()):
            continue  # without its list of keys nobody can read an encrypted store
        start = (page - 1) * 4096
        (path / "store.db").write_bytes(data[:start] + bytes(range(256)) * 16 + data[start + 4096 :])
        report, after = repaired(path, key, sound[1], log=table == "log")
        if table in DERIVED or name != table:  # or the page of an index
            assert after == sound[1], (page, name)
            assert not any(one.lost_checkpoints for one in report.agents)
        elif table in {"record", "log"}:
            assert states(after)["a"] == states(sound[1])["a"]
        assert report.problems


def test_any_row_may_be_missing(sound, path, key):
    found = [one for one in rows(path) if not (key and one[0] == "slot")]
    chosen = found if SOAK else random.Random(11).sample(found, 18)
    original = (path / "store.db").read_bytes()
    for table, keys, row in chosen:
        delete(path, table, keys, row)
        sql(path, "VACUUM")  # nothing of it is left in a page
        _, after = repaired(path, key, sound[1], log=table == "log")
        if table in DERIVED:
            assert after == sound[1], (table, row)
        if table == "record":
            assert states(after) == states(sound[1])
        for name in ("store.db-wal", "store.db-shm"):
            (path / name).unlink(missing_ok=True)
        (path / "store.db").write_bytes(original)


def test_any_byte_may_be_flipped(sound, path, key):
    original = (path / "store.db").read_bytes()
    chosen = random.Random(2)
    for _ in range(3000 if SOAK else 10):
        at = chosen.randrange(len(original))
        (path / "store.db").write_bytes(original[:at] + bytes([original[at] ^ 1 << at % 8]) + original[at + 1 :])
        repaired(path, key, sound[1], log=True)


def test_works_when_sqlite_calls_it_malformed(sound, path, key):
    """The schema and every inner page of all trees are gone."""
    pages = bytearray((path / "store.db").read_bytes())
    pages[:4096] = bytes(4096)
    for start in range(0, len(pages), 4096):
        if pages[start] in {2, 5}:
            pages[start : start + 4096] = bytes(4096)
    (path / "store.db").write_bytes(pages)
    with pytest.raises((Damaged, NotAStore)), opened(path, key=key):
        pass
    report, after = repaired(path, key, sound[1])
    assert report.problems
    assert after == sound[1]


def test_commits_that_a_broken_log_hides_are_found(path, key):
    child = os.fork()
    if child == 0:
        try:
            with opened(path, readonly=False, key=key) as store:
                agent = store.agent("a")
                for number in range(6):
                    agent.state["log"].append(f"late {number}")
                    agent.checkpoint(f"late {number}")
                store.agent("third").checkpoint("third")
                os.kill(os.getpid(), signal.SIGKILL)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    shutil.copytree(path, path.parent / "copy")
    before = pictured(path.parent / "copy", key)
    log = (path / "store.db-wal").read_bytes()
    used = len(log.rstrip(b"\0"))
    for at in range(40, used, used // 4):
        (path / "store.db-wal").write_bytes(log[:at] + flipped(log[at : at + 1]) + log[at + 1 :])
        report, after = repaired(path, key, before)
        assert any("acknowledged" in one for one in report.problems)
        late = {label for _, label in states(after)["a"]}
        assert {"late 0", "late 1", "late 2", "late 3", "late 4"} <= late


def test_ids_cover_records_so_what_follows_a_lost_one_gets_new_ones(sound, path, key):
    sql(path, "DELETE FROM record WHERE i = 4")
    report, after = repaired(path, key, sound[1])
    told = next(one for one in report.agents if one.name == "a")
    assert any("record(s) 4 to 4" in line for line in told.lost)
    assert any("'recovered-1'" in line for line in told.lost)
    assert states(after) == states(sound[1])
    whole, main = sound[1]["a"]["branches"]["main"], after["a"]["branches"]["main"]
    assert main[1] == 5, "it ends with the last checkpoint that speaks of none that is lost"
    assert [body for *_, body in main[3]] == [b"" if i == 4 else body for i, _, _, body in whole[3]]
    beyond = after["a"]["branches"]["recovered-1"]
    assert beyond[1] == whole[1]
    assert after["a"]["states"][beyond[0]][1] == sound[1]["a"]["states"][whole[0]][1]
    assert after["a"]["tags"]["early"] == sound[1]["a"]["tags"]["early"]
    assert after["a"]["states"][after["a"]["tags"]["late"]][2] == "c9"


def test_a_record_that_has_lost_its_content_costs_nothing_else(sound, path, key):
    ((r, body),) = sql(path, "SELECT r, body FROM record WHERE i = 4")
    sql(path, "UPDATE record SET body = ? WHERE r = ?", flipped(body), r)
    report, after = repaired(path, key, sound[1])
    assert any(f"what record {r} " in line for line in report.missing)
    assert {name: one["states"] for name, one in after.items()} == {
        name: one["states"] for name, one in sound[1].items()
    }
    assert [one[3] for one in after["a"]["branches"]["main"][3]][3] == b""


def test_lost_metadata_costs_no_checkpoint(sound, path, key):
    ((first,),) = sql(path, "SELECT min(k) FROM node")
    sql(path, "DELETE FROM node WHERE k = ?", first)
    report, after = repaired(path, key, sound[1])
    assert not report.whole
    assert not any(one.lost_checkpoints for one in report.agents)
    assert any("metadata" in line for line in report.agents[0].lost)
    assert after["a"]["states"] == sound[1]["a"]["states"]
    repair(path, path.parent / "new", key=key)
    with opened(path.parent / "new", key=key) as store:
        assert store.verify().checked["lost_metadata_records"]
        assert "lost" in store.agent("a", readonly=True).at("c0").metadata


def test_what_was_forgotten_stays_so_and_so_do_the_links_over_it(path, key):
    with opened(path, readonly=False, key=key) as store:
        store.remove("twin")
        row = store._agent_row("a")
        numbers = sorted(Graph(store._db.view, row).numbers)
        store._forget(row, set(numbers[2:7] + numbers[15:19]))
        store.set_policy(Policy(last=10))
        shallow = store._db.view.shallow()
    before = pictured(path, key)
    data = bytearray((path / "store.db").read_bytes())
    data[:4096] = bytes(4096)  # rows that were deleted may still lie in pages
    for broken in (False, True):
        if broken:
            (path / "store.db").write_bytes(data)
        report = repair(path, path.parent / f"new {broken}", key=key)
        assert report.whole or broken
        with opened(path.parent / f"new {broken}", key=key) as store:
            assert store._db.view.shallow() == shallow
            assert store.policies() == {None: Policy(last=10)}
        assert pictured(path.parent / f"new {broken}", key) == before


def test_a_pack_that_is_gone_costs_the_checkpoints_that_need_it(sound, path, key):
    pack = max((path / "packs").iterdir(), key=lambda file: file.stat().st_mtime)
    pack.unlink()
    report, after = repaired(path, key, sound[1])
    assert any("1 of 1 chunk(s) are lost" in one for one in report.problems)
    assert after["a"]["branches"] == sound[1]["a"]["branches"], "it is needed only by what a rollback left"
    assert {"c14", "d1"} <= {label for _, label in states(after)["a"]}


def test_a_place_for_packs_that_cannot_be_reached_ends_it(tmp_path, key):
    path, cold = tmp_path / "store", tmp_path / "cold"
    with opened(path, readonly=False, key=key) as store:
        agent = store.agent("a")
        agent.state["bulk"] = os.urandom(300_000)
        agent.checkpoint("bulk")
        agent.state["bulk"] = b""
        agent.checkpoint("small")
        store.tier(cold)
    assert list(cold.rglob("*.pack"))
    report = repair(path, tmp_path / "new", key=key)
    assert report.whole
    assert list((tmp_path / "new" / "packs").iterdir())
    cold.rename(tmp_path / "away")
    with pytest.raises(ColdPlaceMissing):
        repair(path, tmp_path / "other", key=key)
    assert not (tmp_path / "other").exists()


def test_an_encrypted_store_needs_its_key_and_stays_encrypted(path, key):
    if not key:
        return
    for wrong, error in ((False, KeyNeeded), ("0" * 64, WrongKey)):
        with pytest.raises(error):
            repair(path, path.parent / "new", key=wrong)
    data = bytearray((path / "store.db").read_bytes())
    data[:4096] = bytes(4096)
    (path / "store.db").write_bytes(data)
    repair(path, path.parent / "new", key=key)
    assert not any(b"hello" in file.read_bytes() for file in (path.parent / "new").rglob("*") if file.is_file())


@pytest.mark.usefixtures("remembered")
def test_an_older_copy_is_never_called_whole(tmp_path, key, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    path = tmp_path / "store"
    with opened(path, readonly=False, key=key) as store:
        store.agent("a").checkpoint("one")
    shutil.copytree(path, tmp_path / "old")
    with opened(path, readonly=False, key=key) as store:
        store.agent("a").checkpoint("two")
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "old", path)
    (tmp_path / "elsewhere").mkdir()
    report = repair(path, tmp_path / "new", key=key)
    assert "checkpoints 2 to 2" in report.older
    assert not report.whole


def test_bad_places_are_refused(path, tmp_path, key):
    with pytest.raises(NotAStore):
        repair(tmp_path / "nowhere", key=key)
    with pytest.raises(BadOption, match="exists"):
        repair(path, tmp_path, key=key)
    with pytest.raises(BadOption, match="inside"):
        repair(path, path / "packs" / "new", key=key)
