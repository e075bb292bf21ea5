"""Handing runs over: a run begins where nobody executes it, and whoever works on the store finds it.

Owns the transaction in which an agent is made for one run, and what the caller is told of a run that was handed over.
How a run begins is the business of ``runs``, what is written of ``agent.branch``. What always holds: the agent, its
branch, the first checkpoint and the record with which the run begins are there together or not at all, so that what is
refused leaves no empty agent; nobody has been the branch's writer then, and whoever comes first may be.

    submit(store, function, args, kwargs)    hand a run of an agent of its own over
    Submitted                                a run that was handed over: what is known about it, and its result
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from msgspec.structs import replace

from holdfast.agent import watchers
from holdfast.agent.branch import BranchWriter
from holdfast.agent.names import MAIN, check_name
from holdfast.agent.pending import Pending
from holdfast.agent.pointers import new_agent
from holdfast.errors import AgentBusy, BadOption, HoldfastError, RunEnded, RunUnfinished, StorePoisoned, ToolFailed
from holdfast.run import listing, queues
from holdfast.run.arguments import fingerprint
from holdfast.run.durables import Durable, Options, check_id, configured, known, options_of
from holdfast.run.handle import check_repeatable
from holdfast.run.line import entries
from holdfast.run.past import Past
from holdfast.run.runs import beginning, called_with
from holdfast.run.steps import Long, Request, Steps, Work, drive, drive_later, twin
from holdfast.store.changes import Change, NewRecord
from holdfast.store.database import TICK_S, Database
from holdfast.store.engine import Refused, Unsure
from holdfast.store.rows import BEGINNING, Branch

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.run.listing import RunInfo
    from holdfast.run.store import Store

LOOK_S = 0.04
"""How often whoever waits looks again, if nothing is written that might concern it."""

SUBMIT_S = 30.0
"""How long a run is submitted while somebody has its agent open who has not begun it: he may have been stopped."""


def submit(store: Store, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Submitted:
    """See ``store.submit``."""
    made, options = known(function), options_of(function)
    check_repeatable(options, made.name)
    queues.check_declared(store._db, made.queue)
    if "/" in str(options.id):
        raise BadOption(
            f"{options.id!r} cannot be the id of a run that has an agent of its own",
            hint="A slash stands before the name of a child. Use another id, or agent.submit(...).",
        )
    id = options.id if options.id is not None else uuid4().hex[:16]
    name, end_s = f"{made.name}/{id}", time.monotonic() + SUBMIT_S
    if store._db.view.agent(name) is None and _found(store, name, made, args, kwargs, options, id):
        return Submitted(store, name, MAIN, id)
    while True:
        try:
            agent = store._open_alone(name)
        except AgentBusy:  # somebody submits it just now, or executes it
            if store._view(name, MAIN).line.begun(id):
                found = Submitted(store, name, MAIN, id)
                found.check_same(made, args, kwargs)
                return found
            if time.monotonic() >= end_s:
                raise
            time.sleep(LOOK_S)
        else:
            with closing(agent):
                return agent.submit(configured(made, options, id=id), *args, **kwargs)


class _Unborn:
    """An agent that is not there yet."""

    handle = None
    config_hash = ""

    def __init__(self, store: Store, name: str) -> None:
        self.name, self.registry = name, store._registry


def _found(
    store: Store, name: str, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, id: str
) -> bool:
    """Add an agent with a run that waits for somebody. False: it was not made here, and may be there by now."""
    options = replace(options, id=check_id(id))
    check_name(name, "an agent")
    agent = _Unborn(store, name)
    given, mark = called_with(agent, made, args, kwargs)
    begin, stowed = beginning(agent, made, given, mark, options, made.queue)
    begin.life, begin.taken = Past().incarnation, []
    label = f"run {made.name}"
    writer = BranchWriter(store, Branch(0, 0, MAIN, b"", {}, 0, b"", 0, 0, *BEGINNING, 0, 0))

    def note(pending: Pending) -> list[NewRecord]:
        begin.start = pending.id
        return entries(begin)

    def add(change: Change) -> Branch:
        if change.agent(name) is not None:
            raise Refused(f"there is an agent {name!r} by now")
        return new_agent(change, name)[1]

    with watchers.watching("checkpoint", name, MAIN, label=label, kind="checkpoint") as watch:
        pending = writer._capture(
            store._empty(), label, "checkpoint", b"", mark=watch.mark, note=note, nodes=stowed.nodes,
            chunks=stowed.chunks,
        )  # fmt: skip
        try:
            branch = store._db.change(writer.founding(pending, add))
        except Unsure:  # whoever opens the agent sees whether it is there
            return False
        except HoldfastError as error:
            if pending.pack and not isinstance(error, StorePoisoned):
                store._db.packs.discard(pending.pack)  # nothing names it
            if isinstance(error, Refused):  # somebody was faster, or something that it names was forgotten just now
                return False
            raise
        watch.tell(id=pending.id.hex(), depth=branch.depth, size_bytes=pending.size_bytes)
    return True


class _Written(Request):
    """Wait until something was written since this was made, or for a moment."""

    def __init__(self, db: Database) -> None:
        self._db, self._seen = db, db.stamp()

    def now(self) -> None:
        self._db.await_change(self._seen, LOOK_S)

    async def later(self) -> None:
        end_s, pause_s = time.monotonic() + LOOK_S, LOOK_S if self._seen is None else TICK_S
        while time.monotonic() < end_s and self._db.stamp() == self._seen:  # noqa: ASYNC110 - others write
            await asyncio.sleep(pause_s)


class Submitted:
    """A run that was handed over to whoever works on the store."""

    def __init__(self, store: Store, agent: str, branch: str, id: str) -> None:
        self._store = store
        self.agent, self.branch, self.id = agent, branch, id

    def __repr__(self) -> str:
        return f"<Submitted {self.id} of {self.agent}@{self.branch}>"

    @property
    def info(self) -> RunInfo:
        """What is known about it now."""
        view = self._store._view(self.agent, self.branch)
        found = [info for info in listing.runs_of(view) if info.id == self.id]
        if not found:
            raise RunEnded(f"run {self.id} of {self.agent} is gone", run=self.id, status="rolled back")
        return found[-1]

    @property
    def status(self) -> str:
        """One of the words that ``store.runs()`` uses."""
        return self.info.status

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until it has ended; returns what the function returned.

        Raises ``ToolFailed`` where it failed or was cancelled, and ``TimeoutError``.
        """
        return drive(self._result(timeout_s))

    async def aresult(self, timeout_s: float | None = None) -> Any:
        """As result(), for async code."""
        return await drive_later(self._result(timeout_s))

    def _result(self, timeout_s: float | None) -> Steps:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            change = _Written(self._store._db)
            info = yield Work(lambda: self.info)
            if info.status in listing.OVER:
                break
            if end_s is not None and time.monotonic() >= end_s:
                raise TimeoutError(f"run {self.id} of {self.agent} is {info.status} after {timeout_s:g} s")
            yield change
        if info.status == "finished":
            return (yield Work(lambda: info.result))
        raise ToolFailed(
            f"run {self.id} of {self.agent} is {info.status}: {info.error}",
            tool=info.function,
            error_type=info.error.partition(":")[0],
            path="",
        )

    def cancel(self, *, compensate: bool = False, wait_s: float = 0.0) -> RunInfo:
        """Cancel it: see ``store.cancel``."""
        return self._store.cancel(self.agent, self.id, branch=self.branch, compensate=compensate, wait_s=wait_s)

    acancel = twin(cancel, Long)

    def check_same(self, made: Durable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise where it was begun with another function, or with other arguments than these."""
        info, registry = self.info, self._store._registry
        there = fingerprint({"function": info.function, "arguments": info.args}, registry)
        if fingerprint({"function": made.name, "arguments": made.given(None, args, kwargs)}, registry) != there:
            raise RunUnfinished(
                f"run {self.id!r} was begun with another function or other arguments ({info.function})",
                run=self.id,
                hint="Use another id.",
            )
