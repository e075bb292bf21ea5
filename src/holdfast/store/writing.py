"""Every change that can be made to the catalog, and the transaction around it.

Owns the INSERTs, UPDATEs and DELETEs, the order of locks (threads of this process, then the writers' queue, then
SQLite), and what a failure leaves behind. Always true: one call is one transaction and one flush; the witness is
written only after the flush returned; after a flush that failed nothing is ever written again through this object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import TypeVar

import apsw
import zstandard
from msgspec import Struct
from msgspec.structs import replace

from holdfast.codec.values import encode
from holdfast.errors import (
    BadName,
    Damaged,
    Fenced,
    HoldfastError,
    StoreBusy,
    StorePoisoned,
    UnknownAgent,
    UnknownRevision,
)
from holdfast.store.bodies import body_of
from holdfast.store.catalog import (
    AgentRow,
    Append,
    BranchRow,
    Buffer,
    CheckpointRow,
    ChunkRow,
    Commit,
    Event,
    EventRow,
    LineStart,
    NewPack,
    NewRecord,
    SealRow,
    TagRow,
    ValidityRow,
    effect_chain,
    forgotten_key,
)
from holdfast.store.cipher import PLAIN, Cipher, Row
from holdfast.store.ends import Ends
from holdfast.store.locks import BUSY_WAIT_S, StoreLock
from holdfast.store.place import Place
from holdfast.store.ranges import Ranges
from holdfast.store.reading import CHECKPOINT, CIPHER_STATE, EVENT, rekeying
from holdfast.store.room import FRAMES, check_room
from holdfast.store.schema import NUMBERED, next_number
from holdfast.store.sqlite import reading_error, writing_error
from holdfast.store.witness import WitnessFile

COMPRESS_FROM_BYTES = 256
"""Below this a compressed node saves less than a page holds in slack anyway."""

COMPRESS_LEVEL = 1

_NEXT = {table: next_number(table) for table in NUMBERED}
_NEXT_N, _NEXT_E = _NEXT["checkpoint"], _NEXT["event"]
_BRANCH = "SELECT b, a, uuid, key, body, head, head_id, generation, sum FROM branch"

T = TypeVar("T")


class Head(Struct, frozen=True):
    """A branch as this process last wrote it. ``sum`` lets an update compare all of it at once."""

    row: BranchRow
    sum: bytes
    base: int


class Standing(Struct):
    """What holds after a checkpoint, as long as the database has this ``version``: nobody has written since then.

    The newest checkpoint's number and, if it is known, the newest event's; the guard that was compared.
    """

    n: int
    e: int
    guard: tuple[int, int] | None
    version: int = -1


class Vanished(Exception):
    """A chunk that was taken for stored is not in the catalog any more; write it and try again."""


_zstd = threading.local()


def pack_node(node: bytes) -> bytes:
    """``node.data``: compressed when that saves at least a sixteenth, because reading it costs time ever after."""
    if len(node) >= COMPRESS_FROM_BYTES:
        compressor = getattr(_zstd, "compressor", None)
        if compressor is None:
            compressor = _zstd.compressor = zstandard.ZstdCompressor(level=COMPRESS_LEVEL)
        small: bytes = compressor.compress(node)
        if len(small) <= len(node) - len(node) // 16:
            return b"\x01" + small
    return b"\x00" + node


def packed_nodes(cipher: Cipher, nodes: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, Buffer]]:
    """Nodes and their digests as they are stored."""
    return [(cipher.lookup("node", digest), cipher.box("node", digest, pack_node(node))) for digest, node in nodes]


class Writer:
    """The one writing connection of a store in this process."""

    def __init__(
        self,
        connection: apsw.Connection,
        lock: StoreLock,
        witness: WitnessFile,
        cipher: Cipher = PLAIN,
        *,
        place: Place,
    ) -> None:
        self.connection = connection
        self.place = place
        self.cipher = cipher
        self.lock = lock
        self.witness = witness
        self.threads = threading.RLock()
        self.poison: StorePoisoned | None = None
        self.busy_wait_s = BUSY_WAIT_S
        self._run = connection.cursor().execute
        self._heads: dict[int, Head] = {}
        self.ends = Ends(connection, cipher)
        # What the transaction in hand gave out: newest checkpoint, event and effect, that checkpoint's id.
        self._n = self._e = self._r = 0
        self._id = b""
        self._standing: Standing | None = None  # after the last transaction; None when that was no checkpoint
        self._known: Standing | None = None  # the same inside one, if it still holds
        self._next_e = 0  # the number of the next event; 0 when it is not known

    def transaction(self, change: Callable[[], T], committed: Callable[[], None] = lambda: None) -> T:
        """Run ``change`` inside one transaction, under every lock, and make it durable before returning.

        ``committed`` is called when it is durable, also where an interrupt then keeps this from returning.
        """
        check_room(FRAMES // 2)  # whoever has put it into the queue had more
        if self.poison is not None:
            raise self.poisoned()
        try:  # before the locks are taken: an interrupt may come as soon as they are
            if not self.threads.acquire(timeout=self.busy_wait_s):
                raise StoreBusy(f"another thread kept the store for {self.busy_wait_s:g} s; nothing was written")
            if self.poison is not None:
                raise self.poisoned()
            if self.connection.in_transaction:
                raise StoreBusy("a signal handler came in the middle of a transaction; nothing was written")
            try:
                self.lock.acquire(self.busy_wait_s)
                return self._transaction(change, committed)
            finally:
                self.lock.release()
        finally:
            try:  # noqa: SIM105 - suppress() would be called first, and an interrupt could come then
                self.threads.release()
            except RuntimeError:
                pass  # they were never ours

    def _transaction(self, change: Callable[[], T], committed: Callable[[], None]) -> T:
        self._n = self._e = self._r = 0
        self._id = b""
        standing, self._standing = self._standing, None
        begun = committing = done = False
        try:
            self._run("BEGIN IMMEDIATE")
            begun = True
            if self.cipher.keyed and self._run(CIPHER_STATE).get != self.cipher.state:
                raise rekeying()
            if standing is not None and self.connection.data_version() != standing.version:
                standing = None
            self._know(standing)
            result = change()
            self.place.check()
            committing = True
            self._run("COMMIT")
            done = True
            self._noted(committed)
        except BaseException as error:
            refused = isinstance(error, apsw.Error) and not done
            if committing and not refused and not self.connection.in_transaction:
                self._noted(committed)  # an interrupt came after the commit was done
                raise
            meaning = None
            if isinstance(error, apsw.Error):  # asked before anything is undone: that may end the connection
                meaning = writing_error(error, self.connection, "writing the catalog")
                if isinstance(meaning, StorePoisoned) and not begun:  # nothing was on its way to the disk yet
                    meaning = reading_error(error, "beginning a transaction")
                elif isinstance(meaning, StorePoisoned):
                    self.poison = meaning
            self._undo()
            if meaning is not None:
                raise meaning from error
            raise
        return result

    def _know(self, standing: Standing | None) -> None:
        self._known = standing
        self._next_e = standing.e + 1 if standing is not None and standing.e else 0

    def _noted(self, committed: Callable[[], None]) -> None:
        committed()
        self.witness.record(self._n, self._e, self._r, self._id)
        if self._standing is not None:
            self._standing.version = self.connection.data_version()

    def _undo(self) -> None:
        self._standing = None
        self.forget_heads()
        try:
            if self.connection.in_transaction:
                self._run("ROLLBACK")
        except apsw.Error as error:
            # The connection still holds SQLite's write lock. Closing it is the only way to let others go on.
            self.poison = self.poison or StorePoisoned(f"a transaction could not be undone ({error})")
            self.connection.close(True)

    def poisoned(self) -> StorePoisoned:
        """A fresh copy, because one exception object must not be raised from many threads."""
        first = self.poison
        if first is None:
            return StorePoisoned("the store is poisoned")
        return StorePoisoned(
            first.message, hint=first.hint or "Close the store and open it again to go on from the last durable point."
        )

    # Rows, inside a transaction

    def _branch(self, b: int) -> Row:
        row: Row | None = self._run(f"{_BRANCH} WHERE b = ?", (b,)).fetchone()
        if row is None:
            raise Fenced("the agent was removed; nothing was written", hint="Open the store's agents anew.")
        return row

    def read_branch(self, b: int) -> BranchRow:
        row = self._branch(b)
        return self.cipher.record("branch", BranchRow, row)

    def _check_there(self, a: int, n: int) -> None:
        """Names are given without a lease, so the agent may have been removed, or the checkpoint forgotten, since."""
        if self._run("SELECT 1 FROM agent WHERE a = ?", (a,)).fetchone() is None:
            raise UnknownAgent("the agent was removed; nothing was changed")
        if not n:
            return
        key = self.cipher.lookup("event", forgotten_key(a))
        for found in self._run(f"{EVENT} WHERE key = ?", (key,)).fetchall():
            event = self.cipher.record("event", EventRow, found)
            if n in Ranges(body_of(event)["n"]):
                raise UnknownRevision("the checkpoint was forgotten; nothing was changed")

    def insert_agent(self, row: AgentRow) -> AgentRow:
        row = replace(row, a=self._run(_NEXT["agent"]).get)
        stored = self.cipher.stored("agent", row.a, row.uuid, row.key, row.body)
        self._run("INSERT INTO agent VALUES (?, ?, ?, ?, ?)", stored)
        return row

    def insert_branch(self, row: BranchRow) -> BranchRow:
        b = self._run(_NEXT["branch"]).get
        row = replace(row, b=b)
        self._run("INSERT INTO branch VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._stored_branch(row))
        return row

    def _stored_branch(self, row: BranchRow) -> Row:
        return self.cipher.stored(
            "branch", row.b, row.a, row.uuid, row.key, row.body, row.head, row.head_id, row.generation
        )

    def update_branch(self, row: BranchRow) -> BranchRow:
        self._heads.pop(row.b, None)
        *_, body, head, head_id, generation, total = self._stored_branch(row)
        self._run(
            "UPDATE branch SET body = ?, head = ?, head_id = ?, generation = ?, sum = ? WHERE b = ?",
            (body, head, head_id, generation, total, row.b),
        )
        return row

    def insert_event(self, a: int, event: Event) -> int:
        e = self._next_e or int(self._run(_NEXT_E).get)
        row = self.cipher.stored("event", e, a, event.at, event.body, event.key)
        self._run("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?)", row)
        self._e = e
        self._next_e = e + 1
        return e

    def insert_checkpoint(self, row: CheckpointRow, identity: bytes) -> None:
        """A checkpoint that came from elsewhere; no head moves."""
        columns = (row.n, row.a, row.b, row.parent, row.depth, row.base, row.manifest, row.operations, row.key)
        self._run(
            "INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", self.cipher.stored("checkpoint", *columns)
        )
        self._n, self._id = row.n, identity

    def insert_tail(self, n: int, tail: bytes) -> None:
        self._run("INSERT INTO tail VALUES (?, ?)", (n, self.cipher.box("tail", n, tail)))

    def insert_seal(self, row: SealRow) -> None:
        self._run("INSERT INTO seal VALUES (?, ?, ?, ?)", self.cipher.stored("seal", row.n, row.b, row.places))

    def insert_metadata(self, digest: bytes, data: bytes) -> None:
        stored = (self.cipher.lookup("metadata", digest), self.cipher.box("metadata", digest, data))
        # What was lost in a repair may turn up again. The record of that is shorter than any metadata.
        self._run(
            "INSERT INTO metadata VALUES (?, ?) ON CONFLICT DO UPDATE SET data = excluded.data"
            " WHERE length(metadata.data) < length(excluded.data)",
            stored,
        )

    def check_guard(self, guard: tuple[int, int]) -> None:
        b, generation = guard
        row = self.read_branch(b)
        if row.generation != generation:
            raise self._fenced(row, generation)

    def insert_nodes(self, nodes: Sequence[tuple[bytes, Buffer]]) -> None:
        """Nodes and their digests as they are stored."""
        for node in nodes:
            self._run("INSERT INTO node (digest, data) VALUES (?, ?) ON CONFLICT DO NOTHING", node)

    def next_number(self, table: str) -> int:
        """The number that the next row of a numbered table gets."""
        return int(self._run(_NEXT[table]).get)

    def forget_heads(self) -> None:
        """What is remembered of branches may be out of date."""
        self._heads.clear()
        self.ends.forget()

    # Changes, each the body of one transaction

    def add_agent(self, agent: AgentRow, branch: BranchRow, event: Event) -> tuple[AgentRow, BranchRow]:
        """The agent of that key and its branch; made now unless another process was first."""
        cipher = self.cipher
        key = cipher.lookup("agent", agent.key)
        there = self._run("SELECT a, uuid, key, body, sum FROM agent WHERE key = ?", (key,)).fetchone()
        if there is not None:
            known = cipher.record("agent", AgentRow, there)
            key = cipher.lookup("branch", branch.key, known.a)
            row = self._run(f"{_BRANCH} WHERE a = ? AND key = ?", (known.a, key)).fetchone()
            if row is not None:
                return known, cipher.record("branch", BranchRow, row)
            return known, self.add_branch(replace(branch, a=known.a), event)
        agent = self.insert_agent(agent)
        made = self.insert_branch(replace(branch, a=agent.a))
        self.insert_event(agent.a, event)
        return agent, made

    def add_branch(
        self, branch: BranchRow, event: Event, line: LineStart | None = None, copies: Sequence[NewRecord] = ()
    ) -> BranchRow:
        key = self.cipher.lookup("branch", branch.key, branch.a)
        if self._run("SELECT 1 FROM branch WHERE a = ? AND key = ?", (branch.a, key)).fetchone():
            raise BadName("a branch of that name exists already; nothing was changed")
        self._check_there(branch.a, branch.head)
        made = self.insert_branch(branch)
        line = line if line is not None else LineStart(0, 0, b"")
        if line.start:
            self.ends.begin(made.b, line)
        if copies:
            end = reduce(effect_chain, (record.body for record in copies), line.chain)
            self._r = self.ends.extend(Append(made.a, made.b, 0, line.start, line.chain, copies, end))
        self.insert_event(branch.a, event)
        return made

    def set_arriving(self, branches: Iterable[int], arriving: str | None, guard: tuple[int, int]) -> None:
        self.check_guard(guard)
        for b in branches:
            row = self.read_branch(b)
            body = {key: value for key, value in body_of(row).items() if key != "arriving"}
            more = {"arriving": arriving} if arriving is not None else {}
            self.update_branch(replace(row, body=encode({**body, **more})))

    def raise_generation(self, b: int, generation: int, event: Event | None) -> BranchRow | None:
        row = self.read_branch(b)
        if row.generation != generation:
            return None
        if event is not None:
            self.insert_event(row.a, event)
        return self.update_branch(replace(row, generation=generation + 1))

    def set_head(
        self,
        b: int,
        generation: int,
        expect_head_id: bytes,
        head: int,
        head_id: bytes,
        event: Event,
        append: Append | None,
        nodes: Sequence[tuple[bytes, Buffer]],
    ) -> BranchRow:
        row = self.read_branch(b)
        if row.generation != generation or row.head_id != expect_head_id:
            raise self._fenced(row, generation)
        self._check_there(row.a, head)
        self.insert_event(row.a, event)
        self.insert_nodes(nodes)
        if append is not None:
            self._r = self.ends.extend(append)
        return self.update_branch(replace(row, head=head, head_id=head_id))

    def set_tag(self, tag: TagRow, event: Event) -> TagRow:
        self._check_there(tag.a, tag.n)
        self.insert_tag(tag)
        self.insert_event(tag.a, event)
        return tag

    def insert_tag(self, tag: TagRow) -> None:
        self._run(
            "INSERT INTO tag VALUES (?, ?, ?, ?, ?) ON CONFLICT (a, key) DO UPDATE"
            " SET body = excluded.body, n = excluded.n, sum = excluded.sum",
            self.cipher.stored("tag", tag.a, tag.key, tag.body, tag.n),
        )

    def delete_tag(self, a: int, key: bytes) -> bool:
        self._run("DELETE FROM tag WHERE a = ? AND key = ?", (a, self.cipher.lookup("tag", key, a)))
        return bool(self.connection.changes())

    def drop_tag(self, a: int, key: bytes, event: Event) -> bool:
        if not self.delete_tag(a, key):
            return False
        self.insert_event(a, event)
        return True

    def set_validity(self, a: int, n: int, body: bytes | None, event: Event) -> None:
        self._check_there(a, n)
        if body is None:
            self._run("DELETE FROM validity WHERE a = ? AND n = ?", (a, n))
        else:
            self.insert_validity(ValidityRow(a, n, body))
        self.insert_event(a, event)

    def insert_validity(self, row: ValidityRow) -> None:
        stored = self.cipher.stored("validity", row.a, row.n, row.body)
        self._run("INSERT OR REPLACE INTO validity VALUES (?, ?, ?, ?)", stored)

    def set_fact(self, name: str, value: bytes) -> None:
        """Write a row of table ``store``."""
        self._run("INSERT OR REPLACE INTO store VALUES (?, ?, ?)", self.cipher.stored("store", name, value))

    def drop_fact(self, name: str) -> None:
        self._run("DELETE FROM store WHERE name = ?", (name,))

    def add_events(self, a: int, events: Sequence[Event], guard: tuple[int, int] | None) -> list[int]:
        if guard is not None:
            self.check_guard(guard)
        self._check_there(a, 0)
        return [self.insert_event(a, event) for event in events]

    # The commit of a checkpoint

    def apply(self, commit: Commit, nodes: Sequence[tuple[bytes, Buffer]], pack: NewPack | None) -> int:
        """Write one checkpoint, if its branch is still where the writer believes it to be."""
        run, cipher, known = self._run, self.cipher, self._known
        if commit.guard is not None and (known is None or known.guard != commit.guard):
            self.check_guard(commit.guard)
        n = known.n + 1 if known is not None else int(run(_NEXT_N).get)
        parent, base = self._move_head(commit, n)
        a = commit.a
        row = cipher.stored(
            "checkpoint", n, a, commit.b, parent, commit.depth, base, commit.manifest, commit.operations, commit.key
        )
        run("INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        if commit.tail is not None:
            self.insert_tail(n, commit.tail)
        if nodes:
            self.insert_nodes(nodes)
        if commit.places is not None:
            self._seal(commit, n)
        if commit.metadata is not None:
            self.insert_metadata(*commit.metadata)
        if pack is not None or commit.chunks:
            self.insert_chunks(commit.chunks, pack)
        for event in commit.events:
            self.insert_event(a, event)
        if commit.append is not None:
            self._r = self.ends.extend(commit.append)
        self._n = n
        self._id = commit.id
        self._standing = self._known = Standing(n, self._next_e - 1 if self._next_e else 0, commit.guard)
        return n

    def _move_head(self, commit: Commit, n: int) -> tuple[int, int]:
        """Compare and swap the branch's head; returns the new checkpoint's parent and base."""
        head = self._heads.get(commit.b)
        for _ in range(2):
            if head is None:
                head = self._load_head(commit.b)
                self._heads[commit.b] = head
            old = head.row
            if old.head_id == commit.parent_id and old.generation == commit.generation:
                parent, base = old.head, head.base
                if commit.onto is not None:
                    # Another process may have sealed that checkpoint since it was read, and forgotten what is below.
                    parent = commit.onto[0]
                    self._check_there(commit.a, parent)
                    base = self._base_of(parent)
                base = n if commit.sealed else base if commit.base is None else commit.base
                new = BranchRow(old.b, old.a, old.uuid, old.key, old.body, n, commit.id, old.generation)
                *_, body, _, head_id, _, new_sum = self._stored_branch(new)
                # The old sum covers the whole row, so comparing it proves that what we remember is what is there.
                self._run(
                    "UPDATE branch SET body = ?, head = ?, head_id = ?, sum = ? WHERE b = ? AND sum = ?",
                    (body, n, head_id, new_sum, old.b, head.sum),
                )
                if self.connection.changes() == 1:
                    self._heads[commit.b] = Head(new, new_sum, base)
                    return parent, base
            head = None  # what we remembered is out of date: look at the row itself, once
        raise self._fenced(self.read_branch(commit.b), commit.generation)

    def _load_head(self, b: int) -> Head:
        stored = self._branch(b)
        row = self.cipher.record("branch", BranchRow, stored)
        return Head(row, stored[-1], self._base_of(row.head, row.head_id))

    def _base_of(self, n: int, identity: bytes = b"") -> int:
        """The base of a checkpoint, which must have this id if one is given."""
        if not n:
            return 0
        found = self._run(f"{CHECKPOINT} WHERE n = ?", (n,)).fetchone()
        if found is None:
            raise Damaged(f"table checkpoint, row {n}: missing", what=(f"checkpoint {n}",))
        row = self.cipher.record("checkpoint", CheckpointRow, found)
        if identity and row.id != identity:
            raise Damaged(f"table checkpoint, row {n}: not the branch's head", what=(f"checkpoint {n}",))
        return row.base

    def _fenced(self, row: BranchRow, generation: int) -> Fenced:
        if row.generation != generation:
            return Fenced(
                f"another writer took this branch over (generation {row.generation}, ours is {generation});"
                " nothing was written",
                hint="Open the agent again to go on from the other writer's last checkpoint.",
            )
        return Fenced(
            "the branch's head is not the checkpoint that this change was made on; nothing was written",
            hint="Open the agent again to go on from its newest checkpoint.",
        )

    def _seal(self, commit: Commit, n: int) -> None:
        """The seal takes over from the tail rows since the branch's last one, which go in the same transaction."""
        last = self._run("SELECT coalesce(max(n), 0) FROM seal WHERE b = ?", (commit.b,)).get
        self.insert_seal(SealRow(n, commit.b, commit.places or b""))
        self._run("DELETE FROM tail WHERE n IN (SELECT n FROM checkpoint WHERE b = ? AND n > ?)", (commit.b, last))

    def insert_chunks(self, chunks: Sequence[tuple[bytes, Buffer]], pack: NewPack | None) -> None:
        if pack is not None:
            p = self.insert_pack(pack)
            for chunk in pack.chunks:
                columns = (chunk.digest, p, chunk.offset, chunk.length, chunk.stored)
                stored = self.cipher.stored("chunk", *columns)
                self._run("INSERT INTO chunk VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", stored)
        for digest, _ in chunks:
            key = self.cipher.lookup("chunk", digest)
            if self._run("SELECT 1 FROM chunk WHERE digest = ?", (key,)).fetchone() is None:
                raise Vanished

    def insert_pack(self, pack: NewPack) -> int:
        """The row of a pack that is on disk; returns its number."""
        p = self._run("SELECT coalesce(max(p), 0) + 1 FROM pack").get
        self._run("INSERT INTO pack VALUES (?, ?, ?, ?)", self.cipher.stored("pack", p, pack.uuid, pack.size))
        return int(p)

    def move_chunk(self, chunk: ChunkRow) -> None:
        """Say that a chunk that is known is somewhere else from now on."""
        columns = (chunk.digest, chunk.p, chunk.offset, chunk.length, chunk.stored)
        self._run("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?, ?, ?)", self.cipher.stored("chunk", *columns))

    # Records

    def append(self, append: Append, nodes: Sequence[tuple[bytes, Buffer]], pack: NewPack | None) -> int:
        """Write records, if the branch still has this writer and its line is where the writer believes it to be."""
        if append.guard is not None:
            self.check_guard(append.guard)
        row = self.read_branch(append.b)
        if row.generation != append.generation:
            raise self._fenced(row, append.generation)
        self.insert_nodes(nodes)
        if pack is not None or append.chunks:
            self.insert_chunks(append.chunks, pack)
        self._r = self.ends.extend(append)
        return self._r

    # One of many in a transaction

    def write(self, item: Commit | Append, nodes: Sequence[tuple[bytes, Buffer]]) -> int:
        if isinstance(item, Append):
            return self.append(item, nodes, None)
        return self.apply(item, nodes, None)

    def savepoint(self, item: Commit | Append, nodes: Sequence[tuple[bytes, Buffer]]) -> int | HoldfastError:
        """Write one of many; a typed error undoes this one alone and is returned."""
        given = self._n, self._e, self._r, self._id
        self._run("SAVEPOINT one")
        try:
            result = self.write(item, nodes)
        except (Fenced, Damaged) as error:
            self.forget_heads()
            self._n, self._e, self._r, self._id = given
            self._standing = None
            self._know(None)
            self._run("ROLLBACK TO one")
            self._run("RELEASE one")
            return error
        self._run("RELEASE one")
        return result
