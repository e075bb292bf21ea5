"""``holdfast clone``: a new agent that begins with the whole history of another."""

from __future__ import annotations

from rich.text import Text

from holdfast.cli.session import Given, Json, Name
from holdfast.cli.text import clean, count
from holdfast.errors import BadOption, command

SCHEMA = "holdfast.clone/1"


def clone(agent: Name, new: str, /, *, json: Json = False, session: Given) -> int:
    """Start a new agent with the whole history of another.

    Nothing is copied: the two share what they have in common and are independent from then on. Works while another
    process writes the agent.

    Parameters
    ----------
    agent
        The agent's NAME.
    new
        The new agent's name.
    json
        Print JSON (schema holdfast.clone/1).
    """
    with session.writing() as store:
        name, revision = store.resolve(agent)
        if revision:
            raise BadOption(
                f"{agent!r} names a revision; a clone has all of them",
                hint=f"{command('clone', name, 'NEW')}, then rollback.",
            )
        store.clone(name, new)
        info = store.agents(new)[0]
        if json:
            session.out.json(
                {
                    "schema": SCHEMA, "agent": new, "of": name, "checkpoints": info.checkpoints,
                    "head": info.head.to_json() if info.head is not None else None,
                }
            )  # fmt: skip
        else:
            session.out.say(
                "Agent ", Text(clean(new), style="bold cyan"), f" begins with the history of {clean(name)}: ",
                f"{count(info.checkpoints, 'checkpoint')}.",
            )  # fmt: skip
    return 0
