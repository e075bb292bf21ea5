"""The writer of one branch: from a captured state to a durable checkpoint, and the records between checkpoints.

Owns the order of everything that goes to disk for a branch. The document keeps what was captured until somebody says
that it is written, so whatever fails, the next capture carries it along. What always holds: where the branch stands for
its writer is one value, ``_now``, which changes in one assignment, so that no interrupt can part it; a change whose
outcome is not known is asked for by its id before anything else is done; checkpoints and records are written in the
order in which they were made, and a checkpoint never before the records that it speaks of.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

from holdfast.agent import metadata, watchers
from holdfast.agent.history import children, chunks_of
from holdfast.agent.layers import ANY, MOMENTARY, Layer, Looked
from holdfast.agent.pending import Gathered, Now, Pending
from holdfast.agent.points import Rest
from holdfast.agent.schedule import TRIGGERS
from holdfast.agent.when import When
from holdfast.codec.blocks import LEAF_MAX_BYTES
from holdfast.codec.document import Document
from holdfast.codec.operations import encode_operations, operations_size
from holdfast.codec.state import Sections
from holdfast.codec.told import Captured, Saved
from holdfast.errors import (
    AtomicOpen,
    BadOption,
    Damaged,
    Fenced,
    HoldfastError,
    StoreBusy,
    StoreClosed,
    StorePoisoned,
)
from holdfast.store import copies
from holdfast.store.catalog import View
from holdfast.store.changes import (
    NOTHING,
    UNCHANGED,
    Change,
    NewCheckpoint,
    NewRecord,
    Objects,
    Parent,
    Said,
    chained,
    now_us,
    pack_node,
)
from holdfast.store.cipher import digest
from holdfast.store.engine import Again, Refused, Shared, Unsure, check_poison
from holdfast.store.manifest import Cost, Manifest, Position, identity
from holdfast.store.rows import Branch, Open, Point, Record, link
from holdfast.store.writer import PASSING, TAKEN, Job

if TYPE_CHECKING:
    from holdfast.agent.store import Store

SEAL_CHECKPOINTS = 256
SEAL_BYTES = 512 * 1024
"""How much a reader may have to replay before a checkpoint writes the nodes of its state: number, and bytes."""

RECORD_MAX_BYTES = 2**20
"""The longest record. Values over 16 KiB are named by digest, so one that is longer is a mistake of its maker."""

PENDING_MAX = 128
"""Changes of a branch that may be on their way: more wait for the oldest."""

TAKEN_MAX = 8
"""Records that wait for company and are taken along directly: what is prepared for each number of them is kept."""

_ROW_BYTES = 256
"""What a checkpoint costs a reader besides its values."""

_LOOKS = 5
"""How often what goes with the state is looked at again because others have saved it meanwhile."""

Note = Callable[["Pending"], Sequence[NewRecord]]
"""Makes the records that go to disk with a checkpoint; they may name it. Nothing is written if it raises."""


class _Overtaken(Exception):
    """What was looked at is compared with something that is not told any more."""


def _quietly(method: Callable[..., Pending]) -> Callable[..., Pending]:
    """Let a method be called only while everything is quiet that the program has asked to be."""

    @wraps(method)
    def call(self: BranchWriter, *args: Any, **options: Any) -> Pending:
        with self.quiet():
            return method(self, *args, **options)

    return call


class BranchWriter:
    """The writer of one branch. Threads may share it."""

    def __init__(
        self,
        store: Store,
        branch: Branch,
        *,
        guard: Callable[[], tuple[int, int] | None] | None = None,
        config: Any = None,
        when: When | None = None,
    ) -> None:
        """``guard`` names the lease that covers the branch when it is not its own: a branch and its generation."""
        self.lock = threading.RLock()
        self.config = config
        # The same for all writers of a store, but for those with a configuration or a policy of their own.
        own = config is not None or when is not None
        self._description = metadata.Description(store._registry, config, when) if own else store._description
        self._metadata = b""  # that of the head
        self._store = store
        self._db = store._db
        self._guard = guard
        self._now = Now(branch)
        self._unsealed = 0
        self._unsealed_bytes = 0
        self._inside: FrameType | None = None
        self._stilled = False
        self._failures = 0  # those that were looked at
        self._last_s = time.monotonic()  # when the newest checkpoint was made, or the writer began
        self._stall_us = 0  # how long its maker stood still for it
        self._durable_us = 0  # how long it took until the newest was durable of those that are
        self.layers: list[Layer] = []  # what is saved together with the state
        self.rest = Rest()  # whether nobody is in the middle of something
        self.copy: threading.Thread | None = None  # waits for a copy of this process that writes a checkpoint
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext  # around every capture
        self.failed = 0  # how often the agent has failed since the last checkpoint

    # -- where it stands ------------------------------------------------------------------------------------

    def _check_writable(self, what: str) -> None:
        self._db.check_usable()
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
    def head_id(self) -> bytes:
        """The checkpoint that the next one is a child of."""
        onto = self._now.onto
        if onto is None:
            return self._now.tip.id
        return onto.point.id if onto.point is not None else b""

    @property
    def elsewhere(self) -> bool:
        """Whether the next one is not a child of the branch's newest."""
        return self._now.onto is not None

    @property
    def position(self) -> Position:
        """The end of the line of records."""
        return self._now.tip.records, self._now.tip.chain

    @property
    def opened(self) -> Mapping[bytes, Open] | None:
        """The rows of the branch's open runs when everything is written; None: nobody has read them yet."""
        now = self._now
        return now.pending[-1].opened if now.pending else now.opened

    def know_opened(self, rows: Mapping[bytes, Open]) -> None:
        """These are the rows of the branch's open runs. From then on they follow from the records."""
        with self.lock:
            if self.opened is None:
                for one in self._now.pending:  # none of them changes any, or they would be known
                    one.opened = rows
                self._now = self._now._replace(opened=rows)

    def forget_opened(self) -> None:
        """Others may have changed the rows of open runs: they are read again."""
        with self.lock:
            self._now = self._now._replace(opened=None)

    def _followed(self, made: Pending, records: Sequence[NewRecord], count: int) -> Sequence[NewRecord]:
        """Records with what they change in the rows of open runs. ``count``: how many there are before them."""
        if all(one.follow is None and one.opens is UNCHANGED for one in records):
            return records
        found = []
        for number, record in enumerate(records, count + 1):
            opens = record.opens if record.follow is None else record.follow(made.opened or {}, number)
            if opens is not UNCHANGED:
                made.opened = opens.applied(made.opened or {})
            found.append(record._replace(opens=opens, follow=None))
        return found

    @property
    def under_way(self) -> set[Captured]:
        """The captures that are on their way."""
        return {one.captured for one in self._now.pending if one.captured is not None}

    @property
    def waiting(self) -> bool:
        """Whether something waits for the next call, because the one that made it was cut short."""
        return any(one.job is None for one in self._now.pending)

    def start_from(
        self,
        point: Point | None,
        since_base: Sequence[Point],
        *,
        moved: Branch | None = None,
        records: Sequence[NewRecord] = (),
    ) -> None:
        """The live state is that of ``point``; ``since_base`` are the checkpoints that loading it replays.

        ``moved``: the branch stands there now, and ``records`` were written with that. Otherwise it stays where it is
        until the next checkpoint.
        """
        view = self._db.view
        self._metadata = b""
        self._unsealed = len(since_base)
        self._unsealed_bytes = sum(len(view.operations(one)) + _ROW_BYTES for one in since_base)
        if moved is not None:
            made = Pending(moved)
            made.opened = self._now.opened
            self._followed(made, records, moved.records)
            self._now = Now(moved, opened=made.opened)
        else:
            now = self._now
            at_head = now.tip.id == (point.id if point is not None else b"")
            self._now = now._replace(onto=None if at_head else Parent(point))

    # -- a checkpoint ---------------------------------------------------------------------------------------

    def checkpoint(self, document: Saved, label: str, **options: Any) -> Pending:
        """Make a checkpoint and write it. Durable when it returns, unless the store is batched."""
        return self.finish(self.capture(document, label, **options))

    def capture(
        self, document: Saved, label: str, kind: str = "checkpoint", target: bytes = b"", **options: Any
    ) -> Pending:
        """As _capture(), and whoever watches is told."""
        if not watchers.observed():
            return self._capture(document, label, kind, target, **options)
        branch = self._now.tip
        name = self._db.view.agent_at(branch.a).name
        watch = watchers.begin("checkpoint", name, branch.name, label=label, kind=kind)
        try:
            made = self._capture(document, label, kind, target, mark=watch.mark, **options)
        except BaseException as error:
            watch.end(error)
            raise
        made.watch = watch
        return made

    @_quietly
    def _capture(
        self,
        document: Saved,
        label: str,
        kind: str,
        target: bytes,
        *,
        looked: Sequence[Looked] | None = None,
        **options: Any,
    ) -> Pending:
        """As _fix(). ``looked`` is what look() has given before; what comes of that is not left lying about."""
        self._check_writable("a checkpoint was asked for")
        looked = self.look() if looked is None else looked
        for _ in range(_LOOKS):
            if not looked:
                return self._fix(document, label, kind, target, **options)
            before = document.told.sections
            try:
                return self._fix(document, label, kind, target, looked=looked, **options)
            except _Overtaken:
                self.discard(looked)
                looked = self.look()
            except BaseException:
                under_way = self.under_way
                self._take_back(document, before, [one for one in document.told.unacknowledged if one not in under_way])
                self.discard(looked)
                raise
        raise StoreBusy("others saved what goes with the state while it was looked at, each time; nothing was saved")

    def _fix(
        self,
        document: Saved,
        label: str,
        kind: str,
        target: bytes,
        *,
        mark: str = "",
        trigger: str = "",
        lazy: bool = False,
        suspect: str = "",
        cost: Cost | None = None,
        began_s: float = 0.0,
        key: bytes = b"",
        said: Sequence[Said] = (),
        first: Sequence[NewRecord] = (),
        note: Note | None = None,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
        looked: Sequence[Looked] = (),
        also: Callable[[Change, bytes], None] | None = None,
    ) -> Pending:
        """Fix the content of a checkpoint. ``finish`` writes it, and so does the next call if this one is cut short.

        ``key`` is what it can be looked up by, ``said`` goes into the log with it. ``first`` are records that go with
        it and that it knows, ``note`` makes such that come after it; ``nodes`` and ``chunks`` are what these name.
        ``mark`` is an observer's. ``suspect`` says why it is marked so, if it is. ``trigger`` is what asked for it, if
        the program did not; with ``lazy`` nobody waits until it is durable. ``began_s``: since when its maker stands
        still for it, if not since now. ``looked`` is what look() has given; ``also(change, id)`` is done in the same
        transaction.
        """
        began_s = began_s or time.monotonic()
        self._check_writable("a checkpoint was asked for")
        with self.lock, self._undivided(document):
            self._settle()
            with document.lock:
                if self.rest.atomic or (trigger in TRIGGERS and not self.rest.whole):
                    what = "`with agent.atomic():` is open" if self.rest.atomic else "a write of another task is open"
                    raise AtomicOpen(
                        f"{what}, so the state may be half changed; nothing was saved",
                        hint="Save it after that. If another task or thread is in it, wait for that one.",
                    )
                self._give(document, looked)
                captured = document.capture(self.under_way)
                self._unsealed += 1
                self._unsealed_bytes += _ROW_BYTES + operations_size(captured.operations)
                named = captured.nodes.copy()
                sealed = self._seal_is_due(document)
                if sealed:
                    document.seal(captured)
                    self._unsealed = self._unsealed_bytes = 0
            now = self._now
            tip, onto = now.tip, now.onto
            made = Pending(tip)
            time_us = now_us()
            described, about = self._description.now(mark)
            made.operations = encode_operations(captured.operations, time_us, self._store._registry)
            parent, depth = tip.id, tip.depth
            if onto is not None:
                parent, depth = (onto.point.id, onto.point.manifest.depth) if onto.point is not None else (b"", 0)
            manifest = Manifest.make(
                parent,
                depth + 1,
                captured.sections,
                digest(b"operations", made.operations),
                chained(tip.end, checked(first)),
                described,
                label,
                time_us,
                kind,
                target,
                cost or self._cost(trigger, began_s),
            )
            made.began_s = began_s
            made.manifest, made.raw = manifest, manifest.encode()
            made.id = identity(made.raw)
            made.document, made.captured = document, captured
            if sealed:
                made.sealed, made.sealing = True, captured.nodes
            if named or nodes:
                made.nodes = {**named, **(nodes or {})}
            before = next((one.manifest for one in reversed(now.pending) if one.manifest is not None), None)
            if described != (self._metadata if before is None else before.metadata):  # what the tip names is there
                made.about = about
            if captured.chunks or chunks:
                made.chunks = {**captured.chunks, **(chunks or {})}
            made.named = frozenset(captured.named)
            made.chunks_named = frozenset(chunks_of(captured.operations) - made.chunks.keys())
            if captured.needs:
                made.chunks_named |= captured.needs
            made.looked, made.also = looked, also
            made.key, made.said, made.onto, made.suspect = key, said, onto, suspect
            made.guard = self._guard() if self._guard is not None else None
            made.lazy = (lazy or self._store._batched) and not (made.chunks or made.looked)
            made.tip = tip.standing(tip.head, made.id, depth + 1, tip.epoch)
            made.opened = self.opened
            if first or note is not None:
                made.first = self._followed(made, first, tip.records)
                after = checked(note(made)) if note is not None else ()
                made.records = self._followed(made, after, tip.records + len(first))
                count, chain = chained(tip.end, [*first, *made.records])
                made.tip = made.tip._replace(records=count, chain=chain)
            self._now = Now(now.firm, (*now.pending, made), opened=now.opened)
            self._stall_us = 0
            if cost is None:
                self._counted(made)
            return made

    def _counted(self, made: Pending) -> None:
        """What happened until a checkpoint was made is told with it, and not again with the next."""
        self._last_s = made.began_s
        if made.manifest is not None and made.manifest.cost is not None:
            self.failed -= made.manifest.cost.failures

    def look(self) -> Sequence[Looked]:
        """What has changed in the layers beside the state, its contents durable: for the next capture.

        It reads files, so whoever must not wait does it elsewhere.
        """
        return [found for layer in self.layers for found in layer.look()]

    def discard(self, looked: Sequence[Looked]) -> None:
        """Nothing comes of what look() has given, unless a checkpoint that is on its way has it."""
        taken = {pack.uuid for one in self._now.pending for found in one.looked for pack in found.packs}
        for pack in (one for found in looked for one in found.packs):
            if pack.uuid not in taken:
                self._db.packs.discard(pack.uuid)

    def _give(self, document: Saved, looked: Sequence[Looked]) -> None:
        if isinstance(document, Document):
            given = {one.section for one in looked}
            for name in list(document.told.sections):
                if name.startswith(MOMENTARY) and name not in given:
                    document.give(name, None)
            if any(one.told is not ANY and one.told is not document.apart(one.section) for one in looked):
                raise _Overtaken
            for one in looked:
                document.give(one.section, one.items, one.named)

    def _cost(self, trigger: str, now_s: float) -> Cost:
        """What asked for a checkpoint, and what the last one has cost, as far as that is known by now."""
        elapsed_ms = max(0, round((now_s - self._last_s) * 1e3))
        return Cost(trigger, elapsed_ms, self._stall_us, self._durable_us, self.failed)

    def _seal_is_due(self, document: Saved) -> bool:
        """Whether replaying has become dear enough to pay for writing the nodes that changed.

        Edits all over a large state touch most of its nodes: writing them anew at every checkpoint would cost the
        size of the state, not of the change, so their operations first have to add up to as much. A last leaf that was
        begun before is written once more in any case, and does not count.
        """
        if self._unsealed >= SEAL_CHECKPOINTS:
            return True
        if self._unsealed_bytes < SEAL_BYTES:
            return False
        return self._unsealed_bytes + LEAF_MAX_BYTES >= document.unstored_bytes()

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
        with self.lock, self._undivided():
            self._write(pending)
        self._written_or_raise(pending)
        self._stall_us = pending.stall_us = max(1, round((time.monotonic() - pending.began_s) * 1e6))

    def _write(self, pending: Pending) -> None:
        """Write it, or have it written with all before it."""
        if not pending.settled and self._now.pending[-1] is pending and not pending.lazy and pending.job is None:
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
        if pending.tried or pending.chunks or pending.nodes or pending.sealing or pending.onto is not None:
            return
        if pending.looked or pending.also is not None:
            return
        if pending.named or pending.chunks_named:
            return  # whether they are there has to be looked up
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
            found = self._db.directly(self._work(pending, self._now.firm, objects, earlier))
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
            with self.lock, self._undivided():
                self._settle(hand=True, unless=pending)

    # -- handing over, and what became of it ----------------------------------------------------------------

    def _work(
        self, pending: Pending, before: Branch | Pending, objects: Objects, earlier: Sequence[NewRecord] = ()
    ) -> Callable[[Change], Branch]:
        """The change that writes it. ``before``: what it stands on, which may be on its way itself.

        ``earlier`` are records between the two that are written with it.
        """

        def work(change: Change) -> Branch:
            old = before
            if isinstance(old, Pending):
                if old.job is None or old.job.error is not None or old.job.result is None:
                    raise Refused("what it stands on was not written")
                old = old.job.result
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
                _suspect(change, moved, pending.id, pending.suspect)
            return moved

        return work

    def _make_job(self, pending: Pending, before: Branch | Pending) -> Job[Branch]:
        """Bring what can be brought beforehand to disk, and prepare the rest, so that nobody waits for it."""
        if pending.captured is None and not pending.nodes and not pending.chunks:  # records that name nothing
            pending.job = job = Job(
                self._work(pending, before, NOTHING), lazy=pending.lazy, patience_s=pending.patience_s
            )
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
        packed = {name: pack_node(raw) for name, raw in nodes.items()}
        pending.pack = pack.uuid if pack is not None else b""
        packs = [*([pack] if pack is not None else ()), *(one for looked in pending.looked for one in looked.packs)]
        objects = Objects(packed, packs, frozenset(needs - nodes.keys()), frozenset(pending.chunks_named | there))
        size = len(pending.raw) + len(pending.operations) + sum(map(len, packed.values()))
        pending.job = job = Job(self._work(pending, before, objects), lazy=pending.lazy, size_bytes=size)
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
        for one in self._now.pending:
            if one.job is not None and one.job.error is TAKEN:  # an interrupt came when it had just been taken back
                one.job = None
        while self._now.pending:
            first = self._now.pending[0]
            if first.tried and first.job is None:
                self._ask(first)
                continue
            if first.job is None or not first.job.finished:
                self._tell(self._drop_failed(), unless)
                if hand or first.job is not None or len(self._now.pending) >= PENDING_MAX:
                    last = self._now.pending[-1].job
                    if last is None or not last.handed:  # they are handed over in their order
                        self._hand_over()
                if len(self._now.pending) < PENDING_MAX:
                    return
                if first.job is not None:
                    first.job.join()
                continue
            error = first.job.error
            if error is None and first.job.result is not None:
                self._written(first, first.job.result)
            elif isinstance(error, Unsure):
                self._ask(first)
            elif (
                isinstance(error, Refused)
                and (first.sealed or (first.chunks and first.chunks_tried < 3))
                and self._stands(first)
            ):
                for one in self._now.pending[1:]:
                    if one.job is not None and not one.job.withdraw(error):
                        one.job.join()
                    one.job = None
                if first.pack:
                    self._db.packs.discard(first.pack)
                # Nodes that it counts on are gone: it is written without. Or chunks are: then it brings them itself.
                first.chunks_tried += not first.sealed
                first.sealed, first.job, first.pack = False, None, b""
                self._unsealed = SEAL_CHECKPOINTS
            else:
                if isinstance(error, Refused) and first.document is not None and self._stands(first):
                    first.document.retell()
                    error = StoreBusy(
                        "a checkpoint that this state is based on was just removed; nothing was written",
                        hint="Take the checkpoint again: it is written whole then.",
                    )
                self._tell(self._drop(error or StoreClosed("the change was not written")), unless)

    def _tell(self, dropped: tuple[Pending, ...], unless: Pending | None) -> None:
        if dropped and unless not in dropped:
            raise dropped[0].error or StoreClosed("the change was not written")

    def _drop_failed(self) -> tuple[Pending, ...]:
        """One that fails, while others before it are tried again because nobody waits for them, is not written."""
        if (failures := Job.failures) == self._failures:
            return ()
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
                    self._make_job(one, before)
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
        if pending.captured is not None:
            self._store._made(branch, sealed=pending.sealed)

    def _ask(self, pending: Pending) -> None:
        """Nobody knows whether it was written, with those that were tried with it: see whether it is there.

        By a change, which waits for one that is still being committed, and is refused when we are fenced.
        """
        firm = self._now.firm

        def look(change: Change) -> Branch:
            change.guard(firm.b, firm.generation)
            return change.branch_at(firm.b)

        try:
            row = self._db.change(look, firm.b)
        except Refused as error:
            self._drop(error)
            return
        last = pending.tried or pending
        there = row.id == last.id if last.captured is not None else row.chain == last.tip.chain
        if there:
            self._written(pending, row)
        else:
            self._drop(StoreBusy("the change was interrupted before it was written; nothing was written"))

    def _stands(self, pending: Pending) -> bool:
        """Whether the branch is still what its writer believes, so that a refusal had another reason."""
        row, firm = self._db.view.branch_at(self._now.firm.b), self._now.firm
        if pending.guard is not None:
            b, generation = pending.guard
            if self._db.view.branch_at(b).generation != generation:
                return False
        return (row.generation, row.head, row.line) == (firm.generation, firm.head, firm.line)

    def _drop(self, error: BaseException, since: int = 0) -> tuple[Pending, ...]:
        """What is pending, ``since`` that place, will not be written. The document keeps it for the next capture.

        Where the reason passes, what was accepted is tried again, with all that it stands on. Whoever waited for some
        of that is told so. Returns what is dropped for good.
        """
        now = self._now
        if isinstance(error, Refused):
            error = _fenced(now.firm, self._db.view.branch_at(now.firm.b))
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
            if isinstance(error, HoldfastError) and not isinstance(error, StorePoisoned):
                self._discard(one)
            one.error = one.error or error
        captures = [one.captured for one in dropped if one.captured is not None]
        if captures:
            document = next(one.document for one in dropped if one.captured is not None)
            self._take_back(document, captures[0].before, captures)
        if dropped:
            self._unsealed = SEAL_CHECKPOINTS  # the next one makes the state whole in the store
            self._now = Now(now.firm, kept, dropped[0].onto, now.opened)
        return dropped

    @staticmethod
    def _take_back(document: Saved | None, before: Sections, dropped: Sequence[Captured]) -> None:
        if isinstance(document, Document):
            document.take_back(before, dropped)

    def _discard(self, pending: Pending) -> None:
        """Nothing names the packs that it brought."""
        for pack in filter(None, (pending.pack, *(one.uuid for looked in pending.looked for one in looked.packs))):
            self._db.packs.discard(pack)

    def beside(
        self, document: Saved, label: str, reason: str, trigger: str, looked: Sequence[Looked] | None = None
    ) -> bytes:
        """Write a checkpoint that is marked suspect and that the branch does not move to; returns its id.

        For the document nothing was written: the next checkpoint carries all of it along. Where the branch has no
        checkpoint yet there is nothing to stay at, and nothing is written: the id is empty.
        """
        self._check_writable("a checkpoint was asked for")  # before the lock: a copy that writes needs it
        with self.quiet(), self.lock:
            firm = self.settle()
            if not firm.head:
                return b""
            before = (self._unsealed, self._unsealed_bytes, self._stall_us)
            made = self._capture(document, label, "checkpoint", b"", cost=Cost(trigger, 0, 0, 0), looked=looked)
            try:
                with self._undivided():
                    work = self._make_job(made, firm).work
                    made.job, made.accepted = None, False

                    def aside(change: Change) -> Branch:
                        moved = work(change)
                        _suspect(change, moved, made.id, reason)
                        return change.move_to(moved, change.point(firm.head))

                    firm = self._db.change(aside, firm.b)
            except BaseException as error:
                if isinstance(error, Unsure):
                    b = firm.b
                    firm = self._db.change(lambda change: change.branch_at(b), b)  # it waits for what is still written
                elif isinstance(error, HoldfastError) and not isinstance(error, StorePoisoned):
                    self._discard(made)  # otherwise it may be there
                if made.captured is not None:
                    self._take_back(document, made.captured.before, [made.captured])
                raise
            finally:  # whatever happened, the branch stands where it stood
                self._now = Now(firm, (), made.onto, self._now.opened)
                self._unsealed, self._unsealed_bytes, self._stall_us = before
            return made.id

    def take(self, made: Pending, firm: Branch) -> None:
        """Write a checkpoint whose content was fixed by a copy of this process, and whose chunks are durable.

        ``firm``: the branch as it stood then. Nothing was written since: whoever wanted to has waited.
        """
        with self.lock:
            if self.settle() is not firm:
                raise _fenced(firm, self._now.firm)
            with self._undivided():
                work = self._make_job(made, firm).work
                made.job, made.tried = None, made  # whatever comes out of the next lines, the store is asked
                self._now = Now(firm, (made,), None, self._now.opened)
                try:
                    self._written(made, self._db.change(work, firm.b))
                except Unsure:
                    self._ask(made)
                except HoldfastError as error:
                    self._drop(error)
                if made.error is None:
                    self._counted(made)
        if made.error is not None:
            raise made.error

    # -- records --------------------------------------------------------------------------------------------

    def append(
        self,
        records: Sequence[NewRecord] | Callable[[int], Sequence[NewRecord]],
        *,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
        flush: bool,
        soon: bool = False,
    ) -> int:
        """Write records at the end of the line; returns the last one's number.

        With ``flush`` they are durable then, with everything before them. Otherwise they share a later flush, which
        comes by itself in a moment; with ``soon`` the caller asks for it at once, and nobody else does before. A
        function makes them when the number of the record before them is known.
        """
        records = records if callable(records) else checked(records)
        self._check_writable("something was to be recorded")  # before the lock, which after a fork nobody may hold
        with self.lock, self._undivided():
            self._settle()
            records = checked(records(self._now.tip.records)) if callable(records) else records
            if not records:
                return self._now.tip.records
            now = self._now
            made = self._noted(records, nodes, chunks)
            made.lazy = not (flush or soon)
            made.accepted = soon
            self._now = Now(now.firm, (*now.pending, made), now.onto, now.opened)
            if not soon:
                self._write(made)
        if not soon:
            self._written_or_raise(made)
        return made.tip.records

    def gather(self, record: Gathered, size_bytes: int, patience_s: float) -> None:
        """Write a record that names nothing at the end of the line, in a transaction with others that come soon.

        Nobody waits for it, nor asks for its number. It may wait so long, and is written with whatever comes after it.
        It is of about that size, far below what is too long, and what makes it must not fail.
        """
        self._check_writable("something was to be recorded")
        with self.lock, self._undivided():
            pending, guard = self._now.pending, self._guard() if self._guard is not None else None
            if pending and self._add(pending[-1], record, size_bytes, patience_s, guard):
                return
            self._settle()
            now, made = self._now, Pending(self._now.tip)
            made.opened, made.guard = self.opened, guard
            made.lazy, made.patience_s = True, patience_s
            made.gather(record, size_bytes)
            self._now = Now(now.firm, (*now.pending, made), now.onto, now.opened)
            self._write(made)
        self._written_or_raise(made)

    def _add(
        self, last: Pending, record: Gathered, size_bytes: int, patience_s: float, guard: tuple[int, int] | None
    ) -> bool:
        """Let a record go with those that wait; False where none do, or they must not have it."""
        job = last.job
        if job is None or not job.handed or job.finished or not last.has_room() or last.guard != guard:
            return False
        check_poison(self._db.engine)
        if not last.add(record, size_bytes):
            return False
        self._db.writers.hasten(job, patience_s if last.has_room() else None, self._now.firm.b)
        return True

    def _noted(
        self,
        records: Sequence[NewRecord],
        nodes: Mapping[bytes, bytes] | None,
        chunks: Mapping[bytes, bytes] | None,
    ) -> Pending:
        """Records at the end of the line, still to be written."""
        made = Pending(self._now.tip)
        made.opened = self.opened
        made.records = self._followed(made, records, made.tip.records)
        made.nodes, made.chunks = nodes or {}, chunks or {}
        made.guard = self._guard() if self._guard is not None else None
        count, chain = chained(made.tip.end, records)
        made.tip = made.tip._replace(records=count, chain=chain)
        return made

    def commit(
        self,
        shared: Shared,
        make: Callable[[int], Sequence[NewRecord]],
        *,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
    ) -> int:
        """Write records at the end of the line in a transaction that user code has written in, and commit both.

        ``make`` gets the number of the last record before them. When it raises nothing of either is there, nor will be:
        who has lost the branch meanwhile loses what that code wrote, too.
        """
        self._check_writable("a transaction was to be committed")
        with self.lock:
            firm = self.settle()
            with self._undivided():
                made = self._noted(checked(make(firm.records)), nodes, chunks)
                made.alone = True
                work = self._make_job(made, firm).work
                made.job = None  # it must not be handed over: no writer's thread could make it
                made.tried = made  # so whatever comes out of the next lines, the store is asked
                self._now = Now(firm, (made,), self._now.onto, self._now.opened)
                try:
                    self._written(made, self._db.commit(shared, work))
                except Unsure:
                    self._ask(made)
                except HoldfastError as error:
                    passes = isinstance(error, Refused) and self._stands(made)
                    self._drop(StoreBusy(error.message) if passes else error)
        if isinstance(made.error, StoreBusy):
            raise Again(made.error.message, hint=made.error.hint) from made.error
        if made.error is not None:
            raise made.error
        return made.tip.records

    # -- quiet ----------------------------------------------------------------------------------------------

    def settle(self) -> Branch:
        """Return when everything that was made is durable; gives the branch as it is then."""
        self._db.check_usable()
        self.await_copy()
        while True:
            with self.lock, self._undivided():
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
                with document.lock, self._undivided():
                    if self._now.pending:
                        continue  # a capture slipped in between the two locks
                    outer = self._stilled
                    try:
                        self._stilled = True
                        yield self._now.firm
                    finally:
                        self._stilled = outer
                    return

    def _undivided(self, document: Saved | None = None) -> _Undivided:
        return _Undivided(self, document)


class _Undivided:
    """A signal handler may come in between, and ask for a checkpoint itself: not in the middle of another one.

    Nor in the middle of a change, which has the state's lock. Whether this thread is in the middle of one is told by
    its stack, which no interrupt can leave wrong.
    """

    __slots__ = ("_document", "_outer", "_writer")

    def __init__(self, writer: BranchWriter, document: Saved | None) -> None:
        self._writer, self._document = writer, document

    def __enter__(self) -> None:
        writer, document = self._writer, self._document
        inside = writer._inside
        changing = document is not None and document.lock._is_owned()  # type: ignore[attr-defined]
        if not writer._stilled and (changing or (inside is not None and _on_stack(inside))):
            raise StoreBusy(
                "checkpoint() was called while the state was being changed or saved, by a signal handler for example",
                hint="Let the handler set a flag, and take the checkpoint between two steps.",
            )
        self._outer, writer._inside = inside, sys._getframe(1)

    def __exit__(self, *_: object) -> None:
        self._writer._inside = self._outer


def _suspect(change: Change, branch: Branch, id: bytes, reason: str) -> None:
    """Mark the checkpoint that a branch was just moved to."""
    change.set_validity(branch.a, branch.head, {"validity": "suspect", "reason": reason, "at": now_us()})
    change.say(branch.a, {"what": "validity", "at": id, "validity": "suspect", "reason": reason})


def checked(records: Sequence[NewRecord]) -> Sequence[NewRecord]:
    """Refuse records that are too long before anything is written."""
    for record in records:
        if len(record.body) > RECORD_MAX_BYTES:
            raise BadOption(
                f"a record of {len(record.body):,} bytes; nothing was written", hint="Long values are named by digest."
            )
    return records


def read_line(view: View, b: int | Branch, after: int = 0, *, marked: bool = False) -> list[Record]:
    """Records of a branch's line with a number above ``after``; ``marked``: those for summaries.

    Read from the beginning, all of them, they are proven by the chain. The body of one of which nothing is left but its
    digest is empty.
    """
    branch = view.branch_at(b) if isinstance(b, int) else b
    records = view.line(branch.back if marked else branch.line, after, marked=marked)
    if not after and not marked:
        chain = b""
        for record in records:
            chain = link(chain, record.digest)
        if (len(records), chain) != (branch.records, branch.chain):
            raise Damaged(
                f"the records of the line of branch {branch.name!r} are not those that were written",
                what=(f"line {branch.b}",),
                hint="Run `holdfast verify` to see what is affected.",
            )
    return records


def _on_stack(wanted: FrameType) -> bool:
    """Whether a frame is one of this thread's callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


def _fenced(mine: Branch, there: Branch) -> Fenced:
    taken = there.generation != mine.generation
    why = "another process has taken it over" if taken else "it was moved meanwhile"
    return Fenced(
        f"this process may no longer write branch {mine.name!r}: {why}; nothing was written",
        hint="Open the agent again to go on from what is there.",
    )
