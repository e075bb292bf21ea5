"""Bulk chunks: packs are written once, flushed, named, and never changed.

Owns the files below ``packs/`` (format.md section 5). Knows no catalog: it is given digests and bytes, and answers with
places. Always true: a pack that has its final name is complete and durable; what is read is proven by its digest; what
was written is what the digest was computed over, because it is hashed again from the very buffer that is written.
All calls to the system go through an ``Io`` object, so that tests can fail each of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import zstandard

from holdfast.errors import Damaged, HoldfastError, InputError, StoreFailed, StorePoisoned
from holdfast.store.catalog import Buffer, ChunkRow, NewPack, PackRow, chunk_digest
from holdfast.store.cipher import PLAIN, Cipher
from holdfast.store.files import close_quietly, fsync_directory, unavailable
from holdfast.store.tiering import MARK, Source

T = TypeVar("T")

MAGIC = b"HFPACK01"
ALIGN_BYTES = 4096
CHUNK_BYTES = 8 * 2**20
"""Bulk values are cut here. Also the most that one chunk may claim to hold when it is read."""

PARALLEL_FROM_BYTES = 256 * 2**10
"""From here hashing in a second thread, while the first one writes, gains more than the thread costs."""


class Io(Protocol):
    """The calls that packs make. The real ones are in ``SystemIo``; a test may fail any of them."""

    def open(self, path: Path, flags: int) -> int: ...
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int: ...
    def pread(self, fd: int, into: memoryview, offset: int) -> int: ...
    def fsync(self, fd: int) -> None: ...
    def close(self, fd: int) -> None: ...
    def rename(self, old: Path, new: Path) -> None: ...
    def fsync_directory(self, path: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...


class SystemIo:
    """The system's own calls."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def fsync_directory(self, path: Path) -> None:
        fsync_directory(path)

    def unlink(self, path: Path) -> None:
        path.unlink()


def round_up(size: int) -> int:
    """Where the next block begins."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _nowhere(_pack: bytes) -> Source | None:
    return None


class Packs:
    """The packs of one store. Threads may share it; one writes at a time.

    ``cold`` is asked where a pack lies that is not here.
    """

    def __init__(self, directory: Path, io: Io | None = None, cipher: Cipher = PLAIN) -> None:
        self.cipher = cipher
        self._directory = directory
        self._io: Io = io or SystemIo()
        self._staging: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._reading: mmap.mmap | None = None
        self._read_lock = threading.Lock()
        self.cold: Callable[[bytes], Source | None] = _nowhere

    def beside(self, cold: Callable[[bytes], Source | None]) -> Packs:
        """The same packs, for a reader with another way to colder places."""
        other = Packs(self._directory, self._io, self.cipher)
        other.cold = cold
        return other

    def path(self, pack_uuid: bytes) -> Path:
        return self._directory / f"{uuid.UUID(bytes=bytes(pack_uuid))}.pack"

    def write(self, chunks: Iterable[tuple[bytes, Buffer]]) -> NewPack:
        """Write one pack with these chunks. When this returns it is durable, and nobody refers to it yet."""
        pack_uuid = uuid.uuid4().bytes
        final = self.path(pack_uuid)
        temporary = self._directory / f"tmp-{final.name}"
        try:
            with self._lock:
                try:
                    pack = self._write_file(temporary, pack_uuid, chunks)
                    self._io.rename(temporary, final)
                except BaseException:
                    self._remove(temporary)
                    raise
            try:
                self._flush(lambda: self._io.fsync_directory(self._directory))
            except BaseException:
                self._remove(final)
                raise
        except OSError as error:
            raise unavailable(error, "writing a pack") from error
        return pack

    @contextlib.contextmanager
    def named(self, chunks: Iterable[tuple[bytes, Buffer]]) -> Iterator[NewPack]:
        """A new pack, for the transaction inside that names it. One whose rows were refused goes again."""
        pack = self.write(chunks)
        try:
            yield pack
        except StorePoisoned:
            raise  # the rows may be on the disk all the same, and then they need it
        except HoldfastError:
            self._remove(self.path(pack.uuid))
            raise

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Nobody removes a pack meanwhile: an older state of the catalog is being read, which may name it."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def removing(self) -> Iterator[bool]:
        """Whether packs that the catalog does not name any more may go. If not, somebody keeps them: try later."""
        with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            yield free

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[bool]:
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(close_quietly, fd)
                fcntl.flock(fd, how)
                stack.callback(fcntl.flock, fd, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            except OSError:
                yield False
            else:
                yield True

    def remove(self, pack_uuid: bytes) -> None:
        """Remove a pack that the catalog does not name any more."""
        self._remove(self.path(pack_uuid))

    def read(self, pack_uuid: bytes, chunk: ChunkRow) -> bytes:
        """The chunk's bytes, proven by its digest."""
        path = self.path(pack_uuid)
        try:
            return self._read_here(path, chunk)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreFailed(f"packs/{path.name}: cannot be read ({error.strerror})") from error
        try:
            data = self._read_cold(pack_uuid, chunk.offset, chunk.stored + self.cipher.overhead)
            return self._proven(data, path.name, chunk, f" in {self._cold(pack_uuid).url}")
        except Damaged:
            if not self.is_here(pack_uuid):
                raise
        return self.read(pack_uuid, chunk)  # it was brought back meanwhile

    def _read_here(self, path: Path, chunk: ChunkRow) -> bytes:
        """The chunk's bytes from a file here."""
        if not 0 <= chunk.stored <= chunk.length <= CHUNK_BYTES or chunk.offset < ALIGN_BYTES:
            name = f"chunk {chunk.digest.hex()}"
            raise Damaged(f"{name}: impossible size or place", what=(name,))
        with self._read_lock:
            data = bytes(self._read_stored(path, chunk))
        return self._proven(data, path.name.removeprefix("tmp-"), chunk)

    def _proven(self, data: bytes, pack: str, chunk: ChunkRow, where: str = "") -> bytes:
        """The chunk's bytes, made of its stored ones."""
        name = f"chunk {chunk.digest.hex()}"
        if len(data) == chunk.stored + self.cipher.overhead:
            data = self.cipher.unbox("chunk", chunk.digest, data)
        if len(data) == chunk.stored != chunk.length:
            try:
                # What a frame declares is allocated before anything is read, whatever the limit says.
                if zstandard.frame_content_size(data) not in {-1, chunk.length}:
                    raise zstandard.ZstdError("another length")
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=chunk.length)
            except zstandard.ZstdError:
                data = b""
        if len(data) != chunk.length or chunk_digest(data) != chunk.digest:
            raise Damaged(f"packs/{pack}{where}: {name} is not what was written", what=(f"packs/{pack}", name))
        return data

    def check(self, pack: PackRow, chunks: Sequence[ChunkRow]) -> None:
        """Prove what reading the chunks does not: the pack's first block, its size, and that padding is zero."""
        path = self.path(pack.uuid)
        try:
            self._check_file(path, pack, chunks)
        except FileNotFoundError:
            try:
                size = self._from_cold(pack.uuid, lambda place, name: place.size(name))
                self._check(pack, chunks, size, lambda start, length: self._read_cold(pack.uuid, start, length))
            except Damaged:
                if not self.is_here(pack.uuid):
                    raise
                self.check(pack, chunks)  # it was brought back meanwhile
        except OSError as error:
            raise StoreFailed(f"packs/{path.name}: cannot be read ({error.strerror})") from error

    def prove(self, path: Path, pack: PackRow, chunks: Sequence[ChunkRow]) -> None:
        """Raise unless the file at ``path`` is that pack."""
        for chunk in chunks:
            self._read_here(path, chunk)
        self._check_file(path, pack, chunks)

    def _check_file(self, path: Path, pack: PackRow, chunks: Sequence[ChunkRow]) -> None:
        fd = self._io.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            self._check(pack, chunks, size, lambda start, length: self._read_all(fd, length, start))
        finally:
            self._io.close(fd)

    def _check(self, pack: PackRow, chunks: Sequence[ChunkRow], size: int, read: Callable[[int, int], bytes]) -> None:
        name = f"packs/{self.path(pack.uuid).name}"
        gaps = [(0, ALIGN_BYTES, MAGIC)]
        for chunk in chunks:
            end = chunk.offset + chunk.stored + self.cipher.overhead
            gaps.append((end, round_up(end), b""))
        for start, end, content in gaps:
            if start < end and read(start, end - start) != content.ljust(end - start, b"\0"):
                raise Damaged(f"{name}: bytes between chunks are not what was written", what=(name,))
        if size != pack.size:
            raise Damaged(f"{name}: its size is not what was written", what=(name,))

    # Packs that are not here

    def written_at(self, pack_uuid: bytes) -> float | None:
        """When its file was written; None when it is not here."""
        try:
            return self.path(pack_uuid).stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unavailable(error, "looking for a pack") from error

    def is_here(self, pack_uuid: bytes) -> bool:
        return self.written_at(pack_uuid) is not None

    def _cold(self, pack_uuid: bytes) -> Source:
        place = self.cold(pack_uuid)
        if place is None:
            name = f"packs/{self.path(pack_uuid).name}"
            raise Damaged(f"{name} is missing", what=(name,))
        return place

    def _read_cold(self, pack_uuid: bytes, offset: int, size: int) -> bytes:
        return self._from_cold(pack_uuid, lambda place, name: place.read(name, offset, size))

    def _from_cold(self, pack_uuid: bytes, ask: Callable[[Source, str], T]) -> T:
        place, name = self._cold(pack_uuid), self.path(pack_uuid).name
        try:
            return ask(place, name)
        except FileNotFoundError as error:
            raise Damaged(f"packs/{name} is missing from {place.url}", what=(f"packs/{name}",)) from error
        except OSError as error:
            raise StoreFailed(f"{name} in {place.url} cannot be read ({error.strerror})") from error

    def remove_strays(self, named: Container[bytes], before: float) -> int:
        """Remove files that no row names and that were written before that time; returns how many bytes they had.

        None where somebody has made the folder a colder place of another store: they may be that one's.
        """
        total = 0
        try:
            with os.scandir(self._directory) as entries:
                found_here = list(entries)
        except OSError as error:
            raise unavailable(error, "looking for packs that nothing names") from error
        if any(entry.name == MARK for entry in found_here):
            return 0
        for entry in found_here:
            text = entry.name.removeprefix("tmp-")
            try:
                known = entry.name == text and uuid.UUID(text.removesuffix(".pack")).bytes in named
                found = entry.stat(follow_symlinks=False)
            except (ValueError, OSError):
                continue  # not ours, or gone meanwhile
            if not known and found.st_mtime < before:
                total += found.st_size
                self._remove(Path(entry.path))
        return total

    def _read_stored(self, path: Path, chunk: ChunkRow) -> memoryview:
        """The stored bytes, or fewer where the file ends early; valid until the next read.

        Direct reads of whole chunks are many times faster than the page cache's read-ahead, and leave the cache alone.
        """
        length = chunk.stored + self.cipher.overhead
        size = max(round_up(length), ALIGN_BYTES)
        if self._reading is None or len(self._reading) < size:
            self._reading = mmap.mmap(-1, size)
        buffer = memoryview(self._reading)[:size]
        fd = self._open_direct(path, os.O_RDONLY)
        try:
            done = self._read_into(fd, buffer, length, chunk.offset)
        finally:
            self._io.close(fd)
        return buffer[: min(done, length)]

    def _read_all(self, fd: int, size: int, offset: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self._read_into(fd, memoryview(buffer), size, offset)])

    def _read_into(self, fd: int, buffer: memoryview, size: int, offset: int) -> int:
        """Read at least ``size`` bytes, and what else fits, unless the file ends before."""
        done = 0
        while done < size:
            try:
                got = self._io.pread(fd, buffer[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.EINVAL or not _drop_direct(fd):
                    raise
                continue
            if not got:
                break
            done += got
            if done % ALIGN_BYTES:
                _drop_direct(fd)
        return done

    def _open_direct(self, path: Path, flags: int) -> int:
        try:
            return self._io.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The file system knows no direct I/O. Some have made a new file before they said so.
        if flags & os.O_CREAT:
            self._remove(path)
        return self._io.open(path, flags)

    def _write_file(self, path: Path, pack_uuid: bytes, chunks: Iterable[tuple[bytes, Buffer]]) -> NewPack:
        fd = self._open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            rows = []
            self._write_block(fd, MAGIC, 0)
            offset = ALIGN_BYTES
            for digest, data in chunks:
                view = memoryview(data).cast("B")
                if len(view) > CHUNK_BYTES:
                    raise InputError(f"a chunk of {len(view)} bytes; the format allows {CHUNK_BYTES}")
                written = self._write_chunk(fd, view, offset, digest)
                rows.append(ChunkRow(digest, 0, offset, len(view), len(view)))
                offset += written
            self._flush(lambda: self._io.fsync(fd))
            return NewPack(pack_uuid, offset, rows)
        finally:
            self._io.close(fd)

    def _write_chunk(self, fd: int, data: memoryview, offset: int, digest: bytes) -> int:
        """Hash and write at the same time, both from one copy, which nobody else can change.

        Without a key that is the staging buffer; with one, the copy is hashed while its box is made and written.
        """
        staged: Buffer = bytes(data) if self.cipher.keyed else self._stage(data)[: len(data)]
        if len(data) < PARALLEL_FROM_BYTES:
            found = [chunk_digest(staged)]
            size = self._write_box(fd, staged, offset, digest)
        else:
            found = []
            # One thread of our own: the hash library's own pool does not survive a fork.
            hashing = threading.Thread(target=lambda: found.append(chunk_digest(staged)), name="holdfast-hash")
            hashing.start()
            try:
                size = self._write_box(fd, staged, offset, digest)
            finally:
                hashing.join()
        if found != [digest]:
            raise InputError("bulk data was changed while it was being saved; nothing was written")
        return size

    def _write_box(self, fd: int, data: Buffer, offset: int, digest: bytes) -> int:
        box = self.cipher.box("chunk", digest, data)
        if self.cipher.keyed:
            self._stage(memoryview(box))
        return self._write_staged(fd, len(box), offset)

    def _write_block(self, fd: int, data: bytes, offset: int) -> None:
        self._stage(memoryview(data))
        self._write_staged(fd, len(data), offset)

    def _stage(self, data: memoryview) -> memoryview:
        """Copy into memory that is aligned as direct I/O wants it, padded with zeros."""
        size = max(round_up(len(data)), ALIGN_BYTES)
        if self._staging is None or len(self._staging) < size:
            # Fresh memory is slow to touch, so the buffer is kept; it grows to one chunk at most.
            self._staging = mmap.mmap(-1, size)
        staging = memoryview(self._staging)
        staging[: len(data)] = data
        staging[len(data) : size] = bytes(size - len(data))
        return staging

    def _write_staged(self, fd: int, length: int, offset: int) -> int:
        if self._staging is None:
            raise StoreFailed("nothing was staged")
        size = max(round_up(length), ALIGN_BYTES)
        rest = memoryview(self._staging)[:size]
        while rest:
            try:
                written = self._io.pwrite(fd, rest, offset)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.EINVAL or not _drop_direct(fd):
                    raise
                continue
            if written <= 0:
                raise OSError(errno.EIO, "nothing was written")
            rest = rest[written:]
            offset += written
            if written % ALIGN_BYTES:
                _drop_direct(fd)  # what is left does not start where direct I/O must
        return size

    def _flush(self, flush: Callable[[], None]) -> None:
        try:
            flush()
        except OSError as error:
            # Without room the whole pack goes, and that is all. Any other failure means that the disk lies or dies.
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise StorePoisoned(
                f"writing a pack: a flush failed ({error.strerror or error}); nothing was changed",
                hint="Everything acknowledged before is safe. Close the store and open it again to go on from there.",
            ) from error

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # a pack that stays is waste, not harm; the error that led here matters more
            self._io.unlink(path)


def _drop_direct(fd: int) -> bool:
    """Go on through the page cache. False if that is how it was already."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & direct:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return True
