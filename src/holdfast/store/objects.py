"""Whole, immutable files in a directory, in object storage or in rows of a server, behind ``Objects``.

Owns how a file gets to its place whole or not at all, and what is said of a place that fails. Knows nothing of what is
in a file. What always holds: when ``put`` returns, the bytes are durable; a name is given once, and its bytes never
change; a file that is missing is told from a place that is not there, by the mark that every place outside the store's
directory has; no error repeats the words of a driver, because they may hold a secret.
"""

from __future__ import annotations

import errno
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, ForkedHandle, StoreFailed, StorePoisoned
from holdfast.store.cipher import HINT
from holdfast.store.engine import Engine, Objects
from holdfast.store.files import fsync_directory, make_folder, unavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MARK = "holdfast-packs"
"""What every place holds: a folder that is not mounted is empty, and must not be taken for one that was cleared."""

MARK_TEXT = b"Packs of a Holdfast store. Do not delete them: the store needs them.\n"
TEMPORARY = "tmp-"
"""How the names of half-written files in a directory begin. They are listed, so that somebody can clear them."""

SCHEMES = ("s3", "gs", "az")
_ONE_SLASH = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:/(?!/)")
"""A slip, and no path: that would make a folder of this name."""

SINGLE_BYTES = 32 * 2**20
"""Up to here an object is sent in one request, which is refused if the name is taken. Larger ones are sent in parts;
obstore cannot make that depend on the name, so it is looked up first."""

ROW_BYTES = 2**17
"""Of a file that lies in rows. Whoever reads a little of it gets one of them."""

PART_BYTES = 16 * 2**20
"""S3 takes 10,000 parts."""

PARTS_AT_ONCE = 2
REQUEST_S = RETRY_S = 60.0
"""How long one request may take, which is enough at half a megabyte per second; and how long it may be tried again."""

CONNECT_S = 5.0
RETRIES = 5
PUT_TRIES = 3
"""A request that depends on the name is not repeated by obstore when no answer came; we know that the name is ours."""

Piece = bytes | memoryview
T = TypeVar("T")


SEND_BYTES = 2**22
"""How much of a pack is written before it is sent on its way to the disk: small chunks go together."""


class Missing(Damaged):
    """There is nothing of that name, in a place that is there."""


class _Unclear(ColdPlaceMissing):
    """No good answer came, or the name is taken: whether the object arrived can be looked up."""


def unreachable(place: str, why: str, kind: type[ColdPlaceMissing] = ColdPlaceMissing) -> ColdPlaceMissing:
    return kind(
        f"the storage for large values, {place}, cannot be reached{f' ({why})' if why else ''}; nothing is lost",
        place=place,
        hint="Mount it, start it or give its credentials, then try again. Packs there are safe as long as it exists.",
    )


def missing(name: str, where: str = "") -> Missing:
    return Missing(f"packs/{name} is missing{where}", what=(f"packs/{name}",), hint=HINT)


def _other(name: str, place: str) -> StoreFailed:
    return StoreFailed(f"{place} has something else under the name {name}; it was left as it is")


# -- addresses -----------------------------------------------------------------------------------------------------


def location(url: str | os.PathLike[str]) -> str:
    """The address without credentials, as the store keeps it. A path becomes one that is the same from everywhere."""
    text = os.fspath(url)
    parts = _split(text)
    if parts.scheme == "file":
        text = path_of(text)
    if "://" not in text:
        return "file://" + urllib.parse.quote(os.fsencode(os.path.realpath(text)))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


def _split(text: str) -> urllib.parse.SplitResult:
    with suppress(ValueError):
        if not _ONE_SLASH.match(text):
            return urllib.parse.urlsplit(text)
    raise BadOption("the address of a place for packs must be a path or scheme://place/path")


def path_of(url: str) -> str:
    """The directory that an address of this machine names."""
    return urllib.parse.unquote(_split(url).path, errors="surrogateescape")


def open_objects(url: str | os.PathLike[str], prefix: str) -> Objects:
    """The place at that address, a directory or object storage. Everything of one store lies there in ``prefix``.

    What an address must not say is never repeated in a message: it may be a password.
    """
    text = os.fspath(url)
    parts = _split(text)
    if parts.scheme == "file" and not text[5:].startswith("///"):
        raise BadOption("the address of a directory must be file:///path", hint="Or give its path alone.")
    if "://" in text and ("@" in parts.netloc or parts.query or parts.fragment or "::" in text):
        raise BadOption(
            "the address of a place for packs must be scheme://place/path and nothing else: it is kept in the store",
            hint="Passwords and settings come from the environment: AWS_..., GOOGLE_..., AZURE_...",
        )
    place = location(text)
    if place.startswith("file://"):
        return Folder(Path(path_of(place), prefix), place)
    if parts.scheme not in SCHEMES:
        raise BadOption(
            f"no packs can be kept at a {parts.scheme}:// address",
            hint=f"Use a directory, or {', '.join(f'{scheme}://' for scheme in SCHEMES)}: a place that lasts.",
        )
    try:
        import_module("obstore")
    except ImportError as error:
        raise ColdPlaceMissing(
            f"the storage for large values, {place}, needs the package obstore, which is missing here; nothing is lost",
            place=place,
            hint="pip install 'holdfast[objects]'",
        ) from error
    return Bucket(place, prefix)


# -- a directory ---------------------------------------------------------------------------------------------------


class Folder:
    """A directory. The store's own one is given without ``place``, and needs no mark: it is where the store is."""

    def __init__(self, path: Path, place: str = "", poisoned: Callable[[StorePoisoned], None] | None = None) -> None:
        """``poisoned`` is told of a flush that failed."""
        self.place = place or str(path)
        self._poisoned = poisoned
        self._path = path
        self._marked = bool(place)
        self._writing = f"writing a pack to {place}" if place else "writing a pack"

    def prepare(self) -> None:
        try:
            make_folder(self._path)
            mark = self._path / MARK
            if self._marked and not mark.exists():
                with mark.open("wb") as file:
                    file.write(MARK_TEXT)
                    file.flush()
                    os.fsync(file.fileno())
                fsync_directory(self._path)
        except OSError as error:
            raise unreachable(self.place, error.strerror or "") from error

    def require(self) -> None:
        try:
            if self._marked and not (self._path / MARK).is_file():
                raise unreachable(self.place, f"{self._path.name}/{MARK} is not there")
        except OSError as error:
            raise unreachable(self.place, error.strerror or "") from error

    def put(self, name: str, pieces: Iterable[Piece]) -> int:
        self.require()
        temporary = self._path / f"{TEMPORARY}{uuid4().hex}-{name}"
        try:
            self._make_anew()
            size = self._write(temporary, pieces)
            known = self.size(name)
            if known is None:
                temporary.rename(self._path / name)
            elif known != size:
                raise _other(name, self.place)
            self._flush(lambda: fsync_directory(self._path))
        except OSError as error:
            raise unavailable(error, self._writing) from error
        finally:
            with suppress(OSError):  # what stays is waste, not harm
                temporary.unlink()
        return size

    def _make_anew(self) -> None:
        """An empty folder gets lost on the way through git, a bucket or an archive. Not without the store around it."""
        if not self._marked and not self._path.exists():
            self._path.mkdir(exist_ok=True)
            self._flush(lambda: fsync_directory(self._path.parent))

    def _write(self, path: Path, pieces: Iterable[Piece]) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            size = sent = 0
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    written = os.write(fd, rest)
                    if written <= 0:
                        raise OSError(errno.EIO, "nothing was written")
                    rest = rest[written:]
                size += len(piece)
                # Sends what was written on its way and keeps the page cache for others: as fast as direct I/O, and
                # several times as fast as leaving all of it to the flush.
                if size - sent >= SEND_BYTES:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    sent = size
            self._flush(lambda: os.fsync(fd))
            return size
        finally:
            os.close(fd)

    def _flush(self, flush: Callable[[], None]) -> None:
        try:
            flush()
        except OSError as error:
            # Without room the whole pack goes, and that is all. Any other failure means that the disk lies or dies.
            if self._marked or error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise
            failure = StorePoisoned(
                f"{self._writing}: a flush failed ({error.strerror or error}); nothing was changed",
                hint="Everything acknowledged before is safe. Close the store and open it again to resume from there.",
            )
            if self._poisoned is not None:
                self._poisoned(failure)
            raise failure from error

    def read(self, name: str, start: int, length: int) -> bytes:
        found, at, end = [], start, start + length
        try:
            fd = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while at < end and (data := os.pread(fd, end - at, at)):
                    found.append(data)
                    at += len(data)
                # What follows is often wanted next, and comes while these bytes are hashed.
                os.posix_fadvise(fd, end, length, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failed(error, name) from error
        return found[0] if len(found) == 1 else b"".join(found)

    def size(self, name: str) -> int | None:
        try:
            return (self._path / name).stat().st_size
        except OSError as error:
            failure = self._failed(error, name)
            if isinstance(failure, Missing):
                return None
            raise failure from error

    def _failed(self, error: OSError, name: str) -> Missing | StoreFailed:
        """What fails because the place is not there says nothing of a file. Asked afterwards: it may go meanwhile."""
        self.require()
        if isinstance(error, FileNotFoundError):
            return missing(name, f" from {self.place}" if self._marked else "")
        return StoreFailed(f"packs/{name}: cannot be read ({error.strerror})")

    def delete(self, name: str) -> None:
        self.require()
        try:
            (self._path / name).unlink(missing_ok=True)
        except OSError as error:
            raise unavailable(error, f"removing a pack from {self.place}") from error

    def names(self) -> Iterator[tuple[str, float]]:
        self.require()
        found = []
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # gone meanwhile
                        if entry.name != MARK and entry.is_file(follow_symlinks=False):
                            age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                            found.append((entry.name, age_s))
        except OSError as error:
            lost = isinstance(error, FileNotFoundError) and not self._marked and self._path.parent.exists()
            if not lost:  # one that was empty may have got lost: see above
                raise unavailable(error, f"listing packs in {self.place}") from error
        yield from found


# -- rows of a server ------------------------------------------------------------------------------------------------


class Rows:
    """Rows of the store's own server, for a store that was given no other place: each file cut into parts."""

    def __init__(self, engine: Engine) -> None:
        self.place = engine.place
        self._engine = engine

    def prepare(self) -> None:
        """The table is there: it was made with the others."""

    def require(self) -> None:
        """Where the store is, its packs are."""

    def put(self, name: str, pieces: Iterable[Piece]) -> int:
        whole = b"".join(pieces)
        known = self.size(name)
        if known is not None:
            if known != len(whole):
                raise _other(name, self.place)
            return known
        now, parts = int(time.time()), [whole[at : at + ROW_BYTES] for at in range(0, len(whole), ROW_BYTES)]
        rows = [(name, number, now, part) for number, part in enumerate(parts)]
        sql = "INSERT INTO object (name, part, made, data) VALUES (?, ?, ?, ?)"
        self._engine.transaction(lambda tx: tx.many(sql, rows))
        return len(whole)

    def read(self, name: str, start: int, length: int) -> bytes:
        first, last = start // ROW_BYTES, (start + length - 1) // ROW_BYTES
        sql = "SELECT data FROM object WHERE name = ? AND part >= ? AND part <= ? ORDER BY part"
        found = self._engine.run(sql, (name, first, last))
        if not found and self.size(name) is None:
            raise missing(name, f" from {self.place}")
        return b"".join(data for (data,) in found)[start - first * ROW_BYTES :][:length]

    def size(self, name: str) -> int | None:
        sql = "SELECT count(*), CAST(coalesce(sum(length(data)), 0) AS bigint) FROM object WHERE name = ?"
        ((parts, size),) = self._engine.run(sql, (name,))
        return size if parts else None

    def delete(self, name: str) -> None:
        self._engine.transaction(lambda tx: tx.do("DELETE FROM object WHERE name = ?", (name,)))

    def names(self) -> Iterator[tuple[str, float]]:
        rows = self._engine.run("SELECT name, min(made) FROM object GROUP BY name")
        return iter([(name, time.time() - made) for name, made in rows])


# -- object storage ------------------------------------------------------------------------------------------------

_threads_of = 0
"""The process that has used obstore. Its threads do not survive a fork, and who waits for them waits for ever."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,40})</Code>")
_PHRASES = {"TimedOut": "timed out", "Connection refused": "connection refused", "sending request": "no answer"}
_BEHIND = "HTTP 416"
"""The answer when what is asked for begins behind the end."""


class Bucket:
    """Object storage, through obstore, which looks for credentials and settings in the environment.

    Ages are by the clock there; S3 and Azure refuse a client whose own is off by 15 minutes.
    """

    def __init__(self, place: str, prefix: str) -> None:
        self.place = place
        self._prefix = prefix
        self._obstore: Any = import_module("obstore")
        self._known: ObjectStore | None = None

    def _store(self) -> ObjectStore:
        if self._known is None:
            from datetime import timedelta

            more = {"disable_bulk_delete": True} if self.place.startswith("s3:") else {}  # not every server has that
            self._known = self._obstore.store.from_url(
                self.place,
                client_options={
                    "timeout": timedelta(seconds=REQUEST_S),
                    "connect_timeout": timedelta(seconds=CONNECT_S),
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true", "yes"},
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)},
                **more,
            )
        return self._known

    def prepare(self) -> None:
        self.put(MARK, [MARK_TEXT])

    def require(self) -> None:
        if self._size(MARK) is None:
            raise unreachable(self.place, f"{self._prefix}/{MARK} is not there")

    def put(self, name: str, pieces: Iterable[Piece]) -> int:
        from tempfile import SpooledTemporaryFile

        # Gathered first: obstore takes pieces where nothing else of it may be called, and they may come from it.
        with SpooledTemporaryFile(SINGLE_BYTES) as file:
            try:
                for piece in pieces:
                    file.write(piece)
                size = file.tell()
            except OSError as error:
                raise unavailable(error, "gathering a pack among the temporary files") from error
            return self._put(name, file, size)

    def _put(self, name: str, file: IO[bytes], size: int) -> int:
        failure = unreachable(self.place, "there is no such place")
        for _ in range(PUT_TRIES):
            try:
                self._send(name, file, size)
                return size
            except FileNotFoundError:
                break
            except _Unclear as error:
                failure = error
            # An attempt that got no answer may have arrived: then the name is taken, and by these bytes.
            known = self._size(name)
            if known == size:
                return size
            if known is not None:
                raise _other(name, self.place)
        raise failure

    def _send(self, name: str, file: IO[bytes], size: int) -> None:
        file.seek(0)
        if size <= SINGLE_BYTES:
            data = file.read()
            self._ask(name, lambda store, path: self._obstore.put(store, path, data, mode="create"))
            return
        if self._size(name) is not None:
            raise unreachable(self.place, "the name is taken", _Unclear)
        parts = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
        self._ask(name, lambda store, path: self._obstore.put(store, path, file, **parts))

    def read(self, name: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        try:
            data = self._ask(
                name, lambda store, path: bytes(self._obstore.get_range(store, path, start=start, length=length))
            )
        except FileNotFoundError:
            self.require()
            raise missing(name, f" from {self.place}") from None
        except ColdPlaceMissing as error:
            if _BEHIND not in error.message:
                raise
            data = b""
        if len(data) != length and len(data) != max(0, min(length, (self.size(name) or 0) - start)):
            raise unreachable(self.place, "it gave another part of a pack than was asked for")
        return data

    def size(self, name: str) -> int | None:
        known = self._size(name)
        if known is None:
            self.require()
        return known

    def _size(self, name: str) -> int | None:
        try:
            return int(self._ask(name, lambda store, path: self._obstore.head(store, path)["size"]))
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        try:
            self._ask(name, self._obstore.delete)
        except FileNotFoundError:
            self.require()

    def names(self) -> Iterator[tuple[str, float]]:
        self.require()
        pages = self._ask("", lambda store, path: self._obstore.list(store, prefix=path, chunk_size=1000))
        while page := self._ask("", lambda _store, _path: next(pages, None)):
            for found in page:
                name = found["path"].rpartition("/")[2]
                if name != MARK:
                    yield name, time.time() - found["last_modified"].timestamp()

    def _ask(self, name: str, call: Callable[[ObjectStore, str], T]) -> T:
        """Ask the driver. Its errors are not even the causes of ours: they may hold a secret."""
        global _threads_of  # noqa: PLW0603
        if _threads_of not in {0, os.getpid()}:
            raise ForkedHandle(
                "object storage was used before fork(), and cannot be used in the child",
                hint="Start the child anew (multiprocessing's spawn), or open the store after the fork only.",
            )
        _threads_of = os.getpid()
        exceptions = self._obstore.exceptions
        failure: Exception
        try:
            return call(self._store(), f"{self._prefix}/{name}".rstrip("/"))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            failure = unreachable(self.place, "the name is taken", _Unclear)
        except (exceptions.BaseError, OSError, ValueError) as error:
            why = _reason(error)
            if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in why:
                failure = FileNotFoundError(name)
            else:
                failure = unreachable(self.place, why, ColdPlaceMissing if why.startswith("HTTP 4") else _Unclear)
        raise failure


def _reason(error: Exception) -> str:
    """What can be said of a driver's error without repeating its text."""
    text = str(error)
    found = [f"HTTP {status}" for status in _STATUS.findall(text)[:1]] + _CODE.findall(text)[:1]
    return " ".join(found) or next((said for phrase, said in _PHRASES.items() if phrase in text), type(error).__name__)
