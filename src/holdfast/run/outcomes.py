"""Outcomes: from what a record says to what the program gets, and back; exceptions as values.

Owns what is kept of an exception that a tool declared, how it is made again, and the errors that speak of recorded
calls. Must not write records. What always holds: an exception is made of a class that the program has, one that was
declared or one derived from it, found among those that are loaded; nothing is imported, and no constructor runs: what
it had set up is among the attributes. What its caller gets the first time is made of the same parts as when the run is
executed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

from holdfast.codec.types import Registry, default_name
from holdfast.codec.values import encode, outline
from holdfast.errors import (
    BreakerOpen,
    Cancelled,
    Diverged,
    HoldfastError,
    ResultLost,
    ToolFailed,
    Unencodable,
    command,
)
from holdfast.run import records as rec
from holdfast.run.arguments import Blocks, Stowed, exposed, fetch, leaked, scrub, stow, stow_encoded

if TYPE_CHECKING:
    from holdfast.run.scope import Scope
    from holdfast.run.tools import Tool

MESSAGE_MAX = 10_000
"""Characters of an exception's message that are kept."""
REFUSED = "holdfast.BreakerOpen"
"""Stands where the name of a declared exception does: the tool was not called."""
STOPPED = "holdfast.Cancelled"
"""The same: nor was this one, the run was told to stop."""


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
    if isinstance(outcome, rec.Done) and outcome.how in {"error", "stopped"} and outcome.fault is not None:
        error = failure(tool, path, outcome.fault, fetch(outcome.fault[3], blocks, scope.registry))
        if isinstance(error, Cancelled) and outcome.how == "stopped":
            run: Any = scope  # nobody else is told to stop
            run.hears(error)
        raise error
    return fetch(outcome.value, blocks, scope.registry)


def fault_of(tool: Tool, error: BaseException, scope: Scope) -> tuple[rec.Fault, Stowed | None]:
    """An exception as it is recorded. What is in it is kept only where the tool declared it."""
    if isinstance(error, BreakerOpen):
        named = stow([error.breaker, error.until], scope.registry)
        return (REFUSED, type(error).__qualname__, error.message, named.value), named
    declared = tool.declared(error)
    stowed = None
    what = f"an error of {tool.name}"
    message = str(scrub(scope.agent, said(error)[:MESSAGE_MAX], what))

    def keep(value: Any) -> Any:
        clean = scrub(scope.agent, value, what)
        if name := leaked(scope.agent, encode(clean, scope.registry)):
            raise exposed(name, what)
        return clean

    if declared:
        try:
            stowed = stow(parts_of(error, keep), scope.registry)
        except (Unencodable, RecursionError):  # groups in groups without an end
            stowed = stow((message,), scope.registry)
    return (declared, type(error).__qualname__, message, stowed.value if stowed is not None else None), stowed


def brief_fault(agent: Any, error: BaseException, what: str) -> rec.Fault:
    """An exception by its type and its message alone."""
    kind = error.error_type if isinstance(error, ToolFailed) else type(error).__qualname__
    return "", kind, str(scrub(agent, said(error)[:MESSAGE_MAX], what)), None


def failure(tool: Tool, path: str, fault: rec.Fault, parts: Any) -> BaseException:
    """The exception that a recorded failure is raised as."""
    declared, kind, message, _ = fault
    if declared == REFUSED and isinstance(parts, list) and len(parts) == 2:
        return BreakerOpen(message, tool=tool.name, breaker=parts[0], until=parts[1])
    if declared == STOPPED and isinstance(parts, list) and len(parts) == 2:
        return Cancelled(message, by=parts[0], undo=parts[1])
    for known in tool.raises:
        if declared and declared_name(known, tool.raises) == declared:
            return _made(tool, path, class_of(known, kind, parts), fault, parts)
    return _failed(tool, path, kind, message)


def _made(tool: Tool, path: str, kind: type[BaseException], fault: rec.Fault, parts: Any) -> BaseException:
    """An instance of a class of the program, or, where none can be made, what stands for those it does not have."""
    try:
        return rebuilt(kind, parts)
    except Exception:  # noqa: BLE001 - the class has changed since, or its fields are not to be set
        return _failed(tool, path, fault[1], fault[2])


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
        data, names = outline(scrub(scope.agent, value, what), scope.registry)
        if leaked(scope.agent, data):
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


def lost(tool: str, path: str, why: str, *effect: str) -> ResultLost:
    """``effect`` is the agent's name and the id by which a person can settle it."""
    hint = "The call is not repeated. Register the class that is named, and run it again"
    if effect:
        hint += f"; or say what it returned: {command('effects', 'resolve', *effect)} --done JSON --why TEXT"
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


# -- exceptions as values, and back ---------------------------------------------------------------------------


Keep = Callable[[Any], Any]
"""A value as it may be recorded. Raises where it may not, or cannot."""

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has rebuilt
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)


def said(error: BaseException, depth: int = 4) -> str:
    """What an exception says, without a hint; a group also what those in it say, as its own text only counts them."""
    text = _text(error.message if isinstance(error, HoldfastError) and error.message else error)
    if not isinstance(error, BaseExceptionGroup) or not depth:
        return text
    return f"{text}: {'; '.join(sorted(f'{type(one).__name__}: {said(one, depth - 1)}' for one in error.exceptions))}"


def told(error: BaseException) -> str:
    """Its type and all that it says."""
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(thing: Any) -> str:
    """As ``str()``, which may raise for a class that somebody else has written."""
    try:
        return str(thing)
    except Exception:  # noqa: BLE001 - as Python shows it in a traceback
        return "<exception str() failed>"


# -- taking it apart ------------------------------------------------------------------------------------------


def parts_of(error: BaseException, keep: Keep) -> dict[str, Any]:
    """What is kept of an exception: its arguments and its attributes. What cannot be kept is left out."""
    parts: dict[str, Any] = {"module": type(error).__module__}
    try:
        parts["args"] = keep(error.args)
    except Exception:  # noqa: BLE001 - whatever the reason, there is the text
        parts["args"] = (keep(said(error)),)
    attributes = {}
    for name, value in _attributes(error):
        try:
            attributes[name] = keep(value)
        except Exception:  # noqa: BLE001, S112 - it is left out
            continue
    if attributes:
        parts["attributes"] = attributes
    return parts


def _attributes(error: BaseException) -> Iterator[tuple[str, Any]]:
    yield from vars(error).items()
    for name, slot in _slots(type(error)).items():
        try:
            value = slot.__get__(error)
        except AttributeError:
            continue
        if value is not None:
            yield name, value


def _slots(kind: type[BaseException]) -> dict[str, Any]:
    """Attributes that are not in an instance's dict: those of built-in classes, and ``__slots__``."""
    found: dict[str, Any] = {}
    for one in kind.__mro__:
        if one is not BaseException:
            for name, slot in vars(one).items():
                if isinstance(slot, _SLOTS) and not name.startswith("__"):
                    found.setdefault(name, slot)
    return found


# -- putting it together ----------------------------------------------------------------------------------------


def rebuilt(kind: type[BaseException], parts: Any) -> BaseException:
    """An exception of this class, from its parts."""
    error = _blank(kind, parts["args"])
    slots = _slots(kind)
    for name, value in parts.get("attributes", {}).items():
        if name not in slots:
            error.__dict__[name] = value
            continue
        try:
            slots[name].__set__(error, value)
        except (AttributeError, TypeError):  # one that follows from the arguments
            continue
    return error


def _blank(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An instance whose constructor has not run."""
    for one in kind.__mro__:
        if one.__flags__ & _HEAP or not issubclass(one, BaseException):
            continue
        try:
            error = one.__new__(kind, *args)
        except TypeError:  # another base has fields of its own, so it has to begin with that one
            continue
        error.args = args
        return error
    raise TypeError(f"no {kind.__qualname__} can be rebuilt of {len(args)} arguments")


# -- which class ------------------------------------------------------------------------------------------------


def class_of(known: type[BaseException], name: str, parts: Any) -> type[BaseException]:
    """The class of that name among a declared one and those derived from it; the declared one when there is none."""
    if known.__qualname__ == name:
        return known
    found = [one for one in _derived(known) if one.__qualname__ == name]
    same = [one for one in found if one.__module__ == parts["module"]]
    if same or len(found) == 1:
        return (same or found)[-1]  # the newest, where a module was loaded again
    return known


def declared_name(kind: type[BaseException], among: Sequence[type[BaseException]]) -> str:
    """What one of the declared classes is called in a record."""
    same = {other for other in among if other.__qualname__ == kind.__qualname__}
    return kind.__qualname__ if len(same) == 1 else f"{kind.__module__}.{kind.__qualname__}"


def _derived(kind: type[BaseException]) -> Iterable[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from _derived(one)
