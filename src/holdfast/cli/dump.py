"""``holdfast dump``: what a program left when it failed. The verbs that only read; the others are in dump_acting.py.

Dumps are read as inert data: nothing that one names is imported, run or opened.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.text import Text

from holdfast.cli import dump_acting
from holdfast.cli.dump_acting import File, find, folder_of
from holdfast.cli.exits import DIFFERENT
from holdfast.cli.output import Output, ReaderGone
from holdfast.cli.session import Flag, Given, Json
from holdfast.cli.text import ago, clean, count, now, size
from holdfast.errors import BadOption, HoldfastError

if TYPE_CHECKING:
    from holdfast.crash.pages import Line

LIST_SCHEMA = "holdfast.dump.list/1"
SHOW_SCHEMA = "holdfast.dump.show/1"
DIFF_SCHEMA = "holdfast.dump.diff/1"
_SHOWN = 50
_STYLES = {
    "title": "bold red", "head": "bold", "bad": "red", "place": "cyan", "code": "yellow", "note": "dim", "old": "red",
    "new": "green",
}  # fmt: skip
_SUFFIXES = {".json": "json", ".txt": "text", ".html": "html"}

dump = App(name="dump", help="Look into what a program left when it failed; take one; start an agent again from it.")


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
    from holdfast.crash.folder import found

    place = folder if folder is not None else folder_of(session)
    paths = found(place)
    shown = [_entry(path) for path in (paths[:limit] if limit > 0 else paths)]
    more = len(paths) - len(shown)
    if json:
        session.out.json({"schema": LIST_SCHEMA, "folder": str(place), "dumps": shown, "more": more})
        return 0
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
    from holdfast.crash import open_dump
    from holdfast.crash.pages import page
    from holdfast.crash.summary import as_json, collect

    with open_dump(find(session, file)) as opened:
        found = collect(opened)
        if json:
            session.out.json({"schema": SHOW_SCHEMA, **as_json(found)})
        else:
            _print(session.out, page(found))
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
        session.out.json({"schema": DIFF_SCHEMA, **found.as_json()})
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


for _verb in (
    dump_acting.open_, dump_acting.dap, dump_acting.rehydrate, dump_acting.take, dump_acting.native, dump_acting.gdb,
    dump_acting.rm, dump_acting.prune,
):  # fmt: skip
    dump.command(_verb, name=_verb.__name__.rstrip("_"))


def _pour(pieces: Iterable[str]) -> None:
    try:
        for piece in pieces:
            sys.stdout.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None


def _entry(path: Path) -> dict[str, Any]:
    from holdfast.crash import open_dump
    from holdfast.crash.summary import headline, moment

    entry: dict[str, Any] = {"file": path.name, "size_bytes": 0, "trigger": "", "at": "", "what": "", "complete": False}
    try:
        entry["size_bytes"] = path.stat().st_size
        with open_dump(path) as opened:
            told = {"trigger": opened.trigger[:100], "at": moment(opened.at), "what": headline(opened)}
            return {**entry, **told, "complete": bool(opened.index), "problem": ""}
    except HoldfastError as error:
        return {**entry, "problem": error.message}
    except OSError as error:  # it was removed meanwhile, or belongs to somebody else
        return {**entry, "problem": error.strerror or "cannot be read"}


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
