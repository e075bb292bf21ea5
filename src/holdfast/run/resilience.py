"""Resilience: how long to wait before trying again, when to stop trying, and what an agent remembers of both.

Owns the timing of retries, the breakers, the notes of a line that belong to no run (breakers, modes, resources),
and the two clocks: the date, which means something to another process but may be set, and one that counts evenly. How a
call goes is the business of ``calls``, which asks here. What always holds: a note is a record of the line, so restarts
and branches share it, and a rollback leaves it alone; the newest one of a name counts. A breaker's state is such a
note; while it is open the tool is not called, and when it has been open for ``reset_s`` one call at a time may try. An
agent that has a ``clock`` of its own is timed by that one alone.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from msgspec import Struct

from holdfast.errors import BadOption, BreakerOpen
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow

BACKOFF_S = 0.1
BACKOFF_MAX_S = 30.0
FAILURES_MAX = 1_000
RESET_MAX_S = 30 * 86_400.0
"""A breaker that stays open for longer is a tool that was switched off, and somebody should say so."""
WHY_MAX = 500
"""Characters of the last failure that a breaker's note keeps."""


def backoff_s(attempt: int) -> float:
    """How long to wait after this many failed attempts: longer each time, and never two callers in step."""
    from random import uniform  # only a program in which something fails loads it

    growing = BACKOFF_S * 2.0 ** min(attempt - 1, 32)
    return min(growing, BACKOFF_MAX_S - BACKOFF_S) + uniform(0, BACKOFF_S)  # noqa: S311 - nothing secret depends on it


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
        """``state`` (closed, open), ``failures`` in a row, ``until``, ``mode``, ``why``."""
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
            if now >= until and self._trying is None:
                self._trying = who
                return None
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
            state = {**self.state, "failures": int(self.state["failures"]) + 1, "why": why[:WHY_MAX]}
            trying, closed = self.released(who), bool(state["state"] == "closed")
            # A call that was under way when the breaker opened says nothing new about it.
            opens = trying or (closed and int(state["failures"]) >= breaker.failures)
            if opens:
                state |= {"state": "open", "until": self._clock.wall_us() + round(breaker.reset_s * 1e6)}
            if opens and closed and breaker.mode:
                state |= {"mode": breaker.mode, "opened": self._ledger.count}
            self._put(state)
            return opens and closed

    def passed(self) -> None:
        """The tool has answered."""
        with self._notes.lock:
            self._trying = None
            if self.state["failures"]:
                self._put({"state": "closed", "failures": 0})

    def released(self, who: object) -> bool:
        """The attempt is over, perhaps without an answer. Whether it was the one that tried an open breaker."""
        with self._notes.lock:
            mine = self._trying is who
            self._trying = None if mine else self._trying
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


# -- notes of the line ----------------------------------------------------------------------------------------


_lock = threading.Lock()
_notes: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


class Remembered(NamedTuple):
    """One note: its place in the line, and its value."""

    number: int
    value: Any


class Notes:
    """The notes of one line."""

    def __init__(self, agent: Any) -> None:
        self._ledger, self._registry = agent.ledger, agent.registry
        self.lock = threading.RLock()
        self.gates: dict[str, Any] = {}  # breakers as they are in this process, by name
        self.modes: tuple[str, ...] = ()  # declared in this process
        self._newest: dict[tuple[str, str], tuple[int, rec.Value]] = {}
        for number, record in self._ledger.marked():
            if isinstance(record, rec.Note) and not record.run:
                self._newest[record.what, record.name] = number, record.value

    def find(self, what: str, name: str) -> Remembered | None:
        """The newest note of that name."""
        found = self._newest.get((what, name))
        return Remembered(found[0], fetch(found[1], self._ledger, self._registry, inert=True)) if found else None

    def get(self, what: str, name: str) -> Any:
        found = self.find(what, name)
        return found.value if found is not None else None

    def all(self, what: str) -> list[Any]:
        """The value of every note of a kind."""
        with self.lock:
            names = [name for kind, name in self._newest if kind == what]
        return [self.get(what, name) for name in names]

    def put(self, what: str, name: str, value: Any, *, at: int | None = None) -> None:
        """Write a note."""
        with self.lock:
            stowed = stow(value, self._registry)
            note = rec.Note(time.time_ns() // 1000 if at is None else at, "", what, name, stowed.value)
            self._newest[what, name] = self._ledger.append(note, stowed=stowed), stowed.value


def notes_of(agent: Any) -> Notes:
    """The notes of an agent's line."""
    with _lock:
        found = _notes.get(agent)
        if found is None:
            found = _notes[agent] = Notes(agent)
        return found


# -- the time -------------------------------------------------------------------------------------------------


class Clock:
    """The time. ``elapsed_s`` counts evenly, whatever happens to the date, also while the machine is asleep."""

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def elapsed_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        await sys.modules["asyncio"].sleep(seconds)


CLOCK = Clock()


def clock_of(agent: Any) -> Clock:
    """The agent's clock."""
    clock: Clock = getattr(agent, "clock", CLOCK)
    return clock
