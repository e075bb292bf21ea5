"""``holdfast diff``: what differs between two checkpoints of an agent."""

from __future__ import annotations

from rich.text import Text

from holdfast import Agent, Checkpoint
from holdfast.cli.changes import change_json, lines
from holdfast.cli.exits import DIFFERENT
from holdfast.cli.session import Flag, Given, Json, Revision, looking
from holdfast.cli.text import clean, count
from holdfast.errors import BadOption

SCHEMA = "holdfast.diff/1"


def diff(
    old: Revision,
    new: Revision | None = None,
    /,
    *,
    exit_code: Flag = False,
    bookkeeping: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Show what differs between two checkpoints of an agent.

    Parameters
    ----------
    old
        The earlier side: NAME or NAME@REV.
    new
        The later side: NAME or NAME@REV. Without it, the newest checkpoint of the same agent.
    exit_code
        End with 1 when there are differences.
    bookkeeping
        Show also what integrations such as LangGraph's keep for themselves: sections named __like_this__.
    json
        Print JSON (schema holdfast.diff/1).
    """
    with session.reading() as store:
        agent, before = looking(store, old)
        other, after = looking(store, new) if new is not None else (agent, agent.at())
        if other.name != agent.name:
            raise BadOption(
                f"{agent.name!r} and {other.name!r} are different agents",
                hint="diff compares two checkpoints of one agent.",
            )
        compared = agent.diff(before, after)
        found = compared.everything if bookkeeping else compared.changes
        if json:
            session.out.json(
                {
                    "schema": SCHEMA,
                    "agent": agent.name,
                    "old": before.to_json(),
                    "new": after.to_json(),
                    "equal": before.digest == after.digest,
                    "changes": [change_json(change) for change in found],
                }
            )
        else:
            session.out.say(Text(f"--- {_title(agent, before)}", style="bold red"))
            session.out.say(Text(f"+++ {_title(agent, after)}", style="bold green"))
            for line in lines(found):
                session.out.say(line, wrap=True)
            changed = count(len(found), "change") if found else "no differences"
            session.out.say(Text(changed, style="dim"))
    return DIFFERENT if exit_code and before.digest != after.digest else 0


def _title(agent: Agent, checkpoint: Checkpoint) -> str:
    label = f"  {checkpoint.label}" if checkpoint.label else ""
    return clean(f"{agent.name}@id:{checkpoint.short_id}  #{checkpoint.depth}{label}")
