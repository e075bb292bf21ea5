"""One section as encodings: its items, its tree, and how both change.

Owns the section's digest and which of its nodes the catalog lacks. Must not know live values; ``evidence`` is only kept
here. What always holds: the digest is that of the items, and one that a ``Still`` shares is never changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from holdfast.codec.assigned.differences import Hunk
from holdfast.codec.assigned.parts import Parts, big_form, closed, joined
from holdfast.codec.blocks import (
    INLINE_MAX_BYTES,
    LEAF_MAX_ITEMS,
    LEAF_MIN_BYTES,
    VALUE,
    leaf_node,
    node_digest,
)
from holdfast.codec.sameness import Evidence
from holdfast.codec.trees import Leaf, Tree

# More places than this that change at once: cutting the whole tree anew costs less than following each.
_HUNKS_MAX = 64


class Held:
    """A section's content. ``kind`` is empty while only the digest is known."""

    __slots__ = ("_pairs", "big", "digest", "evidence", "items", "keys", "kind", "names", "shared", "stored", "tree")

    def __init__(
        self,
        kind: bytes = b"",
        items: list[bytes] | None = None,
        keys: list[bytes] | None = None,
        *,
        digest: bytes | None = None,
        tree: Tree | None = None,
    ) -> None:
        self.kind = kind
        self.items = items if items is not None else []
        self.keys = keys  # of a dict, as encodings
        self.names: list[Any] | None = None  # of a dict, as objects, when they are known
        self.digest = digest
        self.tree = tree  # None while the items surely fit into one node
        self.stored = False  # whether the catalog has all nodes
        self.shared = False  # whether a Still has it, too
        self.evidence: Evidence | None = None
        self.big: dict[bytes, Parts] = {}  # item -> what it names by digest, as far as this process made it
        # Of a dict with a tree: each key with its item. The same objects, as long as neither of the two changes.
        self._pairs: list[bytes] | None = None

    def run(self, leaf: Leaf) -> list[bytes]:
        """The encodings of a leaf's items."""
        whole = self.items
        if self.keys is not None:
            if self._pairs is None:
                self._pairs = joined(self.items, self.keys)
            whole = self._pairs
        return whole[leaf.start : leaf.start + leaf.count]

    def payload_bytes(self) -> int:
        return sum(map(len, self.items)) + (0 if self.keys is None else sum(map(len, self.keys)))

    def root(self) -> bytes:
        """The digest of the content."""
        if self.digest is None:
            if self.tree is None and (self.kind == VALUE or self._is_small()):
                self.digest = node_digest(self._node())
            else:
                if self.tree is None:
                    self.tree = Tree(self.kind)
                    self.tree.reset(len(self.items))
                self.digest = self.tree.update(self.run)
        return self.digest

    def _is_small(self) -> bool:
        return len(self.items) < LEAF_MAX_ITEMS and self.payload_bytes() < LEAF_MIN_BYTES

    def _node(self) -> bytes:
        return leaf_node(self.kind, joined(self.items, self.keys))

    def whole(self) -> tuple[bytes, dict[bytes, bytes]]:
        """The section as the value of an operation, and the nodes that it names and the catalog lacks.

        They count as stored from now on.
        """
        if self.kind == VALUE:
            return self.items[0], {}
        if self.payload_bytes() <= INLINE_MAX_BYTES:
            data = closed(self.kind, self.items, self.keys)
            if len(data) <= INLINE_MAX_BYTES:
                return data, {}
        digest = self.root()
        return big_form(digest), {digest: node for digest, node, _ in self.unstored_nodes()}

    def unstored_nodes(self) -> Iterator[tuple[bytes, bytes, list[bytes]]]:
        """Nodes that the catalog lacks, each with its items; they count as stored from now on."""
        if self.kind == b"":
            return
        digest = self.root()
        if self.tree is not None:
            yield from self.tree.unstored(self.run)
        elif not self.stored:
            yield digest, self._node(), joined(self.items, self.keys)
        self.stored = True

    def unstore(self) -> None:
        """Nothing of it is surely in the catalog."""
        self.stored = False
        if self.tree is not None:
            self.tree.known.clear()
            for leaf in self.tree.leaves:
                leaf.stored = False
            for index in chain(*self.tree.levels):
                index.stored = False

    def unstored_bytes(self) -> int:
        """About how much ``unstored_nodes`` would give."""
        if self.stored or not self.kind:
            return 0
        if self.tree is None:
            return self.payload_bytes()
        self.root()
        return sum(leaf.size for leaf in self.tree.leaves if not leaf.stored)

    # -- changing ---------------------------------------------------------------------------------------

    def parted(self) -> Held:
        """One that may be changed: this, or, when a Still has it, a copy that takes the tree along."""
        if not self.shared:
            return self
        self.root()
        keys = None if self.keys is None else self.keys.copy()
        made = Held(self.kind, self.items.copy(), keys, digest=self.digest, tree=self.tree)
        made.names = None if self.names is None else self.names.copy()
        made.stored, made.evidence, made.big = self.stored, self.evidence, self.big.copy()
        made._pairs, self._pairs = self._pairs, None
        self.tree = self.evidence = None
        return made

    def changed(self) -> None:
        self.digest = None
        self.stored = False

    def edit(self, found: Sequence[Hunk], items: list[bytes], keys: list[bytes] | None) -> None:
        """Replace what the hunks say by parts of ``items`` and ``keys``."""
        self.changed()
        tree = self.tree
        if tree is not None and len(found) > _HUNKS_MAX:
            tree.reset(len(self.items) + sum(hunk.to - hunk.at - hunk.stop + hunk.start for hunk in found))
            tree = None
        # From the back, so that the places of those before stay right.
        for start, stop, at, to in reversed(found):
            at_end = start == len(self.items)
            self.items[start:stop] = items[at:to]
            if self.keys is not None and keys is not None:
                self.keys[start:stop] = keys[at:to]
            new = joined(items[at:to], None if keys is None else keys[at:to])
            if self._pairs is not None:
                self._pairs[start:stop] = new
            if tree is None:
                continue
            if at_end:
                for item in new:
                    tree.appended(item)
            elif stop - start == to - at == 1:
                tree.spoil(tree.leaf_at(start), start)
            else:
                tree.spliced(start, stop - start, to - at)

    def near(self) -> Parts:
        """What the items name by digest, as far as it is here. Empty bytes: the catalog has it for sure."""
        near = Parts({}, {})
        for parts in self.big.values():
            near.nodes.update(parts.nodes)
            near.chunks.update(parts.chunks)
        return near
