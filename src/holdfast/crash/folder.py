"""Where dumps are, what they are called, which file a person means, and which ones go when there are too many.

Must not know what is in a dump. Holds always: only names of the one folder are looked at; nothing is removed that
somebody has named as needed.
"""

from __future__ import annotations

import os
import re
from calendar import timegm
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from time import gmtime, strftime, strptime

from holdfast.crash import kinds
from holdfast.errors import BadOption, DumpFailed, NotADump
from holdfast.text import is_url

_NAME = re.compile(r"\d{8}T\d{6}Z-\d+-(.*)-[0-9a-f]{4}\.hfdump")
_STAMP = re.compile(r"\d{8}T\d{6}Z")  # how names begin that nobody chose
_FORM = "%Y%m%dT%H%M%SZ"
_NAMED = 8  # files that an error names, when several could be meant


def of(store: str | os.PathLike[str] | None) -> Path:
    """Where a store's dumps are: $HOLDFAST_DUMPS, else `dumps` in the store; without a store, where it would be."""
    named = os.environ.get("HOLDFAST_DUMPS")
    if named:
        return Path(named)
    if store is not None and not is_url(os.fspath(store)):  # a server has no folder
        return Path(store) / "dumps"
    return default()


def default() -> Path:
    """Where dumps go when nobody says: $HOLDFAST_DUMPS, else `dumps` in the store of this place, else `dumps` here."""
    named = os.environ.get("HOLDFAST_DUMPS")
    if named:
        return Path(named)
    store = os.environ.get("HOLDFAST_STORE")
    if store and (Path(store) / "store.db").is_file():
        return Path(store) / "dumps"
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / ".holdfast").is_dir():
            return folder / ".holdfast" / "dumps"
    return here / "dumps"


def new_file(to: str | os.PathLike[str] | None, pid: int, why: str) -> Path:
    """The file for a new dump: ``to`` itself if that is named as one, else one in that folder, which is made."""
    place = Path(to) if to is not None else default()
    if place.suffix == kinds.SUFFIX:
        return place
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DumpFailed(f"the folder for dumps {place} cannot be made: {error.strerror}") from error
    stamp = strftime(_FORM, gmtime())
    slug = re.sub(r"[^a-z0-9]+", "-", why.lower())[:40].strip("-") or "dump"
    return place / f"{stamp}-{pid}-{slug}-{os.urandom(2).hex()}{kinds.SUFFIX}"


def found(folder: Path) -> list[Path]:
    """The dumps of a folder, the newest first. Empty when there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            files = [(*_when(entry), entry.name) for entry in entries if _is_dump(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotADump(f"the folder {folder} cannot be read: {error.strerror}") from error
    return [folder / name for *_times, name in sorted(files, reverse=True)]


def find(text: str | None, folder: Path) -> Path:
    """The file that is meant: a path, or a piece of the name of one in the folder. None: the newest one there."""
    if text and (os.sep in text or Path(text).is_file()):
        return Path(text)
    dumps = found(folder)
    if not dumps:
        hint = f"There is no dump in {folder} either." if text else "Name the file, or the store with --store DIR."
        raise NotADump(f"there is no file {text!r}" if text else f"there is no dump in {folder}", hint=hint)
    if not text:
        return dumps[0]
    exact = [path for path in dumps if path.name in (text, text + kinds.SUFFIX)]
    meant = exact or [path for path in dumps if text in path.name]
    if not meant:
        raise NotADump(
            f"there is no file {text!r}, nor a dump of that name in {folder}", hint="See `holdfast dump list`."
        )
    if len(meant) > 1:
        names = ", ".join(path.name for path in meant[:_NAMED])
        raise BadOption(f"{text!r} may be {len(meant)} dumps", hint=f"Write more of the name: {names}")
    return meant[0]


def surplus(folder: Path, most: int, most_bytes: int, needed: Collection[str] = ()) -> list[Path]:
    """The dumps that are too many: of what happens most often the oldest. Those that are needed are not among them."""
    left = [(path, size_of(path), _kind(path.name)) for path in reversed(found(folder))]  # the oldest first
    often = Counter(kind for _path, _size, kind in left)
    total = sum(size for _path, size, _kind_ in left)
    gone: list[Path] = []
    while len(left) > most or total > most_bytes:
        free = [item for item in left if item[0].name not in needed]
        if not free:
            break
        chosen = max(free, key=lambda item: often[item[2]])  # the first, so the oldest, of the most frequent
        left.remove(chosen)
        often[chosen[2]] -= 1
        total -= chosen[1]
        gone.append(chosen[0])
    return gone


def remove(path: Path) -> None:
    """Remove a dump, and the core that was kept with it."""
    core_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def core_of(path: Path) -> Path:
    """Where the core of a dump lies, if one was kept."""
    return path.with_name(path.name.removesuffix(kinds.SUFFIX) + kinds.CORE_SUFFIX)


def size_of(path: Path) -> int:
    """Bytes of a dump and its core."""
    total = 0
    for file in (path, core_of(path)):
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _kind(name: str) -> str:
    """What a dump is of, by its name: without the moment, the process and the random end."""
    named = _NAME.fullmatch(name)
    return named[1] if named else name


def _when(entry: os.DirEntry[str]) -> tuple[float, float]:
    """When it was taken, by its name if that says so: what is added to a dump later changes the file's own time."""
    changed = entry.stat().st_mtime
    stamp = _STAMP.match(entry.name)
    try:
        return (timegm(strptime(stamp[0], _FORM)) if stamp else changed), changed
    except ValueError:  # digits, but no date
        return changed, changed


def _is_dump(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(kinds.SUFFIX) and entry.is_file(follow_symlinks=False)
