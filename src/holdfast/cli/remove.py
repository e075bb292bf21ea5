"""``holdfast remove``: an agent with its whole history, and the space that it took."""

from __future__ import annotations

import sys

from rich.text import Text

from holdfast.cli.session import Flag, Given, Json, Name
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.remove/1"


def remove(
    agent: Name,
    /,
    *,
    with_copies: Flag = False,
    dry_run: Flag = False,
    yes: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Remove an agent with its whole history. There is no way back.

    What clones of it, or the agent that it is a clone of, still see stays for them; they are named. Refused while
    another process writes the agent. Asks on a terminal, and needs --yes elsewhere.

    Parameters
    ----------
    agent
        The agent's NAME.
    with_copies
        Remove those who see some of its checkpoints, too.
    dry_run
        Show what would go and change nothing.
    yes
        Do not ask.
    json
        Print JSON (schema holdfast.remove/1). Needs --yes or --dry-run.
    """
    if not dry_run and not yes and (json or not sys.stdin.isatty()):
        raise BadOption(
            "remove was not confirmed", hint="There is nobody to ask here: add --yes, or --dry-run to look first."
        )
    with session.writing() as store:
        name, revision = store.resolve(agent)
        if revision:
            raise BadOption(f"{agent!r} names a revision; only whole agents are removed", hint="Give the NAME alone.")
        found = store.remove(name, dry_run=True, with_copies=with_copies)
        if not json:
            session.out.say(
                Text(clean(name), style="bold cyan"), f" has {count(found.checkpoints, 'checkpoint')}",
                f" and {count(found.events, 'event')}.",
            )  # fmt: skip
            if found.kept_for:
                session.out.say(f"Agents that keep some of its checkpoints: {', '.join(map(clean, found.kept_for))}.")
                session.out.say("--with-copies removes them, too.")
            if found.copies:
                session.out.say(f"Agents that go with it: {', '.join(map(clean, found.copies))}.")
        if not dry_run:
            if not yes and not session.out.confirmed("Remove it for good?"):
                session.out.say("Nothing was changed.")
                return 0
            found = store.remove(name, with_copies=with_copies)
        if json:
            session.out.json({"schema": SCHEMA, **found.to_json()})
        elif dry_run:
            session.out.say(Text("Dry run: nothing was changed.", style="bold"))
        else:
            session.out.say(Text("Removed. ", style="bold green"), f"The store is {size(found.freed_bytes)} smaller.")
    return 0
