"""``holdfast key``: who can open an encrypted store."""

from __future__ import annotations

from cyclopts import App
from rich.text import Text

import holdfast
from holdfast.cli.asking import KeyCommand, KeyEnv, KeyFile, chosen
from holdfast.cli.progress import bars
from holdfast.cli.session import Flag, Given, Json, Session
from holdfast.cli.text import ago, clean, now
from holdfast.errors import BadOption

LIST_SCHEMA = "holdfast.keys/1"
SCHEMA = "holdfast.key/1"

key = App(name="key", help="List, add, remove and replace the keys of an encrypted store.")


@key.command(name="list")
def list_(*, json: Json = False, session: Given) -> int:
    """List the keys that open the store. Needs none of them.

    Parameters
    ----------
    json
        Print JSON (schema holdfast.keys/1).
    """
    found = holdfast.keys.listed(session.place)
    if json:
        session.out.json({"schema": LIST_SCHEMA, "keys": [one.to_json() for one in found]})
    else:
        rows = [(str(one.number), Text(one.kind, style="bold"), ago(one.created, now())) for one in found]
        session.out.columns(("number", "kind", "added"), rows, right=(0,))
    return 0


@key.command
def add(
    *,
    new_key_file: KeyFile = None,
    new_key_env: KeyEnv = None,
    new_key_command: KeyCommand = None,
    json: Json = False,
    session: Given,
) -> int:
    """Let one more key open the store. Without an option a passphrase is asked for.

    Parameters
    ----------
    new_key_file
        The new key is the only line of this file: 64 hexadecimal digits, or a passphrase.
    new_key_env
        The new key is in this variable.
    new_key_command
        The new key is what this command prints.
    json
        Print JSON (schema holdfast.key/1).
    """
    new = chosen(new_key_file, new_key_env, new_key_command, "New passphrase")
    made = holdfast.keys.add(session.place, new)
    if json:
        session.out.json({"schema": SCHEMA, "did": "add", "key": made.to_json()})
    else:
        session.out.say(f"Key {made.number} opens the store from now on.")
    return 0


@key.command
def remove(number: int, /, *, json: Json = False, session: Given) -> int:
    """Let a key open the store no more. The last one stays.

    Whoever knew it may have kept the master key that it led to; `rotate --full` replaces that, too.

    Parameters
    ----------
    number
        Its number in `holdfast key list`.
    json
        Print JSON (schema holdfast.key/1).
    """
    holdfast.keys.remove(session.place, number)
    if json:
        session.out.json({"schema": SCHEMA, "did": "remove", "key": {"number": number}})
    else:
        session.out.say(f"Key {number} does not open the store any more.")
    return 0


@key.command
def rotate(
    *,
    full: Flag = False,
    discard_old: Flag = False,
    new_key_file: KeyFile = None,
    new_key_env: KeyEnv = None,
    new_key_command: KeyCommand = None,
    json: Json = False,
    session: Given,
) -> int:
    """Put another key in the place of the one that is used now.

    Parameters
    ----------
    full
        Encrypt everything anew with another master key, in a new store that takes the place of this one. Nobody may
        have it open meanwhile, and all other keys are gone afterwards. The old store stays beside it.
    discard_old
        Delete the old store when the new one has its place. Without --full: delete those that are left beside it.
    new_key_file
        The new key is the only line of this file: 64 hexadecimal digits, or a passphrase.
    new_key_env
        The new key is in this variable.
    new_key_command
        The new key is what this command prints.
    json
        Print JSON (schema holdfast.key/1).
    """
    if discard_old and not full:
        return _discard_old(session, json=json, given=any((new_key_file, new_key_env, new_key_command)))
    with bars(session.err) as progress:
        made = holdfast.keys.rotate(
            session.place,
            lambda: chosen(new_key_file, new_key_env, new_key_command, "New passphrase"),
            full=full,
            discard_old=discard_old,
            progress=progress,
        )
    old = [str(one) for one in holdfast.keys.old_stores(session.place)] if full else []
    if json:
        session.out.json({"schema": SCHEMA, "did": "rotate", "full": full, "key": made.to_json(), "old": old})
    elif full:
        session.out.say(f"Everything is encrypted anew. Key {made.number} is the only one that opens the store.")
        for one in old:
            session.out.say(f"The old store is {clean(one)}: `holdfast key rotate --discard-old` deletes it.")
    else:
        session.out.say(f"Key {made.number} opens the store from now on, the one that was used does not.")
    return 0


def _discard_old(session: Session, *, json: bool, given: bool) -> int:
    if given:
        raise BadOption("a new key was named without --full", hint="Add --full, or leave out --discard-old.")
    gone = [str(one) for one in holdfast.keys.discard_old(session.place)]
    if json:
        session.out.json({"schema": SCHEMA, "did": "discard-old", "old": gone})
    for one in gone if not json else ():
        session.out.say(f"Deleted {clean(one)}.")
    if not gone and not json:
        session.out.say("There is no old store beside this one.")
    return 0
