"""When a commit is durable: at once, or in groups.

Owns the queue of ``durability="batched"``. ``put`` returns before the commit is durable; a background thread writes
what has gathered as one transaction with one flush. Always true: commits of a branch are written in the order in which
they came; the queue is bounded in number, bytes and time; ``flush`` returns only when everything put before it is
durable, and raises if something put before it never will be.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import DiskFull, HoldfastError, StoreBusy, StoreFailed, StorePoisoned
from holdfast.store.catalog import Commit
from holdfast.store.writing import Writer

BATCH_DELAY_S = 0.01
"""The longest that a commit waits for company: well above one flush, so that flushes are shared."""

QUEUE_COMMITS = 4_096
"""How many commits may wait. More than a disk writes in the delay; a caller that is faster is slowed down to it."""

QUEUE_BYTES = 64 * 2**20
"""How much memory waiting commits may take before their callers have to wait."""

RETRY_S = 1.0
"""How often a full disk is tried again while nobody calls."""

_PASSING = (DiskFull, StoreBusy)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A commit in the queue, its nodes as they will be stored."""

    commit: Commit
    nodes: Sequence[tuple[bytes, bytes]]
    size_bytes: int


class Batches:
    """The queue and the thread that empties it."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._queue_bytes = 0
        self._put = 0  # commits ever put
        self._done = 0  # of these, how many are durable or dropped
        self._attempts = 0
        self._hurry = False
        self._stopping = False
        self._failure: HoldfastError | None = None
        self._lost: dict[int, HoldfastError] = {}  # branches whose commits were dropped, until their next call
        self._untold: list[HoldfastError] = []  # the same, until the next flush of the whole store
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        return self._put != self._done

    def put(self, commit: Commit, nodes: Sequence[tuple[bytes, bytes]]) -> None:
        """Accept a commit. Raises, without accepting it, what became of earlier ones of its branch."""
        waiting = Waiting(commit, nodes, commit.size_bytes)
        deadline = time.monotonic() + self._writer.busy_wait_s
        with self._changed:
            if self._failure is not None:
                self._retry()
            self._raise_lost(commit.b)
            while self._queue and (
                len(self._queue) >= QUEUE_COMMITS or self._queue_bytes + waiting.size_bytes > QUEUE_BYTES
            ):
                self._hurry = True
                self._changed.notify_all()
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise StoreBusy("too many commits are waiting to be written; this one was not accepted")
                self._raise_failure()
                self._raise_lost(commit.b)
            self._queue.append(waiting)
            self._queue_bytes += waiting.size_bytes
            self._put += 1
            self._start()
            if len(self._queue) == 1:
                self._changed.notify_all()

    def flush(self, b: int | None = None) -> None:
        """Wait until everything put so far is durable. Raises if it is not: of one branch, or of any."""
        with self._changed:
            if self._failure is not None:
                self._retry()
            self._wait_for(self._put)
            self._raise_failure()
            if b is not None:
                self._raise_lost(b)
            elif self._untold:
                error = self._untold[0]
                self._untold.clear()
                raise error

    def settle(self) -> None:
        """Wait as ``flush`` does, for the sake of a reader: raises nothing."""
        with self._changed:
            if self._failure is None:
                self._wait_for(self._put)

    def stop(self) -> None:
        """End the thread. Whatever could not be written by then is dropped; ``flush`` first."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(self._failure.message, hint=self._failure.hint)

    def _raise_lost(self, b: int) -> None:
        error = self._lost.pop(b, None)
        if error is not None:
            self._untold = [untold for untold in self._untold if untold is not error]
            raise error

    def _wait_for(self, number: int) -> None:
        self._hurry = True
        self._changed.notify_all()
        while self._done < number and self._failure is None:
            self._changed.wait()

    def _retry(self) -> None:
        """After a failure that can pass: let the thread try once more, and raise what comes of it."""
        if isinstance(self._failure, _PASSING) and self._queue:
            attempt = self._attempts + 1
            self._hurry = True
            self._changed.notify_all()
            while self._attempts < attempt and self._failure is not None:
                self._changed.wait()
        self._raise_failure()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="holdfast-batch", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._changed:
                batch = self._gather()
            if not batch:
                return
            lost: dict[int, HoldfastError] = {}
            failure: HoldfastError | None = None
            try:
                lost = self._write(batch)
            except HoldfastError as error:
                failure = error
            except Exception as error:  # noqa: BLE001  a thread that died in silence would make every flush hang
                failure = StoreFailed(f"writing a batch of commits: {error!r}")
            with self._changed:
                self._finish(batch, lost, failure)

    def _gather(self) -> list[Waiting]:
        """Wait for work, then a little for more of it. Empty when it is time to stop."""
        if self._failure is not None and not self._hurry and not self._stopping:
            self._changed.wait(RETRY_S)
        while not self._queue:
            self._hurry = False
            if self._stopping:
                return []
            self._changed.wait()
        deadline = time.monotonic() + BATCH_DELAY_S
        while not self._hurry and not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        if self._stopping and self._failure is not None:
            return []
        return list(self._queue)

    def _write(self, batch: list[Waiting]) -> dict[int, HoldfastError]:
        """One transaction. Returns the branches that were fenced, whose later commits go with the refused one."""
        lost: dict[int, HoldfastError] = {}

        def change() -> None:
            lost.clear()
            for waiting in batch:
                if waiting.commit.b in lost:
                    continue
                result = self._writer.savepoint(waiting.commit, waiting.nodes)
                if isinstance(result, HoldfastError):
                    lost[waiting.commit.b] = result

        self._writer.transaction(change)
        return lost

    def _finish(self, batch: list[Waiting], lost: dict[int, HoldfastError], failure: HoldfastError | None) -> None:
        self._attempts += 1
        self._failure = failure
        if not isinstance(failure, _PASSING):
            # Written, refused, or never to be written: in no case do they stay in the queue.
            for waiting in batch:
                self._queue.popleft()
                self._queue_bytes -= waiting.size_bytes
            self._done += len(batch)
        for b, error in lost.items():
            self._drop_queued(b)
            self._lost[b] = error
            self._untold.append(error)
        if isinstance(failure, StorePoisoned):
            self._done += len(self._queue)
            self._queue.clear()
            self._queue_bytes = 0
        if not self._queue or failure is not None:
            self._hurry = False
        self._changed.notify_all()

    def _drop_queued(self, b: int) -> None:
        """What a fenced writer put after the refused commit stands on it and can never be written."""
        kept = [waiting for waiting in self._queue if waiting.commit.b != b]
        self._done += len(self._queue) - len(kept)
        self._queue_bytes = sum(waiting.size_bytes for waiting in kept)
        self._queue = deque(kept)
