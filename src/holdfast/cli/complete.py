"""What the shell offers on TAB: agents, branches, tags and dumps of the store at hand.

It runs while somebody types, so it reads little and never complains. Only the shell's script calls it.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

    from holdfast import Store

# A shell that lists more than this helps nobody.
_OFFERED = 200


def _offered(context: CompletionContext, names: Callable[[Store], Iterable[str]]) -> list[str]:
    """Names out of the store that is meant, but for those with characters that must not reach a command line."""
    import holdfast

    with (
        suppress(HoldfastError, OSError),
        holdfast.open(_place(context), create=False, readonly=True, inert=True) as store,
    ):
        return [name for name in islice(names(store), _OFFERED) if name.isprintable()]
    return []


def _place(context: CompletionContext) -> str | None:
    given = context.get("store")
    return given.raw if given is not None and given.raw else None


def agents(context: CompletionContext) -> list[str]:
    """The names of the store's agents that begin as what is typed."""
    pattern = f"{glob.escape(context.incomplete)}*"
    return _offered(context, lambda store: (info.name for info in store.agents(pattern, limit=_OFFERED)))


def revisions(context: CompletionContext) -> list[str]:
    """Agents; after ``NAME@`` that agent's branches and tags."""
    name, at, _ = context.incomplete.rpartition("@")
    after = [f"{name}@{ref}" for ref in _refs(context, name)] if at else []
    return after or agents(context)


def refs(context: CompletionContext) -> list[str]:
    """Branches and tags of the agent that stands before on the line."""
    before = (context.get(argument) for argument in ("name", "agent"))
    return next((_refs(context, given.raw) for given in before if given is not None and given.raw), [])


def _refs(context: CompletionContext, name: str) -> list[str]:
    def found(store: Store) -> Iterable[str]:
        agent = store.agent(store.resolve(name)[0], create=False, readonly=True)
        # A revision is split at its last "@", so a name with one could not be given.
        return (ref for ref in (*agent.branches(), *agent.tags()) if "@" not in ref)

    return _offered(context, found)


def dumps(context: CompletionContext) -> list[str]:
    """The names of the dumps at hand, the newest first."""
    from holdfast import crash

    with suppress(HoldfastError, OSError):
        found = crash.dumps(crash.folder_of(_place(context)))
        return [path.name for path in found[:_OFFERED] if path.name.isprintable()]
    return []
