"""The bytes of a file as chunks: where they are cut, and their digests.

Owns cutting. Knows nothing of trees, paths or stores.
What always holds: a digest is that of the bytes that come with it; memory is bounded by a few chunks, whatever the size
of a file; a file is never mapped, since whoever shortens it would kill this process.
Where a file is cut says nothing about what it holds: a content is named by the digest of all of its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from blake3 import blake3

from holdfast.errors import BadOption
from holdfast.process.trees import Content, content_digest
from holdfast.store.rows import chunk_digest

if TYPE_CHECKING:
    from pyfastcdc import FastCDC

WHOLE_BYTES = 2**20
"""Up to this size a file is one chunk."""

AVERAGE_BYTES = 2**20
"""Of a large file in a workspace. Half a thousandth of it is digests."""

IMAGE_AVERAGE_BYTES = 2**16
"""Of the image of a process: of a second one, chunks of this size share 99%, those of 1 MiB 95%."""

HOLE_BYTES = 8 * 2**20
"""How much of a hole is one chunk."""

Piece = tuple[bytes, bytes]
"""A chunk's digest, and its bytes."""

Have = Callable[[bytes], bool]


@lru_cache(maxsize=4)
def _cutter(average: int) -> FastCDC:
    try:
        from pyfastcdc import FastCDC
    except ImportError as error:
        raise BadOption(
            "files of more than 1 MiB are cut by a library that is not installed",
            hint="pip install 'holdfast[workspace]'",
        ) from error
    return FastCDC(average, max_size=4 * average)


@lru_cache(maxsize=64)
def _zeros(size: int) -> Piece:
    data = bytes(size)
    return chunk_digest(data), data


class _Segment:
    """Some of a file, as a stream that ends where the segment does or the file has become shorter."""

    def __init__(self, fd: int, start: int, end: int) -> None:
        self._fd, self._at, self._end = fd, start, end

    def readinto(self, buffer: memoryview) -> int:
        count = os.preadv(self._fd, [buffer[: self._end - self._at]], self._at)
        self._at += count
        return count


def _segments(fd: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Start, end and whether there is data, from the beginning to ``size``."""
    at = 0
    while at < size:
        try:
            start = min(os.lseek(fd, at, os.SEEK_DATA), size)
        except OSError:  # there is no data behind this, or the file system cannot tell
            start = size if _knows_holes(fd) else at
        if start > at:
            yield at, start, False
        if start < size:
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size) if _knows_holes(fd) else size
            yield start, max(end, start + 1), True
            at = max(end, start + 1)
        else:
            at = size


def _knows_holes(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_HOLE)
    except OSError:
        return False
    return True


def read(fd: int, size: int, have: Have, average: int = AVERAGE_BYTES) -> Generator[Piece, None, Content]:
    """The chunks of an open file that ``have`` does not know. Its Content is the generator's result.

    At most the first ``size`` bytes are read. ``Content.size`` is how many there were.
    """
    if size <= WHOLE_BYTES:
        data = os.pread(fd, size, 0) if size else b""
        while 0 < len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
            data += more
        if not data:
            return Content(content_digest(b""), 0, ())
        name = chunk_digest(data)
        if not have(name):
            yield name, data
        return Content(content_digest(data), len(data), (name,))
    digests: list[bytes] = []
    whole = blake3(b"holdfast.value\0")
    count = 0
    for start, end, filled in _segments(fd, size):
        if not filled:
            for at in range(start, end, HOLE_BYTES):
                name, data = _zeros(min(HOLE_BYTES, end - at))
                whole.update(data)
                count += len(data)
                digests.append(name)
                if not have(name):
                    yield name, data
            continue
        for chunk in _cutter(average).cut_stream(_Segment(fd, start, end)):
            view = chunk.data
            whole.update(view)
            count += len(view)
            name = chunk_digest(view)
            digests.append(name)
            if not have(name):
                yield name, bytes(view)
        if count < end:  # it has become shorter
            break
    return Content(whole.digest(), count, tuple(digests))


def content_of(fd: int, size: int) -> tuple[bytes, int]:
    """Digest and size of the first ``size`` bytes of an open file."""
    whole = blake3(b"holdfast.value\0")
    count = 0
    for start, end, filled in _segments(fd, size):
        at = start
        while at < end:
            data = os.pread(fd, min(WHOLE_BYTES, end - at), at) if filled else bytes(min(WHOLE_BYTES, end - at))
            if not data:
                return whole.digest(), count
            whole.update(data)
            at += len(data)
            count += len(data)
    return whole.digest(), count


def drain(pieces: Iterable[Piece]) -> None:
    """For whoever wants to know what there is, and not the bytes."""
    for _ in pieces:
        pass
