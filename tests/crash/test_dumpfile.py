"""The file: cut anywhere it opens, damaged anywhere it says so, hostile it raises only declared errors."""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
import sys

import ormsgpack
import pytest
import zstandard

from holdfast.crash import capture, dumpfile, kinds, open_dump
from holdfast.crash.dumpfile import HEADER, MAGIC, MARK, Reader, Writer
from holdfast.crash.kinds import MAX_CHUNK_BYTES
from holdfast.crash.redaction import Redactor
from holdfast.errors import CorruptValue, DumpFailed, HoldfastError, NewerFormat, NotADump

PROGRAM = """
import sys
from holdfast.crash import Limits, capture

def fail(city):
    offers = [{"id": 1, "price": 10.5}]
    raise LookupError(f"no {city} in {len(offers)} offers")

try:
    fail("Lisbon")
except LookupError as error:
    capture("small", error=error, to=sys.argv[1], limits=Limits(deadline_s=600, part_s=300))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The dump of a small program with an exception: about 10 KB, so that each of its bytes can be tried."""
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, folder / "program.py", folder / "d"], check=True)
    (path,) = (folder / "d").iterdir()
    return path.read_bytes()


def explore(path):
    """Everything that a reader can ask."""
    with open_dump(path) as dump:
        for name in ("parts", "missing", "complete", "exceptions", "threads", "tasks", "sources", "logs"):
            getattr(dump, name)
        for inert in dump.objects():
            list(inert.children())
        list(dump.search("lisbon"))
        for kind in kinds.PARTS:
            dump.part(kind)
            dump.extras(kind)
        return dump.missing, dump.complete


def test_only_the_owner_may_read_it(tmp_path):
    old = os.umask(0)
    try:
        path = capture(to=tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_whole_file_is_complete(small, tmp_path):
    path = tmp_path / "whole.hfdump"
    path.write_bytes(small)
    missing, complete = explore(path)
    assert complete
    assert missing == ["log records: nothing was kept"]


def test_a_file_cut_at_any_byte_opens_and_says_what_is_missing(small, tmp_path, rounds):
    path = tmp_path / "cut.hfdump"
    step = rounds(3, 1)
    for length in [*range(len(MAGIC), len(small), step), len(small) - 1]:
        path.write_bytes(small[:length])
        with open_dump(path) as dump:
            assert not dump.complete, length
            assert dump.missing, length
    for length in range(len(MAGIC)):
        path.write_bytes(small[:length])
        with pytest.raises(NotADump):
            open_dump(path)


def test_what_was_written_before_the_cut_is_read(small, tmp_path):
    path = tmp_path / "cut.hfdump"
    path.write_bytes(small)
    with open_dump(path) as dump:
        chunks = dump._reader.chunks
    after = next(chunk for chunk in chunks if chunk.kind == kinds.SOURCE).offset
    path.write_bytes(small[:after])
    with open_dump(path) as dump:
        assert dump.exceptions[0].message == "no Lisbon in 1 offers"
        frame = dump.threads[0].frames[-1]
        assert dump.local(frame, "offers[0]['price']") == 10.5
        assert any(line.startswith("sources") for line in dump.missing)
        assert any(line.startswith("process and machine") for line in dump.missing)


def test_any_flipped_byte_is_noticed_or_harmless(small, tmp_path, rounds):
    path = tmp_path / "damaged.hfdump"
    chooser = random.Random(7)
    places = range(len(MAGIC), len(small)) if rounds(0, 1) else chooser.sample(range(len(MAGIC), len(small)), 300)
    for place in places:
        data = bytearray(small)
        data[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
        try:
            missing, complete = explore(path)
        except NewerFormat:
            continue
        assert not complete or missing != ["log records: nothing was kept"], place


def test_a_damaged_header_costs_only_its_own_chunk(small, tmp_path):
    path = tmp_path / "damaged.hfdump"
    path.write_bytes(small)
    with open_dump(path) as dump:
        second = next(chunk for chunk in dump._reader.chunks if chunk.kind == kinds.SOURCE)
    data = bytearray(small)
    data[second.offset + 20] ^= 255
    path.write_bytes(data)
    with open_dump(path) as dump:
        assert dump.part(kinds.PROCESS)["pid"] == dump.head["pid"]
        assert "damaged header" in " ".join(dump.missing)
        assert not dump.complete


def seal(kind, body, raw, *, version=1, number=0):
    """A chunk with right sums, whatever is in it."""
    front = HEADER.pack(MARK, kind, number, version, 0, len(body), raw, dumpfile._sum(body), b"")[: HEADER.size - 16]
    return front + dumpfile._sum(front) + body


def hostile(payload):
    packed = ormsgpack.packb(payload)
    return zstandard.ZstdCompressor().compress(packed), len(packed)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(NotADump):
        open_dump(path)
    path.write_bytes(b"")
    with pytest.raises(NotADump):
        open_dump(path)
    with pytest.raises(NotADump):
        open_dump(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotADump):
        open_dump(tmp_path / "fifo")


def test_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "x.hfdump"
    path.write_bytes(MAGIC + seal(b"head", *hostile({}), version=2))
    with pytest.raises(NewerFormat):
        open_dump(path)


def test_declared_sizes_are_not_believed(tmp_path):
    path = tmp_path / "x.hfdump"
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    for raw in (0, 100, MAX_CHUNK_BYTES, 200 << 20, 2**63):
        path.write_bytes(MAGIC + seal(b"head", bomb, raw))
        missing, complete = explore(path)
        assert not complete
        assert missing


@pytest.mark.parametrize("body", [b"\x90" * (MAX_CHUNK_BYTES - 5), b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc1"])
def test_hostile_messagepack_is_bounded(tmp_path, body):
    path = tmp_path / "x.hfdump"
    if body[0] == 0x90:
        body = b"\xdd" + struct.pack(">I", len(body)) + body
        body = body[:MAX_CHUNK_BYTES]
    compressed = zstandard.ZstdCompressor().compress(body)
    path.write_bytes(MAGIC + b"".join(seal(kind.encode(), compressed, len(body)) for kind in ("head", "excp", "objs")))
    with open_dump(path) as dump:
        assert dump.missing
        assert dump.exceptions == []
        assert list(dump.objects()) == []


def test_chunks_can_be_added_later_and_the_last_index_counts(small, tmp_path):
    path = tmp_path / "x.hfdump"
    path.write_bytes(small + seal(b"natv", *hostile({"name": "late", "data": [1]})))
    with open_dump(path) as dump:
        assert dump.extras(kinds.NATIVE) == {"late": [1]}
        assert dump.complete


def test_a_payload_that_was_damaged_is_a_typed_error(small, tmp_path):
    path = tmp_path / "x.hfdump"
    path.write_bytes(small)
    reader = Reader(path)
    first = reader.chunks[0]
    reader.close()
    data = bytearray(small)
    data[first.offset + HEADER.size] ^= 1
    path.write_bytes(data)
    reader = Reader(path)
    with pytest.raises(CorruptValue):
        reader.payload(reader.chunks[0])
    reader.close()


def test_a_file_that_exists_is_not_touched(tmp_path):
    path = tmp_path / "mine.hfdump"
    path.write_text("mine")
    with pytest.raises(DumpFailed):
        capture(to=path)
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpFailed):
        capture(to=tmp_path / "file" / "folder")


def test_too_large_a_chunk_is_split_and_too_large_a_node_is_marked(tmp_path):
    path = tmp_path / "x.hfdump"
    writer = Writer(path, Redactor())
    nodes = [[kinds.TEXT, 0, "é" * 400_000] for _ in range(5)] + [[kinds.TEXT, 0, "x" * 3_000_000]]
    assert writer.add(kinds.OBJECTS, {"first": 10, "types": ["str"], "shapes": [], "nodes": nodes}, nodes="nodes")
    writer.finish({})
    writer.close()
    with open_dump(path) as dump:
        assert [inert.number for inert in dump.objects()] == [10, 11, 12, 13, 14, 15]
        assert dump.object(14).text == "é" * 400_000
        assert dump.object(15).reason


def test_a_full_disk_is_a_typed_error_and_the_capture_lets_go(monkeypatch, tmp_path):
    import errno

    real = os.write
    written = []

    def failing(handle, data):
        written.append(len(data))
        if sum(written) > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(dumpfile.os, "write", failing)
    with pytest.raises(HoldfastError) as caught:
        capture(to=tmp_path)
    assert caught.value.kind == "disk-full"
    monkeypatch.undo()
    (path,) = tmp_path.iterdir()
    with open_dump(path) as dump:
        assert dump.missing
    assert capture(to=tmp_path / "again").exists()
