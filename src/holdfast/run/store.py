"""A store whose agents can act: what concerns the runs of all of them.

Owns opening such a store, sending signals, and the list of runs. Names and bytes are the business of the room below.
What always holds: every store that a program gets is one of these, so that no agent is used without its line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Unpack, cast
from uuid import uuid4

import holdfast.agent.store as below
from holdfast.agent.fleet import Page
from holdfast.agent.layers import THAW, WORKSPACE
from holdfast.agent.names import MAIN
from holdfast.agent.opened import adopt, settle
from holdfast.agent.when import DEFAULT, When
from holdfast.errors import AgentBusy, BadOption, Damaged, RunUnfinished, UnknownRevision
from holdfast.run import fleet, opened, queues, waiting
from holdfast.run.arguments import refuse
from holdfast.run.effects import Effect
from holdfast.run.handle import REMEMBERED, Agent
from holdfast.run.line import Line
from holdfast.run.listing import (
    RunInfo,
    SignalInfo,
    View,
    addressee,
    end_at,
    info_of,
    open_children,
    runs_of,
    signals_of,
)
from holdfast.run.past import OPEN, ROLLED_BACK
from holdfast.run.queues import Limits, QueueInfo
from holdfast.run.records import STOP
from holdfast.run.retention import Outlived, needed
from holdfast.run.scope import here
from holdfast.run.steps import Long, twin
from holdfast.run.streams import Follow
from holdfast.store.catalog import View as ReadView
from holdfast.store.changes import Change, Said, now_us, who
from holdfast.store.rows import Branch, End, Point

if TYPE_CHECKING:
    from holdfast.agent.retention import Needs
    from holdfast.process.claims import Claim, WorkspaceInfo
    from holdfast.process.images import Frozen, HalfThawed
    from holdfast.process.migration import Migrated
    from holdfast.process.thaw import Thawed
    from holdfast.run.batch import Batch, OnError
    from holdfast.run.handover import Submitted
    from holdfast.run.schedule import ScheduleInfo
    from holdfast.run.worker import Worked, Worker

log = logging.getLogger("holdfast.process")

T = TypeVar("T")
R = TypeVar("R")

_NOTHING_TO_CANCEL = frozenset({"finished", ROLLED_BACK})

_LOOK_S = 0.04
"""How often whoever waits for an agent that is busy in this process looks again."""


class Store(below.Store):
    """A place where agents' states are kept, and what they did. Open one with ``holdfast.open()``."""

    _handle: ClassVar[type[Agent]] = Agent

    def agent(
        self,
        name: str,
        *,
        branch: str = MAIN,
        create: bool = True,
        readonly: bool = False,
        wait_s: float = 0.0,
        takeover: bool = False,
        recover: bool = False,
        config: Any = None,
        when: When | None = DEFAULT,
        workspace: str | os.PathLike[str] | None = REMEMBERED,
    ) -> Agent:
        """The agent of that name, its last state already there; ``travel/handle`` has the options in words."""
        end_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            made = super().agent(
                name,
                branch=branch,
                create=create,
                readonly=readonly,
                wait_s=left_s,
                takeover=takeover,
                recover=recover,
                config=config,
                when=when,
            )
            handle = cast("Agent", made)  # _handle says what is made
            if handle._writer is not None:
                new = not handle._chosen
                try:
                    handle._attach(workspace)
                    for one in self.half_thawed(handle._branch) if new and not self._inert else ():
                        log.warning("%s", one)
                except BaseException:
                    if new:  # nobody else has it
                        handle.close()
                    raise
            if not handle._alone or handle._lane() is not None:
                return handle
            if not left_s:
                raise AgentBusy(
                    f"a worker of this process executes a run of {name}",
                    hint="Wait for it with wait_s=, or open read-only.",
                )
            time.sleep(min(left_s, _LOOK_S))

    def workspaces(self) -> list[WorkspaceInfo]:
        """The directories that branches have, by agent and branch, and whether files are still to be put back there."""
        self._check_open()
        if not any(name.startswith(WORKSPACE) for name in self._db.view.facts()):
            return []
        from holdfast.process import claims

        return claims.infos(self._db.view)

    def half_thawed(self, branch: Branch | None = None) -> list[HalfThawed]:
        """The thaws that were cut short, after effects were undone, or agents went back: of all branches, or of one."""
        self._check_open()
        view = self._db.view
        if branch is not None and view.fact(f"{THAW}{branch.uuid.hex()}") is None:
            return []
        if branch is None and not any(name.startswith(THAW) for name in view.facts()):
            return []
        from holdfast.process import images

        return images.half_thawed(view, branch)

    def _open_alone(self, name: str, *, branch: str = MAIN, create: bool = True) -> Agent:
        """A handle that nobody else in this process gets; ``AgentBusy`` where somebody has one."""
        with self._lock:
            made, known = self._found(name, branch=branch, create=create)
            if known:
                raise AgentBusy(f"{name} is open in this process", hint="Close the handle on it.")
            made._alone = True
        return made

    def _found(self, name: str, *, branch: str = MAIN, create: bool = True) -> tuple[Agent, bool]:
        """A handle, and whether somebody in this process had it before: if not, whoever asks closes it."""
        with self._lock:
            before = list(self._handles.values())
            made = self.agent(name, branch=branch, create=create)
            return made, any(made is one for one in before)

    def signal(
        self,
        agent: str,
        name: str,
        value: Any = None,
        *,
        run: str | None = None,
        any_run: bool = False,
        branch: str = MAIN,
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
        waiting.check_name(name)
        refuse(self, f"the signal {name}", value, self._registry)
        view = self._view(agent, branch)
        row, given = view._agent, waiting.check_id(id) if id is not None else b""
        past = view.past()
        body: dict[str, Any] = {}
        if not (given and waiting.sent_before(self._db.view, row, given)):
            to = None if any_run else addressee(view, past, run)
            body = waiting.body_of(
                given or uuid4().hex[:16].encode(), name, value, self._registry,
                branch=view.identity[1], run=to, by=who(),
            )  # fmt: skip

        new = bool(body) and self._send(view, body, given)
        wanted = (given or body["id"]).decode()
        for other in [view, *(one for one in self._views(empty=True) if one.name == agent)]:
            for one in signals_of(other):
                if one.id == wanted:
                    return replace(one, repeated=not new)
        raise Damaged(f"the signal {wanted!r} of {agent} was sent before, and is not in the store any more")

    def _send(self, view: View, body: dict[str, Any], given: bytes = b"") -> bool:
        """Send a signal, unless that was done before with the id that was given."""
        row = view._agent

        def say(change: Change) -> bool:
            if given and waiting.sent_before(change, row, given):
                return False
            change.hold_agent(row.a)
            for one, key in waiting.entries_of(row.uuid, body):
                change.say(row.a, Said(one, key))
            change.set_open(view._branch.b, opened.sent(body))
            return True

        return self._db.change(say)

    def signals(self, agent: str | None = None, *, branch: str | None = None) -> list[SignalInfo]:
        """The signals that were sent, oldest first: to all agents, to one, or to one branch of it (``SignalInfo``)."""
        if agent is not None and branch is not None:
            return signals_of(self._view(agent, branch))
        if agent is not None:
            self._agent_row(agent)
        return [one for view in self._views(empty=True) if agent in {None, view.name} for one in signals_of(view)]

    def drop_signal(self, agent: str, id: str, *, branch: str = MAIN) -> SignalInfo:
        """Let a signal that nobody has taken count no more. A run that takes it at this very moment may have it."""
        self._check_writable()
        view = self._view(agent, branch)
        found = [one for one in waiting.all_of(self._db.view, view._agent)[0] if one.text == id]
        status = next((one.status for one in signals_of(view) if one.id == id), "")
        if not status:
            raise BadOption(
                f"{id!r} is no signal to {agent}@{branch}", hint="See store.signals(), or `holdfast signal`."
            )
        if status != "pending":
            raise BadOption(f"the signal {id} cannot be dropped: it is {status}")
        entry, key = waiting.drop_of(view._agent.uuid, found[0], who())

        def drop(change: Change) -> None:
            change.hold_agent(view._agent.a)
            change.say(view._agent.a, Said(entry, key))
            change.set_open(view._branch.b, opened.dropped(found[0]))

        self._db.change(drop)
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

    def runs(
        self,
        pattern: str | None = None,
        *,
        branch: str | None = None,
        status: str | None = None,
        limit: int | None = None,
        sort: Literal["began", "urgent"] = "began",
    ) -> Page[RunInfo]:
        """The runs of all agents, of the one of a name, or of those like ``trip-*``, the newest first (``RunInfo``).

        ``sort="urgent"``: first those that need somebody: in need of attention, interrupted, due, failed. ``limit``: at
        most so many; the list's ``more`` says how many branches have others.
        """
        return fleet.runs(self, pattern, branch, status, limit, sort)

    def open_runs(self, pattern: str | None = None) -> dict[str, int]:
        """How many runs have not ended, by status; ``due``: how many of them can be resumed, which ``due()`` lists."""
        return fleet.counts(self, pattern)

    def effects(
        self,
        pattern: str | None = None,
        *,
        branch: str | None = None,
        in_doubt: bool = False,
        limit: int | None = None,
    ) -> Page[Effect]:
        """Calls that were recorded by all agents, or by some as in ``runs()``, the newest first; or those in doubt."""
        return fleet.effects(self, pattern, branch, limit, in_doubt=in_doubt)

    def cancel(
        self,
        agent: str | RunInfo,
        run: str | None = None,
        *,
        branch: str = MAIN,
        compensate: bool = False,
        wait_s: float = 0.0,
        later: bool = False,
    ) -> RunInfo:
        """Cancel a run: one of ``store.runs()``, or an agent and the run's id; without it, the one that is open.

        One that is executed now, in whatever process, is told so at its next recorded call, or where it waits: that
        raises ``Cancelled`` there, once, and in its children. One that nobody executes is left to a worker for
        ``wait_s`` seconds, which tells it so, and lets it clean up. Where none has come then, it ends, and its children
        before it; none of its functions is executed for that. What it did stands; with ``compensate`` it is undone, and
        the run rolled back to its beginning. With ``later`` nobody waits: it is told so by whoever executes it next,
        with the tools that undo; one that no worker finds by itself has to be resumed for that, afterwards. Returns
        what is known of the run when it has ended, or the time is over: cancelled, or still running.
        """
        self._check_writable()
        if isinstance(agent, RunInfo):
            more: dict[str, Any] = {"compensate": compensate, "wait_s": wait_s, "later": later}
            return self.cancel(agent.agent, agent.id, branch=agent.branch, **more)
        waiting.check_seconds(wait_s)
        end_s = time.monotonic() + wait_s
        view = self._view(agent, branch)
        this = addressee(view, view.past(), run, _NOTHING_TO_CANCEL)
        lane = here()
        if lane is not None and (lane.scope.run_id, lane.scope.agent.identity) == (this.id, view.identity):
            raise RunUnfinished(
                f"run {this.id} is executing this: when it is executed again, it would cancel itself once more",
                run=this.id,
                hint="Return, or raise an exception of your own.",
            )
        # A run that waits, or was interrupted, is found by a worker if it has a row.
        left = later and this.status in OPEN
        if wait_s > 0 and this.status in {"", "waiting"}:
            left = left or opened.key(this.id) in {row.run for row in view.opened()}
        if this.status != "cancelled" and (
            left or view.at_it() or not self._end_run(view, this.id, compensate=compensate)
        ):
            body = waiting.body_of(
                uuid4().hex[:16].encode(), STOP, compensate, self._registry,
                branch=view.identity[1], run=this, by=who(),
            )  # fmt: skip
            self._send(view, body)
            info = self._awaited(agent, branch, this.id, end_s)
            told = info.status == "running" or not info.cancelled_by  # by whoever executes it, or did
            if not told and left and not later and not self._end_run(view, this.id, compensate=compensate):
                return info  # a worker has come at the last moment, and finds the signal
        return self._awaited(agent, branch, this.id, 0.0)

    def resume(self, agent: str | RunInfo, run: str | None = None, *, branch: str = MAIN) -> RunInfo:
        """Leave a run that has stopped to whoever works on this store: one that failed, say, or needs attention.

        ``agent.resume`` executes one; here nothing is executed, and nobody needs its function. What came with a branch
        or from elsewhere is adopted by that. What is in doubt stays so, unless the worker's probes can tell. Raises
        ``AgentBusy`` while somebody writes the branch, and ``RunEnded`` where the run does not start again.
        """
        self._check_writable()
        if isinstance(agent, RunInfo):
            return self.resume(agent.agent, agent.id, branch=agent.branch)
        view = self._view(agent, branch)
        this = addressee(view, view.past(), run)
        handle, known = self._found(agent, branch=branch, create=False)
        try:
            handle._hand_over(this.id, who())
        finally:
            if not known:
                handle.close()
        return self._awaited(agent, branch, this.id, 0.0)

    def _awaited(self, agent: str, branch: str, run: str, end_s: float) -> RunInfo:
        """What is known of a run when it has ended, or when the time is over."""
        while True:
            view = self._view(agent, branch)
            past, running = view.now()
            found = next(one for one in reversed(past.every_run) if one.id == run)
            left_s = end_s - time.monotonic()
            if left_s <= 0 or found.status not in {"", "waiting"}:
                return info_of(view, found, past.taken, running=running)
            time.sleep(min(left_s, _LOOK_S))

    def _end_run(self, view: View, run: str, *, compensate: bool) -> bool:
        """End a run that nobody executes. False: somebody does by now."""
        if not compensate:  # a rollback takes the children along
            for child, its in open_children(view, run):
                self.cancel(child, its, branch=view.branch_name)
        try:
            handle, known = self._found(view.name, branch=view.branch_name, create=False)
        except AgentBusy:
            return False
        try:
            if handle._host.busy:
                return False
            handle._end(run, who(), compensate=compensate)
        finally:
            if not known:
                handle.close()
        return True

    def follow(self, agent: str | RunInfo, run: str | None = None, *, branch: str = MAIN, wait: bool = True) -> Follow:
        """The items of a run's streams, as they come, from whatever process: for ``for`` and ``async for``.

        Each is a ``Streamed``: attempt, index, item, and the path and tool of the stream. An attempt that begins again,
        because the one before it was interrupted, is told with index -1. It ends when the run has, or, with
        ``wait=False``, when there is nothing more now.
        """
        if isinstance(agent, RunInfo):
            return self.follow(agent.agent, agent.id, branch=agent.branch, wait=wait)
        view = self._view(agent, branch)
        return Follow(view, addressee(view, view.past(), run, (ROLLED_BACK,)), wait=wait)

    def due(self) -> list[RunInfo]:
        """Runs that were put off and can be resumed now: their time, or their signal, has come.

        Those that came from elsewhere, or with a branch, are not among them until somebody resumes or adopts them.
        """
        self._check_open()
        self.flush()
        view = self._db.view
        found = [view.branch_at(b) for b, _ in opened.candidates(view, now_us())]
        branches = sorted((one.a, one.b, one) for one in found if one.a)
        return [
            info for a, _, branch in branches for info in runs_of(View(self, view.agent_at(a), branch), only_due=True)
        ]

    def adopt(self, agent: str, *, branch: str = MAIN) -> list[RunInfo]:
        """Let the runs that came from elsewhere, or with the branch, be its own. Returns those that are open.

        From then on they are due when their time or signal comes. Whoever has them elsewhere should not go on with
        them, too. Raises ``AgentBusy`` while somebody writes the branch.
        """
        self._check_writable()
        view = self._view(agent, branch)
        lease = self._lease(agent, view._branch, wait_s=0.0)

        def own(change: Change) -> None:
            settle(change, [adopt(change, change.branch_at(lease.b))])

        try:
            self._db.change(own, lease.b)
        finally:
            lease.release()
        ids = {one.run for one in self._db.view.opened(lease.b)}
        return [info for info in runs_of(self._view(agent, branch)) if opened.key(info.id) in ids]

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Submitted:
        """Hand a run over to whoever works on this store, as a run of the agent FUNCTION/ID, which is made for it.

        ``store.submit(send.options(id="order-7"), ...)``: an id is begun once, however often it is submitted.
        """
        from holdfast.run.handover import submit

        self._check_writable()
        return submit(self, function, args, kwargs)

    def queues(self) -> list[QueueInfo]:
        """The queues that runs wait in, with their limits, by name (``QueueInfo``)."""
        self._check_open()
        self.flush()
        return queues.infos(self._db)

    def set_queue(self, name: str, **limits: Unpack[Limits]) -> QueueInfo:
        """Give a queue other limits, from now on and for all workers: ``set_queue("mail", concurrency=8, rate=None)``.

        None lifts a limit; those that are not given stay. A worker whose program declares others does not start any
        more: change the declaration, too.
        """
        self._check_writable()
        queues.change(self._db, name, limits)
        return next(one for one in self.queues() if one.name == name)

    def schedules(self) -> list[ScheduleInfo]:
        """The functions that workers execute by themselves, ``durable(every=...)``, the next one first."""
        self._check_open()
        self.flush()
        from holdfast.run import schedule  # few programs need it

        return schedule.listed(self)

    def workers(self) -> list[dict[str, Any]]:
        """Who works on this store now: ``pid``, ``host``, ``program``, ``since`` (in us), and the ``functions`` it has.

        Of a program with very many functions, ``functions`` is empty.
        """
        self._check_open()
        found = self._db.leases.holders()
        return [
            {**one, "functions": [name for name in said if isinstance(name, str)]}
            for one in found
            if isinstance(said := one.get("functions"), list)
        ]

    def worker(self, *, concurrency: int = 16, tell: Callable[[Worked], None] | None = None) -> Worker:
        """Whoever resumes runs that were killed, have come due or were submitted: ``store.worker().run()``.

        Any number of them, in any number of processes, may work on a store. ``tell`` is called with what became of each
        run.
        """
        from holdfast.run.worker import Worker

        self._check_writable()
        return Worker(self, concurrency=concurrency, tell=tell)

    def freeze(
        self,
        target: int | str,
        *,
        agent: str | None = None,
        tcp: Literal["close", "keep"] = "close",
        files: Literal["save", "keep"] = "save",
        then: Literal["go on", "stop", "end"] = "go on",
        keep: int = 3,
        wait_s: float = 10.0,
    ) -> Frozen:
        """Save a process whole: the one with that number, or the one that writes the agent of that name.

        Its memory, threads, descriptors and open files of one moment go into a checkpoint of ``images/NAME``. ``agent``
        is NAME; without it, the agent that it writes, or the program's name. ``tcp``: whether established connections
        are closed or kept when it comes back. ``files="keep"`` leaves open files out. ``then`` says what becomes of it.
        ``keep`` images stay (0: all). A Holdfast process gets ``wait_s`` to finish what it does outside. Needs root and
        CRIU; raises ``NotFrozen``, and the process goes on.
        """
        from holdfast.process.images import freeze_process

        self._check_writable()
        options: dict[str, Any] = {"agent": agent, "tcp": tcp, "files": files, "then": then}
        return freeze_process(self, target, keep=keep, wait_s=wait_s, **options)

    def thaw(
        self,
        revision: str,
        *,
        isolated: bool = False,
        trust: bool = False,
        attached: bool | None = False,
        moved: bool = False,
        accept: Sequence[str] = (),
    ) -> Thawed:
        """Bring a process back from an image, NAME or NAME@REV. It runs when this returns.

        The agents that it was writing go back to where they were; what was done outside since is undone first, or
        ``RollbackBlocked`` is raised (``accept``: what may stay). ``isolated`` touches nothing else: the process gets
        copies of all files, and no network. To thaw is to run what was stored: images that this user did not make on
        this machine need ``trust``. ``attached`` connects its terminal or pipes with those of this process (None: if it
        belongs to a terminal); ``moved``: the original is stopped elsewhere, and this one takes its place. Needs root
        and CRIU; raises ``NotThawed``, and files are as they were.
        """
        from holdfast.process.images import thaw_process

        self._check_writable()
        options: dict[str, Any] = {"isolated": isolated, "trust": trust, "attached": attached, "moved": moved}
        return thaw_process(self, revision, accept=tuple(accept), **options)

    def migrate(
        self,
        target: int | str,
        dest: Store,
        *,
        agent: str | None = None,
        tcp: Literal["close", "keep"] = "close",
        through: Sequence[str] = (),
    ) -> Migrated:
        """Freeze a process, bring its image to another store, and thaw it there; the original ends when the copy lives.

        ``through`` is put before the command that thaws it, as ``["ssh", "there"]`` or ``["nsenter", ...]``: it says
        where. If that fails, the original goes on. A Holdfast process opens its own stores again, under the same paths.
        """
        from holdfast.process.migration import migrate_process

        self._check_writable()
        return migrate_process(self, target, dest, agent=agent, tcp=tcp, through=through)

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

    aagent, asubmit, acancel = twin(agent, Long), twin(submit, Long), twin(cancel, Long)
    aresume = twin(resume)
    asignal, adrop_signal, aadopt, aflush = twin(signal), twin(drop_signal), twin(adopt), twin(below.Store.flush)

    @contextmanager
    def _batch(self, function: Any, items: Any, name: str, key: Any, workers: int, on_error: Any) -> Iterator[Batch]:
        from holdfast.run.batch import Batch

        agent, known = self._found(name)
        try:
            batch = Batch(agent._host, function, items, key, workers, on_error)
            with agent._host.executing(), batch.watched():
                yield batch
        finally:
            if not known:
                agent.close()

    def _inherited(self, view: ReadView, b: int, point: Point | None) -> End:
        return end_at(view, b, point) if point is not None else super()._inherited(view, b, point)

    def _needs(self) -> Needs:
        from holdfast.process.claims import claims  # few agents have one

        return partial(self._needed, claims(self._db.view))

    def _needed(
        self, directories: Mapping[str, Claim], branches: Sequence[Branch], points: Iterable[Point]
    ) -> Iterator[tuple[bytes, str]]:
        """What runs that have not ended would look for when they go on, and where effects in doubt can be undone to.

        And the two checkpoints between which the files of a directory are: whoever finishes that needs both.
        """
        for branch in branches:
            one = directories.get(branch.uuid.hex())
            if one is not None and one.to:
                yield from ((id, "its files are being put back") for id in (one.to, one.at) if id)
        busy = [branch for branch in branches if branch.records]
        known = ((point.manifest.effects[0], point.manifest.depth, point.id) for point in points) if busy else ()
        places = sorted(known)
        for branch in busy:
            yield from needed(Line(self._db, branch.b), places)

    def _outlived(self, view: ReadView) -> Outlived:
        return Outlived(view, now_us())

    def _views(self, *, empty: bool = False) -> Iterator[View]:
        """The lines of all branches; with ``empty``, those without a record, too."""
        self._check_open()
        self.flush()
        for agent in self._db.view.agents():
            for branch in self._db.view.branches(agent.a):
                if branch.records or empty:
                    yield View(self, agent, branch)


open_store = Store.opened
