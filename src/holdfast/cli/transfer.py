"""``holdfast push``, ``pull``, ``backup``, ``move``, ``export`` and ``import``: agents on their way elsewhere and back.

A push goes from the store at hand to another one, a pull the other way. Everything is proven on arrival, and nothing
is removed where it arrives.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.text import Text

import holdfast
from holdfast import Store, TransferReport
from holdfast.cli.exits import exit_code
from holdfast.cli.keys import ASKED, DestKey, Key, KeySource, SourceKey, environment_has_a_key, key_in
from holdfast.cli.output import Output
from holdfast.cli.session import (
    ASKS,
    SHOWN,
    Agents,
    Consent,
    DryRun,
    Flag,
    Given,
    Json,
    Progress,
    Session,
    bars,
    option,
    reader,
    shown,
)
from holdfast.cli.store import Objects
from holdfast.cli.text import clean, count, is_url, size
from holdfast.errors import (
    BadOption,
    KeyNeeded,
    NotABundle,
    NotAStore,
    NotEncrypted,
    ReadOnly,
    SourceUnreadable,
    WrongKey,
)
from holdfast.run import module_of

if TYPE_CHECKING:
    from holdfast.contrib.langgraph import ImportedThread, ImportReport

REMOTE = "HOLDFAST_REMOTE"
_STYLES = {"new": "bold green", "updated": "green", "ahead": "yellow"}
_WORDS = {"new": "new", "updated": "updated", "unchanged": "unchanged", "ahead": "ahead there"}
# Threads that a dry run lists, and failures that are told; the JSON has all.
_LISTED = 20
_TITLES = {"imported": "imported", "complete": "already there", "failed": "failed", "found": "found"}

Other = Annotated[str | None, option("The other store: its directory, or postgresql://... [default: $HOLDFAST_REMOTE]")]


@Parameter(name="*")
@dataclass(frozen=True)
class Arrival:
    """Options of what takes agents in."""

    beside: Annotated[
        bool,
        option("Where both stores have continued a branch, let it arrive under a name of its own instead of refusing."),
    ] = False
    called: Annotated[str | None, option("What one agent is to be called where it arrives.", "NAME", name="--as")] = (
        None
    )
    images: Annotated[bool, option("Bring images of processes along, too. The other store has to be encrypted.")] = (
        False
    )


@Parameter(name="*")
@dataclass(frozen=True)
class Ends:
    """The keys of both ends, and of a store that is made where it keeps large values."""

    source_key_file: SourceKey = None
    dest_key_file: DestKey = None
    objects: Objects = None


_ARRIVAL = Arrival()
_ENDS = Ends()


# -- between stores -------------------------------------------------------------------------------------------------


def push(
    dest: Other = None,
    /,
    *agents: Agents,
    arrival: Arrival = _ARRIVAL,
    ends: Ends = _ENDS,
    json: Json = False,
    session: Given,
) -> int:
    """Bring what another store lacks there.

    Of some agents, or of all. The other store is made if there is none. Only what is missing moves, and everything is
    proven on arrival. Run it again after an interruption: it resumes where it was. Nothing is removed there.
    """
    other = _other(dest, "push DEST")
    with _both(session, session.place, other, ends, agents, arrival.called) as (source, store, progress):
        report = source.push(
            store, agents, beside=arrival.beside, new_name=arrival.called, images=arrival.images, progress=progress
        )
    return _tell(session, report, "push", json=json)


def pull(
    source: Other = None,
    /,
    *agents: Agents,
    arrival: Arrival = _ARRIVAL,
    ends: Ends = _ENDS,
    json: Json = False,
    session: Given,
) -> int:
    """Bring what this store lacks here from another one.

    As push, the other way: of some agents, or of all. This store is made if there is none.
    """
    other = _other(source, "pull SOURCE")
    with _both(session, other, session.place, ends, agents, arrival.called) as (found, store, progress):
        report = store.pull(
            found, agents, beside=arrival.beside, new_name=arrival.called, images=arrival.images, progress=progress
        )
    return _tell(session, report, "pull", json=json)


def backup(dest: Other = None, /, *, ends: Ends = _ENDS, json: Json = False, session: Given) -> int:
    """Bring all that another store lacks there, with this store's rules.

    As push of all agents but images of processes, so it may be done every night. Agents may be written meanwhile; what
    they write after the beginning comes the next time.
    """
    other = _other(dest, "backup DEST")
    with _both(session, session.place, other, ends) as (source, store, progress):
        report = source.backup(store, progress)
    return _tell(session, report, "backup", json=json)


def move(dest: str, /, *, ends: Ends = _ENDS, consent: Consent = ASKS, session: Given) -> int:
    """Move everything to another store; this one is only read then.

    Says what that means, then asks. If there are images of processes, the other one has to be encrypted. This one
    stays, and says where everything is. Nobody else may have the store open, or, on a server, write to it. Run it again
    after an interruption: it resumes where it was.

    Parameters
    ----------
    dest
        The other store: its directory, or postgresql://... It is made if there is none.
    """

    def agreed(source: Store) -> None:
        if not consent.json:
            session.out.say(f"Everything goes from {clean(source.place)} to {clean(shown(dest) or dest)}.")
            session.out.say("What is here can only be read then: programs have to open the other one.")
        if not consent.given(session, "Move it?"):
            raise _NotAgreed(source.place)

    again = False
    try:
        readonly = not consent.possible
        with _both(session, session.place, dest, ends, readonly=readonly, agreed=agreed) as (source, store, progress):
            report = source.move(store, progress)
    except _NotAgreed as stopped:
        if consent.json:
            session.json("move", source=str(stopped), dest=shown(dest), bytes=0, agents=[], left_out=[], done=False)
        return consent.code(done=False)
    except ReadOnly as error:
        try:
            with _both(session, session.place, dest, ends, create=False) as (source, store, progress):
                report = source.move(store, progress)  # it was moved there: something may be left to be done
        except (NotAStore, ReadOnly):
            raise error from None
        again = True
    if consent.json:
        return session.json("move", **report.to_json(), done=True)
    if not again:
        _tell(session, report, "move", json=False)
    session.out.say(f"{clean(report.source)} can only be read from now on. Programs open {clean(report.dest)}.")
    return 0


class _NotAgreed(Exception):
    """Somebody was asked whether a store is to be moved, and did not say yes; which store that is."""


def _other(given: str | None, usage: str) -> str:
    place = given or os.environ.get(REMOTE)
    if not place:
        raise BadOption(
            "which other store?", hint=f"holdfast {usage}, or set ${REMOTE} to its directory or postgresql://..."
        )
    return place


@contextmanager
def _both(
    session: Session,
    source: str | None,
    dest: str | None,
    ends: Ends,
    agents: tuple[str, ...] = (),
    called: str | None = None,
    *,
    readonly: bool = True,
    create: bool = True,
    agreed: Callable[[Store], None] | None = None,
) -> Iterator[tuple[Store, Store, Progress]]:
    """The store that things are brought from, the one that they are brought to, and bars.

    One that is to be made is made after all that can be refused beforehand, by whoever is asked, too.
    """
    key = key_in(ends.source_key_file)
    with opened_end(session, source, "--source-key-file", key, create=False, inert=True, readonly=readonly) as store:
        there = dest or os.environ.get("HOLDFAST_STORE") or ".holdfast"
        if _same(source or store.place, there):
            raise BadOption(f"{shown(there)} is the store itself", hint="Name another one.")
        if not (is_url(there) or is_url(store.place)) and Path(store.place) in Path(os.path.realpath(there)).parents:
            raise BadOption(
                f"{there} lies in the store's own directory: who deletes that deletes both",
                hint="Name a place beside it.",
            )
        for name in agents:
            reader(store, name)  # raises if there is none
        if called is not None and len(agents or store.agents(limit=2)) != 1:
            raise BadOption("another name can be given to one agent at a time", hint="Name that agent.")
        key = key_in(ends.dest_key_file)
        if store.encrypted and key is None and not environment_has_a_key() and not _exists(dest):
            raise BadOption(
                f"{store.place} is encrypted, and the new store at {shown(dest) or 'this place'} would not be",
                hint="Give it a key (--dest-key-file FILE), or say that it has none (--dest-key-file none).",
            )
        if agreed is not None:
            agreed(store)
        other = opened_end(session, dest, "--dest-key-file", key, create=create, inert=True, objects=ends.objects)
        with other, bars(session.err) as progress:
            yield store, other, progress


def opened_end(session: Session, place: str | None, option: str, key: Key, **options: Any) -> Store:
    """One of the two. A key in the environment is for both, so whoever lacks his own is told of the option."""
    try:
        return session.opened(place, key=key, **options)
    except (KeyNeeded, WrongKey) as error:
        if key:
            raise
        message = f"{shown(place)}: {error.message}" if isinstance(error, WrongKey) else error.message
        raise type(error)(message, hint=f"Give its own key: {option} FILE.") from error
    except NotEncrypted as error:
        if key is not None:
            raise
        raise NotEncrypted(f"{error.message}; say that it has none: {option} none") from error


def _same(one: str, other: str) -> bool:
    if is_url(one) or is_url(other):
        return one == other
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _exists(place: str | None) -> bool:
    if place is not None and not is_url(place):
        return Path(place).exists()
    try:
        holdfast.keys.listed(place)
    except NotEncrypted:
        return True
    except NotAStore:
        return False
    return True


def _tell(session: Session, report: TransferReport, schema: str, *, json: bool) -> int:
    """What moved."""
    if json:
        return session.json(schema, **report.to_json())
    out = session.out
    if report.left_out:
        named = clean(", ".join(report.left_out))
        out.say(
            Text(
                f"Left out, with images of processes in them (`push --images` takes them along): {named}",
                style="yellow",
            )
        )
    if not report.agents and not report.left_out:
        out.say(f"No agents in {clean(report.source)}.")
        return 0
    # Of many, those that something was done to: the others are fine.
    many = len(report.agents) > SHOWN
    rows: list[list[Text | str]] = []
    for agent in [one for one in report.agents if not many or one.status != "unchanged"][:SHOWN]:
        found = agent.arrived
        numbers = [f"{number:,}" if number else "" for number in (found.checkpoints, found.records, found.events)]
        status = Text(_WORDS[agent.status], style=_STYLES.get(agent.status, ""))
        moved = size(found.bytes) if found.bytes else ""
        rows.append([Text(clean(agent.name), style="bold cyan"), status, *numbers, moved])
    if rows:
        out.columns(("agent", "", "checkpoints", "effects", "events", "bytes"), rows, right=(2, 3, 4, 5))
    if many:
        became = Counter(_WORDS[agent.status] for agent in report.agents)
        told = ", ".join(f"{became[word]:,} {word}" for word in _WORDS.values() if became[word])
        out.note(f"{count(len(report.agents), 'agent')}: {told}; --json has all.")
    for agent in report.agents:
        for branch in agent.beside:
            out.say(
                Text(f"{clean(agent.name)}: changed in both stores; copied as branch {clean(branch)}", style="yellow")
            )
        if agent.arrived.left_out:
            left = clean(", ".join(agent.arrived.left_out))
            out.say(
                Text(f"{clean(agent.name)}: not copied, because their checkpoints are missing: {left}", style="yellow")
            )
    changed = sum(agent.status in {"new", "updated"} for agent in report.agents)
    if changed:
        out.say(Text(f"{count(changed, 'agent')} copied to {clean(report.dest)} and verified.", style="green"))
    else:
        out.say("Nothing was missing.")
    return 0


# -- files ----------------------------------------------------------------------------------------------------------


def export(
    file: Path,
    /,
    *agents: Agents,
    encrypt: Flag = False,
    source: KeySource = ASKED,
    plain: Flag = False,
    force: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Write agents to a file, which `holdfast import` takes in.

    With branches, tags, effects and everything else. The file appears whole or not at all, and is checked when it is
    read. Out of an encrypted store it is encrypted, and opens with the store's keys.

    Parameters
    ----------
    file
        The file.
    encrypt
        Encrypt FILE with a key of its own: one that an option names, or a passphrase that is asked for.
    plain
        Do not encrypt FILE, even if the store is.
    force
        Replace FILE if it exists.
    """
    if not encrypt and source.named:
        raise BadOption("a key was named without --encrypt", hint="Add --encrypt.")
    if encrypt and plain:
        raise BadOption("--encrypt and --plain", hint="Choose one of them.")
    with session.reading() as store:
        key: str | Key = False if plain else None
        if encrypt:
            key = source.chosen("Passphrase of the file")
        names = list(agents) or [info.name for info in store.agents(sort="name")]
        if not names:
            raise BadOption(f"there are no agents in {store.place}")
        with bars(session.err) as progress:
            written = store.export(file, names, key=key, replace=force, progress=progress)
        children = [info.name for name in agents for info in store.agents(f"{escape(name)}/*", sort="name")]
        names = list(dict.fromkeys([*names, *children]))
        place, encrypted = store.place, encrypt or (store.encrypted and not plain)
    if json:
        return session.json("export", store=place, file=str(file), agents=names, bytes=written, encrypted=encrypted)
    how = ", encrypted" if encrypted else ""
    session.out.say(f"Wrote {count(len(names), 'agent')} to {clean(str(file))} ({size(written)}{how}).")
    return 0


import_ = App(name="import", help="Take in agents from a file, or threads of LangGraph.")


@import_.default
def bundle(
    file: Path,
    /,
    *agents: Agents,
    arrival: Arrival = _ARRIVAL,
    source_key_file: SourceKey = None,
    dest_key_file: DestKey = None,
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
            beside=arrival.beside,
            new_name=arrival.called,
            progress=progress,
        )
    return _tell(session, report, "import-bundle", json=json)


# -- LangGraph's threads --------------------------------------------------------------------------------------------


@import_.command
def langgraph(
    source: str,
    /,
    *,
    thread: Annotated[tuple[str, ...], Parameter(metavar="ID", negative="", show_default=False)] = (),
    types: Annotated[tuple[str, ...], Parameter(metavar="MODULE", negative="", show_default=False)] = (),
    dry_run: DryRun = False,
    json: Json = False,
    session: Given,
) -> int:
    """Bring LangGraph threads over, with their whole histories, and verify them.

    The source is only read. Run it again after an interruption: it resumes where it stopped. The store is made if there
    is none. A dry run counts what is there, and says which threads cannot come over because of their ids.

    Parameters
    ----------
    source
        sqlite:///old.db or postgresql://user@host/database, as LangGraph's own savers wrote it.
    thread
        Import only these threads. [default: all]
    types
        Modules or file.py whose classes the threads hold. LangChain's and LangGraph's own are known.
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
    modules = []
    for name in types:
        try:
            modules.append(module_of(name))
        except ImportError as error:
            raise BadOption(f"--types {name}: {error}") from error
    check_source(source, thread)  # before a store is made
    logging.getLogger("langgraph").addHandler(logging.NullHandler())  # what it would warn of is an error here
    with bars(session.err) as progress:
        if dry_run:
            report = import_threads(source, None, threads=thread, dry_run=True, progress=progress)
        else:
            with (
                session.opened(session.place, durability="batched") as store,  # what is lost can be read again
                HoldfastSaver(store, types=modules) as saver,
            ):
                report = import_threads(source, saver, threads=thread, progress=progress)
    if json:
        session.json("import", dry_run=dry_run, **report.to_json())
    else:
        _print_threads(session.out, report, dry_run=dry_run)
    return max((exit_code(failed.error) for failed in report.failed if failed.error is not None), default=0)


def _print_threads(out: Output, report: ImportReport, *, dry_run: bool) -> None:
    if not report.threads:
        out.say(f"No threads in {clean(report.source)}.")
        return
    rows: list[list[Text | str]]
    if dry_run:
        rows = [
            [Text(clean(one.thread), style="bold cyan"), str(one.namespaces), *_sums([one])[1:]]
            for one in report.threads[:_LISTED]
        ]
        out.columns(("thread", "namespaces", "checkpoints", "writes"), rows, right=(1, 2, 3))
        if len(report.threads) > _LISTED:
            out.say(f"and {count(len(report.threads) - _LISTED, 'more thread')}; --json has all.")
    else:
        by_status = {status: [one for one in report.threads if one.status == status] for status in _TITLES}
        styles = {"imported": "bold green", "failed": "bold red"}
        rows = [
            [Text(_TITLES[status], style=styles.get(status, "")), *_sums(found)]
            for status, found in by_status.items()
            if found
        ]
        out.columns(("", "threads", "checkpoints", "writes"), rows, right=(1, 2, 3))
    for failed in report.failed[:_LISTED]:
        message, hint = (failed.error.message, failed.error.hint) if failed.error is not None else ("", "")
        out.say(Text(f"{clean(failed.thread)}: ", style="red"), clean(message))
        if hint:
            out.say("  ", clean(hint))
    if len(report.failed) > _LISTED:
        out.say(f"and {count(len(report.failed) - _LISTED, 'more failed thread')}; --json has all.")
    if dry_run:
        told = zip(_totals(report.threads), ("thread", "checkpoint", "write"), strict=True)
        out.say(f"In all {', '.join(count(*one) for one in told)}. Nothing was imported.")
    elif report.ok:
        out.say(Text("Every thread was read back and is equal to the source, which was only read.", style="bold green"))


def _totals(threads: list[ImportedThread]) -> tuple[int, int, int]:
    return len(threads), sum(thread.checkpoints for thread in threads), sum(thread.writes for thread in threads)


def _sums(threads: list[ImportedThread]) -> list[str]:
    return [f"{number:,}" for number in _totals(threads)]
