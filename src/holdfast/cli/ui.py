"""``holdfast ui``: the page that shows a store in a browser.

Owns the options. What is shown, and to whom, is the room ``web``.
"""

from __future__ import annotations

import getpass
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from holdfast.cli.programs import Load, load
from holdfast.cli.session import Flag, Given, Json, Session, option
from holdfast.cli.text import clean, size
from holdfast.errors import BadOption

if TYPE_CHECKING:
    from holdfast.web.server import Started

_NEEDED = ("jinja2", "starlette", "uvicorn")


def ui(
    *,
    host: Annotated[str | None, option(metavar="ADDRESS")] = None,
    port: Annotated[int | None, option(metavar="N")] = None,
    allow_changes: Flag = False,
    programs: Load = (),
    no_browser: Flag = False,
    socket: Annotated[str | None, option(metavar="PATH")] = None,
    url: Annotated[str | None, option(metavar="URL")] = None,
    secret_file: Annotated[str | None, option(metavar="FILE")] = None,
    export: Annotated[Path | None, option(metavar="FILE")] = None,
    agent: Annotated[str | None, option(metavar="NAME")] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Show the store in a browser. Ctrl-C ends it.

    It only reads, unless --allow-changes is given. Needs `pip install 'holdfast[web]'`. The browser is led in by a file
    that only you can read.

    Parameters
    ----------
    host
        Where to listen. [default: 127.0.0.1, which only this machine reaches]
    port
        The port; 0 takes any. [default: 4653, or one behind it]
    allow_changes
        Let people change things on the page: go back, decide, send, cancel. What they do is recorded with their names.
    programs
        Load this module or file first: its tools undo effects, and its functions are resumed.
    no_browser
        Open no browser, and print the address that lets one in.
    socket
        Listen on a Unix socket instead, for a proxy that says who somebody is (X-Forwarded-User).
    url
        What browsers call the page, as https://holdfast.example, where that is not what it listens on.
    secret_file
        Answer only what brings this secret along (X-Holdfast-Secret), from a proxy that says who somebody is.
    export
        Serve nothing: write one agent's history as a page into this file. What looks secret is taken out of it.
    agent
        Whose history. [default: the only agent of the store]
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise BadOption(f"the page needs {', '.join(missing)}", hint="pip install 'holdfast[web]'")
    if export is not None:
        return _export(session, export, agent, json=json)
    if agent is not None:
        raise BadOption("--agent is for --export", hint="On the page, choose it from the list.")
    from holdfast.web.place import Place
    from holdfast.web.server import LOOPBACK, Listening, open_browser, serve

    load(programs)
    place = Place(session.place, changes=allow_changes, loaded=bool(programs))
    place.store()  # what is wrong with it is said here, before anything listens

    def begun(started: Started) -> None:
        opened = not no_browser and not json and started.file is not None and open_browser(started.file)
        if json:
            file = str(started.file) if started.file is not None else None
            session.json("ui", store=place.shown, url=started.url, file=file, changes=allow_changes)
        else:
            _say(session, place.shown, started, opened=opened, changes=allow_changes)

    listening = Listening(host or LOOPBACK, port, socket or "", url or "", secret_file or "")
    try:
        serve(place, listening, _who(), begun)
    except KeyboardInterrupt:
        return 0  # that is how it ends
    return 0


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return f"uid {os.getuid()}"


def _export(session: Session, file: Path, agent: str | None, *, json: bool) -> int:
    from holdfast.web.export import export

    with session.reading() as store:
        names = [one.name for one in store.agents(limit=2)] if agent is None else [store.resolve(agent)[0]]
        if len(names) != 1:
            raise BadOption("whose history is to be exported?", hint="Name the agent: --agent NAME.")
        written = export(store, names[0], file)
    if json:
        return session.json("ui.export", agent=names[0], file=str(file), size_bytes=written)
    session.out.say(f"Written: {clean(str(file))} ({size(written)}), the history of {clean(names[0])}.")
    return 0


def _say(session: Session, place: str, started: Started, *, opened: bool, changes: bool) -> None:
    out = session.out
    how = "and lets you change it" if changes else "and only reads it"
    out.say(Text("Holdfast", style="bold"), f" shows {clean(place)} at {started.url}, {how}. Ctrl-C ends it.")
    if started.file is None:
        return
    if opened:
        out.note(f"It should be in your browser now. Another browser comes in by {started.file}.")
    else:
        out.command("Open this once:  ", started.enter)
        out.note(f"The next browser comes in by {started.file}.")
