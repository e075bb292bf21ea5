"""Reading a dump: threads, tasks, frames, objects, search. What the debugger, the summary and the page work with.

Must not know how a dump was taken, nor text for people. Holds always: loading is inert and bounded (dumpfile.py,
records.py); a file that was cut opens and says what is missing; objects are read when they are asked for.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

from holdfast.crash import kinds
from holdfast.crash.dumpfile import Chunk, Reader
from holdfast.crash.kinds import MAX_CHAIN
from holdfast.crash.records import (
    Agent,
    Death,
    Descriptors,
    Failure,
    Frame,
    Head,
    Heap,
    Hit,
    Inert,
    LogRecord,
    Missing,
    Native,
    PartState,
    Process,
    Ref,
    Source,
    Stack,
    Task,
    TextOnly,
    Thread,
    Value,
    Waiting,
    as_dict,
    as_int,
    as_list,
    as_text,
    begun_step,
    node,
    read,
    read_all,
    split_path,
    steps,
    with_locals,
)
from holdfast.errors import BadOption, CorruptValue, NotInDump

THREAD, TASK, EXCEPTION = "thread", "task", "exception"
# Parts that are plain records. Objects, stacks and sources have views of their own.
PLAIN_PARTS = (kinds.PROCESS, kinds.DESCRIPTORS, kinds.ENVIRONMENT, kinds.MODULES, kinds.HEAP)
EXTRA_PARTS = (kinds.AGENT, kinds.LOCKS, kinds.NATIVE, kinds.NOTE)

_OFFERED = 200  # completions; nobody reads more
_DEEPEST = 100  # levels of plain data that a search goes down
_KEPT_BYTES = 8 << 20  # of decoded chunks of objects, before decoding: honest ones become ten times that, hostile 40
_KEPT_OBJECTS = 1_000  # that were asked for last
_DECODED = 4  # times that a chunk is decoded for one question: a small file may refer to a large chunk without end


class Dump:
    """A dump that was opened. Use it as a context manager, or close it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._reader = Reader(self.path)
        self._pieces: OrderedDict[int, tuple[Any, Any, Any]] = OrderedDict()
        self._sizes: dict[int, int] = {}  # of these, by their place in the file
        self._objects: OrderedDict[tuple[int, int], Inert] = OrderedDict()
        self._decoded: dict[int, int] = {}  # how often, by place, since the last question
        self._problems: dict[str, str] = {}
        self.head: dict[str, Any] = self._first(kinds.HEAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._reader.close()

    # The whole.

    @cached_property
    def about(self) -> Head:
        return read(Head, self.head)

    @property
    def why(self) -> str:
        """Why it was taken, in words."""
        return self.about.why

    @property
    def trigger(self) -> str:
        """What made it be taken: an exception, a signal, a hang, somebody who asked."""
        return self.about.trigger

    @property
    def at(self) -> float:
        """When it was taken, in seconds since 1970."""
        return self.about.at

    @cached_property
    def index(self) -> dict[str, Any]:
        """The newest index; empty when the file was cut before it."""
        found: dict[str, Any] = {}
        for chunk in self._reader.of(kinds.INDEX):
            payload = self._payload(chunk)
            if isinstance(payload, dict):
                found = payload
        return found

    @property
    def complete(self) -> bool:
        """Whether everything that was written is there and whole."""
        return not any(part.state == kinds.DAMAGED for part in self.parts) and bool(self.index)

    @cached_property
    def parts(self) -> list[PartState]:
        """Every part that was planned or is there, in the order of writing."""
        chunks: dict[str, list[Chunk]] = {}
        for chunk in self._reader.chunks:
            chunks.setdefault(chunk.kind, []).append(chunk)
            try:
                self._reader.body(chunk)
            except CorruptValue as error:
                self._problems.setdefault(chunk.kind, error.message)
        told = as_dict(self.index.get("parts"))
        expected = self._expected_counts()
        known = {*self.about.plan, *chunks, *told, kinds.HEAD, kinds.INDEX}
        found = []
        for kind in [*kinds.PARTS, *(set(chunks) - set(kinds.PARTS))]:
            if kind not in known:
                continue
            note = told.get(kind)
            state, reason = (
                (as_text(note[0]), as_text(note[1])) if isinstance(note, list) and len(note) == 2 else ("", "")
            )
            if kind in self._problems:
                state, reason = kinds.DAMAGED, self._problems[kind]
            elif len(chunks.get(kind, ())) < expected.get(kind, 0):
                state, reason = kinds.DAMAGED, f"{expected[kind] - len(chunks.get(kind, ()))} chunks are lost"
            elif not state and not self.index and kind != kinds.INDEX:
                state = kinds.PARTIAL if kind in chunks else kinds.ABSENT
                reason = "the file ends early" + (": there may have been more" if kind in chunks else "")
            elif not state:
                state = kinds.WHOLE if kind in chunks else kinds.ABSENT
                reason = reason or ("" if kind in chunks else "the file ends early")
            found.append(PartState(kind, kinds.PARTS.get(kind, kind), state, reason))
        return found

    @property
    def missing(self) -> list[str]:
        """In words, everything that is not there."""
        lines = [f"{part.name}: {part.reason or part.state}" for part in self.parts if part.state != kinds.WHOLE]
        return lines + self._reader.gaps

    # Parts.

    @cached_property
    def exceptions(self) -> list[Failure]:
        """The exception that was dumped and those that it names; the first is the one that was raised last."""
        chain: Any = None
        later: dict[int, tuple[Frame, ...]] = {}  # frames with their values are written after the chain
        for payload in self._all(kinds.EXCEPTION):
            if isinstance(payload, dict) and "of" in payload:
                later.setdefault(as_int(payload["of"]), read_all(Frame, payload.get("frames")))
            elif isinstance(payload, dict) and chain is None:
                chain = payload.get("chain")
        every = read_all(Failure, as_list(chain)[:MAX_CHAIN])
        framed = (replace(one, frames=later[place]) if later.get(place) else one for place, one in enumerate(every))
        return [failure.within(len(every)) for failure in framed]

    @cached_property
    def threads(self) -> list[Thread]:
        """The failing thread first."""
        found = [*read_all(Thread, [*self._all(kinds.STACK)])]
        if found and all(frame.hidden for thread in found for frame in thread.frames):
            found = with_locals(found, self.extras(kinds.NATIVE).get("core stacks"))
        return sorted(found, key=lambda thread: (not thread.failing, not thread.current, not thread.main))

    @cached_property
    def tasks(self) -> list[Task]:
        """The asyncio tasks, each with its frames."""
        raw = [item for payload in self._all(kinds.TASKS) for item in as_list(as_dict(payload).get("tasks"))]
        return [replace(task, number=number) for number, task in enumerate(read_all(Task, raw))]

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The source of files that its frames are in, by path."""
        found = [payload for payload in self._all(kinds.SOURCE) if isinstance(as_dict(payload).get("text"), str)]
        return {source.file: source for source in read_all(Source, found)}

    @cached_property
    def logs(self) -> list[dict[str, Any]]:
        """The log records that were kept, oldest first."""
        return [record for record in as_list(self._first(kinds.LOGS).get("records")) if isinstance(record, dict)]

    @property
    def log_records(self) -> tuple[LogRecord, ...]:
        """As ``logs``, typed."""
        return read_all(LogRecord, self.logs)

    @cached_property
    def process(self) -> Process:
        return read(Process, self._first(kinds.PROCESS))

    @cached_property
    def descriptors(self) -> Descriptors:
        return read(Descriptors, self._first(kinds.DESCRIPTORS))

    @cached_property
    def heap(self) -> Heap:
        return read(Heap, self._first(kinds.HEAP))

    @cached_property
    def agents(self) -> list[Agent]:
        """The agents that the process had open; one that does not say its name has that of its part."""
        given = ((name.partition("@")[0], read(Agent, data)) for name, data in self.extras(kinds.AGENT).items())
        return [agent if agent.name else replace(agent, name=name) for name, agent in given]

    @property
    def death(self) -> Death | None:
        """How the process ended, where somebody outside saw it."""
        told = self.extras(kinds.NOTE).get("death")
        return read(Death, told) if isinstance(told, dict) else None

    @property
    def waiting(self) -> list[Waiting]:
        """Who waits for whom, and for what."""
        return [read(Waiting, data) for data in self.extras(kinds.LOCKS).values()]

    @property
    def native(self) -> dict[str, Native]:
        """Stacks and registers below Python, by the part that has them."""
        return {name: read(Native, data) for name, data in self.extras(kinds.NATIVE).items()}

    def part(self, kind: str) -> dict[str, Any]:
        """The content of a part that is one plain record: process, descriptors, environment, modules, heap."""
        return self._first(kind)

    def extras(self, kind: str) -> dict[str, Any]:
        """What other rooms gave for a part: their name -> their data."""
        found = {}
        for payload in self._all(kind):
            if isinstance(payload, dict) and isinstance(payload.get("name"), str):
                found[payload["name"]] = payload.get("data")
        return found

    # Objects.

    def object(self, ref: Ref | int, *, most: int | None = None) -> Inert:
        """The object of that number. One that was lost or cut is there too, and says so.

        ``most`` is how many items, pairs or attributes are wanted: of a long list the others cost nothing then.
        """
        number = ref.number if isinstance(ref, Ref) else ref
        known = self._objects.get((number, most or 0))
        if known is not None:
            return known
        for first, count, chunk in self._ranges:
            if first <= number < first + count:
                names, shapes, nodes = self._piece(chunk)
                if not nodes:
                    return Inert(number, kinds.CUT, "?", reason="the file is built so that reading it would not end")
                found = node(number, names, shapes, nodes[number - first], most)
                if most is not None:
                    self._objects[number, most] = found
                    while len(self._objects) > _KEPT_OBJECTS:
                        self._objects.popitem(last=False)
                return found
        return Inert(number, kinds.CUT, "?", reason="the file does not hold it")

    def ask(self) -> None:
        """A new question begins. Within one, the work is bounded by the file's bytes, whatever refers to what."""
        self._decoded.clear()

    def value(self, start: Value, path: str) -> Value:
        """Follow ``.name[3]['key']`` from a value. NotInDump, with how far it got, when it leads nowhere."""
        current = start
        done = ""
        for step, text in steps(path):
            current = self._step(current, step, done or "the value")
            done += text
        return current

    def local(self, frame: Frame | None, path: str) -> Value:
        """What a path names: ``messages[0]['role']`` in a frame, or ``#12.city`` from an object's number."""
        start, rest = split_path(path)
        if isinstance(start, Ref):
            return self.value(start, rest)
        if frame is None:
            raise NotInDump("there is no frame, so no names", hint="#12 names an object by its number.")
        for key, value in frame.locals:
            if key == start:
                return self.value(value, rest)
        names = ", ".join(key for key, _value in frame.locals[:20])
        raise NotInDump(
            f"no local {start!r} in {frame.function}", hint=f"There are: {names}" if names else frame.hidden
        )

    def continuations(self, frame: Frame | None, path: str) -> list[str]:
        """Paths that begin with this one: the next name, attribute or key."""
        path = path.lstrip()
        begun = begun_step(path)
        if begun is None:
            names = [name for name, _value in frame.locals] if frame is not None else []
            return [name for name in names if name.startswith(path)][:_OFFERED]
        try:
            value = self.local(frame, begun[0])
        except (NotInDump, BadOption):
            return []
        ways = (way for way, _value in self.object(value).children()) if isinstance(value, Ref) else ()
        return [begun[0] + way for way in ways if way.startswith(begun[1])][:_OFFERED]

    # Stacks to stand in.

    def stacks(self, kind: str) -> list[Stack]:
        """All of that kind: threads, tasks or exceptions."""
        if kind == THREAD:
            return [
                Stack(THREAD, place, one.name or f"thread {one.id}", _thread_note(one), one.frames, one.left_out)
                for place, one in enumerate(self.threads)
            ]
        if kind == TASK:
            return [
                Stack(TASK, one.number, one.name or f"task {one.number}", self._task_note(one), one.frames)
                for one in self.tasks
            ]
        return [
            Stack(EXCEPTION, place, one.type_name, "traceback", one.frames) for place, one in enumerate(self.exceptions)
        ]

    def all_stacks(self) -> list[Stack]:
        """Threads, tasks, and what led to the exception. Its own frames are the failing thread's, if there is one."""
        running, raised = self.stacks(THREAD) + self.stacks(TASK), self.stacks(EXCEPTION)
        return running + [stack for stack in raised[1:] if stack.frames] if running else raised[:1]

    def _task_note(self, task: Task) -> str:
        note = task.state
        awaited = task.waits_for_tasks[:5]
        if awaited:
            names = [self.tasks[place].name if 0 <= place < len(self.tasks) else f"task {place}" for place in awaited]
            more = len(task.waits_for_tasks) - len(names)
            note += " for " + ", ".join(names) + (f" and {more} more" if more else "")
        elif task.waits_for:
            note += f" for {task.waits_for}"
        return note + (", being cancelled" if task.cancelling else "")

    def plain_parts(self) -> dict[str, Any]:
        """Parts that are plain records, by their name for people; only those that are there."""
        found: dict[str, Any] = {kinds.PARTS[kind]: self.part(kind) for kind in (kinds.HEAD, *PLAIN_PARTS)}
        found |= {kinds.PARTS[kind]: self.extras(kind) or self.part(kind) for kind in EXTRA_PARTS}
        found[kinds.PARTS[kinds.LOGS]] = self.logs
        return {name: data for name, data in found.items() if data}

    def search(self, text: str, *, limit: int = 200) -> Iterator[Hit]:
        """Names and values that contain the text, anywhere in the dump; case does not matter."""
        return islice(self._search(text.casefold()), limit)

    def objects(self) -> Iterator[Inert]:
        """Every object that the file holds, in order."""
        for first, _count, chunk in self._ranges:
            names, shapes, nodes = self._piece(chunk)
            for at, raw in enumerate(nodes):
                yield node(first + at, names, shapes, raw)

    # Inside.

    def _search(self, wanted: str) -> Iterator[Hit]:
        for failure in self.exceptions:
            if wanted in failure.message.casefold():
                yield Hit(f"exception {failure.type_name}", failure.message)
        holders: list[tuple[str, tuple[Frame, ...]]] = [
            (f"thread {item.name or item.id}", item.frames) for item in self.threads
        ]
        holders += [(f"task {item.name}", item.frames) for item in self.tasks]
        holders += [(f"exception {item.type_name}", item.frames) for item in self.exceptions[1:]]
        for owner, frames in holders:
            for at, frame in enumerate(frames):
                for name, value in frame.locals:
                    if wanted in name.casefold() or _contains(value, wanted):
                        yield Hit(f"{owner}, frame {at} {frame.function}, {name}", value)
        for inert in self.objects():
            if inert.text is not None and _contains(inert.text, wanted):
                yield Hit(f"#{inert.number} {inert.type_name}", inert.text, inert.number)
            for way, value in inert.children():
                if wanted in way.casefold() or _contains(value, wanted):
                    yield Hit(f"#{inert.number} {inert.type_name}{way}", value, inert.number)
        for record in self.logs:
            if wanted in as_text(record.get("text")).casefold():
                yield Hit(f"log {as_text(record.get('logger'))}", as_text(record.get("text")))
        for name, data in self.plain_parts().items():
            for where, key, value in _leaves(data, name, "", _DEEPEST) if name != kinds.PARTS[kinds.LOGS] else ():
                if wanted in key.casefold() or (isinstance(value, str) and wanted in value.casefold()):
                    yield Hit(where, value)

    def _step(self, current: Value, step: Any, where: str) -> Value:
        if isinstance(current, Missing):
            raise NotInDump(f"{where} is not in the dump: {current.reason}")
        if isinstance(current, TextOnly):
            raise NotInDump(
                f"of {where} only its text is known, as it was read from outside: nothing inside can be named"
            )
        if not isinstance(current, Ref):
            missed = f"attribute {step[0]!r}" if step[0] is not None else f"item {step[1]!r}"
            raise NotInDump(f"{where} is {type(current).__name__} and has no {missed} in the dump")
        inert = self.object(current)
        if inert.kind == kinds.CUT:
            raise NotInDump(f"{where} ({inert.type_name}) was not stored: {inert.reason}")
        name, key = step
        if name is not None:
            found = inert.attribute(name)
            if isinstance(found, Missing) and found.reason == "no such attribute":
                names = ", ".join(attribute for attribute, _value in inert.attributes[:20])
                raise NotInDump(
                    f"{where} ({inert.type_name}) has no attribute {name!r}", hint=f"It has: {names}" if names else ""
                )
            return found
        if inert.pairs or inert.kind == kinds.DICT:
            for known, value in inert.pairs:
                if type(known) is type(key) and known == key:
                    return value
            raise NotInDump(f"{where} ({inert.type_name}) has no key {key!r}" + _cut_note(inert))
        if isinstance(key, int) and -len(inert.items) <= key < len(inert.items) and (key >= 0 or inert.total is None):
            return inert.items[key]
        raise NotInDump(f"{where} ({inert.type_name}) has no item {key!r}" + _cut_note(inert))

    @cached_property
    def _ranges(self) -> list[tuple[int, int, Chunk]]:
        found = []
        for chunk in self._reader.of(kinds.OBJECTS):
            payload = self._payload(chunk)
            if isinstance(payload, dict) and isinstance(payload.get("nodes"), list):
                first = as_int(payload.get("first"))
                found.append((first, len(payload["nodes"]), chunk))
        return found

    def _piece(self, chunk: Chunk) -> tuple[Any, Any, Any]:
        piece = self._pieces.pop(chunk.offset, None)
        if piece is None:
            self._decoded[chunk.offset] = self._decoded.get(chunk.offset, 0) + 1
            if self._decoded[chunk.offset] > _DECODED:
                return None, None, []
            payload = self._payload(chunk)
            payload = payload if isinstance(payload, dict) else {}
            piece = (payload.get("types"), payload.get("shapes"), payload.get("nodes", []))
            self._sizes[chunk.offset] = chunk.raw
        self._pieces[chunk.offset] = piece
        while len(self._pieces) > 1 and sum(self._sizes.values()) > _KEPT_BYTES:
            self._sizes.pop(self._pieces.popitem(last=False)[0])
        return piece

    def _payload(self, chunk: Chunk) -> Any:
        try:
            return self._reader.payload(chunk)
        except CorruptValue as error:
            self._problems.setdefault(chunk.kind, error.message)
            return None

    def _all(self, kind: str) -> Iterator[Any]:
        return (self._payload(chunk) for chunk in self._reader.of(kind))

    def _first(self, kind: str) -> dict[str, Any]:
        for payload in self._all(kind):
            if isinstance(payload, dict):
                return payload
        return {}

    def _expected_counts(self) -> Counter[str]:
        listed = [item[0] for item in as_list(self.index.get("chunks")) if isinstance(item, list) and item]
        return Counter(kind for kind in listed if isinstance(kind, str))


def open_dump(path: str | os.PathLike[str]) -> Dump:
    """Open a dump. NotADump when the file is something else; one that was cut opens."""
    return Dump(path)


def plain_children(data: Any) -> Iterator[tuple[str, Any]]:
    """What a plain container holds, with the way to it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield str(key), value
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield f"[{index}]", value


def _leaves(data: Any, where: str, key: str, depth: int) -> Iterator[tuple[str, str, Value]]:
    if not isinstance(data, dict | list):
        known = data is None or isinstance(data, bool | int | float | str | bytes)
        yield where, key, data if known else Missing("broken entry")
    elif depth > 0:
        for way, value in plain_children(data):
            yield from _leaves(value, where + (way if way.startswith("[") else f" {way}"), way, depth - 1)


def _thread_note(thread: Thread) -> str:
    told = {"failing": thread.failing, "took the dump": thread.current and not thread.failing, "main": thread.main,
            "daemon": thread.daemon}  # fmt: skip
    return ", ".join(word for word, holds in told.items() if holds)


def _contains(value: Any, wanted: str) -> bool:
    if isinstance(value, str):
        return wanted in value.casefold()
    if isinstance(value, bytes):
        return wanted.encode() in value.lower()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return wanted == repr(value)
    return isinstance(value, Missing) and wanted in value.type_name.casefold()


def _cut_note(inert: Inert) -> str:
    return f"; {inert.total} items, of which {len(inert.items) + len(inert.pairs)} were stored" if inert.total else ""
