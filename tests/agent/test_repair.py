"""Repair: whatever is damaged, the original stays as it is, and what is intact is in the new store, proven."""

from __future__ import annotations

import hashlib
import os
import random
import shutil

import pytest

import holdfast
from holdfast import Policy, repair
from holdfast.agent.graph import Graph
from holdfast.errors import (
    BadOption,
    ColdPlaceMissing,
    Damaged,
    KeyNeeded,
    NotAStore,
    NotEncrypted,
    StoreWentBack,
    WrongKey,
)
from tests.agent.damage import (
    KEY,
    build,
    delete,
    every_row,
    flipped,
    opened,
    pictured,
    rows,
    small_limits,
    spoil,
    spoil_payload,
)
from tests.conftest import SOAK
from tests.faults import rich
from tests.lives import die, dies
from tests.memory import memory

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
        assert not [one for one in path.parent.iterdir() if "holdfast-scratch" in one.name]
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


@pytest.mark.slow
def test_a_lost_page_costs_only_what_it_held(sound, path, key):
    """Each page in turn is overwritten."""
    held = {
        page: (name, table)
        for name, table, page in rows(
            path, "SELECT d.name, s.tbl_name, d.pageno FROM dbstat d LEFT JOIN sqlite_schema s ON s.name = d.name"
        )
    }
    data = (path / "store.db").read_bytes()
    one_of_each = {name: page for page, (name, _) in held.items()}
    for page in range(1, len(data) // 4096 + 1):
        name, table = held.get(page, ("", ""))
        if key and name == "slot":
            continue  # without its list of keys nobody can read an encrypted store
        if not SOAK and (page not in one_of_each.values() or page % 2 == bool(key)):
            continue
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
    found = [one for one in every_row(path) if not (key and one[0] == "slot")]
    chosen = found if SOAK else random.Random(f"{key}").sample(found, 12)
    original = (path / "store.db").read_bytes()
    for table, keys, row in chosen:
        delete(path, table, keys, row)
        spoil(path, "VACUUM")  # nothing of it is left in a page
        _, after = repaired(path, key, sound[1], log=table == "log")
        if table in DERIVED:
            assert after == sound[1], (table, row)
        if table == "record":
            assert states(after) == states(sound[1])
        for name in ("store.db-wal", "store.db-shm"):
            (path / name).unlink(missing_ok=True)
        (path / "store.db").write_bytes(original)


def test_any_table_may_be_empty(sound, path, key):
    original = (path / "store.db").read_bytes()
    for table in ("agent", "branch", "tag", "validity", "shallow", "log", "segment", "node"):
        emptied(path, table)
        _, after = repaired(path, key, sound[1], log=table == "log")
        if table in DERIVED - {"agent"}:
            assert after == sound[1], table
        if table in {"agent", "log"}:
            ids = {id for one in after.values() for id in one["states"]}
            assert ids == {id for one in sound[1].values() for id in one["states"]}, table
        for name in ("store.db-wal", "store.db-shm"):
            (path / name).unlink(missing_ok=True)
        (path / "store.db").write_bytes(original)


def emptied(path, table):
    spoil(path, f"DELETE FROM {table}")
    spoil(path, "VACUUM")  # or what was deleted is found in the pages


def test_any_byte_may_be_flipped(sound, path, key):
    original = (path / "store.db").read_bytes()
    chosen = random.Random(f"{key}")
    for _ in range(3000 if SOAK else 8):
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


def test_one_damaged_checkpoint_costs_what_rests_on_it(sound, path, key):
    ((n,),) = rows(path, "SELECT head FROM branch WHERE b = 1")
    spoil_payload(path, n)
    report, after = repaired(path, key, sound[1])
    lost = {one.name: {gone.id for gone in one.lost_checkpoints} for one in report.agents}
    gone = {name: one["states"].keys() - after[name]["states"].keys() for name, one in sound[1].items()}
    assert gone == lost
    assert {name: len(ids) for name, ids in lost.items()} == {"a": 1, "twin": 2, "empty": 0}, "the copy went on from it"


def test_commits_that_a_broken_log_hides_are_found(path, key):
    def late():
        with opened(path, readonly=False, key=key) as store:
            agent = store.agent("a")
            for number in range(6):
                agent.state["log"].append(f"late {number}")
                agent.checkpoint(f"late {number}")
            store.agent("third").checkpoint("third")
            die()

    assert dies(late, 0)
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
    spoil(path, "DELETE FROM record WHERE i = 4")
    report, after = repaired(path, key, sound[1])
    told = next(one for one in report.agents if one.name == "a")
    assert any("record(s) 4 to 4" in line for line in told.lost)
    assert states(after) == states(sound[1])
    whole, main = sound[1]["a"]["branches"]["main"], after["a"]["branches"]["main"]
    assert main[1] == whole[1]
    assert [body for *_, body in main[3]] == [b"" if i == 4 else body for i, _, _, body in whole[3]]
    assert main[0] != whole[0], "it speaks of a record that is lost"
    assert after["a"]["states"][main[0]][1] == sound[1]["a"]["states"][whole[0]][1]
    assert whole[0] in {one.id for one in told.lost_checkpoints}
    assert after["a"]["tags"]["early"] == sound[1]["a"]["tags"]["early"]
    assert after["a"]["states"][after["a"]["tags"]["late"]][2] == "c9"


def test_a_record_that_has_lost_its_content_costs_nothing_else(sound, path, key):
    ((r, body),) = rows(path, "SELECT r, body FROM record WHERE i = 4")
    spoil(path, "UPDATE record SET body = ? WHERE r = ?", flipped(body), r)
    report, after = repaired(path, key, sound[1])
    assert any(f"what record {r} " in line for line in report.missing)
    assert {name: one["states"] for name, one in after.items()} == {
        name: one["states"] for name, one in sound[1].items()
    }
    assert [one[3] for one in after["a"]["branches"]["main"][3]][3] == b""


def test_lost_metadata_costs_no_checkpoint(sound, path, key):
    with opened(path, key=key) as store:
        described = store.agent("a", readonly=True).at("c0").metadata
    # What all checkpoints of one process share is longer than what is said of one alone.
    ((process,),) = rows(path, "SELECT k FROM node WHERE k <= 2 ORDER BY length(data) DESC LIMIT 1")
    spoil(path, "DELETE FROM node WHERE k = ?", process)
    report, after = repaired(path, key, sound[1])
    assert not report.whole
    assert not any(one.lost_checkpoints for one in report.agents)
    assert any("metadata" in line for line in report.agents[0].lost)
    assert after["a"]["states"] == sound[1]["a"]["states"]
    repair(path, path.parent / "new", key=key)
    with opened(path.parent / "new", key=key) as store:
        assert store.verify().checked["lost_metadata_records"]
        assert "lost" in store.agent("a", readonly=True).at("c0").metadata
        with opened(path.parent / "copy", readonly=False) as copy:  # it travels
            store.push(copy)
            assert copy.verify().checked["lost_metadata_records"] == store.verify().checked["lost_metadata_records"]
            assert "lost" in copy.agent("a", readonly=True).at("c0").metadata
    assert not repair(path.parent / "copy", key=False).whole, "a second one does not take it for more than it is"
    with opened(path.parent / "new", readonly=False, key=key) as store:
        agent = store.agent("a")
        agent.checkpoint("whoever writes with the same brings it back")
        assert agent.at("c0").metadata == described


def test_what_was_forgotten_stays_so_and_so_do_the_links_over_it(path, key):
    with opened(path, readonly=False, key=key) as store:
        store.remove("twin")
        row = store._agent_row("a")
        numbers = sorted(Graph(store._db.view, row).numbers)
        store._forget(row, set(numbers[2:7] + numbers[15:19]))
        store.set_policy(Policy(last=10))
        store.set_policy(Policy(last=7), "a")
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
            assert store.policies() == {None: Policy(last=10), "a": Policy(last=7)}
        assert pictured(path.parent / f"new {broken}", key) == before


@pytest.mark.parametrize(
    "tables",
    [["pack"], ["chunk"]],
)
def test_bulk_values_are_found_in_their_packs(path, key, tables):
    path = path.parent / "bulk"
    with opened(path, readonly=False, key=key) as store, store.agent("a") as agent:
        for number, size in enumerate([300_000, 4096 * 100, 8 * 2**20 + 7, 300_000]):
            agent.state[f"v{number % 2}"] = bytes([number]) * size
            agent.state[f"w{number}"] = [random.Random(number).randbytes(size)]
            agent.checkpoint(f"c{number}")
    before = pictured(path, key)
    for table in tables:
        emptied(path, table)
    report, after = repaired(path, key, before)
    assert report.whole
    assert any("found in the packs" in problem for problem in report.problems)
    assert after == before


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


def test_bad_places_are_refused(path, tmp_path, key):
    with pytest.raises(NotAStore):
        repair(tmp_path / "nowhere", key=key)
    with pytest.raises(BadOption, match="exists"):
        repair(path, tmp_path, key=key)
    with pytest.raises(BadOption, match="inside"):
        repair(path, path / "packs" / "new", key=key)
    (path / "store.db").unlink()
    with pytest.raises(Damaged, match=r"store\.db is missing") as caught:
        repair(path, key=key)
    assert "packs" in caught.value.hint


# -- stores with runs, in use, or older than they should be -----------------------------------------------------------


def test_of_a_store_with_runs_nothing_is_lost():
    with memory() as folder, rich.small_limits():
        path = folder / "store"
        rich.build(path)
        pictures = []
        for place in (path, folder / "new"):
            if place != path:
                assert repair(path, place).whole
            with holdfast.open(place, types=rich.TYPES, inert=True, readonly=True) as store:
                found = rich.export(store)["agents"]
                effects = {name: [repr(one) for one in store.agent(name, readonly=True).effects()] for name in found}
                pictures.append(({name: one["checkpoints"] for name, one in found.items()}, effects))
        assert pictures[0] == pictures[1]
        assert pictures[0][1]["actor"]


def test_what_became_of_a_branch_is_said_once(sound, path, key):
    """Also where leaving something out shows that more cannot stay."""
    data = (path / "store.db").read_bytes()
    for pages in range(2, len(data) // 4096, 5):
        (path / "store.db").write_bytes(data[: pages * 4096])
        try:
            report = repair(path, key=key)
        except (Damaged, KeyNeeded, NotAStore, NotEncrypted):  # without its list of keys nobody can read it
            continue
        for agent in report.agents:
            ends = [line.split(":")[0] for line in agent.lost if "ends at" in line or "empty now" in line]
            assert len(ends) == len(set(ends))


@pytest.mark.usefixtures("remembered")
def test_what_is_written_meanwhile_is_not_called_lost(tmp_path):
    """Nor is a store in use called an older copy; and nobody takes its packs away meanwhile."""
    path = tmp_path / "store"
    with holdfast.open(path) as store, store.agent("a") as agent:
        agent.state["n"] = 0
        agent.checkpoint("before")
        store.copy("a", "b")

        def meanwhile(what, done, _total):
            if (what, done) == ("reading the damaged catalog", 1):
                agent.state["n"] += 1
                agent.checkpoint("meanwhile")
                with store._db.engine.sweeping() as alone:
                    assert not alone

        report = repair(path, tmp_path / "new", progress=meanwhile)
        assert (report.whole, report.missing, report.older) == (True, [], "")
        assert agent.head.label == "meanwhile"
        store.remove("b")


@pytest.mark.usefixtures("remembered")
def test_an_older_copy_is_called_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/var/tmp/none")  # what lies there is remembered by nobody
    path = tmp_path / "store"
    with holdfast.open(path) as store, store.agent("a") as agent:
        agent.checkpoint("one")
    shutil.copytree(path, tmp_path / "backup")
    with holdfast.open(path) as store, store.agent("a") as agent:
        agent.checkpoint("two")
    assert not repair(path).older
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    report = repair(path, tmp_path / "new")
    assert not report.whole
    assert "checkpoints 2 to 2" in report.older
    with pytest.raises(StoreWentBack):
        holdfast.open(path)  # looking did not accept it
    holdfast.open(path, trust_older=True).close()
    assert repair(path).whole


def test_a_branch_whose_row_is_lost_stands_where_it_was_rolled_back_to(tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path) as store, store.agent("a") as agent:
        for number in range(4):
            agent.state["n"] = number
            agent.checkpoint(f"c{number}")
        agent.rollback("c1")
    emptied(path, "branch")
    assert repair(path, tmp_path / "new").whole
    with holdfast.open(tmp_path / "new", readonly=True) as store:
        agent = store.agent("a", readonly=True)
        assert agent.head.label == "c1"
        assert len(list(agent.log(all=True))) == 4
