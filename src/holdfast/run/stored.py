"""A line in a store: records as a run knows them, over the records of an agent's branch.

Owns the step from records to bytes and back. Must not know what records mean, nor how they reach the disk. What always
holds: what the ledger protocol promises; whoever reads a line from its beginning to its end has had it proven; and a
record that is lost is never passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.agent.branch import BranchWriter, read_line
from holdfast.errors import CorruptValue, Damaged
from holdfast.run.past import filled
from holdfast.run.records import Record, decode_record
from holdfast.store.changes import NewRecord
from holdfast.store.database import Database


def entries(*records: Record) -> list[NewRecord]:
    """Records as a branch's writer takes them, alone or with a checkpoint (``capture(note=...)``)."""
    return [NewRecord(record.MARK, record.refs, record.encode()) for record in records]


class StoredLine:
    """The line of a branch, to be read. Shows also what another process writes."""

    def __init__(self, db: Database, b: int) -> None:
        self._db = db
        self._b = b

    @property
    def count(self) -> int:
        self._settle()
        return self._db.view.branch_at(self._b).records

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Records with their numbers, in order, inherited ones first. Raises at the end if they are not proven."""
        return self._decoded(after, marked=False)

    def marked(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """Only the records that summaries need: runs, ends, waits, doubts, rollbacks, notes. Proven by sums alone."""
        return self._decoded(after, marked=True)

    def _settle(self) -> None:
        """What was accepted is read only when it is there."""
        self._db.flush()

    def _decoded(self, after: int, *, marked: bool) -> Iterator[tuple[int, Record]]:
        self._settle()
        found = list(read_line(self._db.view, self._b, after, marked=marked))
        decoded = ((number, self._decode(number, body)) for number, body in found if body)
        if all(body for _, body in found):
            yield from decoded
        else:
            yield from filled(dict(decoded), [number for number, body in found if not body], self._b)

    def _decode(self, number: int, body: bytes) -> Record:
        try:
            return decode_record(body)
        except CorruptValue as error:
            raise CorruptValue(error.message, what=(f"effect {self._b}/{number}",)) from error

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        """Raw nodes, each proven by its digest."""
        found = self._db.view.nodes(digests)
        if len(found) < len(set(digests)):
            self._settle()  # those of a record that still waits
            found = self._db.view.nodes(digests)
        for digest in digests:
            if digest not in found:
                raise Damaged(f"node {digest.hex()[:16]} is missing", what=(f"node {digest.hex()[:16]}",))
        return found

    def bulk(self, digests: list[bytes]) -> bytes:
        """The chunks, one after another."""
        return b"".join(self._db.packs.read(self._db.view, digests))


class StoredLedger(StoredLine):
    """The line of a branch, open for writing: one for each writing agent. Threads may share it."""

    def __init__(self, db: Database, b: int, writer: BranchWriter) -> None:
        super().__init__(db, b)
        self.writer = writer

    def _settle(self) -> None:
        self.writer.settle()

    @property
    def count(self) -> int:
        return self.writer.position[0]

    def append(
        self,
        *records: Record,
        nodes: Mapping[bytes, bytes] | None = None,
        chunks: Mapping[bytes, bytes] | None = None,
        flush: bool = False,
    ) -> int:
        """Write records at the end; returns the last one's number. What raises is not in the line."""
        return self.writer.append(entries(*records), nodes=nodes, chunks=chunks, flush=flush)

    def flush(self) -> None:
        self.writer.settle()
