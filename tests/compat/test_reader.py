"""The format page is enough to read a store: an independent reader and Holdfast agree on everything in it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import sqlite3
from collections import OrderedDict, defaultdict
from contextlib import closing
from pathlib import Path

import pytest

import holdfast
from holdfast.codec.values import encode
from holdfast.store import sealing
from tests.codec import kinds
from tests.compat import reader
from tests.compat.make_store import TYPES, act, fill, line_of
from tests.faults import rich


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


def compare(path: Path, types) -> dict:
    found = reader.read(path)
    with holdfast.open(path, readonly=True, types=types) as store:
        assert store.verify().ok
        assert set(found["agents"]) == {info.name for info in store.agents()}
        met = set()
        for info in store.agents():
            agent = store.agent(info.name)
            assert set(found["agents"][info.name]["branches"]) == set(info.branches)
            tags = {name: checkpoint.id for name, checkpoint in agent.tags().items()}
            assert found["agents"][info.name]["tags"] == tags
            assert found["agents"][info.name]["seen"] == [c.id for c in reversed(agent.log(all=True))]
            for branch in info.branches:
                ours = [record for _, record in line_of(store, info.name, branch).records()]
                theirs = found["agents"][info.name]["lines"][branch]
                assert [(one["t"], one["at"]) for one in theirs] == [(one.TYPE, one.at) for one in ours]
            for checkpoint in agent.log(all=True):
                met.add(checkpoint.id)
                theirs = found["checkpoints"][checkpoint.id]
                assert theirs["label"] == checkpoint.label
                assert theirs["depth"] == checkpoint.depth
                assert theirs["kind"] == checkpoint.kind
                assert theirs["parent"].hex() == checkpoint.parent_id
                assert theirs["target"].hex() == checkpoint.target_id
                assert theirs["metadata"] == checkpoint.metadata
                ours = {name: plain(holdfast.plain(checkpoint.state[name]), store) for name in checkpoint.state}
                assert reader.shown(theirs["state"]) == reader.shown(ours)
                assert found["agents"][info.name]["validity"].get(checkpoint.id, "good") == checkpoint.validity
        assert met == set(found["checkpoints"])
        assert found["events"]
    return found


def test_reads_every_kind_of_record(store_path):
    with rich.small_limits():
        rich.build(store_path)
        found = compare(store_path, rich.TYPES)
    assert any(checkpoint["sealed"] for checkpoint in found["checkpoints"].values())
    assert any(not checkpoint["sealed"] for checkpoint in found["checkpoints"].values())


def test_reads_every_type_of_value(store_path, monkeypatch):
    monkeypatch.setattr(sealing, "SEAL_CHECKPOINTS", 6)
    with holdfast.open(store_path, types=TYPES) as store:
        fill(store)
        act(store)
        store.remove("second")
        store.clone("user@example.com", "clone")
        clone = store.agent("clone")
        clone.state["messages"].append("of the clone")
        clone.checkpoint("of the clone")
        clone.mark("message 3", "good")
        numbers = {c.label: c._row.n for c in clone.log(all=True)}
        row = clone._row
        clone.close()
        store._forget(row, {numbers["message 2"], numbers["message 5"]})
        store.agent("user@example.com").close()
        store._forget(store._catalog.agents()[0], {numbers["message 5"], numbers["changed"]})
    compare(store_path, TYPES)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE checkpoint SET depth = depth + 1 WHERE n = 3",
        "UPDATE node SET data = x'006c0000000000' WHERE k = 1",
        "UPDATE tail SET data = x'91c403616263'",
        "DELETE FROM metadata",
        "DELETE FROM checkpoint WHERE n = 2",
        "DELETE FROM tail",
        "DELETE FROM chunk",
        "DELETE FROM effect WHERE i = 3",
        "DELETE FROM line WHERE start = 0",
        "UPDATE line SET origin = 0 WHERE start > 0",
    ],
)
def test_refuses_what_does_not_fit(store_path, sql):
    with rich.small_limits():
        rich.build(store_path)
    with holdfast.open(store_path, types=rich.TYPES) as store:
        act(store)
    reader.read(store_path)
    with closing(sqlite3.connect(store_path / "store.db")) as db, db:
        assert db.execute(sql).rowcount > 0
    with pytest.raises((reader.Broken, LookupError)):
        reader.read(store_path)


def test_is_short_and_knows_nothing_of_holdfast():
    source = Path(reader.__file__).read_text(encoding="utf-8")
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not any(name.startswith(("holdfast", "tests")) for name in names)
    code = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 290


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
