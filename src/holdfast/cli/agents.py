"""``holdfast agents``: who is in the store."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from holdfast import AgentInfo
from holdfast.cli.session import Given, Json
from holdfast.cli.text import ago, clean, count, now

SCHEMA = "holdfast.agents/1"


def agents(*, json: Json = False, session: Given) -> int:
    """List the agents in the store, the most recently changed first.

    Parameters
    ----------
    json
        Print JSON (schema holdfast.agents/1).
    """
    with session.reading() as store:
        found = store.agents()
        if json:
            data = {"schema": SCHEMA, "store": store.place, "agents": [_as_json(info) for info in found]}
            session.out.json(data)
            return 0
        if not found:
            session.out.say(f"No agents yet in {clean(store.place)}.")
            return 0
        session.out.columns(
            ("agent", "head", "checkpoints", "branches", "updated", "last label"),
            [_row(info) for info in found],
            right=(2, 3),
        )
        abandoned = sum(info.abandoned for info in found)
        if abandoned:
            session.out.say(Text(f"{count(abandoned, 'abandoned line')}; see `holdfast log NAME --all`.", style="dim"))
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
