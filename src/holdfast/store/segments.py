"""Segments: the payloads of a run of checkpoints, each the child of the one before, in two zstd frames.

Owns their bytes (format.md section 4). The frame of operations is compressed with the raw bytes of nodes as a
dictionary: what an operation puts into a list stands in a node as well, and costs a dozen bytes the second time. So a
segment names these nodes, and whoever deletes nodes keeps them. Knows nothing of tables.

Level 1 finds no match in a dictionary, level 3 none beyond a megabyte unless its tables are made larger, and
long-distance matching does not look into a dictionary at all: hence the parameters below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import zstandard
from ormsgpack import packb, unpackb

from holdfast.errors import Damaged
from holdfast.store.cipher import HINT
from holdfast.store.manifest import identity, with_parent, without_parent
from holdfast.store.tables import NUMBER_MAX

SEGMENT_CHECKPOINTS = 256
SEGMENT_BYTES = 8 * 2**20
"""The most of one segment: what one damaged row may cost, and what reading one of its checkpoints has to read."""

DICTIONARY_BYTES = 8 * 2**20
"""Beyond, the tables below hold too little of a dictionary to find anything."""

FRAME_MAX_BYTES = 2**28
_LEVEL = 3
_DIGEST_BYTES = 32
_LENGTH = struct.Struct(">I")

Nodes = Callable[[Sequence[bytes]], dict[bytes, bytes]]


class Packed(NamedTuple):
    """The columns of a segment's row behind its number."""

    members: bytes
    refs: bytes
    manifests: bytes
    operations: bytes


def pack(
    members: Sequence[int],
    manifests: Sequence[bytes],
    operations: Sequence[bytes],
    leaves: dict[bytes, bytes],
    named: Iterable[bytes],
) -> Packed:
    """``leaves``: nodes in which values of these operations stand. ``named``: all that the operations name."""
    data = _join(operations)
    dictionary = b"".join(leaves.values())
    if not dictionary or len(dictionary) > DICTIONARY_BYTES:
        leaves, dictionary = {}, b""
    short = [manifests[0], *map(without_parent, manifests[1:])]
    refs = _LENGTH.pack(len(leaves)) + b"".join(leaves) + b"".join(dict.fromkeys(named))
    return Packed(
        packb(list(members)),
        refs,
        zstandard.ZstdCompressor(level=_LEVEL).compress(_join(short)),
        _compressor(dictionary, len(data)).compress(data),
    )


def _compressor(dictionary: bytes, size: int) -> zstandard.ZstdCompressor:
    if not dictionary:
        return zstandard.ZstdCompressor(level=_LEVEL)
    window = max(18, (len(dictionary) + size).bit_length())  # the data's end must still see the dictionary's beginning
    tables = max(17, min(20, len(dictionary).bit_length() - 1))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=window, strategy=zstandard.STRATEGY_DFAST, hash_log=tables, chain_log=tables
    )
    known = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdCompressor(dict_data=known, compression_params=parameters)


def split_refs(refs: bytes) -> tuple[list[bytes], list[bytes]]:
    """The nodes of the dictionary, and what operations name: nodes and chunks."""
    if len(refs) < 4 or (len(refs) - 4) % _DIGEST_BYTES:
        raise _malformed()
    count = _LENGTH.unpack_from(refs)[0]
    every = [refs[at : at + _DIGEST_BYTES] for at in range(4, len(refs), _DIGEST_BYTES)]
    return every[:count], every[count:]


class Segment:
    """A segment that was read. Manifests are cut at once, operations when the first is wanted."""

    def __init__(self, row: Packed, nodes: Nodes) -> None:
        self.members = members_of(row.members)
        self.place = {n: at for at, n in enumerate(self.members)}
        self.manifests = _cut(_opened(zstandard.ZstdDecompressor(), row.manifests))
        if len(self.manifests) != len(self.members) or not self.members:
            raise _malformed()
        self.ids = [identity(self.manifests[0])]
        for at in range(1, len(self.manifests)):
            self.manifests[at] = with_parent(self.manifests[at], self.ids[-1])
            self.ids.append(identity(self.manifests[at]))
        self._row = row
        self._nodes = nodes
        self._operations: list[bytes] | None = None

    @property
    def refs(self) -> tuple[list[bytes], list[bytes]]:
        """The nodes of the dictionary, and what operations name."""
        return split_refs(self._row.refs)

    def operations(self, at: int) -> bytes:
        if self._operations is None:
            digests, _ = self.refs
            reader = zstandard.ZstdDecompressor()
            if digests:
                found = self._nodes(digests)
                if any(digest not in found for digest in digests):
                    raise Damaged("a node that a segment was written with is missing", hint=HINT)
                raw = b"".join([found[digest] for digest in digests])
                known = zstandard.ZstdCompressionDict(raw, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
                reader = zstandard.ZstdDecompressor(dict_data=known, max_window_size=2 * FRAME_MAX_BYTES)
            self._operations = _cut(_opened(reader, self._row.operations))
        if len(self._operations) != len(self.members):
            raise _malformed()
        return self._operations[at]


def members_of(members: bytes) -> list[int]:
    """The checkpoints of a segment, by that column of its row."""
    try:
        found = unpackb(members)
    except ValueError as error:
        raise _malformed() from error
    if type(found) is not list or set(map(type, found)) != {int}:
        raise _malformed()
    if len(set(found)) < len(found) or not 0 < min(found) <= max(found) <= NUMBER_MAX:
        raise _malformed()
    return found


def _opened(reader: zstandard.ZstdDecompressor, frame: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)
        if 0 <= size <= FRAME_MAX_BYTES:
            return reader.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed() from error
    raise _malformed()


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


def _cut(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise _malformed()
        end = at + 4 + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            raise _malformed()
        found.append(data[at + 4 : end])
        at = end
    return found


def _malformed() -> Damaged:
    return Damaged("a segment does not follow the format", hint=HINT)
