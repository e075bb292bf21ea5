"""The format version and the steps from each older one.

Owns the number that a store carries and the functions that raise it, one version and one transaction at a time.
A step gets a connection inside a transaction, with the writers' lock held, and must leave the catalog as the next
version describes it; the caller then writes the new number in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import apsw

FORMAT_VERSION = 1

Step = Callable[[apsw.Connection], None]

STEPS: Mapping[int, Step] = {}
"""``STEPS[v]`` takes a store of version ``v`` to version ``v + 1``. Version 1 is the first."""


def steps_from(version: int, *, to: int = FORMAT_VERSION, steps: Mapping[int, Step] = STEPS) -> list[Step]:
    """The steps that lead from ``version`` to ``to``; a gap is a mistake of this program and raises KeyError."""
    return [steps[older] for older in range(version, to)]
