"""``holdfast push`` and ``holdfast pull``: bring what another store lacks there, proven on arrival."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.text import Text

import holdfast
from holdfast import Store, TransferReport
from holdfast.cli.output import Output
from holdfast.cli.progress import bars
from holdfast.cli.session import Given, Json, Session
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.push/1"
_STYLES = {"new": "bold green", "updated": "green", "ahead": "yellow"}
_WORDS = {"new": "new", "updated": "updated", "unchanged": "unchanged", "ahead": "ahead there"}
# A key has 64 digits; a passphrase that is longer than this is a mistake.
_KEY_MAX_BYTES = 4096
_PLAIN = "none"

Called = Annotated[str | None, Parameter(name="--as", metavar="NAME", show_default=False)]
Beside = Annotated[bool, Parameter(name="--beside", negative="", show_default=False)]
KeyFile = Annotated[str | None, Parameter(metavar="FILE", show_default=False)]


def push(
    source: Path,
    dest: Path,
    /,
    *agents: str,
    beside: Beside = False,
    called: Called = None,
    source_key_file: KeyFile = None,
    dest_key_file: KeyFile = None,
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
    with _two(source, dest, source_key_file, dest_key_file) as (one, other), bars(session.err) as progress:
        report = one.push(other, agents, beside=beside, new_name=called, progress=progress)
    tell(session, report, json=json)
    return 0


def pull(
    source: Path,
    dest: Path,
    /,
    *agents: str,
    beside: Beside = False,
    called: Called = None,
    source_key_file: KeyFile = None,
    dest_key_file: KeyFile = None,
    json: Json = False,
    session: Given,
) -> int:
    """Bring what DEST lacks of some agents, or of all, from SOURCE: the same as push, as it is thought of over there.

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
    return push(
        source, dest, *agents, beside=beside, called=called, source_key_file=source_key_file,
        dest_key_file=dest_key_file, json=json, session=session,
    )  # fmt: skip


@contextmanager
def _two(source: Path, dest: Path, source_key: str | None, dest_key: str | None) -> Iterator[tuple[Store, Store]]:
    if source.exists() and dest.exists() and source.samefile(dest):
        raise BadOption(f"{source} and {dest} are the same store")
    with (
        holdfast.open(source, create=False, readonly=True, inert=True, key=_key(source_key)) as one,
        holdfast.open(dest, inert=True, key=_key(dest_key)) as other,
    ):
        yield one, other


def _key(file: str | None) -> str | bytes | Literal[False] | None:
    """What ``holdfast.open`` takes: the content of a key file, False for none at all, None for what is usual."""
    if file is None:
        return None
    if file == _PLAIN:
        return False
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(_KEY_MAX_BYTES)
    except OSError as error:
        raise BadOption(f"the key file {file} cannot be read ({error.strerror})") from error
    if len(data) == 32:
        return data
    try:
        return data.decode().strip("\r\n")
    except UnicodeDecodeError as error:
        raise BadOption(f"the key file {file} holds neither text nor 32 bytes") from error


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
