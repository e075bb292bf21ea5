"""The format page is enough to read a store: an independent reader and Holdfast agree on everything in it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import os
import shutil
import sqlite3
from collections import OrderedDict, defaultdict
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import msgpack
from zstandard import ZstdError

import holdfast
from holdfast.codec.values import encode
from holdfast.run import schedule
from holdfast.store import tables
from tests.codec import kinds
from tests.compat import keyed, opened, reader
from tests.compat.make_store import KEY, STORES, TYPES, build, line_of


def unlocking(key):
    return (lambda block: keyed.Keyed(block, key)) if key else None


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A plain and an encrypted store, to be read only."""
    folder = tmp_path_factory.mktemp("stores")
    for name, key in STORES.items():
        build(folder / name, key)
    return folder


def plain(value, store):
    """What Holdfast loaded, in the reader's terms."""
    if isinstance(value, enum.Enum):
        registration = store._registry.by_type(type(value))
        return reader.Member(registration.name, registration.version, value.name, value.value)
    if dataclasses.is_dataclass(value):
        registration = store._registry.by_type(type(value))
        fields = {field.name: plain(getattr(value, field.name), store) for field in dataclasses.fields(value)}
        return reader.Instance(registration.name, registration.version, "fields", fields)
    if type(value).__module__ == "numpy":
        shape = value.shape if (hasattr(value, "flags") and value.ndim) or value.shape else None
        return reader.Numpy(value.dtype.str, shape, value.tobytes())
    if isinstance(value, bytearray):
        return bytearray(value)
    if type(value) is dict:
        return {key: plain(item, store) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(plain(item, store) for item in value)
    return value


def compare(path: Path, key: bytes | None = None) -> dict:
    """Read a store in both ways; gives what the independent reader has found."""
    found = reader.read(path, unlocking(key))
    with holdfast.open(path, readonly=True, types=TYPES, key=key or False) as store:
        assert store.verify().ok
        assert found["schedules"] == msgpack.decode(msgpack.encode(schedule._read(store._db.view.fact("schedules"))))
        assert set(found["agents"]) == {info.name for info in store.agents()}
        for info in store.agents():
            agent, theirs = store.agent(info.name), found["agents"][info.name]
            rows = store._db.view.branches(agent._row.a)
            assert theirs["branches"] == {row.name: row.id.hex() for row in rows}
            assert theirs["tags"] == {name: checkpoint.id for name, checkpoint in agent.tags().items()}
            everything = agent.log(all=True)
            assert theirs["seen"] == {checkpoint.id for checkpoint in everything}
            for branch in info.branches:
                ours = [(record.TYPE, record.at) for _, record in line_of(store, info.name, branch).records()]
                assert [(one["t"], one["at"]) for one in theirs["lines"][branch]] == ours
            for checkpoint in everything:
                point = found["checkpoints"][checkpoint.id]
                ours = (checkpoint.label, checkpoint.depth, checkpoint.kind)
                assert (point["label"], point["depth"], point["kind"]) == ours
                assert point["cost"][0] == checkpoint.trigger
                own = {name: value for name, value in point["metadata"].items() if name != "process"}
                assert point["metadata"]["process"] | own == checkpoint.metadata
                assert theirs["validity"].get(checkpoint.id, "good") == checkpoint.validity
                state = {name: plain(holdfast.plain(checkpoint.state[name]), store) for name in checkpoint.state}
                assert reader.shown(point["state"]) == reader.shown(state)
    return found


@pytest.mark.parametrize("name", STORES)
def test_reads_every_kind_of_row(stores, name):
    found = compare(stores / name, STORES[name])
    seen = set().union(*(agent["seen"] for agent in found["agents"].values()))
    assert seen == set(found["checkpoints"])
    rows = reader.Store(stores / name, unlocking(STORES[name])).rows
    assert all(rows[table] for table in rows if table != "slot")
    described = ("every", "zone", "missed", "overlap", "at", "next", "pending", "last", "skipped")
    assert {tuple(sorted(one)) for one in found["schedules"].values()} == {tuple(sorted(described))}
    assert any(int.from_bytes(row["refs"][:4]) for row in rows["segment"])  # one has a dictionary
    assert {point["sealed"] for point in found["checkpoints"].values()} == {0, 1}
    assert {point["metadata"].get("trace") for point in found["checkpoints"].values()} == {None, "4b" * 16}
    assert {"rollback", "clone", "forget", "signal"} <= {entry["body"]["what"] for entry in found["log"]}


def test_nothing_can_be_read_from_an_encrypted_store_without_its_key(stores):
    with closing(sqlite3.connect(f"file:{stores}/encrypted/store.db?mode=ro", uri=True)) as db:
        stored = b"".join(db.serialize().split(b"message 3"))
        assert len(stored) == len(db.serialize())
        assert b"user@example.com" not in stored
    with pytest.raises(reader.Broken):
        reader.read(stores / "encrypted", unlocking(bytes(32)))
    with pytest.raises(reader.Broken):
        reader.read(stores / "encrypted")


def test_reads_what_is_still_in_the_log_and_chunks_that_do_not_compress(store_path):
    bulk = os.urandom(300_000)
    with holdfast.open(store_path) as store:
        agent = store.agent("a")
        agent.state["bulk"] = bulk
        made = agent.checkpoint("bulk")
        found = reader.read(store_path)
        assert found["checkpoints"][made.id]["state"] == {"bulk": bulk}
    assert {row["length"] == row["stored"] for row in reader.Store(store_path, None).rows["chunk"]} == {True}


def test_reads_the_files_of_a_workspace(store_path, tmp_path):
    repo, kept = tmp_path / "repo", {}
    (repo / "sub").mkdir(parents=True)
    (repo / "link").symlink_to("sub")
    with holdfast.open(store_path) as store:
        agent = store.agent("a", workspace=repo)
        for number in range(3):
            (repo / "sub" / "short").write_bytes(b"%d" % number)
            (repo / f"long {number}").write_bytes(os.urandom(100_000))
            agent.state[f"n{number}"] = number
            made = agent.checkpoint(str(number))
            kept[made.id] = {path.name: path.read_bytes() for path in repo.rglob("*") if path.is_file()}
        found = reader.read(store_path)["checkpoints"]
    for id, contents in kept.items():
        files = found[id]["state"]["\0workspace\0files"]
        assert {
            path.rpartition(b"/")[2].decode(): one for path, (mode, one) in files.items() if mode >> 12 == 8
        } == contents
        assert (files[b"link"][1], files[b"sub"][1]) == (b"sub", None)


def test_a_record_whose_body_is_gone_still_proves_the_line(stores, tmp_path):
    path = shutil.copytree(stores / "store", tmp_path / "store")
    with closing(sqlite3.connect(path / "store.db")) as db, db:
        assert db.execute("UPDATE record SET body = x'' WHERE i = 3").rowcount == 2
    line = reader.read(path)["agents"]["doer"]["lines"]["main"]
    assert [one is None for one in line[:4]] == [False, False, True, False]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE loose SET epoch = epoch + 1",
        "UPDATE checkpoint SET parent = 0",
        "UPDATE node SET data = x'006c0000000000' WHERE k = 1",
        "UPDATE loose SET data = (SELECT data FROM loose ORDER BY n LIMIT 1)",
        "UPDATE node SET data = CAST(data || x'00' AS BLOB) WHERE substr(data, 1, 1) = x'01'",
        "UPDATE record SET body = x'81a174a3656e64' WHERE i = 3",
        "UPDATE record SET mark = mark + 2 WHERE i = 3",
        "UPDATE floor SET number = number - 1",
        "DELETE FROM segment",
        "DELETE FROM checkpoint WHERE n = 2",
        "DELETE FROM record WHERE i = 3",
        "DELETE FROM shallow",
        "DELETE FROM node WHERE k > 3",
        "DELETE FROM chunk",
        "DELETE FROM pack",
        "DELETE FROM log WHERE e > 2",
    ],
)
def test_refuses_what_does_not_fit(stores, tmp_path, sql):
    path = shutil.copytree(stores / "store", tmp_path / "store")
    with closing(sqlite3.connect(path / "store.db")) as db, db:
        assert db.execute(sql).rowcount > 0
    with pytest.raises((reader.Broken, LookupError, ZstdError)):
        reader.read(path)


@pytest.mark.parametrize("table", ["branch", "tag", "loose", "log", "record"])
def test_refuses_rows_of_an_encrypted_store_that_changed_places(stores, tmp_path, table):
    """Also with their sums: a box is bound to its row."""
    path = shutil.copytree(stores / "encrypted", tmp_path / "store")
    box = {"loose": "data", "record": "body"}.get(table, "body")
    with closing(sqlite3.connect(path / "store.db")) as db, db:
        rows = db.execute(f"SELECT {box} FROM {table} WHERE length({box}) > 0 LIMIT 2").fetchall()
        one, two = (row[0] for row in rows)
        db.execute(
            f"UPDATE {table} SET {box} = CASE {box} WHEN ? THEN ? WHEN ? THEN ? ELSE {box} END", (one, two, two, one)
        )
    with pytest.raises(reader.Broken):
        reader.read(path, unlocking(KEY))


@pytest.mark.parametrize("name", STORES)
def test_open_runs_are_what_the_page_says(stores, name):
    assert opened.check(stores / name, unlocking(STORES[name])) == 6


def test_the_page_describes_the_tables_as_they_are():
    described = [line.split(":", 1) for line in reader.TABLES.strip().splitlines()]
    assert [name.strip() for name, _ in described] == list(tables.TABLES)
    ours = [line.split(":", 1) for line in tables._DESCRIPTION.strip().splitlines()]
    assert [" ".join(about.split()) for _, about in described] == [" ".join(about.split()) for _, about in ours]


def test_is_short_and_knows_nothing_of_holdfast():
    for module, most in ((reader, 330), (keyed, 60), (opened, 75)):
        source = Path(module.__file__).read_text(encoding="utf-8")
        names = {
            alias.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not any(name.startswith("holdfast") for name in names)
        code = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(code) <= most


def test_reads_scopes_and_keys_as_the_page_says():
    types = kinds.registry()
    note, point = kinds.Note("a"), kinds.Point(1)
    keys = {point: note, (point, point): [note]}
    value = (note, keys, OrderedDict(keys), defaultdict(list, keys), frozenset({point, (point, point)}), [note])
    found = reader.Values(None).decode(encode(value, types))
    assert found[0] is found[5][0]
    for mapping in found[1:4]:
        (one, two), (first, [second]) = mapping.keys(), mapping.values()
        assert first is second is found[0]
        assert one.data == {"x": 1, "y": 0}
        assert two[0] is two[1]
    assert sorted(map(len, found[4])) == [2, 4]  # a pair, and an instance, which has four parts
    two = reader.Values(None).decode(encode([note, {"again": note}], types))
    assert two[0] is not two[1]["again"]
