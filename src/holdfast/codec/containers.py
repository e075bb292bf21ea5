"""The tracked containers together: which class a plain container gets, and what becomes of one that is gone for good.

Owns the choice of classes, and those of *stale* containers, which rollback, undo or redo removed from the state. What
always holds: using a stale container raises ``Stale`` instead of showing, or taking, what is gone.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec.dicts import GuardedDict, LazyDict, OpenDict, TrackedDict, wrap_dict
from holdfast.codec.lists import GuardedList, LazyList, TrackedList
from holdfast.codec.node import FLAT, Node
from holdfast.codec.sets import TrackedSet
from holdfast.codec.values import UNWRAP
from holdfast.errors import Stale

LIVE = (TrackedDict, LazyDict, GuardedDict, OpenDict, TrackedList, LazyList, GuardedList, TrackedSet)


def wrap(raw: Any, doc: Any, up: Any, at: Any = None) -> Any:
    """A tracked container with the content of a raw one, which is the document's own."""
    kind = type(raw)
    if kind is dict:
        return wrap_dict(raw, doc, up, at)
    made = TrackedSet if kind is set else TrackedList if FLAT.issuperset(map(type, raw)) else LazyList
    node: Any = made(raw)
    node._doc, node._up, node._at, node._told, node._marks = doc, up, at, None, None
    return node


_READERS = frozenset(
    {
        "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__reversed__",
        "__add__", "__iadd__", "__mul__", "__imul__", "__rmul__", "__or__", "__ror__",
        "__ior__", "__and__", "__rand__", "__iand__", "__sub__", "__rsub__", "__isub__",
        "__xor__", "__rxor__", "__ixor__", "__eq__", "__ne__", "__lt__", "__le__",
        "__gt__", "__ge__",
    }
)  # fmt: skip
# Not attributes of list, but Python would ask for them before C code reads the storage.
_ALWAYS = ("__radd__", "__copy__", "__deepcopy__", "__reduce_ex__")


def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    """What every method of a stale container does."""
    kind = next(kind for kind in (dict, list, set) if isinstance(self, kind))
    raise Stale(
        f"this {kind.__name__} is no longer part of the state: a rollback, undo or redo removed it",
        hint="read it again from agent.state",
    )


def _stale_class(base: Any, plain: Any) -> Any:
    names = [
        name
        for name in dir(plain)
        if callable(getattr(plain, name)) and (not name.startswith("__") or name in _READERS)
    ]
    methods = dict.fromkeys([*names, *_ALWAYS], refuse)
    return type("Stale" + plain.__name__.title(), (base,), {"__slots__": (), **methods})


StaleDict = _stale_class(TrackedDict, dict)
StaleList = _stale_class(TrackedList, list)
StaleSet = _stale_class(TrackedSet, set)
STALE = (StaleDict, StaleList, StaleSet)


def make_stale(node: Any) -> None:
    """``node`` and all containers below it left the state for good."""
    if isinstance(node, STALE):
        return
    for _, child in node._pairs():
        if isinstance(child, Node) and child._up is node:
            make_stale(child)
    node._up = None
    node.__class__ = StaleDict if isinstance(node, dict) else StaleList if isinstance(node, list) else StaleSet


def _unwrap(node: Any) -> Any:
    met = node._doc.intake.met
    if met is not None:
        met.append(node)
    return node._peek()


for _kind in LIVE:
    UNWRAP[_kind] = _unwrap
for _kind in STALE:
    UNWRAP[_kind] = refuse
