"""Receiving: parcels become part of a store, each proven before it can be seen.

Owns the place that everything gets, and that it is proven first (how a checkpoint is replayed: ``proving``). Must not
know where it comes from: another store, a file, or what is left of a damaged one. What always holds: nothing is taken
on trust, because digests are computed here, every checkpoint is replayed on its parent's state, and every record
follows in its chain; a checkpoint gets a row when all that it needs is there, and a branch moves when all of its
history is; what has arrived stays, so that the next attempt goes on from there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from holdfast.agent.journal import BEGINNING, RECORD_MAX_BYTES, Position, inherited
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import check_name, name_key
from holdfast.agent.parcels import (
    About,
    BranchAbout,
    Chunk,
    Events,
    Last,
    Metadata,
    Nodes,
    Parcel,
    Point,
    Records,
    check_about,
)
from holdfast.agent.proving import Proving
from holdfast.agent.sending import Said
from holdfast.codec.values import decode, encode
from holdfast.errors import BadName, CorruptValue, Damaged
from holdfast.store.catalog import (
    AgentRow,
    Append,
    BranchRow,
    CheckpointRow,
    Event,
    LineStart,
    NewRecord,
    TagRow,
    ValidityRow,
    checkpoint_id,
    chunk_digest,
    effect_chain,
    node_digest,
    receive_key,
)
from holdfast.store.locks import Lease
from holdfast.store.opening import now_us
from holdfast.store.packs import CHUNK_BYTES
from holdfast.store.receiving import Arrival, Receiving, Standing

if TYPE_CHECKING:
    from holdfast.agent.store import Store

MAIN = "main"
# A transaction takes this many checkpoints or bytes: other writers of the store wait for milliseconds.
_ROWS_AT_ONCE = 128
_BYTES_AT_ONCE = 2**20
# Chunks that go into one pack, and so the memory that they cost.
_CHUNKS_AT_ONCE = 8
# How long collection in the store may have to wait for a batch.
_HOLD_S = 1.0
# Positions of a line whose chain digests are remembered.
_POSITIONS_KEPT = 4_096
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Target:
    """Where a branch's history goes: a branch that is there, or a new one. ``fork``: where it leaves another."""

    uuid: bytes
    name: str
    row: BranchRow | None = None
    fork: CheckpointRow | None = None


@dataclass(slots=True)
class Arrived:
    """What came in."""

    checkpoints: int = 0
    records: int = 0
    events: int = 0
    nodes: int = 0
    chunks: int = 0
    bytes: int = 0
    branches: int = 0
    left_out: list[str] = field(default_factory=list)
    """Tags and judgements on checkpoints that are not here."""


@dataclass(slots=True)
class _Branch:
    """A branch on its way."""

    about: BranchAbout
    target: Target
    row: BranchRow | None
    end: Position = BEGINNING
    known: OrderedDict[int, bytes] = field(default_factory=OrderedDict)


class Receiver:
    """Takes in one agent. Use as a context: the leases of its branches are held inside."""

    def __init__(self, store: Store, about: About, *, name: str | None = None) -> None:
        self._store = store
        self._catalog = store._catalog
        self._proving = Proving(self._catalog, self._row_of)
        self.about = about
        self.name = check_name(name if name is not None else about.name, "an agent")
        self.agent: AgentRow | None = next((row for row in self._catalog.agents() if row.uuid == about.uuid), None)
        self.arrived = Arrived()
        self.moved = False  # whether a branch was moved since it was looked at
        self._stack = ExitStack()
        self._held: ExitStack | None = None
        self._into: Receiving | None = None
        self._since = 0.0
        self._branches: list[_Branch] = []
        self._leases: dict[int, Lease] = {}
        self._nodes: dict[bytes, bytes] = {}
        self._node_bytes = 0
        self._chunks: dict[bytes, bytes] = {}
        self._arrivals: list[Arrival] = []
        self._arrival_ids: list[tuple[bytes, int]] = []
        self._arrival_bytes = 0
        self._cut: list[bytes] = []
        self._numbers: dict[bytes, tuple[int, int]] = {}  # id -> number and depth here
        self._unread: Iterator[CheckpointRow] | None = None
        self._described = b""  # the metadata that was last seen to be here: most checkpoints have the same
        self._uuids: set[bytes] = {about.uuid, *about.origins}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything. What has arrived stays."""
        try:
            self._let_go()
        finally:
            self._stack.close()

    # -- beginning ----------------------------------------------------------------------------------------------

    def begin(self, targets: Sequence[Target] | None = None, held: Sequence[int] | None = None) -> None:
        """Make the agent if there is none, and become the writer of the branches that are there.

        ``held`` are those that something will be written to, by default all.
        """
        about = self.about
        check_about(about)
        if targets is None:
            targets = [Target(branch.uuid, branch.name) for branch in about.branches]
        for one, target in zip(about.branches, targets, strict=True):
            self._branches.append(_Branch(one, target, target.row))
        if self.agent is None:
            self._make_agent()
        else:
            self._uuids |= Line(self._store, self.agent).uuids
        for at, branch in enumerate(self._branches):
            if branch.row is not None:
                self._lease(branch, take=held is None or at in held)

    def _make_agent(self) -> None:
        if self._catalog.agent(name_key(self.name)) is not None:
            raise BadName(f"there is another agent {self.name!r} already", hint="Let it arrive under another name.")
        first = next((branch for branch in self._branches if branch.about.name == MAIN), None)
        if first is None or first.about.origin >= 0:
            raise CorruptValue(f"agent {self.name!r} has no branch {MAIN!r} of its own")
        now = now_us()
        body: dict[str, Any] = {"name": self.name, "created": self.about.created}
        if self.about.origins:  # their manifests count as this agent's; no row of theirs is seen
            body["origins"] = [[0, uuid, 0, 0] for uuid in self.about.origins]
            body["without"] = [[], []]
        events = [
            Event(now, encode({"what": "agent", "name": self.name})),
            Event(now, encode({**self._said(), "heads": [[MAIN, b""]], "newest": self._catalog.newest()[0]}), b"key"),
        ]
        agent = AgentRow(0, self.about.uuid, name_key(self.name), encode(body))
        branch = BranchRow(0, 0, first.target.uuid, name_key(MAIN), self._body(first), 0, b"", 0)
        self.agent, first.row = self._receiving().agent(agent, branch, events)
        self.arrived.branches += 1
        self._let_go()

    def _body(self, branch: _Branch) -> bytes:
        more = decode(branch.about.more, inert=True)
        return encode({**more, "name": branch.target.name, "arriving": True})

    def _lease(self, branch: _Branch, *, take: bool = True) -> None:
        row = branch.row
        if row is None:
            return
        before = self._catalog.line(row.b)
        if take:
            who = {"agent": self.name, "branch": branch.target.name}
            lease = self._leases[row.b] = self._catalog.lease(row, who=who)
            self._stack.callback(lease.release)
        now = branch.row = self._catalog.branch_row(row.b)
        line = self._catalog.line(row.b)
        branch.end = line.count, line.chain
        self.moved = self.moved or now.head_id != row.head_id or line != before

    def _branch(self, at: int) -> tuple[_Branch, BranchRow]:
        """A branch, made when it is new."""
        if not 0 <= at < len(self._branches):
            raise CorruptValue(f"a parcel names branch {at}, which is not in the list")
        branch = self._branches[at]
        if branch.row is None:
            branch.row = self._make_branch(branch)
            self._lease(branch)
        return branch, branch.row

    def _make_branch(self, branch: _Branch) -> BranchRow:
        agent = self._agent()
        about, target = branch.about, branch.target
        check_name(target.name, "a branch", but="@")
        self._store._check_free(agent, target.name)
        line = inherited(target.fork)
        if target.fork is None and about.origin >= 0:
            _, origin = self._branch(about.origin)
            line = LineStart(origin.b, about.start, self._chain_at(about.origin, about.start))
        body = decode(self._body(branch), inert=True)
        begun = target.fork.id if target.fork is not None else body["from"]
        now = now_us()
        said: dict[str, Any] = {"what": "branch", "name": target.name, "at": begun}
        if line is not None and line.start:
            said["line"] = [line.origin, line.start]
        stands = {**self._said(), "heads": [[target.name, b""]], "newest": self._catalog.newest()[0]}
        row = BranchRow(0, agent.a, target.uuid, name_key(target.name), encode({**body, "from": begun}), 0, b"", 0)
        made = self._receiving().branch(row, line, [Event(now, encode(said)), self._event(stands)])
        self.arrived.branches += 1
        return made

    def _agent(self) -> AgentRow:
        if self.agent is None:
            raise CorruptValue("a parcel came before the agent")
        return self.agent

    # -- what the other side may ask ----------------------------------------------------------------------------

    def nodes(self, digests: Sequence[bytes]) -> set[bytes]:
        """Those of them that are not here."""
        self._receiving()  # what is here stays here until it is needed
        there = self._catalog.has_nodes([digest for digest in digests if digest not in self._nodes])
        return {digest for digest in digests if digest not in there and digest not in self._nodes}

    def chunks(self, digests: Sequence[bytes]) -> set[bytes]:
        self._receiving()
        return {digest for digest in digests if digest not in self._chunks and self._catalog.chunk_row(digest) is None}

    def metadata(self, digest: bytes) -> bool:
        if digest != self._described and self._catalog.metadata(digest) is not None:
            self._described = digest
        return digest != self._described

    def events(self, events: Sequence[Said]) -> list[Said]:
        agent = self._agent()
        found = self._catalog.events_named(key for _, _, key in events)
        there = {(row.at, row.body, row.key) for row in found if row.a == agent.a}
        return [event for event in events if event not in there]

    # -- parcels ------------------------------------------------------------------------------------------------

    def take(self, parcel: Parcel) -> None:
        """One parcel. What it needs has come before."""
        match parcel:
            case Nodes(nodes):
                self._take_nodes(nodes)
            case Chunk(data):
                self._take_chunk(data)
            case Metadata(data):
                self._count(len(data))
                if not isinstance(decode(data, inert=True), dict):
                    raise CorruptValue("metadata that is no map")
                self._receiving().metadata(data)
            case Records():
                self._take_records(parcel)
            case Point():
                self._take_point(parcel)
            case Events(events):
                self._take_events(events)
            case _:
                raise CorruptValue(f"a parcel at the wrong place: {type(parcel).__name__}")

    def _count(self, size: int) -> None:
        self.arrived.bytes += size

    def _take_nodes(self, nodes: Sequence[bytes]) -> None:
        for node in nodes:
            if len(node) < 2:
                raise CorruptValue("a node that is too short to be one")
            self._nodes[node_digest(node)] = node
            self._node_bytes += len(node)
            self._count(len(node))
        self.arrived.nodes += len(nodes)
        if self._node_bytes >= _BYTES_AT_ONCE:
            self._write_nodes()

    def _take_chunk(self, data: bytes) -> None:
        if len(data) > CHUNK_BYTES:
            raise CorruptValue(f"a chunk of {len(data):,} bytes")
        self._chunks[chunk_digest(data)] = data
        self._count(len(data))
        self.arrived.chunks += 1
        if len(self._chunks) >= _CHUNKS_AT_ONCE:
            self._write_chunks()

    def _write_chunks(self) -> None:
        if self._chunks:
            self._receiving().chunks(self._chunks.values())
            self._chunks = {}

    def _write_nodes(self) -> None:
        self._write_chunks()
        if self._nodes:
            self._receiving().nodes(self._nodes.values())
            self._nodes, self._node_bytes = {}, 0

    def _take_records(self, parcel: Records) -> None:
        branch, row = self._branch(parcel.branch)
        count, end = branch.end
        if parcel.first != count + 1:
            raise CorruptValue(f"records of {branch.target.name!r} from number {parcel.first} on, after {count}")
        self._write_nodes()
        records = []
        for mark, refs, body in parcel.records:
            if len(body) > RECORD_MAX_BYTES or len(refs) % _DIGEST_BYTES:
                raise CorruptValue("a record that does not follow the format")
            named = [refs[at : at + _DIGEST_BYTES] for at in range(0, len(refs), _DIGEST_BYTES)]
            if len(self._catalog.has_nodes(named)) < len(set(named)):
                raise Damaged("a record names a node that is missing")
            records.append(NewRecord(mark, refs, body))
            end = effect_chain(end, body)
            self._remember(branch, count + len(records), end)
            self._count(len(body) + len(refs))
        append = Append(
            self._agent().a, row.b, self._leases[row.b].generation, count, branch.end[1], records, end
        )  # fmt: skip
        self._receiving().records(append)
        branch.end = count + len(records), end
        self.arrived.records += len(records)
        self._rest()

    def _remember(self, branch: _Branch, count: int, end: bytes) -> None:
        branch.known[count] = end
        while len(branch.known) > _POSITIONS_KEPT:
            branch.known.popitem(last=False)

    def _chain_at(self, at: int, count: int) -> bytes:
        """The chain digest at a number of a branch's line."""
        branch, row = self._branch(at)
        if count == branch.end[0]:
            return branch.end[1]
        if not count:
            return b""
        if count in branch.known:
            return branch.known[count]
        if count > branch.end[0]:
            raise Damaged(f"record {count} of {branch.target.name!r} is missing")
        end = b""
        for record in self._catalog.effects(row.b, before=count + 1):
            end = effect_chain(end, record.body)
        self._remember(branch, count, end)
        return end

    def _take_events(self, events: Sequence[Said]) -> None:
        for at, body, key in events:
            if not key or not isinstance(decode(body, inert=True), dict) or not abs(at) < 2**62:
                raise CorruptValue("an event that does not follow the format")
            self._count(len(body) + len(key))
        missing = self.events(events)
        if missing:
            found = [Event(at, body, key) for at, body, key in missing]
            self._receiving().events(self._agent().a, found, self._guards())
        self.arrived.events += len(missing)
        self._rest()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _take_point(self, point: Point) -> None:
        _, row = self._branch(point.branch)
        self._write_nodes()
        identity = checkpoint_id(point.manifest)
        short = identity.hex()[:12]
        manifest = Manifest.decode(point.manifest)
        if manifest.agent not in self._uuids:
            raise Damaged(f"checkpoint {short} belongs to another agent", what=(f"checkpoint {short}",))
        if manifest.effects[1] != self._chain_at(point.branch, manifest.effects[0]):
            raise Damaged(f"checkpoint {short} speaks of records that did not come", what=(f"checkpoint {short}",))
        if self.metadata(manifest.metadata):
            raise Damaged(f"the metadata of checkpoint {short} did not come", what=(f"checkpoint {short}",))
        parent = self._lookup(manifest.parent) if manifest.parent else None
        if manifest.parent and parent is None and not point.cut:
            raise Damaged(f"the checkpoint before {short} did not come", what=(f"checkpoint {short}",))
        depth = parent[1] + 1 if parent is not None else 1 if not manifest.parent else max(2, point.depth)
        if point.depth != depth:
            raise Damaged(f"checkpoint {short} has the wrong depth", what=(f"checkpoint {short}",))
        cut = bool(manifest.parent) and parent is None
        if cut and not point.sealed:
            raise Damaged(f"checkpoint {short} does not stand alone", what=(f"checkpoint {short}",))
        self._proving.prove(point, identity, manifest, cut=cut)
        parent = self._lookup(manifest.parent) if parent is not None else None  # it may have got its row meanwhile
        number = parent[0] if parent is not None else 0
        above = self._lookup(point.over) if cut and point.over else None
        if above is not None and above[1] >= point.depth:
            raise Damaged(f"checkpoint {short} names a later one as its ancestor", what=(f"checkpoint {short}",))
        self._arrivals.append(
            Arrival(
                row.b, number, point.depth, point.sealed, point.manifest, point.operations, point.key, point.tail,
                point.places, above[0] if above is not None else 0,
            )
        )  # fmt: skip
        self._arrival_ids.append((identity, point.depth))
        self._numbers[identity] = -len(self._arrivals), point.depth
        if cut:
            self._cut.append(manifest.parent)
        size = len(point.manifest) + len(point.operations) + len(point.tail or b"")
        self._arrival_bytes += size
        self._count(size)
        self.arrived.checkpoints += 1
        if len(self._arrivals) >= _ROWS_AT_ONCE or self._arrival_bytes >= _BYTES_AT_ONCE or self._overdue():
            self._write_rows()

    def _row_of(self, identity: bytes) -> CheckpointRow:
        """The row of a checkpoint of the agent."""
        self._write_rows()
        found = self._lookup(identity)
        if found is None:
            raise Damaged(f"checkpoint {identity.hex()[:12]} is missing", what=(f"checkpoint {identity.hex()[:12]}",))
        return self._catalog.checkpoint(found[0])

    def _lookup(self, identity: bytes) -> tuple[int, int] | None:
        """Number and depth of one of the agent's checkpoints; a negative number for one that has no row yet."""
        found = self._numbers.get(identity)
        if found is not None or self.agent is None:
            return found
        if self._unread is None:
            self._unread = Line(self._store, self.agent).rows()
        for row in self._unread:
            self._numbers.setdefault(row.id, (row.n, row.depth))
            if row.id == identity:
                return row.n, row.depth
        return None

    def _write_rows(self) -> None:
        if not self._arrivals:
            return
        said = {**self._said(), "heads": self._heads()}
        numbers = self._receiving().checkpoints(
            self._agent().a, self._arrivals, self._cut, said, self._guards(), now_us()
        )
        for (identity, depth), n in zip(self._arrival_ids, numbers, strict=True):
            self._numbers[identity] = n, depth
        self._arrivals, self._arrival_ids, self._arrival_bytes, self._cut = [], [], 0, []
        self._rest()

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self, last: Last, *, heads: Sequence[int] | None = None) -> None:
        """Everything has come: let branches, tags and judgements stand where they stand over there.

        ``heads`` are the branches that move, by default all.
        """
        self._write_nodes()
        self._write_rows()
        agent = self._agent()
        standing = []
        moving = range(len(self._branches)) if heads is None else heads
        for at in moving:
            branch, row = self._branch(at)
            if branch.end != (branch.about.count, branch.about.chain):
                raise Damaged(f"the records of {branch.target.name!r} did not all come")
            if not branch.about.head:
                continue  # over there all was forgotten, or nothing was ever made
            head = self._lookup(branch.about.head)
            if head is None:
                raise Damaged(f"the head of {branch.target.name!r} did not come")
            standing.append(Standing(row, head[0], branch.about.head))
        said = {**self._said(), "heads": self._heads(standing), "upto": [*last.upto]}
        self._receiving().finish(
            agent.a, standing, self._tags(last), self._judgements(last), lambda newest: {**said, "newest": newest},
            self._guards(), now_us(),
        )  # fmt: skip
        self._let_go()

    def _tags(self, last: Last) -> list[tuple[TagRow | bytes, Event]]:
        agent = self._agent()
        changes: list[tuple[TagRow | bytes, Event]] = []
        for name, identity, since in last.tags:
            at = since or now_us()
            if not identity:
                changes.append((name_key(name), Event(at, encode({"what": "untag", "name": name}))))
                continue
            check_name(name, "a tag", but="@")
            if self._catalog.branch(agent.a, name_key(name)) is not None:
                self.arrived.left_out.append(f"tag {name}")  # a branch has that name here
                continue
            found = self._lookup(identity)
            if found is None:
                self.arrived.left_out.append(f"tag {name}")
                continue
            row = TagRow(agent.a, name_key(name), encode({"name": name, "at": identity}), found[0])
            changes.append((row, Event(at, encode({"what": "tag", "name": name, "at": identity}))))
        return changes

    def _judgements(self, last: Last) -> list[tuple[ValidityRow | int, Event]]:
        agent = self._agent()
        changes: list[tuple[ValidityRow | int, Event]] = []
        for identity, validity, reason, since in last.validity:
            if validity not in {"good", "suspect", "corrupt"}:
                raise CorruptValue(f"validity {validity[:40]!r}")
            at = since or now_us()
            found = self._lookup(identity)
            if found is None:
                self.arrived.left_out.append(f"{validity} {identity.hex()[:12]}")
                continue
            body = {"validity": validity, "reason": reason, "at": at}
            event = Event(at, encode({"what": "validity", "at": identity, "validity": validity, "reason": reason}))
            row = ValidityRow(agent.a, found[0], encode(body)) if validity != "good" else found[0]
            changes.append((row, event))
        return changes

    # -- surroundings -------------------------------------------------------------------------------------------

    def _said(self) -> dict[str, Any]:
        return {"what": "receive", "from": self.about.store}

    def _event(self, body: dict[str, Any]) -> Event:
        return Event(now_us(), encode(body), receive_key(self._agent().a))

    def _heads(self, moved: Sequence[Standing] = ()) -> list[list[Any]]:
        """Where the branches stand that this process holds."""
        now = {one.branch.b: one.head_id for one in moved}
        return [
            [branch.target.name, now.get(branch.row.b, branch.row.head_id)]
            for branch in self._branches
            if branch.row is not None and branch.row.b in self._leases
        ]

    def _guards(self) -> list[tuple[int, int]]:
        return [(b, lease.generation) for b, lease in self._leases.items()]

    def _receiving(self) -> Receiving:
        """The right to write, held until what has come is referred to: nothing of it can be collected before."""
        if self._into is None:
            held = ExitStack()
            self._into = held.enter_context(self._catalog.receiving())
            self._held, self._since = held, time.monotonic()
        return self._into

    def _overdue(self) -> bool:
        return self._into is not None and time.monotonic() - self._since > _HOLD_S

    def _rest(self) -> None:
        """Let others collect for a moment, where nothing is waiting to be referred to."""
        if self._overdue() and not self._nodes and not self._chunks and not self._arrivals:
            self._let_go()

    def _let_go(self) -> None:
        held, self._held, self._into = self._held, None, None
        if held is not None:
            held.close()
