"""Originals: plain containers that were put in by value and may still be in use outside.

Owns the warning ``DetachedChange``. Must not change anything in the state. It looks at containers that were given as
such, not at what is inside larger ones, and never for long: a warning is help, not a promise.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from operator import is_
from sys import getrefcount
from typing import Any

from holdfast.codec.blocks import INLINE_MAX_BYTES
from holdfast.codec.node import Node
from holdfast.codec.types import Registry
from holdfast.codec.values import encode
from holdfast.errors import DetachedChange, HoldfastError, format_path

# What one checkpoint spends on it at most, and of how many items of a large container.
BUDGET_S = 0.001
ITEMS_MAX = 1_000
# More are not known: the oldest are let go. A program that holds so many originals knows what it does.
ORIGINALS_MAX = 1_000


class Originals:
    """The originals of one document."""

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
