"""Which store is meant, and which stores this process has open.

Owns finding a store from where a program is, the one object that each place has, and what becomes of all of them when
the process ends, or another one takes its place. What a store does is its own business. What always holds: opening the
same place twice in one process gives the same object.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.agent import unsaved
from holdfast.errors import BadOption, HoldfastError, KeyNeeded
from holdfast.store import copies, keys
from holdfast.store.database import Database, shown
from holdfast.store.files import unavailable
from holdfast.store.keys import Key, find_secret
from holdfast.text import is_url

if TYPE_CHECKING:
    from holdfast.agent.store import Store

DEFAULT_DIRECTORY = ".holdfast"
log = logging.getLogger("holdfast.agent")

# Held for as long as they are open: a store that is merely forgotten still holds its branches.
_open: dict[str, Store] = {}
_open_lock = threading.Lock()

S = TypeVar("S", bound="Store")


def place_of(path: str | os.PathLike[str] | None) -> str:
    """Which store is meant: its URL, or its directory, resolved. Without a path, the one that is found from here."""
    named = path if path is not None else _find_store()
    if isinstance(named, str) and is_url(named):
        return named
    if is_url(os.fspath(named)):
        raise BadOption("the address of a server is text, not a path", hint='holdfast.open("postgresql://...")')
    return os.path.realpath(named)


def _find_store() -> str:
    """$HOLDFAST_STORE, or the nearest .holdfast here or above (as git finds its own), or ./.holdfast."""
    named = os.environ.get("HOLDFAST_STORE")
    if named:
        return named
    try:
        here = Path.cwd().resolve()
        for directory in (here, *here.parents):
            if (directory / DEFAULT_DIRECTORY).is_dir():
                return str(directory / DEFAULT_DIRECTORY)
    except OSError as error:  # going on would find another store, or make one
        raise unavailable(error, "looking for a store") from error
    return str(here / DEFAULT_DIRECTORY)


def say_created(place: str) -> None:
    if sys.stderr is not None:
        print(f"holdfast: created a new store at {place}", file=sys.stderr)  # noqa: T201 - said once, to people


def opened(
    kind: type[S],
    place: str,
    options: tuple[Any, ...],
    types: Sequence[Any],
    key: Key,
    opening: Callable[..., Database],
) -> S:
    """The store at a place, as it is open here, or else as ``opening`` gives it."""
    secret = find_secret(key)
    with _open_lock:
        store = _open.get(place)
        if store is not None and not store.closed:
            if store._options != options or not isinstance(store, kind):
                raise BadOption(
                    f"{store.place} is open in this process already, with other options",
                    hint="Close that store first, or open it with the same options.",
                )
            if secret is not None:
                store._db.check_secret(secret)
        else:
            existed = is_url(place) or os.path.exists(place)  # noqa: PTH110  a disk that fails is reported below
            try:
                db = opening(secret=secret)
            except KeyNeeded:
                if key is False or keys.ask is None:
                    raise
                db = opening(secret=keys.ask(shown(place)))
            if not existed:
                say_created(place)
            if db.lost_effects:
                from holdfast.agent import recovery

                recovery.doubt(db)
            _open[place] = store = kind(place, db, options)
        store._register(types)
        return store


def forget(place: str, store: Store) -> None:
    """A store was closed."""
    with _open_lock:
        if _open.get(place) is store:
            del _open[place]


def open_stores() -> list[Store]:
    """The stores that this process has open."""
    return [store for store in list(_open.values()) if not store.closed]


# -- for a process that ends, and for one that takes the place of another ----------------------------------------------


def _here() -> list[Store]:
    """As ``open_stores``, and those whose closing was cut short."""
    return [store for store in list(_open.values()) if not store._db.released and store._pid == os.getpid()]


def settle_all() -> None:
    """Bring everything that was made to disk, in every open store."""
    for store in _here():
        store.flush()


def release_all() -> None:
    """Let go of every open store: another process is about to open them. Nothing waits to be written."""
    for store in _here():
        store._db.close()


@atexit.register
def _at_exit() -> None:
    """What the program leaves open loses its changes, too. Before the room below lets go, which has come first."""
    unsaved.said_at_exit([handle for store in _here() for handle in list(store._handles.values())])


def read_only_from_here() -> None:
    """In a forked child that changes nothing: the stores that its parent has open are read, when they are used."""
    copies.READING.append(os.getpid())
    for store in _open.values():
        store._pid = os.getpid()


def reopen_all() -> None:
    """In a forked child, when its parent has let go: the stores and handles that it had are this process's now."""
    for store in list(_open.values()):
        if store._db.released or store._pid == os.getpid():
            continue
        try:
            store._db.inherit()
            store._pid = os.getpid()
            for handle in list(store._handles.values()):
                handle._take_again()
        except HoldfastError as error:  # whoever uses it is told
            log.warning("%s could not be opened again after going back to a fork point: %s", store.place, error)
