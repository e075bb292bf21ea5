"""The keys of an encrypted store: making one, listing, adding, removing and replacing them.

What people call ``holdfast.keys``. Owns the words; the file, the slots and the encryption are the store's. A key is
given as in ``holdfast.open(key=...)``: a passphrase, 64 hexadecimal digits, 32 bytes, or None for the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from holdfast.agent.places import place_of
from holdfast.errors import BadOption, KeyNeeded, NotAStore, NotEncrypted
from holdfast.store import files, keys
from holdfast.store.catalog import Progress, View
from holdfast.store.changes import now_us
from holdfast.store.cipher import PLAIN
from holdfast.store.database import open_database, reading, shown
from holdfast.store.keys import (
    Key,
    Keys,
    Secret,
    Slot,
    find_secret,
    from_command,
    from_environment,
    from_file,
    secret_of,
)
from holdfast.text import is_url

__all__ = [
    "KeyInfo",
    "Secret",
    "add",
    "ask_with",
    "discard_old",
    "from_command",
    "from_environment",
    "from_file",
    "init",
    "listed",
    "old_stores",
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
        """In JSON's own types."""
        return {"number": self.number, "kind": self.kind, "created": self.created.isoformat()}


def _info(slot: Slot) -> KeyInfo:
    return KeyInfo(slot.number, slot.kind, datetime.fromtimestamp(slot.created / 1e6, UTC))


def ask_with(ask: Callable[[str], Secret]) -> None:
    """How a person is asked for the key of a store that turns out to be encrypted. Otherwise nobody is asked."""
    keys.ask = ask


def init(path: StorePath = None, key: Key | Callable[[], Key] = False, *, objects: str | None = None) -> str:
    """Make a new store; with a key, an encrypted one. Raises if there is a store already. Returns where it is.

    A function that gives the key is called when there is none. ``objects`` as in ``holdfast.open``.
    """
    place = place_of(path)
    if (known := _there(place)) is not None:
        hint = "An existing store cannot be encrypted in place: make a new one, and push this one into it."
        raise BadOption(f"there is a store at {known} already", hint=hint if key is not False else "")
    secret = find_secret(key() if callable(key) else key)
    with closing(open_database(place, secret=secret, objects=objects)) as db:
        return db.place


def _there(place: str) -> str | None:
    """How the store at a place is called, if there is one."""
    if not is_url(place):
        return place if files.classify(Path(place)) else None
    try:
        with reading(place) as engine:
            return engine.place
    except NotAStore:
        return None


def listed(path: StorePath = None) -> list[KeyInfo]:
    """The keys that open a store. Needs none of them."""
    return [_info(slot) for slot in _known(place_of(path)).slots]


def add(path: StorePath, new: str | bytes | Secret, *, key: Key = None) -> KeyInfo:
    """Let one more key open the store."""
    return _info(_changed(place_of(path), key, lambda known, master, _: known.with_slot(master, _new(new), now_us())))


def remove(path: StorePath, number: int, *, key: Key = None) -> None:
    """Let a key open the store no more."""
    _changed(place_of(path), key, lambda known, master, slot: (known.without(master, number), slot))


def rotate(
    path: StorePath,
    new: str | bytes | Secret | Callable[[], str | bytes | Secret] | None = None,
    *,
    key: Key = None,
    full: bool = False,
    discard_old: bool = False,
    progress: Progress | None = None,
) -> KeyInfo:
    """Put another key in the place of the one that is given.

    ``full`` also replaces what everything is encrypted with: a new store is written beside the old one, proven, and
    put in its place, which nobody may have open meanwhile; all other keys are gone then. The old one stays beside it
    unless ``discard_old`` says otherwise. ``new`` may be a function that is called when it is known to be needed.
    """
    place = place_of(path)

    def wanted() -> Secret:
        given = new() if callable(new) else new
        if given is None:
            raise BadOption("no new key was given", hint="Give the key that shall open the store from now on.")
        return _new(given)

    if not full:
        return _info(
            _changed(place, key, lambda known, master, slot: known.with_slot(master, wanted(), now_us(), slot))
        )
    from holdfast.agent import move

    move.rotate(place, _current(place, key), wanted, discard_old=discard_old, progress=progress)
    return listed(place)[0]


def old_stores(path: StorePath = None) -> list[Path]:
    """The stores that full rotations have left beside this one."""
    from holdfast.agent import move

    place = place_of(path)
    return [] if is_url(place) else move.old_ones(Path(place))


def discard_old(path: StorePath = None) -> list[Path]:
    """Delete the stores that full rotations have left beside this one. Returns where they were.

    Raises ``StoreFailed`` if something of them is left.
    """
    from holdfast.agent import move

    place = place_of(path)
    return [] if is_url(place) else move.discard_old(place)


def _new(given: str | bytes | Secret) -> Secret:
    return given if isinstance(given, Secret) else secret_of(given)


def _known(place: str) -> Keys:
    """The keys of a store, read without any of them."""
    with reading(place) as engine:
        found = keys.read_slots(View(engine, PLAIN))
    if found is None:
        raise NotEncrypted(
            f"{shown(place)} is not encrypted", hint="Make an encrypted store, and push this one into it."
        )
    return found


def _current(place: str, key: Key) -> Secret:
    _known(place)
    secret = find_secret(key)
    if secret is None and keys.ask is not None and key is None:
        secret = keys.ask(shown(place))
    if secret is None:
        raise KeyNeeded(
            f"{shown(place)} is encrypted",
            hint="Give the key: key=, HOLDFAST_KEY, HOLDFAST_KEY_FILE or HOLDFAST_KEY_COMMAND.",
        )
    return secret


def _changed(place: str, key: Key, change: Callable[[Keys, bytes, Slot], tuple[Keys, Slot]]) -> Slot:
    """Change the keys of a store; gives the slot that the change is about."""
    secret = _current(place, key)
    known = _known(place)
    made, slot = change(known, *known.unlock(secret))
    with closing(open_database(place, create=False, secret=secret)) as db:
        db.change(lambda change: keys.write_slots(change, made, over=known))
    return slot
