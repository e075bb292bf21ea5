"""The state as a mapping: what a dict can do, each operation atomic.

Owns the methods that follow from a few others. Must not know what a section is.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, MutableMapping
from typing import Any, Self, SupportsIndex


class SectionMapping(MutableMapping[str, Any]):
    """A dict of sections, as far as user code can tell. ``lock`` makes each operation one."""

    lock: threading.RLock

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several sections, all or none."""

    @abstractmethod
    def replace(self, value: Any) -> None:
        """Make these the sections, all or none of the change."""

    @abstractmethod
    def plain(self, value: Any) -> Any:
        """Plain builtins, by value."""

    def pop(self, name: str, *default: Any) -> Any:
        """As dict.pop."""
        with self.lock:
            if name not in self:
                if default:
                    return default[0]
                raise KeyError(name)
            value = self[name]
            del self[name]
            return value

    def popitem(self) -> tuple[str, Any]:
        """As dict.popitem: the newest section."""
        with self.lock:
            if not len(self):
                raise KeyError("popitem(): the state is empty")
            name = next(reversed(self))
            return name, self.pop(name)

    def clear(self) -> None:
        """Remove all sections."""
        self.replace({})

    def setdefault(self, name: str, default: Any = None) -> Any:
        with self.lock:
            if name not in self:
                self[name] = default
            return self[name]

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def __or__(self, other: Any) -> dict[str, Any]:
        return dict(self.items()) | dict(other)

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other) | dict(self.items())

    def __reversed__(self) -> Iterator[str]:
        return reversed(list(self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SectionMapping):
            other = dict(other.items())
        return dict(self.items()) == other if isinstance(other, dict) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def copy(self) -> dict[str, Any]:
        """A plain dict of the sections, which stay live."""
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self.plain(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return dict, (self.plain(self),)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)
