"""What an agent has around its state: the time, chance, signals, handles, modes and secrets.

Owns these methods of the handle. What they do is the business of the modules that they name. What always holds: in a
run, what would differ the next time is recorded.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.run import calls, companions, modes, secrets, waiting
from holdfast.run.clock import clock_of
from holdfast.run.tools import Tool, tool

if TYPE_CHECKING:
    from holdfast.agent.branch import BranchWriter
    from holdfast.run.host import AgentHost
    from holdfast.run.resources import Resource

H = TypeVar("H")
G = TypeVar("G")
_ASKED: Any = object()


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
        how = waiting.asleep if waiting.on_loop() else waiting.sleep
        return how(self._host, _seconds(seconds, days, hours, minutes))

    def wait_for(self, name: str, timeout_s: float | None = None) -> Any:
        """Wait for a signal (``store.signal``) and give its value; in async code, await it. Raises TimeoutError."""
        how = waiting.await_for if waiting.on_loop() else waiting.wait_for
        return how(self._host, name, timeout_s)

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
        from holdfast.run import resources

        self._check_writer()
        self._host.along(companions.Resources)
        return resources.resource(self._host, name, open=open, close=close, describe=describe, fork=fork)

    def generator(self, name: str, of: G) -> G:
        """Keep the state of a random generator with the agent's: ``random``, ``random.Random()``, NumPy's."""
        from holdfast.run import generators

        self._check_writer()
        self._host.along(companions.Generators)
        generators.generator(self._host, name, of)
        return of

    # -- modes ------------------------------------------------------------------------------------------------

    def declare_modes(self, *names: str) -> None:
        """The modes that this agent knows, from the best to the worst; the first is the usual one."""
        modes.declare_modes(self._host, *names)

    @property
    def mode(self) -> str:
        """How well things are: one of the declared modes, set by hand or by a breaker that opened."""
        return modes.get_mode(self._host)

    @mode.setter
    def mode(self, name: str) -> None:
        self._check_writer()
        modes.set_mode(self._host, name)

    def secret(self, name: str, value: Any = _ASKED) -> secrets.Secret | None:
        """A secret that this process was given, or with ``value`` give it one. Secrets are never stored."""
        return secrets.secret(self._host, name) if value is _ASKED else secrets.secret(self._host, name, value)


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


def _seconds(seconds: float, days: float, hours: float, minutes: float) -> float:
    return seconds + 60 * (minutes + 60 * (hours + 24 * days))
