"""Processes that are killed: the one way in which tests of all rooms end them.

``dies`` is for a death at an exact moment: it forks, does something, and is killed at the n-th call of what it watches.
``Troupe`` is for many lives of one program: a process that has loaded everything forks one for each job, and says what
it said and how it ended. ``start`` is for another process that a test talks to. All of them are real processes, and die
of real signals.

    while dies(lambda: work(path), at := at + 1, (Database, "change")):
        look(path)
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from queue import Queue
from typing import Any, Self

import apsw

from holdfast.store import sqlite
from holdfast.store.database import Database
from tests import warm

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 180
"""Far above what any life takes on a busy machine: only one that hangs gets there."""

# -- at an exact moment -------------------------------------------------------------------------------------

CHANGES = [(Database, name) for name in ("change", "hand", "directly")]
"""All by which a store is changed, as moments of ``dies``."""

_left = 0


def point() -> None:
    """A moment at which a process that ``dies`` may die. In others nothing happens here."""
    global _left  # noqa: PLW0603 - a process dies once
    if _left > 0:
        _left -= 1
        if not _left:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def doom(at: int, *calls: tuple[Any, str]) -> None:
    """Let this process die at its ``at``-th moment: as in ``dies``, which see."""
    global _left  # noqa: PLW0603 - as above
    for owner, name in calls:
        setattr(owner, name, _between_points(getattr(owner, name)))
    _left = at


def dies(act: Callable[[], object], at: int, *calls: tuple[Any, str]) -> bool:
    """Do something in a forked process; whether it was killed before it came to its end.

    It is killed at its ``at``-th moment. Moments are those before and after each call of the functions that are given
    as owner and name, and each ``point()``. One that fails instead is an error here.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            doom(at, *calls)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, -signal.SIGKILL}, f"it ended with {code}"
    return code != 0


def killed(act: Callable[[], object]) -> None:
    """Do something in a forked process that is killed right after it."""
    assert dies(lambda: (act(), die()), 0)


def _between_points(call: Callable[..., Any]) -> Callable[..., Any]:
    def around(*args: Any, **options: Any) -> Any:
        point()
        found = call(*args, **options)
        point()
        return found

    return around


# -- a program to talk to -----------------------------------------------------------------------------------


def start(module: str, *arguments: object, loaded: str = warm.HOLDFAST) -> subprocess.Popen[str]:
    """A module in a process of its own, which reads and writes lines. ``with`` waits for its end."""
    return warm.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, loaded=loaded,
        start_new_session=True,  # so that what it forks can be ended with it
    )  # fmt: skip


def worker(place: str, program: object, *options: object, **how: Any) -> subprocess.Popen[bytes]:
    """``holdfast worker`` in a process of its own; what it prints is thrown away."""
    words = ["--store", place, "worker", program, "--no-dumps", *options]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **how}
    return warm.Popen([sys.executable, "-m", "holdfast", *words], **streams)


def line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str = "") -> None:
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def ask(process: subprocess.Popen[str], text: str) -> str:
    """Tell it something; what it answers."""
    tell(process, text)
    return line(process)


def stop_at_rest(process: subprocess.Popen[str], path: Path) -> None:
    """Stop a process while it has no change of a store under way: one that it had would keep everybody waiting."""
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with (
            closing(apsw.Connection(str(path / "store.db"))) as connection,
            (path / "locks" / "queue").open() as queue,
            suppress(apsw.BusyError, apsw.ProtocolError),
        ):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            if fcntl.fcntl(queue, fcntl.F_OFD_GETLK, sqlite._ASK)[:2] == sqlite._FREE:
                return
        process.send_signal(signal.SIGCONT)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


# -- many lives of one program ------------------------------------------------------------------------------


class Life:
    """One process of a troupe: what it has said so far, word and rest, and how it ended."""

    def __init__(self, troupe: Troupe, pid: int, said: list[tuple[str, str]]) -> None:
        self._troupe, self.pid, self.said = troupe, pid, said
        self.code: int | None = None

    def until(self, *words: str) -> None:
        """Wait until it has said one of these, or is gone."""
        while self.code is None and not any(word in words for word, _ in self.said):
            self._listen()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it ended by itself, and its last line says why
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end; how it ended, as ``subprocess`` says it."""
        while self.code is None:
            self._listen()
        return self.code

    def _listen(self) -> None:
        word, rest = self._troupe.next()
        if word == "gone":
            self.code = int(rest)
        else:
            self.said.append((word, rest))


class Troupe:
    """A process that forks lives of one program: ``module`` calls ``serve`` when it has loaded all that they need."""

    def __init__(self, module: str, *arguments: object, loaded: str = warm.HOLDFAST) -> None:
        self.process = start(module, *arguments, loaded=loaded)
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.next()[0] == "ready"

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("end-of-file")

    def begin(self, **job: object) -> Life:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        said = []
        while (line := self.next())[0] != "pid":  # a quick one may be first
            said.append(line)
        return Life(self, int(line[1]), said)

    def next(self) -> tuple[str, str]:
        word, _, rest = self._lines.get(timeout=PATIENCE_S).partition(" ")
        assert word != "end-of-file", "the process that forks has died"
        return word, rest

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=PATIENCE_S)
        self._reader.join(PATIENCE_S)
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def say(word: str, rest: object = "") -> None:
    """A line to whoever watches this life: one write, so that it is said or not."""
    os.write(1, f"{word} {rest}\n".encode())


def serve(live: Callable[[dict[str, Any]], None]) -> None:
    """In the program of a troupe: one life for each line of the standard input."""
    gc.freeze()
    say("ready")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                live(json.loads(line))
                code = 0
            except BaseException as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                traceback.print_exc()
                say("error", repr(error))
            finally:
                os._exit(code)
        say("pid", child)
        say("gone", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
