"""Rescue: the rows of a damaged catalog that can be proven, in a new catalog beside it.

Owns what is taken from where: from the database as SQLite reads it, and, for tables that it cannot read to the end,
from the bare pages (pages.py). Every row that is taken bears its sum or its digest, so that damage cannot come along.
The damaged files are copied first and never opened in their place. What the rows mean, and what is missing, is for the
rooms above to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import apsw

from holdfast.codec.values import decode
from holdfast.errors import HoldfastError, StoreBusy, StoreReadOnly
from holdfast.store import schema, witness
from holdfast.store.bodies import sound
from holdfast.store.catalog import metadata_digest
from holdfast.store.cipher import Cipher, Row
from holdfast.store.embedded import Embedded
from holdfast.store.files import Layout, failed_disk
from holdfast.store.locks import StoreLock
from holdfast.store.opening import lay_out, own_facts
from holdfast.store.pages import Found, read_all
from holdfast.store.ranges import Ranges
from holdfast.store.reading import unpack_node
from holdfast.store.sqlite import connect, reading_error
from holdfast.store.witness import Witness
from holdfast.store.writing import Writer

BLOCK_BYTES = 4096
"""What is given up around a place that cannot be read: a page of the catalog, and what disks have for a sector."""

_COPIED_AT_ONCE = 2**20

_KEYS = {"tag": 2, "validity": 2}
"""How many columns say which row it is, where it is not the first alone."""

_VERSIONED: dict[str, Callable[[Row], Any]] = {
    "branch": lambda row: (row[7], row[5]),  # generation, head
    "line": lambda row: row[3],  # count
}
"""Rows that are written over, and what rises when they are."""


def copy_catalog(source: Layout, to: Path) -> tuple[Layout, list[str]]:
    """The catalog's files as they are, in a directory of their own, and what of them could not be read, for people.

    Writers wait meanwhile.
    """
    to.mkdir(mode=0o700)
    with _held(source, source.store_lock):
        files = [file for file in (source.catalog, source.wal) if file.exists()]
        lost = {file.name: copy_file(file, to / file.name) for file in files}
    problems = [f"{name}: the disk does not give back {count} bytes of it" for name, count in lost.items() if count]
    return Layout(to), problems


def copy_file(source: Path, to: Path) -> int:
    """Copy a file. Blocks that the disk does not give back become zeros; returns how many bytes these are."""
    lost, at, step = 0, 0, _COPIED_AT_ONCE
    with source.open("rb", buffering=0) as old, to.open("wb") as new:
        while True:
            try:
                data = os.pread(old.fileno(), step, at)
            except OSError as error:
                if not failed_disk(error):
                    raise
                left = os.fstat(old.fileno()).st_size - at
                if step > BLOCK_BYTES and left > BLOCK_BYTES:
                    step = BLOCK_BYTES
                    continue
                data = bytes(min(BLOCK_BYTES, left))
                lost += len(data)
            if not data:
                return lost
            new.write(data)
            at += len(data)


def undisturbed(source: Layout) -> AbstractContextManager[None]:
    """Nobody takes packs of a store away meanwhile, or moves them: a copy of its catalog names them as they were."""
    return _held(source, source.forgetting_lock)


@contextmanager
def _held(source: Layout, path: Path) -> Iterator[None]:
    """One of the store's locks, where it has one: nothing is made there, and it may lie where nothing can be."""
    if not path.exists():
        yield
        return
    try:
        lock = StoreLock(path)
    except StoreReadOnly:
        lock = StoreLock(path, readonly=True)
    try:
        try:
            lock.acquire()
        except StoreBusy as error:
            raise StoreBusy(f"{source.path} is being written", hint="End the program that writes it first.") from error
        try:
            yield
        finally:
            lock.release()
    finally:
        lock.close()


def rescue(damaged: Layout, to: Layout, cipher: Cipher, uuid: bytes, noted: Witness | None) -> list[str]:
    """Make a catalog at ``to`` of all rows of ``damaged`` (a copy: see ``copy_catalog``) that can be proven.

    ``uuid`` is the store's, where its own row is lost. ``noted`` is what the damaged store's witness says: a log that
    breaks off hides commits from SQLite. Returns what was wrong with the files, one line each, for people.
    """
    problems: list[str] = []
    rows = _Rows(cipher)
    complete = _read_with_engine(damaged, rows, problems)
    if noted is not None and complete:
        for table, number in (("checkpoint", noted.n), ("event", noted.e), ("effect", noted.r)):
            if (number,) not in rows.tables[table] and number > max((key[0] for key in rows.tables[table]), default=0):
                problems.append(f"table {table}: acknowledged rows up to {number} are missing")
                complete = False
    if not complete:
        _read_pages(damaged, rows, problems)
    rows.drop_deleted()
    rows.complete_facts(uuid)
    try:
        _build(to, rows)
    except apsw.Error as error:
        raise reading_error(error, "writing what was rescued") from error
    return problems


class _Rows:
    """Proven rows by table and key."""

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher
        self.tables: dict[str, dict[Row, Row]] = {name: {} for name in schema.TABLE_NAMES}
        self._from_pages: dict[str, set[Row]] = {name: set() for name in schema.TABLE_NAMES}

    def proven(self, table: str, row: Row) -> bool:
        """Whether this is a row of that table, as it was written."""
        cipher = self._cipher
        if table not in schema.SUMMED_TABLES and tuple(map(type, row)) not in schema.ROWS[table]:
            return False
        try:
            if table == "node":
                digest = cipher.found("node", row[1])
                unpack_node(digest, cipher.unbox("node", digest, row[2]))
                return True
            if table == "metadata":
                digest = cipher.found("metadata", row[0])
                return metadata_digest(cipher.unbox("metadata", digest, row[1])) == digest
            if table == "tail":  # its values' digests are in the checkpoint's operations, and proven there
                return isinstance(decode(cipher.unbox("tail", row[0], row[1])), list)
            columns, fits = cipher.loose(table, row)
            return fits and sound(table, columns)
        except (HoldfastError, TypeError, ValueError, IndexError, OverflowError, AttributeError):
            return False

    def take(self, table: str, row: Row, *, from_pages: bool = False) -> bool:
        """Keep a row if it can be proven, unless a newer version of it is here already."""
        if not self.proven(table, row):
            return False
        width = _KEYS.get(table, 1)
        key = row[1:2] if table == "node" else row[:width]
        known = self.tables[table].get(key)
        if known is not None:
            rises = _VERSIONED.get(table)
            if rises is None and key not in self._from_pages[table]:
                return True
            if rises is not None and rises(row) <= rises(known):
                return True
        elif from_pages:
            self._from_pages[table].add(key)
        self.tables[table][key] = row
        return True

    def records(self, table: str) -> Iterator[Row]:
        """The rows' columns as they were before they were stored."""
        for row in self.tables[table].values():
            yield self._cipher.loose(table, row)[0]

    def complete_facts(self, uuid: bytes) -> None:
        """What every catalog must say of itself, where the rows that said it are lost."""
        for name, value in own_facts(uuid, 0, self._cipher).items():
            self.tables["store"].setdefault((name,), self._cipher.stored("store", name, value))

    def drop_deleted(self) -> None:
        """Pages also hold rows that were deleted on purpose. What the events say is gone stays gone."""
        gone = {"checkpoint": Ranges(), "event": Ranges(), "effect": Ranges()}
        agents: set[int] = set()
        tags: dict[tuple[int, str], bool] = {}
        for _, a, _, body, *_ in sorted(self.records("event")):
            try:
                event = decode(body, inert=True)
                if event["what"] in {"forget", "remove"}:
                    for table, name in (("checkpoint", "n"), ("event", "e"), ("effect", "r")):
                        gone[table] |= Ranges(event.get(name, ()))
                    if event["what"] == "remove":
                        agents.add(a)
                elif event["what"] in {"tag", "untag"}:
                    tags[a, event["name"]] = event["what"] == "tag"
            except (HoldfastError, TypeError, LookupError):
                continue
        for table, found in self._from_pages.items():
            rows = self.tables[table]
            for key in found & rows.keys():
                row = rows[key]
                number = row[0]
                owner = row[1] if table in {"branch", "checkpoint", "event"} else number
                named = table in {"agent", "branch", "tag", "validity"}
                dropped = table in gone and number in gone[table]
                if table == "tag":
                    columns = self._cipher.loose(table, row)[0]
                    dropped = not tags.get((columns[0], decode(columns[2])["name"]), True)
                if dropped or (named and owner in agents):
                    del rows[key]


def _read_with_engine(damaged: Layout, rows: _Rows, problems: list[str]) -> bool:
    """Take what SQLite reads. True if it found nothing wrong and every row was proven."""
    try:
        connection = connect(damaged.catalog, readonly=True)
    except apsw.Error as error:
        problems.append(f"store.db: SQLite does not open it ({error})")
        return False
    complete = True
    try:
        for table in schema.TABLE_NAMES:
            bad = 0
            try:
                for row in connection.execute(f"SELECT * FROM {table} NOT INDEXED"):  # noqa: S608  constants only
                    bad += not rows.take(table, row)
            except (apsw.Error, UnicodeDecodeError) as error:
                problems.append(f"table {table}: SQLite cannot read all of it ({error})")
                complete = False
            if bad:
                problems.append(f"table {table}: {bad} row(s) are not what was written")
                complete = False
        if complete:
            found = [str(text) for (text,) in connection.execute("PRAGMA quick_check")]
            complete = found == ["ok"]
            problems += [] if complete else [f"store.db: {text}" for text in found[:5]]
    except apsw.Error as error:
        problems.append(f"store.db: SQLite cannot check it ({error})")
        complete = False
    finally:
        connection.close(True)
    return complete


def _read_pages(damaged: Layout, rows: _Rows, problems: list[str]) -> None:
    """Take what the bare pages hold, the oldest first, so that of several versions the last one written counts."""
    widths: dict[int, list[str]] = {}
    for table, width in _widths().items():
        widths.setdefault(width, []).append(table)
    try:
        for found in read_all(damaged):
            for table in widths.get(len(found.columns), ()):
                rows.take(table, _as_row(found), from_pages=True)
    except OSError as error:
        problems.append(f"store.db: cannot be read ({error.strerror})")


def _as_row(found: Found) -> Row:
    """A table's own number is stored beside the record, and nothing in its place."""
    if found.rowid is not None and found.columns and found.columns[0] is None:
        return (found.rowid, *found.columns[1:])
    return found.columns


@cache
def _widths() -> dict[str, int]:
    """How many columns each table has."""
    connection = apsw.Connection(":memory:")
    schema.create(connection)
    return {name: len(connection.execute(f"PRAGMA table_info({name})").fetchall()) for name in schema.TABLE_NAMES}


def _build(to: Layout, rows: _Rows) -> None:
    for folder in (to.path, to.packs, to.locks):
        folder.mkdir(mode=0o700, exist_ok=True)
    to.witness.write_bytes(witness.initial())
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection = apsw.Connection(str(to.catalog), flags=flags)
    try:
        lay_out(connection)
        for table, found in rows.tables.items():
            marks = ", ".join("?" * _widths()[table])
            # Of two rows that cannot both be (one of them deleted long ago), the one with the higher number counts.
            ordered = sorted(found.values(), key=lambda row: row[0], reverse=True)
            connection.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", ordered)  # noqa: S608
        connection.execute("COMMIT")
    finally:
        connection.close(True)


def add_rows(catalog: Embedded, table: str, rows: Sequence[Row]) -> None:
    """Rows that repair derived from others, given as they are before they are stored."""
    marks = ", ".join("?" * _widths()[table])

    def write(writer: Writer) -> None:
        for row in rows:
            stored = writer.cipher.stored(table, *row)
            writer.connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", stored)  # noqa: S608

    catalog.mend(write)


def add_metadata(catalog: Embedded, found: Mapping[bytes, bytes]) -> None:
    def write(writer: Writer) -> None:
        for digest, data in found.items():
            writer.insert_metadata(digest, data)

    catalog.mend(write)


def drop_homeless_chunks(catalog: Embedded) -> None:
    """Chunks of packs whose rows are lost: nobody knows in which file they are."""

    def write(writer: Writer) -> None:
        writer.connection.execute("DELETE FROM chunk WHERE p NOT IN (SELECT p FROM pack)")

    catalog.mend(write)


def drop_chunks(catalog: Embedded, digests: Iterable[bytes]) -> None:
    """Chunks whose bytes are lost: whatever needs them shows that it does, and whatever only names them can go on."""

    def write(writer: Writer) -> None:
        keys = [(writer.cipher.lookup("chunk", digest),) for digest in digests]
        writer.connection.executemany("DELETE FROM chunk WHERE digest = ?", keys)

    catalog.mend(write)


def drop_validity(catalog: Embedded, a: int, numbers: Iterable[int]) -> None:
    """What an agent thinks of checkpoints that it does not have any more."""

    def write(writer: Writer) -> None:
        writer.connection.executemany("DELETE FROM validity WHERE a = ? AND n = ?", [(a, n) for n in numbers])

    catalog.mend(write)
