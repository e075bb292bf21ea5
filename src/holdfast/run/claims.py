"""What is left: writes that happened, and that what is loaded does not know of.

Owns the one guard against doing things again where nobody replays a program: a plain loop, and a framework that has a
loop of its own. Calls are recognised by tool and fingerprint, and in a task of somebody else's loop by the task and by
how many such calls its execution has made before. What always holds: a write that is left answers at most one call of
an execution; while such writes of a tool are left, that tool is not called with other arguments; a checkpoint that is
taken meanwhile says which are left, so that the next load offers them again.

A write of a plain loop is left until a checkpoint is taken after it. One of a task is left until the task has ended and
that is stored: by a checkpoint of the agent, or however the framework stores it (``finished``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadName, BadOption, HoldfastError, MaybeRepeated, NotThawed, command
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed, fetch, stow
from holdfast.run.doubt import settle_all
from holdfast.run.effects import OWN, Standing
from holdfast.run.order import Unordered
from holdfast.run.past import CLAIMED, GUARDED, LOST, TASK, Call, Past, add_to, task_in
from holdfast.run.scope import Host, Lane, Scope, active, now_us, whose
from holdfast.run.steps import Join, Steps, Work
from holdfast.run.tools import TOOLS, Tool

if TYPE_CHECKING:
    from concurrent.futures import Future

    from holdfast.run.runs import Run
    from holdfast.store.engine import Shared

_OTHER = Call("", "", -1)
NOTE = "unclaimed"
"""The note that lists, by number, what was left when a checkpoint was taken. Its name is its place in the line."""
ACCEPTED = "accepted"
"""The note that says which of the writes before it are known, by number; without a value, all. Named as the other."""
RAISED = "raised"
"""The note that says, by the name of a task, that an execution of it has raised: what it read until then, by number,
answers no other."""
NAME_MAX = 200
"""Characters of a task's name: it is part of the path of each of its calls."""
_MARK_DIGITS = 16
_KEPT = 1_000


def _future() -> Future[None]:
    from concurrent.futures import Future  # most programs never need it

    return Future()


class Task:
    """One execution of a task. Its name is the same for every execution of it, and in every process."""

    def __init__(self, name: str, run: object, *, reads: bool = True) -> None:
        self.name = name
        self.run = run  # what is executed now, of which this is a part: it knows what it has done itself
        self.reads = reads  # whether reads that an earlier execution has made are answered
        self.over = False  # it has ended, and its caller knows how
        self._asked: dict[tuple[str, bytes, str], int] = {}

    def count(self, *what: Any) -> int:
        """How many such calls this execution has made before."""
        n = self._asked.get(what, 0)
        self._asked[what] = n + 1
        return n

    def follows(self, other: Task) -> bool:
        """Whether this one does again what the other did: another execution of the same, or of what is around it."""
        return other is not self and (other.run is not self.run or other.name == self.name)


class TaskLane(Lane):
    """The calls of a task. They have no order, so whatever thread or asyncio task makes one uses this lane."""

    __slots__ = ("part", "task_")

    def __init__(self, scope: Loop, task: Task, part: str = "") -> None:
        """``part``: the one of several things that the task was told to do, where it is told so each time."""
        super().__init__(scope, f"{task.name}{TASK}", label=task.name)
        self.task_ = task
        self.part = part.translate(_PLAIN)

    def take(self, what: str = "", fingerprint: bytes = b"") -> str:
        with self.scope.lock:
            n = self.task_.count(what, fingerprint, self.part)
        part = f":{self.part}" if self.part else ""
        return f"{self.prefix}{what}.{fingerprint.hex()[:_MARK_DIGITS]}.{n}{part}"

    def task(self) -> Lane:
        return self

    def mine(self) -> Lane:
        return self

    def own(self, task: Any) -> None: ...


_PLAIN = str.maketrans("./:+", "____")


def part_in(path: str) -> str:
    """The part of its task that a call was made for, if that is known."""
    return path.partition(TASK)[2].partition("/")[0].rpartition(".")[2].partition(":")[2].partition(_AGAIN)[0]


def task_of(lane: Lane | None) -> Task | None:
    """The task that a lane is part of, perhaps inside one of its tools."""
    while lane is not None and not isinstance(lane, TaskLane):
        lane = lane.above
    return lane.task_ if lane is not None else None


class Left:
    """Writes that are left, oldest first, each with the execution of a task here that made or claimed it, if one did.

    What asks for one of a thousand finds it without looking at the others.
    """

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._known: dict[int, tuple[Call, Task | None, list[Any]]] = {}  # by id: where to find each
        self._found: dict[Any, dict[int, Call]] = {}
        self._owned: dict[Any, dict[Task | None, dict[int, Call]]] = {}
        for call in calls:
            self.put(call)

    def __iter__(self) -> Iterator[Call]:
        return iter([call for call, _, _ in self._known.values()])

    def __len__(self) -> int:
        return len(self._known)

    def put(self, call: Call, owner: Task | None = None) -> None:
        """Add a call, or note what has changed about one that is there."""
        self._lose(call)
        self._known[id(call)] = (
            call,
            owner,
            [(call.path,), key_in(call), call.number, call.tool, (call.tool, call.fingerprint)],
        )
        *places, tool, like = self._known[id(call)][2]
        for place in places:
            self._found.setdefault(place, {})[id(call)] = call
        for place in (tool, like):
            self._owned.setdefault(place, {}).setdefault(owner, {})[id(call)] = call

    def remove(self, call: Call) -> None:
        self._lose(call)
        del self._known[id(call)]

    def _lose(self, call: Call) -> None:
        _, owner, places = self._known.get(id(call), (call, None, []))
        for place in places[:-2]:
            self._found[place].pop(id(call))
            if not self._found[place]:
                del self._found[place]
        for place in places[-2:]:
            self._owned[place][owner].pop(id(call))
            if not self._owned[place][owner]:
                del self._owned[place][owner]
            if not self._owned[place]:
                del self._owned[place]

    def at(self, path: str) -> list[Call]:
        return list(self._found.get((path,), {}).values())

    def by_key(self, key: str) -> Call | None:
        return next(iter(self._found.get(key, {}).values()), None)

    def by_number(self, number: int) -> Call | None:
        return next(iter(self._found.get(number, {}).values()), None)

    def of(self, *what: str | tuple[str, bytes], of_others: Task | None = None) -> list[Call]:
        """Calls of tools, or of tools with such arguments; with a task, those that it may have made before."""
        found = [
            call
            for one in what
            for owner, calls in self._owned.get(one, {}).items()
            if owner is None or (of_others is not None and of_others.follows(owner))
            for call in calls.values()
        ]
        return sorted(found, key=lambda call: call.number)


class Loop(Scope):
    """The use of an agent without durable functions; its state is that of a checkpoint with that position.

    The line is read when something depends on it: a program that calls no tool does not pay for it.
    """

    forgets_reads = True  # whether what a task read before the loaded checkpoint answers nobody

    def __init__(self, agent: Host, since: int) -> None:
        # Paths name the length of the line, which no two uses that wrote something share; so keys differ without
        # an incarnation, too.
        super().__init__(agent, 0, Unordered())
        self.lane = Lane(self, f"@{agent.ledger.count}/")
        self._since = since
        self._known = False
        self._open: list[Call] = []
        self._left = Left()  # not claimed yet, and all that tasks do here
        self._noted: list[int] = []  # what the newest note of the line says about that
        self._owner: dict[str, Task] = {}  # of those that tasks have made or claimed here, by key
        self._reads: dict[str, Call] = {}  # what tasks have read, by path
        self._paths: set[str] = set()  # where tasks have made calls
        self._under_way: dict[str, tuple[Future[None], str, Task]] = {}  # by path; with the tool
        self._made: dict[str, str] = {}  # the same by the paths at which they are made -> that of the call
        self._settling: Future[None] | None = None
        self.raised: set[str] = set()  # the tasks whose newest execution here has raised
        self.over: set[str] = set()  # those that have ended since the last checkpoint

    def restart(self, since: int) -> None:
        """The state is that of another checkpoint now: what it does not know is another matter."""
        with self.lock:
            self._since = since
            self._known = False
            self._open, self._left, self._noted = [], Left(), []
            self._owner.clear()
            self._reads.clear()
            self.unsettled.clear()

    def place(self, path: str) -> str:
        return f"in the task {task_in(path)}" if task_in(path) else super().place(path)

    # -- what is left ---------------------------------------------------------------------------------------

    def read(self, past: Past | None = None) -> None:
        """Find out what the loaded checkpoint does not know."""
        with self.lock:
            if self._known:
                return
            past = past if past is not None else Past(self.ledger.recent(self._since))
            self.incarnation = past.incarnation - 1  # a task that is executed again after a rollback has other keys
            self.taken |= past.taken
            gone = self._settled(past)
            # A run that ended without finishing has left what it did to whoever comes next, until that is claimed:
            # a note that was taken since does not list it any more.
            runs = [(call, end) for call, end in past.left(self.agent.origin) if call.number not in gone or call.open]
            asked, noted = _note_at(past, self._since, self)
            ended = [call for call, end in runs if end > asked or call.number in noted]
            # The newest note may be of a checkpoint that was never stored. What it does not say, the next one has to.
            told, listed = _note_at(past, self.ledger.count + 1, self)
            also = [call for call, end in runs if end > told]
            self._noted = sorted({*listed, *(call.number for call in also if not _never_happened(call))})
            for call in ended:
                call.kept = True
            self._open = [call for call in (*ended, *past.loose) if call.open and call.kind == "write"]
            # What was under way when the checkpoint was taken is not known there, either: its outcome came later, or
            # never.
            adopted = {call.intent.key for run in past.runs.values() for call in run.calls.values() if call.intent}
            loose = [call for call in past.loose if call.intent is None or call.intent.key not in adopted]
            left = [
                call
                for call in loose
                if call.kind in GUARDED
                and (max(call.number, call.ended) > self._since or call.open or call.number in noted)
                and (call.number not in gone or call.open)
            ]
            self._left = Left(call for call in (*ended, *left) if not _never_happened(call))
            notes = {name: note for (what, name), note in past.notes.items() if what == RAISED}
            raised = {name: fetch(note.value, self.ledger, self.registry) for name, note in notes.items()}
            for call in past.loose:
                if task_in(call.path):
                    self._paths.add(call.path)
                    asked_since = max(raised.get(task_in(call.path), 0), self._since if self.forgets_reads else 0)
                    if call.read and call.outcome is not None and call.number > asked_since:
                        self._reads[call.path] = call
            self._known = True
            self.loaded(past)

    def _settled(self, past: Past) -> set[int]:
        """The numbers of writes of which somebody said that they are known, and of those that are undone."""
        found: set[int] = set()
        for (what, _), note in past.notes.items():
            if what == ACCEPTED:
                found.update(fetch(note.value, self.ledger, self.registry))
        # A checkpoint may have been taken while a task of the next step had acted. Rolled back to, it has undone that.
        if self.incarnation and any(task_in(call.path) for call in past.loose):
            found.update(one.call.number for one in Standing(self.ledger.records()).effects if one.undone)
        return found

    def loaded(self, past: Past) -> None:
        """What is left was read from the line. Whoever knows of more that is finished can look it up now."""

    def _is_part(self, call: Call) -> bool:
        """Whether it was made inside a call of a task that is left itself, and has an outcome: that one answers."""
        path = call.path
        at = path.find("/", path.find(TASK) + len(TASK)) if TASK in path else -1
        while at >= 0:
            if any(one.outcome is not None for one in self._left.at(path[:at])):
                return True
            at = path.find("/", at + 1)
        return False

    @property
    def unclaimed(self) -> list[Call]:
        """Writes that happened after the loaded checkpoint and have answered no call yet."""
        self.read()
        return [call for call in self._left if call.outcome is not None]

    def forget(self, call: Call) -> None:
        """This one answers nobody."""
        with self.lock:
            if any(one is call for one in self._left):
                self._left.remove(call)

    @property
    def clear(self) -> bool:
        """Whether whoever goes on from a checkpoint that is taken now needs to know of nothing before it."""
        with self.lock:
            self.read()
            return not (self._left or self._open or self._noted or self._paths or self.unsettled)

    def note(self) -> None:
        """A checkpoint is about to be taken: keep in the line what it will not know."""
        with self.lock:
            if not self._known and self.ledger.count <= self._since:
                return
            self.read()
            for call in [call for call in self._left if self.finished(call)]:
                self._left.remove(call)
            if self.over:
                self._reads = {path: call for path, call in self._reads.items() if task_in(path) not in self.over}
                self.over.clear()
            if len(self._owner) + len(self._reads) > _KEPT:
                self._forget()
            left = sorted(call.number for call in self._left)
            if left == self._noted:
                return
            stowed = stow(left, self.registry)
            self.write(rec.Note(now_us(), "", NOTE, str(self.ledger.count), stowed.value), stowed)
            self._noted = left

    def _forget(self) -> None:
        """A process may live for long: let go of what nobody will ask for."""
        needed = {key_in(call) for call in self._left} | {self.key(path) for path in self._made}
        self._owner = {key: task for key, task in self._owner.items() if key in needed}
        self._reads = {path: call for path, call in self._reads.items() if not self.finished(call)}

    def finished(self, call: Call) -> bool:
        """Whether the task that made or claimed it has ended, as the checkpoint will know that is taken now."""
        owner = self._owner.get(key_in(call))
        return owner is not None and owner.over

    def accept(self, keys: Collection[str] | None = None) -> list[Call]:
        """The program knows of these writes, or of all: they answer no call any more. Durable when it returns."""
        with self.lock:
            self.read()
            # What is in doubt stays so: whether it happened is another question than whether it is known.
            settled = [call for call in self._left if call.kind != "write" or not call.open]
            given_up = [call for call in settled if keys is None or (call.intent and call.intent.key in keys)]
            for call in given_up:
                self._left.remove(call)
                # One that is not known to have ended would be offered to whatever state is loaded.
                if call.kind != "write" and call.open:
                    self.write(rec.Done(now_us(), call.run, call.path, "cancelled", of=call.number))
            if given_up:
                stowed = stow(sorted(call.number for call in given_up), self.registry)
                note = rec.Note(now_us(), "", ACCEPTED, str(self.ledger.count), stowed.value)
                self.write(note, stowed, flush=True)
            return given_up

    def decided(self, call: Call) -> None:
        """Somebody has found out about a call: the next one like it gets its result, or is made."""
        with self.lock:
            self.read()
            mine = not call.run or any(one.number == call.number for one in (*self._open, *self.unsettled, *self._left))
            for calls in (self._open, self.unsettled):
                calls[:] = [one for one in calls if one.number != call.number]
            while (known := self._left.by_number(call.number)) is not None:
                self._left.remove(known)
            if mine:
                call.kept = True
                self._left.put(call, self._owner.get(key_in(call)))

    def write(self, record: rec.Record, stowed: Any = None, *, flush: bool = False, soon: bool = False) -> int:
        if not isinstance(record, (rec.Intent, rec.Done, rec.Doubt, rec.Decision)) or not task_in(record.path):
            return super().write(record, stowed, flush=flush, soon=soon)
        with self.lock:  # a checkpoint that is taken meanwhile must not miss it
            number = super().write(record, stowed, soon=flush or soon)
            self._follow(number, record)
        if flush:
            self.ledger.flush()
        return number

    def gather(self, outcome: rec.Done | rec.Decision, stowed: Any = None) -> None:
        if task_in(outcome.path):
            self.write(outcome, stowed)
        else:
            super().gather(outcome, stowed)

    def commit(self, shared: Shared, intent: rec.Intent, done: rec.Done, stowed: Stowed) -> int:
        with self.lock:  # as above
            number = super().commit(shared, intent, done, stowed)
            if task_in(intent.path):
                self._follow(number, intent)
                self._follow(number + 1, done)
            return number

    def _follow(self, number: int, record: rec.Intent | rec.Done | rec.Doubt | rec.Decision) -> None:
        """A task has done something here: the next execution of it may ask for that."""
        if isinstance(record, rec.Intent):
            call = self._left.by_key(record.key) or Call(record.run, record.path)
            call.path = record.path  # one that another task has begun before is made by this one now
            add_to(call, number, record)
            self._left.put(call, self._owner.get(record.key))
        elif isinstance(record, rec.Done) and not record.of:
            call = self._reads[record.path] = Call(record.run, record.path)
            add_to(call, number, record)
        else:
            found = self._left.by_number(record.of)
            if found is not None:
                add_to(found, number, record)
                if _never_happened(found):
                    self._left.remove(found)

    def keep_lost(self, call: Call) -> None:
        with self.lock:
            self.read()
            if self._left.by_number(call.number) is None:
                self._left.put(call, self._owner.get(key_in(call)))

    # -- what is in doubt -----------------------------------------------------------------------------------

    def settling(self) -> Steps:
        """Find out about what is in doubt, before anything new starts."""
        with self.lock:
            self.read()
            other, open_calls = self._settling, self._open
            if other is None and open_calls:
                self._settling = mine = _future()
        if other is not None:
            yield Join(other)
        elif open_calls:
            try:
                self.unsettled += yield from settle_all(self, open_calls, TOOLS.find)
                self._open = []
            finally:
                self._settling = None
                mine.set_result(None)

    # -- calls ----------------------------------------------------------------------------------------------

    def asked(self, lane: Lane, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Steps:
        task = task_of(lane)
        if not self.agent.whole:
            yield Work(self.agent.check_free)
        if task is None and tool.name.startswith(OWN) and tool.kind == "read":
            return path, None
        if not self._known:
            yield Work(self.read)
        yield from self.settling()
        if task is None:
            return path, self.recorded(path, tool, mark, arguments)
        while (other := self._begin(path, tool, task)) is not None:
            yield Join(other)
        try:
            return self._answered(task, path, tool, mark, arguments)
        except BaseException:
            self.leave_call(path)
            raise

    def recorded(self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Call | None:  # noqa: ARG002 - the fingerprint says it all
        self.agent.check_free()
        if tool.name.startswith(OWN) and tool.kind == "read":
            return None
        with self.lock:
            self.read()
            return self._claim(tool, mark, self._left.of(tool.name, LOST), arguments) if tool.kind in GUARDED else None

    def _begin(self, path: str, tool: Tool, task: Task) -> Future[None] | None:
        """A call that is waited for; None: from now on this one is under way.

        An earlier execution may go on beside this one, and make the very call, or one of which it is not clear yet
        whether it answers this one.
        """
        with self.lock:
            for one, (over, name, other) in self._under_way.items():
                if one == path or (
                    name == tool.name
                    and tool.kind in GUARDED
                    and task.follows(other)
                    and self.may_answer(one, task, path)
                ):
                    return over
            self._under_way[path] = _future(), tool.name, task
            return None

    def leave_call(self, path: str) -> None:
        with self.lock:
            mine = self._under_way.pop(path, None)
            self._made = {made: asked for made, asked in self._made.items() if asked != path}
        if mine is not None:
            mine[0].set_result(None)

    def _answered(
        self, task: Task, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]
    ) -> tuple[str, Call | None]:
        """What is recorded for a call of a task, and the path at which it is made if nothing is."""
        asked = path
        with self.lock:
            if tool.kind not in GUARDED:
                read = self._reads.get(path) if task.reads else None
                return path, read if read is not None and read.fingerprint == mark and read.tool == tool.name else None
            call = self._found(task, path, tool, mark)
            if call is None:
                others = self._left.of(tool.name, LOST, of_others=task)
                stops = [one for one in others if self.is_left(one, task, path) and self.stops(one, task)]
                self._check_repeated(tool, stops, arguments)
            if call is not None and call.kind == "write" and call.open:  # it ended without an outcome
                self.unsettled += [call] if all(one.number != call.number for one in self.unsettled) else []
                self.check_settled()
            if call is None:
                # A task that is executed again though it has finished acts anew, which is another effect.
                path = path if path not in self._paths else f"{path}{_AGAIN}{self.ledger.count}"
                self._paths.add(path)
                self._made[path] = asked
                self._owner[self.key(path)] = task
                return path, None
            if call.path != path and call.outcome is not None:  # otherwise it is made again, and says itself where
                self.write(rec.Note(now_us(), "", CLAIMED, key_in(call), None, path), flush=True)
                call.path = path
            self._owner[key_in(call)] = task
            self._left.put(call, task)
            return path, call

    def _found(self, task: Task, path: str, tool: Tool, mark: bytes) -> Call | None:
        """The call that answers one of a task: its own, if there is one."""
        like = (tool.name, mark)
        own = [call for call in self._left.at(path) if (call.tool, call.fingerprint) == like]
        for calls in (own, self._left.of(like, of_others=task)):
            found = next((call for call in calls if self.is_left(call, task, path)), None)
            if found is not None:
                return found
        return None

    def is_left(self, call: Call, task: Task, path: str) -> bool:
        """Whether a task that calls at this path may have made this call before: what it is part of is done again."""
        owner = self._owner.get(key_in(call))
        if (owner is not None and not task.follows(owner)) or self._is_part(call):
            return False
        return self.may_answer(call.path, task, path)

    def may_answer(self, made: str, task: Task, path: str) -> bool:  # noqa: ARG002 - a framework may know more
        """Whether a call that an earlier execution made at one path can be that of a task at another."""
        return True

    def stops(self, call: Call, task: Task) -> bool:  # noqa: ARG002 - as above
        """Whether one that is left stops other calls of its tool, too: nobody else will ask for it."""
        return True

    def kept(self, tool: Tool, mark: bytes, arguments: dict[str, Any], own: Mapping[str, Call]) -> Call | None:
        """The same for a call in a run: what a plain loop left can answer it, or a run that ended before it.

        ``own`` are the recorded calls of the run itself, should it have ended and be resumed.

        One whose record is lost, and which was made as somebody has found out, is perhaps this one.
        """
        if tool.kind not in GUARDED:
            return None
        with self.lock:
            self.read()
            same = [call for call in self._left if call.tool == tool.name and (call.kept or _of_loop(call))]
            # Those of the run itself have positions.
            same = [call for call in same if not call.run or own.get(call.path, _OTHER).number != call.number]
            return self._claim(tool, mark, [*same, *(call for call in self._left if call.tool == LOST)], arguments)

    def _claim(self, tool: Tool, mark: bytes, same: list[Call], arguments: dict[str, Any]) -> Call | None:
        for call in same:
            if call.fingerprint == mark:
                self._left.remove(call)
                return call
        self._check_repeated(tool, same, arguments)
        return None

    def _check_repeated(self, tool: Tool, calls: list[Call], arguments: dict[str, Any]) -> None:
        # Other agents are known by their names: what else one of them does is no repetition.
        own = tool.name.startswith(OWN)
        known = [call for call in calls if call.outcome is not None and not (call.run and own)]
        if known:
            raise self._maybe_repeated(tool, known, arguments)

    def around(self, lane: Lane, path: str, tool: Tool, when: str) -> None:  # noqa: ARG002 - a run needs them
        """A plain loop is never saved at a call: what it makes of the answer is not in its state yet."""
        if tool.checkpoint is not None and when == "before":
            raise BadOption(
                f"{tool.name} asks for checkpoints, and a plain loop takes its own; it was not called",
                hint="It alone knows what it has made of the calls before: call agent.step(), or use agent.run(...).",
            )
        if when == "before" and tool.kind in GUARDED and task_of(lane) is None:
            self.agent.handle._pace.acting()

    def check_settled(self, tool: Tool | None = None) -> None:
        if tool is None or tool.kind != "read" or not tool.name.startswith(OWN):  # the time can be asked for
            super().check_settled()

    settling_words = "agent.accept(effect)"
    """How a program says that it knows what is left."""

    def _maybe_repeated(self, tool: Tool, calls: list[Call], arguments: dict[str, Any]) -> MaybeRepeated:
        effects = tuple(map(self.effect_of, calls))
        before = "; ".join(f"{effect.id} at {effect.at:%H:%M:%S} with {_told(effect.args)}" for effect in effects[:3])
        now = _told(tool.binder.completed(arguments))
        what = f"{tool.name} was called before, and what was loaded does not know that: {before}, now with {now}"
        if any(call.tool == LOST for call in calls):
            what = f"something was done of which the record is lost, and {tool.name} may be that"
        return MaybeRepeated(
            f"{what}; it was not called",
            unclaimed=effects,
            hint="Declare arguments that differ each time as volatile=(...), make the same call again to get its"
            f" result, or say that what happened is known: {self.settling_words},"
            f" or {command('effects', 'accept', whose(self.agent))}.",
        )


_AGAIN = "+"
_SHOWN = 100


def _told(arguments: dict[str, Any]) -> str:
    """Arguments in an error: as much of them as a person reads."""
    text = ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items())
    return f"({text})" if len(text) <= _SHOWN else f"({text[:_SHOWN]}...)"


def _note_at(past: Past, position: int, place: Scope | Host) -> tuple[int, list[int]]:
    """The newest note of what was left before this position of the line: where it is, and the numbers in it."""
    notes = [(int(name), note) for (what, name), note in past.notes.items() if what == NOTE]
    newest = max((entry for entry in notes if entry[0] < position), key=lambda entry: entry[0], default=None)
    return (newest[0], fetch(newest[1].value, place.ledger, place.registry)) if newest is not None else (-1, [])


def left_at(past: Past, position: int, place: Scope | Host) -> list[int]:
    """The numbers of calls that a checkpoint at this position in the line does not know, though they came before it."""
    return _note_at(past, position, place)[1]


def key_in(call: Call) -> str:
    """The key of a call's effect, which it keeps whoever claims it."""
    return call.intent.key if call.intent is not None else ""


def _of_loop(call: Call) -> bool:
    """Whether it was made in plain use, by no task of a framework."""
    return not call.run and not task_in(call.path)


def _never_happened(call: Call) -> bool:
    """Whether a call can be left alone. One that may be repeated is open again after a failure, with its key."""
    if call.done is None or call.done.how in {"value", "lost", "fallback"}:
        return False
    if call.kind == "write":
        return True
    call.done = None
    return False


def adopt(run: Run, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Call | None:
    """The standing effect that answers this call, now recorded at its position; None when there is none."""
    loop = run.host.loop
    found = loop.kept(tool, mark, arguments, run.past.calls)
    if found is None or found.intent is None or found.outcome is None:
        return found  # one without an outcome is made again, with its key
    intent, ended = _again(found, found.intent, run.run_id, path, run.agent.generation)
    call = Call(run.run_id, path)
    with run.lock:
        number = run.ledger.append_both(intent, ended)
        run.order.enter(path)
    add_to(call, number - 1, intent)
    add_to(call, number, ended(number - 1))
    return call


def left_standing(calls: Iterable[Call], count: int, generation: int) -> list[rec.Record]:
    """The records by which effects that a rollback leaves standing are left for whoever goes on from its target.

    As if it had not been: what is in doubt stays so. ``count``: how many records there are before these.
    """
    made: list[rec.Record] = []
    for call in calls:
        if call.intent is None:
            raise NotThawed(f"what was recorded of {call.tool} is lost: whoever goes on could do it again")
        before = count + len(made)
        path = call.path if not call.run else f"@{before}/0"
        intent, ended = _again(call, call.intent, "", path, generation)
        made.append(intent)
        if call.done is not None or call.outcome is not None:
            made.append(ended(before + 1))
    return made


def _again(
    call: Call, old: rec.Intent, run: str, path: str, generation: int
) -> tuple[rec.Intent, Callable[[int], rec.Done]]:
    """The records that say once more, in another place, what is known of a call: its intent, and by its number the end.

    With the number of the attempt that it was: a greater one would say that it was called again. Should the outcome of
    a transaction be lost some day, it is in doubt here, as a write.
    """
    kind = "write" if old.kind == "transaction" else old.kind
    intent = rec.Intent(
        now_us(), run, path, old.tool, kind, old.args, old.fingerprint, old.key, old.attempt, generation
    )
    told = call.outcome or call.done
    how, fault = (told.how, told.fault) if isinstance(told, rec.Done) else ("value", None)
    done = rec.Done(now_us(), run, path, how, fault=fault, started=old.at)
    done.value = told.value if told is not None else None

    def ended(number: int) -> rec.Done:
        done.of = number
        return done

    return intent, ended


@contextmanager
def executing(loop: Loop, name: str) -> Iterator[None]:
    """Inside, calls belong to an execution of the task of that name."""
    if not name or len(name) > NAME_MAX or TASK in name or name != name.strip():
        raise BadName(f"a task's name is 1 to {NAME_MAX} characters without {TASK!r}, not {name!r:.60}")
    task = Task(name, loop, reads=name not in loop.raised)
    loop.raised.discard(name)
    try:
        with active(TaskLane(loop, task)):
            yield
    except Exception:  # what was read may have been the cause: the next execution reads again
        loop.raised.add(name)
        with suppress(HoldfastError):  # the program has its own error
            stowed = stow(loop.ledger.count, loop.registry)
            loop.write(rec.Note(now_us(), "", RAISED, name, stowed.value), stowed)
        raise
    task.over = True
    loop.over.add(name)
