"""``holdfast init``: a new store, encrypted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import holdfast
from holdfast.cli.asking import KeyCommand, KeyEnv, KeyFile, chosen, environment_has_a_key
from holdfast.cli.session import Flag, Given, Json
from holdfast.errors import BadOption

SCHEMA = "holdfast.init/1"


def init(
    path: Annotated[Path | None, Parameter(show_default=False)] = None,
    /,
    *,
    encrypt: Flag = False,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    key_command: KeyCommand = None,
    json: Json = False,
    session: Given,
) -> int:
    """Make a new store. Programs make theirs when they first open it; this is for encrypted ones.

    Parameters
    ----------
    path
        Its directory. [default: --store, $HOLDFAST_STORE, or ./.holdfast]
    encrypt
        Encrypt it: with the key of $HOLDFAST_KEY, _FILE or _COMMAND, or with a passphrase that is asked for.
    key_file
        The key is the only line of this file: 64 hexadecimal digits, or a passphrase.
    key_env
        The key is in this variable.
    key_command
        The key is what this command prints.
    json
        Print JSON (schema holdfast.init/1).
    """
    given = any(value is not None for value in (key_file, key_env, key_command))
    if given and not encrypt:
        raise BadOption("a key was named without --encrypt", hint="holdfast init PATH --encrypt --key-file FILE")
    if not encrypt and environment_has_a_key():
        raise BadOption(
            "a key is set in the environment, but --encrypt was not given",
            hint="Add --encrypt, or unset HOLDFAST_KEY, HOLDFAST_KEY_FILE and HOLDFAST_KEY_COMMAND.",
        )
    asking = given or not environment_has_a_key()

    def key() -> str | holdfast.keys.Secret | None:
        return chosen(key_file, key_env, key_command, "Passphrase of the new store") if asking else None

    made = holdfast.keys.init(path if path is not None else session.path, key if encrypt else False)
    if json:
        session.out.json({"schema": SCHEMA, "store": str(made), "encrypted": encrypt})
    else:
        session.out.say(f"Made {'an encrypted' if encrypt else 'a'} store at {made}.")
        if encrypt:
            session.out.say(
                "Whoever loses every key loses the store: keep a copy of the key, and of the file keys.", wrap=True
            )
    return 0
