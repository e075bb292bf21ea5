"""Taking values in: by value, at that moment, refused at once when they cannot be saved.

Owns what the state holds for a value that it is given, and which containers a change moves instead of copying: those
that lose their place by the same change, and those that have none. Must not know what kind of change asks.
What always holds: a value that is refused leaves no trace; what is taken in belongs to the state alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ormsgpack import packb

from holdfast.codec.blocks import INLINE_MAX_BYTES
from holdfast.codec.containers import wrap
from holdfast.codec.dicts import LazyDict, TrackedDict
from holdfast.codec.lists import LazyList
from holdfast.codec.marks import GONE
from holdfast.codec.node import FLAT, RAW, TEXT, Node, Section
from holdfast.codec.values import encode, is_immutable, is_key
from holdfast.codec.wire import MAX_DEPTH, OPTION, SCALARS
from holdfast.errors import HoldfastError, Unencodable

if TYPE_CHECKING:
    from holdfast.codec.detached import Originals
    from holdfast.codec.types import Registry
    from holdfast.codec.watches import Watches


class _Change:
    """What one change takes out of ``holder``, and what it moves."""

    __slots__ = ("holder", "kept", "leaving", "moved")

    def __init__(self, holder: Any, leaving: Sequence[Any]) -> None:
        self.holder = holder
        self.leaving = {id(item) for item in leaving if type(item) not in FLAT}
        self.kept: set[int] = set()  # instances that come back
        self.moved: list[tuple[Any, Any, Any]] = []  # containers, and where they were


class Intake:
    """The way in of one document."""

    def __init__(self, doc: Any) -> None:
        self._doc = doc
        self.registry: Registry = doc.registry
        self.watches: Watches = doc.watches
        self.originals: Originals = doc.originals
        self.decode = doc.decode
        self.changes = 0  # counts changes and captures, so that one inside another is noticed
        self.met: list[Any] | None = None  # while a value is encoded: the tracked containers in it
        self.refusal: HoldfastError | None = None  # the last error that came before anything was done

    # -- one change -------------------------------------------------------------------------------------------

    def take(self, value: Any, holder: Any, at: Any, leaving: Sequence[Any] = ()) -> tuple[Any, bytes | None]:
        """What the state holds for a value, and its encoding where that is known.

        ``leaving`` is what the change takes out of ``holder``.
        """
        if type(value) is dict and not leaving:
            # A dict of texts to scalars, as most are: its copy need not go through bytes.
            own = value.copy()  # first, because another thread may be changing it
            if SCALARS.issuperset(map(type, own.values())) and TEXT.issuperset(map(type, own)):
                try:
                    data = packb(own, None, OPTION)
                except TypeError:  # a lone surrogate, or an integer without end
                    data = b""
                if 0 < len(data) <= INLINE_MAX_BYTES and self._depth(holder) + 2 < MAX_DEPTH:
                    node: Any = TrackedDict(own)
                    node._doc, node._up, node._at, node._told, node._marks = self._doc, holder, at, None, None
                    self.originals.given(value, node, data, holder, at)
                    return node, data
        (taken,), (known,) = self.take_all([value], holder, (at,), leaving)
        return taken, known

    def take_all(
        self, values: Sequence[Any], holder: Any, places: Iterable[Any], leaving: Sequence[Any]
    ) -> tuple[list[Any], list[bytes | None]]:
        """As ``take``, of several values, all or none."""
        out = [node for node in leaving if isinstance(node, Node) and node._up is holder]
        change = _Change(holder, leaving)
        taken: list[Any] = []
        datas: list[bytes | None] = []
        try:
            for node in out:
                node._up = None
            for value, at in zip(values, places, strict=True):
                if type(value) in FLAT:
                    taken.append(value)
                    datas.append(None)
                    continue
                one, data = self._take(value, holder, at, change)
                taken.append(one)
                datas.append(data)
        except BaseException as error:
            for node, up, was in reversed(change.moved):
                node._up, node._at = up, was
            for node in out:
                node._up = holder
            if isinstance(error, Unencodable):
                self.refusal = error
                path = holder._path() if isinstance(holder, Node) else ()
                raise error.within(*path, at) from None
            raise
        return taken, datas

    def take_sections(self, pairs: list[tuple[Section, Any]], leaving: list[tuple[Section, Any]]) -> list[Any]:
        """What sections hold for values, all or none. ``leaving``: what sections lose by the same change."""
        out = [(node, section) for section, node in leaving if isinstance(node, Node) and node._up is section]
        change = _Change(None, [value for _, value in leaving])
        taken: list[Any] = []
        name = ""
        try:
            for node, _ in out:
                node._up = None
            for section, value in pairs:
                name = section.name
                taken.append(value if type(value) in FLAT else self._take(value, section, None, change)[0])
        except BaseException as error:
            for node, up, at in reversed(change.moved):
                node._up, node._at = up, at
            for node, section in out:
                node._up = section
            if isinstance(error, Unencodable):
                raise error.within(name) from None
            raise
        return taken

    def left(self, leaving: Iterable[Any], taken: Sequence[Any]) -> None:
        """After a change for which values were taken: instances that did not come back left the state."""
        gone = [item for item in leaving if type(item) not in FLAT and not isinstance(item, Node)]
        if gone:
            kept = set(map(id, taken))
            for item in gone:
                if id(item) not in kept:
                    self.watches.left(item)

    def detach(self, holder: Any, leaving: Iterable[Any]) -> None:
        """After a change that only took out."""
        for item in leaving:
            if isinstance(item, Node):
                if item._up is holder:
                    item._up = None
            elif type(item) not in FLAT:
                self.watches.left(item)

    # -- one value --------------------------------------------------------------------------------------------

    def _take(self, value: Any, holder: Any, at: Any, change: _Change) -> tuple[Any, bytes | None]:
        if isinstance(value, Node):
            return self._take_node(value, holder, at, change), None
        if id(value) in change.leaving and id(value) not in change.kept:  # an instance that is put back
            change.kept.add(id(value))
            self.watches.moved(value, holder, at)
            return value, None
        met = self.met = []
        try:
            data = encode(value, self.registry, depth=self._depth(holder) + 1)  # refuses what cannot be saved
        finally:
            self.met = None
        known = data if len(data) <= INLINE_MAX_BYTES else None
        if met or (change.leaving and self.watches.known and self._holds_leaving(value, change)):
            made = self._build(value, holder, at, change)
            self.originals.given(value, made, None, holder, at)  # what is tracked in it may change by itself
            return made, None
        if type(value) not in RAW:
            taken = value if is_immutable(value) else self.decode(data)
            self.watches.put(taken, holder, at)
        else:
            taken = wrap(self.decode(data), self._doc, holder, at)
        self.originals.given(value, taken, data, holder, at)
        return taken, known

    @staticmethod
    def _depth(node: Any) -> int:
        depth = 0
        while isinstance(node, Node):
            depth += 1
            node = node._up
        return depth

    def _take_node(self, node: Any, holder: Any, at: Any, change: _Change) -> Any:
        """A container of a state: moved when it has no place there, or loses it by this change; otherwise copied."""
        if node._up is None and id(node) in change.leaving and (holder is change.holder or isinstance(holder, Section)):
            self._move(node, holder, at, change)  # it comes back to where it was
            return node
        above: Any = change.holder  # what is being built around it is not there yet
        outermost = above
        while isinstance(above, Node):
            if above is node:
                raise Unencodable("the container would contain itself", hint="Put a copy there: holdfast.plain(...)")
            outermost, above = above, self._above(above)
        top = node
        while isinstance(top._up, Node):
            top = top._up
        if node._doc is not self._doc or top._up is not None or top is outermost:
            return self.copied(node, holder, at)
        encode(node, self.registry, depth=self._depth(holder) + 1)  # it may be nested too deep there
        if node is not top:
            top._at = GONE  # something was taken out of it: should it come back, it has to be looked through
        elif node._at is GONE:
            self._reclaim(node)
        self._move(node, holder, at, change)
        return node

    @staticmethod
    def _move(node: Any, holder: Any, at: Any, change: _Change) -> None:
        change.moved.append((node, node._up, node._at))
        node._up, node._at = holder, at

    @staticmethod
    def _above(node: Any) -> Any:
        """The container that holds a node; C code may have taken it out, and then there is none."""
        up = node._up
        if isinstance(up, Node) and not up._holds(node):
            node._up = None
            return None
        return up

    def _reclaim(self, node: Any) -> None:
        """Some of what a detached container held has found another place: it holds copies of that."""
        for at, child in list(node._pairs()):
            if isinstance(child, Node):
                if child._up is not node:
                    node._swap(at, self.copied(child, node, at))
                    if node._told is not None:
                        node._mark_all()
                else:
                    self._reclaim(child)

    def copied(self, node: Any, holder: Any, at: Any) -> Any:
        """Another container with the same content: nothing that can change is in both."""
        made = self.decode(encode(node, self.registry))
        return wrap(made, self._doc, holder, at) if type(made) in RAW else made

    def _build(self, value: Any, holder: Any, at: Any, change: _Change) -> Any:
        """A plain container with tracked ones in it."""
        kind = type(value)
        if kind in FLAT:
            return value
        if isinstance(value, Node):
            return self._take_node(value, holder, at, change)
        if kind is not list and kind is not dict:
            if is_immutable(value):
                return value
            if self._leaves(value, change):
                change.kept.add(id(value))
                self.watches.moved(value, holder, at)
                return value
            return self._own(value, holder, at)
        made: Any = LazyDict() if kind is dict else LazyList()
        made._init(self._doc, holder, at)
        for key, item in list(value.items() if kind is dict else enumerate(value)):
            child = self._build(item, made, key, change)
            if kind is dict:
                dict.__setitem__(made, key, child)
            else:
                list.append(made, child)
        return made

    def _leaves(self, value: Any, change: _Change) -> bool:
        """Whether an instance that somebody may hold loses its place by this change."""
        watch = self.watches.known.get(id(value))
        if watch is None or watch.value is not value or id(value) in change.kept:
            return False
        holder: Any = watch.holder
        while isinstance(holder, Node):
            if id(holder) in change.leaving:
                return True
            holder = holder._up
        return False

    def _holds_leaving(self, value: Any, change: _Change) -> bool:
        kind = type(value)
        if kind is list or kind is dict:
            inner = value if kind is list else value.values()
            return any(type(item) not in FLAT and self._holds_leaving(item, change) for item in inner)
        return self._leaves(value, change)

    def _own(self, value: Any, holder: Any, at: Any) -> Any:
        taken = self.decode(encode(value, self.registry))
        return wrap(taken, self._doc, holder, at) if type(taken) in RAW else taken

    # -- keys and items of sets -------------------------------------------------------------------------------

    def check_key(self, key: Any, holder: Any) -> None:
        """Refuse what cannot be a key."""
        self._check(key, "a key", holder)

    def check_item(self, item: Any, holder: Any) -> None:
        """Refuse what cannot be in a set."""
        if type(item) not in FLAT or item != item:  # noqa: PLR0124 - NaN
            self._check(item, "a set item", holder)

    def _check(self, key: Any, what: str, holder: Any) -> None:
        try:
            if not is_key(key):
                raise Unencodable(
                    f"{what} is a {type(key).__name__} that can change, or that no equal one can be made of",
                    hint="Use texts, numbers, tuples of such, enums, or frozen classes that compare by their fields.",
                )
            encode(key, self.registry)
        except Unencodable as error:
            self.refusal = error
            path = holder._path() if isinstance(holder, Node) else ()
            raise error.within(*path, *((key,) if what == "a key" else ())) from None


def attached(holder: Any, sections: dict[str, Section]) -> bool:
    """Whether a container, or a section, is in the state."""
    while isinstance(holder, Node):
        up = holder._up
        if isinstance(up, Node) and not up._holds(holder):
            return False
        if isinstance(up, Section) and up.value is not holder:
            return False
        holder = up
    return holder is not None and sections.get(holder.name) is holder
