"""Each defect that a campaign has found, as a case of its own."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import uuid
from contextlib import suppress

import pytest
import zstandard
from ormsgpack import packb, unpackb

import holdfast
from holdfast import Policy
from holdfast.errors import Damaged, DiskFull, HoldfastError, StoreFailed, StorePoisoned
from holdfast.store import files
from holdfast.store.cipher import PLAIN
from holdfast.store.manifest import Manifest
from holdfast.store.objects import Folder
from holdfast.store.packs import ALIGN_BYTES, MAGIC, Packs, file_name
from holdfast.store.rows import Place, chunk_digest
from holdfast.store.sqlite import Sqlite
from holdfast.store.tables import TABLES
from holdfast.store.witness import witness_report
from tests.conftest import unsaved
from tests.faults import rich
from tests.faults.calls import CHANGES, ShortWrite
from tests.faults.damage import sql
from tests.faults.disk import Disk
from tests.faults.isolated import Died, isolated
from tests.faults.parsers import OTHERS, Told, explore_store, write_row
from tests.faults.rich import journey


@pytest.fixture
def disk(tmp_path):
    """A disk on which ``fail(what, where)`` makes calls fail; nothing fails before."""
    made = Disk(tmp_path, recording=False)

    def fail(what, where, error=None, *, once=False):
        def before(call):
            if call.what == what and where in call.site and made.before is not None:
                if once:
                    made.before = None
                raise error or OSError(errno.EIO, os.strerror(errno.EIO))

        made.before = before

    made.fail = fail
    with made.watching():
        yield made
        made.before = None


@pytest.mark.parametrize("what", ["open", "truncate", "write", "stat"])
def test_becoming_a_writer_on_a_failing_disk_is_an_error_of_ours(store_path, disk, what):
    with holdfast.open(store_path) as store:
        disk.fail(what, "leases.py")
        with pytest.raises(StoreFailed):
            store.agent("a")
        disk.fail(what, "leases.py", OSError(errno.ENOSPC, "full"))
        with pytest.raises(DiskFull):
            store.agent("a")
        disk.before = None
        store.agent("a").checkpoint("works")


def test_a_lock_file_that_cannot_be_removed_does_not_keep_the_branch(store_path, disk):
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("one")
        disk.fail("unlink", "leases.py")
        store.agent("a").close()
        agent = store.agent("a")
        agent.checkpoint("two")
        agent.close()
        store.agent("a").checkpoint("three")


def test_a_failing_close_loses_no_checkpoint(store_path, disk):
    with holdfast.open(store_path) as store:
        made = store.agent("a").checkpoint("one")
        disk.fail("close", "store/")
    disk.before = None
    with holdfast.open(store_path) as store:
        assert store.agent("a").head.id == made.id


def test_measuring_a_store_on_a_failing_disk_is_an_error_of_ours(store_path, disk):
    with holdfast.open(store_path) as store:
        for what in ("list", "stat"):
            disk.fail(what, "store/")
            with pytest.raises(StoreFailed):
                store.stats()
            disk.before = None


def test_a_disk_that_cannot_be_read_is_not_called_damage(store_path, disk):
    holdfast.open(store_path).close()
    disk.fail("read", "sqlite.py")
    with pytest.raises(StoreFailed):
        holdfast.open(store_path)


def test_a_path_that_cannot_be_looked_at_is_an_error_of_ours(store_path, disk):
    holdfast.open(store_path).close()
    for where in ("agent/store.py", "store/"):
        disk.fail("stat", where, once=True)
        holdfast.open(store_path).close()


def test_a_witness_that_was_written_in_part_is_completed(store_path, disk):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        disk.fail("write", "witness.py", ShortWrite(errno.ENOSPC, "half"), once=True)
        agent.checkpoint("one")
        assert witness_report(store_path).problems == ()


def test_a_pack_whose_frame_declares_more_than_it_may_is_damage(tmp_path):
    huge = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(2**20)))
    frame = huge[:4] + bytes([0b1110_0000]) + (2**45).to_bytes(8, "little") + huge[10:]  # eight bytes of content size
    pack = uuid.uuid4().bytes
    (tmp_path / file_name(pack)).write_bytes(MAGIC.ljust(ALIGN_BYTES, b"\0") + bytes(frame))
    view = Told(Place(pack, ALIGN_BYTES, 2**20, len(frame)))
    with pytest.raises(Damaged):
        list(Packs(PLAIN, Folder(tmp_path)).read(view, [chunk_digest(b"x")]))


@pytest.fixture
def copies(tmp_path):
    """Two stores that hold the same."""
    with holdfast.open(tmp_path / "store") as store, holdfast.open(tmp_path / "copy") as copy:
        agent = store.agent("a")
        agent.state["notes"] = ["one"]
        agent.checkpoint("one")
        agent.close()
        store.push(copy)
        yield store, copy


@pytest.mark.parametrize("what", ["read", "stat"])
def test_a_bundle_on_a_failing_disk_is_an_error_of_ours(copies, tmp_path, disk, what):
    store, copy = copies
    store.export(tmp_path / "bundle", ["a"])
    disk.fail(what, "bundle.py")
    with pytest.raises(StoreFailed):
        copy.import_bundle(tmp_path / "bundle")
    disk.fail("stat", "bundle.py")
    with pytest.raises(StoreFailed):
        store.export(tmp_path / "bundle", ["a"])
    disk.before = None
    copy.import_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("what", ["mkdir", "stat", "close"])
def test_a_scratch_place_on_a_failing_disk_is_no_surprise(copies, disk, what, tmp_path, monkeypatch):
    store, _ = copies
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where it turns to when there is no room beside the store
    disk.fail(what, "files.py" if what == "mkdir" else "move.py")
    if what == "mkdir":
        with pytest.raises(StoreFailed):
            store.verify_restore()
    else:
        assert store.verify_restore().ok  # what cannot be cleared away is waste, no more
    disk.before = None


@pytest.mark.parametrize("what", ["stat", "mkdir", "read", "open", "write", "statement"])
@pytest.mark.parametrize("where", ["repair.py", "salvage.py"])
def test_a_repair_on_a_failing_disk_is_an_error_of_ours(store_path, tmp_path, disk, what, where):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["bulk"] = os.urandom(200_000)
        agent.checkpoint("one")
    disk.fail(what, where)
    with suppress(StoreFailed):  # some lines of repair do not make each call
        holdfast.repair(store_path, tmp_path / "new")
    disk.before = None
    if not (tmp_path / "new").exists():
        holdfast.repair(store_path, tmp_path / "new")
    with holdfast.open(tmp_path / "new") as store:
        assert store.verify().ok


def test_a_repaired_store_is_durable_when_it_is_said_to_be_there(store_path, tmp_path):
    holdfast.open(store_path).close()
    disk = Disk(tmp_path)
    with disk.watching():
        holdfast.repair(store_path, tmp_path / "new")
    renamed = max(at for at, call in enumerate(disk.calls) if call.what == "rename" and call.new_name == "new")
    assert any(call.what == "syncdir" and call.name == "" for call in disk.calls[renamed:])


def test_a_history_that_cannot_be_read_is_not_called_damaged(store_path, disk):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["notes"] = ["one"]
        agent.checkpoint("one")
    with holdfast.open(store_path) as store:
        disk.fail("statement", "sqlite.py", OSError(errno.ENOSPC, "full"))
        with pytest.raises(DiskFull):
            store.agent("a", readonly=True).head.state["notes"]
        disk.before = None
        assert store.agent("a", readonly=True).head.state["notes"] == ["one"]


def test_a_forked_process_on_a_failing_disk_gets_an_error_of_ours(store_path, disk):
    store = holdfast.open(store_path)

    def child(_say):
        disk.fail("stat", "processes.py")
        with pytest.raises(StoreFailed):
            holdfast.open(store_path)
        disk.before = None
        holdfast.open(store_path).close()

    isolated(child)
    store.close()


@pytest.mark.usefixtures("remembered")
def test_an_older_store_that_cannot_be_remembered_as_accepted_is_an_error_of_ours(store_path, tmp_path, disk):
    holdfast.open(store_path).close()
    shutil.copytree(store_path, tmp_path / "old")
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("one")
    shutil.rmtree(store_path)
    (tmp_path / "old").rename(store_path)
    disk.fail("sync", "witness.py")
    with pytest.raises(StoreFailed):
        holdfast.open(store_path, readonly=True, trust_older=True)
    disk.before = None
    holdfast.open(store_path, readonly=True, trust_older=True).close()


def test_a_removal_that_was_interrupted_leaves_no_line_that_rests_on_nothing(store_path, disk):
    with holdfast.open(store_path) as store:
        store.agent("actor").run(journey.options(id="one"), 2)
        store.copy("actor", "twin")
        store.remove("actor")  # its records stay, for the twin inherits them
    deletions = 0
    while True:
        with holdfast.open(store_path) as store:
            seen = 0

            def before(call, most=deletions):
                nonlocal seen
                if call.what == "statement" and call.name.startswith("DELETE"):
                    seen += 1
                    if seen > most:
                        raise OSError(errno.EIO, "injected")

            disk.before = before
            with suppress(HoldfastError):
                store.remove("twin")
            disk.before = None
        with holdfast.open(store_path) as store:
            assert store.verify().ok
            if not store.agents():
                break
        deletions += 1
    assert deletions


def test_a_transaction_that_cannot_be_undone_either_is_an_error_of_ours(store_path, disk):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.checkpoint("one")

        def before(call):
            if call.what == "statement":
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        disk.before = before
        with pytest.raises((StoreFailed, StorePoisoned)):
            agent.checkpoint("two")
        with pytest.raises((StoreFailed, StorePoisoned)):
            agent.tag("t")
        disk.before = None
    with holdfast.open(store_path) as store:
        assert store.agent("a").head.label == "one"


def test_a_database_that_is_being_folded_is_not_taken_for_damaged(store_path, monkeypatch):
    """It is looked at without locks: with no log yet, then in the middle of a fold, then whole again."""
    holdfast.open(store_path).close()
    whole = (store_path / "store.db").read_bytes()
    (store_path / "store.db").write_bytes(bytes(100) + whole[100:])
    looks = []

    def size(path):
        looks.append(path.name)
        if len(looks) == 2:
            (store_path / "store.db").write_bytes(whole)
        return 0

    monkeypatch.setattr(files, "_size", size)
    holdfast.open(store_path).close()
    assert looks[:2] == ["store.db-wal"] * 2


BODIES = {
    "agent": [{}, {"created": "1"}, {"created": 2**60}, {"created": 1, "origins": 7}, ["created"], "created"],
    "branch": [
        {},
        {"created": 1, "from": "x"},
        {"created": [], "from": b""},
        {"created": 1, "origins": "x"},
        7,
        {"created": 1, "from": b"", "own": [1]},
    ],
    "log": [{}, {"what": 1}, {"what": "agent"}, {"what": "forget", "left": 1}, {"what": "branch", "b": "x"}, []],
}


@pytest.mark.parametrize("table", BODIES)
def test_a_body_of_another_shape_with_a_sum_that_fits_is_damage_and_nothing_else(tmp_path, table):
    """Whoever can write the database can write sums, too."""
    with holdfast.open(tmp_path / "original") as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint("one")
    names = TABLES[table].names
    at = names.index("body")
    row = list(sql(tmp_path / "original", f"SELECT * FROM {table}")[0])
    for number, body in enumerate(BODIES[table]):
        path = tmp_path / f"store {number}"
        shutil.copytree(tmp_path / "original", path)
        row[at] = packb(body)
        row[-1] = PLAIN.stored(table, *row[:-1])[-1]
        sql(path, f"UPDATE {table} SET body = ?, sum = ? WHERE {names[0]} = ?", row[at], row[-1], row[0])
        with holdfast.open(path, readonly=True) as store:
            assert not store.verify().ok, body
            with suppress(Damaged):
                store.retain(Policy(last=1), dry_run=True)
            if table != "log":
                with pytest.raises(Damaged, match=f"{table} {row[0]}: its content does not follow the") as caught:
                    store.agents() if table == "agent" else store.agent("a", readonly=True).branches()
                assert "`holdfast repair`" in caught.value.hint
        holdfast.repair(path, tmp_path / f"repaired {number}")
        with holdfast.open(tmp_path / f"repaired {number}") as store:
            assert store.verify().ok
            assert [store.agent(info.name).state["n"] for info in store.agents()] == [1]


HUGE = {"branch": ["head", "depth", "epoch", "line", "count", "generation", "at"], "record": ["prev", "i", "b"]}


@unsaved
@pytest.mark.slow
@pytest.mark.parametrize("table", HUGE)
def test_numbers_that_no_store_can_have_cost_neither_time_nor_memory(tmp_path, table):
    """Each was counted up to, and most of them with something made for every step."""
    rich.build(tmp_path / "original")
    for name in HUGE[table]:
        write_row(tmp_path, table, 3, lambda row, name=name: row.update({name: 2**61}))
        explore_store(tmp_path)


def test_a_value_of_a_record_that_is_lost_is_said_and_what_happened_is_kept(store_path, tmp_path):
    @holdfast.tool(effect="read")
    def look():
        return ["long"] * 20_000

    @holdfast.durable
    def work(agent):
        agent.state["seen"] = len(look())

    with holdfast.open(store_path) as store:
        store.agent("a").run(work)
    (named,) = [about[32:] for (about,) in sql(store_path, "SELECT about FROM record") if len(about) > 32]
    sql(store_path, "DELETE FROM node WHERE digest = ?", named)
    report = holdfast.repair(store_path, tmp_path / "new")
    assert report.agents[0].lost == ["a value in record 2 of what happened outside is lost; that it happened is kept"]
    with holdfast.open(tmp_path / "new") as store:
        assert store.verify().ok
        assert [effect.status for effect in store.agent("a").effects()] == ["done"]
        assert store.agent("a").state["seen"] == 20_000


def test_a_store_that_cannot_be_looked_for_is_not_made_elsewhere(tmp_path, disk, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    holdfast.open(tmp_path / ".holdfast").close()
    disk.fail("stat", "agent/places.py")
    with pytest.raises(StoreFailed):
        holdfast.open()
    disk.before = None
    with holdfast.open() as store:
        assert store.path == tmp_path / ".holdfast"


def test_a_log_that_cannot_be_looked_at_does_not_make_its_database_a_damaged_one(store_path, disk):
    def child(_say):
        agent = holdfast.open(store_path).agent("a")
        agent.state["long"] = os.urandom(200_000)  # the database grows, which its first page says
        agent.checkpoint("one")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Died):
        isolated(child)
    first = bytearray((store_path / "store.db").read_bytes())
    first[:100] = bytes(100)  # as a folding that was interrupted may leave it: the log has this page
    (store_path / "store.db").write_bytes(first)
    disk.fail("stat", "store/files.py")
    try:
        holdfast.open(store_path).close()
    except Damaged:
        pytest.fail("called damaged")
    except HoldfastError:
        pass


@pytest.fixture
def poisoned_after(monkeypatch):
    """``poisoned_after(start)``: transactions with such a statement are done, but said to have failed."""

    def make(start):
        failing = [True]
        transaction = Sqlite.transaction

        def unsure(self, work, begun=None):
            met = []

            def watched(tx):
                for name in ("do", "many"):
                    monkeypatch.setattr(tx, name, noting(getattr(tx, name), met))
                return work(tx)

            result = transaction(self, watched, begun)
            if met and failing:
                self.poisoned(StorePoisoned("the disk failed; what it holds of the last change is unknown"))
                raise self.poison
            return result

        def noting(method, met):
            def call(sql, args=()):
                if sql.startswith(start):
                    met.append(sql)
                return method(sql, args)

            return call

        monkeypatch.setattr(Sqlite, "transaction", unsure)
        return failing.clear

    return make


def test_a_pack_that_arrived_stays_when_its_rows_may_be_on_the_disk(tmp_path, poisoned_after):
    """It was deleted when the flush of its rows failed, although the rows could have been written."""
    with holdfast.open(tmp_path / "store") as store, holdfast.open(tmp_path / "copy") as copy:
        agent = store.agent("a")
        agent.state["bulk"] = os.urandom(800_000)
        agent.checkpoint("one")
        again = poisoned_after("INSERT INTO chunk")
        with pytest.raises(StorePoisoned):
            store.push(copy)
    again()
    with holdfast.open(tmp_path / "store") as store, holdfast.open(tmp_path / "copy") as copy:
        assert copy.verify().ok
        store.push(copy)
        assert copy.agent("a").state["bulk"] == store.agent("a").state["bulk"]


def test_a_pack_that_was_rewritten_stays_when_its_rows_may_be_on_the_disk(store_path, poisoned_after):
    """As above, where it holds values that were acknowledged long ago."""
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["keep"], agent.state["bulk"] = os.urandom(800_000), os.urandom(3_000_000)
        agent.checkpoint("one")
        del agent.state["bulk"]
        kept = agent.checkpoint("two")
        again = poisoned_after("INSERT INTO pack")
        with pytest.raises(StorePoisoned):
            store.retain(Policy(last=1))
    again()
    with holdfast.open(store_path) as store:
        assert store.verify().ok
        assert store.agent("a").head.id == kept.id
        store.retain(Policy(last=1))
        assert store.verify().ok
        assert len(store.agent("a").state["keep"]) == 800_000


def test_a_manifest_of_any_shape_is_read_or_is_damage():
    """Repair wrote down as lost what a field of another type named, and fell over it."""
    sections = [("n", b"d" * 32)]
    whole = Manifest.make(b"p" * 32, 2, sections, b"o" * 32, (1, b"c" * 32), b"m" * 32, "one", 1).encode()
    parts = unpackb(whole)
    assert Manifest.decode(whole).sections == sections
    for at in range(len(parts)):
        for value in (*OTHERS, parts[:at], None):
            with suppress(Damaged):
                made = Manifest.decode(packb([*parts[:at], value, *parts[at + 1 :]]))
                assert type(value) is type(parts[at])
                assert Manifest.decode(made.encode()) == made


def test_a_store_that_cannot_be_written_is_repaired(tmp_path, disk):
    """As on a failing disk that is mounted for reading only, to save what is on it."""
    with holdfast.open(tmp_path / "store") as store, store.agent("a") as agent:
        agent.checkpoint("one")
        store.copy("a", "b")
    refused = []

    def before(call):
        if call.what in CHANGES and call.name.startswith("store/"):
            refused.append(call.name)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    disk.before = before
    assert holdfast.repair(tmp_path / "store").whole
    assert not refused


def test_what_a_disk_does_not_give_back_costs_what_stood_there(tmp_path, disk):
    """A failing disk is what a repair is for: it goes on around blocks that cannot be read."""
    with holdfast.open(tmp_path / "store") as store, store.agent("a") as agent:
        for number in range(4):
            agent.state["photo"] = random.Random(number).randbytes(300_000)
            agent.checkpoint(f"c{number}")
    bad = min((tmp_path / "store" / "packs").iterdir()).name
    reads = 0

    def refuse(call):
        nonlocal reads
        copying = call.name == "store/store.db" and "salvage.py" in call.site
        if call.what == "read" and (copying or call.name.endswith(bad)):
            reads += copying
            if not copying or reads in {1, 14}:  # all of it at once, and then one page
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = refuse
    report = holdfast.repair(tmp_path / "store", tmp_path / "new")
    disk.before = None
    assert "store.db: the disk does not give back 4096 bytes of it" in report.problems
    assert f"packs/{bad}: 1 of 1 chunk(s) are lost" in report.problems
    with holdfast.open(tmp_path / "new") as store:
        assert store.verify().ok
    assert not report.whole
