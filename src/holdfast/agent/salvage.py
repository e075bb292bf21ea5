"""Salvage: the rows and chunks of a damaged store that can be proven, and their way into the new store of a repair.

Owns what is taken from where: from the database as SQLite reads it, and, where that is not all, from its bare pages and
those of its log. Every row bears its sum or its digest, so it does not matter where it was found, and damage cannot
come along. The damaged files are copied first and only read. What rows mean, and what is missing, is for repair to say.
What always holds: of several versions of a row SQLite's counts, then the one that was written last; the search ends,
because each page is looked at once, and a chain of pages visits none twice; rows keep their handles; a chunk is read
and proven before it gets into a pack of the new store; what packs say of themselves stands for rows that are lost.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from holdfast.agent.collection import note_waste
from holdfast.errors import Damaged, KeyNeeded, NotEncrypted, StoreFailed
from holdfast.store import keys, sqlite
from holdfast.store.catalog import Progress, View
from holdfast.store.changes import Change, NewPack
from holdfast.store.cipher import PLAIN, Cipher, Keyed, uncompressed
from holdfast.store.database import COLD, OBJECTS, Database
from holdfast.store.engine import Row
from holdfast.store.files import Layout, failed_disk
from holdfast.store.manifest import body_proof, identity, mark_of, split_payload
from holdfast.store.objects import Folder, open_objects
from holdfast.store.packs import Packs, file_name
from holdfast.store.rows import NODE_MAX_BYTES, SHAPES, Place, node_digest
from holdfast.store.sqlite import SqliteTx
from holdfast.store.tables import CHECKPOINTS, HANDLES, LOG_GONE, TABLES
from holdfast.store.witness import Noted, lost

if TYPE_CHECKING:
    from holdfast.agent.repair import RepairReport

_COPIES = 8
_PAGE_BYTES = 4096
_BLOCK_BYTES = 4096
"""What is given up around a place that cannot be read: a page of the database, and what disks have for a sector."""

_COPIED_AT_ONCE = 2**20

Take = Callable[[str, Row], None]
"""Takes a table, and the values of a row of it that was proven."""


# -- files -------------------------------------------------------------------------------------------------------


def copy_database(source: Layout, to: Path) -> tuple[Layout, list[str]]:
    """The database's files as they are, in a directory of their own, and what could not be read, for people."""
    to.mkdir(mode=0o700)
    lost: dict[str, int] = {}
    with _unwritten(source):
        for _ in range(_COPIES):
            before = _beginning(source.wal)
            for file in (source.catalog, source.wal):
                if file.exists():
                    lost[file.name] = _copy(file, to / file.name)
            # A commit that was under way may have begun the log anew: then the two copies are of different times.
            if _beginning(source.wal) == before:
                break
    return Layout(to), [
        f"{name}: the disk does not give back {size} bytes of it" for name, size in lost.items() if size
    ]


def _copy(source: Path, to: Path) -> int:
    """Copy a file. Blocks that the disk does not give back become zeros; returns how many bytes these are."""
    lost, at, step = 0, 0, _COPIED_AT_ONCE
    with source.open("rb", buffering=0) as old, to.open("wb") as new:
        while True:
            try:
                data = os.pread(old.fileno(), step, at)
            except OSError as error:
                left = os.fstat(old.fileno()).st_size - at
                if not failed_disk(error) or left <= 0:
                    raise
                if step > _BLOCK_BYTES:
                    step = _BLOCK_BYTES
                    continue
                data = bytes(min(_BLOCK_BYTES, left))
                lost += len(data)
            if not data:
                return lost
            new.write(data)
            at += len(data)


def _beginning(path: Path) -> bytes:
    with suppress(OSError), path.open("rb", buffering=0) as file:
        return file.read(32)
    return b""


def undisturbed(source: Layout) -> AbstractContextManager[None]:
    """Nobody deletes packs meanwhile: a copy of the database names them as they were."""
    return _held(source.moments_lock, lambda fd: fcntl.flock(fd, fcntl.LOCK_SH))


def _unwritten(source: Layout) -> AbstractContextManager[None]:
    """Writers wait meanwhile."""
    lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
    return _held(source.queue_lock, lambda fd: fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, lock))


@contextmanager
def _held(path: Path, take: Callable[[int], object]) -> Iterator[None]:
    """A lock of the store, where there is one: nothing is made beside a damaged store."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = -1
    try:
        if fd >= 0:
            take(fd)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _mapped(path: Path) -> Any:
    """A file's bytes. It is our own copy, so that nobody makes it shorter meanwhile."""
    if not path.exists() or not path.stat().st_size:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def unlocked(copy: Layout, secret: keys.Secret | None) -> Cipher:
    """What the rows of a damaged database are read with. Its list of keys may have to be looked for."""
    found = None
    try:
        connection = sqlite.connect(copy.catalog, readonly=True)
        try:
            found = keys.read_slots(View(SqliteTx(connection), PLAIN))
        finally:
            connection.close(True)
    except (apsw.Error, Damaged):
        pass
    if found is None:
        lists = [one for file in (copy.catalog, copy.wal) for one in keys.carved(_mapped(file))]
        for columns in _Pages(copy).records():  # a long one lies in several pages
            if len(columns) == len(TABLES["slot"].names) and (values := proven(PLAIN, "slot", columns)):
                with suppress(Damaged):
                    lists.append(keys.Keys.decode(values[1]))
        found = max(lists, key=lambda one: one.revision, default=None)
    if found is None:
        if secret is not None:
            raise NotEncrypted(
                "a key was given, and no list of keys is in the store",
                hint="If it is not encrypted, give no key (key=False). If it is, nobody can read anything in it.",
            )
        return PLAIN
    if secret is None:
        raise KeyNeeded("the store is encrypted", hint="Give the key that opens it.")
    master, _ = found.unlock(secret)
    return Keyed(master, found.uuid)


# -- rows --------------------------------------------------------------------------------------------------------


def proven(cipher: Cipher, table: str, row: Row) -> Row | None:
    """The values of a row, if it is one of that table as it was written."""
    try:
        values = cipher.loaded(table, row)
        if table in SHAPES:
            SHAPES[table](values)
        if table == "node" and node_digest(uncompressed(values[2], NODE_MAX_BYTES)) != values[1]:
            return None
        if table == "loose" and mark_of(identity(split_payload(values[-1])[0])) != values[1]:
            return None
    except Damaged:
        return None
    return values


def _said(values: Row) -> int:
    return len(values[-1])


class Salvage:
    """Gives every row that can be proven to ``take``, the version that counts first.

    ``problems`` are what was wrong, for people; ``hollow`` are records of which only the content, or the values, are
    lost.
    """

    def __init__(self, cipher: Cipher, take: Take) -> None:
        self.problems: list[str] = []
        self.hollow: dict[int, Row] = {}
        self._cipher = cipher
        self._take = take
        self._newest: dict[str, int] = {}
        self._hollow: dict[int, Row] = {}
        self._whole: set[int] = set()

    def read(self, copy: Layout, noted: Noted | None) -> None:
        """``noted`` is what the witness says: a log that breaks off hides commits from SQLite."""
        self._with_sqlite(copy)
        sequences = (("loose", "checkpoints"), ("log", "events"), ("record", "effects"))
        for (sequence, called), number in zip(sequences, noted or (), strict=False):
            if number > self._newest.get(sequence, 0):
                self.problems.append(f"store.db: SQLite does not find {called} up to {number}, which were acknowledged")
        if self.problems:
            widths: dict[int, list[str]] = {}
            for table, spec in TABLES.items():
                widths.setdefault(len(spec.names), []).append(table)
            for columns in _Pages(copy).records():
                for table in widths.get(len(columns), ()):
                    self._taken(table, columns)
        self.hollow = {r: row for r, row in self._hollow.items() if r not in self._whole}
        for row in self.hollow.values():
            self._take("record", row)

    def _taken(self, table: str, row: Row) -> bool:
        values = proven(self._cipher, table, row)
        if values is None:
            # What a record says stands behind its sum: its place in its line may be sound without, or without values.
            if table == "record" and row[-2] and isinstance(row[-2], bytes):
                for left in (body_proof(row[-2]), b""):
                    if values := proven(self._cipher, table, (*row[:-2], left, row[-1])):
                        self._hollow[values[0]] = max(values, self._hollow.get(values[0], values), key=_said)
                        break
            return False
        if table == "floor":
            self._newest[values[0]] = max(values[1], self._newest.get(values[0], 0))
        sequence = "loose" if table in CHECKPOINTS else table
        if sequence in HANDLES:
            self._newest[sequence] = max(values[0], self._newest.get(sequence, 0))
        if table == "record":
            self._whole.add(values[0])
        self._take(table, values)
        return True

    def _with_sqlite(self, copy: Layout) -> None:
        """Take what SQLite reads. There is a problem if that is not all."""
        problems = self.problems
        try:
            connection = sqlite.connect(copy.catalog, readonly=True)
        except apsw.Error as error:
            problems.append(f"store.db: SQLite does not open it ({error})")
            return
        try:
            for table, spec in TABLES.items():
                try:
                    found = connection.execute(f"SELECT {spec.listed} FROM {table} NOT INDEXED")
                    bad = sum(not self._taken(table, row) for row in found)
                except (apsw.Error, UnicodeDecodeError) as error:
                    problems.append(f"table {table}: SQLite cannot read all of it ({error})")
                    continue
                if bad:
                    problems.append(f"table {table}: {bad} row(s) are not what was written")
            try:
                said = connection.execute("PRAGMA integrity_check(5)").fetchall()
                problems += [f"store.db: {text}" for (text,) in said if text != "ok"]
            except (apsw.Error, UnicodeDecodeError) as error:
                problems.append(f"store.db: SQLite cannot check it ({error})")
        finally:
            connection.close(True)


# -- pages -------------------------------------------------------------------------------------------------------

_LEAF_TABLE, _LEAF_INDEX, _INNER_INDEX = 0x0D, 0x0A, 0x02
_HEADER_BYTES, _LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 100, 32, 24
_ROW_MAX_BYTES = 2**30
_INT_BYTES = (0, 1, 2, 3, 4, 6, 8)


class _NoRecord(Exception):
    """These bytes are not a record."""


class _Pages:
    """As much of SQLite's file format as it takes to find records, without trusting a tree or a log's sums."""

    def __init__(self, copy: Layout) -> None:
        self._file = _mapped(copy.catalog)
        self._log = _mapped(copy.wal)
        size = int.from_bytes(self._file[16:18], "big")
        size = 65536 if size == 1 else size
        sound = 512 <= size <= 65536 and not size & (size - 1)
        self._size = size if sound else _PAGE_BYTES
        reserved = self._file[20] if sound else 0
        self._usable = self._size - (reserved if reserved <= 64 else 0)
        # Where each page's versions are in the log, oldest first: all of its present life, also behind a wrong sum.
        self._versions: dict[int, list[int]] = {}
        step = _FRAME_HEADER_BYTES + self._size
        for at in range(_LOG_HEADER_BYTES, len(self._log) - step + 1, step):
            if self._log[at + 8 : at + 16] == self._log[16:24]:
                number = int.from_bytes(self._log[at : at + 4], "big")
                self._versions.setdefault(number, []).append(at + _FRAME_HEADER_BYTES)

    def records(self) -> Iterator[Row]:
        """The columns of whatever looks like a row, what was written last first."""
        for at in sorted((at for some in self._versions.values() for at in some), reverse=True):
            yield from self._in_page(self._log[at : at + self._size], at)
        for at in range(0, len(self._file), self._size):
            yield from self._in_page(self._file[at : at + self._size], 0)

    def _page(self, number: int, age: int) -> bytes:
        """A page as it most likely was when something of that age was written."""
        at = max((at for at in self._versions.get(number, ()) if at <= age), default=0)
        if at:
            return bytes(self._log[at : at + self._size])
        return bytes(self._file[(number - 1) * self._size : number * self._size]) if number else b""

    def _in_page(self, page: bytes, age: int) -> Iterator[Row]:
        start = _HEADER_BYTES if page.startswith(b"SQLite format 3\0") else 0
        kind = page[start] if len(page) == self._size else 0
        if kind not in {_LEAF_TABLE, _LEAF_INDEX, _INNER_INDEX}:
            return
        first = start + (12 if kind == _INNER_INDEX else 8)
        count = int.from_bytes(page[start + 3 : start + 5], "big")
        for place in range(first, min(first + 2 * count, self._usable - 1), 2):
            with suppress(_NoRecord, IndexError, struct.error, UnicodeDecodeError):
                yield self._cell(page, kind, int.from_bytes(page[place : place + 2], "big"), age)

    def _cell(self, page: bytes, kind: int, at: int, age: int) -> Row:
        size, at = _varint(page, at + 4 if kind == _INNER_INDEX else at)
        rowid = 0
        if kind == _LEAF_TABLE:
            rowid, at = _varint(page, at)
            rowid -= (rowid >> 63) << 64
        if not 2 <= size <= _ROW_MAX_BYTES:
            raise _NoRecord
        most = self._usable - 35 if kind == _LEAF_TABLE else (self._usable - 12) * 64 // 255 - 23
        local = size
        if size > most:
            least = (self._usable - 12) * 32 // 255 - 23
            local = least + (size - least) % (self._usable - 4)
            local = local if local <= most else least
        payload = page[at : at + local]
        number, seen = int.from_bytes(page[at + local : at + local + 4], "big"), set()
        while len(payload) < size:
            more = self._page(number, age)
            if number in seen or len(more) != self._size:
                raise _NoRecord
            seen.add(number)
            payload += more[4 : 4 + min(size - len(payload), self._usable - 4)]
            number = int.from_bytes(more[:4], "big")
        columns = _columns(payload)
        if kind == _LEAF_TABLE and columns and columns[0] is None:  # the row's own number stands beside the record
            columns[0] = rowid
        return tuple(columns)


def _columns(payload: bytes) -> list[Any]:
    end, at = _varint(payload, 0)
    body = end
    found: list[Any] = []
    while at < end:
        kind, at = _varint(payload, at)
        size = 0 if kind in {0, 8, 9} else _INT_BYTES[kind] if kind < 7 else 8 if kind == 7 else (kind - 12) // 2
        data = payload[body : body + size]
        body += size
        if kind in {10, 11} or len(data) != size or len(found) > 64:
            raise _NoRecord
        if kind >= 12:
            found.append(data.decode() if kind % 2 else data)
        elif kind == 7:
            found.append(struct.unpack(">d", data)[0])
        else:
            found.append(None if kind == 0 else kind - 8 if kind > 7 else int.from_bytes(data, "big", signed=True))
    if at != end or body != len(payload):
        raise _NoRecord
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | data[at + 8], at + 9


# -- into a new store -------------------------------------------------------------------------------------------------


_PLACES = (OBJECTS, COLD)
_BATCH_ROWS, _BATCH_BYTES = 512, 2**22
_REFS = frozenset({"agent", "branch", "tag", "validity", "shallow"})


class Rescue:
    """Fills a new store. ``hurt``: something is not as it was written."""

    def __init__(self, db: Database, report: RepairReport, say: Progress) -> None:
        self.db = db
        self.view = db.view
        self.facts: dict[str, bytes] = {}
        self.floors: dict[str, int] = {}
        self.refs: dict[tuple[Any, ...], tuple[str, tuple[Any, ...]]] = {}  # rows that are written at the end
        self.hurt = False
        self._report = report
        self._say = say
        self._batch: list[tuple[str, tuple[Any, ...]]] = []
        self._bytes = 0

    def fill(self, copy: Layout, cipher: Cipher, noted: Noted | None) -> None:
        """Write every row that can be proven, with its old handle. Refs are written at the end."""
        rows = Salvage(cipher, self._take)
        rows.read(copy, noted)
        self._flush()
        self.db.change(self.remember)
        self.hurt = bool(rows.problems)
        self._report.problems += rows.problems
        for r in sorted(rows.hollow):
            record = f"record {r} of what happened outside"
            bare, gone = f"the values of {record}; what it says", f"what {record} says; that there was one"
            self._report.missing.append(f"{bare if rows.hollow[r][-1] else gone} is kept")
        if not self.facts:
            self._report.missing.append("what the store said of itself: its policy, and where packs lie, if it had any")
        missing = self.view.entries_missing()
        if missing > 0:
            self.hurt = True
            self._report.missing.append(f"{missing} entries of the log: what became of refs, or was kept under a key")
        if lost(self.view, noted):
            self._report.missing.append(f"acknowledged {', '.join(lost(self.view, noted))}")

    def _take(self, table: str, values: tuple[Any, ...]) -> None:
        if table == "store":
            self.facts.setdefault(*values)
        elif table == "floor":
            self.floors[values[0]] = max(values[1], self.floors.get(values[0], 0))
        elif table in _REFS:
            key = (table, *(values[at] for at in TABLES[table].keys))
            known = self.refs.get(key)
            # A branch is written over with every commit: of several versions the newest counts.
            if known is None or (table == "branch" and _version(values) > _version(known[1])):
                self.refs[key] = table, values
        elif table not in {"slot", "open", "claim"}:  # what is open follows from the lines, and nobody is at work
            self._batch.append((table, values))
            self._bytes += sum(len(value) for value in values if isinstance(value, bytes))
            if len(self._batch) >= _BATCH_ROWS or self._bytes > _BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0

        def put(change: Change) -> None:
            for table, values in batch:
                change.put(table, *values, unless_there=True)

        if batch:
            self.db.change(put)

    def remember(self, change: Change, noted: Noted | None = None) -> None:
        """Handles that were given are not given again."""
        for table, number in (*self.floors.items(), *zip(("loose", "log", "record"), noted or (), strict=False)):
            change.remember(table, number)

    def settle_log(self, change: Change) -> None:
        """What is lost of the log is lost: it counts as it is from now on."""
        change.set_number(LOG_GONE, change.number_of(LOG_GONE) + change.entries_missing())

    def bring_chunks(self, source: Layout, cipher: Cipher) -> None:
        """Copy every chunk that can be read into packs of the new store."""
        own = self.facts.get("uuid", b"").hex()
        here, cold = (open_objects(place, own) if (place := self._place(name)) else None for name in _PLACES)
        old = Packs(cipher, here or Folder(source.packs), cold)
        self._name_packs(old)
        packs = self.view.rows("pack")
        for done, (p, pack, _) in enumerate(packs, 1):
            digests = [digest for digest, *_ in self.view.rows("chunk", "WHERE p = ? ORDER BY start", (p,))]
            made = self.db.packs.write(self._readable(old, digests))

            def put(change: Change, p: int = p, made: NewPack = made) -> None:
                change.tx.naming()
                change.delete("chunk", "p", [p])
                change.delete("pack", "p", [p])
                if made.chunks:
                    change.put_pack(made)

            self.db.change(put)
            if len(made.chunks) < len(digests):
                text = f"{len(digests) - len(made.chunks)} of {len(digests)} chunk(s) are lost"
                self._report.problems.append(f"packs/{file_name(pack)}: {text}")
            if not made.chunks:
                self.db.packs.discard(made.uuid)
            self._say("packs", done, len(packs))

    def _place(self, name: str) -> str:
        try:
            return self.facts.get(name, b"").decode()
        except UnicodeDecodeError:
            self._report.problems.append(f"table store, row {name}: it is not the address of a place")
            return ""

    def _name_packs(self, old: Packs) -> None:
        """What packs say of themselves stands for rows that are lost."""
        known = {pack: p for p, pack, _ in self.view.rows("pack")}
        chunks = {digest: p for digest, p, *_ in self.view.rows("chunk")}
        found = 0
        for pack in sorted(old.whereabouts()):
            index = self._index(old, pack)
            unnamed = (chunks[one] for one in index if one in chunks and chunks[one] not in known.values())
            p = known.get(pack) or next(unnamed, 0)
            rows = [(digest, *place[1:]) for digest, place in index.items() if digest not in chunks]
            # Some of what it holds may have been let go. That nothing of it is known, or only that, is damage.
            if (self.hurt or (p and (pack not in known or len(rows) == len(index)))) and (rows or pack not in known):
                known[pack] = self.db.change(partial(_put_pack, p=p, pack=pack, rows=rows))
                chunks |= dict.fromkeys((digest for digest, *_ in rows), known[pack])
                found += 1
        if found:
            self._report.problems.append(
                f"tables pack and chunk: rows of {found} pack(s) were lost, and found in the packs"
            )
        lost = sorted({*chunks.values()} - {*known.values()})
        if lost:  # or they would be taken for chunks of a new pack that gets the number
            self.db.change(partial(Change.delete, table="chunk", column="p", values=lost))
            self._report.problems.append(f"table chunk: chunks of {len(lost)} pack(s) are lost: no pack has them")

    def _index(self, old: Packs, pack: bytes) -> Mapping[bytes, Place]:
        try:
            return old.index(pack)
        except (Damaged, StoreFailed) as error:
            if not isinstance(error, Damaged) and not failed_disk(error):
                raise
            return {}

    def _readable(self, old: Packs, digests: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for digest in digests:
            try:
                yield digest, b"".join(old.read(self.view, [digest]))
            except (Damaged, StoreFailed) as error:
                if not isinstance(error, Damaged) and not failed_disk(error):
                    raise


def _put_pack(change: Change, p: int, pack: bytes, rows: Sequence[tuple[bytes, int, int, int]]) -> int:
    p = p or change.tx.number("pack")
    change.put("pack", p, pack, 0, unless_there=True)
    for row in rows:
        change.put("chunk", row[0], p, *row[1:], unless_there=True)
    note_waste(change)  # some of it may have been let go on purpose
    return p


def _version(branch: tuple[Any, ...]) -> tuple[int, ...]:
    """What rises when a branch is written over: generation, epoch, depth, count."""
    return branch[13], branch[8], branch[7], branch[11]
