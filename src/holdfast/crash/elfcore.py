"""The notes of a core file: which threads there were, their registers, the signal, the mapped files.

Must not know dumps or where cores come from. Holds always: a file may be anything; nothing that it declares is believed
before it was compared with a bound; of its memory only the end of one stack is looked at.

faulthandler catches a fatal signal and raises it once more, so that the notes tell of that: a signal that was sent, and
registers inside `raise`. Those of the fault itself are on the stack, where the kernel puts them for a handler.
"""

from __future__ import annotations

import os
import signal
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.crash.ptrace import NAMES
from holdfast.errors import CorruptValue

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


def read(path: Path) -> Notes:
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
