"""Where lives are lived (tests/faults/lives.py): what a life is, what it begins with, and what must be true afterwards.

What always holds: a life begins with the same files at the same path each time, and ``check`` compares what it left
with all that was acknowledged, byte for byte, before and in it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast.errors import KeyNeeded, WrongKey
from tests.faults import crashes, script
from tests.faults.campaign import quiet, remembering
from tests.faults.script import Broken, Ledger
from tests.memory import memory

KEY = "5e" * 32
NEW_KEY = "6f" * 32


def check(folder: Path, ledger: Ledger) -> None:
    """On a disk that works: all that was acknowledged is there, nothing is damaged anywhere, work goes on."""
    for path in sorted(catalog.parent for catalog in folder.rglob("store.db")):
        place = path.relative_to(folder)
        if str(place) in {"store", "damaged", "damaged-secret"} or "/." in f"/{place}" or ".old-" in path.name:
            continue  # others look at these, somebody died before it was one, or it has given its place to another
        check_store(path)
    path = folder / "store"
    with holdfast.open(path, create=not ledger.opened) as store:
        report = store.verify()
        if not report.ok:
            raise Broken(f"verify: {report}")
        ledger.check(store)
        crashes.work_on(store, random.Random(3))
        left = sorted(entry.name for entry in (path / "packs").glob("tmp-*"))
        if len(left) > 1:
            raise Broken(f"more was left behind than one death explains: {left}")


def check_store(path: Path) -> None:
    """A store that need not have anything in it: whatever is there is whole."""
    with opened(path) as store:
        report = store.verify()
        if not report.ok:
            raise Broken(f"verify of {path.name}: {report}")
        crashes.work_on(store, random.Random(3))


@contextmanager
def opened(path: Path) -> Iterator[holdfast.Store]:
    """With whichever key opens it."""
    for key in (False, KEY, NEW_KEY):
        with suppress(KeyNeeded, WrongKey), holdfast.open(path, key=key) as store:
            yield store
            return
    raise Broken(f"no key opens {path.name}")


@dataclass(frozen=True)
class Life:
    """``prepare`` is not part of it: what it leaves is there when the life begins, and is made once."""

    name: str
    live: Callable[[Path, Ledger], None]
    prepare: Callable[[Path, Ledger], None]
    check: Callable[[Path, Ledger], None]


LIVES: dict[str, Life] = {}


def life(
    prepare: Callable[[Path, Ledger], None] = lambda _folder, _ledger: None,
    check: Callable[[Path, Ledger], None] = check,
) -> Callable[[Callable[[Path, Ledger], None]], Callable[[Path, Ledger], None]]:
    def register(live: Callable[[Path, Ledger], None]) -> Callable[[Path, Ledger], None]:
        name = live.__name__.replace("_", " ")
        LIVES[name] = Life(name, live, prepare, check)
        return live

    return register


class Stage:
    """Where lives are lived, one after the other, always at the same path: what a user has seen of a store has one."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "disk"
        self._root = root
        self._said: dict[str, list[str]] = {}

    def begin(self, life: Life) -> Ledger:
        """All as it is when this life begins."""
        ready = self._root / life.name
        if life.name not in self._said:
            said: list[str] = []
            self.empty()
            life.prepare(self.folder, Ledger(told=said.append))
            shutil.copytree(self.folder, ready, symlinks=True)
            self._said[life.name] = said
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(ready, self.folder, symlinks=True)
        return self.ledger(life)

    def ledger(self, life: Life) -> Ledger:
        """What was acknowledged when this life began."""
        ledger = Ledger()
        for line in self._said[life.name]:
            ledger.read(line)
        return ledger

    def empty(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()


@contextmanager
def stage() -> Iterator[Stage]:
    """A stage in memory. One life has been lived in this process before: what that loads, no try has to load again."""
    with memory() as root, quiet(), script.small():
        made = Stage(root)
        with remembering(made.folder / "state"):
            made.empty()
            script.perform(made.folder / "store", Ledger())
            yield made
