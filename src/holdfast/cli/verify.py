"""``holdfast verify``: read everything, prove every digest, say what is damaged."""

from __future__ import annotations

from rich.text import Text

from holdfast import VerifyReport
from holdfast.cli.exits import DAMAGED, FAILED
from holdfast.cli.output import Output
from holdfast.cli.progress import bars
from holdfast.cli.session import Given, Json, Name, shown
from holdfast.cli.text import clean, count, size
from holdfast.errors import Damaged

SCHEMA = "holdfast.verify/1"
# Ids that a problem lists; the JSON has all.
_LISTED = 6
_SAVE = "`holdfast repair` says what can be saved, `holdfast repair --to DIR` makes a new store of it."


def verify(*agents: Name, json: Json = False, session: Given) -> int:
    """Read everything in the store and prove every digest and the chain of checkpoints.

    Ends with 5 when something is damaged, with 6 when nothing is known to be, and packs lie in a place that cannot be
    reached now.

    Parameters
    ----------
    agents
        Check only these agents. [default: the whole store]
    json
        Print JSON (schema holdfast.verify/1).
    """
    try:
        with session.reading() as store:
            names = [store.resolve(name)[0] for name in agents]
            with bars(session.err) as progress:
                report = store.verify(progress, names)
            if json:
                session.out.json({"schema": SCHEMA, "store": store.place, **report.to_json()})
            else:
                _print(session.out, report)
    except Damaged as error:  # so badly that it cannot even be opened
        if "holdfast verify" in error.hint or not error.hint:
            error.hint = _SAVE
        if not json:
            raise
        problem = {"what": ", ".join(error.what) or "store", "detail": error.message, "agent": "", "affected": []}
        found = {"ok": False, "checked": {}, "problems": [problem], "affected": [], "unreachable": []}
        session.out.json({"schema": SCHEMA, "store": shown(session.place), **found})
        return DAMAGED
    return 0 if report.ok else DAMAGED if report.problems else FAILED


def _print(out: Output, report: VerifyReport) -> None:
    checked = [
        size(number) if what == "bytes" else count(number, what.removesuffix("s").replace("_", " "))
        for what, number in report.checked.items()
    ]
    out.say(f"Checked {', '.join(checked)}.")
    if report.ok:
        out.say(Text("Everything is as it was written.", style="bold green"))
        return
    for away in report.unreachable:
        what = f"{count(away.packs, 'pack')} and {count(len(away.checkpoints), 'checkpoint')} could not be looked at: "
        out.say(Text(what, style="bold yellow"), clean(away.detail))
        _ids(out, away.checkpoints)
        out.say(f"  {clean(away.hint)}")
    if not report.problems:
        out.say("Everything else is as it was written.")
        return
    out.say(Text(f"{count(len(report.problems), 'problem')} found.", style="bold red"))
    for problem in report.problems:
        whose = f" ({clean(problem.agent)})" if problem.agent else ""
        out.say(Text(f"  {clean(problem.what)}{whose}: ", style="red"), clean(problem.detail))
        _ids(out, problem.affected)
    if report.affected and report.unreachable:
        out.say(f"{count(len(report.affected), 'checkpoint')} cannot be trusted.")
    elif report.affected:
        out.say(f"{count(len(report.affected), 'checkpoint')} cannot be trusted; the others are proven.")
    out.say('store.agent("NAME", recover=True) goes on from the newest valid checkpoint of a damaged agent.')
    out.say(_SAVE)


def _ids(out: Output, checkpoints: list[str]) -> None:
    if checkpoints:
        ids = ", ".join(one[:12] for one in checkpoints[:_LISTED])
        more = len(checkpoints) - _LISTED
        out.say(Text(f"    checkpoints: {ids}{f' and {more} more' if more > 0 else ''}", style="yellow"))
