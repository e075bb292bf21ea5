"""What the three kinds of tracked container share: their place in the state, and the mark before a change.

Owns the links between containers. Must not know how values are taken in or encoded: the document does both.
A container is *inline* (``_told`` is None; ``_marks`` is None or True) or has a tree (``_told``; ``_marks`` says where
it may differ). What always holds: a container with marks has marked containers above it, whatever interrupts; a change
that is cut short leaves the whole container in doubt. Nothing is encoded or recorded while the user's code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, SupportsIndex

from holdfast.codec.marks import GONE
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.codec.tree import Tree

FLAT: frozenset[type] = frozenset({str, int, float, bool, type(None), bytes})
"""Values that are their own and only representation: they need neither tracking nor a second look."""
TEXT: frozenset[type] = frozenset({str})
RAW: frozenset[type] = frozenset({dict, list, set})
"""Containers as they are decoded, before anybody looks at them."""

WRAP_ALL_MAX = 64
"""A container up to this length is wrapped whole at the first read: every later one is a plain read."""

SLOTS = ("_at", "_doc", "_marks", "_told", "_up")


class Section:
    """One top-level key. ``value`` is GONE until it is read."""

    __slots__ = ("dirty", "name", "value")
    _lazy = True

    def __init__(self, name: str, *, dirty: bool = True) -> None:
        self.name = name
        self.value: Any = GONE
        self.dirty = dirty

    def _kid(self, child: Any, at: Any = None) -> None:  # noqa: ARG002 - as containers have it
        self.dirty = True

    def _holds(self, child: Any) -> bool:
        return self.value is child


class Node:
    """A tracked container. ``_up`` is the container or section that holds it, None when it is detached."""

    if not TYPE_CHECKING:
        __slots__ = ()  # each kind has these as its own slots, next to those of dict, list or set
    _kind: bytes
    _Marks: Any
    _plain: Callable[[Any], Any]
    _lazy = False  # whether reads are seen, because children are raw, or instances
    _raw = False  # whether children may be raw
    _open = False  # whether somebody may read children without being seen
    _doc: Any
    _up: Node | Section | None
    _at: Any  # the key, or in a list a hint at the index; never trusted unchecked
    _told: Tree | None
    _marks: Any

    if TYPE_CHECKING:  # what each kind provides in its own way

        def _pairs(self) -> Iterable[tuple[Any, Any]]:
            """Keys or indexes with what base storage holds; nothing for sets, whose items cannot change."""

        def _swap(self, at: Any, child: Any) -> None:
            """Put another object in a child's place; the value is the same."""

        def _peek(self) -> Any:
            """A plain shallow copy of the base storage, children as they are."""

        def _holds(self, child: Any) -> bool:
            """Whether a child is in base storage."""

    def _init(self, doc: Any, up: Any, at: Any = None) -> None:
        self._doc, self._up, self._at, self._told, self._marks = doc, up, at, None, None

    def _mark(self) -> Any:
        """Called before a change, with the lock held: the containers above know from here on. Gives the marks."""
        marks = self._marks
        if marks is None:
            up = self._up
            if up is not None:
                if not up._holds(self):  # an interrupt in the middle of a change, or C code, left a wrong link
                    self._doc.doubt()
                up._kid(self)
            marks = self._marks = self._Marks() if self._told is not None else True
        return marks

    def _kid(self, child: Any, at: Any = GONE) -> None:
        """Something inside a child is about to change, or may have changed."""
        raise NotImplementedError

    def _mark_all(self) -> None:
        marks = self._mark()
        if marks is not True:
            marks.all = True

    def _doubt(self) -> None:
        """Everything in it may differ; whoever says so tells the containers above."""
        marks: Any = True
        if self._told is not None:
            marks = self._Marks()
            marks.all = True
        self._marks = marks

    def _touch(self) -> None:
        """Somebody reads all of it."""

    def _path(self) -> tuple[Any, ...]:
        """Keys from the section down to this container, for messages."""
        parts: list[Any] = []
        node: Any = self
        while isinstance(node, Node):
            up = node._up
            if isinstance(up, Section):
                parts.append(up.name)
            elif isinstance(up, Node):
                parts.append(next((at for at, child in up._pairs() if child is node), node._at))
            node = up
        return tuple(reversed(parts))

    def __copy__(self) -> Any:
        return self.copy()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._doc.plain(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return type(self)._plain, (self._doc.plain(self),)


def change(method: Any) -> Any:
    """Make a method a change: with the lock, and with the whole container in doubt until it is complete.

    The method is called with the document's intake as its first argument; it marks what it changes.
    """

    def call(self: Any, *args: Any) -> Any:
        doc = self._doc
        with doc.lock:
            doc.check_writable()
            intake = doc.intake
            intake.changes = number = intake.changes + 1
            marks = self._marks
            if marks is None:
                marks = self._mark()
            if marks is True:
                result = method(self, intake, *args)
            else:
                before, marks.all = marks.all, True
                try:
                    result = method(self, intake, *args)
                except HoldfastError as error:
                    if error is intake.refusal:  # before anything was done
                        marks.all = before
                    raise
                marks.all = before
            if intake.changes != number:  # a signal handler changed or saved something in the middle of this
                self._mark_all()
            return result

    call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
    return call


def locked(method: Any) -> Any:
    """Make a method atomic."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._doc.lock:
            return method(self, *args, **kwargs)

    return call


def reading(base: Any, name: str) -> Any:
    """A method of ``base`` that reads everything: raw children are wrapped first."""
    method = getattr(base, name)

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        self._touch()
        return method(self, *args)

    return call
