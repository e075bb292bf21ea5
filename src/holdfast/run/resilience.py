"""Resilience: how long to wait before trying again, and when to stop trying.

Owns the timing of retries and the breakers. How a call goes is the business of ``calls``, which asks here. What always
holds: a breaker's state is a note of the line, so that restarts share it; while it is open the tool is not called, and
when it has been open for ``reset_s`` one call at a time may try.

    backoff_s(attempt)                   seconds before another attempt, from 1 on: growing, with jitter
    Breaker(failures=5, reset_s=60, mode=None, name=None, checkpoint=True)     for ``tool(breaker=...)``
    gate_of(agent, breaker, tool)        the breaker as it is now: ``.refusal() .failed() .passed() .released()``
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from holdfast.errors import BadOption, BreakerOpen
from holdfast.run.clock import clock_of
from holdfast.run.notes import Notes, notes_of

BACKOFF_S = 0.1
BACKOFF_MAX_S = 30.0
FAILURES_MAX = 1_000
RESET_MAX_S = 30 * 86_400.0
"""A breaker that stays open for longer is a tool that was switched off, and somebody should say so."""
WHY_MAX = 500
"""Characters of the last failure that a breaker's note keeps."""


@functools.cache
def _timing() -> Callable[[int], float]:
    # Only a program in which something fails loads it.
    from tenacity import RetryCallState, wait_exponential, wait_random

    growing = wait_exponential(multiplier=BACKOFF_S, max=BACKOFF_MAX_S - BACKOFF_S) + wait_random(0, BACKOFF_S)

    def seconds(attempt: int) -> float:
        state = RetryCallState(None, None, (), {})  # type: ignore[arg-type] # of all it knows only the count is used
        state.attempt_number = attempt
        return float(growing(state))

    return seconds


def backoff_s(attempt: int) -> float:
    """How long to wait after this many failed attempts: longer each time, and never two callers in step."""
    return _timing()(attempt)


class Breaker(Struct, frozen=True):
    """When to stop calling a tool: after so many ``failures`` in a row, for ``reset_s``, then one call may try.

    Tools that name the same breaker share it; without a name each has its own. While it is open, the agent's mode is
    ``mode``, if one is given. As it opens a checkpoint is taken, unless ``checkpoint`` is false.
    """

    failures: int = 5
    reset_s: float = 60.0
    mode: str | None = None
    name: str | None = None
    checkpoint: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.failures <= FAILURES_MAX:
            raise BadOption(f"a breaker with failures={self.failures}", hint=f"Use 1 to {FAILURES_MAX}.")
        if not 0 < self.reset_s <= RESET_MAX_S:
            raise BadOption(f"a breaker with reset_s={self.reset_s}", hint=f"Use a number up to {RESET_MAX_S:g}.")


class Gate:
    """One breaker of one agent. Its state is the newest note; only who is trying now is this process's own."""

    def __init__(self, agent: Any, name: str) -> None:
        self.name = name
        self._notes: Notes = notes_of(agent)
        self._clock = clock_of(agent)
        self._ledger = agent.ledger
        self._trying: object = None

    @property
    def state(self) -> dict[str, Any]:
        """``state`` (closed, open, half-open), ``failures`` in a row, ``until``, ``mode``, ``why``."""
        value = self._notes.get("breaker", self.name)
        known: dict[str, Any] = value if isinstance(value, dict) else {"state": "closed", "failures": 0}
        return known

    def refusal(self, who: object, tool: str, breaker: Breaker) -> BreakerOpen | None:
        """Why a call is not to be made now. None: it may be, and ``who`` has to say what became of it."""
        with self._notes.lock:
            state = self.state
            if state["state"] == "closed":
                return None
            now, until = self._clock.wall_us(), int(state.get("until", 0))
            if until - now > breaker.reset_s * 1e6:  # the date was set back since it opened, or reset_s was changed
                until = now + round(breaker.reset_s * 1e6)
                self._put({**state, "until": until})
            if now < until or self._trying is not None:
                return self._refuse(tool, state, until)
            self._trying = who
            self._put({**state, "state": "half-open"})
            return None

    def _refuse(self, tool: str, state: dict[str, Any], until: int) -> BreakerOpen:
        when = time.strftime("%H:%M:%S UTC", time.gmtime(until / 1e6))
        return BreakerOpen(
            f"{tool} was not called: its breaker {self.name!r} is open after {state['failures']} failures"
            f" ({state.get('why', '')}); it is tried again after {when}",
            tool=tool,
            breaker=self.name,
            until=until,
            hint="Wait, or give the tool a fallback.",
        )

    def failed(self, who: object, breaker: Breaker, why: str) -> bool:
        """An attempt failed. Whether the breaker, closed until now, has opened by it."""
        with self._notes.lock:
            state = self.state
            trying = self.released(who)
            failures = int(state["failures"]) + 1
            closed = bool(state["state"] == "closed")
            if not trying and (not closed or failures < breaker.failures):
                # A call that was under way when the breaker opened says nothing new about it.
                self._put({**state, "failures": failures, "why": why[:WHY_MAX]})
                return False
            until = self._clock.wall_us() + round(breaker.reset_s * 1e6)
            opened = {"state": "open", "failures": failures, "until": until, "why": why[:WHY_MAX]}
            if breaker.mode:
                opened |= {"mode": breaker.mode, "opened": self._ledger.count if closed else state.get("opened", 0)}
            self._put(opened)
            return closed

    def passed(self) -> None:
        """The tool has answered."""
        with self._notes.lock:
            state, self._trying = self.state, None
            if state["state"] != "closed" or state["failures"]:
                self._put({"state": "closed", "failures": 0})

    def released(self, who: object) -> bool:
        """The attempt is over, perhaps without an answer. Whether it was the one that tried an open breaker."""
        with self._notes.lock:
            mine = self._trying is who
            if mine:
                self._trying = None
            return mine

    def _put(self, state: dict[str, Any]) -> None:
        self._notes.put("breaker", self.name, state, at=self._clock.wall_us())


def gate_of(agent: Any, breaker: Breaker, tool: str) -> Gate:
    """The breaker of a tool, as it is for this agent."""
    notes, name = notes_of(agent), breaker.name or tool
    with notes.lock:
        gate: Gate | None = notes.gates.get(name)
        if gate is None:
            gate = notes.gates[name] = Gate(agent, name)
        return gate
