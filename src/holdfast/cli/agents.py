"""``holdfast agents``: who is in the store."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.text import Text

from holdfast import AgentInfo
from holdfast.cli.session import Given, Json, Limit, Pattern, limited
from holdfast.cli.text import ago, clean, count, now

SCHEMA = "holdfast.agents/1"


def agents(
    pattern: Pattern = None,
    /,
    *,
    sort: Annotated[Literal["updated", "name"], Parameter(show_choices=True)] = "updated",
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """List the agents in the store, the most recently changed first.

    Parameters
    ----------
    pattern
        Only the agent of this name, or those whose names are like this: 'trip-*'. [default: all]
    sort
        The most recently changed first, or by name.
    limit
        Show at most this many; 0 shows all. [default: 50; all with --json]
    json
        Print JSON (schema holdfast.agents/1).
    """
    with session.reading() as store:
        found = store.agents(pattern, limit=limited(limit, json=json), sort=sort)
        if json:
            entries = [_as_json(info) for info in found]
            session.out.json({"schema": SCHEMA, "store": store.place, "agents": entries, "more": found.more})
            return 0
        if not found:
            like = f" like {clean(pattern)}" if pattern is not None else " yet"
            session.out.say(f"No agents{like} in {clean(store.place)}.")
            return 0
        session.out.columns(
            ("agent", "head", "checkpoints", "branches", "updated", "last label"),
            [_row(info) for info in found],
            right=(2, 3),
        )
        abandoned = sum(info.abandoned for info in found)
        if abandoned:
            session.out.say(Text(f"{count(abandoned, 'abandoned line')}; see `holdfast log NAME --all`.", style="dim"))
        if found.more:
            session.out.say(Text(f"{count(found.more, 'more agent')}; -n 0 shows all, a pattern some.", style="dim"))
    return 0


def _row(info: AgentInfo) -> list[Text | str]:
    head = info.head
    return [
        Text(clean(info.name), style="bold cyan"),
        Text(head.short_id if head else "", style="yellow"),
        f"{info.checkpoints:,}",
        str(len(info.branches)),
        ago(info.updated or info.created, now()),
        clean(head.label) if head else Text("no checkpoint yet", style="dim"),
    ]


def _as_json(info: AgentInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "branches": info.branches,
        "head": info.head.to_json() if info.head else None,
        "checkpoints": info.checkpoints,
        "abandoned": info.abandoned,
        "created": info.created.isoformat(),
        "updated": info.updated.isoformat() if info.updated else None,
    }
