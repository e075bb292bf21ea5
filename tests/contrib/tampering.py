"""What can be done to a thread behind its saver's back: each change in several ways, for ours and for the rival.

Everything is done through plain SQL or to the file itself, to a copy that nobody has open.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from holdfast.codec.values import encode
from holdfast.store.cipher import PLAIN, compressed, uncompressed
from holdfast.store.rows import body_bytes, read_body

OURS, THEIRS = "HoldfastSaver", "SqliteSaver"
FILES = {OURS: "store/store.db", THEIRS: "checkpoints.sqlite"}
HONEST, PERSON = "honest", "person"
"""Words of a message and of metadata that a forger replaces by others of the same length."""
WRITES = "length(key) > 0"
"""Of our log, the entries that hold what tasks wrote."""
UNCHAINED = (
    "a task's write forged, sums and all",
    "a task's write added, sums and all",
)
"""What tasks wrote lies outside the hash chain: a sum guards it, and anybody can compute that, or take both away."""


class Change(NamedTuple):
    """A kind of tampering, and every way in which it is tried on one of the two."""

    name: str
    ways: dict[str, Callable[[Path], Iterator[Callable[[Path], None]]]]


def sql(path: Path, statement: str, *bindings: Any) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, bindings).fetchall()


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place % len(data)] ^= 1
    return bytes(changed)


def flips(
    kind: str, table: str, column: str, key: str, rows: int = 3, where: str = "TRUE"
) -> Callable[[Path], Iterator[Any]]:
    """One bit of a column, in rows from all over the table, at the ends of the value and inside."""

    def ways(original: Path) -> Iterator[Callable[[Path], None]]:
        found = sql(
            original / FILES[kind],
            f"SELECT {key}, {column} FROM {table} WHERE length({column}) > 0 AND {where} ORDER BY 1",
        )
        for number in sorted({len(found) * part // rows + (part == rows - 1) for part in range(rows)}):
            name, data = found[min(number, len(found) - 1)]
            data = data.encode() if isinstance(data, str) else data
            for place in sorted({0, len(data) // 2, len(data) - 1, len(data) * 2 // 7}):
                yield lambda directory, name=name, data=data, place=place: sql(
                    directory / FILES[kind],
                    f"UPDATE {table} SET {column} = ? WHERE {key} = ?",
                    flipped(data, place),
                    name,
                )

    return ways


def together(*several: Callable[[Path], Iterator[Any]]) -> Callable[[Path], Iterator[Any]]:
    def ways(original: Path) -> Iterator[Any]:
        for each in several:
            yield from each(original)

    return ways


def file_flips(kind: str) -> Callable[[Path], Iterator[Any]]:
    def ways(original: Path) -> Iterator[Any]:
        size = (original / FILES[kind]).stat().st_size
        chance = random.Random(11)
        for place in sorted(chance.sample(range(size), 12)):

            def poke(directory: Path, place: int = place) -> None:
                with (directory / FILES[kind]).open("r+b") as file:
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ 1]))

            yield poke

    return ways


def truncations(kind: str) -> Callable[[Path], Iterator[Any]]:
    def ways(original: Path) -> Iterator[Any]:
        size = (original / FILES[kind]).stat().st_size
        for length in (size - 1, size - 4096, size // 2, 4096, 100, 0):
            yield lambda directory, length=length: os.truncate(directory / FILES[kind], length)

    return ways


def swaps(kind: str, table: str, columns: str, key: str, where: str = "TRUE") -> Callable[[Path], Iterator[Any]]:
    """The contents of two rows change places."""

    def ways(original: Path) -> Iterator[Any]:
        names = columns.split(", ")
        found = sql(
            original / FILES[kind],
            f"SELECT {key}, {columns} FROM {table} WHERE length({names[0]}) > 0 AND {where} ORDER BY 1",
        )
        for one, two in ((found[0], found[-1]), (found[len(found) // 2], found[len(found) // 2 + 1])):

            def swap(directory: Path, one: Any = one, two: Any = two) -> None:
                assignment = ", ".join(f"{name} = ?" for name in names)
                for target, content in ((one, two), (two, one)):
                    sql(
                        directory / FILES[kind],
                        f"UPDATE {table} SET {assignment} WHERE {key} = ?",
                        *content[1:],
                        target[0],
                    )

            yield swap

    return ways


def deletions(kind: str, table: str, key: str, *places: int, where: str = "TRUE") -> Callable[[Path], Iterator[Any]]:
    def ways(original: Path) -> Iterator[Any]:
        names = [name for (name,) in sql(original / FILES[kind], f"SELECT {key} FROM {table} WHERE {where} ORDER BY 1")]
        for place in places:
            yield lambda directory, name=names[place]: sql(
                directory / FILES[kind], f"DELETE FROM {table} WHERE {key} = ?", name
            )

    return ways


# Forging a value: the bytes decode, and say something else.


def forge_theirs(what: str) -> Callable[[Path], Iterator[Any]]:
    serde = JsonPlusSerializer()

    def ways(original: Path) -> Iterator[Any]:
        path = original / FILES[THEIRS]
        rows = sql(path, "SELECT checkpoint_id, type, checkpoint, metadata FROM checkpoints ORDER BY 1")
        for name, kind, data, metadata in (rows[-1], rows[12]):
            if what == "checkpoint":
                value = serde.loads_typed((kind, data))
                value["channel_values"]["balance"] = 1_000_000
                new = serde.dumps_typed(value)[1]
                yield lambda directory, new=new, name=name: sql(
                    directory / FILES[THEIRS],
                    "UPDATE checkpoints SET checkpoint = ? WHERE checkpoint_id = ?",
                    new,
                    name,
                )
            elif what == "metadata":
                forged = json.dumps({**json.loads(metadata), "approved_by": "nobody"}).encode()
                yield lambda directory, forged=forged, name=name: sql(
                    directory / FILES[THEIRS],
                    "UPDATE checkpoints SET metadata = ? WHERE checkpoint_id = ?",
                    forged,
                    name,
                )
            elif what == "write":
                yield lambda directory, name=name: sql(
                    directory / FILES[THEIRS],
                    "UPDATE writes SET value = ? WHERE checkpoint_id = ? AND idx = 0",
                    serde.dumps_typed(1_000_000)[1],
                    name,
                )
            elif what == "new write":
                yield lambda directory, name=name: sql(
                    directory / FILES[THEIRS],
                    "INSERT INTO writes SELECT thread_id, checkpoint_ns, checkpoint_id, 'forged', '~0', 0, 'balance',"
                    " type, ? FROM writes WHERE checkpoint_id = ? AND idx = 0",
                    serde.dumps_typed(1_000_000)[1],
                    name,
                )
        if what == "new checkpoint":
            name, kind, data, metadata = rows[-1]
            value = serde.loads_typed((kind, data))
            value["id"] = "1fffffff" + name[8:]
            value["channel_values"]["balance"] = 1_000_000
            yield lambda directory: sql(
                directory / FILES[THEIRS],
                "INSERT INTO checkpoints VALUES ('t', '', ?, ?, ?, ?, ?)",
                value["id"],
                name,
                kind,
                serde.dumps_typed(value)[1],
                metadata,
            )

    return ways


def writes_of(original: Path) -> list[tuple]:
    """The entries that hold what tasks wrote: number, agent, key, time, body, sum."""
    rows = sql(original / FILES[OURS], f"SELECT * FROM log WHERE {WRITES} ORDER BY e")
    return [(*PLAIN.loaded("log", row), row[-1]) for row in rows]


def forged_write(body: bytes, **more: Any) -> bytes:
    value = read_body(body, "an entry")
    value["writes"] = [
        [index, channel, encode(1_000_000) if channel == "balance" else data]
        for index, channel, data in value["writes"]
    ]
    return body_bytes({**value, **more})


def forge_ours(what: str, *, with_sums: bool) -> Callable[[Path], Iterator[Any]]:
    """The same by somebody who knows the format, and, ``with_sums``, computes the row's sum anew."""

    def put(table: str, row: tuple, old: bytes) -> Callable[[Path], None]:
        *columns, total = PLAIN.stored(table, *row)
        marks = ", ".join("?" * (len(row) + 1))
        return lambda directory: sql(
            directory / FILES[OURS],
            f"INSERT OR REPLACE INTO {table} VALUES ({marks})",
            *columns,
            total if with_sums else old,
        )

    def ways(original: Path) -> Iterator[Any]:
        path = original / FILES[OURS]
        if what in {"write", "new write"}:
            rows = writes_of(original)
            ((last,),) = sql(path, "SELECT max(e) FROM log")
            for e, a, key, at, body, total in (rows[-1], rows[12]):
                if what == "write":
                    yield put("log", (e, a, key, at, forged_write(body)), total)
                else:
                    yield put("log", (last + 1, a, key, at, forged_write(body, task="forged", path="~0")), total)
            return
        ((*newest, total),) = sql(path, "SELECT * FROM loose ORDER BY n DESC LIMIT 1")
        if what == "new checkpoint":
            # A copy of the newest as its own child, and the branch led to it.
            n, mark, key, _, *rest = newest
            ((*branch, branch_total),) = sql(path, "SELECT * FROM branch")
            branch[5], branch[7] = n + 1, branch[7] + 1
            one, two = put("loose", (n + 1, mark, key, n, *rest), total), put("branch", tuple(branch), branch_total)
            yield lambda directory: (one(directory), two(directory))
            return
        # A value inside the operations: what a message says, or who approved, somewhere in them.
        old, forged = {
            "checkpoint": (HONEST.encode(), b"dishon"),
            "metadata": (PERSON.encode(), b"nobody"),
        }[what]
        rows = [row for row in sql(path, "SELECT * FROM loose ORDER BY n") if old in uncompressed(row[-2])]
        for *row, total in (rows[-1], rows[0]):
            yield put("loose", (*row[:-1], compressed(uncompressed(row[-1]).replace(old, forged))), total)

    return ways


def older(kind: str) -> Callable[[Path], Iterator[Any]]:
    """The database file as it was some steps ago."""

    def ways(original: Path) -> Iterator[Any]:
        old = (original.parent / f"old {kind}").read_bytes()
        yield lambda directory, old=old: (directory / FILES[kind]).write_bytes(old)

    return ways


PAYLOADS = (
    ("loose", "data", "n"),
    ("segment", "manifests", "s"),
    ("segment", "operations", "s"),
    ("node", "data", "k"),
)
CHECKPOINT_FLIPS = together(*(flips(OURS, *payload) for payload in PAYLOADS))

CHANGES = [
    Change("one bit of a checkpoint", {
        OURS: CHECKPOINT_FLIPS,
        THEIRS: flips(THEIRS, "checkpoints", "checkpoint", "checkpoint_id", rows=6),
    }),
    Change("one bit of its metadata", {
        OURS: flips(OURS, "loose", "data", "n", rows=4),
        THEIRS: flips(THEIRS, "checkpoints", "metadata", "checkpoint_id", rows=4),
    }),
    Change("one bit of a task's writes", {
        OURS: flips(OURS, "log", "body", "e", rows=4, where=WRITES),
        THEIRS: flips(THEIRS, "writes", "value", "rowid", rows=4),
    }),
    Change("one bit anywhere in the file", {kind: file_flips(kind) for kind in FILES}),
    Change("the file cut short", {kind: truncations(kind) for kind in FILES}),
    Change("two checkpoints' contents swapped", {
        OURS: together(
            swaps(OURS, "loose", "data", "n"),
            swaps(OURS, "loose", "data, mark, key, sum", "n"),
            swaps(OURS, "checkpoint", "key, mark, sum", "n"),
        ),
        THEIRS: swaps(THEIRS, "checkpoints", "checkpoint", "checkpoint_id"),
    }),
    Change("two checkpoints' metadata swapped", {
        OURS: swaps(OURS, "loose", "data", "n"),
        THEIRS: swaps(THEIRS, "checkpoints", "metadata", "checkpoint_id"),
    }),
    Change("two tasks' writes swapped", {
        OURS: together(swaps(OURS, "log", "body", "e", WRITES), swaps(OURS, "log", "body, sum", "e", WRITES)),
        THEIRS: swaps(THEIRS, "writes", "value", "rowid"),
    }),
    Change("a value in a checkpoint forged", {
        OURS: together(forge_ours("checkpoint", with_sums=False), forge_ours("checkpoint", with_sums=True)),
        THEIRS: forge_theirs("checkpoint"),
    }),
    Change("metadata forged", {
        OURS: together(forge_ours("metadata", with_sums=False), forge_ours("metadata", with_sums=True)),
        THEIRS: forge_theirs("metadata"),
    }),
    Change("a task's write forged", {
        OURS: forge_ours("write", with_sums=False),
        THEIRS: forge_theirs("write"),
    }),
    Change("a task's write forged, sums and all", {OURS: forge_ours("write", with_sums=True)}),
    Change("a checkpoint added", {
        OURS: together(forge_ours("new checkpoint", with_sums=False), forge_ours("new checkpoint", with_sums=True)),
        THEIRS: forge_theirs("new checkpoint"),
    }),
    Change("a task's write added", {
        OURS: forge_ours("new write", with_sums=False),
        THEIRS: forge_theirs("new write"),
    }),
    Change("a task's write added, sums and all", {OURS: forge_ours("new write", with_sums=True)}),
    Change("the newest checkpoint deleted", {
        OURS: deletions(OURS, "loose", "n", -1),
        THEIRS: deletions(THEIRS, "checkpoints", "checkpoint_id", -1),
    }),
    Change("a checkpoint in between deleted", {
        OURS: together(deletions(OURS, "checkpoint", "n", 5, 14, -2), deletions(OURS, "loose", "n", 0, -2)),
        THEIRS: deletions(THEIRS, "checkpoints", "checkpoint_id", 5, 14, -2),
    }),
    Change("an earlier task's writes deleted", {OURS: deletions(OURS, "log", "e", 12, 20, where=WRITES)}),
    Change("a task's writes deleted", {
        OURS: deletions(OURS, "log", "e", -1, where=WRITES),
        THEIRS: deletions(THEIRS, "writes", "rowid", -1, 12, 20),
    }),
    Change("an old copy of the file put back", {kind: older(kind) for kind in FILES}),
]  # fmt: skip
