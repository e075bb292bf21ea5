"""Originals: what was put in by value and may still be in use outside.

Owns the warning ``DetachedChange``. Must not change anything in the state. What always holds: an original that changed
after it was put in, while its copy is still in the state and somebody still holds it, is warned about once; one that
nobody holds is forgotten at the next checkpoint.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from operator import is_
from typing import Any

from holdfast.codec.blocks import digest_of
from holdfast.codec.document.packing import Packing
from holdfast.codec.nodes import FLAT, STALE, Node, Path
from holdfast.codec.nodes.base import TEXT
from holdfast.codec.values import encode, is_immutable
from holdfast.errors import DetachedChange, HoldfastError, format_path

# An original that stays in use is compared at checkpoints that lie further and further apart.
_EVERY_UP_TO = 3
# More are not watched: the oldest are let go. A program that holds so many originals knows what it does.
WATCHES_MAX = 10_000


class Watch:
    """An original. ``place`` gives the path of its copy, or None when that left the state."""

    __slots__ = ("age", "data", "due", "original", "parts", "pins", "place")

    def __init__(
        self,
        original: Any,
        data: bytes,
        place: Callable[[], Path | None],
        pins: dict[int, Any] | None,
        parts: dict[str, Any] | None = None,
    ) -> None:
        self.original = original
        self.data = data  # its encoding when it was put in, or a digest of that
        self.place = place
        self.pins = pins  # by id, what is live inside it and stands for itself; None when nothing is
        self.age = 0
        self.due = 0
        # A copy of a plain message: the same objects again prove that nothing changed, without encoding.
        self.parts = parts


def sketch(value: Any, live: Callable[[int], bool], pins: dict[int, Any]) -> Any:
    """A plain container with the live values inside it replaced by their identity; they are added to ``pins``."""
    if live(id(value)):
        pins[id(value)] = value
        return ("live", id(value))
    kind = type(value)
    if kind is list:
        return [sketch(item, live, pins) for item in value]
    if kind is dict:
        return {key: sketch(item, live, pins) for key, item in value.items()}
    return value


class Watches:
    """The originals of one document."""

    def __init__(self, packing: Packing, attached: Callable[[Any], bool], look: Callable[[Path], Any]) -> None:
        self._packing = packing
        self._attached = attached
        self._look = look  # what base storage holds at a path
        self._watches: dict[int, Watch] = {}
        # Checkpoint number -> the originals to look at then. Looking at all of them each time would make every
        # checkpoint of a program that keeps its messages in a list of its own dearer than the last.
        self._due: dict[int, list[int]] = {}
        self._checkpoint = 0

    def add(self, watch: Watch) -> None:
        """Watch an original from now on. One that was put in before counts as of now."""
        if len(self._watches) >= WATCHES_MAX and id(watch.original) not in self._watches:
            del self._watches[next(iter(self._watches))]
        self._wait(watch, 1)

    def _wait(self, watch: Watch, checkpoints: int) -> None:
        watch.due = self._checkpoint + checkpoints
        self._watches[id(watch.original)] = watch
        self._due.setdefault(watch.due, []).append(id(watch.original))

    def forget_gone(self) -> None:
        """After a rollback: forget the originals of what is no longer there."""
        self._watches = {key: watch for key, watch in self._watches.items() if watch.place() is not None}

    def check(self) -> None:
        """Warn about originals that changed."""
        self._checkpoint += 1
        for key in self._due.pop(self._checkpoint, ()):
            watch = self._watches.get(key)
            if watch is None or watch.due != self._checkpoint:
                continue
            del self._watches[key]
            original, watch.original = watch.original, None
            if watch.parts is None and (
                isinstance(original, STALE) or (self._live(original) and self._attached(original))
            ):
                continue  # an alias: what changes it changes the state, and nothing is lost
            held = sys.getrefcount(original) > _UNHELD
            inner = [] if held else _held_inside(original, (), watch.pins)
            if not held and not inner:
                continue
            watch.original = original
            watch.age += 1
            if not self._same(watch):
                self._warn(watch, inner)
            elif held:
                self._wait(watch, 1 if watch.age < _EVERY_UP_TO else 1 << watch.age - _EVERY_UP_TO + 1)
            else:
                for keys, child in inner:
                    if id(child) not in self._watches:
                        self._wait(self._within(watch.place, keys, child), 1)
            inner.clear()

    def _live(self, value: Any) -> bool:
        """Whether a value stands for itself, being tracked or handed out."""
        return isinstance(value, Node) or id(value) in self._packing.snapshots

    def _same(self, watch: Watch) -> bool:
        if watch.parts is not None:
            now = watch.original
            if list(now) == list(watch.parts) and all(map(is_, now.values(), watch.parts.values())):
                return True
        try:
            now = self._encoding(watch)
        except HoldfastError:
            return False
        if len(watch.data) > _DIGEST_BYTES:
            if now != watch.data:
                return False
            watch.data = digest_of("watch", now)
            return True
        return now == watch.data or digest_of("watch", now) == watch.data

    def _encoding(self, watch: Watch) -> bytes:
        if isinstance(watch.original, Node):
            return self._packing.live(watch.original)
        if watch.pins is None:
            return encode(watch.original, self._packing.registry)
        return encode(sketch(watch.original, watch.pins.__contains__, {}), self._packing.registry)

    def _within(self, outer: Callable[[], Path | None], keys: tuple[Any, ...], child: Any) -> Watch:
        def place() -> Path | None:
            path = outer()
            return [*path, *keys] if path is not None else None

        flat = type(child) is dict and FLAT.issuperset(map(type, child.values())) and TEXT.issuperset(map(type, child))
        return Watch(child, encode(child, self._packing.registry), place, None, child.copy() if flat else None)

    def _warn(self, watch: Watch, inner: list[tuple[tuple[Any, ...], Any]]) -> None:
        path = watch.place()
        if path is None:
            return
        keys, changed = inner[0] if len(inner) == 1 else ((), watch.original)
        if not _alike(self._look([*path, *keys]), changed):
            return  # something else stands there by now
        warnings.warn(
            f"the {type(changed).__name__} that was put into {format_path((*path, *keys))} has changed since, "
            f"outside the state; that change is not saved. Use the one in the state: read it back from agent.state.",
            DetachedChange,
            stacklevel=_levels_to_user_code(),
        )


def _alike(copy: Any, original: Any) -> bool:
    """Whether one can be the copy of the other, whatever they hold."""
    for kind in (dict, list, set, bytearray):
        if isinstance(original, kind):
            return isinstance(copy, kind)
    return type(copy) is type(original)


def _levels_to_user_code() -> int:
    """How far up the first frame outside this package is, so that the warning names the user's own line."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("holdfast."):
        level, frame = level + 1, frame.f_back
    return level


_DIGEST_BYTES = 32


# What getrefcount says, in the code of this module, of an object that nobody else holds. It differs between versions
# of Python, so it is measured.
_UNHELD = _UNHELD_VALUE = _UNHELD_ITEM = 1 << 60


def _held_inside(
    original: Any, keys: tuple[Any, ...], pins: dict[int, Any] | None
) -> list[tuple[tuple[Any, ...], Any]]:
    """Mutable values inside a plain container that somebody holds on their own, with the keys that lead there."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    if type(original) is dict:
        at: Any = iter(original)
        for child in original.values():
            key = next(at)
            if type(child) not in FLAT and (pins is None or id(child) not in pins):
                held = sys.getrefcount(child) > _UNHELD_VALUE
                _look(child, held, (*keys, key), pins, found)
    elif type(original) is list:
        index = 0
        for child in original:
            if type(child) not in FLAT and (pins is None or id(child) not in pins):
                held = sys.getrefcount(child) > _UNHELD_ITEM
                _look(child, held, (*keys, index), pins, found)
            index += 1  # noqa: SIM113 - enumerate would hold the child, too
    return found


def _look(
    child: Any,
    held: bool,
    keys: tuple[Any, ...],
    pins: dict[int, Any] | None,
    found: list[tuple[tuple[Any, ...], Any]],
) -> None:
    if isinstance(child, Node):
        return
    if not held:
        found += _held_inside(child, keys, pins)
    elif not is_immutable(child):
        found.append((keys, child))


def _measure() -> tuple[int, int, int]:
    watch = Watch([], b"", lambda: None, None)
    original, watch.original = watch.original, None
    value = item = 0
    for child in {0: []}.values():  # type: ignore[var-annotated]
        value = sys.getrefcount(child)
    for child in [[]]:
        item = sys.getrefcount(child)
    return sys.getrefcount(original), value, item


_UNHELD, _UNHELD_VALUE, _UNHELD_ITEM = _measure()
