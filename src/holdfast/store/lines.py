"""What can be asked about lines: the records of what happened outside, in order.

Owns the SELECTs on tables ``line`` and ``effect``, and the way from a line to those that it inherits from. Must not
know what a record says. Always true: a record whose sum does not match never leaves this module, and where records
are asked for without a gap, one that is missing is ``Damaged``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from holdfast.errors import Damaged
from holdfast.store.catalog import HINT, EffectRow, LineRow
from holdfast.store.cipher import Cipher

RECORDS_AT_ONCE = 256
"""Records per read: as few as keep a read short, as many as hide what a read costs."""

LINE = "SELECT b, origin, start, count, chain, sum FROM line"
_EFFECT = "SELECT r, b, i, mark, refs, body, sum FROM effect"

R = TypeVar("R")


def _missing_record(b: int, i: int) -> Damaged:
    return Damaged(
        f"table effect: record {i} of the line of branch {b} is missing",
        what=(f"effect {b}/{i}",),
        hint=HINT,
    )


class Lines(ABC):
    """The part of ``Reading`` that reads lines."""

    _cipher: Cipher

    @abstractmethod
    def _select(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def _one(self, table: str, make: Callable[..., R], sql: str, bindings: tuple[Any, ...]) -> R | None: ...

    @abstractmethod
    def _all(self, table: str, make: Callable[..., R], sql: str, bindings: tuple[Any, ...] = ()) -> list[R]: ...

    def line(self, b: int) -> LineRow:
        """The line of a branch; an empty one where it has no records."""
        return self._one("line", LineRow, f"{LINE} WHERE b = ?", (b,)) or LineRow(b)

    def lines(self) -> list[LineRow]:
        return self._all("line", LineRow, f"{LINE} ORDER BY b")

    def lines_as_they_are(self) -> Iterator[tuple[LineRow, bool]]:
        """Every line, and whether its sum fits."""
        for row in self._select(f"{LINE} ORDER BY b"):
            columns, fits = self._cipher.loose("line", row)
            yield LineRow(*columns), fits

    def segments(self, b: int, upto: int | None = None) -> list[tuple[int, int, int]]:
        """Where the first ``upto`` records of a line are, the newest first: a branch, and after which up to which."""
        found: list[tuple[int, int, int]] = []
        row = self.line(b)
        last = row.count if upto is None else min(upto, row.count)
        while last > 0:
            if last > row.start:
                found.append((row.b, row.start, last))
            last = min(last, row.start)
            if not last:
                break
            if not 0 < row.origin < row.b:
                raise Damaged(f"table line, row {row.b}: its origin cannot be one", what=(f"line {row.b}",))
            row = self.line(row.origin)
            if row.count < last:
                raise _missing_record(row.b, row.count + 1)
        return found

    def effects(
        self,
        b: int,
        *,
        after: int = 0,
        before: int | None = None,
        marked: bool = False,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Iterator[EffectRow]:
        """Records of a line with ``after < i < before``, inherited ones included. Unless marked: without a gap."""
        segments = self.segments(b, None if before is None else before - 1)
        rows = (
            row
            for of, low, high in (segments if newest_first else reversed(segments))
            for row in self._records(of, max(low, after), high, marked, newest_first)
        )
        yield from islice(rows, limit)

    def _records(self, b: int, low: int, high: int, marked: bool, newest_first: bool) -> Iterator[EffectRow]:
        order = "DESC" if newest_first else "ASC"
        which = " AND mark = 1" if marked else ""
        sql = f"{_EFFECT} WHERE b = ? AND i > ? AND i <= ?{which} ORDER BY i {order} LIMIT {RECORDS_AT_ONCE}"
        while low < high:
            batch = self._all("effect", EffectRow, sql, (b, low, high))
            for row in batch:
                expected = high if newest_first else low + 1
                if row.i != expected and not marked:
                    raise _missing_record(b, expected)
                low, high = (low, row.i - 1) if newest_first else (row.i, high)
                yield row
            if len(batch) < RECORDS_AT_ONCE:
                if low < high and not marked:
                    raise _missing_record(b, high if newest_first else low + 1)
                return

    def all_effects(self, after: int = 0) -> Iterator[EffectRow]:
        """Every record of the store with ``r > after``, whatever line it is on."""
        while batch := self._all(
            "effect", EffectRow, f"{_EFFECT} WHERE r > ? ORDER BY r LIMIT {RECORDS_AT_ONCE}", (after,)
        ):
            yield from batch
            after = batch[-1].r

    def records_as_they_are(self, b: int, after: int) -> Iterator[tuple[EffectRow, bool]]:
        """Records that were written on a branch itself, from a number on, and whether their sums fit."""
        sql = f"{_EFFECT} WHERE b = ? AND i > ? ORDER BY i LIMIT {RECORDS_AT_ONCE}"
        while batch := self._select(sql, (b, after)):
            for row in batch:
                columns, fits = self._cipher.loose("effect", row)
                yield EffectRow(*columns), fits
            after = batch[-1][2]

    def branches_with_records(self) -> list[int]:
        return [b for (b,) in self._select("SELECT DISTINCT b FROM effect ORDER BY b")]

    def record_numbers(self, b: int) -> list[tuple[int, int]]:
        """The numbers of the records that were written on a branch: in the store, and in the line."""
        return [(r, i) for r, i in self._select("SELECT r, i FROM effect WHERE b = ? ORDER BY i", (b,))]

    def effect_bytes(self, b: int) -> int:
        """What the records on a branch take, roughly."""
        ((size,),) = self._select("SELECT coalesce(sum(length(body) + length(refs)), 0) FROM effect WHERE b = ?", (b,))
        return int(size)
