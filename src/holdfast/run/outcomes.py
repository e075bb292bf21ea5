"""Outcomes: from what a record says to what the program gets, and back.

Owns how exceptions are recorded and made again, and the errors that speak of recorded calls. Must not write records.
What always holds: an exception is made from a class that the tool declared, never from a name in a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.errors import BreakerOpen, Diverged, HoldfastError, ResultLost, ToolFailed, Unencodable
from holdfast.run import records as rec
from holdfast.run import secrets
from holdfast.run.arguments import Stowed, fetch, stow
from holdfast.run.scope import Scope
from holdfast.run.tools import Tool

MESSAGE_MAX = 10_000
"""Characters of an exception's message that are kept."""
REFUSED = "holdfast.BreakerOpen"
"""Stands where the name of a declared exception does: the tool was not called."""


class Local:
    """Nodes that are on their way to disk."""

    def __init__(self, stowed: Stowed | None) -> None:
        self._blocks = {**stowed.nodes, **stowed.chunks} if stowed is not None else {}

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return {digest: self._blocks[digest] for digest in digests}

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self._blocks[digest] for digest in digests)


def give(scope: Scope, tool: Tool, path: str, outcome: rec.Done | rec.Decision, stowed: Stowed | None = None) -> Any:
    """What the record says: a value, or an exception."""
    blocks: Any = Local(stowed) if stowed is not None else scope.ledger
    if isinstance(outcome, rec.Done):
        if outcome.how == "error" and outcome.fault is not None:
            raise failure(tool, path, outcome.fault, fetch(outcome.fault[3], blocks, scope.registry))
        if outcome.how == "lost":
            raise lost(tool.name, path, outcome.fault[2] if outcome.fault is not None else "")
    return fetch(outcome.value, blocks, scope.registry)


def fault_of(tool: Tool, error: BaseException, scope: Scope) -> tuple[rec.Fault, Stowed | None]:
    """An exception as it is recorded. Its arguments are kept only where the tool declared it."""
    if isinstance(error, BreakerOpen):
        named = stow([error.breaker, error.until], scope.registry)
        return (REFUSED, type(error).__qualname__, error.message, named.value), named
    declared = tool.declared(error)
    stowed = None
    if declared:
        try:
            stowed = stow(secrets.scrub(scope.agent, error.args, f"an error of {tool.name}"), scope.registry)
        except Unencodable:
            stowed = stow((_message(error, tool, scope),), scope.registry)
    message = _message(error, tool, scope)
    return (declared, type(error).__qualname__, message, stowed.value if stowed is not None else None), stowed


def _message(error: BaseException, tool: Tool, scope: Scope) -> str:
    text = (error.message if isinstance(error, HoldfastError) else str(error))[:MESSAGE_MAX]
    return str(secrets.scrub(scope.agent, text, f"an error of {tool.name}"))


def failure(tool: Tool, path: str, fault: rec.Fault, args: Any) -> BaseException:
    """The exception that a recorded failure is raised as."""
    declared, kind, message, _ = fault
    if declared == REFUSED and isinstance(args, list) and len(args) == 2:
        return BreakerOpen(message, tool=tool.name, breaker=args[0], until=args[1])
    for known in tool.raises:
        if declared and known.__qualname__ == declared:
            return _made(known, args if isinstance(args, tuple) else (message,))
    return ToolFailed(
        f"{tool.name} failed: {kind}: {message}" if message else f"{tool.name} failed: {kind}",
        tool=tool.name,
        error_type=kind,
        path=path,
    )


def _made(kind: Callable[..., BaseException], args: tuple[Any, ...]) -> BaseException:
    """An instance of a declared exception. The class is the program's own, never one that the record names."""
    try:
        return kind(*args)
    except TypeError:  # its constructor wants something else than what ends up in `args`
        made: BaseException = BaseException.__new__(kind, *args)  # type: ignore[arg-type]
        made.args = args
        return made


def lost(tool: str, path: str, why: str) -> ResultLost:
    return ResultLost(
        f"{tool} was called and is done, but its result cannot be saved: {why}",
        tool=tool,
        path=path,
        hint="The call is not repeated. Return something that can be saved from now on.",
    )


def diverged(path: str, expected: str, actual: str) -> Diverged:
    return Diverged(
        f"the program does not do what is recorded at {path}\n  expected: {expected}\n  actual:   {actual}",
        path=path,
        expected=expected,
        actual=actual,
        hint="Run the code that made the record, or mark an intended change with agent.version(name).",
    )
