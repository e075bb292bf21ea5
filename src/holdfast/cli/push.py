"""``holdfast push`` and ``holdfast pull``: bring what another store lacks there, proven on arrival.

Also how two stores are opened, and how people are told what moved: a move and a backup are pushes of everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Store, TransferReport
from holdfast.cli.asking import OneKeyFile, environment_has_a_key, key_in
from holdfast.cli.output import Output
from holdfast.cli.progress import bars
from holdfast.cli.session import SHOWN, Given, Json, Objects, Session, is_url, reader, shown
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption, NotAStore, NotEncrypted

SCHEMA = "holdfast.push/1"
_STYLES = {"new": "bold green", "updated": "green", "ahead": "yellow"}
_WORDS = {"new": "new", "updated": "updated", "unchanged": "unchanged", "ahead": "ahead there"}

Key: TypeAlias = "holdfast.keys.Secret | Literal[False] | None"
Called = Annotated[str | None, Parameter(name="--as", metavar="NAME", show_default=False)]
Beside = Annotated[bool, Parameter(name="--beside", negative="", show_default=False)]


def push(
    source: str,
    dest: str,
    /,
    *agents: str,
    beside: Beside = False,
    called: Called = None,
    objects: Objects = None,
    source_key_file: OneKeyFile = None,
    dest_key_file: OneKeyFile = None,
    json: Json = False,
    session: Given,
) -> int:
    """Bring what DEST lacks of some agents, or of all, from SOURCE. DEST is made if there is none.

    Only what is missing moves, and everything is proven on arrival. Run it again after an interruption: it goes on
    where it was. Nothing is removed from DEST.

    Parameters
    ----------
    source
        The store to read: its directory, or postgresql://...
    dest
        The store to write to, likewise.
    agents
        Only these agents. [default: all]
    beside
        Where both stores have gone on with a branch, let it arrive under a name of its own instead of refusing.
    called
        What one agent is to be called in DEST.
    objects
        Where DEST keeps large values, if it is made now: a directory, or a URL such as s3://bucket/prefix.
    source_key_file
        The key of SOURCE, when it is not that of $HOLDFAST_KEY and the like; "none" when it has none.
    dest_key_file
        The key of DEST, likewise.
    json
        Print JSON (schema holdfast.push/1).
    """
    with source_at(source, dest, key_in(source_key_file), readonly=True) as one:
        for name in agents:
            reader(one, name)  # raises if there is none
        if called is not None and len(agents or one.agents(limit=2)) != 1:
            raise BadOption("another name can be given to one agent at a time", hint="Name that agent.")
        with dest_at(dest, key_in(dest_key_file), objects, one) as other, bars(session.err) as progress:
            report = one.push(other, agents, beside=beside, new_name=called, progress=progress)
    tell(session, report, json=json)
    return 0


@contextmanager
def source_at(source: str | None, dest: str, key: Key, *, readonly: bool) -> Iterator[Store]:
    """The store that things are brought from. Raises if it is the other one."""
    if source is not None and _same(source, dest):
        raise BadOption(f"{shown(source)} and {shown(dest)} are the same store")
    with holdfast.open(source, create=False, readonly=readonly, inert=True, key=key) as store:
        if source is None and _same(store.place, dest):
            raise BadOption(f"{shown(dest)} is the store itself", hint="Name another one.")
        yield store


@contextmanager
def dest_at(dest: str, key: Key, objects: str | None, source: Store) -> Iterator[Store]:
    """The store that they are brought to. One that is to be made is made after all that can be refused beforehand."""
    if source.encrypted and key is None and not environment_has_a_key() and not _exists(dest):
        raise BadOption(
            f"{source.place} is encrypted, and the new store at {shown(dest)} would not be",
            hint="Give it a key (--dest-key-file FILE), or say that it has none (--dest-key-file none).",
        )
    with holdfast.open(dest, inert=True, key=key, objects=objects) as store:
        yield store


def _same(one: str, other: str) -> bool:
    if is_url(one) or is_url(other):
        return one == other
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _exists(place: str) -> bool:
    if not is_url(place):
        return Path(place).exists()
    try:
        holdfast.keys.listed(place)
    except NotEncrypted:
        return True
    except NotAStore:
        return False
    return True


def tell(session: Session, report: TransferReport, *, json: bool, schema: str = SCHEMA) -> None:
    """What moved."""
    if json:
        session.out.json({"schema": schema, **report.to_json()})
        return
    _print(session.out, report)


def _print(out: Output, report: TransferReport) -> None:
    if not report.agents:
        out.say(f"No agents in {clean(report.source)}.")
        return
    rows: list[list[Text | str]] = []
    # Of many, those that something was done to: the others are fine.
    many = len(report.agents) > SHOWN
    listed = [agent for agent in report.agents if not many or agent.status != "unchanged"]
    for agent in listed[:SHOWN]:
        found = agent.arrived
        moved = size(found.bytes) if found.bytes else ""
        numbers = [f"{number:,}" if number else "" for number in (found.checkpoints, found.records, found.events)]
        status = Text(_WORDS[agent.status], style=_STYLES.get(agent.status, ""))
        rows.append([Text(clean(agent.name), style="bold cyan"), status, *numbers, moved])
    if rows:
        out.columns(("agent", "", "checkpoints", "effects", "events", "bytes"), rows, right=(2, 3, 4, 5))
    if many:
        became = Counter(_WORDS[agent.status] for agent in report.agents)
        told = ", ".join(f"{became[word]:,} {word}" for word in _WORDS.values() if became[word])
        out.say(Text(f"{count(len(report.agents), 'agent')}: {told}; --json has all.", style="dim"))
    for agent in report.agents:
        for branch in agent.beside:
            out.say(Text(f"{clean(agent.name)}: both had gone on; it arrived as {clean(branch)}", style="yellow"))
        if agent.arrived.left_out:
            left = clean(", ".join(agent.arrived.left_out))
            out.say(Text(f"{clean(agent.name)}: left out, what they name is not there: {left}", style="yellow"))
    changed = sum(agent.status in {"new", "updated"} for agent in report.agents)
    if not changed:
        out.say("Nothing was missing.")
    else:
        out.say(Text(f"{count(changed, 'agent')} brought to {clean(report.dest)}, all of it proven.", style="green"))
