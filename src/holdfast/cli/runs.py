"""``holdfast runs``: what is going on, what stopped, and what it waits for; and ending what nobody will resume."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.text import Text

from holdfast import RunInfo, ScheduleInfo
from holdfast.cli.programs import Load, writing
from holdfast.cli.session import Flag, Given, Json, Limit, Name, Pattern, Wait, limited, on_branch, some_of
from holdfast.cli.text import ago, clean, count, moment, now, shorten
from holdfast.cli.values import as_json
from holdfast.errors import ResultForgotten

SCHEMA = "holdfast.runs/1"
CANCEL_SCHEMA = "holdfast.runs.cancel/1"
ADOPT_SCHEMA = "holdfast.runs.adopt/1"
_ERROR_CHARACTERS = 120
_STYLES = {
    "finished": "green",
    "running": "bold cyan",
    "waiting": "cyan",
    "queued": "cyan",
    "interrupted": "yellow",
    "needs attention": "bold red",
    "failed": "red",
    "cancelled": "dim",
    "rolled back": "magenta",
}
_NEVER = datetime.min.replace(tzinfo=UTC)

_HEADS = ("agent", "run", "function", "status", "began", "about")
_COUNTED = {"needs attention": "in need of attention", "due": "able to resume"}

runs = App(name="runs", help="List runs of durable functions, cancel or fork one, or adopt what came from elsewhere.")
runs.command("holdfast.cli.fork:fork")


@runs.default
def list_(
    pattern: Pattern = None,
    /,
    *,
    status: Annotated[str | None, Parameter(metavar="STATUS", show_default=False)] = None,
    sort: Annotated[Literal["urgent", "began"], Parameter(show_choices=True)] = "urgent",
    limit: Limit = None,
    json: Json = False,
    session: Given,
) -> int:
    """List runs of durable functions and their status, first those that need somebody, then the newest.

    Conditions: running, interrupted (its process is gone; run it again), waiting, needs attention, failed, finished,
    cancelled, rolled back. `runs cancel` ends one. Below them, the next times of functions that have a schedule.

    Parameters
    ----------
    pattern
        Only runs of this agent, NAME or NAME@BRANCH, or of those whose names are like this: 'trip-*'. [default: all]
    status
        Only runs in this status.
    sort
        Those that need somebody first (in need of attention, interrupted, able to resume, failed), or the newest.
    limit
        Show at most this many; 0 shows all. [default: 50; all with --json]
    json
        Print JSON (schema holdfast.runs/1).
    """
    with session.reading() as store:
        names, branch = some_of(store, pattern)
        wanted = status.replace("-", " ") if status is not None else None
        found = store.runs(names, branch=branch, status=wanted, limit=limited(limit, json=json), sort=sort)
        schedules = store.schedules() if pattern is None and status is None else []
        if json:
            said = {"runs": [run_json(info) for info in found], "more": found.more}
            said["schedules"] = [info.to_json() for info in schedules]
            session.out.json({"schema": SCHEMA, "store": store.place, **said})
            return 0
        if found:
            session.out.columns(_HEADS, [_row(info) for info in found])
        else:
            session.out.say("No runs." if status is None else f"No runs are {clean(status)}.")
        if found.more:
            counts = store.open_runs(names) if status is None else {}
            told = ", ".join(f"{number:,} {_COUNTED.get(word, word)}" for word, number in counts.items())
            if told:
                session.out.say(f"Not ended: {told}.")
            more = (
                f"More on up to {count(found.more, 'branch', 'branches')}; -n 0 shows all, --status or a pattern some."
            )
            session.out.say(Text(more, style="dim"))
        if schedules:
            session.out.say()
            session.out.columns(("schedule", "every", "zone", "next", "about"), map(_schedule, schedules))
    return 0


@runs.command
def cancel(
    agent: Name,
    id: str | None = None,
    /,
    *,
    undo: Flag = False,
    load: Load = (),
    wait: Wait = 0.0,
    json: Json = False,
    session: Given,
) -> int:
    """Cancel a run, whoever executes it.

    One that a process executes is told so at its next recorded call, or where it waits: it cleans up and ends. One that
    nobody executes ends at once, without cleaning up, and its branch is free again; its children end, too. With --wait
    it is left to a worker first, which lets it clean up. What it has saved and done stays, unless --undo is given. An
    effect in doubt has to be settled first, with `holdfast effects resolve`.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    id
        The run's id. [default: the one that has not ended]
    undo
        Undo what it did, newest first, and go back to where it began, as `holdfast rollback` does.
    load
        A module or file.py with the tools that undo, for a run that nobody executes.
    wait
        Wait up to this many seconds until the run has ended; one that nobody executes, for a worker to take it.
    json
        Print JSON (schema holdfast.runs.cancel/1).
    """
    with writing(session, load) as store:
        name, branch = on_branch(store, agent)
        info = store.cancel(name, id, branch=branch, compensate=undo, wait_s=wait)
        if json:
            session.out.json({"schema": CANCEL_SCHEMA, "run": run_json(info)})
            return 0
        words = {"cancelled": "Cancelled: ", "rolled back": "Cancelled and undone: ", "running": "Told to stop: "}
        session.out.say(
            Text(words.get(info.status, f"Is {info.status}: "), style="bold green"),
            f"{clean(info.function)} of {whose(info)} (run ", Text(clean(info.id), style="yellow"), ")",
        )  # fmt: skip
        if info.cancelled_by:
            session.out.say(Text("It stops at its next recorded call; --wait SECONDS waits for that.", style="dim"))
    return 0


@runs.command
def adopt(agent: Name, /, *more: str, json: Json = False, session: Given) -> int:
    """Let unfinished runs that came from elsewhere, or with a branch, be due here when their time or signal comes.

    What a backup, a push, an import, a clone or a branch brings is left alone by `holdfast run --due`, so that a copy
    never acts. Adopt it where it is to go on, and nowhere else.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    more
        More of them. A child is an agent of its own, NAME/CHILD.
    json
        Print JSON (schema holdfast.runs.adopt/1).
    """
    with session.writing() as store:
        branches = [on_branch(store, one) for one in (agent, *more)]
        found = [info for name, branch in branches for info in store.adopt(name, branch=branch)]
        if json:
            session.out.json({"schema": ADOPT_SCHEMA, "runs": [run_json(info) for info in found]})
            return 0
        for info in found:
            session.out.say(Text(whose(info), style="bold cyan"), f"  {clean(info.function)}  ", info.status)
        session.out.say(f"{count(len(found), 'unfinished run')} can go on here: holdfast run --due PROGRAM")
    return 0


def _row(info: RunInfo) -> list[Text | str]:
    return [
        Text(whose(info), style="bold cyan"),
        Text(clean(shorten(info.id, 16)), style="yellow"),
        clean(info.function),
        Text(info.status, style=style_of(info.status)),
        ago(info.began, now()),
        about(info),
    ]


def _schedule(info: ScheduleInfo) -> list[Text | str]:
    skipped = f"skipped {moment(info.skipped)}" if info.skipped is not None else ""
    about = [
        "overdue: no worker has looked" if info.overdue else "",
        f"{clean(info.running)} has not ended" if info.running else "",
        f"{count(len(info.waiting), 'time')} waiting" if info.waiting else "",
        skipped if info.running or (info.last or _NEVER) < (info.skipped or _NEVER) else "",
    ]
    return [
        Text(clean(info.function), style="bold cyan"),
        clean(info.every),
        clean(info.zone),
        Text(moment(info.next) if info.next is not None else "never", style="bold red" if info.overdue else ""),
        "; ".join(filter(None, about)),
    ]


def whose(info: RunInfo) -> str:
    """The agent, with the branch unless it is the usual one."""
    return clean(info.agent if info.branch == "main" else f"{info.agent}@{info.branch}")


def style_of(status: str) -> str:
    return _STYLES.get(status, "")


def about(info: RunInfo) -> str:
    """What it waits for, or what went wrong."""
    if info.due:
        return f"{_come(info)}: can resume"
    if (ahead := info.ahead) is not None:
        where = clean(f"{info.queue}, {info.partition}" if info.partition else info.queue)
        return f"in {where}: " + (f"{ahead:,} before it" if ahead else "the next")
    if info.status in {"running", "waiting"}:
        others = [f"for {clean(name)}" for name in info.waits_for]
        waits = [f"for the signal {clean(info.signal)}" if info.signal else "", *others, _until(info.until)]
        said = ("waits " if info.status == "running" and any(waits) else "") + " or ".join(filter(None, waits))
        return "; ".join(filter(None, (f"cancelled by {clean(info.cancelled_by)}" if info.cancelled_by else "", said)))
    return clean(shorten(info.error.partition("\n")[0], _ERROR_CHARACTERS))


def _come(info: RunInfo) -> str:
    if info.until is not None and info.until <= now():
        return "its time has come"
    if info.signal and not info.waits_for:
        return f"signal {clean(info.signal)} arrived"
    return "what it waits for has come"


def _until(time: datetime | None) -> str:
    return f"until {moment(time)}" if time is not None else ""


def run_json(info: RunInfo) -> dict[str, Any]:
    """One run in JSON. ``result`` is null until it has finished; with ``let_go``, what went is."""
    found = {"args": None, "result": None}
    for name in found:
        with suppress(ResultForgotten):
            found[name] = as_json(getattr(info, name))
    return {**info.to_json(), **found}
