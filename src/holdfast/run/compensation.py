"""Undoing one effect.

Owns the order of intent, compensation and outcome, and how often it is tried. Must not know what else is undone. What
always holds: a compensation is not called before its intent is durable; it has the same key each time, whoever tries
again; what was undone is not undone again. A compensation may be called more than once, with that key: it has to bear
it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from holdfast.codec.blocks import digest_of
from holdfast.codec.values import encode
from holdfast.errors import Cancelled, InDoubt, Waiting
from holdfast.run import records as rec
from holdfast.run import secrets
from holdfast.run.arguments import fetch
from holdfast.run.context import EFFECT, active
from holdfast.run.effects import Effect
from holdfast.run.faults import said, told
from holdfast.run.outcomes import MESSAGE_MAX
from holdfast.run.planning import Planned
from holdfast.run.positions import Lane
from holdfast.run.runs import Run
from holdfast.run.scope import now_us
from holdfast.run.steps import Aside, Pause, Request, Steps, Write, awaited
from holdfast.run.tools import Tool

TRIES = 5
"""How often a compensation is tried, with longer and longer pauses, before a person is asked. More where its tool has
more retries."""


class Failed(Exception):
    """A compensation did not go through. ``planned`` is what still stands."""

    def __init__(self, planned: Planned, error: BaseException, tries: int) -> None:
        super().__init__(told(error)[:MESSAGE_MAX])
        self.planned, self.error, self.tries = planned, error, tries


def key_to_undo(key: str) -> str:
    """The key of a compensation follows from the key of what it undoes."""
    return digest_of("holdfast.key", encode(["undo", key])).hex()[:32]


def undo(run: Run, planned: Planned) -> Steps:
    """Undo one effect, as part of this rollback. Raises ``Failed`` when that does not work out."""
    tool, traced = cast("Tool", planned.tool), planned.traced  # without its tool nothing is planned to be undone
    path = str(traced.number)
    key = key_to_undo(traced.key)
    before = run.past.calls.get(path)
    tries, most = 0, max(TRIES, tool.retries + 1)
    attempt = traced.undo.attempts if traced.undo is not None else 0
    own = Effect(
        tool=f"undo {tool.name}",
        kind="idempotent",
        key=key,
        path=path,
        run=run.run_id,
        args=lambda: planned.effect.args,
        last_progress=lambda: fetch(before.progress, run.ledger, run.registry) if before is not None else None,
    )
    while True:
        tries, attempt = tries + 1, attempt + 1
        started = own._at_us = now_us()
        own.attempt = attempt
        intent = rec.Intent(
            started, run.run_id, path, own.tool, own.kind, None, b"", key, attempt, run.agent.generation,
            undoes=traced.number,
        )  # fmt: skip
        number = own.number = yield Write(run, intent)
        own._report = lambda value, number=number: run.report(path, number, value)
        done = rec.Done(0, run.run_id, path, "value", number, started=started)
        try:
            yield Compensate(run, tool, planned.effect, own, path)
        except (InDoubt, Waiting, Cancelled) as error:  # of a call inside: trying again would not change that
            raise Failed(planned, error, tries) from error
        except Exception as error:
            if tries < most:
                yield Pause(run, tries)
                continue
            done.at, done.how = now_us(), "error"
            message = secrets.scrub(run.agent, said(error)[:MESSAGE_MAX], f"an error of {own.tool}")
            done.fault = ("", type(error).__qualname__, message, None)
            yield Write(run, done)
            raise Failed(planned, error, tries) from error
        done.at = now_us()
        yield Write(run, done)
        return


class Compensate(Request):
    """Call a compensation. An async one is awaited on the caller's loop, or, in plain code, on one of its own."""

    def __init__(self, run: Run, tool: Tool, effect: Effect, own: Effect, path: str) -> None:
        self.run, self.tool, self.effect, self.own, self.path = run, tool, effect, own, path
        self.function: Any = tool.compensate

    @contextmanager
    def inside(self) -> Iterator[None]:
        with active(Lane(self.run, f"{self.path}/", self.run.lane, self.own.tool)):
            token = EFFECT.set(self.own)
            try:
                yield
            finally:
                EFFECT.reset(token)

    def now(self) -> None:
        if self.tool.timeout_s is None:
            self._call()
        else:  # in a thread of its own: nothing stops a blocking call
            Aside(self._call, self.own.tool).wait(self.tool.timeout_s)

    def elsewhere(self) -> Any:
        return Aside(self.now, self.own.tool).begin()

    async def later(self) -> None:
        if not inspect.iscoroutinefunction(self.function):
            await super().later()
            return
        with self.inside():
            async with sys.modules["asyncio"].timeout(self.tool.timeout_s):
                await self.function(self.effect)

    def _call(self) -> None:
        with self.inside():
            answer = self.function(self.effect)
            if inspect.isawaitable(answer):
                awaited(answer)
