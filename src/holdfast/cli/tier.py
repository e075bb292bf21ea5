"""``holdfast tier``: old bulk data moves to a colder place, and back."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.progress import bars
from holdfast.cli.session import Flag, Given, Json
from holdfast.cli.spans import span
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.tier/1"


def tier(
    *,
    to: Annotated[str, Parameter(metavar="PLACE", show_default=False)] = "",
    older_than: Annotated[str, Parameter(metavar="SPAN", show_default=False)] = "",
    back: Flag = False,
    do: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Move packs of bulk data that no branch needs now to a colder place. With --do; without, show what would move.

    They are read from there when they are needed. The place must stay where it is.

    Parameters
    ----------
    to
        A directory, on another disk for instance, or a URL such as s3://bucket/packs (needs the extra objects).
    older_than
        Only packs that were written longer ago: 45s, 90m, 12h, 30d, 2w. [default: all]
    back
        Bring everything back instead.
    do
        Do it. Without this, nothing is changed.
    json
        Print JSON (schema holdfast.tier/1).
    """
    if bool(to) == back:
        raise BadOption("say where to", hint="Use --to PLACE, or --back to bring everything back.")
    with session.writing() if do else session.reading() as store, bars(session.err) as progress:
        age = span(older_than) if older_than else timedelta(0)
        found = store.tier(to or None, older_than=age, dry_run=not do, progress=progress)
    if json:
        session.out.json({"schema": SCHEMA, **found.to_json()})
        return 0
    packs = f"{count(found.packs, 'pack')} ({size(found.moved_bytes)})"
    where = f"from {clean(found.place) or 'nowhere'}" if back else f"to {clean(found.place)}"
    if found.done:
        session.out.say(Text(f"Moved {packs} ", style="bold green"), f"{where}.")
    else:
        session.out.say(Text("Dry run: nothing was changed. ", style="bold"), f"{packs} would move {where}.")
    for number, why in ((found.needed, "needed where a branch stands"), (found.young, "too young")):
        if number:
            session.out.say(f"{count(number, 'pack')} {'stays' if number == 1 else 'stay'} here: {why}.")
    return 0
