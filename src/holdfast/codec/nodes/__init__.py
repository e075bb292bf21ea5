"""Tracked containers: dict, list and set subclasses that write down their own changes.

A node belongs to a document, and is *attached* while a chain of parents leads to one of its sections. What always
holds: base storage contains only immutable values, nodes, raw containers that nobody has seen (in lazy nodes), and
mutable values that the document has handed out.
"""

from __future__ import annotations

from typing import Any

from holdfast.codec.nodes.base import ABSENT, FLAT, Node, Owner, Path, Place, release
from holdfast.codec.nodes.dicts import TrackedDict
from holdfast.codec.nodes.lazy import LazyDict, LazyList
from holdfast.codec.nodes.lists import TrackedList
from holdfast.codec.nodes.sets import TrackedSet
from holdfast.codec.nodes.stale import STALE, make_stale, refuse
from holdfast.codec.trees import Leaf

__all__ = [
    "ABSENT",
    "FLAT",
    "LIVE",
    "STALE",
    "LazyDict",
    "LazyList",
    "Node",
    "Owner",
    "Path",
    "Place",
    "TrackedDict",
    "TrackedList",
    "TrackedSet",
    "make_stale",
    "refuse",
    "release",
    "wrap",
]

LIVE: tuple[type, ...] = (TrackedDict, TrackedList, TrackedSet, LazyDict, LazyList)


def wrap(raw: Any, doc: Owner, parent: Node | Place | None, key: Any = None, leaf: Leaf | None = None) -> Any:
    """A node with the content of a raw container."""
    node: Any
    kind = type(raw)
    if kind is dict:
        node = TrackedDict(raw) if FLAT.issuperset(map(type, raw.values())) else LazyDict(raw)
    elif kind is list:
        node = TrackedList(raw) if FLAT.issuperset(map(type, raw)) else LazyList(raw)
    else:
        node = TrackedSet(raw)
    # As Node._init, written out: this runs for every child of a container that is read for the first time.
    node._doc = doc
    node._parent = parent
    node._key = key
    node._leaf = leaf
    node._tree = None
    node._where = None
    node._reads = 0
    return node
