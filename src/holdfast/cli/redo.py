"""``holdfast redo``: do again what the last undo reversed."""

from __future__ import annotations

from holdfast import Agent
from holdfast.cli.session import Given, Json, Name, Wait
from holdfast.cli.undo import step

SCHEMA = "holdfast.redo/1"


def redo(agent: Name, /, *, wait: Wait = 0.0, json: Json = False, session: Given) -> int:
    """Do again what the last undo reversed.

    This appends a new checkpoint. It works until something else was saved after the undo.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@BRANCH. [default branch: main]
    wait
        Wait up to this many seconds for a process that writes the branch.
    json
        Print JSON (schema holdfast.redo/1).
    """
    return step(session, agent, Agent.redo, SCHEMA, wait_s=wait, json=json)
