"""Verify: read everything and prove it.

Owns the proof that a store is what was written: the engine's structure, every row's sum, every node and chunk, that the
operations of each checkpoint lead from its parent's state to the digests that it recorded, that every branch stands
where the log and its checkpoints say, and that the records of what happened outside are those that were written.
Changes nothing. What always holds: everything is read as it was at one moment, so that what others write or forget
meanwhile is never taken for damage; one damaged thing does not keep the rest from being checked; only what branches,
tags and the log reach has to be whole; what cannot be read now is neither proven nor called damaged.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agent import history, metadata
from holdfast.agent.evidence import Found, Histories, Lines, Refs, Told, scan
from holdfast.agent.opened import difference, wanted
from holdfast.errors import ColdPlaceMissing, Damaged, ForkedHandle, StoreClosed, Unavailable
from holdfast.store import keys, witness
from holdfast.store.catalog import ROWS_AT_ONCE, Progress, View, quietly
from holdfast.store.cipher import uncompressed
from holdfast.store.database import Contents, copied
from holdfast.store.manifest import members_of
from holdfast.store.objects import Folder
from holdfast.store.packs import file_name
from holdfast.store.rows import NODE_MAX_BYTES, Agent, Branch, node_digest
from holdfast.store.sqlite import Sqlite
from holdfast.store.tables import TABLES

if TYPE_CHECKING:
    from holdfast.agent.store import Store

_ASKED_AGAIN = 100
"""Packs that a quick look finds nowhere, and looks for once more."""

# -- what is said of it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. ``affected`` are the ids of checkpoints whose state can no longer be proven."""

    what: str
    detail: str
    agent: str = ""
    affected: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return asdict(self)


@dataclass(slots=True)
class Unreachable:
    """A place that did not answer, or failed. What lies there, and the ``checkpoints`` that need it, was not proven.

    Nothing is known to be wrong with any of it.
    """

    place: str
    detail: str
    hint: str
    packs: int = 0
    checkpoints: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"place": self.place, "detail": self.detail, "packs": self.packs, "checkpoints": self.checkpoints}


class VerifyReport:
    """What was checked and what was found. ``problems`` are damage, ``unreachable`` is what could not be looked at."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.unreachable: list[Unreachable] = []
        counted = ("rows", "agents", "checkpoints", "operations", "nodes", "chunks", "bytes", "effects")
        self.checked: dict[str, int] = dict.fromkeys(counted, 0)

    @property
    def ok(self) -> bool:
        """Whether everything was looked at and is as it was written."""
        return not self.problems and not self.unreachable

    @property
    def affected(self) -> list[str]:
        """Ids of all checkpoints that some problem touches."""
        return list(dict.fromkeys(name for problem in self.problems for name in problem.affected))

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return {
            "ok": self.ok,
            "checked": self.checked,
            "problems": [problem.to_json() for problem in self.problems],
            "affected": self.affected,
            "unreachable": [one.to_json() for one in self.unreachable],
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.checked.items())
        if self.ok:
            return f"all is well: {counts}"
        away = [
            f"- not looked at: {one.packs} pack(s), {len(one.checkpoints)} checkpoint(s): {one.detail}"
            for one in self.unreachable
        ]
        found = [f"- {problem.what}: {problem.detail}" for problem in self.problems]
        return "\n".join([f"{len(self.problems)} problem(s): {counts}", *found, *away])

    def __repr__(self) -> str:
        away = f", {len(self.unreachable)} places unreachable" if self.unreachable else ""
        return f"<VerifyReport {'ok' if self.ok else f'{len(self.problems)} problems{away}'}>"


# -- a quick look ------------------------------------------------------------------------------------------------


def look(store: Store) -> list[Problem]:
    """What is wrong with names and sizes; nothing is read. Sizes in a bucket are left out: one request each."""
    db, found = store._db, []
    if (error := copied(db)) is not None:
        found.append(Problem("store", f"{error.message}. {error.hint}"))
    if isinstance(db.engine, Sqlite):
        found += [Problem("witness", text) for text in witness.witness_report(db.engine.layout.path).problems]
    with db.moment() as (view, packs), suppress(ColdPlaceMissing):  # a place that is away is told of elsewhere
        places = [place for place in (packs.here, packs.cold) if place is not None]
        there = {name for place in places for name, _ in place.names()}
        rows = {file_name(pack): size for pack, size in view.packs().items()}
        gone = sorted(rows.keys() - there)
        if len(gone) <= _ASKED_AGAIN:  # one that is moved just now may be in neither list
            gone = [name for name in gone if not any(place.size(name) for place in (*places, *places))]
        short = [
            name
            for place in places
            for name in sorted(rows.keys() & there if isinstance(place, Folder) else ())
            if place.size(name) not in {None, rows[name]}
        ]
        for names, how in ((gone, "missing"), (short, "not as long as it was written")):
            if names:
                more = f"; so are {len(names) - 1} more" if len(names) > 1 else ""
                found.append(Problem("packs", f"packs/{names[0]} is {how}{more}"))
    return found


# -- the whole store ---------------------------------------------------------------------------------------------


def verify(store: Store, progress: Progress | None, agents: Sequence[str]) -> VerifyReport:
    """Prove the whole store, or the histories of some agents and everything that they share with others."""
    db, report = store._db, VerifyReport()
    told = witness.witness_report(Path(db.place)) if db.witness is not None else None
    noted = told.newest if told is not None else None  # read before the moment, which can then only be newer
    run = _Verification(store, report, progress or quietly)
    with run.finding("catalog"):
        db.flush()
    with run.finding("store.db"), db.moment() as contents:
        run.contents, run.view = Contents(contents.view, contents.packs.impatient()), contents.view
        run.structure(told.problems if told is not None else (), noted)
        run.rows()
        run.packs()
        run.histories(agents)
    if not agents:
        _remember(store, report)
    return report


def last_verified(store: Store) -> dict[str, Any] | None:
    """What this user's last whole verify found, and when."""
    file = _note(store)
    if file is None:
        return None
    try:
        found = json.loads(file.read_text(encoding="ascii"))
        return {"at": datetime.fromisoformat(found["at"]), "ok": bool(found["ok"]), "problems": int(found["problems"])}
    except (OSError, ValueError, KeyError, TypeError):  # nobody has, or it cannot be read: as good as none
        return None


def _remember(store: Store, report: VerifyReport) -> None:
    """Outside the store, which verify leaves as it is. That nobody can write there stops nobody."""
    said = {"at": datetime.now(UTC).isoformat(), "ok": report.ok, "problems": len(report.problems)}
    file = _note(store)
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(said), encoding="ascii")
        new.replace(file)


def _note(store: Store) -> Path | None:
    """Beside the user's record of stores; None where there is none."""
    record = witness.record_file(Path(store.place))
    return record.with_name("verified") / f"{store._db.uuid.hex()}.json" if record is not None else None


class _Verification:
    contents: Contents
    view: View

    def __init__(self, store: Store, report: VerifyReport, progress: Progress) -> None:
        self.store = store
        self.progress = progress
        self.report = report
        self.found = Found()
        self._packs: list[bytes] = []
        self._members: dict[int, list[int]] = {}

    @contextmanager
    def finding(self, what: str, *, packs: int = 0) -> Iterator[None]:
        """Turn damage into a problem, and what cannot be read now into something unreachable."""
        try:
            yield
        except (StoreClosed, ForkedHandle):
            raise
        except Unavailable as error:
            self.unreachable(error, [], packs)
        except Damaged as error:
            self.problem(", ".join(error.what) or what, error.message)

    def unreachable(self, error: Unavailable, checkpoints: Sequence[str], packs: int = 0) -> None:
        """Each place is told of once, however much lies there."""
        place = getattr(error, "place", "") or self.store.place
        known = next((one for one in self.report.unreachable if one.place == place), None)
        if known is None:
            known = Unreachable(place, error.message, error.hint)
            self.report.unreachable.append(known)
        known.checkpoints += [one for one in checkpoints if one not in known.checkpoints]
        known.packs += packs

    def problem(self, what: str, detail: str, agent: str = "", affected: Sequence[str] = ()) -> None:
        self.report.problems.append(Problem(what, detail, agent, list(affected)))

    def structure(self, problems: Sequence[str], noted: witness.Noted | None) -> None:
        self.progress("database structure", 0, 1)
        with self.finding("store.db"):
            for text in self.store._db.engine.check():
                self.problem("store.db", text)
        for text in problems:
            self.problem("witness", text)
        if self.store._db.encrypted:
            for text in keys.problems(self.view):
                self.problem("keys", text)
        with self.finding("witness"):
            if witness.lost(self.view, noted):
                self.problem("witness", "the catalog is older than the newest commit that was acknowledged")
        self.progress("database structure", 1, 1)

    def rows(self) -> None:
        total = 0
        with self.finding("store.db"):
            total = sum(self.view.counts().values())
        done = 0
        for table in TABLES:
            with self.finding(f"table {table}"):
                for row in scan(self.view, table):
                    done += 1
                    with self.finding(f"table {table}"):
                        self._row(table, self.view.cipher.loaded(table, row))
                    if done % ROWS_AT_ONCE == 0:
                        self.progress("rows", done, max(done, total))
        self._entries()
        for s, members in self._members.items():
            gone = [n for n in members if n not in self.found.rows or self.found.rows[n].s != s]
            if gone:
                self.problem(f"segment {s}", f"the rows of {len(gone)} checkpoint(s) in it are missing")
        self.report.checked["rows"] = done
        self.progress("rows", done, done)

    def _row(self, table: str, values: tuple[Any, ...]) -> None:
        if table == "node":
            _, name, data = values
            raw = uncompressed(data, NODE_MAX_BYTES)
            if node_digest(raw) != name:
                short = name.hex()[:16]
                raise Damaged(f"node {short} is not what was written", what=(f"node {short}",))
            self.report.checked["nodes"] += 1
            self.report.checked["bytes"] += len(raw)
        elif table == "pack":
            self._packs.append(values[1])
        elif table == "chunk":
            self.report.checked["chunks"] += 1
            self.report.checked["bytes"] += values[3]
        elif table == "segment":
            self._members[values[0]] = members_of(values[1])
        self.found.take(table, values)

    def _entries(self) -> None:
        """No entry of the log is missing but those that were deleted on purpose."""
        if self.store._db.engine.dialect != "sqlite":
            return  # a server gives handles to several writers at once: they have gaps
        with self.finding("table log"):
            missing = self.view.entries_missing()
            if missing > 0:
                self.problem("table log", f"{missing} of its entries are missing")
            elif missing < 0:
                self.problem("table log", "it has more entries than were written, or what counts them is missing")

    def packs(self) -> None:
        for done, pack in enumerate(self._packs, 1):
            with self.finding("packs", packs=1):
                for flaw in self.contents.packs.check(self.view, pack).values():
                    self.problem(", ".join(flaw.what), flaw.message)
            self.progress("packs", done, len(self._packs))

    # -- histories ------------------------------------------------------------------------------------------

    def histories(self, agents: Sequence[str]) -> None:
        found = self.found
        found.log.sort()
        told, refs = Told(found.log), found.refs()
        proof = Histories(self.contents, found, Lines(found.records))
        with self.finding("table store"):
            proof.lost = metadata.lost(self.view)
        for a, (name, _) in told.agents.items():
            if a not in found.agents:
                self.problem("table agent", f"the row of agent {name!r} is missing", name)
        for b, made in told.branches.items():
            if made.a in found.agents and b not in found.branches:
                self.problem(f"branch {made.name}", "its row is missing", found.agents[made.a].name)
        chosen = [agent for agent in sorted(found.agents.values()) if not agents or agent.name in agents]
        seen = {agent.a: found.reached(refs[agent.a]) for agent in chosen}
        for agent in chosen:
            todo, done = len(seen[agent.a] - proof.done), len(proof.done)

            def step(name: str = agent.name, todo: int = todo, done: int = done) -> None:
                self.progress(f"checkpoints of {name}", len(proof.done) - done, todo)

            proof.prove(seen[agent.a], step)
        ids = proof.ids()
        for agent in chosen:
            self._agent(agent, proof, seen[agent.a], ids)
            self._names(agent, proof, told, refs[agent.a])
        self._lines(proof)
        for agent in chosen:
            self._open(agent, refs[agent.a], proof.lines)
        for b in found.open.keys() - found.branches.keys():
            self.problem("table open", f"rows of branch {b}, which is not there")
        counts = self.report.checked
        counts["agents"], counts["checkpoints"], counts["operations"] = len(chosen), len(proof.done), proof.operations
        if proof.lost:
            counts["lost_metadata_records"] = len(proof.lost)

    def _agent(self, agent: Agent, proof: Histories, numbers: set[int], known: Mapping[int, bytes]) -> None:
        """Say what was found wrong with the checkpoints that an agent reaches."""
        name = agent.name
        resting: list[str] = []
        for n in sorted(numbers):
            ids = [known[n].hex()] if known.get(n) else []
            flaw = proof.bad.get(n)
            if flaw is not None and not flaw.what:
                resting += ids
            elif flaw is not None:
                self.problem(flaw.what, flaw.detail, name, ids)
            for text in proof.odd.get(n, ()):
                self.problem(f"checkpoint {proof.short(n)}", text, name, ids)
            if n in proof.away:
                self.unreachable(proof.away[n], ids)
        if resting:
            detail = f"{len(resting)} later checkpoint(s) rest on ones that cannot be proven"
            self.problem("history", detail, name, resting)

    def _names(self, agent: Agent, proof: Histories, told: Told, refs: Refs) -> None:
        """Branches, tags and judgements are those that the log tells of."""
        name = agent.name
        if agent.a not in told.agents:
            self.problem(f"agent {name}", "the log does not tell of it", name)
        for id in self.found.astray(refs):
            self.problem(f"checkpoint {id.hex()[:12]}", "it is missing, and was not forgotten", name, [id.hex()])
        for branch in refs.branches:
            self._branch(branch, name, proof, told)
        for tag in refs.tags:
            if tag.n in proof.known and proof.known[tag.n].id != tag.id:
                self.problem(f"tag {tag.name}", "it does not lead to the checkpoint it names", name)
        if {tag.name: tag.id for tag in refs.tags} != {name: id for name, id in told.tags[agent.a].items() if id}:
            self.problem("table tag", "tags are missing or were moved behind the history's back", name)
        for id, said in told.validity[agent.a].items():
            n = self.found.find(id)
            judged = self.found.validity.get((agent.a, n), {}).get("validity", "good")
            if n and judged != said.get("validity"):
                detail = f"checkpoint {id.hex()[:12]}: what was said of it is missing, or is not what was said"
                self.problem("table validity", detail, name, [id.hex()])

    def _branch(self, branch: Branch, agent: str, proof: Histories, told: Told) -> None:
        """A branch stands where the log says that its epoch began, or on the newest that was made there since."""
        found, what = self.found, f"branch {branch.name}"
        made = told.branches.get(branch.b)
        if made is None or (made.a, made.uuid) != (branch.a, branch.uuid):
            self.problem(what, "the log does not tell of it", agent)
            return
        n = found.tip(branch.b, made.epoch, proof.depth)
        id = proof.known[n].id if n in proof.known else b"" if n else made.to
        if not told.whole(branch.b):
            self.problem(what, "entries of its moves are missing in the log", agent)
        if branch.epoch != made.epoch:
            self.problem(what, "it was moved without an entry in the log, or is older than that", agent)
        elif branch.id != id or branch.head != (n or found.find(id)):
            self.problem(what, "its head is not where its history left it", agent)
        elif branch.head and branch.depth != proof.depth(branch.head):
            self.problem(what, "its head is not as deep as it says", agent)
        if branch.generation < told.generations.get(branch.b, 0):
            self.problem(what, "it is older than its last writer", agent)

    def _lines(self, proof: Histories) -> None:
        """Each branch's records lead to what it says of them, and none that was written on it is left out."""
        found, lines = self.found, proof.lines
        written: dict[int, int] = defaultdict(int)
        for record in found.records.values():
            written[record.b] += 1
        reached: set[int] = set()
        for branch in found.branches.values():
            what = f"line of {branch.name}"
            name = found.agents[branch.a].name if branch.a in found.agents else ""
            end = lines.end(branch.line)
            if end is None:
                self.problem(what, lines.break_below(branch.line), name)
            elif end != branch.end:
                self.problem(what, "its records do not lead to what it says of them", name)
            left, r = written[branch.b], branch.line
            while r in found.records and (left or r not in reached):
                left -= found.records[r].b == branch.b
                reached.add(r)
                r = found.records[r].prev
            if left and end is not None:
                self.problem(what, f"{left} record(s) written on it are not part of it", name)
        self._values(reached, proof.reading)

    def _open(self, agent: Agent, refs: Refs, lines: Lines) -> None:
        """The table of open runs says what the lines say. A row too many for a signal that was sent costs a look."""
        log = [entry for entry in self.found.log if entry.a == agent.a]
        sent = {id for entry in log if entry.key and isinstance(id := entry.body.get("id"), bytes)}
        for branch in refs.branches:
            whole = lines.end(branch.line) == branch.end
            rows = wanted(self.view, branch, log) if whole else None
            if rows is None:
                continue  # what is wrong with the line was told
            drop, put = difference(self.found.open[branch.b], rows)
            wrong = {(one.run, one.signal): "is missing, or says something else" for one in put}
            for run, signal in drop:
                if (run, signal) not in wrong and signal not in sent:
                    wrong[run or b"", signal or b""] = "should not be there"
            for (run, signal), what in wrong.items():
                named = f"signal {signal.decode(errors='replace')}" if signal else f"run {run.decode(errors='replace')}"
                self.problem("table open", f"branch {branch.name}: the row of {named} {what}", agent.name)

    def _values(self, records: set[int], reading: history.Reading) -> None:
        """The long values of records are there, down to their last node."""
        known: set[bytes] = set()
        for done, r in enumerate(records, 1):
            for root in self.found.records[r].refs:
                if root not in known:
                    known.add(root)
                    with self.finding(f"record {r}"):
                        reading.trees([root])
            self.progress("effects", done, len(records))
        self.report.checked["effects"] = len(records)
        hollow = len(records & self.found.hollow)
        if hollow:
            self.report.checked["lost_effects"] = hollow  # a repair said so
        bare = len(records & self.found.bare)
        if bare:
            self.report.checked["lost_values"] = bare
        let_go = sum(self.found.records[r].let_go for r in records)
        if let_go:
            self.report.checked["let_go"] = let_go
