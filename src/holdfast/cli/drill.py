"""``holdfast drill``: restore agents elsewhere and prove them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import DrillReport
from holdfast.cli.exits import DAMAGED, FAILED
from holdfast.cli.output import Output
from holdfast.cli.progress import bars
from holdfast.cli.session import Given, Json, Name
from holdfast.cli.text import clean, count, size

SCHEMA = "holdfast.drill/1"
# What restored well and is listed; what did not is listed always, and the JSON has all.
_LISTED = 20
_WORDS = {
    (False, False): Text("ok", style="green"),
    (True, False): Text("lost", style="bold red"),
    (True, True): Text("unknown", style="bold yellow"),
}


def drill(
    store: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    agent: Annotated[tuple[Name, ...], Parameter(metavar="NAME", negative="", show_default=False)] = (),
    sample: Annotated[int, Parameter(metavar="N")] = 20,
    place: Annotated[Path | None, Parameter(metavar="DIR", show_default=False)] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Restore agents in a scratch place, as after a loss, and prove everything that came back.

    They are taken at random, and come with their whole histories. The store is only read; the scratch place is
    removed. Ends with 5 when something did not come back as it was, with 6 when something could only not be tried.

    Parameters
    ----------
    store
        The store to test, for example a backup. [default: that of the other verbs]
    agent
        Only this agent. Can be given several times.
    sample
        How many agents, unless some are named.
    place
        Where the scratch place is made. [default: beside the store]
    json
        Print JSON (schema holdfast.drill/1).
    """
    with (
        holdfast.open(store if store is not None else session.place, create=False, readonly=True, inert=True) as opened,
        bars(session.err) as progress,
    ):
        report = opened.drill(agent, sample=sample, place=place, progress=progress)
    if json:
        session.out.json({"schema": SCHEMA, **report.to_json()})
    else:
        _print(session.out, report)
    lost = any(one.problem and not one.unknown for one in report.agents)
    return 0 if report.ok else DAMAGED if lost else FAILED


def _print(out: Output, report: DrillReport) -> None:
    failed = [one for one in report.agents if one.problem]
    good = [one for one in report.agents if not one.problem]
    rows = [
        (
            _WORDS[bool(one.problem), one.unknown],
            Text(clean(one.agent), style="bold cyan"),
            f"{one.checkpoints:,}" if one.checkpoints else "",
            clean(one.problem),
        )
        for one in (*failed, *good[:_LISTED])
    ]
    if rows:
        out.columns(("", "agent", "checkpoints", ""), rows, right=(2,))
    if len(good) > _LISTED:
        out.say(f"and {count(len(good) - _LISTED, 'more')} that came back; --json has all.")
    done = f"{len(good)} of {count(len(report.agents), 'agent')} restored and proven"
    out.say(
        Text(f"{done} ({size(report.bytes)}).", style="bold red" if failed else "bold green"),
        f" The store has {report.total:,}.",
    )
