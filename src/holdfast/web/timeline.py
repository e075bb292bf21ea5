"""The timeline: an agent's history as a graph, where things happened in it, and figures over time.

Owns the lanes of the graph and the windows of a long history. A window is what one page shows, newest first; whatever
an agent has, one window is read and sent. What always holds: a checkpoint that no branch leads to is called abandoned
(where there are too many branches to look at, nobody knows, and that is said), and lanes are the same in every window,
because both are found by walking from the newest. Nothing that somebody wrote is evaluated here.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from holdfast import Agent, Checkpoint, Effect, Store
from holdfast.errors import BadOption
from holdfast.schemas import crash_json
from holdfast.travel import Look, parse_path
from holdfast.web.asked import Asked
from holdfast.web.brief import change_brief
from holdfast.web.dumps import of_agents

WINDOW = 120
"""Checkpoints of a page. As many circles can be told apart."""
WINDOW_MOST = 1_000
BRANCHES_MOST = 200
"""Branches whose heads are marked."""
EFFECTS_MOST = 2_000
"""Calls that are looked through for those of a window."""
SERIES_S = 8.0
"""How long the values of a path are looked up; what is not known then stays so."""
CHANGES_MOST = 12
NUMBERS_S = 0.5
NUMBERS_MOST = 24
_LENGTH = re.compile(r"len\((.*)\)", re.DOTALL)


def reader(store: Store, asked: Asked, branch: str = "main") -> Agent:
    """The agent that is asked about."""
    return store.agent(asked.agent, branch=branch, create=False, readonly=True)


# -- the graph --------------------------------------------------------------------------------------------------------


def timeline(store: Store, asked: Asked) -> dict[str, Any]:
    """One window of the history: checkpoints as in ``log --all --json``, each with its lane and nearest ancestor.

    With ``at``, the one line that leads there: that costs as little at the beginning of a long history as at its end.
    """
    agent = reader(store, asked)
    number = asked.number("n", WINDOW, 10, WINDOW_MOST)
    found, first = _window(agent, asked, number)
    heads = heads_of(store, agent)
    at = asked.point("at")
    begins = {found[0].id} if at and found else set()
    rows = list(lanes(found, begins or {id for id in heads if "main" in heads[id]}, begins or set(heads)))[first:]
    shown = found[first:]
    total = agent.info().checkpoints
    unseen = max(0, len(agent.branches()) - BRANCHES_MOST)
    listed = [
        {
            **one.to_json(), "previous": before, "heads": heads.get(one.id, []), "lane": lane,
            "abandoned": lost and not unseen, "unknown": lost and unseen > 0,
        }
        for one, (lane, before, lost) in zip(shown, rows, strict=True)
    ]  # fmt: skip
    older = listed[-1]["previous"] if at and listed else ""
    return {
        "agent": agent.name,
        "live": agent.name,
        "branch": agent.branch_name,
        "branches": [name for names in heads.values() for name in names],
        "unseen_branches": unseen,
        "checkpoints": listed,
        "crashes": _left(store, agent),
        "rollbacks": _rollbacks(agent),
        "more": int(bool(older)) if at else max(0, total - first - len(shown)),
        "older": older,
        "total": total,
        "page": asked.page,
        "at": at,
        "n": number,
        "lanes": 1 + max((row[0] for row in rows), default=0),
    }


def _window(agent: Agent, asked: Asked, number: int) -> tuple[list[Checkpoint], int]:
    """What has to be walked through, newest first, and where in it the window begins."""
    at = asked.point("at")
    if at:
        return agent.log(number, at=at), 0
    first = (asked.page - 1) * number
    return agent.log(first + number, all=True), first


def heads_of(store: Store, agent: Agent) -> dict[str, list[str]]:
    """The ids of heads, with the branches that end there; main first."""
    heads: dict[str, list[str]] = {}
    for name in sorted(agent.branches(), key=lambda one: one != "main")[:BRANCHES_MOST]:
        head = store.agent(agent.name, branch=name, create=False, readonly=True).head
        if head is not None:
            heads.setdefault(head.id, []).append(name)
    return heads


def lanes(history: Sequence[Checkpoint], first: set[str], heads: set[str]) -> Iterator[tuple[int, str, bool]]:
    """For each, newest first: its lane, the nearest ancestor that is left, and whether no branch leads to it.

    ``first``: for whom the first lane is kept.
    """
    ids = {one.id for one in history}
    waiting = list(first)  # for each lane the id that it leads down to; "" where none runs
    reached = set(heads)
    for one in history:
        mine = [at for at, id in enumerate(waiting) if id == one.id]
        if not mine:  # the end of a line: it takes the first free lane
            mine = [next((at for at, id in enumerate(waiting) if not id), len(waiting))]
            waiting[mine[0] : mine[0] + 1] = [one.id]
        before = one.parent_id if one.parent_id in ids else one.previous_id
        for at in mine:
            waiting[at] = ""
        waiting[mine[0]] = before
        if one.id in reached:
            reached.add(before)
        yield mine[0], before, one.id not in reached


def _left(store: Store, agent: Agent) -> list[dict[str, Any]]:
    """Crashes that were noted, and other dumps that name the agent, in the same form; newest first."""
    found = [crash_json(one) for one in agent.crashes()]
    noted = {one["dump"].rpartition("/")[2] for one in found}
    for one in of_agents(store, time.monotonic() + NUMBERS_S).get(agent.name, ()):
        for stood in one["agents"]:
            if stood["name"] == agent.name and one["file"] not in noted:
                about = {"what": "dump", "error": one["what"], "message": "", "trigger": one["trigger"]}
                about |= {"branch": stood["branch"], "checkpoint": stood["checkpoint"]}
                found.append({**about, "dump": one["file"], "time": one["at"]})
    return sorted(found, key=lambda one: one["time"], reverse=True)


def _rollbacks(agent: Agent) -> list[dict[str, Any]]:
    return [
        {"from": one.get("from", ""), "to": one.get("to", ""), "by": one.get("by", ""), "branch": one.get("branch", ""),
         "time": one["when"].isoformat()}
        for one in agent.events()
        if one["what"] == "rollback"
    ]  # fmt: skip


def marks(store: Store, asked: Asked) -> dict[str, Any]:
    """What was done outside between two times (``from``, ``to``), for the graph: no arguments, no results."""
    agent = reader(store, asked)
    first, last = asked.text("from", "", most=40), asked.text("to", "", most=40)
    page = store.effects(agent.name, limit=EFFECTS_MOST)
    listed = [
        {
            "id": one.id, "number": one.number, "tool": one.tool, "kind": one.kind, "status": one.status,
            "branch": one.branch, "run": one.run, "at": one.at.isoformat(),
        }
        for one in once(agent, page)
        if first <= one.at.isoformat() and (not last or one.at.isoformat() <= last)
    ]  # fmt: skip
    return {"agent": agent.name, "effects": listed, "more": page.more}


def once(agent: Agent, effects: Iterable[Effect]) -> list[Effect]:
    """Each call as it is on the oldest branch that has it: those that began later, after it, have it, too."""
    branches = {name: at for at, name in enumerate(agent.branches())}
    found: dict[Any, Effect] = {}
    for one in effects:
        key = one.number, one.at, one.status
        known = found.get(key)
        if known is None or branches.get(one.branch, 0) < branches.get(known.branch, 0):
            found[key] = one
    return list(found.values())


def change(store: Store, asked: Asked) -> dict[str, Any]:
    """What one checkpoint changed, cut to what fits beside a circle."""
    agent = reader(store, asked)
    checkpoint = agent.at(asked.point("at", None))
    found = [one for one in checkpoint.changes(large=False) if not one.bookkeeping]
    return {
        "agent": agent.name,
        "checkpoint": checkpoint.to_json(),
        "changes": [change_brief(one) for one in found[:CHANGES_MOST]],
        "more": max(0, len(found) - CHANGES_MOST),
    }


# -- figures over time ------------------------------------------------------------------------------------------------


def series(store: Store, asked: Asked) -> dict[str, Any]:
    """One figure for each checkpoint of a window: ``size``, ``changes``, ``stall``, a place, or its length."""
    agent = reader(store, asked)
    number = asked.number("n", WINDOW, 10, WINDOW_MOST)
    found, first = _window(agent, asked, number)
    shown, of = found[first:], asked.text("of", "size")
    if of == "size":
        values: dict[str, Any] = {one.id: one.size_bytes for one in shown}
    elif of == "changes":
        values = {one.id: one.operations for one in shown}
    elif of == "stall":
        values = {one.parent_id: one.stall_before_s for one in found if one.stall_before_s is not None}
        values = {one.id: values[one.id] for one in shown if one.id in values}
    else:
        values = _values(shown, *_figure(of))
    cut = of not in {"size", "changes", "stall"} and len(values) < len(shown)
    return {"agent": agent.name, "of": of, "values": values, "cut": cut}


def _figure(of: str) -> tuple[tuple[Any, ...], bool]:
    """A place, and whether its length is meant. Nothing else that somebody wrote is evaluated in this process."""
    length = _LENGTH.fullmatch(of.strip())
    try:
        return parse_path(length[1] if length else of), length is not None
    except BadOption:
        hint = "Write state.budget or len(messages). Rules and questions of any other form have their place under Why."
        raise BadOption(f"{of[:200]!r} is not a place of the state", hint=hint) from None


def _values(shown: Sequence[Checkpoint], path: tuple[Any, ...], length: bool) -> dict[str, Any]:
    """Where the section that it is in is the same, so is the value: most states are not read at all."""
    end_s = time.monotonic() + SERIES_S
    known: dict[Any, Any] = {}
    found: dict[str, Any] = {}
    for one in shown:
        sections = one.sections
        seen = sections.get(str(path[0])) if path else tuple(sections.values())
        if seen not in known:
            if time.monotonic() > end_s:
                break
            known[seen] = _number(one, path, length)
        found[one.id] = known[seen]
    return found


def _number(checkpoint: Checkpoint, path: tuple[Any, ...], length: bool) -> float | int | None:
    """None where it is no number, or not there."""
    try:
        look = Look.of(checkpoint.state)
        found = look.items(path, 0, 1)
        value = None if found.kind else look.at(path)
    except BadOption:
        return None
    if length:
        return found.count if found.kind else len(value) if isinstance(value, str | bytes) else None
    if isinstance(value, bool):
        return int(value)
    return value if isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e300 else None


def numbers(store: Store, asked: Asked) -> dict[str, Any]:
    """Places of the newest state that hold a number, to be offered for a chart."""
    agent = reader(store, asked)
    found: list[str] = []
    end_s = time.monotonic() + NUMBERS_S
    head = agent.head
    for name in head.sections if head is not None else ():
        if name in (head.bookkeeping if head is not None else ()) or not name.isidentifier():
            continue
        value = agent.state[name]
        inner = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        found += [
            path
            for path, item in inner.items()
            if type(item) in {int, float} and all(part.isidentifier() for part in path.split("."))
        ][:NUMBERS_MOST]
        if isinstance(value, list):
            found.append(f"len({name})")
        if time.monotonic() > end_s:
            break
    return {"agent": agent.name, "paths": found[:NUMBERS_MOST]}
