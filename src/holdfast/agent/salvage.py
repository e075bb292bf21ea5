"""How far the records of a damaged line can be trusted.

Owns the reading of a line of which some rows may be missing or wrong. Changes nothing. What always holds: a record is
trusted only if everything before it is there and something that is whole speaks for it: the line's own end, or a
checkpoint; where the line's own row is lost, records that are whole and follow each other count as well, because what
happened outside must not be forgotten for want of a second witness.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from holdfast.agent.journal import BEGINNING, Position
from holdfast.agent.manifest import Manifest
from holdfast.errors import Damaged, HoldfastError
from holdfast.store.bodies import body_of
from holdfast.store.catalog import EffectRow, LineRow, LineStart, NewRecord
from holdfast.store.catalog import effect_chain as chain

if TYPE_CHECKING:
    from holdfast.agent.store import Store


class Salvage(Struct, frozen=True):
    """What can be trusted of a line: everything up to ``end``. ``problem`` says why no more, if there is more.

    ``readable``: the rows that lead to these records are whole, so that another line can inherit them.
    """

    end: Position
    problem: str
    readable: bool

    @property
    def lost(self) -> str:
        """In words what goes missing; empty when nothing does."""
        if not self.problem:
            return ""
        return f"what happened outside after record {self.end[0]} cannot be trusted: {self.problem}"


def trusted(store: Store, b: int) -> Salvage:
    """Read the line of a branch as far as it can be trusted."""
    reader = _Reader(store)
    known = reader.known(b)
    end = proven = BEGINNING
    try:
        for row in reader.records(b):
            end = row.i, chain(end[1], row.body)
            if known.get(end[0], end[1]) != end[1]:
                raise Damaged(f"record {end[0]}, or one before it, is not what was written")
            if end[0] in known:
                proven = end
    except HoldfastError as error:
        return Salvage(proven, error.message, not reader.unreadable)
    if reader.unreadable:
        return Salvage(end, reader.unreadable, readable=False)
    return Salvage(proven, "", readable=True)


def inheritance(store: Store, b: int, found: Salvage) -> tuple[LineStart, list[NewRecord]]:
    """How a new branch gets at the trusted records: as another one's, or, where nobody can read those, as copies."""
    if found.readable:
        return LineStart(b, *found.end), []
    rows = islice(_Reader(store).records(b), found.end[0])
    return LineStart(0, 0, b""), [NewRecord(row.mark, row.refs, row.body) for row in rows]


def shortened(store: Store, b: int, found: Salvage) -> LineRow:
    """The row of a line that ends where it can be trusted."""
    line = _Reader(store)._line(b)
    return LineRow(b, line.origin, min(line.start, found.end[0]), *found.end)


class _Reader:
    """Reads lines whose rows may be damaged. ``unreadable`` says what was wrong with one on the way."""

    def __init__(self, store: Store) -> None:
        self._catalog = store._catalog
        self.unreadable = ""

    def known(self, b: int) -> dict[int, bytes]:
        """Chain digests at some numbers, as the line's end and the checkpoints made on the branch have them.

        What a line inherits, its origin and the checkpoints made there speak for.
        """
        found: dict[int, bytes] = {}
        try:
            line = self._catalog.line(b)
            if 0 < line.origin < b:
                found = {count: digest for count, digest in self.known(line.origin).items() if count <= line.start}
            found[line.count] = line.chain
        except HoldfastError:
            pass
        for n, _, _ in self._catalog.links(b):
            try:
                count, digest = Manifest.decode(self._catalog.checkpoint(n).manifest).effects
            except HoldfastError:
                continue
            found[count] = digest
        return found

    def records(self, b: int, upto: int | None = None) -> Iterator[EffectRow]:
        """The records of a line in order; raises at the first that is missing or damaged."""
        line = self._line(b)
        last = upto if upto is not None else line.count if line.count >= 0 else None
        before = line.start if last is None else min(line.start, last)
        if before:
            if not 0 < line.origin < b:
                raise Damaged(f"line {b}: its origin cannot be one")
            yield from self.records(line.origin, before)
        expected = before + 1
        for row, fits in self._catalog.records_as_they_are(b, before):
            if last is not None and expected > last:
                return
            if row.i != expected or not fits:
                break
            yield row
            expected += 1
        if last is not None and expected <= last:
            raise Damaged(f"record {expected} is missing or damaged")

    def _line(self, b: int) -> LineRow:
        """The line's row, or what is known of it without. A count of -1: as many as there are."""
        try:
            line = self._catalog.line(b)
            if line.count:
                return line
            told = self._told(b)
            if told == (0, 0) and next(self._catalog.records_as_they_are(b, 0), None) is None:
                return line
            self.unreadable = self.unreadable or f"table line, row {b}: missing"
        except HoldfastError as error:
            told = self._told(b)
            self.unreadable = self.unreadable or error.message
        return LineRow(b, *told, -1)

    def _told(self, b: int) -> tuple[int, int]:
        """Where a line began, as the history has it: the branch it inherits from, and how many records."""
        branch = self._catalog.branch_row(b)
        name = body_of(branch)["name"]
        for event in self._catalog.events(a=branch.a):
            body = body_of(event)
            if body.get("what") == "branch" and body["name"] == name and "line" in body:
                return body["line"][0], body["line"][1]
            if body.get("what") == "clone":
                for named, origin, start in body.get("lines", ()):
                    if named == name:
                        return origin, start
        return 0, 0
