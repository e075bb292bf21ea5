"""``holdfast push`` and ``holdfast pull``: bring what another store lacks there, proven on arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Store, TransferReport
from holdfast.cli.asking import OneKeyFile, environment_has_a_key, key_in
from holdfast.cli.output import Output
from holdfast.cli.progress import bars
from holdfast.cli.session import Given, Json, Session, reader
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.push/1"
_STYLES = {"new": "bold green", "updated": "green", "ahead": "yellow"}
_WORDS = {"new": "new", "updated": "updated", "unchanged": "unchanged", "ahead": "ahead there"}

Called = Annotated[str | None, Parameter(name="--as", metavar="NAME", show_default=False)]
Beside = Annotated[bool, Parameter(name="--beside", negative="", show_default=False)]


def push(
    source: Path,
    dest: Path,
    /,
    *agents: str,
    beside: Beside = False,
    called: Called = None,
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
        The store to read.
    dest
        The store to write to.
    agents
        Only these agents. [default: all]
    beside
        Where both stores have gone on with a branch, let it arrive under a name of its own instead of refusing.
    called
        What one agent is to be called in DEST.
    source_key_file
        The key of SOURCE, when it is not that of $HOLDFAST_KEY and the like; "none" when it has none.
    dest_key_file
        The key of DEST, likewise.
    json
        Print JSON (schema holdfast.push/1).
    """
    with (
        _two(source, dest, source_key_file, dest_key_file, agents, called) as (one, other),
        bars(session.err) as progress,
    ):
        report = one.push(other, agents, beside=beside, new_name=called, progress=progress)
    tell(session, report, json=json)
    return 0


@contextmanager
def _two(
    source: Path, dest: Path, source_key: str | None, dest_key: str | None, agents: Sequence[str], called: str | None
) -> Iterator[tuple[Store, Store]]:
    """Both stores. One that is to be made is made after all that can be refused beforehand."""
    if source.exists() and dest.exists() and source.samefile(dest):
        raise BadOption(f"{source} and {dest} are the same store")
    key = key_in(dest_key)
    with holdfast.open(source, create=False, readonly=True, inert=True, key=key_in(source_key)) as one:
        if one.encrypted and key is None and not environment_has_a_key() and not dest.exists():
            raise BadOption(
                f"{source} is encrypted, and the new store at {dest} would not be",
                hint="Give it a key (--dest-key-file FILE), or say that it has none (--dest-key-file none).",
            )
        for name in agents:
            reader(one, name)  # raises if there is none
        if called is not None and len(agents or one.agents()) != 1:
            raise BadOption("another name can be given to one agent at a time", hint="Name that agent.")
        with holdfast.open(dest, inert=True, key=key) as other:
            yield one, other


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
    for agent in report.agents:
        found = agent.arrived
        moved = size(found.bytes) if found.bytes else ""
        numbers = [f"{number:,}" if number else "" for number in (found.checkpoints, found.records, found.events)]
        status = Text(_WORDS[agent.status], style=_STYLES.get(agent.status, ""))
        rows.append([Text(clean(agent.name), style="bold cyan"), status, *numbers, moved])
    out.columns(("agent", "", "checkpoints", "effects", "events", "bytes"), rows, right=(2, 3, 4, 5))
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
