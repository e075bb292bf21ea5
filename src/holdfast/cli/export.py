"""``holdfast export``: agents with their whole histories in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.cli.progress import bars
from holdfast.cli.session import Flag, Given, Json
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.export/1"


def export(
    *names: Annotated[str, Parameter(metavar="AGENT... FILE", allow_leading_hyphen=False)],
    force: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Write agents to FILE, with branches, tags, effects and everything else; `holdfast import FILE` takes them in.

    The file appears whole or not at all. It is checked when it is read, and it is not encrypted, even if the store is.

    Parameters
    ----------
    names
        The agents, and last the file.
    force
        Replace FILE if it exists.
    json
        Print JSON (schema holdfast.export/1).
    """
    if len(names) < 2:
        raise BadOption("name at least one agent and the file", hint="holdfast export trip-7 trip-7.hfb")
    *agents, file = names
    with session.reading() as store, bars(session.err) as progress:
        written = store.export(Path(file), agents, replace=force, progress=progress)
        place = str(store.path)
    if json:
        session.out.json({"schema": SCHEMA, "store": place, "file": file, "agents": agents, "bytes": written})
    else:
        session.out.say(f"Wrote {count(len(agents), 'agent')} to {clean(file)} ({size(written)}).")
    return 0
