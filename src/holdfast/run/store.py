"""A store whose agents can act: what concerns the runs of all of them.

Owns opening such a store, sending signals, and the list of runs. Names and bytes are the business of the room below.
What always holds: every store that a program gets is one of these, so that no agent is used without its ledger.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import holdfast.agent.store as below
from holdfast.errors import BadOption, UnknownRevision
from holdfast.run import secrets
from holdfast.run.handle import Agent
from holdfast.run.listing import CONDITIONS, RunInfo, View, runs_of
from holdfast.run.needed import needed
from holdfast.run.stored import StoredLine
from holdfast.run.waiting import signal_body, signal_key
from holdfast.store.catalog import Branch, Point
from holdfast.store.changes import Said
from holdfast.store.keys import Key

if TYPE_CHECKING:
    from holdfast.run.batch import Batch, OnError

T = TypeVar("T")
R = TypeVar("R")


class Store(below.Store):
    """A place where agents' states are kept, and what they did. Open one with ``holdfast.open()``."""

    _handle: ClassVar[type[Agent]] = Agent

    def agent(
        self,
        name: str,
        *,
        branch: str = below.MAIN,
        create: bool = True,
        readonly: bool = False,
        wait_s: float = 0.0,
        takeover: bool = False,
        recover: bool = False,
        config: Any = None,
    ) -> Agent:
        made = super().agent(
            name,
            branch=branch,
            create=create,
            readonly=readonly,
            wait_s=wait_s,
            takeover=takeover,
            recover=recover,
            config=config,
        )
        return cast("Agent", made)  # _handle says what is made

    def signal(self, agent: str, name: str, value: Any = None, *, branch: str | None = None) -> None:
        """Send a signal to an agent, whoever writes it now or later: ``agent.wait_for(name)`` gets the value.

        Each branch receives it once; with ``branch`` only that one does.
        """
        self._check_writable()
        secrets.refuse(self, f"the signal {name}", value)
        row = self._agent_row(agent)
        only = None
        if branch is not None:
            found = self._db.view.branch(row.a, branch)
            if found is None:
                raise UnknownRevision(f"agent {agent!r} has no branch {branch!r}")
            only = found.uuid
        body = signal_body(name, value, self._registry, only)
        self._db.change(lambda change: change.say(row.a, Said(body, signal_key(row.uuid))))

    def runs(self, condition: str | None = None) -> list[RunInfo]:
        """The runs of all agents and branches; with ``condition`` those that are so. See ``RunInfo``."""
        if condition is not None and condition not in CONDITIONS:
            raise BadOption(f"condition {condition!r}", hint=f"Use one of {', '.join(CONDITIONS)}.")
        found = [info for view in self._views() for info in runs_of(view)]
        return [info for info in found if condition in {None, info.condition}]

    def due(self) -> list[RunInfo]:
        """Runs that were put off and can go on now: their time, or their signal, has come."""
        return [info for view in self._views() for info in runs_of(view, only_due=True)]

    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        name: str,
        key: Callable[[T], str] | None = None,
        workers: int = 16,
        on_error: OnError = "collect",
    ) -> list[R | Exception]:
        """Call ``function(item)`` for each item, ``workers`` at a time; its tools are recorded on the agent ``name``.

        Called again after an interruption it goes on: what has finished is not executed again. ``key(item)`` identifies
        an item, otherwise its place does. Returns the results in the order of the items, with an exception in the place
        of one that failed or is in doubt; ``on_error="raise"`` stops at the first of them and raises it.
        """
        with self._batch(function, items, name, key, workers, on_error) as batch:
            return batch.now()

    async def amap(
        self,
        function: Callable[[T], Awaitable[R]],
        items: Iterable[T],
        *,
        name: str,
        key: Callable[[T], str] | None = None,
        workers: int = 16,
        on_error: OnError = "collect",
    ) -> list[R | Exception]:
        """As map(), for async functions."""
        with self._batch(function, items, name, key, workers, on_error) as batch:
            return await batch.later()

    @contextmanager
    def _batch(self, function: Any, items: Any, name: str, key: Any, workers: int, on_error: Any) -> Iterator[Batch]:
        from holdfast.run.batch import Batch

        with self._lock:
            before = list(self._handles.values())
            agent = self.agent(name)
        try:
            batch = Batch(agent._host, function, items, key, workers, on_error)
            with agent._host.executing():
                yield batch
        finally:
            if not any(agent is one for one in before):  # nobody else holds it
                agent.close()

    def _needed(self, branches: Sequence[Branch], points: Iterable[Point]) -> Iterator[tuple[bytes, str]]:
        """What runs that have not ended would look for when they go on, and where effects in doubt can be undone to."""
        busy = [branch for branch in branches if branch.records]
        known = ((point.manifest.effects[0], point.manifest.depth, point.id) for point in points) if busy else ()
        places = sorted(known)
        for branch in busy:
            yield from needed(StoredLine(self._db, branch.b), places)

    def _views(self) -> Iterator[View]:
        self._check_open()
        self.flush()
        for agent in self._db.view.agents():
            for branch in self._db.view.branches(agent.a):
                if branch.records:
                    yield View(self, agent, branch)


def open_store(
    path: str | os.PathLike[str] | None = None,
    *,
    create: bool = True,
    readonly: bool = False,
    durability: Literal["commit", "batched"] = "commit",
    types: Sequence[Any] = (),
    paranoid: bool = False,
    recover: bool = False,
    accept_older: bool = False,
    inert: bool = False,
    key: Key = None,
    objects: str | None = None,
) -> Store:
    """Open a store, making it first if there is none.

    ``types`` names modules (or gives modules or classes) whose classes may be stored and loaded. ``recover`` accepts
    that acknowledged commits are missing from a damaged catalog, and goes on with what is there; ``accept_older`` that
    the whole store is older than it was when it was last used here (``StoreWentBack``): a backup was put back.
    ``key`` opens an encrypted store, and makes a new one encrypted: a passphrase, 64 hexadecimal digits or 32 bytes.
    Without it, $HOLDFAST_KEY, $HOLDFAST_KEY_FILE or $HOLDFAST_KEY_COMMAND; with ``False`` none of them.
    """
    return below.open_as(
        Store,
        path,
        create=create,
        readonly=readonly,
        durability=durability,
        types=types,
        paranoid=paranoid,
        recover=recover,
        accept_older=accept_older,
        inert=inert,
        key=key,
        objects=objects,
    )
