"""Source text for the files that stacks name, so that a dump can be read without the program.

Must not know frames or redaction (the gate does that). Holds always: only regular files are opened, without blocking;
no import machinery is asked, because a loader may be the program's own.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

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
