"""Where the key of a store comes from: the call, the environment, a file, or a command.

Owns the variables ``HOLDFAST_KEY``, ``HOLDFAST_KEY_FILE`` and ``HOLDFAST_KEY_COMMAND``. Knows nothing of stores.
Always true: a key is never taken from two places at once, and never shown in an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from holdfast.errors import BadOption
from holdfast.store.keys import Secret, secret_of

KEY_MAX_BYTES = 4096
"""A file or an output that is longer is not a key: somebody gave the wrong path."""

COMMAND_WAIT_S = 120.0
"""A command may ask a person, or a password manager that does."""

VARIABLES = ("HOLDFAST_KEY", "HOLDFAST_KEY_FILE", "HOLDFAST_KEY_COMMAND")

ask: Callable[[Path], Secret] | None = None
"""How a person is asked for the key of a store that turned out to be encrypted; the command line sets it."""

Key = str | bytes | Secret | Literal[False] | None
"""A passphrase or key; None: whatever the environment says; False: none, whatever the environment says."""


def find_secret(key: Key) -> Secret | None:
    if key is False:
        return None
    if isinstance(key, Secret):
        return key
    if key is not None:
        return secret_of(key)
    given = [name for name in VARIABLES if os.environ.get(name)]
    if not given:
        return None
    if len(given) > 1:
        raise BadOption(f"{' and '.join(given)} are set", hint="Set one of them, or give key=.")
    value = os.environ[given[0]]
    if given[0] == "HOLDFAST_KEY":
        return secret_of(value)
    return from_file(value) if given[0] == "HOLDFAST_KEY_FILE" else from_command(value)


def from_environment(name: str) -> Secret:
    """The key in a variable."""
    value = os.environ.get(name)
    if not value:
        raise BadOption(f"the variable {name} is not set")
    return secret_of(value)


def from_file(path: str | os.PathLike[str]) -> Secret:
    """The key in a file: its only line."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(KEY_MAX_BYTES + 1)
    except OSError as error:
        raise BadOption(f"the key file {os.fspath(path)} cannot be read ({error.strerror})") from error
    return _from_bytes(data, f"the key file {os.fspath(path)}")


def from_command(command: str) -> Secret:
    """The key that a command prints. No shell is involved."""
    import shlex
    import subprocess

    try:
        arguments = shlex.split(command)
        done = subprocess.run(  # noqa: S603  the person's own command
            arguments, stdout=subprocess.PIPE, timeout=COMMAND_WAIT_S, check=False
        )
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise BadOption(f"the key command could not be run ({type(error).__name__})", hint="Try it by hand.") from error
    if done.returncode:
        raise BadOption(f"the key command ended with {done.returncode}", hint="Try it by hand.")
    return _from_bytes(done.stdout, "what the key command printed")


def _from_bytes(data: bytes, what: str) -> Secret:
    if len(data) > KEY_MAX_BYTES:
        raise BadOption(f"{what} is longer than a key can be")
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise BadOption(f"{what} is not text", hint="A key is 64 hexadecimal digits, or a passphrase.") from error
    if "\n" in text or not text:
        raise BadOption(f"{what} is not one line", hint="A key is 64 hexadecimal digits, or a passphrase.")
    return secret_of(text)
