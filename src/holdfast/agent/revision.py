"""Revisions: how a text names a checkpoint (design: branch, tag, label, ~2, branch~2, #17, id:)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from holdfast.agent.line import Line
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
    line = store._line(branch.a)
    row = _named(store, line, branch, revision)
    if row is None and (match := _BACK.match(revision)):
        row = _named(store, line, branch, match[1]) or _labelled(line, branch, match[1])
        if row is not None:
            row = _back(line, row, int(match[2]), revision)
    if row is None:
        row = _labelled(line, branch, revision)
    if row is None:
        known = [name for name, _ in store._branches(branch.a)] + list(store._tags(branch.a))
        elsewhere = next((row for row in line.rows() if Manifest.decode(row.manifest).label == revision), None)
        if elsewhere is not None:
            raise UnknownRevision(
                f"no checkpoint on this line of history has the label {revision!r}",
                hint=f"One that is not on it has: id:{elsewhere.id.hex()[:12]}. See `holdfast log --all`.",
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


def _named(store: Store, line: Line, branch: BranchRow, name: str) -> CheckpointRow | None:
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
        return _by_id(line, name[3:])
    if name.startswith("#") and name[1:].isdigit():
        return _by_depth(line, _head(catalog, branch), int(name[1:]))
    return None


def _labelled(line: Line, branch: BranchRow, label: str) -> CheckpointRow | None:
    return next((row for row in line.left(branch.head) if Manifest.decode(row.manifest).label == label), None)


def _by_id(line: Line, prefix: str) -> CheckpointRow:
    wanted = prefix.lower()
    if len(wanted) < _ID_MIN:
        raise UnknownRevision(f"id:{prefix} is too short", hint=f"Give at least {_ID_MIN} characters.")
    found = [row for row in line.rows() if row.id.hex().startswith(wanted)]
    if len(found) != 1:
        what = "names no checkpoint" if not found else f"fits {len(found)} checkpoints"
        raise UnknownRevision(f"id:{prefix} {what} of this agent", hint="See `holdfast log --all` for ids.")
    return found[0]


def _by_depth(line: Line, head: CheckpointRow, depth: int) -> CheckpointRow:
    if not 1 <= depth <= head.depth:
        raise UnknownRevision(f"#{depth}: this branch has depths 1 to {head.depth}")
    if not line.over:
        return _back(line, head, head.depth - depth, f"#{depth}")
    for row in line.left(head.n):
        if row.depth == depth:
            return row
    raise UnknownRevision(f"#{depth} was forgotten", hint="See `holdfast log` for what is left.")


def _back(line: Line, row: CheckpointRow, steps: int, revision: str) -> CheckpointRow:
    if steps >= row.depth:
        raise UnknownRevision(f"{revision!r} goes back further than the history, which has {row.depth} checkpoints")
    rows = line.ancestry(row.n, limit=steps + 1)
    if len(rows) <= steps:
        raise UnknownRevision(f"{revision!r} was forgotten; the history goes back to #{rows[-1].depth}")
    return rows[-1]
