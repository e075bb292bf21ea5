"""Lists of runs and effects, for people and for whoever decides what to do next.

Owns what is said about a run, and finding a call by what a person names it by. Writes nothing. What always holds: what
is listed is folded from the line at that moment; values are read only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec.document import Document
from holdfast.codec.values import decode
from holdfast.errors import BadOption, RunEnded, RunUnfinished, UnknownTool
from holdfast.run import signals
from holdfast.run.arguments import Passed, fetch, fill
from holdfast.run.choosing import arguments_of, call_of
from holdfast.run.durables import DURABLES
from holdfast.run.effects import Effect
from holdfast.run.past import OPEN, ROLLED_BACK, Call, Past, RunPast
from holdfast.run.records import Decision, End, RolledBack, Saved, Value
from holdfast.run.scope import effect_of, now_us
from holdfast.run.signals import Signal
from holdfast.run.standing import SPAWN, Standing
from holdfast.run.stored import StoredLine
from holdfast.run.waiting import due, open_waits
from holdfast.store import catalog
from holdfast.store.catalog import Agent, Branch

if TYPE_CHECKING:
    from holdfast.agent.store import Store

STATUSES = (
    "running", "interrupted", "waiting", "needs attention", "failed", "finished", "cancelled", "rolled back",
)  # fmt: skip
_WORDS = {"attention": "needs attention"}
_OVER = frozenset({"finished", "failed", "cancelled", ROLLED_BACK})
REFUSING = frozenset({"finished", "cancelled", ROLLED_BACK})
"""Runs that take no signal any more. One that failed can be executed again, and may."""
SIGNAL_STATUSES = ("pending", "taken", "dropped", "ended")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One line of the list of runs. ``status`` is one of ``STATUSES``; ``waits_for`` names other agents."""

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
    _args: Callable[[], dict[str, Any]] = field(repr=False, compare=False)
    _result: Callable[[], Any] = field(repr=False, compare=False)

    @property
    def args(self) -> dict[str, Any]:
        """The arguments, by parameter name."""
        return self._args()

    @property
    def result(self) -> Any:
        """What it returned; None while it has not finished."""
        return self._result()

    def to_json(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "branch": self.branch,
            "id": self.id,
            "function": self.function,
            "kind": self.kind,
            "status": self.status,
            "began": self.began.isoformat(),
            "ended": self.ended.isoformat() if self.ended is not None else None,
            "until": self.until.isoformat() if self.until is not None else None,
            "signal": self.signal,
            "error": self.error,
            "waits_for": list(self.waits_for),
        }


@dataclass(frozen=True, slots=True)
class SignalInfo:
    """A signal. ``status`` is one of ``SIGNAL_STATUSES``; ``run`` is empty where any run of the branch may take it.

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
        return {
            "agent": self.agent, "branch": self.branch, "run": self.run, "name": self.name, "id": self.id,
            "status": self.status, "sent": self.sent.isoformat(), "by": self.by, "waits_for": list(self.waits_for),
            "repeated": self.repeated,
        }  # fmt: skip


class View:
    """A branch's line, as far as lists need it. The state is not touched, so damage there does not hide runs."""

    def __init__(self, store: Store, agent: Agent, branch: Branch) -> None:
        self.name = agent.name
        self.branch_name = branch.name
        self.line = StoredLine(store._db, branch.b)
        self.registry, self.inert = store._registry, store._inert
        self._store, self._agent, self._branch = store, agent, branch
        self._points: list[Checkpoint] | None = None  # newest first

    def read(self, value: Value) -> Any:
        return fetch(value, self.line, self.registry, inert=self.inert)

    def past(self) -> Past:
        return Past(self.line.records())

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
        return self._store._db.leases.alive(self._branch.uuid, self._branch.generation)

    def signals(self, run: RunPast | None) -> list[Signal]:
        return signals.visible(self._store._db.view, self._agent, self._branch, run)

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

    A branch inherits no others, unless it goes on from damage: then what was done is known beyond the state.
    """
    began = bytes(branch.body["from"])
    point = view.find(began) if began else None
    if not began:
        return 0
    return point.manifest.effects[0] if point is not None else int(branch.body.get("start", 0))


def runs_of(view: View, *, only_due: bool = False) -> list[RunInfo]:
    """The runs of a branch, oldest first, those that were rolled back included.

    With ``only_due`` those that waited for what has come.
    """
    if only_due and view.at_it():
        return []  # whoever is at it goes on by itself
    past = view.past()
    found = [run for run in _due(view, past) if run.begin.kind != "map"] if only_due else past.every_run
    first = view.own_from
    # What ended before the branch began belongs to the one that it comes from. What is unfinished there can be resumed
    # here as well, until something else is saved.
    return [
        _info(view, run)
        for run in found
        if run.newest >= first or (run.status not in _OVER and (run.newest > view.origin or view.is_new))
    ]


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


def check_children(view: View, id: str) -> None:
    """Raise while a child of a run has not ended: it would go on acting by itself."""
    run = view.past().runs.get(id)
    for call in run.calls.values() if run is not None else ():
        if call.tool == SPAWN and call.intent is not None:
            name = view.read(call.args)["child"]
            child = view.other(name, view.branch_name)
            its = child.past().runs.get(call.intent.key) if child is not None else None
            if its is not None and its.status in OPEN:
                raise RunUnfinished(
                    f"child {name} of run {id} has not ended",
                    run=its.id,
                    hint=f"Cancel it first: `holdfast runs cancel {name} {its.id}`, or"
                    f" store.agent({name!r}).cancel({its.id!r}).",
                )


def _info(view: View, run: RunPast) -> RunInfo:
    end, begin = run.end, run.begin
    waits = open_waits(run)
    until = min((wait.until for wait in waits if wait.until), default=0)
    status = _WORDS.get(run.status, run.status)
    if not status:
        status = "running" if view.at_it() else "waiting" if waits else "interrupted"
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
        error=f"{end.fault[1]}: {end.fault[2]}" if end is not None and end.fault is not None else "",
        waits_for=tuple(sorted({wait.name for wait in waits if wait.what == "child"})),
        _args=lambda: arguments_of(run, view.line, view.registry, inert=view.inert),
        _result=lambda: view.read(end.value) if end is not None else None,
    )


def signals_of(view: View, past: Past | None = None) -> list[SignalInfo]:
    """The signals to a branch and its runs, oldest first."""
    sent, dropped = signals.all_of(view._store._db.view, view._agent)
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
    run = past.runs.get(signal.run)
    over = signal.run and (run is None or run.number != signal.begun or run.status in REFUSING)
    return "ended" if over else "pending"


def open_runs(past: Past) -> list[RunPast]:
    """The runs that have not ended."""
    return [run for run in past.runs.values() if run.begin.kind != "rollback" and run.status in OPEN]


def waited_for(run: RunPast) -> list[str]:
    """The names of the signals that a run waits for."""
    return sorted({wait.name for wait in open_waits(run) if wait.what == "signal"})


def addressee(view: View, past: Past, id: str | None) -> RunPast:
    """The run that a signal is for: the one that is named, or the one that has not ended."""
    whose = f"{view.name}@{view.branch_name}"
    if id is not None:
        run = past.runs.get(id)
        if run is None and all(one.id != id for one in past.former):
            raise BadOption(f"{id!r} is no run of {whose}", hint="See store.runs(), or `holdfast runs`.")
        if run is None or run.status in REFUSING:
            how = run.status if run is not None else ROLLED_BACK
            raise RunEnded(f"run {id} of {whose} has ended ({how}): it takes no signal", run=id, status=how)
        return run
    found = open_runs(past)
    if len(found) > 1:
        raise BadOption(
            f"{len(found)} runs of {whose} have not ended: {', '.join(run.id for run in found)}",
            hint="Say which of them the signal is for: run=ID (--run ID).",
        )
    if not found:
        raise RunEnded(
            f"no run of {whose} is open: nobody would take the signal",
            hint="Begin the run first. To keep it for whichever run asks next, say so: any_run=True (--any-run).",
        )
    return found[0]


def find_run(view: View, id: str, agent: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is to be executed to go on with a run: the durable function of this program, and the arguments."""
    run = view.past().runs.get(id)
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


def effects_of(view: View, after: int = 0, run: str | None = None) -> list[Effect]:
    """Recorded calls with numbers above ``after``, in the order in which they were intended.

    What a rollback left behind is among them, and so is what undid it: it has happened.
    """
    calls, undone, left = _calls(view)
    found = []
    for call in calls:
        if call.number > after and (run is None or call.run == run):
            effect = effect_of(call, view.line, view.registry, inert=view.inert)
            if call.intent is not None and call.intent.key in undone:
                effect.status = "undone"
            elif call.number in left and call.read:
                effect.status = ROLLED_BACK
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
    calls, _, _ = _calls(view)
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


def _calls(view: View) -> tuple[list[Call], set[str], set[int]]:
    """Every call of a line, oldest first, the keys of those that were undone, the numbers of those left behind."""
    standing = Standing(view.line.records())
    past = Past(standing.records)
    calls = [*past.calls(), *past.kept]
    known = {call.intent.key for call in calls if call.intent is not None}
    calls += [one.call for one in standing.effects if one.key not in known]
    known |= {one.key for one in standing.effects}
    calls += [call for call in past.voided if call.intent is None or call.intent.key not in known]
    undone = {one.key for one in standing.effects if one.undone}
    return sorted(calls, key=lambda call: call.number), undone, {call.number for call in past.voided}


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
            found.append({**about, "what": "cancelled", "why": record.fault[2] if record.fault is not None else ""})
    return found


def stack_of(view: View, checkpoint: bytes) -> list[str]:
    """What was going on when a checkpoint of a run was taken, outermost first."""
    for _, record in view.line.records():
        if isinstance(record, Saved) and record.id == checkpoint:
            return record.stack
    return []


def _date(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, UTC)
