"""Going back, as far as an agent in a store is concerned: which checkpoint, which head, which other agents.

Owns the step from a rollback's questions to revisions, branches and handles. Must not know effects. What always holds:
the state, the head and the record of a rollback move together or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.errors import BadOption
from holdfast.run import records as rec
from holdfast.run.choosing import unfinished
from holdfast.run.past import OPEN, Past, RunPast
from holdfast.run.planning import Target
from holdfast.run.stored import entries
from holdfast.store.catalog import Point

if TYPE_CHECKING:
    from holdfast.run.handle import Agent
    from holdfast.run.host import AgentHost


class Returning:
    """The part of an agent's host that rollbacks ask (``planning.RollbackHost``)."""

    handle: Agent
    whole = False  # known to have no run and no rollback under way
    borrowed = False  # the handle was opened for somebody else's rollback, or for a run as a child

    @property
    def branch_name(self) -> str:
        return self.handle.branch_name

    def moved(self) -> None:
        """The head was moved."""
        raise TypeError("the host says what follows from it")

    def target(self, revision: Any) -> Target:
        agent = self.handle
        row = self._by_id(revision) if isinstance(revision, bytes) else agent._find(revision)
        found = self._target(agent._seen(row))
        if found.position and not self._knows(row, found.position):
            raise BadOption(
                f"{found.name} was made on another branch, after effects that this one knows nothing of",
                hint="Begin a branch there: agent.branch(name, at=...).",
            )
        return found

    def _by_id(self, id: bytes) -> Point:
        return self.handle._find(f"id:{id.hex()}")

    def _target(self, found: Checkpoint) -> Target:
        manifest = found._manifest
        return Target(found._id, manifest.effects[0], manifest.time_us, found.label or found.short_id, found)

    def _knows(self, point: Point, count: int) -> bool:
        """Whether the records before a checkpoint are those that this branch's line begins with."""
        view, branch = self.handle._store._db.view, self.handle._fresh_branch()
        return count <= branch.records and view.numbered(branch.line, count).r == point.row.line

    def newest_before(self, at_us: int) -> Target | None:
        agent = self.handle
        agent._store.flush()
        for row in agent._store._db.view.walk(agent._fresh_branch().head):
            found = agent._seen(row)
            if found._manifest.time_us <= at_us:
                return self._target(found)
        return None

    def stands_at(self, target: Target) -> bool:
        self.handle._store.flush()
        return self.handle._fresh_branch().id == target.id and not self.handle.dirty

    @property
    def inherited(self) -> int:
        return int(self.handle._branch.body.get("start", 0))

    def users(self) -> list[tuple[str, int]]:
        view, mine = self.handle._store._db.view, self.handle._fresh_branch()
        line = view.handles(mine.line)
        found = []
        for agent in view.agents():
            for branch in view.branches(agent.a):
                if branch.b == mine.b or not branch.line:
                    continue
                shared = max((i for r, i in view.handles(branch.line).items() if r in line), default=0)
                if shared > self.inherited:
                    own = agent.a == mine.a
                    found.append((f"branch {branch.name}" if own else f"agent {agent.name}", shared))
        return found

    def leaving(self, target: Target) -> tuple[list[Any], Any]:
        shown = self.handle._leaving(target.checkpoint)
        return shown.abandons, shown.diff

    def secure(self, label: str) -> None:
        self.handle._secure(label)

    def return_to(self, target: Target, record: rec.RolledBack | None) -> Checkpoint:
        made = self.handle._go_back(target.checkpoint._current(), entries(record) if record is not None else ())
        self.whole = True
        self.moved()
        return made

    def check_free(self) -> None:
        """Raise while a run or a rollback has begun and not ended: what is done beside it would be in its way."""
        if self.whole:
            return
        host = self.handle._host
        ledger: Any = host.ledger
        owner = Past(ledger.marked()).owner(host.origin) if ledger.count else None
        if owner is not None:
            raise unfinished(host, owner, executing=host.busy)
        self.whole = True

    def stands_in(self, run: RunPast) -> bool:
        """Whether the newest checkpoint of the branch is one of this run: nothing else was saved since."""
        head = self.handle.head
        while head is not None and head.kind == "recover":  # the state of the one before it
            head = self.handle.at(f"id:{head.parent_id}")
        if head is None or head._id in run.checkpoints:
            return True
        # A branch does not inherit the record of the checkpoint that it begins at.
        origin = bytes(self.handle._branch.body["from"])
        began = run.status in OPEN and run.newest <= self.handle._host.origin
        return began and head._id == origin and bytes.fromhex(head.parent_id) in run.checkpoints

    # -- other agents ---------------------------------------------------------------------------------------

    def child(self, name: str, branch: str, *, write: bool) -> AgentHost | None:
        store = self.handle._store
        row = store._db.view.agent(name)
        known = store._db.view.branch(row.a, branch) if row is not None else None
        return self._opened(name, branch, known.b, write=write) if known is not None else None

    def own_child(self, name: str, branch: str) -> AgentHost:
        store = self.handle._store
        row = store._db.view.agent(name)
        if row is None:
            row = store._add_agent(name)
        known = store._db.view.branch(row.a, branch)
        if known is None:  # this branch's child shares nothing with that of another branch
            known = store._add_branch(row, branch, None)
        return self._opened(name, branch, known.b, write=True)

    def _opened(self, name: str, branch: str, b: int, *, write: bool) -> AgentHost:
        store = self.handle._store
        with store._lock:
            found: Any = store._handles.get(b)
            if found is None or found.closed:
                found = store.agent(name, branch=branch, readonly=not write)
                found._host.borrowed = write
        host: AgentHost = found._host
        return host

    def release(self) -> None:
        if self.borrowed:
            self.borrowed = False
            self.handle.close()
