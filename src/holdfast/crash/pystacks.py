"""Python and native stacks of another process or of a core, through PyStack, which is optional.

Must not know dumps. Holds always: PyStack runs in a process of its own with a time limit, because it reads memory that
may be anything; what it says is turned into plain bounded records; without it the answer says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_LIVE_S = 30.0
_CORE_S = 120.0
_THREADS = 2_000
_FRAMES = 400
_LOCALS = 200  # of a frame
_TEXT = 2_000  # characters of a value
_SPAN_LINES = 2_000
_COLUMNS = 20_000
_MISSING = "PyStack is not installed: Python and native stacks from outside need it (pip install 'holdfast[native]')"
_CODE = (
    "import sys; sys.path[:] = sys.argv[3:]; from holdfast.crash.pystacks import main; main(sys.argv[1], sys.argv[2])"
)


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
