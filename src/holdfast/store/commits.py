"""When a change is durable: at once, or in groups.

Owns the queue of checkpoints (``durability="batched"``) and of records. ``put`` returns before an item is durable;
whoever needs it durable writes everything that has gathered as one transaction with one flush, and a background thread
does the same for what nobody waits for. Always true: the items of a branch are written in the order in which they
came; the queue is bounded in number, bytes and time; ``flush`` returns only when everything put before it is durable,
and raises if something put before it never will be.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from holdfast.errors import Damaged, DiskFull, Fenced, HoldfastError, StoreBusy, StoreFailed, StorePoisoned
from holdfast.store.catalog import Append, Buffer, Commit
from holdfast.store.room import check_room
from holdfast.store.writing import Writer

BATCH_DELAY_S = 0.01
"""The longest that an item waits for company: well above one flush, so that flushes are shared."""

QUEUE_COMMITS = 4_096
"""How many items may wait. More than a disk writes in the delay; a caller that is faster is slowed down to it."""

QUEUE_BYTES = 64 * 2**20
"""How much memory waiting items may take before their callers have to wait."""

RETRY_S = 1.0
"""How often a full disk is tried again while nobody calls."""

_PASSING = (DiskFull, StoreBusy)


class Waiting:
    """An item in the queue, its nodes as they will be stored. ``result`` and ``error`` say what became of it."""

    __slots__ = ("done", "error", "item", "nodes", "number", "result", "size_bytes")

    def __init__(self, item: Commit | Append, nodes: Sequence[tuple[bytes, Buffer]], size_bytes: int) -> None:
        self.item = item
        self.nodes = nodes
        self.size_bytes = size_bytes
        self.number = 0
        self.done = False
        self.result = 0
        self.error: HoldfastError | None = None

    @property
    def written(self) -> bool:
        return self.done and self.error is None and self.result > 0

    def stands_on(self, other: Waiting) -> bool:
        """Whether this item can only be written after the other one."""
        if self.item.b != other.item.b:
            return False
        both_commits = isinstance(self.item, Commit) and isinstance(other.item, Commit)
        return both_commits or (self.item.append is not None and other.item.append is not None)


class Batches:
    """The queue, and the thread that empties it when nobody else does."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._lock = threading.RLock()  # it can be told whether this thread has it: see _lock_again
        self._changed = threading.Condition(self._lock)  # for callers
        self._work = threading.Condition(self._lock)  # for the thread
        self._queue: deque[Waiting] = deque()  # in the order of numbers, those being written included
        self._queue_bytes = 0
        self._commits = 0  # of the items in the queue, how many are checkpoints
        self._put = 0  # items ever put: the number of the newest
        self._writing = False
        self._stopping = False
        self._failure: HoldfastError | None = None
        self._lost: dict[int, HoldfastError] = {}  # branches whose items were dropped, until their next call
        self._untold: list[HoldfastError] = []  # the same, until the next flush of the whole store
        self._thread: threading.Thread | None = None
        self._idle = False

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def commits_pending(self) -> bool:
        """Whether a checkpoint waits: only then is what can be read of states out of date."""
        return self._commits > 0

    def put(self, item: Commit | Append, nodes: Sequence[tuple[bytes, Buffer]], *, soon: bool = False) -> Waiting:
        """Accept an item. Raises, without accepting it, what became of earlier ones of its branch.

        ``soon``: the caller will make it durable itself, so nobody else need be woken for it.
        """
        check_room()
        waiting = Waiting(item, nodes, item.size_bytes)
        deadline = time.monotonic() + self._writer.busy_wait_s
        with self._lock:
            if self._failure is not None:
                self._retry()
            self._raise_lost(item.b)
            while self._queue and (
                len(self._queue) >= QUEUE_COMMITS or self._queue_bytes + waiting.size_bytes > QUEUE_BYTES
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreBusy("too many changes are waiting to be written; this one was not accepted")
                self._push(left)
                self._raise_failure()
                self._raise_lost(item.b)
            if not soon:
                self._start()  # before the item is accepted: it may raise
            commits = self._commits + isinstance(item, Commit)
            # No call before the last of these: an interrupt cannot part them.
            waiting.number = self._put = self._put + 1
            self._queue_bytes += waiting.size_bytes
            self._commits = commits
            self._queue.append(waiting)
            if not soon and self._idle:
                self._work.notify()
        return waiting

    def complete(self, waiting: Waiting) -> None:
        """Return when this item is durable. When it raises, it may still be in the queue: see ``withdraw``."""
        with self._lock:
            if self._failure is not None and not waiting.done:
                self._retry()
            self._drive(waiting.number)
            if not waiting.done:
                self._raise_failure()
            self._raise_lost(waiting.item.b)
            if waiting.error is not None:
                raise _again(waiting.error)

    def withdraw(self, waiting: Waiting) -> bool:
        """Take an item out of the queue, so that it will never be written. False when it is too late.

        That is when it is done, one way or the other, or when something else that was accepted stands on it.
        """
        with self._lock:
            while self._writing and not waiting.done:
                self._wait()
            later = (other for other in self._queue if other.number > waiting.number)
            if waiting.done or any(other.stands_on(waiting) for other in later):
                return False
            self._remove([waiting])
            if not self._queue:
                self._failure = None if isinstance(self._failure, _PASSING) else self._failure
            self._changed.notify_all()
            return True

    def recall(self, item: Commit) -> bool:
        """Take a checkpoint out of the queue whose ``put`` was cut short. False when it is not there."""
        with self._lock:
            found = next((waiting for waiting in self._queue if waiting.item is item), None)
            return found is not None and self.withdraw(found)

    def flush(self, b: int | None = None) -> None:
        """Wait until everything put so far is durable. Raises if it is not: of one branch, or of any."""
        with self._lock:
            if self._failure is not None:
                self._retry()
            self._drive(self._put)
            self._raise_failure()
            if b is not None:
                self._raise_lost(b)
            elif self._untold:
                error = self._untold[0]
                self._untold.clear()
                raise error

    def settle(self) -> None:
        """Wait as ``flush`` does, for the sake of a reader: raises nothing."""
        with self._lock:
            if self._failure is None:
                self._drive(self._put)

    def stop(self) -> None:
        """End the thread. Whatever could not be written by then is dropped; ``flush`` first."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise _again(self._failure)

    def _raise_lost(self, b: int) -> None:
        error = self._lost.pop(b, None)
        if error is not None:
            self._untold = [untold for untold in self._untold if untold is not error]
            raise error

    # Writing: with the lock held, which is let go while the disk works

    def _drive(self, number: int) -> None:
        """See to it that everything up to a number is written, or that something failed."""
        while self._queue and self._queue[0].number <= number and self._failure is None:
            self._push(None)

    def _push(self, wait_s: float | None) -> None:
        """Write what has gathered, or wait for whoever is doing so."""
        if self._writing:
            self._wait(wait_s)
        else:
            self._write()

    def _wait(self, wait_s: float | None = None) -> None:
        """Wait for whoever is writing. The lock is held again afterwards, also when an interrupt ends it."""
        try:
            self._changed.wait(wait_s)
        except BaseException:
            self._lock_again()
            raise

    def _lock_again(self) -> None:
        """Hold the lock, once, whether an interrupt came before or after it was taken."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - nothing else tells
            self._lock.acquire()

    def _retry(self) -> None:
        """After a failure that can pass: try once more, and raise what comes of it."""
        if isinstance(self._failure, _PASSING):
            while self._writing:
                self._wait()
            if self._queue and self._failure is not None:
                self._write()
        self._raise_failure()

    def _write(self) -> None:
        """One transaction with everything in the queue."""
        batch = list(self._queue)
        lost: dict[int, HoldfastError] = {}
        failure: HoldfastError | None = None
        committed: list[bool] = []
        whole = False
        self._writing = True
        try:
            try:
                self._lock.release()
                lost = self._transaction(batch, committed)
                whole = True
            except HoldfastError as error:
                failure = error
                whole = True
            except (MemoryError, RecursionError):  # of this moment: all of it was undone, and still waits
                raise
            except Exception as error:
                if threading.current_thread() is not self._thread:
                    raise  # a signal handler's, perhaps: as an interrupt
                failure = StoreFailed(f"writing a batch of changes: {error!r}")
                whole = True
            finally:
                try:
                    self._lock.acquire()
                except BaseException:
                    self._lock_again()
                    raise
        finally:
            over = batch if whole or committed else []  # otherwise an interrupt came before: all of it still waits
            try:
                self._conclude(over, lost, failure)
            except BaseException:
                self._conclude(over, lost, failure)  # an interrupt came in the middle of it
                raise

    def _transaction(self, batch: list[Waiting], committed: list[bool]) -> dict[int, HoldfastError]:
        """Returns the branches that were refused, whose later items go with the refused one."""
        lost: dict[int, HoldfastError] = {}

        def alone() -> None:
            lost.clear()
            batch[0].result = 0
            try:
                batch[0].result = self._writer.write(batch[0].item, batch[0].nodes)
            except (Fenced, Damaged) as error:
                lost[batch[0].item.b] = error
                raise

        def together() -> None:
            lost.clear()
            for waiting in batch:
                waiting.result = 0
                if waiting.item.b in lost:
                    continue
                result = self._writer.savepoint(waiting.item, waiting.nodes)
                if isinstance(result, HoldfastError):
                    lost[waiting.item.b] = result
                else:
                    waiting.result = result

        try:
            self._writer.transaction(alone if len(batch) == 1 else together, lambda: committed.append(True))
        except (Fenced, Damaged) as error:
            if error not in lost.values():
                raise
        return lost

    def _conclude(self, batch: list[Waiting], lost: dict[int, HoldfastError], failure: HoldfastError | None) -> None:
        """Say what became of a batch. Doing it again, or the rest of it, changes nothing."""
        if batch:
            self._finish(batch, lost, failure)
        self._writing = False
        self._changed.notify_all()

    def _finish(self, batch: list[Waiting], lost: dict[int, HoldfastError], failure: HoldfastError | None) -> None:
        self._failure = failure
        if failure is not None:
            for waiting in batch:
                waiting.result = 0  # what was given to them was undone
        if not isinstance(failure, _PASSING):
            # Written, refused, or never to be written: in no case do they stay in the queue.
            refused: set[int] = set()
            for waiting in batch:
                waiting.error = failure
                if waiting.item.b in lost and (waiting.item.b in refused or not waiting.result):
                    refused.add(waiting.item.b)
                    waiting.error = lost[waiting.item.b]
            self._remove(batch)
        for b, error in lost.items():
            # What a refused writer put after it stands on it and can never be written.
            dropped = [waiting for waiting in self._queue if waiting.item.b == b]
            for waiting in dropped:
                waiting.error = error
            self._remove(dropped)
            self._lost[b] = error
            if error not in self._untold:
                self._untold.append(error)
        if isinstance(failure, StorePoisoned):
            for waiting in self._queue:
                waiting.error = failure
            self._remove(list(self._queue))

    def _remove(self, items: Sequence[Waiting]) -> None:
        gone = {waiting.number for waiting in items}
        left: deque[Waiting] = deque()
        size_bytes, commits = self._queue_bytes, self._commits
        for waiting in self._queue:
            if waiting.number in gone:
                size_bytes -= waiting.size_bytes
                commits -= isinstance(waiting.item, Commit)
            else:
                left.append(waiting)
        for waiting in items:
            waiting.done = True
        self._queue, self._queue_bytes, self._commits = left, size_bytes, commits

    # The thread

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name="holdfast-batch", daemon=True)
            with suppress(RuntimeError):  # the interpreter ends, and begins no thread any more: close() writes the rest
                thread.start()
                self._thread = thread

    def _loop(self) -> None:
        me = threading.current_thread()
        with self._lock:
            if self._thread not in {None, me}:
                return  # an interrupt came while this one was being started, and another was started instead
            self._thread = me
            while self._gather():
                try:
                    self._write()
                except MemoryError:
                    self._work.wait(RETRY_S)

    def _gather(self) -> bool:
        """Wait for work, then a little for more of it. False when it is time to stop."""
        while True:
            if self._failure is not None and not self._stopping:
                self._work.wait(RETRY_S)
            while not self._queue and not self._stopping:
                self._idle = True
                self._work.wait()
                self._idle = False
            deadline = time.monotonic() + BATCH_DELAY_S
            while not self._stopping and self._queue and (left := deadline - time.monotonic()) > 0:
                self._work.wait(left)
            while self._writing:
                self._wait()
            if self._stopping and (not self._queue or self._failure is not None):
                return False
            if self._queue and (self._failure is None or isinstance(self._failure, _PASSING)):
                return True


def _again(error: HoldfastError) -> HoldfastError:
    """A fresh copy, because one exception object must not be raised from many threads."""
    return copy.copy(error)
