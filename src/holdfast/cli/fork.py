"""``holdfast runs fork``: a run once more from one of its positions, after showing what may happen twice."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast import Agent, Effect, ForkPlan
from holdfast.cli.effects import call_of
from holdfast.cli.output import Output
from holdfast.cli.programs import Load, writing
from holdfast.cli.runs import run_json, whose
from holdfast.cli.session import Flag, Given, Json, Name, Wait, on_branch, reader, writer
from holdfast.cli.text import ago, clean, count, now
from holdfast.errors import BadOption

SCHEMA = "holdfast.runs.fork/1"


def fork(
    agent: Name,
    id: str,
    /,
    *,
    at: Annotated[str, Parameter(metavar="POSITION")],
    branch: Annotated[str, Parameter(metavar="NEW")],
    dry_run: Flag = False,
    yes: Flag = False,
    load: Load = (),
    wait: Wait = 0.0,
    json: Json = False,
    session: Given,
) -> int:
    """Execute a run once more from a position on, on a new branch. The run itself stays what it is.

    Calls before the position are answered from the record; from there on they are made, so what the run did since may
    happen again. Shows that first; asks on a terminal, and needs --yes elsewhere. Nothing is executed: `holdfast
    worker` goes on with the new run, or `holdfast run`. Works while another process executes the run.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    id
        The run's id.
    at
        The position of a call, as `holdfast effects NAME --run ID` lists it, or a step, such as plan:0.
    branch
        The new branch's name.
    dry_run
        Show what would happen and change nothing.
    yes
        Do not ask.
    load
        A module or file.py with the tools that can tell what became of calls in doubt before the position.
    wait
        Wait up to this many seconds for a process that writes the branch, where a call before the position is in doubt.
    json
        Print JSON (schema holdfast.runs.fork/1). Needs --yes or --dry-run.
    """
    if not dry_run and not yes and (json or not sys.stdin.isatty()):
        with session.reading() as store:
            reader(store, *on_branch(store, agent)).plan_fork(id, at=at)  # what is not there is said first
        raise BadOption(
            "the fork was not confirmed", hint="There is nobody to ask here: add --yes, or --dry-run to look first."
        )
    with ExitStack() as held:
        store = held.enter_context(session.reading() if dry_run else writing(session, load))
        handle: Agent = reader(store, *on_branch(store, agent))
        plan = handle.plan_fork(id, at=at)
        if plan.in_doubt and not dry_run:  # only who writes the branch can settle that
            _, _, handle = held.enter_context(writer(store, agent, wait))
            plan = handle.plan_fork(id, at=at)
        if not json:
            _show(session.out, handle, plan, branch)
        if dry_run:
            if not json:
                session.out.say(Text("Dry run: nothing was changed.", style="bold"))
        elif not yes and not session.out.confirmed("Fork it?"):
            session.out.say("Nothing was changed.")
            return 0
        info = plan.apply(branch) if not dry_run else None
        if json:
            about = {"agent": handle.name, "branch": handle.branch_name, "new": branch, **plan.to_json()}
            session.out.json({"schema": SCHEMA, "done": not dry_run, **about, "to": run_json(info) if info else None})
        elif info is not None:
            session.out.say(
                Text("Done. ", style="bold green"), f"Run {clean(info.id)} of ",
                Text(whose(info), style="bold cyan"), f" is {info.status}: `holdfast worker PROGRAM` goes on with it.",
            )  # fmt: skip
    return 0


def _show(out: Output, handle: Agent, plan: ForkPlan, branch: str) -> None:
    """All of what may happen again: who answers has to know it."""
    begins = plan.checkpoint
    out.say(
        f"Run {clean(plan.run)} of ", Text(f"{clean(handle.name)}@{clean(handle.branch_name)}", style="bold cyan"),
        f" is executed once more from {clean(plan.at)} on, on branch ", Text(clean(branch), style="bold cyan"), ".",
    )  # fmt: skip
    out.say(
        "The branch begins at ", Text(begins.short_id, style="yellow"),
        f" #{begins.depth} {clean(begins.label)} ({ago(begins.time, now())}). The record answers"
        f" {count(len(plan.answered), 'call')}; {count(len(plan.again), 'recorded call')} will be made again.",
        wrap=True,
    )  # fmt: skip
    _list(out, Text("Is in doubt, and has to be settled first:", style="bold red"), plan.in_doubt, handle)
    _list(out, Text("Was done, and may happen again:", style="yellow"), plan.writes, handle)
    if plan.signals:
        names = ", ".join(map(clean, plan.signals))
        out.say(f"Signals to be sent again, to {clean(handle.name)} on branch {clean(branch)}: {names}")


def _list(out: Output, title: Text, found: list[Effect], handle: Agent) -> None:
    if found:
        out.say(title)
    for number, one in enumerate(found, 1):
        line = Text(f"{number:>3}. ", style="dim").append(one.id, style="yellow").append(f" {call_of(one)}")
        of = f" of {clean(one.agent)}" if one.agent not in {"", handle.name} else ""
        out.say(line, Text(f"{of} at {clean(one.path)}", style="dim"), wrap=True)
