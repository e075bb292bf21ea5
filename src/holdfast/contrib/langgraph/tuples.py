"""From the catalog back to LangGraph's tuples: one checkpoint, a history, and what a delta channel was made of.

Owns the shape of what the saver returns. Writes nothing. What always holds: every value was decoded from bytes whose
digest was proven, or that this process made; nobody else has it, so that whoever changes one changes nothing else; a
history is read page by page, each page with one load and the operations that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple, writes_sort_key
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from holdfast.agent import history
from holdfast.agent.graph import Graph
from holdfast.agent.names import check_name
from holdfast.codec.assigned import Assigned, Still
from holdfast.codec.values import decode
from holdfast.contrib.langgraph.thread import ABOUT, ROOT, about_of, branch_name, check_whole, has_thread, key_of, named
from holdfast.contrib.langgraph.types import unknown
from holdfast.errors import BadName, Damaged, UnknownType
from holdfast.run.line import Line
from holdfast.run.records import RolledBack
from holdfast.store.database import Database
from holdfast.store.rows import Agent, Branch, Entry, Point

if TYPE_CHECKING:
    from holdfast.agent.store import Store
    from holdfast.contrib.langgraph.saver import HoldfastSaver

# A state, what LangGraph says about it, and what tasks wrote under it.
Told = tuple[Still, dict[str, Any], Sequence[Entry]]

# Checkpoints whose states are worked out together. Their lists of encodings are all in memory, their values are not.
PAGE = 64


P = ParamSpec("P")
T = TypeVar("T")


def _explained(read: Callable[P, T]) -> Callable[P, T]:
    """A class that is not found is named with the line that a graph's program needs."""

    @wraps(read)
    def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except UnknownType as error:
            raise unknown(error) from None

    return explained


class Reader:
    """One namespace of a thread, as it is in the catalog."""

    def __init__(
        self, saver: HoldfastSaver, thread: str, row: Agent, branch: Branch, state: Still | None = None
    ) -> None:
        """``state``: that of where the branch stands, if it is at hand."""
        store = saver.store
        self._db = store._db
        self._contents = store._db.now
        self._registry = saver._registry
        self._strict = saver._strict
        self._evidence = saver._evidence
        self._open = saver._threads.get(thread) if saver._strict else None
        self.thread = thread
        self.ns = str(branch.body.get("ns", ""))
        self.branch = branch
        self._state = state
        self.graph = Graph(store._db.view, row)

    @classmethod
    def of(
        cls, saver: HoldfastSaver, thread: str, ns: str, *, arriving: bool = False, running: bool = False
    ) -> Reader | None:
        """The reader of a namespace; None when there is no such thread or namespace.

        ``arriving``: also of a thread that is not whole yet. ``running``: of one whose writer this process has become.
        """
        known = saver._threads.get(thread) if running and saver._strict and not ns else None
        at_hand = known.at_hand() if known is not None else None
        if at_hand is not None:  # nobody but this process can have moved it
            return cls(saver, thread, *at_hand)
        row = agent_of(saver.store, thread)
        branch = saver.store._db.view.branch(row.a, branch_name(ns)) if row is not None else None
        if row is None or branch is None:
            return None
        if not arriving:
            check_whole(thread, branch)
        return cls(saver, thread, row, branch)

    @classmethod
    def all_of(cls, saver: HoldfastSaver, thread: str) -> list[Reader]:
        """Readers of all namespaces of a thread. Branches that people made of it are none."""
        row = agent_of(saver.store, thread)
        if row is None:
            return []
        readers = [cls(saver, thread, row, branch) for branch in saver.store._db.view.branches(row.a)]
        readers = [reader for reader in readers if branch_name(reader.ns) == reader.branch.name]
        for reader in readers:
            if not reader.ns:
                check_whole(thread, reader.branch)
        return readers

    # -- one checkpoint -------------------------------------------------------------------------------------

    def find(self, checkpoint_id: str | None) -> Point | None:
        """The row of a checkpoint, or of the one where the branch stands."""
        if checkpoint_id:
            return named(self.graph, key_of(self.ns, checkpoint_id))
        if not self.branch.head:
            return None
        point: Point | None = self._contents.view.point(self.branch.head)
        if self.ns and self.rollbacks:  # what a subgraph did after the target of one is left behind, too
            points = self.graph.walk({self.branch.head})
            point = next((point for point in points if not self._is_left_behind(point)), None)
        return point if point is not None and has_thread(point.manifest) else None

    @cached_property
    def rollbacks(self) -> list[tuple[Point, int]]:
        """The checkpoints to which the thread was rolled back, undoing what its nodes had done outside, and when."""
        return rollbacks_of(self._db, self.graph, self.branch if self.branch.name == ROOT else None)

    def _is_left_behind(self, point: Point) -> bool:
        return any(point.n > to.n and point.manifest.time_us <= at for to, at in self.rollbacks)

    def under(self, keys: Sequence[bytes], by: int | None = None) -> list[Entry]:
        """What is kept under keys, but for what a rollback has left behind; ``by``: one of that time or before."""
        return left_standing(self.graph.under(keys), self.rollbacks, by)

    def points(self) -> Iterator[Point]:
        """All checkpoints of the namespace, newest first: from where its branch stands, and from where it stood."""
        view, starts, left = self.graph.view, {self.branch.head} - {0}, set[bytes]()
        for entry in view.log(self.branch.a, kept=False):
            left.update(entry.body.get("left", ()))  # by any branch, or what is left of a line whose end is gone
            if entry.body.get("b") == self.branch.b and entry.body.get("from"):
                point = view.find(entry.body["from"])
                starts |= {point.n} if point is not None else set()
        others = [point for id in left if (point := view.find(id)) is not None and point.n not in starts]
        return self.graph.walk(starts | {point.n for point in others if self._is_ours(point)})

    def _is_ours(self, point: Point) -> bool:
        """Whether a checkpoint that the agent came by in another way is of this namespace."""
        return has_thread(point.manifest) and about_of(self.state_at(point)).get("checkpoint_ns", "") == self.ns

    def newest(self) -> CheckpointTuple | None:
        """The checkpoint where the branch stands, if its state is at hand."""
        state = self._state
        if state is None:
            return None
        about = about_of(state)
        return self._tuple(state, about, self.under([key_of(self.ns, about["id"])]), returning=True)

    def tuple_at(self, row: Point) -> CheckpointTuple:
        state = (self._open and self._open.state_of(self.ns, row)) or self.state_at(row).still()
        about = about_of(state)
        key = key_of(self.ns, about["id"])
        return self._tuple(state, about, self.under([key]), returning=True)

    def state_at(self, row: Point) -> Assigned:
        source = history.Stored(self._contents, row)
        return Assigned(self._registry, source, self._evidence, inert=False if self._strict else None)

    @_explained
    def _tuple(
        self, state: Still, about: dict[str, Any], events: Iterable[Entry], *, returning: bool = False
    ) -> CheckpointTuple:
        checkpoint = {name: value for name, value in about.items() if name not in OURS}
        checkpoint["channel_values"] = {
            name: channel_of(state, about, name, returning=returning) for name in channels_in(state, about)
        }
        parent = about.get("parent")
        return CheckpointTuple(
            config_of(self.thread, self.ns, about["id"]),
            checkpoint,  # type: ignore[arg-type]
            about["metadata"],
            config_of(self.thread, self.ns, parent) if parent else None,
            [(task, channel, value) for _, task, channel, value in self.writes(events)],
        )

    @_explained
    def writes(self, events: Iterable[Entry], only: Collection[str] | None = None) -> list[tuple[str, str, str, Any]]:
        """What tasks wrote, as (path, task, channel, value), in LangGraph's order; of some channels, or of all."""
        ordered = sorted(placed(events).items(), key=lambda item: writes_sort_key(item[1][0], *item[0]))
        return [
            (path, task, channel, self._decode(data))
            for (task, _), (path, channel, data) in ordered
            if only is None or channel in only
        ]

    def _decode(self, data: bytes) -> Any:
        try:
            return decode(data, self._registry)
        except UnknownType:
            if self._strict:
                raise
            return decode(data, self._registry, inert=True)

    # -- a history ------------------------------------------------------------------------------------------

    def tuples(
        self,
        before: str | None,
        accepts: Mapping[str, Any] | None,
        only: str | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first, from below ``before``; only those whose metadata has what ``accepts`` says.

        About ``limit`` will be asked for.
        """
        found: Iterable[Told]
        if only is not None:
            row = self.find(only)
            found = self._page([row]) if row is not None and (before is None or only < before) else []
        else:
            found = self.states(before, PAGE if accepts or limit is None else min(limit, PAGE))
        for state, about, events in found:
            metadata = about["metadata"]
            if accepts and any(metadata.get(name) != value for name, value in accepts.items()):
                continue
            yield self._tuple(state, about, events)

    def states(self, before: str | None = None, size: int = PAGE) -> Iterator[Told]:
        """States, what LangGraph says about them and what was written under them, newest first, each id once."""
        told: set[str] = set()
        points = self.points()
        while page := list(islice(points, size)):
            for state, about, events in self._page(page):
                name = about["id"]
                if name not in told and (before is None or name < before):
                    told.add(name)
                    yield state, about, events

    def _page(self, rows: Sequence[Point]) -> list[Told]:
        """LangGraph's among some rows, in their order. Neighbours follow from each other by their operations."""
        found: list[tuple[Still, dict[str, Any]]] = []
        state: Assigned | None = None
        at = 0
        for row in reversed(rows):
            manifest = row.manifest
            if not has_thread(manifest):
                state = None
                continue
            if state is not None and row.row.parent == at:
                state.do(history.operations_of(self._contents.view, row))
                if state.digests() != manifest.sections:
                    raise Damaged(
                        f"the operations of checkpoint {row.id.hex()[:12]} do not lead to the state that it recorded",
                        what=(f"checkpoint {row.id.hex()[:12]}",),
                        hint="Run `holdfast verify` to see what is damaged.",
                    )
            else:
                state = self.state_at(row)
            at = row.n
            still = state.still()
            found.append((still, about_of(still)))
        found.reverse()
        keys = [key_of(self.ns, about["id"]) for _, about in found]
        events = self._events_by_key(keys)
        return [(still, about, events.get(key, ())) for (still, about), key in zip(found, keys, strict=True)]

    def _events_by_key(self, keys: Sequence[bytes], by: int | None = None) -> dict[bytes, list[Entry]]:
        found: dict[bytes, list[Entry]] = {}
        for event in self.under(keys, by):
            found.setdefault(event.key, []).append(event)
        return found

    # -- delta channels ---------------------------------------------------------------------------------------

    @_explained
    def deltas(self, row: Point, channels: Sequence[str]) -> dict[str, Any]:
        """Per channel, what was written to it since it was last stored whole, and that value, in one walk back.

        Which ancestors hold the channel is known from their manifests, so that only the one that does is loaded.
        """
        missing = set(channels)
        seeds: dict[str, Any] = {}
        rows: list[tuple[Point, set[str]]] = []  # ancestors, each with the channels that its writes matter to
        for found in self._contents.view.walk(row.row.parent) if row.row.parent else ():
            rows.append((found, missing.copy()))
            held = {name for name, _ in found.manifest.sections} & missing
            if held:
                state = self.state_at(found).still()
                about = about_of(state)
                seeds.update((name, channel_of(state, about, name, returning=True)) for name in held)
                missing -= held
                if not missing:
                    break
        newest_first: dict[str, list[Any]] = {name: [] for name in channels}
        keys = [found.row.key for found, _ in rows if found.row.key]
        events = self._events_by_key(keys, row.manifest.time_us)
        for found, wanted in rows:
            for _, task, name, value in reversed(self.writes(events.get(found.row.key, ()), wanted)):
                newest_first[name].append((task, name, value))
        return {
            name: {"writes": newest_first[name][::-1], **({"seed": seeds[name]} if name in seeds else {})}
            for name in channels
        }


def rollbacks_of(db: Database, graph: Graph, root: Branch | None = None) -> list[tuple[Point, int]]:
    """As Reader.rollbacks; ``root`` is the branch of the outermost graph, if that is at hand."""
    root = root or next((branch for branch in graph.branches if branch.name == ROOT), None)
    if root is None or not root.records or not root.epoch:  # nothing was done outside, or it never left its line
        return []
    went = [record for _, record in Line(db, root.b).marked() if isinstance(record, RolledBack)]
    return [(point, record.at) for record in went if (point := graph.view.find(record.id)) is not None]


def left_standing(
    entries: Sequence[Entry], rollbacks: Sequence[tuple[Point, int]], by: int | None = None
) -> list[Entry]:
    """What tasks wrote under a checkpoint came after it, so a rollback to it leaves that behind."""
    last = {to.row.key: at for to, at in rollbacks if by is None or at <= by}
    return [entry for entry in entries if entry.at > last.get(entry.key, 0)]


def config_of(thread: str, ns: str, checkpoint_id: str) -> RunnableConfig:
    """The config that names a checkpoint."""
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}


def agent_of(store: Store, thread: str) -> Agent | None:
    """The agent that a thread is; None where there is none, and where there can be none."""
    if store._durability == "batched":
        store.flush()  # what this process has put is read only when it is there
    try:
        return store._db.view.agent(check_name(thread, "an agent"))
    except BadName:
        return None


# What the saver adds to LangGraph's own record of a checkpoint.
OURS = frozenset({"checkpoint_ns", "parent", "metadata", "wrapped", "triggers"})


def channels_in(state: Still, about: Mapping[str, Any]) -> list[str]:
    """The channels that have a value."""
    return [*(name for name in state.names if name != ABOUT), *about.get("triggers", ())]


def channel_of(state: Still, about: Mapping[str, Any], name: str, *, returning: bool = False) -> Any:
    """A channel's value as LangGraph gave it. ``returning``: a graph goes on with it, and gives it back."""
    if name in about.get("triggers", ()):
        return None
    value = state.value(name, returning=returning)
    return _DeltaSnapshot(value) if name in about.get("wrapped", ()) else value


def placed(events: Iterable[Entry]) -> dict[tuple[str, int], tuple[str, str, bytes]]:
    """What tasks wrote, by task and index, as (path, channel, encoded value).

    A write that is there already stays, unless it is of a kind that replaces: errors, interrupts, resumptions.
    """
    found: dict[tuple[str, int], tuple[str, str, bytes]] = {}
    for event in events:
        body = event.body
        if body["what"] != "writes":
            continue
        for index, channel, data in body["writes"]:
            place = (body["task"], index)
            if body["replace"] or place not in found:
                found[place] = (body["path"], channel, data)
    return found
