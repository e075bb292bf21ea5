"""A file of lines beside a store: what bisections have found out about an agent, and what its program has logged.

Owns the place, the appending and the reading. Must not know what the lines say. What always holds: a line is written by
one call, so that those of several threads and processes stay whole; one that was cut off, or that somebody else has
spoiled, is left out; what cannot be written, or read, disturbs nobody.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from holdfast.errors import StoreFailed
from holdfast.store.witness import state_folder

FILE_MAX_BYTES = 8 * 2**20
"""Of a file; then it becomes the old one, and the old one goes."""


VERDICTS, LOGS = "bisect", "logs"


class Journal:
    """The file of lines of one kind about an agent of the store at a place, or about one of its branches."""

    def __init__(self, place: str, kind: str, agent: str, branch: str = "") -> None:
        self._place, self._kind = place, kind
        self._name = f"{'-'.join(_digest(name) for name in (agent, branch) if name)}.jsonl"
        self._lock = threading.Lock()

    @cached_property
    def file(self) -> Path | None:
        """In the store; for one on a server, in the user's own folder. None where there is no such place."""
        if "://" not in self._place:
            return Path(self._place) / self._kind / self._name
        try:
            return state_folder() / self._kind / f"{_digest(self._place)}-{self._name}"
        except RuntimeError:
            return None

    def add(self, said: dict[str, Any]) -> None:
        """Append a line. What fails is let go."""
        data = json.dumps(said).encode() + b"\n"
        with suppress(OSError), self._lock:
            if self.file is None:
                return
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.write(handle, data)
                full = os.fstat(handle).st_size > FILE_MAX_BYTES
            finally:
                os.close(handle)
            if full:
                self.file.replace(self.file.with_suffix(".old"))

    def read(self) -> Iterator[dict[str, Any]]:
        """All that is there, oldest first."""
        for file in (self.file.with_suffix(".old"), self.file) if self.file is not None else ():
            with suppress(OSError), file.open("rb") as opened:
                for data in opened.read(2 * FILE_MAX_BYTES).splitlines():
                    with suppress(ValueError, RecursionError):
                        said = json.loads(data)
                        if isinstance(said, dict):
                            yield said


def forget(place: str, agent: str) -> None:
    """Remove all that is kept about an agent: it is removed itself. Raises ``StoreFailed`` where something stays."""
    for kind in (VERDICTS, LOGS):
        if (file := Journal(place, kind, agent).file) is None:
            continue
        try:
            for kept in [one for one in file.parent.iterdir() if one.name.startswith(file.stem)]:
                kept.unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing was ever kept
        except OSError as error:
            raise StoreFailed(
                f"{agent} is removed, but lines that were kept beside it are still there: {error.strerror}",
                hint=f"Delete {file.parent / file.stem}* yourself: they would show at the next agent of that name.",
            ) from error


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
