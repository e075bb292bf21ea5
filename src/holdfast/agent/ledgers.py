"""The proof of all lines: that the records of what happened outside are those that were written.

Owns the part of verifying that concerns tables ``line`` and ``effect``. Knows records as bytes. Changes nothing. What
always holds: a record that is missing, altered, moved or too many shows, and so does a checkpoint that speaks of other
records than those that are there; one damaged line does not keep the others from being proven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from holdfast.agent.collecting import DIGEST_BYTES, Reached
from holdfast.agent.journal import Position
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.catalog import EffectRow, LineRow
from holdfast.store.catalog import effect_chain as chain
from holdfast.store.ranges import Ranges
from holdfast.store.reading import Reading

Report = Callable[[str, str, Sequence[str]], None]
"""What is wrong, in which way, and the ids of checkpoints that it concerns."""


class Ledgers:
    """Takes what checkpoints say of lines, then proves the lines and compares."""

    def __init__(self, catalog: Reading, report: Report) -> None:
        self._catalog = catalog
        self._report = report
        self._said: dict[int, tuple[int, Position, str]] = {}  # checkpoint -> branch, position, id
        self._lines: dict[int, LineRow] = {}
        self._wanted: dict[int, set[int]] = defaultdict(set)  # branch -> numbers whose chain digests are needed
        self._proven: dict[tuple[int, int], bytes] = {}
        self._reached = Reached(catalog)
        self.checked = 0

    def speaks(self, n: int, b: int, position: Position, identity: str) -> None:
        """Checkpoint ``n``, made on branch ``b``, says that its line was there."""
        self._said[n] = b, position, identity

    def start(self, b: int) -> tuple[int, int]:
        """Where a line began: the branch that it inherits from, and how many records."""
        line = self._lines.get(b)
        return (line.origin, line.start) if line is not None else (0, 0)

    def prove(self, gone: Ranges, progress: Callable[[int], None]) -> None:
        """``gone`` are records that are told of as removed: of these, some may still be waiting to be deleted."""
        self._lines = {row.b: row for row, fits in self._catalog.lines_as_they_are() if fits}
        for b, line in sorted(self._lines.items()):
            self._want(line.origin, line.start)
            if line.start > line.count:
                self._report(f"line {b}", "it is shorter than what it inherits", ())
        for b, (count, _), _ in self._said.values():
            self._want(b, count)
        for b in sorted(self._lines):
            self._line(self._lines[b])
            progress(self.checked)
        self._loose(gone)
        self._checkpoints()

    # -- records ----------------------------------------------------------------------------------------

    def _home(self, b: int, count: int) -> int:
        """The branch on which the record of that number in a line was written; 0 when that cannot be told."""
        line = self._lines.get(b)
        while line is not None and count <= line.start:
            line = self._lines.get(line.origin) if line.origin < line.b else None
        return line.b if line is not None and count <= line.count else 0

    def _want(self, b: int, count: int) -> None:
        home = self._home(b, count) if count else 0
        if home:
            self._wanted[home].add(count)

    def _chain_at(self, b: int, count: int) -> bytes | None:
        """The chain digest at a number of a line; None when it could not be proven."""
        return self._proven.get((self._home(b, count), count)) if count else b""

    def _line(self, line: LineRow) -> None:
        end = self._chain_at(line.origin, line.start)
        if end is None:
            self._report(f"line {line.b}", "what it inherits cannot be proven", ())
            return
        number = line.start
        for row, fits in self._catalog.records_as_they_are(line.b, line.start):
            if row.i > line.count:
                break
            self.checked += 1
            number += 1
            if row.i != number or not fits or row.mark not in {0, 1}:
                self._report(f"line {line.b}", f"record {number} is missing or damaged", ())
                return
            self._blocks(row)
            end = chain(end, row.body)
            if number in self._wanted[line.b]:
                self._proven[line.b, number] = end
        if number != line.count:
            self._report(f"line {line.b}", f"record {number + 1} and what follows is missing", ())
        elif end != line.chain:
            self._report(f"line {line.b}", "its records do not lead to the chain digest at its end", ())

    def _blocks(self, row: EffectRow) -> None:
        """The nodes of its long values are there, down to the last."""
        if not row.refs:
            return
        try:
            self._reached.add(row.refs[at : at + DIGEST_BYTES] for at in range(0, len(row.refs), DIGEST_BYTES))
        except HoldfastError as error:
            what = error.what if isinstance(error, Damaged) else ()
            self._report(f"effect {row.r}", f"a node of a value is missing or damaged: {', '.join(what)}", ())

    def _loose(self, gone: Ranges) -> None:
        """Records that belong to no line."""
        for b in self._catalog.branches_with_records():
            line = self._lines.get(b)
            first, last = (line.start, line.count) if line is not None else (0, 0)
            loose = [r for r, i in self._catalog.record_numbers(b) if not first < i <= last and r not in gone]
            if loose:
                self._report(f"line {b}", f"{len(loose)} record(s) that were written on it are not part of it", ())

    # -- checkpoints ------------------------------------------------------------------------------------

    def _checkpoints(self) -> None:
        wrong: dict[int, list[str]] = defaultdict(list)
        for b, (count, digest), identity in self._said.values():
            if self._chain_at(b, count) != digest:
                wrong[b].append(identity)
        for b, identities in wrong.items():
            detail = f"{len(identities)} checkpoint(s) speak of records that are not there or are others"
            self._report(f"line {b}", detail, identities)
