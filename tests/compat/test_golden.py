"""Encodings, section digests and a whole store that are kept in the repository: none of them may ever change."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from zlib import crc32

import pytest

import holdfast
from holdfast.codec.document import Document
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.store.upgrade import FORMAT_VERSION
from tests.compat import reader
from tests.compat.make_store import STATES, TYPES, VALUES, describe

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())


def test_nothing_is_left_out():
    assert list(GOLDEN["values"]) == list(VALUES)
    assert list(GOLDEN["states"]) == list(STATES)


@pytest.mark.parametrize("name", VALUES)
def test_values_have_their_encodings(name):
    data = bytes.fromhex(GOLDEN["values"][name]["encoding"])
    assert encode(VALUES[name]) == data
    found = decode(data)
    assert type(found) is type(VALUES[name])
    assert encode(found) == data


@pytest.mark.parametrize("name", STATES)
def test_states_have_their_digests(name):
    document = Document(REGISTRY)
    for section, value in STATES[name].items():
        document[section] = value
    assert {section: digest.hex() for section, digest in document.digests()} == GOLDEN["states"][name]


# Section 2 of the format page once more, in its own words, over encodings that are made here.


def root(kind: bytes, items: list[bytes]) -> bytes:
    level: list[tuple[bytes, int]] = []
    leaf: list[bytes] = []
    size = 0
    for item in items:
        leaf.append(item)
        size += len(item)
        cut = size >= 8_192 and crc32(item) * 32_768 < len(item) << 32
        if size >= 131_072 or len(leaf) >= 2_048 or cut:
            level.append(_leaf(kind, leaf))
            leaf, size = [], 0
    if leaf or not level:
        level.append(_leaf(kind, leaf))
    number = 0
    while len(level) > 1:
        number += 1
        above: list[tuple[bytes, int]] = []
        entries: list[tuple[bytes, int]] = []
        for entry in level:
            entries.append(entry)
            if len(entries) >= 256 or (len(entries) >= 16 and int.from_bytes(entry[0][:4]) < 2**26):
                above.append(_index(kind, number, entries))
                entries = []
        if entries:
            above.append(_index(kind, number, entries))
        level = above
    return level[0][0]


def _leaf(kind: bytes, items: list[bytes]) -> tuple[bytes, int]:
    return reader.digest("holdfast.node", kind + b"\0" + b"".join(items) + len(items).to_bytes(4)), len(items)


def _index(kind: bytes, number: int, entries: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    payload = b"".join(digest + count.to_bytes(8) for digest, count in entries)
    return reader.digest("holdfast.node", kind + bytes([number]) + payload), sum(count for _, count in entries)


@pytest.mark.parametrize(
    ("state", "section", "kind"),
    [
        ("empty containers", "list", b"l"), ("empty containers", "dict", b"d"), ("empty containers", "set", b"s"),
        ("empty containers", "none", b"v"), ("small", "set", b"s"), ("small", "pair", b"v"),
        ("small", "messages", b"l"),
        ("several leaves", "numbers", b"l"), ("two levels", "numbers", b"l"), ("leaves cut by content", "texts", b"l"),
        ("dict of many", "index", b"d"), ("set of many", "members", b"s"),
    ],
)  # fmt: skip
def test_digests_follow_from_the_format_page(state, section, kind):
    value = STATES[state][section]
    if kind == b"d":
        items = [encode(key) + encode(item) for key, item in value.items()]
    elif kind == b"s":
        items = sorted(map(encode, value))
    else:
        items = list(map(encode, value if kind == b"l" else [value]))
    assert root(kind, items).hex() == GOLDEN["states"][state][section]


# Stores of released versions


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_old_stores_are_read_as_they_were_written(tmp_path, version):
    with tarfile.open(HERE / f"store-v{version}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((HERE / f"store-v{version}.json").read_text())
    if version == FORMAT_VERSION:
        assert set(reader.read(tmp_path / "store")["agents"]) == set(expected)
    with holdfast.open(tmp_path / "store", readonly=True, types=TYPES) as store:
        report = store.verify()
        assert report.ok, str(report)
        assert json.loads(json.dumps(describe(store))) == expected
        agent = store.agent("user@example.com")
        state = agent.at("values").state
        for name, value in VALUES.items():
            assert encode(holdfast.plain(state[f"value: {name}"])) == encode(value)
    with holdfast.open(tmp_path / "store", types=TYPES) as store:
        agent = store.agent("user@example.com")
        agent.state["new"] = "written by a later version"
        agent.checkpoint("new")
        agent.rollback("message 3")
        agent.undo()
        assert store.verify().ok


def test_the_files_that_are_kept_are_small():
    for file in HERE.iterdir():
        if file.is_file():
            assert file.stat().st_size < 150_000, file
