"""Resources: handles that cannot be saved, kept as a description by which they are opened again.

Owns the open handles of an agent and the notes that describe them. Must not know what a handle is. What always holds: a
handle is opened when it is first used; what is recorded is its description, never the handle; a branch does not get
what another branch has open: it opens its own, or what ``fork`` made for it.

    resource(agent, name, open=, close=None, describe=None, fork=None)    a ``Resource``; ``.handle`` opens it
    describe_all(agent)                  note descriptions that have changed: before a checkpoint
    close_all(agent)                     close every handle: when the agent is closed, rolled back or rewound
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from holdfast.errors import BadName, BadOption, NoAgent
from holdfast.run import secrets
from holdfast.run.notes import Notes, notes_of

log = logging.getLogger("holdfast.run")
H = TypeVar("H")
NAME_MAX = 200
_CLOSED = object()
_lock = threading.Lock()
_known: WeakKeyDictionary[Any, dict[str, Resource[Any]]] = WeakKeyDictionary()


class Resource(Generic[H]):
    """One resource of an agent. ``handle`` is what ``open`` returned; it is opened when it is asked for."""

    def __init__(
        self,
        agent: Any,
        name: str,
        open: Callable[..., H],
        close: Callable[[H], object] | None,
        describe: Callable[[H], Any] | None,
        fork: Callable[[Any], Any] | None,
    ) -> None:
        self.name = name
        self.open, self.close_, self.describe, self.fork = open, close, describe, fork
        self._agent = ref(agent)
        self._notes: Notes = notes_of(agent)
        self._branch: bytes = agent.identity[1]
        self._lock = threading.RLock()
        self._handle: Any = _CLOSED

    @property
    def is_open(self) -> bool:
        return self._handle is not _CLOSED

    @property
    def description(self) -> Any:
        """What was last recorded about it on this branch; None when nothing was, or another branch did it."""
        kept = self._kept()
        return kept["description"] if kept is not None and kept["branch"] == self._branch else None

    @property
    def handle(self) -> H:
        """The open handle."""
        with self._lock:
            if self._handle is _CLOSED:
                self._handle = self.open(self._inherited()) if self.describe is not None else self.open()
                try:
                    self.update()
                except BaseException:  # what is not described could not be opened again
                    self._drop()
                    raise
            handle: H = self._handle
            return handle

    def _inherited(self) -> Any:
        """The description to open by."""
        kept = self._kept()
        if kept is None or kept["branch"] == self._branch:
            return kept["description"] if kept is not None else None
        made = self.fork(kept["description"]) if self.fork is not None else None
        log.warning(
            "resource %s was opened by another branch, which may still use it; this one %s",
            self.name, "opens a new one" if self.fork is None else "opens what fork() made for it",
        )  # fmt: skip
        return made

    def _kept(self) -> dict[str, Any] | None:
        value = self._notes.get("resource", self.name)
        return value if isinstance(value, dict) else None

    def update(self) -> None:
        """Record how it would be opened now, if that has changed."""
        with self._lock:
            if self._handle is _CLOSED or self.describe is None:
                return
            description = self.describe(self._handle)
            kept = self._kept()
            if kept is None or kept["branch"] != self._branch or kept["description"] != description:
                agent = self._agent()
                if agent is None:
                    raise NoAgent(f"the agent of resource {self.name} is gone")
                secrets.refuse(agent, f"the description of {self.name}", description)
                self._notes.put("resource", self.name, {"branch": self._branch, "description": description})

    def close(self) -> None:
        """Close the handle. The next use opens it again, by its newest description."""
        with self._lock:
            if self._handle is _CLOSED:
                return
            try:
                self.update()
            finally:
                self._drop()

    def _drop(self) -> None:
        handle, self._handle = self._handle, _CLOSED
        if self.close_ is not None:
            self.close_(handle)

    def __enter__(self) -> H:
        return self.handle

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Resource {self.name}: {'open' if self.is_open else 'closed'}>"


def resource(
    agent: Any,
    name: str,
    *,
    open: Callable[..., H],
    close: Callable[[H], object] | None = None,
    describe: Callable[[H], Any] | None = None,
    fork: Callable[[Any], Any] | None = None,
) -> Resource[H]:
    """Declare a resource.

    With ``describe`` it is opened by ``open(description)``: the newest that ``describe(handle)`` gave on this branch,
    or None. Without, by ``open()``. ``fork(description)`` makes a description for a new branch.
    """
    if not 0 < len(name) <= NAME_MAX:
        raise BadName(f"a resource's name has 1 to {NAME_MAX} characters")
    if fork is not None and describe is None:
        raise BadOption(f"resource {name}: fork() needs a description to start from", hint="Give describe, too.")
    with _lock:
        mine = _known.setdefault(agent, {})
        known = mine.get(name)
        if known is None:
            known = mine[name] = Resource(agent, name, open, close, describe, fork)
        elif not known.is_open:  # the program is executed again: its newest functions count
            known.open, known.close_, known.describe, known.fork = open, close, describe, fork
        return known


def describe_all(agent: Any) -> None:
    """Record the descriptions that have changed."""
    for one in list(_known.get(agent, {}).values()):
        one.update()


def close_all(agent: Any) -> None:
    """Close every handle. One that cannot be closed does not keep the others open."""
    for one in list(_known.get(agent, {}).values()):
        try:
            one.close()
        except Exception:
            log.exception("resource %s could not be closed", one.name)
