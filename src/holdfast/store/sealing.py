"""Tail and seal: where the values of operations are kept.

Owns the tail's encoding and the places of sealed values (format.md section 4). Knows nothing of what the values mean.
What always holds: every value of every operation is in exactly one of tail, node or leftover node, and reading it
gives the bytes that were written; the digest in the operation proves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ormsgpack import packb

from holdfast.codec.values import decode, encode
from holdfast.errors import CorruptValue, Damaged
from holdfast.store.bodies import places_of
from holdfast.store.catalog import CheckpointRow, SealRow, States, node_digest

# A checkpoint is sealed when the way back to the last sealed one would get longer than this: loading any checkpoint
# replays at most so many checkpoints and so many bytes.
SEAL_CHECKPOINTS = 512
SEAL_BYTES = 512 * 1024
# Tail rows that are read together.
TAILS_AT_ONCE = 128
_LEFTOVER = b"x\0"
# A leftover node is closed beyond this, so that reading one value never decompresses much more than it needs.
LEFTOVER_MAX_BYTES = 256 * 1024


def tail_of(values: list[bytes]) -> bytes | None:
    """The tail row of a checkpoint, or None when it needs none."""
    return packb(values) if values else None


def seal(
    tails: Iterable[tuple[int, list[bytes]]], nodes: dict[bytes, bytes], items: dict[bytes, tuple[bytes, int]]
) -> bytes:
    """The places of all values in the tails; values that no node holds go into a leftover node, added to ``nodes``.

    ``items`` says where the new nodes hold which encodings. ``n`` is 0 for the checkpoint that seals.
    """
    used: dict[bytes, int] = {}
    leftover = _Leftover(nodes, used)
    entries = []
    for n, values in tails:
        places = []
        for value in values:
            found = items.get(value)
            if found is not None:
                place = [used.setdefault(found[0], len(used)), found[1], len(value)]
            else:
                place = leftover.add(value)
            places.append(place)
        entries.append([n, places])
    leftover.finish()
    return encode([list(used), entries])


def moved(
    nodes: Sequence[bytes], entries: Sequence[Any], leaving: Mapping[bytes, bytes]
) -> tuple[bytes, dict[bytes, bytes]]:
    """The places of some entries of a seal, after the values in the nodes that are ``leaving`` have moved together.

    ``nodes`` are those of the seal as it was. Returns the nodes that must be written for it, too.
    """
    used: dict[bytes, int] = {}
    made: dict[bytes, bytes] = {}
    leftover = _Leftover(made, used)
    kept = []
    for n, places in entries:
        found = []
        for index, offset, length in places:
            raw = leaving.get(nodes[index])
            if raw is None:
                found.append([used.setdefault(nodes[index], len(used)), offset, length])
            else:
                found.append(leftover.add(raw[offset : offset + length]))
        kept.append([n, found])
    leftover.finish()
    return encode([list(used), kept]), made


class _Leftover:
    """Values that no node holds any more, because they were changed again: packed into nodes of their own."""

    def __init__(self, nodes: dict[bytes, bytes], used: dict[bytes, int]) -> None:
        self._nodes = nodes
        self._used = used
        self._raw = bytearray(_LEFTOVER)
        self._waiting: list[list[int]] = []

    def add(self, value: bytes) -> list[int]:
        if len(self._raw) > LEFTOVER_MAX_BYTES:
            self.finish()
        place = [-1, len(self._raw), len(value)]
        self._raw += value
        self._waiting.append(place)
        return place

    def finish(self) -> None:
        if self._waiting:
            raw = bytes(self._raw)
            digest = node_digest(raw)
            self._nodes[digest] = raw
            index = self._used.setdefault(digest, len(self._used))
            for place in self._waiting:
                place[0] = index
        self._raw, self._waiting = bytearray(_LEFTOVER), []


class Values:
    """Reads the values of operations. Keeps the last seal and its nodes, since neighbours share them."""

    def __init__(self, catalog: States, rows: Sequence[CheckpointRow] = ()) -> None:
        """``rows`` are those that will be asked for, in about this order: their tails are read many at a time."""
        self._catalog = catalog
        self._expected = [row.n for row in rows if not row.sealed]
        self._tails: dict[int, bytes | None] = {}  # None: it has none any more
        self._key: tuple[int, int] | None = None
        self._opened = b""  # the places of the open seal, as they are stored
        self._from = 0  # the oldest checkpoint that the open seal is known to cover
        self._nodes: list[bytes] = []
        self._entries: dict[int, list[list[int]]] = {}
        self._raw: dict[bytes, bytes] = {}

    def of(self, row: CheckpointRow) -> list[bytes]:
        """All values of a checkpoint's operations, in ordinal order."""
        tail = self._tail(row.n)
        if tail is not None:
            values = decode(tail)
            if not isinstance(values, list) or not all(type(value) is bytes for value in values):
                raise CorruptValue(
                    f"the tail of checkpoint {row.n} does not follow the format", what=(f"tail {row.n}",)
                )
            return values
        while True:
            try:
                return [self._value(place, row.n) for place in self._places(row)]
            except Damaged:
                if not self._moved(row):
                    raise

    def _moved(self, row: CheckpointRow) -> bool:
        """Whether the values lie elsewhere since: forgetting others gives a seal other places. Then look there."""
        seal_row = self._catalog.covering_seal(row.b, row.n)
        if seal_row is None or seal_row.places == self._opened:
            return False
        self._open((seal_row.b, seal_row.n), seal_row.places)
        self._from = row.n
        return True

    def found(self, row: CheckpointRow) -> tuple[bytes | None, list[tuple[bytes, int, int]]]:
        """Where a checkpoint's values are: its tail, or the nodes that hold them, with offset and length in each."""
        tail = self._tail(row.n)
        if tail is not None:
            return tail, []
        try:
            return None, [(self._nodes[index], offset, length) for index, offset, length in self._places(row)]
        except (TypeError, ValueError, IndexError) as error:
            raise CorruptValue(f"a place of checkpoint {row.n} does not follow the format") from error

    def _places(self, row: CheckpointRow) -> list[list[int]]:
        if not self._covers(row):
            seal_row = self._catalog.covering_seal(row.b, row.n)
            if seal_row is None:
                return []
            if self._key != (seal_row.b, seal_row.n):
                self._open((seal_row.b, seal_row.n), seal_row.places)
            self._from = row.n
        return self._entries.get(0 if self._key == (row.b, row.n) else row.n, [])

    def _covers(self, row: CheckpointRow) -> bool:
        """Whether the open seal is the first at or after this row, as it is for one before it."""
        return self._key is not None and self._key[0] == row.b and self._from <= row.n <= self._key[1]

    def _tail(self, n: int) -> bytes | None:
        if n in self._tails:
            return self._tails.pop(n)
        if n not in self._expected[:TAILS_AT_ONCE]:
            return self._catalog.tail(n)
        some, self._expected = self._expected[:TAILS_AT_ONCE], self._expected[TAILS_AT_ONCE:]
        self._tails = {**dict.fromkeys(some), **self._catalog.tails_of(some)}
        return self._tails.pop(n)

    def _open(self, key: tuple[int, int], places: bytes) -> None:
        self._nodes, entries = places_of(SealRow(key[1], key[0], places))
        self._entries = dict(entries)
        self._raw, self._key, self._opened = {}, key, places

    def _value(self, place: list[int], n: int) -> bytes:
        try:
            index, offset, length = place
            digest = self._nodes[index]
            raw = self._raw.get(digest)
            if type(offset) is not int or type(length) is not int:
                raise TypeError(place)
        except (TypeError, ValueError, LookupError) as error:
            raise CorruptValue(f"a place of checkpoint {n} does not follow the format") from error
        if raw is None:
            raw = self._catalog.nodes([digest]).get(digest)
            if raw is None:
                name = f"node {digest.hex()}"
                raise Damaged(f"{name} with a value of checkpoint {n} is missing", what=(name, f"checkpoint {n}"))
            self._raw[digest] = raw
        value = raw[offset : offset + length]
        if len(value) != length:
            raise Damaged(f"a value of checkpoint {n} lies outside its node", what=(f"checkpoint {n}",))
        return value
