"""An agent as runs and calls see it: its line, and moving its state to where a run is.

Owns how a run's checkpoints are taken, and what the live state stands on while a run is executed again. Must not know
what user code sees. What always holds: changes in memory are relative to the checkpoint that the next one becomes a
child of, wherever the branch stands; nothing that was not saved is overwritten before it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from holdfast.agent.branch import BranchWriter, Pending
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.history import Stored
from holdfast.agent.names import check_label
from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import HoldfastError, ReadOnly, RunUnfinished, UnknownRevision
from holdfast.run import records as rec
from holdfast.run import signals
from holdfast.run.arguments import Stowed
from holdfast.run.claims import Loop
from holdfast.run.companions import Companion
from holdfast.run.ledger import Ledger
from holdfast.run.listing import origin_of
from holdfast.run.past import RunPast
from holdfast.run.returning import Returning
from holdfast.run.signals import Signal
from holdfast.run.stored import StoredLedger, StoredLine, entries
from holdfast.store.catalog import Point
from holdfast.store.changes import NewRecord

if TYPE_CHECKING:
    from holdfast.run.handle import Agent

log = logging.getLogger("holdfast.run")


class AgentHost(Returning):
    """What the rest of this room asks of an agent (``runs.RunHost``)."""

    def __init__(self, agent: Agent) -> None:
        self.handle = agent
        self.name = agent.name
        self.registry = agent._store._registry
        self.ledger: Ledger = open_ledger(agent)
        self.base: Point | None = None  # what the live state stands on while that is not the writer's head
        self.companions: dict[type[Companion], Companion] = {}
        self._loop: Loop | None = None
        self._signals: tuple[tuple[int, int], list[Signal]] = (
            (-1, 0),
            [],
        )  # of which run, how many entries; what was read
        self._rows: dict[bytes, Point] = {}
        self._remains = b""  # the digest of what a run left behind that stopped
        self._executing = threading.Lock()

    @property
    def identity(self) -> tuple[bytes, bytes]:
        return self.handle._row.uuid, self.handle._branch.uuid

    @property
    def generation(self) -> int:
        writer = self.handle._writer
        return writer.generation if writer is not None else 0

    def is_dead(self, generation: int, number: int) -> bool:
        db = self.handle._store._db
        made = db.view.numbered(db.view.branch_at(self.handle._branch.b).line, number)
        if not made.b:  # in another store: nobody here can tell whether whoever wrote it is still at it
            return False
        if (made.b, generation) == (self.handle._branch.b, self.generation):
            return False
        return not db.leases.alive(db.view.branch_at(made.b).uuid, generation)

    @property
    def config_hash(self) -> str:
        """Of the configuration that the agent was opened with; empty when there is none."""
        writer = self.handle._writer
        config = writer.config if writer is not None else None
        return digest_of("holdfast.config", encode(config, self.registry)).hex()[:16] if config is not None else ""

    def signals(self, run: RunPast | None) -> list[Signal]:
        """The signals that a run may take, or, without one, a plain loop; oldest first. Read when some have come."""
        view, agent = self.handle._store._db.view, self.handle._row
        stamp = run.number if run is not None else 0, signals.stamp(view, agent, run)
        if self._signals[0] != stamp:
            self._signals = stamp, signals.visible(view, agent, self.handle._branch, run)
        return self._signals[1]

    @cached_property
    def origin(self) -> int:
        """How many records of the line the checkpoint knows that the branch began with."""
        return origin_of(self.handle._store._db.view, self.handle._branch)

    # -- plain use --------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop:
        """The use of this agent outside of runs."""
        if self._loop is None:
            head = self.handle.head
            self._loop = Loop(self, position_of(head), head.id if head is not None else "")
        return self._loop

    def moved(self) -> None:
        """The head was moved by hand: what its state does not know is another matter now."""
        self.base = None
        self._rows.clear()
        if self._loop is not None:  # perhaps in use at this moment
            head = self.handle.head
            self._loop.restart(position_of(head), head.id if head is not None else "")
        for one in self.companions.values():
            one.restore(replaying=False)

    def along(self, kind: type[Companion]) -> None:
        """From now on this is kept along with the state."""
        if kind not in self.companions:
            self.companions[kind] = kind(self)

    def close(self) -> None:
        """The handle is being closed."""
        for one in self.companions.values():
            one.close()

    # -- a run's checkpoints ----------------------------------------------------------------------------

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Inside, a run of this agent is executed: one at a time."""
        self.handle._check_writer()
        if not self._executing.acquire(blocking=False):
            raise RunUnfinished(
                f"{self.name} is executing a run",
                hint="Inside a run, call the function itself, or give it an agent of its own.",
            )
        try:
            yield
        finally:
            self._executing.release()

    @property
    def busy(self) -> bool:
        """Whether a run is being executed."""
        return self._executing.locked()

    def begin(self, record: rec.Begin, stowed: Stowed) -> Callable[[], Checkpoint]:
        def note(made: Checkpoint) -> list[rec.Record]:
            record.start = made._id
            return [record]

        return self.capture(f"run {record.function}", note, stowed)

    def save(self, label: str, record: Callable[[bytes, bytes], rec.Saved]) -> Callable[[], Checkpoint]:
        return self.capture(label, lambda made: [record(made._id, bytes.fromhex(made.digest))])

    def finish(self, record: rec.End, stowed: Stowed, label: str) -> Callable[[], Any]:
        if self.handle.dirty or self.behind:
            return self.capture(label, None, stowed, first=[record])  # so that a branch that begins here knows it
        return lambda: self.ledger.append(record, nodes=stowed.nodes, chunks=stowed.chunks, flush=True)

    def capture(
        self,
        label: str,
        note: Callable[[Checkpoint], Sequence[rec.Record]] | None = None,
        stowed: Stowed | None = None,
        kind: str = "checkpoint",
        target: bytes = b"",
        first: Sequence[rec.Record] = (),
    ) -> Callable[[], Checkpoint]:
        """Fix the content of a checkpoint; what is returned writes it. The records go to disk in its transaction.

        It knows those in ``first``, and what ``note`` makes comes after it.
        """
        document, writer = self.handle._document, self.handle._check_writer()
        check_label(label)
        for one in self.companions.values():
            one.keep()
            one.describe()
        self.loop.note()

        def noted(pending: Pending) -> Sequence[NewRecord]:
            made = Checkpoint(self.handle._store, self.handle._row, pending.raw, pending.manifest)
            return entries(*note(made)) if note is not None else ()

        pending = writer.capture(
            document,
            label,
            kind,
            target,
            first=entries(*first),
            note=noted if note is not None else None,
            nodes=stowed.nodes if stowed is not None else None,
            chunks=stowed.chunks if stowed is not None else None,
        )
        return lambda: self.handle._remember(writer.finish(pending))

    # -- executing again --------------------------------------------------------------------------------

    def state_digest(self) -> bytes:
        for one in self.companions.values():
            one.keep()
        return bytes.fromhex(self.handle.digest)

    def rewind(self, start: bytes) -> None:
        agent, document = self.handle, self.handle._document
        writer = agent._check_writer()
        with writer.still(document):
            row = self._row(start)
            if document.changed and not self.has_remains:
                raise RunUnfinished(
                    f"the state of {self.name} has changes that are not saved; the run was not resumed",
                    hint="It begins with the state that it was begun with, and they would be lost. Keep them elsewhere"
                    " and take them out of agent.state, or forget them with agent.close().",
                )
            self._stand_on(row)
            replaying = row.row.b != agent._branch.b and row.id != self._origin
            for one in self.companions.values():
                one.restore(replaying=replaying)

    def difference(self, id: bytes) -> list[str]:
        return self.handle.diff(self.handle._seen(self._row(id))).brief()

    def saved(self, id: bytes) -> Checkpoint:
        row = self._row(id)
        # What led here is in that checkpoint. Nodes that were made on the way stay, to be written with the next one.
        self.handle._document.forget_changes()
        self.base = row
        if row.id == self._origin:
            for one in self.companions.values():
                one.passed()
        return self.handle._seen(row)

    def stopped(self) -> None:
        agent = self.handle
        if agent.closed:
            return
        try:
            if self.behind:
                self._to_head()
            else:
                self._remains = self.state_digest()
        except HoldfastError as error:  # the run has its own error; a checkpoint taken now would still be right
            log.warning("the state of %s could not be brought back to its head: %s", self.name, error)

    def _to_head(self) -> None:
        agent = self.handle
        with agent._check_writer().still(agent._document):
            self._stand_on(agent._store._db.view.point(agent._fresh_branch().head))
            for one in self.companions.values():
                one.restore(replaying=False)

    @property
    def has_remains(self) -> bool:
        """Whether what is not saved is what a run left behind that stopped."""
        return self.handle._document.changed and self.state_digest() == self._remains

    def abandoned(self) -> None:
        """The run that stopped here has ended: what it left behind and did not save goes."""
        if self.has_remains:
            self._to_head()

    @property
    def _origin(self) -> bytes:
        """The checkpoint with which the branch began."""
        return bytes(self.handle._branch.body["from"])

    def align(self, writer: BranchWriter) -> None:
        """Let the writer go on from what the live state stands on. The branch stays where it is until it writes."""
        row, self.base = self.base, None
        if row is None or row.id == writer.head_id:
            return
        writer.start_from(row, Stored(self.handle._store._db.now, row).since_base())

    @property
    def behind(self) -> bool:
        """Whether the live state stands on another checkpoint than the branch does."""
        writer = self.handle._writer
        if writer is None:
            return False
        return (self.base.id if self.base is not None else writer.head_id) != writer.branch.id

    def _stand_on(self, row: Point) -> None:
        """Make the live state that of a checkpoint."""
        agent = self.handle
        agent._document.become(agent._read(row)[0], record=False)
        self.base = row

    def _row(self, id: bytes) -> Point:
        if id not in self._rows:
            self.handle._store.flush()
            found = self.handle._store._db.view.find(id)
            if found is None:
                raise UnknownRevision(
                    f"checkpoint {id.hex()[:12]}, which the run needs, is not in the history any more",
                    hint="It was forgotten. Roll back to a checkpoint that is there, and begin the run anew.",
                )
            self._rows[id] = found
        return self._rows[id]


def position_of(checkpoint: Checkpoint | None) -> int:
    """How many records of its line a checkpoint knows."""
    return checkpoint._manifest.effects[0] if checkpoint is not None else 0


class _Reading(StoredLine):
    """The line of a handle that only reads."""

    def append(self, *records: rec.Record, **_options: Any) -> int:  # noqa: ARG002 - as the protocol has it
        raise ReadOnly("this handle is read-only: nothing can be recorded", hint="Open it without readonly=True.")

    def flush(self) -> None: ...


def open_ledger(agent: Agent) -> Ledger:
    """The line of an agent's branch."""
    db, b = agent._store._db, agent._branch.b
    if agent._writer is None:
        return _Reading(db, b)
    return StoredLedger(db, b, agent._writer)
