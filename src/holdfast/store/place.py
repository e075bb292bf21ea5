"""Whether the database that is open is still the one at the store's path.

Owns that comparison. A file that was deleted, or moved away, goes on taking commits as long as it is open, and all of
them go with it. Looks with stat only: opening and closing the file would drop SQLite's locks on it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.errors import StoreFailed

LOG_EVERY_S = 1.0
"""How often the log's own file is looked at. It does not go away alone, unless somebody deletes just it."""

_HINT = (
    "Put the directory back and open the store again; or, as the state is still in memory, save it elsewhere: "
    "holdfast.open(ELSEWHERE).agent(NAME).state = agent.state, and checkpoint() there."
)


class Place:
    """The files of an open catalog, by path, and which ones they were."""

    def __init__(self, catalog: Path) -> None:
        """Must be made when the catalog has just been opened."""
        self._catalog, self._log = str(catalog), f"{catalog}-wal"
        self._known = self._look(self._catalog)
        self._known_log: tuple[int, int] | None = None
        self._log_looked_at = 0.0

    def _look(self, path: str) -> tuple[int, int]:
        try:
            found = os.stat(path)
        except OSError as error:
            raise self._gone(path, f"is not there any more ({error.strerror})") from error
        return found.st_dev, found.st_ino

    def check(self) -> None:
        """Raise unless what is written now can be found at the path again. Called inside a transaction."""
        if self._look(self._catalog) != self._known:
            raise self._gone(self._catalog, "is another file than the one that was opened")
        now = time.monotonic()
        if now - self._log_looked_at >= LOG_EVERY_S:
            log = self._look(self._log)
            if self._known_log is None:  # it came to be, at the latest, when this transaction began
                self._known_log = log
            if self._known_log != log:
                raise self._gone(self._log, "is another file than the one that was opened")
            self._log_looked_at = now

    def _gone(self, path: str, what: str) -> StoreFailed:
        return StoreFailed(f"{path} {what}: the store was deleted, moved or replaced; nothing was written", hint=_HINT)
