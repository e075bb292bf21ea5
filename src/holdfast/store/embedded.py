"""The embedded store: a directory with an SQLite catalog, packs, locks and a witness, behind the ``Catalog`` interface.

Owns opening, closing, forking, and the choice between durability at once and in groups; everything else it hands to the
modules beside it. Always true: a handle that was closed, or inherited through fork, refuses every call; a store that
has lost acknowledged commits does not open unless somebody accepts the loss.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid as uuids
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import apsw

from holdfast.codec.values import decode, encode
from holdfast.errors import (
    BadOption,
    Damaged,
    ForkedHandle,
    HoldfastError,
    NewerFormat,
    NotAStore,
    ReadOnly,
    StoreClosed,
    StorePoisoned,
    StoreReadOnly,
)
from holdfast.store import files, forks, schema, upgrade, witness
from holdfast.store.catalog import AgentRow, BranchRow, Commit, Event, PackRow, TagRow, checkpoint_id, row_sum
from holdfast.store.commits import Batches
from holdfast.store.files import Layout
from holdfast.store.folding import LOG_KEEP_BYTES, Folding
from holdfast.store.locks import Lease, Leases, StoreLock, describe_self
from holdfast.store.packs import Io, Packs
from holdfast.store.reading import Reading, Row, damaged_row
from holdfast.store.sqlite import connect, reading_error, settle
from holdfast.store.witness import ID_PREFIX_BYTES, WitnessFile
from holdfast.store.writing import Vanished, Writer, pack_node

Clock = Callable[[], int]
T = TypeVar("T")

DURABILITIES = ("commit", "batched")

_inherited: dict[tuple[int, int], list[apsw.Connection] | None] = {}
"""In a forked child: the parent's connections by database file; None when they were not at rest at the fork."""


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
    connection.execute("PRAGMA page_size=4096; PRAGMA journal_mode=WAL").fetchall()
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


def open_embedded(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    readonly: bool = False,
    durability: str = "commit",
    clock: Clock = now_us,
    accept_loss: bool = False,
    io: Io | None = None,
    vfs: str | None = None,
) -> Embedded:
    """Open the store at ``path``, making it first if there is none and ``create`` allows it.

    ``accept_loss`` opens a store whose catalog is behind its witness, and makes the witness agree with what is left.
    ``io`` and ``vfs`` replace the system's calls for packs and for SQLite; they are for tests of failing disks.
    """
    if durability not in DURABILITIES:
        raise BadOption(f"durability={durability!r}", hint=f"Use one of {', '.join(map(repr, DURABILITIES))}.")
    real = Path(os.path.realpath(path))
    if not files.classify(real):
        if readonly or not create:
            raise NotAStore(f"there is no store at {real}", hint="Check the path, or open it with create=True.")
        create_store(real, clock)
        files.classify(real)
    _close_inherited(Layout(real))
    return Embedded(
        real, readonly=readonly, durability=durability, clock=clock, accept_loss=accept_loss, io=io, vfs=vfs
    )


def _close_inherited(layout: Layout) -> None:
    """Before a forked child opens the same database: let SQLite forget the locks it believes to hold.

    SQLite counts locks per file and process, and the count came over with the fork while the locks did not. Closing the
    old connections resets it. They were at rest, and are set up so that closing touches neither log nor database.
    """
    if not _inherited:
        return
    with suppress(OSError):
        found = layout.catalog.stat()
        connections = _inherited.pop((found.st_dev, found.st_ino), [])
        if connections is None:
            _inherited[(found.st_dev, found.st_ino)] = None
            raise ForkedHandle(
                f"{layout.path}: a commit was going on in the parent when this process was forked,"
                " so it cannot be opened here",
                hint="Open the store in a process started anew (subprocess, or multiprocessing with spawn).",
            )
        for connection in connections:
            connection.close(True)


class Embedded(Reading):
    """An open store. Threads may share it. Use ``open_embedded``."""

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool,
        durability: str,
        clock: Clock,
        accept_loss: bool,
        io: Io | None,
        vfs: str | None,
    ) -> None:
        self.path = path
        self.durability = durability
        self._layout = Layout(path)
        self._clock = clock
        self._vfs = vfs
        self._refusal: type[HoldfastError] | None = None
        self._read_only_because: HoldfastError | None = (
            ReadOnly("this store was opened with readonly=True") if readonly else None
        )
        self._batches: Batches | None = None
        self._writer: Writer | None = None
        self._packs = Packs(self._layout.packs, io)
        self._folding = Folding(self._layout.catalog, self._layout.store_lock, self._set_poison, vfs)
        self._leases = Leases(self._layout.locks, self.branch_row, self._raise_generation)
        super().__init__(self._open_reader())
        try:
            self._check(accept_loss)
        except BaseException:
            self._release()
            raise
        forks.watch(self)
        _open.add(self)

    # Opening

    def _check(self, accept_loss: bool) -> None:
        self._check_version()
        noted = witness.witness_report(self.path).newest  # before the catalog, which can then only be newer
        if self._read_only_because is None:
            self._open_writer()
        self._check_witness(noted, accept_loss)
        if self.durability == "batched" and self._writer is not None:
            self._batches = Batches(self._writer)

    def _open_reader(self) -> apsw.Connection:
        try:
            connection = connect(self._layout.catalog, readonly=True, vfs=self._vfs)
            try:
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
            except apsw.Error:
                connection.close(True)
                raise
        except apsw.CantOpenError as error:
            # Without a log and without the right to make one, the database file alone is all there is.
            if os.access(self.path, os.W_OK) or self._log_size():
                raise reading_error(error, "opening the catalog") from error
            return connect(self._layout.catalog, readonly=True, immutable=True, vfs=self._vfs)
        except apsw.Error as error:
            raise reading_error(error, "opening the catalog") from error
        return connection

    def _log_size(self) -> int:
        try:
            return self._layout.wal.stat().st_size
        except FileNotFoundError:
            return 0

    def _check_version(self) -> None:
        ((version,),) = self._select("PRAGMA user_version")
        try:
            rows = {name: (value, total) for name, value, total in self._select("SELECT name, value, sum FROM store")}
            sound = (name for name, (value, total) in rows.items() if row_sum("store", name, value) == total)
            self._facts = {name: rows[name][0] for name in sound}
            stored = decode(self._facts["format"])
            self.uuid = bytes(self._facts["uuid"])
            self.created = int(decode(self._facts["created"]))
        except (HoldfastError, LookupError, TypeError, ValueError) as error:
            if version > upgrade.FORMAT_VERSION:
                raise self._newer(version) from error
            raise Damaged(f"{self._layout.catalog}: table store is damaged", what=("table store",)) from error
        if stored != version:
            raise Damaged(
                f"{self._layout.catalog}: its header says format {version}, its table {stored}",
                what=("store.db header",),
            )
        if version > upgrade.FORMAT_VERSION:
            raise self._newer(version)
        if len(self._facts) != len(rows):
            raise damaged_row("store", next(name for name in rows if name not in self._facts))
        if version == upgrade.FORMAT_VERSION:
            with self._read_lock:
                try:
                    schema.check(self._reader)
                except apsw.Error as error:
                    raise reading_error(error, "reading the schema") from error
        self._version = version

    def _newer(self, version: int) -> NewerFormat:
        return NewerFormat(
            f"{self.path} has format {version}; this program knows up to {upgrade.FORMAT_VERSION}",
            hint="Use a newer Holdfast. Nothing was changed.",
        )

    def _open_writer(self) -> None:
        lock = None
        try:
            lock = StoreLock(self._layout.store_lock)
            connection = connect(self._layout.catalog, readonly=False, vfs=self._vfs)
            if connection.readonly("main"):
                connection.close(True)
                raise StoreReadOnly(f"{self._layout.catalog} cannot be written")
            connection.execute(f"PRAGMA journal_size_limit={LOG_KEEP_BYTES}").fetchall()
            connection.set_wal_hook(self._folding.committed)
            self._writer = Writer(connection, lock, WitnessFile(self._layout.witness))
        except (StoreReadOnly, OSError, apsw.Error) as error:
            if lock is not None:
                lock.close()
            meaning = self._not_writable(error)
            if not isinstance(meaning, StoreReadOnly):
                raise meaning from error
            self._read_only_because = meaning
            return
        if self._version < upgrade.FORMAT_VERSION:
            self._upgrade(self._writer)

    def _not_writable(self, error: HoldfastError | OSError | apsw.Error) -> HoldfastError:
        if isinstance(error, HoldfastError):
            return error
        doing = f"opening {self.path} for writing"
        return files.unavailable(error, doing) if isinstance(error, OSError) else reading_error(error, doing)

    def _upgrade(self, writer: Writer) -> None:
        def step_up() -> bool:
            run = writer.connection.execute
            version = run("PRAGMA user_version").get
            if version >= upgrade.FORMAT_VERSION:
                return False
            upgrade.STEPS[version](writer.connection)
            value = encode(version + 1)
            run("UPDATE store SET value = ?, sum = ? WHERE name = 'format'", (value, row_sum("store", "format", value)))
            run(f"PRAGMA user_version={version + 1}")
            return True

        while writer.transaction(step_up):
            pass

    def _check_witness(self, noted: witness.Witness | None, accept_loss: bool) -> None:
        if noted is None:
            return
        n, e = self.newest()
        lost = []
        if n < noted.n:
            lost.append(f"checkpoints {n + 1} to {noted.n}")
        elif noted.n:
            rows = self._select("SELECT manifest FROM checkpoint WHERE n = ?", (noted.n,))
            if rows and self._id_prefix(rows[0][0]) != noted.id_prefix:
                lost.append(f"the checkpoint that was number {noted.n}")
        if e < noted.e:
            lost.append(f"events {e + 1} to {noted.e}")
        if not lost:
            return
        if not accept_loss:
            raise Damaged(
                f"{self.path}: the catalog has lost acknowledged commits: {', '.join(lost)}",
                what=("store.db", "store.db-wal"),
                lost=", ".join(lost),
                hint="Put the store back from a backup, or open it with recover=True to go on with what is left.",
            )
        self._accept_loss()

    def _id_prefix(self, manifest: object) -> bytes:
        return checkpoint_id(manifest)[:ID_PREFIX_BYTES] if isinstance(manifest, bytes) else b""

    def _accept_loss(self) -> None:
        writer = self._writable()
        writer.threads.acquire()
        try:
            writer.lock.acquire()
            try:
                n, e = self.newest()
                writer.witness.replace(n, e, self.checkpoint(n).id if n else b"")
            except OSError as error:
                raise files.unavailable(error, "writing the witness") from error
            finally:
                writer.lock.release()
        finally:
            writer.threads.release()

    # Use and refusal

    @property
    def closed(self) -> bool:
        return self._refusal is StoreClosed

    def check_usable(self) -> None:
        """Raise unless this process may use the store."""
        self._usable()

    def holders(self) -> list[dict[str, object]]:
        """Who writes which branch now, as the lock files say."""
        return self._leases.holders()

    @property
    def readonly(self) -> bool:
        return self._read_only_because is not None

    @property
    def witness_failure(self) -> OSError | None:
        """The last failure to write the witness. The commits are safe; the proof of them is older than they are."""
        return self._writer.witness.failure if self._writer is not None else None

    def _usable(self) -> None:
        if self._refusal is ForkedHandle:
            raise ForkedHandle(
                "this store was opened before fork() and is used in the child",
                hint="Open the store again in the child: holdfast.open(...).",
            )
        if self._refusal is not None:
            raise StoreClosed("the store was closed", hint="Open it again.")

    def _select(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Row]:
        if self._batches is not None and self._batches.pending and self._refusal is None:
            self._batches.settle()
        return super()._select(sql, bindings)

    def _writable(self) -> Writer:
        self._usable()
        because = self._read_only_because
        if because is not None:
            raise type(because)(because.message, hint=because.hint)
        if self._writer is None:
            raise StoreClosed("the store was closed", hint="Open it again.")
        return self._writer

    def _set_poison(self, poison: StorePoisoned) -> None:
        if self._writer is not None and self._writer.poison is None:
            self._writer.poison = poison

    def _write(self, change: Callable[[Writer], T]) -> T:
        writer = self._writable()
        if self._batches is not None:
            self._batches.settle()  # what was accepted before this change comes before it
        return writer.transaction(lambda: change(writer))

    # Writing

    def add_agent(
        self,
        *,
        key: bytes,
        body: bytes,
        uuid: bytes,
        branch_key: bytes,
        branch_body: bytes,
        branch_uuid: bytes,
        event: Event,
    ) -> tuple[AgentRow, BranchRow]:
        """A new agent with its first branch. If the key exists already, what is there is returned unchanged."""
        agent = AgentRow(0, uuid, key, body)
        branch = BranchRow(0, 0, branch_uuid, branch_key, branch_body, 0, b"", 0)
        return self._write(lambda writer: writer.add_agent(agent, branch, event))

    def add_branch(
        self, a: int, *, key: bytes, body: bytes, uuid: bytes, head: int, head_id: bytes, event: Event
    ) -> BranchRow:
        branch = BranchRow(0, a, uuid, key, body, head, head_id, 0)
        return self._write(lambda writer: writer.add_branch(branch, event))

    def set_head(
        self, b: int, *, generation: int, expect_head_id: bytes, head: int, head_id: bytes, event: Event
    ) -> BranchRow:
        """Move a branch to another checkpoint, if it is still where and whose the caller believes; else ``Fenced``."""
        if self._batches is not None:
            self._batches.flush(b)
        return self._write(lambda writer: writer.set_head(b, generation, expect_head_id, head, head_id, event))

    def set_tag(self, a: int, key: bytes, *, body: bytes, n: int, event: Event) -> TagRow:
        return self._write(lambda writer: writer.set_tag(TagRow(a, key, body, n), event))

    def drop_tag(self, a: int, key: bytes, *, event: Event) -> bool:
        """False, and no event, when there was no such tag."""
        return self._write(lambda writer: writer.drop_tag(a, key, event))

    def set_validity(self, a: int, n: int, *, body: bytes | None, event: Event) -> None:
        """``None`` makes the checkpoint good again."""
        self._write(lambda writer: writer.set_validity(a, n, body, event))

    def add_event(self, a: int, event: Event) -> int:
        return self._write(lambda writer: writer.insert_event(a, event))

    def commit(self, commit: Commit) -> int | None:
        """Write one checkpoint. Returns its n, or None with ``durability="batched"``, where it is not known yet."""
        writer = self._writable()
        nodes = [(digest, pack_node(node)) for digest, node in commit.nodes] if commit.nodes else ()
        if self._batches is not None:
            if not commit.chunks:
                if writer.poison is not None:
                    raise writer.poisoned()
                self._batches.put(commit, nodes)
                return None
            self._batches.flush(commit.b)
        if commit.chunks:
            return self._commit_bulk(writer, commit, nodes)
        return writer.transaction(lambda: writer.apply(commit, nodes, None))

    def _commit_bulk(self, writer: Writer, commit: Commit, nodes: Iterable[tuple[bytes, bytes]]) -> int:
        """Packs first, then the transaction that names them. Chunks that are stored already are not written again."""
        if writer.poison is not None:
            raise writer.poisoned()
        stored = list(nodes)
        unique = dict(commit.chunks)
        while True:
            new = [(digest, data) for digest, data in unique.items() if self.chunk_row(digest) is None]
            pack = None
            try:
                pack = self._packs.write(new) if new else None
                return writer.transaction(lambda: writer.apply(commit, stored, pack))  # noqa: B023  called at once
            except Vanished:
                continue
            except StorePoisoned as error:
                self._set_poison(error)
                raise
            except HoldfastError:
                if pack is not None:
                    self._packs.discard(pack)
                raise

    def chunks(self, digests: Iterable[bytes]) -> Iterator[bytes]:
        """The chunks' bytes in the order asked for, each proven by its digest."""
        uuid_of: dict[int, bytes] = {}
        for digest in digests:
            row = self.chunk_row(digest)
            if row is None:
                raise Damaged(f"chunk {digest.hex()} is not in the catalog", what=(f"chunk {digest.hex()}",))
            if row.p not in uuid_of:
                pack = self.pack_row(row.p)
                if pack is None:
                    raise Damaged(f"table pack, row {row.p}: missing", what=(f"pack {row.p}",))
                uuid_of[row.p] = pack.uuid
            yield self._packs.read(uuid_of[row.p], row)

    def check_pack(self, pack: PackRow) -> None:
        """Prove the parts of a pack that no chunk covers."""
        self._usable()
        self._packs.check(pack, self.chunk_rows(pack.p))

    # Leases

    def lease(
        self,
        branch: BranchRow | int,
        *,
        wait_s: float = 0.0,
        takeover: bool = False,
        who: Mapping[str, object] | None = None,
        event: Event | None = None,
    ) -> Lease:
        """Become the writer of a branch. ``AgentBusy`` when another is, unless it lets go within ``wait_s``."""
        writer = self._writable()
        if writer.poison is not None:
            raise writer.poisoned()
        b = branch if isinstance(branch, int) else branch.b
        described = describe_self(self._clock()) | dict(who or {})
        return self._leases.take(b, described, event, wait_s=wait_s, takeover=takeover)

    def _raise_generation(self, b: int, generation: int, event: Event | None) -> BranchRow | None:
        return self._write(lambda writer: writer.raise_generation(b, generation, event))

    # Barriers and the end

    def flush(self, b: int | None = None) -> None:
        """Return when everything committed before is durable; raise if some of it never will be."""
        self._usable()
        if self._batches is not None:
            self._batches.flush(b)
        elif self._writer is not None and self._writer.poison is not None:
            raise self._writer.poisoned()

    def close(self) -> None:
        """Flush, let go of every lease, and close. A second call does nothing.

        Raises when batched commits cannot be made durable. When the disk is full the store then stays open, so that
        it can be tried again; after any other failure it is closed all the same.
        """
        if self._refusal is not None:
            return
        failure: HoldfastError | None = None
        if self._batches is not None:
            try:
                self._batches.flush()
            except HoldfastError as error:
                if self._batches.pending:
                    raise
                failure = error
            self._batches.stop()
        healthy = self._writer is not None and self._writer.poison is None
        self._folding.stop(fold=healthy)
        self._release()
        if failure is not None:
            raise failure

    def _release(self) -> None:
        self._refusal = StoreClosed
        self._leases.close()
        with self._read_lock:
            self._reader.close(True)
        writer = self._writer
        if writer is not None:
            with writer.threads:
                writer.connection.close(True)
                writer.lock.close()
                writer.witness.close()
        forks.unwatch(self)
        _open.discard(self)

    def sizes(self) -> dict[str, int]:
        """Bytes on disk: the catalog (of that, pages in no use), its log, and the packs."""
        ((page_size,),) = self._select("PRAGMA page_size")
        ((pages,),) = self._select("PRAGMA page_count")
        ((free,),) = self._select("PRAGMA freelist_count")
        with os.scandir(self._layout.packs) as entries:
            packs = sum(entry.stat().st_size for entry in entries if entry.name.endswith(".pack"))
        return {"catalog": pages * page_size, "free": free * page_size, "log": self._log_size(), "packs": packs}

    # Fork (see forks.py)

    def rest(self, deadline: float) -> bool:
        self._rested: list[Any] = []
        locks: list[Any] = [self._read_lock, self._folding.lock]
        if self._writer is not None:
            locks.append(self._writer.threads)
        for lock in locks:
            if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            self._rested.append(lock)
        return not self._reader.in_transaction

    def resume(self) -> None:
        for lock in self._rested:
            lock.release()
        self._rested = []

    def abandon(self, rested: bool) -> None:
        self._refusal = ForkedHandle
        connections = [self._reader]
        if self._folding.connection is not None:
            connections.append(self._folding.connection)
        self._folding.abandon()
        self._leases.abandon()
        if self._writer is not None:
            connections.append(self._writer.connection)
            self._writer.lock.abandon()
            self._writer.witness.close()
        for connection in connections:
            forks.leak(connection)
        forks.leak(self)
        with suppress(OSError):
            found = self._layout.catalog.stat()
            there = _inherited.setdefault((found.st_dev, found.st_ino), [])
            if rested and there is not None:
                there.extend(connections)
            else:
                _inherited[(found.st_dev, found.st_ino)] = None


_open: weakref.WeakSet[Embedded] = weakref.WeakSet()


def _close_all() -> None:
    """At exit: what was accepted for a later flush must not die with the thread that would have written it."""
    for store in list(_open):
        with suppress(HoldfastError):
            store.close()


atexit.register(_close_all)
