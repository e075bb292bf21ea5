"""A forked process at work, and the lines in which it acknowledges. What ends it is somebody else's business."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

PATIENCE_S = 120.0
"""Far above what any life takes on a busy machine: only one that hangs gets there."""


class Victim:
    def __init__(self, life: Callable[[Callable[[str], None]], None]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            with suppress(BaseException):  # the disk below it may go away: every error is right, and nobody listens
                life(lambda line: _write_line(writing, line))
            os._exit(0)
        os.close(writing)
        self._text = b""

    def wait_for(self, line: str, limit_s: float = PATIENCE_S) -> None:
        ends = time.monotonic() + limit_s
        os.set_blocking(self._reading, False)
        while line.encode() + b"\n" not in self._text and time.monotonic() < ends:
            with suppress(BlockingIOError):
                part = os.read(self._reading, 1 << 16)
                if not part:
                    break
                self._text += part
            time.sleep(0.001)
        os.set_blocking(self._reading, True)

    def so_far(self) -> list[str]:
        """All that it has said until now."""
        os.set_blocking(self._reading, False)
        with suppress(BlockingIOError):
            while part := os.read(self._reading, 1 << 16):
                self._text += part
        os.set_blocking(self._reading, True)
        return self._lines()

    def end(self) -> list[str]:
        """Kill it; all that it said."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> list[str]:
        """Until it ends; all that it said."""
        while part := os.read(self._reading, 1 << 16):
            self._text += part
        os.waitpid(self.pid, 0)
        os.close(self._reading)
        return self._lines()

    def _lines(self) -> list[str]:
        return self._text.decode().split("\n")[:-1]


def _write_line(fd: int, line: str) -> None:
    os.write(fd, line.encode() + b"\n")
