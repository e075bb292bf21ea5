"""The keys of an encrypted store: making one, listing, adding, removing and replacing them.

What people call ``holdfast.keys``. Owns the words; the file, the slots and the encryption are the store's. A key is
given as in ``holdfast.open(key=...)``: a passphrase, 64 hexadecimal digits, 32 bytes, or None for the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from holdfast.agent.store import find_store
from holdfast.errors import BadOption, KeyNeeded
from holdfast.store import files, keysources, rekeying
from holdfast.store.catalog import Progress
from holdfast.store.keys import Secret, Slot, secret_of
from holdfast.store.keysources import Key, find_secret, from_command, from_environment, from_file
from holdfast.store.opening import create_store

__all__ = [
    "KeyInfo",
    "Secret",
    "add",
    "ask_with",
    "from_command",
    "from_environment",
    "from_file",
    "init",
    "listed",
    "remove",
    "rotate",
    "secret_of",
]

StorePath = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key that opens a store: its number, its kind (``passphrase`` or ``key``), and since when."""

    number: int
    kind: str
    created: datetime

    def to_json(self) -> dict[str, object]:
        return {"number": self.number, "kind": self.kind, "created": self.created.isoformat()}


def _info(slot: Slot) -> KeyInfo:
    return KeyInfo(slot.number, slot.kind, datetime.fromtimestamp(slot.created / 1e6, UTC))


def _place(path: StorePath) -> Path:
    return Path(os.path.realpath(path if path is not None else find_store()))


def ask_with(ask: Callable[[Path], Secret]) -> None:
    """How a person is asked for the key of a store that turns out to be encrypted. Otherwise nobody is asked."""
    keysources.ask = ask


def init(path: StorePath = None, key: Key | Callable[[], Key] = False) -> Path:
    """Make a new store; with a key, an encrypted one. Raises if there is a store already.

    A function that gives the key is called when there is none.
    """
    place = _place(path)
    if files.classify(place):
        hint = "An existing store cannot be encrypted in place: make a new one, and push this one into it."
        raise BadOption(f"there is a store at {place} already", hint=hint if key is not False else "")
    create_store(place, secret=find_secret(key() if callable(key) else key))
    return place


def listed(path: StorePath = None) -> list[KeyInfo]:
    """The keys that open a store. Needs none of them."""
    return [_info(slot) for slot in rekeying.keys_of(_place(path)).slots]


def add(path: StorePath, new: str | bytes | Secret, *, key: Key = None) -> KeyInfo:
    """Let one more key open the store."""
    place = _place(path)
    return _info(rekeying.add_key(place, _current(place, key), _new(new)))


def remove(path: StorePath, number: int, *, key: Key = None) -> None:
    """Let a key open the store no more."""
    place = _place(path)
    rekeying.remove_key(place, _current(place, key), number)


def rotate(
    path: StorePath,
    new: str | bytes | Secret | Callable[[], str | bytes | Secret] | None = None,
    *,
    key: Key = None,
    full: bool = False,
    progress: Progress | None = None,
) -> KeyInfo:
    """Put another key in the place of the one that is given.

    ``full`` also replaces what everything is encrypted with: all other keys are gone then, and whoever has the store
    open is refused. If that was interrupted, doing it again with the new key finishes it. ``new`` may be a function
    that is called when it is known to be needed.
    """
    place = _place(path)

    def wanted() -> Secret:
        given = new() if callable(new) else new
        if given is None:
            raise BadOption("no new key was given", hint="Give the key that shall open the store from now on.")
        return _new(given)

    rekeying.keys_of(place)
    secret = _current(place, key)
    if not full:
        return _info(rekeying.replace_key(place, secret, wanted()))
    rekeying.replace_master(place, secret, wanted, progress)
    return listed(place)[0]


def _new(given: str | bytes | Secret) -> Secret:
    return given if isinstance(given, Secret) else secret_of(given)


def _current(place: Path, key: Key) -> Secret:
    rekeying.keys_of(place)
    secret = find_secret(key)
    if secret is None and keysources.ask is not None and key is None:
        secret = keysources.ask(place)
    if secret is None:
        raise KeyNeeded(
            f"{place} is encrypted", hint="Give the key: key=, HOLDFAST_KEY, HOLDFAST_KEY_FILE or HOLDFAST_KEY_COMMAND."
        )
    return secret
