"""What is on its way to the disk: a checkpoint, or some records, and where a branch stands meanwhile.

Owns what is known of a change before it is written, and records that are gathered into one. Must not know how any of it
reaches the disk. What always holds: a writer's thread may fix which records were gathered while others come, so each is
in this change or in the next; nothing stands on records that are not fixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from holdfast.agent import watchers
from holdfast.agent.layers import Looked
from holdfast.codec.told import Captured, Saved
from holdfast.store.changes import Change, NewPack, NewRecord, Parent, Said, chained
from holdfast.store.manifest import Manifest
from holdfast.store.rows import Branch, Open
from holdfast.store.writer import ENOUGH, Job

GATHERED_BYTES = 2**18
"""How much may be gathered in one change, so that what waits for a slow disk stays small."""

Gathered = Callable[[], NewRecord]
"""Makes a record when it is fixed, mostly in the writer's thread: whoever gathers does not wait for that."""

_EMPTY: Mapping[bytes, bytes] = MappingProxyType({})
_NONE: frozenset[bytes] = frozenset()


class Pending:
    """A checkpoint, or some records, on the way to the disk."""

    __slots__ = (
        "about", "accepted", "alone", "also", "began_s", "captured", "chunks", "chunks_named", "chunks_tried",
        "document", "done", "error", "first", "guard", "id", "job", "key", "lazy", "looked", "manifest", "named",
        "nodes", "onto", "opened", "operations", "pack", "packed", "patience_s", "raw", "records", "relies", "said",
        "sealed", "sealing", "stall_us", "suspect", "tip", "tried", "watch", "whole",
    )  # fmt: skip

    def __init__(self, tip: Branch) -> None:
        self.tip = tip  # what the branch is to be: its handles are known when it is written
        self.document: Saved | None = None
        self.captured: Captured | None = None
        self.manifest: Manifest | None = None
        self.raw = self.id = self.operations = b""
        self.nodes = _EMPTY  # those that are named, and for a sealed one those of the state
        self.sealing = _EMPTY
        self.about = _EMPTY
        self.chunks = _EMPTY
        self.pack = b""
        self.looked: Sequence[Looked] = ()  # what layers have brought: their packs are durable
        self.also: Callable[[Change, bytes], None] | None = None  # what is written in the same transaction
        self.packed: NewPack | None = None  # its chunks, where they are durable already
        self.named: frozenset[bytes] = _NONE  # trees, and chunks, that operations name besides
        self.chunks_named: frozenset[bytes] = _NONE
        self.first: Sequence[NewRecord] = ()
        self.records: Sequence[NewRecord] = ()
        self.key = b""
        self.said: Sequence[Said] = ()
        self.suspect = ""  # why the checkpoint is marked so
        self.guard: tuple[int, int] | None = None
        self.onto: Parent | None = None
        self.sealed = False
        self.lazy = False
        self.patience_s = 0.0  # then, how long it may wait for company
        self.accepted = False  # nobody waits for it any more
        self.alone = False  # it brings all its chunks: the transaction may not see that others have gone
        self.chunks_tried = 0
        self.relies = False  # it counts on nodes that were there when it was prepared, instead of bringing them
        self.whole = False  # it brings all its nodes: some that it counted on had gone
        self.tried: Pending | None = None  # directly, with all up to this one, and nobody knows yet what became of it
        self.job: Job[Branch] | None = None
        self.done: Branch | None = None
        self.error: BaseException | None = None
        self.opened: Mapping[bytes, Open] | None = None  # the rows of open runs when it is written, if anybody asked
        self.watch = watchers.UNWATCHED
        self.began_s = 0.0  # when its maker was stopped for it, by the monotonic clock
        self.stall_us = 0  # for how long

    @property
    def names(self) -> bool:
        """Whether it names something that has to be looked up, or written before it."""
        return bool(self.nodes or self.sealing or self.chunks or self.named or self.chunks_named or self.looked)

    @property
    def settled(self) -> bool:
        return self.done is not None or self.error is not None

    @property
    def size_bytes(self) -> int:
        """What it adds to the store, before compression, besides what describes the program."""
        parts = {**self.nodes, **self.sealing, **self.chunks}
        return len(self.raw) + len(self.operations) + sum(map(len, parts.values()))


class Gathering(Pending):
    """Records that come until somebody wants to know which they are."""

    __slots__ = ("_fixing", "_gathered", "_gathered_bytes", "_records", "_stood", "_tip")

    def __init__(self, tip: Branch, first: Gathered, size_bytes: int) -> None:
        self._gathered: list[Gathered] | None = None  # as they come, until it is fixed which they are
        super().__init__(tip)
        self._stood, self._fixing = tip, threading.RLock()  # a signal handler may ask in the middle
        self._gathered, self._gathered_bytes = [first], size_bytes

    @property
    def tip(self) -> Branch:
        if self._gathered is not None:
            self._fix()
        return self._tip

    @tip.setter
    def tip(self, tip: Branch) -> None:
        self._tip = tip

    @property
    def records(self) -> Sequence[NewRecord]:
        if self._gathered is not None:
            self._fix()
        return self._records

    @records.setter
    def records(self, records: Sequence[NewRecord]) -> None:
        self._records = records

    def add(self, record: Gathered, size_bytes: int) -> bool:
        """One more record; False: it is fixed which it has."""
        with self._fixing:  # the thread that writes it may be about to fix it
            if self._gathered is None:
                return False
            self._gathered.append(record)
            self._gathered_bytes += size_bytes
            return True

    def has_room(self) -> bool:
        """Whether more records may come to it."""
        gathered = self._gathered
        return gathered is not None and len(gathered) < ENOUGH and self._gathered_bytes < GATHERED_BYTES

    def _fix(self) -> None:
        """No more records come. Cut short anywhere, it can be done again."""
        with self._fixing:
            if self._gathered is not None:  # otherwise another thread has just done it
                records = [make() for make in self._gathered]
                count, chain = chained(self._stood.end, records)
                self._records, self._tip = records, self._stood._replace(records=count, chain=chain)
                self._gathered = None


class Now(NamedTuple):
    """Where a branch stands for its writer."""

    firm: Branch  # as the store has it
    pending: tuple[Pending, ...] = ()
    onto: Parent | None = None
    opened: Mapping[bytes, Open] | None = None  # the rows of open runs, by id, as the store has them

    @property
    def tip(self) -> Branch:
        """As it is to be when all that is pending is written."""
        return self.pending[-1].tip if self.pending else self.firm
