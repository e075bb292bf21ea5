"""Chunks in pack files whose rows are lost.

Owns the search: a pack has no table of contents, but its chunks begin at multiples of a block, are padded with zeros,
and are known by their digests, so whoever knows digest and length of a chunk can tell where it is. Knows no catalog.
Reads only. What always holds: a place that is given was read and has the digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from blake3 import blake3

from holdfast.errors import Damaged
from holdfast.store.catalog import CHUNK_TAG, chunk_digest
from holdfast.store.cipher import Cipher
from holdfast.store.files import failed_disk
from holdfast.store.packs import ALIGN_BYTES, CHUNK_BYTES, round_up

Place = tuple[int, int]
"""Where something is in a file: its first byte, and the one after its last."""


def find_chunks(
    path: Path, wanted: Mapping[bytes, int], cipher: Cipher, taken: Iterable[Place], done: Callable[[int], None]
) -> Iterator[tuple[bytes, int]]:
    """Digest and offset of those of the ``wanted`` chunks (digest to length) that are in the pack at ``path``.

    Only raw ones, which is all that this program writes. ``taken`` are places whose chunks are known. ``done`` is told
    how far the search is.
    """
    sized: dict[int, set[bytes]] = {}
    for digest, length in wanted.items():
        if 0 < length <= CHUNK_BYTES:
            sized.setdefault(length, set()).add(digest)
    if not sized:
        return
    most = round_up(max(sized) + cipher.overhead)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        at = ALIGN_BYTES
        for start, end in [*sorted(taken), (size, size)]:
            while at < start:
                try:
                    data = os.pread(file.fileno(), min(most, start - at), at)
                except OSError as error:
                    if not failed_disk(error):
                        raise
                    data = b""
                digest, length = _chunk_at(memoryview(data), sized, cipher)
                if digest:
                    yield digest, at
                at += max(round_up(length), ALIGN_BYTES)
                done(at)
            at = max(at, round_up(end))


def _chunk_at(data: memoryview, sized: Mapping[int, set[bytes]], cipher: Cipher) -> tuple[bytes, int]:
    """The digest of the chunk that begins with these bytes and the length that it has there, or nothing."""
    hasher = blake3(CHUNK_TAG + b"\0")
    hashed = 0
    for length in sorted(sized):
        end = length + cipher.overhead
        if end > len(data):
            break
        padding = data[end : round_up(end)]
        if padding != bytes(len(padding)):
            continue
        if cipher.keyed:  # what it is called is part of how it is encrypted
            for digest in sized[length]:
                if _opens(cipher, digest, data[:end]):
                    return digest, end
            continue
        hasher.update(data[hashed:length])
        hashed = length
        found = hasher.digest()
        if found in sized[length]:
            return found, end
    return b"", 0


def _opens(cipher: Cipher, digest: bytes, box: memoryview) -> bool:
    try:
        return chunk_digest(cipher.unbox("chunk", digest, bytes(box))) == digest
    except Damaged:
        return False
