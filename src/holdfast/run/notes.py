"""What an agent remembers about the world outside: breakers, modes, resources, seeds.

Owns the notes of a line that belong to no run. Must not know what they mean. What always holds: a note is a record of
the line, so restarts and branches share it, and a rollback leaves it alone; the newest one of a name counts.

    notes = notes_of(agent)              folded once from ``agent.ledger``, kept as long as the agent is
    notes.get(what, name)                the value, None if there is none; notes.all(what) every one, by name
    notes.put(what, name, value)         write it; durable with the next flush
    since_of(past, checkpoint, count)    from which position on a loaded checkpoint knows no effects (for claims.Loop)
"""

from __future__ import annotations

import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct

from holdfast.codec.values import decode
from holdfast.run import records as rec
from holdfast.run.arguments import Stowed, fetch, stow
from holdfast.run.past import Past

_lock = threading.Lock()
_notes: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


class Remembered(Struct, frozen=True):
    """One note: its place in the line, when it was written, its value."""

    number: int
    at: int
    value: Any


class Notes:
    """The notes of one line."""

    def __init__(self, agent: Any) -> None:
        self._ledger, self._registry = agent.ledger, agent.registry
        self.lock = threading.RLock()
        self.gates: dict[str, Any] = {}  # breakers as they are in this process, by name
        self.modes: tuple[str, ...] = ()  # declared in this process
        self._newest: dict[tuple[str, str], tuple[int, rec.Note, Any]] = {}
        for number, record in self._ledger.records():
            if isinstance(record, rec.Note) and not record.run:
                self._newest[record.what, record.name] = (number, record, self)

    def find(self, what: str, name: str) -> Remembered | None:
        """The newest note of that name."""
        with self.lock:
            found = self._newest.get((what, name))
            if found is None:
                return None
            number, note, value = found
            if value is self:  # not read yet
                value = fetch(note.value, self._ledger, self._registry, inert=True)
                self._newest[what, name] = (number, note, value)
            return Remembered(number, note.at, value)

    def get(self, what: str, name: str) -> Any:
        found = self.find(what, name)
        return found.value if found is not None else None

    def all(self, what: str) -> dict[str, Remembered]:
        """Every note of a kind, by name."""
        with self.lock:
            names = [name for kind, name in self._newest if kind == what]
        return {name: found for name in names if (found := self.find(what, name)) is not None}

    def put(self, what: str, name: str, value: Any, *, at: int | None = None) -> None:
        """Write a note."""
        with self.lock:
            note, stowed = self.made(what, name, value, at)
            number = self._ledger.append(note, nodes=stowed.nodes, chunks=stowed.chunks)
            self._newest[what, name] = (number, note, value)

    def made(self, what: str, name: str, value: Any, at: int | None = None) -> tuple[rec.Note, Stowed]:
        """A note that is not written yet."""
        stowed = stow(value, self._registry)
        return rec.Note(time.time_ns() // 1000 if at is None else at, "", what, name, stowed.value), stowed


def notes_of(agent: Any) -> Notes:
    """The notes of an agent's line."""
    with _lock:
        found = _notes.get(agent)
        if found is None:
            found = _notes[agent] = Notes(agent)
        return found


def since_of(past: Past, checkpoint: str, count: int) -> int:
    """The position up to which the program knew what had happened when this checkpoint was made.

    A checkpoint that a tool or a breaker took, not the program, says nothing about what the program had made of the
    calls before it: they can still be claimed.
    """
    note = past.notes.get(("auto", checkpoint))
    if note is None or not isinstance(note.value, bytes):
        return count
    since = decode(note.value, inert=True)
    return since if type(since) is int else count
