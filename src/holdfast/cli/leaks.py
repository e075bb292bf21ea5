"""``holdfast leaks``: which types grow in an agent's process, and who holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.dump_acting import folder_of
from holdfast.cli.exits import DIFFERENT
from holdfast.cli.session import Flag, Given, Json, Name
from holdfast.cli.text import clean, count, size

if TYPE_CHECKING:
    from holdfast.crash.memory import Leaks, Trend

SCHEMA = "holdfast.leaks/1"
_SHOWN = 10
_TITLES = {
    "type": "type",
    "container": "container, by who holds it",
    "line": "line that allocates",
}


def leaks(
    agent: Name,
    /,
    *,
    limit: Annotated[int, Parameter(name=("--limit", "-n"), metavar="N")] = _SHOWN,
    exit_code: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show what grows in an agent's process from dump to dump: types, containers and who holds them, lines.

    Reads the dumps that were taken while it ran (holdfast.crash.capture) or when it failed.

    Parameters
    ----------
    agent
        The agent's name.
    limit
        Show at most this many of each kind; 0 shows all.
    exit_code
        End with 1 when something grows.
    json
        Print JSON (schema holdfast.leaks/1).
    """
    from holdfast.crash import memory

    found = memory.leaks(agent, folder_of(session))
    if json:
        session.out.json({"schema": SCHEMA, "agent": agent, **_as_json(found)})
    else:
        _print(agent, found, limit, session)
    return DIFFERENT if exit_code and found.trends else 0


def _print(agent: str, found: Leaks, limit: int, session: Given) -> None:
    lasted = _span(found.at[-1] - found.at[0])
    whose = "one process" if found.one_process else "different processes: what differs may be chance"
    skipped = f"; {found.skipped} of other processes or without a heap summary are left out" if found.skipped else ""
    dumps = count(len(found.files), "dump")
    session.out.say(f"{dumps} of {clean(agent)} over {lasted}, of {whose}{skipped}.", wrap=True)
    if not found.trends:
        session.out.say("Nothing grew steadily.")
        return
    for kind, title in _TITLES.items():
        every = [trend for trend in found.trends if trend.kind == kind]
        shown = every[:limit] if limit > 0 else every
        if shown:
            session.out.say("")
            session.out.columns(("first", "last", "per hour", "bytes", title), map(_row, shown), right=(0, 1, 2, 3))
        if len(every) > len(shown):
            session.out.say(Text(f"{len(every) - len(shown):,} more grew less; -n 0 shows all.", style="dim"))


def _row(trend: Trend) -> list[Text | str]:
    grew = trend.bytes[-1] - trend.bytes[0]
    name = Text(clean(trend.name), style="bold")
    if trend.holds:
        name.append(f"  holds {clean(trend.holds)}", style="dim")
    return [
        f"{trend.counts[0]:,}",
        f"{trend.counts[-1]:,}",
        f"{trend.per_hour:+,.0f}",
        f"{'+' if grew >= 0 else '-'}{size(abs(grew))}",
        name,
    ]


def _span(seconds: float) -> str:
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:,.1f} {word}"
    return f"{seconds / 86_400:,.1f} days"


def _as_json(found: Leaks) -> dict[str, Any]:
    return {
        "files": [*found.files],
        "at": [*found.at],
        "skipped": found.skipped,
        "one_process": found.one_process,
        "trends": [
            {
                "kind": trend.kind,
                "name": trend.name,
                "holds": trend.holds,
                "counts": [*trend.counts],
                "bytes": [*trend.bytes],
                "per_hour": trend.per_hour,
                "bytes_per_hour": trend.bytes_per_hour,
            }
            for trend in found.trends
        ],
    }
