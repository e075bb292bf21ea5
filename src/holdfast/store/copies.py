"""Copies of this process, made by forks: which there are, and where this one is inside of something that has some.

Owns what every room asks before it writes, or would let a copy take over. Must not know how copies are made
(``process/``), and costs nothing to import: declaring a tool loads this and nothing else of the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.errors import ForkPointOpen

OWN: set[int] = set()
"""The copies that this process has made and waits for itself."""

INSIDE: list[str] = []
"""What this process is inside of, in words, where what it does may be undone, or done by others at the same time."""

READING: list[int] = []
"""Not empty in a copy that only reads: stores are opened again for that when they are first used."""

OBSTACLES: list[Callable[[], str]] = []
"""What stands in the way of a copy that may take this process's place, in words; empty: nothing does."""


def check_outside(what: str) -> None:
    """Raise where ``what`` would be done in a memory that may not be the one that goes on."""
    if INSIDE:
        raise ForkPointOpen(
            f"{what} {INSIDE[-1]}: it would still be there when the memory that did it is gone; nothing was done",
            hint="Do it after the block, with what came out of it. Tools that only read may be called inside.",
        )


os.register_at_fork(after_in_child=OWN.clear)
