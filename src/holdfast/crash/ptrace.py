"""Registers of a running process's threads, through the kernel's ptrace.

Must not know dumps, nor import anything of this package: it also runs as a program of its own. Holds always: each
thread is seized without a signal, stopped, read and let go; nothing is written into it. A short-lived process does it,
because the kernel lets go of whatever a tracer still holds when the tracer ends: also of a thread that did not stop in
time, which would otherwise stop later and for ever.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any, Final

_SEIZE, _INTERRUPT, _DETACH, _GETREGSET = 0x4206, 0x4207, 17, 0x4204
_NT_PRSTATUS: Final = 1
_WALL: Final = 0x40000000
_WHOLE_S = 30.0  # for all threads, with the start of an interpreter
_STOP_S = 0.5  # a thread in an uninterruptible wait does not stop; it is left out
_BUSY_S = 10.0  # any other stops as soon as it gets a processor
_MOST = 2_000

X86_64: Final = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
AARCH64: Final = (*(f"x{number}" for number in range(31)), "sp", "pc", "pstate")
NAMES: Final = {"x86_64": X86_64, "aarch64": AARCH64}


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def registers(pid: int) -> tuple[dict[int, dict[str, int]], str]:
    """Registers by thread, and in words what could not be read."""
    command = [sys.executable, "-I", "-S", __file__, str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_WHOLE_S, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 (our own interpreter and file)
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {}, f"registers could not be read: {type(error).__name__}"
    return {int(tid): values for tid, values in answer["threads"].items()}, answer["problem"]


def _registers(pid: int) -> tuple[dict[int, dict[str, int]], str]:
    names = NAMES.get(platform.machine())
    if names is None:
        return {}, f"registers of {platform.machine()} are not known"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    try:
        tids = sorted(int(entry.name) for entry in os.scandir(f"/proc/{pid}/task"))[:_MOST]
    except OSError:
        return {}, f"there is no process {pid}"
    found: dict[int, dict[str, int]] = {}
    problems: dict[str, int] = {}
    for tid in tids:
        problem = _read(libc, tid, names, found)
        if problem:
            problems[problem] = problems.get(problem, 0) + 1
            if not found and problem.startswith("seize"):
                break  # what one thread forbids, all do
    return found, "; ".join(f"{problem} ({count} threads)" for problem, count in problems.items())


def _read(libc: ctypes.CDLL, tid: int, names: tuple[str, ...], found: dict[int, dict[str, int]]) -> str:
    """One thread at a time, so that the others run on and no stop outlasts a mistake."""
    if libc.ptrace(_SEIZE, tid, None, None) != 0:
        return f"seize: {os.strerror(ctypes.get_errno())}"
    stopped = False
    forward = 0
    try:
        if libc.ptrace(_INTERRUPT, tid, None, None) != 0:
            return f"interrupt: {os.strerror(ctypes.get_errno())}"
        status = _wait(tid)
        if status is None:
            return "a thread did not stop in time"
        if not os.WIFSTOPPED(status):
            return "a thread ended meanwhile"
        stopped = True
        if status >> 16 == 0:  # a signal was being delivered: it is handed on when the thread is let go
            forward = os.WSTOPSIG(status)
        values = (ctypes.c_uint64 * len(names))()
        vector = _Vector(ctypes.cast(values, ctypes.c_void_p), ctypes.sizeof(values))
        if libc.ptrace(_GETREGSET, tid, ctypes.c_void_p(_NT_PRSTATUS), ctypes.byref(vector)) != 0:
            return f"read: {os.strerror(ctypes.get_errno())}"
        found[tid] = dict(zip(names, values, strict=True))
        return ""
    finally:
        if stopped:
            libc.ptrace(_DETACH, tid, None, ctypes.c_void_p(forward))


def _wait(tid: int) -> int | None:
    began = time.monotonic()
    pause = 0.00005
    while True:
        waited = time.monotonic() - began  # before the look: whoever was held up itself looks once more
        try:
            got, status = os.waitpid(tid, os.WNOHANG | _WALL)
        except ChildProcessError:
            return None
        if got:
            return status
        if waited > _BUSY_S or (waited > _STOP_S and _state(tid) == "D"):
            return None
        time.sleep(pause)
        pause = min(pause * 2, 0.005)


def _state(tid: int) -> str:
    try:
        with open(f"/proc/{tid}/stat", "rb") as file:  # noqa: PTH123 (nothing is imported that is not needed)
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


if __name__ == "__main__":
    _threads, _problem = _registers(int(sys.argv[1]))
    json.dump({"threads": _threads, "problem": _problem}, sys.stdout)
