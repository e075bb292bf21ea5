"""A checkpoint as bytes: its manifest, the payload that it travels in, and the segments that many of them lie in.

Owns these bytes (format.md sections 3 and 4), and those of records (section 6). A manifest says nothing of whose it is
or how it is stored: its digest is the checkpoint's id, in every store. Knows nothing of tables, and not what a record
says. What always holds: decoding gives what was encoded, or raises ``Damaged``; of a record, bytes that are not what
was written are told apart from values that are not there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

import zstandard
from blake3 import blake3
from ormsgpack import packb, unpackb

from holdfast.codec.values import decode, encode
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.cipher import HINT, RAW, compressed, digest, uncompressed
from holdfast.store.tables import NUMBER_MAX

VERSION = 1
STATE = "state"
"""The layer in which the sections of an agent's state lie. Others (files, a process) may stand beside it."""

APART = "\0"
"""The name of a section of another layer begins so, wherever sections of all layers stand together."""

Sections = list[tuple[str, bytes]]
Position = tuple[int, bytes]
"""A point in a line of records: how many are before it, and the chain digest after them."""

PARENT = slice(2, 36)
"""Where a manifest has its parent's id: behind the array's header and the version, as a bin of 32 bytes."""
_NO_PARENT = b"\xc4\x00"
_ID = b"\xc4\x20"

_TYPES = [int, bytes, int, list, bytes, list, bytes, str, int, bytes, str, bytes]
_COST_TYPES = [str, int, int, int, int]
_LENGTH = struct.Struct(">I")

_DIGEST_BYTES = 32

TIME_MAX = 2**57
"""In microseconds since 1970: before the year 7000, so that any time has a date."""


COMPRESS_FROM_BYTES = 4096
"""Of a payload. Below, a commit takes longer than the row's page is worth, which is written in any case."""


class Cost(NamedTuple):
    """What asked for a checkpoint ("": the program), and what the one before it cost, which is known by then.

    ``elapsed_ms`` is the time since that one, or since the writer began, by a clock that nobody sets. ``stall_us``: how
    long the program stood still for the one before, ``durable_us``: how long it took until that was durable, or, if it
    is not yet, the newest before it that is; 0 where this writer has made none. ``failures``: how often the agent has
    failed since then.
    """

    trigger: str
    elapsed_ms: int
    stall_us: int
    durable_us: int
    failures: int = 0


class Manifest(NamedTuple):
    """What a checkpoint says. ``layers`` are trees by name; ``sections`` those of all layers, ``state`` the state's."""

    parent: bytes
    depth: int
    layers: list[tuple[str, Sections]]
    operations: bytes
    effects: Position
    metadata: bytes
    label: str
    time_us: int
    nonce: bytes
    kind: str
    target: bytes
    cost: Cost | None = None

    @classmethod
    def make(
        cls,
        parent: bytes,
        depth: int,
        sections: Sections,
        operations: bytes,
        effects: Position,
        metadata: bytes,
        label: str,
        time_us: int,
        kind: str = "checkpoint",
        target: bytes = b"",
        cost: Cost | None = None,
    ) -> Manifest:
        layers, nonce = _layered(sections), _nonces.make()
        return cls(parent, depth, layers, operations, effects, metadata, label, time_us, nonce, kind, target, cost)

    @property
    def sections(self) -> Sections:
        if len(self.layers) == 1:
            return self.layers[0][1]
        return [*self.state, *((apart(layer, name), root) for layer, some in self.layers[1:] for name, root in some)]

    @property
    def state(self) -> Sections:
        return self.layers[0][1]

    @property
    def roots(self) -> list[bytes]:
        """Every tree that it names, its metadata included."""
        return [*(root for _, sections in self.layers for _, root in sections), self.metadata]

    def encode(self) -> bytes:
        parent, depth, layers, operations, effects, *rest, cost = self
        flat = [[name, list(chain.from_iterable(sections))] for name, sections in layers]
        parts = [VERSION, parent, depth, flat, operations, list(effects), *rest]
        if cost is not None:
            parts.append(list(cost))
        try:
            return packb(parts)
        except TypeError:  # a section's name is no text in UTF-8
            return encode(parts)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        try:
            parts = unpackb(data)
        except ValueError:  # damaged, or a section's name is no text in UTF-8
            try:
                parts = decode(data)
            except HoldfastError as error:
                raise _malformed(data) from error
        cost = _cost(parts.pop(), data) if type(parts) is list and len(parts) > len(_TYPES) else None
        if type(parts) is not list or list(map(type, parts)) != _TYPES or parts[0] != VERSION:
            raise _malformed(data)
        _, parent, depth, flat, operations, effects, metadata, label, time_us, nonce, kind, target = parts
        if list(map(type, effects)) != [int, bytes] or not all(map(_is_layer, flat)) or not 0 <= time_us < TIME_MAX:
            raise _malformed(data)
        if len(operations) != _DIGEST_BYTES or len(metadata) != _DIGEST_BYTES or len(parent) not in {0, _DIGEST_BYTES}:
            raise _malformed(data)
        layers = [(name, list(zip(pairs[::2], pairs[1::2], strict=True))) for name, pairs in flat]
        if not _are_layers(layers):
            raise _malformed(data)
        end = (effects[0], effects[1])
        return cls(parent, depth, layers, operations, end, metadata, label, time_us, nonce, kind, target, cost)


class _Nonces:
    """Sixteen bytes that nobody else has: a random half for each process, which counts in the other."""

    series: tuple[int, bytes, count[int]] = (0, b"", count())

    def make(self) -> bytes:
        if self.series[0] != os.getpid():
            self.series = (os.getpid(), os.urandom(8), count())
        _, half, numbers = self.series
        return half + next(numbers).to_bytes(8, "big")


_nonces = _Nonces()


def _is_layer(layer: Any) -> bool:
    if type(layer) is not list or list(map(type, layer)) != [str, list] or len(layer[1]) % 2:
        return False
    names, roots = layer[1][::2], layer[1][1::2]
    return set(map(type, names)) <= {str} and all(type(root) is bytes and len(root) == _DIGEST_BYTES for root in roots)


def apart(layer: str, section: str) -> str:
    """What a section of another layer is called among those of the state: in operations, for example."""
    return f"{APART}{layer}{APART}{section}"


def _layered(sections: Sections) -> list[tuple[str, Sections]]:
    """Sections of all layers, in their order: first those of the state, then the others by their names."""
    if not sections or sections[-1][0][:1] != APART:
        return [(STATE, sections)]
    layers: dict[str, Sections] = {STATE: []}
    for name, root in sections:
        _, layer, rest = name.split(APART, 2) if name[:1] == APART else ("", STATE, name)
        layers.setdefault(layer, []).append((rest, root))
    return list(layers.items())


def _are_layers(layers: list[tuple[str, Sections]]) -> bool:
    """Whether no two sections are called the same, and all stand where whoever works them out would have them."""
    if not layers or layers[0][0] != STATE or any(name[:1] == APART for name, _ in layers[0][1]):
        return False
    if len(layers) == 1:
        return True
    others = [apart(layer, name) for layer, sections in layers[1:] for name, _ in sections]
    single = all(APART not in name for name, _ in layers[1:]) and all(sections for _, sections in layers[1:])
    return single and others == sorted(set(others)) and STATE not in dict(layers[1:])


def _cost(parts: Any, data: bytes) -> Cost:
    if (
        type(parts) is not list
        or list(map(type, parts)) != _COST_TYPES
        or not all(0 <= n < TIME_MAX for n in parts[1:])
    ):
        raise _malformed(data)
    return Cost(*parts)


def _malformed(data: bytes) -> Damaged:
    return Damaged("a manifest does not follow the format", what=(f"checkpoint {identity(data).hex()}",), hint=HINT)


def identity(manifest: bytes) -> bytes:
    """The id of the checkpoint that a manifest is."""
    return digest(b"checkpoint", manifest)


def mark_of(id: bytes) -> int:
    """What a checkpoint's row is looked up by: the first eight bytes of its id as a number."""
    return int.from_bytes(id[:8], "big", signed=True)


def without_parent(manifest: bytes) -> bytes:
    return manifest[: PARENT.start] + _NO_PARENT + manifest[PARENT.stop :]


def with_parent(manifest: bytes, parent: bytes) -> bytes:
    return manifest[: PARENT.start] + _ID + parent + manifest[PARENT.start + len(_NO_PARENT) :]


# -- payloads: a manifest and its operations in one blob


def pack_payload(manifest: bytes, operations: bytes) -> bytes:
    data = _LENGTH.pack(len(manifest)) + manifest + operations
    return compressed(data, COMPRESS_FROM_BYTES)


def unpacked(payload: bytes) -> bytes:
    """The same payload as it would be stored if it were not compressed."""
    return payload if payload[:1] == RAW else RAW + uncompressed(payload)


def split_payload(data: bytes) -> tuple[bytes, bytes]:
    """The manifest and the operations of a payload."""
    data = uncompressed(data)
    if len(data) < 4:
        raise Damaged("a payload does not follow the format", hint=HINT)
    end = 4 + _LENGTH.unpack_from(data)[0]
    return data[4:end], data[end:]


# -- segments: the payloads of a run of checkpoints, each the child of the one before, in two zstd frames --------------

# The frame of operations is compressed with the raw bytes of nodes as a dictionary: what an operation puts into a list
# stands in a node as well, and costs a dozen bytes the second time. So a segment names these nodes, and whoever deletes
# nodes keeps them. Level 1 finds no match in a dictionary, level 3 none beyond a megabyte unless its tables are made
# larger, and long-distance matching does not look into a dictionary at all: hence the parameters below.

SEGMENT_CHECKPOINTS = 256
SEGMENT_BYTES = 8 * 2**20
"""The most of one segment: what one damaged row may cost, and what reading one of its checkpoints has to read."""

DICTIONARY_BYTES = 8 * 2**20
"""Beyond, the tables below hold too little of a dictionary to find anything."""

FRAME_MAX_BYTES = 2**28
_LEVEL = 3
_DIGEST_BYTES = 32

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
        raise _broken()
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
            raise _broken()
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
            raise _broken()
        return self._operations[at]


def members_of(members: bytes) -> list[int]:
    """The checkpoints of a segment, by that column of its row."""
    try:
        found = unpackb(members)
    except ValueError as error:
        raise _broken() from error
    if type(found) is not list or set(map(type, found)) != {int}:
        raise _broken()
    if len(set(found)) < len(found) or not 0 < min(found) <= max(found) <= NUMBER_MAX:
        raise _broken()
    return found


def _opened(reader: zstandard.ZstdDecompressor, frame: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)
        if 0 <= size <= FRAME_MAX_BYTES:
            return reader.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _broken() from error
    raise _broken()


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


def _cut(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise _broken()
        end = at + 4 + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            raise _broken()
        found.append(data[at + 4 : end])
        at = end
    return found


def _broken() -> Damaged:
    return Damaged("a segment does not follow the format", hint=HINT)


# -- the bodies of records -----------------------------------------------------------------------------------------

# A record is proven by its digest, which covers what it says and a digest of its values, not the values themselves. So
# they can go, and what is left is proven as before:
#
#     body with values     C1, digest of the values (32), length of what it says (4), what it says, the values
#
# A body without values is what it says and nothing else.

_APART = 0xC1
"""The first byte of a body with values: no MessagePack object begins with it."""
_SAID_AT = 37

MARKED, LET_GO = 1, 2
"""Bits of a record's ``mark``: summaries need it; its values were let go on purpose."""


def join_body(said: bytes, values: bytes) -> bytes:
    """The body of a record that says this and holds these values, one after another."""
    return b"".join((b"\xc1", _digest_of_values(values), len(said).to_bytes(4, "big"), said, values))


def body_proof(body: bytes) -> bytes:
    """What the digest of a record covers: all of its body but the values."""
    return body[: _values_at(body)] if body[:1] == b"\xc1" else body


def split_body(body: bytes) -> tuple[bytes, bytes | None]:
    """What a record says, and its values; None where it has some, and they are not there."""
    if not body or body[0] != _APART:
        return body, b""
    end = _values_at(body)
    return body[_SAID_AT:end], body[end:] or None


def body_digest(body: bytes) -> bytes:
    """What the chain of a line covers of a record."""
    return blake3(b"holdfast.record\0" + body_proof(body)).digest()


def is_written(body: bytes, known: bytes) -> bool:
    """Whether a body is the one with this digest, whole or without its values."""
    if body[0] != _APART:
        return bool(blake3(b"holdfast.record\0" + body).digest() == known)
    end = _values_at(body)
    if blake3(b"holdfast.record\0" + body[:end]).digest() != known:
        return False
    return len(body) <= end or bool(blake3(b"holdfast.values\0" + body[end:]).digest() == body[1:33])


def values_bytes(body: bytes) -> int:
    """How many bytes of values there are."""
    return len(split_body(body)[1] or b"")


def is_bare(body: bytes) -> bool:
    """Whether the values that a body should have are not there."""
    return split_body(body)[1] is None


def _digest_of_values(values: bytes) -> bytes:
    return blake3(b"holdfast.values\0" + values).digest()


def _values_at(body: bytes) -> int:
    """Where the values begin. What is shorter than it says has none, and is no body that was written."""
    return _SAID_AT + int.from_bytes(body[33:_SAID_AT], "big")
