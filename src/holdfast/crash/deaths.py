"""How another process ended: what the kernel tells of it, and what speaks for the out-of-memory killer.

Must not know dumps. Holds always: what is said to be known comes from the kernel; a process that is not our child is
never reaped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from typing import Final

from holdfast.crash import system

_VERDICT_S = 2.0  # how long to wait for the kernel to say how the process ended
# Ends that somebody wanted: asked to leave, its terminal or its reader gone, its own alarm.
_WANTED: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM))
_PIDFD_GET_INFO: Final = 0xC040FF0B
_INFO_EXIT: Final = 8


def status(pid: int, pidfd: int) -> int | None:
    """The wait status: from /proc while nobody has reaped the process, from its pidfd afterwards (Linux 6.15)."""
    until = time.monotonic() + _VERDICT_S
    while True:
        fields = system.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields and fields[0] in "ZX" and len(fields) >= 50 and fields[49].isdigit():
            return int(fields[49])
        answer = bytearray(64)
        struct.pack_into("=Q", answer, 0, _INFO_EXIT)
        with contextlib.suppress(OSError):
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
            if struct.unpack_from("=Q", answer)[0] & _INFO_EXIT:
                return int(struct.unpack_from("=i", answer, 60)[0])
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def is_crash(status: int | None, *, ending: bool) -> bool:
    """Whether an end is one that nobody wanted. ``ending``: the process had said that it ends."""
    if status is None:
        return not ending
    number = status & 0x7F
    return number != 0 and number not in _WANTED


def killed_for_memory(pid: int, number: int, since: float, events: str) -> list[str]:
    """What speaks for the out-of-memory killer, strongest first. ``events``: the memory group's, before the death."""
    if number not in (0, signal.SIGKILL):
        return []
    found = [line for line in kernel_lines(pid, since) if "illed process" in line]
    # The process's own group cannot be asked any more; the sidecar lives in the same one.
    more = _count(system.cgroup().get("memory.events", ""), "oom_kill") - _count(events, "oom_kill")
    if more > 0:
        found.append(f"the memory group counts {more} more processes killed for memory than before")
    return found


def signal_name(number: int) -> str:
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _count(events: str, name: str) -> int:
    for line in events.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def kernel_lines(pid: int, since: float) -> list[str]:
    """Lines of the kernel's log that name the process, where it may be read."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for _ in range(100_000):
            try:
                record = os.read(handle, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten while it was read: the next one is there
            front, _, line = record.partition(";")
            words = front.split(",")
            at = booted + int(words[2]) / 1e6 if len(words) > 2 and words[2].isdigit() else 0
            if at >= since - 1 and (f"[{pid}]" in line or f"process {pid} " in line):
                found.append(line.splitlines()[0][:500])
    except OSError:
        pass
    finally:
        os.close(handle)
    return found[-20:]
