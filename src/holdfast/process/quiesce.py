"""Quiet before a capture: hooks that flush what the program holds back, and threads that stand still meanwhile.

Owns the order of the hooks, their deadline, and the safe points of threads. Must not know what is captured. What always
holds: when a capture begins, every pause has ended well and every registered thread stands at a safe point, or nothing
is saved; one thread at a time has the quiet, and whoever waits for it stands still meanwhile; whatever happens, each
resume whose pause was begun is called, the last one first, when the last capture is over, and threads go on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Self

from holdfast.errors import BadOption, NotQuiet

log = logging.getLogger("holdfast.process")

DEADLINE_S = 5.0
"""How long all pauses together may take, if nobody says."""
DEADLINE_MAX_S = 3600.0
LOOK_S = 0.1
"""How often whoever waits for threads looks whether they still live."""
TURN_S = 120.0
"""How long somebody waits while another thread has the quiet. Only two that wait for each other get there."""

_INSIDE: ContextVar[tuple[object, ...]] = ContextVar("holdfast-quiet", default=())
"""The quiets in which this context is, also in a thread that works for another one, which waits."""

Hook = Callable[[], object]


class Quiesce:
    """The hooks and threads of one agent."""

    def __init__(self) -> None:
        self._hooks: list[Hooks] = []
        self._deadline_s = DEADLINE_S
        self._changed = threading.Condition()
        self._threads: dict[int, str] = {}  # registered, by ident
        self._standing: set[int] = set()
        self._quiet: _Quiet | None = None  # that which is had now

    def add(self, pause: Hook | None, resume: Hook | None, deadline_s: float | None) -> Hooks:
        """Declare hooks; the answer's ``remove()`` takes them back."""
        if pause is None and resume is None:
            raise BadOption("give pause, resume or both", hint="agent.quiesce(pause=log.flush)")
        if deadline_s is not None:
            if not 0 < deadline_s <= DEADLINE_MAX_S or math.isnan(deadline_s):
                raise BadOption(f"deadline_s={deadline_s!r}", hint=f"Use seconds above 0, up to {DEADLINE_MAX_S:,.0f}.")
            self._deadline_s = deadline_s
        hooks = Hooks(self, pause, resume)
        self._hooks.append(hooks)
        return hooks

    def remove(self, hooks: Hooks) -> None:
        with suppress(ValueError):
            self._hooks.remove(hooks)

    # -- around a capture ---------------------------------------------------------------------------------------

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, everything is quiet. Raises ``NotQuiet`` where that cannot be had.

        Who is inside already, by a hook or in another task of the same thread, shares it: the last one ends it.
        """
        mine, before = None, _INSIDE.get()
        try:
            mine = self._joined()
            _INSIDE.set((*before, mine))
            if not mine.begun:
                mine.begun = True
                self._begin(mine, time.monotonic() + self._deadline_s)
            yield
        finally:
            _INSIDE.set(before)
            self._leave(mine)

    def _leave(self, mine: _Quiet | None) -> None:
        with self._changed:
            had = self._quiet
            if mine is None and had is not None and had.owner == threading.get_ident() and not had.begun:
                mine = had  # an interrupt came when it had just been taken
            if mine is None:
                return
            mine.users -= 1
            if mine.users:
                return
        for hooks in reversed(mine.paused):
            _resume(hooks)
        with self._changed:
            self._quiet = None
            self._changed.notify_all()

    def _joined(self) -> _Quiet:
        """The quiet that this thread has, or its turn to have one."""
        ident = threading.get_ident()
        until = time.monotonic() + TURN_S
        with self._changed:
            self._standing.add(ident)  # whoever asks for a capture is in the middle of nothing
            self._changed.notify_all()
            try:
                while (had := self._quiet) is not None:
                    if had.owner == ident or any(one is had for one in _INSIDE.get()):
                        had.users += 1
                        return had
                    if time.monotonic() > until:
                        raise NotQuiet("another thread has been saving this agent for too long; nothing was saved")
                    self._changed.wait(LOOK_S)
                self._quiet = _Quiet(ident)
            finally:
                self._standing.discard(ident)
            return self._quiet

    def _begin(self, mine: _Quiet, until: float) -> None:
        for hooks in list(self._hooks):
            mine.paused.append(hooks)  # before: one that is cut short may have done half of it
            self._pause(hooks, until)
        with self._changed:
            while busy := [name for one, name in self._threads.items() if one not in {*self._standing, mine.owner}]:
                for gone in self._threads.keys() - {thread.ident for thread in threading.enumerate()}:
                    del self._threads[gone]  # it has ended without saying so
                left = until - time.monotonic()
                if left <= 0:
                    raise self._late(f"threads came to no safe point ({', '.join(busy)})")
                self._changed.wait(min(left, LOOK_S))

    def _pause(self, hooks: Hooks, until: float) -> None:
        if hooks.pause is None:
            return
        try:
            hooks.pause()
        except Exception as error:
            raise NotQuiet(
                f"a pause failed before a capture ({type(error).__name__}: {error!s:.200}); nothing was saved",
                hint="The hook was given to agent.quiesce(pause=...).",
            ) from error
        if time.monotonic() > until:
            raise self._late("a pause took too long")

    def _late(self, what: str) -> NotQuiet:
        return NotQuiet(
            f"{what}: after {self._deadline_s:g} s it was not quiet; nothing was saved",
            hint="Save it later, or allow more: agent.quiesce(..., deadline_s=...).",
        )

    # -- threads ------------------------------------------------------------------------------------------------

    @contextmanager
    def thread(self) -> Iterator[Callable[[], None]]:
        """Register the calling thread. It gets its safe point: a call that returns at once, or after a capture."""
        ident = threading.get_ident()
        with self._changed:
            self._threads[ident] = threading.current_thread().name
        try:
            yield self._stand
        finally:
            with self._changed:
                self._threads.pop(ident, None)
                self._changed.notify_all()

    def _stand(self) -> None:
        had, ident = self._quiet, threading.get_ident()
        if had is None or had.owner == ident:
            return
        with self._changed:
            self._standing.add(ident)
            self._changed.notify_all()
            while self._quiet is not None:
                self._changed.wait()
            self._standing.discard(ident)


class _Quiet:
    """One quiet: the thread that has it, what it has paused, and how many captures are in it."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.users = 1
        self.begun = False
        self.paused: list[Hooks] = []


class Hooks:
    """What is called before and after each capture of an agent."""

    def __init__(self, owner: Quiesce, pause: Hook | None, resume: Hook | None) -> None:
        self.pause, self.resume = pause, resume
        self._owner = owner

    def remove(self) -> None:
        """Call them no more."""
        self._owner.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _resume(hooks: Hooks) -> None:
    """One that fails keeps no other from being called, and does not take back what was saved."""
    if hooks.resume is not None:
        try:
            hooks.resume()
        except Exception:
            log.exception("a resume failed after a capture")
