"""Dumps of a process that are written by another one: without its help, or after its death.

Owns what /proc tells of a process, and the order of parts in such a dump. Must not know why it is taken. Holds always:
the process that is looked at goes on as before; everything passes the gate; a part that cannot be had is named with the
reason.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.crash import folder, kinds, ptrace, pystacks, sources, system
from holdfast.crash.dumpfile import Writer
from holdfast.crash.limits import Limits
from holdfast.crash.redaction import BY_NAME, Redactor
from holdfast.crash.stacks import is_library, library_paths
from holdfast.errors import BadOption, DumpFailed, HoldfastError

_MAX_TASKS = 2_000
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
DEAD = "registers and native stacks of a dead process are in its core only, which core=True keeps"
# Why a part is not there, where whoever looked knows no better reason.
_UNSEEN = {
    kinds.OBJECTS: "only the process itself can follow its values",
    kinds.LOGS: "the process left no log records",
    kinds.TASKS: "only the process itself can list them",
    kinds.LOCKS: "only the process itself can tell",
    kinds.PROCESS: "nobody looked at the process while it lived",
    kinds.DESCRIPTORS: "nobody looked at the process while it lived",
    kinds.ENVIRONMENT: "nobody looked at the process while it lived",
    kinds.MODULES: "nobody looked at the process while it lived",
    kinds.HEAP: "only the process itself can count its objects",
    kinds.NATIVE: DEAD,
}
_PAIR = re.compile(r"""(['"])([A-Za-z0-9_.-]{2,80})\1: (['"])([^'"]{3,})\3""")  # in a dictionary's text


@dataclass
class Found:
    """What is known of the other process. ``parts`` are payloads by kind; ``gone`` says why others are missing.

    ``no_locals`` says why frames have none, where they have none.
    """

    why: str
    trigger: str
    pid: int = 0
    began: float = 0.0
    program: list[str] = field(default_factory=list)
    python: str = ""
    library: list[str] = field(default_factory=list)
    threads: list[dict[str, Any]] = field(default_factory=list)
    threads_state: list[str] = field(default_factory=lambda: [kinds.WHOLE, ""])
    extras: list[tuple[str, str, Any]] = field(default_factory=list)  # kind, name, data
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    no_locals: str = "not obtainable from outside"
    native: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)


def take(pid: int, *, to: str | os.PathLike[str] | None = None, why: str = "", limits: Limits | None = None) -> Path:
    """Write a dump of a running process that need not know of it, and return its path.

    Python stacks with locals and native stacks come from PyStack (the extra `native`). Without it, the dump has
    everything else and says what is missing.
    """
    limits = limits or Limits()
    if pid <= 0 or pid == os.getpid():
        raise BadOption("the number of another process is needed; for this one, call holdfast.crash.capture()")
    if not Path(f"/proc/{pid}").is_dir():
        raise DumpFailed(f"there is no process {pid}")
    environment = environment_of(pid)
    found = Found(why=why or f"taken from outside, process {pid}", trigger="outside", pid=pid)
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        raise DumpFailed(f"process {pid} may not be looked at by this user", hint="Use the same user, or root.")
    look(found)
    found.gone = {
        kinds.AGENT: "only the process itself can tell, and the agent's store",
        kinds.LOGS: "only the process itself has them",
    }
    found.native["threads"] = threads_of(pid)
    answer = pystacks.of_process(pid)
    add_pystacks(found, answer)
    return write(folder.new_file(to, pid, found.why), found, Redactor(environment, found.known), limits)


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which the process was started."""
    pairs = [item.partition("=") for item in system.text_of(f"/proc/{pid}/environ").split("\0")]
    return {name: value for name, _, value in pairs if name}


def look(found: Found) -> None:
    """Read everything that /proc tells of the process, while it lives."""
    pid = found.pid
    found.parts[kinds.PROCESS] = process(pid)
    found.program = found.program or found.parts[kinds.PROCESS]["command"]
    found.parts[kinds.DESCRIPTORS] = system.descriptors(pid)
    found.parts[kinds.ENVIRONMENT] = {"all": environment_of(pid)}  # the names are sorted out when it is written
    found.parts.setdefault(
        kinds.MODULES,
        {"modules": [], "distributions": {}, "path": [], "shared": system.shared_objects(pid)},
    )


def process(pid: int) -> dict[str, Any]:
    """As ``system.process()``, as far as it can be seen from outside."""
    uname = os.uname()
    fields = system.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    numbers = [int(item) if item.lstrip("-").isdigit() else 0 for item in fields] or [0]
    numbers += [0] * (52 - len(numbers))
    return {
        "pid": pid,
        "ppid": numbers[1],
        "uid": _owner(pid),
        "state": fields[0] if fields else "",
        "cwd": _link(f"/proc/{pid}/cwd"),
        "command": [item[:4096] for item in system.text_of(f"/proc/{pid}/cmdline").split("\0")[:200] if item],
        "executable": _link(f"/proc/{pid}/exe"),
        "kernel": [uname.sysname, uname.release, uname.version, uname.machine],
        "host": uname.nodename,
        "os": system.os_release(),
        "cpus": os.cpu_count() or 0,
        "load": list(os.getloadavg()),
        "uptime_s": system.number_in("/proc/uptime"),
        "process_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - numbers[19] / ticks, 2),
        "cpu_s": [numbers[11] / ticks, numbers[12] / ticks],
        "limits": _limits(pid),
        "memory": system.table(f"/proc/{pid}/status", system.MEMORY_NAMES),
        "machine_memory": system.table(
            "/proc/meminfo", ("MemTotal", "MemFree", "MemAvailable", "SwapTotal", "SwapFree")
        ),
        "cgroup": system.cgroup(pid),
        "oom_score": int(system.number_in(f"/proc/{pid}/oom_score")),
        "threads": len(system.listed(f"/proc/{pid}/task")),
        "core_pattern": system.text_of("/proc/sys/kernel/core_pattern").strip(),
    }


def threads_of(pid: int) -> dict[str, Any]:
    """Of each thread: its registers, and what the kernel says it waits for. Each stops for well under a millisecond."""
    read, problem = ptrace.registers(pid)
    found = []
    for tid in sorted(map(int, system.listed(f"/proc/{pid}/task")))[:_MAX_TASKS]:
        task = f"/proc/{pid}/task/{tid}"
        found.append(
            {
                "native_id": tid,
                "name": system.text_of(f"{task}/comm").strip()[:100],
                "state": (system.text_of(f"{task}/stat").rpartition(")")[2].split() or [""])[0],
                "waits_in": system.text_of(f"{task}/wchan").strip()[:100].removeprefix("0"),
                "call": _call(system.text_of(f"{task}/syscall")),
                "registers": read.get(tid, {}),
            }
        )
    return {"threads": found, "machine": os.uname().machine, **({"problem": problem} if problem else {})}


def add_pystacks(found: Found, answer: dict[str, Any]) -> None:
    """Put what PyStack read into the dump: Python stacks as threads, native ones beside the registers."""
    if "problem" in answer:
        found.threads_state = [kinds.ABSENT, answer["problem"]]
        found.native["threads"].setdefault("problem", "no native stacks: " + answer["problem"])
        return
    found.python = found.python or answer["python"]
    found.threads = answer["threads"]
    if "cut" in answer:
        found.native["threads"].setdefault("problem", "no native stacks: " + answer["cut"])
    for thread in found.native["threads"]["threads"]:
        thread["frames"] = answer["native"].get(str(thread["native_id"]), [])


def hide_locals(threads: list[dict[str, Any]], redactor: Redactor) -> None:
    """Take out values under secret names, and learn them, before anything that may repeat them is written.

    PyStack gives values as text, so names inside are looked for as a dictionary's text shows them.
    """

    def hidden(found: re.Match[str]) -> str:
        if not redactor.secret_name(found[2]):
            return found[0]
        redactor.learn(found[4])
        return f"{found[1]}{found[2]}{found[1]}: {BY_NAME}"

    for thread in threads:
        for frame in thread["frames"]:
            named = frame.get("locals", [])
            for at in range(0, len(named) - 1, 2):
                if redactor.secret_name(named[at]):
                    redactor.learn(named[at + 1].strip("'\""))
                    named[at + 1] = BY_NAME
                else:
                    named[at + 1] = _PAIR.sub(hidden, named[at + 1])


# Writing.


def write(path: Path, found: Found, redactor: Redactor, limits: Limits | None = None) -> Path:
    """Write what was found as a dump, most valuable parts first. A part that fails is named in it.

    When the file cannot be written, that is raised; what is there by then stays, and a file with nothing in it goes.
    """
    limits = limits or Limits()
    writer = Writer(path, redactor, limit_bytes=limits.file_bytes)
    try:
        _Writing(writer, found, redactor, limits).run()
    finally:
        writer.close()
    return path


def add_extra(writer: Writer, kind: str, name: str, data: Any) -> bool:
    """Write one extra; when it is too large, with fewer of its threads. Whether all of it is there."""
    if writer.add(kind, {"name": name, "data": data}):
        return True
    threads = data.get("threads") if isinstance(data, dict) else None
    while isinstance(threads, dict | list) and len(threads) > 1:
        half = len(threads) // 2
        threads = dict(list(threads.items())[:half]) if isinstance(threads, dict) else threads[:half]
        if writer.add(kind, {"name": name, "data": {**data, "threads": threads}}):
            return False
    return False


class _Writing:
    """One dump being written."""

    def __init__(self, writer: Writer, found: Found, redactor: Redactor, limits: Limits) -> None:
        self.writer = writer
        self.found = found
        self.redactor = redactor
        self.limits = limits
        self.extras = [*found.extras, *((kinds.NATIVE, name, data) for name, data in found.native.items())]
        self.extras += [(kinds.NOTE, name, data) for name, data in found.notes.items()]
        given = {*found.parts, *(kind for kind, _name, _data in self.extras)}
        gone = {kind: reason for kind, reason in (_UNSEEN | found.gone).items() if kind not in given}
        self.parts: dict[str, list[str]] = {kind: [kinds.ABSENT, reason] for kind, reason in gone.items()}
        self.planned = {kinds.STACK, kinds.SOURCE, *given, *gone}
        self.files: dict[str, list[int]] = {}

    def run(self) -> None:
        self._part("", self._learn)
        self._head()
        self._part(kinds.NOTE, self._extras)
        self._part(kinds.STACK, self._threads)
        self._part(kinds.AGENT, self._extras)
        self._part(kinds.SOURCE, self._sources)
        self._part(kinds.LOGS, self._plain)
        self._part(kinds.LOCKS, self._extras)
        self._part(kinds.PROCESS, self._plain)
        self._part(kinds.DESCRIPTORS, self._plain)
        self._part(kinds.ENVIRONMENT, self._environment)
        self._part(kinds.MODULES, self._plain)
        self._part(kinds.NATIVE, self._extras)
        self.writer.finish(self.parts)

    def _part(self, kind: str, write: Callable[[str], None]) -> None:
        """One part. What is wrong with it must not cost the others; only a file that cannot be written ends it."""
        try:
            write(kind)
        except HoldfastError:
            raise
        except Exception as error:  # noqa: BLE001 (what is written came from a process that went wrong)
            self.parts[kind or kinds.STACK] = [kinds.PARTIAL, f"could not be written: {type(error).__name__}"]

    def _learn(self, _kind: str) -> None:
        """Secrets that are known by their names, before the first byte is written."""
        found = self.found
        try:
            hide_locals(found.threads, self.redactor)
        except Exception:
            for thread in found.threads:  # no value may be there that was not looked at
                for frame in thread["frames"]:
                    frame.pop("locals", None)
            raise
        finally:
            for arguments in (found.program, found.parts.get(kinds.PROCESS, {}).get("command", [])):
                self.redactor.learn_arguments(arguments)

    def _head(self) -> None:
        found = self.found
        self.writer.add(
            kinds.HEAD,
            {
                "format": kinds.VERSION,
                "id": os.urandom(16).hex(),
                "why": found.why[:4000],
                "trigger": found.trigger[:100],
                "at": time.time(),
                "pid": found.pid,
                "began": found.began or system.began(found.pid),
                "host": socket.gethostname()[:200],
                "program": found.program[:50],
                "python": found.python,
                "deadline_s": self.limits.deadline_s,
                "taken_by": os.getpid(),
                "plan": [kind for kind in kinds.PARTS if kind in self.planned],
            },
        )

    def _threads(self, _kind: str) -> None:
        self.parts[kinds.STACK] = list(self.found.threads_state)
        for thread in self.found.threads[: self.limits.threads]:
            for frame in thread["frames"]:
                frame.setdefault("span", [frame["line"], 0, 0])
                frame.setdefault("first", frame["line"])
                frame["mine"] = self._is_mine(frame["file"])
                if "locals" not in frame:
                    frame["hidden"] = self.found.no_locals
                self.files.setdefault(frame["file"], []).append(frame["line"])
            if not self.writer.add(kinds.STACK, thread):
                bare = [
                    {**{key: frame[key] for key in frame if key != "locals"}, "hidden": "no room left in the file"}
                    for frame in thread["frames"]
                ]
                if not self.writer.add(kinds.STACK, {**thread, "frames": bare, "locals_cut": True}):
                    self.parts[kinds.STACK] = [kinds.PARTIAL, "no room left in the file"]
                    return
        left = len(self.found.threads) - self.limits.threads
        if left > 0:
            self.parts[kinds.STACK] = [kinds.PARTIAL, f"{left} more threads"]

    def _is_mine(self, file: str) -> bool:
        folders = tuple(self.found.library or library_paths())
        return not is_library(file, folders) and not re.search(r"/lib/python\d\.\d+/", file)

    def _sources(self, _kind: str) -> None:
        found, missing = sources.embed(self.files, self._is_mine, self.limits.source_bytes)
        for record in found:
            self.writer.add(kinds.SOURCE, record, source=True)
        told = "not found: " + ", ".join(missing)[:2000] if missing else ""
        self.parts[kinds.SOURCE] = [kinds.PARTIAL if missing else kinds.WHOLE, told]

    def _plain(self, kind: str) -> None:
        if kind in self.found.parts:
            written = self.writer.add(kind, self.found.parts[kind])
            self.parts[kind] = [kinds.WHOLE, ""] if written else [kinds.ABSENT, "no room left in the file"]

    def _environment(self, kind: str) -> None:
        every = self.found.parts.get(kind, {}).get("all")
        if every is not None:
            self.found.parts[kind] = system.environment(self.redactor.secret_name, every)
        self._plain(kind)

    def _extras(self, wanted: str) -> None:
        for kind, name, data in self.extras:
            if kind == wanted:
                state = [kinds.WHOLE, ""]
                problem = data.get("problem") if isinstance(data, dict) else None
                if problem:
                    state = [kinds.PARTIAL, str(problem)[:2000]]
                if not add_extra(self.writer, kind, name, data):
                    state = [kinds.PARTIAL, f"{name}: more than there is room for"]
                if self.parts.get(kind, [kinds.WHOLE])[0] == kinds.WHOLE:
                    self.parts[kind] = state


# /proc, small things.


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
    for line in system.text_of(f"/proc/{pid}/limits").splitlines():
        name = _LIMITS.get(line[:25].strip())
        if name:
            found[name] = [int(word) if word.isdigit() else -1 for word in line[25:].split()[:2]]
    return found


def _call(text: str) -> list[Any]:
    """``[number, stack pointer, program counter]`` of a blocked thread's system call; its arguments stay out."""
    words = text.split()
    if len(words) < 3 or not words[0].lstrip("-").isdigit():
        return words[:1]
    return [int(words[0]), int(words[-2], 16), int(words[-1], 16)]
