"""The parsers that read what may come from elsewhere, each with seeds of real data and what is done with an input.

Where a checksum would stop every change at the door, only what is inside is the input, and the envelope is made anew.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import apsw
import zstandard
from blake3 import blake3

import holdfast
from holdfast.agent import bundle
from holdfast.agent.manifest import Manifest
from holdfast.codec.operations import decode_operations
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.errors import HoldfastError
from holdfast.run.records import decode_record
from holdfast.store.catalog import ChunkRow, chunk_digest, digest, row_sum
from holdfast.store.packs import Packs
from holdfast.store.schema import TABLE_NAMES
from holdfast.store.witness import initial, newest
from tests.faults import damage, rich
from tests.faults.campaign import memory, quiet, remembering
from tests.faults.isolated import isolated


@dataclass(frozen=True)
class Parser:
    """``parse`` gets mutated bytes. ``weight``: how much longer than the others one takes, so that fewer are tried."""

    name: str
    seeds: Callable[[], list[bytes]]
    parse: Callable[[bytes, Path], None]
    weight: int = 1
    store: bool = False  # whether it changes copies of a store, ``original``


# -- seeds and parsers ----------------------------------------------------------------------------------


@cache
def sample() -> dict[str, list[tuple[Any, ...]]]:
    """The rows of a store with every kind of record, and its path's files."""

    def make(_say: Any) -> dict[str, list[tuple[Any, ...]]]:
        with memory() as folder, remembering(folder / "state"), quiet():
            rich.build(folder / "store")
            connection = apsw.Connection(str(folder / "store" / "store.db"))
            found = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in TABLE_NAMES}
            connection.close()
            found["packs"] = [(path.read_bytes(),) for path in (folder / "store" / "packs").iterdir()]
            return found

    return isolated(make)


def column(table: str, index: int) -> Callable[[], list[bytes]]:
    return lambda: sorted({bytes(row[index]) for row in sample()[table]}, key=len)[:120]


def plain_values() -> list[bytes]:
    values = [
        None, True, 7, -(2**70), 1.5, "text", b"bytes", [1, [2]], {"a": {"b": 1}}, {1: 2}, (1, "x"), {1, 2},
        frozenset("ab"),
        bytearray(b"x"), 1j, range(3), uuid.UUID(int=1), Path("/x"), {"deep": [[[[[1]]]]]}, [{"role": "user"}] * 3,
    ]  # fmt: skip
    return [encode(value) for value in values] + column("metadata", 1)()[:3]


def parse_value(data: bytes, _folder: Path) -> None:
    for inert in (False, True):
        try:
            value = decode(data, REGISTRY, inert=inert)
        except HoldfastError:
            continue
        encode(value)


def parse_operations(data: bytes, _folder: Path) -> None:
    decode_operations(data, 0, None)


def parse_manifest(data: bytes, _folder: Path) -> None:
    Manifest.decode(data)


def parse_record(data: bytes, _folder: Path) -> None:
    decode_record(data)


def parse_witness(data: bytes, _folder: Path) -> None:
    newest(data)


def records() -> list[bytes]:
    return [bytes(row[5]) for row in sample()["effect"]] or [encode({"t": "note", "at": 1, "what": "x"})]


def parse_pack(data: bytes, folder: Path) -> None:
    """A pack of which both the file and the row that speaks of it come from elsewhere."""
    packs = Packs(folder)
    pack = uuid.UUID(int=7).bytes
    packs.path(pack).write_bytes(data)
    stored = data[4096:]
    length = int.from_bytes(data[-4:]) % (9 * 2**20) if len(data) >= 4 else 0
    for row in (
        ChunkRow(chunk_digest(stored), 0, 4096, len(stored), len(stored)),
        ChunkRow(chunk_digest(stored), 0, 4096, length, len(stored)),
        ChunkRow(bytes(32), 0, length, 2**60, 2**60),
    ):
        try:
            packs.read(pack, row)
        except HoldfastError:
            continue


def packs() -> list[bytes]:
    bomb = zstandard.ZstdCompressor().compress(bytes(8 * 2**20))
    return [row[0][:12_000] for row in sample()["packs"]] + [b"HFPACK01".ljust(4096, b"\0") + bomb]


@cache
def dump_bytes() -> bytes:
    with memory() as folder:
        program = (
            "import sys\nfrom holdfast.crash import capture\nx = {'a': [1, 'two']}\ntry:\n    1 / 0\n"
            "except Exception as error:\n    capture('small', error=error, to=sys.argv[1])\n"
        )
        subprocess.run([sys.executable, "-c", program, str(folder / "d")], check=True)
        (path,) = (folder / "d").glob("*.hfdump")
        return path.read_bytes()


def explore_dump(path: Path) -> None:
    """Everything that a reader can ask of a dump."""
    from holdfast.crash import kinds, open_dump

    with open_dump(path) as dump:
        for name in ("parts", "missing", "complete", "exceptions", "threads", "tasks", "sources", "logs"):
            _ask(lambda name=name: getattr(dump, name))
        _ask(lambda: [list(inert.children()) for inert in dump.objects()])
        _ask(lambda: list(dump.search("two")))
        for kind in kinds.PARTS:
            _ask(lambda kind=kind: (dump.part(kind), dump.extras(kind)))


def _ask(question: Callable[[], Any]) -> None:
    try:
        question()
    except HoldfastError:
        return


def parse_dump(data: bytes, folder: Path) -> None:
    path = folder / "hostile.hfdump"
    path.write_bytes(data)
    explore_dump(path)


def dump_payloads() -> list[bytes]:
    return [kind + zstandard.ZstdDecompressor().decompress(body) for kind, body in _chunks(dump_bytes())]


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    from holdfast.crash.dumpfile import HEADER, MAGIC

    at = len(MAGIC)
    while at + HEADER.size <= len(data):
        fields = HEADER.unpack(data[at : at + HEADER.size])
        yield fields[1], data[at + HEADER.size : at + HEADER.size + fields[5]]
        at += HEADER.size + fields[5]


def parse_dump_payload(data: bytes, folder: Path) -> None:
    """One chunk is the mutated one, its sums are right; the others are as they were."""
    from holdfast.crash.dumpfile import HEADER, MAGIC

    total = lambda part: blake3(b"holdfast.dump\0" + part).digest()[:16]  # noqa: E731
    built = bytearray(MAGIC)
    compress = zstandard.ZstdCompressor().compress
    for number, (kind, body) in enumerate(_chunks(dump_bytes())):
        if kind == data[:4]:
            body = compress(data[4:])  # noqa: PLW2901
            raw = len(data) - 4
        else:
            raw = zstandard.frame_content_size(body)
        front = HEADER.pack(b"HFck", kind, number, 1, 0, len(body), raw, total(body), bytes(16))[:-16]
        built += front + total(front) + body
    parse_dump(bytes(built), folder)


def row_seeds() -> list[bytes]:
    """Table, row and column to change, then the new content of that column."""
    found = []
    for number, table in enumerate(TABLE_NAMES):
        for index, row in enumerate(sample()[table][:12]):
            for place, value in enumerate(row):
                if isinstance(value, bytes):
                    found.append(bytes([number, index, place]) + value)
    return found


def parse_row(data: bytes, folder: Path) -> None:
    """Somebody who can write the database writes a row, its sum included. Whoever reads it must not be harmed."""
    if len(data) < 3:
        return
    table = TABLE_NAMES[data[0] % len(TABLE_NAMES)]

    def change(row: list[Any]) -> None:
        row[data[2] % len(row)] = data[3:]

    write_row(folder, table, data[1], change)
    explore_store(folder)


def write_row(folder: Path, table: str, number: int, change: Callable[[list[Any]], None]) -> None:
    """A copy of the original in which one row of a table is another, with the sum that fits."""
    path = folder / "store"
    if not path.exists():
        shutil.copytree(folder / "original", path)
    shutil.copyfile(folder / "original" / "store.db", path / "store.db")
    for name in ("store.db-wal", "store.db-shm"):
        (path / name).unlink(missing_ok=True)
    with damage.database(path) as connection:
        names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
        if not rows:
            return
        old = rows[number % len(rows)]
        row = list(old)
        change(row)
        if "sum" in names and row[-1] == old[-1]:
            row[-1] = row_sum(table, *row[:-1])
        where = " AND ".join(f"{name} IS ?" for name in names)
        values = ", ".join(f"{name} = ?" for name in names)
        with suppress(apsw.Error):
            connection.execute(f"UPDATE {table} SET {values} WHERE {where}", (*row, *old))


def explore_store(folder: Path) -> None:
    """Everything that a reader can ask of a store, and what somebody does who finds it damaged."""
    path = folder / "store"
    with rich.small_limits():
        with suppress(HoldfastError), damage.open_damaged(path, readonly=True) as store:
            _ask(store.verify)
            _ask(lambda: rich.export(store))
            _ask(lambda: [ask_agent(store, info.name) for info in store.agents()])
            _ask(lambda: store.retain(holdfast.Policy(last=1), dry_run=True))
        _ask(lambda: holdfast.repair(path))


def ask_agent(store: holdfast.Store, name: str) -> None:
    agent = store.agent(name, readonly=True)
    for question in (
        lambda: {section: agent.state.raw_section(section) for section in agent.state},
        lambda: [(c.label, c.metadata, c.validity) for c in agent.log(all=True)],
        agent.branches, agent.tags, agent.abandoned, agent.effects,
    ):  # fmt: skip
        _ask(question)


BODIES = {
    "agent": "body", "branch": "body", "tag": "body", "validity": "body", "event": "body", "effect": "body",
    "seal": "places", "tail": "data", "metadata": "data", "checkpoint": "manifest", "store": "value",
}  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**63, -(2**70), 1e308, float("nan"), "", "text", b"", b"x" * 32, [], [None], [[1]], {},
    {"name": 1}, [[1, 2]], [["main", b""]],
)  # fmt: skip


def parse_body(data: bytes, folder: Path) -> None:
    """A row's content is sound, its sum fits, and something in it is missing, or is of another kind."""
    chance = random.Random(data)
    table = chance.choice(sorted(BODIES))

    def change(row: list[Any]) -> None:
        at = {"store": 1}.get(table) or next(
            place for place, (_, name, *_) in enumerate(columns_of(folder, table)) if name == BODIES[table]
        )
        with suppress(HoldfastError):
            row[at] = encode(otherwise(decode(row[at], inert=True), chance))

    write_row(folder, table, chance.randrange(1_000), change)
    explore_store(folder)


@cache
def columns_of(folder: Path, table: str) -> list[tuple[Any, ...]]:
    return damage.sql(folder / "original", f"PRAGMA table_info({table})")


def otherwise(value: Any, chance: random.Random) -> Any:
    """The same value, but for one thing somewhere in it."""
    inside = isinstance(value, (dict, list)) and value and chance.random() < 0.8
    if not inside:
        return chance.choice(OTHERS)
    place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    changed = value.copy()
    what = chance.random()
    if what < 0.3:
        del changed[place]
    elif what < 0.4 and isinstance(changed, list):
        changed.append(chance.choice((changed[place], *OTHERS)))
    else:
        changed[place] = otherwise(changed[place], chance)
    return changed


@cache
def bundle_bytes() -> bytes:
    """A whole agent, effects included, as one file."""

    def make(_say: Any) -> bytes:
        with memory() as folder, remembering(folder / "state"), quiet():
            rich.build(folder / "store")
            with rich.small_limits(), holdfast.open(folder / "store", types=rich.TYPES) as store:
                store.export(folder / "file", ["second", "actor"])
            return (folder / "file").read_bytes()

    return isolated(make)


def _frames() -> list[bytes]:
    """What the frames of that file hold, expanded."""
    data, at, found = bundle_bytes(), len(bundle.MAGIC), []
    while at < len(data):
        how, stored, _ = bundle._HEADER.unpack_from(data, at)
        body = data[at + bundle._HEADER.size : at + bundle._HEADER.size + stored]
        found.append(zstandard.ZstdDecompressor().decompress(body) if how else body)
        at += bundle._HEADER.size + stored + bundle.CHECK_BYTES
    return found


def bundle_parts() -> list[bytes]:
    return [bytes([number]) + body for number, body in enumerate(_frames()[:256])]


def parse_bundle(data: bytes, folder: Path) -> None:
    path = folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    (folder / "bundle").write_bytes(data)
    with rich.small_limits(), holdfast.open(path, types=rich.TYPES) as store:
        try:
            store.import_bundle(folder / "bundle")
        except HoldfastError:
            if store.agents():
                raise AssertionError("a refused bundle left an agent behind") from None
            raise


def parse_bundle_part(data: bytes, folder: Path) -> None:
    """One frame is the mutated one, and all checks are right."""
    bodies = _frames()
    if data:
        bodies[data[0] % len(bodies)] = data[1:]
    built, check = bytearray(bundle.MAGIC), b""
    for body in bodies:
        header = bundle._HEADER.pack(0, len(body), len(body))
        check = digest(b"holdfast.bundle", check + header + body)[: bundle.CHECK_BYTES]
        built += header + body + check
    parse_bundle(bytes(built), folder)


PARSERS = [
    Parser("values", plain_values, parse_value),
    Parser("operations", column("checkpoint", 7), parse_operations),
    Parser("manifests", column("checkpoint", 6), parse_manifest),
    Parser("records", records, parse_record),
    Parser("witness", lambda: [initial()], parse_witness),
    Parser("packs", packs, parse_pack, 20),
    Parser("dumps", lambda: [dump_bytes()[:30_000]], parse_dump, 20),
    Parser("dump parts", dump_payloads, parse_dump_payload, 40),
    Parser("bundles", lambda: [bundle_bytes()], parse_bundle, 200),
    Parser("bundle parts", bundle_parts, parse_bundle_part, 200),
    Parser("rows", row_seeds, parse_row, 200, store=True),
    Parser("bodies", lambda: [b"seed"], parse_body, 200, store=True),
]
