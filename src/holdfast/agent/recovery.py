"""Recovery: from a damaged head to the newest valid ancestor, on a new branch, saying what is lost.

Owns the search for that ancestor and the words for what lies after it; errors about damage are completed here, so that
whoever meets one learns what would be left. Never removes or changes anything that is stored, and never passes over
what only cannot be reached now. Running it again finds the branch that it made before. What happened outside has
happened, whatever state one goes back to: the new branch inherits every record of the damaged one that can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.agent import history, salvage
from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.errors import ColdPlaceMissing, Damaged, HoldfastError
from holdfast.store.bodies import body_of
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow, checkpoint_id

if TYPE_CHECKING:
    from holdfast.agent.store import Store

# How many of the checkpoints that are passed over are named one by one.
_NAMED_MAX = 5
_NO_WAY = "Put the store back from a backup, or see with `holdfast repair` what can be saved of it."


class Finding(Struct, frozen=True):
    """The newest checkpoint at or above a head that can be trusted, and those that were passed over on the way."""

    valid: CheckpointRow | None
    passed: list[str]

    @property
    def lost(self) -> str:
        """In words what goes missing; empty when nothing does."""
        if not self.passed:
            return ""
        named = "; ".join(self.passed[:_NAMED_MAX])
        if len(self.passed) > _NAMED_MAX:
            named += f"; and {len(self.passed) - _NAMED_MAX} more"
        if self.valid is None:
            return f"everything: no checkpoint can be trusted: {named}"
        where = f"{self.valid.id.hex()[:12]} (#{self.valid.depth})"
        return f"{len(self.passed)} checkpoint(s) after {where} cannot be trusted: {named}"


def problem_with(store: Store, row: CheckpointRow, a: int) -> str:
    """Why a checkpoint's state cannot be trusted; empty when it can."""
    try:
        validity = store._catalog.validity(a, row.n)
        if validity is not None:
            body = body_of(validity)
            return f"it is marked {body['validity']}: {body['reason']}".removesuffix(": ")
        history.Stored(store._catalog, row).since_base()
        history.read_all(store._catalog, row)
    except ColdPlaceMissing:
        raise
    except HoldfastError as error:
        return error.message
    return ""


def find(store: Store, branch: BranchRow) -> Finding:
    """Walk from a branch's head towards its root until a checkpoint can be trusted."""
    passed: list[str] = []
    line = store._line(branch.a)
    n, expected = branch.head, branch.head_id
    while n and n not in line.forgotten:
        row: CheckpointRow | None
        try:
            row = store._catalog.checkpoint(n)
            if not line.owns(row.a, row.n) or (expected and row.id != expected):
                raise Damaged(f"checkpoint {n} is not the one that is named", what=(f"checkpoint {n}",))
            expected = Manifest.decode(row.manifest).parent
            reason = problem_with(store, row, branch.a)
            if not reason:
                return Finding(row, passed)
            passed.append(f"{row.id.hex()[:12]}: {reason}")
            n = row.parent
        except ColdPlaceMissing:
            raise
        except HoldfastError as error:
            passed.append(f"{expected.hex()[:12] or n}: {error.message}")
            row = _parent_of_unreadable(store, branch, line, n, expected)
            if row is None:
                break
            n, expected = row.n, row.id
    return Finding(None, passed)


def _parent_of_unreadable(store: Store, branch: BranchRow, line: Line, n: int, expected: bytes) -> CheckpointRow | None:
    """The parent of a checkpoint whose row is damaged.

    Where the manifest is still what its id says, it names the parent, and that is proof. Otherwise the newest readable
    checkpoint that was made on this branch before it, or the one that the branch began at, is as near as one can get.
    """
    try:
        manifest = store._catalog.manifest_as_it_is(n)
        if manifest is not None and checkpoint_id(manifest) == expected:
            parent = Manifest.decode(manifest).parent
            return next((row for row in _readable(store, line, n) if row.id == parent), None)
    except HoldfastError:
        pass
    began = bytes(body_of(branch)["from"])
    on = {b for b, _ in Line(store, line.agent, branch).streams}
    return next((row for row in _readable(store, line, n) if row.b in on or row.id == began), None)


def _readable(store: Store, line: Line, before: int) -> Iterator[CheckpointRow]:
    """Every visible row below a number that can be read, newest first."""
    for n in range(before - 1, 0, -1):
        try:
            row = store._catalog.checkpoint(n)
        except HoldfastError:
            continue
        if line.sees(row):
            yield row


def explain(store: Store, name: str, branch: BranchRow, error: Damaged) -> Damaged:
    """Complete an error that was met while reading the head of a branch: what would be left, and what lost."""
    if error.newest_valid or error.lost:
        return error
    try:
        finding = find(store, branch)
    except ColdPlaceMissing:
        return error
    lost = _lost(finding, salvage.trusted(store, branch.b))
    if not lost:
        return error
    error.lost = lost
    if finding.valid is None and not finding.passed:
        error.hint = f"store.agent({name!r}, recover=True) goes on without it on a new branch. Lost would be: {lost}"
        return error
    if finding.valid is None:
        error.hint = _NO_WAY
        return error
    error.newest_valid = finding.valid.id.hex()
    error.hint = (
        f"The newest valid checkpoint is {error.newest_valid[:12]} (#{finding.valid.depth}); "
        f"store.agent({name!r}, recover=True) goes on from it on a new branch. Lost would be: {lost}"
    )
    return error


def _lost(finding: Finding, records: salvage.Salvage) -> str:
    return "; ".join(filter(None, (finding.lost, records.lost)))


def recover(store: Store, name: str, agent: AgentRow, branch: BranchRow) -> tuple[BranchRow, str]:
    """The branch to go on with, and in words what is lost (empty when nothing is)."""
    finding = find(store, branch)
    records = salvage.trusted(store, branch.b)
    lost = _lost(finding, records)
    if not lost:
        return branch, ""
    if finding.valid is None and finding.passed:
        raise Damaged(
            f"no checkpoint of {name!r} can be trusted",
            what=tuple(finding.passed),
            lost=finding.lost,
            hint=_NO_WAY,
        )
    branches = dict(store._branches(agent.a))
    start = finding.valid.id if finding.valid is not None else b""
    number = 1
    while True:
        new = f"recovered-{number}"
        existing = branches.get(new)
        if existing is None and new not in store._tags(agent.a):
            line, copies = salvage.inheritance(store, branch.b, records)
            more = {"recovered": branch.b}
            return store._add_branch(agent, new, finding.valid, more, line=line, copies=copies), lost
        if (
            existing is not None
            and body_of(existing)["from"] == start
            and body_of(existing).get("recovered") == branch.b
            and not find(store, existing).passed
            and not salvage.trusted(store, existing.b).problem
        ):
            return existing, lost
        number += 1
