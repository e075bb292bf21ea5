"""What makes a directory a store of this version: its birth, and the checks before it is used.

Owns the content of a new catalog, the facts in its table ``store``, and the comparison with the witness.
Knows nothing of locks or of writing. Always true: a store that passes is of a format that this program knows, has
exactly its tables, and is not behind what its witness says was acknowledged.
"""

from __future__ import annotations

import os
import time
import uuid as uuids
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import apsw

from holdfast.codec.values import decode, encode
from holdfast.errors import Damaged, HoldfastError, NewerFormat
from holdfast.store import files, schema, upgrade
from holdfast.store.catalog import row_sum
from holdfast.store.files import Layout
from holdfast.store.reading import Reading, damaged_row
from holdfast.store.sqlite import connect, reading_error, settle
from holdfast.store.witness import ID_PREFIX_BYTES, Witness

Clock = Callable[[], int]


def now_us() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000


def create_store(path: str | os.PathLike[str], clock: Clock = now_us) -> None:
    """Make a new store at ``path``, whole or not at all. One that another process made meanwhile is as good."""

    def build(catalog: Path) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        try:
            connection = apsw.Connection(str(catalog), flags=flags)
            try:
                _fill(connection, clock)
            finally:
                connection.close(True)
        except apsw.Error as error:
            raise reading_error(error, f"creating {catalog}") from error

    files.create(Path(os.path.realpath(path)), build)


def _fill(connection: apsw.Connection, clock: Clock) -> None:
    settle(connection, readonly=False)
    # Incremental vacuum only keeps a note of who refers to each page; giving room back is done after a removal.
    connection.execute("PRAGMA page_size=4096; PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL").fetchall()
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={upgrade.FORMAT_VERSION}")
    schema.create(connection)
    for name, value in (
        ("format", encode(upgrade.FORMAT_VERSION)),
        ("uuid", uuids.uuid4().bytes),
        ("created", encode(clock())),
    ):
        connection.execute("INSERT INTO store VALUES (?, ?, ?)", (name, value, row_sum("store", name, value)))
    connection.execute("COMMIT")
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def open_reader(layout: Layout, vfs: str | None) -> apsw.Connection:
    """A connection that has proven that it can read."""
    try:
        connection = connect(layout.catalog, readonly=True, vfs=vfs)
        try:
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except apsw.Error:
            connection.close(True)
            raise
    except apsw.CantOpenError as error:
        # Without a log and without the right to make one, the database file alone is all there is.
        if os.access(layout.path, os.W_OK) or layout.log_bytes():
            raise reading_error(error, "opening the catalog") from error
        return connect(layout.catalog, readonly=True, immutable=True, vfs=vfs)
    except apsw.Error as error:
        raise reading_error(error, "opening the catalog") from error
    return connection


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table ``store`` says. ``created`` is in microseconds."""

    version: int
    uuid: bytes
    created: int


def check_facts(reading: Reading, layout: Layout) -> Facts:
    """Raise unless the store is sound so far as its header tells, and of a format that this program knows."""
    version = reading.header_version()
    try:
        rows = reading.store_rows()
        sound = {name: value for name, value, total in rows if row_sum("store", name, value) == total}
        facts = Facts(decode(sound["format"]), bytes(sound["uuid"]), int(decode(sound["created"])))
    except (HoldfastError, LookupError, TypeError, ValueError) as error:
        if version > upgrade.FORMAT_VERSION:
            raise _newer(layout, version) from error
        raise Damaged(f"{layout.catalog}: table store is damaged", what=("table store",)) from error
    if facts.version != version:
        raise Damaged(
            f"{layout.catalog}: its header says format {version}, its table {facts.version}",
            what=("store.db header",),
        )
    if version > upgrade.FORMAT_VERSION:
        raise _newer(layout, version)
    for name, _, _ in rows:
        if name not in sound:
            raise damaged_row("store", name)
    if version == upgrade.FORMAT_VERSION:
        reading.check_schema()
    return facts


def _newer(layout: Layout, version: int) -> NewerFormat:
    return NewerFormat(
        f"{layout.path} has format {version}; this program knows up to {upgrade.FORMAT_VERSION}",
        hint="Use a newer Holdfast. Nothing was changed.",
    )


def lost_commits(reading: Reading, noted: Witness | None) -> list[str]:
    """What the witness knows and the catalog does not, in words. ``noted`` must have been read before this call."""
    if noted is None:
        return []
    n, e, r = reading.newest()
    lost = []
    if n < noted.n:
        lost.append(f"checkpoints {n + 1} to {noted.n}")
    elif noted.n and _replaced(reading, noted):
        lost.append(f"the checkpoint that was number {noted.n}")
    if e < noted.e:
        lost.append(f"events {e + 1} to {noted.e}")
    if r < noted.r:
        lost.append(f"effects {r + 1} to {noted.r}")
    return lost


def _replaced(reading: Reading, noted: Witness) -> bool:
    """Whether another checkpoint has the number. A row that is missing or damaged is its agent's matter, not this."""
    try:
        return reading.checkpoint(noted.n).id[:ID_PREFIX_BYTES] != noted.id_prefix
    except Damaged:
        return False
