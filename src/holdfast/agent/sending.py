"""Sending: one agent's history as parcels, without what the other side has.

Owns the order of parcels and the walk from checkpoints and records to everything that they need. Only reads. What
always holds: everything that a parcel needs comes before it, the children of a node before the node; what is found by
its digest is asked about, many at a time, before it is read; memory is bounded by the largest checkpoint.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.agent import history
from holdfast.agent.collecting import DIGEST_BYTES, chunks, containers
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.parcels import About, BranchAbout, Chunk, Events, Last, Metadata, Nodes, Parcel, Point, Records
from holdfast.codec.values import encode
from holdfast.errors import Damaged
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, EffectRow, EventRow, bookkeeping
from holdfast.store.catalog import digest as hashed
from holdfast.store.embedded import Embedded
from holdfast.store.sealing import Values

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# Rows, records and events that are read and asked about together.
AT_ONCE = 128
_ENTRY_BYTES = 40
# Nodes in one parcel.
_PARCEL_BYTES = 2**20
# What is kept of nodes between finding them and sending them; beyond it they are read twice.
_KEPT_BYTES = 16 * 2**20
# Digests that are known to be on the other side. A set that grows beyond it begins anew.
_SETTLED_MAX = 200_000
# What only means something in one store, or is said elsewhere.
_OWN = frozenset({"name", "origins", "base", "received", "recovered", "arriving"})

Said = tuple[int, bytes, bytes]
"""An event: time, body, key."""


class Needs(Protocol):
    """What the other side has not got."""

    def nodes(self, digests: Sequence[bytes]) -> set[bytes]: ...
    def chunks(self, digests: Sequence[bytes]) -> set[bytes]: ...
    def metadata(self, digest: bytes) -> bool: ...
    def events(self, events: Sequence[Said]) -> list[Said]: ...


@dataclass(frozen=True, slots=True)
class Share:
    """What of a branch is to be sent: checkpoints above a number but those that are known, records above a count."""

    send: bool = True
    after: int = 0
    known: frozenset[bytes] = frozenset()
    records: int = 0


class Sending:
    """One agent of a store, as it was when this was made."""

    def __init__(self, store: Store, agent: AgentRow, origin: bytes | None = None) -> None:
        """``origin`` is the uuid of the store that the agent comes from, where this one only passes it on."""
        self._store = store
        self._catalog = store._catalog
        self._catalog.flush()
        self.agent = agent
        with self._catalog.snapshot():
            self.line = Line(store, agent)
            self.branches: list[BranchRow] = self._catalog.branches(agent.a)
            self.lines = [self._catalog.line(row.b) for row in self.branches]
            self.tags = self._catalog.tags(agent.a)
            self.validities = self._catalog.validities(agent.a)
            self.newest_event = self._catalog.newest()[1]
            self.newest_checkpoint = self._catalog.newest()[0]
            self.forgotten = self.line.forgotten  # reads it now
            self._forgets = _forgets(self._catalog)
        self.about = self._about(origin if origin is not None else self._catalog.uuid)
        # The branch on which a checkpoint was made, here or in an origin, as its place in the list.
        self.on: dict[int, int] = {}
        self.streams: list[list[tuple[int, int]]] = []
        for at, row in enumerate(self.branches):
            streams = [(row.b, self.newest_checkpoint)]
            streams += [(b, n) for b, n in body_of(row).get("origins", ())]
            self.streams.append(streams)
            self.on.update((b, at) for b, _ in streams)

    def _about(self, origin: bytes) -> About:
        places = {row.b: at for at, row in enumerate(self.branches)}
        found = []
        for row, line in zip(self.branches, self.lines, strict=True):
            body = body_of(row)
            more = encode({name: value for name, value in body.items() if name not in _OWN})
            shared = line.start > 0 and line.origin in places
            found.append(
                BranchAbout(
                    row.uuid, body["name"], more, row.head_id,
                    places[line.origin] if shared else -1, line.start if shared else 0, line.count, line.chain,
                )
            )  # fmt: skip
        body = self.line.body
        origins = [uuid for _, uuid, _, _ in body.get("origins", ())]
        return About(origin, self.agent.uuid, body["name"], body["created"], origins, found)

    # -- what is there ------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> Embedded:
        return self._catalog

    @property
    def path(self) -> Path:
        return self._store.path

    def forgot_since(self) -> bool:
        """Whether somebody forgot something since this was made, so that rows may be missing without being damaged."""
        return self._forgets != _forgets(self._catalog)

    def was_cut(self, at: int) -> bool:
        """Whether something of a branch's history is gone."""
        return any(self.line.cut(row) for row in self.rows(at))

    def links(self, b: int, after: int) -> list[tuple[int, int, int]]:
        return self._catalog.links(b, after)

    def tagged(self) -> dict[str, bytes]:
        return {(body := body_of(row))["name"]: body["at"] for row in self.tags}

    def judged(self) -> dict[bytes, tuple[str, str]]:
        found = ((self._catalog.checkpoint(row.n).id, body_of(row)) for row in self.validities)
        return {identity: (body["validity"], body["reason"]) for identity, body in found}

    def upto(self) -> tuple[int, bytes]:
        """How far events go, and what proves it."""
        return self.newest_event, self.proof(self.newest_event)

    def proof(self, e: int) -> bytes:
        """What tells the event of that number from another one; empty when it is gone."""
        row = next(self._catalog.events(after=e - 1, limit=1), None)
        if row is None or row.e != e:
            return b""
        return hashed(b"holdfast.event", encode([row.at, row.body, row.key]))

    def rows(self, at: int, after: int = 0, *, newest_first: bool = False) -> Iterator[CheckpointRow]:
        """The checkpoints that count as made on a branch and have a number above ``after``."""
        streams = [
            self._catalog.checkpoints(b=b, after=after, before=most + 1, newest_first=newest_first)
            for b, most in self.streams[at]
        ]
        merged = heapq.merge(*streams, key=lambda row: row.n, reverse=newest_first)
        return (row for row in merged if row.n not in self.forgotten)

    def keyed_events(self, after: int = 0) -> Iterator[EventRow]:
        """The events with a key that the agent sees, those of each agent oldest first."""
        for a in (*self.line.origins, self.agent.a):
            for row in self._catalog.events(a=a, after=after):
                if row.e > self.newest_event:
                    break
                if row.key is not None and not bookkeeping(row.key) and self.line.sees_event(row):
                    yield row

    def last(self) -> Last:
        """The last parcel of all that the agent has."""
        since = name_times(self._catalog.events(a=self.agent.a))
        tags = [(name, at, since.get(("tag", name), 0)) for name, at in self.tagged().items()]
        judged = [(one, *why, since.get(("validity", one), 0)) for one, why in self.judged().items()]
        return Last(tags, judged, self.upto())

    # -- parcels ------------------------------------------------------------------------------------------------

    def parcels(
        self, shares: Sequence[Share], needs: Needs, events_after: int = 0, *, thorough: bool = False
    ) -> Iterator[Parcel]:
        """Everything of these shares but the first and the last parcel.

        ``thorough`` also asks about what is below nodes that are there.
        """
        walk = _Walk(self._store, needs, thorough=thorough)
        ends = [share.records for share in shares]
        streams = [self._unknown(at, share) for at, share in enumerate(shares) if share.send]
        rows = heapq.merge(*streams, key=lambda row: row.n)
        while batch := list(islice(rows, AT_ONCE)):
            values = Values(self._catalog, batch)
            for row in batch:
                yield from self._checkpoint(row, values, walk, ends)
        for at, share in enumerate(shares):
            if share.send:
                yield from self._records(at, self.about.branches[at].count, ends, walk)
        events = ((row.at, row.body, row.key or b"") for row in self.keyed_events(events_after))
        while some := list(islice(events, AT_ONCE)):
            missing = needs.events(some)
            if missing:
                yield Events(missing)

    def alone(self, rows: Iterable[CheckpointRow], needs: Needs) -> Iterator[Parcel]:
        """Some checkpoints, each so that it stands alone, with the records that it speaks of."""
        walk = _Walk(self._store, needs)
        ends = [branch.start for branch in self.about.branches]
        for row in sorted(rows, key=lambda row: row.n):
            yield from self._checkpoint(row, Values(self._catalog), walk, ends, alone=True)

    def _unknown(self, at: int, share: Share) -> Iterator[CheckpointRow]:
        return (row for row in self.rows(at, share.after) if not share.known or row.id not in share.known)

    def _checkpoint(
        self, row: CheckpointRow, values: Values, walk: _Walk, ends: list[int], *, alone: bool = False
    ) -> Iterator[Parcel]:
        at = self.on[row.b]
        manifest = Manifest.decode(row.manifest)
        yield from self._records(at, manifest.effects[0], ends, walk)
        if walk.needs.metadata(manifest.metadata):
            data = self._catalog.metadata(manifest.metadata)
            if data is None:
                raise Damaged(f"the metadata of checkpoint {row.id.hex()[:12]} is missing", what=(row.id.hex(),))
            yield Metadata(data)
        tail, places = values.found(row)
        cut = self.line.cut(row) or (alone and bool(manifest.parent))
        sealed = row.sealed or cut
        extra: dict[bytes, bytes] = {}
        if (
            cut and not row.sealed
        ):  # perhaps the one before it is only hidden here, so that it rests on what is not sent
            extra = history.state_of(self._catalog, row).unstored()
        certain = [digest for digest, _, _ in places]
        if sealed:
            certain += [digest for _, digest in manifest.sections]
        loose = [*containers(row.operations), *containers(tail or b"")]
        yield from walk.send(certain, loose, [*chunks(row.operations), *chunks(tail or b"")], extra)
        above = self.line.over.get(row.n, 0) if cut else 0
        over = self._catalog.checkpoint(above).id if above else b""
        yield Point(at, row.depth, sealed, cut, row.manifest, row.operations, row.key, tail, places, over)

    def _records(self, at: int, upto: int, ends: list[int], walk: _Walk) -> Iterator[Parcel]:
        """Records of a branch's line up to a number, those that it inherits first."""
        about = self.about.branches[at]
        if about.origin >= 0:
            yield from self._records(about.origin, about.start, ends, walk)
            ends[at] = max(ends[at], about.start)
        if upto <= ends[at]:
            return
        rows = self._catalog.effects(self.branches[at].b, after=ends[at], before=upto + 1)
        batch: list[EffectRow] = []
        size = 0
        for row in rows:
            batch.append(row)
            size += len(row.body)
            if len(batch) == AT_ONCE or size >= _PARCEL_BYTES or row.i == upto:
                refs = [one.refs[i : i + DIGEST_BYTES] for one in batch for i in range(0, len(one.refs), DIGEST_BYTES)]
                loose = [digest for one in batch for digest in containers(one.body)]
                yield from walk.send(refs, loose, [digest for one in batch for digest in chunks(one.body)])
                yield Records(at, batch[0].i, [(one.mark, one.refs, one.body) for one in batch])
                batch, size = [], 0
        ends[at] = upto


def name_times(events: Iterator[EventRow]) -> dict[tuple[str, Any], int]:
    """When each tag and each judgement got to be what it is."""
    found: dict[tuple[str, Any], int] = {}
    for event in events:
        said = body_of(event)
        match said.get("what"):
            case "tag" | "untag":
                found["tag", said["name"]] = event.at
            case "validity":
                found["validity", said["at"]] = event.at
            case "forget":
                found.update({("tag", name): event.at for name in said["untag"]})
            case "clone":
                found.update({("tag", name): event.at for name, _ in said["tags"]})
                found.update({("validity", identity): event.at for identity, _, _ in said["validity"]})
    return found


def _forgets(catalog: Embedded) -> int:
    return max((event.e for event, _ in catalog.forgotten()), default=0)


def _below(node: bytes) -> Iterator[tuple[bytes, bool]]:
    """The nodes that a node names, and whether they are certain to be there."""
    if node[1] > 0:
        for at in range(2, len(node), _ENTRY_BYTES):
            yield node[at : at + DIGEST_BYTES], True
    else:
        for digest in containers(node):
            yield digest, False


class _Walk:
    """From digests to parcels with what they name."""

    def __init__(self, store: Store, needs: Needs, *, thorough: bool = False) -> None:
        self._catalog = store._catalog
        self._thorough = thorough
        self.needs = needs
        self._settled: set[bytes] = set()

    def send(
        self,
        certain: Iterable[bytes],
        loose: Iterable[bytes],
        bulk: Iterable[bytes],
        extra: dict[bytes, bytes] | None = None,
    ) -> Iterator[Parcel]:
        """What is missing of some nodes and all below them, and of some chunks.

        ``loose`` were found by their bytes and may be no references at all; ``extra`` are nodes that are not stored.
        """
        waiting = dict.fromkeys(loose, False) | dict.fromkeys(certain, True)
        found_chunks = dict.fromkeys(bulk)
        levels: list[list[bytes]] = []
        kept: dict[bytes, bytes] = {}
        size = 0
        while waiting := {digest: sure for digest, sure in waiting.items() if digest not in self._settled}:
            missing = self.needs.nodes(list(waiting))
            self._settle(waiting)
            level: list[bytes] = []
            deeper: dict[bytes, bool] = {}
            wanted = [digest for digest in waiting if self._thorough or digest in missing]
            for digest, node in self._read(wanted, extra or {}):
                if node is None:
                    if waiting[digest]:
                        short = digest.hex()[:16]
                        raise Damaged(f"node {short} is missing", what=(f"node {short}",))
                    continue
                if digest in missing:
                    level.append(digest)
                    size += len(node)
                    if size <= _KEPT_BYTES:
                        kept[digest] = node
                found_chunks.update(dict.fromkeys(chunks(node)) if node[1] == 0 else {})
                for child, sure in _below(node):
                    deeper[child] = deeper.get(child, False) or sure
            levels.append(level)
            waiting = deeper
        yield from self._chunks(list(found_chunks))
        for level in reversed(levels):
            yield from self._nodes(level, kept, extra or {})

    def _settle(self, digests: Iterable[bytes]) -> None:
        if len(self._settled) > _SETTLED_MAX:
            self._settled.clear()
        self._settled.update(digests)

    def _read(self, digests: Sequence[bytes], extra: dict[bytes, bytes]) -> Iterator[tuple[bytes, bytes | None]]:
        for start in range(0, len(digests), AT_ONCE):
            some = digests[start : start + AT_ONCE]
            found = self._catalog.nodes([digest for digest in some if digest not in extra])
            for digest in some:
                yield digest, extra.get(digest) or found.get(digest)

    def _nodes(self, level: Sequence[bytes], kept: dict[bytes, bytes], extra: dict[bytes, bytes]) -> Iterator[Nodes]:
        batch: list[bytes] = []
        size = 0
        for start in range(0, len(level), AT_ONCE):
            some = level[start : start + AT_ONCE]
            again = dict(self._read([digest for digest in some if digest not in kept], extra))
            for digest in some:
                node = kept.get(digest) or again[digest]
                if node is None:
                    raise Damaged(f"node {digest.hex()[:16]} went away", what=(f"node {digest.hex()[:16]}",))
                batch.append(node)
                size += len(node)
                if size >= _PARCEL_BYTES or len(batch) == AT_ONCE:
                    yield Nodes(batch)
                    batch, size = [], 0
        if batch:
            yield Nodes(batch)

    def _chunks(self, digests: Sequence[bytes]) -> Iterator[Chunk]:
        new = [digest for digest in digests if digest not in self._settled]
        missing = self.needs.chunks(new) if new else set()
        self._settle(new)
        for digest in new:
            # Found by its bytes: a text may look like one. What is really missing shows when the state is proven.
            if digest in missing and self._catalog.chunk_row(digest) is not None:
                for data in self._catalog.chunks([digest]):
                    yield Chunk(data)
