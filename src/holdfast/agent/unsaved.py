"""Changes that no checkpoint has, when whoever made them lets go of their agent: finding them, and saying so.

Owns what is said, and of what. Must not know who lets go. What always holds: it is said after everything is let go, and
whatever goes wrong here, that is done; of one state it is said once; where an exception ends the work, that is the
message, and the log has ours.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.agent.metadata import caller
from holdfast.agent.names import full_name, is_bookkeeping
from holdfast.codec.state import Reader
from holdfast.errors import HoldfastError, Unencodable, UnknownAgent, UnsavedChanges, format_path

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent

OURS = "holdfast."
"""How sections begin that follow from the use of the agent: of its random generators, for example."""

_SHOWN = 3
_SHOWN_CHARACTERS = 100
_AT_EXIT_S = 1.0
"""How long the end of the program waits for a thread that is changing a state."""

log = logging.getLogger("holdfast.agent")


class Lost(NamedTuple):
    """An agent, and the first places of its state that no checkpoint has as they are."""

    agent: str
    where: str
    handle: Agent
    digest: str  # of the state; empty where nobody can tell
    late_s: float | None = None  # since when its policy had asked for a checkpoint in vain


def let_go(agents: Iterable[Agent], ended: str, work: Callable[[], None]) -> None:
    """Do ``work``, which lets go of these agents, then say what that has lost."""
    lost: list[Lost] = []
    try:
        lost = [one for agent in agents if (one := found(agent)) is not None]
    finally:
        work()
    for one in lost:
        say(f"{ended}, and changes of {one.agent} are lost", one, sys.exception())


def said_at_exit(agents: Iterable[Agent]) -> None:
    """The program ends, and has closed none of these."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # at a prompt that was long ago
    for agent in agents:
        lost = None
        if agent._document.lock.acquire(timeout=_AT_EXIT_S):
            try:
                lost = found(agent)
            finally:
                agent._document.lock.release()
        if lost is not None:
            say(f"the program ended, and changes of {lost.agent} are lost", lost, error)


def say(what: str, lost: Lost, error: BaseException | None) -> None:
    """Warn, with the line of the program that led here; or tell the log, where an exception is the message."""
    lost.handle._said = lost.digest or lost.handle._said
    text = f"{what}{f': {lost.where}' if lost.where else ''}. Call agent.checkpoint() first."
    if lost.late_s is not None:
        text += f" Its policy found no safe point for {lost.late_s:.3g} s: call agent.step() in its loop."
    if error is not None:  # which would be hidden where warnings are errors
        log.warning("%s", text)
    elif (frame := caller()) is None:
        warnings.warn(text, UnsavedChanges, stacklevel=sys.getrecursionlimit())
    else:
        about = frame.f_globals
        name, known = about.get("__name__"), about.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, UnsavedChanges, frame.f_code.co_filename, frame.f_lineno, name, known)


def found(agent: Agent) -> Lost | None:
    """What of an agent is not saved; None where that is nothing, or was said before.

    Nothing is where others write the agent now, or it is there no more: whoever was to save it has been told.
    """
    writer, document = agent._writer, agent._document
    if writer is None or agent.closed or agent._db.engine.poison is not None:
        return None
    places: list[str] = []
    now = ""
    try:
        with document.lock:
            if not document.changed_since(writer.under_way) or agent._is_left():
                return None
            if (now := agent.digest) == agent._said:
                return None
            operations = document.capture(writer.under_way).operations
            paths = [one.path for one in operations if not _is_ours(one.path[0])]
            if not paths:
                return None
            reader = Reader(document.told, document.registry, inert=None)
            places = list(dict.fromkeys(format_path(tuple(map(reader.key, path))) for path in paths))
        if agent._db.view.branch_at(agent._branch.b).generation != writer.generation:
            return None
    except UnknownAgent:
        return None
    except Unencodable as error:  # it would not have been saved, either
        places = [format_path(error.path)]
    except Exception:  # noqa: BLE001 - closing goes on, and whoever reads the state is told
        if not now:
            return None
    shown = [one if len(one) <= _SHOWN_CHARACTERS else f"{one[: _SHOWN_CHARACTERS - 1]}…" for one in places[:_SHOWN]]
    more = f" and {len(places) - _SHOWN:,} more" if len(places) > _SHOWN else ""
    name = full_name(agent.name, agent.branch_name)
    late_s = None
    with suppress(HoldfastError):  # the history could not be read: closing goes on
        late_s = agent._pace.late_s()
    return Lost(name, ", ".join(shown) + more, agent, now, late_s)


def _is_ours(section: str) -> bool:
    return is_bookkeeping(section) or section.startswith(OURS)
