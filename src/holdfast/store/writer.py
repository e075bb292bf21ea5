"""The writer: one thread for each writing connection. Whoever changes something hands it over, and waits or does not.

Owns the one queue of a store, and when a change is durable: at once, or in groups for whoever asked for that. Python
runs signal handlers in the main thread only, so nothing here is ever cut in two. What always holds: what was handed
over is done, refused or withdrawn, whatever becomes of its caller; the changes of a branch are made in the order in
which they came; a group is an optimisation only: if anything in it is refused, it is undone, and each of it is made
alone; the queue is bounded in bytes and in time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar, Generic, TypeVar

from holdfast.errors import DiskFull, StoreBusy, StoreClosed, Unavailable
from holdfast.store.changes import ACTING, Change, Work, acting
from holdfast.store.cipher import Cipher
from holdfast.store.engine import Engine, Tx

T = TypeVar("T")

GROUP_MAX = 256
"""Changes in one transaction: enough to share a flush, and few enough that nobody waits long for it."""

ENOUGH = 64
"""Changes that wait for no more company: half of what a branch may have on its way, so that nobody has to stop."""

CROWD = 2 * GROUP_MAX
"""Changes that wait: the next transaction is full, and while it is written another one gathers."""

GATHER_S = 0.01
"""The longest that a change which nobody waits for waits for company: well above one flush."""

HOLD_S = 0.05
"""The same for what can be made again, the time of making it included: so much work a kill may cost. Calls of 10 ms
share a transaction with three others then; one that took longer than this, a model's answer, waits no longer for it."""

LINGER_S = 0.25
"""For so long after the last such change the thread looks by itself whether another came: nobody has to wake it, which
would stop whoever hands over for as long as it runs."""

RETRY_S = 1.0
"""How often a full disk is tried again for changes that nobody waits for."""

QUEUE_BYTES = 64 * 2**20
"""How much memory waiting changes may take before their callers have to wait."""

BUSY_WAIT_S = 30.0
"""How long a caller waits for other writers: they hold the store for milliseconds, only a stopped one for longer."""

PASSING = (DiskFull, StoreBusy)
"""Reasons that go away by themselves."""

Committed = Callable[[Change], None]

TAKEN = Exception("whoever handed it over makes it")
"""Why a job was withdrawn that is not needed any more."""


class Job(Generic[T]):
    """A change that is handed over. ``lazy``: nobody waits for it, so it may share a flush with others."""

    failures: ClassVar[int] = 0  # another number after each job, of any store, that was not made
    _failures: ClassVar[Iterator[int]] = count(1)

    __slots__ = (
        "_done", "_error", "_over", "_taken", "bare", "due_s", "ended_s", "handed", "lazy", "patience_s", "result",
        "size_bytes", "work",
    )  # fmt: skip

    def __init__(
        self,
        work: Work[T] | Callable[[], T],
        *,
        lazy: bool = False,
        patience_s: float = 0.0,
        size_bytes: int = 0,
        bare: bool = False,
    ) -> None:
        by = ACTING.get()  # whoever hands it over, not whoever makes it, says for whom
        self.work: Callable[..., T] = partial(acting, by, work) if by else work
        self.bare = bare  # no transaction: something that must not be cut in two
        self.lazy = lazy
        self.patience_s = patience_s  # how long it may wait for company, if that is longer than for any lazy one
        self.size_bytes = size_bytes
        self.due_s = 0.0  # when it waits no longer
        self.ended_s = 0.0  # when it was finished
        self.handed = False  # handing it a second time, after an interrupt, does nothing
        self.result: T | None = None
        self._over = False
        self._error: BaseException | None = None
        self._taken: dict[str, object] = {}  # by whoever begins it, or why it was withdrawn: whichever comes first
        self._done = threading.Lock()
        self._done.acquire()

    # Both are one step, which nothing can cut.
    def claim(self) -> bool:
        """Begin it, unless somebody has, or it was withdrawn."""
        mine = object()
        return self._taken.setdefault("by", mine) is mine

    def withdraw(self, error: BaseException) -> bool:
        """Let it not be made any more, unless it was begun. Whoever asks is told why."""
        if self._taken.setdefault("by", error) is not error:
            return False
        self.finish(error)
        return True

    def unclaim(self) -> None:
        self._taken = {}

    @property
    def finished(self) -> bool:
        return self._over or isinstance(self._taken.get("by"), BaseException)

    @property
    def error(self) -> BaseException | None:
        taken = self._taken.get("by")
        return taken if isinstance(taken, BaseException) else self._error

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        if error is None:
            self.work = _nothing  # whoever handed it over is held by it, and holds it
        self.ended_s = time.monotonic()
        self._over = True
        if error is not None:
            Job.failures = next(Job._failures)
        self._wake()

    def _wake(self) -> None:
        try:  # of each job: ``suppress`` would be three calls
            self._done.release()
        except RuntimeError:  # it was finished twice: who did it first was cut short, or is not through yet
            return

    def join(self, wait_s: float = math.inf) -> bool:
        """Wait until it is finished; False when that takes longer."""
        deadline = time.monotonic() + wait_s
        while not self.finished:
            # Again and again: whoever withdraws it may be cut short before it says so.
            left_s = min(1.0, deadline - time.monotonic())
            if left_s <= 0:
                return False
            if self._done.acquire(timeout=left_s):
                self._wake()
        return True

    def wait(self, wait_s: float | None = None) -> T:
        """Its result, or what became of it raised. One that has not begun in time is withdrawn."""
        wait_s = BUSY_WAIT_S if wait_s is None else wait_s
        if not self.join(wait_s):
            self.withdraw(
                StoreBusy(
                    f"other writers kept the store for {wait_s:.3g} s; nothing was written",
                    hint="Look for a stopped or hanging process that has this store open, then try again.",
                )
            )
        self.join()
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]


class Bell:
    """Rings for one who waits. Ringing is a single step, and many rings before a wait count as one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._lock.release()

    def wait(self, wait_s: float = -1) -> bool:
        return self._lock.acquire(timeout=wait_s)


class _Writer:
    """One thread and its queue."""

    def __init__(self, engine: Engine, cipher: Callable[[], Cipher], committed: Committed, number: int) -> None:
        self._engine = engine
        self._cipher = cipher
        self._committed = committed
        self._queue: deque[Job[Any]] = deque()
        self._bell = Bell()
        self._room = Bell()
        self._writing: list[Job[Any]] = []  # taken out of the queue, and not done
        self._queued_bytes = 0  # of both, about: counted anew when something is done
        self._looks_s = math.inf  # when the thread looks again by itself, for what nobody waits for
        self._pause_s = GATHER_S  # how long the newest of that waits
        self._lingers_until_s = 0.0
        self._stop = False
        self._ended = False
        self.working = threading.Lock()  # while something is being written
        self._thread = threading.Thread(target=self._loop, name=f"holdfast-writer-{number}", daemon=True)
        self._thread.start()

    def hand(self, job: Job[Any]) -> None:
        if job.handed:
            return
        deadline = 0.0
        while job.size_bytes and self._queued_bytes > QUEUE_BYTES and self._bytes() > QUEUE_BYTES:
            deadline = deadline or time.monotonic() + BUSY_WAIT_S
            if not self._room.wait(0.05) and time.monotonic() > deadline:
                raise StoreBusy(
                    f"{self._bytes():,} bytes are waiting to be written already; this change was not accepted",
                    hint="The disk is slower than what is written, or a stopped process keeps the store.",
                )
        now_s = time.monotonic()
        if job.lazy:
            self._lingers_until_s = now_s + LINGER_S
            self._pause_s = max(GATHER_S, job.patience_s)
            job.due_s = now_s + self._pause_s
        self._engine.busy = True
        self._queued_bytes += job.size_bytes
        self._queue.append(job)  # twice, if an interrupt comes now: it is claimed once all the same
        if not job.lazy or job.due_s < self._looks_s or len(self._queue) >= ENOUGH:
            self._bell.ring()
        if self._stop or self._ended:  # closing was cut short, or the thread was
            self._thread.join(BUSY_WAIT_S)
            with self.working:
                self._empty()
        job.handed = True  # last: one that lies in the queue, and nobody was woken for, would be waited for for ever

    def hasten(self, job: Job[Any], patience_s: float | None) -> None:
        due_s = time.monotonic() + max(GATHER_S, patience_s) if patience_s is not None else 0.0
        if due_s < job.due_s:
            job.due_s = due_s
            if due_s < self._looks_s:
                self._bell.ring()

    def take_back(self, jobs: Sequence[Job[Any]]) -> bool:
        queue = self._queue
        if tuple(queue) != tuple(jobs) or not all(job.lazy for job in jobs):
            return False  # a flush that waits behind them may be under way with them
        # The newest first, as the thread begins with the oldest: none is made without what it stands on.
        if not all(job.withdraw(TAKEN) for job in reversed(jobs)):
            return False
        for job in jobs:
            with suppress(ValueError):  # the thread has just taken it out, and leaves it
                queue.remove(job)
        if not queue and not self._writing:  # that is out of the queue, and not done
            self._engine.busy = False
        return True

    def _bytes(self) -> int:
        waiting = (*self._writing, *tuple(self._queue))
        return sum([job.size_bytes for job in waiting]) if len(waiting) > 1 else 0

    def stop(self, wait_s: float) -> None:
        self._stop = True
        self._bell.ring()
        self._thread.join(wait_s)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.working.locked()

    @property
    def crowded(self) -> bool:
        return len(self._queue) >= CROWD

    def _loop(self) -> None:
        wait_s = -1.0
        try:
            while not self._stop or self._queue:
                self._bell.wait(wait_s)
                self._looks_s = math.inf
                with self.working:
                    wait_s = self._empty()
        finally:
            self._ended = True

    def _empty(self) -> float:
        """Write what is queued. Returns how long to wait before looking again, when something is left."""
        queue = self._queue
        while waiting := tuple(queue):
            now_s = time.monotonic()
            late_s = waiting[0].due_s  # of one that is tried again all wait, however many there are
            if late_s - now_s <= max(GATHER_S, HOLD_S):
                late_s = min([job.due_s for job in waiting]) if len(waiting) < ENOUGH else now_s
            if late_s > now_s and not self._stop and all(job.lazy for job in waiting):
                self._looks_s = late_s
                return late_s - now_s
            group: list[Job[Any]] = []
            self._writing = [waiting[0]]  # before anything is out of the queue: see ``take_back``
            with suppress(IndexError):  # what is left was taken back just now
                group.append(queue.popleft())
                while len(group) < GROUP_MAX and not (group[0].bare or queue[0].bare):
                    group.append(queue.popleft())
            self._writing = group
            left_over = self._write(group)
            for job in left_over:
                job.due_s = time.monotonic() + RETRY_S
            queue.extendleft(reversed(left_over))
            self._writing = []
            self._queued_bytes = self._bytes()
            self._room.ring()
            if left_over and self._stop:
                return 0.0
        self._engine.busy = False
        now_s = time.monotonic()
        if now_s >= self._lingers_until_s:
            return -1.0
        self._looks_s = now_s + self._pause_s
        return self._pause_s

    def _write(self, group: list[Job[Any]]) -> list[Job[Any]]:
        """Make some changes, together if that goes. Returns those that are to be tried again."""
        group = [job for job in group if not job.finished]
        if not group:
            return []
        if group[0].bare:
            self._bare(group[0])
            return []
        error = self._together(group)
        if error is None:
            return []
        taken = [job for job in group if not job.finished]
        if len(taken) > 1 and not isinstance(error, Unavailable) and not isinstance(error, PASSING):
            for at, job in enumerate(taken):  # one of them was refused: which, shows when each is made alone
                again = self._write([job])
                if again:
                    return again + taken[at + 1 :]
            return []
        again = [job for job in taken if job.lazy and isinstance(error, PASSING)]
        for job in taken:
            if job not in again:
                self._done(job, error)
        return again

    def _together(self, group: list[Job[Any]]) -> BaseException | None:
        begun: list[Job[Any]] = []
        made: list[Change] = []

        def claim() -> None:
            begun[:] = [job for job in group if job.claim()]  # not one that is finished

        def work(tx: Tx) -> None:
            change = Change(tx, self._cipher())
            for job in begun:
                job.result = job.work(change)
            made[:] = [change]

        try:
            self._engine.transaction(work, claim)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            for job in begun:
                job.unclaim()
            return error
        self._committed(made[0])
        for job in begun:
            self._done(job)
        return None

    def _bare(self, job: Job[Any]) -> None:
        if not job.claim():
            return
        error = None
        try:
            job.result = job.work()
        except BaseException as failed:  # noqa: BLE001 - whoever waits for it gets it
            error = failed
        job.finish(error)

    def _done(self, job: Job[Any], error: BaseException | None = None) -> None:
        """Made; or not, and then it may have been withdrawn meanwhile: only one of the two says what became of it."""
        if error is None:
            job.finish()
        else:
            job.withdraw(error)


class Writers:
    """All writers of a store. The changes of one branch go to one of them."""

    def __init__(self, engine: Engine, cipher: Callable[[], Cipher], committed: Committed) -> None:
        self._all = [_Writer(engine, cipher, committed, number) for number in range(engine.writers)]
        self.taking = threading.RLock()  # while somebody makes changes that were taken back
        self.closed = False

    def hand(self, job: Job[T], b: int = 0) -> Job[T]:
        if self.closed and not job.handed:
            raise StoreClosed("the store was closed", hint="Open it again with holdfast.open().")
        self._all[b % len(self._all)].hand(job)
        return job

    def crowded(self, b: int) -> bool:
        """Whether so many changes wait that one more is not written any sooner for being handed over now."""
        return self._all[b % len(self._all)].crowded

    def hasten(self, job: Job[Any], patience_s: float | None, b: int) -> None:
        """Let a change that waits for company wait for at most so long from now on; None: not at all."""
        self._all[b % len(self._all)].hasten(job, patience_s)

    def take_back(self, jobs: Sequence[Job[Any]], b: int) -> bool:
        """Have changes of a branch back that nobody waits for, all that it has handed over, to make them oneself.

        With ``taking``, until they are made. False where they were begun, or others wait, too. Those of them that were
        withdrawn all the same have the error TAKEN.
        """
        return self._all[b % len(self._all)].take_back(jobs)

    def do(self, work: Work[T], b: int = 0) -> T:
        """Make a change; durable when it returns."""
        return self.hand(Job(work), b).wait()

    def apart(self, work: Callable[[], T], b: int = 0) -> T:
        """Do something that no signal handler may cut in two, between two changes. Not from a writer's own thread."""
        return self.hand(Job(work, bare=True), b).wait()

    @property
    def pending(self) -> bool:
        with self.taking:
            return not all(one.idle for one in self._all)

    def flush(self, wait_s: float | None = None) -> None:
        """Return when everything that was handed over so far is done; raise what keeps it from being done."""
        with self.taking:  # what is not in a queue now is done
            jobs = [self.hand(Job(_nothing), number) for number in range(len(self._all))]
        for job in jobs:
            job.wait(wait_s)

    def rest(self, deadline: float) -> bool:
        """Before a fork: no change is under way, and none begins until ``resume``."""
        return all(one.working.acquire(timeout=max(0.0, deadline - time.monotonic())) for one in self._all)

    def resume(self) -> None:
        for one in self._all:
            if one.working.locked():
                one.working.release()

    def stop(self, wait_s: float) -> None:
        self.closed = True
        for one in self._all:
            one.stop(wait_s)


def _nothing(change: Change) -> Any:
    """What a flush hands over: when it is done, so is all before it."""
