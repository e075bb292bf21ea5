"""Forks of this program: whether one may be made, and what a copy may do.

Owns the reasons for which a fork is refused, and the one way in which this room forks. Must not know what a copy is
for. What always holds: a copy has no thread but its own, and none of the others held a lock that it may need; it ends
with the process that made it; signals are blocked in it until it says otherwise, so that what is sent to all of a
terminal's processes does not end it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import io
import os
import signal
import stat
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from holdfast.errors import ForkRefused
from holdfast.process.image import store_of
from holdfast.store import copies, processes

OWN = "holdfast-"
WORKING = ("holdfast-work",)
"""How the threads of this package begin that wait for something to do; and those that execute other people's code."""

PROBE_S = 0.001
LINGER_S = 0.2
"""How long a thread that has ended may still be seen: mostly, and on a busy machine."""

SPARE_BYTES = 64 * 2**20
SPARE_SHARE = 4
"""What must be free before a copy is made: so much, and this part of what the process has. It grows as pages change."""

_ALL = signal.valid_signals()
_PDEATHSIG, _SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


# -- whether it may be made -------------------------------------------------------------------------------------------


def refuse(what: str, *, children: bool = False) -> None:
    """Raise ``ForkRefused`` where a copy could hang, or would not be what it seems. ``children``: those may be."""
    reason, hint = obstacle(children=children)
    if reason:
        raise ForkRefused(f"{what}: {reason}; nothing was forked", reason=reason, hint=hint)


def obstacle(*, children: bool = False) -> tuple[str, str]:
    """Why a copy cannot be made, and what to do; empty when it can."""
    if not sys.platform.startswith("linux"):
        return "this is not Linux", "Use checkpoint() and rollback()."
    if "asyncio" in sys.modules and sys.modules["asyncio"]._get_running_loop() is not None:
        return "an event loop is running", "Use it in plain code, before asyncio.run(...) or in a process of its own."
    if not children and (found := _children()):
        named = ", ".join(map(str, found[:5]))
        return (
            f"there are child processes ({named}), which a copy could not wait for",
            "Wait for them first: process.wait().",
        )
    if others := _foreign():
        return (
            f"there are other threads ({', '.join(others[:5])}), which may hold locks at this moment",
            "Join them first.",
        )
    has, free = _memory()
    if free < SPARE_BYTES + has // SPARE_SHARE:
        return (
            f"memory is short: {free >> 20:,} MiB are free, and the process has {has >> 20:,} MiB",
            "Free some, or use a machine or a group with more.",
        )
    return "", ""


def _children() -> list[int]:
    """Processes that are this one's to wait for, but for those of this package."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if pid not in copies.OWN]


def _foreign() -> list[str]:
    """Threads that are not this package's, by name. Those of a library that stops them for a fork do not count."""
    mine, began, probed = threading.get_native_id(), time.monotonic(), False
    while True:
        # One that was not begun as Python's own, as those for a single step of ours, has no name worth telling.
        named = [one for one in threading.enumerate() if not one.name.startswith("Dummy-")]
        known = {thread.native_id: thread.name for thread in named}
        tasks = [int(name) for name in os.listdir("/proc/self/task") if int(name) != mine]
        found = [known.get(task, "") for task in tasks]
        found = [name for name in found if not name.startswith(OWN) or name.startswith(WORKING)]
        if any(found) or not found:
            return [name or "no Python thread" for name in found]
        gone_s = time.monotonic() - began
        if gone_s >= LINGER_S:
            return ["no Python thread"] * len(found)
        if not probed and gone_s >= PROBE_S:
            probe()  # linear algebra packages end their threads before a fork, and start them when they have work
            probed = True
        time.sleep(0.0002)


def probe() -> None:
    """Fork for nothing: what ends its threads then has none."""
    pid = _fork()
    if pid == 0:
        os._exit(0)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _memory() -> tuple[int, int]:
    """What this process has in memory, and what is free for it, in bytes."""
    has = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # a group without a limit says "max"; one of the old kind says it elsewhere
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        place = Path(f"/sys/fs/cgroup/{group}")
        most = int((place / "memory.max").read_text())
        free = min(free, most - int((place / "memory.current").read_text()))
    return has, free


# -- making one -------------------------------------------------------------------------------------------------------


def copy(*, goes_on: bool = True) -> int:
    """Fork. Gives the copy's process number, and 0 in the copy, where signals are blocked.

    ``goes_on``: other people's code goes on in the copy, with the files that it has open. Raises where commits could
    not be brought to rest. The caller has asked ``refuse``.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()  # what is in there would be written by both
    if goes_on:
        _flush_files()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    pid = -1
    try:
        pid = _fork()
    except OSError as error:
        raise ForkRefused(
            f"no process can be made ({error.strerror}); nothing was forked", reason="the system refuses"
        ) from error
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid == 0:
        if not masks:
            masks.append(before)
        end_with(parent)
    elif not processes.rested:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise ForkRefused(
            "a commit has been going on for too long; nothing was forked",
            reason="a commit is going on",
            hint="Try again when whoever writes the store is done.",
        )
    return pid


def _flush_files() -> None:
    """Write out what regular files hold back that are open for writing: both would write it. A pipe might not take it.

    All objects are looked at only if there is such a file: that takes some hundred milliseconds for a million of them.
    """
    files = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY and fd > 2
            if written and stat.S_ISREG(os.fstat(fd).st_mode):
                files.add(fd)
    files = {fd for fd in files if store_of(Path(os.readlink(f"/proc/self/fd/{fd}"))) is None}
    kinds = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom}
    for one in [one for one in gc.get_objects() if type(one) in kinds] if files else ():
        with suppress(Exception):  # closed, taken apart, or no room: whoever writes next is told
            if one.fileno() in files:
                one.flush()


masks: list[set[signal.Signals | int]] = []
"""In a copy whose signals are blocked: those that were blocked in the program."""


def _fork() -> int:
    with warnings.catch_warnings():  # threads that wait for something to do are no reason to warn
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        return os.fork()


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive() -> None:
    """Let it live on when its parent ends."""
    _libc.prctl(_PDEATHSIG, 0)


def adopt() -> None:
    """Let this process be the parent of those whose own parents end, also when it is another program."""
    _libc.prctl(_SUBREAPER, 1)


def take_signals() -> None:
    """In a copy that goes on as the program: signals count from now on, and not those that came meanwhile."""
    while signal.sigtimedwait(_ALL, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())


def reap(pid: int) -> int:
    """Wait for the end of a process of ours; how it ended, 1 where nobody can say any more."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return 1


def end(pid: int) -> None:
    """End a copy that nobody needs."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    reap(pid)


def leave(code: int = 0) -> NoReturn:
    """End a copy, without anything that is done at the end of a program."""
    os._exit(code)
