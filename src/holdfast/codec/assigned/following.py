"""Doing operations again on sections of encodings.

Owns the way from an operation to other encodings. Must not know checkpoints, nor where operations come from. What
always holds: a section is changed only when all its operations fit; those inside an item, which only a ``Document``
makes, are done by one, on records that encode to the very same bytes whatever their types are now.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from holdfast.codec import operations as op
from holdfast.codec.assigned.differences import hunks, rekeyed
from holdfast.codec.assigned.held import Held
from holdfast.codec.assigned.parts import Parts, joined
from holdfast.codec.assigned.reading import NOTHING, Reader
from holdfast.codec.blocks import DICT, LIST, SET, VALUE, leaf_node, node_digest
from holdfast.codec.document import Document
from holdfast.codec.operations import Operation, known_key
from holdfast.codec.trees import build
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import Damaged, format_path

_MISFITS = (KeyError, IndexError, TypeError, ValueError, AttributeError)


class Draft:
    """A section on its way to another state. ``fresh`` are nodes that were made on the way."""

    def __init__(self, name: str, load: Callable[[], Held | None], reader: Reader) -> None:
        self.fresh: dict[bytes, bytes] = {}
        self._name = name
        self._load = load
        self._reader = reader
        self._base: Held | None = None  # what the draft began as, when it is to be edited in the end
        self._kind = b""  # empty: there is no such section
        self._items: list[bytes] = []
        self._pairs: dict[Any, tuple[bytes, bytes]] = {}  # of a dict: name -> key and value, as encodings
        self._ready = False
        self._document: Document | None = None  # does what is further down than the section's own items
        self._near = NOTHING

    def do(self, operation: Operation) -> None:
        """Do one operation. Raises Damaged when it does not fit."""
        try:
            self._do(operation)
        except _MISFITS as error:
            where = format_path(tuple(operation.path))
            raise Damaged(f"an operation on {where} does not fit the state it belongs to", what=(where,)) from error

    def _do(self, operation: Operation) -> None:
        _, code, path, args = operation
        if len(path) == 1 and code in {op.SET, op.DELETE}:
            self._ready, self._document, self._base, self._kind = True, None, None, b""
            if code == op.SET:
                self._begin(args[0])
            return
        if not self._ready:
            held = self._load()
            self._ready, self._base = True, held
            if held is not None:
                self._take(held)
        if self._document is not None or not self._here(code, path, args):
            self._inside(operation)

    def _begin(self, data: bytes) -> None:
        content = self._reader.opened(data, Parts(self.fresh, {}))
        if isinstance(content, Held):
            # Read under its digest, so it has a tree; what follows is an edit of it.
            self._base = content
            self._take(content)
        else:
            self._take(Held(content.kind, content.items, content.keys))

    def _take(self, held: Held) -> None:
        self._kind, self._items = held.kind, held.items.copy()
        if held.kind == DICT:
            pairs = zip(held.keys or (), held.items, strict=True)
            self._pairs = dict(zip(self._reader.names(held), pairs, strict=True))

    # -- operations on the section itself -----------------------------------------------------------------

    def _here(self, code: int, path: list[Any], args: tuple[Any, ...]) -> bool:
        """Do an operation that changes the section's own items; False when it is about something inside one."""
        depth, kind = len(path), self._kind
        if kind == DICT and depth == 2 and code == op.SET:
            name = known_key(path[1], self._reader.registry, inert=True)
            known = self._pairs.get(name)
            self._pairs[name] = (known[0] if known is not None else encode(path[1], self._reader.registry), args[0])
        elif kind == DICT and depth == 2 and code == op.DELETE:
            del self._pairs[known_key(path[1], self._reader.registry, inert=True)]
        elif kind == LIST and depth == 2 and code == op.SET:
            self._items[_index(path[1], len(self._items) - 1)] = args[0]
        elif depth == 1 and code == op.CLEAR and kind != VALUE:
            self._items, self._pairs = [], {}
        elif kind == LIST and depth == 1 and code == op.SPLICE:
            start, removed, values = args
            stop = _index(start + removed, len(self._items))
            self._items[_index(start, stop) : stop] = values
        elif kind == LIST and depth == 1 and code == op.ARRANGE:
            self._items = _arranged(self._items, args[0])
        elif kind == SET and depth == 1 and code in {op.ADD, op.REMOVE}:
            self._change_set(code, args[0])
        else:
            return False
        return True

    def _change_set(self, code: int, values: list[bytes]) -> None:
        for data in values:
            at = bisect_left(self._items, data)
            there = at < len(self._items) and self._items[at] == data
            if code == op.REMOVE:
                if not there:
                    raise KeyError(data)
                del self._items[at]
            elif not there:
                self._items.insert(at, data)

    # -- operations further down --------------------------------------------------------------------------

    def _inside(self, operation: Operation) -> None:
        if not self._kind:
            raise KeyError(operation.path[0])
        if self._document is None:
            self._document = Document(Registry(), self._thawed(), inert=True)
        self._document.change(operation)

    def _thawed(self) -> _Thawed:
        items = joined(*self._content())
        if self._kind == VALUE:
            raw = leaf_node(VALUE, items)
            root, nodes = node_digest(raw), {node_digest(raw): raw}
        else:
            tree, nodes = build(self._kind, items)
            root = tree.root or b""
        near = self._base.near() if self._base is not None else NOTHING
        self._near = Parts({**near.nodes, **self.fresh, **nodes}, near.chunks)
        return _Thawed(self._name, root, self._reader, self._near)

    def _content(self) -> tuple[list[bytes], list[bytes] | None]:
        if self._kind != DICT:
            return self._items, None
        return [item for _, item in self._pairs.values()], [key for key, _ in self._pairs.values()]

    def _freeze(self, document: Document) -> None:
        captured = document.capture()
        self.fresh.update(captured.nodes)
        self.fresh.update(document.unstored()[0])
        ((_, root),) = captured.sections
        self._near.nodes.update(self.fresh)
        self._take(self._reader.section(root, self._near))
        self._document = None

    # -- the end ------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All operations are done: what is still to be read is read now, so that ``settle`` cannot fail."""
        if self._document is not None:
            self._freeze(self._document)

    def settle(self) -> Held | None:
        """What the section is now; None when there is none."""
        if not self._ready:
            return self._load()
        if not self._kind:
            return None
        items, keys = self._content()
        base = self._base
        if base is None or base.kind != self._kind:
            held = Held(self._kind, items, keys)
        else:
            found = (
                rekeyed(base.keys or [], base.items, keys or [], items)
                if keys is not None
                else hunks(base.items, items)
            )
            held = base
            if found:
                held = base.parted()
                held.edit(found, items, keys)
                held.evidence = None
        held.names = list(self._pairs) if self._kind == DICT else None
        if self.fresh:
            known = held.big.get(b"", NOTHING)
            held.big[b""] = Parts({**known.nodes, **self.fresh}, {})
        return held


class _Thawed:
    """A source whose one section is a draft's content."""

    def __init__(self, name: str, root: bytes, reader: Reader, near: Parts) -> None:
        self.base = {name: root}
        self.sections = [(name, root)]
        self._reader = reader
        self._near = near

    def nodes(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return self._reader.nodes(digests, self._near)

    def bulk(self, digests: list[bytes]) -> bytes:
        return b"".join([self._reader._chunk(digest, self._near) for digest in digests])

    def operations(self, section: str) -> list[Operation]:  # noqa: ARG002 - the content is complete
        return []


def _index(value: Any, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise IndexError(value)
    return value


def _arranged(items: list[bytes], pieces: list[Any]) -> list[bytes]:
    made: list[bytes] = []
    used: set[int] = set()
    for piece in pieces:
        if len(piece) == 1:
            made.append(piece[0])
            continue
        start, count, step = piece
        last = start + (count - 1) * step
        if step not in {1, -1} or count < 1 or not (0 <= start < len(items) and 0 <= last < len(items)):
            raise IndexError(start)
        for index in range(start, start + count * step, step):
            if index in used:
                raise ValueError("an item is in two places")
            used.add(index)
            made.append(items[index])
    return made
