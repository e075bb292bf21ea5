"""From a run that fails to what makes it fail: the line after which a check fails first, and the least that is needed.

Owns these two searches. How a run is executed is the business of ``jobs``. What always holds: every answer was seen:
the smallest set that is given fails, and without any one of its items it does not, or nobody can say, which is told;
what is executed is what was recorded, but for the items that were taken away, so its states are such as never existed.

    moments(store, agent, "budget", ...)              after which lines a path of the state, or a check, is another
    minimise(store, agent, "state.messages", ...)     a ``Minimal``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent import history
from holdfast.agent.checkpoint import Checkpoint
from holdfast.codec.values import decode
from holdfast.errors import BadOption, HoldfastError
from holdfast.run.arguments import fetch
from holdfast.run.durables import DURABLES, arguments_of
from holdfast.run.past import Call
from holdfast.run.runs import describe
from holdfast.travel.bisect import Check, Turn, Verdict, ddmin, halved
from holdfast.travel.causes import view_of
from holdfast.travel.execution import Execution, Moment, Step
from holdfast.travel.expressions import MISSING, Look, follow, parse_path
from holdfast.travel.jobs import Workers, executed
from holdfast.travel.rerun import History, recorded
from holdfast.travel.variation import Job, put
from holdfast.travel.whatif import Program, fails, job_of

if TYPE_CHECKING:
    from holdfast.travel.handle import Agent, How, Store

TRIES_MAX = 500
"""Executions of one search."""
RESULTS = "results"


def moments(
    store: Store,
    agent: str,
    path: str = "",
    run: str | Checkpoint | None = None,
    *,
    program: Program,
    **how: Unpack[How],
) -> Execution:
    """As ``Store.moments``."""
    check = how.get("check", "")
    if bool(path) == bool(check):
        raise BadOption("what is to be watched?", hint="Give a path of the state, or a check.")
    job = job_of(store, agent, run, program, **how)
    return executed([replace(job, watch=path, watch_check=bool(check))])[0]


def first_bad(execution: Execution) -> Moment | None:
    """The moment at which a check that was watched began to fail."""
    return next((one for one in execution.moments if one.new == "False"), None)


def moment_before(execution: Execution, checkpoint: str) -> Moment | None:
    """The last moment before a checkpoint, by its id, at which what was watched became another."""
    path = next((one.path for one in execution.checkpoints if one.id == checkpoint), "")
    ends = [one.number for one in execution.steps if path and one.path == path and one.what == "checkpoint"]
    found = [one for one in execution.moments if not ends or one.step < ends[0]]
    return found[-1] if found else None


class Minimal(Struct):
    """The smallest set that still fails. ``items`` are what is left, as text, ``keys`` their keys or indexes."""

    target: str
    items: list[str]
    keys: list[Any]
    of: int
    tries: int
    whole: bool  # whether nothing less was found because the tries were used up
    last: Execution
    unknown: str = ""  # why of some tries nobody can say whether they fail: the first reason


def minimise(
    store: Store, agent: str, target: str, run: str | Checkpoint | None = None, *, program: Program,
    allow: Sequence[str] = (), reads: bool = False, progress: Callable[[int, int], None] | None = None,
    **how: Unpack[How],
) -> Minimal:  # fmt: skip
    """As ``Store.minimise``."""
    branch = how.get("branch", "main")
    job = replace(job_of(store, agent, run, program, **how), free=True, allow=list(allow), reads=reads)
    history = recorded(store._view(agent, branch), run)
    keys, shown, without = _target(store, agent, branch, history, target)
    if not keys:
        raise BadOption(f"there is nothing in {target} that could be taken away", hint="Name another list or dict.")
    search = _Search(job, without, progress)
    with Workers():
        search.begin()
        if not search.failing([keys])[0]:
            raise BadOption("the run does not fail when it is executed again", hint="Give a check that does not hold.")
        left = search.least(keys)
    items = [shown(key) for key in left]
    whole = search.tries >= TRIES_MAX
    return Minimal(target, items, left, len(keys), search.tries, whole, search.last, search.unknown)


Without = Callable[[Job, Sequence[Any]], Job]
"""A job in which only these keys of the target are left."""


def _target(
    store: Store, agent: str, branch: str, history: History, target: str
) -> tuple[list[Any], Callable[[Any], str], Without]:
    view = store._view(agent, branch)
    if target == RESULTS:
        calls = {call.path: call for call in history.run.calls.values() if _reads(call)}

        def value_at(path: str) -> Any:
            done = calls[path].outcome
            return fetch(done.value, view.line, store._registry, inert=True) if done is not None else None

        def without(job: Job, left: Sequence[Any]) -> Job:
            gone = [path for path in calls if path not in set(left)]
            return replace(job, results=[(path, put(_empty(value_at(path)), store._registry)) for path in gone])

        return list(calls), lambda path: f"{calls[path].tool} at {path}: {value_at(path)!r:.80}", without
    root, *path = parse_path(f"[{target.partition('.')[0]!r}]" + target[len(target.partition(".")[0]) :])
    if root == "state":
        point = store._db.view.find(history.run.begin.start)
        checkpoint = store.agent(agent, branch=branch, readonly=True)._seen(point) if point is not None else None
        value = Look.of(checkpoint.state).at(tuple(path)) if checkpoint is not None else None
    elif root == "args":
        value = follow(arguments_of(history.run, view.line, store._registry, inert=True), tuple(path))
    else:
        raise BadOption(f"{target!r} is no target", hint="Use state.PATH, args.NAME or results.")
    if value is MISSING:
        raise BadOption(f"{target} is not there when the run begins", hint="See `holdfast show` for what is there.")
    if not isinstance(value, list | dict) or not path:
        said = f"is of type {type(value).__name__}, which is neither a list nor a dict"
        raise BadOption(f"{target} {said}", hint="Name what holds the items.")

    def kept(job: Job, left: Sequence[Any]) -> Job:
        wanted = set(left)
        part: Any = (
            {key: item for key, item in value.items() if key in wanted}
            if isinstance(value, dict)
            else [item for at, item in enumerate(value) if at in wanted]
        )
        text = target.partition(".")[2]
        if root == "state":
            return replace(job, state=[(text, put(part, store._registry), "")])
        if len(path) > 1:
            raise BadOption(f"{target} is inside of an argument", hint="Name a whole argument: args.NAME.")
        return replace(job, args={str(path[0]): put(part, store._registry)})

    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return keys, lambda key: f"{key!r:.40}: {value[key]!r:.80}", kept


def _reads(call: Call) -> bool:
    return call.read and call.status == "done" and not call.tool.startswith("holdfast.")


def _empty(value: Any) -> Any:
    """What stands for a result that is not there."""
    return type(value)() if isinstance(value, str | bytes | int | float | list | dict | tuple | set) else None


class _Search:
    """Delta debugging: ever smaller parts, and what is left without one, while something smaller fails."""

    def __init__(self, job: Job, without: Without, tell: Callable[[int, int], None] | None) -> None:
        self._job, self._without, self._tell = job, without, tell
        self.tries = 0
        self.last = Execution()
        self.unknown = ""
        self._error = ""
        self._known: dict[tuple[Any, ...], bool] = {}

    def begin(self) -> None:
        """How it fails as it was."""
        self.last = executed([self._job])[0]
        if self.last.failed:
            raise HoldfastError(self.last.failed)
        if self.last.unknown:
            raise BadOption(f"nobody can say whether the run fails: {self.last.unknown}", hint="See `holdfast replay`.")
        self._error = self.last.error.partition(":")[0]

    def failing(self, sets: Sequence[Sequence[Any]]) -> list[bool]:
        """Which of these sets fail, as far as tries are left."""
        new = [one for one in dict.fromkeys(map(tuple, sets)) if one not in self._known]
        new = new[: max(0, TRIES_MAX - self.tries)]
        self.tries += len(new)
        for one, found in zip(new, executed([self._without(self._job, one) for one in new]), strict=True):
            # Another error than the one that is looked for is another failure.
            same = not self._error or self._job.check or found.error.partition(":")[0] == self._error
            self.unknown = self.unknown or found.unknown
            self._known[one] = bool(fails(found) and same and not found.unknown)
            if self._known[one]:
                self.last = found
        return [self._known.get(tuple(one), False) for one in sets]

    def least(self, keys: list[Any]) -> list[Any]:
        """The smallest part of the keys that fails."""

        def failing(sets: Sequence[list[Any]]) -> list[bool]:
            found = self.failing(sets)
            if self._tell is not None:
                self._tell(min((len(one) for one, bad in zip(sets, found, strict=True) if bad), default=0), self.tries)
            return found

        left = ddmin(keys, failing)
        return left if len(left) != 1 or not self.failing([[]])[0] else []


# -- the step of a run ------------------------------------------------------------------------------------------------


def turn_of(agent: Agent, good: Checkpoint, bad: Checkpoint, check: Check, program: Program | None) -> Turn | str:
    """The step of the run between two checkpoints at which it became bad; otherwise why nobody can say, or nothing.

    The run is executed again, which gives the state at each step, and these are halved. Without a program, the run's
    function is looked for in this one.
    """
    store = cast("Store", agent._store)
    view = view_of(agent, bad)
    try:
        run = recorded(view, bad).run
    except HoldfastError:
        return ""  # no run lies there
    begin = run.begin
    made = DURABLES.get(begin.function)
    if program is None and made is None:
        how = "name its program (--program, program=), and its step at which it became bad is found"
        return f"run {begin.run} lies in between: {how}"
    try:
        job = job_of(store, agent.name, bad, program or made.function, branch=view.branch_name)  # type: ignore[union-attr]
        found = executed([replace(job, between=(good.id, bad.id))])[0]
    except HoldfastError as error:
        return error.message
    if not found.same:
        why = found.failed or f"it goes another way now: {found.difference or 'it acts outside'}"
        return f"run {begin.run} could not be executed again: {' '.join(why.partition(chr(10))[0].split())}"

    asked = []

    def verdict(at: int) -> Verdict:
        asked.append(at)
        document = history.load(store._db.now, None, store._registry, readonly=False, inert=store._inert)
        document.update(decode(bytes.fromhex(found.states[at][1]), store._registry, inert=store._inert))
        try:
            return check.judge(document, None)[0]
        except Exception:  # noqa: BLE001 - whatever a check raises, it is no verdict
            return "skip"

    last = len(found.states) - 1
    if last < 1 or (verdict(0), verdict(last)) != ("good", "bad"):
        return f"at the ends of run {begin.run}'s steps the check is not first good, then bad"
    low, high = halved(0, last, verdict)
    steps = {one.number: one for one in found.steps}

    def shown(step: Step) -> str:
        call = run.calls.get(step.path)
        given = fetch(call.args, view.line, store._registry, inert=True) if call is not None else None
        return describe(step.what, given) if isinstance(given, dict) else step.what

    one, two = (steps.get(int(found.states[at][0]), Step(0, "", "", "")) for at in (low, high))
    return Turn(begin.run, shown(one), one.line, shown(two), two.line, one.number, len(asked))
