"""What the three kinds of tracked container share: their place in the state, and the marks before a change.

A *mark* says where a container may differ from what the store was told of it. It is a doubt, never a statement: whoever
changes a container marks it first, and what is marked is encoded and compared when the state is captured. A mark too
many costs time; one that does not fit, because C code changed something as well, turns into a doubt about everything.

Owns the marks and the links between containers. Must not know how values are taken in or encoded: the document does
both. A container is *inline* (``_told`` is None; ``_marks`` is None or True) or has a tree (``_told``; ``_marks`` says
where it may differ). What always holds: a container with marks has marked containers above it, whatever interrupts; a
change that is cut short leaves the whole container in doubt. Nothing is encoded or recorded while the user's code runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from holdfast.codec.tree import Tree

RAW: frozenset[type] = frozenset({dict, list, set})
"""Containers as they are decoded, before anybody looks at them."""

WRAP_ALL_MAX = 64
"""A container up to this length is wrapped whole at the first read: every later one is a plain read."""

SLOTS = ("_at", "_doc", "_marks", "_told", "_up")


# -- marks -----------------------------------------------------------------------------------------------------------

# More regions of one list are joined pairwise: then more is compared, and nothing is missed.
REGIONS_MAX = 512


class _Gone:
    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"


GONE: Any = _Gone()
"""In the place of a value that is not there."""


def _start(region: list[int]) -> int:
    return region[0]


def _stop(region: list[int]) -> int:
    return region[1]


class ListMarks:
    """Regions that may differ, [start, stop, told start, told stop] each, and children that changed inside.

    ``tail`` has the encodings of the last items as they were put in; None where one is not known. ``carried``: by
    the id of a child that changed places where it was told to be; ``held`` keeps these children.
    """

    __slots__ = ("all", "carried", "held", "kids", "regions", "tail")

    def __init__(self) -> None:
        self.all = False
        self.regions: list[list[int]] = []
        self.kids: dict[int, Any] = {}
        self.tail: list[bytes | None] = []
        self.carried: dict[int, int] | None = None
        self.held: list[Any] | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is marked."""
        return not (self.all or self.regions or self.kids)

    def appended(self, at: int, data: bytes | None) -> None:
        """An item comes at the end, where the list has ``at`` items."""
        regions = self.regions
        if regions and regions[-1][1] == at:
            regions[-1][1] = at + 1
        elif not regions:
            regions.append([at, at + 1, at, at])
        else:
            self._splice(at, 0, 1)
        self.tail.append(data)

    def spliced(self, size: int, start: int, removed: int, added: list[bytes | None]) -> None:
        """``removed`` of ``size`` items at ``start`` give way to others."""
        if start == size:
            self.tail += added
        elif start + removed > size - len(self.tail):
            self.tail = []
        self._splice(start, removed, len(added))

    def _splice(self, start: int, removed: int, added: int) -> None:
        regions, stop = self.regions, start + removed
        low = bisect_left(regions, start, key=_stop)
        high = bisect_right(regions, stop, low, key=_start)
        if low == high:
            shift = regions[low - 1][1] - regions[low - 1][3] if low else 0
            regions.insert(low, [start, start + added, start - shift, stop - shift])
        else:
            first, last = regions[low], regions[high - 1]
            begin, end = min(start, first[0]), max(stop, last[1])
            regions[low:high] = [[begin, end + added - removed, first[2] - first[0] + begin, last[3] - last[1] + end]]
        if added != removed:
            for region in regions[low + 1 :]:
                region[0] += added - removed
                region[1] += added - removed
        if len(regions) > REGIONS_MAX:
            pairs = zip(regions[::2], regions[1::2], strict=False)
            joined = [[one[0], two[1], one[2], two[3]] for one, two in pairs]
            self.regions = joined + (regions[-1:] if len(regions) % 2 else [])

    def fits(self, size: int, told: int) -> bool:
        """Whether the regions explain the length: C code may have changed it as well."""
        if self.all:
            return False
        if not self.regions:
            return told == size
        _, stop, _, old_stop = self.regions[-1]
        return stop <= size and old_stop <= told and size - stop == told - old_stop

    def told_index(self, index: int) -> int:
        """Where an item was told to be; -1 inside a region."""
        low = bisect_right(self.regions, index, key=_start)
        if not low:
            return index
        region = self.regions[low - 1]
        return -1 if index < region[1] else index - region[1] + region[3]


class DictMarks:
    """Keys that may differ, each with whether it was away in between; encodings of values as they were put in."""

    __slots__ = ("all", "given", "keys")

    def __init__(self) -> None:
        self.all = False
        self.keys: dict[Any, bool] = {}
        self.given: dict[Any, bytes] = {}


class SetMarks:
    """Items that may differ: what the set holds for each now, or GONE."""

    __slots__ = ("all", "items")

    def __init__(self) -> None:
        self.all = False
        self.items: dict[Any, Any] = {}


# -- containers ------------------------------------------------------------------------------------------------------


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

        def _kid(self, child: Any, at: Any = GONE) -> None:
            """Something inside a child is about to change, or may have changed. Sets have no such children."""

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

    def _insist(self) -> None:
        """Everything in it may differ, and all containers above hear of it, whatever their marks say."""
        chain: list[Any] = []
        node: Any = self
        while isinstance(node, Node):
            chain.append(node)
            node = node._up
        if node is not None:
            node._kid(self)
        for one in reversed(chain):  # from the top: should this be cut short, nothing is marked under what is not
            one._doubt()

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

    The method is called with the document's intake as its first argument; it marks what it changes. If it finds no
    marks, a signal handler looked for changes in the middle of this one: then everything is marked in the end.
    """

    def call(self: Any, *args: Any) -> Any:
        intake = self._doc.intake
        with intake.lock:
            intake.check_writable()
            intake.changes = number = intake.changes + 1
            before = marks = self._marks
            try:
                if marks is None:
                    marks = self._mark()
                if marks is True:
                    result = method(self, intake, *args)
                else:
                    before, marks.all = marks.all, True
                    result = method(self, intake, *args)
                    marks.all = before
                if intake.changes != number:  # a signal handler changed or saved something in the middle of this
                    self._insist()
            except BaseException as error:
                if error is intake.refusal and marks is not True:  # before anything was done
                    marks.all = before
                if intake.changes != number:
                    self._insist()
                raise
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
