"""Dumps of a process that are written by another one: without its help, after its death, or from what a signal left.

Owns what /proc tells of a process, the order of parts in such a dump, the file that faulthandler writes to when a
signal is fatal, and the reading of its text. Must not know why it is taken, nor how the process is watched. Holds
always: the process that is looked at goes on as before, or dies of the same signal; everything passes the gate; a part
that cannot be had is named with the reason; nothing of a dead process's text is believed beyond its form.

The file of fatal signals is one line of JSON, then whatever faulthandler writes. The process holds a lock on it, so
that anyone can see whether it still lives, whatever its number means elsewhere. A sidecar inherits the lock, and reads
what is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.crash import folder, kinds, native, system
from holdfast.crash.dumpfile import Builder
from holdfast.crash.kinds import MAX_NAME, MAX_THREADS, Limits
from holdfast.crash.records import read
from holdfast.crash.redaction import BY_NAME, Redactor
from holdfast.crash.stacks import is_library, library_paths
from holdfast.errors import BadOption, DumpFailed, HoldfastError

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
class Evidence:
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
    found = Evidence(why=why or f"taken from outside, process {pid}", trigger="outside", pid=pid)
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        raise DumpFailed(f"process {pid} may not be looked at by this user", hint="Use the same user, or root.")
    look(found)
    found.gone = {
        kinds.AGENT: "only the process itself can tell, and the agent's store",
        kinds.LOGS: "only the process itself has them",
    }
    found.native["threads"] = threads_of(pid)
    answer = native.of_process(pid)
    add_pystacks(found, answer)
    return write(folder.new_file(to, pid, found.why), found, Redactor(environment, found.known), limits)


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which the process was started."""
    pairs = [item.partition("=") for item in system.text_of(f"/proc/{pid}/environ").split("\0")]
    return {name: value for name, _, value in pairs if name}


def look(found: Evidence) -> None:
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
    read, problem = native.registers(pid)
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


def add_pystacks(found: Evidence, answer: dict[str, Any]) -> None:
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


def write(path: Path, found: Evidence, redactor: Redactor, limits: Limits | None = None) -> Path:
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

    def __init__(self, builder: Builder, found: Evidence) -> None:
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


# -- fatal signals ----------------------------------------------------------------------------------------------------


SUFFIX = ".fatal"
TEXT_BYTES = 4 << 20  # faulthandler stops at 100 threads of 100 frames
NO_LOCALS = "the handler of fatal signals writes none; core=True keeps them"
_FRONT_BYTES = 16_384
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_THREAD = re.compile(r"(Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? ?(?:\((.*)\))?:?")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_living: list[Fatal] = []


@dataclass(frozen=True)
class Front:
    """What a process says of itself in the first line of its file."""

    pid: int = 0
    at: float = 0.0
    program: tuple[str, ...] = ()
    python: str = ""
    library: tuple[str, ...] = ()
    began: float = 0.0


class Fatal:
    """Faulthandler writing to a file of ours. ``echo``: the program wanted the text on its standard error as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.echo = faulthandler.is_enabled()
        self.path, self._file = _new_file(folder)
        faulthandler.enable(file=self._file, all_threads=True)
        _living.append(self)

    def fileno(self) -> int:
        return self._file

    def disable(self) -> None:
        """As it was before. What the file holds, if anything, stays for `collect`."""
        if self not in _living:
            return
        _living.remove(self)
        faulthandler.disable()
        if self.echo and sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.enable()
        if not fatal_text(self.path)[1]:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _again(self) -> None:
        """In a forked child: its own file, because the parent's says which process it speaks of."""
        if self in _living:
            inherited = self._file
            try:
                self.path, self._file = _new_file(self.folder)
            except HoldfastError:
                faulthandler.disable()  # in the parent's file it would be taken for the parent's death
            else:
                faulthandler.enable(file=self._file, all_threads=True)
            os.close(inherited)  # and with it the claim that the parent lives


def enable_fatal(folder: str | os.PathLike[str]) -> Fatal:
    """Begin to leave stacks on SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL. DumpFailed when no file can be made."""
    return Fatal(Path(folder).absolute())


def _after_fork() -> None:
    for fatal in _living:
        fatal._again()  # noqa: SLF001 (its own class)


os.register_at_fork(after_in_child=_after_fork)


def _new_file(folder: Path) -> tuple[Path, int]:
    program = tuple(item[:1000] for item in sys.argv[:50] if type(item) is str)
    version, began = sys.version.split()[0], system.began(os.getpid())
    front = Front(os.getpid(), time.time(), program, version, tuple(library_paths()), began)
    path = folder / f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, json.dumps(vars(front)).encode()[: _FRONT_BYTES - 1] + b"\n")
    except OSError as error:
        raise DumpFailed(f"no file for fatal signals can be made in {folder}: {error.strerror}") from error
    return path, handle


def collect_fatal(place: str | os.PathLike[str], found: str = "at a later start") -> list[Path]:
    """Dumps for processes that died of a fatal signal and of which nobody made one. Never raises.

    Files of those that live, or whose sidecar does, are left alone. ``found``: when or by whom, for people.
    """
    made: list[Path] = []
    with contextlib.suppress(Exception):  # whoever starts must not fail because of what another one left
        _collect(Path(place), found, made)
    return made


def _collect(place: Path, found: str, made: list[Path]) -> None:
    for path in sorted(place.glob(f"*{SUFFIX}"))[:1000]:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            front, text = fatal_text(path)
            if text:
                made.append(_dump(place, front, text, found))
            path.unlink(missing_ok=True)
        except Exception:  # noqa: BLE001, S112 (it lives, or someone else is at it, or there is no room, or it is odd)
            continue  # the next start tries again
        finally:
            os.close(handle)


def _dump(place: Path, front: Front, text: str, when: str) -> Path:
    what, threads = parse_fatal(text)
    found = Evidence(
        why=f"{fatal_signal(text) or 'fatal error'}: {what}",
        trigger="signal",
        pid=front.pid,
        program=[*front.program],
        python=front.python,
        library=[*front.library],
        began=front.began,
        threads=threads,
    )
    found.notes["death"] = {
        "what": what,
        "signal": fatal_signal(text),
        "sure": "the interpreter's own handler wrote it while the process died",
        "evidence": [f"found {when}: nobody who watched it had made a dump"],
        "text": text[:100_000],
    }
    found.no_locals = NO_LOCALS
    return write(folder.new_file(place, found.pid, found.why), found, Redactor(dict(os.environ)))


def fatal_text(path: Path) -> tuple[Front, str]:
    """What the process said of itself, and what faulthandler wrote. The text is empty when the file cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return Front(), ""
            first = file.readline(_FRONT_BYTES)
            text = file.read(TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return Front(), ""
    try:
        front = json.loads(first)
    except (ValueError, RecursionError):  # a long command line was cut
        front = None
    return read(Front, front), text.strip()


def fatal_signal(text: str) -> str:
    """The name of the signal that faulthandler tells of; empty when it tells of none."""
    for line in text.splitlines()[:50]:
        name = _SIGNALS.get(line.removeprefix("Fatal Python error: ").strip())
        if line.startswith("Fatal Python error: ") and name:
            return name
    return ""


def parse_fatal(text: str, names: Iterable[Any] = ()) -> tuple[str, list[dict[str, Any]]]:
    """What the text says happened, and its threads as records of a dump, frames outermost first.

    ``names``: of the threads as the process told them last: id, name, native id, whether it is the main one.
    """
    known = {item[0]: item for item in names if isinstance(item, list) and len(item) >= 4}
    what = ""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        head = None if frame else _THREAD.match(line)
        if frame and threads:
            number = int(frame[2][:9]) if frame[2].isdigit() else 0
            threads[-1]["frames"].append(
                {"file": _text(frame[1])[:4096], "line": number, "function": _text(frame[3])[:MAX_NAME]}
            )
        elif head and len(threads) < MAX_THREADS:
            ident = int(head[2][-16:], 16)
            _, name, native, main = known.get(ident, [0, head[3] or "", 0, False])[:4]
            current = head[1] == "Current thread"
            threads.append({"id": ident, "name": name, "native_id": native, "main": main is True, "frames": []})
            threads[-1] |= {"current": current, "failing": current, "left_out": 0}
        elif line.startswith("Fatal Python error: "):
            what = line.removeprefix("Fatal Python error: ")[:1000]
        elif line.strip() == "..." and threads:
            threads[-1]["left_out"] = 1  # it does not say how many
        elif line.strip() == "Garbage-collecting" and threads:
            threads[-1]["collecting"] = True
    for thread in threads:
        thread["frames"].reverse()
    return what, threads


def _text(escaped: str) -> str:
    return _ESCAPE.sub(lambda found: chr(min(int(found[1] or found[2] or found[3], 16), 0x10FFFF)), escaped)
