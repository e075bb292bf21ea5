"""The sidecar itself: it watches one process from outside, and leaves a dump when that hangs or dies of a crash.

Owns the watching, how an end is judged, and what goes into its dumps. Must not know how parts are read or written
(outside.py). Holds always: it holds none of the program's pipes, needs no answer from the program, and ends when the
program has ended. Everything is loaded at the start: after a death, memory, disk or the environment may be gone.

Registers of a dying process are not there, unless with `core=True`. A tracer that is attached beforehand would have
them, but a process has only one tracer: no debugger could attach any more, and every signal would make a detour. Of a
hanging process they are read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.crash import cores, folder, kinds, native, outside, sidecar, system
from holdfast.crash.kinds import Limits
from holdfast.crash.redaction import Redactor

# -- how a process ended ---------------------------------------------------------------------------------------------


_VERDICT_S = 2.0  # how long to wait for the kernel to say how the process ended
# Ends that somebody wanted: asked to leave, its terminal or its reader gone, its own alarm.
_WANTED: Final = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM))
_PIDFD_GET_INFO: Final = 0xC040FF0B
_INFO_EXIT: Final = 8


def exit_status(pid: int, pidfd: int) -> int | None:
    """The wait status: from /proc while nobody has reaped the process, from its pidfd afterwards (Linux 6.15)."""
    until = time.monotonic() + _VERDICT_S
    while True:
        fields = system.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields and fields[0] in "ZX" and len(fields) >= 50 and fields[49].isdigit():
            return int(fields[49])
        answer = bytearray(64)
        struct.pack_into("=Q", answer, 0, _INFO_EXIT)
        with contextlib.suppress(OSError):
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
            if struct.unpack_from("=Q", answer)[0] & _INFO_EXIT:
                return int(struct.unpack_from("=i", answer, 60)[0])
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


def is_crash(status: int | None, *, ending: bool) -> bool:
    """Whether an end is one that nobody wanted. ``ending``: the process had said that it ends."""
    if status is None:
        return not ending
    number = status & 0x7F
    return number != 0 and number not in _WANTED


def killed_for_memory(pid: int, number: int, since: float, events: str) -> list[str]:
    """What speaks for the out-of-memory killer, strongest first. ``events``: the memory group's, before the death."""
    if number not in (0, signal.SIGKILL):
        return []
    found = [line for line in kernel_lines(pid, since) if "illed process" in line]
    # The process's own group cannot be asked any more; the sidecar lives in the same one.
    more = _count(system.cgroup().get("memory.events", ""), "oom_kill") - _count(events, "oom_kill")
    if more > 0:
        found.append(f"the memory group counts {more} more processes killed for memory than before")
    return found


def signal_name(number: int) -> str:
    if not number:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _count(events: str, name: str) -> int:
    for line in events.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def kernel_lines(pid: int, since: float) -> list[str]:
    """Lines of the kernel's log that name the process, where it may be read."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    found = []
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        for _ in range(100_000):
            try:
                record = os.read(handle, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten while it was read: the next one is there
            front, _, line = record.partition(";")
            words = front.split(",")
            at = booted + int(words[2]) / 1e6 if len(words) > 2 and words[2].isdigit() else 0
            if at >= since - 1 and (f"[{pid}]" in line or f"process {pid} " in line):
                found.append(line.splitlines()[0][:500])
    except OSError:
        pass
    finally:
        os.close(handle)
    return found[-20:]


# -- watching --------------------------------------------------------------------------------------------------------


_SAMPLE_S = 2.0
_LOOK_S = 15.0  # between readings of descriptors and mapped files, which cost more
_SAMPLES = 60
_EXEC_S = 2.0  # between the end of the pipe and the end of the process, if it ends
_TELL_S = 60
_ANSWER_S = 3.0  # for the C handler that writes all stacks


def main(arguments: list[str]) -> None:
    """Start once more and let the first process leave, then watch until the end."""
    memory, watched, heard, text, _locked = map(int, arguments)  # the last one is held open for its lock
    setup: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    child = os.fork()  # nothing runs in this interpreter but this line
    if child:
        os.write(1, str(child).encode())
        os._exit(0)
    area = sidecar.Area(memory)
    os.close(memory)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if setup["echo"] else (0, 1, 2):
        os.dup2(nowhere, descriptor)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("holdfast-sidecar")
    _Keeper(area, setup, watched, heard, text).watch()


class _Keeper:
    """One process being watched."""

    def __init__(self, area: sidecar.Area, setup: dict[str, Any], watched: int, heard: int, text: int) -> None:
        self.area = area
        self.setup = setup
        self.pid: int = setup["pid"]
        self.watched = watched
        self.heard = heard
        self.text = text
        self.samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self.parts: dict[str, Any] = {}
        self.looked_at = 0.0
        self.began = time.time()
        self.hung = False
        self.answers = 0
        self.events = system.cgroup(self.pid).get("memory.events", "")
        self.failed: list[str] = []  # what could not be found out, for the dump

    def watch(self) -> None:
        hang_s = float(self.setup["hang_s"])
        pause = min(_SAMPLE_S, hang_s / 4) if hang_s else _SAMPLE_S
        poll = select.poll()
        poll.register(self.watched, select.POLLIN)
        poll.register(self.heard, select.POLLIN)
        late = time.monotonic()
        sampled = 0.0
        while True:
            now = time.monotonic()
            if now - sampled >= _SAMPLE_S:
                sampled = now
                with contextlib.suppress(Exception):  # a look that fails must not end the watch
                    self._sample()
            found = dict(poll.poll(pause * 1000))
            if self.area.numbers[sidecar.STATE] == sidecar.LEAVE:
                return
            if self.watched in found:
                break
            if self.heard in found:
                said = os.read(self.heard, 16)
                if not said:
                    poll.unregister(self.heard)
                    if not poll.poll(_EXEC_S * 1000):
                        return  # it lives, so that an exec closed the pipe: there is another program now
                    break
                for _ in range(said.count(b"n")):
                    self._tried(self._answer, None)
            if time.monotonic() - late > 2 * pause + 1:  # this process was held up itself: begin to count anew
                late = time.monotonic()
                continue
            late = time.monotonic()
            if hang_s and self.area.numbers[sidecar.STATE] == sidecar.RUNNING:
                self._look_for_hang(hang_s)
        self._after_death()

    # While it lives.

    def _sample(self) -> None:
        memory = system.table(f"/proc/{self.pid}/status", system.MEMORY_NAMES)
        if not memory:
            return
        group = system.cgroup(self.pid)
        self.samples.append(
            {
                "at": round(time.time(), 1),
                "resident": memory.get("VmRSS", 0),
                "swapped": memory.get("VmSwap", 0),
                "group": int(group["memory.current"]) if group.get("memory.current", "").isdigit() else 0,
                "available": system.table("/proc/meminfo", ("MemAvailable",)).get("MemAvailable", 0),
            }
        )
        self.events = group.get("memory.events", self.events)
        if time.monotonic() - self.looked_at >= _LOOK_S or len(self.samples) == 2:
            self._look()

    def _look(self) -> None:
        """What will be gone with the process: kept in memory until then."""
        found = outside.Evidence(why="", trigger="", pid=self.pid)
        outside.look(found)
        if system.table(f"/proc/{self.pid}/status", ("VmRSS",)):  # else it died meanwhile: what was kept is better
            self.parts = found.parts
            self.looked_at = time.monotonic()
        self._collect()

    def _collect(self) -> None:
        """Children that it forked, and that died: nobody watches those."""
        outside.collect_fatal(self.setup["folder"], f"by the sidecar of process {self.pid}")

    def _answer(self) -> None:
        """The process asked for its own registers and native stacks: registers first, which take no time."""
        self.answers += 1
        read = outside.threads_of(self.pid)
        self._put_answer(read, whole=False)
        found = outside.Evidence(why="", trigger="", native={"threads": read})
        outside.add_pystacks(found, native.of_process(self.pid))
        self._put_answer(read, whole=True)

    def _put_answer(self, read: dict[str, Any], *, whole: bool) -> None:
        while True:
            answer = {"number": self.answers, "whole": whole, "native": read}
            if self.area.put(sidecar.ANSWER, sidecar.packed(answer)) or len(read["threads"]) < 2:
                return
            kept = read["threads"][: len(read["threads"]) // 2]
            read = {**read, "threads": kept, "problem": f"only {len(kept)} threads had room"}

    def _look_for_hang(self, hang_s: float) -> None:
        missed_s = (time.monotonic_ns() - self.area.numbers[sidecar.BEAT_NS]) / 1e9
        if missed_s < hang_s:
            self.hung = False
        elif not self.hung and self._state() not in "TtZX":  # stopped by a person or a debugger: no hang
            self.hung = True
            with contextlib.suppress(Exception):  # whatever fails here must not end the watch
                self._dump_hang(missed_s)

    def _state(self) -> str:
        fields = system.text_of(f"/proc/{self.pid}/stat").rpartition(")")[2].split()
        return fields[0] if fields else "X"

    def _dump_hang(self, missed_s: float) -> None:
        found = self._found(f"no heartbeat for {missed_s:.1f} s", "hang")
        outside.look(found)
        found.native["threads"] = outside.threads_of(self.pid)
        answer = native.of_process(self.pid)
        outside.add_pystacks(found, answer)
        if not found.threads:
            # Only now, because a signal cuts short what the process waits for in C, if only a sleep.
            _, found.threads = outside.parse_fatal(self._ask(), self._names())
            found.threads_state = [kinds.PARTIAL, f"without locals: {answer.get('problem')}"]
            found.no_locals = "only PyStack reads them from outside"
            for thread in found.threads:
                thread["failing"] = False
        age = None
        if not found.threads:
            why = "the process did not answer the signal that writes stacks"
            age = self._stacks_shipped(found, why, time.time())
        self._add_names(found.threads)
        found.notes["hang"] = {
            "stacks_age_s": age,
            "missed_s": round(missed_s, 2),
            "progress": self.area.numbers[sidecar.PROGRESS],
            "progress_age_s": self._progress_age(),
            "still_there": self._state(),
        }
        self._write(found, self._redactor(found))

    def _ask(self) -> str:
        """All Python stacks, written by faulthandler's handler in C: it needs no lock and no bytecode."""
        number = self.setup["signal"]
        if not number:
            return ""
        os.ftruncate(self.text, 0)
        try:
            signal.pidfd_send_signal(self.watched, number)
        except OSError:
            return ""
        until = time.monotonic() + _ANSWER_S
        size = -1
        while time.monotonic() < until:
            time.sleep(0.05)
            now = os.fstat(self.text).st_size
            if now and now == size:  # it stopped growing
                break
            size = now
        return os.pread(self.text, 4 << 20, 0).decode("utf-8", "replace")

    # After its death.

    def _after_death(self) -> None:
        died_at = time.time()
        status = self._tried(lambda: exit_status(self.pid, self.watched), None)
        text = outside.fatal_text(Path(self.setup["fatal"]))[1] if self.setup["fatal"] else ""
        if text and self.setup["echo"]:
            with contextlib.suppress(OSError):
                os.write(2, text.encode() + b"\n")
        number = status & 0x7F if status is not None else 0
        if not text and not is_crash(status, ending=self.area.numbers[sidecar.STATE] == sidecar.ENDING):
            self._forget_fatal()
            self._collect()
            return
        name = outside.fatal_signal(text) or signal_name(number)
        memory = self._tried(lambda: killed_for_memory(self.pid, number, self.began, self.events), [])
        evidence = self._tried(lambda: self._evidence(status, text, memory), [])
        if name in ("", "SIGKILL") and memory:
            why, trigger = f"killed for memory: {memory[0]}", "memory"
        elif name == "SIGKILL":
            why, trigger = "killed by SIGKILL", "killed"
        elif name:
            why, trigger = f"died of {name}", "signal"
        else:
            why, trigger = "gone without a word: killed, or left through os._exit", "gone"
        found = self._found(why, trigger)
        age: float | None = None
        names = self._tried(self._names, [])
        what, found.threads = self._tried(lambda: outside.parse_fatal(text, names), ("", []))
        found.no_locals = outside.NO_LOCALS
        if trigger != "signal":
            found.gone[kinds.NATIVE] = "of a process that is killed nothing is left, not even a core"
        if text and what:
            found.why += f": {what}"
        if not found.threads:
            age = self._tried(lambda: self._stacks_shipped(found, "a death that runs no handler", died_at), None)
        found.parts = {**self.parts, **found.parts}
        sure = "the kernel told the exit status" if status is not None else "deduced, as the kernel did not tell"
        found.notes["death"] = {
            "what": found.why,
            "signal": name,
            "exit_code": status >> 8 & 0xFF if status is not None and not number else None,
            "core_written": bool(status is not None and status & 0x80),
            "sure": sure,
            "evidence": evidence,
            "ending": self.area.numbers[sidecar.STATE] == sidecar.ENDING,
            "at": died_at,
            "beat_age_s": round((time.monotonic_ns() - self.area.numbers[sidecar.BEAT_NS]) / 1e9, 2),
            "progress": self.area.numbers[sidecar.PROGRESS],
            "progress_age_s": self._progress_age(),
            "stacks_age_s": age,
            "text": text[:100_000],
        }
        found.notes |= {"not collected": self.failed} if self.failed else {}
        redactor = self._tried(partial(self._redactor, found), Redactor(dict(os.environ), found.known))
        path = self._write(found, redactor)
        if path is not None:
            self._forget_fatal()
            self._collect()
            self._tell_agents(found, path, redactor)

    def _evidence(self, status: int | None, text: str, memory: list[str]) -> list[str]:
        told = [f"wait status {status:#06x}"] if status is not None else ["no exit status: reaped too soon"]
        if text:
            told.append("the interpreter's own handler wrote stacks while the process died")
        told += memory or kernel_lines(self.pid, self.began)
        if self.samples:
            last = self.samples[-1]
            told.append(f"{last['resident']:,} bytes resident {time.time() - last['at']:.1f} s before this was written")
        return told

    # What both have.

    def _found(self, why: str, trigger: str) -> outside.Evidence:
        setup = self.setup
        found = outside.Evidence(
            why=why, trigger=trigger, pid=self.pid, program=setup["program"], python=setup["python"]
        )
        found.library = setup["library"]
        found.began = setup["began"]
        for add in (self._add_known, self._add_told, self._add_logs, self._add_modules):
            self._tried(partial(add, found), None)
        found.notes["memory"] = {"samples": list(self.samples)}
        return found

    def _tried(self, find: Callable[[], Any], otherwise: Any) -> Any:
        """What one look lacks must not cost the dump."""
        try:
            return find()
        except Exception as error:  # noqa: BLE001 (whatever it is)
            self.failed.append(f"{type(error).__name__}: {str(error)[:200]}")
            return otherwise

    def _add_known(self, found: outside.Evidence) -> None:
        known = sidecar.unpacked(self.area.get(sidecar.KNOWN))
        found.known = [item for item in known or () if isinstance(item, str)]

    def _add_told(self, found: outside.Evidence) -> None:
        for kind, name, data, at in sidecar.unpacked(self.area.get(sidecar.TOLD)) or ():
            found.extras.append((kind, name, {**data, "told_at": at} if isinstance(data, dict) else data))

    def _add_logs(self, found: outside.Evidence) -> None:
        records = [(number, sidecar.unpacked(packed)) for number, packed in self.area.records()]
        kept = [record for _number, record in records if isinstance(record, dict)]
        if kept:
            found.parts[kinds.LOGS] = {"records": kept, "left_out": records[0][0] - 1}

    def _add_modules(self, found: outside.Evidence) -> None:
        shared_objects = self.parts.get(kinds.MODULES, {}).get("shared") or system.shared_objects(self.pid)
        found.parts[kinds.MODULES] = {
            "modules": sidecar.unpacked(self.area.get(sidecar.MODULES)) or [],
            "distributions": system.distributions(self.setup["search"]),
            "path": self.setup["search"],
            "shared": shared_objects,
        }

    def _names(self) -> list[Any]:
        stacks = sidecar.unpacked(self.area.get(sidecar.STACKS))
        return [item[:4] for item in stacks[1]] if stacks else []

    def _add_names(self, threads: list[dict[str, Any]]) -> None:
        """Names as the program gave them, for threads that are known by their number in the kernel."""
        names = {native: name for _ident, name, native, _main in self._names()}
        for thread in threads:
            thread["name"] = names.get(thread.get("native_id")) or thread["name"]

    def _stacks_shipped(self, found: outside.Evidence, reason: str, at: float) -> float | None:
        """The last thin stacks that the process left, when there is nothing newer, and how old they were then."""
        stacks = sidecar.unpacked(self.area.get(sidecar.STACKS))
        if not stacks:
            found.threads_state = [kinds.ABSENT, f"{reason}, and none were left before"]
            return None
        age: float = max(0.0, at - stacks[0])
        for ident, name, native_id, main, rows, cut in stacks[1]:
            frames = [{"file": file, "line": line, "function": function} for file, line, function in reversed(rows)]
            thread = {"id": ident, "name": name, "native_id": native_id, "main": main, "frames": frames}
            found.threads.append({**thread, "current": False, "failing": False, "left_out": int(cut)})
        found.threads_state = [kinds.PARTIAL, f"as they were {age:.1f} s before, without locals: {reason}"]
        found.no_locals = "stacks that a process leaves beforehand have none"
        return round(age, 2)

    def _progress_age(self) -> float | None:
        at = self.area.numbers[sidecar.PROGRESS_NS]
        return round((time.monotonic_ns() - at) / 1e9, 2) if at else None

    def _redactor(self, found: outside.Evidence) -> Redactor:
        """It knows the secrets of the environment as it was at the start, and as it was told later."""
        environment = found.parts.get(kinds.ENVIRONMENT, {}).get("all") or dict(os.environ)
        return Redactor(environment, found.known)

    def _write(self, found: outside.Evidence, redactor: Redactor) -> Path | None:
        path = hidden = None
        try:
            path = folder.new_file(self.setup["folder"], found.pid, found.why)
            hidden = path.with_name(f".{path.name}.part")  # it appears when it is whole
            outside.write(hidden, found, redactor, Limits(**self.setup["limits"]))
            if self.setup["core"] and found.trigger == "signal":
                self._keep_core(hidden, path, redactor)
            hidden.rename(path)
        except Exception:  # noqa: BLE001 (nobody is there who could be told)
            if path is None or hidden is None or not hidden.exists():
                return None
            if found.notes.get("death", {}).get("text"):  # a later start makes a whole one from the handler's file
                hidden.unlink(missing_ok=True)
                return None
            hidden.rename(path)  # a dump that was cut says so
        return path

    def _keep_core(self, hidden: Path, path: Path, redactor: Redactor) -> None:
        looked = self.parts.get(kinds.PROCESS, {})
        cores.keep(
            hidden,
            path.with_name(path.name.removesuffix(kinds.SUFFIX) + cores.SUFFIX),
            redactor,
            pid=self.pid,
            folder=Path(looked.get("cwd") or self.setup["cwd"]),
            since=self.began,
            executable=looked.get("executable") or self.setup["executable"],
            names={native: name for _ident, name, native, _main in self._tried(self._names, [])},
        )

    def _tell_agents(self, found: outside.Evidence, path: Path, redactor: Redactor) -> None:
        """Let the history of each agent name the dump."""
        stands = [data for kind, _name, data in found.extras if kind == kinds.AGENT and isinstance(data, dict)]
        if stands:
            signal.alarm(_TELL_S)  # a store may be locked for ever; the dump is written
            sys.path.extend(self.setup["search"])
            from holdfast.crash import agents

            name = found.notes["death"]["signal"] or "gone"
            agents.tell_death(stands, path, name, found.why, found.trigger, redactor)

    def _forget_fatal(self) -> None:
        if self.setup["fatal"]:
            with contextlib.suppress(OSError):
                Path(self.setup["fatal"]).unlink(missing_ok=True)
