"""An open store, below states: rows, packs, leases and the writer, in a directory or on a server.

Owns opening and closing, what is checked before a store is used, and the two ways to make a change. Knows no state.
What always holds: a handle that was closed, or inherited through fork, refuses every call; a store that has lost
acknowledged commits does not open unless somebody accepts the loss; what ``change`` returned for is durable.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import uuid as uuids
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import apsw

from holdfast.errors import (
    BadOption,
    Damaged,
    DiskFull,
    ForkedHandle,
    HoldfastError,
    Incompatible,
    KeyNeeded,
    NotAStore,
    NotEncrypted,
    ReadOnly,
    StoreBusy,
    StoreClosed,
    StoreCopied,
    StoreReadOnly,
    StoreWentBack,
)
from holdfast.store import copies, files, keys, processes, sqlite
from holdfast.store.catalog import View
from holdfast.store.changes import CannotCollect, Change, Collected, Work, now_us
from holdfast.store.cipher import PLAIN, Cipher, Keyed
from holdfast.store.engine import Args, Engine, Leases, Objects, Refused, Row, Shared, Tx, check_poison
from holdfast.store.files import Layout
from holdfast.store.keys import Secret
from holdfast.store.leases import FileLeases
from holdfast.store.objects import Folder, Rows, location, open_objects
from holdfast.store.packs import GRACE_S, Packs
from holdfast.store.sqlite import Sqlite, SqliteTx
from holdfast.store.tables import APPLICATION_ID, FORMAT_VERSION, check_version, ddl
from holdfast.store.witness import Witness
from holdfast.store.writer import Job, Writers
from holdfast.text import is_url

T = TypeVar("T")

_CHANGED = "a store was to be changed"

OBJECTS = "objects"
COLD = "cold"
"""The facts that say where packs lie, if not in the store's directory, and where old ones were moved to."""

CLOSE_WAIT_S = 10.0
"""How long closing, or the end of the program, waits for changes that nobody waits for."""

TICK_S = 0.01
"""How often whoever waits for a change asks whether there was one."""

HOME = "home"
"""The fact that says which files or tables use the packs that lie elsewhere: not those of a copy."""

MOVED = "moved"
"""The fact that a store was moved, and where to."""

SCHEDULES = "schedules"
"""The fact that says which functions are executed at which times. It is the store's own: a copy has none."""

_open: weakref.WeakSet[Database] = weakref.WeakSet()


class Contents(NamedTuple):
    """What states are read from: of the store as it is now, or as it was at one moment."""

    view: View
    packs: Packs


def shown(place: str) -> str:
    """A place as people may see it: without a password."""
    if not is_url(place):
        return place
    from holdfast.store.connection import Address

    return Address(place).place


class Database:
    """An open store. Threads may share it. Use ``open_database``."""

    def __init__(
        self,
        engine: Engine,
        leases: Leases,
        packs: Packs,
        cipher: Cipher,
        uuid: bytes,
        created: int,
        *,
        witness: Witness | None,
        readonly: HoldfastError | None,
    ) -> None:
        self.engine = engine
        self.packs = packs
        self.cipher = cipher
        self.uuid = uuid
        self.created = created
        self.witness = witness
        self.view = View(self, cipher)
        self.now = Contents(self.view, packs)
        self.before_close: list[Callable[[], None]] = []
        self.leases = leases
        self.lost_effects = False  # somebody accepts that acknowledged records are missing, and nothing says so yet
        self.released = False
        self.again: Callable[..., Database] | None = None  # opens it once more
        self._refusal: type[HoldfastError] | None = None
        self._readonly = readonly
        self._numbers: dict[str, int] = {}  # the newest handles that are known, for the direct path
        self._writers = None if readonly is not None else Writers(engine, lambda: self.cipher, self._committed)
        processes.watch(self)
        _open.add(self)

    def accept_loss(self) -> None:
        """The store counts as it is from now on."""
        self.flush()
        if self.witness is not None:
            self.witness.accept(self.view)
        self.lost_effects = False

    # -- use and refusal ------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        return self.engine.place

    @property
    def encrypted(self) -> bool:
        return self.cipher.keyed

    @property
    def readonly(self) -> bool:
        return self._readonly is not None

    @property
    def closed(self) -> bool:
        return self._refusal is StoreClosed

    def check_usable(self) -> None:
        """Raise unless this process may use the store."""
        if self._refusal is None:
            return
        if self._refusal is ForkedHandle and copies.READING and self.again is not None:
            self.inherit(readonly=True)
            return
        if self._refusal is ForkedHandle:
            raise ForkedHandle(
                "this store was opened before fork() and is used in the child",
                hint="Open the store again in the child: holdfast.open(...).",
            )
        raise StoreClosed(f"the store at {self.place} was closed", hint="Open it again with holdfast.open().")

    def check_secret(self, secret: Secret) -> None:
        """Raise unless this opens the store: somebody else in this process wants to use the handle."""
        unlock(self.engine, secret, self.uuid)

    @property
    def writers(self) -> Writers:
        self.check_usable()
        if self._readonly is not None:
            raise type(self._readonly)(self._readonly.message, hint=self._readonly.hint)
        if self._writers is None:
            raise StoreClosed("the store was closed", hint="Open it again with holdfast.open().")
        return self._writers

    # -- reading and changing -------------------------------------------------------------------------------

    def run(self, sql: str, args: Args = ()) -> list[Row]:
        """Rows of the store as it is now."""
        if self._refusal is not None:
            self.check_usable()
        return self.engine.run(sql, args)

    @contextmanager
    def moment(self) -> Iterator[Contents]:
        """The store as it is now, for as long as the block lasts, whatever others write meanwhile."""
        self.check_usable()
        with self.engine.moment() as reader:
            yield Contents(View(reader, self.cipher), self.packs)

    def await_change(self, seen: int | None, most_s: float) -> None:
        """Return soon after anybody has committed something since ``stamp`` gave that, or when the time is over."""
        end_s = time.monotonic() + most_s
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, TICK_S if seen is not None else left_s))
            if seen is not None and self.stamp() != seen:
                return

    def stamp(self) -> int | None:
        """Another number after each commit of anybody; None where that cannot be told."""
        self.check_usable()
        return self.engine.stamp()

    def change(self, work: Work[T], b: int = 0, *, inside: bool = False) -> T:
        """Make a change; durable when it returns. ``b``: of that branch, so in order with its others.

        ``inside``: also where the memory that makes it may not be the one that goes on, because it does not matter.
        """
        if copies.INSIDE and not inside:
            copies.check_outside(_CHANGED)
        return self.writers.do(work, b)

    def hand(self, job: Job[T], b: int = 0) -> Job[T]:
        """Hand a change over, to be made after those that were handed over before."""
        if not job.handed:
            if copies.INSIDE:
                copies.check_outside(_CHANGED)
            if self.engine.poison is not None:
                check_poison(self.engine)
        return self.writers.hand(job, b)

    def directly(self, work: Work[T]) -> tuple[T] | None:
        """Make a change in one call from this thread, if nobody else is writing; None: not made, hand it over.

        What comes out of it other than that says nothing about whether it was made: ask the store.
        """
        self.check_usable()
        if copies.INSIDE:
            copies.check_outside(_CHANGED)
        if self.engine.busy:  # before anything is prepared in vain
            return None
        collected = Collected(self._numbers, self.engine.handles())
        change = Change(collected, self.cipher)
        try:
            result = work(change)
        except CannotCollect:
            return None
        if not self.engine.direct(collected.statements, collected.args):
            return None
        self._committed(change)
        return (result,)

    def share(self, *, later: bool) -> Shared:
        """Begin a transaction in which user code writes first."""
        _ = self.writers  # raises where nothing may be written
        if copies.INSIDE:
            copies.check_outside(_CHANGED)
        return self.engine.share(later=later)

    def commit(self, shared: Shared, work: Work[T]) -> T:
        """Make a change in a transaction that user code has written in, and commit both; durable when it returns."""
        made: list[Change] = []

        def whole(tx: Tx) -> T:
            made[:] = [Change(tx, self.cipher)]
            return work(made[0])

        result = shared.commit(whole)
        self._committed(made[0])
        return result

    def _committed(self, change: Change) -> None:
        """After the flush, before anybody is told."""
        self.engine.acknowledge(change.moved)
        newest = change.newest
        self._numbers.update(newest)
        if self.witness is not None and newest:
            self.witness.record(newest.get("loose", 0), newest.get("log", 0), newest.get("record", 0), change.mark)

    def own(self, change: Change) -> None:
        """The packs that lie elsewhere are these files' or tables' from now on: a copy of them must not delete any."""
        change.set_fact(HOME, self.engine.identity())

    def sweep_strays(self, grace_s: float = GRACE_S) -> int:
        """Delete packs that nothing names, and that have lain somewhere for so long; returns how many."""

        def at_once(work: Callable[[View], bool]) -> bool:
            return work(self.view)  # whoever names something on a server waits for the end of ``sweeping``

        alone = self.change if isinstance(self.engine, Sqlite) else at_once
        return self.packs.sweep_strays(self.view, self.engine, alone, grace_s)

    def flush(self, wait_s: float | None = None) -> None:
        """Return when everything that was handed over is durable; raises if nothing can be any more."""
        if self._readonly is None and (self.writers.pending or self.engine.poison is not None):
            self.writers.flush(wait_s)

    # -- its end, and forks ---------------------------------------------------------------------------------

    def rest(self, deadline: float) -> bool:
        writers = self._writers
        return (writers is None or writers.rest(deadline)) and self.engine.rest(deadline)

    def resume(self) -> None:
        self.engine.resume()
        if self._writers is not None:
            self._writers.resume()

    def release(self) -> None:
        """Between ``rest`` and ``resume``: have no file open any more, and no branch, until ``reopen``."""
        if not isinstance(self.engine, Sqlite):
            raise StoreBusy(f"{self.place} is on a server, and a connection to one cannot be let go for a while")
        self.leases.close()
        self.engine.release()
        if self.witness is not None:
            self.witness.close()

    def reopen(self) -> None:
        """After ``release``, also in a copy of this process. Branches are not taken again."""
        if isinstance(self.engine, Sqlite):
            self.engine.reopen()
            self._numbers.clear()
            if self.witness is not None:
                self.witness = self.witness.again(self.engine.layout, self.uuid)

    def abandon(self, rested: bool) -> None:
        """After a fork, in the child: everything here is the parent's."""
        self._refusal = ForkedHandle
        self.engine.abandon(rested)
        self.leases.abandon()
        if self.witness is not None:
            self.witness.close()

    def inherit(self, *, readonly: bool = False) -> None:
        """In a forked child that goes on for its parent: the same store, with connections and locks of its own.

        What was read through this object, and what holds it, goes on. The parent must have let go of what the child
        is to write; ``readonly``: or the child only reads.
        """
        if self._refusal is not ForkedHandle or self.again is None:
            return
        fresh = self.again(readonly=readonly or self._readonly is not None, cipher=self.cipher)
        processes.unwatch(fresh)
        _open.discard(fresh)
        self.packs.move(fresh.packs)
        for name in ("engine", "leases", "witness", "_readonly", "_numbers", "_writers"):
            setattr(self, name, getattr(fresh, name))
        self._refusal = None
        processes.watch(self)

    def close(self) -> None:
        """Write what was handed over, and let go of everything.

        Raises when something cannot be written. If that is for want of room the store stays open, so that closing can
        be tried again.
        """
        if self.released or self._refusal is ForkedHandle:
            return
        try:
            if self._refusal is None:
                for call in self.before_close:
                    call()
                if self._writers is not None and self._writers.pending:
                    self._writers.flush()
        except HoldfastError as error:
            if isinstance(error, DiskFull):
                raise
            self._release()
            raise
        self._release()

    def _release(self) -> None:
        """Cut short anywhere, all of it can be done again."""
        self._refusal = StoreClosed
        if self._writers is not None:
            self._writers.stop(CLOSE_WAIT_S)
        self.leases.close()
        if self.witness is not None:
            self.witness.close()
        self.engine.close()
        self.released = True


@atexit.register
def _at_exit() -> None:
    """What nobody waits for is written when the program ends, or at least tried for a while."""
    deadline = time.monotonic() + CLOSE_WAIT_S
    for one in list(_open):
        with suppress(HoldfastError):
            left = deadline - time.monotonic()
            if left > 0:
                one.check_usable()
                one.flush(left)
                if getattr(sys, "last_value", None) is None:
                    one.leases.end_well()


# -- opening -------------------------------------------------------------------------------------------------------


def open_database(
    place: str | Path,
    *,
    create: bool = True,
    readonly: bool = False,
    accept_loss: bool = False,
    trust_older: bool = False,
    secret: Secret | None = None,
    objects: str | None = None,
    remember: bool = True,
    vfs: str | None = None,
    cipher: Cipher | None = None,
) -> Database:
    """Open the store in a directory, or at a ``postgresql://`` URL, making it first if there is none.

    ``accept_loss`` opens a store that is behind its witness, and makes the witness agree with what is left; where that
    lacks records, the caller does that (``accept_loss``) when the lines say so.
    ``trust_older`` opens one that is older than what this user has seen of it, and takes it as it is from now on.
    ``secret`` is the key of an encrypted store; a new store is encrypted if one is given. ``objects`` is where packs
    lie, if not in the store's directory. ``remember=False`` leaves no record of it in the user's state directory: for a
    store that is thrown away. ``vfs`` replaces SQLite's system calls: for tests of failing disks. ``cipher``: what its
    rows are read with, where that is known already.
    """
    refusal: HoldfastError | None = ReadOnly("this store was opened with readonly=True") if readonly else None
    engine: Any
    layout = None
    if isinstance(place, str) and is_url(place):
        scheme = place.partition(":")[0]
        if scheme not in {"postgresql", "postgres"}:
            raise BadOption(
                f"no store can be opened at a {scheme}:// address",
                hint="Give the path of a directory (./NAME, if its name begins so), or postgresql://...",
            )
        make = partial(fill, secret=secret, objects=objects)
        engine = _server(place, readonly=readonly, make=make if create and not readonly else None)
    else:
        layout = Layout(Path(os.path.realpath(place)))
        if not files.classify(layout.path):
            if readonly or not create:
                raise NotAStore(
                    f"there is no store at {layout.path}", hint="Check the path, or open it with create=True."
                )
            create_store(layout.path, secret, objects)
            files.classify(layout.path)
        processes.close_inherited(layout.catalog)
        if not readonly:
            files.complete(layout)
        try:
            engine = Sqlite(layout, readonly=readonly, vfs=vfs)
        except StoreReadOnly as error:
            refusal = error
            engine = Sqlite(layout, readonly=True, vfs=vfs)
    witness, lost = None, False
    try:
        if layout is not None:
            engine.check_version()
        facts = read_facts(engine, secret, cipher)
        _check_moved(facts, engine.place, writing=refusal is None)
        home = _check_home(facts, engine, trusted=trust_older) if refusal is None else True
        if layout is not None:
            witness = Witness(layout, facts.uuid, readonly=refusal is not None, remember=remember)
        engine.check_schema()
        here, leases = _objects(facts, objects, engine.place), _leases(engine, facts.cipher)
        if layout is not None and witness is not None:
            options = {"accept_loss": accept_loss, "trust_older": trust_older, "writing": refusal is None}
            lost = _check_loss(View(engine, facts.cipher), witness, layout, **options)
            here = here or Folder(layout.packs, poisoned=engine.poisoned)
        cold_now = partial(_cold_place, engine, facts)
        packs = Packs(facts.cipher, here or Rows(engine), cold_now(), cold_now)
    except BaseException:
        if witness is not None:
            witness.close()
        engine.close()
        raise
    db = Database(engine, leases, packs, facts.cipher, facts.uuid, facts.created, witness=witness, readonly=refusal)
    db.lost_effects = lost
    db.again = partial(open_database, place, create=False, remember=remember, vfs=vfs)
    if not home:
        with suppress(Refused):  # somebody else has just done it
            db.change(db.own)
    return db


def _leases(engine: Any, cipher: Cipher) -> Leases:
    if isinstance(engine, Sqlite):
        return FileLeases(engine.layout.locks, cipher)
    from holdfast.store.advisory import AdvisoryLeases

    return AdvisoryLeases(engine, cipher)


def _server(url: str, *, readonly: bool = True, make: Callable[[Tx], None] | None = None) -> Any:
    """The engine of a store on a server. ``make`` writes the rows of a new one, where there is none."""
    try:
        from holdfast.store.postgres import Postgres
    except ImportError as error:
        raise Incompatible(
            "stores on PostgreSQL need the package psycopg", hint="pip install 'holdfast[postgres]'"
        ) from error
    return Postgres(url, readonly=readonly, fill=make)


@contextmanager
def reading(place: str | Path) -> Iterator[Engine]:
    """A store's rows as they are stored, to be read without its key."""
    if isinstance(place, str) and is_url(place):
        engine: Engine = _server(place)
    else:
        real = Path(os.path.realpath(place))
        if not files.classify(real):
            raise NotAStore(f"there is no store at {real}", hint="Check the path.")
        engine = Sqlite(Layout(real), readonly=True)
    try:
        yield engine
    finally:
        engine.close()


class Facts(NamedTuple):
    """What a store says of itself. ``created`` is in microseconds."""

    uuid: bytes
    created: int
    cipher: Cipher
    objects: str
    cold: str
    moved: str = ""
    home: bytes = b""


def new_facts(change: Change, uuid: bytes, objects: str | None) -> None:
    """The rows of an empty store."""
    for name, value in (
        ("format", FORMAT_VERSION.to_bytes(2, "big")),
        ("uuid", uuid),
        ("created", now_us().to_bytes(8, "big")),
        (OBJECTS, location(objects).encode() if objects else b""),
    ):
        change.put("store", name, value)


def read_facts(engine: Engine, secret: Secret | None, known: Cipher | None = None) -> Facts:
    """Raise unless the store is sound so far as its facts tell, and of a format that this program knows."""
    try:
        found = {str(row[0]): bytes(row[1]) for row in engine.run("SELECT name, value FROM store")}
        version, uuid = int.from_bytes(found["format"], "big"), found["uuid"]
    except (LookupError, TypeError) as error:
        raise Damaged(f"{engine.place}: table store is damaged", what=("table store",)) from error
    check_version(engine.place, version)
    cipher = known or unlock(engine, secret, uuid)
    try:
        sound = View(engine, cipher).facts()
        places = sound[OBJECTS].decode(), sound.get(COLD, b"").decode(), sound.get(MOVED, b"").decode()
        return Facts(sound["uuid"], int.from_bytes(sound["created"], "big"), cipher, *places, sound.get(HOME, b""))
    except (KeyError, UnicodeDecodeError) as error:
        raise Damaged(f"{engine.place}: table store is damaged", what=("table store",)) from error


def _check_moved(facts: Facts, place: str, *, writing: bool) -> None:
    if facts.moved and writing:
        raise ReadOnly(
            f"{place} was moved to {facts.moved}, and is not written to any more",
            hint=f"Open {facts.moved}. What is here can still be read: readonly=True.",
        )


def _check_home(facts: Facts, engine: Engine, *, trusted: bool) -> bool:
    """Whether nothing has to be noted: no packs lie elsewhere, or those who use them are these very files or tables.

    A copy names the packs of its original, under the same prefix. Each would take what the other has written for waste.
    """
    here = engine.identity()
    if not (facts.objects or facts.cold) or not here or here == facts.home:
        return True
    if isinstance(engine, Sqlite) and engine.is_born_as(facts.home):
        return False  # noted anew, with what is known now
    if facts.home and not trusted:
        raise StoreCopied(
            f"{engine.place} is a copy of a store whose packs lie in {facts.objects or facts.cold}: if both were"
            " written to, each would delete packs of the other",
            lost="what was written elsewhere since it was copied",
            hint="If it takes the place of the original, which is gone: `holdfast repair --trust-older`, or"
            " trust_older=True. To have two, make the other one with `holdfast backup`. It can be read in any case.",
        )
    return False


def copied(db: Database) -> StoreCopied | None:
    """Why nobody may write to an open store that is a copy; None if it is not one."""
    try:
        _check_home(read_facts(db.engine, None, db.cipher), db.engine, trusted=False)
    except StoreCopied as error:
        return error
    return None


def unlock(engine: Engine, secret: Secret | None, uuid: bytes) -> Cipher:
    """What the rows of a store are read with."""
    slots = keys.read_slots(View(engine, PLAIN))
    if slots is None:
        if secret is None:
            return PLAIN
        raise NotEncrypted(
            f"{engine.place} is not encrypted, and a key was given",
            hint="If it should be, somebody put another store there. If not, give no key (key=False).",
        )
    if secret is None:
        raise KeyNeeded(
            f"{engine.place} is encrypted",
            hint="Give the key: key=, HOLDFAST_KEY, HOLDFAST_KEY_FILE or HOLDFAST_KEY_COMMAND.",
        )
    master, _ = slots.unlock(secret)
    return Keyed(master, uuid)


def create_store(path: Path, secret: Secret | None = None, objects: str | None = None) -> None:
    """Make a new store in a directory, whole or not at all. One that another process made meanwhile is as good."""

    def build(catalog: Path) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        try:
            connection = apsw.Connection(str(catalog), flags=flags)
            try:
                sqlite.settle(connection, readonly=False)
                # All of it is flushed once, at the end, before it gets its name. Incremental vacuum only keeps a note
                # of who refers to each page; room is given back after removals.
                connection.execute(
                    "PRAGMA synchronous=OFF; PRAGMA page_size=4096; PRAGMA auto_vacuum=INCREMENTAL;"
                    " PRAGMA journal_mode=WAL"
                ).fetchall()
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={FORMAT_VERSION}")
                connection.execute("; ".join(ddl("sqlite")))
                fill(SqliteTx(connection), secret, objects)
                connection.execute("COMMIT")
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                connection.close(True)
        except apsw.Error as error:
            raise sqlite.reading_error(error, f"creating {catalog}") from error

    files.create(path, build)


def fill(tx: Tx, secret: Secret | None, objects: str | None) -> None:
    """Make empty tables those of a new store; with a ``secret`` an encrypted one, which that opens."""
    uuid = uuids.uuid4().bytes
    cipher: Cipher = PLAIN
    if objects is not None:
        open_objects(objects, uuid.hex()).prepare()
    if secret is not None:
        created, master = keys.new_keys(uuid, secret, now_us())
        keys.write_slots(Change(tx, PLAIN), created)
        cipher = Keyed(master, uuid)
    new_facts(Change(tx, cipher), uuid, objects)


def _objects(facts: Facts, objects: str | None, place: str) -> Objects | None:
    """Where packs lie, if not in the store's directory. The store keeps it; nobody can say otherwise later."""
    if objects is not None and location(objects) != facts.objects:
        raise BadOption(
            f"{place} keeps its packs {f'in {facts.objects}' if facts.objects else 'itself'}",
            hint="Push it into a new store that is made with objects=, --objects.",
        )
    return open_objects(objects or facts.objects, facts.uuid.hex()) if facts.objects else None


def _cold_place(engine: Engine, facts: Facts) -> Objects | None:
    """Where old packs are moved to, as the store has it now."""
    place = View(engine, facts.cipher).facts().get(COLD, b"").decode()
    return open_objects(place, facts.uuid.hex()) if place else None


def _check_loss(
    view: View, witness: Witness, layout: Layout, *, accept_loss: bool, trust_older: bool, writing: bool
) -> bool:
    """Whether somebody accepts that records of what happened outside are lost: that is to be written down first."""
    lost, older = witness.compare(view)
    if lost and not accept_loss:
        raise Damaged(
            f"{layout.path}: the catalog has lost acknowledged commits: {', '.join(lost)}",
            what=("store.db", "store.db-wal"),
            lost=", ".join(lost),
            hint="Put the store back from a backup. To go on with what is left, open it with recover=True, "
            "or make a new store of that: `holdfast repair --to DIR`.",
        )
    if older and not (trust_older or lost):
        raise StoreWentBack(
            f"{layout.path} is older than it was when it was last used here: {', '.join(older)} are missing",
            lost=", ".join(older),
            hint="If a backup was put back on purpose, say so: `holdfast repair --trust-older`, or trust_older=True.",
        )
    lost_effects = writing and any(one.startswith("effect") for one in lost)
    if not lost and not older:
        witness.catch_up(view)
    elif not lost_effects:
        witness.accept(view)
    return lost_effects
