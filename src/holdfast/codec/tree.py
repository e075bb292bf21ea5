"""What the store was told of one container: its items as bytes, in content-defined nodes (format.md, section 2).

A Tree is never changed. ``apply`` gives another one, which shares every node that is the same; its digest, its nodes
and the operations that lead to it all come out of the same hunks. It knows bytes only: no Python values, no storage.
What always holds: ``root`` is the digest that the same items have in a tree built from nothing, and a tree is *closed*:
a leaf holds the trees that its items name and the store may lack, so that nothing which is named can be missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from blake3 import blake3

from holdfast.codec import blocks
from holdfast.codec.blocks import (
    COUNT_BYTES,
    DICT,
    DIGEST_BYTES,
    ENTRY_BYTES,
    INLINE_MAX_BYTES,
    LEAF_MAX_BYTES,
    LIST,
    NODE_TAG,
    SET,
    SMALL_BYTES,
    VALUE,
    Index,
    Leaf,
    Node,
    big,
    close,
    closes,
    cut,
    index_node,
    index_over,
    key_of,
    late_from,
    make_leaf,
    names_tree,
    opened,
    regrown,
    roots_in,
)
from holdfast.codec.wire import split
from holdfast.errors import CorruptValue

Fetch = Callable[[list[bytes]], dict[bytes, bytes]]
"""Gives raw nodes by their digests, each proven against its digest."""


class Hunk(NamedTuple):
    """``tree[start:stop]``, which is ``old``, gives way to ``items``."""

    start: int
    stop: int
    items: list[bytes]
    old: Sequence[bytes] = ()


_Parts = tuple[list[Leaf], list[int], list[list[Index]]]
"""The leaves of a tree, where each begins, and the levels of index nodes above them."""


class Tree:
    """All items of one container."""

    __slots__ = (
        "__weakref__", "_base", "_parts", "beside", "count", "fresh", "kind", "last", "root", "size", "tops", "where",
    )  # fmt: skip

    def __init__(self, kind: bytes, leaves: list[Leaf], starts: list[int] | None, levels: list[list[Index]]) -> None:
        if starts is None:
            starts = [0, *accumulate([leaf.count for leaf in leaves[:-1]])]
        self.kind = kind
        self._base: Tree | None = None  # what this one grew out of, if that is how it was made
        self._parts: _Parts | None = (leaves, starts, levels)
        self.last, self.tops = leaves[-1], [level[-1] for level in levels]
        self.count, self.size = starts[-1] + leaves[-1].count, sum([leaf.size for leaf in leaves])  # in items, in bytes
        self.root: bytes = (levels[-1] if levels else leaves)[0].digest
        self.fresh: Sequence[Leaf] = ()  # leaves that were just made: whoever makes a tree closes it (``anchor``)
        # Of a dict with several leaves: key -> its leaf, in a cell that moves on with the leaf. Made when it is needed.
        self.where: dict[bytes, list[Leaf]] | None = None
        # One with many of the same leaves, which knows where their keys are: ``where`` has only those of other leaves.
        self.beside: Tree | None = None

    # -- reading --------------------------------------------------------------------------------------------

    def items_of(self, leaf: Leaf, fetch: Fetch) -> list[bytes]:
        """The items of a leaf, read again if they were let go."""
        items = leaf.items
        if items is None:
            items = leaf.items = leaf_contents(self.kind, fetch([leaf.digest])[leaf.digest])
        return items if len(items) == leaf.count else items[: leaf.count]

    def part(self, start: int, stop: int, fetch: Fetch) -> list[bytes]:
        """Items ``start`` to ``stop``."""
        found: list[bytes] = []
        leaves, starts, _ = self._whole()
        position = bisect_right(starts, start) - 1
        while start < stop:
            leaf, first = leaves[position], starts[position]
            found += self.items_of(leaf, fetch)[start - first : stop - first]
            start = first + leaf.count
            position += 1
        return found

    def all(self, fetch: Fetch) -> list[bytes]:
        self.warm([(0, self.count)], fetch)
        return self.part(0, self.count, fetch)

    def inline(self, fetch: Fetch) -> bytes | None:
        """The container written out, if it is small enough to stand so in its parent."""
        data = close(*opened(self.kind, self.all(fetch))) if self.size <= INLINE_MAX_BYTES else b""
        return data if 0 < len(data) <= INLINE_MAX_BYTES else None

    def named(self, fetch: Fetch) -> bytes:
        """How the container stands in its parent, or in an operation: by its root, unless it is small."""
        return self.part(0, 1, fetch)[0] if self.kind == VALUE else self.inline(fetch) or big(self.root)

    def lacking(self, spans: Sequence[tuple[int, int]]) -> list[Leaf]:
        """The leaves of these items whose bytes were let go."""
        leaves, starts, _ = self._whole()
        found: list[Leaf] = []
        done = -1
        for start, stop in spans:
            at = max(bisect_right(starts, start) - 1, done + 1)
            while at < len(leaves) and (starts[at] < stop or starts[at] == start):
                if leaves[at].items is None:
                    found.append(leaves[at])
                done = at
                at += 1
        return found

    def warm(self, spans: Sequence[tuple[int, int]], fetch: Fetch) -> None:
        """Read what was let go of these items, all in one go."""
        self._read(self.lacking(spans), fetch)

    def _read(self, leaves: Sequence[Leaf], fetch: Fetch) -> None:
        missing = [leaf for leaf in leaves if leaf.items is None]
        rows = fetch([leaf.digest for leaf in missing]) if missing else {}
        for leaf in missing:
            leaf.items = leaf_contents(self.kind, rows[leaf.digest])

    def place(self, key: bytes, fetch: Fetch, *, loaded: bool = False) -> int:
        """Where a dict's key stands; -1 when it does not. ``loaded``: it is looked for in what was read only."""
        leaf, start = self.leaves[0], 0
        if loaded and self.where is None:
            for leaf, start in zip(self.leaves, self.starts, strict=True):
                for at, item in enumerate(leaf.items or ()):
                    if item.startswith(key):
                        return start + at
            return -1
        if len(self.leaves) > 1:
            found = self._leaf_of(key, fetch)
            if found is None:
                return -1
            try:
                start = self.starts[self.leaves.index(found)]
            except ValueError:
                return -1  # it is one that only the tree beside this one has
            leaf = found
        for at, item in enumerate(self.items_of(leaf, fetch)):
            if item.startswith(key):  # no encoding is the beginning of another one
                return start + at
        return -1

    def _leaf_of(self, key: bytes, fetch: Fetch) -> Leaf | None:
        """The leaf that a dict's key is in, if it is there at all. What is shared is not read for that."""
        beside = self.beside
        there = beside.where if beside is not None else None
        if beside is not None and there is not None:
            cell = self._index(fetch, beside.leaves).get(key) or there.get(key)
            leaf = cell[0] if cell is not None else None
            if beside.where is there:  # nobody has taken it over meanwhile
                return leaf
        if beside is not None:
            self.where = None
            self.beside = None  # in this order: an interrupt must not leave a part of the index as the whole of it
        cell = self._index(fetch).get(key)
        return cell[0] if cell is not None else None

    def _index(self, fetch: Fetch, known: Sequence[Leaf] = ()) -> dict[bytes, list[Leaf]]:
        """Where the keys of all leaves are but of those that are ``known``."""
        if self.where is None:
            shared = set(known)
            leaves = [leaf for leaf in self.leaves if leaf not in shared]
            where: dict[bytes, list[Leaf]] = {}
            self._read(leaves, fetch)
            for leaf in leaves:
                self._register(leaf, where, fetch)
            self.where = where
        return self.where

    def stand_beside(self, other: Tree) -> None:
        """Let another one, with many of the same leaves, say where their keys are, if it knows that of all it has."""
        if other.kind == self.kind and other.where is not None and other.beside is None:
            self.beside = other

    def take_over(self, fetch: Fetch) -> None:
        """Know where all keys are in place of the tree beside this one, which has had its day."""
        beside = self.beside
        if beside is None or beside.where is None:
            return
        old, new = beside.leaves, self.leaves
        if len(old) == len(new):  # mostly each leaf that is another one has become that in its place
            changed = [(at, at + 1, at, at + 1) for at in range(len(old)) if old[at] is not new[at]]
        else:
            shared = next((at for at, (one, two) in enumerate(zip(old, new, strict=False)) if one is not two), 0)
            changed = [(shared, len(old), shared, len(new))]
        if all(leaf.items is not None for a, b, c, d in changed for leaf in (*old[a:b], *new[c:d])):
            beside._pass_on(self, changed, fetch)
            self.beside = None

    def _register(self, leaf: Leaf, where: dict[bytes, list[Leaf]], fetch: Fetch) -> None:
        cell = [leaf]  # leaves are shared between trees, cells are not
        for item in self.items_of(leaf, fetch):
            head = item[0]  # most keys are short texts: as ``key_of``, without a call for each of a large dict
            where[item[: head - 0x9F] if 0xA0 <= head < 0xC0 else key_of(item)] = cell

    def rank(self, item: bytes, fetch: Fetch) -> tuple[int, bool]:
        """Where an item stands in a set, or would stand, and whether it does."""
        leaves, starts, _ = self._whole()
        low = max(bisect_right(leaves, item, key=_first) - 1, 0)  # the last leaf whose first item is not above
        items = self.items_of(leaves[low], fetch)
        at = bisect_right(items, item)
        there = at > 0 and items[at - 1] == item
        return starts[low] + (at - 1 if there else at), there

    # -- another one ----------------------------------------------------------------------------------------

    def apply(self, hunks: list[Hunk], fetch: Fetch) -> Tree:
        """The tree after the hunks, which are in order and do not overlap."""
        if not hunks:
            return self
        leaves = self.leaves
        last = leaves[-1]
        if len(hunks) == 1 and hunks[0].start == self.count and (last.closed or last.items is not None):
            return self._appended(last, hunks[0].items, fetch)
        self.warm([hunk[:2] for hunk in hunks], fetch)
        made: list[Leaf] = []
        done = at = 0  # old leaves and hunks that are dealt with
        changed: list[tuple[int, int, int, int]] = []  # runs of leaves: old start and stop, new start and stop
        while at < len(hunks):
            start = hunks[at].start
            position = bisect_right(self.starts, start) - 1 if start < self.count else len(leaves) - 1
            made += leaves[done:position]
            begin = len(made)
            new, done, at = self._recut(position, hunks, at, fetch)
            made += new
            changed.append((position, done, begin, len(made)))
        made += leaves[done:]
        if not made:
            made.append(make_leaf(self.kind, [], closed=False))
        same = len(made) == len(leaves) and all(
            a == c and b == d and all(made[p].count == leaves[p].count for p in range(a, b)) for a, b, c, d in changed
        )
        return self._with(made, self.starts if same else None, changed, fetch)

    def _with(
        self, made: list[Leaf], starts: list[int] | None, changed: list[tuple[int, int, int, int]], fetch: Fetch
    ) -> Tree:
        first, behind = changed[0][0], len(self.leaves) - changed[-1][1]
        levels = index_over(self.kind, made, self, min(first, len(made)), min(behind, len(made)))
        tree = Tree(self.kind, made, starts, levels)
        tree.fresh = [leaf for _, _, new_start, new_stop in changed for leaf in made[new_start:new_stop]]
        tree.beside = self.beside
        if self.where is not None:
            self._pass_on(tree, changed, fetch)
        return tree

    def _pass_on(self, tree: Tree, changed: list[tuple[int, int, int, int]], fetch: Fetch) -> None:
        """Hand the index of keys on to the newest tree; the old one can make it again."""
        where, self.where = self.where, None
        if where is None:
            return
        fresh: list[Leaf] = []
        gone: list[Leaf] = []
        come: list[tuple[bytes, list[Leaf]]] = []
        for old_start, old_stop, new_start, new_stop in changed:
            if old_stop - old_start == new_stop - new_start == 1:
                old, new = self.leaves[old_start], tree.leaves[new_start]
                before, after = self.items_of(old, fetch), self.items_of(new, fetch)
                cell = where.get(key_of(before[0])) if before else None
                if cell is not None and cell[0] is old and len(after) >= len(before):
                    differ = [n for n, item in enumerate(before) if after[n] is not item]
                    if all(after[n].startswith(key_of(before[n])) for n in differ):  # edited, or grown at its end
                        cell[0] = new
                        come += [(key_of(item), cell) for item in after[len(before) :]]
                        continue
            gone += self.leaves[old_start:old_stop]
            fresh += tree.leaves[new_start:new_stop]
        for leaf in gone:
            for item in self.items_of(leaf, fetch):
                where.pop(key_of(item), None)
        where.update(come)  # a key may go and come back
        for leaf in fresh:
            self._register(leaf, where, fetch)
        tree.where = where

    def grown(self, items: list[bytes]) -> Tree | None:
        """The tree with items at its end that name no other tree, where only the last leaf grows; None for others.

        The most frequent change by far. What stays is not even copied: see ``_whole``.
        """
        last = self.last
        if last.closed or last.inner or last.items is None or self.where is not None:
            return None
        size, count = last.size, last.count
        for item in items:
            size += len(item)
            count += 1
            if closes(size, count, item):
                return None
        for index in self.tops:
            if index.running is None or index.running[1] != index.span - 1:
                return None
        leaf = self._longer(last, items, size, count, closed=False, names=last.names)
        leaf.inner = ()
        tree = Tree.__new__(Tree)
        tree.kind, tree.last, tree.fresh, tree.where, tree.beside = self.kind, leaf, (), None, self.beside
        tree._base, tree._parts = self._base or self, None
        tree.count, tree.size = self.count + len(items), self.size + size - last.size
        child: Node = leaf
        tops: list[Index] = []
        for index in self.tops:
            child = regrown(index, child)
            tops.append(child)
        tree.tops, tree.root = tops, child.digest
        return tree

    def _whole(self) -> _Parts:
        """What ``grown`` left out: all but the last nodes are those of the tree that grew."""
        parts = self._parts
        if parts is None:
            leaves, starts, levels = self._base._whole()  # type: ignore[union-attr] # it grew
            last = [[*level[:-1], index] for level, index in zip(levels, self.tops, strict=True)]
            parts = self._parts = [*leaves[:-1], self.last], starts, last
        return parts

    # Properties, because ``__getattr__`` would make every other attribute slow.
    @property
    def leaves(self) -> list[Leaf]:
        return self._whole()[0]

    @property
    def starts(self) -> list[int]:
        """Where each leaf begins."""
        return self._whole()[1]

    @property
    def levels(self) -> list[list[Index]]:
        """The index nodes above the leaves, the lowest level first."""
        return self._whole()[2]

    def _appended(self, last: Leaf, items: list[bytes], fetch: Fetch) -> Tree:
        leaves, starts = self.leaves, self.starts
        made = self._grown(last, items)
        begin = len(leaves) - (0 if last.closed else 1)
        if len(made) > 1 or last.closed:
            end = starts[-1] + last.count if last.closed else starts[-1]
            starts = [*starts[:begin], *accumulate([leaf.count for leaf in made[:-1]], initial=end)]
        every = leaves.copy()
        every[begin:] = made
        return self._with(every, starts, [(begin, len(leaves), begin, len(every))], fetch)

    def _grown(self, last: Leaf, items: list[bytes]) -> list[Leaf]:
        """What becomes of the last leaf when items come behind it."""
        used = 0
        made: list[Leaf] = []
        if not last.closed and last.items is not None:
            size, count, closed = last.size, last.count, False
            for item in items:
                size += len(item)
                count += 1
                closed = closes(size, count, item)
                if closed:
                    break
            used = count - last.count
            some = items[:used]
            names = last.names or any(map(names_tree, some))
            made.append(self._longer(last, some, size, count, closed=closed, names=names))
        if used < len(items):
            rest = items[used:]
            new, taken = cut(self.kind, rest)
            made += new
            if taken < len(rest):
                made.append(make_leaf(self.kind, rest[taken:], closed=False))
        return made

    def _longer(self, last: Leaf, items: list[bytes], size: int, count: int, *, closed: bool, names: bool) -> Leaf:
        """The open leaf with items at its end, ``count`` items of ``size`` bytes in all."""
        before: list[bytes] = last.items  # type: ignore[assignment] # whoever calls has looked
        if len(before) != last.count:  # a capture failed after it had grown
            before = before[: last.count]
        if last.hasher is None and size < SMALL_BYTES:
            return make_leaf(self.kind, before + items, closed=closed)
        hasher, last.hasher = last.hasher, None  # should this one have to grow again, it is made again
        if hasher is None:
            hasher = blake3(NODE_TAG + self.kind + b"\0")
            hasher.update(b"".join(before))
        for item in items:
            hasher.update(item)
        before += items
        leaf = Leaf(before, count, size, closed=closed)
        leaf.first, leaf.names = last.first, names
        leaf.finish(hasher)
        return leaf

    def _recut(self, position: int, hunks: list[Hunk], at: int, fetch: Fetch) -> tuple[list[Leaf], int, int]:
        """Cut anew from a leaf on, until a cut falls on an old border behind the last hunk here."""
        leaves, starts, _ = self._whole()
        made: list[Leaf] = []
        waiting: list[bytes] = []
        quiet: list[tuple[int, int]] = []  # runs of them that no leaf ends in: none ended there when it could have
        gone = 0  # items before this are dealt with
        here, end = position, len(leaves)
        while here < end:
            leaf, start = leaves[here], starts[here]
            here, stop = here + 1, start + leaf.count
            if gone >= stop and here < end:
                continue
            items = self.items_of(leaf, fetch)
            late, cursor = start + late_from(items), max(start, gone)
            while True:
                here_too = at < len(hunks) and (hunks[at].start < stop or here == end)
                upto = hunks[at].start if here_too else stop
                if cursor < upto:
                    shift = len(waiting) - cursor
                    quiet.append((max(cursor, late) + shift, min(upto, stop - 1) + shift))
                    waiting += items[cursor - start : upto - start]
                if not here_too:
                    break
                waiting += hunks[at].items
                cursor = gone = hunks[at].stop
                at += 1
            new, taken = cut(self.kind, waiting, quiet)
            made += new
            waiting = waiting[taken:]
            quiet = [(begin - taken, to - taken) for begin, to in quiet if to > taken]
            if not waiting and gone <= stop and (at == len(hunks) or hunks[at].start >= stop):
                break
        if waiting:
            made.append(make_leaf(self.kind, waiting, closed=False))
        return made, here, at

    # -- storing --------------------------------------------------------------------------------------------

    def unstored(self, fetch: Fetch) -> Iterator[tuple[Node, bytes, Sequence[bytes]]]:
        """Nodes that the store does not have yet, with their bytes, and the items of a leaf.

        What the items name comes first: whoever writes a tree writes all of it.
        """
        for leaf in self.leaves:
            for tree in leaf.inner or ():
                yield from tree.unstored(fetch)
            if not leaf.stored:
                items = self.items_of(leaf, fetch)
                yield leaf, blocks.leaf_node(self.kind, items), items
        children: Sequence[Node] = self.leaves
        for number, level in enumerate(self.levels, 1):
            at = 0
            for index in level:
                if not index.stored:
                    yield index, index_node(self.kind, number, children[at : at + index.span]), ()
                at += index.span
            children = level

    def unstored_bytes(self) -> int:
        """About how much ``unstored`` would give."""
        return sum(
            [
                (0 if leaf.stored else leaf.size) + sum([tree.unstored_bytes() for tree in leaf.inner or ()])
                for leaf in self.leaves
            ]
        )

    def as_new(self, fetch: Fetch) -> Tree:
        """The same tree with nodes of its own, none of them stored."""
        self.warm([(0, self.count)], fetch)
        leaves = list(map(_leaf_as_new, self.leaves))
        return Tree(self.kind, leaves, self.starts, [list(map(_index_as_new, level)) for level in self.levels])

    def resting_on(self, there: Collection[bytes], beside: Tree | None) -> Tree | None:
        """The same tree where the store has just these nodes of it, sharing leaves with the one ``beside`` it.

        None where bytes of others were let go, or may name trees of which nobody can say whether they are there.
        """

        def lacks(node: Node) -> bool:
            return node.stored and node.digest not in there

        known = {leaf.digest: leaf for leaf in beside.leaves} if beside is not None else {}
        leaves = [known.get(leaf.digest, leaf) for leaf in self.leaves]
        if any(leaf.items is None or leaf.names for leaf in leaves if leaf.digest not in there):
            return None
        leaves = [_leaf_as_new(leaf) if lacks(leaf) else leaf for leaf in leaves]
        levels = [[_index_as_new(index) if lacks(index) else index for index in level] for level in self.levels]
        tree = Tree(self.kind, leaves, self.starts, levels)
        if beside is not None:
            tree.stand_beside(beside)
        return tree

    def let_go(self) -> None:
        """Forget the bytes of leaves that the store has, but for the last one, to which something may be appended."""
        for leaf in self.leaves:
            if leaf.inner:
                for tree in leaf.inner:
                    tree.let_go()
                if leaf.stored:
                    leaf.inner = ()  # what a stored leaf names is stored
            if leaf.stored and leaf.closed:
                leaf.items = None


def _leaf_as_new(leaf: Leaf) -> Leaf:
    made = Leaf(leaf.items, leaf.count, leaf.size, closed=leaf.closed)
    made.named(leaf.digest)
    made.first, made.names, made.inner = leaf.first, leaf.names, leaf.inner
    return made


def _index_as_new(index: Index) -> Index:
    return Index(index.digest, index.span, index.count)


def leaf_contents(kind: bytes, raw: bytes) -> list[bytes]:
    """The items of a raw leaf; a dict's are pairs."""
    count, payload = blocks.leaf_items(memoryview(raw))
    if kind != DICT:
        return split(payload, count)
    parts = split(payload, 2 * count)
    return [key + value for key, value in zip(parts[::2], parts[1::2], strict=True)]


def set_hunks(tree: Tree, gone: Sequence[bytes], come: Sequence[bytes], fetch: Fetch) -> list[Hunk] | None:
    """What becomes of a set; None when something that is to go is not there."""
    changes: dict[int, Hunk] = {}
    for item in gone:
        place, there = tree.rank(item, fetch)
        if not there:
            return None
        changes[place] = Hunk(place, place + 1, [], [item])
    for item in sorted(come):
        place, there = tree.rank(item, fetch)
        if not there:
            before = changes.get(place) or Hunk(place, place, [])
            changes[place] = before._replace(items=[*before.items, item])
    return [changes[place] for place in sorted(changes)]


def anchor(leaves: Sequence[Leaf], lookup: Callable[[bytes], Tree | None]) -> None:
    """Let new leaves hold the trees that they name; ``lookup`` gives those that the store may lack."""
    for leaf in leaves:
        if leaf.inner is None:
            inner: Sequence[Tree] = ()
            if leaf.names and leaf.items is not None:
                roots = {root for item in leaf.items[: leaf.count] for root in roots_in(item)}
                inner = [tree for tree in map(lookup, roots) if tree is not None]
            leaf.inner = inner


def build(kind: bytes, items: list[bytes]) -> Tree:
    """A tree from nothing."""
    leaves, taken = cut(kind, items) if kind != VALUE else ([], 0)
    if taken < len(items) or not leaves:
        leaves.append(make_leaf(kind, items[taken:], closed=False))
    tree = Tree(kind, leaves, None, index_over(kind, leaves, None, 0, 0))
    tree.fresh = leaves
    return tree


def read(root: bytes, fetch: Fetch, *, sparse: bool = False, beside: Tree | None = None) -> tuple[Tree, list[bytes]]:
    """The tree under a root as the store has it, and the raw leaves that were read. It keeps the last leaf's items.

    ``sparse``: of a list or a dict, all other leaves are read when somebody looks at them, and their sizes are guesses.
    ``beside``: a tree that is known; leaves that both have are shared, and not read.
    """
    rows = [fetch([root])[root]]
    kind = rows[0][:1]
    if kind not in _KINDS or len(rows[0]) < 2:
        raise CorruptValue(f"a node of the unknown kind {kind!r}")
    digests: list[bytes] = [root]
    levels: list[list[Index]] = []
    known: dict[bytes, Leaf] = {}
    for level in range(rows[0][1], 0, -1):
        entries: list[bytes] = []
        levels.append([])
        for digest, node in zip(digests, rows, strict=True):
            _expect_node(node, kind, level)
            some = [node[at : at + ENTRY_BYTES] for at in range(2, len(node), ENTRY_BYTES)]
            count = sum([int.from_bytes(entry[DIGEST_BYTES:], "big") for entry in some])
            index = Index(digest, len(some), count)
            index.stored = True
            levels[-1].append(index)
            entries += some
        digests = [entry[:DIGEST_BYTES] for entry in entries]
        if level == 1:
            if sparse and kind in (LIST, DICT):
                known = {entry[:DIGEST_BYTES]: _unread(entry) for entry in entries[:-1]}
            if beside is not None and beside.kind == kind:
                known |= {leaf.digest: leaf for leaf in beside.leaves}
            known.pop(digests[-1], None)
        unread = [digest for digest in digests if digest not in known]
        found = fetch(unread)
        rows = [found[digest] for digest in unread]
    leaves = []
    nodes = iter(rows)
    for digest in digests:
        leaf = known.get(digest)
        if leaf is None:
            node = next(nodes)
            _expect_node(node, kind, 0)
            leaf = Leaf(None, int.from_bytes(node[-COUNT_BYTES:], "big"), len(node) - 2 - COUNT_BYTES, closed=True)
            leaf.named(digest)
            leaf.stored = True
            leaf.inner = ()  # what a stored node names is stored
            if kind == SET and leaf.count:
                leaf.first = split(memoryview(node)[2:-COUNT_BYTES], leaf.count)[0]
        leaves.append(leaf)
    last = leaves[-1]
    last.items = leaf_contents(kind, rows[-1])
    last.closed = bool(last.count) and closes(last.size, last.count, last.items[-1])
    tree = Tree(kind, leaves, None, levels[::-1])
    if beside is not None:
        tree.stand_beside(beside)
    return tree, rows


def nodes_under(root: bytes, fetch: Fetch) -> set[bytes]:
    """The digests of all nodes of a tree as the store has it. No leaf is read for that, unless it is the root."""
    found, nodes = {root}, fetch([root])
    kind, top = nodes[root][:1], nodes[root][1:2]
    for level in range(top[0] if top else 0, 0, -1):
        below: set[bytes] = set()
        for node in nodes.values():
            _expect_node(node, kind, level)
            below.update([node[at : at + DIGEST_BYTES] for at in range(2, len(node), ENTRY_BYTES)])
        found |= below
        nodes = fetch([*below]) if level > 1 else {}
    return found


_KINDS = frozenset({LIST, DICT, SET, VALUE})
_first = attrgetter("first")


def _unread(entry: bytes) -> Leaf:
    """A leaf of which only its entry is known."""
    leaf = Leaf(None, int.from_bytes(entry[DIGEST_BYTES:], "big"), LEAF_MAX_BYTES, closed=True)
    leaf.named(entry[:DIGEST_BYTES])
    leaf.stored, leaf.inner = True, ()
    return leaf


def _expect_node(node: bytes, kind: bytes, level: int) -> None:
    least = 2 + (COUNT_BYTES if level == 0 else ENTRY_BYTES)
    if (
        node[:1] != kind
        or node[1:2] != bytes((level,))
        or len(node) < least
        or (level and (len(node) - 2) % ENTRY_BYTES)
    ):
        raise CorruptValue("a node is not what the node above it says")
