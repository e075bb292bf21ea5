"""The verbs of ``holdfast dump`` that do something: a debugger, a server for editors, a new dump, a new start.

Each calls one function of the room that does it, and says what came of it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from holdfast.cli.complete import dumps
from holdfast.cli.exits import RAISED
from holdfast.cli.output import Output, ReaderGone
from holdfast.cli.session import ASKS, Consent, Given, Json, Session
from holdfast.cli.text import clean, count
from holdfast.cli.text import size as size_text
from holdfast.errors import BadOption, HoldfastError, NotAStore, command

REHYDRATE_SCHEMA = "holdfast.dump.rehydrate/1"
TAKE_SCHEMA = "holdfast.dump.take/1"
RM_SCHEMA = "holdfast.dump.rm/1"
PRUNE_SCHEMA = "holdfast.dump.prune/1"
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


def dap(file: File | None = None, /, *, session: Given) -> int:
    """Serve a dump to an editor in the Debug Adapter Protocol, on standard input and output.

    Parameters
    ----------
    file
        The dump. Without it the editor names one when it launches.
    """
    from holdfast.crash.dap import serve

    serve(find(session, file) if file is not None else None)
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


def rm(
    files: Annotated[tuple[str, ...], Parameter(completer=dumps, negative="")],
    /,
    *,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Remove dumps, each with the core that was kept beside it.

    Parameters
    ----------
    files
        The dumps: paths, or pieces of their names.
    """
    return _remove(session, RM_SCHEMA, [find(session, file) for file in files], consent)


def prune(
    *,
    keep: Annotated[int | None, Parameter(metavar="N", show_default=False)] = None,
    size: Annotated[int | None, Parameter(metavar="MIB", show_default=False)] = None,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Remove dumps that are too many: of what happens most often the oldest.

    One that a tag, a branch or a run that needs attention refers to stays.

    Parameters
    ----------
    keep
        How many may stay. [default: 200]
    size
        How many MiB they may take, with their cores. [default: 2048]
    """
    from holdfast.crash import Limits, agents

    most = Limits().kept_dumps if keep is None else keep
    most_bytes = Limits().kept_bytes if size is None else size << 20
    try:
        with _store_of(session) as stores:
            paths = agents.removable(folder_of(session), stores, most, most_bytes)
    except HoldfastError as error:
        told = f"the store cannot be asked, so nobody knows which dumps it needs: {error.message}"
        raise BadOption(told, hint=error.hint) from error
    return _remove(session, PRUNE_SCHEMA, paths, consent)


@contextmanager
def _store_of(session: Session) -> Iterator[list[str]]:
    """The place of the store that knows which dumps it needs, open; nothing where none is named, and none is here."""
    with ExitStack() as opened:
        try:
            stores = [opened.enter_context(session.reading()).place]
        except NotAStore:
            if session.place is not None or os.environ.get("HOLDFAST_STORE"):
                raise
            stores = []
        yield stores


def _remove(session: Session, schema: str, paths: list[Path], consent: Consent) -> int:
    from holdfast.crash import folder

    total = sum(map(folder.size_of, paths))
    if not consent.json:
        for path in paths:
            session.out.say(clean(path.name))
        what = f"{count(len(paths), 'dump')} ({size_text(total)}) would go."
        session.out.say(what if paths else "There is nothing to remove.")
    done = bool(paths) and consent.given(session, "Remove for good?")
    if done:
        for path in paths:
            folder.remove(path)
    if consent.json:
        session.out.json({"schema": schema, "dumps": [path.name for path in paths], "size_bytes": total, "done": done})
    elif done:
        session.out.say("Removed.")
    return consent.code(done=done or not paths)


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

    if importlib.util.find_spec("pystack") is None:
        note = "Python stacks need PyStack (pip install 'holdfast[native]'): without it, the dump has everything else."
        sys.stderr.write(f"holdfast: {note}\n")
    path = taking(pid, to=to if to is not None else folder_of(session))
    with open_dump(path) as opened:
        told = next((part.reason for part in opened.parts if part.kind == kinds.STACK), "")
        problem = "" if opened.threads else told or "there are no threads"
    if json:
        data = {"pid": pid, "file": str(path), "size_bytes": path.stat().st_size, "problem": problem}
        session.out.json({"schema": TAKE_SCHEMA, **data})
    else:
        session.out.say(f"Taken: {clean(str(path))} ({size_text(path.stat().st_size)}).")
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
    from holdfast.crash.cores import native_stacks

    found = native_stacks(find(session, file))
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
    from holdfast.crash import display

    shown = {
        name: {key: value for key, value in data.items() if key != "files"} if isinstance(data, dict) else data
        for name, data in found.items()
    }  # mapped files, which would stand between the reader and the stacks, are in the JSON
    for pieces in display.native_parts(shown):
        out.say(*(clean(piece) if isinstance(piece, str) else Text(clean(piece[1]), style="bold") for piece in pieces))
