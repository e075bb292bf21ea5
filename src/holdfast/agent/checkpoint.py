"""A checkpoint as user code sees it: what it is called, what it holds, its state (read-only)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from holdfast.agent import history
from holdfast.agent.changes import Change, mutations
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import is_bookkeeping
from holdfast.codec.blocks import digest_of
from holdfast.codec.document import Document
from holdfast.codec.values import decode, encode
from holdfast.errors import UnknownAgent
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, CheckpointRow, checkpoint_id
from holdfast.store.sealing import Values

if TYPE_CHECKING:
    from holdfast.agent.store import Store

SHORT_ID = 12


class Checkpoint:
    """An immutable, verified record of one moment."""

    def __init__(
        self,
        store: Store,
        raw: bytes,
        depth: int,
        branch: int,
        *,
        row: CheckpointRow | None = None,
        manifest: Manifest | None = None,
        agent: AgentRow | None = None,
    ) -> None:
        self._store = store
        self._manifest = manifest or Manifest.decode(raw)
        self._raw = raw
        self._id = checkpoint_id(raw)
        self._branch = branch
        self._row_known = row
        self._agent = agent  # who looks at it; a clone looks at checkpoints that others made
        self.depth = depth
        self._state: Document | None = None

    @classmethod
    def of(cls, store: Store, row: CheckpointRow, agent: AgentRow | None = None) -> Checkpoint:
        return cls(store, row.manifest, row.depth, row.b, row=row, agent=agent)

    @property
    def _row(self) -> CheckpointRow:
        if self._row_known is None:  # just made, in batched mode perhaps not written yet
            self._row_known = self._store._row_by_id(self._branch, self._id)
        return self._row_known

    @property
    def id(self) -> str:
        return self._id.hex()

    @property
    def short_id(self) -> str:
        return self.id[:SHORT_ID]

    @property
    def label(self) -> str:
        return self._manifest.label

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self._manifest.time_us / 1e6, UTC)

    @property
    def parent_id(self) -> str:
        return self._manifest.parent.hex()

    @property
    def previous_id(self) -> str:
        """The id of the nearest checkpoint before it that is left: of its parent, unless that was forgotten."""
        line = self._line()
        if not line.cut(self._row):
            return self.parent_id
        over = line.over.get(self._row.n, 0)
        return self._store._catalog.checkpoint(over).id.hex() if over else ""

    @property
    def kind(self) -> str:
        """``checkpoint``, ``undo``, ``redo`` or ``recover``."""
        return self._manifest.kind

    @property
    def target_id(self) -> str:
        """What an undo reversed, a redo did again, or a recovery gave up."""
        return self._manifest.target.hex()

    @property
    def branch(self) -> str:
        """The branch on which it was made."""
        if self._agent is not None and self._row_known is not None and self._row.a != self._agent.a:
            return Line(self._store, self._agent).branch_name(self._branch)
        return self._store._branch_name(self._branch)

    @property
    def sections(self) -> dict[str, str]:
        return {name: digest.hex() for name, digest in self._manifest.sections}

    @property
    def bookkeeping(self) -> list[str]:
        """The sections that are an integration's own record: their names begin with two underscores."""
        return [name for name in self.sections if is_bookkeeping(name)]

    @property
    def digest(self) -> str:
        """One digest over the whole state: equal exactly when the states are."""
        flat = [part for pair in self._manifest.sections for part in pair]
        return digest_of("holdfast.state", encode(flat)).hex()

    @property
    def state(self) -> Document:
        """The state of that moment, read-only. Sections load when they are touched."""
        if self._state is None:
            self._state = self._store._load(self._row)
        return self._state

    @property
    def metadata(self) -> dict[str, Any]:
        data = self._store._catalog.metadata(self._manifest.metadata)
        if data is None:
            history.current(self._store._catalog, self._row)  # it was forgotten, and its metadata with it
        found = decode(data, inert=True) if data is not None else {}
        return found if isinstance(found, dict) else {}

    @property
    def validity(self) -> str:
        """``good``, ``suspect`` or ``corrupt``."""
        return str(self._validity().get("validity", "good"))

    @property
    def validity_reason(self) -> str:
        return str(self._validity().get("reason", ""))

    def _validity(self) -> dict[str, Any]:
        row = self._store._catalog.validity(self._a, self._row.n)
        return body_of(row) if row is not None else {}

    @property
    def tags(self) -> list[str]:
        return [name for name, n in self._store._tags(self._a).items() if n == self._row.n]

    @property
    def cut(self) -> bool:
        """Whether the checkpoint before it was forgotten: its history begins here."""
        return self._line().cut(self._row)

    @property
    def _a(self) -> int:
        return self._agent.a if self._agent is not None else self._row.a

    def _line(self) -> Line:
        agent = self._agent if self._agent is not None else self._store._catalog.agent_row(self._row.a)
        if agent is None:
            raise UnknownAgent("the agent of this checkpoint was removed")
        return Line(self._store, agent)

    @property
    def operations(self) -> int:
        """How many changes it recorded."""
        return len(history.operations_of(self._row, self._manifest, None))

    @property
    def size_bytes(self) -> int:
        """Bytes of the checkpoint's own records, shared nodes not counted."""
        return len(self._raw) + len(self._row.operations)

    def changes(self) -> list[Change]:
        """What it changed, in order; all that it holds, where the checkpoint before it was forgotten."""
        row, line = self._row, self._line()
        parent = line.parent(row)
        before = history.state_of(self._store._catalog, parent)
        if line.cut(row):
            operations = before.differences(self.state.told)
        else:
            with history.unless_forgotten(self._store._catalog, row):
                operations = history.operations_of(row, self._manifest, Values(self._store._catalog))
        return list(mutations(before, self._store._reader(before), operations, self.label, self.id))

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "label": self.label,
            "time": self.time.isoformat(),
            "depth": self.depth,
            "parent": self.parent_id,
            "branch": self.branch,
            "kind": self.kind,
            "target": self.target_id,
            "digest": self.digest,
            "sections": self.sections,
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
        from holdfast.agent.notebook import checkpoints_html

        return checkpoints_html([self])
