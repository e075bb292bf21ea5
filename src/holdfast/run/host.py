"""An agent as runs, calls and rollbacks see it: its line, and moving its state to where a run is, or back.

Owns how a run's checkpoints are taken, what the live state stands on while a run is executed again, and the step from a
rollback's questions to revisions, branches and handles. Must not know what user code sees, nor effects. What always
holds: changes in memory are relative to the checkpoint that the next one becomes a child of, wherever the branch
stands; nothing that was not saved is overwritten before it is; the state, the head and the record of a rollback move
together or not at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.agent.branch import BranchWriter, checked
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.history import Stored, state_of
from holdfast.agent.layers import Looked
from holdfast.agent.names import LABEL_MAX_CHARACTERS, check_label
from holdfast.agent.pending import Pending
from holdfast.agent.points import RUN
from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import BadOption, HoldfastError, RunUnfinished, StoreBusy, UnknownRevision
from holdfast.run import callers, waiting
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed
from holdfast.run.claims import Loop
from holdfast.run.durables import unfinished
from holdfast.run.line import Line, entries
from holdfast.run.listing import end_at, origin_of
from holdfast.run.past import OPEN, Call, Past, RunPast
from holdfast.run.planning import Target
from holdfast.run.waiting import Signal
from holdfast.store.changes import Change, NewRecord
from holdfast.store.engine import Lease
from holdfast.store.rows import Point

if TYPE_CHECKING:
    from holdfast.run.environment import Companions
    from holdfast.run.handle import Agent

log = logging.getLogger("holdfast.run")
_LOOKS = 4
"""How often a state is judged again that others change meanwhile."""


class _Changed(Exception):
    """What was captured is not what was judged."""


class Judged(NamedTuple):
    """A state that may be saved: the digests of its sections, and why its checkpoint is suspect, if it is."""

    sections: list[tuple[str, bytes]]
    suspect: str = ""


class AgentHost:
    """What the rest of this room asks of an agent: a ``Host``, and more."""

    judge: Callable[..., Judged] | None = None  # asked before each checkpoint by the room above; raises to refuse it
    looking: Callable[[str], None] | None = None  # told of each checkpoint and of each call
    sparing = False  # what is saved now is saved in any case

    whole = False  # known to have no run and no rollback under way
    resumed = ""  # the run of which it is recorded that it is resumed, before that is done
    for_worker = False  # whoever executes its runs is a worker
    entering: Callable[[], None] | None = None  # called when a function is entered
    _loop: Loop | None = None
    borrowed = False  # the handle was opened for somebody else's rollback, or for a run as a child

    def __init__(self, agent: Agent) -> None:
        self.handle = agent
        self.name = agent.name
        self.registry = agent._store._registry
        self.ledger = Line(agent._store._db, agent._branch.b, agent._writer)
        self.base: Point | None = None  # what the live state stands on while that is not the writer's head
        self._companions: Companions | None = None
        # Of which run, how many entries; what was read.
        self._signals: tuple[tuple[int, int], list[Signal]] = ((-1, 0), [])
        self._rows: dict[bytes, Point] = {}
        self._glanced: dict[tuple[int, int], Past] = {}  # what somebody has looked at, and where line and head were
        self._proven: Past | None = None  # the last one that was read from the beginning of the line
        self._remains = b""  # the digest of what a run left behind that stopped
        self._executing = threading.Lock()

    @property
    def branch_name(self) -> str:
        return self.handle.branch_name

    @property
    def identity(self) -> tuple[bytes, bytes]:
        return self.handle._row.uuid, self.handle._branch.uuid

    @property
    def generation(self) -> int:
        writer = self.handle._writer
        return writer.generation if writer is not None else 0

    @property
    def lease(self) -> Lease | None:
        return self.handle._lease

    def outlives_s(self, call: Call) -> float | None:
        return callers.outlives_s(self.handle._store._db, self.handle._branch.b, self.generation, call)

    def shared_us(self) -> int:
        return self.handle._store._db.engine.clock()

    @property
    def config_hash(self) -> str:
        """Of the configuration that the agent was opened with; empty when there is none."""
        writer = self.handle._writer
        config = writer.config if writer is not None else None
        return digest_of("holdfast.config", encode(config, self.registry)).hex()[:16] if config is not None else ""

    def signals(self, run: RunPast | None) -> list[Signal]:
        """The signals that a run may take, or, without one, any run; oldest first. Read when some have come."""
        view, agent = self.handle._store._db.view, self.handle._row
        stamp = run.number if run is not None else 0, waiting.stamp(view, agent, run)
        if self._signals[0] != stamp:
            self._signals = stamp, waiting.visible(view, agent, self.handle._branch, run)
        return self._signals[1]

    @cached_property
    def origin(self) -> int:
        return origin_of(self.handle._store._db.view, self.handle._branch)

    # -- plain use --------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop:
        """The use of this agent outside of runs."""
        if self._loop is None:  # one, also for threads that come together: it knows the calls that are under way
            self._loop = self.__dict__.setdefault("_loop", Loop(self, position_of(self.handle.head)))
        return self._loop

    def moved(self) -> None:
        """The head was moved by hand: what its state does not know is another matter now."""
        self.base = None
        self._rows.clear()
        if self._loop is not None:  # perhaps in use at this moment
            self._loop.restart(position_of(self.handle.head))
        if self._companions is not None:
            self._companions.restore()

    def retaken(self, *, thawed: bool) -> None:
        """The branch was let go for a while. ``thawed``: the line has gone on since, and what it says counts."""
        writer = self.handle._writer
        if writer is not None:
            writer.forget_opened()
            Line(self.handle._store._db, self.handle._branch.b, writer)  # reads them again
        if thawed:
            self._glanced.clear()
            self._proven = None
            self._signals = ((-1, 0), [])
            self.moved()

    @property
    def companions(self) -> Companions:
        """What is kept along with the state, from now on."""
        if self._companions is None:
            from holdfast.run.environment import Companions  # which needs calls, and those a host

            self._companions = Companions(self)
        return self._companions

    def forget(self) -> None:
        """This process goes on for another one, whose open handles are of no use here."""
        if self._companions is not None:
            self._companions.forget()

    def close(self) -> None:
        """The handle is being closed."""
        if self._companions is not None:
            self._companions.close()

    # -- a run's checkpoints ----------------------------------------------------------------------------

    @contextmanager
    def executing(self, *, taken: bool = False) -> Iterator[None]:
        """Inside, a run of this agent is executed: one at a time. ``taken``: it is the caller's turn already."""
        if not taken and not self.take_turn():
            raise RunUnfinished(
                f"{self.name} is executing a run",
                hint="Wait until it has ended. Inside a run, call the function itself, or give it an agent of its own.",
            )
        try:
            yield
        finally:
            self._glanced, self._proven = {}, None
            self._executing.release()

    def take_turn(self) -> bool:
        """Whether nobody executes a run of this agent: then it is the caller's turn."""
        self.handle._check_writer()
        return self._executing.acquire(blocking=False)

    @property
    def busy(self) -> bool:
        """Whether a run is being executed."""
        return self._executing.locked()

    def past(self, id: str | None = None) -> Past:
        """What the line says to whoever goes on from the head; with the id of a run, what it says of that, too."""
        recent = self._glanced.pop(self._stamp, None)  # whoever gets it may change it: nobody else does
        if recent is None:
            recent = Past(self.ledger.recent(position_of(self.handle.head)))
        if id is None or id in recent.runs or not self.ledger.begun(id):
            return recent
        return Past(self.ledger.records())

    def glance(self, *, whole: bool = False) -> Past:
        """As past(), for whoever only looks at it. Who asks next gets the same, if nothing was recorded in between.

        With ``whole`` it is read from the beginning of the line, which the chain proves.
        """
        stamp = self._stamp
        past = self._glanced.get(stamp)
        if past is None or (whole and self._proven is not past):
            past = Past(self.ledger.records()) if whole else self.past()
            self._proven = past if whole else self._proven
        self._glanced = {stamp: past}
        return past

    def picked_up(self, run: str, past: Past) -> None:
        """Whoever took the branch has read the whole line, and has recorded with that that a run is resumed."""
        self.resumed, self._proven, self._glanced = run, past, {self._stamp: past}

    @property
    def _stamp(self) -> tuple[int, int]:
        return self.ledger.count, position_of(self.handle.head)

    def begin(self, record: rec.Begin, stowed: Stowed, past: Past, *more: rec.Record) -> Callable[[], Checkpoint]:
        """Take the checkpoint that a run begins with; the record, completed, goes with it, and so do ``more``."""
        past.incarnation += record.run in past.begun  # it is done anew, so its calls have other keys
        record.generation, record.life = self.generation, past.incarnation
        if self.loop.clear and record.kind == "run":
            taken = past.taken | self.loop.taken
            record.taken = [one.id for one in self.signals(None) if one.id in taken]

        def note(made: Checkpoint) -> list[rec.Record]:
            record.start = made._id
            return [record, *more]

        self.handle._pace.moved()
        return self.capture(f"run {record.function}", note, stowed, trigger=RUN)

    def save(
        self, label: str, record: Callable[[bytes, bytes], rec.Record], **options: Any
    ) -> Callable[[], Checkpoint]:
        """Take a checkpoint. ``record(id, digest)`` goes with it."""
        return self.capture(label, lambda made: [record(made._id, bytes.fromhex(made.digest))], **options)

    def due(self, event: str) -> str | None:
        """What asks for a checkpoint at this safe point of a run."""
        return self.handle._pace.due(event)

    @property
    def changed(self) -> bool:
        """Whether there is something to save. If not, that is as good as if it had been done."""
        if self.handle.dirty:
            return True
        self.handle._pace.unchanged()
        return False

    def beside(self, label: str, reason: str, trigger: str) -> bytes:
        """Take a checkpoint that the branch does not move to, marked suspect; returns its id."""
        writer = self.handle._check_writer()
        self.ready(look=False)  # who watches must not keep a failing state from being saved
        label, document = check_label(label[:LABEL_MAX_CHARACTERS]), self.handle._document
        return self.handle._apart(lambda: writer.beside(document, label, reason, trigger))

    def finish(self, record: rec.End, stowed: Stowed, label: str) -> Callable[[], Any]:
        """The run has ended well: keep its state, if that has changed, and its result, in one transaction."""
        if self.handle.dirty or self.behind:
            return self.capture(
                label, None, stowed, first=[record], trigger=RUN
            )  # so that a branch that begins here knows it
        return lambda: self.ledger.append(record, stowed=stowed, flush=True)

    def quiet(self) -> AbstractContextManager[None]:
        """Around a capture, and all that is looked at for it."""
        writer: BranchWriter | None = self.handle._check_writer()  # an execution that keeps nothing has none
        return writer.quiet() if writer is not None else nullcontext()

    def capture(
        self,
        label: str,
        note: Callable[[Checkpoint], Sequence[rec.Record]] | None = None,
        stowed: Stowed | None = None,
        kind: str = "checkpoint",
        target: bytes = b"",
        first: Sequence[rec.Record] = (),
        trigger: str = "",
        lazy: bool = False,
        looked: Sequence[Looked] | None = None,
        also: Callable[[Change, bytes], None] | None = None,
        began_s: float = 0.0,
    ) -> Callable[[], Checkpoint]:
        """Fix the content of a checkpoint; what is returned writes it. The records go to disk in its transaction.

        It knows those in ``first``, and what ``note`` makes comes after it. ``looked`` is what the writer has found in
        the layers beside the state, if that was done before; ``also`` goes into its transaction. ``began_s``: since
        when its maker stands still for it.
        """
        document, writer = self.handle._document, self.handle._check_writer()
        check_label(label)
        began_s = began_s or time.monotonic()
        with writer.quiet():  # what is paused may change the state, so it is before anybody judges that
            self.ready(look=kind == "checkpoint" and not self.sparing)
            for _ in range(_LOOKS):
                judged = self.judge(sparing=self.sparing or kind != "checkpoint") if self.judge is not None else None
                try:
                    pending = writer.capture(
                        document,
                        label,
                        kind,
                        target,
                        first=entries(*first) if first else (),
                        note=partial(self._noted, note, judged) if note is not None or judged is not None else None,
                        nodes=stowed.nodes if stowed is not None else None,
                        chunks=stowed.chunks if stowed is not None else None,
                        trigger=trigger,
                        lazy=lazy,
                        suspect=judged.suspect if judged is not None else "",
                        began_s=began_s,
                        looked=looked,
                        also=also,
                    )
                except _Changed:
                    looked = None if looked else looked  # what it brought is let go of with what was not written
                    continue
                return lambda: self.handle._remember(writer.finish(pending))
        raise StoreBusy(
            f"the state of {self.name} changed while its invariants were checked, each time; nothing was saved",
            hint="Change it inside `with agent.atomic():` where several threads do, and never in an invariant.",
        )

    def _noted(
        self,
        note: Callable[[Checkpoint], Sequence[rec.Record]] | None,
        judged: Judged | None,
        pending: Pending,
    ) -> Sequence[NewRecord]:
        """The records that go with a checkpoint, if its state is the one that was judged."""
        captured = list(pending.manifest.state) if pending.manifest is not None else []
        if judged is not None and judged.sections != captured:
            raise _Changed  # nothing is written then
        made = Checkpoint(self.handle._store, self.handle._row, pending.raw, pending.manifest)
        return entries(*note(made)) if note is not None else ()

    def ready(self, *, look: bool = True) -> None:
        """Before a capture: whatever goes with the state is told, and whoever watches may ``look``."""
        self._tell_companions()
        self.loop.note()
        if look and self.looking is not None:
            self.looking("checkpoint")

    def _tell_companions(self) -> None:
        if self._companions is not None:
            self._companions.keep()
            self._companions.describe()

    # -- executing again --------------------------------------------------------------------------------

    def state_digest(self) -> bytes:
        if self._companions is not None:
            self._companions.keep()
        return bytes.fromhex(self.handle.digest)

    def rewind(self, start: bytes) -> None:
        """Make the live state that of this checkpoint, in memory. The head stays where it is."""
        agent, document = self.handle, self.handle._document
        writer = agent._check_writer()
        if self._companions is None and self.base is None and start == writer.head_id and not document.changed:
            return  # it is: nobody has saved anything since
        with writer.still(document):
            row = self._row(start)
            if document.changed and not self.has_remains:
                raise RunUnfinished(
                    f"the state of {self.name} has changes that are not saved; the run was not resumed",
                    hint="It begins with the state that it was begun with, and they would be lost. Keep them elsewhere"
                    " and take them out of agent.state, or discard them with agent.close().",
                )
            self._stand_on(row)
            agent._pace.moved()
            if self._companions is not None:
                self._companions.restore()

    def put_files_back(self, run: RunPast) -> None:
        """Before a run is executed again: let the workspace have the files of the moment that the run goes on from.

        Where the newest checkpoint is the last that the run has recorded, that is the moment, and a call that was cut
        short after it, or none, is made again. Where calls have ended since, they are not made again, so what they
        left in the workspace stays.
        """
        workspace, head = self.handle._workspace, self.handle.head
        if workspace is None or head is None or not head.has_files or self.behind or not self.stands_in(run):
            return
        known = position_of(head)
        if not any(call.ended > known and not call.read for call in run.calls.values()) and workspace.put_back():
            log.warning(
                "%s: files of %s were put back to those of its newest checkpoint; as they were, they are in the one"
                " beside it (holdfast log --all)",
                self.name, workspace.path,
            )  # fmt: skip

    def difference(self, id: bytes) -> list[str]:
        """What differs between that checkpoint's state and the live one, for people."""
        return self.handle.diff(self.handle._seen(self._row(id))).brief()

    def saved(self, id: bytes) -> Checkpoint:
        """A checkpoint that was taken before; the changes that led to it are recorded there already."""
        row = self._row(id)
        # What led here is in that checkpoint. Nodes that were made on the way stay, to be written with the next one.
        self.handle._document.forget_changes()
        self.handle._document.stand_on(state_of(self.handle._db.now, row))
        self.base = row
        return self.handle._seen(row)

    def stopped(self) -> None:
        """The run did not get to its end. If it had not caught up with its record, the state is the head's again."""
        agent = self.handle
        if agent.closed:
            return
        try:
            if self.behind:
                self.to_head()
            else:
                self._remains = self.state_digest()
        except HoldfastError as error:  # the run has its own error; a checkpoint taken now would still be right
            log.warning("the state of %s could not be brought back to its head: %s", self.name, error)

    def to_head(self) -> None:
        """Make the live state that of the branch's head. What was not saved is gone."""
        agent = self.handle
        with agent._check_writer().still(agent._document):
            self._stand_on(agent._store._db.view.point(agent._fresh_branch().head))
            if self._companions is not None:
                self._companions.restore()

    @property
    def has_remains(self) -> bool:
        """Whether what is not saved is what a run left behind that stopped."""
        return bool(self._remains) and self.handle._document.changed and self.state_digest() == self._remains

    def abandoned(self) -> None:
        """The run that stopped here has ended: what it left behind and did not save goes."""
        if self.has_remains:
            self.to_head()

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
            self.ledger.flush()  # not the store: whoever else writes there may wait for what is locked here
            found = self.handle._store._db.view.find(id)
            if found is None:
                raise UnknownRevision(
                    f"checkpoint {id.hex()[:12]}, which the run needs, is not in the history any more",
                    hint="It was forgotten. Roll back to a checkpoint that is there, and begin the run anew.",
                )
            self._rows[id] = found
        return self._rows[id]

    # -- going back ----------------------------------------------------------------------------------------

    def target(self, revision: Any) -> Target:
        """A checkpoint by a revision, or by the bytes of its id."""
        agent = self.handle
        row = agent._find(f"id:{revision.hex()}" if isinstance(revision, bytes) else revision)
        found = self._target(agent._seen(row))
        position = row.manifest.effects[0]
        if position and not self._knows(row, position):
            raise BadOption(
                f"{found.name} belongs to another branch, after calls outside that this branch does not have",
                hint="Begin a branch there: agent.branch(name, at=...).",
            )
        return found

    def _target(self, found: Checkpoint) -> Target:
        manifest, agent = found._manifest, self.handle
        end = end_at(agent._store._db.view, agent._branch.b, found._current())
        return Target(found._id, end.records, manifest.time_us, found.label or found.short_id, found)

    def _knows(self, point: Point, count: int) -> bool:
        """Whether the records before a checkpoint are those that this branch's line begins with."""
        view, branch = self.handle._store._db.view, self.handle._fresh_branch()
        return count <= branch.records and view.numbered(branch.line, count).r == point.row.line

    def newest_before(self, at_us: int) -> Target | None:
        """The newest checkpoint of this branch that is not newer."""
        agent = self.handle
        agent._store.flush()
        for row in agent._store._db.view.walk(agent._fresh_branch().head):
            found = agent._seen(row)
            if found._manifest.time_us <= at_us:
                return self._target(found)
        return None

    def stands_at(self, target: Target) -> bool:
        """Whether the branch's head is that checkpoint."""
        self.handle._store.flush()
        return self.handle._fresh_branch().id == target.id and not self.handle.dirty

    @property
    def inherited(self) -> int:
        """How many records of the line are those of the branch that it comes from."""
        return int(self.handle._branch.body.get("start", 0))

    def users(self) -> list[tuple[str, int]]:
        """Branches that inherit from this line: what people call them, and how many records they share."""
        view, mine = self.handle._store._db.view, self.handle._fresh_branch()
        line = view.handles(mine.line)
        found = []
        for agent in view.agents():
            for branch in view.branches(agent.a):
                if branch.b == mine.b or not branch.line:
                    continue
                shared = max((i for r, i in view.handles(branch.line).items() if r in line), default=0)
                if shared > self.inherited:
                    own = agent.a == mine.a
                    found.append((f"branch {branch.name}" if own else f"agent {agent.name}", shared))
        return found

    def leaving(self, target: Target) -> tuple[list[Any], Any]:
        """The checkpoints that the branch would leave behind, and how the live state would change."""
        shown = self.handle._leaving(target.checkpoint)
        return shown.abandons, shown.diff

    def return_to(self, target: Target, make: Callable[[int], Sequence[rec.Record]]) -> Checkpoint:
        """Make the live state and the head those of the target, records going along in the same transaction.

        ``make`` gets the number of the record before them.
        """
        made = self.handle._go_back(
            target.checkpoint._current(), lambda count: checked(self.ledger.entries(*make(count)))
        )
        self.whole = True
        self.moved()
        return made

    def check_free(self) -> None:
        """Raise while a run or a rollback has begun and not ended: what is done beside it would be in its way."""
        if self.whole:
            return
        owner = self.past().owner(self.origin) if self.ledger.count else None
        if owner is not None:
            raise unfinished(self, owner, executing=self.busy)
        self.whole = True

    @property
    def is_free(self) -> bool:
        """Whether check_free() would not raise."""
        try:
            self.check_free()
        except RunUnfinished:
            return False
        return True

    def stands_in(self, run: RunPast) -> bool:
        """Whether the newest checkpoint of the branch is one of this run: nothing else was saved since."""
        head = self.handle.head
        while head is not None and head.kind == "recover":  # the state of the one before it
            head = self.handle.at(f"id:{head.parent_id}")
        if head is None or head._id in run.checkpoints:
            return True
        # A branch does not inherit the record of the checkpoint that it begins at.
        origin = bytes(self.handle._branch.body["from"])
        began = run.status in OPEN and run.newest <= self.origin
        return began and head._id == origin and bytes.fromhex(head.parent_id) in run.checkpoints

    # -- other agents ---------------------------------------------------------------------------------------

    def child(self, name: str, branch: str, *, write: bool) -> AgentHost | None:
        """Another agent of the same store; None when there is none of that name."""
        store = self.handle._store
        row = store._db.view.agent(name)
        known = store._db.view.branch(row.a, branch) if row is not None else None
        return self._opened(name, branch, known.b, write=write) if known is not None else None

    def own_child(self, name: str, branch: str) -> AgentHost:
        store = self.handle._store
        row = store._db.view.agent(name)
        if row is None:
            row = store._add_agent(name)
        known = store._db.view.branch(row.a, branch)
        if known is None:  # this branch's child shares nothing with that of another branch
            known = store._add_branch(row, branch, None)
        return self._opened(name, branch, known.b, write=True)

    def _opened(self, name: str, branch: str, b: int, *, write: bool) -> AgentHost:
        store = self.handle._store
        with store._lock:
            found: Any = store._handles.get(b)
            if found is None or found.closed:
                found = store.agent(name, branch=branch, readonly=not write)
                found._host.borrowed = write
        host: AgentHost = found._host
        return host

    def release(self) -> None:
        """Close the handle, if it was opened for somebody else."""
        if self.borrowed:
            self.borrowed = False
            self.handle.close()


def position_of(checkpoint: Checkpoint | None) -> int:
    """How many records of its line a checkpoint knows."""
    return checkpoint._manifest.effects[0] if checkpoint is not None else 0
