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
from importlib import import_module
from pathlib import Path

import apsw
from msgspec import Struct

from holdfast.codec.values import decode, encode
from holdfast.errors import (
    Damaged,
    HoldfastError,
    Incompatible,
    KeyNeeded,
    NewerFormat,
    NotEncrypted,
    Rekeying,
    Unavailable,
)
from holdfast.store import files, keys, schema, upgrade
from holdfast.store.cipher import PLAIN, Cipher, Keyed, damaged_row
from holdfast.store.files import Layout
from holdfast.store.keys import Secret
from holdfast.store.reading import Reading
from holdfast.store.sqlite import connect, reading_error, settle
from holdfast.store.witness import ID_PREFIX_BYTES, Witness

Clock = Callable[[], int]


def now_us() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000


def create_store(path: str | os.PathLike[str], clock: Clock = now_us, secret: Secret | None = None) -> None:
    """Make a new store at ``path``, whole or not at all. One that another process made meanwhile is as good.

    With a ``secret`` it is encrypted, and that is the first key that opens it.
    """

    def build(catalog: Path) -> None:
        uuid = uuids.uuid4().bytes
        cipher = PLAIN
        if secret is not None:
            require_cryptography()
            created, master = keys.new_keys(uuid, secret, clock())
            keys.write_keys(catalog.parent, created)
            cipher = Keyed(master, uuid, cipher_state(created.epoch))
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        try:
            connection = apsw.Connection(str(catalog), flags=flags)
            try:
                _fill(connection, clock, uuid, cipher)
            finally:
                connection.close(True)
        except apsw.Error as error:
            raise reading_error(error, f"creating {catalog}") from error

    files.create(Path(os.path.realpath(path)), build)


def lay_out(connection: apsw.Connection) -> None:
    """Make an empty database a catalog without rows. Leaves a transaction open, in which they are to be written."""
    settle(connection, readonly=False)
    # Incremental vacuum only keeps a note of who refers to each page; giving room back is done after a removal.
    connection.execute("PRAGMA page_size=4096; PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL").fetchall()
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={upgrade.FORMAT_VERSION}")
    schema.create(connection)


def own_facts(uuid: bytes, created: int, cipher: Cipher) -> dict[str, bytes]:
    """What every catalog says of itself in its table ``store``."""
    facts = {"format": encode(upgrade.FORMAT_VERSION), "uuid": uuid, "created": encode(created)}
    return {**facts, "cipher": cipher.state} if cipher.keyed else facts


def _fill(connection: apsw.Connection, clock: Clock, uuid: bytes, cipher: Cipher) -> None:
    lay_out(connection)
    for name, value in own_facts(uuid, clock(), cipher).items():
        connection.execute("INSERT INTO store VALUES (?, ?, ?)", cipher.stored("store", name, value))
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


class Facts(Struct, frozen=True):
    """What the table ``store`` says. ``created`` is in microseconds."""

    version: int
    uuid: bytes
    created: int
    cipher: Cipher


def unlock(layout: Layout, secret: Secret | None, state: bytes | None) -> Cipher:
    """What the rows of the store are read with. ``state`` is what its table says of it, None when that is nothing."""
    found = keys.read_keys(layout.path)
    if found is None and state is None:
        if secret is None:
            return PLAIN
        raise NotEncrypted(
            f"{layout.path} is not encrypted, and a key was given",
            hint="If it should be, somebody put another store there. If not, give no key (key=False).",
        )
    if found is None:
        raise Damaged(f"{layout.path}: the file keys is missing", what=("keys",), hint="Put it back from a backup.")
    if secret is None:
        raise KeyNeeded(
            f"{layout.path} is encrypted",
            hint="Give the key: key=, HOLDFAST_KEY, HOLDFAST_KEY_FILE or HOLDFAST_KEY_COMMAND.",
        )
    require_cryptography()
    master, _ = found.unlock(secret)
    if state is not None and state != cipher_state(found.epoch):
        raise Rekeying(
            f"{layout.path} is being encrypted with another key",
            hint="If nobody is doing that now, finish it: `holdfast key rotate --full`.",
        )
    return Keyed(master, found.uuid, cipher_state(found.epoch))


def cipher_state(epoch: int) -> bytes:
    """The row ``cipher`` of a store all of whose rows have the key of that epoch."""
    return encode([1, epoch])


def require_cryptography() -> None:
    try:
        import_module("cryptography.hazmat.primitives.kdf.argon2")
    except ImportError as error:
        raise Incompatible(
            "encrypted stores need the package cryptography, 44 or newer", hint="pip install 'holdfast[crypto]'"
        ) from error


def check_facts(reading: Reading, layout: Layout, secret: Secret | None = None) -> Facts:
    """Raise unless the store is sound so far as its header tells, and of a format that this program knows."""
    version = reading.header_version()
    try:
        rows = reading.store_rows()
    except Unavailable:
        raise  # it may be sound: nobody could look
    except HoldfastError as error:
        raise _table_damaged(layout, version) from error
    states = [value for name, value, _ in rows if name == "cipher"]
    if states and version > upgrade.FORMAT_VERSION:  # how it is encrypted may have changed, too
        raise _newer(layout, version)
    cipher = unlock(layout, secret, states[0] if states else None)
    try:
        sound = {name: value for (name, value), fits in (cipher.loose("store", row) for row in rows) if fits}
        facts = Facts(decode(sound["format"]), bytes(sound["uuid"]), int(decode(sound["created"])), cipher)
        if cipher.keyed and sound["cipher"] != cipher.state:
            raise _table_damaged(layout, version)
    except (HoldfastError, LookupError, TypeError, ValueError) as error:
        raise _table_damaged(layout, version) from error
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


def _table_damaged(layout: Layout, version: int) -> Damaged | NewerFormat:
    if version > upgrade.FORMAT_VERSION:
        return _newer(layout, version)
    return Damaged(f"{layout.catalog}: table store is damaged", what=("table store",))


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
