"""Lists of runs and effects, for people and for whoever decides what to do next.

Owns what is said about a run, finding a call by what a person names it by, and what matters after a failure. Writes
nothing. What always holds: what is listed is folded from the line at that moment; values are read only when they are
asked for, and for a dump as inert data, so that no class of the program is asked for anything, and within bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec.document import Document
from holdfast.codec.values import decode
from holdfast.errors import BadOption, Damaged, RunEnded, RunUnfinished, UnknownAgent, UnknownTool
from holdfast.run import opened, waiting
from holdfast.run import records as rec
from holdfast.run.arguments import Passed, fetch, fill
from holdfast.run.callers import is_under_way
from holdfast.run.cancelling import asked_by
from holdfast.run.durables import DURABLES, arguments_of, call_of, result_of_run
from holdfast.run.effects import SAVED, SPAWN, Attempt, Effect, Standing
from holdfast.run.line import Line
from holdfast.run.opened import REFUSING, is_over
from holdfast.run.past import OPEN, ROLLED_BACK, TRACE, Call, Past, RunPast
from holdfast.run.queues import ahead
from holdfast.run.records import STOP, Decision, Done, End, LetGo, Note, RolledBack, Saved, Value, decode_record
from holdfast.run.scope import effect_of, now_us
from holdfast.run.waiting import Signal, due, open_waits
from holdfast.store import catalog, rows
from holdfast.store.rows import Agent, Branch, Open, Point, link

if TYPE_CHECKING:
    from holdfast.agent.store import Store

STATUSES = (
    "queued", "running", "interrupted", "waiting", "needs attention", "failed", "finished", "cancelled", "rolled back",
)  # fmt: skip
WORDS = {"attention": "needs attention"}
OVER = frozenset({"finished", "failed", "cancelled", ROLLED_BACK})
"""Runs that have ended."""
_LAST_ACT = 3
"""Records of a last act: the checkpoint was taken, in async code that it was written, and the end."""
_LOOKS = 8
"""How often a line is read again that others write meanwhile, and let go of."""
SIGNAL_STATUSES = ("pending", "taken", "dropped", "ended")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One line of the list of runs.

    ``status``: ``queued``, ``running``, ``interrupted``, ``waiting``, ``needs attention``, ``failed``, ``finished``,
    ``cancelled`` or ``rolled back``. One that waits does so ``until`` a time, for a ``signal``, or for the agents that
    ``waits_for`` names.
    ``due``: it was put off, and what it waits for has come: it can be resumed.
    ``limit`` is when its time is over; ``cancelled_by``: who has cancelled it, though it has not been told so yet.
    ``queue``: where it waits for its turn, if it was submitted.
    ``let_go``: what it was given, or what it returned, was let go, and reading that raises ``ResultForgotten``.
    """

    agent: str
    branch: str
    id: str
    function: str
    kind: str
    status: str
    began: datetime
    ended: datetime | None
    until: datetime | None
    signal: str
    error: str
    waits_for: tuple[str, ...]
    due: bool
    limit: datetime | None
    cancelled_by: str
    queue: str
    partition: str
    priority: int
    let_go: bool
    _args: Callable[[], dict[str, Any]] = field(repr=False, compare=False)
    _result: Callable[[], Any] = field(repr=False, compare=False)
    _trace: Callable[[], str] = field(repr=False, compare=False)
    _ahead: Callable[[], int] = field(repr=False, compare=False)
    _left: Callable[[], bool] = field(repr=False, compare=False)
    _last: bool = field(repr=False, compare=False)  # no other run of its branch was begun since

    @property
    def trace(self) -> str:
        """Where it was observed last, as a ``traceparent``; empty when nobody did."""
        return self._trace()

    @property
    def left(self) -> bool:
        """Whether the next worker that has its function goes on with it by itself, as soon as it can go on.

        Not with one that came with a branch or from elsewhere, nor with one that needs attention: ``store.resume``
        leaves such a run to a worker.
        """
        return self.status not in OVER and self._left()

    @property
    def ahead(self) -> int | None:
        """How many runs stand before one that is queued, in its queue and its partition; None for all others."""
        return self._ahead() if self.status == "queued" else None

    @property
    def args(self) -> dict[str, Any]:
        """The arguments, by parameter name."""
        return self._args()

    @property
    def result(self) -> Any:
        """What it returned; None while it has not finished."""
        return self._result()

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types, without ``args`` and ``result``."""
        return {**_json(self), "ahead": self.ahead, "trace": self.trace}


@dataclass(frozen=True, slots=True)
class SignalInfo:
    """A signal: ``pending``, ``taken``, ``dropped`` or ``ended`` (with its run).

    ``run`` is empty where any run of the branch may take it.

    ``waits_for``: the names of the signals that are waited for now by the run, or by those that may take it.
    ``repeated``: it was sent before with the same id, so that nothing was sent now.
    """

    agent: str
    branch: str
    run: str
    name: str
    id: str
    status: str
    sent: datetime
    by: str
    waits_for: tuple[str, ...]
    _value: Callable[[], Any] = field(repr=False, compare=False)
    repeated: bool = False

    @property
    def value(self) -> Any:
        """What the run gets."""
        return self._value()

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types, without its value."""
        return _json(self)


def _json(info: RunInfo | SignalInfo) -> dict[str, Any]:
    """What is shown of it, by name."""
    shown = {one.name: getattr(info, one.name) for one in fields(info) if not one.name.startswith("_")}
    return {
        name: value.isoformat() if isinstance(value, datetime) else list(value) if isinstance(value, tuple) else value
        for name, value in shown.items()
    }


class View:
    """A branch's line, as far as lists need it. The state is not touched, so damage there does not hide runs."""

    def __init__(self, store: Store, agent: Agent, branch: Branch) -> None:
        self.name = agent.name
        self.branch_name = branch.name
        self.line = Line(store._db, branch.b)
        self.registry, self.inert = store._registry, store._inert
        self._store, self._agent, self._branch = store, agent, branch
        self._points: list[Checkpoint] | None = None  # newest first

    def read(self, value: Value) -> Any:
        return fetch(value, self.line, self.registry, inert=self.inert)

    def past(self) -> Past:
        return Past(self.line.records())

    def now(self) -> tuple[Past, bool]:
        """What the line says, and whether somebody may be executing a run, both of one moment.

        Whoever ends a run lets go of the branch after that: neither may be seen without the other.
        """
        for _ in range(_LOOKS):
            count, past = self.line.count, self.past()
            at_it = self.at_it()
            if at_it or self.line.count == count:
                break
        return past, at_it

    @property
    def own_from(self) -> int:
        """The number of the first record that is not inherited."""
        return int(self._branch.body.get("start", 0)) + 1

    @property
    def origin(self) -> int:
        return origin_of(self._store._db.view, self._branch)

    @property
    def is_new(self) -> bool:
        """Whether nothing was saved on the branch since it began."""
        return bool(self._branch.id == self._branch.body["from"])

    def at_it(self) -> bool:
        """Whether somebody may be executing a run: nobody but the writer of the branch can."""
        mine = self._store._handles.get(self._branch.b)
        if mine is not None and not mine.closed:
            return bool(mine._host.busy)  # type: ignore[attr-defined] # the handles of this room's store
        with suppress(UnknownAgent):
            branch = self._store._db.view.branch_at(self._branch.b)  # somebody may have become its writer just now
            return self._store._db.leases.alive(branch.uuid, branch.generation)
        return False

    def making(self, call: Call) -> bool:
        """Whether the call may be going on: nobody has said what came of it, and whoever began it has not ended."""
        intent = call.intent
        if intent is None or not call.open or call.doubt is not None or call.number < self.own_from:
            return False
        mine = self._store._handles.get(self._branch.b)
        if mine is not None and not mine.closed:
            return is_under_way(intent)
        with suppress(UnknownAgent):
            # Of a writer before this one nobody knows, or it has ended.
            return self.at_it() and self._store._db.view.branch_at(self._branch.b).generation == intent.generation
        return False

    def signals(self, run: RunPast | None) -> list[Signal]:
        return waiting.visible(self._store._db.view, self._agent, self._branch, run)

    def opened(self) -> list[Open]:
        """The rows of the branch in the table of open runs."""
        return self._store._db.view.opened(self._branch.b)

    @property
    def identity(self) -> tuple[bytes, bytes]:
        """The uuids of the agent and of the branch."""
        return self._agent.uuid, self._branch.uuid

    def around(self, number: int) -> list[Document]:
        """The states of the nearest checkpoints after and before a record."""
        if self._points is None:
            view = self._store._db.view
            points = view.walk(view.branch_at(self._branch.b).head)
            self._points = [Checkpoint.of(self._store, self._agent, point) for point in points]
        after = [one for one in self._points if one._manifest.effects[0] >= number][-1:]
        before = [one for one in self._points if one._manifest.effects[0] < number][:1]
        return [one.state for one in (*after, *before)]

    def other(self, name: str, branch: str) -> View | None:
        """The line of another agent."""
        view = self._store._db.view
        agent = view.agent(name)
        found = view.branch(agent.a, branch) if agent is not None else None
        return View(self._store, agent, found) if agent is not None and found is not None else None


def origin_of(view: catalog.View, branch: Branch) -> int:
    """How many records of its line the checkpoint knows that a branch began with.

    A branch inherits no others, unless it goes on from damage: then what was done is known beyond the state. A fork
    goes on with a run of another branch, and what that one had as its own is its own, too.
    """
    if "fork" in branch.body:
        return int(branch.body["fork"])
    began = bytes(branch.body["from"])
    point = view.find(began) if began else None
    if not began:
        return 0
    return point.manifest.effects[0] if point is not None else int(branch.body.get("start", 0))


def end_at(view: catalog.View, b: int, point: Point) -> rows.End:
    """Where the records of branch ``b`` end that belong to a checkpoint.

    Where it was the last act of a run that has finished, the run's end is one of them: it changed nothing.
    """
    end = view.end_at(point)
    chain = end.chain
    with suppress(Damaged, UnknownAgent):  # its branch may be gone, and what came later is not needed
        line = view.branch_at(b)
        marked = view.line(line.back, end.records, marked=True)
        if not marked or marked[0].i > end.records + _LAST_ACT:
            return end
        for record in view.line(line.line, end.records)[:_LAST_ACT]:
            chain = link(chain, record.digest)
            said = decode_record(record.body) if record.body else None
            if isinstance(said, End) and said.how == "finished" and record.i > end.records + 1:
                return rows.End(record.r, record.r, record.i, chain)
            taken = isinstance(said, Saved) and said.id == point.id
            if not taken and not (isinstance(said, Done) and said.tool == SAVED):
                break
    return end


def runs_of(view: View, *, only_due: bool = False) -> list[RunInfo]:
    """The runs of a branch, oldest first, those that were rolled back included.

    With ``only_due`` those that waited for what has come.
    """
    if only_due and view.at_it():
        return []  # whoever is at it goes on by itself
    past, at_it = view.now()
    looks = not at_it and (only_due or _may_be_due(past))
    come = [run for run in _due(view, past) if run.begin.kind != "map"] if looks else []
    ids = {row.run for row in view.opened()} if come else set()
    ready = [run for run in come if opened.key(run.id) in ids]  # what came from elsewhere is never due by itself
    first = view.own_from
    # What ended before the branch began belongs to the one that it comes from. What is unfinished there can be resumed
    # here as well, until something else is saved.
    return [
        info_of(view, run, past.taken, running=at_it, due=run in ready, last=run is past.last)
        for run in (ready if only_due else past.every_run)
        if run.newest >= first or (run.status not in OVER and (run.newest > view.origin or view.is_new))
    ]


def _may_be_due(past: Past) -> bool:
    return any(run.status in {"", "waiting"} and open_waits(run) for run in past.runs.values())


def _due(view: View, past: Past) -> list[RunPast]:
    return due(past, view.signals, now_us(), lambda run, name: _child_moves(view, run, name))


def _child_moves(view: View, run: RunPast, name: str) -> bool:
    """Whether what a run would learn of its child has changed since it was put off: it has ended, or can go on."""
    child = view.other(name, view.branch_name)
    if child is None:
        return True  # removed: the run has to be told
    if child.at_it():
        return False
    past = child.past()
    begun = {call.intent.key for call in run.calls.values() if call.intent is not None and call.tool == SPAWN}
    its = [one for one in past.runs.values() if one.id in begun]
    if not its or its[-1].status not in {"", "waiting"} or not open_waits(its[-1]):
        return True  # it has ended, or was interrupted; an agent executes one run at a time, so the newest is meant
    return any(one is its[-1] for one in _due(child, past))


def open_children(view: View, id: str) -> list[tuple[str, str]]:
    """The children of a run that have not ended: their names, and the ids of their runs."""
    run = view.past().runs.get(id)
    found = []
    for call in run.calls.values() if run is not None else ():
        if call.tool == SPAWN and call.intent is not None:
            name = view.read(call.args)["child"]
            child = view.other(name, view.branch_name)
            its = child.past().runs.get(call.intent.key) if child is not None else None
            if its is not None and its.status in OPEN:
                found.append((name, its.id))
    return found


def check_children(view: View, id: str) -> None:
    """Raise while a child of a run has not ended: it would go on acting by itself."""
    for name, run in open_children(view, id):
        raise RunUnfinished(
            f"child {name} of run {id} has been told to stop, and has not ended",
            run=run,
            hint="Another process executes it. Cancel the run again when the child has ended.",
        )


def began_at(view: View, id: str) -> bytes:
    """The checkpoint that a run began with."""
    return view.past().runs[id].begin.start


def sent(signal: SignalInfo) -> dict[str, Any]:
    """That a signal was sent, as an event. One that asks a run to stop is not meant for its program."""
    found = {"when": signal.sent, "what": "signal", **signal.to_json()}
    if signal.name == STOP:
        found = {"when": signal.sent, "what": "cancel", "branch": signal.branch, "run": signal.run, "id": signal.id,
                 "status": signal.status, "by": signal.by}  # fmt: skip
    return found


def info_of(
    view: View, run: RunPast, taken: Collection[Any], *, running: bool, due: bool = False, last: bool = False
) -> RunInfo:
    """What is said about a run. ``taken``: the signals that the line has received; ``running``: somebody is at it."""
    end, begin = run.end, run.begin
    waits = open_waits(run)
    until = waiting.ends_at(run, waits) if waits else 0
    status = WORDS.get(run.status, run.status)
    told = [*([end.fault] if end is not None else []), *(done.fault for done in run.stops)]
    fault = next((one for one in told if one is not None), None) if run.status not in {"", "finished"} else None
    if not status:
        idle = "queued" if begin.queue and run.newest == run.number else "interrupted"
        status = "running" if running else "waiting" if waits else idle
    return RunInfo(
        agent=view.name,
        branch=view.branch_name,
        id=run.id,
        function=begin.function,
        kind=begin.kind,
        status=status,
        began=_date(begin.at),
        ended=_date(end.at) if end is not None else None,
        until=_date(until) if until else None,
        signal=next((wait.name for wait in waits if wait.what == "signal"), ""),
        error=f"{fault[1]}: {fault[2]}" if fault is not None else "",
        waits_for=tuple(sorted({wait.name for wait in waits if wait.what == "child"})),
        due=due,
        limit=_date(begin.until) if begin.until else None,
        cancelled_by=asked_by(view.signals(run), taken) if run.status in OPEN else "",
        queue=begin.queue,
        partition=begin.part,
        priority=begin.priority,
        _ahead=lambda: sum(ahead(view._store._db.view, row) for row in view.opened() if row.run == opened.key(run.id)),
        _left=lambda: any(
            (row.run, row.signal) == (opened.key(run.id), b"") and row.due <= opened.NEVER for row in view.opened()
        ),
        let_go=isinstance(begin.args, LetGo) or isinstance(end.value if end is not None else None, LetGo),
        _args=lambda: arguments_of(run, view.line, view.registry, inert=view.inert),
        _result=lambda: result_of_run(run, view.line, view.registry, inert=view.inert),
        _trace=lambda: str(view.read(run.notes[TRACE].value)) if TRACE in run.notes else "",
        _last=last,
    )


def signals_of(view: View, past: Past | None = None) -> list[SignalInfo]:
    """The signals to a branch and its runs, oldest first."""
    sent, dropped = waiting.all_of(view._store._db.view, view._agent)
    mine = [one for one in sent if one.branch in {None, view.identity[1]}]
    if not mine:
        return []
    past = past if past is not None else view.past()
    open_names = {run.id: waited_for(run) for run in open_runs(past)}
    everybody = sorted({name for names in open_names.values() for name in names})
    return [
        SignalInfo(
            agent=view.name,
            branch=view.branch_name,
            run=one.run,
            name=one.name,
            id=one.text,
            status=_status(one, past, dropped),
            sent=_date(one.at),
            by=one.by,
            waits_for=tuple(open_names.get(one.run, ()) if one.run else everybody),
            _value=partial(decode, one.value, view.registry, inert=view.inert),
        )
        for one in mine
    ]


def _status(signal: Signal, past: Past, dropped: set[bytes]) -> str:
    if signal.id in past.taken:
        return "taken"
    if signal.id in dropped:
        return "dropped"
    return "ended" if is_over(signal, past) else "pending"


def open_runs(past: Past) -> list[RunPast]:
    """The runs that have not ended."""
    return [run for run in past.runs.values() if not is_rollback(run) and run.status in OPEN]


def is_rollback(run: RunPast) -> bool:
    return run.begin.kind == "rollback"


def waited_for(run: RunPast) -> list[str]:
    """The names of the signals that a run waits for."""
    return sorted({wait.name for wait in open_waits(run) if wait.what == "signal"})


def addressee(view: View, past: Past, id: str | None, refusing: Collection[str] = REFUSING) -> RunPast:
    """The run that is meant: the one that is named, unless it has ended so, or the one that has not ended."""
    whose = f"{view.name}@{view.branch_name}"
    if id is not None:
        run = past.runs.get(id)
        if (run is None and all(one.id != id for one in past.former)) or (run is not None and is_rollback(run)):
            raise BadOption(f"{id!r} is no run of {whose}", hint="See store.runs(), or `holdfast runs`.")
        if run is None or run.status in refusing:
            how = run.status if run is not None else ROLLED_BACK
            raise RunEnded(f"run {id} of {whose} has ended ({how}): nothing was sent", run=id, status=how)
        return run
    found = open_runs(past)
    if len(found) > 1:
        raise BadOption(
            f"{len(found)} runs of {whose} have not ended: {', '.join(run.id for run in found)}",
            hint="Say which of them is meant, by its id.",
        )
    if not found:
        raise RunEnded(
            f"no run of {whose} is waiting or running: nothing was sent",
            hint="Begin the run first. To keep a signal for whichever run asks next, say so: any_run=True (--any-run).",
        )
    return found[0]


def find_run(view: View, id: str, agent: Any, past: Past) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is to be executed to go on with a run: the durable function of this program, and the arguments."""
    run = past.runs.get(id)
    if run is None:
        raise BadOption(f"{id!r} is no run of {view.name}", hint="See agent.runs() for what there is.")
    if run.begin.kind not in {"run", "child"}:
        raise BadOption(f"{id!r} is a {run.begin.kind}", hint="Do it again: it resumes from where it stopped.")
    made = DURABLES.get(run.begin.function)
    if made is None:
        raise UnknownTool(
            f"no durable function {run.begin.function!r} in this program", hint="Import the module that defines it."
        )
    return made, *call_of(run, made, agent, view.line, view.registry)


def effects_of(view: View, after: int = 0, run: str | None = None, *, ended: bool = False) -> list[Effect]:
    """Recorded calls with numbers above ``after``, in the order in which they were intended.

    What a rollback left behind is among them, and so is what undid it: it has happened. A call that is going on is
    ``running``; with ``ended`` it is taken to be over, as its process is.
    """
    calls, undone, left, attempts = _calls(view)
    found = []
    for call in calls:
        if call.number > after and (run is None or call.run == run):
            effect = effect_of(call, view.line, view.registry, inert=view.inert)
            if call.intent is not None and call.intent.key in undone:
                effect.status = "undone"
            elif call.number in left and call.read:
                effect.status = ROLLED_BACK
            effect.agent, effect.branch = view.name, view.branch_name
            effect.attempts = tuple(attempts.get(effect.key, ()))
            if not ended and view.making(call):
                effect.status = "running"
                last = [one._replace(how="running") for one in effect.attempts[-1:]]
                effect.attempts = (*effect.attempts[:-1], *last)
            if call.holes:
                effect._whole = partial(whole_args, view, call, effect)
            found.append(effect)
    return found


def whole_args(view: View, call: Call, effect: Effect) -> dict[str, Any]:
    """The arguments of a read, with the parts of the state that it was given as the checkpoints around it have them."""
    states = view.around(call.number)

    def find(hole: Passed) -> Any:
        return next((found for state in states if (found := hole.found_in(state)) is not None), hole)

    return {**effect.args, **fill(view.read(call.args) or {}, call.holes, find)}


def find_call(view: View, effect: Effect | str) -> Call:
    """The call that an effect, or the beginning of its key, names."""
    calls, *_ = _calls(view)
    if isinstance(effect, Effect) and not effect.key:  # a read
        found = [call for call in calls if (call.number, call.path) == (effect.number, effect.path)]
    else:
        wanted = effect.key if isinstance(effect, Effect) else effect
        if not isinstance(wanted, str):
            raise BadOption(f"{type(effect).__name__} is no effect", hint="Give one of agent.effects(), or its id.")
        # One that has answered a call since is written down there once more: that is the newest of its key.
        newest = {call.intent.key: call for call in calls if wanted and call.intent is not None}
        found = [call for key, call in newest.items() if key.startswith(wanted)]
    if len(found) != 1:
        named = effect.id if isinstance(effect, Effect) else effect
        what = "names no effect" if not found else f"fits {len(found)} effects"
        raise BadOption(f"{named!r} {what} of {view.name}", hint="See agent.effects() for what there is.")
    return found[0]


def _calls(view: View) -> tuple[list[Call], set[str], set[int], dict[str, list[Attempt]]]:
    """Every call of a line, oldest first, the keys of those that were undone, the numbers of those left behind.

    And by their keys, each time that they were made.
    """
    standing = Standing(view.line.records())
    past = Past(standing.records)
    calls = [*past.calls(), *_streaming(past)]
    known = {call.intent.key for call in calls if call.intent is not None}
    calls += [one.call for one in standing.effects if one.key not in known]
    known |= {one.key for one in standing.effects}
    calls += [call for call in past.voided if call.intent is None or call.intent.key not in known]
    undone = {one.key for one in standing.effects if one.undone}
    behind = {call.number for call in past.voided}
    return sorted(calls, key=lambda call: call.number), undone, behind, standing.attempts()


def _streaming(past: Past) -> list[Call]:
    """Streams that only read and have no outcome: of them there is nothing else but their items."""
    found = []
    for run in past.runs.values():
        for path, given in run.streams.items():
            if path not in run.calls and not run.is_inside(path):
                done = rec.Done(given.at, run.id, path, "open", tool=given.tool, kind="read")
                found.append(Call(run.id, path, number=given.number, done=done, read=True, given=given))
    return found


def decided(view: View) -> list[dict[str, Any]]:
    """What was decided about the runs and effects of a branch: what was in doubt, and what was cancelled."""
    found: list[dict[str, Any]] = []
    for number, record in view.line.marked(view.own_from - 1):
        about = {"when": _date(record.at), "branch": view.branch_name, "run": record.run}
        if isinstance(record, Decision):
            found.append({**about, "what": "decision", "effect": record.of, "how": record.how, "why": record.why,
                          "by": record.by})  # fmt: skip
        elif isinstance(record, RolledBack):
            found.append({**about, "what": "rolled back", "to": record.id.hex(), "records": number - 1 - record.to})
        elif isinstance(record, End) and record.how == "cancelled":
            why = record.fault[2] if record.fault is not None else ""
            found.append({**about, "what": "cancelled", "why": why, "by": record.by})
        elif isinstance(record, Note) and record.what == "resume" and record.value is not None:
            was = WORDS.get(record.name, record.name) or "interrupted"
            found.append({**about, "what": "resumed", "was": was, "by": str(view.read(record.value))})
    return found


def stack_of(view: View, checkpoint: bytes) -> list[str]:
    """What was going on when a checkpoint of a run was taken, outermost first."""
    for _, record in view.line.records():
        if isinstance(record, Saved) and record.id == checkpoint:
            return record.stack
    return []


def _date(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, UTC)


# -- what an agent has been doing, for a dump -----------------------------------------------------------------


_EFFECTS = 50
_OF_EFFECTS = ("id", "tool", "kind", "status", "path", "run", "attempt", "error", "why")
_IN_DOUBT = 200
_RUNS = 10


def evidence(view: View, checkpoint: bytes) -> dict[str, Any]:
    """Recent effects (newest last), the ids of those in doubt, unfinished runs, and where the last checkpoint was."""
    view.inert = True
    effects = effects_of(view, ended=True)
    doubtful = [effect for effect in effects if effect.status == "in doubt"][-_IN_DOUBT:]
    recent = effects[-_EFFECTS:]
    shown = [*(effect for effect in doubtful if all(effect is not other for other in recent)), *recent]
    runs = [info for info in runs_of(view) if info.status not in {"finished", "rolled back"}][-_RUNS:]
    newest = runs[-1] if runs else None
    last = next((effect.path for effect in reversed(effects) if newest is not None and effect.run == newest.id), "")
    stack = stack_of(view, checkpoint) if checkpoint else []
    return {
        "effects": [
            {name: getattr(effect, name) for name in _OF_EFFECTS}
            | {"at": effect.at.timestamp(), "args": {} if effect.let_go else _shown_args(effect.args)}
            | {"result": None if effect.let_go else effect.result}
            for effect in shown
        ],
        "in_doubt": [effect.id for effect in doubtful],
        "runs": [{name: getattr(info, name) for name in ("id", "function", "status", "error")} for info in runs],
        "run": newest.id if newest is not None else "",
        "function": newest.function if newest is not None else "",
        "path": last,
        "stack": max(_stack_at(newest.function, last) if newest is not None else [], stack, key=len),
    }


def _shown_args(value: Any) -> Any:
    """Arguments, with a text for what is not written out."""
    if isinstance(value, Passed):
        return repr(value)
    if isinstance(value, dict):
        return {key: _shown_args(item) for key, item in value.items()}
    return type(value)(map(_shown_args, value)) if type(value) in {list, tuple} else value


def _stack_at(function: str, path: str) -> list[str]:
    """The steps on the way to a call: `plan:0/~3/2` is in step plan."""
    return [function, *(unquote(part.rpartition(":")[0]) for part in path.split("/") if ":" in part)]
