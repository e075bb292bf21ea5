"""Watching originals: warn when a container that was put in by value is changed outside afterwards.

Owns the list of what came in and may still be in use. Must not know how the document keeps its own copy.
What always holds: an original that nobody else holds is let go at the next checkpoint; one that stays in use is
compared at checkpoints that lie further and further apart, so that the cost per checkpoint stays small.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from holdfast.codec.blocks import digest_of
from holdfast.codec.nodes import FLAT, Node
from holdfast.codec.types import Registry
from holdfast.codec.values import encode, is_immutable
from holdfast.errors import DetachedChange, Unencodable

# Compared at each of the first checkpoints, then at every doubling of their number.
_EVERY_UP_TO = 4
# More than this are not watched: the oldest are let go. A program that holds so many originals knows what it does.
WATCHES_MAX = 10_000


class _Watch:
    __slots__ = ("age", "data", "original", "path")

    def __init__(self, original: Any, data: bytes, path: Callable[[], str]) -> None:
        self.original = original
        self.data = data  # the encoding; from the first comparison on, its digest
        self.path = path
        self.age = 0


class Watches:
    """The originals of one document."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._checkpoint = 0
        self._due: dict[int, list[_Watch]] = {}
        self._count = 0

    def add(self, original: Any, data: bytes, path: Callable[[], str]) -> None:
        """``original`` was taken in by value just now, as ``data``; ``path()`` says where it went."""
        self._put(_Watch(original, data, path), 1)

    def _put(self, watch: _Watch, later: int) -> None:
        if self._count < WATCHES_MAX:
            self._due.setdefault(self._checkpoint + later, []).append(watch)
            self._count += 1

    def clear(self) -> None:
        self._due.clear()
        self._count = 0

    def check(self) -> None:
        """Called at each checkpoint: look at what is due, and warn."""
        self._checkpoint += 1
        due = self._due.pop(self._checkpoint, [])
        self._count -= len(due)
        while due:
            watch = due.pop()
            original = watch.original
            watch.original = None
            # Two references are ours: the local name and getrefcount's argument.
            held = sys.getrefcount(original) > 2  # noqa: PLR2004
            inner = [] if held else _inner(original)
            if not held and not inner:
                continue
            if not self._same(watch, original):
                _warn(watch, original)
            elif held:
                watch.original = original
                watch.age += 1
                self._put(watch, 1 if watch.age < _EVERY_UP_TO else watch.age)
                watch.age += 0 if watch.age < _EVERY_UP_TO else watch.age
            else:
                # It is gone, but something inside it may be held on its own.
                while inner:
                    key, child = inner.pop()
                    due.append(_Watch(child, encode(child, self._registry), _deeper(watch.path, key)))
                    del child

    def _same(self, watch: _Watch, original: Any) -> bool:
        try:
            now = encode(original, self._registry)
        except Unencodable:
            return False
        if watch.age == 0:
            same = now == watch.data
            watch.data = digest_of("watch", now)
            return same
        return digest_of("watch", now) == watch.data


def _inner(original: Any) -> list[tuple[Any, Any]]:
    """Containers and instances directly inside an original."""
    if type(original) is dict:
        if FLAT.issuperset(map(type, original.values())):
            return []
        items = list(original.items())
    elif type(original) is list:
        if FLAT.issuperset(map(type, original)):
            return []
        items = list(enumerate(original))
    else:
        return []
    return [
        (key, child)
        for key, child in items
        if type(child) not in FLAT and not isinstance(child, Node) and not is_immutable(child)
    ]


def _deeper(path: Callable[[], str], key: Any) -> Callable[[], str]:
    return lambda: f"{path()}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path()}[{key!r}]"


def _warn(watch: _Watch, original: Any) -> None:
    warnings.warn(
        f"the {type(original).__name__} that was put into {watch.path()} has changed since, outside the state; "
        "that change is not saved. Use the one in the state: read it back from agent.state.",
        DetachedChange,
        stacklevel=5,
    )
