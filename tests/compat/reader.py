"""An independent reader of a Holdfast store, written from docs/format.md alone. It must not import holdfast.

``read(path)`` proves sums, ids, chains, heads, nodes, chunks and values, and returns every state and every record as
plain data. Anything that does not fit raises ``Broken`` or ``LookupError``. keyed.py is for encrypted stores.
"""

from __future__ import annotations

import copy
import re
import sqlite3
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Iterator
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

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
Row = dict[str, Any]


class Broken(Exception): ...


Instance = namedtuple("Instance", "type version form data")  # noqa: PYI024
Instance.__hash__ = lambda self: hash(repr(self))  # frozen ones can be keys
Member = namedtuple("Member", "type version name value")  # noqa: PYI024
Numpy = namedtuple("Numpy", "dtype shape data")  # noqa: PYI024
End = namedtuple("End", "back count chain records")  # noqa: PYI024


def digest(tag: str, data: bytes) -> bytes:
    return blake3(tag.encode() + b"\0" + data).digest()


def shown(value: Any) -> str:
    """Text that is equal exactly when values are, types and order included."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(shown, value))}"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(shown(key), shown(item)) for key, item in value.items()]}"
    return f"{type(value).__name__}{[*map(shown, value)]}" if isinstance(value, list | tuple | deque) else repr(value)


def expect(condition: object, what: str) -> None:
    if not condition:
        raise Broken(what)


def pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


# Section 1: values

SCOPES, ALONE, MAPPINGS, BYTES = {4, 20, 26, 27, 28, 29}, {5, 6, 21}, {1, 27, 28, 29}, {2, 3, 7, 9, 16, 20, 40}
PATHS = {"posix": PosixPath, "windows": WindowsPath, "pure-posix": PurePosixPath, "pure-windows": PureWindowsPath}


def zone(found: Any) -> Any:
    if found is None or isinstance(found, str):
        return ZoneInfo(found) if found else None
    offset = timedelta(seconds=found[0], microseconds=found[1])
    return timezone(offset) if found[2] is None else timezone(offset, found[2])


class Values:
    """Decodes values; big containers and bulk values are looked up in ``store``."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.scope: list[Any] | None = None

    def decode(self, data: bytes) -> Any:
        return msgpack.Decoder(ext_hook=self.extension).decode(data)

    def extension(self, code: int, view: memoryview) -> Any:
        outer = self.scope
        if code in ALONE or (code in SCOPES and outer is None):
            self.scope = None if code in ALONE else []
        found = self.value(code, bytes(view))
        self.scope = outer
        return found

    def value(self, code: int, data: bytes) -> Any:
        v = data if code in BYTES else self.keyed(code, data) if code in MAPPINGS else self.decode(data)
        return {
            1: lambda: dict(pairs(v)), 2: lambda: int.from_bytes(v, "big", signed=True),
            3: lambda: v.decode("utf-8", "surrogatepass"), 4: lambda: tuple(v), 5: lambda: set(v),
            6: lambda: frozenset(v), 7: lambda: bytearray(v), 8: lambda: complex(*v), 9: lambda: Decimal(v.decode()),
            10: lambda: Fraction(*v), 11: lambda: datetime(*v[:7], fold=v[7], tzinfo=zone(v[8])), 12: lambda: date(*v),
            13: lambda: time(*v[:4], fold=v[4], tzinfo=zone(v[5])), 14: lambda: timedelta(*v), 15: lambda: zone(v[0]),
            16: lambda: uuid.UUID(bytes=v), 17: lambda: PATHS[v[0]](v[1]), 18: lambda: range(*v),
            20: lambda: self.instance(v), 21: lambda: Member(*v), 22: lambda: self.scope[v],
            24: lambda: Numpy(v[0], tuple(v[1]), v[2]), 25: lambda: Numpy(v[0], None, v[1]),
            26: lambda: deque(v[1:], v[0]), 27: lambda: OrderedDict(pairs(v)), 28: lambda: Counter(dict(pairs(v))),
            29: lambda: dict(pairs(v[1:])), 40: lambda: self.store.container(v), 41: lambda: self.store.bulk(*v),
            42: lambda: self.store.joined(*v),
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


# Sections 2, 4 and 5: tables, nodes, chunks, segments

TABLES = re.search(r"```\n(store +:.*?)```", PAGE, re.DOTALL)[1]


class Plain:  # how things are stored where there is no key; keyed.py has the same for a store with one
    overhead = 0
    total = staticmethod(lambda table, covered: digest("holdfast.row", msgpack.encode([table, *covered]))[:8])
    name = box = staticmethod(lambda kind, place, data: data)


def frame(data: bytes, **dictionary: Any) -> bytes:
    return zstandard.ZstdDecompressor(**dictionary).decompress(data, allow_extra_data=False)


def unpacked(data: bytes) -> bytes:
    expect(data[:1] in {b"\0", b"\1"}, "mark of compression")
    return data[1:] if data[0] == 0 else frame(data[1:])


def parts(data: bytes) -> list[bytes]:
    """Parts that each stand behind their length."""
    found = []
    while data:
        end = 4 + int.from_bytes(data[:4])
        expect(end <= len(data), "length of a part")
        found, data = [*found, data[4:end]], data[end:]
    return found


class Store:
    def __init__(self, path: Path, unlock: Any) -> None:
        self.path, self.values = path, Values(self)
        with closing(sqlite3.connect(f"file:{path}/store.db?mode=ro", uri=True)) as db:
            marks = db.execute("SELECT * FROM pragma_application_id, pragma_user_version").fetchone()
            expect(marks == (0x48464F52, 1), "application id, format version")
            blocks = [body for (body,) in db.execute("SELECT body FROM slot")]
            expect(len(blocks) == (2 if unlock else 0), "whether it is encrypted")
            self.cipher = unlock(blocks[0]) if unlock else Plain()
            described = (line.split(":") for line in TABLES.strip().splitlines())
            self.rows = {table.strip(): list(self.table(db, table.strip(), about)) for table, about, *_ in described}
        self.nodes = {row["digest"]: unpacked(row["data"]) for row in self.rows["node"]}
        for found, raw in self.nodes.items():
            expect(digest("holdfast.node", raw) == found, f"node {found.hex()}")
        self.chunks = {row["digest"]: row for row in self.rows["chunk"]}
        self.packs = {row["p"]: row for row in self.rows["pack"]}

    def table(self, db: sqlite3.Connection, table: str, described: str) -> Iterator[Row]:
        columns = [part.split() for part in described.replace("|", ",").split(",")]
        covered = described.partition("|")[0].count(",") + 1
        for stored in db.execute(f"SELECT * FROM {table} ORDER BY 1, 2"):
            good = table == "node" or self.cipher.total(table, list(stored[:covered])) == stored[-1]
            expect(good, f"sum of {table} {stored[0]}")
            row = {name: value for (name, *_), value in zip(columns, stored, strict=False)}
            place = [row[name] for name, _, *options in columns if "key" in options]
            scope = row["a"] if table in {"branch", "tag"} else 0
            packed, boxes, looked_up = (
                [name for name, of, *_ in columns if of == it] for it in ("packed", "box", "name")
            )
            row |= {name: self.cipher.box(f"{table}.{name}", place, row[name]) for name in (*boxes, *packed)}
            row |= {name: unpacked(row[name]) for name in packed if row[name]}
            row |= {name: self.cipher.name(table, scope, row[name]) for name in looked_up}
            if "body" in row and table not in {"slot", "record"}:
                row["body"] = msgpack.decode(row["body"])
            yield row

    def items(self, found: bytes, kind: bytes) -> list[Any]:
        """All parts below a node, in order."""
        raw, each = self.nodes[found], 1 + (kind == b"d")
        expect(raw[:1] == kind, "kind of a node")
        if raw[1] == 0:
            return self.values.decode(b"\xdd" + (int.from_bytes(raw[-4:]) * each).to_bytes(4) + raw[2:-4])
        entries = [(raw[at : at + 32], int.from_bytes(raw[at + 32 : at + 40])) for at in range(2, len(raw), 40)]
        below = [self.items(child, kind) for child, _ in entries]
        expect([len(some) for some in below] == [count * each for _, count in entries], "number of items")
        return [item for some in below for item in some]

    def container(self, found: bytes) -> Any:
        kind = self.nodes[found][:1]
        made = {b"l": list, b"s": set, b"v": lambda one: one[0], b"d": lambda flat: dict(pairs(flat))}[kind]
        return made(self.items(found, kind))

    def joined(self, name: bytes, length: int, chunks: list[bytes]) -> bytes:
        data = b"".join(self.chunk(**self.chunks[one]) for one in chunks)
        expect(len(data) == length and digest("holdfast.value", data) == name, "bulk value, or content of a file")
        return data

    def bulk(self, *about: Any) -> Any:
        return self.values.decode(self.joined(*about))

    def chunk(self, digest: bytes, p: int, start: int, length: int, stored: int) -> bytes:
        name = self.packs[p]["uuid"]
        pack = (self.path / "packs" / f"{uuid.UUID(bytes=name)}.pack").read_bytes()
        expect(pack[:8] == b"HFPACK03" and len(pack) == self.packs[p]["size"] and start % 4096 == 0, "pack")
        size = int.from_bytes(pack[-16:-8])
        index = pack[-(-(-(size + 48) // 4096) * 4096) :][:size]
        expect(pack[-48:-16] == blake3(b"holdfast.index\0" + index).digest() and pack[-8:] == b"HFINDEX1", "index")
        expect([digest, start, length, stored] in msgpack.decode(self.cipher.box("index", name, index)), "index")
        data = self.cipher.box("chunk", digest, pack[start : start + stored + self.cipher.overhead])
        data = data if stored == length else frame(data)
        expect(len(data) == length and blake3(b"holdfast.chunk\0" + data).digest() == digest, f"chunk {digest.hex()}")
        return data

    def payloads(self) -> Iterator[tuple[Row, bytes, bytes]]:
        """Every checkpoint's row, manifest and operations."""
        for row in self.rows["loose"]:
            data = unpacked(row["data"])
            end = 4 + int.from_bytes(data[:4])
            yield row, data[4:end], data[end:]
        folded = {row["n"]: row for row in self.rows["checkpoint"]}
        expect(not folded.keys() & {row["n"] for row in self.rows["loose"]}, "each checkpoint is there once")
        for s, members, refs, manifests, operations in map(Row.values, self.rows["segment"]):
            known = b"".join(self.nodes[refs[at : at + 32]] for at in range(4, 4 + 32 * int.from_bytes(refs[:4]), 32))
            raw = zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
            more = {"dict_data": raw, "max_window_size": 2**29} if known else {}
            above, every = b"", zip(parts(frame(manifests)), parts(frame(operations, **more)), strict=True)
            for n, (short, some) in zip(msgpack.decode(members), every, strict=True):
                manifest = short[:2] + b"\xc4\x20" + above + short[4:] if above else short
                above = digest("holdfast.checkpoint", manifest)
                row = folded.pop(n)
                expect(row["s"] == s, f"segment of {n}")
                yield row, manifest, some
        expect(not folded, "segments of checkpoints")


# Section 6: effects

MARKED = {"run", "doubt", "decision", "wait", "end", "rollback", "note"}
GONE = object()


def split(body: bytes) -> tuple[bytes, bytes, bytes]:
    """What the digest of a record covers, what the record says, and its values."""
    if body[:1] != b"\xc1":
        return body, body, b""
    end = 37 + int.from_bytes(body[33:37], "big")
    expect(len(body) >= end, "length of a record")
    expect(len(body) == end or digest("holdfast.values", body[end:]) == body[1:33], "values of a record")
    return body[:end], body[37:end], body[end:]


def lines(store: Store) -> dict[int, End]:
    """How every line looks at each of its records."""
    found = {0: End(0, 0, b"", [])}
    for row in sorted(store.rows["record"], key=lambda row: row["i"]):
        r, prev, back, i, _, mark, key, about, body = row.values()
        before = found[prev]
        expect((back, i) == (before.back, before.count + 1), f"place of record {r}")
        proof, said, values = split(body)
        record = store.values.decode(said) if body else None
        let_go = mark & 2
        expect(not (let_go and values), f"values of record {r}")
        if record is not None:
            stored = [record.get("a"), record.get("v"), *record.get("e", [])[3:]]
            named = b"".join(one[0] for one in stored if isinstance(one, list) and not let_go)
            expect(digest("holdfast.record", proof) + named == about, f"record {r}")
            expect((record["t"] in MARKED) == mark & 1, f"mark of record {r}")
            begins = record["t"] == "run" and record.get("kind") != "map"
            failed = (record["t"], record.get("how")) == ("end", "failed")
            sought = digest("holdfast.run", record["run"].encode())[:16] if begins else b""
            expect(key == (digest("holdfast.failed", b"")[:16] if failed else sought), f"key of record {r}")
            lengths = [one for one in stored if isinstance(one, int)]
            expect(not values or len(values) == sum(lengths), f"lengths of the values of record {r}")
            for name, one in [(name, record[name]) for name in ("a", "v") if name in record]:
                if isinstance(one, int) and values:
                    record[name], values = store.values.decode(values[:one]), values[one:]
                elif isinstance(one, list) and not let_go:
                    record[name] = store.container(one[0])
                elif isinstance(one, bytes):
                    record[name] = store.values.decode(one)
                else:
                    record[name] = GONE
        chain = digest("holdfast.effect", before.chain + about[:32])
        found[r] = End(r if mark & 1 else back, i, chain, [*before.records, record])
    return found


# Section 3: checkpoints

FIELDS = re.search(r"`(version, parent, .*?)`", PAGE)[1].split(", ")


def manifest_of(parts: list[Any]) -> dict[str, Any]:
    names = [*FIELDS, "cost"] if len(parts) > len(FIELDS) else FIELDS
    return {"cost": ["", 0, 0, 0, 0]} | dict(zip(names, parts, strict=True))


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
    elif code in {4, 5}:
        (holder.update if code == 4 else holder.difference_update)(args[0])
    else:
        old = list(holder)
        holder.clear()
        for first, *more in args[0] if code == 3 else ():
            holder += [old[first + at * more[1]] for at in range(more[0])] if more else [first]


def checkpoints(store: Store, ends: dict[int, End]) -> dict[int, Row]:
    """Every checkpoint, proven, with its state."""
    decode, known = store.values.decode, {}
    found: dict[int, Row] = {0: {"id": b"", "depth": 0, "state": {}, "lineage": set()}}
    over = {row["n"]: row["over"] for row in store.rows["shallow"]}
    for row, manifest, operations in store.payloads():
        said = manifest_of(decode(manifest)) | {"id": digest("holdfast.checkpoint", manifest)}
        expect(said["operations"] == digest("holdfast.operations", operations), f"operations of {row['n']}")
        known[row["n"]] = row, said, decode(operations)
    for n, (row, said, operations) in sorted(known.items(), key=lambda item: item[1][1]["depth"]):
        parent, alone = found[row["parent"]], n in over
        follows = (said["parent"], said["depth"]) == (parent["id"], parent["depth"] + 1)
        expect(not row["parent"] and row["sealed"] if alone else follows, f"parent of {n}")
        mark = int.from_bytes(said["id"][:8], signed=True)
        expect((mark, said["effects"]) == (row["mark"], [*ends[row["line"]][1:3]]), f"row of {n}")
        (_, sections), *others = said["layers"]
        for layer, some in others:
            sections = [*sections, *(x for name, root in pairs(some) for x in (f"\0{layer}\0{name}", root))]
        stored = {name: store.container(root) for name, root in pairs(sections)} if row["sealed"] else None
        state = stored if alone else copy.deepcopy(parent["state"])
        for _, code, where, *args in () if alone else operations:
            if code in {0, 2, 4, 5}:
                args[-1] = decode(args[-1][0]) if code == 0 else [decode(one) for (one,) in args[-1]]
            elif code == 3:
                args[0] = [[decode(piece[0])] if len(piece) == 1 else piece for piece in args[0]]
            apply(state, code, where, args)
        expect(sorted(state, key=lambda name: name * (name[:1] == "\0")) == sections[::2], f"sections of {n}")
        expect(shown(stored or state) == shown(state), f"state of {n}")
        found[n] = row | said | {"state": state, "metadata": store.container(said["metadata"])}
        found[n]["lineage"] = {said["id"], *found[over.get(n, row["parent"])]["lineage"]}
    return found


def read(path: Path, unlock: Any = None) -> dict[str, Any]:
    """``{"agents": {name: {"branches", "tags", "seen", ...}}, "checkpoints": {id: {..., "state"}}, "log": [...]}``."""
    store = Store(path, unlock)
    points = checkpoints(store, ends := lines(store))
    by_id = {point["id"]: n for n, point in points.items()}
    found: dict[str, Any] = {"agents": {}, "log": store.rows["log"]}
    facts = {row["name"]: row["value"] for row in store.rows["store"]}
    found["schedules"] = msgpack.decode(facts.get("schedules", b"\x80"))
    found["checkpoints"] = {point["id"].hex(): point for n, point in points.items() if n}
    given = {row["name"]: row["number"] for row in store.rows["floor"]}
    highest = max([given.get("log", 0), *(row["e"] for row in store.rows["log"])])
    expect(len(store.rows["log"]) == highest - given.get("log gone", 0), "how many entries the log has")
    epochs = [body for row in store.rows["log"] if "epoch" in (body := row["body"])]
    for a, agent in ((row["a"], row["name"].decode()) for row in store.rows["agent"]):
        branches = {row["name"].decode(): row for row in store.rows["branch"] if row["a"] == a}
        tags = {row["name"].decode(): row for row in store.rows["tag"] if row["a"] == a}
        for row in branches.values():
            b, head = row["b"], points[row["head"]]
            expect((row["id"], row["depth"]) == (head["id"], head["depth"]), f"head of branch {b}")
            expect(row["at"] >= head.get("time", row["body"]["created"]), f"time of branch {b}")
            expect((row["back"], row["count"], row["chain"]) == ends[row["line"]][:3], f"line of branch {b}")
            epoch, to = max((body["epoch"], body["to"]) for body in epochs if body["b"] == b)
            made = [one for one in points.values() if (one.get("b"), one.get("epoch")) == (b, epoch)]
            newest = max(made, key=lambda one: one["depth"], default={"id": to})
            expect((row["epoch"], head["id"]) == (epoch, newest["id"]), f"what the log says of branch {b}")
        expect(all(points[row["n"]]["id"] == row["id"] for row in tags.values()), f"tags of {agent}")
        said = [row["body"] for row in store.rows["log"] if row["a"] == a and not row["key"]]
        starts = [by_id.get(id, 0) for body in said for id in (body.get("from", b""), *body.get("left", ()))]
        starts += [row["head"] for row in branches.values()] + [row["n"] for row in tags.values()]
        judged = {row["n"]: row["body"] for row in store.rows["validity"] if row["a"] == a}
        found["agents"][agent] = {
            "branches": {name: row["id"].hex() for name, row in branches.items()},
            "tags": {name: row["id"].hex() for name, row in tags.items()},
            "lines": {name: ends[row["line"]].records for name, row in branches.items()},
            "seen": {id.hex() for n in starts for id in points[n]["lineage"]},
            "validity": {points[n]["id"].hex(): body["validity"] for n, body in judged.items()},
        }
    return found
