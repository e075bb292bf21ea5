"""Following operations to another state: undo, redo, rollback, and whoever goes through a history.

Owns what becomes of nodes and handed-out values on the way. Must not know where the operations come from.
What always holds: a container that is in both states is the same node in both; one that is not is stale afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from holdfast.codec import operations as op
from holdfast.codec.document.handouts import Handouts
from holdfast.codec.document.loading import affected, parent_of, redo
from holdfast.codec.document.packing import Packing
from holdfast.codec.document.sections import MISSING, Encoded
from holdfast.codec.document.watches import Watch, Watches
from holdfast.codec.nodes import Node, make_stale
from holdfast.codec.operations import Operation


class Target(Protocol):
    """The document that follows."""

    def __contains__(self, name: object) -> bool: ...

    def __setitem__(self, name: str, value: Any) -> None: ...

    def __delitem__(self, name: str) -> None: ...

    def raw_section(self, name: str) -> Any: ...


def follow(
    operations: Iterable[Operation],
    document: Target,
    packing: Packing,
    handouts: Handouts,
    watches: Watches,
    decode: Callable[[bytes], Any],
) -> None:
    """Do the operations; the caller holds the lock. What one takes out and a later one puts back is the same node."""
    out: dict[bytes, list[Node]] = {}
    for operation in operations:
        for child in _do(operation, document, out, decode):
            if isinstance(child, Node):
                if child._parent is None:
                    out.setdefault(packing.content(child), []).append(child)
                continue
            orphan = handouts.orphaned(child)
            if orphan is not None:
                # It cannot say that it is stale, being an ordinary object; but a change to it will be noticed.
                data = orphan.data or packing.live(child)
                watches.add(Watch(child, data, operation.path.copy, None))
    for nodes in out.values():
        for node in nodes:
            if node._parent is None:
                make_stale(node)


def _do(
    operation: Operation, document: Target, out: dict[bytes, list[Node]], decode: Callable[[bytes], Any]
) -> list[Any]:
    """Do one operation; returns what may have lost its place."""
    name = operation.path[0]
    known = name in document
    held = document.raw_section(name) if known else MISSING
    if len(operation.path) == 1 and operation.code in {op.SET, op.DELETE}:
        if operation.code == op.SET:
            document[name] = _put_back(operation.args[0], out)
        elif known:  # if not, it was made and removed between two checkpoints
            del document[name]
        return [held]
    parent = parent_of(held, operation)
    leaving = affected(parent, operation)
    for child in leaving:
        if isinstance(child, Node) and child._parent is None:
            child._adopt(parent)  # nobody has looked at it yet; now it matters whether it stays
    value = _put_back(operation.args[0], out) if operation.code == op.SET else None
    if isinstance(value, Node):
        parent[operation.path[-1]] = value
    else:
        redo(held, operation, decode)
    return leaving


def _put_back(data: bytes, out: dict[bytes, list[Node]]) -> Any:
    """A node that was taken out and has this content, or the content."""
    waiting = out.get(data)
    return waiting.pop() if waiting else Encoded(data)
