"""What differs between two states, as operations that lead from one to the other.

Owns the comparison of sections, containers and items; equal leaves are skipped by digest, so that the cost follows
the difference. It reads documents without handing anything out and changes neither. What always holds: applying the
operations to the first document gives the second, types and order included; an item that is in both stays the same
item, even where its place is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.document import Document
from holdfast.codec.nodes import FLAT, Node
from holdfast.codec.operations import Operation
from holdfast.codec.trees import Leaf

# Aligning items is quadratic at worst: above this many differing items on either side they are paired by content alone.
_ALIGN_MAX_ITEMS = 2_000


def differences(old: Document, new: Document) -> Iterator[Operation]:
    """Operations that turn the state of ``old`` into that of ``new``, to be applied in order."""
    yield from _Comparison(old, new).sections()


class _Comparison:
    """Two documents side by side."""

    def __init__(self, old: Document, new: Document) -> None:
        self._old = old
        self._new = new

    def sections(self) -> Iterator[Operation]:
        old, new = self._old, self._new
        for name in old:
            if name not in new:
                yield Operation(0, op.DELETE, [name], ())
        kept = [name for name in old if name in new]
        moved = set(_out_of_order(kept, list(new)))
        for name in kept:
            if old.section_digest(name) != new.section_digest(name):
                yield from self._values(old.raw_section(name), new.raw_section(name), [name])
        # A section that stands elsewhere in the order goes and comes back at the end, as in a dict.
        for name in kept:
            if name in moved:
                yield Operation(0, op.DELETE, [name], ())
        for name in new:
            if name not in old or name in moved:
                yield self._set([name], new.raw_section(name))

    def _set(self, path: list[Any], value: Any) -> Operation:
        return Operation(0, op.SET, path, (self._new.content(value),))

    def _values(self, old: Any, new: Any, path: list[Any]) -> Iterator[Operation]:
        kind = _kind(old)
        if kind is None or kind is not _kind(new):
            yield self._set(path, new)
        elif kind is dict:
            yield from self._dicts(old, new, path)
        elif kind is list:
            yield from self._lists(old, new, path)
        else:
            before = {self._old.pack(item) for item in set.__iter__(old)}
            after = {self._new.pack(item) for item in set.__iter__(new)}
            if before - after:
                yield Operation(0, op.REMOVE, path, (sorted(before - after),))
            if after - before:
                yield Operation(0, op.ADD, path, (sorted(after - before),))

    def _same(self, x: Any, y: Any) -> bool:
        if x is y and type(x) in FLAT:
            return True
        return self._old.pack(x) == self._new.pack(y)

    def _dicts(self, old: Any, new: Any, path: list[Any]) -> Iterator[Operation]:
        old_keys = {self._old.pack_key(key): key for key in dict.keys(old)}
        new_keys = {self._new.pack_key(key): key for key in dict.keys(new)}
        for data, key in old_keys.items():
            if data not in new_keys:
                yield Operation(0, op.DELETE, [*path, key], ())
        kept = [data for data in old_keys if data in new_keys]
        moved = set(_out_of_order(kept, list(new_keys)))
        for data in kept:
            before, after = dict.__getitem__(old, old_keys[data]), dict.__getitem__(new, new_keys[data])
            if not self._same(before, after):
                yield from self._values(before, after, [*path, old_keys[data]])
        for data in kept:
            if data in moved:
                yield Operation(0, op.DELETE, [*path, old_keys[data]], ())
        for data, key in new_keys.items():
            if data not in old_keys or data in moved:
                yield self._set([*path, key], dict.__getitem__(new, key))

    def _lists(self, old: Any, new: Any, path: list[Any]) -> Iterator[Operation]:
        head, tail = _common_ends(old, new)
        before = list.__getitem__(old, slice(head, len(old) - tail))
        after = list.__getitem__(new, slice(head, len(new) - tail))
        before_data = list(map(self._old.pack, before))
        after_data = list(map(self._new.pack, after))
        first, last = _equal_ends(before_data, after_data)
        head, tail = head + first, tail + last
        before, before_data = before[first : len(before) - last], before_data[first : len(before_data) - last]
        after, after_data = after[first : len(after) - last], after_data[first : len(after_data) - last]
        sources = _align(before_data, after_data)
        if _moves(before, before_data, after_data, sources):
            sources = _match(before_data, after_data)
            yield from self._arrangement(before, after, sources, head, tail, len(old), path)
        else:
            yield from self._splices(before, after, sources, head, path)

    def _splices(
        self, before: list[Any], after: list[Any], sources: list[int | None], start: int, path: list[Any]
    ) -> Iterator[Operation]:
        """The matched items stay where they are; what lies between two of them gives way to what should."""
        at, done = start, 0
        place = 0
        while place <= len(after):
            end = place
            while end < len(after) and sources[end] is None:
                end += 1
            # The loop ends at an item with a source, or at the end.
            stop: int = sources[end] if end < len(after) else len(before)  # type: ignore[assignment]
            gone, come = before[done:stop], after[place:end]
            paired = min(len(gone), len(come))
            for offset in range(paired):
                yield from self._values(gone[offset], come[offset], [*path, at + offset])
            if len(gone) != len(come):
                values = [self._new.content(item) for item in come[paired:]]
                yield Operation(0, op.SPLICE, path, (at + paired, len(gone) - paired, values))
            at += len(come) + 1
            done, place = stop + 1, end + 1

    def _arrangement(
        self,
        before: list[Any],
        after: list[Any],
        sources: list[int | None],
        head: int,
        tail: int,
        size: int,
        path: list[Any],
    ) -> Iterator[Operation]:
        """Items have changed places: say so, and then what is different inside those that are paired."""
        used = {source for source in sources if source is not None}
        free = [at for at in range(len(before)) if at not in used]
        pieces: list[Any] = []
        inside: list[tuple[int, int]] = []
        for at in range(head):
            op.add_piece(pieces, at)
        for place, item in enumerate(after):
            source = sources[place]
            if source is None:
                source = next((at for at in free if _kind(before[at]) is _kind(item) is not None), None)
                if source is not None:
                    free.remove(source)
                    inside.append((source, place))
            if source is None:
                pieces.append([self._new.content(item)])
            else:
                op.add_piece(pieces, head + source)
        for at in range(size - tail, size):
            op.add_piece(pieces, at)
        yield Operation(0, op.ARRANGE, path, (pieces,))
        for source, place in inside:
            yield from self._values(before[source], after[place], [*path, head + place])


def _out_of_order(kept: Sequence[Any], wanted: Sequence[Any]) -> Sequence[Any]:
    """The kept keys that must be taken out and added again, because a dict only grows at its end."""
    length = 0
    while length < len(kept) and kept[length] == wanted[length]:
        length += 1
    return kept[length:]


def _kind(value: Any) -> type | None:
    for kind in (dict, list, set):
        if type(value) is kind or (isinstance(value, Node) and isinstance(value, kind)):
            return kind
    return None


def _equal_ends(before: list[bytes], after: list[bytes]) -> tuple[int, int]:
    shorter = min(len(before), len(after))
    first = last = 0
    while first < shorter and before[first] == after[first]:
        first += 1
    while last < shorter - first and before[-1 - last] == after[-1 - last]:
        last += 1
    return first, last


def _align(before: list[bytes], after: list[bytes]) -> list[int | None]:
    """For each new item the old one that it is, in the same order; None when it is none of them."""
    sources: list[int | None] = [None] * len(after)
    if not before or not after:
        return sources
    if len(before) > _ALIGN_MAX_ITEMS or len(after) > _ALIGN_MAX_ITEMS:
        newest = -1
        for place, source in enumerate(_match(before, after)):
            if source is not None and source > newest:
                sources[place] = newest = source
        return sources
    from difflib import SequenceMatcher

    for old, new, size in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        sources[new : new + size] = range(old, old + size)
    return sources


def _match(before: list[bytes], after: list[bytes]) -> list[int | None]:
    """For each new item an old one with the same content, wherever it stands."""
    free: dict[bytes, list[int]] = {}
    for at in range(len(before) - 1, -1, -1):
        free.setdefault(before[at], []).append(at)
    return [free[data].pop() if free.get(data) else None for data in after]


def _moves(before: list[Any], before_data: list[bytes], after_data: list[bytes], sources: list[int | None]) -> bool:
    """Whether a container that would be dropped here is wanted elsewhere."""
    used = {source for source in sources if source is not None}
    dropped = {before_data[at] for at in range(len(before)) if at not in used and _kind(before[at]) is not None}
    return any(source is None and data in dropped for source, data in zip(sources, after_data, strict=True))


def _common_ends(old: Any, new: Any) -> tuple[int, int]:
    """How many items at the start and at the end are equal because their leaves are."""
    x: list[Leaf] = old._tree.leaves if isinstance(old, Node) and old._tree is not None else []
    y: list[Leaf] = new._tree.leaves if isinstance(new, Node) and new._tree is not None else []
    head = tail = first = last = 0
    shorter = min(len(x), len(y))
    while first < shorter and x[first].digest is not None and x[first].digest == y[first].digest:
        head += x[first].count
        first += 1
    while last < shorter - first and x[-1 - last].digest is not None and x[-1 - last].digest == y[-1 - last].digest:
        tail += x[-1 - last].count
        last += 1
    return head, tail
