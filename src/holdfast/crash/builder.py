"""One dump being built: its head, its parts in order of their worth, and how each part ended.

Used by all who write dumps: the failing process itself (taking.py), the sidecar, and whoever finds what a fatal signal
left (outside.py). Must not know where the content comes from. Holds always: everything passes the redactor's gate; each
part is written when it is ready; a part that fails, finds no time or no room is named with its reason, and costs the
others nothing; only a file that cannot be written ends the dump.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from holdfast.crash import kinds, sources
from holdfast.crash.dumpfile import Writer
from holdfast.crash.limits import Limits
from holdfast.crash.redaction import Redactor
from holdfast.errors import HoldfastError

_NO_ROOM = "no room left in the file"


class PartFailed(Exception):
    """A part could not be had; the message is safe to write."""


class Builder:
    """One dump. ``until``: when the time for further parts is over."""

    def __init__(self, path: Path, redactor: Redactor, limits: Limits, until: float = float("inf")) -> None:
        self.limits = limits
        self.redactor = redactor
        self.until = until
        self.parts: dict[str, list[str]] = {}  # kind -> how it ended, and why
        self.writer = Writer(path, redactor, limit_bytes=limits.file_bytes)

    def head(
        self, *, why: str, trigger: str, pid: int, began: float, program: list[str], python: str, plan: list[str]
    ) -> None:
        found = {
            "format": kinds.VERSION,
            "id": os.urandom(16).hex(),
            "why": why[:4000],
            "trigger": trigger[:100],
            "at": time.time(),
            "pid": pid,
            "began": began,
            "host": socket.gethostname()[:200],
            "program": program[:50],
            "python": python,
            "deadline_s": self.limits.deadline_s,
            "plan": plan,
        }
        self.writer.add(kinds.HEAD, found if pid == os.getpid() else {**found, "taken_by": os.getpid()})

    def part(self, kind: str, make: Callable[[], Any], *, write: bool = True) -> None:
        """One part: made, written, and its end noted. ``write=False``: ``make`` writes, and may say how it ended."""
        if monotonic() > self.until:
            self.lost(kind, "out of time")
            return
        before = self.parts.get(kind)
        try:
            payload = make()
            if not write and self.parts.get(kind) is not before:
                return  # it has said itself how it ended
            if write and payload is None:
                self.parts[kind] = [kinds.ABSENT, "nothing was kept"]
            elif write and not self.writer.add(kind, payload):
                self.lost(kind, _NO_ROOM)
            else:
                state, reason = self.parts.get(kind, [kinds.WHOLE, ""])
                self.parts[kind] = [kinds.PARTIAL if state == kinds.ABSENT else state, reason]
        except PartFailed as failure:
            self.lost(kind, str(failure))
        except HoldfastError:
            raise
        except Exception as failure:  # noqa: BLE001 (a broken part must not cost the others)
            where = failure.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f" at {Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
            self.lost(kind, f"{type(failure).__name__} while it was collected{line}")

    def lost(self, kind: str, reason: str) -> None:
        """Note why some of a part, or all of it, is not there."""
        some = self.parts.get(kind, [kinds.ABSENT])[0] != kinds.ABSENT
        self.parts[kind] = [kinds.PARTIAL if some else kinds.ABSENT, reason]

    def stack(self, thread: dict[str, Any]) -> None:
        """One thread with its frames; without their values where those have no room."""
        if self.writer.add(kinds.STACK, thread):
            return
        bare = [{key: frame[key] for key in frame if key != "locals"} for frame in thread["frames"]]
        bare = [{**frame, "hidden": frame.get("hidden") or _NO_ROOM} for frame in bare]
        if not self.writer.add(kinds.STACK, {**thread, "frames": bare, "locals_cut": True}):
            raise PartFailed(_NO_ROOM)

    def sources(self, files: dict[str, list[int]], is_mine: Callable[[str], bool]) -> None:
        """Sources of the files that stacks name, with the lines they stand at."""
        found, missing = sources.embed(files, is_mine, self.limits.source_bytes)
        for record in found:
            self.writer.add(kinds.SOURCE, record, source=True)
        told = "not found: " + ", ".join(missing)[:2000] if missing else ""
        self.parts[kinds.SOURCE] = [kinds.PARTIAL if missing else kinds.WHOLE, told]

    def extra(self, kind: str, name: str, data: Any) -> None:
        """What somebody gave for a part, under its name; a ``problem`` in it is one of the part."""
        problem = data.get("problem") if isinstance(data, dict) else None
        state = [kinds.PARTIAL, f"{name}: {problem}"[:2000]] if problem else [kinds.WHOLE, ""]
        if not add_extra(self.writer, kind, name, data):
            state = [kinds.PARTIAL, f"{name}: more than there is room for"]
        if self.parts.get(kind, [kinds.WHOLE])[0] in (kinds.WHOLE, kinds.ABSENT):
            self.parts[kind] = state


def add_extra(writer: Writer, kind: str, name: str, data: Any) -> bool:
    """Write one extra; when it is too large, with fewer of its threads. Whether all of it is there."""
    if writer.add(kind, {"name": name, "data": data}):
        return True
    threads = data.get("threads") if isinstance(data, dict) else None
    while isinstance(threads, dict | list) and len(threads) > 1:
        half = len(threads) // 2
        threads = dict(list(threads.items())[:half]) if isinstance(threads, dict) else threads[:half]
        if writer.add(kind, {"name": name, "data": {**data, "threads": threads}}):
            return False
    return False
