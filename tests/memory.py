"""Folders in memory, where there is room for them: most tests are about bytes, not about disks and power cuts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = "/dev/shm"
ROOM_BYTES = 2 << 30  # for all who work there at once


def place() -> str | None:
    """Where they are made. None, as ``tempfile`` takes it, when there is no such place or too little room in it."""
    usable = os.access(MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
    return MEMORY if usable else None


@contextmanager
def memory(prefix: str = "holdfast-") -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place()) as folder:
        yield Path(os.path.realpath(folder))
