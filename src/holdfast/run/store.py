"""A store whose agents can act: what concerns the runs of all of them.

Owns opening such a store, sending signals, and the list of runs. Names and bytes are the business of the room below.
What always holds: every store that a program gets is one of these, so that no agent is used without its ledger.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast
from uuid import uuid4

import holdfast.agent.store as below
from holdfast.errors import BadOption, Damaged, UnknownRevision
from holdfast.run import secrets, signals
from holdfast.run.handle import Agent
from holdfast.run.listing import STATUSES, RunInfo, SignalInfo, View, addressee, runs_of, signals_of
from holdfast.run.needed import needed
from holdfast.run.stored import StoredLine
from holdfast.store.catalog import Branch, Point
from holdfast.store.changes import Change, Said, who
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

    def signal(
        self,
        agent: str,
        name: str,
        value: Any = None,
        *,
        run: str | None = None,
        any_run: bool = False,
        branch: str = below.MAIN,
        id: str | None = None,
    ) -> SignalInfo:
        """Send a signal to a run, whoever executes it now or later: ``agent.wait_for(name)`` gets the value.

        ``run`` is the run's id; without it, the run of this branch that has not ended. It is taken once, and ends with
        its run: no later run gets it. ``any_run`` sends it to the agent on purpose: the next run that waits for the
        name takes it, also one that begins later, or a plain loop. With an ``id`` of yours, sending it again sends
        nothing. The answer says which names are waited for: the signal may be early, or its name misspelt.
        """
        self._check_writable()
        if any_run and run is not None:
            raise BadOption("a signal is for one run, or for any", hint="Give either run= or any_run=True.")
        signals.check_name(name)
        secrets.refuse(self, f"the signal {name}", value)
        view = self._view(agent, branch)
        row, given = view._agent, signals.check_id(id) if id is not None else b""
        past = view.past()
        body: dict[str, Any] = {}
        if not (given and signals.sent_before(self._db.view, row, given)):
            to = None if any_run else addressee(view, past, run)
            body = signals.body_of(
                given or uuid4().hex[:16].encode(), name, value, self._registry,
                branch=view.identity[1], run=to, by=who(),
            )  # fmt: skip

        def say(change: Change) -> bool:
            if not body or (given and signals.sent_before(change, row, given)):
                return False
            for one, key in signals.entries_of(row.uuid, body):
                change.say(row.a, Said(one, key))
            return True

        new = bool(body) and self._db.change(say)
        wanted = (given or body["id"]).decode()
        for other in [view, *(one for one in self._views(empty=True) if one.name == agent)]:
            for one in signals_of(other):
                if one.id == wanted:
                    return replace(one, repeated=not new)
        raise Damaged(f"the signal {wanted!r} of {agent} was sent before, and is not in the store any more")

    def signals(self, agent: str | None = None, *, branch: str | None = None) -> list[SignalInfo]:
        """The signals that were sent, oldest first: to all agents, to one, or to one branch of it (``SignalInfo``)."""
        if agent is not None and branch is not None:
            return signals_of(self._view(agent, branch))
        if agent is not None:
            self._agent_row(agent)
        return [one for view in self._views(empty=True) if agent in {None, view.name} for one in signals_of(view)]

    def drop_signal(self, agent: str, id: str, *, branch: str = below.MAIN) -> SignalInfo:
        """Let a signal that nobody has taken count no more. A run that takes it at this very moment may have it."""
        self._check_writable()
        view = self._view(agent, branch)
        found = [one for one in signals.all_of(self._db.view, view._agent)[0] if one.text == id]
        status = next((one.status for one in signals_of(view) if one.id == id), "")
        if not status:
            raise BadOption(
                f"{id!r} is no signal to {agent}@{branch}", hint="See store.signals(), or `holdfast signals`."
            )
        if status != "pending":
            raise BadOption(f"the signal {id} cannot be dropped: it is {status}")
        entry, key = signals.drop_of(view._agent.uuid, found[0], who())
        self._db.change(lambda change: change.say(view._agent.a, Said(entry, key)))
        return next(one for one in signals_of(view) if one.id == id)

    def _view(self, agent: str, branch: str) -> View:
        """The line of a branch."""
        self._check_open()
        self.flush()
        row = self._agent_row(agent)
        found = self._db.view.branch(row.a, branch)
        if found is None:
            raise UnknownRevision(f"agent {agent!r} has no branch {branch!r}")
        return View(self, row, found)

    def runs(self, status: str | None = None) -> list[RunInfo]:
        """The runs of all agents and branches; with ``status`` those that are so. See ``RunInfo``."""
        if status is not None and status not in STATUSES:
            raise BadOption(f"status {status!r}", hint=f"Use one of {', '.join(STATUSES)}.")
        found = [info for view in self._views() for info in runs_of(view)]
        return [info for info in found if status in {None, info.status}]

    def due(self) -> list[RunInfo]:
        """Runs that were put off and can be resumed now: their time, or their signal, has come."""
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

    def _views(self, *, empty: bool = False) -> Iterator[View]:
        """The lines of all branches; with ``empty``, those without a record, too."""
        self._check_open()
        self.flush()
        for agent in self._db.view.agents():
            for branch in self._db.view.branches(agent.a):
                if branch.records or empty:
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
    trust_older: bool = False,
    inert: bool = False,
    key: Key = None,
    objects: str | None = None,
) -> Store:
    """Open a store, making it first if there is none.

    ``types`` names modules (or gives modules or classes) whose classes may be stored and loaded. ``recover`` accepts
    that acknowledged commits are missing from a damaged catalog, and goes on with what is there; ``trust_older`` that
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
        trust_older=trust_older,
        inert=inert,
        key=key,
        objects=objects,
    )
