"""Transfer: what another store lacks of some agents goes there, and nothing else.

Owns sending: the walk from refs down to what the other side has, and the order of frames. Arrival proves and writes
them. What always holds: all of it is sent as of one moment of the source; everything that a frame needs comes before
it; what is found by its digest is asked about, many at a time, before it is read; agents that are the same on both
sides are told by their heads, and not looked at any further.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.agent import crashes
from holdfast.agent.arrival import ATTEMPTS, Arrival
from holdfast.agent.fleet import whole
from holdfast.agent.frames import TOGETHER, About, Chunk, Entries, Frame, Nodes, Payload, Records, Refs, beside
from holdfast.agent.graph import Graph
from holdfast.agent.history import children, named_in
from holdfast.agent.layers import half_way, holds_image
from holdfast.agent.metadata import lost
from holdfast.agent.names import IMAGES
from holdfast.agent.refs import (
    Kept,
    Past,
    Plan,
    Sides,
    TransferredAgent,
    another_agent,
    missing,
    news,
    read_refs,
    received,
    unmoved,
)
from holdfast.errors import (
    BadOption,
    Contention,
    Damaged,
    Forgotten,
    HoldfastError,
    NotEncrypted,
    ReadOnly,
    StoreBusy,
    StoreWentBack,
    Unavailable,
)
from holdfast.store.catalog import Progress, View, listed, quietly, slices
from holdfast.store.database import Contents
from holdfast.store.engine import Refused
from holdfast.store.manifest import Position
from holdfast.store.rows import Agent, Branch, Point, Record, body_bytes, link

if TYPE_CHECKING:
    from holdfast.agent.store import Store

log = logging.getLogger("holdfast.store")

FRAME_BYTES = 2**20
"""Of records in one frame."""

_AT_ONCE = 64
_SETTLED_MAX = 200_000
_LOG = "SELECT max(a), count(*), coalesce(max(e), 0) FROM log"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What went from one store to another.

    Each of ``agents`` has its ``name``, its ``status`` (``new``, ``updated``, ``unchanged``, or ``ahead``: the other
    side is), what ``arrived``, and ``beside``: branches that arrived under another name. ``left_out`` are the agents
    that stayed, because they hold images of processes.
    """

    source: str
    dest: str
    agents: list[TransferredAgent]
    left_out: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of content that moved, before compression."""
        return sum(agent.arrived.bytes for agent in self.agents)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        agents = [agent.to_json() for agent in self.agents]
        return {
            "source": self.source, "dest": self.dest, "bytes": self.bytes, "agents": agents, "left_out": self.left_out,
        }  # fmt: skip


class HoldsImage(Exception):
    """A checkpoint that was to be sent holds an image of a process, and those are left out."""


def transfer(
    source: Store,
    dest: Store,
    agents: Sequence[str] = (),
    *,
    beside: bool = False,
    new_name: str | None = None,
    images: bool | None = False,
    failed: dict[str, Contention | Damaged] | None = None,
    progress: Progress | None = None,
) -> TransferReport:
    """Bring what ``dest`` lacks of some agents, or of all, from ``source``.

    Agents that hold images of processes only with ``images``; None: they go as all others, and ``dest`` is as safe as
    the source. ``failed``: agents that cannot be brought are put there, each with the reason, and the others are
    brought.
    """
    if source._db.uuid == dest._db.uuid:
        raise BadOption("both are the same store, or copies of one", hint="Name two different stores.")
    if dest._readonly:
        raise ReadOnly("the store to be written to was opened read-only")
    if images and not dest.encrypted:
        raise NotEncrypted(
            f"{dest.place} is not encrypted, and an image holds everything that a process has in memory",
            hint="Make an encrypted store there, or leave the images out.",
        )
    source.flush()
    named = [source._agent_row(name).a for name in dict.fromkeys(agents)]
    with source._db.moment() as contents:
        going = named if new_name is not None else family(contents.view, named)
        chosen = [contents.view.agent_at(a) for a in going] or whole(contents.view)
        if images and named:
            also = [source._db.view.agent(f"{IMAGES}{row.name}") for row in chosen]
            chosen += [row for row in also if row is not None and row.a not in named]
        if new_name is not None and len(chosen) != 1:
            raise BadOption("another name can be given to one agent at a time", hint="Name that agent.")
        if images is not None:  # of a restore test nobody is to know
            _say_half_way(contents.view, chosen)
        same = set() if named else _same(contents.view, dest._db.view, source._db.uuid)
        moving = _Moving(source, dest, contents, beside, new_name, images is not False, progress or quietly)
        moved: dict[int, TransferredAgent] = {}
        left: list[str] = []
        for row in sorted(chosen, key=lambda row: -row.name.count("/")):  # so that no child is older than its parent
            try:
                if failed and (error := _child_of(row, failed)) is not None:
                    raise error
                moved[row.a] = TransferredAgent(row.name, "unchanged") if row.a in same else moving.agent(row)
            except HoldsImage:
                if row.a in named:
                    raise BadOption(
                        f"{row.name} holds images of processes, which are left out",
                        hint="Say that they are meant: --images. The other store has to be encrypted.",
                    ) from None
                left.append(row.name)
            except (Contention, Damaged) as error:
                if failed is None or isinstance(error, (StoreBusy, StoreWentBack)):  # that is about all of them
                    raise
                failed[row.name] = error
            except Unavailable as error:
                if came := sum(one.status != "unchanged" for one in moved.values()):
                    there = f"{came} of {len(chosen)} agents arrived before that, and another attempt brings the others"
                    error.message = f"{error.message.removesuffix('; nothing was changed')}; {there}"
                raise
    left.sort()
    return TransferReport(source.place, dest.place, [moved[row.a] for row in chosen if row.a in moved], left)


def _say_half_way(view: View, chosen: Iterable[Agent]) -> None:
    """Of agents that go, whose directories do not, and are half-way."""
    half = half_way(view)
    for row in chosen if half else ():
        for path in filter(None, (half.get(branch.uuid.hex()) for branch in view.branches(row.a))):
            log.warning(
                "%s: %s is half-way between two checkpoints; a copy has no directory, and does not finish that",
                row.name, path,
            )  # fmt: skip


def _child_of(agent: Agent, failed: Mapping[str, HoldfastError]) -> HoldfastError | None:
    """Why a child of an agent was not brought, if one was not."""
    return next((error for name, error in failed.items() if name.startswith(f"{agent.name}/")), None)


def family(view: View, named: Sequence[int]) -> list[int]:
    """Some agents, and those whose names are NAME/...: their children, without which they could not go on."""
    if not named:
        return []
    called = {one.a: one.name for one in view.census()}
    above = tuple(f"{called[a]}/" for a in named if a in called)
    arriving = {one.a for one in view.branches() if one.body.get("arriving")}
    children = sorted((called[a], a) for a in called if called[a].startswith(above) and a not in arriving)
    return list(dict.fromkeys([*named, *(a for _, a in children)]))


def _same(ours: View, theirs: View, store: bytes) -> set[int]:
    """The agents whose branches stand where they stand there, and whose logs say nothing new: told by few queries."""
    there = {row.uuid: row for row in theirs.agents()}
    standing = {(row.a, row.uuid): (row.id, row.end.position) for row in theirs.branches()}
    logs = {a: (count, newest) for a, count, newest in ours.reader.run(f"{_LOG} GROUP BY a")}
    found = {
        row.a: other.a
        for row in ours.agents()
        if (other := there.get(row.uuid)) is not None and received(other).get(store) == logs.get(row.a)
    }
    for row in ours.branches():
        uuids = beside(row.uuid, store), row.uuid
        if row.a in found and (row.id, row.end.position) not in [standing.get((found[row.a], one)) for one in uuids]:
            del found[row.a]
    return set(found)


class _Moving(NamedTuple):
    """A transfer of agents out of one moment of a store."""

    source: Store
    dest: Store
    contents: Contents
    aside: bool
    name: str | None
    images: bool
    progress: Progress

    def agent(self, agent: Agent) -> TransferredAgent:
        thorough = False
        for left in reversed(range(ATTEMPTS)):
            try:
                return self._attempt(agent, thorough=thorough)
            except (Refused, Forgotten):  # something went away over there: what is left stays
                if not left:
                    raise
            except Damaged:
                # A transfer that was cut short may have left a node over there without what is below it.
                if thorough or not left:
                    raise
                thorough = True
        raise Refused("the other store changes all the time")

    def _attempt(self, agent: Agent, *, thorough: bool) -> TransferredAgent:
        ours, theirs = self.contents.view, self.dest._db.view
        places = self.source.place, self.dest.place
        there, name = theirs.agent_of(agent.uuid), self.name or agent.name
        if there is None and theirs.agent(name) is not None:
            raise another_agent(self.dest.place, name, agent.name)
        past = Past(ours.log(agent.a))
        ((_, count, newest),) = ours.reader.run(f"{_LOG} WHERE a = ?", (agent.a,))
        refs = read_refs(ours, agent, self.source._db.uuid, past, (count, newest))
        ends = {branch.uuid: branch.line for branch in ours.branches(agent.a)}
        with Arrival(self.dest, self.source.place) as into:
            plans = into.plans(refs, Sides(ours, lambda ref: ends[ref.uuid], theirs, places), aside=self.aside)
            kept = missing(theirs, kept_by(ours, agent, past), agent.uuid)
            moving = [one for one in plans if one.how in {"new", "source"}]
            if there is not None and not moving and not any(news(theirs, refs, kept, Past(theirs.log(there.a)))):
                return unmoved(agent.name, plans)
            for one in moving:
                if one.old is not None and self.dest._db.leases.alive(one.old.uuid, one.old.generation):
                    self.dest._lease(agent.name, one.old, wait_s=0.0).release()  # raises, unless it is free by now
            sending = Sending(self.contents, into, images=self.images, thorough=thorough)
            for frame in sending.frames(agent, refs, kept, plans, self.progress):
                into.take(frame)
            return into.finish(aside=self.aside, name=self.name)[0]


def kept_by(view: View, agent: Agent, past: Past) -> list[Kept]:
    """What an agent keeps under keys; a clone also what it was copied with, which comes first."""
    owners = {agent.a: agent.uuid}
    found = past.kept
    if agent.body.get("of"):
        owners |= {other.a: other.uuid for other in view.agents()}
        graph = Graph(view, agent)
        numbers = list(graph.numbers)
        keys = {
            row.key for part in slices(numbers) for row in view.checkpoints(f"WHERE n IN {listed(len(part))}", part)
        } | {*crashes.keys(agent)}
        found = [*(entry for entry in graph.under(list(keys - {b""})) if entry.a != agent.a), *found]
    return [(owners.get(one.a, agent.uuid), one.at, one.key, body_bytes(one.body)) for one in found]


class Sending:
    """Agents of one moment as frames, without what the other side has."""

    def __init__(self, contents: Contents, there: Arrival | None, *, images: bool, thorough: bool = False) -> None:
        """Without the other side, all of it. ``thorough`` also asks about what is below nodes that are there.

        Without ``images``, whatever would send one raises ``HoldsImage`` before anything of its agent is sent.
        """
        self._view, self._packs = contents
        self._images = images
        self._there = there
        self._thorough = thorough
        self._sent: set[int] = set()
        # Records that the other side has: their positions, and a checkpoint there that has it, until that was said.
        self._lines: dict[int, tuple[Position, bytes]] = {}
        self._settled: set[bytes] = set()
        self._lost = lost(contents.view)

    def frames(
        self, agent: Agent, refs: Refs, kept: Sequence[Kept], plans: Sequence[Plan], progress: Progress
    ) -> Iterator[Frame]:
        """Everything of an agent. ``plans`` say what the other side has of its branches."""
        yield About(agent.uuid)
        branches = [branch for branch in self._view.branches(agent.a) if not branch.body.get("arriving")]
        old = {one.ref.uuid: one.old for one in plans}
        for branch in branches:
            self._seed(branch, old.get(branch.uuid))
        graph = Graph(self._view, agent)
        ways = [self._way(n) for n in graph.starts]
        total, done = sum(map(len, ways)), 0
        for way in ways:
            for point in self._points(way):
                yield from self._checkpoint(point)
                done += 1
                progress(f"checkpoints of {agent.name}", done, total)
        for branch in branches:
            yield from self._records(branch.line, branch.end.position)
        for owner in dict.fromkeys(one[0] for one in kept):
            entries = iter([one[1:] for one in kept if one[0] == owner])
            while some := list(islice(entries, TOGETHER)):
                yield Entries(owner, some)
        yield refs

    def _way(self, n: int) -> array[int]:
        """A checkpoint and its ancestors that the other side lacks, newest first."""
        way = array("q")
        walk = (point for point in self._view.walk(n, over=True))
        step = 8
        while some := list(islice(walk, step)):
            known = self._there.has([point.id for point in some]) if self._there is not None else set()
            step = min(2 * step, TOGETHER)
            for point in some:
                if point.id in known:
                    self._lines.setdefault(point.row.line, (point.manifest.effects, point.id))
                if point.id in known or point.n in self._sent:
                    return way
                if not self._images and holds_image(point.manifest):
                    raise HoldsImage
                way.append(point.n)
                self._sent.add(point.n)
        return way

    def _points(self, way: array[int]) -> Iterator[Point]:
        """Oldest first."""
        way.reverse()
        for start in range(0, len(way), _AT_ONCE):
            some = way[start : start + _AT_ONCE]
            rows = {row.n: row for row in self._view.checkpoints(f"WHERE n IN {listed(len(some))}", some)}
            yield from (self._view.point(rows[n]) for n in some)

    def _checkpoint(self, point: Point) -> Iterator[Frame]:
        manifest = point.manifest
        yield from self._records(point.row.line, manifest.effects)
        # The nodes of a state are sent where nobody can make them: its parent was forgotten, here and there.
        alone = point.cut and not (self._there is not None and self._there.has([manifest.parent]))
        roots = [root for _, root in manifest.sections] if alone else []
        operations = self._view.operations(point)
        gone = manifest.metadata in self._lost
        yield from self._objects([*roots, manifest.metadata] if manifest.metadata and not gone else roots, [operations])
        over = b""
        for _, above in self._view.rows("shallow", "WHERE n = ?", (point.n,)) if point.cut else ():
            over = self._view.point(above).id if above else b""
        yield Payload(point.raw, operations, point.row.key, point.cut, over, gone)

    # -- records ------------------------------------------------------------------------------------------------

    def _seed(self, branch: Branch, old: Branch | None) -> None:
        """See whether the other side has the beginning of a branch's line, up to where it ends there."""
        if old is not None and 0 < old.records <= branch.records:
            found = self._view.line(branch.line, after=old.records)
            chain = old.chain
            for record in found:
                chain = link(chain, record.digest)
            if chain == branch.chain:
                self._lines[found[0].prev if found else branch.line] = old.end.position, b""

    def _records(self, r: int, end: Position) -> Iterator[Frame]:
        """The records of a line, up to one, that the other side lacks."""
        new: list[Record] = []
        at, upto = r, end[0]
        while at and at not in self._lines:
            some = self._view.line(at, after=max(0, upto - TOGETHER))
            if not some:
                raise Damaged(f"the line that ends in record {r} has a gap", what=(f"record {at}",))
            for record in reversed(some):
                if record.r in self._lines:
                    break
                new.append(record)
            at, upto = new[-1].prev, new[-1].i - 1
        (count, chain), known = self._lines.get(at, ((0, b""), b""))
        if known:
            yield Records(count, chain, known, [])
            self._lines[at] = (count, chain), b""
        new.reverse()
        for some in _portions(new):
            named = [record.refs[at] for record in some for at in range(len(record.refs))]
            yield from self._objects(named, [record.body for record in some])
            yield Records(
                count, chain, b"", [(one.mark, one.key, b"".join(one.refs), one.digest, one.body) for one in some]
            )
            for record in some:
                count, chain = count + 1, link(chain, record.digest)
                self._lines[record.r] = (count, chain), b""
        if (count, chain) != end:
            raise Damaged(f"the line that ends in record {r} is not the one that was written", what=(f"record {r}",))

    # -- nodes and chunks ---------------------------------------------------------------------------------------

    def _objects(self, roots: Iterable[bytes], texts: Iterable[bytes]) -> Iterator[Frame]:
        """What the other side lacks of some trees, and of what encodings may name, with all that is below it."""
        waiting = dict.fromkeys(roots, True)
        chunks: dict[bytes, None] = {}

        def look(data: bytes) -> None:
            trees, bulk = named_in(data)
            waiting.update((one, False) for one in trees if one not in waiting)
            chunks.update(dict.fromkeys(bulk))

        for text in texts:
            look(text)
        while waiting:
            some = {one: waiting.pop(one) for one in list(islice(waiting, _AT_ONCE))}
            some = {one: sure for one, sure in some.items() if one not in self._settled}
            there = self._there.has_nodes(some) if self._there is not None else set()
            self._settle(some)
            found = self._view.nodes([one for one in some if self._thorough or one not in there])
            for one, sure in some.items():
                if sure and one not in there and one not in found:
                    raise Damaged(f"node {one.hex()[:16]} is missing", what=(f"node {one.hex()[:16]}",))
            if lacking := [raw for one, raw in found.items() if one not in there]:
                yield Nodes(lacking)
            for raw in found.values():
                if raw[1]:
                    waiting.update(dict.fromkeys(children(raw), True))
                else:
                    look(raw)
        yield from self._chunks([one for one in chunks if one not in self._settled])

    def _settle(self, digests: Iterable[bytes]) -> None:
        if len(self._settled) > _SETTLED_MAX:
            self._settled.clear()
        self._settled.update(digests)

    def _chunks(self, digests: Sequence[bytes]) -> Iterator[Frame]:
        there = self._there.has_chunks(digests) if self._there is not None else set()
        self._settle(digests)
        # Found by their bytes: a text may look like one. What is really missing shows when it is proven.
        for one in self._view.chunks(digest for digest in digests if digest not in there):
            yield from map(Chunk, self._packs.read(self._view, [one]))


def _portions(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Records in portions of one frame each."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.body)
        if len(batch) == TOGETHER or size >= FRAME_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
