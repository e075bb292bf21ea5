"""A place of its own for a process that is only looked at: copies of all files, no network, its own process numbers.

Runs by itself, as ``python -I isolation.py ORDER COMMAND...``, where `unshare` has made namespaces, and then becomes
CRIU. Knows nothing but its order: a file of JSON. What always holds: nothing that is written from here on reaches a
file of the machine, but for the folder of the order; where that cannot be had, CRIU does not start.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_KINDS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "nfs4", "9p", "zfs"}
_OURS = ("/proc", "/sys", "/dev")


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, stdin=subprocess.DEVNULL, timeout=20)  # noqa: S603, S607


def enter(folder: Path) -> None:
    """Let everything be a copy of itself that goes when its last process does, but for ``folder``."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        beneath = any(point == one or point.startswith(f"{one}/") for one in _OURS)
        if rest.split()[0] in _KINDS and not beneath and Path(point).is_dir():
            points.append(point)
    mount("--make-rprivate", "/")
    scratch = folder / "scratch"
    scratch.mkdir()
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(scratch))
    root = scratch / "root"
    root.mkdir()
    for number, point in enumerate(sorted(set(points))):
        upper, work = scratch / f"upper{number}", scratch / f"work{number}"
        upper.mkdir()
        work.mkdir()
        layers = f"lowerdir={_escaped(point)},upperdir={upper},workdir={work}"
        mount("-t", "overlay", "-o", layers, "overlay", f"{root}{point}")
    mount("--rbind", "/dev", f"{root}/dev")
    mount("--rbind", "/sys", f"{root}/sys")
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("--bind", str(folder), f"{root}{folder}")
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "."], check=True, timeout=20)  # noqa: S607
    subprocess.run(["umount", "-l", "."], check=True, timeout=20)  # noqa: S607
    os.chdir("/")


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def raise_loopback() -> None:
    """What listens on this machine's own address can be asked from inside. There is no other network."""
    with socket.socket() as asked:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(asked, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def put(source: Path, one: dict[str, int | str], gone: list[str]) -> None:
    path = Path(str(one["path"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    shutil.copyfile(source, path)
    os.chown(path, int(one["uid"]), int(one["gid"]))
    path.chmod(int(one["mode"]))
    for name in gone:
        Path(name).unlink(missing_ok=True)


def main(order: Path, command: list[str]) -> None:
    told = json.loads(order.read_text())
    enter(Path(told["folder"]))
    raise_loopback()
    for source, one, gone in told["files"]:
        put(Path(source), one, gone)
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
