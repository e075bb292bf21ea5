"""What differs between two contents, as hunks and as operations that lead from one to the other.

Owns the alignment of items and the choice of operations. It compares bytes, so what is written and what is read cannot
disagree, and it skips what has the same digest, so that the cost follows the difference. What always holds: doing the
operations on the first content gives the second, types and order included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, pairwise
from operator import is_not
from typing import Any, NamedTuple

import msgspec

from holdfast.codec import operations as op
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, Opened, key_of, open_inline, opened, root_of
from holdfast.codec.operations import part_of
from holdfast.codec.tree import Fetch, Hunk, Tree

Relative = tuple[int, tuple[Any, ...], tuple[Any, ...]]
"""An operation with the path below a container: code, path, arguments."""

_MAPS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
# Bytes that an arrangement must save to be worth it.
_ARRANGE_SAVES = 256
# Bytes that setting a container whole must save: people read what changed inside it.
_WHOLE_SAVES = 256
# So many keys are looked up one by one; for more, all are read once.
_SINGLY = 64
# What an operation takes besides its values, about: its row, and each part of its path.
_OPERATION_BYTES, _PART_BYTES = 12, 8


class Differ:
    """Compares contents. ``tree`` gives a tree by its root, or None when it is not at hand."""

    def __init__(self, tree: Callable[[bytes], Tree | None], fetch: Fetch) -> None:
        self._tree, self._fetch = tree, fetch
        self.known: dict[tuple[bytes | None, bytes | None], list[Relative]] = {}

    def values(self, old: bytes, new: bytes) -> list[Relative]:
        """Operations that turn one encoding into another. An empty path sets it whole."""
        if old == new:
            return []
        roots = root_of(old), root_of(new)
        if roots in self.known:
            return self.known[roots]
        if old[0] in _MAPS and new[0] in _MAPS:
            found = self._fields(old, new)
            if found is not None:
                return found
        before, after = self._open(old), self._open(new)
        if before is None or after is None or before.kind != after.kind:
            return [(op.SET, (), (new,))]
        if isinstance(before, Tree) and isinstance(after, Tree):
            return self.trees(before, after)
        one, two = self._opened(before), self._opened(after)
        ops = self.operations(one.kind, len(one.items), len(two.items), item_hunks(one.kind, one.pairs, two.pairs))
        if roots[1] is None and too_dear(ops, len(new)):
            return [(op.SET, (), (new,))]
        return ops

    def _fields(self, old: bytes, new: bytes) -> list[Relative] | None:
        """A message of which some fields are others, in a hurry; None when it is something else."""
        one, two = _FIELDS.decode(old), _FIELDS.decode(new)
        if list(one) != list(two):
            return None
        found: list[Relative] = []
        for name, before in one.items():
            after = two[name]
            if before != after:
                found += under((name,), self.values(bytes(before), bytes(after)))
        return [(op.SET, (), (new,))] if too_dear(found, len(new)) else found

    def _open(self, data: bytes) -> Tree | Opened | None:
        root = root_of(data)
        return self._tree(root) if root is not None else open_inline(data)

    def _opened(self, content: Tree | Opened) -> Opened:
        return opened(content.kind, content.all(self._fetch)) if isinstance(content, Tree) else content

    def trees(self, old: Tree, new: Tree) -> list[Relative]:
        """Operations that turn one tree of a kind into another of that kind."""
        found = self.known.get((old.root, new.root))
        if found is None:
            found = self.operations(old.kind, old.count, new.count, tree_hunks(old, new, self._fetch))
            self.known[old.root, new.root] = found
        return found

    def operations(self, kind: bytes, before: int, after: int, hunks: list[Hunk]) -> list[Relative]:
        """Operations for the hunks of a container that had ``before`` items and has ``after`` now."""
        if not hunks:
            return []
        if kind == LIST and len(hunks) == 1 and hunks[0].start == before:  # by far the most frequent
            return [(op.SPLICE, (), (before, 0, hunks[0].items))]
        if before and not after:
            return [(op.CLEAR, (), ())]
        if kind == LIST:
            return self._list(before, hunks)
        if kind == SET:
            gone = {item for hunk in hunks for item in hunk.old}
            come = {item for hunk in hunks for item in hunk.items}
            both = (op.REMOVE, sorted(gone - come)), (op.ADD, sorted(come - gone))
            return [(code, (), (items,)) for code, items in both if items]
        if kind == VALUE:
            return [(op.SET, (), (hunks[0].items[0],))]
        return self._dict(hunks)

    def _dict(self, hunks: list[Hunk]) -> list[Relative]:
        """First what goes, then what is another, then what is new, in its order."""
        ops: list[Relative] = [
            (op.DELETE, (part_of(key_of(item)),), ()) for hunk in hunks if not hunk.items for item in hunk.old
        ]
        for hunk in hunks:
            if hunk.start == hunk.stop:
                for pair in hunk.items:
                    key = key_of(pair)
                    ops.append((op.SET, (part_of(key),), (pair[len(key) :],)))
            else:
                for old, new in zip(hunk.old, hunk.items, strict=False):
                    key = key_of(new)
                    ops += under((part_of(key),), self.values(old[len(key) :], new[len(key) :]))
        return ops

    def _list(self, count: int, hunks: list[Hunk]) -> list[Relative]:
        arranged = _arranged(count, hunks)
        if arranged is not None and 2 * cost([arranged]) < sum([sum(map(len, hunk.items)) for hunk in hunks]):
            return [arranged]
        ops: list[Relative] = []
        shift = 0
        for start, stop, items, old in hunks:
            at = start + shift
            if stop - start == len(items):
                for index, (before, after) in enumerate(zip(old, items, strict=True), at):
                    ops += under((index,), self.values(before, after))
            else:
                ops.append((op.SPLICE, (), (at, stop - start, items)))
                shift += len(items) - stop + start
        return [arranged] if arranged is not None and cost([arranged]) < cost(ops) else ops


def under(path: tuple[Any, ...], ops: list[Relative]) -> list[Relative]:
    """Operations with a longer path."""
    return [(code, path + inner, args) for code, inner, args in ops]


def cost(ops: Iterable[Relative]) -> int:
    """About how many bytes operations take."""
    total = 0
    for code, path, args in ops:
        total += _OPERATION_BYTES + _PART_BYTES * len(path)
        for value in values_of(code, args):
            total += len(value)
        if code == op.ARRANGE:
            total += _PART_BYTES * len(args[0])
    return total


def too_dear(ops: Iterable[Relative], size: int) -> bool:
    """Whether setting a container of this size whole takes so much less that it is worth not seeing what changed."""
    return cost(ops) > 2 * size + _WHOLE_SAVES


def values_of(code: int, args: tuple[Any, ...]) -> Iterable[bytes]:
    """The encodings among an operation's arguments."""
    if code == op.SET:
        return args
    if code == op.SPLICE:
        return args[2]  # type: ignore[no-any-return]
    if code == op.ARRANGE:
        return [piece[0] for piece in args[0] if len(piece) == 1]
    return args[0] if code in (op.ADD, op.REMOVE) else ()


def _arranged(count: int, hunks: list[Hunk]) -> Relative | None:
    """One arrangement instead, when much of what comes is what goes, in another order."""
    gone = [item for hunk in reversed(hunks) for item in reversed(hunk.old)]
    if not gone or (len(gone) == len(hunks) == len(hunks[0].items) == 1):  # nothing comes; one item is another
        return None
    places = [place for hunk in reversed(hunks) for place in reversed(range(hunk.start, hunk.stop))]
    free = dict(zip(gone, places, strict=True))  # where each item that goes was; first where it was first
    take = free.pop if len(free) == len(gone) else _takes(free, gone, places)
    pieces: list[tuple[Any, ...]] = []
    at = come = 0
    for hunk in hunks:
        if hunk.start > at:
            pieces.append((at, hunk.start - at, 1))
        pieces += op.pieces_of(map(take, hunk.items, hunk.items))
        come += sum(map(len, hunk.items))
        at = hunk.stop
    if at < count:
        pieces.append((at, count - at, 1))
    made = op.ARRANGE, (), (pieces,)
    return made if come - sum(map(len, values_of(op.ARRANGE, (pieces,)))) >= _ARRANGE_SAVES else None


def _takes(free: dict[bytes, int], gone: list[bytes], places: list[int]) -> Callable[[bytes, bytes], int | bytes]:
    """``free.pop``, where some items were in more places than one."""
    others: dict[bytes, list[int]] = {}
    for item, place in zip(gone, places, strict=True):
        if free[item] != place:
            others.setdefault(item, []).append(place)

    def take(item: bytes, default: bytes) -> int | bytes:
        place = free.pop(item, default)
        if others.get(item):
            free[item] = others[item].pop()
        return place

    return take


# -- alignment ----------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """``old[start:stop]`` gave way to ``new[at:to]``."""

    start: int
    stop: int
    at: int
    to: int


def tree_hunks(old: Tree, new: Tree, fetch: Fetch) -> list[Hunk]:
    """What differs between two trees of one kind. Leaves that both have are not looked at."""
    if old.root == new.root:
        return []
    found: list[Hunk] = []
    for span in aligned([leaf.entry for leaf in old.leaves], [leaf.entry for leaf in new.leaves]):
        start, stop = _border(old, span.start), _border(old, span.stop)
        at, to = _border(new, span.at), _border(new, span.to)
        before, after = old.part(start, stop, fetch), new.part(at, to, fetch)
        inner = item_hunks(old.kind, before, after)
        found += [Hunk(start + one.start, start + one.stop, one.items, one.old) for one in inner]
    if old.kind == DICT and any(hunk.start == hunk.stop < old.count for hunk in found):
        # Keys that are not at the end come in another order: the whole dict decides which of them stay.
        return item_hunks(DICT, old.all(fetch), new.all(fetch))
    return found


def _border(tree: Tree, leaf: int) -> int:
    return tree.starts[leaf] if leaf < len(tree.leaves) else tree.count


def item_hunks(kind: bytes, old: list[bytes], new: list[bytes]) -> list[Hunk]:
    """What differs between the items of two containers of one kind; a dict's are pairs."""
    if kind == DICT:
        spans = _in_their_places(old, new)
        if spans is None:
            spans = rekeyed(list(map(key_of, old)), old, list(map(key_of, new)), new)
    elif kind == LIST and len(old) == len(new) and old != new and _rearranged(old, new):
        spans = [Span(0, len(old), 0, len(new))]  # all in another order
    else:
        spans = aligned(old, new)
    return [Hunk(span.start, span.stop, new[span.at : span.to], old[span.start : span.stop]) for span in spans]


def _in_their_places(old: list[bytes], new: list[bytes]) -> list[Span] | None:
    """What differs between a dict's items where only values do: keys of thousands that are the same are not asked."""
    if len(old) != len(new):
        return None
    places = [index for index in compress(range(len(old)), map(is_not, old, new)) if old[index] != new[index]]
    if any(key_of(old[index]) != key_of(new[index]) for index in places):
        return None
    return [Span(index, index + 1, index, index + 1) for index in places]


def _rearranged(old: list[bytes], new: list[bytes]) -> bool:
    """Whether the items are the same in another order."""
    now = set(map(id, new))  # often they are the very same objects
    return (len(now) == len(old) and not now.difference(map(id, old))) or sorted(old) == sorted(new)


def aligned(old: Sequence[bytes], new: Sequence[bytes]) -> list[Span]:
    """What differs, in order. Equal sequences have no span."""
    size = len(old)
    if new[:size] == old:  # the common case: nothing, or something at the end
        return [Span(size, size, size, len(new))] if len(new) > size else []
    whole = _trimmed(old, new, Span(0, size, 0, len(new)))
    if whole.start == whole.stop or whole.at == whole.to:
        return [whole]
    if whole.stop - whole.start == whole.to - whole.at:
        shift = whole.at - whole.start
        places = [index for index in range(whole.start, whole.stop) if old[index] != new[index + shift]]
        if 2 * len(places) <= whole.stop - whole.start:
            return _in_place(places, shift)
    return _around_anchors(old, new, whole)


def _trimmed(old: Sequence[bytes], new: Sequence[bytes], span: Span) -> Span:
    """Without what is the same at both ends."""
    start, stop, at, to = span
    while start < stop and at < to and old[start] == new[at]:
        start += 1
        at += 1
    while start < stop and at < to and old[stop - 1] == new[to - 1]:
        stop -= 1
        to -= 1
    return Span(start, stop, at, to)


def _in_place(places: list[int], shift: int) -> list[Span]:
    """As many items as before, and most of them stand where they stood: those that do not."""
    found: list[Span] = []
    start = last = places[0]
    for index in [*places[1:], -1]:
        if index != last + 1:
            found.append(Span(start, last + 1, start + shift, last + 1 + shift))
            start = index
        last = index
    return found


def _around_anchors(old: Sequence[bytes], new: Sequence[bytes], span: Span) -> list[Span]:
    """What lies between items that are there once before and once now, as many of those as are in order."""
    once_before = {item for item, count in Counter(old[span.start : span.stop]).items() if count == 1}
    once_now = {item for item, count in Counter(new[span.at : span.to]).items() if count == 1}
    common = once_before & once_now
    if not common:
        return [span]
    before = {old[index]: index for index in range(span.start, span.stop) if old[index] in common}
    anchors = _in_order([(before[new[index]], index) for index in range(span.at, span.to) if new[index] in common])
    borders = [(span.start - 1, span.at - 1), *anchors, (span.stop, span.to)]
    gaps = [
        _trimmed(old, new, Span(left[0] + 1, right[0], left[1] + 1, right[1]))
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


def keeping(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many keys at the front of ``new`` can stay where they are in ``old``; all others go, or come at the end."""
    where = {key: index for index, key in enumerate(old)}
    last = -1
    for count, key in enumerate(new):
        place = where.get(key, -1)
        if place <= last:
            return count
        last = place
    return len(new)


def pair_hunks(tree: Tree, items: Mapping[bytes, bytes | None], fetch: Fetch) -> list[Hunk]:
    """What becomes of a dict's tree when some items, by the encodings of their keys, are others, or, if None, go."""
    if len(items) <= _SINGLY:
        places = {key: tree.place(key, fetch) for key in items}
        old = {key: tree.part(at, at + 1, fetch)[0] for key, at in places.items() if at >= 0}
    else:
        pairs = [(key_of(pair), pair) for pair in tree.all(fetch)]
        places = {key: at for at, (key, _) in enumerate(pairs)}
        old = dict(pairs)
    found: list[Hunk] = []
    come: list[bytes] = []
    for key, item in items.items():
        new = [key + item] if item is not None else []
        if key not in old:
            come += new
        elif new != [old[key]]:
            found.append(Hunk(places[key], places[key] + 1, new, [old[key]]))
    found.sort()
    return [*found, Hunk(tree.count, tree.count, come)] if come else found


def rekeyed(old_keys: list[bytes], old: list[bytes], new_keys: list[bytes], new: list[bytes]) -> list[Span]:
    """As ``aligned``, for a dict: an item keeps its place, goes, or comes at the end, as operations on dicts do it."""
    count = keeping(old_keys, new_keys)
    where = {key: index for index, key in enumerate(old_keys)}
    kept = {where[key]: at for at, key in enumerate(new_keys[:count])}
    found: list[Span] = []
    to = 0
    for index, item in enumerate(old):
        at = kept.get(index)
        if at is None:
            if found and found[-1].stop == index and found[-1].at == found[-1].to:
                found[-1] = found[-1]._replace(stop=index + 1)
            else:
                found.append(Span(index, index + 1, to, to))
            continue
        to = at + 1
        if item != new[at]:
            found.append(Span(index, index + 1, at, to))
    if count < len(new):
        found.append(Span(len(old), len(old), count, len(new)))
    return found
