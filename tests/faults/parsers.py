"""The parsers that read what may come from elsewhere, each with seeds of real data and what is done with an input.

Where a checksum would stop every change at the door, only what is inside is the input, and the envelope is made anew.
"""

from __future__ import annotations

import io
import random
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import apsw
import zstandard
from blake3 import blake3
from ormsgpack import packb, unpackb

import holdfast
from holdfast.agent import bundle, frames
from holdfast.codec.operations import decode_operations
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.errors import HoldfastError
from holdfast.run.records import decode_record
from holdfast.store import keys, leases
from holdfast.store.cipher import PLAIN, digest, uncompressed
from holdfast.store.manifest import (
    Manifest,
    Packed,
    Segment,
    identity,
    mark_of,
    pack_payload,
    split_payload,
)
from holdfast.store.objects import Folder
from holdfast.store.packs import ALIGN_BYTES, MAGIC, Packs, file_name
from holdfast.store.rows import Place, chunk_digest, node_digest, read_body
from holdfast.store.tables import TABLES
from holdfast.store.witness import initial, remembered, witness_report
from tests.faults import damage, rich
from tests.faults.campaign import quiet, remembering
from tests.faults.isolated import isolated
from tests.limits import limits
from tests.memory import memory


@dataclass(frozen=True)
class Parser:
    """``parse`` gets mutated bytes. ``weight``: how much longer than the others one takes, so that fewer are tried."""

    name: str
    seeds: Callable[[], list[bytes]]
    parse: Callable[[bytes, Path], None]
    weight: int = 1
    store: bool = False  # whether it changes copies of a store, ``original``


# -- seeds and parsers ----------------------------------------------------------------------------------


def build(path: Path) -> None:
    """A store with every kind of record, and a policy."""
    rich.build(path)
    with holdfast.open(path, types=rich.TYPES) as store:
        store.set_policy(holdfast.Policy(last=1_000, labels=["a*"]))
        store.set_policy(holdfast.Policy(last=1_000), "second")


@cache
def sample() -> dict[str, list[tuple[Any, ...]]]:
    """Its rows and packs."""

    def make(_say: Any) -> dict[str, list[tuple[Any, ...]]]:
        with memory() as folder, remembering(folder / "state"), quiet():
            build(folder / "store")
            found = {name: damage.sql(folder / "store", f"SELECT * FROM {name}") for name in TABLES}
            found["packs"] = [(path.read_bytes(),) for path in (folder / "store" / "packs").iterdir()]
            return found

    return isolated(make)


def column(table: str, name: str) -> list[bytes]:
    at = TABLES[table].names.index(name)
    return sorted({bytes(row[at]) for row in sample()[table]}, key=len)[:120]


def payloads() -> list[tuple[bytes, bytes]]:
    """Manifests and operations, loose ones and those of segments."""
    folded = [Segment(Packed(*row[1:5]), nodes) for row in sample()["segment"]]
    more = [(segment.manifests[at], segment.operations(at)) for segment in folded for at in range(len(segment.members))]
    return [*map(split_payload, column("loose", "data")), *more]


@cache
def all_nodes() -> dict[bytes, bytes]:
    raw = [uncompressed(data, 2**20) for data in column("node", "data")]
    return {node_digest(one): one for one in raw}


def nodes(digests: Iterable[bytes]) -> dict[bytes, bytes]:
    return {one: all_nodes()[one] for one in digests if one in all_nodes()}


def plain_values() -> list[bytes]:
    values = [
        None, True, 7, -(2**70), 1.5, "text", b"bytes", [1, [2]], {"a": {"b": 1}}, {1: 2}, (1, "x"), {1, 2},
        frozenset("ab"),
        bytearray(b"x"), 1j, range(3), uuid.UUID(int=1), Path("/x"), {"deep": [[[[[1]]]]]}, [{"role": "user"}] * 3,
    ]  # fmt: skip
    return [encode(value) for value in values]


def parse_value(data: bytes, _folder: Path) -> None:
    for inert in (False, True):
        try:
            value = decode(data, REGISTRY, inert=inert)
        except HoldfastError:
            continue
        encode(value)


def parse_operations(data: bytes, _folder: Path) -> None:
    decode_operations(data, 0)


def parse_manifest(data: bytes, _folder: Path) -> None:
    made = Manifest.decode(data)
    if Manifest.decode(made.encode()) != made:
        raise AssertionError("a manifest that is read is not the one that it is written as")


def parse_payload(data: bytes, folder: Path) -> None:
    manifest, operations = split_payload(data)
    parse_manifest(manifest, folder)
    parse_operations(operations, folder)


_LENGTH = struct.Struct(">I")


def join(parts: Iterable[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def cut(data: bytes, count: int) -> list[bytes]:
    """So many parts, whatever their lengths say."""
    found, at = [], 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(data[at : at + 4])
        found.append(data[at + 4 : end])
        at = min(end, len(data))
    return found


def segments() -> list[bytes]:
    """As they are stored; and with frames that are opened, and made anew around what is changed."""
    rows = [row[1:5] for row in sample()["segment"]]
    expand = zstandard.ZstdDecompressor().decompress
    opened = []
    for row in rows:
        made = Segment(Packed(*row), nodes)
        operations = join(made.operations(at) for at in range(len(made.members)))
        opened.append(b"\1" + join([row[0], row[1], expand(row[2]), operations]))
    return [*(b"\0" + join(row) for row in rows), *opened]


def parse_segment(data: bytes, folder: Path) -> None:
    members, refs, *both = cut(data[1:], 4)
    if data[:1] == b"\1":
        both = [zstandard.ZstdCompressor().compress(part) for part in both]
    made = Segment(Packed(members, refs, *both), nodes)
    for at, manifest in enumerate(made.manifests):
        _ask(lambda manifest=manifest: parse_manifest(manifest, folder))
        _ask(lambda at=at: parse_operations(made.operations(at), folder))
    _ask(lambda: made.refs)


def parse_record(data: bytes, _folder: Path) -> None:
    decode_record(data)


def bodies() -> list[bytes]:
    """Of agents, branches, judgements and entries of the log."""
    return [data for table in ("agent", "branch", "validity", "log") for data in column(table, "body")]


def parse_small(data: bytes, _folder: Path) -> None:
    read_body(data, "a row")


def parse_witness(data: bytes, folder: Path) -> None:
    """A store's own witness, and what a user has seen of stores."""
    own = uuid.UUID(int=7).bytes
    (folder / "witness").write_bytes(data)
    witness_report(folder)
    (folder / "state" / "holdfast").mkdir(parents=True, exist_ok=True)
    (folder / "state" / "holdfast" / "seen").write_bytes(own + data)
    remembered(folder, own)


def parse_holder(data: bytes, folder: Path) -> None:
    (folder / "lock").write_bytes(data)
    leases.busy(leases._holder(folder / "lock", PLAIN))


def key_lists() -> list[bytes]:
    secrets = keys.secret_of(bytes(32)), keys.secret_of("a passphrase")
    made, master = keys.new_keys(bytes(16), secrets[0], 1)
    made, _ = made.with_slot(master, secrets[1], 2)
    return [made.encode()[12:-32]]


def parse_key_list(data: bytes, _folder: Path) -> None:
    """What an encrypted store or bundle begins with; its length and sum fit."""
    whole = b"HFKEYS01" + _LENGTH.pack(len(data)) + data
    whole += digest(b"keys", whole)
    found = keys.BundleKeys.read(io.BytesIO(whole + bytes(16)).read)
    found.open(keys.secret_of(bytes(32)))


class Told:
    """A catalog from elsewhere, as far as packs ask: where a chunk is."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def chunks(self, digests: Iterable[bytes]) -> dict[bytes, Place]:
        return dict.fromkeys(digests, self._place)


def parse_pack(data: bytes, folder: Path) -> None:
    """A pack of which both the file and the row that speaks of it come from elsewhere."""
    pack = uuid.UUID(int=7).bytes
    (folder / file_name(pack)).write_bytes(data)
    packs = Packs(PLAIN, Folder(folder))
    stored = data[ALIGN_BYTES:]
    length = int.from_bytes(data[-4:]) % (9 * 2**20) if len(data) >= 4 else 0
    for name, place in (
        (chunk_digest(stored), Place(pack, ALIGN_BYTES, len(stored), len(stored))),
        (chunk_digest(stored), Place(pack, ALIGN_BYTES, length, len(stored))),
        (bytes(32), Place(pack, length // ALIGN_BYTES * ALIGN_BYTES, 2**26, 2**26)),
        (bytes(32), Place(pack, length, 2**60, 2**60)),
    ):
        _ask(lambda name=name, place=place: list(packs.read(Told(place), [name])))


def packs() -> list[bytes]:
    bomb = zstandard.ZstdCompressor().compress(bytes(8 * 2**20))
    return [row[0][:12_000] for row in sample()["packs"]] + [MAGIC.ljust(ALIGN_BYTES, b"\0") + bomb]


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


NAMES = list(TABLES)


def row_seeds() -> list[bytes]:
    """Table, row and column to change, then the new content of that column."""
    found = []
    for number, table in enumerate(NAMES):
        for index, row in enumerate(sample()[table][:12]):
            for place, value in enumerate(row):
                if isinstance(value, bytes):
                    found.append(bytes([number, index, place]) + value)
    return found


def parse_row(data: bytes, folder: Path) -> None:
    """Somebody who can write the database writes a row, its sum included. Whoever reads it must not be harmed."""
    if len(data) < 3:
        return

    def change(row: dict[str, Any]) -> None:
        name = list(row)[data[2] % len(row)]
        number = isinstance(row[name], int) and data[3] % 4 if len(data) > 3 else 0
        row[name] = int.from_bytes(data[3:11], signed=True) if number else data[3:]

    write_row(folder, NAMES[data[0] % len(NAMES)], data[1], change)
    explore_store(folder)


def write_row(folder: Path, table: str, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """A copy of the original in which one row of a table is another, with the sum that fits."""
    path = folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder / "original", path)
    names = TABLES[table].names
    with damage.database(path) as connection:
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
        if not rows:
            return
        old = rows[number % len(rows)]
        row = dict(zip(names, old, strict=True))
        change(row)
        if "sum" in row and row["sum"] == old[-1]:
            with suppress(HoldfastError):  # numbers that no sum can be made of
                row["sum"] = PLAIN.stored(table, *list(row.values())[:-1])[-1]
        where = " AND ".join(f"{name} IS ?" for name in names)
        values = ", ".join(f"{name} = ?" for name in names)
        with suppress(apsw.Error):
            connection.execute(f"UPDATE {table} SET {values} WHERE {where}", (*row.values(), *old))


def explore_store(folder: Path) -> None:
    """Everything that a reader can ask of a store, and what somebody does who finds it damaged."""
    path = folder / "store"
    with rich.small_limits():
        with suppress(HoldfastError), damage.open_damaged(path, readonly=True) as store:
            _ask(store.verify)
            _ask(lambda: rich.export(store))
            _ask(lambda: [ask_agent(store, info.name) for info in store.agents()])
            _ask(lambda: store.retain(holdfast.Policy(last=1), dry_run=True))
            _ask(lambda: store.retain(dry_run=True))
            _ask(store.runs)
            _ask(lambda: store.export(folder / "bundle", [info.name for info in store.agents()], replace=True))
        _ask(lambda: mended(path))
        _ask(lambda: go_on(folder))


def mended(path: Path) -> None:
    report = holdfast.repair(path)
    if any(text.startswith("in the new store") for text in report.problems):
        raise AssertionError(f"a repaired store is not whole: {report.problems}")


def go_on(folder: Path) -> None:
    """What somebody does who finds nothing wrong."""
    shutil.rmtree(folder / "other", ignore_errors=True)
    with damage.open_damaged(folder / "store") as store, holdfast.open(folder / "other", types=rich.TYPES) as other:
        for name in ("first@example.com", "second", "actor", "heir", "short"):
            _ask(lambda name=name: work_on(store, name))
        _ask(lambda: store.push(other))
        _ask(lambda: store.retain(holdfast.Policy(last=2)))
        _ask(lambda: store.remove("second"))


def work_on(store: holdfast.Store, name: str) -> None:
    agent = store.agent(name)
    agent.state["more"] = [name]
    agent.checkpoint("more")
    for change in (agent.undo, lambda: agent.rollback("more"), lambda: agent.tag("more"), lambda: agent.branch("more")):
        _ask(change)


def ask_agent(store: holdfast.Store, name: str) -> None:
    agent = store.agent(name, readonly=True)
    for question in (
        lambda: {section: agent.state.raw_section(section) for section in agent.state},
        lambda: [(c.label, c.metadata, c.validity) for c in agent.log(all=True)],
        agent.branches, agent.tags, agent.abandoned, agent.effects,
    ):  # fmt: skip
        _ask(question)


BODIES = [(table, name) for table in ("agent", "branch", "tag", "validity", "log") for name in ("body",)]
BODIES += [("segment", "members"), ("record", "body"), ("loose", "data"), ("node", "data"), ("store", "value")]
OTHERS: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**63, -(2**63), 1e308, float("nan"), "", "text", b"", b"x" * 32, [], [None], [[1]], {},
    {"name": 1}, [[1, 2]], [["main", b""]],
)  # fmt: skip


def parse_body(data: bytes, folder: Path) -> None:
    """A row's content is sound, all sums and digests fit, and something in it is missing, or is of another kind."""
    chance = random.Random(data)
    table, name = chance.choice(BODIES)

    def change(row: dict[str, Any]) -> None:
        with suppress(HoldfastError, ValueError):
            if table == "record":
                row["body"] = encode(otherwise(decode(row["body"], inert=True), chance))
                row["about"] = digest(b"record", row["body"]) + row["about"][32:]
            elif table == "loose":
                manifest, operations = split_payload(row["data"])
                raw = packb(otherwise(unpackb(manifest), chance))
                row["data"], row["mark"] = pack_payload(raw, operations), mark_of(identity(raw))
            elif table == "node":
                raw = uncompressed(row["data"], 2**20)
                raw = raw[:2] + encode(otherwise(decode(raw[2:-4], inert=True), chance)) + raw[-4:]
                row["data"], row["digest"] = b"\0" + raw, node_digest(raw)
            else:
                row[name] = packb(otherwise(unpackb(row[name]), chance))

    write_row(folder, table, chance.randrange(1_000), change)
    explore_store(folder)


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
    """Whole agents, effects included, as one file; each frame is a part of its own."""

    def make(_say: Any) -> bytes:
        with memory() as folder, remembering(folder / "state"), quiet():
            build(folder / "store")
            with limits({"PART_BYTES": 1}), holdfast.open(folder / "store", types=rich.TYPES) as store:
                store.export(folder / "file", ["second", "actor"])
            return (folder / "file").read_bytes()

    return isolated(make)


def parts() -> list[bytes]:
    """What the parts of that file hold, expanded."""
    data, at, found = bundle_bytes(), len(bundle.MAGIC), []
    while at < len(data):
        how, stored, _ = bundle._HEADER.unpack_from(data, at)
        body = data[at + bundle._HEADER.size : at + bundle._HEADER.size + stored]
        found.append(zstandard.ZstdDecompressor().decompress(body) if how else body)
        at += bundle._HEADER.size + stored + bundle.CHECK_BYTES
    return found


def parse_frames(data: bytes, _folder: Path) -> None:
    for frame in frames.decoded(data):
        if isinstance(frame, frames.Refs):
            frames.check_refs(frame)


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
        report = store.verify()
        if not report.ok:
            raise AssertionError(f"a bundle was taken that is not whole: {report}")


def parse_bundle_part(data: bytes, folder: Path) -> None:
    """One part is the mutated one, and all checks are right."""
    bodies = parts()
    if data:
        bodies[data[0] % len(bodies)] = data[1:]
    parse_bundle(bundled(bodies), folder)


def parse_bundle_frame(data: bytes, folder: Path) -> None:
    """In one frame something is missing, or is of another kind, and all checks are right."""
    chance = random.Random(data)
    bodies = parts()
    at = chance.randrange(len(bodies))
    changed = unpackb(bodies[at])
    number = chance.randrange(len(changed))
    changed[number] = otherwise(changed[number], chance)
    bodies[at] = packb(changed)
    parse_bundle(bundled(bodies), folder)


def bundled(bodies: list[bytes]) -> bytes:
    built, check = bytearray(bundle.MAGIC), b""
    for body in bodies:
        header = bundle._HEADER.pack(0, len(body), len(body))
        check = digest(b"bundle", check, header, body)[: bundle.CHECK_BYTES]
        built += header + body + check
    return bytes(built)


PARSERS = [
    Parser("values", plain_values, parse_value),
    Parser("operations", lambda: [operations for _, operations in payloads()], parse_operations),
    Parser("manifests", lambda: [manifest for manifest, _ in payloads()], parse_manifest),
    Parser("payloads", lambda: column("loose", "data"), parse_payload),
    Parser("segments", segments, parse_segment, 5),
    Parser("records", lambda: column("record", "body"), parse_record),
    Parser("small maps", bodies, parse_small),
    Parser("witness", lambda: [initial()], parse_witness, 5),
    Parser("lock files", lambda: [b'{"pid": 1, "host": "h", "program": "p"}', b"[" * 4096], parse_holder, 5),
    Parser("key lists", key_lists, parse_key_list),
    Parser("packs", packs, parse_pack, 20),
    Parser("dumps", lambda: [dump_bytes()[:30_000]], parse_dump, 20),
    Parser("dump parts", dump_payloads, parse_dump_payload, 40),
    Parser("frames", parts, parse_frames),
    Parser("bundles", lambda: [bundle_bytes()], parse_bundle, 200),
    Parser("bundle parts", lambda: [bytes([at]) + body for at, body in enumerate(parts())], parse_bundle_part, 200),
    Parser("bundle frames", lambda: [bytes([at]) for at in range(len(parts()))], parse_bundle_frame, 200),
    Parser("rows", row_seeds, parse_row, 200, store=True),
    Parser("bodies", lambda: [b"seed"], parse_body, 200, store=True),
]
