"""Real power cuts and real full disks, on small filesystems of our own, mounted through a loop device.

A filesystem is cut off in the middle of work with the shutdown call that its developers use to test its journal: what
had not reached the device by then never will. Then it is mounted again, and compared with what was acknowledged. The
device is a file in memory, so that flushing it takes no longer than it must.
Needs root and the right to mount; says so where it has neither.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import holdfast
import holdfast.agent.places
from holdfast.errors import DiskFull, HoldfastError
from tests.faults import script
from tests.faults.campaign import Skip, Task, campaign, quiet, remembering
from tests.faults.isolated import Died, isolated
from tests.faults.stage import check
from tests.faults.victim import Victim
from tests.memory import memory

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: one number for both."""

CUTS = {"journal kept": 1, "journal lost": 2}
"""Flags of that call: what is in the filesystem's journal in memory is written out first, or lost."""

TAKING_AWAY = ("changing ", "forgetting ", "untag ")
"""What the script says before it takes something away."""

IMAGE_BYTES = {"ext4": 64 * 2**20, "xfs": 320 * 2**20}  # XFS makes none that is smaller than 300 MiB
CYCLES_PER_STORE = 20
LIFE_S = 0.3
"""The longest life before a cut, beginning when the store is open, which is long enough for the whole script."""

_libc = ctypes.CDLL(None, use_errno=True)


def _command(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skip(f"{' '.join(map(str, words[:3]))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _mount(device: str, place: Path, kind: str, options: str = "") -> None:
    if _libc.mount(device.encode(), os.fsencode(place), kind.encode(), 0, options.encode()):
        raise Skip(f"mounting {kind}: {os.strerror(ctypes.get_errno())}")


def _unmount(place: Path) -> None:
    for _ in range(1_200):  # somebody who was killed may not be gone yet
        if not _libc.umount2(os.fsencode(place), 0):
            return
        time.sleep(0.05)
    raise Skip(f"cannot unmount: {os.strerror(ctypes.get_errno())}")


class Filesystem:
    """One image file with a filesystem on it, mounted at ``place``."""

    def __init__(self, kind: str, folder: Path, size_bytes: int = 0) -> None:
        if os.geteuid() != 0:
            raise Skip("needs root to mount")
        if shutil.which(f"mkfs.{kind}") is None:
            raise Skip(f"mkfs.{kind} is not installed")
        self.kind = kind
        self.image = folder / f"{kind}.img"
        self.place = folder / kind
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(size_bytes or IMAGE_BYTES[kind])
        # Small images would get blocks of 1 KiB. With these, a full disk kills whoever uses SQLite: its -shm file has
        # holes then, and the kernel has no block for one that is written to (docs/guide/durability.md).
        quietly = ["-q", "-F", "-m", "0", "-b", "4096"] if kind == "ext4" else ["-q", "-f"]
        _command(f"mkfs.{kind}", *quietly, self.image)
        self.device = _command("losetup", "--find", "--show", self.image)
        try:
            self.mount()
        except Skip:
            self.close()
            raise

    def mount(self) -> None:
        _mount(self.device, self.place, self.kind)

    def unmount(self) -> None:
        _unmount(self.place)

    def cut(self, flag: int) -> None:
        """The power is gone: whatever is not on the device stays off it."""
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flag))
        except OSError as error:
            raise Skip(f"this filesystem cannot be shut down: {error.strerror}") from error
        finally:
            os.close(fd)

    def close(self) -> None:
        if os.path.ismount(self.place):
            self.unmount()
        _command("losetup", "--detach", self.device)


@contextmanager
def filesystem(kind: str, size_bytes: int = 0) -> Iterator[Filesystem]:
    with memory("holdfast-power-") as folder:
        made = Filesystem(kind, folder, size_bytes)
        try:
            yield made
        finally:
            made.close()


@campaign("power", "real power cuts, ext4 and XFS", "cuts", ci=6, soak=1_000)
def power(task: Task) -> None:
    """Loop-mounted filesystems, cut off with the shutdown ioctl in the middle of work, mounted again and compared."""
    chance = random.Random(task.seed)
    reasons = []
    kinds = []
    for kind in IMAGE_BYTES:
        try:
            with filesystem(kind):
                kinds.append(kind)
        except Skip as reason:
            reasons.append(f"{kind}: {reason}")
    if not kinds:
        raise Skip("; ".join(reasons))
    for reason in reasons:
        task.details[f"skipped, {reason}"] += 1
    with quiet(), script.small():
        for kind in itertools.cycle(kinds):
            if task.over:
                return
            with filesystem(kind) as disk, remembering(disk.place / "state"):
                _cycles(task, kind, disk, chance)


def _cycles(task: Task, kind: str, disk: Filesystem, chance: random.Random) -> None:
    said: list[str] = []
    share = max(1, min(CYCLES_PER_STORE, task.count // 2))
    for number in range(share):
        if task.over:
            return
        victim = Victim(lambda say, number=number: _live(disk.place / "store", number, say))
        victim.wait_for("open")
        time.sleep(chance.random() * LIFE_S)
        how = chance.choice(sorted(CUTS))
        before = victim.so_far()
        disk.cut(CUTS[how])
        # The process lives on for a moment, which a power cut would not let it, and a flush that waits for the journal
        # when it is shut down returns as if all were well: plain pwrite and fdatasync "lose" what they say then, too.
        # So what is said after the cut acknowledges nothing; it only tells what was being taken away.
        later = victim.end()[len(before) :]
        said += before + [line for line in later if line.startswith(TAKING_AWAY)]
        disk.unmount()
        disk.mount()
        try:
            check(disk.place, _ledger(said))
        except (AssertionError, HoldfastError) as error:
            task.broke(f"{kind}, {how}, cycle {number}: {type(error).__name__}: {error}")
        task.tried(f"{kind}, {how}")
    task.details["acknowledgements"] += len(said)


def _ledger(said: list[str]) -> script.Ledger:
    ledger = script.Ledger()
    for line in said:
        ledger.read(line)
    return ledger


def _live(path: Path, number: int, say: Callable[[str], None]) -> None:
    for seed in itertools.count(number * 1_000):
        script.perform(path, script.Ledger(told=say), seed=seed)


# -- full disks -----------------------------------------------------------------------------------------


@contextmanager
def small_disk(kind: str, size_bytes: int) -> Iterator[Path]:
    if kind != "tmpfs":
        with filesystem(kind, size_bytes) as made:
            yield made.place
        return
    if os.geteuid() != 0:
        raise Skip("needs root to mount")
    with memory("holdfast-full-") as folder:
        _mount("tmpfs", folder, "tmpfs", f"size={size_bytes}")
        try:
            yield folder
        finally:
            _unmount(folder)


@campaign("full", "full disk", "fillings", ci=4, soak=300)
def full(task: Task) -> None:
    """Small ext4 and tmpfs run full at work: a clear error, nothing lost, and room makes it work again."""
    with quiet(), script.small():
        for number in itertools.count(task.seed):
            if task.over:
                return
            kind = ("tmpfs", "ext4")[number % 2]
            with small_disk(kind, 8 * 2**20 if kind == "tmpfs" else 16 * 2**20) as place, remembering(place / "state"):
                try:
                    ended = isolated(lambda say, place=place, number=number: _fill(place, number, say))
                except (AssertionError, Died) as error:
                    task.broke(f"{kind} {number}: {error}")
                    ended = "broken"
                task.tried(f"{kind}: {ended}")


def _fill(place: Path, number: int, say: Callable[[str], None]) -> str:
    """Work until there is no room; make room; everything is there and work goes on, through the same handle."""
    chance = random.Random(number)
    ballast = place / "ballast"
    ledger = script.Ledger()
    path = place / "store"
    script.perform(path, ledger, seed=1)
    left = shutil.disk_usage(place).free
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        size = max(0, left - chance.randrange(4_096, 400_000))
        while size > 0:
            size -= file.write(bytes(min(size, 65_536)))
    ended = "never full"
    for seed in range(2, 40):
        try:
            script.perform(path, ledger, seed=seed)
        except DiskFull:
            ended = "full"
            break
        except HoldfastError as error:
            if getattr(error.__cause__, "errno", None) != errno.ENOSPC:
                raise AssertionError(f"not a clear error: {error!r}") from error
            ended = type(error).__name__
            break
    stores = [store for store in holdfast.agent.places._open.values() if not store.closed]
    ballast.unlink()
    for store in stores:
        agent = store.agent("same-handle")
        agent.state["bulk"] = chance.randbytes(5_000)
        agent.checkpoint("room again")
        store.close()
    check(place, ledger)
    return ended
