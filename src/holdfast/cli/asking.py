"""How the command line gets keys: from the options that name where they are, or from a person at a terminal.

Always holds: no key is an argument, because arguments are shown to everybody on the machine.
"""

from __future__ import annotations

import os
import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import holdfast
from holdfast.errors import BadOption, KeyNeeded

VARIABLES = ("HOLDFAST_KEY", "HOLDFAST_KEY_FILE", "HOLDFAST_KEY_COMMAND")

KeyFile = Annotated[Path | None, Parameter(metavar="FILE", show_default=False)]
KeyEnv = Annotated[str | None, Parameter(metavar="VARIABLE", show_default=False)]
KeyCommand = Annotated[str | None, Parameter(metavar="COMMAND", show_default=False)]
OneKeyFile = Annotated[str | None, Parameter(metavar="FILE", show_default=False)]
"""Where two things have keys: the file of one of them, or "none" when it has no key."""

_told: dict[str, str] = {}


def environment_has_a_key() -> bool:
    return any(os.environ.get(name) for name in VARIABLES)


def chosen(file: Path | None, env: str | None, command: str | None, prompt: str) -> str | holdfast.keys.Secret:
    """The new key that the options name, or a passphrase that is typed twice."""
    if sum(value is not None for value in (file, env, command)) > 1:
        raise BadOption("more than one place for the key was named", hint="Name one.")
    if file is not None:
        return holdfast.keys.from_file(file)
    if env is not None:
        return holdfast.keys.from_environment(env)
    if command is not None:
        return holdfast.keys.from_command(command)
    if not sys.stdin.isatty():
        raise BadOption(
            "there is no terminal to ask for a passphrase",
            hint="Name a file, a variable or a command that has the key.",
        )
    first = getpass(f"{prompt}: ")
    if getpass("The same again: ") != first:
        raise BadOption("the two passphrases differ", hint="Try again.")
    return first


def key_in(file: str | None) -> holdfast.keys.Secret | Literal[False] | None:
    """What ``holdfast.open`` takes: the key in a file, False for none at all, None for what is usual."""
    if file is None:
        return None
    return False if file == "none" else holdfast.keys.from_file(file)


def ask(place: str) -> holdfast.keys.Secret:
    """The key of a store that is there, from whoever sits at the terminal; asked for once."""
    if place not in _told:
        if not sys.stdin.isatty():
            raise KeyNeeded(
                f"{place} is encrypted",
                hint="Set HOLDFAST_KEY, HOLDFAST_KEY_FILE or HOLDFAST_KEY_COMMAND.",
            )
        _told[place] = getpass(f"Passphrase of {place}: ")
    return holdfast.keys.secret_of(_told[place])
