"""What ``doctor`` finds out about the machine: filesystem, free space, how long a flush takes, packages.

Knows nothing of agents. Reads only what the system says about itself; the store's own files are not opened.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Optional packages whose values can be saved, and those that encryption, servers, object storage and schedules need.
OPTIONAL = ("numpy", "pydantic", "attrs", "cryptography", "psycopg", "obstore", "cronsim")
# SQLite's write-ahead log needs memory that all processes share; these filesystems may reach over a network.
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p", "ceph", "glusterfs", "fuse.sshfs", "lustre"})
# Nothing here survives a restart of the machine.
VOLATILE = frozenset({"tmpfs", "ramfs"})

_MOUNTS = Path("/proc/self/mountinfo")
_PROBES = 5
_PROBE_BYTES = 4_096
# A disk that really writes takes longer than this; a shorter time means that something in between answers for it.
_TOO_FAST_S = 20e-6


@dataclass(frozen=True)
class Flush:
    """How long writing 4 KiB durably takes: the middle and the worst of a few tries, in seconds."""

    median_s: float
    worst_s: float

    @property
    def suspicious(self) -> bool:
        return self.median_s < _TOO_FAST_S


def filesystem(path: Path) -> str:
    """The type of the filesystem that holds ``path``, as the kernel names it; empty where it does not say."""
    try:
        device = path.stat().st_dev
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            major, _, minor = fields.split()[2].partition(":")
            if os.makedev(int(major), int(minor)) == device:
                return rest.split()[0]
        # Some filesystems (btrfs) give files another device number than their mount: the longest mount point then.
        return _by_place(path)
    except (OSError, ValueError, IndexError):
        return ""


def _by_place(path: Path) -> str:
    best, found = "", ""
    place = str(path.resolve())
    for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, rest.split()[0]
    return found


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write there."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def flush_time(directory: Path) -> Flush | None:
    """Measured with a nameless file in ``directory``; None where nothing can be written."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            times = []
            for _ in range(_PROBES):
                begun = time.perf_counter()
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - begun)
    except OSError:
        return None
    return Flush(statistics.median(times), max(times))


def packages(names: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions, without importing anything; None for what is not there."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def holdfast_version() -> str:
    return packages(("holdfast",))["holdfast"] or "unknown"  # run from a source tree that was never installed


def python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"
