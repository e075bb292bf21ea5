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

from msgspec.structs import replace

from holdfast.agent import collecting
from holdfast.store import cipher, commits, files, opening, packs, reading, sqlite, writing
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
    packs.SystemIo.fsync = lambda _self, _fd: None


def no_flush_of_the_log() -> None:
    settle = sqlite.settle

    def unsafe(connection: Any, *, readonly: bool) -> None:
        settle(connection, readonly=readonly)
        connection.execute("PRAGMA synchronous=OFF").fetchall()

    sqlite.settle = opening.settle = unsafe


def no_flush_of_directories() -> None:
    packs.SystemIo.fsync_directory = lambda _self, _path: None
    files.fsync_directory = packs.fsync_directory = lambda _path: None


def no_rename() -> None:
    """A store is built where it will be, instead of beside it."""

    def claim(path: Path) -> tuple[Path, int]:
        path.mkdir()
        return path, os.open(path, os.O_RDONLY)

    files._claim = claim


def early_acknowledgement() -> None:
    """The barrier of batched checkpoints does not wait."""
    commits.Batches.flush = lambda _self, _b=None: None


def short_writes_ignored() -> None:
    def write_staged(self: packs.Packs, fd: int, length: int, offset: int) -> int:
        size = max(packs.round_up(length), packs.ALIGN_BYTES)
        self._io.pwrite(fd, memoryview(self._staging)[:size], offset)
        return size

    packs.Packs._write_staged = write_staged


def flush_retried() -> None:
    """A flush that failed is tried again, and believed when it then succeeds."""

    def flush(_self: packs.Packs, what: Callable[[], None]) -> None:
        try:
            what()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            what()

    packs.Packs._flush = flush


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

    cipher.row_sum = believed(cipher.row_sum)
    packs.chunk_digest = believed(packs.chunk_digest)
    reading.node_digest = believed(reading.node_digest)
    reading.metadata_digest = believed(reading.metadata_digest)


def _careless(**ignored: Callable[[Any], Any]) -> None:
    """Commits are compared with the branch as it is, not as their writer believes it to be."""
    move = writing.Writer._move_head

    def careless(self: writing.Writer, commit: Any, n: int) -> Any:
        row = self.read_branch(commit.b)
        self._heads.pop(commit.b, None)
        return move(self, replace(commit, **{name: value(row) for name, value in ignored.items()}), n)

    writing.Writer._move_head = careless


def head_not_compared() -> None:
    _careless(parent_id=lambda row: row.head_id, generation=lambda row: row.generation)


def no_fencing() -> None:
    _careless(generation=lambda row: row.generation)


def collection_races() -> None:
    """A collection does not look again at what was saved since it looked, once nobody else can write any more."""
    mark, take = collecting.Collection.mark, collecting.Collection.take

    def slow(self: collecting.Collection) -> None:
        mark(self)
        time.sleep(0.4)  # the moment in which it matters, made longer

    def hasty(self: collecting.Collection, most: int) -> Any:
        self._mark = lambda _pace: None  # type: ignore[method-assign]
        return take(self, most)

    collecting.Collection.mark = slow
    collecting.Collection.take = hasty


MUTANTS = [
    Mutant("no flush of packs", no_flush_of_packs, "crashes", 3_000),
    Mutant("no flush of the log", no_flush_of_the_log, "crashes", 1_000),
    Mutant("no flush of directories", no_flush_of_directories, "crashes", 3_000),
    Mutant("no rename", no_rename, "crashes", 300),
    Mutant("early acknowledgement", early_acknowledgement, "crashes", 1_000),
    Mutant("short write ignored", short_writes_ignored, "failing", 10_000, only="write pack"),
    Mutant("flush retried", flush_retried, "flush", 400),
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
