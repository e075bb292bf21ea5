"""Which agent, run and effect the caller works for.

Owns the current effect and the count of what is active in this process. Must not know how calls go. What always holds:
a tool that changes something outside is never called unrecorded by accident: where an agent is active in the process
and the caller does not know which is its own, the call is refused.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from holdfast.errors import NoAgent
from holdfast.run.effects import Effect
from holdfast.run.positions import Lane, here, within

EFFECT: contextvars.ContextVar[Effect | None] = contextvars.ContextVar("holdfast.effect", default=None)
"""The effect whose tool is running."""

_active: set[object] = set()  # only ever changed by steps that cannot be cut, by a destructor for example
_FINDERS: list[Callable[[str, str], Lane | None]] = []


def find_by(finder: Callable[[str, str], Lane | None]) -> None:
    """Let a framework's connection say in which lane a tool is called, given its name and kind, where none is current.

    It knows by means of its own, such as a context that the framework keeps. None: it does not know.
    """
    if finder not in _FINDERS:
        _FINDERS.append(finder)


def begin(user: object) -> None:
    """From now on something is active in this process, until ``end``."""
    _active.add(user)


def end(user: object) -> None:
    _active.discard(user)


_PASSING: list[type[BaseException]] = []


def let_pass(*kinds: type[BaseException]) -> None:
    """Exceptions by which a framework stops a function on purpose, to go on later: to ask a person, for example.

    A tool that raises one has not done anything outside yet.
    """
    _PASSING.extend(kind for kind in kinds if kind not in _PASSING)


def passing() -> tuple[type[BaseException], ...]:
    return tuple(_PASSING)


@contextmanager
def active(lane: Lane) -> Iterator[None]:
    """Inside, the lane's agent is current here, and active in this process."""
    user = object()
    begin(user)
    lane.mine()  # whoever begins is its owner, not whoever calls first
    token = EFFECT.set(None)  # inside a tool that uses an agent of its own
    try:
        with within(lane):
            yield
    finally:
        EFFECT.reset(token)
        end(user)


def place(name: str, kind: str) -> Lane | None:
    """The lane in which a tool is called now; None when it is an ordinary function."""
    lane = here()
    if lane is None:
        lane = next((found for finder in _FINDERS if (found := finder(name, kind)) is not None), None)
    if lane is None:
        if _active and kind != "read":
            raise NoAgent(
                f"{name} was called in a thread that does not know for which agent; it was not called",
                hint="Hand the context over: pool.submit(agent.context().run, f), or in a framework's own loop"
                " pool.submit(contextvars.copy_context().run, f). To call it unrecorded on purpose,"
                f" use {name}.direct(...).",
            )
        return None
    if lane.scope.ended:
        raise NoAgent(
            f"{name} was called after its run had ended; it was not called",
            hint="Wait for all tasks and threads of a run before it returns.",
        )
    return lane


def current() -> Any:
    """The agent that the caller works for."""
    lane = here()
    if lane is None:
        raise NoAgent("no agent is current here", hint="Use `with agent:` or `agent.run(...)`.")
    return lane.scope.agent.handle


def effect() -> Effect:
    """The effect whose tool is running: its key, its arguments, its progress.

    In a tool that is called as an ordinary function it is one that is written down nowhere, with a key of its own.
    """
    found = EFFECT.get()
    if found is None:
        unrecorded: dict[str, Any] = {"tool": "", "kind": "", "path": "", "run": "", "status": "unrecorded"}
        found = Effect(key=uuid4().hex, args=dict, report=lambda _value: None, **unrecorded)
    return found
