"""An independent reader of a Holdfast store, written from docs/format.md alone. It must not import holdfast.

``read(path)`` proves row sums, ids, the chain, nodes, chunks and values, and returns every state as plain data, and
every record of what happened outside.
Instances, enum members and NumPy values come as named tuples. Anything that does not fit raises ``Broken``.
"""

from __future__ import annotations

import copy
import sqlite3
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from contextlib import closing
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import zstandard
from blake3 import blake3
from msgspec import Raw, msgpack


class Broken(Exception):
    pass


class Instance(namedtuple("Instance", "type version form data")):  # noqa: PYI024
    __slots__ = ()

    def __hash__(self) -> int:  # frozen ones can be keys
        return hash(repr(self))


Member = namedtuple("Member", "type version name value")  # noqa: PYI024
Numpy = namedtuple("Numpy", "dtype shape data")  # noqa: PYI024


def digest(tag: str, data: bytes) -> bytes:
    return blake3(tag.encode() + b"\0" + data).digest()


def shown(value: Any) -> str:
    """Text that is equal exactly when values are, types and order included; the items of a set have none."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(shown, value))}"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(shown(key), shown(item)) for key, item in value.items()]}"
    return f"{type(value).__name__}{[*map(shown, value)]}" if isinstance(value, list | tuple | deque) else repr(value)


def expect(condition: object, what: str) -> None:
    if not condition:
        raise Broken(what)


# Section 1: values

SCOPES = {4, 20, 26, 27, 28, 29}
ALONE = {5, 6, 21}
MAPPINGS = {1, 27, 28, 29}
PATHS = {"posix": PosixPath, "windows": WindowsPath, "pure-posix": PurePosixPath, "pure-windows": PureWindowsPath}


def zone(found: Any) -> Any:
    if found is None or isinstance(found, str):
        return ZoneInfo(found) if found else None
    offset = timedelta(seconds=found[0], microseconds=found[1])
    return timezone(offset) if found[2] is None else timezone(offset, found[2])


def pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


class Values:
    """Decodes values; big containers and bulk values are looked up in ``store``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.scope: list[Any] | None = None

    def decode(self, data: bytes) -> Any:
        return msgpack.Decoder(ext_hook=self.extension).decode(data)

    def extension(self, code: int, view: memoryview) -> Any:
        data = bytes(view)
        outer = self.scope
        if code in ALONE or (code in SCOPES and outer is None):
            self.scope = None if code in ALONE else []
        try:
            return self.value(code, data)
        finally:
            self.scope = outer

    def value(self, code: int, data: bytes) -> Any:
        raw = {
            2: lambda: int.from_bytes(data, "big", signed=True), 3: lambda: data.decode("utf-8", "surrogatepass"),
            7: lambda: bytearray(data), 9: lambda: Decimal(data.decode("ascii")), 16: lambda: uuid.UUID(bytes=data),
            20: lambda: self.instance(data), 40: lambda: self.store.container(data),
        }  # fmt: skip
        if code in raw:
            return raw[code]()
        v = self.keyed(code, data) if code in MAPPINGS else self.decode(data)
        if code == 41:
            return self.store.bulk(*v)
        return {
            1: lambda: dict(pairs(v)), 4: lambda: tuple(v), 5: lambda: set(v), 6: lambda: frozenset(v),
            8: lambda: complex(*v), 10: lambda: Fraction(*v), 12: lambda: date(*v), 14: lambda: timedelta(*v),
            11: lambda: datetime(*v[:7], fold=v[7], tzinfo=zone(v[8])), 15: lambda: zone(v[0]),
            13: lambda: time(*v[:4], fold=v[4], tzinfo=zone(v[5])), 17: lambda: PATHS[v[0]](v[1]),
            18: lambda: range(*v), 21: lambda: Member(*v), 22: lambda: self.scope[v],
            24: lambda: Numpy(v[0], tuple(v[1]), v[2]), 25: lambda: Numpy(v[0], None, v[1]),
            26: lambda: deque(v[1:], v[0]), 27: lambda: OrderedDict(pairs(v)), 28: lambda: Counter(dict(pairs(v))),
            29: lambda: dict(pairs(v[1:])),
        }[code]()  # fmt: skip

    def keyed(self, code: int, data: bytes) -> list[Any]:
        """A mapping's payload: its keys are no part of the scope."""
        scope, found = self.scope, []
        for index, part in enumerate(msgpack.decode(data, type=list[Raw])):
            self.scope = None if index % 2 == (code == 29) else scope
            found.append(self.decode(part))
        self.scope = scope
        return found

    def instance(self, data: bytes) -> Instance:
        number = len(self.scope)
        self.scope.append(None)  # numbered before what is inside it
        made = self.scope[number] = Instance(*self.decode(data))
        return made


# Sections 2, 4 and 5: nodes, rows, chunks

TABLES = [
    "store", "agent", "branch", "tag", "checkpoint", "validity", "tail", "seal",
    "node", "metadata", "event", "pack", "chunk", "line", "effect",
]  # fmt: skip


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(sqlite3.connect(f"file:{path}/store.db?mode=ro", uri=True)) as db:
            expect(db.execute("PRAGMA application_id").fetchone() == (0x486F6C64,), "application id")
            expect(db.execute("PRAGMA user_version").fetchone() == (1,), "format version")
            rows = {table: db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in TABLES}
        for table in set(TABLES) - {"node", "tail", "metadata"}:
            for *columns, total in rows[table]:
                expect(digest("holdfast.row", msgpack.encode([table, *columns]))[:8] == total, f"sum of {table}")
        self.rows = rows
        self.nodes = {found: self.node(found, data) for _, found, data in rows["node"]}
        self.chunks = {row[0]: row for row in rows["chunk"]}
        self.packs = {p: uuid.UUID(bytes=name) for p, name, _, _ in rows["pack"]}
        self.values = Values(self)

    def node(self, found: bytes, data: bytes) -> bytes:
        raw = data[1:] if data[0] == 0 else zstandard.ZstdDecompressor().decompress(data[1:])
        expect(digest("holdfast.node", raw) == found, f"node {found.hex()}")
        return raw

    def items(self, found: bytes, kind: bytes) -> list[Any]:
        """All parts below a node, in order."""
        raw = self.nodes[found]
        expect(raw[:1] == kind, "kind of a node")
        if raw[1] > 0:
            parts = []
            for at in range(2, len(raw), 40):
                below = self.items(raw[at : at + 32], kind)
                expect(len(below) == int.from_bytes(raw[at + 32 : at + 40]) * (1 + (kind == b"d")), "number of items")
                parts += below
            return parts
        count = int.from_bytes(raw[-4:]) * (1 + (kind == b"d"))
        return self.values.decode(b"\xdd" + count.to_bytes(4) + raw[2:-4])

    def container(self, found: bytes) -> Any:
        kind = self.nodes[found][:1]
        items = self.items(found, kind)
        return {b"l": list, b"s": set, b"v": lambda one: one[0], b"d": lambda flat: dict(pairs(flat))}[kind](items)

    def bulk(self, name: bytes, length: int, chunks: list[bytes]) -> Any:
        data = b"".join(map(self.chunk, chunks))
        expect(len(data) == length and digest("holdfast.value", data) == name, "bulk value")
        return self.values.decode(data)

    def chunk(self, name: bytes) -> bytes:
        _, p, offset, length, stored, _ = self.chunks[name]
        pack = (self.path / "packs" / f"{self.packs[p]}.pack").read_bytes()
        expect(pack[:8] == b"HFPACK01" and offset % 4096 == 0, "pack")
        data = pack[offset : offset + stored]
        data = data if stored == length else zstandard.ZstdDecompressor().decompress(data, length)
        expect(len(data) == length and digest("holdfast.chunk", data) == name, f"chunk {name.hex()}")
        return data

    def operand_values(self, n: int, b: int) -> list[bytes]:
        """The values that a checkpoint's operations name by digest."""
        tail = [data for number, data in self.rows["tail"] if number == n]
        if tail:
            return msgpack.decode(tail[0])
        seal = next((row for row in self.rows["seal"] if row[1] == b and row[0] >= n), None)
        if seal is None:
            return []
        nodes, entries = msgpack.decode(seal[2])
        places = dict(entries).get(0 if seal[0] == n else n, [])
        return [self.nodes[nodes[index]][offset : offset + length] for index, offset, length in places]


# Section 6: effects

MARKED = {"run", "doubt", "decision", "wait", "end", "rollback", "note"}


class Lines:
    """Records and chain digests of every branch's line."""

    def __init__(self, store: Store, gone: list[list[int]]) -> None:
        self.store = store
        self.records: dict[int, list[Any]] = {0: []}
        self.chains: dict[int, list[bytes]] = {0: [b""]}
        own = {(b, i): (r, mark, refs, body) for r, b, i, mark, refs, body, _ in store.rows["effect"]}
        for b, origin, start, count, chain, _ in store.rows["line"]:
            expect(origin < b and start < len(self.chains[origin]), f"origin of line {b}")
            chains, records = self.chains[origin][: start + 1], self.records[origin][:start]
            for i in range(start + 1, count + 1):
                _, mark, refs, body = own.pop((b, i))
                chains.append(digest("holdfast.effect", chains[-1] + body))
                records.append(self.record(mark, refs, body))
            expect(chains[-1] == chain and len(chains) == count + 1, f"chain of line {b}")
            self.chains[b], self.records[b] = chains, records
        for r, *_ in own.values():
            expect(any(first <= r <= last for first, last in gone), f"effect {r}")

    def record(self, mark: int, refs: bytes, body: bytes) -> dict[str, Any]:
        found = self.store.values.decode(body)
        expect(mark == (found["t"] in MARKED), "mark of a record")
        stored = [found.get("a"), found.get("v"), *found.get("e", [])[3:]]
        named = b"".join(value[0] for value in stored if isinstance(value, list))
        expect(named == refs, "references of a record")
        for key in {"a", "v"} & set(found):
            found[key] = self.value(found[key])
        return found

    def value(self, stored: Any) -> Any:
        return self.store.container(stored[0]) if isinstance(stored, list) else self.store.values.decode(stored)


# Section 3: checkpoints

FIELDS = [
    "version", "parent", "agent", "sections", "operations", "effects", "metadata",
    "label", "time", "nonce", "kind", "target",
]  # fmt: skip


def apply(state: dict[str, Any], code: int, path: list[Any], args: list[Any]) -> None:
    holder: Any = state
    for key in path[:-1] if code in {0, 1} else path:
        holder = holder[key]
    if code == 0:
        holder[path[-1]] = args[0]
    elif code == 1:
        del holder[path[-1]]
    elif code == 2:
        holder[args[0] : args[0] + args[1]] = args[2]
    elif code == 3:
        old = list(holder)
        holder[:] = [
            item
            for piece in args[0]
            for item in (piece if len(piece) == 1 else [old[piece[0] + at * piece[2]] for at in range(piece[1])])
        ]
    elif code in {4, 5}:
        (holder.update if code == 4 else holder.difference_update)(args[0])
    else:
        holder.clear()


def read(path: Path) -> dict[str, Any]:
    """``{"agents": {name: {"branches", "tags", "lines"}}, "checkpoints": {id: {..., "state"}}, "events": [...]}``."""
    store = Store(path)
    decode = store.values.decode
    metadata = {name: decode(data) for name, data in store.rows["metadata"]}
    for name, data in store.rows["metadata"]:
        expect(digest("holdfast.metadata", data) == name or metadata[name] == {"lost": name}, f"metadata {name.hex()}")
    ids: dict[int, bytes] = {0: b""}
    states: dict[int, dict[str, Any]] = {0: {}}
    checkpoints = {}
    agents = {a: (name, decode(body)) for a, name, _, body, _ in store.rows["agent"]}
    events = [(a, decode(body)) for _, a, _, body, _, _ in store.rows["event"]]
    forgotten = [(a, body) for a, body in events if body["what"] in {"forget", "remove"}]
    cut = {name for _, body in forgotten for name in body["cut"]}
    lines = Lines(store, [pair for _, body in forgotten for pair in body.get("r", [])])
    for n, a, b, parent, depth, base, manifest, operations, _, _ in store.rows["checkpoint"]:
        ids[n] = digest("holdfast.checkpoint", manifest)
        known = dict(zip(FIELDS, decode(manifest), strict=True))
        alone = parent == 0 and base == n and known["parent"] in cut
        expect(alone or known["parent"] == ids[parent], f"chain at {n}")
        expect(a not in agents or known["agent"] == agents[a][0], f"agent of {n}")
        expect(known["operations"] == digest("holdfast.operations", operations), f"operations of {n}")
        expect(known["metadata"] in metadata, f"metadata of {n}")
        count, chain = known["effects"]
        expect(lines.chains[b if count else 0][count] == chain, f"effects of {n}")
        named = store.operand_values(n, b)

        def value(reference: list[Any], named: list[bytes] = named) -> Any:
            if len(reference) == 2:
                expect(digest("holdfast.value", named[reference[1]]) == reference[0], "value of an operation")
            return decode(reference[0] if len(reference) == 1 else named[reference[1]])

        state = copy.deepcopy(states[parent])
        for _, code, where, *args in decode(operations) if not alone else ():
            if code in {0, 2, 4, 5}:
                args[-1] = value(args[-1]) if code == 0 else [value(one) for one in args[-1]]
            elif code == 3:
                args[0] = [[value(piece[0])] if len(piece) == 1 else piece for piece in args[0]]
            apply(state, code, where, args)
        stored = {name: store.container(root) for name, root in pairs(known["sections"])} if base == n else state
        state = stored if alone else state
        expect(list(state) == known["sections"][::2], f"sections of {n}")
        if base == n:
            expect(shown(stored) == shown(state), f"the operations of {n} lead to what its nodes hold")
        states[n] = state
        known |= {"depth": depth, "sealed": base == n, "state": state, "metadata": metadata[known["metadata"]]}
        checkpoints[ids[n].hex()] = known
    found: dict[str, Any] = {"agents": {}, "checkpoints": checkpoints}
    for a, (_, body) in agents.items():
        hidden = [*body.get("without", [[]])[0], *(pair for at, said in forgotten if at == a for pair in said["n"])]
        upto = {a: 1 << 63} | {origin: most for origin, _, most, _ in body.get("origins", ())}
        seen = [
            ids[n].hex()
            for n, of, *_ in store.rows["checkpoint"]
            if n <= upto.get(of, 0) and not any(first <= n <= last for first, last in hidden)
        ]
        branches = {decode(row[4])["name"]: row[6].hex() for row in store.rows["branch"] if row[1] == a}
        tags = {decode(row[2])["name"]: ids[row[3]].hex() for row in store.rows["tag"] if row[0] == a}
        doubts = {ids[n].hex(): decode(why)["validity"] for of, n, why, _ in store.rows["validity"] if of == a}
        records = {decode(row[4])["name"]: lines.records.get(row[0], []) for row in store.rows["branch"] if row[1] == a}
        found["agents"][body["name"]] = {
            "branches": branches, "tags": tags, "seen": seen, "validity": doubts, "lines": records,
        }  # fmt: skip
    found["events"] = [body for _, body in events]
    pairs_gone = [pair for _, said in forgotten for pair in said["n"]]
    for n in set(range(1, max(ids))) - set(ids):
        expect(any(first <= n <= last for first, last in pairs_gone), f"checkpoint {n}")
    return found
