"""From a checkpoint to its state: the nodes of the nearest sealed one at or above it, and the operations since.

Owns that way, the search for what encodings name, and reading all of it. Changes nothing. What always holds: a state
that is loaded has the digests that its manifest recorded, or an error is raised; a state whose base was forgotten
meanwhile is found again by the way in which it is stored now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from holdfast.codec.blocks import DICT, leaf_items, roots_in
from holdfast.codec.diff import values_of
from holdfast.codec.document import Document
from holdfast.codec.operations import Operation, decode_operations, needed, raw_operations, resolved
from holdfast.codec.state import State
from holdfast.codec.tracked import Section
from holdfast.codec.tree import read
from holdfast.codec.types import NO_TYPES, Registry
from holdfast.codec.values import decode
from holdfast.codec.wire import BIG, BULK, CONTENT, MAX_DEPTH, nested_too_deep
from holdfast.errors import Damaged, Forgotten
from holdfast.store.catalog import View
from holdfast.store.cipher import HINT
from holdfast.store.database import Contents
from holdfast.store.rows import DIGEST_BYTES, Point

RECENT = 4
"""A section that is given anew in each step needs nothing from before: so many checkpoints are looked at first."""

_UP_MAX = 1 << 20
_ARRAY = b"\x93\xc4\x20"
"""Looking for this alone is ten times as fast, and says no of most texts."""
_CHUNKS = re.compile(rb"[\x29\x2a]" + _ARRAY)
_PROVEN_MAX = 200_000

Newest = Callable[[], Point | None]
"""Gives where a writer stands."""


def operations_of(view: View, point: Point) -> list[Operation]:
    """A checkpoint's operations, proven against its manifest."""
    return decode_operations(view.operations(point), point.manifest.time_us)


def named_in(data: bytes) -> tuple[set[bytes], set[bytes]]:
    """The trees and chunks that encodings may name. Other bytes can look like a name, so some may not exist."""
    return set(roots_in(data)), chunks_in(data)


def chunks_in(data: bytes) -> set[bytes]:
    """The chunks that encodings may name."""
    chunks: set[bytes] = set()
    for match in _CHUNKS.finditer(data) if _ARRAY in data else ():
        chunks |= _chunk_names(data, match.end())
    return chunks


def chunks_of(operations: Iterable[Operation]) -> set[bytes]:
    """The chunks that operations do name: looked for in the bytes first, and then known by reading the value."""
    found: set[bytes] = set()
    for operation in operations:
        for data in values_of(operation.code, operation.args):
            if _ARRAY in data and _CHUNKS.search(data):
                decode(data, NO_TYPES, inert=True, big=partial(_note_chunks, found))
    return found


def _note_chunks(found: set[bytes], code: int, payload: bytes) -> None:
    if code in {BULK, CONTENT}:
        found.update(decode(payload)[2])


def _chunk_names(data: bytes, at: int) -> set[bytes]:
    """The chunks of what may be a bulk value: digest, length, then an array of digests."""
    at += DIGEST_BYTES
    at += {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.get(data[at] if at < len(data) else 0, 1)
    if at >= len(data):
        return set()
    head = data[at]
    if head & 0xF0 == 0x90:
        count, at = head & 0x0F, at + 1
    elif head in {0xDC, 0xDD}:
        width = 2 if head == 0xDC else 4
        count, at = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
    else:
        return set()
    found = set()
    for _ in range(count):
        if data[at : at + 2] != b"\xc4\x20" or at + 2 + DIGEST_BYTES > len(data):
            break
        found.add(data[at + 2 : at + 2 + DIGEST_BYTES])
        at += 2 + DIGEST_BYTES
    return found


def children(raw: bytes) -> list[bytes]:
    """The nodes that an inner node has; none for a leaf."""
    return [raw[at : at + DIGEST_BYTES] for at in range(2, len(raw), DIGEST_BYTES + 8)] if raw[1] else []


class Blank:
    """The source of the empty state, from which operations may still name what the store holds."""

    def __init__(self, contents: Contents) -> None:
        self._view, self._packs = contents
        self.sections: list[tuple[str, bytes]] = []
        self.base: dict[str, bytes] = {}

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        found = self._view.nodes(digests)
        for digest in digests:
            if digest not in found:
                short = digest.hex()[:16]
                raise Damaged(f"node {short} is missing", what=(f"node {short}",), hint=HINT)
        return found

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join(self._packs.read(self._view, digests))

    def operations(self, section: str) -> list[Operation]:  # noqa: ARG002 - there are none
        return []

    def again(self) -> bool:
        return False


class Stored(Blank):
    """The source of a state: one checkpoint's."""

    def __init__(self, contents: Contents, point: Point, newest: Newest | None = None) -> None:
        """``newest``: where a writer stands that began here. What it has not read yet is the same there."""
        super().__init__(contents)
        self.point = point
        self._newest = newest
        self._gone: Forgotten | None = None
        self.sections = point.manifest.sections
        try:
            self._rest_on(point)
        except (Damaged, Forgotten):  # forgotten: what it rests on; of itself ``again`` says so
            if not self.again():
                raise

    def _rest_on(self, point: Point) -> None:
        """Find the base: the nearest that is sealed. Ancestors are read a few at a time, and only if need be."""
        self._operations: dict[str, list[Operation]] | None = None
        self._recent: dict[str, list[Operation]] | None = None
        self._since: list[Point] | None = None
        self.base = {}
        if point.row.sealed:
            self._since, self.base = [], dict(self.sections)
        else:
            last = self._view.up(point.n, _UP_MAX, to_base=True)[-1]
            if last.sealed:
                self.base = dict(self._view.point(last).manifest.sections)

    def again(self) -> bool:
        """After something could not be read: whether the same state is stored in another way since, and can be now.

        What was before a checkpoint may be forgotten while somebody reads it. Raises ``Forgotten`` when it was
        forgotten itself.
        """
        before = self.point.id, self.point.row.sealed, self.base
        try:
            self.point = current(self._view, self.point)
        except Forgotten as error:
            newest = self._newest() if self._newest is not None else None
            if newest is None:
                raise
            self._gone, self.point = error, newest
        self._rest_on(self.point)
        changed = (self.point.id, self.point.row.sealed, self.base) != before
        if not changed and self._gone is not None:  # its writer has not begun to go on from it
            raise self._gone
        return changed

    def operations(self, section: str) -> list[Operation]:
        """What leads from the base's section to this state's, or from nothing, where it was given as a whole since."""
        try:
            if self._operations is None:
                if self._recent is None:
                    rows = self._view.up(self.point.n, RECENT, to_base=True)
                    found, complete = self._by_section(self._chain([self._view.point(row) for row in rows])[::-1])
                    self._recent = {name: found[name] for name in complete}
                if section in self._recent:
                    return self._recent[section]
                # Not again from elsewhere: what lies below is read already.
                self._operations, _ = self._by_section(self._since_base())
            return self._operations.get(section, [])
        except Forgotten as error:  # whether that is the end of it, ``again`` says
            raise Damaged(error.message, what=(f"checkpoint {self.point.id.hex()[:12]}",), hint=HINT) from error

    def _by_section(self, points: list[Point]) -> tuple[dict[str, list[Operation]], set[str]]:
        """The operations of each section, without those before it was last given as a whole; and which were."""
        complete: set[str] = set()
        wanted = [needed(raw_operations(self._view.operations(point)), complete) for point in reversed(points)]
        found: dict[str, list[Operation]] = {}
        for point, some in zip(points, reversed(wanted), strict=True):
            for operation in resolved(some, point.manifest.time_us):
                found.setdefault(operation.path[0], []).append(operation)
        return found, complete

    def since_base(self) -> list[Point]:
        """The checkpoints whose operations lead from the base to this state, oldest first, proven to be a chain."""
        while True:
            try:
                return self._since_base()
            except (Damaged, Forgotten):
                if not self.again():
                    raise

    def _since_base(self) -> list[Point]:
        if self._since is None:
            rows = self._view.up(self.point.n, _UP_MAX, to_base=True)
            points = self._chain([self._view.point(row) for row in rows])
            if points[-1].row.sealed:
                points.pop()
            elif points[-1].manifest.parent:
                short = points[-1].id.hex()[:12]
                raise Damaged(f"the history below checkpoint {short} has a gap", what=(f"checkpoint {short}",))
            self._since = points[::-1]
        return self._since

    def _chain(self, points: list[Point]) -> list[Point]:
        """Prove that each is the one that its child names, from this state's own on."""
        expected = self.point.id
        for point in points:
            if point.id != expected:
                short = point.id.hex()[:12]
                raise Damaged(f"checkpoint {short} is not the one that its child names", what=(f"checkpoint {short}",))
            expected = point.manifest.parent
        return points


class Live(Document):
    """A document that knows what to say when a section turns out to be damaged at its first touch."""

    __slots__ = ("explain",)
    explain: Callable[[Damaged], Damaged] | None

    def __init__(
        self,
        registry: Registry,
        source: Blank,
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
                if self.told.source.again():
                    continue
                error.what = tuple(dict.fromkeys((*error.what, f"section {section.name}")))
                if self.explain is not None:
                    self.explain(error)
                raise


def current(view: View, point: Point) -> Point:
    """A checkpoint as it is stored now. ``Forgotten`` when it is not."""
    found = view.find(point.id)
    if found is None:
        raise Forgotten(
            f"checkpoint {point.id.hex()[:12]} was forgotten while it was being read",
            hint="See `holdfast log` for what is left.",
        )
    return found


@contextmanager
def unless_forgotten(view: View, point: Point) -> Iterator[None]:
    """What cannot be read of a checkpoint is damage, unless it was forgotten: then that is what is said."""
    try:
        yield
    except Damaged:
        current(view, point)
        raise


def source_of(contents: Contents, point: Point | None, newest: Newest | None = None) -> Blank:
    return Stored(contents, point, newest) if point is not None else Blank(contents)


def state_of(contents: Contents, point: Point | None, newest: Newest | None = None) -> State:
    """The state of a checkpoint as bytes, or the one before the first. Sections are read when they are asked for."""
    return State(source_of(contents, point, newest))


class Reading:
    """Reads values and trees with all that they name, to the last chunk: what was read before is not read again."""

    def __init__(self, source: Blank, named: Callable[[int, bytes], object] = lambda _code, _payload: None) -> None:
        """``named`` is told of every name once what it names is proven, also if that was before."""
        self._state = State(source)
        self._named = named
        self._proven: set[bytes] = set()

    def operations(self, operations: Iterable[Operation]) -> None:
        """Every value that operations put into a state."""
        for operation in operations:
            for data in values_of(operation.code, operation.args):
                self._value(data, 0)

    def trees(self, roots: Iterable[bytes]) -> None:
        for root in roots:
            self._name(BIG, root, 0)

    def _value(self, data: bytes, depth: int) -> None:
        found: list[tuple[int, bytes]] = []
        decode(data, NO_TYPES, inert=True, big=lambda code, payload: found.append((code, bytes(payload))))
        for code, payload in found:
            self._name(code, payload, depth + 1)

    def _name(self, code: int, payload: bytes, depth: int) -> None:
        known = payload if code == BIG else bytes((code,)) + payload
        if known not in self._proven:
            if depth > MAX_DEPTH:
                raise nested_too_deep()
            if code == BIG:
                self._tree(payload, depth)
            elif code == CONTENT:
                self._state.prove_content(payload)
            else:
                self._value(self._state.bulk(payload), depth)
            if len(self._proven) > _PROVEN_MAX:
                self._proven.clear()
            self._proven.add(known)
        self._named(code, payload)

    def _tree(self, root: bytes, depth: int) -> None:
        tree, leaves = read(root, self._state.fetch)
        for leaf, raw in zip(tree.leaves, leaves, strict=True):
            if leaf.digest not in self._proven:
                count, items = leaf_items(raw)
                parts = 2 * count if tree.kind == DICT else count
                self._value(b"\xdd" + parts.to_bytes(4, "big") + items, depth)
                self._proven.add(leaf.digest)


def load(
    contents: Contents, point: Point | None, registry: Registry, *, readonly: bool = True, inert: bool = False
) -> Live:
    """The state of a checkpoint, or the one before the first. Sections are read when they are touched."""
    return Live(registry, source_of(contents, point), readonly=readonly, inert=inert)
