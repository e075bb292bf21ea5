"""``holdfast branch``: the lines of an agent's history that have a name."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.complete import refs
from holdfast.cli.session import Given, Json, Name, Session, reader
from holdfast.cli.text import ago, clean, now
from holdfast.errors import BadOption

LIST_SCHEMA = "holdfast.branches/1"
SCHEMA = "holdfast.branch/1"


def branch(
    agent: Name,
    new: str | None = None,
    /,
    *,
    at: Annotated[str | None, Parameter(completer=refs, metavar="REV", show_default=False)] = None,
    json: Json = False,
    session: Given,
) -> int:
    """List an agent's branches, or start a new one.

    Works while another process writes the agent.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@REV to start the branch there.
    new
        The new branch's name. Without it the branches are listed.
    at
        Where it starts: a revision of this agent. [default: the newest checkpoint of main]
    json
        Print JSON (schema holdfast.branches/1, or holdfast.branch/1 for a new one).
    """
    if new is None:
        if at is not None:
            raise BadOption("--at needs the new branch's name", hint="holdfast branch NAME NEW --at REV")
        return _list(session, agent, json=json)
    with session.writing() as store:
        name, start = where(store.resolve(agent), at)
        store.branch(name, new, start)
        head = reader(store, name, new).at()
        if json:
            session.out.json({"schema": SCHEMA, "agent": name, "branch": new, "head": head.to_json()})
        else:
            session.out.say(
                "Branch ", Text(clean(new), style="bold cyan"), f" of {clean(name)} starts at ",
                Text(head.short_id, style="yellow"), f" #{head.depth} {clean(head.label)}".rstrip(), ".",
            )  # fmt: skip
    return 0


def where(resolved: tuple[str, str], at: str | None) -> tuple[str, str | None]:
    """The agent and the revision, which may come with the name or by ``--at``, not both."""
    name, revision = resolved
    if revision and at is not None:
        raise BadOption(f"two revisions: @{revision} and --at {at}", hint="Give one of them.")
    return name, at if at is not None else revision or None


def _list(session: Session, agent: str, *, json: bool) -> int:
    with session.reading() as store:
        name, _ = store.resolve(agent)
        heads = [(known, reader(store, name, known).head) for known in reader(store, name).branches()]
        if json:
            entries = [{"name": known, "head": head.to_json() if head else None} for known, head in heads]
            session.out.json({"schema": LIST_SCHEMA, "agent": name, "branches": entries})
            return 0
        rows = [
            (
                Text(clean(known), style="bold cyan"),
                Text(head.short_id, style="yellow"),
                f"#{head.depth}",
                ago(head.time, now()),
                clean(head.label),
            )
            if head is not None
            else (Text(clean(known), style="bold cyan"), "", "", "", Text("no checkpoint yet", style="dim"))
            for known, head in heads
        ]
        session.out.columns(("branch", "head", "depth", "updated", "label"), rows, right=(2,))
    return 0
