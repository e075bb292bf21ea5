"""Executing a recorded run again, in memory: the same program, the recorded answers, and a proof that it went the same.

Owns what is recorded of a run, the run as it is while it is executed again, and what is found out. What it stands on is
``memory``; in which process it happens, the business of ``jobs``; what may be different, of ``variation``. What always
holds: no tool is called that the record answers, nor any other, unless a variation allows it; the first difference is
kept, whatever the program makes of it.

    history = recorded(view, run)                 what a store has of a run
    Replaying(handle, history, variation)         one execution of it; ``.execute(function)`` gives an ``Execution``
"""

from __future__ import annotations

import asyncio
import linecache
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.agent.changes import diff
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.points import RUN
from holdfast.codec.values import encode
from holdfast.errors import (
    BadOption,
    Diverged,
    HoldfastError,
    UnknownRevision,
    UnknownTool,
    command,
)
from holdfast.run import records as rec
from holdfast.run.arguments import differences, fetch, stow
from holdfast.run.children import joined
from holdfast.run.durables import DURABLES, Durable, call_of
from holdfast.run.effects import SPAWN
from holdfast.run.listing import View
from holdfast.run.outcomes import Local, brief_fault, told
from holdfast.run.past import OPEN, Call, Past, RunPast
from holdfast.run.runs import Body, Run, describe
from holdfast.run.scope import Lane, now_us, number_tasks
from holdfast.run.steps import Request, Steps, drive, drive_later
from holdfast.run.tools import Tool
from holdfast.text import clean
from holdfast.travel.execution import RECORDED, Difference, Execution, Passed, Step
from holdfast.travel.handle import Store
from holdfast.travel.memory import MemoryAgent
from holdfast.travel.sandbox import caller, is_own
from holdfast.travel.timeline import NEVER_S, ReplayLoop, TimedOrder, times_of

if TYPE_CHECKING:
    from holdfast.travel.variation import Job, Variation

STEPS_MAX = 100_000
"""Steps that are listed."""
STATES_MAX = 2_000
"""Steps whose states are given back."""
_SHOWN = 200
_CATCH_UP_S = 2.0


class Halt(BaseException):
    """Ends an execution where it is. Not an Exception: no handler of the program is meant."""


# -- what is recorded -------------------------------------------------------------------------------------------------


class History(NamedTuple):
    """A run as it was executed, to be executed again."""

    run: RunPast
    end: rec.End | None  # how it ended; None while it has not, or was interrupted
    ended: int  # the number of that record
    took_s: dict[str, float]  # how long each call has taken
    at: str  # the id of the checkpoint that it was named by, if it was
    left: bool  # whether a rollback has left its end behind


Entry = tuple[int, rec.Record]


def recorded(view: View, which: str | Checkpoint | None) -> History:
    """The run of an id, the one in which a checkpoint was taken, or the newest.

    What a rollback has left behind is no part of a run that was resumed since. A checkpoint that was left behind names
    the run as it was then.
    """
    whole = line = list(view.line.records())
    runs = [one.run for _, one in line if isinstance(one, rec.Begin) and one.kind == "run"]
    if not runs:
        hint = "Only durable functions can be executed again. Batches have no state that could be compared."
        where = view.name if view.branch_name == "main" else f"{view.name}@{view.branch_name}"
        raise BadOption(f"{where} has no runs", hint=hint)
    id, point, known = which or runs[-1], None, len(line)
    if isinstance(id, Checkpoint) or id not in runs:
        point = _on_line(view, id if isinstance(id, Checkpoint) else _found(view, id))
        known = point._manifest.effects[0]
        line = _until(line, lambda at, one: isinstance(one, rec.RolledBack) and one.to < known < at)
        id = _run_of(view, point, line)
    line = _until(line, lambda at, one: isinstance(one, rec.Begin) and one.run == id and at > known + 1)
    begun = max(at for at, one in line if one.run == id and (isinstance(one, rec.Begin) or _resumes(one)))
    mine = _until(line, lambda at, one: isinstance(one, rec.RolledBack) and at > begun)
    ends = {at: one for at, one in mine if at > begun and one.run == id and isinstance(one, rec.End)}
    # Without its end, which would forget the calls that failed last: those are to be seen.
    run = Past(entry for entry in mine if entry[0] not in ends).runs[id]
    called = {call.intent.key for call in run.calls.values() if call.tool == SPAWN and call.intent is not None}
    if called - joined(run, lambda value: fetch(value, view.line, view._store._registry, inert=True)).keys():
        raise BadOption(
            f"run {id} has a child of which it is not recorded what came of it",
            hint="Let the run end first, or replay the run of the child.",
        )
    ended, end = next(reversed(ends.items()), (0, None))
    left = any(isinstance(one, rec.RolledBack) and one.to < ended < at for at, one in whole)
    return History(run, end, ended, times_of(run), point.id if point is not None else "", left)


def _until(line: Iterable[Entry], ends: Callable[[int, rec.Record], bool]) -> list[Entry]:
    """The records before the first of which this is true."""
    return list(takewhile(lambda entry: not ends(*entry), line))


def _resumes(record: rec.Record) -> bool:
    return isinstance(record, rec.Note) and record.what == "resume"


def _run_of(view: View, point: Checkpoint, line: Iterable[Entry]) -> str:
    """The run in which a checkpoint was taken: the last one then, if it had not ended, or ended with it."""
    known = point._manifest.effects[0]
    then = _until(line, lambda at, one: at > known and not (at == known + 1 and isinstance(one, rec.Begin)))
    last = Past(then).last
    if last is not None and (last.status in OPEN or (last.ended == known and point.trigger == RUN)):
        return last.id
    raise BadOption(
        f"{point.label or point.short_id} was not taken in a run of {view.name}: there is nothing to execute again",
        hint=f"See `{command('runs', view.name)}` for the runs there are.",
    )


def _found(view: View, revision: str) -> Checkpoint:
    agent = view._store.agent(view.name, branch=view.branch_name, readonly=True)
    try:
        return agent.at(revision)
    except UnknownRevision as error:
        hint = f"Name a run (`{command('runs', view.name)}`) or a checkpoint (`{command('log', view.name)}`)."
        raise UnknownRevision(f"{revision!r} is no run and no checkpoint of {view.name}", hint=hint) from error


def _on_line(view: View, point: Checkpoint) -> Checkpoint:
    """A checkpoint, unless it is of another branch: what is recorded here tells of another history."""
    head = view._store._db.view.branch_at(view._branch.b).head
    if point.branch == view.branch_name or point._point.n in point._graph().above([head]):
        return point
    there = f"{view.name}@{point.branch}"
    raise BadOption(
        f"{point.label or point.short_id} is a checkpoint of {there}, which {view.branch_name} does not lead to",
        hint=f"Name its branch: `{command('replay', there, f'id:{point.short_id}')}`.",
    )


# -- one execution ----------------------------------------------------------------------------------------------------


Asked = Generator[Any, Any, tuple[str, Call | None]]


class CatchUp(Request):
    """Wait until other tasks have come to what is recorded for them: here the record ends."""

    def __init__(self, run: Replaying) -> None:
        self.run = run

    def now(self) -> None: ...

    async def later(self) -> None:
        end_s = time.monotonic() + _CATCH_UP_S
        while self.run.replaying and time.monotonic() < end_s:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0)


class Unanswered(Request):
    """Wait as long as anything else happens: the run ended, and this call had not."""

    def now(self) -> None: ...

    async def later(self) -> None:
        await asyncio.sleep(NEVER_S / 2)


class Replaying(Run):
    """One execution of a recorded run. ``variation`` says what is different, and what may be done then."""

    def __init__(self, agent: MemoryAgent, recorded: History, variation: Variation) -> None:
        past = Past()
        past.incarnation = recorded.run.begin.life
        super().__init__(agent._host, past, recorded.run, strict=True)
        self.order = self.timed = TimedOrder(recorded.run.order, recorded.took_s)
        self.handle, self.recording, self.variation = agent, recorded, variation
        self.found = Execution(
            agent.name, agent.branch_name, recorded.run.id, recorded.run.begin.function, isolation=[], steps=[]
        )
        self.observe: Callable[[Step], None] | None = None
        self.over = False  # nothing more is answered
        self._kept = dict(recorded.run.calls)  # to be found by what was called, once the ways have parted
        self._counts: dict[str, int] = {}  # calls of each tool
        self._wrote: dict[str, None] = {}  # tools that were answered for, and may have written files since a checkpoint
        self._number = 0  # of the newest step
        good, bad = variation.between
        self._within = bool(bad) and good not in {one.id.hex() for one in recorded.run.saved.values()}

    # -- steps ----------------------------------------------------------------------------------------------

    def _step(self, path: str, what: str, answer: str = "") -> None:
        if self.over:
            raise Halt
        found = self.found
        found.calls += what != "checkpoint"
        self._number += 1
        step = Step(self._number, path, what, caller(), answer)
        if len(found.steps) < STEPS_MAX:
            found.steps.append(step)
        if answer == "live":
            found.live.append(f"{what} at {path}")
        self._keep_step()
        if self.observe is not None:
            self.observe(step)

    def _keep_step(self) -> None:
        """The state at this step, if somebody wants those of all steps. A long way has too many."""
        if self._within and len(self.found.states) < STATES_MAX:
            self._keep(str(self._number), wanted=True)

    def differ(self, kind: str, path: str, expected: str, actual: str, differs: Iterable[str] = ()) -> None:
        """The ways part here. The first place counts; a replay that varies nothing ends there."""
        if self.found.difference is None:
            line = caller().removeprefix("?")  # at the end nobody has called
            differs = [*differs, *self._limits(actual, *differs)]
            self.found.difference = Difference(kind, path, expected, actual, line, differs, self._number)
        if not self.variation.free:
            self.halt("")

    def halt(self, why: str) -> None:
        """Stop the program here."""
        self.found.stopped = self.found.stopped or why
        self._finish()
        loop = asyncio._get_running_loop()
        if isinstance(loop, ReplayLoop):  # a task may do it, for which the program does not wait
            loop.stop()
        raise Halt

    def _finish(self) -> None:
        """Nothing more is answered. Whoever waits for his turn is told."""
        self.over = True
        self.order.fail(Diverged("the execution has ended"))

    # -- calls ----------------------------------------------------------------------------------------------

    def asked(self, lane: Lane, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Asked:
        if self.recording.end is None and path not in self._waiting and self.replaying and not self.variation.free:
            yield CatchUp(self)
        elif self._is_unanswered(path, tool):
            yield Unanswered()
        return (yield from super().asked(lane, path, tool, mark, arguments))

    def _is_unanswered(self, path: str, tool: Tool) -> bool:
        """Whether it is a call of a task that may have been under way when the run ended. Reads are recorded later."""
        if "~" not in path or self.recording.end is None or self.found.difference is not None:
            return False
        call, variation = self._waiting.get(path), self.variation
        number = self._counts.get(tool.name, -1) + 1
        if variation.result_of(path, tool.name, number) is not None or tool.name in variation.tools:
            return False
        if call is not None:
            return call.tool == tool.name and call.outcome is None and not call.cancelled
        return tool.kind == "read" and not (variation.free and variation.allows(tool))

    def recorded(self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any]) -> Call | None:
        if self.over:
            raise Halt
        self.timed.asked(path)
        number = self._counts[tool.name] = self._counts.get(tool.name, -1) + 1
        changed = self.variation.result_of(path, tool.name, number)
        call = self._waiting.get(path)
        matches = call is not None and call.tool == tool.name and call.fingerprint == mark
        if changed is not None:
            self._step(path, tool.name, "changed")
            return self._changed(path, tool, mark, arguments, call if matches else None, changed[0])
        if tool.name in self.variation.tools:
            self._step(path, tool.name, "live")
            self._part(path)
            return None
        if call is not None and matches and (call.outcome is not None or call.cancelled):
            self._step(path, tool.name, "record")
            self._check_kept(call)
            del self._waiting[path]
            self._use(call)
            if tool.kind != "read":
                self._wrote[tool.name] = None
            return call
        return self._unlike(path, tool, mark, arguments, call)

    def _check_kept(self, call: Call) -> None:
        if call.lost or isinstance(call.outcome and call.outcome.value, int):
            self.halt(f"what {call.tool} returned at {call.path} was not kept: give it with a result of your own")

    def _use(self, call: Call) -> None:
        self._kept.pop(call.path, None)

    def _unlike(self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any], call: Call | None) -> Call | None:
        """The program makes a call that is not recorded here."""
        actual = describe(tool.name, arguments)
        if call is None and self.recording.end is None and not self.replaying and self.found.difference is None:
            self._ended(path, actual)
        if call is not None and call.outcome is None and not call.cancelled and call.tool == tool.name:
            if "~" in path and self.recording.end is not None and not self.variation.free:
                self.differ("end", path, _how(self.recording.end), f"it waits for {actual}, which nobody answered")
            self._ended(path, actual)  # it was begun, and nobody knows what came of it
        differs = differences(self.arguments(call), arguments) if call is not None and call.tool == tool.name else ()
        expected = self.describe(call) if call is not None else "checkpoint" if path in self._saves else "nothing"
        self.differ("call", path, expected, actual, differs)
        self._part(path)
        same = [
            one
            for one in self._kept.values()
            if (one.tool, one.fingerprint) == (tool.name, mark) and one.outcome is not None
        ]
        if same:
            found = min(same, key=lambda one: (one.path != path, one.number))
            self._step(path, tool.name, "record")
            self._check_kept(found)
            self._use(found)
            self.order.enter(path)
            made = Call(self.run_id, path, found.number, done=found.done, intent=found.intent, decision=found.decision)
            made.read = found.read
            return made
        if self.variation.allows(tool):
            self._step(path, tool.name, "live")
            return None
        self._step(path, tool.name)
        word = "read" if tool.kind == "read" else "write"
        return self.halt(f"it would {word}: {actual} at {caller()}, which was not allowed")  # type: ignore[func-returns-value]

    def _ended(self, path: str, actual: str) -> None:
        self._step(path, actual.partition("(")[0])
        self.found.status = f"{RECORDED} {path}: {actual}"
        self.halt("")

    def away(self, path: str, what: str, *, ends: bool) -> None:
        """The program does what cannot be done here. ``ends``: with it an execution ends, and so may the record."""
        if ends and self.recording.end is None and not self.replaying and not self._saves:
            self._ended(path, what)
        self.halt(f"it would {what} at {caller()}, which no replay does")

    def _part(self, path: str) -> None:
        """From here on nobody waits for what is recorded: the ways have parted."""
        gone = [one for one in self._waiting.values() if one.outcome is not None or one.cancelled]
        self._waiting.clear()
        self._points.clear()
        self.order.drop(one.path for one in gone if one.path != path)
        if any(one.path == path for one in gone):
            self.order.drop((path,))

    def _changed(
        self, path: str, tool: Tool, mark: bytes, arguments: dict[str, Any], call: Call | None, value: Any
    ) -> Call:
        kept = stow(value, self.registry)
        self.ledger.append(stowed=kept)
        done = rec.Done(now_us(), self.run_id, path, "value", tool=tool.name, fingerprint=mark, value=kept.value)
        if call is not None and (call.outcome is not None or call.cancelled):
            del self._waiting[path]
            self._use(call)
        else:
            self.differ("call", path, "nothing", describe(tool.name, arguments))
            self._part(path)
            self.order.enter(path)
        return Call(self.run_id, path, done=done, read=True)

    def check_settled(self, tool: Tool | None = None) -> None:
        if self.over:
            raise Halt
        super().check_settled(tool)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _looking(self, path: str) -> Steps:
        call = self._waiting.pop(f"{path}!looked", None)
        if call is not None and (call.outcome is not None or call.cancelled):
            self._use(call)
            yield from self._apart(call.path, call, lambda: None)

    def _checkpoint(self, lane: Lane, path: str, label: str, **options: Any) -> Any:  # noqa: ARG002 - as in Run
        found = self._saves.pop(path, None)
        if found is None:
            self._judge(label or path)  # what was refused then is refused again
            if self.recording.end is None and not self.replaying and self.found.difference is None:
                self._ended(path, "checkpoint")
            expected = self.describe(self._waiting[path]) if path in self._waiting else "nothing"
            self.differ("call", path, expected, f"checkpoint {label!r}" if label else "checkpoint")
            return self._imagined(path, label)
        self._compare(path, found)
        return self.host.saved(found.id)

    def _judge(self, where: str) -> None:
        """Ask the invariants that the program has declared about a state that nobody has asked about."""
        judged = self.host.judge(sparing=False) if self.host.judge is not None else None
        if judged is not None and judged.suspect:
            self.found.suspect.append(f"{where}: {judged.suspect}")

    def _imagined(self, path: str, label: str) -> Checkpoint:
        """A checkpoint that nobody takes: the program is given the one that it stands on."""
        self._pass(path, label, "", self.host.state_digest(), None)
        return self.handle.head or self.handle._seen(self.handle._start)

    def _compare(self, path: str, found: rec.Saved) -> None:
        actual = self.host.state_digest()
        label = ""
        with suppress(UnknownRevision):  # it was let go; its digest is in the record
            label = self.handle._seen(self.host._row(found.id)).label
        self._pass(path, label, found.id.hex(), actual, actual == found.digest)
        if actual != found.digest:
            shown = f"state {found.digest.hex()[:16]}", f"state {actual.hex()[:16]}"
            self.differ("state", path, *shown, self._state_differs(found.id))
            self._judge(label or path)
        elif self.found.difference is None:
            with suppress(UnknownRevision):
                self.handle.put_files(self.host._row(found.id))
                self._wrote.clear()
        self.variation.change_state(self.handle, found.id)

    def _state_differs(self, id: bytes) -> list[str]:
        try:
            return self.host.difference(id)
        except HoldfastError as error:
            return [f"that state is not there any more: {error}"]

    def _pass(self, path: str, label: str, id: str, digest: bytes, same: bool | None) -> None:
        good, bad = self.variation.between
        self._within = self._within or bool(bad and id == good)
        self._step(path, "checkpoint")
        if bad and id == bad:
            self.halt("")
        self.found.checkpoints.append(Passed(path, label, id, digest.hex(), same))
        self.handle.passed()
        self._keep(label or path)

    def _keep(self, label: str, *, wanted: bool = False) -> None:
        if wanted or self.variation.keep:
            state = encode(self.handle.state.copy(), self.registry)
            self.found.states.append((label, state.hex()))

    # -- from the beginning to the end ------------------------------------------------------------------------

    def execute(self, made: Durable, check: Callable[[Any], Any] | None = None) -> Execution:
        """Execute it: the function, with the arguments that it had, from the state in which it began."""
        found = self.found
        found.code_changed = bool(self.past.begin.code) and made.code != self.past.begin.code
        began_s = time.monotonic()
        try:
            args, kwargs = call_of(self.past, made, self.handle, self.ledger, self.registry)
            try:
                args, kwargs = self.variation.arguments(made, self.handle, args, kwargs)
                self.variation.change_state(self.handle)
            except BadOption as error:
                found.misname(error)
                self.halt(error.message)
            call = partial(made.function, self.handle, *args, **kwargs)
            self._keep_step()
            if made.waits:
                self._run(made, call)
            else:
                self._end(drive(self._body(made, call)))
        except Halt:
            found.status = found.status or "stopped"
        except Exception as error:  # noqa: BLE001 - whatever the program raises is how it ended
            self._raised(error)
        except BaseExceptionGroup:  # as a group of tasks gives it on
            if not self.over:
                raise
            found.status = found.status or "stopped"
        finally:
            self.over = self.ended = True
            found.seconds = time.monotonic() - began_s
        try:
            self.variation.check_named(self.past)
        except BadOption as error:
            found.misname(error)
        if check is not None and not (self.variation.free and found.unknown):  # else nobody knows how it ends
            found.check = bool(check(self.handle))
        return found

    def _body(self, made: Durable, call: Callable[[], Any]) -> Steps:
        result = yield Body(self, made.name, call)
        return result

    def _run(self, made: Durable, call: Callable[[], Any]) -> None:
        end = self.recording.end
        took_s = (end.at - self.past.begin.at) / 1e6 if end is not None else 0.0
        with asyncio.Runner(loop_factory=partial(ReplayLoop, took_s)) as runner:
            try:
                runner.run(self._later(made, call))
            except RuntimeError:
                if not self.over:
                    raise
                raise Halt from None

    async def _later(self, made: Durable, call: Callable[[], Any]) -> None:
        """What its tasks do after its end, as this loop ends them, is no part of the run."""
        number_tasks(asyncio.get_running_loop())
        try:
            self._end(await drive_later(self._body(made, call)))
        except Exception as error:  # noqa: BLE001 - whatever the program raises is how it ended
            self._raised(error)
        finally:
            self._finish()

    def _end(self, result: Any) -> None:
        found, end = self.found, self.recording.end
        found.status, found.result = "finished", _short(result)
        kept = stow(result, self.registry)
        if end is None:
            if self.found.difference is None:
                self.differ("end", "", "the record ends before", "the function ended")
        elif end.how != "finished":
            self.differ("end", "", _how(end), f"it returned {_short(result)}")
        elif kept.value != end.value and not isinstance(end.value, int):
            was = fetch(end.value, self.ledger, self.registry, inert=True)
            now = fetch(kept.value, Local(kept), self.registry, inert=True)
            self.differ("result", "", _short(was), _short(now), differences({"result": was}, {"result": now}))
        self._reached()
        self._compare_last()

    def _raised(self, error: Exception) -> None:
        found, end = self.found, self.recording.end
        found.status, found.error = "failed", told(error)[:_SHOWN]
        if found.difference is not None and self.over:
            return  # what the program made of it
        fault = brief_fault(self.host, error, "the error that ended a run")
        if end is None or end.how not in {"failed", "attention"} or end.fault is None:
            self._quietly("error", _how(end), found.error, error)
        elif fault[1:3] != end.fault[1:3]:
            self._quietly("error", f"{end.fault[1]}: {end.fault[2]}", f"{fault[1]}: {fault[2]}", error)
        else:
            self._reached()
        self._keep("failed")

    def _quietly(self, kind: str, expected: str, actual: str, error: BaseException) -> None:
        if self.found.difference is None:
            line, trace = "", error.__traceback__
            while trace is not None:
                if is_own(trace.tb_frame.f_code.co_filename):
                    line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
                trace = trace.tb_next
            differs = [*self._astray(error), *self._limits(actual)]
            self.found.difference = Difference(kind, "", expected, actual, line, differs, self._number)

    def _limits(self, *texts: str) -> list[str]:
        """What may part the ways only because an execution has files as checkpoints have them, and calls no tool."""
        found, files = [], self.handle.workspace
        if files is not None and self._wrote:
            names = ", ".join(self._wrote)
            found.append(f"files that {names} may have written since the checkpoint before are not in a replay")
        if files is not None and self.handle.apart and any(str(files) in text for text in texts):
            found.append(f"{files} is the replay's own: the files cannot be where they were")
        return found

    def _astray(self, error: BaseException) -> list[str]:
        """What to say where a path led nowhere only because the execution has a directory of its own."""
        name = error.filename if isinstance(error, FileNotFoundError) else None
        if not isinstance(name, str) or Path(name).is_absolute() or self.handle.workspace is None:
            return []
        return [f"{name} is relative, and a replay has a directory of its own: agent.workspace is where the files are"]

    def _reached(self) -> None:
        """Whether all that is recorded was come by."""
        if self.found.difference is not None:
            return
        for path, call in self._waiting.items():
            if not self.past.is_inside(path) and call.outcome is not None:
                self.differ("call", path, self.describe(call), "the function ended")
        for path in self._saves:
            self.differ("call", path, "checkpoint", "the function ended")

    def _compare_last(self) -> None:
        """The state in which the run ended: that of its last checkpoint, or of the one that was taken with its end."""
        digest, id, label = self._last()
        actual = self.host.state_digest()
        if id:
            self.found.checkpoints.append(Passed("", label, id.hex(), actual.hex(), actual == digest))
            self._number += 1
            self._keep_step()
        self._keep(label or "end")
        if not id or actual == digest:
            return
        with_it = self.handle._seen(self.host._row(id))
        self.handle._document.digests()
        changes = diff(with_it.state, self.handle._document, "recorded", "now")
        self.found.changes = [f"{sign} {clean(text)}" for sign, text in changes.lines()][:_SHOWN]
        if self.found.difference is None:
            self.differ("state", "", f"state {digest.hex()[:16]}", f"state {actual.hex()[:16]}", changes.brief())

    def _last(self) -> tuple[bytes, bytes, str]:
        """Digest, id and label; empty where nobody knows."""
        recording = self.recording
        if recording.end is None or recording.end.how != "finished":
            return b"", b"", ""
        view, branch = self.handle._db.view, self.handle._fresh_branch()
        for start in self.handle._graph().starts if recording.left else {branch.head} - {0}:
            for point in view.walk(start):
                at = point.manifest.effects[0]
                of_end = at == recording.ended and point.manifest.label.startswith("run ")
                if of_end and not (recording.left and point.row.b != branch.b):
                    seen = self.handle._seen(point)
                    return bytes.fromhex(seen.digest), point.id, seen.label
                if at < self.past.number:
                    break
        if recording.left:
            return b"", b"", ""
        for saved in reversed(self.past.saved.values()):
            return saved.digest, saved.id, ""
        begun = self.handle._seen(self.handle._start)
        return bytes.fromhex(begun.digest), begun._id, begun.label


def _how(end: rec.End | None) -> str:
    if end is None:
        return "the record ends"
    if end.fault is not None:
        return f"{end.how}: {end.fault[1]}: {end.fault[2]}"[:_SHOWN]
    return end.how


def _short(value: Any) -> str:
    text = clean(repr(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def source_of(line: str) -> str:
    """The text of a line of a program: ``trip.py:17``."""
    file, _, number = line.rpartition(":")
    return linecache.getline(file, int(number)).strip() if file and number.isdigit() else ""


# -- by name ----------------------------------------------------------------------------------------------------------


def prepared(store: Store, job: Job, variation: Variation) -> tuple[Replaying, Durable]:
    """A run of a store that was opened for reading, and the function of this program that it is executed with."""
    view = store._view(job.agent, job.branch)
    history = recorded(view, f"id:{job.at}" if job.at else job.run)
    begin = history.run.begin
    made = variation.function or DURABLES.get(begin.function)
    if made is None:
        raise UnknownTool(
            f"no durable function {begin.function!r} in the program",
            hint="Name the file or module that defines it, or the function: FILE.py:FUNCTION.",
        )
    start = store._db.view.find(begin.start)
    if start is None:
        raise UnknownRevision(
            f"checkpoint {begin.start.hex()[:12]}, at which run {begin.run} began, is not in the history any more",
            hint="It was forgotten. Replay a newer run.",
        )
    return Replaying(MemoryAgent(view, start), history, variation), made
