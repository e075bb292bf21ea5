"""``holdfast runs``: what is going on, what stopped, and what it waits for; and ending what nobody will resume."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.text import Text

from holdfast import RunInfo, Store
from holdfast.cli.complete import agents
from holdfast.cli.session import Given, Json, Name, Wait, on_branch
from holdfast.cli.text import ago, clean, count, moment, now, shorten
from holdfast.cli.values import as_json
from holdfast.errors import BadOption

SCHEMA = "holdfast.runs/1"
CANCEL_SCHEMA = "holdfast.runs.cancel/1"
# About two screens. A program that asks for JSON gets everything, unless it says otherwise.
SHOWN = 50
_ERROR_CHARACTERS = 120
_STYLES = {
    "finished": "green",
    "running": "bold cyan",
    "waiting": "cyan",
    "interrupted": "yellow",
    "needs attention": "bold red",
    "failed": "red",
    "cancelled": "dim",
    "rolled back": "magenta",
}
_OPEN = ("interrupted", "waiting", "needs attention")

Number = Annotated[int | None, Parameter(name=("--number", "-n"), metavar="N", show_default=False)]


runs = App(name="runs", help="List runs of durable functions, or cancel one.")


@runs.default
def list_(
    *,
    agent: Annotated[str | None, Parameter(completer=agents, metavar="NAME", show_default=False)] = None,
    status: Annotated[str | None, Parameter(metavar="STATUS", show_default=False)] = None,
    number: Number = None,
    json: Json = False,
    session: Given,
) -> int:
    """List runs of durable functions and their status, the newest first; `runs cancel` ends one.

    Conditions: running, interrupted (its process is gone; run it again), waiting, needs attention, failed, finished,
    cancelled, rolled back.

    Parameters
    ----------
    agent
        Only runs of this agent, NAME or NAME@BRANCH. [default: all agents and branches]
    status
        Only runs in this status.
    number
        Show at most this many; 0 shows all. [default: 50; all with --json]
    json
        Print JSON (schema holdfast.runs/1).
    """
    with session.reading() as store:
        found = _found(store, agent, status)
        limit = number if number is not None else (0 if json else SHOWN)
        shown = found[:limit] if limit > 0 else found
        if json:
            entries = [run_json(info) for info in shown]
            session.out.json({"schema": SCHEMA, "store": store.place, "runs": entries, "more": len(found) - len(shown)})
            return 0
        if not found:
            session.out.say("No runs." if status is None else f"No runs are {clean(status)}.")
            return 0
        session.out.columns(("agent", "run", "function", "status", "began", "about"), [_row(info) for info in shown])
        if len(found) > len(shown):
            more = count(len(found) - len(shown), "older run")
            session.out.say(Text(f"{more}; -n 0 shows all.", style="dim"))
    return 0


@runs.command
def cancel(agent: Name, id: str | None = None, /, *, wait: Wait = 0.0, json: Json = False, session: Given) -> int:
    """End a run that nobody executes: it is cancelled, and its branch is free again.

    What it has saved and done stays; `holdfast rollback` takes it back. An effect in doubt has to be settled first,
    with `holdfast effects resolve`. A run that a process is executing ends with that process.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    id
        The run's id. [default: the one that has not ended]
    wait
        Wait up to this many seconds for a process that writes the branch.
    json
        Print JSON (schema holdfast.runs.cancel/1).
    """
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        with closing(store.agent(name, branch=branch, create=False, wait_s=wait)) as handle:
            if id is None:
                left = [info.id for info in handle.runs() if info.status in _OPEN and info.kind != "map"]
                if len(left) != 1:
                    raise BadOption(
                        f"{'no run' if not left else f'{len(left)} runs'} of {agent} can be cancelled without its id",
                        hint=f"See `holdfast runs --agent {agent}`.",
                    )
                id = left[0]
            handle.cancel(id)
            (info,) = [one for one in handle.runs() if one.id == id]
            if json:
                session.out.json({"schema": CANCEL_SCHEMA, "run": run_json(info)})
            else:
                session.out.say(
                    Text("Cancelled: ", style="bold green"), f"{clean(info.function)} of {whose(info)} (run ",
                    Text(clean(id), style="yellow"), ")",
                )  # fmt: skip
    return 0


def _found(store: Store, agent: str | None, status: str | None) -> list[RunInfo]:
    found = store.runs(status.replace("-", " ") if status is not None else None)
    if agent is not None:
        only = on_branch(store, agent)
        found = [info for info in found if (info.agent, info.branch) == only]
    return sorted(found, key=lambda info: info.began, reverse=True)


def _row(info: RunInfo) -> list[Text | str]:
    return [
        Text(whose(info), style="bold cyan"),
        Text(clean(shorten(info.id, 16)), style="yellow"),
        clean(info.function),
        Text(info.status, style=style_of(info.status)),
        ago(info.began, now()),
        about(info),
    ]


def whose(info: RunInfo) -> str:
    """The agent, with the branch unless it is the usual one."""
    return clean(info.agent if info.branch == "main" else f"{info.agent}@{info.branch}")


def style_of(status: str) -> str:
    return _STYLES.get(status, "")


def about(info: RunInfo) -> str:
    """What it waits for, or what went wrong."""
    if info.status in {"running", "waiting"}:
        others = [f"for {clean(name)}" for name in info.waits_for]
        waits = [f"for the signal {clean(info.signal)}" if info.signal else "", *others, _until(info.until)]
        return ("waits " if info.status == "running" and any(waits) else "") + " or ".join(filter(None, waits))
    return clean(shorten(info.error.partition("\n")[0], _ERROR_CHARACTERS))


def _until(time: datetime | None) -> str:
    return f"until {moment(time)}" if time is not None else ""


def run_json(info: RunInfo) -> dict[str, Any]:
    """One run in JSON. ``result`` is null until it has finished."""
    return {**info.to_json(), "args": as_json(info.args), "result": as_json(info.result)}
