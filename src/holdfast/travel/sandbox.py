"""The room in which history is executed again: a process that can read, and can change nothing outside of a directory.

Owns what a program may not do there, how that is noticed, and the line of the program that tried. Must not know what is
executed. What always holds: once the process is ``closed``, no socket is made, no process is started, and no file
outside of its directory is changed by Python code, and no other process; what was tried is kept, also where the
program has caught the error.

It keeps honest programs from doing something by accident, in two ways. An audit hook names the line. Where the system
lets it, the process has file systems of its own, read-only but for its directory: that holds for extensions written in
C, for databases and for processes as well. What is its own it may change, its priority for instance, and it may take
locks on files: they end with it. It is no wall against hostile programs.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast.errors import Blocked

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWNET = 0x2_0000, 0x1000_0000, 0x4000_0000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x4_0000
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY = 442, 0x8000, 1
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TRIES_MAX = 100
"""Attempts that are kept; the rest are refused as well."""

_SOCKETS = frozenset({
    "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname",
    "socket.gethostbyaddr", "socket.getnameinfo", "socket.sethostname",
})  # fmt: skip
_PROCESSES = frozenset({
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "pty.spawn", "os.kill", "os.killpg", "signal.pthread_kill", "sys.remote_exec", "signal.pidfd_send_signal",
    "time.clock_settime", "time.clock_settime_ns", "_posixshmem.shm_open", "_posixshmem.shm_unlink",
    "syslog.syslog", "_posixsubprocess.fork_exec",
    "cpython.PyInterpreterState_New",  # which would have no hook
})  # fmt: skip
# What changes the process whose id is the first argument. It may change itself.
_OF_PROCESS = frozenset({"os.sched_setaffinity", "os.sched_setparam", "os.sched_setscheduler", "resource.prlimit"})
# Functions of which Python tells no audit hook, by their module, and where else they are.
_SILENT: dict[tuple[str, str], tuple[str, ...]] = {
    ("os", "posix"): (
        "setpriority", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "mkfifo", "mknod",
    ),
    ("signal", "_signal"): ("pidfd_send_signal",),
    ("time", "time"): ("clock_settime", "clock_settime_ns"),
    ("_posixshmem", "_posixshmem"): ("shm_open", "shm_unlink"),
    ("_posixsubprocess", "_posixsubprocess"): ("fork_exec",),
}  # fmt: skip
# Which of the event's arguments are the paths of what is changed, and each one's directory, if it has one.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),), "os.lchown": ((0, None),), "os.chflags": ((0, None),), "os.utime": ((0, 3),),
    "os.mkfifo": ((0, 1),), "os.mknod": ((0, 1),),
    "os.setxattr": ((0, None),), "os.removexattr": ((0, None),), "sqlite3.connect": ((0, None),),
}  # fmt: skip
_HARMLESS = frozenset({"/dev/null", "/dev/tty", "/dev/zero"})
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PATHS = sysconfig.get_paths()
_PACKAGES = (_PATHS["purelib"] + os.sep, _PATHS["platlib"] + os.sep)
# Frozen and generated code is Python's; packages may lie below its own directory.
_PYTHON = tuple({f"{_PATHS['stdlib']}{os.sep}", f"{_PATHS['platstdlib']}{os.sep}", "<"})
_FOREIGN = (_PACKAGE, *_PACKAGES, *_PYTHON)


class Sandbox:
    """What a process may do, once it is ``close``d. ``tried`` has what was refused: what, and the program's line."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.realpath(directory)
        self.tried: list[dict[str, str]] = []
        self.network = False
        self.sealed = False
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

    def seal(self) -> bool:
        """Have every file system read-only, for this process alone, but for its directory; False: it may not do that.

        What is open already stays as it is.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        own = os.fsencode(self.directory)
        if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
            return False
        self.sealed = (
            not libc.mount(own, own, None, _MS_BIND, None)
            and _set_readonly(libc, b"/", _RDONLY, 0, _AT_RECURSIVE)
            and _set_readonly(libc, own, 0, _RDONLY)
            and _set_readonly(libc, b"/proc", 0, _RDONLY)
        )
        return self.sealed

    def cover(self, path: str, copy: str) -> bool:
        """Let a directory of this process's own stand in the place of another, for this process alone, if it may."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not self.sealed or libc.mount(os.fsencode(copy), os.fsencode(path), None, _MS_BIND, None):
            return False
        self._own += (path + os.sep,)
        return True

    def close(self) -> None:
        """From now on. Nothing in this process can undo it."""
        self._on = True
        sys.dont_write_bytecode = True
        for homes, names in _SILENT.items():
            with suppress(ImportError):
                modules = [import_module(home) for home in homes]
                for name in names:
                    _announce(modules, name)
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            self._opened(args)
        elif event in _CHANGES:
            for at, beneath in _CHANGES[event]:
                if at < len(args) and self._is_outside(args[at], event, args[beneath] if beneath else -1):
                    self._refuse(f"{event} {_shown(args[at])}")
        elif event == "holdfast.open":
            if not args[1] and self._is_outside(args[0], event):
                self._refuse(f"open the store {_shown(args[0])} for writing")
        elif event == "socket.__new__":
            if args[1] not in {socket.AF_UNIX, -1}:  # the pair by which an event loop wakes itself up
                self._refuse("a socket")
        elif event == "os.setpriority":
            if args[0] != os.PRIO_PROCESS or args[2] not in {0, os.getpid()}:
                self._refuse(f"{event} of {args[2]}")
        elif event in _OF_PROCESS:
            if args[0] not in {0, os.getpid()} and (event != "resource.prlimit" or args[2] is not None):
                self._refuse(f"{event} of process {args[0]}")
        elif event in _SOCKETS or event in _PROCESSES:
            shown = args[1] if event.startswith("socket.") and len(args) > 1 else args[0] if args else ""
            self._refuse(f"{event} {_shown(shown)}".rstrip())

    def _opened(self, args: tuple[Any, ...]) -> None:
        path, mode, flags = args[0], args[1], args[2]
        writes = bool(flags & _WRITING) if isinstance(flags, int) else set(mode or "r") & set("wax+")
        # That of os.open may be meant for another directory, which the event does not tell.
        astray = mode is None and not self.sealed and not isinstance(path, int) and not os.path.isabs(path)  # noqa: PTH117
        if writes and (astray or self._is_outside(path, "open")):
            self._refuse(f"open {_shown(path)} for writing")

    def _is_outside(self, path: Any, event: str, beneath: Any = -1) -> bool:
        if event == "sqlite3.connect" and path == ":memory:":
            return False
        try:
            if isinstance(path, int):
                name = _opened_at(path) if event != "open" else ""  # it was opened before
                if not name.startswith("/"):
                    return False
            else:
                name = os.fsdecode(path)
            if event == "sqlite3.connect" and name.startswith("file:"):
                name = unquote(urlsplit(name).path)
            if isinstance(beneath, int) and beneath >= 0:
                name = os.path.join(_opened_at(beneath), name)  # noqa: PTH118
        except (TypeError, OSError):
            return True
        where, last = os.path.split(os.path.abspath(name))  # noqa: PTH100 - the last part is what is made or removed
        real = os.path.join(os.path.realpath(where), last)  # noqa: PTH118
        if event == "open":
            real = os.path.realpath(real)
        return real not in _HARMLESS and real != self.directory and not real.startswith(self._own)

    def _refuse(self, what: str) -> None:
        frame = sys._getframe(1)
        inner = next((one for one in _frames(frame) if not one.f_code.co_filename.startswith(_PYTHON)), None)
        line = line_of(next(own_frames(frame), inner))
        if len(self.tried) < _TRIES_MAX:
            self.tried.append({"what": what, "line": line})
        raise Blocked(
            f"{what} at {line} was refused: a replay does nothing outside",
            hint="What a program does outside belongs into a tool, whose recorded result is used here.",
        )


def _announce(modules: list[ModuleType], name: str) -> None:
    """Let a function of Python's tell when it is called, as most do: its first argument, its directory, the others."""
    function = getattr(modules[0], name, None)
    if function is None:
        return
    event = f"{modules[0].__name__}.{name}"

    @wraps(function)
    def announced(*args: Any, **kwargs: Any) -> Any:
        sys.audit(event, *(args[:1] or (kwargs.get("path", ""),)), kwargs.get("dir_fd", -1), *args[1:])
        return function(*args, **kwargs)

    for module in modules:
        setattr(module, name, announced)


def _opened_at(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _set_readonly(libc: Any, path: bytes, given: int, taken: int, flags: int = 0) -> bool:
    """Change whether what is mounted there can be written; False: the system cannot do that."""
    wish = (ctypes.c_uint64 * 4)(given, taken, 0, 0)
    return bool(libc.syscall(_SYS_MOUNT_SETATTR, -1, path, flags, ctypes.byref(wish), ctypes.sizeof(wish)) == 0)


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
