"""Bringing threads over from LangGraph's own savers: each whole and verified, or not at all.

Owns the order of an import, what "the same" means for checkpoints, and what is reported. The databases are
``sources``' business. What always holds: the source is only read; a thread counts as imported only after it was read
back and found equal, and cannot be opened before; one that is in the store already is left alone, whatever has become
of it. What an import that was stopped has left of a thread is removed, and the thread brought anew. Values are compared
by the bytes that they are stored as.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from langgraph.checkpoint.serde.base import CipherProtocol, SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from holdfast.agent.graph import Graph
from holdfast.agent.names import check_name
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.contrib.langgraph.removal import check_thread
from holdfast.contrib.langgraph.revival import Revival
from holdfast.contrib.langgraph.sources import Entry, Source, Write, open_source
from holdfast.contrib.langgraph.thread import BROUGHT, ROOT, Thread, key_of, writes_said
from holdfast.contrib.langgraph.tuples import Reader, agent_of, placed
from holdfast.errors import (
    AgentBusy,
    BadName,
    BadOption,
    Damaged,
    Fenced,
    HoldfastError,
    Incompatible,
    InputError,
    StillArriving,
    ThreadExists,
)
from holdfast.store.catalog import Progress
from holdfast.store.changes import Said
from holdfast.store.rows import Entry as LogEntry

if TYPE_CHECKING:
    from holdfast.contrib.langgraph.saver import HoldfastSaver

Status = Literal["imported", "complete", "failed", "found"]

# Differences that are told one by one; the others are counted.
TOLD = 8
# Errors that concern one thread; the others come over nevertheless. Anything else ends the import.
_OF_ONE_THREAD = (InputError, Incompatible, Damaged, AgentBusy, Fenced, StillArriving)


@dataclass(frozen=True, slots=True)
class ImportedThread:
    """What became of one thread.

    ``imported``: it is in the store now, and verified. ``complete``: it was there already, and is equal. ``failed``:
    ``error`` says why, and the store is as before. ``found``: a dry run counted it. ``written`` counts
    checkpoints that this import has added.
    """

    thread: str
    status: Status
    namespaces: int
    checkpoints: int
    writes: int
    written: int = 0
    error: HoldfastError | None = None

    def to_json(self) -> dict[str, Any]:
        """As `holdfast import --json` shows it."""
        error = self.error
        told = {"kind": error.kind, "message": error.message, "hint": error.hint} if error is not None else None
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "error": told}


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did. ``source`` is without user and password."""

    source: str
    threads: list[ImportedThread] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every thread came over."""
        return not self.failed

    @property
    def failed(self) -> list[ImportedThread]:
        """The threads that did not come over, each with its error."""
        return [thread for thread in self.threads if thread.status == "failed"]

    def to_json(self) -> dict[str, Any]:
        """As `holdfast import --json` shows it."""
        return {"source": self.source, "ok": self.ok, "threads": [thread.to_json() for thread in self.threads]}


def import_threads(
    source: str,
    saver: HoldfastSaver | None,
    *,
    threads: Iterable[str] = (),
    dry_run: bool = False,
    cipher: CipherProtocol | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Bring LangGraph threads over into the saver's store: all, or those in ``threads``.

    ``source`` is ``sqlite:///old.db`` or ``postgresql://...``; it is only read. ``dry_run`` counts, says which ids
    cannot be kept, and needs no saver.
    ``cipher`` is that of LangGraph's EncryptedSerializer. ``progress(what, done, total)`` is called along the way.
    After an interruption, call it again. Threads that cannot come over are in the report.
    """
    if saver is None and not dry_run:
        raise BadOption("an import needs a saver to import into", hint="Only dry_run=True does without.")
    serde: SerializerProtocol = Revival(saver._registry if saver is not None else Registry())
    if cipher is not None:
        serde = EncryptedSerializer(cipher, serde)
    with closing(open_source(source, serde)) as opened:
        chosen = _chosen(opened, threads)
        count = _Count(progress, len(chosen), sum(opened.counts(thread)[1] for thread in chosen))
        report = ImportReport(opened.name)
        for thread in chosen:
            with opened.snapshot():
                done = _import(opened, None if dry_run else saver, thread, count)
            opened.check_unchanged()
            report.threads.append(done)
            count.step("threads")
        return report


def check_source(source: str, threads: Iterable[str] = ()) -> None:
    """Raise, as ``import_threads`` would, when the source cannot be read or has no such threads."""
    with closing(open_source(source, Revival(Registry()))) as opened:
        _chosen(opened, threads)


def _chosen(source: Source, threads: Iterable[str]) -> list[str]:
    """The threads that were named, or all that there are."""
    chosen = list(dict.fromkeys(str(thread) for thread in threads))
    unknown = [thread for thread in chosen if not source.namespaces(thread)]
    if unknown:
        raise BadOption(
            f"no thread {', '.join(map(repr, unknown))} in {source.name}",
            hint="Without naming threads, all of them are imported; a dry run lists them.",
        )
    return chosen or source.threads()


class _Count:
    """How far an import is."""

    def __init__(self, progress: Progress | None, threads: int, checkpoints: int) -> None:
        self._progress = progress
        self._done = {"threads": 0, "checkpoints": 0, "verified": 0}
        self._totals = {"threads": threads, "checkpoints": checkpoints, "verified": checkpoints}
        for what in self._done:
            self.step(what, 0)

    def step(self, what: str, by: int = 1) -> None:
        self._done[what] += by
        if self._progress is not None:
            self._progress(what, self._done[what], self._totals[what])


def _import(source: Source, saver: HoldfastSaver | None, thread: str, count: _Count) -> ImportedThread:
    """Bring one thread over, or without a saver only look whether its id can be kept."""
    counts = source.counts(thread)
    one = _Import(source, saver, thread, count) if saver is not None else None
    status: Status = "found"
    failure: HoldfastError | None = None
    try:
        check_name(thread, "a thread")
        if one is not None:
            status = "imported" if one.run() else "complete"
    except _OF_ONE_THREAD as error:
        if source.lost:
            raise
        status, failure = "failed", error
        if one is not None:
            with suppress(AgentBusy):
                one.clear()  # whole or not at all: nobody would see what has come
    return ImportedThread(thread, status, *counts, written=one.written if one is not None else 0, error=failure)


class _Import:
    """One thread on its way."""

    def __init__(self, source: Source, saver: HoldfastSaver, thread: str, count: _Count) -> None:
        self.written = 0
        self._source = source
        self._saver = saver
        self._thread = thread
        self._count = count

    def run(self) -> bool:
        """Bring the thread over; returns whether there was anything to do."""
        store = self._saver.store
        self.clear()
        if self._is_there():
            self._check_same()
            return False
        writer = Thread(store, self._saver._registry, self._thread, arriving=True)
        with writer.working():
            self._saver._wait(writer.become_writer)
            if self._is_there():
                raise Fenced(f"another process has brought thread {self._thread!r} over in between")
            writer.set_arriving(arriving=True)
            for ns in self._source.namespaces(self._thread):
                self._write(writer, ns)
            store.flush()
            self._verify()
            writer.set_arriving(arriving=False)
        return True

    def clear(self) -> None:
        """Remove what an import that did not end has left of the thread."""
        store = self._saver.store
        row = agent_of(store, self._thread)
        main = store._db.view.branch(row.a, ROOT) if row is not None else None
        if main is not None and main.body.get("arriving") == BROUGHT:
            store.remove(self._thread)

    def _is_there(self) -> bool:
        """Whether anything of that name is in the store; raises where that is no thread."""
        row = agent_of(self._saver.store, self._thread)
        if row is None:
            return False
        try:
            check_thread(self._saver, row)
        except BadName:
            raise self._exists("no LangGraph thread") from None
        return bool(Graph(self._saver.store._db.view, row).starts) or not any(self._differences(exact=False))

    def _exists(self, what: str) -> ThreadExists:
        return ThreadExists(
            f"{self._thread!r} is in the store already and is {what}",
            thread=self._thread,
            hint="It was left as it is. Import into another store, or delete that thread first.",
        )

    def _check_same(self) -> None:
        """Raise unless the store has all that the source has. It may have more: graphs go on with threads."""
        found = list(self._differences(exact=False))
        if found:
            raise self._exists(f"not the same: {_summary(found)}")
        self._count.step("checkpoints", self._source.counts(self._thread)[1])

    def _verify(self) -> None:
        found = list(self._differences(exact=True))
        if found:
            raise Damaged(
                f"thread {self._thread!r} is not in the store as it is in the source: {_summary(found)}",
                what=(f"thread {self._thread!r}",),
                hint="The source is untouched. Import it again.",
            )

    # -- writing ---------------------------------------------------------------------------------------------

    def _write(self, writer: Thread, ns: str) -> None:
        """A namespace: its checkpoints with their writes, and the writes whose checkpoint never came."""
        lineage = self._source.lineage(self._thread, ns)
        for name in parents_first(lineage):
            self._put(writer, ns, self._source.entry(self._thread, ns, name))
            self.written += 1
            self._count.step("checkpoints")
        newest = next(reversed(lineage), None)
        if newest is not None and writer.space(ns).id != newest:
            # A clock that was behind gave a child a smaller id than its parent's. LangGraph goes on from the
            # largest id, so that is where the branch has to stand.
            self._put(writer, ns, self._source.entry(self._thread, ns, newest))
        written = self._source.early(self._thread, ns)
        early = [event for name, writes in written for event in self._events(ns, name, writes)]
        for queued in {writer.queue(event) for event in early}:
            writer.wait(queued, share=False)

    def _put(self, writer: Thread, ns: str, entry: Entry) -> None:
        """One checkpoint with its writes, in one transaction."""
        for event in self._events(ns, entry.id, entry.writes):
            writer.queue(event)
        writer.save(ns, entry.parent, entry.checkpoint, entry.metadata)

    def _events(self, ns: str, checkpoint_id: str, writes: Sequence[Write]) -> Iterator[Said]:
        for (task, path), group in groupby(writes, key=lambda write: (write.task, write.path)):
            encoded = [(write.index, write.channel, encode(write.value, self._saver._registry)) for write in group]
            replace = all(index < 0 for index, _, _ in encoded)
            yield writes_said(ns, checkpoint_id, encoded, task, path, replace=replace)

    # -- comparing with what is there ------------------------------------------------------------------------

    def _differences(self, *, exact: bool) -> Iterator[str]:
        """What the store has otherwise than the source, in words. ``exact``: also what only the store has."""
        store = self._saver.store
        graph = Graph(store._db.view, store._agent_row(self._thread, arriving=True))
        for ns in self._source.namespaces(self._thread):
            missing = set(self._source.lineage(self._thread, ns))
            reader = Reader.of(self._saver, self._thread, ns, arriving=exact)
            for held in reader.tuples(None, None) if reader is not None else ():
                name = held.checkpoint["id"]
                if name in missing:
                    missing.discard(name)
                    entry = self._source.entry(self._thread, ns, name)
                    parent = held.parent_config["configurable"]["checkpoint_id"] if held.parent_config else None
                    one = self._parts(held.checkpoint, held.metadata, parent)
                    two = self._parts(entry.checkpoint, entry.metadata, entry.parent)
                    different = [what for what in {*one, *two} if one.get(what) != two.get(what)]
                    different += self._unlike(entry.writes, graph.under([key_of(ns, name)]), exact)
                    yield from (f"{what} of checkpoint {name}" for what in different)
                    self._count.step("verified")
                elif exact:
                    yield f"checkpoint {name}, which the source does not have"
            if missing:
                yield f"{len(missing)} checkpoints of the source are not there"
            for name, writes in self._source.early(self._thread, ns):
                found = graph.under([key_of(ns, name)])
                yield from (f"{what} of checkpoint {name}" for what in self._unlike(writes, found, exact))

    def _parts(self, checkpoint: Mapping[str, Any], metadata: Any, parent: str | None) -> dict[str, bytes]:
        """A checkpoint as what it is stored as, part by part: equal in types, content and order, or not."""
        parts = {**checkpoint, "metadata": dict(metadata), "parent": parent}
        channels = parts.pop("channel_values")
        parts |= {f"channel {name!r}": value for name, value in channels.items()}
        return {what: encode(value, self._saver._registry) for what, value in parts.items()}

    def _unlike(self, writes: Sequence[Write], events: Iterable[LogEntry], exact: bool) -> Iterator[str]:
        held = placed(events)
        for write in writes:
            found = held.pop((write.task, write.index), None)
            # Errors, interrupts and resumptions are replaced when a graph goes on.
            replaced = found is not None and write.index < 0 and not exact
            if not replaced and found != (write.path, write.channel, encode(write.value, self._saver._registry)):
                yield f"a write to {write.channel!r}"
        if held and exact:
            yield "writes that the source does not have"


def _summary(differences: Sequence[str]) -> str:
    more = len(differences) - TOLD
    return "; ".join([*differences[:TOLD], *([f"{more} more"] if more > 0 else [])])


def parents_first(parents: Mapping[str, str | None]) -> list[str]:
    """The checkpoints in their order, but each after its parent. Parents that are not there do not count."""
    order: dict[str, None] = {}
    for name in parents:
        line: dict[str, None] = {}
        at: str | None = name
        while at is not None and at in parents and at not in order and at not in line:
            line[at] = None
            at = parents[at]
        order.update(dict.fromkeys(reversed(line)))
    return list(order)
