"""Folding the write-ahead log back into the database, off the commit path.

Owns one background thread and one connection. (SQLite calls this a checkpoint; that word is taken here.)
Always true: a commit never waits for more than the last few pages to be folded, and the log is bounded as long as no
reader stays on an old state for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import apsw

from holdfast.errors import HoldfastError, StorePoisoned
from holdfast.store.locks import StoreLock
from holdfast.store.sqlite import connect, writing_error

FOLD_PAGES = 1_000
"""Log pages (4 KiB each) between two foldings. Fewer would write the same pages to the database more often."""

LOG_KEEP_BYTES = 64 * 2**20
"""A log that grew larger, by one huge commit, is cut back to this. Below, its space is reused: faster than growing."""

REST_PAGES = 64
"""What may be left to fold while writers are held up."""

ROUNDS = 8
"""How often folding tries to catch up with writers before it holds them up whatever is left."""

TRIM_FROM_PAGES, TRIM_PAGES = 16, 512
"""Pages that sealing has freed go back to the file system when the log is emptied: from so many on, and so many at a
time. What a removal frees is more, and is given back by whoever removes."""

CLOSE_WAIT_S = 0.2
"""How long closing waits for other writers before it leaves the log as it is. The log is as safe as the database."""


class Folding:
    """The thread that folds, started when there is something to fold for the first time."""

    def __init__(
        self, catalog: Path, lock_path: Path, poison: Callable[[StorePoisoned], None], vfs: str | None = None
    ) -> None:
        self._catalog = catalog
        self._lock_path = lock_path
        self._poison = poison
        self._vfs = vfs
        self._wake = threading.Event()
        self._stopping = False
        self._asked_at = 0
        self._thread: threading.Thread | None = None
        self._connection: apsw.Connection | None = None
        self._queue: StoreLock | None = None
        self.lock = threading.Lock()

    def committed(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        """SQLite's hook after each commit, with the log's length."""
        if pages < self._asked_at:
            self._asked_at = 0  # the log began anew
        if pages - self._asked_at >= FOLD_PAGES:
            self._asked_at = pages
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():  # or an interrupt came before it was started
                self._thread = threading.Thread(target=self._loop, name="holdfast-fold", daemon=True)
                self._thread.start()
        return apsw.SQLITE_OK

    @property
    def connection(self) -> apsw.Connection | None:
        return self._connection

    def stop(self, *, fold: bool) -> None:
        """End the thread; with ``fold``, leave an empty log behind if nobody else is using it."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if fold:
            self.empty()
        with self.lock:
            if self._connection is not None:
                self._connection.close(True)
                self._connection = None
            if self._queue is not None:
                self._queue.close()
                self._queue = None

    def empty(self) -> None:
        """Fold all of the log and cut it, if nobody else is using it."""
        self._attempt(self._empty)

    def abandon(self) -> None:
        """After fork, in the child."""
        if self._queue is not None:
            self._queue.abandon()

    def _loop(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            self._attempt(self._fold)

    def _attempt(self, work: Callable[[apsw.Connection, StoreLock], None]) -> None:
        """When folding cannot be done now the log just stays. A failed flush poisons, as everywhere."""
        try:
            with self.lock:
                if self._connection is None:
                    self._connection = connect(self._catalog, readonly=False, vfs=self._vfs)
                if self._queue is None:
                    self._queue = StoreLock(self._lock_path)
                connection, queue = self._connection, self._queue
                try:
                    work(connection, queue)
                except apsw.Error as error:
                    meaning = writing_error(error, connection, "folding the log")
                    if isinstance(meaning, StorePoisoned):
                        self._poison(meaning)
        except (apsw.Error, HoldfastError, OSError):
            return

    def _fold(self, connection: apsw.Connection, queue: StoreLock) -> None:
        _catch_up(connection)
        # Meanwhile writers have added to the log. They are held up for the rest, which is short; the next one then
        # starts the log anew. Writing over old pages of the log also flushes faster than making the file longer.
        queue.acquire()
        try:
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        finally:
            queue.release()

    def _empty(self, connection: apsw.Connection, queue: StoreLock) -> None:
        connection.set_busy_timeout(0)
        _catch_up(connection)
        queue.acquire(CLOSE_WAIT_S)
        try:
            if connection.execute("PRAGMA freelist_count").get >= TRIM_FROM_PAGES:
                connection.execute(f"PRAGMA incremental_vacuum({TRIM_PAGES})").fetchall()
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        finally:
            queue.release()


def _catch_up(connection: apsw.Connection) -> None:
    """Fold while others write, until little is left: a removal writes megabytes while the last ones are folded."""
    before = 0
    for _ in range(ROUNDS):
        _, folded = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        if folded - before <= REST_PAGES:
            return
        before = folded
