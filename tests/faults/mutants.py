"""The campaigns themselves are tried: faults are put into Holdfast, and the named campaign must find each one.

A mutant is our own code, changed while it runs, in a process of its own. One that no campaign finds is a hole in the
campaigns, and is reported like any other broken promise.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.agent import collection
from holdfast.agent.store import Store
from holdfast.store import catalog, changes, cipher, files, objects, packs, sqlite
from tests.faults import crashes, damage, failing, writers  # noqa: F401  their campaigns are hunted with
from tests.faults.campaign import CAMPAIGNS, Task, campaign
from tests.faults.isolated import Died, isolated


@dataclass(frozen=True)
class Mutant:
    """``apply`` breaks Holdfast; ``by`` is the campaign that has to find it, within ``count`` tries."""

    name: str
    apply: Callable[[], None]
    by: str
    count: int
    only: str = ""


def no_flush_of_packs() -> None:
    objects.Folder._flush = lambda _self, _flush: None


def no_flush_of_the_log() -> None:
    settle = sqlite.settle

    def unsafe(connection: Any, *, readonly: bool) -> None:
        settle(connection, readonly=readonly)
        connection.execute("PRAGMA synchronous=OFF").fetchall()

    sqlite.settle = unsafe


def no_flush_of_directories() -> None:
    files.fsync_directory = objects.fsync_directory = lambda _path: None


def no_rename() -> None:
    """A store is built where it will be, instead of beside it."""

    def create(path: Path, build_catalog: files.BuildCatalog) -> None:
        path.mkdir()
        files._build(files.Layout(path), build_catalog)

    files.create = create


def early_acknowledgement() -> None:
    """The barrier of batched checkpoints does not wait."""
    Store.flush = lambda _self: None


def short_writes_ignored() -> None:
    def write(self: objects.Folder, path: Path, pieces: Any) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            size = 0
            for piece in pieces:
                os.write(fd, piece)
                size += len(piece)
            self._flush(lambda: os.fsync(fd))
            return size
        finally:
            os.close(fd)

    objects.Folder._write = write


def flush_retried() -> None:
    """A flush that failed is tried again, and believed when it then succeeds."""

    def flush(_self: objects.Folder, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            what()

    objects.Folder._flush = flush


class _Anything(bytes):
    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def hashes_not_checked() -> None:
    """Sums and digests are computed as ever, and whatever they are compared with counts as equal."""

    def believed(function: Callable[..., bytes]) -> Callable[..., bytes]:
        return lambda *parts: _Anything(function(*parts))

    cipher.Cipher._sum = believed(cipher.Cipher._sum)
    packs.chunk_digest = believed(packs.chunk_digest)
    catalog.node_digest = believed(catalog.node_digest)
    real, proving = catalog.digest, believed(catalog.digest)
    catalog.digest = lambda tag, *parts: (proving if tag in {b"operations", b"record"} else real)(tag, *parts)


def _careless(*ignored: str) -> None:
    """Commits are compared with the branch as it is, not as their writer believes it to be."""
    move = changes.Change.move

    def careless(self: changes.Change, old: Any, new: Any) -> None:
        there = catalog.View(self.tx, self.cipher).branch_at(old.b)
        move(self, old._replace(**{name: getattr(there, name) for name in ignored}), new)

    changes.Change.move = careless


def head_not_compared() -> None:
    _careless("head", "line", "generation")


def no_fencing() -> None:
    _careless("generation")


def collection_races() -> None:
    """A collection does not look again at what was saved since it looked, once nobody else can write any more."""
    mark = collection.Reached.mark
    marked: set[int] = set()

    def hasty(self: collection.Reached, *args: Any, **options: Any) -> None:
        if id(self) not in marked:
            marked.add(id(self))
            mark(self, *args, **options)
            time.sleep(0.4)  # the moment in which it matters, made longer

    collection.Reached.mark = hasty


MUTANTS = [
    Mutant("no flush of packs", no_flush_of_packs, "crashes", 3_000),
    Mutant("no flush of the log", no_flush_of_the_log, "crashes", 1_000),
    Mutant("no flush of directories", no_flush_of_directories, "crashes", 3_000),
    Mutant("no rename", no_rename, "crashes", 300),
    Mutant("early acknowledgement", early_acknowledgement, "crashes", 1_000),
    Mutant("short write ignored", short_writes_ignored, "failing", 10_000, only="write pack"),
    Mutant("flush retried", flush_retried, "flush", 400, only="made twice"),
    Mutant("hash not checked", hashes_not_checked, "bytes", 5_000),
    Mutant("head not compared", head_not_compared, "writers", 8_000),
    Mutant("no fencing", no_fencing, "writers", 8_000),
    Mutant("collection racing a writer", collection_races, "writers", 8_000),
]


class Caught(Exception):
    """The campaign has found something, which is all that is asked of it here."""


class Hunt(Task):
    """A run of a campaign that ends with its first finding."""

    def broke(self, text: str) -> None:
        raise Caught(text)


def hunt(mutant: Mutant, seed: int) -> str:
    """What the campaign found of the mutant; empty when nothing."""
    mutant.apply()
    task = Hunt(mutant.count, seed=seed, only=mutant.only)
    try:
        CAMPAIGNS[mutant.by].run(task)
    except Caught as found:
        return str(found)
    return ""


@campaign("mutants", "mutants of our own code", "mutants", ci=2, soak=len(MUTANTS), by_seed=False)
def mutants(task: Task) -> None:
    """Faults put into Holdfast on purpose; each must be found by the campaign that is named for it."""
    for mutant in MUTANTS if task.count >= len(MUTANTS) else QUICK:
        if task.over:
            return
        try:
            found = isolated(lambda _say, mutant=mutant: hunt(mutant, task.seed), limit_s=1_800)
        except (AssertionError, Died) as error:  # who falls over has not found anything
            task.broke(f"{mutant.name}: {mutant.by} fell over: {error}")
            task.tried(f"{mutant.name}: not found")
            continue
        if not found:
            task.broke(f"{mutant.name}: {mutant.by} did not find it")
        task.tried(f"{mutant.name}: found by {mutant.by}" if found else f"{mutant.name}: not found")


QUICK = [mutant for mutant in MUTANTS if mutant.name in {"no rename", "early acknowledgement"}]
