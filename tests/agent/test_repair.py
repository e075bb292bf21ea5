"""Repair: whatever is damaged, the original stays as it is, and what is intact is in the new store, proven."""

from __future__ import annotations

import hashlib
import random
import shutil

import apsw
import pytest

import holdfast
from holdfast import errors
from holdfast.agent.manifest import Manifest
from holdfast.store import pages, rescue, schema
from tests.faults import rich
from tests.store.test_tiering import filled


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
    late = {label for *_, label in after["second"]["states"].values()}
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


@pytest.mark.parametrize(
    "table", ["agent", "branch", "tag", "event", "line", "seal", "node", "metadata", "pack", "chunk"]
)
def test_any_table_may_be_empty(damaged, tmp_path, table, sound):
    connection = apsw.Connection(str(damaged / "store.db"))
    connection.execute(f"DELETE FROM {table}")
    connection.execute("VACUUM")
    connection.close()
    report = repaired(damaged, tmp_path)
    assert not report.whole or report.problems
    before, after = pictured(sound), pictured(tmp_path / "new")
    if table in {"pack", "chunk"}:
        assert report.whole
        assert after == before
    if table in {"agent", "branch", "tag", "event", "line", "metadata"}:
        ids = {identity for one in after.values() for identity in one["states"]}
        assert {identity for one in before.values() for identity in one["states"]} - ids == set() or table == "line"


def tables(path):
    """The number of each page of the catalog, and the table or index that it is of, where it is of one."""
    connection = apsw.Connection(str(path / "store.db"))
    named = {page: (name, kind) for name, page, kind in connection.execute("SELECT name, pageno, pagetype FROM dbstat")}
    ((count,),) = connection.execute("PRAGMA page_count")
    connection.close()
    return [(page, *named.get(page, ("", ""))) for page in range(1, count + 1)]


def touched(path, page, table, kind):
    """Numbers of checkpoints whose states, or whose records, need what is on that page."""
    connection = apsw.Connection(str(path / "store.db"))
    rows = list(connection.execute("SELECT n, b, parent, base, manifest FROM checkpoint ORDER BY n"))
    connection.close()
    if kind != "leaf" or table not in {"checkpoint", "tail", "effect", "node", "seal", "line"}:
        return set()
    images = pages._Images(path / "store.db", path / "store.db-wal")
    found = [rescue._as_row(one) for one in pages._records(images, 0, images._in_file(page))]
    images.close()
    assert found
    if table in {"effect", "line"}:
        return {n for n, *_, manifest in rows if Manifest.decode(manifest).effects[0]}
    sealed = {n for n, _, _, base, _ in rows if n == base}
    if table in {"node", "seal"}:  # whoever rests on something sealed, or has its values there
        hit = {n for n, b, _, base, _ in rows if base or any(b == other for m, other, *_ in rows if m in sealed)}
    else:
        hit = {row[0] for row in found}
    for n, _, parent, _, _ in rows:  # parents come first
        if parent in hit and n not in sealed:
            hit.add(n)
    return hit


def test_a_lost_page_costs_only_what_it_held(sound, tmp_path, rounds):
    """Each page in turn is overwritten: here one of each table, in long runs all of them."""
    before = pictured(sound)
    numbers = {}
    with holdfast.open(sound, readonly=True, inert=True) as store:
        numbers = {row.id.hex(): row.n for row in store._catalog.checkpoints()}
    found = tables(sound)
    one_of_each = {(table, kind): page for page, table, kind in found if table in schema.TABLE_NAMES}
    chosen = [one for one in found if rounds(1, 2) > 1 or one[0] in one_of_each.values()]
    path = tmp_path / "damaged"
    shutil.copytree(sound, path)
    content_ = (sound / "store.db").read_bytes()
    wrong = []
    for page, table, kind in chosen:
        start = (page - 1) * 4096
        (path / "store.db").write_bytes(content_[:start] + bytes(range(256)) * 16 + content_[start + 4096 :])
        report = holdfast.repair(path, tmp_path / "new")
        after = pictured(tmp_path / "new")
        may_go = touched(sound, page, table, kind)
        said = {one.id for agent in report.agents for one in agent.lost_checkpoints}
        for name, one in before.items():
            kept = after[name]["states"] if name in after else {}
            gone = {identity for identity in one["states"] if kept.get(identity) != one["states"][identity]}
            too_many = {numbers[identity] for identity in gone | (said & numbers.keys())} - may_go
            if too_many or (report.whole and after.get(name) != one):
                wrong.append((page, table, kind, name, too_many))
        shutil.rmtree(tmp_path / "new")
    assert not wrong


def test_metadata_that_is_lost_is_marked_and_comes_back_when_it_turns_up(sound, damaged, tmp_path):
    connection = apsw.Connection(str(damaged / "store.db"))
    connection.execute("DELETE FROM metadata")
    connection.execute("VACUUM")
    connection.close()
    report = repaired(damaged, tmp_path)
    before, after = pictured(sound), pictured(tmp_path / "new")
    assert not report.whole
    assert all(any("metadata" in line for line in agent.lost) for agent in report.agents if agent.checkpoints)
    assert not any(agent.lost_checkpoints for agent in report.agents)
    for name, one in before.items():
        assert {**after[name], "metadata": {}} == {**one, "metadata": {}}
        assert all(list(found) == ["lost"] for found in after[name]["metadata"].values())
    # It travels, and a second repair does not take it for more than it is.
    with holdfast.open(tmp_path / "new") as store, holdfast.open(tmp_path / "copy") as copy:
        store.push(copy)
        assert copy.verify().checked["lost_metadata_records"] == store.verify().checked["lost_metadata_records"] > 0
    assert not holdfast.repair(tmp_path / "copy").whole
    assert pictured(tmp_path / "copy") == after
    # Whoever writes with the same metadata brings it back: the manifests always said which it is.
    with holdfast.open(tmp_path / "new", types=rich.TYPES) as store, store.agent("payer") as agent:
        described = agent.at("paid 0").id
        agent.checkpoint("again")
        assert agent.at(f"id:{described}").metadata == before["payer"]["metadata"][described]


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
    connection = apsw.Connection(str(path / "store.db"))
    connection.execute(f"DELETE FROM {table}")
    connection.execute("VACUUM")
    connection.close()
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
                with pytest.raises(errors.StoreBusy), store._catalog.forgetting(0.0):
                    pass

        report = holdfast.repair(path, tmp_path / "new", progress=meanwhile)
        assert (report.whole, report.missing, report.older) == (True, [], "")
        assert agent.head.label == "meanwhile"
        store.remove("b")


@pytest.mark.usefixtures("remembered")
def test_an_older_copy_is_called_one(tmp_path):
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
    connection = apsw.Connection(str(path / "store.db"))
    connection.execute("DELETE FROM branch")
    connection.execute("VACUUM")
    connection.close()
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
        expected = store._catalog.fact("policy")
    assert repaired(path, tmp_path).whole
    with holdfast.open(tmp_path / "new") as store:
        assert store._catalog.fact("policy") == expected


def test_without_its_catalog_a_store_is_damaged_and_nothing_can_be_saved(damaged):
    (damaged / "store.db").unlink()
    with pytest.raises(errors.Damaged, match=r"store\.db is missing") as caught:
        holdfast.repair(damaged)
    assert "packs" in caught.value.hint


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


@pytest.mark.parametrize("which", range(4))
def test_a_pack_that_is_gone_costs_the_checkpoints_that_need_it_and_no_other(tmp_path, which):
    path = tmp_path / "store"
    before = filled(path)
    with holdfast.open(path) as store:
        store._catalog._packs.path(store._catalog.pack_rows()[which].uuid).unlink()
    report = repaired(path, tmp_path)
    lost = {one.label for one in report.agents[0].lost_checkpoints}
    assert f"w{which}" in lost
    assert len(lost) <= 2  # one may rest on another
    assert any("1 of 1 chunk(s) are lost" in problem for problem in report.problems)
    with holdfast.open(tmp_path / "new") as store:
        assert store.verify().ok
        found = {one.label: holdfast.plain(one.state) for one in store.agent("a", readonly=True).log(all=True)}
        for label in before.keys() - lost:
            assert found[label] == before[label]


def test_bad_places_are_refused(tmp_path, damaged):
    with pytest.raises(errors.NotAStore):
        holdfast.repair(tmp_path / "nowhere")
    with pytest.raises(errors.BadOption, match="exists"):
        holdfast.repair(damaged, tmp_path)
    with pytest.raises(errors.BadOption, match="inside"):
        holdfast.repair(damaged, damaged / "packs" / "new")
