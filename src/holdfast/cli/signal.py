"""``holdfast signal``: tell an agent what it waits for."""

from __future__ import annotations

from rich.text import Text

from holdfast.cli.programs import given_json
from holdfast.cli.session import Given, Json, Name, on_branch
from holdfast.cli.text import clean, count

SCHEMA = "holdfast.signal/1"


def signal(agent: Name, signal: str, value: str = "null", /, *, json: Json = False, session: Given) -> int:
    """Send a signal to an agent: `agent.wait_for(SIGNAL)` gets its value.

    Works while another process writes the agent, and when none does: the signal is kept until it is received, once by
    each branch.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH to send it to that branch only.
    signal
        The signal's name.
    value
        What the agent gets, as JSON. [default: null]
    json
        Print JSON (schema holdfast.signal/1).
    """
    sent = given_json(value, "the value")
    with session.writing() as store:
        name, revision = store.resolve(agent)
        branch = on_branch(store, agent)[1] if revision else None
        store.signal(name, signal, sent, branch=branch)
        put_off = [info for info in store.due() if info.condition != "running"]  # a process that waits gets it itself
        due = [info for info in put_off if info.agent == name and branch in {None, info.branch}]
        if json:
            session.out.json(
                {
                    "schema": SCHEMA, "agent": name, "branch": branch, "signal": signal, "value": sent,
                    "due": [info.id for info in due],
                }
            )  # fmt: skip
            return 0
        session.out.say("Signal ", Text(clean(signal), style="bold magenta"), f" was sent to {clean(agent)}.")
        if due:
            session.out.say(Text(f"{count(len(due), 'run')} can go on now: holdfast run --due PROGRAM", style="dim"))
    return 0
