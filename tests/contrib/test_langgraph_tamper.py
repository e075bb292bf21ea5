"""One thread, in our store and in the official SqliteSaver's file, changed behind their backs: who notices?

Each change is made through plain SQL or to the file itself, on a copy that nobody has open. Then everything is read
that a saver can be asked. A change is *noticed* when reading raises, or (ours) when ``verify`` reports it. It is
*silent* when the answers differ and nothing is noticed. ``python -m tests.contrib.test_langgraph_tamper`` prints the
table as Markdown.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver

from holdfast.codec.values import decode, encode
from holdfast.contrib.langgraph import HoldfastSaver
from holdfast.errors import HoldfastError
from holdfast.store import sealing
from holdfast.store.catalog import row_sum
from tests.contrib.graphs import checkpoint, config, told

STEPS = 30
OURS, THEIRS = "HoldfastSaver", "SqliteSaver"
FILES = {OURS: "store/store.db", THEIRS: "checkpoints.sqlite"}
NO_CHANGE, SILENT, BY_READING, BY_VERIFY = "same answers", "silent", "reading", "verify"
MARK = "written by the honest node"
WRITES = "key IS NOT NULL"
"""Of our events, those that hold what tasks wrote."""
UNCHAINED = ("a task's write forged, sums and all", "a task's write added, sums and all")
"""What tasks wrote lies outside the hash chain until a checkpoint takes it in: only a sum, which has no key, guards it."""


def build(kind: str, directory: Path, start: int, stop: int) -> None:
    """A thread with messages, metadata and pending writes. Ours seals early, so that it has nodes as well as tails."""
    with mock.patch.object(sealing, "SEAL_CHECKPOINTS", 12), opened(kind, directory) as saver:
        messages = [_message(number) for number in range(start)]
        at = saver.get_tuple(config("t")).config if start else config("t")
        for number in range(start, stop):
            messages.append(_message(number))
            one = checkpoint({"messages": list(messages), "balance": 100 + number})
            one["id"] = f"1f000000-0000-6000-8000-{number:012}"
            one["channel_versions"] = {"messages": number + 1, "balance": number + 1}
            metadata: Any = {"source": "loop", "step": number, "parents": {}, "approved_by": f"person {number}"}
            at = saver.put(at, one, metadata, one["channel_versions"])
            saver.put_writes(at, [("balance", 101 + number), ("messages", f"{MARK} {number}")], f"task-{number}", "~1")


def _message(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"{MARK} {number} " + random.Random(number).randbytes(700).hex()}


class opened:  # noqa: N801 - a context manager
    def __init__(self, kind: str, directory: Path) -> None:
        self._kind, self._directory = kind, directory

    def __enter__(self) -> Any:
        if self._kind == OURS:
            self._saver: Any = HoldfastSaver(self._directory / "store")
            return self._saver
        self._connection = sqlite3.connect(self._directory / FILES[THEIRS], check_same_thread=False)
        return SqliteSaver(self._connection)

    def __exit__(self, *_: object) -> None:
        (self._saver if self._kind == OURS else self._connection).close()


def answers(saver: Any) -> Any:
    """All that the thread's owner can see."""
    newest = saver.get_tuple(config("t"))
    listed = list(saver.list(config("t")))
    single = [saver.get_tuple(found.config) for found in listed]
    return [told(newest), [told(found) for found in listed], [told(found) for found in single]]


def judge(kind: str, directory: Path, expected: Any) -> tuple[str, str]:
    """What became of a changed copy, and how it was noticed."""
    try:
        with opened(kind, directory) as saver:
            try:
                found = answers(saver)
            except HoldfastError as error:
                return BY_READING, type(error).__name__
            except Exception as error:
                if kind == OURS:
                    raise AssertionError(f"an error that is none of ours: {error!r}") from error
                return BY_READING, type(error).__name__
            same = found == expected
            if kind == OURS and not saver.store.verify().ok:
                return BY_VERIFY, "verify" if same else "verify, after other answers"
            return (NO_CHANGE if same else SILENT), ""
    except HoldfastError as error:
        return BY_READING, f"{type(error).__name__} when opened"
    except sqlite3.DatabaseError as error:
        return BY_READING, type(error).__name__


# -- the changes --------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A kind of tampering, and every way in which it is tried on one of the two."""

    name: str
    ways: dict[str, Callable[[Path], Iterator[Callable[[Path], None]]]]


def sql(path: Path, statement: str, *bindings: Any) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, bindings).fetchall()


def database(kind: str) -> Callable[[Path], Path]:
    return lambda directory: directory / FILES[kind]


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


EVENT = "e, a, at, body, key"
CHECKPOINT = "n, a, b, parent, depth, base, manifest, operations, key"


def writes_of(original: Path) -> list[tuple]:
    """The events that hold what tasks wrote."""
    found = sql(original / FILES[OURS], f"SELECT {EVENT}, sum FROM event WHERE key IS NOT NULL ORDER BY e")
    return [row for row in found if decode(row[3])["what"] == "writes"]


def forged_write(body: bytes) -> bytes:
    value = decode(body)
    value["writes"] = [
        [index, channel, encode(1_000_000) if channel == "balance" else data]
        for index, channel, data in value["writes"]
    ]
    return encode(value)


def forge_ours(what: str, *, with_sums: bool) -> Callable[[Path], Iterator[Any]]:
    """The same by somebody who knows the format, and, ``with_sums``, computes the row's sum anew."""

    def summed(table: str, row: tuple, old: bytes) -> bytes:
        return row_sum(table, *row) if with_sums else old

    def update(row: tuple) -> Callable[[Path], None]:
        return lambda directory: sql(
            directory / FILES[OURS], "UPDATE event SET body = ?, sum = ? WHERE e = ?", row[3], row[5], row[0]
        )

    def insert(table: str, row: tuple) -> Callable[[Path], None]:
        return lambda directory: sql(
            directory / FILES[OURS], f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row
        )

    def ways(original: Path) -> Iterator[Any]:
        path = original / FILES[OURS]
        if what in {"write", "new write"}:
            rows = writes_of(original)
            ((last,),) = sql(path, "SELECT max(e) FROM event")
            for row in (rows[-1], rows[12]):
                if what == "write":
                    new: tuple = (*row[:3], forged_write(row[3]), row[4])
                    yield update((*new, summed("event", new, row[5])))
                else:
                    value = decode(forged_write(row[3]))
                    new = (last + 1, row[1], row[2], encode({**value, "task": "forged", "path": "~0"}), row[4])
                    yield insert("event", (*new, summed("event", new, row[5])))
            return
        if what == "new checkpoint":
            # A copy of the newest as its own child, and the branch led to it.
            row = sql(path, f"SELECT {CHECKPOINT}, sum FROM checkpoint ORDER BY n DESC LIMIT 1")[0]
            new = (row[0] + 1, row[1], row[2], row[0], row[4] + 1, *row[5:9])
            yield insert("checkpoint", (*new, summed("checkpoint", new, row[9])))
            return
        # A value inside the tail or the operations: the digits of a balance, or who approved, somewhere in them.
        old, forged = {
            "checkpoint": (b"honest", b"dishon"),
            "metadata": (b"person", b"nobody"),
        }[what]
        tails = [row for row in sql(path, "SELECT n, data FROM tail ORDER BY n") if old in row[1]]
        for n, data in (tails[-1], tails[0]) if tails else ():
            yield lambda directory, n=n, data=data: sql(
                directory / FILES[OURS], "UPDATE tail SET data = ? WHERE n = ?", data.replace(old, forged), n
            )
        rows = sql(path, f"SELECT {CHECKPOINT}, sum FROM checkpoint ORDER BY n")
        held = [row for row in rows if old in row[7]]
        for row in (held[-1], held[0]) if held else ():
            new = (*row[:7], row[7].replace(old, forged), row[8])
            total = summed("checkpoint", new, row[9])
            yield lambda directory, new=new, total=total: sql(
                directory / FILES[OURS],
                "UPDATE checkpoint SET operations = ?, sum = ? WHERE n = ?",
                new[7],
                total,
                new[0],
            )

    return ways


def older(kind: str) -> Callable[[Path], Iterator[Any]]:
    """The database file as it was some steps ago."""

    def ways(original: Path) -> Iterator[Any]:
        old = (original.parent / f"old {kind}").read_bytes()
        yield lambda directory, old=old: (directory / FILES[kind]).write_bytes(old)

    return ways


CHECKPOINT_FLIPS = together(
    flips(OURS, "checkpoint", "manifest", "n"),
    flips(OURS, "checkpoint", "operations", "n", rows=2),
    flips(OURS, "tail", "data", "n", rows=2),
    flips(OURS, "node", "data", "k", rows=2),
)

CHANGES = [
    Change("one bit of a checkpoint", {
        OURS: CHECKPOINT_FLIPS,
        THEIRS: flips(THEIRS, "checkpoints", "checkpoint", "checkpoint_id", rows=6),
    }),
    Change("one bit of its metadata", {
        OURS: flips(OURS, "tail", "data", "n", rows=4),
        THEIRS: flips(THEIRS, "checkpoints", "metadata", "checkpoint_id", rows=4),
    }),
    Change("one bit of a task's writes", {
        OURS: flips(OURS, "event", "body", "e", rows=4, where=WRITES),
        THEIRS: flips(THEIRS, "writes", "value", "rowid", rows=4),
    }),
    Change("one bit anywhere in the file", {kind: file_flips(kind) for kind in FILES}),
    Change("the file cut short", {kind: truncations(kind) for kind in FILES}),
    Change("two checkpoints' contents swapped", {
        OURS: together(
            swaps(OURS, "checkpoint", "manifest, operations", "n"),
            swaps(OURS, "checkpoint", "manifest, operations, sum", "n"),
            swaps(OURS, "tail", "data", "n"),
        ),
        THEIRS: swaps(THEIRS, "checkpoints", "checkpoint", "checkpoint_id"),
    }),
    Change("two checkpoints' metadata swapped", {
        OURS: swaps(OURS, "tail", "data", "n"),
        THEIRS: swaps(THEIRS, "checkpoints", "metadata", "checkpoint_id"),
    }),
    Change("two tasks' writes swapped", {
        OURS: together(swaps(OURS, "event", "body", "e", WRITES), swaps(OURS, "event", "body, sum", "e", WRITES)),
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
        OURS: deletions(OURS, "checkpoint", "n", -1),
        THEIRS: deletions(THEIRS, "checkpoints", "checkpoint_id", -1),
    }),
    Change("a checkpoint in between deleted", {
        OURS: deletions(OURS, "checkpoint", "n", 5, 14, -2),
        THEIRS: deletions(THEIRS, "checkpoints", "checkpoint_id", 5, 14, -2),
    }),
    Change("a task's writes deleted", {
        OURS: deletions(OURS, "event", "e", -1, 12, 20, where=WRITES),
        THEIRS: deletions(THEIRS, "writes", "rowid", -1, 12, 20),
    }),
    Change("an old copy of the file put back", {kind: older(kind) for kind in FILES}),
]  # fmt: skip


# -- the table ----------------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """How often a change was tried on one of the two, and what came of it."""

    outcomes: Counter[str]
    details: Counter[str]


def make(directory: Path) -> dict[str, tuple[Path, Any]]:
    """Both originals with their answers, and a copy of each one's file from before its last steps."""
    made = {}
    for kind, file in FILES.items():
        place = directory / kind
        place.mkdir(parents=True)
        build(kind, place, 0, STEPS - 5)
        shutil.copy(place / file, directory / f"old {kind}")
        build(kind, place, STEPS - 5, STEPS)
        with opened(kind, place) as saver:
            made[kind] = (place, answers(saver))
    return made


def try_all(directory: Path) -> dict[str, dict[str, Tried]]:
    """Every change on both: name of the change -> saver -> what came of it."""
    made = make(directory)
    found: dict[str, dict[str, Tried]] = {}
    scratch = directory / "scratch"
    for change in CHANGES:
        for kind, ways in change.ways.items():
            original, expected = made[kind]
            tried = found.setdefault(change.name, {}).setdefault(kind, Tried(Counter(), Counter()))
            for apply in ways(original):
                shutil.rmtree(scratch, ignore_errors=True)
                shutil.copytree(original, scratch)
                apply(scratch)
                outcome, detail = judge(kind, scratch, expected)
                tried.outcomes[outcome] += 1
                tried.details[detail or outcome] += 1
    return found


def markdown(found: dict[str, dict[str, Tried]]) -> str:
    """The table, for the documentation."""
    lines = [f"| change | {THEIRS} | {OURS} |", "|---|---|---|"]
    lines += [
        f"| {name} | {_cell(by_kind.get(THEIRS))} | {_cell(by_kind.get(OURS))} |" for name, by_kind in found.items()
    ]
    return "\n".join(lines)


def _cell(tried: Tried | None) -> str:
    if tried is None:
        return "has no sums"
    words = {
        BY_READING: "noticed by reading",
        BY_VERIFY: "noticed by `verify`",
        SILENT: "**other answers, no error**",
        NO_CHANGE: "no effect",
    }
    total = tried.outcomes.total()
    parts = [f"{words[way]}" + (f" {tried.outcomes[way]}/{total}" if tried.outcomes[way] < total else "")
             for way in words if tried.outcomes[way]]  # fmt: skip
    return ", ".join(parts)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Tried]]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-tamper-", dir=place) as directory:
        return try_all(Path(directory))


def test_every_change_of_ours_is_noticed(found):
    print("\n" + markdown(found))
    for name, by_kind in found.items():
        print(f"{name}: {dict(by_kind[OURS].details)}")
    for name, by_kind in found.items():
        outcomes = by_kind[OURS].outcomes
        if name in UNCHAINED:
            continue
        assert outcomes.total() > 0, f"{name}: nothing was tried"
        assert outcomes[SILENT] == 0, f"{name}: other answers, and nobody noticed: {dict(outcomes)}"
        # A flip in a part of the file that nothing uses changes nothing; every change of content must be noticed.
        assert outcomes[NO_CHANGE] == 0 or "file" in name, f"{name}: not noticed: {dict(outcomes)}"


@pytest.mark.parametrize("name", UNCHAINED)
def test_a_forger_who_recomputes_a_writes_sum_is_not_noticed(found, name):
    """A limit, stated where the table is. If this fails because it is noticed, the limit is gone: say so there."""
    outcomes = found[name][OURS].outcomes
    assert outcomes[SILENT] == outcomes.total() > 0


def test_the_official_file_gives_other_answers_without_an_error(found):
    """What the comparison is for. If a newer version notices, the table in the documentation is out of date."""
    for name in ("a value in a checkpoint forged", "a checkpoint added", "a task's writes deleted"):
        outcomes = found[name][THEIRS].outcomes
        assert outcomes[SILENT] == outcomes.total(), f"{name}: {dict(outcomes)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(markdown(try_all(Path(place))))
