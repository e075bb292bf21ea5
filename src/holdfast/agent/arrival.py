"""Arrival: frames become part of a store, each proven before it gets a row.

Owns replaying what comes, reading whatever it names, the transactions in which objects are written, and what protects
them until refs name them. Must not know where frames come from: another store, or a file. What always holds: nothing is
taken on trust, because digests are computed here; a checkpoint is proven when its operations lead from its parent's
state to the digests that it recorded, and when every value that they put there, and every tree that it names, can be
read to the end; every record follows in its chain; memory is bounded by a few states; a row is written with all that it
needs, or after it; refs move last, so that nothing half is ever seen; until then a tag of nobody's holds what has
arrived, so that the next attempt goes on from there.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

from holdfast.agent import frames
from holdfast.agent.background import fold_below
from holdfast.agent.branch import RECORD_MAX_BYTES, SEAL_BYTES, SEAL_CHECKPOINTS
from holdfast.agent.frames import BranchRef, Frame, Refs, body_in, check_refs, size_of
from holdfast.agent.history import Blank, Reading, Stored, children
from holdfast.agent.layers import holds_image
from holdfast.agent.metadata import LOST, lost
from holdfast.agent.names import check_name
from holdfast.agent.refs import Arrived, Kept, Landing, Past, Plan, Sides, TransferredAgent, plan
from holdfast.codec import wire
from holdfast.codec.blocks import LEAF_MAX_BYTES
from holdfast.codec.operations import decode_operations
from holdfast.codec.state import State
from holdfast.codec.values import decode
from holdfast.errors import CorruptValue, Damaged, Fenced, NotEncrypted
from holdfast.store.catalog import listed, slices
from holdfast.store.changes import Change, NewCheckpoint, NewRecord, Objects, now_us, pack_node
from holdfast.store.cipher import digest
from holdfast.store.database import Contents
from holdfast.store.engine import Refused
from holdfast.store.manifest import Manifest, Position, identity, is_written, mark_of
from holdfast.store.packs import CHUNK_MAX_BYTES
from holdfast.store.rows import BEGINNING, DIGEST_BYTES, Branch, End, Point, Tag, chunk_digest, link, node_digest

if TYPE_CHECKING:
    from holdfast.agent.store import Store

_STATES_KEPT = 4
_ROW_BYTES = 256


class Brought:
    """Nodes and chunks that have come, and those that must be in the store when they are written."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, bytes] = {}
        self.chunks: dict[bytes, bytes] = {}
        self.needs_nodes: set[bytes] = set()
        self.needs_chunks: set[bytes] = set()
        self.size = 0

    def add(self, other: Brought) -> None:
        self.nodes.update(other.nodes)
        self.chunks.update(other.chunks)
        self.needs_nodes |= other.needs_nodes
        self.needs_chunks |= other.needs_chunks


class _Held(NamedTuple):
    """A state at hand; how many checkpoints and bytes were since its base, and from how many bytes on it is sealed."""

    state: State
    steps: int = 0
    size: int = 0
    due: int = 0


class Proof:
    """Proves checkpoints, parents before children, and what they name."""

    def __init__(self, now: Contents, write: Callable[[], None]) -> None:
        """``write`` writes the rows that wait: a state that is not at hand any more is read from the store."""
        self._now = now
        self._write = write
        self.come = Brought()  # what nothing names yet
        self.named = Brought()  # what rows name that wait to be written
        self._states: OrderedDict[bytes, _Held] = OrderedDict()
        self.reading = Reading(_Empty(self, now), self._needs)

    def object(self, name: bytes) -> bytes | None:
        """A node or chunk that waits to be written."""
        for kept in (self.come, self.named):
            found = kept.nodes.get(name) or kept.chunks.get(name)
            if found is not None:
                return found
        return None

    def _needs(self, code: int, payload: bytes) -> None:
        if code == wire.BIG:
            self.come.needs_nodes.add(payload)
        else:
            self.come.needs_chunks.update(decode(payload)[2])

    def accept(self) -> None:
        """What has come is named by a row that waits, and is written with it."""
        self.named.add(self.come)
        self.come = Brought()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def replay(self, id: bytes, manifest: Manifest, data: bytes) -> bool:
        """Do a checkpoint's operations on its parent's state.

        True: it is due to be sealed, as when it was made, and the nodes of its state have been added to what comes.
        """
        operations = decode_operations(data, manifest.time_us)
        held = self._of(manifest.parent)
        held.state.do(operations)
        if held.state.digests() != manifest.sections:
            raise unlike(id, "has operations that do not lead to its state")
        self.reading.operations(operations)
        held = held._replace(steps=held.steps + 1, size=held.size + _ROW_BYTES + len(data))
        if held.steps >= SEAL_CHECKPOINTS or held.size >= max(SEAL_BYTES, held.due):
            nodes = held.state.unstored()
            size = sum(map(len, nodes.values()))
            if held.steps >= SEAL_CHECKPOINTS or size <= held.size + LEAF_MAX_BYTES:
                self.come.nodes.update(nodes)
                self.come.needs_nodes.update(root for _, root in manifest.sections)
                self.come.needs_nodes.update(child for raw in nodes.values() for child in children(raw))
                return True  # the next one reads the state as it is stored then
            held = held._replace(due=size)  # the nodes that changed are more than what changed them
        self._states[id] = held
        while len(self._states) > _STATES_KEPT:
            self._states.popitem(last=False)
        return False

    def _of(self, id: bytes) -> _Held:
        """A state, to be changed: whoever else grows from it loads it again."""
        if not id:
            return _Held(State(_Empty(self, self._now)))
        held = self._states.pop(id, None)
        if held is None:
            self._write()
            view = self._now.view
            point = view.find(id)
            if point is None:
                raise Refused(f"checkpoint {id.hex()[:12]} was forgotten meanwhile")
            source = _Parent(self, self._now, point)
            since = source.since_base()
            held = _Held(State(source), len(since), sum(len(view.operations(one)) + _ROW_BYTES for one in since))
        return held


class _Empty(Blank):
    """The source of the empty state."""

    _proof: Proof

    def __init__(self, proof: Proof, now: Contents) -> None:
        super().__init__(now)
        self._proof = proof

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = {one: raw for one in digests if (raw := self._proof.object(one)) is not None}
        return {**super().nodes([one for one in digests if one not in found]), **found}

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join([self._proof.object(one) or super(_Empty, self).bulk([one]) for one in digests])


class _Parent(_Empty, Stored):
    """The source of a state that operations which have come are done on."""

    def __init__(self, proof: Proof, now: Contents, point: Point) -> None:
        Stored.__init__(self, now, point)
        self._proof = proof


def unlike(id: bytes, why: str) -> Damaged:
    """A checkpoint that is not what it says."""
    short = id.hex()[:12]
    return Damaged(f"checkpoint {short} {why}", what=(f"checkpoint {short}",))


# -- frames -----------------------------------------------------------------------------------------------------------


ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 2**22
"""A transaction takes this many rows or bytes: other writers of the store wait for milliseconds."""

COME_BYTES = 2**25
"""Nodes and chunks that wait in memory for what names them; more are written before it."""

HOLD_S = 7 * 86_400
"""So long what has arrived is kept for a transfer that was interrupted."""

ATTEMPTS = 4
"""How often something is tried again that others change meanwhile."""

_KNOWN_MAX = 100_000
_THERE = "SELECT n FROM loose WHERE n = ? UNION ALL SELECT n FROM checkpoint WHERE n = ?"

T = TypeVar("T")


class Gone(Refused):
    """What has arrived was collected before refs could name it. It has to come again."""


class Waiting(NamedTuple):
    """An agent that has come, but for its refs."""

    refs: Refs
    kept: list[Kept]
    arrived: Arrived


class _Known(NamedTuple):
    """A checkpoint that is here; ``n`` is 0 while it waits to be written."""

    n: int
    depth: int


class _NewLine(NamedTuple):
    """Records behind a position."""

    start: Position
    records: list[NewRecord]


class _NewPoint(NamedTuple):
    """A checkpoint that was proven. ``cut``: its parent is nowhere, and ``above`` the nearest ancestor that is left."""

    new: NewCheckpoint
    effects: Position
    above: bytes
    cut: bool


class Arrival:
    """Takes frames. ``finish`` moves the refs of the agents that have come. Use as a context."""

    def __init__(self, store: Store, origin: str, *, images: bool = True) -> None:
        """``origin`` is where they come from, for messages. Without ``images``, one that comes is refused."""
        self._images = images
        self._store = store
        self._db = store._db
        self._view = store._db.view
        self._places = origin, store.place
        self._proof = Proof(store._db.now, self._flush)
        self.waiting: list[Waiting] = []
        self.arrived = Arrived()
        self._agent = b""
        self._kept: list[Kept] = []
        self._branches: list[Branch] = []  # of the agent that is coming, as they are here
        self._indexed: set[int] = set()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._ends: dict[Position, End | None] = {BEGINNING.position: BEGINNING}  # None: it waits to be written
        self._rows: list[_NewLine | _NewPoint] = []
        self._count = self._bytes = 0
        self._lost: set[bytes] = set()  # metadata
        self._holds: dict[bytes, str] = {}  # by the newest checkpoints that have come
        self._unswept = ExitStack()
        self._spilled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._unswept.close()

    # -- what the other side may ask ----------------------------------------------------------------------------

    def has(self, ids: Sequence[bytes]) -> set[bytes]:
        """Those of some checkpoints that are here."""
        for part in slices([mark_of(id) for id in ids if id not in self._known]):
            for row in self._view.checkpoints(f"WHERE mark IN {listed(len(part))}", part):
                self._see(self._view.point(row))
        return {id for id in ids if id in self._known}

    def has_nodes(self, digests: Collection[bytes]) -> set[bytes]:
        return self._view.has_nodes(digests) | {one for one in digests if self._proof.object(one) is not None}

    def has_chunks(self, digests: Collection[bytes]) -> set[bytes]:
        return self._view.has_chunks(digests) | {one for one in digests if self._proof.object(one) is not None}

    # -- frames -------------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """One frame. What it needs has come before."""
        match frame:
            case frames.About(uuid):
                self._begin(uuid)
            case frames.Nodes(nodes):
                for raw in nodes:
                    if len(raw) < 2:
                        raise CorruptValue("a node that is too short to be one")
                    self._proof.come.nodes[node_digest(raw)] = raw
                self.arrived.nodes += len(nodes)
                self._wait(size_of(frame))
            case frames.Chunk(data):
                if len(data) > CHUNK_MAX_BYTES:
                    raise CorruptValue(f"a chunk of {len(data):,} bytes")
                self._proof.come.chunks[chunk_digest(data)] = data
                self.arrived.chunks += 1
                self._wait(len(data))
            case frames.Records():
                self._take_records(frame)
            case frames.Payload():
                self._take_payload(frame)
            case frames.Entries(owner, entries):
                if not all(key and body_in(body) for _, key, body in entries):
                    raise CorruptValue("an entry that does not follow the format")
                self._kept += [(owner, *entry) for entry in entries]
            case Refs() if frame.uuid == self._agent:
                check_refs(frame)
                self.waiting.append(Waiting(frame, self._kept, self.arrived))
                return
            case _:
                raise CorruptValue(f"a frame at the wrong place: {type(frame).__name__}")
        self.arrived.bytes += size_of(frame)

    def _begin(self, uuid: bytes) -> None:
        self._agent, self._kept, self.arrived = uuid, [], Arrived()
        there = self._view.agent_of(uuid)
        self._branches = self._view.branches(there.a) if there is not None else []
        for branch in self._branches:
            self._ends.setdefault(branch.end.position, branch.end)

    def _wait(self, size: int) -> None:
        """Objects wait for what names them. If they are too many, they are written, and nobody sweeps until then."""
        self._proof.come.size += size
        if self._proof.come.size > COME_BYTES:
            self._unswept.close()
            self._unswept.enter_context(self._db.moment())
            self._spilled = True
            self._proof.accept()
            self._write(lambda _: None)

    # -- records ------------------------------------------------------------------------------------------------

    def _take_records(self, frame: frames.Records) -> None:
        count, chain = start = frame.count, frame.chain
        if start not in self._ends and frame.at:
            self._find(frame.at)
        if start not in self._ends:
            raise Damaged(f"records behind number {count} came, and those before them did not")
        self._index(start)
        run = _NewLine(start, [])
        for mark, key, refs, body_digest, body in frame.records:
            if len(body) > RECORD_MAX_BYTES or len(refs) % DIGEST_BYTES:
                raise CorruptValue("a record that does not follow the format")
            if body and not is_written(body, body_digest):
                raise Damaged(f"record {count + 1} is not what was written")
            self._proof.reading.trees([refs[at : at + DIGEST_BYTES] for at in range(0, len(refs), DIGEST_BYTES)])
            count, chain = count + 1, link(chain, body_digest)
            if (count, chain) in self._ends:
                run = _NewLine((count, chain), [])  # it is here already: what follows, follows that one
                continue
            if not run.records:
                self._rows.append(run)
            run.records.append(NewRecord(mark, refs, body, body_digest, key))
            self._ends[count, chain] = None
            self.arrived.records += 1
        self._grow(len(frame.records), size_of(frame))

    def _index(self, start: Position) -> None:
        """Find the records behind a position that are here already."""
        for branch in self._branches:
            if branch.b not in self._indexed and branch.records > start[0]:
                count, chain = start
                ends = []
                for record in self._view.line(branch.line, after=count):
                    count, chain = count + 1, link(chain, record.digest)
                    ends.append(End(record.r, record.r if record.marked else record.back, count, chain))
                if (count, chain) == branch.end.position:
                    self._indexed.add(branch.b)
                    self._ends.update((end.position, end) for end in ends)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _find(self, id: bytes) -> _Known | None:
        """A checkpoint that is here, and with it its position in a line."""
        known = self._known.get(id)
        if known is None and (point := self._view.find(id)) is not None:
            known = self._see(point)
        return known

    def _see(self, point: Point) -> _Known:
        if point.manifest.effects not in self._ends:
            self._ends[point.manifest.effects] = self._view.end_at(point)
        known = self._known[point.id] = _Known(point.n, point.manifest.depth)
        return known

    def _take_payload(self, frame: frames.Payload) -> None:
        id, manifest = identity(frame.manifest), Manifest.decode(frame.manifest)
        if self._find(id) is not None:
            return
        if not self._images and holds_image(manifest):
            raise NotEncrypted(
                f"{self._places[0]} has an image of a process, which holds everything that it has in memory, and"
                f" {self._places[1]} is not encrypted; nothing was imported",
                hint="`holdfast init PLACE --encrypt` makes a store that is.",
            )
        parent = self._find(manifest.parent) if manifest.parent else None
        cut = bool(manifest.parent) and parent is None
        self._check(frame, id, manifest, parent)
        roots = [root for _, root in manifest.sections] if cut else []
        if frame.lost and not self.has_nodes([manifest.metadata]):
            self._lost.add(manifest.metadata)
        elif manifest.metadata:
            roots.append(manifest.metadata)
        self._proof.reading.trees(roots)
        sealed = cut or self._proof.replay(id, manifest, frame.operations)
        over = self._find(frame.over) if cut and frame.over else None
        above = frame.over if over is not None and over.depth < manifest.depth else b""
        new = NewCheckpoint(id, frame.manifest, frame.operations, frame.key, sealed)
        self._rows.append(_NewPoint(new, manifest.effects, above if cut else manifest.parent, cut))
        self._known[id] = _Known(0, manifest.depth)
        self._holds[id] = self._holds.pop(manifest.parent, "") or f"arriving-{os.urandom(8).hex()}"
        self.arrived.checkpoints += 1
        self._grow(1, len(frame.operations))
        if sealed:
            self._flush()
            fold_below(self._db, self._known[id].n)

    def _check(self, frame: frames.Payload, id: bytes, manifest: Manifest, parent: _Known | None) -> None:
        depth = parent.depth + 1 if parent is not None else 1
        alone = frame.cut and parent is None and manifest.depth > 1
        if digest(b"operations", frame.operations) != manifest.operations:
            raise unlike(id, "has other operations than its manifest says")
        if manifest.effects not in self._ends:
            raise unlike(id, "speaks of records that did not come")
        if manifest.parent and parent is None and not frame.cut:
            raise unlike(id, "came before its parent")
        if manifest.depth != depth and not alone:
            raise unlike(id, "has an impossible depth")

    # -- writing ------------------------------------------------------------------------------------------------

    def _grow(self, rows: int, size: int) -> None:
        self._proof.accept()
        self._spilled = False
        self._count, self._bytes = self._count + rows, self._bytes + size
        if self._count >= ROWS_AT_ONCE or self._bytes >= BYTES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        """Write the rows that wait, and let a tag of nobody's hold them."""
        rows, self._rows, self._count, self._bytes = self._rows, [], 0, 0
        if not rows:
            return

        def work(change: Change) -> tuple[dict[bytes, int], dict[Position, End]]:
            numbers: dict[bytes, int] = {}
            ends: dict[Position, End] = {}
            for row in rows:
                if isinstance(row, _NewPoint):
                    numbers[row.new.id] = self._put(change, row, numbers, ends)
                    continue
                end = self._end(change, row.start, ends)
                for record in row.records:
                    end = change.put_records(0, end, [record])
                    ends[end.position] = end
            if self._lost:
                change.set_fact(LOST, b"".join(lost(change) | self._lost))
            for id in self._holds.keys() & numbers.keys():
                body = {"agent": self._agent, "at": now_us()}
                change.set_tag(Tag(0, self._holds[id], numbers[id], id, body))
            return numbers, ends

        numbers, ends = self._write(work)
        self._ends.update(ends)
        self._known.update((id, _Known(n, self._known[id].depth)) for id, n in numbers.items())
        while len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        if not self._spilled:
            self._unswept.close()

    def _write(self, work: Callable[[Change], T]) -> T:
        """Make a change together with the objects that are named, if all that they and the rows need is here."""
        named = self._proof.named
        packs = [self._db.packs.write(named.chunks.items())] if named.chunks else []
        nodes = {name: pack_node(raw) for name, raw in named.nodes.items()}
        objects = Objects(nodes, packs, frozenset(named.needs_nodes), frozenset(named.needs_chunks))

        def change(change: Change) -> T:
            change.tx.naming()
            change.put_objects(objects)
            return work(change)

        try:
            result = self._db.change(change)
        except Refused:
            for pack in packs:
                self._db.packs.discard(pack.uuid)
            raise
        self._proof.named = Brought()
        return result

    def _put(self, change: Change, row: _NewPoint, numbers: dict[bytes, int], ends: dict[Position, End]) -> int:
        above = 0
        if row.above:
            above = numbers.get(row.above) or self._known[row.above].n
            if row.above not in numbers and not change.tx.run(_THERE, (above, above)):
                raise Refused(f"checkpoint {row.above.hex()[:12]} was forgotten meanwhile")
        line = self._end(change, row.effects, ends).line
        n = change.put_checkpoint(row.new, 0 if row.cut else above, line, 0, 0)
        if row.cut:
            change.put("shallow", n, above)
        return n

    def _end(self, change: Change, position: Position, ends: dict[Position, End]) -> End:
        end = ends.get(position) or self._ends[position]
        if end is None or (end.line and position not in ends and not change.rows("record", "WHERE r = ?", (end.line,))):
            raise Gone("records that later ones build on are missing; nothing was written")
        return end

    # -- the end ------------------------------------------------------------------------------------------------

    def finish(self, *, only: Collection[str] = (), aside: bool, name: str | None) -> list[TransferredAgent]:
        """Move the refs of all agents that have come, or of some, in one transaction.

        ``aside`` lets what has parted arrive beside what is here, ``name`` is what the one agent is to be called.
        """
        self._flush()
        chosen = [one for one in self.waiting if not only or one.refs.name in only]
        for attempt in range(ATTEMPTS):
            try:
                with ExitStack() as leases:
                    held = {b: g for one in chosen for b, g in self._leases(one.refs, leases, aside=aside)}
                    moved = self._db.change(lambda change: self._land(change, chosen, held, aside, name))  # noqa: B023
                break
            except Refused as error:
                if isinstance(error, Gone):
                    raise
                if attempt == ATTEMPTS - 1:
                    raise Fenced("the branches in this store kept changing; nothing was moved") from error
        self.waiting, self._holds = [], {}
        return moved

    def plans(self, refs: Refs, sides: Sides | None = None, *, aside: bool) -> list[Plan]:
        """What is to become of an agent's branches, as it looks now."""

        def line(ref: BranchRef) -> int:
            end = self._ends.get((ref.count, ref.chain))
            return end.line if end is not None else 0

        there = self._view.agent_of(refs.uuid)
        past = Past(self._view.log(there.a) if there is not None else ())
        return plan(refs, sides or Sides(self._view, line, self._view, self._places), there, past, aside=aside)

    def _leases(self, refs: Refs, leases: ExitStack, *, aside: bool) -> list[tuple[int, int]]:
        """Become the writer of every branch that is to move."""
        found = []
        for one in self.plans(refs, aside=aside):
            if one.how == "source" and one.old is not None:
                lease = self._store._lease(refs.name, one.old, wait_s=0.0)
                leases.callback(lease.release)
                found.append((lease.b, lease.generation))
        return found

    def _land(
        self, change: Change, chosen: Sequence[Waiting], held: dict[int, int], aside: bool, name: str | None
    ) -> list[TransferredAgent]:
        def end(position: Position) -> End | None:
            return self._end(change, position, {}) if position in self._ends else None

        found = []
        for refs, kept, arrived in chosen:
            called = check_name(name if name is not None else refs.name, "an agent")
            landing = Landing(change, refs, kept, end, called)
            found.append(landing.move(arrived, self._places, held, aside=aside))
        self._let_go(change, {one.refs.uuid for one in chosen})
        return found

    def _let_go(self, change: Change, agents: Collection[bytes]) -> None:
        """Refs name what was held, or nobody will: the tags that did go, and those that nobody came back for."""
        own, old = set(self._holds.values()), now_us() - HOLD_S * 10**6
        for tag in change.tags(0):
            if tag.name in own or tag.body.get("agent") in agents or tag.body.get("at", 0) < old:
                change.drop_tag(0, tag.name)

    def give_up(self) -> None:
        """Nothing of this will be taken up again: what has arrived may be collected."""
        self._rows, self._proof.named = [], Brought()
        if self._holds:
            self._db.change(lambda change: self._let_go(change, ()))
