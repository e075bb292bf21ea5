"""What is forgotten and stays all the same, unseen, because letting it go would take more room than it gives.

Owns that comparison. A checkpoint that stays while the one before it goes must be sealed, and a sealed state is written
in whole nodes; where those are larger than what goes, keeping every tenth checkpoint would make a store larger. Changes
nothing. What always holds: what is spared is dead, and everything that rests on it can be read as before; as far as
sizes can be told beforehand, what is not spared gives more room than it takes; what would have to be read from a place
that cannot be reached is spared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from holdfast.agent import history
from holdfast.agent.collecting import Reached
from holdfast.agent.manifest import Manifest
from holdfast.errors import ColdPlaceMissing
from holdfast.store.bodies import places_of
from holdfast.store.catalog import CheckpointRow
from holdfast.store.cipher import PLAIN
from holdfast.store.writing import packed_nodes

if TYPE_CHECKING:
    from holdfast.agent.removal import Family
    from holdfast.agent.store import Store

ROW_BYTES = 96
"""What a checkpoint's or a node's row takes besides its content: numbers, its sum or digest, its place in indexes."""

PAGE_BYTES = 4096


def _room(size: int) -> int:
    """What a node takes in the catalog: of a page, as large a part as so large a row leaves useless for others."""
    size += ROW_BYTES
    return PAGE_BYTES // (PAGE_BYTES // size) if size <= PAGE_BYTES else size


class _Orphan:
    """A checkpoint that stays, and is not sealed, while those before it go."""

    def __init__(self, row: CheckpointRow, family: Family, dead: set[int]) -> None:
        self.row = row
        self.gap: list[int] = []  # the dead ones between it and the next that stays, or what they all rest on
        n = row.parent
        while n in dead and n != row.base:
            self.gap.append(n)
            n = family.rows[n].parent
        self.first = n in dead  # and that goes, too: somebody has to take its place
        self.nodes: set[bytes] = set()


def spared(store: Store, family: Family, dead: set[int]) -> set[int]:
    """Those of the dead that stay, because sealing what rests on them would take more."""
    groups: dict[int, list[_Orphan]] = defaultdict(list)
    for row in reversed(family.orphans(dead)):
        if not row.sealed:
            groups[row.base].append(_Orphan(row, family, dead))
    if not groups:
        return set()
    weighing = _Weighing(store, family, dead)
    found: set[int] = set()
    for base, orphans in list(groups.items()):
        try:
            weighing.load(orphans)
        except ColdPlaceMissing:  # what cannot be read now cannot be sealed: all of it stays until the next time
            found |= _under(base, groups.pop(base))
    return found.union(*(weighing.choose(base, orphans) for base, orphans in groups.items()))


def _under(base: int, orphans: list[_Orphan]) -> set[int]:
    """All of the dead that these rest on."""
    first = {base} if any(orphan.first for orphan in orphans) else set()
    return first.union(*(orphan.gap for orphan in orphans))


class _Weighing:
    def __init__(self, store: Store, family: Family, dead: set[int]) -> None:
        self._store = store
        self._family = family
        self._reading = family.reading
        self._sizes: dict[bytes, int] = {}  # of nodes that would be written
        self._alive = Reached(self._reading, tolerant=True)
        for n, row in family.rows.items():
            if n not in dead and row.sealed:
                self._alive.add(digest for _, digest in Manifest.decode(row.manifest).sections)

    def load(self, orphans: list[_Orphan]) -> None:
        for orphan in orphans:
            nodes = history.state_of(self._store._catalog, orphan.row).unstored()
            new = [(digest, node) for digest, node in nodes.items() if digest not in self._sizes]
            self._sizes.update((digest, _room(len(data))) for digest, data in packed_nodes(PLAIN, new))
            self._alive.state(Manifest.decode(orphan.row.manifest).sections, nodes)
            orphan.nodes = set(nodes)

    def choose(self, base: int, orphans: list[_Orphan]) -> set[int]:
        """Of the checkpoints that rested on one: all of the dead, some of them, or none, whichever takes least."""
        everything = _under(base, orphans)
        some, left = self._mixed(orphans)
        gains = {
            0: 0,
            # A page with rows left in it is not given back before most of it is empty.
            1: self._rows(everything - some) // 2 - self._written(left),
            2: self._rows(everything) + self._waste(base, everything) - self._written(orphans),
        }
        return (everything, some, set[int]())[max(gains, key=lambda one: gains[one])]

    def _mixed(self, orphans: list[_Orphan]) -> tuple[set[int], list[_Orphan]]:
        """Where a gap takes less than the nodes that are for one state alone, it stays; the other states are sealed."""
        uses = Counter(digest for orphan in orphans for digest in orphan.nodes)
        kept: set[int] = set()
        left = []
        for orphan in orphans:
            alone = sum(self._sizes[digest] for digest in orphan.nodes if uses[digest] == 1)
            if orphan.first or self._rows(set(orphan.gap) - kept) >= alone:
                left.append(orphan)
            else:
                kept.update(orphan.gap)
                uses.subtract(orphan.nodes)
        return kept, left

    def _rows(self, numbers: set[int]) -> int:
        rows = [self._family.rows[n] for n in numbers]
        size = sum(len(row.manifest) + len(row.operations) + ROW_BYTES for row in rows)
        return size + self._reading.tail_bytes(numbers)

    def _written(self, orphans: list[_Orphan]) -> int:
        return sum(self._sizes[digest] for digest in {digest for orphan in orphans for digest in orphan.nodes})

    def _waste(self, base: int, gone: set[int]) -> int:
        """What nodes take that hold only the base's state, and that part of others which are values of what goes."""
        state = Reached(self._reading, tolerant=True)
        if base in gone:
            state.add(digest for _, digest in Manifest.decode(self._family.rows[base].manifest).sections)
        found = self._reading.stored_bytes("node", state.nodes - self._alive.nodes)
        branches = {self._family.rows[n].b for n in gone}
        for seal in (seal for b in branches for seal in self._reading.seals(b)):
            digests, entries = places_of(seal)
            total: Counter[bytes] = Counter()
            going: Counter[bytes] = Counter()
            for n, places in entries:
                for index, _, length in places:
                    total[digests[index]] += length
                    going[digests[index]] += length if (n or seal.n) in gone else 0
            for digest in going.keys() - self._alive.nodes - state.nodes:
                found += self._reading.stored_bytes("node", [digest]) * going[digest] // max(1, total[digest])
        return found
