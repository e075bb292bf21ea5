"""Repair: whatever is damaged, the original stays as it is, and what is intact is in the new store, proven."""

from __future__ import annotations

import hashlib
import random
import shutil

import apsw
import pytest

import holdfast
from holdfast import errors
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
    """State, label and metadata of every checkpoint, and the effects of every agent, by what identifies them."""
    found = {}
    with holdfast.open(path, types=rich.TYPES, inert=True, readonly=True) as store:
        for info in store.agents():
            agent = store.agent(info.name, readonly=True)
            states = {}
            for checkpoint in agent.log(all=True):
                states[checkpoint.id] = (repr(holdfast.plain(checkpoint.state)), checkpoint.label)
            found[info.name] = {
                "states": states,
                "heads": {
                    name: store.agent(info.name, branch=name, readonly=True).head.id
                    for name in agent.branches()
                    if store.agent(info.name, branch=name, readonly=True).head
                },
                "tags": {name: at.id for name, at in agent.tags().items()},
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
    connection = apsw.Connection(str(damaged / "store.db"))
    connection.execute("UPDATE checkpoint SET operations = x'90' WHERE n = 4")
    connection.close()
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


def test_works_when_sqlite_calls_the_file_malformed(sound, damaged, tmp_path):
    """The schema's page and the root pages of all trees are gone; rows are found in the bare pages."""
    catalog = damaged / "store.db"
    pages = bytearray(catalog.read_bytes())
    pages[:4096] = bytes(4096)
    for start in range(0, len(pages), 4096):
        if pages[start] in {2, 5}:  # inner pages
            pages[start : start + 4096] = bytes(4096)
    catalog.write_bytes(pages)
    with pytest.raises(errors.HoldfastError):
        holdfast.open(damaged)
    report = repaired(damaged, tmp_path)
    assert report.problems
    before, after = pictured(sound), pictured(tmp_path / "new")
    # The first page holds the schema alone, and rows that stood in inner pages of indexes are few.
    assert before.keys() == after.keys()
    for name, one in after.items():
        for identity in one["states"].keys() & before[name]["states"].keys():
            assert one["states"][identity] == before[name]["states"][identity]
    assert sum(len(one["states"]) for one in after.values()) >= 0.9 * sum(len(one["states"]) for one in before.values())


def test_commits_that_a_broken_log_hides_are_found(tmp_path, sound):
    path = tmp_path / "killed"
    shutil.copytree(sound, path)
    rich.build_killed(path)
    expected = pictured_copy(path, tmp_path / "copy")
    log = path / "store.db-wal"
    content_ = bytearray(log.read_bytes())
    content_[len(content_) // 2] ^= 1
    log.write_bytes(content_)
    with pytest.raises(errors.Damaged):
        holdfast.open(path)
    report = repaired(path, tmp_path)
    after = pictured(tmp_path / "new")
    assert report.problems or not report.whole
    late = {label for _, label in after["second"]["states"].values()}
    assert {"late 0", "late 3"} <= late
    for identity in after["second"]["states"].keys() & expected["second"]["states"].keys():
        assert after["second"]["states"][identity] == expected["second"]["states"][identity]


def pictured_copy(path, copy):
    shutil.copytree(path, copy)
    return pictured(copy)


def test_a_lost_effect_is_said_and_the_state_is_kept(sound, damaged, tmp_path):
    connection = apsw.Connection(str(damaged / "store.db"))
    ((most,),) = connection.execute("SELECT max(r) FROM effect")
    connection.execute("DELETE FROM effect WHERE r = ?", (most // 2,))
    connection.close()
    report = repaired(damaged, tmp_path)
    (payer,) = [agent for agent in report.agents if agent.name == "payer"]
    assert any("record" in line for line in payer.lost)
    assert any("effect" in line for line in report.missing)
    with holdfast.open(tmp_path / "new", readonly=True) as store:
        agent = store.agent("payer", branch="recovered-1", readonly=True)
        assert agent.state["paid"] == {"paid": 5}


@pytest.mark.parametrize("table", ["agent", "branch", "tag", "event", "line", "seal", "node", "metadata", "pack"])
def test_any_table_may_be_empty(damaged, tmp_path, table, sound):
    connection = apsw.Connection(str(damaged / "store.db"))
    connection.execute(f"DELETE FROM {table}")
    connection.execute("VACUUM")
    connection.close()
    report = repaired(damaged, tmp_path)
    assert not report.whole or report.problems
    before, after = pictured(sound), pictured(tmp_path / "new")
    if table in {"agent", "branch", "tag", "event", "line"}:
        ids = {identity for one in after.values() for identity in one["states"]}
        assert {identity for one in before.values() for identity in one["states"]} - ids == set() or table == "line"


def test_flipped_bytes_anywhere(sound, tmp_path, rounds):
    """The new store is always proven, and what is kept is what was written."""
    before = {identity: one for agent in pictured(sound).values() for identity, one in agent["states"].items()}
    size = (sound / "store.db").stat().st_size
    for seed in range(rounds(12, 3_000)):
        source = random.Random(seed)
        path = tmp_path / f"damaged-{seed}"
        shutil.copytree(sound, path)
        pages = bytearray((path / "store.db").read_bytes())
        for _ in range(source.choice((1, 3, 30))):
            at = source.randrange(size)
            pages[at : at + source.choice((1, 1, 64, 4096))] = bytes([source.randrange(256)])
        (path / "store.db").write_bytes(pages[:size])
        repaired(path, tmp_path)
        for agent in pictured(tmp_path / "new").values():
            for identity, state in agent["states"].items():
                if identity in before:
                    assert state == before[identity]
        shutil.rmtree(tmp_path / "new")
        shutil.rmtree(path)


def test_an_encrypted_store_is_repaired_into_an_encrypted_one(tmp_path):
    path = tmp_path / "secret"
    with holdfast.open(path, key="correct horse") as store:
        agent = store.agent("a")
        for number in range(8):
            agent.state["n"] = f"canary {number}"
            agent.checkpoint(f"label {number}")
    connection = apsw.Connection(str(path / "store.db"))
    connection.execute("UPDATE checkpoint SET operations = zeroblob(20) WHERE n = 7")
    connection.close()
    with pytest.raises(errors.KeyNeeded):
        holdfast.repair(path, key=False)
    report = repaired(path, tmp_path, key="correct horse")
    assert [one.label for one in report.agents[0].lost_checkpoints][:1] != []
    with holdfast.open(tmp_path / "new", key="correct horse", readonly=True) as store:
        assert store.agent("a", readonly=True).at("label 5").state["n"] == "canary 5"
    assert not any(b"canary" in file.read_bytes() for file in (tmp_path / "new").rglob("*") if file.is_file())


def test_bad_places_are_refused(tmp_path, damaged):
    with pytest.raises(errors.NotAStore):
        holdfast.repair(tmp_path / "nowhere")
    with pytest.raises(errors.BadOption, match="exists"):
        holdfast.repair(damaged, tmp_path)
