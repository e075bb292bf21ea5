"""One call to the disk: what it is, which line of Holdfast makes it, and what it is to be made with the disk to itself.

Knows neither the ``os`` module nor SQLite, which tests/faults/disk.py and tests/faults/engine.py stand in front of.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast

HOLDFAST = str(Path(holdfast.__file__).parent) + os.sep


@dataclass(slots=True)
class Call:
    """One call. ``file`` and ``directory`` are numbers of inodes; what else is set depends on ``what``."""

    what: (
        str  # create, write, truncate, sync, mkdir, rename, unlink, rmdir, syncdir; ack, failed; or it changes nothing
    )
    name: str = ""
    file: int = -1
    directory: int = -1
    offset: int = 0
    data: bytes = b""
    new_name: str = ""
    by_sqlite: bool = False

    @property
    def site(self) -> str:
        """The line of Holdfast that makes it; known only while it is being made."""
        return site()


ELSEWHERE = "elsewhere"
"""The site of a call that no line of Holdfast makes."""

CHANGES = frozenset(("create", "write", "truncate", "sync", "mkdir", "rename", "unlink", "rmdir", "syncdir"))


class ShortWrite(OSError):
    """Raised by a hook: the write is to take only a part of what it was given."""


class Made:
    """One call being made, with the disk to itself."""

    __slots__ = ("call", "disk")

    def __init__(self, disk: Any, call: Call) -> None:
        self.disk = disk
        self.call = call

    def __enter__(self) -> None:
        self.disk._lock.acquire()
        try:
            self.disk.ask(self.call)
        except BaseException:
            self.disk._lock.release()
            raise

    def __exit__(self, kind: object, _error: object, _traceback: object) -> None:
        try:
            if kind is None:
                self.disk.note(self.call)
        finally:
            self.disk._lock.release()


def site() -> str:
    """The innermost line of Holdfast that is being executed: which call site this is."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HOLDFAST):
            return f"{name[len(HOLDFAST) :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ELSEWHERE
