"""How changes are accepted: written at once, put in the queue, or both together.

Owns the choice between durability at once and in groups for checkpoints and records, and what readers must wait for.
Always true: what is accepted for a branch is written in the order in which it was accepted; a checkpoint that speaks of
records never reaches the disk before them; a chunk is on disk before a row that names it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from holdfast.errors import HoldfastError, StoreClosed, StorePoisoned
from holdfast.store.catalog import Append, Commit, EffectRow, LineRow, NewPack, Queued
from holdfast.store.commits import Batches, Waiting
from holdfast.store.contents import Contents
from holdfast.store.packs import Packs
from holdfast.store.reading import Row
from holdfast.store.writing import Vanished, Writer, packed_nodes


class Accepting(Contents):
    """The part of an open store that takes checkpoints and records in."""

    durability: str
    _batches: Batches | None
    _packs: Packs
    _refusal: type[HoldfastError] | None

    @abstractmethod
    def _writable(self) -> Writer:
        """The writer, unless this store may not be written, or not any more."""

    @abstractmethod
    def _set_poison(self, poison: StorePoisoned) -> None: ...

    # What waits

    @property
    def pending(self) -> bool:
        """Whether something that was accepted is not durable yet."""
        return self._batches is not None and self._batches.pending

    def _select(self, sql: str, bindings: tuple[Any, ...] = ()) -> list[Row]:
        # Records that wait are of no concern to whoever reads states.
        if self._batches is not None and self._batches.commits_pending and self._refusal is None:
            self._batches.settle()
        return super()._select(sql, bindings)

    def _settle(self) -> None:
        if self._batches is not None and self._batches.pending and self._refusal is None:
            self._batches.settle()

    def line(self, b: int) -> LineRow:
        self._settle()
        return super().line(b)

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
        self._settle()
        return super().effects(b, after=after, before=before, marked=marked, newest_first=newest_first, limit=limit)

    # Checkpoints and records

    def commit(self, commit: Commit) -> int | None:
        """Write one checkpoint. Returns its n, or None with ``durability="batched"``, where it is not known yet."""
        writer = self._writable()
        nodes = packed_nodes(self._cipher, commit.nodes) if commit.nodes else ()
        if commit.chunks:
            return self._write_bulk(writer, commit, lambda pack: writer.apply(commit, nodes, pack))
        batches = self._queue(writer)
        if self.durability == "batched":
            batches.put(commit, nodes)
            return None
        if not batches.pending:
            return writer.transaction(lambda: writer.apply(commit, nodes, None))
        # Records wait, and the checkpoint may speak of them: all of it goes to disk together.
        waiting = batches.put(commit, nodes, soon=True)
        try:
            batches.complete(waiting)
        except HoldfastError:
            # Unless it was written at the last moment, its caller keeps what is in it, so it must never be.
            if batches.withdraw(waiting) or not waiting.written:
                raise
        except BaseException:
            batches.withdraw(waiting)
            raise
        return waiting.result

    def landed(self, commit: Commit) -> bool:
        """After ``commit`` was cut short by something that is no error of the store: whether it is written.

        If it is not, it never will be: one that waits in the queue is taken out. Nothing else of its branch may have
        been accepted since.
        """
        self._usable()
        if self._batches is not None and self._batches.recall(commit):
            return False
        return self.branch_row(commit.b).head_id == commit.id

    def append(self, append: Append, *, flush: bool) -> None:
        """Write records: with everything that waits, before this returns; or, without ``flush``, soon."""
        queued = self.enqueue(append, soon=flush)
        if flush:
            self.complete(queued)

    def enqueue(self, append: Append, *, soon: bool) -> Queued:
        """Accept records. They are durable when ``complete`` or ``flush`` has returned, or a moment later.

        ``soon``: the caller is about to call one of these. Records that bring chunks are durable at once.
        """
        writer = self._writable()
        nodes = packed_nodes(self._cipher, append.nodes) if append.nodes else ()
        batches = self._queue(writer)
        if not append.chunks:
            return batches.put(append, nodes, soon=soon)
        waiting = Waiting(append, nodes, 0)
        waiting.result = self._write_bulk(writer, append, lambda pack: writer.append(append, nodes, pack))
        waiting.done = True
        return waiting

    def complete(self, queued: Queued) -> None:
        """Return when what was accepted is durable, with everything before it. Raises if it is not (yet)."""
        self._usable()
        if self._batches is not None and isinstance(queued, Waiting):
            self._batches.complete(queued)

    def withdraw(self, queued: Queued) -> bool:
        """After ``complete`` raised: see to it that it is never written. False when it is, or others stand on it."""
        self._usable()
        return self._batches is not None and isinstance(queued, Waiting) and self._batches.withdraw(queued)

    def _queue(self, writer: Writer) -> Batches:
        if writer.poison is not None:
            raise writer.poisoned()
        if self._batches is None:
            raise StoreClosed("the store was closed", hint="Open it again.")
        return self._batches

    def _write_bulk(self, writer: Writer, item: Commit | Append, change: Callable[[NewPack | None], int]) -> int:
        """Packs first, then the transaction that names them. Chunks that are stored already are not written again."""
        self._queue(writer).flush(item.b)
        writer.place.check()  # before a pack goes to a directory that is not this store's any more
        unique = dict(item.chunks)
        while True:
            new = [(digest, data) for digest, data in unique.items() if self.chunk_row(digest) is None]
            try:
                with self._packs.named(new) if new else nullcontext() as pack:
                    return writer.transaction(lambda: change(pack))
            except Vanished:
                continue
            except StorePoisoned as error:
                self._set_poison(error)
                raise
