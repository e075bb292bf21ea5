"""What an agent has around its state: the time, chance, signals, handles, secrets, and modes: how well it is doing.

Owns these methods of the handle, and which mode holds. What the others do is the business of the modules that they
name; what a mode means is the program's. What always holds: in a run, what would differ the next time is recorded; the
mode is folded from the notes of the line: the one that was set by hand, or a worse one of a breaker that opened since
and is not closed again.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.agent.names import check_text
from holdfast.errors import BadOption
from holdfast.run import calls, waiting
from holdfast.run.arguments import ASKED, Secret, secret
from holdfast.run.resilience import clock_of, notes_of
from holdfast.run.scope import EFFECT, current, here
from holdfast.run.tools import Tool, tool

if TYPE_CHECKING:
    from holdfast.agent.branch import BranchWriter
    from holdfast.run.host import AgentHost
    from holdfast.run.resources import Resource

H = TypeVar("H")
G = TypeVar("G")


class Surroundings:
    """The part of an agent's handle that is not about its history."""

    if TYPE_CHECKING:

        @property
        def _host(self) -> AgentHost: ...

        def _check_writer(self) -> BranchWriter: ...

    # -- what differs each time, recorded -------------------------------------------------------------------

    def now(self) -> datetime:
        """The time (UTC). In a run it is the recorded one when that is executed again."""
        moment: datetime = calls.now(self._now, (), {})
        return moment

    @cached_property
    def _now(self) -> Tool:
        what = copy.copy(_NOW)
        what.function = lambda: datetime.fromtimestamp(clock_of(self._host).wall_us() / 1e6, UTC)
        return what

    def random(self) -> float:
        """A random number from 0 to 1, recorded in a run."""
        return _random()

    def uuid(self) -> uuid.UUID:
        """A new UUID, recorded in a run."""
        return _uuid()

    def sleep(self, seconds: float = 0.0, *, days: float = 0.0, hours: float = 0.0, minutes: float = 0.0) -> Any:
        """Sleep; in async code, await it. A run that is interrupted meanwhile sleeps on for what is left."""
        return waiting.sleep(self._host, seconds + 60 * (minutes + 60 * (hours + 24 * days)))

    def wait_for(self, name: str, timeout_s: float | None = None) -> Any:
        """Wait in a run for a signal (``store.signal``); its value. In async code, await it. Raises TimeoutError."""
        return waiting.wait_for(self._host, name, timeout_s)

    # -- what is kept along with the state, or never --------------------------------------------------------------

    def resource(
        self,
        name: str,
        *,
        open: Callable[..., H],
        close: Callable[[H], object] | None = None,
        describe: Callable[[H], Any] | None = None,
        fork: Callable[[Any], Any] | None = None,
    ) -> Resource[H]:
        """Declare a handle that cannot be saved. It is opened when it is first used, after a restore too.

        With ``describe``, ``open(description)`` gets what ``describe(handle)`` last said on this branch, or None.
        ``fork(description)`` makes the description for a new branch; without it a branch begins with None.
        """
        self._check_writer()
        return self._host.companions.resource(name, open, close, describe, fork)

    def generator(self, name: str, of: G) -> G:
        """Keep the state of a random generator with the agent's: ``random``, ``random.Random()``, NumPy's.

        It goes where the state goes: a branch draws the numbers that the line draws that it left.
        """
        self._check_writer()
        return self._host.companions.generator(name, of)

    # -- modes ------------------------------------------------------------------------------------------------

    def declare_modes(self, *names: str) -> None:
        """The modes that this agent knows, from the best to the worst; the first is the usual one."""
        if not names or len(set(names)) != len(names):
            raise BadOption("modes are one or more different names, from the best to the worst")
        for name in names:
            check_text(name, "the name of a mode", MODE_MAX)
        notes_of(self._host).modes = names

    @property
    def mode(self) -> str:
        """How well things are: one of the declared modes, set by hand or by a breaker that opened.

        In a run it is a recorded answer, because the program may go another way by it. What is set by hand holds until
        it is set again, or a breaker that opens later asks for a worse one.
        """
        return _read_mode() if self._in_run() else _mode_of(self._host)

    @mode.setter
    def mode(self, name: str) -> None:
        self._check_writer()
        declared = notes_of(self._host).modes
        if name not in declared and name != NORMAL:
            raise BadOption(
                f"mode {name!r} is not declared",
                hint=f"Use one of {', '.join(declared)}." if declared else "Declare it: agent.declare_modes(...).",
            )
        if self._in_run():
            _write_mode(name, "")
        else:
            _set(self._host, name)

    def _in_run(self) -> bool:
        lane = here()
        return lane is not None and bool(lane.scope.run_id) and self._host is lane.scope.agent and EFFECT.get() is None

    def secret(self, name: str, value: Any = ASKED) -> Secret | None:
        """A secret that this process was given, or with ``value`` give it one. Secrets are never stored."""
        return secret(self._host, name, value)


@tool(name="holdfast.now", effect="read")
def _now() -> datetime:  # type: ignore[empty-body] # each agent has a clock of its own
    """How the time is recorded."""


_NOW: Tool = _now.tool


@tool(name="holdfast.random", effect="read")
def _random() -> float:
    import random

    return random.random()  # noqa: S311 - nothing secret depends on it


@tool(name="holdfast.uuid", effect="read")
def _uuid() -> uuid.UUID:
    return uuid.uuid4()


# -- modes ----------------------------------------------------------------------------------------------------


NORMAL = "normal"
MODE_MAX = 100
_WHO = "agent"


def _mode_of(agent: Any) -> str:
    """The mode that holds now."""
    notes = notes_of(agent)
    by_hand = notes.find("mode", _WHO)
    mode = str(by_hand.value["mode"]) if by_hand is not None else (notes.modes or (NORMAL,))[0]
    for breaker in notes.all("breaker").values():
        state = breaker.value
        set_since = by_hand is None or state.get("opened", 0) >= by_hand.number
        if state["state"] != "closed" and state.get("mode") and set_since:
            mode = max(mode, state["mode"], key=lambda name: _rank(notes.modes, name))
    return mode


def _rank(modes: tuple[str, ...], name: str) -> int:
    """The place of a mode. One that is not declared in this process is worse than all: somebody meant something."""
    if name in modes:
        return modes.index(name)
    return 0 if name == NORMAL else len(modes)


@tool(name="holdfast.mode", effect="read")
def _read_mode() -> str:
    return _mode_of(current()._host)


@tool(name="holdfast.set_mode", effect="read")
def _write_mode(mode: str, why: str = "") -> None:
    _set(current()._host, mode, why)


def _set(agent: Any, mode: str, why: str = "") -> None:
    notes_of(agent).put("mode", _WHO, {"mode": mode, "why": why})
    agent.ledger.flush()
