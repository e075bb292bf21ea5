"""From given values to encodings: what is proven unchanged is not encoded again.

Owns the encoding of a section's items one by one, with the same result as encoding the section at once: where an
instance is shared between items, the section is one whole value. Must not know documents or storage. What always holds:
nothing that is held changes here; a trace is kept only if the items were the same before and after they were encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from ormsgpack import packb

from holdfast.codec import refusals
from holdfast.codec.assigned.held import Held
from holdfast.codec.assigned.parts import Parts, opened, pack
from holdfast.codec.blocks import DICT, INLINE_MAX_BYTES, LIST, SET, VALUE
from holdfast.codec.codes import SCALARS, UNWRAP
from holdfast.codec.document.packing import is_whole, trackable
from holdfast.codec.instances import NeedsWhole
from holdfast.codec.lowering import Walk
from holdfast.codec.sameness import Evidence, Match, Trace, runs, trace
from holdfast.codec.types import Registry
from holdfast.codec.values import decode, encode
from holdfast.codec.wire import OPTION, big_int
from holdfast.errors import Unencodable

# A dict below this is encoded again in less time than it takes to trace what it holds now.
_TRACED_DICT_BYTES = 4096
_ITEM_DEPTH = 2  # an item sits in the section's container, and that in the state
Label = Callable[[int], Any]


class Content:
    """What a section is to hold. ``whole`` is its own encoding, where that is not just its items put together."""

    __slots__ = ("big", "evidence", "items", "keys", "kind", "names", "proven", "whole")

    def __init__(self, kind: bytes, items: list[bytes], evidence: Evidence) -> None:
        self.kind = kind
        self.items = items
        self.keys: list[bytes] | None = None
        self.names: list[Any] | None = None
        self.big: dict[bytes, Parts] = {}
        self.evidence = evidence
        self.whole: bytes | None = None
        self.proven = False  # whether the items are those that the section has


class _Again(Exception):
    """The items must be looked at together, or with more care."""


class Taking:
    """Takes values in, for one document."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def take(self, value: Any, held: Held | None) -> Content | None:
        """The content that a section gets with ``value``; None when it is proven to have it. Raises Unencodable."""
        kind = type(value)
        if kind in UNWRAP:  # a container of a live document: by value, as everything else
            value = decode(encode(value, self._registry, depth=1), self._registry)
            kind = type(value)
        if kind is list:
            return self._list(value, held)
        if kind is dict and trackable(value):
            return self._dict(value, held)
        return self._single(value, held)

    # -- lists and dicts --------------------------------------------------------------------------------

    def _list(self, value: list[Any], held: Held | None) -> Content | None:
        values = value.copy()
        known = held if held is not None and held.kind == LIST else _EMPTY
        content = self._items(LIST, values, known, lambda index: index) or self._together(values, values, LIST)
        return None if content.proven else content

    def _dict(self, value: dict[Any, Any], held: Held | None) -> Content | None:
        pairs = value.copy()  # at once, whatever other threads do
        names, values = list(pairs), list(pairs.values())
        known = held if held is not None and held.kind == DICT else _EMPTY

        def label(index: int) -> Any:
            return refusals.label(names[index])

        content = self._items(DICT, values, known, label) or self._together(pairs, values, DICT)
        if content.kind == DICT:
            content.names = names
            before = known.names
            if before is not None and len(before) == len(names) and all(map(is_, before, names)):
                if content.proven:
                    return None
                content.keys = known.keys
            elif content.keys is None:
                content.keys = [self._key(name) for name in names]
        return content

    def _key(self, name: Any) -> bytes:
        try:
            return packb(name, big_int, OPTION)
        except TypeError:
            return encode(name, self._registry)

    def _items(self, kind: bytes, values: list[Any], known: Held, label: Label) -> Content | None:
        """Item by item; None when the items have to be looked at together."""
        work = _Work(self._registry, known.evidence, label)
        work.traces = kind == LIST or known.tree is not None or known.payload_bytes() >= _TRACED_DICT_BYTES
        matches = known.evidence.matches(values) if known.evidence is not None else []
        at = work.go_on(known, matches)
        content = Content(kind, work.items, work.evidence)
        content.proven = 0 < at == len(values)
        try:
            for match in () if at else matches:
                work.encode(values, at, match.now)
                at = match.now + len(match.trace.items)
                work.reuse(known.items[match.before : match.before + at - match.now], match, values)
            work.encode(values, at, len(values))
        except (_Again, NeedsWhole):
            return None
        if work.long:
            self._split(content, known)
        elif known.big:
            content.big = known.big
        return content

    def _split(self, content: Content, known: Held) -> None:
        """Items over the limit stand in the section in another form."""
        for index, data in enumerate(content.items):
            if len(data) > INLINE_MAX_BYTES and data not in known.big:
                parts = Parts({}, {})
                packed = content.items[index] = pack(data, self._registry, parts)
                if parts.nodes or parts.chunks:
                    content.big[packed] = parts
        if known.big:
            content.big = known.big | content.big

    def _together(self, value: Any, values: list[Any], kind: bytes) -> Content:
        """The section at once: whether it is one whole value is known only then."""
        found = [(stop - start, trace(values[start:stop], self._registry)) for start, stop in runs(values)]
        data = encode(value, self._registry, depth=1)
        evidence = Evidence()
        if is_whole(data):
            return self._value(data, evidence)
        for count, run in found:
            evidence.append(run if run is not None and run.unchanged() else None, count)
        parts = opened(data, self._registry)
        content = Content(kind, parts.items, evidence)
        content.keys = parts.keys
        self._split(content, _EMPTY)
        return content

    # -- everything else --------------------------------------------------------------------------------

    def _single(self, value: Any, held: Held | None) -> Content | None:
        if type(value) in SCALARS:  # nothing to trace, and compared in less time than a proof takes
            content = self._value(encode(value, self._registry, depth=1), Evidence())
            return None if held is not None and held.kind == VALUE and held.items == content.items else content
        if held is not None and held.kind in {VALUE, SET} and held.evidence and held.evidence.matches([value]):
            return None
        run = trace([value], self._registry)
        data = encode(value, self._registry, depth=1)
        evidence = Evidence()
        evidence.append(run if run is not None and run.unchanged() else None, 1)
        if type(value) is not set or not trackable(value):
            return self._value(data, evidence)
        content = Content(SET, sorted(opened(data, self._registry).items), evidence)
        content.whole = data
        self._split(content, _EMPTY)
        content.items.sort()
        return content

    def _value(self, data: bytes, evidence: Evidence) -> Content:
        parts = Parts({}, {})
        packed = pack(data, self._registry, parts)
        content = Content(VALUE, [packed], evidence)
        if parts.nodes or parts.chunks:
            content.big[packed] = parts
        return content


_EMPTY = Held(VALUE, [])


class _Work:
    """One section's items in the making."""

    def __init__(self, registry: Registry, before: Evidence | None, label: Label) -> None:
        self.items: list[bytes] = []
        self.evidence = Evidence()
        self.long = False  # whether an item is over the limit
        self.traces = True
        self._registry = registry
        self._label = label
        self._loose = before.loose if before is not None else {}
        # Ids of instances in items without a trace, and what keeps those alive that were made on the way.
        self._met: set[int] = set()
        self._walks: list[Walk] = []

    def go_on(self, known: Held, matches: list[Match]) -> int:
        """When all items are what and where they were, begin with them; returns how many."""
        size = sum(len(match.trace.items) for match in matches)
        if (
            not matches
            or size != len(known.items)
            or any(match.before != match.now or match.holes for match in matches)
        ):
            return 0
        self.items += known.items
        self.evidence = known.evidence.copy()  # type: ignore[union-attr] # the matches are from there
        return size

    def reuse(self, items: list[bytes], match: Match, values: list[Any]) -> None:
        """Items that are what they were, except in the match's holes."""
        run = match.trace
        if match.holes:
            new = [values[match.now + hole] for hole in match.holes]
            traced = self._trace(new)
            if traced is None:
                self.encode(values, match.now, match.now + len(items))
                return
            for hole, item in zip(match.holes, new, strict=True):
                items[hole] = self._encodings([item], match.now + hole)[0][0]
            if not traced.unchanged():
                raise _Again
            run = run.patched(match.holes, traced)
        self._add(run, run.instances, items)

    def encode(self, values: list[Any], start: int, stop: int) -> None:
        """Items that have to be encoded."""
        part = values[start:stop]
        if not self.traces:
            if part:
                self._encode(part, None, start)
            return
        for first, last in runs(part):
            chunk = part[first:last]
            run = self._trace(chunk)
            if run is None and len(chunk) > 1:
                # One of them cannot be followed; the others can.
                for index, item in enumerate(chunk, start + first):
                    self._encode([item], self._trace([item]), index)
            else:
                self._encode(chunk, run, start + first)

    def _trace(self, items: list[Any]) -> Trace | None:
        if self._loose and any(self._loose.get(id(item)) is item for item in items if type(item) not in SCALARS):
            return None
        return trace(items, self._registry)

    def _encode(self, items: list[Any], run: Trace | None, offset: int) -> None:
        made, walk = self._encodings(items, offset)
        if run is not None and run.unchanged():
            self._add(run, run.instances, made)
            return
        if run is None and self.traces:
            self.evidence.loose[id(items[0])] = items[0]
        self._walks.append(walk)
        self._add(None, walk.met.keys(), made)

    def _encodings(self, items: list[Any], offset: int) -> tuple[list[bytes], Walk]:
        walk = Walk(self._registry)
        made: list[bytes] = []
        try:
            for item in items:
                lowered = item if type(item) in SCALARS else walk.lower(item, _ITEM_DEPTH)
                made.append(packb(lowered, big_int, OPTION))
        except Unencodable as error:
            raise error.within(self._label(offset + len(made))) from None
        except (TypeError, RecursionError):
            raise _Again from None
        if walk.risky or walk.first_references:
            raise _Again
        self.long = self.long or max(map(len, made)) > INLINE_MAX_BYTES
        return made, walk

    def _add(self, run: Trace | None, instances: Any, items: list[bytes]) -> None:
        if not self.evidence.instances.isdisjoint(instances) or not self._met.isdisjoint(instances):
            raise NeedsWhole
        if run is None:
            self._met.update(instances)
        self.evidence.append(run, len(items))
        self.items += items
