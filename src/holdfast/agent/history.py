"""Reading states out of the catalog: the base's nodes, and the operations since.

Owns the way from a checkpoint's row to a document. Changes nothing. What always holds: a state that is loaded has
the digests that its manifest recorded, or an error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from holdfast.agent.manifest import Manifest
from holdfast.codec.blocks import digest_of
from holdfast.codec.diff import values_of
from holdfast.codec.document import Document
from holdfast.codec.operations import Operation, decode_operations, needed, raw_operations, resolved
from holdfast.codec.state import Reader, State
from holdfast.codec.tracked import Section
from holdfast.codec.types import Registry
from holdfast.errors import Damaged, Forgotten
from holdfast.store.bodies import body_of
from holdfast.store.catalog import CheckpointRow, States, clone_key
from holdfast.store.ranges import Ranges
from holdfast.store.sealing import Values

# A section that is given anew in each step needs no operations from before: so many checkpoints are looked at first.
RECENT = 4


def operations_of(row: CheckpointRow, manifest: Manifest, values: Values | None) -> list[Operation]:
    """A checkpoint's operations, proven against its manifest."""
    data = _proven(row, manifest)
    return decode_operations(data, manifest.time_us, _lookup(row, values) if values is not None else None)


def _proven(row: CheckpointRow, manifest: Manifest) -> bytes:
    if digest_of("holdfast.operations", row.operations) != manifest.operations:
        short = row.id.hex()[:12]
        raise Damaged(f"the operations of checkpoint {short} are not what was written", what=(f"checkpoint {short}",))
    return row.operations


def _lookup(row: CheckpointRow, values: Values) -> Callable[[int], bytes]:
    """Gives a checkpoint's values by their numbers; they are read when the first of them is asked for."""
    found: list[bytes] | None = None

    def value_at(ordinal: int) -> bytes:
        nonlocal found
        if found is None:
            found = values.of(row)
        if not 0 <= ordinal < len(found):
            raise Damaged(f"a value of checkpoint {row.id.hex()[:12]} is missing", what=(f"checkpoint {row.n}",))
        return found[ordinal]

    return value_at


class Blank:
    """The source of the empty state, from which operations may still name what the catalog holds."""

    def __init__(self, catalog: States) -> None:
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

    def again(self) -> bool:
        return False


class Stored(Blank):
    """The source of a document: the state of one checkpoint."""

    def __init__(self, catalog: States, row: CheckpointRow, *, arriving: bool = False) -> None:
        """``arriving``: it is not in the catalog yet, so that nobody can have stored it in another way."""
        super().__init__(catalog)
        self._arriving = arriving
        self._manifests: dict[bytes, Manifest] = {}  # of rows that were looked at, by their bytes
        self.sections = self._manifest_of(row).sections
        try:
            self._rest_on(row)
        except Damaged:
            if not self.again():
                raise

    def _rest_on(self, row: CheckpointRow) -> None:
        self._row = row
        self._operations: dict[str, list[Operation]] | None = None
        self._recent: dict[str, list[Operation]] | None = None
        self.base = {}
        if row.base == row.n:
            self.base = dict(self.sections)
        elif row.base:
            base = self._catalog.checkpoint(row.base)
            self.base = dict(Manifest.decode(base.manifest).sections)

    def again(self) -> bool:
        """After something could not be read: whether the same state is stored in another way since, and can be now.

        What was before a checkpoint may be forgotten while somebody reads it. Raises ``Forgotten`` when it was
        forgotten itself.
        """
        row = current(self._catalog, self._row) if not self._arriving else None
        if row is None or row.base == self._row.base:
            return False
        self._rest_on(row)
        return True

    def operations(self, section: str) -> list[Operation]:
        """What leads from the base's section to this state's, or from nothing, where it was given as a whole since."""
        if self._operations is None:
            if self._recent is None:
                rows = self._catalog.ancestry(self._row.n, stop_at=self._row.base, limit=RECENT)
                self._check_chain(rows)
                found, complete = self._by_section(rows[::-1])
                self._recent = {name: found[name] for name in complete}
            if section in self._recent:
                return self._recent[section]
            # Not again from elsewhere: what lies below is read already.
            self._operations, _ = self._by_section(self._since_base())
            self._manifests.clear()
        return self._operations.get(section, [])

    def _by_section(self, rows: list[CheckpointRow]) -> tuple[dict[str, list[Operation]], set[str]]:
        """The operations of each section, without those before it was last given as a whole; and which were."""
        complete: set[str] = set()
        wanted = [needed(raw_operations(_proven(row, self._manifest_of(row))), complete) for row in reversed(rows)]
        found: dict[str, list[Operation]] = {}
        values = Values(self._catalog, rows)
        for row, some in zip(rows, reversed(wanted), strict=True):
            for operation in resolved(some, self._manifest_of(row).time_us, _lookup(row, values)):
                found.setdefault(operation.path[0], []).append(operation)
        return found, complete

    def _manifest_of(self, row: CheckpointRow) -> Manifest:
        known = self._manifests.get(row.manifest)
        if known is None:
            known = self._manifests[row.manifest] = Manifest.decode(row.manifest)
        return known

    def since_base(self) -> list[CheckpointRow]:
        """The checkpoints whose operations lead from the base to this state, oldest first, proven to be a chain."""
        while True:
            try:
                return self._since_base()
            except Damaged:
                if not self.again():
                    raise

    def _since_base(self) -> list[CheckpointRow]:
        if self._row.sealed:
            return []
        rows = self._catalog.ancestry(self._row.n, stop_at=self._row.base)
        below = self._check_chain(rows)
        expected = self._catalog.checkpoint(self._row.base).id if self._row.base else b""
        if below != expected:
            raise Damaged(f"the history below checkpoint {self._row.n} has a gap", what=(f"checkpoint {self._row.n}",))
        rows.reverse()
        return rows

    def _check_chain(self, rows: list[CheckpointRow]) -> bytes:
        """Prove that each row, from this state's own on, is the one that its child names; returns the next one's id."""
        below = self._row.id
        for row in rows:
            if row.id != below:
                raise Damaged(
                    f"checkpoint {row.n} is not the one that its child names", what=(f"checkpoint {row.id.hex()[:12]}",)
                )
            below = self._manifest_of(row).parent
        return below


class Live(Document):
    """A document that knows what to say when a section turns out to be damaged at its first touch."""

    __slots__ = ("explain",)
    explain: Callable[[Damaged], Damaged] | None

    def __init__(
        self,
        registry: Registry,
        source: Stored,
        *,
        readonly: bool = False,
        inert: bool = False,
        explain: Callable[[Damaged], Damaged] | None = None,
    ) -> None:
        super().__init__(registry, source, readonly=readonly, inert=inert)
        self.explain = explain

    def load(self, section: Section) -> None:
        while True:
            try:
                super().load(section)
                return
            except Damaged as error:
                source = self.told.source
                if isinstance(source, Stored) and source.again():
                    continue
                self._complete(error, section)
                raise

    def _complete(self, error: Damaged, section: Section) -> None:
        error.what = tuple(dict.fromkeys((*error.what, f"section {section.name}")))
        if self.explain is not None:
            self.explain(error)


def current(catalog: States, row: CheckpointRow) -> CheckpointRow | None:
    """A checkpoint's row as it is now, None when it cannot be read. ``Forgotten`` when nobody sees it any more."""
    try:
        found = catalog.checkpoint(row.n)
    except Damaged:
        found = None
    if found is not None and found.id == row.id and found.base != row.base:
        return found
    if not _seen(catalog, row):
        raise Forgotten(
            f"checkpoint {row.id.hex()[:12]} was forgotten while it was being read",
            hint="See `holdfast log` for what is left.",
        )
    return found


@contextmanager
def unless_forgotten(catalog: States, row: CheckpointRow) -> Iterator[None]:
    """What cannot be read of a checkpoint is damage, unless it was forgotten: then that is what is said."""
    try:
        yield
    except Damaged:
        current(catalog, row)
        raise


def _seen(catalog: States, row: CheckpointRow) -> bool:
    """Whether the agent that made a checkpoint, or a clone of it, has not forgotten it."""
    for a in (row.a, *(event.a for event in catalog.events_named([clone_key(row.a)]))):
        agent = catalog.agent_row(a)
        if agent is None:
            continue
        hidden = [body["n"] for _, body in catalog.forgotten(a)]
        hidden.append(body_of(agent).get("without", ((), ()))[0])
        if not any(row.n in Ranges(pairs) for pairs in hidden):
            return True
    return False


def state_of(catalog: States, row: CheckpointRow | None) -> State:
    """The state of a checkpoint as bytes, or the one before the first. Sections are read when they are asked for."""
    return State(Stored(catalog, row) if row is not None else Blank(catalog))


def read_values(state: State, operations: Iterable[Operation]) -> None:
    """Read every value that operations put into a state, with all that it names."""
    reader = Reader(state, Registry(), inert=True)
    for operation in operations:
        for data in values_of(operation.code, operation.args):
            reader.value(data)


def read_all(catalog: States, row: CheckpointRow, *, arriving: bool = False) -> State:
    """The state of a checkpoint, after every node and every value in it was read."""
    state = State(Stored(catalog, row, arriving=arriving))
    Reader(state, Registry(), inert=True).everything()
    return state


def empty(catalog: States, registry: Registry, *, inert: bool = False) -> Document:
    """The state before the first checkpoint."""
    return Document(registry, Blank(catalog), inert=inert)


def load(
    catalog: States, row: CheckpointRow, registry: Registry, *, readonly: bool = True, inert: bool = False
) -> Document:
    """The state of a checkpoint. Sections are read when they are touched."""
    return Live(registry, Stored(catalog, row), readonly=readonly, inert=inert)
