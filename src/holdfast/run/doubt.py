"""In doubt: finding out what happened, never guessing.

Owns who decides about a call whose outcome is not known, and what is believed. Must not make the call. What always
holds: a decision is a record; without a probe that can tell, or a person, a write stays in doubt; that something is
absent is believed only when nobody can still be doing it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from holdfast.agent import watchers
from holdfast.errors import BadOption, Unencodable
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed, scrub, stow
from holdfast.run.callers import MAYBE, Caller, look, wait
from holdfast.run.effects import Absent, Effect, Found, Unknown
from holdfast.run.outcomes import give, is_healed, lost, told
from holdfast.run.past import LOST, Call
from holdfast.run.scope import Scope, branch_of, doing, now_us, whose
from holdfast.run.steps import Theirs, Work, Write
from holdfast.run.tools import Tool

REPEATABLE = frozenset({"read", "idempotent"})
_NEVER = Caller(over=False)


def ask(probe: Callable[..., Any], effect: Effect) -> Generator[Any, Any, Any]:
    """Call a probe. Whatever it raises means that it cannot tell.

    What it asks for changes nothing, whatever the call does that it is about.
    """
    try:
        answer = yield Theirs(partial(probe, effect), "probe", partial(doing, replace(effect, kind="read")))
    except Exception as error:  # noqa: BLE001 - a probe that fails has not found out
        return Unknown(f"the probe failed: {told(error)}")
    if isinstance(answer, Found | Absent | Unknown):
        return answer
    return Unknown(f"the probe answered {type(answer).__name__} instead of Found, Absent or Unknown")


def settle(
    scope: Scope, call: Call, tool: Tool | None, effect: Effect, *, live: bool = False
) -> Generator[Any, Any, tuple[rec.Decision | None, Stowed | None]]:
    """Find out about one call. None: nobody can tell. The decision is not written yet."""
    if tool is None or tool.probe is None:
        return None, None
    caller = (yield Work(lambda: look(scope, call))) if not live else None
    answer = yield from ask(tool.probe, effect)
    if isinstance(answer, Found):
        try:
            result = scrub(scope.agent, answer.result, f"the result of {call.tool}")
            stowed = stow(result, scope.registry)
        except Unencodable as error:  # it has happened, but what would be given to the program?
            effect.why = f"the probe found it, but its result cannot be saved: {error.message}"
            return None, None
        return _decision(scope, call, "found", "the probe found it", stowed.value), stowed
    if isinstance(answer, Absent):
        # In this process the call is over when it raised, unless its thread was given up.
        if caller.over if caller is not None else not effect.still():
            return _decision(scope, call, "absent", "the probe found nothing", None), None
        effect.why = caller.why if caller is not None else MAYBE
        call.caller = caller
        return None, None
    effect.why = answer.why or "the probe cannot tell"
    return None, None


def recall(scope: Scope, tool: Tool, call: Call) -> Generator[Any, Any, Any]:
    """What a call returned whose result could not be saved: its classes are known by now, or its probe tells."""
    done = call.done
    decision, stowed = None, None
    if done is not None and is_healed(done, scope.ledger, scope.registry):
        decision = _decision(scope, call, "done", "its class is registered now", done.value)
        decision.by = "holdfast"
    elif tool.probe is not None:
        answer = yield from ask(tool.probe, scope.effect_of(call))
        if isinstance(answer, Found):
            with suppress(Unencodable):
                stowed = stow(scrub(scope.agent, answer.result, f"the result of {call.tool}"), scope.registry)
                decision = _decision(scope, call, "found", "the probe found it", stowed.value)
    if decision is None:
        scope.keep_lost(call)
        why = done.fault[2] if done is not None and done.fault is not None else ""
        effect = (whose(scope.agent), call.intent.key[:12]) if call.intent else ()
        raise lost(tool.name, call.path, why, *effect)
    yield Write(scope, decision, stowed)
    call.decision = decision
    return give(scope, tool, call.path, decision, stowed)


def settle_all(scope: Scope, calls: list[Call], find: Callable[[str], Tool | None]) -> Generator[Any, Any, list[Call]]:
    """The pass before anything new starts. Returns the calls that stay in doubt, each with its reason."""
    open_calls = [call for call in calls if call.kind not in REPEATABLE]  # these are made again, with the same key
    if not open_calls:
        return []
    with watchers.watching("recovery", scope.agent.name, branch_of(scope.agent), run=scope.run_id) as watch:
        left = yield from _settle_each(scope, open_calls, find)
        # Where all that is left can be believed from some moment on, that is waited for, and then they are asked again.
        while left and (yield from wait(scope, [(call, call.caller or _NEVER) for call in left])):
            left = yield from _settle_each(scope, left, find)
        watch.tell(settled=len(open_calls) - len(left), in_doubt=len(left))
        return left


def _settle_each(
    scope: Scope, calls: list[Call], find: Callable[[str], Tool | None]
) -> Generator[Any, Any, list[Call]]:
    left: list[Call] = []
    for call in calls:
        tool = find(call.tool)
        effect = scope.effect_of(call)
        call.caller = None
        decision, stowed = yield from settle(scope, call, tool, effect)
        if decision is None:
            known = tool is not None or call.tool == LOST
            why = effect.why if known else f"tool {call.tool} is not loaded in this program"
            call.doubt = rec.Doubt(now_us(), call.run, call.path, call.number, why or "interrupted")
            left.append(call)
            continue
        call.decision = decision
        if call.outcome is not None:
            scope.complete(decision, stowed)
            scope.leave(call.path)
            scope.ledger.flush()
        else:
            scope.write(decision)  # durable with the next intent, before the call is made again
    return left


def decide(scope: Scope, call: Call, how: str, *, by: str, why: str, result: Any = None) -> rec.Decision:
    """Record what a person found out: ``done`` (with what the call returned) or ``not-done``."""
    if how not in {"done", "not-done"}:
        raise BadOption(f"a decision is done or not-done, not {how!r}")
    if call.lost and how != "done":
        raise BadOption(f"{call.tool} at {call.path} was called and returned; only what it returned is not known")
    if not call.open and not call.lost:
        raise BadOption(f"{call.tool} at {call.path} is not in doubt: it is {call.status}")
    stowed = stow(result, scope.registry) if how == "done" else None
    decision = _decision(scope, call, how, why, stowed.value if stowed is not None else None)
    decision.by = by
    scope.write(decision, stowed, flush=True)
    call.decision = decision
    return decision


def _decision(scope: Scope, call: Call, how: str, why: str, value: rec.Value) -> rec.Decision:
    return rec.Decision(now_us(), scope.run_id or call.run, call.path, call.number, how, "probe", why, value)
