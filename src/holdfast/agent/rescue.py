"""Rescue: the rows and chunks of a damaged store that can be proven, in the new store that a repair makes.

Owns what of them is written at once, and what waits until it is known what stays: refs, and what the store said of
itself. What they mean together is for repair to judge. What always holds: rows keep their handles; a chunk is read and
proven before it gets into a pack of the new store; what packs say of themselves stands for rows that are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.agent import salvage
from holdfast.agent.collection import note_waste
from holdfast.errors import Damaged, StoreFailed
from holdfast.store.catalog import Place, Progress
from holdfast.store.changes import Change, NewPack
from holdfast.store.cipher import Cipher
from holdfast.store.database import COLD, OBJECTS, Database
from holdfast.store.files import Layout, failed_disk
from holdfast.store.objects import Folder, open_objects
from holdfast.store.packs import Packs, file_name
from holdfast.store.tables import TABLES
from holdfast.store.witness import Noted, lost

if TYPE_CHECKING:
    from holdfast.agent.repair import RepairReport

_PLACES = (OBJECTS, COLD)
_BATCH_ROWS, _BATCH_BYTES = 512, 2**22
_REFS = frozenset({"agent", "branch", "tag", "validity", "shallow"})


class Rescue:
    """Fills a new store. ``hurt``: something is not as it was written."""

    def __init__(self, db: Database, report: RepairReport, say: Progress) -> None:
        self.db = db
        self.view = db.view
        self.facts: dict[str, bytes] = {}
        self.floors: dict[str, int] = {}
        self.refs: dict[tuple[Any, ...], tuple[str, tuple[Any, ...]]] = {}  # rows that are written at the end
        self.hurt = False
        self._report = report
        self._say = say
        self._batch: list[tuple[str, tuple[Any, ...]]] = []
        self._bytes = 0

    def fill(self, copy: Layout, cipher: Cipher, noted: Noted | None) -> None:
        """Write every row that can be proven, with its old handle. Refs are written at the end."""
        rows = salvage.Salvage(cipher, self._take)
        rows.read(copy, noted)
        self._flush()
        self.db.change(self.remember)
        self.hurt = bool(rows.problems)
        self._report.problems += rows.problems
        for r in sorted(rows.hollow):
            record = f"record {r} of what happened outside"
            bare, gone = f"the values of {record}; what it says", f"what {record} says; that there was one"
            self._report.missing.append(f"{bare if rows.hollow[r][-1] else gone} is kept")
        if not self.facts:
            self._report.missing.append("what the store said of itself: its policy, and where packs lie, if it had any")
        if lost(self.view, noted):
            self._report.missing.append(f"acknowledged {', '.join(lost(self.view, noted))}")

    def _take(self, table: str, values: tuple[Any, ...]) -> None:
        if table == "store":
            self.facts.setdefault(*values)
        elif table == "floor":
            self.floors[values[0]] = max(values[1], self.floors.get(values[0], 0))
        elif table in _REFS:
            key = (table, *(values[at] for at in TABLES[table].keys))
            known = self.refs.get(key)
            # A branch is written over with every commit: of several versions the newest counts.
            if known is None or (table == "branch" and _version(values) > _version(known[1])):
                self.refs[key] = table, values
        elif table not in {"slot", "open", "claim"}:  # what is open follows from the lines, and nobody is at work
            self._batch.append((table, values))
            self._bytes += sum(len(value) for value in values if isinstance(value, bytes))
            if len(self._batch) >= _BATCH_ROWS or self._bytes > _BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0

        def put(change: Change) -> None:
            for table, values in batch:
                change.put(table, *values, unless_there=True)

        if batch:
            self.db.change(put)

    def remember(self, change: Change, noted: Noted | None = None) -> None:
        """Handles that were given are not given again."""
        for table, number in (*self.floors.items(), *zip(("loose", "log", "record"), noted or (), strict=False)):
            change.remember(table, number)

    def bring_chunks(self, source: Layout, cipher: Cipher) -> None:
        """Copy every chunk that can be read into packs of the new store."""
        own = self.facts.get("uuid", b"").hex()
        here, cold = (open_objects(place, own) if (place := self._place(name)) else None for name in _PLACES)
        old = Packs(cipher, here or Folder(source.packs), cold)
        self._name_packs(old)
        packs = self.view.rows("pack")
        for done, (p, pack, _) in enumerate(packs, 1):
            digests = [digest for digest, *_ in self.view.rows("chunk", "WHERE p = ? ORDER BY start", (p,))]
            made = self.db.packs.write(self._readable(old, digests))

            def put(change: Change, p: int = p, made: NewPack = made) -> None:
                change.delete("chunk", "p", [p])
                change.delete("pack", "p", [p])
                if made.chunks:
                    change.put_pack(made)

            self.db.change(put)
            if len(made.chunks) < len(digests):
                text = f"{len(digests) - len(made.chunks)} of {len(digests)} chunk(s) are lost"
                self._report.problems.append(f"packs/{file_name(pack)}: {text}")
            if not made.chunks:
                self.db.packs.discard(made.uuid)
            self._say("packs", done, len(packs))

    def _place(self, name: str) -> str:
        try:
            return self.facts.get(name, b"").decode()
        except UnicodeDecodeError:
            self._report.problems.append(f"table store, row {name}: it is not the address of a place")
            return ""

    def _name_packs(self, old: Packs) -> None:
        """What packs say of themselves stands for rows that are lost."""
        known = {pack: p for p, pack, _ in self.view.rows("pack")}
        chunks = {digest: p for digest, p, *_ in self.view.rows("chunk")}
        found = 0
        for pack in sorted(old.whereabouts()):
            index = self._index(old, pack)
            unnamed = (chunks[one] for one in index if one in chunks and chunks[one] not in known.values())
            p = known.get(pack) or next(unnamed, 0)
            rows = [(digest, *place[1:]) for digest, place in index.items() if digest not in chunks]
            # Some of what it holds may have been let go. That nothing of it is known, or only that, is damage.
            if (self.hurt or (p and (pack not in known or len(rows) == len(index)))) and (rows or pack not in known):
                known[pack] = self.db.change(partial(_put_pack, p=p, pack=pack, rows=rows))
                chunks |= dict.fromkeys((digest for digest, *_ in rows), known[pack])
                found += 1
        if found:
            self._report.problems.append(
                f"tables pack and chunk: rows of {found} pack(s) were lost, and found in the packs"
            )
        lost = sorted({*chunks.values()} - {*known.values()})
        if lost:  # or they would be taken for chunks of a new pack that gets the number
            self.db.change(partial(Change.delete, table="chunk", column="p", values=lost))
            self._report.problems.append(f"table chunk: chunks of {len(lost)} pack(s) are lost: no pack has them")

    def _index(self, old: Packs, pack: bytes) -> Mapping[bytes, Place]:
        try:
            return old.index(pack)
        except (Damaged, StoreFailed) as error:
            if not isinstance(error, Damaged) and not failed_disk(error):
                raise
            return {}

    def _readable(self, old: Packs, digests: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for digest in digests:
            try:
                yield digest, b"".join(old.read(self.view, [digest]))
            except (Damaged, StoreFailed) as error:
                if not isinstance(error, Damaged) and not failed_disk(error):
                    raise


def _put_pack(change: Change, p: int, pack: bytes, rows: Sequence[tuple[bytes, int, int, int]]) -> int:
    p = p or change.tx.number("pack")
    change.put("pack", p, pack, 0, unless_there=True)
    for row in rows:
        change.put("chunk", row[0], p, *row[1:], unless_there=True)
    note_waste(change)  # some of it may have been let go on purpose
    return p


def _version(branch: tuple[Any, ...]) -> tuple[int, ...]:
    """What rises when a branch is written over: generation, epoch, depth, count."""
    return branch[13], branch[8], branch[7], branch[11]
