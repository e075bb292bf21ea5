"""Native evidence of another process or of a core: registers through ptrace, stacks through PyStack, which is optional.

Must not know dumps, nor import anything of this package: it also runs as a program of its own. Holds always: what may
hang or crash runs in a short-lived process with a time limit, and its answer becomes plain bounded records; without
PyStack the answer says so. For registers each thread is seized without a signal, stopped, read and let go; nothing is
written into it, and the kernel lets go of whatever a tracer still holds when the tracer ends: also of a thread that did
not stop in time, which would otherwise stop later and for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

_LIVE_S = 30.0
_CORE_S = 120.0
_THREADS = 2_000
_FRAMES = 400
_LOCALS = 200  # of a frame
_TEXT = 2_000  # characters of a value
_SPAN_LINES = 2_000
_COLUMNS = 20_000
_MISSING = "PyStack is not installed: Python and native stacks from outside need it (pip install 'holdfast[native]')"
_CODE = "import sys; sys.path[:] = sys.argv[3:]; from holdfast.crash.native import main; main(sys.argv[1], sys.argv[2])"


def of_process(pid: int) -> dict[str, Any]:
    """``{"threads", "native", "python"}``, or ``{"problem"}``. The process stops while it is read."""
    before = _stopped(pid)
    answer = _asked(str(pid), "", _LIVE_S)
    if not before and _stopped(pid):  # it was ended in the middle of its work: nobody else would let the process go on
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return answer


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def of_core(core: Path, executable: Path) -> dict[str, Any]:
    """As ``of_process``, of a core file and the program that left it."""
    return _asked(str(core), str(executable), _CORE_S)


def _asked(what: str, executable: str, limit_s: float) -> dict[str, Any]:
    search = [str(Path(item).absolute()) if item else str(Path.cwd()) for item in sys.path]
    command = [sys.executable, "-I", "-c", _CODE, what, executable, *search]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 (our own interpreter and code)
    except subprocess.TimeoutExpired:
        return {"problem": f"PyStack gave no answer in {limit_s:.0f} s"}
    except OSError as error:
        return {"problem": f"PyStack could not be started: {error.strerror}"}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return {"problem": f"PyStack ended with status {done.returncode} and no answer"}
    return answer


def main(what: str, executable: str) -> None:
    """What the process of its own does: read, and print one JSON document."""
    sys.stdout.write(json.dumps(_read(what, executable)))


def _read(what: str, executable: str) -> dict[str, Any]:
    try:
        from pystack.engine import (  # type: ignore[import-untyped,unused-ignore]
            NativeReportingMode,
            StackMethod,
            get_process_threads,
            get_process_threads_for_core,
        )
    except ImportError:
        return {"problem": _MISSING}
    problem = ""
    # Native frames need symbols and may fail where Python's own do not, so they are given up first, then locals.
    for native, named in ((NativeReportingMode.ALL, True), (NativeReportingMode.OFF, True)):
        try:
            if executable:
                every = get_process_threads_for_core(
                    Path(what), Path(executable), native_mode=native, locals=named, method=StackMethod.AUTO
                )
            else:
                every = get_process_threads(
                    int(what), stop_process=True, native_mode=native, locals=named, method=StackMethod.AUTO
                )
            answer = _records(list(every), main=0 if executable else int(what))
        except Exception as error:  # noqa: BLE001 (it reads memory that may be anything)
            told = str(error)
            unknown = "this is no Python process, or none that it knows: " if "python version" in told else ""
            problem = f"PyStack: {unknown}{type(error).__name__}: {told[:500]}"
            continue
        if problem:
            answer["cut"] = problem
        return answer
    return {"problem": problem}


def _records(every: list[Any], main: int) -> dict[str, Any]:
    threads = []
    native: dict[str, list[dict[str, Any]]] = {}
    version = ""
    program = next((str(getattr(thread, "name", None) or "") for thread in every if thread.tid == main), "")
    for thread in every[:_THREADS]:
        frames = [_frame(frame) for frame in list(thread.frames)]
        left_out = max(0, len(frames) - _FRAMES)
        if left_out:
            frames = frames[: _FRAMES // 4] + frames[len(frames) - _FRAMES * 3 // 4 :]
            frames[_FRAMES // 4]["gap"] = left_out
        threads.append(
            {
                "id": thread.tid,
                "native_id": thread.tid,
                "name": _name(thread, program, main),
                "current": False,
                "failing": False,
                "main": thread.tid == main,
                "holds_gil": thread.holds_the_gil == 1,
                "collecting": thread.is_gc_collecting == 1,
                "frames": frames,
                "left_out": left_out,
            }
        )
        native[str(thread.tid)] = [
            {
                "function": frame.symbol[:300],
                "file": frame.path[:1000],
                "line": frame.linenumber,
                "module": frame.library[:300],
                "address": frame.address,
            }
            for frame in thread.native_frames[:_FRAMES]
        ]
        if thread.python_version:
            version = ".".join(map(str, thread.python_version))
    return {"threads": threads, "native": native, "python": version}


def _name(thread: Any, program: str, main: int) -> str:
    """The kernel's name of a thread, which is the program's where nobody gave it another."""
    if thread.tid == main:
        return "MainThread"
    name = str(getattr(thread, "name", None) or "")
    return "" if name == program else name[:400]


def _frame(frame: Any) -> dict[str, Any]:
    place = frame.code.location
    named = list({**frame.arguments, **frame.locals}.items())
    record: dict[str, Any] = {
        "file": frame.code.filename[:4096],
        "line": place.lineno,
        "span": _span(place),
        "function": frame.code.scope[:400],
        "locals": [text[:_TEXT] for pair in named[:_LOCALS] for text in map(str, pair)],
        "locals_as_text": True,
    }
    if not named and record["function"] == "<module>":
        record["hidden"] = "PyStack reads no names of a module"
    if len(named) > _LOCALS:
        record["locals_total"] = len(named)
    return record


def _span(place: Any) -> list[int]:
    """Last line, first and last column; nothing where PyStack decoded a table that it does not know."""
    last, first, end = place.end_lineno, place.column, place.end_column
    ordered = last > place.lineno or first <= end
    if (
        place.lineno <= last <= place.lineno + _SPAN_LINES
        and 0 <= first <= _COLUMNS
        and 0 <= end <= _COLUMNS
        and ordered
    ):
        return [last, first, end]
    return [place.lineno, 0, 0]


# -- registers --------------------------------------------------------------------------------------------------------


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
        problem = _read_thread(libc, tid, names, found)
        if problem:
            problems[problem] = problems.get(problem, 0) + 1
            if not found and problem.startswith("seize"):
                break  # what one thread forbids, all do
    return found, "; ".join(f"{problem} ({count} threads)" for problem, count in problems.items())


def _read_thread(libc: ctypes.CDLL, tid: int, names: tuple[str, ...], found: dict[int, dict[str, int]]) -> str:
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
