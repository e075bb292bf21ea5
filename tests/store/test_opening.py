"""What a path may hold, and how a store comes into being."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast import repair
from holdfast.errors import (
    BadOption,
    Damaged,
    NewerFormat,
    NotAStore,
    ReadOnly,
    StoreFailed,
    StoreReadOnly,
)
from holdfast.store import files
from holdfast.store.cipher import PLAIN
from tests import warm


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def content(path):
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def made(path, **options):
    with holdfast.open(path, **options) as store:
        agent = store.agent("a")
        agent.state["n"] = 1
        agent.checkpoint("one")
    return path


def sql(path, *statements):
    with closing(sqlite3.connect(path / "store.db")) as connection, connection:
        for statement in statements:
            connection.execute(*(statement if isinstance(statement, tuple) else (statement,)))


# -- what is there ------------------------------------------------------------------------------------------


def test_a_store_is_made_where_nothing_is_and_only_if_asked(tmp_path):
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(NotAStore, match="no store at"):
            holdfast.open(tmp_path / "store", **options)
    assert names(tmp_path) == []
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "a" / "b" / "store", tmp_path / "empty"):
        made(path)
        holdfast.open(path, create=False).close()
        left = {name for name in names(path) if not name.startswith("store.db-")}
        assert left == {"store.db", "packs", "locks", "witness", ".gitignore"}


def test_every_connection_flushes_and_trusts_nothing(store_path):
    with holdfast.open(store_path) as store:
        engine = store._db.engine
        for connection in engine._connections:
            names = ("journal_mode", "synchronous", "trusted_schema", "cell_size_check", "wal_autocheckpoint")
            found = [connection.execute(f"PRAGMA {name}").get for name in names]
            assert found == ["wal", 2, 0, 1, 0]
            assert connection.execute("PRAGMA mmap_size").get == 0


def test_other_things_are_not_stores_and_stay_as_they_are(tmp_path):
    file, folder, foreign, text = (tmp_path / name for name in ("file", "folder", "foreign", "text"))
    file.write_bytes(b"text")
    for directory in (folder, foreign, text):
        directory.mkdir()
    (folder / "notes.txt").write_text("mine")
    sql(foreign, "PRAGMA journal_mode=WAL", "CREATE TABLE t (x)")
    (text / "store.db").write_bytes(b"not a database at all, only text" * 200)
    before = content(tmp_path)
    for path in (file, file / "below", folder, foreign, text):
        for options in ({}, {"readonly": True}, {"recover": True}):
            with pytest.raises(NotAStore):
                holdfast.open(path, **options)
    assert content(tmp_path) == before


@pytest.mark.parametrize("position", [0, 17, 70, 100])
def test_a_damaged_first_page_is_damage(store_path, position):
    data = bytearray((made(store_path) / "store.db").read_bytes())
    data[position] ^= 0x55
    (store_path / "store.db").write_bytes(data)
    with pytest.raises(Damaged):
        holdfast.open(store_path)


def test_a_missing_database_is_damage(store_path):
    (made(store_path) / "store.db").unlink()
    with pytest.raises(Damaged, match=r"store\.db is missing") as caught:
        holdfast.open(store_path)
    assert "backup" in caught.value.hint
    assert not (store_path / "store.db").exists()


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        *((f"store.db{more}", ("verify", "doctor", "repair --to new")) for more in ("", "-wal")),
        *((name, ("verify", "repair --to new")) for name in ("witness", "locks/open", "locks/moments", "locks/queue")),
        ("packs/*.pack", ("verify", "repair --to new")),
        ("holdfast.toml", ("doctor",)),
    ],
)
def test_nobody_waits_for_a_pipe_in_the_place_of_a_file(store_path, name, commands):
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["much"] = os.urandom(400_000)
        agent.checkpoint("one")
    file = next(store_path.glob(name), store_path / name)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    for command in commands:
        done = warm.run(
            [sys.executable, "-m", "holdfast", "--store", str(store_path), *command.split()],
            cwd=store_path.parent, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode
        told = " ".join((done.stdout + done.stderr).split())
        assert f"{name} is a pipe" in told or f"{file.name}: cannot be read" in told
    assert not (store_path.parent / "new").exists()


def test_a_newer_format_is_refused_and_a_flipped_number_is_damage(store_path):
    made(store_path)
    two, one = (PLAIN.stored("store", "format", number.to_bytes(2, "big")) for number in (2, 1))
    put = "UPDATE store SET value = ?, sum = ? WHERE name = ?"
    for statements in (["PRAGMA user_version=2"], ["PRAGMA user_version=1", (put, (two[1], two[2], "format"))]):
        sql(store_path, *statements)
        with pytest.raises(NewerFormat, match="has format 2; this program knows up to 1") as caught:
            holdfast.open(store_path)
        assert "newer Holdfast" in caught.value.hint
    sql(store_path, (put, (two[1], one[2], "format")))
    with pytest.raises(NewerFormat):  # it may be true: who does not know the format cannot say more
        holdfast.open(store_path)
    sql(store_path, (put, (one[1], two[2], "format")))
    with pytest.raises(Damaged):
        holdfast.open(store_path)
    sql(store_path, (put, (one[1], one[2], "format")), "PRAGMA user_version=0")
    with pytest.raises(Damaged):
        holdfast.open(store_path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER evil AFTER INSERT ON loose BEGIN DELETE FROM log; END",
        "CREATE VIEW evil AS SELECT * FROM agent",
        "CREATE TABLE evil (x)",
        "ALTER TABLE tag ADD COLUMN evil",
        "DROP TABLE floor",
    ],
)
def test_a_planted_schema_is_refused(store_path, statement):
    sql(made(store_path), statement)
    for options in ({}, {"readonly": True}):
        with pytest.raises(Damaged):
            holdfast.open(store_path, **options)


def test_what_is_damaged_of_one_agent_does_not_shut_the_store(store_path):
    made(store_path)
    sql(store_path, "UPDATE loose SET data = zeroblob(length(data))")
    with holdfast.open(store_path) as store:
        with pytest.raises(Damaged):
            store.agent("a")
        assert store.agent("b").checkpoint("sound").depth == 1
        assert not store.verify().ok


# -- options ------------------------------------------------------------------------------------------------


def test_options_that_make_no_sense_are_refused(tmp_path):
    path = tmp_path / "store"
    for options, words in (
        ({"durability": "perhaps"}, "durability='perhaps'"),
        ({"key": b"short"}, "a key of 5 bytes"),
        ({"key": ""}, "an empty passphrase"),
        ({"objects": "gopher://there"}, "gopher:// address"),
        ({"objects": "s3:/bucket/prefix"}, "must be a path or scheme://"),
    ):
        with pytest.raises(BadOption, match=words):
            holdfast.open(path, **options)
    for place in ("mysql://host/db", "s3://bucket/store", "file:///tmp/store"):
        with pytest.raises(BadOption, match=f"at a {place.partition(':')[0]}:// address") as caught:
            holdfast.open(place)
        assert "postgresql://" in caught.value.hint
    with pytest.raises(BadOption, match="is text, not a path"):
        holdfast.open(Path("postgresql://host/db"))
    with pytest.raises(BadOption, match="UTF-8"):
        holdfast.open(os.fsencode(tmp_path / "odd") and Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xffre")))
    assert names(tmp_path) == []


def test_an_address_that_lacks_slashes_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing_both = ("postgresql:me:secret@host/db", "postgres:host")
    for place in ("postgresql:/me:secret@host/db", "postgres:/host", "mysql:/me:secret@host/db", *missing_both):
        for use in (holdfast.open, holdfast.keys.init, holdfast.keys.listed, lambda it: repair("store", it)):
            with pytest.raises(BadOption) as caught:
                use(place)
            assert "secret" not in str(caught.value)
        with pytest.raises(BadOption, match="is text, not a path"):
            holdfast.open(Path(place))
    assert names(tmp_path) == []
    made("./postgresql:/x")
    made("mysql:x")
    assert names(tmp_path) == ["mysql:x", "postgresql:"]


def test_where_large_values_lie_is_said_once(tmp_path):
    place = tmp_path / "large values"
    path = made(tmp_path / "store", objects=str(place))
    with holdfast.open(path) as store:
        agent = store.agent("a")
        agent.state["bulk"] = bytes(range(256)) * 2000
        agent.checkpoint("bulk")
        assert store.stats()["objects"] == {"place": f"file://{tmp_path}/large%20values", "packs": 1, "reachable": True}
        assert names(path / "packs") == []
    holdfast.open(path, objects=f"file://{tmp_path}/large%20values").close()
    with pytest.raises(BadOption, match="keeps its packs in"):
        holdfast.open(path, objects=str(tmp_path / "elsewhere"))
    with pytest.raises(BadOption, match="keeps its packs"):
        holdfast.open(made(tmp_path / "plain"), objects=str(place))


# -- reading only -------------------------------------------------------------------------------------------


@contextmanager
def frozen(path):
    """A file system that nobody can write to."""
    for command in (["mount", "--bind", path, path], ["mount", "-o", "remount,ro,bind", path]):
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.root
@pytest.mark.parametrize("alone", [False, True], ids=["with its log", "database alone"])
def test_a_read_only_file_system_can_be_read(store_path, alone):
    made(store_path)
    if alone:
        (store_path / "store.db-wal").unlink()
        (store_path / "store.db-shm").unlink()
    with frozen(store_path):
        for asked in (False, True):
            with holdfast.open(store_path, readonly=asked) as store:
                assert store.agent("a", readonly=True).state["n"] == 1
                assert store.verify().problems == []
                changes = [lambda: store.tag("a", "t"), lambda: store.copy("a", "b")]
                for change in changes if asked else [*changes, lambda: store.agent("a"), lambda: store.agent("b")]:
                    with pytest.raises(ReadOnly if asked else StoreReadOnly):
                        change()
        with pytest.raises(StoreReadOnly):
            holdfast.open(store_path / "new")


@pytest.mark.root
def test_a_read_only_file_system_with_a_log_that_nobody_can_read(store_path):
    with holdfast.open(store_path) as store:
        store.agent("a").checkpoint("one")
        copy = store_path.with_name("copy")
        shutil.copytree(store_path, copy)
    (copy / "store.db-shm").unlink()
    with frozen(copy):
        for readonly in (True, False):
            with pytest.raises(StoreFailed, match="cannot be written, and what its log holds") as caught:
                holdfast.open(copy, readonly=readonly)
            assert "Nothing is lost. Copy the whole directory" in caught.value.hint
        shutil.copytree(copy, store_path.with_name("again"))
    with holdfast.open(store_path.with_name("again"), readonly=True) as store:
        assert [one.label for one in store.agent("a").log()] == ["one"]


# -- two at once, and one that dies -------------------------------------------------------------------------


def test_who_looks_at_an_open_store_lets_nobody_else_in(store_path):
    """Closing a descriptor of store.db by other means than SQLite's would drop the locks of this process."""
    write = "import sqlite3, sys\nsqlite3.connect(sys.argv[1], timeout=0.1).execute('BEGIN IMMEDIATE')"
    with holdfast.open(store_path, key=bytes(32)) as store:
        store._db.engine._writer.execute("BEGIN IMMEDIATE")
        holdfast.keys.listed(store_path)
        with pytest.raises(BadOption):
            holdfast.open(store_path, readonly=True, key=bytes(32))
        command = [sys.executable, "-c", write, str(store_path / "store.db")]
        blocked = subprocess.run(command, capture_output=True, text=True, check=False)
        store._db.engine._writer.execute("ROLLBACK")
        assert "locked" in blocked.stderr
        store.agent("a").checkpoint("one")


def test_processes_that_create_at_once_get_one_store(tmp_path):
    program = (
        "import holdfast, sys\nprint('ready', flush=True)\n"
        "for path in sys.stdin: print(holdfast.open(path.strip())._db.uuid.hex(), flush=True)\n"
    )
    children = [
        warm.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
    for number in range(6):
        for child in children:
            print(tmp_path / f"store {number}", file=child.stdin, flush=True)
        assert len({child.stdout.readline() for child in children}) == 1
    for child in children:
        child.communicate(timeout=180)
    assert names(tmp_path) == [f"store {number}" for number in range(6)]  # nothing else is left


def test_one_that_dies_while_it_creates_leaves_no_store(store_path, monkeypatch):
    def crash(_old, _new):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "discard", lambda _directory: None)  # a process that dies cannot clean up
    monkeypatch.setattr(files.Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        holdfast.open(store_path)
    monkeypatch.undo()
    assert not store_path.exists()
    made(store_path)


@pytest.mark.parametrize("lost", [["packs"], ["locks"], ["packs", "locks"]])
def test_folders_that_were_empty_and_got_lost_on_the_way_are_made_anew(tmp_path, lost):
    path = made(tmp_path / "store")

    def without():
        for name in lost:
            shutil.rmtree(path / name, ignore_errors=True)
        return path

    with holdfast.open(without(), readonly=True) as store:
        assert store.verify().ok
        assert store.stats()["counts"]["pack"] == 0
        assert not [name for name in lost if (path / name).exists()], "who reads changes nothing"
    assert repair(without()).whole
    assert repair(without(), tmp_path / "saved").whole
    with holdfast.open(without()) as store:
        assert store.retain(holdfast.Policy(last=1)).kept == 1
        agent = store.agent("a")
        agent.state["big"] = os.urandom(400_000)
        if "packs" in lost:
            (path / "packs").rmdir()  # also while it is open
        agent.checkpoint()
        assert store.verify().ok
    shutil.rmtree(without())
    with pytest.raises(NotAStore):
        holdfast.open(path, create=False)
    assert not path.exists()
