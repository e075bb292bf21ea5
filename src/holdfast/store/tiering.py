"""Colder places for old packs: where they are, how a pack gets there, and how it is read from there.

Owns the rows ``tiers`` and ``strays`` of table ``store`` (format.md section 4), the interface that a place must have,
and directories as places. Sees packs as files: what is in them is proven by whoever reads a chunk. Always true: a pack
is deleted here only after a copy was read back, compared and recorded in the catalog; what may lie at a place without
being needed there was noted before it could; a place that cannot be reached gives an error that names it, and nothing
is forgotten because of it.
"""

from __future__ import annotations

import os
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, HoldfastError, StoreFailed
from holdfast.store.files import fsync_directory, in_store, make_folder, unavailable

TIERS = "tiers"
STRAYS = "strays"
MARK = "holdfast-cold"
"""What every place holds: a folder that is not mounted is empty, and must not be taken for one that was cleared."""

MARK_TEXT = b"Packs of a Holdfast store. Do not delete them: the store needs them.\n"
PIECE_BYTES = 8 * 2**20
"""How much of a pack is read at once when it is copied or compared, and so the memory that it costs."""

T = TypeVar("T")
ColdCopy = tuple[bytes, str]
"""A pack, and the URL of a place where it may lie."""


class Source(Protocol):
    """What packs can be read from."""

    url: str

    def read(self, name: str, offset: int, size: int) -> bytes:
        """So many bytes from there, fewer where it ends. ``FileNotFoundError`` when there is nothing of that name."""

    def size(self, name: str) -> int:
        """Its length. ``FileNotFoundError`` when there is nothing of that name."""


class Place(Source, Protocol):
    """Somewhere packs can lie. Nothing is renamed there, and what was written counts only once it was read back."""

    def prepare(self) -> None:
        """Make the place, if there is none yet."""

    def require(self) -> None:
        """Raise ``ColdPlaceMissing`` unless it is there, as it was made."""

    def put(self, name: str, source: Path) -> None:
        """Copy a file there under that name, in the place of what has it now."""

    def remove(self, name: str) -> None:
        """Delete it; nothing happens when it is not there."""


def unreachable(url: str, why: str) -> ColdPlaceMissing:
    return ColdPlaceMissing(
        f"the cold place {url} cannot be reached{f' ({why})' if why else ''}; nothing is lost",
        place=url,
        hint="Mount it or bring it back, then try again. Packs that were moved there are safe as long as it exists.",
    )


class Folder:
    """A directory, on another disk for instance."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = _path_of(url)

    def prepare(self) -> None:
        try:
            make_folder(self._path)
            mark = self._path / MARK
            if not mark.exists():
                with mark.open("wb") as file:
                    file.write(MARK_TEXT)
                    _flush(file)
                fsync_directory(self._path)
        except OSError as error:
            raise unreachable(self.url, error.strerror or "") from error

    def require(self) -> None:
        try:
            there = (self._path / MARK).is_file()
        except OSError as error:
            raise unreachable(self.url, error.strerror or "") from error
        if not there:
            raise unreachable(self.url, f"{MARK} is not there")

    def put(self, name: str, source: Path) -> None:
        self.require()
        temporary = self._path / f"tmp-{name}"
        try:
            with source.open("rb") as old, temporary.open("wb") as new:
                while data := old.read(PIECE_BYTES):
                    new.write(data)
                _flush(new)
            os.rename(temporary, self._path / name)
            fsync_directory(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise unavailable(error, f"copying a pack to {self.url}") from error

    def read(self, name: str, offset: int, size: int) -> bytes:
        with self._found(), (self._path / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def size(self, name: str) -> int:
        with self._found():
            return (self._path / name).stat().st_size

    @contextmanager
    def _found(self) -> Iterator[None]:
        """What fails because the place is not there says nothing of a pack. Asked afterwards: it may go meanwhile."""
        try:
            yield
        except OSError:
            self.require()
            raise

    def remove(self, name: str) -> None:
        self.require()
        for one in (name, f"tmp-{name}"):
            (self._path / one).unlink(missing_ok=True)


class Impatient:
    """Reads from a place as long as it answers: who reads everything must not wait for each pack of a dead one."""

    def __init__(self, place: Place, silent: dict[str, ColdPlaceMissing]) -> None:
        self.url = place.url
        self._place = place
        self._silent = silent

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self._ask(lambda: self._place.read(name, offset, size))

    def size(self, name: str) -> int:
        return self._ask(lambda: self._place.size(name))

    def _ask(self, call: Callable[[], T]) -> T:
        if self.url in self._silent:
            raise self._silent[self.url].with_traceback(None)
        try:
            return call()
        except ColdPlaceMissing as error:
            self._silent[self.url] = error
            raise


def place_at(url: str) -> Place:
    if urllib.parse.urlsplit(url).scheme == "file":
        return Folder(url)
    from holdfast.store.remote import Remote

    return Remote(url)


def _path_of(url: str) -> Path:
    """The directory that an address of this machine names."""
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path, errors="surrogateescape"))


def url_of(to: str | os.PathLike[str]) -> str:
    """A path as a URL, so that it stays the same place whatever directory a program runs in.

    What a URL must not say is never repeated in a message: it may be a password.
    """
    text = os.fspath(to)
    parts = urllib.parse.urlsplit(text)
    if parts.scheme == "file":  # one place has one address, whatever way leads there
        if not text[5:].startswith("///"):
            raise BadOption("the address of a directory must be file:///path", hint="Or give its path alone.")
        text = str(_path_of(text))
    if "://" not in text:
        return "file://" + urllib.parse.quote(os.fsencode(os.path.realpath(text)))
    if "@" in parts.netloc and ":" in parts.netloc.rpartition("@")[0]:
        raise BadOption(
            "the address of a cold place must not contain a password: it is kept in the store",
            hint="Leave it out. It comes from where the driver looks: its own settings, or those of fsspec.",
        )
    if parts.query or parts.fragment or "::" in text:
        raise BadOption(
            "the address of a cold place must be scheme://place/path and nothing else: it is kept in the store",
            hint="Options and secrets come from where the driver looks: its own settings, or those of fsspec.",
        )
    stripped = text.rstrip("/")
    return stripped if "://" in stripped else text


def refuse_store(url: str) -> None:
    """Raise for a directory that is part of a store, this one or another."""
    if url.startswith("file://") and in_store(_path_of(url)):
        raise BadOption("a cold place cannot be inside a store", hint="Name a directory elsewhere, or a URL.")


def refuse_own(place: Place, folder: Path) -> None:
    """Raise when the place that was just prepared turns out to be this very folder, by whatever way it was reached."""
    if os.path.exists(folder / MARK):
        with suppress(HoldfastError, OSError):
            place.remove(MARK)
        raise BadOption("a cold place cannot be inside the store", hint="Name a directory elsewhere, or a URL.")


class Tiering(msgspec.Struct, frozen=True):
    """What was moved to a colder place, or brought back.

    ``needed`` and ``young``: how many packs stay because a branch needs them where it stands, or for their age.
    """

    place: str
    packs: int
    moved_bytes: int
    done: bool
    needed: int = 0
    young: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place, "packs": self.packs, "moved_bytes": self.moved_bytes, "done": self.done,
            "needed": self.needed, "young": self.young,
        }  # fmt: skip


_NO_DRIVER = "Nothing is lost. Read it with a program that has a driver for such addresses."


class Tiers:
    """Which packs lie where. ``fact`` reads a row of table ``store``."""

    def __init__(self, fact: Callable[[str], bytes | None]) -> None:
        self._fact = fact
        self._known: tuple[bytes, dict[bytes, str]] = (b"", {})

    @property
    def packs(self) -> Mapping[bytes, str]:
        """Pack -> the URL of its place."""
        value = self._fact(TIERS) or b""
        if value != self._known[0]:
            self._known = value, dict(_copies(TIERS, value))
        return self._known[1]

    @property
    def strays(self) -> set[ColdCopy]:
        """Copies that may lie at a place and that nothing needs: on their way there, or brought back, or forgotten."""
        return set(_copies(STRAYS, self._fact(STRAYS) or b"")) - set(self.packs.items())

    def of(self, pack: bytes) -> Place | None:
        """Where a pack lies, None when that is here."""
        url = self.packs.get(bytes(pack))
        try:
            return place_at(url) if url is not None else None
        except BadOption as error:  # a driver that some program has and this one does not
            raise ColdPlaceMissing(error.message, place=url or "", hint=_NO_DRIVER) from error

    def impatient(self) -> Callable[[bytes], Source | None]:
        """``of``, for somebody who reads everything: a place that has not answered once is not asked again."""
        silent: dict[str, ColdPlaceMissing] = {}

        def find(pack: bytes) -> Source | None:
            place = self.of(pack)
            return Impatient(place, silent) if place is not None else None

        return find

    def require(self) -> None:
        """Raise unless every place can be reached, those with strays among them."""
        for url in sorted({*self.packs.values(), *(url for _, url in self.strays)}):
            place_at(url).require()

    def summary(self) -> list[dict[str, Any]]:
        """For each place: its URL, how many packs lie there, and whether it can be reached now."""
        counted = Counter(self.packs.values())
        return [{"place": url, "packs": count, "reachable": _answers(url)} for url, count in sorted(counted.items())]


def _copies(row: str, value: bytes) -> list[ColdCopy]:
    try:
        return [(bytes(pack), str(url)) for url, packs in decode(value).items() for pack in packs] if value else []
    except (AttributeError, TypeError, ValueError) as error:
        raise Damaged(f"table store, row {row}: it does not follow the format", what=(f"store {row}",)) from error


def recorded(
    tiers: Tiers, there: Iterable[ColdCopy] = (), away: Iterable[ColdCopy] = (), gone: Iterable[ColdCopy] = ()
) -> tuple[bytes | None, bytes | None]:
    """What rows ``tiers`` and ``strays`` say once some copies lie at their places, need not any more, or have gone.

    None for a row that need not be there.
    """
    packs = (set(tiers.packs.items()) | set(there)) - set(away)
    strays = (tiers.strays | set(away)) - set(there) - set(gone)
    return _encoded(packs), _encoded(strays)


def _encoded(copies: Iterable[ColdCopy]) -> bytes | None:
    by_place: dict[str, list[bytes]] = {}
    for pack, url in sorted(copies):
        by_place.setdefault(url, []).append(pack)
    return encode(by_place) if by_place else None


def _answers(url: str) -> bool:
    try:
        place_at(url).require()
    except HoldfastError:
        return False
    return True


def file_name(pack: bytes) -> str:
    return f"{uuid.UUID(bytes=bytes(pack))}.pack"


def remove_copies(copies: Collection[ColdCopy]) -> tuple[set[ColdCopy], HoldfastError | None]:
    """Delete copies that nothing needs. Returns those that are left, and the first reason: a place is asked once."""
    left: set[ColdCopy] = set()
    silent: dict[str, HoldfastError] = {}
    for pack, url in sorted(copies):
        if url not in silent:
            try:
                place_at(url).remove(file_name(pack))
                continue
            except OSError as error:
                silent[url] = unavailable(error, f"removing a pack from {url}")
            except HoldfastError as error:
                silent[url] = error
        left.add((pack, url))
    return left, next(iter(silent.values()), None)


def copy_out(place: Place, source: Path) -> None:
    """Copy a pack to a place, and compare what lies there with what is here."""
    place.put(source.name, source)
    if not holds(place, source):
        raise StoreFailed(f"{place.url}: the copy of {source.name} is not what was written; the pack stays here")


def holds(place: Place, source: Path) -> bool:
    """Whether a place has exactly this file, read from there anew."""
    try:
        if place.size(source.name) != source.stat().st_size:
            return False
        with source.open("rb") as file:
            at = 0
            while data := file.read(PIECE_BYTES):
                if place.read(source.name, at, len(data)) != data:
                    return False
                at += len(data)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unavailable(error, f"comparing {source.name} with its copy in {place.url}") from error
    return True


def copy_back(place: Place, target: Path, prove: Callable[[Path], None]) -> None:
    """Bring a pack back under its name: whole or not at all, and only what ``prove`` does not object to."""
    name = target.name
    temporary = target.parent / f"tmp-{name}"
    try:
        with temporary.open("wb") as file:
            size = place.size(name)
            while (at := file.tell()) < size:
                file.write(place.read(name, at, min(PIECE_BYTES, size - at)))
                if file.tell() == at:
                    raise StoreFailed(f"{name} in {place.url} became shorter while it was read; nothing was changed")
            _flush(file)
        prove(temporary)
        os.rename(temporary, target)
        fsync_directory(target.parent)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing from {place.url}", what=(f"packs/{name}",)) from error
    except Damaged as error:
        raise Damaged(
            f"{name} in {place.url} is not what was moved there ({error.message}); nothing was changed",
            what=error.what,
        ) from error
    except OSError as error:
        raise unavailable(error, f"bringing a pack back from {place.url}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
