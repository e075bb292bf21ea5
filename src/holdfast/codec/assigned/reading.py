"""From stored nodes to sections of encodings, and from those to values.

Owns what is read from a source, and the check of its form. Must not know checkpoints or changes. What always holds:
bytes that do not follow the format raise Damaged and nothing else; every value is decoded anew, so nobody shares it.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec import codes
from holdfast.codec.assigned.copies import Copies
from holdfast.codec.assigned.held import Held
from holdfast.codec.assigned.parts import BigReader, Opened, Parts, closed, opened, split
from holdfast.codec.blocks import DICT, DIGEST_BYTES, LIST, SET, VALUE, digest_of, leaf_items
from holdfast.codec.document.sections import Source
from holdfast.codec.models import models
from holdfast.codec.pause import collector_paused
from holdfast.codec.trees import Tree, read_tree
from holdfast.codec.types import Registry
from holdfast.codec.values import decode
from holdfast.codec.wire import array_of
from holdfast.errors import CorruptValue

NOTHING = Parts({}, {})


class Reader:
    """Reads for one document."""

    def __init__(self, registry: Registry, source: Source | None) -> None:
        self.registry = registry
        self._source = source

    # -- stored sections ------------------------------------------------------------------------------

    def nodes(self, digests: list[bytes], near: Parts) -> dict[bytes, bytes]:
        """Verified nodes: from ``near`` what is there, the others from the source."""
        found = {digest: near.nodes[digest] for digest in digests if near.nodes.get(digest)}
        missing = [digest for digest in digests if digest not in found]
        if missing:
            if self._source is None:
                raise CorruptValue("a node is named that is nowhere", what=(f"node {missing[0].hex()[:16]}",))
            found.update(self._source.nodes(missing))
        return found

    def section(self, root: bytes, near: Parts = NOTHING) -> Held:
        """What is stored under a root digest."""
        raw = self.nodes([root], near)[root]
        kind = raw[:1]
        tree: Tree | None = None
        rows = [raw]
        if kind != VALUE:
            try:
                tree, rows = read_tree(kind, root, lambda digests: self.nodes(digests, near))
            except (ValueError, IndexError) as error:
                raise CorruptValue(f"node {root.hex()[:16]}: {error}", what=(f"node {root.hex()[:16]}",)) from error
        if kind not in {LIST, DICT, SET, VALUE}:
            raise CorruptValue(f"a node of the unknown kind {kind!r}")
        items: list[bytes] = []
        for row in rows:
            count, payload = leaf_items(memoryview(row))
            items += split(payload, 2 * count if kind == DICT else count)
        if kind == VALUE and len(items) != 1:
            raise CorruptValue(f"node {root.hex()[:16]} does not hold one value", what=(f"node {root.hex()[:16]}",))
        keys = None
        if kind == DICT:
            keys, items = items[::2], items[1::2]
        distinct = items if kind == SET else keys
        if distinct is not None and len(set(distinct)) != len(distinct):
            raise CorruptValue("a stored dict or set has one key twice")
        held = Held(kind, items, keys, digest=root, tree=tree)
        held.stored = True
        return held

    def opened(self, data: bytes, near: Parts = NOTHING) -> Held | Opened:
        """The content of an operation's value: what it names by digest, or its own items."""
        if len(data) == _BIG_BYTES and data.startswith(_BIG_HEAD):
            return self.section(data[len(_BIG_HEAD) :], near)
        content = opened(data, self.registry, self._big(near))
        if content.kind == VALUE:
            split(data, 1)
        return content

    # -- values ---------------------------------------------------------------------------------------

    def value(self, held: Held, copies: Copies | None = None) -> Any:
        """What the section holds, as plain values that nobody else has."""
        near = held.near() if held.big else NOTHING
        if len(held.items) < _MANY_ITEMS:
            return self._made(held, near, copies)
        with collector_paused:
            return self._made(held, near, copies)

    def _made(self, held: Held, near: Parts, copies: Copies | None) -> Any:
        if copies is not None and held.kind == LIST:
            return copies.list_of(held.items, lambda data: self._decode(data, near))
        return self._value(held, near)

    def _value(self, held: Held, near: Parts) -> Any:
        if held.kind == SET:
            items = self._decode(array_of(held.items), near)
            try:
                value: Any = set(items)
            except TypeError as error:
                raise CorruptValue("a stored set has an item that cannot be in one") from error
        elif held.kind == LIST and len(held.items) > _MANY_ITEMS:
            value = []
            plain = True
            for start in range(0, len(held.items), _MANY_ITEMS):
                some = held.items[start : start + _MANY_ITEMS]
                made = models(some, self.registry) if plain else None
                plain = made is not None
                value += self._decode(array_of(some), near) if made is None else made
        else:
            value = self._decode(closed(held.kind, held.items, held.keys), near)
        if held.kind != VALUE and (type(value) not in _PLAIN or len(value) != len(held.items)):
            raise CorruptValue("a stored container is not what its node says")
        return value

    def names(self, held: Held) -> list[Any]:
        """A dict's keys."""
        if held.names is None:
            held.names = list(decode(array_of(held.keys or []), self.registry, inert=True))
        return held.names

    def _decode(self, data: bytes, near: Parts) -> Any:
        return decode(data, self.registry, big=self._big(near))

    def _big(self, near: Parts) -> BigReader:
        def read(code: int, payload: bytes) -> Any:
            if code == codes.BIG:
                return self._value(self.section(payload, near), near)
            return self._bulk(payload, near)

        return read

    def _bulk(self, payload: bytes, near: Parts) -> Any:
        try:
            digest, length, chunks = decode(payload)
            data = b"".join([self._chunk(chunk, near) for chunk in chunks])
            right = len(data) == length and digest_of("holdfast.value", data) == digest
        except (TypeError, ValueError) as error:
            raise CorruptValue("a bulk value does not follow the format") from error
        if not right:
            raise CorruptValue(f"bulk value {digest.hex()[:16]} is not what was written", what=(digest.hex()[:16],))
        return self._decode(data, near)

    def _chunk(self, digest: bytes, near: Parts) -> bytes:
        found = near.chunks.get(digest)
        if found:
            return found
        if self._source is None:
            raise CorruptValue("a bulk value is named whose content is nowhere")
        return self._source.bulk([digest])


_PLAIN: frozenset[type] = frozenset({list, dict, set})
# Lists are put together and decoded so many items at a time: fresh memory for all of it at once costs more than that.
_MANY_ITEMS = 64
_BIG_HEAD = bytes((0xC7, DIGEST_BYTES, codes.BIG))
_BIG_BYTES = len(_BIG_HEAD) + DIGEST_BYTES
