"""``holdfast repair``: what is intact of a damaged store goes into a new one."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast.cli.exits import DAMAGED
from holdfast.cli.output import Output
from holdfast.cli.progress import bars
from holdfast.cli.session import Given, Json
from holdfast.cli.text import clean, count

SCHEMA = "holdfast.repair/1"
# What is listed for people; the JSON has all.
_LISTED = 20


def repair(
    *,
    to: Annotated[str | None, Parameter(metavar="DIR")] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Copy what is intact of a damaged store into a new one, and say what is lost.

    The damaged store is not changed. Without --to it only says what could be saved. Ends with 5 when something is lost.

    Parameters
    ----------
    to
        Where the new store goes. Nothing may be there yet.
    json
        Print JSON (schema holdfast.repair/1).
    """
    with bars(session.err) as progress:
        report = holdfast.repair(session.place, to, progress=progress)
    if json:
        session.out.json({"schema": SCHEMA, **report.to_json()})
    else:
        _print(session.out, report)
    return 0 if report.whole else DAMAGED


def _print(out: Output, report: holdfast.RepairReport) -> None:
    _list(out, "What is wrong with the files:", report.problems)
    for agent in report.agents:
        kept = f"{count(agent.checkpoints, 'checkpoint')}, {count(agent.effects, 'effect record')}"
        out.say(Text(clean(agent.name), style="bold cyan"), f": {kept}", " kept." if report.to else " can be kept.")
        lost = [f"checkpoint {one.id[:12]} {one.label!r}: {one.why}" for one in agent.lost_checkpoints]
        _list(out, "  Lost:", [*agent.lost, *lost], indent="    ")
    _list(out, "Gone without a trace of whose it was:", report.missing)
    if report.older:
        out.say(
            Text("This is an older copy of the store than the one that was last used here. ", style="bold red"),
            f"Not in it: {clean(report.older)}.",
        )
        out.say("If there is a newer one, save that. If this was put back on purpose, say so: `holdfast trust`.")
    if report.whole:
        out.say(Text("Nothing is lost.", style="bold green"))
    if report.to is None:
        out.say(Text("Dry run: nothing was written.", style="bold"), " Add --to DIR to make the new store.")
    else:
        out.say(f"The new store is {clean(str(report.to))}. The damaged one was not changed.")


def _list(out: Output, title: str, lines: list[str], indent: str = "  ") -> None:
    if not lines:
        return
    out.say(Text(title, style="bold"))
    for line in lines[:_LISTED]:
        out.say(indent + clean(line))
    if len(lines) > _LISTED:
        out.say(f"{indent}and {len(lines) - _LISTED} more (--json has all)")
