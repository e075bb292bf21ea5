"""What a catalog holds and what it can be asked: the records, the interface, and the sums that guard every row.

Owns the shapes that cross the boundary between the store and everything above it. Knows bytes and numbers only:
no names, no labels, no states. A record read from a catalog has had its sum checked; one that did not match never
becomes a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from blake3 import blake3
from msgspec import Struct
from ormsgpack import packb

from holdfast.codec.values import encode

ID_BYTES = 32
SUM_BYTES = 8

HINT = "`holdfast verify` says what is affected, `holdfast repair` what can be saved."
"""For damage in the catalog. Right wherever that is met, while verifying as well."""

Buffer = bytes | bytearray | memoryview


def digest(tag: bytes, data: Buffer) -> bytes:
    """``H(tag, data)`` of the format: BLAKE3-256 over the tag, one zero byte and the data."""
    hasher = blake3(tag + b"\0")
    hasher.update(data)
    return hasher.digest()


def checkpoint_id(manifest: bytes) -> bytes:
    return blake3(b"holdfast.checkpoint\0" + manifest).digest()


def effect_chain(before: bytes, body: bytes) -> bytes:
    """The chain digest of a line after one more record."""
    return blake3(b"holdfast.effect\0" + before + body).digest()


def node_digest(node: Buffer) -> bytes:
    return digest(b"holdfast.node", node)


def metadata_digest(metadata: bytes) -> bytes:
    """What a checkpoint's manifest calls this metadata. What was lost in a repair is called as it was before."""
    if metadata[: len(_LOST)] == _LOST and len(metadata) == len(_LOST) + 32:
        return metadata[len(_LOST) :]
    return digest(b"holdfast.metadata", metadata)


_LOST = b"\x81\xa4lost\xc4\x20"


def lost_metadata(named: bytes) -> bytes:
    """The encoding of ``{"lost": named}``, which stands for metadata of which nothing but its digest is left."""
    return _LOST + named


def chunk_digest(chunk: Buffer) -> bytes:
    return digest(CHUNK_TAG, chunk)


CHUNK_TAG = b"holdfast.chunk"


def forgotten_key(a: int) -> bytes:
    """The key of the events that say what an agent has forgotten."""
    return b"forget" + a.to_bytes(8, "big")


def clone_key(a: int) -> bytes:
    """The key of the events that say which agents see the rows of this one."""
    return b"clone" + a.to_bytes(8, "big")


def receive_key(a: int) -> bytes:
    """The key of the events that say what of an agent came from another store."""
    return b"receive" + a.to_bytes(8, "big")


def bookkeeping(key: bytes) -> bool:
    """Whether an event's key is one of the three above, and not one that the rooms above chose."""
    return (key[:-8] in {b"forget", b"clone", b"receive"}) and len(key) > 8


def row_sum(table: str, *columns: object) -> bytes:
    """The check that is stored with a row: over the table's name and the other columns, in their order.

    Columns are numbers, texts and blobs: for these the bare library writes what the codec would, three times as fast.
    """
    try:
        return blake3(b"holdfast.row\0" + packb((table, *columns))).digest(SUM_BYTES)
    except TypeError:  # a damaged row holds something else
        return blake3(b"holdfast.row\0" + encode([table, *columns])).digest(SUM_BYTES)


class AgentRow(Struct, frozen=True):
    """One agent. Its name is in ``body``; ``key`` is the name's hash."""

    a: int
    uuid: bytes
    key: bytes
    body: bytes


class BranchRow(Struct, frozen=True):
    """``head`` and ``head_id`` are 0 and empty while the branch has no checkpoint."""

    b: int
    a: int
    uuid: bytes
    key: bytes
    body: bytes
    head: int
    head_id: bytes
    generation: int


class TagRow(Struct, frozen=True):
    """A movable name of an agent for checkpoint ``n``."""

    a: int
    key: bytes
    body: bytes
    n: int


class CheckpointRow(Struct, frozen=True):
    """One checkpoint. ``parent`` is 0 at a root; ``base`` is the nearest sealed one at or above, 0 if none.

    ``key`` is a name that whoever made it can find it by; the store gives it no meaning.
    """

    n: int
    a: int
    b: int
    parent: int
    depth: int
    base: int
    manifest: bytes
    operations: bytes
    key: bytes | None = None

    @property
    def id(self) -> bytes:
        """The checkpoint's id. Computed, so that it always speaks for these very bytes."""
        return checkpoint_id(self.manifest)

    @property
    def sealed(self) -> bool:
        return self.base == self.n


class ValidityRow(Struct, frozen=True):
    """An agent's judgement on checkpoint ``n``. One without a row is good."""

    a: int
    n: int
    body: bytes


class SealRow(Struct, frozen=True):
    """Where the values of a branch's checkpoints up to ``n`` are, once their tails are gone."""

    n: int
    b: int
    places: bytes


class EventRow(Struct, frozen=True):
    """Something that changed and was no checkpoint. ``at`` is in microseconds, ``key`` what it can be found by."""

    e: int
    a: int
    at: int
    body: bytes
    key: bytes | None = None


class PackRow(Struct, frozen=True):
    """One file below ``packs/``."""

    p: int
    uuid: bytes
    size: int


class ChunkRow(Struct, frozen=True):
    """Where a chunk's bytes are. ``stored`` equals ``length`` when they are raw, otherwise they are zstd."""

    digest: bytes
    p: int
    offset: int
    length: int
    stored: int


class NewPack(Struct, frozen=True):
    """A pack that is on disk and not yet in the catalog, with the chunks that it brings."""

    uuid: bytes
    size: int
    chunks: Sequence[ChunkRow]


class Event(Struct, frozen=True):
    """An event still to be written: the time in microseconds, and an encoded map. The store adds the rest."""

    at: int
    body: bytes
    key: bytes | None = None


class LineRow(Struct, frozen=True):
    """The ledger of one branch: ``count`` records, of which the first ``start`` are those of branch ``origin``'s line.

    ``chain`` is the digest after the last of them. A branch without records has no row, and counts as this with zeros.
    """

    b: int
    origin: int = 0
    start: int = 0
    count: int = 0
    chain: bytes = b""


class EffectRow(Struct, frozen=True):
    """Record ``i`` of the line of branch ``b``; ``r`` counts the records of the whole store.

    ``mark`` is 1 where summaries need it, ``refs`` are the digests of the nodes that ``body`` names, one after another.
    """

    r: int
    b: int
    i: int
    mark: int
    refs: bytes
    body: bytes


class NewRecord(Struct, frozen=True):
    """A record still to be written."""

    mark: int
    refs: bytes
    body: bytes


class LineStart(Struct, frozen=True):
    """What a new branch inherits: the first ``start`` records of a line, and the chain digest after them."""

    origin: int
    start: int
    chain: bytes


class Append(Struct, frozen=True):
    """Records ready to be written at the end of a line.

    ``generation`` is compared with the branch, ``count`` and ``chain`` with the line; if anything differs nothing is
    written and the writer is ``Fenced``. ``end`` is the chain after them. ``nodes``, ``chunks`` and ``guard`` are as
    in ``Commit``.
    """

    a: int
    b: int
    generation: int
    count: int
    chain: bytes
    records: Sequence[NewRecord]
    end: bytes
    nodes: Sequence[tuple[bytes, bytes]] = ()
    chunks: Sequence[tuple[bytes, Buffer]] = ()
    guard: tuple[int, int] | None = None

    @property
    def append(self) -> Append:
        return self

    @property
    def size_bytes(self) -> int:
        """What it holds in memory while it waits, roughly."""
        size = sum(len(record.body) + len(record.refs) for record in self.records)
        return size + sum(len(node) + ID_BYTES for _, node in self.nodes)


class Commit(Struct, frozen=True):
    """One checkpoint, ready to be written.

    ``parent_id`` and ``generation`` are compared with the branch; if either differs nothing is written and the writer
    is ``Fenced``. ``n``, ``parent`` and, where ``base`` is None, ``base`` are worked out inside the transaction, so
    that they need not be known beforehand. ``nodes`` are raw nodes with their digests, ``places`` the body of a seal
    row (its writing deletes the branch's older tail rows), ``chunks`` digests with bytes that go to a pack first.
    ``onto`` makes it the child of another checkpoint than the head that is compared: that one's number and base.
    ``events`` are written with it. ``guard`` names the lease that covers this write when it is not the branch's own:
    its branch and generation, compared as the rest is. ``append`` are records that are written with it.
    """

    a: int
    b: int
    generation: int
    parent_id: bytes
    id: bytes
    depth: int
    manifest: bytes
    operations: bytes
    sealed: bool = False
    base: int | None = None
    onto: tuple[int, int] | None = None
    tail: bytes | None = None
    nodes: Sequence[tuple[bytes, bytes]] = ()
    places: bytes | None = None
    metadata: tuple[bytes, bytes] | None = None
    chunks: Sequence[tuple[bytes, Buffer]] = ()
    key: bytes | None = None
    events: Sequence[Event] = ()
    guard: tuple[int, int] | None = None
    append: Append | None = None

    @property
    def size_bytes(self) -> int:
        """What the commit holds in memory while it waits, roughly."""
        size = len(self.manifest) + len(self.operations) + len(self.tail or b"") + len(self.places or b"")
        size += sum(len(event.body) for event in self.events)
        size += self.append.size_bytes if self.append is not None else 0
        return size + sum(len(node) + ID_BYTES for _, node in self.nodes)


class Queued(Protocol):
    """Something that was accepted and is on its way to the disk. ``done``: it is ``written``, or never will be."""

    @property
    def done(self) -> bool: ...
    @property
    def written(self) -> bool: ...


Progress = Callable[[str, int, int], None]
"""Tells whoever waits: called with what is being done, how much of it is done, and how much there is."""


def quietly(what: str, done: int, total: int) -> None:
    """The progress of whoever does not want to know."""


class States(Protocol):
    """What loading a state asks: of a store as it is now, or as it was at one moment."""

    def agent_row(self, a: int) -> AgentRow | None: ...
    def checkpoint(self, n: int) -> CheckpointRow: ...
    def ancestry(self, n: int, stop_at: int = 0, limit: int | None = None) -> list[CheckpointRow]: ...
    def tail(self, n: int) -> bytes | None: ...
    def tails_of(self, numbers: Iterable[int]) -> dict[int, bytes]: ...
    def covering_seal(self, b: int, n: int) -> SealRow | None: ...
    def nodes(self, digests: Iterable[bytes]) -> dict[bytes, bytes]: ...
    def events_named(self, keys: Iterable[bytes]) -> list[EventRow]: ...
    def forgotten(self, a: int | None = None) -> Iterator[tuple[EventRow, dict[str, Any]]]: ...
    def chunks(self, digests: Iterable[bytes]) -> Iterator[bytes]: ...


class Catalog(States, Protocol):
    """Everything the rooms above may ask of a store. Each writing call is one transaction and one flush."""

    def agents(self) -> list[AgentRow]: ...
    def agent(self, key: bytes) -> AgentRow | None: ...
    def branches(self, a: int) -> list[BranchRow]: ...
    def branch(self, a: int, key: bytes) -> BranchRow | None: ...
    def branch_row(self, b: int) -> BranchRow: ...
    def checkpoints(
        self,
        *,
        a: int | None = None,
        b: int | None = None,
        after: int = 0,
        before: int | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Iterator[CheckpointRow]: ...
    def named(self, key: bytes) -> list[CheckpointRow]: ...
    def tips(self, a: int) -> list[CheckpointRow]: ...
    def tail_bytes(self, numbers: Iterable[int]) -> int: ...
    def tails(self, b: int, after: int = 0) -> Iterator[tuple[int, bytes]]: ...
    def last_seal(self, b: int) -> SealRow | None: ...
    def has_nodes(self, digests: Iterable[bytes]) -> set[bytes]: ...
    def metadata(self, digest: bytes) -> bytes | None: ...
    def tags(self, a: int) -> list[TagRow]: ...
    def validity(self, a: int, n: int) -> ValidityRow | None: ...
    def validities(self, a: int) -> list[ValidityRow]: ...
    def events(
        self, *, a: int | None = None, after: int = 0, newest_first: bool = False, limit: int | None = None
    ) -> Iterator[EventRow]: ...
    def line(self, b: int) -> LineRow: ...
    def effects(
        self,
        b: int,
        *,
        after: int = 0,
        before: int | None = None,
        marked: bool = False,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> Iterator[EffectRow]: ...
    def newest(self) -> tuple[int, int, int]: ...
    def holder_alive(self, b: int, generation: int) -> bool: ...

    def add_agent(
        self,
        *,
        key: bytes,
        body: bytes,
        uuid: bytes,
        branch_key: bytes,
        branch_body: bytes,
        branch_uuid: bytes,
        event: Event,
    ) -> tuple[AgentRow, BranchRow]: ...
    def add_branch(
        self,
        a: int,
        *,
        key: bytes,
        body: bytes,
        uuid: bytes,
        head: int,
        head_id: bytes,
        event: Event,
        line: LineStart | None = None,
        copies: Sequence[NewRecord] = (),
    ) -> BranchRow: ...
    def set_head(
        self,
        b: int,
        *,
        generation: int,
        expect_head_id: bytes,
        head: int,
        head_id: bytes,
        event: Event,
        append: Append | None = None,
    ) -> BranchRow: ...
    def set_tag(self, a: int, key: bytes, *, body: bytes, n: int, event: Event) -> TagRow: ...
    def drop_tag(self, a: int, key: bytes, *, event: Event) -> bool: ...
    def set_validity(self, a: int, n: int, *, body: bytes | None, event: Event) -> None: ...
    def add_events(self, a: int, events: Sequence[Event], *, guard: tuple[int, int] | None = None) -> list[int]: ...
    def commit(self, commit: Commit) -> int | None: ...
    def landed(self, commit: Commit) -> bool: ...
    def append(self, append: Append, *, flush: bool) -> None: ...
    def enqueue(self, append: Append, *, soon: bool) -> Queued: ...
    def complete(self, queued: Queued) -> None: ...
    def withdraw(self, queued: Queued) -> bool: ...
    def flush(self, b: int | None = None) -> None: ...
    def check_usable(self) -> None: ...
    def close(self) -> None: ...
