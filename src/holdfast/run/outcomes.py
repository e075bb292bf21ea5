"""Outcomes: from what a record says to what the program gets, and back.

Owns which exceptions are recorded with all that is in them, and the errors that speak of recorded calls. Must not write
records. What always holds: an exception belongs to a class that the tool declared; what its caller gets the first time
is made of the same parts as when the run is executed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.codec.types import Registry, default_name
from holdfast.codec.values import encode, outline
from holdfast.errors import BreakerOpen, Diverged, HoldfastError, ResultLost, ToolFailed, Unencodable
from holdfast.run import faults, secrets
from holdfast.run import records as rec
from holdfast.run.arguments import Blocks, Stowed, fetch, stow, stow_encoded
from holdfast.run.tools import Tool

if TYPE_CHECKING:
    from holdfast.run.scope import Scope

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
    if isinstance(outcome, rec.Done) and outcome.how == "error" and outcome.fault is not None:
        raise failure(tool, path, outcome.fault, fetch(outcome.fault[3], blocks, scope.registry))
    return fetch(outcome.value, blocks, scope.registry)


def fault_of(tool: Tool, error: BaseException, scope: Scope) -> tuple[rec.Fault, Stowed | None]:
    """An exception as it is recorded. What is in it is kept only where the tool declared it."""
    if isinstance(error, BreakerOpen):
        named = stow([error.breaker, error.until], scope.registry)
        return (REFUSED, type(error).__qualname__, error.message, named.value), named
    declared = tool.declared(error)
    stowed = None
    what = f"an error of {tool.name}"
    message = str(secrets.scrub(scope.agent, faults.said(error)[:MESSAGE_MAX], what))

    def keep(value: Any) -> Any:
        clean = secrets.scrub(scope.agent, value, what)
        if name := secrets.leaked(scope.agent, encode(clean, scope.registry)):
            raise secrets.exposed(name, what)
        return clean

    if declared:
        try:
            stowed = stow(faults.parts_of(error, keep), scope.registry)
        except (Unencodable, RecursionError):  # groups in groups without an end
            stowed = stow((message,), scope.registry)
    return (declared, type(error).__qualname__, message, stowed.value if stowed is not None else None), stowed


def failure(tool: Tool, path: str, fault: rec.Fault, parts: Any) -> BaseException:
    """The exception that a recorded failure is raised as."""
    declared, kind, message, _ = fault
    if declared == REFUSED and isinstance(parts, list) and len(parts) == 2:
        return BreakerOpen(message, tool=tool.name, breaker=parts[0], until=parts[1])
    for known in tool.raises:
        if declared and faults.named(known, tool.raises) == declared:
            return _made(tool, path, faults.class_of(known, kind, parts), kind, message, parts)
    return _failed(tool, path, kind, message)


def _made(
    tool: Tool, path: str, kind: type[BaseException] | None, name: str, message: str, parts: Any
) -> BaseException:
    """An instance of a class of the program, or, where none can be made, what stands for those it does not have."""

    def member(name: str, message: str, parts: Any) -> BaseException:
        classes = [faults.class_of(known, name, parts) for known in tool.raises]
        kind = next((one for one in classes if one.__qualname__ == name), None)
        if kind is None and parts["module"] == "builtins":
            kind = faults.builtin(name)
        return _made(tool, path, kind, name, message, parts)

    if kind is None:
        return _failed(tool, path, name, message)
    try:
        error = faults.made(kind, parts, message, member)
    except Exception:  # noqa: BLE001 - the class has changed since, or its fields are not to be set
        return _failed(tool, path, name, message)
    if isinstance(error, HoldfastError) and not isinstance(parts, dict):  # of a time when attributes were not kept
        error.message = message
    return error


def _failed(tool: Tool, path: str, kind: str, message: str) -> ToolFailed:
    return ToolFailed(
        f"{tool.name} failed: {kind}: {message}" if message else f"{tool.name} failed: {kind}",
        tool=tool.name,
        error_type=kind,
        path=path,
    )


# -- results that cannot be saved -----------------------------------------------------------------------------


def unsaved(value: Any, error: Unencodable, scope: Scope, what: str) -> tuple[rec.Value, rec.Fault, Stowed | None]:
    """What is kept of a result that cannot be saved: its outline, why, and the classes that are in the way."""
    why = str(error)[:MESSAGE_MAX]
    try:
        data, names = outline(secrets.scrub(scope.agent, value, what), scope.registry)
        if secrets.leaked(scope.agent, data):
            raise Unencodable("a secret is in it")
        kept, named = stow_encoded(data), stow(sorted(set(names)), scope.registry)
    except (Unencodable, RecursionError):
        return None, ("", type(error).__name__, why, None), None
    return kept.value, ("", type(error).__name__, why, named.value), together(kept, named)


def is_healed(done: rec.Done, blocks: Blocks, registry: Registry) -> bool:
    """Whether all classes that were in the way are registered by now, such that their fields are what was kept."""
    if done.value is None or done.fault is None:
        return False
    found = [registry.by_name(name) for name in fetch(done.fault[3], blocks, registry) or ["?"]]
    return all(
        one is not None and one.save is None and one.version == 1 and one.name == default_name(one.cls) for one in found
    )


def result_of(outcome: rec.Done | rec.Decision, blocks: Blocks, registry: Registry, *, inert: bool = False) -> Any:
    """What a call returned, as far as that is known. Of what could not be saved, what was kept, as inert data."""
    if isinstance(outcome, rec.Done) and outcome.how == "lost" and not is_healed(outcome, blocks, registry):
        registry, inert = Registry(), True
    return fetch(outcome.value, blocks, registry, inert=inert)


def lost(tool: str, path: str, why: str, effect: str = "") -> ResultLost:
    """``effect`` is the agent's name and the id by which a person can settle it."""
    hint = "The call is not repeated. Register the class that is named, and run it again"
    if effect:
        hint += f"; or say what it returned: holdfast effects resolve {effect} --done JSON --why TEXT"
    return ResultLost(
        f"{tool} was called and is done, but its result cannot be saved: {why}",
        tool=tool,
        path=path,
        hint=f"{hint}.",
    )


def together(*parts: Stowed | None) -> Stowed:
    """What goes to disk with several values."""
    there = [part for part in parts if part is not None]
    nodes = {digest: node for part in there for digest, node in part.nodes.items()}
    chunks = {digest: chunk for part in there for digest, chunk in part.chunks.items()}
    return Stowed(None, nodes, chunks)


def diverged(path: str, expected: str, actual: str, differs: Sequence[str] = ()) -> Diverged:
    """``differs`` are the places at which what was expected and what was found are not the same."""
    text = f"the program does not do what is recorded at {path}\n  expected: {expected}\n  actual:   {actual}"
    hint = "Run the code that made the record, or mark an intended change with agent.version(name)."
    if differs:
        text += f"\n  differs:  {'; '.join(differs)}"
        hint = f"Time or random between calls? Use agent.now(), agent.random() or agent.uuid(). Otherwise: {hint}"
    return Diverged(text, path=path, expected=expected, actual=actual, hint=hint)
