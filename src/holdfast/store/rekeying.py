"""Changing the keys of a store: who can open it, and what everything in it is encrypted with.

Owns the changes to the file ``keys`` and the way from one master key to the next. Must not know what rows mean.
Always true: a process may die between any two calls, and doing the same again finishes it; while rows of two master
keys lie side by side nobody else can open the store, and whoever had it open is refused; what no key can read is left
as it is and stops the change before it has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw
from msgspec.structs import replace

from holdfast.codec.values import encode
from holdfast.errors import BadOption, Damaged, HoldfastError, NotAStore, NotEncrypted, Unavailable
from holdfast.store import keys as key_file
from holdfast.store.catalog import ChunkRow, PackRow, Progress
from holdfast.store.cipher import Cipher, Keyed, derive
from holdfast.store.files import Layout, classify
from holdfast.store.keys import Keys, Secret, Slot
from holdfast.store.locks import StoreLock
from holdfast.store.opening import Clock, check_facts, cipher_state, now_us, open_reader, require_cryptography
from holdfast.store.packs import Packs
from holdfast.store.reading import CIPHER_STATE, KEYS_OF_TABLES, Reading
from holdfast.store.schema import TABLES
from holdfast.store.sqlite import connect, reading_error, writing_error
from holdfast.store.tiering import STRAYS, TIERS, ColdCopy, Tiers, copy_out, recorded, remove_copies

ROWS_AT_ONCE = 64
"""Rows of one transaction. Nodes have up to some hundred kilobytes, so this keeps a transaction within megabytes."""

_UNSUMMED = {"tail": ("n",), "node": ("k",), "metadata": ("digest",)}
_ORDER = (
    "agent", "branch", "tag", "checkpoint", "validity", "tail", "seal", "node", "metadata", "event", "line", "effect",
    "pack", "chunk", "store",
)  # fmt: skip

T = TypeVar("T")


def keys_of(path: Path) -> Keys:
    """The keys of the store at ``path``, as its file lists them."""
    found = key_file.read_keys(path)
    if found is None:
        if not classify(path):
            raise NotAStore(f"there is no store at {path}", hint="Check the path.")
        raise NotEncrypted(f"{path} is not encrypted", hint="Make a new store with a key, and push this one into it.")
    require_cryptography()
    return found


def change_keys(path: Path, secret: Secret, change: Callable[[Keys, bytes, Slot], Keys]) -> Keys:
    """Replace the list of keys. ``change`` gets the old one, the master key, and the slot that ``secret`` opened."""
    keys_of(path)
    with _locked(Layout(path).store_lock):
        found = keys_of(path)  # another process may have changed it while this one waited
        master, slot = found.unlock(secret)
        if found.previous:
            raise BadOption(
                "the store is being given another master key", hint="Finish it first: `holdfast key rotate --full`."
            )
        new = change(found, master, slot)
        key_file.write_keys(path, new)
        return new


def add_key(path: Path, secret: Secret, new: Secret, clock: Clock = now_us) -> Slot:
    """Let one more key open the store."""
    changed = change_keys(path, secret, lambda found, master, _: found.with_slot(master, new, clock())[0])
    return changed.slots[-1]


def remove_key(path: Path, secret: Secret, number: int) -> None:
    """Let a key open the store no more. Whoever has an old copy of the file ``keys`` can still use it on that copy."""
    change_keys(path, secret, lambda found, master, _: found.without(master, number))


def replace_key(path: Path, secret: Secret, new: Secret, clock: Clock = now_us) -> Slot:
    """Put another key in the place of the one that is given."""

    def change(found: Keys, master: bytes, slot: Slot) -> Keys:
        found.refuse_known(new)
        left = replace(found, slots=tuple(one for one in found.slots if one.number != slot.number))
        changed, _ = left.with_slot(master, new, clock())
        return changed

    return change_keys(path, secret, change).slots[-1]


@contextmanager
def _locked(path: Path, wait_s: float = 30.0) -> Iterator[None]:
    lock = StoreLock(path)
    try:
        lock.acquire(wait_s)
        try:
            yield
        finally:
            lock.release()
    finally:
        lock.close()


# -- another master key -------------------------------------------------------------------------------------


def replace_master(
    path: Path,
    secret: Secret,
    new: Callable[[], Secret],
    progress: Progress | None = None,
    clock: Clock = now_us,
) -> bool:
    """Encrypt everything with a new master key, which only the key that ``new`` gives leads to.

    One that was begun and not finished is finished with the key that was given then. Returns whether that was so.
    """
    layout = Layout(path)
    keys_of(path)
    with _locked(layout.forgetting_lock):
        found = keys_of(path)
        master, _ = found.unlock(secret)
        resumed = bool(found.previous)
        if not resumed:
            _check_sound(layout, secret, progress)
            found, master = _begin(layout, found, master, new(), clock)
        try:
            _encrypt(layout, found, master, progress)
        except Unavailable as error:
            error.hint = f"{error.hint} The new key alone opens the store now: do it again with that one.".strip()
            raise
        return resumed


def _encrypt(layout: Layout, found: Keys, master: bytes, progress: Progress | None) -> None:
    """Everything that does not have the new master key yet."""
    try:
        connection = connect(layout.catalog, readonly=False)
    except apsw.Error as error:
        raise reading_error(error, "opening the catalog") from error
    try:
        _Rekeying(layout, connection, found, master, progress).run()
    except apsw.Error as error:
        raise writing_error(error, connection, "encrypting the catalog anew") from error
    finally:
        connection.close(True)
    with _locked(layout.store_lock):
        key_file.write_keys(layout.path, replace(found, previous=b"").signed(master))


def _begin(layout: Layout, found: Keys, master: bytes, new: Secret, clock: Clock) -> tuple[Keys, bytes]:
    """From here on the new key alone opens the store. The old master key is kept, wrapped, until all rows are done."""
    changed, fresh = key_file.new_keys(found.uuid, new, clock(), found.epoch + 1)
    changed = replace(changed, previous=_previous(fresh, found.uuid).encrypt(master, [b"holdfast.previous"]))
    with _locked(layout.store_lock):
        key_file.write_keys(layout.path, changed.signed(fresh))
    return changed.signed(fresh), fresh


def _previous(master: bytes, uuid: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    return AESSIV(derive("previous", master, uuid, 64))


def _check_sound(layout: Layout, secret: Secret, progress: Progress | None) -> None:
    """Raise if something in the catalog cannot be read now: afterwards there would be no key left to try it with."""
    connection = open_reader(layout, None)
    try:
        reading = Reading(connection)
        facts = check_facts(reading, layout, secret)
        total = sum(reading.counts().values())
        packs = Packs(layout.packs, cipher=facts.cipher)
        tiers = Tiers(Reading(connection, facts.cipher).fact)
        tiers.require()
        packs.cold = tiers.of
        for done, (table, row) in enumerate(_every_row(connection), 1):
            if not _authentic(facts.cipher, table, row):
                raise Damaged(
                    f"table {table}: a row is damaged, so the master key was not changed",
                    what=(f"table {table}",),
                    hint="Run `holdfast verify` to see what is affected, and repair that first.",
                )
            if table == "chunk":
                _check_chunk(connection, facts.cipher, packs, row)
            if progress is not None and done % ROWS_AT_ONCE == 0:
                progress("checked", done, total)
    except apsw.Error as error:
        raise reading_error(error, "reading the catalog") from error
    finally:
        connection.close(True)


def _check_chunk(connection: apsw.Connection, cipher: Cipher, packs: Packs, row: tuple[Any, ...]) -> None:
    chunk = cipher.record("chunk", ChunkRow, row)
    pack = connection.execute("SELECT p, uuid, size, sum FROM pack WHERE p = ?", (chunk.p,)).fetchone()
    if pack is None:
        raise Damaged(f"table pack, row {chunk.p}: missing", what=(f"pack {chunk.p}",))
    packs.read(cipher.record("pack", PackRow, pack).uuid, chunk)


@dataclass(frozen=True, slots=True)
class _Table:
    """How the rows of a table are found and written."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    def batch(self, after: tuple[Any, ...]) -> str:
        order = ", ".join(self.key)
        marks = ", ".join("?" * len(self.key))
        where = f" WHERE ({order}) > ({marks})" if after else ""
        names = ", ".join((*self.key, *self.columns))
        return f"SELECT {names} FROM {self.name}{where} ORDER BY {order} LIMIT {ROWS_AT_ONCE}"  # noqa: S608  constants only

    def update(self) -> str:
        sets = ", ".join(f"{column} = ?" for column in self.columns)
        return f"UPDATE {self.name} SET {sets} WHERE {' AND '.join(f'{column} = ?' for column in self.key)}"  # noqa: S608


def _columns(table: str) -> tuple[str, ...]:
    sql = next(sql for sql in TABLES if sql.startswith(f"CREATE TABLE {table} "))
    parts = sql[sql.index("(") + 1 : sql.rindex(")")].split(", ")
    names = (part.split()[0] for part in parts)
    return tuple(name for name in names if name.isidentifier() and name.islower())


_TABLES = {name: _Table(name, _columns(name), KEYS_OF_TABLES.get(name) or _UNSUMMED[name]) for name in _ORDER}


def _every_row(connection: apsw.Connection) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for table in _TABLES.values():
        after: tuple[Any, ...] = ()
        while batch := connection.execute(table.batch(after), after).fetchall():
            for found in batch:
                yield table.name, tuple(found[len(table.key) :])
            after = tuple(batch[-1][: len(table.key)])


def _authentic(cipher: Cipher, table: str, row: tuple[Any, ...]) -> bool:
    try:
        if table not in _UNSUMMED:
            return cipher.loose(table, row)[1]
        _plain(cipher, table, row)
    except (HoldfastError, TypeError, ValueError):
        return False
    return True


def _plain(cipher: Cipher, table: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The columns of a row as they were before they were encrypted."""
    if table == "tail":
        return row[0], cipher.unbox("tail", row[0], row[1])
    if table in {"node", "metadata"}:
        digest = cipher.found(table, row[-2])
        return (*row[:-2], digest, cipher.unbox(table, digest, row[-1]))
    return cipher.record(table, lambda *columns: columns, row)


def _stored(cipher: Cipher, table: str, columns: tuple[Any, ...]) -> tuple[Any, ...]:
    if table == "tail":
        return columns[0], cipher.box("tail", columns[0], columns[1])
    if table in {"node", "metadata"}:
        *first, digest, data = columns
        return (*first, cipher.lookup(table, digest), cipher.box(table, digest, data))
    return cipher.stored(table, *columns)


class _Rekeying:
    """All rows and packs, from the old master key to the new one."""

    def __init__(
        self, layout: Layout, connection: apsw.Connection, found: Keys, master: bytes, progress: Progress | None
    ) -> None:
        self._layout = layout
        self._connection = connection
        self._progress = progress
        before = _previous(master, found.uuid).decrypt(found.previous, [b"holdfast.previous"])
        self._state = encode([1, found.epoch, True])
        self._old = Keyed(before, found.uuid, cipher_state(found.epoch - 1))
        self._new = Keyed(master, found.uuid, cipher_state(found.epoch))
        self._lock = StoreLock(layout.store_lock)
        self._done = 0
        self._total = 0

    def run(self) -> None:
        try:
            if self._connection.execute(CIPHER_STATE).get != self._new.state:
                self._total = sum(Reading(self._connection).counts().values())
                # Whoever has the store open is refused from here on.
                self._transaction(lambda: self._set_state(self._old, self._state))
                self._packs()
                for table in _TABLES.values():
                    self._table(table)
                self._vacuum()
                self._transaction(lambda: self._set_state(self._new, self._new.state))
            self._clean_up()
        finally:
            self._lock.close()

    def _set_state(self, cipher: Cipher, state: bytes) -> None:
        row = cipher.stored("store", "cipher", state)
        self._connection.execute("INSERT OR REPLACE INTO store VALUES (?, ?, ?)", row)

    def _transaction(self, change: Callable[[], T]) -> T:
        self._lock.acquire()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = change()
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            return result
        finally:
            self._lock.release()

    def _table(self, table: _Table) -> None:
        after: tuple[Any, ...] = ()
        while True:
            batch = self._connection.execute(table.batch(after), after).fetchall()
            if not batch:
                return
            self._transaction(lambda: self._rows(table, batch))  # noqa: B023  called at once
            after = tuple(batch[-1][: len(table.key)])
            self._done += len(batch)
            if self._progress is not None:
                self._progress("encrypted", min(self._done, self._total), self._total)

    def _rows(self, table: _Table, batch: list[tuple[Any, ...]]) -> None:
        """A row that has the new key already was done before a crash, or moved ahead because its key is its place."""
        width = len(table.key)
        for found in batch:
            key, row = tuple(found[:width]), tuple(found[width:])
            if not _authentic(self._new, table.name, row) and not (table.name == "store" and key == ("cipher",)):
                stored = _stored(self._new, table.name, _plain(self._old, table.name, row))
                self._connection.execute(table.update(), (*stored, *key))

    def _packs(self) -> None:
        """Packs are written anew, one at a time; rows that name the old file go over to the new one together."""
        old, new = (Packs(self._layout.packs, cipher=cipher) for cipher in (self._old, self._new))
        old.cold = self._tiers.of
        rows = self._connection.execute("SELECT p, uuid, size, sum FROM pack ORDER BY p").fetchall()
        named = {uuid for _, uuid, _, _ in rows}
        if unnamed := [copy for copy in self._tiers.packs.items() if copy[0] not in named]:
            self._transaction(lambda: self._lie(away=unnamed))
        self._clear_strays()
        for row in rows:
            if _authentic(self._new, "pack", row):
                continue
            pack = self._old.record("pack", PackRow, row)
            found = self._connection.execute(
                "SELECT digest, p, offset, length, stored, sum FROM chunk WHERE p = ? ORDER BY offset", (pack.p,)
            ).fetchall()
            chunks = [self._old.record("chunk", ChunkRow, one) for one in found]
            written = new.write((chunk.digest, old.read(pack.uuid, chunk)) for chunk in chunks)
            place = self._tiers.of(pack.uuid)
            if place is not None:
                self._transaction(lambda: self._lie(away=[(written.uuid, place.url)]))  # noqa: B023  called at once
                copy_out(place, new.path(written.uuid))
            url = place.url if place is not None else ""

            def change(pack: PackRow = pack, found: Any = found, written: Any = written, url: str = url) -> None:
                row = self._new.stored("pack", pack.p, written.uuid, written.size)
                self._connection.execute(_TABLES["pack"].update(), (*row, pack.p))
                for before, chunk in zip(found, written.chunks, strict=True):
                    columns = (chunk.digest, pack.p, chunk.offset, chunk.length, chunk.stored)
                    stored = self._new.stored("chunk", *columns)
                    self._connection.execute(_TABLES["chunk"].update(), (*stored, before[0]))
                if url:
                    self._lie(there=[(written.uuid, url)], away=[(pack.uuid, url)])

            self._transaction(change)
            old.remove(pack.uuid)
            if place is not None:
                new.remove(written.uuid)
                self._clear_strays()

    # Rows about colder places have the old key or the new one, as far as a crash let it come.

    @property
    def _tiers(self) -> Tiers:
        return Tiers(lambda name: self._fact(name)[1])

    def _fact(self, name: str) -> tuple[Cipher, bytes | None]:
        rows = self._connection.execute("SELECT name, value, sum FROM store WHERE name = ?", (name,)).fetchall()
        if not rows:
            return self._old, None
        cipher = self._new if _authentic(self._new, "store", rows[0]) else self._old
        return cipher, cipher.record("store", lambda _, value: bytes(value), rows[0])

    def _lie(
        self, there: Iterable[ColdCopy] = (), away: Iterable[ColdCopy] = (), gone: Iterable[ColdCopy] = ()
    ) -> None:
        packs, strays = recorded(self._tiers, there, away, gone)
        for name, value in ((TIERS, packs), (STRAYS, strays)):
            cipher, before = self._fact(name)
            if value is None:
                self._connection.execute("DELETE FROM store WHERE name = ?", (name,))
            elif value != before:
                row = cipher.stored("store", name, value)
                self._connection.execute("INSERT OR REPLACE INTO store VALUES (?, ?, ?)", row)

    def _clear_strays(self) -> None:
        """What lies at colder places and is not needed has the old key: it goes, or the change does not end."""
        strays = self._tiers.strays
        left, why = remove_copies(strays)
        if gone := strays - left:
            self._transaction(lambda: self._lie(gone=gone))
        if why is not None:
            raise why

    def _vacuum(self) -> None:
        """Write the database anew: unused parts of its pages still hold what the old key can read."""
        # Its copy can be larger than memory. What is in it has the new key.
        self._connection.execute("PRAGMA temp_store=FILE").fetchall()
        self._lock.acquire()
        try:
            self._connection.execute("VACUUM")
        finally:
            self._lock.release()

    def _clean_up(self) -> None:
        """Old packs that a crash left behind, and the log, both of which the old key can read."""
        rows: list[tuple[Any, ...]] = self._connection.execute("SELECT uuid FROM pack").fetchall()
        named = {uuid for (uuid,) in rows}
        Packs(self._layout.packs).remove_strays(named, time.time() + 60)
        self._lock.acquire()
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:  # somebody reads: the log is cut when it is folded next
            pass
        finally:
            self._lock.release()
