"""The machine and the process around the program: kernel, limits, memory, descriptors, environment, modules.

Must not know objects of the program. Holds always: it reads /proc and asks the kernel, never a network; what is not
there (another system, no rights) is left out; nothing blocks.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.crash.kinds import MAX_LISTED
from holdfast.crash.shapes import exact_text

ENVIRONMENT_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TERM", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
        *("HOSTNAME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "NODE_NAME"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONDEVMODE", "PYTHONFAULTHANDLER"),
        *("PYTHONUNBUFFERED", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONASYNCIODEBUG", "PYTHONUTF8", "PYTHON_GIL"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CI", "RANK"),
        *("WORLD_SIZE", "LOCAL_RANK", "KUBERNETES_SERVICE_HOST", "POD_NAME", "POD_NAMESPACE", "HOLDFAST_STORE"),
        *("HOLDFAST_DUMPS", "HOLDFAST_DEBUG", "TOKENIZERS_PARALLELISM", "OTEL_SERVICE_NAME", "INVOCATION_ID"),
    )
)
"""Names whose values are written (after redaction). Of the others only the names are, if they do not look secret."""

_LIMITS = {
    "Max core file size": "CORE",
    "Max open files": "NOFILE",
    "Max processes": "NPROC",
    "Max address space": "AS",
    "Max data size": "DATA",
    "Max stack size": "STACK",
    "Max cpu time": "CPU",
    "Max locked memory": "MEMLOCK",
    "Max file size": "FSIZE",
}
MEMORY_NAMES = ("VmPeak", "VmSize", "VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmData", "VmStk", "VmSwap")


def own_process() -> dict[str, Any]:
    """This process, with what only the interpreter knows."""
    return (
        process(os.getpid())
        | {
            "cwd": _cwd(),
            "command": [exact_text(item, 4096) for item in sys.orig_argv[:200]],
            "executable": exact_text(sys.executable, 4096),
            "python": sys.version,
            "implementation": sys.implementation.name,
            "flags": [exact_text(key, 100) for key in sys._xoptions],  # noqa: SLF001 (its only name)
            "recursion_limit": sys.getrecursionlimit(),
            "cpu_s": list(os.times()[:2]),
            "libc": " ".join(platform.libc_ver()),
        }
    )


def process(pid: int) -> dict[str, Any]:
    """A process, its limits and its machine, as they can be seen from outside."""
    uname = os.uname()
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    numbers = [int(item) if item.lstrip("-").isdigit() else 0 for item in fields] or [0]
    numbers += [0] * (52 - len(numbers))
    return {
        "pid": pid,
        "ppid": numbers[1],
        "uid": _owner(pid),
        "state": fields[0] if fields else "",
        "cwd": _link(f"/proc/{pid}/cwd"),
        "command": [item[:4096] for item in text_of(f"/proc/{pid}/cmdline").split("\0")[:200] if item],
        "executable": _link(f"/proc/{pid}/exe"),
        "kernel": [uname.sysname, uname.release, uname.version, uname.machine],
        "host": uname.nodename,
        "os": os_release(),
        "cpus": os.cpu_count() or 0,
        "load": list(os.getloadavg()),
        "uptime_s": number_in("/proc/uptime"),
        "process_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - _started(pid), 2),
        "cpu_s": [numbers[11] / ticks, numbers[12] / ticks],
        "limits": _limits(pid),
        "memory": table(f"/proc/{pid}/status", MEMORY_NAMES),
        "machine_memory": table("/proc/meminfo", ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "SwapFree")),
        "cgroup": cgroup(pid),
        "oom_score": int(number_in(f"/proc/{pid}/oom_score")),
        "threads": len(listed(f"/proc/{pid}/task")),
        "core_pattern": text_of("/proc/sys/kernel/core_pattern").strip(),
    }


def descriptors(who: int | str = "self") -> dict[str, Any]:
    """Open descriptors of a process with what they lead to; sockets with their ends."""
    sockets = _sockets(who)
    found = []
    names = listed(f"/proc/{who}/fd")
    for name in sorted(names, key=int)[:MAX_LISTED]:
        try:
            target = str(Path(f"/proc/{who}/fd/{name}").readlink())
        except OSError:
            continue
        entry: dict[str, Any] = {"fd": int(name), "target": target[:4096]}
        if target.startswith("socket:["):
            entry.update(sockets.get(target[8:-1], {}))
        else:
            fields = table(f"/proc/{who}/fdinfo/{name}", ("pos", "flags"), kilo=False)
            entry.update({key: value for key, value in fields.items() if value})
        found.append(entry)
    return {"descriptors": found, "total": len(names)}


def environment(secret_name: Any, every: dict[str, str] | None = None) -> dict[str, Any]:
    """Values of harmless variables; of the others only how many, and the names that do not look secret."""
    every = dict(os.environ) if every is None else every
    shown = {name: value[:8192] for name, value in every.items() if name in ENVIRONMENT_NAMES}
    others = sorted(name[:200] for name in every if name not in shown and not secret_name(name))
    return {"values": shown, "others": others[:2000], "total": len(every)}


def modules(mine: Any) -> dict[str, Any]:
    """Loaded modules with files and versions, installed distributions among them, and shared objects."""
    found = []
    for name, module in sorted((n, m) for n, m in list(sys.modules.items()) if type(n) is str and type(m) is _MODULE):
        fields = module.__dict__
        file = exact_text(fields.get("__file__"), 4096)
        entry: list[Any] = [name[:400], file, exact_text(fields.get("__version__"), 100)]
        if entry[1] and mine(file):
            entry.append(True)
        found.append(entry)
    return {
        "modules": found[:MAX_LISTED],
        "distributions": distributions(),
        "path": [exact_text(item, 4096) for item in sys.path[:200]],
        "shared": shared_objects(),
    }


_MODULE = type(sys)


def distributions(search: list[str] | None = None) -> dict[str, str]:
    """Versions of installed packages, from the names of their metadata folders: no file is opened."""
    found: dict[str, str] = {}
    for folder in (sys.path if search is None else search)[:50]:
        if type(folder) is str and folder.endswith(("site-packages", "dist-packages")):
            for name in listed(folder)[:10_000]:
                if name.endswith(".dist-info"):
                    package, _, version = name[:-10].partition("-")
                    found.setdefault(package, version)
    return found


def shared_objects(who: int | str = "self") -> list[list[Any]]:
    """Each mapped file with where it begins and ends."""
    found: dict[str, list[Any]] = {}
    for line in text_of(f"/proc/{who}/maps", 8 << 20).splitlines():
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5].startswith("/") and (".so" in parts[5] or "x" in parts[1]):
            start, _, end = parts[0].partition("-")
            entry = found.setdefault(parts[5], [parts[5][:4096], int(start, 16), 0])
            entry[2] = int(end, 16)
    return list(found.values())[:MAX_LISTED]


def _sockets(who: int | str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in text_of(f"/proc/{who}/net/{kind}", 4 << 20).splitlines()[1:MAX_LISTED]:
            parts = line.split()
            if len(parts) > 9:
                found[parts[9]] = {
                    "socket": kind,
                    "local": _address(parts[1]),
                    "remote": _address(parts[2]),
                    "state": _TCP_STATES.get(parts[3], parts[3]) if kind.startswith("tcp") else "",
                    "queues": parts[4],
                }
    for line in text_of(f"/proc/{who}/net/unix", 4 << 20).splitlines()[1:MAX_LISTED]:
        parts = line.split(None, 7)
        if len(parts) > 6:
            found[parts[6]] = {"socket": "unix", "local": parts[7][:400] if len(parts) > 7 else ""}
    return found


_TCP_STATES = dict(
    zip(
        ("01", "02", "03", "04", "05", "06", "07", "08", "09", "0A", "0B"),
        (
            *("established", "syn-sent", "syn-received", "fin-wait-1", "fin-wait-2", "time-wait", "close"),
            *("close-wait", "last-ack", "listen", "closing"),
        ),
        strict=True,
    )
)


def _address(text: str) -> str:
    """``0100007F:1F90`` -> ``127.0.0.1:8080``; the kernel writes each word of four bytes in the machine's order."""
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    words = b"".join(raw[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(raw), 4))
    if len(words) == 4:
        shown = ".".join(map(str, words))
    else:
        shown = "[" + ":".join(words[at : at + 2].hex() for at in range(0, len(words), 2)) + "]"
    return f"{shown}:{int(port, 16)}"


def cgroup(who: int | str = "self") -> dict[str, str]:
    found = {}
    place = "/sys/fs/cgroup"
    former_place = "/sys/fs/cgroup/memory"
    for line in text_of(f"/proc/{who}/cgroup").splitlines():
        if ":memory:/" in line and ".." not in line:  # version 1
            former_place += line.partition(":memory:")[2].rstrip("/")
        if line.startswith("0::") and ".." not in line:
            place += line[3:].rstrip("/")
            found["path"] = line[3:][:1000]
    names = ("memory.current", "memory.max", "memory.high", "memory.peak", "memory.events", "cpu.max", "pids.current")
    for folder in (place, "/sys/fs/cgroup"):
        for name in names:
            text = text_of(f"{folder}/{name}").strip()
            if text:
                found.setdefault(name, text)
    old = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes"}
    old["memory.events"] = "memory.oom_control"
    for folder in (former_place, "/sys/fs/cgroup/memory"):
        for name, former in old.items():
            text = text_of(f"{folder}/{former}").strip()
            if text:
                found.setdefault(name, text)
    return found


def table(path: str, names: tuple[str, ...], *, kilo: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text_of(path).splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            words = rest.split()
            if words and words[0].isdigit():
                found[name] = int(words[0]) * (1024 if kilo and len(words) > 1 else 1)
    return found


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())[:4096]
    except OSError:
        return ""


def _owner(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def _limits(pid: int) -> dict[str, list[int]]:
    found = {}
    for line in text_of(f"/proc/{pid}/limits").splitlines():
        name = _LIMITS.get(line[:25].strip())
        if name:
            found[name] = [int(word) if word.isdigit() else -1 for word in line[25:].split()[:2]]
    return found


def text_of(path: str, most: int = 1 << 20) -> str:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    pieces = []
    try:
        while most > 0 and (piece := os.read(handle, min(most, 1 << 16))):
            pieces.append(piece)
            most -= len(piece)
    except OSError:
        pass
    finally:
        os.close(handle)
    return b"".join(pieces).decode("utf-8", "replace")


def listed(path: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path)]
    except OSError:
        return []


def number_in(path: str) -> float:
    try:
        return float(text_of(path).split()[0])
    except (ValueError, IndexError):
        return 0.0


def began(pid: int) -> float:
    """When a process began, in seconds since 1970: with its number, that says which process it is."""
    if not Path(f"/proc/{pid}").exists():
        return 0.0
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + _started(pid), 1)


def _started(pid: int) -> float:
    """When a process began, in seconds since boot."""
    fields = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    try:
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (ValueError, IndexError):
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def os_release() -> str:
    for line in text_of("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line[12:].strip('"')[:200]
    return ""
