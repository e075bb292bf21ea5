"""``holdfast rollback``: back to an earlier checkpoint, after showing what that means."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast import Agent, Change, Checkpoint, Diff, RollbackPlan
from holdfast.cli.changes import change_json, lines
from holdfast.cli.complete import refs
from holdfast.cli.effects import call_of
from holdfast.cli.exits import ATTENTION
from holdfast.cli.output import Output
from holdfast.cli.programs import Load, load, writing
from holdfast.cli.session import Flag, Given, Json, Name, Session, Wait, on_branch, reader, writer
from holdfast.cli.text import ago, clean, count, now
from holdfast.errors import BadOption, RollbackBlocked, command

SCHEMA = "holdfast.rollback/1"
_WAY_OUT = (
    "Load the program that can undo it (--load), decide what is in doubt (holdfast effects resolve), or leave it"
    " standing (--accept NAME)."
)
# What a person reads before answering.
_SHOWN = 12


def rollback(
    agent: Name,
    /,
    *,
    to: Annotated[str, Parameter(completer=refs, metavar="REV")],
    dry_run: Flag = False,
    yes: Flag = False,
    accept: Annotated[tuple[str, ...], Parameter(metavar="NAME", negative="", show_default=False)] = (),
    bookkeeping: Flag = False,
    load: Load = (),
    wait: Wait = 0.0,
    json: Json = False,
    session: Given,
) -> int:
    """Move a branch back to an earlier checkpoint, and undo what the agent did outside since.

    Nothing is deleted: what came after stays in the history (`holdfast log NAME --all`), and `holdfast branch` gives
    it a name again. Shows first what will be undone and left behind; asks on a terminal, and needs --yes elsewhere.
    Ends with 7 when an effect stands in the way.

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
    accept
        Leave these effects standing though they cannot be undone: a tool's name, or an effect's id.
    bookkeeping
        Show also what integrations such as LangGraph's keep for themselves: sections named __like_this__.
    load
        A module or file.py with the tools that undo. Nothing is imported unless it is named here.
    wait
        Wait up to this many seconds for a process that writes the branch.
    json
        Print JSON (schema holdfast.rollback/1). Needs --yes or --dry-run.
    """
    if not dry_run and not yes and (json or not sys.stdin.isatty()):
        with session.reading() as store:
            reader(store, *on_branch(store, agent)).at(to)  # what is not there is said first
        raise BadOption(
            "rollback was not confirmed", hint="There is nobody to ask here: add --yes, or --dry-run to look first."
        )
    wanted = _Wanted(to, accept, bookkeeping)
    if dry_run:
        return _preview(session, agent, wanted, load, json=json)
    # Of an agent that is not current: a rollback that was interrupted is to be finished as it is asked for here.
    with writing(session, load) as store, writer(store, agent, wait) as (name, branch, handle):
        plan = wanted.plan(handle)
        if not json:
            _show(session.out, handle, plan, wanted.changes(plan))
        if plan.blocked:
            said = count(len(plan.blocked), "effect stands", "effects stand")
            raise RollbackBlocked(f"{said} in the way; nothing was changed")
        if not yes and not session.out.confirmed("Roll back?"):
            session.out.say("Nothing was changed.")
            return 0
        head = plan.apply()
        if json:
            session.out.json(_as_json(handle, plan, wanted.changes(plan), done=True))
        else:
            _done(session.out, name, branch, head, plan)
    return 0


@dataclass(frozen=True)
class _Wanted:
    to: str
    accept: Sequence[str]
    bookkeeping: bool

    def plan(self, handle: Agent) -> RollbackPlan:
        return handle.plan_rollback(self.to, accept=self.accept)

    def changes(self, plan: RollbackPlan) -> list[Change]:
        found: Diff = plan.diff
        return found.everything if self.bookkeeping else found.changes


def _preview(session: Session, agent: str, wanted: _Wanted, programs: Sequence[str], *, json: bool) -> int:
    load(programs)
    with session.reading() as store:
        handle = reader(store, *on_branch(store, agent))
        plan = wanted.plan(handle)
        if json:
            session.out.json(_as_json(handle, plan, wanted.changes(plan), done=False))
        else:
            _show(session.out, handle, plan, wanted.changes(plan))
            if plan.blocked:
                session.out.say(_WAY_OUT, wrap=True)
            session.out.say(Text("Dry run: nothing was changed.", style="bold"))
        return ATTENTION if plan.blocked else 0


def _show(out: Output, handle: Agent, plan: RollbackPlan, changes: Sequence[Change]) -> None:
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
    if changes:
        out.say("The state changes like this:")
        changed = list(lines(changes))
        for line in changed[:_SHOWN]:
            out.say("  ", line, wrap=True)
        if len(changed) > _SHOWN:
            out.say(Text(f"  … and {count(len(changed) - _SHOWN, 'more line')}", style="dim"))
    else:
        out.say("Only bookkeeping changes." if plan.diff.everything else "The state stays as it is.")
    _show_effects(out, handle, plan)


def _show_effects(out: Output, handle: Agent, plan: RollbackPlan) -> None:
    """What happens outside. All of it: who answers has to know what is undone."""
    for title, style, found in (
        ("Will be undone outside, in this order:", "yellow", plan.undo),
        ("Cannot be undone, and stands in the way:", "bold red", plan.blocked),
        ("Stays as it is outside:", "", plan.accepted),
        ("Was undone before:", "dim", plan.undone),
    ):
        if found:
            out.say(Text(title, style=style))
            for number, one in enumerate(found, 1):
                whose = f" of {clean(one.agent)}" if one.agent != handle.name else ""
                line = Text(f"{number:>3}. ", style="dim").append(one.effect.id, style="yellow")
                line.append(f" {call_of(one.effect)}{whose}")
                used = f"also known to {', '.join(one.used_by)}" if one.used_by else ""
                said = "; ".join(part for part in (one.why, used) if part)
                out.say(line, Text(f": {clean(said)}" if said else "", style="dim"), wrap=True)
    if plan.harmless:
        out.say(Text(f"{count(len(plan.harmless), 'call')} changed nothing outside.", style="dim"))
    for name, checkpoint in plan.children:
        out.say(
            "Child ", Text(clean(name), style="bold cyan"), " goes back to ", Text(checkpoint.short_id, style="yellow"),
            f" #{checkpoint.depth} {clean(checkpoint.label)}".rstrip(), ".",
        )  # fmt: skip


def _done(out: Output, name: str, branch: str, head: Checkpoint, plan: RollbackPlan) -> None:
    undone = f" {count(len(plan.undo), 'effect')} undone." if plan.undo else ""
    out.say(
        Text("Done. ", style="bold green"), f"{clean(name)}@{clean(branch)} is at ",
        Text(head.short_id, style="yellow"), f" #{head.depth}, state {head.digest[:16]}.{undone}",
    )  # fmt: skip
    if plan.abandons:
        where = name if branch == "main" else f"{name}@{branch}"
        back = command("rollback", where, "--to", f"id:{plan.abandons[0].short_id}")
        out.say(Text(f"To go forward again: {clean(back)}", style="dim"))


def _as_json(handle: Agent, plan: RollbackPlan, changes: Sequence[Change], *, done: bool) -> dict[str, object]:
    planned = plan.to_json()
    return {
        "schema": SCHEMA,
        "agent": handle.name,
        "branch": handle.branch_name,
        "done": done,
        "target": plan.target.to_json(),
        "abandons": [checkpoint.to_json() for checkpoint in plan.abandons],
        "changes": [change_json(change) for change in changes],
        **{key: planned[key] for key in ("undo", "blocked", "accepted", "undone", "harmless", "children")},
    }
