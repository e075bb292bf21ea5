"""Whoever wants to know what this process does with its agents: which it has, and what is under way.

Owns the two places where somebody can be told. Must not know who that is. Costs nothing to import, so that a process
can be watched before it uses any agent, and next to nothing while nobody watches. What always holds: whoever is told
changes nothing and raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from holdfast.agent.agent import Agent

WATCHERS: list[Callable[[Agent, bool], None]] = []
"""Called with the handle, and True when it was opened, False when it is being closed."""

What = Literal["run", "call", "checkpoint", "rollback", "recovery"]


class Watch:
    """Something that is under way. This one is followed by nobody; an observer has a class of its own."""

    mark = ""
    """A text that is kept with what is made meanwhile, so that the observer finds it again: which trace it was in."""

    def inside(self) -> AbstractContextManager[Any]:
        """For what is done as part of it."""
        return _NOTHING

    def tell(self, **about: Any) -> None:
        """More is known about it now."""

    def end(self, error: BaseException | None = None, **about: Any) -> None:
        """It is over: well, or with an error."""


class Observer(Protocol):
    """Whoever follows what is under way."""

    def begin(self, what: What, agent: str, branch: str, about: dict[str, Any]) -> Watch:
        """Something begins, in the thread and context of whoever asked for it."""


_NOTHING: AbstractContextManager[Any] = nullcontext()
UNWATCHED = Watch()
_UNWATCHED: AbstractContextManager[Watch] = nullcontext(UNWATCHED)
_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """From now on this one is told, and nobody else."""
    global _observer  # noqa: PLW0603 - there is one in a process
    _observer = observer


def observed() -> bool:
    return _observer is not None


def begin(what: What, agent: str, branch: str, **about: Any) -> Watch:
    """Tell that something begins. Whoever does says when it ends."""
    return _observer.begin(what, agent, branch, about) if _observer is not None else UNWATCHED


def watching(what: What, agent: str, branch: str, **about: Any) -> AbstractContextManager[Watch]:
    """Tell that something begins, and when it ends; what is done meanwhile is part of it."""
    return _UNWATCHED if _observer is None else _watching(begin(what, agent, branch, **about))


@contextmanager
def _watching(watch: Watch) -> Iterator[Watch]:
    try:
        with watch.inside():
            yield watch
    except BaseException as error:
        watch.end(error)
        raise
    watch.end()
