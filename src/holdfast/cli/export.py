"""``holdfast export``: agents with their whole histories in one file."""

from __future__ import annotations

from glob import escape
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import holdfast
from holdfast.cli.asking import KeyCommand, KeyEnv, KeyFile, chosen
from holdfast.cli.progress import bars
from holdfast.cli.session import Flag, Given, Json
from holdfast.cli.text import clean, count, size
from holdfast.errors import BadOption

SCHEMA = "holdfast.export/1"


def export(
    *names: Annotated[str, Parameter(metavar="AGENT... FILE", allow_leading_hyphen=False)],
    encrypt: Flag = False,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    key_command: KeyCommand = None,
    plain: Flag = False,
    force: Flag = False,
    json: Json = False,
    session: Given,
) -> int:
    """Write agents to FILE, with branches, tags, effects and everything else; `holdfast import FILE` takes them in.

    The file appears whole or not at all, and is checked when it is read. Out of an encrypted store it is encrypted,
    and opens with the store's keys.

    Parameters
    ----------
    names
        The agents, and last the file.
    encrypt
        Encrypt FILE with a key of its own: one that an option names, or a passphrase that is asked for.
    key_file
        That key is the only line of this file: 64 hexadecimal digits, or a passphrase.
    key_env
        That key is in this variable.
    key_command
        That key is what this command prints.
    plain
        Do not encrypt FILE, even if the store is.
    force
        Replace FILE if it exists.
    json
        Print JSON (schema holdfast.export/1).
    """
    if len(names) < 2:
        raise BadOption("name at least one agent and the file", hint="holdfast export trip-7 trip-7.hfb")
    if not encrypt and any(value is not None for value in (key_file, key_env, key_command)):
        raise BadOption("a key was named without --encrypt", hint="Add --encrypt.")
    if encrypt and plain:
        raise BadOption("--encrypt and --plain", hint="Choose one of them.")
    *agents, file = names
    with session.reading() as store:
        key: str | holdfast.keys.Secret | Literal[False] | None = False if plain else None
        if encrypt:
            key = chosen(key_file, key_env, key_command, "Passphrase of the file")
        with bars(session.err) as progress:
            written = store.export(Path(file), agents, key=key, replace=force, progress=progress)
        children = [info.name for name in agents for info in store.agents(f"{escape(name)}/*", sort="name")]
        agents = list(dict.fromkeys([*agents, *children]))
        place, encrypted = store.place, encrypt or (store.encrypted and not plain)
    if json:
        said = {"schema": SCHEMA, "store": place, "file": file, "agents": agents, "bytes": written}
        session.out.json({**said, "encrypted": encrypted})
    else:
        how = ", encrypted" if encrypted else ""
        session.out.say(f"Wrote {count(len(agents), 'agent')} to {clean(file)} ({size(written)}{how}).")
    return 0
