"""Workers: whoever resumes runs that were killed, put off or handed over, by itself.

Owns finding such runs, taking them up, executing some at a time, and setting aside one that ends its worker again and
again. Must not know how a run goes. What always holds: whoever holds a branch executes its run, and nobody else does,
so that any number of workers, in any number of processes, share a store; a try is recorded in the transaction in which
the branch is taken, so before it is made, and where anything was written since the line was read, somebody was faster,
and nothing is taken; a run whose function this process does not have is left to others.

    worker = Worker(store, concurrency=16)
    worker.run(drain=False)              work until stop() is called; with ``drain`` until there is nothing to do
    worker.stop(grace_s)                 begin nothing new; answers the runs that had not stopped when the time was over
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from holdfast.agent.branch import BranchWriter, read_line
from holdfast.errors import (
    AgentBusy,
    BadOption,
    Cancelled,
    Damaged,
    Diverged,
    Fenced,
    HoldfastError,
    StoreBusy,
    StoreFailed,
    UnknownAgent,
    Waiting,
)
from holdfast.run import listing, opened
from holdfast.run import records as rec
from holdfast.run.durables import DURABLES
from holdfast.run.effects import SPAWN
from holdfast.run.line import entries
from holdfast.run.past import Past
from holdfast.run.planning import pending
from holdfast.run.queues import Turns
from holdfast.run.schedule import Schedules
from holdfast.run.scope import now_us
from holdfast.run.steps import Aside, Long, twin
from holdfast.store.catalog import View
from holdfast.store.changes import Change
from holdfast.store.engine import Lease, Unsure
from holdfast.store.rows import Agent as AgentRow
from holdfast.store.rows import Branch, Open

if TYPE_CHECKING:
    from holdfast.run.handle import Agent
    from holdfast.run.store import Store

log = logging.getLogger("holdfast.run")

POLL_S = 0.04
"""How often a worker looks for something to do, if nothing is written that might be."""

LOOKING, REST_MAX_S = 20, 1.0
"""How many times as long as a look takes a worker rests before the next one, and how long at most."""

STALE_S = 0.5
"""How long what a look has found is gone through: what comes first may have come since."""

AWAY_POLL_S = 0.5
"""How often it looks whether a store is there again that could not be reached."""

CONCURRENCY_MAX = 1000

PLACES = 1000
"""Workers that can be told apart from outside; a further one works unseen."""

FUNCTIONS_MAX_BYTES = 2000
"""Names of functions that a worker says it has. What a holder says of itself has a bound."""

TRIES = 3
"""How often a run may end its worker without getting any further."""

AWAY_S = 300.0
"""How long a worker goes on trying to reach its store."""

LEFT_S = 60.0
"""How long a worker leaves a run alone that it could not even begin to resume: its agent is damaged, say."""

_AWAY = (StoreFailed, StoreBusy, Unsure)
"""What the store raises while it cannot be reached: its server is started anew, say."""

_TOLD = frozenset({*listing.OVER, "needs attention"})


class Worked(NamedTuple):
    """What became of a run: finished, waiting, failed, needs attention, code changed, or left to others."""

    agent: str
    branch: str
    run: str
    function: str
    became: str
    about: str = ""


class _Job(NamedTuple):
    """A run that somebody should resume."""

    owner: AgentRow
    place: Branch  # as it was when it was found
    run: str
    function: str
    queue: bytes
    turn: int

    @property
    def agent(self) -> str:
        return self.owner.name

    @property
    def branch(self) -> str:
        return self.place.name

    @property
    def b(self) -> int:
        return self.place.b

    def __str__(self) -> str:
        return f"run {self.run} of {self.agent}@{self.branch}"


class Worker:
    """Resumes what can be resumed, ``concurrency`` runs at a time. Make one with ``store.worker()``.

    ``tell`` is called with what became of each run. ``alone(agent, branch, run)`` executes a run that has ended its
    worker before, in a process of its own; without it, such a run is executed when nothing else is.
    """

    def __init__(
        self,
        store: Store,
        *,
        concurrency: int = 16,
        tell: Callable[[Worked], None] | None = None,
        alone: Callable[[str, str, str], None] | None = None,
    ) -> None:
        if not 0 < concurrency <= CONCURRENCY_MAX:
            raise BadOption(f"a concurrency of {concurrency}", hint=f"Use a number from 1 to {CONCURRENCY_MAX}.")
        self._store = store
        self._concurrency = concurrency
        self._tell = tell
        self._process = alone
        self._stopping = False
        self._found: Iterator[_Job] = iter(())  # what is left of the last look for something to do
        self._full: set[bytes] = set()  # queues in which somebody found no room since then
        self._stale_s = 0.0  # from when on it is too old
        self._looking = threading.Lock()  # one at a time goes on with that
        self._free = threading.Event()  # somebody has ended his last run
        self._state = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # what is executed, by branch
        self._at_work = 0  # threads that execute one, or tell what became of it
        self._handles: dict[int, Agent] = {}  # with which handles
        self._alone = 0  # runs that wait for the others to end, or are executed without them
        self._quiet = False  # one of them is executed now
        self._passed: dict[tuple[int, str], str] = {}  # runs that the code of this process does not fit, and that code
        self._left: dict[int, float] = {}  # branches that could not be opened, and until when they are left alone
        self._behind: dict[int, int] = {}  # those whose child somebody else holds -> the child's branch
        self._warned: set[str] = set()  # what damage was told of
        self._children: set[tuple[int, str]] = set()  # runs that their parents resume
        self._turns = Turns(store._db)
        self._torn: Counter[tuple[int, str]] = Counter()  # runs that the store has torn off, and how often in a row

    # -- working ----------------------------------------------------------------------------------------------

    def run(self, *, drain: bool = False) -> None:
        """Work until ``stop`` is called; with ``drain`` until nothing can be resumed any more."""
        present = self._present()
        try:
            self._run(drain=drain)
        finally:
            if present is not None:
                present.release()

    def _run(self, *, drain: bool) -> None:
        db, schedules = self._store._db, Schedules(self._store)
        seen: int | None = -1
        checked = False
        reached_s = time.monotonic()
        while not self._stopping:
            before_s = time.thread_time()
            try:
                if not checked:
                    self._turns.check()
                    checked = True
                schedules.look()
                self._turns.say_entered()
                begun, reached_s = self._begin(), time.monotonic()
                if begun:
                    continue
                # In this order: what is not found may be a job by now, and what is no job any more may be told still.
                left = drain and (self._jobs or next(self._find(full=True), None) or self._jobs or self._at_work)
                if drain and not left and not schedules.look(at_once=True):
                    break
                if len(self._jobs) >= self._concurrency:
                    self._free.clear()
                    self._free.wait(POLL_S)  # until one has ended, and nothing that was found is left
                else:
                    # Where others write all the time, looking must not become all that is done.
                    time.sleep(min(REST_MAX_S, LOOKING * (time.thread_time() - before_s)))
                    db.await_change(seen, POLL_S)
                seen = db.stamp()  # before the next look, so that it misses nothing
            except _AWAY as error:
                if time.monotonic() - reached_s > AWAY_S:
                    raise
                log.warning("the store cannot be reached: %s", error.message)
                time.sleep(AWAY_POLL_S)
        with suppress(*_AWAY):  # whoever comes next finds it out
            self._turns.say_entered()

    def _present(self) -> Lease | None:
        """Say that somebody works here: a lock of no branch, which is free when this process has ended, however."""
        names = sorted(DURABLES)
        functions = names if sum(map(len, names)) + 8 * len(names) < FUNCTIONS_MAX_BYTES else []
        for place in range(PLACES):
            try:
                return self._store._db.leases.take(
                    place.to_bytes(16, "big"), lambda: 0, lambda _: True, {"functions": functions}, b=0, wait_s=0.0,
                    takeover=False,
                )  # fmt: skip
            except AgentBusy:
                continue  # another worker's
            except HoldfastError as error:
                log.warning("nobody sees that this worker is here: %s", error.message)
                break
        return None

    async def arun(self, *, drain: bool = False) -> None:
        """As run(), without blocking the event loop. Cancelling it stops the worker, and waits for what it executes."""
        try:
            await Aside(lambda: self.run(drain=drain), "holdfast-worker").begin()
        finally:
            await self.astop()

    def one(self, agent: str, branch: str, run: str) -> None:
        """Execute this run here, though it may end this process."""
        view = self._store._view(agent, branch)
        b = view._branch.b
        for row in self._store._db.view.opened(b, []):
            if (row.run, row.signal) == (opened.key(run), b""):
                job = _Job(view._agent, view._branch, run, row.body["function"], row.queue, row.turn)
                with self._state:
                    if self._jobs.setdefault(b, job) is not job:
                        return  # it is executed here already
                self._work(job)

    def end(self) -> None:
        """Begin nothing new: ``run`` returns. Safe in a signal handler, which may stand in whatever a lock guards."""
        self._stopping = True

    def stop(self, grace_s: float | None = None) -> list[tuple[str, str, str]]:
        """Begin nothing new, and wait for what is executed, at most so long.

        Returns what had not stopped then, as agent, branch and run: the next worker resumes these when this process has
        ended.
        """
        self._stopping = True
        end_s = None if grace_s is None else time.monotonic() + grace_s
        with self._looking:
            self._found = iter(())  # nobody reads the store any more to find something
        with self._state:
            while self._jobs:
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._state.wait(left_s)
            left = list(self._jobs.values())
        for job in left:
            with suppress(HoldfastError):  # it only says that it was not its fault
                handle = self._handles.get(job.b)
                if handle is not None and not handle.closed:
                    handle._host.ledger.append(rec.Note(now_us(), job.run, "stopped", "worker"), flush=True)
        return [(job.agent, job.branch, job.run) for job in left]

    astop = twin(stop, Long)

    def _begin(self) -> int:
        """Begin to execute as much as there is room for; returns how much that was."""
        begun, looked = 0, False
        while self._has_room():
            job = self._next()
            if job is None:
                if looked:
                    break
                with self._looking:
                    self._look()
                looked = True
                continue
            # Python does not wait for it: whoever ends this process may, with stop().
            threading.Thread(target=self._work_on, args=(job,), name="holdfast-work", daemon=True).start()
            begun += 1
        return begun

    def _look(self) -> None:
        self._found, self._stale_s = self._find(), time.monotonic() + STALE_S
        self._full.clear()

    def _next(self) -> _Job | None:
        """The next run of those that were found, which is as good as begun now."""
        with self._looking:
            if time.monotonic() > self._stale_s and not self._stopping:
                self._look()
            while self._has_room() and (job := next(self._found, None)) is not None:
                if job.b in self._jobs or job.queue in self._full:
                    continue
                if not self._turns.begin(job.b, job.queue, job.turn):
                    self._full.add(job.queue)  # whoever comes after it must not get a place that is free a moment later
                    continue
                with self._state:
                    if self._has_room():
                        self._jobs[job.b] = job
                        return job
                self._turns.done(job.b, job.queue)
                return None  # whoever looks next finds it again
        return None

    def _work_on(self, job: _Job | None) -> None:
        """One run after another, as long as some were found."""
        while job is not None:
            with self._state:
                self._at_work += 1
            try:
                self._work(job)
            finally:
                with self._state:
                    self._at_work -= 1
            try:
                job = self._next()
            except _AWAY:
                break  # whoever looks next is told
        self._free.set()

    def _has_room(self) -> bool:
        return not self._stopping and len(self._jobs) < self._concurrency and not self._alone

    def _find(self, *, full: bool = False) -> Iterator[_Job]:
        """What somebody should resume, and nobody does; with ``full``, also where its queue has no room for it."""
        self._store._db.flush()
        view, at_us = self._store._db.view, now_us()
        damaged: list[Damaged] = []
        for b, rows in opened.candidates(view, at_us, self._held, damaged, queued=False):
            self._warn(damaged)
            yield from self._of_branch(view, b, rows)
        for page in self._turns.pages(view, at_us, damaged, full=full):
            for row in opened.come(view, page, at_us, self._held, damaged):
                yield from self._of_branch(view, row.b, [row])
            self._warn(damaged)
        self._warn(damaged)

    def _of_branch(self, view: View, b: int, rows: list[Open]) -> Iterator[_Job]:
        if b in self._jobs or self._left.get(b, 0.0) > time.monotonic():
            return
        try:
            branch = view.branch_at(b)
            if not branch.a or self._held(branch) or self._is_behind(b):
                return
            for row in rows:
                id, made = opened.id_of(row), DURABLES.get(row.body["function"])
                if made is not None and self._passed.get((b, id)) != made.code and (b, id) not in self._children:
                    yield _Job(view.agent_at(branch.a), branch, id, made.name, row.queue, row.turn)
        except UnknownAgent:
            pass  # removed meanwhile
        except Damaged as error:
            self._warn([error])
            self._left[b] = time.monotonic() + LEFT_S

    def _warn(self, damaged: list[Damaged]) -> None:
        """Say once what is passed over: others go on."""
        for error in damaged:
            if error.message not in self._warned:
                self._warned.add(error.message)
                log.warning("passed over until `holdfast repair`: %s", error.message)

    def _is_behind(self, b: int) -> bool:
        """Whether a run cannot go on because somebody else has its child, as it was found out, and still has it."""
        child = self._behind.get(b)
        if child is not None and self._held(self._store._db.view.branch_at(child)):
            return True
        self._behind.pop(b, None)
        return False

    def _held(self, branch: Branch) -> bool:
        return self._store._db.leases.alive(branch.uuid, branch.generation)

    # -- one run ------------------------------------------------------------------------------------------------

    def _work(self, job: _Job) -> None:
        told = None
        try:
            told = self._execute(job)
        except (AgentBusy, Fenced):
            pass  # somebody was faster
        except _AWAY as error:
            # Whatever it has done is in its line, or will be found out. The store may be away for long.
            log.warning("%s was torn off: %s", job, error.message)
            self._torn[job.b, job.run] += 1
            self._left[job.b] = time.monotonic() + min(LEFT_S, POLL_S * 4.0 ** self._torn[job.b, job.run])
        except Exception as error:  # noqa: BLE001 - what keeps one run from being resumed does not stop the others
            told = self._leave(job, "left", str(error))
        finally:
            with self._state:
                del self._jobs[job.b]
                self._handles.pop(job.b, None)
                self._turns.done(job.b, job.queue)
                self._state.notify_all()
        if told is not None:
            log.info("%s (%s): %s %s", job, job.function, told.became, told.about)
            if self._tell is not None:
                self._tell(told)

    def _execute(self, job: _Job) -> Worked | None:
        seen = _read(self._store, job.place)
        if seen.is_child(job.run):
            self._children.add((job.b, job.run))
            return None
        tries = len(seen.tries(job.run))
        if tries and self._torn[job.b, job.run]:  # which was not its fault
            with closing(self._store._open_alone(job.agent, branch=job.branch, create=False)) as handle:
                handle._host.ledger.append(_excuse(job.run), flush=True)
            return None
        if tries >= TRIES or seen.goes_back:
            with closing(self._store._open_alone(job.agent, branch=job.branch, create=False)) as handle:
                return self._look_after(handle, job, seen)
        if tries < TRIES - 1 or self._process is None:
            with self._room(alone=tries == TRIES - 1), closing(self._take(seen, job)) as handle:
                self._handles[job.b] = handle
                return self._resume(handle, job)
        self._process(job.agent, job.branch, job.run)
        if self._store._db.view.branch_at(job.b).line == seen.branch.line:
            return self._leave(job, "left", "the process that was to execute it has not begun to")
        return None  # what became of it, that process has told

    def _take(self, seen: _Seen, job: _Job) -> Agent:
        claim = self._turns.claim(job.b, opened.key(job.run), job.queue)
        with claim.alone:
            handle = _taken(self._store, job.owner, seen, job.run, claim)
        self._turns.claimed(job.b)
        return handle

    def _look_after(self, handle: Agent, job: _Job, seen: _Seen) -> Worked | None:
        """What is not simply resumed: it was tried too often, or its agent goes back."""
        rollback = pending(handle._host.past())
        if rollback is not None and rollback.status == "attention":  # each look at it would try it once more
            return self._leave(job, "needs attention", "a rollback of its agent is stuck")
        tries = seen.tries(job.run)
        if len(tries) < TRIES:
            claim = self._turns.claim(job.b, opened.key(job.run), job.queue)
            with claim.alone:
                self._store._db.change(lambda change: claim(change, handle._host.generation), job.b)
            self._turns.claimed(job.b)
            handle._host.for_worker = True
            self._handles[job.b] = handle
            return self._resume(handle, job)
        return self._set_aside(handle, job, tries[-1].at) if handle._host.ledger.count == len(seen.records) else None

    @contextmanager
    def _room(self, *, alone: bool) -> Iterator[None]:
        """Inside, a run that has ended its worker before is executed alone, so that it takes no other with it."""
        if not alone:
            yield
            return
        with self._state:
            self._alone += 1
        try:
            with self._state:
                while self._quiet or len(self._jobs) > self._alone:
                    self._state.wait()
                self._quiet = True
            yield
        finally:
            with self._state:
                self._alone -= 1
                self._quiet = False
                self._state.notify_all()

    def _resume(self, handle: Agent, job: _Job) -> Worked | None:
        def told(became: str, about: str = "") -> Worked:
            return Worked(job.agent, job.branch, job.run, job.function, became, about)

        handle._host.entering = lambda: self._turns.enter(job.b, opened.key(job.run), job.queue)
        try:
            if DURABLES[job.function].waits:
                asyncio.run(handle.aresume(job.run, wait=False))
            else:
                handle.resume(job.run, wait=False)
        except (*_AWAY, Fenced):
            raise
        except Waiting as error:
            if 0 < error.until <= now_us():  # the clock that it goes by is behind ours
                self._left[job.b] = time.monotonic() + 1.0
            return told("waiting", error.message)
        except Diverged as error:
            self._passed[job.b, job.run] = DURABLES[job.function].code
            handle._host.ledger.append(_excuse(job.run))
            return told("code changed", str(error))
        except (Exception, Cancelled) as error:  # noqa: BLE001 - one run that ends so does not stop the others
            about = str(error) if isinstance(error, HoldfastError) else f"{type(error).__qualname__}: {error}"
            became = next((info.status for info in handle.runs() if info.id == job.run), "failed")
            if became in _TOLD:
                return told(became, about)
            handle._host.ledger.append(_excuse(job.run))
            if isinstance(error, AgentBusy):
                self._wait_behind(job, error)
                return told("left", about)
            return self._leave(job, "left", about)
        self._torn.pop((job.b, job.run), None)
        return told("finished")

    def _wait_behind(self, job: _Job, error: AgentBusy) -> None:
        """Somebody else has its child: the next try comes when he has let go of it."""
        view, held = self._store._db.view, error.holder
        agent = view.agent(str(held.get("agent", "")))
        child = view.branch(agent.a, str(held.get("branch", ""))) if agent is not None else None
        if child is not None:
            self._behind[job.b] = child.b
        else:
            self._leave(job, "left", "")

    def _leave(self, job: _Job, became: str, about: str) -> Worked:
        """It is as it was: trying it at once would end as this has."""
        self._left[job.b] = time.monotonic() + LEFT_S
        return Worked(job.agent, job.branch, job.run, job.function, became, about)

    def _set_aside(self, handle: Agent, job: _Job, since_us: int) -> Worked:
        """``since_us``: when it was tried first. What is left of a process may name a dump."""
        left = (one for one in handle.crashes() if one["what"] == "crash" and one["when"].timestamp() * 1e6 >= since_us)
        dump = next((f"see `holdfast dump show {one['dump']}`" for one in left), "no dump was left")
        said = f"it has ended its worker {TRIES} times without getting further; {dump}"
        fault = ("", "WorkerLost", said, None)
        handle._host.ledger.append(rec.End(now_us(), job.run, "attention", fault=fault), flush=True)
        return Worked(job.agent, job.branch, job.run, job.function, "needs attention", said)


# -- taking a run up ----------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A branch as it was read, before anybody has taken it: its line, and the rows of its open runs."""

    branch: Branch
    records: list[tuple[int, rec.Record]]
    rows: dict[bytes, Open]
    goes_back: bool  # a rollback has begun and not ended

    def is_child(self, run: str) -> bool:
        """Whether it is a child's run: that one goes on with its parent, which has to be told what comes of it."""
        notes = (one for _, one in self.records if isinstance(one, rec.Note))
        return any((one.what, one.name) == (SPAWN, run) for one in notes)

    def tries(self, run: str) -> list[rec.Note]:
        """When workers have resumed a run in vain, newest first: after its last record, the line ends with these.

        What others do, who interrupt what they have resumed, says nothing.
        """
        found = []
        for _, record in reversed(self.records):
            if not isinstance(record, rec.Note) or record.run != run or record.what not in {"resume", "trace"}:
                break
            found += [record] if (record.what, record.path) == ("resume", rec.WORKER) else []
        return found


def _read(store: Store, branch: Branch) -> _Seen:
    """Read the whole line of a branch, which the chain proves. The rows come last, so that they are not older."""
    view = store._db.view
    records = list(opened.decoded(read_line(view, branch), branch.b))
    rows = view.opened(branch.b, [])
    runs = {row.run: row for row in rows if not row.signal}
    return _Seen(branch, records, runs, any(row.signal == opened.GOING_BACK.signal for row in rows))


def _taken(store: Store, owner: AgentRow, seen: _Seen, run: str, claim: Callable[[Change, int], None]) -> Agent:
    """Become the writer of a branch, for a run that is resumed now; a handle that nobody else in this process gets.

    ``claim``, which gets the generation, claims its place in its queue in the same transaction. Raises ``AgentBusy``
    where somebody has the branch, or has had it since it was read, or it is not its turn.
    """
    branch, row = seen.branch, seen.rows.get(opened.key(run))
    if row is None:
        raise _faster(run)
    note = rec.Note(now_us(), run, "resume", row.body["status"], path=rec.WORKER)
    (record,) = entries(note)
    rows: Mapping[bytes, Open] = seen.rows
    if record.follow is not None:
        record = record._replace(opens=record.follow(rows, branch.records + 1), follow=None)
        rows = record.opens.applied(rows)
    ours = branch

    def count(change: Change, now: Branch) -> Branch:
        nonlocal ours
        if (now.generation, now.line) != (branch.generation, branch.line):
            raise _faster(run)
        claim(change, now.generation + 1)
        ours = now.at_end(change.put_records(now.b, now.end, [record]))
        return ours

    with store._lock:
        known = store._handles.get(branch.b)
        if known is not None and not known.closed:
            raise AgentBusy(f"{known.name} is open in this process", hint="Close the handle on it.")
    lease = store._lease(owner.name, branch, wait_s=0.0, also=count)
    try:
        ours = ours._replace(generation=lease.generation)
        handle: Agent = store._opened(owner, ours, lease, None)  # type: ignore[assignment] # of this room
        handle._alone = True
        if handle._writer is not None:
            handle._writer.know_opened(rows)
        with store._lock:
            store._handles[branch.b] = handle
        handle._host.picked_up(run, Past([*seen.records, (ours.records, note)]))
    except BaseException:
        with suppress(HoldfastError):
            BranchWriter(store, ours).append(entries(_excuse(run)), flush=True)
        lease.release()
        raise
    return handle


def _excuse(run: str) -> rec.Note:
    """What is recorded where a try has ended without the run being at fault: it does not count."""
    return rec.Note(now_us(), run, "stopped", rec.WORKER)


def _faster(run: str) -> AgentBusy:
    return AgentBusy(f"somebody else has picked run {run} up", hint="Look again.")
