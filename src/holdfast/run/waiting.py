"""Waiting: sleeping, and signals from elsewhere, both as long as it takes and through any number of restarts.

Owns how long a run waits, what ends a wait, putting a run off when it is not to block; what a signal is, whom it is
for, and how it lies in the log. Must not know how the log is kept. What always holds: a wait that was begun ends when
it would have ended, whoever resumes it; a signal to a run is for that run alone, and for no later one of the same id;
it ends one wait on a line, once, and a rollback does not give it back; one id is one signal, however often it is sent;
a run is put off only when no call of it is under way.

    sleep(agent, seconds)                in async code an awaitable, as the next
    wait_for(agent, name, timeout_s)     the signal's value, or TimeoutError
    due(past, signals, at_us)            the runs of a line that can resume now; ``open_waits(run)`` what they wait for
    body(run, request)                   a run's body, put off where ``run.waits`` is false: raises ``Waiting``

    key_of(agent, run="")                the key of the entries that are signals to that run; "": to the agent
    body_of(name, value, ...), read(at, body)      a signal as an entry of the log, and from one
    visible(view, agent, branch, run)    what a run may take, oldest first; None for a run: what any one may
    sent_before(view, agent, id)         whether this id was used before
    all_of(view, agent)                  every signal to an agent, oldest first, with the ids of those dropped

"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from msgspec import Struct, ValidationError, convert

from holdfast.agent.names import check_text
from holdfast.codec.blocks import digest_of
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.errors import BadName, BadOption, CorruptValue, NoAgent, Waiting
from holdfast.run import records as rec
from holdfast.run.arguments import fetch, stow
from holdfast.run.cancelling import Stop, asked_by, tell
from holdfast.run.outcomes import Local, failure, fault_of, give
from holdfast.run.past import Past, RunPast
from holdfast.run.records import STOP
from holdfast.run.resilience import clock_of
from holdfast.run.scope import EFFECT, Lane, Scope, Suspended, here, in_doubt, place
from holdfast.run.steps import Sleep, Steps, Turn, Work, Write, asked, cancelled, drive, drive_later, is_cancelled
from holdfast.run.tools import Tool, tool
from holdfast.store.catalog import View
from holdfast.store.rows import Agent, Branch

if TYPE_CHECKING:
    from holdfast.run.runs import Run

WAIT_MAX_S = 100 * 366 * 86_400.0
"""Longer than anybody waits, and far from the end of dates."""

LOOK_S = 0.05
LOOK_MAX_S = 1.0
"""How often a waiting run looks for its signal: often at first, then once a second."""

SLICE_S = 1.0
"""A long sleep looks up this often: at the clock, because the system's own sleep does not count the time a machine was
asleep, and whether the process is about to end."""

_TAKING = threading.Lock()

QUIET_S = 0.2
"""A run with several flows of control is put off when nothing was recorded in it for so long."""


# -- what user code calls -------------------------------------------------------------------------------------


@tool(name="holdfast.sleep", effect="read")
def _sleep(seconds: float) -> None:
    """How a sleep is recorded."""


@tool(name="holdfast.wait_for", effect="read", raises=(TimeoutError,))
def _wait_for(name: str, timeout_s: float | None = None) -> None:
    """How the receipt of a signal is recorded."""


_SLEEP: Tool = _sleep.tool
_WAIT_FOR: Tool = _wait_for.tool


def on_loop() -> bool:
    """Whether the caller is async code, which must not block: so it is where an event loop runs, but in plain runs."""
    lane = here()
    if lane is not None and lane.scope.plain:
        return False
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def sleep(agent: Any, seconds: float) -> Any:
    """Sleep; in async code, to be awaited. In a run the time is kept through restarts."""
    return _driven(_sleeping(agent, seconds))


def wait_for(agent: Any, name: str, timeout_s: float | None = None) -> Any:
    """Wait for a signal; returns its value. One that was sent to this run earlier, and not taken yet, counts."""
    return _driven(_receiving(agent, name, timeout_s))


def _driven(steps: Steps) -> Any:
    return drive_later(steps) if on_loop() else drive(steps)


def _sleeping(agent: Any, seconds: float) -> Steps:
    check_seconds(seconds)
    lane = _place(agent, _SLEEP)
    if lane is None or not lane.scope.run_id:
        yield Sleep(clock_of(agent), seconds)
    else:
        yield from _wait(lane, _SLEEP, {"seconds": seconds}, "sleep", "", seconds)


def _receiving(agent: Any, name: str, timeout_s: float | None) -> Steps:
    check_name(name)
    if timeout_s is not None:
        check_seconds(timeout_s)
    lane = _place(agent, _WAIT_FOR)
    if lane is None or not lane.scope.run_id:
        raise NoAgent(
            "signals are received in a run: a plain loop could not say when it has made use of one",
            hint="Wait in a durable function: agent.run(function, ...).",
        )
    return (yield from _wait(lane, _WAIT_FOR, {"name": name, "timeout_s": timeout_s}, "signal", name, timeout_s))


def check_seconds(seconds: float, what: str = "a wait") -> None:
    if not isfinite(seconds) or not 0 <= seconds <= WAIT_MAX_S:
        raise BadOption(f"{what} of {seconds!r} s", hint=f"Use a number from 0 to {WAIT_MAX_S:g}.")


def _place(agent: Any, what: Tool) -> Lane | None:
    """Where the wait happens; None outside of any use of an agent."""
    lane = place(what.name, what.kind)
    if lane is None:
        return None
    if agent is not lane.scope.agent and agent is not lane.scope.agent.handle:
        raise NoAgent(
            f"{agent.name} cannot wait in what {lane.scope.agent.name} does",
            hint="Use the agent that the run was given.",
        )
    if EFFECT.get() is not None:
        raise BadOption(
            "a tool cannot wait: a run that is put off in the middle of a call is in doubt",
            hint="Wait before or after the call. For a short pause inside the tool use time.sleep.",
        )
    return lane


# -- one wait -----------------------------------------------------------------------------------------------


def _wait(lane: Lane, what: Tool, arguments: dict[str, Any], kind: str, name: str, limit_s: float | None) -> Steps:
    scope: Run = lane.scope
    outcome, done = yield from asked(lane, what, arguments)
    if outcome is not None:
        return give(scope, what, outcome.path, outcome)
    path: str = done.path
    known = _recorded(scope, path, kind, name, limit_s)
    began = known or _begun(scope, path, kind, name, limit_s)
    looking = Until(scope, began)
    done.started = began.at
    try:
        if known is None:
            yield Write(scope, began)
        while True:
            yield from looking.steps()
            if looking.stop is not None:
                if scope.takes(looking.stop):
                    yield from tell(scope, what, looking.stop, done)
                continue
            stowed = None
            if not looking.found and kind == "signal":
                error = TimeoutError(f"no signal {name!r} within {limit_s:g} s")
                done.how = "error"
                done.fault, stowed = fault_of(what, error, scope)
            elif looking.found:
                signal = _claim(scope, looking.found)
                if signal is None:  # another flow of this run was faster
                    continue
                stowed = stow(decode(signal.value, scope.registry), scope.registry)
                done.value, done.event = stowed.value, signal.id
            break
    except BaseException as error:
        if is_cancelled(error):
            yield from cancelled(scope, done)
        raise
    done.at = clock_of(scope.agent).wall_us()
    scope.complete(done, stowed)
    yield Turn(scope, path, flush=True, new=True)
    if done.fault is not None:
        raise failure(what, path, done.fault, fetch(done.fault[3], Local(stowed), scope.registry))
    return fetch(done.value, Local(stowed), scope.registry)


def _recorded(run: Run, path: str, kind: str, name: str, limit_s: float | None) -> rec.Wait | None:
    """The wait that was begun here by an earlier execution, if it is this one."""
    began = run.past.waits.get(path)
    if began is None or (began.what, began.name) != (kind, name):
        return None
    limit = None if limit_s is None else round(limit_s * 1e6)
    return began if (began.until - began.at if began.until else None) == limit else None


def _begun(scope: Scope, path: str, kind: str, name: str, limit_s: float | None) -> rec.Wait:
    now = clock_of(scope.agent).wall_us()
    return rec.Wait(now, scope.run_id, path, kind, name, 0 if limit_s is None else now + round(limit_s * 1e6))


def _claim(scope: Scope, found: Iterable[Signal]) -> Signal | None:
    """Take the oldest of these signals that nobody has: no other flow of the run, no other item of the batch."""
    with _TAKING:
        for signal in found:
            if signal.id not in scope.taken:
                scope.taken.add(signal.id)
                return signal
    return None


class Until:
    """What a wait looks for: that its time is over, the signal is there (``found``), or the run is to stop."""

    def __init__(self, scope: Run, began: rec.Wait) -> None:
        self.scope, self.began = scope, began
        self.clock = clock_of(scope.agent)
        self.found: list[Signal] = []
        self.stop: Stop | None = None
        self._pause_s = LOOK_S
        self._seen = (-1, 0.0)
        # Between two processes there is only the date. It may have been set: no wait gets longer than it was meant to
        # be, and within a process the date is not asked again.
        self._end_s: float | None = None
        if began.until:
            left = min(began.until - self.clock.wall_us(), began.until - began.at)
            self._end_s = self.clock.elapsed_s() + left / 1e6

    def steps(self) -> Steps:
        """Wait for one of them. Cancelling this loses nothing: nothing is taken yet."""
        while (pause_s := (yield Work(self._look))) is not None:  # which reads from disk
            yield Sleep(self.clock, pause_s)

    def _look(self) -> float | None:
        """Seconds until the next look, None when the wait is over. Raises when the run is put off."""
        scope = self.scope
        if scope.reason is not None:
            raise Suspended
        self.stop = scope.look()
        if self.stop is not None:
            return None
        if self.began.what == "signal":
            sent = scope.host.signals(scope.past)
            self.found = [one for one in sent if one.name == self.began.name and one.id not in scope.taken]
            if self.found:
                return None
        left = SLICE_S if self._end_s is None else self._end_s - self.clock.elapsed_s()
        if left <= 0:
            return None
        left = min(left, scope.left_s)
        if not scope.waits:
            self._put_off()
            return min(left, LOOK_S)
        self._pause_s = min(self._pause_s * 1.5, LOOK_MAX_S)
        return min(left, self._pause_s)

    def _put_off(self) -> None:
        """Stop the run here, unless something else is going on in it."""
        scope = self.scope
        if scope.stopped:
            raise Suspended
        if scope.order._several:
            count, since_s = self._seen
            now_s = self.clock.elapsed_s()
            if scope.live or count != scope.ledger.count:
                self._seen = scope.ledger.count, now_s
                return
            if now_s - since_s < QUIET_S:
                return
        scope.stopped = True
        raise Suspended


# -- a run that waits -----------------------------------------------------------------------------------------


def body(run: Run, request: Any) -> Steps:
    """Execute the body of a run. One that is put off ends with ``Waiting``, whatever its functions made of it."""
    try:
        result = yield request
    except BaseException as error:
        if not run.stopped or isinstance(error, KeyboardInterrupt | SystemExit) or is_cancelled(error):
            raise
    else:
        if not run.stopped:
            return result
    if run.reason is not None:
        raise run.reason
    if run.unsettled:
        raise in_doubt(run, run.unsettled)
    raise put_off(run)


def put_off(run: Run) -> Waiting:
    """Record that the run waits; the error that says so."""
    waits = open_waits(Past(run.ledger.recent(run.past.number - 1)).runs[run.run_id])
    until = ends_at(run.past, waits)
    name = next((wait.name for wait in waits if wait.what == "signal"), "")
    end = rec.End(clock_of(run.agent).wall_us(), run.run_id, "waiting")
    end.waits = [(wait.what, wait.name, wait.until) for wait in waits]
    if run.past.limit:
        end.waits.append(("limit", "", run.past.limit))
    run.ledger.append(end, flush=True)
    others = {wait.name for wait in waits if wait.what == "child"}
    parts = [f"for the signal {name!r}" if name else "", *(f"for {other}" for other in sorted(others))]
    what = " or ".join([*filter(None, parts), *([f"until {date(until)}"] if until else [])])
    return Waiting(
        f"run {run.run_id} of {run.agent.name} waits {what}",
        run=run.run_id,
        until=until,
        signal=name,
        hint="Resume it with `holdfast run --due PROGRAM` when that has come, or run it again without wait=False.",
    )


def ends_at(run: RunPast, waits: Iterable[rec.Wait]) -> int:
    """When a run that waits so goes on at the latest: a wait is over, or its own time is; 0: nobody knows."""
    return min((at for at in (run.limit, *(wait.until for wait in waits)) if at), default=0)


def date(at_us: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_us / 1e6))


def open_waits(run: RunPast) -> list[rec.Wait]:
    """What a run waits for. Several when several of its tasks do."""
    return [
        wait
        for path, wait in run.waits.items()
        if not run.is_inside(path) and (path not in run.calls or run.calls[path].open)
    ]


def due(
    past: Past,
    signals: Callable[[RunPast], Iterable[Signal]],
    at_us: int,
    child: Callable[[RunPast, str], bool] = lambda _run, _name: False,
) -> list[RunPast]:
    """The runs of a line that wait for something that has come: a time, or one of the signals that they may take.

    ``child(run, name)`` says whether a run can resume that waits for its child of that name.
    """

    def is_to_stop(run: RunPast) -> bool:
        over = run.status == "waiting" and 0 < run.limit <= at_us
        return over or bool(asked_by(signals(run), past.taken))

    def has_come(run: RunPast, wait: rec.Wait) -> bool:
        if wait.until and wait.until <= at_us:
            return True
        if wait.what == "child":
            return child(run, wait.name)
        return wait.what == "signal" and any(one.name == wait.name and one.id not in past.taken for one in signals(run))

    return [
        run
        for run in past.runs.values()
        if run.status in {"", "waiting"} and (any(has_come(run, wait) for wait in open_waits(run)) or is_to_stop(run))
    ]


# -- signals --------------------------------------------------------------------------------------------------


VALUE_MAX_BYTES = 1 << 20
"""A signal is a message, not a way to move data: it is read again at each look until it is received."""


class Signal(Struct, frozen=True):
    """A message: its id, its time, its name, its encoded value, the branch, the run, and who sent it.

    ``begun`` is the number of the record with which the run began: a later run may have the same id. The id of a
    signal is its own, not its entry's number: a record that says it was received means the same in every store.
    """

    id: bytes
    at: int
    name: str
    value: bytes
    branch: bytes | None = None
    run: str = ""
    begun: int = 0
    by: str = ""

    @property
    def text(self) -> str:
        """Its id, for people."""
        try:
            return self.id.decode()
        except UnicodeDecodeError:
            return self.id.hex()

    def is_for(self, branch: bytes, run: RunPast | None) -> bool:
        """Whether this run, or without one any run of this branch, may take it."""
        if self.branch not in {None, branch}:
            return False
        return not self.run or (run is not None and (self.run, self.begun) == (run.id, run.number))


def key_of(agent: bytes, run: str = "") -> bytes:
    """The key of the entries that are signals to a run of the agent with this uuid, or to the agent."""
    return digest_of("holdfast.signal", agent + run.encode())[:16]


def _id_key(agent: bytes, id: bytes) -> bytes:
    return digest_of("holdfast.signal id", agent + id)[:16]


def body_of(
    id: bytes, name: str, value: Any, registry: Registry, *, branch: bytes, run: RunPast | None, by: str
) -> dict[str, Any]:
    """The body of the entry that is a signal."""
    if name != STOP:
        check_name(name)
    data = encode(value, registry)
    if len(data) > VALUE_MAX_BYTES:
        raise BadOption(f"a signal's value takes {len(data)} bytes, more than {VALUE_MAX_BYTES}")
    whose: dict[str, Any] = {} if run is None else {"run": run.id, "begun": run.number}
    return {"what": "signal", "name": name, "value": data, "branch": branch, "id": id, "by": by, **whose}


def entries_of(agent: bytes, body: dict[str, Any]) -> list[tuple[dict[str, Any], bytes]]:
    """The entries that a signal consists of, each with its key: itself, and that its id is used."""
    used = {"what": "signal id", "run": body.get("run", "")}
    return [(body, key_of(agent, body.get("run", ""))), (used, _id_key(agent, body["id"]))]


def drop_of(agent: bytes, signal: Signal, by: str) -> tuple[dict[str, Any], bytes]:
    """The entry that says that a signal counts no more, and its key."""
    return {"what": "signal dropped", "id": signal.id, "by": by}, key_of(agent, signal.run)


def read(at: int, parts: Mapping[str, Any]) -> Signal:
    """A signal from its entry."""
    try:
        return convert({**parts, "at": at}, Signal)
    except (TypeError, ValidationError) as error:
        raise CorruptValue("an entry that should be a signal does not follow the format") from error


def visible(view: View, agent: Agent, branch: Branch, run: RunPast | None) -> list[Signal]:
    """The signals that a run may take, or, without one, any run; oldest first. Some may have been taken before."""
    keys = [key_of(agent.uuid), *([key_of(agent.uuid, run.id)] if run is not None else [])]
    found = [entry for entry in view.log_under(keys) if entry.a == agent.a]
    signals, dropped = sorted_entries((entry.at, entry.body) for entry in found)
    return [one for one in signals if one.is_for(branch.uuid, run) and one.id not in dropped]


def stamp(view: View, agent: Agent, run: RunPast | None) -> int:
    """A number that differs when something was sent to a run, or dropped: asking for it reads no entry."""
    return view.count_under([key_of(agent.uuid), *([key_of(agent.uuid, run.id)] if run is not None else [])])


def sent_before(view: View, agent: Agent, id: bytes) -> bool:
    """Whether an id was used for a signal to this agent."""
    return any(entry.a == agent.a for entry in view.log_under([_id_key(agent.uuid, id)]))


def all_of(view: View, agent: Agent) -> tuple[list[Signal], set[bytes]]:
    """Every signal to an agent, oldest first, and the ids of those that were dropped."""
    return sorted_entries((entry.at, entry.body) for entry in view.log(agent.a))


def sorted_entries(entries: Iterable[tuple[int, Mapping[str, Any]]]) -> tuple[list[Signal], set[bytes]]:
    """The signals among entries of a log, with their times, and the ids of those that were dropped."""
    signals: dict[bytes, Signal] = {}
    dropped: set[bytes] = set()
    for at, body in entries:
        if body.get("what") == "signal":
            one = read(at, body)
            signals.setdefault(one.id, one)
        elif body.get("what") == "signal dropped":
            if not isinstance(body.get("id"), bytes):
                raise CorruptValue("an entry that should take a signal back does not follow the format")
            dropped.add(body["id"])
    return list(signals.values()), dropped


def check_name(name: str) -> None:
    check_text(name, "a signal's name")
    if name == STOP:
        raise BadName(f"{name!r} is no name for a signal", hint="To stop a run, cancel it: store.cancel(agent, run).")


def check_id(id: str) -> bytes:
    """An id that a sender gave, as it is kept."""
    return check_text(id, "a signal's id").encode()
