"""Which nodes and chunks are still needed.

Owns the walk from checkpoints, tails, seals and records to everything that they name. Deletes nothing itself. What
always holds: references are found by their bytes, wherever they stand, so that something may be taken for needed that
is not, but never the other way round; a node or row that cannot be read ends the walk with an error, and nothing is
deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import islice

from holdfast.agent.manifest import Manifest
from holdfast.errors import Damaged
from holdfast.store.bodies import places_of
from holdfast.store.catalog import CheckpointRow, EffectRow, SealRow
from holdfast.store.forgetting import Waste
from holdfast.store.packs import CHUNK_BYTES
from holdfast.store.reading import Reading

DIGEST_BYTES = 32
_ENTRY_BYTES = 40
_NODES_AT_ONCE = 64
# What stands before the 32 bytes of extension 40, and before the value's digest in extension 41. Nothing but these few
# bytes is looked for: that is many times faster, and what only looks like one hides none that begins inside it.
_BIG = re.compile(rb"\xc7\x20\x28")
_BULK = re.compile(rb"\x29\x93\xc4\x20")
# After the payload's first four bytes and the digest.
_LENGTH_AT = 4 + DIGEST_BYTES
_UINT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_ARRAY_BYTES = {0xDC: 2, 0xDD: 4}
_CHUNK_BYTES = 2 + DIGEST_BYTES


def containers(data: bytes) -> list[bytes]:
    """The digests of big containers that an encoding names."""
    ends = (match.end() for match in _BIG.finditer(data))
    return [data[at : at + DIGEST_BYTES] for at in ends if at + DIGEST_BYTES <= len(data)]


def chunks(data: bytes) -> Iterator[bytes]:
    """The digests of chunks that an encoding names."""
    return (digest for digest, _ in sized_chunks(data))


def sized_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The digests of chunks that an encoding names, and how long each of them is."""
    for match in _BULK.finditer(data):
        at = match.start() + _LENGTH_AT
        if at >= len(data):
            continue
        size = _UINT_BYTES.get(data[at], 0)
        left = int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else data[at]
        at += 1 + size
        if at >= len(data):
            continue
        size = _ARRAY_BYTES.get(data[at], 0)
        count = int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else data[at] & 0x0F
        at += 1 + size
        for start in range(at, min(at + count * _CHUNK_BYTES, len(data)), _CHUNK_BYTES):
            yield data[start + 2 : start + _CHUNK_BYTES], max(0, min(left, CHUNK_BYTES))
            left -= CHUNK_BYTES


class Reached:
    """Everything that was reached from some roots so far."""

    def __init__(self, reading: Reading, *, tolerant: bool = False) -> None:
        """``tolerant``: what is not there is passed over, because it was deleted before."""
        self._reading = reading
        self._tolerant = tolerant
        self._unwritten: Mapping[bytes, bytes] = {}
        self.nodes: set[bytes] = set()
        self.chunks: set[bytes] = set()
        self.metadata: set[bytes] = set()

    def checkpoint(self, row: CheckpointRow, tail: bytes | None) -> None:
        try:
            manifest = Manifest.decode(row.manifest)
        except Damaged:
            if not self._tolerant:
                raise
        else:
            self.metadata.add(manifest.metadata)
            if row.sealed:
                self.add(digest for _, digest in manifest.sections)
        for data in (row.operations, tail or b""):
            self.value(data)

    def state(self, sections: Iterable[tuple[str, bytes]], unwritten: Mapping[bytes, bytes]) -> None:
        """A state of which some nodes are not in the catalog: those are given."""
        self._unwritten = unwritten
        self.add(digest for _, digest in sections)
        self._unwritten = {}

    def seal(self, seal: SealRow) -> None:
        self.add(places_of(seal)[0])

    def effect(self, row: EffectRow) -> None:
        """What a record names: the nodes of its long values, and whatever its body's bytes look like."""
        self.add(row.refs[at : at + DIGEST_BYTES] for at in range(0, len(row.refs), DIGEST_BYTES))
        self.value(row.body)

    def value(self, data: bytes) -> None:
        self.chunks.update(chunks(data))
        self.add(containers(data), certain=False)

    def add(self, roots: Iterable[bytes], *, certain: bool = True) -> None:
        """Walk from some nodes. What is not ``certain`` was found by its bytes: a text may look like a reference."""
        waiting = [(digest, certain) for digest in roots]
        while waiting:
            some: dict[bytes, bool] = {}
            while waiting and len(some) < _NODES_AT_ONCE:
                digest, sure = waiting.pop()
                if digest not in self.nodes:
                    self.nodes.add(digest)
                    some[digest] = sure
            found = self._reading.nodes(digest for digest in some if digest not in self._unwritten)
            found.update((digest, self._unwritten[digest]) for digest in some if digest in self._unwritten)
            for digest, sure in some.items():
                node = found.get(digest)
                if node is not None:
                    waiting.extend(self._below(node))
                elif sure and not self._tolerant:
                    short = digest.hex()[:16]
                    raise Damaged(f"node {short} is missing, so nothing can be collected", what=(f"node {short}",))

    def _below(self, node: bytes) -> Iterator[tuple[bytes, bool]]:
        """The nodes that a node names."""
        if node[1] > 0:
            for at in range(2, len(node), _ENTRY_BYTES):
                yield node[at : at + DIGEST_BYTES], True
        else:
            self.chunks.update(chunks(node))
            for digest in containers(node):
                yield digest, False


class Collection:
    """What of the doomed may be deleted: all that nothing else reaches."""

    def __init__(
        self,
        reading: Reading,
        doomed: Reached,
        dead: Container[int],
        dead_effects: Container[int] = (),
        *,
        seals: Container[int] = (),
        pace: Callable[[], None] = lambda: None,
    ) -> None:
        """``seals`` are looked at by the caller: they are about to change. ``pace`` is called every few rows."""
        self._reading = reading
        self._doomed = doomed
        self._dead = dead
        self._dead_effects = dead_effects
        self._skipped = seals
        self.live = Reached(reading)
        self._rows_seen = self._seals_seen = self._effects_seen = 0
        self._pace = pace

    @property
    def empty(self) -> bool:
        return not self._doomed.nodes and not self._doomed.chunks and not self._doomed.metadata

    def mark(self) -> None:
        """Walk from every checkpoint, seal and record that was added since the last call. At ease: others write."""
        self._mark(self._pace)

    def _mark(self, pace: Callable[[], None]) -> None:
        for row, tail in self._reading.rows_with_tails(after=self._rows_seen):
            self._rows_seen = row.n
            if row.n not in self._dead:
                self.live.checkpoint(row, tail)
            pace()
        for seal in self._reading.all_seals(after=self._seals_seen):
            self._seals_seen = seal.n
            if seal.n not in self._skipped:
                self.live.seal(seal)
            pace()
        for effect in self._reading.all_effects(after=self._effects_seen):
            self._effects_seen = effect.r
            if effect.r not in self._dead_effects:
                self.live.effect(effect)
            pace()
        for doomed, live in self._pairs():
            doomed -= {digest for digest in doomed if digest in live}

    def _pairs(self) -> tuple[tuple[set[bytes], set[bytes]], ...]:
        doomed, live = self._doomed, self.live
        return (doomed.nodes, live.nodes), (doomed.chunks, live.chunks), (doomed.metadata, live.metadata)

    def settled(self) -> Waste:
        """All that is left."""
        self._mark(self._pace)
        return Waste(list(self._doomed.nodes), list(self._doomed.chunks), list(self._doomed.metadata))

    def take(self, most: int) -> Waste:
        """Mark what is new, and give some of what is left. To be called where nobody else can write."""
        self._mark(lambda: None)
        some = []
        for doomed, _ in self._pairs():
            chosen = list(islice(doomed, most))
            doomed.difference_update(chosen)
            most -= len(chosen)
            some.append(chosen)
        return Waste(*some)
