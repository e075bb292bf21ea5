"""What the store was told, and what waits to be written: the captures that nobody has acknowledged yet.

Owns the life of a capture between the document that makes it and the store that writes it. What always holds: a capture
goes with the next one until somebody says that it is written; what several of them amount to is worked out from bytes,
so nothing is said twice; a node counts as stored only when the capture that has it is written.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping

from holdfast.codec.blocks import DICT, Node, key_of, names_tree, roots_in
from holdfast.codec.diff import Relative, values_of
from holdfast.codec.operations import Operation
from holdfast.codec.state import Nothing, Sections, Source, State, differences, digests
from holdfast.codec.tree import Fetch, Tree


class Captured:
    """What one checkpoint has to write."""

    __slots__ = ("after", "before", "chunks", "fresh", "handed", "named", "needs", "nodes", "operations", "sections")

    def __init__(
        self,
        after: Sections,
        operations: list[Operation] | None = None,
        nodes: dict[bytes, bytes] | None = None,
        chunks: dict[bytes, bytes] | None = None,
        fresh: list[Node] | None = None,
        before: Sections | None = None,
        named: Collection[bytes] = (),
    ) -> None:
        self.after = after
        self.sections = digests(after)
        self.operations = operations if operations is not None else []
        self.nodes = nodes if nodes is not None else {}
        self.chunks = chunks if chunks is not None else {}
        self.fresh = fresh if fresh is not None else []  # the nodes in memory that count as stored when it is written
        self.before = before if before is not None else {}  # what was told before
        self.named = named  # the trees that its operations name: what of them is not among its nodes, the store has
        self.handed = False  # whether somebody may be writing it
        self.needs: frozenset[bytes] = frozenset()  # chunks of other layers that must be in the store


class Told(State):
    """What the store was told, and the captures of it that nobody has acknowledged yet."""

    def __init__(self, source: Source | None = None) -> None:
        super().__init__(source)
        self.unacknowledged: list[Captured] = []

    def chunks(self, digests: list[bytes]) -> bytes:
        """The joined content of chunks, also of those that are not written yet."""
        pending = {key: chunk for one in self.unacknowledged for key, chunk in one.chunks.items()}
        if pending.keys().isdisjoint(digests):
            return super().chunks(digests)
        return b"".join([pending[key] if key in pending else super(Told, self).chunks([key]) for key in digests])

    def added(self, captured: Captured) -> list[Captured]:
        """What waits to be written when this comes last. What nobody has asked for yet becomes one with it."""
        waiting = self.unacknowledged
        if not waiting or waiting[-1].handed:
            return [*waiting, captured]
        last = waiting[-1]
        chunks = {**last.chunks, **captured.chunks}
        both = Captured(captured.after, None, None, chunks, None, last.before)
        both.needs = last.needs | captured.needs
        return [*waiting[:-1], both]

    def waiting(self, under_way: Collection[Captured], newest: Captured | None = None) -> Captured:
        """All that waits to be written, as one capture. ``under_way`` are captures that are being written."""
        while True:
            known, sections = self.unacknowledged, self.sections
            waiting = [one for one in known if one not in under_way] if under_way else known
            if not waiting:
                return newest or Captured(sections)
            made = waiting[0]
            if len(waiting) > 1 or not made.operations:
                made = self._net(waiting)
                rest = [one for one in known if one not in waiting]
                made.handed = True
                if self.unacknowledged is known and self.sections is sections:
                    self.unacknowledged = [*rest, made]
                    return made
            else:
                made.handed = True
                if self.unacknowledged is known:
                    return made
                made.handed = False
            # A signal handler changed the state meanwhile, and asked whether it has changed.

    def _net(self, waiting: list[Captured]) -> Captured:
        """What several captures amount to."""
        first = State(self.source)
        first.sections, first.trees = dict(waiting[0].before), self.trees
        ops = differences(first, self)
        held = {tree.root: tree for tree in self.sections.values() if isinstance(tree, Tree)}

        def at_hand(root: bytes) -> Tree | None:
            return held.get(root) or self.trees.get(root)

        chunks = {key: chunk for one in waiting for key, chunk in one.chunks.items()}
        made = captured(waiting[0].before, self.sections, ops, chunks, at_hand, self.fetch)
        made.needs = frozenset().union(*(one.needs for one in waiting))
        return made

    def differs(self, under_way: Collection[Captured] = ()) -> bool:
        """Whether something waits to be written that is not on its way."""
        for one in self.unacknowledged:
            if one not in under_way:
                return digests(one.before) != self.digests()
        return False

    def written(self, captured: Captured, *, sealed: bool) -> None:
        """The store has a capture; ``sealed``: and all nodes of the state."""
        for node in captured.fresh:
            node.stored = True
        while True:
            known = self.unacknowledged
            rest = [one for one in known if one is not captured]
            if self.unacknowledged is known:  # otherwise a signal handler was quicker
                self.unacknowledged = rest
                break
        if sealed:
            for tree in captured.after.values():
                if isinstance(tree, Tree):
                    self.let_go(tree)

    @property
    def stored(self) -> Sections:
        """What the store was told by the captures that it has."""
        return self.unacknowledged[0].before if self.unacknowledged else self.sections

    def after(self, before: Sections, operations: list[Operation], nodes: Mapping[bytes, bytes]) -> Sections:
        """What operations make of sections; ``nodes`` are those that the store may lack and that they name."""
        made = State(_Beside(self.source, nodes))
        made.sections, made.trees = dict(before), self.trees
        made.do(operations)
        return made.sections

    def rest_on(self, after: Sections) -> None:
        """Somebody else has told the store this meanwhile: what differs from it waits to be written."""
        chunks = {key: chunk for one in self.unacknowledged for key, chunk in one.chunks.items()}
        self.unacknowledged = [Captured(self.sections, None, None, chunks, None, after)]

    def let_go(self, tree: Tree) -> None:
        """Forget bytes that the store has."""
        if not isinstance(self.source, Nothing):
            tree.let_go()

    def unstored_bytes(self) -> int:
        """About how much ``seal`` would have to write."""
        return sum([tree.unstored_bytes() for tree in self.sections.values() if isinstance(tree, Tree)])

    def seal(self, captured: Captured) -> dict[bytes, tuple[bytes, int]]:
        """Add all nodes of its state that the store lacks to the newest capture.

        Gives where each item sits: its encoding -> node and offset, for values that can move there.
        """
        places: dict[bytes, tuple[bytes, int]] = {}
        for name, section in captured.after.items():
            if isinstance(section, Tree):
                tree = section
            elif self.source.base.get(name) == section:
                continue  # it is stored as it is
            elif self.sections.get(name) == section:
                tree = self.section(name)
            else:
                tree = self.load(name, section)[0]
            for node, raw, items in tree.unstored(self.fetch):
                captured.nodes.setdefault(node.digest, raw)
                captured.fresh.append(node)
                offset = 2
                paired = raw[:1] == DICT
                for item in items:
                    skip = len(key_of(item)) if paired else 0
                    places[item[skip:]] = node.digest, offset + skip
                    offset += len(item)
        return places


class _Beside:
    """A source, and nodes that it does not have yet."""

    def __init__(self, source: Source, nodes: Mapping[bytes, bytes]) -> None:
        self.base, self.sections = source.base, source.sections
        self.bulk, self.operations, self.again = source.bulk, source.operations, source.again
        self._source, self._nodes = source, nodes

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = {one: self._nodes[one] for one in digests if one in self._nodes}
        return {**self._source.nodes([one for one in digests if one not in found]), **found}


class Saved(ABC):
    """What checkpoints are made of: a document of live values, or one of values that are given whole."""

    __slots__ = ()
    lock: threading.RLock
    told: Told

    @abstractmethod
    def capture(self, under_way: Collection[Captured] = ()) -> Captured:
        """Everything that is not written or on its way, and the digests of the state as it is now.

        ``under_way`` are captures that are being written: what is in them does not go with this one.
        """

    def written(self, captured: Captured, *, sealed: bool = False) -> None:
        """The store has a capture. Until somebody says so, the next one carries it along."""
        with self.lock:
            self.told.written(captured, sealed=sealed)

    def seal(self, captured: Captured) -> dict[bytes, tuple[bytes, int]]:
        """Add all nodes of the state that the store lacks to the newest capture. Gives where each item sits."""
        with self.lock:
            return self.told.seal(captured)

    @abstractmethod
    def retell(self) -> None:
        """Something that the store was believed to have is gone from it: the next capture brings all that it names."""

    def unstored_bytes(self) -> int:
        """About how much ``seal`` would have to write."""
        with self.lock:
            return self.told.unstored_bytes()


def captured(
    before: Sections,
    after: Sections,
    ops: list[Relative],
    chunks: dict[bytes, bytes],
    at_hand: Callable[[bytes], Tree | None],
    fetch: Fetch,
) -> Captured:
    """The capture that leads from sections to others. ``at_hand`` gives the trees that the store may lack."""
    nodes, fresh, named = _named_nodes(ops, at_hand, fetch)
    at = time.time_ns() // 1000
    operations = [Operation(at, code, list(path), args) for code, path, args in ops]
    return Captured(after, operations, nodes, chunks, fresh, before, named)


def _named_nodes(
    operations: list[Relative], at_hand: Callable[[bytes], Tree | None], fetch: Fetch
) -> tuple[dict[bytes, bytes], list[Node], set[bytes]]:
    """The nodes that operations name and the store may lack: they go into the commit. And all trees that they name."""
    nodes: dict[bytes, bytes] = {}
    fresh: list[Node] = []
    checked: set[bytes] = set()
    for code, _, args in operations:
        for data in values_of(code, args):
            if not names_tree(data):
                continue
            for root in roots_in(data):
                tree = at_hand(root)
                if tree is not None and root not in checked:
                    checked.add(root)
                    for node, raw, _ in tree.unstored(fetch):
                        nodes[node.digest] = raw
                        fresh.append(node)
    return nodes, fresh, checked
