"""The embedded store: a directory with an SQLite catalog, packs, locks and a witness, behind the ``Catalog`` interface.

Owns opening, closing, forking, and the choice between durability at once and in groups; everything else it hands to the
modules beside it. Always true: a handle that was closed, or inherited through fork, refuses every call; a store that
has lost acknowledged commits does not open unless somebody accepts the loss.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from holdfast.errors import (
    BadOption,
    Damaged,
    ForkedHandle,
    HoldfastError,
    NotAStore,
    ReadOnly,
    StoreClosed,
    StorePoisoned,
    StoreReadOnly,
    StoreWentBack,
)
from holdfast.store import files, forks, keys, seen, upgrade, witness
from holdfast.store.accepting import Accepting
from holdfast.store.apart import apart
from holdfast.store.catalog import (
    AgentRow,
    Append,
    BranchRow,
    Event,
    LineStart,
    NewRecord,
    PackRow,
    TagRow,
)
from holdfast.store.cipher import Cipher
from holdfast.store.commits import Batches
from holdfast.store.files import Layout
from holdfast.store.folding import LOG_KEEP_BYTES, Folding
from holdfast.store.keys import Secret
from holdfast.store.locks import BUSY_WAIT_S, Lease, Leases, StoreLock, describe_self
from holdfast.store.opening import Clock, check_facts, create_store, lost_commits, now_us, open_reader, unlock
from holdfast.store.packs import Io, Packs
from holdfast.store.place import Place
from holdfast.store.reading import Reading
from holdfast.store.sqlite import connect, reading_error
from holdfast.store.tiering import Tiers
from holdfast.store.witness import WitnessFile
from holdfast.store.writing import Writer, packed_nodes

if TYPE_CHECKING:
    from holdfast.store.contents import Moment
    from holdfast.store.forgetting import Forgetting, Pace
    from holdfast.store.receiving import Receiving

R = TypeVar("R", bound=Reading)
T = TypeVar("T")

DURABILITIES = ("commit", "batched")


def open_embedded(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    readonly: bool = False,
    durability: str = "commit",
    clock: Clock = now_us,
    accept_loss: bool = False,
    accept_older: bool = False,
    secret: Secret | None = None,
    remember: bool = True,
    io: Io | None = None,
    vfs: str | None = None,
) -> Embedded:
    """Open the store at ``path``, making it first if there is none and ``create`` allows it.

    ``accept_loss`` opens a store whose catalog is behind its witness, and makes the witness agree with what is left.
    ``accept_older`` opens one that is older than what this user has seen of it, and takes it as it is from now on.
    ``secret`` is the key of an encrypted store; a new store is encrypted if one is given.
    ``remember=False`` leaves no record of it in the user's state directory: for a store that is thrown away.
    ``io`` and ``vfs`` replace the system's calls for packs and for SQLite; they are for tests of failing disks.
    """
    if durability not in DURABILITIES:
        raise BadOption(f"durability={durability!r}", hint=f"Use one of {', '.join(map(repr, DURABILITIES))}.")
    real = Path(os.path.realpath(path))
    if not files.classify(real):
        if readonly or not create:
            raise NotAStore(f"there is no store at {real}", hint="Check the path, or open it with create=True.")
        create_store(real, clock, secret)
        files.classify(real)
    forks.close_inherited(Layout(real).catalog)
    return Embedded(
        real,
        readonly=readonly,
        durability=durability,
        clock=clock,
        accept_loss=accept_loss,
        accept_older=accept_older,
        secret=secret,
        remember=remember,
        io=io,
        vfs=vfs,
    )


class Embedded(Accepting):
    """An open store. Threads may share it. Use ``open_embedded``."""

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool,
        durability: str,
        clock: Clock,
        accept_loss: bool,
        accept_older: bool,
        secret: Secret | None,
        remember: bool,
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
        self._seen: seen.Record | None = None
        self._remember = remember
        self._packs = Packs(self._layout.packs, io)
        self._packs.cold = self.tiers.of
        self._folding = Folding(self._layout.catalog, self._layout.store_lock, self._set_poison, vfs)
        # Connections of whoever clones, forgets or reads everything now, with the lock that they hold.
        self._beside: list[tuple[Reading, StoreLock | None]] = []
        self.before_close: list[Callable[[], None]] = []
        """Called when this is about to be closed: what works in the background ends then."""
        self._leases = Leases(self._layout.locks, self.branch_row, self._raise_generation)
        self._opened_with = secret.mark() if secret is not None else b""
        super().__init__(open_reader(self._layout, vfs))
        try:
            facts = check_facts(self, self._layout, secret)
            self.uuid = facts.uuid
            self.created = facts.created
            self._cipher = self._packs.cipher = self._leases.cipher = facts.cipher
            self._check(facts.version, accept_loss, accept_older)
        except BaseException:
            self._release()
            raise
        forks.watch(self)
        _open.add(self)

    # Opening

    def check_secret(self, secret: Secret) -> None:
        """Raise unless this opens the store: somebody else in this process wants to use the handle."""
        if not secret.same(self._opened_with):
            unlock(self._layout, secret, None)
            self._opened_with = secret.mark()

    def key_problems(self) -> list[str]:
        """What is wrong with the file ``keys`` of an encrypted store, for people."""
        return keys.problems(self.path) if self.encrypted else []

    def _check(self, version: int, accept_loss: bool, accept_older: bool) -> None:
        # Both before the catalog, which can then only be newer.
        noted = witness.witness_report(self.path).newest
        self._seen = seen.open_record(self.path, self.uuid) if self._remember else None
        before = self._seen.newest() if self._seen is not None else None
        if self._read_only_because is None:
            self._open_writer(version)
        lost = lost_commits(self, noted)
        if lost and not accept_loss:
            raise Damaged(
                f"{self.path}: the catalog has lost acknowledged commits: {', '.join(lost)}",
                what=("store.db", "store.db-wal"),
                lost=", ".join(lost),
                hint="Put the store back from a backup. To go on with what is left, open it with recover=True, "
                "or make a new store of that: `holdfast repair --to DIR`.",
            )
        older = lost_commits(self, before)
        if older and not (accept_older or lost):
            raise StoreWentBack(
                f"{self.path} is older than it was when it was last used here: {', '.join(older)} are missing",
                lost=", ".join(older),
                hint="If a backup was put back on purpose, say so: `holdfast accept`, or accept_older=True.",
            )
        if lost or (older and not self.readonly):
            self._accept_loss()
        elif older and self._seen is not None:
            try:
                self._seen.replace(*self.newest(), self._newest_id())
            except OSError as error:
                raise files.unavailable(error, "remembering that an older store was accepted") from error
        elif self._seen is not None:
            self._seen.record(*self.newest(), self._newest_id())
        if self._writer is not None:
            self._batches = Batches(self._writer)

    def _open_writer(self, version: int) -> None:
        lock = None
        try:
            lock = StoreLock(self._layout.store_lock)
            connection = connect(self._layout.catalog, readonly=False, vfs=self._vfs)
            if connection.readonly("main"):
                connection.close(True)
                raise StoreReadOnly(f"{self._layout.catalog} cannot be written")
            connection.execute(f"PRAGMA journal_size_limit={LOG_KEEP_BYTES}").fetchall()
            connection.set_wal_hook(self._folding.committed)
            witness_file = WitnessFile(self._layout.witness, self._seen)
            place = Place(self._layout.catalog)
            self._writer = Writer(connection, lock, witness_file, self._cipher, place=place)
        except (StoreReadOnly, OSError, apsw.Error) as error:
            if lock is not None:
                lock.close()
            meaning = self._not_writable(error)
            if not isinstance(meaning, StoreReadOnly):
                raise meaning from error
            self._read_only_because = meaning
            return
        if version < upgrade.FORMAT_VERSION:
            writer = self._writer
            while writer.transaction(lambda: upgrade.step_up(writer.connection, writer.cipher)):
                pass

    def _not_writable(self, error: HoldfastError | OSError | apsw.Error) -> HoldfastError:
        if isinstance(error, HoldfastError):
            return error
        doing = f"opening {self.path} for writing"
        return files.unavailable(error, doing) if isinstance(error, OSError) else reading_error(error, doing)

    def _accept_loss(self) -> None:
        writer = self._writable()
        writer.threads.acquire()
        try:
            writer.lock.acquire()
            try:
                writer.witness.replace(*self.newest(), self._newest_id())
            except OSError as error:
                raise files.unavailable(error, "writing the witness") from error
            finally:
                writer.lock.release()
        finally:
            writer.threads.release()

    def _newest_id(self) -> bytes:
        """Empty when there is no checkpoint, or the row is damaged or gone: there is no id to remember then."""
        with suppress(Damaged):
            return self.checkpoint(self.newest()[0]).id
        return b""

    # Use and refusal

    @property
    def closed(self) -> bool:
        return self._refusal is StoreClosed

    def holders(self) -> list[dict[str, object]]:
        """Who writes which branch now, as the lock files say."""
        return self._leases.holders()

    @property
    def encrypted(self) -> bool:
        return self._cipher.keyed

    def bundle_cipher(self, uuid: bytes) -> Cipher:
        """What a bundle of this store that has this uuid is encrypted with."""
        return self._cipher.bundle(uuid)

    @property
    def readonly(self) -> bool:
        return self._read_only_because is not None

    @property
    def witness_failure(self) -> OSError | None:
        """The last failure to write the witness. The commits are safe; the proof of them is older than they are."""
        return self._writer.witness.failure if self._writer is not None else None

    def check_usable(self) -> None:
        """Raise unless this process may use the store."""
        if self._refusal is ForkedHandle:
            raise ForkedHandle(
                "this store was opened before fork() and is used in the child",
                hint="Open the store again in the child: holdfast.open(...).",
            )
        if self._refusal is not None:
            raise StoreClosed("the store was closed", hint="Open it again.")

    _usable = check_usable

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
        self._settle()  # what was accepted before this change comes before it
        return writer.transaction(lambda: change(writer))

    def mend(self, change: Callable[[Writer], None]) -> None:
        """Write what no ordinary change would (see rescue.py), in one transaction."""
        self._write(change)

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
        self,
        a: int,
        *,
        key: bytes,
        body: bytes,
        uuid: bytes,
        head: int,
        head_id: bytes,
        event: Event,
        line: LineStart | None = None,
        copies: Sequence[NewRecord] = (),
    ) -> BranchRow:
        """A new branch. ``line`` is what it inherits of another one's records, ``copies`` are written after these."""
        branch = BranchRow(0, a, uuid, key, body, head, head_id, 0)
        return self._write(lambda writer: writer.add_branch(branch, event, line, copies))

    def set_arriving(self, a: int, arriving: str | None, *, guard: tuple[int, int]) -> None:
        """Say that an agent's branches are not whole while something comes, and how it does; None: they are whole."""
        branches = [row.b for row in self.branches(a)]
        self._write(lambda writer: writer.set_arriving(branches, arriving, guard))

    def set_head(
        self,
        b: int,
        *,
        generation: int,
        expect_head_id: bytes,
        head: int,
        head_id: bytes,
        event: Event,
        append: Append | None = None,
    ) -> BranchRow:
        """Move a branch to another checkpoint, if it is still where and whose the caller believes; else ``Fenced``.

        ``append`` are records that are written with it; they cannot bring chunks.
        """
        if self._batches is not None:
            self._batches.flush(b)
        nodes = packed_nodes(self._cipher, append.nodes) if append is not None else ()
        return self._write(
            lambda writer: writer.set_head(b, generation, expect_head_id, head, head_id, event, append, nodes)
        )

    def set_tag(self, a: int, key: bytes, *, body: bytes, n: int, event: Event) -> TagRow:
        return self._write(lambda writer: writer.set_tag(TagRow(a, key, body, n), event))

    def drop_tag(self, a: int, key: bytes, *, event: Event) -> bool:
        """False, and no event, when there was no such tag."""
        return self._write(lambda writer: writer.drop_tag(a, key, event))

    def set_validity(self, a: int, n: int, *, body: bytes | None, event: Event) -> None:
        """``None`` makes the checkpoint good again."""
        self._write(lambda writer: writer.set_validity(a, n, body, event))

    def add_events(self, a: int, events: Sequence[Event], *, guard: tuple[int, int] | None = None) -> list[int]:
        """Several events at the price of one flush. ``guard`` is a branch and the generation it must still have."""
        return self._write(lambda writer: writer.add_events(a, events, guard))

    def written_at(self, pack: PackRow) -> float | None:
        """When a pack's file was written, in seconds since 1970; None when it is not here."""
        return self._packs.written_at(pack.uuid)

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
        try:
            return self._leases.take(b, described, event, wait_s=wait_s, takeover=takeover)
        except OSError as error:
            raise files.unavailable(error, "becoming the writer of a branch") from error

    def lease_again(self, released: Lease) -> Lease | None:
        """A lease that was released, without a commit; None when somebody else has had the branch since."""
        if self._writable().poison is not None:
            return None
        try:
            return self._leases.again(released, self._clock())
        except OSError as error:
            raise files.unavailable(error, "becoming the writer of a branch") from error

    def holder_alive(self, b: int, generation: int) -> bool:
        """Whether the writer that had this generation of a branch still holds it, or is only believed to be gone."""
        try:
            return self._leases.alive(self.branch_row(b), generation)
        except OSError as error:
            raise files.unavailable(error, "looking for the writer of a branch") from error

    def held_lease(self, b: int) -> Lease | None:
        """The lease that this handle has on a branch."""
        return self._leases.held(b)

    # Cloning and forgetting

    @contextmanager
    def forgetting(self, wait_s: float = BUSY_WAIT_S, pace: Pace | None = None) -> Iterator[Forgetting]:
        """The right to clone and to forget: one holder in all processes. Writers go on meanwhile.

        ``pace`` is called between any two transactions of it.
        """
        from holdfast.store.forgetting import Forgetting

        writer = self._writable()
        if pace is None:
            self.flush()
        else:  # in the background: what becomes of earlier changes is told to whoever made them
            self._settle()
        lock = StoreLock(self._layout.forgetting_lock)
        try:
            lock.acquire(wait_s)
            try:
                # A connection of its own: waiting for queued commits inside a transaction would never end.
                with self._reading_beside(Reading(open_reader(self._layout, self._vfs), self._cipher), lock) as reading:
                    yield Forgetting(writer, reading, self._packs, pace)
            finally:
                lock.release()
        finally:
            lock.close()

    @contextmanager
    def moment(self) -> Iterator[Moment]:
        """Everything as it is now, to be read at leisure: nothing that others do meanwhile is seen.

        As long as it lasts, the log cannot begin anew, and packs that nobody needs any more stay.
        """
        from holdfast.store.contents import Moment

        self._usable()
        with self._packs.kept():
            packs = self._packs.beside(self.tiers.impatient())
            found = Moment(open_reader(self._layout, self._vfs), self._cipher, packs)
            with self._reading_beside(found, None) as reading:
                yield reading

    @contextmanager
    def _reading_beside(self, reading: R, lock: StoreLock | None) -> Iterator[R]:
        """A connection that a fork must know of, until it is closed here."""
        self._beside.append((reading, lock))
        try:
            yield reading
        finally:
            self._beside.remove((reading, lock))
            with reading.lock:
                reading.connection.close(True)

    @property
    def tiers(self) -> Tiers:
        """Which packs lie in a colder place."""
        return Tiers(self.fact)

    def set_fact(self, name: str, value: bytes | None) -> None:
        """Write a row of table ``store``, or delete it."""
        self._write(lambda writer: writer.set_fact(name, value) if value is not None else writer.drop_fact(name))

    @contextmanager
    def receiving(self) -> Iterator[Receiving]:
        """The right to take in what comes from another store. Nothing is collected meanwhile; writers go on."""
        from holdfast.store.receiving import Receiving

        with self.forgetting() as held:
            yield Receiving(self._writable(), held.reading, self._packs)

    def shrink(self) -> None:
        """Fold the log and cut it, so that what was given back leaves the disk."""
        self._usable()
        self._folding.empty()

    def _raise_generation(self, b: int, generation: int, event: Event | None) -> BranchRow | None:
        return self._write(lambda writer: writer.raise_generation(b, generation, event))

    # Barriers and the end

    def flush(self, b: int | None = None) -> None:
        """Return when everything committed before is durable; raise if some of it never will be."""
        self._usable()
        if self._batches is not None:
            self._batches.flush(b)
        if self._writer is not None and self._writer.poison is not None:
            raise self._writer.poisoned()

    def close(self) -> None:
        """Flush, let go of every lease, and close. A second call does nothing.

        Raises when batched commits cannot be made durable. When the disk is full the store then stays open, so that
        it can be tried again; after any other failure it is closed all the same.
        """
        if self._refusal is None:
            apart(self._close)

    def _close(self) -> None:
        for work in list(self.before_close):
            work()
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
        if self._seen is not None:
            self._seen.close()
        forks.unwatch(self)
        _open.discard(self)

    def sizes(self) -> dict[str, int]:
        """Bytes on disk: the catalog (of that, pages in no use), its log, and the packs."""
        ((page_size,),) = self._select("PRAGMA page_size")
        ((pages,),) = self._select("PRAGMA page_count")
        ((free,),) = self._select("PRAGMA freelist_count")
        try:
            log = self._layout.log_bytes()
            with os.scandir(self._layout.packs) as entries:
                packs = sum(entry.stat().st_size for entry in entries if entry.name.endswith(".pack"))
        except OSError as error:
            raise files.unavailable(error, "measuring the store") from error
        return {"catalog": pages * page_size, "free": free * page_size, "log": log, "packs": packs}

    # Fork (see forks.py)

    def rest(self, deadline: float) -> bool:
        self._rested: list[Any] = []
        locks: list[Any] = [self._read_lock, self._folding.lock]
        if self._writer is not None:
            locks.append(self._writer.threads)
        locks.extend(reading.lock for reading, _ in self._beside)
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
        for reading, lock in self._beside:
            connections.append(reading.connection)
            if lock is not None:
                lock.abandon()
        if self._writer is not None:
            connections.append(self._writer.connection)
            self._writer.lock.abandon()
            self._writer.witness.close()
        if self._seen is not None:
            self._seen.close()
        for connection in connections:
            forks.leak(connection)
        forks.leak(self)
        forks.remember(self._layout.catalog, connections if rested else None)


_open: weakref.WeakSet[Embedded] = weakref.WeakSet()


def _close_all() -> None:
    """At exit: what was accepted for a later flush must not die with the thread that would have written it."""
    for store in list(_open):
        with suppress(HoldfastError):
            store.close()


atexit.register(_close_all)
