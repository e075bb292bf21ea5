"""Repair: what is intact in a damaged store, in a new store, with a precise account of what is not.

Owns the judgement what can be kept, and the words for what cannot. The damaged store is only read, and from a copy of
its database. What always holds: everything in the new store was proven; a checkpoint that cannot be proven is left out
and named; one that only rested on such a one stays if its state can be had otherwise, and stands alone then; where a
branch's head is lost, the branch ends at its newest checkpoint that is not; refs whose rows are lost are derived from
the log and from the checkpoints. Ids stay what they are, with one exception: an id covers the records of what happened
outside before it, so where one of these is lost, what came after it has new ids.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.agent import history, metadata, salvage
from holdfast.agent.background import fold_below
from holdfast.agent.evidence import Flaw, Found, Histories, Lines, Made, Refs, Told
from holdfast.agent.graph import left_by
from holdfast.agent.layers import THAW, WORKSPACE
from holdfast.agent.move import FACTS
from holdfast.agent.names import MAIN
from holdfast.agent.opened import settle
from holdfast.agent.places import place_of
from holdfast.agent.salvage import Rescue
from holdfast.agent.store import open_unseen
from holdfast.codec.state import State
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, NotAStore
from holdfast.store.catalog import Progress, quietly
from holdfast.store.changes import (
    Change,
    NewCheckpoint,
    Objects,
    branch_columns,
    moved_body,
    now_us,
    pack_node,
)
from holdfast.store.database import SCHEDULES
from holdfast.store.files import (
    Layout,
    check_kinds,
    classify,
    in_store,
    make_folder,
    put_in_place,
    scratch,
    unavailable,
)
from holdfast.store.keys import Key, find_secret
from holdfast.store.manifest import Manifest, Segment, identity, mark_of, pack_payload
from holdfast.store.rows import (
    BEGINNING,
    DIGEST_BYTES,
    LOST,
    Agent,
    Body,
    Branch,
    End,
    Point,
    Record,
    Row,
    Tag,
    body_bytes,
)
from holdfast.store.witness import Noted, lost, remembered, witness_report
from holdfast.text import is_url

_LOST_MAX = 100_000
"""Records that are lost in one place. A row that speaks of more is taken for damaged itself."""

_LOST = bytes(DIGEST_BYTES)
"""The digest of a record of which nothing is left but that there was one."""


@dataclass(frozen=True, slots=True)
class LostCheckpoint:
    """A checkpoint that cannot be kept: what is known of it, and why not."""

    id: str
    label: str
    why: str


@dataclass
class RepairedAgent:
    """One agent: how much of it is kept, and everything that is not."""

    name: str
    checkpoints: int = 0
    effects: int = 0
    lost_checkpoints: list[LostCheckpoint] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Branches, tags and effects that are lost, in words."""

    @property
    def whole(self) -> bool:
        return not self.lost_checkpoints and not self.lost

    def to_json(self) -> dict[str, Any]:
        gone = [{"id": one.id, "label": one.label, "why": one.why} for one in self.lost_checkpoints]
        kept = {"agent": self.name, "checkpoints": self.checkpoints, "effects": self.effects}
        return {**kept, "lost_checkpoints": gone, "lost": self.lost}


@dataclass
class RepairReport:
    """What a repair found and kept. ``to`` is the new store, None in a dry run."""

    path: Path
    to: Path | None
    agents: list[RepairedAgent] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What was wrong with the files, one line each."""
    missing: list[str] = field(default_factory=list)
    """What is gone without a trace of whose it was."""
    older: str = ""
    """What was seen of this store here, and is not in it any more because it is an older copy. Empty when it is not."""

    @property
    def whole(self) -> bool:
        """Whether nothing was lost."""
        return not self.missing and not self.older and all(agent.whole for agent in self.agents)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "store": str(self.path),
            "to": str(self.to) if self.to is not None else None,
            "whole": self.whole,
            "agents": [agent.to_json() for agent in self.agents],
            "missing": self.missing,
            "older": self.older,
            "problems": self.problems,
        }


def repair(
    path: str | os.PathLike[str] | None = None,
    to: str | os.PathLike[str] | None = None,
    *,
    key: Key = None,
    progress: Progress | None = None,
) -> RepairReport:
    """Copy what is intact of the store at ``path`` into a new store at ``to``; without ``to``, only say what would be.

    ``path`` is not changed. It needs as much room as the store has, beside ``to`` or where temporary files go.
    """
    place = place_of(path)
    if is_url(place) or (isinstance(to, str) and is_url(to)):
        raise BadOption(
            "only a store in a directory can be repaired, and only into another directory",
            hint="For a store on a server, put the server's own backup back, or push what can be read to a new store.",
        )
    source = Layout(Path(place))
    try:
        return _repair(source, Path(os.path.realpath(to)) if to is not None else None, key, progress or quietly)
    except ColdPlaceMissing as error:
        error.hint += " Nothing was made."
        raise
    except OSError as error:
        raise unavailable(error, f"repairing {source.path}") from error


def _repair(source: Layout, new: Path | None, key: Key, say: Progress) -> RepairReport:
    if not source.catalog.is_file():
        if not classify(source.path):
            raise NotAStore(f"there is no store at {source.path}", hint="Check the path.")
        raise NotAStore(f"{source.catalog} is not a file", hint="Check the path.")
    check_kinds(source.path)
    if new is not None and new.exists():
        raise BadOption(f"{new} exists already", hint="Name a place where nothing is yet.")
    if new is not None and in_store(new):
        raise BadOption(f"{new} is inside a store", hint="Name a place elsewhere.")
    secret = find_secret(key)
    if new is not None:
        make_folder(new.parent)
    with salvage.undisturbed(source), scratch(new.parent if new is not None else None) as room:
        say("reading the damaged catalog", 0, 1)
        noted = witness_report(source.path).newest  # before the copy, which can then only be newer
        copy, unread = salvage.copy_database(source, room / "copy")
        cipher = salvage.unlocked(copy, secret)
        report = RepairReport(source.path, new, problems=unread)
        with open_unseen(room / "new", secret, create=True) as store:
            rescue = Rescue(store._db, report, say)
            rescue.fill(copy, cipher, noted)
            say("reading the damaged catalog", 1, 1)
            rescue.bring_chunks(source, cipher)
            mending = _Mending(rescue, report, say)
            mending.run()
            mending.finish(source, noted)
            proof = store.verify(say)
            report.problems += [f"in the new store: {one.what}: {one.detail}" for one in proof.problems]
        if new is not None and not put_in_place(room / "new", new):
            raise BadOption(f"{new} exists by now", hint="Name a place where nothing is yet.")
        return report


class _Proof(Histories):
    """As verify does it, but what has lost its parent gets another chance."""

    def __init__(self, mending: _Mending, lines: Lines) -> None:
        super().__init__(mending.db.now, mending.found, lines)
        self._mending = mending

    def alone(self, point: Point) -> State:
        nodes: dict[bytes, bytes] = {}
        try:
            # Sealed or not: the nodes of its state may all be there, because others have them, too.
            self.reading.trees(digest for _, digest in point.manifest.sections)
        except Damaged:
            if point.row.sealed:
                raise
            state = history.state_of(self.contents, None)
            operations = history.operations_of(self.view, point)
            try:
                state.do(operations)
                self.reading.operations(operations)
            except Damaged:
                return super().alone(point)
            if state.digests() != point.manifest.sections:
                return super().alone(point)
            nodes = state.unstored()
        self._mending.cut(point.row, nodes)
        return history.state_of(self.contents, self.view.point(point.n))


class _Mending:
    """Makes of rescued rows a store in which everything is proven, and says what is not there."""

    def __init__(self, rescue: Rescue, report: RepairReport, say: Progress) -> None:
        self.db = rescue.db
        self.view = rescue.view
        self.found = Found()
        self._rescue = rescue
        self._hurt = rescue.hurt
        self._report = report
        self._say = say
        self._agents: dict[int, RepairedAgent] = {}
        self._owners: dict[int, int] = {}  # branch -> agent
        self._places: dict[bytes, int] = {}  # id -> number of what stays
        self._renewed: dict[bytes, bytes] = {}  # ids that have become others
        self._said: list[tuple[int, Body]] = []

    # -- checkpoints and records ----------------------------------------------------------------------------

    def run(self) -> None:
        found = self.found
        found.read(self.view, ("log", "record", "loose", "checkpoint"), lambda *_: None)  # all were proven; some twice
        for table, values in self._rescue.refs.values():
            found.take(table, values)
        self._told = Told(found.log)
        self._name_agents()
        self._look()
        was = dict(found.rows)
        self._lines = Lines(found.records)
        self._unfold()
        found.clear_rows()
        found.read(self.view, ("loose",), lambda *_: None)
        self._complete_lines()
        self._prove_values()
        self._lines = Lines(found.records)
        self._proof = proof = _Proof(self, self._lines)
        was |= found.rows
        proof.prove(list(found.rows), lambda: self._say("checkpoints", len(proof.done), len(was)))
        for error in proof.away.values():
            raise error
        self._drop()
        self._places = {proof.known[n].id: n for n in found.rows}
        self._parents = {known.id: known.parent for known in proof.known.values()}
        self._account(was)
        self._renew()
        found.shallow = {n: self._over(n) for n, row in found.rows.items() if not row.parent and proof.known[n].parent}
        self._set_refs()

    def _name_agents(self) -> None:
        """Who the agents are, and whose each branch is. Pages may still hold rows of some that were removed."""
        found, told = self.found, self._told
        owners = {b: made.a for b, made in told.branches.items()} | {b: row.a for b, row in found.branches.items()}
        removed = {a for b, a in owners.items() if b in found.retired}
        if found.retired:
            removed |= found.agents.keys() - told.agents.keys() - set(owners.values())
        self._owners = {b: a for b, a in owners.items() if a not in removed}
        newest = max([*found.agents, *told.agents, *owners.values(), 0])
        for b in sorted({b for b, _ in found.stretches} - {0} - owners.keys() - found.retired):
            self._owners[b] = newest = newest + 1  # nothing says whose it was
        found.agents = {a: agent for a, agent in found.agents.items() if a not in removed}
        names = {agent.name for agent in found.agents.values()}
        for a in sorted((told.agents.keys() | set(self._owners.values())) - removed - found.agents.keys()):
            name, at = told.agents.get(a, (f"rescued-{a}", now_us()))
            while name in names:
                name += "-rescued"
            names.add(name)
            found.agents[a] = Agent(a, uuid.uuid4().bytes, name, {"created": at})
            self._report.problems.append(f"agent {name}: its row was lost; its checkpoints are kept")
        last = max([*owners, *self._owners, *found.retired, 0])
        for a, agent in sorted(found.agents.items()):
            self._agents[a] = RepairedAgent(agent.name)
            if a not in told.agents:
                self._said.append((a, {"what": "agent", "name": agent.name}))
        for b, a in enumerate(sorted(found.agents.keys() - set(self._owners.values())), last + 1):
            self._owners[b] = a  # every agent has a branch
        self._report.agents = list(self._agents.values())

    def _complete_lines(self) -> None:
        """Records that are gone get stand-ins that say nothing, so that those after them keep their places.

        Below a gap goes what is certainly of the same line: what was written on the same branch, or what a checkpoint
        before one that rests on the gap speaks of. Records of other stores have no branch here: they may be anybody's.
        """
        found, records = self.found, self.found.records
        lost = self._gaps()
        given = [row.line for row in found.rows.values()]  # such a handle must not become another one's
        fresh = max([*records, *lost, *given, self._rescue.floors.get("record", 0), 0])
        changed: dict[int, Record] = {}
        for i, r, b in sorted((i, r, b) for r, (i, b, _) in lost.items()):
            if not 0 < i <= r:  # handles are given upwards, so there are not more records than that
                continue
            speakers = lost[r][2]
            spoken = {row.line for n in found.above(speakers) if (row := found.rows.get(n)) is not None}
            certain = [one for one in records.values() if (b and one.b == b) or one.r in spoken]
            below = max((one for one in certain if one.i < i), key=lambda one: one.i, default=None)
            first, above = (below.i + 1, below.r) if below is not None else (1, 0)
            if i - first > _LOST_MAX:
                continue
            for at in range(first, i + 1):
                fresh += 1
                made = Record(r if at == i else fresh, above, 0, at, b, 0, LOST, _LOST, [], b"")
                records[made.r] = changed[made.r] = made
                above = made.r
            name = f"branch {found.branches[b].name!r}" if b in found.branches else f"branch {b}" if b else "a line"
            whose = [self._owners[b]] if b in self._owners else [a for a, seen in self._seen.items() if seen & speakers]
            for a in whose:
                text = f"{name}: record(s) {first} to {i} of what happened outside are lost"
                self._agents[a].lost.append(text)
        for record in sorted(records.values(), key=lambda one: one.i):
            before = records.get(record.prev)
            back = 0 if before is None else before.r if before.marked else before.back
            if record.back != back:
                records[record.r] = changed[record.r] = record._replace(back=back)
        self._put_records(list(changed.values()))

    def _gaps(self) -> dict[int, tuple[int, int, set[int]]]:
        """The records that are gone: number, branch, and the checkpoints and heads whose lines lead there."""
        found, records = self.found, self.found.records
        lost: dict[int, tuple[int, int, set[int]]] = {}
        below: dict[int, int] = {}  # the first that is gone at or below a record
        for one in sorted(records.values(), key=lambda one: one.i):
            below[one.r] = below.get(one.prev, one.prev)
            if one.prev and one.prev not in records:
                lost.setdefault(one.prev, (one.i - 1, one.b, set()))
        for branch in found.branches.values():
            if branch.line and branch.line not in records:
                lost.setdefault(branch.line, (branch.records, branch.b, set()))
        ends = [(row.line, n) for n, row in found.rows.items()]
        for line, n in ends:
            if line and line not in records and line not in lost:
                with suppress(Damaged):
                    lost[line] = self.view.point(n).manifest.effects[0], found.rows[n].b, set()
        for line, n in [*ends, *((branch.line, branch.head) for branch in found.branches.values())]:
            gone = below.get(line, line)
            if gone in lost:
                lost[gone][2].add(n)
        return lost

    def _prove_values(self) -> None:
        """Of the long values that records name, those that can be read stay; that something happened stays anyway."""
        reading = history.Reading(history.Blank(self.db.now))
        known: dict[bytes, bool] = {}
        changed: list[Record] = []
        for record in self.found.records.values():
            for root in record.refs:
                if root not in known:
                    try:
                        reading.trees([root])
                        known[root] = True
                    except Damaged:
                        known[root] = False
            left = [root for root in record.refs if known[root]]
            if left != record.refs:
                changed.append(record._replace(refs=left))
                whose = self._agents.get(self._owners.get(record.b, 0))
                text = f"a value in record {record.i} of what happened outside is lost; that it happened is kept"
                (whose.lost if whose is not None else self._report.missing).append(text)
        self._put_records(changed)

    def _unfold(self) -> None:
        """Let every checkpoint be loose. Rows that are lost are made again from the segments that these lie in."""
        known = {values[0]: values for values in self.view.rows("checkpoint")}
        lost: list[int] = []
        ids: dict[bytes, int] = {}
        ends = {end.position: r for r in self.found.records if (end := self._lines.end(r)) is not None}

        def put(change: Change, segment: Segment) -> None:
            for at, n in enumerate(segment.members):
                raw, operations = segment.manifests[at], b""  # that these are not what was written is found later
                with suppress(Damaged):
                    operations = segment.operations(at)
                columns = known.get(n, ())[:8]
                if not columns:
                    manifest = Manifest.decode(raw)
                    there = change.find(manifest.parent) if manifest.parent not in ids else None
                    parent = there.n if there is not None else ids.get(manifest.parent, 0)
                    columns = (n, mark_of(segment.ids[at]), b"", parent, ends.get(manifest.effects, 0), 0, 0, 0)
                    lost.append(n)
                change.delete("loose", "n", [n])  # it may have been found in pages as well
                change.put("loose", *columns, pack_payload(raw, operations))

        segments = [s for (s,) in self.view.reader.run("SELECT s FROM segment")]
        for s in segments:
            with suppress(Damaged):
                ids |= dict(zip(self.view.segment(s).ids, self.view.segment(s).members, strict=True))
        for s in segments:
            with suppress(Damaged):
                self.db.change(partial(put, segment=self.view.segment(s)))
        self.db.change(partial(Change.delete, table="checkpoint", column="n", values=list(known)))
        self.db.change(partial(Change.delete, table="segment", column="s", values=segments))
        if lost:
            text = f"table checkpoint: {len(lost)} row(s) were lost, and made again from the segments"
            self._report.problems.append(text)

    def cut(self, row: Row, nodes: dict[bytes, bytes]) -> None:
        """Let a checkpoint stand alone."""
        new = row._replace(parent=0, sealed=1)

        def put(change: Change) -> None:
            change.put_objects(Objects({name: pack_node(raw) for name, raw in nodes.items()}))
            change.set_row(row, new)

        if new != row:
            self.db.change(put)
            self.found.rows[row.n] = new._replace(data=b"")

    def _look(self) -> None:
        """See what was there, before anything is changed."""
        found, told, refs = self.found, self._told, self.found.refs()
        for b, row in found.branches.items():
            self._hurt |= not told.whole(b) or told.branches[b].epoch != row.epoch
        self._astray = {a: found.astray(refs[a]) for a in self._agents}
        self._hurt |= any(self._astray.values())
        self._seen = {a: found.reached(refs[a]) for a in self._agents}
        self._named = {a: {id for entry in refs[a].log for id in left_by(entry.body)} for a in self._agents}
        if self._hurt:  # the log may be damaged: then nothing else leads to some of what was made
            for (b, _), here in found.stretches.items():
                self._seen.get(self._owners.get(b, 0), set()).update(here)

    def _drop(self) -> None:
        """Let go what cannot be proven."""
        found, proof = self.found, self._proof
        self.db.change(partial(Change.delete, table="loose", column="n", values=list(proof.bad)))
        for n in proof.bad:
            row = found.rows.pop(n, None)
            if row is not None:
                found.stretches[row.b, row.epoch].discard(n)

    def _account(self, was: Mapping[int, Row]) -> None:
        """Say what cannot be kept."""
        found, proof = self.found, self._proof
        ids = {row.parent: proof.known[n].parent for n, row in was.items() if n in proof.known} | proof.ids()
        gone = {id: LostCheckpoint(id.hex(), "", "it is missing") for some in self._astray.values() for id in some}
        told: set[int] = set()
        for a, seen in self._seen.items():
            agent = self._agents[a]
            for n in sorted(seen - found.rows.keys()):
                flaw = proof.bad.get(n, Flaw("", "it is missing"))
                id = ids.get(n) or (was[n].mark.to_bytes(8, "big", signed=True) if n in was else b"")
                why = f"{flaw.what}: {flaw.detail}" if flaw.what else flaw.detail
                gone[id] = LostCheckpoint(id.hex(), proof.known[n].label if n in proof.known else "", why)
                agent.lost_checkpoints.append(gone[id])
                told.add(n)
        for a, named in self._named.items():
            known = {one.id for one in self._agents[a].lost_checkpoints}
            more = [gone[id] for id in named if id in gone and id.hex() not in known]
            self._agents[a].lost_checkpoints += more
            if self._hurt:  # it may have been seen through what is lost
                near = {self._nearest(id) for id in named | {bytes.fromhex(one) for one in known} if not self._at(id)}
                self._seen[a] |= found.above(near)
        untold = proof.bad.keys() - told
        self._report.missing += [f"checkpoint {proof.short(n)}: {proof.bad[n].detail}" for n in untold]

    def _renew(self) -> None:
        """An id covers the records before it. Where these are others now, it and all that follow it get new ones."""
        found, proof = self.found, self._proof
        for n in sorted(found.rows, key=proof.depth):
            row, known = found.rows[n], proof.known[n]
            end = self._lines.end(row.line) or BEGINNING
            parent = self._renewed.get(known.parent, known.parent)
            if (end.position, parent) == (known.effects, known.parent):
                if row.line != end.line:  # it speaks of no records, and its row of one that is not there
                    found.rows[n] = row._replace(line=end.line)
                    self.db.change(partial(Change.set_row, row=row, new=found.rows[n]))
                continue
            point = self.view.point(n)
            raw = point.manifest._replace(parent=parent, effects=end.position).encode()
            id = identity(raw)
            new = NewCheckpoint(id, raw, self.view.operations(point), row.key, bool(row.sealed))
            above = self._places.get(parent, 0) if row.parent else 0
            m = self.db.change(partial(_again, n=n, new=new, place=(above, end.line, row.b, row.epoch)))
            del found.rows[n], self._places[known.id]
            found.stretches[row.b, row.epoch].discard(n)
            found.add_row(self.view.row(m))
            proof.known[m] = known._replace(id=id, parent=parent, effects=end.position)
            self._renewed[known.id], self._places[id], self._parents[id] = id, m, parent
            why = f"it speaks of records that are lost; its state is kept as {id.hex()[:12]}"
            for a, seen in self._seen.items():
                if n in seen:
                    seen.add(m)
                    self._agents[a].lost_checkpoints.append(LostCheckpoint(known.id.hex(), known.label, why))

    # -- where things stand ---------------------------------------------------------------------------------

    def _at(self, id: bytes) -> int:
        """The number of a checkpoint that stays, or of what it has become; 0 for others."""
        return self._places.get(self._renewed.get(id, id), 0)

    def _nearest(self, id: bytes) -> int:
        """A checkpoint, or its nearest ancestor that stays, as far as manifests tell."""
        while id and not self._at(id):
            id = self._parents.get(id, b"")
        return self._at(id)

    def _before(self, b: int, epoch: int, depth: int) -> int:
        """What was made last on a branch, before a stretch had that depth, so far as it stays."""
        return self.found.before(self._told, b, epoch, depth, self._proof.depth, self._nearest) if b else 0

    def _over(self, n: int) -> int:
        """The nearest ancestor of a checkpoint that has lost its parent."""
        row, known, proof = self.found.rows[n], self._proof.known[n], self._proof
        over = self.found.shallow.get(n, 0)
        said = self._nearest(proof.known[over].id) if over in proof.known else 0
        # What a row says may be wrong although its sum fits: an ancestor is less deep.
        near = (one for one in (said, self._nearest(known.parent)) if one and proof.depth(one) < known.depth)
        return next(near, 0) or self._before(row.b, row.epoch, known.depth)

    def _set_refs(self) -> None:
        """Branches, tags and judgements, as far as what they name stays."""
        found = self.found
        newest = {one.b: one.r for one in sorted(found.records.values(), key=lambda one: one.i)}
        epochs = dict(sorted(found.stretches))  # the last one of each branch
        refs = found.refs()
        self._taken = {a: {branch.name for branch in refs[a].branches} for a in self._agents}
        for b in sorted(self._owners):
            self._branch(b, newest.get(b, 0), epochs.get(b, 0))
        self._part()
        refs, judged = found.refs(), found.validity
        found.tags, found.validity = [], {}
        for (a, n), body in judged.items():
            if n in self._proof.known:  # unless the log says something
                self._told.validity[a].setdefault(self._proof.known[n].id, {**body, "row": True})
        for a in sorted(self._agents):
            self._names(a, {tag.name: tag.id for tag in refs[a].tags})
        refs = found.refs()
        for a in sorted(self._agents):
            self._count(a, refs[a])

    def _part(self) -> None:
        """Records that were written on a branch, and to which its line does not lead any more, are nobody's."""
        found, own = self.found, defaultdict[int, set[int]](set)
        for record in found.records.values():
            own[record.b].add(record.r)
        for branch in found.branches.values():
            r, left = branch.line, own[branch.b]
            while r and left:
                left.discard(r)
                r = found.records[r].prev
            if left:
                text = f"branch {branch.name!r}: {len(left)} record(s) of what happened outside lead nowhere"
                self._agents[branch.a].lost.append(text)
                self._put_records([found.records[r]._replace(b=0) for r in left])

    def _put_records(self, records: list[Record]) -> None:
        """Let records be these."""
        bodies = {one.r: b"" if one.digest == _LOST else self.view.record(one.r).body for one in records}

        def put(change: Change) -> None:
            change.delete("record", "r", list(bodies))
            for r, prev, back, i, b, mark, key, digest, refs, _ in records:
                change.put("record", r, prev, back, i, b, mark, key, digest + b"".join(refs), bodies[r])

        if bodies:
            self.db.change(put)
            self.found.records.update((one.r, one) for one in records)

    def _branch(self, b: int, newest: int, epoch: int) -> None:
        """Where a branch stands now, and how long its line is: ``newest`` is the last record that was written on it."""
        found, proof = self.found, self._proof
        a, row, made = self._owners[b], found.branches.get(b), self._told.branches.get(b)
        epoch = max([epoch, *(one.epoch for one in (row, made) if one is not None)])
        old = row or self._lost_branch(b, a, made, epoch)
        old = old._replace(generation=max(old.generation, self._told.generations.get(b, 0)))
        tip, stood = found.tip(b, epoch, proof.depth), old.id if old.epoch == epoch else b""
        head = self._at(stood)
        if tip and (not head or proof.depth(tip) > proof.depth(head)):
            head = tip  # the row is older than its history, or its head is lost
        elif not head and (row is None or row.head or row.epoch != epoch):
            head = self._nearest(stood) or self._before(b, epoch, old.depth)
        lines = (newest, old.line, found.rows[head].line if head else 0)
        end = max((self._lines.end(r) or BEGINNING for r in lines), key=lambda one: one.records)
        new = self._standing(old, head, end)
        derived = proof.known[tip].id if tip else made.to if made is not None else None
        whole = made is not None and (made.a, made.uuid, made.epoch) == (a, old.uuid, epoch) and self._told.whole(b)
        if new != row or not whole or derived != row.id or epoch != row.epoch:
            new = new._replace(epoch=epoch + 1)
            self._say_branch(old, new, begins=not whole)
        found.branches[b] = new
        called, told = f"branch {new.name!r}", self._agents[a].lost
        if row is not None and row.id and not self._at(row.id):
            where = f"after {new.id.hex()[:12]} (#{new.depth})" if head else "of it"
            told.append(f"{called}: {row.depth - new.depth} checkpoint(s) {where} cannot be trusted")
            ends = f"its head is lost; it ends at #{new.depth} now" if head else "all of it is lost; it is empty now"
            told.append(f"{called}: {ends}")

    def _lost_branch(self, b: int, a: int, made: Made | None, epoch: int) -> Branch:
        """A branch whose row is lost, as far as the log tells of it."""
        name = made.name if made is not None and made.name else MAIN
        while name in self._taken[a]:
            name += "-rescued"
        self._taken[a].add(name)
        own = made.uuid if made is not None and made.uuid else uuid.uuid4().bytes
        body: Body = {"created": now_us(), "from": self._told.begun.get((b, 0), b"")}
        said = f"branch {name!r} of {self._agents[a].name}: its row was lost; it is what its history says"
        self._report.problems.append(said)
        return Branch(b, a, name, own, body, 0, b"", 2**62, epoch, *BEGINNING, 0, 0)

    def _standing(self, branch: Branch, n: int, end: End) -> Branch:
        known = self._proof.known.get(n)
        id, depth, at = (known.id, known.depth, known.at) if known is not None else (b"", 0, branch.body["created"])
        return branch._replace(head=n, id=id, depth=depth, at=max(at, branch.at)).at_end(end)

    def _say_branch(self, old: Branch, new: Branch, *, begins: bool) -> None:
        said = {**moved_body(old, new, new.id), "from": b""}
        if begins:
            said |= {"what": "branch", "name": new.name, "uuid": new.uuid}
        self._said.append((new.a, said))

    def _names(self, a: int, rows: Mapping[str, bytes]) -> None:
        """Tags and judgements, as the log has them, or else their rows."""
        found, proof, agent, told = self.found, self._proof, self._agents[a], self._told.tags[a]
        for name, id in {**rows, **told}.items():
            n = self._at(id)
            now = proof.known[n].id if n else b""
            if n:
                found.tags.append(Tag(a, name, n, now, {}))
                if name not in rows:
                    self._report.problems.append(f"tag {name!r} of {agent.name}: its row was lost")
            elif id:
                agent.lost.append(f"tag {name!r}: its checkpoint is lost")
            if told.get(name) != now:
                self._said.append((a, {"what": "tag" if n else "untag", "name": name, **({"at": now} if n else {})}))
        for id, body in self._told.validity[a].items():
            n = self._at(id)
            if n and body.get("validity") != "good":
                kept: Body = {"validity": body.get("validity"), "reason": body.get("reason", "")}
                found.validity[a, n] = {**kept, "at": now_us()}
                if "row" in body or id in self._renewed:
                    self._said.append((a, {"what": "validity", **kept, "at": proof.known[n].id}))

    def _count(self, a: int, refs: Refs) -> None:
        """What is left of an agent; and let its log lead to what nothing else leads to any more."""
        found, proof, told = self.found, self._proof, self._agents[a]
        reached = found.reached(refs) & found.rows.keys()  # the log may still name what could not be kept
        kept = {n for n in self._seen[a] if n in found.rows} | reached
        ends = kept - reached
        ends -= {found.rows[n].parent or found.shallow.get(n, 0) for n in ends}
        if ends or told.lost_checkpoints:
            left = [proof.known[n].id for n in sorted(ends)]
            self._said.append((a, {"what": "forget", "checkpoints": len(told.lost_checkpoints), "left": left}))
        told.checkpoints = len(kept)
        records: set[int] = set()
        for branch in refs.branches:
            r = branch.line
            while r and r not in records:
                records.add(r)
                r = found.records[r].prev
        told.effects = len(records)
        unknown: dict[bytes, list[int]] = defaultdict(list)
        for n in kept:
            if proof.described.get(proof.known[n].metadata):
                unknown[proof.known[n].metadata].append(proof.known[n].depth)
        for digest, depths in unknown.items():
            where = f"{len(depths)} checkpoint(s), #{min(depths)} to #{max(depths)}"
            told.lost.append(f"metadata {digest.hex()[:12]} (what ran) of {where}: lost; their states are kept")

    def finish(self, source: Layout, noted: Noted | None) -> None:
        """Write the refs, and let the store count as it is."""
        found, proof = self.found, self._proof
        before = remembered(source.path, self._rescue.facts.get("uuid", b""))
        now = witness_report(source.path).newest  # it may have been written to since the copy
        if before is not None and (now is None or before.merged(now) != now):
            self._report.older = ", ".join(lost(self.view, before))  # its own witness does not know of it either
        gone = [digest for digest, why in proof.described.items() if why]

        def put(change: Change) -> None:
            for agent in found.agents.values():
                change.put("agent", agent.a, agent.uuid, agent.name.encode(), body_bytes(agent.body))
            for branch in found.branches.values():
                change.put("branch", *branch_columns(branch))
            for b in found.retired:
                change.put("branch", *self._rescue.refs["branch", b][1])
            for tag in found.tags:
                if tag.a in self._agents:
                    change.put("tag", tag.a, tag.name.encode(), tag.n, tag.id, body_bytes(tag.body))
            for (a, n), body in found.validity.items():
                if a in self._agents:
                    change.put("validity", a, n, body_bytes(body))
            for n, over in found.shallow.items():
                change.put("shallow", n, over)
            for a, body in self._said:
                change.say(a, body)
            for name in self._rescue.facts:
                if name in {"created", *FACTS, SCHEDULES} or name.startswith((WORKSPACE, THAW)):
                    change.set_fact(name, self._rescue.facts[name])
            if gone:
                change.set_fact(metadata.LOST, b"".join(gone))
            self._rescue.remember(change, noted)
            self._rescue.settle_log(change)

        self.db.change(put)
        self.db.change(self._open)
        for n in sorted(found.rows, key=proof.depth):
            if found.rows[n].sealed:
                fold_below(self.db, n)
        if self.db.witness is not None:
            self.db.witness.accept(self.view)

    def _open(self, change: Change) -> None:
        for agent in self.found.agents.values():
            settle(change, change.branches(agent.a))


def _again(change: Change, n: int, new: NewCheckpoint, place: tuple[int, int, int, int]) -> int:
    """Write a checkpoint in the place of another one."""
    change.delete("loose", "n", [n])
    return change.put_checkpoint(new, *place)
