"""``holdfast import``: bring histories over from elsewhere, verified, without touching where they come from."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.text import Text

import holdfast
from holdfast.cli.asking import OneKeyFile, key_in
from holdfast.cli.exits import exit_code
from holdfast.cli.output import Output
from holdfast.cli.programs import module_of
from holdfast.cli.progress import bars
from holdfast.cli.push import Beside, Called, tell
from holdfast.cli.session import Flag, Given, Json
from holdfast.cli.text import clean, count
from holdfast.errors import BadOption, NotABundle, SourceUnreadable

if TYPE_CHECKING:
    from holdfast.contrib.langgraph import ImportedThread, ImportReport

SCHEMA = "holdfast.import/1"
# Threads that a dry run lists, and failures that are told; the JSON has all.
_LISTED = 20
_TITLES = {"imported": "imported", "complete": "already there", "failed": "failed", "found": "found"}

import_ = App(name="import", help="Bring histories over from elsewhere; what they come from stays untouched.")


@import_.default
def bundle(
    file: Path,
    /,
    *agents: str,
    beside: Beside = False,
    called: Called = None,
    source_key_file: OneKeyFile = None,
    dest_key_file: OneKeyFile = None,
    json: Json = False,
    session: Given,
) -> int:
    """Take in agents from FILE, which `holdfast export` wrote.

    All of the file is read and proven before anything of it can be seen. What is there already stays, and what the
    file has more is added. If there is no store, it is made with all of it, or not at all. For LangGraph threads see
    `holdfast import langgraph`; a file of that name is ./langgraph.

    Parameters
    ----------
    file
        The file.
    agents
        Only these agents. [default: all in the file]
    beside
        Where a branch has gone on here and in the file, let it arrive under a name of its own instead of refusing.
    called
        What one agent is to be called here.
    source_key_file
        The key of FILE, when it is not that of $HOLDFAST_KEY and the like.
    dest_key_file
        The key of the store, likewise; "none" when it has none.
    json
        Print JSON (schema holdfast.import-bundle/1).
    """
    if not file.is_file():
        what = f"{file} is a directory" if file.is_dir() else f"there is no file {file}"
        raise NotABundle(what, hint="Name a file that `holdfast export` wrote.")
    with bars(session.err) as progress:
        report = holdfast.import_bundle(
            file,
            session.place,
            agents,
            key=key_in(dest_key_file),
            file_key=key_in(source_key_file),
            beside=beside,
            new_name=called,
            progress=progress,
        )
    tell(session, report, json=json, schema="holdfast.import-bundle/1")
    return 0


@import_.command
def langgraph(
    source: str,
    /,
    *,
    thread: Annotated[tuple[str, ...], Parameter(metavar="ID", negative="", show_default=False)] = (),
    types: Annotated[tuple[str, ...], Parameter(metavar="MODULE", negative="", show_default=False)] = (),
    dry_run: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Bring LangGraph threads over, with their whole histories, and verify them.

    The source is only read. Run it again after an interruption: it resumes where it stopped. The store is made if there
    is none.

    Parameters
    ----------
    source
        sqlite:///old.db or postgresql://user@host/database, as LangGraph's own savers wrote it.
    thread
        Import only these threads. [default: all]
    types
        Modules or file.py whose classes the threads hold. LangChain's and LangGraph's own are known.
    dry_run
        Only count what is there, and say which threads cannot come over because of their ids.
    json
        Print JSON (schema holdfast.import/1).
    """
    try:
        from holdfast.contrib.langgraph import HoldfastSaver, check_source, import_threads
    except ImportError as error:
        if str(error.name).partition(".")[0] == "holdfast":
            raise
        raise SourceUnreadable(
            f"importing LangGraph threads needs a package that is not installed: {error.name}",
            hint="Install it: pip install 'holdfast[langgraph]'",
        ) from error
    modules = [_import_module(name) for name in types]
    check_source(source, thread)  # before a store is made
    logging.getLogger("langgraph").addHandler(logging.NullHandler())  # what it would warn of is an error here
    with bars(session.err) as progress:
        if dry_run:
            report = import_threads(source, None, threads=thread, dry_run=True, progress=progress)
        else:
            with session.filling() as store, HoldfastSaver(store, types=modules) as saver:
                report = import_threads(source, saver, threads=thread, progress=progress)
    if json:
        session.out.json({"schema": SCHEMA, "dry_run": dry_run, **report.to_json()})
    elif dry_run:
        _print_found(session.out, report)
    else:
        _print(session.out, report)
    return max((exit_code(failed.error) for failed in report.failed if failed.error is not None), default=0)


def _import_module(name: str) -> ModuleType:
    try:
        return module_of(name)
    except ImportError as error:
        raise BadOption(f"--types {name}: {error}") from error


def _print(out: Output, report: ImportReport) -> None:
    if not report.threads:
        out.say(f"No threads in {clean(report.source)}.")
        return
    rows: list[list[Text | str]] = []
    for status, title in _TITLES.items():
        threads = [thread for thread in report.threads if thread.status == status]
        if threads:
            style = "bold red" if status == "failed" else "bold green" if status == "imported" else ""
            rows.append([Text(title, style=style), *_sums(threads)])
    out.columns(("", "threads", "checkpoints", "writes"), rows, right=(1, 2, 3))
    _print_failed(out, report)
    if report.ok:
        out.say(Text("Every thread was read back and is equal to the source, which was only read.", style="bold green"))


def _print_failed(out: Output, report: ImportReport) -> None:
    for failed in report.failed[:_LISTED]:
        message = failed.error.message if failed.error is not None else ""
        out.say(Text(f"{clean(failed.thread)}: ", style="red"), clean(message), wrap=True)
        if failed.error is not None and failed.error.hint:
            out.say("  ", clean(failed.error.hint), wrap=True)
    if len(report.failed) > _LISTED:
        out.say(f"and {count(len(report.failed) - _LISTED, 'more failed thread')}; --json has all.")


def _sums(threads: list[ImportedThread]) -> list[str]:
    sums = (len(threads), sum(thread.checkpoints for thread in threads), sum(thread.writes for thread in threads))
    return [f"{number:,}" for number in sums]


def _print_found(out: Output, report: ImportReport) -> None:
    shown = report.threads[:_LISTED]
    rows = [
        (
            Text(clean(thread.thread), style="bold cyan"),
            str(thread.namespaces),
            f"{thread.checkpoints:,}",
            f"{thread.writes:,}",
        )
        for thread in shown
    ]
    out.columns(("thread", "namespaces", "checkpoints", "writes"), rows, right=(1, 2, 3))
    if len(report.threads) > len(shown):
        out.say(f"and {count(len(report.threads) - len(shown), 'more thread')}; --json has all.")
    sums = (
        count(len(report.threads), "thread"),
        count(sum(thread.checkpoints for thread in report.threads), "checkpoint"),
        count(sum(thread.writes for thread in report.threads), "write"),
    )
    _print_failed(out, report)
    out.say(f"In all {', '.join(sums)}. Nothing was imported.")
