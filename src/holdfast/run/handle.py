"""The agent as user code has it: its state and history, and everything that it does outside.

Owns the public methods, and which agent is current. What they do is the business of the other modules. What always
holds: inside a run a checkpoint is part of the run; a tool that is not local cannot change the state; a change of the
state is never written on top of a checkpoint that it did not start from.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, overload

import holdfast.agent.agent as below
from holdfast.agent import unsaved
from holdfast.agent.branch import BranchWriter
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.layers import WORKSPACE
from holdfast.agent.names import check_label
from holdfast.agent.points import END
from holdfast.codec.values import encode
from holdfast.errors import (
    AgentBusy,
    BadOption,
    InvariantViolated,
    NotThawed,
    ReadOnly,
    RunUnfinished,
)
from holdfast.run import children, listing, runs
from holdfast.run.callers import any_under_way
from holdfast.run.children import Child
from holdfast.run.claims import Loop, executing
from holdfast.run.doubt import decide
from holdfast.run.durables import Options, choose, configured, known, mark_of, options_of
from holdfast.run.effects import Effect
from holdfast.run.environment import Environment
from holdfast.run.host import AgentHost, position_of
from holdfast.run.listing import RunInfo
from holdfast.run.past import LOST
from holdfast.run.points import SafePoints
from holdfast.run.queues import check_declared
from holdfast.run.records import Record, Saved
from holdfast.run.resilience import CLOCK
from holdfast.run.rollback import RollbackPlan, plan_rollback, replanning, resuming
from holdfast.run.runs import Run
from holdfast.run.scope import EFFECT, HERE, Lane, active, flow, here, now_us, number_tasks
from holdfast.run.steps import Long, Sleep, Steps, Work, drive, drive_later, twin
from holdfast.run.waiting import check_seconds
from holdfast.store.changes import who
from holdfast.store.rows import Point

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from holdfast.process.changes import FileChange, FileInfo
    from holdfast.process.workspace import Workspace
    from holdfast.process.writer import Saving
    from holdfast.run.forking import ForkPlan
    from holdfast.run.handover import Submitted

REMEMBERED = "\0"
"""As a workspace: the one that the store remembers. No path has this name."""

_LOOK_S = 0.01
"""How often whoever waits for his turn looks whether it has come."""
R = TypeVar("R")


class Agent(Environment, SafePoints, below.Agent):
    """The handle on an agent. Get one from ``store.agent(name)``."""

    _alone = False  # a worker, or somebody who submits a run, has it: nobody else in this process gets it

    @cached_property
    def _host(self) -> AgentHost:
        host: AgentHost = self.__dict__.setdefault("_host", AgentHost(self))  # one, also for threads that come together
        return host

    @cached_property
    def _entered(self) -> dict[object, list[AbstractContextManager[None]]]:
        """Where it is current now, by the task or the thread."""
        entered: dict[object, list[AbstractContextManager[None]]] = self.__dict__.setdefault("_entered", {})  # as above
        return entered

    # -- runs -------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """Execute ``function(agent, ...)``, from the beginning or from where it stopped.

        An unfinished run with equal arguments is resumed; a finished one starts anew, unless it has an id: then its
        result is returned. How it is executed is said with the function: ``travel.options(id="7", wait=False)``.
        """
        runs.check_plain(function)
        found: R = drive(self._executing(function, args, kwargs))
        return found

    def _executing(self, function: Any, args: Any, kwargs: Any) -> Steps:
        options = options_of(function)
        self._check_outside(options)
        taken = yield from self._wait_for_turn(options.turn_s)
        with self._host.executing(taken=taken):
            if options.replan is not None:
                return (yield from replanning(self._host, function, args, kwargs, options))
            yield from resuming(self._host)
            return (yield from runs.execute(self._host, known(function), args, kwargs, options))

    def _wait_for_turn(self, turn_s: float) -> Steps:
        """Whether it is the caller's turn to execute a run. Inside a run of its own, that cannot come."""
        check_seconds(turn_s, "a turn")
        end_s = time.monotonic() + turn_s
        while not (taken := self._host.take_turn()) and self._lane() is None and time.monotonic() < end_s:
            yield Sleep(CLOCK, _LOOK_S)
        return taken

    def _check_outside(self, options: Options) -> None:
        if self._lane() is None:
            check_repeatable(options, self.name)

    @overload
    async def arun(self, function: Callable[..., Awaitable[R]], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    async def arun(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R: ...
    async def arun(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As run(), for async functions. A plain one is executed, too, and blocks the loop as it would anywhere."""
        import asyncio

        number_tasks(asyncio.get_running_loop())
        return await drive_later(self._executing(function, args, kwargs))

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Submitted:
        """Hand a run over to whoever works on this store (``store.worker()``, `holdfast worker`): it begins there.

        The agent is handed over with it: this handle is closed. One with an id that is there already is not begun
        again, and answers the same.
        """
        found: Submitted = drive(self._submitting(function, args, kwargs))
        return found

    async def asubmit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Submitted:
        """As submit(), for async code."""
        found: Submitted = await drive_later(self._submitting(function, args, kwargs))
        return found

    def _submitting(self, function: Any, args: Any, kwargs: Any) -> Steps:
        from holdfast.run.handover import Submitted

        options = options_of(function)
        self._check_outside(options)
        check_declared(self._store._db, known(function).queue)
        with self._host.executing():
            yield from resuming(self._host)
            id = yield from runs.submitting(self._host, known(function), args, kwargs, options)
        yield Work(self.close)
        return Submitted(self._store, self.name, self.branch_name, id)  # type: ignore[arg-type] # of this room

    def resume(self, run: str, *, wait: bool = True) -> Any:
        """Go on with a run by its id, with the function and the arguments that it was executed with last."""
        function, args, kwargs = self._as_it_was(run)
        return self.run(configured(function, id=run, wait=wait), *args, **kwargs)

    async def aresume(self, run: str, *, wait: bool = True) -> Any:
        """As resume(), for async functions."""
        function, args, kwargs = self._as_it_was(run)
        return await self.arun(configured(function, id=run, wait=wait), *args, **kwargs)

    def _as_it_was(self, run: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function and the arguments of a run."""
        self._check_open()
        view = listing.View(self._store, self._row, self._branch)
        return listing.find_run(view, run, self, self._host.glance(whole=True))

    def cancel(self, run: str, *, compensate: bool = False) -> RunInfo:
        """Cancel a run of this branch, by its id: see ``store.cancel``. No worker has it while this handle is open."""
        self._check_writer()
        store = cast("Any", self._store)  # the stores of this room make these
        info: RunInfo = store.cancel(self.name, run, branch=self.branch_name, compensate=compensate)
        return info

    def _end(self, run: str, by: str, *, compensate: bool) -> None:
        """End a run that nobody executes."""
        with self._host.executing():
            drive(resuming(self._host))
            if compensate:
                drive(plan_rollback(self._host, listing.began_at(self._view(), run), shown=False)._going())
            else:
                listing.check_children(self._view(), run)
                drive(runs.cancel(self._host, run, by))

    def _hand_over(self, run: str, by: str) -> None:
        """Leave a run to a worker. One that a worker finds by itself is left as it is."""
        host = self._host
        with host.executing():
            past = host.past(run)
            meant = choose(host, past, mark_of(host, past.runs[run]), Options(id=run))
            if meant is None or meant.begin.kind != "run":
                raise RunUnfinished(f"{run!r} is part of another run", run=run, hint="Resume that one.")
            if meant.status not in {"", "waiting"} or not host.ledger.is_open(run):
                host.ledger.append(meant.resumed(now_us(), asked=encode(by)), flush=True)

    def plan_fork(self, run: str, *, at: str) -> ForkPlan:
        """What it would mean to execute a run once more from a position on, on a branch: ``.apply(branch)`` does it.

        ``at`` is the path of a call, as ``Effect.path`` has it, or a step: ``plan:0``. The run is as it was before it.
        """
        from holdfast.run.forking import plan_fork  # few programs need it

        return plan_fork(self, run, at)

    def fork(self, run: str, *, at: str, branch: str) -> RunInfo:
        """Execute a run once more from a position on, on a new branch: calls before it are answered from the record.

        What the run did from there on may happen again: look first, with ``plan_fork``. Returns the run there. It is
        interrupted: ``resume`` of a handle on that branch goes on with it, or a worker.
        """
        return self.plan_fork(run, at=at).apply(branch)

    async def afork(self, run: str, *, at: str, branch: str) -> RunInfo:
        """As fork()."""
        return await self.plan_fork(run, at=at).aapply(branch)

    def runs(self) -> list[RunInfo]:
        """The runs of this branch, oldest first."""
        return listing.runs_of(self._view())

    def version(self, name: str) -> bool:
        """Mark a change of a durable function: whether this run takes the new way at this place."""
        lane = self._lane()
        return lane.scope.version(lane, name) if lane is not None and isinstance(lane.scope, Run) else True

    # -- where it is --------------------------------------------------------------------------------------

    def task(self, name: str) -> AbstractContextManager[None]:
        """One execution of a task in a loop that is not a durable function: ``with agent.task("turn 7"):``.

        The name says which task it is, in this process and in the next. A call inside is known by the task, the tool,
        its arguments and how many such calls this execution has made before, in whatever order, thread or asyncio task.
        When the task is executed again, what it has done is answered from the record; other arguments for a tool that
        has written raise ``MaybeRepeated``. That lasts until a checkpoint is taken after it has ended without an error.
        """
        self._check_writer()
        lane = self._lane()
        if lane is not None and isinstance(lane.scope, Run):
            raise BadOption("this is a durable function, which has positions", hint="Leave agent.task(...) away.")
        self._host.check_free()
        return executing(self._host.loop, name)

    @property
    def position(self) -> str:
        """Where the caller is: the path of its next call. Empty outside of runs and ``with agent:``."""
        lane = self._lane()
        return lane.path if lane is not None else ""

    @property
    def stack(self) -> list[str]:
        """What is going on where the caller is, outermost first."""
        lane = self._lane()
        return lane.stack() if lane is not None else []

    def stack_at(self, revision: str | Checkpoint | None = None) -> list[str]:
        """What was going on when a checkpoint was taken inside a run, outermost first."""
        return listing.stack_of(self._view(), self._find(revision).id)

    def context(self) -> contextvars.Context:
        """A context for a job in another thread, outside of runs: ``pool.submit(agent.context().run, job)``."""
        return contextvars.copy_context()

    def _lane(self) -> Lane | None:
        lane = here() if HERE.get() is not None else None
        return lane if lane is not None and lane.scope.agent is self._host else None

    # -- what happened outside ------------------------------------------------------------------------------

    def effects(self, since: str | Checkpoint | None = None, *, run: str | None = None) -> list[Effect]:
        """Calls that were recorded, oldest first: after a checkpoint, of one run, or all of this branch."""
        after = position_of(self.at(since)) if since is not None else 0
        return listing.effects_of(self._view(), after, run)

    def events(self, limit: int | None = None) -> list[dict[str, Any]]:
        """What was moved, decided or sent, newest first, and by whom (``by``), on all branches.

        ``what`` is branch, tag, untag, rollback, rolled back, validity, decision, cancel, cancelled, signal, open ...
        """
        views = [listing.View(self._store, self._row, branch) for branch in self._store._db.view.branches(self._row.a)]
        found = super().events()
        for view in views:
            found += listing.decided(view)
            found += [listing.sent(one) for one in listing.signals_of(view)]
        return sorted(found, key=lambda one: one["when"], reverse=True)[:limit]

    def resolve(
        self, effect: Effect | str, decision: Literal["done", "not-done"], *, result: Any = None, why: str = ""
    ) -> Effect:
        """Record what became of a call that is in doubt, found out by a person. ``result`` is what it returned."""
        self._check_writer()
        if self._host.busy:
            raise BadOption("a run of this agent is being executed", hint="Let it end, resolve, then run it again.")
        call = listing.find_call(self._view(), effect)
        loop = self._host.loop
        decide(loop, call, decision, by=who(), why=why, result=result)
        loop.decided(call)
        return loop.effect_of(call)

    def accept(self, *effects: Effect | str) -> list[Effect]:
        """Say that writes are known of which the loaded state knows nothing: they answer no call, and stop none.

        Without arguments, all that are left; each is an effect, or its id. Returns them.
        """
        self._check_writer()
        loop, view = self._host.loop, self._view()
        named = [listing.find_call(view, one) for one in effects]
        keys = {call.intent.key for call in named if call.intent is not None} if effects else None
        return [loop.effect_of(call) for call in loop.accept(keys)]

    def _view(self) -> listing.View:
        self._check_open()
        self._store.flush()
        return listing.View(self._store, self._row, self._branch)

    def _evidence(self) -> dict[str, Any]:
        """For a dump of this process."""
        from holdfast.run.listing import evidence

        head = below.Agent.head.fget(self)  # type: ignore[attr-defined] # of the branch, wherever a run is
        return evidence(self._view(), head._id if head is not None else b"")

    # -- checkpoints ----------------------------------------------------------------------------------------

    @property
    def head(self) -> Checkpoint | None:
        """The newest checkpoint of this branch; while a run is executed again, the one that it has come to."""
        host = self._made_host()
        return self._seen(host.base) if host is not None and host.base is not None else super().head

    @overload
    def checkpoint(self, label: str = "", *, mode: Literal["wait"] = "wait") -> Checkpoint: ...
    @overload
    def checkpoint(self, label: str = "", *, mode: Literal["fork"]) -> Saving: ...
    def checkpoint(self, label: str = "", *, mode: Literal["wait", "fork"] = "wait") -> Checkpoint | Saving:
        """Save the state. Durable when it returns; writes only what changed.

        With ``mode="fork"`` a copy of the process encodes and writes it, and this one goes on: the answer's ``wait()``
        gives the checkpoint when it is durable. The next checkpoint, write or rollback waits for it. Where no copy can
        be made, as with other threads, it is written the ordinary way, and ``reason`` says why.
        Where an invariant sends the agent back, it returns the checkpoint that it went back to.
        """
        if mode not in {"wait", "fork"}:
            raise BadOption(f"mode={mode!r}", hint="Use wait or fork.")
        try:
            return self._forked(label) if mode == "fork" else self._checkpoint(label)
        except InvariantViolated as error:
            return cast("Checkpoint", drive(self._going_back(error)))

    def _forked(self, label: str) -> Saving:
        from holdfast.process import writer as forking  # few programs need it

        lane, writer = self._lane(), self._check_writer()
        if lane is not None and (isinstance(lane.scope, Run) or lane.stack()):
            return forking.Saving(
                self._checkpoint(label), "this is a durable run, or a phase, whose records go with it"
            )
        if self._host.judge is not None or writer.rest.atomic:
            return forking.Saving(self._checkpoint(label), "its invariants are asked before anything is written")
        self._host.check_free()
        self._host.ready()
        saving = forking.save(
            self._document, writer, check_label(label), self._remember, lambda: self._checkpoint(label)
        )
        self._pace.meant()
        return saving

    def _checkpoint(self, label: str) -> Checkpoint:
        lane = self._lane()
        if lane is not None and isinstance(lane.scope, Run):
            made: Checkpoint = drive(lane.scope.checkpoint(lane, label))
            return made
        self._check_writer()
        self._host.check_free()
        return self._captured(label)()

    async def acheckpoint(self, label: str = "") -> Checkpoint:
        """As checkpoint(). The event loop never waits for the disk.

        The content is fixed before the first await, unless something old is compared that has to be read again first:
        then it is fixed when that has been read.
        """
        try:
            return await self._checkpoint_later(label)
        except InvariantViolated as error:
            return cast("Checkpoint", await drive_later(self._going_back(error)))

    async def _checkpoint_later(self, label: str) -> Checkpoint:
        began_s = time.monotonic()
        await self._bring_told()
        lane = self._lane()
        if lane is not None and isinstance(lane.scope, Run):
            made: Checkpoint = await drive_later(lane.scope.checkpoint_later(lane, label))
            return made
        self._check_writer()
        self._host.check_free()
        with self._check_writer().quiet():
            looked = await self._look_later()
            try:
                write = self._captured(label, looked=looked, began_s=began_s)
            except BaseException:
                self._check_writer().discard(looked)
                raise
        written: Checkpoint = await Work(write).later()
        return written

    def _make(self, label: str, kind: str = "checkpoint", target: bytes = b"", **options: Any) -> Checkpoint:
        return self._captured(label, kind=kind, target=target, **options)()

    def _captured(self, label: str, **options: Any) -> Callable[[], Checkpoint]:
        """A checkpoint outside of runs, ready to be written. Where phases are going on, they are kept with it."""
        lane = self._lane()
        if lane is None or not (stack := lane.stack()):
            write = self._host.capture(label, **options)
            self._pace.meant()
            return write
        path = lane.path

        def note(made: Checkpoint) -> list[Record]:
            return [Saved(now_us(), "", path, made._id, bytes.fromhex(made.digest), stack)]

        write = self._host.capture(label, note, **options)
        self._pace.meant()
        return write

    def plan_rollback(self, revision: str | Checkpoint, *, accept: Collection[str] = ()) -> RollbackPlan:
        """What going back to a checkpoint would do, to the state and outside; ``.apply()`` does it.

        ``accept`` names effects that may be left standing: tools, or ids of single effects.
        """
        return plan_rollback(self._host, below.required(revision), accept=accept)

    def rollback(self, revision: str | Checkpoint, *, accept: Collection[str] = ()) -> Checkpoint:
        """Go back to a checkpoint: undo what was done outside since, newest first, then move the state.

        What came after it stays in the history, and unsaved changes are saved first. Raises ``RollbackBlocked`` when
        something cannot be undone. Inside a run it ends the execution. Arguments as for ``plan_rollback``.
        """
        plan = plan_rollback(self._host, below.required(revision), accept=accept, shown=False)
        made: Checkpoint = plan.apply()
        return made

    async def arollback(self, revision: str | Checkpoint, *, accept: Collection[str] = ()) -> Checkpoint:
        """As rollback()."""
        plan = plan_rollback(self._host, below.required(revision), accept=accept, shown=False)
        made: Checkpoint = await plan.aapply()
        return made

    # -- files ----------------------------------------------------------------------------------------------

    _workspace: Workspace | None = None
    _chosen = False  # whether somebody has said which it is

    @property
    def workspace(self) -> Path | None:
        """The directory whose files each checkpoint carries; None where it has none."""
        return self._workspace.path if self._workspace is not None else None

    def _attach(self, root: str | os.PathLike[str] | None) -> None:
        """Have a workspace from now on: this one, or the one that is remembered. Who chose to have none has none."""
        chosen, self._chosen = self._chosen, True
        if chosen and root == REMEMBERED:
            return
        if self._workspace is not None or root is None:
            if self._workspace is not None and root != REMEMBERED and not self._workspace.is_at(root):
                raise BadOption(
                    f"{self.name!r} is open in this process already, with the workspace {self._workspace.path}",
                    hint="Close that handle first, or open it with the same one.",
                )
            return
        if root == REMEMBERED and self._db.view.fact(WORKSPACE + self._branch.uuid.hex()) is None:
            head = self.head
            if head is None or not head.has_files:
                return
        from holdfast.process import claims  # few agents have one
        from holdfast.process import workspace as process

        if root == REMEMBERED:
            root = claims.remembered(self)
        if root is not None:
            self._workspace = process.attach(self, root)

    def files(self, revision: str | Checkpoint | None = None) -> list[FileInfo]:
        """The files of a checkpoint (None: the newest), by path: what each is, without its content."""
        from holdfast.process import changes, workspace

        point = self._find(revision)
        return changes.listed(workspace.tree_of(self, point), workspace.marks_of(self, point))

    def read_file(self, path: str, revision: str | Checkpoint | None = None) -> bytes:
        """The content of a file of a checkpoint (None: the newest); of a link, its target."""
        from holdfast.process import workspace as process

        return process.content_of(self, self._find(revision), path)

    def _files_between(self, old: Checkpoint | None, new: Checkpoint | None) -> Sequence[FileChange]:
        if self._workspace is None and not any(one.has_files for one in (old, new, self.head) if one is not None):
            return ()
        from holdfast.process import workspace as process

        return process.between(self, self._workspace, old, new)

    def export_workspace(
        self, revision: str | Checkpoint | None, directory: str | os.PathLike[str], *, links: bool = False
    ) -> Path:
        """Write the files of a checkpoint (None: the newest) into a directory that is not there yet; gives its path.

        ``links``: also those that lead out of it, of a checkpoint that was made in another store.
        """
        from holdfast.process import workspace as process

        self._check_open()
        return process.export(self, self._find(revision), directory, links=links)

    def restore_workspace(self) -> bool:
        """Put the files of the newest checkpoint back; the state stays as it is. Answers whether one has changed.

        What is there now is kept in a checkpoint that the branch does not move to: see ``log(all=True)``.
        """
        self._outside("restore_workspace")
        if self._workspace is None:
            raise BadOption(f"{self.name!r} has no workspace", hint="Open it with workspace=DIRECTORY.")
        return self._workspace.put_back()

    # -- children -------------------------------------------------------------------------------------------

    def spawn(self, function: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Child:
        """Begin a child: ``function(child, ...)`` as a run of the agent ``this/name``, in a thread of its own."""
        return children.spawn(self._host, function, name, args, kwargs)

    async def aspawn(self, function: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Child:
        """As spawn(). An async function becomes a task of this loop."""
        return await children.aspawn(self._host, function, name, args, kwargs)

    def undo(self) -> Checkpoint:
        """Append a checkpoint that reverses the last one not yet undone."""
        self._outside("undo")
        return super().undo()

    def redo(self) -> Checkpoint:
        """Append a checkpoint that does again what the last undo reversed."""
        self._outside("redo")
        return super().redo()

    def _outside(self, what: str) -> None:
        lane = self._lane()
        if lane is not None and isinstance(lane.scope, Run):
            raise BadOption(
                f"{what} cannot be used inside a run: it would be missing when the run is executed again",
                hint="Change the state back, or use it after the run.",
            )
        self._check_writer()
        self._host.check_free()

    def branch(
        self, name: str, at: str | Checkpoint | None = None, *, workspace: str | os.PathLike[str] | None = None
    ) -> Agent:
        """Begin a branch at a checkpoint (default: here, saving unsaved changes first) and return a handle on it.

        ``workspace``: a directory of its own, which is not there yet: it gets the files of that checkpoint.
        """
        if at is None and self._host.has_remains:
            at = self.head  # what a run left behind that stopped is its own
        if workspace is None:
            return cast("Agent", super().branch(name, at))  # the store makes these
        if at is None and self.dirty:
            self.checkpoint(f"before branch {name}")
        from holdfast.process.claims import check_place

        check_place(self, workspace)
        copy = self.export_workspace(at, workspace)
        try:
            made = cast("Agent", super().branch(name, at))
        except BaseException:
            import shutil

            shutil.rmtree(copy, ignore_errors=True)  # it was not there before
            raise
        made._attach(copy)
        return made

    # -- the handle -------------------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        if self._alone or ((host := self._made_host()) is not None and host.busy):
            who = "a worker of this process has" if self._alone else "this process executes"
            raise AgentBusy(
                f"{who} a run of {self.name}; nothing was removed",
                hint="Cancel the run first (store.cancel), or wait until it has ended.",
            )

    def _take_again(self) -> None:
        super()._take_again()
        if (host := self._made_host()) is not None:
            host.forget()

    def _check_quiet(self) -> None:
        if self._alone or ((host := self._made_host()) is not None and host.busy):
            raise AgentBusy(f"this process executes a run of {self.name}, which resumes by itself")
        if any_under_way():
            raise AgentBusy("a call that changes something outside is under way")

    @contextmanager
    def _still(self) -> Iterator[None]:
        # In this order: whoever records has the first of them, and wants the second.
        with self._host.loop.lock, super()._still():
            yield

    @contextmanager
    def _unused(self) -> Iterator[None]:
        lock = self._host.loop.lock
        # Whoever has it may be waiting for the writer, which whoever asks here has.
        if not lock.acquire(blocking=False):
            raise AgentBusy("something is being recorded")
        try:
            yield
        finally:
            lock.release()

    def _made_host(self) -> AgentHost | None:
        """The host, if anything needed it yet."""
        return self.__dict__.get("_host")

    def _load_head(self) -> None:
        super()._load_head()
        self._document.guard = self._check_change
        if (host := self._made_host()) is not None:
            host.moved()

    def _retake(self, *, thawed: bool) -> None:
        super()._retake(thawed=thawed)
        if (host := self._made_host()) is not None:
            host.retaken(thawed=thawed)

    def _plan_thaw(
        self, revision: str, accept: Collection[str]
    ) -> tuple[Collection[str], Collection[str], Callable[[], object] | None]:
        # The process goes on as if it had done none of this. What stands has to answer it, or to stop it.
        plan = RollbackPlan(self._host, self._host.target(revision).id, tuple(accept), shown=False, leaving=True)
        plan.check_blocked()
        for one in plan.accepted:
            if one.agent != self.name or one.effect.tool == LOST:
                raise NotThawed(
                    f"{one} would be left standing, and the process would not know of it: it could do it again",
                    hint="Go back to the checkpoint with `holdfast rollback`, and start the program anew.",
                )
        undone = [one.effect.tool for one in plan.undo]
        return plan.unknown(), undone, plan.apply if plan.needed else None

    def _check_change(self) -> None:
        self._check_open()
        lane = self._lane()
        if lane is not None and not lane.scope.owns_state:
            raise ReadOnly(
                "an item of a batch changes the agent's state, which others use at the same time",
                hint="Return the value: store.map gives you all of them, in the order of the items.",
            )
        if (effect := EFFECT.get()) is not None and lane is not None:
            raise ReadOnly(
                f"{effect.tool} changes the agent's state; the change would be missing when its record answers",
                hint='Return the value and change the state in the caller, or declare the tool effect="local".',
            )

    def _check_writer(self) -> BranchWriter:
        writer = super()._check_writer()
        host: AgentHost | None = self.__dict__.get("_host")
        if host is not None and host.base is not None:
            host.align(writer)
        return writer

    def _find(self, revision: str | Checkpoint | None) -> Point:
        host, head = self._made_host(), self.head
        if revision is None and host is not None and host.behind and head is not None:
            return head._current()
        return super()._find(revision)

    acancel = twin(cancel, Long)
    aresolve, aaccept, aundo, aredo = twin(resolve), twin(accept), twin(undo), twin(redo)
    aflush = twin(below.Agent.flush)
    arestore_workspace, aexport_workspace = twin(restore_workspace), twin(export_workspace)

    def _shut(self) -> None:
        if not self._closed and (host := self._made_host()) is not None:
            host.close()
        super()._shut()

    def _is_left(self) -> bool:
        return (host := self._made_host()) is not None and (host.busy or host.has_remains)

    def __enter__(self) -> Self:
        if self._writer is not None:
            drive(self._whole())
            self._enter(self._host.loop)
        return self

    def _whole(self) -> Steps:
        """Finish a rollback that was interrupted, unless whoever executes here has done so."""
        if self._host.take_turn():
            with self._host.executing(taken=True):
                yield from resuming(self._host)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if not self._entered and self._at_end(error) and (write := self._ready(END)) is not None:
            write()
        self._check_saved(error)

    async def __aenter__(self) -> Self:
        if self._writer is not None:
            await drive_later(self._whole())
            loop = self._host.loop
            await drive_later(loop.settling())  # probes may be async, and could not be asked later from plain code
            self._enter(loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if not self._entered and self._at_end(error):
            await self._later(END)
        self._check_saved(error)

    def _check_saved(self, error: BaseException | None) -> None:
        """Say it when the agent is current no more and has changes that are not saved."""
        if not self._entered and (lost := unsaved.found(self)) is not None:
            unsaved.say(f"`with agent:` ended, and {lost.agent} has changes that are not saved", lost, error)

    def _enter(self, loop: Loop) -> None:
        lane = self._lane()
        if lane is not None and isinstance(lane.scope, Run):
            raise BadOption("the agent is current already: this is its run", hint="Leave `with agent:` away.")
        entered = active(loop.lane)
        entered.__enter__()
        with loop.lock:  # another thread may be leaving
            self._entered.setdefault(flow(), []).append(entered)
            loop.ended = False

    def _leave(self) -> None:
        if not self._entered:
            return
        here, loop = flow(), self._host.loop
        with loop.lock:
            here = here if here in self._entered else next(reversed(self._entered))  # it was entered elsewhere
            entered = self._entered[here].pop()
            if not self._entered[here]:
                del self._entered[here]
            loop.ended = not self._entered
        try:
            entered.__exit__(None, None, None)
        except ValueError:  # left in another context than it was entered in, as some test runners do
            HERE.set(None)


def check_repeatable(options: Options, name: str) -> None:
    """Refuse a run inside another agent's run, unless the caller says which run it means.

    When the outer run is executed again nobody would know which one it was.
    """
    lane = here() if options.id is None else None
    if lane is None or not isinstance(lane.scope, Run) or lane.scope.ended:
        return
    raise BadOption(
        f"a run of {name} inside a run of {lane.scope.agent.name} would be done twice when that is executed again;"
        " it was not begun",
        hint="Begin a child: agent.spawn(function, name, ...).join(). Or give the run an id of its own.",
    )
