"""Where a container may differ from what the store was told of it.

A mark is a doubt, never a statement: whoever changes a container marks it first, and what is marked is encoded and
compared when the state is captured. A mark too many costs time; one that does not fit, because C code changed something
as well, turns into a doubt about everything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

# More regions of one list are joined pairwise: then more is compared, and nothing is missed.
REGIONS_MAX = 512


class _Gone:
    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


GONE: Any = _Gone()
"""In the place of a value that is not there."""


def _start(region: list[int]) -> int:
    return region[0]


def _stop(region: list[int]) -> int:
    return region[1]


class ListMarks:
    """Regions that may differ, [start, stop, told start, told stop] each, and children that changed inside.

    ``tail`` has the encodings of the last items as they were put in; None where one is not known. ``carried``: by
    the id of a child that changed places where it was told to be; ``held`` keeps these children.
    """

    __slots__ = ("all", "carried", "held", "kids", "regions", "tail")

    def __init__(self) -> None:
        self.all = False
        self.regions: list[list[int]] = []
        self.kids: dict[int, Any] = {}
        self.tail: list[bytes | None] = []
        self.carried: dict[int, int] = {}
        self.held: list[Any] = []

    @property
    def empty(self) -> bool:
        """Whether nothing is marked."""
        return not (self.all or self.regions or self.kids)

    def appended(self, at: int, data: bytes | None) -> None:
        """An item comes at the end, where the list has ``at`` items."""
        regions = self.regions
        if regions and regions[-1][1] == at:
            regions[-1][1] = at + 1
        elif not regions:
            regions.append([at, at + 1, at, at])
        else:
            self._splice(at, 0, 1)
        self.tail.append(data)

    def spliced(self, size: int, start: int, removed: int, added: list[bytes | None]) -> None:
        """``removed`` of ``size`` items at ``start`` give way to others."""
        if start == size:
            self.tail += added
        elif start + removed > size - len(self.tail):
            self.tail = []
        self._splice(start, removed, len(added))

    def _splice(self, start: int, removed: int, added: int) -> None:
        regions, stop = self.regions, start + removed
        low = bisect_left(regions, start, key=_stop)
        high = bisect_right(regions, stop, low, key=_start)
        if low == high:
            shift = regions[low - 1][1] - regions[low - 1][3] if low else 0
            regions.insert(low, [start, start + added, start - shift, stop - shift])
        else:
            first, last = regions[low], regions[high - 1]
            begin, end = min(start, first[0]), max(stop, last[1])
            regions[low:high] = [[begin, end + added - removed, first[2] - first[0] + begin, last[3] - last[1] + end]]
        if added != removed:
            for region in regions[low + 1 :]:
                region[0] += added - removed
                region[1] += added - removed
        if len(regions) > REGIONS_MAX:
            pairs = zip(regions[::2], regions[1::2], strict=False)
            joined = [[one[0], two[1], one[2], two[3]] for one, two in pairs]
            self.regions = joined + (regions[-1:] if len(regions) % 2 else [])

    def fits(self, size: int, told: int) -> bool:
        """Whether the regions explain the length: C code may have changed it as well."""
        if self.all:
            return False
        if not self.regions:
            return told == size
        _, stop, _, old_stop = self.regions[-1]
        return stop <= size and old_stop <= told and size - stop == told - old_stop

    def told_index(self, index: int) -> int:
        """Where an item was told to be; -1 inside a region."""
        low = bisect_right(self.regions, index, key=_start)
        if not low:
            return index
        region = self.regions[low - 1]
        return -1 if index < region[1] else index - region[1] + region[3]


class DictMarks:
    """Keys that may differ, each with whether it was away in between; encodings of values as they were put in."""

    __slots__ = ("all", "given", "keys")

    def __init__(self) -> None:
        self.all = False
        self.keys: dict[Any, bool] = {}
        self.given: dict[Any, bytes] = {}


class SetMarks:
    """Items that may differ: what the set holds for each now, or GONE."""

    __slots__ = ("all", "items")

    def __init__(self) -> None:
        self.all = False
        self.items: dict[Any, Any] = {}
