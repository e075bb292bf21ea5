"""Real power cuts and real full disks, on small filesystems of our own, mounted through a loop device.

A filesystem is cut off in the middle of work with the shutdown call that its developers use to test its journal: what
had not reached the device by then never will. Then it is mounted again, and compared with what was acknowledged.
Needs root and the right to mount; says so where it has neither.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import holdfast
from holdfast.errors import DiskFull, HoldfastError
from tests.faults import script
from tests.faults.campaign import Skip, Task, campaign, quiet, remembering
from tests.faults.isolated import isolated
from tests.faults.kills import check_after

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: one number for both."""

CUTS = {"journal kept": 1, "journal lost": 2}
"""Flags of that call: what is in the filesystem's journal in memory is written out first, or lost."""

IMAGE_BYTES = {"ext4": 64 * 2**20, "xfs": 320 * 2**20}  # XFS makes none that is smaller than 300 MiB
CYCLES_PER_STORE = 20
LIFE_S = 0.6
"""The longest life before a cut, beginning when the store is open."""


def _command(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skip(f"{' '.join(map(str, words[:3]))}: {done.stderr.strip() or done.stdout.strip()}")


class Filesystem:
    """One image file with a filesystem on it, mounted at ``place``."""

    def __init__(self, kind: str, folder: Path, size_bytes: int = 0) -> None:
        if os.geteuid() != 0:
            raise Skip("needs root to mount")
        if shutil.which(f"mkfs.{kind}") is None:
            raise Skip(f"mkfs.{kind} is not installed")
        self.image = folder / f"{kind}.img"
        self.place = folder / kind
        self.place.mkdir()
        with self.image.open("wb") as file:
            file.truncate(size_bytes or IMAGE_BYTES[kind])
        quietly = ["-q", "-F", "-m", "0"] if kind == "ext4" else ["-q", "-f"]
        _command(f"mkfs.{kind}", *quietly, self.image)
        self.mount()

    def mount(self) -> None:
        _command("mount", "-o", "loop", self.image, self.place)

    def unmount(self) -> None:
        for _ in range(100):
            done = subprocess.run(["umount", str(self.place)], capture_output=True, text=True, check=False)
            if not done.returncode:
                return
            time.sleep(0.05)
        raise Skip(f"cannot unmount: {done.stderr.strip()}")

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
        with suppress(Skip):
            self.unmount()
        self.image.unlink(missing_ok=True)


@contextmanager
def filesystem(kind: str, size_bytes: int = 0) -> Iterator[Filesystem]:
    with tempfile.TemporaryDirectory(prefix="holdfast-power-") as folder:
        made = Filesystem(kind, Path(folder), size_bytes)
        try:
            yield made
        finally:
            made.close()


class Victim:
    """A forked process at work, and the lines in which it acknowledges."""

    def __init__(self, life: Callable[[Callable[[str], None]], None]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            with suppress(BaseException):  # the disk below it goes away: every error is right, and nobody listens
                life(lambda line: _write_line(writing, line))
            os._exit(0)
        os.close(writing)
        self._text = b""

    def wait_for(self, line: str, limit_s: float = 60.0) -> None:
        ends = time.monotonic() + limit_s
        os.set_blocking(self._reading, False)
        while line.encode() + b"\n" not in self._text and time.monotonic() < ends:
            with suppress(BlockingIOError):
                part = os.read(self._reading, 1 << 16)
                if not part:
                    break
                self._text += part
            time.sleep(0.001)
        os.set_blocking(self._reading, True)

    def so_far(self) -> list[str]:
        """All that it has said until now."""
        os.set_blocking(self._reading, False)
        with suppress(BlockingIOError):
            while part := os.read(self._reading, 1 << 16):
                self._text += part
        os.set_blocking(self._reading, True)
        return self._text.decode().split("\n")[:-1]

    def end(self) -> list[str]:
        """Kill it; all that it said."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while part := os.read(self._reading, 1 << 16):
            self._text += part
        os.waitpid(self.pid, 0)
        os.close(self._reading)
        return self._text.decode().split("\n")[:-1]


def _write_line(fd: int, line: str) -> None:
    os.write(fd, line.encode() + b"\n")


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
        said += before + [line for line in later if line.startswith(("changing ", "untag "))]
        disk.unmount()
        disk.mount()
        wrong = check_after(disk.place / "store", said)
        if wrong:
            task.broke(f"{kind}, {how}, cycle {number}: {wrong}")
        task.tried(f"{kind}, {how}")
    task.details["acknowledgements"] += len(said)


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
    with tempfile.TemporaryDirectory(prefix="holdfast-full-") as folder:
        _command("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


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
                except AssertionError as error:
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
    stores = [store for store in holdfast.agent.store._open.values() if not store.closed]
    ballast.unlink()
    for store in stores:
        agent = store.agent("same-handle")
        agent.state["bulk"] = chance.randbytes(5_000)
        agent.checkpoint("room again")
        store.close()
    wrong = check_after(path, [])
    if wrong:
        raise AssertionError(wrong)
    with holdfast.open(path) as store:
        ledger.check(store)
    return ended
