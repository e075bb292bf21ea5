"""Taking values in: by value, at that moment, refused at once when they cannot be saved.

Owns what the state holds for a value that it is given, and which containers a change moves instead of copying: those
that lose their place by the same change, and those that have none; and the warning ``DetachedChange`` about originals
that change later, outside the state. Must not know what kind of change asks. What always holds: a value that is refused
leaves no trace; what is taken in belongs to the state alone. It also knows whether the state may change now.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from sys import getrefcount
from typing import TYPE_CHECKING, Any

from ormsgpack import packb

from holdfast.codec.blocks import INLINE_MAX_BYTES
from holdfast.codec.containers import wrap
from holdfast.codec.dicts import LazyDict, TrackedDict
from holdfast.codec.lists import LazyList
from holdfast.codec.tracked import GONE, RAW, Node, Section
from holdfast.codec.values import encode, is_immutable, is_key
from holdfast.codec.wire import MAX_DEPTH, OPTION, SCALARS
from holdfast.errors import DetachedChange, HoldfastError, ReadOnly, StoreBusy, Unencodable, format_path

if TYPE_CHECKING:
    from threading import RLock
    from types import FrameType

    from holdfast.codec.types import Registry
    from holdfast.codec.watches import Watches


# What one checkpoint spends on it at most, and of how many items of a large container.
BUDGET_S = 0.001
ITEMS_MAX = 1_000
# More are not known: the oldest are let go. A program that holds so many originals knows what it does.
ORIGINALS_MAX = 1_000


class _Change:
    """What one change takes out of ``holder``, and what it moves."""

    __slots__ = ("holder", "kept", "leaving", "moved")

    def __init__(self, holder: Any, leaving: Sequence[Any]) -> None:
        self.holder = holder
        self.leaving = {id(item) for item in leaving if type(item) not in SCALARS}
        self.kept: set[int] = set()  # instances that come back
        self.moved: list[tuple[Any, Any, Any]] = []  # containers, and where they were


class Intake:
    """The way in of one document, and whether it is open."""

    def __init__(self, doc: Any, *, readonly: bool) -> None:
        self._doc = doc
        self.lock: RLock = doc.lock
        self.readonly = readonly
        self.guard: Callable[[], None] | None = None  # called before every change; raises when there must be none
        self.capturing: FrameType | None = None  # the capture that is under way
        self.registry: Registry = doc.registry
        self.watches: Watches = doc.watches
        self.originals: Originals = doc.originals
        self.decode = doc.decode
        self.changes = 0  # counts changes and captures, so that one inside another is noticed
        self.met: list[Any] | None = None  # while a value is encoded: the tracked containers in it
        self.refusal: HoldfastError | None = None  # the last error that came before anything was done

    # -- permission -------------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        """Called before every change, with the lock held."""
        if self.capturing is not None and self.is_busy():
            raise StoreBusy(
                "the state is being saved, and was changed in the middle of that, as by a signal handler",
                hint="Let the handler set a flag, and change the state between two steps.",
            )
        if self.readonly:
            raise ReadOnly(
                "this state is read-only",
                hint="A past state cannot change. Use agent.rollback(...) or agent.branch(...) to go on from it.",
            )
        if self.guard is not None:
            self.guard()

    def is_busy(self) -> bool:
        """Whether this thread is in the middle of a capture. An interrupt may have left a note of one that is over."""
        frame = sys._getframe() if self.capturing is not None else None
        while frame is not None:
            if frame is self.capturing:
                return True
            frame = frame.f_back
        self.capturing = None
        return False

    # -- one change -------------------------------------------------------------------------------------------

    def take(self, value: Any, holder: Any, at: Any, leaving: Sequence[Any] = ()) -> tuple[Any, bytes | None]:
        """What the state holds for a value, and its encoding where that is known.

        ``leaving`` is what the change takes out of ``holder``.
        """
        if type(value) is dict and not leaving:
            # A dict of texts to scalars, as most are: its copy need not go through bytes.
            own = value.copy()  # first, because another thread may be changing it
            if SCALARS.issuperset(map(type, own.values())):
                try:
                    data = packb(own, None, OPTION)
                except TypeError:  # a key that is no text, a lone surrogate, or an integer without end
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
        return self._take_each(values, [holder] * len(values), places, [(holder, item) for item in leaving], holder)

    def take_sections(self, pairs: list[tuple[Section, Any]], leaving: list[tuple[Section, Any]]) -> list[Any]:
        """What sections hold for values, all or none. ``leaving``: what sections lose by the same change."""
        sections = [section for section, _ in pairs]
        return self._take_each([value for _, value in pairs], sections, [None] * len(pairs), leaving, None)[0]

    def _take_each(
        self,
        values: Sequence[Any],
        holders: Sequence[Any],
        places: Iterable[Any],
        leaving: Sequence[tuple[Any, Any]],
        where: Any,
    ) -> tuple[list[Any], list[bytes | None]]:
        """What is held for values, each by its holder and at its place; ``where`` is the container that changes."""
        out = [(node, up) for up, node in leaving if isinstance(node, Node) and node._up is up]
        change = _Change(where, [item for _, item in leaving])
        taken: list[Any] = []
        datas: list[bytes | None] = []
        holder: Any = None
        at: Any = None
        try:
            for node, _ in out:
                node._up = None
            for value, holder, at in zip(values, holders, places, strict=True):
                one, data = (value, None) if type(value) in SCALARS else self._take(value, holder, at, change)
                taken.append(one)
                datas.append(data)
        except BaseException as error:
            for node, up, was in reversed(change.moved):
                node._up, node._at = up, was
            for node, up in out:
                node._up = up
            if isinstance(error, Unencodable):
                self.refusal = error
                raise error.within(*((*holder._path(), at) if isinstance(holder, Node) else (holder.name,))) from None
            raise
        return taken, datas

    def left(self, leaving: Iterable[Any], taken: Sequence[Any]) -> None:
        """After a change for which values were taken: instances that did not come back left the state."""
        gone = [item for item in leaving if type(item) not in SCALARS and not isinstance(item, Node)]
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
            elif type(item) not in SCALARS:
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
        if top._at is GONE:
            self._reclaim(node)
        if node is not top:
            top._at = GONE  # something was taken out of it: what comes back of it has to be looked through
            above = node._up
            while isinstance(above, Node):
                above._doubt()
                above = above._up
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

    def copied(self, value: Any, holder: Any, at: Any) -> Any:
        """Another one with the same content: nothing that can change is in both."""
        made = self.decode(encode(value, self.registry))
        return wrap(made, self._doc, holder, at) if type(made) in RAW else made

    def _build(self, value: Any, holder: Any, at: Any, change: _Change) -> Any:
        """A plain container with tracked ones in it."""
        kind = type(value)
        if kind in SCALARS:
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
            return self.copied(value, holder, at)
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
            return any(type(item) not in SCALARS and self._holds_leaving(item, change) for item in inner)
        return self._leaves(value, change)

    # -- keys and items of sets -------------------------------------------------------------------------------

    def check_key(self, key: Any, holder: Any) -> None:
        """Refuse what cannot be a key."""
        self._check(key, "a key", holder)

    def check_item(self, item: Any, holder: Any) -> None:
        """Refuse what cannot be in a set."""
        if type(item) not in SCALARS or item != item:  # noqa: PLR0124 - NaN
            self._check(item, "a set item", holder)

    def _check(self, key: Any, what: str, holder: Any) -> None:
        try:
            if not is_key(key):
                raise Unencodable(
                    f"{what} is a {type(key).__name__} that can change, or that equals only itself",
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


# -- originals -------------------------------------------------------------------------------------------------------


class Originals:
    """Plain containers that were put in by value and may still be in use outside.

    It looks at containers that were given as such, not at what is inside larger ones, and never for long: a warning is
    help, not a promise.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # By id: what was given, what the state holds for it, in which container and where, and what it was then. Small
        # ones are encoded again; of large ones the first items are compared by identity.
        self._known: dict[int, tuple[Any, Any, Any, Any, bytes | list[Any]]] = {}

    def given(self, value: Any, taken: Any, data: bytes | None, holder: Any, at: Any) -> None:
        """``value`` was put in, and the state holds ``taken`` for it. ``data``: its encoding, if that is its own."""
        if value is not taken:
            known = self._known
            if len(known) >= ORIGINALS_MAX and id(value) not in known:
                del known[next(iter(known))]
            then = data if data is not None and len(data) <= INLINE_MAX_BYTES else _first(value)
            known[id(value)] = (value, taken, holder, at, then)

    def check(self, attached: Callable[[Any], bool]) -> None:
        """Warn about originals that changed and whose copies are still in the state."""
        if not self._known:
            return
        until = 0.0
        known, self._known = self._known, {}
        while known:
            key, (value, taken, holder, at, then) = known.popitem()
            if getrefcount(value) <= _UNHELD:
                continue
            until = until or time.monotonic() + BUDGET_S
            if self._same(value, then):
                self._known[key] = (value, taken, holder, at, then)
            else:
                self._warn(value, taken, holder, at, attached)
            if time.monotonic() > until:
                self._known.update(known)  # the others' turn comes next time
                return

    def _same(self, value: Any, then: bytes | list[Any]) -> bool:
        try:
            if isinstance(then, bytes):
                return encode(value, self._registry) == then
            now = _first(value)
        except (HoldfastError, RuntimeError):  # something in it cannot be saved now; another thread is changing it
            return False
        return now[0] == then[0] and all(map(is_, now[1:], then[1:]))

    def _warn(self, value: Any, taken: Any, holder: Any, at: Any, attached: Callable[[Any], bool]) -> None:
        tracked = isinstance(taken, Node)
        if not attached(taken if tracked else holder):
            return
        if tracked:
            path = taken._path()
        elif isinstance(holder, Node):
            if not any(child is taken for _, child in holder._pairs()):
                return
            path = (*holder._path(), at)
        else:
            path = (holder.name,)
        warnings.warn(
            f"the {type(value).__name__} that was put into {format_path(path)} has changed since, "
            f"outside the state; that change is not saved. Use the one in the state: read it back from agent.state.",
            DetachedChange,
            stacklevel=_levels_to_user_code(),
        )


def _first(value: Any) -> list[Any]:
    """How long a container is, and its first items."""
    if isinstance(value, dict):
        items: Any = [part for pair in list(value.items())[: ITEMS_MAX // 2] for part in pair]
    elif isinstance(value, list):
        items = value[:ITEMS_MAX]
    else:
        items = ()
    return [len(value) if hasattr(type(value), "__len__") else 0, *items]


def _levels_to_user_code() -> int:
    """How far up the first frame outside this package is, so that the warning names the user's own line."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("holdfast."):
        level, frame = level + 1, frame.f_back
    return level


def _measure() -> int:
    known: dict[int, Any] = {0: ([], None, None, None, b"")}
    _, (value, _, _, _, _) = known.popitem()
    return getrefcount(value)


_UNHELD = _measure()
