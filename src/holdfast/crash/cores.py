"""Kernel cores: allowing them, finding the one that a death left, keeping it beside its dump, opening it later.

Must not know the sidecar. Holds always: the machine's own settings are never changed, only this process's; a core that
is kept is proven by its digest when it is opened; a core's place is never taken from a dump, only its name beside it.

A core is the process's memory as it was. It cannot be redacted, so it is made only when asked for, only its owner may
read it, and the dump says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

from holdfast.crash import dumpfile, elfcore, kinds, pystacks
from holdfast.crash.dump import open_dump
from holdfast.crash.outside import add_extra, hide_locals
from holdfast.crash.redaction import Redactor
from holdfast.crash.system import text_of
from holdfast.errors import BadOption, CorruptValue, DumpFailed, NotInDump

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
                notes = elfcore.read(path)
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
    notes = elfcore.read(core).plain()
    if not program or not Path(program).is_file():
        return {"core": notes, "core stacks": {"problem": f"the program that left it is not here: {program!r}"}}
    answer = pystacks.of_core(core.absolute(), Path(program))
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
        note = opened.extras(kinds.NATIVE).get("core")
    note = note if isinstance(note, dict) else {}
    name, digest, size = note.get("file"), note.get("digest"), note.get("bytes")
    if not isinstance(name, str) or not isinstance(digest, str) or not isinstance(size, int):
        reason = note.get("problem") if isinstance(note.get("problem"), str) else "it was taken without core=True"
        raise NotInDump(f"{path} has no core: {reason}")
    if not name.endswith(SUFFIX) or "/" in name or "\0" in name or not 0 < size <= MAX_CORE_BYTES:
        raise CorruptValue(f"{path} names a core that cannot be one")
    kept = path.with_name(name)
    _unpack(kept, to, digest, size)
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


def native(dump: str | os.PathLike[str]) -> dict[str, Any]:
    """Python and native stacks and registers from a dump's core. Added to the dump, and returned.

    Without PyStack the registers are there, and the stacks' place says why they are not.
    """
    path = Path(dump)
    with open_dump(path) as opened:
        known = opened.part(kinds.PROCESS).get("executable")
    program = known if isinstance(known, str) else ""
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
        known = opened.part(kinds.PROCESS).get("executable")
    program = known if isinstance(known, str) else ""
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
