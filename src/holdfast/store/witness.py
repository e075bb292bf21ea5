"""What was acknowledged: kept beside the catalog, and outside the store, so that a catalog that went back is noticed.

Owns the file ``witness``, and the user's record of the stores that were used here (``holdfast/seen`` below the user's
state directory). Whoever can put back an old copy of the whole store puts back its witness, too; the record is out of
their reach. Both are written after a commit's flush returned, so they are never ahead of the store; they are not
flushed themselves, so after a power cut they may be behind it, which proves nothing. What always holds: an unreadable
record is as good as none, an unwritable one stops nobody; processes that write at the same moment, without a lock,
leave what one of them wrote; what was written for one store and place never counts for another.

They are not mapped into memory: whoever truncates a mapped file kills the process at its next commit.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from holdfast.errors import Damaged
from holdfast.store.catalog import View
from holdfast.store.tables import CHECKPOINTS, HANDLES

if TYPE_CHECKING:
    from holdfast.store.files import Layout

CELL_BYTES = 64
CELLS_BYTES = 2 * CELL_BYTES

RECORDS_MAX = 1000
"""The one that was opened least recently gives way. Its writers, if any are left, spoil the new one until they end."""

RECORD_BYTES = 512
"""Two cells, then whose they are: when it was last opened, the store's uuid, where it is, and a sum."""

PATH_MAX_BYTES = RECORD_BYTES - CELLS_BYTES - 26 - 8
"""There is no record of a store whose path is longer."""

_CELL = struct.Struct(">4sxxxxQQQq16x")
_OWNER = struct.Struct(">Q16sH")
_MAGIC = b"HFWT"


class Noted(NamedTuple):
    """The newest checkpoint, entry of the log and record that were acknowledged, and the checkpoint's mark."""

    n: int = 0
    e: int = 0
    r: int = 0
    mark: int = 0

    def merged(self, other: Noted) -> Noted:
        mark = other.mark if other.n > self.n else self.mark
        return Noted(max(self.n, other.n), max(self.e, other.e), max(self.r, other.r), mark)


NOTHING = Noted()


def _packed(noted: Noted, owner: bytes) -> bytes:
    body = _CELL.pack(_MAGIC, *noted)
    return body + blake3(b"holdfast.witness\0" + body + owner).digest(8)


def _unpacked(cell: bytes, owner: bytes) -> Noted | None:
    """What a cell says; None when these are not 64 bytes that were written for that owner."""
    body = cell[:-8]
    if len(cell) != CELL_BYTES or blake3(b"holdfast.witness\0" + body + owner).digest(8) != cell[-8:]:
        return None
    magic, *numbers = _CELL.unpack(body)
    return Noted(*numbers) if magic == _MAGIC else None


def _both(cells: bytes, owner: bytes) -> list[Noted | None]:
    return [_unpacked(cells[at : at + CELL_BYTES], owner) for at in (0, CELL_BYTES)]


def _newest(cells: list[Noted | None]) -> Noted | None:
    """What two cells say together. While one of them is being written the other counts."""
    first, second = cells
    return first.merged(second) if first is not None and second is not None else first or second


def initial() -> bytes:
    """The content of a new store's witness. Both cells are valid, so that an unreadable one is always damage."""
    return _packed(NOTHING, b"") * 2


class WitnessReport(NamedTuple):
    """``newest`` is what counts, None when no cell says anything; ``problems`` are for people, one line each."""

    newest: Noted | None
    problems: tuple[str, ...]


def witness_report(path: Path) -> WitnessReport:
    """Read the witness of the store in directory ``path``, and say what is wrong with it."""
    try:
        content = (path / "witness").read_bytes()
    except FileNotFoundError:
        return WitnessReport(None, ("witness: the file is missing",))
    except OSError as error:
        return WitnessReport(None, (f"witness: cannot be read ({error.strerror})",))
    problems = [f"witness: {len(content)} bytes instead of {CELLS_BYTES}"] if len(content) != CELLS_BYTES else []
    cells = _both(content, b"")
    problems += [f"witness: slot {number} is unreadable" for number, cell in enumerate(cells) if cell is None]
    return WitnessReport(_newest(cells), tuple(problems))


class _Cells:
    """Two cells of an open file that are written in turn, so that one is whole at any moment."""

    def __init__(self, fd: int, start: int, owner: bytes) -> None:
        self.fd = fd
        self.start = start
        self.owner = owner
        self._known: tuple[bytes, Noted, int] = (b"", NOTHING, 0)  # what is there, what it says, the cell to write next

    def merge(self, noted: Noted) -> Noted:
        """Note something beside what is there, which other processes may have written. Returns both together."""
        content = os.pread(self.fd, CELLS_BYTES, self.start)
        if content != self._known[0]:
            cells = _both(content, self.owner)
            sizes = [sum(cell[:3]) if cell is not None else -1 for cell in cells]
            self._known = (content, _newest(cells) or NOTHING, int(sizes[1] < sizes[0]))
        content, there, at = self._known
        merged = there.merged(noted)
        if merged != there or len(content) < CELLS_BYTES:
            cell = self.put(merged, at)
            content = content.ljust(CELLS_BYTES, b"\0")
            self._known = (content[:CELL_BYTES] + cell if at else cell + content[CELL_BYTES:], merged, 1 - at)
        return merged

    def put(self, noted: Noted, at: int) -> bytes:
        cell, place, done = _packed(noted, self.owner), self.start + at * CELL_BYTES, 0
        while done < CELL_BYTES:  # half a cell says nothing
            written = os.pwrite(self.fd, cell[done:], place + done)
            if not written:
                raise OSError(errno.EIO, "only a part was written")
            done += written
        return cell

    def replace(self, noted: Noted) -> None:
        """Let this be all that is noted, even if it is less: somebody accepted a loss."""
        for at in (0, 1):
            self.put(noted, at)
        os.fsync(self.fd)


class Witness:
    """The witness and the record of an open store. Threads may share it."""

    def __init__(self, layout: Layout, uuid: bytes, *, readonly: bool, remember: bool = True) -> None:
        """Reads what was noted, before anything else is read: the catalog can then only be newer."""
        from holdfast.store.files import unavailable

        self.failure: OSError | None = None
        self._how = {"readonly": readonly, "remember": remember}
        self._using = threading.Lock()
        self._cells: _Cells | None = None
        self._noted = witness_report(layout.path).newest
        if not readonly:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                self._cells = _Cells(os.open(layout.witness, flags, 0o644), 0, b"")
            except OSError as error:
                raise unavailable(error, f"opening {layout.witness}") from error
        self._record = open_record(layout.path, uuid) if remember else None
        self._before = self._record.found if self._record is not None else None

    def again(self, layout: Layout, uuid: bytes) -> Witness:
        """The same, opened anew."""
        return Witness(layout, uuid, **self._how)

    def compare(self, view: View) -> tuple[list[str], list[str]]:
        """What the store has lost by its own witness, and by what this user has seen of it; in words."""
        return lost(view, self._noted), lost(view, self._before)

    def record(self, n: int, e: int, r: int, mark: int) -> None:
        """Note a commit that is durable; 0 stands for "nothing new of this kind".

        A failure is kept for the report and not raised: the commit itself is safe, only this proof of it is missing.
        """
        noted = Noted(n, e, r, mark)
        with self._using:  # or the descriptor might be closed, and another file's, before it is written to
            try:
                if self._cells is not None:
                    noted = self._cells.merge(noted)
                if self._record is not None:
                    self._record.follow(noted)
            except OSError as error:
                self.failure = error

    def catch_up(self, view: View) -> None:
        """Remember what this user sees of the store now."""
        if self._record is not None:
            try:
                self._record.merge(newest(view))
            except OSError as error:
                self.failure = error

    def accept(self, view: View) -> None:
        """Let the store count as it is: somebody accepted that it lost something, or is older."""
        there = newest(view)
        try:
            for cells in (self._cells, self._record):
                if cells is not None:
                    cells.replace(there)
        except OSError as error:
            from holdfast.store.files import unavailable

            raise unavailable(error, "writing the witness") from error

    def close(self) -> None:
        entered = self._using.acquire(timeout=1.0)  # in a forked child, nobody may be left who would give it back
        try:
            for one in (self._cells, self._record):
                if one is not None:
                    with suppress(OSError):  # they are not flushed either: what they lack they may lack
                        os.close(one.fd)
            self._cells = self._record = None
        finally:
            if entered:
                self._using.release()


# -- comparing ----------------------------------------------------------------------------------------------


_SEQUENCES = (("checkpoints", CHECKPOINTS), ("events", ("log",)), ("effects", ("record",)))


def _largest(view: View, tables: tuple[str, ...]) -> int:
    column = HANDLES[tables[0]]
    found = [view.reader.run(f"SELECT coalesce(max({column}), 0) FROM {table}")[0][0] for table in tables]
    return max(map(int, found))


def newest(view: View) -> Noted:
    """What the store has now, as a witness would note it."""
    n, e, r = (_largest(view, tables) for _, tables in _SEQUENCES)
    return Noted(n, e, r, _mark(view, n) or 0)


def _mark(view: View, n: int) -> int | None:
    """The mark of a checkpoint, None when its row is not there. One statement, so that it cannot change its table."""
    sql = " UNION ALL ".join(f"SELECT mark FROM {table} WHERE n = ?" for table in CHECKPOINTS)
    rows = view.reader.run(sql, (n,) * len(CHECKPOINTS))
    return rows[0][0] if rows else None


def lost(view: View, noted: Noted | None) -> list[str]:
    """What was noted and is not in the store, in words. ``noted`` must have been read before this call.

    Handles that were given and whose rows were deleted are known to the table ``floor``: that is no loss.
    """
    if noted is None:
        return []
    found = []
    for (called, tables), number in zip(_SEQUENCES, noted, strict=False):
        column = HANDLES[tables[0]]
        sql = " UNION ALL ".join(f"SELECT {column} FROM {table} WHERE {column} = ?" for table in tables)
        there = not number or view.reader.run(sql, (number,) * len(tables))
        if not there and view.number_of(tables[0]) < number:  # after the row: its deletion raises this first
            last = _largest(view, tables)
            found.append(f"{called} {last + 1} to {number}" if last < number else f"{called[:-1]} {number}")
    if noted.mark and _mark(view, noted.n) not in {None, noted.mark}:
        # A damaged row is its agent's matter: it does not shut the whole store.
        with suppress(Damaged):
            if view.checkpoints("WHERE n = ?", (noted.n,)):
                found.insert(0, f"the checkpoint that was number {noted.n}")
    return found


# -- the user's record --------------------------------------------------------------------------------------


def record_file(path: Path) -> Path | None:
    """Where the records are; None when there is no home for them, or the store is in the temporary directory."""
    temporary = next(filter(None, (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))), "/tmp")  # noqa: S108
    try:
        return None if path.is_relative_to(Path(temporary).resolve()) else state_folder() / "seen"
    except (OSError, RuntimeError):
        return None


def state_folder() -> Path:
    """The user's own folder for what has no place in a store. RuntimeError where nobody knows his home."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "holdfast"


class _Owner(NamedTuple):
    """Whose a record is. ``at`` is when it was last opened, in microseconds."""

    at: int
    uuid: bytes
    path: bytes

    def packed(self) -> bytes:
        body = _OWNER.pack(self.at, self.uuid, len(self.path)) + self.path.ljust(PATH_MAX_BYTES, b"\0")
        return body + blake3(b"holdfast.seen\0" + body).digest(8)

    @staticmethod
    def read(record: bytes) -> _Owner | None:
        body = record[CELLS_BYTES:-8]
        if len(record) != RECORD_BYTES or blake3(b"holdfast.seen\0" + body).digest(8) != record[-8:]:
            return None
        at, uuid, length = _OWNER.unpack_from(body)
        return _Owner(at, uuid, body[_OWNER.size : _OWNER.size + length])

    @property
    def key(self) -> bytes:
        return self.uuid + self.path

    @property
    def left(self) -> bool:
        """Whether the store is not any more where it was."""
        try:
            return not (Path(os.fsdecode(self.path)) / "store.db").exists()
        except OSError:
            return False


def _records(content: bytes) -> Iterator[tuple[int, bytes, _Owner | None]]:
    for start in range(0, min(len(content), RECORDS_MAX * RECORD_BYTES), RECORD_BYTES):
        record = content[start : start + RECORD_BYTES]
        yield start, record, _Owner.read(record)


def _found(content: bytes, uuid: bytes, path: bytes) -> tuple[int, Noted | None] | None:
    """Where the record of a store in its place is, and what it says; or that of the place where it was before."""
    if uuid not in content:
        return None
    best: tuple[int, int, Noted | None] | None = None
    for start, record, owner in _records(content):
        if owner is None or owner.uuid != uuid:
            continue
        noted = _newest(_both(record, owner.key))
        if owner.path == path:
            return start, noted
        if owner.left and (best is None or owner.at > best[0]):
            best = (owner.at, start, noted)
    return best[1:] if best is not None else None


class _Record(_Cells):
    """The record of one store in one place. ``found`` is what it said when it was opened."""

    def __init__(self, fd: int, uuid: bytes, path: bytes) -> None:
        whose = _Owner(time.time_ns() // 1000, uuid, path)
        super().__init__(fd, 0, whose.key)
        self._turn = 0
        content = os.pread(fd, RECORDS_MAX * RECORD_BYTES, 0)
        there = _found(content, uuid, path)
        self.found = there[1] if there is not None else None
        self.start = there[0] if there is not None else _free(content)
        cells = _packed(self.found or NOTHING, self.owner) * 2
        os.pwrite(fd, cells + whose.packed(), self.start)

    def follow(self, noted: Noted) -> None:
        """Note what the witness says, without looking at what is here: that is less."""
        self._turn = 1 - self._turn
        self.put(noted, self._turn)


def _free(content: bytes) -> int:
    """Where a new record goes: behind the others, in the place of one that says nothing, or of the oldest."""
    oldest: tuple[int, int] | None = None
    for start, _, owner in _records(content):
        if owner is None:
            return start
        if oldest is None or owner.at < oldest[0]:
            oldest = (owner.at, start)
    full = len(content) >= RECORDS_MAX * RECORD_BYTES
    return oldest[1] if full and oldest is not None else len(content) // RECORD_BYTES * RECORD_BYTES


def open_record(path: Path, uuid: bytes) -> _Record | None:
    """The record of the store ``uuid`` at ``path``, begun if there is none; None where none can be kept."""
    file = record_file(path)
    name = os.fsencode(path)
    if file is None or len(name) > PATH_MAX_BYTES:
        return None
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return _Record(fd, uuid, name)
    except OSError:
        pass
    with suppress(OSError):
        os.close(fd)
    return None


def remembered(path: Path, uuid: bytes) -> Noted | None:
    """What the record of the store ``uuid`` at ``path`` says, without beginning one. None when there is none."""
    file = record_file(path)
    try:
        found = _found(file.read_bytes(), uuid, os.fsencode(path)) if file is not None else None
    except OSError:
        return None
    return found[1] if found is not None else None
