"""Hostile files: every parser is fed mutated bytes. It may refuse them with a declared error, and nothing else.

Each parser has seeds of real data, and is given mutations of them, of its own kind where a checksum would otherwise
stop everything at the door: then only what is inside is mutated and the envelope is made anew. Inputs that lead to an
outcome not seen before join the seeds. The parser runs in a process of its own with 256 MiB more than it had and one
second of processor time for an input.
"""

from __future__ import annotations

import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from tests.faults import rich
from tests.faults.campaign import Task, campaign, memory, quiet, remembering
from tests.faults.isolated import Died, isolated

MEMORY_BYTES = 256 * 2**20
TIME_S = 1.0
PER_PROCESS = 20_000
CORPUS_MAX = 400
INTERESTING = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x00\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x14",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xc7\x00\x16",
    b"\xd8\x28" + bytes(16), b"\x91" * 200, b"\x81\xa1a" * 120,
)  # fmt: skip


class Slow(BaseException):
    """An input took more processor time than it may."""


@dataclass(frozen=True)
class Parser:
    """``parse`` gets mutated bytes. ``weight``: how much longer than the others one takes, so that fewer are tried."""

    name: str
    seeds: Callable[[], list[bytes]]
    parse: Callable[[bytes, Path], None]
    weight: int = 1


# -- mutation -------------------------------------------------------------------------------------------


def mutate(data: bytes, corpus: list[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(1 << chance.randrange(4)):
        what = chance.randrange(9)
        at = chance.randrange(len(changed) + 1)
        if what == 0 and changed:
            changed[at - 1] ^= 1 << chance.randrange(8)
        elif what == 1 and changed:
            changed[at - 1] = chance.randrange(256)
        elif what == 2:
            del changed[at : at + chance.randrange(1, 9)]
        elif what == 3:
            changed[at:at] = chance.choice(INTERESTING)
        elif what == 4:
            piece = chance.choice(INTERESTING)
            changed[at : at + len(piece)] = piece
        elif what == 5:
            other = chance.choice(corpus)
            start = chance.randrange(len(other) + 1)
            changed[at : at + chance.randrange(40)] = other[start : start + chance.randrange(1, 64)]
        elif what == 6:
            changed[at:at] = changed[at : at + chance.randrange(1, 32)] * chance.randrange(1, 4)
        elif what == 7:
            del changed[at:]
        elif len(changed) >= 8:
            at = chance.randrange(len(changed) - 7)
            size = chance.choice((1, 2, 4, 8))
            value = int.from_bytes(changed[at : at + size]) + chance.choice((-1, 1, -16, 16, 255))
            changed[at : at + size] = (value % (1 << 8 * size)).to_bytes(size)
    return bytes(changed[:200_000])


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
    path = folder / "store"
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder / "state", ignore_errors=True)
    shutil.copytree(folder / "original", path)
    connection = apsw.Connection(str(path / "store.db"))
    names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    rows = connection.execute(f"SELECT * FROM {table}").fetchall()
    if rows:
        row = list(rows[data[1] % len(rows)])
        old = list(row)
        row[data[2] % len(row)] = data[3:]
        if "sum" in names and names[data[2] % len(row)] != "sum":
            row[-1] = row_sum(table, *row[:-1])
        where = " AND ".join(f"{name} IS ?" for name in names)
        values = ", ".join(f"{name} = ?" for name in names)
        with suppress(apsw.Error):
            connection.execute(f"UPDATE {table} SET {values} WHERE {where}", (*row, *old))
    connection.close()
    with rich.small_limits():
        try:
            store = holdfast.open(path, create=False, types=rich.TYPES, readonly=True)
        except HoldfastError:
            return
        with store:
            store.verify()
            _ask(lambda: rich.export(store))


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
    Parser("rows", row_seeds, parse_row, 200),
]


# -- the loop -------------------------------------------------------------------------------------------


@contextmanager
def bounded() -> Iterator[None]:
    """Little more memory than now, and an alarm on processor time that ``input_begins`` sets."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))

    def late(_number: int, _frame: types.FrameType | None) -> None:
        raise Slow

    signal.signal(signal.SIGVTALRM, late)
    yield


def feed(
    parser: Parser, corpus: list[bytes], count: int, seed: int
) -> tuple[int, list[str], list[bytes], dict[str, int]]:
    """``count`` mutated inputs. Returns how many, what was wrong, inputs worth keeping, and the outcomes."""
    chance = random.Random(seed)
    wrong: list[str] = []
    kept: list[bytes] = []
    outcomes: dict[str, int] = {}
    known: set[str] = set()
    done = 0
    with memory() as folder, remembering(folder / "state"), quiet():
        if parser.name == "rows":
            rich.build(folder / "original")
        with bounded():
            for _ in range(count):
                data = mutate(chance.choice(corpus), corpus, chance)
                outcome = one(parser, data, folder)
                done += 1
                kind = outcome.partition(":")[0]
                outcomes[kind] = outcomes.get(kind, 0) + 1
                shape = re.sub(r"[0-9a-f]{6,}|\d+", "#", outcome)[:120]
                if shape not in known:
                    known.add(shape)
                    kept.append(data)
                    if kind.startswith("!"):
                        wrong.append(f"{parser.name}: {outcome} from {data[:300].hex()}")
    return done, wrong, kept[:50], outcomes


def one(parser: Parser, data: bytes, folder: Path) -> str:
    signal.setitimer(signal.ITIMER_VIRTUAL, TIME_S * (30 if parser.weight >= 200 else 1))
    try:
        parser.parse(data, folder)
    except HoldfastError as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    except Slow:
        return "!too slow"
    except MemoryError:
        return "!too much memory"
    except Exception as error:  # whatever it is, it was not declared
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"!{type(error).__name__}: {error} at {Path(where.filename).name}:{where.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "accepted"


@campaign("hostile", "hostile files", "inputs", ci=20_000, soak=100_000_000)
def hostile(task: Task) -> None:
    """Mutations of real data for every parser, and rows written by somebody who knows the sums."""
    corpora = {parser.name: parser.seeds() for parser in PARSERS}
    share = task.count // len(PARSERS)
    turn = 0
    while not task.over:
        for parser in PARSERS:
            if task.over:
                return
            turn += 1
            count = max(10, min(PER_PROCESS, share) // parser.weight)
            corpus = corpora[parser.name]
            try:
                done, wrong, kept, outcomes = isolated(
                    lambda _say, parser=parser, corpus=corpus, count=count, turn=turn: feed(
                        parser, corpus, count, task.seed * 1_000_003 + turn
                    ),
                    limit_s=900,
                )
            except (AssertionError, Died) as error:
                task.broke(f"{parser.name}, turn {turn}: {error}")
                task.tried()
                continue
            corpora[parser.name] = (corpus + kept)[:CORPUS_MAX]
            for text in wrong:
                task.broke(text)
            task.tried(parser.name, done)
            task.details["accepted"] += outcomes.get("accepted", 0)
