"""The room in which history is executed again: a process that can read, and can change nothing outside of a directory.

Owns what a program may not do there, how that is noticed, and the line of the program that tried. Must not know what is
executed. What always holds: once the process is ``closed``, no socket is made, no process is started, and no file
outside of its directory is changed by Python code; what was tried is kept, also where the program has caught the error.

It keeps honest programs from doing something by accident. It is no wall against hostile ones: an extension written in C
passes no audit hook.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.errors import Blocked

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x2_0000, 0x1000_0000, 0x4000_0000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TRIES_MAX = 100
"""Attempts that are kept; the rest are refused as well."""

_SOCKETS = frozenset({
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname",
    "socket.gethostbyaddr", "socket.getnameinfo", "socket.sethostname",
})  # fmt: skip
_PROCESSES = frozenset({
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill", "sys.remote_exec",
})  # fmt: skip
# Which of the event's arguments are the paths of what is changed.
_CHANGES = {
    "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.lchown": (0,), "os.chflags": (0,), "os.utime": (0,),
    "os.setxattr": (0,), "os.removexattr": (0,), "os.mkfifo": (0,), "os.mknod": (0,), "sqlite3.connect": (0,),
}  # fmt: skip
_HARMLESS = frozenset({"/dev/null", "/dev/tty", "/dev/zero"})
_PACKAGE = str(Path(__file__).parents[1])
_PATHS = sysconfig.get_paths()
_PACKAGES = (_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep)
# Frozen and generated code is Python's; packages may lie below its own directory.
_PYTHON = tuple({f"{_PATHS['stdlib']}{os.sep}", f"{_PATHS['platstdlib']}{os.sep}", "<"})
_FOREIGN = (f"{_PACKAGE}{os.sep}", *_PACKAGES, *_PYTHON)


class Sandbox:
    """What a process may do, once it is ``close``d. ``tried`` has what was refused: what, and the program's line."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.realpath(directory)
        self.tried: list[dict[str, str]] = []
        self.network = False
        self._own: tuple[str, ...] = (self.directory + os.sep, "/proc/self/")
        self._on = False

    def unplug(self) -> bool:
        """Leave the network, for good: as root, or where users may have namespaces. Before any thread is begun."""
        uid, gid = os.getuid(), os.getgid()
        unshare = ctypes.CDLL(None, use_errno=True).unshare
        if unshare(_CLONE_NEWNET) == 0:
            return True
        if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            self.network = True
            return False
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            try:
                Path("/proc/self", file).write_text(text)
            except OSError:  # it is nobody then, which reads the same files
                break
        return True

    def cover(self, path: str, copy: str) -> bool:
        """Let a directory of this process's own stand in the place of another, for this process alone, if it may."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
            return False
        if libc.mount(os.fsencode(copy), os.fsencode(path), None, _MS_BIND, None):
            return False
        self._own += (path + os.sep,)
        return True

    def close(self) -> None:
        """From now on. Nothing in this process can undo it."""
        self._on = True
        sys.dont_write_bytecode = True
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            self._opened(args)
        elif event in _CHANGES:
            for at in _CHANGES[event]:
                if at < len(args) and self._is_outside(args[at], event):
                    self._refuse(f"{event} {_shown(args[at])}")
        elif event == "holdfast.open":
            if not args[1] and self._is_outside(args[0], event):
                self._refuse(f"open the store {_shown(args[0])} for writing", ours=False)
        elif event == "socket.__new__":
            if args[1] not in {socket.AF_UNIX, -1}:  # the pair by which an event loop wakes itself up
                self._refuse("a socket")
        elif event in _SOCKETS or event in _PROCESSES:
            shown = args[1] if event.startswith("socket.") and len(args) > 1 else args[0] if args else ""
            self._refuse(f"{event} {_shown(shown)}".rstrip())

    def _opened(self, args: tuple[Any, ...]) -> None:
        path, mode, flags = args[0], args[1], args[2]
        writes = bool(flags & _WRITING) if isinstance(flags, int) else set(mode or "r") & set("wax+")
        if writes and self._is_outside(path, "open"):
            self._refuse(f"open {_shown(path)} for writing")

    def _is_outside(self, path: Any, event: str) -> bool:
        if isinstance(path, int) or (event == "sqlite3.connect" and path == ":memory:"):
            return False
        try:
            name = os.fsdecode(path)
        except TypeError:
            return True
        where, last = os.path.split(os.path.abspath(name))  # noqa: PTH100 - the last part is what is made or removed
        real = os.path.join(os.path.realpath(where), last)  # noqa: PTH118
        if event == "open":
            real = os.path.realpath(real)
        return real not in _HARMLESS and real != self.directory and not real.startswith(self._own)

    def _refuse(self, what: str, *, ours: bool = True) -> None:
        frame = sys._getframe(1)
        inner = next((one for one in _frames(frame) if not one.f_code.co_filename.startswith(_PYTHON)), None)
        if ours and inner is not None and inner.f_code.co_filename.startswith(_PACKAGE):
            return  # of this package, for itself
        line = line_of(next(own_frames(frame), inner))
        if len(self.tried) < _TRIES_MAX:
            self.tried.append({"what": what, "line": line})
        raise Blocked(
            f"{what} at {line} was refused: a replay does nothing outside",
            hint="What a program does outside belongs into a tool, whose recorded result is used here.",
        )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From this one outwards, without those of this module."""
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the program, innermost first: not those of Python, of packages, or of this one."""
    return (one for one in _frames(frame) if is_own(one.f_code.co_filename))


def is_own(file: str) -> bool:
    """Whether a file belongs to the program."""
    return not file.startswith(_FOREIGN)


def line_of(frame: FrameType | None) -> str:
    """``trip.py:17``; where nobody knows, "?"."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def caller() -> str:
    """The line of the program that has called this package."""
    return line_of(next(own_frames(sys._getframe(1)), None))


def _shown(value: Any) -> str:
    text = os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else str(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


class Watch:
    """Tells after which line of the program something that can be looked at has become another.

    It is looked at before every line of the program, so that this executes some ten times slower.
    """

    def __init__(self, look: Callable[[], Any], tell: Callable[[str, Any, Any], None]) -> None:
        self._look, self._tell = look, tell
        self._value: Any = None
        self._line = "?"

    def begin(self) -> None:
        """From now on, on this thread."""
        self._value = self._look()
        sys.settrace(self._event)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # what is executing already
            if is_own(frame.f_code.co_filename):
                frame.f_trace = self._event
            frame = frame.f_back

    def end(self) -> None:
        sys.settrace(None)
        self.compare()

    def compare(self) -> None:
        """Look now."""
        value = self._look()
        if value != self._value:
            before, self._value = self._value, value
            self._tell(self._line, before, value)

    def _event(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if not is_own(frame.f_code.co_filename):
            return None
        self.compare()
        if event == "line":
            self._line = line_of(frame)
        return self._event
