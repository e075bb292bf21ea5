"""Content-defined nodes: how the items of a container become leaves, index nodes and digests.

Owns the rule of format.md section 2: where a node ends, what its digest covers, how an item names another tree, and
what a container looks like that is written out. Knows nothing of tracked containers, Python types or storage: it sees
item encodings as bytes. What always holds: equal items give equal nodes, however they were reached; closing what was
opened gives the same bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from zlib import crc32

from blake3 import blake3

from holdfast.codec import wire
from holdfast.codec.wire import (
    array_items,
    array_of,
    corrupt,
    extension_of,
    is_text,
    map_items,
    map_of,
    opened_extension,
    split,
)

if TYPE_CHECKING:
    from holdfast.codec.tree import Tree

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
NODE_TAG = b"holdfast.node\0"
# Joining tag and data is quicker than two calls as long as the copy is small.
_JOINED_MAX_BYTES = 16_384
_MANY = 256
# About how many places of a leaf are tried for where it is long enough to end.
_PLACES = 64
Raw = TypeVar("Raw", bytes, memoryview)
BIG_HEAD = bytes((0xC7, DIGEST_BYTES, wire.BIG))
"""How the name of a tree begins: extension 40 with 32 bytes."""
# First bytes of the name of a tree that turn out to be something else, before all three bytes are looked for.
_PATIENCE = 16
# A leaf that is shorter is hashed from its beginning when it grows: that is quicker than keeping a hasher for it.
SMALL_BYTES = 4096
# Where items are no longer than this, a leaf may end because of their number.
_TINY_BYTES = 16


def digest_of(tag: str, data: bytes | memoryview) -> bytes:
    """``H(tag, data)`` of the format."""
    if len(data) < _JOINED_MAX_BYTES:
        return blake3(tag.encode() + b"\0" + data).digest()
    # One thread: the library's own pool does not survive a fork, and hashing in a forked child would wait for ever.
    hasher = blake3(tag.encode() + b"\0")
    hasher.update(data)
    return hasher.digest()


def node_digest(raw: bytes) -> bytes:
    """The digest of a whole node, its two first bytes included."""
    return blake3(NODE_TAG + raw).digest()


def leaf_node(kind: bytes, items: list[bytes]) -> bytes:
    """A whole level-0 node: kind, level, the items, their number."""
    return b"".join((kind, b"\0", *items, len(items).to_bytes(COUNT_BYTES, "big")))


def leaf_items(raw: Raw) -> tuple[int, Raw]:
    """How many items a level-0 node has, and their encodings one after another."""
    return int.from_bytes(raw[-COUNT_BYTES:], "big"), raw[2:-COUNT_BYTES]


def closes(size: int, count: int, item: bytes) -> bool:
    """Whether a leaf of ``size`` bytes and ``count`` items ends after ``item``, its last one."""
    if size >= LEAF_MAX_BYTES or count >= LEAF_MAX_ITEMS:
        return True
    return size >= LEAF_MIN_BYTES and cuts(item)


def cuts(item: bytes) -> bool:
    """Whether a leaf that is long enough ends after this item."""
    return crc32(item) * LEAF_TARGET_BYTES < len(item) << 32


def first_cut(items: list[bytes], start: int, stop: int, quiet: Sequence[tuple[int, int]]) -> int:
    """Where the first of these items stands that ``cuts``; ``stop`` if none does. Those in ``quiet`` runs do not."""
    for begin, end in quiet:
        if begin < end and start < end and begin < stop:
            at = _first_cut(items, start, begin) if start < begin else begin
            if at < begin:
                return at
            start = end
    return _first_cut(items, start, stop) if start < stop else stop


def _first_cut(items: list[bytes], start: int, stop: int) -> int:
    some, target = items[start:stop], LEAF_TARGET_BYTES
    sums: Iterable[int] = map(crc32, some)
    if len(some) > _MANY:  # tiny ones: mostly none of them cuts, which is seen at once
        sums = list(sums)
        if min(sums) * target >= max(map(len, some)) << 32:
            return stop
    for at, (crc, size) in enumerate(zip(sums, map(len, some), strict=True), start):
        if crc * target >> 32 < size:  # as ``cuts`` says it, in smaller numbers
            return at
    return stop


def late_from(items: list[bytes]) -> int:
    """An item from which on a leaf of these is long enough to end, close to the first; how many they are, if none."""
    size, step = 0, 1 + len(items) // _PLACES
    for stop in range(step, len(items) + 1, step):
        size += sum(map(len, items[stop - step : stop]))
        if size >= LEAF_MIN_BYTES:
            return stop - 1
    return len(items)


def index_closes(length: int, digest: bytes) -> bool:
    """Whether an index node of ``length`` entries ends after the child with this digest."""
    return length >= INDEX_MAX_ENTRIES or (
        length >= INDEX_MIN_ENTRIES and int.from_bytes(digest[:4], "big") < INDEX_CUT_BELOW
    )


# -- containers that are written out -----------------------------------------------------------------------------------


class Opened(NamedTuple):
    """A container as the encodings of its items. A dict has its keys beside its values."""

    kind: bytes
    items: list[bytes]
    keys: list[bytes] | None = None

    @property
    def pairs(self) -> list[bytes]:
        """The items as a tree holds them."""
        if self.keys is None:
            return self.items
        return [key + item for key, item in zip(self.keys, self.items, strict=True)]


def key_of(pair: bytes) -> bytes:
    """The key of a dict's item."""
    head = pair[0]
    if 0xA0 <= head < 0xC0:
        return pair[: 1 + (head & 31)]
    if head < 0x80 or head >= 0xE0:
        return pair[:1]
    if head in (0xD9, 0xC4):
        return pair[: 2 + pair[1]]
    return split(pair, 2)[0]


def opened(kind: bytes, items: list[bytes]) -> Opened:
    """The items of a tree: a dict's are taken apart."""
    if kind != DICT:
        return Opened(kind, items)
    parts = split(b"".join(items), 2 * len(items))
    return Opened(DICT, parts[1::2], parts[::2])


def open_inline(data: bytes) -> Opened | None:
    """The items of a container that is written out; None for anything else."""
    items = array_items(data)
    if items is not None:
        return Opened(LIST, items)
    parts = map_items(data)
    if parts is not None:
        return Opened(DICT, parts[1::2], parts[::2])
    found = opened_extension(data)
    if found is None or found[0] not in (wire.DICT, wire.SET):
        return None
    items = array_items(memoryview(data)[found[1] :])
    if items is None or (found[0] == wire.DICT and len(items) % 2):
        raise corrupt("a dict or a set is one array of its items")
    return Opened(SET, items) if found[0] == wire.SET else Opened(DICT, items[1::2], items[::2])


def close(kind: bytes, items: list[bytes], keys: list[bytes] | None = None) -> bytes:
    """A container written out."""
    if kind == LIST:
        return array_of(items)
    if kind == SET:
        return extension_of(wire.SET, array_of(items))
    names = keys or []
    if all(map(is_text, names)):
        return map_of([key + item for key, item in zip(names, items, strict=True)])
    return extension_of(wire.DICT, array_of([part for pair in zip(names, items, strict=True) for part in pair]))


# -- names -----------------------------------------------------------------------------------------------------------


def big(root: bytes) -> bytes:
    """How a container with a tree of its own stands in its parent."""
    return BIG_HEAD + root


def root_of(data: bytes) -> bytes | None:
    """The root of the tree, when an encoding is the name of one."""
    return data[3:] if len(data) == 3 + DIGEST_BYTES and data.startswith(BIG_HEAD) else None


def names_tree(data: bytes) -> bool:
    """Whether an encoding may name a tree.

    Looking for one byte is twenty times as fast as looking for three, and this one is rare.
    """
    at = -1
    for _ in range(_PATIENCE):
        at = data.find(0xC7, at + 1)
        if at < 0:
            return False
        if data.startswith(BIG_HEAD, at):
            return True
    return data.find(BIG_HEAD, at) >= 0


def roots_in(data: bytes) -> Iterator[bytes]:
    """The roots of all trees that an encoding names. Other bytes may look like one."""
    at = data.find(BIG_HEAD)
    while at >= 0:
        yield data[at + len(BIG_HEAD) : at + len(BIG_HEAD) + DIGEST_BYTES]
        at = data.find(BIG_HEAD, at + 1)


# -- leaves ----------------------------------------------------------------------------------------------------------


class Leaf:
    """A run of items. ``items`` is None when they were let go: then the store has them.

    The items of an open leaf, the last one, are a list that only grows; ``count`` says how many are this leaf's own.
    """

    __slots__ = ("closed", "count", "digest", "entry", "first", "hasher", "inner", "items", "names", "size", "stored")

    def __init__(self, items: list[bytes] | None, count: int, size: int, *, closed: bool) -> None:
        self.items, self.count, self.size, self.closed = items, count, size, closed
        self.digest = self.entry = b""
        self.first = b""  # of a set: the first item, by which leaves are searched
        self.stored = False
        self.hasher: blake3 | None = None  # over the items so far, of a leaf that is open
        self.names = True  # whether an item may name another tree
        self.inner: Sequence[Tree] | None = None  # the trees that its items name; None until somebody has looked

    def finish(self, hasher: blake3) -> None:
        """The hasher has seen all items."""
        end = hasher if self.closed else hasher.copy()
        end.update(self.count.to_bytes(COUNT_BYTES, "big"))
        self.named(end.digest())
        self.hasher = None if self.closed else hasher

    def named(self, digest: bytes) -> None:
        self.digest = digest
        self.entry = digest + self.count.to_bytes(8, "big")


class Index:
    """An index node over ``span`` children. ``running``: a hasher over the first of them, how many, and their items."""

    __slots__ = ("count", "digest", "entry", "running", "span", "stored")

    def __init__(self, digest: bytes, span: int, count: int) -> None:
        self.digest, self.span, self.count = digest, span, count
        self.entry = digest + count.to_bytes(8, "big")
        self.stored = False
        self.running: tuple[blake3, int, int] | None = None


Node = Leaf | Index


def make_leaf(kind: bytes, items: list[bytes], *, closed: bool, joined: bytes | None = None) -> Leaf:
    """A leaf from its items; ``joined`` are these one after another, where somebody has joined them already."""
    payload = b"".join(items) if joined is None else joined
    leaf = Leaf(items, len(items), len(payload), closed=closed)
    leaf.names = names_tree(payload)
    if kind == SET and items:
        leaf.first = items[0]
    if closed or len(payload) < SMALL_BYTES:  # hashed at once; one that is small is hashed again when it grows
        count = len(items).to_bytes(COUNT_BYTES, "big")
        leaf.named(blake3(b"".join((NODE_TAG, kind, b"\0", payload, count))).digest())
    else:
        hasher = blake3(NODE_TAG + kind + b"\0")
        hasher.update(payload)
        leaf.finish(hasher)
    return leaf


def cut(kind: bytes, items: list[bytes], quiet: Sequence[tuple[int, int]] = ()) -> tuple[list[Leaf], int]:
    """Whole leaves from the left, and how many items they took; the rest is not enough for one.

    ``quiet`` are runs of items of which is known that they do not cut (``cuts``).
    """
    made: list[Leaf] = []
    sizes: list[int] = []
    at = base = 0
    while at < len(items):
        if len(items) - at >= LEAF_MAX_ITEMS and len(items[at]) <= _TINY_BYTES:
            some = items[at : at + LEAF_MAX_ITEMS]
            joined = b"".join(some)
            if len(joined) < LEAF_MIN_BYTES:
                made.append(make_leaf(kind, some, closed=True, joined=joined))  # tiny ones: their number decides
                at, base = at + len(some), base + len(joined)
                continue
        if not sizes:
            sizes = list(accumulate(map(len, items)))
        # The first item that may be a leaf's last one, and the first that has to be (``closes``).
        least = bisect_left(sizes, base + LEAF_MIN_BYTES, at)
        most = min(bisect_left(sizes, base + LEAF_MAX_BYTES, at), at + LEAF_MAX_ITEMS - 1)
        end = first_cut(items, least, most, quiet) if least < most else most
        if end >= len(items):
            break
        made.append(make_leaf(kind, items[at : end + 1], closed=True))
        at, base = end + 1, sizes[end]
    return made, at


# -- index nodes --------------------------------------------------------------------------------------------------


def index_node(kind: bytes, level: int, children: Sequence[Node]) -> bytes:
    """A whole index node: kind, level, the entries of its children."""
    return b"".join((kind, bytes((level,)), *[child.entry for child in children]))


def index_over(kind: bytes, leaves: Sequence[Any], old: Tree | None, first: int, behind: int) -> list[list[Index]]:
    """Index levels over leaves, of which ``first`` at the front and ``behind`` at the end are those of ``old``."""
    levels: list[list[Index]] = []
    children = leaves
    before: Sequence[Any] = old.leaves if old is not None else ()
    while len(children) > 1:
        level = len(levels) + 1
        above = old.levels[level - 1] if old is not None and level <= len(old.levels) else []
        made, first, behind = _regroup(kind, level, children, above, len(before), first, behind)
        levels.append(made)
        children, before = made, above
    return levels


def _regroup(
    kind: bytes, level: int, children: Sequence[Any], old: list[Index], covered: int, first: int, behind: int
) -> tuple[list[Index], int, int]:
    """Cut children into index nodes; with them, how many at the front and at the end are old ones."""
    kept, run = len(old), covered if old else 0
    while kept and run > first:  # the nodes all of whose children are old ...
        kept -= 1
        run -= old[kept].span
    if kept and kept == len(old) and not index_closes(old[-1].span, children[run - 1].digest):
        kept -= 1  # ... and that the rule ended
        run -= old[kept].span
    size = len(children)
    if (
        kept == len(old) - 1
        and first >= size - 1
        and run < size
        and not (size - run > 1 and index_closes(size - run - 1, children[-2].digest))
    ):
        return [*old[:kept], _grown_index(kind, level, children, run, old[kept])], kept, 0
    made = old[:kept]
    borders: dict[int, int] = {}  # where an old node begins, all of whose children are old
    end, position = size, len(old)
    while position > kept and end - old[position - 1].span >= size - behind:
        position -= 1
        end -= old[position].span
        borders[end] = position
    while run < size:
        stop = _index_end(children, run)
        part = children[run:stop]
        count = sum([child.count for child in part])
        made.append(Index(node_digest(index_node(kind, level, part)), len(part), count))
        run = stop
        if run in borders:
            made += old[borders[run] :]
            return made, kept, len(old) - borders[run]
    return made, kept, 0


def _index_end(children: Sequence[Any], start: int) -> int:
    """Where an index node ends that begins with this child: ``index_closes`` for one after the other, in a hurry."""
    stop = min(start + INDEX_MAX_ENTRIES, len(children))
    bound = INDEX_CUT_BELOW.to_bytes(4, "big")  # a digest is below it if its first four bytes are
    for at in range(start + INDEX_MIN_ENTRIES - 1, stop):
        if children[at].digest < bound:
            return at + 1
    return stop


def _grown_index(kind: bytes, level: int, children: Sequence[Any], run: int, old: Index) -> Index:
    """The last node, of which only the last child is another one, or new."""
    before, last = len(children) - 1 - run, children[-1]
    hasher, fed, count = old.running or (blake3(NODE_TAG + kind + bytes((level,))), 0, 0)
    if fed > before:
        hasher, fed, count = blake3(NODE_TAG + kind + bytes((level,))), 0, 0
    if fed < before:
        hasher = hasher.copy()
        for child in children[run + fed : -1]:
            hasher.update(child.entry)
            count += child.count
    end = hasher.copy()
    end.update(last.entry)
    made = Index(end.digest(), before + 1, count + last.count)
    made.running = hasher, before, count
    return made


def regrown(old: Index, last: Node) -> Index:
    """The last node, of which only the last child is another one."""
    hasher, before, count = running = old.running or (blake3(), 0, 0)
    end = hasher.copy()
    end.update(last.entry)
    made = Index(end.digest(), before + 1, count + last.count)
    made.running = running
    return made
