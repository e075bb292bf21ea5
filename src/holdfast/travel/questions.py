"""What one can ask about an agent besides its history: why it failed, in what it drifts, what its log said when.

Owns the public methods, for the handles of this room; the modules that answer are loaded when they are first asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from holdfast.agent.checkpoint import Checkpoint

if TYPE_CHECKING:
    from holdfast.crash.dump import Dump
    from holdfast.travel.drift import Drift
    from holdfast.travel.explain import Report, Write
    from holdfast.travel.handle import Agent, Store
    from holdfast.travel.logs import LogHandler, LogLine, Metrics
    from holdfast.travel.reconcile import Action, Desired, Reconciled, Tools


class Asked(TypedDict, total=False):
    """What is known about a failure.

    - ``agent``: which one, where a dump has several; ``branch``: of the agent.
    - ``check``: as for ``agent.bisect``; ``invariants``: expressions that should always be true.
    - ``write``: makes prose of the report, given as JSON has it: a model, for instance. Nothing depends on it.
    """

    agent: str | None
    branch: str
    check: Any
    invariants: Sequence[str]
    write: Write | None


class Questions:
    """Those about one agent."""

    def drift(
        self,
        baseline: str | Checkpoint,
        at: str | Checkpoint | None = None,
        *,
        paths: Sequence[str] = (),
        may: Sequence[str] = (),
    ) -> Drift:
        """In what a checkpoint (default: the newest) differs from a baseline that is as it should be.

        Compared are configuration, environment, versions, the shapes in which tools were called, and the places of the
        state that ``paths`` names; and the values of the state since then are followed by statistics. ``may`` are rules
        for what may differ: ``"dependencies.*=minor"``, ``"state.limit=5%"``, ``"environment.program"``.
        """
        from holdfast.travel.drift import drift

        return drift(cast("Agent", self), baseline, at, paths=paths, may=may)

    def plan_reconcile(self, desired: Desired, tools: Tools) -> list[Action]:
        """What ``reconcile`` would do first."""
        from holdfast.travel.reconcile import plan

        return plan(cast("Agent", self), desired, tools)

    def reconcile(
        self,
        desired: Desired,
        tools: Tools,
        *,
        yes: bool = False,
        approve: Callable[[Action], bool] | None = None,
        actions: int = 20,
        rounds: int = 3,
    ) -> Reconciled:
        """Bring the state to what is desired: a mapping, or a function of the state that returns one.

        ``tools`` names a tool for each place, or pattern of places. It is called as ``tool(path, have, want)``, and
        what it returns is put there (``want``, if it returns None), with a checkpoint after each. Tools that are not
        reads need ``yes``, or the leave of ``approve(action)``. It ends when nothing differs, when a round changes
        nothing, or at a limit.
        """
        from holdfast.travel.reconcile import reconcile

        return reconcile(cast("Agent", self), desired, tools, yes=yes, approve=approve, actions=actions, rounds=rounds)

    def log_handler(self, *, level: int | str = "INFO", ask: int | str = "ERROR", total: int = 100) -> LogHandler:
        """A handler for ``logging`` that keeps what is logged beside this agent's history.

        Records from the level ``ask`` on ask for a checkpoint, which is taken at the next safe point: at most one for a
        pattern in a minute, and ``total`` in all.
        """
        from holdfast.travel.logs import LogHandler

        return LogHandler(cast("Agent", self), level=level, ask=ask, total=total)

    def metrics(self, *, total: int = 100) -> Metrics:
        """A function to call with figures of the program: ``metrics(latency_ms=20.1)``.

        When one of them drifts, a checkpoint is asked for, which is taken at the next safe point.
        """
        from holdfast.travel.logs import Metrics

        return Metrics(cast("Agent", self), total=total)

    def logs(self, at: str | Checkpoint | None = None, *, limit: int | None = None) -> list[LogLine]:
        """What was logged, oldest first: all, or while a checkpoint was the newest.

        Each line names the checkpoint of its moment: ``agent.at(f"id:{line.checkpoint}").state``.
        """
        from holdfast.travel.logs import logs

        return logs(cast("Agent", self), at, limit=limit)


class StoreQuestions:
    """Those about any agent of a store."""

    def explain(self, what: str | Path | Dump, **how: Unpack[Asked]) -> Report:
        """What broke an agent: a dump of its program, or its name.

        The answer is a ranked list of claims, each with evidence and confidence; "not found" is an answer. See
        ``Asked``.
        """
        from holdfast.travel.explain import explain

        return explain(cast("Store", self), what, **how)
