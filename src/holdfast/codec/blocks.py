"""Content-defined nodes: how a section's items become a tree of digests.

Owns the rule of format.md section 2 (where a node ends, what its digest covers) and a tree that keeps the
digests current at the cost of what changed. Knows nothing of tracked containers, Python types or storage:
it sees item encodings as bytes. What always holds: equal items give equal nodes, however they were reached.
"""

from __future__ import annotations

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
NODE_TAG = b"holdfast.node\0"
# Joining tag and data is quicker than two calls as long as the copy is small.
_JOINED_MAX_BYTES = 16_384
Raw = TypeVar("Raw", bytes, memoryview)


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


class _Bounds(dict[int, int]):
    """By the size of an item: a leaf ends after it if its sum is below this."""

    def __missing__(self, size: int) -> int:
        self[size] = bound = -(-(size << 32) // LEAF_TARGET_BYTES)
        return bound


def first_cut(items: list[bytes], start: int, stop: int) -> int:
    """Where the first of these items stands that ``cuts``; ``stop`` if none does."""
    some, bounds = items[start:stop], _Bounds()
    for at, (crc, size) in enumerate(zip(map(crc32, some), map(len, some), strict=True), start):
        if crc < bounds[size]:
            return at
    return stop


def index_closes(length: int, digest: bytes) -> bool:
    """Whether an index node of ``length`` entries ends after the child with this digest."""
    return length >= INDEX_MAX_ENTRIES or (
        length >= INDEX_MIN_ENTRIES and int.from_bytes(digest[:4], "big") < INDEX_CUT_BELOW
    )
