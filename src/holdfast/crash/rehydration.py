"""Starting an agent again from the checkpoint that a dump names, on a branch of its own.

Owns which agent and checkpoint of a dump are meant. Must not know how branches are made. Holds always: what a dump says
is a claim: the store that is worked on is the caller's, never one that the dump names, and the checkpoint must be in
the history of the agent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, strftime

from holdfast.agent import crashes
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.store import Store
from holdfast.crash import kinds
from holdfast.crash.dump import Dump
from holdfast.crash.records import as_text
from holdfast.errors import NotInDump

_ID = re.compile(r"[0-9a-f]{16,128}")
_NAMED = 10  # agents that an error names
_LATEST = 2**33  # seconds since 1970: a later time is nonsense


@dataclass(frozen=True)
class Standing:
    """Where an agent stood when the dump was taken, as the dump has it."""

    agent: str
    branch: str
    checkpoint: str  # its id, "" when there was none
    store: str
    dirty: bool


@dataclass(frozen=True)
class Rehydrated:
    """A branch that goes on from a crash. ``unsaved``: the state in the dump had changes that no checkpoint has."""

    agent: str
    branch: str
    checkpoint: Checkpoint
    dump: str
    unsaved: bool


def standings(dump: Dump) -> list[Standing]:
    """The agents that the dump tells of."""
    found = []
    for name, data in dump.extras(kinds.AGENT).items():
        if isinstance(data, dict):
            agent = as_text(data.get("agent")) or name.partition("@")[0]
            checkpoint = as_text(data.get("checkpoint"))
            found.append(
                Standing(
                    agent,
                    as_text(data.get("branch")) or "main",
                    checkpoint if _ID.fullmatch(checkpoint) else "",
                    as_text(data.get("store")),
                    data.get("dirty") is True,
                )
            )
    return found


def choose(dump: Dump, agent: str | None = None) -> Standing:
    """The one that is meant: ``NAME`` or ``NAME@BRANCH``, or the only one there is."""
    every = standings(dump)
    meant = [one for one in every if agent in (None, one.agent, f"{one.agent}@{one.branch}")]
    if len(meant) == 1:
        return meant[0]
    names = ", ".join(f"{one.agent}@{one.branch}" for one in every[:_NAMED])
    if not every:
        raise NotInDump("the dump tells of no agent", hint="The process had none open, or its part was cut.")
    if not meant:
        raise NotInDump(f"the dump does not tell of an agent {agent!r}", hint=f"It tells of: {names}")
    raise NotInDump(f"the dump tells of {len(meant)} agents that may be meant", hint=f"Name one of: {names}")


def rehydrate(dump: Dump, store: Store, agent: str | None = None, *, branch: str | None = None) -> Rehydrated:
    """Begin a branch where the dump says that the agent stood, and link the dump from its history."""
    stood = choose(dump, agent)
    if not stood.checkpoint:
        raise NotInDump(
            f"{stood.agent} had no checkpoint when the dump was taken", hint="It has nothing to go back to."
        )
    new = branch or _free(store, stood.agent, dump)
    name = _link(dump.path, Path(store.place))
    checkpoint = crashes.take_up(store, stood.agent, stood.branch, stood.checkpoint, new, name)
    return Rehydrated(stood.agent, new, checkpoint, name, stood.dirty)


def _free(store: Store, agent: str, dump: Dump) -> str:
    """A name for the branch that nothing has yet: ``crash-20300501T120000Z``."""
    at = dump.at if 0 < dump.at < _LATEST else 0
    wanted = "crash-" + strftime("%Y%m%dT%H%M%SZ", gmtime(at))
    number = 1
    while crashes.is_taken(store, agent, wanted if number == 1 else f"{wanted}-{number}"):
        number += 1
    return wanted if number == 1 else f"{wanted}-{number}"


def _link(path: Path, store: Path) -> str:
    """How a history names the dump: by its name alone in the store's own folder, else by its path."""
    whole = path.resolve()
    return path.name if whole.parent == (store / "dumps").resolve() else str(whole)
