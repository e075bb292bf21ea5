"""Who is at work on a thread, and the lease that they share.

Owns when this process becomes the writer of a thread and when it lets others write: a run is at work from its first
read to its end, any other call while it lasts, and the last one who leaves gives the lease back. Must not know what is
written. What always holds: the lease, once asked for, is held while somebody is at work; it is let go at once when
nobody is, and only when everything is on disk; nothing here waits for another process.

LangGraph tells a checkpointer what to read and to write, and not that a run is over: by its end, an interrupt, an
error, or because it was cancelled. But a run reads its thread while its loop is being entered, and the loop has a stack
of what is to be done when it is left, in which what was put first is done last: after the last checkpoint is saved. So
the saver puts its own end there. A loop whose input is refused is never entered, and so never left; then the run's
callbacks are told. A run has ended when LangGraph is done with it, whoever keeps its exception or its config.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler

from holdfast.errors import AgentBusy, Fenced, HoldfastError
from holdfast.store.locks import Lease

if TYPE_CHECKING:
    from holdfast.agent.store import Store
    from holdfast.contrib.langgraph.thread import Thread

_RUNTIME = "__pregel_runtime"
_ENTERING = {"__enter__", "__aenter__"}
# Frames between the loop and the saver: a replay looks for its state, a checkpointer is wrapped in another.
_DEEP = 12


class Holding(ABC):
    """A thread's lease, as this process has it, or has had it."""

    def __init__(self, store: Store, name: str, aside: Callable[[Callable[[], None]], object]) -> None:
        self.store = store
        self.name = name
        self.lock = threading.RLock()
        self._aside = aside
        self._batched = store._durability == "batched"
        self._users: set[object] = set()  # who is at work; only ever changed by steps that cannot be cut
        self._lease: Lease | None = None  # also one that is released: nobody may have had it since
        self._turn = 0  # how often it was taken

    @property
    def held(self) -> bool:
        """Whether this process is the writer."""
        return self._lease is not None and self._lease.held

    @property
    def idle(self) -> bool:
        return not self._users and not self.held

    def enter(self) -> object:
        """Somebody is at work on the thread, until ``leave`` is called with what this gives: a run, or a call."""
        user = object()
        self._users.add(user)
        return user

    def leave(self, user: object, *, lost: bool = False) -> None:
        """The last one who leaves lets other processes write the thread, at once. ``lost``: from a destructor."""
        self._users.discard(user)
        if self._users or not self.held:
            return
        if not self._batched:
            self._rest()
        elif not lost:  # which may come at any moment, in any thread: the next one who leaves does it
            with suppress(RuntimeError):  # it is being closed, which releases it
                self._aside(self._rest)

    @contextmanager
    def working(self) -> Iterator[None]:
        user = self.enter()
        try:
            yield
        finally:
            self.leave(user)

    def _rest(self) -> None:
        """Release the lease unless somebody is at work. Whoever has the lock is, and comes here when leaving."""
        with self.lock:
            if self._users or not self.held:
                return
            if self._batched:
                try:
                    self.store.flush()
                except HoldfastError:
                    return  # whoever uses the store next is told; what is not on disk must not meet another writer
            self.release()

    def become_writer(self) -> None:
        """Become the thread's writer, and stay it while somebody is at work. Raises ``AgentBusy`` if another is."""
        with self.lock:
            if self.held:
                return
            try:
                self._lease = self._again() or self._take()
            except AgentBusy as error:
                waits = "HoldfastSaver(..., wait_s=30) waits until its run has ended. Reading it waits for nobody."
                busy = error.message.replace("the branch", f"thread {self.name!r}")
                raise AgentBusy(busy, holder=error.holder, hint=waits) from None
            self._turn += 1

    def _again(self) -> Lease | None:
        """The lease that this thread had before, if nobody has had it since: what is remembered is true then."""
        return self.store._catalog.lease_again(self._lease) if self._lease is not None else None

    @abstractmethod
    def _take(self) -> Lease:
        """A new lease. Others may have written meanwhile."""

    def release(self) -> None:
        """Let others write the thread, whoever is at work on it here."""
        with self.lock:
            if self._lease is not None:
                self._lease.release()  # and kept: it may be taken up again

    @property
    def guard(self) -> tuple[int, int]:
        lease = self._held_lease()
        return lease.row.b, lease.generation

    def _held_lease(self) -> Lease:
        if self._lease is None or not self._lease.held:
            raise Fenced(f"the lease of thread {self.name!r} is not held; nothing was written")
        return self._lease

    def _give_up(self) -> None:
        """If somebody took the thread over, it is not ours any more, and has to be asked for again."""
        with self.lock, suppress(HoldfastError):
            lease = self._lease
            if lease is not None and self.store._catalog.branch_row(lease.row.b).generation != lease.generation:
                lease.release()


# -- runs ------------------------------------------------------------------------------------------------------


def belongs_to_run(configurable: Mapping[str, Any]) -> bool:
    """Whether LangGraph asks for the sake of a run; what people ask for themselves it passes on without this."""
    return _RUNTIME in configurable


def loop_of_caller() -> Any:
    """LangGraph's loop that is being entered, when this is called by its entering; otherwise None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEP):
        if frame is None:
            return None
        if frame.f_code.co_name in _ENTERING:
            loop = frame.f_locals.get("self")
            if hasattr(loop, "checkpointer") and isinstance(getattr(loop, "stack", None), ExitStack | AsyncExitStack):
                return loop
        frame = frame.f_back
    return None


class Run(BaseCallbackHandler):
    """One run at work on a thread."""

    run_inline = True

    def __init__(self, thread: Thread, user: object, loop: Any) -> None:
        self.thread = thread
        self._user: object | None = user
        loop.stack.callback(self.end)
        handlers = getattr(getattr(loop, "manager", None), "handlers", None)  # of this run alone
        if isinstance(handlers, list):
            handlers.append(self)

    def on_chain_error(self, error: BaseException, **_more: Any) -> None:  # noqa: ARG002 - the interface has it
        self.end()

    def end(self) -> None:
        user, self._user = self._user, None
        if user is not None:
            self.thread.leave(user)

    def __del__(self) -> None:
        # Its event loop may have ended before it did.
        user, self._user = self._user, None
        if user is not None:
            self.thread.leave(user, lost=True)
