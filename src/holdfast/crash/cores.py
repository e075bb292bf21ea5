"""Kernel cores: allowing them, finding the one that a death left, reading its notes, keeping it, opening it later.

Must not know the sidecar. Holds always: the machine's own settings are never changed, only this process's; nothing that
a core declares is believed before it was compared with a bound; a core that is kept is proven by its digest when it is
opened; a core's place is never taken from a dump, only its name beside it.

A core is the process's memory as it was. It cannot be redacted, so it is made only when asked for, only its owner may
read it, and the dump says so. faulthandler catches a fatal signal and raises it once more, so that the notes tell of
that: a signal that was sent, and registers inside `raise`. Those of the fault itself are on the stack, where the kernel
puts them for a handler.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import stat
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zstandard
from blake3 import blake3

from holdfast.crash import dumpfile, kinds, native
from holdfast.crash.dump import open_dump
from holdfast.crash.dumpfile import add_extra
from holdfast.crash.native import NAMES
from holdfast.crash.outside import hide_locals
from holdfast.crash.records import Native
from holdfast.crash.redaction import Redactor
from holdfast.crash.system import text_of
from holdfast.errors import BadOption, CorruptValue, DumpFailed, NotInDump

# -- the notes of a core ---------------------------------------------------------------------------------------------


_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_NOTE = struct.Struct("<III")
_MACHINES: Final = {62: "x86_64", 183: "aarch64"}
_CORE, _PT_LOAD, _PT_NOTE = 4, 1, 4
_PRSTATUS, _PRPSINFO, _SIGINFO, _FILE = 1, 3, 0x53494749, 0x46494C45
_PID_AT, _REGISTERS_AT = 32, 112  # in an NT_PRSTATUS of either machine
# What the kernel puts on a stack for a handler, on x86_64: flags and link of the context, the stack, the registers.
_SAVED_AT, _SEGMENTS_AT, _FRAME_BYTES = 40, 40 + 18 * 8, 40 + 32 * 8
_SAVED: Final = (
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx", "rsp"),
    *("rip", "eflags", "segments", "error", "trap", "mask", "fault"),
)
_USER_SEGMENTS = bytes.fromhex("33000000 00002b00")  # of every 64-bit program
_OF_MEMORY, _PAGE_FAULT = (signal.SIGSEGV, signal.SIGBUS), 14
_STACK_BYTES = 256 << 10
_TRIES = 50  # of places that look like it
_SEGMENTS = 200_000
_NOTE_BYTES = 64 << 20
_THREADS = 20_000
_FILES = 20_000


@dataclass
class Notes:
    """What a core says of itself. ``threads``: thread -> registers, the one that got the signal first."""

    machine: str
    pid: int = 0
    command: str = ""
    signal: int = 0
    fault_address: int | None = None  # None: not known
    registers_of: str = ""  # what the first thread's registers are, where that is not the fault itself
    threads: dict[int, dict[str, int]] = field(default_factory=dict)
    files: list[list[Any]] = field(default_factory=list)  # path, where it begins and ends in memory

    def plain(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "pid": self.pid,
            "command": self.command,
            "signal": self.signal,
            "fault_address": self.fault_address,
            "registers_of": self.registers_of,
            "threads": [{"native_id": tid, "registers": values} for tid, values in self.threads.items()],
            "files": self.files,
        }


def read_notes(path: Path) -> Notes:
    """The notes of a core file. CorruptValue when it is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptValue(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _read(path, handle)
    except (struct.error, OSError, OverflowError) as error:
        raise CorruptValue(f"{path} is a damaged core file") from error
    finally:
        os.close(handle)


def _read(path: Path, handle: int) -> Notes:
    head = os.pread(handle, _HEADER.size, 0)
    if len(head) < _HEADER.size or head[:6] != b"\x7fELF\x02\x01":
        raise CorruptValue(f"{path} is not a 64-bit core file")
    _, kind, machine, _, _, at, sections, _, _, size, count, section_size, _, _ = _HEADER.unpack(head)
    if kind != _CORE or size != _SEGMENT.size:
        raise CorruptValue(f"{path} is not a core file")
    if count == 0xFFFF and section_size >= 48:  # more segments than the field can say: the first section has the number
        count = struct.unpack_from("<I", os.pread(handle, 48, sections), 44)[0]
    notes = Notes(_MACHINES.get(machine, f"machine {machine}"))
    left = _NOTE_BYTES
    loaded: list[tuple[int, int, int]] = []  # address, place in the file, bytes
    table = os.pread(handle, min(count, _SEGMENTS) * size, at)
    for place in range(0, len(table) - size + 1, size):
        kind, _, offset, address, _, stored, _, _ = _SEGMENT.unpack_from(table, place)
        if kind == _PT_LOAD and stored:
            loaded.append((address, offset, stored))
        if kind == _PT_NOTE and 0 < stored <= left:
            left -= stored
            _parse(os.pread(handle, stored, offset), notes)
    if not notes.threads:
        raise CorruptValue(f"{path} names no threads: it was cut, or is no core of a process")
    if notes.signal and notes.fault_address is None:
        _under_handler(handle, loaded, notes)
    return notes


def _under_handler(handle: int, loaded: list[tuple[int, int, int]], notes: Notes) -> None:
    """Where a handler of the same signal runs: the registers and the address of the signal that it handles."""
    registers = next(iter(notes.threads.values()))
    notes.registers_of = "the place that raised the signal; if a handler did so again, those of the fault are unknown"
    top = registers.get("rsp", 0) & ~7
    for address, offset, stored in loaded if notes.machine == "x86_64" else ():
        if address <= top < address + stored:
            stack = os.pread(handle, min(_STACK_BYTES, address + stored - top), offset + top - address)
            break
    else:
        return
    tries = _TRIES
    for at in range(0, len(stack) - _FRAME_BYTES, 8):
        if stack[at + _SEGMENTS_AT : at + _SEGMENTS_AT + 8] != _USER_SEGMENTS or stack[at + 8 : at + 16] != bytes(8):
            continue
        saved = dict(zip(_SAVED, struct.unpack_from(f"<{len(_SAVED)}Q", stack, at + _SAVED_AT), strict=True))
        code = any(start <= saved["rip"] < end for _name, start, end in notes.files)
        if code and any(address <= saved["rsp"] < address + stored for address, _offset, stored in loaded):
            registers.update((name, value) for name, value in saved.items() if name in registers)
            registers.pop("orig_rax", None)  # of the system call that raised it again
            notes.registers_of = "the fault, as the kernel kept them for the handler"
            if notes.signal in _OF_MEMORY and saved["trap"] == _PAGE_FAULT:  # of others the processor tells no address
                notes.fault_address = saved["fault"]
            return
        tries -= 1
        if not tries:
            return


def _parse(data: bytes, notes: Notes) -> None:
    at = 0
    while at + _NOTE.size <= len(data):
        name, length, kind = _NOTE.unpack_from(data, at)
        start = at + _NOTE.size + (name + 3 & ~3)
        body = data[start : start + length]
        at = start + (length + 3 & ~3)
        if len(body) < length:
            return
        if kind == _PRSTATUS:
            _thread(body, notes)
        elif kind == _PRPSINFO and length >= 136:
            notes.pid = struct.unpack_from("<i", body, 24)[0]
            notes.command = body[56:136].split(b"\0")[0].decode("utf-8", "replace")
        elif kind == _SIGINFO and length >= 24:
            notes.signal = struct.unpack_from("<i", body)[0]
            if struct.unpack_from("<i", body, 8)[0] > 0:  # from the kernel; a signal that was sent tells no address
                notes.fault_address = struct.unpack_from("<Q", body, 16)[0]
        elif kind == _FILE and length >= 16:
            _files(body, notes)


def _thread(body: bytes, notes: Notes) -> None:
    names = NAMES.get(notes.machine, ())
    if len(body) < _REGISTERS_AT + 8 * len(names) or len(notes.threads) >= _THREADS:
        return
    tid = struct.unpack_from("<i", body, _PID_AT)[0]
    notes.threads[tid] = dict(zip(names, struct.unpack_from(f"<{len(names)}Q", body, _REGISTERS_AT), strict=True))


def _files(body: bytes, notes: Notes) -> None:
    count = min(struct.unpack_from("<Q", body)[0], _FILES, (len(body) - 16) // 24)
    whole: int = struct.unpack_from("<Q", body)[0]
    if whole > (len(body) - 16) // 24:
        return
    names = body[16 + 24 * whole :].split(b"\0", count + 1)
    found: dict[str, list[Any]] = {}
    for number in range(min(count, len(names))):
        start, end, _ = struct.unpack_from("<QQQ", body, 16 + 24 * number)
        name = names[number].decode("utf-8", "replace")[:4096]
        entry = found.setdefault(name, [name, start, end])
        entry[1], entry[2] = min(entry[1], start), max(entry[2], end)
    notes.files = list(found.values())


# -- cores and dumps -------------------------------------------------------------------------------------------------


SUFFIX = kinds.CORE_SUFFIX
MAX_CORE_BYTES = 64 << 30  # what is read at most; a core is mostly holes
MAX_KEPT_BYTES = 4 << 30
MAX_KEEP_S = 120.0
_FREE_BYTES = 512 << 20  # that must stay free on the disk
_BLOCK = 1 << 20
_FILTER = "0x37"  # private and shared memory, ELF headers, huge pages: what debuggers and PyStack need
_PATTERN = "/proc/sys/kernel/core_pattern"
_UNREDACTED = "the core is the process's whole memory, secrets included: share it only with those who may know them"


def allow() -> str:
    """Let this process leave a core when it dies of a fatal signal. Returns why none can be had, or nothing."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text(_FILTER)
    if hard == 0:
        return "the hard limit for cores is 0 (ulimit -H -c)"
    return _unobtainable(text_of(_PATTERN).rstrip("\n"))


def _unobtainable(pattern: str) -> str:
    if pattern.startswith("|"):
        program = pattern[1:].strip().partition(" ")[0]
        hint = "; try `coredumpctl dump PID`" if "systemd-coredump" in program else ""
        return f"the kernel hands cores to {program} (core_pattern), so there is no file{hint}"
    if pattern.startswith("@"):
        return f"the kernel sends cores to the socket {pattern} (core_pattern), so there is no file"
    return "" if pattern else "core_pattern is empty: the kernel writes no cores"


def find(pid: int, folder: Path, since: float) -> tuple[Path | None, str]:
    """The core that the process left, and otherwise why there is none. ``folder``: where the process worked."""
    pattern = text_of(_PATTERN).rstrip("\n")
    reason = _unobtainable(pattern)
    if reason:
        return None, reason
    if "%p" not in pattern and text_of("/proc/sys/kernel/core_uses_pid").strip() == "1":
        pattern += ".%p"
    wanted = re.sub(
        r"%(.)|([*?\[])",
        lambda found: f"[{found[2]}]" if found[2] else {"%": "%", "p": str(pid)}.get(found[1], "*"),
        pattern,
    )
    root = Path("/") if wanted.startswith("/") else folder
    for path in sorted(root.glob(wanted.lstrip("/")))[:1000]:
        with contextlib.suppress(OSError, CorruptValue):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_mtime >= since - 2:
                notes = read_notes(path)
                if pid in notes.threads or notes.pid == pid:
                    return path, ""
    return None, f"no core of process {pid} matches {wanted} in {root}"


def keep(
    dump: Path,
    to: Path,
    redactor: Redactor,
    *,
    pid: int,
    folder: Path,
    since: float,
    executable: str,
    names: dict[int, str] | None = None,
) -> None:
    """Move the core of a dead process to ``to``, compressed, and write what it tells into the dump. Never raises.

    ``names``: of threads, as the process told them, by the kernel's number.
    """
    found: dict[str, dict[str, Any]] = {"core": {}}
    try:
        path, reason = find(pid, folder, since)
        if path is None:
            found["core"]["problem"] = reason
        else:
            found = _told(path, executable, redactor)
            for thread in (*found["core"]["threads"], *found["core stacks"].get("threads", ())):
                thread["name"] = (names or {}).get(thread["native_id"]) or thread.get("name", "")
            found["core"].update(_packed(path, to))
            path.unlink()
    except Exception as error:  # noqa: BLE001 (a core may hold anything, and the dump is there already)
        found.setdefault("core", {})["problem"] = f"the core was left where the kernel put it: {error}"
    with contextlib.suppress(Exception):
        _append(dump, redactor, found)


def _told(core: Path, program: str, redactor: Redactor) -> dict[str, dict[str, Any]]:
    """What a core tells: its notes with native stacks, and Python's stacks with locals."""
    notes = read_notes(core).plain()
    if not program or not Path(program).is_file():
        return {"core": notes, "core stacks": {"problem": f"the program that left it is not here: {program!r}"}}
    answer = native.of_core(core.absolute(), Path(program))
    if "problem" in answer:
        return {"core": notes, "core stacks": answer}
    for thread in notes["threads"]:
        thread["frames"] = answer["native"].get(str(thread["native_id"]), [])
    hide_locals(answer["threads"], redactor)
    return {"core": notes, "core stacks": {"threads": answer["threads"], "python": answer["python"]}}


def _packed(core: Path, to: Path) -> dict[str, Any]:
    """Compress the core; a limit that is reached raises DumpFailed and leaves nothing but the core."""
    until = time.monotonic() + MAX_KEEP_S
    digest = blake3()
    kept = size = 0
    pack = zstandard.ZstdCompressor(level=1).compressobj()
    target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(target, "wb") as file, core.open("rb") as source:
            more = True
            while more:
                block = source.read(_BLOCK)
                more = bool(block)
                size += len(block)
                data = pack.compress(block) if block else pack.flush()
                kept += len(data)
                digest.update(data)
                file.write(data)
                if kept > MAX_KEPT_BYTES or size > MAX_CORE_BYTES:
                    raise DumpFailed(f"it is larger than what is kept ({MAX_KEPT_BYTES:,} bytes): {core}")
                if time.monotonic() > until:
                    raise DumpFailed(f"compressing it took more than {MAX_KEEP_S:.0f} s: {core}")
                if size % (64 * _BLOCK) == 0 and shutil.disk_usage(to.parent).free < _FREE_BYTES:
                    raise DumpFailed(f"the disk would be full: {core}")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        to.unlink(missing_ok=True)
        raise
    return {"file": to.name, "bytes": size, "kept_bytes": kept, "digest": digest.hexdigest(), "warning": _UNREDACTED}


def unpack(dump: str | os.PathLike[str], to: Path) -> Path:
    """Decompress the core that lies beside a dump into a new file. CorruptValue when it is not the one it was."""
    path = Path(dump)
    with open_dump(path) as opened:
        note = opened.native.get("core", Native())
    if not note.file or not note.digest or not note.bytes:
        raise NotInDump(f"{path} has no core: {note.problem or 'it was taken without core=True'}")
    if not note.file.endswith(SUFFIX) or "/" in note.file or "\0" in note.file or not 0 < note.bytes <= MAX_CORE_BYTES:
        raise CorruptValue(f"{path} names a core that cannot be one")
    _unpack(path.with_name(note.file), to, note.digest, note.bytes)
    return to


def _unpack(kept: Path, to: Path, digest: str, size: int) -> None:
    try:
        handle = os.open(kept, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotInDump(f"the core {kept} is not there: {error.strerror}") from error
    with os.fdopen(handle, "rb") as source:
        summed = blake3()
        while block := source.read(_BLOCK):
            summed.update(block)
        if summed.hexdigest() != digest:
            raise CorruptValue(f"the core {kept} is not the one that was kept: its digest does not fit")
        source.seek(0)
        target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(target, "wb") as file:
                reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(source)
                left = size
                while left > 0 and (block := reader.read(min(_BLOCK, left))):
                    left -= len(block)
                    if block.count(0) == len(block):
                        file.seek(len(block), os.SEEK_CUR)  # a hole, as it was
                    else:
                        file.write(block)
                file.truncate(size)
            if left:
                raise CorruptValue(f"the core {kept} ends early")
        except BaseException as error:
            to.unlink(missing_ok=True)
            if isinstance(error, zstandard.ZstdError):
                raise CorruptValue(f"the core {kept} cannot be decompressed") from error
            raise


def native_stacks(dump: str | os.PathLike[str]) -> dict[str, Any]:
    """Python and native stacks and registers from a dump's core. Added to the dump, and returned.

    Without PyStack the registers are there, and the stacks' place says why they are not.
    """
    path = Path(dump)
    with open_dump(path) as opened:
        program = opened.process.executable
    with tempfile.TemporaryDirectory(prefix="holdfast-core-") as folder:
        file = unpack(path, Path(folder) / "core")
        redactor = Redactor(dict(os.environ))
        found = _told(file, program, redactor)
    with contextlib.suppress(CorruptValue):  # a damaged dump is not changed
        _append(path, redactor, {"core stacks": found["core stacks"]})
    clean: dict[str, Any] = redactor.scrub(found)
    return clean


def gdb_command(dump: str | os.PathLike[str], core_to: Path) -> list[str]:
    """Unpack the core to a file, and return the command line that opens it in gdb.

    No start file of the user, the machine or the folder is run, and nothing is fetched from a network.
    """
    with open_dump(dump) as opened:
        program = opened.process.executable
    gdb = shutil.which("gdb")
    if gdb is None:
        raise BadOption("gdb is not installed here", hint="Install gdb, or use `holdfast dump native`.")
    if not program.startswith("/") or not Path(program).is_file():
        raise NotInDump(f"the program that left the core is not here: {program!r}", hint="Open it where it died.")
    unpack(dump, core_to)
    careful = ("-nx", "-iex", "set auto-load off", "-iex", "set debuginfod enabled off")
    return [gdb, *careful, f"--core={core_to.absolute()}", f"--exec={program}", f"--symbols={program}"]


def _append(dump: Path, redactor: Redactor, named: dict[str, dict[str, Any]]) -> None:
    writer, parts = dumpfile.append(dump, redactor)
    try:
        for name, data in named.items():
            if parts.get(kinds.NATIVE, [kinds.ABSENT])[0] == kinds.ABSENT:
                parts[kinds.NATIVE] = [kinds.WHOLE, ""]
            if not add_extra(writer, kinds.NATIVE, name, data):
                parts[kinds.NATIVE] = [kinds.PARTIAL, f"{name}: more than there is room for"]
            elif "problem" in data:
                parts[kinds.NATIVE] = [kinds.PARTIAL, f"{name}: {data['problem']}"[:2000]]
        writer.finish(parts)
    finally:
        writer.close()
