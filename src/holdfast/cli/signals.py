"""``holdfast signals``: what was sent to runs, and taking it back."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.complete import agents
from holdfast.cli.session import Flag, Given, Json, Name, on_branch
from holdfast.cli.text import ago, clean, count, now, shorten
from holdfast.cli.values import as_json, text_of

SCHEMA = "holdfast.signals/1"
DROP_SCHEMA = "holdfast.signals.drop/1"
_VALUE_CHARACTERS = 60
_STYLES = {"pending": "bold magenta", "taken": "green", "dropped": "dim", "ended": "dim"}

signals = App(name="signals", help="List the signals that were sent, or drop one that nobody has taken.")


@signals.default
def list_(
    agent: Annotated[str | None, Parameter(completer=agents, metavar="NAME", show_default=False)] = None,
    /,
    *,
    all: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """List the signals that nobody has taken yet, the oldest first.

    Parameters
    ----------
    agent
        Only those to this agent, NAME or NAME@BRANCH. [default: all agents and branches]
    all
        List also those that were taken, were dropped, or ended with their run.
    json
        Print JSON (schema holdfast.signals/1).
    """
    with session.reading() as store:
        name, branch = on_branch(store, agent) if agent is not None else (None, None)
        found = store.signals(name, branch=branch)
        shown = [one for one in found if all or one.status == "pending"]
        if json:
            listed = [{**one.to_json(), "value": as_json(one.value)} for one in shown]
            session.out.json({"schema": SCHEMA, "signals": listed})
            return 0
        if not shown:
            session.out.say("No signals." if all else "No signal waits to be taken.")
            return 0
        rows: list[list[Text | str]] = [
            [
                Text(clean(one.agent if one.branch == "main" else f"{one.agent}@{one.branch}"), style="bold cyan"),
                Text(clean(shorten(one.run, 16)) or "(any run)", style="yellow"),
                Text(clean(one.name), style="bold magenta"),
                clean(one.id),
                Text(one.status, style=_STYLES.get(one.status, "")),
                ago(one.sent, now()),
                clean(one.by),
                text_of(one.value, _VALUE_CHARACTERS),
            ]
            for one in shown
        ]
        session.out.columns(("agent", "run", "signal", "id", "status", "sent", "by", "value"), rows)
    return 0


@signals.command
def drop(agent: Name, /, *ids: str, json: Json = False, session: Given) -> int:
    """Drop signals that nobody has taken: no run will get them.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    ids
        The ids of the signals, as `holdfast signals` shows them.
    json
        Print JSON (schema holdfast.signals.drop/1).
    """
    with session.writing() as store:
        name, branch = on_branch(store, agent)
        dropped = [store.drop_signal(name, id, branch=branch) for id in ids]
        if json:
            session.out.json({"schema": DROP_SCHEMA, "dropped": [one.to_json() for one in dropped]})
        else:
            session.out.say(f"{count(len(dropped), 'signal was', 'signals were')} dropped.")
    return 0
