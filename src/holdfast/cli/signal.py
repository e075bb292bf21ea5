"""``holdfast signal``: tell a run what it waits for."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.programs import given_json
from holdfast.cli.session import Flag, Given, Json, Name, on_branch
from holdfast.cli.text import clean, count

SCHEMA = "holdfast.signal/1"


def signal(
    agent: Name,
    signal: str,
    value: str = "null",
    /,
    *,
    run: Annotated[str | None, Parameter(metavar="RUN", show_default=False)] = None,
    any_run: Flag = False,
    id: Annotated[str | None, Parameter(metavar="ID", show_default=False)] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Send a signal to a run: `agent.wait_for(SIGNAL)` gets its value, once.

    Works while another process writes the agent, and when none does. The signal ends with its run: no later one gets
    it. Says which signals are waited for, if this one is not among them.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    signal
        The signal's name.
    value
        What the run gets, as JSON. [default: null]
    run
        The id of the run that it is for. [default: the run of this branch that has not ended]
    any_run
        Send it to the agent: whichever run asks next takes it, also one that begins later.
    id
        A name for this signal. Sent again with the same one, nothing is sent. [default: a new one]
    json
        Print JSON (schema holdfast.signal/1).
    """
    sent = given_json(value, "the value")
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        info = store.signal(name, signal, sent, run=run, any_run=any_run, branch=branch, id=id)
        put_off = [one for one in store.due() if one.status != "running"]  # a process that waits gets it itself
        due = [one.id for one in put_off if (one.agent, one.branch) == (name, branch)]
        if json:
            session.out.json({"schema": SCHEMA, **info.to_json(), "value": sent, "due": due})
            return 0
        named = Text(clean(info.name), style="bold magenta")
        whom = f"run {clean(info.run)} of {clean(agent)}" if info.run else clean(agent)
        if info.repeated:
            session.out.say("Nothing was sent: signal ", named, f" {clean(info.id)} was sent to {whom} before.")
            return 0
        session.out.say("Signal ", named, f" was sent to {whom}.")
        if info.name not in info.waits_for:
            waited = ", ".join(map(clean, info.waits_for)) or "no signal"
            session.out.say(Text(f"Nobody waits for it now. Waited for: {waited}.", style="yellow"))
        if due:
            session.out.say(Text(f"{count(len(due), 'run')} can resume now: holdfast run --due PROGRAM", style="dim"))
    return 0
