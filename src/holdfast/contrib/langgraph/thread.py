"""One LangGraph thread as this process writes it: its lease, its namespaces, and the writes that wait for a flush.

Owns the order of everything that goes to disk for a thread. A namespace is a branch of the agent, a LangGraph
checkpoint is one checkpoint of it, and a task's writes are entries of the log under its key, so that they may come
before, while or after it is saved. Whoever is at work on the thread here, a run or a single call, shares one lease,
and the last one who leaves gives it back. Must not know how checkpoints are read back. What always holds: the
checkpoints of a branch form the tree that LangGraph's parent ids describe; what ``save`` and ``wait`` returned for is
on disk; nothing is written unless this process holds the lease, which is held while somebody is at work and let go at
once when nobody is and everything is on disk; nothing here waits for another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from langgraph.checkpoint.serde.types import _DeltaSnapshot

from holdfast.agent import history
from holdfast.agent.branch import BranchWriter
from holdfast.agent.graph import Graph
from holdfast.agent.names import LABEL_MAX_CHARACTERS, check_name
from holdfast.codec.assigned import Assigned, Known, Still
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import AgentBusy, BadName, Fenced, HoldfastError, StillArriving
from holdfast.store.changes import Change, Said
from holdfast.store.cipher import digest
from holdfast.store.engine import Lease
from holdfast.store.manifest import Manifest
from holdfast.store.rows import Agent, Branch, Point

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# The section that holds what LangGraph says about a checkpoint besides its channels, as one value: (record,).
ABOUT = "__langgraph__"
# Channels that only start a node. They hold None, and are names in the record instead of sections.
_TRIGGER = "branch:to:"
ROOT = "main"
KEY_BYTES = 16
_HASHED = "ns-"
# How a thread arrives that an import is bringing over.
BROUGHT = "import"
# How long a task's writes wait for a checkpoint of the same thread that takes them to disk with its own flush.
# LangGraph saves the checkpoint right after the last task's writes: the reducers run in between, which takes them
# milliseconds in a long thread, and more where others want the processor, too. Nobody waits for these writes.
SHARE_S = 0.02
# Of many tasks beside each other, only the last one's are followed by a checkpoint: after so many that waited in vain,
# so many do not wait.
_IN_VAIN, _AT_ONCE = 2, 256
_KEYS_KEPT = 256


@lru_cache(_KEYS_KEPT)  # tasks write under the checkpoint that was saved before
def key_of(ns: str, checkpoint_id: str) -> bytes:
    """What the catalog finds a LangGraph checkpoint, and the writes that belong to it, by."""
    return digest(b"langgraph", encode([ns, checkpoint_id]))[:KEY_BYTES]


def branch_name(ns: str) -> str:
    """The branch of a namespace: named as it is where a branch can be, otherwise by its hash."""
    if not ns:
        return ROOT
    if ns != ROOT and not ns.startswith(_HASHED):
        try:
            return check_name(ns, "a branch", but="@")
        except BadName:
            pass
    return _HASHED + digest(b"name", ns.encode("utf-8", "surrogatepass")).hex()[:32]


def check_whole(thread: str, branch: Branch, *, but: str | None = None) -> None:
    """Raise while not all of a thread has come, so that nobody goes on from an old state. ``but``: not that way."""
    arriving = branch.body.get("arriving", False)
    if arriving and arriving != but:
        raise StillArriving(
            f"thread {thread!r} is still arriving from elsewhere: not all of it has come",
            hint="Run the import, push or pull again: it resumes where it stopped. Or delete the thread.",
        )


def has_thread(manifest: Manifest) -> bool:
    """Whether a checkpoint is one of LangGraph's."""
    return any(name == ABOUT for name, _ in manifest.sections)


def about_of(state: Assigned | Still) -> dict[str, Any]:
    """LangGraph's record of a checkpoint, with what the saver adds to it."""
    (about,) = state.value(ABOUT)
    return about  # type: ignore[no-any-return]


class Namespace:
    """One checkpoint namespace: the branch, and its newest state as encodings."""

    def __init__(self, thread: Thread, ns: str, branch: Branch, writer: BranchWriter) -> None:
        self.ns = ns
        self.branch = branch
        self.writer = writer
        self.turn = 0  # when it was last known to stand where the disk does
        self._thread = thread
        self.load(branch.head)

    def load(self, n: int) -> None:
        """Let the next checkpoint be a child of ``n``; 0: a root."""
        store, registry = self._thread.store, self._thread.registry
        self.stands_at({"id": ""})
        self.deltas: set[str] = set()  # channels that are stored whole now and then, and otherwise not at all
        if not n:
            self.document = Assigned(registry, history.Blank(store._db.now), self._thread.known)
            self.writer.start_from(None, [])
            return
        point = store._db.view.point(n)
        source = history.Stored(store._db.now, point)
        self.document = Assigned(registry, source, self._thread.known)
        if ABOUT not in self.document:
            raise BadName(
                f"agent {self._thread.name!r} is not a LangGraph thread, so it cannot become one",
                hint="Use another thread_id, or another store.",
            )
        self.stands_at(about_of(self.document))
        self.writer.start_from(point, source.since_base())

    @property
    def is_at_rest(self) -> bool:
        """Whether the document is what the branch's head has: an interrupt may leave something that was not saved."""
        return self.writer.firm is self.writer.branch and not self.document.told.unacknowledged

    def stands_at(self, checkpoint: Mapping[str, Any]) -> None:
        """What is known of the checkpoint that the document holds."""
        self.id: str = checkpoint["id"]
        self.seen: Mapping[str, Any] = checkpoint.get("versions_seen") or {}
        self.versions: Mapping[str, Any] = checkpoint.get("channel_versions") or {}

    def has(self, channel: str, version: Any) -> bool:
        """Whether the document holds this version of a channel."""
        held = self.versions.get(channel)
        return held is not None and type(held) is type(version) and held == version and channel in self.document


class Writes:
    """Entries of the log on their way, and the answer that those who wait for them get."""

    # No ``Future``: two are made in each step, and its condition with a lock for each waiter is half of the work then.
    __slots__ = ("_bell", "_error", "_over", "said")

    def __init__(self) -> None:
        self.said: list[Said] = []
        self._over = False
        self._error: BaseException | None = None
        self._bell = threading.Lock()  # free when it is over
        self._bell.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """They are on disk, or what kept them from it is told to whoever asks. Only the first answer counts."""
        if not self._over:
            self._error, self._over = error, True
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def ended(self, wait_s: float) -> bool:
        """Wait for that; False when it takes longer."""
        if not self._over and self._bell.acquire(timeout=wait_s):
            self.end()  # for the next one who waits
        return self._over

    def result(self) -> None:
        """Wait for that. Raises what kept them from being written."""
        while not self.ended(1.0):  # again and again: one who was woken may be cut short before he wakes the next
            pass
        if self._error is not None:
            raise self._error


_NONE = Writes()
"""What a checkpoint takes along when nobody waits."""
_NONE.end()


class Working:
    """Somebody at work on a thread, until the end."""

    __slots__ = ("_thread", "_user")

    def __init__(self, thread: Thread, user: object) -> None:
        self._thread, self._user = thread, user

    def __enter__(self) -> Thread:
        return self._thread

    def __exit__(self, *_error: object) -> None:
        self._thread.leave(self._user)


class Thread:
    """A thread that this process writes, or has written."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        name: str,
        *,
        arriving: bool = False,
        aside: Callable[[Callable[[], None]], object] = lambda work: work(),
        known: Known | None = None,
    ) -> None:
        """``arriving``: whoever writes it brings it over from elsewhere. ``aside`` does what waits for the disk."""
        self.store = store
        self.registry = registry
        self.name = name
        self.lock = threading.RLock()
        self.known = known if known is not None else Known()
        self._arriving = arriving
        self._aside = aside
        self._batched = store._durability == "batched"
        self._users: set[object] = set()  # who is at work; only ever changed by steps that cannot be cut
        self._lease: Lease | None = None  # also one that rests, or is released: nobody may have had it since
        self._turn = 0  # how often it was taken
        self._row: Agent | None = None
        self._spaces: dict[str, Namespace] = {}
        self._heads: dict[str, int] = {}  # where this process last saw each namespace's branch stand
        self._before: dict[str, int] = {}  # the same, when another process had gone on from there
        self._writes = Writes()
        self._collecting = threading.Lock()
        self.tools: Any = None  # what its nodes do outside, once somebody needs to know (``tools.ThreadLoop``)
        self.turns = threading.Condition()  # whose turn it is: held for moments, and nothing is asked for inside
        self.holder: Any = None  # the run that may act outside (``tools.Run``)
        self.storing: list[Any] = []  # the runs for which something is being stored, once for each thing
        self._in_vain = 0  # writes in a row that no checkpoint took along; negative: how many more need not wait

    # -- the lease ------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether this process is the writer."""
        return self._lease is not None and self._lease.held

    @property
    def idle(self) -> bool:
        return not self._users and not self.held

    def enter(self) -> object:
        """Somebody is at work on the thread, until ``leave`` is called with what this gives: a run, or a call."""
        user = object()
        self._users.add(user)
        return user

    def leave(self, user: object, *, lost: bool = False) -> None:
        """The last one who leaves lets other processes write the thread, at once. ``lost``: from a destructor."""
        self._users.discard(user)
        if self._users or not self.held:
            return
        if not self._batched:
            self._rest()
        elif not lost:  # which may come at any moment, in any thread: the next one who leaves does it
            with suppress(RuntimeError):  # it is being closed, which releases it
                self._aside(self._rest)

    def working(self) -> Working:
        """Somebody is at work from now on, until the end."""
        return Working(self, self.enter())

    def _rest(self) -> None:
        """Release the lease unless somebody is at work. Whoever has the lock is, and comes here when leaving."""
        with self.lock:
            if self._users or not self.held:
                return
            if self._batched:
                try:
                    self.store.flush()
                except HoldfastError:
                    return  # whoever uses the store next is told; what is not on disk must not meet another writer
            if self._lease is not None:
                self._lease.rest()

    def become_writer(self) -> None:
        """Become the thread's writer, and stay it while somebody is at work. Raises ``AgentBusy`` if another is."""
        with self.lock:
            if self.held:
                return
            self.store._db.check_usable()
            try:
                self._lease = self._again() or self._take()
            except AgentBusy as error:
                waits = "HoldfastSaver(..., wait_s=30) waits until its run has ended. Reading it waits for nobody."
                busy = error.message.replace("the branch", f"thread {self.name!r}")
                raise AgentBusy(busy, holder=error.holder, hint=waits) from None
            self._turn += 1

    def _again(self) -> Lease | None:
        """The lease that was let go, unless somebody else has had the thread since."""
        lease, view = self._lease, self.store._db.view
        if lease is None:
            return None
        return self.store._db.leases.again(lease, lambda: view.branch_at(lease.b).generation)

    def _take(self) -> Lease:
        """A new lease. Others may have written meanwhile, while one that is taken up again means that nobody has."""
        store, view = self.store, self.store._db.view
        check_name(self.name, "an agent")
        row = view.agent(self.name)
        begun = store._begin_agent(self.name) if row is None else None
        if begun is not None:
            row, lease = begun
        else:
            if row is None:
                row = store._add_agent(self.name)
            branch = view.branch(row.a, ROOT)
            if branch is None:
                raise BadName(f"agent {self.name!r} has no branch {ROOT!r}, so it is not a LangGraph thread")
            lease = store._lease(self.name, branch, wait_s=0.0)
            try:
                check_whole(self.name, view.branch_at(branch.b), but=BROUGHT if self._arriving else None)
            except BaseException:
                lease.release()
                raise
        self._row = row
        self._spaces.clear()
        self._before.update(self._heads)
        self._heads.clear()
        return lease

    def release(self) -> None:
        """Let others write the thread, whoever is at work on it here."""
        with self.lock:
            if self._lease is not None:
                self._lease.release()  # and kept: it may be taken up again

    @property
    def guard(self) -> tuple[int, int]:
        lease = self._held_lease()
        return lease.b, lease.generation

    def _held_lease(self) -> Lease:
        if self._lease is None or not self._lease.held:
            raise Fenced(f"the lease of thread {self.name!r} is not held; nothing was written")
        return self._lease

    def _give_up(self, error: BaseException) -> None:
        """If somebody took the thread over, it is not ours any more, and has to be asked for again."""
        with self.lock, suppress(HoldfastError):
            lease = self._lease if isinstance(error, Fenced) else None
            if lease is not None and self.store._db.view.branch_at(lease.b).generation != lease.generation:
                lease.release()

    def set_arriving(self, *, arriving: bool) -> None:
        """Nobody may open the thread before all of it has come, or it has."""

        def mark(change: Change) -> None:
            change.guard(*self.guard)
            for branch in change.branches(self.row.a):
                body = {name: value for name, value in branch.body.items() if name != "arriving"}
                change.move(branch, branch._replace(body={**body, "arriving": BROUGHT} if arriving else body))

        self.store._db.change(mark, self.guard[0])

    @property
    def row(self) -> Agent:
        if self._row is None:
            raise Fenced(f"thread {self.name!r} is not open for writing")
        return self._row

    def looked(self, ns: str, n: int) -> None:
        """This process has seen a namespace's branch stand at ``n``."""
        # Whoever tells it while the thread is written here may be late.
        self._heads[ns] = max(n, self._heads.get(ns, 0)) if self.held else n

    def chosen(self, ns: str, n: int) -> None:
        """Somebody asked for this very checkpoint: who goes on from it knows that it may be an old one."""
        if self._before.get(ns) == n:
            self._before.pop(ns, None)

    def forget(self) -> None:
        """What is remembered of the thread's states is not true any more."""
        with self.lock:
            self._spaces.clear()
            self._heads.clear()
            self._before.clear()

    def space(self, ns: str) -> Namespace:
        """A namespace, made when it is new."""
        found = self._spaces.get(ns)
        if found is not None and (found.turn == self._turn or self._unchanged(found)):
            found.turn = self._turn
            return found
        lease = self._held_lease()
        store, row = self.store, self.row
        name = branch_name(ns)
        branch = store._db.view.branch(row.a, name)
        if branch is None:
            more = {"arriving": BROUGHT} if self._arriving else {}
            branch = store._add_branch(row, name, None, {"ns": ns, **more})
        self.chosen(ns, branch.head)  # nobody has gone on with it if it was there
        if not ns:  # somebody may have taken it over since: what we write must be refused then
            branch = branch._replace(generation=lease.generation)
        writer = BranchWriter(store, branch, guard=(lambda: self.guard) if ns else None)
        found = self._spaces[ns] = Namespace(self, ns, branch, writer)
        found.turn = self._turn
        return found

    def _unchanged(self, space: Namespace) -> bool:
        """Whether a namespace stands where it stood when the lease was let go.

        Nobody wrote the thread since. But a subgraph's branch is one that a person can open and move.
        """
        if not space.ns:
            return True
        row, stands = self.store._db.view.branch(self.row.a, space.branch.name), space.writer.branch
        return row is not None and (row.id, row.generation) == (stands.id, stands.generation)

    # -- checkpoints ----------------------------------------------------------------------------------

    def state_of(self, ns: str, point: Point) -> Still | None:
        """The state of a checkpoint, if this process has it at hand. Waits for nobody."""
        space = self._spaces.get(ns)
        if space is None or not self.lock.acquire(blocking=False):
            return None
        try:
            # A checkpoint's id names its content, whoever has written since.
            return space.document.still() if space.is_at_rest and space.writer.head_id == point.id else None
        finally:
            self.lock.release()

    def at_hand(self) -> tuple[Agent, Branch, Still] | None:
        """The agent, where its outermost graph stands, and the state there: of a writer that has nothing under way."""
        space = self._spaces.get("")
        if space is None or not self.lock.acquire(blocking=False):
            return None
        try:
            stands = space.writer.firm
            at_rest = space.is_at_rest and stands.head and space.writer.head_id == stands.id
            if not self.held or space.turn != self._turn or not at_rest or self._row is None:
                return None
            return self._row, stands, space.document.still()
        finally:
            self.lock.release()

    def begin(self, ns: str) -> Namespace:
        """Become the writer if need be, and have the newest state at hand."""
        with self.lock:
            self.become_writer()
            return self.space(ns)

    def check_at(self, ns: str, parent: str | None) -> None:
        """Raise unless a namespace stands at this checkpoint: what was read there is not the newest any more."""
        with self.lock:
            if self.begin(ns).id != (parent or ""):
                raise Fenced(
                    f"thread {self.name!r} has gone on since its state was read; it was not updated",
                    hint="Look at its state again (graph.get_state), then update that.",
                )

    def save(
        self,
        ns: str,
        parent: str | None,
        checkpoint: Mapping[str, Any],
        metadata: Mapping[str, Any],
        new_versions: Collection[str] | None = None,
        *,
        running: bool = False,
        around: Callable[[Namespace], AbstractContextManager[None]] = lambda _space: nullcontext(),
    ) -> None:
        """Write a checkpoint, with the writes that wait. On disk when it returns, unless the store is batched.

        ``new_versions`` names the channels that LangGraph has changed. Another one is taken from the parent, unseen, if
        the parent has the version of it that the checkpoint says; None: all are looked at. ``running``: for a run,
        which has been the writer since it read the parent. ``around`` is what the capture is done in.
        """
        with self.lock:
            space = self.begin(ns)
            if space.id != (parent or ""):
                self._fork(space, parent, running=running)
            self._assign(space, parent, checkpoint, metadata, new_versions)
            writes = self._take_writes()
            try:
                with around(space):
                    pending = space.writer.capture(
                        space.document,
                        _label(metadata, checkpoint, space.seen),
                        key=key_of(ns, checkpoint["id"]),
                        said=writes.said,
                    )
            except BaseException as error:
                self._failed(space, writes, error)
                raise
            space.stands_at(checkpoint)
        try:
            space.writer.finish(pending)
        except BaseException as error:
            self._failed(space, writes, error)
            raise
        if pending.done is not None:  # otherwise it is batched
            self.looked(ns, pending.done.head)
        writes.end()

    def _assign(
        self,
        space: Namespace,
        parent: str | None,
        checkpoint: Mapping[str, Any],
        metadata: Mapping[str, Any],
        new_versions: Collection[str] | None,
    ) -> None:
        """Let the document of a namespace be that of a checkpoint: its channels, and all else as one value."""
        values: dict[str, Any] = {}
        wrapped: list[str] = []
        triggers: list[str] = []
        for name, value in checkpoint["channel_values"].items():
            if value is None and name.startswith(_TRIGGER):
                triggers.append(name)
            elif type(value) is _DeltaSnapshot:
                # What a delta channel stores now and then is a whole value in a wrapper. Without it, the value is cut
                # into blocks as any other, and has most of them in common with the time before.
                wrapped.append(name)
                values[name] = value.value
            else:
                values[name] = value
        if ABOUT in values:
            raise BadName(f"a channel is named {ABOUT!r}, which is where the saver keeps its own record")
        about = {**checkpoint, "checkpoint_ns": space.ns, "parent": parent, "metadata": dict(metadata)}
        del about["channel_values"]
        if wrapped:
            about["wrapped"] = wrapped
            space.deltas.update(wrapped)
        if triggers:
            about["triggers"] = triggers
        values[ABOUT] = (about,)
        gone = [name for name in space.document.names() if name not in values]
        if new_versions is not None:
            versions = checkpoint.get("channel_versions") or {}
            for name in [name for name in values if name not in new_versions and name not in wrapped]:
                if space.has(name, versions.get(name)):
                    del values[name]
        space.document.assign(values, gone, space.deltas)

    def _failed(self, space: Namespace, writes: Writes, error: BaseException) -> None:
        """A checkpoint is not on disk. Whoever waits for the writes that it took along is told."""
        with self.lock:
            self._spaces.pop(space.ns, None)  # its document has what no checkpoint has
        self._give_up(error)
        writes.end(error)

    def _fork(self, space: Namespace, parent: str | None, *, running: bool) -> None:
        """The parent is not where the branch stands: let the new checkpoint grow from the parent, or be a root."""
        target = named(Graph(self.store._db.view, self.row), key_of(space.ns, parent)) if parent else None
        n = target.n if target is not None else 0
        if not running and self._before.get(space.ns) == n:
            raise Fenced(
                f"another process has continued thread {self.name!r} since this one read it; nothing was written",
                hint="Read its state again (graph.get_state) and run from there, or give each run its own thread_id.",
            )
        space.writer.settle()
        space.load(n)
        space.id = parent or ""

    def _say(self, said: Sequence[Said]) -> None:
        a, (b, generation) = self.row.a, self.guard

        def say(change: Change) -> None:
            change.guard(b, generation)
            for one in said:
                change.say(a, one)

        if self.store._db.directly(say) is None:
            self.store._db.change(say, b)

    # -- writes -----------------------------------------------------------------------------------------

    def queue(self, said: Said) -> Writes:
        """Let an entry wait for the next flush of this thread."""
        with self._collecting:
            self._writes.said.append(said)
            return self._writes

    def _take_writes(self) -> Writes:
        with self._collecting:
            if not self._writes.said:
                return _NONE
            taken, self._writes = self._writes, Writes()
            self._in_vain = 0
            return taken

    def wait(self, writes: Writes, *, share: bool) -> None:
        """Return when a queued entry is on disk: taken along by a checkpoint, or written now.

        ``share``: nobody waits for it, and a checkpoint may be about to come.
        """
        if share and self._in_vain >= 0 and writes.ended(SHARE_S):
            writes.result()
            return
        mine = False
        try:
            self.become_writer()
            mine = self._is_left(writes)
            if mine:
                self._say(writes.said)
        except BaseException as error:
            if not mine and not self._is_left(writes):
                raise  # a checkpoint has taken them along
            self._give_up(error)
            writes.end(error)
        if mine and share:
            self._in_vain = self._in_vain + 1 if self._in_vain + 1 < _IN_VAIN else -_AT_ONCE
        if mine:
            writes.end()
        writes.result()

    def _is_left(self, writes: Writes) -> bool:
        """Whether nobody has taken them along yet: then it is for the caller to see to them."""
        with self._collecting:
            left = self._writes is writes
            if left:
                self._writes = Writes()
            return left


def named(graph: Graph, key: bytes) -> Point | None:
    """The checkpoint of an agent that has that key; the newest, where a graph has saved it again."""
    found = [point for point in graph.view.keyed(key) if graph.sees(point)]
    return max(found, key=lambda point: (point.manifest.time_us, point.manifest.depth), default=None)


def writes_said(
    ns: str,
    checkpoint_id: str,
    writes: Sequence[tuple[int, str, bytes]],
    task_id: str,
    task_path: str,
    *,
    replace: bool,
) -> Said:
    """A task's writes as an entry under their checkpoint's key. Values come encoded."""
    body = {
        "what": "writes",
        "task": task_id,
        "path": task_path,
        "replace": replace,
        "writes": [list(write) for write in writes],
    }
    return Said(body, key_of(ns, checkpoint_id))


def _label(metadata: Mapping[str, Any], checkpoint: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Step, and what happened in it: the nodes that ran, or where it came from."""
    source, step = metadata.get("source", ""), metadata.get("step", "")
    ran = [
        name
        for name, seen in (checkpoint.get("versions_seen") or {}).items()
        if not name.startswith("__") and before.get(name) != seen
    ]
    nodes = ", ".join(ran)
    # The first step of a run only hands the input on.
    what = nodes or "start" if source == "loop" else f"{source} ({nodes})" if nodes else source
    return f"step {step}: {what}"[:LABEL_MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
