"""What this user has seen of a store: a record outside of it, so that an older copy put in its place is noticed.

Owns the records in the user's state directory, one for each store and place. Whoever can replace the whole store can
replace its witness too; this record is out of their reach. It has the witness's form and rules: written after a
commit's flush returned, never ahead of the store. A store that is behind it, or has another checkpoint under the same
number, went back. A copy in another place has a record of its own; one that was moved takes its record along.
A record that cannot be read or written is as good as none: it is a second pair of eyes, not a part of the store.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3

from holdfast.store.witness import WITNESS_BYTES, Witness, WitnessFile, initial, newest

PATH_MAX_BYTES = 4096


def state_folder() -> Path | None:
    """Where the records are: ``$XDG_STATE_HOME/holdfast/stores``; None when there is no home to keep them in."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "holdfast" / "stores"
    home = os.path.expanduser("~")
    return Path(home) / ".local" / "state" / "holdfast" / "stores" if os.path.isabs(home) else None


class Record(WitnessFile):
    """One record. Processes that only read the store write it too, hence the lock."""

    def record(self, n: int, e: int, r: int, checkpoint_id: bytes) -> None:
        # As _alone(), written out: this happens at every commit.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                self._note(n, e, r, checkpoint_id)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as error:
            self.failure = error

    def replace(self, n: int, e: int, r: int, checkpoint_id: bytes) -> None:
        with self._alone():
            super().replace(n, e, r, checkpoint_id)

    def newest(self) -> Witness | None:
        try:
            with self._alone():
                return newest(os.pread(self._fd, WITNESS_BYTES, 0))
        except OSError as error:
            self.failure = error
            return None

    def name_place(self, path: Path) -> None:
        os.pwrite(self._fd, os.fsencode(path), WITNESS_BYTES)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def open_record(path: Path, uuid: bytes) -> Record | None:
    """The record of the store ``uuid`` at ``path``, begun if there is none; None where none can be kept."""
    folder = state_folder()
    if folder is None:
        return None
    wanted = _file(folder, path, uuid)
    try:
        wanted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not wanted.exists():
            _begin(wanted, path)
        record = Record(wanted)
        if not stat.S_ISREG(os.fstat(record.fileno()).st_mode):
            record.close()
            return None
        record.name_place(path)
    except OSError:
        return None
    return record


def remembered(path: Path, uuid: bytes) -> Witness | None:
    """What the record of the store ``uuid`` at ``path`` says, without beginning one. None when there is none."""
    folder = state_folder()
    if folder is None:
        return None
    wanted = _file(folder, path, uuid)
    try:
        record = wanted if wanted.exists() else next(_left_behind(wanted, path), wanted)
        return newest(record.read_bytes()[:WITNESS_BYTES])
    except OSError:
        return None


def _file(folder: Path, path: Path, uuid: bytes) -> Path:
    return folder / uuid.hex() / blake3(os.fsencode(path)).hexdigest(8)


def _left_behind(wanted: Path, path: Path) -> Iterator[Path]:
    """Records of places where this store was and is not any more."""
    for other in sorted(wanted.parent.iterdir()):
        place = _place(other)
        if place is not None and place != path and not (place / "store.db").exists():
            yield other


def _begin(wanted: Path, path: Path) -> None:
    """Take along the record of the place where this store was before, or make an empty one."""
    for other in _left_behind(wanted, path):
        with suppress(OSError):
            other.rename(wanted)
            os.truncate(wanted, WITNESS_BYTES)
            return
    with suppress(FileExistsError):
        fd = os.open(wanted, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, initial())
        finally:
            os.close(fd)


def _place(record: Path) -> Path | None:
    try:
        with record.open("rb") as file:
            text = file.read(WITNESS_BYTES + PATH_MAX_BYTES)[WITNESS_BYTES:]
    except OSError:
        return None
    return Path(os.fsdecode(text)) if text else None
