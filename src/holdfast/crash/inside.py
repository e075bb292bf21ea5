"""A dump of this process, taken by itself: the order of the parts, and the time that each may use.

Owns `capture()`, and the ring of the last log records. Must not know what starts it (hooks, signals, a person) nor how
a dump is read. Holds always: nothing of the program runs, so log records are made text when they are logged; each part
is written when it is ready; a part that fails or finds no time is named with its reason; the process is as it was, but
for time and one file. Logging does what it would do without: no handler is added, which would change that.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from holdfast.crash import agents, deadlocks, folder, kinds, memory, redaction, shapes, stacks, system
from holdfast.crash.dumpfile import Builder, PartFailed, in_time
from holdfast.crash.kinds import Limits
from holdfast.crash.redaction import Redactor
from holdfast.crash.stacks import traceback_of
from holdfast.crash.walk import Walker
from holdfast.errors import DumpFailed

_RESERVE = 0.3  # of the deadline: for system parts, after objects have had their time
_STACKS_END = 0.8  # of the deadline: stacks of other threads, of which there may be thousands, end here
_FOR_CHAIN = 0.25  # of what may be stored: for the causes of an exception, after the failing thread
_LOOK_FRAMES = 2_000  # in which secrets are looked for
_LOOK_PART = 0.2  # of the deadline: for that
_RESERVE_BYTES = 2 << 20  # of the file: for the parts after the objects

Part = Callable[[], Any]
_extra: dict[str, list[tuple[str, Part]]] = {}
_LOOKED_FOR: dict[str, Callable[[], list[tuple[str, Part]]]] = {kinds.AGENT: agents.parts, kinds.LOCKS: deadlocks.parts}
_lock = threading.Lock()  # one capture at a time
_folders: list[Callable[[], Path]] = []  # of those who have said where dumps go; the last one counts
_holder: list[int] = []


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 (a lock that another thread held would never be free in the child)
    _lock = threading.Lock()
    _holder.clear()


os.register_at_fork(after_in_child=_after_fork)


def add_part(kind: str, name: str, give: Part) -> Callable[[], None]:
    """Let other rooms fill a part: ``give()`` returns plain data (dicts with text keys, lists, texts, numbers).

    It is called in a thread of its own and waited for at most ``Limits.part_s``, because it may need a lock that the
    failed program holds. Returns what takes it away again.
    """
    entry = (name, give)
    _extra.setdefault(kind, []).append(entry)

    def remove() -> None:
        if entry in _extra.get(kind, []):
            _extra[kind].remove(entry)

    return remove


def go_to(place: Callable[[], Path]) -> Callable[[], None]:
    """Where dumps go when ``capture`` is not told, until the function that is returned is called."""
    _folders.append(place)
    return partial(_folders.remove, place)


def capture(
    why: str = "",
    *,
    error: BaseException | None = None,
    traceback: types.TracebackType | None = None,
    to: str | os.PathLike[str] | None = None,
    trigger: str = "asked",
    limits: Limits | None = None,
    thread: int | None = None,
    seen: stacks.TaskSnapshot | None = None,
) -> Path:
    """Write a dump of this process and return its path. Works in a healthy process and in one that is failing.

    ``error`` is the exception to describe (its own traceback is used, or the one given). ``to`` is a folder, or a file
    that does not exist yet; otherwise the dump goes where those of an active ``install()`` go. ``thread`` is the ident
    of the one at fault, where that is not the caller; ``seen``: tasks as they were when it was raised. Raises
    DumpFailed or DiskFull when no file could be made; whatever else fails is noted in the dump.
    """
    limits = limits or Limits()
    began = monotonic()
    path = folder.new_file(to if to is not None or not _folders else _folders[-1](), os.getpid(), why or trigger)
    frame = sys._getframe(1)  # noqa: SLF001 (the documented way)
    if thread is not None:
        frame = sys._current_frames().get(thread, frame)  # noqa: SLF001 (the documented way)
    if _holder == [threading.get_ident()]:
        raise DumpFailed("a dump is being taken by this very thread")
    if not _lock.acquire(timeout=limits.deadline_s):
        raise DumpFailed("another dump is being taken and does not end")
    _holder[:] = [threading.get_ident()]
    try:
        with _collector_off():
            return _Capture(path, limits, began, thread, seen).run(why, trigger, error, traceback, frame)
    finally:
        _holder.clear()
        _lock.release()


class _Capture(Builder):
    """One capture in progress."""

    def __init__(
        self, path: Path, limits: Limits, began: float, thread: int | None, seen: stacks.TaskSnapshot | None = None
    ) -> None:
        redactor = Redactor(dict(os.environ)) if seen is None else seen.redactor
        for arguments in (sys.argv, sys.orig_argv):
            redactor.learn_arguments([shapes.exact_text(word, 4096) for word in arguments[:200]])
        super().__init__(path, redactor, limits, began + limits.deadline_s)
        self.seen = seen
        self.thread = thread
        self.began = began
        self.frames = stacks.Frames(limits)
        self.look_cut = True
        self.walker = Walker(
            self.redactor,
            limits,
            began + limits.deadline_s * (1 - _RESERVE),
            self._emit,
            seen.first if seen is not None else 0,
        )

    def run(
        self,
        why: str,
        trigger: str,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        frame: types.FrameType,
    ) -> Path:
        try:
            steps = self._failing(error, traceback, frame)
            every = self._marked(stacks.threads())
            chain = stacks.exception_tree(error) if error is not None else []
            began = [stacks.steps_of_traceback(traceback_of(one)) for one in chain[1:]]
            others = [stacks.steps_of_frame(thread["frame"]) for thread in every[:50]]
            waiting = [stacks.steps_of_task(task)[0] for task in stacks.live_tasks()[:200]]
            self.part("", lambda: self._learn([steps, *began, *others, *waiting]), write=False)
            self._head(why, trigger, error is not None)
            if chain:
                self.part(kinds.EXCEPTION, lambda: stacks.chain_record(chain, self.frames, self.limits))
            # A failing thread is one stack of many frames; where a chain began must not find everything used up.
            give_back = self.walker.set_aside(_FOR_CHAIN if len(chain) > 1 else 0.0)
            self.part(kinds.STACK, lambda: self._stack(every, steps, error), write=False)
            give_back()
            if chain:
                self.part(kinds.EXCEPTION, lambda: self._chain(chain), write=False)
            self._extras(kinds.AGENT)
            self._sources()
            self.part(kinds.LOGS, lambda: kept_logs(self.limits.log_records))
            self.part(kinds.STACK, lambda: self._others(every), write=False)
            self.part(kinds.TASKS, self._tasks, write=False)
            self._cuts()
            self._extras(kinds.LOCKS)
            self.part(kinds.PROCESS, system.own_process)
            self.part(kinds.DESCRIPTORS, system.descriptors)
            self.part(kinds.ENVIRONMENT, lambda: system.environment(self.redactor.secret_name))
            self._sources()
            self.part(kinds.MODULES, lambda: system.modules(self.frames.is_mine))
            most = self.limits.census_objects
            self.part(kinds.HEAP, lambda: memory.census(most, self.until, self.frames.is_mine))
            self._extras(kinds.NATIVE)
            self._extras(kinds.NOTE)
            self.writer.finish(self.parts)
            return self.writer.path
        finally:
            self.walker.release()
            shapes.forget_layouts()
            self.writer.close()

    # Parts.

    def _failing(
        self, error: BaseException | None, traceback: types.TracebackType | None, frame: types.FrameType
    ) -> list[stacks.Step]:
        if error is not None and traceback is None:
            traceback = traceback_of(error)
        return stacks.whole_stack(traceback) or stacks.steps_of_frame(frame)

    def _head(self, why: str, trigger: str, failed: bool) -> None:
        plan = [*kinds.PARTS][1:-1]
        absent = {kind for kind in (kinds.AGENT, kinds.LOCKS, kinds.NATIVE, kinds.NOTE) if not _given(kind)}
        if not failed:
            absent.add(kinds.EXCEPTION)
        self.head(
            why=why, trigger=trigger, pid=os.getpid(), began=system.began(os.getpid()),
            program=[shapes.exact_text(item, 1000) for item in sys.argv[:50]], python=sys.version.split()[0],
            plan=[kind for kind in plan if kind not in absent],
        )  # fmt: skip

    def _stack(self, every: list[dict[str, Any]], steps: list[stacks.Step], error: BaseException | None) -> None:
        """The failing thread: first where it stands, then its values."""
        own = next((thread for thread in every if thread["current"]), {"id": 0, "name": ""})
        failing = error is not None or self.thread is not None
        self._write_stack(own, steps, failing=failing, items=self.limits.items, part=0.5)

    def _chain(self, chain: list[BaseException]) -> None:
        """Frames of the exceptions once more, now with values: with ``raise ... from``, what really failed is there."""
        for number in stacks.by_worth(chain):
            if self.walker.exhausted():
                self.parts[kinds.EXCEPTION] = [kinds.PARTIAL, "locals of some exceptions: no time or room left"]
                break
            records, _left_out, kept = stacks.traceback_records(chain[number], self.frames)
            if records:
                self.frames.add_locals(records, kept, self.walker, items=self.limits.items, part=0.3)
                if not self.writer.add(kinds.EXCEPTION, {"of": number, "frames": records}):
                    self.parts[kinds.EXCEPTION] = [kinds.PARTIAL, "locals of some exceptions: no room left in the file"]
                    break
        self.walker.flush()

    def _marked(self, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With the thread at fault as the current one, where it is not the one that takes the dump."""
        if self.thread is not None and any(thread["id"] == self.thread for thread in every):
            for thread in every:
                thread["current"] = thread["id"] == self.thread
        return every

    def _others(self, every: list[dict[str, Any]]) -> None:
        others = [thread for thread in every if not thread["current"]]
        end = self.began + self.limits.deadline_s * _STACKS_END
        left, why = max(0, len(others) - self.limits.threads), ""
        for number, thread in enumerate(others[: self.limits.threads]):
            if monotonic() > end:
                left, why = len(others) - number, "out of time: "
                break
            steps = stacks.steps_of_frame(thread["frame"])
            self._write_stack(thread, steps, failing=False, items=self.limits.items_elsewhere, part=0.05)
        if left:
            self.parts[kinds.STACK] = [kinds.PARTIAL, f"{why}{left} more threads"]
        self.walker.flush()

    def _write_stack(
        self, thread: dict[str, Any], steps: list[stacks.Step], *, failing: bool, items: int, part: float
    ) -> None:
        records, left_out, kept = self.frames.records(steps)
        if self.walker.exhausted():
            self.parts[kinds.STACK] = [kinds.PARTIAL, "locals of some threads: no time or room left"]
        else:
            self.frames.add_locals(records, kept, self.walker, items=items, part=part)
        fields = {key: value for key, value in thread.items() if key != "frame"}
        self.stack({**fields, "failing": failing, "frames": records, "left_out": left_out})
        if failing or thread.get("current"):
            self.walker.flush()

    def _tasks(self) -> None:
        """The tasks as they were seen when the exception was raised; otherwise as they are."""
        if self.seen is not None:
            for piece in self.seen.pieces:
                self._emit(*piece)
            records, more = self.seen.records, self.seen.more
            for file, lines in self.seen.files.items():
                self.frames.files.setdefault(file, []).extend(lines)
        else:
            live = stacks.live_tasks()
            records, kept = stacks.task_records(live[: self.limits.tasks], self.frames)
            more = len(live) - len(records)
            stacks.add_task_locals(records, kept, self.frames, self.walker, self.limits)
        for first in range(0, len(records), 100):
            if not self.writer.add(kinds.TASKS, {"first": first, "tasks": records[first : first + 100]}):
                self.parts[kinds.TASKS] = [kinds.PARTIAL, "no room left in the file"]
                break
        if more:
            self.parts[kinds.TASKS] = [kinds.PARTIAL, f"{more} more tasks"]
        self.walker.flush()

    def _sources(self) -> None:
        """Sources of the files that were named since the last time."""
        files, self.frames.files = self.frames.files, {}
        if files:
            self.sources(files, self.frames.is_mine)

    def _cuts(self) -> None:
        self.walker.flush()
        cuts = {kinds.REASONS[reason]: count for reason, count in self.walker.cuts.items()}
        told = ", ".join(f"{reason}: {count}" for reason, count in cuts.items())
        only_redacted = set(self.walker.cuts) <= {kinds.REDACTED} and not self.look_cut
        if self.look_cut:
            told += ("; " if told else "") + "secrets are known by name only as far as there was time to look"
        self.parts[kinds.OBJECTS] = [kinds.WHOLE if only_redacted else kinds.PARTIAL, told]

    def _extras(self, kind: str) -> None:
        for name, give in _given(kind):
            self.part(kind, partial(self._extra, name, give))

    def _extra(self, name: str, give: Part) -> dict[str, Any]:
        return {"name": name, "data": in_time(give, max(0.05, min(self.limits.part_s, self.until - monotonic())))}

    def _emit(self, first: int, names: list[str], shapes: list[Any], nodes: list[Any]) -> bool:
        if self.writer.size > self.limits.file_bytes - _RESERVE_BYTES:
            return False
        payload = {"first": first, "types": names, "shapes": shapes, "nodes": nodes}
        return self.writer.add(kinds.OBJECTS, payload, nodes="nodes")

    def _learn(self, found: list[list[stacks.Step]]) -> None:
        """Learn what stands under secret names anywhere, before anything that may repeat it is written."""
        look = redaction.Look(self.redactor, self.limits.objects, self.began + self.limits.deadline_s * _LOOK_PART)
        for frame in [frame for steps in found for frame, _ in reversed(steps[-200:])][:_LOOK_FRAMES]:
            look.frame(frame, with_globals=self.frames.is_mine(shapes.exact_text(frame.f_code.co_filename, 4096)))
        for sections in agents.values():
            look.named(sections)
        look.run()
        self.look_cut = not look.whole


def _given(kind: str) -> list[tuple[str, Part]]:
    """What other rooms registered, and what is looked for at this moment: agents that are open, threads that wait."""
    found = list(_extra.get(kind, ()))
    if kind in _LOOKED_FOR:
        try:
            found += _LOOKED_FOR[kind]()
        except Exception as failure:  # noqa: BLE001 (as a part that fails: the others go on)
            found.append(("", partial(_failed, type(failure).__name__)))
    return found


def _failed(name: str) -> Any:
    raise PartFailed(f"{name} while it was looked for")


@contextmanager
def _collector_off() -> Iterator[None]:
    """A collection would run finalizers of the program in the middle of the walk."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# -- the last log records ---------------------------------------------------------------------------------------------


_TEXT_CHARS = 8_192


class Ring:
    """The newest records as plain data. No lock: a deque's append is atomic, and a crash in it must not deadlock."""

    def __init__(self, records: int = 500) -> None:
        self.kept: deque[dict[str, Any]] = deque(maxlen=records)
        self.seen = 0
        self.ship: Callable[[dict[str, Any]], None] | None = None  # where a copy goes that outlives the process
        self.before: Callable[..., logging.LogRecord] = logging.getLogRecordFactory()

    def make(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """The factory of records, which is called for each that is going to be logged."""
        record = self.before(*args, **kwargs)
        if _rings and _rings[0] is self:  # a factory that was put over this one may outlive it
            self.emit(record)
        return record

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 (arguments of any class are formatted)
            text = str(record.msg) if type(record.msg) is str else "a record that could not be formatted"
        self.seen += 1
        entry: dict[str, Any] = {
            "at": record.created,
            "level": str(record.levelname)[:40],
            "logger": str(record.name)[:400],
            "text": text[:_TEXT_CHARS],
            "file": str(record.pathname)[:4096],
            "line": record.lineno,
            "thread": str(record.threadName)[:400],
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = record.exc_info[0].__name__
        self.kept.append(entry)
        if self.ship is not None:
            self.ship(entry)


_rings: list[Ring] = []


def keep_logs(records: int = 500) -> Ring:
    """Begin to keep the records of all loggers. Once for a process."""
    if not _rings:
        ring = Ring(records)
        _rings.append(ring)
        logging.setLogRecordFactory(ring.make)
    return _rings[0]


def stop_logs() -> None:
    while _rings:
        ring = _rings.pop()
        if logging.getLogRecordFactory() == ring.make:
            logging.setLogRecordFactory(ring.before)


def kept_logs(most: int) -> dict[str, Any] | None:
    """The newest records, oldest first; None when nobody keeps any."""
    if not _rings:
        return None
    records = list(_rings[0].kept)[-most:]
    return {"records": records, "left_out": _rings[0].seen - len(records)}
