"""The process's half of its sidecar: starting it, and leaving in shared memory what it will need after a death.

Owns the layout of that memory. Must not know how a dump is written. Holds always: nothing here raises into the program,
waits for the sidecar (but for its start) or makes a system call for each record; a write is a copy into memory, and
what a death cut in the middle is recognised by its sum and left out; the sidecar is no child of the program, holds none
of its pipes, and leaves when the program ends.

The sidecar (sidecar_process.py) is a small interpreter without `site`, started by exec. A fork would share the
program's memory and locks; a thread would die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import itertools
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import ormsgpack

from holdfast.crash import system
from holdfast.crash.kinds import Limits
from holdfast.crash.outside import Fatal
from holdfast.crash.redaction import looks_secret
from holdfast.crash.shapes import exact_text
from holdfast.crash.stacks import library_paths, threads
from holdfast.errors import DumpFailed

_START_S = 20.0  # a loaded machine may need a while for a new interpreter
_SNAPSHOT_S = 1.0
_STACKS = 64  # threads in a thin snapshot, and frames of each
_FRAMES = 40
_KNOWN_BYTES = 4096  # of one secret value
_PR_SET_PTRACER = 0x59616D61
_CODE = "import sys; sys.path[:0] = sys.argv[6:]; from holdfast.crash.sidecar_process import main; main(sys.argv[1:6])"
_NEEDED = ("holdfast", "ormsgpack", "zstandard", "blake3", "pystack")  # the last one only where it is installed


class Sidecar:
    """A sidecar that runs. Every method may be called from any thread; in a forked child they do nothing."""

    def __init__(self, folder: Path, area: Area, stop: int, pid: int, asked: int, text: int) -> None:
        self.folder = folder
        self.pid = pid  # the sidecar's
        self._area = area
        self._stop = stop
        self._signal = asked
        self._text = text
        self._owner = os.getpid()
        self._told: dict[str, list[Any]] = {}
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # apart, because an answer takes its time
        self._snapshot_at = 0.0
        self._environment: dict[str, str] = {}
        self._modules = 0
        self._threads = 0
        self._asked = 0
        os.register_at_fork(after_in_child=self._leave_to_parent)
        self.beat()

    def beat(self) -> None:
        """Say that the interpreter runs. Once a second this also leaves where each thread stands."""
        if self._owner:
            self._area.numbers[BEAT_NS] = time.monotonic_ns()
            count = threading.active_count()
            due = count != self._threads or time.monotonic() - self._snapshot_at >= _SNAPSHOT_S
            if due and self._lock.acquire(blocking=False):
                try:
                    self._snapshot_at, self._threads = time.monotonic(), count
                    self._snapshot()
                finally:
                    self._lock.release()

    def progress(self) -> None:
        """Say that the program got on: a step ended, a request was served."""
        if self._owner:
            numbers = self._area.numbers
            numbers[PROGRESS] += 1
            numbers[PROGRESS_NS] = time.monotonic_ns()

    def log(self, entry: dict[str, Any]) -> None:
        """Leave a log record, as ``logs.Ring`` makes them."""
        if not self._owner:
            return
        short = {key: value[:LOG_TEXT_CHARS] if key == "text" else value for key, value in entry.items()}
        body = packed(short)
        if len(body) > LOG_BYTES - 16:  # characters of several bytes, or a long path
            body = packed({**short, "text": short["text"][:250], "file": short["file"][-250:], "thread": ""})
        self._area.put_record(body)

    def tell(self, kind: str, name: str, data: Any) -> None:
        """Leave plain data for a part of a later dump (AGENT, LOCKS or NOTE). The last one of a name counts."""
        if not self._owner or not self._lock.acquire(timeout=1.0):
            return
        try:
            key = f"{kind}:{name}"
            self._told.pop(key, None)
            if data is not None:
                self._told[key] = [kind, name, data, time.time()]
            if not self._area.put(TOLD, packed(list(self._told.values()))) and key in self._told:
                self._told[key][2] = {"left out": "more than the shared memory can take"}
                self._area.put(TOLD, packed(list(self._told.values())))
        finally:
            self._lock.release()

    def native(self, within_s: float = 2.0) -> dict[str, Any] | None:
        """Registers and native stacks of this process, read from outside. As much as is there in time."""
        if not self._owner or not self._asking.acquire(timeout=within_s / 4):
            return None
        found: dict[str, Any] | None = None
        try:
            self._asked += 1
            os.write(self._stop, b"n")
            until = time.monotonic() + within_s
            while time.monotonic() < until:
                answer = unpacked(self._area.get(ANSWER))
                if answer and answer["number"] == self._asked:
                    found = answer["native"]
                    if answer["whole"]:
                        break
                time.sleep(0.01)
        except OSError:
            return None
        finally:
            self._asking.release()
        return found

    def ending(self) -> None:
        """A normal end has begun: what follows is no crash, unless a signal says otherwise."""
        if self._owner:
            self._area.numbers[STATE] = ENDING

    def stop(self) -> None:
        """Let the sidecar leave while the process goes on."""
        if not self._owner:
            return
        self._owner = 0
        self._area.numbers[STATE] = LEAVE
        with contextlib.suppress(OSError):
            os.write(self._stop, b"q")
        if self._signal:
            faulthandler.unregister(self._signal)
        for descriptor in (self._stop, self._text):
            os.close(descriptor)

    def _leave_to_parent(self) -> None:
        """In a forked child: the sidecar watches the parent, so the child must not speak for it."""
        self._owner = 0

    def _snapshot(self) -> None:
        beating = sys._getframe(2)  # noqa: SLF001 (the documented way): whoever called beat()
        stacks = []
        for thread in threads()[:_STACKS]:
            rows: list[list[Any]] = []
            step = beating if thread["current"] else thread["frame"]
            while step is not None and len(rows) < _FRAMES:
                code = step.f_code
                rows.append([code.co_filename[-300:], step.f_lineno or 0, code.co_qualname[-150:]])
                step = step.f_back
            name, native = thread["name"][:100], thread.get("native_id", 0)
            stacks.append([thread["id"], name, native, thread.get("main", False), rows, step is not None])
        if not self._area.put(STACKS, packed([time.time(), stacks])):
            self._area.put(STACKS, packed([time.time(), [[*item[:4], item[4][:6], True] for item in stacks]]))
        environment = dict(os.environ)
        if environment != self._environment:
            self._environment = environment
            secret = [value[:_KNOWN_BYTES] for name, value in environment.items() if looks_secret(name)]
            self._area.put(KNOWN, packed(secret[:200]))
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._area.put(MODULES, packed(_versions()))


def start(
    folder: str | os.PathLike[str],
    *,
    fatal: Fatal | None = None,
    hang_s: float | None = None,
    core: bool = False,
    limits: Limits | None = None,
) -> Sidecar:
    """Start a sidecar for this process. DumpFailed when that is not possible here."""
    place = Path(folder).absolute()
    if not sys.executable or not hasattr(os, "pidfd_open"):
        raise DumpFailed("a sidecar needs Linux and an interpreter that can be started by its path")
    try:
        memory = Area.create()
        watched = os.pidfd_open(os.getpid())
        text = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
        fcntl.fcntl(text, fcntl.F_SETFL, os.O_APPEND)
        heard, stop = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        raise DumpFailed(f"no sidecar could be started: {error.strerror}") from error
    asked = _ask_by_signal(text)
    area = Area(memory)
    setup = {
        "pid": os.getpid(),
        "folder": str(place),
        "fatal": str(fatal.path) if fatal else "",
        "hang_s": hang_s or 0,
        "core": core,
        "limits": asdict(limits or Limits()),
        "signal": asked,
        "program": [item[:1000] for item in sys.argv[:50] if type(item) is str],
        "python": sys.version.split()[0],
        "echo": bool(fatal and fatal.echo),
        "search": [item for item in sys.path if type(item) is str and item],
        "library": library_paths(),
        "began": system.began(os.getpid()),
        "executable": str(Path("/proc/self/exe").readlink()),
        "cwd": str(Path("/proc/self/cwd").readlink()),
    }
    # The file of fatal signals is passed for its lock: until the sidecar has read it, nobody else may.
    passed = [memory, watched, heard, text, fatal.fileno() if fatal else text]
    try:
        pid = _launch(passed, json.dumps(setup).encode(), echo=bool(setup["echo"]))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        if asked:
            faulthandler.unregister(asked)
        for descriptor in (stop, text):
            os.close(descriptor)
        area.close()
        raise DumpFailed(f"no sidecar could be started: {type(error).__name__}") from error
    finally:
        for descriptor in (memory, watched, heard):
            os.close(descriptor)
    _allow_tracing(pid)
    return Sidecar(place, area, stop, pid, asked, text)


def _versions() -> list[list[str]]:
    """Modules that are not inside a package, with their files and versions."""
    found: list[list[str]] = []
    for name, module in list(sys.modules.items())[:20_000]:
        if type(name) is str and "." not in name and type(module) is type(sys) and len(found) < 400:
            fields = module.__dict__
            file, version = exact_text(fields.get("__file__"), 200), exact_text(fields.get("__version__"), 40)
            if file:
                found.append([name[:100], file, version])
    return found


def _launch(passed: list[int], setup: bytes, *, echo: bool) -> int:
    """Start the interpreter; it starts itself once more and leaves, so that the program never has a child to reap."""
    found = [sys.modules[name].__file__ or "" for name in _NEEDED if name in sys.modules]
    folders = [*dict.fromkeys(str(Path(file).parent.parent) for file in found), *map(str, _extension_folders())]
    command = [sys.executable, "-I", "-S", "-c", _CODE, *map(str, passed), *folders]
    child = subprocess.Popen(  # noqa: S603 (our own interpreter, our own code)
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if echo else subprocess.DEVNULL,
        cwd="/",
        pass_fds=[*dict.fromkeys(passed)],
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(setup, timeout=_START_S)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return int(said)


def _extension_folders() -> list[Path]:
    """Where packages lie that the sidecar needs and that the program has not loaded yet."""
    import importlib.util

    found = []
    for name in _NEEDED:
        if name not in sys.modules:
            place = importlib.util.find_spec(name)
            if place is not None and place.origin:
                found.append(Path(place.origin).parent.parent)
    return list(dict.fromkeys(found))


def _ask_by_signal(text: int) -> int:
    """Let a signal that nobody uses write all stacks, by a handler in C that needs no lock. 0 when there is none."""
    taken = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
            taken |= int(line.split()[1], 16)  # what the kernel says: handlers in C are not known to `signal`
    for number in range(signal.SIGRTMIN + 8, signal.SIGRTMAX):
        if not taken >> (number - 1) & 1:
            faulthandler.register(number, file=text, all_threads=True, chain=False)
            return number
    return 0


def _allow_tracing(pid: int) -> None:
    """Where Yama restricts tracing to descendants, name the sidecar as the exception."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


# -- the shared memory ------------------------------------------------------------------------------------------------


KIB: Final = 1024
# Numbers of 64 bits at the beginning, in the machine's own order.
BEAT_NS: Final = 0  # when the process beat last, by the monotonic clock
PROGRESS: Final = 1  # how often it said that it got on
PROGRESS_NS: Final = 2
STATE: Final = 3
RUNNING: Final = 0
ENDING: Final = 1  # a normal end has begun
LEAVE: Final = 2  # the process wants no sidecar any more

# Each slot holds the newest value of its kind, in two halves that are written in turn.
STACKS: Final = "stacks"
TOLD: Final = "told"  # the agent's place, locks, notes
MODULES: Final = "modules"
ANSWER: Final = "answer"  # native stacks and registers, when the process asked for its own
KNOWN: Final = "known"  # values of secret variables: never written anywhere else
_SLOTS: Final = {
    STACKS: 256 * KIB,
    TOLD: 128 * KIB,
    MODULES: 160 * KIB,
    KNOWN: 64 * KIB,
    ANSWER: 1024 * KIB,
}
_HALF = struct.Struct("=QII")  # turn, length, sum
_FRONT: Final = 4096

LOG_RECORDS: Final = 512
LOG_BYTES: Final = 2 * KIB
LOG_TEXT_CHARS: Final = 1200  # what surely fits; a longer text is cut
_LOGS_AT: Final = _FRONT + 2 * sum(_SLOTS.values())
SIZE: Final = _LOGS_AT + LOG_RECORDS * LOG_BYTES


class Area:
    """The shared memory, seen from either side. It is sparse: what was never written takes no room."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, SIZE)
        self.numbers = memoryview(self.memory)[:_FRONT].cast("Q")
        self._turns = dict.fromkeys(_SLOTS, 0)
        self._records = itertools.count(1)  # next() on it is atomic, so that threads never share a place

    @staticmethod
    def create() -> int:
        """A descriptor of new memory that has no name and is gone with the last process that has it."""
        descriptor = os.memfd_create("holdfast-sidecar", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, SIZE)
        return descriptor

    def close(self) -> None:
        self.numbers.release()
        self.memory.close()

    def put(self, slot: str, packed: bytes) -> bool:
        """Make this the slot's value. One thread at a time for each slot. False when it is too long."""
        room = _SLOTS[slot]
        if len(packed) > room - _HALF.size:
            return False
        turn = self._turns[slot] = self._turns[slot] + 1
        at = _place(slot) + (turn % 2) * room
        start = at + _HALF.size
        self.memory[start : start + len(packed)] = packed
        _HALF.pack_into(self.memory, at, turn, len(packed), zlib.crc32(packed))
        return True

    def get(self, slot: str) -> bytes:
        """The newest whole value; empty when there is none."""
        room = _SLOTS[slot]
        newest, found = 0, b""
        for at in (_place(slot), _place(slot) + room):
            turn, length, summed = _HALF.unpack_from(self.memory, at)
            packed = self.memory[at + _HALF.size : at + _HALF.size + min(length, room)]
            if turn > newest and zlib.crc32(packed) == summed:
                newest, found = turn, packed
        return found

    def put_record(self, packed: bytes) -> None:
        """Add a log record. Any thread, at any time."""
        number = next(self._records)
        at = _LOGS_AT + (number % LOG_RECORDS) * LOG_BYTES
        packed = packed[: LOG_BYTES - _HALF.size]
        self.memory[at + _HALF.size : at + _HALF.size + len(packed)] = packed
        _HALF.pack_into(self.memory, at, number, len(packed), zlib.crc32(packed))

    def records(self) -> list[tuple[int, bytes]]:
        """The newest log records that are whole, oldest first, each with its number."""
        found: list[tuple[int, bytes]] = []
        for at in range(_LOGS_AT, SIZE, LOG_BYTES):
            number, length, summed = _HALF.unpack_from(self.memory, at)
            packed = self.memory[at + _HALF.size : at + _HALF.size + min(length, LOG_BYTES)]
            if number and zlib.crc32(packed) == summed:
                found.append((number, packed))
        return sorted(found)


def _place(slot: str) -> int:
    at = _FRONT
    for name, room in _SLOTS.items():
        if name == slot:
            break
        at += 2 * room
    return at


def packed(value: Any) -> bytes:
    """A value for the other side; what is not plain is left out."""
    try:
        return ormsgpack.packb(value)
    except (TypeError, ValueError, RecursionError):
        try:
            return ormsgpack.packb(_plain(value, 8))
        except (TypeError, ValueError):
            return ormsgpack.packb(None)


def _plain(value: Any, depth: int) -> Any:
    """The same with texts that can be packed, without what is not plain."""
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()
    if kind in (int, float, bool, bytes, type(None)):
        return value if kind is not int or -(2**63) <= value < 2**64 else str(value.bit_length()) + " bits"
    if kind in (list, tuple) and depth:
        return [_plain(item, depth - 1) for item in value]
    if kind is dict and depth:
        return {_plain(key, 0): _plain(item, depth - 1) for key, item in value.items() if type(key) is str}
    return "left out: not plain"


def unpacked(packed: bytes) -> Any:
    """A value that the other side packed; None when it is not one."""
    try:
        return ormsgpack.unpackb(packed) if packed else None
    except ValueError:
        return None
