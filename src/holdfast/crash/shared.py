"""The memory that a process and its sidecar share: heartbeats, the last log records, thin stacks, the agent's place.

Owns the layout of that memory. Must not know who writes what, nor dumps. Holds always: a write is a copy into memory,
without a system call or a lock; what a death cut in the middle is recognised by its sum and left out.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import zlib
from typing import Any, Final

import ormsgpack

KIB: Final = 1024
# Numbers of 64 bits at the beginning, in the machine's own order.
BEAT_NS: Final = 0  # when the process beat last, by the monotonic clock
PROGRESS: Final = 1  # how often it said that it got on
PROGRESS_NS: Final = 2
STATE: Final = 3
RUNNING: Final = 0
ENDING: Final = 1  # a normal end has begun
LEAVE: Final = 2  # the process wants no sidecar any more

# Each slot holds the newest value of its kind, in two halves that are written in turn.
STACKS: Final = "stacks"
TOLD: Final = "told"  # the agent's place, locks, notes
MODULES: Final = "modules"
ANSWER: Final = "answer"  # native stacks and registers, when the process asked for its own
KNOWN: Final = "known"  # values of secret variables: never written anywhere else
_SLOTS: Final = {
    STACKS: 256 * KIB,
    TOLD: 128 * KIB,
    MODULES: 160 * KIB,
    KNOWN: 64 * KIB,
    ANSWER: 1024 * KIB,
}
_HALF = struct.Struct("=QII")  # turn, length, sum
_FRONT: Final = 4096

LOG_RECORDS: Final = 512
LOG_BYTES: Final = 2 * KIB
LOG_TEXT_CHARS: Final = 1200  # what surely fits; a longer text is cut
_LOGS_AT: Final = _FRONT + 2 * sum(_SLOTS.values())
SIZE: Final = _LOGS_AT + LOG_RECORDS * LOG_BYTES


class Area:
    """The shared memory, seen from either side. It is sparse: what was never written takes no room."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, SIZE)
        self.numbers = memoryview(self.memory)[:_FRONT].cast("Q")
        self._turns = dict.fromkeys(_SLOTS, 0)
        self._records = itertools.count(1)  # next() on it is atomic, so that threads never share a place

    @staticmethod
    def create() -> int:
        """A descriptor of new memory that has no name and is gone with the last process that has it."""
        descriptor = os.memfd_create("holdfast-sidecar", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, SIZE)
        return descriptor

    def close(self) -> None:
        self.numbers.release()
        self.memory.close()

    def put(self, slot: str, packed: bytes) -> bool:
        """Make this the slot's value. One thread at a time for each slot. False when it is too long."""
        room = _SLOTS[slot]
        if len(packed) > room - _HALF.size:
            return False
        turn = self._turns[slot] = self._turns[slot] + 1
        at = _place(slot) + (turn % 2) * room
        start = at + _HALF.size
        self.memory[start : start + len(packed)] = packed
        _HALF.pack_into(self.memory, at, turn, len(packed), zlib.crc32(packed))
        return True

    def get(self, slot: str) -> bytes:
        """The newest whole value; empty when there is none."""
        room = _SLOTS[slot]
        newest, found = 0, b""
        for at in (_place(slot), _place(slot) + room):
            turn, length, summed = _HALF.unpack_from(self.memory, at)
            packed = self.memory[at + _HALF.size : at + _HALF.size + min(length, room)]
            if turn > newest and zlib.crc32(packed) == summed:
                newest, found = turn, packed
        return found

    def put_record(self, packed: bytes) -> None:
        """Add a log record. Any thread, at any time."""
        number = next(self._records)
        at = _LOGS_AT + (number % LOG_RECORDS) * LOG_BYTES
        packed = packed[: LOG_BYTES - _HALF.size]
        self.memory[at + _HALF.size : at + _HALF.size + len(packed)] = packed
        _HALF.pack_into(self.memory, at, number, len(packed), zlib.crc32(packed))

    def records(self) -> list[tuple[int, bytes]]:
        """The newest log records that are whole, oldest first, each with its number."""
        found: list[tuple[int, bytes]] = []
        for at in range(_LOGS_AT, SIZE, LOG_BYTES):
            number, length, summed = _HALF.unpack_from(self.memory, at)
            packed = self.memory[at + _HALF.size : at + _HALF.size + min(length, LOG_BYTES)]
            if number and zlib.crc32(packed) == summed:
                found.append((number, packed))
        return sorted(found)


def _place(slot: str) -> int:
    at = _FRONT
    for name, room in _SLOTS.items():
        if name == slot:
            break
        at += 2 * room
    return at


def packed(value: Any) -> bytes:
    """A value for the other side; what is not plain is left out."""
    try:
        return ormsgpack.packb(value)
    except (TypeError, ValueError, RecursionError):
        try:
            return ormsgpack.packb(_plain(value, 8))
        except (TypeError, ValueError):
            return ormsgpack.packb(None)


def _plain(value: Any, depth: int) -> Any:
    """The same with texts that can be packed, without what is not plain."""
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()
    if kind in (int, float, bool, bytes, type(None)):
        return value if kind is not int or -(2**63) <= value < 2**64 else str(value.bit_length()) + " bits"
    if kind in (list, tuple) and depth:
        return [_plain(item, depth - 1) for item in value]
    if kind is dict and depth:
        return {_plain(key, 0): _plain(item, depth - 1) for key, item in value.items() if type(key) is str}
    return "left out: not plain"


def unpacked(packed: bytes) -> Any:
    """A value that the other side packed; None when it is not one."""
    try:
        return ormsgpack.unpackb(packed) if packed else None
    except ValueError:
        return None
