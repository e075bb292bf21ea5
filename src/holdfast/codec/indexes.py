"""Index nodes: the levels above a tree's leaves.

Owns how children are grouped into index nodes, and grouped again where they changed. It follows the rules of
``blocks`` and must not know what a child holds.
What always holds: the grouping depends on the children's digests alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from blake3 import blake3

from holdfast.codec.blocks import NODE_TAG, index_closes, node_digest


class Child(Protocol):
    """A leaf or an index node, seen from above."""

    start: int
    count: int
    digest: bytes | None
    entry: bytes


class Index:
    """An index node over ``span`` children of the level below, from ``start`` on; ``count`` items in all."""

    __slots__ = ("count", "digest", "entry", "running", "span", "start", "stored")

    def __init__(self, start: int, span: int, digest: bytes, count: int) -> None:
        self.start = start
        self.span = span
        self.digest: bytes | None = None
        self.stored = False
        self.become(digest, count)
        self.running: tuple[blake3, int, int] | None = None  # over the first children: hasher, how many, their items

    def become(self, digest: bytes, count: int) -> None:
        """Its children are others now, or changed."""
        if digest != self.digest:
            self.stored = False
            self.digest = digest
        self.count = count
        self.entry = digest + count.to_bytes(8, "big")


def start_of(leaf: Child) -> int:
    return leaf.start


def index_raw(kind: bytes, level: int, children: Sequence[Child], start: int, span: int) -> bytes:
    return kind + bytes((level,)) + b"".join([child.entry for child in children[start : start + span]])


def _append(kind: bytes, level: int, children: Sequence[Child], above: list[Index]) -> bool:
    """Only the last child changed or is new, and it belongs to the last node: go on with that node's hasher."""
    last = above[-1]
    newest = len(children) - 1
    before = newest - last.start
    if before < 0 or (before and index_closes(before, children[newest - 1].digest or b"")):
        return False
    hasher, fed, count = last.running or (blake3(NODE_TAG + kind + bytes((level,))), 0, 0)
    if fed > before:
        return False
    if fed < before:
        last.running = None  # an interrupt must not leave a hasher behind that has seen more than it says
        for child in children[last.start + fed : newest]:
            hasher.update(child.entry)
            count += child.count
        last.running = hasher, before, count
    newest_child = children[newest]
    end = hasher.copy()
    end.update(newest_child.entry)
    last.span = before + 1
    last.become(end.digest(), count + newest_child.count)
    return True


def extend(kind: bytes, leaves: Sequence[Child], levels: list[list[Index]]) -> bool:
    """Only the last leaf changed: bring the last node of every level up to date, if no cut moves by that."""
    children: Sequence[Child] = leaves
    for level, above in enumerate(levels, 1):
        if not _append(kind, level, children, above):
            return False
        children = above
    return len(children) == 1


def regroup(
    kind: bytes,
    level: int,
    children: Sequence[Child],
    above: list[Index],
    first: int,
    new_end: int,
    shift: int,
) -> tuple[int, int]:
    """Cut the children into index nodes again, from the node that holds ``first`` until the old cuts fit.

    ``new_end`` is the first child after the changed ones, ``shift`` by how much the children behind it moved.
    Returns how many nodes of this level are the same still, at its start and at its end.
    """
    if above and first == len(children) - 1 and _append(kind, level, children, above):
        return len(above) - 1, 0
    position = max(0, bisect_right(above, first, key=start_of) - 1) if above else 0
    start = above[position].start if above else 0
    behind = range(position, len(above))
    old_starts = {above[at].start + shift: at for at in behind if above[at].start + shift >= new_end}
    known = {above[at].digest for at in behind if above[at].stored}
    made: list[Index] = []
    run = start
    # The node that holds ``first`` had no cut before its end, so none is before ``first``.
    at = max(start, first - 1)
    stop = len(above)
    while at < len(children):
        at += 1
        digest: bytes = children[at - 1].digest  # type: ignore[assignment]
        length = at - run
        closed = index_closes(length, digest)
        if closed or at == len(children):
            raw = index_raw(kind, level, children, run, length)
            index = Index(run, length, node_digest(raw), sum([child.count for child in children[run:at]]))
            index.stored = index.digest in known
            made.append(index)
            run = at
            if closed and at >= new_end and at in old_starts:
                stop = old_starts[at]
                break
    for index in above[stop:]:
        index.start += shift
    above[position:stop] = made
    return position, len(above) - position - len(made)
