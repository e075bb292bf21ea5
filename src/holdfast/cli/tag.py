"""``holdfast tag``: movable names for checkpoints."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.branch import where
from holdfast.cli.complete import refs
from holdfast.cli.session import Flag, Given, Json, Name, Session, reader
from holdfast.cli.text import ago, clean, now
from holdfast.errors import BadOption

LIST_SCHEMA = "holdfast.tags/1"
SCHEMA = "holdfast.tag/1"


def tag(
    agent: Name,
    tag: Annotated[str | None, Parameter(completer=refs)] = None,
    /,
    *,
    at: Annotated[str | None, Parameter(completer=refs, metavar="REV", show_default=False)] = None,
    delete: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """List an agent's tags, set one (one that exists moves), or remove one.

    Works while another process writes the agent.

    Parameters
    ----------
    agent
        The agent's NAME, or NAME@REV to tag that checkpoint.
    tag
        The tag's name. Without it the tags are listed.
    at
        What it names: a revision of this agent. [default: the newest checkpoint of main]
    delete
        Remove the tag. The checkpoint stays.
    json
        Print JSON (schema holdfast.tags/1, or holdfast.tag/1 for a change).
    """
    if tag is None:
        if delete or at is not None:
            raise BadOption("--delete and --at need a tag's name", hint="holdfast tag NAME TAG")
        return _list(session, agent, json=json)
    if delete and at is not None:
        raise BadOption("--delete and --at exclude each other", hint="A tag is removed wherever it is.")
    with session.writing() as store:
        name, target = where(store.resolve(agent), at)
        if delete:
            store.untag(name, tag)
            tagged = None
        else:
            store.tag(name, tag, target)
            tagged = reader(store, name).tags()[tag]
        if json:
            checkpoint = tagged.to_json() if tagged else None
            session.out.json({"schema": SCHEMA, "agent": name, "tag": tag, "checkpoint": checkpoint})
        elif tagged is None:
            session.out.say("Tag ", Text(clean(tag), style="bold magenta"), f" of {clean(name)} is gone.")
        else:
            session.out.say(
                "Tag ", Text(clean(tag), style="bold magenta"), f" of {clean(name)} names ",
                Text(tagged.short_id, style="yellow"), f" #{tagged.depth} {clean(tagged.label)}".rstrip(), ".",
            )  # fmt: skip
    return 0


def _list(session: Session, agent: str, *, json: bool) -> int:
    with session.reading() as store:
        name, _ = store.resolve(agent)
        tags = reader(store, name).tags()
        if json:
            entries = [{"name": known, "checkpoint": tagged.to_json()} for known, tagged in tags.items()]
            session.out.json({"schema": LIST_SCHEMA, "agent": name, "tags": entries})
        elif not tags:
            session.out.say(f"{clean(name)} has no tags.")
        else:
            rows = [
                (
                    Text(clean(known), style="bold magenta"),
                    Text(tagged.short_id, style="yellow"),
                    f"#{tagged.depth}",
                    ago(tagged.time, now()),
                    clean(tagged.label),
                )
                for known, tagged in tags.items()
            ]
            session.out.columns(("tag", "checkpoint", "depth", "made", "label"), rows, right=(2,))
    return 0
