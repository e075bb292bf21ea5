"""Runs and effects: what an agent did outside, in time; what is in doubt, and deciding it; signals, cancelling, forks.

Owns how much of a run is shown. What needs the user's own functions (resuming, probing, undoing) is left to a worker,
or done here where ``--load`` has brought them. What always holds: only what somebody decided with a reason is recorded
as decided; nothing is taken from whoever executes a run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

from holdfast import Agent, Effect, RunInfo, Store
from holdfast.errors import BadOption, HoldfastError
from holdfast.run import DURABLES
from holdfast.schemas import Write, as_json, effect_json, run_json, signal_json
from holdfast.web.agents import writer_of
from holdfast.web.asked import Asked
from holdfast.web.brief import brief
from holdfast.web.place import go_on
from holdfast.web.timeline import once, reader
from holdfast.web.words import address, told_json, typed

RUNS = 100
CALLS = 60
"""Calls of a run on one page."""
RECENT, BRANCHES = 50, 20
"""Calls that are shown, and how many branches may have each of them."""
SIGNALS = 50
WORKERS = 50
ATTEMPTS = 20
EVENTS = 200
WHOLE_CALLS, WHOLE_BYTES = 1_000, 8 << 20
"""Of one answer whose values are not cut. One call may have more, up to ``ONE_BYTES``."""
ONE_BYTES = 20 << 20


def runs(store: Store, asked: Asked) -> dict[str, Any]:
    """The runs of an agent, what is in doubt, its newest calls, and signals that nobody has taken."""
    agent = reader(store, asked)
    found = store.runs(agent.name, limit=RUNS, sort="urgent", status=asked.text("status", "", most=20) or None)
    doubts = store.effects(agent.name, in_doubt=True, limit=RECENT)
    recent = once(agent, store.effects(agent.name, limit=RECENT * min(BRANCHES, len(agent.branches()))))[:RECENT]
    return {
        "store": store.place,
        "schedules": [],  # they are no agent's
        "agent": agent.name,
        "live": agent.name,
        "runs": [run_json(one, write=_short) for one in found],
        "more": found.more,
        "in_doubt": [{**effect_json(one, write=_short), "evidence": _evidence(one)} for one in doubts],
        "effects": [effect_json(one, write=_short) for one in recent],
        "signals": [signal_json(one, write=_short) for one in store.signals(agent.name)[-SIGNALS:]],
    }


def run(store: Store, asked: Asked) -> dict[str, Any]:
    """One run: a page of its calls in time, what it waits for, and what can be done with it.

    With ``call``, the number of one of them, the page that has it, and more of that call.
    """
    agent, info = _found(store, asked)
    id, branch = info.id, agent.branch_name
    calls = agent.effects(run=id)
    wanted = asked.number("call", -1, 0, 2**53)
    at = next((at for at, one in enumerate(calls) if one.number == wanted), None)
    page = asked.page if at is None else at // CALLS + 1
    first = (page - 1) * CALLS
    sent = [one for one in store.signals(agent.name, branch=branch) if one.run in {id, ""}]
    where = agent.name if branch == "main" else f"{agent.name}@{branch}"
    return {
        "agent": agent.name,
        "live": agent.name,
        "branch": branch,
        "run": run_json(info, write=cut),
        "left": info.left,
        "here": not store.inert and info.function in DURABLES,
        "workers": [
            {**writer_of(one), "has_it": not one["functions"] or info.function in one["functions"]}
            for one in store.workers()[:WORKERS]
        ],
        "effects": [
            {
                **effect_json(one, write=cut if one.number == wanted else _short),
                "attempts": brief(_attempts(one)[-ATTEMPTS:], 400),
            }
            for one in calls[first : first + CALLS]
        ],
        "total": len(calls),
        "page": page,
        "call": wanted if at is not None else None,
        "more": max(0, len(calls) - first - CALLS),
        "signals": [signal_json(one, write=_short) for one in sent[-SIGNALS:]],
        "commands": {
            "resume": typed(store.place, "runs", "resume", where, id),
            "worker": typed(store.place, "worker", "PROGRAM"),
            "cancel": typed(store.place, "runs", "cancel", where, id, "--undo", "--load", "PROGRAM"),
            "fork": typed(store.place, "runs", "fork", where, id, "--at", "POSITION", "--branch", "NEW"),
        },
    }


def effects(store: Store, asked: Asked) -> dict[str, Any]:
    """The history of a run, with nothing cut: each call as ``effects --run ID --full --json``, and its attempts.

    One answer has as many calls as fit; ``next`` goes into ``after`` for the next one, until it is null. The first has
    the run itself, and what was decided about it, too.
    """
    agent, info = _found(store, asked)
    after = asked.number("after", 0, 0, 2**53)
    calls = [one for one in agent.effects(run=info.id) if one.number > after]
    found: dict[str, Any] = {"agent": agent.name, "branch": agent.branch_name}
    room = WHOLE_BYTES
    if not after:
        decided = [one for one in agent.events() if one.get("run") == info.id and one["branch"] == agent.branch_name]
        found["run"], size = _whole(lambda write: run_json(info, write=write))
        found["events"] = [_event(one, as_json) for one in decided]
        room -= size
    listed: list[dict[str, Any]] = []
    for one in calls[:WHOLE_CALLS]:
        told, size = _whole(partial(_call, one))
        room -= size
        if room < 0 and listed:
            break
        listed.append(told)
    more = len(calls) - len(listed)
    return {**found, "effects": listed, "more": more, "next": listed[-1]["number"] if more else None}


def _call(effect: Effect, write: Write) -> dict[str, Any]:
    return {**effect_json(effect, full=True, write=write), "attempts": _attempts(effect)}


def _event(one: dict[str, Any], write: Write) -> dict[str, Any]:
    return {key: value.isoformat() if key == "when" else write(value) for key, value in one.items()}


def _whole(tell: Callable[[Write], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """What is told without cuts, and its size; what no answer could hold is cut, and says so."""
    told = tell(as_json)
    size = len(told_json(told))
    if size <= ONE_BYTES:
        return told, size
    told = {**tell(cut), "cut": True}
    return told, len(told_json(told))


def _found(store: Store, asked: Asked) -> tuple[Agent, RunInfo]:
    """The run that is asked about, and the agent as it is on its branch."""
    id, branch = asked.text("id", most=400), asked.branch
    agent = reader(store, asked, branch)
    info = next((one for one in agent.runs() if one.id == id), None)
    if info is None:
        raise BadOption(f"{agent.name} has no run {id!r} on {branch}", hint="See its list of runs.")
    return agent, info


def history(store: Store, asked: Asked) -> dict[str, Any]:
    """What was moved, decided or sent, and by whom: as ``events --json``."""
    agent = reader(store, asked)
    first = (asked.page - 1) * EVENTS
    found = [one for one in agent.events() if one["what"] != "open"]
    listed = [_event(one, partial(brief, characters=400)) for one in found[first : first + EVENTS]]
    return {
        "agent": agent.name, "live": agent.name, "events": listed, "page": asked.page,
        "more": max(0, len(found) - first - EVENTS),
    }  # fmt: skip


def cut(value: Any) -> Any:
    """A value of what somebody has opened."""
    return brief(value, 4_000, 100, 200)


def _short(value: Any) -> Any:
    """A value as it stands in a list."""
    return brief(value, 120, 6, 20)


def _attempts(effect: Effect) -> list[dict[str, Any]]:
    """Each time that a call was made; nothing where it was made once."""
    return [
        {"number": one.number, "at": one.at.isoformat(), "ended": one.ended.isoformat() if one.ended else None,
         "how": one.how, "why": one.why}
        for one in effect.attempts if len(effect.attempts) > 1
    ]  # fmt: skip


def _evidence(effect: Effect) -> dict[str, Any]:
    """What is known about a call that is in doubt."""
    with suppress(HoldfastError):
        progress, partial = effect.last_progress, effect.partial
        return {"progress": brief(progress, 400), "partial": brief(partial, 400)}
    return {"progress": None, "partial": []}


# -- what can be done -------------------------------------------------------------------------------------------------


def resolve(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - the house has said who acts
    """Decide what became of a call that is in doubt."""
    name, branch = asked.agent, asked.branch
    decision, why = asked.choice("decision", "", ("done", "not-done")), asked.text("why", "", most=1_000).strip()
    if not decision:
        raise BadOption("say what became of it", hint="Choose done, or not done.")
    if not why:
        raise BadOption("say how you know", hint="Your reason is recorded with the decision.")
    result = asked.value("result", "null") if decision == "done" else None
    with closing(store.agent(name, branch=branch, create=False, workspace=None)) as handle:
        handle.resolve(
            asked.text("effect", most=200), "done" if decision == "done" else "not-done", result=result, why=why
        )
    return address("/runs", agent=name)


def signal(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Send a signal to a run, or to whichever asks next."""
    name, branch, id = _meant(asked, "")
    value = asked.value("value", "null")
    store.signal(name, asked.text("signal", most=200), value, run=id or None, any_run=not id, branch=branch)
    return address("/run", agent=name, id=id, branch=branch) if id else address("/runs", agent=name)


def resume(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Leave a run that has stopped to a worker, or go on with it here."""
    name, branch, id = _meant(asked)
    go_on(store, store.resume(name, id, branch=branch))
    return address("/run", agent=name, id=id, branch=branch)


def cancel(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Cancel a run, whoever executes it. What it did stays, or is undone by whoever has the tools for that."""
    name, branch, id = _meant(asked)
    undo = asked.flag("undo")
    info = store.cancel(name, id, branch=branch, compensate=undo, later=undo and store.inert)
    if info.status in {"interrupted", "waiting", "needs attention"} and not info.left:
        store.resume(info)  # by whoever comes next it is told first of all that it was cancelled
    return address("/run", agent=name, id=id, branch=branch)


def _meant(asked: Asked, run: str | None = None) -> tuple[str, str, str]:
    """The run that a form is about: its agent, its branch, its id."""
    return asked.agent, asked.branch, asked.text("run", run, most=400)


def fork(store: Store, asked: Asked, who: str) -> str:  # noqa: ARG001 - as above
    """Let a run be executed once more from a position on, on a new branch: a worker does that."""
    branch, id = asked.branch, asked.text("run", most=400)
    agent = reader(store, asked, branch)
    plan = agent.plan_fork(id, at=asked.text("position", most=400))
    if plan.in_doubt:
        raise BadOption("a call before that position is in doubt", hint="Decide it first.")
    made = plan.apply(asked.text("new", most=200))
    return address("/run", agent=made.agent, id=made.id, branch=made.branch)
