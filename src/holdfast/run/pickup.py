"""Picking up a run that nobody executes: from its row in the table to a handle on its agent.

Owns reading its line, once, counting how often it was tried, and becoming the writer of its branch. Must not know who
picks it up, nor how a run goes. What always holds: a try is recorded in the transaction in which the branch was taken,
so before it is made; where anything was written since the line was read, somebody was faster, and nothing is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.agent.branch import BranchWriter, read_line
from holdfast.errors import AgentBusy, HoldfastError
from holdfast.run import opened
from holdfast.run import records as rec
from holdfast.run.effects import SPAWN
from holdfast.run.line import entries
from holdfast.run.past import Past
from holdfast.run.scope import now_us
from holdfast.store.catalog import Agent as AgentRow
from holdfast.store.catalog import Branch, Open
from holdfast.store.changes import Change

if TYPE_CHECKING:
    from holdfast.run.handle import Agent
    from holdfast.run.store import Store

TRIES = 3
"""How often a run may end its worker without getting any further."""


class Seen(NamedTuple):
    """A branch as it was read, before anybody has taken it: its line, and the rows of its open runs."""

    branch: Branch
    records: list[tuple[int, rec.Record]]
    rows: dict[bytes, Open]
    goes_back: bool  # a rollback has begun and not ended

    def is_child(self, run: str) -> bool:
        """Whether it is a child's run: that one goes on with its parent, which has to be told what comes of it."""
        notes = (one for _, one in self.records if isinstance(one, rec.Note))
        return any((one.what, one.name) == (SPAWN, run) for one in notes)

    def tries(self, run: str) -> list[rec.Note]:
        """When workers have resumed a run in vain, newest first: after its last record, the line ends with these.

        What others do, who interrupt what they have resumed, says nothing.
        """
        found = []
        for _, record in reversed(self.records):
            if not isinstance(record, rec.Note) or record.run != run or record.what not in {"resume", "trace"}:
                break
            found += [record] if (record.what, record.path) == ("resume", rec.WORKER) else []
        return found


def look(store: Store, b: int) -> Seen:
    """Read the whole line of a branch, which the chain proves. The rows come last, so that they are not older."""
    view = store._db.view
    branch = view.branch_at(b)
    records = list(opened.decoded(list(read_line(view, branch)), b))
    rows = view.opened(b, [])
    runs = {row.run: row for row in rows if not row.signal}
    return Seen(branch, records, runs, any(row.signal == opened.GOING_BACK.signal for row in rows))


def take(store: Store, owner: AgentRow, seen: Seen, run: str, claim: Callable[[Change, int], None]) -> Agent:
    """Become the writer of a branch, for a run that is resumed now; a handle that nobody else in this process gets.

    ``claim``, which gets the generation, claims its place in its queue in the same transaction. Raises ``AgentBusy``
    where somebody has the branch, or has had it since it was read, or it is not its turn.
    """
    branch, row = seen.branch, seen.rows.get(opened.key(run))
    if row is None:
        raise _faster(run)
    note = rec.Note(now_us(), run, "resume", row.body["status"], path=rec.WORKER)
    (record,) = entries(note)
    rows: Mapping[bytes, Open] = seen.rows
    if record.follow is not None:
        record = record._replace(opens=record.follow(rows, branch.records + 1), follow=None)
        rows = record.opens.applied(rows)
    ours = branch

    def count(change: Change, now: Branch) -> Branch:
        nonlocal ours
        if (now.generation, now.line) != (branch.generation, branch.line):
            raise _faster(run)
        claim(change, now.generation + 1)
        ours = now.at_end(change.put_records(now.b, now.end, [record]))
        return ours

    with store._lock:
        known = store._handles.get(branch.b)
        if known is not None and not known.closed:
            raise AgentBusy(f"{known.name} is open in this process", hint="Close the handle on it.")
    lease = store._lease(owner.name, branch, wait_s=0.0, also=count)
    try:
        ours = ours._replace(generation=lease.generation)
        handle: Agent = store._opened(owner, ours, lease, None)  # type: ignore[assignment] # of this room
        handle._alone = True
        if handle._writer is not None:
            handle._writer.know_opened(rows)
        with store._lock:
            store._handles[branch.b] = handle
        handle._host.picked_up(run, Past([*seen.records, (ours.records, note)]))
    except BaseException:
        with suppress(HoldfastError):
            BranchWriter(store, ours).append(entries(excuse(run)), flush=True)
        lease.release()
        raise
    return handle


def excuse(run: str) -> rec.Note:
    """What is recorded where a try has ended without the run being at fault: it does not count."""
    return rec.Note(now_us(), run, "stopped", rec.WORKER)


def _faster(run: str) -> AgentBusy:
    return AgentBusy(f"somebody else has picked run {run} up", hint="Look again.")
