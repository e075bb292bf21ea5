"""The bytes of a file as chunks: where they are cut, their digests, and their way into a store.

Owns cutting, and reading ahead of whoever writes. Knows nothing of trees or paths.
What always holds: a digest is that of the bytes that come with it; memory is bounded by a few chunks, whatever the size
of a file; a file is never mapped, since whoever shortens it would kill this process.
Where a file is cut says nothing about what it holds: a content is named by the digest of all of its bytes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from blake3 import blake3

from holdfast.errors import BadOption
from holdfast.process.trees import Content, content_digest
from holdfast.store.rows import chunk_digest

if TYPE_CHECKING:
    from pyfastcdc import FastCDC

    from holdfast.store.changes import NewPack
    from holdfast.store.database import Database

WHOLE_BYTES = 2**20
"""Up to this size a file is one chunk."""

AVERAGE_BYTES = 2**20
"""Of a large file in a workspace. Half a thousandth of it is digests."""

IMAGE_AVERAGE_BYTES = 2**16
"""Of the image of a process: of a second one, chunks of this size share 99%, those of 1 MiB 95%."""

HOLE_BYTES = 8 * 2**20
"""How much of a hole is one chunk."""

BATCH_BYTES = 4 * 2**20
"""So much waits until it is asked, for all of it at once, what the store has already."""

AHEAD_FROM_BYTES = 8 * 2**20
"""After so much, another thread goes ahead: a thread for a few small files would cost more than it brings."""

AHEAD_BYTES, AHEAD_MAX = 2**20, 4
"""How much comes from it at once, and how often it may be ahead by that."""

Piece = tuple[bytes, bytes]
"""A chunk's digest, and its bytes."""

Have = Callable[[bytes], bool]
T = TypeVar("T")


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


def ahead(pieces: Iterable[T], size: Callable[[T], int]) -> Generator[T, None, None]:
    """The same pieces, made by another thread while the caller is at work with those before: for reading and writing.

    Whatever becomes of the caller, the other thread has ended when this generator has.
    """
    source, made = iter(pieces), 0
    for piece in source:
        made += size(piece)
        yield piece
        if made >= AHEAD_FROM_BYTES:
            break
    else:
        return
    waiting: queue.Queue[list[T] | BaseException | None] = queue.Queue(AHEAD_MAX)
    given_up = threading.Event()

    def work() -> None:
        batch, held, end = list[T](), 0, None
        try:
            for piece in source:
                batch.append(piece)
                held += size(piece)
                if held >= AHEAD_BYTES:
                    waiting.put(batch)
                    batch, held = [], 0
                if given_up.is_set():
                    break
        except BaseException as error:  # noqa: BLE001 - the caller's to raise
            end = error
        finally:
            if isinstance(source, Generator):
                source.close()
        waiting.put(batch)
        waiting.put(end)

    thread = threading.Thread(target=work, name="holdfast-ahead", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads can be had
        yield from source
        return
    try:
        while isinstance(found := waiting.get(), list):
            yield from found
        if found is not None:
            raise found
    finally:
        given_up.set()
        while thread.is_alive():
            with suppress(queue.Empty):
                waiting.get(timeout=0.01)


class Incoming:
    """New chunks of a scan on their way into a pack of the store: durable then, and nothing names it yet."""

    def __init__(self, db: Database) -> None:
        self.packs: list[NewPack] = []
        self.bytes = 0
        self._db = db

    def __call__(self, pieces: Iterator[Piece]) -> None:
        with closing(ahead(pieces, lambda piece: len(piece[1]))) as read:
            absent = self._absent(read)
            for first in absent:
                self._db.engine.check_place()
                self.packs.append(self._db.packs.write(chain([first], absent), proven=True))

    def _absent(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Those that the store lacks."""
        batch: dict[bytes, bytes] = {}
        size = 0
        for name, data in pieces:
            batch[name] = data
            size += len(data)
            if size >= BATCH_BYTES:
                yield from self._new(batch)
                batch, size = {}, 0
        yield from self._new(batch)

    def _new(self, batch: dict[bytes, bytes]) -> Iterator[Piece]:
        there = self._db.view.has_chunks(batch) if batch else ()
        for name, data in batch.items():
            if name not in there:
                self.bytes += len(data)
                yield name, data

    def discard(self) -> None:
        """Nothing comes of it."""
        for pack in self.packs:
            self._db.packs.discard(pack.uuid)
