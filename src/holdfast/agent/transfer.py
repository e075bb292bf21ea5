"""Transfer: what another store lacks of an agent goes there, and nothing else.

Owns the comparison of two stores and the decision what moves; sending and receiving do it. What always holds: a branch
only ever moves forward to a history that contains its own; where both sides have gone on, nothing is mixed: it is an
error, or the other history arrives beside it under a name of its own; nothing is removed at the other end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.agent.parcels import Last
from holdfast.agent.receiving import Arrived, Receiver, Target
from holdfast.agent.sending import AT_ONCE, Sending, Share, name_times
from holdfast.errors import BadOption, Damaged, Fenced, HistoriesDiverged, ReadOnly
from holdfast.store.bodies import body_of
from holdfast.store.catalog import (
    AgentRow,
    BranchRow,
    CheckpointRow,
    EventRow,
    Progress,
    digest,
    effect_chain,
    quietly,
    receive_key,
)

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# How often it is begun anew because one of the stores changed meanwhile.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class TransferredAgent:
    """One agent of a transfer. ``status``: ``new``, ``updated``, ``unchanged``, or ``ahead`` (the other side is)."""

    name: str
    status: str
    arrived: Arrived = field(default_factory=Arrived)
    beside: list[str] = field(default_factory=list)
    """Branches that arrived under another name, because both sides had gone on."""

    def to_json(self) -> dict[str, Any]:
        found = self.arrived
        return {
            "agent": self.name, "status": self.status, "checkpoints": found.checkpoints, "effects": found.records,
            "events": found.events, "nodes": found.nodes, "chunks": found.chunks, "bytes": found.bytes,
            "branches": found.branches, "beside": self.beside, "left_out": found.left_out,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What went from one store to another."""

    source: str
    dest: str
    agents: list[TransferredAgent]

    @property
    def bytes(self) -> int:
        """Bytes of content that moved, before compression."""
        return sum(agent.arrived.bytes for agent in self.agents)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "dest": self.dest,
            "bytes": self.bytes,
            "agents": [agent.to_json() for agent in self.agents],
        }


def transfer(
    source: Store,
    dest: Store,
    agents: Sequence[str] = (),
    *,
    beside: bool = False,
    new_name: str | None = None,
    progress: Progress | None = None,
    origin: bytes | None = None,
) -> TransferReport:
    """Bring what ``dest`` lacks of some agents, or of all, from ``source``.

    ``origin`` is the uuid of the store that they come from, where ``source`` only passes them on.
    """
    if source._catalog.uuid == dest._catalog.uuid:
        raise BadOption("both are the same store, or copies of one", hint="Name two different stores.")
    if dest._readonly:
        raise ReadOnly("the store to be written to was opened read-only")
    rows = [source._agent_row(name) for name in agents] if agents else source._agents()
    if new_name is not None and len(rows) != 1:
        raise BadOption("another name can be given to one agent at a time", hint="Name that agent.")
    report = progress or quietly
    moved = [_agent(source, dest, row, origin, beside=beside, new_name=new_name, progress=report) for row in rows]
    return TransferReport(str(source.path), str(dest.path), moved)


class _MovedMeanwhile(Exception):
    """A branch at the other end is not where it was when the two were compared."""


def _agent(
    source: Store,
    dest: Store,
    agent: AgentRow,
    origin: bytes | None,
    *,
    beside: bool,
    new_name: str | None,
    progress: Progress,
) -> TransferredAgent:
    thorough = False
    for attempt in range(1, _ATTEMPTS + 1):
        sending = Sending(source, agent, origin)
        try:
            moving = _Transfer(sending, dest, beside=beside, new_name=new_name, progress=progress)
            return moving.run(thorough=thorough)
        except _MovedMeanwhile as error:
            if attempt == _ATTEMPTS:
                raise Fenced("the other store's branch moves all the time; nothing more was written") from error
        except Damaged:
            # A removal at the source may have taken away what was about to be sent. One over there may have taken
            # what is below a node that an interrupted transfer left. What arrived stays.
            if attempt == _ATTEMPTS or (thorough and not sending.forgot_since()):
                raise
            thorough = True
    raise Fenced("the stores change all the time")


@dataclass(frozen=True, slots=True)
class _Relation:
    """How a branch here relates to its counterpart: ``same``, ``source`` or ``dest`` is ahead, or ``diverged``.

    ``common`` is the newest checkpoint that both have, as the source has it.
    """

    how: str
    common: CheckpointRow | None = None
    known: frozenset[bytes] = frozenset()


class _Transfer:
    def __init__(
        self, sending: Sending, dest: Store, *, beside: bool, new_name: str | None, progress: Progress
    ) -> None:
        self._sending = sending
        self._dest = dest
        self._beside = beside
        self._progress = progress
        self._into = Receiver(dest, sending.about, name=new_name)
        self._heads: list[int] = []
        self._ahead = False
        self._besides: list[str] = []

    def run(self, *, thorough: bool) -> TransferredAgent:
        sending, into = self._sending, self._into
        name = sending.about.name
        there = into.agent
        if there is None and self._dest._catalog.agent(name_key(into.name)) is not None:
            raise HistoriesDiverged(
                f"{self._dest.path} has another agent {into.name!r}, which is not this one",
                agent=name,
                hint="Give it another name on the way: new_name=..., or --as NAME.",
            )
        targets, shares = self._plan(there)
        last, after = self._last(there)
        if there is not None and not self._heads and not last.tags and not last.validity and not self._news(after):
            return TransferredAgent(name, "ahead" if self._ahead else "unchanged")
        with into:
            into.begin(targets, held=self._heads)
            if into.moved:
                raise _MovedMeanwhile
            total = sum(self._count(at, share) for at, share in enumerate(shares) if share.send)
            done = 0
            for parcel in sending.parcels(shares, into, after, thorough=thorough):
                into.take(parcel)
                if into.arrived.checkpoints != done:
                    done = into.arrived.checkpoints
                    self._progress(f"checkpoints of {name}", done, max(done, total))
            into.finish(last, heads=self._heads)
        return TransferredAgent(name, "new" if there is None else "updated", into.arrived, self._besides)

    def _count(self, at: int, share: Share) -> int:
        return sum(len(self._sending.links(b, share.after)) for b, _ in self._sending.streams[at])

    # -- branches -----------------------------------------------------------------------------------------------

    def _plan(self, there: AgentRow | None) -> tuple[list[Target], list[Share]]:
        about = self._sending.about
        rows = self._dest._catalog.branches(there.a) if there is not None else []
        by_uuid = {row.uuid: row for row in rows}
        taken = {str(body_of(row)["name"]): row for row in rows}
        targets, shares = [], []
        for at, branch in enumerate(about.branches):
            # Where this branch arrived beside its namesake before, it goes on there.
            own = digest(b"holdfast.beside", branch.uuid + about.store)[:16]
            row = by_uuid.get(own) or by_uuid.get(branch.uuid)
            if row is None and branch.name in taken:
                row = taken[branch.name]
                relation = _Relation("diverged")
            elif row is None:
                targets.append(Target(branch.uuid, branch.name))
                shares.append(Share(records=branch.start))
                self._heads.append(at)
                continue
            else:
                relation = self._relation(at, there, row)
            target, share = self._share(at, there, row, relation, own)
            targets.append(target)
            shares.append(share)
        return targets, shares

    def _share(
        self, at: int, there: AgentRow | None, row: BranchRow, relation: _Relation, own: bytes
    ) -> tuple[Target, Share]:
        name = str(body_of(row)["name"])
        count = self._dest._catalog.line(row.b).count
        if relation.how in {"same", "dest"}:
            self._ahead = self._ahead or relation.how == "dest"
            return Target(row.uuid, name, row), Share(send=False, records=count)
        if relation.how == "source":
            self._heads.append(at)
            after = relation.common.n if relation.common is not None and not relation.known else 0
            return Target(row.uuid, name, row), Share(after=after, known=relation.known, records=count)
        if not self._beside or row.uuid == own or there is None:
            raise self._diverged(at, row, name)
        self._heads.append(at)
        common = relation.common
        fork = self._row_there(there, row, common.id) if common is not None else None
        name = self._free_name(there, name)
        self._besides.append(name)
        records = Manifest.decode(common.manifest).effects[0] if common is not None else 0
        return Target(own, name, None, fork), Share(after=common.n if common is not None else 0, records=records)

    def _diverged(self, at: int, row: BranchRow, name: str) -> HistoriesDiverged:
        about = self._sending.about
        ours, theirs = about.branches[at].head.hex(), row.head_id.hex()
        return HistoriesDiverged(
            f"branch {name!r} of {about.name!r} has gone on in both stores: it stands at {ours[:12] or 'nothing'} in"
            f" {self._sending.path} and at {theirs[:12] or 'nothing'} in {self._dest.path}",
            agent=about.name,
            branch=name,
            source_head=ours,
            dest_head=theirs,
            hint="Let it arrive under a name of its own (beside=True, --beside), then compare the two and go on with"
            " one; or roll one of them back to where they parted.",
        )

    def _free_name(self, there: AgentRow, name: str) -> str:
        used = {*(other for other, _ in self._dest._branches(there.a)), *self._dest._tags(there.a)}
        used |= {branch.name for branch in self._sending.about.branches}
        base = f"{name}.{self._sending.about.store.hex()[:8]}"
        return next(one for one in (base, *(f"{base}-{number}" for number in range(2, 10_000))) if one not in used)

    def _row_there(self, there: AgentRow, row: BranchRow, identity: bytes) -> CheckpointRow | None:
        return next((found for found in Line(self._dest, there, row).rows() if found.id == identity), None)

    # -- comparing ----------------------------------------------------------------------------------------------

    def _relation(self, at: int, there: AgentRow | None, row: BranchRow) -> _Relation:
        if there is None:
            return _Relation("source")
        rows, common, known = self._compare_rows(at, there, row)
        line = self._compare_lines(at, row, common)
        ahead = {rows, line} - {"same"}
        how = ahead.pop() if len(ahead) == 1 else "diverged" if ahead else "same"
        newest = next(Line(self._dest, there, row).rows(limit=1), None)
        standing = self._sending.about.branches[at].head
        if how == "source" and row.head_id != standing and not self._unmoved(at, there, row, newest):
            how = "diverged"
        elif how == "same" and standing and row.head_id != standing:
            how = "source" if self._moved_later(at, there, row) else "dest"
        return _Relation(how, common, known)

    def _compare_rows(
        self, at: int, there: AgentRow, row: BranchRow
    ) -> tuple[str, CheckpointRow | None, frozenset[bytes]]:
        """Who has more checkpoints on a branch, and the newest one that both have."""
        ours = next(self._sending.rows(at, newest_first=True), None)
        theirs = next(Line(self._dest, there, row).rows(limit=1), None)
        if theirs is None:
            begun = body_of(row)["from"] if row.uuid != self._sending.about.branches[at].uuid else b""
            common = next((one for one in self._sending.rows(at, newest_first=True) if one.id == begun), None)
            return ("source" if ours is not None and ours != common else "same"), common, frozenset()
        common = next((one for one in self._sending.rows(at, newest_first=True) if one.id == theirs.id), None)
        if common is not None:
            return ("same" if ours is not None and ours.n == common.n else "source"), common, frozenset()
        known = frozenset(one.id for one in Line(self._dest, there, row).rows())
        # Perhaps the source has only forgotten the newest that is there: then what is there came from it.
        forgot = self._received(there, row) and (self._sending.forgotten or self._sending.was_cut(at))
        if ours is None or ours.id in known:
            return ("same" if forgot else "dest"), ours, frozenset()
        common = next((one for one in self._sending.rows(at, newest_first=True) if one.id in known), None)
        if forgot:
            return "source", common, known
        return "diverged", common, frozenset()

    def _compare_lines(self, at: int, row: BranchRow, common: CheckpointRow | None) -> str:
        about = self._sending.about.branches[at]
        theirs = self._dest._catalog.line(row.b)
        if (theirs.count, theirs.chain) == (about.count, about.chain):
            return "same"
        start = Manifest.decode(common.manifest).effects if common is not None else (0, b"")
        shorter = min(theirs.count, about.count)
        if start[0] > shorter:
            start = (0, b"")
        ends = []
        for catalog, b in (
            (self._sending.catalog, self._sending.branches[at].b),
            (self._dest._catalog, row.b),
        ):
            end = start[1]
            for record in catalog.effects(b, after=start[0], before=shorter + 1):
                end = effect_chain(end, record.body)
            ends.append(end)
        if ends[0] != ends[1]:
            return "diverged"
        return "source" if about.count > theirs.count else "dest"

    def _received(self, there: AgentRow, row: BranchRow) -> bool:
        """Whether a branch stands where the last transfer left it."""
        events = self._dest._catalog.events_named([receive_key(there.a)])
        return _stood(reversed(events), str(body_of(row)["name"])) == row.head_id

    def _unmoved(self, at: int, there: AgentRow, row: BranchRow, newest: CheckpointRow | None) -> bool:
        """Whether nobody there has moved a branch to where the source never was."""
        body = body_of(row)
        if not self._rolled_back(there, str(body["name"])):
            if not row.head_id or row.head_id == (newest.id if newest is not None else body["from"]):
                return True
            if self._received(there, row):
                return True
        name = self._sending.about.branches[at].name
        for event in self._sending.catalog.events(a=self._sending.agent.a, newest_first=True):
            said = body_of(event)
            if said.get("what") == "rollback" and said["branch"] == name and said["to"] == row.head_id:
                return True
            if said.get("what") == "receive" and [name, row.head_id] in said["heads"]:
                return True
        return False

    def _rolled_back(self, there: AgentRow, branch: str) -> bool:
        """Whether a branch was moved over there by hand since something last arrived on it."""
        for event in self._dest._catalog.events(a=there.a, newest_first=True):
            said = body_of(event)
            if said.get("what") == "rollback" and said["branch"] == branch:
                return True
            if said.get("what") == "receive" and any(name == branch for name, _ in said["heads"]):
                return False
        return False

    def _moved_later(self, at: int, there: AgentRow, row: BranchRow) -> bool:
        """Two branches with the same checkpoints stand at different ones: whether the source moved last."""
        name = str(body_of(row)["name"])
        if self._received(there, row):
            return True
        source = self._sending
        told = source.catalog.events_named([receive_key(source.agent.a)])
        if _stood(reversed(told), source.about.branches[at].name) == source.about.branches[at].head:
            return False
        ours = _last_rollback(
            source.catalog.events(a=source.agent.a, newest_first=True), source.about.branches[at].name
        )
        theirs = _last_rollback(self._dest._catalog.events(a=there.a, newest_first=True), name)
        return ours > theirs

    # -- names, judgements, events ------------------------------------------------------------------------------

    def _last(self, there: AgentRow | None) -> tuple[Last, int]:
        """Tags and judgements that differ and were made later here; and the number after which events are new."""
        source, dest = self._sending, self._dest
        ours: dict[tuple[str, Any], Any] = {("tag", name): at for name, at in source.tagged().items()}
        ours |= {("validity", identity): judged for identity, judged in source.judged().items()}
        theirs: dict[tuple[str, Any], Any] = {}
        if there is not None:
            other = Sending(dest, there)
            theirs |= {("tag", name): at for name, at in other.tagged().items()}
            theirs |= {("validity", identity): judged for identity, judged in other.judged().items()}
        tags, judged = [], []
        differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if differing:
            since = name_times(source.catalog.events(a=source.agent.a))
            then = name_times(dest._catalog.events(a=there.a)) if there is not None else {}
            for kind, what in differing:
                at = since.get((kind, what), 0)
                if at <= then.get((kind, what), -1):
                    continue
                if kind == "tag":
                    tags.append((what, ours.get((kind, what), b""), at))
                else:
                    judged.append((what, *ours.get((kind, what), ("good", "")), at))
        return Last(tags, judged, source.upto()), self._events_after(there)

    def _events_after(self, there: AgentRow | None) -> int:
        """How far the events went the last time; 0 where that is not known, or the source is not the same any more."""
        if there is None:
            return 0
        for event in reversed(self._dest._catalog.events_named([receive_key(there.a)])):
            said = body_of(event)
            if said["from"] == self._sending.about.store and "upto" in said:
                e, proof = said["upto"]
                return int(e) if e and self._sending.proof(e) == proof else 0
        return 0

    def _news(self, after: int) -> bool:
        events = ((row.at, row.body, row.key or b"") for row in self._sending.keyed_events(after))
        while some := list(islice(events, AT_ONCE)):
            if self._into.events(some):
                return True
        return False


def _stood(events: Iterable[EventRow], branch: str) -> bytes | None:
    """Where the newest of these events says that a branch stands."""
    for event in events:
        for name, head in body_of(event)["heads"]:
            if name == branch:
                return bytes(head)
    return None


def _last_rollback(events: Iterator[EventRow], branch: str) -> int:
    for event in events:
        said = body_of(event)
        if said.get("what") == "rollback" and said["branch"] == branch:
            return event.at
    return 0
