"""``holdfast key``: who can open an encrypted store; and how every verb gets keys.

A key comes from where an option says, or from a person at a terminal. Always holds: no key is an argument, because
arguments are shown to everybody on the machine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import App, Parameter
from rich.text import Text

import holdfast
from holdfast.cli.session import ASKS, Consent, Flag, Given, Json, Session, bars, option
from holdfast.cli.text import ago, clean, now
from holdfast.errors import BadOption, KeyNeeded, NotEncrypted

VARIABLES = ("HOLDFAST_KEY", "HOLDFAST_KEY_FILE", "HOLDFAST_KEY_COMMAND")

Key: TypeAlias = "holdfast.keys.Secret | Literal[False] | None"


_IN_FILE = "The key is the only line of this file: 64 hexadecimal digits, or a passphrase."


@Parameter(name="*")
@dataclass(frozen=True)
class KeySource:
    """Where a new key comes from: the options of a verb that gives one."""

    key_file: Annotated[Path | None, option(_IN_FILE, "FILE")] = None
    key_env: Annotated[str | None, option("The key is in this variable.", "VARIABLE")] = None
    key_command: Annotated[str | None, option("The key is what this command prints.", "COMMAND")] = None

    @property
    def named(self) -> int:
        """How many of them."""
        return sum(value is not None for value in (self.key_file, self.key_env, self.key_command))

    def chosen(self, prompt: str) -> str | holdfast.keys.Secret:
        """The key, or a passphrase that is typed twice."""
        if self.named > 1:
            raise BadOption("more than one place for the key was named", hint="Name one.")
        if self.key_file is not None:
            return holdfast.keys.from_file(self.key_file)
        if self.key_env is not None:
            return holdfast.keys.from_environment(self.key_env)
        if self.key_command is not None:
            return holdfast.keys.from_command(self.key_command)
        if not sys.stdin.isatty():
            raise BadOption(
                "there is no terminal to ask for a passphrase",
                hint="Name a file, a variable or a command that has the key.",
            )
        first = getpass(f"{prompt}: ")
        if getpass("The same again: ") != first:
            raise BadOption("the two passphrases differ", hint="Try again.")
        return first


ASKED = KeySource()
# Beside the key that opens the store, the one that is to open it: --new-key-file and the like.
NewKey = Annotated[KeySource, Parameter(name="*", name_transform=lambda name: f"new-{name.replace('_', '-')}")]
# Where two things have keys: the file of one of them, or "none" when it has no key.
_SOURCE = 'The key of what is read, when it is not that of $HOLDFAST_KEY and the like; "none" when it has none.'
SourceKey = Annotated[str | None, option(_SOURCE, "FILE")]
DestKey = Annotated[str | None, option("The key of the store that is written to, likewise.", "FILE")]

_told: dict[str, str] = {}

key = App(name="key", help="List the keys of an encrypted store; add, remove or replace one.")


@key.default
def list_(*, json: Json = False, session: Given) -> int:
    """List the keys that open the store. Needs none of them."""
    try:
        found = holdfast.keys.listed(session.place)
    except NotEncrypted:
        found = []
    if json:
        return session.json("keys", keys=[one.to_json() for one in found])
    if not found:
        session.out.say("The store is not encrypted: it has no keys.")
        return 0
    rows = [(str(one.number), Text(one.kind, style="bold"), ago(one.created, now())) for one in found]
    session.out.columns(("number", "kind", "added"), rows, right=(0,))
    return 0


@key.command
def add(*, new: NewKey = ASKED, json: Json = False, session: Given) -> int:
    """Let one more key open the store. Without an option a passphrase is asked for."""
    made = holdfast.keys.add(session.place, new.chosen("New passphrase"))
    if json:
        return session.json("key", did="add", key=made.to_json())
    session.out.say(f"Key {made.number} opens the store from now on.")
    return 0


@key.command
def remove(number: int, /, *, consent: Consent = ASKS, session: Given) -> int:
    """Let a key open the store no more. The last one stays.

    Whoever knew it may have kept the master key that it led to; `rotate --full` replaces that, too.

    Parameters
    ----------
    number
        Its number in `holdfast key`.
    """
    known = next((one for one in holdfast.keys.listed(session.place) if one.number == number), None)
    if known is not None and not consent.json:
        session.out.say(
            f"Key {number} ({known.kind}, added {ago(known.created, now())}) will not open the store any more."
        )
    done = known is None or consent.given(session, "Remove it?")
    if done:
        holdfast.keys.remove(session.place, number)  # says so if there is none
    if consent.json:
        session.json("key", did="remove", key={"number": number}, done=done)
    elif done:
        session.out.say(f"Key {number} does not open the store any more.")
    return consent.code(done=done)


@key.command
def rotate(
    *,
    full: Flag = False,
    discard_old: Flag = False,
    new: NewKey = ASKED,
    consent: Consent = ASKS,
    session: Given,
) -> int:
    """Put another key in the place of the one that is used now. With --discard-old alone, delete old stores: asks.

    Parameters
    ----------
    full
        Encrypt everything anew with another master key, in a new store that takes the place of this one. Nobody may
        have it open meanwhile, and all other keys are gone afterwards. The old store stays beside it.
    discard_old
        Delete the old store when the new one has its place. Without --full: delete those that are left beside it.
    """
    if discard_old and not full:
        if new.named:
            raise BadOption("a new key was named without --full", hint="Add --full, or leave out --discard-old.")
        return _discard_old(session, consent)
    if consent.dry_run:
        raise BadOption("--dry-run is for --discard-old", hint="A rotation shows nothing beforehand.")
    with bars(session.err) as progress:
        made = holdfast.keys.rotate(
            session.place,
            lambda: new.chosen("New passphrase"),
            full=full,
            discard_old=discard_old,
            progress=progress,
        )
    old = [str(one) for one in holdfast.keys.old_stores(session.place)] if full else []
    if consent.json:
        return session.json("key", did="rotate", full=full, key=made.to_json(), old=old)
    if full:
        session.out.say(f"Everything is encrypted anew. Key {made.number} is the only one that opens the store.")
        for one in old:
            session.out.say(f"The old store is {clean(one)}: `holdfast key rotate --discard-old` deletes it.")
    else:
        session.out.say(f"Key {made.number} opens the store from now on, the one that was used does not.")
    return 0


def _discard_old(session: Session, consent: Consent) -> int:
    old = [str(one) for one in holdfast.keys.old_stores(session.place)]
    for one in old if not consent.json else ():
        session.out.say(f"Old store: {clean(one)}")
    done = bool(old) and consent.given(session, "Delete it for good?" if len(old) == 1 else "Delete them for good?")
    gone = [str(one) for one in holdfast.keys.discard_old(session.place)] if done else []
    if consent.json:
        session.json("key", did="discard-old", old=gone if done else old, done=done)
    elif not old:
        session.out.say("There is no old store beside this one.")
    elif done:
        session.out.say("Deleted.")
    return consent.code(done=done or not old)


def environment_has_a_key() -> bool:
    return any(os.environ.get(name) for name in VARIABLES)


def key_in(file: str | None) -> Key:
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
