"""``holdfast dump``: what a program left when it failed; taking a dump, removing some, a new start from one.

Dumps are read as inert data: nothing that one names is imported, run or opened. Each verb calls one function of the
room that does it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli.complete import dumps
from holdfast.cli.exits import DIFFERENT, RAISED
from holdfast.cli.output import Output, ReaderGone
from holdfast.cli.session import ASKS, Consent, Flag, Given, Json, Session
from holdfast.cli.text import ago, clean, count, now, size
from holdfast.errors import BadOption, HoldfastError, NotAStore, command

if TYPE_CHECKING:
    from holdfast.crash.pages import Line


File = Annotated[str, Parameter(completer=dumps)]


_SHOWN = 50
_STYLES = {
    "title": "bold red", "head": "bold", "bad": "red", "place": "cyan", "code": "yellow", "note": "dim", "old": "red",
    "new": "green",
}  # fmt: skip
_SUFFIXES = {".json": "json", ".txt": "text", ".html": "html"}

dump = App(name="dump", help="Look into what a program left when it failed, or take such a dump.")


@dump.default
@dump.command(name="list")
def list_(
    folder: Path | None = None,
    /,
    *,
    limit: Annotated[int, Parameter(name=("--limit", "-n"), metavar="N")] = _SHOWN,
    json: Json = False,
    session: Given,
) -> int:
    """List the dumps of a store or folder, the newest first.

    Parameters
    ----------
    folder
        Where to look. [default: `dumps` in the store; without one $HOLDFAST_DUMPS, or `dumps` here]
    limit
        Show at most this many; 0 shows all.
    json
        Print JSON (schema holdfast.dump.list/1).
    """
    from holdfast.crash import entry
    from holdfast.crash.folder import found

    place = folder if folder is not None else folder_of(session)
    paths = found(place)
    shown = [entry(path) for path in (paths[:limit] if limit > 0 else paths)]
    more = len(paths) - len(shown)
    if json:
        return session.json("dump.list", folder=str(place), dumps=shown, more=more)
    if not shown:
        session.out.say(f"No dumps in {clean(str(place))}.")
        return 0
    session.out.columns(("dump", "taken", "size", "trigger", "what"), [_row(one) for one in shown], right=(2,))
    rest = f" {count(more, 'older dump')} not shown; -n 0 shows all." if more else ""
    session.out.say(Text(f"In {clean(str(place))}.{rest}", style="dim"))
    return 0


@dump.command
def show(file: File | None = None, /, *, json: Json = False, session: Given) -> int:
    """Show the page to read first: what failed, where, the values there, and what is unusual.

    Parameters
    ----------
    file
        The dump: a path, or a piece of its name in the folder of dumps. [default: the newest]
    json
        Print JSON (schema holdfast.dump.show/1).
    """
    from holdfast.crash import dump_json, open_dump
    from holdfast.crash.pages import page
    from holdfast.crash.summary import collect

    with open_dump(find(session, file)) as opened:
        if json:
            session.json("dump.show", **dump_json(opened))
        else:
            _print(session.out, page(collect(opened)))
    return 0


@dump.command
def diff(old: File, new: File | None = None, /, *, exit_code: Flag = False, json: Json = False, session: Given) -> int:
    """Compare two dumps: the failure, where the stacks part, values, types that grew, packages, environment.

    Parameters
    ----------
    old
        The earlier dump.
    new
        The later one. [default: the newest]
    exit_code
        End with 1 when they differ in more than time, sizes and numbers.
    json
        Print JSON (schema holdfast.dump.diff/1).
    """
    from holdfast.crash import open_dump
    from holdfast.crash.pages import compare

    with open_dump(find(session, old)) as before, open_dump(find(session, new)) as after:
        found = compare(before, after)
    if json:
        session.json("dump.diff", **found.as_json())
    else:
        _print(session.out, found.lines())
    return DIFFERENT if exit_code and found.differs() else 0


@dump.command
def export(
    file: File | None = None,
    /,
    *,
    format: Annotated[Literal["json", "text", "html"] | None, Parameter(show_default=False)] = None,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE", show_default=False)] = None,
    session: Given,
) -> int:
    """Write a dump as JSON (all of it), as text, or as one page of HTML (what fits lines).

    Parameters
    ----------
    file
        The dump. [default: the newest]
    format
        How. [default: by the ending of the output: .json, .txt, .html; otherwise json]
    output
        Where to: a new file that only you can read. [default: to standard output]
    """
    from holdfast.crash import open_dump
    from holdfast.crash.pages import FORMATS

    chosen = format or _SUFFIXES.get(output.suffix if output is not None else "", "json")
    with open_dump(find(session, file)) as opened:
        pieces = FORMATS[chosen](opened)
        if output is None:
            _pour(pieces)
            return 0
        try:
            handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise BadOption(f"{output} exists already", hint="Name a file that does not.") from None
        with os.fdopen(handle, "w", encoding="utf-8") as written:
            written.writelines(pieces)
    session.out.say(f"Written: {clean(str(output))} ({size(output.stat().st_size)}).")
    return 0


@dump.command(name="open")
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


@dump.command
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


@dump.command
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
            return session.json("dump.rehydrate", **data, head=head.to_json())
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


@dump.command
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
    return _remove(session, "holdfast.dump.rm/1", [find(session, file) for file in files], consent)


@dump.command
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
    return _remove(session, "holdfast.dump.prune/1", paths, consent)


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
        what = f"{count(len(paths), 'dump')} ({size(total)}) would go."
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


@dump.command
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
        session.json("dump.take", **data)
    else:
        session.out.say(f"Taken: {clean(str(path))} ({size(path.stat().st_size)}).")
        if problem:
            session.out.say(Text(clean(f"It has no Python stacks. {problem}"), style="red"), wrap=True)
    return RAISED if problem else 0


@dump.command
def native(file: File | None = None, /, *, gdb: Flag = False, json: Json = False, session: Given) -> int:
    """Show native stacks and registers, from the core that was kept with the dump; or start gdb on it.

    Parameters
    ----------
    file
        The dump. [default: the newest]
    gdb
        Start gdb on the core instead.
    json
        Print JSON (schema holdfast.dump.native/1).
    """
    from holdfast.crash.cores import native_stacks

    if gdb:
        return _debug(find(session, file))
    found = native_stacks(find(session, file))
    if json:
        session.json("dump.native", **found)
    else:
        _print_native(session.out, found)
    return 0


# What verbs share.


def folder_of(session: Session) -> Path:
    """Where this command looks for dumps."""
    from holdfast.crash import folder

    return folder.of(session.place)


def find(session: Session, file: str | None) -> Path:
    """The dump that is meant."""
    from holdfast.crash import folder

    return folder.find(file, folder_of(session))


def _pour(pieces: Iterable[str]) -> None:
    try:
        for piece in pieces:
            sys.stdout.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def _row(entry: dict[str, Any]) -> list[Text | str]:
    at = ago(datetime.fromisoformat(entry["at"]), now()) if entry["at"] else ""
    about = Text(clean(entry["problem"] or entry["what"]), style="red" if entry["problem"] else "")
    if not entry["complete"] and not entry["problem"]:
        about.append("  (cut)", style="dim")
    return [clean(entry["file"]), at, size(entry["size_bytes"]), clean(entry["trigger"]), about]


def _print(out: Output, lines: Iterable[Line]) -> None:
    for line in lines:
        if line.style == "head":
            out.say("")
        wraps = line.style in {"title", "bad", "note"}
        out.say(Text(clean(line.text), style=_STYLES.get(line.style, "")), wrap=wraps)


def _debug(path: Path) -> int:
    from holdfast.crash.cores import gdb_command

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
