"""Sets of numbers that mostly follow each other, as sorted pairs of first and last.

Owns the form in which the format lists the numbers of what was forgotten. Knows nothing of what is numbered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain


class Ranges:
    """An immutable set of numbers."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, pairs: Iterable[Sequence[int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in sorted((int(first), int(last)) for first, last in pairs):
            if self._lasts and first <= self._lasts[-1] + 1:
                self._lasts[-1] = max(self._lasts[-1], last)
            else:
                self._firsts.append(first)
                self._lasts.append(last)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Ranges:
        return cls((number, number) for number in numbers)

    @property
    def pairs(self) -> list[list[int]]:
        """As the format writes them."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]

    @property
    def last(self) -> int:
        """The highest number, 0 when there is none."""
        return self._lasts[-1] if self._lasts else 0

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges(chain(self.pairs, other.pairs)) if other else self

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __iter__(self) -> Iterator[int]:
        for first, last in zip(self._firsts, self._lasts, strict=True):
            yield from range(first, last + 1)

    def upto(self, most: int) -> Ranges:
        """Those that are not above ``most``."""
        return Ranges((first, min(last, most)) for first, last in self.pairs if first <= most)
