"""``holdfast rollback``: back to an earlier checkpoint, after showing what that means."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast import Agent, Checkpoint, Rollback
from holdfast.cli.changes import change_json, lines
from holdfast.cli.complete import refs
from holdfast.cli.output import Output
from holdfast.cli.session import Flag, Given, Json, Name, Session, Wait, on_branch, reader
from holdfast.cli.text import ago, clean, count, now
from holdfast.errors import BadOption

SCHEMA = "holdfast.rollback/1"
# What a person reads before answering.
_SHOWN = 12


def rollback(
    agent: Name,
    /,
    *,
    to: Annotated[str, Parameter(completer=refs, metavar="REV")],
    dry_run: Flag = False,
    yes: Flag = False,
    wait: Wait = 0.0,
    json: Json = False,
    session: Given,
) -> int:
    """Move a branch back to an earlier checkpoint.

    Nothing is deleted: what came after stays in the history (`holdfast log NAME --all`), and `holdfast branch` gives
    it a name again. Shows first what will be left behind; asks on a terminal, and needs --yes elsewhere.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    to
        Where to go back to: a revision of this agent.
    dry_run
        Show what would happen and change nothing. Works while another process writes the agent.
    yes
        Do not ask.
    wait
        Wait up to this many seconds for a process that writes the branch.
    json
        Print JSON (schema holdfast.rollback/1). Needs --yes or --dry-run.
    """
    if not dry_run and not yes and (json or not sys.stdin.isatty()):
        raise BadOption(
            "rollback was not confirmed", hint="There is nobody to ask here: add --yes, or --dry-run to look first."
        )
    if dry_run:
        return _preview(session, agent, to, json=json)
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        with store.agent(name, branch=branch, create=False, wait_s=wait) as handle:
            plan = handle.preview_rollback(to)
            if not json:
                _show(session.out, handle, plan)
            if not yes and not _confirmed(session.out):
                session.out.say("Nothing was changed.")
                return 0
            head = handle.rollback(plan.target)
            if json:
                session.out.json(_as_json(handle, plan, done=True))
            else:
                _done(session.out, name, branch, head, plan)
    return 0


def _preview(session: Session, agent: str, to: str, *, json: bool) -> int:
    with session.reading() as store:
        handle = reader(store, *on_branch(store, agent))
        plan = handle.preview_rollback(to)
        if json:
            session.out.json(_as_json(handle, plan, done=False))
        else:
            _show(session.out, handle, plan)
            session.out.say(Text("Dry run: nothing was changed.", style="bold"))
    return 0


def _show(out: Output, handle: Agent, plan: Rollback) -> None:
    target = plan.target
    out.say(
        Text(f"{clean(handle.name)}@{clean(handle.branch_name)}", style="bold cyan"), " goes back to ",
        Text(target.short_id, style="yellow"), f" #{target.depth} {clean(target.label)} ({ago(target.time, now())}).",
    )  # fmt: skip
    if plan.abandons:
        out.say(f"{count(len(plan.abandons), 'checkpoint')} will be left behind, not deleted:")
        for checkpoint in plan.abandons[:_SHOWN]:
            out.say(
                "  ", Text(checkpoint.short_id, style="yellow"), f"  #{checkpoint.depth}",
                Text(f"  {ago(checkpoint.time, now())}", style="dim"), f"  {clean(checkpoint.label)}",
            )  # fmt: skip
        if len(plan.abandons) > _SHOWN:
            out.say(Text(f"  … and {len(plan.abandons) - _SHOWN:,} more", style="dim"))
    if plan.diff:
        out.say("The state changes like this:")
        changed = list(lines(plan.diff))
        for line in changed[:_SHOWN]:
            out.say("  ", line, wrap=True)
        if len(changed) > _SHOWN:
            out.say(Text(f"  … and {count(len(changed) - _SHOWN, 'more line')}", style="dim"))
    else:
        out.say("The state stays as it is.")


def _confirmed(out: Output) -> bool:
    out.print("Roll back? [y/N] ", style="bold", end="")
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:
        out.say()
        return False


def _done(out: Output, name: str, branch: str, head: Checkpoint, plan: Rollback) -> None:
    out.say(
        Text("Done. ", style="bold green"), f"{clean(name)}@{clean(branch)} is at ",
        Text(head.short_id, style="yellow"), f" #{head.depth}, state {head.digest[:16]}.",
    )  # fmt: skip
    if plan.abandons:
        where = name if branch == "main" else f"{name}@{branch}"
        back = shlex.join(("holdfast", "rollback", where, "--to", f"id:{plan.abandons[0].short_id}"))
        out.say(Text(f"To go forward again: {clean(back)}", style="dim"))


def _as_json(handle: Agent, plan: Rollback, *, done: bool) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "agent": handle.name,
        "branch": handle.branch_name,
        "done": done,
        "target": plan.target.to_json(),
        "abandons": [checkpoint.to_json() for checkpoint in plan.abandons],
        "changes": [change_json(change) for change in plan.diff],
    }
