"""``holdfast init``: a new store."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

import holdfast
from holdfast.cli.asking import KeyCommand, KeyEnv, KeyFile, chosen, environment_has_a_key
from holdfast.cli.session import Flag, Given, Json, Objects
from holdfast.cli.text import clean
from holdfast.errors import BadOption

SCHEMA = "holdfast.init/1"


def init(
    place: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    objects: Objects = None,
    encrypt: Flag = False,
    key_file: KeyFile = None,
    key_env: KeyEnv = None,
    key_command: KeyCommand = None,
    json: Json = False,
    session: Given,
) -> int:
    """Make a new store. Programs make theirs when they first open it; this is for one that needs an option.

    Parameters
    ----------
    place
        Its directory, or postgresql://... [default: --store, $HOLDFAST_STORE, or ./.holdfast]
    objects
        Where large values are kept: a directory, or a URL such as s3://bucket/prefix (needs the extra objects). It
        stays so. [default: in the store's directory]
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
        raise BadOption("a key was named without --encrypt", hint="holdfast init PLACE --encrypt --key-file FILE")
    if not encrypt and environment_has_a_key():
        raise BadOption(
            "a key is set in the environment, but --encrypt was not given",
            hint="Add --encrypt, or unset HOLDFAST_KEY, HOLDFAST_KEY_FILE and HOLDFAST_KEY_COMMAND.",
        )
    asking = given or not environment_has_a_key()

    def key() -> str | holdfast.keys.Secret | None:
        return chosen(key_file, key_env, key_command, "Passphrase of the new store") if asking else None

    where = place if place is not None else session.place
    made = holdfast.keys.init(where, key if encrypt else False, objects=objects)
    if json:
        session.out.json({"schema": SCHEMA, "store": made, "encrypted": encrypt})
    else:
        session.out.say(f"Made {'an encrypted' if encrypt else 'a'} store at {clean(made)}.")
        if encrypt:
            session.out.say("Whoever loses every key loses the store: keep a copy of the key.", wrap=True)
    return 0
