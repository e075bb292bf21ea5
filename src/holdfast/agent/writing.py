"""From a capture to the catalog: the order of writes, sealing, and what happens when a write fails.

Owns the queue of captures of one branch and its head. Must not know revisions, rollback or user handles.
What always holds: captures are written in the order in which they were taken; the document keeps each until it is told
that the catalog has it, so that what could not be written goes with the next one. A signal handler may raise anywhere:
a capture whose writing was cut short is either found in the catalog, and counts, or leaves the queue with everything
behind it; one of which neither can be said yet stays there, and the next call begins with it.

Lock order: ``writing`` before the document's lock, never the other way round.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.agent import metadata
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.journal import Entry, Journal, Position
from holdfast.agent.manifest import Manifest
from holdfast.codec.blocks import LEAF_MAX_BYTES, digest_of
from holdfast.codec.operations import encode_operations, operations_size
from holdfast.codec.told import Captured, Saved
from holdfast.codec.values import decode, encode
from holdfast.errors import HoldfastError, StoreBusy, StoreClosed
from holdfast.store import sealing
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, Commit, Event, metadata_digest
from holdfast.store.locks import Lease
from holdfast.store.opening import now_us

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# What a checkpoint costs a reader besides its values, counted towards sealing.SEAL_BYTES.
_ROW_BYTES = 256

Note = Callable[[Checkpoint], Sequence[Entry]]
"""Makes the records that go to disk with a checkpoint; they may name it. Nothing is written if it raises."""


class Pending:
    """A capture on its way to the catalog."""

    def __init__(
        self,
        captured: Captured,
        label: str,
        kind: str,
        target: bytes,
        key: bytes | None,
        events: Sequence[Event],
        guard: tuple[int, int] | None,
        position: Position,
    ) -> None:
        self.captured = captured
        self.label = label
        self.kind = kind
        self.target = target
        self.key = key
        self.events = events
        self.guard = guard
        self.position = position
        self.note: Note | None = None
        self.note_nodes: Mapping[bytes, bytes] = {}
        self.note_chunks: Mapping[bytes, bytes] = {}
        self.n = 0  # its number, once it is written; 0 when batched
        self.commit: Commit | None = None  # once it is on its way to the catalog, and what it will be there
        self.made: Checkpoint | None = None
        self.apart = False  # another thread sees to it
        self.time_us = now_us()
        self.sealed = False
        self.items: dict[bytes, tuple[bytes, int]] = {}
        self.done = False
        self.result: Checkpoint | None = None
        self.error: BaseException | None = None


class Writing:
    """The writer of one branch."""

    def __init__(
        self, store: Store, agent: AgentRow, lease: Lease, config: Any, *, branch: BranchRow | None = None
    ) -> None:
        """``branch``: another one than the lease's own, which the lease covers."""
        self.writing = threading.RLock()
        self.head: Checkpoint | None = None
        self.branch_head = b""  # where the branch stands; the next checkpoint may be somebody else's child
        self.newest: Checkpoint | None = None  # the one of that id, where this writer has seen it
        self._store = store
        self._agent = agent
        self._branch = branch if branch is not None else lease.row
        self.generation = branch.generation if branch is not None else lease.generation
        self._config = config
        self.journal = Journal(store._catalog, agent.a, self._branch.b, self.generation)
        self._queue: deque[Pending] = deque()
        self._metadata: tuple[int, bytes, bytes] | None = None
        self._metadata_written = b""
        self._unsealed = 0
        self._unsealed_bytes = 0
        self._inside: set[int] = set()  # threads that are in the middle of a checkpoint
        self._stilled = False  # whether whoever has the state's lock is moving through history

    @contextmanager
    def _undivided(self, lock: threading.RLock | None = None) -> Iterator[None]:
        """A signal handler may come in between, and ask for a checkpoint itself: not in the middle of another one.

        Nor in the middle of a change, which has the state's lock.
        """
        me = threading.get_ident()
        changing = lock is not None and not self._stilled and lock._is_owned()  # type: ignore[attr-defined]
        if changing or me in self._inside:
            raise StoreBusy(
                "a checkpoint was asked for in the middle of a change, or of another one, as by a signal handler",
                hint="Let the handler set a flag, and take the checkpoint between two steps.",
            )
        try:
            self._inside.add(me)
            yield
        finally:
            self._inside.discard(me)

    @property
    def head_id(self) -> bytes:
        return self.head._id if self.head is not None else b""

    def start_from(self, head: Checkpoint | None, since_base: list[CheckpointRow]) -> None:
        """The branch stands at ``head``; ``since_base`` are the checkpoints that loading it replays."""
        self.head = self.newest = head
        self.branch_head = self.head_id
        self._unsealed = len(since_base)
        tails = self._store._catalog.tail_bytes(row.n for row in since_base)
        self._unsealed_bytes = tails + sum(len(row.operations) + _ROW_BYTES for row in since_base)

    def capture(
        self,
        document: Saved,
        label: str,
        kind: str = "checkpoint",
        target: bytes = b"",
        *,
        key: bytes | None = None,
        events: Sequence[Event] = (),
        guard: tuple[int, int] | None = None,
        note: Note | None = None,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
    ) -> Pending:
        """Fix the content of a checkpoint. Nothing is written yet.

        ``key`` is what it can be looked up by, ``events`` go to disk with it, ``guard`` is the covering lease.
        ``note`` makes records that go to disk with it, ``nodes`` and ``chunks`` are what these name.
        """
        with self._undivided(document.lock), document.lock:
            position = self.journal.position  # before the state: what it follows from has been recorded
            captured = document.capture(self.under_way)
            pending = Pending(captured, label, kind, target, key, events, guard, position)
            pending.note, pending.note_nodes, pending.note_chunks = note, nodes or {}, chunks or {}
            self._unsealed += 1
            self._unsealed_bytes += _ROW_BYTES + operations_size(captured.operations)
            if self._seal_is_due(document):
                pending.items = document.seal(captured)
                pending.sealed = True
                self._unsealed = self._unsealed_bytes = 0
            self._queue.append(pending)
            return pending

    def _seal_is_due(self, document: Saved) -> bool:
        """Whether replaying has become dear enough to pay for writing the nodes that changed.

        Edits all over a large state touch most of its nodes: writing them anew at every checkpoint would cost the
        size of the state, not of the change, so their operations first have to add up to as much. A last leaf that was
        begun before is written once more in any case, and does not count.
        """
        if self._unsealed >= sealing.SEAL_CHECKPOINTS:
            return True
        if self._unsealed_bytes < sealing.SEAL_BYTES:
            return False
        return self._unsealed_bytes + LEAF_MAX_BYTES >= document.unstored_bytes()

    def finish(self, document: Saved, pending: Pending) -> Checkpoint:
        """Write queued captures in their order until this one is done."""
        with self.writing:
            while True:
                first = None
                try:
                    with self._undivided():
                        if pending.done:  # also when a signal handler's checkpoint has taken it along
                            break
                        first = self._queue[0]
                        self._write(document, first)
                except HoldfastError as error:
                    self._drop(document, error)
                    raise
                except BaseException as error:
                    self._cut_short(document, first, error)
                    raise
        if pending.error is not None:
            raise pending.error
        if pending.result is None:
            raise StoreClosed("the checkpoint was not written")
        return pending.result

    def settle(self, document: Saved) -> None:
        """Write everything that is queued, and make it durable."""
        with self.writing:
            while self._queue:
                self.finish(document, self._queue[-1])
        self._store.flush()

    @contextmanager
    def still(self, document: Saved) -> Iterator[None]:
        """Inside, no capture is on its way, and no other thread changes or captures the state: history can be moved."""
        with self.writing:
            while True:
                self.settle(document)
                with document.lock:
                    if not self._queue:  # otherwise a capture slipped in between the two locks
                        outer = self._stilled
                        try:
                            self._stilled = True
                            yield
                        finally:
                            self._stilled = outer
                        return

    @property
    def under_way(self) -> list[Captured]:
        """The captures that are being written."""
        return [pending.captured for pending in tuple(self._queue)]

    @property
    def queued(self) -> bool:
        """Whether a capture is on its way."""
        return bool(self._queue)

    @property
    def waiting(self) -> bool:
        """Whether a capture waits for the next call, because the one that took it was cut short."""
        return any(not pending.apart for pending in tuple(self._queue))

    def _cut_short(self, document: Saved, first: Pending | None, error: BaseException) -> None:
        """Writing ended by something that says nothing of the store, as an interrupt does: see what became of it."""
        if first is None or first.done:
            return
        if first.made is not None:
            try:
                if self._landed(document, first):
                    return
            except HoldfastError:
                return  # nobody can tell now: the next call asks again
        self._drop(document, error)

    def _landed(self, document: Saved, pending: Pending) -> bool:
        """Whether a capture whose writing was cut short is in the catalog all the same. If not, it never will be."""
        if pending.commit is None or not self._store._catalog.landed(pending.commit):
            return False
        self._written(document, pending)
        return True

    def _drop(self, document: Saved, error: BaseException) -> None:
        """What is queued will not be written. The document keeps it for the next capture."""
        with document.lock:  # nobody captures in between, believing that these are on their way
            self._unsealed = sealing.SEAL_CHECKPOINTS  # the next one makes the state whole in the catalog
            for pending in self._queue:
                pending.error, pending.done = error, True
            self._queue = deque()

    def _write(self, document: Saved, pending: Pending) -> None:
        if pending.made is not None and self._landed(document, pending):
            return
        operations, values = encode_operations(pending.captured.operations, pending.time_us, self._store._registry)
        described, description = self._describe()
        manifest = Manifest(
            parent=self.head_id,
            agent=self._agent.uuid,
            sections=pending.captured.sections,
            operations=digest_of("holdfast.operations", operations),
            metadata=described,
            label=pending.label,
            time_us=pending.time_us,
            kind=pending.kind,
            target=pending.target,
            effects=pending.position,
        )
        raw = manifest.encode()
        depth = self.head.depth + 1 if self.head is not None else 1
        made = Checkpoint(self._store, raw, depth, self._branch.b, manifest=manifest, agent=self._agent)
        onto = None
        if self.branch_head != manifest.parent:
            onto = (self.head._row.n, self.head._row.base) if self.head is not None else (0, 0)
        nodes = {**pending.captured.nodes, **pending.note_nodes}
        places = self._seal(pending, values, nodes) if pending.sealed else None
        commit = Commit(
            a=self._agent.a,
            b=self._branch.b,
            generation=self.generation,
            parent_id=self.branch_head,
            onto=onto,
            id=made._id,
            depth=depth,
            manifest=raw,
            operations=operations,
            sealed=pending.sealed,
            tail=None if pending.sealed else sealing.tail_of(values),
            nodes=list(nodes.items()),
            places=places,
            metadata=(described, description) if described != self._metadata_written else None,
            chunks=[*pending.captured.chunks.items(), *pending.note_chunks.items()],
            key=pending.key,
            events=[*self._fork_event(made), *pending.events] if onto is not None else pending.events,
            guard=pending.guard,
        )
        records = pending.note(made) if pending.note is not None else None
        pending.commit, pending.made = commit, made
        if records is None:
            pending.n = self._store._catalog.commit(commit) or 0
        else:
            with self.journal.carrying(records) as append:
                pending.commit = replace(commit, append=append)
                pending.n = self._store._catalog.commit(pending.commit) or 0
        self._written(document, pending)
        self._store._tending.made(self._agent)

    def _written(self, document: Saved, pending: Pending) -> None:
        """It is in the catalog. An interrupt may come anywhere here: then all of it is done again (``_cut_short``)."""
        made = pending.made
        if made is None:
            return
        self._metadata_written = made._manifest.metadata
        self.head = self.newest = made
        self.branch_head = made._id
        document.written(pending.captured, sealed=pending.sealed)
        pending.result, pending.done = made, True
        self._queue.popleft()

    def _fork_event(self, made: Checkpoint) -> list[Event]:
        """The branch leaves its line: said in the history, as a rollback is."""
        name = body_of(self._branch)["name"]
        body = {"what": "rollback", "branch": name, "from": self.branch_head, "to": made._manifest.parent}
        return [Event(now_us(), encode(body))]

    def _seal(self, pending: Pending, values: list[bytes], nodes: dict[bytes, bytes]) -> bytes:
        """Find places for the branch's tail, this checkpoint's own values included."""
        catalog, b = self._store._catalog, self._branch.b
        catalog.flush()
        last = catalog.last_seal(b)
        tails = [(n, decode(data)) for n, data in catalog.tails(b, after=last.n if last is not None else 0)]
        if values:
            tails.append((0, values))
        return sealing.seal(tails, nodes, pending.items)

    def _describe(self) -> tuple[bytes, bytes]:
        """The metadata and its digest; collected again when types were registered since."""
        known = len(self._store._registry)
        if self._metadata is None or self._metadata[0] != known:
            data = metadata.collect(self._store._registry, self._config)
            self._metadata = known, metadata_digest(data), data
        return self._metadata[1], self._metadata[2]
