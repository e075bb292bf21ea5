"""Repair: what is intact in a damaged store, in a new store, with a precise account of what is not.

Owns the judgement what can be kept, and the words for what cannot. The damaged store is only read, and from a copy of
its catalog. What always holds: everything in the new store was proven on its way there; a checkpoint that cannot be
proven is left out and named; where a branch's head is lost, the branch ends at its newest checkpoint that is not, and
what could be saved beyond that stands on a branch ``recovered-N``, as after ``recover=True``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.agent import orphans, recovery, refinding, salvage
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.agent.store import Store, find_store
from holdfast.agent.transfer import transfer
from holdfast.agent.verify import Told
from holdfast.codec.values import encode
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, NotAStore
from holdfast.store import rescue
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, Event, Progress, forgotten_key, quietly
from holdfast.store.embedded import Embedded, open_embedded
from holdfast.store.files import Layout, classify, discard, fsync_directory, in_store, unavailable
from holdfast.store.keys import read_keys
from holdfast.store.keysources import Key, find_secret
from holdfast.store.opening import lost_commits, now_us, unlock
from holdfast.store.ranges import Ranges
from holdfast.store.seen import remembered
from holdfast.store.tiering import MARK
from holdfast.store.witness import Witness, witness_report

_OPTIONS = (False, "commit", False, True)
_NOTHING = "no state of it could be saved"


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
        return {
            "agent": self.name,
            "checkpoints": self.checkpoints,
            "effects": self.effects,
            "lost_checkpoints": [{"id": one.id, "label": one.label, "why": one.why} for one in self.lost_checkpoints],
            "lost": self.lost,
        }


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
    source = Layout(Path(os.path.realpath(path if path is not None else find_store())))
    try:
        return _repair(source, Path(os.path.realpath(to)) if to is not None else None, key, progress)
    except ColdPlaceMissing as error:
        error.hint += f" Nothing was made. If it is gone for good, say so with an empty file {MARK} there."
        raise
    except OSError as error:
        raise unavailable(error, f"repairing {source.path}") from error


def _repair(source: Layout, new: Path | None, key: Key, progress: Progress | None) -> RepairReport:
    if not source.catalog.is_file():
        if not classify(source.path):
            raise NotAStore(f"there is no store at {source.path}", hint="Check the path.")
        raise NotAStore(f"{source.catalog} is not a file", hint="Check the path.")
    if new is not None and new.exists():
        raise BadOption(f"{new} exists already", hint="Name a place where nothing is yet.")
    if new is not None and in_store(new):
        raise BadOption(f"{new} is inside a store", hint="Name a place elsewhere.")
    secret = find_secret(key)
    cipher = unlock(source, secret, None)
    say = progress or quietly
    with rescue.undisturbed(source), _workshop(new) as room, ExitStack() as stack:
        say("reading the damaged catalog", 0, 1)
        scratch = Layout(room / "scratch")
        keys = read_keys(source.path)
        own = keys.uuid if keys is not None else uuid.uuid4().bytes
        noted = witness_report(source.path).newest  # before the copy, which can then only be newer
        copy, problems = rescue.copy_catalog(source, room / "copy")
        problems += rescue.rescue(copy, scratch, cipher, own, noted)
        say("reading the damaged catalog", 1, 1)
        _link_packs(source, scratch)
        if cipher.keyed:
            shutil.copyfile(source.path / "keys", scratch.path / "keys")
        report = RepairReport(source.path, new, problems=problems)
        catalog = open_embedded(scratch.path, create=False, secret=secret, remember=False)
        store = Store(scratch.path, catalog, _OPTIONS)
        stack.callback(store.close)
        seen = remembered(source.path, catalog.uuid)
        report.older = _older(catalog, witness_report(source.path).newest, seen)
        if not catalog.created:
            report.missing.append("what the store said of itself: its policy, and where packs lie, if it had any")
        report.problems += refinding.place_chunks(catalog, scratch.packs, cipher, say)
        _Mending(store, report, noted, say).run()
        if new is not None:
            made = open_embedded(room / "new", secret=secret, remember=False)
            target = Store(room / "new", made, _OPTIONS)
            try:
                transfer(store, target, progress=progress)
                policy = catalog.fact("policy")
                if policy is not None:
                    rescue.add_rows(made, "store", [("policy", policy)])
            finally:
                target.close()
            (room / "new").rename(new)
            fsync_directory(new.parent)
        return report


def _older(catalog: Embedded, noted: Witness | None, before: Witness | None) -> str:
    """In words what was seen of the store and is not there, unless its own witness knows of it.

    Then that is damage, or was written since the catalog was copied.
    """
    lost = lost_commits(catalog, before)
    if noted is not None and before is not None:
        known = noted.n >= before.n and noted.e >= before.e and noted.r >= before.r
        if known and (noted.n > before.n or noted.id_prefix == before.id_prefix):
            return ""
    return ", ".join(lost)


@contextmanager
def _workshop(new: Path | None) -> Iterator[Path]:
    """Where the work is done: beside the new store, so that it can be put in its place at once."""
    if new is not None:
        new.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".holdfast-repair-", dir=new.parent if new is not None else None))
    try:
        yield room
    finally:
        discard(room)


def _link_packs(source: Layout, scratch: Layout) -> None:
    """Packs are never changed once they are there, so a second name for them does."""
    if not source.packs.is_dir():
        return
    for pack in source.packs.glob("*.pack"):
        try:
            os.link(pack, scratch.packs / pack.name)
        except OSError:  # another file system
            rescue.copy_file(pack, scratch.packs / pack.name)


class _Mending:
    """Makes of the rescued rows a store of which everything that is left can be proven and sent."""

    def __init__(self, store: Store, report: RepairReport, noted: Witness | None, progress: Progress) -> None:
        self._store = store
        self._catalog = store._catalog
        self._report = report
        self._noted = noted
        self._progress = progress
        self._agents: dict[int, RepairedAgent] = {}
        self._why: dict[str, str] = {}  # checkpoint -> what is wrong with it
        self._lost_metadata: set[bytes] = set()
        self._fates: dict[tuple[int, str, str], str] = {}  # agent, branch, what about it -> in words, as it stands now

    def run(self) -> None:
        self._account()
        self._report.problems += orphans.name_again(self._catalog)
        for row in self._catalog.agents():
            self._agents[row.a] = RepairedAgent(str(body_of(row)["name"]))
            self._names_lost(row)
        self._report.agents = list(self._agents.values())
        self._lost_metadata = refinding.mark_lost_metadata(self._catalog)
        gone = set(self._missing_numbers("checkpoint"))
        for row in self._catalog.agents():
            self._forget(row, gone)
            self._tags_again(row)
        # Leaving something out can show that something else rested on it.
        for agent in self._catalog.agents():
            for name, branch in self._store._branches(agent.a):
                self._cut_line(agent, name, branch)
        affected: set[bytes] = set()
        while True:
            for row in self._catalog.agents():
                self._leave_out(row, affected)
            affected = self._judge()
            if not affected:
                break
        for row in self._catalog.agents():
            self._count(row)

    # -- what is not there ------------------------------------------------------------------------------------

    def _missing_numbers(self, table: str) -> Ranges:
        """Numbers of rows that were given, are not there, and were not removed on purpose."""
        told = Ranges()
        for _, body in self._catalog.forgotten():
            told |= Ranges(body.get({"checkpoint": "n", "event": "e", "effect": "r"}[table], ()))
        there = Ranges.of(key for key, _ in self._catalog.scan(table) if isinstance(key, int))
        newest = max(there.last, getattr(self._noted, {"checkpoint": "n", "event": "e", "effect": "r"}[table], 0))
        return Ranges.of(number for number in range(1, newest + 1) if number not in there and number not in told)

    def _account(self) -> None:
        for table, one in (("checkpoint", "checkpoint"), ("event", "event"), ("effect", "effect")):
            missing = self._missing_numbers(table)
            if missing:
                numbers = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in missing.pairs[:10])
                self._report.missing.append(f"{len(missing)} {one}(s) are gone: number {numbers}")

    def _names_lost(self, agent: AgentRow) -> None:
        """Branches that the events tell of and that have no rows: where they stood, and what they were called."""
        told = Told()
        for event in self._catalog.events(a=agent.a):
            told.add(event.a, body_of(event))
        there = {name for name, _ in self._store._branches(agent.a)}
        for name in sorted(told.branches.get(agent.a, set()) - there):
            self._agents[agent.a].lost.append(f"branch {name!r}: its row is lost, and with it where it stood")
        for name in sorted(there - told.branches.get(agent.a, there)):
            self._agents[agent.a].lost.append(f"branch {name!r}: it had another name, which is lost")

    def _tags_again(self, agent: AgentRow) -> None:
        """Tags whose rows are lost: the events tell them."""
        told = Told()
        for event in self._catalog.events(a=agent.a):
            told.add(event.a, body_of(event))
        there = self._store._tags(agent.a)
        rows = {row.id: row for row in Line(self._store, agent).rows()}
        for name, identity in told.tags.get(agent.a, {}).items():
            if name in there:
                continue
            row = rows.get(identity)
            if row is None:
                self._agents[agent.a].lost.append(f"tag {name!r}: its checkpoint is lost")
                continue
            now = now_us()
            body = {"name": name, "at": identity}
            said = Event(now, encode({"what": "tag", **body}))
            self._catalog.set_tag(agent.a, name_key(name), body=encode(body), n=row.n, event=said)
            self._report.problems.append(f"tag {name!r} of {self._agents[agent.a].name}: its row was lost")

    # -- what cannot be proven --------------------------------------------------------------------------------

    def _judge(self) -> set[bytes]:
        """The ids of checkpoints that cannot be proven, none when all can."""
        found: set[bytes] = set()
        report = self._store.verify(self._progress)
        for away in report.unreachable:
            raise ColdPlaceMissing(away.detail, place=away.place, hint=away.hint)
        for problem in report.problems:
            if problem.what == "table validity":  # what somebody thought of it, not what it is
                continue
            for identity in problem.affected:
                found.add(bytes.fromhex(identity))
                self._why.setdefault(identity, f"{problem.what}: {problem.detail}")
        return found

    def _leave_out(self, agent: AgentRow, affected: set[bytes]) -> None:
        """What one agent loses: its branches end before it, its tags on it go, and it is told of as forgotten."""
        told = self._agents[agent.a]
        line = Line(self._store, agent)
        rows = {row.n: row for row in line.rows(newest_first=False)}
        gone = {n for n, row in rows.items() if row.id in affected}
        for name, branch in self._store._branches(agent.a):
            if branch.head in gone or (branch.head and branch.head not in rows):
                self._end_before(agent, name, branch, rows, gone)
        for tag in self._catalog.tags(agent.a):
            if tag.n in gone or tag.n not in rows:
                called = str(body_of(tag)["name"])
                event = Event(now_us(), encode({"what": "untag", "name": called}))
                self._catalog.drop_tag(agent.a, tag.key, event=event)
                told.lost.append(f"tag {called!r}: its checkpoint is lost")
        judged = [row.n for row in self._catalog.validities(agent.a) if row.n in gone or row.n not in rows]
        rescue.drop_validity(self._catalog, agent.a, judged)
        for n in sorted(gone):
            identity = rows[n].id.hex()
            told.lost_checkpoints.append(
                LostCheckpoint(identity, Manifest.decode(rows[n].manifest).label, self._why.get(identity, "lost"))
            )
        if gone:
            self._forget(agent, gone)

    def _end_before(
        self, agent: AgentRow, name: str, branch: BranchRow, rows: dict[int, CheckpointRow], gone: set[int]
    ) -> None:
        """Put a branch back to the newest checkpoint that stays; what can be saved of its state gets another branch."""
        self._save_beyond(agent, name, branch)
        target: CheckpointRow | None = rows.get(branch.head)
        while target is not None and target.n in gone:
            target = rows.get(target.parent)
        if target is None:
            own = (row for n, row in sorted(rows.items(), reverse=True) if row.b == branch.b and n not in gone)
            target = next(own, None)
        head, head_id = (target.n, target.id) if target is not None else (0, b"")
        moved = encode({"what": "rollback", "branch": name, "from": branch.head_id, "to": head_id})
        self._catalog.set_head(
            branch.b,
            generation=self._catalog.branch_row(branch.b).generation,
            expect_head_id=branch.head_id,
            head=head,
            head_id=head_id,
            event=Event(now_us(), moved),
        )
        if target is not None:
            self._fates[agent.a, name, "end"] = f"its head is lost; it ends at #{target.depth} now"
        else:
            self._fates[agent.a, name, "end"] = "all of it is lost; it is empty now"
            if self._fates.get((agent.a, name, "beyond")) == _NOTHING:
                del self._fates[agent.a, name, "beyond"]

    def _save_beyond(self, agent: AgentRow, name: str, branch: BranchRow) -> None:
        """What ``recover=True`` would go on with: the newest state that can be trusted, and every record that can."""
        told = self._agents[agent.a]
        try:
            beyond, lost = recovery.recover(self._store, told.name, agent, branch)
            if lost and beyond.b != branch.b:
                called = str(body_of(beyond)["name"])
                if beyond.head_id == body_of(beyond)["from"]:  # made now, or nobody has gone on there yet
                    with self._store.agent(told.name, branch=called) as handle:
                        handle.checkpoint(f"repaired {name}")
                self._fates[agent.a, name, "beyond"] = f"{lost}; what could be saved is on {called!r}"
        except Damaged:
            self._fates[agent.a, name, "beyond"] = _NOTHING

    def _cut_line(self, agent: AgentRow, name: str, branch: BranchRow) -> None:
        """Make a branch's line end where its records can still be trusted."""
        found = salvage.trusted(self._store, branch.b)
        if not found.problem:
            return
        self._save_beyond(agent, name, branch)
        line = salvage.shortened(self._store, branch.b, found)
        rescue.add_rows(self._catalog, "line", [(line.b, line.origin, line.start, line.count, line.chain)])

    def _forget(self, agent: AgentRow, numbers: set[int]) -> None:
        """Say of checkpoints that they are gone, so that those after them can stand alone."""
        line = Line(self._store, agent)
        rows = {row.n: row for row in line.rows(newest_first=False)}
        known = line.forgotten | Ranges.of(numbers)
        cut = [
            Manifest.decode(row.manifest).parent
            for n, row in rows.items()
            if n not in known and row.parent and (row.parent in known or row.parent not in rows)
        ]
        if not cut and not numbers & rows.keys():
            return
        body = {
            "what": "forget",
            "n": known.pairs,
            "e": line.forgotten_events.pairs,
            "cut": cut,
            "untag": [],
            "heads": [[name, row.head_id] for name, row in self._store._branches(agent.a)],
            "newest": self._catalog.newest()[0],
        }
        event = Event(now_us(), encode(body), forgotten_key(agent.a))
        self._catalog.add_events(agent.a, [event])

    def _count(self, agent: AgentRow) -> None:
        """What is left of an agent, and what became of the rest."""
        told = self._agents[agent.a]
        branches = [f"branch {name!r}: {fate}" for (a, name, _), fate in self._fates.items() if a == agent.a]
        unknown: dict[bytes, list[int]] = {}
        for row in Line(self._store, agent).rows(newest_first=False):
            told.checkpoints += 1
            described = Manifest.decode(row.manifest).metadata
            if described in self._lost_metadata:
                unknown.setdefault(described, []).append(row.depth)
        told.lost[:0] = branches
        for digest, depths in unknown.items():
            where = f"{len(depths)} checkpoint(s), #{min(depths)} to #{max(depths)}"
            told.lost.append(f"metadata {digest.hex()[:12]} (what ran) of {where}: lost; their states are kept")
        lines = [self._catalog.line(row.b) for row in self._catalog.branches(agent.a)]
        own = {line.b for line in lines}
        told.effects = sum(line.count - (line.start if line.origin in own else 0) for line in lines)
