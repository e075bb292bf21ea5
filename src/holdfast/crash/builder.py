"""One dump being built: its head, its parts in order of their worth, and how each part ended.

Used by all who write dumps: the failing process itself (taking.py), the sidecar, and whoever finds what a fatal signal
left (outside.py). Owns the source text of files that stacks name. Must not know where the rest of the content comes
from. Holds always: everything passes the redactor's gate; each part is written when it is ready; a part that fails,
finds no time or no room is named with its reason, and costs the others nothing; only a file that cannot be written ends
the dump; sources are regular files, opened without blocking, and no import machinery is asked.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from holdfast.crash import kinds
from holdfast.crash.dumpfile import Writer
from holdfast.crash.limits import Limits
from holdfast.crash.redaction import Redactor
from holdfast.errors import HoldfastError

# -- source text -----------------------------------------------------------------------------------------------------


_WHOLE_BYTES = 200_000  # a larger file is embedded around the lines that matter
_AROUND = 60  # lines
_READ_BYTES = 4 << 20


def embed(files: dict[str, list[int]], mine: Any, budget: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of sources, the program's own files first, and the names of those that are not there."""
    found = []
    missing = []
    named = [name for name in files if not name.startswith("<frozen ")]
    for name in sorted(named, key=lambda file: (not mine(file), file)):
        text, changed = _read(name)
        if text is None:
            missing.append(name)
            continue
        first, whole = 1, True
        if len(text) > _WHOLE_BYTES or len(text) > budget:
            first, text = _window(text, files[name])
            whole = False
        if len(text) > budget:
            missing.append(name)
            continue
        budget -= len(text)
        found.append({"file": name, "first": first, "text": text, "whole": whole, "changed": changed})
    return found, missing


def _read(name: str) -> tuple[str | None, bool]:
    """The file's text, and whether it was changed after this process began."""
    cached = _from_linecache(name)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return cached, False
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _READ_BYTES:
            return cached, False
        data = b""
        while len(data) <= _READ_BYTES and (piece := os.read(handle, _READ_BYTES)):
            data += piece
    except OSError:
        return cached, False
    finally:
        os.close(handle)
    changed = status.st_mtime > _began()
    if changed and cached is not None:
        return cached, False  # what the interpreter showed last is older, and more likely what runs
    return data.decode("utf-8", "replace"), changed


def _from_linecache(name: str) -> str | None:
    """What notebooks and `python -c` leave there for tracebacks."""
    module = sys.modules.get("linecache")
    entry = module.__dict__["cache"].get(name) if module is not None else None
    if type(entry) is tuple and len(entry) == 4 and type(entry[2]) is list:
        return "".join(line for line in entry[2] if type(line) is str)
    return None


def _window(text: str, lines: list[int]) -> tuple[int, str]:
    every = text.splitlines(keepends=True)
    first = max(1, min(lines) - _AROUND)
    last = min(len(every), max(lines) + _AROUND, first + 4000)
    return first, "".join(every[first - 1 : last])


def _began() -> float:
    try:
        return Path("/proc/self").stat().st_ctime
    except OSError:
        return float("inf")


# -- the dump --------------------------------------------------------------------------------------------------------


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
        found, missing = embed(files, is_mine, self.limits.source_bytes)
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
