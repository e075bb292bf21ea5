"""Recovery: from a damaged head to the newest valid ancestor, on a new branch, saying what is lost.

Never removes or changes anything that is stored. Running it again finds the branch that it made before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.agent import history
from holdfast.codec.values import decode
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.catalog import AgentRow, BranchRow, CheckpointRow

if TYPE_CHECKING:
    from holdfast.agent.store import Store


def problem_with(store: Store, row: CheckpointRow) -> str:
    """Why a checkpoint's state cannot be trusted; empty when it can."""
    validity = store._catalog.validity(row.n)
    if validity is not None:
        body = decode(validity.body)
        return f"it is marked {body['validity']}: {body['reason']}".rstrip(": ")
    try:
        history.Stored(store._catalog, row).since_base()
        document = history.load(store._catalog, row, store._registry, inert=True)
        for name in document:
            document.raw_section(name)
    except HoldfastError as error:
        return error.message
    return ""


def newest_valid(store: Store, branch: BranchRow) -> tuple[CheckpointRow | None, list[str]]:
    """The newest ancestor of a branch's head that can be trusted, and the checkpoints that are passed over."""
    passed: list[str] = []
    n, expected = branch.head, branch.head_id
    while n:
        try:
            row = store._catalog.checkpoint(n)
        except HoldfastError as error:
            passed.append(f"{expected.hex()[:12] or n}: {error.message}")
            below = _row_below(store, branch, n)
            if below is None:
                return None, passed
            row = below
        reason = problem_with(store, row)
        if not reason:
            return row, passed
        passed.append(f"{row.id.hex()[:12]}: {reason}")
        n = row.parent
    return None, passed


def _row_below(store: Store, branch: BranchRow, n: int) -> CheckpointRow | None:
    """When a row cannot even be read, its parent is unknown: the newest readable row of the branch before it."""
    for below in range(n - 1, 0, -1):
        try:
            row = store._catalog.checkpoint(below)
        except HoldfastError:
            continue
        if row.a == branch.a:
            return row
    return None


def recover(store: Store, name: str, agent: AgentRow, branch: BranchRow) -> tuple[BranchRow, str]:
    """The branch to go on with, and in words what is lost (empty when nothing is)."""
    if not branch.head:
        return branch, ""
    valid, passed = newest_valid(store, branch)
    if not passed:
        return branch, ""
    if valid is None:
        raise Damaged(
            f"no checkpoint of {name!r} can be trusted",
            what=tuple(passed),
            lost="everything",
            hint="Run `holdfast verify` for the whole picture.",
        )
    lost = f"{len(passed)} checkpoint(s) after {valid.id.hex()[:12]} (#{valid.depth}) cannot be trusted: " + "; ".join(
        passed[:5]
    )
    number = 1
    while True:
        new = f"recovered-{number}"
        existing = next((row for other, row in store._branches(agent.a) if other == new), None)
        if existing is None:
            return store._add_branch(agent, new, valid), lost
        if decode(existing.body)["from"] == valid.id and not newest_valid(store, existing)[1]:
            return existing, lost
        number += 1
