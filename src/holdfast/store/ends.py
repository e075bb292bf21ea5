"""The ends of lines: where records are written.

Owns the INSERTs and UPDATEs on tables ``line`` and ``effect``. Every call happens inside a transaction of the writer's,
who has compared the generation. Always true: records are written only after the one that they were made to follow, and
without a gap.
"""

from __future__ import annotations

import apsw
from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Damaged, Fenced
from holdfast.store.catalog import Append, LineRow, LineStart
from holdfast.store.cipher import Cipher, Row
from holdfast.store.lines import LINE
from holdfast.store.schema import next_number

_NEXT_R = next_number("effect")


class LineEnd(Struct, frozen=True):
    """A line as this process last wrote it. ``sum`` is None while it has no row."""

    row: LineRow
    sum: bytes | None


def stored_line(cipher: Cipher, row: LineRow) -> Row:
    return cipher.stored("line", row.b, row.origin, row.start, row.count, row.chain)


class Ends:
    """The ends of all lines, over the writing connection."""

    def __init__(self, connection: apsw.Connection, cipher: Cipher) -> None:
        self._connection = connection
        self._cipher = cipher
        self._run = connection.cursor().execute
        self._known: dict[int, LineEnd] = {}

    def forget(self) -> None:
        """What is remembered may be out of date."""
        self._known.clear()

    def begin(self, b: int, start: LineStart) -> None:
        self._insert(LineRow(b, start.origin, start.start, start.start, start.chain))

    def _insert(self, row: LineRow) -> bytes:
        stored = stored_line(self._cipher, row)
        self._run("INSERT INTO line VALUES (?, ?, ?, ?, ?, ?)", stored)
        return bytes(stored[-1])

    def extend(self, append: Append) -> int:
        """Write records; returns the store-wide number of the last one."""
        self._move_end(append)
        r = int(self._run(_NEXT_R).get)
        try:
            for at, record in enumerate(append.records):
                row = (r + at, append.b, append.count + at + 1, record.mark, record.refs, record.body)
                self._run("INSERT INTO effect VALUES (?, ?, ?, ?, ?, ?, ?)", self._cipher.stored("effect", *row))
        except apsw.ConstraintError as error:  # somebody put an older row of the line back
            raise Damaged(
                f"table line, row {append.b}: there are records after its end", what=(f"line {append.b}",)
            ) from error
        return r + len(append.records) - 1

    def _move_end(self, append: Append) -> None:
        """Compare and swap the end of a line."""
        end = self._known.get(append.b)
        for _ in range(2):
            if end is None:
                found = self._run(f"{LINE} WHERE b = ?", (append.b,)).fetchone()
                row = self._cipher.record("line", LineRow, found) if found is not None else LineRow(append.b)
                end = LineEnd(row, found[-1] if found is not None else None)
            old = end.row
            if old.count == append.count and old.chain == append.chain:
                new = replace(old, count=old.count + len(append.records), chain=append.end)
                if end.sum is None:
                    self._known[append.b] = LineEnd(new, self._insert(new))
                    return
                *_, count, chain, total = stored_line(self._cipher, new)
                self._run(
                    "UPDATE line SET count = ?, chain = ?, sum = ? WHERE b = ? AND sum = ?",
                    (count, chain, total, new.b, end.sum),
                )
                if self._connection.changes() == 1:
                    self._known[append.b] = LineEnd(new, total)
                    return
            end = None  # what we remembered is out of date: look at the row itself, once
        raise Fenced(
            f"the line does not end at the record that these were to follow ({append.count}); nothing was written",
            hint="Open the agent again to go on from its newest record.",
        )
