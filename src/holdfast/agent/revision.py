"""Revisions: how a text names a checkpoint (branch, tag, label, ~2, branch~2, #17, id:)."""

from __future__ import annotations

import re

from holdfast.agent.graph import Graph
from holdfast.errors import UnknownRevision
from holdfast.store.catalog import Branch, Point, View

_BACK = re.compile(r"^(.*)~(\d+)$", re.DOTALL)
_ID = re.compile(r"^id:[0-9a-fA-F]*$")
_ID_MIN = 4


def find(view: View, branch: Branch, revision: str) -> Point:
    """The checkpoint that ``revision`` names, seen from ``branch``."""
    graph = Graph(view, view.agent_at(branch.a))
    point = _named(graph, branch, revision)
    if point is None and (match := _BACK.match(revision)):
        point = _named(graph, branch, match[1]) or _labelled(graph, branch, match[1])
        if point is not None:
            point = _back(graph, point, int(match[2]), revision)
    if point is None:
        point = _labelled(graph, branch, revision)
    if point is None:
        elsewhere = next((one for one in graph.everything() if one.manifest.label == revision), None)
        if elsewhere is not None:
            raise UnknownRevision(
                f"no checkpoint on this line of history has the label {revision!r}",
                hint=f"One that is not on it has: id:{elsewhere.id.hex()[:12]}. See `holdfast log --all`.",
            )
        known = [one.name for one in graph.branches] + [tag.name for tag in view.tags(branch.a)]
        raise UnknownRevision(
            f"{revision!r} names no checkpoint of this agent",
            hint=f"Branches and tags: {', '.join(known)}. Also a label, ~2, #17 or id:...; see `holdfast log`.",
        )
    return point


def _head(view: View, branch: Branch) -> Point:
    if not branch.head:
        raise UnknownRevision("this branch has no checkpoint yet", hint="Call agent.checkpoint() first.")
    return view.point(branch.head)


def _named(graph: Graph, branch: Branch, name: str) -> Point | None:
    view = graph.view
    if not name:
        return _head(view, branch)
    other = view.branch(branch.a, name)
    if other is not None:
        return _head(view, other)
    tag = view.tag(branch.a, name)
    if tag is not None:
        return view.point(tag.n)
    if _ID.match(name):
        return _by_id(graph, name[3:])
    if name.startswith("#") and name[1:].isdigit():
        return _by_depth(graph, _head(view, branch), int(name[1:]))
    return None


def _labelled(graph: Graph, branch: Branch, label: str) -> Point | None:
    return next((point for point in graph.line(branch.head) if point.manifest.label == label), None)


def _by_id(graph: Graph, prefix: str) -> Point:
    wanted = prefix.lower()
    if len(wanted) < _ID_MIN:
        raise UnknownRevision(f"id:{prefix} is too short", hint=f"Give at least {_ID_MIN} characters.")
    if len(wanted) == 64:
        point = graph.view.find(bytes.fromhex(wanted))
        found = [point] if point is not None and graph.sees(point.n) else []
    else:
        found = [point for point in graph.everything() if point.id.hex().startswith(wanted)]
    if len(found) != 1:
        what = "names no checkpoint" if not found else f"fits {len(found)} checkpoints"
        raise UnknownRevision(f"id:{prefix} {what} of this agent", hint="See `holdfast log --all` for ids.")
    return found[0]


def _by_depth(graph: Graph, head: Point, depth: int) -> Point:
    if not 1 <= depth <= head.manifest.depth:
        raise UnknownRevision(f"#{depth}: this branch has depths 1 to {head.manifest.depth}")
    for point in graph.line(head.n):
        if point.manifest.depth == depth:
            return point
        if point.manifest.depth < depth:
            break
    raise UnknownRevision(f"#{depth} was forgotten", hint="See `holdfast log` for what is left.")


def _back(graph: Graph, point: Point, steps: int, revision: str) -> Point:
    if steps >= point.manifest.depth:
        raise UnknownRevision(
            f"{revision!r} goes back further than the history, which has {point.manifest.depth} checkpoints"
        )
    wanted = point.manifest.depth - steps
    last = point
    for last in graph.view.walk(point.n):
        if last.manifest.depth == wanted:
            return last
    raise UnknownRevision(f"{revision!r} was forgotten; the history goes back to #{last.manifest.depth}")
