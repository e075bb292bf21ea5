"""What the three kinds of tracked container share: a place in the tree, a path, and a word upwards after a change.

Owns the links between nodes. Must not know how values are taken in or encoded: the document (an ``Owner``) does both.
What always holds: ``child._parent is node`` only while ``child`` is in the base storage of ``node``; a node is
*attached* while a chain of parents leads to a section of its document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias

from holdfast.codec.trails import Trail
from holdfast.codec.trees import Leaf, Tree
from holdfast.errors import Stale

# Values that are their own and only representation: they need neither tracking nor a second look.
FLAT: frozenset[type] = frozenset({str, int, float, bool, type(None), bytes})
# The keys that nearly all dicts have.
TEXT: frozenset[type] = frozenset({str})
ABSENT: Any = object()

Path: TypeAlias = list[Any]


class Place(Protocol):
    """What stands above the outermost node: a section."""

    name: str
    value: Any

    def changed(self) -> Trail | None: ...


class Owner(Protocol):
    """What a node asks of its document. Every call but ``pack`` is made with the lock held."""

    lock: RLock
    begin: Callable[[], None]
    commit: Callable[[], None]
    take: Callable[..., tuple[Any, bytes]]
    take_key: Callable[[Any, Path | None], bytes]
    take_item: Callable[[Any, Path | None], bytes]
    settle: Callable[[Any, Any, Any, Leaf | None], Any]
    child: Callable[[Any, Any, Any, Leaf | None], Any]
    pack: Callable[[Any], bytes]
    pack_all: Callable[[list[Any]], list[bytes]]
    pack_key: Callable[[Any], bytes]
    unsaved: dict[int, Any]
    busy: Any  # the container that is taking in values for a change of its own, None between two changes
    changing: Any  # the same, from the moment on in which it is no longer what it was
    # The items, of all trees above it, in which the present change takes place; with each what ``Step`` has of it.
    trails: list[tuple[Trail, Node | None, bytes | None]]
    replaying: bool  # whether operations of the past are done again: nothing is recorded, and nothing needs proof
    met: list[Any]  # nodes that encodings have come across; other threads may add to it, which only costs time

    def check_writable(self) -> None: ...

    def record(self, code: int, path: Path, *args: Any) -> None: ...

    def distrust(self, node: Any) -> None: ...

    def unproven(self, node: Any) -> None: ...

    def steady(self, node: Any, leaf: Leaf) -> list[bytes]: ...

    def resolved(self, trail: Trail, node: Any, child: Any) -> bytes: ...

    def plain(self, value: Any) -> Any: ...


class Node:
    """What the three kinds share. ``_parent`` is a node, a section, or None when detached."""

    if not TYPE_CHECKING:
        __slots__ = ()  # each kind has these as its own slots, next to those of dict, list or set
    _kind: bytes
    _doc: Owner
    _parent: Node | Place | None
    _key: Any  # in a dict: the key; in a list: a hint at the index; never trusted unchecked
    _leaf: Leaf | None  # in a list: a hint at the leaf of the parent's tree; never trusted unchecked
    _tree: Tree | None
    _where: dict[Any, Any] | None  # dict: key -> leaf, while there are several; set: item -> encoding, when known
    _reads: int
    _plain: Callable[[Any], Any]

    if TYPE_CHECKING:  # what each kind provides in its own way

        def __len__(self) -> int: ...

        def _key_of(self, child: Node) -> Any:
            """The key or index of a child."""

        def _told(self) -> int:
            """How many items the tree was told of."""

        def _edited(self, key: Any, depth: int) -> Trail | None:
            """Something changes inside the item at a key or index, whose path is so long: the tree is told."""

        def _now(self, leaf: Leaf, items: list[bytes]) -> Any:
            """The items of a leaf with their encodings, as changes find them again."""

        def _given(self, key: Any, data: bytes) -> None:
            """The item at a key or index, which has a tree's leaf, gets another value: the tree is told."""

        def _run(self, leaf: Leaf) -> list[bytes]:
            """The encodings of a leaf's items."""

        def _peek(self) -> Any:
            """A plain shallow copy of the base storage, children as they are."""

        def _items(self) -> Sequence[tuple[Any, Any]]:
            """Keys or indexes with what base storage holds; nothing for sets, whose items are immutable."""

        def _swap(self, key: Any, child: Any) -> None:
            """Put another object in a child's place; the value is the same."""

    def _adopt(self, parent: Node | Place | None, key: Any = None, leaf: Leaf | None = None) -> None:
        self._parent = parent
        self._key = key
        self._leaf = leaf

    def _init(self, doc: Owner, parent: Node | Place | None, key: Any = None, leaf: Leaf | None = None) -> None:
        self._doc = doc
        self._parent = parent
        self._key = key
        self._leaf = leaf
        self._tree = None
        self._where = None
        self._reads = 0

    def _path(self) -> Path | None:
        """Keys from the section down to this node, or None when it is detached."""
        parts: Path = []
        node: Node = self
        while True:
            parent = node._parent
            if isinstance(parent, Node):
                parts.append(parent._key_of(node))
                node = parent
                continue
            if parent is None or parent.value is not node:
                return None
            parts.append(parent.name)
            parts.reverse()
            return parts

    def _home(self) -> Path | None:
        """The path, or None when it is detached, or when C code took it or one above it out of a list."""
        try:
            return self._path()
        except Stale:
            return None

    def _writable(self) -> Path | None:
        """The path, before a change. Raises when nothing may change."""
        doc = self._doc
        doc.check_writable()
        if doc.changing is not None:
            doc.distrust(doc.changing)
        doc.busy = self
        self._check_told()
        return self._path()

    def _know(self, leaf: Leaf) -> None:
        """Something in a leaf is about to change: what its items are by the operations is kept in ``now``."""
        if leaf.now is not None or self._doc.replaying:
            return
        items = self._doc.steady(self, leaf)
        if leaf.digest is not None:
            leaf.items = items
        leaf.now = self._now(leaf, items)

    def _check_told(self) -> None:
        """C code may have added or removed items: then a place is not the same here and in the operations."""
        if self._tree is not None and self._told() != len(self):
            self._doc.distrust(self)
            self._tree.reset(len(self))
            self._forget_leaves()

    def _changed(self, path: Path | None) -> None:
        """This node is about to change: every node above it has to be encoded again.

        Until the end of the change ``changing`` says so. An exception from outside (Ctrl-C) may come before that, and a
        signal handler may make changes of its own in between: then base storage and operations need not agree.
        """
        doc = self._doc
        if doc.busy is not self:
            doc.distrust(self)
        doc.changing = self
        if doc.trails:
            doc.trails = []
        node: Node = self
        inner: Node | None = None
        before: bytes | None = None
        tree = node._tree
        if tree is not None:
            inner, before = node, tree.root
            if before is not None:
                doc.unsaved[id(node)] = node
        depth = len(path) if path is not None else 0
        above: list[tuple[Node, Any, int, Node | None, bytes | None]] = []
        while True:
            parent = node._parent
            if not isinstance(parent, Node):
                if parent is not None:
                    trail = parent.changed()
                    if trail is not None:
                        doc.trails.append((trail, inner, before))
                break
            depth -= 1
            tree = parent._tree
            if tree is not None:
                # A detached node has no path, but the nodes above it may come back one day.
                key = path[depth] if path is not None else parent._key_of(node)
                above.append((parent, key, depth + 1, inner, before))
                inner, before = parent, tree.root
                if before is not None:
                    doc.unsaved[id(parent)] = parent
            node = parent
        # From the outermost: to know what an item was, one above may have to encode those below as they still are.
        for parent, key, depth, inner, before in reversed(above):
            parent._check_told()
            trail = parent._edited(key, depth)
            if trail is not None:
                doc.trails.append((trail, inner, before))

    def _regrouped(self, leaves: list[Leaf]) -> None:
        """The tree made these leaves anew."""

    def _plant(self) -> Tree:
        """Give this container a tree of its own."""
        tree = Tree(self._kind)
        tree.reset(len(self))
        self._tree = tree
        self._forget_leaves()
        self._doc.unsaved[id(self)] = self
        return tree

    def _forget_leaves(self) -> None:
        """The tree was reset: what was known about its leaves does not hold any more."""

    def _digest(self) -> bytes:
        tree = self._tree or self._plant()
        return tree.update(self._run, self._regrouped)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._doc.plain(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return type(self)._plain, (self._doc.plain(self),)


def release(child: Any, parent: Node) -> None:
    """``child`` left ``parent``."""
    if isinstance(child, Node) and child._parent is parent:
        child._parent = None


def put_back(value: Any, old: Any) -> bool:
    """Whether a value is what stands there already, as after ``state["x"] += [1]``: nothing is to be done."""
    return value is old and type(value) not in FLAT
