"""Safe points as a program has them: steps, phases, blocks that are not saved in the middle, and gates.

Owns what the program declares, and what happens there: nothing, a checkpoint, or one beside the line. Whether one is
due is the business of the room below; what a call of a run is, that of ``runs``. What always holds: it is the agent's
own thread that saves, where its program says that it may; a plain loop is never saved at a call, because what it makes
of the answer is not in its state yet.
"""

from __future__ import annotations

import contextvars
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import holdfast.agent.agent as below
from holdfast.agent.checkpoint import Checkpoint
from holdfast.agent.layers import Looked
from holdfast.agent.names import check_label
from holdfast.agent.points import END, GATE, GATE_FAILED, PHASE_FAILED, UNSAVED, Atomic
from holdfast.agent.schedule import PHASE
from holdfast.errors import AtomicOpen, BadOption, GateFailed, HoldfastError, InvariantViolated, ToolFailed
from holdfast.run.arguments import scrub
from holdfast.run.outcomes import MESSAGE_MAX, told
from holdfast.run.runs import Run
from holdfast.run.scope import EFFECT, HERE, Lane
from holdfast.run.steps import Long, Steps, Theirs, Work, drive, drive_later

if TYPE_CHECKING:
    from holdfast.agent.branch import BranchWriter
    from holdfast.run.host import AgentHost

log = logging.getLogger("holdfast.run")

Failing = Literal["raise", "rollback"]
CHECK_S = 60.0
"""How long the check of a gate may take, if nobody says."""
CHECK_MAX_S = 86_400.0
_TOLD = "_holdfast_told"


class SafePoints(below.Agent):
    """What an agent has for saying where it may be saved."""

    if TYPE_CHECKING:

        @property
        def _host(self) -> AgentHost: ...
        def _lane(self) -> Lane | None: ...
        def _made_host(self) -> AgentHost | None: ...
        def _captured(self, label: str, **options: Any) -> Callable[[], Checkpoint]: ...
        def plan_rollback(self, revision: str | Checkpoint) -> Any: ...

    # -- steps --------------------------------------------------------------------------------------------

    def step(self) -> Checkpoint | None:
        """A safe point: the state is whole here. Saves it if ``when`` asks for that and something has changed.

        Call it once in each round of your loop. It costs a microsecond or so when nothing is due.
        """
        host = self._made_host()
        if host is not None and host.looking is not None:
            host.looking("step")
        try:
            if host is not None and host.busy:
                return self._run_point("", "")
            trigger = self._pace.due()
            write = self._ready(trigger) if trigger is not None else None
            return write() if write is not None else None
        except InvariantViolated as error:
            return cast("Checkpoint", drive(self._going_back(error)))

    async def astep(self) -> Checkpoint | None:
        """As step(). The event loop does not wait for the disk, unless a run saves values of 256 KiB and more."""
        host = self._made_host()
        if host is not None and host.looking is not None:
            host.looking("step")
        try:
            if host is not None and host.busy:
                return self._run_point("", "")
            trigger = self._pace.due()
            return await self._later(trigger) if trigger is not None else None
        except InvariantViolated as error:
            return cast("Checkpoint", await drive_later(self._going_back(error)))

    async def _later(self, trigger: str, label: str = "") -> Checkpoint | None:
        began_s = time.monotonic()
        await self._bring_told()
        with self._check_writer().quiet():
            write = self._ready(trigger, label, await self._look_later(), began_s)
        made: Checkpoint | None = await Work(write).later() if write is not None else None
        return made

    def _run_point(self, event: str, label: str) -> Checkpoint | None:
        """A safe point in a run. Beside one that is going on, nothing is saved."""
        lane = self._lane()
        if lane is None or not isinstance(lane.scope, Run):
            return None
        made: Checkpoint | None = lane.scope.point(lane, f"{lane.path}!{lane.point()}", event, label)
        return made

    def _ready(
        self, trigger: str, label: str = "", looked: Sequence[Looked] | None = None, began_s: float = 0.0
    ) -> Callable[[], Checkpoint] | None:
        """A checkpoint that the policy asks for, ready to be written; None where there is nothing to save.

        Nor inside a tool: what its caller makes of the answer is not in the state yet. ``looked``: what has changed in
        the layers beside the state, if somebody has looked; ``began_s``: since when its maker stands still, if not now.
        """
        writer, began_s = self._check_writer(), began_s or time.monotonic()
        if EFFECT.get() is not None:
            writer.discard(looked or ())
            return None
        with writer.quiet():
            return self._made_ready(writer, trigger, label, writer.look() if looked is None else looked, began_s)

    def _made_ready(
        self, writer: BranchWriter, trigger: str, label: str, looked: Sequence[Looked], began_s: float
    ) -> Callable[[], Checkpoint] | None:
        write = None
        try:
            if not (looked or self._dirty_state) or self._host.has_remains:
                self._pace.unchanged()
                return None
            self._host.check_free()
            when = self.when
            lazy = when is not None and when.background and trigger != END
            if self._pace.whole:
                write = self._captured(label, trigger=trigger, lazy=lazy, began_s=began_s, looked=looked)
        except AtomicOpen:  # somebody has entered a block at this moment, or begun a write: it is asked for again later
            return None
        else:
            return write
        finally:
            if write is None:
                writer.discard(looked)

    def _at_end(self, error: BaseException | None) -> bool:
        """`with agent:` has ended: whether that is a safe point."""
        if isinstance(error, Exception) and self._is_news(error):
            self._pace.failed()
        if error is not None or self._writer is None or self.closed or self.when is None:
            return False
        return self._pace.whole and not self._host.busy and self._host.is_free

    # -- blocks and phases ----------------------------------------------------------------------------------

    def atomic(self) -> Atomic:
        """``with agent.atomic():``: in the middle of it nothing is saved, by this or by another task or thread.

        What would be saved waits until its end; a checkpoint that somebody asks for meanwhile raises ``AtomicOpen``.
        """
        return Atomic(self._pace)

    def phase(self, name: str) -> Phase:
        """A named part of the work: ``with agent.phase("plan"):``, or ``async with``. Its end is a safe point.

        If an exception leaves it, the failing state is saved beside the line, marked suspect: the last good checkpoint
        stays the head.
        """
        return Phase(self, name)

    def _phase_ended(self, inner: Lane | None, name: str) -> str | None:
        """What asks for a checkpoint at the end of a phase. In a run it is taken."""
        host = self._made_host()
        if host is not None and host.busy:
            if inner is not None and isinstance(inner.scope, Run):
                inner.scope.point(inner, f"{inner.prefix}!end", PHASE, name)
            return None
        return self._pace.due(PHASE) if self._writer is not None else None

    def _keep_failing(self, name: str, error: BaseException, trigger: str) -> bool:
        """Save the state beside the line, marked suspect. Whoever has the error has it in any case."""
        if isinstance(error, HoldfastError) and not isinstance(error, ToolFailed | GateFailed | InvariantViolated):
            return False  # it says nothing about the state
        if not isinstance(error, Exception) or self._writer is None or self.closed or not self._is_news(error):
            return False
        self._pace.failed()
        lane, host = self._lane(), self._host
        run = lane.scope if lane is not None and isinstance(lane.scope, Run) else None
        if not self._pace.whole or (run is not None and run.replaying) or (run is None and host.busy):
            return False
        try:
            if self.dirty:
                said = told(error)
                if isinstance(error, GateFailed | InvariantViolated):
                    said = error.message.removesuffix(UNSAVED)
                why = str(scrub(host, said[:MESSAGE_MAX], f"the error that ended {name}"))
                if host.beside(f"{name} failed", why, trigger):
                    self._said = self.digest  # it is kept, and the exception is the message
                    return True
        except HoldfastError as failed:
            log.warning("the failing state of %s was not saved: %s", self.name, failed)
        return False

    def _is_news(self, error: BaseException) -> bool:
        """Whether nobody has been told of it: it may pass through several phases, and leave `with agent:` as well."""
        known: set[int] = getattr(error, _TOLD, set())
        with suppress(AttributeError):  # an exception with slots is told of at each
            setattr(error, _TOLD, known | {id(self)})
        return id(self) not in known

    # -- gates ----------------------------------------------------------------------------------------------

    def gate(
        self, name: str, check: Callable[[Any], Any], *, limit_s: float = CHECK_S, failing: Failing = "raise"
    ) -> Checkpoint | None:
        """Save the state if ``check(state)`` passes: unless it returns something false that is not None, or raises.

        If it does not pass, or takes longer than ``limit_s``, nothing is saved, and ``GateFailed`` is raised. With
        ``failing="rollback"`` the agent goes back to the checkpoint of the last gate that it passed, and None is
        returned; if that would undo something outside, ``GateFailed`` has the plan, and nothing was done.
        """
        return drive(self._gating(name, check, limit_s, failing, later=False))  # type: ignore[no-any-return]

    async def agate(
        self, name: str, check: Callable[[Any], Any], *, limit_s: float = CHECK_S, failing: Failing = "raise"
    ) -> Checkpoint | None:
        """As gate(). The check may be async."""
        return await drive_later(self._gating(name, check, limit_s, failing, later=True))  # type: ignore[no-any-return]

    def _gating(self, name: str, check: Callable[[Any], Any], limit_s: float, failing: str, *, later: bool) -> Steps:
        if not check_label(name) or not callable(check):
            raise BadOption("a gate has a name and a check", hint='agent.gate("validated", lambda state: ...)')
        if type(limit_s) not in {int, float} or not (math.isfinite(limit_s) and 0 < limit_s <= CHECK_MAX_S):
            raise BadOption(f"limit_s={limit_s!r}", hint=f"Use seconds above 0, up to {CHECK_MAX_S:,.0f}.")
        if failing not in get_args(Failing):
            raise BadOption(f"failing={failing!r}", hint="Use raise or rollback.")
        self._check_writer()
        cause: BaseException | None = None
        before = yield Work(lambda: self.digest)
        try:
            answer = yield Theirs(partial(check, self.state), f"the check of {name}", limit_s=limit_s)
            why = f"it returned {answer!r:.80}" if answer is not None and not answer else ""
            if not why and (yield Work(lambda: self.digest)) != before:
                why = "the state was changed while it was checked"
        except Exception as error:  # noqa: BLE001 - whatever a check raises, the state has not passed it
            cause, why = error, f"it raised {type(error).__name__}: {error!s:.200}"
        if not why:
            return (yield from self._passed(name, later=later))
        failed = GateFailed(f"{self.name} did not pass the gate {name!r}: {why}{UNSAVED}", gate=name)
        if failing == "raise":
            raise failed from cause
        last = yield Work(self._last_passed)
        if last is None:
            failed.hint = "No gate was passed before, so there is nothing to go back to."
            raise failed from cause
        return (yield from self._send_back(name, failed, cause, last, GATE_FAILED))

    def _passed(self, name: str, *, later: bool) -> Steps:
        lane = self._lane()
        if lane is not None and isinstance(lane.scope, Run):
            save = lane.scope.checkpoint_later if later else lane.scope.checkpoint
            return (yield from save(lane, name, GATE))
        self._host.check_free()
        return (yield Work(self._captured(name, trigger=GATE)))

    def _going_back(self, error: InvariantViolated) -> Steps:
        """An invariant has refused the state. Whoever guards it may let the agent go back."""
        yield from ()
        raise error

    def _send_back(
        self,
        name: str,
        failed: GateFailed | InvariantViolated,
        cause: BaseException | None,
        last: Checkpoint,
        trigger: str,
    ) -> Steps:
        """Go back to a checkpoint, unless that would undo something outside; the failing state is kept beside."""
        plan = yield Work(partial(self.plan_rollback, last))
        if plan.undo or plan.blocked:
            failed.plan = plan
            failed.hint = "Going back would undo what was done outside: look at error.plan, then error.plan.apply()."
            raise failed from cause
        lane = self._lane()
        if lane is None or not isinstance(lane.scope, Run):  # a run's own rollback ends it, and keeps the state itself
            kept = yield Work(partial(self._keep_failing, name, failed, trigger))
            if kept:
                yield Work(self._host.to_head)
        yield Long(plan.apply)

    def _last_passed(self) -> Checkpoint | None:
        for point in self._walk():
            if point.manifest.cost is not None and point.manifest.cost.trigger == GATE:
                return self._seen(point)
        return None


class Phase:
    """A part of the work with a name."""

    def __init__(self, agent: SafePoints, name: str) -> None:
        self._agent, self._name = agent, check_label(name)
        self._inner: Lane | None = None
        self._token: contextvars.Token[Lane | None] | None = None

    def __enter__(self) -> None:
        lane = self._agent._lane()
        if lane is not None:
            self._inner = lane.step(self._name)
            self._token = HERE.set(self._inner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        agent, name, trigger = self._agent, self._name, self._leave(error)
        if error is not None:
            agent._keep_failing(name, error, PHASE_FAILED)
        elif trigger is not None and (write := agent._ready(trigger, name)) is not None:
            write()

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        agent, name, trigger = self._agent, self._name, self._leave(error)
        if isinstance(error, Exception):
            await Work(partial(agent._keep_failing, name, error, PHASE_FAILED)).later()
        elif trigger is not None:
            await agent._later(trigger, name)

    def _leave(self, error: BaseException | None) -> str | None:
        if self._token is not None:
            try:
                HERE.reset(self._token)
            except ValueError:  # left in another context than it was entered in, as some test runners do
                HERE.set(self._inner.above if self._inner is not None else None)
            self._token = None
        return self._agent._phase_ended(self._inner, self._name) if error is None else None
