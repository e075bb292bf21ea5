"""Dumps of a process that are written by another one: without its help, or after its death.

Owns what /proc tells of a process, and the order of parts in such a dump. Must not know why it is taken. Holds always:
the process that is looked at goes on as before; everything passes the gate; a part that cannot be had is named with the
reason.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.crash import folder, kinds, ptrace, pystacks, system
from holdfast.crash.builder import Builder
from holdfast.crash.limits import Limits
from holdfast.crash.redaction import BY_NAME, Redactor
from holdfast.crash.stacks import is_library, library_paths
from holdfast.errors import BadOption, DumpFailed

_MAX_TASKS = 2_000
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
    found.parts[kinds.PROCESS] = system.process(pid)
    found.program = found.program or found.parts[kinds.PROCESS]["command"]
    found.parts[kinds.DESCRIPTORS] = system.descriptors(pid)
    found.parts[kinds.ENVIRONMENT] = {"all": environment_of(pid)}  # the names are sorted out when it is written
    found.parts.setdefault(
        kinds.MODULES,
        {"modules": [], "distributions": {}, "path": [], "shared": system.shared_objects(pid)},
    )


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
    builder = Builder(path, redactor, limits or Limits())
    try:
        _Writing(builder, found).run()
    finally:
        builder.writer.close()
    return path


class _Writing:
    """One dump of another process being written."""

    def __init__(self, builder: Builder, found: Found) -> None:
        self.builder = builder
        self.found = found
        self.extras = [*found.extras, *((kinds.NATIVE, name, data) for name, data in found.native.items())]
        self.extras += [(kinds.NOTE, name, data) for name, data in found.notes.items()]
        given = {*found.parts, *(kind for kind, _name, _data in self.extras)}
        gone = {kind: reason for kind, reason in (_UNSEEN | found.gone).items() if kind not in given}
        builder.parts |= {kind: [kinds.ABSENT, reason] for kind, reason in gone.items()}
        self.planned = {kinds.STACK, kinds.SOURCE, *given, *gone}
        self.folders = tuple(found.library or library_paths())
        self.files: dict[str, list[int]] = {}

    def run(self) -> None:
        part = self.builder.part
        part(kinds.STACK, self._learn, write=False)
        self._head()
        self._extras(kinds.NOTE)
        part(kinds.STACK, self._threads, write=False)
        self._extras(kinds.AGENT)
        part(kinds.SOURCE, lambda: self.builder.sources(self.files, self._is_mine), write=False)
        self._plain(kinds.LOGS)
        self._extras(kinds.LOCKS)
        self._plain(kinds.PROCESS)
        self._plain(kinds.DESCRIPTORS)
        part(kinds.ENVIRONMENT, self._environment, write=False)
        self._plain(kinds.MODULES)
        self._extras(kinds.NATIVE)
        self.builder.writer.finish(self.builder.parts)

    def _learn(self) -> None:
        """Secrets that are known by their names, before the first byte is written."""
        found, redactor = self.found, self.builder.redactor
        try:
            hide_locals(found.threads, redactor)
        except Exception:
            for thread in found.threads:  # no value may be there that was not looked at
                for frame in thread["frames"]:
                    frame.pop("locals", None)
            raise
        finally:
            for arguments in (found.program, found.parts.get(kinds.PROCESS, {}).get("command", [])):
                redactor.learn_arguments(arguments)

    def _head(self) -> None:
        found = self.found
        self.builder.head(
            why=found.why, trigger=found.trigger, pid=found.pid, began=found.began or system.began(found.pid),
            program=found.program, python=found.python, plan=[kind for kind in kinds.PARTS if kind in self.planned],
        )  # fmt: skip

    def _threads(self) -> None:
        builder, limits = self.builder, self.builder.limits
        builder.parts[kinds.STACK] = list(self.found.threads_state)
        for thread in self.found.threads[: limits.threads]:
            for frame in thread["frames"]:
                frame.setdefault("span", [frame["line"], 0, 0])
                frame.setdefault("first", frame["line"])
                frame["mine"] = self._is_mine(frame["file"])
                if "locals" not in frame:
                    frame["hidden"] = self.found.no_locals
                self.files.setdefault(frame["file"], []).append(frame["line"])
            builder.stack(thread)
        left = len(self.found.threads) - limits.threads
        if left > 0:
            builder.parts[kinds.STACK] = [kinds.PARTIAL, f"{left} more threads"]

    def _is_mine(self, file: str) -> bool:
        return not is_library(file, self.folders) and not re.search(r"/lib/python\d\.\d+/", file)

    def _plain(self, kind: str) -> None:
        if kind in self.found.parts:
            self.builder.part(kind, lambda: self.found.parts[kind])

    def _environment(self) -> None:
        every = self.found.parts.get(kinds.ENVIRONMENT, {}).get("all")
        if every is not None:
            self.found.parts[kinds.ENVIRONMENT] = system.environment(self.builder.redactor.secret_name, every)
        self._plain(kinds.ENVIRONMENT)

    def _extras(self, wanted: str) -> None:
        for kind, name, data in self.extras:
            if kind == wanted:
                self.builder.part(kind, partial(self.builder.extra, kind, name, data), write=False)


# /proc, small things.


def _call(text: str) -> list[Any]:
    """``[number, stack pointer, program counter]`` of a blocked thread's system call; its arguments stay out."""
    words = text.split()
    if len(words) < 3 or not words[0].lstrip("-").isdigit():
        return words[:1]
    return [int(words[0]), int(words[-2], 16), int(words[-1], 16)]
