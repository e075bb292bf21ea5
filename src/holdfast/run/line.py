"""A line: the records of an agent's branch, as the rest of this room appends, flushes and reads them.

Owns the step from records to bytes and back. Must not know what records mean, nor how they reach the disk. What always
holds: numbers are dense and in the order of ``append``; what ``flush`` or ``append(flush=True)`` returned from is
durable together with everything before it; whoever reads a line from its beginning to its end has had it proven; and a
record that is lost is never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial

from holdfast.agent.branch import BranchWriter, read_line
from holdfast.agent.opened import difference, wanted
from holdfast.codec.blocks import INLINE_MAX_BYTES
from holdfast.errors import Damaged, ReadOnly
from holdfast.run.arguments import Stowed, not_there
from holdfast.run.opened import decode, decoded, follow, key, rows_of
from holdfast.run.records import Begin, Done, LetGo, Note, Record, RolledBack, id_key
from holdfast.store.changes import UNCHANGED, NewRecord, Opens
from holdfast.store.database import Database
from holdfast.store.engine import Shared
from holdfast.store.rows import Branch, Open
from holdfast.store.writer import HOLD_S

_INLINE = frozenset({bytes, type(None)})
_LOOK_BACK = 16
"""Records; what a line says about itself is looked for among so many first."""


def entries(*records: Record) -> list[NewRecord]:
    """Records as a branch's writer takes them, alone or with a checkpoint (``capture(note=...)``)."""
    return [_entry(one) for one in records]


def _entry(one: Record) -> NewRecord:
    return NewRecord(one.MARK, one.refs, one.encode(), key=one.lookup, follow=follow(one))


def _is_plain(outcome: Done) -> bool:
    """Whether it says what a read returned, and names nothing: it can be encoded later, is short, and does not fail."""
    if outcome.of or outcome.event or outcome.how != "value" or outcome.fault is not None or outcome.holes is not None:
        return False
    inline = type(outcome.value) in _INLINE and type(outcome.args) in _INLINE
    return inline and len(outcome.path) <= INLINE_MAX_BYTES


def patience_s(read: Done) -> float:
    """How long the outcome of a read may wait for company; 0: no longer than anything else.

    A kill may cost the call and the work since. Both together are at most ``HOLD_S``, unless the call alone is more.
    """
    return max(0.0, HOLD_S - max(0, read.at - read.started) / 1e6)


def _readonly() -> ReadOnly:
    return ReadOnly("this handle is read-only: nothing can be recorded", hint="Open it without readonly=True.")


class Line:
    """The line of a branch. With its writer it is open for writing; without, it shows what another process writes.

    Threads may share it.
    """

    def __init__(self, db: Database, b: int, writer: BranchWriter | None = None) -> None:
        self._db = db
        self._b = b
        self._writer = writer
        if writer is not None and writer.opened is None:
            writer.know_opened({one.run: one for one in self._opened(writer.firm) if not one.signal})

    def _opened(self, branch: Branch) -> list[Open]:
        """The rows of the branch's open runs; where they are damaged, what they should be."""
        view = self._db.view
        try:
            return view.opened(branch.b)
        except Damaged:
            return wanted(view, branch, view.log(branch.a)) or []

    @property
    def count(self) -> int:
        """How many records there are, those on their way to disk included."""
        if self._writer is not None:
            return self._writer.branch.records
        self.flush()
        return self._db.view.branch_at(self._b).records

    def append(
        self,
        *records: Record,
        stowed: Stowed | None = None,
        flush: bool = False,
        soon: bool = False,
    ) -> int:
        """Write records at the end, ``stowed`` with them; returns the last one's number. What raises is not there.

        ``soon``: the caller asks for a flush next.
        """
        if self._writer is None:
            raise _readonly()
        nodes, chunks = (stowed.nodes, stowed.chunks) if stowed is not None else (None, None)
        return self._writer.append(self.entries(*records), nodes=nodes, chunks=chunks, flush=flush, soon=soon)

    def gather(self, outcome: Record, stowed: Stowed | None = None) -> None:
        """Write an outcome that nobody waits for at the end, soon: that of a read with others, which come meanwhile."""
        if self._writer is None or not isinstance(outcome, Done) or not _is_plain(outcome):
            self.append(outcome, stowed=stowed)
        else:
            size_bytes = len(outcome.path) + len(outcome.value or b"") + len(outcome.args or b"")  # type: ignore[arg-type]
            kept = copy(outcome)  # it is encoded later, and whoever has made it may use it for something else
            self._writer.gather(partial(_entry, kept), size_bytes, patience_s(outcome))

    def append_both(self, intent: Record, outcome: Callable[[int], Record]) -> int:
        """Write an intent and its outcome, which is made of its number, so that no crash divides them. Durable then."""
        if self._writer is None:
            raise _readonly()
        return self._writer.append(lambda count: entries(intent, outcome(count + 1)), flush=True)

    def entries(self, *records: Record) -> list[NewRecord]:
        """As the function of that name, also for records that take the whole line to know what is open after them."""
        return [
            made if (opens := self._opens(one)) is UNCHANGED else made._replace(opens=opens, follow=None)
            for one, made in zip(records, entries(*records), strict=True)
        ]

    def _opens(self, record: Record) -> Opens:
        writer, view = self._writer, self._db.view
        resumes = isinstance(record, Note) and record.what == "resume"
        if writer is None or not (resumes or isinstance(record, RolledBack)):
            return UNCHANGED
        if resumes and key(record.run) in (writer.opened or {}):
            return UNCHANGED
        branch = writer.settle()
        try:
            there = view.opened(branch.b)  # before the log, so that it has every signal that has a row
        except Damaged:
            return Opens([(None, b"")], rows_of(view, branch, view.log(branch.a), record))
        return difference(there, rows_of(view, branch, view.log(branch.a), record))

    def share(self, *, later: bool) -> Shared:
        """Begin a transaction in which user code writes before its records are."""
        if self._writer is None:
            raise _readonly()
        return self._db.share(later=later)

    def commit(self, shared: Shared, make: Callable[[int], Sequence[Record]], stowed: Stowed) -> int:
        """Write records in such a transaction, and commit it; returns the last one's number.

        ``make`` gets the number of the record before them.
        """
        if self._writer is None:
            raise _readonly()
        return self._writer.commit(
            shared, lambda count: entries(*make(count)), nodes=stowed.nodes, chunks=stowed.chunks
        )

    def flush(self) -> None:
        """Return when everything accepted so far is durable: only then it can be read."""
        if self._writer is not None:
            self._writer.settle()
        else:
            self._db.flush()

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Records with their numbers, in order, inherited ones first. Raises at the end if they are not proven."""
        return self._decoded(after, marked=False)

    def marked(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Only the records that summaries need: runs, ends, waits, doubts, rollbacks, notes. Proven by sums alone."""
        return self._decoded(after, marked=True)

    def recent(self, position: int) -> Iterator[tuple[int, Record]]:
        """Records as ``records`` gives them, from the newest on that says that none before it matters.

        Nothing is open, in doubt or left before it for whoever has a state that knows the first ``position`` records.
        Not proven by the chain, but where it is the whole line.
        """
        self.flush()
        return self.records(self._horizon(position))

    def _horizon(self, position: int) -> int:
        """How many records need not be read."""
        view, span = self._db.view, _LOOK_BACK
        branch = view.branch_at(self._b)
        while True:
            first, known = max(0, branch.records - span), position
            for row in reversed(view.line(branch.back, first, marked=True)):
                if not row.body:
                    return 0
                record = decode(row, self._b)
                if isinstance(record, RolledBack):
                    known = min(known, record.to - 1)
                elif isinstance(record, Begin) and record.taken is not None and row.i <= known + 1:
                    return row.i - 1
            if not first:
                return 0
            span *= 8

    def begun(self, id: str) -> bool:
        """Whether a run of this id was begun, or may have been: records are lost."""
        self.flush()
        return self._db.view.has_key(self._db.view.branch_at(self._b), id_key(id))

    def is_open(self, id: str) -> bool:
        """Whether a run was begun or resumed on this branch, and has not ended. For its writer."""
        return self._writer is not None and key(id) in (self._writer.opened or {})

    def _decoded(self, after: int, *, marked: bool) -> Iterator[tuple[int, Record]]:
        self.flush()
        yield from decoded(read_line(self._db.view, self._b, after, marked=marked), self._b)

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        """Raw nodes, each proven by its digest."""
        found = self._db.view.nodes(digests)
        if len(found) < len(set(digests)):
            self.flush()  # those of a record that still waits
            found = self._db.view.nodes(digests)
        for digest in digests:
            if digest not in found:
                rows = self._db.view.line(self._db.view.branch_at(self._b).line)
                if any(row.let_go and digest in row.body for row in rows):  # since whoever asks has read the record
                    raise not_there(LetGo(0), "a value that was recorded")
                raise Damaged(f"node {digest.hex()[:16]} is missing", what=(f"node {digest.hex()[:16]}",))
        return found

    def bulk(self, digests: list[bytes]) -> bytes:
        """The chunks, one after another."""
        return b"".join(self._db.packs.read(self._db.view, digests))
