"""What a line says: the fold of its records.

Owns every conclusion that is drawn from records: which runs there are and how they ended, what was called where with
what outcome, in which order calls completed, what is in doubt. Writes nothing and asks nobody. What always holds: the
same records give the same conclusions; what a rollback left behind is kept apart, for lists; a record that is lost may
have said that something happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.codec.wire import collector_paused
from holdfast.run import records as rec
from holdfast.run.records import Record, Value

SETTLED = frozenset({"value", "error", "lost", "fallback", "stopped"})
"""Outcomes that were given to the program."""

GUARDED = frozenset({"write", "idempotent", "transaction"})
"""Kinds of calls that are not simply made again."""

AFTER_INTENTS = (rec.Done, rec.Doubt, rec.Decision, rec.Progress)
_OF_CALLS = (rec.Intent, *AFTER_INTENTS)

ROLLED_BACK = "rolled back"
"""How a run has ended that a rollback has taken back, from its beginning, or from its end to somewhere in it."""
OPEN = frozenset({"", "waiting", "attention"})
"""Conditions of runs that have not ended."""
ENDED = frozenset({"failed", "cancelled"})
"""Conditions of runs that ended without finishing: what they had done is left."""

LOST = "?"
"""What a tool or a function is called whose record is lost."""
TASK = "//"
"""Ends the name of a task in the paths of its calls."""
CLAIMED = "claimed"
"""The note that says which task an effect answered a call of: its name is the effect's key, its path the call's."""
_GAP = "records "
"""How the places begin of calls that may have been recorded where records are lost; no other place begins so."""


def task_in(path: str) -> str:
    """The name of the task in whose execution a call was made; empty in runs and plain loops."""
    name, ends, _ = path.partition(TASK)
    return name if ends else ""


class Given(Struct, eq=False):
    """What the newest attempt of a stream has given, while its call had no outcome: values, each a list of items."""

    tool: str
    attempt: int
    number: int = 0  # of the newest record
    at: int = 0
    values: list[Value] = field(default_factory=list)

    def items(self, read: Callable[[Value], Any]) -> list[Any]:
        """All of them, in order."""
        return [item for value in self.values for item in read(value)]


class Call(Struct, eq=False):
    """Everything that is recorded about the call at one position."""

    run: str
    path: str
    number: int = 0  # of its newest intent, or, for a read, of its outcome
    ended: int = 0  # the number of the record that says what came of that
    attempts: int = 0
    intent: rec.Intent | None = None
    done: rec.Done | None = None
    doubt: rec.Doubt | None = None
    decision: rec.Decision | None = None
    progress: Value = None
    read: bool = False
    kept: bool = False  # it stands outside, though the state does not know it
    given: Given | None = None  # of a stream
    caller: Any = None  # what is known about who made it, once somebody has looked (``callers.Caller``)

    @property
    def tool(self) -> str:
        return (self.intent or self.done or _NOTHING).tool

    @property
    def kind(self) -> str:
        return (self.intent or self.done or _NOTHING).kind

    @property
    def args(self) -> Value:
        return (self.intent or self.done or _NOTHING).args

    @property
    def holes(self) -> list[list[Any]] | None:
        """Parts of the arguments that are not written out (``arguments.fill``)."""
        return self.done.holes if self.intent is None and self.done is not None else None

    @property
    def fingerprint(self) -> bytes:
        return (self.intent or self.done or _NOTHING).fingerprint

    @property
    def outcome(self) -> rec.Done | rec.Decision | None:
        """What the program was given, or is to be given; None when the call has to be made, or made again."""
        done = self.done
        if done is not None and done.how in SETTLED and (self.decision is None or done.how != "lost"):
            return done
        if self.decision is not None and self.decision.how in {"found", "done"}:
            return self.decision
        return None

    @property
    def lost(self) -> bool:
        """Whether it returned something that could not be saved, and nobody has said since what it was."""
        return isinstance(self.outcome, rec.Done) and self.outcome.how == "lost"

    @property
    def cancelled(self) -> bool:
        """Whether the program did not wait for an outcome."""
        return self.done is not None and self.done.how == "cancelled"

    @property
    def open(self) -> bool:
        """Whether it was intended and its outcome is not known. A repeatable call is open, too, but not in doubt."""
        return self.intent is not None and self.done is None and self.decision is None

    @property
    def status(self) -> str:
        """In a word, for people."""
        if self.done is not None and (self.decision is None or self.done.how != "lost"):
            names = {"value": "done", "error": "failed", "before": "failed"}
            return names.get(self.done.how, self.done.how)
        if self.decision is not None:
            return {"found": "done", "done": "done"}.get(self.decision.how, "not done")
        return "in doubt" if self.doubt is not None or self.kind == "write" else "open"


_NOTHING = rec.Done(0, "", "", "")
_NO_ARGUMENTS = encode({})

TRACE = "=trace"
"""The place of a run's note that says where it was observed."""


class RunPast:
    """What is recorded about one run."""

    def __init__(self, number: int, begin: rec.Begin) -> None:
        self.number = number
        self.newest = number  # of its newest record
        self.begin = begin
        self.end: rec.End | None = None
        self.ended = 0  # the number of that
        self.back = False  # a rollback brought the branch into the middle of it, and nobody has resumed it since
        self.checkpoints = {begin.start}  # every one that was taken in it
        self.calls: dict[str, Call] = {}
        self.saved: dict[str, rec.Saved] = {}
        self.waits: dict[str, rec.Wait] = {}
        self.streams: dict[str, Given] = {}
        self.notes: dict[str, rec.Note] = {}  # by path
        self._order: dict[str, None] = {}  # paths in the order in which they completed

    @property
    def id(self) -> str:
        return self.begin.run

    @property
    def status(self) -> str:
        """finished, failed, attention, waiting, cancelled, rolled back; empty while it has not ended."""
        if self.back:
            return ROLLED_BACK
        return self.end.how if self.end is not None else ""

    @property
    def order(self) -> list[str]:
        """Paths in the order in which they completed. Calls inside a tool that completed are not made again."""
        return [path for path in self._order if not self.is_inside(path)]

    @property
    def completed(self) -> Collection[str]:
        """The paths of all calls that have completed."""
        return self._order.keys()

    @property
    def stops(self) -> list[rec.Done]:
        """The records that say that it was told to stop."""
        return [call.done for call in self.calls.values() if call.done is not None and call.done.how == "stopped"]

    @property
    def limit(self) -> int:
        """When its time is over; 0 when it has no limit, or was told to stop before."""
        return self.begin.until if self.begin.until and not self.stops else 0

    def is_inside(self, path: str) -> bool:
        """Whether a position lies inside a call that has an outcome."""
        if "/" not in path:
            return False
        parts = path.split("/")
        for length in range(1, len(parts)):
            if parts[length - 1].isdigit():
                outer = self.calls.get("/".join(parts[:length]))
                if outer is not None and (outer.outcome is not None or outer.cancelled):
                    return True
        return False

    def open_calls(self) -> list[Call]:
        """Calls whose outcome is not known, oldest first."""
        return sorted((call for call in self.calls.values() if call.open), key=lambda call: call.number)

    def add(self, number: int, record: Record) -> None:
        """One more record of this run."""
        self.newest = number
        if isinstance(record, rec.Progress) and record.attempt:
            self._stream(number, record)
        elif isinstance(record, _OF_CALLS):
            self._call(number, record)
        elif isinstance(record, rec.Saved):
            self.saved[record.path] = record
            self.checkpoints.add(record.id)
        elif isinstance(record, rec.Wait):
            self.waits[record.path] = record
            self.end = None
        elif isinstance(record, rec.Note):
            if record.what == "resume":
                self.end, self.back = None, False
            else:
                self.notes[record.path] = record
        elif isinstance(record, rec.Cut):
            gone = set(record.of)
            for path in [path for path, call in self.calls.items() if call.number in gone]:
                del self.calls[path]
                self._order.pop(path, None)
            self._forget_points()
        elif isinstance(record, rec.End):
            self.end, self.ended = record, number
            if record.how == "failed":
                # What made the run fail would make it fail again for ever. Nothing came after it, so it can be done
                # anew. What was cancelled then will not be, should this one go well.
                self.forget_failure()

    def _call(self, number: int, record: rec.Done | rec.Intent | rec.Doubt | rec.Decision | rec.Progress) -> None:
        call = self.calls.get(record.path)
        if call is None:
            call = self.calls[record.path] = Call(record.run, record.path, given=self.streams.get(record.path))
        if call.cancelled or isinstance(record, rec.Intent):  # of an earlier execution; now it is made again
            self._order.pop(record.path, None)
        self.notes.pop(cancelled_at(record.path), None)  # of an earlier one, too
        add_to(call, number, record)
        if call.outcome is not None or call.cancelled:
            self._order.setdefault(record.path)

    def _stream(self, number: int, record: rec.Progress) -> None:
        given = self.streams.get(record.path)
        if given is None or given.attempt != record.attempt:
            given = self.streams[record.path] = Given(record.tool, record.attempt)
            if record.path in self.calls:
                self.calls[record.path].given = given
        given.number, given.at = number, record.at
        if record.value is not None:
            given.values.append(record.value)

    def parts(self) -> dict[str, RunPast]:
        """What is recorded, apart for each part of the first step of its positions: the items of a batch."""
        found: dict[str, RunPast] = {}

        def part(path: str) -> RunPast:
            name = path.partition("/")[0]
            if name not in found:
                found[name] = RunPast(self.number, self.begin)
            return found[name]

        for path, call in self.calls.items():
            part(path).calls[path] = call
        for path, number in self._order.items():
            part(path)._order[path] = number
        for path, wait in self.waits.items():
            part(path).waits[path] = wait
        for path, note in self.notes.items():
            part(path).notes[path] = note
        for path, given in self.streams.items():
            part(path).streams[path] = given
        return found

    def _forget_points(self) -> None:
        """From somewhere on the program does something else: its state need not be what it was at its safe points."""
        self.saved = {path: saved for path, saved in self.saved.items() if not by_itself(path)}

    def forget_failure(self, told: str = "") -> None:
        """What made it fail is done anew. ``told`` is where it says that it failed."""
        self._forget_points()
        self.calls.pop(told, None)
        self._order.pop(told, None)
        for path in self._forget_last({"cancelled", "error"}):
            self.waits.pop(path, None)  # one that timed out is begun anew

    def resumed(self, at: int, by: str = "", asked: Value = None) -> rec.Note:
        """The run is resumed: what is to be recorded about that. From then on it owns its branch.

        ``asked``: the person who has asked for it.
        """
        before = self.status
        self.end, self.back = None, False
        return rec.Note(at, self.id, "resume", before, asked, path=by)

    def left(self) -> list[Call]:
        """What it has done, or may have done, to the world outside. What is inside of such a call is part of it."""
        found = {path: call for path, call in self.calls.items() if call.kind in GUARDED and call.intent is not None}
        done = {path for path, call in found.items() if call.outcome is not None}
        return [call for path, call in found.items() if not done.intersection(_around(path))]

    def _forget_last(self, hows: Collection[str]) -> list[str]:
        """Forget the calls that completed last, as far as all of them ended in one of these ways."""
        gone = []
        for path in reversed(self._order):
            done = self.calls[path].done
            if done is None or done.how not in hows:
                break
            gone.append(path)
        for path in gone:
            del self.calls[path], self._order[path]
        return gone


def cancelled_at(path: str) -> str:
    """The path of the note that says that whoever made the call at ``path`` was cancelled before he got its outcome."""
    return f"{path}!cancelled"


def by_itself(path: str) -> bool:
    """Whether the program did not ask for the checkpoint at this position: another execution may take none there."""
    return "!" in path


def _around(path: str) -> Iterator[str]:
    """The positions that a position may lie inside of."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def filled(left: Mapping[int, Record], lost: Sequence[int], line: int) -> Iterator[tuple[int, Record]]:
    """The records of a line with their numbers, those that are lost replaced by intents of writes.

    One that a later record speaks of is the intent of that call. The others may have been anything: each stretch of
    them is one call outside of runs, of which nobody knows whether it was made.
    """
    told: dict[int, tuple[str, str]] = {}
    for record in left.values():
        if isinstance(record, AFTER_INTENTS) and not record.path.startswith(_GAP):
            told.setdefault(record.of, (record.run, record.path))
    gaps: dict[int, int] = {}
    for number in lost:
        if number not in told:
            first = next(reversed(gaps), 0)
            gaps[first if gaps.get(first) == number - 1 else number] = number
    made = {first: ("", f"{_GAP}{first} to {last}") for first, last in gaps.items()}
    places = {number: told[number] for number in lost if number in told} | made
    at = next((record.at for record in left.values()), 0)
    for number in sorted((*left, *places)):
        if number in places:
            run, path = places[number]
            key = digest_of("holdfast.lost", encode([line, number])).hex()[:32]
            yield number, rec.Intent(at, run, path, LOST, "write", None, b"", key)
            continue
        record = left[number]
        at = record.at
        decided = record.path if isinstance(record, rec.Decision) else ""
        if not decided.startswith(_GAP) or ("", decided) in made.values():
            yield number, record  # a decision says nothing about a gap that has grown since


def _lasts(record: Record, back: rec.RolledBack) -> bool:
    """Whether a rollback leaves it alone, though it came after the target.

    What an agent knows about the world outside is not part of its state; nor is the outcome of a call that was under
    way when the target was made. And that the target was made at its position is part of the target.
    """
    if isinstance(record, rec.Note):
        return not record.run
    if isinstance(record, AFTER_INTENTS):
        return 0 < record.of <= back.to
    return isinstance(record, rec.Saved) and record.id == back.id


def add_to(call: Call, number: int, record: Record) -> None:
    """One more record about a call."""
    if isinstance(record, rec.Intent):
        call.intent, call.number = record, number
        call.attempts = record.attempt
        call.done = call.doubt = call.decision = None
        call.ended = 0
    elif isinstance(record, rec.Done):
        call.done, call.ended = record, number
        if not record.of:
            call.read, call.number = True, number
    elif isinstance(record, rec.Doubt):
        call.doubt = record
    elif isinstance(record, rec.Decision):
        call.decision, call.ended = record, number
    elif isinstance(record, rec.Progress) and not record.attempt:
        call.progress = record.value


class Past:
    """What a line says: all of it, or from where on it matters (``Line.recent``)."""

    def __init__(self, records: Iterable[tuple[int, Record]] = ()) -> None:
        self.runs: dict[str, RunPast] = {}
        self.begun: set[str] = set()  # the ids of all runs, also of those that were rolled back
        self.incarnation = 1
        self.loose: list[Call] = []  # calls outside of runs, in order
        self.former: list[RunPast] = []  # runs that were rolled back to before their beginning
        self.voided: list[Call] = []  # calls that a rollback has left behind
        self.notes: dict[tuple[str, str], rec.Note] = {}  # what and name -> the newest
        self.taken: set[bytes | int] = set()  # signals that were received: no rollback gives one back
        self._entries: list[tuple[int, Record]] = []
        self._loose: dict[str | int, Call] = {}  # the same by key, and by the numbers of their intents
        self._replaced: list[RunPast] = []  # begun again since, under the same id
        self._back = 0  # the number of the newest rollback
        self._gap = False  # whether records are lost before those that are folded now
        with collector_paused():
            for entry in records:
                self._take(entry)
            for number, record in self._entries:
                self._fold(number, record)
        for run in self.runs.values():
            run.back = run.newest < self._back and run.status in OPEN and run.begin.kind != "rollback"

    @property
    def entries(self) -> Sequence[tuple[int, Record]]:
        """The records that no rollback has voided, with their numbers."""
        return self._entries

    @property
    def newest(self) -> tuple[int, int]:
        """The number and the time of the newest record that no rollback has voided; zeros when there is none."""
        return next(
            (
                (number, record.at)
                for number, record in reversed(self._entries)
                if not isinstance(record, rec.Note) or record.run
            ),
            (0, 0),
        )

    def goes_beyond(self, to: int, checkpoint: bytes) -> bool:
        """Whether anything has been recorded that a rollback to this checkpoint would void."""
        back = rec.RolledBack(0, "", to, checkpoint)
        return any(number > to and not _lasts(record, back) for number, record in reversed(self._entries))

    def _take(self, entry: tuple[int, Record]) -> None:
        record = entry[1]
        if isinstance(record, rec.Done) and record.event:
            self.taken.add(record.event)
        if isinstance(record, rec.Begin):
            if not self._entries and entry[0] > 1:  # nothing before it matters, and this is left of it
                self.taken.update(record.taken or ())
            # One that is done anew has another, so that its calls have other keys.
            self.incarnation = max(record.life, self.incarnation)
            self.begun.add(record.run)
        if not isinstance(record, rec.RolledBack):
            self._entries.append(entry)
            return
        self.incarnation += 1
        self._back = entry[0]
        stays: list[tuple[int, Record]] = []
        left: list[tuple[int, Record]] = []
        for one in self._entries:
            (stays if one[0] <= record.to or _lasts(one[1], record) else left).append(one)
        self._entries = stays
        gone = Past(left)
        self.voided += [*gone.voided, *gone.calls()]
        for run in (*gone._replaced, *gone.runs.values()):
            if run.begin.kind != "rollback":  # of these the log tells
                fault = run.end.fault if run.end is not None and run.end.how == "failed" else None
                run.end = rec.End(record.at, run.id, ROLLED_BACK, fault=fault)
                self.former.append(run)

    @property
    def every_run(self) -> list[RunPast]:
        """All runs, oldest first: those that were rolled back, or begun once more under the same id, too."""
        return sorted([*self.former, *self._replaced, *self.runs.values()], key=lambda run: run.number)

    def _fold(self, number: int, record: Record) -> None:
        if isinstance(record, rec.Note):
            self.notes[record.what, record.name] = record
            if record.what == CLAIMED and record.name in self._loose:
                self._loose[record.name].path = record.path
        run = self.runs.get(record.run)
        if run is not None and isinstance(record, rec.Begin):
            self._replaced.append(self.runs.pop(record.run))
            run = None
        if run is None and record.run and self._gap and not isinstance(record, rec.Begin):
            # Its beginning is lost. What it has done must not be done by another one.
            run = self.runs[record.run] = RunPast(number, rec.Begin(record.at, record.run, LOST, _NO_ARGUMENTS, b""))
        if run is not None:
            run.add(number, record)
        elif isinstance(record, rec.Begin):
            self.runs[record.run] = RunPast(number, record)
        elif isinstance(record, rec.Intent):
            # Outside of runs places say nothing: one that is tried again, or made again after a restart, has its key.
            call = self._loose.get(record.key) or Call(record.run, record.path)
            if record.key not in self._loose:
                self.loose.append(call)
            self._loose[record.key] = self._loose[number] = call
            call.path = record.path
            self._gap = self._gap or record.tool == LOST
            add_to(call, number, record)
        elif isinstance(record, rec.Done) and not record.of:
            call = Call(record.run, record.path)
            add_to(call, number, record)
            self.loose.append(call)
        elif isinstance(record, AFTER_INTENTS) and record.of in self._loose:
            add_to(self._loose[record.of], number, record)

    def calls(self) -> Iterator[Call]:
        """Every call, those of runs first."""
        for run in (*self._replaced, *self.runs.values()):
            yield from run.calls.values()
        yield from self.loose

    def owner(self, origin: int = 0) -> RunPast | None:
        """The run, the batch or the rollback that has not ended: nothing else is begun, done or saved on its branch.

        One that the branch was begun in the middle of (after so many records), or that a rollback has brought it into,
        owns it when it is resumed there.
        """
        left = [run for run in self.runs.values() if run.status in OPEN and run.newest > origin]
        return next((run for run in reversed(left) if run.begin.kind == "rollback"), left[-1] if left else None)

    @property
    def last(self) -> RunPast | None:
        """The run that was begun last."""
        return next((run for run in reversed(self.runs.values()) if run.begin.kind not in {"map", "rollback"}), None)

    def left(self, origin: int = 0) -> Iterator[tuple[Call, int]]:
        """What runs of this branch that ended without finishing have done, each with the number of that end.

        What has answered a call since is written down there, with its key, and is a matter of that one.
        """
        newest: dict[str, Call] = {}
        for call in self.calls():
            if call.intent is not None and call.number >= newest.get(call.intent.key, call).number:
                newest[call.intent.key] = call
        for run in (*self._replaced, *self.runs.values()):
            # What came of a failed batch was returned, item by item.
            if run.status == "failed" and run.begin.kind == "map":
                continue
            if run.status in ENDED and run.ended > origin and run.begin.kind != "rollback":
                for call in run.left():
                    if call.intent is not None and newest[call.intent.key] is call:
                        yield call, run.ended
