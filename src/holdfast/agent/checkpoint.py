"""A checkpoint as user code sees it: what it is called, what it holds, its state (read-only); tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast.agent import history, metadata
from holdfast.agent.changes import Change, mutations
from holdfast.agent.graph import Graph
from holdfast.agent.layers import FILES
from holdfast.agent.names import is_bookkeeping
from holdfast.codec.blocks import digest_of
from holdfast.codec.document import Document
from holdfast.codec.operations import raw_operations
from holdfast.codec.state import Shallow
from holdfast.codec.values import encode
from holdfast.errors import Damaged, Forgotten
from holdfast.store.manifest import Manifest, identity
from holdfast.store.rows import Agent, Point

if TYPE_CHECKING:
    from holdfast.agent.store import Store

SHORT_ID = 12


class Checkpoint:
    """An immutable, verified record of one moment."""

    def __init__(
        self,
        store: Store,
        agent: Agent,
        raw: bytes,
        manifest: Manifest | None = None,
        point: Point | None = None,
        id: bytes = b"",
    ) -> None:
        """``agent``: who looks at it. ``point`` is None for one that was just made, and may be on its way."""
        self._store = store
        self._agent = agent
        self._raw = raw
        self._manifest = manifest or Manifest.decode(raw)
        self._id = point.id if point is not None else id or identity(raw)
        self._found = point
        self._state: Document | None = None

    @classmethod
    def of(cls, store: Store, agent: Agent, point: Point) -> Checkpoint:
        """The checkpoint at a point of the history."""
        return cls(store, agent, point.raw, point.manifest, point)

    @property
    def _point(self) -> Point:
        if self._found is None:
            found = self._store._db.view.find(self._id)
            if found is None:  # it may be on its way
                self._store.flush()
                found = self._store._db.view.find(self._id)
            if found is None:
                raise Forgotten(f"checkpoint {self.short_id} is not in the store", hint="See `holdfast log`.")
            self._found = found
        return self._found

    @property
    def id(self) -> str:
        """The digest of all that it is, in hexadecimal. Checkpoints are equal when their ids are."""
        return self._id.hex()

    @property
    def short_id(self) -> str:
        """The id's first 12 characters, which people know it by."""
        return self.id[:SHORT_ID]

    @property
    def label(self) -> str:
        """What it was called."""
        return self._manifest.label

    @property
    def depth(self) -> int:
        """How many checkpoints its history has, itself included."""
        return self._manifest.depth

    @property
    def time(self) -> datetime:
        """When it was made (UTC)."""
        return datetime.fromtimestamp(self._manifest.time_us / 1e6, UTC)

    @property
    def parent_id(self) -> str:
        """The checkpoint before it; empty for the first."""
        return self._manifest.parent.hex()

    @property
    def previous_id(self) -> str:
        """The id of the nearest checkpoint before it that is left: of its parent, unless that was forgotten."""
        if not self.cut:
            return self.parent_id
        above = self._graph().before(self._current())
        return above.id.hex() if above is not None else ""

    @property
    def kind(self) -> str:
        """``checkpoint``, ``undo``, ``redo`` or ``recover``."""
        return self._manifest.kind

    @property
    def trigger(self) -> str:
        """What asked for it: empty for the program itself, else a trigger of its policy, ``gate``, ``end``, ..."""
        return self._manifest.cost.trigger if self._manifest.cost is not None else ""

    @property
    def stall_before_s(self) -> float | None:
        """How long the program stood still for the checkpoint before it; None where nobody has written that down."""
        cost = self._manifest.cost
        return cost.stall_us / 1e6 if cost is not None and cost.stall_us else None

    @property
    def target_id(self) -> str:
        """What an undo reversed, a redo did again, or a recovery gave up."""
        return self._manifest.target.hex()

    @property
    def branch(self) -> str:
        """The branch on which it was made; for one that came from elsewhere, one that has it."""
        graph = self._graph()
        row = self._point.row
        for branch in graph.branches:
            if row.b in (branch.b, *branch.body.get("origins", ())):  # of the branch that it was copied from
                return branch.name
        return next((one.name for one in graph.branches if one.head and row.n in graph.above([one.head])), "")

    @property
    def sections(self) -> dict[str, str]:
        """The digest of each section of the state, by name."""
        return {name: digest.hex() for name, digest in self._manifest.state}

    @property
    def has_files(self) -> bool:
        """Whether it carries the files of a workspace."""
        return len(self._manifest.layers) > 1 and any(name == FILES for name, _ in self._manifest.sections)

    @property
    def bookkeeping(self) -> list[str]:
        """The sections that are an integration's own record: their names begin with two underscores."""
        return [name for name in self.sections if is_bookkeeping(name)]

    @property
    def digest(self) -> str:
        """One digest over the whole state: equal exactly when the states are."""
        flat = [part for pair in self._manifest.state for part in pair]
        return digest_of("holdfast.state", encode(flat)).hex()

    @property
    def state(self) -> Document:
        """The state of that moment, read-only. Sections load when they are touched."""
        if self._state is None:
            self._state = self._store._load(self._point)
        return self._state

    @property
    def metadata(self) -> dict[str, Any]:
        """What ran when it was made: versions, configuration, and the line that asked for it.

        Only ``lost`` where a repair could not save it.
        """
        try:
            return metadata.read(history.state_of(self._store._db.now, None), self._manifest.metadata)
        except Damaged:
            self._current()  # it may have been forgotten, and its metadata with it
            if self._manifest.metadata in metadata.lost(self._store._db.view):
                return {"lost": self._manifest.metadata.hex()}
            raise

    @property
    def validity(self) -> str:
        """``good``, ``suspect`` or ``corrupt``."""
        return str(self._validity().get("validity", "good"))

    @property
    def validity_reason(self) -> str:
        """Why, if somebody said so."""
        return str(self._validity().get("reason", ""))

    def _validity(self) -> dict[str, Any]:
        return self._store._db.view.validity(self._agent.a, self._point.n)

    @property
    def tags(self) -> list[str]:
        """The tags that name it."""
        n = self._point.n
        return [tag.name for tag in self._store._db.view.tags(self._agent.a) if tag.n == n]

    @property
    def cut(self) -> bool:
        """Whether the checkpoint before it was forgotten: its history begins here."""
        return self._current().cut

    def _current(self) -> Point:
        """As it is stored now."""
        return history.current(self._store._db.view, self._point)

    def _graph(self) -> Graph:
        return Graph(self._store._db.view, self._agent)

    @property
    def operations(self) -> int:
        """How many changes it recorded."""
        return len(raw_operations(self._operations()))

    @property
    def size_bytes(self) -> int:
        """Bytes of the checkpoint's own records, shared nodes not counted."""
        return len(self._raw) + len(self._operations())

    def _operations(self) -> bytes:
        try:
            return self._store._db.view.operations(self._point)
        except Damaged:
            self._found = self._current()
            return self._store._db.view.operations(self._found)

    def changes(self, *, large: bool = True) -> list[Change]:
        """What it changed, in order; all that it holds, where the checkpoint before it was forgotten.

        Without ``large``, what is large is not read: ``holdfast.travel.Held`` stands for it.
        """
        now = self._store._db.now
        point = self._current()
        with history.unless_forgotten(now.view, point):
            before = history.state_of(now, now.view.point(point.row.parent) if point.row.parent else None)
            operations = before.differences(self.state.told) if point.cut else history.operations_of(now.view, point)
            reader = self._store._reader(before) if large else Shallow(before, self._store._registry, inert=True)
            return list(mutations(before, reader, operations, self.label, self.id))

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types, without its state and its metadata."""
        return {
            "id": self.id,
            "label": self.label,
            "time": self.time.isoformat(),
            "depth": self.depth,
            "parent": self.parent_id,
            "branch": self.branch,
            "kind": self.kind,
            "trigger": self.trigger,
            "target": self.target_id,
            "digest": self.digest,
            "sections": self.sections,
            "files": self.has_files,
            "validity": self.validity,
            "tags": self.tags,
            "operations": self.operations,
            "size_bytes": self.size_bytes,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and other._id == self._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        name = f" {self.label!r}" if self.label else ""
        return f"<Checkpoint {self.short_id}{name} #{self.depth} {self.time:%Y-%m-%d %H:%M:%S}>"

    def _repr_html_(self) -> str:
        return checkpoints_html([self])


# -- in a notebook: all text is escaped, because states are not trusted -----------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    from html import escape

    header = "".join(f"<th style='text-align:left'>{escape(str(cell))}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def checkpoints_html(checkpoints: Iterable[Checkpoint]) -> str:
    return table(
        ("checkpoint", "depth", "label", "kind", "time", "state digest"),
        (
            (c.short_id, f"#{c.depth}", c.label, c.kind, f"{c.time:%Y-%m-%d %H:%M:%S} UTC", c.digest[:16])
            for c in checkpoints
        ),
    )
