"""Encodings, digests, rows and whole stores that are kept in the repository: none of them may ever change."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest

import holdfast
from holdfast.codec.document import Document
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.store.manifest import Packed, Segment
from holdfast.store.tables import FORMAT_VERSION
from tests.compat import keyed, reader
from tests.compat.make_store import KEY, PASSPHRASE, STATES, STORES, TYPES, VALUES, describe, vectors

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())
FORMAT = GOLDEN["format"]


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
        ("several leaves", "numbers", b"l"), ("two levels", "texts", b"l"), ("leaves cut by content", "texts", b"l"),
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


# Sections 3 to 8: by today's code, and by the page alone


def unhex(texts: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]


@pytest.mark.parametrize("name", FORMAT)
def test_vectors_are_what_they_were(name):
    made = vectors()
    assert made.keys() == FORMAT.keys()
    if name == "segment":  # compressors may find another way to say the same
        assert made[name][:2] == FORMAT[name][:2]
    else:
        assert made[name] == FORMAT[name]


def test_a_segment_is_read_as_it_was_written():
    node = bytes.fromhex(FORMAT["node"])
    segment = Segment(Packed(*unhex(FORMAT["segment"])), lambda names: dict.fromkeys(names, node))
    assert segment.members == [5, 9, 7]
    assert segment.manifests == unhex(FORMAT["manifests"])
    assert segment.ids == unhex(FORMAT["ids"])
    assert [segment.operations(at) for at in range(3)] == unhex(FORMAT["operations"])
    assert segment.refs == ([reader.digest("holdfast.node", node)], [b"x" * 32])


def test_vectors_follow_from_the_format_page():
    manifests, operations = unhex(FORMAT["manifests"]), unhex(FORMAT["operations"])
    assert [reader.digest("holdfast.checkpoint", one).hex() for one in manifests] == FORMAT["ids"]
    assert int.from_bytes(bytes.fromhex(FORMAT["ids"][0])[:8], signed=True) == FORMAT["mark"]
    for at, manifest in enumerate(manifests):
        said = reader.manifest_of(reader.Values(None).decode(manifest))
        assert said["operations"] == reader.digest("holdfast.operations", operations[at])
        assert said["parent"].hex() == (FORMAT["ids"][at - 1] if at else "")
    told = reader.manifest_of(reader.Values(None).decode(bytes.fromhex(FORMAT["manifest with cost"])))
    assert told["cost"] == ["adaptive", 2700, 840, 1200, 1]
    told = reader.manifest_of(reader.Values(None).decode(bytes.fromhex(FORMAT["manifest with files"])))
    assert told["layers"][1] == ["workspace", ["files", b"f" * 32, "marked", b"m" * 32]]
    given = []
    values = reader.Values(SimpleNamespace(joined=lambda *about: given.append(about) or b"bytes"))
    file = values.decode(b"\xdd\0\0\0\2" + bytes.fromhex(FORMAT["file"]))
    assert (file, given) == ([b"src/\xff.py", (0o100644, b"bytes")], [(b"d" * 32, 5, [b"c" * 32])])
    payload = len(manifests[0]).to_bytes(4) + manifests[0] + operations[0]
    assert bytes.fromhex(FORMAT["payload"]) == b"\0" + payload
    chain = b""
    for body, after in zip(unhex(FORMAT["records"]), unhex(FORMAT["chains"])[1:], strict=True):
        chain = reader.digest("holdfast.effect", chain + reader.digest("holdfast.record", reader.split(body)[0]))
        assert chain == after
    cell = bytes.fromhex(FORMAT["cell"])
    numbers = b"".join(number.to_bytes(8, signed=True) for number in (7, 8, 9, -10))
    assert cell[:-8] == b"HFWT\0\0\0\0" + numbers + bytes(16)
    assert cell[-8:] == reader.digest("holdfast.witness", cell[:-8])[:8]


def test_sums_and_names_follow_from_the_format_page():
    n, mark, key, *rest = FORMAT["row"]
    row = [n, mark, bytes.fromhex(key), *rest]
    assert reader.Plain.total("checkpoint", row).hex() == FORMAT["sum"]
    cipher = keyed.Keyed.of(KEY, b"u" * 16)
    _, _, name, *_, total = FORMAT["keyed row"]
    assert cipher.name("checkpoint", 0, bytes.fromhex(name)) == b"key"
    assert cipher.total("checkpoint", [n, mark, bytes.fromhex(name), *rest]).hex() == total
    assert cipher.name("tag", 7, bytes.fromhex(FORMAT["tag name"])) == b"kept"


# Stores of released versions


@pytest.fixture(scope="module", params=range(1, FORMAT_VERSION + 1))
def kept(request, tmp_path_factory):
    """Where the stores of a version are, and what is in them."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(HERE / f"store-v{request.param}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder, json.loads((HERE / f"store-v{request.param}.json").read_text())


@pytest.mark.parametrize("key", [KEY, PASSPHRASE], ids=["key", "passphrase"])
def test_either_key_opens_the_encrypted_one(kept, key):
    folder, expected = kept
    found = reader.read(folder / "encrypted", lambda block: keyed.Keyed(block, key))
    assert set(found["agents"]) == set(expected["encrypted"])


@pytest.mark.parametrize("name", STORES)
def test_old_stores_are_read_as_they_were_written(kept, name):
    folder, expected = kept
    path, key = folder / name, STORES[name]
    found = reader.read(path, (lambda block: keyed.Keyed(block, key)) if key else None)
    for agent, what in expected[name].items():
        theirs = found["agents"][agent]
        assert theirs["branches"] == what["branches"]
        assert theirs["tags"] == what["tags"]
        assert theirs["seen"] == set(what["checkpoints"])
    with holdfast.open(path, readonly=True, types=TYPES, key=key or False) as store:
        report = store.verify()
        assert report.ok, str(report)
        assert describe(store) == expected[name]
        state = store.agent("user@example.com").at("values").state
        for value in VALUES:
            assert encode(holdfast.plain(state[f"value: {value}"])) == encode(VALUES[value])
    with holdfast.open(path, types=TYPES, key=key or False) as store:
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
