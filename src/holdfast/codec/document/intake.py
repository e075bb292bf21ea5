"""Taking values in: by value, at that moment, refused at once when they cannot be saved.

Owns what the document holds for a value that it is given, and which nodes an operation moves instead of copying.
Must not know what kind of change asks. What always holds: until ``commit`` nothing in the state has changed, so that an
operation that is refused half-way leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ormsgpack import packb

from holdfast.codec.blocks import INLINE_MAX_BYTES
from holdfast.codec.codes import MAX_DEPTH, SCALARS, UNWRAP
from holdfast.codec.document.handouts import Handouts
from holdfast.codec.document.homes import Homes, may_be_handed_out
from holdfast.codec.document.packing import RAW, Moving, Packing, has_nan, is_whole, trackable, whole
from holdfast.codec.document.sections import Encoded, Section
from holdfast.codec.document.watches import Watch, Watches, sketch
from holdfast.codec.nodes import (
    FLAT,
    LIVE,
    STALE,
    LazyDict,
    LazyList,
    Node,
    Owner,
    Path,
    TrackedDict,
    TrackedList,
    TrackedSet,
    refuse,
    wrap,
)
from holdfast.codec.nodes.base import TEXT
from holdfast.codec.trees import Leaf
from holdfast.codec.types import Registry
from holdfast.codec.values import encode, is_immutable, is_lasting
from holdfast.codec.wire import OPTION, big_int
from holdfast.errors import Unencodable


def _unwrap(node: Any) -> Any:
    node._doc.met.append(node)
    return node._peek()


for _kind in LIVE:
    UNWRAP[_kind] = _unwrap
for _kind in STALE:
    UNWRAP[_kind] = refuse


class Intake:
    """The way in of one document."""

    def __init__(
        self, owner: Owner, packing: Packing, handouts: Handouts, watches: Watches, decode: Callable[[bytes], Any]
    ) -> None:
        self._owner = owner
        self._packing = packing
        self._registry: Registry = packing.registry
        self._handouts = handouts
        self._watches = watches
        self._decode = decode
        self._homes = Homes(packing, handouts)
        self._clear()

    def _clear(self) -> None:
        self._moves: list[tuple[Any, Node, Any]] = []  # value, its parent after the operation, its key
        # Watches to be: the original, its encoding, what was taken, that one's holder, pins, parts.
        self._originals: list[tuple[Any, bytes, Any, Any, dict[int, Any] | None, dict[str, Any] | None]] = []
        # What this operation has moved already (its place is the same until the commit), and all nodes above that.
        self._used: dict[int, Any] = {}
        self._around: set[int] = set()
        self._homes.forget()
        self._looked = False  # whether handed-out values were compared
        self._left: tuple[Any, set[int]] = ((), set())  # what the operation takes out, and the ids of what lives there
        self._clean = True

    # -- one operation ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """An operation starts to take in values; what an operation that failed left behind is forgotten."""
        if not self._clean:
            self._clear()
        elif self._originals:
            self._originals = []

    def commit(self) -> None:
        """All values of the operation were taken: moved nodes belong to their new parents from now on."""
        if self._originals:
            for original, data, taken, holder, pins, parts in self._originals:
                place = taken._home if isinstance(taken, Node) else self._place_of(taken, holder)
                self._watches.add(Watch(original, data, place, pins, parts))
            self._originals = []
        if not self._clean:
            for value, parent, key in self._moves:
                if isinstance(value, Node):
                    value._adopt(parent, key)
                else:
                    self._handouts.hand_out(value, parent)
            self._clear()

    def _place_of(self, taken: Any, holder: Node | Section) -> Callable[[], Path | None]:
        return lambda: self._handouts.place(taken, holder)

    # -- one value ----------------------------------------------------------------------------------------

    def take(
        self, value: Any, holder: Node | Section, key: Any, path: Path | None, leaving: Iterable[Any] = ()
    ) -> tuple[Any, bytes]:
        """What the document will hold for ``value``, and how it packs. ``leaving``: what the operation takes out."""
        kind = type(value)
        try:
            if kind in FLAT:
                return value, self._packing.pack(value)
            if kind is Encoded:
                return self.take_encoded(value.data)
            if kind is dict and (path is None or len(path) + 1 < MAX_DEPTH):
                message = self._take_message(value, holder)
                if message is not None:
                    return message
            met = self._owner.met
            if met:
                met.clear()
            data = encode(value, self._registry, depth=len(path) + 1 if path is not None else 1)
            if leaving and path is None:
                self._clean = False
                self._homes.search(leaving, holder)
            if met or (leaving and self._homes and self._holds_handout(value)):
                return self._take_parts(value, data, holder, leaving)
            if kind not in RAW and is_immutable(value):
                return value, self._packing.leaf_data(value, data)
            taken, packed = self.take_encoded(data)
            self._originals.append((value, data, taken, holder, None, None))
            return taken, packed
        except Unencodable as error:
            raise error.within(*(path or ()), key) from None

    def _take_message(self, value: dict[Any, Any], holder: Node | Section) -> tuple[Any, bytes] | None:
        """A plain dict of texts to scalars, as most are: its copy need not go through bytes. None for others."""
        own = value.copy()  # first, because another thread may be changing it
        if not (SCALARS.issuperset(map(type, own.values())) and TEXT.issuperset(map(type, own))):
            return None
        try:
            data = packb(own, big_int, OPTION)
        except TypeError:  # a lone surrogate, or an integer without end
            return None
        if len(data) > INLINE_MAX_BYTES:
            return None
        taken = TrackedDict(own)
        taken._init(self._owner, None)
        self._originals.append((value, data, taken, holder, None, own))
        return taken, data

    def take_encoded(self, data: bytes) -> tuple[Any, bytes]:
        """What the document holds for an encoding, and how it packs."""
        value = self._decode(data)
        if type(value) in RAW:
            if trackable(value) or self._packing.follows(value):
                value = wrap(value, self._owner, None)
                if len(data) > INLINE_MAX_BYTES:
                    data = self._packing.pack(value)
                    self._packing.keep(value)
                return value, data
            value = whole(value)
        elif isinstance(value, Node):  # a node of the catalog, read under its digest
            return value, data
        return value, self._packing.leaf_data(value, data)

    def take_key(self, key: Any, path: Path | None) -> bytes:
        """The encoding of a new dict key."""
        if type(key) is not str:
            if not (is_lasting(key) if self._packing.inert else is_immutable(key)):
                raise Unencodable(
                    f"a key is a mutable {type(key).__name__}", path=(*(path or ()), key), hint="Use an immutable key."
                )
            if has_nan(key):
                raise Unencodable(
                    "a key is NaN, which no look-up can find again", path=(*(path or ()), key), hint="Use a name."
                )
        try:
            return self._packing.pack_key(key)
        except Unencodable as error:
            raise error.within(*(path or ()), key) from None

    def take_item(self, item: Any, path: Path | None) -> bytes:
        """The encoding of a new set item."""
        path = path or []
        if not (is_lasting(item) if self._packing.inert else is_immutable(item)):
            raise Unencodable(
                f"a set item is a mutable {type(item).__name__}, whose changes could not be followed",
                path=tuple(path),
                hint="Use frozen classes, or assign a whole new set.",
            )
        try:
            return self._packing.leaf_data(item, encode(item, self._registry, depth=len(path) + 1))
        except Unencodable as error:
            raise error.within(*path) from None

    # -- values with nodes in them --------------------------------------------------------------------------

    def _holds_handout(self, value: Any) -> bool:
        """Whether a plain container has values in it that this document handed out."""
        if value in self._homes:
            return True
        kind = type(value)
        if kind is list:
            return any(type(item) not in FLAT and self._holds_handout(item) for item in value)
        if kind is dict:
            return any(type(item) not in FLAT and self._holds_handout(item) for item in value.values())
        return False

    def _take_parts(self, value: Any, data: bytes, holder: Any, leaving: Iterable[Any]) -> tuple[Any, bytes]:
        """Take in a node, or plain containers that hold some: what loses its place by this operation is moved."""
        if is_whole(data) and not isinstance(value, Node):
            taken, packed = self.take_encoded(data)
            self._originals.append((value, data, taken, holder, None, None))
            return taken, packed
        self._clean = False
        # Trees keep digests of what they saw; what was changed in place meanwhile must be in them before they move.
        # Once is enough, and later is too late: what was taken by then has no place yet, so its snapshot would be lost.
        if not self._looked:
            self._looked = True
            self._handouts.check(all_encoded=True)
        above = {id(node) for node in _upwards(holder)}
        if leaving is not self._left[0]:  # it is the same for all values of an operation
            self._left = (leaving, {id(item) for item in leaving if self._lives_in(holder, item)})
        taken = self._build(value, holder, self._left[1], above)
        if type(value) in RAW:
            pins: dict[int, Any] = {}
            shape = encode(sketch(value, self._stands_for_itself(value).__contains__, pins), self._registry)
            self._originals.append((value, shape, taken, holder, pins, None))
        try:
            packed = self._packing.pack(taken)
        except Moving:
            self._handouts.check(all_encoded=True)
            packed = self._packing.pack(taken)
        if len(data) > INLINE_MAX_BYTES:
            self._packing.keep(taken)
        return taken, packed

    def _stands_for_itself(self, value: Any) -> set[int]:
        """The ids of what is tracked or handed out inside plain containers."""
        if isinstance(value, Node) or value in self._homes:
            return {id(value)}
        kind = type(value)
        inner = value if kind is list else value.values() if kind is dict else ()
        return {found for item in inner if type(item) not in FLAT for found in self._stands_for_itself(item)}

    def _build(self, value: Any, holder: Any, leaving: set[int], above: set[int]) -> Any:
        kind = type(value)
        if kind in FLAT:
            return value
        if isinstance(value, Node):
            return self._take_node(value, holder, leaving, above)
        if kind is list or (kind is dict and (trackable(value) or self._packing.follows(value))):
            node: Any = TrackedDict() if kind is dict else TrackedList()
            node._init(self._owner, None)
            for key, item in value.items() if kind is dict else enumerate(value):
                self._fill(node, key, self._build(item, node, leaving, above), kept=item)
            return node
        if is_immutable(value):
            return value
        home = self._homes.of(value)
        if home is not None and self._leaves(home, value, leaving) and not self._overlaps(value, _upwards(home)):
            self._use(value, home)
            return value
        data = encode(value, self._registry)
        taken = self.take_encoded(data)[0]
        self._originals.append((value, data, taken, holder, None, None))
        return taken

    def _fill(self, node: Any, key: Any, child: Any, *, kept: Any) -> None:
        """Put a child into a container that is being built. A moved one stays where it is until the commit."""
        keyed = isinstance(node, dict)
        if isinstance(child, Node):
            if child is kept:
                self._moves.append((child, node, key if keyed else None))
            else:
                child._adopt(node, key if keyed else None)
        elif type(child) not in FLAT and not is_immutable(child):
            if child is kept:
                self._moves.append((child, node, None))
            else:
                self._hand_out(child, node)
        if keyed:
            dict.__setitem__(node, key, child)
        else:
            list.append(node, child)

    def _lives_in(self, holder: Any, value: Any) -> bool:
        """Whether a value has its home there: a detached container may still hold what has found another one."""
        home = value._parent if isinstance(value, Node) else self._homes.of(value)
        # Sections are all in one place: an operation may give one's value to another.
        return home is holder or (isinstance(home, Section) and isinstance(holder, Section) and home.value is value)

    def _leaves(self, holder: Any, value: Any, leaving: set[int]) -> bool:
        """Whether a handed-out value loses its place by this operation."""
        return id(value) in leaving or any(id(node) in leaving for node in _upwards(holder))

    def _take_node(self, value: Any, holder: Any, leaving: set[int], above: set[int]) -> Any:
        if id(value) in above:
            raise Unencodable("the container would contain itself", hint="Put a copy there: holdfast.plain(...)")
        if value._doc is self._owner:
            chain = list(_upwards(value))
            # Without a home, and not just in another place of the same detached container.
            free = chain[-1]._parent is None and id(chain[-1]) not in above
            moves = free or any(id(node) in leaving for node in chain)
            if moves and not self._overlaps(value, chain):
                self._use(value, value)
                if free:
                    self._reclaim(value)
                return value
        data = self._packing.live(value)
        taken = self.take_encoded(data)[0]
        self._originals.append((value, data, taken, holder, None, None))
        return taken

    def _use(self, value: Any, home: Any) -> None:
        self._used[id(value)] = value
        self._around.update(id(node) for node in _upwards(home))

    def _overlaps(self, value: Any, chain: Iterable[Any]) -> bool:
        """Whether this operation has moved the value, one above it or one inside it already."""
        return id(value) in self._used or id(value) in self._around or any(id(node) in self._used for node in chain)

    def _reclaim(self, node: Any) -> bool:
        """A detached node comes back. Children that found another home are copied; returns whether its tree is void."""
        doubtful = False
        for key, child in node._items():
            if isinstance(child, Node):
                if child._parent is not node or isinstance(child, STALE):
                    self._replace_by_copy(child, node, key)
                    doubtful = True
                elif self._reclaim(child):
                    doubtful = True
            elif may_be_handed_out(child):
                if self._homes.elsewhere(child, node):
                    self._replace_by_copy(child, node, key)
                else:
                    # It may have been changed while nobody looked.
                    self._packing.snapshots.pop(id(child), None)
                    self._hand_out(child, node)
                doubtful = True
        if node._tree is not None:
            if doubtful:
                node._tree.reset(len(node))
                node._forget_leaves()
            self._packing.unsaved[id(node)] = node
        return doubtful

    def mend(self, node: Any, parent: Any, key: Any, seen: set[int]) -> None:
        """Only what base storage holds is certain: links and trees follow from it."""
        node._adopt(parent, key)
        seen.add(id(node))
        if node._tree is not None:
            node._tree.reset(len(node))
            node._forget_leaves()
            self._packing.unsaved[id(node)] = node
        if isinstance(node, TrackedSet):
            node._where = None
        for key, child in node._items():  # noqa: PLR1704 - of the child now
            if isinstance(child, Node):
                if id(child) in seen or isinstance(child, STALE):
                    self._replace_by_copy(child, node, key)
                else:
                    self.mend(child, node, key, seen)
            elif type(child) not in RAW:
                if type(child) not in FLAT:
                    self._handouts.hand_out(child, node)
            elif not isinstance(node, LazyDict | LazyList):  # C code put it there
                node._swap(key, self.child(child, node, key, None))

    def _replace_by_copy(self, child: Any, node: Any, key: Any) -> None:
        copy = self.take_encoded(self._packing.live(child))[0]
        if isinstance(copy, Node):
            copy._adopt(node, key if isinstance(node, dict) else None)
        else:
            self._hand_out(copy, node)
        node._swap(key, copy)

    def _hand_out(self, value: Any, node: Node) -> None:
        """A value will be in ``node`` after the operation. Should it lose its snapshot until then, it gets another."""
        self._handouts.hand_out(value, node)
        self._moves.append((value, node, None))

    # -- children -----------------------------------------------------------------------------------------

    def settle(self, value: Any, holder: Node | Section, key: Any, leaf: Leaf | None) -> Any:
        """Make a taken value a child of ``holder``; returns what base storage holds."""
        if isinstance(value, Node):
            value._adopt(holder, key, leaf)
        elif type(value) not in FLAT and (
            id(value) in self._packing.snapshots or not isinstance(holder, Section | LazyDict | LazyList)
        ):
            self._handouts.hand_out(value, holder)
        return value

    def child(self, value: Any, holder: Node | Section, key: Any, leaf: Leaf | None) -> Any:
        """What user code may see of a raw child: a node, an immutable value, or one that is handed out from now on."""
        if type(value) in RAW:
            if trackable(value) or self._packing.follows(value):
                return wrap(value, self._owner, holder, key, leaf)
            value = whole(value)
        elif isinstance(value, Node):
            if value._parent is None:  # it was read under its digest, inside a raw container
                value._adopt(holder, key, leaf)
            return value
        if type(value) not in FLAT:
            self._handouts.hand_out(value, holder)
        return value


def _upwards(node: Any) -> Iterable[Any]:
    """A node and all nodes above it."""
    while isinstance(node, Node):
        yield node
        node = node._parent
