"""Where dumps are, and which file a person means.

Must not know what is in a dump. Holds always: nothing is created, and only names of the one folder are looked at.
"""

from __future__ import annotations

import os
import re
from calendar import timegm
from pathlib import Path
from time import strptime

from holdfast.crash import kinds
from holdfast.crash.taking import default_folder
from holdfast.errors import BadOption, NotADump

_STAMP = re.compile(r"\d{8}T\d{6}Z")  # how names begin that nobody chose
_FORM = "%Y%m%dT%H%M%SZ"
_NAMED = 8  # files that an error names, when several could be meant


def of(store: str | os.PathLike[str] | None) -> Path:
    """The folder of a store's dumps; without a store, where dumps go when nobody says."""
    return Path(store) / "dumps" if store is not None and "://" not in os.fspath(store) else default_folder()


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
    if text and (os.sep in text or Path(text).exists()):
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
