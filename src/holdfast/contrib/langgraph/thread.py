"""One LangGraph thread as this process writes it: its lease, its namespaces, and the writes that wait for a flush.

Owns the order of everything that goes to disk for a thread. A namespace is a branch of the agent, a LangGraph
checkpoint is one checkpoint of it, and a task's writes are events under the checkpoint's key, so that they may come
before, while or after it is saved. Must not know how checkpoints are read back. What always holds: the checkpoints of
a branch form the tree that LangGraph's parent ids describe; what ``put`` and ``put_writes`` returned for is on disk;
nothing is written unless this process holds the thread's lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from langgraph.checkpoint.serde.types import _DeltaSnapshot

from holdfast.agent import history
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import LABEL_MAX_CHARACTERS, check_name, name_key
from holdfast.agent.writing import Pending, Writing
from holdfast.codec.assigned import Assigned
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import BadName, Fenced
from holdfast.store.catalog import AgentRow, BranchRow, Event, digest
from holdfast.store.locks import Lease
from holdfast.store.opening import now_us

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# The section that holds what LangGraph says about a checkpoint besides its channels.
ABOUT = "__langgraph__"
ROOT = "main"
KEY_BYTES = 16
_HASHED = "ns-"
# How long a task's writes wait for a checkpoint of the same thread that takes them to disk with its own flush.
# LangGraph saves the checkpoint right after the last task's writes: the reducers run in between, which takes them
# milliseconds in a long thread. It waits for neither before the next step.
SHARE_S = 0.005
# With delta channels it waits for the writes first: after so many that waited in vain some do not, more each time.
_IN_VAIN = 2
_AT_ONCE, _AT_ONCE_MAX = 32, 1024
_KEYS_KEPT = 256


@lru_cache(_KEYS_KEPT)  # tasks write under the checkpoint that was saved before
def key_of(ns: str, checkpoint_id: str) -> bytes:
    """What the catalog finds a LangGraph checkpoint, and the writes that belong to it, by."""
    return digest(b"holdfast.langgraph", encode([ns, checkpoint_id]))[:KEY_BYTES]


def branch_name(ns: str) -> str:
    """The branch of a namespace: named as it is where a branch can be, otherwise by its hash."""
    if not ns:
        return ROOT
    if ns != ROOT and not ns.startswith(_HASHED):
        try:
            return check_name(ns, "a branch", but="@")
        except BadName:
            pass
    return _HASHED + digest(b"holdfast.name", ns.encode("utf-8", "surrogatepass")).hex()[:32]


def has_thread(manifest: Manifest) -> bool:
    """Whether a checkpoint is one of LangGraph's."""
    return any(name == ABOUT for name, _ in manifest.sections)


class Namespace:
    """One checkpoint namespace: the branch, and its newest state as encodings."""

    def __init__(self, thread: Thread, ns: str, branch: BranchRow, writer: Writing) -> None:
        self.ns = ns
        self.branch = branch
        self.writer = writer
        self._thread = thread
        self._load(branch.head)

    def stand_at(self, n: int) -> None:
        """Let the next checkpoint be a child of ``n`` (0: a root), whatever the branch's head is."""
        head = self.writer.branch_head
        self._load(n)
        self.writer.branch_head = head

    def _load(self, n: int) -> None:
        store, registry = self._thread.store, self._thread.registry
        self.id = ""
        self.seen: dict[str, Any] = {}
        self.deltas: set[str] = set()  # channels that are stored whole now and then, and otherwise not at all
        if not n:
            self.document = Assigned(registry, history.Blank(store._catalog))
            self.writer.start_from(None, [])
            return
        row = store._catalog.checkpoint(n)
        source = history.Stored(store._catalog, row)
        self.document = Assigned(registry, source)
        if ABOUT not in self.document:
            raise BadName(
                f"agent {self._thread.name!r} is not a LangGraph thread, so it cannot become one",
                hint="Use another thread_id, or another store.",
            )
        about = self.document.value(ABOUT)
        self.id, self.seen = about["id"], about.get("versions_seen") or {}
        self.writer.start_from(Checkpoint.of(store, row), source.since_base())


class Writes:
    """Events on their way, and the answer that those who wait for them get."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.done: Future[None] = Future()

    def settle(self, error: BaseException | None = None) -> None:
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Thread:
    """A thread that this process writes, or has written."""

    def __init__(self, store: Store, registry: Registry, name: str, wait_s: float) -> None:
        self.store = store
        self.registry = registry
        self.name = name
        self.lock = threading.RLock()
        self.used = time.monotonic()
        self.runtime: Any = None  # LangGraph's object for the run that writes; as long as others hold it, it goes on
        self._wait_s = wait_s
        self._row: AgentRow | None = None
        self._lease: Lease | None = None
        self._spaces: dict[str, Namespace] = {}
        self._heads: dict[str, int] = {}  # where this process last saw each namespace's branch stand
        self._writes = Writes()
        self._collecting = threading.Lock()
        self._in_vain = 0  # writes in a row that no checkpoint took along; negative: how many more need not wait
        self._at_once = _AT_ONCE  # how many will not wait when this was in vain
        self.inflight = 0  # checkpoints on their way

    # -- the lease ------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        return self._lease is not None and self._lease.held

    def ready(self) -> None:
        """Become the thread's writer. May wait; raises ``AgentBusy`` while another process is."""
        with self.lock:
            if self.held:
                return
            store = self.store
            check_name(self.name, "an agent")
            row = store._catalog.agent(name_key(self.name))
            if row is None:
                row, _ = store._add_agent(self.name)
            self._row = row
            branch = store._catalog.branch(row.a, name_key(ROOT))
            if branch is None:
                raise BadName(f"agent {self.name!r} has no branch {ROOT!r}, so it is not a LangGraph thread")
            lease = store._lease(self.name, branch, wait_s=self._wait_s)
            # Others may have written meanwhile, and the generation is another one.
            self._spaces.clear()
            self._lease = lease

    def release(self) -> None:
        """Let others write the thread."""
        with self.lock:
            lease, self._lease = self._lease, None
            self.runtime = None
            if lease is not None:
                lease.release()

    @property
    def guard(self) -> tuple[int, int]:
        if self._lease is None:
            raise Fenced(f"the lease of thread {self.name!r} is not held; nothing was written")
        return self._lease.row.b, self._lease.generation

    @property
    def row(self) -> AgentRow:
        if self._row is None:
            raise Fenced(f"thread {self.name!r} is not open for writing")
        return self._row

    def looked(self, ns: str, n: int) -> None:
        """This process has seen a namespace's branch stand at ``n``."""
        self._heads[ns] = n

    def forget(self) -> None:
        """What is remembered of the thread's states is not true any more."""
        with self.lock:
            self._spaces.clear()
            self._heads.clear()

    def space(self, ns: str) -> Namespace:
        """A namespace, made when it is new."""
        found = self._spaces.get(ns)
        if found is not None:
            return found
        store, row = self.store, self.row
        name = branch_name(ns)
        branch = store._catalog.branch(row.a, name_key(name))
        if branch is None:
            branch = store._add_branch(row, name, None, {"ns": ns})
        lease = self._lease
        if lease is None:
            raise Fenced(f"the lease of thread {self.name!r} is not held; nothing was written")
        writer = Writing(store, row, lease, None, branch=branch if ns else None)
        found = self._spaces[ns] = Namespace(self, ns, branch, writer)
        return found

    # -- checkpoints ----------------------------------------------------------------------------------

    def standing(self, ns: str, parent: str | None) -> bool:
        """Whether a child of ``parent`` can be captured without reading or waiting."""
        return self.held and ns in self._spaces and self._spaces[ns].id == (parent or "")

    def begin(self, ns: str) -> Namespace:
        """Become the writer if need be, and have the newest state at hand."""
        with self.lock:
            self.ready()
            return self.space(ns)

    def prepare(self, ns: str, parent: str | None) -> Namespace:
        """As begin(), with the parent's state."""
        with self.lock:
            space = self.begin(ns)
            if space.id != (parent or ""):
                self._fork(space, parent)
            return space

    def capture(
        self, ns: str, parent: str | None, checkpoint: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> tuple[Namespace, Pending, Writes]:
        """Fix a checkpoint's content, with the writes that wait. ``finish`` takes it to disk."""
        with self.lock:
            space = self.prepare(ns, parent)
            values = dict(checkpoint["channel_values"])
            if ABOUT in values:
                raise BadName(f"a channel is named {ABOUT!r}, which is where the saver keeps its own record")
            label = _label(metadata, checkpoint, space.seen)
            # What a delta channel stores now and then is a whole value in a wrapper. Without it, the value is cut into
            # blocks as any other, and has most of them in common with the time before.
            wrapped = [name for name, value in values.items() if type(value) is _DeltaSnapshot]
            values.update((name, values[name].value) for name in wrapped)
            values[ABOUT] = {
                **{name: value for name, value in checkpoint.items() if name != "channel_values"},
                "checkpoint_ns": ns,
                "parent": parent,
                "metadata": dict(metadata),
                **({"wrapped": wrapped} if wrapped else {}),
            }
            space.deltas.update(wrapped)
            document = space.document
            document.assign(values, [name for name in document.names() if name not in values], space.deltas)
            # A commit to the lease's own branch compares the generation anyway.
            guard = self.guard if ns else None
            writes = self._take_writes()
            try:
                pending = space.writer.capture(
                    document, label, key=key_of(ns, checkpoint["id"]), events=writes.events, guard=guard
                )
            except BaseException as error:
                writes.settle(error)  # somebody waits for them
                raise
            space.id, space.seen = checkpoint["id"], checkpoint.get("versions_seen") or {}
            self.used = time.monotonic()
            self.inflight += 1
            return space, pending, writes

    def finish(self, space: Namespace, pending: Pending, writes: Writes) -> None:
        try:
            space.writer.finish(space.document, pending)
            if pending.n:
                self._heads[space.ns] = pending.n
            else:
                self._heads.pop(space.ns, None)  # batched: its number is not known yet
            writes.settle()
        except BaseException as error:
            writes.settle(error)
            with self.lock:
                self._spaces.pop(space.ns, None)  # it stands where the disk does not
            raise
        finally:
            with self.lock:
                self.inflight -= 1
                self.used = time.monotonic()

    def _check_unmoved(self, ns: str, branch: BranchRow) -> None:
        """Refuse to fork a thread that another process went on with since this one looked."""
        seen = self._heads.get(ns)
        if seen is not None and seen != branch.head:
            raise Fenced(
                f"another process has continued thread {self.name!r} since this one read it; nothing was written",
                hint="Read its state again (graph.get_state) and run from there, or give each run its own thread_id.",
            )

    def _fork(self, space: Namespace, parent: str | None) -> None:
        """The parent is not where the branch stands: let the new checkpoint grow from the parent, or be a root."""
        space.writer.settle(space.document)
        self._check_unmoved(space.ns, self.store._catalog.branch_row(space.branch.b))
        target = Line(self.store, self.row, space.branch).named(key_of(space.ns, parent)) if parent else None
        space.stand_at(target.n if target is not None else 0)
        space.id = parent or ""

    # -- writes -----------------------------------------------------------------------------------------

    def queue(self, event: Event) -> Writes:
        """Let an event wait for the next flush of this thread."""
        with self._collecting:
            self._writes.events.append(event)
            return self._writes

    def _take_writes(self) -> Writes:
        with self._collecting:
            taken, self._writes = self._writes, Writes()
            if taken.events:
                self._in_vain, self._at_once = 0, _AT_ONCE
            return taken

    def wait(self, writes: Writes) -> None:
        """Return when a queued event is on disk: taken along by a checkpoint, or written now."""
        try:
            writes.done.result(self.patience_s)
        except TimeoutError:
            if self._writes is writes:  # no checkpoint has taken them along yet
                self.flush(writes)
            writes.done.result()

    @property
    def patience_s(self) -> float:
        """How long queued events wait for a checkpoint."""
        return SHARE_S if self._in_vain >= 0 else 0.0

    def flush(self, writes: Writes) -> None:
        """Write queued events now, unless a checkpoint has taken them along."""
        with self.lock:
            self.inflight += 1
        try:
            # Without the lock: an event loop may be waiting for it to capture the next checkpoint.
            with self._collecting:
                if self._writes is not writes:
                    return
                self._writes = Writes()
                self._in_vain += 1
                if self._in_vain == _IN_VAIN:
                    self._in_vain = -self._at_once
                    self._at_once = min(2 * self._at_once, _AT_ONCE_MAX)
            try:
                self.ready()
                self.store._catalog.add_events(self.row.a, writes.events, guard=self.guard)
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                writes.settle(error)
            else:
                writes.settle()
        finally:
            with self.lock:
                self.inflight -= 1
                self.used = time.monotonic()


def writes_event(
    ns: str,
    checkpoint_id: str,
    writes: Sequence[tuple[int, str, bytes]],
    task_id: str,
    task_path: str,
    *,
    replace: bool,
) -> Event:
    """A task's writes as an event under their checkpoint's key. Values come encoded."""
    body = {
        "what": "writes",
        "task": task_id,
        "path": task_path,
        "replace": replace,
        "writes": [list(write) for write in writes],
    }
    return Event(now_us(), encode(body), key_of(ns, checkpoint_id))


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
