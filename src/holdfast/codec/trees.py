"""Trees: the nodes of one container, kept current at the cost of what changed.

Owns the leaves and index nodes in memory: which are dirty, how they are cut anew, which the catalog has. It follows
the rules of ``blocks`` and sees item encodings as bytes; it knows nothing of tracked containers or storage.
What always holds: after an update the digests are those of a tree that is built from the items alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import is_not
from typing import Any

from blake3 import blake3

from holdfast.codec import blocks
from holdfast.codec.blocks import (
    COUNT_BYTES,
    DIGEST_BYTES,
    ENTRY_BYTES,
    NODE_TAG,
    closes,
    cuts,
    finish,
    leaf_items,
    leaf_node,
    node_digest,
)
from holdfast.codec.indexes import Child, Index, extend, index_raw, regroup, start_of

_ALL = 1 << 62
# How many bytes of encodings a tree remembers of leaves that are edited in place, so that the other items of such a
# leaf need not be encoded again: a few times the state that an agent edits all over.
KEPT_MAX_BYTES = 32 * 1024 * 1024
DEAD = -1  # the count of a leaf that is no longer part of its tree


class Leaf:
    """A run of items. ``digest`` is None while it has to be computed again."""

    __slots__ = (
        "closed",
        "count",
        "digest",
        "edits",
        "entry",
        "hasher",
        "items",
        "keys",
        "now",
        "pending",
        "size",
        "start",
        "stored",
    )

    def __init__(self, count: int = 0, start: int = 0) -> None:
        self.count = count
        self.start = start  # index of the first item; kept for lists only
        self.size = 0  # payload bytes, valid while digest or hasher is there
        self.digest: bytes | None = None
        self.entry = b""  # digest and count, as the index node above holds them
        self.stored = False  # whether the catalog has (or, after the next commit, will have) this node
        self.closed: bool | None = None  # ended by the rule, not by the end of the container; None: not known
        self.hasher: blake3 | None = None  # over the items so far, for a leaf that only grows
        self.pending: list[bytes] = []  # appended encodings that the hasher has not seen
        self.keys: dict[object, None] | None = None  # the items' keys; only in dicts of several leaves
        self.items: list[bytes] | None = None  # encodings as of the last digest, of a leaf that is edited in place
        self.edits: set[object] | None = None  # what was edited since then (see Tree.spoil); None: it is not known
        # What the items' encodings are by what the container was told, while the digest is not: the container's own.
        self.now: Any = None

    def spoil(self) -> None:
        """Something inside changed: everything but the place is to be found out again."""
        self.digest = self.hasher = self.closed = None
        self.size = 0  # a leaf that was emptied may grow again, and counts its bytes from here
        self.stored = False
        if self.pending:
            self.pending = []


class Tree:
    """The nodes of one container. ``encode_run(leaf)`` gives the encodings of a leaf's items, in order."""

    __slots__ = ("_before", "_behind", "_indexed", "_kept", "kind", "known", "leaves", "levels", "root", "scattered")

    def __init__(self, kind: bytes) -> None:
        self.kind = kind
        self.leaves: list[Leaf] = [Leaf()]
        self.levels: list[list[Index]] = []
        self.root: bytes | None = None
        self.known: set[bytes] = set()  # stored digests of leaves that were taken apart
        self.scattered = False  # whether a leaf other than the last may have changed
        # Leaves that came or went since the index was built: how many at either end are the same still.
        self._before = self._behind = _ALL
        self._indexed = 0  # how many leaves the index covers
        self._kept = 0  # about how many bytes the leaves' items have

    # -- what the container tells -------------------------------------------------------------------

    def leaf_at(self, index: int) -> Leaf:
        """The leaf that holds the list item at ``index`` (or would, at the end)."""
        leaves = self.leaves
        last = leaves[-1]
        if index >= last.start:
            return last
        return leaves[bisect_right(leaves, index, key=start_of) - 1]

    def spoil(self, leaf: Leaf, edit: object = None) -> None:
        """Something inside ``leaf`` changed: the item that ``edit`` names, and no other one, or what is not known.

        What names an item is the container's business, as long as no item of the leaf comes, goes or moves.
        """
        if leaf.digest is not None:
            if leaf.stored:
                self.known.add(leaf.digest)
            leaf.edits = None if edit is None else {edit}
        elif edit is not None and leaf.edits is not None:
            leaf.edits.add(edit)
        else:
            leaf.edits = None
        if leaf.edits is None:
            leaf.items = None
        leaf.spoil()
        self.root = None
        if leaf is not self.leaves[-1]:
            self.scattered = True

    def appended(self, encoding: bytes | None) -> Leaf:
        """One item was added at the end; returns the leaf that holds it now."""
        self.root = None
        leaf = self.leaves[-1]
        if leaf.closed:
            leaf = Leaf(0, leaf.start + leaf.count)
            leaf.closed = False
            self._moved(len(self.leaves), 0)
            self.leaves.append(leaf)
        elif encoding is None or (leaf.hasher is None and leaf.count):
            self.spoil(leaf)
            encoding = None
        leaf.count += 1
        if encoding is not None:
            if leaf.stored and leaf.digest is not None:
                self.known.add(leaf.digest)
            leaf.digest = leaf.items = leaf.edits = None
            leaf.stored = False
            leaf.pending.append(encoding)
        return leaf

    def spliced(self, start: int, removed: int, added: int, encodings: Sequence[bytes] = ()) -> None:
        """``removed`` list items at ``start`` gave way to ``added`` others."""
        self.root = None
        self.scattered = True
        position = bisect_right(self.leaves, start, key=start_of) - 1
        first = self.leaves[position]
        self.spoil(first)
        taken = min(removed, first.start + first.count - start)
        if first.now is not None:
            first.now[start - first.start : start - first.start + taken] = encodings
        first.count += added - taken
        left = removed - taken
        stop = position + 1
        while left:
            leaf = self.leaves[stop]
            self.spoil(leaf)
            taken = min(left, leaf.count)
            if leaf.now is not None:
                del leaf.now[:taken]
            leaf.count -= taken
            left -= taken
            if leaf.count == 0:
                stop += 1
        drop_from = position + 1
        if first.count == 0 and len(self.leaves) > stop - drop_from + 1:
            drop_from = position
        del self.leaves[drop_from:stop]
        self._moved(drop_from, len(self.leaves) - drop_from)
        self.renumber(position)

    def _moved(self, before: int, behind: int) -> None:
        self._before = min(self._before, before)
        self._behind = min(self._behind, behind)

    def renumber(self, position: int = 0) -> None:
        """Set ``start`` of the leaves from ``position`` on."""
        at = self.leaves[position - 1].start + self.leaves[position - 1].count if position else 0
        for leaf in self.leaves[position:]:
            leaf.start = at
            at += leaf.count

    def reset(self, count: int) -> None:
        """The items are all new, or all in new places."""
        self.root = None
        self.scattered = True
        for leaf in self.leaves:
            if leaf.stored and leaf.digest is not None:
                self.known.add(leaf.digest)
            leaf.count = DEAD
        self.leaves = [Leaf(count)]
        self._moved(0, 0)

    # -- digests ------------------------------------------------------------------------------------

    def update(
        self, encode_run: Callable[[Leaf], list[bytes]], regrouped: Callable[[list[Leaf]], None] | None = None
    ) -> bytes:
        """Bring all digests up to date and return the root's.

        ``regrouped`` is called with every leaf that was newly made, so that the container can follow its items.
        """
        if self.root is not None:
            return self.root
        leaves = self.leaves
        if not self.scattered and len(leaves[-1].pending) == 1 and leaves[-1].hasher is not None:
            self._grow_by_one(leaves[-1])
            return self._rooted()
        # Appending touches the last leaf alone; only other changes are worth a look at every leaf.
        position = 0 if self.scattered else len(leaves) - 1
        fresh: list[Leaf] = []
        try:
            while position < len(leaves):
                leaf = leaves[position]
                if leaf.digest is not None:
                    position += 1
                    continue
                last = position == len(leaves) - 1
                if leaf.items is not None and self._edit(leaf, encode_run(leaf), last=last):
                    self._moved(position, len(leaves) - position - 1)
                    position += 1
                    continue
                grows = leaf.pending and last
                made, used = self._grow(leaf) if grows else self._cut_from(position, encode_run)
                leaves[position : position + used] = made
                for new in made:
                    self._name(new)
                if not (grows and len(made) == 1):
                    fresh += made
                self._moved(position, len(leaves) - position - len(made))
                position += len(made)
        except BaseException:
            # What is cut already stays; the container must know, or it would spoil leaves that are gone.
            self.scattered = True
            self.renumber()
            if fresh and regrouped is not None:
                regrouped(fresh)
            raise
        self.scattered = False
        if not leaves:
            leaves.extend(self._cut_from(0, encode_run)[0])
        self.renumber(min(self._before, len(leaves)))
        self._index()
        if fresh and regrouped is not None:
            regrouped(fresh)
        return self._rooted()

    def _rooted(self) -> bytes:
        self.known.clear()
        top: Child = self.levels[-1][0] if self.levels else self.leaves[0]
        root: bytes = top.digest  # type: ignore[assignment]
        self.root = root
        return root

    def _grow_by_one(self, leaf: Leaf) -> None:
        """What most checkpoints do: one item came to a last leaf that is still open. The rest of the tree stays."""
        item = leaf.pending.pop()
        leaf.now = None
        hasher: blake3 = leaf.hasher  # type: ignore[assignment]
        count = leaf.count
        hasher.update(item)
        leaf.size += len(item)
        leaf.closed = closes(leaf.size, count, item)
        leaf.digest = digest = finish(hasher, count)
        leaf.stored = digest in self.known
        leaf.entry = digest + count.to_bytes(8, "big")
        if self._before == _ALL and extend(self.kind, self.leaves, self.levels):
            return
        self._moved(len(self.leaves) - 1, 0)
        self._index()

    def _grow(self, leaf: Leaf) -> tuple[list[Leaf], int]:
        """The common case, appending: feed the running hasher instead of encoding the leaf again."""
        waiting, leaf.pending = leaf.pending, []
        leaf.now = None
        done = leaf.count - len(waiting)
        made = []
        hasher = leaf.hasher or self._hasher()
        leaf.hasher = hasher
        for item in waiting:
            if leaf.closed:
                leaf.digest, leaf.hasher, leaf.count = finish(hasher, done), None, done
                made.append(leaf)
                leaf = Leaf(0, leaf.start + done)
                leaf.hasher = hasher = self._hasher()
                done = 0
            done += 1
            hasher.update(item)
            leaf.size += len(item)
            leaf.closed = closes(leaf.size, done, item)
        leaf.count = done
        leaf.digest = finish(hasher, done)
        made.append(leaf)
        return made, 1

    def _edit(self, leaf: Leaf, items: list[bytes], *, last: bool) -> bool:
        """Items of a leaf were edited. If it can be told at a glance that it ends where it did, it is the same leaf."""
        old = leaf.items or []
        for at in compress(range(len(items)), map(is_not, old, items)):
            if len(items[at]) != len(old[at]) or (cuts(items[at]) and at + 1 < len(items)):
                return False
        payload = b"".join(items)
        closed = closes(len(payload), len(items), items[-1])
        if not closed and not last:
            return False
        self._finish(leaf, payload, closed=closed)
        self._name(leaf)
        leaf.items, leaf.now = items, None
        return True

    def _name(self, leaf: Leaf) -> None:
        digest: bytes = leaf.digest  # type: ignore[assignment] # it has one by now
        leaf.stored = digest in self.known
        leaf.entry = digest + leaf.count.to_bytes(8, "big")

    def proves(self, leaf: Leaf, items: list[bytes]) -> bool:
        """Whether these are the encodings that the leaf's digest, or its hasher, was made of."""
        if leaf.digest is None and leaf.hasher is None:
            return True  # nothing is known of it yet
        hasher = self._hasher()
        hasher.update(b"".join(items))
        count = leaf.count - len(leaf.pending)
        known = leaf.digest if leaf.digest is not None or leaf.hasher is None else finish(leaf.hasher, count)
        return len(items) == count and finish(hasher, count) == known

    def _hasher(self) -> blake3:
        return blake3(NODE_TAG + self.kind + b"\0")

    def _cut_from(self, position: int, encode_run: Callable[[Leaf], list[bytes]]) -> tuple[list[Leaf], int]:
        """Cut the items anew from leaf ``position`` until a cut falls on an old boundary."""
        made: list[Leaf] = []
        used = 0
        edited = False
        waiting: list[bytes] = []  # the items of the leaf that is being filled
        names: dict[object, None] | None = None
        size = 0
        least, most = blocks.LEAF_MIN_BYTES, blocks.LEAF_MAX_ITEMS
        last = len(self.leaves)
        while position + used < last:
            old = self.leaves[position + used]
            if used and not waiting:
                break  # the last cut fell where another leaf begins
            used += 1
            edited = edited or old.edits is not None or old.now is not None
            keys = iter(old.keys) if old.keys is not None else None
            for item in encode_run(old):
                if keys is not None:
                    if names is None:
                        names = {}
                    names[next(keys)] = None
                waiting.append(item)
                size += len(item)
                # Most items are too early for a cut; the call is made for those that are not.
                if (size >= least or len(waiting) >= most) and closes(size, len(waiting), item):
                    made.append(self._leaf_of(waiting, names, closed=True, keep=edited))
                    waiting, size, names = [], 0, None
        # An empty container is one empty leaf.
        if waiting or (last <= 1 and not made):
            made.append(self._leaf_of(waiting, names, closed=False, keep=edited))
        return made, used

    def _leaf_of(self, items: list[bytes], keys: dict[object, None] | None, *, closed: bool, keep: bool) -> Leaf:
        leaf = Leaf(len(items))
        leaf.keys = keys
        self._finish(leaf, b"".join(items), closed=closed)
        if keep:
            self._kept += leaf.size
            if self._kept > KEPT_MAX_BYTES:
                self._kept = leaf.size
                for other in self.leaves:
                    other.items = None
            leaf.items = items
        return leaf

    def _finish(self, leaf: Leaf, payload: bytes, *, closed: bool) -> None:
        hasher = self._hasher()
        hasher.update(payload)
        leaf.size, leaf.closed = len(payload), closed
        leaf.digest = finish(hasher, leaf.count)
        leaf.hasher = None if closed else hasher

    def _index(self) -> None:
        """Rebuild the index levels where leaves changed."""
        children: Sequence[Child] = self.leaves
        before, behind, shift = self._before, self._behind, len(self.leaves) - self._indexed
        level = 0
        while len(children) > 1:
            if level == len(self.levels):
                self.levels.append([])
                before, behind, shift = 0, 0, len(children)
            above = self.levels[level]
            if before <= len(children):
                size = len(above)
                before, behind = regroup(self.kind, level + 1, children, above, before, len(children) - behind, shift)
                shift = len(above) - size
            children = above
            level += 1
        del self.levels[level:]
        self._before = self._behind = _ALL
        self._indexed = len(self.leaves)

    # -- storing ------------------------------------------------------------------------------------

    def unstored(self, encode_run: Callable[[Leaf], list[bytes]]) -> Iterator[tuple[bytes, bytes, list[bytes]]]:
        """Every node that the catalog does not have yet, children first; it counts as stored from now on.

        Each comes as digest, raw node, and (for leaves) its items.
        """
        for leaf in self.leaves:
            if not leaf.stored:
                digest, items = leaf.digest, encode_run(leaf)
                raw = leaf_node(self.kind, items)
                # A signal handler may have changed it meanwhile, or C code what it holds: then this is another node.
                if digest is None or leaf.digest is not digest or node_digest(raw) != digest:
                    continue
                yield digest, raw, items
                leaf.stored = leaf.digest is digest  # only now: the caller has it, whatever comes in between
        children: Sequence[Child] = self.leaves
        for level, above in enumerate(self.levels, 1):
            for index in above:
                if not index.stored:
                    digest, raw = index.digest, index_raw(self.kind, level, children, index.start, index.span)
                    if digest is None or node_digest(raw) != digest:
                        continue
                    yield digest, raw, []
                    index.stored = True
            children = above

    def count(self) -> int:
        """How many items the tree holds."""
        return sum(leaf.count for leaf in self.leaves)


def build(kind: bytes, items: Iterable[bytes]) -> tuple[Tree, dict[bytes, bytes]]:
    """A tree over encodings that exist already, with all its nodes by digest."""
    encodings = list(items)
    tree = Tree(kind)
    tree.reset(len(encodings))
    tree.update(lambda _leaf: encodings)
    found = tree.unstored(lambda leaf: encodings[leaf.start : leaf.start + leaf.count])
    return tree, {digest: raw for digest, raw, _ in found}


def read_tree(kind: bytes, root: bytes, fetch: Callable[[list[bytes]], dict[bytes, bytes]]) -> tuple[Tree, list[bytes]]:
    """The tree under ``root`` as the catalog has it, and its leaves' raw nodes in order.

    ``fetch`` returns verified nodes. Raises ValueError when the nodes do not form a tree of the format.
    """
    tree = Tree(kind)
    raw = fetch([root])[root]
    _check_node(raw, kind, None)
    depth = raw[1]
    rows = [raw]
    digests: list[tuple[bytes, int]] = [(root, -1)]
    levels: list[list[Index]] = []
    for level in range(depth, 0, -1):
        below: list[tuple[bytes, int]] = []
        indexes = []
        for (digest, items), node in zip(digests, rows, strict=True):
            entries = [
                (node[at : at + DIGEST_BYTES], int.from_bytes(node[at + DIGEST_BYTES : at + ENTRY_BYTES], "big"))
                for at in range(2, len(node), ENTRY_BYTES)
            ]
            total = sum(count for _, count in entries)
            if items not in {-1, total}:
                msg = f"node {digest.hex()[:16]} says {total} items, its parent {items}"
                raise ValueError(msg)
            index = Index(len(below), len(entries), digest, total)
            index.stored = True
            indexes.append(index)
            below.extend(entries)
        levels.append(indexes)
        nodes = fetch([digest for digest, _ in below])
        rows = [nodes[digest] for digest, _ in below]
        for row in rows:
            _check_node(row, kind, level - 1)
        digests = below
    tree.levels = levels[::-1]
    tree._indexed = len(digests)
    tree.leaves = []
    start = 0
    for (digest, items), node in zip(digests, rows, strict=True):
        count, payload = leaf_items(node)
        if items not in {-1, count}:
            msg = f"node {digest.hex()[:16]} says {count} items, its parent {items}"
            raise ValueError(msg)
        leaf = Leaf(count, start)
        leaf.digest, leaf.size, leaf.stored = digest, len(payload), True
        leaf.entry = digest + count.to_bytes(8, "big")
        start += count
        tree.leaves.append(leaf)
    tree.root = root
    return tree, rows


def _check_node(raw: bytes, kind: bytes, level: int | None) -> None:
    if raw[:1] != kind or (level is not None and raw[1] != level):
        msg = f"a node of kind {raw[:1]!r} level {raw[1]} stands where {kind!r} level {level} belongs"
        raise ValueError(msg)
    if len(raw) < 2 + COUNT_BYTES if raw[1] == 0 else (len(raw) - 2) % ENTRY_BYTES:
        msg = "a node is cut short"
        raise ValueError(msg)
