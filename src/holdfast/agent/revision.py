"""Revisions: how a text names a checkpoint (design: branch, tag, label, ~2, branch~2, #17, id:)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.agent.manifest import Manifest
from holdfast.errors import UnknownRevision
from holdfast.store.catalog import BranchRow, Catalog, CheckpointRow

if TYPE_CHECKING:
    from holdfast.agent.store import Store

_BACK = re.compile(r"^(.*)~(\d+)$", re.DOTALL)
_ID = re.compile(r"^id:[0-9a-fA-F]*$")
_ID_MIN = 4


def find(store: Store, branch: BranchRow, revision: str) -> CheckpointRow:
    """The checkpoint that ``revision`` names, seen from ``branch``."""
    catalog = store._catalog
    row = _named(store, branch, revision)
    if row is None and (match := _BACK.match(revision)):
        row = _named(store, branch, match[1]) if match[1] else _head(catalog, branch)
        if row is not None:
            row = _back(catalog, row, int(match[2]), revision)
    if row is None:
        known = [name for name, _ in store._branches(branch.a)] + list(store._tags(branch.a))
        elsewhere = [row for row in catalog.checkpoints(a=branch.a) if Manifest.decode(row.manifest).label == revision]
        if elsewhere:
            raise UnknownRevision(
                f"no checkpoint on this line of history has the label {revision!r}",
                hint=f"One that is not on it has: id:{elsewhere[-1].id.hex()[:12]}. See `holdfast log --all`.",
            )
        raise UnknownRevision(
            f"{revision!r} names no checkpoint of this agent",
            hint=f"Branches and tags: {', '.join(known)}. Also a label, ~2, #17 or id:...; see `holdfast log`.",
        )
    return row


def _head(catalog: Catalog, branch: BranchRow) -> CheckpointRow:
    if not branch.head:
        raise UnknownRevision("this branch has no checkpoint yet", hint="Call agent.checkpoint() first.")
    return catalog.checkpoint(branch.head)


def _named(store: Store, branch: BranchRow, name: str) -> CheckpointRow | None:
    catalog = store._catalog
    if not name:
        return _head(catalog, branch)
    for other, row in store._branches(branch.a):
        if other == name:
            return _head(catalog, row)
    tagged = store._tags(branch.a).get(name)
    if tagged is not None:
        return catalog.checkpoint(tagged)
    if _ID.match(name):
        return _by_id(catalog, branch, name[3:])
    if name.startswith("#") and name[1:].isdigit():
        return _by_depth(catalog, branch, int(name[1:]))
    return _by_label(catalog, branch, name)


def _by_label(catalog: Catalog, branch: BranchRow, label: str) -> CheckpointRow | None:
    n = branch.head
    while n:  # newest first, a few at a time: labels that people look for are rarely far back
        rows = catalog.ancestry(n, limit=64)
        for row in rows:
            if Manifest.decode(row.manifest).label == label:
                return row
        n = rows[-1].parent if rows else 0
    return None


def _by_id(catalog: Catalog, branch: BranchRow, prefix: str) -> CheckpointRow:
    wanted = prefix.lower()
    if len(wanted) < _ID_MIN:
        raise UnknownRevision(f"id:{prefix} is too short", hint=f"Give at least {_ID_MIN} characters.")
    found = [row for row in catalog.checkpoints(a=branch.a) if row.id.hex().startswith(wanted)]
    if len(found) != 1:
        what = "names no checkpoint" if not found else f"fits {len(found)} checkpoints"
        raise UnknownRevision(f"id:{prefix} {what} of this agent", hint="See `holdfast log --all` for ids.")
    return found[0]


def _by_depth(catalog: Catalog, branch: BranchRow, depth: int) -> CheckpointRow:
    head = _head(catalog, branch)
    if not 1 <= depth <= head.depth:
        raise UnknownRevision(f"#{depth}: this branch has depths 1 to {head.depth}")
    return _back(catalog, head, head.depth - depth, f"#{depth}")


def _back(catalog: Catalog, row: CheckpointRow, steps: int, revision: str) -> CheckpointRow:
    if steps >= row.depth:
        raise UnknownRevision(f"{revision!r} goes back further than the history, which has {row.depth} checkpoints")
    return catalog.ancestry(row.n, limit=steps + 1)[-1]
