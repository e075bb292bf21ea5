"""What becomes of a branch's changes on their way to the disk: written directly, handed over, asked about, or dropped.

Owns where the branch stands for its writer, which is one value, ``_now``, that changes in one assignment, so that no
interrupt can part it. Must not know what a checkpoint consists of, nor when one is made. What always holds: a change
whose outcome is not known is asked for by its id before anything else is done; changes are written in the order in
which they were made; what was not written is the document's again, and the next capture carries it along.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from holdfast.agent import watchers
from holdfast.agent.history import children
from holdfast.agent.pending import Now, Pending
from holdfast.codec.document import Document
from holdfast.codec.state import Sections
from holdfast.codec.told import Captured, Saved
from holdfast.errors import Damaged, Fenced, HoldfastError, StoreBusy, StoreClosed, StorePoisoned
from holdfast.store import copies
from holdfast.store.catalog import View
from holdfast.store.changes import NOTHING, Change, NewCheckpoint, NewRecord, Objects, now_us, pack_node
from holdfast.store.engine import Refused, Unsure, went_back
from holdfast.store.rows import Branch
from holdfast.store.writer import PASSING, TAKEN, Job

if TYPE_CHECKING:
    from holdfast.agent.store import Store

PENDING_MAX = 128
"""Changes of a branch that may be on their way: more wait for the oldest."""

PENDING_FEW = 8
"""The same while so many changes of other branches wait that more of them would only take up memory."""

TAKEN_MAX = 8
"""Records that wait for company and are taken along directly: what is prepared for each number of them is kept."""

WHOLE = sys.maxsize
"""As many unsealed checkpoints as this: the next one makes the state whole in the store."""


class _Unfounded(Refused):
    """What a change stands on was not written, as far as was known then."""


class Commits:
    """The way of one branch's changes to the disk. Threads may share it."""

    def __init__(self, store: Store, branch: Branch) -> None:
        self.lock = threading.RLock()
        self._store = store
        self._db = store._db
        self._now = Now(branch)
        self._metadata = b""  # that of the head
        self._unsealed = 0  # checkpoints since all nodes of the state were stored
        self._undivided = _Undivided()
        self._failures = 0  # those that were looked at
        self._taking = False  # whether some may have been taken back
        self._astray = False  # whether the branch may have been moved by something that was cut short
        self._stall_us = 0  # how long its maker stood still for the newest checkpoint
        self._durable_us = 0  # how long it took until the newest was durable of those that are
        self.copy: threading.Thread | None = None  # waits for a copy of this process that writes a checkpoint

    # -- where it stands ------------------------------------------------------------------------------------

    def _check_writable(self, what: str) -> None:
        self._db.check_usable()
        if self.copy is not None:
            self.await_copy()
        if copies.INSIDE:
            copies.check_outside(what)

    def await_copy(self) -> None:
        """Return when no copy of this process writes a checkpoint of the branch. It needs the lock for that."""
        copy = self.copy
        if copy is not None and copy is not threading.current_thread():
            copy.join()

    @property
    def branch(self) -> Branch:
        """The branch as it is to be when everything is written."""
        return self._now.tip

    @property
    def firm(self) -> Branch:
        """The branch as it is stored."""
        return self._now.firm

    @property
    def generation(self) -> int:
        return self._now.firm.generation

    @property
    def under_way(self) -> set[Captured]:
        """The captures that are on their way."""
        return {one.captured for one in self._now.pending if one.captured is not None}

    @property
    def waiting(self) -> bool:
        """Whether something waits for the next call, because the one that made it was cut short."""
        return any(one.job is None for one in self._now.pending)

    # -- written, or not ------------------------------------------------------------------------------------

    def finish(self, pending: Pending) -> Pending:
        """Write what is pending up to this one, and return when it is written."""
        try:
            self._finish(pending)
        except BaseException as error:
            pending.watch.end(error)
            raise
        if pending.watch is not watchers.UNWATCHED:
            pending.watch.end(id=pending.id.hex(), depth=pending.tip.depth, size_bytes=pending.size_bytes)
        return pending

    def _finish(self, pending: Pending) -> None:
        with self.lock, self._undivided:
            self._write(pending)
        self._written_or_raise(pending)
        self._stall_us = pending.stall_us = max(1, round((time.monotonic() - pending.began_s) * 1e6))

    def _write(self, pending: Pending) -> None:
        """Write it, or have it written with all before it."""
        if not pending.lazy and pending.job is None and not pending.settled and self._now.pending[-1] is pending:
            self._try_directly(pending)
        self._settle(hand=True, unless=pending)
        pending.accepted = pending.lazy and pending.error is None

    def _written_or_raise(self, pending: Pending) -> None:
        if not pending.lazy:
            self._wait_for(pending)
        if pending.error is not None:
            raise pending.error

    def _try_directly(self, pending: Pending) -> None:
        """One call into the engine, in this thread. If an interrupt comes out of it, the next call asks the store.

        It is the last one. Records before it that wait for company, so that nobody waits for them, are taken along.
        """
        if pending.tried or pending.onto is not None or pending.also is not None or pending.names:
            return
        earlier = self._now.pending[:-1]
        if not earlier:
            self._directly(pending, ())
            return
        with self._db.writers.taking:
            if self._take_along(earlier, pending.guard):
                self._directly(pending, [record for one in earlier for record in one.records])
            self._settle(hand=True, unless=pending)  # what was not made is in the queue again: others may wait for it

    def _directly(self, pending: Pending, earlier: Sequence[NewRecord]) -> None:
        objects = Objects({name: pack_node(raw) for name, raw in pending.about.items()}) if pending.about else NOTHING
        for one in self._now.pending:  # the first one first: it is the one that is asked about
            one.tried = pending
        try:
            found = self._db.directly(partial(_make, pending, self._now.firm, objects, earlier))
        except StorePoisoned:
            raise  # what the disk has of it is unknown
        except Unsure:
            return  # the next step asks
        except HoldfastError as error:
            self._drop(error)
            self._settle(hand=True, unless=pending)  # what was accepted is tried again by itself
            raise
        for one in self._now.pending:
            if found is not None:
                self._written(one, found[0])
            else:
                one.tried = None

    def _take_along(self, earlier: Sequence[Pending], guard: tuple[int, int] | None) -> bool:
        """Whether these can be written together with the next one: then no writer's thread has them any more."""
        if len(earlier) > TAKEN_MAX or sum([len(one.records) for one in earlier]) > TAKEN_MAX:
            return False
        for one in earlier:
            if one.captured is not None or one.nodes or one.chunks or one.guard != guard or one.tried:
                return False
        jobs = [one.job for one in earlier if one.job is not None]
        self._taking = True
        if jobs and not self._db.writers.take_back(jobs, self._now.firm.b):
            return False
        for one in earlier:
            one.job = None
        return True

    def _wait_for(self, pending: Pending) -> None:
        while not pending.settled:
            job = pending.job
            if job is None:
                raise StoreClosed("the checkpoint was not written", hint="The store was closed meanwhile.")
            with suppress(HoldfastError):  # seen to below, where those that stand on it are, too
                job.wait()
            with self.lock, self._undivided:
                self._settle(hand=True, unless=pending)

    # -- handing over, and what became of it ----------------------------------------------------------------

    def _make_job(self, pending: Pending, before: Branch | Pending, *, relying: bool = False) -> Job[Branch]:
        """Bring what can be brought beforehand to disk, and prepare the rest, so that nobody waits for it.

        ``relying``: on what is there, since whoever asks sees to it that it is made anew should some of that go.
        """
        if not (pending.about or pending.names):
            size, work = len(pending.raw) + len(pending.operations), partial(_make, pending, before, NOTHING, ())
            pending.job = job = Job(work, lazy=pending.lazy, patience_s=pending.patience_s, size_bytes=size)
            return job
        pack = pending.packed
        there = self._db.view.has_chunks(pending.chunks) if pending.chunks and not pending.alone else set()
        if len(there) < len(pending.chunks):
            self._db.engine.check_place()
            pack = self._db.packs.write((name, data) for name, data in pending.chunks.items() if name not in there)
        nodes = {**pending.about, **pending.nodes, **(pending.sealing if pending.sealed else {})}
        needs = set(pending.named)
        if pending.sealed and pending.manifest is not None:
            needs |= {root for _, root in pending.manifest.sections}
            for raw in nodes.values():
                needs.update(children(raw))
        # A section that comes back is mostly there already, and packing it is dear.
        kept = self._db.view.has_nodes(nodes) if relying and not pending.whole and len(nodes) > 1 else set()
        needs |= kept
        pending.relies = bool(kept)
        packed = {name: pack_node(raw) for name, raw in nodes.items() if name not in kept}
        pending.pack = pack.uuid if pack is not None else b""
        packs = [*([pack] if pack is not None else ()), *(one for looked in pending.looked for one in looked.packs)]
        objects = Objects(packed, packs, frozenset(needs - packed.keys()), frozenset(pending.chunks_named | there))
        size = len(pending.raw) + len(pending.operations) + sum(map(len, packed.values()))
        pending.job = job = Job(partial(_make, pending, before, objects, ()), lazy=pending.lazy, size_bytes=size)
        return job

    def founding(self, pending: Pending, found: Callable[[Change], Branch]) -> Callable[[Change], Branch]:
        """The change that makes the branch, which is nowhere yet, and writes what is pending onto it.

        Whoever makes it sees to what becomes of it: nothing is handed over here.
        """
        before = Pending(pending.tip)
        before.job = made = Job(found)
        work = self._make_job(pending, before).work

        def whole(change: Change) -> Branch:
            made.result = found(change)
            return work(change)

        return whole

    def _settle(self, *, hand: bool = False, unless: Pending | None = None) -> None:
        """See what became of everything that is pending; ``hand``: and hand over what was not.

        Raises what kept something from being written, unless whoever has ``unless`` will.
        """
        if self._astray:
            self._look_where()
        if self._taking:
            for one in self._now.pending:
                if one.job is not None and one.job.error is TAKEN:  # an interrupt came when it had just been taken back
                    one.job = None
            self._taking = False
        while self._now.pending:
            first = self._now.pending[0]
            if first.tried and first.job is None:
                self._ask(first)
                continue
            if first.job is None or not first.job.finished:
                if Job.failures != self._failures:
                    self._tell(self._drop_failed(), unless)
                if hand or first.job is not None or len(self._now.pending) >= PENDING_MAX:
                    last = self._now.pending[-1].job
                    if last is None or not last.handed:  # they are handed over in their order
                        self._hand_over()
                waiting = len(self._now.pending)
                few = waiting < PENDING_FEW or not self._db.writers.crowded(self._now.firm.b)
                if waiting < PENDING_MAX and few:
                    return
                if first.job is not None:
                    first.job.join()
                continue
            error = first.job.error
            if error is None and first.job.result is not None:
                self._written(first, first.job.result)
            elif isinstance(error, Unsure):
                self._ask(first)
            elif isinstance(error, _Unfounded):  # its answer was lost, and asked for since: it is there
                self._begin_anew(error)
            elif (
                isinstance(error, Refused)
                and (first.sealed or first.relies or (first.chunks and first.chunks_tried < 3))
                and self._stands(first)
            ):
                # Nodes that it counts on are gone: it is written without. Or chunks are: then it brings them itself.
                first.chunks_tried += not first.sealed
                first.sealed, first.whole = False, True
                self._unsealed = WHOLE
                self._begin_anew(error)
            else:
                if isinstance(error, Refused) and first.document is not None and self._stands(first):
                    first.document.retell()
                    error = StoreBusy(
                        "a checkpoint that this state is based on was just removed; nothing was written",
                        hint="Take the checkpoint again: it is written whole then.",
                    )
                self._tell(self._drop(error or StoreClosed("the change was not written")), unless)

    def _begin_anew(self, error: Refused) -> None:
        """Let all that is pending be prepared again: the first of it was refused, and so is what stands on it."""
        for one in self._now.pending:
            if one.job is not None and not one.job.withdraw(error):
                one.job.join()
            if one.pack and one.packed is None:
                self._db.packs.discard(one.pack)
            one.job, one.pack = None, b""

    def _tell(self, dropped: tuple[Pending, ...], unless: Pending | None) -> None:
        if dropped and unless not in dropped:
            raise dropped[0].error or StoreClosed("the change was not written")

    def _drop_failed(self) -> tuple[Pending, ...]:
        """One that fails, while others before it are tried again because nobody waits for them, is not written."""
        failures = Job.failures
        for at, one in enumerate(self._now.pending):
            if one.job is None or not one.job.finished:
                continue
            error = one.job.error
            if isinstance(error, HoldfastError) and not isinstance(error, (Refused, Unsure)):
                return self._drop(error, at)
        self._failures = failures
        return ()

    def _hand_over(self) -> None:
        """Hand over what is pending, in its order: an interrupt may have kept any of it back."""
        pending = self._now.pending
        start = len(pending)
        while start and not ((job := pending[start - 1].job) is not None and job.handed):
            start -= 1
        before: Branch | Pending = pending[start - 1] if start else self._now.firm
        for at, one in enumerate(pending[start:], start):
            try:
                if one.job is None:
                    self._make_job(one, before, relying=True)
                if one.job is not None:
                    self._db.hand(one.job, self._now.firm.b)
            except HoldfastError as error:  # whoever is told so must not find it written later
                self._drop(error, at)
                raise
            before = one

    def _written(self, pending: Pending, branch: Branch) -> None:
        """It is in the store. Cut short anywhere, all of this is done again by the next call."""
        if pending.document is not None and pending.captured is not None:
            pending.document.written(pending.captured, sealed=pending.sealed)
        if pending.manifest is not None:
            self._metadata = pending.manifest.metadata
        pending.done = branch
        if pending.captured is not None:
            ended_s = pending.job.ended_s if pending.job is not None else time.monotonic()
            self._durable_us = max(1, round((ended_s - pending.began_s) * 1e6))
        now = self._now
        rest = now.pending[1:]
        self._now = Now(branch, rest, now.onto, pending.opened)
        pending.tried = None  # not before; with itself it would be a cycle, and all that it holds memory for long
        if pending.captured is not None:
            self._store._tending.made(branch, sealed=pending.sealed)

    def _ask(self, pending: Pending) -> None:
        """Nobody knows whether it was written, with those that were tried with it: see whether it is there.

        By a change, which waits for one that is still being committed, and is refused when we are fenced.
        """
        firm, last = self._now.firm, pending.tried or pending

        def look(change: Change) -> Branch:
            change.guard(firm.b, firm.generation)
            return change.branch_at(firm.b)

        try:
            row = self._db.change(look, firm.b)
        except Refused as error:  # somebody has taken the branch: after this was written, perhaps
            point = self._db.view.find(last.id) if last.captured is not None else None
            if point is not None:
                self._written(pending, last.tip._replace(head=point.n))
            else:
                self._drop(error, unknown=True)
            return
        # Others may have been written in the same transaction: the branch stands where the last of them has left it.
        waiting = self._now.pending
        ends = [at for at, one in enumerate(waiting) if (one.tip.id, one.tip.chain) == (row.id, row.chain)]
        if ends:
            for one in waiting[: ends[-1]]:
                point = self._db.view.find(one.id) if one.captured is not None else None
                self._written(one, one.tip._replace(head=point.n if point is not None else one.tip.head))
            self._written(waiting[ends[-1]], row)
            return
        cut = StoreBusy("the change was interrupted before it was written; nothing was written")
        self._drop(cut, unknown=(row.head, row.line) != (firm.head, firm.line))

    def _look_where(self) -> None:
        """Ask the store where the branch stands. Where somebody else has taken it, the next write says so."""
        firm = self._now.firm

        def look(change: Change) -> Branch:
            change.guard(firm.b, firm.generation)
            return change.branch_at(firm.b)

        with suppress(Refused):
            self._now = self._now._replace(firm=self._db.change(look, firm.b))
        self._astray = False

    def _stands(self, pending: Pending) -> bool:
        """Whether the branch is still what its writer believes, so that a refusal had another reason."""
        row, firm = self._db.view.branch_at(self._now.firm.b), self._now.firm
        if pending.guard is not None:
            b, generation = pending.guard
            if self._db.view.branch_at(b).generation != generation:
                return False
        return (row.generation, row.head, row.line) == (firm.generation, firm.head, firm.line)

    def _drop(self, error: BaseException, since: int = 0, *, unknown: bool = False) -> tuple[Pending, ...]:
        """What is pending, ``since`` that place, will not be written. The document keeps it for the next capture.

        Where the reason passes, what was accepted is tried again, with all that it stands on. Whoever waited for some
        of that is told so. Returns what is dropped for good. ``unknown``: some of it may be written all the same.
        """
        now = self._now
        if isinstance(error, Refused):
            error = self._moved(unknown=unknown)
        end = since
        if isinstance(error, PASSING):
            end = max([since, *(at + 1 for at, one in enumerate(now.pending) if one.accepted)])
        for one in now.pending[since:]:
            if one.job is not None:
                one.job.withdraw(error)
        for one in now.pending[since:end]:
            one.error = one.error or (None if one.accepted else error)
            one.lazy, one.tried = True, None
            one.job = Job(one.job.work, lazy=True, size_bytes=one.job.size_bytes) if one.job is not None else None
        kept, dropped = now.pending[:end], now.pending[end:]
        for one in dropped:
            if isinstance(error, HoldfastError) and not (unknown or isinstance(error, StorePoisoned)):
                self._discard(one)  # of others nobody knows who names it by now
            one.error = one.error or error
        captures = [one.captured for one in dropped if one.captured is not None]
        if captures:
            document = next(one.document for one in dropped if one.captured is not None)
            self._take_back(document, captures[0].before, captures)
        if dropped:
            self._unsealed = WHOLE  # the next one makes the state whole in the store
            self._now = Now(now.firm, kept, dropped[0].onto, now.opened)
        return dropped

    def _moved(self, *, unknown: bool = False) -> Fenced | Damaged:
        """Why the branch is not what its writer believes: somebody else has it, or the store has gone back."""
        mine, there = self._now.firm, self._db.view.branch_at(self._now.firm.b)
        lost = lacks(self._db.view, mine, there)
        return went_back(f"the store at {self._db.place}") if lost else fenced(mine, there, unknown=unknown)

    @staticmethod
    def _take_back(document: Saved | None, before: Sections, dropped: Sequence[Captured]) -> None:
        if isinstance(document, Document):
            document.take_back(before, dropped)

    def _discard(self, pending: Pending) -> None:
        """Nothing names the packs that it brought."""
        for pack in filter(None, (pending.pack, *(one.uuid for looked in pending.looked for one in looked.packs))):
            self._db.packs.discard(pack)

    # -- quiet ----------------------------------------------------------------------------------------------

    def settle(self) -> Branch:
        """Return when everything that was made is durable; gives the branch as it is then."""
        self._db.check_usable()
        self.await_copy()
        while True:
            with self.lock, self._undivided:
                try:
                    if self._now.pending and (last := self._now.pending[-1]).job is None and not last.lazy:
                        self._try_directly(last)
                finally:
                    self._settle(hand=True)  # what was accepted is tried again by itself
                if not self._now.pending:
                    return self._now.firm
                last = self._now.pending[-1]
                job = last.job
            if job is not None:
                if job.lazy:
                    self._db.flush()
                job.join()

    @contextmanager
    def still(self, document: Saved) -> Iterator[Branch]:
        """Inside, nothing is pending, and no other thread changes or captures the state: history can be moved."""
        self._check_writable("the state was to be moved")
        with self.lock:
            while True:
                self.settle()
                with document.lock, self._undivided:
                    if self._now.pending:
                        continue  # a capture slipped in between the two locks
                    outer = self._undivided.stilled
                    try:
                        self._undivided.stilled = True
                        yield self._now.firm
                    finally:
                        self._undivided.stilled = outer
                    return


class _Undivided:
    """A signal handler may come in between, and ask for a checkpoint itself: not in the middle of another one.

    Whether this thread is in the middle of one is told by its stack, which no interrupt can leave wrong. Whoever enters
    has the writer's lock.
    """

    __slots__ = ("_inside", "stilled")

    def __init__(self) -> None:
        self._inside: FrameType | None = None
        self.stilled = False  # history is being moved, and whoever does that saves what it needs

    def __enter__(self) -> None:
        inside = self._inside
        if inside is not None and not self.stilled and _on_stack(inside):
            raise busy()
        self._inside = sys._getframe(1)

    def __exit__(self, *_: object) -> None:
        self._inside = None  # also of one inside a still one, where nobody is refused


def busy() -> StoreBusy:
    return StoreBusy(
        "checkpoint() was called while the state was being changed or saved, by a signal handler for example",
        hint="Let the handler set a flag, and take the checkpoint between two steps.",
    )


def _make(
    pending: Pending, before: Branch | Pending, objects: Objects, earlier: Sequence[NewRecord], change: Change
) -> Branch:
    """Write what is pending. ``before``: what it stands on, which may be on its way itself.

    ``earlier`` are records between the two that are written with it.
    """
    old = before
    if isinstance(old, Pending):
        if old.job is None or old.job.error is not None or old.job.result is None:
            raise _Unfounded("what it stands on was not written")
        old = old.job.result
    if objects is not NOTHING:
        change.put_objects(objects)
    if pending.also is not None:
        pending.also(change, pending.id)
    if pending.guard is not None:
        change.guard(*pending.guard)
    for said in pending.said:
        change.say(old.a, said)
    if pending.captured is None:
        moved = old.at_end(change.put_records(old.b, old.end, [*earlier, *pending.records]))
        return change.move(old, moved)
    first = [*earlier, *pending.first]
    new = NewCheckpoint(pending.id, pending.raw, pending.operations, pending.key, pending.sealed, first)
    moved = change.commit(old, new, pending.records, pending.onto)
    if pending.suspect:
        mark_suspect(change, moved, pending.id, pending.suspect)
    return moved


def mark_suspect(change: Change, branch: Branch, id: bytes, reason: str) -> None:
    """Mark the checkpoint that a branch was just moved to."""
    change.set_validity(branch.a, branch.head, {"validity": "suspect", "reason": reason, "at": now_us()})
    change.say(branch.a, {"what": "validity", "at": id, "validity": "suspect", "reason": reason})


def _on_stack(wanted: FrameType) -> bool:
    """Whether a frame is one of this thread's callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def lacks(view: View, mine: Branch, there: Branch) -> bool:
    """Whether a branch is ``there`` what it was before it was ``mine``, which was acknowledged.

    A generation never falls, and while it is ours nothing leads back but a loss.
    """
    if there.generation != mine.generation:
        return there.generation < mine.generation
    back = (there.epoch, there.depth) < (mine.epoch, mine.depth) or there.records < mine.records
    return back or bool(mine.id and view.find(mine.id) is None)


def fenced(mine: Branch, there: Branch, *, unknown: bool = False) -> Fenced:
    taken = there.generation != mine.generation
    why = "another process has taken it over" if taken else "it was moved meanwhile"
    done = "the history shows whether its last change was written" if unknown else "nothing was written"
    return Fenced(
        f"this process may no longer write branch {mine.name!r}: {why}; {done}",
        hint="Open the agent again to go on from what is there.",
    )
