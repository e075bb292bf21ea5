"""What became of a sequence of encodings: the places that differ, and nothing else.

Owns the comparison of item encodings. Must not know what they mean. What always holds: replacing every hunk's old items
by its new ones makes the new sequence of the old one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import compress, pairwise
from operator import is_not
from typing import NamedTuple


class Hunk(NamedTuple):
    """``old[start:stop]`` gave way to ``new[at:to]``."""

    start: int
    stop: int
    at: int
    to: int


def hunks(old: Sequence[bytes], new: Sequence[bytes]) -> list[Hunk]:
    """What differs, in order. Equal sequences have no hunk."""
    size = len(old)
    if new[:size] == old:  # the common case: nothing, or something at the end
        return [Hunk(size, size, size, len(new))] if len(new) > size else []
    whole = _trimmed(old, new, Hunk(0, size, 0, len(new)))
    if whole.start == whole.stop or whole.at == whole.to:
        return [whole]
    if whole.stop - whole.start == whole.to - whole.at:
        shift = whole.at - whole.start
        places = [index for index in range(whole.start, whole.stop) if old[index] != new[index + shift]]
        if 2 * len(places) <= whole.stop - whole.start:
            return _in_place(places, shift)
    return _around_anchors(old, new, whole)


def _trimmed(old: Sequence[bytes], new: Sequence[bytes], hunk: Hunk) -> Hunk:
    """Without what is the same at both ends."""
    start, stop, at, to = hunk
    while start < stop and at < to and old[start] == new[at]:
        start += 1
        at += 1
    while start < stop and at < to and old[stop - 1] == new[to - 1]:
        stop -= 1
        to -= 1
    return Hunk(start, stop, at, to)


def _in_place(places: list[int], shift: int) -> list[Hunk]:
    """As many items as before, and most of them stand where they stood: those that do not."""
    found: list[Hunk] = []
    start = last = places[0]
    for index in [*places[1:], -1]:
        if index != last + 1:
            found.append(Hunk(start, last + 1, start + shift, last + 1 + shift))
            start = index
        last = index
    return found


def _around_anchors(old: Sequence[bytes], new: Sequence[bytes], hunk: Hunk) -> list[Hunk]:
    """What lies between items that are there once before and once now, as many of those as are in order."""
    once_before = {item for item, count in Counter(old[hunk.start : hunk.stop]).items() if count == 1}
    once_now = {item for item, count in Counter(new[hunk.at : hunk.to]).items() if count == 1}
    common = once_before & once_now
    if not common:
        return [hunk]
    before = {old[index]: index for index in range(hunk.start, hunk.stop) if old[index] in common}
    anchors = _in_order([(before[new[index]], index) for index in range(hunk.at, hunk.to) if new[index] in common])
    borders = [(hunk.start - 1, hunk.at - 1), *anchors, (hunk.stop, hunk.to)]
    gaps = [
        _trimmed(old, new, Hunk(left[0] + 1, right[0], left[1] + 1, right[1]))
        for left, right in pairwise(borders)
        if right[0] - left[0] != 1 or right[1] - left[1] != 1
    ]
    return [gap for gap in gaps if gap.start < gap.stop or gap.at < gap.to]


def _in_order(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of the pairs, which rise in the second number, that rises in the first, too."""
    ends: list[int] = []  # the smallest last number of a rising run of each length, and which pair it is
    which: list[int] = []
    previous: list[int] = []
    for index, (number, _) in enumerate(pairs):
        length = bisect_left(ends, number)
        previous.append(which[length - 1] if length else -1)
        if length == len(ends):
            ends.append(number)
            which.append(index)
        else:
            ends[length], which[length] = number, index
    found = []
    at = which[-1]
    while at >= 0:
        found.append(pairs[at])
        at = previous[at]
    return found[::-1]


def rekeyed(old_keys: list[bytes], old: list[bytes], new_keys: list[bytes], new: list[bytes]) -> list[Hunk]:
    """As ``hunks``, for a dict: an item keeps its place, goes, or comes at the end, as operations on dicts do it."""
    if old_keys == new_keys:
        places = compress(range(len(old)), map(is_not, old, new))
        return [Hunk(index, index + 1, index, index + 1) for index in places if old[index] != new[index]]
    wanted = set(new_keys)
    staying = [index for index, key in enumerate(old_keys) if key in wanted]
    count = 0
    for index, key in zip(staying, new_keys, strict=False):
        if old_keys[index] != key:
            break
        count += 1
    kept = dict(zip(staying[:count], range(count), strict=True))
    found: list[Hunk] = []
    to = 0
    for index, item in enumerate(old):
        at = kept.get(index)
        if at is None:
            if found and found[-1].stop == index and found[-1].at == found[-1].to:
                found[-1] = found[-1]._replace(stop=index + 1)
            else:
                found.append(Hunk(index, index + 1, to, to))
            continue
        to = at + 1
        if item != new[at]:
            found.append(Hunk(index, index + 1, at, to))
    if count < len(new):
        found.append(Hunk(len(old), len(old), count, len(new)))
    return found
