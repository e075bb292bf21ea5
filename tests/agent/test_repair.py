"""Repair: whatever is damaged, the original stays as it is, and what is intact is in the new store, proven."""

from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
from contextlib import closing

import pytest

import holdfast
from holdfast import errors
from tests.agent.damage import flipped, rows, spoil
from tests.faults import rich


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store with every kind of record, runs and their effects among them."""
    path = tmp_path_factory.mktemp("sound") / "store"
    rich.build(path)
    pay = holdfast.tool(effect="write")(lambda amount: {"paid": amount})
    with rich.small_limits(), holdfast.open(path, types=rich.TYPES) as store:
        agent = store.agent("payer")

        def work(agent):
            for number in range(6):
                agent.state["paid"] = pay(number)
                agent.checkpoint(f"paid {number}")

        agent.run(work)
        store.clone("payer", "twin")
    return path


@pytest.fixture(autouse=True)
def _small():
    """Where nodes end is part of a state's digest, so the limits are those that the store was made with."""
    with rich.small_limits():
        yield


@pytest.fixture
def damaged(sound, tmp_path):
    path = tmp_path / "damaged"
    shutil.copytree(sound, path)
    return path


def pictured(path):
    """Every checkpoint and its metadata, names, and the effects of every agent, by what identifies them."""
    found = {}
    with holdfast.open(path, types=rich.TYPES, inert=True, readonly=True) as store:
        for info in store.agents():
            agent = store.agent(info.name, readonly=True)
            states = {}
            for checkpoint in agent.log(all=True):
                states[checkpoint.id] = (checkpoint.digest, repr(holdfast.plain(checkpoint.state)), checkpoint.label)
            found[info.name] = {
                "states": states,
                "heads": {
                    name: store.agent(info.name, branch=name, readonly=True).head.id
                    for name in agent.branches()
                    if store.agent(info.name, branch=name, readonly=True).head
                },
                "tags": {name: at.id for name, at in agent.tags().items()},
                "metadata": {checkpoint.id: checkpoint.metadata for checkpoint in agent.log(all=True)},
                "effects": [(one.tool, repr(one.args), one.condition) for one in agent.effects()],
            }
    return found


def content(path):
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.endswith("-shm")
    }


def repaired(path, tmp_path, **options):
    before = content(path)
    dry = holdfast.repair(path, **options)
    assert dry.to is None
    report = holdfast.repair(path, tmp_path / "new", **options)
    assert content(path) == before
    assert [one.name for one in tmp_path.iterdir() if "repair" in one.name] == []
    assert dry.to_json()["agents"] == report.to_json()["agents"]
    with holdfast.open(tmp_path / "new", inert=True, readonly=True, key=options.get("key")) as store:
        proof = store.verify()
        assert proof.ok, str(proof)
    return report


def test_of_a_sound_store_nothing_is_lost(sound, damaged, tmp_path):
    report = repaired(damaged, tmp_path)
    assert report.whole
    assert report.problems == []
    assert pictured(tmp_path / "new") == pictured(sound)


def test_one_damaged_checkpoint_costs_what_rests_on_it(sound, damaged, tmp_path):
    with holdfast.open(damaged, types=rich.TYPES, readonly=True) as store:
        line = store.agent("first@example.com", readonly=True).log(all=True)
        n = next(one._point.n for one in line if one._point.row.data and one.depth > 1)
    ((data,),) = rows(damaged, "SELECT data FROM loose WHERE n = ?", n)
    spoil(damaged, "UPDATE loose SET data = ? WHERE n = ?", flipped(data), n)
    report = repaired(damaged, tmp_path)
    assert not report.whole
    before, after = pictured(sound), pictured(tmp_path / "new")
    for name, one in after.items():
        for identity, state in one["states"].items():
            if identity in before[name]["states"]:
                assert state == before[name]["states"][identity]
    (first,) = [agent for agent in report.agents if agent.name == "first@example.com"]
    kept = set(after["first@example.com"]["states"])
    assert set(before["first@example.com"]["states"]) - kept
    # What is sealed after the damage stands alone and is kept.
    assert len(kept) > len(before["first@example.com"]["states"]) // 2
    assert after["second"] == before["second"]
    assert after["payer"] == before["payer"]
    assert first.checkpoints >= len(kept)


def test_a_lost_effect_is_said_and_the_state_is_kept(sound, damaged, tmp_path):
    ((most,),) = rows(damaged, "SELECT max(r) FROM record")
    spoil(damaged, "DELETE FROM record WHERE r = ?", most // 2)
    report = repaired(damaged, tmp_path)
    (payer,) = [agent for agent in report.agents if agent.name == "payer"]
    assert any("record" in line for line in payer.lost)
    with holdfast.open(tmp_path / "new", readonly=True) as store:
        agent = store.agent("payer", branch="recovered-1", readonly=True)
        assert agent.state["paid"] == {"paid": 5}


@pytest.mark.parametrize("table", ["agent", "branch", "tag", "log", "segment", "node", "shallow", "pack", "chunk"])
def test_any_table_may_be_empty(damaged, tmp_path, table, sound):
    empty(damaged, table)
    report = repaired(damaged, tmp_path)
    before, after = pictured(sound), pictured(tmp_path / "new")
    if table in {"pack", "chunk"}:
        assert report.whole
        assert after == before
    if table in {"agent", "branch", "tag", "log"}:
        ids = {identity for one in after.values() for identity in one["states"]}
        assert {identity for one in before.values() for identity in one["states"]} == ids


def empty(path, table):
    spoil(path, f"DELETE FROM {table}")
    with closing(sqlite3.connect(path / "store.db", isolation_level=None)) as connection:
        connection.execute("VACUUM")  # or what was deleted is found in the pages


@pytest.mark.parametrize(("table", "key", "large"), [("pack", False, 8 * 2**20 + 7), ("chunk", "5e" * 32, 4096)])
def test_bulk_values_are_found_in_their_packs(tmp_path, table, key, large):
    path = tmp_path / "store"
    sizes = [300_000, 4096 * 100, large, 300_000]
    with holdfast.open(path, key=key) as store, store.agent("a") as agent:
        for number, size in enumerate(sizes):
            agent.state[f"v{number % 2}"] = bytes([number]) * size
            agent.state[f"w{number}"] = [random.Random(number).randbytes(size)]
            agent.checkpoint(f"c{number}")
        expected = {one.id: one.digest for one in agent.log()}
    empty(path, table)
    report = repaired(path, tmp_path, key=key)
    assert report.whole
    assert any("found in the packs" in problem for problem in report.problems)
    with holdfast.open(tmp_path / "new", key=key, readonly=True) as store:
        agent = store.agent("a", readonly=True)
        assert {one.id: one.digest for one in agent.log()} == expected
        assert agent.state["w3"] == [random.Random(3).randbytes(300_000)]


def test_what_became_of_a_branch_is_said_once(damaged, tmp_path):
    """Also where leaving something out shows that more cannot stay."""
    catalog = damaged / "store.db"
    content_ = catalog.read_bytes()
    catalog.write_bytes(content_[: len(content_) // 4096 * 2 // 3 * 4096])
    for agent in repaired(damaged, tmp_path).agents:
        ends = [line.split(":")[0] for line in agent.lost if "ends at" in line or "empty now" in line]
        assert len(ends) == len(set(ends))


@pytest.mark.usefixtures("remembered")
def test_what_is_written_meanwhile_is_not_called_lost(tmp_path):
    """Nor is a store in use called an older copy; and nobody takes its packs away meanwhile."""
    path = tmp_path / "store"
    with holdfast.open(path) as store, store.agent("a") as agent:
        agent.state["n"] = 0
        agent.checkpoint("before")
        store.clone("a", "b")

        def meanwhile(what, done, _total):
            if (what, done) == ("reading the damaged catalog", 1):
                agent.state["n"] += 1
                agent.checkpoint("meanwhile")
                with store._db.engine.sweeping() as alone:
                    assert not alone

        report = holdfast.repair(path, tmp_path / "new", progress=meanwhile)
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
    assert not holdfast.repair(path).older
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "backup", path)
    report = holdfast.repair(path)
    assert not report.whole
    assert "checkpoints 2 to 2" in report.older
    with pytest.raises(errors.StoreWentBack):
        holdfast.open(path)  # looking did not accept it
    holdfast.open(path, accept_older=True).close()
    assert holdfast.repair(path).whole


def test_a_branch_whose_row_is_lost_stands_where_it_was_rolled_back_to(tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path) as store, store.agent("a") as agent:
        for number in range(4):
            agent.state["n"] = number
            agent.checkpoint(f"c{number}")
        agent.rollback("c1")
    empty(path, "branch")
    assert repaired(path, tmp_path).whole
    with holdfast.open(tmp_path / "new", readonly=True) as store:
        agent = store.agent("a", readonly=True)
        assert agent.head.label == "c1"
        assert len(list(agent.log(all=True))) == 4


def test_a_policy_is_kept(tmp_path):
    path = tmp_path / "store"
    with holdfast.open(path) as store:
        store.agent("a").checkpoint("one")
        store.set_policy(holdfast.Policy(last=3))
        store.set_policy(holdfast.Policy(last=7), "a")
        expected = store.policies()
    assert repaired(path, tmp_path).whole
    with holdfast.open(tmp_path / "new") as store:
        assert store.policies() == expected


def test_without_its_catalog_a_store_is_damaged_and_nothing_can_be_saved(damaged):
    (damaged / "store.db").unlink()
    with pytest.raises(errors.Damaged, match=r"store\.db is missing") as caught:
        holdfast.repair(damaged)
    assert "packs" in caught.value.hint
