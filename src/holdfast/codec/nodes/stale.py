"""Nodes that rollback, undo or redo removed from the state.

Owns their classes. What always holds: using one raises Stale instead of showing, or taking, what is gone.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec.nodes.base import Node
from holdfast.codec.nodes.dicts import TrackedDict
from holdfast.codec.nodes.lists import TrackedList
from holdfast.codec.nodes.sets import TrackedSet
from holdfast.errors import Stale

_SPECIAL = frozenset(
    [
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__iter__",
        "__len__",
        "__contains__",
        "__reversed__",
        "__add__",
        "__iadd__",
        "__mul__",
        "__imul__",
        "__rmul__",
        "__or__",
        "__ror__",
        "__ior__",
        "__and__",
        "__rand__",
        "__iand__",
        "__sub__",
        "__rsub__",
        "__isub__",
        "__xor__",
        "__rxor__",
        "__ixor__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
    ]
)
# Not attributes of list, but Python would ask for them before C code reads the storage.
_ALWAYS = ("__radd__", "__copy__", "__deepcopy__", "__reduce_ex__")


def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """What every method of a stale node does."""
    kind = next(kind for kind in (dict, list, set) if isinstance(self, kind))
    raise Stale(
        f"this {kind.__name__} is no longer part of the state: a rollback, undo or redo removed it",
        hint="read it again from agent.state",
    )


def _stale_class(base: Any, plain: Any) -> Any:
    names = [
        name
        for name in dir(plain)
        if callable(getattr(plain, name)) and (not name.startswith("__") or name in _SPECIAL)
    ]
    return type(
        "Stale" + plain.__name__.title(), (base,), {"__slots__": (), **dict.fromkeys([*names, *_ALWAYS], refuse)}
    )


StaleDict = _stale_class(TrackedDict, dict)
StaleList = _stale_class(TrackedList, list)
StaleSet = _stale_class(TrackedSet, set)
STALE = (StaleDict, StaleList, StaleSet)


def make_stale(node: Node) -> None:
    """``node`` and all nodes below it left the state for good."""
    if isinstance(node, STALE):
        return
    for _, child in node._items():
        if isinstance(child, Node) and child._parent is node:
            make_stale(child)
    node._parent = None
    node._tree = None
    node.__class__ = StaleDict if isinstance(node, dict) else StaleList if isinstance(node, list) else StaleSet
