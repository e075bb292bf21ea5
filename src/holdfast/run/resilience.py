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
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct

from holdfast.codec.values import decode
from holdfast.errors import BadOption, BreakerOpen
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.past import Past

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


# -- notes of the line ----------------------------------------------------------------------------------------


_lock = threading.Lock()
_notes: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


class Remembered(Struct, frozen=True):
    """One note: its place in the line, when it was written, its value."""

    number: int
    at: int
    value: Any


class Notes:
    """The notes of one line."""

    def __init__(self, agent: Any) -> None:
        self._ledger, self._registry = agent.ledger, agent.registry
        self.lock = threading.RLock()
        self.gates: dict[str, Any] = {}  # breakers as they are in this process, by name
        self.modes: tuple[str, ...] = ()  # declared in this process
        self._newest: dict[tuple[str, str], tuple[int, rec.Note, Any]] = {}
        for number, record in self._ledger.marked():
            if isinstance(record, rec.Note) and not record.run:
                self._newest[record.what, record.name] = (number, record, self)

    def find(self, what: str, name: str) -> Remembered | None:
        """The newest note of that name."""
        with self.lock:
            found = self._newest.get((what, name))
            if found is None:
                return None
            number, note, value = found
            if value is self:  # not read yet
                value = fetch(note.value, self._ledger, self._registry, inert=True)
                self._newest[what, name] = (number, note, value)
            return Remembered(number, note.at, value)

    def get(self, what: str, name: str) -> Any:
        found = self.find(what, name)
        return found.value if found is not None else None

    def all(self, what: str) -> dict[str, Remembered]:
        """Every note of a kind, by name."""
        with self.lock:
            names = [name for kind, name in self._newest if kind == what]
        return {name: found for name in names if (found := self.find(what, name)) is not None}

    def put(self, what: str, name: str, value: Any, *, at: int | None = None) -> None:
        """Write a note."""
        with self.lock:
            stowed = stow(value, self._registry)
            note = rec.Note(time.time_ns() // 1000 if at is None else at, "", what, name, stowed.value)
            number = self._ledger.append(note, stowed=stowed)
            self._newest[what, name] = (number, note, value)


def notes_of(agent: Any) -> Notes:
    """The notes of an agent's line."""
    with _lock:
        found = _notes.get(agent)
        if found is None:
            found = _notes[agent] = Notes(agent)
        return found


def since_of(past: Past, checkpoint: str, count: int) -> int:
    """The position up to which the program knew what had happened when this checkpoint was made.

    A checkpoint that a tool or a breaker took, not the program, says nothing about what the program had made of the
    calls before it: they can still be claimed.
    """
    note = past.notes.get(("auto", checkpoint))
    if note is None or not isinstance(note.value, bytes):
        return count
    since = decode(note.value, inert=True)
    return since if type(since) is int else count


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
