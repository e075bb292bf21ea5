"""Colder places for old packs: where they are, how a pack gets there, and how it is read from there.

Owns the row ``tiers`` of table ``store`` (format.md section 4) and the interface that a place must have. Sees packs as
files: what is in them is proven by whoever reads a chunk. Always true: a pack is deleted here only after a flushed,
compared copy was recorded in the catalog; a place that cannot be reached gives an error that names it, and nothing is
forgotten because of it.
"""

from __future__ import annotations

import os
import shutil
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, ColdPlaceMissing, Damaged, HoldfastError, StoreFailed
from holdfast.store.files import fsync_directory, unavailable

NOTE = "tiers"
_COPY_BYTES = 8 * 2**20
_MARK = "holdfast-cold"
"""A file in a folder that is a cold place: one that is not mounted is empty, and must not be taken for it."""


class Place(Protocol):
    """Somewhere packs can lie. An object store needs no more than this; see ``SCHEMES``."""

    url: str

    def prepare(self) -> None:
        """Make the place, if there is none yet."""

    def put(self, name: str, source: Path) -> None:
        """Copy a file there under that name, whole or not at all; durable when it returns."""

    def digest(self, name: str) -> bytes:
        """BLAKE3 of what lies there, read anew."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """So many bytes from there, fewer where it ends. ``FileNotFoundError`` when there is nothing of that name."""

    def size(self, name: str) -> int:
        """Its length. ``FileNotFoundError`` when there is nothing of that name."""

    def fetch(self, name: str, target: Path) -> None:
        """Copy it to a new file here and flush it."""

    def remove(self, name: str) -> None:
        """Delete it; nothing happens when it is not there."""


class Folder:
    """A directory, on another disk for instance."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))

    def prepare(self) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            mark = self._path / _MARK
            if not mark.exists():
                mark.write_text("Packs of a Holdfast store. Do not delete them: the store needs them.\n")
                fsync_directory(self._path)
        except OSError as error:
            raise self._unreachable(error) from error

    def put(self, name: str, source: Path) -> None:
        self._there()
        temporary = self._path / f"tmp-{name}"
        try:
            _copy(source, temporary)
            os.rename(temporary, self._path / name)
            fsync_directory(self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise unavailable(error, f"copying a pack to {self.url}") from error

    def digest(self, name: str) -> bytes:
        self._there()
        return _digest(self._path / name)

    def read(self, name: str, offset: int, size: int) -> bytes:
        self._there()
        with (self._path / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def size(self, name: str) -> int:
        self._there()
        return (self._path / name).stat().st_size

    def fetch(self, name: str, target: Path) -> None:
        self._there()
        _copy(self._path / name, target)

    def remove(self, name: str) -> None:
        self._there()
        (self._path / name).unlink(missing_ok=True)

    def _there(self) -> None:
        """A folder that is not mounted looks like an empty one, or like none."""
        if not (self._path / _MARK).is_file():
            raise self._unreachable(None)

    def _unreachable(self, error: OSError | None) -> ColdPlaceMissing:
        why = f" ({error.strerror})" if error is not None else ""
        return ColdPlaceMissing(
            f"the cold place {self.url} cannot be reached{why}; the packs that were moved there are needed",
            place=self.url,
            hint="Mount it or bring it back, then try again. Nothing is lost as long as it exists.",
        )


SCHEMES: dict[str, Callable[[str], Place]] = {"file": Folder}
"""What makes a place of a URL. An object store is added here."""


def place_at(url: str) -> Place:
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise BadOption(f"no cold place can be at {url!r}", hint=f"Use a directory or {', '.join(SCHEMES)}://...")
    return SCHEMES[scheme](url)


def url_of(to: str | os.PathLike[str]) -> str:
    """A path as a URL, so that it stays the same place whatever directory a program runs in."""
    text = os.fspath(to)
    if "://" in text:
        return text
    return "file://" + urllib.parse.quote(os.path.realpath(text))


@dataclass(frozen=True, slots=True)
class Tiering:
    """What was moved to a colder place, or brought back."""

    place: str
    packs: int
    moved_bytes: int
    done: bool

    def to_json(self) -> dict[str, Any]:
        return {"place": self.place, "packs": self.packs, "moved_bytes": self.moved_bytes, "done": self.done}


class Tiers:
    """Which packs lie where. ``fact`` reads a row of table ``store``."""

    def __init__(self, fact: Callable[[str], bytes | None]) -> None:
        self._fact = fact
        self._known: tuple[bytes, dict[bytes, str]] = (b"", {})

    @property
    def packs(self) -> Mapping[bytes, str]:
        """Pack -> the URL of its place."""
        value = self._fact(NOTE) or b""
        if value != self._known[0]:
            try:
                found = {bytes(pack): str(url) for url, packs in decode(value).items() for pack in packs}
            except (AttributeError, TypeError, ValueError) as error:
                raise Damaged("table store, row tiers: it does not follow the format", what=("store tiers",)) from error
            self._known = value, found
        return self._known[1] if value else {}

    def of(self, pack: bytes) -> Place | None:
        """Where a pack lies, None when that is here."""
        url = self.packs.get(bytes(pack))
        return place_at(url) if url is not None else None

    def summary(self) -> list[dict[str, Any]]:
        """For each place: its URL, how many packs lie there, and whether it can be reached now."""
        counted = Counter(self.packs.values())
        return [{"place": url, "packs": count, "reachable": _answers(url)} for url, count in sorted(counted.items())]

    @staticmethod
    def encoded(packs: Mapping[bytes, str]) -> bytes | None:
        """The row's value; None when there need not be one."""
        by_place: dict[str, list[bytes]] = {}
        for pack, url in sorted(packs.items()):
            by_place.setdefault(url, []).append(pack)
        return encode(by_place) if by_place else None


def _answers(url: str) -> bool:
    try:
        place_at(url).size("any")
    except HoldfastError:
        return False
    except OSError:  # nothing has that name, but the place has said so
        return True
    return True


def file_name(pack: bytes) -> str:
    return f"{uuid.UUID(bytes=bytes(pack))}.pack"


def copy_out(place: Place, source: Path) -> None:
    """Copy a pack to a place and compare what lies there with what is here."""
    place.put(source.name, source)
    if place.digest(source.name) != _digest(source):
        raise StoreFailed(f"{place.url}: the copy of {source.name} is not what was written; the pack stays here")


def copy_back(place: Place, name: str, directory: Path) -> None:
    """Bring a pack back under its name: whole or not at all."""
    temporary = directory / f"tmp-{name}"
    try:
        place.fetch(name, temporary)
        if _digest(temporary) != place.digest(name):
            raise StoreFailed(f"{name}: what came from {place.url} is not what lies there; nothing was changed")
        os.rename(temporary, directory / name)
        fsync_directory(directory)
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing from {place.url}", what=(f"packs/{name}",)) from error
    except OSError as error:
        raise unavailable(error, f"bringing a pack back from {place.url}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        shutil.copyfileobj(old, new, _COPY_BYTES)
        new.flush()
        os.fsync(new.fileno())


def _digest(path: Path) -> bytes:
    hasher = blake3()
    with path.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            hasher.update(data)
    return hasher.digest()
