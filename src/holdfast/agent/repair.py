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

from holdfast.agent import recovery, salvage
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import name_key
from holdfast.agent.store import Store, find_store
from holdfast.agent.transfer import Progress, transfer
from holdfast.agent.verify import Told
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, Damaged, NotAStore
from holdfast.store import rescue
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, Event, forgotten_key
from holdfast.store.embedded import open_embedded
from holdfast.store.files import Layout
from holdfast.store.keys import read_keys
from holdfast.store.keysources import Key, find_secret
from holdfast.store.opening import now_us, unlock
from holdfast.store.ranges import Ranges
from holdfast.store.witness import witness_report

_OPTIONS = (False, "commit", False, True)


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

    @property
    def whole(self) -> bool:
        """Whether nothing was lost."""
        return not self.missing and all(agent.whole for agent in self.agents)

    def to_json(self) -> dict[str, Any]:
        return {
            "store": str(self.path),
            "to": str(self.to) if self.to is not None else None,
            "whole": self.whole,
            "agents": [agent.to_json() for agent in self.agents],
            "missing": self.missing,
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
    if not source.catalog.is_file():
        raise NotAStore(f"there is no store at {source.path}: store.db is missing", hint="Check the path.")
    new = Path(os.path.realpath(to)) if to is not None else None
    if new is not None and new.exists():
        raise BadOption(f"{new} exists already", hint="Name a place where nothing is yet.")
    secret = find_secret(key)
    cipher = unlock(source, secret, None)
    say = progress or (lambda _what, _done, _total: None)
    with _workshop(new) as room, ExitStack() as stack:
        say("reading the damaged catalog", 0, 1)
        scratch = Layout(room / "scratch")
        keys = read_keys(source.path)
        own = keys.uuid if keys is not None else uuid.uuid4().bytes
        noted = witness_report(source.path).newest
        problems = rescue.rescue(rescue.copy_catalog(source, room / "copy"), scratch, cipher, own, noted)
        say("reading the damaged catalog", 1, 1)
        _link_packs(source, scratch)
        if cipher.keyed:
            shutil.copyfile(source.path / "keys", scratch.path / "keys")
        report = RepairReport(source.path, new, problems=problems)
        catalog = open_embedded(scratch.path, create=False, secret=secret, remember=False)
        store = Store(scratch.path, catalog, _OPTIONS)
        stack.callback(store.close)
        _Mending(store, report, source, say).run()
        if new is not None:
            made = open_embedded(room / "new", secret=secret, remember=False)
            target = Store(room / "new", made, _OPTIONS)
            try:
                transfer(store, target, progress=progress)
            finally:
                target.close()
            (room / "new").rename(new)
        return report


@contextmanager
def _workshop(new: Path | None) -> Iterator[Path]:
    """Where the work is done: beside the new store, so that it can be put in its place at once."""
    if new is not None:
        new.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=".holdfast-repair-", dir=new.parent if new is not None else None))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _link_packs(source: Layout, scratch: Layout) -> None:
    """Packs are never changed once they are there, so a second name for them does."""
    if not source.packs.is_dir():
        return
    for pack in source.packs.glob("*.pack"):
        try:
            os.link(pack, scratch.packs / pack.name)
        except OSError:  # another file system
            shutil.copyfile(pack, scratch.packs / pack.name)


class _Mending:
    """Makes of the rescued rows a store of which everything that is left can be proven and sent."""

    def __init__(self, store: Store, report: RepairReport, source: Layout, progress: Progress) -> None:
        self._store = store
        self._catalog = store._catalog
        self._report = report
        self._source = source
        self._progress = progress
        self._agents: dict[int, RepairedAgent] = {}
        self._why: dict[str, str] = {}  # checkpoint -> what is wrong with it

    def run(self) -> None:
        self._account()
        self._name_orphans()
        for row in self._catalog.agents():
            self._agents[row.a] = RepairedAgent(str(decode(row.body)["name"]))
        self._report.agents = list(self._agents.values())
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
        noted = witness_report(self._source.path).newest
        newest = max(there.last, getattr(noted, {"checkpoint": "n", "event": "e", "effect": "r"}[table], 0))
        return Ranges.of(number for number in range(1, newest + 1) if number not in there and number not in told)

    def _account(self) -> None:
        for table, one in (("checkpoint", "checkpoint"), ("event", "event"), ("effect", "effect")):
            missing = self._missing_numbers(table)
            if missing:
                numbers = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in missing.pairs[:10])
                self._report.missing.append(f"{len(missing)} {one}(s) are gone: number {numbers}")

    def _name_orphans(self) -> None:
        """Agents and branches whose rows are lost get new ones, as far as their checkpoints tell."""
        agents = {row.a for row in self._catalog.agents()}
        branches = {key for key, _ in self._catalog.scan("branch")}
        told = self._told_names()
        newest: dict[int, CheckpointRow] = {}
        for row in self._catalog.checkpoints():
            newest[row.b] = row
        for row in sorted(newest.values(), key=lambda row: row.n):
            if row.a not in agents:
                agents.add(row.a)
                name = told.get(row.a, f"rescued-{row.a}")
                while self._catalog.agent(name_key(name)) is not None:
                    name += "-rescued"
                body = encode({"name": name, "created": Manifest.decode(row.manifest).time_us})
                rescue.add_rows(
                    self._catalog,
                    "agent",
                    [(row.a, Manifest.decode(row.manifest).agent, name_key(name), body)],
                )
                self._report.problems.append(f"agent {name}: its row was lost; its checkpoints are kept")
            if row.b not in branches:
                taken = [decode(other.body)["name"] for other in self._catalog.branches(row.a)]
                name = "main" if "main" not in taken else f"rescued-{row.b}"
                body = encode({"name": name, "created": Manifest.decode(row.manifest).time_us, "from": b""})
                columns = (row.b, row.a, uuid.uuid4().bytes, name_key(name), body, row.n, row.id, 0)
                rescue.add_rows(self._catalog, "branch", [columns])
                self._report.problems.append(f"branch {row.b}: its row was lost; its checkpoints are kept on {name!r}")
        for agent in [row for row in self._catalog.agents() if not self._catalog.branches(row.a)]:
            body = encode({"name": "main", "created": now_us(), "from": b""})
            added = Event(now_us(), encode({"what": "branch", "name": "main", "at": b""}))
            self._catalog.add_branch(
                agent.a, key=name_key("main"), body=body, uuid=uuid.uuid4().bytes, head=0, head_id=b"", event=added
            )

    def _told_names(self) -> dict[int, str]:
        """What the events say agents are called."""
        found: dict[int, str] = {}
        for event in self._catalog.events():
            body = decode(event.body, inert=True)
            if isinstance(body, dict) and body.get("what") in {"agent", "clone"}:
                found[event.a] = str(body["name"])
        return found

    def _tags_again(self, agent: AgentRow) -> None:
        """Tags whose rows are lost: the events tell them."""
        told = Told()
        for event in self._catalog.events(a=agent.a):
            told.add(event.a, decode(event.body, inert=True))
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
        for problem in self._store.verify(self._progress).problems:
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
                called = str(decode(tag.body)["name"])
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
        told = self._agents[agent.a]
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
        left = f"#{target.depth}" if target is not None else "nothing"
        told.lost.append(f"branch {name!r}: its head is lost; it ends at {left} now")

    def _save_beyond(self, agent: AgentRow, name: str, branch: BranchRow) -> None:
        """What ``recover=True`` would go on with: the newest state that can be trusted, and every record that can."""
        told = self._agents[agent.a]
        try:
            beyond, lost = recovery.recover(self._store, told.name, agent, branch)
            if lost and beyond.b != branch.b:
                called = str(decode(beyond.body)["name"])
                if beyond.head_id == decode(beyond.body)["from"]:  # made now, or nobody has gone on there yet
                    with self._store.agent(told.name, branch=called) as handle:
                        handle.checkpoint(f"repaired {name}")
                told.lost.append(f"branch {name!r}: {lost}; what could be saved is on {called!r}")
        except Damaged:
            told.lost.append(f"branch {name!r}: no state of it could be saved")

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
        told = self._agents[agent.a]
        told.checkpoints = Line(self._store, agent).count()
        lines = [self._catalog.line(row.b) for row in self._catalog.branches(agent.a)]
        own = {line.b for line in lines}
        told.effects = sum(line.count - (line.start if line.origin in own else 0) for line in lines)
