"""Content-defined nodes: how a section's items become a tree of digests.

Owns the rule of format.md section 2 (where a node ends, what its digest covers) and a tree that keeps the
digests current at the cost of what changed. Knows nothing of tracked containers, Python types or storage:
it sees item encodings as bytes. What always holds: equal items give equal nodes, however they were reached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar
from zlib import crc32

from blake3 import blake3

# A container whose own encoding is at most this long is written inside its parent. Typical messages
# (a few kilobytes) stay inline, so that one node holds several of them and compresses well.
INLINE_MAX_BYTES = 16_384
# From here on a value that cannot be split goes into packs, where it is stored and flushed as bulk.
BULK_MIN_BYTES = 262_144
# Leaves: cut by content between the two bounds, about every TARGET bytes.
LEAF_MIN_BYTES = 8_192
LEAF_TARGET_BYTES = 32_768
LEAF_MAX_BYTES = 131_072
LEAF_MAX_ITEMS = 2_048
# Index nodes: cut by the child's digest.
INDEX_MIN_ENTRIES = 16
INDEX_MAX_ENTRIES = 256
INDEX_CUT_BELOW = 1 << 26
DIGEST_BYTES = 32
ENTRY_BYTES = DIGEST_BYTES + 8
COUNT_BYTES = 4

LIST, DICT, SET, VALUE = b"l", b"d", b"s", b"v"
_NODE_TAG = b"holdfast.node\0"
_ALL = 1 << 62
# Joining tag and data is quicker than two calls as long as the copy is small; threads help from about a megabyte on.
_JOINED_MAX_BYTES = 16_384
_THREADED_MIN_BYTES = 1 << 20
Raw = TypeVar("Raw", bytes, memoryview)
DEAD = -1  # the count of a leaf that is no longer part of its tree


def digest_of(tag: str, data: bytes | memoryview) -> bytes:
    """``H(tag, data)`` of the format."""
    if len(data) < _JOINED_MAX_BYTES:
        return blake3(tag.encode() + b"\0" + data).digest()
    hasher = blake3(tag.encode() + b"\0", max_threads=blake3.AUTO if len(data) > _THREADED_MIN_BYTES else 1)
    hasher.update(data)
    return hasher.digest()


def node_digest(raw: bytes) -> bytes:
    """The digest of a whole node, its two first bytes included."""
    return blake3(_NODE_TAG + raw).digest()


def leaf_node(kind: bytes, items: list[bytes]) -> bytes:
    """A whole level-0 node: kind, level, the items, their number."""
    return b"".join((kind, b"\0", *items, len(items).to_bytes(COUNT_BYTES, "big")))


def leaf_items(raw: Raw) -> tuple[int, Raw]:
    """How many items a level-0 node has, and their encodings one after another."""
    return int.from_bytes(raw[-COUNT_BYTES:], "big"), raw[2:-COUNT_BYTES]


def _finish(hasher: blake3, count: int) -> bytes:
    """The digest of a leaf whose items the hasher has seen; the hasher can go on."""
    end = hasher.copy()
    end.update(count.to_bytes(COUNT_BYTES, "big"))
    return end.digest()


def _closes(size: int, count: int, item: bytes) -> bool:
    """Whether a leaf of ``size`` bytes and ``count`` items ends after ``item``, its last one."""
    if size >= LEAF_MAX_BYTES or count >= LEAF_MAX_ITEMS:
        return True
    return size >= LEAF_MIN_BYTES and crc32(item) * LEAF_TARGET_BYTES < len(item) << 32


class Leaf:
    """A run of items. ``digest`` is None while it has to be computed again."""

    __slots__ = ("closed", "count", "digest", "entry", "hasher", "keys", "pending", "size", "start", "stored")

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

    def spoil(self) -> None:
        """Something inside changed: everything but the place is to be found out again."""
        self.digest = self.hasher = self.closed = None
        self.stored = False
        if self.pending:
            self.pending = []


class _Index:
    """An index node over ``span`` children of the level below, from ``start`` on; ``count`` items in all."""

    __slots__ = ("count", "digest", "entry", "running", "span", "start", "stored")

    def __init__(self, start: int, span: int, digest: bytes, count: int) -> None:
        self.start = start
        self.span = span
        self.digest: bytes | None = digest
        self.count = count
        self.stored = False
        self.entry = digest + count.to_bytes(8, "big")
        self.running: tuple[blake3, int, int] | None = None  # over the first children: hasher, how many, their items


class Tree:
    """The nodes of one container. ``encode_run(leaf)`` gives the encodings of a leaf's items, in order."""

    __slots__ = ("_before", "_behind", "_indexed", "kind", "known", "leaves", "levels", "root", "scattered")

    def __init__(self, kind: bytes) -> None:
        self.kind = kind
        self.leaves: list[Leaf] = [Leaf()]
        self.levels: list[list[_Index]] = []
        self.root: bytes | None = None
        self.known: set[bytes] = set()  # stored digests of leaves that were taken apart
        self.scattered = False  # whether a leaf other than the last may have changed
        # Leaves that came or went since the index was built: how many at either end are the same still.
        self._before = self._behind = _ALL
        self._indexed = 0  # how many leaves the index covers

    # -- what the container tells -------------------------------------------------------------------

    def leaf_at(self, index: int) -> Leaf:
        """The leaf that holds the list item at ``index`` (or would, at the end)."""
        leaves = self.leaves
        last = leaves[-1]
        if index >= last.start:
            return last
        return leaves[bisect_right(leaves, index, key=_start_of) - 1]

    def spoil(self, leaf: Leaf) -> None:
        """An item inside ``leaf`` changed."""
        if leaf.stored and leaf.digest is not None:
            self.known.add(leaf.digest)
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
            leaf.digest = None
            leaf.stored = False
            leaf.pending.append(encoding)
        return leaf

    def spliced(self, start: int, removed: int, added: int) -> None:
        """``removed`` list items at ``start`` gave way to ``added`` others."""
        self.root = None
        self.scattered = True
        position = bisect_right(self.leaves, start, key=_start_of) - 1
        first = self.leaves[position]
        self.spoil(first)
        taken = min(removed, first.start + first.count - start)
        first.count += added - taken
        left = removed - taken
        stop = position + 1
        while left:
            leaf = self.leaves[stop]
            self.spoil(leaf)
            taken = min(left, leaf.count)
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
        # Appending touches the last leaf alone; only other changes are worth a look at every leaf.
        position = 0 if self.scattered else len(leaves) - 1
        self.scattered = False
        fresh: list[Leaf] = []
        while position < len(leaves):
            leaf = leaves[position]
            if leaf.digest is not None:
                position += 1
                continue
            grows = leaf.pending and position == len(leaves) - 1
            made, used = self._grow(leaf) if grows else self._cut_from(position, encode_run)
            leaves[position : position + used] = made
            for new in made:
                new.stored = new.digest in self.known
                new.entry = new.digest + new.count.to_bytes(8, "big")  # type: ignore[operator]
            if not (grows and len(made) == 1):
                fresh += made
            self._moved(position, len(leaves) - position - len(made))
            position += len(made)
        if not leaves:
            leaves.extend(self._cut_from(0, encode_run)[0])
        self.renumber(min(self._before, len(leaves)))
        self._index()
        self.known.clear()
        if fresh and regrouped is not None:
            regrouped(fresh)
        top: Leaf | _Index = self.levels[-1][0] if self.levels else leaves[0]
        self.root = top.digest
        assert self.root is not None  # noqa: S101 - a type narrowing
        return self.root

    def _grow(self, leaf: Leaf) -> tuple[list[Leaf], int]:
        """The common case, appending: feed the running hasher instead of encoding the leaf again."""
        waiting, leaf.pending = leaf.pending, []
        done = leaf.count - len(waiting)
        made = []
        hasher = leaf.hasher or self._hasher()
        leaf.hasher = hasher
        for item in waiting:
            if leaf.closed:
                leaf.digest, leaf.hasher, leaf.count = _finish(hasher, done), None, done
                made.append(leaf)
                leaf = Leaf(0, leaf.start + done)
                leaf.hasher = hasher = self._hasher()
                done = 0
            done += 1
            hasher.update(item)
            leaf.size += len(item)
            leaf.closed = _closes(leaf.size, done, item)
        leaf.count = done
        leaf.digest = _finish(hasher, done)
        made.append(leaf)
        return made, 1

    def _hasher(self) -> blake3:
        return blake3(_NODE_TAG + self.kind + b"\0")

    def _cut_from(self, position: int, encode_run: Callable[[Leaf], list[bytes]]) -> tuple[list[Leaf], int]:
        """Cut the items anew from leaf ``position`` until a cut falls on an old boundary."""
        made: list[Leaf] = []
        used = 0
        leaf: Leaf | None = None
        hasher = self._hasher()
        last = len(self.leaves)
        while position + used < last:
            old = self.leaves[position + used]
            if used and leaf is None and old.digest is not None:
                break  # the last cut fell where an untouched leaf begins
            used += 1
            keys = iter(old.keys) if old.keys is not None else None
            for item in encode_run(old):
                if leaf is None:
                    leaf = Leaf()
                    hasher = self._hasher()
                    leaf.keys = {} if keys is not None else None
                leaf.count += 1
                leaf.size += len(item)
                hasher.update(item)
                if keys is not None and leaf.keys is not None:
                    leaf.keys[next(keys)] = None
                if _closes(leaf.size, leaf.count, item):
                    leaf.closed, leaf.digest = True, _finish(hasher, leaf.count)
                    made.append(leaf)
                    leaf = None
        if leaf is None and last <= 1 and not made:
            leaf = Leaf()  # an empty container is one empty leaf
        if leaf is not None:
            leaf.closed, leaf.hasher, leaf.digest = False, hasher, _finish(hasher, leaf.count)
            made.append(leaf)
        return made, used

    def _index(self) -> None:
        """Rebuild the index levels where leaves changed."""
        children: Sequence[Leaf | _Index] = self.leaves
        before, behind, shift = self._before, self._behind, len(self.leaves) - self._indexed
        level = 0
        while len(children) > 1:
            if level == len(self.levels):
                self.levels.append([])
                before, behind, shift = 0, 0, len(children)
            above = self.levels[level]
            if before <= len(children):
                size = len(above)
                before, behind = _regroup(self.kind, level + 1, children, above, before, len(children) - behind, shift)
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
                leaf.stored = True
                assert leaf.digest is not None  # noqa: S101 - a type narrowing
                items = encode_run(leaf)
                yield leaf.digest, leaf_node(self.kind, items), items
        children: Sequence[Leaf | _Index] = self.leaves
        for level, above in enumerate(self.levels, 1):
            for index in above:
                if not index.stored:
                    index.stored = True
                    assert index.digest is not None  # noqa: S101 - a type narrowing
                    yield index.digest, _index_raw(self.kind, level, children, index.start, index.span), []
            children = above

    def forget_stored(self) -> None:
        """A commit failed: nothing is known to be stored any more."""
        self.known.clear()
        for leaf in self.leaves:
            leaf.stored = False
        for level in self.levels:
            for index in level:
                index.stored = False

    def count(self) -> int:
        """How many items the tree holds."""
        return sum(leaf.count for leaf in self.leaves)


def _start_of(leaf: Leaf | _Index) -> int:
    return leaf.start


def _index_raw(kind: bytes, level: int, children: Sequence[Leaf | _Index], start: int, span: int) -> bytes:
    return kind + bytes((level,)) + b"".join([child.entry for child in children[start : start + span]])


def _index_closes(length: int, digest: bytes) -> bool:
    """Whether an index node of ``length`` entries ends after the child with this digest."""
    return length >= INDEX_MAX_ENTRIES or (
        length >= INDEX_MIN_ENTRIES and int.from_bytes(digest[:4], "big") < INDEX_CUT_BELOW
    )


def _append(kind: bytes, level: int, children: Sequence[Leaf | _Index], above: list[_Index]) -> bool:
    """Only the last child changed or is new, and it belongs to the last node: go on with that node's hasher."""
    last = above[-1]
    newest = len(children) - 1
    before = newest - last.start
    if before < 0 or (before and _index_closes(before, children[newest - 1].digest or b"")):
        return False
    hasher, fed, count = last.running or (blake3(_NODE_TAG + kind + bytes((level,))), 0, 0)
    if fed > before:
        return False
    for child in children[last.start + fed : newest]:
        hasher.update(child.entry)
        count += child.count
    end = hasher.copy()
    end.update(children[newest].entry)
    index = _Index(last.start, before + 1, end.digest(), count + children[newest].count)
    index.running = hasher, before, count
    index.stored = last.stored and index.digest == last.digest
    above[-1] = index
    return True


def _regroup(
    kind: bytes,
    level: int,
    children: Sequence[Leaf | _Index],
    above: list[_Index],
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
    position = max(0, bisect_right(above, first, key=_start_of) - 1) if above else 0
    start = above[position].start if above else 0
    behind = range(position, len(above))
    old_starts = {above[at].start + shift: at for at in behind if above[at].start + shift >= new_end}
    known = {above[at].digest for at in behind if above[at].stored}
    made: list[_Index] = []
    run = start
    # The node that holds ``first`` had no cut before its end, so none is before ``first``.
    at = max(start, first - 1)
    stop = len(above)
    while at < len(children):
        at += 1
        digest = children[at - 1].digest
        assert digest is not None  # noqa: S101 - a type narrowing
        length = at - run
        closed = _index_closes(length, digest)
        if closed or at == len(children):
            raw = _index_raw(kind, level, children, run, length)
            index = _Index(run, length, node_digest(raw), sum([child.count for child in children[run:at]]))
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
    levels: list[list[_Index]] = []
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
            index = _Index(len(below), len(entries), digest, total)
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
    tree._indexed = len(digests)  # noqa: SLF001 - the other half of this class
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
