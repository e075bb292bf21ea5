"""Fork points: a line of a program to which its memory can go back.

Owns the process that waits, and what happens to the two when it takes over. What it may do with stores is theirs. What
always holds: the original goes on, so whoever leaves the block has the process that he had, and the waiting one is
ended; going back is refused before anything is given up, or it is done; one process at a time is the program: the other
waits, or only stands in for it; nothing waits that nobody can reach any more.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, NoReturn, Self

from holdfast.agent import places
from holdfast.codec.types import REGISTRY
from holdfast.codec.values import decode, encode
from holdfast.errors import BadOption, ForkLost, ForkRefused
from holdfast.process import fork, shell
from holdfast.store import copies

POINTS_MAX = 16
"""Fork points that may be open at once, one inside the other: each is a process, with the memory that changed since."""

ANSWER_S = 60.0
"""How long the waiting process may take to say that it is there, on a machine that is short of everything."""

VALUE_MAX_BYTES = 64 * 2**20
"""The longest value that is handed over. What is larger belongs into a file, which does not go back."""

_SIZE = struct.Struct(">Q")
_INSIDE = "inside `with fork_point():`"

_open: list[ForkPoint] = []
"""The points whose blocks this process is in, the innermost last."""

_stand_in: tuple[int, int] | None = None
"""Who stands in for this program since it first went back: its process, and the pipe that tells it who goes on."""


def fork_point(*, reseed: bool = True) -> ForkPoint:
    """A point that the program's memory can go back to: ``with holdfast.fork_point() as point:``.

    Inside, ``point.rollback(value)`` goes back to this line: everything in memory is as it was, and ``point.value`` is
    that value. Leaving the block gives the point up; the process, what it has open and its locks stay as they are.

    Inside, ``checkpoint()``, whatever else would change a store, and every tool but those that read raise
    ``ForkPointOpen``. Files, and what is outside, do not go back. Going back keeps ``flock`` locks, and loses record
    locks (``fcntl.lockf``), which belong to one process: take them again. With ``reseed=False`` the numbers of
    ``random`` and ``numpy.random`` are the same ones again; otherwise they are others. Raises ``ForkRefused`` with
    child processes, other threads, a running event loop, inside a durable run, and where memory is short.
    """
    return ForkPoint(reseed=reseed)


class ForkPoint:
    """A point that memory can go back to. Make one with ``holdfast.fork_point()``."""

    value: Any = None
    """What ``rollback`` was given; None before."""
    rollbacks = 0
    """How often the program has gone back to this point."""

    def __init__(self, *, reseed: bool = True) -> None:
        self._reseed = reseed
        self._waiting = 0  # the process that waits
        self._owner = 0  # the process that may go back: not one that the program forks inside the block
        self._line: socket.socket | None = None  # the way to it

    @property
    def returned(self) -> bool:
        """Whether the program has gone back to this point."""
        return self.rollbacks > 0

    def __enter__(self) -> Self:
        if self in _open:
            raise BadOption("this fork point is open already", hint="Make another one: holdfast.fork_point().")
        if len(_open) >= POINTS_MAX:
            raise ForkRefused(
                f"{POINTS_MAX} fork points are open; nothing was forked",
                reason="too many fork points",
                hint="Leave some of their blocks first.",
            )
        fork.refuse("a fork point cannot be made here")
        for said in copies.OBSTACLES:
            if reason := said():
                raise ForkRefused(f"a fork point cannot be made here: {reason}; nothing was forked", reason=reason)
        places.settle_all()
        _open.append(self)
        copies.INSIDE.append(_INSIDE)
        try:
            self._arm()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        """The point is given up, with those inside it that are still open."""
        if self in _open:
            at = _open.index(self)
            for one in reversed(_open[at:]):
                one.dismiss()
                copies.INSIDE.remove(_INSIDE)
            del _open[at:]

    def dismiss(self) -> None:
        """End the process that waits. The block goes on without it."""
        line, self._line = self._line, None
        waiting, self._waiting = self._waiting, 0
        if line is not None:
            if self._owner == os.getpid():
                with suppress(OSError):
                    line.send(b"e")
            line.close()
        if waiting in copies.OWN:
            copies.OWN.discard(waiting)
            fork.end(waiting)

    def move_to(self, guardian: int) -> None:
        """This process is about to end: the one that waits is to be another one's child, unless it is already."""
        if self._line is not None and self._waiting in copies.OWN:
            with suppress(OSError):
                self._line.sendall(b"m" + _SIZE.pack(guardian))
                _exactly(self._line, 1)

    # -- the process that waits ---------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Have a process wait. Returns in the one that goes on; and in the other when it takes over."""
        kept = _generators() if not self._reseed else None
        offsets = _offsets()
        while (data := self._leave_copy()) is not None:
            self.value = decode(data, REGISTRY)
            self.rollbacks += 1
        if self.returned and fork.masks:
            self._take_over(kept, offsets)

    def _leave_copy(self) -> bytes | None:
        """None in the process that goes on; and in its copy, when that is to take over, what it was handed."""
        self._line, self._waiting, self._owner = None, 0, os.getpid()
        ours, theirs = socket.socketpair()
        try:
            waiting = fork.copy()
        except BaseException as error:
            ours.close()
            theirs.close()
            if self.returned and isinstance(error, ForkRefused):
                return None  # it has taken over, and cannot go back once more
            raise
        if waiting:
            theirs.close()
            self._line, self._waiting = ours, waiting
            copies.OWN.add(waiting)
            return None
        ours.close()
        with theirs:
            return self._wait(theirs)

    def _wait(self, line: socket.socket) -> bytes:
        """In the waiting process: until it is to take over. Gives what it was handed."""
        global _stand_in  # noqa: PLW0603 - of the process
        try:
            while (word := _exactly(line, 1)) == b"m":
                _move_to(_SIZE.unpack(_exactly(line, _SIZE.size))[0], line)
            if word != b"t":
                fork.leave()
            data = _exactly(line, _SIZE.unpack(_exactly(line, _SIZE.size))[0])
            line.send(b"r")
            said, pipes, _, _ = socket.recv_fds(line, 1 + _SIZE.size, 1)
            if said[:1] != b"g" or len(said) != 1 + _SIZE.size or not pipes:
                fork.leave()
            guardian = _SIZE.unpack(said[1:])[0]
            _move_to(guardian, line)
        except OSError:
            fork.leave()
        os.set_inheritable(pipes[0], False)
        _stand_in = guardian, pipes[0]
        return data

    def _take_over(self, kept: Any, offsets: dict[int, tuple[int, int, int]]) -> None:
        """From here on this process is the program."""
        for one in _open:
            one._owner = os.getpid()
        for descriptor, (device, inode, offset) in offsets.items():
            with suppress(OSError):
                found = os.fstat(descriptor)
                if (found.st_dev, found.st_ino) == (device, inode):
                    os.lseek(descriptor, offset, os.SEEK_SET)
        _restore(kept)
        places.reopen_all()
        fork.take_signals()

    # -- going back ---------------------------------------------------------------------------------------------

    def rollback(self, value: Any = None) -> NoReturn:
        """Go back to the line of the ``with``: there ``point.value`` is this value, and nothing else has happened.

        It does not return. The value is the only thing that is taken along; it must be one that a state can hold.
        """
        if self not in _open:
            raise BadOption("the block of this fork point has ended", hint="Call rollback() inside of it.")
        if self._owner != os.getpid():
            raise BadOption(
                "this process was forked inside the block", hint="Return the value to the one that forked it."
            )
        if threading.current_thread() is not threading.main_thread():
            raise BadOption("a fork point is gone back to by the main thread", hint="Return the value to it.")
        data = encode(value, REGISTRY)
        if len(data) > VALUE_MAX_BYTES:
            raise BadOption(f"a value of {len(data):,} bytes is too long to be taken along", hint="Put it into a file.")
        line = self._line
        if line is None:
            raise self._lost()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            line.settimeout(ANSWER_S)
            line.sendall(b"t" + _SIZE.pack(len(data)) + data)
            if _exactly(line, 1) != b"r":
                raise self._lost()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            raise self._lost() from error
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            raise
        self._give_way(line)

    def _lost(self) -> ForkLost:
        return ForkLost(
            "the process that waited at the fork point is gone; this one goes on",
            hint="Memory may have been short: see the kernel's log. Files and stores are untouched.",
        )

    def _give_way(self, line: socket.socket) -> NoReturn:
        """Let go of everything, and stand in for the process that goes on. There is no way back from here."""
        for one in reversed(_open[_open.index(self) + 1 :]):
            one.dismiss()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        for _ in range(3):  # an interrupt may come by way of another thread
            with suppress(BaseException):
                places.release_all()
                break
        if _stand_in is not None:
            guardian, pipe = _stand_in
            for one in _open[: _open.index(self)]:
                one.move_to(guardian)
            with suppress(OSError):  # where it has ended meanwhile, that is how the program ends
                socket.send_fds(line, [b"g" + _SIZE.pack(guardian)], [pipe])
                os.write(pipe, b"%d\n" % self._waiting)
                if self._waiting in copies.OWN:
                    _exactly(line, 1)
            fork.leave()
        successors, pipe = os.pipe()
        fork.adopt()
        with suppress(OSError):
            socket.send_fds(line, [b"g" + _SIZE.pack(os.getpid())], [pipe])
        os.close(pipe)
        os.set_inheritable(successors, True)
        with suppress(OSError, TypeError):
            # Another program, so that nothing of this one's memory, files and threads stays.
            words = [sys.executable, "-I", "-S", shell.__file__, str(self._waiting), str(successors)]
            os.execv(sys.executable, words)  # noqa: S606 - our own interpreter, our own code
        shell.stand_in(self._waiting, successors)


def _move_to(guardian: int, line: socket.socket) -> None:
    """In a waiting process whose parent is about to end: live on, as a child of the one that stands in for all."""
    if os.getppid() != guardian:
        fork.outlive()
        line.send(b"l")
        while os.getppid() != guardian:
            time.sleep(0.0002)
        fork.end_with(guardian)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = line.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionResetError("the other process is gone")
        found += part
    return bytes(found)


# -- what is not in memory, or must not be the same -------------------------------------------------------------------


def _offsets() -> dict[int, tuple[int, int, int]]:
    """Where files stand that are only read, by descriptor: two processes share one place in each.

    One that is written to stays where it is, behind what was written meanwhile: files do not go back.
    """
    found = {}
    for name in Path("/proc/self/fd").iterdir():
        descriptor = int(name.name)
        with suppress(OSError, ValueError, IndexError):
            about = os.fstat(descriptor)
            flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0], 8)
            if S_ISREG(about.st_mode) and flags & os.O_ACCMODE == os.O_RDONLY:
                found[descriptor] = about.st_dev, about.st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
    return found


def _generators() -> Any:
    """The state of the generators that everybody shares."""
    random = sys.modules.get("random")
    numpy = sys.modules.get("numpy.random")
    return (random.getstate() if random is not None else None, numpy.get_state() if numpy is not None else None)


def _restore(kept: Any) -> None:
    """Python has given ``random`` another seed in the forked process, and NumPy knows nothing of forks."""
    random, numpy = sys.modules.get("random"), sys.modules.get("numpy.random")
    if kept is None:
        if numpy is not None:
            numpy.seed()
        return
    if random is not None and kept[0] is not None:
        random.setstate(kept[0])
    if numpy is not None and kept[1] is not None:
        numpy.set_state(kept[1])
