"""What every campaign has in common: how much it is to try, how it tells of it, and what it found.

A campaign is a function of a ``Task`` that counts what it tried with ``task.tried()`` and reports each broken promise
with ``task.broke()``. It never stops at the first one. ``python -m tests.faults`` runs them in full and draws the
table; tests/faults/test_campaigns.py runs a share of each. Something that this machine cannot do is skipped with a
reason, never counted as passed.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from holdfast.store.sqlite import Sqlite

ROOT = Path(__file__).resolve().parents[2]
FOUND_MAX = 50
"""After so many broken promises a campaign has shown what it can; more would only repeat it."""

T = TypeVar("T")


class Skip(Exception):
    """This machine cannot do it; the text says why."""


@dataclass
class Task:
    """One run of a campaign: up to ``count`` tries, or until ``seconds`` are over, whichever comes first."""

    count: int
    seconds: float | None = None
    seed: int = 1
    say: Callable[[int, int, str], None] = lambda _done, _total, _text: None
    details: Counter[str] = field(default_factory=Counter)
    places: dict[str, set[str]] = field(default_factory=dict)  # each counted once, however many processes came there
    found: list[str] = field(default_factory=list)
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    only: str = ""  # of the places where this campaign looks, only those with this in their name
    part: int = 0  # which of the processes this is that share a list of things to try
    parts: int = 1

    @property
    def over(self) -> bool:
        """Whether it is time to end."""
        late = self.seconds is not None and time.monotonic() - self.began > self.seconds
        return late or self.done >= self.count or len(self.found) >= FOUND_MAX

    def mine(self, everything: Iterable[T]) -> list[T]:
        """Of all that there is to try, what this process is to try, shuffled, ``count`` at most.

        Whoever has little time so sees something of everything. No two processes try the same: whose a thing is is told
        by what it is, not by where it stands, because their lists may differ a little.
        """
        chosen = [thing for thing in everything if crc32(repr(thing).encode()) % self.parts == self.part]
        random.Random(self.seed).shuffle(chosen)
        self.count = min(self.count, len(chosen))
        return chosen[: self.count]

    def tried(self, what: str = "", number: int = 1) -> None:
        """Something was tried; ``what`` is counted for the report."""
        self.done += number
        if what:
            self.details[what] += number
        self.say(self.done, self.count, what)

    def broke(self, text: str) -> None:
        """A promise was not kept."""
        self.found.append(text)


@dataclass(frozen=True)
class Campaign:
    """``ci`` and ``soak`` are how much it tries in continuous integration and in full."""

    name: str
    title: str
    unit: str
    run: Callable[[Task], None]
    ci: int
    soak: int
    by_seed: bool  # whether another seed tries something else, so that processes can share it
    by_part: bool  # whether processes can share it because each takes its part with ``Task.mine``

    @property
    def shareable(self) -> bool:
        return self.by_seed or self.by_part


CAMPAIGNS: dict[str, Campaign] = {}


def campaign(
    name: str, title: str, unit: str, *, ci: int, soak: int, by_seed: bool = True, by_part: bool = False
) -> Callable[[Callable[[Task], None]], Callable[[Task], None]]:
    """Make a function a campaign. Its docstring is what the report says about how it is done."""

    def register(function: Callable[[Task], None]) -> Callable[[Task], None]:
        CAMPAIGNS[name] = Campaign(name, title, unit, function, ci, soak, by_seed and not by_part, by_part)
        return function

    return register


@contextmanager
def remembering(folder: Path) -> Iterator[None]:
    """What this user has seen of stores is kept below this folder.

    Campaigns put files back by copying them. They are the same as before all the same: a crash changes no inode.
    """
    before, identity = os.environ.get("XDG_STATE_HOME"), Sqlite.identity
    os.environ["XDG_STATE_HOME"] = str(folder)
    Sqlite.identity = lambda _self: b"the same"
    try:
        yield
    finally:
        Sqlite.identity = identity
        if before is None:
            del os.environ["XDG_STATE_HOME"]
        else:
            os.environ["XDG_STATE_HOME"] = before


@contextmanager
def quiet() -> Iterator[None]:
    """Without the line that says that a store was made."""
    import sys

    before = sys.stderr
    with Path(os.devnull).open("w") as nowhere:
        sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stderr = before
