"""The verbs of ``holdfast dump`` that do something: a debugger, a server for editors, a new dump, a new start.

Each calls one function of the room that does it, and says what came of it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.complete import dumps
from holdfast.cli.exits import RAISED
from holdfast.cli.output import Output, ReaderGone
from holdfast.cli.session import Given, Json, Session
from holdfast.cli.text import clean, size
from holdfast.errors import BadOption, command

REHYDRATE_SCHEMA = "holdfast.dump.rehydrate/1"
TAKE_SCHEMA = "holdfast.dump.take/1"
NATIVE_SCHEMA = "holdfast.dump.native/1"

File = Annotated[str, Parameter(completer=dumps)]


def folder_of(session: Session) -> Path:
    """Where this command looks for dumps."""
    from holdfast.crash import folder

    return folder.of(session.place)


def find(session: Session, file: str | None) -> Path:
    """The dump that is meant."""
    from holdfast.crash import folder

    return folder.find(file, folder_of(session))


def open_(file: File | None = None, /, *, session: Given) -> int:
    """Explore a dump as in a debugger: threads, tasks, frames, values, source, search. `help` lists its commands.

    Parameters
    ----------
    file
        The dump. [default: the newest]
    """
    from holdfast.crash import open_dump
    from holdfast.crash.debugger import explore

    with open_dump(find(session, file)) as opened:
        try:
            explore(opened)
        except BrokenPipeError:
            raise ReaderGone from None
    return 0


def dap(
    file: File | None = None,
    /,
    *,
    port: Annotated[int | None, Parameter(metavar="PORT", show_default=False)] = None,
    session: Given,
) -> int:
    """Serve a dump to an editor in the Debug Adapter Protocol.

    Parameters
    ----------
    file
        The dump. Without it the editor names one when it launches.
    port
        Listen there, on this machine only; 0 chooses one. [default: standard input and output]
    """
    from holdfast.crash.dap import serve

    serve(find(session, file) if file is not None else None, port=port)
    return 0


def rehydrate(
    file: File,
    /,
    *,
    agent: Annotated[str | None, Parameter(metavar="NAME", show_default=False)] = None,
    branch: Annotated[str | None, Parameter(metavar="NAME", show_default=False)] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Start an agent again where a dump says that it stood: on a new branch, linked with the dump.

    The branch begins at the agent's last checkpoint before the failure. What the agent did outside is known there.

    Parameters
    ----------
    file
        The dump.
    agent
        The agent, NAME or NAME@BRANCH, when the dump tells of several.
    branch
        The new branch's name. [default: crash- and the time of the dump]
    json
        Print JSON (schema holdfast.dump.rehydrate/1).
    """
    from holdfast.crash import open_dump
    from holdfast.crash import rehydrate as rehydrating

    with open_dump(find(session, file)) as opened, session.writing() as store:
        made = rehydrating(opened, store, agent, branch=branch)
        head = made.checkpoint
        if json:
            data = {"agent": made.agent, "branch": made.branch, "dump": made.dump, "unsaved": made.unsaved}
            session.out.json({"schema": REHYDRATE_SCHEMA, **data, "head": head.to_json()})
            return 0
        session.out.say(
            "Branch ", Text(clean(made.branch), style="bold cyan"), f" of {clean(made.agent)} starts at ",
            Text(head.short_id, style="yellow"), f" #{head.depth} {clean(head.label)}".rstrip(), ".",
        )  # fmt: skip
        if made.unsaved:
            note = "The state had changes that no checkpoint has; they are in the dump: holdfast dump open."
            session.out.say(Text(note, style="dim"), wrap=True)
        resume = command("run", "PROGRAM:FUNCTION", "--agent", f"{made.agent}@{made.branch}")
        session.out.say(f"To resume there: {clean(resume)}")
    return 0


def take(
    pid: int,
    /,
    *,
    to: Annotated[Path | None, Parameter(metavar="FOLDER", show_default=False)] = None,
    json: Json = False,
    session: Given,
) -> int:
    """Take a dump of a running process from outside, without its cooperation.

    Ends with 1 when the dump has no Python stacks: it is no Python process, or PyStack is not there.

    Parameters
    ----------
    pid
        The process.
    to
        Where the dump goes. [default: as for `dump list`]
    json
        Print JSON (schema holdfast.dump.take/1).
    """
    from holdfast.crash import kinds, open_dump
    from holdfast.crash.outside import take as taking

    path = taking(pid, to=to if to is not None else folder_of(session))
    with open_dump(path) as opened:
        told = next((part.reason for part in opened.parts if part.kind == kinds.STACK), "")
        problem = "" if opened.threads else told or "there are no threads"
    if json:
        data = {"pid": pid, "file": str(path), "size_bytes": path.stat().st_size, "problem": problem}
        session.out.json({"schema": TAKE_SCHEMA, **data})
    else:
        session.out.say(f"Taken: {clean(str(path))} ({size(path.stat().st_size)}).")
        if problem:
            session.out.say(Text(clean(f"It has no Python stacks. {problem}"), style="red"), wrap=True)
    return RAISED if problem else 0


def native(file: File | None = None, /, *, json: Json = False, session: Given) -> int:
    """Show native stacks and registers, from the core that was kept with the dump.

    Parameters
    ----------
    file
        The dump. [default: the newest]
    json
        Print JSON (schema holdfast.dump.native/1).
    """
    from holdfast.crash.cores import native as reading

    found = reading(find(session, file))
    if json:
        session.out.json({"schema": NATIVE_SCHEMA, **found})
    else:
        _print_native(session.out, found)
    return 0


def gdb(file: File | None = None, /, *, session: Given) -> int:
    """Start gdb on the core that was kept with the dump.

    Parameters
    ----------
    file
        The dump. [default: the newest]
    """
    from holdfast.crash.cores import gdb_command

    path = find(session, file)
    if shutil.which("gdb") is None:
        raise BadOption("gdb is not installed here", hint="`holdfast dump native` reads the core without it.")
    with tempfile.TemporaryDirectory(prefix="holdfast-core-") as folder:
        started = subprocess.Popen(gdb_command(path, core_to=Path(folder) / "core"))  # noqa: S603 (gdb, and our files)
        while True:
            try:
                return started.wait()
            except KeyboardInterrupt:  # it is meant for gdb, which has the terminal
                continue


def _print_native(out: Output, found: dict[str, Any]) -> None:
    from holdfast.crash import telling

    shown = {
        name: {key: value for key, value in data.items() if key != "files"} if isinstance(data, dict) else data
        for name, data in found.items()
    }  # mapped files, which would stand between the reader and the stacks, are in the JSON
    for pieces in telling.native_parts(shown):
        out.say(*(clean(piece) if isinstance(piece, str) else Text(clean(piece[1]), style="bold") for piece in pieces))
