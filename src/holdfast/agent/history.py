"""Reading states out of the catalog: the base's nodes, and the operations since.

Owns the way from a checkpoint's row to a document. Changes nothing. What always holds: a state that is loaded has
the digests that its manifest recorded, or an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.agent.manifest import Manifest
from holdfast.codec.blocks import digest_of
from holdfast.codec.document import Document, Section
from holdfast.codec.operations import Operation, decode_operations
from holdfast.codec.types import Registry
from holdfast.errors import Damaged
from holdfast.store.catalog import Catalog, CheckpointRow
from holdfast.store.sealing import Values


def operations_of(row: CheckpointRow, manifest: Manifest, values: Values | None) -> list[Operation]:
    """A checkpoint's operations, proven against its manifest."""
    if digest_of("holdfast.operations", row.operations) != manifest.operations:
        short = row.id.hex()[:12]
        raise Damaged(f"the operations of checkpoint {short} are not what was written", what=(f"checkpoint {short}",))
    if values is None:
        return decode_operations(row.operations, manifest.time_us, None)
    found: list[bytes] | None = None

    def value_at(ordinal: int) -> bytes:
        nonlocal found
        if found is None:
            found = values.of(row)
        if not 0 <= ordinal < len(found):
            raise Damaged(f"a value of checkpoint {row.id.hex()[:12]} is missing", what=(f"checkpoint {row.n}",))
        return found[ordinal]

    return decode_operations(row.operations, manifest.time_us, value_at)


class Blank:
    """The source of the empty state, from which operations may still name what the catalog holds."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.sections: list[tuple[str, bytes]] = []
        self.base: dict[str, bytes] = {}

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = self._catalog.nodes(digests)
        for digest in digests:
            if digest not in found:
                raise Damaged(f"node {digest.hex()[:16]} is missing", what=(f"node {digest.hex()[:16]}",))
        return found

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self._catalog.chunks(digests))

    def operations(self, section: str) -> list[Operation]:  # noqa: ARG002 - there are none
        return []


class Stored(Blank):
    """The source of a document: the state of one checkpoint."""

    def __init__(self, catalog: Catalog, row: CheckpointRow) -> None:
        super().__init__(catalog)
        self._row = row
        manifest = Manifest.decode(row.manifest)
        self.sections = manifest.sections
        if row.base == row.n:
            self.base = dict(manifest.sections)
        elif row.base:
            base = catalog.checkpoint(row.base)
            self.base = dict(Manifest.decode(base.manifest).sections)
        self._operations: dict[str, list[Operation]] | None = None

    def operations(self, section: str) -> list[Operation]:
        if self._operations is None:
            by_section: dict[str, list[Operation]] = {}
            rows = self.since_base()
            values = Values(self._catalog, rows)
            for row in rows:
                for operation in operations_of(row, Manifest.decode(row.manifest), values):
                    by_section.setdefault(operation.path[0], []).append(operation)
            self._operations = by_section
        return self._operations.get(section, [])

    def since_base(self) -> list[CheckpointRow]:
        """The checkpoints whose operations lead from the base to this state, oldest first, proven to be a chain."""
        if self._row.sealed:
            return []
        rows = self._catalog.ancestry(self._row.n, stop_at=self._row.base)
        below = self._row.id
        for row in rows:
            if row.id != below:
                raise Damaged(
                    f"checkpoint {row.n} is not the one that its child names", what=(f"checkpoint {row.id.hex()[:12]}",)
                )
            below = Manifest.decode(row.manifest).parent
        expected = self._catalog.checkpoint(self._row.base).id if self._row.base else b""
        if below != expected:
            raise Damaged(f"the history below checkpoint {self._row.n} has a gap", what=(f"checkpoint {self._row.n}",))
        rows.reverse()
        return rows


class Live(Document):
    """A document that knows what to say when a section turns out to be damaged at its first touch."""

    explain: Callable[[Damaged], Damaged] | None = None

    def _load(self, section: Section) -> None:
        try:
            super()._load(section)
        except Damaged as error:
            error.what = tuple(dict.fromkeys((*error.what, f"section {section.name}")))
            if self.explain is not None:
                self.explain(error)
            raise


def empty(catalog: Catalog, registry: Registry, *, inert: bool = False) -> Document:
    """The state before the first checkpoint."""
    return Document(registry, Blank(catalog), inert=inert)


def load(
    catalog: Catalog, row: CheckpointRow, registry: Registry, *, readonly: bool = True, inert: bool = False
) -> Document:
    """The state of a checkpoint. Sections are read when they are touched."""
    return Live(registry, Stored(catalog, row), readonly=readonly, inert=inert)
