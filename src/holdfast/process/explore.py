"""Several ways from one moment: each candidate is tried in a copy of the process, and its value comes back.

Owns the copies, their limits, and the way of a value from one to the program. Must not know what they do. What always
holds: a copy changes nothing of the program, and of the store nothing at all; values come back as the codec writes
them, never as code; a copy that takes too long or too much is ended, and none outlives the call, nor does anything
that it began.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import shutil
import signal
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from holdfast.agent import places
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, CandidateFailed, CorruptValue, ForkRefused, HoldfastError
from holdfast.process import fork
from holdfast.process.trees import STORE, is_store
from holdfast.store import copies

C = TypeVar("C")

CANDIDATES_MAX = 10_000
AT_ONCE_MAX = 256
"""Candidates of one call, and copies that may run at once: each is a process."""

LIMIT_S = 300.0
"""How long a candidate may take, if nobody says."""

VALUE_MAX_BYTES = 256 * 2**20
"""The longest value that comes back."""

GRACE_BYTES = 64 * 2**20
"""What a copy may have above the program's own memory before the limit counts: its stack, and what it imports."""

_INSIDE = "inside `holdfast.explore`"
_RAISED, _NO_VALUE, _OUT_OF_MEMORY = 3, 4, 5
_SIZE = struct.Struct(">Q")  # comes before what a copy says: something that it began may hold the pipe open


class Tried(Generic[C]):
    """What came of one candidate: ``value``, or ``error``."""

    def __init__(self, number: int, candidate: C) -> None:
        self.number = number
        """Its place in the list."""
        self.candidate = candidate
        self.value: Any = None
        """What the function returned for it; None also where it failed."""
        self.error: CandidateFailed | None = None
        """Why it came to no value."""
        self.seconds = 0.0
        """How long it took."""

    @property
    def ok(self) -> bool:
        """Whether it came to a value."""
        return self.error is None

    def __repr__(self) -> str:
        return f"<Tried {self.number}: {f'{self.value!r:.80}' if self.ok else self.error.reason}>"  # type: ignore[union-attr] # one of both


class Explored(Generic[C]):
    """What came of all candidates, in their order."""

    def __init__(self, tried: list[Tried[C]], key: Callable[[Any], Any] | None) -> None:
        self.tried = tried
        self._key = key

    def __iter__(self) -> Iterator[Tried[C]]:
        return iter(self.tried)

    def __len__(self) -> int:
        return len(self.tried)

    def __getitem__(self, at: int) -> Tried[C]:
        return self.tried[at]

    @property
    def values(self) -> list[Any]:
        """The values of those that came to one, in their order."""
        return [one.value for one in self.tried if one.ok]

    @property
    def best(self) -> Tried[C]:
        """The winner: the largest value, by ``key`` if that was given; of equal ones the first.

        Raises the first candidate's error where none came to a value.
        """
        found = [one for one in self.tried if one.ok]
        if not found:
            first = next((one.error for one in self.tried), None)
            raise first or BadOption("there were no candidates")
        return max(found, key=lambda one: self._key(one.value) if self._key is not None else one.value)


def explore(
    candidates: Iterable[C],
    function: Callable[..., Any],
    *,
    at_once: int | None = None,
    limit_s: float = LIMIT_S,
    memory_bytes: int | None = None,
    workspace: str | os.PathLike[str] | None = None,
    key: Callable[[Any], Any] | None = None,
    progress: Callable[[Tried[C]], object] | None = None,
) -> Explored[C]:
    """Try candidates in copies of this process: ``function(candidate)`` from the same memory, several at once.

    The answer has what came of each, in their order, and ``best``, the winner by ``key``: its value comes back, not its
    process. What a copy changes in memory is gone with it. Inside, ``checkpoint()`` and tools that do not only read
    raise ``ForkPointOpen``.

    - ``at_once``: how many copies run at the same time; without it, as many as there are processors.
    - ``limit_s``, ``memory_bytes``: what each may take; one that takes more is ended, and has ``CandidateFailed``.
    - ``workspace``: a directory of which each gets a copy of its own: ``function(candidate, path)``, and it stands in
      there. The copies are removed in the end.
    - ``progress``: called in this process with each that is done.

    Raises ``ForkRefused`` with other threads, a running event loop, and where memory is short.
    """
    wanted = list(candidates)
    at_once = at_once if at_once is not None else max(1, len(os.sched_getaffinity(0)))
    _check(len(wanted), at_once, limit_s, memory_bytes)
    if workspace is not None and not os.path.isdir(workspace):
        raise BadOption(f"{os.fspath(workspace)} is no directory", hint="Make it first, or leave workspace= out.")
    fork.refuse("candidates cannot be tried here", children=True)
    places.settle_all()
    tried = [Tried(number, one) for number, one in enumerate(wanted)]
    room = Path(tempfile.mkdtemp(prefix="holdfast-explore-")) if workspace is not None else None
    running: list[_Copy] = []
    waiting = list(reversed(tried))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                one = waiting.pop()
                folder = room / str(one.number) if room is not None else None
                if folder is not None and workspace is not None:
                    shutil.copytree(workspace, folder, symlinks=True, ignore=_left_out)
                    _turn_links(Path(workspace), folder)
                running.append(_Copy(one, function, folder, limit_s, memory_bytes))
            for copy in _ended(running):
                running.remove(copy)
                if copy.folder is not None:
                    shutil.rmtree(copy.folder, ignore_errors=True)
                if progress is not None:
                    progress(copy.tried)
    finally:
        for copy in running:
            copy.end()
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)
    return Explored(tried, key)


def _turn_links(workspace: Path, folder: Path) -> None:
    """In a copy, let links that name a place in the workspace lead to the same place in the copy."""
    homes = {os.path.abspath(workspace), os.path.realpath(workspace)}
    for above, folders, files in os.walk(folder):
        for path in [Path(above, name) for name in (*folders, *files)]:
            target = os.readlink(path) if path.is_symlink() else ""
            for home in homes:
                if target == home or target.startswith(home + os.sep):
                    path.unlink()
                    path.symlink_to(f"{folder}{target[len(home) :]}")
                    break


def _left_out(folder: str, names: list[str]) -> list[str]:
    """What is no part of a workspace: stores, of which a copy would say what is not so, and sockets, pipes, devices."""
    found = []
    for name in names:
        path = Path(folder, name)
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind == stat.S_IFDIR:
            if is_store({one for one in STORE if (path / one).exists()}):
                found.append(name)
        elif kind not in {stat.S_IFREG, stat.S_IFLNK}:
            found.append(name)
    return found


def _check(count: int, at_once: int, limit_s: float, memory_bytes: int | None) -> None:
    if count > CANDIDATES_MAX:
        raise BadOption(f"{count:,} candidates", hint=f"Try at most {CANDIDATES_MAX:,} at a time.")
    if type(at_once) is not int or not 1 <= at_once <= AT_ONCE_MAX:
        raise BadOption(f"at_once={at_once!r}", hint=f"Use 1 to {AT_ONCE_MAX}.")
    if not (math.isfinite(limit_s) and limit_s > 0):
        raise BadOption(f"limit_s={limit_s!r}", hint="Use seconds above 0.")
    if memory_bytes is not None and (type(memory_bytes) is not int or memory_bytes < 1):
        raise BadOption(f"memory_bytes={memory_bytes!r}", hint="Use a number of bytes, which each copy may add.")


def _ended(running: list[_Copy]) -> list[_Copy]:
    """Wait until one or more have ended, or are over their time."""
    now = time.monotonic()
    soonest = min(copy.until for copy in running)
    ready, _, _ = select.select([copy.pipe for copy in running], [], [], max(0.0, soonest - now))
    return [copy for copy in running if copy.look(readable=copy.pipe in ready)]


class _Copy:
    """One copy, and what it has said so far."""

    def __init__(
        self,
        tried: Tried[Any],
        function: Callable[..., Any],
        folder: Path | None,
        limit_s: float,
        memory_bytes: int | None,
    ) -> None:
        self.tried, self.folder = tried, folder
        self._limit_s, self._memory_bytes = limit_s, memory_bytes
        self._began = time.monotonic()
        self.until = self._began + limit_s
        self._data = bytearray()
        self.pipe, outer = os.pipe()
        try:
            self._pid = fork.copy()
        except ForkRefused:
            os.close(self.pipe)
            os.close(outer)
            raise
        if self._pid == 0:
            _try(tried, function, folder, memory_bytes, outer)
        os.close(outer)
        copies.OWN.add(self._pid)
        with suppress(OSError):  # as the copy does itself: one of both is first
            os.setpgid(self._pid, self._pid)

    def look(self, *, readable: bool) -> bool:
        """Whether it has ended: what came of it is known then."""
        if readable:
            part = os.read(self.pipe, 1 << 20)
            self._data += part
            whole = len(self._data) >= _SIZE.size + _SIZE.unpack_from(self._data.ljust(_SIZE.size, b"\xff"))[0]
            if part and not whole and len(self._data) <= VALUE_MAX_BYTES:
                return False
            self._settle(self.end(kill=bool(part) and not whole), late=False)
            return True
        if time.monotonic() >= self.until:
            self.end()
            self._settle(0, late=True)
            return True
        return False

    def end(self, *, kill: bool = True) -> int:
        """How it ended, by itself or by a kill; whatever it began ends with it."""
        os.close(self.pipe)
        if not kill:
            with suppress(ChildProcessError):  # its number, and so its group's, stays taken until it is reaped
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        code = fork.reap(self._pid)
        copies.OWN.discard(self._pid)
        return code

    def _settle(self, code: int, *, late: bool) -> None:
        tried = self.tried
        tried.seconds = time.monotonic() - self._began
        if late:
            tried.error = self._failed("time", f"took longer than {self._limit_s:g} s, and was ended")
            return
        if code == 0:
            try:
                tried.value = decode(bytes(self._data[_SIZE.size :]), REGISTRY)
            except CorruptValue as error:
                tried.error = self._failed("died", f"said what is no value ({error})")
            return
        kind, text = _said(bytes(self._data[_SIZE.size :]))
        if code > 0 and len(self._data) < _SIZE.size:
            tried.error = self._failed("died", f"ended with {code}")  # by itself, whatever that number means here
        elif code == _OUT_OF_MEMORY:
            allowed = f"{self._memory_bytes:,} bytes" if self._memory_bytes is not None else "the machine has"
            tried.error = self._failed("memory", f"needed more memory than {allowed}")
        elif code == _NO_VALUE:
            tried.error = self._failed("value", f"returned what cannot be handed over: {text}")
        elif code == _RAISED:
            tried.error = self._failed("raised", f"raised {kind}: {text}", kind)
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
            tried.error = self._failed("died", how)

    def _failed(self, reason: str, what: str, kind: str = "") -> CandidateFailed:
        return CandidateFailed(
            f"candidate {self.tried.number} {what}", candidate=self.tried.number, reason=reason, error_type=kind
        )


def _said(data: bytes) -> tuple[str, str]:
    with suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(data, type=tuple[str, str])
    return "", ""


# -- in the copy ------------------------------------------------------------------------------------------------------


def _try(
    tried: Tried[Any], function: Callable[..., Any], folder: Path | None, memory_bytes: int | None, outer: int
) -> NoReturn:
    """Call the function, and say what it returned."""
    code, data = _RAISED, b""
    try:
        copies.INSIDE.append(_INSIDE)
        os.setpgid(0, 0)  # with all that it begins, so that all of that can be ended
        fork.take_signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the program hears it, and ends this one
        for one in (signal.SIGTTIN, signal.SIGTTOU):  # it is not in the terminal's foreground: reading there fails
            signal.signal(one, signal.SIG_IGN)
        gc.freeze()  # what was there is not looked at, so its pages stay shared
        if memory_bytes is not None:
            _limit(memory_bytes)
        if folder is not None:
            os.chdir(folder)
        places.read_only_from_here()
        value = function(tried.candidate, folder) if folder is not None else function(tried.candidate)
        code = _NO_VALUE
        data, code = encode(value, REGISTRY), 0
    except MemoryError:
        code = _OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - it is said, and that is all that a copy can do
        text = error.message if isinstance(error, HoldfastError) else str(error)
        data = msgspec.msgpack.encode((type(error).__name__, text[:2000]))
    with suppress(BaseException):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    try:
        view = memoryview(_SIZE.pack(len(data)) + data)
        while view:
            view = view[os.write(outer, view) :]
    except BaseException:  # noqa: BLE001 - nobody listens any more
        code = 1
    fork.leave(code)


def _limit(memory_bytes: int) -> None:
    """Let this process have so much more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes + GRACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
