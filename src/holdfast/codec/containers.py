"""Tracked sets, and the three kinds of container together: which class each gets, and what becomes of it in the end.

Owns the choice of classes, how a tree becomes live containers, and *stale* containers, which rollback, undo or redo
removed from the state. What always holds: using a stale container raises ``Stale`` instead of showing, or taking, what
is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.codec.blocks import DICT, LIST, SET, VALUE, leaf_items
from holdfast.codec.dicts import GuardedDict, LazyDict, OpenDict, TrackedDict, wrap_dict
from holdfast.codec.lists import GuardedList, LazyList, TrackedList
from holdfast.codec.tracked import GONE, RAW, SLOTS, Node, SetMarks, change, locked
from holdfast.codec.values import UNWRAP
from holdfast.codec.wire import SCALARS, collector_paused
from holdfast.errors import CorruptValue, Stale

if TYPE_CHECKING:
    from holdfast.codec.tree import Tree


def _rare(name: str, *, same: bool = False) -> Any:
    """A mutator that is done on a plain copy. ``same``: an operator, which takes sets only and gives the set itself."""
    method = getattr(set, name)

    def call(self: Any, *others: Any) -> Any:
        if not same:
            others = tuple([other if isinstance(other, set | frozenset) else set(other) for other in others])
        with self._doc.lock:
            plain = set(self)
            if method(plain, *others) is NotImplemented:
                return NotImplemented
            self._alter(plain - self, self - plain)
            return self if same else None

    call.__name__ = name
    return call


class TrackedSet(set[Any], Node):
    """A set that marks its changes. Its items cannot change, so only what comes and goes is marked."""

    __slots__ = SLOTS
    _kind, _Marks, _plain = SET, SetMarks, set

    @change
    def _alter(self, intake: Any, added: Iterable[Any], removed: Iterable[Any]) -> None:
        for item in added:
            intake.check_item(item, self)
        marks = self._marks
        if marks is not None and marks is not True:
            for item in removed:
                marks.items[item] = GONE
            for item in added:
                marks.items[item] = item
        set.difference_update(self, removed)
        set.update(self, added)

    @locked
    def add(self, item: Any) -> None:
        if item not in self:
            self._alter((item,), ())

    @locked
    def discard(self, item: Any) -> None:
        if item in self:
            self._alter((), (item,))

    @locked
    def remove(self, item: Any) -> None:
        if item not in self:
            raise KeyError(item)
        self._alter((), (item,))

    @locked
    def pop(self) -> Any:
        for item in self:
            self._alter((), (item,))
            return item
        return set.pop(self)

    @locked
    def clear(self) -> None:
        self._alter((), set(self))

    update, difference_update, intersection_update, symmetric_difference_update = map(
        _rare, ("update", "difference_update", "intersection_update", "symmetric_difference_update")
    )
    __ior__, __isub__, __iand__, __ixor__ = (
        _rare(name, same=True) for name in ("__ior__", "__isub__", "__iand__", "__ixor__")
    )

    def copy(self) -> set[Any]:
        return set(self)

    def __repr__(self) -> str:
        return repr(set(self))

    def _pairs(self) -> Any:
        return ()

    def _peek(self) -> set[Any]:
        return set(self)

    def _holds(self, child: Any) -> bool:  # noqa: ARG002 - a set has no containers in it
        return False


LIVE = (TrackedDict, LazyDict, GuardedDict, OpenDict, TrackedList, LazyList, GuardedList, TrackedSet)


def wrap(raw: Any, doc: Any, up: Any, at: Any = None) -> Any:
    """A tracked container with the content of a raw one, which is the document's own."""
    kind = type(raw)
    if kind is dict:
        return wrap_dict(raw, doc, up, at)
    made = TrackedSet if kind is set else TrackedList if SCALARS.issuperset(map(type, raw)) else LazyList
    node: Any = made(raw)
    node._init(doc, up, at)
    return node


def live(doc: Any, tree: Tree, raw: Sequence[bytes] | None, up: Any) -> Any:
    """Live containers for a tree, their children raw. ``raw`` are its leaves where somebody has just read them."""
    parts: list[Any] = []
    per = 2 if tree.kind == DICT else 1
    if raw is None:
        tree.warm([(0, tree.count)], doc.told.fetch)
    with collector_paused():
        for number, leaf in enumerate(tree.leaves):
            payload: Any
            if raw is not None:
                _, payload = leaf_items(memoryview(raw[number]))
            else:
                payload = b"".join(tree.items_of(leaf, doc.told.fetch))
            # An array header in front makes one value of the items.
            found = doc.decode(b"".join((b"\xdd", (leaf.count * per).to_bytes(4, "big"), payload)))
            if type(found) is not list:
                raise CorruptValue("a leaf does not hold items")
            parts += found
    doc.told.let_go(tree)
    if tree.kind == VALUE:
        value = parts[0]
        return wrap(value, doc, up) if type(value) in RAW else value
    node: Any
    content = parts if tree.kind == LIST else parts[1::2] if tree.kind == DICT else ()
    kinds = set(map(type, content))
    flat = SCALARS.issuperset(kinds)
    if tree.kind == LIST:
        node = TrackedList(parts) if flat else LazyList(parts)
    elif tree.kind == DICT:
        pairs = dict(zip(parts[::2], content, strict=True))
        node = TrackedDict(pairs) if flat else LazyDict(pairs)
    else:
        node = TrackedSet(parts)
    if len(node) != tree.count:
        raise CorruptValue("a stored dict or set has one key or item twice")
    node._init(doc, up)
    node._told = tree
    if not kinds.isdisjoint(LIVE):
        for key, child in node._pairs():
            if isinstance(child, Node):
                child._up, child._at = node, key
    return node


# -- gone for good ------------------------------------------------------------------------------------------------

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
