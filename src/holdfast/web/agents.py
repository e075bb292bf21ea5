"""The view of the fleet: which agents there are, and what each is doing.

Owns what a line says of an agent, and how lines are chosen. What always holds: only the lines of one page are read, so
that it costs the same among ten and among ten thousand; what was read of an agent is read again when it has changed.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from holdfast import AgentInfo, Effect, Page, RunInfo, Store
from holdfast.crash import dumps, folder_of
from holdfast.errors import NotADump, UnknownAgent
from holdfast.schemas import text_of
from holdfast.web.asked import Asked
from holdfast.web.brief import shorter
from holdfast.web.dumps import of_agents
from holdfast.web.place import Kept

ON_PAGE = 50
DOUBTS_MOST = 1_000
RUNS_MOST = 50
"""Runs of one agent that its line counts, of those that have ended."""
SIZED = 100
"""Checkpoints of an agent that are measured; the others are taken to be like them."""
SIZING_S = 0.1
"""For so long a page waits for sizes and dumps that are not known yet. The next one has more of them."""
REMEMBERED_MOST = 10_000
"""What was said of agents; of one that changes, what was true before stays among it for a while."""
SORTS = ("updated", "oldest", "name", "checkpoints", "status")
"""Not by size: that has to be measured, one agent after another."""
# What somebody may look for. Those of runs come first, what needs a person at their head.
OF_RUNS = ("needs attention", "interrupted", "failed", "running", "waiting", "queued")
STATUSES = (*OF_RUNS, "in doubt", "open")
URGENT = ("in doubt", "needs attention", "interrupted", "running", "waiting", "queued", "open")

_known = Kept(REMEMBERED_MOST)


def agents(store: Store, asked: Asked) -> dict[str, Any]:
    """One page of the fleet, with what all of it does."""
    query = asked.text("q", "", most=200).strip()
    status = asked.choice("status", "", STATUSES)
    sort: Any = asked.choice("sort", "updated", SORTS)
    writers = _by_agent(store.writers())
    doubts = Counter(one.agent for one in store.effects(in_doubt=True, limit=DOUBTS_MOST))
    pattern = _pattern(query)
    offset = (asked.page - 1) * ON_PAGE
    at_least = False
    if status:
        names, at_least = _in_status(store, status, pattern, offset + ON_PAGE, writers)
        found, total = _infos(store, names[offset:][:ON_PAGE]), len(names)
    elif sort == "status":
        names, total = _by_urgency(store, pattern, offset + ON_PAGE, writers)
        found = _infos(store, names[offset:][:ON_PAGE])
    else:
        page = store.agents(pattern, limit=ON_PAGE, offset=offset, sort=sort)
        if offset and not page:
            found, total = [], len(first := store.agents(pattern, limit=1)) + first.more  # it is behind the last one
        else:
            found, total = list(page), offset + len(page) + page.more
    open_runs, until_s = store.open_runs(), time.monotonic() + SIZING_S
    left = of_agents(store, until_s)
    return {
        "store": store.place,
        "agents": [
            line(store, info, writers.get(info.name, []), doubts[info.name], until_s)
            | {"dumps": len(left.get(info.name, ()))}
            for info in found
        ],
        "more": max(0, total - asked.page * ON_PAGE),
        "total": total,
        "at_least": at_least,
        "page": asked.page,
        "pages": max(1, -(-total // ON_PAGE)),
        "query": query,
        "status": status,
        "sort": sort,
        "fleet": {
            **{name: number for name, number in open_runs.items() if name != "due"},
            "in doubt": sum(doubts.values()),
            "open": len(writers),
        },
        "failed": bool(store.runs(status="failed", limit=1)),
        "dumps": _dumps(store),
        "live": "*",
    }


def line(store: Store, info: AgentInfo, writers: list[dict[str, Any]], in_doubt: int, until_s: float) -> dict[str, Any]:
    """What is said of one agent: as ``holdfast agents --json`` does, and what it is doing.

    The heartbeat of one that a process writes is the last time that it saved or recorded something, its tools' progress
    too.
    """
    held = tuple((one.get("host"), one.get("pid")) for one in writers)  # whose process is gone, was interrupted
    stamp = (store.place, info.name, info.updated, held)
    runs = _known.get(("runs", *stamp), lambda: _runs(store, info.name)) or {}
    size = _known.get(("size", *stamp[:3]), lambda: _size(store, info), until_s)
    doing = _known.get(("doing", *stamp), lambda: _doing(store, info.name)) if writers else None
    return {
        **info.to_json(),
        "status": status_of(info, runs, writers, in_doubt),
        "writer": writer_of(writers[0]) if writers else None,
        "heartbeat": info.updated.isoformat() if writers and info.updated else None,
        "doing": doing if doing and ("running" in runs["counts"] or doing["status"] == "running") else None,
        "runs": runs["counts"],
        "run": runs["newest"],
        "in_doubt": in_doubt,
        "size_bytes": size,
    }


def _runs(store: Store, name: str) -> dict[str, Any]:
    found = store.runs(name, limit=RUNS_MOST)
    counts = dict(Counter(run.status for run in found))
    if found.more:  # one that has not ended may be older than all of these, on another branch
        counts |= {status: number for status, number in store.open_runs(name).items() if number and status != "due"}
    return {"counts": counts, "newest": found[0].to_json() if found else None}


def _size(store: Store, info: AgentInfo) -> int:
    """What its checkpoints take; of a long history about, by its newest. Values that are shared are not counted."""
    if info.head is None:
        return 0
    costs = store.costs(info.name, limit=SIZED)
    return costs.stored_bytes * (costs.checkpoints + costs.more) // max(1, costs.checkpoints)


def _doing(store: Store, name: str) -> dict[str, Any] | None:
    """The newest call of an agent, and what that last said of itself."""
    for effect in store.effects(name, limit=1):
        said = effect.last_progress
        progress = shorter(said, 80) if isinstance(said, str) else text_of(said, 80) if said is not None else ""
        return {"tool": effect.tool, "status": effect.status, "at": effect.at.isoformat(), "progress": progress}
    return None


def status_of(info: AgentInfo, runs: dict[str, Any], writers: list[dict[str, Any]], in_doubt: int) -> str:
    """One word for what an agent is doing: what needs a person counts most."""
    if in_doubt or "needs attention" in runs["counts"]:
        return "needs attention"
    for status in ("interrupted", "running", "waiting", "queued"):
        if status in runs["counts"]:
            return status
    if writers:
        return "open"
    if runs["newest"] and runs["newest"]["status"] in {"failed", "finished", "cancelled"}:
        return str(runs["newest"]["status"])
    return "idle" if info.head is not None else "empty"


def _pattern(query: str) -> str | None:
    """A word stands for all names that have it somewhere."""
    if not query:
        return None
    return query if any(sign in query for sign in "*?[") else f"*{query}*"


def _by_agent(writers: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in writers:
        found.setdefault(str(one.get("agent", "")), []).append(one)
    return found


def _in_status(
    store: Store, status: str, pattern: str | None, wanted: int, writers: Iterable[str]
) -> tuple[list[str], bool]:
    """Names of more than ``wanted`` agents in a status, those with the newest runs first, or of all of them.

    And whether there may be others. An agent may have many runs: they are read until there are enough agents.
    """
    if status == "open":
        fits = re.compile(fnmatch.translate(pattern or "*")).match
        return [name for name in writers if fits(name)], False
    limit = wanted + 1
    while True:
        read: Page[RunInfo] | Page[Effect] = (
            store.runs(pattern, status=status, limit=limit)
            if status in OF_RUNS
            else store.effects(pattern, in_doubt=True, limit=limit)
        )
        names = list(dict.fromkeys(one.agent for one in read))
        if len(names) > wanted or not read.more:
            return names, bool(read.more)
        limit *= 4


def _by_urgency(store: Store, pattern: str | None, wanted: int, writers: Iterable[str]) -> tuple[list[str], int]:
    """Names of at least ``wanted`` agents, those that need somebody or do something first; and how many there are."""
    fits = re.compile(fnmatch.translate(pattern or "*")).match
    changed = {name: at for name, at in store.updated().items() if fits(name)}
    names: dict[str, None] = {}
    for status in URGENT:
        names |= dict.fromkeys(_in_status(store, status, pattern, wanted, writers)[0])
        if len(names) >= wanted:
            break
    else:
        names |= dict.fromkeys(sorted(changed, key=lambda name: changed[name], reverse=True))
    return list(names), len(changed)


def _infos(store: Store, names: Iterable[str]) -> list[AgentInfo]:
    found: list[AgentInfo] = []
    for name in names:
        try:
            found += store.agents(name)
        except UnknownAgent:  # removed meanwhile
            continue
    return found


def writer_of(holder: dict[str, Any]) -> dict[str, Any]:
    """The process that writes a branch."""
    since = holder.get("since")
    return {
        "pid": holder.get("pid"),
        "host": str(holder.get("host", "")),
        "program": str(holder.get("program", "")),
        "branch": str(holder.get("branch", "")),
        "since": datetime.fromtimestamp(since / 1e6, UTC).isoformat() if isinstance(since, int) else None,
    }


def _dumps(store: Store) -> int:
    try:
        return len(dumps(folder_of(store.place)))
    except NotADump:
        return 0
