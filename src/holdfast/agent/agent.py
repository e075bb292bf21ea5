"""One agent on one branch: its live state, and every way to move through its history.

Owns rollback, undo, redo and the reading of history. Capture and commit are the branch writer's, values the document's,
bytes the catalog's. The room above adds runs (``run/handle``), and a user's checkpoint goes through its ``_make``. What
always holds: a checkpoint that was returned is durable (or queued, when batched was asked for), and a state that could
not be written is still in memory with all its changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypeVar

from msgspec import Struct

from holdfast.agent import crashes, history, unsaved
from holdfast.agent.branch import BranchWriter
from holdfast.agent.changes import Change, Diff, diff, mutations
from holdfast.agent.checkpoint import Checkpoint, checkpoints_html
from holdfast.agent.fleet import AgentInfo, info_of
from holdfast.agent.graph import Graph
from holdfast.agent.layers import MOMENTARY, Going, Looked
from holdfast.agent.names import check_label, check_new
from holdfast.agent.pending import Pending
from holdfast.agent.points import RESCUE, Pace
from holdfast.agent.watchers import WATCHERS
from holdfast.agent.when import When
from holdfast.codec.blocks import digest_of
from holdfast.codec.document import Document
from holdfast.codec.state import State
from holdfast.codec.values import encode
from holdfast.errors import (
    BadOption,
    Damaged,
    Fenced,
    HoldfastError,
    NothingToUndo,
    ReadOnly,
    StoreClosed,
    UnknownRevision,
)
from holdfast.store.changes import Change as StoreChange
from holdfast.store.changes import NewRecord
from holdfast.store.engine import Lease
from holdfast.store.processes import apart, off_loop
from holdfast.store.rows import Agent as AgentRow
from holdfast.store.rows import Branch, Point

if TYPE_CHECKING:
    from holdfast.agent.store import Store


RETAKE_WAIT_S = 10.0
"""How long a process that had let go of its stores waits for whoever writes its branch meanwhile."""

T = TypeVar("T")

RETURNS = 3
"""How often files are put back again that somebody else changes at that moment."""


class Rollback(Struct, frozen=True):
    """What a rollback would do."""

    target: Checkpoint
    abandons: list[Checkpoint]
    diff: Diff


class Agent:
    """The handle on an agent. Get one from ``store.agent(name)``."""

    def __init__(
        self,
        store: Store,
        row: AgentRow,
        branch: Branch,
        lease: Lease | None,
        *,
        config: Any = None,
        when: When | None = None,
    ) -> None:
        self.name = row.name
        """What it is called."""
        self.recovery: str | None = None
        """What a recovery gave up, in words; None when nothing."""
        self.damaged = False  # a section could not be read
        self._said = ""  # the digest of the state whose changes were said to be lost
        self._store = store
        self._db = store._db
        self._row = row
        self._branch = branch
        self._lease = lease
        self._closed = False
        self._writer = BranchWriter(store, branch, config=config, when=when) if lease is not None else None
        if self._writer is not None and lease is not None:
            self._writer.failed = int(lease.unclean)
        self._pace = Pace(self, when if lease is not None else None)
        self._load_head()
        for watcher in WATCHERS:
            watcher(self, True)

    def _explain(self, error: Damaged) -> Damaged:
        """A damage that showed while the state was read, with what can be done about it."""
        self.damaged = True
        from holdfast.agent import recovery

        return recovery.explain(self._store, self.name, self._fresh_branch(), error)

    def _load_head(self) -> None:
        """Take the head's state from the store; sections are read when they are touched."""
        store, branch = self._store, self._branch
        self._made: Checkpoint | None = None  # the newest, as far as it is known here
        point = self._db.view.point(branch.head) if branch.head else None
        if point is not None and point.id != branch.id:
            raise Damaged(
                f"the head of {self.name!r} is not the checkpoint that its branch names",
                what=(f"branch {self.branch_name}",),
                hint="Run `holdfast verify`, then open it with recover=True.",
            )
        source = history.source_of(self._db.now, point, self._newest if self._lease is not None else None)
        since_base = source.since_base() if isinstance(source, history.Stored) else []
        self._document = history.Live(store._registry, source, inert=store._inert, explain=self._explain)
        if point is not None:
            self._made = self._seen(point)
        if self._writer is not None:
            self._writer.start_from(point, since_base, moved=branch)
        self._document.readonly = self._lease is None
        self._document.paranoid = store._paranoid
        self._document.guard = self._check_open

    def _newest(self) -> Point | None:
        """The newest checkpoint of this writer that is stored."""
        firm = self._writer.firm if self._writer is not None else self._branch
        return self._db.view.point(firm.head) if firm.head else None

    def _say_recovered(self, damaged: bytes, lost: str) -> None:
        """Tell the user, and note in the history, once, that this line goes on from a damaged one."""
        self.recovery = lost
        if self._branch.id == self._branch.body["from"]:
            self._make(f"recovered from {damaged.hex()[:12]}", "recover", damaged)

    # -- the state ------------------------------------------------------------------------------------

    @property
    def state(self) -> Document:
        """The live state: a mapping of sections."""
        return self._document

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        if not isinstance(value, Mapping):
            raise BadOption(
                f"a state is a mapping of sections, not a {type(value).__name__}", hint="Assign a dict, or a section."
            )
        self._document.replace(value)

    @property
    def branch_name(self) -> str:
        """The branch that this handle is on."""
        return self._branch.name

    @property
    def head(self) -> Checkpoint | None:
        """The newest checkpoint of this branch, None when there is none."""
        writer, made = self._writer, self._made
        if writer is None or not writer.head_id or (made is not None and made._id == writer.head_id):
            return made if writer is None or writer.head_id else None
        self._settle()
        point = self._db.view.find(writer.head_id)
        self._made = self._seen(point) if point is not None else None
        return self._made

    @property
    def dirty(self) -> bool:
        """Whether the state, or a file of the workspace, has changed since the last checkpoint."""
        writer = self._writer
        return self._dirty_state or (writer is not None and any(layer.changed() for layer in writer.layers))

    @property
    def _dirty_state(self) -> bool:
        writer = self._writer
        return writer is not None and (writer.waiting or self._document.changed_since(writer.under_way))

    @property
    def digest(self) -> str:
        """The digest of the live state, as ``Checkpoint.digest``."""
        flat = [part for pair in self._document.digests() for part in pair]
        return digest_of("holdfast.state", encode(flat)).hex()

    # -- checkpoints ------------------------------------------------------------------------------------

    def checkpoint(self, label: str = "") -> Checkpoint:
        """Save the state. Durable when it returns; writes only what changed."""
        return self._make(label)

    async def acheckpoint(self, label: str = "") -> Checkpoint:
        """As checkpoint(). The event loop never waits for the disk.

        The content is fixed before the first await, unless something old is compared that has to be read again first:
        then it is fixed when that has been read. With a workspace, its files are read first, elsewhere; then the state.
        """
        from asyncio import shield

        writer = self._check_writer()
        await self._bring_told()
        with writer.quiet():
            looked = await self._look_later()
            pending = writer.capture(self._document, check_label(label), looked=looked)
        await shield(off_loop(writer.finish, pending))
        return self._remember(pending)

    async def _bring_told(self) -> None:
        """Read what the next capture has to be compared with, and that is not in memory any more."""
        missing = self._document.lacking()
        if missing:
            await off_loop(self._document.bring, missing)

    async def _look_later(self) -> Sequence[Looked]:
        """What has changed in the layers beside the state. The loop does not wait for that."""
        writer = self._check_writer()
        found: Sequence[Looked] = await off_loop(writer.look) if writer.layers else ()
        return found

    def _make(self, label: str, kind: str = "checkpoint", target: bytes = b"", **options: Any) -> Checkpoint:
        writer = self._check_writer()
        return self._remember(
            writer.checkpoint(self._document, check_label(label), kind=kind, target=target, **options)
        )

    @property
    def when(self) -> When | None:
        """When it is saved by itself; None: only when the program says so."""
        return self._pace.when

    def _remember(self, pending: Pending) -> Checkpoint:
        """A checkpoint that was just made, as user code sees it."""
        made = self._made = Checkpoint(self._store, self._row, pending.raw, pending.manifest, id=pending.id)
        self._pace.saved(pending.stall_us / 1e6)
        return made

    # -- reading history --------------------------------------------------------------------------------

    def at(self, revision: str | Checkpoint | None = None) -> Checkpoint:
        """A checkpoint by name: branch, tag, label, ``~2``, ``#17``, ``id:...``. Its ``.state`` reads the past."""
        self._check_open()
        return self._seen(self._find(revision))

    def log(
        self, limit: int | None = None, *, at: str | Checkpoint | None = None, all: bool = False
    ) -> list[Checkpoint]:
        """Checkpoints, newest first: of this branch, or from ``at`` on; with ``all`` everything that was ever made."""
        self._check_open()
        if limit is not None and limit < 1:
            return []
        self._store.flush()
        with self._db.moment() as (view, _):  # what is forgotten meanwhile would leave a gap
            graph = Graph(view, self._row)
            if all:
                found = graph.everything()
            else:
                found = graph.line(view.branch_at(self._branch.b).head if at is None else self._find(at).n)
            return [self._seen(point) for point in islice(found, limit)]

    def abandoned(self) -> list[Checkpoint]:
        """The ends of lines that no branch reaches any more: what rollbacks left behind."""
        self._check_open()
        self._store.flush()
        return [self._seen(point) for point in self._graph().tips()]

    def diff(self, old: str | Checkpoint | None = None, new: str | Checkpoint | None = None) -> Diff:
        """What changed from ``old`` (default: the head) to ``new`` (default: the live state)."""
        self._check_open()
        before = self.at(old) if old is not None else self.head
        old_state = before.state if before is not None else self._store._empty()
        old_name = _describe(before) if before is not None else "(empty)"
        if new is None:
            with self._document.lock:
                self._document.digests()
                found = diff(old_state, self._document, old_name, "(live)")
        else:
            after = self.at(new)
            found = diff(old_state, after.state, old_name, _describe(after))
        found.files = self._files_between(before, after if new is not None else None)
        return found

    def _files_between(self, old: Checkpoint | None, new: Checkpoint | None) -> Sequence[Any]:  # noqa: ARG002 - above
        """The files that differ between two checkpoints; None: those that are there now. The rooms above know."""
        return ()

    def changes(self, since: str | Checkpoint | None = None) -> Iterator[Change]:
        """The mutation log: every change after ``since`` (default: from the beginning), oldest first.

        Where the beginning was forgotten, the oldest checkpoint that is left counts as one: with all that it holds.
        """
        self._check_open()
        self._store.flush()
        now = self._db.now
        start = self._find(since) if since is not None else None
        points: list[Point] = []
        for point in now.view.walk(self._fresh_branch().head):
            if start is not None and point.n == start.n:
                break
            points.append(point)
        if start is None and points and points[-1].cut:
            start = points.pop()
            yield from self._seen(start).changes()
        state = history.state_of(now, start)
        reader = self._store._reader(state)
        for point in reversed(points):
            with history.unless_forgotten(now.view, point):
                operations = history.operations_of(now.view, point)
                yield from mutations(state, reader, operations, point.manifest.label, point.id.hex())

    def events(self, limit: int | None = None) -> list[dict[str, Any]]:
        """What happened besides checkpoints, newest first, and by whom: branches, tags, rollbacks, validity."""
        self._check_open()
        found = []
        for entry in islice(reversed(self._db.view.log(self._row.a, kept=False)), limit):
            named = {key: _hex(value) for key, value in entry.body.items()}
            found.append({"when": datetime.fromtimestamp(entry.at / 1e6, UTC), **named})
        return found

    def crashes(self) -> list[dict[str, Any]]:
        """Crashes of programs that had this agent, and branches that go on from them, newest first."""
        self._check_open()
        return crashes.told(self._store, self._row)

    def info(self) -> AgentInfo:
        """What ``store.agents()`` says of it."""
        return info_of(self._store, self._row, self._db.view.shallow())

    def refresh(self) -> None:
        """Move a read-only handle to the newest head."""
        if self._lease is not None:
            raise ReadOnly("only read-only handles are refreshed; this one writes the newest state itself")
        self._check_open()
        self._branch = self._db.view.branch_at(self._branch.b)
        self._load_head()

    # -- moving through history -------------------------------------------------------------------------

    def _leaving(self, revision: str | Checkpoint) -> Rollback:
        """What a rollback would do to the state, without doing it."""
        target = self.at(required(revision))
        ahead = []
        for point in self._graph().line(self._fresh_branch().head):
            if point.id == target._id:
                break
            ahead.append(self._seen(point))
        else:
            ahead = ahead[:1]
        with self._document.lock:
            self._document.digests()
            found = diff(self._document, target.state, "(live)", _describe(target))
        found.files = self._files_between(None, target)
        return Rollback(target, ahead, found)

    def rollback(self, revision: str | Checkpoint) -> Checkpoint:
        """Go back to a checkpoint. What came after it stays in the history, and unsaved changes are saved first."""
        return self._go_back(self._find(required(revision)))

    def _go_back(self, target: Point, make: Callable[[int], Sequence[NewRecord]] = lambda _: ()) -> Checkpoint:
        """Make the live state and the head those of a checkpoint. Records go to disk in the same transaction.

        ``make`` makes them when the number of the record before them is known.
        """
        return self._apart(lambda: self._move_back(target, make))

    def _move_back(self, target: Point, make: Callable[[int], Sequence[NewRecord]], tries: int = RETURNS) -> Checkpoint:
        writer = self._check_writer()
        with self._still():
            known = writer.failed > 0  # before what is saved here says so
            self._secure(f"before rollback to {_describe(self._seen(target))}")
            wanted, source = self._read(target)
            firm = writer.settle()
            records = make(firm.records)
            going = self._going(wanted, target.id)

            def move(change: StoreChange) -> Branch:
                for one in going:
                    one.intend(change, target.id, firm.id)
                return change.move_to(firm, history.current(change, target), records)

            self._branch = self._db.change(move, firm.b)
            self._document.become(wanted, record=False)
            self._pace.went_back(known=known)
            head = self._made = self._seen(target)
            writer.start_from(target, source.since_base(), moved=self._branch, records=records)
            changed = [one.go() for one in going]
            if any(changed) and tries:  # what somebody changed at that moment is saved first
                return self._move_back(target, lambda _: (), tries - 1)
            return head

    def _going(self, wanted: State, id: bytes) -> list[Going]:
        """What becomes of the layers beside the state when that goes to another checkpoint's."""
        writer = self._check_writer()
        return [going for layer in writer.layers if (going := layer.going(wanted, id)) is not None]

    def _secure(self, label: str) -> None:
        """Save what has changed since the last checkpoint, if anything."""
        writer = self._check_writer()
        with writer.quiet(), self._still():
            looked = writer.look()
            if looked or self._document.changed:
                self._make(label, looked=looked, trigger=RESCUE)
                writer.settle()

    def undo(self) -> Checkpoint:
        """Append a checkpoint that reverses the last one not yet undone."""
        return self._apart(self._undo)

    def _undo(self) -> Checkpoint:
        with self._still():
            self._secure("unsaved changes")
            point = self._to_undo()
            if point.cut:
                raise NothingToUndo("the checkpoint before the last one was forgotten, so there is no way back to it")
            parent = self._db.view.point(point.row.parent) if point.row.parent else None
            return self._become(parent, f"undo {_describe(self._seen(point))}", "undo", point)

    def redo(self) -> Checkpoint:
        """Append a checkpoint that does again what the last undo reversed."""
        return self._apart(self._redo)

    def _redo(self) -> Checkpoint:
        with self._still():
            if self.dirty:
                raise NothingToUndo("something has changed since the undo, so there is nothing to do again")
            point = self._to_redo()
            return self._become(point, f"redo {_describe(self._seen(point))}", "redo", point)

    def _become(self, point: Point | None, label: str, kind: str, about: Point) -> Checkpoint:
        """Let the live state be that of a checkpoint: a change like any other, with a checkpoint of its own."""
        try:
            wanted = history.state_of(self._db.now, point, self._newest)
            wanted.stand_beside(self._document.told)
            going = self._going(wanted, b"")
            self._document.become(wanted, record=True)
        except Damaged:
            if point is not None:
                history.current(self._db.view, point)  # says so if it was forgotten meanwhile
            raise

        at = self._check_writer().firm.id

        def intend(change: StoreChange, to: bytes) -> None:
            for one in going:
                one.intend(change, to, at)

        try:
            made = self._make(label, kind, about.id, looked=(), also=intend if going else None, trigger=kind)
            self._settle()
        except BaseException:
            self._stay(at)
            raise
        for one in going:
            one.go()
        return made

    def _stay(self, at: bytes) -> None:
        """What the live state was to become was not written: it is that of the head again, as it was."""
        with suppress(HoldfastError):  # the first failure is the one to tell
            firm = self._check_writer().settle()
            if firm.id == at:
                head = self._db.view.point(firm.head) if firm.head else None
                self._document.become(history.state_of(self._db.now, head, self._newest), record=True)

    def _apart(self, work: Callable[[], T]) -> T:
        """Move through history where no signal handler can raise half-way between two states.

        It is quiet before anything moves: who cannot have that finds everything as it was.
        """
        writer = self._check_writer()
        with writer.quiet():
            for lock in (writer.lock, self._document.lock):
                if lock._is_owned():  # type: ignore[attr-defined]
                    return work()  # in another thread it would wait for this one
            return apart(work)

    def _to_undo(self) -> Point:
        settled: dict[bytes, str] = {}
        for point in self._walk():
            manifest = point.manifest
            if manifest.kind in {"undo", "redo"}:
                settled.setdefault(manifest.target, manifest.kind)
            elif settled.get(point.id) != "undo":
                return point
        if self.head is None:
            raise NothingToUndo("this agent has no checkpoint yet")
        raise NothingToUndo("every checkpoint of this branch is undone already")

    def _to_redo(self) -> Point:
        again: set[bytes] = set()
        for point in self._walk():
            manifest = point.manifest
            if manifest.kind == "redo":
                again.add(manifest.target)
            elif manifest.kind != "undo":
                break
            elif manifest.target not in again:
                for other in self._walk():
                    if other.id == manifest.target:
                        return other
        raise NothingToUndo("there is no undo to do again")

    def _walk(self) -> Iterator[Point]:
        """The branch's history, newest first, a few at a time."""
        self._settle()  # not the store: whoever else writes there may wait for what is locked here
        return self._db.view.walk(self._fresh_branch().head)

    def _read(self, point: Point) -> tuple[State, history.Stored]:
        """The state of a checkpoint. What differs from the live one is read, so that damage shows before it is used."""
        source = history.Stored(self._db.now, point, self._newest)
        wanted = State(source)
        self._document.digests()
        wanted.stand_beside(self._document.told)
        self._document.told.differences(wanted)
        return wanted, source

    def branch(self, name: str, at: str | Checkpoint | None = None) -> Agent:
        """Begin a branch at a checkpoint (default: here, saving unsaved changes first) and return a handle on it."""
        self._check_writer()
        check_new(name, "a branch")
        if at is None and self.dirty:
            self.checkpoint(f"before branch {name}")
        self._store.flush()
        self._store._add_branch(self._row, name, self._find(at))
        return self._store.agent(self.name, branch=name, when=self.when)

    def branches(self) -> list[str]:
        """The names of the agent's branches."""
        self._check_open()
        return [branch.name for branch in self._db.view.branches(self._row.a)]

    def tag(self, name: str, at: str | Checkpoint | None = None) -> None:
        """Give a checkpoint (default: the newest) a name; a tag that exists moves."""
        self._check_writer()
        self._store.flush()
        self._store._set_tag(self._row, name, self._find(at))

    def untag(self, name: str) -> None:
        """Remove a tag. The checkpoint stays."""
        self._check_writer()
        self._store.untag(self.name, name)

    def tags(self) -> dict[str, Checkpoint]:
        """The agent's tags, with what they name."""
        self._check_open()
        view = self._db.view
        return {tag.name: self._seen(view.point(tag.n)) for tag in view.tags(self._row.a)}

    def mark(
        self, revision: str | Checkpoint, validity: Literal["good", "suspect", "corrupt"], reason: str = ""
    ) -> None:
        """Say whether a checkpoint can be trusted; recovery passes over those that cannot."""
        self._check_writer()
        self._store._set_validity(self._row, self._find(revision), validity, reason)

    # -- the handle -------------------------------------------------------------------------------------

    def _find(self, revision: str | Checkpoint | None) -> Point:
        self._store.flush()
        return self._store._find(self._fresh_branch(), revision)

    def _graph(self) -> Graph:
        return Graph(self._db.view, self._row)

    def _seen(self, point: Point) -> Checkpoint:
        return Checkpoint.of(self._store, self._row, point)

    def _fresh_branch(self) -> Branch:
        if self._lease is None:
            return self._branch
        return self._db.view.branch_at(self._branch.b)

    def _settle(self) -> None:
        """Bring everything that was made to disk."""
        if self._writer is not None and not self._closed:
            self._writer.settle()

    def flush(self) -> None:
        """Return when every checkpoint so far is durable."""
        self._check_open()
        self._store.flush()

    @property
    def closed(self) -> bool:
        """Whether it has let go of the branch."""
        return self._closed or self._store.closed

    def _check_idle(self) -> None:
        """Raise where something is going on that the agent cannot be taken away from. The room above knows."""

    def _check_quiet(self) -> None:
        """Raise ``AgentBusy`` where something is going on outside that no image may cut in two. As above."""

    def _still(self) -> AbstractContextManager[object]:
        """Inside, nothing is on its way, and no other thread changes, captures or records anything. As above."""
        return self._check_writer().still(self._document)

    def _unused(self) -> AbstractContextManager[object]:
        """Inside, no other thread finds out what is known of a call. ``AgentBusy`` where one is at it. As above."""
        return nullcontext()

    def close(self) -> None:
        """Let go of the branch. Changes since the last checkpoint are lost, and ``UnsavedChanges`` warns of them."""
        unsaved.let_go([self], "the agent was closed", self._shut)

    def _is_left(self) -> bool:
        """Whether what is not saved is what work has left behind, or makes just now, that begins anew. As above."""
        return False

    def _shut(self) -> None:
        """Let go of the branch, whatever is not saved."""
        if not self._closed:
            self._closed = True
            for watcher in WATCHERS:
                watcher(self, False)
        writer = self._writer
        if self._lease is not None and self._lease.held:
            locks: tuple[Any, ...] = (writer.lock, self._document.lock) if writer is not None else ()
            if any(lock._is_owned() for lock in locks):
                # By a signal handler, in the middle of a change, or of one on its way: that one is not waited for, or
                # it would never end, but what was accepted before is.
                self._let_go(self._lease, self._db.flush)
            else:
                apart(lambda: self._let_go(self._lease, writer.settle if writer is not None else bool))

    def _let_go(self, lease: Lease | None, settle: Callable[[], object]) -> None:
        try:
            if not self._store.closed:
                settle()
        finally:
            if self._store._handles.get(self._branch.b) is self:
                del self._store._handles[self._branch.b]
            if lease is not None:
                lease.release()

    def _take_again(self) -> None:
        """The store was opened anew in a process that goes on for another one, which has let go of the branch.

        If somebody else has had it since, whatever is written here is refused.
        """
        lease, view = self._lease, self._db.view
        if lease is not None and not self._closed:
            self._lease = self._db.leases.again(lease, lambda: view.branch_at(lease.b).generation) or lease

    def _retake(self, *, thawed: bool) -> None:  # noqa: ARG002 - of it the room above has to know
        """After the store was let go for a while, with this handle still: become the writer again, of a new generation.

        The branch has to stand where it stood, or at a checkpoint after it with the same state.
        """
        writer = self._check_writer()
        before = writer.firm
        now = self._db.view.branch_at(before.b)
        point = self._db.view.point(now.head) if now.head else None
        if now.id != before.id:
            old = self._db.view.find(before.id) if before.id else None
            same = old is not None and point is not None and point.manifest.parent == old.id
            if old is None or point is None or not same or _kept(point) != _kept(old):
                self._shut()
                raise Fenced(
                    f"somebody else has gone on with {self.name!r} while this process stood still",
                    hint="Open the agent again to go on from there.",
                )
        self._lease = self._store._lease(self.name, now, wait_s=RETAKE_WAIT_S)
        self._branch = self._db.view.branch_at(before.b)._replace(generation=self._lease.generation)
        source = history.source_of(self._db.now, point, self._newest)
        writer.start_from(point, source.since_base() if isinstance(source, history.Stored) else [], moved=self._branch)
        self._made = self._seen(point) if point is not None else None

    def _plan_thaw(
        self, revision: str, accept: Collection[str]
    ) -> tuple[Collection[str], Collection[str], Callable[[], object] | None]:
        """How to go back to where a saved process left this agent; None: it is there. Raises if it cannot.

        And before that, what of ``accept`` names nothing here, and which tools' effects are undone on the way: only the
        room above knows of effects.
        """
        there = self.head is not None and self.head.id == self.at(revision).id
        return accept, (), None if there else lambda: self.rollback(revision)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"the handle on agent {self.name!r} was closed", hint="Get a new one: store.agent(...).")
        self._db.check_usable()

    def _check_writer(self) -> BranchWriter:
        self._check_open()
        if self._writer is not None:
            return self._writer
        raise ReadOnly(f"this handle on {self.name!r} is read-only", hint="Open it without readonly=True to change it.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise BadOption(
            f"a handle on an agent cannot be copied or sent to another process: {self.name!r} has one writer",
            hint="Hand over the name, and open it there: holdfast.open(...).agent(name).",
        )

    def __repr__(self) -> str:
        if self.closed:
            return f"<Agent {self.name!r} (closed)>"
        head = self.head
        at = f" at {_describe(head)} #{head.depth}" if head is not None else ", no checkpoint yet"
        return f"<Agent {self.name!r} on {self.branch_name}{at}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<b>{escape(self.name)}</b> on {escape(self.branch_name)}" + checkpoints_html(self.log(limit=10))


def _hex(value: Any) -> Any:
    """Events name things by ids; people read them as hexadecimal."""
    if isinstance(value, list):
        return [_hex(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def required(revision: str | Checkpoint) -> str | Checkpoint:
    """Going back must not happen by a forgotten argument."""
    if not revision:
        raise UnknownRevision("a rollback needs the checkpoint to go back to", hint="Name one: see agent.log().")
    return revision


def _describe(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "(empty)"
    return checkpoint.label or checkpoint.short_id


def _kept(point: Point) -> list[tuple[str, bytes]]:
    """What a checkpoint has of the state and of the layers that go on with it."""
    return [one for one in point.manifest.sections if not one[0].startswith(MOMENTARY)]
