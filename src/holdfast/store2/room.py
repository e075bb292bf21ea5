"""How much of the caller's stack is left.

Owns the limit below which nothing is begun. A program that recurses without end comes by here sooner or later with its
last frames: a ``RecursionError`` then has to come before something was changed, not in the middle of it.
"""

from __future__ import annotations

import sys

FRAMES = 100
"""More than anything in this package needs on its way to the disk and back."""


def check_room(frames: int = FRAMES) -> None:
    """Raise RecursionError, as Python would in a moment, where fewer frames are left."""
    try:
        sys._getframe(max(1, sys.getrecursionlimit() - frames))  # noqa: SLF001 - nothing else tells, or as fast
    except ValueError:  # the stack is not that deep
        return
    raise RecursionError("maximum recursion depth exceeded")
