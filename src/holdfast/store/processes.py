"""Processes: what one says about itself, and whether another one, seen from the same machine, has ended.

Knows nothing of stores. What always holds: a process counts as ended only where this machine, in this run of it and in
the same namespaces, has no such process any more; one that is stopped has not ended, and of one elsewhere nobody knows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

Identity = tuple[str, int, int]
"""The run of the machine, with namespaces, empty where nobody can tell; the process's number; when it began."""


def identity() -> Identity:
    """What tells this process from all others."""
    return _identity(os.getpid())


@lru_cache(1)
def _identity(pid: int) -> Identity:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "time")]
        return " ".join([boot, *spaces]), pid, _stat(pid)[1]
    except (OSError, ValueError, IndexError):
        return "", pid, 0


def _stat(pid: int) -> tuple[str, int]:
    """The state of a process, and when it began."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return parts[0], int(parts[19])


def is_self(one: Sequence[object]) -> bool:
    """Whether a process that said this about itself is this one."""
    return bool(identity()[0]) and tuple(one[:3]) == identity()


def has_ended(one: Sequence[object]) -> bool:
    """Whether a process that said this about itself is known to have ended."""
    machine, pid, began = one[:3]
    if not machine or machine != identity()[0] or type(pid) is not int:
        return False
    try:
        state, since = _stat(pid)
        if since != began:
            return True  # its number was given to another one
        return state in {"Z", "X"} and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        with suppress(PermissionError):  # it is there, and hidden from us
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
    except (OSError, ValueError, IndexError):
        pass
    return False
