"""Deaths by a fatal signal: the stacks that the interpreter's own C handler writes, and how they become a dump.

Owns the file that faulthandler writes to, and the reading of its text. Must not know how the process is watched. Holds
always: the process dies of the same signal as without it; a file is there as long as its process may still write to it;
nothing of the dead process's text is believed beyond its form.

The file is one line of JSON, then whatever faulthandler writes. The process holds a lock on it, so that anyone can see
whether it still lives, whatever its number means elsewhere. A sidecar inherits the lock and reads what is left.
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
from pathlib import Path
from typing import Any

from holdfast.crash import system
from holdfast.crash.limits import MAX_NAME, MAX_THREADS
from holdfast.crash.stacks import library_paths
from holdfast.errors import DumpFailed, HoldfastError

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
        if not text_in(self.path)[1]:
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


def enable(folder: str | os.PathLike[str]) -> Fatal:
    """Begin to leave stacks on SIGSEGV, SIGABRT, SIGBUS, SIGFPE and SIGILL. DumpFailed when no file can be made."""
    return Fatal(Path(folder).absolute())


def _after_fork() -> None:
    for fatal in _living:
        fatal._again()  # noqa: SLF001 (its own class)


os.register_at_fork(after_in_child=_after_fork)


def _new_file(folder: Path) -> tuple[Path, int]:
    front = {
        "pid": os.getpid(),
        "at": time.time(),
        "program": [item[:1000] for item in sys.argv[:50] if type(item) is str],
        "python": sys.version.split()[0],
        "library": library_paths(),
        "began": system.began(os.getpid()),
    }
    path = folder / f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, json.dumps(front).encode()[: _FRONT_BYTES - 1] + b"\n")
    except OSError as error:
        raise DumpFailed(f"no file for fatal signals can be made in {folder}: {error.strerror}") from error
    return path, handle


def collect(folder: str | os.PathLike[str], found: str = "at a later start") -> list[Path]:
    """Dumps for processes that died of a fatal signal and of which nobody made one. Never raises.

    Files of those that live, or whose sidecar does, are left alone. ``found``: when or by whom, for people.
    """
    made: list[Path] = []
    with contextlib.suppress(Exception):  # whoever starts must not fail because of what another one left
        _collect(Path(folder), found, made)
    return made


def _collect(folder: Path, found: str, made: list[Path]) -> None:
    for path in sorted(folder.glob(f"*{SUFFIX}"))[:1000]:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            front, text = text_in(path)
            if text:
                made.append(_dump(folder, front, text, found))
            path.unlink(missing_ok=True)
        except Exception:  # noqa: BLE001, S112 (it lives, or someone else is at it, or there is no room, or it is odd)
            continue  # the next start tries again
        finally:
            os.close(handle)


def _dump(folder: Path, front: dict[str, Any], text: str, when: str) -> Path:
    from holdfast.crash import outside
    from holdfast.crash.folder import new_file
    from holdfast.crash.redaction import Redactor

    what, threads = parse(text)
    found = outside.Found(
        why=f"{signal_of(text) or 'fatal error'}: {what}",
        trigger="signal",
        pid=front["pid"],
        program=front["program"],
        python=front["python"],
        library=front["library"],
        began=front["began"],
        threads=threads,
    )
    found.notes["death"] = {
        "what": what,
        "signal": signal_of(text),
        "sure": "the interpreter's own handler wrote it while the process died",
        "evidence": [f"found {when}: nobody who watched it had made a dump"],
        "text": text[:100_000],
    }
    found.no_locals = NO_LOCALS
    return outside.write(new_file(folder, found.pid, found.why), found, Redactor(dict(os.environ)))


def text_in(path: Path) -> tuple[dict[str, Any], str]:
    """What the process said of itself, and what faulthandler wrote. The text is empty when the file cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return _front({}), ""
            first = file.readline(_FRONT_BYTES)
            text = file.read(TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return _front({}), ""
    try:
        front = json.loads(first)
    except (ValueError, RecursionError):  # a long command line was cut
        front = None
    return _front(front if isinstance(front, dict) else {}), text.strip()


def _front(raw: dict[str, Any]) -> dict[str, Any]:
    """With every field, and each of its type."""
    found: dict[str, Any] = {"pid": raw["pid"] if type(raw.get("pid")) is int else 0}
    found["began"] = float(raw["began"]) if type(raw.get("began")) in (int, float) else 0.0
    found["python"] = raw["python"][:100] if isinstance(raw.get("python"), str) else ""
    for name in ("program", "library"):
        listed = raw.get(name)
        found[name] = [item[:4096] for item in listed[:50] if isinstance(item, str)] if isinstance(listed, list) else []
    return found


def signal_of(text: str) -> str:
    """The name of the signal that faulthandler tells of; empty when it tells of none."""
    for line in text.splitlines()[:50]:
        name = _SIGNALS.get(line.removeprefix("Fatal Python error: ").strip())
        if line.startswith("Fatal Python error: ") and name:
            return name
    return ""


def parse(text: str, names: Iterable[Any] = ()) -> tuple[str, list[dict[str, Any]]]:
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
