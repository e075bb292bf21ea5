"""Bringing threads over from LangGraph's own savers: whole, verified, and again from where it stopped.

Owns the order of an import, what "the same" means for checkpoints, and what is reported. The databases are
``sources``' business. What always holds: the source is only read; a thread counts as imported only after it was read
back and found equal, and cannot be opened before; what the store already has is never written again, and a thread with
other content is left alone. Both sides are read in one pass, page by page, and what was read back is compared by the
bytes that it would be stored as.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from langgraph.checkpoint.serde.base import CipherProtocol, SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from holdfast.agent.line import Line
from holdfast.agent.manifest import Manifest
from holdfast.agent.names import check_name, name_key
from holdfast.codec.assigned import Still
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.contrib.langgraph.removal import remove
from holdfast.contrib.langgraph.revival import Revival
from holdfast.contrib.langgraph.sources import Counts, Entry, Source, Write, open_source
from holdfast.contrib.langgraph.thread import BROUGHT, ROOT, Thread, has_thread, key_of, writes_event
from holdfast.contrib.langgraph.tuples import OURS, Reader, channel_of, channels_in, placed
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
from holdfast.store.bodies import body_of
from holdfast.store.catalog import Event, Progress

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
        return {
            "thread": self.thread,
            "status": self.status,
            "namespaces": self.namespaces,
            "checkpoints": self.checkpoints,
            "writes": self.writes,
            "written": self.written,
            "error": {"kind": error.kind, "message": error.message, "hint": error.hint} if error else None,
        }


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
    An import that was interrupted goes on when it is called again. Threads that cannot come over are in the report.
    """
    if saver is None and not dry_run:
        raise BadOption("an import needs a saver to import into", hint="Only dry_run=True does without.")
    serde: SerializerProtocol = Revival(saver._registry if saver is not None else Registry())
    if cipher is not None:
        serde = EncryptedSerializer(cipher, serde)
    with closing(open_source(source, serde)) as opened:
        chosen = _chosen(opened, threads)
        count = _Count(progress, *opened.totals(chosen))
        report = ImportReport(opened.name)
        for thread in chosen or opened.threads():
            with opened.snapshot():
                counts = opened.counts(thread)
                if saver is None or dry_run:
                    done = _look_at(thread, counts)
                else:
                    done = _import(opened, saver, thread, counts, count)
            opened.check_unchanged()
            report.threads.append(done)
            count.thread()
        return report


def check_source(source: str, threads: Iterable[str] = ()) -> None:
    """Raise, as ``import_threads`` would, when the source cannot be read or has no such threads."""
    with closing(open_source(source, Revival(Registry()))) as opened:
        _chosen(opened, threads)


def _chosen(source: Source, threads: Iterable[str]) -> list[str]:
    chosen = list(dict.fromkeys(str(thread) for thread in threads))
    unknown = [thread for thread in chosen if not source.namespaces(thread)]
    if unknown:
        raise BadOption(
            f"no thread {', '.join(map(repr, unknown))} in {source.name}",
            hint="Without naming threads, all of them are imported; a dry run lists them.",
        )
    return chosen


def _record(thread: str, status: Status, counts: Counts, **more: Any) -> ImportedThread:
    return ImportedThread(thread, status, counts.namespaces, counts.checkpoints, counts.writes, **more)


def _look_at(thread: str, counts: Counts) -> ImportedThread:
    try:
        check_name(thread, "a thread")
    except BadName as error:
        return _record(thread, "failed", counts, error=error)
    return _record(thread, "found", counts)


class _Count:
    """How far an import is."""

    def __init__(self, progress: Progress | None, threads: int, checkpoints: int) -> None:
        self._progress = progress
        self._done = {"threads": 0, "checkpoints": 0, "verified": 0}
        self._totals = {"threads": threads, "checkpoints": checkpoints, "verified": checkpoints}
        for what in self._done:
            self._step(what, 0)

    def thread(self) -> None:
        self._step("threads")

    def checkpoint(self) -> None:
        self._step("checkpoints")

    def verified(self) -> None:
        self._step("verified")

    def skipped(self, number: int) -> None:
        """Checkpoints that are there already."""
        self._step("checkpoints", number)

    def complete(self, number: int) -> None:
        """Checkpoints of a thread that was there already, and is equal."""
        self._step("checkpoints", number)
        self._step("verified", number)

    def _step(self, what: str, by: int = 1) -> None:
        self._done[what] += by
        if self._progress is not None:
            self._progress(what, self._done[what], self._totals[what])


def _import(source: Source, saver: HoldfastSaver, thread: str, counts: Counts, count: _Count) -> ImportedThread:
    one = _Import(source, saver, thread, count)
    try:
        status: Status = "imported" if one.run() else "complete"
    except _OF_ONE_THREAD as error:
        if source.lost:
            raise
        if one.began:  # whole or not at all: nobody would see what has come
            with suppress(AgentBusy):
                remove(saver, thread)
        return _record(thread, "failed", counts, written=one.written, error=error)
    return _record(thread, status, counts, written=one.written)


class _Import:
    """One thread on its way."""

    def __init__(self, source: Source, saver: HoldfastSaver, thread: str, count: _Count) -> None:
        self.written = 0
        self.began = False  # whether nothing of it was there before
        self._source = source
        self._saver = saver
        self._thread = thread
        self._count = count

    def run(self) -> bool:
        """Bring the thread over; returns whether there was anything to do."""
        store = self._saver.store
        check_name(self._thread, "a thread")
        lacking: Comparison | None = None
        if self._began():
            surveys = self._surveys()
            lacking = self._look(surveys)
            if not self._arriving():
                if lacking.complete:
                    self._count.complete(sum(len(survey.present) for survey in surveys))
                    return False
                self._check(surveys, lacking)
        writer = Thread(store, self._saver._registry, self._thread, self._saver._wait_s, arriving=True)
        with writer.working():
            writer.ready()
            # Looked at again: another import may have been here before this process became the writer.
            surveys = self._surveys()
            if lacking is None and any(survey.present or survey.more for survey in surveys):
                lacking = self._look(surveys)
            self.began = lacking is None
            writer.set_arriving(arriving=True)
            self._write_checkpoints(writer, surveys)
            self._write_writes(writer, lacking)
            store.flush()
            self._verify()
            writer.set_arriving(arriving=False)
        return True

    def _began(self) -> bool:
        return self._saver.store._catalog.agent(name_key(self._thread)) is not None

    def _arriving(self) -> bool:
        """Whether an import of the thread has begun and not ended."""
        catalog = self._saver.store._catalog
        row = catalog.agent(name_key(self._thread))
        main = catalog.branch(row.a, name_key(ROOT)) if row is not None else None
        return main is not None and body_of(main).get("arriving") == BROUGHT

    def _surveys(self) -> list[Survey]:
        spaces = self._source.namespaces(self._thread)
        return [Survey(self._saver, self._source, self._thread, ns) for ns in spaces]

    def _look(self, surveys: list[Survey]) -> Comparison:
        """Compare with what is there; raises where that is something else."""
        found = Comparison()
        foreign = any(survey.foreign for survey in surveys)
        if not foreign:
            found = compare(self._saver, self._source, self._thread, surveys)
        both_went_on = not found.complete and (found.more or found.gone_on)
        if foreign or found.different or both_went_on:
            raise ThreadExists(
                f"{self._thread!r} is in the store already and is "
                + ("no LangGraph thread" if foreign else f"not the same: {found.summary}"),
                thread=self._thread,
                hint="It was left as it is. Import into another store, or delete that thread first.",
            )
        return found

    def _check(self, surveys: Sequence[Survey], lacking: Comparison) -> None:
        """Raise, before a thread that is in use is touched, where something that it lacks cannot be stored."""
        registry = self._saver._registry
        for survey in surveys:
            for entry in self._missing(survey) if survey.missing else ():
                for value in (entry.checkpoint, entry.metadata, *(write.value for write in entry.writes)):
                    encode(value, registry)
        for writes in lacking.new_writes.values():
            for write in writes:
                encode(write.value, registry)

    def _verify(self) -> None:
        found = compare(self._saver, self._source, self._thread, self._surveys(), self._count.verified)
        if not found.exact:
            raise Damaged(
                f"thread {self._thread!r} is not in the store as it is in the source: {found.summary}",
                what=(f"thread {self._thread!r}",),
                hint="The source is untouched. Delete the thread from the store and import it again.",
            )

    # -- writing ---------------------------------------------------------------------------------------------

    def _write_checkpoints(self, writer: Thread, surveys: Sequence[Survey]) -> None:
        for survey in surveys:
            self._count.skipped(len(survey.present))
            for entry in self._missing(survey):
                self._put(writer, survey.ns, entry)
                self.written += 1
                self._count.checkpoint()
            newest = next(reversed(survey.parents), None)
            if survey.missing and newest is not None and writer.space(survey.ns).id != newest:
                # A clock that was behind gave a child a smaller id than its parent's. LangGraph goes on from the
                # largest id, so that is where the branch has to stand.
                self._put(writer, survey.ns, self._source.entry(self._thread, survey.ns, newest))

    def _write_writes(self, writer: Thread, lacking: Comparison | None) -> None:
        """Writes whose checkpoint is there already, or never came."""
        if lacking is not None:
            self._put_writes(writer, ((ns, name, writes) for (ns, name), writes in lacking.new_writes.items()))
            return
        for ns in self._source.namespaces(self._thread):
            early = self._source.early_writes(self._thread, ns)
            self._put_writes(writer, ((ns, name, writes) for name, writes in early))

    def _missing(self, survey: Survey) -> Iterator[Entry]:
        """What is to be written, parents before their children."""
        order = parents_first(survey.parents)
        if order == list(survey.parents):
            yield from self._source.entries(self._thread, survey.ns, skip=set(survey.present))
            return
        missing = set(survey.missing)
        for name in order:
            if name in missing:
                yield self._source.entry(self._thread, survey.ns, name)

    def _put(self, writer: Thread, ns: str, entry: Entry) -> None:
        """One checkpoint with its writes, in one transaction."""
        for event in self._events(ns, entry.id, entry.writes):
            writer.queue(event)
        writer.finish(*writer.capture(ns, entry.parent, entry.checkpoint, entry.metadata))

    def _put_writes(self, writer: Thread, groups: Iterable[tuple[str, str, Sequence[Write]]]) -> None:
        queued = None
        for ns, name, writes in groups:
            for event in self._events(ns, name, writes):
                queued = writer.queue(event)
        if queued is not None:
            writer.wait(queued)

    def _events(self, ns: str, checkpoint_id: str, writes: Sequence[Write]) -> Iterator[Event]:
        for (task, path), group in groupby(writes, key=lambda write: (write.task, write.path)):
            encoded = [(write.index, write.channel, encode(write.value, self._saver._registry)) for write in group]
            replace = all(index < 0 for index, _, _ in encoded)
            yield writes_event(ns, checkpoint_id, encoded, task, path, replace=replace)


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


# -- comparing with what is there ------------------------------------------------------------------------------


class Survey:
    """Which checkpoints of a namespace both sides have, by their ids alone."""

    def __init__(self, saver: HoldfastSaver, source: Source, thread: str, ns: str) -> None:
        self.ns = ns
        self.parents = source.lineage(thread, ns)
        self.reader = Reader.of(saver, thread, ns, arriving=True)
        self.foreign = False  # whether it is no LangGraph thread at all
        held: set[bytes | None] = set()
        for row in self.reader.line.rows() if self.reader is not None else ():
            held.add(row.key)
            self.foreign = self.foreign or not has_thread(Manifest.decode(row.manifest))
        keys = {key_of(ns, name): name for name in self.parents}
        self.missing = [name for key, name in keys.items() if key not in held]
        self.present = [name for key, name in keys.items() if key in held]
        self.more = len(held - keys.keys())


class Comparison:
    """What a look at a whole thread has found."""

    def __init__(self) -> None:
        self.missing = 0
        self.more = 0  # checkpoints that only the store has
        self.different: list[str] = []
        self.new_writes: dict[tuple[str, str], list[Write]] = {}  # (namespace, checkpoint) -> what the store lacks
        self.gone_on = False  # the store has writes that an imported thread gets when a graph goes on with it

    @property
    def complete(self) -> bool:
        """Whether everything that the source has is there."""
        return not (self.missing or self.different or self.new_writes)

    @property
    def exact(self) -> bool:
        """Whether there is that and nothing else."""
        return self.complete and not self.more and not self.gone_on

    @property
    def summary(self) -> str:
        """In words, what is not the same."""
        found = self.different[:TOLD]
        found += [f"writes of checkpoint {name}" for _, name in list(self.new_writes)[: TOLD - len(found)]]
        rest = len(self.different) + len(self.new_writes) - len(found)
        found += [f"{rest} more"] * bool(rest)
        found += [f"{self.missing} checkpoints of the source are not there"] * bool(self.missing)
        found += [f"{self.more} checkpoints that the source does not have"] * bool(self.more)
        found += ["writes that the source does not have"] * bool(self.gone_on)
        return "; ".join(found)


def compare(
    saver: HoldfastSaver,
    source: Source,
    thread: str,
    surveys: Sequence[Survey],
    compared: Callable[[], None] = lambda: None,
) -> Comparison:
    """Look at everything that both sides have of a thread. ``compared`` is called for each checkpoint."""
    result = Comparison()
    row = saver.store._catalog.agent(name_key(thread))
    for survey in surveys:
        result.missing += len(survey.missing)
        result.more += survey.more
        if survey.reader is not None and survey.present:
            _compare_checkpoints(result, source, thread, survey, survey.reader, compared)
        line = Line(saver.store, row) if row is not None else None
        for name, writes in source.early_writes(thread, survey.ns):
            found = line.events_named([key_of(survey.ns, name)]) if line is not None else []
            _compare_writes(result, (survey.ns, name), writes, placed(found), saver._registry)
    return result


def _compare_checkpoints(
    result: Comparison, source: Source, thread: str, survey: Survey, reader: Reader, compared: Callable[[], None]
) -> None:
    present = set(survey.present)
    for state, about, events in reader.states():
        name = about["id"]
        if name not in present:
            continue
        entry = source.entry(thread, reader.ns, name)
        different = _differences(entry, state, about, reader._registry)
        result.different += [f"{what} of checkpoint {name}" for what in different]
        _compare_writes(result, (reader.ns, name), entry.writes, placed(events), reader._registry)
        compared()


def _differences(entry: Entry, state: Still, about: Mapping[str, Any], registry: Registry) -> Iterator[str]:
    if (about.get("parent") or None) != entry.parent:
        yield "parent"
    record = {name: value for name, value in entry.checkpoint.items() if name != "channel_values"}
    record["metadata"] = entry.metadata
    for name in {*record, *about} - (OURS - {"metadata"}):
        if name not in record or name not in about or not same(about[name], record[name], registry):
            yield name
    channels = entry.checkpoint["channel_values"]
    held = set(channels_in(state, about))
    for name in {*channels, *held}:
        both = name in channels and name in held
        if not both or not same(channel_of(state, about, name), channels[name], registry):
            yield f"channel {name!r}"


def _compare_writes(
    result: Comparison,
    place: tuple[str, str],
    writes: Sequence[Write],
    held: dict[tuple[str, int], tuple[str, str, bytes]],
    registry: Registry,
) -> None:
    for write in writes:
        found = held.pop(write.place, None)
        if found is None:
            result.new_writes.setdefault(place, []).append(write)
        elif found != (write.path, write.channel, encode(write.value, registry)):
            if write.index < 0:  # errors, interrupts and resumptions are replaced when a graph goes on
                result.gone_on = True
            else:
                result.different.append(f"a write to {write.channel!r} of checkpoint {place[1]}")
    if held:
        result.gone_on = True


def same(one: Any, other: Any, registry: Registry) -> bool:
    """Whether two values are the same in type, content and order: whether they are stored as the same bytes."""
    return encode(one, registry) == encode(other, registry)
