"""What the shell offers on TAB: agents, branches and tags of the store at hand.

It runs while somebody types, so it reads little and never complains. Only the shell's script calls it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

    from holdfast import Store

# A shell that lists more than this helps nobody.
_OFFERED = 200


@contextmanager
def _store(context: CompletionContext) -> Iterator[Store]:
    import holdfast

    given = context.get("store")
    place = given.raw if given is not None and given.raw else None
    with holdfast.open(place, create=False, readonly=True, inert=True) as store:
        yield store


def agents(context: CompletionContext) -> list[str]:
    """The names of the store's agents that begin as what is typed."""
    return _agents(context, context.incomplete)


def _agents(context: CompletionContext, begins: str) -> list[str]:
    with suppress(HoldfastError, OSError), _store(context) as store:
        found = store.agents(f"{glob.escape(begins)}*", limit=_OFFERED)
        return [name for info in found if (name := _offer(info.name))]
    return []


def revisions(context: CompletionContext) -> list[str]:
    """Agents; after ``NAME@`` that agent's branches and tags."""
    name, at, _ = context.incomplete.rpartition("@")
    offered = agents(context)
    if at and name in _agents(context, name):
        offered = [f"{name}@{ref}" for ref in _refs(context, name)]
    return offered


def refs(context: CompletionContext) -> list[str]:
    """Branches and tags of the agent that stands before on the line."""
    for argument in ("name", "agent"):
        given = context.get(argument)
        if given is not None and given.raw:
            return _refs(context, given.raw)
    return []


def dumps(context: CompletionContext) -> list[str]:
    """The names of the dumps at hand, the newest first."""
    from holdfast import crash

    given = context.get("store")
    with suppress(HoldfastError, OSError):
        found = crash.dumps(crash.folder_of(given.raw if given is not None and given.raw else None))
        return [name for path in found[:_OFFERED] if (name := _offer(path.name))]
    return []


def _refs(context: CompletionContext, name: str) -> list[str]:
    with suppress(HoldfastError, OSError), _store(context) as store:
        agent = store.agent(store.resolve(name)[0], create=False, readonly=True)
        # A revision is split at its last "@", so such a name could not be given.
        return [ref for known in (*agent.branches(), *agent.tags()) if (ref := _offer(known)) and "@" not in ref][
            :_OFFERED
        ]
    return []


def _offer(name: str) -> str:
    """The name, or nothing when it has characters that must not reach a command line by themselves."""
    return name if name.isprintable() else ""
