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
from holdfast.errors import BadOption, UnknownTool
from holdfast.run.arguments import Passed, fetch, fill
from holdfast.run.choosing import arguments_of, call_of
from holdfast.run.durables import DURABLES
from holdfast.run.effects import Effect
from holdfast.run.past import Call, Past, RunPast
from holdfast.run.records import Saved, Value
from holdfast.run.scope import effect_of, now_us
from holdfast.run.standing import NESTED, SPAWN, Standing, nested_id
from holdfast.run.stored import StoredLine
from holdfast.run.waiting import Signal, due, open_waits, read_signal, signal_key
from holdfast.store import catalog
from holdfast.store.catalog import Branch

if TYPE_CHECKING:
    from holdfast.agent.store import Store

CONDITIONS = (
    "running", "interrupted", "waiting", "needs attention", "failed", "finished", "cancelled", "rolled back",
)  # fmt: skip
_WORDS = {"attention": "needs attention"}
_OVER = frozenset({"finished", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One line of the list of runs. ``condition`` is one of ``CONDITIONS``; ``waits_for`` names other agents."""

    agent: str
    branch: str
    id: str
    function: str
    kind: str
    condition: str
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
            "condition": self.condition,
            "began": self.began.isoformat(),
            "ended": self.ended.isoformat() if self.ended is not None else None,
            "until": self.until.isoformat() if self.until is not None else None,
            "signal": self.signal,
            "error": self.error,
            "waits_for": list(self.waits_for),
        }


class View:
    """A branch's line, as far as lists need it. The state is not touched, so damage there does not hide runs."""

    def __init__(self, store: Store, agent: catalog.Agent, branch: Branch) -> None:
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

    def signals(self) -> list[Signal]:
        return signals_to(self._store._db.view, self._agent, self._branch)

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


def signals_to(view: catalog.View, agent: catalog.Agent, branch: Branch) -> list[Signal]:
    """Signals to an agent, or to this branch of it, that are younger than the branch; oldest first."""
    born = branch.body["created"]
    entries = view.log_under([signal_key(agent.uuid)])
    found = [read_signal(entry.at, entry.body) for entry in entries if entry.a == agent.a and entry.at >= born]
    return [signal for signal in found if signal.branch in {None, branch.uuid}]


def runs_of(view: View, *, only_due: bool = False) -> list[RunInfo]:
    """The runs of a branch, oldest first; with ``only_due`` those that waited for what has come."""
    if only_due and view.at_it():
        return []  # whoever is at it goes on by itself
    past = view.past()
    found = _due(view, past) if only_due else past.runs.values()
    first = view.own_from
    # What ended before the branch began belongs to the one that it comes from. What is unfinished there can be resumed
    # here as well, until something else is saved.
    return [
        _info(view, run)
        for run in found
        if run.newest >= first or (run.condition not in _OVER and (run.newest > view.origin or view.is_new))
    ]


def _due(view: View, past: Past) -> list[RunPast]:
    return due(past, view.signals(), now_us(), lambda run, name: _child_moves(view, run, name))


def _child_moves(view: View, run: RunPast, name: str) -> bool:
    """Whether what a run would learn of its child has changed since it was put off: it has ended, or can go on."""
    branch, begun = _begun(view, run, name)
    child = view.other(name, branch)
    if child is None:
        return True  # removed: the run has to be told
    if child.at_it():
        return False
    past = child.past()
    its = [one for one in past.runs.values() if one.id in begun]
    if not its or its[-1].condition not in {"", "waiting"} or not open_waits(its[-1]):
        return True  # it has ended, or was interrupted; an agent executes one run at a time, so the newest is meant
    return any(one is its[-1] for one in _due(child, past))


def _begun(view: View, run: RunPast, name: str) -> tuple[str, set[str]]:
    """What a run has begun with another agent: the branch, and the ids of its runs there."""
    branch, begun = view.branch_name, set()
    for call in run.calls.values():
        if call.intent is not None and call.tool == SPAWN:
            begun.add(call.intent.key)
        elif call.open and call.tool == NESTED:
            given = fetch(call.args, view.line, view.registry, inert=True)
            if given["agent"] == name:
                branch = given["branch"]
                begun.add(nested_id(*view.identity, run.id, call.path, call.fingerprint))
    return branch, begun


def _info(view: View, run: RunPast) -> RunInfo:
    end, begin = run.end, run.begin
    waits = open_waits(run)
    until = min((wait.until for wait in waits if wait.until), default=0)
    condition = _WORDS.get(run.condition, run.condition)
    if not condition:
        condition = "running" if view.at_it() else "waiting" if waits else "interrupted"
    return RunInfo(
        agent=view.name,
        branch=view.branch_name,
        id=run.id,
        function=begin.function,
        kind=begin.kind,
        condition=condition,
        began=_date(begin.at),
        ended=_date(end.at) if end is not None else None,
        until=_date(until) if until else None,
        signal=next((wait.name for wait in waits if wait.what == "signal"), ""),
        error=f"{end.fault[1]}: {end.fault[2]}" if end is not None and end.fault is not None else "",
        waits_for=tuple(sorted({wait.name for wait in waits if wait.what == "child"})),
        _args=lambda: arguments_of(run, view.line, view.registry, inert=view.inert),
        _result=lambda: view.read(end.value) if end is not None else None,
    )


def find_run(view: View, id: str, agent: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is to be executed to go on with a run: the durable function of this program, and the arguments."""
    run = view.past().runs.get(id)
    if run is None:
        raise BadOption(f"{id!r} is no run of {view.name}", hint="See agent.runs() for what there is.")
    if run.begin.kind not in {"run", "child"}:
        raise BadOption(f"{id!r} is a {run.begin.kind}", hint="Do it again: it goes on from where it stopped.")
    made = DURABLES.get(run.begin.function)
    if made is None:
        raise UnknownTool(
            f"no durable function {run.begin.function!r} in this program", hint="Import the module that defines it."
        )
    return made, *call_of(run, made, agent, view.line, view.registry)


def effects_of(view: View, after: int = 0, run: str | None = None) -> list[Effect]:
    """Recorded calls with numbers above ``after``, in the order in which they were intended.

    What a rollback left behind is among them: it has happened, and is undone, or stands.
    """
    calls, undone = _calls(view)
    found = []
    for call in calls:
        if call.number > after and (run is None or call.run == run):
            effect = effect_of(call, view.line, view.registry, inert=view.inert)
            if call.intent is not None and call.intent.key in undone:
                effect.condition = "undone"
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
    calls, _ = _calls(view)
    if isinstance(effect, Effect):
        found = [call for call in calls if call.number == effect.number]
    else:
        found = [call for call in calls if effect and call.intent and call.intent.key.startswith(effect)]
    if len(found) != 1:
        named = effect.id if isinstance(effect, Effect) else effect
        what = "names no effect" if not found else f"fits {len(found)} effects"
        raise BadOption(f"{named!r} {what} of {view.name}", hint="See agent.effects() for what there is.")
    return found[0]


def _calls(view: View) -> tuple[list[Call], set[str]]:
    """Every call of a line, oldest first, and the keys of those that were undone."""
    standing = Standing(view.line.records())
    past = Past(standing.records)
    calls = [*past.calls(), *past.kept]
    known = {call.intent.key for call in calls if call.intent is not None}
    calls += [one.call for one in standing.effects if one.key not in known]
    return sorted(calls, key=lambda call: call.number), {one.key for one in standing.effects if one.undone}


def stack_of(view: View, checkpoint: bytes) -> list[str]:
    """What was going on when a checkpoint of a run was taken, outermost first."""
    for _, record in view.line.records():
        if isinstance(record, Saved) and record.id == checkpoint:
            return record.stack
    return []


def _date(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, UTC)
