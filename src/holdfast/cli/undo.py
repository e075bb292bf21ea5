"""``holdfast undo``: append a checkpoint that reverses another. Its counterpart is in redo.py."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from holdfast import Agent, Checkpoint
from holdfast.cli.changes import change_json, lines
from holdfast.cli.session import Given, Json, Name, Session, Wait, writer
from holdfast.cli.text import clean

SCHEMA = "holdfast.undo/1"


def undo(agent: Name, /, *, wait: Wait = 0.0, json: Json = False, session: Given) -> int:
    """Reverse the last checkpoint that is not yet undone.

    This appends a new checkpoint; the history keeps both. Again undoes the one before.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    wait
        Wait up to this many seconds for a process that writes the branch.
    json
        Print JSON (schema holdfast.undo/1).
    """
    return step(session, agent, Agent.undo, SCHEMA, wait_s=wait, json=json)


def step(
    session: Session, agent: str, move: Callable[[Agent], Checkpoint], schema: str, *, wait_s: float, json: bool
) -> int:
    """Move one step through the history and say what that did."""
    with session.writing() as store, writer(store, agent, wait_s) as (name, branch, handle), handle:
        made = move(handle)
        target = handle.at(f"id:{made.target_id}")
        changes = made.changes()
        if json:
            session.out.json(
                {
                    "schema": schema,
                    "agent": name,
                    "branch": branch,
                    "checkpoint": made.to_json(),
                    "target": target.to_json(),
                    "changes": [change_json(change) for change in changes],
                }
            )
            return 0
        verb = "Undone: " if made.kind == "undo" else "Done again: "
        session.out.say(
            Text(verb, style="bold green"), Text(target.short_id, style="yellow"),
            f" #{target.depth} {clean(target.label)}".rstrip(), f", in the new checkpoint #{made.depth} ",
            Text(made.short_id, style="yellow"), ".",
        )  # fmt: skip
        for line in lines(changes):
            session.out.say("  ", line, wrap=True)
    return 0
