"""The live end of a branch's line: the records of what happened outside, and of what runs must remember.

Owns the numbering of records, their chain, and the way into the store's queue. Knows bytes only: what a record says is
the business of the room above. What always holds: numbers are dense and in the order of ``append``; what ``append``
with ``flush`` returned from is durable, with everything before it; a record whose ``append`` raised is not in the line,
unless one that was accepted meanwhile already stands on it.

Lock order: a document's lock before this one, which is never held while a document's lock is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from holdfast.agent.manifest import Manifest
from holdfast.errors import BadOption, Damaged, HoldfastError
from holdfast.store.catalog import Append, Catalog, CheckpointRow, LineStart, NewRecord, Queued
from holdfast.store.catalog import effect_chain as chain

RECORD_MAX_BYTES = 2**20
"""The longest record. Values over 16 KiB are named by digest, so one that is longer is a mistake of its maker."""

Entry = tuple[int, bytes, bytes]
"""A record as bytes: 1 if summaries need it, the digests of nodes that it names, its body."""


Position = tuple[int, bytes]
"""A point in a line: how many records are before it, and the chain digest after them."""

BEGINNING: Position = (0, b"")


class Journal:
    """The line of one branch, open for writing. Threads may share it."""

    def __init__(
        self, catalog: Catalog, a: int, b: int, generation: int, *, guard: tuple[int, int] | None = None
    ) -> None:
        self._catalog = catalog
        self._a, self._b = a, b
        self._generation = generation
        self._guard = guard
        self._lock = threading.RLock()
        row = catalog.line(b)
        self._end: Position = (row.count, row.chain)
        self._firm = self._end
        self._returned: list[tuple[Append, Queued]] = []  # their callers were told that they are not there

    @property
    def count(self) -> int:
        """How many records there are, those on their way to disk included."""
        return self._end[0]

    @property
    def chain(self) -> bytes:
        """The chain digest after the last of them."""
        return self._end[1]

    @property
    def position(self) -> Position:
        """The end as far as nothing can take it back: what a checkpoint may speak of. Needs no lock."""
        return self._firm

    # -- writing ----------------------------------------------------------------------------------------

    def append(
        self,
        records: Sequence[Entry],
        *,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
        flush: bool,
    ) -> int:
        """Write records at the end; returns the last one's number.

        With ``flush`` they are durable then, with everything before them. Otherwise they share a later flush, which
        comes by itself in a moment.
        """
        self._catalog.check_usable()  # after a fork the lock may be held by a thread that is not there
        with self._lock:
            append = self._next(records, nodes, chunks)
            if not append.records:
                return self._end[0]
            end = (append.count + len(append.records), append.end)
            try:
                queued = self._catalog.enqueue(append, soon=flush)
                self._end = end
            except HoldfastError:
                raise
            except BaseException:
                self._look(append)
                raise
            if not flush or queued.done:
                self._firm = end
        if flush:
            self._complete(append, queued, end)
        return end[0]

    @contextmanager
    def carrying(self, records: Sequence[Entry]) -> Iterator[Append | None]:
        """Records for a transaction of the caller's, who writes it inside the block.

        Left normally, they are in the line; left by an exception, they never were. No other record gets a number
        meanwhile.
        """
        self._catalog.check_usable()
        with self._lock:
            append = self._next(records, None, None)
            try:
                yield append if append.records else None
                if append.records:
                    self._end = self._firm = (append.count + len(append.records), append.end)
            except HoldfastError:
                self._take_back()
                raise
            except BaseException:
                self._look(append)
                self._take_back()
                raise

    def flush(self) -> None:
        """Return when everything appended so far is durable."""
        self._catalog.flush(self._b)

    def _next(
        self, records: Sequence[Entry], nodes: Mapping[bytes, bytes] | None, chunks: Mapping[bytes, bytes] | None
    ) -> Append:
        count, end = self._end
        for _, _, body in records:
            if len(body) > RECORD_MAX_BYTES:
                raise BadOption(
                    f"a record of {len(body):,} bytes; nothing was written", hint="Long values are named by digest."
                )
            end = chain(end, body)
        return Append(
            a=self._a,
            b=self._b,
            generation=self._generation,
            count=count,
            chain=self._end[1],
            records=[NewRecord(*record) for record in records],
            end=end,
            nodes=list(nodes.items()) if nodes else (),
            chunks=list(chunks.items()) if chunks else (),
            guard=self._guard,
        )

    def _complete(self, append: Append, queued: Queued, end: Position) -> None:
        try:
            self._catalog.complete(queued)
        except BaseException as error:
            with self._lock:
                self._returned.append((append, queued))
                self._take_back()
                if not isinstance(error, HoldfastError) or not queued.written:
                    raise
        with self._lock:
            self._firm = max(self._firm, end)

    def _look(self, append: Append) -> None:
        """Accepting records was cut short, as by an interrupt: see whether they are in the line."""
        if append.records and self._catalog.line(self._b).count > append.count:
            self._end = (append.count + len(append.records), append.end)

    def _take_back(self) -> None:
        """Give numbers back whose records will never be written, from the end as far as that goes."""
        self._returned = [(append, queued) for append, queued in self._returned if not queued.done]
        while self._returned:
            append, queued = max(self._returned, key=lambda one: one[0].count)
            if not self._catalog.withdraw(queued):
                return
            self._end = (append.count, append.chain)
            self._returned.remove((append, queued))

    # -- reading ----------------------------------------------------------------------------------------

    def read(self, after: int = 0, *, marked: bool = False) -> Iterator[tuple[int, bytes]]:
        """Records with a number above ``after``, and these numbers. Read from the beginning, they are proven."""
        return read_line(self._catalog, self._b, after, marked=marked)


def read_line(catalog: Catalog, b: int, after: int = 0, *, marked: bool = False) -> Iterator[tuple[int, bytes]]:
    """Records of a branch's line with a number above ``after``, and these numbers; ``marked``: those for summaries.

    Read from the beginning, all of them, they are proven by the chain. Whether they are shows at their end: act on
    none of them before.
    """
    line = catalog.line(b)
    end = b""
    for row in catalog.effects(b, after=after, before=line.count + 1, marked=marked):
        end = chain(end, row.body)
        yield row.i, row.body
    if not after and not marked and end != line.chain:
        raise Damaged(
            f"the records of the line of branch {b} are not those that were written",
            what=(f"line {b}",),
            hint="Run `holdfast verify` to see what is affected.",
        )


def inherited(row: CheckpointRow | None) -> LineStart | None:
    """What a branch that begins at a checkpoint inherits: the records before it."""
    count, end = Manifest.decode(row.manifest).effects if row is not None else BEGINNING
    return LineStart(row.b, count, end) if row is not None and count else None
