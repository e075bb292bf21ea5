"""The writer of one branch: from a captured state to a durable checkpoint, and the records between checkpoints.

Owns what a checkpoint and a record consist of, and when the nodes of a state are written anew; how changes come to the
disk is the business of ``commits``. What always holds: checkpoints and records are written in the order in which they
were made, and a checkpoint never before the records that it speaks of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from holdfast.agent import metadata, watchers
from holdfast.agent.commits import Commits, busy, fenced, mark_suspect
from holdfast.agent.history import chunks_of
from holdfast.agent.layers import ANY, MOMENTARY, Layer, Looked
from holdfast.agent.pending import Gathered, Gathering, Now, Pending
from holdfast.agent.points import Rest
from holdfast.agent.schedule import TRIGGERS
from holdfast.agent.when import When
from holdfast.codec.blocks import LEAF_MAX_BYTES
from holdfast.codec.document import Document
from holdfast.codec.operations import encode_operations, operations_size
from holdfast.codec.state import is_apart
from holdfast.codec.told import Saved
from holdfast.errors import (
    AtomicOpen,
    BadOption,
    Damaged,
    ForkLost,
    HoldfastError,
    StoreBusy,
    StorePoisoned,
)
from holdfast.store.catalog import View
from holdfast.store.changes import (
    UNCHANGED,
    Change,
    NewRecord,
    Parent,
    Said,
    chained,
    now_us,
)
from holdfast.store.cipher import digest
from holdfast.store.engine import Again, Refused, Shared, Unsure, check_poison
from holdfast.store.manifest import Cost, Manifest, Position, identity
from holdfast.store.rows import Branch, Open, Point, Record, link

if TYPE_CHECKING:
    from holdfast.agent.store import Store

SEAL_CHECKPOINTS = 256
SEAL_BYTES = 512 * 1024
"""How much a reader may have to replay before a checkpoint writes the nodes of its state: number, and bytes."""

RECORD_MAX_BYTES = 2**20
"""The longest record. Values over 16 KiB are named by digest, so one that is longer is a mistake of its maker."""

_ROW_BYTES = 256
"""What a checkpoint costs a reader besides its values."""

_LOOKS = 5
"""How often what goes with the state is looked at again because others have saved it meanwhile."""

Note = Callable[["Pending"], Sequence[NewRecord]]
"""Makes the records that go to disk with a checkpoint; they may name it. Nothing is written if it raises."""


class _Overtaken(Exception):
    """What was looked at is compared with something that is not told any more."""


class BranchWriter(Commits):
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
        super().__init__(store, branch)
        self.config = config
        # The same for all writers of a store, but for those with a configuration or a policy of their own.
        own = config is not None or when is not None
        self._description = metadata.Description(store._registry, config, when) if own else store._description
        self._guard = guard
        self._unsealed_bytes = 0
        self._last_s = time.monotonic()  # when the newest checkpoint was made, or the writer began
        self.layers: list[Layer] = []  # what is saved together with the state
        self.rest = Rest()  # whether nobody is in the middle of something
        self.quiet: Callable[[], AbstractContextManager[None]] = nullcontext  # around every capture
        self.failed = 0  # how often the agent has failed since the last checkpoint

    # -- where it stands ------------------------------------------------------------------------------------

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
        tip = self._now.tip
        return tip.records, tip.chain

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
        with self.quiet():
            made = self.capture(document, label, **options)
        return self.finish(made)

    def capture(
        self, document: Saved, label: str, kind: str = "checkpoint", target: bytes = b"", **options: Any
    ) -> Pending:
        """Fix the content of a checkpoint; ``finish`` writes it. Whoever watches is told. Inside of ``quiet``."""
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
        if looked is None and self.layers:
            self._check_writable("a checkpoint was asked for")
            looked = self.look()
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
        with self.lock, self._undivided:
            if document.lock._is_owned() and not self._undivided.stilled:  # type: ignore[attr-defined]
                raise busy()  # in the middle of a change
            self._settle()
            with document.lock:
                if self.rest.atomic or (trigger in TRIGGERS and not self.rest.whole):
                    what = "`with agent.atomic():` is open" if self.rest.atomic else "a write of another task is open"
                    raise AtomicOpen(
                        f"{what}, so the state may be half changed; nothing was saved",
                        hint="Save it after that. If another task or thread is in it, wait for that one.",
                    )
                self._give(document, looked)
                captured = document.capture(self.under_way if self._now.pending else ())
                self._unsealed += 1
                self._unsealed_bytes += _ROW_BYTES + operations_size(captured.operations)
                named = captured.nodes.copy()
                sealed = self._seal_is_due(document)
                if sealed:
                    document.seal(captured)
                    self._unsealed = self._unsealed_bytes = 0
            now = self._now
            last, onto = now.pending[-1] if now.pending else None, now.onto
            tip = last.tip if last is not None else now.firm
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
                chained(tip.end, checked(first)) if first else (tip.records, tip.chain),
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
            if captured.named:
                made.named = frozenset(captured.named)
            if chunks_named := chunks_of(captured.operations) | captured.needs:
                made.chunks_named = frozenset(chunks_named - made.chunks.keys()) | captured.needs
            if looked or also or key or said or suspect:  # none of it, mostly
                made.looked, made.also, made.key, made.said, made.suspect = looked, also, key, said, suspect
            if onto is not None:
                made.onto = onto
            if self._guard is not None:
                made.guard = self._guard()
            if lazy or self._store._batched:
                made.lazy = not (made.chunks or made.looked)
            made.tip = tip.standing(tip.head, made.id, depth + 1, tip.epoch)
            made.opened = last.opened if last is not None else now.opened
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
        if not looked and not any(map(is_apart, document.told.sections)):
            return
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
                with self._undivided:
                    work = self._make_job(made, firm).work
                    made.job, made.accepted = None, False

                    def aside(change: Change) -> Branch:
                        moved = work(change)
                        mark_suspect(change, moved, made.id, reason)
                        return change.move_to(moved, change.point(firm.head))

                    self._astray = True  # whatever comes out of the next line but an answer, the store is asked
                    self._now = Now(firm, (), made.onto, self._now.opened)
                    firm = self._db.change(aside, firm.b)
            except BaseException as error:
                if isinstance(error, HoldfastError) and not isinstance(error, (Unsure, StorePoisoned)):
                    self._astray = False
                    self._discard(made)  # otherwise it may be there
                if made.captured is not None:
                    self._take_back(document, made.captured.before, [made.captured])
                raise
            finally:  # whatever happened, the branch stands where it stood
                self._now = Now(firm, (), made.onto, self._now.opened)
                self._unsealed, self._unsealed_bytes, self._stall_us = before
            self._astray = False
            return made.id

    def take(self, made: Pending, firm: Branch) -> None:
        """Write a checkpoint whose content was fixed by a copy of this process, and whose chunks are durable.

        ``firm``: the branch as it stood then. Nothing was written since: whoever wanted to has waited.
        """
        with self.lock:
            if self.settle() is not firm:
                raise fenced(firm, self._now.firm)
            with self._undivided:
                work = self._make_job(made, firm).work
                made.job, made.tried = None, made  # whatever comes out of the next lines, the store is asked
                self._now = Now(firm, (made,), None, self._now.opened)
                try:
                    self._written(made, self._db.change(work, firm.b))
                except Unsure:
                    self._ask(made)
                except HoldfastError as error:
                    lost = ForkLost(
                        "a checkpoint of a copy of this process names something that was let go meanwhile;"
                        " nothing of it is visible",
                        hint="The next checkpoint has all that was in it.",
                    )
                    self._drop(lost if isinstance(error, Refused) and self._stands(made) else error)
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
        with self.lock, self._undivided:
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
        with self.lock, self._undivided:
            pending, guard = self._now.pending, self._guard() if self._guard is not None else None
            if pending and self._add(pending[-1], record, size_bytes, patience_s, guard):
                return
            self._settle()
            now, made = self._now, Gathering(self._now.tip, record, size_bytes)
            made.opened, made.guard = self.opened, guard
            made.lazy, made.patience_s = True, patience_s
            self._now = Now(now.firm, (*now.pending, made), now.onto, now.opened)
            self._write(made)
        self._written_or_raise(made)

    def _add(
        self, last: Pending, record: Gathered, size_bytes: int, patience_s: float, guard: tuple[int, int] | None
    ) -> bool:
        """Let a record go with those that wait; False where none do, or they must not have it."""
        job = last.job
        if not isinstance(last, Gathering) or job is None or not job.handed or job.finished:
            return False
        if not last.has_room() or last.guard != guard:
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
            with self._undivided:
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
